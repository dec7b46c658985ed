"""Block casts by the kernels that compute a norm or an activation, interpreted on a CPU and compiled on a GPU.

The codes and scales are, bit for bit, the reference's cast of the value that the kernel without a cast writes; how good
that value is says ``test_triton_activation.py`` and ``test_triton_norm.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.formats import parse
from minifloat.functional.norm_activation import Activation, Norm
from minifloat.ops import activation
from minifloat.ops.activation import kernels, out_columns
from minifloat.ops.launch import Kernel, count_launches
from minifloat.ops.norm import kernels as norm_kernels
from minifloat.ops.quantize import fused_cast
from minifloat.ops.quantize.blocks import cast_constants, fused_tile
from minifloat.ops.quantize.job import layouts
from minifloat.ops.tiles import Tile
from tests.helpers import triton_interpreter
from tests.helpers.activation_model import ACTIVATIONS, activation_inputs, backward_inputs
from tests.helpers.norm_model import NORMS, norm_inputs
from tests.helpers.sample import each_once
from tests.helpers.selection import diagonals

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STRIPS, TILES, MX, MX_TILES = "e4m3/1x128/pow2", "e4m3/128x128/fp32/eps=0.001", "e4m3/1x32/e8m0", "e5m2/32x32/e8m0"
SPECS = [STRIPS, TILES, "e5m2/1x64/fp32", MX, MX_TILES, "e3m2/32x32/e8m0"]
FOR_EACH_FORMAT = pytest.mark.parametrize("spec", SPECS)
Wanted = tuple[bool, bool, bool]
"""Along the rows, along the columns, and whether in memory as GEMMs read them that want the contracted dim last."""
ROW, COLUMN, PLAIN, BOTH = (True, False, True), (False, True, True), (False, True, False), (True, True, True)
CASES: list[tuple[str, Wanted]] = [
    *[(spec, BOTH) for spec in SPECS],
    *[(STRIPS, ROW), (TILES, COLUMN), (MX, ROW), (MX, COLUMN), (MX, PLAIN), (MX_TILES, ROW)],
    ("e2m1/1x32/e8m0", (True, True, False)),  # of packed codes no GEMM asks for another order
]
FOR_EACH_CASE = pytest.mark.parametrize(("spec", "wanted"), CASES)
PACKED = ["e2m1/1x32/e8m0", "e2m1/32x32/e8m0", "e2m1/1x128/fp32", "e2m1/16x16/pow2"]
PACKED_ORIENTATIONS: list[Wanted] = [(True, False, False), (False, True, False), (True, True, False)]
NEGATIVE_LIMIT = Activation.of("clamped_swiglu", {"limit": -1.5})
NEGATIVE_OFFSET = Activation.of("clamped_swiglu", {"glu_linear_offset": -1.0})


def activation_id(act: Activation) -> str:
    return f"{act.name}{list(act.parameters) or ''}"


def assert_cast(got: Sequence[Tensor], value: Tensor, spec: str, wanted: Wanted) -> None:
    """``got``: those of the reference's cast of ``value``, to the bit, in the same layout."""
    for found, expected in zip(got[:5], fused_cast(value, None, parse(spec), *wanted), strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.numel() == 0 or 1 in found.shape or found.stride() == expected.stride()
        if found.dtype == FP32:
            found, expected = (t.contiguous().view(torch.int32) for t in (found, expected))
        assert torch.equal(found, expected), f"{int((found != expected).sum())} of {found.numel()} differ"


def forward(x: Tensor, act: Activation, spec: str, wanted: Wanted, choice: Tile | None = None) -> tuple[Tensor, ...]:
    return kernels.cast(x, act.name, act.parameters, None, spec, *wanted, choice=choice)


def backward(
    dy: Tensor,
    x: Tensor,
    act: Activation,
    spec: str,
    wanted: Wanted,
    bias: bool = False,
    choice: Tile | None = None,
) -> tuple[Tensor, ...]:
    return kernels.backward_cast(dy, x, act.name, act.parameters, None, spec, *wanted, bias, choice=choice)


def value(x: Tensor, act: Activation) -> Tensor:
    return kernels.forward(x, act.name, act.parameters, x.dtype, False)[0]


def gradient(dy: Tensor, x: Tensor, act: Activation, bias: bool = False) -> tuple[Tensor, ...]:
    return kernels.backward(dy, x, act.name, act.parameters, x.dtype, False, bias)


# ---- activations ----


@FOR_EACH_CASE
def test_activation(spec: str, wanted: Wanted, device: torch.device) -> None:
    """Of two halves and of one; no rows, one, and sizes that end within a block."""
    dtype, block = (BF16, FP16, FP32)[CASES.index((spec, wanted)) % 3], parse(spec).block
    for name, shape in (("swiglu", (block + 3, 66)), ("gelu", (1, 130)), ("silu", (0, 128))):
        act = Activation.of(name)
        x = activation_inputs(shape, dtype, device)
        with count_launches() as launches:
            got = forward(x, act, spec, wanted)
        assert launches == ({"activation_kernel": 1} if x.numel() else {})
        assert_cast(got, value(x, act), spec, wanted)


@FOR_EACH_CASE
def test_gradient(spec: str, wanted: Wanted, device: torch.device) -> None:
    """Of two halves each is whole blocks; that of a plain activation may end anywhere."""
    dtype, block = (BF16, FP16, FP32)[CASES.index((spec, wanted)) % 3], parse(spec).block
    for name, shape in (("geglu", (block + 2, 2 * block)), ("srelu", (3, 130)), ("silu", (0, 128))):
        act = Activation.of(name)
        dy, x = backward_inputs(act, shape, dtype, device)
        with count_launches() as launches:
            got = backward(dy, x, act, spec, wanted)
        assert launches == ({"activation_backward_kernel": 1} if x.numel() else {})
        assert_cast(got, gradient(dy, x, act)[0], spec, wanted)
        assert got[5].shape == (0,)


@pytest.mark.parametrize(
    "act",
    [*map(Activation.of, ("sigmoid", "glu", "clamped_swiglu", "qgelu", "sreglu")), NEGATIVE_LIMIT, NEGATIVE_OFFSET],
    ids=activation_id,
)
def test_what_lies_outside(act: Activation, device: torch.device) -> None:
    """What lies outside of the matrix, whatever a function makes of it, is in no amax: all values here are tiny."""
    dy, x = backward_inputs(act, (33, 64), BF16, device)
    x = torch.cat([x[:, :32] * 0.01 - 20, x[:, 32:] * 1e-4], 1)
    x, dy = x[:, : 64 if act.gated else 48].contiguous(), dy[:, : 32 if act.gated else 48].contiguous()
    assert_cast(forward(x, act, MX, BOTH), value(x, act), MX, BOTH)
    assert_cast(backward(dy, x, act, MX, BOTH), gradient(dy, x, act)[0], MX, BOTH)
    scale = torch.ones(1, device=device)
    amax = kernels.cast(x, act.name, act.parameters, scale, "e4m3/tensor/given", *BOTH)[4]
    assert torch.equal(amax, kernels.forward(x, act.name, act.parameters, FP32, False)[0].abs().amax().reshape(1))


@pytest.mark.parametrize("spec", [STRIPS, TILES, MX])
def test_special_values(spec: str, device: torch.device) -> None:
    """NaN, infinities, denormals, zeros, whole blocks of them, and what overflows only when it is rounded."""
    special = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, -5e-41, 3e38, 300.0, 448.0]  # 300^2 in fp16
    x = torch.randn(40, 256)
    x[:10, 1] = x[3, 1:11] = torch.tensor(special)
    x[20:, :100], x[7:9, :128] = 0.0, torch.nan
    for dtype, name in ((FP16, "srelu"), (BF16, "reglu"), (FP32, "silu")):
        act = Activation.of(name)
        dy = torch.ones(40, out_columns(name, 256))
        dy[5, :3], dy[12, 5] = torch.nan, torch.inf
        given, incoming = x.to(device, dtype), dy.to(device, dtype)
        assert_cast(forward(given, act, spec, BOTH), value(given, act), spec, BOTH)
        assert_cast(backward(incoming, given, act, spec, BOTH), gradient(incoming, given, act)[0], spec, BOTH)


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_bias_gradient(name: str, device: torch.device) -> None:
    """That of the value's kernel but for the order of its sums; runs repeat."""
    act = Activation.of(name)
    for shape in ((0, 64), (70, 128)):
        dy, x = backward_inputs(act, shape, BF16, device)
        dx, _, want = gradient(dy, x, act, bias=True)
        got = backward(dy, x, act, MX, BOTH, bias=True)
        assert_cast(got, dx, MX, BOTH)
        assert got[5].shape == (shape[1],) and got[5].dtype == FP32
        assert ((got[5] - want).abs() <= shape[0] * 2.0**-23 * dx.float().abs().sum(0)).all()
        assert torch.equal(got[5], backward(dy, x, act, MX, BOTH, bias=True)[5])


