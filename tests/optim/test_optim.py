"""Master weights against the same optimizer on fp32 parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import minifloat
from minifloat.delayed import AmaxHistory
from minifloat.formats import Format
from minifloat.optim import MasterWeights
from minifloat.optim.master_parameter import Master, join, split
from minifloat.quantizer import Quantizer
from minifloat.recipe import DelayedScaling
from minifloat.tensor import QuantizedTensor, base, quantize
from tests.helpers.distributed_pool import Pools

QUANTIZERS = {
    "current": Quantizer(Format()),
    "tiles": Quantizer(Format(block=128, tile=True, scale_rule="pow2")),
    "mxfp8": Quantizer(Format(block=32, scale_rule="e8m0")),
    "nvfp4": Quantizer(Format("e2m1", 16, tile=True, scale_rule="two_level")),
    "delayed": Quantizer(Format(scale_rule="given")),
}
KINDS = [torch.float32, torch.bfloat16, torch.float16, *QUANTIZERS]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.1, foreach=False),
    "adamw_foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


def parameter(values: Tensor, kind: Any) -> nn.Parameter:
    """fp32 ``values`` in a dtype, or quantized (with a logical dtype of bf16)."""
    if isinstance(kind, torch.dtype):
        return nn.Parameter(values.to(kind, copy=True))
    scale = torch.tensor([50.0]) if kind == "delayed" else None
    return nn.Parameter(quantize(values.bfloat16(), QUANTIZERS[kind], scale=scale))


def parameters(kinds: list[Any] = KINDS) -> list[nn.Parameter]:
    shapes = [(37, 53), (130, 70), (16,), (0, 5), (3, 4, 16)]
    return [parameter(torch.randn(shapes[i % len(shapes)]), kind) for i, kind in enumerate(kinds)]


def exact(t: Tensor) -> Tensor:
    t = t.detach()
    return t.dequantize(torch.float32) if isinstance(t, QuantizedTensor) else t.float()


def shadows(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(exact(p).clone()) for p in params]


def give_gradients(*lists: list[nn.Parameter], seed: int = 0) -> None:
    """The same gradients, of the dtype of the first list's parameters, to each list."""
    draws = torch.Generator().manual_seed(seed)
    for same in zip(*lists, strict=True):
        grad = torch.randn(same[0].shape, generator=draws).to(same[0].dtype)
        for p in same:
            p.grad = grad.to(p.dtype)


def check_rounded(params: list[nn.Parameter], masters: list[nn.Parameter]) -> None:
    """Each parameter is its master rounded once, bit for bit."""
    for p, master in zip(params, masters, strict=True):
        if isinstance(p, QuantizedTensor):
            wanted = quantize(master.detach(), p.quantizer, scale=p.scale)
            mine, theirs = p._buffers(), wanted._buffers()
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
        else:
            assert torch.equal(p, master.to(p.dtype))


def masters_of(optimizer: MasterWeights) -> list[Tensor]:
    """The fp32 value of every parameter, in order."""
    saved = optimizer.state_dict()["state"]
    found = []
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        held = saved.get(i, {})
        value = join(p.detach(), held["remainder"]) if "remainder" in held else p.detach()
        found.append(held.get("master", value))
    return found


