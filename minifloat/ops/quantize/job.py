"""What is asked of the cast kernels, and how it is spread over launches and programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.formats import Format

LARGEST_GROUP = 8
"""Matrices that one launch takes."""


class Target(NamedTuple):
    """One cast: how, and where to.

    Args:
        format, dim: the number format, and the dim that is scaled along.
        level: amax or scale that is given; see ``reference.cast``.
        codes, scale_inv, amax: outputs, as ``kernels.quantize.cast`` returns them.
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
    """One matrix ``x`` [M, K], contiguous, and its casts; ``rng`` is for stochastic rounding, see philox.py."""

    x: Tensor
    rng: Tensor | None
    row: Target | None
    column: Target | None

    @property
    def targets(self) -> list[Target]:
        return [target for target in (self.row, self.column) if target is not None]

    @property
    def sharded(self) -> bool:
        """The random bits are those of rows of a larger tensor."""
        return self.rng is not None and self.rng.numel() == 3


def groups(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Jobs that one launch can do: alike in dtype, formats and kind of ``rng``, at most :data:`LARGEST_GROUP`."""
    alike: dict[object, list[Job]] = {}
    for job in jobs:
        targets = [(t.format, t.dim, t.k_major, t.level is None) for t in job.targets]
        key = (job.x.device, job.x.dtype, job.sharded, *targets)
        alike.setdefault(key, []).append(job)
    for group in alike.values():
        for first in range(0, len(group), LARGEST_GROUP):
            yield group[first : first + LARGEST_GROUP]


class Programs(NamedTuple):
    """Which programs of a launch work on which matrix.

    Args:
        total: number of programs.
        starts: first program of each matrix, as many as the kernel has variants for: 1, 2 or :data:`LARGEST_GROUP`.
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
        padded = next(size for size in (1, 2, LARGEST_GROUP) if size >= len(counts))
        return cls(total, tuple(starts + [total] * (padded - len(counts))))

    def pad(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``values`` of the matrices, repeated for the places that no matrix takes."""
        return (*values, *[values[0]] * (len(self.starts) - len(values)))

    def pad_integers(self, values: Sequence[int]) -> tuple[int, ...]:
        return (*values, *[values[0]] * (len(self.starts) - len(values)))


def aligned(sizes: Sequence[int]) -> bool:
    """All are multiples of 16, so that rows begin where wide accesses may."""
    return all(size % 16 == 0 for size in sizes)


def input_max(x: Tensor) -> float:
    """The largest finite value of the dtype of ``x``."""
    return float(torch.finfo(x.dtype).max)
