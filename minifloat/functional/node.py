"""A pass of a linear as one operation: what a compiler sees of it, and what the compiled graph runs.

``minifloat::node(direction, key, tensors, sizes)`` runs the forward or the backward of ``functional/linear.py``. Its
key spells the config, the options and what else decides on the pass, so that a graph that was saved finds its plan in
another process. A compiler gets shapes from the key and the sizes, and traces nothing of the pass; eager code, and
what a CUDA graph captures, runs the same lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat import backends
from minifloat.autocast import DelayedCall
from minifloat.delayed import History
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE, Format
from minifloat.functional import linear
from minifloat.functional.autograd import first_order, guarded
from minifloat.functional.exchange import LOCAL
from minifloat.functional.quantize import LinearConfig, Options, delayed_scale
from minifloat.functional.spec import Given, Spec, make_spec
from minifloat.functional.weight_source import Product, WeightSource
from minifloat.operand import Operand
from minifloat.ops import delayed
from minifloat.ops.library import apart
from minifloat.ops.quantize import amax_shape, code_shape, given_seeds, scale_shape
from minifloat.quantizer import Quantizer

VERSION = 1
"""Version of the keys: a graph from a compiler's cache or a file may not run with other shapes or another order."""

_MOST = 7  # results of a pass that writes to a tensor: such an operation returns no list
_LIBRARY = torch.library.Library("minifloat", "FRAGMENT")
_LIBRARY.define("node(str direction, str key, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")
_LIBRARY.define(
    "node_(str direction, str key, Tensor[] tensors, SymInt[] sizes, Tensor(a!)? history, Tensor(b!)? main_grad) -> "
    f"({', '.join(['Tensor'] * _MOST)})"
)
_LIBRARY.define(
    "draw_of_pass(Tensor like, Tensor apart, int count) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,)
)

Layout = tuple[Format, int] | None
"""Format and dim of an operand that backward reads; of :data:`IDENTITY` where that is the tensor itself."""


class Facts(NamedTuple):
    """Facts of a plan that traced code asks for.

    Args:
        saved: how many tensors forward makes for backward.
        forward_seeds, backward_seeds: how many casts round at random.
        saves_x, saves_w: backward reads X or W itself. ``reads_scale``: it casts X again.
    """

    saved: int
    forward_seeds: int
    backward_seeds: int
    saves_x: bool
    saves_w: bool
    reads_scale: bool


class Plan(NamedTuple):
    """Decisions that a key spells. ``x``, ``w``: what backward reads of X and W; ``bias``: forward adds one."""

    spec: Spec
    bias: bool
    x: Layout
    w: Layout
    facts: Facts

    def memory(self, at: Layout, rows: Any, cols: Any) -> list[tuple[tuple[Any, ...], torch.dtype, bool]]:
        """Shape and dtype of the tensors that save an operand, and whether its columns are consecutive in memory."""
        if at is None or not at[0].quantized:
            return []
        fmt, dim = at
        k_major = self.spec.options.device == "cuda" and backends.k_major(fmt)
        strips = dim == ROWWISE and fmt.block > 0 and not fmt.tile
        made = [
            (code_shape(fmt, dim, rows, cols), torch.uint8, k_major and dim == COLUMNWISE),
            (scale_shape(fmt, dim, rows, cols), fmt.scale_dtype, k_major and strips),
        ]
        two = [(amax_shape(fmt, dim, rows, cols), torch.float32, False)] * (fmt.scale_rule == "two_level")
        return [*made, *two]

    def flat(self, at: Layout, tensors: Sequence[Tensor | None], rows: int, cols: int) -> list[Tensor]:
        """The tensors that save an operand, as vectors: of a shape in blocks a compiler would guard the size 1."""
        found = zip(tensors, self.memory(at, rows, cols), strict=False)
        return [(x.t() if turned else x).reshape(-1) for x, (*_, turned) in found if x is not None]

    def operand(
        self, at: Layout, saved: Iterator[Tensor], value: Tensor | None, rows: int, cols: int
    ) -> Operand | None:
        """The inverse of :meth:`flat`; ``value``: X or W itself, where that is what was saved."""
        if at is None:
            return None
        (fmt, dim), types, shape = at, self.spec.options, (rows, cols)
        dtype = types.dtype if at is self.x else types.weight_dtype
        if not fmt.quantized:
            assert value is not None
            return Operand(value.reshape(shape), None, None, IDENTITY, ROWWISE, shape, dtype)
        sizes = [(size[::-1], turned) if turned else (size, turned) for size, _, turned in self.memory(at, rows, cols)]
        made = [next(saved).view(size).t() if turned else next(saved).view(size) for size, turned in sizes]
        return Operand(made[0], made[1], made[2] if len(made) == 3 else None, fmt, dim, shape, dtype)


