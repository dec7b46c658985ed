"""Models under FSDP2 and the same models unsharded, in lockstep: what a rank does in the tests of ``fully_shard``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import minifloat
from minifloat.optim import MasterWeights
from minifloat.parallel.fsdp import fully_shard, hooks, sharded_weights
from minifloat.quantizer import cast_all
from minifloat.tensor import QuantizedTensor
from minifloat.tools.train.step import compute_unquantized
from tests.helpers.fsdp_compare import Differences, Reads, wholes

warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # the tests change no output in place


class Case(NamedTuple):
    """A model, how it is sharded, and how it is stepped.

    Args:
        model: a name of :data:`MODELS`.
        recipe: of all its linears.
        units: what is given to ``fully_shard`` before the root: ``"root"`` nothing else, ``"each"`` its children,
            ``"parts"`` the linears and norms that these are made of, ``"nested"`` all modules that are called, one
            inside of the other.
        reshard: ``reshard_after_forward``.
        dtype: name of ``param_dtype`` of a mixed-precision policy; None: no policy.
        options: ``"accumulate"``: three microbatches, the gradients of the first two not reduced; ``"keep"``: the same,
            and gathered weights kept until the last; ``"evaluate"``: a forward without grad mode before each step;
            ``"checkpoint"``: activation checkpointing of the first child; ``"save_on_cpu"``: what is saved for backward
            goes through hooks that read it; ``"autocast"``: one around the forward, as
            the region of delayed scaling; ``"frozen"``: the first weight has no gradient; ``"preserve"``: masters
            start from the values before the first cast; ``"finish"``: from the second step on without a recipe.
    """

    model: str
    recipe: str
    units: str = "each"
    reshard: bool | int | None = None
    dtype: str | None = None
    options: tuple[str, ...] = ()


def linears(recipe: str) -> nn.Module:
    """Rows that are no multiple of a block and fewer rows than ranks: of three ranks one has none."""
    sizes = (24, 70, 2, 33, 128, 4)
    return nn.Sequential(
        *[minifloat.Linear(k, n, bias=k % 2 == 0, recipe=recipe) for k, n in pairwise(sizes)],
    )


def fused(recipe: str) -> nn.Module:
    """The fused modules, one after the other."""
    return nn.Sequential(
        minifloat.LayerNormLinear(24, 48, recipe=recipe),
        minifloat.LayerNormMLP(48, 50, recipe=recipe, activation="swiglu"),
        nn.LayerNorm(48),
        minifloat.Linear(48, 24, recipe="none"),
    )


def transformer(recipe: str) -> nn.Module:
    """Two layers, the first with a single parameter for query, key and value."""
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "recipe": recipe}
    return nn.Sequential(
        minifloat.TransformerLayer(24, 50, 2, fuse_qkv_params=True, **options),
        minifloat.TransformerLayer(24, 32, 2, normalization="RMSNorm", **options),
    )


def experts(recipe: str) -> nn.Module:
    """A mixture of experts whose rows are no whole blocks, beside a linear."""
    return nn.Sequential(minifloat.MoE(24, 35, 3, 2, recipe=recipe), minifloat.Linear(24, 24, recipe=recipe))


def one_parameter(recipe: str) -> nn.Module:
    """The same with one parameter of all experts, four of them, which three ranks share out as two, two and none."""
    options: dict[str, Any] = {"recipe": recipe, "single_grouped_weight": True}
    return nn.Sequential(minifloat.MoE(24, 35, 4, 2, **options), minifloat.MoE(24, 64, 2, 1, **options))


def aligned(recipe: str) -> nn.Module:
    """Rows of two ranks that are whole blocks of every format."""
    return nn.Sequential(
        minifloat.Linear(24, 256, recipe=recipe), nn.ReLU(), minifloat.LayerNormMLP(256, 256, recipe=recipe)
    )


def before_one_row(make: Callable[[str], list[nn.Module]]) -> Callable[[str], nn.Module]:
    """Modules of width 36, whose rows are no whole blocks on 2, 3 or 4 ranks, and a weight that only rank 0 has."""
    return lambda recipe: nn.Sequential(*make(recipe), minifloat.Linear(36, 1, recipe=recipe))


_NO_DROPOUT: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MODULES: dict[str, Callable[[str], nn.Module]] = {
    "Linear": before_one_row(
        lambda recipe: [
            nn.Sequential(minifloat.Linear(24, 256, recipe=recipe), minifloat.Linear(256, 70, recipe=recipe)),
            minifloat.Linear(70, 36, bias=False, recipe=recipe),
        ]
    ),
    "LayerNormLinear": before_one_row(
        lambda recipe: [
            minifloat.LayerNormLinear(24, 70, recipe=recipe),
            minifloat.LayerNormLinear(70, 36, normalization="RMSNorm", recipe=recipe),
        ]
    ),
    "LayerNormMLP": before_one_row(lambda recipe: [minifloat.LayerNormMLP(36, 50, activation="swiglu", recipe=recipe)]),
    "MultiheadAttention": before_one_row(
        lambda recipe: [minifloat.MultiheadAttention(36, 2, attention_dropout=0.0, recipe=recipe)]
    ),
    "TransformerLayer": before_one_row(
        lambda recipe: [minifloat.TransformerLayer(36, 50, 2, fuse_qkv_params=True, recipe=recipe, **_NO_DROPOUT)]
    ),
}
MODELS: dict[str, Callable[[str], nn.Module]] = MODULES | {
    "linears": linears,
    "fused": fused,
    "transformer": transformer,
    "experts": experts,
    "one parameter": one_parameter,
    "aligned": aligned,
}


@functools.cache
def mesh_of(size: int, device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (size,), mesh_dim_names=("shard",))


def shard(model: nn.Module, case: Case, mesh: DeviceMesh) -> nn.Module:
    """Gives modules to ``fully_shard``, bottom-up, as the case says."""
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": case.reshard}
    if case.dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(getattr(torch, case.dtype), reduce_dtype=torch.float32)
    for unit in units_of(model, case.units):
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def units_of(model: nn.Module, units: str) -> list[nn.Module]:
    """What is sharded by itself before the root; see :class:`Case`."""
    if units == "root":
        return []
    if units == "each":
        return list(model.children())
    called = [each for each in model.modules() if each is not model and not isinstance(each, nn.ModuleList)]
    own = [each for each in reversed(called) if next(each.parameters(recurse=units == "nested"), None) is not None]
    return own


def full(tensor: Any) -> Tensor:
    """The whole of a DTensor; a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def width(model: nn.Module) -> int:
    """Columns of what the model takes."""
    kinds = minifloat.Linear, minifloat.GroupedLinear
    return next(each.in_features for each in model.modules() if isinstance(each, kinds))


