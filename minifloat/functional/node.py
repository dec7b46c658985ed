"""A pass of a module as one operation: what a compiler sees of it, and what the compiled graph runs.

``minifloat::node(direction, key, tensors, sizes)`` runs a forward or a backward. Its key spells the kind of module, the
config and options of each linear, and what else decides on the pass, so that a graph that was saved finds its plan in
another process. A compiler gets shapes from the key and the sizes, and traces nothing of the pass; eager code, and what
a CUDA graph captures, runs the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from minifloat import backends
from minifloat.autocast import DelayedCall
from minifloat.delayed import History
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE, Format
from minifloat.functional.autograd import guarded, is_wanted
from minifloat.functional.quantize import LinearConfig, Options
from minifloat.functional.spec import Given, Spec, make_spec
from minifloat.functional.weight_source import IntoMemory, WeightSource
from minifloat.operand import Operand
from minifloat.ops import delayed
from minifloat.ops.library import apart
from minifloat.ops.quantize import amax_shape, code_shape, given_seeds, scale_shape
from minifloat.quantizer import Quantizer

VERSION = 2
"""Version of the keys: a graph from a compiler's cache or a file may not run with other shapes or another order."""

_MOST = 24  # results of a pass that writes to a tensor: such an operation returns no list
_WRITTEN = [f"Tensor({alias}!)? {name}" for alias, name in zip("abcd", ("h1", "h2", "dw1", "dw2"), strict=True)]
_LIBRARY = torch.library.Library("minifloat", "FRAGMENT")
_ARGUMENTS = "str direction, str key, Tensor?[] tensors, SymInt[] sizes"
_LIBRARY.define(f"node({_ARGUMENTS}) -> Tensor[]")
_LIBRARY.define(f"node_({', '.join([_ARGUMENTS, *_WRITTEN])}) -> ({', '.join(['Tensor'] * _MOST)})")
_LIBRARY.define(
    "draw_of_pass(Tensor like, Tensor apart, int count) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,)
)


class Memory(NamedTuple):
    """A result of a pass: its shape and dtype, and whether its columns are consecutive in memory."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    turned: bool = False


class Itself(NamedTuple):
    """A tensor that the module has: the input of that ``number``, or what it saves; its shape."""

    number: int
    shape: tuple[Any, ...]


Result = Memory | Itself | None
"""Memory that a pass makes, or a tensor that the module has; None where there is neither."""

Layout = tuple[Format, int] | None
"""Format and dim of an operand that backward reads; of :data:`IDENTITY` where that is the tensor itself."""


class Saved(NamedTuple):
    """An operand that backward reads, of X or W [rows, cols], the input ``number``; ``k_major``: as casts have it."""

    at: Layout
    rows: Any
    cols: Any
    dtype: torch.dtype
    number: int
    k_major: bool

    @property
    def results(self) -> list[Result]:
        """Codes, scales, amax and offsets, as ``pack`` lists them."""
        if self.at is None:
            return [None] * 4
        fmt, dim = self.at
        if not fmt.quantized:
            shape = self.rows, self.cols
            return [Itself(self.number, shape) if self.number >= 0 else Memory(shape, self.dtype), None, None, None]
        k_major = self.k_major and backends.k_major(fmt)
        strips = dim == ROWWISE and fmt.block > 0 and not fmt.tile
        sizes = dim, self.rows, self.cols
        codes = Memory(code_shape(fmt, *sizes), torch.uint8, k_major and dim == COLUMNWISE)
        scales = Memory(scale_shape(fmt, *sizes), fmt.scale_dtype, k_major and strips)
        two = fmt.scale_rule == "two_level"
        return [codes, scales, Memory(amax_shape(fmt, *sizes), torch.float32) if two else None, None]

    @property
    def layout(self) -> tuple[Any, int, Any]:
        """Says to ``unpack`` what these results are."""
        return (None, 4, ()) if self.at is None else (Operand, 4, (*self.at, (self.rows, self.cols), self.dtype))


class Pass:
    """Plan of a kind of module: what its key spells; ``kinds`` has each by name.

    Attributes:
        specs: of its linears. ``into_memory``: which of them add dW to memory that is given.
        seeds: how many casts of the forward and of the backward round at random.
    """

    kinds: ClassVar[dict[str, type[Pass]]] = {}

    def __init__(self, specs: Sequence[Spec], into_memory: Sequence[bool], facts: Sequence[str]) -> None:
        self.specs, self.into_memory = specs, into_memory
        forward = [draws(each) for spec in specs for each in (spec.x, spec.w)]
        again = [draws(spec.config.input) for spec in specs if spec.recompute_x or spec.again is not None]
        self.seeds = sum(forward), sum([draws(spec.dy) for spec in specs]) + sum(again)

    def forward(self, calls: Any, inputs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Computes what :meth:`results` lists."""
        raise NotImplementedError

    def results(self, sizes: Sequence[Any]) -> list[Result]:
        """Lists what forward gives: ``sizes`` are the shape of X and the rows of each weight."""
        raise NotImplementedError

    def backward(
        self, calls: Any, gradients: Sequence[Tensor | None], saved: Sequence[Tensor | None],
        sizes: Sequence[int],
    ) -> Sequence[Tensor | None]:  # fmt: skip
        """Computes what :meth:`gradients` lists, of the gradients of the outputs and what the module saved."""
        raise NotImplementedError

    def gradients(self, sizes: Sequence[Any], given: Sequence[bool]) -> list[Result]:
        """Lists what backward gives; ``given``: which gradients there are."""
        raise NotImplementedError

    def saved(self, sizes: Sequence[Any]) -> list[Result]:
        """Lists what the module saves for backward."""
        raise NotImplementedError


