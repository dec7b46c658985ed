"""``cast_weights``: the weights of a model cast together are those that each layer casts by itself, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minifloat import (
    CustomRecipe,
    Float8BlockScaling,
    GroupedLinear,
    LayerNormMLP,
    Linear,
    Quantizer,
    autocast,
    backends,
    cast_weights,
    checkpoint,
    quantized_model_init,
    quantizer,
)
from minifloat.casts import Casts
from minifloat.formats import Format, parse
from minifloat.functional.quantize import quantize
from minifloat.nn import linear_state
from minifloat.ops import delayed
from minifloat.ops.launch import count_launches
from minifloat.ops.quantize.gpu import RecordedCasts
from tests.helpers import triton_interpreter  # noqa: F401

RECIPES = ["current", "delayed", "block", "rowwise", "mxfp8", "nvfp4", "mxfp6", "w4a8"]
DTYPES = torch.float32, torch.bfloat16
MX = Format(block=32, scale_rule="e8m0")
Around = Callable[[nn.Module], AbstractContextManager[None]]


def split(x: Tensor) -> Tensor:
    """Rows of two experts."""
    return torch.tensor([5, x.shape[0] - 5])


def alone(model: nn.Module) -> AbstractContextManager[None]:
    """Each layer casts its own."""
    return nullcontext()


class Model(nn.Module):
    """Linears, of which one has a weight in parts and one no recipe, a fused module, experts."""

    def __init__(self, recipe: str | None, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Linear(40, 48, recipe=recipe),
            LayerNormMLP(48, 80, recipe=recipe),
            Linear(48, 49, recipe=recipe, parameters_split={"gate": 16, "up": 33}),
            Linear(49, 64, recipe="none"),
        ).to(device)
        self.experts = GroupedLinear(2, 64, 48, recipe=recipe).to(device)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(self.layers(x), split(x))
        return y


def linears(model: nn.Module) -> list[Linear]:
    """Those that have a recipe, whose weights are not experts'."""
    return [each for each in model.modules() if isinstance(each, Linear) and each.recipe != "none"]


def steps(model: nn.Module, around: Around = alone, call: Callable[..., Any] | None = None) -> list[Tensor]:
    """Outputs, gradients and all state of three steps of one microbatch each, and of an evaluation after each."""
    results: list[Tensor] = []
    torch.manual_seed(0)  # of stochastic rounding
    for step in range(3):
        x = torch.randn(17 + step, 40, generator=torch.Generator().manual_seed(step))
        with around(model):
            y = (call or model)(x.to(next(model.parameters()).device))
            y.square().sum().backward()
        results.append(y.detach())
        with torch.no_grad():
            with around(model):
                results.append((call or model)(2 * x.to(y.device)))
            for parameter in model.parameters():
                if parameter.grad is not None:
                    results.append(parameter.grad)
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return [*results, *[each.clone() for each in model.state_dict().values()]]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The addresses of what is cast in one call, of each call."""
    made: list[list[int]] = []
    original = Casts.__call__

    def call(self: Casts, xs: Any, *args: Any, **kwargs: Any) -> Any:
        made.append([x.data_ptr() for x in xs])
        return original(self, xs, *args, **kwargs)

    monkeypatch.setattr(Casts, "__call__", call)
    return made


@pytest.mark.parametrize("recipe", RECIPES)
def test_same_bits(recipe: str, device: torch.device, casts: list[list[int]]) -> None:
    """The weights of linears are cast in one call a step, and nowhere else."""
    model = Model(recipe, device)
    wanted = steps(copy.deepcopy(model))
    casts.clear()
    assert_same(steps(model, cast_weights), wanted)
    if device.type == "cpu":  # products that a GPU emulates read casts of their own
        weights = {each.weight.data_ptr() for each in linears(model) if each.parameters_split is None}
        assert [len(each) for each in casts if weights.intersection(each)] == [4] * 6
    assert all(each._weight_cache is None for each in linears(model))


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_autocast_checkpoint_and_inference(recipe: str, device: torch.device, casts: list[list[int]]) -> None:
    """The recipe may come from autocast; what is recomputed, and what needs no gradient, is the same too."""

    @contextmanager
    def together(model: nn.Module) -> Iterator[None]:
        with autocast(recipe=recipe), cast_weights(model):
            casts.clear()  # from here on experts alone
            with torch.no_grad():
                results.append(model(torch.ones(20, 40, device=device)))
            yield

    @contextmanager
    def apart(model: nn.Module) -> Iterator[None]:
        with autocast(recipe=recipe):
            with torch.no_grad():
                results.append(model(torch.ones(20, 40, device=device)))
            yield

    model, results = Model(None, device), list[Tensor]()
    wanted = steps(twin := copy.deepcopy(model), apart, lambda x: twin.experts(checkpoint(twin.layers, x), split(x)))
    wanted += results
    results.clear()
    found = steps(model, together, lambda x: model.experts(checkpoint(model.layers, x), split(x)))
    assert_same(found + results, wanted)
    weights = {each.weight.data_ptr() for each in linears(model) if each.parameters_split is None}
    if not (recipe == "mxfp8" and backends.backend(MX, MX, device) == "emulated"):  # reads casts of its own
        assert not weights.intersection(address for each in casts for address in each)


def test_an_evaluation_records_no_amaxes(device: torch.device) -> None:
    """Inside of a context that a training step enters they are recorded, once."""
    layer, x = Linear(32, 48, recipe="delayed").to(device), torch.randn(20, 32, device=device)
    with torch.no_grad(), cast_weights(layer):
        layer(x)
    assert not layer.forward_scaling.amax_history.any() and (layer.forward_scaling.scale == 1).all()
    with cast_weights(layer):
        layer(x)
    assert layer.forward_scaling.amax_history[-1].tolist() == [x.abs().max(), layer.weight.abs().max(), 0]


def test_inside_of_what_is_recomputed(device: torch.device) -> None:
    """A recomputation casts with the scales of its forward, which have moved on."""
    model = Model("delayed", device)
    twin = copy.deepcopy(model)

    def together(x: Tensor) -> Tensor:
        with cast_weights(model):
            y: Tensor = model.layers(x)
            return y

    wanted = steps(twin, call=lambda x: twin.experts(checkpoint(twin.layers, x), split(x)))
    assert_same(steps(model, call=lambda x: model.experts(checkpoint(together, x), split(x))), wanted)


def test_what_a_layer_casts_by_itself(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written inside, in a capture of a graph, of quantized parameters, and after an error."""
    layer = Linear(32, 48, recipe="current").to(device)
    x = torch.randn(20, 32, device=device)
    with cast_weights(layer):
        held = layer._weight_cache
        assert torch.equal(layer(x), layer(x, is_first_microbatch=False)) and layer._weight_cache is held
        with torch.no_grad():
            layer.weight *= 2
        inside = layer(x)
        assert layer._weight_cache is held
    assert torch.equal(inside, layer(x))
    with cast_weights(layer):
        monkeypatch.setattr(linear_state, "capturing", lambda: True)
        assert layer._weight_cache is not None and not layer._weight_cache.holds((layer.weight,), held.quantizer)
        assert torch.equal(inside, layer(x))
        monkeypatch.undo()
    with pytest.raises(ZeroDivisionError), cast_weights(layer):
        raise ZeroDivisionError
    assert layer._weight_cache is None
    with quantized_model_init(recipe="current"):
        kept = Linear(32, 48, recipe="current").to(device)
    random = Linear(32, 48, recipe=CustomRecipe(lambda role: Quantizer(parse("e2m1/1x16/two_level/stochastic"))))
    gathered = Linear(32, 48, recipe="current")
    gathered._keeps_weight = False  # as FSDP2's
    layers = nn.ModuleList([kept, random, gathered]).to(device)
    with cast_weights(layers):
        assert all(each._weight_cache is None for each in layers)


