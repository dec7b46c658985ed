"""The parts of ``hopper.py``'s kernel: which tile is next, its copies to shared memory, its products and its store."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.7 to 3.9 named them anew.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

_BM, _BN, _BK, _HALF = gl.constexpr(128), gl.constexpr(128), gl.constexpr(128), gl.constexpr(64)
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
_STORED = gl.constexpr(  # 8 neighbours a thread; rows stay with their warp, so that no other is waited for
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
_FACTORS = gl.constexpr(gl.NVMMASharedLayout(0, 32, rank=1))
_CODES = gl.constexpr(gl.NVMMASharedLayout(128, 8))


@gluon.jit
def swept(program, tiles_m, tiles_n, SWEEP: gl.constexpr):
    """``gemm.swept``."""
    band = program // (SWEEP * tiles_n)
    height = gl.minimum(tiles_m - band * SWEEP, SWEEP)
    within = program % (SWEEP * tiles_n)
    return band * SWEEP + within % height, within // height


@gluon.jit
def begin(offset, group, UNIT: gl.constexpr):
    """``device.begin``."""
    return offset if UNIT == 0 else (offset // UNIT + group) * UNIT


@gluon.jit
def grid_row(offset, group, UNIT: gl.constexpr, SQUARE: gl.constexpr):
    """``device.grid_row``."""
    if SQUARE:
        return offset // _BK + group
    return begin(offset, group, UNIT) // _BK if UNIT > 0 else offset


@gluon.jit
def group_of(offsets, tile, groups):
    """``device.group_of``, by bisection: the last group that begins at or before ``tile``."""
    low = tile * 0
    high = groups
    while low < high:
        middle = (low + high + 1) // 2
        begun = gl.load(offsets + middle).to(gl.int32) // _BM + middle <= tile
        low = gl.where(begun, middle, low)
        high = gl.where(begun, high, middle - 1)
    return low


@gluon.jit
def place_of(tile, a_offsets, groups, M, N, depth, DEPTH: gl.constexpr, SWEEP: gl.constexpr):
    """Finds a tile's group, its first row and column in the group, the group's rows and the extent of the contraction.

    Rows are those of the group's own matrix. No rows where the tile has nothing to do.
    """
    tiles_n = gl.cdiv(N, _BN)
    if DEPTH:
        tiles_m = gl.cdiv(M, _BM)
        group = tile // (tiles_m * tiles_n)
        row, column = swept(tile % (tiles_m * tiles_n), tiles_m, tiles_n, SWEEP)
        contracted = (gl.load(a_offsets + group + 1) - gl.load(a_offsets + group)).to(gl.int32)
        return group, row * _BM, column * _BN, M, contracted
    row, column = swept(tile, M // _BM + groups + 1, tiles_n, SWEEP)
    group = group_of(a_offsets, row, groups)
    first = gl.load(a_offsets + group).to(gl.int32)
    end = gl.load(a_offsets + gl.minimum(group + 1, groups)).to(gl.int32)
    rows = gl.where(group < groups, end, M) - first
    # The tail's rows are nobody's: nothing is contracted.
    return group, (row - first // _BM - group) * _BM, column * _BN, rows, gl.where(group < groups, depth, 0)


@gluon.jit
def tiles_of(groups, M, N, DEPTH: gl.constexpr):
    """Counts the tiles, those with nothing to do included."""
    tiles_n = gl.cdiv(N, _BN)
    return groups * gl.cdiv(M, _BM) * tiles_n if DEPTH else (M // _BM + groups + 1) * tiles_n


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The next stage, and the parity of its barriers' phase: no division between two products."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), phase ^ last.to(gl.int32)


@gluon.jit
def copy_tiles(
    a, b, a_scale, b_scale, a_tiles, b_tiles, a_strips, b_strips, full, empty, a_offsets, b_offsets,
    M, N, depth, groups, a_scale_segment, b_scale_segment,
    A_UNIT: gl.constexpr, B_UNIT: gl.constexpr, B_ROWS: gl.constexpr, DEPTH: gl.constexpr,
    STRIPS: gl.constexpr, SWEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: fills the stages in order, each when both warpgroups have read what it held."""
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles_of(groups, M, N, DEPTH), gl.num_programs(0)):
        group, m, n, rows, contracted = place_of(tile, a_offsets, groups, M, N, depth, DEPTH, SWEEP)
        a_first = gl.load(a_offsets + group).to(gl.int32)
        b_first = gl.load(b_offsets + gl.maximum(gl.minimum(group, groups - 1), 0)).to(gl.int32)
        if DEPTH:
            a_row, a_column = m, begin(a_first, group, A_UNIT)
        else:
            a_row, a_column = begin(a_first, group, A_UNIT) + m, 0
        if B_ROWS:
            b_row, b_column = n, begin(b_first, group, B_UNIT)
        else:
            b_row, b_column = begin(b_first, group, B_UNIT) + n, 0
        steps = gl.where(m < rows, gl.cdiv(contracted, _BK), 0)
        for k in range(steps):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, (_BM + _BN) * _BK + (4 * (_BM + _BN) if STRIPS else 0))
            if STRIPS:
                _copy(a_scale, [(a_column // _BK + k) * a_scale_segment + m], barrier, a_strips.index(stage))
                _copy(b_scale, [(b_column // _BK + k) * b_scale_segment + n], barrier, b_strips.index(stage))
            _copy(a, [a_row, a_column + k * _BK], barrier, a_tiles.index(2 * stage))
            _copy(a, [a_row + _HALF, a_column + k * _BK], barrier, a_tiles.index(2 * stage + 1))
            _copy(b, [b_row, b_column + k * _BK], barrier, b_tiles.index(stage))
            stage, phase = following(stage, phase, STAGES)


@gluon.jit
def clear_columns(codes, rest, ROWS: gl.constexpr):
    """Zeros in the columns of a tile in shared memory from ``rest`` on, four codes at a time."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    if _RENAMED:
        words = codes.reinterpret(gl.int32, [ROWS, _BK // 4], gl.NVMMASharedLayout(128, 32))
    else:
        words = codes._reinterpret(gl.int32, [ROWS, _BK // 4], gl.NVMMASharedLayout(128, 32))
    kept = rest - 4 * gl.arange(0, _BK // 4, layout=gl.SliceLayout(0, LAYOUT))
    part = (1 << (8 * gl.minimum(gl.maximum(kept, 0), 3))) - 1
    mask = gl.where(kept >= 4, -1, part)
    words.store(words.load(LAYOUT) & mask[None, :])


@gluon.jit
def clear_after(x, y, rest, DEPTH: gl.constexpr):
    """Zeros after a group's last ``rest`` codes, which the next group's follow, or nobody's, NaN among them.

    Both warpgroups clear all of ``y``, so that neither waits for the other.
    """
    clear_columns(y, rest, _BN)
    if DEPTH:
        clear_columns(x, rest, _HALF)
    hopper.fence_async_shared()
    _barrier()


@gluon.jit
def factors_of(a_scale, b_scale, group, a_row, m, n, rows, N, known, A_STEP: gl.constexpr, B_STEP: gl.constexpr):
    """Loads the factors of rows and columns of a result; one factor where all have the same.

    Loaded before the sums: after them it would be waited for. Those of a group without rows may be undefined.
    """
    if A_STEP == 1:
        a_factor = gl.load(a_scale + a_row + m, mask=(m < rows) & known, other=0.0)
    else:
        a_factor = gl.load(a_scale + group, mask=known, other=0.0)
    if B_STEP == 1:
        b_factor = gl.load(b_scale + group * N + n, mask=(n < N) & known, other=0.0)
    else:
        b_factor = gl.load(b_scale + group, mask=known, other=0.0)
    return a_factor, b_factor


@gluon.jit
def scaled_sums(total, a_factor, b_factor, A_STEP: gl.constexpr, B_STEP: gl.constexpr):
    """The sums times their factors, which are multiplied first."""
    if A_STEP == 1 and B_STEP == 1:
        factor = a_factor[:, None] * b_factor[None, :]
    elif A_STEP == 1:
        factor = (a_factor * b_factor)[:, None]
    elif B_STEP == 1:
        factor = (a_factor * b_factor)[None, :]
    else:
        factor = a_factor * b_factor
    return total * factor


@gluon.jit
def store_half(out, total, start, first_m, first_n, rows, N):
    """Writes a warpgroup's sums from row ``start + first_m`` on, 16 bytes at a time."""
    result = gl.convert_layout(total.to(out.dtype.element_ty), _STORED)
    m = first_m + gl.arange(0, _HALF, layout=gl.SliceLayout(1, _STORED))
    n = first_n + gl.arange(0, _BN, layout=gl.SliceLayout(0, _STORED))
    at = out + start * N + m[:, None].to(gl.int64) * N + n[None, :]
    gl.store(at, result, mask=(m < rows)[:, None] & (n < N)[None, :])


@gluon.jit
def begun(PART: gl.constexpr, a_tiles, b_tiles, stage):
    """The product of a warpgroup's rows of a step, which is then waited for."""
    return hopper.warpgroup_mma(
        a_tiles.index(2 * stage + PART), b_tiles.index(stage).permute((1, 0)),
        gl.zeros([_HALF, _BN], gl.float32, _SUMS), use_acc=False, is_async=True,
    )  # fmt: skip


@gluon.jit
def loaded(k, steps, a_at, b_at, a_scale_segment, b_scale_segment):
    """The scales of step ``k``, if there is one."""
    a_scale = gl.load(a_at + k * a_scale_segment, mask=k < steps, other=0.0)
    return a_scale, gl.load(b_at + k * b_scale_segment, mask=k < steps, other=0.0)


@gluon.jit
def sums_of_series(
    PART: gl.constexpr, stage, phase, steps, contracted, a_tiles, b_tiles, full, empty, a_at, b_at,
    a_scale_segment, b_scale_segment,
    DEPTH: gl.constexpr, CLEAR: gl.constexpr, SERIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A tile's sums of products by squares, and the next stage: one factor a row and step.

    Products are issued SERIES at a time: each is added while the next one runs. Scales are loaded a step ahead.
    """
    total = gl.zeros([_HALF, _BN], gl.float32, _SUMS)
    whole = (gl.maximum(steps - 1, 0) if CLEAR else steps) // SERIES * SERIES
    # The stage to release, when a later product has taken the registers of its own: then its scales have been read,
    # too. Not `stage`: Triton takes two names of one value for one variable of a loop.
    read = 0
    a_next, b_next = loaded(0, steps, a_at, b_at, a_scale_segment, b_scale_segment)
    mbarrier.wait(full.index(stage), phase, pred=steps > 0)
    for k in range(0, whole, SERIES):
        product = begun(PART, a_tiles, b_tiles, stage)
        for i in gl.static_range(SERIES):
            now = stage
            stage, phase = following(stage, phase, STAGES)
            mbarrier.wait(full.index(stage), phase, pred=i < SERIES - 1 or k + SERIES < steps)
            scale = (a_next * b_next)[:, None]
            a_next, b_next = loaded(k + i + 1, steps, a_at, b_at, a_scale_segment, b_scale_segment)
            if i < SERIES - 1:
                later = begun(PART, a_tiles, b_tiles, stage)
                mbarrier.arrive(empty.index(read), count=1, pred=k + i > 0)
                product = hopper.warpgroup_mma_wait(1, deps=(product,))
                # Complete before the next product is issued: ptxas would put additions off, and spill.
                total = hopper.warpgroup_mma_wait(1, deps=(gl.fma(product, scale, total),))
                product = later
            else:
                product = hopper.warpgroup_mma_wait(0, deps=(product,))
                total = gl.fma(product, scale, total)
                mbarrier.arrive(empty.index(read), count=1)
            read = now
    for k in range(whole, steps):
        if CLEAR and contracted - k * _BK < _BK:
            clear_after(a_tiles.index(2 * stage + PART), b_tiles.index(stage), contracted - k * _BK, DEPTH)
        product = begun(PART, a_tiles, b_tiles, stage)
        mbarrier.arrive(empty.index(read), count=1, pred=k > 0)
        scale = (a_next * b_next)[:, None]
        a_next, b_next = loaded(k + 1, steps, a_at, b_at, a_scale_segment, b_scale_segment)
        read = stage
        stage, phase = following(stage, phase, STAGES)
        mbarrier.wait(full.index(stage), phase, pred=k + 1 < steps)
        product = hopper.warpgroup_mma_wait(0, deps=(product,))
        total = gl.fma(product, scale, total)
    mbarrier.arrive(empty.index(read), count=1, pred=steps > 0)
    return total, stage, phase


@gluon.jit
def sums_of_steps(
    PART: gl.constexpr, stage, phase, steps, contracted, a_tiles, b_tiles, a_strips, b_strips, full, empty, a_at, b_at,
    a_scale_segment, b_scale_segment,
    DEPTH: gl.constexpr, SCALED: gl.constexpr, CLEAR: gl.constexpr, STRIPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Other sums, and the next stage: a factor for each element and step (SCALED) leaves no registers for a series.

    The other warpgroup's products fill the gaps between those of this one.
    """
    total = gl.zeros([_HALF, _BN], gl.float32, _SUMS)
    for k in range(steps):
        if SCALED and not STRIPS:
            a_factors = gl.load(a_at + k * a_scale_segment)
            b_factors = gl.load(b_at + k * b_scale_segment)
        mbarrier.wait(full.index(stage), phase)
        if CLEAR and contracted - k * _BK < _BK:
            clear_after(a_tiles.index(2 * stage + PART), b_tiles.index(stage), contracted - k * _BK, DEPTH)
        product = begun(PART, a_tiles, b_tiles, stage)
        if STRIPS:
            a_factors = a_strips.index(stage).slice(PART * _HALF, _HALF).load(gl.SliceLayout(1, _SUMS))
            b_factors = b_strips.index(stage).load(gl.SliceLayout(0, _SUMS))
        product = hopper.warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = following(stage, phase, STAGES)
        if SCALED:
            total = gl.fma(product, a_factors[:, None] * b_factors[None, :], total)
        else:
            total += product
    return total, stage, phase


@gluon.jit
def multiply_half(
    PART: gl.constexpr, a_tiles, b_tiles, a_strips, b_strips, full, empty,
    a_scale, b_scale, bias, out, a_offsets, b_offsets,
    M, N, depth, groups, a_scale_row, a_scale_outer, a_scale_segment, b_scale_row, b_scale_outer, b_scale_segment,
    ALIGNED_N: gl.constexpr, A_UNIT: gl.constexpr, B_UNIT: gl.constexpr, B_ROWS: gl.constexpr, DEPTH: gl.constexpr,
    SCALED: gl.constexpr, A_SQUARE: gl.constexpr, B_SQUARE: gl.constexpr,
    A_STEP: gl.constexpr, B_STEP: gl.constexpr, BIAS: gl.constexpr, CLEAR: gl.constexpr,
    STRIPS: gl.constexpr, SERIES: gl.constexpr, SWEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each tile."""
    stage = 0
    phase = 0
    of_rows: gl.constexpr = gl.SliceLayout(1, _SUMS)
    of_columns: gl.constexpr = gl.SliceLayout(0, _SUMS)
    for tile in range(gl.program_id(0), tiles_of(groups, M, N, DEPTH), gl.num_programs(0)):
        group, first_m, first_n, rows, contracted = place_of(tile, a_offsets, groups, M, N, depth, DEPTH, SWEEP)
        N = N // 16 * 16 if ALIGNED_N else N
        if first_m < rows:
            own = gl.maximum(gl.minimum(group, groups - 1), 0)  # the tail reads no factor
            a_first = gl.load(a_offsets + group).to(gl.int32)
            b_first = gl.load(b_offsets + own).to(gl.int32)
            m = first_m + PART * _HALF + gl.arange(0, _HALF, layout=of_rows)
            n = first_n + gl.arange(0, _BN, layout=of_columns)
            near_m, near_n = gl.minimum(m, rows - 1), gl.minimum(n, N - 1)
            steps = gl.cdiv(contracted, _BK)
            a_at = a_scale
            b_at = b_scale
            if SCALED:
                a_grid = grid_row(a_first, group, A_UNIT, A_SQUARE).to(gl.int64) * a_scale_row
                b_grid = grid_row(b_first, group, B_UNIT, B_SQUARE).to(gl.int64) * b_scale_row
                a_at += a_grid + (near_m // _BK if A_SQUARE else near_m).to(gl.int64) * a_scale_outer
                # A tile of the result has the columns of one square of scales.
                b_at += b_grid + (first_n // _BK if B_SQUARE else near_n).to(gl.int64) * b_scale_outer
            else:
                known = (contracted > 0) & (group < groups)
                a_row = group * M if DEPTH else a_first
                a_factor, b_factor = factors_of(a_scale, b_scale, group, a_row, m, n, rows, N, known, A_STEP, B_STEP)
            if SCALED and B_SQUARE:
                total, stage, phase = sums_of_series(
                    PART, stage, phase, steps, contracted, a_tiles, b_tiles, full, empty, a_at, b_at,
                    a_scale_segment, b_scale_segment, DEPTH, CLEAR, SERIES, STAGES,
                )  # fmt: skip
            else:
                total, stage, phase = sums_of_steps(
                    PART, stage, phase, steps, contracted, a_tiles, b_tiles, a_strips, b_strips, full, empty, a_at,
                    b_at, a_scale_segment, b_scale_segment, DEPTH, SCALED, CLEAR, STRIPS, STAGES,
                )  # fmt: skip
            if not SCALED and group < groups:
                total = scaled_sums(total, a_factor, b_factor, A_STEP, B_STEP)
            if BIAS and group < groups:
                added = gl.load(bias + own * N + n, mask=n < N, other=0.0)
                total += added.to(out.dtype.element_ty).to(gl.float32)[None, :]
            start = group.to(gl.int64) * M + first_m if DEPTH else (a_first + first_m).to(gl.int64)
            store_half(out, total, start, PART * _HALF, first_n, rows - first_m, N)
