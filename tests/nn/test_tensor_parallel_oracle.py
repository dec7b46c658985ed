"""The oracle of tensor parallelism: one rank is the module, exact numbers are autograd's, two ranks by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from minifloat.nn import LayerNormLinear, LayerNormMLP
from minifloat.recipe import named
from tests.helpers import tensor_parallel_oracle as oracle
from tests.helpers.fused_model import fill, run
from tests.helpers.sample import each_pair
from tests.helpers.tensor_parallel_oracle import Group, unshard

pytestmark = pytest.mark.usefixtures("one_thread")  # as the ranks have

BF16, FP32 = torch.bfloat16, torch.float32
BOTH = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence parallel"])


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
