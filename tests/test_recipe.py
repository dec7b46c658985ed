"""Recipes and formats as values: what they are made of, which formats they give each tensor, and what they refuse."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minifloat import recipe as recipes
from minifloat.autocast import autocast
from minifloat.formats import COLUMNWISE, IDENTITY, Format, parse
from minifloat.functional import count_gemms
from minifloat.functional.quantize import linear_config
from minifloat.nn import Linear
from minifloat.quantizer import Quantizer
from minifloat.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    ElementPair,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MMParams,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    QuantizerRole,
    Recipe,
    W4A8BlockScaling,
    from_dict,
)

HYBRID, E4M3, E5M2, E2M1 = ElementPair.HYBRID, ElementPair.E4M3, ElementPair.E5M2, ElementPair.E2M1
SPLIT, FAST = MMParams(use_split_accumulator=True), MMParams(use_split_accumulator=False)
SLOTS = ("input", "weight", "output", "grad_output", "grad_input")
REQUIRED = object()


def by_tensor(role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
    """A factory that uses all it may answer with: a request, a hybrid, the identity, a plain quantizer."""
    if role.tensor_type == "weight":
        return DelayedScalingRequest(amax_history_len=4)
    if role.tensor_type == "input":
        block = Quantizer(Format(block=128, scale_rule="pow2"))
        return Quantizer.hybrid(rowwise_quantizer=Quantizer(Format()), columnwise_quantizer=block)
    return Quantizer.identity() if role.tensor_type in ("output", "grad_input") else Quantizer(Format("e5m2"))


# ---- Names, order and defaults ----

ATTENTION = [("fp8_dpa", False), ("fp8_mha", False)]
OVERRIDE = [("backward_override", None)]
TRANSFORMER_ENGINE: dict[type, list[tuple[str, object]]] = {
    MMParams: [("use_split_accumulator", True)],
    QParams: [
        ("power_2_scale", False),
        ("amax_epsilon", 0.0),
        ("random_hadamard_transform", False),
        ("stochastic_rounding", False),
        ("fp4_2d_quantization", False),
    ],
    QuantizerRole: [("module_type", ""), ("tensor_type", ""), ("name", "")],
    DelayedScalingRequest: [
        ("fp8_format", HYBRID),
        ("margin", 0),
        ("amax_history_len", 1024),
        ("amax_compute_algo", "max"),
        ("scaling_factor_compute_algo", None),
        ("reduce_amax", True),
    ],
    DelayedScaling: [
        ("margin", 0), ("fp8_format", HYBRID), ("amax_history_len", 1024), ("amax_compute_algo", "max"),
        ("scaling_factor_compute_algo", None), ("reduce_amax", True), *ATTENTION, *OVERRIDE,
    ],
    Float8CurrentScaling: [
        ("use_power_2_scales", False),
        ("fp8_format", HYBRID),
        ("fp8_gemm_fprop", FAST),
        ("fp8_gemm_dgrad", SPLIT),
        ("fp8_gemm_wgrad", SPLIT),
        *ATTENTION,
        *OVERRIDE,
    ],
    Float8BlockScaling: [
        ("use_f32_scales", False), ("fp8_format", E4M3), ("x_block_scaling_dim", 1), ("w_block_scaling_dim", 2),
        ("grad_block_scaling_dim", 1), ("fp8_gemm_fprop", SPLIT), ("fp8_gemm_dgrad", SPLIT),
        ("fp8_gemm_wgrad", SPLIT), *ATTENTION, *OVERRIDE,
    ],
    MXFP8BlockScaling: [("margin", 0), ("fp8_format", E4M3), *ATTENTION, *OVERRIDE, ("enable_2d_quantization", False)],
    NVFP4BlockScaling: [
        ("disable_rht", False), ("disable_stochastic_rounding", False), ("disable_2d_quantization", False),
        ("row_scaled_activation", False), ("nvfp4_4over6", "none"), ("nvfp4_4over6_e4m3_use_256", "all"),
        ("nvfp4_4over6_err_mode", "MAE"), ("fp4_format", E2M1), ("fp8_format", E4M3), *ATTENTION, *OVERRIDE,
    ],
    CustomRecipe: [
        ("qfactory", REQUIRED),
        ("fp8_format", HYBRID),
        *ATTENTION,
        *OVERRIDE,
        ("quantization_alignment", 128),
    ],
}  # fmt: skip
"""Transformer Engine 2.20's fields in its order, with the defaults that it has when no environment variable is set."""

OURS: dict[type, list[tuple[str, object]]] = {
    Float8CurrentScaling: [("amax_epsilon", 0.0)],
    Float8BlockScaling: [("amax_epsilon", 0.0), ("columnwise_source", "original")],
    MXFP8BlockScaling: [("columnwise_source", "original")],
    NVFP4BlockScaling: [("columnwise_source", "original")],
}
"""What this package adds, after them."""


