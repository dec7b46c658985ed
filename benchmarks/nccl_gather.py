"""The property of the quantized all-gather on GPUs: ``torchrun --nproc-per-node 2 benchmarks/nccl_gather.py``.

Every rank compares what it gathered with the quantized whole, to the bit, for random shapes and formats, and the
operands laid out for GEMMs with those that a cast lays out. Ends with an error if anything differs.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ranks import join
from minifloat.comm.sharded_cast import gather
from minifloat.distributed import ShardMap, quantize_shard
from minifloat.quantizer import cast_all
from tests.helpers.gather_cases import (
    HADAMARD,
    PER_TENSOR,
    PLAIN,
    STRIPS,
    TILES,
    difference,
    draw_example,
    example,
    gather_examples,
    values,
    world,
)

CHUNK = 10  # examples between two looks at the clock


def laid_out_differences(device: torch.device) -> list[str]:
    """Gathered operands that are laid out for GEMMs stand for the same, in the memory order that a cast gives."""
    size, results = world().size, []
    for rows in ((64,) * size, tuple(range(30, 30 + size))):
        for row, column in ((PER_TENSOR, PER_TENSOR), (STRIPS, STRIPS), (TILES, TILES), (PLAIN, HADAMARD)):
            drawn, shards = example(rows, row, column, cols=256), ShardMap(rows)
            x, quantizer = values(drawn).to(device), drawn.quantizer()
            own = x[shards.first(world().rank) : shards.end(world().rank)]
            part = quantize_shard(own, quantizer, shards, world())
            found = gather(part, shards, world(), rowwise=True, columnwise=True, gemm_ready=True)
            whole = cast_all([x], [quantizer], gemm_ready=True)[0]
            strides = [
                (a.codes.stride(), a.scale_inv.stride()) == (b.codes.stride(), b.scale_inv.stride())
                for a, b in zip(found, whole, strict=True)
            ]
            wrong = difference(found, whole, any_layout=True)
            results.append(f"{row} {rows}: {wrong} strides {strides}" if wrong or not all(strides) else "")
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further examples after this long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    join("cuda")
    device = torch.device("cuda", torch.cuda.current_device())
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = random.Random(options.seed)
    wrong = [found for found in laid_out_differences(device) if found]
    begin, done, out_of_time = time.monotonic(), 0, torch.zeros((), device=device)
    while done < options.examples and not out_of_time:
        examples = [draw_example(draw.choice, size) for _ in range(min(CHUNK, options.examples - done))]
        results = gather_examples(rank, size, examples, "cuda")
        wrong += [f"{drawn}: {found}" for drawn, found in zip(examples, results, strict=True) if found]
        done += len(examples)
        out_of_time.fill_(time.monotonic() - begin > options.seconds)
        dist.all_reduce(out_of_time)  # ranks stop together
    for line in wrong:
        print(f"rank {rank}: {line}", flush=True)
    count = torch.tensor(len(wrong), device=device)
    dist.all_reduce(count)
    if rank == 0:
        print(f"{size} ranks, {done} examples (seed {options.seed}): {int(count)} differ")
    dist.destroy_process_group()
    sys.exit(int(count) > 0)


if __name__ == "__main__":
    main()
