"""Experts that ranks share out, beside one process that has all experts and the tokens of all ranks, bit for bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from minifloat import DelayedScaling, GroupedMLP, Linear, autocast
from minifloat.comm.collectives import Pending
from minifloat.distributed import parallelize
from minifloat.formats import Format, parse
from minifloat.functional import Routing, experts, sort_by_expert
from minifloat.functional.expert_parallel import form_of
from minifloat.nn import MoE
from minifloat.quantizer import Quantizer
from minifloat.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tests.helpers.distributed_pool import on_ranks
from tests.helpers.recipes import NAMED

E, H, F, K = 6, 64, 48, 2
BF16 = torch.bfloat16
NEAREST = NVFP4BlockScaling(disable_stochastic_rounding=True)
EXACT: dict[str, Any] = {"none": "none", "nvfp4": NEAREST} | {
    name: NAMED[name] for name in ("current", "block", "mxfp8")
}
CODES: dict[str, Any] = {
    "block": Float8BlockScaling(columnwise_source="rowwise_dequantized"),
    "mxfp8": MXFP8BlockScaling(columnwise_source="rowwise_dequantized"),
    "nvfp4": replace(NEAREST, columnwise_source="rowwise_dequantized"),
    "an amax a row": replace(
        NEAREST, disable_rht=True, row_scaled_activation=True, columnwise_source="rowwise_dequantized"
    ),
}


def tokens_of(rank: int, size: int) -> int:
    """Other numbers on each rank; the last one has none."""
    return 0 if rank == size - 1 else 7 + 6 * rank


def choices(tokens: int, k: int = K, skewed: bool = False) -> Tensor:
    """int64 [T, k]: some dropped; ``skewed``: all experts but one of the first rank get nothing."""
    if skewed:
        return torch.ones(tokens, k, dtype=torch.int64)
    chosen = torch.rand(tokens, E).argsort(1)[:, :k]
    return torch.where(torch.rand(tokens, k) < 0.2, -1, chosen)


def ragged(*shape: int) -> Tensor:
    """Rows of very different sizes: casts of casts and casts of values differ."""
    x = torch.randn(*shape) * torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1)))
    return x.to(BF16)


@dataclass
class Run:
    """A step of an MLP on some tokens."""

    mlp: GroupedMLP
    x: Tensor
    p: Tensor
    dy: Tensor
    routing: Routing

    def __call__(self, *args: Any) -> list[Tensor]:
        """Y, dX, dp."""
        x, p = self.x.clone().requires_grad_(), self.p.clone().requires_grad_()
        y = self.mlp(x, self.routing, *args, probabilities=p)
        y.backward(self.dy)
        assert x.grad is not None and p.grad is not None
        return [y.detach(), x.grad, p.grad]


def no_change(mlp: GroupedMLP) -> None:
    """Leaves it as it is."""


def compare(
    rank: int,
    size: int,
    options: dict[str, Any],
    skewed: bool = False,
    steps: int = 1,
    k: int = K,
    device: str = "cpu",
    change: Callable[[GroupedMLP], Any] = no_change,
) -> list[str]:
    """Runs both: what differs; ``change``: what is done to this rank's layer before."""
    wrong, options = [], {"dtype": BF16, "device": device} | options
    torch.manual_seed(3)
    whole = GroupedMLP(E, H, F, **options)
    torch.manual_seed(3)
    own = GroupedMLP(E, H, F, ep_group=dist.group.WORLD, **options)
    for name, mine in own.named_parameters():
        theirs = whole.get_parameter(name)
        first = own.fc1.first_expert if theirs.dim() != mine.dim() or theirs.shape != mine.shape else 0
        if not torch.equal(mine, theirs[first : first + len(mine)]):
            wrong.append(f"initial {name}")
    change(own)
    counts = [tokens_of(r, size) for r in range(size)]
    ends = torch.tensor(counts).cumsum(0).tolist()
    at = slice(ends[rank] - counts[rank], ends[rank])
    for step in range(steps):
        drawn = (
            ragged(sum(counts), H),
            torch.rand(sum(counts), k),
            ragged(sum(counts), H),
            choices(sum(counts), k, skewed),
        )
        x, p, dy, indices = [each.to(device, options["dtype"] if each.dtype == BF16 else None) for each in drawn]
        args = () if steps == 1 else (step == 0,)
        expected = Run(whole, x, p, dy, sort_by_expert(indices, E))(*args)
        found = Run(own, x[at], p[at], dy[at], sort_by_expert(indices[at], E))(*args)
        for name, mine, theirs in zip(("Y", "dX", "dp"), found, expected, strict=True):
            if not torch.equal(mine, theirs[at]):
                wrong.append(f"{name} in step {step}: {(mine.float() - theirs[at].float()).abs().max()}")
    for name, mine in own.named_parameters():
        if not mine.requires_grad:
            continue
        theirs = whole.get_parameter(name)
        first = own.fc1.first_expert if theirs.shape != mine.shape else 0
        assert mine.grad is not None and theirs.grad is not None
        if not torch.equal(mine.grad, theirs.grad[first : first + len(mine)]):
            wrong.append(f"gradient of {name}")
    return wrong


