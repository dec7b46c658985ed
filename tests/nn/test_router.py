"""TopKRouter: against a loop over Python's numbers and the routers of transformers; losses, balance, state, ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import minifloat
from minifloat.functional import sort_by_expert
from minifloat.functional.router import choose_experts, count_experts, multiply_in_fp32
from minifloat.nn import TopKRouter
from minifloat.nn.moe import LayerNormMoE
from minifloat.parallel.data_parallel import data_parallel
from tests.helpers.distributed_pool import Pools, process_group
from tests.helpers.sample import each_pair, each_twice, first_by_default

H = 12
LOSSES: dict[str, Any] = {"aux_loss_coefficient": 0.25, "z_loss_coefficient": 0.125}
ALL_LOSSES = {"seq_aux_loss_coefficient": 0.5, "global_aux_loss_coefficient": 1.5}
OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, normalized": {"normalize_top_k": True},
    "softmax of the chosen": {"score_before_top_k": False, "bias": True},
    "sigmoid": {"score_function": "sigmoid", "scaling_factor": 2.5},
    "sigmoid, normalized": {"score_function": "sigmoid", "normalize_top_k": True, "expert_bias_rate": 0.5},
    "sigmoid of the chosen": {"score_function": "sigmoid", "score_before_top_k": False},
    "groups": {"num_groups": 4, "group_top_k": 2, "expert_bias_rate": 0.5},
    "groups, sigmoid": {
        "num_groups": 2, "group_top_k": 1, "score_function": "sigmoid", "normalize_top_k": True, "scaling_factor": 1.5
    },
    "groups, by logits": {"num_groups": 2, "group_top_k": 1, "score_before_top_k": False},
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "capacity": {"capacity_factor": 0.75, "expert_bias_rate": 0.5},
    "jitter": {"input_jitter_eps": 0.125},
    "losses": {**ALL_LOSSES, "score_function": "sigmoid"},
    "capacity by position": {**ALL_LOSSES, "capacity_factor": 0.75, "drop_policy": "position", "normalize_top_k": True},
}
"""Options by which a token's experts do not follow from the token alone."""
SMOOTH = OPTIONS | MORE
ALL = SMOOTH | {"forced": {"force_load_balancing": True}}
FOR_EACH_OPTION = pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
FOR_ALL_OPTIONS = pytest.mark.parametrize("options", list(ALL.values()), ids=list(ALL))


def made(experts: int = 8, k: int = 2, device: torch.device | None = None, **options: Any) -> TopKRouter:
    """A router whose parameters and buffers are nowhere 0."""
    router = TopKRouter(H, experts, k, **options)
    with torch.no_grad():
        for each in (router.weight, router.bias, router.expert_bias):
            if each is not None:
                each.normal_()
    return router if device is None else router.to(device)


# ---- a router of Python's numbers ----


def softmax(values: list[float]) -> list[float]:
    exps = [math.exp(value - max(values)) for value in values]
    return [each / sum(exps) for each in exps]


def sigmoid(values: list[float]) -> list[float]:
    return [1 / (1 + math.exp(-value)) for value in values]


def best(values: list[float], k: int, among: list[int]) -> list[int]:
    return sorted(among, key=lambda i: (-values[i], i))[:k]


def route_one(logits: list[float], router: TopKRouter) -> tuple[list[int], list[float], list[float]]:
    """Experts, probabilities and shares of a token, from its logits."""
    how, experts = router.selection, list(range(router.num_experts))
    function = softmax if how.score_function == "softmax" else sigmoid
    scores = function(logits) if how.score_before_top_k else logits
    bias = [0.0] * len(logits) if router.expert_bias is None else router.expert_bias.tolist()
    biased = [a + b for a, b in zip(scores, bias, strict=True)]
    size = len(experts) // how.num_groups
    groups = [experts[first : first + size] for first in experts[::size]]
    sums = [sum(sorted((biased[e] for e in group), reverse=True)[:2]) for group in groups]
    chosen_groups = best(sums, how.group_top_k, list(range(len(groups))))
    chosen = best(biased, how.top_k, [e for g in chosen_groups for e in groups[g]])
    values = [scores[e] for e in chosen]
    values = values if how.score_before_top_k else function(values)
    if how.normalize_top_k:
        values = [value / sum(values) for value in values]
    of_all = function(logits)
    return chosen, [value * how.scaling_factor for value in values], [each / sum(of_all) for each in of_all]


