"""Parts of fused modules: when a module must call them rather than read their parameters, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from minifloat.arguments import Accepts, check_value, checked, label_of
from minifloat.autocast import checks_finite, used
from minifloat.comm.group import Group
from minifloat.functional.autograd import autocast_dtype
from minifloat.functional.exchange import Exchange
from minifloat.nn.linear import Linear
from minifloat.nn.linear_state import LinearState
from minifloat.nn.norm import LayerNorm, RMSNorm
from minifloat.nn.options import DenseOptions, InitMethod
from minifloat.recipe import OwnRecipe, RecipeLike, own_recipe
from minifloat.tensor import QuantizedTensor

NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
Normalization = Annotated[str, Accepts(f"one of {', '.join(NORMS)}", NORMS.__contains__)]


class BlockOptions(DenseOptions, total=False):
    """Options of attention and MLP alike: of their norms and of their linears."""

    normalization: Normalization
    zero_centered_gamma: bool
    bias: bool
    init_method: InitMethod | None
    output_layer_init_method: InitMethod | None


def part_name(name: str | None, part: str) -> str:
    """Name of a part of a module, as recipes and errors have it."""
    return f"{name}.{part}" if name else part


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether any of the tensors requires a gradient."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


class LayerOfLinears(nn.Module):
    """Layer whose parameters and recipes are those of the linears in it."""

    @property
    def recipe(self) -> OwnRecipe:
        """Recipe of all its linears, as :attr:`minifloat.Linear.recipe`; assigning one gives it to each of them.

        Raises:
            ValueError: it is read, and they have different ones.
        """
        recipes = {name: linear.recipe for name, linear in self._linears().items()}
        first = next(iter(recipes.values()), None)
        if any(recipe != first for recipe in recipes.values()):
            raise ValueError(
                f"{type(self).__name__}: its linears have different recipes, read those of the parts: {recipes}"
            )
        return first

    @recipe.setter
    def recipe(self, recipe: RecipeLike | None) -> None:
        check_value(type(self).__name__, "recipe", recipe, RecipeLike | None)
        own = own_recipe(recipe)
        for linear in self._linears().values():
            linear.recipe = own

    @checked
    def set_tensor_parallel_group(self, tp_group: ProcessGroup | DeviceMesh) -> None:
        """Calls :meth:`Linear.set_tensor_parallel_group` of all parts."""
        for part in self.children():
            set_group: Any = getattr(part, "set_tensor_parallel_group", None)
            if set_group is not None:
                set_group(tp_group)
        if isinstance(getattr(self, "_exchange", None), Exchange):
            self._exchange: Exchange = self._exchange.over(Group.of(tp_group))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and drops weight gradients that wait for ``backward_dw``."""
        for linear in self._linears().values():
            linear.zero_grad(set_to_none)
        super().zero_grad(set_to_none)

    def _linears(self) -> dict[str, LinearState]:
        return {name: module for name, module in self.named_modules() if isinstance(module, LinearState)}


class LayerOfParts(LayerOfLinears):
    """Layer whose parts have all of its parameters."""

    def reset_parameters(self) -> None:
        """Resets the parameters of all parts."""
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]

    def backward_dw(self) -> None:
        """Calls :meth:`Linear.backward_dw` of all linears, the last ones first."""
        for part in reversed(list(self.children())):
            compute: Any = getattr(part, "backward_dw", None)
            if compute is not None:
                compute()


def outputs(y: Any, *others: tuple[bool, Any]) -> Any:
    """Returns Y, or a tuple of Y and those of the others that are wanted."""
    extra: tuple[Any, ...] = ()
    for wanted, other in others:
        if wanted:
            extra = (*extra, other)
    return (y, *extra) if extra else y


# ---- a part that is called ----


def is_own(part: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether ``part`` is of one of these classes, without hooks and without a ``forward`` of its own."""
    return type(part) in kinds and not (
        "forward" in part.__dict__
        or part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
    )


def needs_unfused_path(*parts: nn.Module) -> bool:
    """Whether some part must be called as a module: it has hooks, was replaced, keeps X, or is checked.

    The fused function reads the parts' parameters and never calls them.
    """
    if used.check_finite and checks_finite():
        return True
    for part in parts:
        if not is_own(part, Linear, LayerNorm, RMSNorm) or part.__dict__.get("save_original_input", False):
            return True
    return False


def call_unfused(part: nn.Module, x: Tensor, *args: Any, **options: Any) -> tuple[Any, Any]:
    """Calls a part: Y, and the bias or norm's result that it returns with it, or None.

    What replaced a part need not know options that are not used, nor return more than Y.
    """
    used = {name: value for name, value in options.items() if value is not None}
    outputs = part(x, *args, **used)
    return outputs if isinstance(outputs, tuple) else (outputs, None)


def call_norm(norm: nn.Module, x: Tensor, exchange: Exchange | None) -> Any:
    """Calls a norm; under sequence parallelism its parameters get the gradients of the rows of all ranks."""
    if exchange is None or not exchange.sequence_parallel:
        return norm(x)
    replicated = {name: exchange.replicated(parameter) for name, parameter in norm.named_parameters()}
    return functional_call(norm, replicated, (x,))


# ---- the residual stream ----


def call_on_stream(
    part: nn.Module, kinds: Sequence[type[nn.Module]], x: Tensor, residual: Tensor | None, *args: Any, **options: Any
) -> tuple[Any, Any, Tensor]:
    """Calls ``part(x + residual)`` as :func:`call_unfused` does; returns also that sum, or X without a residual.

    A part of one of ``kinds`` without hooks adds within its norm's kernel, in forward and in backward.
    """
    if not is_own(part, *kinds):
        stream = add_residual(x, residual, part)
        return *call_unfused(part, stream, *args, **options), stream
    *outputs, stream = part(x, *args, residual=residual, return_residual=True, **options)
    return outputs[0], outputs[1] if len(outputs) > 1 else None, stream


def add_residual(x: Tensor, residual: Tensor | None, module: nn.Module) -> Tensor:
    """Adds a residual of the shape of X; X itself where there is none. ``module``: what errors name.

    Raises:
        ValueError: their shapes differ.
    """
    if residual is None:
        return x
    if residual.shape != x.shape:
        raise ValueError(
            f"{label_of(module)}: residual has shape {tuple(residual.shape)} but the input {tuple(x.shape)}; they are "
            "added"
        )
    return x + residual


def fuses(x: Tensor) -> bool:
    """Whether the kernel of the norm reads ``x`` itself, not what it must be converted to."""
    return x.dtype == autocast_dtype(x) and not isinstance(x, QuantizedTensor)


def prepare_residual(x: Tensor, residual: Tensor | None, module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Returns X and the residual for the kernel of the norm; where it cannot add them, their sum and None."""
    alike = residual is not None and x.shape == residual.shape and x.dtype == residual.dtype
    if residual is not None and alike and fuses(x) and fuses(residual):
        return x, residual
    return add_residual(x, residual, module), None
