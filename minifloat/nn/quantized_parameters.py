"""Parameters that are kept quantized: ``quantized_model_init``, and how they are made, loaded and moved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat.arguments import checked
from minifloat.autocast import get_default_recipe
from minifloat.comm.collectives import all_reduce_max
from minifloat.comm.dtensor import own_rows
from minifloat.comm.group import Group
from minifloat.formats import COLUMNWISE, ELEMENTS, Format
from minifloat.ops.delayed import FLT_MAX
from minifloat.quantizer import DTYPES, Quantizer, find_amaxes
from minifloat.recipe import Recipe, RecipeLike, as_recipe
from minifloat.tensor import QuantizedTensor, quantize


class ParameterInit(NamedTuple):
    """What :func:`quantized_model_init` says to the modules made inside."""

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
    """Modules made inside keep the weights of their GEMMs quantized, as :class:`~minifloat.QuantizedTensor` parameters.

    So do the layers of models that :func:`~minifloat.convert` converts inside.

    Such a weight keeps the formats that ``recipe`` gives weights, whatever recipe is in force later: without one the
    layer computes on the dequantized weight, under another one the GEMM takes the weight as it is where the formats can
    be multiplied and a fresh cast of its value where not. Biases, and the weights of modules whose recipe is
    ``"none"``, stay in high precision.

    Under delayed scaling a weight is cast with the scale of its values when it is initialized or loaded from a state
    dict in high precision, and with the layer's delayed scale, which follows the amaxes of earlier steps, whenever an
    optimizer or other in-place operation writes it.

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
    _stack.inits.append(init if enabled else None)
    try:
        yield
    finally:
        _stack.inits.pop()


def parameter_init() -> ParameterInit | None:
    """How modules made now keep their weights; None: in high precision."""
    return _stack.inits[-1] if _stack.inits else None


def quantized_parameter(
    values: nn.Parameter, quantizer: Quantizer, scale: Tensor | None, preserve: bool
) -> nn.Parameter:
    """``values`` as a quantized parameter; ``scale`` as in ``minifloat.tensor.quantize``.

    Raises:
        ValueError: the dtype cannot be quantized.
    """
    if values.dtype not in DTYPES:
        raise ValueError(f"a weight of {values.dtype} cannot be kept quantized; use params_dtype=torch.bfloat16 or so")
    parameter = nn.Parameter(quantize(values, quantizer, scale=scale), requires_grad=values.requires_grad)
    if preserve and isinstance(parameter, QuantizedTensor) and not values.is_meta:
        parameter.set_high_precision_init_val(values)
    return parameter


def given_format(quantizer: Quantizer) -> Format | None:
    """The format that is cast with a delayed scale, if one is."""
    formats = (quantizer.row_format, quantizer.format(COLUMNWISE))
    return next((fmt for fmt in formats if fmt.scale_rule == "given"), None)


@torch.no_grad()
def set_scale(
    scale: Tensor, values: Sequence[Tensor], fmt: Format, margin: int, amax_group: dist.ProcessGroup | None = None
) -> None:
    """Makes a delayed scale, fp32 [1], that of ``values``: ``max * 2^-margin / amax``; kept where that is undefined.

    ``values``: tensors that share the scale, quantized or not; ``amax_group``: the ranks that have the rest of them, a
    collective then.
    """
    plain = [each.dequantize() if isinstance(each, QuantizedTensor) else each for each in values]
    amaxes = [levels[0] for levels in find_amaxes(plain, [Quantizer(Format(fmt.element))] * len(plain))]
    amax = torch.cat([level for level in amaxes if level is not None]).amax(0, keepdim=True)
    if amax_group is not None:
        (amax,) = all_reduce_max([amax], Group.of(amax_group))
    largest = torch.full_like(amax, ELEMENTS[fmt.element].max * 2.0**-margin)
    fresh = (largest / amax).clamp(max=FLT_MAX)
    scale.copy_(torch.where(amax.isfinite() & (amax > 0), fresh, scale))


@torch.no_grad()
def keep_quantized(
    weight: Tensor, before: QuantizedTensor, initial: Tensor | None, fn: Callable[[Tensor], Tensor]
) -> None:
    """After ``fn`` has moved a weight, or changed its dtype, whose (or whose rows') codes were ``before``.

    It keeps the codes where those of a plain tensor inside of a DTensor would be lost, and, while its codes are still
    the same, the ``initial`` values in high precision.
    """
    rows = own_rows(weight)
    if not isinstance(rows, QuantizedTensor):  # of parameters alone a change of the dtype leaves the codes as they are
        rows = weight._local_tensor = fn(nn.Parameter(before, requires_grad=False)).detach()  # type: ignore[attr-defined]
    if initial is not None and not rows.is_meta and isinstance(rows, QuantizedTensor):
        old, new = before._operands.any.codes, rows._operands.any.codes
        if torch.equal(old.to(new.device), new):
            rows.set_high_precision_init_val(initial)