def losses(logits: list[list[float]], router: TopKRouter) -> tuple[float, float]:
    """Load balancing, z."""
    routed = [route_one(each, router) for each in logits]
    balance = 0.0
    for expert in range(router.num_experts):
        used = sum(chosen.count(expert) for chosen, _, _ in routed) / (len(logits) * router.top_k)
        share = sum(shares[expert] for _, _, shares in routed) / len(logits)
        balance += router.num_experts * used * share
    z = sum(math.log(sum(map(math.exp, each))) ** 2 for each in logits) / len(logits)
    return balance, z


@each_twice
@pytest.mark.parametrize("k", [1, 2, 4])
@FOR_EACH_OPTION
def test_against_a_loop(options: dict[str, Any], k: int, device: torch.device) -> None:
    router = made(8, k, device, **options, **LOSSES)
    x = torch.randn(3, 7, H, device=device)
    got = router(x)
    assert got.probabilities.shape == got.indices.shape == (21, k)
    assert got.probabilities.dtype == got.loss.dtype == torch.float32 and got.loss.shape == ()
    assert not got.indices.is_floating_point()
    bias = 0 if router.bias is None else router.bias.double()
    logits = (x.flatten(0, 1).double() @ router.weight.double().t() + bias).tolist()
    wanted = [route_one(each, router) for each in logits]
    assert got.indices.tolist() == [chosen for chosen, _, _ in wanted]
    expected = torch.tensor([values for _, values, _ in wanted], device=device)
    torch.testing.assert_close(got.probabilities, expected, rtol=1e-5, atol=1e-6)
    balance, z = losses(logits, router)
    assert got.loss.item() == pytest.approx(0.25 * balance + 0.125 * z, rel=1e-5)


