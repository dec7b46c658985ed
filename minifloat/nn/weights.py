"""What the state and the calls of linear layers ask of their parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minifloat.comm.dtensor import own_part, own_rows
from minifloat.functional.tensor_parallel import Mode, TensorParallel
from minifloat.nn.parameters import InitMethod
from minifloat.nn.tensor_parallel import Partition
from minifloat.tensor import QuantizedTensor


class Weights(nn.Module):
    """What the state and the calls of a linear ask of its parameters, however a class keeps them."""

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
    _parallel: TensorParallel
    _partitions: dict[str, Partition]

    @property
    def _label(self) -> str:
        """What errors call the layer."""
        raise NotImplementedError

    @property
    def _weight_names(self) -> tuple[str, ...]:
        """The names of the parameters that make up the weight."""
        raise NotImplementedError

    @property
    def _matrices(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of each matrix [N, K] that is quantized by itself; none if parameters are no rows."""
        raise NotImplementedError

    def _weight(self, name: str) -> nn.Parameter:
        """That of a name."""
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

    def _mark_parameters(self) -> None:
        """Notes on the parameters of a sharded layer how they are."""

    def reset_parameters(self) -> None:
        """Initial values."""
        raise NotImplementedError

    @torch.no_grad()
    def _write(self, name: str, parameter: Tensor, values: Tensor) -> None:
        own_rows(parameter).copy_(self._own_part(name, values))

    def _own_part(self, name: str, values: Tensor) -> Tensor:
        """Of ``values`` in the whole shape of the parameter ``name`` what this rank has."""
        return own_part(values, self._weight(name))
