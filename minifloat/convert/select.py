"""Selects the layers that are converted: what can be, rules, what is best left alone; and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeGuard

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from minifloat.arguments import Count, checked
from minifloat.convert.experts import ExpertLinear, are_experts, expert_linears, experts_obstacle, identity
from minifloat.nn.expert_parameters import Expert
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.linear import Linear
from minifloat.nn.linear_state import LinearState
from minifloat.quantizer import DTYPES
from minifloat.recipe import OwnRecipe, Recipe, RecipeLike, own_recipe

FilterFn = Callable[[nn.Module, str], bool]
"""Says whether a linear is converted, from the module and its dotted name.

Of experts each projection is a grouped linear, with ``in_features`` and ``out_features`` of one expert, and a name that
ends in that of the parameter, as ``experts.down_proj``.
"""

# Modules that a wrapper puts between a layer and its parent; users leave them out of names.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

# Linears of one input, which engines make one, as they make all experts of a block; quantized are all or none.
_MERGED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa")


class Rule(NamedTuple):
    """Recipe of all linears with a name that matches a glob pattern; ``*`` matches dots too."""

    pattern: str
    recipe: OwnRecipe

    def matches(self, names: Iterable[str]) -> bool:
        return any(fnmatchcase(name, self.pattern) for name in names)


class Named(NamedTuple):
    """Module and all its dotted names, those of wrappers left out."""

    names: tuple[str, ...]
    module: nn.Module


def read_rules(rules: Iterable[tuple[str, RecipeLike | None]]) -> list[Rule]:
    """Looks up the recipes of ``rules``.

    Raises:
        TypeError: not pairs of a pattern and a recipe.
        ValueError: an unknown recipe name.
    """
    read = []
    for rule in rules:
        if not isinstance(rule, (tuple, list)) or len(rule) != 2 or not isinstance(rule[0], str):
            raise TypeError(f'rules: {rule!r} is not a pair (pattern, recipe) such as ("*.lm_head", "none")')
        try:
            read.append(Rule(rule[0], own_recipe(rule[1])))
        except (TypeError, ValueError) as error:
            raise type(error)(f'rules: {rule[0]!r}: {error}; "none" keeps layers in high precision') from error
    return read


def named_modules(model: nn.Module) -> list[Named]:
    """Lists all modules of ``model``, each once."""
    names: dict[nn.Module, dict[str, None]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        shown = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        names.setdefault(module, {})[shown] = None
    return [Named(tuple(each), module) for module, each in names.items()]


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is Hugging Face's ``Conv1D``, a linear with the weight transposed, as in GPT-2."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_own(module: nn.Module) -> TypeGuard[Linear | GroupedLinear]:
    """Whether the module is a linear of this library that the model is made of."""
    return isinstance(module, (Linear, GroupedLinear)) and not isinstance(module, ExpertLinear)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module) or is_own(module)


def linears_of(modules: Iterable[Named]) -> list[Named]:
    """Lists what can be converted or stay as it is: linears, and the projections of experts that can be."""
    found = []
    for named in modules:
        if is_linear(named.module):
            found.append(named)
        elif are_experts(named.module) and experts_obstacle(named.module) is None:
            found += [Named(*each) for each in expert_linears(named.module, named.names)]
    return found


def merged(linears: Iterable[tuple[str, Any]], experts: bool = True) -> list[dict[str, Any]]:
    """Groups, by the names of linears, what engines make one; ``experts``: also all experts of a block."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in linears:
        base, _, last = name.removesuffix(".base_layer").rpartition(".")  # of adapters
        block, within, _ = f".{name}.".partition(".experts.")
        group = block if experts and within else next((base + names[0] for names in _MERGED if last in names), None)
        if group is not None:
            found.setdefault(group, {})[name] = value
    return list(found.values())


