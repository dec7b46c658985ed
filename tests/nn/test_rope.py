"""Rotary positions against complex multiplication in float64, and against the rotate-half form of other libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minifloat.functional.rope import apply_rotary_pos_emb, split_rotated
from minifloat.nn.attention import RotaryPositionEmbedding
from tests.helpers.sample import each_pair, first_by_default

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True])


def by_complex_numbers(x: Tensor, position: Tensor, r: int, interleaved: bool, base: float = 10000.0) -> Tensor:
    """x [..., tokens, h, d] with positions [..., tokens]: pairs as complex numbers times e^(i angle), in float64."""
    x = x.double()
    head, rest = x[..., :r], x[..., r:]
    pairs = head.unflatten(-1, (r // 2, 2)) if interleaved else head.unflatten(-1, (2, r // 2)).transpose(-1, -2)
    frequency = torch.tensor([base ** (-2 * i / r) for i in range(r // 2)], dtype=torch.float64)
    turn = torch.polar(torch.ones((), dtype=torch.float64), position.double()[..., None, None] * frequency)
    turned = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turn)
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat((turned, rest), -1)


@each_pair
@INTERLEAVED
@pytest.mark.parametrize("percent", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_bshd_and_sbhd_against_complex_numbers(percent: float, interleaved: bool, dtype: torch.dtype) -> None:
    rope = RotaryPositionEmbedding(20, percent, interleaved=interleaved)
    freqs = rope(11)
    assert freqs.shape == (11, 1, 1, int(20 * percent)) and freqs.dtype == torch.float32
    t = torch.randn(3, 9, 2, 20).to(dtype)  # fewer tokens than angles
    expected = by_complex_numbers(t, torch.arange(9).expand(3, 9), rope.dim, interleaved)
    y = apply_rotary_pos_emb(t, freqs, "bshd", interleaved=interleaved)
    assert y.dtype == dtype and torch.equal(y[..., rope.dim :], t[..., rope.dim :])
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=TOLERANCE[dtype] * 4)
    across = apply_rotary_pos_emb(t.transpose(0, 1), freqs, "sbhd", interleaved=interleaved)
    assert torch.equal(across.transpose(0, 1), y)


@INTERLEAVED
def test_gradient_is_the_turn_back(interleaved: bool) -> None:
    freqs = RotaryPositionEmbedding(12, 0.7, interleaved=interleaved)(6)  # 8 of 12 channels
    t = torch.randn(6, 2, 3, 12, requires_grad=True)
    dy = torch.randn(6, 2, 3, 12)
    y = apply_rotary_pos_emb(t, freqs, "sbhd", interleaved=interleaved)
    (dt,) = torch.autograd.grad(y, t, dy)
    expected = by_complex_numbers(dy.transpose(0, 1), -torch.arange(6).expand(2, 6), 8, interleaved).transpose(0, 1)
    torch.testing.assert_close(dt.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(apply_rotary_pos_emb(y, -freqs, "sbhd", interleaved=interleaved), t)


def test_frequencies_are_rounded_once() -> None:
    """Powers in fp32 would turn a pair at position 10^5 by up to 0.002 too far."""
    for dim, base in ((128, 500000.0), (64, 10000.0)):
        exact = torch.tensor([base ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
        assert torch.equal(RotaryPositionEmbedding(dim, rotary_base=base).inv_freq, exact.float())


@INTERLEAVED
def test_a_bf16_gradient_is_rounded_once(interleaved: bool) -> None:
    freqs = RotaryPositionEmbedding(12, interleaved=interleaved)(6)
    t, dy = torch.randn(6, 2, 3, 12), torch.randn(6, 2, 3, 12).bfloat16()
    grads = []
    for dtype in (torch.bfloat16, torch.float32):
        leaf = t.to(dtype).requires_grad_()
        apply_rotary_pos_emb(leaf, freqs, "sbhd", interleaved=interleaved).backward(dy.to(dtype))
        grads.append(leaf.grad)
    assert grads[0] is not None and grads[1] is not None and torch.equal(grads[0], grads[1].bfloat16())


def test_more_tokens_behind_the_last_sequence_than_angles() -> None:
    """They have no position, and read no angle beyond those that there are."""
    freqs, t = RotaryPositionEmbedding(8)(3), torch.randn(9, 2, 8)
    y = apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=torch.tensor([0, 3]))
    assert torch.equal(y[:3], apply_rotary_pos_emb(t[None, :3], freqs, "bshd")[0]) and y.isfinite().all()


@INTERLEAVED
@pytest.mark.parametrize("lengths", [[3, 5], [1], [4, 0, 2, 1], [0, 3]])
def test_packed_sequences_start_at_position_zero(lengths: list[int], interleaved: bool) -> None:
    freqs = RotaryPositionEmbedding(8, interleaved=interleaved)(5)
    sequences = [torch.randn(n, 2, 8) for n in lengths]
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    padding = torch.randn(2, 2, 8)  # two tokens behind the last sequence
    t = torch.cat([*sequences, padding]).requires_grad_()
    y = apply_rotary_pos_emb(t, freqs, "thd", interleaved=interleaved, cu_seqlens=cu_seqlens)
    alone = [apply_rotary_pos_emb(s[None], freqs, "bshd", interleaved=interleaved)[0] for s in sequences]
    assert torch.equal(y[:-2], torch.cat(alone)) and y.isfinite().all()
    y.sum().backward()
    assert t.grad is not None and t.grad.isfinite().all()


def test_start_positions() -> None:
    freqs = RotaryPositionEmbedding(8)(12)
    starts = torch.tensor([4, 0, 7])
    t = torch.randn(3, 5, 2, 8)
    y = apply_rotary_pos_emb(t, freqs, "bshd", starts)
    for each, start in enumerate(starts.tolist()):
        assert torch.equal(y[each], apply_rotary_pos_emb(t[each : each + 1], freqs[start:], "bshd")[0])
    assert torch.equal(apply_rotary_pos_emb(t.transpose(0, 1), freqs, "sbhd", starts).transpose(0, 1), y)
    cu_seqlens = torch.tensor([0, 5, 10, 15])
    assert torch.equal(
        apply_rotary_pos_emb(t.flatten(0, 1), freqs, "thd", starts, cu_seqlens=cu_seqlens), y.flatten(0, 1)
    )


@pytest.mark.parametrize("start", [-1, 8])
def test_positions_without_angles_raise(start: int) -> None:
    """Below 0 too, which would count from the end."""
    freqs, starts, t = RotaryPositionEmbedding(8)(12), torch.tensor([0, start]), torch.randn(2, 5, 2, 8)
    for options in ({"tensor_format": "bshd"}, {"tensor_format": "thd", "cu_seqlens": torch.tensor([0, 5, 10])}):
        with pytest.raises(IndexError):
            apply_rotary_pos_emb(t if len(options) == 1 else t.flatten(0, 1), freqs, start_positions=starts, **options)  # type: ignore[arg-type]


def test_interpolation() -> None:
    plain, factor = RotaryPositionEmbedding(8), RotaryPositionEmbedding(8, seq_len_interpolation_factor=4)
    torch.testing.assert_close(factor(9), plain(9) / 4)
    dynamic = RotaryPositionEmbedding(8, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=3)
    torch.testing.assert_close(dynamic(6), plain(6) / 2)
    torch.testing.assert_close(dynamic(12), plain(12) * (3 / 12))


def test_interpolation_follows_the_end_of_the_sequence() -> None:
    """Parts of one sequence have the angles of the whole, if they end where it does."""
    plain = RotaryPositionEmbedding(8)
    dynamic = RotaryPositionEmbedding(8, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=8)
    for end in (15, 16, 17, 32):
        whole = dynamic(end)
        torch.testing.assert_close(whole, plain(end) * min(1 / 2, 8 / end))
        for start in (0, 1, end // 2, end - 1):
            assert torch.equal(dynamic(end - start, offset=start), whole[start:])


def test_angles_stay_fp32_and_follow_the_device() -> None:
    rope = RotaryPositionEmbedding(64)
    expected = rope(5)
    assert torch.equal(rope.bfloat16()(5), expected) and not rope.state_dict()
    meta = RotaryPositionEmbedding(64, device="meta")
    assert meta(5).is_meta
    assert torch.equal(meta.to_empty(device="cpu")(5), expected)


@pytest.mark.gpu
@INTERLEAVED
def test_the_same_on_a_gpu(interleaved: bool) -> None:
    rope = RotaryPositionEmbedding(64, interleaved=interleaved)
    t = torch.randn(2, 130, 4, 64)
    expected = by_complex_numbers(t, torch.arange(130).expand(2, 130), 64, interleaved)
    y = apply_rotary_pos_emb(t.cuda(), rope.cuda()(130), "bshd", interleaved=interleaved)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (5, 0, 3, 8), (5, 2, 0, 8)])
def test_empty(shape: tuple[int, ...]) -> None:
    assert apply_rotary_pos_emb(torch.randn(shape), RotaryPositionEmbedding(8)(5)).shape == shape


@first_by_default
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_to_one_graph(packed: bool) -> None:
    torch._dynamo.reset()
    rope = RotaryPositionEmbedding(8)
    cu_seqlens = torch.tensor([0, 3, 6], dtype=torch.int32)

    def turn(t: Tensor) -> Tensor:
        return apply_rotary_pos_emb(t, rope(t.shape[0]), "thd" if packed else "sbhd", cu_seqlens=options)

    options: Any = cu_seqlens if packed else None
    compiled = torch.compile(turn, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (6, 9):
        t = torch.randn(length, 2, 8) if packed else torch.randn(length, 3, 2, 8)
        torch.testing.assert_close(compiled(t), turn(t))


def test_wrong_input_is_named() -> None:
    freqs = RotaryPositionEmbedding(8)(5)
    t = torch.randn(5, 2, 3, 8)
    for message, arguments, keywords in (
        ("'hdbs'", (t, freqs, "hdbs"), {}),
        ("4 dims", (t[0], freqs), {}),
        ("9 tokens but angles of 5", (torch.randn(9, 2, 3, 8), freqs), {}),
        ("at most the 6 channels", (t[..., :6], freqs), {}),
        ("freqs has shape", (t, freqs[:, 0]), {}),
        ("need cu_seqlens", (t[0], freqs, "thd"), {}),
        ("is for tensor_format='thd'", (t, freqs), {"cu_seqlens": torch.tensor([0, 5])}),
        (r"each of 2 sequences", (t, freqs, "sbhd", torch.tensor([0, 1, 2])), {}),
        ("torch.float32 of shape", (t[0], freqs, "thd"), {"cu_seqlens": torch.tensor([0.0, 5.0])}),
    ):
        with pytest.raises(ValueError, match=message):
            apply_rotary_pos_emb(*arguments, **keywords)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rotary_percent is 1\.5"):
        RotaryPositionEmbedding(8, 1.5)
    with pytest.raises(ValueError, match="7 channels"):
        RotaryPositionEmbedding(7)


@INTERLEAVED
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
def test_heads_split_and_turned_at_once(tensor_format: Any, interleaved: bool) -> None:
    """The bits of a split and two rotations, gradients too, where keys have angles of their own."""
    shape = (6, 5, 16) if tensor_format == "thd" else (6, 6, 5, 16)
    starts = [torch.tensor([0, 4, 6]), torch.tensor([0, 1, 6])] if tensor_format == "thd" else [None, None]
    freqs = [RotaryPositionEmbedding(16, percent, interleaved=interleaved)(6) for percent in (1.0, 0.5)]
    heads = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = split_rotated(heads, (3, 1, 1), freqs, tensor_format, interleaved, starts)
    parts = heads.split((3, 1, 1), -2)
    want = [
        apply_rotary_pos_emb(part, f, tensor_format, None, interleaved, cu_seqlens=s)
        for part, f, s in zip(parts[:2], freqs, starts, strict=True)
    ] + [parts[2]]
    dy = [torch.randn_like(each) for each in want]
    for got, expected in zip((q, k, v), want, strict=True):
        assert torch.equal(got, expected)
    (got,), (expected,) = (torch.autograd.grad(of, heads, dy) for of in ((q, k, v), want))
    assert torch.equal(got, expected) and got.is_contiguous()


@INTERLEAVED
def test_the_function_equals_what_compilers_see(interleaved: bool) -> None:
    """One operation in eager code, PyTorch's own under a compiler or where angles have gradients: the same bits."""
    freqs = RotaryPositionEmbedding(12, 0.7, interleaved=interleaved)(6)
    learned = freqs.clone().requires_grad_()
    t, dy = (torch.randn(6, 2, 3, 12, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    results = []
    for angles in (freqs, learned):
        y = apply_rotary_pos_emb(t, angles, "sbhd", interleaved=interleaved)
        (dt,) = torch.autograd.grad(y, t, dy, create_graph=True)
        (second,) = torch.autograd.grad(dt, dy, torch.ones_like(dt))
        results.append((y, dt, second))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    (dfreqs,) = torch.autograd.grad(apply_rotary_pos_emb(t, learned, interleaved=interleaved).float().sum(), learned)
    assert dfreqs.abs().sum() > 0