@pytest.mark.parametrize("options", list(SMOOTH.values()), ids=list(SMOOTH))
def test_gradcheck(options: dict[str, Any]) -> None:
    """Of everything that has gradients, in float64."""
    router = made(8, 2, dtype=torch.float64, logits_dtype=torch.float64, **options, **LOSSES)
    mask = torch.tensor([True, False, True, True])

    def outputs(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        tensors = {"weight": weight} | ({} if bias is None else {"bias": bias})
        torch.manual_seed(0)  # of what is drawn
        probabilities, _, loss = torch.func.functional_call(router, tensors, (x, mask))
        return probabilities, loss

    inputs = [torch.randn(4, H, dtype=torch.float64), *router.parameters()]
    assert torch.autograd.gradcheck(outputs, [each.detach().requires_grad_() for each in inputs])


# ---- transformers ----


def models() -> Iterator[Any]:
    """Routers of transformers, the options of ours, and the name of the bias of the choice."""
    from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    sizes = {"hidden_size": H, "num_local_experts": 8, "num_experts_per_tok": 3}
    yield MixtralTopKRouter(MixtralConfig(**sizes)), {"normalize_top_k": True}
    for normalize in (True, False):
        config = Qwen3MoeConfig(**sizes, norm_topk_prob=normalize)
        yield Qwen3MoeTopKRouter(config), {"normalize_top_k": normalize}
    yield GptOssTopKRouter(GptOssConfig(**sizes)), {"score_before_top_k": False, "bias": True, "logits_dtype": None}
    for normalize in (True, False):
        groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": normalize}
        deepseek = {"hidden_size": H, "n_routed_experts": 8, "num_experts_per_tok": 3}
        yield (
            DeepseekV3TopkRouter(DeepseekV3Config(**deepseek, **groups)),
            {
                "score_function": "sigmoid", "normalize_top_k": normalize, "num_groups": 4, "group_top_k": 2,
                "scaling_factor": 2.5, "expert_bias_rate": 0.0,
            },
        )  # fmt: skip


def by_expert(probabilities: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """In the order of experts: DeepSeek-V3's are not sorted."""
    indices, order = indices.sort(dim=-1)
    return probabilities.gather(1, order), indices


@pytest.mark.usefixtures("quiet_transformers")
def test_against_transformers() -> None:
    """Weights, indices, and gradients; state dicts load, but for the name of DeepSeek-V3's bias."""
    for theirs, options in models():
        for each in theirs.state_dict().values():
            nn.init.normal_(each)
        ours = TopKRouter(H, 8, 3, **options)
        ours.load_state_dict({k.replace("e_score_correction", "expert"): v for k, v in theirs.state_dict().items()})
        x, dp = torch.randn(50, H, requires_grad=True), torch.randn(50, 8)
        probabilities, indices, _ = ours(x)
        _, their_probabilities, their_indices = theirs(x)
        got, want = by_expert(probabilities, indices), by_expert(their_probabilities, their_indices)
        assert torch.equal(got[1], want[1]), type(theirs)
        torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=0)
        gradients = [
            torch.autograd.grad((values * dp.gather(1, experts)).sum(), [x, *module.parameters()])
            for module, (values, experts) in ((ours, got), (theirs, want))
        ]
        for mine, other in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("quiet_transformers")
def test_loss_is_that_of_transformers_by_k() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    for k in (1, 3):
        router, x = made(8, k, aux_loss_coefficient=1.0, normalize_top_k=True), torch.randn(50, H)
        logits = nn.functional.linear(x, router.weight)
        mask = (torch.rand(50) < 0.7).view(5, 10)
        for token_mask in (None, mask):
            theirs = load_balancing_loss_func((logits,), 8, k, token_mask)
            ours = router(x.view(5, 10, H), token_mask).loss
            torch.testing.assert_close(k * ours, theirs)
            want = torch.autograd.grad(theirs, router.weight, retain_graph=True)[0]
            torch.testing.assert_close(k * torch.autograd.grad(ours, router.weight)[0], want)


@each_twice
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, OPTIONS["sigmoid"], OPTIONS["softmax of the chosen"]])
@pytest.mark.parametrize(("shape", "seq_dim"), [((7, 3), 0), ((3, 7), 1), ((2, 7, 3), 1), ((7,), 0)])
def test_loss_of_each_sequence(
    shape: tuple[int, ...], seq_dim: int, options: dict[str, Any], masked: bool, device: torch.device
) -> None:
    """The mean of what the plain loss is of each, without those that are masked."""
    router = made(8, 2, device, seq_aux_loss_coefficient=1.0, seq_dim=seq_dim, **options)
    plain = made(8, 2, device, aux_loss_coefficient=1.0, **options)
    plain.load_state_dict(router.state_dict())
    x, mask = torch.randn(*shape, H, device=device), torch.rand(shape, device=device) < 0.7
    parts = x.movedim(seq_dim, -2).reshape(-1, 7, H), mask.movedim(seq_dim, -1).reshape(-1, 7)
    if masked and len(parts[0]) > 1:  # a sequence of padding
        mask.movedim(seq_dim, -1).select(0, 1).zero_()
        parts = parts[0], mask.movedim(seq_dim, -1).reshape(-1, 7)
    if masked:
        losses = [plain(*each).loss for each in zip(*parts, strict=True) if each[1].any()]
    else:
        losses = [plain(each).loss for each in parts[0]]
    want, got = torch.stack(losses).mean(), router(x, mask if masked else None).loss
    torch.testing.assert_close(got, want)
    gradients = (torch.autograd.grad(loss, each.weight)[0] for loss, each in ((got, router), (want, plain)))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def loss_on_ranks(rank: int, size: int, wrap: str) -> list[Tensor]:
    """Loss and gradient of this rank's tokens, of which some are padding, its counts, and the loss in evaluation."""
    torch.manual_seed(0)
    x, mask = torch.randn(11, H), torch.arange(11) != 2
    if size > 1:
        x, mask = (each.split([4, 7])[rank] for each in (x, mask))
    group = process_group() if size > 1 else None
    router = made(8, 2, global_aux_loss_coefficient=1.5, aux_loss_group=group, expert_bias_rate=0.5)
    wrappers = {"ddp": DistributedDataParallel, "compiled": partial(torch.compile, backend="aot_eager", fullgraph=True)}
    model = wrappers[wrap](router) if wrap in wrappers else router
    loss = model(x, mask).loss
    loss.backward()
    assert router.weight.grad is not None and router.expert_counts is not None
    own = None if rank else router.eval()(x, mask).loss  # the other rank does not evaluate
    return [each.detach() for each in (loss, router.weight.grad, router.expert_counts, loss if own is None else own)]


@pytest.mark.parametrize("wrap", ["none", "ddp", "compiled"])
def test_the_mean_over_ranks_is_the_loss_of_all_tokens(worker_pool: Pools, wrap: str) -> None:
    """However many each has."""
    loss, gradient, counts, _ = loss_on_ranks(0, 1, "none")
    (a, of_a, own_counts, own), (b, of_b, other_counts, _) = worker_pool(2).run(loss_on_ranks, wrap)
    torch.testing.assert_close((a + b) / 2, loss)
    torch.testing.assert_close((of_a + of_b) / 2, gradient)
    assert own_counts.sum() == 2 * 3 and torch.equal(own_counts + other_counts, counts)
    assert not torch.equal(own, a) and (wrap != "ddp" or torch.equal(of_a, of_b))


# ---- the choice ----


