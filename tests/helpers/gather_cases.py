"""Cases of the sharded cast and the quantized all-gather, and what a rank does with them, on any backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minifloat.comm.group import unit_rows
from minifloat.comm.sharded_cast import gather
from minifloat.distributed import Group, ShardMap, quantize_shard
from minifloat.formats import Format, parse
from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer, cast_all
from tests.helpers.distributed_pool import process_group

CPU = torch.device("cpu")
T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]


def agreement_bytes(shards: ShardMap, fmt: Format, dim: int, cols: int, itemsize: int, rank: int) -> int:
    """Counts the bytes that ``rank`` sends before its cast: amaxes to reduce, rows of straddling units."""
    unit = unit_rows(fmt, dim)
    count = 0 if shards.aligned(unit) else sum(shards.sent(unit)[rank]) * cols * itemsize
    return count + (4 * (cols if fmt.amax_per_row else 1) if fmt.reduces_amax(dim) else 0)


TENSOR = ["e4m3/tensor/given", "e5m2/tensor/given", "e4m3/tensor/fp32", "e5m2/tensor/pow2/eps=0.5",
    "e4m3/row/fp32", "e4m3/row/pow2/eps=0.5",
]  # fmt: skip
BLOCKS = [
    "e4m3/1x128/pow2", "e5m2/1x128/fp32", "e4m3/128x128/pow2", "e4m3/128x128/fp32/eps=0.001",
    "e2m1/1x32/e8m0", "e2m1/32x32/e8m0", "e2m3/1x32/e8m0", "e3m2/32x32/e8m0",
    "e4m3/1x32/e8m0", "e5m2/1x32/e8m0", "e4m3/32x32/e8m0", "e4m3/1x16/fp32", "e4m3/16x16/pow2",
]  # fmt: skip
NVFP4 = [
    "e2m1/1x16/two_level", "e2m1/16x16/two_level", "e2m1/1x16/two_level/stochastic", "e2m1/1x16/two_level/amax_per_row",
    "e2m1/1x16/two_level/four_over_six_mae/max=256.0", "e2m1/16x16/two_level/four_over_six_mse/max=256.0",
    "e2m1/16x16/two_level/stochastic", "e2m1/1x32/two_level",
]  # fmt: skip
ROTATED = [
    "e2m1/1x16/two_level/hadamard16", "e2m1/1x16/two_level/hadamard16/stochastic", "e4m3/1x32/e8m0/hadamard16",
    "e4m3/tensor/fp32/hadamard16",
]  # fmt: skip
STRIPS, TILES, PER_TENSOR = "e4m3/1x128/pow2", "e4m3/128x128/pow2", "e4m3/tensor/fp32"
PLAIN, STOCHASTIC, HADAMARD = NVFP4[0], NVFP4[2], ROTATED[0]
FORMATS = [*TENSOR, *BLOCKS, *NVFP4, "identity"]
"""Of the five recipes' inputs, weights and gradients, and 2D tiles for all of them."""


class Example(NamedTuple):
    """A matrix and its quantizer; all that a rank needs to make its rows.

    Args:
        rows, cols: of each rank, and of the matrix.
        dtype: name of the dtype.
        formats: rowwise and columnwise.
        rowwise, columnwise, chained: as of a quantizer.
        kind: what the values are like.
        seed: of the values.
        strided: this rank's rows do not lie in one piece of memory.
    """

    rows: tuple[int, ...]
    cols: int
    dtype: str
    formats: tuple[str, str]
    rowwise: bool
    columnwise: bool
    chained: bool
    kind: str
    seed: int
    strided: bool

    def quantizer(self) -> Quantizer:
        row, column = (parse(spec) for spec in self.formats)
        source: Any = "rowwise_dequantized" if self.chained else "original"
        return Quantizer(row, column, self.rowwise, self.columnwise, source)


def example(rows: tuple[int, ...], row: str, column: str | None = None, **changes: Any) -> Example:
    """One of bf16 values of many magnitudes, in both orientations."""
    plain = Example(rows, 48, "bfloat16", (row, column or row), True, True, False, "outliers", 3, False)
    return plain._replace(**changes)


def draw_example(choose: Choose[Any], size: int) -> Example:
    """An example for ``size`` ranks, from a function that chooses one of several values."""
    layout = choose(["aligned", "ragged", "uneven", "one_unit"])
    if layout == "aligned":
        rows = (choose([16, 32, 128, 256]),) * size
    elif layout == "ragged":
        rows = (choose([1, 7, 17, 100, 127, 129]),) * size
    else:
        counts = [0, 0, 1, 2, 3, 5, 16, 31] + [64, 127, 128, 130, 200] * (layout == "uneven")
        rows = tuple([choose(counts) for _ in range(size)])
    row = choose(FORMATS)
    column = choose([row, row, row, *FORMATS, *ROTATED, *ROTATED])
    chainable = row != "identity" and column not in TENSOR[:2] and "stochastic" not in column
    chained = chainable and choose([False] * 5 + [True])
    rowwise, columnwise = choose([(True, True), (True, True), (True, False), (False, True)])
    return Example(
        rows, choose([0, 1, 2, 15, 16, 33, 48, 130]), choose(["bfloat16", "bfloat16", "float32", "float16"]),
        (row, column), rowwise, columnwise, chained, choose(["normal", "outliers", "special", "zeros"]),
        choose(range(1000)), choose([False, True]),
    )  # fmt: skip