class Traced(NamedTuple):
    """Takes the place of a :class:`Spec` in traced code; its ``key`` spells one."""

    key: str
    config: LinearConfig
    options: Options
    recompute_x: bool
    eager: bool = False
    seen: None = None


def traced(config: LinearConfig, options: Options, into_memory: bool) -> Traced:
    """Spells a spec; see :attr:`LinearConfig.text`."""
    needs = options.needs_x, options.needs_w, options.needs_b
    flags = *needs, options.batch_invariant, options.recompute_x, into_memory
    types = f"{options.device}|{str(options.dtype)[6:]}|{str(options.weight_dtype)[6:]}"
    recompute_x = options.recompute_x and options.needs_x and options.needs_w and config.backward_override is None
    key = f"{types}|{''.join(['1' if flag else '0' for flag in flags])}|{config.text}"
    return Traced(key, config, options, recompute_x)


@lru_cache(4096)
def plan(key: str) -> Pass:
    """Builds what a key spells, outside of any trace."""
    version, kind, facts, *texts = key.split("#")
    if version != str(VERSION):
        raise ValueError(f"a graph was compiled or exported for passes {version}; these are {VERSION}: make it anew")
    tracing, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, False
    try:
        specs, into_memory = zip(*map(_spec, texts), strict=True)
        return Pass.kinds[kind](specs, into_memory, facts.split(","))
    finally:
        torch.compiler._is_compiling_flag = tracing


def _spec(text: str) -> tuple[Spec, bool]:
    device, dtype, weight_dtype, flags, config = text.split("|")
    x, w, b, alone, recompute_x, into_memory = (flag == "1" for flag in flags)
    types = getattr(torch, dtype), getattr(torch, weight_dtype)
    options = Options(device, *types, x, w, b, batch_invariant=alone, recompute_x=recompute_x)
    return make_spec(LinearConfig.of_text(config), options, of_operation=True), into_memory


def saved_operands(spec: Spec, rows: Any, cols: Any, features: Any, x: int, w: int) -> tuple[Saved, Saved]:
    """Finds what backward reads of X [rows, cols] and W [features, cols], the inputs of the numbers ``x`` and ``w``."""
    options = spec.options
    of_x: Layout = None
    of_w: Layout = None
    if spec.saves_x != "nothing":
        of_x = (IDENTITY, ROWWISE) if spec.saves_x == "values" else _layout(spec.x, spec.along, options.device)
    if options.needs_x:
        itself = spec.override == "high_precision"
        of_w = (IDENTITY, ROWWISE) if itself else _layout(spec.w, spec.along, options.device)
    k_major = options.device == "cuda"
    return (
        Saved(of_x, rows, cols, options.dtype, x, k_major),
        Saved(of_w, features, cols, options.weight_dtype, w, k_major),
    )


def draws(quantizer: Quantizer) -> bool:
    """Whether some cast rounds at random."""
    return any(fmt.rounding == "stochastic" for fmt, _ in quantizer.casts)


def _layout(quantizer: Quantizer, along: int, device: str) -> Layout:
    """Finds format and dim of what ``Casts`` makes for GEMMs that contract ``along``."""
    made = quantizer.operand_layout(quantizer.layouts(device))
    if along == COLUMNWISE and made.column_format is not None:
        return _layout(Quantizer(made.column_format, rowwise=False), along, device)
    fmt, dim = made.layouts[made.column if along == COLUMNWISE and made.column >= 0 else made.row]
    return (fmt, dim) if fmt.quantized else (IDENTITY, ROWWISE)