def test_ties_go_to_the_first_experts(device: torch.device) -> None:
    for options in OPTIONS.values():
        router = TopKRouter(H, 64, 4, **options).to(device)
        with torch.no_grad():
            router.weight.zero_()
        assert router(torch.randn(300, H, device=device)).indices.eq(torch.arange(4, device=device)).all()


def test_groups_bound_the_choice() -> None:
    """The best expert is alone in its group, which two others beat together."""
    router = TopKRouter(6, 6, 2, num_groups=3, group_top_k=1, score_function="sigmoid", score_before_top_k=False)
    with torch.no_grad():
        router.weight.copy_(torch.eye(6))
    logits = torch.tensor([[5.0, -9.0, 3.0, 2.0, 0.0, 0.0]])
    assert router(logits).indices.tolist() == [[2, 3]]
    groups_of_one = TopKRouter(6, 6, 2, num_groups=6, group_top_k=2)
    groups_of_one.load_state_dict(router.state_dict())
    assert groups_of_one(logits).indices.tolist() == [[0, 2]]


@pytest.mark.parametrize("options", [{}, OPTIONS["groups, sigmoid"], OPTIONS["softmax of the chosen"]])
def test_a_token_that_is_not_finite_stays_alone(options: dict[str, Any], device: torch.device) -> None:
    """Its experts exist, its probabilities are NaN, and so is the loss."""
    router = made(device=device, **options, **LOSSES)
    x = torch.randn(4, H, device=device)
    want = router(x)
    x[1] = torch.nan
    got = router(x)
    others = [0, 2, 3]
    assert torch.equal(got.indices[others], want.indices[others])
    assert torch.equal(got.probabilities[others], want.probabilities[others])
    assert got.probabilities[1].isnan().all() and got.loss.isnan()
    assert ((got.indices >= 0) & (got.indices < 8)).all() and len(set(got.indices[1].tolist())) == 2


def test_scores_that_are_all_zero(device: torch.device) -> None:
    """Sigmoids of -200: they are divided by no zero, nor are their gradients."""
    options = OPTIONS["sigmoid, normalized"]
    router, x = made(device=device, **options, **LOSSES), torch.ones(3, H, device=device, requires_grad=True)
    with torch.no_grad():
        router.weight.fill_(-200 / H)
    probabilities, _, loss = router(x)
    (probabilities.sum() + loss).backward()
    assert not probabilities.any() and loss.isfinite()
    assert x.grad is not None and x.grad.isfinite().all()


def test_masked_tokens_go_nowhere(device: torch.device) -> None:
    """As if they were not there, but for their place."""
    router = made(device=device, expert_bias_rate=0.5, **LOSSES)
    x = torch.randn(2, 5, H, device=device)
    mask = torch.tensor([[True] * 5, [True, False, False, True, False]], device=device)
    got, want = router(x, mask), router(x[mask])
    keep = mask.flatten()
    torch.testing.assert_close(got.loss, want.loss)
    assert torch.equal(got.indices[keep], want.indices) and torch.equal(got.probabilities[keep], want.probabilities)
    assert got.indices[~keep].eq(-1).all() and not got.probabilities[~keep].any()
    assert router.expert_counts is not None and router.expert_counts.sum() == 2 * 7 * 2
    assert sort_by_expert(got.indices, 8).counts.sum() == 14
    leaf = x.clone().requires_grad_()
    probabilities, _, loss = router(leaf, mask)
    (probabilities.square().sum() + loss).backward()
    assert leaf.grad is not None and leaf.grad[mask].any(-1).all() and not leaf.grad[~mask].any()


