"""Amax and cast of lists of tensors on kernels, and which of them are one launch; no tensor alone is tested here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops import quantize
from minifloat.ops.launch import count_launches
from minifloat.ops.quantize import gpu, nvfp4, per_tensor
from tests.helpers import triton_interpreter
from tests.helpers.compare import assert_same_bits, strides
from tests.helpers.kernel_casts import (
    E4M3,
    E5M2,
    FOUR_OVER_SIX,
    GIVEN,
    MX,
    NV,
    NV_LINES,
    NV_ROTATED,
    NV_STOCHASTIC,
    NV_TILES,
    POW2,
)  # fmt: skip

STRIPS, NV_SEARCH = POW2, FOUR_OVER_SIX[-1]
TILES = Format(block=128, tile=True, scale_rule="fp32", amax_epsilon=1e-3)
MX_ROTATED = [
    Format("e2m1", 32, False, "e8m0", "hadamard16"),
    Format("e5m2", 128, scale_rule="pow2", transform="hadamard16"),
]
FORMATS = [E4M3, E5M2, GIVEN, MX, STRIPS, TILES, NV, NV_TILES, NV_ROTATED, NV_STOCHASTIC, NV_LINES, NV_SEARCH]
FORMATS += MX_ROTATED

BOTH = (ROWWISE, COLUMNWISE)
Cast = tuple[Tensor, Format, int]
"""A tensor, and what it is cast to along which dim."""


def values(shape: tuple[int, int], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Heavy-tailed numbers with NaN, zeros and denormals among them."""
    x = torch.randn(shape, device=device) * torch.randn(shape, device=device).exp()
    flat = x.view(-1)
    for place, special in enumerate((0.0, -0.0, torch.nan, 1e-40, -448.0)):
        if place < flat.numel() - 2:
            flat[place] = special
    return x.to(dtype)


def each_way(x: Tensor, fmt: Format, dims: Sequence[int] = BOTH) -> list[Cast]:
    """Its casts along ``dims``; groups of tokens, that is columns, are all that is ever rotated."""
    return [(x, fmt, dim) for dim in dims if dim == COLUMNWISE or fmt.transform == "none"]


def level_of(x: Tensor, fmt: Format, dim: int) -> Tensor | None:
    if fmt.scale_rule == "given":
        return torch.tensor([3.7], device=x.device)
    return quantize.amax.reference([x.contiguous()], [fmt.spec], [dim])[0] if fmt.needs_amax else None


def rng_of(x: Tensor, fmt: Format) -> Tensor | None:
    stochastic = fmt.rounding == "stochastic"
    return torch.tensor([5 + x.shape[0], 2**40 + 6], device=x.device) if stochastic else None


def check(
    casts: Sequence[Cast],
    *,
    levels: Sequence[Tensor | None] | None = None,
    rngs: Sequence[Tensor | None] | None = None,
    k_major: bool = True,
    noop: Tensor | None = None,
) -> dict[str, int]:
    """Asserts that the kernels give what the reference gives, and returns what was launched for it."""
    if not casts:
        return {}
    xs, formats, dims = (list(each) for each in zip(*casts, strict=True))
    levels = [level_of(*cast) for cast in casts] if levels is None else levels
    rngs = [rng_of(x, fmt) for x, fmt, _ in casts] if rngs is None else rngs
    specs = [fmt.spec for fmt in formats]
    transposed = [k_major and not fmt.packed for fmt in formats]
    with count_launches() as launches:
        actual = gpu.cast(xs, levels, rngs, specs, dims, transposed, noop)
    plain = [None if level is None else level.float().contiguous() for level in levels]
    expected = quantize.cast.reference([x.contiguous() for x in xs], plain, rngs, specs, dims, transposed, None)
    assert_same(actual, expected)
    assert_promised(actual, quantize.cast.shapes(xs, levels, rngs, specs, dims, transposed, noop))
    return dict(launches)


def check_amax(casts: Sequence[Cast]) -> dict[str, int]:
    """The same of their amaxes."""
    if not casts:
        return {}
    xs, formats, dims = (list(each) for each in zip(*casts, strict=True))
    specs = [fmt.spec for fmt in formats]
    with count_launches() as launches:
        actual = gpu.amax(xs, specs, dims)
    assert_same(actual, quantize.amax.reference([x.contiguous() for x in xs], specs, dims))
    assert_promised(actual, quantize.amax.shapes(xs, specs, dims))
    return dict(launches)


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b)
        assert strides(a) == strides(b)