@pytest.mark.parametrize("recipe", EXACT)
@on_ranks(2, 3)
def test_as_one_process(rank: int, size: int, recipe: str) -> list[str]:
    return compare(rank, size, {"recipe": EXACT[recipe]})


@pytest.mark.parametrize("recipe", CODES)
@on_ranks(2)
def test_codes_travel(rank: int, size: int, recipe: str) -> list[str]:
    """Where one process makes the columnwise operands of the rowwise codes as well."""
    return compare(rank, size, {"recipe": CODES[recipe]})


@pytest.mark.parametrize(
    ("spec", "top_k", "ranks", "form"),
    [
        ("e4m3/tensor/fp32", 7, 4, "values"),  # 56 bytes of codes, and 2 * 8 of values for each of 3.47 ranks
        ("e4m3/tensor/fp32", 6, 4, "codes of rows"),
        ("e2m1/1x16/two_level", 7, 4, "codes of rows"),
        ("e4m3/row/fp32", 7, 4, "codes of tokens"),
        ("e4m3/1x32/e8m0", 7, 4, "codes of tokens"),
        ("e4m3/32x32/e8m0", 2, 4, "values"),  # tiles have the rows of several tokens
        ("e4m3/128x128/pow2", 2, 4, "values"),
        ("e4m3/tensor/given", 2, 4, "values"),
    ],
)
def test_what_is_sent(spec: str, top_k: int, ranks: int, form: str) -> None:
    """The fewest bytes, of codes that each row has by itself."""
    assert form_of(Quantizer(parse(spec), columnwise=False), top_k, ranks) == form


OPTIONS: dict[str, dict[str, Any]] = {
    "fp32, codes of more bits than bf16": {"recipe": CODES["nvfp4"], "dtype": torch.float32},
    "biases": {"bias": True, "activation": "gelu"},
    "one parameter": {"single_grouped_weight": True},
    "recompute": {"recompute_activation": True},
    "kept for backward": {"recipe": Float8CurrentScaling(backward_override="dequantized")},
}


@pytest.mark.parametrize("option", OPTIONS)
@on_ranks(2)
def test_options(rank: int, size: int, option: str) -> list[str]:
    return compare(rank, size, {"recipe": "current"} | OPTIONS[option])


@pytest.mark.parametrize("recipe", ["none", "current", "nvfp4"])
@on_ranks(2)
def test_a_token_goes_to_most_experts(rank: int, size: int, recipe: str) -> list[str]:
    """Its values go once to a rank, where they are cast: fewer bytes than codes for each expert."""
    assert form_of(Quantizer(Format()), 5, 2) == "values" and form_of(Quantizer(Format()), 2, 2) == "codes of rows"
    return compare(rank, size, {"recipe": EXACT[recipe]}, k=5)


@pytest.mark.parametrize("recipe", ["current", "block"])
@on_ranks(3)
def test_all_tokens_go_to_one_expert(rank: int, size: int, recipe: str) -> list[str]:
    """Other ranks receive nothing, and microbatches read the casts of the first."""
    return compare(rank, size, {"recipe": recipe}, skewed=True, steps=2)


DELAYED = DelayedScaling(amax_history_len=2)


