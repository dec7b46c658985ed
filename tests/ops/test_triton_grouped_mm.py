"""The kernels that multiply and sum groups of rows: interpreted on a CPU, compiled on a GPU.

Exact on integers, within derived bounds on random values, and to the bit what each group alone gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need Triton")

import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import MockTensor

from minifloat.formats import COLUMNWISE, ROWWISE, parse
from minifloat.functional.gemm import multiply_rows
from minifloat.ops import grouped, matmul
from minifloat.ops.grouped import hopper, hopper_device, products
from minifloat.ops.grouped.gemm import grouped_mm_kernel, grouped_sum_kernel
from minifloat.ops.launch import count_launches
from minifloat.ops.tiles import GEMM_SM_90, SM_90
from minifloat.quantizer import Quantizer
from tests.helpers.compare import U, assert_same_bits, assert_within
from tests.helpers.grouped_operands import Operand, alone, integers, offsets_of, poisoned, quantized, values
from tests.helpers.sample import each_once, each_twice
from tests.helpers.tensor_core import tensor_core_error
from tests.helpers.triton_interpreter import compile_for

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
COUNTS = [(7, 0, 134), (64, 128, 1), (0, 0)]
LARGE = [(1000, 0, 517, 3, 2048), (128,) * 32]
SIDES = [(37, 140), (48, 272)]
LARGE_SIDES = [(272, 417), (512, 640)]

E4, E5, ROW, ROW5 = "e4m3/tensor/fp32", "e5m2/tensor/given", "e4m3/row/fp32", "e5m2/row/pow2"
STRIP, TILE, STRIP5, TILE32 = "e4m3/1x128/fp32", "e4m3/128x128/pow2", "e5m2/1x128/pow2", "e4m3/128x128/fp32"
MX, MX_TILE, MX5, MX6, MX4 = "e4m3/1x32/e8m0", "e4m3/32x32/e8m0", "e5m2/1x32/e8m0", "e2m3/1x32/e8m0", "e2m1/1x32/e8m0"
MX4_TILE, STRIP2 = "e2m1/32x32/e8m0", "e4m3/1x128/pow2"
NV, NV_TILE, NV_ROWS = "e2m1/1x16/two_level", "e2m1/16x16/two_level", "e2m1/1x16/two_level/amax_per_row"
ROTATED, BF16 = "e2m1/1x16/two_level/hadamard16", "identity"
PAIRS = [
    (E4, E4), (E5, E4), (E5, E5), (ROW, ROW), (ROW, E4), (ROW5, ROW),
    (STRIP, TILE), (STRIP, STRIP), (STRIP5, TILE32), (TILE, TILE), (TILE, STRIP),
    (BF16, BF16), (E4, BF16), (BF16, ROW), (BF16, NV_TILE),
    (MX, MX), (MX5, MX_TILE), (MX6, MX), (MX4, MX4), (NV, NV_TILE), (NV_ROWS, NV_ROWS), (E4, NV), (NV, MX4),
    (STRIP2, MX4), (STRIP2, MX), ("e4m3/256x256/pow2", MX), ("e4m3/2x2/pow2", MX), (NV, ROW),
]  # fmt: skip
GEMMS = ("fprop", "dgrad", "wgrad")
CASES = [(gemm, *pair) for pair in PAIRS for gemm in GEMMS] + [("wgrad", ROTATED, ROTATED)]
OF_EACH_KIND = [
    (E5, E4),
    (ROW, ROW),
    (STRIP, TILE),
    (STRIP, STRIP),
    (BF16, BF16),
    (MX, MX_TILE),
    (NV_ROWS, NV),
    (STRIP2, MX4),
]


def by_default(fast: set[tuple[str, str, str]]) -> pytest.MarkDecorator:
    """All cases, slow but for some."""
    cases = [pytest.param(*case, marks=[] if case in fast else pytest.mark.slow) for case in CASES]
    return pytest.mark.parametrize(("gemm", "a_spec", "b_spec"), cases, ids=lambda each: each.replace("/", "-"))


OF_KINDS = {case for case in CASES if case[1:] in OF_EACH_KIND}
FOR_EACH_KIND = by_default(OF_KINDS)
FOR_EACH_KIND_AND_PAIR = by_default(OF_KINDS | {case for i, case in enumerate(CASES) if (i + i // 3) % 3 == 0})


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is tested")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The GPU, or Triton's interpreter where there is none."""
    return torch.device(request.param)


