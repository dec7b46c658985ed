"""Recipes: which format each tensor of a layer takes, and how its GEMMs accumulate. Frozen values.

Names, fields and defaults are those of Transformer Engine; what it reads from environment variables are arguments here.
A recipe answers one question, :meth:`Recipe.quantizer`: how is the tensor of this role quantized?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated, Any, Literal, Self

from torch import Tensor

from minifloat import formats
from minifloat.arguments import Accepts, NonNegativeFloat, Size, checked
from minifloat.formats import COLUMNWISE
from minifloat.quantizer import Quantizer

BackwardOverride = Literal["high_precision", "dequantized"] | None
Selection = Literal["none", "weights", "activations", "all"]
Margin = Annotated[int, Accepts("an int of -100 to 100", lambda value: -100 <= value <= 100)]
GRADIENTS = ("grad_output", "grad_input")
_TENSORS = ("input", "weight", "output", *GRADIENTS)
TensorType = Annotated[str, Accepts(f"one of {', '.join(_TENSORS)}", lambda value: value in ("", *_TENSORS))]


class Format(Enum):
    """The elements of a recipe's forward and backward tensors."""

    E2M1 = "e2m1", "e2m1"
    E4M3 = "e4m3", "e4m3"
    E5M2 = "e5m2", "e5m2"
    HYBRID = "e4m3", "e5m2"

    @property
    def forward(self) -> str:
        return self.value[0]

    @property
    def backward(self) -> str:
        return self.value[1]

    def element(self, role: QuantizerRole) -> str:
        return self.backward if role.tensor_type in GRADIENTS else self.forward


@checked
@dataclass(frozen=True)
class MMParams:
    """How a GEMM accumulates: with a split accumulator, partial sums move to fp32 registers as they grow (Hopper)."""

    use_split_accumulator: bool = True


@checked
@dataclass(frozen=True)
class QParams:
    """Options of one tensor's cast, as Transformer Engine's users know them; read-only here."""

    power_2_scale: bool = False
    amax_epsilon: NonNegativeFloat = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@checked
@dataclass(frozen=True)
class QuantizerRole:
    """What a tensor is to a GEMM.

    Args:
        module_type: ``"linear"``, ...
        tensor_type: ``"input"``, ``"weight"``, ``"output"``, ``"grad_output"`` or ``"grad_input"``.
        name: the module's name, if it was given one.
    """

    module_type: str = ""
    tensor_type: TensorType = ""
    name: str = ""


class Recipe:
    """Base of all recipes, each a frozen dataclass."""

    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    backward_override: BackwardOverride = None

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        """How the tensor of this role is quantized, both orientations wanted."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself, as of any immutable value: a copied model keeps the plans that it made for it."""
        return self

    def resolve(self, role: QuantizerRole) -> tuple[Quantizer, DelayedScaling | None]:
        """The role's quantizer, and the recipe that keeps its amax history where it has one."""
        return self.quantizer(role), None

    def expected_gemms(self) -> dict[str, tuple[str, str]]:
        """Format names of the two operands of each GEMM that a linear layer runs under this recipe."""
        x, w, dy = (self.quantizer(QuantizerRole("linear", kind)) for kind in ("input", "weight", "grad_output"))
        fprop = x.row_format.spec, w.row_format.spec
        if self.backward_override is not None:
            return {"fprop": fprop, "dgrad": ("identity", "identity"), "wgrad": ("identity", "identity")}
        return {
            "fprop": fprop,
            "dgrad": (dy.row_format.spec, w.format(COLUMNWISE).spec),
            "wgrad": (dy.format(COLUMNWISE).spec, x.format(COLUMNWISE).spec),
        }

    def to_dict(self) -> dict[str, Any]:
        """A plain dict of strings, numbers and dicts, which :func:`from_dict` reads back; functions are their names."""
        return {"recipe": type(self).__name__} | {f.name: _plain(getattr(self, f.name), f.name) for f in fields(self)}  # type: ignore[arg-type]

    def _check(self, fp8_format: Format | None = None, /, **unused: str) -> None:
        """What all recipes ask of their common fields. ``unused``: why other fields keep their defaults, by name."""
        attention = dict.fromkeys(("fp8_dpa", "fp8_mha"), "attention runs in high precision")
        for name, why in (attention | unused).items():
            value, default = getattr(self, name, None), getattr(type(self), name, None)
            if value != default:
                raise ValueError(f"{type(self).__name__}: {name} is {value}; {why}, leave it at {default}")
        if fp8_format in (Format.E5M2, Format.E2M1):
            raise ValueError(
                f"{type(self).__name__}(fp8_format=Format.{fp8_format.name}): forward tensors need E4M3; "
                "use Format.HYBRID for E5M2 gradients, or Format.E4M3"
            )

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        return issubclass(cls, CustomRecipe)


AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[Tensor], Tensor]
ScaleAlgorithm = Callable[[Tensor, Tensor, float, "DelayedScaling"], Tensor]


@checked
@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale a tensor, taken from the amaxes of earlier steps.

    Args:
        margin: the scale is divided by ``2 ** margin``.
        fp8_format: elements, forward and backward.
        amax_history_len: steps remembered.
        amax_compute_algo: ``"max"`` or ``"most_recent"`` of the history, or a callable on it ([L, n] to [n]).
        scaling_factor_compute_algo: callable ``(amax, scale, fp8_max, recipe) -> scale``; None is ``fp8_max / amax``.
        reduce_amax: reduce amaxes over the group given to ``autocast``, all ranks by default.
    """

    margin: Margin = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: Size = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: ScaleAlgorithm | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None

    def __post_init__(self) -> None:
        self._check(self.fp8_format)
        if self.backward_override is not None:
            raise ValueError("DelayedScaling has no backward_override; use Float8CurrentScaling for one")

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return Quantizer(formats.Format(self.fp8_format.element(role), scale_rule="given"))

    def resolve(self, role: QuantizerRole) -> tuple[Quantizer, DelayedScaling | None]:
        return self.quantizer(role), self


@checked
@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale a tensor, from its own amax."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(False)
    fp8_gemm_dgrad: MMParams = MMParams(True)
    fp8_gemm_wgrad: MMParams = MMParams(True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    amax_epsilon: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        self._check(self.fp8_format)

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        return QParams(power_2_scale=self.use_power_2_scales, amax_epsilon=self.amax_epsilon)

    fp8_quant_fwd_weight = fp8_quant_bwd_grad = fp8_quant_fwd_inp

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        rule = "pow2" if self.use_power_2_scales else "fp32"
        element = self.fp8_format.element(role)
        return Quantizer(formats.Format(element, scale_rule=rule, amax_epsilon=self.amax_epsilon))


@checked
@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with a scale for each 1 x 128 strip of activations and gradients and each 128 x 128 tile of weights.

    DeepSeek-V3 Technical Report (2024), section 3.3. A dim of 1 is strips, of 2 tiles; no GEMM takes two of tiles.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: Literal[1, 2] = 1
    w_block_scaling_dim: Literal[1, 2] = 2
    grad_block_scaling_dim: Literal[1, 2] = 1
    fp8_gemm_fprop: MMParams = MMParams(True)
    fp8_gemm_dgrad: MMParams = MMParams(True)
    fp8_gemm_wgrad: MMParams = MMParams(True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    amax_epsilon: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        self._check(self.fp8_format)
        dims = {
            "x_block_scaling_dim": self.x_block_scaling_dim,
            "w_block_scaling_dim": self.w_block_scaling_dim,
            "grad_block_scaling_dim": self.grad_block_scaling_dim,
        }
        if list(dims.values()).count(2) > 1:
            raise ValueError(f"two of {dims} are 2: each pair of them meets in a GEMM, which takes one tiled operand")
        if not all(
            gemm.use_split_accumulator for gemm in (self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad)
        ):
            raise ValueError("block scaling applies its scales in fp32: use_split_accumulator must be True")

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        return QParams(power_2_scale=not self.use_f32_scales, amax_epsilon=self.amax_epsilon)

    fp8_quant_fwd_weight = fp8_quant_bwd_grad = fp8_quant_fwd_inp

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        if role.tensor_type in GRADIENTS:
            dim = self.grad_block_scaling_dim
        else:
            dim = self.w_block_scaling_dim if role.tensor_type == "weight" else self.x_block_scaling_dim
        rule = "fp32" if self.use_f32_scales else "pow2"
        element = self.fp8_format.element(role)
        return Quantizer(formats.Format(element, 128, dim == 2, scale_rule=rule, amax_epsilon=self.amax_epsilon))


@checked
@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """FP8 with a power-of-two scale for each 32 elements: OCP Microscaling Formats v1.0, scales rounded up.

    Args:
        enable_2d_quantization: weights share a scale in 32 x 32 tiles.
    """

    margin: Margin = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        self._check(self.fp8_format, margin="scales of blocks have no margin")

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        tile = self.enable_2d_quantization and role.tensor_type == "weight"
        return Quantizer(formats.Format(self.fp8_format.element(role), 32, tile, scale_rule="e8m0"))


@checked
@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """4-bit elements, E4M3 scales for each 16 of them, an fp32 amax over all: "Pretraining LLMs with NVFP4" (2025).

    Args:
        disable_rht: no Hadamard transform of the wgrad operands.
        disable_stochastic_rounding: gradients round to nearest.
        disable_2d_quantization: weights take strips of 16, not tiles of 16 x 16.
        row_scaled_activation: one amax a row for inputs; needs ``disable_rht``.
        nvfp4_4over6: tensors whose blocks are scaled to 4 where that is closer than to 6; never gradients.
        nvfp4_4over6_e4m3_use_256: which of those aim at block scales up to 256 instead of 448.
        nvfp4_4over6_err_mode: ``"MAE"`` or ``"MSE"``.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: Selection = "none"
    nvfp4_4over6_e4m3_use_256: Selection = "all"
    nvfp4_4over6_err_mode: Literal["MAE", "MSE"] = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None

    def __post_init__(self) -> None:
        self._check(self.fp8_format)
        if self.fp4_format is not Format.E2M1 or self.fp8_format is not Format.E4M3:
            raise ValueError("NVFP4 is E2M1 elements under E4M3 scales; leave fp4_format and fp8_format as they are")
        if not self.disable_rht:
            if self.row_scaled_activation:
                raise ValueError(
                    "row_scaled_activation scales tokens, which the Hadamard transform mixes: disable_rht=True"
                )
            if self.nvfp4_4over6 in ("activations", "all"):
                raise ValueError(f"nvfp4_4over6={self.nvfp4_4over6!r} of a rotated activation: set disable_rht=True")

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        return QParams(random_hadamard_transform=not self.disable_rht)

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        return QParams(fp4_2d_quantization=not self.disable_2d_quantization)

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        return QParams(
            random_hadamard_transform=not self.disable_rht, stochastic_rounding=not self.disable_stochastic_rounding
        )

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        if role.tensor_type == "weight":
            return Quantizer(self._format("weights", tile=not self.disable_2d_quantization))
        if role.tensor_type in GRADIENTS:
            rounding: formats.Rounding = "nearest" if self.disable_stochastic_rounding else "stochastic"
            row = formats.Format("e2m1", 16, scale_rule="two_level", rounding=rounding)
        else:
            row = self._format("activations", amax_per_row=self.row_scaled_activation)
        if self.disable_rht:
            return Quantizer(row)
        rotated = formats.Format("e2m1", 16, scale_rule="two_level", transform="hadamard16", rounding=row.rounding)
        return Quantizer(row, rotated)

    def _format(self, tensors: str, tile: bool = False, amax_per_row: bool = False) -> formats.Format:
        if self.nvfp4_4over6 not in (tensors, "all"):
            return formats.Format("e2m1", 16, tile, scale_rule="two_level", amax_per_row=amax_per_row)
        rounding: formats.Rounding = "four_over_six_mae" if self.nvfp4_4over6_err_mode == "MAE" else "four_over_six_mse"
        largest = 256.0 if self.nvfp4_4over6_e4m3_use_256 in (tensors, "all") else 448.0
        return formats.Format(
            "e2m1", 16, tile, "two_level", rounding=rounding, block_scale_max=largest, amax_per_row=amax_per_row
        )


