"""Describes a linear layer under one recipe, and the options of one of its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from minifloat.comm.group import Group
from minifloat.formats import COLUMNWISE
from minifloat.quantizer import Quantizer
from minifloat.recipe import DelayedScaling, QuantizerRole, Recipe
from minifloat.recipe.base import BackwardOverride

Mode = Literal["column", "row"]
"""What ranks share of a linear: columns of Y and rows of W, or columns of X and W, which the products contract."""

FORWARD_SLOTS = ("input", "weight", "output")
BACKWARD_SLOTS = ("grad_output", "grad_input")


@dataclass(frozen=True)
class LinearConfig:
    """Configuration of one linear layer under one recipe.

    Args:
        input, weight, output, grad_output, grad_input: how each tensor is quantized.
        delayed: the recipe of the amax histories, where some tensor has one.
        fast_fprop, fast_dgrad, fast_wgrad: accumulate without moving partial sums to fp32 registers (Hopper).
        backward_override: None, or what the unquantized backward computes on.
        save_original_input: keep the input as it came for backward, and quantize it again there.
    """

    input: Quantizer
    weight: Quantizer
    output: Quantizer
    grad_output: Quantizer
    grad_input: Quantizer
    delayed: DelayedScaling | None
    fast_fprop: bool
    fast_dgrad: bool
    fast_wgrad: bool
    backward_override: BackwardOverride
    save_original_input: bool

    def describe(self) -> str:
        """Describes what decides on numbers, in words that are the same on all ranks."""
        parts = []
        for kind in FORWARD_SLOTS + BACKWARD_SLOTS:
            quantizer: Quantizer = getattr(self, kind)
            row, column = quantizer.row_format.spec, quantizer.format(COLUMNWISE).spec
            parts.append(f"{kind} {row}" + f" and {column}" * (row != column))
        if self.delayed is not None:
            parts.append(f"{self.delayed.amax_history_len} steps by {self.delayed.rules[0]}")
        return ", ".join([*parts, f"backward_override={self.backward_override}"])


def linear_config(recipe: Recipe, name: str = "", save_original_input: bool = False) -> LinearConfig:
    """Makes the configuration of a layer called ``name``. A custom recipe's factory is called here, once a role.

    Raises:
        ValueError: a custom recipe asks for delayed scaling with different parameters in one layer.
    """
    quantizers: dict[str, Quantizer] = {}
    delayed: DelayedScaling | None = None
    for kind in FORWARD_SLOTS + BACKWARD_SLOTS:
        role = QuantizerRole("linear", kind, name)
        quantizer, wanted = recipe.resolve(role)
        quantizers[kind] = quantizer
        # With "is not": PyTorch 2.11 does not trace "!=" of callables that are made in a graph.
        if wanted is not None and delayed is not None and wanted is not delayed and wanted != delayed:
            raise ValueError(
                f"layer {name or 'linear'!r}: its tensors ask for delayed scaling with different parameters, "
                f"{delayed} and {wanted}; they share one history, so they must agree"
            )
        delayed = wanted or delayed
    return LinearConfig(
        **quantizers,
        delayed=delayed,
        fast_fprop=not recipe.fp8_gemm_fprop.use_split_accumulator,
        fast_dgrad=not recipe.fp8_gemm_dgrad.use_split_accumulator,
        fast_wgrad=not recipe.fp8_gemm_wgrad.use_split_accumulator,
        backward_override=recipe.backward_override,
        save_original_input=save_original_input,
    )


class Ranks(NamedTuple):
    """Part of an exchange that a spec depends on.

    Args:
        mode, sequence_parallel: which of the five exchanges.
        group: the ranks.
    """

    mode: Mode
    sequence_parallel: bool
    group: Group


class Options(NamedTuple):
    """Options of a call beside its recipe: the key under which the layer finds its ``Spec``.

    Args:
        device: type of the device.
        dtype: of the activations: what the output and both gradients are computed to.
        weight_dtype: of the parameter.
        needs_x, needs_w, needs_b: whether input, weight and bias need gradients.
        ranks: that share the linear; None: one does it all.
        input_is_quantized: X comes quantized and is its own original: nothing else is kept of it.
        recompute_x: backward recomputes the operand of X that wgrad reads, from what the norm or activation that
            computed X saves. Only where dX is needed, backward is quantized, and no rank gathers X.
        quantize_output, quantize_grad_input: return those as :class:`QuantizedTensor`.
        batch_invariant: a row of fprop's result depends on no other row.
        gathers_weight: its rows are sharded over ranks with other data (``functional/etp``): gathered for each product,
            and their gradient reduced.
        delays_wgrad: backward leaves the computation of dW for later.
    """

    device: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    needs_x: bool
    needs_w: bool
    needs_b: bool
    ranks: Ranks | None = None
    input_is_quantized: bool = False
    recompute_x: bool = False
    quantize_output: bool = False
    quantize_grad_input: bool = False
    batch_invariant: bool = False
    gathers_weight: bool = False
    delays_wgrad: bool = False
