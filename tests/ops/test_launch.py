"""Launching kernels: what is counted, recorded, compiled and refused."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.nn import Linear
from minifloat.ops import quantize
from minifloat.ops.launch import Kernel, count_launches, ready
from minifloat.ops.quantize import gpu, per_tensor
from minifloat.recipe import Float8CurrentScaling
from tests.helpers import triton_interpreter  # noqa: F401


@pytest.fixture
def device(device: torch.device) -> torch.device:
    """A CPU only where there is no GPU: one of the two launches Triton's kernels."""
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("the compiled kernels are tested here, not the interpreted ones")
    return device


class Compiler:
    """In place of a ``triton.jit`` function: keeps what it is asked to compile, and what is launched."""

    __name__ = "some_kernel"
    function, packed_metadata = 1234, "metadata"

    def __init__(self) -> None:
        self.warmups: list[tuple[Any, ...]] = []
        self.runs: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, **options: Any) -> Compiler:
        self.warmups.append((*args, options))
        return self

    def run(self, *args: Any) -> None:
        self.runs.append(args)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setattr("minifloat.ops.launch.KNOWN", True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    return Compiler()


def launch_once(device: torch.device) -> None:
    per_tensor.amax([torch.ones(16, 16, device=device)], [torch.zeros(1, device=device)])


# ---- counting ----


def test_counters_nest(device: torch.device) -> None:
    with count_launches() as outer:
        launch_once(device)
        with count_launches() as inner:
            launch_once(device)
            with count_launches() as nothing:
                pass
        launch_once(device)
    launch_once(device)
    assert (outer, inner, nothing) == ({"amax_kernel": 3}, {"amax_kernel": 1}, {})


def test_counters_that_end_out_of_order_or_by_an_error(device: torch.device) -> None:
    first, second = count_launches(), count_launches()
    a, b = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    launch_once(device)
    second.__exit__(None, None, None)
    assert (a, b) == ({}, {"amax_kernel": 1})
    with pytest.raises(KeyError), count_launches() as counter:
        raise KeyError
    launch_once(device)
    assert not counter


def test_no_programs_are_no_launch(device: torch.device) -> None:
    found = torch.zeros(1, device=device)
    with count_launches() as launches:
        per_tensor.amax([torch.ones(0, 16, device=device)], [found])
    assert not launches and found.item() == 0


# ---- arguments ----


def test_ready() -> None:
    whole = torch.arange(4096.0).view(64, 64)
    assert ready(whole) is whole
    for x in (whole.t(), whole[:, 1:], whole.flatten()[1:65].view(8, 8), whole[1:, ::2], whole[:0], whole[5:, :1]):
        made = ready(x)
        assert made.is_contiguous() and made.data_ptr() % 16 == 0 and torch.equal(made, x)
    assert ready(whole[4:]).data_ptr() == whole[4:].data_ptr()  # it is where it should be: no copy


def test_arguments_reach_the_launcher(compiler: Compiler) -> None:
    """Addresses, integers and constants in their order; matrices are taken for aligned ones, single numbers not."""
    x, y, one = torch.zeros(4, 8), torch.zeros(8, 4).bfloat16(), torch.zeros(4)[1:2]
    Kernel(compiler)._launch(0, 5, [(x, y), one], [(16, 1), 32], ("e4m3", True), 8)
    (run,) = compiler.runs
    assert run == (
        5, 1, 1, 77, 1234, "metadata", None, None, None,
        (x.data_ptr(), y.data_ptr()), one.data_ptr(), (16, 1), 32, "e4m3", True,
    )  # fmt: skip
    (((a, b), c, *rest, options),) = compiler.warmups
    assert [(each.dtype, each.data_ptr() % 16) for each in (a, b, c)] == [
        (torch.float32, 0),
        (torch.bfloat16, 0),
        (torch.float32, 4),
    ]
    assert rest[2:] == ["e4m3", True]
    assert options == {"grid": (1,), "num_warps": 8, "enable_fp_fusion": False}


@pytest.mark.parametrize("scratch", [0, 8])
def test_the_launcher_in_c_is_called_where_no_scratch_memory_is_needed(compiler: Compiler, scratch: int) -> None:
    class Launcher:
        """As Triton's: ``launch`` is in C, a call allocates first."""

        global_scratch_size, profile_scratch_size, launch_cooperative_grid, launch_pdl = scratch, 0, False, True

        def __call__(self, *args: Any) -> None:
            compiler.runs.append(("by way of Python", *args))

        def launch(self, *args: Any) -> None:
            compiler.runs.append(args)

    compiler.run = Launcher()  # type: ignore[method-assign, assignment]
    Kernel(compiler)._launch(0, 5, [x := torch.zeros(4, 8)], [(16, 1), 32], ("e4m3",), 8)
    metadata, rest = ("metadata", None, None, None), (x.data_ptr(), (16, 1), 32, "e4m3")
    direct = (5, 1, 1, 77, 1234, False, True, None, None, *metadata, *rest)
    assert compiler.runs == [("by way of Python", 5, 1, 1, 77, 1234, *metadata, *rest) if scratch else direct]


def test_no_integer_is_compiled_in(compiler: Compiler) -> None:
    kernel = Kernel(compiler)
    for rows in (1, 2, 16, 17, 4096):
        kernel._launch(0, rows, [torch.zeros(rows, 16)], [rows, (rows, 16)], ("e4m3",), 4)
    assert [run[10:12] for run in compiler.runs] == [(rows, (rows, 16)) for rows in (1, 2, 16, 17, 4096)]
    ((_, number, numbers, constant, _),) = compiler.warmups
    assert constant == "e4m3"
    for each in (number, *numbers):  # what Triton would compile in: 1, and that 16 divides it
        assert each != 1 and each % 16


def test_what_is_compiled_anew(compiler: Compiler) -> None:
    kernel = Kernel(compiler)
    x, one = torch.zeros(4, 8), torch.zeros(1)
    variants: list[tuple[int, list[Tensor], tuple[Any, ...], int]] = [
        (0, [x, one], (1,), 4),
        (1, [x, one], (1,), 4),  # another device
        (0, [x.bfloat16(), one], (1,), 4),
        (0, [x, x], (1,), 4),  # a matrix, not a number
        (0, [x, one], (2,), 4),
        (0, [x, one], (1,), 8),
    ]
    for _ in range(2):
        for on, tensors, constants, warps in variants:
            kernel._launch(on, 1, tensors, [3], constants, warps)
    assert len(compiler.warmups) == len(variants)


def test_a_matrix_that_kernels_cannot_read_is_refused(compiler: Compiler) -> None:
    aside = torch.zeros(65)[1:].view(8, 8)
    with pytest.raises(AssertionError, match=r"launch.ready\(\)"):
        Kernel(compiler)._launch(0, 1, [aside], [], (), 4)
    with pytest.raises(AssertionError, match=r"launch.ready\(\)"):
        Kernel(compiler)._launch(0, 1, [(torch.zeros(8, 8), aside)], [], (), 4)
    Kernel(compiler, wide=False)._launch(0, 1, [aside], [], (), 4)
    ((typical, _),) = compiler.warmups
    assert typical.data_ptr() % 16


@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "in a tuple"])
def test_tensors_on_two_devices_are_refused(grouped: bool, compiler: Compiler) -> None:
    here, there = torch.zeros(8, 8), torch.zeros(8, 8, device="meta")
    kernel = Kernel(compiler)
    with pytest.raises(ValueError, match="one device at a time"):
        kernel._compile([(here, there)] if grouped else [here, there], [], (), 4)
    assert not compiler.warmups


