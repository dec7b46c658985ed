"""``set_check``: layers whose ranks disagree raise on every rank, and name the layer, the collective and the sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat import LayerNormMLP, Linear, TransformerLayer
from minifloat.distributed import parallelize, set_check
from tests.helpers.distributed_pool import Pools, process_group

SIZES = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def raised(call: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def linear(mode: Any, sequence: bool, recipe: str | None = "block") -> Linear:
    layer = Linear(
        8, 8, name="it", recipe=recipe, parallel_mode=mode, sequence_parallel=sequence, tp_group=process_group()
    )
    set_check(layer)
    return layer


def forwards(rank: int, size: int) -> dict[str, str]:
    """What is said of calls whose sizes differ: 2 rows on the first rank, 3 on the other."""
    x, half = torch.randn(2 + rank, 8), torch.randn(2 + 2 * rank, 4)
    column, row = linear("column", True), linear("row", True)
    counts = (2, 3) if rank else (3, 2)
    mlp = TransformerLayer(8, 8, 2, set_parallel_mode=True, sequence_parallel=True, tp_group=process_group(), **SIZES)
    set_check(mlp)
    return {
        "column": raised(lambda: column(x)),
        "rows_per_rank": raised(lambda: column(x, rows_per_rank=counts)),  # without: one fails alone, the other waits
        "row": raised(lambda: row(half)),
        "replicated": raised(lambda: linear("row", False)(half)),
        "before backward": raised(lambda: linear("column", False)(x)),
        "unquantized": raised(lambda: linear("column", True, None)(x)),
        "dtype": raised(lambda: column(x.bfloat16() if rank else x, rows_per_rank=(2, 3))),
        "width": raised(lambda: column(torch.randn(2, 8 - rank))),
        "attention": raised(lambda: mlp(x[:, None])),
        "recipe": raised(lambda: linear("column", True, "current" if rank else "mxfp8")(x[:2])),
        "without recipe": raised(lambda: linear("row", False, "mxfp8" if rank else None)(x[:2, :4])),
        "scales": raised(lambda: linear("column", False, "delayed" if rank else "current")(x[:2])),
        "gradients": raised(lambda: column(x[:2].requires_grad_(rank == 0))),
    }


COLUMN = "Linear 'it': gather of X: the ranks do not fit together: rank 0: X (2, 8); rank 1: X (3, 8); give all ranks"
MESSAGES = {
    "column": COLUMN,
    "rows_per_rank": "rank 0: X (2, 8) with rows_per_rank=[3, 2]; rank 1: X (3, 8) with rows_per_rank=[2, 3]",
    "row": "Linear 'it': reduce_scatter_rows of Y: the ranks do not fit together: rank 0: X (2, 4); rank 1: X (4, 4)",
    "replicated": "Linear 'it': all_reduce of Y: the ranks do not fit together: rank 0: X (2, 4); rank 1: X (4, 4)",
    "before backward": "Linear 'it': all_reduce of dX: the ranks do not fit together: rank 0: X (2, 8); rank 1: X (3",
    "unquantized": COLUMN,
    "dtype": "Linear 'it': gather of X: the ranks do not fit together: rank 0: X (2, 8) with "
    "rows_per_rank=[2, 3]; rank 1: X (3, 8) of torch.bfloat16 with rows_per_rank=[2, 3]",
    "width": "Linear 'it': gather of X: the ranks do not fit together: rank 0: X (2, 8); rank 1: X (2, 7)",
    "recipe": "Linear 'it': the ranks do not fit together: rank 0: input e4m3/1x32/e8m0, weight e4m3",
    "without recipe": "rank 0: input identity, weight identity, output identity, grad_output identity, ",
    "scales": "Linear 'it': the ranks do not fit together: rank 0: input e4m3/tensor/",
    "gradients": "backward_override=None, gradients ['dX', 'dW', 'db']; rank 1: input e4m3",
    "attention": "gather of X: the ranks do not fit together: rank 0: X (2, 1, 8); rank 1: X (3, 1, 8)",
}


def test_forward(worker_pool: Pools) -> None:
    first, second = worker_pool(2).run(forwards)
    assert first == second  # which the ranks survive, in step
    for case, message in MESSAGES.items():
        assert message in first[case].replace(" of torch.float32", ""), case


def checked(rank: int, size: int) -> list[list[Tensor]]:
    """Outputs and gradients with and without."""
    results = []
    for check in (False, True):
        torch.manual_seed(0)
        layers = {"embedding": nn.Embedding(10, 8), "mlp": LayerNormMLP(8, 16), "norm": minifloat.RMSNorm(8)}
        model = nn.ModuleDict(layers)
        parallelize(model, process_group(), plan={"embedding": "vocabulary", "norm": "sequence"}, check=check)
        with minifloat.autocast(recipe=minifloat.Float8BlockScaling()):
            rows = (1, 4)
            x = model["embedding"](torch.arange(5), rows_per_rank=rows)
            y = model["norm"](model["mlp"](x, rows_per_rank=rows))
        y.square().sum().backward()
        results.append([y.detach(), *[p.grad for p in model.parameters() if p.grad is not None]])
        set_check(model, False)
        assert not model["mlp"].fc1._exchange.check
    return results


def test_checks_change_nothing(worker_pool: Pools) -> None:
    for without, with_check in worker_pool(2).run(checked):
        assert len(without) == 9 and all(torch.equal(a, b) for a, b in zip(without, with_check, strict=True))