def is_sharded_by_fsdp(module: nn.Module) -> bool:
    """Whether the module was given to ``fully_shard``."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)  # whose class is slow to import


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """Returns (out_features, in_features)."""
    names = ("nf", "nx") if is_conv1d(module) else ("out_features", "in_features")
    out_features, in_features = (getattr(module, name) for name in names)
    return out_features, in_features


def obstacle(module: nn.Module) -> str | None:
    """Says why this linear cannot be converted; None if it can."""
    kind, weight = type(module), module._parameters.get("weight")
    if isinstance(module, LinearState):
        return None
    if hasattr(module, "parametrizations"):
        return "its weight is computed by torch.nn.utils.parametrize"
    if kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return "nn.MultiheadAttention reads its weight and does not call it"
    if weight is not None and is_lazy(weight):
        return "it has no weight yet; run a forward first"
    if kind is not nn.Linear and not is_conv1d(module):
        forward = "a forward of its own" if kind.forward is not nn.Linear.forward else "behaviour of its own"
        return f"{kind.__name__} is a subclass of nn.Linear and may have {forward}"
    if "forward" in module.__dict__:
        return "its forward was replaced on the object; convert the model before whatever did that"
    if weight is None:
        return "its weight is not a parameter: something computes it before each forward"
    if is_traceable_wrapper_subclass(weight) and type(weight).__name__ != "DTensor":
        return f"its weight is a {type(weight).__name__}, which keeps its values in a way of its own"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}; only bf16, fp16 and fp32 can be quantized"
    return None


def other_matrices(model: Iterable[Named]) -> Iterator[tuple[Named, str]]:
    """Finds modules that are not converted and hold matrices, and why; look-up tables are none."""
    for named in model:
        module, reason = named.module, "not a linear"
        if is_linear(module) or isinstance(module, (nn.Embedding, nn.EmbeddingBag, ParametrizationList, Expert)):
            continue
        if are_experts(module):
            obstacle = experts_obstacle(module)
            if obstacle is None:
                continue
            reason = f"experts that cannot be converted: {obstacle}"
        held = ((name, p) for name, p in module.named_parameters(recurse=False) if not is_lazy(p) and p.dim() > 1)
        shapes = [f"{name} {list(parameter.shape)}" for name, parameter in held]
        if shapes:
            yield named, f"{reason}; holds {', '.join(shapes)}"


class DefaultFilter:
    """Default ``filter_fn`` of :func:`minifloat.convert`: skips linears that low precision slows down or hurts.

    It skips linears before the model's first stack of blocks and after its last one (a stack is an ``nn.ModuleList``,
    ``nn.Sequential`` or ``nn.ModuleDict`` with two or more modules of one class with linears inside; in a model without
    stacks, the first and the last linear), small linears, whose cast costs more than the faster product saves, and
    linears that share their weight with a module of another kind, such as an embedding. Of linears that engines merge
    (q, k and v, gate and up, ``q_a`` and ``kv_a``, all experts of a block) it skips all if it skips one.

    Args:
        model: the model that will be converted.
        smallest: the least ``min(in_features, out_features)`` of a linear that is converted.
    """

    @checked
    def __init__(self, model: nn.Module, smallest: Count = 256) -> None:
        modules = named_modules(model)
        linears = [named.module for named in linears_of(modules)]
        reason = f"a side below {smallest} is too small to gain"
        small = {identity(linear): reason for linear in linears if min(linear_shape(linear)) < smallest}
        self._reasons = _outside_of_stacks(linears, _in_stacks(model)) | small | _tied(modules)  # by identity
        for group in merged((named.names[0], identity(named.module)) for named in linears_of(modules)):
            for name in [name for name, key in group.items() if key in self._reasons][:1]:
                reason = f"engines merge it with {name.rpartition('.')[2]}: {self._reasons[group[name]]}"
                self._reasons = dict.fromkeys(group.values(), reason) | self._reasons

    def __call__(self, module: nn.Module, name: str) -> bool:
        return self.reason(module) is None

    def reason(self, module: nn.Module) -> str | None:
        """Returns the reason to skip ``module``; None if it is converted."""
        return self._reasons.get(identity(module))


def _tied(modules: Iterable[Named]) -> dict[Any, str]:
    owners = {
        id(parameter): f"{named.names[0]} ({type(named.module).__name__})"
        for named in modules
        if not is_linear(named.module)
        for parameter in named.module.parameters(recurse=False)
    }
    weights = {named.module: id(named.module._parameters.get("weight")) for named in modules if is_linear(named.module)}
    return {module: f"its weight is also that of {owners[key]}" for module, key in weights.items() if key in owners}


def _in_stacks(model: nn.Module) -> set[nn.Module]:
    """Lists what is inside of the blocks of any stack; the blocks themselves are not."""
    inside: set[nn.Module] = set()
    for container in model.modules():
        if not isinstance(container, _CONTAINERS):
            continue
        blocks = list(container._modules.values())
        kinds = Counter(type(block) for block in blocks)
        for block in blocks:
            if block is not None and kinds[type(block)] > 1:
                inside.update(module for module in block.modules() if module is not block)
    return inside


def _outside_of_stacks(linears: list[nn.Module], in_stacks: set[nn.Module]) -> dict[Any, str]:
    holders = [module.experts if isinstance(module, ExpertLinear) else module for module in linears]
    places = [i for i, module in enumerate(holders) if module in in_stacks]
    keys = [identity(module) for module in linears]
    if not places:
        return {keys[-1]: "the model's last linear", keys[0]: "the model's first linear"} if keys else {}
    before = {key: "before the first block of the model" for key in keys[: places[0]]}
    return before | {key: "after the last block of the model" for key in keys[places[-1] + 1 :]}


# ---- what became of them ----


@dataclass(frozen=True)
class Converted:
    """Layer that was converted.

    Attributes:
        names: its dotted names in the model, more than one where the module is shared.
        shape: (out_features, in_features).
        recipe: its own recipe; None: it takes that of ``autocast``.
        quantized_weight: its weight was replaced by a quantized parameter.
        num_experts: how many experts it is a projection of, each of that shape; None: it is one linear.
    """

    names: tuple[str, ...]
    shape: tuple[int, int]
    recipe: Recipe | None
    quantized_weight: bool = False
    num_experts: int | None = None


@dataclass(frozen=True)
class LeftAlone:
    """Layer, or another module that holds matrices, that stays as it was.

    Attributes:
        names: as in :class:`Converted`.
        kind: the name of its class.
        shape: (out_features, in_features); None if it is not a linear.
        reason: why, in words.
        num_experts: as in :class:`Converted`.
    """

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, int] | None
    reason: str
    num_experts: int | None = None


@dataclass(frozen=True)
class ConversionReport:
    """Report on each linear of a model and each projection of its experts; ``print`` shows it as a table.

    Attributes:
        converted, left_alone: the layers, in the order of the model.
        warnings: rules that decided nothing, layers that PyTorch does not always call, linears that engines merge and
            that differ, and weights that ``quantize_weights`` left in high precision.
        fraction: the part of the model's parameter elements that is in converted layers, 0 to 1.
    """

    converted: tuple[Converted, ...]
    left_alone: tuple[LeftAlone, ...]
    warnings: tuple[str, ...]
    fraction: float

    def __str__(self) -> str:
        linears = len(self.converted) + sum(layer.shape is not None for layer in self.left_alone)
        lines = [
            f"converted {len(self.converted)} of {linears} linear layers, "
            f"with {100 * self.fraction:.1f} % of the model's parameters"
        ]
        lines += _table((pattern_of(each.names), _size(each), _recipe_name(each)) for each in self.converted)
        if self.left_alone:
            lines.append("left alone")
            lines += _table((pattern_of(each.names), _size(each) or each.kind, each.reason) for each in self.left_alone)
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


def _recipe_name(layer: Converted) -> str:
    name = "the recipe of autocast" if layer.recipe is None else type(layer.recipe).__name__
    return name + ", quantized weight" * layer.quantized_weight


def _size(layer: Converted | LeftAlone) -> str:
    return " x ".join(str(size) for size in (layer.num_experts, *(layer.shape or ())) if size is not None)


def pattern_of(names: tuple[str, ...]) -> str:
    """Shows the names, with ``*`` for the numbers of blocks."""
    shown = (".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in names)
    return ", ".join(name or "(the model itself)" for name in shown)


def _table(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """Aligns lines, one for all equal rows, with their number."""
    cells = [(name, f"{n} times" if n > 1 else "", size, last) for (name, size, last), n in Counter(rows).items()]
    widths = [max((len(row[i]) for row in cells), default=0) for i in range(4)]
    shown = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width] for row in cells]
    return [("  " + "  ".join(row)).rstrip() for row in shown]