class Traced(NamedTuple):
    """Takes the place of a :class:`Spec` in traced code. ``key``: without whether there is a bias."""

    key: str
    config: LinearConfig
    options: Options
    eager: bool = False
    seen: None = None


def key_of(text: str, options: Options) -> str:
    """Spells a plan; ``text`` is :attr:`LinearConfig.text`."""
    flags = (options.needs_x, options.needs_w, options.needs_b, options.batch_invariant)
    types = f"{options.device}|{str(options.dtype)[6:]}|{str(options.weight_dtype)[6:]}"
    return f"{VERSION}|{types}|{''.join(['1' if flag else '0' for flag in flags])}|{text}"


@lru_cache(4096)
def plan(key: str) -> Plan:
    """Builds what a key spells, outside of any trace."""
    version, device, dtype, weight_dtype, flags, text, bias = key.split("|")
    if version != str(VERSION):
        raise ValueError(f"a graph was compiled or exported for passes {version}; these are {VERSION}: make it anew")
    x, w, b, alone = (flag == "1" for flag in flags)
    options = Options(device, getattr(torch, dtype), getattr(torch, weight_dtype), x, w, b, batch_invariant=alone)
    tracing, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, False
    try:
        spec = make_spec(LinearConfig.of_text(text), options, of_operation=True)
    finally:
        torch.compiler._is_compiling_flag = tracing
    saved_x, saved_w = None, None
    if spec.saves_x != "nothing":
        saved_x = (IDENTITY, ROWWISE) if spec.saves_x == "values" else _layout(spec.x, spec.along, device)
    if options.needs_x:
        saved_w = (IDENTITY, ROWWISE) if spec.override == "high_precision" else _layout(spec.w, spec.along, device)
    forward, backward = (sum([_draws(each) for each in some]) for some in ((spec.x, spec.w), (spec.dy,)))
    itself = [at is not None and not at[0].quantized for at in (saved_x, saved_w)]
    again = spec.again is not None and spec.again.format(COLUMNWISE).scale_rule == "given"
    backward += 0 if spec.again is None else _draws(spec.again)
    made = Plan(spec, bias == "1", saved_x, saved_w, Facts(0, forward, backward, itself[0], itself[1], again))
    count = sum([len(made.memory(at, 1, 1)) for at in (saved_x, saved_w)])
    return made._replace(facts=made.facts._replace(saved=count))


def _draws(quantizer: Quantizer) -> bool:
    return any(fmt.rounding == "stochastic" for fmt, _ in quantizer.casts)


def _layout(quantizer: Quantizer, along: int, device: str) -> Layout:
    """Finds format and dim of what ``Casts`` makes for GEMMs that contract ``along``."""
    made = quantizer.operand_layout(quantizer.layouts(device))
    if along == COLUMNWISE and made.column_format is not None:
        return _layout(Quantizer(made.column_format, rowwise=False), along, device)
    fmt, dim = made.layouts[made.column if along == COLUMNWISE and made.column >= 0 else made.row]
    return (fmt, dim) if fmt.quantized else (IDENTITY, ROWWISE)


def facts(key: str) -> tuple[Any, ...]:
    """The :class:`Facts` of a plan; a compiler calls this, and does not trace it."""
    return tuple(plan(key).facts)


