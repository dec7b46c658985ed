"""Device functions that cast kernels share: picking a matrix from several, loading and storing tiles."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

FLT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def matrix_of(starts, program, COUNT: tl.constexpr):
    """Returns what :func:`pick` takes: the program, or, where a table has the matrices, the number of its matrix."""
    found = program
    if COUNT == 0:
        found = program * 0
        last = tl.load(starts[0]).to(tl.int32) - 1  # the first one's start is 0: their number is in its place
        while found < last:
            middle = (found + last + 1) // 2
            begun = tl.load(starts[0] + middle) <= program
            last = tl.where(begun, last, middle - 1)
            found = tl.where(begun, middle, found)
    return found


@triton.jit
def first_program(starts, matrix, COUNT: tl.constexpr):
    """Returns the first program of a matrix, which :func:`matrix_of` gave."""
    if COUNT == 0:
        first = tl.where(matrix > 0, tl.load(starts[0] + matrix), 0).to(tl.int32)
    else:
        first = pick(starts, starts, matrix, COUNT)
    return first


@triton.jit
def pick(values, starts, matrix, COUNT: tl.constexpr):
    """Picks the one of ``values`` whose range of programs, which begins at ``starts``, holds the program of ``matrix``.

    In a table (``launch.in_table``) integers are themselves, and addresses are elements after the first one.
    """
    if COUNT == 0:
        chosen = tl.load(values[len(values) - 1] + matrix)
        if len(values) == 2:
            chosen = values[0] + chosen
        else:
            chosen = chosen.to(tl.int32)
    else:
        chosen = values[0]
        for i in tl.static_range(1, COUNT):
            chosen = tl.where(matrix >= starts[i], values[i], chosen)
    return chosen


@triton.jit
def pick_wide(values, starts, matrix, COUNT: tl.constexpr, WIDE: tl.constexpr = True):
    """Picks among addresses that are multiples of 16 bytes, which the compiler shall know.

    A whole tensor begins at such a place, a group of its rows only if all rows do: where they need not, not ``WIDE``.
    """
    if not WIDE:
        chosen = pick(values, starts, matrix, COUNT)
    elif COUNT == 0:
        UNIT: tl.constexpr = 128 // values[0].dtype.element_ty.primitive_bitwidth
        chosen = tl.multiple_of(values[0] + tl.load(values[1] + matrix) // UNIT * UNIT, 16)
    else:
        chosen = tl.multiple_of(pick(values, starts, matrix, COUNT), 16)
    return chosen


@triton.jit
def extent(value, ALIGNED: tl.constexpr):
    """``value``, which the compiler shall know to be a multiple of 16 where it is ``ALIGNED``, for wide accesses."""
    return value // 16 * 16 if ALIGNED else value


@triton.jit
def corner(program, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """First row and first column of a tile of a matrix of N columns, whose tiles are counted along the rows."""
    tiles = tl.cdiv(N, BLOCK_N)
    return program // tiles * BLOCK_M, program % tiles * BLOCK_N


@triton.jit
def tile_places(first_m, first_k, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, LAYOUTS: tl.constexpr = None):
    """Rows and columns of a tile; with ``LAYOUTS`` (see ``job.py``) as it is loaded."""
    if LAYOUTS is None:
        m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    else:
        m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUTS.loaded))
        k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUTS.loaded))
    return first_m + m, first_k + k


@triton.jit
def places(tensor, first_m, first_k, GLUON: tl.constexpr):
    """Rows and columns of the elements of a 2-dimensional ``tensor`` that begins at ``first_m`` and ``first_k``."""
    ROWS: tl.constexpr = tensor.shape[0]
    COLS: tl.constexpr = tensor.shape[1]
    if GLUON:
        m = gl.arange(0, ROWS, gl.SliceLayout(1, tensor.type.layout))
        k = gl.arange(0, COLS, gl.SliceLayout(0, tensor.type.layout))
    else:
        m, k = tl.arange(0, ROWS), tl.arange(0, COLS)
    return first_m + m, first_k + k


@triton.jit
def append(values, value):
    """Appends to a tuple."""
    return values + (value,)


@triton.jit
def skips(noop, CAN_SKIP: tl.constexpr):
    """The flag on the device says to leave codes and scales as they are."""
    return tl.load(noop) != 0 if CAN_SKIP else False


@triton.jit
def record_max(target, value):
    """``target = max(target, value)`` for floats of at least 0, whose order is that of their bits."""
    bits = target.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(bits, value.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def single_bytes(codes, size):
    """Returns the same codes, for a kernel that stores them in two orders; ``size`` is any that is not negative.

    The hardware converts two numbers at a time. Where the compiler regroups such pairs for another layout, ptxas (that
    of Triton 3.6, at -O1 and above) makes wrong code of its permutations: half the bytes were lost on an H200. An
    operation on each byte, which the compiler cannot see to change nothing, keeps them apart.
    """
    return codes | (size >> 31).to(tl.uint8)


@triton.jit
def store_codes(target, codes, m, k, M, K, P, K_MAJOR: tl.constexpr, ALIGNED_P: tl.constexpr):
    """Stores a tile of [M, K] codes at rows ``m`` and columns ``k``; ``K_MAJOR``: with the columns outermost, P apart.

    ``ALIGNED_P``: P is a multiple of 16, and the matrix has room for as many rows as M rounded up to one: of a group
    of rows. Whatever follows its last code is stored there too, so that 16 bytes go at a time.
    """
    if K_MAJOR:
        if ALIGNED_P:
            M = tl.cdiv(M, 16) * 16
            P = P // 16 * 16
        inside = (k[:, None] < K) & (m[None, :] < M)
        tl.store(target + k[:, None].to(tl.int64) * P + m[None, :], tl.trans(codes), mask=inside)
    else:
        inside = (m[:, None] < M) & (k[None, :] < K)
        tl.store(target + m[:, None].to(tl.int64) * K + k[None, :], codes, mask=inside)


@triton.jit
def store_packed(target, codes, first_m, first_k, M, K, COLUMN: tl.constexpr):
    """Stores a tile of [M, K] codes of 4 bits, which begins at even places, two neighbours along K, or M, in a byte.

    What follows an odd last code is 0, whatever code the tile has there. It need not be that of +0: a norm multiplies
    the 0 that it loaded by gamma, which makes -0 or NaN of it, and an element of the user's may have another 0.
    """
    BLOCK_M: tl.constexpr = codes.shape[0]
    BLOCK_K: tl.constexpr = codes.shape[1]
    if COLUMN:
        even, odd = tl.split(tl.permute(tl.reshape(codes, (BLOCK_M // 2, 2, BLOCK_K)), (0, 2, 1)))
        m, k = first_m // 2 + tl.arange(0, BLOCK_M // 2), first_k + tl.arange(0, BLOCK_K)
        high = tl.where(2 * m[:, None] + 1 < M, odd << 4, 0).to(tl.uint8)
        store_codes(target, even | high, m, k, (M + 1) // 2, K, M, False, False)
    else:
        even, odd = tl.split(tl.reshape(codes, (BLOCK_M, BLOCK_K // 2, 2)))
        m, k = first_m + tl.arange(0, BLOCK_M), first_k // 2 + tl.arange(0, BLOCK_K // 2)
        high = tl.where(2 * k[None, :] + 1 < K, odd << 4, 0).to(tl.uint8)
        store_codes(target, even | high, m, k, M, (K + 1) // 2, M, False, False)


@triton.jit
def store_scaled(
    values, factor, row_codes, column_codes, m, n, M, N, P, first, width,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, ALIGNED_P: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Stores the codes of ``values * factor``, of the N columns from ``first`` on of a matrix [M, width].

    ``P`` and ``ALIGNED_P``: see :func:`store_codes`.
    """
    # The second term changes no finite number, and is NaN for an infinity, which would saturate.
    codes = ELEMENT.kernels.encode(values * factor + values * 0.0, ELEMENT)
    if COLUMN:
        codes = single_bytes(codes, M)
    if ROW:
        inside = (m[:, None] < M) & (n[None, :] < N)
        tl.store(row_codes + first + m[:, None].to(tl.int64) * width + n[None, :], codes, mask=inside)
    if COLUMN:
        store_codes(column_codes + first.to(tl.int64) * P, codes, m, n, M, N, P, K_MAJOR, ALIGNED_P)


@triton.jit
def load_tile(source, m, k, M, K, width=None):
    """A tile of [M, K] at rows ``m`` and columns ``k`` in fp32, 0 outside; of a matrix that may be ``width`` wide."""
    inside = (m[:, None] < M) & (k[None, :] < K)
    stride = K if width is None else width
    return tl.load(source + m[:, None].to(tl.int64) * stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
