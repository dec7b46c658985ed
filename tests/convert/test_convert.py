"""``convert`` and ``revert``: who is converted, that nothing else changes, and that it can be undone."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune
from torch.testing._internal.two_tensor import TwoTensor

import minifloat
from minifloat import Linear, QuantizerRole
from minifloat.convert import ConversionReport, DefaultFilter, convert, revert
from minifloat.delayed import AmaxHistory
from minifloat.functional import count_gemms
from minifloat.recipe import CustomRecipe, DelayedScaling, MXFP8BlockScaling, named
from tests.helpers.convert_model import IDS, INSIDE, Block, Model, assert_same_step, everything, small_too, step
from tests.helpers.sample import first_by_default

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPES = ["delayed", "current", "block", "mxfp8", "nvfp4", "rowwise", "mxfp4", "mxfp6"]


def converted(report: ConversionReport) -> list[str]:
    return [", ".join(layer.names) for layer in report.converted]


def reasons(report: ConversionReport) -> dict[str, str]:
    return {", ".join(layer.names): layer.reason for layer in report.left_alone}


# ---- What a conversion is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_a_hand_built_model(recipe: str) -> None:
    model = Model()
    hand = Model(Linear)
    hand.load_state_dict(model.state_dict())
    for module in hand.modules():
        if isinstance(module, Linear):
            module.recipe = named(recipe)
    report = small_too(model, recipe)
    assert converted(report) == INSIDE
    for _ in range(2):  # twice: delayed scaling has a state
        assert_same_step(model, hand)


@pytest.mark.parametrize("recipe", RECIPES)
def test_everything_keeps_its_identity(recipe: str) -> None:
    model = Model()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    model.eval()
    before = list(model.named_modules()), list(model.named_parameters()), list(model.state_dict())
    small_too(model, recipe)
    modules = [(n, m) for n, m in model.named_modules() if not isinstance(m, AmaxHistory)]
    for (name, old), (found, new) in zip(before[0], modules, strict=True):
        assert name == found and old is new and not new.training
    for (name, old), (found, new) in zip(before[1], model.named_parameters(), strict=True):
        assert name == found and old is new and new.requires_grad == ("blocks.0" not in name)
    extra = {key.rsplit(".", 2)[1] for key in model.state_dict() if key not in before[2]}
    assert extra == ({"forward_scaling", "backward_scaling"} if recipe == "delayed" else set())
    assert all(isinstance(model.get_submodule(name), Linear) for name in INSIDE)


@pytest.mark.parametrize("recipe", RECIPES)
def test_revert_is_exact(recipe: str) -> None:
    model = Model()
    model.blocks[0].gate.name, model.blocks[0].gate.mark = "mine", "kept"
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    small_too(model, recipe)
    assert model.blocks[0].gate.name == "blocks.0.gate"
    for _ in range(2):
        step(model)
    model.blocks[0].up.added_later = 1
    revert(model)
    assert list(model.state_dict()) == keys
    found = {name: set(vars(module)) for name, module in model.named_modules()}
    attributes["blocks.0.up"].add("added_later")
    assert found == attributes
    assert all(type(model.get_submodule(name)) is nn.Linear for name in INSIDE)
    assert (model.blocks[0].gate.name, model.blocks[0].gate.mark) == ("mine", "kept")
    twin = Model()
    twin.load_state_dict(model.state_dict())
    assert_same_step(model, twin)
    revert(model)  # nothing left to undo
    assert_same_step(model, twin)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies(copied: Callable[[nn.Module], nn.Module], recipe: str) -> None:
    """A copy of a converted model is converted, computes the same and can be reverted by itself."""
    model = Model()
    small_too(model, recipe)
    step(model)
    twin = copied(model)
    assert_same_step(twin, model)
    revert(twin)
    assert type(twin.blocks[0].gate) is nn.Linear and type(model.blocks[0].gate) is Linear
    assert set(twin.state_dict()) < set(model.state_dict()) or recipe != "delayed"
    revert(model)
    assert_same_step(twin, model)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_state_dicts_go_both_ways(recipe: str) -> None:
    """A checkpoint of a converted model loads into a plain one and the other way, delayed scaling's state included."""
    model, plain, other = Model(), Model(), Model()
    small_too(model, recipe)
    step(model)
    own = {key: value for key, value in model.state_dict().items() if "_scaling." not in key}
    plain.load_state_dict(own)
    small_too(other, recipe)
    other.load_state_dict(model.state_dict())
    assert_same_step(other, model)
    other.load_state_dict(plain.state_dict())  # without histories
    revert(other)
    assert_same_step(other, plain)


