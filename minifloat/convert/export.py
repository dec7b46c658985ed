"""``export``, which makes a model a program for inference that holds codes of weights and not their values.

``torch.export`` traces a layer's casts of its weight like everything else. What they read does not change between
calls, so here they are run once, and the program gets what they give as buffers in place of the weights. That is a
change of the graph alone: each kind of layer is exported as it is, and computes what it computes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.utils._pytree import tree_leaves

from minifloat.arguments import checked
from minifloat.autocast import checks_finite, used
from minifloat.comm.dtensor_ddp import is_dtensor
from minifloat.nn.linear_state import LinearState
from minifloat.ops import grouped, quantize
from minifloat.tensor import QuantizedTensor

_OF_CAST = ("codes", "scale_inv", "amax")
_CASTS: dict[Any, int] = {
    quantize.amax.overload: 1,
    quantize.cast.overload: 3,
    grouped.grouped_amax.overload: 1,
    grouped.grouped_cast.overload: 3,
}
"""The operations that cast, and how many outputs each cast has; amaxes come before the first codes."""


@checked
def export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
    **options: Any,
) -> ExportedProgram:
    """Exports with ``torch.export`` for inference: the program holds codes and scales of weights as plain tensors.

    The program gives the outputs of the model in ``eval()`` under its recipes, bit for bit, and casts activations
    alone. Buffers ``layer.weight_codes``, ``layer.weight_scale_inv`` and for NVFP4 ``layer.weight_amax`` replace a
    parameter ``layer.weight`` that is multiplied quantized; delayed scales keep their current values. The model is not
    changed, and later changes of it do not reach the program.

    Args:
        model: any module in which layers of minifloat are, in ``eval()`` mode. Layers without a recipe of their own
            take that of the ``autocast`` that surrounds the call.
        args, kwargs, dynamic_shapes, strict, options: as in ``torch.export.export``.

    Returns:
        A program for ``torch.export.save`` or ``torch._inductor.aoti_compile_and_package``. A process that loads it
        imports minifloat first.

    Raises:
        ValueError: the model is in training mode; a layer is split over ranks, its weight is a DTensor or gathered from
            shards, or it runs inside of a context that its model's forward enters; ``autocast(check_finite=True)``;
            something other than its layer reads a quantized weight.
        RuntimeError: a layer is called with an option, or has no buffers for its recipe, so that it cannot be traced.
    """
    _check(model)
    with torch.no_grad():
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict, **options)
        _check_contexts(program.graph_module)
        _cast_weights(program)
        _copy_tensors(program)
    return program


# ---- what cannot be exported ----


def _check(model: nn.Module) -> None:
    layers = [module for module in model.modules() if isinstance(module, LinearState)]
    if used.check_finite and checks_finite() and layers:
        raise ValueError(
            f"export: autocast(check_finite=True) has {layers[0]._label} look at values, which no graph can; export "
            "outside of it"
        )
    if model.training:
        named = layers[0]._label if layers else type(model).__name__
        raise ValueError(f"export: {named} is in training mode, and programs are for inference; call model.eval()")
    for layer in layers:
        check_whole(layer, "export")


def check_whole(layer: LinearState, task: str) -> None:
    """Raises ValueError where ranks share the weights of ``layer``."""
    if layer._exchange.mode is not None:
        raise ValueError(
            f"{task}: {layer._label} is split over {layer._exchange.group.size} ranks; export a model that is "
            "built without parallel_mode and has loaded the whole state dict"
        )
    for weight in [layer._weight(name) for name in layer._weight_names]:
        if is_dtensor(weight) or (isinstance(weight, QuantizedTensor) and weight.gatherer is not None):
            raise ValueError(
                f"{task}: the weight of {layer._label} is sharded over ranks; export a model that is not, and has "
                "loaded the whole state dict"
            )


def _check_contexts(root: fx.GraphModule) -> None:
    """Raises where a layer's casts are in a graph of their own, in which a weight is an argument like others."""
    for part in root.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) and part is not root else ():
            if node.target in _CASTS:
                paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
                raise ValueError(
                    f"export: layer {paths[-1] if paths else ''!r} runs inside of torch.autocast or the like that the "
                    "model's forward enters; enter it around export"
                )


