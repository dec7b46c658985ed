"""A default device is where new modules are; what runs elsewhere, its tables too, takes the device of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat import autocast, backends
from minifloat.formats import COLUMNWISE, ROWWISE, parse
from tests.helpers.compare import assert_same_bits

pytest.importorskip("triton")

from minifloat.ops import launch
from minifloat.ops.grouped import casts, products, spread
from tests.helpers import triton_interpreter  # noqa: F401
from tests.helpers.sample import each_once

COUNTS = torch.tensor([3, 0, 4], dtype=torch.int32)


class Rotated(nn.Module):
    """Attention with rotary embeddings and a sliding window."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = minifloat.RotaryPositionEmbedding(16)
        self.attention = minifloat.MultiheadAttention(32, 2, attn_mask_type="causal", window_size=(4, 0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x[:, None], rotary_pos_emb=self.rope(len(x)))
        return y


MAKE: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: minifloat.Linear(32, 48),
    "LayerNormMLP": lambda: minifloat.LayerNormMLP(32, 48, activation="swiglu"),
    "GroupedLinear": lambda: minifloat.GroupedLinear(3, 32, 48),
    "MoE": lambda: minifloat.MoE(32, 48, 3, 2, aux_loss_coefficient=0.1),
    "attention": Rotated,
}


def results(module: nn.Module, recipe: str, *inputs: Any) -> list[Tensor]:
    """Output, gradients and buffers of two steps of SGD, and an evaluation."""
    torch.manual_seed(0)
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.1), []  # AdamW makes steps on the default device
    for _ in range(2):
        with autocast(recipe=recipe):
            y = module(*inputs)
        y.square().sum().backward()
        found += [y.detach(), *[p.grad for p in module.parameters() if p.grad is not None]]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), autocast(recipe=recipe):
        found.append(module(*inputs))
    return [*found, *[each.detach().clone() for each in module.state_dict().values()]]


@each_once
@pytest.mark.parametrize("recipe", ["delayed", "block", "mxfp8", "nvfp4", "w4a8"])
@pytest.mark.parametrize("name", MAKE)
def test_results_do_not_depend_on_the_default_device(name: str, recipe: str, device: torch.device) -> None:
    found = []
    for default in (device, torch.device("meta")):
        torch.manual_seed(0)
        module, x = MAKE[name]().to(device), torch.randn(7, 32, device=device)
        with default:
            found.append(results(module, recipe, x, *[COUNTS] * (name == "GroupedLinear")))
    for mine, wanted in zip(*found, strict=True):
        assert_same_bits(mine, wanted)


def test_wrong_counts_of_a_list_are_found_whatever_the_default_device() -> None:
    experts = minifloat.GroupedLinear(2, 32, 48)
    with torch.device("meta"), pytest.raises(ValueError, match=r"m_splits \[4, 9\] must not .* with 7 rows"):
        experts(torch.randn(7, 32, device="cpu"), [4, 9])


@pytest.mark.parametrize(
    "spec", ["identity", "e4m3/tensor/fp32", "e4m3/1x128/pow2", "e4m3/1x32/e8m0", "e2m1/1x32/e8m0"]
)
def test_kernels_of_groups(spec: str, device: torch.device) -> None:
    """Casts, values, sums and products with the tables that they compute; and a list of matrices' table."""
    torch.manual_seed(0)
    offsets, weights = (
        torch.tensor([0, 5, 5, 18], device=device).int(),
        torch.tensor([0, 20, 40, 60], device=device).int(),
    )
    x, dy, w = (torch.randn(shape, device=device).bfloat16() for shape in ((21, 160), (21, 20), (60, 160)))

    def results() -> list[Tensor]:
        found = [products.add_rows(x, offsets)]
        for gemm, (a, b), dims, size in (
            ("fprop", ((x, offsets), (w, weights)), (ROWWISE, ROWWISE), (21, 20)),
            ("wgrad", ((dy, offsets), (x, offsets)), (COLUMNWISE, COLUMNWISE), (20, 160)),
        ):
            sides: list[Any] = []
            for (matrix, of), dim in zip((a, b), dims, strict=True):
                if spec == "identity":
                    sides += matrix, None, None, spec, ROWWISE, of
                    continue
                level = casts.amax(matrix, of, [spec], [dim])[0] if parse(spec).needs_amax else None
                order = [backends.k_major(parse(spec))]
                codes, scales, _ = casts.cast(matrix, of, [level], None, [spec], [dim], order)
                found.append(spread.dequantize(codes, scales, None, of, spec, dim, *matrix.shape, torch.float32))
                sides += codes, scales, None, spec, dim, of
            found.append(products.multiply(gemm, *sides, *size, torch.float32, None, False))
        return found

    wanted = results()
    with torch.device("meta"):
        found = results()
        (_, begins), *_ = launch.in_table([(x, x)], [])[0]
    assert begins.device.type == device.type and begins.tolist() == [0, 0]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
