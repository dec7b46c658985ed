"""Quantized weights of ``GroupedLinear`` against one quantized ``Linear`` for each expert, bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minifloat import GroupedLinear, Linear, MoE, QuantizedTensor, TransformerLayer, autocast, quantized_model_init
from minifloat.convert import convert, revert
from minifloat.formats import COLUMNWISE, parse
from minifloat.functional.grouped import with_rows_consecutive
from minifloat.functional.quantize import RoleCasts
from minifloat.optim import MasterWeights
from minifloat.quantizer import Quantizer, casts
from minifloat.recipe import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling
from minifloat.tensor import quantize
from tests.helpers.sample import each_pair, each_twice

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = torch.bfloat16
K, N = 40, 24
COUNTS = (7, 0, 23)
RECIPES: dict[str, Any] = {
    **{name: name for name in ("current", "block", "mxfp8", "rowwise", "mxfp4", "mxfp6", "w4a8")},
    "delayed": DelayedScaling(amax_history_len=3),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "high precision backward": Float8CurrentScaling(backward_override="high_precision"),
    "dequantized backward": Float8CurrentScaling(backward_override="dequantized"),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def slow(*recipes: str) -> list[Any]:
    return [pytest.param(recipe, marks=pytest.mark.slow) for recipe in recipes]


def layers(
    recipe: Any, counts: Sequence[int] = COUNTS, own: bool = True, preserve: bool = False, **options: Any
) -> tuple[GroupedLinear, list[Linear]]:
    """A grouped linear and one linear for each expert, quantized alike; ``own``: the recipe is theirs, too."""
    recipe = RECIPES.get(recipe, recipe)
    both = {"dtype": BF16, "recipe": recipe if own else None} | options
    single_bias = both.pop("single_grouped_bias", False)
    with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        torch.manual_seed(0)
        grouped = GroupedLinear(len(counts), K, N, single_grouped_bias=single_bias, **both)
        torch.manual_seed(0)
        return grouped, [Linear(K, N, **both) for _ in counts]


def weights(grouped: GroupedLinear) -> list[Any]:
    return [grouped.get_parameter(f"{i}.weight") for i in range(grouped.num_gemms)]


def assert_same_codes(grouped: GroupedLinear, linears: Sequence[Linear]) -> None:
    for mine, linear in zip(weights(grouped), linears, strict=True):
        theirs: Any = linear.weight
        assert isinstance(mine, QuantizedTensor) and isinstance(mine, nn.Parameter)
        assert mine.quantizer == theirs.quantizer and mine._buffers().keys() == theirs._buffers().keys()
        for name, buffer in mine._buffers().items():
            assert torch.equal(buffer, theirs._buffers()[name]), name


def step(layer: Any, parts: Sequence[Any], counts: Sequence[int], seed: int = 0, **call: Any) -> list[Any]:
    """Output and gradient of the input; ``parts``: of a list of linears those, else nothing."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    x = torch.randn(total, K, generator=generator).to(BF16).requires_grad_()
    dy = torch.randn(total, N, generator=generator).to(BF16)
    if parts:
        y = torch.cat([linear(own, **call) for linear, own in zip(parts, x.split(list(counts)), strict=True)])
    else:
        y = layer(x, torch.tensor(counts), **call)
    y.backward(dy)
    return [y.detach(), x.grad]


def assert_step_alike(
    grouped: GroupedLinear, linears: Sequence[Linear], counts: Sequence[int] = COUNTS, **call: Any
) -> None:
    """Forward and backward give the same bits, and leave the same gradients."""
    mine, theirs = step(grouped, (), counts, **call), step(None, linears, counts, **call)
    assert all(map(torch.equal, mine, theirs))
    if not grouped.fuse_wgrad_accumulation and not grouped.delay_wgrad_compute:
        for own, linear in zip(weights(grouped), linears, strict=True):
            assert torch.equal(own.grad, linear.weight.grad)  # type: ignore[arg-type]


