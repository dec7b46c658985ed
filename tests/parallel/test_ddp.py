"""``DistributedDataParallel``, bit for bit one process that has the data of all ranks; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import minifloat
from minifloat.parallel.data_parallel import data_parallel
from tests.helpers.ddp_cases import Case, lockstep
from tests.helpers.distributed_pool import Pools, on_ranks

RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")


def _ids(case: Case) -> str:
    return "-".join((case.model, case.recipe, *case.options))


def _every(model: str, *options: str) -> list[Case]:
    return [Case(model, recipe, options) for recipe in RECIPES]


@pytest.mark.parametrize(
    "case",
    [
        *_every("fused"),
        Case("linears", "delayed", ("plain", "region", "gradient_as_bucket_view")),
        Case("linears", "mxfp8", ("quantized", "preserve", "accumulate")),
        Case("fused", "delayed", ("quantized", "static_graph", "accumulate")),
        Case("fused", "delayed", ("plain", "autocast", "checkpoint")),
        Case("branches", "mxfp8", ("find_unused_parameters",)),
    ],
    ids=_ids,
)
def test_lockstep(worker_pool: Pools, case: Case) -> None:
    assert worker_pool(2).run(lockstep, case, 2) == [""] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *_every("linears"),
        *_every("transformer"),
        *_every("fused", "plain"),
        *_every("fused", "plain", "local_buffers"),
        *_every("fused", "quantized"),
        *_every("linears", "quantized", "preserve"),
        *_every("linears", "accumulate"),
        *_every("linears", "region"),
        *_every("fused", "autocast"),
        *_every("fused", "static_graph", "accumulate"),
        *_every("fused", "gradient_as_bucket_view", "accumulate"),
        *_every("fused", "checkpoint"),
        *_every("fused", "torch_checkpoint")[1:],  # delayed scaling raises
        *_every("fused", "reentrant")[1:],
        *_every("fused", "checkpoint", "static_graph"),
        *_every("fused", "clip", "compress"),
        *_every("fused", "quantized", "clip"),
        *_every("linears", "quantized", "scaler")[1:],  # delayed scaling saturates: nothing overflows
        *_every("linears", "scaler")[1:],
        *_every("transformer", "quantized", "gradient_as_bucket_view"),
        Case("branches", "mxfp8", ("find_unused_parameters", "quantized", "gradient_as_bucket_view")),
        Case("branches", "delayed", ("find_unused_parameters", "own_amaxes")),
        Case("fused", "nvfp4", ("bfloat16",)),
        Case("fused", "mxfp8", ("bfloat16", "quantized", "accumulate")),
        Case("linears", "delayed", ("plain", "region")),
        Case("linears", "delayed", ("plain", "own_amaxes")),
        Case("linears", "delayed", ("own_amaxes",)),
        Case("linears", "delayed", ("own_amaxes", "quantized", "accumulate")),
    ],
    ids=_ids,
)
def test_matrix(worker_pool: Pools, case: Case) -> None:
    assert worker_pool(2).run(lockstep, case, 3) == [""] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("fused", "delayed", ("compile_inside",)),
        Case("fused", "nvfp4", ("compile_inside",)),
        Case("fused", "delayed", ("compile_outside",)),
        Case("fused", "mxfp8", ("compile_outside", "quantized")),
    ],
    ids=_ids,
)
def test_compiled(worker_pool: Pools, case: Case) -> None:
    assert worker_pool(2).run(lockstep, case, 3, timeout=300.0) == [""] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*_every("tensor_parallel", "clip"), *_every("tensor_parallel", "quantized")], ids=_ids
)
def test_tensor_parallel(worker_pool: Pools, case: Case) -> None:
    assert worker_pool(4).run(lockstep, case, 3) == [""] * 4


def other_buffers(rank: int, size: int) -> list[Tensor]:
    """A running mean after the first forward and before the second, and delayed scaling's scales."""
    torch.manual_seed(rank)
    linear = minifloat.Linear(8, 8, recipe=minifloat.DelayedScaling(reduce_amax=False))
    wrapped = DistributedDataParallel(nn.Sequential(linear, nn.BatchNorm1d(8)))
    found: list[Tensor] = []
    wrapped.module.register_forward_pre_hook(lambda module, args: found.append(module[1].running_mean.clone()))
    for _ in range(2):
        wrapped(torch.randn(4, 8)).square().mean().backward()
        found.append(wrapped.module[1].running_mean.clone())
    _, after_first, before_second, _ = found
    return [after_first, before_second, linear.forward_scaling.scale]


