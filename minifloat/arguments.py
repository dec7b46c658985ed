"""Checks of arguments against the annotations of what takes them, by type and range, in one way for all.

    @checked
    def scale(x: Tensor, by: PositiveFloat = 1.0, mode: Literal["up", "down"] = "up") -> Tensor: ...

``scale(x, by=-1)`` raises "scale: by is -1; a number above 0 is needed". A range or a wording of one's own is an
:class:`Accepts` within ``Annotated``. What depends on several arguments, or on a module, is checked by hand.
"""

from __future__ import annotations

import collections.abc as abc
import functools
import inspect
import math
import reprlib
import sys
import types
from collections.abc import Callable, Mapping
from enum import Enum
from numbers import Integral, Real
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

F = TypeVar("F", bound=Callable[..., Any])

_MOST = 2**31 - 1


def _always(value: Any) -> bool:
    return True


class Accepts(NamedTuple):
    """Mark in ``Annotated``: what a value of the right type must be, and how errors say it.

    ``alone``: without what the type asks of values, which is that numbers are finite.
    """

    words: str
    holds: Callable[[Any], bool] = _always
    alone: bool = False


def _is_device(value: Any) -> bool:
    if isinstance(value, int):  # the number of a device that is there
        return not isinstance(value, bool) and 0 <= value < torch.accelerator.device_count()
    try:
        torch.device(value)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return False
    return True


