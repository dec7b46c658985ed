"""Ranks of a benchmark that torchrun has started."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=300)  # ranks compile kernels, not equally fast


def join(device: str) -> None:
    """Joins the other ranks over gloo, or over NCCL for ``"cuda"``, where more ranks than GPUs share them in turn."""
    if device != "cuda":
        dist.init_process_group("gloo", timeout=PATIENCE)
        return
    share, index = divmod(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
    os.environ["NCCL_HOSTID"] = str(share)  # NCCL lets ranks of different hosts alone have the same GPU
    torch.cuda.set_device(index)
    dist.init_process_group("nccl", timeout=PATIENCE, device_id=torch.device("cuda", index))