def surface(cls: type) -> list[tuple[str, object]]:
    """The names and defaults of a dataclass."""
    made = {f.name: f.default_factory() for f in fields(cls) if f.default_factory is not MISSING}
    return [(f.name, made.get(f.name, REQUIRED if f.default is MISSING else f.default)) for f in fields(cls)]


@pytest.mark.parametrize("cls", TRANSFORMER_ENGINE)
def test_fields_in_order_with_defaults(cls: type) -> None:
    """A call written for Transformer Engine, positional arguments included, means the same here."""
    assert surface(cls) == TRANSFORMER_ENGINE[cls] + OURS.get(cls, [])


def test_element_formats() -> None:
    """The four of Transformer Engine, with the elements that each direction takes."""
    found = {each.name: (each.forward, each.backward) for each in ElementPair}
    assert found == {
        "E2M1": ("e2m1", "e2m1"), "E4M3": ("e4m3", "e4m3"), "E5M2": ("e5m2", "e5m2"), "HYBRID": ("e4m3", "e5m2")
    }  # fmt: skip


KINDS: dict[type[Recipe], set[str]] = {
    DelayedScaling: {"delayed", "float8_per_tensor_scaling"},
    Float8CurrentScaling: {"float8_current_scaling", "float8_per_tensor_scaling"},
    Float8BlockScaling: {"float8_block_scaling"},
    MXFP8BlockScaling: {"mxfp8"},
    NVFP4BlockScaling: {"nvfp4"},
    CustomRecipe: {"custom"},
}


@pytest.mark.parametrize("cls", KINDS)
def test_kind_predicates(cls: type[Recipe]) -> None:
    questions = set.union(*KINDS.values())
    assert {question for question in questions if getattr(cls, question)()} == KINDS[cls]


@pytest.mark.parametrize("power_2", [False, True])
def test_cast_options_that_users_may_read(power_2: bool) -> None:
    """The read-only QParams follow the options."""
    current = Float8CurrentScaling(use_power_2_scales=power_2, amax_epsilon=0.5)
    block = Float8BlockScaling(use_f32_scales=not power_2, amax_epsilon=0.5)
    for each in (current, block):
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            assert getattr(each, name) == QParams(power_2_scale=power_2, amax_epsilon=0.5)


@pytest.mark.parametrize("off", [False, True])
def test_nvfp4_cast_options_that_users_may_read(off: bool) -> None:
    """The same for NVFP4: rotation of input and gradient, tiles of weights, stochastic gradients."""
    recipe = NVFP4BlockScaling(disable_rht=off, disable_stochastic_rounding=off, disable_2d_quantization=off)
    assert recipe.fp4_quant_fwd_inp == QParams(random_hadamard_transform=not off)
    assert recipe.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=not off)
    assert recipe.fp4_quant_bwd_grad == QParams(random_hadamard_transform=not off, stochastic_rounding=not off)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("delayed", DelayedScaling()), ("current", Float8CurrentScaling()), ("block", Float8BlockScaling()),
        ("mxfp8", MXFP8BlockScaling()), ("nvfp4", NVFP4BlockScaling()), ("mxfp4", MXFP4BlockScaling()),
        ("mxfp6", MXFP6BlockScaling()), ("rowwise", Float8RowwiseScaling()), ("w4a8", W4A8BlockScaling()),
    ],
)  # fmt: skip
def test_short_names(name: str, recipe: Recipe) -> None:
    assert recipes.named(name) == recipe
    assert recipes.as_recipe(name) is recipes.named(name)
    assert recipes.as_recipe(recipe) is recipe
    assert name in recipes.NAMES and len(recipes.NAMES) == 9


# ---- Values ----

override = st.sampled_from([None, "high_precision", "dequantized"])
fp8_format = st.sampled_from([HYBRID, E4M3])
gemm = st.builds(MMParams, st.booleans())
epsilon = st.floats(0, 1e30, allow_nan=False)
selection = st.sampled_from(["none", "weights", "activations", "all"])
delayed_recipes = st.builds(
    DelayedScaling,
    margin=st.integers(-8, 8),
    fp8_format=fp8_format,
    amax_history_len=st.integers(1, 4096),
    amax_compute_algo=st.sampled_from(["max", "most_recent"]),
    reduce_amax=st.booleans(),
)
current_recipes = st.builds(
    Float8CurrentScaling,
    use_power_2_scales=st.booleans(),
    fp8_format=fp8_format,
    fp8_gemm_fprop=gemm,
    fp8_gemm_dgrad=gemm,
    fp8_gemm_wgrad=gemm,
    backward_override=override,
    amax_epsilon=epsilon,
)
block_recipes = st.builds(
    lambda dims, **options: Float8BlockScaling(
        x_block_scaling_dim=dims[0], w_block_scaling_dim=dims[1], grad_block_scaling_dim=dims[2], **options
    ),
    dims=st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]),
    use_f32_scales=st.booleans(),
    fp8_format=fp8_format,
    backward_override=override,
    amax_epsilon=epsilon,
)
mx_recipes = st.builds(
    MXFP8BlockScaling,
    fp8_format=fp8_format,
    backward_override=override,
    enable_2d_quantization=st.booleans(),
)