class Twins(NamedTuple):
    """An unsharded model and the sharded one, which start alike, with what steps each."""

    plain: nn.Module
    sharded: Any
    optimizers: Sequence[Any]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def high_precision(case: Case, size: int, device: str = "cpu") -> Twins:
    """Twins of fp32 parameters."""
    with torch.device(device):
        plain, sharded = MODELS[case.model](case.recipe), MODELS[case.model](case.recipe)
    sharded.load_state_dict(plain.state_dict())
    if "frozen" in case.options:
        for model in (plain, sharded):
            next(model.parameters()).requires_grad_(False)
    shard(sharded, case, mesh_of(size, device))
    return Twins(plain, sharded, [torch.optim.AdamW(model.parameters(), lr=0.02) for model in (plain, sharded)])


def quantized(case: Case, size: int, device: str = "cpu") -> Twins:
    """Twins of quantized parameters and fp32 masters."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        preserve = "preserve" in case.options
        with (
            torch.device(device),
            minifloat.quantized_model_init(recipe=case.recipe, preserve_high_precision_init_val=preserve),
        ):
            models.append(MODELS[case.model](case.recipe))
    shard(models[1], case, mesh_of(size, device))
    return Twins(*models, [MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.02) for model in models])


def lockstep(rank: int, size: int, case: Case, steps: int, device: str = "cpu") -> str:
    """Steps the sharded model and an unsharded replica, each rank with data of its own; what differs first, or "".

    Compared to the bit in every step are the codes and scales that GEMMs read of the gathered weights, outputs,
    gradients of inputs and delayed scaling's buffers: they are functions of the parameters, which are equal when a step
    begins. Gradients and parameters too where two ranks add them; more may add them in another order, and the replica
    then follows the sharded parameters.
    """
    return in_lockstep(rank, size, high_precision(case, size, device), case, steps, device)


def quantized_lockstep(rank: int, size: int, case: Case, steps: int, device: str = "cpu") -> str:
    """The same with quantized parameters and fp32 masters, which the replica's follow."""
    return in_lockstep(rank, size, quantized(case, size, device), case, steps, device)


