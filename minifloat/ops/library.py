"""Declares an operation: once, by a decorator on its reference in plain PyTorch.

The annotations of the reference give the schema, and the reference is what runs on every device. The declaration may
name a function for GPUs, by where it is in this package, and have one that gives shapes, dtypes and strides alone::

    @operation("rows.kernels:scale_rows")
    def scale_rows(x: Tensor, factors: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]: ...

    @scale_rows.fake
    def _(x: Tensor, _: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]: ...
"""

from __future__ import annotations

import inspect
import pkgutil
import typing
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar

import torch
from torch import Tensor

from minifloat import backends
from minifloat.ops.tape import taping

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

SymInt = Annotated[int, "SymInt"]
"""An integer that compiled code may take for a symbol, such as a number of rows."""

MOST_SPELLINGS = 1024  # lists with a new number at each step must not fill the memory

_LIBRARY = torch.library.Library("minifloat", "DEF")
_AUTOCAST = ("AutocastCPU", "AutocastCUDA", "AutocastMPS", "AutocastXPU")
_TENSORS = (Tensor, torch.nn.Parameter)
_IN_TEXT = frozenset({"str[]", "int[]", "bool[]", "ScalarType"})
"""Kinds of arguments that the dispatcher gets as parts of one string."""
_NAMES = {Tensor: "Tensor", SymInt: "SymInt", torch.dtype: "ScalarType", NoneType: "()"}