def _nvfp4(rotate: bool, row_scaled: bool, which: str, **options: Any) -> NVFP4BlockScaling:
    return NVFP4BlockScaling(
        disable_rht=not rotate,
        row_scaled_activation=row_scaled and not rotate,
        nvfp4_4over6="weights" if rotate and which in ("activations", "all") else which,  # type: ignore[arg-type]
        **options,
    )


nvfp4_recipes = st.builds(
    _nvfp4,
    rotate=st.booleans(),
    row_scaled=st.booleans(),
    which=selection,
    disable_stochastic_rounding=st.booleans(),
    disable_2d_quantization=st.booleans(),
    nvfp4_4over6_e4m3_use_256=selection,
    nvfp4_4over6_err_mode=st.sampled_from(["MAE", "MSE"]),
    backward_override=override,
)
custom_recipes = st.builds(
    CustomRecipe,
    st.just(by_tensor),
    backward_override=override,
)
any_recipe = st.one_of(delayed_recipes, current_recipes, block_recipes, mx_recipes, nvfp4_recipes, custom_recipes)


@given(any_recipe)
@settings(max_examples=150)
def test_round_trips(recipe: Recipe) -> None:
    text = json.dumps(recipe.to_dict())
    written = from_dict(json.loads(text), callables={f"{__name__}:by_tensor": by_tensor})
    for other in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), written):
        assert type(other) is type(recipe)
        assert other == recipe and hash(other) == hash(recipe)


def test_a_dict_says_what_it_holds() -> None:
    """The format that configuration files are written in."""
    recipe = Float8CurrentScaling(use_power_2_scales=True, fp8_gemm_fprop=SPLIT)
    assert recipe.to_dict() == {
        "recipe": "Float8CurrentScaling",
        "use_power_2_scales": True,
        "fp8_format": "HYBRID",
        "fp8_gemm_fprop": {"use_split_accumulator": True},
        "fp8_gemm_dgrad": {"use_split_accumulator": True},
        "fp8_gemm_wgrad": {"use_split_accumulator": True},
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
        "amax_epsilon": 0.0,
    }
    assert CustomRecipe(by_tensor).to_dict()["qfactory"] == f"{__name__}:by_tensor"


def test_a_dict_may_leave_defaults_out() -> None:
    assert from_dict({"recipe": "DelayedScaling", "margin": 2}) == DelayedScaling(margin=2)


def test_a_callable_without_a_name_cannot_be_written_down() -> None:
    """It could not be read back."""
    with pytest.raises(ValueError, match="module-level function"):
        CustomRecipe(lambda role: Quantizer(Format())).to_dict()


@pytest.mark.parametrize("recipe", [DelayedScaling, DelayedScalingRequest])
@pytest.mark.parametrize("field", ["amax_compute_algo", "scaling_factor_compute_algo"])
def test_callables_of_delayed_scaling_are_refused(recipe: Callable[..., Any], field: str) -> None:
    with pytest.raises(TypeError, match=rf"{field} is .*'max' or 'most_recent' .*write layer\.forward_scaling\.scale"):
        recipe(**{field: lambda *given: given[0]})


