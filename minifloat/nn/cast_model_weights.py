"""Casts of the weights of a whole model, together in a few launches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minifloat import backends
from minifloat.arguments import checked
from minifloat.comm.sharded_cast import is_plain
from minifloat.delayed import History
from minifloat.formats import ROWWISE
from minifloat.functional.quantize import FORWARD_SLOTS, LinearConfig
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.linear_call import recipe_in_force
from minifloat.nn.linear_state import CachedWeight, LinearState
from minifloat.operand import Quantized
from minifloat.ops import delayed
from minifloat.quantizer import DTYPES, Quantizer, cast_all
from minifloat.recompute import capturing, recomputes
from minifloat.tensor.base import count_steps, versions

_SLOT = FORWARD_SLOTS.index("weight")
_TOGETHER = 8
"""Weights of a launch, whose addresses are its arguments: so a capture casts as its warm-up did."""


@checked
@contextmanager
def cast_weights(model: nn.Module) -> Iterator[None]:
    """Casts the weights of the linears of ``model`` together, on entry; calls inside use these casts, with equal bits.

    Use it around the forwards and backwards of one step, with one or several microbatches, and inside of the
    ``autocast`` that sets the recipe. It takes two launches for each eight weights instead of two for each. Codes and
    scales are kept until exit: under FP8 2 bytes for each element of a weight.

    A layer still casts its own weight if the weight was written since the entry, if compiled code or the capture of a
    CUDA graph runs inside (a capture around the context includes the casts), and if the weight is an expert's,
    quantized, sharded by FSDP2 or extended tensor parallelism, rounded stochastically, or cast to bf16 values for an
    emulated product. Under delayed scaling all layers inside use the scales at entry, and the amaxes are recorded once.
    """
    wanted: dict[torch.device, list[_Weight]] = defaultdict(list)
    for layer in () if torch.compiler.is_compiling() or recomputes() else model.modules():
        if isinstance(layer, LinearState) and not isinstance(layer, GroupedLinear):
            weight = _Weight.of(layer)
            if weight is not None:
                wanted[weight.matrix.device].append(weight)
    for weights in wanted.values():
        _cast(weights, records=torch.is_grad_enabled())
    try:
        yield
    finally:
        for weights in wanted.values():
            for weight in weights:
                weight.keep(None)


class _Weight:
    """Weight of a layer, and how it is cast; ``history``: of delayed scaling, if that gives its scale."""

    def __init__(self, layer: LinearState, config: LinearConfig, sources: tuple[Tensor, ...]) -> None:
        self.layer, self.sources = layer, sources
        self.matrix = layer._weight_matrix().detach()
        columnwise = torch.is_grad_enabled() and config.backward_override is None
        self.quantizer = config.weight.with_usage(columnwise=columnwise)
        self.history: History | None = None
        if config.delayed is not None and self.quantizer.given is not None:
            self.history = layer.forward_scaling.history(config.delayed, True, False)

    def keep(self, cached: CachedWeight | None) -> None:
        """Sets the layer's cache, past ``nn.Module.__setattr__``, which takes a microsecond."""
        self.layer.__dict__["_weight_cache"] = cached

    @classmethod
    def of(cls, layer: LinearState) -> _Weight | None:
        """Describes the weight of ``layer``; None where the layer is to cast it by itself."""
        recipe = recipe_in_force(layer)
        if recipe is None or layer._etp is not None or not layer._keeps_weight:
            return None
        config, sources = layer._config(recipe), tuple(layer._weight(name) for name in layer._weight_names)
        plain = all(type(each) is nn.Parameter and not each.is_meta and each.dtype in DTYPES for each in sources)
        if not plain or not config.weight.quantized or not is_plain(config.weight):
            return None
        formats, device = (config.input.format(ROWWISE), config.weight.format(ROWWISE)), sources[0].device
        if device.type == "cuda" and backends.backend(*formats, device) == "emulated":
            return None  # a cast for the product alone gives values, which costs less than codes that are kept
        return cls(layer, config, sources)


@torch.no_grad()
def _cast(weights: Sequence[_Weight], records: bool) -> None:
    """Fills the caches of the layers, which are all on one device, and ``records`` the amaxes for delayed scaling."""
    scales = [None if each.history is None else each.history.scale[_SLOT : _SLOT + 1] for each in weights]
    quantizers: list[Quantizer] = [each.quantizer for each in weights]
    made: list[Quantized] = []
    for first in range(0, len(weights), _TOGETHER):
        some = slice(first, first + _TOGETHER)
        matrices = [each.matrix for each in weights[some]]
        made += cast_all(matrices, quantizers[some], scales=scales[some], gemm_ready=True)
    now = capturing()
    newest, amaxes = [], []
    for weight, operands in zip(weights, made, strict=True):
        count_steps(weight.sources)
        weight.keep(CachedWeight(weight.sources, versions(weight.sources), weight.quantizer, operands, now))
        if weight.history is not None and (amax := operands.any.amax) is not None:
            newest.append(weight.history.amax_history[0, _SLOT : _SLOT + 1])
            amaxes.append(amax)
    if newest and records:
        delayed.record_all_(newest, amaxes)