def tensors(tree: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def same(a: Any, b: Any) -> bool:
    a, b = tensors(a), tensors(b)
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- master weights ----


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_fp32_parameters(name: str) -> None:
    params = parameters()
    plain = shadows(params)
    optimizer, reference = MasterWeights(params, OPTIMIZERS[name]), OPTIMIZERS[name](plain)
    for step in range(4):
        give_gradients(params, plain, seed=step)
        optimizer.step()
        reference.step()
        check_rounded(params, plain)
    assert same(masters_of(optimizer), [p.detach() for p in plain])
    inner = [{k: v for k, v in s.items() if k != "master"} for s in optimizer.state_dict()["state"].values()]
    assert same(inner, list(reference.state_dict()["state"].values()))
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in params)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad"])
def test_remainders_are_the_masters(name: str) -> None:
    params = parameters([torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, "mxfp8"])
    plain = shadows(params)
    optimizer = MasterWeights(params, OPTIMIZERS[name], master="bf16+remainder")
    reference = OPTIMIZERS[name](plain)
    for step in range(4):
        give_gradients(params, plain, seed=step)
        optimizer.step()
        reference.step()
        held = [p.numel() for group in optimizer.inner.param_groups for p in group["params"]]
        assert held == [0, params[1].numel(), 0, 0, params[4].numel()]
        assert same(masters_of(optimizer), [p.detach() for p in plain])
        assert all(torch.equal(params[i], split(plain[i].detach())[0]) for i in (0, 2, 3))
    assert all(
        s["remainder"].dtype == torch.int16 for i, s in optimizer.state_dict()["state"].items() if i in (0, 2, 3)
    )


def test_split_keeps_every_bit() -> None:
    high = torch.randint(-(1 << 15), 1 << 15, (4096,), dtype=torch.int32) << 16
    edges = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = (high[:, None] + edges).view(torch.float32)
    special = torch.tensor([0.0, -0.0, 1e-45, torch.inf, -torch.inf, torch.finfo(torch.float32).max])
    for x in (values, special, torch.randn(3, 5).t(), torch.randn(()), torch.empty(0, 4)):
        x = x[~x.isnan()] if x.dim() else x
        bf16, remainder = split(x)
        assert torch.equal(join(bf16, remainder).view(torch.int32), x.contiguous().view(torch.int32))
        nearest = x.bfloat16()
        tie = x.contiguous().view(torch.int32) & 0xFFFF == 0x8000
        assert torch.equal(bf16[~tie], nearest[~tie])
        assert torch.equal((bf16.double() - x.double()).abs()[x.isfinite() & bf16.isfinite()],
                           (nearest.double() - x.double()).abs()[x.isfinite() & bf16.isfinite()])  # fmt: skip
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x400000], dtype=torch.int32).view(torch.float32)
    assert split(nans)[0].isnan().all() and join(*split(nans)).isnan().all()


def test_one_cast_and_one_copy_write_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    optimizer = MasterWeights(params, torch.optim.SGD, lr=0.1)
    give_gradients(params)
    lengths: list[int] = []
    cast = base.cast_all
    monkeypatch.setattr(base, "cast_all", lambda xs, *args, **kw: lengths.append(len(xs)) or cast(xs, *args, **kw))
    optimizer.step()
    assert lengths == [len(QUANTIZERS)]


