"""Stochastic casts of some rows of a larger tensor draw the bits that those rows draw in the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops.quantize import empty_cast, reference

pytest.importorskip("triton")

import tests.helpers.triton_interpreter  # noqa: F401  (launches run in the interpreter where there is no GPU)
from minifloat.ops.launch import count_launches
from minifloat.ops.quantize import gpu, nvfp4
from minifloat.ops.quantize.job import CastJob, CastTarget, groups
from tests.helpers.kernel_casts import NV_ROTATED_STOCHASTIC as ROTATED
from tests.helpers.kernel_casts import NV_STOCHASTIC as STOCHASTIC
from tests.helpers.kernel_casts import SEED
from tests.helpers.triton_compile import compile_for


def job_for(x: Tensor, rng: Tensor, row: Format | None, column: Format | None, whole: Tensor) -> CastJob:
    """Casts of ``x``, whose amaxes are those of ``whole``."""

    def target(fmt: Format, dim: int) -> CastTarget:
        level = reference.amax(whole, fmt, dim)
        return CastTarget(fmt, dim, level, *empty_cast(x, fmt, dim, False), x.new_empty(0, dtype=torch.float32), False)

    return CastJob(x, rng, row and target(row, ROWWISE), column and target(column, COLUMNWISE))


@pytest.mark.parametrize("cols", [32, 33])
@pytest.mark.parametrize(
    ("row", "column"), [(STOCHASTIC, ROTATED), (STOCHASTIC, STOCHASTIC), (replace(STOCHASTIC, tile=True), None)]
)
def test_kernels_draw_the_same(row: Format, column: Format | None, cols: int, device: torch.device) -> None:
    whole = torch.randn(48, cols, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    seed = torch.tensor(SEED, device=device)
    jobs = [job_for(whole, seed, row, column, whole)]
    for first in (0, 32):
        rng = torch.cat([seed, torch.full_like(seed[:1], first)])
        jobs.append(job_for(whole[first : first + 16].contiguous(), rng, row, column, whole))
    assert len(list(groups(jobs))) == 2, "those with a first row are launched apart"
    with count_launches() as launches:
        gpu.launch(jobs, None)
    assert sum(launches.values()) == 2
    for target in jobs[0].targets:
        expected = reference.cast(whole, target.level, seed, target.format, target.dim)
        assert torch.equal(target.codes, expected.codes) and torch.equal(target.scale_inv, expected.scale_inv)
    for job, first in zip(jobs[1:], (0, 32), strict=True):
        for part, target in zip(job.targets, jobs[0].targets, strict=True):
            share = target.codes.shape[0] // 3
            begin = first // 16 * share
            assert torch.equal(part.codes, target.codes[begin : begin + share]), (target.format.spec, target.dim, first)


def test_first_rows_beyond_32_bits(device: torch.device) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    rng = torch.tensor([*SEED, 2**35 + 16], device=device)
    job = job_for(x, rng, STOCHASTIC, ROTATED, x)
    gpu.launch([job], None)
    for target in job.targets:
        expected = reference.cast(x, target.level, rng, target.format, target.dim)
        assert torch.equal(target.codes, expected.codes)


@pytest.mark.parametrize("aligned", [True, False])
def test_compiles_for_a_gpu(aligned: bool) -> None:
    byte, fp32 = (torch.uint8,), (torch.float32,)
    outputs = (fp32, byte, byte, fp32, byte, byte)
    constants = (1, STOCHASTIC, ROTATED, True, False, True, aligned, 128)
    compiled = compile_for(
        nvfp4.cast_nvfp4_kernel, (torch.bfloat16,), (torch.int64,), *outputs, torch.float32, (7,), (7,), (7,),
        *constants, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    assert compiled.spills == 0