@each_pair
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, {"bias": True, **LOSSES}, {"logits_dtype": None, "score_function": "sigmoid"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_masked_tokens_hold_reaches_no_gradient(
    dtype: torch.dtype, options: dict[str, Any], value: float, device: torch.device
) -> None:
    router = made(device=device, **options).to(dtype)
    x, mask = torch.randn(2, 5, H, device=device).to(dtype), torch.arange(10, device=device).view(2, 5) % 3 > 0
    found = []
    for fill in (value, 0.0):
        leaf = torch.where(mask[..., None], x, fill).requires_grad_()
        probabilities, _, loss = router(leaf, mask)
        found.append(torch.autograd.grad(probabilities.square().sum() + loss, [leaf, *router.parameters()]))
        assert not found[-1][0][~mask].any()
    for mine, expected in zip(*found, strict=True):
        assert torch.equal(mine, expected) and mine.isfinite().all() and expected.any()


# ---- capacity ----


def kept(probabilities: Tensor, indices: Tensor, policy: str, room: int) -> list[list[bool]]:
    """Which choices find room, by a loop over experts."""
    keep = [[False] * indices.shape[1] for _ in indices]
    for expert in set(indices.flatten().tolist()) - {-1}:
        slots = [(t, j) for t, row in enumerate(indices.tolist()) for j, each in enumerate(row) if each == expert]
        if policy == "probs":
            slots.sort(key=lambda slot: -probabilities[slot].item())
        for t, j in slots[:room]:
            keep[t][j] = True
    return keep


@each_twice
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("factor", [0.01, 0.75, 1.0, 8.0])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_full_experts_drop(policy: str, factor: float, masked: bool, device: torch.device) -> None:
    """Loss, counts and gradients know all choices; masked tokens do not count for the room."""
    options = {"normalize_top_k": True, "expert_bias_rate": 0.5, **LOSSES}
    full = made(8, 3, device, **options)
    router = TopKRouter(H, 8, 3, capacity_factor=factor, drop_policy=policy, **options).to(device)  # type: ignore[arg-type]
    router.load_state_dict(full.state_dict())
    x = torch.randn(31, H, device=device)
    x[7] = x[3]  # of equal probabilities the first is taken
    mask = torch.arange(31, device=device) % 4 != 1 if masked else None
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    got, want = router(leaves[0], mask), full(leaves[1], mask)
    tokens = 31 if mask is None else int(mask.sum())
    keep = torch.tensor(
        kept(want.probabilities, want.indices, policy, math.ceil(tokens * 3 / 8 * factor)), device=device
    )
    assert torch.equal(got.indices, want.indices.where(keep, -1)) and keep.any()
    assert torch.equal(got.probabilities, want.probabilities.where(keep, 0))
    assert (keep | (want.indices < 0)).all() == (factor == 8)
    assert torch.equal(got.loss, want.loss) and torch.equal(router.expert_counts, full.expert_counts)  # type: ignore[arg-type]
    dp = torch.randn_like(got.probabilities)
    ((got.probabilities * dp).sum() + got.loss).backward()
    ((want.probabilities * dp.where(keep, 0)).sum() + want.loss).backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)  # type: ignore[arg-type]
    assert torch.equal(router.weight.grad, full.weight.grad)  # type: ignore[arg-type]


def test_a_capacity_is_none_of_one_token_alone() -> None:
    router, x = made(capacity_factor=1.0), torch.randn(3, H)
    with (
        minifloat.autocast(batch_invariant=True),
        pytest.raises(ValueError, match=r"TopKRouter.*router\.capacity = None"),
    ):
        router(x)
    router.capacity = None
    with minifloat.autocast(batch_invariant=True):
        assert torch.equal(router(x).indices[:1], router(x[:1]).indices)


# ---- random numbers ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jitter(dtype: torch.dtype, device: torch.device) -> None:
    """Of the input, in training alone, by numbers of the input's dtype that PyTorch's generator draws."""
    router, plain = made(device=device, input_jitter_eps=0.25, **LOSSES), made(device=device, **LOSSES)
    plain.load_state_dict(router.state_dict())
    x = torch.randn(5, 40, H, device=device).to(dtype)
    torch.manual_seed(3)
    got, again = router(x), router(x)
    torch.manual_seed(3)
    noise = torch.empty_like(x).uniform_(0.75, 1.25)
    assert 0.75 <= noise.min() < 0.8 and 1.2 < noise.max() <= 1.25
    for found, wanted in zip(got, plain(x * noise), strict=True):
        assert torch.equal(found, wanted)
    assert not torch.equal(again.probabilities, got.probabilities)
    router.eval()
    assert torch.equal(router(x).probabilities, plain(x).probabilities)


def test_forced_balance(device: torch.device) -> None:
    """Of a router that has collapsed, in evaluation too; the logits get the gradients of what is drawn."""
    router = made(8, 2, device, force_load_balancing=True, normalize_top_k=True)
    with torch.no_grad():
        router.weight[3:] -= 100
    x = torch.rand(4000, H, device=device, requires_grad=True)
    torch.manual_seed(2)
    probabilities, indices, _ = router(x)
    torch.manual_seed(2)
    drawn = torch.randn(4000, 8, device=device, requires_grad=True)
    choice = choose_experts(drawn, router.selection, None)
    assert torch.equal(indices, choice.indices) and torch.equal(probabilities, choice.probabilities)
    for each in (indices, router.eval()(x).indices):
        counts = count_experts(each, 8)
        assert ((counts - 1000).abs() < 6 * (1000 * 0.75) ** 0.5).all()
    dp = torch.randn_like(probabilities)
    (dlogits,) = torch.autograd.grad(choice.probabilities, drawn, dp)
    dx, dw = torch.autograd.grad(probabilities, [x, router.weight], dp)
    torch.testing.assert_close(dx, dlogits @ router.weight)
    torch.testing.assert_close(dw, dlogits.t() @ x)


