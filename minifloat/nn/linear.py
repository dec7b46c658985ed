"""``Linear``: an ``nn.Linear`` whose GEMMs run on quantized operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import Count, Device, FloatDtype, Size, checked
from minifloat.autocast import is_batch_invariant, used
from minifloat.comm.dtensor_ddp import is_dtensor
from minifloat.comm.group import Group
from minifloat.functional.autograd import apply, as_output, exporting
from minifloat.functional.etp.rows import Reduction
from minifloat.functional.linear import LinearFunction, apply_eagerly
from minifloat.functional.quantize import Mode, calibrate, reuse
from minifloat.nn import linear_call, options
from minifloat.nn.linear_call import needs_eager, run_eager
from minifloat.nn.linear_state import LinearState
from minifloat.nn.options import InitMethod, check_tensor, one_dtype
from minifloat.nn.quantized_parameters import parameter_init, quantize_weights, write
from minifloat.nn.tensor_parallel import mark, partitions, shard_rows, tensor_parallel
from minifloat.ops import matmul
from minifloat.quantizer import DTYPES, Quantizer
from minifloat.recipe import Recipe, RecipeLike
from minifloat.recompute import exchange_of
from minifloat.tensor import QuantizedTensor

_VALUES = Quantizer.identity().with_usage(columnwise=False)


class Linear(LinearState, nn.Linear):
    """Linear layer, Y = X W^T + b, like ``nn.Linear``; with an active recipe it multiplies quantized operands.

    Args:
        in_features, out_features, bias, device, dtype: like ``nn.Linear``; any sizes.
        recipe: the layer's own recipe or its short name, which takes precedence over ``autocast``; ``"none"`` always
            keeps the layer in high precision; None uses the recipe of ``autocast``.
        name: the layer's name in recipes and errors.
        fuse_wgrad_accumulation: add dW to ``weight.main_grad`` (a buffer that you provide, fp32 as a rule), set
            ``weight.grad_added_to_main_grad`` and return no gradient for it. After a forward with
            ``is_first_microbatch=True`` the first dW, of any use, replaces what is there; all uses of the weight in
            that microbatch must be forwarded before the first of their backwards.
        delay_wgrad_compute: backward leaves dW to :meth:`backward_dw`; no optimizer steps while one waits.
            ``zero_grad`` and ``is_first_microbatch=True`` drop those of a step that was given up.
        save_original_input: forward saves X itself and backward quantizes it again: this costs a cast, and saves memory
            if X is kept alive anyway.
        return_bias: forward returns (X W^T, b), which the caller adds.
        parameters_split: names and numbers of rows, or names alone for equal numbers: the weight has one parameter for
            each name (``query_weight``, ``query_bias``, ...) and is multiplied as one.
        init_method: fills the weight in place, and the bias starts as zeros; default: both as ``nn.Linear``.
        params_dtype: another name of ``dtype``.
        parallel_mode: ``"column"`` splits ``out_features`` over the ranks of a group, ``"row"`` ``in_features``:
            arguments are sizes of the full layer, attributes sizes on this rank; ``functional/exchange.py`` has shapes
            and equations. All ranks start from one seed, like the unsharded layer; each parameter has Megatron's
            attributes ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``.
        sequence_parallel: activations not split by columns are split by rows, along dim 0.
        tp_group, tp_mesh: the ranks: a process group, or one dim of a device mesh. ``tp_size``: their number.
        etp_group: ranks with different data that shard the rows of the weight: extended tensor parallelism
            (``docs/etp.md``). The parameter is this rank's rows, with ``tp_group`` of the tensor-parallel part.
            :func:`~minifloat.distributed.reduce_replicated` reduces the gradients of all other parameters.
        etp_reduction: reduction of the weight's gradient over ``etp_group``, ``"mean"`` or ``"sum"``.
        fused_parts: row counts of the parts of a column-parallel weight (gate and up), each of which is split
            separately, as parts of ``parameters_split`` always are.

    Activations are computed in the dtype of X, or of ``torch.autocast``; weights are quantized straight from the
    parameter, whatever its dtype. State dict keys are those of ``nn.Linear``, and under delayed scaling also
    ``forward_scaling.*`` and ``backward_scaling.*``, which a checkpoint may lack.

    Raises:
        TypeError: ``recipe`` is not one, or X is not floating point.
        ValueError: an unknown recipe name; X's last dim is not ``in_features``; an unsupported dtype, or without recipe
            and ``torch.autocast`` one that is not the weight's; parts that do not add up to ``out_features``; sizes
            that do not divide by the number of ranks; sequence parallelism with delayed scaling whose amaxes not all
            ranks agree on.
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
        self._exchange = tensor_parallel(self._label, parallel_mode, sequence_parallel, tp_group, tp_size, tp_mesh)
        split = self._named_split(parameters_split)
        self._share_out(split, fused_parts)
        super().__init__(self.in_features, self.out_features, bias, device=device, dtype=dtype)
        if split is not None:
            self._split(split)
        quantize_weights(self, parameter_init())
        if (ranks := Group.of(etp_group)).size > 1:
            shard_rows(self, ranks, etp_reduction)
        self._mark_parameters()
        if isinstance(self.recipe, Recipe):
            linear_call.check_weight_dtype(self, self._weight(self._weight_names[0]).dtype)
            self._config(self.recipe)

    def forward(
        self,
        x: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        rows_per_rank: Sequence[int] | None = None,
    ) -> Any:
        """Computes Y [..., out_features] of X [..., in_features]; returns also the bias if ``return_bias``.

        Under sequence parallelism dim 0 of X (column) or of Y (row) has this rank's rows.

        Args:
            is_first_microbatch: True quantizes the weight and caches the result; False uses the cache if the parameter
                has not changed since (see :meth:`invalidate`); None caches nothing. There is no cache under
                :func:`~minifloat.distributed.fully_shard`, where each gather replaces the weight.
            fp8_output: return Y quantized, as the next layer would quantize it.
            fp8_grad: return the gradient of X quantized.
            rows_per_rank: those row counts, of all ranks; by default equal. Every rank must pass the same: unequal rows
                without it, or counts that differ by rank, end in an error or a timeout of the backend.
        """
        compiling = torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag
        quantized = fp8_output or isinstance(x, QuantizedTensor)
        if compiling and needs_eager(self, is_first_microbatch, quantized, fp8_grad):
            return run_eager(Linear.forward, self, x, is_first_microbatch, fp8_output, fp8_grad, rows_per_rank)
        exchange = self._exchange
        if exchange.mode is not None or rows_per_rank is not None:
            check_tensor(x, self)
            exchange = exchange_of(self).of_call(x.shape, rows_per_rank, self)
        linear_call.check_input(self, x, is_first_microbatch)
        recipe = self._recipe
        if not isinstance(recipe, Recipe) and (recipe := linear_call.recipe_in_force(self)) is None:
            if (calibration := linear_call.calibration_of(self)) is not None:
                calibrate([x.detach(), self._own_values()], ["input", "weight"], calibration)
            rows_alone = used.batch_invariant and is_batch_invariant()
            if exchange.mode is not None or self._etp is not None or rows_alone:
                linear_call.check_dtype(self, x)
            elif not (self.fuse_wgrad_accumulation or self.delay_wgrad_compute or self.wgrad_in_weight_dtype):
                return self._high_precision(x)
            recipe = linear_call.UNQUANTIZED  # PyTorch's own linear cannot do what is asked
        dtype, quantized = x.dtype, type(x) is not Tensor and isinstance(x, QuantizedTensor)
        if compiling or dtype not in DTYPES or torch._C._is_any_autocast_enabled():
            dtype = linear_call.compute_dtype(self, x)
            x = x.to(dtype)
        linear, weight, bias = linear_call.prepare_call(
            self, recipe, dtype, x.requires_grad, is_first_microbatch, fp8_output, fp8_grad, exchange, False, quantized,
            compiling and linear_call.takes_node(self, is_first_microbatch),
        )  # fmt: skip
        spec, exchange, _, given = linear
        if quantized and not exchange.gathers_x:
            given.x = reuse(x, spec.x)
        run: Callable[..., Tensor] = apply_eagerly if spec.eager else LinearFunction.apply
        y = run(*linear, x, weight, bias)
        if given.delayed is not None:
            given.delayed.forward_finished()
        if used.check_finite:
            self._check_finite(x, y)
        return (y, linear_call.returned_bias(self, exchange)) if self.return_bias else y

    def _high_precision(self, x: Tensor) -> Any:
        linear_call.check_dtype(self, x)
        linear_call.replayed_scale(self, None, None, torch.compiler.is_compiling())
        weight, bias = self._weight_matrix(), self._bias_vector()
        if isinstance(weight, QuantizedTensor) and weight.gatherer is not None and not torch.compiler.is_compiling():
            weight.gatherer.fetch_for(_VALUES, self._label)
        if isinstance(weight, QuantizedTensor) and exporting():
            weight = weight.dequantize()  # a program holds plain tensors
        matmul.record("fprop", "identity", "identity", "torch")
        y = F.linear(x, weight, None if self.return_bias else bias)
        if y.dim() > 2:
            y = as_output(y, y.shape)  # PyTorch's is a view of a matrix
        if used.check_finite:
            self._check_finite(x, y)
        return (y, bias) if self.return_bias else y

    # ---- the parameters: one or several, whole or this rank's share ----

    @property
    def _label(self) -> str:
        """Name of the layer in errors."""
        if self.name or torch.compiler.is_compiling():  # sizes of modules that FSDP2 manages are symbols to a compiler
            return f"Linear {self.name!r}"
        return f"Linear({self.in_features}, {self.out_features})"

    def _weight_matrix(self) -> Tensor:
        """Returns this rank's W [out_features, in_features]: the parameter, or all of ``parameters_split`` as one."""
        if self._etp is not None:
            return self._etp.grad_anchor((self.out_features, self.in_features))
        if self.parameters_split is None:
            return self.weight
        own: Any = self._parameters
        parts = [own[name] if name in own else getattr(self, name) for name in self._weight_names]
        whole = self._gathered_weight() if isinstance(parts[0], QuantizedTensor) else None
        return torch.cat(parts) if whole is None else apply(_Joined, whole, *parts)

    def whole_weight(self) -> Tensor:
        """Gathers the full W over ``etp_group``, in the dtype of the parameter; without a group returns W itself.

        Use it for functions that read the weight, such as :func:`~minifloat.linear_cross_entropy`: its gradient is
        reduced, and added to that of this rank's rows. Tensor-parallel parts are not gathered.
        """
        return self._weight_matrix() if self._etp is None else self._etp.full()

    def _weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Returns W, and b where forward adds it; from ``_parameters``: nn.Module's ``__getattr__`` takes longer."""
        own = self._parameters
        weight = own.get("weight")
        if weight is not None and self.parameters_split is None and self._etp is None and "bias" in own:
            return weight, None if self.return_bias else own["bias"]
        return super()._weight_and_bias()  # some may be no parameters any more

    def _gathered_weight(self) -> QuantizedTensor | None:
        """Returns W where FSDP2 has gathered ``parameters_split`` as codes of one matrix; it gets no gradient."""
        first = getattr(self, self._weight_names[0])
        full: QuantizedTensor | None = getattr(getattr(first, "gatherer", None), "full", None)
        return full

    def _bias_vector(self) -> Tensor | None:
        """Returns this rank's b [out_features], likewise."""
        if self.parameters_split is None:
            return self.bias
        own: Any = self._parameters
        names = self._bias_names
        return torch.cat([own[name] for name in names]) if names else None

    @property
    def _weight_names(self) -> tuple[str, ...]:
        """Names of the parameters that make up the weight."""
        return ("weight",) if self.parameters_split is None else tuple([f"{n}_weight" for n in self.parameters_split])

    @property
    def _matrices(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of the one matrix; none where a subclass transposes it."""
        return (self._weight_names,) if type(self)._weight_matrix is Linear._weight_matrix else ()

    @property
    def _bias_names(self) -> tuple[str, ...]:
        """Names of the parameters that make up the bias; empty if there is none."""
        if self.parameters_split is None:
            return () if self._parameters.get("bias") is None else ("bias",)
        names = [f"{name}_bias" for name in self.parameters_split]
        return tuple([name for name in names if self._parameters.get(name) is not None])

    @property
    def _has_bias(self) -> bool:
        return bool(self._bias_names)

    # ---- the start ----

    def reset_parameters(self) -> None:
        """Draws initial values, of quantized weights too, and resets delayed scaling's state."""
        self._reset_histories()
        fan_in = self.in_features * (self._exchange.group.size if self._exchange.mode == "row" else 1)
        bound = 0.0 if self.init_method is not None or not fan_in else fan_in**-0.5
        self._fill("weight", self._weight_names, lambda weight: options.initialize(weight, self.init_method))
        self._fill("bias", self._bias_names, lambda bias: nn.init.uniform_(bias, -bound, bound))

    def _fill(self, kind: str, names: Sequence[str], init: InitMethod) -> None:
        """Fills parameters that are ranges of the rows of one tensor: ``init`` is given that, as before the split.

        Of a sharded layer it is given the tensor of all ranks, each of which keeps its own, be it tensor-parallel or
        FSDP2's: the layer starts as the unsharded one does from the same seed.
        """
        parts, partition = [getattr(self, name) for name in names], self._partitions.get(kind)
        plain = all(not isinstance(part, QuantizedTensor) and not is_dtensor(part) for part in parts)
        sharded = kind == "weight" and self._etp is not None
        if len(parts) == 1 and plain and partition is None and not sharded:
            init(parts[0])
        elif parts:
            rows = self._etp.rows.lengths if self._etp is not None and sharded else [part.shape[0] for part in parts]
            shape = (sum(rows), *parts[0].shape[1:])
            shape = shape if partition is None else partition.whole_shape(shape)
            whole = torch.empty(shape, dtype=parts[0].dtype, device=parts[0].device)
            init(whole)
            own = whole if partition is None else partition.cut(whole)
            for name, part, values in zip(names, parts, own.split(list(rows)), strict=True):
                write(self, name, part, values)

    def _named_split(self, split: Mapping[str, int] | Sequence[str] | None) -> Mapping[str, int] | None:
        """Gives each name of ``parameters_split`` its rows; names alone share all rows out equally.

        Raises:
            ValueError: no names, one that is given twice or cannot be an attribute's, or rows that do not divide.
        """
        if split is None:
            return None
        names = list(split)
        if not names or len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
            raise ValueError(f"{self._label}: parameters_split {split!r} must have different names, such as 'query'")
        if isinstance(split, Mapping):
            return split
        if self.out_features % len(names):
            raise ValueError(
                f"{self._label}: out_features={self.out_features} does not divide by the {len(names)} names of "
                f"parameters_split; give the rows of each, as in {{{names[0]!r}: ...}}"
            )
        return dict.fromkeys(names, self.out_features // len(names))

    def _share_out(self, split: Mapping[str, int] | None, fused: Sequence[int] | None) -> None:
        """Sets the sizes of this rank's part."""
        parts: Mapping[str, int] = {"out_features": self.out_features}
        if fused is not None:
            parts = {f"fused_parts[{i}]": rows for i, rows in enumerate(fused)}
        if split is not None:
            parts = split
        if sum(parts.values()) != self.out_features or any(rows < 0 for rows in parts.values()):
            option = "parameters_split" if split is not None else "fused_parts"
            raise ValueError(f"{self._label}: {option} {dict(parts)} must add up to out_features={self.out_features}")
        self._partitions = partitions(self._label, self._exchange, self.in_features, parts)
        if self._exchange.mode == "column":
            self.out_features //= self._exchange.group.size
        elif self._exchange.mode == "row":
            self.in_features //= self._exchange.group.size

    def _mark_parameters(self) -> None:
        """Notes on the parameters of a sharded layer how they are split."""
        super()._mark_parameters()
        for kind, names in (("weight", self._weight_names), ("bias", self._bias_names)) if self._exchange.mode else ():
            whole, split = self._partitions.get(kind), self.parameters_split or {}
            for name in names:
                own = whole
                if whole is not None and whole.dim == 0 and len(names) > 1:
                    own = whole._replace(parts=(split[name.removesuffix(f"_{kind}")] * whole.size,))
                mark(getattr(self, name), own)

    def _split(self, sizes: Mapping[str, int]) -> None:
        """Replaces weight and bias by parameters for ranges of their rows, with the same values."""
        if self.fuse_wgrad_accumulation or self.delay_wgrad_compute:
            raise ValueError(
                f"{self._label}: parameters_split with fuse_wgrad_accumulation or delay_wgrad_compute is not "
                "supported: they need the weight as one parameter"
            )
        shares = self._exchange.group.size if self._exchange.mode == "column" else 1
        sizes = self.parameters_split = {name: rows // shares for name, rows in sizes.items()}
        for kind in ("weight", "bias"):
            whole = self._parameters.pop(kind)
            parts = [None] * len(sizes) if whole is None else whole.detach().split(list(sizes.values()))
            for name, part in zip(sizes, parts, strict=True):
                parameter = None if part is None else nn.Parameter(part.clone())
                self.register_parameter(f"{name}_{kind}", parameter)

    @checked
    def set_tensor_parallel_group(self, tp_group: ProcessGroup | DeviceMesh) -> None:
        """Replaces the group of ranks from the next forward on by another of the same size; parameters do not change.

        Raises:
            ValueError: the layer is not sharded, or over another number of ranks.
        """
        group = Group.of(tp_group)
        if self._exchange.mode is None or group.size != self._exchange.group.size:
            raise ValueError(
                f"{self._label}: its parameters are for tp_size={self._exchange.group.size}, not for a group of "
                f"{group.size} ranks; make a new layer with tp_group"
            )
        self._exchange = self._exchange.over(group)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self._has_bias}"
        split = "" if self.parameters_split is None else f", parameters_split={self.parameters_split}"
        if self._exchange.mode is not None:
            split += f", parallel_mode={self._exchange.mode!r}, tp_size={self._exchange.group.size}"
            split += ", sequence_parallel=True" * self._exchange.sequence_parallel
        if self._etp is not None:
            split += f", etp_size={self._etp.sharding.group.size}"
        recipe, from_autocast = linear_call.recipe_in_force(self), self.recipe is None
        name = type(recipe).__name__ if recipe is not None else "autocast" if from_autocast else "none"
        return sizes + split + f", recipe={name}" + (" (autocast)" if recipe is not None and from_autocast else "")


class _Joined(torch.autograd.Function):
    """Joins parameters to a matrix that is there already; the gradient of each is that of its rows."""

    @staticmethod
    def forward(ctx: Any, whole: QuantizedTensor, *parts: Tensor) -> Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        if torch.compiler.is_compiling():
            return whole.detach()
        joined = QuantizedTensor.from_operands(whole.operands, whole.quantizer, whole.shape, whole.dtype)
        joined.gatherer = whole.gatherer  # what detach() does, which takes several times as long
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *[own if wanted else None for own, wanted in zip(grad.split(ctx.rows), needed, strict=True)]
