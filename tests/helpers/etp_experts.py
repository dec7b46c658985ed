"""Layers of experts whose rows ranks share, beside unsharded ones on the same rank's data: what a rank does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import minifloat
from minifloat.comm import sharded_cast
from minifloat.comm.collectives import start_all_gather_rows
from minifloat.comm.group import Group
from minifloat.distributed import reduce_replicated
from minifloat.functional.etp.prefetch_queue import queue_of
from minifloat.nn.moe import LayerNormMoE
from minifloat.recipe import Recipe
from tests.helpers.distributed_pool import process_group
from tests.helpers.etp_linears import set_prefetch, set_recast
from tests.helpers.recipes import NAMED

COUNTS = [5, 0, 9]  # rows of each expert; there are two more
ROWS, HIDDEN = 16, 40


class Rows(nn.Module):
    """A layer of experts on rows whose numbers never change."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        return self.layer(x, COUNTS, *args, **options)


def linear(width: int, **options: Any) -> nn.Module:
    """One grouped linear."""
    return Rows(minifloat.GroupedLinear(len(COUNTS), HIDDEN, width, **options))


def mlp(width: int, **options: Any) -> nn.Module:
    """Two of their MLPs."""
    layers = [minifloat.GroupedMLP(len(COUNTS), HIDDEN, width, **options) for _ in range(2)]
    return nn.Sequential(*[Rows(layer) for layer in layers])


def moe(width: int, **options: Any) -> nn.Module:
    """A norm and a mixture of experts with a shared MLP."""
    groups = {"expert_etp_group": options.get("etp_group")} if "etp_group" in options else {}
    return LayerNormMoE(
        HIDDEN, width, len(COUNTS), shared_ffn_hidden_size=24, aux_loss_coefficient=0.1, **groups, **options
    )


KINDS: dict[str, Callable[..., nn.Module]] = {"linear": linear, "mlp": mlp, "moe": moe}


@dataclass(frozen=True)
class Case:
    """What is compared: ``options`` are those of the layer.

    ``error``: of gradients, relative to the largest; they are exact on two ranks, which add in one order, unless the
    unsharded layer rounds them where the sharded one does not, or adds several in another order.
    """

    kind: str
    width: int
    recipe: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    reduction: str = "mean"
    dtype: torch.dtype = torch.float32
    depth: int = 1
    recast: bool = False
    own_recipe: Recipe | None = None
    call: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[..., Any] | None = None  # called with the model and X
    error: float = 0.0


def context(case: Case) -> AbstractContextManager[Any]:
    """``autocast`` as the case says; ranks agree on delayed scales."""
    recipe = case.own_recipe or (None if case.recipe is None else NAMED[case.recipe])
    return nullcontext() if recipe is None else minifloat.autocast(recipe=recipe, amax_reduction_group=process_group())


def made(case: Case, **options: Any) -> Any:
    """The model of a case, the same on every rank."""
    torch.manual_seed(3)
    return KINDS[case.kind](case.width, dtype=case.dtype, **case.options, **options)