@pytest.mark.parametrize("columns", [96, 160])
def test_tiles_do_not_change_results(columns: int, device: torch.device) -> None:
    """Aligned or not; those of a gradient's halves are cut until they fit: 96 is no multiple of 64 or 128."""
    act = Activation.of("swiglu")
    dy, x = backward_inputs(act, (32, 2 * columns), BF16, device)
    y, dx = value(x, act), gradient(dy, x, act)[0]
    for choice in (Tile(64, 64, 4), Tile(16, 256, 4)):
        assert_cast(forward(x, act, MX, BOTH, choice), y, MX, BOTH)
        assert_cast(backward(dy, x, act, MX, BOTH, True, choice), dx, MX, BOTH)
    odd = x[:, 1:-1].contiguous()
    assert_cast(forward(odd, act, MX, BOTH), value(odd, act), MX, BOTH)


def test_layout_and_address_of_the_input_are_no_matter(device: torch.device) -> None:
    act = Activation.of("swiglu")
    dy, x = backward_inputs(act, (12, 128), BF16, device)
    y, dx = value(x, act), gradient(dy, x, act)[0]
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(12, 128)  # two bytes after a multiple of 16
    for view in (x.T.contiguous().T, torch.cat([x, x], 1)[:, :128], shifted):
        assert_cast(forward(view, act, MX, BOTH), y, MX, BOTH)
        assert_cast(backward(dy.T.contiguous().T, view, act, MX, BOTH), dx, MX, BOTH)