def test_delayed_scaling_is_ready() -> None:
    """Histories exist before the first step, on the device of the weight, and to_empty and a reset give them values."""
    with torch.device("meta"):
        model = Model()
    report = small_too(model, DelayedScaling(amax_history_len=3))
    assert converted(report) == INSIDE and 0 < report.fraction < 1
    state = model.blocks[1].down.forward_scaling
    assert state.scale.is_meta and state.amax_history.shape == (3, 3)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding)):
            module.reset_parameters()
    y, grads = step(model)
    assert y.isfinite().all() and all(grad is not None and grad.isfinite().all() for grad in grads)


# ---- Recipes --------------------------------------------------------------------------------------------------------


def test_autocast_gives_the_recipe() -> None:
    """Converted without a recipe, layers take that of autocast, and compute as ever outside."""
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    report = small_too(model, None)
    assert all(layer.recipe is None for layer in report.converted) and "the recipe of autocast" in str(report)
    assert_same_step(model, plain)
    twin = copy.deepcopy(model)
    small_too(twin, "mxfp8")
    with minifloat.autocast(recipe="mxfp8"):
        assert_same_step(model, twin)


def test_head_stays_in_bf16_inside_autocast() -> None:
    """A rule keeps the head in bf16 inside of autocast: nn.Linear is left alone, a Linear gets recipe "none"."""
    for head in (nn.Linear, Linear):
        model = Model().bfloat16()
        model.head = head(32, 40, bias=False, dtype=torch.bfloat16)
        convert(model, None, everything, rules=[("head", "none")])
        seen: list[Tensor] = []
        model.head.register_forward_hook(lambda module, args, y, seen=seen: seen.extend((args[0], y)))
        with minifloat.autocast(recipe="current"), count_gemms() as gemms:
            F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()).backward()
        x, y = seen
        assert y.dtype == torch.bfloat16 and torch.equal(y, F.linear(x, model.head.weight))
        quantized = Counter(gemm.gemm for gemm in gemms.elements() if "identity" not in (gemm.a, gemm.b))
        assert quantized == {"fprop": 15, "dgrad": 15, "wgrad": 15}
        identity = [gemm.gemm for gemm in gemms.elements() if gemm.a == gemm.b == "identity"]
        assert identity == ["fprop"] * (head is Linear)