def test_own_writes_are_not_taken_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer keeps of its weight ends with each step, and no step looks at elements for what others wrote."""
    monkeypatch.setattr(Master, "_rounds_to", lambda self, now: pytest.fail("looked at elements"))
    layer = minifloat.Linear(32, 48, bias=False, dtype=torch.bfloat16, recipe="current")
    optimizer = MasterWeights(layer.parameters(), torch.optim.AdamW, lr=0.1, fused=True)
    x = torch.randn(20, 32, dtype=torch.bfloat16)
    for _ in range(3):
        layer(x, is_first_microbatch=True).sum().backward()
        optimizer.step()
        assert torch.equal(layer(x, is_first_microbatch=False), layer(x))


def test_groups_have_their_own_options_and_schedulers_set_them() -> None:
    params = parameters([torch.bfloat16, "current", torch.float32, "mxfp8"])
    plain = shadows(params)

    def groups(ps: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": ps[:2], "lr": 0.5}, {"params": ps[2:3], "weight_decay": 0.3, "name": "rest"}]

    optimizer = MasterWeights(groups(params), torch.optim.SGD, lr=0.1, momentum=0.5)
    reference = torch.optim.SGD(groups(plain), lr=0.1, momentum=0.5)
    for opt, ps in ((optimizer, params), (reference, plain)):
        opt.add_param_group({"params": ps[3:], "lr": 0.2})
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.4, total_steps=6, cycle_momentum=True)
        for opt in (optimizer, reference)
    ]
    for step in range(5):
        give_gradients(params, plain, seed=step)
        for opt, scheduler in zip((optimizer, reference), schedulers, strict=True):
            opt.step()
            scheduler.step()
        check_rounded(params, plain)
    strip = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert strip == [{k: v for k, v in g.items() if k != "params"} for g in reference.param_groups]
    assert optimizer.defaults == reference.defaults


def test_closures_see_the_parameters_of_the_latest_masters() -> None:
    """LBFGS evaluates many times a step; with one parameter in fp32's reach of bf16 it must go as in fp32."""
    target = torch.randn(8, 8)
    p, plain = nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(8, 8))
    seen: list[Tensor] = []

    def closure(opt: torch.optim.Optimizer, weight: nn.Parameter, track: bool) -> Tensor:
        opt.zero_grad()
        rounded = weight.bfloat16() if not track else weight
        loss = (rounded.float() - target).square().sum()
        loss.backward()
        if track:
            seen.append(weight.detach().clone())
        return loss

    optimizer = MasterWeights([p], torch.optim.LBFGS, max_iter=4)
    reference = torch.optim.LBFGS([plain], max_iter=4)
    for _ in range(2):
        losses = (
            optimizer.step(lambda: closure(optimizer, p, True)),
            reference.step(lambda: closure(reference, plain, False)),
        )
        assert losses[0] == losses[1] and torch.equal(p, plain.bfloat16())
    assert len({tuple(s.flatten().tolist()) for s in seen}) > 2


def test_closures_start_main_grad_anew() -> None:
    """What an evaluation sums up is not counted in the next one, with and without a master."""
    target = torch.randn(8, 8)
    params = [nn.Parameter(torch.zeros(8, 8, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    plain = shadows(params)
    for p in params:
        p.main_grad = torch.zeros(8, 8)

    def closure(opt: torch.optim.Optimizer, weights: list[nn.Parameter]) -> Tensor:
        opt.zero_grad(set_to_none=False)
        loss = torch.zeros(())
        for p in weights:
            error = p.detach().bfloat16().float() - target
            if weights is params:
                p.main_grad.add_(2 * error)
                p.grad_added_to_main_grad = True
            else:
                p.grad = 2 * error
            loss += error.square().sum()
        return loss

    optimizer, reference = MasterWeights(params, torch.optim.LBFGS, max_iter=4), torch.optim.LBFGS(plain, max_iter=4)
    for _ in range(2):
        losses = optimizer.step(lambda: closure(optimizer, params)), reference.step(lambda: closure(reference, plain))
        assert losses[0] == losses[1]
        check_rounded(params, plain)


@pytest.mark.parametrize("cls", [torch.optim.Rprop, torch.optim.ASGD])
def test_masters_that_change_at_a_rate_of_zero_are_written(cls: Any) -> None:
    params = parameters([torch.bfloat16, "current", "delayed", torch.float32])
    plain = shadows(params)
    pairs = [(MasterWeights(params, cls, lr=0.05), params), (cls(plain, lr=0.05), plain)]
    for step in range(4):
        for optimizer, _ in pairs:
            optimizer.param_groups[0]["lr"] = 0.05 if step < 3 else 0.0  # the last step of CosineAnnealingLR
        give_gradients(params, plain, seed=step)
        for optimizer, _ in pairs:
            optimizer.step()
    check_rounded(params, plain)


def test_a_group_at_a_rate_of_zero_holds_up_no_other() -> None:
    params = parameters([torch.bfloat16, "current", "delayed", torch.bfloat16])
    plain = shadows(params)
    resting, moving = params[3], params[:3]
    before = resting.detach().clone()
    give_gradients(params, plain)
    MasterWeights([{"params": [resting], "lr": 0.0}, {"params": moving}], torch.optim.SGD, lr=0.1).step()
    torch.optim.SGD(plain[:3], lr=0.1).step()
    check_rounded(moving, plain[:3])
    assert torch.equal(resting, before)


def test_tied_frozen_and_unfrozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    model[1].weight = model[0].weight
    frozen = model[2].weight.requires_grad_(False)
    optimizer = MasterWeights(model.parameters(), torch.optim.Adagrad, lr=0.1)
    before = frozen.clone()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 8).bfloat16()).square().sum().backward()
        optimizer.step()

    step()
    assert torch.equal(frozen, before) and frozen not in optimizer._masters
    assert sum("master" in s for s in optimizer.state_dict()["state"].values()) == 4
    frozen.requires_grad_(True)
    step()
    assert not torch.equal(frozen, before)
    assert optimizer.state[frozen]["master"].dtype == optimizer.state[frozen]["sum"].dtype == torch.float32
    fresh = MasterWeights(copy.deepcopy(model).requires_grad_(False).parameters(), torch.optim.Adagrad, lr=0.1)
    fresh.load_state_dict(optimizer.state_dict())
    assert same(masters_of(fresh), masters_of(optimizer))


def test_masters_start_from_the_values_before_the_first_cast() -> None:
    init = torch.randn(64, 64)
    p = parameter(init, "mxfp8")
    p.set_high_precision_init_val(init)
    optimizer = MasterWeights([p], torch.optim.SGD, lr=0.1)
    assert torch.equal(masters_of(optimizer)[0], init) and p.get_high_precision_init_val() is None
    assert torch.equal(masters_of(MasterWeights([p], torch.optim.SGD, lr=0.1))[0], exact(p))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, "current", "nvfp4", "delayed"])