@pytest.mark.parametrize(
    "values",
    [
        {"recipe": "CustomRecipe", "qfactory": "recipe_hostile:f"},
        {"recipe": "CustomRecipe", "qfactory": "os:system"},
        {"recipe": "CustomRecipe", "qfactory": "os.system"},
        {"recipe": "DelayedScaling", "amax_compute_algo": "recipe_hostile:f"},
        {"recipe": "DelayedScaling", "scaling_factor_compute_algo": "recipe_hostile:f"},
        {"recipe": "DelayedScaling", "margin": "recipe_hostile:f"},
        {"recipe": "Float8CurrentScaling", "fp8_dpa": "recipe_hostile:f"},
        {"recipe": "Float8CurrentScaling", "fp8_gemm_fprop": "recipe_hostile:f"},
        {"recipe": "Float8CurrentScaling", "fp8_gemm_fprop": {"use_split_accumulator": "recipe_hostile:f"}},
        {"recipe": ["recipe_hostile:f"]},
        {0: 1, "recipe": "DelayedScaling"},
        ["recipe", "DelayedScaling"],
    ],
)
def test_a_dict_imports_nothing(values: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe of a stranger's checkpoint names a module whose import would run code."""
    (tmp_path / "recipe_hostile.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nf = 1"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError):
        from_dict(values)
    assert "recipe_hostile" not in sys.modules and not (tmp_path / "ran").exists()


def test_a_dict_takes_functions_from_the_caller() -> None:
    values = CustomRecipe(by_tensor).to_dict()
    name = f"{__name__}:by_tensor"
    with pytest.raises(ValueError, match=rf"qfactory is the function '{name}'.*callables="):
        from_dict(values)
    assert from_dict(values, callables={name: by_tensor}) == CustomRecipe(by_tensor)


# ---- Refusals ----


NVFP4, BLOCK, DELAYED, CURRENT = NVFP4BlockScaling, Float8BlockScaling, DelayedScaling, Float8CurrentScaling
DOT_PRODUCT = ("fp8_dpa", "fp8_mha")
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (DELAYED, {"amax_history_len": 0}, "amax_history_len is 0"),
    (DELAYED, {"amax_history_len": -1}, "amax_history_len is -1"),
    (DELAYED, {"amax_compute_algo": "median"}, "'median'.*'most_recent'"),
    (DELAYED, {"backward_override": "high_precision"}, "Float8CurrentScaling"),
    (DELAYED, {"backward_override": "dequantized"}, "Float8CurrentScaling"),
    (BLOCK, {"x_block_scaling_dim": 3}, "x_block_scaling_dim is 3"),
    (BLOCK, {"w_block_scaling_dim": 0}, "w_block_scaling_dim is 0"),
    (BLOCK, {"grad_block_scaling_dim": -1}, "grad_block_scaling_dim is -1"),
    (BLOCK, {"x_block_scaling_dim": 2}, "two of"),
    (BLOCK, {"grad_block_scaling_dim": 2}, "two of"),
    (BLOCK, {"x_block_scaling_dim": 2, "w_block_scaling_dim": 1, "grad_block_scaling_dim": 2}, "two of"),
    (BLOCK, {"fp8_gemm_fprop": FAST}, "use_split_accumulator must be True"),
    (BLOCK, {"fp8_gemm_dgrad": FAST}, "use_split_accumulator must be True"),
    (BLOCK, {"fp8_gemm_wgrad": FAST}, "use_split_accumulator must be True"),
    (NVFP4, {"row_scaled_activation": True}, "disable_rht=True"),
    (NVFP4, {"nvfp4_4over6": "activations"}, "disable_rht=True"),
    (NVFP4, {"nvfp4_4over6": "all"}, "disable_rht=True"),
    (NVFP4, {"nvfp4_4over6": "some"}, "nvfp4_4over6 is 'some'"),
    (NVFP4, {"nvfp4_4over6_e4m3_use_256": "some"}, "nvfp4_4over6_e4m3_use_256 is 'some'"),
    (NVFP4, {"nvfp4_4over6_err_mode": "MAX"}, "nvfp4_4over6_err_mode is 'MAX'"),
    (NVFP4, {"fp4_format": E4M3}, "fp4_format"),
    (NVFP4, {"fp8_format": HYBRID}, "fp8_format"),
    (CustomRecipe, {"qfactory": by_tensor, "fp8_format": E4M3}, "fp8_format is ElementPair.E4M3; qfactory decides"),
    (CustomRecipe, {"qfactory": by_tensor, "quantization_alignment": 0}, "quantization_alignment is 0"),
    (CustomRecipe, {"qfactory": by_tensor, "quantization_alignment": 32}, "quantization_alignment is 32"),
    (MXFP8BlockScaling, {"margin": 1}, "margin is 1"),
    (QuantizerRole, {"tensor_type": "weights"}, "tensor_type is 'weights'.*input, weight"),
    (QuantizerRole, {"tensor_type": "Weight"}, "tensor_type is 'Weight'"),
    (recipes.named, {"name": "fp6"}, "'fp6'.*delayed, current, block, mxfp8, nvfp4"),
    (from_dict, {"values": {"recipe": "FP6"}}, "'FP6' is not a recipe"),
    (from_dict, {"values": {}}, "is not a recipe"),
    (from_dict, {"values": {"recipe": "DelayedScaling", "marign": 1}}, "no field marign"),
    (from_dict, {"values": {"recipe": "DelayedScaling", "amax_history_len": 0}}, "amax_history_len is 0"),
    (from_dict, {"values": {"recipe": "DelayedScaling", "fp8_format": "E3M4"}}, "."),
    (from_dict, {"values": {"recipe": "CustomRecipe"}}, "."),
    (from_dict, {"values": {"recipe": "Float8CurrentScaling", "fp8_gemm_fprop": {"split": True}}}, "."),
    *[
        (cls, {"fp8_format": element}, rf"ElementPair\.{element.name}.*HYBRID")
        for cls, element in zip((DELAYED, CURRENT, BLOCK, MXFP8BlockScaling), (E5M2, E2M1) * 2, strict=True)
    ],
    *[
        (cls, {option: True}, f"{option} is True; attention runs in high precision")
        for cls, option in zip((DELAYED, CURRENT, BLOCK, MXFP8BlockScaling, NVFP4), DOT_PRODUCT * 3, strict=False)
    ],
    (CustomRecipe, {"qfactory": by_tensor, "fp8_mha": True}, "fp8_mha is True; attention runs in high precision"),
    *[(cls, {"backward_override": "high-precision"}, ".") for cls in (CURRENT, BLOCK, MXFP8BlockScaling, NVFP4)],
    (Format, {"element": "e3m4"}, "unknown element 'e3m4'.*e4m3"),
    *[(Format, {"block": block}, f"block is {block}") for block in (-16, -1, 1, 12, 24)],
    (Format, {"amax_epsilon": -1e-3}, "amax_epsilon is -0.001"),
    (Format, {"tile": True}, "needs a block length"),
    (Format, {"block": 16, "scale_rule": "two_level"}, "takes e2m1, got 'e4m3'"),
    (Format, {"element": "e2m1"}, "needs a block length"),
    (Format, {"rounding": "stochastic"}, "needs scale rule .two_level."),
    (Format, {"amax_per_row": True, "block": 32}, "amax_per_row needs scale rule .two_level."),
    (Format, {"amax_per_row": True, "scale_rule": "given"}, "amax_per_row needs"),
    (Format, {"block": 32, "scale_rule": "given"}, "one for the whole tensor"),
    (
        Format,
        {"element": "e2m1", "block": 16, "tile": True, "scale_rule": "two_level", "amax_per_row": True},
        "not rotated",
    ),
    (Format, {"scale_rule": "e8m0"}, "needs a block length"),
    (Format, {"scale_rule": "two_level"}, "needs a block length"),
    (Format, {"block": 8, "transform": "hadamard16"}, "groups of 16, got block=8"),
    (Format, {"block": 16, "tile": True, "transform": "hadamard16"}, "tile=True"),
    *[(Format, {"block": 16, name: "nonsense"}, "nonsense") for name in ("scale_rule", "transform", "rounding")],
    *[
        (parse, {"spec": spec}, ".")
        for spec in (
            *("", "e4m3", "e4m3/1x128", "e3m4/1x128/pow2", "e4m3/1xq/pow2", "e4m3/1x12/pow2", "e4m3/2x128/pow2"),
            *("e4m3/1x128/pow2/nonsense", "e4m3/1x128/pow2/size=1", "identity/x"),
        )
    ],
]
WRONG_TYPES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (CURRENT, {"fp8_format": Format("e5m2")}, "minifloat.recipe.ElementPair .*HYBRID"),
    (DELAYED, {"fp8_format": "HYBRID"}, "fp8_format is 'HYBRID'.*minifloat.recipe.ElementPair"),
    (DELAYED, {"amax_history_len": 2.5}, "amax_history_len is 2.5"),
    (DELAYED, {"margin": True}, "margin is True; an int"),
    (CustomRecipe, {"qfactory": "not callable"}, "qfactory is 'not callable'; a callable"),
    (CURRENT, {"fp8_gemm_fprop": True}, "fp8_gemm_fprop is True; a minifloat.recipe.MMParams"),
    (MMParams, {"use_split_accumulator": "no"}, "use_split_accumulator is 'no'; True or False"),
    *[(recipes.as_recipe, {"recipe": each}, "delayed, current, .*, nvfp4") for each in (None, 8, DELAYED, Format())],
]