def test_warns_where_nothing_was_converted() -> None:
    """With the reasons why; not where nothing was asked for."""
    model = Model()
    expected = r"nothing was converted: 14 of 16 linears: a side below 256.*; 2 of 16 linears: rule '\*\.up'; filter_fn"
    with pytest.warns(UserWarning, match=expected):
        report = convert(model, "mxfp8", rules=[("*.up", "none")])
    assert "converted 0 of 16" in str(report)
    with pytest.warns(UserWarning, match="the model has no linears"):
        convert(nn.ReLU(), None)
    with pytest.warns(UserWarning, match=r"16 of 16 linears: filter_fn"):
        convert(model, "none", lambda module, name: False, rules=[("nowhere", "current")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not convert(model, "none").warnings
        small_too(model, "current")


# ---- Rules and filters ----------------------------------------------------------------------------------------------


def test_rules_win_in_their_order() -> None:
    model = Model()
    own = MXFP8BlockScaling(enable_2d_quantization=True)
    rules = [
        ("*.0.down", "none"), ("*.down", own), ("head", "block"), ("blocks.[0]*.q", None), ("blocks.0.down", "delayed")
    ]  # fmt: skip
    report = convert(model, "current", lambda module, name: name.endswith(("q", "project")), rules)
    found = {layer.names[0]: layer.recipe for layer in report.converted}
    assert found == {
        "project": named("current"), "blocks.0.attention.q": None, "blocks.1.attention.q": named("current"),
        "blocks.1.down": own, "head": named("block"),
    }  # fmt: skip
    assert {name: model.get_submodule(name).recipe for name in found} == found
    left = reasons(report)
    assert left["blocks.0.down"] == "rule '*.0.down'" and left["blocks.1.gate"] == "filter_fn"
    assert report.warnings == ("rule 'blocks.0.down' decides nothing: earlier rules match all of its linears",)


def test_rules_that_match_nothing() -> None:
    """A pattern that no linear has is named in a line of its own; patterns are case-sensitive."""
    report = small_too(Model(), rules=[("lm_head", "none"), ("HEAD", "none"), ("tokens", "none"), ("*", "mxfp8")])
    for pattern, line in zip(("lm_head", "HEAD", "tokens"), str(report).splitlines()[-3:], strict=True):
        assert line == f"warning: rule '{pattern}' decides nothing: there are no such linears"


def test_only_what_rules_say() -> None:
    model = Model()
    report = convert(model, "none", rules=[("*.o", "nvfp4")])
    assert converted(report) == ["blocks.0.attention.o", "blocks.1.attention.o"]
    left = reasons(convert(model, "none", everything))
    assert set(left.values()) == {'recipe="none"'} and len(left) == 16


def test_filter_sees_modules_and_names() -> None:
    """filter_fn is called once for each linear, with the module and its name, before anything is converted."""
    model, seen = Model(), []

    def wanted(module: nn.Module, name: str) -> bool:
        assert model.get_submodule(name) is module and not any(isinstance(m, Linear) for m in model.modules())
        seen.append(name)
        return False

    report = convert(model, "current", wanted)
    assert seen == ["project", *INSIDE, "head"] and not report.converted and report.fraction == 0


@pytest.mark.parametrize("own", [False, True])
def test_converting_again_keeps_histories_of_equal_recipes(own: bool) -> None:
    """A layer that gets the recipe it had goes on with its scales; one that gets another starts as new."""
    model = nn.Sequential(*(Linear(32, 32, recipe="mxfp8") if own else nn.Linear(32, 32) for _ in range(3)))
    delayed = DelayedScaling(amax_history_len=4)

    def again(first: Any) -> None:
        convert(model, DelayedScaling(amax_history_len=4), everything, [("0", first)])

    convert(model, delayed, everything)
    for number in range(3):
        model(torch.randn(8, 32) * 3**number).sum().backward()
    trained = {key: value.clone() for key, value in model.state_dict().items()}
    scaling = [layer.forward_scaling for layer in model]
    again(DelayedScaling(amax_history_len=8))
    assert model[0].forward_scaling is not scaling[0] and model[0].forward_scaling.scale.eq(1).all()
    assert model[1].forward_scaling is scaling[1] and model[2].forward_scaling is scaling[2]
    now = model.state_dict()
    assert all(torch.equal(now[key], value) for key, value in trained.items() if not key.startswith("0."))
    twin = copy.deepcopy(model)
    again(DelayedScaling(amax_history_len=8))
    x = torch.randn(8, 32)
    assert torch.equal(model(x), twin(x))
    convert(model, "current", everything)
    assert not any(isinstance(module, AmaxHistory) for module in model.modules())
    convert(model, delayed, everything)
    assert all(layer.forward_scaling.scale.eq(1).all() for layer in model)
    revert(model)
    assert not any(isinstance(module, AmaxHistory) for module in model.modules())


def test_histories_under_autocast_outlast_a_second_conversion() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    convert(model, None, everything)
    with minifloat.autocast(recipe=DelayedScaling(amax_history_len=4)):
        model(torch.randn(8, 32)).sum().backward()
    kept = model[0].forward_scaling
    convert(model, None, everything)
    assert model[0].forward_scaling is kept
    revert(model)
    assert list(model[0].children()) == []


# ---- The default rule -----------------------------------------------------------------------------------------------


def test_ends_outside_of_the_blocks() -> None:
    """All that stands before the first block or after the last is left alone; what is between two stacks is not."""
    model = nn.Module()
    model.embed = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
    model.encoder = nn.ModuleDict({"a": Block(16, nn.Linear), "b": Block(16, nn.Linear)})
    model.bridge = nn.Linear(16, 16)
    model.decoder = nn.ModuleList([checkpoint_wrapper(Block(16, nn.Linear)) for _ in range(2)])
    model.heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 5)])
    report = small_too(model)
    assert reasons(report) == {
        "embed.0": "before the first block of the model", "embed.2": "before the first block of the model",
        "heads.0": "after the last block of the model", "heads.1": "after the last block of the model",
    }  # fmt: skip
    assert "bridge" in converted(report) and "decoder.1.down" in converted(report) and len(report.converted) == 29


