"""The parameters of a grouped linear: one for each expert or one of all, whole or this rank's rows of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from minifloat.comm.dtensor import is_dtensor
from minifloat.comm.shard_map import cached
from minifloat.functional.etp.rows import ExpertRows
from minifloat.functional.grouped_weight import JoinedWeights, join_weights, stack_weights
from minifloat.nn import parameters
from minifloat.nn.linear_state import LinearState
from minifloat.nn.quantized_parameters import ParameterInit
from minifloat.tensor import QuantizedTensor


class Expert(nn.Module):
    """The parameters of one expert: ``weight`` [out_features, in_features] and ``bias`` [out_features], or None."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, weight: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.register_parameter("weight", None if weight is None else nn.Parameter(weight))
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))


@cached
def _numbers(count: int, ending: str = "") -> tuple[str, ...]:
    """0, 1, ..., spelled."""
    return tuple([f"{i}{ending}" for i in range(count)])


class GroupedParameters(LinearState):
    """The weights and biases of a :class:`~minifloat.GroupedLinear`: how they are kept, joined and shared out."""

    _rows_kind = ExpertRows

    num_gemms: int
    single_grouped_weight: bool
    single_grouped_bias: bool
    _joined: JoinedWeights | None = None  # of separate quantized weights, as long as they lie in one piece of memory

    @property
    def _label(self) -> str:
        if self.name or torch.compiler.is_compiling():
            return f"GroupedLinear {self.name!r}"
        return f"GroupedLinear({self.num_gemms}, {self.in_features}, {self.out_features})"

    @property
    def _has_bias(self) -> bool:
        first: Any = self._modules.get("0")
        return self._parameters.get("bias") is not None or (first is not None and first.bias is not None)

    @property
    def _weight_names(self) -> tuple[str, ...]:
        return ("weight",) if self.single_grouped_weight else _numbers(self.num_gemms, ".weight")

    @property
    def _matrices(self) -> tuple[tuple[str, ...], ...]:
        return () if self.single_grouped_weight else tuple((name,) for name in self._weight_names)

    def _weight(self, name: str) -> nn.Parameter:
        path, _, own = name.rpartition(".")
        weight: nn.Parameter = getattr(self.get_submodule(path), own)  # no parameter, if it is computed
        return weight

    def _group_of(self, name: str) -> int:
        return int(name.partition(".")[0])

    def _each(self, kind: str) -> list[Any]:
        """The parameters of the experts, if each has its own."""
        modules: Any = self._modules
        names = _numbers(self.num_gemms)
        try:  # past nn.Module.__getattr__, of hundreds in each step
            return [modules[name]._parameters[kind] for name in names]
        except KeyError:  # one that is computed, as by torch.nn.utils.parametrize
            return [getattr(modules[name], kind) for name in names]

    def _weight_matrix(self) -> Tensor:
        """W [G, N, K]."""
        if self._etp is not None:
            return self._etp.stand_in((self.num_gemms, self.out_features, self.in_features))
        if self.single_grouped_weight:
            return self._weight("weight")
        return stack_weights(self._each("weight"), self._joined)

    def _bias_vector(self) -> Tensor | None:
        """b [G, N]."""
        together = self._parameters.get("bias")
        if together is not None or self.single_grouped_bias or not self._has_bias:
            return together
        return torch.stack(self._each("bias"))

    def _weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        return self._weight_matrix(), None if self.return_bias else self._bias_vector()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial values: those of one ``Linear`` after the other from the same seed."""
        self._reset_histories()
        together = {kind: p for kind in ("weight", "bias") if (p := self._parameters.get(kind)) is not None}
        whole = {kind: self._to_fill(kind, parameter) for kind, parameter in together.items()}
        bound = 0.0 if self.init_method is not None or not self.in_features else self.in_features**-0.5
        for i in range(self.num_gemms):
            for kind in ("weight", "bias"):
                own = None if kind in whole or "0" not in self._modules else getattr(self._modules[str(i)], kind)
                values = whole[kind][i] if kind in whole else None if own is None else self._to_fill(kind, own)
                if values is None:
                    continue
                if kind == "weight":
                    parameters.initialize(values, self.init_method)
                else:
                    nn.init.uniform_(values, -bound, bound)
                if own is not None and values is not own:
                    self._write(f"{i}.{kind}", own, values)
        for kind, parameter in together.items():
            if whole[kind] is not parameter:
                self._write(kind, parameter, whole[kind])

    def _to_fill(self, kind: str, parameter: Tensor) -> Tensor:
        """Itself; of one that is sharded or quantized memory for the whole, from which it is written."""
        rows = self._etp is not None and kind == "weight"
        if not rows and not is_dtensor(parameter) and not isinstance(parameter, QuantizedTensor):
            return parameter
        shape = (*parameter.shape[:-2], self.out_features, self.in_features) if rows else parameter.shape
        return torch.empty(shape, dtype=parameter.dtype, device=parameter.device)

    def _mark_parameters(self) -> None:
        super()._mark_parameters()
        if self._etp is not None:
            self._joined = None  # which are rows now

    def _quantize_weights(self, init: ParameterInit | None) -> None:
        quantizes = init is not None and self.recipe != "none" and self._config(init.recipe).weight.quantized
        if quantizes and self.single_grouped_weight:
            raise ValueError(
                f"{self._label}: one parameter of all experts cannot be kept quantized; use "
                "single_grouped_weight=False, or make the layer inside of quantized_model_init(enabled=False)"
            )
        super()._quantize_weights(init)
        self._join_weights()

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
        for kind, together in (("weight", self.single_grouped_weight), ("bias", self.single_grouped_bias)):
            whole, each = f"{prefix}{kind}", [f"{prefix}{i}.{kind}" for i in range(self.num_gemms)]
            if together and whole not in state_dict and all(name in state_dict for name in each):
                state_dict[whole] = torch.stack([state_dict.pop(name) for name in each])
            saved = state_dict.get(whole)
            if not together and isinstance(saved, Tensor) and saved.dim() and len(saved) == self.num_gemms:
                del state_dict[whole]
                state_dict.update(zip(each, saved.unbind(), strict=True))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        if local_metadata.get("assign_to_params_buffers", False):
            self._joined = None  # of weights that others replace now
