"""Sharded modules beside the oracle of ``tensor_parallel_oracle``: what ranks run, and what one process expects.

Every rank makes the whole input and output gradient from a seed and takes its own share, so that ranks have different
data and the oracle has the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional import gemm
from minifloat.nn import LayerNormLinear, LayerNormMLP, Linear
from minifloat.operand import Operand
from minifloat.ops.quantize import draw_seed
from minifloat.recipe import Recipe
from tests.helpers import tensor_parallel_oracle as oracle
from tests.helpers.fused_model import fill, run

BF16, FP32 = torch.bfloat16, torch.float32
Results = dict[str, Tensor]
KINDS = ("column", "row", "norm", "mlp", "gated mlp")


@dataclass(frozen=True)
class Case:
    """One module on a group of ranks, and a few steps.

    Args:
        kind: one of ``KINDS``.
        rows: of X (of Y, if row-parallel) on each rank; without sequence parallelism all ranks have their sum.
        recipe: None computes in high precision.
        scales: of the input of each step.
        inner: extents of X between the first and the last.
        K, N, F: columns of X and Y, and of what lies between in an MLP.
        options: of the module's constructor.
    """

    kind: str
    rows: tuple[int, ...] = (5, 5)
    sequence_parallel: bool = True
    recipe: Recipe | None = None
    scales: tuple[float, ...] = (1.0,)
    inner: tuple[int, ...] = ()
    dtype: torch.dtype = BF16
    K: int = 40
    N: int = 72
    F: int = 56
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def mode(self) -> Any:
        return self.kind if self.kind in ("column", "row") else "column"

    @property
    def gathers_input(self) -> bool:
        """Else dY is what comes in rows; Y and dX of an MLP do both."""
        return self.kind != "row"

    def make(self, tp_group: Any = None) -> nn.Module:
        """The module, unsharded without a group: the same start values."""
        torch.manual_seed(5)
        sharded = {"tp_group": tp_group, "sequence_parallel": self.sequence_parallel} if tp_group is not None else {}
        params = BF16 if self.recipe is None and self.dtype == BF16 else FP32
        options = {"params_dtype": params, **sharded, **self.options}
        mode = {"parallel_mode": self.mode} if sharded else {}
        module: nn.Module
        if self.kind in ("column", "row"):
            return Linear(self.K, self.N, **mode, **options)
        if self.kind == "norm":
            module = LayerNormLinear(self.K, self.N, **mode, **options)
        else:
            gated = {"activation": "swiglu", "normalization": "RMSNorm"} if self.kind == "gated mlp" else {}
            parallel = {"set_parallel_mode": True} if sharded else {}
            module = LayerNormMLP(self.K, self.F, **gated, **parallel, **options)  # type: ignore[arg-type]
        fill(module.norm)  # type: ignore[arg-type]
        return module

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """The whole X and dY of a step."""
        generator = torch.Generator().manual_seed(100 + number)
        lead, width = (sum(self.rows), *self.inner), self.K if "mlp" in self.kind else self.N
        x = torch.randn(*lead, self.K, generator=generator) * self.scales[number]
        return x.to(self.dtype), torch.randn(*lead, width, generator=generator).to(self.dtype)

    def shares(self, x: Tensor, dy: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """X and dY of each rank."""
        size = len(self.rows)
        by_rows = list(x.split(list(self.rows))) if self.sequence_parallel else [x] * size
        dy_by_rows = list(dy.split(list(self.rows))) if self.sequence_parallel else [dy] * size
        if "mlp" in self.kind:
            return by_rows, dy_by_rows
        if self.kind == "row":
            return list(x.chunk(size, -1)), dy_by_rows
        parts = self.options.get("parameters_split")
        return by_rows, [oracle.shard(dy, r, size, dy.dim() - 1, parts and list(parts.values())) for r in range(size)]

    @property
    def rows_per_rank(self) -> tuple[int, ...] | None:
        return self.rows if self.sequence_parallel and len(set(self.rows)) > 1 else None


# ---- on a rank ----


@contextmanager
def multiplied(gathers_input: bool) -> Iterator[list[Operand]]:
    """Lists the operand that was, or would be, gathered of each GEMM that reads it."""
    seen: list[Operand] = []
    place = {"fprop": 0, "wgrad": 1} if gathers_input else {"dgrad": 0, "wgrad": 0}
    check = gemm.check_operands

    def spied(name: str, *operands: Operand) -> Any:
        if name in place:
            seen.append(operands[place[name]])
        return check(name, *operands)

    with mock.patch.object(gemm, "check_operands", spied):
        yield seen


def states(module: nn.Module) -> Results:
    """Delayed scaling's buffers."""
    return {key: value.clone() for key, value in module.state_dict().items() if "_scaling." in key}


