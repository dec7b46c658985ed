"""Parameters of the experts of a layer: one for each or one of all; whole, some of the experts, or rows of each."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from minifloat.arguments import checked
from minifloat.comm.dtensor_ddp import check_same_rows, check_when_wrapping, is_dtensor
from minifloat.comm.group import Group, cached
from minifloat.delayed import AmaxHistory, ExpertShare
from minifloat.functional.etp.rows import ExpertRows
from minifloat.functional.grouped import JoinedWeights, join_weights, stack_weights
from minifloat.nn import options
from minifloat.nn.linear_state import LinearState
from minifloat.nn.options import InitMethod
from minifloat.nn.quantized_parameters import bind_scales, write
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


class ExpertParameters(LinearState):
    """State of :class:`~minifloat.GroupedLinear`: which experts a rank has, their parameters and initial values."""

    _rows_kind = ExpertRows

    num_gemms: int  # of this rank
    num_experts: int  # of all ranks
    ep_group: Group = Group()
    first_expert: int = 0
    transposed: bool = False  # the one parameter is [G, K, N]
    single_grouped_weight: bool
    single_grouped_bias: bool
    _joined: JoinedWeights | None = None  # of separate quantized weights, as long as they lie in one piece of memory
    in_features: int
    out_features: int
    return_bias: bool
    init_method: InitMethod | None

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
    def _holder(self) -> nn.Module:
        """The module that has the one parameter of all experts."""
        return self

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

    def _add_history(self, name: str, slots: int, length: int, device: torch.device) -> None:
        share = ExpertShare(self.first_expert, self.num_gemms, self.num_experts)
        self.add_module(name, AmaxHistory(slots * self.num_gemms, length, device, share))

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
        """Keeps this rank's of all experts, in memory of their own; ``shared``: as in ``tensor_parallel.shard_rows``.

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
        for history in self.children():
            if isinstance(history, AmaxHistory):
                history.keep(ExpertShare(own.start, count, self.num_experts))
        self._joined = None
        self._join_weights()
        self._mark_parameters()
        bind_scales(self)
        self.invalidate()

    def _separate_weights(self) -> None:
        """Makes a parameter for each expert of the one of all."""
        (name,) = self._weight_names
        whole = self._weight(name)
        for number, own in zip(self._numbers(), (whole.mT if self.transposed else whole).detach(), strict=True):
            if number not in self._modules:
                self.add_module(number, Expert(None, None))
            self._modules[number].register_parameter("weight", nn.Parameter(own, whole.requires_grad))  # type: ignore[union-attr]
        self._holder.register_parameter(name, None)
        self.single_grouped_weight = False

    def _unite_weights(self, name: str) -> None:
        """Makes one parameter ``name`` of those of the experts again."""
        own = self._each("weight")

        def together(tensors: Sequence[Tensor]) -> Tensor:
            whole = torch.stack(list(tensors))
            return whole.mT.contiguous() if self.transposed else whole

        parameter = nn.Parameter(together([each.detach() for each in own]), own[0].requires_grad)
        if all(each.grad is not None for each in own):
            parameter.grad = together([each.grad for each in own])
        for number in self._numbers():
            expert: Any = self._modules[number]
            expert.register_parameter("weight", None)
            if expert.bias is None:
                del self._modules[number]
        self._holder.register_parameter(name, parameter)
        self.single_grouped_weight = True

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


@checked
def ep_parameters(model: nn.Module) -> dict[nn.Parameter, Group]:
    """Finds the parameters of a rank's experts in ``model``, and the ranks that have the other experts.

    Pass them to ``fully_shard`` as ``ignored_params`` if it shards over any of these ranks.
    """
    layers = (each for each in model.modules() if isinstance(each, ExpertParameters) and each.ep_group.size > 1)
    return {parameter: layer.ep_group for layer in layers for parameter in layer.parameters()}


def check_experts_not_replicated(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, ExpertParameters) and layer.ep_group.size > 1:
            check_same_rows(layer, layer.parameters(), "ep_group has other experts")
