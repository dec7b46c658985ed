"""Arguments of the public API: wrong types and values raise where they are given, and the error names the argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat.arguments import Accepts, Count, Device, Fraction, PositiveFloat, Size, checked, shown
from minifloat.recipe import ElementPair, RecipeLike
from minifloat.tensor import quantize
from tests.helpers.sample import each_once

# ---- the mechanism ----


@checked
def everything(
    size: Size = 1,
    count: Count = 0,
    number: float = 0.0,
    scale: PositiveFloat | None = None,
    part: Fraction = 0.0,
    flag: bool = False,
    mode: Literal["up", "down", 3] = "up",
    algorithm: Literal["max"] | Callable[[Tensor], Tensor] = "max",
    format: ElementPair = ElementPair.HYBRID,
    recipe: RecipeLike | None = None,
    device: Device | None = None,
    dtype: torch.dtype | None = None,
    module: nn.Module | None = None,
    x: Tensor | None = None,
    pair: tuple[int, int] = (1, 2),
    rows: Sequence[Size] | None = None,
    names: Mapping[str, Count] | None = None,
    read_once: Iterable[int] = (),
    kind: type[nn.Module] = nn.Module,
    even: Annotated[int, Accepts("an even int", lambda value: value % 2 == 0)] = 0,
    anything: Any = None,
    *more: int,
    name: str | None = None,
    **options: int,
) -> int:
    """Every kind of annotation."""
    return size


GOOD: list[dict[str, Any]] = [
    {"size": 2**31 - 1, "count": 0, "number": -1e300, "scale": 3, "part": 0, "flag": True},
    {"mode": 3, "algorithm": torch.neg, "recipe": "fp6", "device": "cpu", "dtype": torch.float16},
    {"device": "cuda:1", "module": nn.Identity(), "x": torch.ones(2), "pair": [1, 2], "rows": torch.Size([3])},
    {"read_once": iter("ab"), "kind": nn.Linear, "even": 4, "anything": object(), "name": "n", "unknown": "option"},
    {"device": torch.device("meta"), "rows": [], "names": {"a": 0}, "recipe": minifloat.DelayedScaling()},
]


@pytest.mark.parametrize("arguments", GOOD)
def test_what_is_accepted(arguments: dict[str, Any]) -> None:
    """Ints are numbers, lists may be tuples, None is what an annotation says, and iterators stay as they are."""
    assert everything(**arguments) == arguments.get("size", 1)
    if "read_once" in arguments:
        assert list(arguments["read_once"]) == ["a", "b"]


WRONG_TYPES: list[tuple[str, Any, str]] = [
    ("size", True, "an int of 1"), ("size", 2.0, "an int of 1"), ("number", "1", "a finite number"),
    ("number", torch.tensor(1.0), "a Tensor of torch.float32 and shape"),
    ("scale", False, "a number above 0 or None"), ("flag", 1, "True or False"), ("flag", "False", "True or False"),
    ("mode", 1.0, "'up', 'down' or 3"), ("algorithm", 7, "'max' or a callable"),
    ("format", "HYBRID", r"a member of minifloat.recipe.ElementPair \(E2M1, E4M3, E5M2, HYBRID\)"),
    ("format", minifloat.Format(), "a member of minifloat.recipe.ElementPair"),
    ("recipe", minifloat.DelayedScaling, "the class DelayedScaling; a minifloat recipe or one of the names delayed"),
    ("dtype", "bf16", "a torch.dtype"), ("module", nn.Linear, "the class Linear"), ("x", [1.0], "a torch.Tensor"),
    ("pair", "ab", "a tuple of 2"), ("pair", (1, "b"), "a tuple of 2"), ("rows", "12", "a sequence"),
    ("rows", [1, True], r"\[1, True\]; a sequence, each item an int of 1"),
    ("names", {"a": "b"}, "a mapping of a str to an int"), ("names", [("a", 1)], "a mapping"),
    ("kind", nn.Linear(1, 1), "a subclass of Module"), ("name", b"n", "a str or None"),
]  # fmt: skip
WRONG_VALUES: list[tuple[str, Any, str]] = [
    ("size", 0, "an int of 1"), ("size", 10**400, "an int of 1"), ("count", -1, "an int of 0"),
    ("number", float("nan"), "nan; a finite number"), ("number", float("-inf"), "-inf; a finite number"),
    ("number", 10**400, "a finite number"), ("scale", 0.0, "a number above 0 or None"),
    ("scale", float("inf"), "a number above 0 or None"), ("part", 1, "at least 0 and below 1"),
    ("mode", "left", "'up', 'down' or 3"), ("algorithm", "min", "'max' or a callable"), ("device", "gpu", "a device"),
    ("device", -1, "a device"), ("pair", (1, 2, 3), "a tuple of 2"), ("rows", (0,), "each item an int of 1"),
    ("names", {"a": -1}, "to an int of 0"), ("even", 3, "an even int"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "argument", "value", "message"),
    [(TypeError, *each) for each in WRONG_TYPES] + [(ValueError, *each) for each in WRONG_VALUES],
)
def test_what_is_refused(error: type[Exception], argument: str, value: Any, message: str) -> None:
    """A wrong type is a TypeError, a wrong value of a right one a ValueError."""
    with pytest.raises(error, match=f"^everything: {argument} is .*{message}"):
        everything(**{argument: value})


def test_positional_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="everything: count is -1"):
        everything(1, -1)


def test_errors_name_the_layer() -> None:
    with pytest.raises(TypeError, match=r"^Linear 'proj': bias is 'yes'"):
        minifloat.Linear(4, 4, bias="yes", name="proj")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^DotProductAttention of layer 3: softcap is 0"):
        minifloat.DotProductAttention(4, 8, softcap=0, layer_number=3)


def test_unknown_arguments_are_pythons_errors() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'biass'"):
        minifloat.Linear(4, 4, biass=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(("name", "way_out"), [("interval", "each step"), ("override_linear_precision", "backward_")])
def test_old_arguments_of_recipes_name_the_way_out(name: str, way_out: str) -> None:
    with pytest.raises(TypeError, match=f"DelayedScaling got an unexpected .*'{name}'; leave it out: .*{way_out}"):
        minifloat.DelayedScaling(**{name: 1})


@pytest.mark.parametrize("kind", [minifloat.LayerNormLinear, minifloat.LayerNormMLP, minifloat.MultiheadAttention])
def test_arguments_that_layers_share_are_as_if_written_out(kind: Any) -> None:
    """What is unpacked from a ``TypedDict`` is in the signature, is checked, and a misspelt one names the layer."""
    assert {"device", "params_dtype", "recipe", "tp_mesh", "etp_reduction"} <= set(inspect.signature(kind).parameters)
    with pytest.raises(ValueError, match=rf"{kind.__name__} 'a': etp_reduction is 'max'; 'mean' or 'sum' is needed"):
        kind(16, 16, name="a", etp_reduction="max")
    with pytest.raises(TypeError, match=rf"{kind.__name__} 'a' got an unexpected keyword argument 'tp_grup'"):
        kind(16, 16, name="a", tp_grup=None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: minifloat.autocast(fp8_recipe="current"), r"autocast got .*'fp8_recipe'; it is recipe here"),
        (lambda: minifloat.Linear(4, 4, ub_overlap_rs=True), r"Linear got .*'ub_overlap_rs'; leave it out: gathers"),
        (lambda: minifloat.TransformerLayer(8, 8, 2, name="a", seq_length=3), r"TransformerLayer 'a' got .*; leave it"),
        (lambda: minifloat.make_graphed_callables([], [], fp8_weight_caching=True), "it is cache_quantized_params"),
    ],
)
def test_arguments_of_other_libraries_are_refused_with_the_way_out(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_a_value_is_shown_in_one_short_line() -> None:
    """Modules and tensors of any size, and what has no repr of its own."""
    for value in (torch.zeros(1000), nn.Sequential(*(nn.Linear(1, 1) for _ in range(99))), object(), "x" * 999):
        assert len(shown(value)) < 90 and "\n" not in shown(value)


# ---- layers ----


def test_the_recipe_of_a_layer_may_be_assigned() -> None:
    """A short name is the recipe; what is none raises, where it used to compute in high precision."""
    layer = minifloat.Linear(32, 32, name="proj")
    layer.recipe = "mxfp8"
    assert layer.recipe == minifloat.MXFP8BlockScaling()
    x = torch.randn(4, 32)
    assert torch.equal(layer(x), _as(layer, minifloat.Linear(32, 32, recipe="mxfp8"))(x))
    for value, error, message in ((7, TypeError, "Linear 'proj': recipe is 7"), ("fp6", ValueError, "'fp6'")):
        with pytest.raises(error, match=message):
            layer.recipe = value  # type: ignore[assignment]
    layer.recipe = "none"
    with minifloat.autocast(recipe="current"):
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    layer.recipe = None
    assert layer.recipe is None


@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"])
def test_the_recipe_of_a_layer_of_linears_may_be_assigned(kind: str) -> None:
    """It used to be an attribute that no linear read."""
    sizes = (64, 4) if kind == "MultiheadAttention" else (64, 64, 4) if kind == "TransformerLayer" else (64, 64)
    make = getattr(minifloat, kind)
    layer, own = make(*sizes).eval(), make(*sizes, recipe="mxfp8").eval()  # without dropout
    own.load_state_dict(layer.state_dict())
    layer.recipe = "mxfp8"
    assert layer.recipe == own.recipe == minifloat.MXFP8BlockScaling()
    x = torch.randn(32, 2, 64)
    assert torch.equal(layer(x), own(x))
    linears = [each for each in layer.modules() if isinstance(each, minifloat.Linear)]
    with pytest.raises(TypeError, match=rf"{kind}: recipe is 7"):
        layer.recipe = 7
    linears[-1].recipe = "none"
    if len(linears) > 1:
        with pytest.raises(ValueError, match=rf"{kind}: its linears have different recipes.*MXFP8.*'none'"):
            layer.recipe  # noqa: B018
    layer.recipe = None
    assert [each.recipe for each in linears] == [None] * len(linears)


def _as(source: nn.Module, layer: minifloat.Linear) -> minifloat.Linear:
    layer.load_state_dict(source.state_dict())
    return layer


def test_names_alone_split_a_weight_equally() -> None:
    """As Transformer Engine has it; a rest, a name twice or one that is no attribute's raise."""
    layer = minifloat.Linear(8, 24, parameters_split=("query", "key", "value"))
    assert [layer.get_parameter(f"{name}_weight").shape for name in ("query", "key", "value")] == [(8, 8)] * 3
    x = torch.randn(2, 8)
    weights = [layer.query_weight, layer.key_weight, layer.value_weight]
    biases = [layer.query_bias, layer.key_bias, layer.value_bias]
    torch.testing.assert_close(layer(x), nn.functional.linear(x, torch.cat(weights), torch.cat(biases)))
    assert minifloat.LayerNormLinear(8, 24, parameters_split=["a", "b"]).linear.a_weight.shape == (12, 8)
    for wrong in (("a", "b", "c", "d", "e"), ("a", "a"), ("a.b", "c"), (), ("", "a")):
        with pytest.raises(ValueError, match="parameters_split"):
            minifloat.Linear(8, 24, parameters_split=wrong)


