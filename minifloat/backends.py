"""Table of backends, what runs where and why: operations consult it, ``minifloat doctor`` prints it, tests run it.

Every operation runs on every device: where nothing faster is known to give the same numerics, its reference does.
Backends of the scaled product: ``native`` is a library's, ``emulated`` a bf16 product of operands written out without
error, ``reference`` plain PyTorch with exact sums.
"""

from __future__ import annotations

import importlib.util
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from minifloat.formats import Format

Support = tuple[bool, str]


class Row(NamedTuple):
    """Line of the table: which backend runs ``operation`` on ``formats``, and the reason."""

    operation: str
    formats: str
    backend: str
    reason: str


PAIRS: list[tuple[str, Format, Format]] = []
"""``Recipe.pairs`` of all recipes that have a name."""


@cache
def _device_facts(device: torch.device) -> tuple[tuple[int, int], tuple[int, int]]:
    """Compute capability and CUDA version, ((0, 0), (0, 0)) off NVIDIA GPUs."""
    if device.type != "cuda" or torch.version.cuda is None:
        return (0, 0), (0, 0)
    major, minor = torch.version.cuda.split(".")[:2]
    return torch.cuda.get_device_capability(device), (int(major), int(minor))


def _per_tensor(a: Format, b: Format, device: torch.device) -> Support:
    if device.type == "cpu":
        return True, "torch.matmul in fp64, whose sums of E4M3 products are exact"
    capability, _ = _device_facts(device)
    if "e5m2" == a.element == b.element:
        return False, "cuBLASLt has no E5M2 by E5M2 product"
    if a.amax_per_row or b.amax_per_row:
        if not (a.amax_per_row and b.amax_per_row and a.element == b.element == "e4m3"):
            return False, "no library multiplies scales of rows by one scale, or by E5M2"
        if capability >= (9, 0):
            return True, f"torch._scaled_mm (scales of rows, FP8 tensor cores of sm_{capability[0]}{capability[1]})"
        return False, _lacks(device, "FP8 product with scales of rows (sm_90 and later)")
    if capability >= (8, 9):
        return True, f"torch._scaled_mm (cuBLASLt, FP8 tensor cores of sm_{capability[0]}{capability[1]})"
    return False, _lacks(device, "FP8 tensor cores (sm_89 and later)")


def _block128(a: Format, b: Format, device: torch.device) -> Support:
    capability, cuda = _device_facts(device)
    if a.tile and b.tile:
        return False, "no library multiplies 128x128 by 128x128 blocks"
    if "e5m2" in (a.element, b.element):
        return False, "cuBLASLt's block scaling takes E4M3 only here"
    if capability[0] == 9 and cuda >= (12, 9):
        return True, "torch.nn.functional.scaled_mm (cuBLASLt block scaling, sm_90, CUDA 12.9 and later)"
    if capability[0] >= 10:
        return False, "sm_100 and later multiply blocks whose scales are powers of two, as MXFP8"
    return False, _lacks(device, "cuBLASLt's 128-block scaling (sm_90, CUDA 12.9)")


def swizzled(a: Format, b: Format, device: torch.device) -> Support:
    """Whether cuBLASLt multiplies these as MXFP8 or NVFP4, as ``ops/matmul/native.py`` writes them, and why."""
    capability, cuda = _device_facts(device)
    if capability[0] < 10 or cuda < (12, 8):
        return False, _lacks(device, "cuBLASLt's MXFP8 and NVFP4 (sm_100 and later, CUDA 12.8)")
    name = f"cuBLASLt, sm_{capability[0]}{capability[1]}; not tested on such a GPU"
    if a.scale_rule == b.scale_rule == "two_level" and a.block == b.block == 16:
        return True, f"torch.nn.functional.scaled_mm (NVFP4, {name})"
    if not (_is_mx(a) and _is_mx(b)):
        return False, _lacks(device, "product of these formats in a library that we call")
    if "e5m2" == a.element == b.element:
        return False, "cuBLASLt has no E5M2 by E5M2 product"
    return True, f"torch.nn.functional.scaled_mm (MXFP8, {name})"


def _is_mx(fmt: Format) -> bool:
    """Whether it is, without rounding, E4M3 or E5M2 in strips of 32 under E8M0 scales."""
    return fmt.element in _MX_ELEMENTS and fmt.scale_rule in ("e8m0", "pow2") and fmt.block >= 32


_MX_ELEMENTS = frozenset({"e4m3", "e5m2", "e2m1", "e2m3", "e3m2"})
"""Each of whose values is one of E4M3 or E5M2."""


def is_mxfp4(fmt: Format) -> bool:
    """Whether it is E2M1 with a power of two for each 32, of which ``fold`` of ``ops/matmul`` makes FP8 in tiles."""
    return fmt.element == "e2m1" and fmt.block == 32 and fmt.scale_rule == "e8m0"


