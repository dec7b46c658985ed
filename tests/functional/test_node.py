"""A pass as one operation: its key says everything, its shape function tells the truth, in any process."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from minifloat.functional import node
from minifloat.functional.quantize import BACKWARD_SLOTS, FORWARD_SLOTS, LinearConfig, Options, linear_config
from tests.helpers.compiled import RECIPES

ROWS = (0, 1, 5, 33, 64, 130)
IN, OUT = 32, 48


def key_of(name: str, dtype: torch.dtype = torch.float32, needs: str = "111", bias: bool = True) -> str:
    options = Options("cpu", dtype, dtype, *[each == "1" for each in needs])
    return f"{node.key_of(linear_config(RECIPES[name], '').text, options)}|{int(bias)}"


@pytest.mark.parametrize("name", RECIPES)
def test_text_of_a_config(name: str) -> None:
    """What is read again quantizes all tensors alike and makes the same decisions."""
    config = linear_config(RECIPES[name], "", save_original_input=True)
    again = LinearConfig.of_text(config.text)
    assert again.text == config.text and (again.delayed is None) == (config.delayed is None)
    for kind in (*FORWARD_SLOTS, *BACKWARD_SLOTS, "fast_fprop", "fast_dgrad", "fast_wgrad", "backward_override"):
        assert getattr(again, kind) == getattr(config, kind)
    assert again.save_original_input


def inputs(key: str, rows: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
    """X, W, b, scales and seeds of a forward, and a history."""
    plan = node.plan(key)
    tensors = [torch.randn(rows, IN, dtype=dtype), torch.randn(OUT, IN, dtype=dtype), torch.randn(OUT, dtype=dtype)]
    delayed = plan.spec.config.delayed is not None
    seeds = [torch.randint(2**62, (2,)) for _ in range(plan.facts.forward_seeds)]
    return [*tensors, *[torch.ones(3)] * delayed, *seeds], torch.zeros(4, 3) if delayed else None


@pytest.mark.parametrize("needs", ["111", "100", "010", "000"])
@pytest.mark.parametrize("name", RECIPES)
def test_shapes(name: str, needs: str) -> None:
    """Shapes, dtypes and strides that a compiler is told are those of the results, of no rows, too."""
    for dtype, rows in product((torch.float32, torch.bfloat16), ROWS):
        key = key_of(name, dtype, needs)
        plan = node.plan(key)
        tensors, history = inputs(key, rows, dtype)
        made = node.run("forward", key, tensors, [rows, IN], history)
        same(made, node.shapes("forward", key, tensors, [rows, IN], history))
        assert len(made) == 1 + plan.facts.saved
        itself = [tensors[0]] * plan.facts.saves_x + [tensors[1]] * plan.facts.saves_w
        delayed = [torch.ones(2)] * (history is not None)
        seeds = [torch.randint(2**62, (2,)) for _ in range(plan.facts.backward_seeds)]
        again = [torch.ones(1)] * plan.facts.reads_scale
        read = [torch.randn(rows, OUT, dtype=dtype), *itself, *made[1:], *again, *delayed, *seeds]
        past = None if history is None else torch.zeros(4, 2)
        found = node.run("backward", key, read, [rows, IN], past)
        same(found, node.shapes("backward", key, read, [rows, IN], past))
        assert len(found) == needs.count("1")


def same(results: list[Tensor], told: list[Tensor]) -> None:
    assert len(results) == len(told)
    for one, other in zip(results, told, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_another_version() -> None:
    """A graph of another version of the passes does not run."""
    key = key_of("current").replace(str(node.VERSION), "0", 1)
    with pytest.raises(ValueError, match=r"compiled or exported for passes 0; these are \d+: make it anew"):
        node.plan(key)


def test_another_process() -> None:
    """A process that has only the key computes the same."""
    key = key_of("nvfp4", torch.bfloat16)
    code = (
        "import torch; from minifloat.functional import node; torch.manual_seed(0); "
        "x, w, b = torch.randn(5, 32).bfloat16(), torch.randn(48, 32).bfloat16(), torch.randn(48).bfloat16(); "
        f"print([t.double().sum().item() for t in node.run('forward', {key!r}, [x, w, b], [5, 32])])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    space: dict[str, Any] = {}
    exec(code.replace("print(", "found = ("), space)
    assert out.strip() == str(space["found"])


def test_memory_that_is_given() -> None:
    """dW is added to ``main_grad`` and not returned."""
    key, main_grad = key_of("current"), torch.ones(OUT, IN)
    tensors, _ = inputs(key, 5, torch.float32)
    made = node.run("forward", key, tensors, [5, IN])
    read = [torch.randn(5, OUT), *made[1:]]
    dx, dw, db = node.run("backward", key, read, [5, IN])
    results = node.run("backward", key, read, [5, IN], None, main_grad)
    assert [torch.equal(a, b) for a, b in zip(results, (dx, db), strict=True)] == [True, True]
    torch.testing.assert_close(main_grad, 1 + dw)
