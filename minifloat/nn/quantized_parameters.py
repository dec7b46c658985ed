"""Parameters that are kept quantized: ``quantized_model_init``, and how they are made, loaded and moved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat.arguments import checked
from minifloat.autocast import get_default_recipe
from minifloat.comm.dtensor_ddp import local_part, local_rows
from minifloat.comm.group import Group
from minifloat.comm.sharded_cast import scale_of
from minifloat.delayed import AmaxHistory
from minifloat.functional.quantize import FORWARD_SLOTS, LinearConfig
from minifloat.nn.options import replace
from minifloat.nn.tensor_parallel import EtpModule
from minifloat.quantizer import DTYPES, Quantizer
from minifloat.recipe import OwnRecipe, Recipe, RecipeLike, as_recipe
from minifloat.tensor import QuantizedTensor, quantize


class QuantizedWeights(EtpModule):
    """Layer whose weights may be kept quantized; a :class:`~minifloat.nn.linear_state.LinearState`."""

    forward_scaling: AmaxHistory
    recipe: OwnRecipe
    _groups = 1
    _weight_margin: int
    _preserves_initial: bool

    @property
    def _label(self) -> str:
        """Name of the layer in errors."""
        raise NotImplementedError

    @property
    def _matrices(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of each matrix [N, K] that is quantized by itself; none if parameters are no rows."""
        raise NotImplementedError

    def _weight(self, name: str) -> nn.Parameter:
        return getattr(self, name)

    def _separate_weights(self) -> None:
        """Makes a parameter of each matrix, where one has them all."""
        raise NotImplementedError

    def _group_of(self, name: str) -> int:
        """Finds which of the ``_groups`` linears has the weight ``name``."""
        return 0

    def _config(self, recipe: Recipe) -> LinearConfig:
        """Finds how ``recipe`` quantizes the layer's tensors: asked at its first use, and kept."""
        raise NotImplementedError

    def _fitting_weights(self, state_dict: dict[str, Any], prefix: str) -> dict[str, Tensor]:
        """Finds by name the weights that a state dict brings, without those of another shape, which PyTorch refuses."""
        brought = {name: state_dict.get(prefix + name) for name in self._weight_names}
        return {n: w for n, w in brought.items() if isinstance(w, Tensor) and w.shape == self._weight(n).shape}


class ParameterInit(NamedTuple):
    """Arguments of :func:`quantized_model_init`, which the modules made inside read."""

    recipe: Recipe
    preserve_high_precision_init_val: bool


class _Stack(threading.local):
    def __init__(self) -> None:
        self.inits: list[ParameterInit | None] = []


_stack = _Stack()


@checked
@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: RecipeLike | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Keeps weights quantized, as :class:`~minifloat.QuantizedTensor`, in modules constructed or converted inside.

    A weight has the formats that ``recipe`` gives weights. Called without a recipe, the layer uses the dequantized
    weight; under another recipe, the GEMM reads the codes if the formats can be multiplied, otherwise a new cast of the
    values. Biases, and modules whose recipe is ``"none"``, stay in high precision. Under delayed scaling a weight is
    initialized and loaded with the scale of its values, and written with the layer's delayed scale, if that holds them.

    Args:
        enabled: False makes high-precision parameters, inside of another such context too.
        recipe: a recipe or its short name; default ``get_default_recipe()``. ``"none"`` is ``enabled=False``.
        preserve_high_precision_init_val: keep the initial values on the CPU, to start an optimizer's master weights
            from: ``weight.get_high_precision_init_val()``, ``weight.clear_high_precision_init_val()``.

    Raises:
        TypeError, ValueError: ``recipe`` is not one.
    """
    init = None
    if recipe != "none":
        chosen = get_default_recipe() if recipe is None else as_recipe(recipe)
        init = ParameterInit(chosen, preserve_high_precision_init_val)
    inits, depth = _stack.inits, len(_stack.inits)
    inits.append(init if enabled else None)
    try:
        yield
    finally:
        ordered = len(inits) == depth + 1
        del inits[depth:]
        if not ordered:
            raise RuntimeError("quantized_model_init: contexts are left in the reverse order of entering")


def parameter_init() -> ParameterInit | None:
    """Returns how modules made now keep their weights; None: in high precision."""
    return _stack.inits[-1] if _stack.inits else None


def quantize_weights(layer: QuantizedWeights, init: ParameterInit | None) -> None:
    """Replaces the weights of a layer by quantized parameters as ``init`` says; None: keeps them in high precision."""
    if init is None or layer.recipe == "none":
        return
    config = layer._config(init.recipe)
    if not config.weight.quantized:
        return
    if not layer._matrices:
        layer._separate_weights()
    layer._weight_margin = 0 if config.delayed is None else config.delayed.margin
    layer._preserves_initial = init.preserve_high_precision_init_val
    for name in layer._weight_names:
        weight = quantized_weight(layer, name, layer._weight(name), config.weight, layer._preserves_initial)
        replace(layer, name, weight)


def quantized_weight(
    layer: QuantizedWeights, name: str, values: nn.Parameter, quantizer: Quantizer, preserve: bool
) -> nn.Parameter:
    """Quantizes ``values`` as the weight ``name``, under delayed scaling with their own scale.

    Raises:
        ValueError: the dtype cannot be quantized.
    """
    if values.dtype not in DTYPES:
        raise ValueError(f"a weight of {values.dtype} cannot be kept quantized; use params_dtype=torch.bfloat16 or so")
    scale = None
    if quantizer.given is not None:
        scale = weight_scale(layer, name)
        scale.copy_(scale_of([values], quantizer, scale, Group(), layer._weight_margin))
    parameter = nn.Parameter(quantize(values, quantizer, scale=scale), requires_grad=values.requires_grad)
    if preserve and isinstance(parameter, QuantizedTensor) and not values.is_meta:
        parameter.set_high_precision_init_val(values)
    parameter.owner = layer._label  # type: ignore[attr-defined]
    return parameter


@torch.no_grad()
def write(layer: QuantizedWeights, name: str, parameter: Tensor, values: Tensor) -> None:
    """Writes this rank's part of ``values``, in the whole shape of the parameter ``name``, to it."""
    extent = None if layer._etp is None else layer._etp.rows.extents().get(name)
    own = local_part(values, layer._weight(name)) if extent is None else values[..., extent[1], :]
    rows = local_rows(parameter)
    if not isinstance(rows, QuantizedTensor):
        rows.copy_(own)
        return
    bind_scale(layer, name, rows, [values])
    rows.quantize_(own)
    if layer._preserves_initial and not own.is_meta:
        rows.set_high_precision_init_val(own)


