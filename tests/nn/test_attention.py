"""Dot-product attention against a float64 model that goes through queries and keys one by one."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minifloat.functional import attention as functional
from minifloat.functional.attention import Band, Mask, packed_places
from minifloat.nn.attention import DotProductAttention
from tests.helpers.sample import each_once, each_pair, first_by_default

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CAUSAL = ("causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")


def allowed(i: int, j: int, queries: int, keys: int, mask_type: str, window: tuple[int, int]) -> bool:
    """Query i of a sequence sees key j, by the definition of the mask types."""
    top_left = mask_type in ("causal", "padding_causal")
    distance = j - i - (0 if top_left else keys - queries)
    left, right = window
    if mask_type in CAUSAL:
        right = 0
    return (left == -1 or distance >= -left) and (right == -1 or distance <= right)


def pairs(queries: int, keys: int, mask_type: str, window: tuple[int, int] = (-1, -1)) -> Tensor:
    rows = [[allowed(i, j, queries, keys, mask_type, window) for j in range(keys)] for i in range(queries)]
    return torch.tensor(rows, dtype=torch.bool).reshape(queries, keys)


def reference64(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, *, scale: float, softcap: float | None = None, bias: Any = 0.0
) -> Tensor:
    """q [B, S, H, E], k [B, T, G, E], v [B, T, G, F], kept [.., S, T] to [B, S, H * F], all in float64."""
    heads = torch.arange(q.shape[2]) // (q.shape[2] // k.shape[2])
    scores = torch.einsum("bshe,bthe->bhst", q, k[:, :, heads]) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    weights = (scores + bias).exp() * kept
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bhst,bthf->bshf", weights / total.where(total > 0, 1), v[:, :, heads]).flatten(2)


def inputs(
    batch: int, queries: int, keys: int, heads: int, groups: int, channels: Any, dtype: torch.dtype, device: Any = "cpu"
) -> list[Tensor]:
    e, f = (channels, channels) if isinstance(channels, int) else channels
    shapes = (batch, queries, heads, e), (batch, keys, groups, e), (batch, keys, groups, f)
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def check(out: Tensor, leaves: list[Tensor], kept: Tensor, **options: Any) -> None:
    """The output and the gradients of q, k, v in bshd, which are ``leaves``."""
    exact = [t.detach().cpu().double().requires_grad_() for t in leaves]
    options.setdefault("scale", leaves[0].shape[-1] ** -0.5)
    expected = reference64(*exact, kept, **options)
    dy = torch.randn_like(expected)
    dtype = leaves[0].dtype
    actual = [out, *torch.autograd.grad(out, leaves, dy.to(out.device, out.dtype))]
    assert out.dtype == dtype
    for a, e in zip(actual, [expected, *torch.autograd.grad(expected, exact, dy)], strict=True):
        torch.testing.assert_close(a.detach().cpu().double(), e.detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@each_pair
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5), (1, 6)], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (2, 3), (-1, 1), (0, 0), (100, 100)], ids=str)
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "causal_bottom_right"])
def test_masks(mask_type: Any, window: tuple[int, int], lengths: tuple[int, int], softcap: float | None) -> None:
    leaves = inputs(2, *lengths, 4, 2, 8, torch.float64)
    module = DotProductAttention(4, 8, 2, 0.0, "bshd", mask_type, window, softcap=softcap)
    check(module(*leaves), leaves, pairs(*lengths, mask_type, window), softcap=softcap)


@each_pair
@pytest.mark.parametrize("window", [None, (2, 0)], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("channels", [16, (24, 16), (16, 40)], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_groups_and_head_dims(
    dtype: torch.dtype, groups: int, channels: Any, softcap: Any, window: Any, device: torch.device
) -> None:
    leaves = inputs(2, 13, 13, 6, groups, channels, dtype, device)
    module = DotProductAttention(6, channels, groups, 0.0, "bshd", "causal", window, softcap=softcap)
    check(module(*leaves), leaves, pairs(13, 13, "causal", window or (-1, -1)), softcap=softcap)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_formats_are_the_same_numbers(softcap: float | None) -> None:
    options: dict[str, Any] = {"softcap": softcap, "softmax_scale": 0.3}
    q, k, v = inputs(3, 5, 5, 4, 2, 8, torch.float32)
    y = DotProductAttention(4, 8, 2, qkv_format="bshd", **options)(q, k, v)
    turned = [t.transpose(0, 1) for t in (q, k, v)]
    assert torch.equal(DotProductAttention(4, 8, 2, **options)(*turned).transpose(0, 1), y)
    cu_seqlens = torch.tensor([0, 5, 10, 15], dtype=torch.int32)
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    packed = DotProductAttention(4, 8, 2, qkv_format="thd", **options)(*flat, cu_seqlens_q=cu_seqlens)
    assert packed.shape == (15, 32)
    torch.testing.assert_close(packed, y.flatten(0, 1))


PACKED = pytest.mark.parametrize(
    "lengths", [([3, 5], [3, 5]), ([4, 0, 1, 6], [4, 0, 1, 6]), ([2, 5, 1], [6, 5, 3]), ([5], [2])], ids=str
)


@each_pair
@PACKED
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, (1, 0)], ids=str)
@pytest.mark.parametrize("mask_type", ["padding", "causal", "padding_causal", "padding_causal_bottom_right"])
def test_packed_sequences_are_as_each_alone(
    mask_type: Any, window: Any, softcap: Any, lengths: tuple[list[int], list[int]], device: torch.device
) -> None:
    """Values and gradients; two tokens behind the last sequence give 0 and get none."""
    starts = [torch.tensor([0, *torch.tensor(each).cumsum(0)], dtype=torch.int32) for each in lengths]
    q, k, v = (
        torch.randn(sum(length) + 2, heads, 16, device=device, requires_grad=True)
        for length, heads in zip((lengths[0], lengths[1], lengths[1]), (4, 2, 2), strict=True)
    )
    module = DotProductAttention(4, 16, 2, 0.0, "thd", mask_type, window, softcap=softcap)
    y = module(q, k, v, cu_seqlens_q=starts[0].to(device), cu_seqlens_kv=starts[1].to(device))
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [q, k, v], dy)
    assert not y[-2:].any() and not any(g[-2:].any() for g in gradients)
    kind = "no_mask" if mask_type == "padding" else mask_type
    for (a, b), (c, d) in zip(pairwise(starts[0].tolist()), pairwise(starts[1].tolist()), strict=True):
        alone = [q[None, a:b], k[None, c:d], v[None, c:d]]
        exact = [t.detach().cpu().double().requires_grad_() for t in alone]
        expected = reference64(*exact, pairs(b - a, d - c, kind, window or (-1, -1)), scale=0.25, softcap=softcap)
        reference = [expected, *torch.autograd.grad(expected, exact, dy[None, a:b].cpu().double())]
        parts = [y[None, a:b], gradients[0][None, a:b], gradients[1][None, c:d], gradients[2][None, c:d]]
        for part, e in zip(parts, reference, strict=True):
            tolerance = 1e-5 if device.type == "cpu" else 5e-3  # a GPU multiplies fp32 scores in TF32
            torch.testing.assert_close(part.detach().cpu().double(), e.detach(), rtol=tolerance, atol=tolerance)


@each_pair
@pytest.mark.parametrize("by_mask", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("mask_type", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_padding(mask_type: Any, softcap: Any, by_mask: bool, device: torch.device) -> None:
    """Sequences of different lengths, one of them empty; queries in the padding give 0."""
    lengths_q, lengths_kv = torch.tensor([5, 2, 0]), torch.tensor([4, 6, 3])
    leaves = inputs(3, 5, 6, 4, 2, 16, torch.float32, device)
    module = DotProductAttention(4, 16, 2, 0.0, "bshd", mask_type, softcap=softcap)
    if by_mask:
        masks = [
            (torch.arange(s) >= n[:, None])[:, None, None].to(device) for s, n in ((5, lengths_q), (6, lengths_kv))
        ]
        y = module(*leaves, attention_mask=(masks[0], masks[1]))
    else:
        starts = [torch.cat((n.new_zeros(1), n.cumsum(0))).to(device) for n in (lengths_q, lengths_kv)]
        y = module(*leaves, cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1])
    kept = torch.zeros(3, 1, 5, 6, dtype=torch.bool)
    for b, (n, m) in enumerate(zip(lengths_q.tolist(), lengths_kv.tolist(), strict=True)):
        kept[b, 0, :n, :m] = pairs(n, m, "no_mask" if mask_type == "padding" else mask_type)
    assert not y[1, 2:].any() and not y[2].any()
    # A second backward is for CPUs: PyTorch's compiled ones free what was saved as they go.
    gradients = torch.autograd.grad(y.sum(), leaves, retain_graph=device.type == "cpu")
    assert all(g.isfinite().all() for g in gradients) and not gradients[0][1, 2:].any()
    if device.type == "cpu":  # a GPU may multiply fp32 scores in TF32
        check(y, leaves, kept, softcap=softcap)


@each_once
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (1, 1, 5, 6), (2, 1, 1, 6), (5, 6)], ids=str)
def test_arbitrary_mask_and_bias(shape: tuple[int, ...], softcap: Any) -> None:
    leaves = inputs(2, 5, 6, 4, 2, 8, torch.float64)
    masked = torch.rand(shape) < 0.4
    bias = torch.randn(shape, dtype=torch.float64)
    module = DotProductAttention(4, 8, 2, 0.0, "bshd", "arbitrary", softcap=softcap)
    check(module(*leaves, attention_mask=masked), leaves, ~masked, softcap=softcap)
    y = module(*leaves, attention_mask=masked, core_attention_bias=bias)
    check(y, leaves, ~masked, softcap=softcap, bias=bias)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_bias_has_a_gradient(softcap: float | None) -> None:
    q, k, v = inputs(1, 3, 3, 2, 2, 8, torch.float64)
    bias = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    module = DotProductAttention(2, 8, None, 0.0, "bshd", softcap=softcap)
    y = module(q, k, v, core_attention_bias=bias)
    exact = bias.detach().clone().requires_grad_()
    expected = reference64(q, k, v, pairs(3, 3, "causal"), scale=8**-0.5, softcap=softcap, bias=exact)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), bias)[0], torch.autograd.grad(expected.square().sum(), exact)[0]
    )


@each_once
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_see_nothing_give_zero(
    dtype: torch.dtype, with_bias: bool, softcap: Any, device: torch.device
) -> None:
    leaves = inputs(1, 4, 4, 2, 2, 16, dtype, device)
    masked = torch.zeros(4, 4, dtype=torch.bool, device=device)
    masked[1] = True
    module = DotProductAttention(2, 16, None, 0.0, "bshd", "arbitrary", softcap=softcap)
    bias = torch.zeros(4, 4, device=device) if with_bias else None
    y = module(*leaves, attention_mask=masked, core_attention_bias=bias)
    gradients = torch.autograd.grad(y.square().sum(), leaves)
    assert not y[0, 1].any() and not gradients[0][0, 1].any()
    assert y.isfinite().all() and all(g.isfinite().all() for g in gradients)


@each_pair
@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0)], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, (1, 0)], ids=str)
def test_empty(shape: tuple[int, int, int], softcap: Any, window: Any) -> None:
    leaves = inputs(*shape, 2, 1, 8, torch.float32)
    y = DotProductAttention(2, 8, 1, 0.0, "bshd", "causal", window, softcap=softcap)(*leaves)
    assert y.shape == (shape[0], shape[1], 16) and not y.any()
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), leaves))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, (2, 0)], ids=str)
def test_dropout(softcap: Any, window: Any) -> None:
    """By PyTorch's generator; recomputed the same by a checkpoint; off in evaluation; right on average."""
    module = DotProductAttention(2, 8, None, 0.5, "bshd", "causal", window, softcap=softcap)
    leaves = inputs(1, 6, 6, 2, 2, 8, torch.float32)

    def run(function: Any) -> list[Tensor]:
        torch.manual_seed(3)
        y = function(*leaves)
        torch.rand(5)  # the generator moves on before backward
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    plain, recomputed = run(module), run(lambda *t: checkpoint(module, *t, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    assert not torch.equal(module(*leaves), module(*leaves))
    mean = module(*(t.expand(2000, -1, -1, -1) for t in leaves)).mean(0, keepdim=True)
    exact = module.eval()(*leaves)
    assert torch.equal(exact, module(*leaves))
    torch.testing.assert_close(mean, exact, rtol=0, atol=0.2)


COMPILED: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": (3, 0)},
    "softcap": {"softcap": 2.0},
    "padding": {"attn_mask_type": "padding_causal"},
    "packed": {"qkv_format": "thd"},
}


@first_by_default
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", list(COMPILED))
def test_compiles_to_one_graph_with_dynamic_lengths(case: str, backend: str) -> None:
    torch._dynamo.reset()
    module = DotProductAttention(4, 8, 2, **{"qkv_format": "bshd"} | COMPILED[case])
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for length in (7, 12):
        shape = (length,) if case == "packed" else (2, length)
        leaves = [torch.randn(*shape, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        more: dict[str, Any] = {}
        if case == "packed":
            more["cu_seqlens_q"] = torch.tensor([0, 3, length], dtype=torch.int32)
        if case == "padding":
            more["attention_mask"] = torch.arange(length) >= torch.tensor([[3], [length]])
        actual, expected = compiled(*leaves, **more), module(*leaves, **more)
        torch.testing.assert_close(actual, expected)
        dy = torch.randn_like(expected)
        for a, e in zip(
            torch.autograd.grad(actual, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True
        ):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


# ---- backends ----


@each_once
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["none", "causal", "band", "sequences"])
def test_every_backend_computes_the_same(kind: str, softcap: float | None) -> None:
    """FlexAttention too, which runs forward on a CPU, uncompiled."""
    starts = torch.tensor([0, 4, 4, 17], dtype=torch.int32)
    places = packed_places(starts, starts, 19, 19, True)
    mask = {
        "none": Mask(),
        "causal": Mask(Band(None, 0)),
        "band": Mask(Band(3, 1), 2),
        "sequences": Mask(Band(5, 0), 0, *places),
    }[kind]
    assert mask.kind == kind
    q, k, v = torch.randn(1, 4, 19, 16), torch.randn(1, 2, 19, 16), torch.randn(1, 2, 19, 32)
    with torch.no_grad():
        expected = functional.by_math(q, k, v, mask, 0.3, softcap)
        torch.testing.assert_close(functional.by_flex(q, k, v, mask, 0.3, softcap), expected, rtol=1e-5, atol=1e-5)
        if softcap is None:
            torch.testing.assert_close(functional.by_sdpa(q, k, v, mask, 0.3), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_masks_of_a_shape_are_kept() -> None:
    q = torch.randn(1, 1, 5, 16)
    band = Mask(Band(2, 0))
    assert functional._block_mask(q, q, band) is functional._block_mask(q, q, Mask(Band(2, 0)))
    with torch.inference_mode():
        other = functional._block_mask(q, q, Mask(Band(1, 0)))
    assert not other.kv_indices.is_inference()


def test_the_backend_is_decided_by_what_is_needed() -> None:
    def name(device: str, kind: Any, **more: Any) -> str:
        options: dict[str, Any] = {"softcap": False, "dropout": False, "dtype": torch.bfloat16, "head_dim": 64}
        return functional.choose_backend(device, kind, **options | more).name

    for device in ("cpu", "cuda", "meta"):
        assert name(device, "none") == name(device, "causal", dropout=True) == name(device, "tensor") == "sdpa"
        assert name(device, "tensor", softcap=True) == name(device, "band", softcap=True, dropout=True) == "math"
    assert name("cpu", "band") == name("cpu", "sequences") == "sdpa" and name("cpu", "none", softcap=True) == "math"
    assert name("cuda", "band") == name("cuda", "sequences") == name("cuda", "none", softcap=True) == "flex"
    for obstacle in ({"dropout": True}, {"dtype": torch.float64}, {"head_dim": 8}):
        assert name("cuda", "band", **obstacle) == "sdpa"


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["window", "softcap", "packed", "padding"])
def test_flex_attention_on_a_gpu(case: str) -> None:
    """Many blocks, so that some are empty, some full and some cut; and never a wait for the device."""
    torch._dynamo.reset()  # the tests before this one may have used up how often one function is compiled
    options: dict[str, Any] = {"qkv_format": "bshd"} | COMPILED[case]
    if case == "window":
        options["window_size"] = (150, 0)
    module = DotProductAttention(4, 64, 2, **options)
    assert module.backend("cuda").name == "flex"
    length, more = 700, {}
    if case == "packed":
        more["cu_seqlens_q"] = torch.tensor([0, 3, 300, 690], dtype=torch.int32, device="cuda")
    if case == "padding":
        more["attention_mask"] = (torch.arange(length) >= torch.tensor([[30], [length]])).cuda()
    shape = (length,) if case == "packed" else (2, length)
    leaves = [torch.randn(*shape, heads, 64, device="cuda").bfloat16().requires_grad_() for heads in (4, 2, 2)]
    exact = [t.detach().cpu().double().requires_grad_() for t in leaves]
    expected = module(*exact, **{name: t.cpu() for name, t in more.items()})
    dy = torch.randn_like(expected)
    module(*leaves, **more).sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = module(*leaves, **more)
        gradients = torch.autograd.grad(y, leaves, dy.to(y.device, y.dtype, non_blocking=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, e in zip([y, *gradients], [expected, *torch.autograd.grad(expected, exact, dy)], strict=True):
        torch.testing.assert_close(a.detach().cpu().double(), e.detach(), rtol=3e-2, atol=3e-2)


# ---- errors ----


def test_wrong_options_are_named() -> None:
    for message, arguments, keywords in (
        ("8 heads do not divide by num_gqa_groups=3", (8, 16, 3), {}),
        (r"window_size is \(-2, 0\)", (8, 16), {"window_size": (-2, 0)}),
        ("no arbitrary mask", (8, 16), {"qkv_format": "thd", "attn_mask_type": "arbitrary"}),
    ):
        with pytest.raises(ValueError, match=message):
            DotProductAttention(*arguments, **keywords)


def test_wrong_inputs_are_named() -> None:
    q = torch.randn(2, 5, 4, 8)
    flags = torch.zeros(2, 5, dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 5, 10])
    bshd, thd = {"qkv_format": "bshd"}, {"qkv_format": "thd"}
    for message, options, tensors, more in (
        (r"query has shape \(5, 4, 8\); bshd", bshd, (q[0], q, q), {}),
        ("4 heads and 8 channels", bshd, (q, q[:, :, :2], q), {}),
        ("4 heads and 8 channels", bshd, (q, q, q[..., :6]), {}),
        ("differ in batch or length", bshd, (q, q[:1], q[:1]), {}),
        ("differ in batch or length", bshd, (q, q, q[:, :3]), {}),
        ("need cu_seqlens_q", thd, (q[0], q[0], q[0]), {}),
        ("3 entries, cu_seqlens_kv 2", thd, (q[0],) * 3, {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens[:2]}),
        (
            "core_attention_bias has no use",
            thd,
            (q[0],) * 3,
            {"cu_seqlens_q": cu_seqlens, "core_attention_bias": q[0, 0]},
        ),
        ("attention_mask has no use", bshd, (q, q, q), {"attention_mask": flags}),
        ("cu_seqlens_q has no use", bshd, (q, q, q), {"cu_seqlens_q": cu_seqlens}),
        ("neither given", bshd, (q, q, q), {"attn_mask_type": "padding"}),
        ("a padding mask is", bshd, (q, q, q), {"attn_mask_type": "padding", "attention_mask": flags[:, :3]}),
        (
            "of 1 sequences, the batch of 2",
            bshd,
            (q,) * 3,
            {"attn_mask_type": "padding", "cu_seqlens_q": cu_seqlens[:2]},
        ),
        ("True where masked out", bshd, (q, q, q), {"attn_mask_type": "arbitrary"}),
        (r"must broadcast to \(2, 4, 5, 5\)", bshd, (q, q, q), {"core_attention_bias": torch.randn(3, 5)}),
    ):
        with pytest.raises(ValueError, match=message):
            DotProductAttention(4, 8, **options)(*tensors, **more)  # type: ignore[arg-type]


def test_scale() -> None:
    leaves = inputs(1, 4, 4, 2, 2, 9, torch.float64)
    check(DotProductAttention(2, 9, qkv_format="bshd")(*leaves), leaves, pairs(4, 4, "causal"), scale=1 / math.sqrt(9))
    module = DotProductAttention(2, 9, qkv_format="bshd", softmax_scale=0.7)
    check(module(*leaves), leaves, pairs(4, 4, "causal"), scale=0.7)