def folds(a: Format, b: Format) -> bool:
    """Whether they are FP8 in strips of 128 by MXFP4, which without rounding is FP8 in tiles of 128 x 128."""
    return a.block == 128 and a.element == "e4m3" and not a.tile and a.scale_rule in ("fp32", "pow2") and is_mxfp4(b)


def _folded(a: Format, b: Format, device: torch.device) -> Support:
    native, reason = _block128(a, a, device)  # of strips
    if not native:
        return native, reason
    ours, why = kernels(device.index or 0)
    return (True, f"MXFP4 as FP8 in 128x128 tiles, exactly; {reason}") if ours else (False, why)


def _lacks(device: torch.device, needed: str) -> str:
    (major, minor), _ = _device_facts(device)
    return f"{f'sm_{major}{minor}' if device.type == 'cuda' else device.type} has no {needed}"


def supports(a: Format, b: Format, device: torch.device) -> Support:
    """Whether the native scaled matmul multiplies these operands on ``device``, and why or why not."""
    converts = a.encoding.dtype is not None and b.encoding.dtype is not None
    if converts and a.block == b.block == 0 and a.quantized and b.quantized:
        return _per_tensor(a, b, device)
    if (native := swizzled(a, b, device))[0]:
        return native
    if converts and a.block == b.block == 128 and {a.scale_rule, b.scale_rule} <= {"fp32", "pow2"}:
        return _block128(a, b, device)
    if folds(a, b):
        return _folded(a, b, device)
    return False, _lacks(device, "product of these formats in a library that we call")


def emulates(a: Format, b: Format, device: torch.device) -> Support:
    """Whether bf16 tensor cores multiply these operands on ``device`` with exact products, and why or why not.

    Not on a CPU, where the reference stays: its results are the definition, to the bit.
    """
    if any(fmt.block and fmt.scale_rule != "two_level" and not fmt.scaling.power_of_two for fmt in (a, b)):
        return False, "block scales that are no powers of two do not fit bf16"
    if _device_facts(device)[0] >= (8, 0):
        return True, "written out as bf16, without error, for tensor cores that sum in fp32"
    return False, _lacks(device, "bf16 tensor cores (NVIDIA sm_80 and later)")


@lru_cache(1024)  # pairs of formats, which may have a new number at each step
def choose(a: Format, b: Format, device: torch.device) -> tuple[str, str]:
    """Chooses what multiplies these operands, and says why: ``"native"``, else ``"emulated"``, else ``"reference"``."""
    native, reason = supports(a, b, device)
    if native:
        return "native", reason
    emulated, manner = emulates(a, b, device)
    if emulated:
        return "emulated", f"{reason}: {manner}"
    why = f"{reason}; {manner}" if device.type == "cuda" else reason
    return "reference", f"{why}: same numerics, sums in float64"


@cache
def kernels(device: int) -> Support:
    """Whether our own Triton kernels run on this CUDA device, and why or why not."""
    facts, _ = _device_facts(torch.device("cuda", device))
    if facts < (8, 9):
        return False, _lacks(torch.device("cuda", device), "FP8 conversions (NVIDIA sm_89 and later)")
    if importlib.util.find_spec("triton") is None:
        return False, "Triton is not installed: pip install 'triton>=3.6'"
    return True, f"Triton kernels, sm_{facts[0]}{facts[1]}"


@cache
def cublaslt(device: int) -> bool:
    """Whether cuBLASLt itself adds FP8 products to fp32 memory, see D21; that has run on sm_90 alone."""
    return _device_facts(torch.device("cuda", device))[0][0] == 9


# What assume_constant_result does: compiled code asks once, and does not look for Triton itself.
kernels.__wrapped__._dynamo_marked_constant = True  # type: ignore[attr-defined]


def k_major(fmt: Format) -> bool:
    """Whether CUDA's product of ``fmt`` wants the contracted dim consecutive: dgrad and wgrad read transposed copies.

    So the FP8 tensor cores of sm_89 and sm_90 want it. A CPU takes any strides, and the emulated product writes its
    operands out anyway.
    """
    return fmt.encoding.dtype is not None and fmt.block in (0, 128)


def backend(a: Format, b: Format, device: torch.device) -> str:
    """Names what multiplies these operands: ``"native"``, ``"emulated"`` or ``"reference"``."""
    return choose(a, b, device)[0]


def table(device: torch.device) -> list[Row]:
    """Lists the whole table for a device."""
    rows = [Row("scaled product", name, *choose(a, b, device)) for name, a, b in PAIRS]
    runs, reason = kernels(device.index or 0) if device.type == "cuda" else (False, f"{device.type}: plain PyTorch")
    for operation in ("amax, cast, dequantize", "norm, activation"):
        rows.append(Row(operation, "all", "triton" if runs else "reference", reason))
    return rows