# ---- casting weights ahead ----


def _cast_weights(program: ExportedProgram) -> None:
    """Replaces the casts of weights by their results, and drops whatever is not read then."""
    graph, names = program.graph, _held_by_name(program)
    computed = _read(graph, _computed_of(graph, set(names)))
    casts = {node for node in computed if node.target in _CASTS or _reads_inner(node)}
    results = _results(computed, casts)
    ahead = set(casts)  # and what only they read, as the values of codes that are cast to others
    for node in reversed(computed):
        if node not in results and all(user in ahead or user in results for user in node.users):
            ahead.add(node)
    buffers: dict[str, fx.Node] = {}  # by what they were computed by: a weight may be cast several times
    latest, values = "", {}
    for node, what in results.items():
        if all(user in ahead or user in results for user in node.users):
            continue
        while viewed := _aliased(node):
            node = viewed[0]  # views are made in each call, of what is in memory as the cast gave it
        if node.op == "placeholder":
            continue  # another view of what is a buffer by now
        name, key = _name(node, names), _expression(node)
        if name != latest:  # the results for one weight may be those of one cast
            tensors = program.constants | program.state_dict
            latest, values = name, {node: tensors[held] for node, held in names.items()}
        if key not in buffers:
            buffers[key] = _add_buffer(program, f"{name}_{what}", _value(node, values), node)
        node.replace_all_uses_with(buffers[key], delete_user_cb=lambda user: user not in ahead)
    _read(graph, computed)
    _drop_unread(program, names)
    graph.lint()
    program.graph_module.recompile()


def _read(graph: fx.Graph, computed: Sequence[fx.Node]) -> list[fx.Node]:
    """Keeps those of ``computed`` that something reads, and erases the others."""
    found = []
    for node in reversed(computed):
        if node.users:
            found.append(node)
        else:
            graph.erase_node(node)
    return found[::-1]


def _held_by_name(program: ExportedProgram) -> dict[fx.Node, str]:
    """Lists the inputs that are parameters, buffers and constants, and their names."""
    kinds = InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR
    names = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.kind in kinds}
    found = [(node, names.get(node.name)) for node in program.graph.find_nodes(op="placeholder")]
    return {node: name for node, name in found if name is not None}


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Finds what some operation writes to, in place, and what that is a view of."""
    found: set[Any] = set()
    for node in reversed(graph.nodes):  # what is a view comes after what it is a view of
        found.update(_aliased(node, written=True))
        if node in found:
            found.update(node.args[:1] if node.target is operator.getitem else _aliased(node))
    return found


def _aliased(node: fx.Node, written: bool = False) -> list[fx.Node]:
    """Lists the arguments that results of an operation may be views of; ``written``: those that it writes to."""
    given: list[Any] = []
    operation = node.target
    for place, argument in enumerate(operation._schema.arguments if isinstance(operation, OpOverload) else ()):
        alias = argument.alias_info
        if alias is not None and (alias.is_write or not written):
            given.append(node.args[place] if place < len(node.args) else node.kwargs.get(argument.name))
    return [each for each in tree_leaves(given) if isinstance(each, fx.Node)]


def _computed_of(graph: fx.Graph, inputs: set[fx.Node]) -> list[fx.Node]:
    """Lists what is computed of ``inputs`` alone, in order, but for what is written to."""
    found: list[fx.Node] = []
    written = _written(graph)
    known = inputs - written
    for node in list(graph.nodes):
        if node.op != "call_function" or node in written or not known.issuperset(node.all_input_nodes):
            continue
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif not node.is_impure():
            known.add(node)
            found.append(node)
    return found


def _expression(node: fx.Node) -> str:
    """Describes how ``node`` is computed from the inputs of the graph."""
    if node.op == "placeholder":
        return node.name
    return f"{node.target}{fx.map_arg((node.args, node.kwargs), _expression)}"


def _reads_inner(node: fx.Node) -> bool:
    """Whether ``node`` is a tensor that a quantized parameter holds."""
    return str(node.target) == "export.access_subclass_inner_tensor.default"


def _results(computed: Sequence[fx.Node], casts: set[fx.Node]) -> dict[fx.Node, str]:
    """Finds results of casts, and what is made of those, as one tensor of all experts; and names them."""
    found: dict[fx.Node, str] = {}
    for node in computed:
        if _reads_inner(node):
            found[node] = str(node.args[1]).partition("_")[2]  # of "rowwise_codes"
        elif node in casts:
            for item in node.users:
                place: Any = item.args[1]
                values = node.meta["val"]
                first = next((i for i, each in enumerate(values) if each.dtype == torch.uint8), len(values))
                found[item] = "amax" if place < first else _OF_CAST[(place - first) % _CASTS[node.target]]
        elif node not in found and not str(node.target).startswith("minifloat."):
            what = next((found[each] for each in node.all_input_nodes if each in found), "")
            if what:
                found[node] = what
    return found


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Computes ``node`` from ``values``, and keeps it there."""
    if node not in values:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: _value(each, values))
        function: Any = node.target
        values[node] = function(*args, **kwargs)
    return values[node]


