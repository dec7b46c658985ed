"""Base class, roles and options of recipes; ``DelayedScaling`` and ``CustomRecipe``, whose formats are not fixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from minifloat.arguments import Accepts, NonNegativeFloat, Size, checked
from minifloat.formats import COLUMNWISE, Format
from minifloat.quantizer import Quantizer

BackwardOverride = Literal["high_precision", "dequantized"] | None
Selection = Literal["none", "weights", "activations", "all"]
Margin = Annotated[int, Accepts("an int of -100 to 100", lambda value: -100 <= value <= 100)]
GRADIENTS = ("grad_output", "grad_input")
_TENSORS = ("input", "weight", "output", *GRADIENTS)
TensorType = Annotated[str, Accepts(f"one of {', '.join(_TENSORS)}", lambda value: value in ("", *_TENSORS))]


class ElementPair(Enum):
    """Elements of a recipe's forward and backward tensors; Transformer Engine calls it Format."""

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
    """Accumulation of a GEMM: a split accumulator moves partial sums to fp32 registers as they grow (Hopper)."""

    use_split_accumulator: bool = True


FAST, SPLIT = MMParams(use_split_accumulator=False), MMParams(use_split_accumulator=True)


def fast() -> MMParams:
    """Gives the default of a field, by a factory: Dynamo does not know an object that is an argument's default."""
    return FAST


def split() -> MMParams:
    """Gives the other default, by a factory likewise."""
    return SPLIT


@checked
@dataclass(frozen=True)
class QParams:
    """Options of one tensor's cast, under Transformer Engine's names; read-only here."""

    power_2_scale: bool = False
    amax_epsilon: NonNegativeFloat = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@checked
@dataclass(frozen=True)
class QuantizerRole:
    """Role of a tensor in a GEMM.

    Args:
        module_type: ``"linear"``, ...
        tensor_type: ``"input"``, ``"weight"``, ``"output"``, ``"grad_output"`` or ``"grad_input"``.
        name: the module's name, if it was given one.
    """

    module_type: str = ""
    tensor_type: TensorType = ""
    name: str = ""


def _asks(kind: str) -> Any:
    """Makes a class method of recipes that says whether one is of this kind."""
    return classmethod(lambda cls: kind in cls.kinds)


class Recipe:
    """Base class of recipes; each recipe is a frozen dataclass."""

    fp8_gemm_fprop: MMParams = FAST
    fp8_gemm_dgrad: MMParams = SPLIT
    fp8_gemm_wgrad: MMParams = SPLIT
    backward_override: BackwardOverride = None
    pairs: ClassVar[tuple[tuple[str, Format, Format], ...]] = ()
    """Rows of the table of backends: the operands that its GEMMs multiply, by the name a report gives them."""
    kinds: ClassVar[frozenset[str]] = frozenset()
    """Questions below, which Transformer Engine's users ask, that it answers with yes."""

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        """Returns the quantizer of the tensor of this role, both orientations wanted."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns itself, an immutable value: a copied model keeps the plans that it made for it."""
        return self

    def resolve(self, role: QuantizerRole) -> tuple[Quantizer, DelayedScaling | None]:
        """Returns the role's quantizer, and the recipe that keeps its amax history where it has one."""
        return self.quantizer(role), None

    def expected_gemms(self) -> dict[str, tuple[str, str]]:
        """Names the formats of the two operands of each GEMM that a linear layer runs under this recipe."""
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
        """Writes strings, numbers and dicts, which :func:`from_dict` reads back; functions are their names."""
        return {"recipe": type(self).__name__} | {f.name: plain(getattr(self, f.name), f.name) for f in fields(self)}  # type: ignore[arg-type]

    def _check(self, fp8_format: ElementPair | None = None, /, **unused: str) -> None:
        """Checks the fields that all recipes have. ``unused``: why other fields keep their defaults, by name."""
        attention = dict.fromkeys(("fp8_dpa", "fp8_mha"), "attention runs in high precision")
        for name, why in (attention | unused).items():
            value, default = getattr(self, name, None), getattr(type(self), name, None)
            if value != default:
                raise ValueError(f"{type(self).__name__}: {name} is {value}; {why}, leave it at {default}")
        if fp8_format in (ElementPair.E5M2, ElementPair.E2M1):
            raise ValueError(
                f"{type(self).__name__}(fp8_format={fp8_format}): forward tensors need E4M3; "
                "use ElementPair.HYBRID for E5M2 gradients, or ElementPair.E4M3"
            )

    delayed, custom, mxfp8, nvfp4 = map(_asks, ("delayed", "custom", "mxfp8", "nvfp4"))
    float8_current_scaling, float8_block_scaling = map(_asks, ("float8_current_scaling", "float8_block_scaling"))
    float8_per_tensor_scaling = _asks("float8_per_tensor_scaling")