@pytest.mark.parametrize("needed", [True, False])
def test_columns_are_cast_for_backward_alone(needed: bool, device: torch.device) -> None:
    """Not where no gradient is wanted, nor where those of a ``backward_override`` are of other operands."""
    override = Float8BlockScaling(backward_override="high_precision")
    layers = nn.ModuleList([Linear(32, 48, recipe="block"), Linear(32, 48, recipe=override)]).to(device)
    with torch.set_grad_enabled(needed), cast_weights(layers):
        for layer, columns in zip(layers, (needed, False), strict=True):
            assert isinstance(layer, Linear) and layer._weight_cache is not None
            assert (layer._weight_cache.operands.columnwise is not None) == columns


def test_microbatches_read_one_cast(device: torch.device, casts: list[list[int]]) -> None:
    """An optimizer's step ends its validity, a fused one's too."""
    layer = Linear(32, 48, recipe="delayed").to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    x = torch.randn(2, 20, 32, device=device)
    twin = copy.deepcopy(layer)
    with cast_weights(layer):
        for i, part in enumerate(x):
            y = layer(part)
            assert torch.equal(y, twin(part, is_first_microbatch=i == 0))
            y.sum().backward()
        assert_same(list(layer.forward_scaling.buffers()), list(twin.forward_scaling.buffers()))
        optimizer.step()
        casts.clear()
        layer(x[0])
        assert [layer.weight.data_ptr() in each for each in casts] == [True]


def test_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of many sizes and dtypes by the kernels, in lists that are as short in a capture."""
    monkeypatch.setattr(quantizer, "_casts", {})  # which knows the reference
    monkeypatch.setattr(Casts, "_work", lambda self, key: RecordedCasts(self.request))
    layers = nn.ModuleList(Linear(17 + i, 16 + i % 3, dtype=DTYPES[i % 2], recipe="current") for i in range(20))
    with count_launches() as launches, cast_weights(layers):
        assert launches == {"amax_kernel": 6, "cast_tensor_kernel": 6}  # three lists, of two dtypes
        for layer in layers:
            assert isinstance(layer, Linear) and layer._weight_cache is not None
            own = quantize(layer.weight.detach(), layer._weight_cache.quantizer, "weight", None)
            for mine, theirs in zip(layer._weight_cache.operands, own, strict=True):
                assert torch.equal(mine.codes, theirs.codes) and torch.equal(mine.scale_inv, theirs.scale_inv)


def test_amaxes_of_many_histories(device: torch.device) -> None:
    """They are recorded as those of one are, what is not finite too."""
    amaxes = [torch.tensor([each], device=device) for each in (3.0, torch.inf, torch.nan, 0.0, 2.0)]
    histories = [torch.rand(2, 3, device=device) * 4 for _ in amaxes]
    histories[3][0, 1], histories[4][0, 1] = torch.nan, torch.inf
    wanted = [each.clone() for each in histories]
    for history, amax in zip(wanted, amaxes, strict=True):
        delayed.record_amax_.reference(history, [1], [amax])
    delayed.record_all_([each[0, 1:2] for each in histories], amaxes)
    assert_same(histories, wanted)


def test_compiled_layers_cast_by_themselves() -> None:
    """A compiled module gives the same inside, without compiling anew."""
    layer = Linear(32, 48, recipe="current")
    compiled, x = torch.compile(layer, backend="aot_eager", fullgraph=True), torch.randn(20, 32)
    wanted = compiled(x)
    with cast_weights(layer), torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(x), wanted)
