"""Models under FSDP2 and the same models unsharded, in lockstep: what a rank does in the tests of ``fully_shard``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import minifloat
from minifloat.distributed.fsdp import fully_shard, sharded_weights
from minifloat.optim import MasterWeights
from minifloat.quantizer import cast_all
from minifloat.tensor import QuantizedTensor

warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # the tests change no output in place


class Case(NamedTuple):
    """A model, how it is sharded, and how it is stepped.

    Args:
        model: a name of :data:`MODELS`.
        recipe: of all its linears.
        units: what is given to ``fully_shard`` before the root: ``"root"`` nothing else, ``"each"`` its children,
            ``"nested"`` all modules that are called, one inside of the other.
        reshard: ``reshard_after_forward``.
        dtype: name of ``param_dtype`` of a mixed-precision policy; None: no policy.
        options: ``"accumulate"``: three microbatches, the gradients of the first two not reduced; ``"keep"``: the same,
            and gathered weights kept until the last; ``"evaluate"``: a forward without grad mode before each step;
            ``"checkpoint"``: activation checkpointing of the first child; ``"save_on_cpu"``: what is saved for backward
            goes through hooks that read it; ``"autocast"``: one around the forward, as
            the region of delayed scaling; ``"frozen"``: the first weight has no gradient; ``"preserve"``: masters
            start from the values before the first cast.
    """

    model: str
    recipe: str
    units: str = "each"
    reshard: bool | None = None
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


def aligned(recipe: str) -> nn.Module:
    """Rows of two ranks that are whole blocks of every format."""
    return nn.Sequential(
        minifloat.Linear(24, 256, recipe=recipe), nn.ReLU(), minifloat.LayerNormMLP(256, 256, recipe=recipe)
    )


MODELS: dict[str, Callable[[str], nn.Module]] = {
    "linears": linears,
    "fused": fused,
    "transformer": transformer,
    "aligned": aligned,
}


def mesh_of(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))


def shard(model: nn.Module, case: Case, mesh: DeviceMesh) -> nn.Module:
    """Gives modules to ``fully_shard``, bottom-up, as the case says."""
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": case.reshard}
    if case.dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(getattr(torch, case.dtype), reduce_dtype=torch.float32)
    units: list[nn.Module] = []
    if case.units == "each":
        units = list(model.children())
    elif case.units == "nested":
        called = [each for each in model.modules() if each is not model and not isinstance(each, nn.ModuleList)]
        units = [each for each in reversed(called) if next(each.parameters(), None) is not None]
    for unit in units:
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def full(tensor: Any) -> Tensor:
    """The whole of a DTensor; a plain tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def width(model: nn.Module) -> int:
    """Columns of what the model takes."""
    return next(each.in_features for each in model.modules() if isinstance(each, minifloat.Linear))


def lockstep(rank: int, size: int, case: Case, steps: int) -> str:
    """Steps the sharded model and an unsharded replica, each rank with data of its own; what differs first, or "".

    Outputs, gradients of inputs and delayed scaling's buffers are compared to the bit in every step: they are functions
    of the gathered codes. Gradients of parameters too where two ranks add them; three may add them in another order,
    and the replica then follows the sharded parameters.
    """
    plain, sharded = MODELS[case.model](case.recipe), MODELS[case.model](case.recipe)
    sharded.load_state_dict(plain.state_dict())
    if "frozen" in case.options:
        for model in (plain, sharded):
            next(model.parameters()).requires_grad_(False)
    shard(sharded, case, mesh_of(size))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in (plain, sharded)]
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        difference = _forward_and_backward(plain, sharded, case, size, generator)
        if difference:
            return f"step {step}: {difference}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(plain.parameters(), sharded.parameters(), strict=True):
                whole = full(theirs.detach())
                if size <= 2 and not torch.equal(mine, whole):
                    return f"step {step}: parameters differ by {(mine - whole).abs().max():.3g}"
                mine.copy_(whole)
    return ""


def quantized_lockstep(rank: int, size: int, case: Case, steps: int) -> str:
    """The same with quantized parameters and fp32 masters, which three ranks' replicas follow."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        preserve = "preserve" in case.options
        with minifloat.quantized_model_init(recipe=case.recipe, preserve_high_precision_init_val=preserve):
            models.append(MODELS[case.model](case.recipe))
    plain, sharded = models
    shard(sharded, case, mesh_of(size))
    optimizers = [MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.02) for model in models]
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        difference = _forward_and_backward(plain, sharded, case, size, generator)
        if difference:
            return f"step {step}: {difference}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, mine), theirs in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            own, whole = (
                opt.state[p].get("master", p.detach()) for opt, p in zip(optimizers, (mine, theirs), strict=True)
            )
            whole = full(whole)
            if size <= 2 and not torch.equal(own, whole):
                return f"step {step}: masters of {name} differ"
            own.copy_(whole)
            if isinstance(mine, QuantizedTensor):
                mine.quantize_(whole)
    return ""


def _forward_and_backward(plain: nn.Module, sharded: Any, case: Case, size: int, generator: torch.Generator) -> str:
    microbatches = 3 if {"accumulate", "keep"} & set(case.options) else 1
    for micro in range(microbatches):
        last = micro == microbatches - 1
        sharded.set_requires_gradient_sync(last)
        if "keep" in case.options:
            sharded.set_reshard_after_backward(last)
        data = torch.randn(6, 2, width(plain), generator=generator)
        rounded = None if case.dtype is None else _rounded(plain, sharded, getattr(torch, case.dtype))
        expected, found = _results(plain, data, case, rounded), _results(sharded, data, case)
        for number, (mine, theirs) in enumerate(zip(expected, found, strict=True)):
            if not torch.equal(mine, theirs):
                return f"result {number} of microbatch {micro} differs by {(mine - theirs).abs().max():.3g}"
    return _compare(plain, sharded, size)


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
    y.float().square().mean().backward()
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
    quantized = sharded_weights(sharded)
    return {name: p.to(dtype) for name, p in plain.named_parameters() if name not in quantized}


def _compare(plain: nn.Module, sharded: nn.Module, size: int) -> str:
    """The first gradient or buffer that differs."""
    for (name, mine), theirs in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        if (mine.grad is None) != (theirs.grad is None):
            return f"{name}: only one has a gradient"
        if mine.grad is None:
            continue
        dist.all_reduce(mine.grad)
        mine.grad /= size
        whole = full(theirs.grad)
        if not (torch.equal(mine.grad, whole) if size <= 2 else torch.allclose(mine.grad, whole, 1e-5, 1e-7)):
            return f"gradient of {name} differs by {(mine.grad - whole).abs().max():.3g}"
    for (name, mine), theirs in zip(plain.named_buffers(), sharded.buffers(), strict=True):
        if not torch.equal(mine, theirs):
            return f"buffer {name} differs: {mine.tolist()} and {theirs.tolist()}"
    return ""


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
        expected = cast_all([whole[f"{name}.weight"]], [module.plan(module.recipe).weight])[0]
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