ONE_BLOCK: dict[str, Callable[[nn.Module], nn.Module]] = {
    "list": lambda block: nn.ModuleList([block]),
    "sequential": nn.Sequential,
    "dict": lambda block: nn.ModuleDict({"block": block}),
}


@pytest.mark.parametrize("container", ONE_BLOCK)
def test_one_block_is_no_stack(container: str) -> None:
    """A head of one block after the stack is left alone, and so is a stem of one before it."""
    model, contain = nn.Module(), ONE_BLOCK[container]
    model.stem = contain(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)))
    model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16)) for _ in range(2)])
    model.head = contain(nn.ModuleList([nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]))
    report = small_too(model)
    assert converted(report) == ["blocks.0.0", "blocks.1.0"]
    before, after = "before the first block of the model", "after the last block of the model"
    assert [layer.reason for layer in report.left_alone] == [before, before, after, after]


def test_ends_without_blocks() -> None:
    """Without a stack of blocks, the first and the last linear are left alone, in a plain Sequential too."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    report = small_too(model)
    assert converted(report) == ["2"]
    assert reasons(report) == {"0": "the model's first linear", "4": "the model's last linear"}
    assert reasons(small_too(nn.Linear(8, 8))) == {"": "the model's first linear"}
    assert "(the model itself)  8 x 8  the model's first linear" in str(small_too(nn.Linear(8, 8)))
    assert converted(small_too(nn.ReLU())) == []


def test_small_ones() -> None:
    """min(in_features, out_features) below the limit is left alone, 256 unless told."""
    model = nn.Sequential(
        *(nn.Linear(k, n, device="meta") for k, n in [(256,) * 2, (256, 256), (255, 999), (256,) * 2])
    )
    report = convert(model, "current")
    assert converted(report) == ["1"] and reasons(report)["2"] == "a side below 256 is too small to gain"
    assert converted(convert(model, "current", DefaultFilter(model, smallest=255))) == ["1", "2"]


def test_tied_weights() -> None:
    """A head that is tied to an embedding is left alone, wherever it is; a rule may convert it, and it stays tied."""
    model = Model(tied=True)
    report = small_too(model)
    assert reasons(report)["head"] == "its weight is also that of tokens (Embedding)"
    everything_too = small_too(model, rules=[("*", "current")])
    assert converted(everything_too) == ["project", *INSIDE, "head"]
    assert model.head.weight is model.tokens.weight
    bare = sum(p.numel() for p in model.parameters()) - sum(
        p.numel() for b in model.blocks for p in b.norm1.parameters()
    )
    others = sum(p.numel() for b in model.blocks for p in b.norm2.parameters())
    assert everything_too.fraction == (bare - others) / sum(p.numel() for p in model.parameters())
    assert step(model)[0].isfinite().all()


def test_default_filter_as_a_part() -> None:
    model = Model()
    default = DefaultFilter(model, smallest=1)
    report = convert(model, "current", lambda module, name: default(module, name) and "blocks.0" not in name)
    assert converted(report) == [name for name in INSIDE if "blocks.1" in name]


# ---- What cannot be converted ---------------------------------------------------------------------------------------


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnReset(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def replaced() -> nn.Linear:
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: F.linear(x, layer.weight)  # type: ignore[method-assign]
    return layer


def two_tensors() -> nn.Linear:
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(TwoTensor(torch.zeros(8, 8), torch.zeros(8, 8)))
    return layer


CANNOT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own forward": (
        lambda: OwnForward(8, 8), "OwnForward is a subclass of nn.Linear and may have a forward of its own"
    ),
    "subclass": (lambda: OwnReset(8, 8), "OwnReset is a subclass of nn.Linear and may have behaviour of its own"),
    "lazy": (lambda: nn.LazyLinear(8), "it has no weight yet; run a forward first"),
    "parametrized": (
        lambda: parametrizations.weight_norm(nn.Linear(8, 8)), "its weight is computed by torch.nn.utils.parametrize"
    ),
    "pruned": (
        lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5),
        "its weight is not a parameter: something computes it before each forward",
    ),
    "replaced": (
        replaced, "its forward was replaced on the object; convert the model before whatever did that"
    ),
    "float64": (
        lambda: nn.Linear(8, 8, dtype=torch.float64),
        "its weight is torch.float64; only bf16, fp16 and fp32 can be quantized",
    ),
    "subclass of Tensor": (two_tensors, "its weight is a TwoTensor, which keeps its values in a way of its own"),
}  # fmt: skip


@pytest.mark.parametrize("case", CANNOT)
def test_layers_that_stay(case: str) -> None:
    """Linears that may compute something else are left alone, even where a rule names them, and work as before."""
    make, reason = CANNOT[case]
    model = nn.ModuleDict({"odd": make(), "plain": nn.Linear(8, 8)})
    kind, attributes = type(model["odd"]), set(vars(model["odd"]))
    report = convert(model, "current", everything, rules=[("odd", "mxfp8")])
    assert converted(report) == ["plain"] and reasons(report)["odd"] == reason and not report.warnings
    assert type(model["odd"]) is kind and set(vars(model["odd"])) == attributes


def test_modules_that_read_weights_of_others() -> None:
    """nn.MultiheadAttention keeps its projections, and the fast path of PyTorch's encoder layer is warned of."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    report = convert(layer, "current", everything)
    assert converted(report) == ["linear1", "linear2"]
    left = reasons(report)
    assert left["self_attn.out_proj"] == "nn.MultiheadAttention reads its weight and does not call it"
    assert left["self_attn"] == "not a linear; holds in_proj_weight [48, 16]"
    assert len(report.warnings) == 1 and "set_fastpath_enabled(False)" in report.warnings[0]
    layer.eval()
    x, counted = torch.randn(2, 8, 16), []
    enabled = torch.backends.mha.get_fastpath_enabled()
    for fast in (True, False):
        torch.backends.mha.set_fastpath_enabled(fast)
        with count_gemms() as gemms, torch.no_grad():
            layer(x)
        counted.append(gemms.total())
    torch.backends.mha.set_fastpath_enabled(enabled)
    assert counted == [0, 2]
    assert not convert(nn.MultiheadAttention(16, 2), "current", everything).warnings


