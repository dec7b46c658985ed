"""``GroupedLinear``: the linears of many experts as one, on rows whose numbers only the device knows."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import Count, Device, FloatDtype, Size, checked, shown
from minifloat.autocast import DelayedCall, check_finite, checks_finite, used, watch_gradient
from minifloat.comm.dtensor_ddp import check_same_rows, check_when_wrapping, is_dtensor
from minifloat.comm.group import Group, cached
from minifloat.formats import Format
from minifloat.functional.etp.rows import ExpertRows, Reduction
from minifloat.functional.experts import EXPERT_WEIGHTS, Experts, quantize_weight
from minifloat.functional.grouped import (
    GroupLayout,
    JoinedWeights,
    are_alike,
    join_all,
    join_weights,
    layout_of,
    stack_weights,
)
from minifloat.functional.linear import LinearFunction, apply_eagerly
from minifloat.functional.quantize import RoleCasts, as_quantized_tensor, record_groups
from minifloat.functional.spec import Spec
from minifloat.nn import linear_call, options
from minifloat.nn.linear_call import needs_eager, run_eager
from minifloat.nn.linear_state import LinearState, reusable_operands
from minifloat.nn.options import InitMethod, one_dtype
from minifloat.nn.quantized_parameters import (
    bind_scales,
    given_format,
    parameter_init,
    quantize_weights,
    quantized_rows,
    write,
)
from minifloat.nn.tensor_parallel import shard_rows
from minifloat.operand import Quantized
from minifloat.ops.grouped import grouped_amax
from minifloat.quantizer import Quantizer, as_matrix
from minifloat.recipe import Recipe, RecipeLike
from minifloat.tensor import QuantizedTensor


class Expert(nn.Module):
    """The parameters of one expert: ``weight`` [out_features, in_features] and ``bias`` [out_features], or None."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, weight: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.register_parameter("weight", None if weight is None else nn.Parameter(weight))
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        replaced: Any = self._parameters.get(name)
        super().register_parameter(name, param)
        if hasattr(replaced, "ep_group") and param is not None:
            param.ep_group = replaced.ep_group  # type: ignore[attr-defined]


@cached
def _numbers(first: int, end: int, ending: str = "") -> tuple[str, ...]:
    """Spells the numbers from ``first`` to ``end``, without it."""
    return tuple([f"{i}{ending}" for i in range(first, end)])