@pytest.mark.parametrize("options", [{"input_jitter_eps": 0.25}, {"force_load_balancing": True}])
@pytest.mark.parametrize("form", ["minifloat", "torch", "layer"])
def test_a_recomputation_draws_the_same(form: str, options: dict[str, Any]) -> None:
    """Gradients are those of a forward that is kept, to the bit."""
    torch.manual_seed(0)
    checkpointed = form == "layer"
    layer = LayerNormMoE(H, 16, 8, router={**options, **LOSSES}, recipe="current", checkpoint=checkpointed)
    twin = LayerNormMoE(H, 16, 8, router={**options, **LOSSES}, recipe="current")
    twin.load_state_dict(layer.state_dict())
    calls = {"minifloat": minifloat.checkpoint, "torch": partial(torch_checkpoint, use_reentrant=False)}
    x, found = torch.randn(9, H), []
    for module, run in ((layer, calls.get(form)), (twin, None)):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(1)
        y = module(leaf) if run is None else run(module, leaf)
        (y.square().sum() + minifloat.router_losses(module)).backward()
        found.append([y, leaf.grad, *(each.grad for each in module.parameters())])
    for mine, wanted in zip(*found, strict=True):
        assert torch.equal(mine, wanted)


# ---- dtypes ----


def test_logits_are_of_fp32_or_of_the_input(device: torch.device) -> None:
    x = torch.randn(20, H, device=device).bfloat16()
    exact, rounded = made(device=device), made(device=device, logits_dtype=None)
    rounded.load_state_dict(exact.state_dict())
    want = torch.softmax(nn.functional.linear(x.float(), exact.weight), -1).topk(2)
    torch.testing.assert_close(exact(x).probabilities, want.values)
    logits = nn.functional.linear(x, exact.weight.bfloat16())
    assert torch.equal(rounded(x).probabilities, torch.softmax(logits.float(), -1).topk(2).values)
    wanted = exact(x).probabilities, rounded(x).probabilities
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(exact(x.float()).probabilities, wanted[0])
        assert torch.equal(rounded(x.float()).probabilities, wanted[1])
    leaf = x.clone().requires_grad_()
    exact(leaf).probabilities.sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16 and exact.weight.grad.dtype == torch.float32


def test_the_bias_of_the_choice_stays_fp32() -> None:
    router = made(expert_bias_rate=0.001)
    assert router.expert_bias is not None
    before = router.expert_bias.clone()
    for other in (router.bfloat16(), router.half(), router.double(), copy.deepcopy(router).to(torch.float16)):
        assert other.expert_bias.dtype == torch.float32 and torch.equal(other.expert_bias, before)
    assert router.expert_counts is not None and router.expert_counts.dtype == torch.int64
    saved = {name: each.bfloat16() for name, each in router.state_dict().items()}
    assert set(saved) == {"weight", "expert_bias"}
    router.load_state_dict(saved, assign=True)
    assert router.expert_bias.dtype == torch.float32


