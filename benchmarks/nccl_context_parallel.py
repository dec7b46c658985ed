"""PyTorch's context parallelism around our attention:
``torchrun --nproc-per-node 2 benchmarks/nccl_context_parallel.py``.

Each rank has a part of every sequence inside ``context_parallel``; output and gradients are those of whole sequences.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ranks import join
from minifloat.nn.attention import DotProductAttention

HEADS, CHANNELS, BATCH, LENGTH = 8, 64, 2, 512


def main() -> None:
    join("cuda")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)  # the same on all ranks
    shape = BATCH, LENGTH, HEADS, CHANNELS
    q, k, v, dy = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    dy = dy.flatten(2)
    attention = DotProductAttention(HEADS, CHANNELS, qkv_format="bshd", attn_mask_type="causal")
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = attention(*whole)
    wanted = [expected.detach(), *torch.autograd.grad(expected, whole, dy)]
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        context_parallel(mesh, buffers=[q, k, v, dy], buffer_seq_dims=[1] * 4),
    ):
        own = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        y = attention(*own)
        assert y.shape[1] == LENGTH // dist.get_world_size()
        got = context_parallel_unshard(mesh, [y.detach(), *torch.autograd.grad(y, own, dy)], [1] * 4)
    for name, a, b in zip(("output", "dQ", "dK", "dV"), got, wanted, strict=True):
        error = float((a.float() - b.float()).norm() / b.float().norm())
        if dist.get_rank() == 0:
            print(f"context parallel {name}: relative error {error:.2g}")
        if error > 0.01:
            sys.exit(f"{name} is wrong")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
