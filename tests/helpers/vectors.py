"""The worked vectors and tables of docs/numerics.md as plain data, the same for the oracle's tests and the package's.

Layout as in `oracle.py`: codes stay in [M, K] and NVFP4 codes are packed along the scaled dim. A NaN in `dequantized`
and a False in `given` mark what numerics.md leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

FLT_MAX = float(np.finfo(np.float32).max)
BF16_MAX = 3.3895313892515355e38
INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Vector:
    """One worked vector: `oracle.<function>(x, **kwargs)` gives codes, scales and, for NVFP4, the amax.

    x holds bfloat16 values.
    """

    name: str
    function: str
    kwargs: dict[str, Any]
    x: F32
    codes: U8
    scales: F32 | U8
    given: NDArray[np.bool_] | None = None
    """Which codes numerics.md states; None where it states all."""
    dequantized: F32 | None = None
    digits: int | None = None
    """Decimals to which numerics.md states `dequantized`; None where it states the float32."""
    amax: F32 | None = None


def bf16(values: Any) -> F32:
    """Values rounded to the nearest bfloat16, ties to even, as float32; finite values only."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return np.asarray((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000), np.uint32).view(np.float32)


def place(shape: tuple[int, int], runs: dict[tuple[int, int], Any]) -> F32:
    """Float32 zeros of `shape` with each run of values written along K from its position, rounded to bfloat16."""
    out = np.zeros(shape, np.float32)
    for (row, column), values in runs.items():
        out[row, column : column + len(values)] = bf16(values)
    return out


def hexes(shape: tuple[int, int], runs: dict[tuple[int, int], str]) -> U8:
    """Zero bytes of `shape` with each run of hex bytes written along K from its position."""
    out = np.zeros(shape, np.uint8)
    for (row, column), text in runs.items():
        data = np.frombuffer(bytes.fromhex(text), np.uint8)
        out[row, column : column + data.size] = data
    return out


def known(shape: tuple[int, int], runs: dict[tuple[int, int], list[float]]) -> F32:
    """NaN of `shape` but for each run of values written along K from its position."""
    out = np.full(shape, np.nan, np.float32)
    for (row, column), values in runs.items():
        out[row, column : column + len(values)] = values
    return out


def f32(values: Any) -> F32:
    """A float32 array."""
    return np.asarray(values, np.float32)


# ---- Section 6: FP8 with one scale a tensor ------------------------------------------------------------------------

PER_TENSOR_X = bf16([[-3, 0.10009765625, 1.703125, 0.0030059814, 2.25, -0.51171875, 0, 0.000100135803]])
PER_TENSOR = [
    Vector(
        "per_tensor_e4m3",
        "per_tensor_current",
        {"fmt": "e4m3"},
        PER_TENSOR_X,
        hexes((1, 8), {(0, 0): "FE 57 78 2E 7A EA 00 08"}),
        f32([0.00669642864]),
        dequantized=f32([[-3, 0.10044643, 1.7142857, 0.0029296875, 2.1428571, -0.53571427, 0, 0.0001046317]]),
    ),
    Vector(
        "per_tensor_e4m3_pow2",
        "per_tensor_current",
        {"fmt": "e4m3", "pow2": True},
        PER_TENSOR_X,
        hexes((1, 8), {(0, 0): "FC 55 76 2C 79 E8 00 07"}),
        f32([2.0**-7]),
    ),
    Vector(
        "per_tensor_e5m2",
        "per_tensor_current",
        {"fmt": "e5m2"},
        PER_TENSOR_X,
        hexes((1, 8), {(0, 0): "FB 67 78 53 79 F1 00 40"}),
        f32([5.23158487e-05]),
    ),
]


# ---- Section 6: FP8 in blocks --------------------------------------------------------------------------------------

