"""A pass as one operation: its key says everything, its shape function tells the truth, in any process."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minifloat import LayerNormLinear, LayerNormMLP, Linear, prepare
from minifloat.functional import node
from minifloat.functional.quantize import BACKWARD_SLOTS, FORWARD_SLOTS, LinearConfig, linear_config
from tests.helpers.compiled import RECIPES

ROWS = (0, 1, 5, 33, 130)
IN, OUT = 32, 48


@pytest.mark.parametrize("name", RECIPES)
def test_text_of_a_config(name: str) -> None:
    """What is read again quantizes all tensors alike and makes the same decisions."""
    config = linear_config(RECIPES[name], "", save_original_input=True)
    again = LinearConfig.of_text(config.text)
    assert again.text == config.text and (again.delayed is None) == (config.delayed is None)
    for kind in (*FORWARD_SLOTS, *BACKWARD_SLOTS, "fast_fprop", "fast_dgrad", "fast_wgrad", "backward_override"):
        assert getattr(again, kind) == getattr(config, kind)
    assert again.save_original_input


MODULES: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **how: Linear(IN, OUT, **how),
    "Linear without bias": lambda **how: Linear(IN, OUT, bias=False, save_original_input=True, **how),
    "LayerNormLinear": lambda **how: LayerNormLinear(IN, OUT, **how),
    "LayerNormLinear that recomputes": lambda **how: LayerNormLinear(
        IN, OUT, normalization="RMSNorm", recompute_norm=True, return_layernorm_output=True, **how
    ),
    "LayerNormMLP": lambda **how: LayerNormMLP(IN, OUT, **how),
    "LayerNormMLP, gated": lambda **how: LayerNormMLP(
        IN, OUT, bias=False, activation="swiglu", normalization="RMSNorm", **how
    ),
    "LayerNormMLP that recomputes": lambda **how: LayerNormMLP(
        IN, OUT, activation="clamped_swiglu", recompute_norm=True, recompute_activation=True,
        return_layernorm_output=True, **how,
    ),
}  # fmt: skip
FROZEN = ("", "weight", "fc1", "fc2", "norm", "x", "all")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the operations that ran, each of which gave what its shape function tells."""
    ran, call = [], node._call

    def checked(direction: str, key: str, tensors: Sequence[Any], sizes: Sequence[int], *rest: Any) -> Sequence[Tensor]:
        made = call(direction, key, tensors, sizes, *rest)
        calls, count = rest[:2]
        extra = [None] * (2 * len(calls) + count)
        shapes = node.shapes(direction, key, [*tensors, *extra], list(sizes))
        for one, other in zip(made, shapes, strict=False):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert all(one.numel() == 0 for one in made[len(shapes) :])
        storages = [one.untyped_storage()._cdata for one in made]
        assert len({*storages}) == len(storages)  # results share no memory
        ran.append(direction)
        return made

    monkeypatch.setattr(node, "_call", checked)
    return ran


def step(module: nn.Module, x: Tensor, residual: Tensor | None) -> list[Tensor | None]:
    """All results and gradients of a step, and where the generator stands."""
    own = x.detach().clone().requires_grad_(x.requires_grad)
    more = {} if residual is None else {"residual": residual, "return_residual": True}
    made = module(own, **more)
    outputs = [y for y in (made if isinstance(made, tuple) else (made,)) if y is not None]
    loss = sum([y.float().square().sum() for y in outputs])
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    return [*outputs, own.grad, *[p.grad for p in module.parameters()], torch.get_rng_state()]


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", RECIPES)
def test_modules(kind: str, name: str, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In traced code a pass is one operation, with the bits of eager code, whatever is frozen."""
    for number, rows in enumerate(ROWS):
        frozen = FROZEN[(number + len(name)) % len(FROZEN)]
        dtype = torch.bfloat16 if number % 2 else torch.float32
        torch.manual_seed(0)
        eager = MODULES[kind](recipe=RECIPES[name], dtype=dtype)
        for at, parameter in eager.named_parameters():
            parameter.requires_grad_(frozen != "all" and (not frozen or frozen not in at))
        prepare(eager, RECIPES[name])
        module, found = copy.deepcopy(eager), []
        x = torch.randn(rows, IN, dtype=dtype, requires_grad=frozen not in ("x", "all"))
        residual = torch.randn(rows, IN, dtype=dtype) if number % 3 == 0 and "Norm" in kind else None
        for each in (eager, module):
            torch.manual_seed(rows)
            monkeypatch.setattr(torch.compiler, "_is_compiling_flag", each is module)
            found.append(step(each, x, residual))
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", False)
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)
        for one, other in zip(eager.buffers(), module.buffers(), strict=True):
            assert torch.equal(one, other)
    assert told.count("forward") == len(ROWS) and told.count("backward") >= len(ROWS) - 1


def a_key(name: str) -> str:
    """The key of a forward of a Linear without bias."""
    keys: list[str] = []
    call = node._call

    def noted(direction: str, key: str, *rest: Any) -> Sequence[Tensor]:
        keys.append(key)
        return call(direction, key, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "_call", noted)
        patch.setattr(torch.compiler, "_is_compiling_flag", True)
        Linear(IN, OUT, bias=False, recipe=RECIPES[name])(torch.randn(5, IN))
    return keys[0]


def test_another_version() -> None:
    """A graph of another version of the passes does not run."""
    with pytest.raises(ValueError, match=r"compiled or exported for passes 0; these are \d+: make it anew"):
        node.plan(a_key("current").replace(str(node.VERSION), "0", 1))


def test_another_process() -> None:
    """A process that has only the key computes the same."""
    key = a_key("nvfp4")
    code = (
        "import torch, minifloat; from minifloat.functional import node; torch.manual_seed(0); "
        f"x, w = torch.randn(5, {IN}), torch.randn({OUT}, {IN}); "
        f"made = node.run('forward', {key!r}, [x, w, None, None, None], [5, {IN}, {OUT}]); "
        "found = [t.double().sum().item() for t in made]"
    )
    out = subprocess.run([sys.executable, "-c", f"{code}; print(found)"], capture_output=True, text=True, check=True)
    space: dict[str, Any] = {}
    exec(code, space)
    assert out.stdout.strip() == str(space["found"])
