"""``fully_shard`` on GPUs: ``torchrun --nproc-per-node 4 benchmarks/nccl_fsdp.py``, with 2 as well.

Every recipe, kind of parameters, module and way to shard it, beside an unsharded replica: in each of 20 steps the codes
and scales that GEMMs read have the bytes of the quantized whole, and so have outputs, gradients of inputs and buffers.
Then trajectories that are not synchronized, bytes handed to the backend, memory, meshes of
two dims, offloaded shards, checkpoints, ``DistributedDataParallel``. A line a case; ends with an error if any differs.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import minifloat
from benchmarks.ranks import join
from minifloat.comm.group import ShardMap
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.nn.linear_state import LinearState
from minifloat.operand import Operand
from minifloat.parallel.fsdp import fully_shard
from minifloat.tensor.rows import row_unit
from tests.helpers import ddp_cases
from tests.helpers.fsdp_cases import (
    KINDS,
    MATRIX,
    MODELS,
    RECIPES,
    TWINS,
    Case,
    layers,
    loss,
    mesh_of,
    trajectory,
    width,
)
from tests.helpers.fsdp_checkpoints import differences, loaded, saved
from tests.helpers.fsdp_meshes import hybrid, tensor_parallel

BOUND = 0.02  # how far losses of free trajectories may get apart in 20 steps, of their size
MOST_OF_BF16 = {"nvfp4": 0.29}  # bytes on the wire, where a shard has 8 blocks of rows; else 0.52
NATIVE = ("delayed", "current", "block")  # multiplied by an H200 as they are: the others' GEMMs spread operands to bf16

Check = Callable[[int, int, str], str]
"""Of a rank, the number of ranks and a device: what is wrong, or ""; or, in brackets, what there is to know."""


def stepped(kind: str, case: Case, steps: int) -> Check:
    return lambda rank, size, device: KINDS[kind](rank, size, case, steps, device)


# ---- trajectories ----


def free(recipe: str, kind: str, steps: int, rank: int, size: int, device: str) -> str:
    """The losses of a replica that goes its own way, from the same start: bounded, and of two ranks the same."""
    if recipe == "nvfp4" and size > 2:  # a code that follows another order of sums is a step of a third to a half
        steps = min(steps, 5)
    apart = trajectory(rank, size, TWINS[kind], Case("TransformerLayer", recipe), steps, device)
    within = apart == 0 if size <= 2 else apart < BOUND
    return f"[losses apart by {apart:.2g}]" if within else f"losses apart by {apart:.2g}"


# ---- other ways to spread data ----


def data_parallel(case: ddp_cases.Case, rank: int, size: int, device: str) -> str:
    """DDP beside one process that has the data of all ranks, which adds their gradients in the order of two."""
    if (size > 2) != (case.model == "tensor_parallel"):
        return "[needs 4 ranks]" if size == 2 else "[adds the gradients of 2 ranks]"
    return ddp_cases.lockstep(rank, size, case, 5, device)


def offloaded(recipe: str, rank: int, size: int, device: str) -> str:
    """Shards that are kept in the host's memory, beside the same model with shards on the device."""
    models = [MODELS["TransformerLayer"](recipe).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, policy in zip(models, (None, CPUOffloadPolicy(pin_memory=device != "cpu")), strict=True):
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh_of(size, device), offload_policy=policy)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(5):
        x, results = torch.randn(6, 2, width(models[0]), device=device), []
        for model, optimizer in zip(models, optimizers, strict=True):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(step)
            y = model(leaf)
            loss(y).backward()
            assert leaf.grad is not None
            results.append([y.detach(), leaf.grad, *(local(p.grad) for p in model.parameters())])
            optimizer.step()
            optimizer.zero_grad()
        if not all(torch.equal(one.to(device), other.to(device)) for one, other in zip(*results, strict=True)):
            return f"step {step} differs"
        for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            local(mine).copy_(local(theirs))  # a CPU's AdamW rounds otherwise
    return ""


def local(tensor: Any) -> Tensor:
    """This rank's part, to write to as well."""
    part: Tensor = tensor.detach().to_local()
    return part


