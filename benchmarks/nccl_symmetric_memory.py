"""Products on symmetric memory beside those of handles:
``torchrun --nproc-per-node 2 benchmarks/nccl_symmetric_memory.py``.

Two steps of every kind of module, in bf16 and with one scale a tensor, both ways on the same ranks. Weight gradients of
a single linear read the very codes that handles gather, in the same products, and are compared to the bit; all else may
differ by the order of sums. Ends with an error if anything differs more, or went another way than it should.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minifloat.functional import count_gemms
from minifloat.functional.linear_config import Overlap
from minifloat.functional.tensor_parallel import set_overlap
from minifloat.recipe import DelayedScaling, Recipe, named
from tests.helpers.fused_model import run
from tests.helpers.tensor_parallel_cases import Case, Results

RECIPES: dict[str, Recipe | None] = {
    "none": None, "delayed": DelayedScaling(amax_history_len=3), "current": named("current"),
}  # fmt: skip
FUSED = {"column": {"fprop"}, "norm": {"fprop"}, "row": {"fprop", "dgrad"}, "gated mlp": {"fprop", "dgrad"}}
SINGLE = ("column", "row", "norm")
ROWS = (640, 5)  # of each rank
# Relative L2. A few roundings to bf16, of addends and of sums; in an MLP such a difference, of 2^-9, moves one code in
# thirty by a step, of 2^-4 on average.
SINGLE_BOUND, MLP_BOUND = 0.005, 0.03


@dataclass(frozen=True)
class Example:
    """One module: its kind and recipe, the rows of each rank, whether weights need gradients; what should be fused."""

    kind: str
    recipe: str
    rows: tuple[int, ...]
    frozen: bool = False

    @property
    def fused(self) -> set[str]:
        if len(set(self.rows)) > 1:
            return set()
        return FUSED[self.kind] | ({"dgrad"} if self.frozen else set())

    @property
    def case(self) -> Case:
        options = {"bias": False} if self.recipe == "none" else {}
        recipe = RECIPES[self.recipe]
        return Case(self.kind, self.rows, recipe=recipe, scales=(1.0, 3.0), K=256, N=384, F=512, options=options)


def examples(size: int) -> list[Example]:
    found = [Example(kind, recipe, (rows,) * size) for rows in ROWS for kind in FUSED for recipe in RECIPES]
    found += [Example("column", recipe, (640,) * size, frozen=True) for recipe in RECIPES]
    return found + [Example(kind, "current", tuple(range(30, 30 + size))) for kind in ("column", "row")]


def steps(example: Example, overlap: Overlap) -> tuple[list[Results], set[str]]:
    """What each step gave, and which products went through symmetric memory."""
    case, rank = example.case, dist.get_rank()
    module = case.make(dist.group.WORLD).cuda()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not (example.frozen and "weight" in name))
    set_overlap(module, overlap)
    extra = {} if case.rows_per_rank is None else {"rows_per_rank": case.rows_per_rank}
    results = []
    with count_gemms() as counted:
        for number in range(len(case.scales)):
            xs, dys = case.shares(*case.batch(number))
            results.append(run(module, xs[rank].cuda(), dys[rank].cuda().contiguous(), case.recipe, **extra))
    return results, {each.gemm for each in counted if each.backend == "symmetric memory"}


def error(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return float("inf")
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def compare(example: Example) -> tuple[str, bool]:
    """A line of the table, and whether all is well."""
    expected, nothing = steps(example, "handles")
    found, fused = steps(example, "symmetric_memory")
    errors: dict[str, float] = {}
    well = fused == example.fused and not nothing
    for got, want in zip(found, expected, strict=True):
        well &= got.keys() == want.keys()
        for name, value in want.items():
            errors[name] = max(errors.get(name, 0.0), error(got[name], value))
            if "weight" in name and "norm" not in name and example.kind in SINGLE:
                well &= torch.equal(got[name], value)
    bound = SINGLE_BOUND if example.kind in SINGLE else MLP_BOUND
    well &= max(errors.values()) <= bound and (bool(fused) or max(errors.values()) == 0)
    rows = str(example.rows[0]) if len(set(example.rows)) == 1 else "ragged"
    told = "  ".join(f"{name} {value:.1g}" for name, value in errors.items())
    what = f"{example.kind:10} {example.recipe:8} {rows:>6} rows{' frozen' * example.frozen:8}"
    return f"{what} {'+'.join(sorted(fused)) or 'handles':12} {told}{'' if well else '  WRONG'}", well


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    wrong = torch.zeros((), device=device)
    for example in examples(dist.get_world_size()):
        line, well = compare(example)
        wrong += not well
        if dist.get_rank() == 0 or not well:
            print(f"rank {dist.get_rank()}: {line}", flush=True)
    dist.all_reduce(wrong)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: {int(wrong)} wrong")
    dist.destroy_process_group()
    sys.exit(int(wrong) > 0)


if __name__ == "__main__":
    main()