BLOCK_1D_X = place((1, 256), {(0, 0): [3, -0.75, 0.1, 1], (0, 128): [500, -448, 0.01]})
BLOCK_2D_X = place((128, 256), {(0, 0): [0.5], (5, 7): [-1.25], (127, 127): [0.03], (3, 200): [300]})
BLOCK = [
    Vector(
        "block_1x128_pow2",
        "block_1d",
        {"fmt": "e4m3", "pow2": True, "eps": 0.0, "max_finite": BF16_MAX, "dim": -1},
        BLOCK_1D_X,
        hexes((1, 256), {(0, 0): "7C EC 55 70", (0, 128): "78 F6 03"}),
        f32([[2.0**-7, 2]]),
    ),
    Vector(
        "block_1x128_fp32",
        "block_1d",
        {"fmt": "e4m3", "pow2": False, "eps": 0.0, "max_finite": BF16_MAX, "dim": -1},
        BLOCK_1D_X,
        hexes((1, 256), {(0, 0): "7E EE 57 71", (0, 128): "7E FD 05"}),
        f32([[0.00669642864, 1.11607134]]),
    ),
    Vector(
        "block_128x128_pow2",
        "block_2d",
        {"fmt": "e4m3", "pow2": True, "eps": 0.0, "max_finite": BF16_MAX},
        BLOCK_2D_X,
        hexes((128, 256), {(0, 0): "70", (5, 7): "FA", (127, 127): "4F", (3, 200): "79"}),
        f32([[2.0**-8, 1]]),
    ),
    Vector(
        "block_128x128_fp32",
        "block_2d",
        {"fmt": "e4m3", "pow2": False, "eps": 0.0, "max_finite": BF16_MAX},
        BLOCK_2D_X,
        hexes((128, 256), {(0, 0): "73", (5, 7): "FE", (127, 127): "53", (3, 200): "7E"}),
        f32([[0.00279017864, 0.669642866]]),
    ),
]

# ---- Section 6: MXFP8 ----------------------------------------------------------------------------------------------

MX_COLUMNS_X = np.zeros((32, 32), np.float32)
MX_COLUMNS_X[:, 0] = np.arange(32) / 8
MX_COLUMNS_X[:, 1] = 5
MX_COLUMNS_GIVEN = np.ones((32, 32), np.bool_)
MX_COLUMNS_GIVEN[:, 0] = np.isin(np.arange(32), (1, 9, 31))


def _mx_columns(first: str, second: str) -> U8:
    """Codes of rows 1, 9 and 31 of column 0, and one code all down column 1."""
    codes = np.zeros((32, 32), np.uint8)
    codes[[1, 9, 31], 0] = np.frombuffer(bytes.fromhex(first), np.uint8)
    codes[:, 1] = int(second, 16)
    return codes


MXFP8 = [
    Vector(
        "mxfp8_rowwise",
        "mxfp8",
        {"fmt": "e4m3", "dim": -1},
        place((1, 32), {(0, 0): [3, -0.75, 0.1, 1, 2.9, -1.3]}),
        hexes((1, 32), {(0, 0): "7C EC 55 70 7C F2"}),
        hexes((1, 1), {(0, 0): "78"}),
        dequantized=place((1, 32), {(0, 0): [3, -0.75, 0.1015625, 1, 3, -1.25]}),
    ),
    Vector(
        "mxfp8_columnwise_e4m3",
        "mxfp8",
        {"fmt": "e4m3", "dim": 0},
        MX_COLUMNS_X,
        _mx_columns("50 69 78", "7A"),
        hexes((1, 32), {(0, 0): "79 79"}),
        given=MX_COLUMNS_GIVEN,
    ),
    Vector(
        "mxfp8_columnwise_e5m2",
        "mxfp8",
        {"fmt": "e5m2", "dim": 0},
        MX_COLUMNS_X,
        _mx_columns("64 70 78", "79"),
        hexes((1, 32), {(0, 0): "72 72"}),
        given=MX_COLUMNS_GIVEN,
    ),
    Vector(
        "mxfp8_rowwise_row31",
        "mxfp8",
        {"fmt": "e4m3", "dim": -1},
        MX_COLUMNS_X[31:],
        hexes((1, 32), {(0, 0): "78 7A"}),
        hexes((1, 1), {(0, 0): "79"}),
    ),
    Vector(
        "mxfp8_tile",
        "mxfp8",
        {"fmt": "e4m3", "dim": -1, "two_d": True},
        MX_COLUMNS_X,
        _mx_columns("50 69 78", "7A"),
        hexes((1, 1), {(0, 0): "79"}),
        given=MX_COLUMNS_GIVEN,
    ),
    Vector(
        "mxfp8_inf",
        "mxfp8",
        {"fmt": "e4m3", "dim": -1},
        f32([[INF, 1, 0] + [0] * 29]),
        hexes((1, 32), {(0, 0): "7F " * 32}),
        hexes((1, 1), {(0, 0): "FF"}),
    ),
    Vector(
        "mxfp8_nan",
        "mxfp8",
        {"fmt": "e4m3", "dim": -1},
        f32([[NAN, 1, 0] + [0] * 29]),
        hexes((1, 32), {(0, 0): "7F 78 00"}),
        hexes((1, 1), {(0, 0): "77"}),
    ),
]