class Problem(NamedTuple):
    """A grouped GEMM: two operands, each with the columns of what was cast, and the sizes of the result."""

    gemm: str
    a: Operand
    b: Operand
    cols: tuple[int, int]
    rows: int
    width: int

    def multiply(
        self, dtype: torch.dtype, bias: Tensor | None = None, fast: bool = False, device: torch.device | None = None
    ) -> Tensor:
        """By the kernels."""
        device = device or torch.device("cpu")
        bias = bias if bias is None else bias.to(device)
        with torch.no_grad():
            return products.multiply(
                self.gemm, *self.a.to(device), *self.b.to(device), self.rows, self.width, dtype, bias, fast
            )

    def reference(self, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        arguments = self.gemm, *self.a, *self.b, self.rows, self.width, dtype, bias, False
        return grouped.grouped_mm.reference(*arguments)

    def of(self, group: int) -> Problem:
        """One group alone."""
        a, b = (alone(x, group, cols) for x, cols in zip((self.a, self.b), self.cols, strict=True))
        rows = self.rows if self.gemm == "wgrad" else int(a.offsets[1])
        return self._replace(a=a, b=b, rows=rows)

    def place(self, group: int) -> Any:
        """Of a group's result."""
        return group if self.gemm == "wgrad" else slice(*self.a.offsets[group : group + 2].tolist())


Make = Callable[[int, int, Tensor, str, int], Operand]


def problem(
    gemm: str, a_spec: str, b_spec: str, counts: tuple[int, ...], sides: tuple[int, int], make: Make
) -> Problem:
    """X [M, inner], W [G outer, inner] and dY [M, outer], of which some rows are no group's."""
    outer, inner = sides
    rows, groups = sum(counts) + 5, len(counts)
    tokens, weights = offsets_of(counts), offsets_of((outer,) * groups)
    if gemm == "fprop":
        a, b = make(rows, inner, tokens, a_spec, ROWWISE), make(groups * outer, inner, weights, b_spec, ROWWISE)
        return Problem(gemm, a, b, (inner, inner), rows, outer)
    if gemm == "dgrad":
        a, b = make(rows, outer, tokens, a_spec, ROWWISE), make(groups * outer, inner, weights, b_spec, COLUMNWISE)
        return Problem(gemm, a, b, (outer, inner), rows, inner)
    a, b = make(rows, outer, tokens, a_spec, COLUMNWISE), make(rows, inner, tokens, b_spec, COLUMNWISE)
    return Problem(gemm, a, b, (outer, inner), outer, inner)


def cast_normal(rows: int, cols: int, offsets: Tensor, spec: str, dim: int) -> Operand:
    return quantized(torch.randn(rows, cols).bfloat16(), offsets, spec, dim)


def shapes(
    device: torch.device, counts: list[tuple[int, ...]] = COUNTS
) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    """Counts and sides, each at least once."""
    found = [(each, SIDES[i % 2]) for i, each in enumerate(counts)]
    return found + ([(each, LARGE_SIDES[i % 2]) for i, each in enumerate(LARGE)] if device.type == "cuda" else [])


def exact(
    case: Problem, group: int, bias: Tensor | None, rounded: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The product of a group, that of the absolute values, and the factors, [m, depth] and [n, depth], in float64."""
    a, b = (values(x, group, cols) for x, cols in zip((case.a, case.b), case.cols, strict=True))
    if BF16 in (case.a.spec, case.b.spec):
        a, b = a.to(rounded).double(), b.to(rounded).double()
    a = a if case.gemm != "wgrad" else a.t()
    b = b if case.gemm == "fprop" else b.t()
    depth = min(a.shape[1], b.shape[1])
    a, b = a[:, :depth], b[:, :depth]
    addend = 0 if bias is None else bias[group].to(rounded).double()
    return a @ b.t() + addend, a.abs() @ b.abs().t() + (0 if bias is None else bias[group].double().abs()), a, b


# ---- products ----


@FOR_EACH_KIND_AND_PAIR
def test_exact_on_integers(gemm: str, a_spec: str, b_spec: str, device: torch.device) -> None:
    """Sums of small integers under powers of two are exact in any order, so they are the reference's."""
    for i, (counts, sides) in enumerate(shapes(device)):
        if BF16 in (a_spec, b_spec) and (a_spec + b_spec).count("two_level"):
            return  # amaxes are no powers of two: dequantized values are rounded
        case = problem(gemm, a_spec, b_spec, counts, sides, integers)
        dtype, fast = DTYPES[i % 3], bool(i % 2)
        bias = None  # or one that is rounded to bf16 first, which a sum that is rounded once would not be
        if gemm == "fprop" and i != 1:
            bias = torch.randint(-1000, 1000, (len(counts), case.width)) / 128
        found = case.multiply(dtype, bias, fast, device).cpu()
        # Values are multiplied by PyTorch, which rounds before it adds the bias.
        expected = case.reference(torch.float32, None if bias is None else bias.to(dtype).float())
        if BF16 not in (a_spec, b_spec):
            expected = case.reference(dtype, bias)
        assert found.dtype == dtype and torch.equal(found, expected.to(dtype))
        assert gemm == "wgrad" or not found[sum(counts) :].any()
        assert sum(counts) == 0 or found.count_nonzero() > 0


@each_twice
@pytest.mark.parametrize("spec", ["e4m3/tensor/fp32", "e4m3/1x128/pow2", "e4m3/1x32/e8m0", BF16])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_written_to_given_memory(gemm: str, spec: str, device: torch.device) -> None:
    """The same bits, whatever was there; also those of rows and groups that have nothing to sum."""
    for counts, sides in shapes(device, COUNTS[:1])[:1]:
        case = problem(gemm, spec, spec, counts, sides, cast_normal)
        expected = case.multiply(torch.float32, device=device)
        out = torch.full_like(expected, torch.nan)
        arguments = gemm, *case.a.to(device), *case.b.to(device), case.rows, case.width, torch.float32, None, False
        products.multiply_into(out, *arguments)
        assert torch.equal(out, expected)


@FOR_EACH_KIND
def test_within_the_bound(gemm: str, a_spec: str, b_spec: str, device: torch.device) -> None:
    """Sums in fp32, each step of which a tensor core may cut off: 2^-22 of the magnitude, FP8 more on a GPU."""
    for i, (counts, sides) in enumerate(shapes(device, COUNTS[:1])):
        dtype, fast = DTYPES[i % 3], i == 1
        case = problem(gemm, a_spec, b_spec, counts, sides, cast_normal)
        bias = torch.randn(len(counts), case.width) if gemm == "fprop" else None
        found = case.multiply(dtype, bias, fast, device).cpu()
        eight = all(parse(x).encoding.dtype and parse(x).block in (0, 128) for x in (a_spec, b_spec))
        for group in range(len(counts)):
            want, magnitude, a, b = exact(case, group, bias, dtype)
            step = 2.0**-22 if device.type == "cuda" else U
            bound = 1.01 * (a.shape[1] + 16) * step * magnitude
            if eight and device.type == "cuda":
                bound = bound + tensor_core_error(a, b, None if fast else 128)
            assert_within(found[case.place(group)], want, bound, dtype)


@each_twice
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize(("a_spec", "b_spec"), OF_EACH_KIND)
def test_a_group_does_not_depend_on_the_others(gemm: str, a_spec: str, b_spec: str, device: torch.device) -> None:
    """The bits of each group alone, whatever lies in memory that is no group's.

    The bits of PyTorch's product of values on a CPU depend on where its operands begin in memory, on some processors.
    """
    by_library = device.type == "cpu" and a_spec == b_spec == "identity"
    for counts, sides in shapes(device, COUNTS[:1]):
        case = problem(gemm, a_spec, b_spec, counts, sides, cast_normal)
        dirty = case._replace(a=poisoned(case.a), b=poisoned(case.b))
        found = dirty.multiply(torch.float32, device=device).cpu()
        assert found.isfinite().all()
        for group in range(min(len(counts), 4)):
            own = case.of(group).multiply(torch.float32, device=device).cpu()
            if gemm == "wgrad":
                own = own[0]
            if by_library:
                torch.testing.assert_close(found[case.place(group)], own, rtol=1e-5, atol=1e-5)
            else:
                assert_same_bits(found[case.place(group)], own)


RAGGED = (1001, 1, 0, 127, 130, 1023, 514, 1300)
"""Groups that begin at any row, one without rows."""
BITS = [
    *[(counts, SIDES[i % 2]) for i, counts in enumerate([*COUNTS, (0, 0, 300), (129, 1, 127, 128)])],
    *zip(LARGE, LARGE_SIDES, strict=True),
    ((129, 1, 300), (1168, 2064)),  # of more steps than a series, of 16 codes the last
    ((3, 0, 255), (1024, 2048)),  # whole series
    (RAGGED, (144, 1040)),
    ((0, 4000, 0, 3, 0, 90), (272, 1168)),  # skewed
]


def cast_by_kernels(rows: int, cols: int, offsets: Tensor, spec: str, dim: int) -> Operand:
    """Operands as the library makes them on a GPU, in the memory order that it gives them there."""
    on = torch.device("cuda")
    return quantized(torch.randn(rows, cols, device=on).bfloat16(), offsets.to(on), spec, dim, by_reference=False)


def with_rows_of_scales(operand: Operand, order: str) -> Operand:
    """The grid of scales in another memory order: rows consecutive, or with room after each, at no multiple of 16."""
    scale = operand.scale_inv
    if scale is None or scale.dim() < 2 or order == "made":
        return operand
    if order == "consecutive":
        return operand._replace(scale_inv=scale.t().contiguous().t())
    room = torch.full((scale.shape[0], scale.shape[1] + 3), torch.nan if scale.is_floating_point() else 0xFF)
    spaced = room.to(scale)[:, : scale.shape[1]]
    return operand._replace(scale_inv=spaced.copy_(scale))


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["made", "consecutive", "spaced"])
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize(("a_spec", "b_spec"), [(E5, E4), (ROW, ROW), (STRIP, TILE), (STRIP, STRIP), (TILE, TILE)])
def test_the_kernel_of_hopper_gives_the_bits_of_tritons(
    gemm: str, a_spec: str, b_spec: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sums in the same order, each of three times, with whatever lies in memory that is no group's.

    Operands are those of the library's own casts; their scales also lie in memory as others may give them.
    """
    if order != "made" and not a_spec.count("x128"):
        return  # which have no grid of scales
    for counts, sides in BITS:
        sides = sides[0] // 16 * 16, sides[1] // 16 * 16
        case = problem(gemm, a_spec, b_spec, counts, sides, cast_by_kernels)
        a, b = (with_rows_of_scales(poisoned(each), order) for each in (case.a, case.b))
        case = case._replace(a=a, b=b)
        bias = torch.randn(len(counts), case.width) if gemm == "fprop" else None
        with count_launches() as launches:
            found = [case.multiply(torch.float32, bias, device=torch.device("cuda")) for _ in range(3)]
        assert launches == {"grouped_hopper_kernel": 3}
        with monkeypatch.context() as patch:
            patch.setattr(hopper, "takes", lambda *sides: False)
            expected = case.multiply(torch.float32, bias, device=torch.device("cuda"))
        for each in found:
            assert_same_bits(each, expected)


@pytest.mark.parametrize(
    ("a_spec", "b_spec"),
    [(BF16, BF16), (ROW, ROW), (STRIP, TILE), (STRIP, STRIP), (MX, MX_TILE), (NV_ROWS, NV), (STRIP2, MX4)],
)
def test_rows_of_one_matrix_do_not_depend_on_the_others(
    a_spec: str, b_spec: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Casts of whole matrices as one group: any rows alone have the bits that they have among all."""
    monkeypatch.setattr(grouped, "grouped_mm", products.multiply)
    monkeypatch.setattr(grouped, "rowwise_mm", products.multiply_values)
    x_quantizer, w_quantizer = (Quantizer(parse(spec), columnwise=False) for spec in (a_spec, b_spec))
    x, w, bias = (torch.randn(shape).to(device, torch.bfloat16) for shape in ((150, 140), (37, 140), (37,)))
    weight = w_quantizer(w).along(ROWWISE)

    def run(rows: Any) -> Tensor:
        with torch.no_grad():
            own = x_quantizer(x[rows]).along(ROWWISE)
            return multiply_rows("fprop", own, weight, torch.bfloat16, bias, True)

    y = run(slice(None))
    for rows in (slice(1), slice(17), slice(16, 17), slice(120, 150), torch.randperm(150).to(device)):
        assert_same_bits(run(rows), y[rows])


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("spec", [E4, TILE, MX_TILE, NV_TILE])
def test_one_cast_of_a_symmetric_format(spec: str, gemm: str, device: torch.device) -> None:
    """Codes that were cast along the other dim than the one that is contracted."""
    for dims in ((ROWWISE, ROWWISE), (COLUMNWISE, COLUMNWISE), (ROWWISE, COLUMNWISE)):
        for counts, sides in ((COUNTS[0], SIDES[0]), (COUNTS[1], SIDES[1]))[: 2 if device.type == "cuda" else 1]:
            chosen = iter(dims)
            make: Make = lambda rows, cols, offsets, spec, _: integers(rows, cols, offsets, spec, next(chosen))  # noqa: B023, E731
            case = problem(gemm, spec, spec, counts, sides, make)
            dirty = case._replace(a=poisoned(case.a), b=poisoned(case.b))
            assert torch.equal(dirty.multiply(torch.float32, device=device).cpu(), case.reference(torch.float32))


@pytest.mark.parametrize("gemm", GEMMS)
def test_values_keep_their_dtype_where_the_result_holds_more(gemm: str, device: torch.device) -> None:
    """bf16 and fp16 values go to tensor cores as they are, fp32 ones are multiplied in fp32."""
    for of in DTYPES:
        for dtype in DTYPES:
            case = problem(gemm, BF16, BF16, COUNTS[0], SIDES[0], integers)
            a, b = (x._replace(codes=x.codes.to(of)) for x in (case.a, case.b))
            case = case._replace(a=a, b=b)
            assert torch.equal(case.multiply(dtype, device=device).cpu(), case.reference(torch.float32).to(dtype))
    case = problem(gemm, BF16, BF16, COUNTS[0], SIDES[0], cast_normal)
    a, b = (x._replace(codes=torch.randn(x.codes.shape)) for x in (case.a, case.b))
    case = case._replace(a=a, b=b)
    for dtype in (torch.float32, torch.bfloat16):  # a narrower result is that of values rounded to it
        found = case.multiply(dtype, device=device).cpu()
        for group in range(len(COUNTS[0])):
            want, magnitude, left, _ = exact(case, group, None, dtype)
            step = 2.0**-22 if device.type == "cuda" else U
            assert_within(found[case.place(group)], want, (left.shape[1] + 2) * step * magnitude, dtype)


def test_formats_without_kernels_are_the_references(device: torch.device) -> None:
    spec = "e4m3/1x64/fp32"  # scales that do not fit bf16
    case = problem("fprop", spec, spec, COUNTS[0], SIDES[0], integers)
    with count_launches() as launches:
        assert_same_bits(case.multiply(torch.float32, device=device).cpu(), case.reference(torch.float32))
    assert not launches


@each_twice
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("spec", [E4, STRIP, BF16, MX, NV])
def test_launches_do_not_depend_on_the_groups(spec: str, gemm: str, device: torch.device) -> None:
    """One GEMM; formats that are written out as bf16 have a kernel or two for each operand before it."""
    before = {MX: {"grouped_largest_kernel": 2, "grouped_decode_kernel": 2}, NV: {"grouped_decode_kernel": 2}}
    kernel = "grouped_mm_kernel"
    if device.type == "cuda" and spec in (E4, STRIP) and torch.cuda.get_device_capability() == (9, 0):
        kernel = "grouped_hopper_kernel"
    for counts in ((3, 4), (0,) * 20, (50,)):
        case = problem(gemm, spec, spec, counts, (16, 32), integers)
        with count_launches() as launches, matmul.count_gemms() as gemms:
            case.multiply(torch.bfloat16, device=device)
        assert launches == before.get(spec, {}) | {kernel: 1}
        backend = "emulated" if spec in before else "native"
        assert gemms == ({} if spec == BF16 else {matmul.Gemm(gemm, spec, spec, backend): 1})


def test_nothing_to_multiply(device: torch.device) -> None:
    """No groups, no rows, or nothing that is contracted: zeros, and the bias where a row is a group's."""
    for spec in (E4, STRIP, BF16, MX, NV):
        for gemm in GEMMS:
            case = problem(gemm, spec, spec, (), (16, 32), integers)
            assert_same_bits(case.multiply(torch.float32, device=device).cpu(), case.reference(torch.float32))
    tokens, weights = offsets_of((3, 2)), offsets_of((16, 16))
    none = torch.empty(7, 0, dtype=torch.bfloat16), torch.empty(32, 0, dtype=torch.bfloat16)
    case = Problem("fprop", quantized(none[0], tokens, BF16, -1), quantized(none[1], weights, BF16, -1), (0, 0), 7, 16)
    bias = torch.randn(2, 16)
    want = torch.cat([bias[:1].expand(3, 16), bias[1:].expand(2, 16), torch.zeros(2, 16)])
    assert_same_bits(case.multiply(torch.float32, bias, device=device).cpu(), want)


def test_a_bad_row_stays_alone(device: torch.device) -> None:
    """NaN in a row of the left operand reaches that row of the result, and none of its tile's others."""
    case = problem("fprop", BF16, BF16, (20, 30), (16, 48), cast_normal)
    clean = case.multiply(torch.float32, device=device).cpu()
    codes = case.a.codes.clone()
    codes[21, 5] = torch.nan
    dirty = case._replace(a=case.a._replace(codes=codes)).multiply(torch.float32, device=device).cpu()
    others = torch.arange(55) != 21
    assert torch.equal(dirty[others], clean[others]) and dirty[21].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("spec", [E4, STRIP, BF16, MX, NV])
def test_a_graph_is_replayed_with_other_counts(spec: str, gemm: str) -> None:
    """A captured graph reads the counts of its replay; the operation waits for nothing."""
    on = torch.device("cuda")
    first, second = (problem(gemm, spec, spec, counts, (64, 96), integers) for counts in ((100, 0, 28), (5, 90, 33)))
    a, b = first.a.to(on), first.b.to(on)
    arguments = gemm, *a, *b, first.rows, first.width, torch.bfloat16, None, False
    with torch.no_grad():
        products.multiply(*arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = products.multiply(*arguments)
        for case in (second, first):
            for side, target in ((case.a, a), (case.b, b)):
                for source, tensor in zip(side, target, strict=True):
                    if isinstance(source, Tensor):
                        tensor.copy_(source)
            graph.replay()
            assert torch.equal(found.cpu(), case.reference(torch.bfloat16))


# ---- sums ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum(dtype: torch.dtype, device: torch.device) -> None:
    """Within fp32 sums in any order, rounded once; the bits of each group alone; rows of no group are not read."""
    for counts in [*COUNTS, (), (1, 300, 64), *(LARGE if device.type == "cuda" else [])]:
        for cols in (1, 37, 144):
            x = torch.randn(sum(counts) + 5, cols).to(dtype)
            x[sum(counts) :] = torch.nan
            offsets = offsets_of(counts)
            with count_launches() as launches:
                found = products.add_rows(x.to(device), offsets.to(device)).cpu()
            assert launches == ({"grouped_sum_kernel": 1} if counts else {})
            assert found.shape == (len(counts), cols) and found.dtype == dtype
            for group, (first, end) in enumerate(pairwise(offsets.tolist())):
                own = x[first:end]
                bound = max(end - first - 1, 0) * 1.01 * U * own.double().abs().sum(0)
                assert_within(found[group], own.double().sum(0), bound, dtype)
                one = products.add_rows(own.contiguous().to(device), offsets_of((end - first,)).to(device)).cpu()
                assert_same_bits(found[group], one[0])
                assert end > first or not found[group].any()


# ---- what the compiler makes of them ----


def compile_product(kind: str, dtype: torch.dtype, gemm: str, tile: bool = False) -> Any:
    """A product whose sizes are multiples of 16."""
    choice = GEMM_SM_90[f"grouped_{kind}"]
    eight, scaled = dtype == torch.float8_e4m3fn, kind == "block"
    scale = torch.float32 if eight else dtype
    unit = (128 if scaled else 16) if eight and gemm != "fprop" else 0
    promoted = kind == "fp8"
    end = choice.rows, choice.cols, choice.depth, choice.stages
    out, offsets = torch.bfloat16, torch.int32
    deep = gemm == "wgrad"
    orders = (unit, unit, eight, eight) if deep else (0, unit, True, eight or gemm == "fprop")
    return compile_for(
        grouped_mm_kernel, dtype, dtype, scale, scale, out, out, offsets, offsets, *[7] * 12,
        True, True, deep, True, not deep, *orders, deep, gemm != "fprop", False, promoted, scaled, False, tile,
        eight and not scaled, 0, 0, 1.0, False, 1 if deep else 16, 8, *end, num_warps=choice.warps,
        enable_fp_fusion=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype", "gemm", "tile", "spills"),
    [
        ("fp8", torch.float8_e4m3fn, "fprop", False, 0), ("fp8", torch.float8_e4m3fn, "wgrad", False, 0),
        ("fp8_fast", torch.float8_e4m3fn, "fprop", False, 16), ("block", torch.float8_e4m3fn, "dgrad", True, 0),
        ("block", torch.float8_e4m3fn, "wgrad", False, 128), ("half", torch.bfloat16, "fprop", False, 16),
        ("half", torch.bfloat16, "dgrad", False, 16), ("half", torch.bfloat16, "wgrad", False, 16),
        ("half_few", torch.bfloat16, "fprop", False, 0), ("fp8_fast_few", torch.float8_e4m3fn, "fprop", False, 0),
    ],
)  # fmt: skip
def test_products_compile_to_tensor_cores(kind: str, dtype: torch.dtype, gemm: str, tile: bool, spills: int) -> None:
    """Operands are copied 16 bytes at a time to shared memory, without waiting, and read there by wgmma.

    Products of two strips hold the scales of 32 columns beside two sums of 64 elements, and a little of them spills.
    """
    compiled = compile_product(kind, dtype, gemm, tile)
    assert "wgmma.mma_async" in compiled.ptx and "mma.sync" not in compiled.ptx
    copies = len(re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", compiled.ptx))
    assert copies >= 32 and not re.search(r"ld\.global(\.L1::\w+)?\.b8", compiled.ptx)
    assert compiled.spills <= spills and compiled.shared <= 227 * 1024
    assert compiled.sass.count("WARPGROUP.DEPBAR") <= 4  # else ptxas waits for each wgmma
    assert ("fma.rn.f32" in compiled.ptx) == (kind == "block")


@each_once
@pytest.mark.parametrize(("scaled", "b_square", "tma"), [(0, 0, 0), (1, 1, 0), (1, 0, 0), (1, 0, 1)])
@pytest.mark.parametrize("gemm", GEMMS)
def test_hoppers_products_do_not_wait_for_each_other(gemm: str, scaled: int, b_square: int, tma: int) -> None:
    """Two warpgroups of four wgmma a step, by squares of SERIES steps and one: ptxas serializes none. Tiles by TMA."""
    scale, out, offsets, depth = torch.float32, torch.bfloat16, torch.int32, gemm == "wgrad"
    unit = 16 if gemm in ("dgrad", "wgrad") else 0
    a, b = (
        TensorDescriptor(MockTensor(torch.float8_e4m3fn), [512, 512], [512, 1], [rows, 128], hopper_device._CODES.value)
        for rows in (64, 128)
    )
    grid = TensorDescriptor(MockTensor(torch.float32), [4096], [1], [128], hopper_device._FACTORS.value)
    grids = 2 * [grid if tma else scale]
    series = hopper.SERIES if b_square else 1
    compiled = compile_for(
        hopper.grouped_hopper_kernel, a, b, *grids, scale, scale, out, out, offsets, offsets, *[7] * 10,
        True, unit if depth else 0, unit, unit > 0, depth, bool(scaled), False, bool(b_square), 1 - scaled, 1 - scaled,
        False, depth, bool(tma), hopper.SERIES, 8, hopper.STAGES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    fences = series - 1
    products = series + 1 if series > 1 else 1
    assert compiled.sass.count("QGMMA") == 2 * 4 * products
    assert compiled.sass.count("WARPGROUP.DEPBAR") <= 2 * (products + fences)
    assert compiled.sass.count("UTMALDG") == 3 + 2 * tma and compiled.shared <= 227 * 1024
    series_spill = 0 if triton.__version__.startswith("3.6") else 320  # of the versions that do not run it
    assert compiled.spills <= ((series_spill if b_square else 160) if scaled else 0)


def test_sum_compiles_to_wide_loads() -> None:
    rows, cols, warps, _ = SM_90["grouped_sum"]
    compiled = compile_for(
        grouped_sum_kernel, torch.bfloat16, torch.bfloat16, torch.int32, 7, True, rows, cols,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    assert compiled.spills == 0 and re.search(r"ld\.global\.v4|cp\.async\.c[ag].*0x10", compiled.ptx)