def test_what_others_write_is_taken_over(kind: Any) -> None:
    """Loading a model after the optimizer was made must not be undone by the next step."""
    p = parameter(torch.randn(64, 64), kind)
    optimizer = MasterWeights([p], torch.optim.SGD, lr=0.1)
    give_gradients([p])
    optimizer.step()
    master = masters_of(optimizer)[0].clone()
    assert not torch.equal(master, exact(p))
    if kind == "delayed":
        p.scale.mul_(1.1)  # as an update of the layer's scales does
    with torch.no_grad():
        p.copy_(p.detach().clone())  # a write that changes nothing
    p.grad = torch.zeros(64, 64, dtype=p.dtype)
    optimizer.step()
    assert torch.equal(masters_of(optimizer)[0], master)
    before = exact(p)
    with torch.no_grad():
        p[:32] = p[:32] * -0.5
    wanted = torch.where(exact(p) == before, master, exact(p))
    assert not torch.equal(wanted, master)
    optimizer.step()
    assert torch.equal(masters_of(optimizer)[0], wanted)
    check_rounded([p], [nn.Parameter(wanted)])


@pytest.mark.parametrize("how", ["fill", "load", "load_optimizer", "deepcopy"])
def test_what_others_write_goes_together_with_remainders(how: str) -> None:
    """Zeros beside remainders of either sign, and other values: no NaN, and masters that round to what was written."""
    p = parameter(torch.randn(8, 512), torch.bfloat16)
    optimizer = MasterWeights([p], torch.optim.SGD, lr=0.1, master="bf16+remainder")
    for step in range(3):
        give_gradients([p], seed=step)
        optimizer.step()
    written = torch.randn(8, 512).bfloat16()
    written[0], written[1], written[2], written[3] = 0.0, -0.0, 2.0, -(2.0**-130)
    written[4] = p[4].detach()  # these keep their masters
    before = masters_of(optimizer)[0].clone()
    remainder = optimizer.state[p]["remainder"].clone()
    assert all((remainder[:4] < 0).any(1)) and all((remainder[:4] > 0).any(1))
    with torch.no_grad():
        if how == "fill":
            for row, values in enumerate(written):
                p[row].copy_(values)
        elif how == "load":
            nn.ParameterList([p]).load_state_dict({"0": written})
        elif how == "load_optimizer":  # its state alone, for a model of other values
            state = optimizer.state_dict()
            p = nn.Parameter(written.clone())
            optimizer = MasterWeights([p], torch.optim.SGD, lr=0.1, master="bf16+remainder")
            optimizer.load_state_dict(state)
        else:
            p.copy_(written)
            p, optimizer = copy.deepcopy((p, optimizer))
    p.grad = torch.zeros_like(p)
    optimizer.step()
    master = masters_of(optimizer)[0]
    assert torch.equal(p.view(torch.int16), written.view(torch.int16))
    assert torch.equal(split(master)[0].view(torch.int16), written.view(torch.int16))
    assert master[:2].abs().max() < 1e-40 and torch.equal(master[4], before[4])
    assert torch.equal(optimizer.state[p]["remainder"][2:], remainder[2:])
    for _ in range(2):
        give_gradients([p], seed=9)
        optimizer.step()
    assert p.grad is not None
    torch.testing.assert_close(masters_of(optimizer)[0], master - 2 * 0.1 * p.grad.float())


