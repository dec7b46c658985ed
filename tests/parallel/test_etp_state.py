"""Checkpoints, optimizers and copies of models whose weights are sharded for extended tensor parallelism."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import minifloat
from minifloat import (
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    quantized_model_init,
)
from minifloat.distributed import reduce_replicated
from minifloat.optim import MasterWeights, clip_grad_norm_, gradient_norm
from minifloat.parallel.state_dict import (
    SavedShard,
    load_sharded_optimizer_state_dict,
    load_sharded_state_dict,
    sharded_optimizer_state_dict,
    sharded_state_dict,
)
from tests.helpers.compare import same_on_all_ranks
from tests.helpers.distributed_pool import Pools, on_ranks, process_group
from tests.helpers.fused_model import assert_same

HIDDEN, HEADS, OUT = 24, 4, 5
Shape = tuple[int, int, int]  # ranks of data, extended tensor and tensor parallelism


def make(seed: int, shape: Shape = (1, 1, 1)) -> nn.Sequential:
    """Rows of one fused part, of several, of none; ranks without rows of the last layer; one matrix of parameters."""
    torch.manual_seed(seed)
    groups: Any = {}
    column: Any = {}
    if max(shape) > 1:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "etp", "tp"))
        column = {"tp_mesh": mesh["tp"], "etp_group": mesh["etp"]}
        groups = column | {"set_parallel_mode": True}
    attention: Any = {"attention_dropout": 0.0, **groups}
    return nn.Sequential(
        MultiheadAttention(HIDDEN, HEADS, **attention),
        MultiheadAttention(HIDDEN, HEADS, fuse_qkv_params=True, input_layernorm=True, **attention),
        LayerNormMLP(HIDDEN, 26, activation="swiglu", **groups),
        minifloat.LayerNorm(HIDDEN),
        Linear(HIDDEN, OUT, parallel_mode="row" if groups else None, **column),
    )


def run(model: nn.Module, shape: Shape, seed: int) -> Tensor:
    """Forward and backward of data of each rank that has others; tensor-parallel ranks have parts of the last input."""
    size = shape[2]
    replica = dist.get_rank() // size if max(shape) > 1 else 0
    rank = dist.get_rank() % size if size > 1 else 0
    torch.manual_seed(100 * seed + replica)
    dtype = next(model.parameters()).dtype
    x, dy = torch.randn(3, 2, HIDDEN, dtype=dtype), torch.randn(3, 2, OUT, dtype=dtype)
    with minifloat.autocast(recipe="current"):
        for layer in model.children():
            x = layer(x.chunk(size, -1)[rank] if isinstance(layer, Linear) else x)
    x.backward(dy)
    return x.detach()


def set_gradients(model: nn.Module, other: nn.Module) -> None:
    for p, values in zip(model.parameters(), other.parameters(), strict=True):
        p.grad = values.detach().clone()


def start(seed: int, shape: Shape, master: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(seed, shape)
    if master:
        model = model.to(torch.bfloat16)
        return model, MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.01 * seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * seed)


def trained(seed: int, shape: Shape = (1, 1, 1), master: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After a step, with gradients that are the parameters of another model: the same values on any ranks."""
    model, optimizer = start(seed, shape, master)
    set_gradients(model, start(seed + 1, shape, master)[0])
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {
        f"{name} of {key}": value
        for key, p in model.named_parameters()
        for name, value in optimizer.state[p].items()
    }  # fmt: skip
    grads = {f"gradient of {key}": p.grad for key, p in model.named_parameters() if p.grad is not None}
    return {key: value.detach().clone() for key, value in (model.state_dict() | state | grads).items()}


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": sharded_state_dict(model), "optimizer": sharded_optimizer_state_dict(model, optimizer)}


def save(rank: int, size: int, folder: str, shape: Shape, master: bool = False) -> None:
    dcp.save(states(*trained(1, shape, master)), checkpoint_id=folder)


