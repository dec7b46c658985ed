"""Sharded attention and transformer layers: what ranks run, and what one process expects of each, bit for bit.

The oracles here put those of ``tensor_parallel_oracle`` together: every rank's heads attend one after the other,
by the very modules for attention, rotation and norms that are tested on their own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
    apply_rotary_pos_emb,
    autocast,
)
from minifloat.recipe import Recipe
from tests.helpers import tensor_parallel_oracle as oracle
from tests.helpers.tensor_parallel_cases import draw_in_backward, states
from tests.helpers.tensor_parallel_oracle import Results

HIDDEN, HEADS, FFN, BATCH = 48, 12, 72, 2
KINDS = {"attention": MultiheadAttention, "layer": TransformerLayer}


@dataclass(frozen=True)
class Case:
    """A layer on a group of ranks, and a few steps.

    Args:
        rows: positions of each rank; without sequence parallelism all ranks have their sum. ``encoder_rows``: the same
            of what a decoder attends to.
        batch_first: X is [b, s, hidden], for ``bshd``; packed: X is [tokens, hidden], two sequences.
        rotary: queries and keys are turned.
        scales: of the input of each step.
        call: more arguments of forward, the same on all ranks.
        options: more arguments of the constructor.
    """

    kind: str = "layer"
    rows: tuple[int, ...] = (3, 4)
    sequence_parallel: bool = True
    encoder_rows: tuple[int, ...] | None = None
    batch_first: bool = False
    packed: bool = False
    rotary: bool = False
    recipe: Recipe | None = None
    scales: tuple[float, ...] = (1.0,)
    dtype: torch.dtype = torch.float32
    call: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, **sharding: Any) -> Any:
        """The layer; unsharded without ``sharding``. Its parameters are drawn from one seed."""
        torch.manual_seed(5)
        sizes = (HIDDEN, FFN, HEADS) if self.kind == "layer" else (HIDDEN, HEADS)
        options = {"attention_dropout": 0.0, **({"hidden_dropout": 0.0} if self.kind == "layer" else {})}
        layer = KINDS[self.kind](*sizes, **options, **self.options, **sharding)
        with torch.no_grad():  # gammas and betas start as constants: other values show which is which
            for name, p in layer.named_parameters():
                if "norm.weight" in name or "norm.bias" in name:
                    p.add_(torch.linspace(-0.3, 0.4, p.numel()).view_as(p))
        return layer

    def sharded(self, group: Any = None) -> Any:
        tp_group = dist.group.WORLD if group is None else group
        return self.make(set_parallel_mode=True, sequence_parallel=self.sequence_parallel, tp_group=tp_group)

    def batch(self, number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The whole X, dY and encoder output of a step."""
        generator = torch.Generator().manual_seed(100 + number)

        def draw(length: int) -> Tensor:
            shape = (length,) if self.packed else (BATCH, length) if self.batch_first else (length, BATCH)
            return torch.randn(*shape, HIDDEN, generator=generator).to(self.dtype)

        encoder = None if self.encoder_rows is None else draw(sum(self.encoder_rows))
        return draw(sum(self.rows)) * self.scales[number], draw(sum(self.rows)), encoder

    def share(self, x: Tensor, rows: Sequence[int] | None = None) -> list[Tensor]:
        """What each rank has of ``x``."""
        rows = self.rows if rows is None else rows
        return list(x.split(list(rows))) if self.sequence_parallel else [x] * len(rows)

    def arguments(self, uneven: bool) -> dict[str, Any]:
        """Of forward, beside X."""
        given = dict(self.call)
        if self.rotary:
            longest = max(sum(self.rows), sum(self.encoder_rows or (0,)))
            given["rotary_pos_emb"] = RotaryPositionEmbedding(HIDDEN // HEADS, rotary_base=10.0)(longest)
        if self.packed:
            given["cu_seqlens_q"] = torch.tensor([0, 2, sum(self.rows)])
        if uneven and self.sequence_parallel:
            given["rows_per_rank"] = self.rows
            if self.encoder_rows is not None:
                given["encoder_rows_per_rank"] = self.encoder_rows
        return given


def step(
    layer: nn.Module, x: Tensor, dy: Tensor, encoder: Tensor | None, recipe: Recipe | None, **arguments: Any
) -> Results:
    """Results of one forward and backward: of Y whatever forward gives beside it, and all gradients."""
    x = x.detach().clone().requires_grad_()
    encoder = None if encoder is None else encoder.detach().clone().requires_grad_()
    layer.zero_grad()
    given = {} if encoder is None else {"encoder_output": encoder}
    with nullcontext() if recipe is None else autocast(recipe=recipe):
        outputs = layer(x, **given, **arguments)
    y, *others = outputs if isinstance(outputs, tuple) else (outputs,)
    results = {"y": y.detach()} | {f"output {i}": other.detach() for i, other in enumerate(others, 1)}
    torch.manual_seed(1)  # of stochastic rounding
    torch.autograd.backward([y, *others], [dy, *[torch.ones_like(other) for other in others]])
    grads = {"x": x, **({} if encoder is None else {"encoder": encoder}), **dict(layer.named_parameters())}
    return results | {name: t.grad for name, t in grads.items() if t.grad is not None}


Cuts = dict[str, tuple[int, tuple[int, ...]]]
"""Of each sharded parameter the dim that it is cut along, and the lengths of its fused parts."""


def run_case(rank: int, size: int, case: Case) -> tuple[list[Results], Cuts]:
    """What each step gives on a rank, with delayed scaling's state after it."""
    layer = case.sharded()
    arguments = case.arguments(len(set(case.rows)) > 1 or len(set(case.encoder_rows or ())) > 1)
    results = []
    for number in range(len(case.scales)):
        x, dy, encoder = case.batch(number)
        own = None if encoder is None else case.share(encoder, case.encoder_rows)[rank]
        given = (case.share(x)[rank], case.share(dy)[rank], own, case.recipe)
        results.append(step(layer, *given, **arguments) | states(layer))
    notes = {name: p for name, p in layer.named_parameters() if getattr(p, "tensor_model_parallel", False)}
    return results, {name: (p.partition_dim, p.partition_parts) for name, p in notes.items()}  # type: ignore[attr-defined]


def put_together(case: Case, by_rank: Sequence[Results], cuts: Cuts) -> Results:
    """What one process has, from what ranks have: of what all have in full, that of the first."""
    whole = {}
    for name, first in by_rank[0].items():
        parts = [each[name] for each in by_rank]
        if name in cuts:
            whole[name] = oracle.unshard(parts, *cuts[name])
        elif case.sequence_parallel and name in ("x", "y", "encoder", "output norm"):
            whole[name] = torch.cat(parts)
        else:
            assert all(torch.equal(first, other) for other in parts), name
            whole[name] = first
    return whole


# ---- the oracle ----


class Attention:
    """Self attention of [s, b, hidden] behind a norm, without dropout, sharded over the ranks of ``group``."""

    def __init__(self, module: MultiheadAttention, group: oracle.Group, case: Case) -> None:
        first, ranks = oracle.of(module.qkv, group, case.recipe), range(group.size)
        if module.qkv.linear.parameters_split is None:
            rows = [count * module.channels for count in (module.heads, module.groups, module.groups)]
            linear, norm = module.qkv.linear, module.qkv.norm
            bias = linear._bias_vector()
            sharded = oracle.Linear(linear.weight, bias, "column", group, case.recipe, linear.name, rows)
            first = oracle.LayerNormLinear(norm.norm, norm.weight, norm.bias, sharded)
        row = oracle.of(module.proj, group, case.recipe, "row")
        assert isinstance(first, oracle.LayerNormLinear) and isinstance(row, oracle.Linear)
        self.module, self.group, self.case, self.first, self.row = module, group, case, first, row
        self.heads, self.groups = module.heads // group.size, module.groups // group.size
        self.core = DotProductAttention(self.heads, module.channels, self.groups)
        norms = [module.query_norm, module.key_norm]
        self.norms = [[None if norm is None else copy.deepcopy(norm) for norm in norms] for _ in ranks]
        self.linears = {"qkv.linear": first.linear, "proj": row}
        self.grads: list[Results] = []

    def forward(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Y of each rank, matrices all."""
        self.projected = [x.detach().requires_grad_() for x in self.first.forward(xs)]
        with torch.enable_grad():
            self.attended = [self._attend(x, *self.norms[rank]) for rank, x in enumerate(self.projected)]
        return self.row.forward([x.detach() for x in self.attended], [len(x) for x in xs])

    def _attend(self, x: Tensor, query_norm: nn.Module | None, key_norm: nn.Module | None) -> Tensor:
        heads = x.unflatten(0, (-1, BATCH)).unflatten(-1, (-1, self.module.channels))
        q, k, v = heads.split((self.heads, self.groups, self.groups), -2)
        angles = self.case.arguments(False).get("rotary_pos_emb")
        if angles is not None:
            q, k = (apply_rotary_pos_emb(t, angles) for t in (q, k))
        if query_norm is not None and key_norm is not None:
            q, k = query_norm(q), key_norm(k)
        attended: Tensor = self.core(q, k, v)
        return attended.flatten(0, 1)

    def backward(self, dys: Sequence[Tensor], streams: Sequence[Tensor] | None = None) -> list[Tensor]:
        """dX of each rank; ``streams``: other gradients of its X, added before the one rounding."""
        for attended, gradient in zip(self.attended, self.row.backward(dys), strict=True):
            torch.autograd.backward([attended], [gradient])
        dxs = self.first.backward([x.grad for x in self.projected if x.grad is not None], streams)
        of_norms = self._of_norms()
        self.grads = []
        for first, row in zip(self.first.grads, self.row.grads, strict=True):
            grads = {f"qkv.{name}": grad for name, grad in first.items()}
            self.grads.append(grads | {f"proj.{name}": grad for name, grad in row.items()} | of_norms)
        return dxs

    def _of_norms(self) -> Results:
        """The gradients of the norms of heads: every rank adds those of its own, sequence parallel or not."""
        grads = {}
        for place, kind in enumerate(("query_norm", "key_norm")):
            norms = [of_rank[place] for of_rank in self.norms]
            if norms[0] is not None:
                for name, _ in norms[0].named_parameters():
                    parts = [norm.get_parameter(name).grad for norm in norms if norm is not None]
                    grads[f"{kind}.{name}"] = self.group.add([part for part in parts if part is not None])
                for norm in norms:
                    norm.zero_grad()  # type: ignore[union-attr]
        return grads


class Layer:
    """An encoder layer: attention and MLP, each around a residual connection."""

    def __init__(self, module: TransformerLayer, group: oracle.Group, case: Case) -> None:
        self.attention = Attention(module.self_attention, group, case)
        mlp = oracle.of(module.layernorm_mlp, group, case.recipe)
        assert isinstance(mlp, oracle.LayerNormMLP)
        self.mlp = mlp
        self.linears = {f"self_attention.{name}": linear for name, linear in self.attention.linears.items()}
        self.linears |= {f"layernorm_mlp.{name}": linear for name, linear in mlp.linears.items()}
        self.grads: list[Results] = []

    def forward(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Y of each rank."""
        hs = [x + y for x, y in zip(xs, self.attention.forward(xs), strict=True)]
        return [h + y for h, y in zip(hs, self.mlp.forward(hs), strict=True)]

    def backward(self, dys: Sequence[Tensor]) -> list[Tensor]:
        """dX of each rank."""
        dhs = self.mlp.backward(dys, dys)
        dxs = self.attention.backward(dhs, dhs)
        self.grads = [
            {f"self_attention.{name}": grad for name, grad in first.items()}
            | {f"layernorm_mlp.{name}": grad for name, grad in second.items()}
            for first, second in zip(self.attention.grads, self.mlp.grads, strict=True)
        ]
        return dxs


def expected(case: Case) -> list[list[Results]]:
    """Of each step, what every rank has."""
    group = oracle.Group(len(case.rows), case.sequence_parallel)
    model = (Layer if case.kind == "layer" else Attention)(case.make(), group, case)
    draw_in_backward(list(model.linears.values()), group.size)
    steps = []
    for number in range(len(case.scales)):
        x, dy, _ = case.batch(number)
        xs, dys = ([each.flatten(0, 1) for each in case.share(t)] for t in (x, dy))
        with torch.no_grad():
            ys = model.forward(xs)
            for linear in model.linears.values():
                linear.finish(0)
            dxs = model.backward(dys)
            for linear in model.linears.values():
                linear.finish(1)
        found = zip(ys, dxs, model.grads, strict=True)
        steps.append([{"y": y, "x": dx} | grads | _states(model.linears) for y, dx, grads in found])
    return steps


def _states(linears: dict[str, oracle.Linear]) -> Results:
    """Delayed scaling's state by the names of buffers."""
    return {
        f"{name}.{side}_scaling.{key}": getattr(history, key).clone()
        for name, linear in linears.items()
        for side, history in zip(("forward", "backward"), linear.histories, strict=False)
        for key in ("scale", "amax_history")
    }


def as_oracle(results: Results) -> Results:
    """With activations as matrices, and query, key and value of one linear as one parameter."""
    joined: Results = {}
    for name, value in results.items():
        for part in ("query", "key", "value"):
            for kind in ("weight", "bias"):
                if name.endswith(f".{part}_{kind}"):
                    name = name.removesuffix(f"{part}_{kind}") + kind
                    value = torch.cat([joined[name], value]) if name in joined else value
        joined[name] = value.reshape(-1, value.shape[-1]) if name in ("x", "y") else value
    return joined
