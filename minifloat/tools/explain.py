"""``explain``: reads one forward and backward of a module from a tape: which kernels, on what, in which order."""

from __future__ import annotations

import copy
import re
import sys
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from textwrap import wrap
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_leaves

from minifloat.arguments import checked, label_of
from minifloat.autocast import autocast, current, is_batch_invariant
from minifloat.comm.dtensor_ddp import is_dtensor
from minifloat.functional import quantize
from minifloat.graphs.callables import GraphedCallable
from minifloat.graphs.capture import Progress, fused_weights, scratch_main_grads, unchanged
from minifloat.nn.linear_call import recipe_in_force
from minifloat.nn.linear_state import LinearState
from minifloat.nn.parts import LayerOfParts
from minifloat.ops.tape import Tape, taping

WIDTH = 115
"""Columns of a table."""

_FOLDER = str(Path(quantize.__file__).parent)
_NAMES = {
    "input": "X", "weight": "W", "output": "Y", "grad_output": "dY", "grad_input": "dX",  # and functions:
    "fprop": "fprop", "dgrad": "dgrad", "wgrad": "wgrad", "bias_gradient": "db", "record_all": "record amaxes",
    "norm_value": "norm", "norm_gradients": "norm's gradients", "attention": "attention", "act_value": "activation",
    "act_operands": "activation", "dact_value": "activation's gradient", "dact_operands": "activation's gradient",
    "permute": "permute", "unpermute": "unpermute", "prepare_shard": "cast rows", "cast_together": "cast rows",
    "gather": "gather", "start_sum": "sum over ranks", "reduce": "reduce dW",
}  # fmt: skip
_LIBRARIES = {name: "cuBLAS" for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")}
_LIBRARIES |= {name: "cuBLASLt" for name in ("_scaled_mm", "_scaled_mm_v2", "block128", "swizzled")}
_DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8",
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.float8_e8m0fnu: "e8m0",
}  # fmt: skip


class Memory:
    """Memory of a tensor; ``str`` gives its shape and dtype, that of FP8 codes once a product has read them."""

    def __init__(self, x: Tensor, made: Line | None) -> None:
        storage = x.untyped_storage()
        self.shape, self.dtype, self.bytes, self.reference = x.shape, x.dtype, storage.nbytes(), StorageWeakRef(storage)
        self.made, self.last = made, made  # by which line, and which was the last to touch it

    def __str__(self) -> str:
        sizes = [size for size in self.shape if size != 1 or len(self.shape) < 3]
        return f"{'x'.join(map(str, sizes)) or 1} {_DTYPES.get(self.dtype, str(self.dtype)[6:])}"


@dataclass(eq=False)
class Line:
    """A launch, or the calls of PyTorch that one function of a module makes in a row.

    ``of``: module, direction and recipe. ``what``: the function, or autograd's node. ``by``: kernels, libraries, or
    what is called, and how often. ``made``, ``freed``: bytes; what is not kept is freed after its last reader, and left
    out if that is its maker. ``launches``: of our kernels. ``replayed``: whether later calls replay it, or why not.
    """

    of: tuple[str, str, str]
    what: str
    replayed: str
    by: Counter[str] = field(default_factory=Counter)
    reads: dict[Memory, None] = field(default_factory=dict)
    makes: dict[Memory, None] = field(default_factory=dict)
    made: int = 0
    freed: int = 0
    launches: int = 0


class Explanation(list[Line]):
    """Lines of one forward and backward; ``str`` makes tables of them, one for what a module does in a row."""

    def __str__(self) -> str:
        quantized = any(line.of[2] not in ("", "no recipe") for line in self)
        tables = [] if quantized else ["Nothing is quantized: no linear of minifloat in it has a recipe."]
        return "\n\n".join([*tables, *[_table([*lines]) for _, lines in groupby(self, lambda line: line.of)]])


