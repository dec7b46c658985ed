"""How operations are declared: what the dispatcher is given in lieu of lists."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minifloat.ops
from minifloat.ops import quantize
from minifloat.ops.library import Operation, operation

NAMES = st.lists(st.text("aZ09/=._-", min_size=1))


@operation()
def spelled_lists(
    names: list[str], x: torch.Tensor, numbers: list[int], flags: list[bool], factors: list[float]
) -> torch.Tensor:
    """``x`` with a 1 for each name, the sum of the numbers, the flags as bits and the sum of the factors behind it."""
    bits = sum(1 << i for i, flag in enumerate(flags) if flag)
    return torch.cat([x, x.new_tensor([len(set(names)), sum(numbers), bits, sum(factors)])])


@spelled_lists.fake
def _(names: list[str], x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape[0] + 4)


@given(NAMES, st.lists(st.integers(-(2**40), 2**40)), st.lists(st.booleans(), max_size=8))
def test_lists_are_spelled_and_read(names: list[str], numbers: list[int], flags: list[bool]) -> None:
    x, factors = torch.ones(1), [0.1]
    spelled = spelled_lists.spelled(names, x, numbers, flags, factors)
    assert [type(each) for each in spelled] == [torch.Tensor, list, str]
    assert spelled_lists.read(spelled) == (tuple(names), x, tuple(numbers), tuple(flags), factors)


def test_an_operation_gets_its_lists() -> None:
    """Eager, through the dispatcher, and compiled."""
    arguments = ["a", "b", "a"], torch.ones(1), [5, -7], [True, False, True], [0.5, 0.25]
    wanted = torch.tensor([1.0, 2.0, -2.0, 5.0, 0.75])
    assert torch.equal(spelled_lists(*arguments), wanted)
    assert torch.equal(torch.compile(lambda: spelled_lists(*arguments), fullgraph=True, backend="aot_eager")(), wanted)
    torch.library.opcheck(spelled_lists.overload, spelled_lists.spelled(*arguments))


def test_the_dispatcher_gets_few_arguments() -> None:
    """A list of strings costs it 3 us."""
    assert str(quantize.amax.overload._schema).split("->")[0].count("[]") == 1
    *_, lists = quantize.amax.spelled([torch.ones(2, 2)] * 2, ["e4m3/tensor/fp32", "e5m2/tensor/fp32"], [-1, 0])
    assert lists == "e4m3/tensor/fp32,e5m2/tensor/fp32;-1,0"


def test_functions_for_gpus_exist() -> None:
    """Operations name them; a GPU alone would import them."""
    pytest.importorskip("triton")
    modules = [
        importlib.import_module(each.name) for each in pkgutil.walk_packages(minifloat.ops.__path__, "minifloat.ops.")
    ]
    operations = {each for module in modules for each in vars(module).values() if isinstance(each, Operation)}
    named = [each for each in operations if each._gpu_name]
    assert len(named) > 20 and all(callable(each._kernels()) for each in named)