def run(case: Case, model: nn.Module, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Y and dX of one forward and backward."""
    x = x.clone().requires_grad_()
    torch.manual_seed(step)  # NVFP4 draws random bits
    with context(case):
        y = (case.wrap or nn.Module.__call__)(model, x, **case.call)
    loss = minifloat.router_losses(model)
    torch.manual_seed(step + 1)
    ((y.float() * weights_like(y)).sum() + loss).backward()
    if any(getattr(module, "delay_wgrad_compute", False) for module in model.modules()):
        for module in reversed([each for each in model.modules() if isinstance(each, minifloat.GroupedLinear)]):
            module.backward_dw()
    assert x.grad is not None
    return y.detach(), x.grad


def weights_like(y: Tensor) -> Tensor:
    """Of the sum of Y that is differentiated, other ones for each element."""
    return torch.linspace(-1.0, 2.0, y.numel()).view(y.shape)


def own_rows(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """This rank's rows of what belongs to the parameter ``name``, if it is sharded."""
    path, _, kind = name.rpartition(".")
    layer = model.get_submodule(path)
    if kind == "weight" and not isinstance(layer, minifloat.Linear | minifloat.GroupedLinear):
        parent, _, last = path.rpartition(".")
        layer = model.get_submodule(parent) if last.isdigit() else layer
    sharded = getattr(layer, "_etp", None) is not None and kind == "weight"
    return whole[..., layer._etp.rows.range(0), :] if sharded else whole  # type: ignore[union-attr]


def gradient(parameter: Any) -> Tensor | None:
    """Where it was accumulated."""
    return getattr(parameter, "main_grad", parameter.grad)


def assert_alike(found: Tensor | None, wanted: Tensor | None, error: float, what: str) -> None:
    """But for an error relative to the largest element; 0: bit for bit."""
    assert (found is None) == (wanted is None), what
    if found is None or wanted is None:
        return
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, what
    if not error or not wanted.numel():
        assert torch.equal(found, wanted), f"{what}: {(found.float() - wanted.float()).abs().max()}"
    else:
        atol = error * float(wanted.abs().max())
        torch.testing.assert_close(found, wanted, rtol=error, atol=atol, msg=lambda why: f"{what}: {why}")


def reduced(whole: Tensor, size: int, reduction: str) -> Tensor:
    """The gradient of all ranks."""
    total = whole.clone()
    dist.all_reduce(total)
    return total.div_(size) if reduction == "mean" else total


def compare(model: nn.Module, reference: nn.Module, case: Case, x: Tensor, step: int) -> None:
    """Y, dX and all gradients of one step, which are cleared."""
    size = dist.get_world_size()
    y, dx = run(case, model, x, step)
    wanted_y, wanted_dx = run(case, reference, x, step)
    assert_alike(y, wanted_y, 0.0, f"Y in step {step}")
    assert_alike(dx, wanted_dx, 0.0, f"dX in step {step}")
    for name, parameter in reference.named_parameters():
        own, wanted = gradient(model.get_parameter(name)), gradient(parameter)
        wanted = None if wanted is None else reduced(wanted, size, case.reduction)
        wanted = None if wanted is None else own_rows(model, name, wanted)
        assert_alike(own, wanted, max(case.error, 3e-6 * (size > 2)), f"gradient of {name} in step {step}")
    for each in (*model.parameters(), *reference.parameters()):
        each.grad = None
        if hasattr(each, "main_grad"):
            each.main_grad.zero_()


def beside(rank: int, size: int, case: Case, steps: int = 1, prepare: Callable[[nn.Module], None] | None = None) -> int:
    """Compares a sharded model with an unsharded one in each of some steps; gives the number of gathers."""
    group = process_group()
    queue = queue_of(Group.of(group))
    before = queue.gathered
    model, reference = made(case, etp_group=group, etp_reduction=case.reduction), made(case)
    set_prefetch(model, case.depth)
    if case.recast:
        set_recast(model)
    reduce_replicated(model, group, case.reduction)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        whole = reference.get_parameter(name).detach()
        assert torch.equal(parameter, own_rows(model, name, whole)), name
    for each in (model, reference):
        if prepare is not None:
            prepare(each)
    for step in range(steps):
        x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank)).to(case.dtype)
        compare(model, reference, case, x * (1.0, 8.0, 0.25)[step % 3], step)
        for each in (model, reference) if step + 1 < steps else ():
            scale_parameters(each, (1.0, 3.0, 0.5)[step % 3])
    return queue.gathered - before


@torch.no_grad()
def scale_parameters(model: nn.Module, factor: float) -> None:
    """In the place of an optimizer's step: every rank can do it to its rows, to the bit."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(factor)


class Gathers:
    """Counts the gathers and the bytes that this rank sends in each: codes and scales, however many experts."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self._patch = mock.patch.object(sharded_cast, "start_all_gather_rows", self._start)

    def _start(self, xs: Any, maps: Any, *args: Any, **options: Any) -> Any:
        assert len(xs) <= 2
        sizes = [rows.largest * x[:0].new_empty(1, *x.shape[1:]).nbytes for x, rows in zip(xs, maps, strict=True)]
        self.sent.append(sum(sizes))
        return start_all_gather_rows(xs, maps, *args, **options)

    def __enter__(self) -> list[int]:
        self._patch.start()
        return self.sent

    def __exit__(self, *error: object) -> None:
        self._patch.stop()