def _table(lines: list[Line]) -> str:
    rows, held, peak = [("what", "by", "made", "freed", "reads -> makes")], 0, 0
    for line in lines:
        held += line.made
        peak, held = max(peak, held), held - line.freed
        shown = {name: n for name, n in line.by.items() if "(" in name or line.by.total() < 4}
        others = line.by.total() - sum(shown.values())
        rest = [f"{others} more calls" if shown else f"{others} calls of PyTorch"] * (others > 0)
        by = ", ".join([*_counted(shown), *rest])
        reads, makes = (", ".join(_counted(Counter(map(str, each)))) for each in (line.reads, line.makes))
        rows.append((line.what, by, _size(line.made), _size(line.freed), " -> ".join(filter(None, (reads, makes)))))
    width = [max(map(len, column)) for column in zip(*rows, strict=True)]
    replayed = dict.fromkeys(line.replayed for line in lines)
    module, direction, recipe = lines[0].of
    notes = [recipe, ", ".join(filter(None, replayed)) + " in part" * ("" in replayed and "replayed" in replayed)]
    made, freed = sum(line.made for line in lines), sum(line.freed for line in lines)
    launches = sum(line.launches for line in lines)
    text = [", ".join(filter(None, [f"{module}: {direction}", *notes]))]
    text += [f"{launches} launches, {_size(made)} made, {_size(freed)} freed, {_size(peak)} at the peak"]
    for i, (a, b, c, d, e) in enumerate(rows):
        begin = f"{i or '':>3}  {a:{width[0]}}  {b:{width[1]}}  {c:>{width[2]}}  {d:>{width[3]}}  "
        kept = re.sub(r"(?<=[\w>]) (?=[\w>])", "\0", e)  # what is one shape stays in one line
        shapes = wrap(kept, max(WIDTH - len(begin), 30)) or [""]
        text += [(begin + f"\n{'':{len(begin)}}".join(shapes).replace("\0", " ")).rstrip()]
    return "\n".join(text)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def _counted(words: dict[str, int]) -> list[str]:
    return [f"{count} x {word}" if count > 1 else word for word, count in words.items()]


class _Watch(Tape):
    """Tape of all that a thread does, which holds no memory: it sees what is freed.

    ``names``: of modules, and of the recipes of their linears; the first is around all others.
    """

    def __init__(self, given: Sequence[Tensor], names: dict[nn.Module, tuple[str, str]]) -> None:
        super().__init__(given[:1])
        self.lines, self.names, self.replayed, self.held = Explanation(), names, "", list[Memory]()
        self._alive: Any = deque(maxlen=0)
        self.before = Line(("", "", ""), "", "")
        self.known = {x.untyped_storage()._cdata: Memory(x, self.before) for x in given}
        self.inside = [next(iter(names.values()))]  # modules, and from which of autograd's nodes on
        self.since = [(-1, self.inside[0])]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, layers do what they do while a tape is written."""

        def move(module: nn.Module, *given: Any) -> None:
            if len(given) == 1:  # the arguments, and no result yet
                self.inside.append(self.names.get(module, self.inside[0]))
            else:
                self.inside.pop()
            self.since.append((torch._C._autograd._get_sequence_nr(), self.inside[-1]))

        before = hooks.register_module_forward_pre_hook(move)
        after = hooks.register_module_forward_hook(move, always_call=True)
        taping.tape, taping.modes = self, 1
        try:
            with self:
                yield
            self._notice_freed()
        finally:
            taping.tape, taping.modes = None, 0
            before.remove()
            after.remove()

    def recorded(self, replay: Any, function: Any) -> Any:
        outer = self.replayed
        self.replayed = outer or ("replayed" if callable(replay) else f"called each time: {replay}" if replay else "")
        try:
            return function()
        finally:
            self.replayed = outer

    def refuse(self, why: str) -> None:
        if why.endswith("past PyTorch"):  # nothing else is seen of it
            self._note(why, [], False)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if function.namespace == "c10d" and not self.hiding:  # which says nothing of what it writes to
            self.called(function._schema, (args, kwargs), {}, (), True)
        return result

    def called(self, function: Any, args: Any, kwargs: Any, made: Any, kept: bool, alone: bool = True) -> None:
        function = getattr(function, "func", function)
        name = getattr(function, "__name__", str(getattr(function, "name", ""))).partition(".")[0]
        for x in made:
            self._slot(x)
        tensors = [x for x in (*tree_leaves((args, kwargs)), *made) if isinstance(x, Tensor)]
        if name in _LIBRARIES:
            dtype = tensors[0].dtype
            name = f"torch.{name} ({_LIBRARIES[name] if tensors[0].is_cuda else _DTYPES.get(dtype, dtype)})"
        self._note(name, tensors, False)

    def launched(
        self, name: str, function: Any, head: Any, programs: int, arguments: Sequence[Any], language: str = "Triton"
    ) -> None:
        leaves = [getattr(x, "base", x) for x in tree_leaves([*arguments])]
        self._note(f"{name} ({language})", [x for x in leaves if isinstance(x, Tensor)], True)

    def _slot(self, x: Tensor) -> int:
        self.known[x.untyped_storage()._cdata] = Memory(x, None)  # made by what touches it first
        return 0

    def _note(self, by: str, tensors: Sequence[Tensor], launched: bool) -> None:
        self._notice_freed()
        node, nested = torch._C._current_autograd_node(), len(self.inside) > 1
        at = 0 if node is None or nested else bisect_right(self.since, node._sequence_nr(), key=itemgetter(0))
        name, recipe = self.since[at - 1][1] if at else self.inside[-1]
        of = name, "forward" if node is None else "recomputation" if nested else "backward", recipe
        what = _function() or ("" if node is None else node.name())
        line = self.lines[-1] if self.lines else self.before
        of = line.of if line.of == of else of  # the very same of a module's lines in a row
        if launched or not what or line.launches or (line.of, line.what, line.replayed) != (of, what, self.replayed):
            line = Line(of, what, self.replayed)
            self.lines.append(line)
        line.by[by] += 1
        line.launches += launched
        for x in tensors:
            storage = x.untyped_storage()
            memory = self.known.get(storage._cdata) or self.known.setdefault(storage._cdata, Memory(x, self.before))
            if memory.made is None:
                memory.made, line.makes[memory] = line, None
                line.made += memory.bytes
                self.held.append(memory)
            elif memory.made is not line and x.numel():
                line.reads[memory] = None
            if memory.dtype == torch.uint8 and x.dtype.is_floating_point:
                memory.dtype = x.dtype  # what its codes are
            memory.last = line

    def _notice_freed(self) -> None:
        """Notes what is gone: since its last reader, if that is of this pass, for a replay frees it there."""
        for memory in [memory for memory in self.held if memory.reference.expired()]:
            self.held.remove(memory)
            line = self.lines[-1]
            line = memory.last if memory.last is not None and memory.last.of is line.of else line
            if memory.made is line:
                del line.makes[memory]
                line.made -= memory.bytes
            else:
                line.freed += memory.bytes


def _function() -> str:
    """Names the innermost of our functions that runs and has a name here."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_FOLDER):
            for each in map(frame.f_locals.get, ("self", "cast")):
                if isinstance(each, quantize.RoleCasts):
                    return f"cast {' and '.join(_NAMES[kind] for kind in each.kinds)}"
            if frame.f_code.co_name in _NAMES:
                return _NAMES[frame.f_code.co_name]
        frame = frame.f_back
    return ""