Int = Annotated[int, Accepts("an int of 64 bits", lambda value: -(2**63) <= value < 2**63)]
Size = Annotated[int, Accepts(f"an int of 1 to {_MOST}", lambda value: 1 <= value <= _MOST)]
Count = Annotated[int, Accepts(f"an int of 0 to {_MOST}", lambda value: 0 <= value <= _MOST)]
PositiveFloat = Annotated[float, Accepts("a number above 0", lambda value: value > 0)]
NonNegativeFloat = Annotated[float, Accepts("a number of at least 0", lambda value: value >= 0)]
Probability = Annotated[float, Accepts("a number of 0 to 1", lambda value: 0 <= value <= 1)]
Fraction = Annotated[float, Accepts("a number of at least 0 and below 1", lambda value: 0 <= value < 1)]
Device = Annotated[torch.device | str | int, Accepts('a device, as torch.device("cuda") or "cpu"', _is_device)]
FloatDtype = Annotated[
    torch.dtype,
    Accepts(
        "torch.float32, torch.bfloat16, torch.float16 or torch.float64",
        lambda value: value in (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    ),
]


def checked(target: F) -> F:
    """Decorates a function, method or dataclass: its arguments are checked at each call, against the annotations.

    Annotations are read at the first call. Compiled code is not checked: a graph must not break for it. Arguments that
    an ``Unpack`` of a ``TypedDict`` stands for are checked too, and in the signature, with ``...`` for their defaults.

    Raises:
        TypeError: an argument has another type, or is none of those unpacked.
        ValueError: its type is right and its value is not.
    """
    if not isinstance(target, type):
        return _checked(target, target)  # type: ignore[return-value]
    kind: Any = target
    kind.__init__ = _checked(kind.__init__, kind)
    return target


def _checked(function: Callable[..., Any], annotated: Any) -> Callable[..., Any]:
    """Wraps ``function``; ``annotated``: it, or the class whose fields are its arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _check(function, annotated, args, kwargs)
        return function(*args, **kwargs)

    if "Unpack" in str(function.__annotations__.values()):
        *own, last = inspect.signature(function).parameters.values()
        unpacked = _unpacked(get_type_hints(function, include_extras=True)[last.name])
        only = inspect.Parameter.KEYWORD_ONLY
        others = [inspect.Parameter(name, only, default=..., annotation=hint) for name, hint in unpacked.items()]
        call.__signature__ = inspect.Signature([*own, *others])  # type: ignore[attr-defined]
    return call


def _unpacked(hint: Any) -> dict[str, Any]:
    """Finds the annotations that ``Unpack`` of a ``TypedDict`` stands for; none where a hint is another."""
    return get_type_hints(get_args(hint)[0], include_extras=True) if get_origin(hint) is Unpack else {}


def _check(function: Callable[..., Any], annotated: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    known = _known.get(function)
    if known is None:
        parameters = inspect.signature(function).parameters.values()
        names = tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)
        takes_others = any(each.kind is each.VAR_KEYWORD for each in parameters)
        unpacks = "Unpack" in str(function.__annotations__.values())
        known = _known[function] = names, _specs(annotated), unpacks or not takes_others
    names, specs, closed = known
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        spec = specs.get(name)
        if spec is None and closed and name not in names:
            owner = _owner(function, args, kwargs)
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}{_way_out(name)}")
        if spec is not None and not (spec.fits(value) and spec.holds(value)):
            raise _refusal(_owner(function, args, kwargs), name, value, spec)


RENAMED = {
    "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group",
    "fp8_enabled": "enabled",
    "fp8_calibrating": "calibrating",
    "fp8_weight_caching": "cache_quantized_params",
    "module_filter_fn": "filter_fn",
    "dist_process_group": "tp_group",
    "ignore_idx": "ignore_index",
    "reduce_loss": "reduction",
}
"""Keyword arguments of Transformer Engine and torchao that have another name here."""

NEEDLESS = {
    "ub_": "gathers and sums run beside the products that do not need them",
    "symmetric_ar_type": "the sum over ranks is NCCL's",
    "get_rng_state_tracker": "ranks draw different numbers where they hold different activations",
    "rng_tracker_name": "ranks draw different numbers where they hold different activations",
    "seq_length": "every length works",
    "micro_batch_size": "every size works",
    "qkv_weight_interleaved": "rows of query, key and value are three parts, one after the other",
    "distribute_saved_activations": "with sequence_parallel ranks save their parts",
    "is_cg_capturable": "it always is",
    "interval": "scales are computed in each step",
    "override_linear_precision": "Float8CurrentScaling has backward_override, and a CustomRecipe chooses every format",
}
"""Keyword arguments, or how they begin, that have none here, and why."""


def needless(keyword: str) -> str | None:
    """Says why another library's keyword argument has no counterpart; None if it is not such a one."""
    return NEEDLESS.get("ub_" if keyword.startswith("ub_") else keyword)


def _way_out(keyword: str) -> str:
    if needless(keyword) is not None:
        return f"; leave it out: {needless(keyword)}"
    return f"; it is {RENAMED[keyword]} here" if keyword in RENAMED else ""


def check_value(owner: str, name: str, value: Any, annotation: Any) -> None:
    """Checks one value, such as one that is assigned to an attribute."""
    spec = _spec(annotation)
    if not (spec.fits(value) and spec.holds(value)):
        raise _refusal(owner, name, value, spec)


# ---- errors ----


def _refusal(owner: str, name: str, value: Any, spec: _Spec) -> TypeError | ValueError:
    kind = ValueError if spec.fits(value) else TypeError
    return kind(f"{owner}: {name} is {shown(value)}; {spec.words} is needed")


def _owner(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Names what was called, with the name that a layer is given."""
    own = type(args[0]).__name__ if function.__name__ == "__init__" else function.__qualname__
    name, number = kwargs.get("name"), kwargs.get("layer_number")
    if isinstance(name, str) and name:
        return f"{own} {name!r}"
    return f"{own} of layer {number}" if isinstance(number, int) else own


def label_of(owner: object) -> str:
    """Name of a layer in errors; a string is its own label.

    Asked where an error is raised, and not before: a compiler guards each name that it reads, and would compile equal
    layers anew for theirs.
    """
    return owner if isinstance(owner, str) else str(getattr(owner, "_label", type(owner).__name__))


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def shown(value: Any) -> str:
    """Shows a value in an error: in one short line, which computes nothing."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of {value.dtype} and shape {tuple(value.shape)}"
    if isinstance(value, nn.Module) or getattr(type(value), "__repr__", None) is object.__repr__:
        return f"an object of class {type(value).__name__}"
    return _short.repr(value).replace("\n", " ")


# ---- what an annotation accepts ----


class _Spec(NamedTuple):
    words: str
    fits: Callable[[Any], bool]
    """The type."""
    holds: Callable[[Any], bool] = _always
    """The value, once its type fits."""


# Of what is decorated, so that it does not grow. Not in the closures, which Dynamo looks into.
_known: dict[Callable[..., Any], tuple[tuple[str, ...], dict[str, _Spec], bool]] = {}


def _specs(target: Any) -> dict[str, _Spec]:
    target = inspect.unwrap(target)
    hints = get_type_hints(target, include_extras=True)
    hints.pop("return", None)
    kinds = {} if isinstance(target, type) else inspect.signature(target).parameters
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name in [name for name in hints if name in kinds and kinds[name].kind in several]:
        hints |= _unpacked(hints.pop(name))
    return {name: _spec(hint) for name, hint in hints.items()}


def _spec(annotation: Any) -> _Spec:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        spec = _spec(args[0])
        for mark in args[1:]:
            spec = _narrowed(spec, mark) if isinstance(mark, Accepts) else spec
        return spec
    if origin is Literal:
        types_of = tuple({type(value) for value in args})
        words = _either([repr(value) for value in args])
        return _Spec(words, lambda value: type(value) in types_of, lambda value: value in args)
    if origin in (Union, types.UnionType):
        members = [_spec(each) for each in args]
        return _Spec(
            _either([member.words for member in members]),
            lambda value: any(member.fits(value) for member in members),
            lambda value: any(member.fits(value) and member.holds(value) for member in members),
        )
    if origin is type:
        words = f"a subclass of {args[0].__name__}"
        return _Spec(words, lambda value: isinstance(value, type) and issubclass(value, args[0]))
    if origin in _CONTAINERS and args:
        return _container(origin, args)
    return _of_class(type(None) if annotation is None else annotation if origin is None else origin)


def _narrowed(base: _Spec, mark: Accepts) -> _Spec:
    return _Spec(mark.words, base.fits, lambda value: (mark.alone or base.holds(value)) and mark.holds(value))


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _of_class(kind: Any) -> _Spec:
    if kind is type(None):
        return _Spec("None", lambda value: value is None)
    if kind is bool:
        return _Spec("True or False", lambda value: isinstance(value, bool))
    if kind is int:
        return _Spec("an int", lambda value: isinstance(value, Integral) and not isinstance(value, bool))
    if kind is float:
        return _Spec("a finite number", lambda value: isinstance(value, Real) and not isinstance(value, bool), _finite)
    if kind is _CALLABLE:
        return _Spec("a callable", callable)
    if not isinstance(kind, type) or kind in (Any, object) or getattr(kind, "_is_protocol", False):
        return _Spec("anything", _always)  # Any, a type variable, a protocol
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{_home(kind)}.{kind.__qualname__}"
    article = "an" if name[0] in "aeio" else "a"
    words = f"{article} {name}"
    if issubclass(kind, Enum):
        words = f"a member of {name} ({', '.join(member.name for member in kind)})"
    return _Spec(words, lambda value: isinstance(value, kind))


def _home(kind: type) -> str:
    """Finds where users find a class: the shortest of the packages above it that has it."""
    parts = kind.__module__.split(".")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if getattr(sys.modules.get(package), kind.__name__, None) is kind:
            return package
    return kind.__module__


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the floats
        return False


_CALLABLE: Any = abc.Callable
_CONTAINERS = (list, tuple, set, frozenset, dict, abc.Sequence, abc.Mapping, abc.Iterable, abc.Set)


def _container(origin: Any, args: tuple[Any, ...]) -> _Spec:
    """Accepts a collection, and what is in it; of an iterable that can be read only once nothing is known."""
    kinds = (tuple, list) if origin is tuple else origin  # as files write tuples
    specs = [_spec(arg) for arg in args if arg is not Ellipsis]
    several = origin in (dict, abc.Mapping)
    fixed = origin is tuple and Ellipsis not in args

    def inside(value: Any) -> abc.Iterable[tuple[_Spec, Any]]:
        if several or fixed:
            return [pair for item in (value.items() if several else [value]) for pair in zip(specs, item, strict=False)]
        return [(specs[0], item) for item in (() if origin is abc.Iterable else value)]

    def fits(value: Any) -> bool:
        alike = isinstance(value, kinds) and not isinstance(value, (str, bytes, Tensor))
        return alike and all(spec.fits(item) for spec, item in inside(value))

    def holds(value: Any) -> bool:
        return not (fixed and len(value) != len(specs)) and all(spec.holds(item) for spec, item in inside(value))

    if several:
        return _Spec(f"a mapping of {specs[0].words} to {specs[1].words}", fits, holds)
    if fixed:
        return _Spec(f"a tuple of {len(specs)}: " + ", ".join(spec.words for spec in specs), fits, holds)
    if origin is abc.Iterable:
        return _Spec(f"an iterable of {specs[0].words}", fits)
    words = {list: "list", tuple: "tuple"}.get(origin, "set" if issubclass(origin, abc.Set) else "sequence")
    return _Spec(f"a {words}, each item {specs[0].words},", fits, holds)