@pytest.mark.parametrize(
    ("error", "make", "arguments", "message"),
    [(ValueError, *each) for each in REFUSED] + [(TypeError, *each) for each in WRONG_TYPES],
)
def test_refusals(error: type[Exception], make: Callable[..., Any], arguments: dict[str, Any], message: str) -> None:
    """A wrong option raises when the recipe or format is made, and names the option or the way out."""
    with pytest.raises(error, match=message):
        make(**arguments)


# ---- Formats of each recipe: the tables of numerics.md, section 1 ----

Formats = tuple[str, str]
"""Rowwise and columnwise."""


def both(spec: str) -> Formats:
    """The same format for both orientations."""
    return spec, spec


def table(forward: str | Formats, weight: str, gradient: str | Formats) -> dict[str, Formats]:
    """The formats of the five slots: an output is quantized like an input, a grad_input like a grad_output."""
    x = both(forward) if isinstance(forward, str) else forward
    dy = both(gradient) if isinstance(gradient, str) else gradient
    return {"input": x, "weight": both(weight), "output": x, "grad_output": dy, "grad_input": dy}


FP4, FP4_TILE = "e2m1/1x16/two_level", "e2m1/16x16/two_level"
ROTATED, MXFP4 = f"{FP4}/hadamard16", "e2m1/1x32/e8m0"
STOCHASTIC, ROTATED_STOCHASTIC = f"{FP4}/stochastic", f"{FP4}/hadamard16/stochastic"
MAE, MSE, MAX256 = "four_over_six_mae", "four_over_six_mse", "max=256.0"
PER_TENSOR = table("e4m3/tensor/fp32", "e4m3/tensor/fp32", "e5m2/tensor/fp32")
BLOCKS = table("e4m3/1x128/pow2", "e4m3/128x128/pow2", "e4m3/1x128/pow2")
NVFP4_TABLE = table((FP4, ROTATED), FP4_TILE, (STOCHASTIC, ROTATED_STOCHASTIC))
TABLES: list[tuple[Recipe, dict[str, Formats]]] = [
    (DelayedScaling(), table("e4m3/tensor/given", "e4m3/tensor/given", "e5m2/tensor/given")),
    (DelayedScaling(fp8_format=E4M3), table("e4m3/tensor/given", "e4m3/tensor/given", "e4m3/tensor/given")),
    (Float8CurrentScaling(), PER_TENSOR),
    (Float8CurrentScaling(fp8_format=E4M3), table("e4m3/tensor/fp32", "e4m3/tensor/fp32", "e4m3/tensor/fp32")),
    (Float8CurrentScaling(use_power_2_scales=True), table("e4m3/tensor/pow2", "e4m3/tensor/pow2", "e5m2/tensor/pow2")),
    (
        Float8CurrentScaling(amax_epsilon=0.25),
        table("e4m3/tensor/fp32/eps=0.25", "e4m3/tensor/fp32/eps=0.25", "e5m2/tensor/fp32/eps=0.25"),
    ),
    (Float8BlockScaling(), BLOCKS),
    (Float8BlockScaling(use_f32_scales=True), table("e4m3/1x128/fp32", "e4m3/128x128/fp32", "e4m3/1x128/fp32")),
    (
        Float8BlockScaling(fp8_format=HYBRID, amax_epsilon=0.5),
        table("e4m3/1x128/pow2/eps=0.5", "e4m3/128x128/pow2/eps=0.5", "e5m2/1x128/pow2/eps=0.5"),
    ),
    (
        Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
        table("e4m3/128x128/pow2", "e4m3/1x128/pow2", "e4m3/1x128/pow2"),
    ),
    (
        Float8BlockScaling(w_block_scaling_dim=1, grad_block_scaling_dim=2),
        table("e4m3/1x128/pow2", "e4m3/1x128/pow2", "e4m3/128x128/pow2"),
    ),
    (MXFP8BlockScaling(), table("e4m3/1x32/e8m0", "e4m3/1x32/e8m0", "e4m3/1x32/e8m0")),
    (MXFP8BlockScaling(fp8_format=HYBRID), table("e4m3/1x32/e8m0", "e4m3/1x32/e8m0", "e5m2/1x32/e8m0")),
    (MXFP8BlockScaling(enable_2d_quantization=True), table("e4m3/1x32/e8m0", "e4m3/32x32/e8m0", "e4m3/1x32/e8m0")),
    (NVFP4BlockScaling(), NVFP4_TABLE),
    (NVFP4BlockScaling(disable_rht=True), table(FP4, FP4_TILE, STOCHASTIC)),
    (NVFP4BlockScaling(disable_stochastic_rounding=True), table((FP4, ROTATED), FP4_TILE, (FP4, ROTATED))),
    (NVFP4BlockScaling(disable_2d_quantization=True), table((FP4, ROTATED), FP4, (STOCHASTIC, ROTATED_STOCHASTIC))),
    (
        NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True),
        table(f"{FP4}/amax_per_row", FP4_TILE, STOCHASTIC),
    ),
    (
        NVFP4BlockScaling(nvfp4_4over6="weights"),
        table((FP4, ROTATED), f"{FP4_TILE}/{MAE}/{MAX256}", (STOCHASTIC, ROTATED_STOCHASTIC)),
    ),
    (
        NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="activations", nvfp4_4over6_err_mode="MSE"),
        table(f"{FP4}/{MSE}/{MAX256}", FP4_TILE, STOCHASTIC),
    ),
    (
        NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="none"),
        table(f"{FP4}/{MAE}", f"{FP4_TILE}/{MAE}", STOCHASTIC),
    ),
    (
        NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="weights"),
        table(f"{FP4}/{MAE}", f"{FP4_TILE}/{MAE}/{MAX256}", STOCHASTIC),
    ),
    (
        NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", row_scaled_activation=True),
        table(f"{FP4}/{MAE}/{MAX256}/amax_per_row", f"{FP4_TILE}/{MAE}/{MAX256}", STOCHASTIC),
    ),
    (
        MXFP4BlockScaling(enable_2d_quantization=True, enable_rht=True),
        table((MXFP4, f"{MXFP4}/hadamard16"), "e2m1/32x32/e8m0", (MXFP4, f"{MXFP4}/hadamard16")),
    ),
]