@pytest.mark.parametrize("recipe", [DELAYED, None], ids=["own recipe", "autocast"])
@on_ranks(2, 3)
def test_delayed_scaling(rank: int, size: int, recipe: Any) -> list[str]:
    """Of steps with scales that differ by expert; other linears' histories are reduced along with these."""
    torch.manual_seed(3)
    # A whole number of AVX-512's vectors: PyTorch has another exp for the elements of a tensor that fill none.
    width = 2 * F
    whole = nn.ModuleList([GroupedMLP(E, H, width, recipe=recipe, dtype=BF16), Linear(H, H, recipe=recipe, dtype=BF16)])
    own = nn.ModuleList([GroupedMLP(E, H, width, recipe=recipe, dtype=BF16, ep_group=dist.group.WORLD), whole[1]])
    own.load_state_dict(whole.state_dict())
    count, wrong = E // size, []
    for step in range(4):
        tokens = 11 * size
        x, dy, p = ragged(tokens, H), ragged(tokens, H), torch.rand(tokens, K)
        indices = choices(tokens)
        at = slice(11 * rank, 11 * rank + 11)
        results = []
        for layers, rows in ((whole, slice(None)), (own, at)):
            with autocast(enabled=recipe is None, recipe=DELAYED):
                run = Run(layers[0], x[rows], p[rows], dy[rows], sort_by_expert(indices[rows], E))  # type: ignore[arg-type]
                layers[1](x[rows]).sum().backward()
                results.append(run())
        for name, theirs, mine in zip(("Y", "dX", "dp"), *results, strict=True):
            wrong += [] if torch.equal(mine, theirs[at]) else [f"{name} in step {step}"]
        for name, mine in own[0].named_buffers():
            theirs = whole[0].get_buffer(name).unflatten(-1, (-1, E))[..., rank * count : (rank + 1) * count]
            wrong += [] if torch.equal(mine.view_as(theirs), theirs) else [f"{name} after step {step}"]
        for name, mine in own[0].named_parameters():
            theirs = whole[0].get_parameter(name)
            wrong += [] if torch.equal(mine.grad, theirs.grad) else [f"gradient of {name} in step {step}"]  # type: ignore[arg-type]
    scales = whole[0].fc1.forward_scaling.scale[:E].view(size, count)  # type: ignore[union-attr, index]
    return wrong + ([] if len({*map(tuple, scales.tolist())}) == size else ["ranks have equal scales"])


