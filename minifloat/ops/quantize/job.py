"""What is asked of the cast kernels, and how it is spread over launches and programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from minifloat.formats import Format
from minifloat.ops.launch import MOST_BY_VALUE, most_matrices

T = TypeVar("T")


class Target(NamedTuple):
    """One cast: how, and where to.

    Args:
        format, dim: the number format, and the dim that is scaled along.
        level: amax or scale that is given; see ``reference.cast``.
        codes, scale_inv, amax: outputs, as ``kernels.quantize.cast`` returns them; codes of bf16 are values.
        k_major: the codes of a columnwise cast lie in memory with the contracted dim consecutive.
    """

    format: Format
    dim: int
    level: Tensor | None
    codes: Tensor
    scale_inv: Tensor
    amax: Tensor
    k_major: bool


class Job(NamedTuple):
    """One matrix ``x`` [M, K], contiguous, and its casts; ``rng`` is for stochastic rounding, see reference.py."""

    x: Tensor
    rng: Tensor | None
    row: Target | None
    column: Target | None

    @property
    def targets(self) -> list[Target]:
        return [target for target in (self.row, self.column) if target is not None]

    @property
    def both(self) -> tuple[Target, Target]:
        """Rowwise and columnwise: what is not wanted is not written to, but needs an address."""
        first = self.targets[0]
        return self.row or first, self.column or first

    @property
    def sharded(self) -> bool:
        """The random bits are those of rows of a larger tensor."""
        return self.rng is not None and self.rng.numel() == 3


def groups(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Jobs that one launch can do: alike in dtype, formats and kind of ``rng``, at most ``launch.most_matrices``."""
    alike: dict[object, list[Job]] = {}
    for job in jobs:
        targets = [(t.format, t.dim, t.k_major, t.level is None, t.codes.dtype) for t in job.targets]
        key = (job.x.device, job.x.dtype, job.sharded, *targets)
        alike.setdefault(key, []).append(job)
    for group in alike.values():
        most = most_matrices(group[0].x.get_device())
        for first in range(0, len(group), most):
            yield group[first : first + most]


class Programs(NamedTuple):
    """Which programs of a launch work on which matrix.

    Args:
        total: number of programs.
        starts: first program of each matrix, as many as the kernel has variants for: 1, 2 or :data:`MOST_BY_VALUE`. Of
            more matrices as many as there are, whose number is in the place of the first one's 0.
    """

    total: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, counts: Sequence[int]) -> Programs:
        """For matrices that take ``counts`` programs."""
        starts, total = [], 0
        for count in counts:
            starts.append(total)
            total += count
        if len(counts) > MOST_BY_VALUE:
            return cls(total, (len(counts), *starts[1:]))
        padded = next(size for size in (1, 2, MOST_BY_VALUE) if size >= len(counts))
        return cls(total, tuple(starts + [total] * (padded - len(counts))))

    @property
    def variant(self) -> int:
        """``COUNT`` of the kernels: matrices whose arguments are arguments of the launch; 0 if they are in a table."""
        return len(self.starts) if len(self.starts) <= MOST_BY_VALUE else 0

    def pad(self, values: Sequence[T]) -> tuple[T, ...]:
        """``values`` of the matrices, repeated for the places that no matrix takes."""
        return (*values, *[values[0]] * (len(self.starts) - len(values)))

    def sizes(self, xs: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """Rows and columns of the matrices."""
        return [self.pad([x.shape[i] for x in xs]) for i in (0, 1)]

    def outputs(self, jobs: Sequence[Job], *parts: Callable[[Target], Tensor]) -> list[tuple[Tensor, ...]]:
        """``parts`` of the targets, rowwise and then columnwise."""
        return [self.pad([part(job.both[side]) for job in jobs]) for side in (0, 1) for part in parts]


def aligned(sizes: Sequence[int]) -> bool:
    """All are multiples of 16, so that rows begin where wide accesses may."""
    return all(size % 16 == 0 for size in sizes)


class Aligned(NamedTuple):
    """Whether rows and columns are multiples of 16, and whether the memory of columnwise codes is, in rows."""

    rows: bool
    cols: bool
    stored: bool

    @classmethod
    def of(cls, rows: Sequence[int], cols: Sequence[int]) -> Aligned:
        """Of whole matrices, whose codes have as many rows in memory."""
        whole = aligned(rows)
        return cls(whole, aligned(cols), whole)


def input_max(x: Tensor) -> float:
    """The largest finite value of the dtype of ``x``."""
    return float(torch.finfo(x.dtype).max)