def test_main_grad_is_the_gradient() -> None:
    kinds = [torch.bfloat16, "current", torch.float32, torch.bfloat16]
    params = parameters(kinds)
    plain = shadows(params)
    optimizer = MasterWeights(params, torch.optim.SGD, lr=0.1)
    reference = torch.optim.SGD(plain, lr=0.1)
    for p, q in zip(params, plain, strict=True):
        p.main_grad, p.grad_added_to_main_grad = torch.randn(p.shape), True
        q.grad = p.main_grad.clone()
    params[0].grad = torch.ones_like(params[0])
    plain[0].grad += 1  # a tied weight: both are parts of its gradient
    optimizer.step()
    reference.step()
    check_rounded(params, plain)
    assert params[2].grad is None
    optimizer.zero_grad()
    assert not any(p.grad_added_to_main_grad or p.main_grad.any() for p in params)
    before = [exact(p) for p in params]
    optimizer.step()
    assert same(before, [exact(p) for p in params])


def test_main_grad_of_a_layer() -> None:
    layer = minifloat.Linear(32, 16, bias=False, recipe="current", fuse_wgrad_accumulation=True)
    other = copy.deepcopy(layer)
    other.fuse_wgrad_accumulation = False
    layer.weight.main_grad = torch.zeros(16, 32)
    optimizers = [MasterWeights(each.parameters(), torch.optim.AdamW, lr=0.1) for each in (layer, other)]
    for _ in range(3):
        x = torch.randn(8, 32)
        for each, optimizer in zip((layer, other), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    assert layer.weight.grad is None and torch.equal(layer.weight, other.weight)


def test_hooks_run() -> None:
    params = parameters([torch.bfloat16])
    optimizer = MasterWeights(params, torch.optim.SGD, lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(f"note {state.pop('note')}"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    give_gradients(params)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post", "note 1", "loaded"]


# ---- state ----


class Net(nn.Module):
    """Quantized, bf16 and fp32 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(33, 48)
        self.first.weight = parameter(self.first.weight.detach(), "current")
        self.second = nn.Linear(48, 8).bfloat16()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(F.linear(x, self.first.weight.dequantize(torch.float32), self.first.bias))
        return self.norm(self.second(hidden.bfloat16()).float())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        draws = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        loss = (model(torch.randn(16, 33, generator=draws)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


INNER = {"adamw": partial(torch.optim.AdamW, lr=0.05), "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9)}
MASTERS = ["fp32", "bf16+remainder"]


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_resuming_is_going_on(name: str, master: Any, first: str) -> None:
    model = Net()
    optimizer = MasterWeights(model.parameters(), INNER[name], master=master)
    train(model, optimizer, range(3))
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    wanted = train(model, optimizer, range(3, 6))

    torch.manual_seed(7)
    resumed = Net()
    again = MasterWeights(resumed.parameters(), INNER[name], master=master)
    for part in ("model", "optimizer") if first == "model" else ("optimizer", "model"):
        (resumed if part == "model" else again).load_state_dict(saved[part])
    assert train(resumed, again, range(3, 6)) == wanted
    assert same(masters_of(again), masters_of(optimizer))
    assert same(again.state_dict(), optimizer.state_dict())


def test_a_remainder_that_is_loaded_while_frozen_stays() -> None:
    model, resumed = Net(), Net().requires_grad_(False)
    make = partial(MasterWeights, optimizer_class=torch.optim.SGD, lr=1e-4, master="bf16+remainder")
    optimizer, again = make(model.parameters()), make(resumed.parameters())
    train(model, optimizer, range(3))
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(through_file(optimizer.state_dict()))
    resumed.requires_grad_(True)
    assert train(resumed, again, range(3, 6)) == train(model, optimizer, range(3, 6))
    assert same(masters_of(again), masters_of(optimizer))


def test_loading_writes_the_parameters() -> None:
    model, other = Net(), Net()
    optimizers = [MasterWeights(m.parameters(), torch.optim.AdamW, lr=0.05) for m in (model, other)]
    train(model, optimizers[0], range(2))
    saved = through_file(optimizers[0].state_dict())
    optimizers[1].load_state_dict(saved)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(exact(p), exact(q)) or p.dtype == torch.float32, name
    train(other, optimizers[1], range(2))  # the loaded dict is not written to
    assert same(saved, through_file(saved)) and not same(saved, optimizers[1].state_dict())


def test_state_before_the_first_step() -> None:
    model = Net()
    init = torch.randn(48, 33)
    model.first.weight.quantize_(init).set_high_precision_init_val(init)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.05)
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    wanted = train(model, optimizer, range(2))
    resumed = Net()
    again = MasterWeights(resumed.parameters(), torch.optim.AdamW, lr=0.05)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert train(resumed, again, range(2)) == wanted


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_resuming_under_delayed_scaling(first: str) -> None:
    """The scale that the codes were cast with is no longer that of the layer when the next step comes."""

    def make() -> tuple[nn.Module, MasterWeights]:
        with minifloat.quantized_model_init(recipe="delayed", preserve_high_precision_init_val=True):
            model = nn.Sequential(minifloat.Linear(33, 64, recipe="delayed"), nn.Tanh(), nn.Linear(64, 4))
        return model, MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.05)

    model, optimizer = make()
    train(model, optimizer, range(4))
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    wanted = train(model, optimizer, range(4, 7))
    torch.manual_seed(7)
    resumed, again = make()
    for part in ("model", "optimizer") if first == "model" else ("optimizer", "model"):
        (resumed if part == "model" else again).load_state_dict(saved[part])
    assert train(resumed, again, range(4, 7)) == wanted
    assert same(masters_of(again), masters_of(optimizer))


# ---- GradScaler ----


def delayed_model() -> nn.Sequential:
    recipe = DelayedScaling(amax_history_len=8)
    return nn.Sequential(minifloat.Linear(32, 48, recipe=recipe), nn.GELU(), minifloat.Linear(48, 16, recipe=recipe))


def histories(model: nn.Module) -> list[AmaxHistory]:
    return [module for module in model.modules() if isinstance(module, AmaxHistory)]


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_that_overflowed_changes_nothing(
    dtype: torch.dtype, in_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minifloat.optim.master_weights.capturing", lambda: in_graph)
    model = delayed_model().to(dtype)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.01, fused=in_graph)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 32, dtype=dtype)).float().square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        step(1.0)
    before = copy.deepcopy((list(model.parameters()), optimizer.state_dict()["state"]))
    scales = [h.scale.clone() for h in histories(model)]
    step(torch.inf)
    assert scaler.get_scale() == 512.0
    assert same(before, (list(model.parameters()), optimizer.state_dict()["state"]))
    for history in histories(model):
        assert history.amax_history.isfinite().all() and history.scale.isfinite().all() and (history.scale > 0).all()
    step(100.0)
    moved = [h.scale for h in histories(model)][1]  # of the first layer's gradients
    assert moved.isfinite().all() and (moved[:1] < scales[1][:1]).all()
    assert not same(before[0], list(model.parameters()))


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_an_overflow_in_a_graph_changes_no_code(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step overflows; codes, scales and losses are always those of steps that look on the host."""
    found = []
    for in_graph in (False, True):
        torch.manual_seed(0)
        with minifloat.quantized_model_init(recipe=recipe):
            model = nn.Sequential(*[minifloat.Linear(32, 32, recipe=recipe) for _ in range(2)])
        optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.01, fused=True)
        monkeypatch.setattr("minifloat.optim.master_weights.capturing", lambda in_graph=in_graph: in_graph)
        seen = []
        for step in range(5):
            loss = model(torch.randn(8, 32)).square().mean()
            loss.backward()
            optimizer.found_inf = torch.tensor(float(step == 2))  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
            assert not hasattr(optimizer.inner, "found_inf")
            seen += [loss.detach(), *[weight.dequantize() for weight in model.parameters() if weight.dim() == 2]]
        found.append(seen)
    assert same(*found)


def test_a_graph_does_not_wait_for_an_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minifloat.optim.master_weights.capturing", lambda: True)
    model = delayed_model().bfloat16()
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(8, 32, dtype=torch.bfloat16)).float().sum()).backward()
    before = copy.deepcopy(list(model.parameters()))
    with pytest.raises(RuntimeError, match="as AdamW does: make the inner optimizer with fused=True"):
        scaler.step(optimizer)
    assert same(before, list(model.parameters()))