# ---- Section 6: NVFP4 ----------------------------------------------------------------------------------------------

NV_BLOCK = [1, -2, 0.3, 4, -0.11, 3.1, 0, 2.2]
NV_SMALL = [0.02, -0.05, 0.013, 0.004]
RHT_COLUMN = f32([1, 2, 3, 4, -1, -2, -3, -4, 0.5, 0.25, 0, 0, 1, 1, 1, 1])
RHT_ROTATED = f32(
    [
        *[1.8125, -0.0625, -0.1875, -3.0625, -1.1875, 2.9375, 1.8125, -1.0625],
        *[3.1875, 1.0625, -0.8125, -1.9375, -1.8125, 2.0625, 3.1875, -1.9375],
    ]
)
RHT_E3 = f32([-0.25, 0.25, 0.25, -0.25] * 4)
FOUR_OVER_SIX_X = place((1, 32), {(0, 0): NV_BLOCK, (0, 16): [3, 2, 1, 0.5]})
FOUR_OVER_SIX_448_GIVEN = np.zeros((1, 16), np.bool_)


def _four_over_six(err_mode: str) -> list[Vector]:
    """The two 4-over-6 vectors; both error measures choose alike."""
    return [
        Vector(
            f"nvfp4_4over6_256_{err_mode}",
            "nvfp4",
            {"dim": -1, "four_over_six": err_mode, "e4m3_max": 256},
            FOUR_OVER_SIX_X,
            hexes((1, 16), {(0, 0): "C2 61 58 40", (0, 8): "67 24"}),
            hexes((1, 2), {(0, 0): "7C 74"}),
            dequantized=known((1, 32), {(0, 16): [3, 2, 1, 0.5]}),
            amax=f32([4]),
        ),
        Vector(
            f"nvfp4_4over6_448_{err_mode}",
            "nvfp4",
            {"dim": -1, "four_over_six": err_mode},
            FOUR_OVER_SIX_X,
            hexes((1, 16), {}),
            hexes((1, 2), {(0, 0): "7E 7A"}),
            given=FOUR_OVER_SIX_448_GIVEN,
            dequantized=known((1, 32), {(0, 16): [2.857, 1.905, 0.952, 0.476]}),
            digits=3,
            amax=f32([4]),
        ),
    ]


NVFP4 = [
    Vector(
        "nvfp4_rowwise",
        "nvfp4",
        {"dim": -1},
        place((1, 32), {(0, 0): NV_BLOCK, (0, 16): NV_SMALL}),
        hexes((1, 16), {(0, 0): "D3 71 68 50", (0, 8): "F4 13"}),
        hexes((1, 2), {(0, 0): "7E 4B"}),
        dequantized=known(
            (1, 32),
            {
                (0, 0): [1, -2, 0.33333334, 4, -0.0, 2.66666675, 0, 2],
                (0, 16): [0.01636905, -0.04910715, 0.01227679, 0.00409226],
            },
        ),
        digits=8,
        amax=f32([4]),
    ),
    *_four_over_six("MAE"),
    *_four_over_six("MSE"),
    Vector(
        "nvfp4_hadamard",
        "nvfp4",
        {"dim": 0, "hadamard": True},
        RHT_COLUMN[:, None],
        hexes((1, 8), {(0, 0): "85 F9 7C C5 47 EB 6D E7"}).T,
        hexes((1, 1), {(0, 0): "7E"}),
        amax=f32([3.1875]),
    ),
    Vector(
        "nvfp4_row_scaled",
        "nvfp4",
        {"dim": -1, "row_scaled": True},
        place((2, 16), {(0, 0): NV_BLOCK[:4], (1, 0): NV_SMALL}),
        hexes((2, 8), {(0, 0): "D3 71", (1, 0): "F4 13"}),
        hexes((2, 1), {(0, 0): "7E", (1, 0): "7E"}),
        amax=f32([4, 0.050048828]),
    ),
    Vector(
        "nvfp4_degenerate",
        "nvfp4",
        {"dim": -1},
        place((1, 48), {(0, 0): [6], (0, 32): [6.7e-6]}),
        hexes((1, 24), {(0, 0): "07", (0, 16): "07"}),
        hexes((1, 3), {(0, 0): "7E 00 00"}),
        dequantized=known((1, 48), {(0, 0): [6], (0, 16): [0] * 32}),
        amax=f32([6]),
    ),
    Vector(
        "nvfp4_zero",
        "nvfp4",
        {"dim": -1},
        np.zeros((1, 32), np.float32),
        hexes((1, 16), {}),
        hexes((1, 2), {}),
        dequantized=np.zeros((1, 32), np.float32),
        amax=f32([0]),
    ),
]