def _formats(quantizer: Quantizer) -> Formats:
    return quantizer.row_format.spec, quantizer.format(COLUMNWISE).spec


@pytest.mark.parametrize(("recipe", "expected"), TABLES, ids=lambda value: str(value)[:60])
def test_formats_of_each_role(recipe: Recipe, expected: dict[str, Formats]) -> None:
    """Element, block, scale rule, rotation and rounding of every slot, both orientations wanted.

    A layer's plan takes them over; only delayed scaling brings histories.
    """
    for kind in SLOTS:
        quantizer = recipe.quantizer(QuantizerRole("linear", kind, "any"))
        assert _formats(quantizer) == expected[kind], kind
        assert quantizer.rowwise and quantizer.columnwise and quantizer.columnwise_source == "original"
    plan = linear_config(recipe)
    assert {kind: _formats(getattr(plan, kind)) for kind in SLOTS} == expected
    assert plan.delayed == (recipe if isinstance(recipe, DelayedScaling) else None)


@pytest.mark.parametrize(
    ("recipe", "fast"),
    [
        (DelayedScaling(), (True, False, False)),
        (Float8CurrentScaling(), (True, False, False)),
        (Float8CurrentScaling(fp8_gemm_fprop=SPLIT, fp8_gemm_dgrad=FAST, fp8_gemm_wgrad=FAST), (False, True, True)),
        (Float8BlockScaling(), (False, False, False)),
        (MXFP8BlockScaling(), (True, False, False)),
        (NVFP4BlockScaling(), (True, False, False)),
        (CustomRecipe(by_tensor), (True, False, False)),
    ],
)
def test_accumulators(recipe: Recipe, fast: tuple[bool, bool, bool]) -> None:
    """The recipe's own choice, else forward fast and backward with a split accumulator."""
    plan = linear_config(recipe)
    assert (plan.fast_fprop, plan.fast_dgrad, plan.fast_wgrad) == fast