def test_other_buffers(worker_pool: Pools) -> None:
    """Those of batch normalization go on being the first rank's, while each rank has amaxes of its own."""
    (own, found, scale), (others, found_by_other, other_scale) = worker_pool(2).run(other_buffers)
    assert not torch.equal(own, others) and torch.equal(found, own) and torch.equal(found_by_other, own)
    assert not torch.equal(scale, other_scale)


@on_ranks(2)
def test_delayed_scales_stay(rank: int, size: int) -> None:
    """Though DDP writes the values of codes that were cast under a smaller scale."""
    with minifloat.quantized_model_init(recipe="delayed"):
        layer = minifloat.Linear(8, 8, recipe="delayed")
    layer.forward_scaling.scale.fill_(2.0**14 + rank)
    data_parallel(layer)
    assert layer.forward_scaling.scale.tolist() == [2.0**14] * 3


# ---- what is refused, and the way out ----


def _error(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as raised:
        call()
    return str(raised.value)


@on_ranks(2)
def test_refused(rank: int, size: int) -> None:
    """The errors: of weight gradients that come late, of quantized parameters in PyTorch's wrapper, of ``join``."""
    plain, errors, x = DistributedDataParallel, [], torch.ones(2, 8)
    for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
        late = minifloat.Linear(8, 8, recipe="mxfp8", name="late", **{option: True})  # type: ignore[arg-type]
        late.weight.main_grad = torch.zeros(8, 8)  # type: ignore[assignment]
        errors += [_error(lambda late=late: data_parallel(late)), _error(lambda late=late: plain(late)(x))]
        for single in (False, True):
            experts = minifloat.GroupedLinear(2, 8, 8, name="late", single_grouped_weight=single, **{option: True})  # type: ignore[arg-type]
            errors.append(_error(lambda experts=experts: data_parallel(experts)))
            names = ["weight"] if single else ["0.weight", "1.weight"]
            plain._set_params_and_buffers_to_ignore_for_model(experts, [f".{name}" for name in names] + names)
            for name in names:
                experts.get_parameter(name).main_grad = torch.zeros_like(experts.get_parameter(name))  # type: ignore[attr-defined]
            data_parallel(experts)(x, [1, 1]).sum().backward()  # as DDP has nothing to reduce of them
    with minifloat.quantized_model_init(recipe="mxfp8"):
        errors.append(_error(lambda: plain(minifloat.Linear(8, 8, recipe="mxfp8"))(x)))
    delayed = data_parallel(minifloat.Linear(8, 8, recipe="delayed"))
    with pytest.raises(ValueError) as raised, delayed.join():
        delayed(x)
    dist.barrier()
    errors = [*errors, str(raised.value)]
    assert all("Linear 'late': fuse_wgrad_accumulation and delay" in error for error in errors[:-2])
    assert len(errors) == 10 and "minifloat.distributed.data_parallel" in errors[-2]
    assert "DelayedScaling(reduce_amax=False)" in errors[-1]


@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
@on_ranks(2)
def test_gradients_reduced_by_hand(rank: int, size: int, option: str) -> None:
    """The gradient of a weight that DDP ignores, reduced by hand, and the same one by DDP."""
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    grads = []
    for options in ({option: True}, {}):
        torch.manual_seed(0)
        model = nn.Sequential(minifloat.Linear(8, 8, recipe="mxfp8", **options))  # type: ignore[arg-type]
        layer: Any = model[0]
        if options:
            layer.weight.main_grad = torch.zeros(8, 8)
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
        wrapped = data_parallel(model)  # whose hooks live as long as it does
        wrapped(data).square().mean().backward()
        if option == "delay_wgrad_compute" and options:
            layer.backward_dw()
        grad = layer.weight.main_grad if layer.weight.grad is None else layer.weight.grad
        if options:
            dist.all_reduce(grad)
            grad /= size
        grads.append(grad)
    by_hand, by_ddp = grads
    assert by_hand.any() and torch.equal(by_hand, by_ddp)


def uneven(rank: int, size: int, recipe: Any) -> Tensor:
    """All parameters after the ranks have had different numbers of batches."""
    torch.manual_seed(rank)
    model = data_parallel(minifloat.Linear(8, 8, recipe=recipe))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for _ in range(2 + 2 * rank):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("recipe", ["mxfp8", minifloat.DelayedScaling(reduce_amax=False)], ids=["mxfp8", "delayed"])
def test_join(worker_pool: Pools, recipe: Any) -> None:
    first, second = worker_pool(2).run(uneven, recipe)
    assert torch.equal(first, second)