@pytest.fixture
def no_weight_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing casts a weight of groups."""
    cast = RoleCasts.of_groups

    def checked(self: RoleCasts, *args: Any, **kwargs: Any) -> Any:
        assert "weight" not in self.kinds
        return cast(self, *args, **kwargs)

    monkeypatch.setattr(RoleCasts, "of_groups", checked)


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_weight_casts")
@each_twice
@pytest.mark.parametrize("counts", [COUNTS, (0, 45, 1), (0, 0), (33,)], ids=str)
@each_recipe
def test_trains_as_one_linear_for_each_expert(recipe: str, counts: tuple[int, ...]) -> None:
    """Codes at the start, and after steps of ``MasterWeights``, one with two microbatches; nothing is joined anew."""
    grouped, linears = layers(recipe, counts)
    joined = grouped._joined
    optimizers = [
        MasterWeights(own, torch.optim.AdamW, lr=0.05)
        for own in (grouped.parameters(), nn.ModuleList(linears).parameters())
    ]
    for first in (None, True, False, None):
        assert_same_codes(grouped, linears)
        assert_step_alike(grouped, linears, counts, is_first_microbatch=first)
        for optimizer in optimizers if first is not True else ():
            optimizer.step()
            optimizer.zero_grad()
    assert_same_codes(grouped, linears)
    assert joined is not None and grouped._joined is joined and joined.holds(weights(grouped))


@pytest.mark.parametrize("preserve", [False, True])
def test_initial_values(preserve: bool) -> None:
    grouped, linears = layers("delayed", preserve=preserve)
    for _ in range(2):
        for mine, linear in zip(weights(grouped), linears, strict=True):
            initial, theirs = mine.get_high_precision_init_val(), linear.weight.get_high_precision_init_val()  # type: ignore[operator]
            assert (initial is not None) == preserve and (not preserve or torch.equal(initial, theirs))
        torch.manual_seed(3)
        grouped.reset_parameters()
        torch.manual_seed(3)
        for linear in linears:
            linear.reset_parameters()
        assert_same_codes(grouped, linears)


@each_pair
@pytest.mark.parametrize("bias", [None, False, True], ids=["no bias", "biases", "single bias"])
@pytest.mark.parametrize("delay, fuse, save", list(product((False, True), repeat=3)))
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_options(recipe: str, delay: bool, fuse: bool, save: bool, bias: bool | None) -> None:
    """Every combination, two microbatches: each gradient arrives once, that of each bias too."""
    grouped, linears = layers(
        recipe, bias=bias is not None, single_grouped_bias=bool(bias), delay_wgrad_compute=delay,
        fuse_wgrad_accumulation=fuse, save_original_input=save,
    )  # fmt: skip
    pairs = [(mine, linear.weight) for mine, linear in zip(weights(grouped), linears, strict=True)]
    for each in (weight for pair in pairs for weight in pair) if fuse else ():
        each.main_grad = torch.full(each.shape, 7.0)
    for first in (True, False):
        assert_step_alike(grouped, linears, is_first_microbatch=first)
        for layer in (grouped, *linears) if delay else ():
            layer.backward_dw()
    for mine, theirs in pairs:
        assert (mine.grad is None) == (theirs.grad is None) == fuse
        assert torch.equal(mine.main_grad if fuse else mine.grad, theirs.main_grad if fuse else theirs.grad)  # type: ignore[arg-type]
    if bias is not None:
        biases = [grouped.get_parameter("bias").grad] if bias else [each.bias.grad for each in grouped.children()]  # type: ignore[union-attr]
        expected = [linear.bias.grad for linear in linears]
        assert all(map(torch.equal, biases, [torch.stack(expected)] if bias else expected))


@each_twice
@pytest.mark.parametrize("around", [None, "none", "mxfp8", "delayed"])
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "delayed"])
def test_under_other_recipes(recipe: str, around: str | None) -> None:
    """None in force: the values; another one: the codes where products take them, else a cast of the values."""
    grouped, linears = layers(recipe, own=False)
    for _ in range(2):
        context = autocast(enabled=around not in (None, "none"), recipe=RECIPES.get(around or ""))
        with context:
            assert_step_alike(grouped, linears)


def test_frozen_experts_and_finite_checks() -> None:
    grouped, linears = layers("current", own=False)
    for layer in (grouped.get_submodule("1"), linears[1]):
        layer.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    with autocast(recipe="current", check_finite=True):
        mine, theirs = step(grouped, (), COUNTS), step(None, linears, COUNTS)
    assert all(map(torch.equal, mine, theirs)) and [own.grad is None for own in weights(grouped)] == [
        False,
        True,
        False,
    ]
    with autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        step(grouped, (), COUNTS), step(None, linears, COUNTS)
    recorded = grouped.forward_scaling.amax_history[0].view(-1, 3)
    assert torch.equal(recorded, torch.stack([each.forward_scaling.amax_history[0] for each in linears], 1))


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.parametrize("recipe", ["delayed", *slow("current", "block", "nvfp4")])
def test_compiled(recipe: str) -> None:
    """One graph for all counts, which joins the codes."""
    torch._dynamo.reset()
    grouped, _ = layers(recipe)
    own = copy.deepcopy(grouped)
    compiled = torch.compile(own, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, counts in enumerate(((7, 0, 23), (30, 0, 0), (0, 1, 29))):
            mine, theirs = step(compiled, (), counts, seed), step(grouped, (), counts, seed)
            assert all(map(torch.equal, mine, theirs))
    for one, other in zip(own.parameters(), grouped.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


# ---- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4", "delayed"])
def test_state_dicts_of_a_list_of_linears(recipe: str) -> None:
    """Both ways, and both from high precision; without their histories, which are those of each linear."""
    grouped, linears = layers(recipe)
    others, one = layers(recipe)[1], layers(recipe)[0]
    for each in (*others, one):
        torch.manual_seed(1)
        each.reset_parameters()
    mine, theirs = grouped.state_dict(), nn.ModuleList(others).state_dict()
    parts = [key for key in theirs if "scaling" not in key]
    assert [key for key in mine if "scaling" not in key] == parts
    nn.ModuleList(others).load_state_dict(mine, strict=False)
    assert_same_codes(grouped, others)
    nn.ModuleList(linears).load_state_dict(theirs, strict=False)
    grouped.load_state_dict(theirs, strict=False)
    assert_same_codes(grouped, linears)
    values = {key: value.dequantize() if isinstance(value, QuantizedTensor) else value for key, value in theirs.items()}
    whole = {"weight": torch.stack([values.pop(f"{i}.weight") for i in range(3)])}
    one.load_state_dict(values | whole, strict=False)
    nn.ModuleList(linears).load_state_dict(values | dict(zip(parts[::2], whole["weight"], strict=True)), strict=False)
    assert_same_codes(one, linears)
    assert_step_alike(one, linears)


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "delayed", "nvfp4"])
def test_copies_and_moves(recipe: str) -> None:
    """Deep copies, pickles, dtypes, ``to_empty`` and assigned state dicts compute the same; all but the last joined."""
    grouped, _ = layers(recipe)
    expected = step(copy.deepcopy(grouped), (), COUNTS)
    twin = copy.deepcopy(grouped)
    file = io.BytesIO()
    torch.save(grouped.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    empty = layers(recipe, device="meta")[0].to_empty(device="cpu")
    empty.load_state_dict(state)
    assigned = layers(recipe, device="meta")[0]
    assigned.load_state_dict(state, assign=True)
    assert assigned._joined is None
    moved = copy.deepcopy(grouped).to(torch.float32)
    assert weights(moved)[0].dtype == torch.float32
    made = [twin, pickle.loads(pickle.dumps(grouped)), empty, moved.to(BF16), copy.deepcopy(grouped).share_memory()]
    for each in made:
        assert each._joined is not None and each._joined.holds(weights(each)) and each._joined is not grouped._joined
    for each in (*made, assigned):
        assert all(map(torch.equal, step(each, (), COUNTS), expected))
    assert all(own.is_shared() for own in made[-1].parameters())
    with torch.no_grad():
        weights(twin)[1].zero_()
    assert all(own.dequantize().any() for own in weights(grouped))


@each_recipe
def test_weights_that_are_apart(recipe: str) -> None:
    """Codes are joined where they are read, by forward and by backward."""
    grouped, linears = layers(recipe)
    grouped._joined = None
    for each in weights(grouped):
        each._operands = each.detach().clone().operands
    for _ in range(2):
        assert_step_alike(grouped, linears)
    assert grouped._joined is None


@each_pair
@pytest.mark.parametrize("replaced", [0, 1, 2])
@pytest.mark.parametrize("by", ["codes", "values", "other codes"])
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
def test_a_weight_that_is_replaced(recipe: str, by: str, replaced: int) -> None:
    """Of any expert, after the codes of all lay in one piece of memory, which has the old ones."""
    grouped, linears = layers(recipe)
    assert grouped._joined is not None and grouped._joined.holds(weights(grouped))
    with torch.no_grad():
        new = weights(grouped)[replaced].dequantize() * -3
        if by != "values":
            other = Quantizer(parse("e4m3/128x128/fp32"))
            new = quantize(new, weights(grouped)[replaced].quantizer if by == "codes" else other)
    own: Any = grouped.get_submodule(str(replaced))
    own.weight, linears[replaced].weight = nn.Parameter(new), nn.Parameter(new.clone())
    assert not grouped._joined.holds(weights(grouped))
    assert_step_alike(grouped, linears, (7, 4, 23))


@each_twice
@pytest.mark.parametrize("rows", [24, 130, 1, 32])
@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "rowwise"])
def test_what_dgrad_reads_on_a_gpu(recipe: str, rows: int) -> None:
    """Codes in the very memory order that a cast for its products gives, where those were stored row by row."""
    with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        grouped = GroupedLinear(3, K, rows, recipe=recipe)
    assert grouped._joined is not None
    found: Any = grouped._joined.whole.along(COLUMNWISE)
    quantizer = grouped._config(grouped.recipe).weight  # type: ignore[arg-type]
    values = torch.cat([own.get_high_precision_init_val() for own in weights(grouped)])
    scales = grouped.forward_scaling.scale[3:6] if recipe == "delayed" else None
    made: Any = casts([quantizer], "cuda").of_groups(values, found.offsets, scales).along(COLUMNWISE)
    turned = with_rows_consecutive(found)
    assert (turned.dim, turned.codes.stride()) == (made.dim, made.codes.stride()) == (COLUMNWISE, (1, len(made.codes)))
    assert torch.equal(turned.codes, made.codes) and turned.scale_inv.shape == made.scale_inv.shape  # type: ignore[union-attr]
    assert torch.equal(turned.dequantize(), found.dequantize())


def test_writes_between_forward_and_backward_are_noticed() -> None:
    """To any expert; the values before the first cast of the others stay."""
    grouped, _ = layers("current", preserve=True)
    first, _, last = weights(grouped)
    y = grouped(torch.randn(30, K, requires_grad=True).to(BF16), COUNTS)
    with torch.no_grad():
        last.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert last.get_high_precision_init_val() is None and first.get_high_precision_init_val() is not None


# ---- in models ------------------------------------------------------------------------------------------------------


def trained(model: nn.Module) -> list[Tensor]:
    """Outputs of three steps of ``MasterWeights``."""
    optimizer, found = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.5), []
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        y = model(torch.randn(11, 2, 32, generator=generator))
        y.square().mean().backward()
        found.append(y.detach())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_models(recipe: str) -> None:
    """``MoE`` and ``TransformerLayer``, made so, or converted; ``revert`` gives their values back."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        return nn.Sequential(
            TransformerLayer(32, 48, 2, moe={"num_experts": 3, "top_k": 2}, recipe=recipe, **dropout),  # type: ignore[arg-type]
            MoE(32, 48, 4, 2, recipe=recipe, shared_ffn_hidden_size=16),
        )

    with quantized_model_init(recipe=recipe):
        model = made()
    converted = made()
    report = convert(converted, recipe, quantize_weights=True)
    assert not report.warnings
    experts = [own for each in model.modules() if isinstance(each, GroupedLinear) for own in weights(each)]
    assert len(experts) == 14 and all(isinstance(own, QuantizedTensor) for own in experts)
    assert all(map(torch.equal, trained(model), trained(converted)))
    revert(converted)
    assert not any(isinstance(parameter, QuantizedTensor) for parameter in converted.parameters())
    assert not all(map(torch.equal, trained(made()), trained(model)))


