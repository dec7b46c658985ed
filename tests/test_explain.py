"""``minifloat.explain``: what a table of a pass says, and that nothing is another afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import minifloat
from minifloat import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, TransformerLayer, autocast, explain
from minifloat.ops import tape
from minifloat.tools.explain import Explanation, Line
from tests.helpers.compare import assert_same_bits
from tests.helpers.distributed_pool import on_ranks
from tests.helpers.replay_on_cpu import replay_on_cpu

BF16 = torch.bfloat16
M, K, N = 32, 64, 48
RECIPES = ["current", "delayed", "mxfp8", "nvfp4", "block"]


def sample(*shape: int) -> Tensor:
    return torch.randn(shape or (M, K), dtype=BF16, requires_grad=True)


def of(lines: Explanation, direction: str) -> list[Line]:
    return [line for line in lines if line.of[1] == direction]


def names(lines: list[Line]) -> list[str]:
    return [line.what for line in lines]


def texts(memory: dict[Any, None]) -> list[str]:
    return [*map(str, memory)]


def test_a_linear() -> None:
    """Shapes, dtypes and bytes, by hand: codes of X and W are kept for backward, whose operands go one by one."""
    lines = explain(Linear(K, N, dtype=BF16, recipe="current"), sample())
    cast, fprop = of(lines, "forward")
    assert cast.of == ("Linear", "forward", "Float8CurrentScaling") and cast.what == "cast X and W"
    assert texts(cast.reads) == ["32x64 bf16", "48x64 bf16"]
    assert sorted(texts(cast.makes)) == ["1 fp32", "1 fp32", "32x64 e4m3", "48x64 e4m3"]
    assert cast.made == M * K + N * K + 8 and cast.freed == 0
    assert fprop.what == "fprop" and fprop.by["torch.mm (fp64)"] == 1
    assert texts(fprop.reads) == ["32x64 e4m3", "48x64 e4m3", "1 fp32", "1 fp32", "48 bf16"]
    assert texts(fprop.makes) == ["32x48 bf16"] and fprop.made == 2 * M * N
    db, cast, dgrad, wgrad = of(lines, "backward")
    assert names([db, cast, dgrad, wgrad]) == ["db", "cast dY", "dgrad", "wgrad"]
    assert texts(db.makes) == ["48 bf16"] and sorted(texts(cast.makes)) == ["1 fp32", "32x48 e5m2"]
    assert (texts(dgrad.makes), dgrad.freed) == (["32x64 bf16"], N * K + 4)  # the codes of W, and their scale
    assert texts(wgrad.makes) == ["48x64 bf16"] and wgrad.freed >= M * N + M * K
    text = str(lines)
    forward, backward = text.split("\n\n")
    assert forward.startswith(
        "Linear: forward, Float8CurrentScaling\n0 launches, 8.2 KB made, 0 B freed, 8.2 KB at the"
    )
    assert "1  cast X and W  " in forward and "32x64 bf16, 48x64 bf16 -> " in forward
    assert backward.startswith("Linear: backward, Float8CurrentScaling\n") and "4  wgrad" in backward


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe: str) -> None:
    lines = explain(Linear(K, N, dtype=BF16, recipe=recipe), sample())
    records = ["record amaxes"] * (recipe == "delayed")
    assert names(of(lines, "forward")) == ["cast X and W", *records, "fprop"]
    assert names(of(lines, "backward")) == ["db", "cast dY", *records, "dgrad", "wgrad"]


def test_without_gradient_of_the_input() -> None:
    lines = explain(Linear(K, N, bias=False, dtype=BF16, recipe="mxfp8"), sample().detach())
    assert names(of(lines, "backward")) == ["cast dY", "wgrad"]


def test_fused_modules_and_experts() -> None:
    lines = explain(LayerNormMLP(K, N, dtype=BF16, recipe="current"), sample())
    linear = ["cast X and W", "fprop"]
    assert names(of(lines, "forward")) == ["norm", *linear, "activation", *linear]
    backward = ["cast dY", "dgrad", "wgrad"]
    assert names(of(lines, "backward")) == ["db", *backward, "activation's gradient", *backward, "norm's gradients"]
    assert {line.of[2] for line in lines} == {"Float8CurrentScaling"}
    found = explain(GroupedLinear(2, K, N, dtype=BF16, recipe="mxfp8"), sample(), [20, 12])
    assert names(of(found, "forward"))[-3:] == ["cast X", "cast W", "fprop"]
    assert names(of(found, "backward")) == ["db", "cast dY", "dgrad", "wgrad"]


def test_plain_modules() -> None:
    """Each line is an operation, in backward a node; and nothing is quantized, which is said."""
    layer = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K))
    lines = explain(layer, torch.randn(M, K))
    assert [line.of[:2] for line in lines] == [
        *[(name, "forward") for name in ("Linear 0", "GELU 1", "Linear 2")],
        *[(name, "backward") for name in ("Linear 2", "GELU 1", "Linear 0")],
    ]
    assert [*lines[1].by] == ["gelu"] and lines[4].what == "GeluBackward0"
    assert texts(lines[1].makes) == ["32x48 fp32"] and lines[1].made == 4 * M * N
    assert str(lines).startswith("Nothing is quantized")
    mixed = explain(nn.Sequential(Linear(K, N, recipe="none"), Linear(N, K, recipe="mxfp8")), torch.randn(M, K))
    assert "Linear 0: forward, no recipe\n" in str(mixed) and "Nothing is quantized" not in str(mixed)


def test_memory_of_plain_modules_is_freed_when_python_frees_it() -> None:
    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            del x
            z = y + 1
            del y
            return z * 3

    with torch.no_grad():
        double, plus, triple = explain(Squares(), torch.ones(M))
    assert (double.made, double.freed, plus.freed, triple.freed) == (4 * M, 0, 4 * M, 4 * M)


def test_a_checkpoint_is_recomputed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = LayerNormMLP(K, N, dtype=BF16, recipe="current")

        def forward(self, x: Tensor) -> Any:
            return minifloat.checkpoint(self.part, x)

    lines = explain(Model(), sample())
    again = of(lines, "recomputation")
    assert names(again) == names(of(lines, "forward")) and {line.of[0] for line in again} == {"LayerNormMLP part"}


MODULES: dict[str, Any] = {
    **{recipe: lambda recipe=recipe: Linear(K, N, recipe=recipe) for recipe in RECIPES},
    "norm": lambda: LayerNormLinear(K, N, recipe="delayed"),
    "experts": lambda: GroupedLinear(2, K, N, recipe="delayed"),
    "layer": lambda: TransformerLayer(K, N, 4, recipe="nvfp4"),
    "plain": lambda: nn.Sequential(nn.Linear(K, N), nn.BatchNorm1d(N), nn.Dropout(0.5)),
}


def step(layer: nn.Module) -> list[Tensor]:
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(5)).requires_grad_()
    layer.zero_grad()
    y = layer(x[:, None] if isinstance(layer, TransformerLayer) else x, *[[20, 12]] * isinstance(layer, GroupedLinear))
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *[p.grad for p in layer.parameters() if p.grad is not None]]


@pytest.mark.parametrize("kind", MODULES)
def test_nothing_changes(kind: str) -> None:
    """Parameters, gradients, buffers and random numbers are those of a twin, and so is the next step."""
    layer = MODULES[kind]()
    twin = copy.deepcopy(layer)
    for each in (layer, twin):
        torch.manual_seed(1)
        step(each)
    gradients = [p.grad for p in layer.parameters()]
    arguments = [torch.randn(M, K)[:, None] if kind == "layer" else torch.randn(M, K)]
    state = torch.get_rng_state()
    explain(layer, *arguments, *[[20, 12]] * (kind == "experts"))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is grad for p, grad in zip(layer.parameters(), gradients, strict=True))
    for (name, mine), (same, other) in zip(layer.state_dict().items(), twin.state_dict().items(), strict=True):
        assert name == same
        assert_same_bits(mine, other)
    results = []
    for each in (layer, twin):
        torch.manual_seed(2)
        results.append(step(each))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    assert torch._C._len_torch_dispatch_stack() == 0 and tape.taping.tape is None


def test_within_autocast() -> None:
    """Its recipe holds, a layer that it has not seen keeps no histories, and what it will update at its end is left."""
    layer = Linear(K, N)
    twin = copy.deepcopy(layer)
    with autocast(recipe="delayed"):
        lines = explain(layer, torch.randn(M, K))
        assert not [*layer.buffers()]
    assert names(of(lines, "forward")) == ["cast X and W", "record amaxes", "fprop"]
    for each in (layer, twin):
        with autocast(recipe="delayed"):
            step(each)
            if each is layer:
                explain(layer, torch.randn(M, K))
    for mine, other in zip(layer.buffers(), twin.buffers(), strict=True):
        assert_same_bits(mine, other)


@pytest.mark.parametrize("delay", [False, True])
def test_gradients_past_autograd(delay: bool) -> None:
    layer = Linear(K, N, bias=False, recipe="current", fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    layer.weight.main_grad = main_grad = torch.ones(N, K)
    lines = explain(layer, torch.randn(M, K))
    assert ("wgrad" in names(lines)) == (not delay)
    assert layer.weight.main_grad is main_grad and torch.equal(main_grad, torch.ones(N, K))
    assert not hasattr(layer.weight, "grad_added_to_main_grad") and not layer._wgrad_tasks


class Taped(nn.Module):
    """Launches a kernel within a recorder."""

    def __init__(self, refused: str = "") -> None:
        super().__init__()
        self.recorder, self.refused = tape.Recorder(), refused

    def forward(self, x: Tensor) -> Any:
        def function() -> tuple[list[Tensor | None], None]:
            made, current = torch.empty(M), tape.current()
            if current is not None:
                current.launched("own_kernel", lambda *_: None, (), 1, [x, made, 7])
                current.launched("other_kernel", lambda *_: None, (), 1, [made], "Gluon")
            if self.refused:
                tape.refuse(self.refused)
            return [made.zero_()], None

        return self.recorder(None, (x,), function)[0][0]


def test_launches_and_whether_they_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_on_cpu(monkeypatch)
    lines = explain(Taped(), torch.ones(M))
    launches = [line for line in lines if line.launches]
    assert [[*line.by] for line in launches] == [["own_kernel (Triton)"], ["other_kernel (Gluon)"]]
    assert "32 fp32" in texts(launches[0].reads) and texts(launches[1].reads) == ["32 fp32"]
    assert {line.replayed for line in lines} == {"replayed"} and "Taped: forward, replayed\n2 launches" in str(lines)
    refused = explain(Taped("a reason"), torch.ones(M))
    assert "Taped: forward, called each time: a reason\n" in str(refused)


@on_ranks(2)
def test_ranks(rank: int, world_size: int) -> None:
    """What ranks send is seen, and what goes on beside it."""
    group = dist.group.WORLD
    options: dict[str, Any] = {"parallel_mode": "column", "sequence_parallel": True, "tp_group": group}
    lines = explain(Linear(K, N, dtype=BF16, recipe="current", **options), sample())
    assert names(of(lines, "forward")) == ["cast rows", "gather", "cast W", "fprop"]
    gather = lines[1]
    assert [*gather.by] == ["c10d::_allgather_base_"] and gather.made == 2 * M * K
    assert names(of(lines, "backward"))[:6] == ["db", "cast dY", "gather", "dgrad", "sum over ranks", "wgrad"]
    etp = Linear(K, N, dtype=BF16, recipe="mxfp8", etp_group=group)
    before = [parameter.clone() for parameter in etp.parameters()]
    lines = explain(etp, sample())
    assert "reduce dW" in names(of(lines, "backward"))
    assert all(torch.equal(*pair) for pair in zip(etp.parameters(), before, strict=True))
    for _ in range(2):
        etp(sample()).sum().backward()


def test_what_has_no_tensor() -> None:
    with pytest.raises(ValueError, match="explain: GELU: it has no parameters; give it a tensor"):
        explain(nn.GELU())


def test_an_error_leaves_no_tape() -> None:
    with pytest.raises(ValueError, match="in_features"):
        explain(Linear(K, N, recipe="current"), torch.randn(M, N))
    assert tape.taping.tape is None and tape.taping.modes == 0 and torch._C._len_torch_dispatch_stack() == 0


def test_command() -> None:
    testing = pytest.importorskip("typer.testing")
    from minifloat.tools.cli import build

    run = testing.CliRunner().invoke(build(), ["explain", "current", "bf16", "--rows", "16", "--device", "cpu"])
    assert run.exit_code == 0 and "Linear: backward, Float8CurrentScaling\n" in run.stdout
    assert "bf16 on " in run.stdout and "Nothing is quantized" in run.stdout
    run = testing.CliRunner().invoke(build(), ["explain", "fp8", "--device", "cpu"])
    assert run.exit_code == 2 and "did you mean" in run.output


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_a_gpu(recipe: str) -> None:
    """Passes are replayed, by kernels and products of libraries alone; nothing changes."""
    layer = Linear(768, 768, dtype=BF16, device="cuda", recipe=recipe)
    state = copy.deepcopy(layer.state_dict())
    x = torch.randn(512, 768, dtype=BF16, device="cuda", requires_grad=True)
    lines = explain(layer, x)
    assert {line.replayed for line in lines} == {"replayed"}
    assert any(line.launches for line in of(lines, "forward")) and any(line.launches for line in of(lines, "backward"))
    for product in ("fprop", "dgrad", "wgrad"):
        by = [name for line in lines if line.what == product for name in line.by]
        assert any("cuBLAS" in name for name in by), by
    if recipe == "current":
        assert [*of(lines, "forward")[0].by] == ["amax_kernel (Triton)"]
        assert lines[-1].by == {"torch._scaled_mm (cuBLASLt)": 1} and texts(lines[-1].makes) == ["768x768 bf16"]
    assert x.grad is None and layer.weight.grad is None
    for name, value in layer.state_dict().items():
        assert_same_bits(value, state[name])
    assert minifloat.explain(layer, x) is not lines