def in_lockstep(rank: int, size: int, twins: Twins, case: Case, steps: int, device: str = "cpu") -> str:
    generator = torch.Generator().manual_seed(rank)
    found = Differences()
    reads = Reads(twins.plain, twins.sharded, found)
    for step in range(steps):
        if step == 1 and "finish" in case.options:
            for model in twins[:2]:
                with torch.no_grad():
                    model(torch.zeros(6, 2, width(twins.plain), device=device))  # which leaves the root unsharded
                compute_unquantized(model)
            reads = Reads(twins.plain, twins.sharded, found)
        _forward_and_backward(twins, case, found, reads, generator, device)
        _compare_gradients(twins, found, size)
        twins.step()
        _follow(twins, found, size)
        difference = found.first()
        if difference:
            return f"step {step}: {difference}"
    return ""


RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")
TWINS = {"high-precision": high_precision, "quantized": quantized}
KINDS = {"high-precision": lockstep, "quantized": quantized_lockstep}
MATRIX = list(product(MODULES, RECIPES, KINDS, ("root", "each", "parts", "nested")))
"""Modules, recipes, kinds of parameters and units that are sharded: :func:`KINDS` steps a case of the others."""


def trajectory(rank: int, size: int, make: Callable[..., Twins], case: Case, steps: int, device: str = "cpu") -> float:
    """How far losses get apart, of their size, where the replica goes its own way from the same start."""
    twins, apart = make(case, size, device), []
    for optimizer in twins.optimizers:
        for group in optimizer.param_groups:  # a gradient that is zero but for rounding is not to decide a step
            group.update(lr=0.002, eps=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        data, losses = torch.randn(6, 2, width(twins.plain), generator=generator).to(device), []
        for model in twins[:2]:
            torch.manual_seed(0)
            losses.append(loss(model(data)))
            losses[-1].backward()
        summed = torch.stack(losses).detach()
        dist.all_reduce(summed)
        apart.append((summed[0] - summed[1]).abs() / summed[0])
        _add_gradients(twins.plain, size)
        twins.step()
    return torch.stack(apart).max().item()


def loss(y: Tensor) -> Tensor:
    return (y.float() - 1).square().mean()


def _forward_and_backward(
    twins: Twins, case: Case, found: Differences, reads: Reads, generator: torch.Generator, device: str
) -> None:
    plain, sharded, _ = twins
    microbatches = 3 if {"accumulate", "keep"} & set(case.options) else 1
    for micro in range(microbatches):
        last = micro == microbatches - 1
        sharded.set_requires_gradient_sync(last)
        if "keep" in case.options:
            sharded.set_reshard_after_backward(last)
        data = torch.randn(6, 2, width(plain), generator=generator).to(device)
        rounded = None if case.dtype is None else _rounded(plain, sharded, getattr(torch, case.dtype))
        reads.begin()
        expected = _results(plain, data, case, rounded)
        with reads.watched():
            results = _results(sharded, data, case)
        reads.end(backward="save_on_cpu" not in case.options)
        for number, (mine, theirs) in enumerate(zip(results, expected, strict=True)):
            found.values(f"result {number} of microbatch {micro}", mine, theirs)


def _results(model: nn.Module, data: Tensor, case: Case, rounded: dict[str, Tensor] | None = None) -> Sequence[Tensor]:
    """Outputs and the gradient of the input; ``rounded``: in place of parameters, for an input in their dtype."""
    torch.manual_seed(0)  # of what is rounded stochastically
    x, results = data.clone().requires_grad_(), []
    if "evaluate" in case.options:
        with torch.no_grad():
            results.append(model(data))
    if rounded is not None:
        y = torch.func.functional_call(model, rounded, x.to(next(iter(rounded.values())).dtype))
    else:
        y = _run(model, x, case)
    loss(y).backward()
    assert x.grad is not None
    return [*results, y.detach(), x.grad]


def _run(model: Any, x: Tensor, case: Case) -> Tensor:
    if "checkpoint" in case.options and not hasattr(model[0], "plain_forward"):
        model[0].plain_forward = model[0].forward
        model[0].forward = lambda *args: minifloat.checkpoint(model[0].plain_forward, *args)
    region = minifloat.autocast(recipe=case.recipe) if "autocast" in case.options else nullcontext()
    hooks = torch.autograd.graph.save_on_cpu() if "save_on_cpu" in case.options else nullcontext()
    with region, hooks:
        y: Tensor = model(x)
        return y


def _rounded(plain: nn.Module, sharded: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a mixed-precision policy makes of the parameters that are gathered in high precision."""
    gathered = sharded_weights(sharded)
    return {name: p.to(dtype) for name, p in plain.named_parameters() if name not in gathered}


def _add_gradients(plain: nn.Module, size: int) -> None:
    """The mean over the ranks of the gradients of a model that each rank has whole."""
    gradients = [p.grad for p in plain.parameters() if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= size
    for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def _adds_alike(name: str, gradient: Tensor, size: int) -> bool:
    """The replica and the sharded model add the terms of a gradient in one order.

    Not so more than two ranks; nor, on a GPU, the kernel of an activation's gradient and PyTorch, which adds where the
    parts of an MLP are sharded one by one and so run one after the other.
    """
    return size <= 2 and not (gradient.is_cuda and name.endswith("fc1.bias"))


def _compare_gradients(twins: Twins, found: Differences, size: int) -> None:
    """Gradients, those of three ranks or more to 1e-5 of the largest of a parameter; buffers."""
    plain, sharded, _ = twins
    _add_gradients(plain, size)
    pairs = list(zip(plain.named_parameters(), sharded.parameters(), strict=True))
    for (name, mine), theirs in pairs:
        found.fact(f"{name}: only one has a gradient", (mine.grad is None) == (theirs.grad is None))
    both = [(name, mine.grad, theirs.grad) for (name, mine), theirs in pairs if mine.grad is not None]
    for (name, mine, _), whole in zip(both, wholes([gradient for *_, gradient in both]), strict=True):
        found.values(f"gradient of {name}", whole, mine, 0.0 if _adds_alike(name, mine, size) else 1e-5)
    for (name, mine), theirs in zip(plain.named_buffers(), sharded.buffers(), strict=True):
        found.values(f"buffer {name}", theirs, mine)


@torch.no_grad()
def _follow(twins: Twins, found: Differences, size: int) -> None:
    """Gives the replica the sharded parameters, masters where there are, and casts those of quantized parameters."""
    pairs = list(zip(twins.plain.named_parameters(), twins.sharded.parameters(), strict=True))
    owned = []
    for (_, mine), theirs in pairs:
        owned.append(
            [opt.state[p].get("master", p.detach()) for opt, p in zip(twins.optimizers, (mine, theirs), strict=True)]
        )
    for ((name, mine), _), (own, _), whole in zip(pairs, owned, wholes([other for _, other in owned]), strict=True):
        if _adds_alike(name, own, size):
            found.values(f"{name} after the step", whole, own.clone())
        own.copy_(whole)
        if isinstance(mine, QuantizedTensor):
            mine.quantize_(whole)


def layers(recipe: str, *sizes: int) -> nn.Sequential:
    return nn.Sequential(*[minifloat.Linear(k, n, bias=False, recipe=recipe) for k, n in pairwise(sizes)])


def step(model: nn.Module, rank: int) -> Tensor:
    torch.manual_seed(rank)
    width = next(m.in_features for m in model.modules() if isinstance(m, minifloat.Linear))
    y = model(torch.randn(4, width, requires_grad=True))
    y.square().mean().backward()
    return y.detach()


def gathered_bytes(model: nn.Module) -> list[str]:
    """Weights that a forward without gradients, and then one with, have gathered otherwise than quantized whole."""
    wrong = []
    whole = {name: full(parameter.detach()) for name, parameter in model.named_parameters()}

    def look(module: Any, args: Any) -> None:
        name = next(name for name, each in model.named_modules() if each is module)
        expected = cast_all([whole[f"{name}.weight"]], [module._config(module.recipe).weight])[0]
        found = module.weight.operands.rowwise
        same = torch.equal(found.codes, expected.rowwise.codes)
        wrong.extend([name] * (not same or not torch.equal(found.scale_inv, expected.rowwise.scale_inv)))

    hooks = [each.register_forward_pre_hook(look) for each in model.modules() if isinstance(each, minifloat.Linear)]
    width = next(m.in_features for m in model.modules() if isinstance(m, minifloat.Linear))
    with torch.no_grad():
        model(torch.zeros(2, width))
    model(torch.zeros(2, width, requires_grad=True)).sum().backward()
    for hook in hooks:
        hook.remove()
    return wrong


class RecordedGathers:
    """Bytes that this rank hands to FSDP2's all-gathers, in order."""

    def __init__(self, module: Any) -> None:
        self.sent: list[int] = []
        for each in module.modules():
            for group in hooks.param_groups(each) if isinstance(each, FSDPModule) else []:
                each.set_custom_all_gather(self._around(group._all_gather_comm))

    def _around(self, comm: Any) -> Any:
        outer = self

        class Comm(type(comm)):  # type: ignore[misc]
            def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                outer.sent.append(input_tensor.numel() * input_tensor.itemsize)
                return super().__call__(output_tensor, input_tensor, *args, **kwargs)

        return Comm()