MODULES: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **options: minifloat.Linear(8, 8, **options),
    "LayerNormLinear": lambda **options: minifloat.LayerNormLinear(8, 8, **options),
    "LayerNormMLP": lambda **options: minifloat.LayerNormMLP(8, 8, **options),
    "MultiheadAttention": lambda **options: minifloat.MultiheadAttention(8, 2, **options),
    "TransformerLayer": lambda **options: minifloat.TransformerLayer(8, 8, 2, **options),
    "LayerNorm": lambda **options: minifloat.LayerNorm(8, **options),
    "RMSNorm": lambda **options: minifloat.RMSNorm(8, **options),
    "VocabParallelEmbedding": lambda **options: minifloat.VocabParallelEmbedding(8, 4, **options),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_dtype_has_two_names(name: str) -> None:
    """Both, of every module; two values raise."""
    make, bf16 = MODULES[name], torch.bfloat16
    for options in ({"dtype": bf16}, {"params_dtype": bf16}, {"dtype": bf16, "params_dtype": bf16}):
        assert {parameter.dtype for parameter in make(**options).parameters()} == {bf16}
    with pytest.raises(ValueError, match=f"{name}.*dtype is torch.bfloat16 and params_dtype torch.float16"):
        make(dtype=bf16, params_dtype=torch.float16)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("Norm")])