def test_other_matrices_are_named() -> None:
    """Parameters of two or more dims that are in no linear are in the report, with their shapes; embeddings are not."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(4, 8, 6))
            self.gain = nn.Parameter(torch.ones(8))

    model = nn.ModuleDict(
        {
            "experts": Experts(), "conv": nn.Conv1d(3, 4, 5), "pair": nn.Bilinear(2, 3, 4), "table": nn.Embedding(5, 6),
            "norm": nn.LayerNorm(8), "normed": parametrizations.weight_norm(nn.Linear(8, 8)), "lstm": nn.LSTM(2, 1),
        }
    )  # fmt: skip
    report = convert(model, "current", everything)
    left = reasons(report)
    assert left.pop("normed") == CANNOT["parametrized"][1]
    assert left == {
        "experts": "not a linear; holds up [4, 8, 6]", "conv": "not a linear; holds weight [4, 3, 5]",
        "pair": "not a linear; holds weight [4, 2, 3]",
        "lstm": "not a linear; holds weight_ih_l0 [4, 2], weight_hh_l0 [4, 1]",
    }  # fmt: skip
    assert [layer.kind for layer in report.left_alone] == [
        "ParametrizedLinear",
        "Experts",
        "Conv1d",
        "Bilinear",
        "LSTM",
    ]


# ---- Linears of the model's own -------------------------------------------------------------------------------------


def own_layers() -> nn.ModuleDict:
    recipes = {"plain": None, "current": "current", "delayed": DelayedScaling(amax_history_len=4), "none": "none"}
    return nn.ModuleDict({name: Linear(8, 8, recipe=recipe) for name, recipe in recipes.items()})


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_own_linears_get_the_recipe(recipe: str) -> None:
    """A Linear of the model's own gets the recipe, however small, unless its own is "none"; revert gives it back."""
    model = own_layers()
    twin, x = copy.deepcopy(model), torch.randn(4, 8)
    keys = list(model.state_dict())
    report = convert(model, recipe)
    assert converted(report) == ["plain", "current", "delayed"]
    assert all(model[name].recipe == named(recipe) for name in converted(report))
    assert reasons(report) == {"none": "a minifloat.Linear with recipe='none'"}
    for layer in model.values():
        layer(x)
    if recipe == "delayed":
        model["delayed"].load_state_dict(twin["delayed"].state_dict())
    revert(model)
    assert list(model.state_dict()) == keys
    for context in (minifloat.autocast(recipe=DelayedScaling(amax_history_len=4)), minifloat.autocast(enabled=False)):
        for name in model:
            with context:
                assert torch.equal(model[name](x), twin[name](x))
            assert repr(model[name]) == repr(twin[name])