@on_ranks(2)
def test_delayed_scaling_of_all_loads(rank: int, size: int) -> list[str]:
    """What one process has becomes each rank's part, by ``load_state_dict`` or ``parallelize``."""
    whole = GroupedMLP(E, H, F, recipe=DELAYED)
    for value, buffer in enumerate(whole.buffers()):
        buffer.copy_(torch.arange(1.0, buffer.numel() + 1).view_as(buffer) + value)
    own = GroupedMLP(E, H, F, recipe="current", ep_group=dist.group.WORLD)
    own.load_state_dict(whole.state_dict())
    shared = copy.deepcopy(whole)
    parallelize(shared, init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)))
    at, wrong = slice(rank * E // size, (rank + 1) * E // size), []
    for name, theirs in whole.named_buffers():
        part = theirs.unflatten(-1, (-1, E))[..., at].flatten(-2)
        wrong += [name for each in (own, shared) if not torch.equal(each.get_buffer(name), part)]
    return wrong


def freeze(mlp: GroupedMLP) -> None:
    mlp.requires_grad_(False)


def watch(mlp: GroupedMLP) -> None:
    """fc1 has a hook, so that both linears run apart."""
    mlp.fc1.register_forward_hook(lambda *args: None)


@pytest.mark.parametrize("change", [freeze, watch])
@pytest.mark.parametrize("recipe", ["current", Float8BlockScaling(use_f32_scales=True)], ids=["current", "block"])
@on_ranks(2)
def test_one_rank_differs(rank: int, size: int, recipe: Any, change: Callable[[GroupedMLP], None]) -> list[str]:
    """Which would send something else, of other sizes, if it asked no other rank."""
    return compare(rank, size, {"recipe": recipe}, change=change if rank == 0 else no_change)


GRADIENTS = [*itertools.product([False, True], repeat=3)]
"""Of the experts, X and the probabilities of a rank."""


@pytest.mark.parametrize("layer", ["as one", "apart", "biases", "biases alone"])
@on_ranks(2)
def test_ranks_need_other_gradients(rank: int, size: int, layer: str) -> list[str]:
    """Each rank takes part in the backward of others, whatever it needs itself, and gets no other bits for it."""
    torch.manual_seed(4)
    options: dict[str, Any] = {"recipe": "current", "dtype": BF16, "bias": layer.startswith("biases")}
    whole, own = GroupedMLP(E, H, F, **options), GroupedMLP(E, H, F, ep_group=dist.group.WORLD, **options)
    own.load_state_dict(whole.state_dict())
    if layer == "apart":
        watch(own)
    drawn = ragged(size, 9, H), torch.rand(size, 9, K), ragged(size, 9, H)
    indices = choices(9 * size).view(size, 9, K)
    run = Run(whole, *[each.flatten(0, 1) for each in drawn], sort_by_expert(indices.flatten(0, 1), E))  # type: ignore[arg-type]
    expected = dict(zip(("Y", "dX", "dp"), [each.unflatten(0, (size, 9))[rank] for each in run()], strict=True))
    expected |= {name: parameter.grad for name, parameter in whole.named_parameters()}  # type: ignore[misc]
    x, p, dy = (each[rank] for each in drawn)
    wrong = []
    for needs in itertools.product(GRADIENTS, repeat=size):
        trains, needs_x, needs_p = needs[rank]
        for name, parameter in own.named_parameters():
            parameter.requires_grad_(trains and (layer != "biases alone" or "bias" in name)).grad = None
        x, p = x.detach().requires_grad_(needs_x), p.detach().requires_grad_(needs_p)
        y = own(x, sort_by_expert(indices[rank], E), probabilities=p)
        if y.requires_grad:
            y.backward(dy)
        found = {"Y": y.detach(), "dX": x.grad, "dp": p.grad} | {n: each.grad for n, each in own.named_parameters()}
        wanted = needs_x, needs_p, *[each.requires_grad for each in own.parameters()]
        if [each is not None for each in found.values()] != [True, *wanted]:
            wrong.append(f"{needs}: has {[name for name, value in found.items() if value is not None]}")
        wrong += [
            f"{needs}: {name}" for name, v in found.items() if v is not None and not torch.equal(v, expected[name])
        ]
        x.grad = p.grad = None
    return wrong


@on_ranks(2)
def test_bytes_of_dispatch(rank: int, size: int) -> list[str]:
    """Of X and dY, against bf16, in one transfer each; results come back in bf16."""
    wrong = []
    for recipe, most in (("current", 0.5), ("block", 0.52), ("mxfp8", 0.52), ("nvfp4", 0.29), ("none", 1.0)):
        mlp = GroupedMLP(E, 512, F, dtype=BF16, recipe=CODES.get(recipe, recipe), ep_group=dist.group.WORLD)
        x, indices = torch.randn(8, 512).to(BF16).requires_grad_(), choices(8)
        with recorded() as sent:
            mlp(x, sort_by_expert(indices, E)).sum().backward()
        rows = int((indices >= 0).sum())
        ratios = [nbytes / (2 * rows * 512) for nbytes in sent if nbytes > 1000]  # without counts
        if f"num_gemms={E // size}," not in repr(mlp) or f"ep_size={size}" not in repr(mlp):
            wrong.append(repr(mlp))
        if len(ratios) != 4 or max(ratios[0], ratios[2]) > most:  # others are of the rows that are received
            wrong.append(f"{recipe}: {ratios}")
    return wrong


class CountCasts(TorchDispatchMode):
    """What casts and what reads codes back, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("minifloat::")
        if name in ("cast", "grouped_cast", "grouped_dequantize", "amax", "grouped_amax"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
@on_ranks(2)
def test_casts_of_codes_that_travel(rank: int, size: int, recipe: str) -> list[str]:
    """Two a direction, of tokens and of what arrived: the activation's kernel casts the rest, columnwise too."""
    mlp = GroupedMLP(E, 128, 128, dtype=BF16, recipe=CODES[recipe], ep_group=dist.group.WORLD)
    x, routing = torch.randn(8, 128).to(BF16).requires_grad_(), sort_by_expert(choices(8), E)
    mlp(x, routing, True).sum().backward()  # casts weights
    with CountCasts() as forward:
        y = mlp(x, routing, False)
    with CountCasts() as backward:
        y.sum().backward()
    expected = ["cast", "grouped_dequantize", "grouped_cast"]
    return [f"{each.found}" for each in (forward, backward) if each.found != expected]


@contextmanager
def recorded() -> Iterator[list[int]]:
    """The bytes that each all-to-all sends."""
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counted(output: Tensor, data: Tensor, *args: Any, **options: Any) -> Any:
        sent.append(data.nbytes)
        return exchange(output, data, *args, **options)

    with mock.patch.object(dist, "all_to_all_single", counted):
        yield sent


@on_ranks(2)
def test_a_mixture(rank: int, size: int) -> list[str]:
    """Router, shared MLP and norm: outputs and gradients of a rank's tokens, and of its experts."""
    torch.manual_seed(5)
    options: dict[str, Any] = {"shared_ffn_hidden_size": 16, "dtype": BF16, "recipe": "block"}
    whole, own = (build(H, F, E, K, **options) for build in (MoE, partial(MoE, ep_group=dist.group.WORLD)))
    own.load_state_dict(whole.state_dict())
    x, dy = torch.randn(size, 9, H).to(BF16), torch.randn(size, 9, H).to(BF16)
    mine, all_of_it = x[rank].clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = own(mine), whole(all_of_it)
    y.backward(dy[rank]), expected.backward(dy)
    assert mine.grad is not None and all_of_it.grad is not None
    wrong = ["Y"] * (not torch.equal(y, expected[rank])) + ["dX"] * (not torch.equal(mine.grad, all_of_it.grad[rank]))
    wrong += [
        name
        for name, p in own.experts.named_parameters()
        if not torch.equal(p.grad, whole.experts.get_parameter(name).grad)  # type: ignore[arg-type]
    ]
    return wrong


@on_ranks(2)
def test_what_runs_while_tokens_travel(rank: int, size: int) -> list[str]:
    """The cast of W1 while X does, the shared MLP while Y and dY do, dW1 while dX does."""
    moe = MoE(H, F, E, K, shared_ffn_hidden_size=16, dtype=BF16, recipe="current", ep_group=dist.group.WORLD)
    events: list[str] = []

    def told(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            events.append(name)
            return function(*args, **options)

        return call

    assert moe.shared_fc2 is not None
    moe.shared_fc2.register_forward_hook(told("shared", lambda module, x, y: None))
    moe.shared_fc2.register_full_backward_hook(told("shared", lambda module, dx, dy: None))
    x = torch.randn(9, H).to(BF16).requires_grad_()
    with (
        mock.patch.object(dist, "all_to_all_single", told("send", dist.all_to_all_single)),
        mock.patch.object(experts, "quantize_weight", told("cast W", experts.quantize_weight)),
        mock.patch.object(experts.Experts, "wgrad", told("dW", experts.Experts.wgrad)),
        mock.patch.object(Pending, "wait", told("wait", Pending.wait)),
    ):
        y = moe(x)
        forward, events[:] = " ".join(events), []
        y.sum().backward()
    backward = " ".join(events)
    seen = (
        "send cast W wait" in forward, "send shared wait" in forward, forward.count("send") == 4,
        "send shared wait" in backward, "send dW wait" in backward, backward.count("send") == 3,
    )  # fmt: skip
    return [] if all(seen) else [forward, backward]


@on_ranks(2, 3)
def test_mistakes(rank: int, size: int) -> list[str]:
    """Each is named on all ranks, which can go on."""
    x, indices = torch.randn(4, H), choices(4)
    group = dist.group.WORLD
    others = GroupedMLP(E, H, F, ep_group=group, recipe="current" if rank else "mxfp8")
    sources = GroupedMLP(E, H, F, ep_group=group, recipe=CODES["block"] if rank else "block")
    plain = GroupedMLP(E, H, F, ep_group=group)

    def step(recipe: Any) -> None:
        with autocast(recipe=recipe, enabled=recipe is not None):
            plain(x, sort_by_expert(indices, E))

    step("block")
    cases: list[tuple[str, Callable[[], Any]]] = [
        (f"7 experts cannot be shared out over {size} ranks", lambda: GroupedMLP(7, H, F, ep_group=group)),
        ("the routing is of 4 tokens", lambda: others(x[:3], sort_by_expert(indices, E))),
        ("m_splits has 7 numbers", lambda: others(x, sort_by_expert(indices, 7))),
        ("different recipes", lambda: others(x, sort_by_expert(indices, E))),
        ("cast from the rowwise one", lambda: sources(x, sort_by_expert(indices, E))),
        ("different recipes", lambda: step("block" if rank else None)),
        ("different recipes", lambda: step("block" if rank else "mxfp8")),  # after others that were the same
    ]
    wrong = []
    for words, call in cases:
        try:
            call()
            wrong.append(f"{words}: no error")
        except ValueError as error:
            if words not in str(error):
                wrong.append(f"{words}: {error}")
    return wrong