class GroupedLinear(LinearState):
    """Y_g = X_g W_g^T + b_g for the rows X_g of each expert g, quantized as a linear of each would, in one launch.

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
        in_features, out_features, bias, device, dtype, params_dtype, init_method: of each, as of ``Linear``.
        recipe, name: as of ``Linear``.
        single_grouped_weight: keep all weights as one parameter ``weight`` [G, N, K], in lieu of one for each expert,
            ``0.weight`` and so on; a checkpoint of either loads.
        single_grouped_bias: the same of biases, ``bias`` [G, N].
        fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input, return_bias: as of ``Linear``; ``main_grad``
            is that of each parameter.
        etp_group, etp_reduction: as of ``Linear``; the rows of each expert's weight are shared out alike, and those of
            all experts are cast and gathered together. Biases are whole on each rank.
        ep_group: the ranks that share out the experts, G = E / p consecutive ones each, whose numbers their names keep.
            X has the rows of this rank's experts: :class:`~minifloat.GroupedMLP` sends tokens to where they are.

    Separate weights that start in one piece of memory are multiplied there; once they are not neighbours any more (as
    where something assigns ``.data``) they are copied together in each forward. Under delayed scaling each expert has
    scales of its own, in ``forward_scaling`` and ``backward_scaling``: those of all inputs, then of all weights.
    ``quantized_model_init`` keeps separate weights quantized, each as that of a ``Linear``.

    Raises:
        TypeError, ValueError: as of ``Linear``.
        ValueError: ``single_grouped_weight`` inside of ``quantized_model_init``; E that no p ranks share alike.
    """

    _rows_kind = ExpertRows

    num_gemms: int  # of this rank
    num_experts: int  # of all ranks
    ep_group: Group = Group()
    first_expert: int = 0
    single_grouped_weight: bool
    single_grouped_bias: bool
    _joined: JoinedWeights | None = None  # of separate quantized weights, as long as they lie in one piece of memory

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
        """X [M, in_features], rows sorted by expert, to Y [M, out_features], and the biases if ``return_bias``.

        Args:
            m_splits: rows of each expert, integers [G], on the device or not, or a :class:`GroupLayout`, which layers
                with the same routing may share. Rows of X beyond their sum are not read; those of Y and dX are 0.
                Counts on the device are not waited for: negative ones are taken for 0, and more rows than there are for
                all that there are, but under ``autocast(check_finite=True)``, which waits, they raise.
            is_first_microbatch: as of ``Linear``.
            fp8_output: return Y quantized, as one matrix, as the next layer would that knows no experts.
            out: memory for Y, contiguous, of its shape and dtype: kernels write there, and Y is another view of it.
            dgrad_out: the same for dX, the gradient that backward returns for X. The caller sees to it that nobody
                else writes to either while they are read.

        Raises:
            TypeError: ``m_splits`` are no integers.
            ValueError: another number of them than there are experts; negative ones, or more than there are rows, where
                the host knows them. ``out`` or ``dgrad_out`` is no such memory. ``fp8_output`` under delayed scaling,
                whose experts have scales of their own.
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
        if fp8_output and not spec.eager:
            y = as_quantized_tensor(y, spec.config.output, "output", None, type(self).__name__)
        if delayed is not None:
            delayed.forward_finished()
        if used.check_finite:
            self._check_groups_finite(x, y, layout)
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
        operands = join_all(experts)  # in a graph, where ``weight`` is their values
        self._follow_own_scale(experts[0], delayed_call, operands)
        return operands

    def _record_weight(self, delayed_call: DelayedCall | None, operands: Quantized) -> None:
        """Of rows, whose amaxes the ranks reduce at the update."""
        held: Any = operands.any
        if delayed_call is not None and held.format.scale_rule == "given":
            record_groups(delayed_call, "weight", [torch.cat([each.amax for each in held.split()])])

    def _follow_own_scale(self, weight: QuantizedTensor, delayed_call: DelayedCall | None, operands: Quantized) -> None:
        rows = quantized_rows(self).values()
        if delayed_call is None or given_format(weight.quantizer) is None:
            return
        amaxes = [own._operands.any.amax for own in rows]
        record_groups(delayed_call, "weight", [torch.cat([amax for amax in amaxes if amax is not None])])
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

    def _check_finite(self, x: Tensor, y: Tensor | None = None) -> None:
        """Not before it is known which rows are some expert's."""

    def _check_groups_finite(self, x: Tensor, y: Tensor, layout: GroupLayout) -> None:
        """Of the rows that are some expert's."""
        if not checks_finite():
            return
        total = int(layout.offsets[-1])
        check_finite(self._label, "input", as_matrix(x)[:total])
        check_finite(self._label, "weight", self._own_values())
        watch_gradient(self._label, y, total)

    # ---- the parameters: one for each expert or one of all, whole or this rank's rows of each ----

    @property
    def _label(self) -> str:
        if self.name or torch.compiler.is_compiling():
            return f"GroupedLinear {self.name!r}"
        return f"GroupedLinear({self.num_gemms}, {self.in_features}, {self.out_features})"

    @property
    def _has_bias(self) -> bool:
        first: Any = self._modules.get(str(self.first_expert))
        return self._parameters.get("bias") is not None or (first is not None and first.bias is not None)

    @property
    def _weight_names(self) -> tuple[str, ...]:
        return ("weight",) if self.single_grouped_weight else self._numbers(".weight")

    def _numbers(self, ending: str = "") -> tuple[str, ...]:
        """The numbers of this rank's experts, spelled."""
        return _numbers(self.first_expert, self.first_expert + self.num_gemms, ending)

    @property
    def _matrices(self) -> tuple[tuple[str, ...], ...]:
        return () if self.single_grouped_weight else tuple((name,) for name in self._weight_names)

    def _weight(self, name: str) -> nn.Parameter:
        path, _, own = name.rpartition(".")
        module: Any = self._modules[path] if path else self
        return module._parameters[own] if own in module._parameters else getattr(module, own)  # if it is computed

    def _group_of(self, name: str) -> int:
        return int(name.partition(".")[0]) - self.first_expert

    def _each(self, kind: str) -> list[Any]:
        """The parameters of the experts, if each has its own."""
        modules: Any = self._modules
        names = self._numbers()
        try:  # past nn.Module.__getattr__, of hundreds in each step
            return [modules[name]._parameters[kind] for name in names]
        except KeyError:  # one that is computed, as by torch.nn.utils.parametrize
            return [getattr(modules[name], kind) for name in names]

    def _weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        return self._weight_matrix(), None if self.return_bias else self._bias_vector()

    def _weight_matrix(self) -> Tensor:
        """W [G, N, K]."""
        if self._etp is not None:
            return self._etp.grad_anchor((self.num_gemms, self.out_features, self.in_features))
        if self.single_grouped_weight:
            return self._weight("weight")
        return stack_weights(self._each("weight"), self._joined)

    def _bias_vector(self) -> Tensor | None:
        """b [G, N]."""
        together = self._parameters.get("bias")
        if together is not None or self.single_grouped_bias or not self._has_bias:
            return together
        return torch.stack(self._each("bias"))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial values: those of one ``Linear`` after the other from the same seed."""
        self._reset_histories()
        together = {kind: p for kind in ("weight", "bias") if (p := self._parameters.get(kind)) is not None}
        whole = {kind: self._to_fill(kind, parameter) for kind, parameter in together.items()}
        bound = 0.0 if self.init_method is not None or not self.in_features else self.in_features**-0.5
        numbers = self._numbers()
        for expert in range(self.num_experts):
            i = expert - self.first_expert
            elsewhere = not 0 <= i < self.num_gemms
            for kind in ("weight", "bias"):
                path = numbers[0 if elsewhere else i]
                own = None if kind in whole or path not in self._modules else getattr(self._modules[path], kind)
                values = whole[kind][0 if elsewhere else i] if kind in whole else None
                values = values if own is None else self._to_fill(kind, own)
                if values is None:
                    continue
                if elsewhere:  # the same random numbers are drawn as by a process that has all
                    values = torch.empty_like(values)
                if kind == "weight":
                    options.initialize(values, self.init_method)
                else:
                    nn.init.uniform_(values, -bound, bound)
                if own is not None and values is not own and not elsewhere:
                    write(self, f"{path}.{kind}", own, values)
        for kind, parameter in together.items():
            if whole[kind] is not parameter:
                write(self, kind, parameter, whole[kind])

    def _to_fill(self, kind: str, parameter: Tensor) -> Tensor:
        """Itself; of one that is sharded or quantized memory for the whole, from which it is written."""
        rows = self._etp is not None and kind == "weight"
        if not rows and not is_dtensor(parameter) and not isinstance(parameter, QuantizedTensor):
            return parameter
        shape = (*parameter.shape[:-2], self.out_features, self.in_features) if rows else parameter.shape
        return torch.empty(shape, dtype=parameter.dtype, device=parameter.device)

    def _mark_parameters(self) -> None:
        super()._mark_parameters()
        if self.ep_group.size > 1:
            check_when_wrapping(check_experts_not_replicated)
            for parameter in self.parameters():
                parameter.ep_group = self.ep_group  # type: ignore[attr-defined] # others are on other ranks
        if self._etp is not None:
            self._joined = None  # which are rows now

    @torch.no_grad()
    def _share_experts(self, ranks: Group, shared: MutableMapping[Tensor, nn.Parameter]) -> None:
        """Keeps this rank's of all experts, in memory of their own; ``shared``: as of ``tensor_parallel.shard_rows``.

        Separate parameters stay the objects that they are.
        """
        assert self.ep_group.size == 1 and self._etp is None
        count = self.num_experts // ranks.size
        own = slice(ranks.rank * count, (ranks.rank + 1) * count)
        for number in {*self._numbers()} - {*self._numbers()[own]}:
            self._modules.pop(number, None)
        self.ep_group, self.first_expert, self.num_gemms, self._groups = ranks, own.start, count, count
        for kind in ("weight", "bias"):
            whole = self._parameters.get(kind)
            if whole is not None:
                if whole not in shared:
                    shared[whole] = nn.Parameter(whole[own].clone(), whole.requires_grad)
                    noted = {name: value for name, value in vars(whole).items() if name != "main_grad"}
                    shared[whole].__dict__.update(noted)
                self.register_parameter(kind, shared[whole])
            elif str(own.start) in self._modules:
                experts: list[Any] = [self._modules[number]._parameters.get(kind) for number in self._numbers()]  # type: ignore[union-attr]
                if not any(each is None or isinstance(each, QuantizedTensor) for each in experts):
                    for each, values in zip(experts, torch.stack(experts).unbind(), strict=True):
                        each.data = values
        self._joined = None
        self._join_weights()
        self._mark_parameters()
        self.invalidate()

    def _join_weights(self) -> None:
        """Lets separate weights lie in one piece of memory, after something has made or moved each by itself."""
        if not self.single_grouped_weight and self._etp is None:
            self._joined = join_weights(self._each("weight"), self._joined)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_joined": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join_weights()  # copy.deepcopy copies each by itself

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._join_weights()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        own = slice(self.first_expert, self.first_expert + self.num_gemms)
        for kind, together in (("weight", self.single_grouped_weight), ("bias", self.single_grouped_bias)):
            whole, every = f"{prefix}{kind}", [f"{prefix}{i}.{kind}" for i in range(self.num_experts)]
            each = every[own]
            saved = state_dict.get(whole)
            if isinstance(saved, Tensor) and saved.dim() and len(saved) == self.num_experts > self.num_gemms:
                saved = state_dict[whole] = saved[own]
            for name in {*every} - {*each}:  # of other ranks
                state_dict.pop(name, None)
            if together and whole not in state_dict and all(name in state_dict for name in each):
                state_dict[whole] = torch.stack([state_dict.pop(name) for name in each])
            saved = state_dict.get(whole)
            if not together and isinstance(saved, Tensor) and saved.dim() and len(saved) == self.num_gemms:
                del state_dict[whole]
                state_dict.update(zip(each, saved.unbind(), strict=True))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        if local_metadata.get("assign_to_params_buffers", False):
            self._joined = None  # of weights that others replace now

    def extra_repr(self) -> str:
        sizes = f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self._has_bias}"


@checked
def ep_parameters(model: nn.Module) -> dict[nn.Parameter, Group]:
    """Finds the parameters below ``model`` that are those of a rank's experts, and the ranks that have the others.

    Give them to ``fully_shard`` as ``ignored_params`` where its ranks are some of these.
    """
    layers = (each for each in model.modules() if isinstance(each, GroupedLinear) and each.ep_group.size > 1)
    return {parameter: layer.ep_group for layer in layers for parameter in layer.parameters()}


def check_experts_not_replicated(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, GroupedLinear) and layer.ep_group.size > 1:
            check_same_rows(layer, layer.parameters(), "ep_group has other experts")
