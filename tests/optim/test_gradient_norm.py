"""Norms and clipping of gradients that are sharded: those of the whole model, on all ranks the same bits."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from minifloat.optim.gradient_norm import clip_grad_norm_, gradient_norm
from tests.helpers.compare import same_on_all_ranks
from tests.helpers.distributed_pool import Pools, process_group


def parameters_of(grads: Sequence[tuple[Tensor, bool]], rank: int, size: int) -> list[nn.Parameter]:
    """With those gradients; a rank has its rows of those that are sharded. A bf16 one is added to a main_grad."""
    made = []
    for grad, sharded in grads:
        own = grad.tensor_split(size)[rank].clone() if sharded else grad.clone()
        p = nn.Parameter(torch.zeros_like(own))
        p.tensor_model_parallel = sharded  # type: ignore[attr-defined]
        if own.dtype == torch.bfloat16:
            p.main_grad, p.grad_added_to_main_grad = own.float(), True  # type: ignore[attr-defined]
        else:
            p.grad = own
        made.append(p)
    return [*made, nn.Parameter(torch.zeros(3))]  # and one that had no gradient


def clip(rank: int, size: int, grads: list[tuple[Tensor, bool]], limit: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    parameters = parameters_of(grads, rank, size)
    with CommDebugMode() as seen:
        norm = clip_grad_norm_(parameters, limit, process_group())
    assert seen.get_total_counts() == 1
    after = gradient_norm(iter(parameters), process_group())
    held = [p.grad if p.grad is not None else p.main_grad for p in parameters[:-1]]  # type: ignore[attr-defined]
    return norm, after, held  # type: ignore[return-value]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_gradients_of_a_sharded_model_are_clipped(size: int, limit: float, worker_pool: Pools) -> None:
    """Uneven and empty parts; each parameter counts once; all ranks have the same bits and scale alike."""
    shapes = [((7, 4), True), ((5,), False), ((1, 3), True), ((6, 6), False), ((0, 4), True)]
    grads = [(torch.randn(shape), sharded) for shape, sharded in shapes]
    grads += [(torch.randn(9, 2).bfloat16(), True), (torch.randn(4).bfloat16(), False)]
    exact = torch.cat([grad.double().flatten() for grad, _ in grads]).norm()
    norms, after, held = zip(*worker_pool(size).run(clip, grads, limit), strict=True)
    torch.testing.assert_close(same_on_all_ranks(norms).double(), exact, rtol=1e-6, atol=0)
    expected = min(float(exact), limit)
    torch.testing.assert_close(float(same_on_all_ranks(after)), expected, rtol=1e-5, atol=0)
    for index, (grad, sharded) in enumerate(grads):
        found = torch.cat([of[index] for of in held]) if sharded else same_on_all_ranks([of[index] for of in held])
        torch.testing.assert_close(found, grad.float() * (expected / float(exact)), rtol=1e-5, atol=1e-7)


def test_unsharded_clipping_is_that_of_torch() -> None:
    module = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    twin = copy.deepcopy(module)
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        theirs.grad = mine.grad.clone()
    for limit in (0.3, 1e6):
        norm = clip_grad_norm_(module.parameters(), limit)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(twin.parameters(), limit))
        for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    assert torch.equal(gradient_norm(module[0].weight), module[0].weight.grad.norm())  # type: ignore[union-attr, arg-type]
    assert gradient_norm([]) == 0 and gradient_norm([nn.Parameter(torch.zeros(2))]) == 0


def test_parts_without_their_group() -> None:
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    p.tensor_model_parallel = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"1 parameters are a rank's parts.*tp_group"):
        gradient_norm([p])


def on_two_axes(rank: int, size: int, grads: list[tuple[Tensor, bool]], limit: float) -> tuple[Tensor, list[Tensor]]:
    """Ranks (data, tensor): what tensor parallelism leaves is sharded over the data axis as DTensors, but for one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parameters = parameters_of(grads, mesh["tp"].get_local_rank(), 2)[:-1]
    for p in parameters[:-1]:
        assert p.grad is not None
        grad, p.grad = p.grad, None
        p.data = distribute_tensor(p.data, mesh["dp"], [Shard(0)])
        p.grad = distribute_tensor(grad, mesh["dp"], [Shard(0)])
    norm = clip_grad_norm_(parameters, limit, mesh["tp"])
    held = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    return norm, held  # type: ignore[return-value]


def test_two_axes_count_each_parameter_once(worker_pool: Pools) -> None:
    shapes = [((7, 4), True), ((5,), False), ((8, 3), True), ((6, 6), False)]
    grads = [(torch.randn(shape), sharded) for shape, sharded in shapes]
    exact = torch.cat([grad.double().flatten() for grad, _ in grads]).norm()
    norms, held = zip(*worker_pool(4).run(on_two_axes, grads, 0.5), strict=True)
    torch.testing.assert_close(same_on_all_ranks(norms).double(), exact, rtol=1e-6, atol=0)
    for index, (grad, sharded) in enumerate(grads):
        parts = [of[index] for of in held]
        found = torch.cat(parts[:2]) if sharded else same_on_all_ranks(parts)
        torch.testing.assert_close(found, grad * (0.5 / float(exact)), rtol=1e-5, atol=1e-7)


def of_placements(rank: int, size: int) -> Tensor:
    mesh = init_device_mesh("cpu", (size,))
    parameters = []
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        p = nn.Parameter(DTensor.from_local(torch.zeros(3, 5), mesh, [placement]))
        p.grad = DTensor.from_local(torch.full((3, 5), 1.0 + rank * (placement != Replicate())), mesh, [placement])
        parameters.append(p)
    return gradient_norm(parameters)


def test_dtensors_count_by_their_placements(worker_pool: Pools) -> None:
    norms = worker_pool(2).run(of_placements)
    torch.testing.assert_close(same_on_all_ranks(norms), torch.tensor(15.0 * (1 + 4) * 2 + 15 + 15 * 9).sqrt())
