"""What the ranks of a tensor-parallel group compute, in one process: what sharded modules are held to, bit for bit.

Every rank's part is computed one after the other by the equations below, from casts, products, norms and activations
that are tested on their own. The rules are those of D18 in ``docs/architecture.md``:

- What is gathered is quantized as the whole: ``quantize(cat(shards))``.
- What is sharded and not gathered is quantized shard by shard, weights included.
- Partial results are rounded to the dtype of the activations on each rank and added in that dtype, in rank order
  (``in_rank_order``); a reduce-scatter gives each rank its rows of that sum.
- Under sequence parallel the gradients of replicated parameters (norm, bias of a row-parallel linear) are sums over the
  ranks, each rank's rounded before; without, each rank has the whole gradient.
- Delayed scaling: all ranks have the same scales, and an amax is the largest of the ranks'.

For X [M, K], W [N, K], rank r of n:

====================  ====================================  =======================================
\\                     column: W_r [N/n, K], b_r             row: W_r [N, K/n], b
====================  ====================================  =======================================
fprop                 Y_r = X W_r^T + b_r                   Y = sum_r(X_r W_r^T) + b
dgrad                 dX = sum_r(dY_r W_r)                  dX_r = dY W_r
wgrad                 dW_r = dY_r^T X                       dW_r = dY^T X_r
bias                  db_r = rows of dY_r summed            db = rows of dY summed
sequence parallel     X gathered, dX reduce-scattered       dY gathered, Y reduce-scattered, db summed
====================  ====================================  =======================================

In a group of one the bias of a row-parallel linear is added in fp32 inside the product, as ever; else after the sum.

All tensors are matrices: rows of the ranks follow each other in the first dim. A library's products in high precision
may depend on the number of threads: run this with as many as the ranks have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minifloat import delayed, nn
from minifloat.formats import IDENTITY, ROWWISE
from minifloat.functional import gemm
from minifloat.functional.norm_activation import Activation, Norm
from minifloat.functional.quantize import BACKWARD_SLOTS, FORWARD_SLOTS, linear_config
from minifloat.operand import Operand, Quantized
from minifloat.ops.activation import activation_backward, activation_forward
from minifloat.ops.norm import norm_backward, norm_forward
from minifloat.quantizer import Quantizer, cast_all
from minifloat.recipe import CustomRecipe, QuantizerRole, Recipe

FP32 = torch.float32
Mode = Literal["column", "row"]
Results = dict[str, Tensor]
"""Of one rank: ``y``, and the gradients: ``x``, and parameters by their names in the unsharded module."""


def _identity(role: QuantizerRole) -> Quantizer:
    return Quantizer.identity()


NO_RECIPE = CustomRecipe(_identity)


# ---- the group ----


def in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """((p0 + p1) + p2) + ..., each sum rounded to their dtype.

    Of two ranks that is what any all-reduce gives, since a sum of two does not depend on their order. Of more a ring
    starts at another rank for each piece of the buffer: :func:`order_bound` says how far apart two orders can be.
    """
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def order_bound(parts: Sequence[Tensor]) -> Tensor:
    """How much two orders of adding ``parts`` can differ, float64, elementwise; 0 for one or two parts.

    Each of the n - 1 additions rounds a partial sum, of magnitude at most ``sum(|p|) (1 + u)^(n - 1)``, to within u of
    it; sums of denormal numbers are exact. Twice that, one for each order.
    """
    magnitude = torch.stack([part.double().abs() for part in parts]).sum(0)
    additions, u = len(parts) - 1, torch.finfo(parts[0].dtype).eps / 2
    return 2 * additions * u * (1 + u) ** additions * magnitude * (additions > 1)


@dataclass(frozen=True)
class Group:
    """How many ranks there are, whether they share the rows of activations out, and how partial results are added."""

    size: int
    sequence_parallel: bool = False
    add: Callable[[Sequence[Tensor]], Tensor] = in_rank_order

    def gather(self, xs: Sequence[Tensor]) -> Tensor:
        """The whole: rows of all ranks, or what each rank has already."""
        if self.sequence_parallel:
            return torch.cat(list(xs))
        assert all(x.shape == xs[0].shape and torch.equal(x.nan_to_num(), xs[0].nan_to_num()) for x in xs)
        return xs[0]

    def reduce(self, parts: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        """The sum of the parts: each rank's rows of it, or all of it."""
        total = self.add(parts)
        return list(total.split(list(rows))) if self.sequence_parallel else [total] * self.size

    def replicated(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradient of a parameter that all ranks have."""
        return [self.add(gradients)] * self.size if self.sequence_parallel else list(gradients)


def shard(x: Tensor, rank: int, size: int, dim: int = 0, parts: Sequence[int] | None = None) -> Tensor:
    """What a rank holds of a parameter: an equal piece along ``dim`` of each of the fused parts of these lengths."""
    pieces = x.split(list(parts or [x.shape[dim]]), dim)
    assert all(piece.shape[dim] % size == 0 for piece in pieces), (x.shape, parts, size)
    return torch.cat([piece.chunk(size, dim)[rank] if piece.shape[dim] else piece for piece in pieces], dim)


def unshard(shards: Sequence[Tensor], dim: int = 0, parts: Sequence[int] | None = None) -> Tensor:
    """The parameter of which these are the :func:`shard` of each rank."""
    lengths = [length // len(shards) for length in parts] if parts else [shards[0].shape[dim]]
    by_part = zip(*(each.split(lengths, dim) for each in shards), strict=True)
    return torch.cat([torch.cat(list(pieces), dim) for pieces in by_part], dim)


# ---- one linear ----


class Linear:
    """A column- or row-parallel linear: ``forward``, then ``backward``, and all that the ranks hold then.

    Args:
        weight, bias: the whole parameters, [N, K] and [N].
        recipe: None computes in high precision.
        name: as custom recipes know the layer.
        parts: rows of the fused parts of a column-parallel weight, each of which is sharded by itself.

    Attributes:
        gathered: by ``"input"`` or ``"grad_output"`` the operands of the whole tensor that the ranks gathered.
        histories: delayed scaling's forward and backward state, alike on all ranks; empty without.
        rngs: by the same names, and ``"weight"``, seed and offset of stochastic rounding on each rank, int64 [2]; what
            is not there is drawn in the order of the casts.
        grads: of each rank, ``weight`` and ``bias``, in the dtypes of the parameters.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        mode: Mode,
        group: Group,
        recipe: Recipe | None,
        name: str = "",
        parts: Sequence[int] | None = None,
    ) -> None:
        self.mode, self.group = mode, group
        self.plan = linear_config(NO_RECIPE if recipe is None else recipe, name)
        ranks, dim = range(group.size), 0 if mode == "column" else 1
        self.weights = [shard(weight.detach(), rank, group.size, dim, parts) for rank in ranks]
        self.biases: list[Tensor | None] = [None] * group.size
        if bias is not None:
            bias = bias.detach()
            self.biases = [shard(bias, rank, group.size, 0, parts) if mode == "column" else bias for rank in ranks]
        self.gathered: dict[str, Quantized] = {}
        self.rngs: dict[str, Sequence[Tensor]] = {}
        self.grads: list[Results] = []
        self.histories: list[delayed.History] = []
        if self.plan.delayed is not None:
            recipe = self.plan.delayed
            for slots, forward in ((FORWARD_SLOTS, True), (BACKWARD_SLOTS, False)):
                scale, amaxes = weight.new_ones(len(slots), dtype=FP32), (recipe.amax_history_len, len(slots))
                history = weight.new_zeros(amaxes, dtype=FP32)
                self.histories.append(delayed.History(scale, history, recipe, recipe.rules[0 if forward else 1]))

    def forward(
        self, xs: Sequence[Tensor], rows: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Y of each rank.

        Args:
            xs: X of each rank: rows (column, sequence parallel), all (column), or columns (row).
            rows: of Y on each rank (row, sequence parallel); equal numbers if not given.
            dtype: of the activations, where X is the fp32 result of a norm or an activation.
        """
        plan, self.dtype = self.plan, dtype or xs[0].dtype
        self.rows = [len(x) for x in xs] if self.mode == "column" else list(rows or self._equal_rows(len(xs[0])))
        whole = self.mode == "column"
        x, w = self.quantize("input", xs, whole), self.quantize("weight", self.weights, False)
        inside = self.biases if self.mode == "column" or self.group.size == 1 else [None] * self.group.size
        ys = [
            gemm.fprop(*operands, out_dtype=self.dtype, fast_accum=plan.fast_fprop)
            for operands in zip(x, w, inside, strict=True)
        ]
        if self.mode == "row":
            ys = self.group.reduce(ys, self.rows)
            if self.group.size > 1:
                ys = [y if b is None else (y + b).to(self.dtype) for y, b in zip(ys, self.biases, strict=True)]
        self.x, self.w = x, w
        if plan.backward_override == "high_precision":
            self.x, self.w = self._as_is(xs, whole), self._as_is(self.weights, False)
        elif plan.backward_override == "dequantized":
            values = [[each.along(ROWWISE).dequantize(self.dtype) for each in operands] for operands in (x, w)]
            self.x, self.w = ([as_is(each) for each in of_ranks] for of_ranks in values)
        return ys

    def backward(self, dys: Sequence[Tensor]) -> list[Tensor]:
        """dX of each rank, as X came to it; then ``grads`` are there."""
        plan, group, whole = self.plan, self.group, self.mode == "row"
        overridden = plan.backward_override is not None
        dy = self._as_is(dys, whole) if overridden else self.quantize("grad_output", dys, whole)
        dxs = [
            gemm.dgrad(*operands, out_dtype=self.dtype, fast_accum=plan.fast_dgrad)
            for operands in zip(dy, self.w, strict=True)
        ]
        dws = [
            gemm.wgrad(*operands, out_dtype=self.dtype, fast_accum=plan.fast_wgrad)
            for operands in zip(dy, self.x, strict=True)
        ]
        dbs = [each.sum(0) for each in dys]
        dbs = group.replicated(dbs) if self.mode == "row" else dbs
        self.grads = [
            {"weight": dw.to(w.dtype)} | ({} if b is None else {"bias": db.to(b.dtype)})
            for dw, db, w, b in zip(dws, dbs, self.weights, self.biases, strict=True)
        ]
        return group.reduce(dxs, self.rows) if self.mode == "column" else dxs

    def quantize(self, kind: str, xs: Sequence[Tensor], whole: bool) -> list[Quantized]:
        """Operands for each rank; ``whole``: all read those of the gathered tensor."""
        rngs = self.rngs.get(kind, [None] * self.group.size)
        if whole:
            self.gathered[kind] = operands = self._cast(kind, self.group.gather(xs), rngs[0])
            return [operands] * self.group.size
        return [self._cast(kind, x, rng) for x, rng in zip(xs, rngs, strict=True)]

    def _cast(self, kind: str, x: Tensor, rng: Tensor | None) -> Quantized:
        quantizer = getattr(self.plan, kind).with_usage(columnwise=self.plan.backward_override is None)
        if not self.histories:
            return cast_all([x], [quantizer], None, [rng])[0]
        forward = kind in FORWARD_SLOTS
        slot = (FORWARD_SLOTS if forward else BACKWARD_SLOTS).index(kind)
        scale, amax_history, *_ = self.histories[0 if forward else 1]
        result = cast_all([x], [quantizer], None, [rng], scales=[scale[slot : slot + 1]])[0]
        for operand in result:
            if operand is not None and operand.format.scale_rule == "given" and operand.amax is not None:
                amax_history[0, slot] = torch.maximum(amax_history[0, slot], operand.amax[0])
        return result

    def _as_is(self, xs: Sequence[Tensor], whole: bool) -> list[Quantized]:
        return [as_is(self.group.gather(xs))] * self.group.size if whole else [as_is(x) for x in xs]

    def _equal_rows(self, rows: int) -> list[int]:
        assert not self.group.sequence_parallel or rows % self.group.size == 0, (rows, self.group.size)
        return [rows // self.group.size] * self.group.size

    def finish(self, direction: int) -> None:
        """Delayed scaling's update at the end of forward (0) or backward (1)."""
        if self.histories:
            delayed.update([self.histories[direction]])


def as_is(x: Tensor) -> Quantized:
    """High precision."""
    return Quantized(*[Operand(x, None, None, IDENTITY, ROWWISE, (x.shape[0], x.shape[1]), x.dtype)] * 2)


def only_delayed(quantizer: Quantizer) -> bool:
    """Delayed scaling in each orientation: what comes before hands its fp32 result to the cast."""
    return not quantizer.chained and all(fmt.scale_rule == "given" for fmt, _ in quantizer.casts)


def producer_dtype(linear: Linear, dtype: torch.dtype) -> torch.dtype:
    """Of what a norm or an activation hands to a linear: fp32, or the dtype of the activations."""
    override = linear.plan.backward_override
    reads_fp32 = (
        only_delayed(linear.plan.input.with_usage(columnwise=override is None)) and override != "high_precision"
    )
    return FP32 if reads_fp32 else dtype


# ---- fused modules ----


class LayerNormLinear:
    """The norm of each rank's rows, then a column-parallel linear."""

    def __init__(self, norm: Norm, gamma: Tensor, beta: Tensor | None, linear: Linear) -> None:
        self.norm, self.linear, self.group = norm, linear, linear.group
        self.gamma, self.beta = gamma.detach(), None if beta is None else beta.detach()
        self.linears = {"linear": linear}
        self.grads: list[Results] = []

    def forward(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Y of each rank, from its X."""
        norm, dtype = self.norm, producer_dtype(self.linear, xs[0].dtype)
        options = norm.normalization, norm.eps, norm.zero_centered_gamma
        outputs = [norm_forward(x, self.gamma, self.beta, *options, dtype) for x in xs]
        self.saved = [(x, self.gamma, *statistics[:2]) for x, (_, *statistics) in zip(xs, outputs, strict=True)]
        return self.linear.forward([n for n, *_ in outputs], dtype=xs[0].dtype)

    def backward(self, dys: Sequence[Tensor], streams: Sequence[Tensor] | None = None) -> list[Tensor]:
        """dX of each rank; ``streams``: other gradients of its X, added before the one rounding."""
        dns, norm, others = self.linear.backward(dys), self.norm, streams or [None] * len(dys)
        outputs = [
            norm_backward(dn, *saved, norm.normalization, norm.zero_centered_gamma, other)
            for dn, saved, other in zip(dns, self.saved, others, strict=True)
        ]
        dxs, *sums = zip(*outputs, strict=True)
        dgammas, dbetas = (self.group.replicated(each) for each in sums)
        self.grads = [{"norm.weight": dgamma} for dgamma in dgammas]
        for rank, grads in enumerate(self.grads):
            grads |= {} if self.beta is None else {"norm.bias": dbetas[rank]}
            grads |= {f"linear.{name}": grad for name, grad in self.linear.grads[rank].items()}
        return list(dxs)


class LayerNormMLP:
    """Norm and column-parallel fc1, the activation of each rank's columns, row-parallel fc2."""

    def __init__(self, first: LayerNormLinear, activation: Activation, fc2: Linear) -> None:
        self.first, self.activation, self.fc2 = first, activation, fc2
        self.linears = {"fc1": first.linear, "fc2": fc2}
        self.grads: list[Results] = []

    def forward(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Y of each rank, from its X."""
        of, dtype = self.activation, producer_dtype(self.fc2, xs[0].dtype)
        self.hs = self.first.forward(xs)
        activated = [activation_forward(h, of.name, of.parameters, dtype, False)[0] for h in self.hs]
        return self.fc2.forward(activated, [len(x) for x in xs], xs[0].dtype)

    def backward(self, dys: Sequence[Tensor], streams: Sequence[Tensor] | None = None) -> list[Tensor]:
        """dX of each rank; ``streams`` as of :class:`LayerNormLinear`."""
        of, plan, das = self.activation, self.first.linear.plan, self.fc2.backward(dys)
        wide = only_delayed(plan.grad_output) and plan.backward_override is None and not of.gated
        dhs = [
            activation_backward(da, h, of.name, of.parameters, FP32 if wide else h.dtype, False, False)[0]
            for da, h in zip(das, self.hs, strict=True)
        ]
        dxs = self.first.backward(dhs, streams)
        self.grads = [
            {name.replace("linear.", "fc1."): grad for name, grad in first.items()}
            | {f"fc2.{name}": grad for name, grad in second.items()}
            for first, second in zip(self.first.grads, self.fc2.grads, strict=True)
        ]
        return dxs


Module = Linear | LayerNormLinear | LayerNormMLP


def of(module: torch.nn.Module, group: Group, recipe: Recipe | None, mode: Mode = "column") -> Module:
    """The oracle of an unsharded module of minifloat: its parameters, shared out. ``mode`` is that of a ``Linear``."""
    if isinstance(module, nn.Linear):
        parts = None if module.parameters_split is None else list(module.parameters_split.values())
        return Linear(module._weight_matrix(), module._bias_vector(), mode, group, recipe, module.name, parts)
    if isinstance(module, nn.LayerNormLinear):
        linear = of(module.linear, group, recipe)
        assert isinstance(linear, Linear)
        return LayerNormLinear(module.norm.norm, module.norm.weight, module.norm.bias, linear)
    assert isinstance(module, nn.LayerNormMLP)
    fc1 = module.fc1
    parts = [fc1.out_features // 2] * 2 if module.activation.gated else None
    first = Linear(fc1._weight_matrix(), fc1._bias_vector(), "column", group, recipe, fc1.name, parts)
    fc2 = of(module.fc2, group, recipe, "row")
    assert isinstance(fc2, Linear)
    norm = LayerNormLinear(module.norm.norm, module.norm.weight, module.norm.bias, first)
    return LayerNormMLP(norm, module.activation, fc2)


@torch.no_grad()
def step(module: Module, xs: Sequence[Tensor], dys: Sequence[Tensor], seed: int = 1) -> list[Results]:
    """One forward and backward; delayed scaling's state moves on. ``seed``: set between the two, for what is drawn."""
    linears = [module] if isinstance(module, Linear) else list(module.linears.values())
    ys = module.forward(xs)
    for linear in linears:
        linear.finish(0)
    torch.manual_seed(seed)
    dxs = module.backward(dys)
    for linear in linears:
        linear.finish(1)
    return [{"y": y, "x": dx} | grads for y, dx, grads in zip(ys, dxs, module.grads, strict=True)]