def quantized_rows(layer: QuantizedWeights) -> dict[str, QuantizedTensor]:
    """Finds by name the weights that a layer keeps quantized; of a DTensor, as FSDP2 makes them, this rank's rows."""
    rows = {name: local_rows(layer._weight(name)) for names in layer._matrices for name in names}
    return {name: own for name, own in rows.items() if isinstance(own, QuantizedTensor)}


# ---- under delayed scaling ----


def weight_scale(layer: QuantizedWeights, name: str) -> Tensor:
    """Returns the delayed scale of the weight ``name``, fp32 [1]: a view of the history's scales."""
    slot = FORWARD_SLOTS.index("weight") * layer._groups + layer._group_of(name)
    return layer.forward_scaling.scale[slot : slot + 1]


def bind_scale(
    layer: QuantizedWeights, name: str, weight: QuantizedTensor, values: Sequence[Tensor] = (),
    amax_group: dist.ProcessGroup | None = None,
) -> None:  # fmt: skip
    """Binds a weight under delayed scaling to the layer's scale for its casts from now on, first that of ``values``.

    Writes of an optimizer then use the scale that earlier amaxes gave, though no forward casts the weight.
    ``amax_group``: the ranks that have the other rows of the values.
    """
    if weight.quantizer.given is None or "forward_scaling" not in layer._modules:
        return
    weight.scale = scale = weight_scale(layer, name)
    if values:
        plain = [each.dequantize() if isinstance(each, QuantizedTensor) else each for each in values]
        scale.copy_(scale_of(plain, weight.quantizer, scale, Group.of(amax_group), layer._weight_margin))


def bind_scales(layer: QuantizedWeights) -> None:
    """Binds all weights, after something has replaced them or the scale: no compiled forward could."""
    for name, rows in quantized_rows(layer).items():
        bind_scale(layer, name, rows)


def load_scales(layer: QuantizedWeights, state_dict: dict[str, Any], prefix: str) -> None:
    """Sets delayed scaling's scales to those of the weights which a state dict brings, where it brings none itself.

    Codes that are copied as they are need it too: the next write to the weight casts with it.
    """
    rows = {name: own for name, own in quantized_rows(layer).items() if own.quantizer.given is not None}
    if not rows or "forward_scaling" not in layer._modules:
        return
    has_scale, fitting = f"{prefix}forward_scaling.scale" in state_dict, layer._fitting_weights(state_dict, prefix)
    for names in layer._matrices:  # parameters_split share one scale
        loaded: dict[str, Tensor] = {}
        own_of = {name: rows[name] for name in names if name in rows}
        amax_group = None
        for name, own in own_of.items():
            saved = fitting.get(name)
            values = saved if saved is None else local_rows(saved)
            if values is None or (has_scale and isinstance(values, QuantizedTensor) and own._same_form(values)):
                continue
            loaded[name] = values.dequantize() if isinstance(values, QuantizedTensor) else values
            amax_group = None if values is saved and layer._etp is None else own.amax_group
        if loaded:
            device = layer.forward_scaling.scale.device  # of the weight to come, where that is assigned
            present = [loaded.get(name, own) for name, own in own_of.items() if name in loaded or not own.is_meta]
            all_values = [each.to(device) for each in present]
            for name, own in own_of.items():
                bind_scale(layer, name, own, all_values, amax_group)


@torch.no_grad()
def keep_quantized(
    weight: Tensor, before: QuantizedTensor, initial: Tensor | None, fn: Callable[[Tensor], Tensor]
) -> None:
    """Keeps codes that a plain tensor inside of a DTensor would lose, and the ``initial`` values of the same codes.

    Called after ``fn`` has moved a weight, or changed its dtype; its codes, or those of its rows, were ``before``.
    """
    rows = local_rows(weight)
    if not isinstance(rows, QuantizedTensor):  # of parameters alone a change of the dtype leaves the codes as they are
        rows = weight._local_tensor = fn(nn.Parameter(before, requires_grad=False)).detach()  # type: ignore[attr-defined]
    if initial is not None and not rows.is_meta and isinstance(rows, QuantizedTensor):
        old, new = before._operands.any.codes, rows._operands.any.codes
        if torch.equal(old.to(new.device), new):
            rows.set_high_precision_init_val(initial)