def plain(value: Any, name: str) -> Any:
    """Converts the value of the field ``name`` to what a dict has of it."""
    if isinstance(value, ElementPair):
        return value.name
    if isinstance(value, MMParams):
        return {"use_split_accumulator": value.use_split_accumulator}
    if callable(value):
        module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", "<")
        if not module or "<" in path:  # a lambda, a function within another one, an object
            raise ValueError(f"{name} is {value!r}, which has no name of its own; use a module-level function")
        return f"{module}:{path}"
    return value


_OTHER_SCALES = "for other scales, write layer.forward_scaling.scale and layer.backward_scaling.scale after each step"
AmaxAlgorithm = Annotated[Literal["max", "most_recent"], Accepts(f"'max' or 'most_recent' ({_OTHER_SCALES})")]
NoAlgorithm = Annotated[None, Accepts(f"None, with an amax_compute_algo of 'max' or 'most_recent' ({_OTHER_SCALES}),")]


@checked
@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale a tensor, computed from the amaxes of earlier steps.

    Args:
        margin: the scale is divided by ``2 ** margin``.
        fp8_format: elements, forward and backward.
        amax_history_len: steps remembered.
        amax_compute_algo: ``"max"`` or ``"most_recent"`` of the history.
        scaling_factor_compute_algo: Transformer Engine's, None here: the scale is ``fp8_max / amax``.
        reduce_amax: reduce amaxes over the group given to ``autocast``, all ranks by default.
    """

    margin: Margin = 0
    fp8_format: ElementPair = ElementPair.HYBRID
    amax_history_len: Size = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: NoAlgorithm = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    kinds = frozenset({"delayed", "float8_per_tensor_scaling"})
    rules = "", ""
    """Rules for scales of forward and of backward from amaxes, ``"e4m3/margin=0/max"``.

    Strings for the same reason as a format's spec: a compiler takes them for the constants that they are.
    """

    def __post_init__(self) -> None:
        self._check(self.fp8_format)
        if self.backward_override is not None:
            raise ValueError("DelayedScaling has no backward_override; use Float8CurrentScaling for one")
        how = f"margin={self.margin}/{self.amax_compute_algo}"
        # Spelled here: where shapes are dynamic, a compiler takes the margin for a symbol, which cannot be spelled.
        object.__setattr__(self, "rules", (f"{self.fp8_format.forward}/{how}", f"{self.fp8_format.backward}/{how}"))

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return Quantizer(Format(self.fp8_format.element(role), scale_rule="given"))

    def resolve(self, role: QuantizerRole) -> tuple[Quantizer, DelayedScaling | None]:
        return self.quantizer(role), self


@checked
@dataclass(frozen=True)
class DelayedScalingRequest:
    """Answer of a :class:`CustomRecipe` factory for a role that wants delayed scaling."""

    fp8_format: ElementPair = ElementPair.HYBRID
    margin: Margin = 0
    amax_history_len: Size = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: NoAlgorithm = None
    reduce_amax: bool = True

    def recipe(self) -> DelayedScaling:
        return DelayedScaling(**{field.name: getattr(self, field.name) for field in fields(self)})


@checked
@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Recipe whose factory chooses a quantizer for each role, for example another format for one layer or operand.

    Args:
        qfactory: called with a :class:`QuantizerRole`, once for each role of a module and recipe object (in compiled
            code, where equal recipes are one, it is traced); returns a ``Quantizer`` (``Quantizer.identity()`` for high
            precision, ``Quantizer.hybrid(...)`` for a format for each orientation) or a :class:`DelayedScalingRequest`.
            A module-level function, if the recipe is to be pickled.
        fp8_format, quantization_alignment: as Transformer Engine's, and unused: the factory decides on the formats, and
            no layer pads groups of rows yet. They keep their defaults.
    """

    qfactory: Callable[[QuantizerRole], Quantizer | DelayedScalingRequest]
    fp8_format: ElementPair = ElementPair.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    quantization_alignment: int = 128
    kinds = frozenset({"custom"})

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
        if answer.given is not None:
            raise ValueError(
                f"qfactory returned a quantizer of a given scale for {role}; return DelayedScalingRequest()"
            )
        return answer, None


def equal_in_graph(known: Recipe, recipe: Recipe) -> bool:
    """Compares recipes in traced code, where factories have no ``==``, and those of ``partial`` not even ``is``."""
    if known is recipe or not (isinstance(known, CustomRecipe) and isinstance(recipe, CustomRecipe)):
        return known is recipe or known == recipe
    if isinstance(known.qfactory, partial) or isinstance(recipe.qfactory, partial):
        return False
    return known.qfactory is recipe.qfactory and known.backward_override == recipe.backward_override
