"""The per-tensor kernels against their reference, bit for bit: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops import delayed
from minifloat.ops.launch import count_launches, ready
from minifloat.ops.quantize import empty_cast, per_tensor, pipeline, reference
from minifloat.ops.quantize.job import Job, Target
from minifloat.ops.tiles import Tile
from tests.helpers import triton_interpreter  # noqa: F401
from tests.helpers.replay_on_cpu import replay_on_cpu
from tests.helpers.sample import each_pair

FORMATS = [
    Format("e4m3"),
    Format("e5m2", scale_rule="pow2"),
    Format("e4m3", amax_epsilon=2.0),
    Format("e5m2", scale_rule="given"),
    Format("e4m3", scale_rule="given"),
]
SHAPES = [(1, 1), (16, 16), (33, 130), (130, 33), (0, 16), (16, 0)]


def values(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Heavy-tailed numbers with everything that is not a plain number among them."""
    x = torch.randn(shape, device=device) * torch.randn(shape, device=device).exp()
    flat = x.view(-1)
    for place, special in enumerate((0.0, -0.0, torch.nan, 1e-40, -448.0, 3e38)):
        if place < flat.numel() - 2:
            flat[place] = special
    return x.to(dtype)


def level_of(x: Tensor, fmt: Format, dim: int = ROWWISE) -> Tensor:
    if fmt.scale_rule == "given":
        return torch.tensor([3.7], device=x.device)
    return reference.amax(x, fmt, dim)


def job(x: Tensor, fmt: Format, row: bool, column: bool, k_major: bool = True) -> Job:
    def target(dim: int) -> Target:
        codes, scale = empty_cast(x, fmt, dim, k_major)
        return Target(
            fmt, dim, level_of(x, fmt, dim), codes.fill_(0xAB), scale.fill_(7), x.new_zeros(1).float(), k_major
        )

    return Job(ready(x), None, target(ROWWISE) if row else None, target(COLUMNWISE) if column else None)


def check(made: Job, x: Tensor, fmt: Format) -> None:
    for target in made.targets:
        expected = reference.cast(x, target.level, None, fmt, target.dim)
        assert torch.equal(target.codes, expected.codes)
        assert torch.equal(target.scale_inv.view(torch.int32), expected.scale_inv.view(torch.int32))
        if fmt.scale_rule == "given":
            assert torch.equal(target.amax, expected.amax)


@each_pair
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.spec)
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)], ids=["row", "column", "both"])
def test_cast_is_the_reference(
    fmt: Format, shape: tuple[int, int], wanted: tuple[bool, bool], device: torch.device
) -> None:
    x = values(shape, torch.bfloat16, device)
    made = job(x, fmt, *wanted)
    with count_launches() as launches:
        per_tensor.cast([made], None)
    assert launches == {"cast_tensor_kernel": 1}
    check(made, x, fmt)


