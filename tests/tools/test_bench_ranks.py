"""The gates of suites ``gather`` and ``layer``: right results pass, and wrong ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from minifloat.comm.group import Group, ShardMap
from minifloat.operand import Quantized
from minifloat.quantizer import cast_all
from minifloat.tools.bench.expert_parallel import CONTENDERS, moe_steps
from minifloat.tools.bench.experts import SMALL
from minifloat.tools.bench.gate import check_step
from minifloat.tools.bench.ranks import (
    COLUMNS,
    GATHERED,
    LAYER_BOUNDS,
    MEBIBYTES,
    UNALIGNED,
    check_gathered,
    gathered,
    layer_steps,
    quantizer_of,
)
from tests.helpers.distributed_pool import on_ranks

# ---- gather ----


def test_unaligned_rows_straddle() -> None:
    """A rank's first row is inside of a block of each size, for any number of ranks that divides a row of the table."""
    for size in MEBIBYTES:
        for ranks in (2, 4, 8):
            rows = size * 2**20 // 2 // COLUMNS // ranks + UNALIGNED
            assert all(rank * rows % block for rank in range(1, ranks) for block in (16, 32, 128))


@pytest.mark.parametrize("both", [False, True])
@on_ranks(2)
def test_what_is_gathered_passes(rank: int, size: int, both: bool) -> None:
    """Of 40 + 5 rows a rank, each recipe."""
    group, rows = Group.of(dist.group.WORLD), 40 + UNALIGNED
    whole = torch.randn(size * rows, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    for recipe in GATHERED:
        quantizer = quantizer_of(recipe, "input").with_usage(rowwise=True, columnwise=both)
        got = gathered(whole.split(rows)[rank], quantizer, ShardMap.even(rows, size), group)
        wanted = cast_all([whole], [quantizer])[0]
        check_gathered(recipe, got, wanted)
        assert (wanted.columnwise is not None) == both or recipe == "current"


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """The last bit of the last element is another."""
    changed = tensor.clone().contiguous()
    changed.view(torch.uint8).view(-1)[-changed.itemsize] ^= 1
    return changed


@pytest.mark.parametrize("recipe", GATHERED)
def test_a_wrong_gather_is_refused(recipe: str) -> None:
    """One bit of a code or of a scale, in either orientation, or an orientation that is missing."""
    whole = torch.randn(2 * 45, 48)
    right = cast_all([whole], [quantizer_of(recipe, "input")])[0]
    check_gathered(recipe, right, right)
    for name, operand in right._asdict().items():
        for field, what in (("codes", "codes"), ("scale_inv", "scales")):
            wrong = right._replace(**{name: operand._replace(**{field: flipped(getattr(operand, field))})})
            with pytest.raises(AssertionError, match=f"{recipe}: {name} {what} of what was gathered"):
                check_gathered(recipe, wrong, right)
        with pytest.raises(AssertionError, match=f"the {name} operand is missing"):
            check_gathered(recipe, right._replace(**{name: None}), right)
    assert isinstance(right, Quantized)


# ---- layer ----

SHAPE = 64, 224, 4, 2
TOKENS = 128


@on_ranks(2)
def test_a_wrong_layer_is_refused(rank: int, size: int) -> None:
    """Steps of a small layer on CPUs pass; what is said of others."""
    found = layer_steps(Group.of(dist.group.WORLD), SHAPE, torch.device("cpu"), TOKENS)
    steps = {recipe: found[recipe] for recipe in ("bf16", "current")}
    assert found.keys() == LAYER_BOUNDS.keys() and steps["bf16"].error == 0 < steps["current"].error
    expected, right = ([each.detach() for each in one.call()] for one in steps.values())
    bounds = LAYER_BOUNDS["current"]
    check_step("current", right, expected, bounds)
    wrong: dict[str, list[Any]] = {}
    for number in range(2, len(right)):
        for what, factor in (("doubled", 2.0), ("dropped", 0.0)):
            wrong[f"{what} {number - 2}"] = [each * factor if i == number else each for i, each in enumerate(right)]
    for what, factor in (("+", 1.1), ("-", 0.9)):
        wrong[f"dX {what} 10 %"] = [each * factor if i == 1 else each for i, each in enumerate(right)]
    said = {}
    for what, results in wrong.items():
        with pytest.raises(AssertionError) as error:
            check_step("current", results, expected, bounds)
        said[what] = str(error.value)
    assert "current: the gradient of parameter 3, [" in said["doubled 3"] and len(said) == 2 * 6 + 2
    assert "current: dX is 0.1" in said["dX + 10 %"] and "current: dX is 0.1" in said["dX - 10 %"]


def test_a_dropped_bias_gradient_is_refused() -> None:
    """Which no quantized product makes: zeros where the sum of dY over the tokens belongs."""
    x, w, b = (torch.randn(*shape, requires_grad=True) for shape in ((32, 8), (16, 8), (16,)))
    y = torch.nn.functional.linear(x, w, b)
    right = [y.detach(), *torch.autograd.grad(y, [x, w, b], torch.randn_like(y))]
    assert check_step("right", right, right, LAYER_BOUNDS["bf16"]) == 0
    with pytest.raises(AssertionError, match=r"the gradient of parameter 1, \[16\], is 1.000 off"):
        check_step("wrong", [*right[:3], torch.zeros_like(b)], right, LAYER_BOUNDS["current"])


@on_ranks(2)
def test_experts_that_ranks_share_out_pass(rank: int, size: int) -> None:
    """Each contender at sizes for a CPU; tokens of the ranks differ."""
    steps = moe_steps(Group.of(dist.group.WORLD), torch.device("cpu"), SMALL)
    assert steps.keys() == CONTENDERS.keys() and steps["bf16"][1] == 0.0
    assert all(0.0 < error < 0.2 for _, error in list(steps.values())[1:])