class Operation(Generic[R]):
    """``minifloat::name``, called as its reference is.

    Eager calls skip the dispatcher, which costs 10 to 20 us a call, see :func:`directly`. For it lists of strings,
    integers and booleans are one string, the last argument of the schema: ten lists cost 31 us a call, the string 4.
    Dtypes are in that string too: AOTInductor of PyTorch 2.11 gives an operation another dtype than its graph has.

    Args:
        reference: in plain PyTorch, for every device: the definition.
        gpu: names, as "module:function" of this package, the same on kernels of our own, for GPUs that run them
            (``backends.kernels``). Imported when the first CUDA tensor comes, so that nothing else imports Triton.
        mutates: the arguments that the operation writes to.
        random: it draws from PyTorch's generator: a compiler must neither deduplicate nor reorder it.
    """

    def __init__(self, name: str, reference: Callable[..., R], gpu: str, mutates: Sequence[str], random: bool) -> None:
        self.__doc__ = reference.__doc__
        self._declared = reference, gpu, mutates, random
        self.reference = reference
        self.shapes: Callable[..., R] = reference
        self._gpu_name = gpu
        self._gpu: Callable[..., R] | None = None
        parameters = list(inspect.signature(reference).parameters.values())
        hints = typing.get_type_hints(reference, include_extras=True)
        kinds = [_spelled(hints[each.name]) for each in parameters]
        self._lists = {place: kind for place, kind in enumerate(kinds) if kind in _IN_TEXT}
        self._defaults = tuple([each.default for each in parameters])
        self._first = next(place for place, kind in enumerate(kinds) if kind in ("Tensor", "Tensor[]"))
        # Library.define and impl cost a fifth of torch.library.custom_op a call.
        schema = f"{name}({_arguments(parameters, kinds, mutates)}) -> {_spelled(hints['return'])}"
        _LIBRARY.define(schema, tags=(torch.Tag.nondeterministic_seeded,) if random else ())
        self.overload: torch._ops.OpOverload = getattr(torch.ops.minifloat, name).default
        _LIBRARY.impl(name, self._on_any, "CompositeExplicitAutograd")
        if gpu:
            _LIBRARY.impl(name, self._on_gpu, "CUDA")
        for key in _AUTOCAST:
            _LIBRARY.impl(name, self._without_autocast, key)
        torch.library.register_fake(f"minifloat::{name}", lambda *args: self.shapes(*self.read(args)), lib=_LIBRARY)

    def __call__(self, *args: Any) -> R:
        where = directly(args[self._first])
        if where == "cuda" and self._gpu_name:
            return self._kernels()(*args)
        if where == "cpu":
            with torch._C._DisableAutocast():
                return self.reference(*args)
        result: R = self.overload(*self.spelled(*args))
        return result

    def spelled(self, *args: Any) -> tuple[Any, ...]:
        """The arguments of :attr:`overload` for those of the reference."""
        if not self._lists:
            return args
        args += self._defaults[len(args) :]
        rest = [arg for place, arg in enumerate(args) if place not in self._lists]
        texts = [
            str(args[place])[6:] if kind == "ScalarType" else ",".join(map(str, args[place]))  # "float32" of a dtype
            for place, kind in self._lists.items()
        ]
        return *rest, ";".join(texts)

    def read(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inverse of :meth:`spelled`."""
        if not self._lists:
            return args
        *rest, spelling = args
        for place, values in zip(self._lists, _values(spelling, tuple(self._lists.values())), strict=True):
            rest.insert(place, values)
        return tuple(rest)

    def fake(self, function: F) -> F:
        """Declares what gives the outputs' shapes, dtypes and strides; without it the reference does, on fakes."""
        self.shapes = function
        return function

    def for_recompute(self) -> Operation[R]:
        """Declares the operation under another name, for a backward that recomputes what its forward computed.

        A compiler would recognise the same computation, and keep the result: the memory that recomputing saves.
        """
        twin = Operation(f"{self.overload._opname}_recompute", *self._declared)
        twin.fake(self.shapes)
        return twin

    def _kernels(self) -> Callable[..., R]:
        if self._gpu is None:
            self._gpu = pkgutil.resolve_name(f"minifloat.ops.{self._gpu_name}")
        return self._gpu

    def _on_any(self, *args: Any) -> R:
        return self.reference(*self.read(args))

    def _on_gpu(self, *args: Any) -> R:
        runs, _ = backends.kernels(torch.cuda.current_device())
        if not runs:
            return self._on_any(*args)
        return self._kernels()(*self.read(args))

    def _without_autocast(self, *args: Any) -> R:
        """``torch.autocast`` must not reach inside: it would run a reference's fp32 products in bf16."""
        with torch._C._DisableAutocast():
            result: R = self.overload(*args)
        return result


def operation(
    gpu: str = "", *, mutates: Sequence[str] = (), random: bool = False
) -> Callable[[Callable[..., R]], Operation[R]]:
    """Declares the operation whose reference is decorated, under its name; the arguments are those of Operation."""
    return lambda reference: Operation(reference.__name__, reference, gpu, mutates, random)


def directly(x: Any) -> str:
    """``"cuda"`` or ``"cpu"``: kernels, or the reference, may be called for ``x``, or a list that begins with it.

    Else "": something is traced, or autograd or a dispatch mode (of a test, a profiler, a fake tensor) is active.
    Kernels build no graph, so that autograd does not miss them; a reference would, unless gradients are off.
    """
    if not isinstance(x, Tensor):
        if not x:
            return ""
        x = x[0]
    if torch.compiler.is_dynamo_compiling() or type(x) not in _TENSORS:
        return ""
    if torch._C._len_torch_dispatch_stack() > taping.modes:
        return ""
    if not x.is_cuda:
        return "cpu" if x.is_cpu and not torch.is_grad_enabled() else ""
    index = x.get_device()
    graph = x.requires_grad and torch.is_grad_enabled()
    return "cuda" if not graph and backends.kernels(index)[0] and index == torch.cuda.current_device() else ""


def apart(like: Tensor, *shape: int) -> Tensor:
    """``like`` or, in compiled code, memory of its own that only says a device and a ``shape``.

    AOTAutograd merges equal calls of random operations but ATen's; one that is given ``torch.empty`` equals no other.
    """
    return torch.empty(shape, dtype=like.dtype, device=like.device) if torch.compiler.is_compiling() else like


@lru_cache(MOST_SPELLINGS)
def _values(spelling: str, kinds: tuple[str, ...]) -> tuple[Any, ...]:
    """The lists and dtypes that :meth:`Operation.spelled` spelled."""
    read: dict[str, Callable[[str], Any]] = {"str[]": str, "int[]": int, "bool[]": "True".__eq__}
    return tuple(
        [
            getattr(torch, text) if kind == "ScalarType" else tuple(map(read[kind], text.split(",") if text else []))
            for kind, text in zip(kinds, spelling.split(";"), strict=True)
        ]
    )


def _arguments(parameters: Sequence[inspect.Parameter], kinds: Sequence[str], mutates: Sequence[str]) -> str:
    """Arguments of an operation as its schema spells them; every argument that is written is an alias."""
    aliases = {name: f"({chr(ord('a') + i)}!)" for i, name in enumerate(mutates)}
    lists = not _IN_TEXT.isdisjoint(kinds)
    arguments = []
    for each, kind in zip(parameters, kinds, strict=True):
        if kind not in _IN_TEXT:
            default = "" if lists or each.default is each.empty else f"={each.default}"
            arguments.append(f"{kind.replace('Tensor', 'Tensor' + aliases.get(each.name, ''))} {each.name}{default}")
    return ", ".join(arguments + ["str lists"] * lists)


def _spelled(annotation: Any) -> str:
    inner = typing.get_args(annotation)
    if annotation in _NAMES:
        return _NAMES[annotation]
    if not inner:
        return str(annotation.__name__)  # int, float, bool, str
    if NoneType in inner:
        return f"{_spelled(inner[0])}?"
    if typing.get_origin(annotation) is tuple:
        return f"({', '.join(map(_spelled, inner))})"
    return f"{_spelled(inner[0])}[]"
