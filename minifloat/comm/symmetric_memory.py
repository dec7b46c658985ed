"""Products that gather or sum while they multiply, through memory that the GPUs of one host read in each other.

A product [M, N] is computed in as many parts as there are ranks, M / p rows each, on two streams. *Gather and multiply*
begins with the rank's own rows while copies bring those of the others, *multiply and sum* with rows of other ranks,
which fetch them while it goes on. The operations are PyTorch's (``torch.ops.symm_mem``), those without multicast.
"""

from __future__ import annotations

import socket
from functools import cache
from importlib import import_module
from itertools import permutations
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from minifloat import capability
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE
from minifloat.operand import Operand
from minifloat.ops import matmul
from minifloat.ops.matmul import native

ALIGNMENT = 16  # codes: what cuBLASLt's FP8 product wants of K and N

Gemm = Literal["fprop", "dgrad"]
"""Which product: of X and the rowwise W [N, K], or of dY and the columnwise one."""


def carries(a: Operand, shards: ShardMap, group: Group) -> bool:
    """Rows of ``a``, or of its product, may go this way: one scale or none, equal shares, GPUs that reach others.

    A collective the first time that a group gets so far; every rank finds the same. Compiled graphs have functional
    collectives instead.
    """
    return (
        not torch.compiler.is_compiling()
        and not a.format.grid
        and not a.format.packed
        and shards.is_even
        and shards.largest > 0
        and capability.symmetric_memory(IDENTITY, IDENTITY, a.codes.device)[0]
        and reachable(group)
    )


def multiplies(a: Operand, w: Operand, bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """PyTorch has this product on symmetric memory, with the rounding that ours has."""
    if not capability.symmetric_memory(a.format, w.format, a.codes.device)[0] or 0 in (*a.shape, *w.shape):
        return False
    if not a.format.quantized:
        return bias is None and a.codes.dtype == out_dtype  # a bias would be added after rounding
    fits = all(width % ALIGNMENT == 0 for width in w.shape)
    return fits and (bias is None or out_dtype != torch.float32)  # which the epilogue cannot add


_reachable: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()
# Not by the group's name, which another group may have when this one is gone.


def reachable(group: Group) -> bool:
    """All ranks have a GPU of their own in one host, which can read each other's memory. A collective, at first."""
    if group.process_group not in _reachable:
        _reachable[group.process_group] = _find_reachable(group)
    return _reachable[group.process_group]


def _find_reachable(group: Group) -> bool:
    places: list[tuple[str, int]] = [("", 0)] * group.size
    own = socket.gethostname(), torch.cuda.current_device()
    dist.all_gather_object(places, own, group=group.process_group)
    answers = [False] * group.size  # ranks may see different GPUs, and must not go different ways
    dist.all_gather_object(answers, _reaches(places), group=group.process_group)
    return all(answers)


def _reaches(places: list[tuple[str, int]]) -> bool:
    """As far as this rank sees: the GPUs at ``places`` are in one host, different, visible and read each other."""
    hosts, devices = {host for host, _ in places}, [device for _, device in places]
    if len(hosts) > 1 or len(set(devices)) < len(places) or max(devices) >= torch.cuda.device_count():
        return False
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in permutations(devices, 2))


def gather_and_multiply(
    gemm: Gemm,
    part: Operand,
    w: Operand,
    group: Group,
    *,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> tuple[Tensor, Operand]:
    """The product of all ranks' rows, and these.

    Args:
        part: this rank's rows [M / p, K], rowwise.
        w: W [N, K] as ``gemm`` reads it.
        bias, out_dtype, fast_accum: as of :func:`~minifloat.functional.gemm.fprop`.

    Returns:
        [M, N], and the gathered operand [M, K], rowwise in memory.
    """
    right = _right(gemm, part, w, out_dtype)
    if part.scale_inv is None:
        # Without the gathered A few rows would go through multicast, where a host has that.
        whole, (y,) = operations().fused_all_gather_matmul(_left(part), [right], 0, group.name, return_A=True)
    else:
        whole, (y,) = operations().fused_all_gather_scaled_matmul(
            _left(part), [right], part.scale_inv, [w.scale_inv], 0, group.name,
            [None if bias is None else bias.to(out_dtype)], [None], [out_dtype], [fast_accum],
        )  # fmt: skip
    shape = whole.shape[0], part.shape[1]
    return y, part._replace(codes=whole.view(part.codes.dtype), dim=ROWWISE, shape=shape)


def multiply_and_sum(
    gemm: Gemm, a: Operand, w: Operand, group: Group, *, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """This rank's rows of the sum of the ranks' products, which has no bias: that is added to the sum, once.

    A product is rounded to ``out_dtype`` before it is sent; their sum is in fp32 and rounded once.

    Args:
        a: [M, K], rowwise.
        w: W [N, K] as ``gemm`` reads it.

    Returns:
        [M / p, N].
    """
    right = _right(gemm, a, w, out_dtype)
    if a.scale_inv is None:
        result = operations().fused_matmul_reduce_scatter(_left(a), right, "sum", 0, group.name)
    else:
        result = operations().fused_scaled_matmul_reduce_scatter(
            _left(a), right, a.scale_inv, w.scale_inv, "sum", 0, 0, group.name, [a.shape[0], right.shape[1]],
            out_dtype=out_dtype, use_fast_accum=fast_accum,
        )  # fmt: skip
    summed: Tensor = result
    return summed


@cache
def operations() -> Any:
    """``torch.ops.symm_mem``, with the operations that PyTorch's module defines when it is imported."""
    import_module("torch.distributed._symmetric_memory")
    return torch.ops.symm_mem


def _right(gemm: Gemm, a: Operand, w: Operand, out_dtype: torch.dtype) -> Tensor:
    """W as [contracted, outer], the contracted dim consecutive if FP8; counts the product."""
    matmul.record(gemm, a.format.spec, w.format.spec, "symmetric memory")
    along = ROWWISE if gemm == "fprop" else COLUMNWISE
    if w.scale_inv is None:
        values = w.dequantize(out_dtype)
        return values.t() if along == ROWWISE else values
    return native.k_major(w.codes, w.format, along, (ALIGNMENT, ALIGNMENT)).t()


def _left(a: Operand) -> Tensor:
    """[rows, contracted], rows consecutive in memory, as the dtype that it is."""
    codes = a.codes.contiguous()
    return codes if a.scale_inv is None else native.k_major(codes, a.format, ROWWISE, (1, 1))