def test_own_linears_and_rules() -> None:
    """Rules decide over a Linear of the model's own too, "none" included; filters may pass over it."""
    model = own_layers()
    report = convert(model, None, rules=[("current", "none"), ("none", "mxfp8")])
    assert [model[name].recipe for name in model] == [None, "none", DelayedScaling(amax_history_len=4), named("mxfp8")]
    assert converted(report) == ["none"]
    assert reasons(report)["plain"] == "a minifloat.Linear with recipe=None"
    report = convert(model, "nvfp4", lambda module, name: name == "none")
    assert [model[name].recipe for name in model] == [
        None, named("current"), DelayedScaling(amax_history_len=4), named("nvfp4")
    ]  # fmt: skip
    revert(model)
    assert [model[name].recipe for name in model] == [
        None, named("current"), DelayedScaling(amax_history_len=4), "none"
    ]  # fmt: skip


def test_split_parameters_of_an_own_linear() -> None:
    layer = Linear(8, 12, parameters_split={"q": 8, "k": 4})
    report = convert(nn.ModuleDict({"qk": layer}), "current")
    assert report.converted[0].shape == (12, 8) and report.fraction == 1
    assert layer.recipe == named("current") and layer(torch.randn(2, 8)).shape == (2, 12)


# ---- Sharing, wrappers, nesting -------------------------------------------------------------------------------------


def test_shared_modules() -> None:
    """A module under two names is converted once, has both names in the report, and rules may use either."""
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleDict({"c": shared}), "d": nn.Linear(8, 8)})
    report = convert(model, "current", everything, rules=[("b.*", "mxfp8")])
    assert converted(report) == ["a, b.c", "d"] and shared.recipe == named("mxfp8")
    assert model["a"] is shared and model["b"]["c"] is shared and "a, b.c" in str(report)
    revert(model)
    assert type(shared) is nn.Linear


def test_linears_with_one_weight() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    report = convert(model, "current", everything)
    assert first.weight is second.weight and report.fraction == 1
    hand = nn.Sequential(Linear(8, 8, bias=False, recipe="current"), Linear(8, 8, bias=False, recipe="current"))
    hand[0].weight = hand[1].weight = nn.Parameter(first.weight.detach().clone())
    x = torch.randn(4, 8)
    for each in (model, hand):
        each(x).sum().backward()
    assert torch.equal(first.weight.grad, hand[0].weight.grad)


