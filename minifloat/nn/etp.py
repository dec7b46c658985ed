"""What layers whose weights are sharded for extended tensor parallelism keep of them, and say to ``functional/etp``."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.arguments import checked
from minifloat.comm.ddp import check_same_rows, check_when_wrapping, running
from minifloat.comm.dtensor import own_part, own_rows
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.formats import ROWWISE
from minifloat.functional.autograd import apply, first_order
from minifloat.functional.etp.rows import Reduction, Sharding
from minifloat.functional.etp.weight import EtpWeight
from minifloat.functional.exchange import Local
from minifloat.functional.linear_config import Mode
from minifloat.functional.quantize import holds
from minifloat.functional.weight_source import computed, into_grad
from minifloat.nn.parameters import InitMethod
from minifloat.nn.tensor_parallel import Partition
from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer
from minifloat.tensor import QuantizedTensor
from minifloat.tensor.rows import QuantizedRows, rows_of

_VALUES = Quantizer.identity().with_usage(columnwise=False)


class EtpRows(nn.Module):
    """A layer that may keep its rows of the weight alone; see :class:`~minifloat.functional.etp.rows.Owner`.

    Its weight is one matrix, of one parameter or of several below each other: ranks share out the rows of the matrix,
    so that of a parameter among several one may have all, and another none. What raises ``NotImplementedError`` says
    how a class keeps them.
    """

    in_features: int
    out_features: int
    name: str
    fuse_wgrad_accumulation: bool
    delay_wgrad_compute: bool
    return_bias: bool
    parameters_split: dict[str, int] | None
    init_method: InitMethod | None
    parallel_mode: Mode | None
    sequence_parallel: bool
    _exchange: Local
    _partitions: dict[str, Partition]
    _etp: Sharding | None = None
    _etp_lengths: tuple[int, ...] = ()  # rows of each parameter of the whole
    _etp_weight: EtpWeight | None = None  # made at first use: no copy and no file has it

    @property
    def _label(self) -> str:
        """What errors call the layer."""
        raise NotImplementedError

    @property
    def _weight_names(self) -> tuple[str, ...]:
        """The names of the parameters that make up the weight."""
        return ("weight",)

    @property
    def _matrices(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of each matrix [N, K] that is quantized by itself; none if parameters are no rows."""
        raise NotImplementedError

    def _weight(self, name: str) -> nn.Parameter:
        return getattr(self, name)

    def _weight_matrix(self) -> Tensor:
        """W, this rank's, in the shape that the autograd function takes."""
        raise NotImplementedError

    def _bias_vector(self) -> Tensor | None:
        """b, likewise."""
        raise NotImplementedError

    def _weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """W, and b where forward adds it."""
        raise NotImplementedError

    def _gathered_weight(self) -> QuantizedTensor | None:
        """W where FSDP2 has gathered it as one, of several parameters."""
        return None

    def reset_parameters(self) -> None:
        """Initial values."""
        raise NotImplementedError

    @torch.no_grad()
    def _write(self, name: str, parameter: Tensor, values: Tensor) -> None:
        own_rows(parameter).copy_(self._own_part(name, values))

    # ---- this rank's rows ----

    def _shard_rows(
        self,
        group: Group,
        reduction: Reduction,
        replicas: tuple[Group, ...] = (),
        shared: MutableMapping[Tensor, nn.Parameter] | None = None,
    ) -> None:
        """Replaces the parameters of the weight, of which all ranks have the same, by this rank's rows of them.

        Args:
            group, reduction, replicas: as of :class:`~minifloat.functional.etp.rows.Sharding`.
            shared: by the whole of each, the rows that other layers have: a parameter that layers share stays one.
        """
        weights = [self._weight(name) for name in self._weight_names]
        self._etp_lengths = tuple([weight.shape[-2] for weight in weights])
        self._etp = self._sharding(group, reduction)._replace(replicas=replicas)
        shared = {} if shared is None else shared
        for place, (name, weight) in enumerate(zip(self._weight_names, weights, strict=True)):
            if weight not in shared:
                shared[weight] = self._rows_parameter(place, weight, self._own_rows(place, weight.detach()))
            path, _, own = name.rpartition(".")
            self.get_submodule(path).register_parameter(own, shared[weight])
        self._mark_parameters()

    def _sharding(self, group: Group, reduction: Reduction) -> Sharding:
        return Sharding(group, ShardMap.chunks(sum(self._etp_lengths), group.size), reduction)

    def _own_rows(self, place: int, whole: Tensor) -> Tensor:
        """This rank's rows of the parameter number ``place``, in memory of their own; quantized as the whole is."""
        own = self._etp_range(place)
        if not isinstance(whole, QuantizedTensor):
            return whole[..., own, :].clone()
        assert self._etp is not None
        group = self._etp.group
        ranges = [self._etp_range(place, rank) for rank in range(group.size)]
        rows = rows_of(whole, ShardMap(tuple([each.stop - each.start for each in ranges])), group)
        rows.scale, rows.amax_group = whole.scale, group.process_group
        return rows

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of ``nn.Module``; what takes the place of a parameter that ranks share says so too."""
        replaced = self._parameters.get(name)
        super().register_parameter(name, param)
        if replaced is not None and param is not None:
            self._mark_parameters()

    def _mark_parameters(self) -> None:
        """Notes on the parameters which ranks share them, ``etp_group``, and how many rows and which, ``etp_rows``.

        Neither where each has its own whole.
        """
        if self._etp is not None:
            check_when_wrapping(_check_not_replicated)
            for name, extent in self._etp_extents().items():
                parameter: Any = self._weight(name)
                parameter.etp_group, parameter.etp_rows = self._etp.group, extent
                if isinstance(parameter, QuantizedRows):
                    parameter.join(self._etp.group)

    def _own_part(self, name: str, values: Tensor) -> Tensor:
        """Of ``values`` in the whole shape of the parameter ``name`` what this rank has."""
        if self._etp is None or name not in self._weight_names:
            return own_part(values, self._weight(name))
        return values[..., self._etp_range(self._weight_names.index(name)), :]

    def _rows_parameter(self, place: int, whole: nn.Parameter, rows: Tensor) -> nn.Parameter:
        """That of this rank's rows, with the attributes of the whole but the gradient of all rows."""
        parameter = nn.Parameter(rows, requires_grad=whole.requires_grad)
        if isinstance(whole, QuantizedTensor) and isinstance(parameter, QuantizedTensor):
            initial = whole.get_high_precision_init_val()
            if initial is not None:
                parameter.set_high_precision_init_val(initial[self._etp_range(place)])
        else:
            parameter.__dict__.update({name: noted for name, noted in vars(whole).items() if name != "main_grad"})
        return parameter

    def _etp_range(self, place: int, rank: int | None = None) -> slice:
        """A rank's rows, by default this one's, of the parameter number ``place``, counted in the whole of it."""
        assert self._etp is not None
        shards, rank = self._etp.shards, self._etp.group.rank if rank is None else rank
        before, length = sum(self._etp_lengths[:place]), self._etp_lengths[place]
        begin, end = (min(max(row - before, 0), length) for row in (shards.first(rank), shards.end(rank)))
        return slice(begin, end)

    def _etp_extents(self) -> dict[str, tuple[int, slice]]:
        """Of each parameter by name the rows of the whole, its dim -2, and which of them this rank has."""
        if self._etp is None:
            return {}
        named = enumerate(zip(self._weight_names, self._etp_lengths, strict=True))
        return {name: (length, self._etp_range(place)) for place, (name, length) in named}

    def _cut_wholes(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Puts this rank's rows in the place of weights that a state dict has whole."""
        for place, (name, (length, _)) in enumerate(self._etp_extents().items()):
            saved, weight = state_dict.get(prefix + name), self._weight(name)
            whole = (*weight.shape[:-2], length, weight.shape[-1])
            if isinstance(saved, Tensor) and saved.shape == whole != weight.shape:
                state_dict[prefix + name] = self._own_rows(place, saved)

    def _etp_source(self) -> EtpWeight:
        """To be asked in each forward.

        Raises:
            ValueError: ``DistributedDataParallel``, or PyTorch's ``fully_shard``, which has put a parameter of its own
                in the place of one, takes the rows of all ranks for the same ones.
        """
        assert self._etp is not None
        if running() is not None:  # wrapped before the rows were shared out
            check_same_rows(self._label, self._etp_parameters())
        for name, parameter in zip(self._weight_names, self._etp_parameters(), strict=True):
            if isinstance(parameter, nn.Parameter) and not hasattr(parameter, "etp_group"):
                raise ValueError(
                    f"{self._label}: {name} is not the parameter that has this rank's rows for etp_group, as after "
                    "PyTorch's fully_shard, which shards them once more; make the model anew and pass "
                    "ignored_params=minifloat.distributed.etp_parameters(model)"
                )
        if self._etp_weight is None:
            self._etp_weight = EtpWeight(self, self._etp)
        return self._etp_weight

    def _etp_whole(self) -> Tensor:
        """The matrix [N, K] of all ranks, in the dtype of the parameter, whose gradient is that of its rows."""
        source = self._etp_source()
        source.cast(_VALUES, self._weight(self._weight_names[0]).dtype)
        whole: Tensor = source.forward().along(ROWWISE).codes
        return apply(_Gathered, source, self._etp_stand_in(whole.shape), whole)

    def _etp_stand_in(self, shape: Sequence[int]) -> Tensor:
        """What autograd sees in the place of W.

        Raises:
            ValueError: a weight is computed, and would get no gradient, which goes to parameters past autograd.
        """
        parameters = self._etp_parameters()
        for name, parameter in zip(self._weight_names, parameters, strict=True):
            if not parameter.is_leaf:
                raise ValueError(
                    f"{self._label}: {name} is computed from other tensors, as by a parametrization or "
                    "functional_call, and a weight that etp_group shares gives its gradient to a parameter; do without "
                    "one of them"
                )
        return self._etp_source().stand_in(shape, parameters[0])

    # ---- what functional/etp asks ----

    def _etp_parameters(self) -> list[Any]:
        return [self._weight(name) for name in self._weight_names]

    def _etp_values(self) -> list[Tensor]:
        return [
            weight.dequantize().detach() if isinstance(weight, QuantizedTensor) else weight.detach()
            for weight in self._etp_parameters()
        ]

    def _etp_rows(self) -> list[Tensor]:
        rows = self._etp_values()
        return rows if len(rows) == 1 else [torch.cat(rows)]

    def _etp_ready(self, quantizer: Quantizer) -> list[Quantized] | None:
        own = self._etp_parameters()
        kept = all(isinstance(each, QuantizedRows) and holds(each._operands, quantizer) for each in own)
        single = self._etp is not None and len(own) == self._etp.matrices
        return [each.part for each in own] if kept and single else None

    def _etp_scales(self) -> list[Tensor | None]:
        return [None]  # of one matrix

    def _etp_join(self, matrices: Sequence[Quantized]) -> Quantized:
        return matrices[0]

    def _etp_part(self, matrices: Sequence[Quantized]) -> Quantized:
        return matrices[0]

    def _etp_gradients(self, gradients: Tensor) -> Iterable[tuple[Any, Tensor]]:
        parameters = self._etp_parameters()
        return zip(parameters, gradients[0].split([each.shape[0] for each in parameters]), strict=True)

    # ---- copies ----

    def invalidate(self) -> None:
        """Forgets what was cast: call it after writing to the parameter in a way that PyTorch does not see."""
        if self._etp_weight is not None:
            self._etp_weight.forget()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_etp_weight": None}  # whose parameters a copy's are not


@checked
def etp_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters below ``model`` that are a rank's rows of a weight that ``etp_group`` shares.

    They gather and reduce themselves: give them to ``fully_shard`` as ``ignored_params``.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, EtpRows) and layer._etp is not None]
    return {parameter for layer in layers for parameter in layer._etp_parameters()}


def _check_not_replicated(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, EtpRows) and layer._etp is not None:
            check_same_rows(layer._label, layer._etp_parameters())


class _Gathered(torch.autograd.Function):
    """A gathered weight as what the rows of all ranks make up; ``stand_in``: what autograd sees of it."""

    @staticmethod
    def forward(ctx: Any, source: EtpWeight, stand_in: Tensor, whole: Tensor) -> Tensor:
        ctx.source = source
        return whole.view_as(whole)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.source.reduce(partial(computed, gradient), into_grad, main_grad=False, delayed=False)
        return None, None, None