@checked
@dataclass(frozen=True)
class DelayedScalingRequest:
    """What a :class:`CustomRecipe` factory returns for a role that wants delayed scaling."""

    fp8_format: Format = Format.HYBRID
    margin: Margin = 0
    amax_history_len: Size = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: ScaleAlgorithm | None = None
    reduce_amax: bool = True

    def recipe(self) -> DelayedScaling:
        return DelayedScaling(**{field.name: getattr(self, field.name) for field in fields(self)})


@checked
@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """A factory decides for each role: one layer or one operand gets another format, or none.

    Args:
        qfactory: called with a :class:`QuantizerRole`, once for each role of a module and recipe object; returns a
            ``Quantizer`` (``Quantizer.identity()`` for high precision, ``Quantizer.hybrid(...)`` for a format for each
            orientation) or a :class:`DelayedScalingRequest`. A module-level function, if the recipe is to be pickled.
        fp8_format, quantization_alignment: as Transformer Engine's, and unused: the factory decides on the formats, and
            no layer pads groups of rows yet. They keep their defaults.
    """

    qfactory: Callable[[QuantizerRole], Quantizer | DelayedScalingRequest]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    quantization_alignment: int = 128

    def __post_init__(self) -> None:
        self._check(fp8_format="qfactory decides on the formats", quantization_alignment="no layer pads groups of rows")

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return self.resolve(role)[0]

    def resolve(self, role: QuantizerRole) -> tuple[Quantizer, DelayedScaling | None]:
        """Calls the factory: the quantizer and, if it asked for delayed scaling, that recipe.

        Raises:
            ValueError: the factory returned neither a ``Quantizer`` nor a ``DelayedScalingRequest``.
        """
        answer = self.qfactory(role)
        if isinstance(answer, DelayedScalingRequest):
            delayed = answer.recipe()
            return delayed.quantizer(role), delayed
        if not isinstance(answer, Quantizer):
            raise ValueError(
                f"qfactory returned {answer!r} for {role}; return a Quantizer, a DelayedScalingRequest, "
                "or Quantizer.identity() for high precision"
            )
        if any(fmt.scale_rule == "given" for fmt in (answer.row_format, answer.format(COLUMNWISE))):
            raise ValueError(
                f"qfactory returned a quantizer of a given scale for {role}; return DelayedScalingRequest()"
            )
        return answer, None


