"""``Linear``: an ``nn.Linear`` whose GEMMs run on quantized operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from minifloat import finite
from minifloat.arguments import Count, Device, FloatDtype, Size, checked
from minifloat.autocast import autocast, is_batch_invariant
from minifloat.comm.group import Group
from minifloat.functional import shared_cast
from minifloat.functional.etp.rows import Reduction
from minifloat.functional.linear import LinearFunction, apply_eagerly
from minifloat.functional.linear_config import Mode
from minifloat.functional.quantize import as_quantized_tensor, calibrate, reuse
from minifloat.nn.inputs import check_tensor
from minifloat.nn.linear_call import UNQUANTIZED, LinearCalls
from minifloat.nn.linear_parameters import LinearParameters
from minifloat.nn.parameters import InitMethod, one_dtype
from minifloat.nn.quantized_parameters import parameter_init
from minifloat.nn.tensor_parallel import tensor_parallel
from minifloat.nn.uncompiled import needs_eager, run_eager
from minifloat.recipe import Recipe, RecipeLike
from minifloat.recompute import parallel_of
from minifloat.tensor import QuantizedTensor, traced


class Linear(LinearCalls, LinearParameters):
    """Y = X W^T + b as ``nn.Linear`` computes it, through quantized operands where a recipe is in force.

    Args:
        in_features, out_features, bias, device, dtype: as of ``nn.Linear``; any sizes.
        recipe: the layer's own recipe or its short name, which wins over ``autocast``; ``"none"`` keeps the layer in
            high precision whatever surrounds it; None takes what ``autocast`` gives.
        name: what recipes and errors call the layer.
        fuse_wgrad_accumulation: add dW to ``weight.main_grad`` (a buffer that you provide, fp32 as a rule), set
            ``weight.grad_added_to_main_grad`` and return no gradient for it. After a forward with
            ``is_first_microbatch=True`` the first dW replaces what is there, and those that follow are added, of a
            weight that is used several times too; all its uses in the first microbatch must be forwarded before the
            first of their backwards.
        delay_wgrad_compute: backward leaves dW to :meth:`backward_dw`; no optimizer steps while one waits.
            ``zero_grad`` and ``is_first_microbatch=True`` drop those of a step that was given up.
        save_original_input: backward keeps X as it came and quantizes it again: costs a cast, saves memory where X is
            kept alive by somebody else anyway.
        return_bias: forward gives (X W^T, b) and leaves the addition to the caller.
        parameters_split: names and numbers of rows, or names alone of equal numbers: the weight is kept as that many
            parameters (``query_weight``, ``query_bias``, ...) and multiplied as one.
        init_method: fills the weight in place, and the bias starts as zeros; default: both as ``nn.Linear``.
        params_dtype: another name of ``dtype``.
        parallel_mode: ``"column"`` shares ``out_features`` out over the ranks of a group, ``"row"`` ``in_features``:
            the sizes given are those of all ranks, the attributes of that name this rank's. The shapes of each are in
            its exchange (``functional/exchange.py``). All ranks start from one seed, as the
            unsharded layer of that seed would; each parameter has Megatron's attributes ``tensor_model_parallel``,
            ``partition_dim`` and ``partition_stride``.
        sequence_parallel: activations that are not split by columns are split by rows, along dim 0.
        tp_group, tp_mesh: the ranks: a process group, or one dim of a device mesh.
        tp_size: their number, which may be given too.
        etp_group: ranks with other data, which share the rows of the weight: extended tensor parallelism
            (:class:`~minifloat.functional.etp.weight.EtpWeight`). The parameter is this rank's rows; with ``tp_group``
            those of the tensor-parallel part. A process group, or one dim of a device mesh; one rank changes nothing.
            :func:`~minifloat.distributed.reduce_replicated` reduces the gradients of all other parameters.
        etp_reduction: of the weight's gradients, over ``etp_group``: ``"mean"`` or ``"sum"``.
        fused_parts: rows of what a column-parallel weight is made of (gate and up), each of which is shared out by
            itself; those of ``parameters_split`` always are.

    Activations are computed in the dtype of X, or of ``torch.autocast`` where that is on; weights are quantized
    straight from the parameter, whatever its dtype. State dict keys are those of ``nn.Linear``, and under delayed
    scaling also ``forward_scaling.*`` and ``backward_scaling.*``, which may be missing from a checkpoint or extra.
    ``quantized_model_init`` keeps the weight itself quantized.

    Raises:
        TypeError: ``recipe`` is not one, or X is not floating point.
        ValueError: an unknown recipe name; X's last dim is not ``in_features``; an unsupported dtype, or without
            recipe and ``torch.autocast`` one that is not the weight's; rows of ``parameters_split`` or ``fused_parts``
            that do not add up to ``out_features``; sizes that do not divide by the number of ranks; sequence
            parallelism with delayed scaling whose amaxes not all of the ranks agree on.
    """

    @checked
    def __init__(
        self,
        in_features: Count,
        out_features: Count,
        bias: bool = True,
        device: Device | None = None,
        dtype: FloatDtype | None = None,
        *,
        recipe: RecipeLike | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        return_bias: bool = False,
        parameters_split: Mapping[str, Count] | Sequence[str] | None = None,
        init_method: InitMethod | None = None,
        params_dtype: FloatDtype | None = None,
        parallel_mode: Mode | None = None,
        sequence_parallel: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: Size = 1,
        tp_mesh: DeviceMesh | None = None,
        fused_parts: Sequence[Count] | None = None,
        etp_group: ProcessGroup | DeviceMesh | None = None,
        etp_reduction: Reduction = "mean",
    ) -> None:
        self._init_state(recipe, name or "")
        dtype = one_dtype("Linear", dtype, params_dtype)
        self.in_features, self.out_features = in_features, out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self.return_bias = return_bias
        self.init_method = init_method
        self.parallel_mode, self.sequence_parallel = parallel_mode, sequence_parallel
        self._parallel = tensor_parallel(self._label, parallel_mode, sequence_parallel, tp_group, tp_size, tp_mesh)
        split = self._named_split(parameters_split)
        self._share_out(split, fused_parts)
        super().__init__(self.in_features, self.out_features, bias, device=device, dtype=dtype)
        if split is not None:
            self._split(split)
        self._quantize_weights(parameter_init())
        if (ranks := Group.of(etp_group)).size > 1:
            self._shard_rows(ranks, etp_reduction)
        self._mark_parameters()
        if isinstance(self.recipe, Recipe):
            self._check_weight_dtype(self._weight(self._weight_names[0]).dtype)
            self._config(self.recipe)

    def forward(
        self,
        x: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        rows_per_rank: Sequence[int] | None = None,
    ) -> Any:
        """X [..., in_features] to Y [..., out_features], and the bias if ``return_bias``.

        Under sequence parallelism dim 0 of X (column) or of Y (row) is this rank's share.

        Args:
            is_first_microbatch: True quantizes the weight and keeps the result; False uses what was kept if the
                parameter has not changed since (see :meth:`invalidate`); None keeps nothing. Nothing is kept under
                :func:`~minifloat.distributed.fully_shard`, where each gather brings the weight anew.
            fp8_output: return Y quantized, as the next layer would quantize it.
            fp8_grad: return the gradient of X quantized.
            rows_per_rank: those shares, of all ranks; equal ones if not given. Every rank must give the same: unequal
                shares without it, or others on some rank, end in an error of the backend, or wait for its timeout, but
                after :func:`~minifloat.distributed.set_check` in an error that names what every rank gave.
        """
        compiling = torch.compiler.is_compiling()
        if compiling and needs_eager(self, is_first_microbatch, fp8_output, fp8_grad):
            return run_eager(Linear.forward, self, x, is_first_microbatch, fp8_output, fp8_grad, rows_per_rank)
        parallel = self._parallel
        if parallel.mode is not None or rows_per_rank is not None:
            check_tensor(x, self)
            parallel = parallel_of(self).of_call(x.shape, rows_per_rank, self._label, x.dtype)
        self._check_input(x, is_first_microbatch)
        recipe = self._recipe_in_force()
        if recipe is None:
            if (calibration := self._calibration()) is not None:
                calibrate([x.detach(), self._own_values()], ["input", "weight"], calibration)
            rows_alone = autocast.batch_invariant_used and is_batch_invariant()
            if parallel.mode is not None or self._etp is not None or rows_alone:
                self._check_dtype(x)
            elif not (self.fuse_wgrad_accumulation or self.delay_wgrad_compute or self.wgrad_in_weight_dtype):
                return self._high_precision(x)
            recipe = UNQUANTIZED  # PyTorch's own linear cannot do what is asked
        dtype = self._compute_dtype(x)
        linear, weight, bias = self._prepare(
            recipe, dtype, x.requires_grad, is_first_microbatch, fp8_output, fp8_grad, parallel,
            input_is_quantized=isinstance(x, QuantizedTensor), compiling=compiling,
        )  # fmt: skip
        (spec, exchange, _, given), source, x = linear, x, x.to(dtype)
        ranks = (exchange.group, exchange.shards) if exchange.gathers_x else None
        if ranks is None and isinstance(x, QuantizedTensor):
            given.x = reuse(x, spec.x) if spec.eager else traced.reuse(x, spec.x)
        shares = spec.eager and spec.shares_x and given.x is None
        cast = dtype, spec.x, spec.passing, ranks
        if shares:
            given.x, given.shares_x = shared_cast.find(source, cast, self), True
        run: Callable[..., Tensor] = apply_eagerly if spec.eager else LinearFunction.apply
        y = run(*linear, x, weight, bias)
        if fp8_output and not spec.eager:
            y = as_quantized_tensor(y, spec.config.output, "output", given.delayed, self._label)
        if shares:
            shared_cast.keep(source, cast, given.x, self)
        if given.delayed is not None:
            given.delayed.forward_finished()
        if finite.active:
            self._check_finite(x, y)
        return (y, self._returned_bias(parallel)) if self.return_bias else y

    @checked
    def set_tensor_parallel_group(self, tp_group: ProcessGroup | DeviceMesh) -> None:
        """Communicates with other ranks from the next forward on, as many as before; parameters stay as they are.

        Raises:
            ValueError: the layer is not sharded, or over another number of ranks.
        """
        group = Group.of(tp_group)
        if self._parallel.mode is None or group.size != self._parallel.group.size:
            raise ValueError(
                f"{self._label}: its parameters are for tp_size={self._parallel.group.size}, not for a group of "
                f"{group.size} ranks; make a new layer with tp_group"
            )
        self._parallel = self._parallel.over(group)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self._has_bias}"
        split = "" if self.parameters_split is None else f", parameters_split={self.parameters_split}"
        if self._parallel.mode is not None:
            split += f", parallel_mode={self._parallel.mode!r}, tp_size={self._parallel.group.size}"
            split += ", sequence_parallel=True" * self._parallel.sequence_parallel
        if self._etp is not None:
            split += f", etp_size={self._etp.group.size}"
        recipe, from_autocast = self._recipe_in_force(), self.recipe is None
        name = type(recipe).__name__ if recipe is not None else "autocast" if from_autocast else "none"
        return sizes + split + f", recipe={name}" + (" (autocast)" if recipe is not None and from_autocast else "")
