"""One call of a linear layer under a plan, as values: what it needs, what is ready, what it keeps for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.autocast import Use
from minifloat.functional.gathered import Gathered
from minifloat.functional.outputs import guarded
from minifloat.functional.plan import LinearPlan
from minifloat.functional.tensor_parallel import TensorParallel
from minifloat.operand import Layout, Operand, Quantized
from minifloat.quantizer import Quantizer
from minifloat.tensor import QuantizedTensor


@dataclass(frozen=True)
class LinearCall:
    """What differs between calls of a layer under the same plan.

    Args:
        needs_x, needs_w, needs_b: whether input, weight and bias need gradients.
        dtype: of the activations: what the output and both gradients are computed to.
        parallel: how the linear is split over ranks: what is gathered and what is summed.
        use: where delayed scaling reads its scales and records its amaxes.
        remakes_x: what wgrad reads of X is not kept: backward makes it again, of what the norm or activation that
            made X keeps for its gradient. Only where dX is wanted, backward is quantized, and no rank gathers X.
        quantize_output, quantize_grad_input: return those as :class:`QuantizedTensor`.
        main_grad: dW is added to ``weight.main_grad``; no gradient is returned for it.
        overwrite_main_grad: in the first microbatch of a step: it replaces what is there instead, once after each time
            that ``weight.main_grad_is_old`` was set.
        wgrad_tasks: dW is left for later: backward appends what computes it here.
    """

    needs_x: bool
    needs_w: bool
    needs_b: bool
    dtype: torch.dtype
    parallel: TensorParallel
    use: Use | None = None
    remakes_x: bool = False
    quantize_output: bool = False
    quantize_grad_input: bool = False
    main_grad: bool = False
    overwrite_main_grad: bool = False
    wgrad_tasks: list[Callable[[], None]] | None = None

    def needs_parameter(self, weight: Tensor) -> Tensor | None:
        """The weight if backward writes to it by itself, so that its Python attributes are kept; else None."""
        return weight if self.main_grad or self.wgrad_tasks is not None else None

    def keeps_input(self, plan: LinearPlan, x: Tensor | None) -> bool:
        """Backward reads X as it came, or casts it again; an input that came quantized is its own original."""
        return self.reads_value(plan) and not isinstance(x, QuantizedTensor)

    def reads_value(self, plan: LinearPlan) -> bool:
        """Backward reads X itself, not only its operands."""
        return self.needs_w and (plan.save_original_input or plan.backward_override == "high_precision")

    def input_quantizer(self, plan: LinearPlan, x: Tensor | None) -> Quantizer:
        """How X is quantized: columnwise too where that is what backward keeps."""
        kept_quantized = self.needs_w and plan.backward_override is None and not self.keeps_input(plan, x)
        return plan.input.with_usage(columnwise=kept_quantized and not self.remakes_x)


@dataclass
class Ready:
    """Operands of X and W that exist before the call: a quantized tensor, a cached weight, a sibling's input.

    Outside of a compiled graph the forward puts the operand of X here that it made, for the siblings to come.
    """

    x: Quantized | None = None
    w: Quantized | None = None


class Operands(NamedTuple):
    """What fprop reads, and what backward keeps of X: the same, or, where X is gathered, this rank's part of it."""

    x: Quantized | Gathered
    w: Quantized
    x_part: Quantized


class Kept(NamedTuple):
    """What the forward of one linear leaves for its backward.

    Args:
        x, w: the operands that wgrad and dgrad read; None where there is no such gradient. Where X is gathered, this
            rank's part: backward gathers again.
        x_scale: the delayed scale to cast X with again, where X was kept as it came.
    """

    x: Operand | None
    w: Operand | None
    x_scale: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """For ``save_for_backward``, where autograd's hooks see them."""
        none: tuple[None, None, None] = (None, None, None)
        x, w = (none if operand is None else operand.tensors for operand in (self.x, self.w))
        if self.x is not None and not self.x.format.quantized:  # the caller's own
            x = guarded(self.x.codes), None, None
        return (*x, *w, self.x_scale)

    @property
    def layouts(self) -> tuple[Layout | None, Layout | None]:
        """All but the tensors."""
        return None if self.x is None else self.x.layout, None if self.w is None else self.w.layout

    @staticmethod
    def of(layouts: tuple[Layout | None, Layout | None], tensors: Sequence[Tensor | None]) -> Kept:
        """Puts :attr:`tensors` and :attr:`layouts` together again."""
        x, w = (
            None if layout is None or codes is None else layout.operand(codes, scale_inv, amax)
            for layout, (codes, scale_inv, amax) in zip(layouts, (tensors[0:3], tensors[3:6]), strict=True)
        )
        if not torch.compiler.is_compiling():
            for each in (x, w):  # a read of memory that FSDP2 has freed would end the process
                assert each is None or not each.codes.numel() or each.codes.untyped_storage().size(), "not gathered"
        return Kept(x, w, tensors[6])


KEPT_TENSORS = 7
"""How many :attr:`Kept.tensors` are."""