def load(rank: int, size: int, folder: str, shape: Shape, master: bool = False) -> None:
    """Loaded state is that of a model that was trained here, to the bit, and so is a step that follows."""
    model, optimizer = start(5, shape, master)
    run(model, shape, 3)  # casts that must not be used after loading
    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    load_sharded_state_dict(model, state["model"])
    load_sharded_optimizer_state_dict(model, optimizer, state["optimizer"])
    other, other_optimizer = trained(1, shape, master)
    optimizer.zero_grad()
    for _ in range(2):
        assert_same(everything(model, optimizer), everything(other, other_optimizer))
        assert torch.equal(run(model, shape, 4), run(other, shape, 4))
        optimizer.step()
        other_optimizer.step()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_master_weights(worker_pool: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    worker_pool(4).run(save, folder, (1, 4, 1), True)
    worker_pool(4).run(load, folder, (1, 2, 2), True)
    load(0, 1, folder, (1, 1, 1), True)


def _load_in_place(rank: int, size: int, folder: str) -> None:
    shape = (1, size, 1)
    save(rank, size, folder, shape)
    model, wanted = make(5, shape), run(trained(1, shape)[0], shape, 4)
    run(model, shape, 3)
    dcp.load({"model": sharded_state_dict(model)}, checkpoint_id=folder)
    assert torch.equal(run(model, shape, 4), wanted)


def test_loading_into_the_model_alone(worker_pool: Pools, tmp_path: Path) -> None:
    """DCP writes to the memory of the model; a rank without rows notices that others have theirs anew."""
    worker_pool(4).run(_load_in_place, str(tmp_path))


@pytest.mark.parametrize("shape", [(1, 4, 1), (1, 2, 2)])
@on_ranks(4)
def test_whole_tensors_are_cut(rank: int, size: int, shape: Shape) -> None:
    """A state with whole weights, as every rank may have it, goes straight into a model of rows."""
    wanted = make(1, shape).state_dict()
    model = make(5, shape)
    run(model, shape, 3)
    load_sharded_state_dict(model, sharded_state_dict(make(1)))  # plain tensors
    assert_same(dict(model.state_dict()), dict(wanted))
    reference = run(make(1, shape), shape, 4)
    assert torch.equal(run(model, shape, 4), reference)
    if shape[2] == 1:
        for assign in (False, True):
            model = make(5, shape)
            run(model, shape, 3)
            whole = make(1).state_dict()
            before = dict(whole)
            model.load_state_dict(whole, assign=assign)
            assert all(whole[key] is value for key, value in before.items())
            assert_same(dict(model.state_dict()), dict(wanted))
            assert torch.equal(run(model, shape, 4), reference)
            for p in model.parameters():  # of its own, not a view of the whole
                assert p.untyped_storage().nbytes() == p.nbytes
    model.load_state_dict(wanted)
    assert torch.equal(run(model, shape, 4), reference)
    key = "4.weight"
    with pytest.raises(RuntimeError, match=r"size mismatch for 4\.weight"):
        model.load_state_dict(wanted | {key: torch.zeros(OUT + 1, HIDDEN)})
    with pytest.raises(ValueError, match=r"4\.weight is \(6, 24\) and \(5, 24\) is needed"):
        load_sharded_state_dict(model, sharded_state_dict(make(1)) | {key: torch.zeros(OUT + 1, HIDDEN)})
    others = sharded_state_dict(make(1, (1, 4, 1) if shape[2] > 1 else (1, 2, 2)))
    with pytest.raises(ValueError, match=r"0\.qkv\.\w+ is .* and this rank has .*own sharded_state_dict"):
        load_sharded_state_dict(model, others)


def _save_async(rank: int, size: int, folder: str) -> None:
    model, optimizer = trained(1, (1, 4, 1))
    aside = dist.new_group(backend="gloo")
    written = dcp.async_save(states(model, optimizer), checkpoint_id=folder, process_group=aside)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    written.result()  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_async_save(worker_pool: Pools, tmp_path: Path) -> None:
    worker_pool(4).run(_save_async, str(tmp_path))
    load(0, 1, str(tmp_path), (1, 1, 1))


def test_a_saved_shard_is_copied_and_computes_nothing() -> None:
    shard = SavedShard.of(torch.arange(6.0).view(2, 3), (1, 0), (7, 3))
    buffer = io.BytesIO()
    torch.save({"weight": shard}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["weight"]
    for other in (copy.deepcopy(shard), pickle.loads(pickle.dumps(shard)), shard.clone(), shard.cpu(), loaded):
        assert type(other) is SavedShard and other.shape == (7, 3) and other.offsets == (1, 0)
        assert torch.equal(other.local, shard.local)
    assert "(2, 3) at (1, 0)" in repr(shard)
    with pytest.raises(TypeError, match=r"compute with its \.local"):
        shard.add(1)


# ---- optimizers ----


def _gathered(t: Tensor) -> Tensor:
    """The rows of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, t.detach())
    return torch.cat(found)


def _rows_of(layer: Linear) -> dict[Tensor, tuple[int, slice]]:
    return {layer._weight(name): extent for name, extent in layer._etp.rows.extents().items()}


@pytest.mark.parametrize("name", [pytest.param("foreach", marks=pytest.mark.slow), "fused", "master", "remainder"])
@on_ranks(4)
def test_optimizers_step_rows(rank: int, size: int, name: str) -> None:
    """Two steps of rows equal those of the whole model with the gathered gradients."""
    makers: Any = {
        "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        "master": lambda p: MasterWeights(p, torch.optim.AdamW, lr=0.1),
        "remainder": lambda p: MasterWeights(p, torch.optim.AdamW, lr=0.1, master="bf16+remainder"),
    }
    dtype = torch.bfloat16 if name in ("master", "remainder") else torch.float32
    whole, model = make(1).to(dtype), make(1, (1, size, 1)).to(dtype)
    reduce_replicated(model, process_group())
    optimizers = [makers[name](each.parameters()) for each in (whole, model)]
    rows = {p for layer in model.modules() if isinstance(layer, Linear) for p in _rows_of(layer)}
    rtol = 2e-6 if name == "fused" else 0  # its kernel rounds the last elements of a tensor in another order
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(3, 2, HIDDEN, dtype=dtype)
        with minifloat.autocast(recipe="current"):
            y, reference = model(x), whole(x).detach()
        assert torch.equal(y, reference)  # a step casts rows anew on all ranks, on those without rows too
        y.float().square().sum().backward()
        for p, own in zip(whole.parameters(), model.parameters(), strict=True):
            p.grad = _gathered(own.grad) if own in rows else own.grad
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for p, own in zip(whole.parameters(), model.parameters(), strict=True):
            stepped = _gathered(own) if own in rows else own.detach()
            torch.testing.assert_close(p.detach(), stepped, rtol=rtol, atol=0)
            if rtol:
                p.data.copy_(stepped)
    again = makers[name](model.parameters())
    again.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    for p in model.parameters():
        assert_same(dict(again.state[p]), dict(optimizers[1].state[p]))


# ---- norms ----


def _own(p: Tensor, whole: Tensor, model: nn.Module, tp: Any) -> Tensor:
    """This rank's part of the gradient of a whole parameter."""
    if getattr(p, "tensor_model_parallel", False):
        parts = whole.split(list(p.partition_parts), p.partition_dim)  # type: ignore[attr-defined]
        cut = [part.chunk(tp.size(), p.partition_dim)[tp.get_local_rank()] for part in parts]  # type: ignore[attr-defined]
        whole = torch.cat(cut, p.partition_dim)  # type: ignore[attr-defined]
    rows = {q: own for m in model.modules() if isinstance(m, Linear) for q, (_, own) in _rows_of(m).items()}
    return whole[rows[p]] if p in rows else whole


def _norm_of_gradients(rank: int, size: int, shape: Shape, main_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of gradients of the whole model, of which every rank has its parts."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "etp", "tp"))
    expert = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicas", "eetp"))
    model, whole = make(1, shape), make(2)
    model.append(Linear(HIDDEN, 7, etp_group=expert["eetp"]))
    whole.append(Linear(HIDDEN, 7))
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        q.grad = torch.randn(q.shape)
        own = _own(p, q.grad, model, mesh["tp"]).clone()
        if main_grad and getattr(p, "etp_group", None) is not None:
            p.main_grad, p.grad_added_to_main_grad = own, True  # type: ignore[attr-defined]
        else:
            p.grad = own
    norm = clip_grad_norm_(model.parameters(), 0.5, mesh["tp"])
    wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert q.grad is not None
        held = p.grad if p.grad is not None else p.main_grad  # type: ignore[attr-defined]
        torch.testing.assert_close(held, _own(p, q.grad, model, mesh["tp"]), rtol=1e-5, atol=1e-8)
    return norm, gradient_norm(model.parameters(), mesh["tp"]), wanted


@pytest.mark.parametrize(("shape", "main_grad"), [((1, 4, 1), True), ((1, 2, 2), False), ((2, 2, 1), True)])
def test_norms_count_each_parameter_once(worker_pool: Pools, shape: Shape, main_grad: bool) -> None:
    """Rows of two groups of other ranks, tensor-parallel parts of rows, empty ones: the same bits on all ranks."""
    norms, after, wanted = zip(*worker_pool(4).run(_norm_of_gradients, shape, main_grad), strict=True)
    torch.testing.assert_close(same_on_all_ranks(norms), wanted[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(float(same_on_all_ranks(after)), 0.5, rtol=1e-5, atol=0)


def _norm_after_backward(rank: int, size: int) -> tuple[Tensor, Tensor]:
    shape = (2, 2, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "etp", "tp"))
    torch.manual_seed(1)
    layers = [(HIDDEN, 31), (31, 9)]
    model = nn.Sequential(*[Linear(k, n, etp_group=mesh["etp"]) for k, n in layers])
    torch.manual_seed(1)
    whole = nn.Sequential(*[Linear(k, n) for k, n in layers])
    reduce_replicated(model, [mesh["etp"]])
    torch.manual_seed(rank)
    x, dy = torch.randn(6, HIDDEN), torch.randn(6, 9)
    for each in (model, whole):
        each(x).backward(dy)
    for p in whole.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)
        p.grad.div_(size)
    for p in model.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad, group=mesh["dp"].get_group())
        p.grad.div_(2)
    return gradient_norm(model.parameters()), gradient_norm(whole.parameters())


def test_norm_after_backward(worker_pool: Pools) -> None:
    """That of the unsharded model with gradients averaged over all data."""
    norms, wanted = zip(*worker_pool(4).run(_norm_after_backward), strict=True)
    torch.testing.assert_close(same_on_all_ranks(norms), wanted[0], rtol=1e-6, atol=0)


# ---- copies ----


def _quantized(seed: int, recipe: str) -> nn.Sequential:
    torch.manual_seed(seed)
    with quantized_model_init(recipe=recipe):
        return nn.Sequential(*[Linear(k, n, etp_group=process_group()) for k, n in ((HIDDEN, 40), (40, OUT))])


def _outputs(model: nn.Module, rank: int) -> list[Tensor]:
    """Y and the gradients of a pass; a model without stale casts gives those of its parameters."""
    torch.manual_seed(rank)
    dtype = next(model.parameters()).dtype
    x = torch.randn(3, 2, HIDDEN, dtype=dtype, requires_grad=True)
    with minifloat.autocast(recipe="current"):
        y = model(x)
    model.zero_grad()
    y.sum().backward()
    assert x.grad is not None
    grads = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in grads)
    return [y.detach(), x.grad, *[grad.clone() for grad in grads if grad is not None]]


def _same_outputs(model: nn.Module, other: nn.Module, rank: int) -> None:
    for p in model.parameters():
        assert hasattr(p, "etp_group") == any(p in _rows_of(m) for m in model.modules() if isinstance(m, Linear))
    for one, two in zip(_outputs(model, rank), _outputs(other, rank), strict=True):
        assert torch.equal(one, two)


def _saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


@pytest.mark.parametrize("recipe", [None, "mxfp8", pytest.param("current", marks=pytest.mark.slow)])
@on_ranks(2)
def test_copies_and_moves(rank: int, size: int, recipe: str | None) -> None:
    """deepcopy, pickle, torch.save, dtypes, ``to_empty``, assigned parameters: a pass is that of a new model."""
    shape = (1, size, 1)

    def fresh(seed: int) -> nn.Sequential:
        return make(seed, shape) if recipe is None else _quantized(seed, recipe)

    model = fresh(1)
    _outputs(model, rank)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), _saved(model)):
        _same_outputs(copied, fresh(1), rank)
        with torch.no_grad():
            for p, q in zip(copied.parameters(), fresh(2).parameters(), strict=True):
                p.copy_(q)
        _same_outputs(copied, fresh(2), rank)
    _same_outputs(model, fresh(1), rank)
    for assign in (False, True):
        model.load_state_dict(_saved(fresh(3 + assign).state_dict()), assign=assign)
        _same_outputs(model, fresh(3 + assign), rank)
    if recipe is not None:
        return
    other = fresh(4).to(torch.bfloat16)
    _same_outputs(model.to(torch.bfloat16), other, rank)
    with torch.device("meta"):
        empty = fresh(1)
    empty = empty.to_empty(device="cpu")
    for seed in (5, 6):
        empty.load_state_dict(fresh(seed).state_dict())
        _same_outputs(empty, fresh(seed), rank)