def test_wrapped_models() -> None:
    """Rules and reports use names without what torch.compile and activation checkpointing put between."""
    inner = nn.ModuleDict({"x": checkpoint_wrapper(nn.Linear(8, 8)), "y": torch.compile(nn.Linear(8, 8))})
    model = torch.compile(inner)
    report = convert(model, "current", everything, rules=[("y", "mxfp8")])
    assert {layer.names[0]: layer.recipe for layer in report.converted} == {
        "x": named("current"), "y": named("mxfp8")
    }  # fmt: skip
    revert(inner)
    assert not any(isinstance(module, Linear) for module in model.modules())


@first_by_default
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_before(in_place: bool) -> None:
    """A model that was compiled, and has run, runs what it was converted to, and what it was reverted to."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    compiled = torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
        compiled = model
    x, counted, results = torch.randn(4, 8), [], []
    for change in (lambda m: None, lambda m: convert(m, "current", everything), revert):
        change(compiled)
        with count_gemms() as gemms:
            results.append(compiled(x))
        counted.append(sum(n for gemm, n in gemms.items() if gemm.a != "identity"))
    assert counted == [0, 2, 0] and torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])


def test_class_changed_by_somebody_else() -> None:
    """A class that was changed after convert is not overwritten: revert says what to undo, and changes nothing."""
    model = Model()
    small_too(model)
    parametrizations.weight_norm(model.blocks[1].up)
    with pytest.raises(ValueError, match=r"'blocks.1.up' was made a Linear and is a ParametrizedLinear now; undo"):
        revert(model)
    assert type(model.blocks[0].gate) is Linear
    torch.nn.utils.parametrize.remove_parametrizations(model.blocks[1].up, "weight")
    revert(model)
    assert type(model.blocks[1].up) is nn.Linear


# ---- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "rules", "error", "message"),
    [
        ("fp9", (), ValueError, "no recipe is called 'fp9'"),
        (3, (), TypeError, "convert: recipe is 3; a minifloat recipe"),
        ("current", [("*", "fp9")], ValueError, r"rules: '\*': no recipe is called 'fp9'.*\"none\" keeps"),
        ("current", [("*", 3)], TypeError, r"rules: '\*': recipe must be"),
        ("current", ("head", "none"), TypeError, "rules: 'head' is not a pair"),
        ("current", [("head",)], TypeError, "is not a pair"),
        ("current", [(3, "none")], TypeError, "is not a pair"),
        ("current", [None], TypeError, "rules: None is not a pair"),
    ],
)  # fmt: skip
def test_bad_arguments_change_nothing(recipe: Any, rules: Any, error: type[Exception], message: str) -> None:
    """Wrong recipes and rules raise before anything is changed, an earlier conversion included."""
    model = Model()
    small_too(model, "mxfp8")
    with pytest.raises(error, match=message):
        convert(model, recipe, everything, rules)
    assert model.blocks[0].gate.recipe == named("mxfp8") and type(model.head) is nn.Linear


def test_factory_that_fails_halfway() -> None:
    seen = set()

    def factory(role: QuantizerRole) -> Any:
        seen.add(role.name)
        return minifloat.Quantizer.identity() if role.name != "blocks.1.up" else None

    model = Model()
    with pytest.raises(ValueError, match=r"qfactory returned None for .*blocks\.1\.up"):
        convert(model, CustomRecipe(factory), DefaultFilter(model, smallest=1))
    assert not any(isinstance(module, Linear) for module in model.modules())
    assert seen == set(INSIDE[:-1])


def test_report_table() -> None:
    """Layers of equal blocks share a line, with their number; the first line says how much is converted."""
    model = nn.ModuleDict({"h": nn.ModuleList([nn.ModuleDict({"fc1": nn.Linear(8, 16)}) for _ in range(3)])})
    model["head"] = nn.Linear(16, 128, bias=False)
    report = small_too(model, "mxfp8", rules=[("h.2.*", "nvfp4")])
    assert str(report).splitlines() == [
        "converted 3 of 4 linear layers, with 17.4 % of the model's parameters",
        "  h.*.fc1  2 times  16 x 8  MXFP8BlockScaling",
        "  h.*.fc1           16 x 8  NVFP4BlockScaling",
        "left alone",
        "  head  128 x 16  after the last block of the model",
    ]