def _name(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """Names the parameter that ``node`` is computed of: of several, as of experts, their common path."""
    sources: set[str] = set()
    pending = [node]
    while pending:
        for each in pending.pop().all_input_nodes:
            if each not in names:
                pending.append(each)
            elif not names[each].endswith("_scaling.scale"):
                sources.add(names[each])
    if len(sources) == 1:
        return sources.pop()
    parts = zip(*[name.split(".")[:-1] for name in sources], strict=False)
    shared = [part for part, *_ in takewhile(lambda each: len(set(each)) == 1, parts)]
    return ".".join([*shared, "weight"])


def _add_buffer(program: ExportedProgram, name: str, value: Tensor, like: fx.Node) -> fx.Node:
    """Adds a buffer as another input of the graph, before those of the caller."""
    specs, free, number = program.graph_signature.input_specs, name, 1
    while free in program.state_dict:
        free, number = f"{name}_{number}", number + 1
    inputs = program.graph.find_nodes(op="placeholder")
    place = next((i for i, spec in enumerate(specs) if spec.kind == InputKind.USER_INPUT), len(specs))
    anchor = inputs[place] if place < len(inputs) else inputs[-1].next
    with program.graph.inserting_before(anchor):
        node = program.graph.placeholder("b_" + free.replace(".", "_"))
    node.target, node.meta = node.name, {"val": like.meta["val"]}
    specs.insert(place, InputSpec(InputKind.BUFFER, TensorArgument(node.name), free, persistent=True))
    program.state_dict[free] = value
    return node


def _drop_unread(program: ExportedProgram, names: Mapping[fx.Node, str]) -> None:
    """Removes parameters, buffers and constants that nothing reads."""
    specs = program.graph_signature.input_specs
    unread = {node.name: node for node in names if not node.users}
    for node in unread.values():
        program.graph.erase_node(node)
    specs[:] = [spec for spec in specs if spec.arg.name not in unread]
    targets = {spec.target for spec in specs}
    for held in (program.state_dict, program.constants):
        for name in [name for name in held if name not in targets]:
            del held[name]


def _copy_tensors(program: ExportedProgram) -> None:
    """Gives the program tensors of its own, without gradients: codes would not follow what the model becomes.

    Raises ValueError where they are not plain.
    """
    copies: dict[int, Tensor] = {}
    for held in (program.state_dict, program.constants):
        for name, tensor in held.items():
            if isinstance(tensor, QuantizedTensor):
                raise ValueError(
                    f"export: {name} is quantized, and something other than its layer reads it, which a program of "
                    "plain tensors cannot; read its dequantize(), or keep it in high precision"
                )
            if isinstance(tensor, Tensor) and id(tensor) not in copies:
                copy = tensor.detach().clone()
                is_parameter = isinstance(tensor, nn.Parameter)
                copies[id(tensor)] = nn.Parameter(copy, requires_grad=False) if is_parameter else copy
            held[name] = copies.get(id(tensor), tensor)