OVERRIDDEN: list[Recipe] = [
    Float8CurrentScaling(backward_override="dequantized"),
    NVFP4BlockScaling(backward_override="high_precision"),
]


@pytest.mark.parametrize("recipe", [recipe for recipe, _ in TABLES] + OVERRIDDEN, ids=lambda value: str(value)[:60])
def test_expected_gemms_are_those_that_run(recipe: Recipe) -> None:
    """What a layer multiplies in a step is what its recipe announced, once each."""
    layer = Linear(32, 16, recipe=recipe)
    x = torch.randn(16, 32, requires_grad=True)
    with count_gemms() as counts:
        layer(x).sum().backward()
    ran = {(gemm, a, b): n for (gemm, a, b, *_), n in counts.items()}
    assert ran == {(gemm, *pair): 1 for gemm, pair in recipe.expected_gemms().items()}


# ---- Custom recipes ----


class Factory:
    """Counts the roles that it is asked for."""

    def __init__(self, answer: Callable[[QuantizerRole], Any]) -> None:
        self.answer = answer
        self.asked: Counter[QuantizerRole] = Counter()

    def __call__(self, role: QuantizerRole) -> Any:
        self.asked[role] += 1
        return self.answer(role)


def _step(layer: Linear) -> torch.Tensor:
    x = torch.randn(8, layer.in_features, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("own", [False, True])
def test_factory_is_called_once_for_each_role(own: bool) -> None:
    factory = Factory(by_tensor)
    recipe = CustomRecipe(factory)
    layers = [Linear(16, 16, name=name, recipe=recipe if own else None) for name in ("qkv", "proj")]
    for _ in range(3):
        with autocast(recipe=None if own else recipe):
            for layer in layers:
                _step(layer)
    assert factory.asked == {QuantizerRole("linear", kind, name): 1 for kind in SLOTS for name in ("qkv", "proj")}


@pytest.mark.parametrize("override", [None, "high_precision"])
def test_factory_is_called_for_each_recipe_object(override: str | None) -> None:
    """An equal recipe is another recipe: its factory may answer otherwise by now. None is asked again."""
    factory = Factory(lambda role: Quantizer(Format()))
    made, layer = [CustomRecipe(factory), CustomRecipe(factory, backward_override=override)], Linear(16, 16)
    for recipe in made * 2 if override else made:
        with autocast(recipe=recipe):
            _step(layer)
    assert set(factory.asked.values()) == {2}


@pytest.mark.parametrize("answer", [None, "e4m3", Format()])
def test_factory_must_return_a_quantizer(answer: object) -> None:
    """None is not "high precision": the identity quantizer is."""
    with pytest.raises(ValueError, match=r"qfactory returned .* Quantizer\.identity\(\)"):
        Linear(16, 16, recipe=CustomRecipe(lambda role: answer))  # type: ignore[arg-type, return-value]


def test_hybrid_quantizers_reach_their_gemms() -> None:
    """Forward in 4 bits, backward in 8: each GEMM meets the formats of its own orientation."""

    def factory(role: QuantizerRole) -> Quantizer:
        mx = Quantizer(Format(block=32, scale_rule="e8m0"))
        if role.tensor_type in ("grad_output", "grad_input"):
            return mx
        return Quantizer.hybrid(
            rowwise_quantizer=Quantizer(Format("e2m1", 16, scale_rule="two_level")), columnwise_quantizer=mx
        )

    recipe = CustomRecipe(factory)
    with count_gemms() as counts:
        _step(Linear(32, 32, recipe=recipe))
    mx = "e4m3/1x32/e8m0"
    assert {key[:3] for key in counts} == {("fprop", FP4, FP4), ("dgrad", mx, mx), ("wgrad", mx, mx)}
    assert recipe.expected_gemms() == {"fprop": (FP4, FP4), "dgrad": (mx, mx), "wgrad": (mx, mx)}


def test_quantizer_of_a_hybrid_takes_one_orientation_of_each() -> None:
    nvfp4 = NVFP4BlockScaling().quantizer(QuantizerRole("linear", "input"))
    hybrid = Quantizer.hybrid(
        rowwise_quantizer=Quantizer(IDENTITY), columnwise_quantizer=nvfp4, columnwise_source="rowwise_dequantized"
    )
    assert _formats(hybrid) == ("identity", ROTATED)
    assert hybrid.columnwise_source == "rowwise_dequantized"


def test_requests_that_differ_within_a_layer_raise() -> None:
    lengths = {"input": 4, "weight": 8}
    recipe = CustomRecipe(lambda role: DelayedScalingRequest(amax_history_len=lengths.get(role.tensor_type, 4)))
    with pytest.raises(ValueError, match=r"'qkv'.*different parameters"):
        Linear(16, 16, recipe=recipe, name="qkv")


def test_equal_requests_share_one_history() -> None:

    def factory(role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        wants = role.tensor_type in ("weight", "grad_output")
        return DelayedScalingRequest(amax_history_len=4, margin=1) if wants else Quantizer(Format())

    layer = Linear(16, 16, recipe=CustomRecipe(factory))
    assert layer._config(layer.recipe).delayed == DelayedScaling(amax_history_len=4, margin=1)  # type: ignore[arg-type]
    _step(layer)
    forward, backward = layer.forward_scaling, layer.backward_scaling
    assert forward.amax_history.shape == (4, 3) and backward.amax_history.shape == (4, 2)
    assert forward.amax_history[-1].tolist() == [0.0, layer.weight.abs().max().item(), 0.0]
    assert forward.scale[[0, 2]].tolist() == [1.0, 1.0] and forward.scale[1] != 1.0
    assert backward.amax_history[-1].tolist() == [1.0, 0.0]  # the gradient of a sum
    assert backward.scale.tolist() == [57344 / 2, 1.0]


def test_requests_of_two_layers_may_differ() -> None:
    recipe = CustomRecipe(lambda role: DelayedScalingRequest(amax_history_len=4 if role.name == "a" else 8))
    layers = [Linear(16, 16, recipe=recipe, name=name) for name in "ab"]
    assert [len(layer.forward_scaling.amax_history) for layer in layers] == [4, 8]


def test_request_has_the_options_of_the_recipe() -> None:
    request = DelayedScalingRequest(E4M3, 3, 16, "most_recent", None, False)
    assert request.recipe() == DelayedScaling(3, E4M3, 16, "most_recent", None, False)


# ---- Formats as strings ----


@st.composite
def valid_formats(draw: st.DrawFn) -> Format:
    """Any format that can be made, of blocks longer than one."""
    block = draw(st.sampled_from([0, 2, 4, 8, 16, 32, 64, 128, 256]))
    tile = block > 0 and draw(st.booleans())
    rule = draw(st.sampled_from(["fp32", "pow2", *(["e8m0", "two_level"] if block else ["given"])]))
    two_level = rule == "two_level"
    transform = draw(st.sampled_from(["none"] + (["hadamard16"] if block >= 16 and not tile else [])))
    roundings = ["nearest"] + ["stochastic", "four_over_six_mae", "four_over_six_mse"] * two_level
    return Format(
        "e2m1" if two_level else draw(st.sampled_from(["e4m3", "e5m2"])),
        block,
        tile,
        rule,
        transform,
        draw(st.sampled_from(roundings)),
        draw(st.floats(0, allow_nan=False, allow_infinity=False)),
        draw(st.floats(1, 448)),
        two_level and not tile and transform == "none" and draw(st.booleans()),
    )


@given(valid_formats())
@settings(max_examples=300)
def test_spec_round_trip(fmt: Format) -> None:
    """A format is its string, which travels through operations and graphs in its place."""
    assert parse(fmt.spec) == fmt
    assert parse(fmt.spec).spec == fmt.spec
    assert pickle.loads(pickle.dumps(fmt)) == fmt and hash(parse(fmt.spec)) == hash(fmt)


def test_spec_of_the_identity() -> None:
    assert IDENTITY.spec == "identity" and parse("identity") == IDENTITY and not IDENTITY.quantized


@pytest.mark.parametrize("rotated", ["input", "grad_output"])
def test_a_rotation_of_one_operand_is_refused(rotated: str) -> None:
    """Before anything is computed, by the layer's name; also where only the backward would come to it."""
    nvfp4, current = recipes.named("nvfp4"), recipes.named("current")
    recipe = CustomRecipe(lambda role: (nvfp4 if role.tensor_type in (rotated, "weight") else current).quantizer(role))
    with pytest.raises(ValueError, match=r"'qkv': wgrad .*rotation cancels only if both have it; give both"):
        linear_config(recipe, "qkv")
    assert linear_config(CustomRecipe(nvfp4.quantizer), "qkv") == linear_config(nvfp4, "qkv")