def test_init_methods_run_without_gradients(name: str) -> None:
    """In-place operations on a parameter raise where gradients are on."""
    module = MODULES[name](init_method=lambda weight: weight.fill_(0.5))
    matrices = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    assert matrices and all((matrix == 0.5).all() and matrix.grad_fn is None for matrix in matrices)


@pytest.mark.parametrize(
    "make",
    [
        lambda: minifloat.LayerNormLinear(8, 8, 1e-5, False),
        lambda: minifloat.LayerNormMLP(8, 8, 1e-5, False),
        lambda: minifloat.RMSNorm(8, 1e-5, False),
        lambda: minifloat.LayerNorm(8, 1e-5, None),
        lambda: minifloat.VocabParallelEmbedding(8, 4, 0),
    ],
)
def test_what_stands_elsewhere_in_other_libraries_has_no_place_here(make: Callable[[], Any]) -> None:
    """Transformer Engine's fourth argument is ``sequence_parallel``, of ``nn.Embedding`` the third ``padding_idx``."""
    with pytest.raises(TypeError, match="positional arguments"):
        make()


# ---- delayed scaling's values ----


DELAYED = minifloat.Quantizer(minifloat.Format("e4m3", scale_rule="given"))


@pytest.mark.parametrize("scale", [[-1.0], [0.0], [float("nan")], [float("inf")], [1.0, 2.0], []])
def test_a_delayed_scale_is_one_number_above_zero(scale: list[float]) -> None:
    """Codes of another one would be of any value."""
    x, wrong = torch.randn(4, 8), torch.tensor(scale)
    for call in (
        lambda: minifloat.cast_all([x], [DELAYED], scales=[wrong]),
        lambda: DELAYED.cast(x, (wrong,)),
        lambda: quantize(x, DELAYED, scale=wrong),
    ):
        with pytest.raises(ValueError, match=r"scale is .*one number above 0"):
            call()