def values(example: Example) -> Tensor:
    """The matrix that the ranks share; made on the CPU, the same everywhere."""
    generator = torch.Generator().manual_seed(example.seed)
    x = torch.randn(sum(example.rows), example.cols, generator=generator)
    if example.kind == "zeros":
        x[torch.rand(x.shape[0], generator=generator) < 0.7] = 0.0
    elif example.kind != "normal":
        x = x * torch.exp2(torch.randint(-30, 30, (x.shape[0], 1), generator=generator).float())
    dtype = getattr(torch, example.dtype)
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    if example.kind == "special" and x.numel():
        tiny = torch.finfo(dtype).smallest_normal / 8
        for value in (torch.nan, torch.inf, -torch.inf, -0.0, tiny, torch.finfo(dtype).max, torch.nan):
            place = int(torch.randint(x.numel(), (1,), generator=generator))
            x.view(-1)[place : place + 3] = value
    return x


def whole_and_part(example: Example, group: Group, device: torch.device) -> tuple[Quantized, Quantized, ShardMap]:
    """The quantized matrix, and this rank's part of it."""
    shards = ShardMap(example.rows)
    quantizer = example.quantizer()
    x = values(example).to(device)
    scale = torch.tensor([3.7], device=device) if any(f.scale_rule == "given" for f, _ in quantizer.casts) else None
    rng = torch.tensor([1234567 << 20, example.seed], device=device)
    first = shards.first(group.rank)
    own = x[first : first + example.rows[group.rank]].clone()
    if example.strided:
        own = torch.stack([own, own], 2)[..., 0]
    whole = cast_all([x], [quantizer], rngs=[rng], scales=[scale])[0]
    return whole, quantize_shard(own, quantizer, shards, group, scale=scale, rng=rng), shards


def difference(found: Quantized, expected: Quantized, any_layout: bool = False) -> str:
    """What differs between two quantized tensors, if anything, to the bit; ``any_layout``: in any memory order."""
    if (found.rowwise is found.columnwise) != (expected.rowwise is expected.columnwise):
        return "one operand for both orientations"
    for slot in ("rowwise", "columnwise"):
        mine, theirs = getattr(found, slot), getattr(expected, slot)
        if (mine is None) != (theirs is None):
            return f"{slot} is there or not"
        if mine is None:
            continue
        if mine.layout != theirs.layout:
            return f"{slot} {mine.layout} is not {theirs.layout}"
        for name, a, b in zip(("codes", "scale_inv", "amax"), mine[:3], theirs[:3], strict=True):
            if name == "amax" and mine.format.scale_rule != "two_level":
                continue
            if (a is None) != (b is None):
                return f"{slot}.{name} is there or not"
            if a is None:
                continue
            if (a.shape, a.dtype, a.is_contiguous() or any_layout) != (
                b.shape,
                b.dtype,
                b.is_contiguous() or any_layout,
            ):
                return f"{slot}.{name}: {a.dtype} {tuple(a.shape)} is not {b.dtype} {tuple(b.shape)}"
            bits = a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)
            if bits.any():
                return f"{slot}.{name}: {int(bits.sum())} bytes of {bits.numel()} differ, first at {bits.nonzero()[0]}"
    return ""


def gather_examples(rank: int, size: int, examples: Sequence[Example], device: str = "cpu") -> list[str]:
    """Of each example what differs between the gathered parts and the quantized whole, on a rank of the world."""
    group, results = world(), []
    for example in examples:
        whole, part, shards = whole_and_part(example, group, torch.device(device))
        found = gather(part, shards, group, rowwise=example.rowwise, columnwise=example.columnwise)
        results.append(difference(found, whole))
    return results


def world() -> Group:
    """All ranks."""
    return Group.of(process_group())


class Sent(NamedTuple):
    """One tensor that a collective of the backend was given to send."""

    collective: str
    dtype: torch.dtype
    bytes: int


class Wire(TorchDispatchMode):
    """Lists what PyTorch hands to the backend inside: the tensors that each collective sends."""

    INPUTS = ("input", "inputs", "input_tensor", "tensors")

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            given = dict(zip([a.name for a in func._schema.arguments], args, strict=False))
            tensors = [x for key in self.INPUTS if key in given for x in tree_leaves(given[key])]
            assert tensors, f"what {func} sends is not known"
            self.sent += [Sent(name, x.dtype, x.nbytes) for x in tensors]
        return func(*args, **(kwargs or {}))