VECTORS = [*PER_TENSOR, *BLOCK, *MXFP8, *NVFP4]

NVFP4_ENCODE_SCALES: list[tuple[float, float]] = [(4, 672), (0.050048828, 53707.5508), (0, 1)]

STOCHASTIC_BYTES = np.array([0, 64, 128, 192, 255], np.uint8)
STOCHASTIC: list[tuple[float, list[float]]] = [
    (0.3, [0, 0, 0.5, 0.5, 0.5]),
    (1.6, [1.5, 1.5, 1.5, 1.5, 2]),
    (2.5, [2, 2, 3, 3, 3]),
    (5.2, [4, 4, 6, 6, 6]),
    (-3.4, [-3, -3, -3, -4, -4]),
]

# ---- Section 0.2: casts --------------------------------------------------------------------------------------------

CAST_FP8: dict[str, list[tuple[float, int]]] = {
    "e4m3": [
        (1.0, 0x38),
        (1.0625, 0x38),
        (1.1875, 0x3A),
        (448, 0x7E),
        (464, 0x7E),
        (1000, 0x7E),
        (INF, 0x7E),
        (NAN, 0x7F),
        (-0.0, 0x80),
        (2.0**-10, 0x00),
        (2.0**-9, 0x01),
        (1.5 * 2.0**-9, 0x02),
        (-3.3, 0xC5),
    ],
    "e5m2": [
        (1.0, 0x3C),
        (1.125, 0x3C),
        (1.375, 0x3E),
        (57344, 0x7B),
        (61440, 0x7B),
        (1e6, 0x7B),
        (INF, 0x7B),
        (NAN, 0x7F),
        (2.0**-17, 0x00),
        (1.5 * 2.0**-16, 0x02),
        (-3.3, 0xC3),
    ],
}

CAST_E2M1_TIES: list[tuple[float, int, int, int]] = [
    # a boundary, and the code just below it, at it and just above it
    (0.25, 0, 0, 1),
    (0.75, 1, 2, 2),
    (1.25, 2, 2, 3),
    (1.75, 3, 4, 4),
    (2.5, 4, 4, 5),
    (3.5, 5, 6, 6),
    (5, 6, 6, 7),
]
CAST_E2M1: list[tuple[float, int]] = [(-0.1, 8), (-0.0, 8), (INF, 7), (-INF, 15), (NAN, 7), (1000, 7), (-6, 15)]

FLOAT_TO_E8M0: list[tuple[float, int]] = [
    (0, 0),
    (NAN, 255),
    (INF, 255),
    (1, 127),
    (1.5, 128),
    (2, 128),
    (2.0**-127, 0),
    (2.0**-149, 0),
    (2.0**-127 + 2.0**-149, 1),
    (2.0**-126, 1),
    (2.0**127, 254),
    (FLT_MAX, 254),
]

# ---- Section 0.3: scale_from_amax ----------------------------------------------------------------------------------

SCALE_AMAXES: list[float] = [3, 448, 500, 0.001, 1e-40, 0, INF, NAN]
SCALES: list[tuple[float, bool, list[float]]] = [
    # largest of the format, power of two, scale for each of SCALE_AMAXES
    (448, False, [149.333328, 1, 0.896000028, 447999.969, 3.40282347e38, 1, NAN, NAN]),
    (448, True, [128, 1, 0.5, 262144, 2.0**127, 1, NAN, NAN]),
    (57344, False, [19114.666, 128, 114.688004, 57343996, 3.40282347e38, 1, NAN, NAN]),
    (57344, True, [16384, 128, 64, 33554432, 2.0**127, 1, NAN, NAN]),
]

# ---- Section 1.4: edges --------------------------------------------------------------------------------------------

MXFP8_EDGES: list[tuple[float, int]] = [(3, 120), (448, 127), (449, 128), (1, 119), (0, 0), (1e-38, 0), (INF, 255)]
"""Block amax and its E8M0 scale in E4M3, as float32 inputs."""

# ---- Philox4x32-10, the known answers of Random123 -----------------------------------------------------------------

PHILOX: list[tuple[list[int], list[int], list[int]]] = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