# ---- norms ----


def norm_cast(
    norm: Norm, x: Tensor, gamma: Tensor, beta: Tensor | None, spec: str, wanted: Wanted,
    residual: Tensor | None = None, choice: Tile | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = norm.normalization, norm.eps, norm.zero_centered_gamma
    with count_launches() as launches:
        out = norm_kernels.norm_cast(x, gamma, beta, *options, None, spec, *wanted, residual, choice=choice)
    assert launches == ({"norm_forward_kernel": 1, "norm_cast_kernel": 1} if x.numel() else {})
    return out


def norm_of(
    norm: Norm, x: Tensor, gamma: Tensor, beta: Tensor | None, residual: Tensor | None = None
) -> tuple[Tensor, ...]:
    options = norm.normalization, norm.eps, norm.zero_centered_gamma
    return norm_kernels.norm_forward(x, gamma, beta, *options, x.dtype, False, residual)


def assert_norm(got: tuple[Tensor, ...], want: tuple[Tensor, ...], spec: str, wanted: Wanted) -> None:
    y, mean, rsigma, _, total = want
    assert_cast(got, y, spec, wanted)
    for found, expected in zip(got[5:], (mean, rsigma, total), strict=True):
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@FOR_EACH_CASE
def test_norm(spec: str, wanted: Wanted, device: torch.device) -> None:
    """Codes, scales and statistics are those of the norm alone; beta is in no amax of rows that are not there."""
    dtype, block = (BF16, FP16, FP32)[CASES.index((spec, wanted)) % 3], parse(spec).block
    first = CASES.index((spec, wanted)) % 2  # with gamma or with 1 + gamma
    for norm, shape in zip(NORMS[first::2], ((block + 3, 66), (2, 130)), strict=True):
        x, gamma, beta = norm_inputs(norm, shape, dtype, device)
        if beta is not None:
            gamma, beta = gamma * 0.01, beta * 0 + 30  # the largest value of a block by far
            beta[::2] *= -1
        assert_norm(norm_cast(norm, x, gamma, beta, spec, wanted), norm_of(norm, x, gamma, beta), spec, wanted)


@pytest.mark.parametrize("norm", [NORMS[0], NORMS[-1]], ids=["LayerNorm", "RMSNorm-1+"])
def test_norm_of_a_sum(norm: Norm, device: torch.device) -> None:
    for dtype, shape in ((BF16, (35, 80)), (FP32, (3, 33)), (FP16, (0, 64))):
        x, gamma, beta = norm_inputs(norm, shape, dtype, device)
        residual = torch.randn(shape).to(device, dtype)
        got = norm_cast(norm, x, gamma, beta, MX, BOTH, residual)
        assert_norm(got, norm_of(norm, x, gamma, beta, residual), MX, BOTH)
        assert torch.equal(got[-1], (x.float() + residual.float()).to(dtype))


def test_norm_of_special_values(device: torch.device) -> None:
    """Rows of NaN, with an infinity, of zeros, of denormals: the others' codes stay what they are."""
    for norm in NORMS[::2]:
        x, gamma, beta = norm_inputs(norm, (40, 130), FP32, device)
        x[1], x[5, 3], x[7], x[8], x[9, 2] = torch.nan, torch.inf, 0.0, 1e-40, 3e38
        for spec in (STRIPS, MX_TILES):
            assert_norm(norm_cast(norm, x, gamma, beta, spec, BOTH), norm_of(norm, x, gamma, beta), spec, BOTH)


def test_norm_of_long_rows_and_other_tiles(device: torch.device) -> None:
    norm = NORMS[0]
    x, gamma, beta = norm_inputs(norm, (2, 16400), BF16, device)  # read in chunks
    got = norm_cast(norm, x, gamma, beta, STRIPS, ROW, choice=Tile(2, 4096, 4))
    assert_norm(got, norm_of(norm, x, gamma, beta), STRIPS, ROW)
    x, gamma, beta = norm_inputs(norm, (48, 160), BF16, device)
    for choice in (Tile(16, 32, 1), Tile(64, 64, 4)):
        got = norm_cast(norm, x, gamma, beta, MX, BOTH, choice=choice)
        assert_norm(got, norm_of(norm, x, gamma, beta), MX, BOTH)


# ---- what follows an odd end of packed codes: 0, though a kernel has -0 or NaN outside of the matrix ----


@pytest.mark.parametrize(("norm", "spec"), diagonals(2, NORMS, PACKED))
def test_odd_end_of_a_packed_norm(norm: Norm, spec: str, device: torch.device) -> None:
    """All that gamma multiplies is 0 below the last row; right of the last column an rsigma of NaN multiplies 0."""
    for shape in ((1, 1), (7, 12), (35, 67)):
        x, gamma, beta = norm_inputs(norm, shape, BF16, device)
        gamma = -gamma.abs() - 2  # 1 + gamma is negative, too
        for wanted in PACKED_ORIENTATIONS:
            assert_norm(norm_cast(norm, x, gamma, beta, spec, wanted), norm_of(norm, x, gamma, beta), spec, wanted)
        x[::3, 0], gamma[::4], gamma[1::4] = torch.nan, torch.inf, -torch.inf
        got = norm_cast(norm, x, gamma, beta, spec, (True, True, False))
        assert_norm(got, norm_of(norm, x, gamma, beta), spec, (True, True, False))


@pytest.mark.parametrize(
    ("act", "spec"),
    diagonals(4, [*ACTIVATIONS, NEGATIVE_LIMIT, NEGATIVE_OFFSET], PACKED),
    ids=lambda each: each if isinstance(each, str) else activation_id(each),
)
def test_odd_end_of_a_packed_activation(act: Activation, spec: str, device: torch.device) -> None:
    """Odd columns cast along the rows, odd rows along the columns, and both; of a gated gradient rows alone are odd."""
    block = parse(spec).block
    for (rows, columns), wanted in zip(((8, 13), (13, 8), (33, 41)), PACKED_ORIENTATIONS, strict=True):
        x = activation_inputs((rows, 2 * columns if act.gated else columns), BF16, device)
        assert_cast(forward(x, act, spec, wanted), value(x, act), spec, wanted)
        dy, x = backward_inputs(act, (rows, 2 * block if act.gated else columns), BF16, device)
        assert_cast(backward(dy, x, act, spec, wanted), gradient(dy, x, act)[0], spec, wanted)


# ---- compiled, and on a GPU ----


BY_EITHER_COMPILER = pytest.mark.parametrize("with_layouts", [False, True], ids=["triton", "gluon"])


@each_once
@BY_EITHER_COMPILER
@pytest.mark.parametrize("spec", [STRIPS, MX])
def test_activations_compiled_for_sm_90(spec: str, with_layouts: bool) -> None:
    """Accesses are 16 bytes wide, nothing spills, and no product is contracted."""
    fmt, x, wanted = parse(spec), torch.empty(0, dtype=BF16), BOTH if spec == STRIPS else (True, True, False)
    formula, how = kernels.formula("swiglu", ()), cast_constants(x, fmt, *wanted)
    casts = [torch.uint8, fmt.scale_dtype, FP32] * 2
    for kernel, name, reads, bias in (
        (kernels.FORWARD, "activation", (BF16, BF16, BF16), ()),
        (kernels.BACKWARD, "activation_backward", (BF16, BF16, BF16, FP32, BF16), (True,)),
    ):
        tile = fused_tile(name, None, x, (128, 128), fmt, BOTH)[0]
        if with_layouts and tile.cols < 128:
            tile = Tile(32, 128, 2)
        constants = (1, *formula, *how, True, False, *bias, True, False, False, True, tile.rows, tile.cols)
        chosen = layouts(tile, fmt.block, wanted[2]) if with_layouts else None
        assert with_layouts == (chosen is not None)
        tensors = [*[(each,) for each in (*reads, *casts)], BF16]
        check_compiled(kernel, (*tensors, (7,), *[7] * 7, *constants, chosen), tile.warps)


@each_once
@BY_EITHER_COMPILER
@pytest.mark.parametrize("spec", [STRIPS, "e4m3/tensor/given"])
def test_norms_compiled_for_sm_90(spec: str, with_layouts: bool) -> None:
    fmt, x = parse(spec), torch.empty(0, dtype=BF16)
    tile = fused_tile("norm", None, x, (128, 128), fmt, BOTH)[0]
    casts = torch.uint8, torch.uint8, fmt.scale_dtype, fmt.scale_dtype, FP32
    constants = (True, True, False, *cast_constants(x, fmt, *BOTH), True, True, tile.rows, tile.cols)
    chosen = layouts(tile, fmt.block, True) if with_layouts and fmt.block else None
    arguments = (BF16, BF16, BF16, FP32, FP32, FP32, *casts, *[7] * 6, *constants, chosen)
    check_compiled(norm_kernels.CAST, arguments, tile.warps)


def check_compiled(kernel: Kernel, arguments: tuple[Any, ...], warps: int) -> None:
    function = kernel.function_for(arguments)
    compiled = triton_interpreter.compile_for(function, *arguments, num_warps=warps, enable_fp_fusion=False)
    assert compiled.spills == 0
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx
    assert "fma.rn.f32" not in compiled.ptx


@pytest.mark.gpu
@FOR_EACH_FORMAT
def test_large_norms_on_a_gpu(spec: str) -> None:
    for norm, shape in zip(NORMS, ((16384, 4096), (1000, 2056), (2049, 1111), (16384, 8192)), strict=True):
        for dtype in (BF16, FP32):
            x, gamma, beta = norm_inputs(norm, shape, dtype, torch.device("cuda"))
            for residual in (None, torch.randn_like(x)):
                want = norm_of(norm, x, gamma, beta, residual)
                for wanted in (ROW, COLUMN, BOTH):
                    assert_norm(norm_cast(norm, x, gamma, beta, spec, wanted, residual), want, spec, wanted)


def test_norm_without_beta(device: torch.device) -> None:
    """Right of the last column lies minus the mean, times 1 + gamma of no gamma: in no amax."""
    for zero_centered in (False, True):
        norm = Norm("LayerNorm", zero_centered_gamma=zero_centered)
        x, gamma, _ = norm_inputs(norm, (35, 70), FP32, device)
        x, gamma = x + 50, gamma * 1e-3 - float(zero_centered)
        for spec in (STRIPS, MX):
            assert_norm(norm_cast(norm, x, gamma, None, spec, BOTH), norm_of(norm, x, gamma, None), spec, BOTH)


@pytest.mark.gpu
@FOR_EACH_FORMAT
def test_large_activations_on_a_gpu(spec: str) -> None:
    """Through the operations: sizes of a model, codes past 2^31 bytes from their beginning included."""
    act = Activation.of("swiglu")
    for rows, columns in ((16384, 14336), (1000, 4096), (131072 + 16, 16384)):
        x = torch.randn(rows, 2 * columns, device="cuda", dtype=BF16)
        dy = torch.randn(rows, columns, device="cuda", dtype=BF16)
        for wanted in (ROW, COLUMN, BOTH):
            with count_launches() as launches:
                got = activation.activation_cast(x, act.name, [], None, spec, *wanted)
                of_dx = activation.activation_backward_cast(dy, x, act.name, [], None, spec, *wanted, True)
            assert launches == {"activation_kernel": 1, "activation_backward_kernel": 1}
            last = rows - rows % 128 - 128  # whole blocks from there to the end
            _check_rows(got, value(x[last:], act), spec, wanted, last)
            _check_rows(of_dx, gradient(dy[last:], x[last:], act)[0], spec, wanted, last)
            again = activation.activation_backward_cast(dy, x, act.name, [], None, spec, *wanted, True)
            assert all(torch.equal(a, b) for a, b in zip(of_dx, again, strict=True))


def _check_rows(got: Sequence[Tensor], value: Tensor, spec: str, wanted: Wanted, first: int) -> None:
    """Those from row ``first`` on, where a block begins, are the cast of ``value``."""
    fmt = parse(spec)
    expected = fused_cast(value, None, fmt, *wanted)[:4]
    rows_of_scale = (1, 1, fmt.block if fmt.tile else 1, fmt.block)  # in each output one row stands for that many
    for found, want, per_row in zip(got[:4], expected, rows_of_scale, strict=True):
        assert torch.equal(found[first // per_row :] if found.dim() == 2 else found, want)