_NAMED: dict[str, Recipe] = {
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
NAMES = tuple(_NAMED)
RecipeLike = Annotated[Recipe | str, Accepts(f"a minifloat recipe or one of the names {', '.join(NAMES)}")]
"""What stands for a recipe where one is asked for."""
OwnRecipe = Recipe | Literal["none"] | None
"""What a layer may have of its own: None takes what ``autocast`` gives."""


def named(name: str) -> Recipe:
    """The recipe of this short name with its default options.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in _NAMED:
        raise ValueError(f"no recipe is called {name!r}; there are {', '.join(NAMES)}")
    return _NAMED[name]


def from_dict(values: Mapping[str, Any], callables: Mapping[str, Callable[..., Any]] | None = None) -> Recipe:
    """The recipe that :meth:`Recipe.to_dict` wrote down. Nothing that the dict says is imported or run.

    Args:
        callables: the functions that the dict may name, by those names: ``{"factories:by_role": by_role}``.

    Raises:
        ValueError: the dict names no recipe, a field that it does not have, or a function that was not given.
    """
    classes = {
        cls.__name__: cls
        for cls in (
            DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, CustomRecipe
        )
    }  # fmt: skip
    if not isinstance(values, Mapping):
        raise ValueError(f"a {type(values).__name__} does not describe a recipe; a dict of Recipe.to_dict() does")
    arguments = dict(values)
    name = arguments.pop("recipe", "")
    cls = classes.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"{name!r} is not a recipe; 'recipe' is one of {', '.join(classes)}")
    known = {field.name for field in fields(cls)}
    if unknown := sorted(set(arguments) - known, key=str):
        raise ValueError(
            f"{cls.__name__} has no field {', '.join(map(str, unknown))}; it has {', '.join(sorted(known))}"
        )
    given = {} if callables is None else callables
    try:
        return cls(**{field: _read(field, value, given) for field, value in arguments.items()})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{dict(values)} does not describe a {cls.__name__}: {error!r}") from error


_CALLABLES = ("qfactory", "amax_compute_algo", "scaling_factor_compute_algo")


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Format):
        return value.name
    if isinstance(value, MMParams):
        return {"use_split_accumulator": value.use_split_accumulator}
    if callable(value):
        module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", "<")
        if not module or "<" in path:  # a lambda, a function within another one, an object
            raise ValueError(f"{name} is {value!r}, which has no name of its own; use a module-level function")
        return f"{module}:{path}"
    return value


def _read(field: str, value: Any, callables: Mapping[str, Callable[..., Any]]) -> Any:
    if field.endswith("_format") and isinstance(value, str):
        return Format[value]
    if isinstance(value, dict):
        return MMParams(**value)
    if field in _CALLABLES and isinstance(value, str) and ":" in value:
        if value not in callables:
            raise ValueError(
                f"{field} is the function {value!r}, and nothing is imported for a dict: give it to "
                f"from_dict(values, callables={{{value!r}: function}})"
            )
        return callables[value]
    return value


def own_recipe(recipe: RecipeLike | None) -> OwnRecipe:
    """What a layer is given for a recipe of its own, looked up if it is a short name.

    Raises:
        TypeError: it is not one.
        ValueError: an unknown name.
    """
    if recipe is None or recipe == "none":
        return recipe  # type: ignore[return-value]
    return as_recipe(recipe)


def as_recipe(recipe: RecipeLike) -> Recipe:
    """``recipe``, looked up by :func:`named` if it is a string.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(recipe, str):
        return named(recipe)
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe must be a minifloat recipe or one of the names {', '.join(NAMES)}, got {type(recipe).__name__}"
        )
    return recipe


__all__ = [
    "NAMES",
    "CustomRecipe",
    "DelayedScaling",
    "DelayedScalingRequest",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "OwnRecipe",
    "QParams",
    "QuantizerRole",
    "Recipe",
    "RecipeLike",
    "as_recipe",
    "from_dict",
    "named",
    "own_recipe",
]  # fmt: skip