@each_pair
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", ["fp32", "pow2"])
@pytest.mark.parametrize("dim", [ROWWISE, COLUMNWISE])
def test_scales_of_rows(rule: str, shape: tuple[int, int], dim: int, device: torch.device) -> None:
    """One scale a row or a column, of which a matrix without elements has as many."""
    fmt, x = Format(scale_rule=rule, amax_per_row=True), values(shape, torch.bfloat16, device)
    jobs = [job(each, fmt, dim == ROWWISE, dim == COLUMNWISE) for each in (x, x[: shape[0] // 2])]
    with count_launches() as launches:
        per_tensor.cast(jobs, None)
    assert launches == ({"cast_tensor_kernel": 1} if x.numel() else {})
    for made in jobs:
        check(made, made.x, fmt)


@pytest.mark.parametrize(("shape", "dim"), [((7, 0), ROWWISE), ((0, 100), COLUMNWISE), ((0, 0), ROWWISE)])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_scales_of_rows_of_nothing(epsilon: float, shape: tuple[int, int], dim: int, device: torch.device) -> None:
    """Those of an amax of 0, which ``amax_epsilon`` raises; beside a matrix that has values, and a second time."""
    fmt = Format(scale_rule="pow2", amax_per_row=True, amax_epsilon=epsilon)
    for _ in range(2):
        xs = [torch.empty(shape, device=device), values((5, 6), torch.float32, device)]
        amaxes = [reference.amax(x, fmt, dim) for x in xs]
        made = pipeline.cast(xs, amaxes, [None] * 2, [fmt.spec] * 2, [dim] * 2, [False] * 2, None)
        wanted = [part for x, amax in zip(xs, amaxes, strict=True) for part in reference.cast(x, amax, None, fmt, dim)]
        assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_and_row_major_columns(dtype: torch.dtype, device: torch.device) -> None:
    x = values((40, 72), dtype, device)
    made = job(x, FORMATS[0], False, True, k_major=False)
    per_tensor.cast([made], None)
    assert made.column is not None and made.column.codes.is_contiguous()
    check(made, x, FORMATS[0])


@pytest.mark.parametrize("count", [2, 5])
def test_several_matrices_in_one_launch(count: int, device: torch.device) -> None:
    xs = [values((16 + 20 * i, 48), torch.bfloat16, device) * (i + 1) for i in range(count)]
    jobs = [job(x, FORMATS[0], True, True) for x in xs]
    amaxes = [torch.zeros(1, device=device) for _ in xs]
    with count_launches() as launches:
        per_tensor.amax([ready(x) for x in xs], amaxes)
        per_tensor.cast(jobs, None)
    assert launches == {"amax_kernel": 1, "cast_tensor_kernel": 1}
    for x, made, amax in zip(xs, jobs, amaxes, strict=True):
        check(made, x, FORMATS[0])
        assert torch.equal(amax, reference.amax(x, FORMATS[0], ROWWISE))


@pytest.mark.parametrize("size", [1, 7, 8192, 8200])
def test_amax_drops_nan_and_keeps_infinity(size: int, device: torch.device) -> None:
    x = torch.randn(1, size, device=device)
    x[0, size // 2] = torch.nan
    infinite = torch.where(torch.arange(size, device=device) == size - 1, -torch.inf, x)
    amaxes = [torch.zeros(1, device=device) for _ in range(2)]
    per_tensor.amax([x, infinite], amaxes)
    assert torch.equal(amaxes[0], reference.amax(x, FORMATS[0], ROWWISE))
    assert amaxes[1].item() == torch.inf


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_a_flag_on_the_device_leaves_everything_as_it_is(flag: float, device: torch.device) -> None:
    x = values((32, 32), torch.bfloat16, device)
    made = job(x, FORMATS[0], True, True)
    per_tensor.cast([made], torch.tensor([flag], device=device))
    if flag:
        assert all((t.codes == 0xAB).all() and (t.scale_inv == 7).all() for t in made.targets)
    else:
        check(made, x, FORMATS[0])


@pytest.mark.parametrize("tile", [Tile(32, 64, 4), Tile(64, 64, 4), Tile(128, 128, 8), Tile(16, 256, 4)], ids=str)
def test_every_tile_gives_the_same_bits(tile: Tile, device: torch.device) -> None:
    x = values((150, 272), torch.bfloat16, device)
    made = job(x, FORMATS[3], True, True)
    per_tensor.cast([made], None, tile)
    check(made, x, FORMATS[3])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 8192), (4099, 1030)], ids=str)
def test_large(shape: tuple[int, int]) -> None:
    x = values(shape, torch.bfloat16, torch.device("cuda"))
    for fmt in FORMATS:
        made = job(x, fmt, True, True)
        per_tensor.cast([made], None)
        check(made, x, fmt)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("shape", [(4, 3), (16, 2), (1024, 3), (1, 3), (1024, 19)], ids=str)
def test_delayed_bookkeeping(
    shape: tuple[int, int], algorithm: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one call, and of the next ones, which launch by addresses alone; of the slots of many experts too."""
    from minifloat.ops import delayed as definition
    from minifloat.ops.delayed import gpu

    monkeypatch.setattr(gpu, "_prepared", {})
    if device.type == "cpu":
        replay_on_cpu(monkeypatch)
    for _ in range(3):
        check_bookkeeping(shape, f"e4m3/margin=1/{algorithm}", device)
    assert len(gpu._prepared) == 2
    assert all(gpu._prepared.values())
    assert delayed.FLT_MAX == definition.FLT_MAX


@pytest.mark.parametrize("layers", [1, 2, 8, 9, 33])
def test_update_of_many_layers(layers: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch for 32 of them, of one model and of the next."""
    from minifloat.ops import delayed as definition
    from minifloat.ops.delayed import gpu

    monkeypatch.setattr(gpu, "_prepared", {})
    if device.type == "cpu":
        replay_on_cpu(monkeypatch)
    rules = ["e4m3/margin=0/max"] * layers
    for _ in range(2):
        histories = [torch.rand(4, 3, device=device) for _ in range(layers)]
        scales = [torch.rand(3, device=device) for _ in range(layers)]
        expected = [each.clone() for each in (*histories, *scales)]
        definition.update_scales_.reference(expected[:layers], expected[layers:], rules)
        with count_launches() as launches:
            gpu.update(histories, scales, rules)
        assert launches == {"update_kernel": 1 + layers // 33}
        assert all(torch.equal(got, want) for got, want in zip((*histories, *scales), expected, strict=True))
        assert all(scale._version == 1 for scale in scales)  # by which stale casts are known


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_launches_by_address_are_of_one_dtype(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minifloat.ops.delayed import gpu

    monkeypatch.setattr(gpu, "_prepared", {})
    if device.type == "cpu":
        replay_on_cpu(monkeypatch)
    for each in (torch.float32, dtype, torch.float32):
        history = torch.zeros(4, 3, dtype=each, device=device)
        gpu.record(history, [0, 2], [torch.tensor([3.0], device=device), torch.tensor([4.0], device=device)])
        assert history[0].tolist() == [3.0, 0.0, 4.0] and not history[1:].any()


def check_bookkeeping(shape: tuple[int, int], rule: str, device: torch.device) -> None:
    """One step of three layers gives what the references give."""
    from minifloat.ops import delayed as definition
    from minifloat.ops.delayed import gpu

    histories = [torch.rand(shape, device=device) for _ in range(3)]
    histories[1][0, :3] = torch.tensor([0.0, torch.inf, torch.nan][: shape[1]], device=device)
    histories[0][0, 1] = torch.inf
    histories[2][-1, :3] = torch.tensor([torch.nan, torch.inf, 0.5][: shape[1]], device=device)
    scales = [torch.rand(shape[1], device=device) for _ in range(3)]
    amaxes = [torch.tensor([v], device=device) for v in (torch.inf, 0.3, torch.nan)]
    expected = [(history.clone(), scale.clone()) for history, scale in zip(histories, scales, strict=True)]
    definition.record_amax_.reference(expected[0][0], [0, 1, 0], amaxes)
    for history, scale in expected:
        definition.update_scales_.reference([history], [scale], [rule])
    with count_launches() as launches:
        gpu.record(histories[0], [0, 1, 0], amaxes)
        gpu.update(histories, scales, [rule] * 3)
    assert launches == {"record_kernel": 1, "update_kernel": 1}
    for history, scale, (wanted, wanted_scale) in zip(histories, scales, expected, strict=True):
        torch.testing.assert_close(history, wanted, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(scale, wanted_scale)
