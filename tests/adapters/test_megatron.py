"""Megatron-core's MLP with our linears, beside its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from minifloat import Linear
from minifloat.functional import count_gemms
from tests.helpers.distributed_pool import Pools

pytest.importorskip("megatron.core")


def submodules(spec: Any) -> Any:
    """Submodules of a ``ModuleSpec``, or of the partial call that newer versions of Megatron-core have in its place."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def run(recipe: str | None, sequence_parallel: bool, x: Tensor, dy: Tensor) -> tuple[list[Tensor], int]:
    """Y, dX, gradients of the parameters, and how many products were ours."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    from minifloat.adapters.megatron import quantized

    group = dist.group.WORLD
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128, use_cpu_initialization=True,
        tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=sequence_parallel, hidden_dropout=0.0,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    spec = spec if recipe is None else quantized(spec, recipe)
    torch.manual_seed(0)
    mlp = MLP(config, submodules(spec.submodules.mlp), tp_group=group)
    x = x.clone().requires_grad_()
    with count_gemms() as gemms, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")  # where Megatron makes its buffers
        y, bias = mlp(x)
        (y + bias).backward(dy)
    assert sorted(mlp.state_dict()) == sorted(
        f"linear_fc{i}.{name}" for i in (1, 2) for name in ("weight", "bias", "_extra_state")
    )
    qkv = type(mlp.linear_fc1)(
        64, 96, config=config, init_method=torch.nn.init.normal_, bias=True, skip_bias_add=False, tp_group=group
    )
    torch.nn.init.constant_(qkv.bias, 64.0)
    z = qkv(x.detach())[0].detach()
    return [y.detach(), x.grad, z, *(p.grad for p in mlp.parameters())], gemms.total()  # type: ignore[list-item]


def compare(rank: int, size: int, sequence_parallel: bool) -> list[float]:
    """Errors beside Megatron's, which has all rows on each rank: its sequence parallelism needs a GPU."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(32, 2, 64, generator=generator) for _ in range(2))
    wanted, none = run(None, False, x, dy)
    rows = slice(16 * rank, 16 * rank + 16) if sequence_parallel else slice(None)
    wanted[:2] = [each[rows] for each in wanted[:2]]
    errors = []
    for recipe in ("none", "mxfp8"):
        found, products = run(recipe, sequence_parallel, x[rows], dy[rows])
        assert none == 0 and (recipe == "none" or products == 6)
        pairs = list(zip(found, wanted, strict=True))
        del pairs[-1:]  # db of the second, whose sum over ranks is Megatron's
        errors.append(max(((a - b).norm() / b.norm()).item() for a, b in pairs))
    return errors


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_mlp_of_two_ranks(worker_pool: Pools, sequence_parallel: bool) -> None:
    for exact, rounded in worker_pool(2).run(compare, sequence_parallel):
        assert exact < 1e-5 and 1e-3 < rounded < 0.1


def replaced(rank: int, size: int) -> list[bool]:
    """Whether a layer that computed with one weight computes with the next, and gives that one the gradient."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from minifloat.adapters.megatron import linears

    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True)
    column: Any = linears("mxfp8")[ColumnParallelLinear]
    layer = column(64, 96, config=config, init_method=torch.nn.init.normal_, bias=False, tp_group=dist.group.WORLD)
    x, old = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank)), layer.weight
    layer(x)
    layer.weight = torch.nn.Parameter(old.detach() * 2)
    y = layer(x)[0]
    y.sum().backward()
    wanted = Linear(64, 96, False, recipe="mxfp8")
    wanted.weight = torch.nn.Parameter(layer.weight.detach())
    return [torch.equal(y, wanted(x)), old.grad is None, layer.weight.grad is not None]


def test_a_weight_that_is_replaced(worker_pool: Pools) -> None:
    """As by loading with ``assign=True``, or by an adapter."""
    for held in worker_pool(1).run(replaced):
        assert all(held)


def test_experts() -> None:
    """Of a backend's layer and of a layer that is replaced; Megatron's own stays as it is."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend

    from minifloat.adapters.megatron import MinifloatSpecProvider, quantized

    own = get_mlp_module_spec_for_backend(LocalSpecProvider(), num_experts=4)
    provided = get_mlp_module_spec_for_backend(MinifloatSpecProvider("mxfp8"), num_experts=4)
    for spec, recipe in ((quantized(own, "mxfp8"), "mxfp8"), (provided, "mxfp8"), (own, None)):
        for mlp in (submodules(spec).experts, submodules(spec).shared_experts):
            linears = submodules(mlp).linear_fc1, submodules(mlp).linear_fc2
            assert [getattr(each, "recipe", None) for each in linears] == [recipe, recipe]


def test_the_provider_and_what_is_refused() -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from minifloat.adapters.megatron import MinifloatSpecProvider

    provider: Any = MinifloatSpecProvider("mxfp8")
    column = provider.column_parallel_linear()
    assert issubclass(column, ColumnParallelLinear)
    assert issubclass(provider.row_parallel_linear(), RowParallelLinear)
    with pytest.raises(ValueError, match="histories of delayed scaling"):
        MinifloatSpecProvider("delayed")
    with pytest.raises(ValueError, match="set gtp_weight_remat_size to 1, not 2"):
        column._forward_impl(column.__new__(column), torch.zeros(1, 32), torch.zeros(32, 32), gtp_remat_size=2)