# ---- on a GPU ----


@pytest.mark.gpu
def test_a_level_elsewhere_is_refused_on_a_gpu() -> None:
    """By a kernel that was not compiled yet."""
    x = torch.ones(16, 16, device="cuda")
    kernel = Kernel(per_tensor.amax_kernel)
    integers = (0,), (16,), (16,)
    others = ["cpu"] + ["cuda:1"] * (torch.cuda.device_count() > 1)
    for other in others:
        with pytest.raises(ValueError, match="one device at a time"):
            kernel(1, [(x,), (torch.zeros(1, device=other),)], integers, (1, 1024, True))
    assert not kernel._compiled


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_tensors_is_launched_on() -> None:
    x = torch.full((16, 16), 3.0, device="cuda:1")
    with torch.cuda.device(0):
        (found,) = gpu.amax([x], [Format("e4m3").spec], [ROWWISE])
    assert found.device == x.device and found.item() == 3.0


def compiled_variants() -> set[tuple[str, Any]]:
    """Of all kernels that there are."""
    kernels = [each for each in gc.get_objects() if type(each) is Kernel]  # proxies of what is gone have no class
    return {(kernel.name, key) for kernel in kernels for key in kernel._compiled}


@pytest.mark.gpu
def test_two_shapes_are_one_compiled_variant() -> None:
    fmt = Format("e4m3", scale_rule="given")
    scale = torch.ones(1, device="cuda")

    def cast(rows: int) -> None:
        x = torch.randn(rows, 64, device="cuda").bfloat16()
        gpu.cast([x, x], [scale, scale], [None, None], [fmt.spec] * 2, [ROWWISE, COLUMNWISE], [True, True], None)

    cast(32)
    cast(33)
    before = compiled_variants()
    assert before
    for rows in (16, 48, 1024, 1, 2, 35):
        cast(rows)
    assert compiled_variants() == before