@checked
def explain(layer: nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    """Runs a forward and a backward of ``layer(*args, **kwargs)``, and tells what each module does, in order.

    A line has the function that launches a kernel or calls PyTorch, the kernel or the library, the shapes and dtypes of
    what is read and made, and the bytes made and freed. On a CPU it has all calls of the reference of one function.
    Recipes in force hold; dX is computed if X requires it. Parameters, ``grad``, ``main_grad``, buffers and random
    numbers stay as they are. Delayed scaling's updates of its histories, which come after a pass, are left out.

    Returns:
        An :class:`Explanation`, which prints as tables.

    Raises:
        ValueError: there is no tensor, or ``fully_shard`` has been called of the layer.
    """
    tensors = [x for x in (*layer.parameters(), *tree_leaves((args, kwargs))) if isinstance(x, Tensor)]
    if not tensors or any(map(is_dtensor, tensors)):
        why = "it has DTensors; explain it before fully_shard" if tensors else "it has no parameters; give it a tensor"
        raise ValueError(f"explain: {label_of(layer)}: {why}")
    context = copy.copy(current() or autocast(enabled=False))  # the same without what it updates at its end
    context.batch_invariant, context.check_finite = is_batch_invariant(), False
    parts = dict(layer.named_modules()).items()
    names = {part: (f"{type(part).__name__} {name}".strip(), _recipes(part)) for name, part in parts}
    linears = [part for part in names if isinstance(part, LinearState)]
    also = [own for part in names for own in (part._buffers, part._modules)]
    also += [vars(part._configs) for part in linears]
    with (
        unchanged([layer], tensors[0].device, also), scratch_main_grads(fused_weights(layer)),
        torch.enable_grad(), torch.autograd.set_multithreading_enabled(False),
    ):  # fmt: skip
        for part in linears:
            part._wgrad_tasks = []
        run = GraphedCallable(layer, args, kwargs, context, None, 0, Progress())
        run.warm_up(1, True)  # kernels are compiled, tapes written
        watch = _Watch([*tensors, *[x for x in run.leaves if isinstance(x, Tensor)]], names)
        with watch.watching():
            held: Any = run._run()
        given = [torch.ones_like(y) for y in run._differentiable()]
        with watch.watching():
            held = held, run._gradients(given)
    return watch.lines


def _recipes(module: nn.Module) -> str:
    """Names the recipes in force of the linears whose passes are those of ``module``."""
    parts = module.children() if isinstance(module, LayerOfParts) else [module]
    found = [recipe_in_force(part) for part in parts if isinstance(part, LinearState)]
    return " and ".join(dict.fromkeys("no recipe" if each is None else type(each).__name__ for each in found))
