"""What layers whose weights are sharded for extended tensor parallelism keep of them, and say to ``functional/etp``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.functional.etp.weight import EtpWeight, Reduction, Sharding, stand_in
from minifloat.nn.weights import Weights
from minifloat.operand import Quantized
from minifloat.tensor import QuantizedTensor


class EtpRows(Weights):
    """A layer that may keep its rows of the weight alone; see :class:`~minifloat.functional.etp.weight.Owner`.

    Its weight is one matrix, of one parameter or of several below each other: ranks share out the rows of the matrix,
    so that of a parameter among several one may have all, and another none.
    """

    _etp: Sharding | None = None
    _etp_lengths: tuple[int, ...] = ()  # rows of each parameter of the whole
    _etp_weight: EtpWeight | None = None  # made at first use: no copy and no file has it

    def _shard_rows(self, group: Group, reduction: Reduction) -> None:
        """Replaces the parameters of the weight by this rank's rows of them."""
        weights = [self._weight(name) for name in self._weight_names]
        if any(isinstance(weight, QuantizedTensor) for weight in weights):
            raise ValueError(
                f"{self._label}: etp_group shards weights in high precision, which are quantized before each gather; "
                "make the layer outside of quantized_model_init"
            )
        self._etp_lengths = tuple([weight.shape[0] for weight in weights])
        self._etp = Sharding(group, ShardMap.chunks(sum(self._etp_lengths), group.size), reduction)
        for name, weight, own in zip(self._weight_names, weights, self._etp_ranges(), strict=True):
            self._set_rows(name, weight, weight.detach()[own].clone())

    def _mark_parameters(self) -> None:
        """Notes on the parameters which ranks share them, ``etp_group``; none where each has its own whole."""
        if self._etp is not None:
            for parameter in self._etp_parameters():
                parameter.etp_group = self._etp.group

    def _set_rows(self, name: str, whole: nn.Parameter, rows: Tensor) -> None:
        parameter = nn.Parameter(rows, requires_grad=whole.requires_grad)
        parameter.__dict__.update(vars(whole))
        path, _, own = name.rpartition(".")
        self.get_submodule(path).register_parameter(own, parameter)

    def _etp_ranges(self) -> list[slice]:
        """This rank's rows of each parameter, counted in the whole of it."""
        assert self._etp is not None
        own, ends = self._etp.own, list(accumulate(self._etp_lengths))
        clamped = [
            (min(max(own.start - first, 0), end - first), min(max(own.stop - first, 0), end - first))
            for first, end in zip([0, *ends], ends, strict=False)
        ]
        return [slice(begin, end) for begin, end in clamped]

    def _etp_source(self) -> EtpWeight:
        assert self._etp is not None
        if self._etp_weight is None:
            self._etp_weight = EtpWeight(self, self._etp)
        return self._etp_weight

    def _etp_stand_in(self, shape: Sequence[int]) -> Tensor:
        return stand_in(self._etp_source(), shape, self._weight(self._weight_names[0]))

    # ---- what functional/etp asks ----

    def _etp_parameters(self) -> list[Any]:
        return [self._weight(name) for name in self._weight_names]

    def _etp_rows(self) -> list[Tensor]:
        rows = [weight.detach() for weight in self._etp_parameters()]
        return rows if len(rows) == 1 else [torch.cat(rows)]

    def _etp_scales(self) -> list[Tensor | None]:
        raise NotImplementedError

    def _etp_join(self, matrices: Sequence[Quantized]) -> Quantized:
        return matrices[0]

    def _etp_gradients(self, gradients: Sequence[Tensor]) -> Iterable[tuple[Any, Tensor]]:
        parameters = self._etp_parameters()
        return zip(parameters, gradients[0].split([each.shape[0] for each in parameters]), strict=True)
