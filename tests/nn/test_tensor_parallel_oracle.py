"""The oracle of tensor parallelism: one rank is the module, exact numbers are autograd's, two ranks by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat.nn import LayerNormLinear, LayerNormMLP, Linear
from minifloat.operand import Quantized
from minifloat.ops.quantize import draw_seed
from minifloat.quantizer import cast_all
from minifloat.recipe import Recipe, named
from tests.helpers import tensor_parallel_oracle as oracle
from tests.helpers.distributed_pool import Pools
from tests.helpers.fused_model import assert_same, fill, run
from tests.helpers.recipes import FUSED_RECIPES, SOME_LINEAR, batch_scales, for_each
from tests.helpers.sample import each_once, each_pair
from tests.helpers.tensor_parallel_oracle import Group, in_rank_order, order_bound, unshard

pytestmark = pytest.mark.usefixtures("one_thread")  # as the ranks have

BF16, FP32 = torch.bfloat16, torch.float32
BOTH = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence parallel"])
MODES = pytest.mark.parametrize("mode", ["column", "row"])


def modules() -> dict[str, nn.Module]:
    """Of 24 columns in and 24 out; the parameters are filled."""
    made = {
        "layernorm_linear": LayerNormLinear(24, 24, params_dtype=BF16),
        "layernorm_mlp": LayerNormMLP(24, 40, activation="gelu"),
        "layernorm_mlp gated": LayerNormMLP(24, 36, bias=False, normalization="RMSNorm", activation="swiglu"),
    }
    for module in made.values():
        fill(module)
    return made


def state(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items() if "_scaling." in key}


def oracle_state(model: oracle.Module) -> dict[str, Tensor]:
    linears = {"": model} if isinstance(model, oracle.Linear) else {f"{k}.": v for k, v in model.linears.items()}
    return {
        f"{name}{side}_scaling.{key}": getattr(history, key)
        for name, linear in linears.items()
        for side, history in zip(("forward", "backward"), linear.histories, strict=False)
        for key in ("scale", "amax_history")
    }


# ---- One rank is the ordinary module --------------------------------------------------------------------------------


def assert_one_rank(module: nn.Module, recipe: Recipe | None, dtype: torch.dtype, sequence: bool, mode: Any) -> None:
    model = oracle.of(module, Group(1, sequence), recipe, mode)
    for scale in batch_scales(recipe) if recipe is not None else (1.0,):
        x, dy = (torch.randn(19, 24).mul(scale).to(dtype) for _ in range(2))
        (expected,) = oracle.step(model, [x], [dy])
        assert_same(run(module, x, dy, recipe), expected)
        assert all(p.grad.dtype == expected[name].dtype for name, p in module.named_parameters())  # type: ignore[union-attr]
        assert_same(state(module), oracle_state(model))


@each_once
@for_each(SOME_LINEAR | {"none": None})  # type: ignore[dict-item]
@pytest.mark.parametrize(("mode", "sequence_parallel"), [("column", True), ("row", False)])
def test_one_rank_is_a_linear(mode: Any, sequence_parallel: bool, recipe: Recipe | None) -> None:
    module = Linear(24, 24)
    fill(module)
    assert_one_rank(module, recipe, BF16 if recipe is not None else FP32, sequence_parallel, mode)


@each_once
@for_each(FUSED_RECIPES | {"none": None})  # type: ignore[dict-item]
@pytest.mark.parametrize("kind", modules())
def test_one_rank_is_a_fused_module(kind: str, recipe: Recipe | None) -> None:
    module = modules()[kind]
    if recipe is None:
        module = module.float()
    assert_one_rank(module, recipe, BF16 if recipe is not None else FP32, kind != "layernorm_mlp", "column")


# ---- Exact numbers --------------------------------------------------------------------------------------------------


def by_mode(xs: Tensor, split: bool, size: int, rows: Sequence[int] | None) -> list[Tensor]:
    """The columns of each rank, its rows, or all."""
    if split:
        return list(xs.chunk(size, 1))
    return [xs] * size if rows is None else list(xs.split(list(rows)))


def whole(xs: Sequence[Tensor], rows: Sequence[int] | None) -> Tensor:
    """The rows of all ranks, whose numbers must be those, or what all of them have."""
    if rows is None:
        return same(xs)
    assert [len(x) for x in xs] == list(rows)
    return torch.cat(list(xs))


def same(xs: Sequence[Tensor]) -> Tensor:
    assert all(torch.equal(x, xs[0]) for x in xs)
    return xs[0]


@each_pair
@BOTH
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", modules())
def test_a_fused_module_is_the_unsharded_one_in_fp32(kind: str, size: int, sequence_parallel: bool) -> None:
    module = modules()[kind].float()
    x, dy = torch.randn(11, 24), torch.randn(11, 24)
    expected = run(module, x, dy, None)
    rows = {2: [5, 6], 4: [0, 4, 1, 6]}[size] if sequence_parallel else None
    model = oracle.of(module, Group(size, sequence_parallel), None)
    mlp = isinstance(model, oracle.LayerNormMLP)
    dys = by_mode(dy, not mlp, size, rows)
    found = oracle.step(model, by_mode(x, False, size, rows), dys)
    together = {"y": whole([r["y"] for r in found], rows) if mlp else torch.cat([r["y"] for r in found], 1)}
    together["x"] = whole([r["x"] for r in found], rows)
    for name in found[0].keys() - {"x", "y"}:
        shards = [r[name] for r in found]
        if "norm" in name or name == "fc2.bias":
            together[name] = same(shards)
        else:
            parts = [36, 36] if "gated" in kind and "fc1" in name else None
            together[name] = unshard(shards, int(name == "fc2.weight"), parts)
    assert together.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(together[name], value, rtol=1e-5, atol=2e-5)


# ---- Two ranks by hand ----------------------------------------------------------------------------------------------


def test_two_ranks_by_hand() -> None:
    """Current scaling, column-parallel: X has the scale of the whole, W and dY of each shard.

    E4M3 holds 1 and 1.125 but not 1.0625, which goes to the even 1; it holds 448 = 7 * 64. E5M2 holds 1.25 and 1.5
    but not 1.375, which goes to the even 1.5; its largest number is 57344.
    """
    x = [torch.tensor([[448.0, 0.0]]), torch.tensor([[1.0625, 2.0]])]  # scale 1: 1.0625 becomes 1
    w = torch.tensor([[448.0, 1.0625], [224.0, 1.0625]])  # scales 1 and 2: 1.0625 becomes 1, 2.125 becomes 2, as 1
    dy = [torch.tensor([[57344.0], [1.375]]), torch.tensor([[28672.0], [1.375]])]  # scales 1 and 2: 1.5, 2.75 is 3
    model = oracle.Linear(w, None, "column", Group(2, True), named("current"))
    ys = model.forward(x)
    assert ys[0].tolist() == [[448.0 * 448], [448.0 + 2]]
    assert ys[1].tolist() == [[448.0 * 224], [224.0 + 2]]
    operand = model.gathered["input"].rowwise
    assert operand is not None and operand.scale_inv is not None
    assert operand.scale_inv.tolist() == [1.0] and operand.dequantize().tolist() == [[448.0, 0.0], [1.0, 2.0]]
    dxs = model.backward(dy)
    first, second = 57344.0 * 448 + 28672.0 * 224, 57344.0 + 28672.0
    assert [dx.tolist() for dx in dxs] == [[[first, second]], [[1.5 * 448 + 1.5 * 224, 3.0]]]
    assert model.grads[0]["weight"].tolist() == [[25690114.0, 3.0]]  # 57344 * 448 + 1.5 in fp32, in steps of 2 there
    assert model.grads[1]["weight"].tolist() == [[12845058.0, 3.0]]  # 28672 * 448 + 1.5, in steps of 1: the even one


def test_two_ranks_by_hand_in_rows() -> None:
    """Current scaling, row-parallel in bf16: parts are rounded, then added; the bias comes after the sum."""
    x = [torch.tensor([[256.0, 1.0]]).bfloat16(), torch.tensor([[0.0, 1.0]]).bfloat16()]
    w = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    for sequence_parallel in (False, True):
        xs = [x_.expand(2, 2) for x_ in x] if sequence_parallel else x
        model = oracle.Linear(w, torch.tensor([3.0]), "row", Group(2, sequence_parallel), None)
        ys = model.forward(xs)
        # 256 + 1 is 256 in bf16, as is 256 + 1 of the other rank; 256 + 3 is half way between 258 and 260: 260.
        # In one sum 256 + 1 + 1 + 3 = 261 would have been half way between 260 and 262: 260 too, and without bias 258.
        assert [y.tolist() for y in ys] == [[[260.0]]] * 2
        unbiased = oracle.Linear(w, None, "row", Group(2, sequence_parallel), None).forward(xs)
        assert [y.tolist() for y in unbiased] == [[[256.0]]] * 2
        dy = [torch.tensor([[1.0]]).bfloat16(), torch.tensor([[2.0 if sequence_parallel else 1.0]]).bfloat16()]
        dxs = model.backward(dy)
        column = [[1.0], [2.0]] if sequence_parallel else [[1.0]]
        assert dxs[0].tolist() == [[g, g] for (g,) in column]
        assert dxs[1].tolist() == [[0.0, g] for (g,) in column]
        assert [grads["bias"].tolist() for grads in model.grads] == [[3.0 if sequence_parallel else 1.0]] * 2
        assert model.grads[0]["weight"].tolist() == [[768.0, 3.0] if sequence_parallel else [256.0, 1.0]]


# ---- What is gathered, drawn and kept -------------------------------------------------------------------------------


def assert_same_operands(found: Quantized, expected: Quantized) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a is not None and b is not None and a.layout == b.layout
        for mine, theirs in zip(a.tensors, b.tensors, strict=True):
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)  # type: ignore[arg-type]


@each_once
@for_each(SOME_LINEAR)
@MODES
def test_gathered_operands_are_those_of_the_whole(mode: Any, recipe: Recipe) -> None:
    """Rows 3 and 16, of which the second alone would fill blocks of 16."""
    x, dy, w = torch.randn(19, 32).bfloat16(), torch.randn(19, 32).bfloat16(), torch.randn(32, 32)
    model = oracle.Linear(w, None, mode, Group(2, True), recipe)
    seeds = [draw_seed(x)] * 2
    model.rngs = {"input": seeds, "grad_output": seeds}
    kind, gathered = ("input", x) if mode == "column" else ("grad_output", dy)
    model.forward(by_mode(x, mode == "row", 2, [3, 16]), [3, 16])
    model.backward(by_mode(dy, mode == "column", 2, [3, 16]))
    assert model.gathered.keys() <= {kind}
    if model.gathered:
        quantizer = getattr(model.plan, kind)
        scale = torch.ones(1)  # delayed scaling's first
        assert_same_operands(
            model.gathered[kind], cast_all([gathered], [quantizer], None, [seeds[0]], scales=[scale])[0]
        )


# ---- Sums -----------------------------------------------------------------------------------------------------------


def reduced(rank: int, world_size: int, parts: list[Tensor]) -> Tensor:
    total = parts[rank].clone()
    dist.all_reduce(total)
    return total


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_a_backend(size: int, dtype: torch.dtype, worker_pool: Pools) -> None:
    """Two ranks: the bits of gloo. Three: any order, so within the bound, which is not far from what happens."""
    parts = [(torch.randn(513) * 10 ** torch.randn(513)).to(dtype) for _ in range(size)]
    found = same(worker_pool(size).run(reduced, parts))
    error = (found.double() - in_rank_order(parts).double()).abs()
    assert (error <= order_bound(parts)).all()
    assert (order_bound(parts) > 0).all() == (size > 2)
    backwards = in_rank_order(parts[::-1])
    difference = (backwards.double() - in_rank_order(parts).double()).abs()
    assert (difference <= order_bound(parts)).all() and bool(difference.any()) == (size > 2)