def test_an_overflow_is_not_recorded() -> None:
    """In either direction; a history of an older checkpoint may have it, which an update drops."""
    model = delayed_model()
    x = torch.randn(8, 32)
    for factor in (1.0, torch.inf, torch.nan, 1e3):
        (model(x).square().mean() * factor).backward()
    for history in histories(model):
        assert history.amax_history.isfinite().all() and history.scale.isfinite().all()
        history.amax_history[1][history.scale != 1] = torch.inf
    model(x * torch.inf)
    model(x).square().mean().backward()
    assert all(history.amax_history.isfinite().all() for history in histories(model))


def test_gradients_are_unscaled_in_fp32() -> None:
    p, plain = nn.Parameter(torch.zeros(64, dtype=torch.float16)), nn.Parameter(torch.zeros(64))
    values = torch.randn(64) * 2e-8  # below fp16's reach
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer, reference = MasterWeights([p], torch.optim.SGD, lr=1e4), torch.optim.SGD([plain], lr=1e4)
    scaler.scale((p.float() * values).sum()).backward()
    plain.grad = (values * 2.0**16).half().float() / 2.0**16
    scaler.step(optimizer)
    reference.step()
    assert torch.equal(p, plain.half()) and p.any()
    with pytest.raises(ValueError, match="main_grad"):
        p.main_grad, p.grad_added_to_main_grad = torch.zeros(64), True
        scaler.update()
        scaler.step(optimizer)