# ---- the operation ----


class _Delayed:
    """Delayed scaling of one linear in a pass: the scales that it reads, and where it records."""

    compiling = False

    def __init__(self, scale: Tensor, history: Tensor | None) -> None:
        self.histories = (History(scale, history, None, ""),) * 2  # type: ignore[arg-type]
        self.records = (history is not None,) * 2

    def backward_begins(self) -> None: ...


def run(
    direction: str, key: str, tensors: list[Tensor | None], sizes: list[int], *written: Tensor | None
) -> list[Tensor]:
    """Runs a pass.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        tensors: forward: its inputs; backward: the gradients of the outputs and what the module saved. Then of each
            linear the scales of delayed scaling, and a weight whose dW is added to memory; and the seeds.
        sizes: the shape of X and the rows of each weight.
        written: the histories of two linears, and memory that their dW are added to.
    """
    plan_, backward = plan(key), direction == "backward"
    end, count = len(tensors) - plan_.seeds[backward], len(plan_.specs)
    own, rest, seeds = tensors[: end - 2 * count], tensors[end - 2 * count : end], list[Any](tensors[end:])
    calls = [_call_of(spec, rest[i], rest[count + i], *written[i::2]) for i, spec in enumerate(plan_.specs)]
    if not backward and any(history is not None for history in written):
        delayed.refuse_recomputation()
    with torch.no_grad(), torch._C._DisableAutocast(), given_seeds(seeds):
        if not backward:
            return _flat(plan_.forward(calls, own), _listed(key, tuple(sizes))[0])
        saved = _listed(key, tuple(sizes))[1]
        outputs = own[: len(own) - len(saved)]
        kept = [_restored(x, result) for x, result in zip(own[len(outputs) :], saved, strict=True)]
        made = plan_.backward(calls, outputs, kept, sizes)
        made = [x.clone() if x is not None and any(x is each for each in outputs) else x for x in made]
        return _flat(made, plan_.gradients(sizes, [each is not None for each in outputs]))


@lru_cache(4096)
def _listed(key: str, sizes: tuple[int, ...]) -> tuple[list[Result], list[Result]]:
    return plan(key).results(sizes), plan(key).saved(sizes)


def _call_of(
    spec: Spec, scale: Tensor | None, weight: Tensor | None, history: Tensor | None = None,
    memory: Tensor | None = None,
) -> Any:  # fmt: skip
    from minifloat.functional.exchange import LOCAL
    from minifloat.functional.linear import LinearCall

    given = Given()
    if scale is not None:
        given.delayed = _Delayed(scale, history)  # type: ignore[assignment]
    if memory is None or weight is None:
        return LinearCall(spec, LOCAL, WeightSource(), given)
    # A gradient of X alone runs the whole backward of a graph, which must add nothing.
    return LinearCall(spec, LOCAL, IntoMemory(memory if is_wanted(weight) else None), given)


def _flat(made: Sequence[Tensor | None], results: Sequence[Result]) -> list[Tensor]:
    """Gives what was made as vectors: of a shape in blocks a compiler would guard whether a size is 1."""
    flat: list[Tensor] = []
    storages = set()
    for x, result in zip(made, results, strict=True):
        if isinstance(result, Memory):
            assert x is not None
            storage = x.untyped_storage()._cdata
            x = x.clone() if storage in storages else x  # results share no memory
            storages.add(storage)
            flat.append((x.t() if result.turned else x).reshape(-1))
    return flat


def _restored(x: Tensor | None, result: Result) -> Tensor | None:
    if x is None or result is None:
        return None
    if isinstance(result, Memory) and result.turned:
        return x.view(result.shape[::-1]).t()
    return x.reshape(result.shape)


def _padded(made: list[Tensor], tensors: Sequence[Tensor | None]) -> list[Tensor]:
    like = next(x for x in tensors if x is not None)
    return [*made, *[like.new_empty((0,)) for _ in range(_MOST - len(made))]]


def shapes(direction: str, key: str, tensors: list[Tensor | None], sizes: list[Any], *written: Any) -> list[Tensor]:
    """Sizes and dtypes of the results, from the key and the sizes, which may be symbols."""
    plan_ = plan(key)
    like = next(x for x in tensors if x is not None)
    results = plan_.results(sizes)
    if direction == "backward":
        outputs = len(tensors) - len(plan_.saved(sizes)) - 2 * len(plan_.specs) - plan_.seeds[1]
        results = plan_.gradients(sizes, [x is not None for x in tensors[:outputs]])
    return [like.new_empty((prod(each.shape),), dtype=each.dtype) for each in results if isinstance(each, Memory)]