def on_meshes(rank: int, size: int, device: str) -> str:
    """Replicated groups that shard, and groups that shard what is tensor-parallel."""
    wrong = []
    for shape in ((1, size), (size, 1), (2, size // 2)):
        wrong += hybrid(rank, size, shape, device)
    for recipe in RECIPES if size == 4 else ():
        wrong += tensor_parallel(rank, size, recipe, device)
    return ", ".join(wrong)


def checkpointed(recipe: str, quantized: bool, rank: int, size: int, device: str) -> str:
    """Saved by DCP, and loaded into a model that has made other steps: parameters and moments, bit for bit."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    case = Path(str(folder[0])), recipe, quantized, device
    wanted, found = saved(rank, size, *case), loaded(rank, size, *case)
    return ", ".join(differences(found, wanted)) if rank == 0 else ""


DATA_PARALLEL = (
    *[ddp_cases.Case("fused", recipe) for recipe in RECIPES],
    *[ddp_cases.Case("fused", recipe, ("quantized", "accumulate")) for recipe in RECIPES],
    ddp_cases.Case("linears", "delayed", ("plain", "region", "gradient_as_bucket_view")),
    ddp_cases.Case("branches", "mxfp8", ("find_unused_parameters",)),
    ddp_cases.Case("fused", "current", ("static_graph", "accumulate", "clip")),
    ddp_cases.Case("linears", "mxfp8", ("scaler", "preserve", "quantized")),
    *[ddp_cases.Case("tensor_parallel", recipe, ("clip",)) for recipe in RECIPES],
)


# ---- the wire ----


@contextmanager
def all_gathers() -> Iterator[list[int]]:
    """Bytes that this rank hands to its backend's all-gathers of single tensors, in order."""
    names = ("all_gather_single", "_allgather_base")  # of PyTorch 2.13, and before
    name = next(name for name in names if hasattr(dist.ProcessGroup, name))
    original, sent = getattr(dist.ProcessGroup, name), []

    def gather(group: Any, output: Tensor, given: Tensor, *options: Any) -> Any:
        sent.append(given.numel() * given.itemsize)
        return original(group, output, given, *options)

    with mock.patch.object(dist.ProcessGroup, name, gather):
        yield sent


def wire(recipe: str, kind: str, rank: int, size: int, device: str) -> str:
    """Each gather of a step sends codes and scales of one orientation, and nothing else."""
    sizes = (256, 1024 * size, 70, 256)  # 8 blocks of 128 rows a shard, ragged ones, and whole ones again
    with torch.device(device), minifloat.quantized_model_init(kind == "quantized", recipe=recipe):
        model = layers(recipe, *sizes)
    mesh = mesh_of(size, device)
    for child in model:
        fully_shard(child, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        with all_gathers() as sent:
            loss(model(torch.randn(4, sizes[0], device=device, requires_grad=True))).backward()
    quantizer, expected, most = model[0]._config(model[0].recipe).weight, [], MOST_OF_BF16.get(recipe, 0.52)
    for dim, order in ((ROWWISE, 1), (COLUMNWISE, -1)):
        along = ROWWISE if quantizer.format(dim).symmetric else dim
        for k, n in list(pairwise(sizes))[::order]:
            expected.append(
                ShardMap.chunks(n, size).whole_units(row_unit(quantizer)).gather_bytes(quantizer.format(dim), along, k)
            )
    of_bf16 = [sent[0] / (2 * 1024 * 256), sent[-1] / (2 * 1024 * 256)] if sent else [0.0, 0.0]
    if sent != expected or max(of_bf16) > most:
        return f"sent {sent}, expected {expected}"
    return f"[{sum(sent)} bytes a step; {of_bf16[0]:.3f} and {of_bf16[1]:.3f} of bf16 in forward and backward]"


# ---- memory ----


ZEROS_BYTES = 4096
"""Of a fill of zeros, ``minifloat.ops.quantize.gpu``, which needs Triton."""


@contextmanager
def operands_read() -> Iterator[list[Operand]]:
    """Operands of weights that layers find ready, of both orientations."""
    original, found = LinearState._weight_operands, []

    def ready(*call: Any) -> Any:
        result = original(*call)
        found.extend(operand for operand in result or () if operand is not None)
        return result

    with mock.patch.object(LinearState, "_weight_operands", ready):
        yield found


def live(device: str) -> tuple[int, int]:
    """Blocks of the allocator and their bytes; on a CPU the storages of tensors that Python knows."""
    if device != "cpu":
        stats = torch.cuda.memory_stats()
        return stats["allocation.all.current"], stats["allocated_bytes.all.current"]
    time.sleep(0.05)  # gloo's threads may hold a little longer what they have sent
    tensors = [each for each in gc.get_objects() if type(each) is Tensor and not each.is_meta]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().size() for each in tensors}
    return len(storages), sum(storages.values())


def memory(recipe: str, kind: str, rank: int, size: int, device: str) -> str:
    """What is alive after a step stays the same from the second on, and nothing gathered outlives backward.

    But for one block: casts take their zeros from a fill that serves many calls, and the next one may begin meanwhile.
    """
    twins = TWINS[kind](Case("TransformerLayer", recipe, "nested"), size, device)
    model, optimizer = twins.sharded, twins.optimizers[1]
    x = torch.randn(6, 2, width(twins.plain), device=device)
    after = []
    for _ in range(5):
        x.requires_grad_()
        with operands_read() as operands:
            loss(model(x)).backward()
        codes = [operand.codes for operand in operands if operand.codes.numel()]
        if not codes or any(each.untyped_storage().size() for each in codes):
            return f"of {len(codes)} gathered operands some outlive backward, or there are none"
        del operands, codes
        optimizer.step()
        optimizer.zero_grad()
        x = x.detach()
        gc.collect()
        after.append(live(device))
    zeros = (1, ZEROS_BYTES) if device != "cpu" else (0, 0)
    more = [max(step[i] for step in after[1:]) - min(step[i] for step in after[1:]) for i in (0, 1)]
    grows = any(most > allowed for most, allowed in zip(more, zeros, strict=True))
    return f"blocks and bytes after each step: {after}" if grows else f"[{after[-1][1]} bytes]"


def peak(recipe: str, rank: int, size: int, device: str) -> str:
    """The most memory of a step of eight wide linears, in bf16, beside PyTorch's ``fully_shard``."""
    found = []
    for shard, make in ((fully_shard, partial(minifloat.Linear, recipe=recipe)), (torch_fully_shard, nn.Linear)):
        wide = 4096 if device != "cpu" else 64
        model = nn.Sequential(*[make(wide, wide, bias=False, device=device, dtype=torch.bfloat16) for _ in range(8)])
        for unit in (*model, model):
            shard(unit, mesh=mesh_of(size, device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            if device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            loss(model(torch.randn(wide, wide, device=device, dtype=torch.bfloat16))).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cuda.max_memory_allocated() if device != "cpu" else 0)
        del model, optimizer
        gc.collect()
    said = f"peak {found[0] >> 20} MiB, PyTorch in bf16 {found[1] >> 20} MiB"
    return said if recipe in NATIVE and found[0] > found[1] else f"[{said}]"


# ---- all of it ----


def checks(steps: int) -> dict[str, Check]:
    """By name, what is quickly done first."""
    found: dict[str, Check] = {}
    for recipe, kind in product(RECIPES, KINDS):
        found[f"wire-{recipe}-{kind}"] = partial(wire, recipe, kind)
        found[f"memory-{recipe}-{kind}"] = partial(memory, recipe, kind)
        found[f"trajectory-{recipe}-{kind}"] = partial(free, recipe, kind, steps)
    found |= {f"peak-{recipe}": partial(peak, recipe) for recipe in RECIPES}
    found |= {f"offload-{recipe}": partial(offloaded, recipe) for recipe in RECIPES} | {"meshes": on_meshes}
    for recipe, quantized in product(RECIPES, (True, False)):
        found[f"checkpoint-{recipe}{'-quantized' * quantized}"] = partial(checkpointed, recipe, quantized)
    found |= {"-".join(("ddp", *case[:2], *case.options)): partial(data_parallel, case) for case in DATA_PARALLEL}
    for recipe, kind in product(RECIPES, KINDS):
        found[f"finish-{recipe}-{kind}"] = stepped(kind, Case("TransformerLayer", recipe, options=("finish",)), steps)
    for module, recipe, kind, units in MATRIX:
        found[f"matrix-{module}-{recipe}-{kind}-{units}"] = stepped(kind, Case(module, recipe, units), steps)
    return found


def run(check: Check, rank: int, size: int, device: str) -> str:
    """What any rank finds wrong; what rank 0 has to say if nothing is."""
    torch.manual_seed(0)
    try:
        found = check(rank, size, device)
    except Exception as error:
        found = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    said: list[Any] = [None] * size
    dist.all_gather_object(said, found)
    wrong = [f"rank {other}: {each}" for other, each in enumerate(said) if each and not each.startswith("[")]
    return wrong[0] if wrong else said[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="a regular expression of cases: matrix-Linear, wire, nvfp4, ...")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further cases after this long")
    parser.add_argument("--list", action="store_true", help="list the cases")
    options = parser.parse_args()
    chosen = {name: check for name, check in checks(options.steps).items() if re.search(options.only, name)}
    if options.list:
        print("\n".join(chosen))
        return
    device: str = options.device
    join(device)
    rank, size = dist.get_rank(), dist.get_world_size()
    begin, done, different, out_of_time = time.monotonic(), 0, 0, torch.zeros((), device=device)
    for name, check in chosen.items():
        out_of_time.fill_(time.monotonic() - begin > options.seconds)
        dist.all_reduce(out_of_time)  # ranks stop together
        if out_of_time:
            break
        start = time.monotonic()
        with sdpa_kernel(SDPBackend.MATH):  # the others' sums have no fixed order
            said = run(check, rank, size, device)
        gc.collect()  # modules that FSDP2 has sharded are cycles
        wrong = bool(said) and not said.startswith("[")
        done, different = done + 1, different + wrong
        if rank == 0:
            verdict = "DIFFERS" if wrong else "same"
            print(f"{name}: {verdict} {said} ({time.monotonic() - start:.2f} s)", flush=True)
    if rank == 0:
        where = f"{size} ranks, {device}, torch {torch.__version__}, {time.monotonic() - begin:.0f} s"
        print(f"{where}: {done} cases of {len(chosen)}, {different} differ")
    sys.stdout.flush()
    if device == "cuda":
        dist.destroy_process_group()
        sys.exit(different > 0)
    os._exit(different > 0)  # destroying a gloo group that FSDP has used aborts now and then


if __name__ == "__main__":
    main()