def test_a_delayed_scale_is_floating_point() -> None:
    with pytest.raises(ValueError, match=r"scale is .*floating-point"):
        minifloat.cast_all([torch.randn(4, 8)], [DELAYED], scales=[torch.tensor([2])])


@each_once
@pytest.mark.parametrize("fresh", [True, False], ids=["without histories", "with histories"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("forward_scaling.scale", torch.ones(2)),
        ("forward_scaling.scale", -torch.ones(3)),
        ("forward_scaling.scale", torch.full((3,), float("nan"))),
        ("forward_scaling.scale", torch.full((3,), float("inf"))),
        ("forward_scaling.scale", torch.full((3,), 1e300, dtype=torch.float64)),
        ("forward_scaling.scale", torch.ones(3, dtype=torch.int64)),
        ("forward_scaling.amax_history", torch.full((4, 3), -5.0)),
        ("forward_scaling.amax_history", torch.ones(4, 3, dtype=torch.int64)),
        ("forward_scaling.amax_history", torch.zeros(4)),
        ("forward_scaling.amax_history", torch.zeros(0, 3)),
        ("forward_scaling.amax_history", torch.zeros(4, 2)),
        ("backward_scaling.amax_history", torch.zeros(2, 4, 2)),
        ("backward_scaling.scale", torch.ones(())),
        ("backward_scaling.amax_history", "text"),
    ],
)
def test_histories_of_wrong_shapes_and_values_are_refused(key: str, value: Any, fresh: bool) -> None:
    """They used to take the place of the buffers; infinite amaxes, which older checkpoints have, are dropped."""
    state = minifloat.Linear(8, 8, recipe="delayed").state_dict()
    layer = minifloat.Linear(8, 8, recipe=None if fresh else "delayed")
    with pytest.raises(RuntimeError, match=key):
        layer.load_state_dict(state | {key: value})
    layer = minifloat.Linear(8, 8, recipe=None if fresh else "delayed")
    layer.load_state_dict(state | {"forward_scaling.amax_history": torch.full((7, 3), float("inf"))})
    assert layer.forward_scaling.amax_history.shape == (7, 3)