def test_counts_start_at_0_after_meta() -> None:
    """``to_empty``, and a state dict that is assigned, which lacks them; PyTorch fills empty memory when asked to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        torch.use_deterministic_algorithms(True)
        try:
            emptied, assigned = (made(device=torch.device("meta"), expert_bias_rate=0.5) for _ in range(2))
            emptied.to_empty(device="cpu")
            assigned.load_state_dict(made(expert_bias_rate=0.5).state_dict(), assign=True)
        finally:
            torch.use_deterministic_algorithms(False)
    assert emptied.weight.isnan().all() and emptied.expert_bias is not None and not emptied.expert_bias.any()
    for router in (emptied, assigned):
        assert router.expert_counts is not None and not router.expert_counts.is_meta and not router.expert_counts.any()


# ---- balance without a loss ----


def test_the_bias_changes_the_choice_alone() -> None:
    router = made(expert_bias_rate=0.5, score_function="sigmoid")
    plain = made(score_function="sigmoid")
    plain.load_state_dict({"weight": router.weight})
    assert router.expert_bias is not None
    with torch.no_grad():
        router.expert_bias.copy_(torch.tensor([0.0, 0, 0, 9, 0, 0, 9, 0]))
    x = torch.randn(9, H)
    probabilities, indices, _ = router(x)
    assert indices.sort().values.tolist() == [[3, 6]] * 9
    scores = torch.sigmoid(nn.functional.linear(x, router.weight))
    torch.testing.assert_close(probabilities, scores.gather(1, indices))
    assert not torch.equal(plain(x).indices, indices)


def test_update() -> None:
    """By the sign of what is missing to the mean: of 8 choices of 4 experts 2 each."""
    router = TopKRouter(4, 4, 1, expert_bias_rate=0.25)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    x = torch.eye(4)[[0, 0, 0, 0, 0, 1, 1, 2]]
    router(x[:3])  # in microbatches
    router(x[3:])
    assert router.expert_bias is not None and router.expert_counts is not None
    assert router.expert_counts.tolist() == [5, 2, 1, 0]
    router.update_expert_bias()
    assert router.expert_bias.tolist() == [-0.25, 0, 0.25, 0.25] and not router.expert_counts.any()
    router.eval()
    router(x)
    assert not router.expert_counts.any()
    router.update_expert_bias()
    assert router.expert_bias.tolist() == [-0.25, 0, 0.25, 0.25]


@pytest.mark.parametrize("reentrant", [True, False, None])
def test_a_recomputation_is_not_counted(reentrant: bool | None) -> None:
    """None: minifloat's checkpoint."""
    router = made(expert_bias_rate=0.5)
    x = torch.randn(6, H, requires_grad=True)
    if reentrant is None:
        loss = minifloat.checkpoint(router, x).probabilities.sum()
    else:
        loss = torch_checkpoint(lambda x: router(x).probabilities.sum(), x, use_reentrant=reentrant)
    loss.backward()
    assert router.weight.grad is not None and router.expert_counts is not None and router.expert_counts.sum() == 12


def balanced_on_ranks(rank: int, size: int, wrap: str) -> list[Tensor]:
    """Of two microbatches that both reduce gradients: choices, counts, and the bias after the update over all ranks."""
    torch.manual_seed(0)
    router = TopKRouter(H, 8, 2, expert_bias_rate=0.25)
    model = {"none": lambda x: x, "ddp": DistributedDataParallel, "data_parallel": data_parallel}[wrap](router)
    torch.manual_seed(1 + rank)
    chosen = torch.zeros(8, dtype=torch.int64)
    for rows in (5, 6):
        got = model(torch.randn(rows, H))
        got.probabilities.sum().backward()
        chosen += got.indices.flatten().bincount(minlength=8)
    assert router.expert_counts is not None and router.expert_bias is not None
    counts = router.expert_counts.clone()
    router.update_expert_bias(process_group())
    return [chosen, counts, router.expert_bias]


@pytest.mark.parametrize("wrap", ["none", "ddp", "data_parallel"])
def test_ranks_sum_their_counts(worker_pool: Pools, wrap: str) -> None:
    """Each rank counts its own, in a wrapper that broadcasts buffers, too."""
    (chosen, counts, bias), (other_chosen, other_counts, other_bias) = worker_pool(2).run(balanced_on_ranks, wrap)
    assert torch.equal(counts, chosen) and torch.equal(other_counts, other_chosen)
    assert not torch.equal(counts, other_counts)
    want = 0.25 * (44 - 8 * (counts + other_counts)).sign().float()
    assert torch.equal(bias, want) and torch.equal(other_bias, want)


# ---- compiled; nothing read by the host ----


@first_by_default
@pytest.mark.parametrize("name", sorted(ALL, key=lambda name: name != "groups"))
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(name: str) -> None:
    """In one graph for any number of tokens, counts included."""
    router = made(**ALL[name], **LOSSES)
    compiled = torch.compile(router, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (4, 7):
        x = torch.randn(tokens, H, requires_grad=True)
        mask = None if "position" in name else torch.arange(tokens) != 2
        results = []
        for call in (router, compiled):
            if router.expert_counts is not None:
                router.expert_counts.zero_()
            torch.manual_seed(0)
            got = call(x, mask)
            gradients = torch.autograd.grad(got.probabilities.square().sum() + got.loss, [x, *router.parameters()])
            counts = [] if router.expert_counts is None else [router.expert_counts.clone()]
            results.append([*got, *gradients, *counts])
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager)


