"""``GroupedLinear``: the linears of many experts as one, on rows whose numbers only the device knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import Count, Device, FloatDtype, Size, checked, shown
from minifloat.autocast import DelayedCall, used
from minifloat.comm.group import Group
from minifloat.formats import Format
from minifloat.functional.etp.rows import Reduction
from minifloat.functional.experts import EXPERT_WEIGHTS, Experts, quantize_weight
from minifloat.functional.grouped import (
    GroupLayout,
    are_alike,
    join_all,
    layout_of,
)
from minifloat.functional.linear import LinearFunction, apply_eagerly
from minifloat.functional.quantize import RoleCasts, record_groups
from minifloat.functional.spec import Spec
from minifloat.nn import linear_call
from minifloat.nn.expert_parameters import Expert, ExpertParameters
from minifloat.nn.linear_call import needs_eager, run_eager
from minifloat.nn.linear_state import reusable_operands
from minifloat.nn.options import InitMethod, one_dtype
from minifloat.nn.quantized_parameters import (
    bind_scales,
    parameter_init,
    quantize_weights,
    quantized_rows,
)
from minifloat.nn.tensor_parallel import shard_rows
from minifloat.operand import Quantized
from minifloat.ops.grouped import grouped_amax
from minifloat.quantizer import Quantizer, as_matrix
from minifloat.recipe import Recipe, RecipeLike
from minifloat.tensor import QuantizedTensor


class GroupedLinear(ExpertParameters):
    """Linear of each expert g on its rows, Y_g = X_g W_g^T + b_g, quantized separately, in one launch.

    ======  ================  ==================  ===============================
    tensor  shape             contracted over     quantized along, in each group
    ======  ================  ==================  ===============================
    X       [M, K]            K (M_g in wgrad)    rowwise (columnwise)
    W       [G, N, K]         K (N in dgrad)      rowwise (columnwise)
    dY      [M, N]            N (M_g in wgrad)    rowwise (columnwise)
    ======  ================  ==================  ===============================

    fprop Y_g = X_g W_g^T + b_g; dgrad dX_g = dY_g W_g; wgrad dW_g = dY_g^T X_g; db_g = the sum of the rows of dY_g.
    No scale and no block spans two experts: codes and scales are those of one :class:`~minifloat.Linear` for each.
    With ``etp_group`` a rank holds some rows of each expert's W, [n, K] or [G, n, K], and multiplies all N.

    Args:
        num_gemms: the number of experts, E; without ``ep_group`` G is E.
        in_features, out_features, bias, device, dtype, params_dtype, init_method: of each, as in ``Linear``.
        recipe, name: as in ``Linear``.
        single_grouped_weight: one parameter ``weight`` [G, N, K] for all experts, instead of one for each, ``0.weight``
            and so on; a checkpoint of either loads.
        single_grouped_bias: the same for biases, ``bias`` [G, N].
        fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input, return_bias: as in ``Linear``; ``main_grad``
            is that of each parameter.
        etp_group, etp_reduction: as in ``Linear``; the rows of all experts' weights are sharded in the same way, and
            are cast and gathered together. Biases are replicated.
        ep_group: ranks that distribute the experts, G = E / p consecutive ones each, which keep their numbers in their
            names. X has the rows of this rank's experts; :class:`~minifloat.GroupedMLP` sends tokens to them.

    Separate weights are multiplied in place while they are adjacent in memory; otherwise (as after an assignment of
    ``.data``) each forward copies them together. Under delayed scaling each expert has its own scales, in
    ``forward_scaling`` and ``backward_scaling``: first of all inputs, then of all weights. ``quantized_model_init``
    keeps each weight quantized, like a ``Linear``'s, as a separate parameter.

    Raises:
        TypeError, ValueError: as in ``Linear``.
        ValueError: E is not a multiple of the number of ranks.
    """

    @checked
    def __init__(
        self,
        num_gemms: Size,
        in_features: Count,
        out_features: Count,
        bias: bool = True,
        device: Device | None = None,
        dtype: FloatDtype | None = None,
        *,
        recipe: RecipeLike | None = None,
        name: str | None = None,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        return_bias: bool = False,
        init_method: InitMethod | None = None,
        params_dtype: FloatDtype | None = None,
        etp_group: ProcessGroup | DeviceMesh | None = None,
        etp_reduction: Reduction = "mean",
        ep_group: Group | ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self._init_state(recipe, name or "")
        dtype = one_dtype("GroupedLinear", dtype, params_dtype)
        self.ep_group = ep = Group.of(ep_group)
        if num_gemms % ep.size:
            raise ValueError(
                f"GroupedLinear: {num_gemms} experts cannot be shared out over {ep.size} ranks; ep_group must be of a "
                "size that divides them"
            )
        self.num_experts = num_gemms
        num_gemms //= ep.size
        self.num_gemms = self._groups = num_gemms
        self.first_expert = ep.rank * num_gemms
        self.in_features, self.out_features = in_features, out_features
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self.return_bias = return_bias
        self.init_method = init_method
        weights = torch.empty(num_gemms, out_features, in_features, device=device, dtype=dtype)
        biases = torch.empty(num_gemms, out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("weight", nn.Parameter(weights) if single_grouped_weight else None)
        together = biases is not None and single_grouped_bias
        self.register_parameter("bias", nn.Parameter(biases) if biases is not None and together else None)
        if not single_grouped_weight or (bias and not single_grouped_bias):
            for i, number in enumerate(self._numbers()):
                own = None if biases is None or together else biases[i]
                self.add_module(number, Expert(None if single_grouped_weight else weights[i], own))
        self.reset_parameters()
        quantize_weights(self, parameter_init())
        self._join_weights()
        self._mark_parameters()
        if (ranks := Group.of(etp_group)).size > 1:
            shard_rows(self, ranks, etp_reduction)
        if isinstance(self.recipe, Recipe):
            linear_call.check_weight_dtype(self, self._weight(self._weight_names[0]).dtype)
        if self.recipe is not None:
            self._config(self.recipe if isinstance(self.recipe, Recipe) else linear_call.UNQUANTIZED)

    # ---- calls ----

    _weight_as_it_is = EXPERT_WEIGHTS

    def forward(
        self,
        x: Tensor,
        m_splits: Tensor | Sequence[int] | GroupLayout,
        is_first_microbatch: bool | None = None,
        *,
        fp8_output: bool = False,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """Computes Y [M, out_features] of X [M, in_features], rows sorted by expert; biases too if ``return_bias``.

        Args:
            m_splits: rows of each expert, integers [G], on the device or not, or a :class:`GroupLayout`, which layers
                with the same routing may share. Rows of X beyond their sum are not read; those of Y and dX are 0. The
                host does not wait for counts on the device: negative ones become 0 and excess rows are ignored; under
                ``autocast(check_finite=True)``, which waits, they raise.
            is_first_microbatch: as in ``Linear``.
            fp8_output: return Y quantized as one matrix, as the next layer without experts would cast it.
            out: memory for Y, contiguous, of its shape and dtype; the returned Y is a view of it.
            dgrad_out: the same for dX, the gradient that backward returns for X. The caller must not let other code
                write to either while they are read.

        Raises:
            TypeError: ``m_splits`` are no integers.
            ValueError: counts that differ in number from the experts; on the host, negative counts or a sum above M; an
                ``out`` or ``dgrad_out`` of another shape, dtype or layout; ``fp8_output`` under delayed scaling, whose
                experts have their own scales.
        """
        writes = out is not None or dgrad_out is not None
        if torch.compiler.is_compiling() and needs_eager(self, is_first_microbatch, fp8_output, writes=writes):
            forward = partial(GroupedLinear.forward, fp8_output=fp8_output, out=out, dgrad_out=dgrad_out)
            return run_eager(forward, self, x, m_splits, is_first_microbatch)
        linear_call.check_input(self, x, is_first_microbatch)
        layout = layout_of(x, m_splits, self.num_gemms, self.in_features, self)
        recipe = linear_call.recipe_in_force(self)
        if recipe is None:
            linear_call.check_dtype(self, x)
            self._calibrate_groups(x, layout)
            recipe = linear_call.UNQUANTIZED
        dtype = linear_call.compute_dtype(self, x)
        x = x.to(dtype)
        y_memory = self._memory("out", out, (*x.shape[:-1], self.out_features), x)
        exchange = Experts(layout=layout, dgrad_out=self._memory("dgrad_out", dgrad_out, x.shape, x))
        linear, weight, bias = linear_call.prepare_call(
            self, recipe, dtype, x.requires_grad, is_first_microbatch, fp8_output, exchange=exchange
        )
        linear.given.out, spec, delayed = y_memory, linear.spec, linear.given.delayed
        if fp8_output and delayed is not None:
            raise ValueError(
                f"{self._label}: fp8_output=True makes one scale for Y, and under delayed scaling each expert has its "
                "own; leave it out, or use another recipe"
            )
        run: Callable[..., Tensor] = apply_eagerly if spec.eager else LinearFunction.apply
        y = run(*linear, x, weight, bias)
        if delayed is not None:
            delayed.forward_finished()
        if used.check_finite:
            self._check_finite(x, y, layout.offsets)
        return (y, self._bias_vector()) if self.return_bias else y

    def _memory(self, name: str, given: Tensor | None, shape: Sequence[int], like: Tensor) -> tuple[Tensor, ...]:
        """``given`` as a matrix of its own version, if it is there; a view would be copied."""
        if given is None:
            return ()
        fits = type(given) is Tensor and given.shape == torch.Size(shape) and given.is_contiguous()
        if not fits or (given.dtype, given.device, given.requires_grad) != (like.dtype, like.device, False):
            raise ValueError(
                f"{self._label}: {name} is {shown(given)}; a contiguous tensor of {like.dtype} and shape "
                f"{tuple(shape)} on {like.device}, without requires_grad, is needed"
            )
        return (given.detach().view(-1, shape[-1]),)

    def _own_parameters(self, weight: Tensor) -> Sequence[Any]:
        return (weight,) if self.single_grouped_weight else self._each("weight")

    def _quantize_weight(self, weight: Tensor, quantizer: Quantizer, delayed_call: DelayedCall | None) -> Quantized:
        return quantize_weight(RoleCasts([quantizer], ["weight"], weight.device.type), weight, delayed_call)

    def _weight_operands(
        self, spec: Spec, delayed_call: DelayedCall | None, weight: Tensor, is_first_microbatch: bool | None
    ) -> Quantized | None:
        experts = self._each("weight") if torch.compiler.is_compiling() and self._matrices else []
        if not experts or not are_alike(experts) or reusable_operands(experts[0], spec) is None:
            return super()._weight_operands(spec, delayed_call, weight, is_first_microbatch)
        held: Any = experts[0]._operands
        if experts[0].gatherer is not None and held.columnwise is not None and held.columnwise is not held.rowwise:
            raise RuntimeError(
                f"{self._label}: a graph would join the codes that backward reads in forward, and FSDP2 gathers them "
                "later; use single_grouped_weight=True without quantized weights, or do not compile this layer in full"
            )
        operands = join_all(experts)  # in a graph, where ``weight`` is their values
        self._follow_own_scale(experts[0], delayed_call, operands)
        return operands

    def _record_weight(self, delayed_call: DelayedCall | None, operands: Quantized) -> None:
        """Records the amaxes of a rank's rows, which the ranks reduce at the update."""
        held: Any = operands.any
        if delayed_call is not None and held.format.scale_rule == "given":
            record_groups(delayed_call, "weight", [torch.cat([each.amax for each in held.split()])])

    def _follow_own_scale(self, weight: QuantizedTensor, delayed_call: DelayedCall | None, operands: Quantized) -> None:
        rows = [*quantized_rows(self).values()] or [weight]
        if delayed_call is None or weight.quantizer.given is None:
            return
        amaxes = [own._operands.any.amax for own in rows]
        record_groups(delayed_call, "weight", [torch.cat([amax.flatten() for amax in amaxes if amax is not None])])
        if not torch.compiler.is_compiling():
            bind_scales(self)

    def _calibrate_groups(self, x: Tensor, layout: GroupLayout) -> None:
        """Records the amaxes of groups where ``autocast`` calibrates delayed scaling."""
        if (calibration := linear_call.calibration_of(self)) is None:
            return
        weight = as_matrix(self._own_values())
        uniform = GroupLayout.uniform(self.num_gemms, weight.shape[0] // self.num_gemms, x.device)
        of_groups = ("input", as_matrix(x.detach()), layout), ("weight", weight, uniform)
        for kind, matrix, groups in of_groups:
            record_groups(calibration, kind, grouped_amax(matrix, groups.offsets, [Format().spec], [-1]))

    def extra_repr(self) -> str:
        sizes = f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}"
        ranks = f", ep_size={self.ep_group.size}" if self.ep_group.size > 1 else ""
        return f"{sizes}, bias={self._has_bias}{ranks}"