def assert_promised(actual: Sequence[Tensor], promised: Sequence[Tensor]) -> None:
    """What a compiler relies on: metadata as the fake gives it, and memory of its own for each output."""
    for a, b in zip(actual, promised, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and strides(a) == strides(b)
    memory = [a.untyped_storage().data_ptr() for a in actual if a.numel()]
    assert len(set(memory)) == len(memory)


@pytest.mark.parametrize(
    ("first", "second", "passes"),
    [
        ((E4M3, ROWWISE), (E4M3, COLUMNWISE), 1),
        ((E4M3, COLUMNWISE), (E4M3, ROWWISE), 2),
        ((E4M3, ROWWISE), (E4M3, ROWWISE), 1),  # two jobs, alike
        ((E4M3, ROWWISE), (E5M2, COLUMNWISE), 2),
        ((E4M3, ROWWISE), (GIVEN, COLUMNWISE), 2),
        ((MX, ROWWISE), (MX, COLUMNWISE), 1),
        ((MX, ROWWISE), (STRIPS, COLUMNWISE), 2),
        ((STRIPS, ROWWISE), (TILES, COLUMNWISE), 2),
        ((MX, ROWWISE), (E4M3, COLUMNWISE), 2),
        ((GIVEN, ROWWISE), (MX, COLUMNWISE), 2),
        ((NV, ROWWISE), (NV_ROTATED, COLUMNWISE), 1),
        ((NV_TILES, ROWWISE), (NV, COLUMNWISE), 1),
        ((NV_LINES, ROWWISE), (NV_ROTATED, COLUMNWISE), 1),
        ((NV, ROWWISE), (NV_STOCHASTIC, COLUMNWISE), 1),
        ((NV_STOCHASTIC, ROWWISE), (NV, COLUMNWISE), 1),
        ((MX, ROWWISE), (NV, COLUMNWISE), 2),
        ((MX, ROWWISE), (MX_ROTATED[0], COLUMNWISE), 3),  # rotated first
        ((E4M3, ROWWISE), (MX_ROTATED[1], COLUMNWISE), 3),
    ],
    ids=lambda part: "-".join(map(str, (part[0].spec, part[1]))) if isinstance(part, tuple) else None,
)
def test_which_casts_are_one_launch(
    first: tuple[Format, int], second: tuple[Format, int], passes: int, device: torch.device
) -> None:
    x, y = values((17, 32), device), values((16, 16), device)
    level = level_of(x, *first)
    shared = first[0] == second[0]
    levels = [level, level if shared else level_of(x, *second)]
    rng = torch.tensor([1, 2], device=device)
    rngs = [rng if fmt.rounding == "stochastic" else None for fmt, _ in (first, second)]
    launches = check([(x, *first), (x, *second)], levels=levels, rngs=rngs)
    assert sum(launches.values()) == passes
    check([(y, *first), (x, *first), (x, *second), (y, *second), (x, *second)])


@pytest.mark.parametrize("fmt", [GIVEN, E4M3, STRIPS, NV, NV_LINES], ids=lambda fmt: fmt.spec)
def test_two_levels_for_one_tensor(fmt: Format, device: torch.device) -> None:
    x = values((32, 48), device)
    casts = [(x, fmt, ROWWISE), (x, fmt, COLUMNWISE)]
    one, other = (quantize.amax.reference([x], [fmt.spec], [dim])[0] + 1 for dim in (ROWWISE, COLUMNWISE))
    for levels in ([one, other * 30], [one * 30, other], [one, None] if fmt == STRIPS else [one, other]):
        check(casts, levels=levels)


def test_two_seeds_for_one_tensor(device: torch.device) -> None:
    x = values((32, 48), device)
    one, other = torch.tensor([1, 2], device=device), torch.tensor([3, 4], device=device)
    casts = [(x, NV_STOCHASTIC, ROWWISE), (x, NV_STOCHASTIC, COLUMNWISE)]
    assert check(casts, rngs=[one, other]) == {"cast_nvfp4_kernel": 2}
    assert check(casts, rngs=[one, one]) == {"cast_nvfp4_kernel": 1}
    assert check([(x, NV, ROWWISE), casts[1]], rngs=[None, other]) == {"cast_nvfp4_kernel": 1}
    assert check([casts[0], (x, NV, COLUMNWISE)], rngs=[one, None]) == {"cast_nvfp4_kernel": 1}


def test_dtypes_and_formats_side_by_side(device: torch.device) -> None:
    casts: list[Cast] = []
    for i, fmt in enumerate(FORMATS):
        x = values((16, 16 + i), device, (torch.bfloat16, torch.float32, torch.float16)[i % 3])
        casts += [*each_way(x, fmt, (ROWWISE,)), (x, FORMATS[i - 1], COLUMNWISE)]
    check(casts[::-1])
    check_amax([cast for cast in casts if cast[1].needs_amax])


@pytest.mark.parametrize("count", [3, 8, 9, 17, 64])
def test_many_tensors(count: int, device: torch.device) -> None:
    xs = [values((1 + i, 16), device) * (i + 1) for i in range(count)]
    assert check_amax([(x, E4M3, ROWWISE) for x in xs]) == {"amax_kernel": 1}
    for fmt in (GIVEN, MX, NV) if count < 10 else (GIVEN,):
        casts = [(x, fmt, dim) for x in xs for dim in (ROWWISE, COLUMNWISE)]
        levels = [level_of(x, fmt, ROWWISE) for x in xs for _ in range(2)]
        if fmt == GIVEN:
            levels[1::2] = levels[0::2]
        assert list(check(casts, levels=levels).values()) == [1]


def test_amaxes_in_one_reading(device: torch.device) -> None:
    x, y, z = values((33, 48), device), values((16, 32), device), values((16, 16), device, torch.float32)
    both = [(x, NV, ROWWISE), (x, NV_ROTATED, COLUMNWISE)]
    assert check_amax(both) == {"rotated_amax_kernel": 1}
    assert check_amax([(y, NV, ROWWISE), *both, (y, E4M3, ROWWISE)]) == {"rotated_amax_kernel": 1, "amax_kernel": 1}
    assert check_amax(both[::-1]) == {"rotated_amax_kernel": 1, "amax_kernel": 1}
    assert check_amax([(x, NV, ROWWISE), (y, NV_ROTATED, COLUMNWISE), (z, E4M3, ROWWISE)]) == {
        "rotated_amax_kernel": 1,
        "amax_kernel": 2,  # one a dtype
    }
    assert check_amax([(x, NV_LINES, ROWWISE), *both[1:]]) == {"line_amax_kernel": 1, "rotated_amax_kernel": 1}
    check_amax([cast for fmt in FORMATS for cast in each_way(x, fmt)])


def test_nothing_beside_others(device: torch.device) -> None:
    for shape in ((0, 16), (16, 0)):
        x, y = values(shape, device), values((16, 16), device)
        for fmt in FORMATS:
            casts = [(x, fmt, COLUMNWISE), *each_way(y, fmt), (x, fmt, COLUMNWISE)]
            check(casts)
            check(casts, noop=torch.zeros(1, device=device))
            check_amax(casts)


def test_a_format_without_a_kernel_beside_others(device: torch.device) -> None:
    """The reference then casts all."""
    x = values((33, 48), device)
    assert not check([(x, E4M3, ROWWISE), (x, Format(block=2, scale_rule="fp32"), COLUMNWISE)])


def test_a_replay_rotates_what_it_is_given(device: torch.device) -> None:
    """Three lists of tensors of the same shapes: recorded, and on a GPU replayed in other memory."""
    specs, dims = [E4M3.spec, MX_ROTATED[0].spec], [ROWWISE, COLUMNWISE]
    for _ in range(3):
        xs = [values((37, 48), device)] * 2
        levels = [level_of(xs[0], E4M3, ROWWISE), None]
        with count_launches() as launches:
            actual = gpu.recorded_cast(xs, levels, [None] * 2, specs, dims, [False] * 2, None)
        assert launches["hadamard_kernel"] == 1 and sum(launches.values()) == 3
        assert_same(actual, quantize.cast.reference(xs, levels, [None] * 2, specs, dims, [False] * 2, None))
    if device.type == "cuda":
        work = gpu._requested((0, 0), tuple(specs), tuple(dims), (False, False))
        assert all(map(callable, work.recorder.known.values()))


@pytest.mark.parametrize("count", [1, 8, 0], ids=["one", "eight", "in a table"])
def test_compiled(count: int) -> None:
    """Wide accesses and no spills, wherever the matrices' arguments are."""

    def of_each(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return (dtype,) * count if count else (dtype, torch.int64)

    bf16, fp32, codes = of_each(torch.bfloat16), of_each(torch.float32), of_each(torch.uint8)
    integers = [(7,) * count if count else (torch.int64,)] * 3
    amax = triton_interpreter.compile_for(
        per_tensor.amax_kernel, bf16, fp32, *integers, count, 16384, True, num_warps=8
    )
    rotate = triton_interpreter.compile_for(nvfp4.hadamard_kernel, bf16, bf16, *integers, count, True, 512, num_warps=4)
    constants = (*[True] * 3, *[False] * 2, E4M3.encoding, 448.0, E4M3.scaling, 0.0, False, *[True] * 3, 64, 128)
    cast = triton_interpreter.compile_for(
        per_tensor.cast_tensor_kernel, bf16, fp32, codes, fp32, fp32, codes, fp32, fp32, torch.float32,
        *integers, integers[0], count, *constants, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    assert cast.registers <= 96, "fewer than five tiles would be in flight on a multiprocessor"
    assert "ld.global.v4.b32" in amax.ptx and amax.spills == 0
    assert "ld.global.v2.b32" in rotate.ptx and "st.global.v2.b32" in rotate.ptx and rotate.spills == 0
    assert "ld.global.v4.b32" in cast.ptx and "st.global.v4.b32" in cast.ptx and cast.spills == 0