def draw_of_pass(like: Tensor, apart: Tensor, count: int) -> list[Tensor]:
    """Draws seeds, int64 [2] each, on the device of ``like``; ``apart``: see :func:`~minifloat.ops.library.apart`."""
    return [torch.randint(2**62, (2,), dtype=torch.int64, device=like.device) for _ in range(count)]


for _name, _function, _fake in (
    ("node", run, shapes),
    ("node_", lambda *args: _padded(run(*args), args[2]), lambda *args: _padded(shapes(*args), args[2])),
    ("draw_of_pass", draw_of_pass, lambda like, _, count: [like.new_empty(2, dtype=torch.int64) for _ in range(count)]),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"minifloat::{_name}", _fake, lib=_LIBRARY)


# ---- in traced code ----


def facts(key: str) -> tuple[list[int], int, int]:
    """Lists for each result -2 if forward makes it, -1 if there is none, else the number of the input; and the seeds.

    A compiler calls this, and does not trace it.
    """
    results = plan(key).results([1] * 8)
    codes = [-1 if each is None else each.number if isinstance(each, Itself) else -2 for each in results]
    return codes, *plan(key).seeds


def given_gradients(key: str, given: tuple[bool, ...]) -> list[bool]:
    """Says which gradients a backward makes, of those that are ``given``. A compiler does not trace this either."""
    return [each is not None for each in plan(key).gradients([1] * 8, given)]


for _constant in (facts, given_gradients):
    setattr(_constant, "_dynamo_marked_constant", True)  # noqa: B010 - what assume_constant_result does


def forward(
    kind: str, how: Sequence[str], specs: Sequence[Traced], calls: Sequence[DelayedCall | None],
    inputs: Sequence[Any], sizes: Sequence[int],
) -> tuple[list[Any], str]:  # fmt: skip
    """Calls the forward of a kind of module from traced code; returns its results, as vectors, and the key.

    ``how``: what decides on it beside the linears. ``calls``: of delayed scaling, of each linear.
    """
    key = "#".join([str(VERSION), kind, ",".join(how), *[spec.key for spec in specs]])
    codes, seeds, _ = facts(key)
    made = iter(_call("forward", key, inputs, sizes, calls, seeds))
    inputs = [guarded(inputs[0]), *inputs[1:]] if 0 in codes else inputs
    return [next(made) if code == -2 else None if code == -1 else inputs[code] for code in codes], key


def backward(
    key: str, calls: Sequence[DelayedCall | None], gradients: Sequence[Tensor | None],
    saved: Sequence[Tensor | None], sizes: Sequence[int], memory: Sequence[Tensor | None],
) -> list[Any]:  # fmt: skip
    """Calls the backward; ``memory``: of each linear, what its dW is added to; its weight ends ``saved`` then."""
    saved = list(saved)
    weights: list[Tensor | None] = []
    for each in memory[::-1]:
        weights.insert(0, None if each is None else saved.pop())
    made = iter(_call("backward", key, [*gradients, *saved], sizes, calls, facts(key)[2], memory, weights))
    given = given_gradients(key, tuple([each is not None for each in gradients]))
    return [next(made) if there else None for there in given]


def _call(
    direction: str, key: str, tensors: Sequence[Tensor | None], sizes: Sequence[int],
    calls: Sequence[DelayedCall | None], count: int, memory: Sequence[Tensor | None] = (),
    weights: Sequence[Tensor | None] = (),
) -> Sequence[Tensor]:  # fmt: skip
    """Calls the operation; ``count``: of seeds, which are drawn outside of it."""
    ops, number = torch.ops.minifloat, 1 if direction == "backward" else 0
    scales: list[Tensor | None] = []
    written: list[Tensor | None] = []
    for call in calls:
        scales.append(None if call is None else call.histories[number].scale)
        recorded = call is not None and call.records[number]
        written.append(call.histories[number].amax_history if call is not None and recorded else None)
    like = next(x for x in tensors if x is not None)
    seeds = ops.draw_of_pass(like, apart(like, 0), count) if count else []
    weights = weights or [None] * len(calls)
    arguments = direction, key, [*tensors, *scales, *weights, *seeds], list(sizes)
    written = [*written, None][:2] + [*memory, None, None][:2]
    if all(each is None for each in written):
        return ops.node(*arguments)
    return ops.node_(*arguments, *written)