facts._dynamo_marked_constant = True  # type: ignore[attr-defined] # what assume_constant_result does


class _Call:
    """Delayed scaling of one pass: the scales that it reads, and where it records."""

    compiling = False

    def __init__(self, direction: int, scale: Tensor | None, history: Tensor | None) -> None:
        self.histories = (History(scale, history, None, ""),) * 2  # type: ignore[arg-type]
        self.records = (history is not None,) * 2

    def backward_begins(self) -> None: ...


def run(
    direction: str, key: str, tensors: list[Tensor], sizes: list[int], history: Tensor | None = None,
    main_grad: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Runs a pass.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        tensors: forward: X, W, b; backward: dY, X or W themselves where it reads those, what forward saved; then the
            scales of delayed scaling, a scale to cast X again with, and seeds, as many as the plan says.
        sizes: the shape of X.
    """
    p = plan(key)
    with torch.no_grad(), torch._C._DisableAutocast():
        if direction == "forward":
            return _forward(p, tensors, history)
        return _backward(p, tensors, sizes, history, main_grad)


def _forward(p: Plan, tensors: list[Tensor], history: Tensor | None) -> list[Tensor]:
    spec, (x, weight, *rest) = p.spec, tensors
    bias = rest.pop(0) if p.bias else None
    given = Given()
    if spec.config.delayed is not None:
        if history is not None:
            delayed.refuse_recomputation()
        given.delayed = _Call(0, rest.pop(0), history)  # type: ignore[assignment]
    with given_seeds(rest):
        (y, *saved), _ = linear.forward_pass(spec, LOCAL, WeightSource(), given, x, weight, bias)
    cols = x.shape[-1]
    made = [*p.flat(p.x, saved[:3], x.numel() // max(cols, 1), cols), *p.flat(p.w, saved[4:7], *weight.shape)]
    return [y.view(*x.shape[:-1], y.shape[1]), *made]


class _MainGrad(WeightSource):
    """Adds dW to memory that the operation was given."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__(main_grad=True)
        self.memory = memory

    def accumulate(self, spec: Spec, product: Product) -> None:
        product(self.memory.dtype, self.memory, True)


def _backward(
    p: Plan, tensors: list[Tensor], sizes: Sequence[int], history: Tensor | None, main_grad: Tensor | None
) -> list[Tensor]:
    spec, (dy, *rest) = p.spec, tensors
    values = [rest.pop(0) if itself else None for itself in (p.facts.saves_x, p.facts.saves_w)]
    shapes = (prod(sizes[:-1]), sizes[-1]), (dy.shape[-1], sizes[-1])
    count = p.facts.saved
    saved = iter(rest[:count])
    x, w = (p.operand(at, saved, v, *shape) for at, v, shape in zip((p.x, p.w), values, shapes, strict=True))
    rest = rest[count:]
    x_scale = rest.pop(0) if p.facts.reads_scale else None
    call: Any = _Call(1, rest.pop(0), history) if spec.config.delayed is not None else None
    packed, layouts = linear.pack(x, w)
    with given_seeds(rest):
        source = WeightSource() if main_grad is None else _MainGrad(main_grad)
        made = linear.backward_pass(spec, LOCAL, source, call, None, dy, packed, layouts, x_scale)
    dx = None if made[0] is None else made[0].view(sizes)
    return [each for each in (dx, *made[1:]) if each is not None]


def run_(direction: str, key: str, tensors: list[Tensor], sizes: list[int], *written: Tensor | None) -> list[Tensor]:
    made = run(direction, key, tensors, sizes, *written)
    return [*made, *[tensors[0].new_empty(0) for _ in range(_MOST - len(made))]]


def shapes(
    direction: str, key: str, tensors: list[Tensor], sizes: list[Any], history: Tensor | None = None,
    main_grad: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Shapes and dtypes of the results, from the key and the sizes, which may be symbols."""
    p, first = plan(key), tensors[0]
    types = p.spec.options
    if direction == "backward":
        n = first.shape[-1]
        dx = [first.new_empty(sizes, dtype=types.dtype)] * types.needs_x
        dw = [first.new_empty((n, sizes[-1]), dtype=types.dtype)] * (types.needs_w and main_grad is None)
        return [*dx, *dw, *[first.new_empty((n,))] * types.needs_b]
    weight = tensors[1]
    rows = first.numel() // first.shape[-1] if first.shape[-1] else prod(first.shape[:-1])
    made = [*p.memory(p.x, rows, first.shape[-1]), *p.memory(p.w, *weight.shape)]
    y = first.new_empty((*first.shape[:-1], weight.shape[0]), dtype=types.dtype)
    return [y, *[first.new_empty((prod(size),), dtype=dtype) for size, dtype, _ in made]]


def _shapes_(*args: Any) -> tuple[Tensor, ...]:
    made, tensors = shapes(*args), args[2]
    return (*made, *[tensors[0].new_empty((0,)) for _ in range(_MOST - len(made))])


def draw_of_pass(like: Tensor, apart: Tensor, count: int) -> list[Tensor]:
    """Draws seeds, int64 [2] each, on the device of ``like``; ``apart``: see :func:`~minifloat.ops.library.apart`."""
    return [torch.randint(2**62, (2,), dtype=torch.int64, device=like.device) for _ in range(count)]


for _name, _function, _fake in (
    ("node", run, shapes),
    ("node_", run_, _shapes_),
    ("draw_of_pass", draw_of_pass, lambda like, _, count: [like.new_empty(2, dtype=torch.int64) for _ in range(count)]),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"minifloat::{_name}", _fake, lib=_LIBRARY)


def _call(
    direction: str, key: str, tensors: list[Tensor], sizes: Sequence[int], call: DelayedCall | None, count: int,
    main_grad: Tensor | None = None,
) -> Sequence[Tensor]:  # fmt: skip
    """Calls the operation from traced code; ``count``: of seeds, which are drawn outside of it."""
    ops, written = torch.ops.minifloat, None
    if call is not None:
        backward = 1 if direction == "backward" else 0
        history = call.histories[backward]
        tensors = [*tensors, history.scale]
        written = history.amax_history if call.records[backward] else None
    if count:
        tensors = [*tensors, *ops.draw_of_pass(tensors[0], apart(tensors[0], 0), count)]
    if written is None and main_grad is None:
        return ops.node(direction, key, tensors, list(sizes))
    return ops.node_(direction, key, tensors, list(sizes), written, main_grad)


class LinearNode(torch.autograd.Function):
    """:class:`~minifloat.functional.linear.LinearFunction` in traced code."""

    @staticmethod
    def forward(
        ctx: Any, key: str, call: DelayedCall | None, main_grad: Tensor | None, x: Tensor, weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        key += "|0" if bias is None else "|1"
        saved, drawn, ctx.drawn, saves_x, saves_w, reads_scale = facts(key)
        scale = delayed_scale(call, "input", keep=True) if reads_scale else None
        tensors = [x, weight] if bias is None else [x, weight, bias]
        y, *made = _call("forward", key, tensors, x.shape, call, drawn)
        itself = [*[guarded(x)] * saves_x, *[weight] * saves_w]
        ctx.key, ctx.call, ctx.main_grad, ctx.x_shape = key, call, main_grad, x.shape
        ctx.save_for_backward(*itself, *made[:saved], scale)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        *saved, scale = ctx.saved_tensors
        tensors = [dy.contiguous(), *saved] if scale is None else [dy.contiguous(), *saved, scale]
        x, w, b = ctx.needs_input_grad[3:]
        main_grad = ctx.main_grad if w else None
        made = iter(_call("backward", ctx.key, tensors, ctx.x_shape, ctx.call, ctx.drawn, main_grad))
        gradients = [next(made) if needed else None for needed in (x, w and main_grad is None, b)]
        if ctx.call is not None:
            ctx.call.backward_finished()
        return None, None, None, *gradients
