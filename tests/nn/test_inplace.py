"""In-place operations after every layer and function: exact gradients or an error of autograd, and nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat import CustomRecipe, Float8CurrentScaling, Quantizer
from minifloat.comm.group import Group
from minifloat.functional import sort_by_expert, unpermute
from minifloat.functional.norm_activation import Activation, activate
from minifloat.nn import GroupedMLP
from minifloat.recipe import Recipe
from tests.helpers.distributed_pool import on_ranks
from tests.helpers.sample import first_by_default

UNQUANTIZED = CustomRecipe(lambda role: Quantizer.identity())
HIGH_PRECISION = Float8CurrentScaling(backward_override="high_precision")
MXFP8 = minifloat.MXFP8BlockScaling()

Make = Callable[[], Callable[[Tensor], Any]]


def _residual(module: nn.Module) -> Callable[[Tensor], Any]:
    return lambda x: module(x, residual=2 * x, return_residual=True)[0]


def _core(**options: Any) -> Callable[[Tensor], Any]:
    attention = minifloat.DotProductAttention(4, 16, attn_mask_type="causal", qkv_format="bshd", **options)
    return lambda x: attention(*[x.unflatten(-1, (4, 16)) * i for i in (1, 2, 3)])


def _rope(x: Tensor) -> Tensor:
    angles = minifloat.RotaryPositionEmbedding(16)(x.shape[1])
    return minifloat.apply_rotary_pos_emb(x.unflatten(-1, (4, 16)), angles, "bshd")


def _losses(x: Tensor) -> Tensor:
    return minifloat.cross_entropy(x, torch.arange(15).view(3, 5), reduction="none")


def _fused_loss(x: Tensor) -> Tensor:
    return minifloat.linear_cross_entropy(x, torch.ones(32, 64).tril(), torch.arange(15).view(3, 5))


def _of_recipe(kind: str, recipe: Recipe | str | None) -> Make:
    sizes: dict[str, tuple[int, ...]] = {"LayerNormMLP": (64, 32), "MultiheadAttention": (64, 4)}
    sizes["TransformerLayer"] = (64, 64, 4)
    return lambda: getattr(minifloat, kind)(*sizes.get(kind, (64, 32)), recipe=recipe)


RECIPES = (None, "delayed", "current", "block", "mxfp8", "nvfp4", UNQUANTIZED, HIGH_PRECISION)
LAYERS = ("Linear", "LayerNormLinear", "LayerNormMLP")
CASES: dict[str, Make] = {
    f"{kind} {getattr(recipe, 'backward_override', recipe) if not isinstance(recipe, CustomRecipe) else 'identity'}": (
        _of_recipe(kind, recipe)
    )
    for kind in LAYERS
    for recipe in RECIPES
} | {
    "MultiheadAttention": _of_recipe("MultiheadAttention", "mxfp8"),
    "TransformerLayer": _of_recipe("TransformerLayer", "mxfp8"),
    "LayerNorm": lambda: minifloat.LayerNorm(64),
    "RMSNorm": lambda: minifloat.RMSNorm(64),
    "RMSNorm of two dims": lambda: minifloat.RMSNorm((5, 64)),
    "activation": lambda: lambda x: activate(x, Activation.of("swiglu")),
    "attention with softcap": lambda: _core(softcap=5.0),
    "rope": lambda: _rope,
    "losses": lambda: _losses,
    "linear_cross_entropy": lambda: _fused_loss,
    "kept original input": lambda: minifloat.Linear(64, 32, recipe="mxfp8", save_original_input=True),
    "fp8_output": lambda: lambda x: minifloat.Linear(64, 32, recipe="mxfp8")(x, fp8_output=True).dequantize(),
    "bias apart": lambda: lambda x: minifloat.Linear(64, 32, recipe="mxfp8", return_bias=True)(x)[0],
    "split": lambda: minifloat.Linear(64, 32, recipe="mxfp8", parameters_split={"a": 16, "b": 16}),
    "residual": lambda: _residual(minifloat.LayerNormLinear(64, 32, recipe="mxfp8")),
    "checkpointed": lambda: minifloat.LayerNormMLP(64, 32, recipe="mxfp8", checkpoint=True),
    "recomputed": lambda: minifloat.LayerNormMLP(
        64, 32, recipe="mxfp8", recompute_norm=True, recompute_activation=True
    ),
    "embedding": lambda: lambda x: minifloat.VocabParallelEmbedding(15, 64)(torch.arange(15).view(3, 5)) * x[0, 0, 0],
}


def _gradients(make: Make, in_place: bool, compiled: bool = False) -> list[Tensor]:
    """The gradients of the input and of all parameters, where the output is doubled and added to."""
    torch.manual_seed(0)
    function = make()
    x = torch.randn(3, 5, 64, requires_grad=True)
    addend = torch.ones((), requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        y: Tensor = function(x * 1)
        if in_place:
            y.mul_(2)
            y += addend
            y.relu_()
        else:
            y = (y * 2 + addend).relu()
        return (y * torch.arange(y.numel()).view_as(y)).sum()

    (torch.compile(loss, backend="aot_eager") if compiled else loss)(x).backward()
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    gradients = [each.grad for each in (x, addend, *parameters)]
    assert all(each is not None for each in gradients)
    return gradients


def _assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.isfinite().all()
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("case", CASES)
def test_in_place_after_has_the_gradients_of_out_of_place(case: str) -> None:
    _assert_same(_gradients(CASES[case], True), _gradients(CASES[case], False))


def test_in_place_after_attention_that_keeps_its_output() -> None:
    """As after ``F.scaled_dot_product_attention`` itself."""
    with pytest.raises(RuntimeError, match=r"output 0 of ScaledDotProduct.* version"):
        _gradients(_core, True)


COMPILED = ("Linear mxfp8", "RMSNorm")


@first_by_default
@pytest.mark.parametrize("case", COMPILED)
def test_in_place_after_compiled(case: str) -> None:
    torch._dynamo.reset()
    _assert_same(_gradients(CASES[case], True, compiled=True), _gradients(CASES[case], False))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in COMPILED and "None" not in case])
def test_in_place_after_compiled_more(case: str) -> None:
    torch._dynamo.reset()
    try:
        expected = _gradients(CASES[case], False, compiled=True)
    except torch._dynamo.exc.Unsupported as error:
        pytest.skip(f"does not compile: {str(error).splitlines()[0]}")
    torch._dynamo.reset()
    _assert_same(_gradients(CASES[case], True, compiled=True), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_converted_model_with_in_place_activation(compiled: bool) -> None:
    def run(in_place: bool) -> list[Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(inplace=in_place), nn.Linear(64, 32), nn.ReLU(inplace=in_place)
        )
        assert len(minifloat.convert(model, "current", filter_fn=lambda module, name: True).converted) == 2
        x = torch.randn(16, 64, requires_grad=True)
        run = torch.compile(model, backend="aot_eager") if compiled and in_place else model
        run(x).square().sum().backward()
        return [each.grad for each in (x, *model.parameters()) if each.grad is not None]

    found = run(True)
    assert len(found) == 5
    _assert_same(found, run(False))


# ---- what a function returns and also reads in backward, and what it saved of its input ----


def _outputs(kind: str, recipe: Recipe, change: str | None, in_place: bool, compiled: bool, residual: bool) -> Tensor:
    """The gradient of X, where ``change``, one of the outputs "y", "n", "s" or the input "x", is tripled afterwards."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = getattr(minifloat, kind)(64, 64, recipe=recipe, return_layernorm_output=True)
    x = torch.randn(3, 5, 64, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        held = {"x": x * 1}
        added = 2 * x if residual else None
        held |= zip("yns", module(held["x"], residual=added, return_residual=True), strict=True)
        if change is not None and in_place:
            held[change].mul_(3)
        elif change is not None:
            held[change] = held[change] * 3
        return sum(((each * torch.arange(64)).sum() for each in held.values()), torch.zeros(()))

    (torch.compile(loss, backend="aot_eager") if compiled else loss)(x).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("recipe", [MXFP8, UNQUANTIZED, HIGH_PRECISION], ids=["mxfp8", "identity", "high_precision"])
@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
def test_what_backward_reads_is_never_changed_silently(kind: str, recipe: Recipe) -> None:
    reads_n = recipe is not MXFP8
    for change in "yns":
        if change == "s" or (change == "n" and reads_n):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                _outputs(kind, recipe, change, True, False, True)
        else:
            expected = _outputs(kind, recipe, change, False, False, True)
            assert torch.equal(_outputs(kind, recipe, change, True, False, True), expected)
    for change in "xs":  # without a residual S is X itself
        with pytest.raises(RuntimeError, match="modified inplace"):
            _outputs(kind, recipe, change, True, False, False)


@first_by_default
@pytest.mark.parametrize("change", ["n", "s"])
def test_compiled_backward_reads_what_forward_saw(change: str) -> None:
    """PyTorch checks no versions there: in-place changes of what was saved gave other gradients without a word."""
    expected = _outputs("LayerNormLinear", HIGH_PRECISION, change, False, False, True)
    assert torch.equal(_outputs("LayerNormLinear", HIGH_PRECISION, change, True, True, True), expected)


ROUTING = sort_by_expert(torch.arange(15).view(5, 3) % 4, 4)


def _act(h: Tensor, probabilities: Tensor) -> Tensor:
    return activate(h, Activation.of("swiglu"), probabilities, ROUTING.offsets)


class _Experts(nn.Module):
    """Of rows, or of twice as much and of the rows' probabilities, which are in the first of them."""

    def __init__(self, experts: nn.Module, of_probabilities: bool) -> None:
        super().__init__()
        self.experts, self.of_probabilities = experts, of_probabilities

    def forward(self, h: Tensor) -> Tensor:
        if self.of_probabilities:
            return self.experts((2 * h).flatten(0, 1), ROUTING.counts, probabilities=h.flatten()[:15])
        return self.experts(h.flatten(0, 1), ROUTING.counts)


OF_INPUTS: dict[str, Make] = {
    "norm": lambda: minifloat.RMSNorm(64),
    **{case: CASES[case] for case in ("activation", "losses", "kept original input")},
    "rows of experts": lambda: lambda h: unpermute(h.flatten(0, 1), ROUTING, torch.ones(5, 3, requires_grad=True)),
    "their probabilities": lambda: lambda p: unpermute(2 * p.flatten(0, 1), ROUTING, p[..., 0].t()),
    "experts' activation": lambda: lambda h: _act(h.flatten(0, 1), torch.arange(15.0)),
    "its probabilities": lambda: lambda p: _act(2 * p.flatten(0, 1), p.flatten()[:15]),
    "experts in high precision": lambda: _Experts(minifloat.GroupedLinear(4, 64, 32, recipe=HIGH_PRECISION), False),
    "probabilities of an MLP": lambda: _Experts(GroupedMLP(4, 64, 32, bias=False, recipe="mxfp8"), True),
}


@pytest.mark.parametrize("case", OF_INPUTS)
def test_input_changed_after_a_function(case: str) -> None:
    make = OF_INPUTS[case]

    def gradients(in_place: bool, compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        function = make()
        x = torch.randn(3, 5, 64, requires_grad=True)

        def loss(x: Tensor) -> Tensor:
            h = x * 1
            y = function(h)
            if in_place:
                h.mul_(3)
            else:
                h = h * 3
            return (y * y).sum() + h.sum()

        (torch.compile(loss, backend="aot_eager") if compiled else loss)(x).backward()
        return [each.grad for each in (x, *(function.parameters() if isinstance(function, nn.Module) else ()))]

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(True, False)
    _assert_same(gradients(True, True), gradients(False, False))


class _Marked(torch.autograd.Function):
    """The identity, whose node holds an object."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: object) -> Tensor:
        ctx.mark = mark
        return x.clone()


class _Mark:
    pass


@pytest.mark.parametrize("recipe", [MXFP8, UNQUANTIZED, HIGH_PRECISION], ids=["mxfp8", "identity", "high_precision"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_graph_is_freed_without_a_backward(kind: str, recipe: Recipe) -> None:
    fused = kind != "Linear"
    module = getattr(minifloat, kind)(64, 64, recipe=recipe, **({"return_layernorm_output": True} if fused else {}))
    for residual in (False, True):
        mark = _Mark()
        alive = weakref.ref(mark)
        x: Any = _Marked.apply(torch.randn(3, 5, 64, requires_grad=True), mark)  # type: ignore[no-untyped-call]
        options = {"residual": 2 * x if residual else None, "return_residual": True} if fused else {}
        outputs = module(x, **options)
        del outputs, x, options, mark
        assert alive() is None


# ---- over ranks ----


@pytest.mark.parametrize("kind", ["column", "row", "mlp", "embedding", "sequence", "losses"])
@on_ranks(2)
def test_in_place_after_parallel_layers(rank: int, size: int, kind: str) -> None:
    group = torch.distributed.group.WORLD
    assert group is not None
    options: dict[str, Any] = {"tp_group": group, "tp_size": size}
    tokens = torch.arange(12).view(4, 3) % 7
    modules: dict[str, Callable[[], nn.Module]] = {
        "column": lambda: minifloat.Linear(64, 32, recipe="mxfp8", parallel_mode="column", **options),
        "row": lambda: minifloat.Linear(64 * size, 32, recipe="mxfp8", parallel_mode="row", **options),
        "mlp": lambda: minifloat.LayerNormMLP(
            64, 64, recipe="mxfp8", set_parallel_mode=True, sequence_parallel=True, **options
        ),
        "embedding": lambda: minifloat.VocabParallelEmbedding(7, 64, **options),
        "sequence": lambda: minifloat.VocabParallelEmbedding(7, 64, sequence_parallel=True, **options),
        "losses": nn.Identity,
    }

    def gradients(in_place: bool) -> list[Tensor]:
        torch.manual_seed(0)
        module = modules[kind]()
        x = torch.randn(4, 3, 64, requires_grad=True)
        if kind == "losses":
            own = x[..., :7].split([4, 3], -1)[rank]
            y = minifloat.cross_entropy(own, tokens, reduction="none", tp_group=Group.of(group), classes=7)
        else:
            y = module(tokens if isinstance(module, nn.Embedding) else x * 1)
        assert y._base is None or kind == "losses"
        y = y.mul_(2).relu_() if in_place else (y * 2).relu()
        (y * torch.arange(y.numel()).view_as(y)).sum().backward()
        return [each.grad for each in (x, *module.parameters()) if each.grad is not None]

    found = gradients(True)
    assert found
    _assert_same(found, gradients(False))