@pytest.mark.parametrize("bias", [False, True])
def test_one_parameter_of_all_experts_is_kept_as_one_each(bias: bool) -> None:
    """Quantized as separate ones are; where weights stay in high precision it is one."""
    made = []
    for single in (False, True):
        torch.manual_seed(0)
        with quantized_model_init(recipe="mxfp8"):
            made.append(GroupedLinear(3, K, N, bias, recipe="mxfp8", single_grouped_weight=single))
    separate, single = made
    assert {name: p.shape for name, p in single.named_parameters()} == {
        name: p.shape for name, p in separate.named_parameters()
    }
    assert all(isinstance(weight, QuantizedTensor) for weight in weights(single))
    for mine, theirs in zip(weights(single), weights(separate), strict=True):
        assert all(map(torch.equal, mine._buffers().values(), theirs._buffers().values()))
    values = torch.randn(3, N, K)
    for layer in made:
        layer.load_state_dict({"weight": values}, strict=False)
    x = torch.randn(9, K)
    assert torch.equal(single(x, [4, 0, 5]), separate(x, [4, 0, 5]))
    with quantized_model_init(recipe="current"):
        kept = GroupedLinear(2, K, N, single_grouped_weight=True, recipe="none")
    assert kept.get_parameter("weight").shape == (2, N, K) and kept.single_grouped_weight


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "mxfp8", "rowwise", "mxfp4", "mxfp6", "nvfp4"])
def test_gpu_computes_what_linears_do(recipe: str) -> None:
    """By other kernels, hence within the order of sums; the number of launches does not depend on that of experts."""
    from minifloat.ops.launch import count_launches  # which needs Triton

    counted = []
    for experts in (2, 20):
        counts = [7, 0, *[23] * (experts - 2)]
        with quantized_model_init(recipe=RECIPES[recipe]):
            torch.manual_seed(0)
            grouped = GroupedLinear(experts, 96, 64, recipe=RECIPES[recipe], dtype=BF16, device="cuda", bias=False)
            torch.manual_seed(0)
            linears = [Linear(96, 64, recipe=RECIPES[recipe], dtype=BF16, device="cuda", bias=False) for _ in counts]
        assert_same_codes(grouped, linears)
        x, dy = (torch.randn(sum(counts), size, device="cuda").to(BF16) for size in (96, 64))
        x.requires_grad_()
        own = x.detach().clone().requires_grad_()
        with count_launches() as launches:
            y = grouped(x, torch.tensor(counts, device="cuda"))
            y.backward(dy)
        counted.append(dict(launches))
        expected = torch.cat([each(part) for each, part in zip(linears, own.split(counts), strict=True)])
        expected.backward(dy)
        pairs = [(y, expected), (x.grad, own.grad)]
        pairs += [(mine.grad, linear.weight.grad) for mine, linear in zip(weights(grouped), linears, strict=True)]
        for mine, theirs in pairs:
            assert mine is not None and theirs is not None
            torch.testing.assert_close(mine, theirs, rtol=0.01, atol=0.01 * float(theirs.abs().max()))
    assert counted[0] == counted[1]
