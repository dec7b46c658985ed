"""What recipes share: roles, options, and the base class. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from minifloat.arguments import Accepts, NonNegativeFloat, checked
from minifloat.formats import COLUMNWISE, Format
from minifloat.quantizer import Quantizer

if TYPE_CHECKING:
    from minifloat.recipes.delayed import DelayedScaling

BackwardOverride = Literal["high_precision", "dequantized"] | None
Selection = Literal["none", "weights", "activations", "all"]
Margin = Annotated[int, Accepts("an int of -100 to 100", lambda value: -100 <= value <= 100)]
GRADIENTS = ("grad_output", "grad_input")
_TENSORS = ("input", "weight", "output", *GRADIENTS)
TensorType = Annotated[str, Accepts(f"one of {', '.join(_TENSORS)}", lambda value: value in ("", *_TENSORS))]


class ElementPair(Enum):
    """The elements of a recipe's forward and backward tensors; Transformer Engine calls it Format."""

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


FAST, SPLIT = MMParams(use_split_accumulator=False), MMParams(use_split_accumulator=True)


def fast() -> MMParams:
    """The default of a field, by a factory: Dynamo does not know an object that is the default of an argument."""
    return FAST


def split() -> MMParams:
    """Likewise."""
    return SPLIT


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

    fp8_gemm_fprop: MMParams = FAST
    fp8_gemm_dgrad: MMParams = SPLIT
    fp8_gemm_wgrad: MMParams = SPLIT
    backward_override: BackwardOverride = None
    pairs: ClassVar[tuple[tuple[str, Format, Format], ...]] = ()
    """Rows of the capability table: the operands that its GEMMs multiply, by the name a report gives them."""
    kinds: ClassVar[frozenset[str]] = frozenset()
    """Which of the questions below, which Transformer Engine's users ask, it answers with yes."""

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
        return {"recipe": type(self).__name__} | {f.name: plain(getattr(self, f.name), f.name) for f in fields(self)}  # type: ignore[arg-type]

    def _check(self, fp8_format: ElementPair | None = None, /, **unused: str) -> None:
        """What all recipes ask of their common fields. ``unused``: why other fields keep their defaults, by name."""
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

    @classmethod
    def delayed(cls) -> bool:
        return "delayed" in cls.kinds

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return "float8_current_scaling" in cls.kinds

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return "float8_per_tensor_scaling" in cls.kinds

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return "float8_block_scaling" in cls.kinds

    @classmethod
    def mxfp8(cls) -> bool:
        return "mxfp8" in cls.kinds

    @classmethod
    def nvfp4(cls) -> bool:
        return "nvfp4" in cls.kinds

    @classmethod
    def custom(cls) -> bool:
        return "custom" in cls.kinds


def plain(value: Any, name: str) -> Any:
    """What a dict says of the field ``name``."""
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