@FOR_ALL_OPTIONS
def test_no_value_is_read_by_the_host(options: dict[str, Any]) -> None:
    """Fake tensors have none; the number of tokens is a symbol."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        router = TopKRouter(H, 8, 2, **options, **LOSSES)
        x = mode.from_tensor(torch.ones(6, H), static_shapes=False).requires_grad_()
        mask = None if "drop_policy" in options else mode.from_tensor(torch.ones(6, dtype=torch.bool))
        probabilities, indices, loss = router(x, mask)
        (probabilities.sum() + loss).backward()
        if router.expert_bias is not None:
            router.update_expert_bias()
    assert probabilities.shape == indices.shape == (6, 2) and router.weight.grad is not None


@pytest.mark.gpu
@FOR_ALL_OPTIONS
def test_no_synchronization_on_a_gpu(options: dict[str, Any]) -> None:
    """And runs repeat to the bit."""
    router = made(256, 8, "cuda", **options, **LOSSES)
    x, mask = torch.randn(500, H, device="cuda", requires_grad=True), torch.ones(500, dtype=torch.bool, device="cuda")
    router(x, mask).loss.backward()
    runs = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            torch.manual_seed(0)
            got = router(x, mask)
            gradients = torch.autograd.grad(got.probabilities.sum() + got.loss, [x, *router.parameters()])
            runs.append([*got, *gradients])
            if router.expert_bias is not None and len(runs) == 2:
                router.update_expert_bias()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("options", [{}, {"token_mask": torch.zeros(0, dtype=torch.bool)}])
@pytest.mark.parametrize("capacity", [{}, {"capacity_factor": 1.5}])
def test_no_tokens(options: dict[str, Any], capacity: dict[str, Any]) -> None:
    router = made(expert_bias_rate=0.5, **capacity, **LOSSES, **ALL_LOSSES)
    x = torch.zeros(0, H, requires_grad=True)
    probabilities, indices, loss = router(x, **options)
    assert probabilities.shape == indices.shape == (0, 2) and loss.item() == 0
    (probabilities.sum() + loss).backward()
    assert router.weight.grad is not None and not router.weight.grad.any()
    router.update_expert_bias()


# ---- mistakes ----


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TopKRouter(H, 8, 9), r"TopKRouter\(12, 8, 9\): top_k is 9, and there are 8 experts"),
        (lambda: TopKRouter(H, 8, 2, num_groups=2), "num_groups is 2 and group_top_k None; give both"),
        (lambda: TopKRouter(H, 8, 2, group_top_k=1), "give both"),
        (lambda: TopKRouter(H, 8, 2, num_groups=3, group_top_k=1), "groups of 8 experts must be equal"),
        (lambda: TopKRouter(H, 8, 2, num_groups=2, group_top_k=3), "at most their number"),
        (lambda: TopKRouter(H, 8, 3, num_groups=4, group_top_k=1), "1 of 4 groups .* have 2 experts"),
        (lambda: TopKRouter(H, 8, 2, normalize_top_k=True, score_before_top_k=False), "sums up to 1 already"),
        (lambda: TopKRouter(H, 8, 2, dtype=torch.float16, params_dtype=torch.float32), "give one of them"),
        (lambda: TopKRouter(H, 8, 2).update_expert_bias(), "there is no expert_bias to update.*expert_bias_rate"),
        (lambda: made()(torch.ones(3, 5)), r"input is .*\(3, 5\); floating-point numbers \[\.\.\., 12\]"),
        (lambda: made()(torch.ones(3, H).int()), "floating-point"),
        (lambda: made()(torch.tensor(1.0)), "input is"),
        (lambda: made(seq_aux_loss_coefficient=1.0, seq_dim=1)(torch.ones(3, H)), r"seq_dim is 1, .* of shape \(3,\)"),
        (lambda: made()(torch.ones(3, H), torch.ones(3)), r"token_mask is .*float32.*; bools of shape \(3,\)"),
        (lambda: made()(torch.ones(3, H), torch.ones(3, 1).bool()), "token_mask is"),
    ],
)
def test_mistakes(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.gpu
def test_logits_of_bf16_on_a_gpu() -> None:
    """Multiplied on tensor cores, they and their gradients are as accurate as ``multiply_in_fp32`` says."""
    x = torch.randn(3000, 520, device="cuda").bfloat16().requires_grad_()
    w = torch.randn(24, 520, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(3000, 24, device="cuda") * 1e-3
    y = multiply_in_fp32(x, w)
    assert y.dtype == torch.float32
    exact = x.detach().double() @ w.detach().double().t()
    assert (y - exact).abs().max() <= exact.abs().max() * 2.0**-16
    again = multiply_in_fp32(x, w)
    assert torch.equal(y, again)
    dx, dw = torch.autograd.grad(y, [x, w], dy)
    for found, expected in ((dx, dy.double() @ w.detach().double()), (dw, dy.double().t() @ x.detach().double())):
        bound = expected.abs() * 2.0**-8 + expected.abs().max() * 2.0**-15
        assert found.dtype == torch.bfloat16 and ((found - expected).abs() <= bound).all()