def run_case(rank: int, size: int, case: Case) -> tuple[list[Results], list[Operand]]:
    """What every step gave, with delayed scaling's state after it, and what GEMMs read in the last."""
    module = case.make(dist.group.WORLD)
    results = []
    for number in range(len(case.scales)):
        xs, dys = case.shares(*case.batch(number))
        extra = {} if case.rows_per_rank is None else {"rows_per_rank": case.rows_per_rank}
        with multiplied(case.gathers_input) as seen:
            results.append(run(module, xs[rank], dys[rank], case.recipe, **extra) | states(module))
    return results, seen


# ---- in one process ----


def expected(
    case: Case, add: Callable[[Sequence[Tensor]], Tensor] = oracle.in_rank_order
) -> tuple[list[list[Results]], oracle.Module]:
    """The same of each rank, by step, and the oracle after the last. ``y`` and ``x`` are matrices.

    ``add``: how parts are summed over the ranks.
    """
    group = oracle.Group(len(case.rows), case.sequence_parallel, add)
    with torch.no_grad():
        model = oracle.of(case.make(), group, case.recipe, case.mode)
    draw_in_backward(linears_of(model), len(case.rows))
    steps = []
    for number in range(len(case.scales)):
        xs, dys = case.shares(*case.batch(number))
        steps.append([each | oracle_states(model) for each in step(case, model, xs, dys)])
    return steps, model


@torch.no_grad()
def step(case: Case, model: oracle.Module, xs: Sequence[Tensor], dys: Sequence[Tensor]) -> list[Results]:
    """One forward and backward of the oracle."""
    xs, dys = ([x.reshape(-1, x.shape[-1]) for x in each] for each in (xs, dys))
    ys = model.forward(xs, [len(dy) for dy in dys]) if isinstance(model, oracle.Linear) else model.forward(xs)
    for linear in linears_of(model):
        linear.finish(0)
    dxs = model.backward(dys)
    for linear in linears_of(model):
        linear.finish(1)
    return [{"y": y, "x": dx} | grads for y, dx, grads in zip(ys, dxs, model.grads, strict=True)]


def linears_of(model: oracle.Module) -> list[oracle.Linear]:
    return [model] if isinstance(model, oracle.Linear) else list(model.linears.values())


def oracle_states(model: oracle.Module) -> Results:
    """Delayed scaling's state by the names of a module's buffers."""
    named = {"": model} if isinstance(model, oracle.Linear) else {f"{k}.": v for k, v in model.linears.items()}
    return {
        f"{name}{side}_scaling.{key}": getattr(history, key).clone()
        for name, linear in named.items()
        for side, history in zip(("forward", "backward"), linear.histories, strict=False)
        for key in ("scale", "amax_history")
    }


def draw_in_backward(linears: Sequence[oracle.Linear], size: int) -> None:
    """Every rank draws by itself, from the generator that :func:`run` seeds, for the last linear first."""
    torch.manual_seed(1)
    for linear in reversed(linears):
        if linear.plan.grad_output.row_format.rounding == "stochastic" and linear.plan.backward_override is None:
            linear.rngs["grad_output"] = [draw_seed(torch.empty(1))] * size


def gathered(model: oracle.Linear, kind: str) -> list[Operand]:
    """What the GEMMs of one linear read that :func:`multiplied` lists, in its order."""
    whole = model.gathered[kind]
    return [whole.along(ROWWISE), whole.along(COLUMNWISE)]