@pytest.mark.gpu
def test_fifty_token_counts_compile_a_handful_of_variants() -> None:
    torch.manual_seed(0)
    layer = Linear(64, 128, recipe=Float8CurrentScaling(), device="cuda", dtype=torch.bfloat16)

    def step(tokens: int) -> None:
        x = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer(x).float().square().sum().backward()
        with torch.no_grad():
            layer(x)

    start = compiled_variants()
    for tokens in (1, 16, 17):
        step(tokens)
    first = compiled_variants()
    for tokens in range(1, 51):
        step(tokens)
    assert compiled_variants() == first, compiled_variants() - first
    assert len(first - start) <= 16, first - start


# ---- the same, as far as a CPU can see it ----


def key_of(tensors: Any, constants: tuple[Any, ...], warps: int) -> Any:
    flat = [each for t in tensors for each in (t if isinstance(t, tuple) else (t,))]
    return warps, constants, tuple((each.dtype, each.numel() == 1) for each in flat)


@pytest.mark.parametrize(
    ("fmt", "most"),
    [
        (Format("e4m3"), 4),
        (Format("e4m3", scale_rule="given"), 2),
        (Format(block=32, scale_rule="e8m0"), 2),
        (Format(block=128, scale_rule="pow2"), 3),  # one token has one scale, a number
        (Format("e2m1", 16, scale_rule="two_level"), 4),
    ],
    ids=lambda part: part.spec if isinstance(part, Format) else None,
)
def test_fifty_token_counts_ask_for_few_variants(fmt: Format, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by what a launch would look up; nothing is run."""
    asked: set[Any] = set()

    def look_up(
        self: Kernel, programs: int, tensors: Any, integers: Any, constants: tuple[Any, ...], warps: int
    ) -> None:
        asked.add((self.name, key_of(tensors, constants, warps)))

    monkeypatch.setattr(Kernel, "_through_jit", look_up)
    level = torch.ones(1) if fmt.scale_rule == "given" else None
    for tokens in range(1, 51):
        x = torch.zeros(tokens, 64).bfloat16()
        if fmt.needs_amax:
            level = gpu.amax([x], [fmt.spec], [ROWWISE])[0]
        gpu.cast([x, x], [level, level], [None, None], [fmt.spec] * 2, [ROWWISE, COLUMNWISE], [True, True], None)
    assert 1 <= len(asked) <= most, asked


def test_the_reference_is_no_kernel() -> None:
    with count_launches() as launches:
        quantize.amax.reference([torch.ones(4, 4)], [Format("e4m3").spec], [ROWWISE])
    assert not launches