def test_a_scaler_without_gradients() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer, scaler = MasterWeights([p], torch.optim.SGD, lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert p.eq(1).all()


# ---- mistakes ----


def test_mistakes() -> None:
    params = parameters([torch.bfloat16, "mxfp8"])
    with pytest.raises(ValueError, match=r"master is 'bf16'; 'fp32' or 'bf16\+remainder'"):
        MasterWeights(params, torch.optim.SGD, master="bf16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty parameter list"):
        MasterWeights([], torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        MasterWeights(params, torch.optim.SGD, speed=1)
    moved = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = MasterWeights([moved], torch.optim.SGD, lr=0.1)
    torch.utils.swap_tensors(moved, nn.Parameter(torch.zeros(3, dtype=torch.bfloat16, device="meta")))
    with pytest.raises(ValueError, match="is on meta and its master on cpu: move the model"):
        optimizer.step()


def test_foreign_state_dicts_are_refused() -> None:
    params = parameters([torch.bfloat16, "mxfp8"])
    optimizer = MasterWeights(params, torch.optim.SGD, lr=0.1, momentum=0.9)
    give_gradients(params)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    plain = torch.optim.SGD(shadows(params), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="no master weights, it is that of a plain optimizer"):
        optimizer.load_state_dict(plain.state_dict())
    other = MasterWeights(parameters([torch.bfloat16, "mxfp8"]), torch.optim.SGD, master="bf16+remainder")
    with pytest.raises(
        ValueError, match="has a 'remainder' where this optimizer keeps a 'master': make it with the master="
    ):
        optimizer.load_state_dict(other.state_dict())
    other = MasterWeights(parameters([torch.bfloat16] * 3), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"param groups of \[3\] parameters, the optimizer of \[2\]"):
        optimizer.load_state_dict(other.state_dict())
    other = MasterWeights(parameters(["mxfp8", torch.bfloat16]), torch.optim.SGD, lr=0.1)
    other.param_groups[0]["params"].reverse()
    with pytest.raises(ValueError, match=r"is of shape \(130, 70\), the parameter of \(37, 53\)"):
        optimizer.load_state_dict(other.state_dict())
    assert same(before, optimizer.state_dict())
    other = MasterWeights(shadows(params), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 0 has a master, but it is torch\.float32 here"):
        other.load_state_dict(optimizer.state_dict())


def test_a_parameter_that_was_frozen_when_saved_keeps_its_master() -> None:
    params = parameters([torch.bfloat16, "mxfp8"])
    params[1].requires_grad_(False)
    optimizer = MasterWeights(params, torch.optim.SGD, lr=0.1, momentum=0.9)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    again = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = MasterWeights(again, torch.optim.SGD, lr=0.1, momentum=0.9)
    resumed.load_state_dict(optimizer.state_dict())
    assert torch.equal(masters_of(resumed)[1], exact(again[1]))
    assert torch.equal(masters_of(resumed)[0], masters_of(optimizer)[0])


# ---- groups of ranks ----


def stepped_shard(rank: int, world_size: int) -> Tensor:
    torch.manual_seed(0)
    own = torch.randn(64, 64).chunk(world_size)[rank]
    p = nn.Parameter(quantize(own, QUANTIZERS["current"], amax_group=torch.distributed.group.WORLD))
    p.set_high_precision_init_val(own)
    optimizer = MasterWeights([p], torch.optim.SGD, lr=1.0)
    for _ in range(2):
        p.grad = torch.randn(64, 64).chunk(world_size)[rank]
        optimizer.step()
    return exact(p)


def test_shards_are_cast_as_the_whole(worker_pool: Pools) -> None:
    torch.manual_seed(0)
    full = torch.randn(64, 64)
    for _ in range(2):
        full -= torch.randn(64, 64)
    assert torch.equal(torch.cat(worker_pool(2).run(stepped_shard)), quantize(full, QUANTIZERS["current"]).dequantize())


def test_what_is_gone_says_the_way_out() -> None:
    with pytest.raises(AttributeError, match=r"torch.optim.AdamW, .*torchao.optim.AdamW8bit"):
        minifloat.optim.AdamW  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'Adam'"):
        minifloat.optim.Adam  # noqa: B018


# ---- on a device ----


@pytest.mark.gpu
@pytest.mark.parametrize("master", MASTERS)
def test_on_a_device(master: Any) -> None:
    params = [nn.Parameter(p.detach().cuda()) for p in parameters()]
    plain = shadows(params)
    optimizer = MasterWeights(params, torch.optim.AdamW, lr=0.1, master=master)
    reference = torch.optim.AdamW(plain, lr=0.1)
    for _ in range(3):
        for p, q in zip(params, plain, strict=True):
            p.grad = torch.randn(p.shape, device="cuda").to(p.dtype)
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
    assert same(masters_of(optimizer), [p.detach() for p in plain])
