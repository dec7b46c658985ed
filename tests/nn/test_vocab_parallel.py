"""Embedding and cross entropy split by vocabulary: the unsharded ones, also where a vocabulary does not divide."""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from minifloat.comm.collectives import all_gather_rows
from minifloat.comm.group import Group
from minifloat.functional.cross_entropy import cross_entropy, linear_cross_entropy, vocabulary_shards
from minifloat.functional.exchange import ColumnSequence
from minifloat.nn.embedding import VocabParallelEmbedding
from minifloat.ops import cross_entropy as kernels
from tests.helpers.compare import same_on_all_ranks
from tests.helpers.distributed_pool import Pools, on_ranks, process_group
from tests.helpers.sample import each_pair

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
WORLDS = pytest.mark.parametrize("size", [2, 3])
TOLERANCE = {FP64: 1e-12, FP32: 2e-6, torch.float16: 1e-3, BF16: 8e-3}


# ---- The split ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_vocabularies_are_split_as_dtensor_does(ranks: int) -> None:
    for vocabulary in (64, 101, 50257, 128256):
        assert list(vocabulary_shards(vocabulary, ranks).rows) == [
            len(t) for t in torch.arange(vocabulary).chunk(ranks)
        ]


def test_too_few_tokens() -> None:
    assert vocabulary_shards(3, 3).rows == (1, 1, 1)
    for vocabulary, ranks in ((2, 3), (5, 4), (0, 1)):
        with pytest.raises(ValueError, match=f"vocabulary of {vocabulary}.*rank {ranks - 1} of {ranks} without"):
            vocabulary_shards(vocabulary, ranks)


# ---- Embedding ------------------------------------------------------------------------------------------------------


def embed(rank: int, size: int, V: int, tokens: Tensor, dy: Tensor, dtype: Any, rows: Any, compiled: bool) -> Any:
    """Rows of the table, output, its gradient; ``rows``: None, or each rank's part of dim 0, () for equal parts."""
    torch.manual_seed(3)
    sequence = rows is not None
    module = VocabParallelEmbedding(
        V, 6, dtype=dtype, sequence_parallel=sequence, tp_group=process_group(), tp_size=size
    )
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    y = call(tokens, rows_per_rank=rows or None)
    lengths = list(rows or [len(tokens) // size] * size) if sequence else []
    y.backward(dy.split(lengths)[rank] if sequence else dy)
    table, grad = module.weight.detach().clone(), module.weight.grad
    assert module.weight.tensor_model_parallel and module.weight.partition_dim == 0
    assert copy.deepcopy(module).weight.tensor_model_parallel and module.double().weight.tensor_model_parallel
    assert module.first == sum(vocabulary_shards(V, size).rows[:rank]) and module.num_embeddings == len(module.weight)
    return table, y.detach(), grad


@each_pair
@WORLDS
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("split", ["replicated", "equal", "uneven"])
@pytest.mark.parametrize("V", [12, 31])
def test_embedding(V: int, split: str, dtype: torch.dtype, size: int, worker_pool: Pools) -> None:
    """Table, output and gradient are those of nn.Embedding of the same seed, bit for bit, whatever tokens repeat."""
    torch.manual_seed(3)
    whole = nn.Embedding(V, 6, dtype=dtype)
    tokens, dy = torch.randint(V, (6, 4)), torch.randn(6, 4, 6).to(dtype)
    y = whole(tokens)
    y.backward(dy)
    rows = {"replicated": None, "equal": (), "uneven": {2: (5, 1), 3: (0, 4, 2)}[size]}[split]
    weights, ys, grads = zip(*worker_pool(size).run(embed, V, tokens, dy, dtype, rows, False), strict=True)
    assert [len(w) for w in weights] == list(vocabulary_shards(V, size).rows)
    assert torch.equal(torch.cat(weights), whole.weight) and torch.equal(torch.cat(grads), whole.weight.grad)
    assert torch.equal(same_on_all_ranks(ys) if rows is None else torch.cat(ys), y) and ys[0].dtype == dtype
    if rows:
        assert [len(each) for each in ys] == list(rows)


@pytest.mark.parametrize("rows", [None, (2, 4)])
def test_embedding_compiles_to_one_graph(rows: Any, worker_pool: Pools) -> None:
    tokens, dy = torch.randint(9, (6, 2)), torch.randn(6, 2, 6)
    eager, compiled = (worker_pool(2).run(embed, 9, tokens, dy, FP32, rows, on) for on in (False, True))
    for one, other in zip(eager, compiled, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def adopted(rank: int, size: int) -> Any:
    """A whole embedding that is made parallel, and one that is parallel from the start."""
    torch.manual_seed(3)
    module = nn.Embedding(7, 2)
    shards = vocabulary_shards(7, size)
    module.weight = nn.Parameter(module.weight.detach().split(list(shards.rows))[rank].clone())
    VocabParallelEmbedding._adopt(module, ColumnSequence(Group.of(process_group())))
    torch.manual_seed(3)
    born = VocabParallelEmbedding(7, 2, sequence_parallel=True, tp_group=process_group())
    assert repr(module) == repr(born) and vars(module).keys() == vars(born).keys()
    assert vars(module.weight) == vars(born.weight) and module.state_dict().keys() == born.state_dict().keys()
    tokens = torch.randint(7, (size * 2,))
    assert torch.equal(module(tokens), born(tokens))
    module.reset_parameters()
    return module.weight.detach()


def test_adopted_embedding(worker_pool: Pools) -> None:
    assert torch.cat(worker_pool(2).run(adopted)).shape == (7, 2)


@on_ranks(2)
def test_other_ranks_tokens_touch_nothing(rank: int, size: int) -> None:
    """Row 0 of each rank, which stands in for tokens of others, is NaN; so is the gradient of the others' tokens."""
    module = VocabParallelEmbedding(6, 2, tp_group=process_group(), init_method=nn.init.ones_)
    with torch.no_grad():
        module.weight[0] = float("nan")
    y = module(torch.tensor([1, 4]))
    dy = torch.ones(2, 2)
    dy[1 - rank] = float("nan")
    y.backward(dy)
    result = torch.cat([y.detach(), module.weight.grad])
    assert torch.equal(result, torch.tensor([[1.0, 1], [1, 1], [0, 0], [1, 1], [0, 0]]))


@on_ranks(2)
def test_bad_input_of_an_embedding_is_an_error_on_all_ranks(rank: int, size: int) -> None:
    module = VocabParallelEmbedding(7, 2, tp_group=process_group(), sequence_parallel=True)
    found = []
    for tokens in ([1, 7], [-1, 2]):
        with pytest.raises(IndexError):
            module(torch.tensor(tokens))
    for arguments in ((torch.tensor([1, 2, 3]),), (torch.tensor([1, 2, 3]), (2, 2))):
        with pytest.raises(ValueError, match="VocabParallelEmbedding") as error:
            module(*arguments)
        found.append(str(error.value))
    undivided, wrong = found
    assert "3 rows" in undivided and "rows_per_rank" in undivided and "[2, 2]" in wrong


def test_without_a_group_it_is_an_embedding() -> None:
    torch.manual_seed(5)
    expected = nn.Embedding(7, 3)
    torch.manual_seed(5)
    module = VocabParallelEmbedding(7, 3, sequence_parallel=True)
    assert isinstance(module, nn.Embedding) and torch.equal(module.weight, expected.weight)
    tokens = torch.tensor([[0, 6], [3, 3]])
    assert torch.equal(module(tokens), expected(tokens))
    assert module.state_dict().keys() == expected.state_dict().keys()
    assert not getattr(module.weight, "tensor_model_parallel", False)
    late = VocabParallelEmbedding(7, 3, device="meta").to_empty(device="cpu")
    torch.manual_seed(5)
    late.reset_parameters()
    assert torch.equal(late.weight, expected.weight)
    with pytest.raises(ValueError, match="tp_size=2"):
        VocabParallelEmbedding(7, 3, tp_size=2)


# ---- Cross entropy --------------------------------------------------------------------------------------------------


def entropy(
    rank: int, size: int, logits: Tensor, target: Tensor, dloss: Tensor, options: dict[str, Any], compiled: bool
) -> tuple[Tensor, Tensor, int]:
    shards = vocabulary_shards(logits.shape[-1], size)
    own = logits.split(list(shards.rows), -1)[rank].clone().requires_grad_()
    group = Group.of(process_group())

    def loss_of(own: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(own, target, **options, tp_group=group, classes=logits.shape[-1])

    call = torch.compile(loss_of, fullgraph=True, backend="aot_eager") if compiled else loss_of
    seen = CommDebugMode()
    with contextlib.nullcontext() if compiled else seen:
        loss = call(own, target)
        loss.backward(dloss)
    assert own.grad is not None
    return loss.detach(), own.grad, seen.get_total_counts()


def run_entropy(pools: Pools, size: int, logits: Tensor, target: Tensor, dloss: Tensor, **options: Any) -> Any:
    """The loss, which all ranks have alike, and the gradient of all logits."""
    losses, grads, counts = zip(*pools(size).run(entropy, logits, target, dloss, options, False), strict=True)
    assert set(counts) == {1 if target.numel() else 0}  # collectives of forward and backward together
    return same_on_all_ranks(losses), torch.cat(grads, -1)


def some_targets(rows: int, classes: int) -> Tensor:
    """Of all ranks; every third one is ignored."""
    return torch.randint(classes, (rows,)).where(torch.arange(rows) % 3 != 1, -100)


@each_pair
@WORLDS
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_cross_entropy(dtype: torch.dtype, reduction: Any, smoothing: float, size: int, worker_pool: Pools) -> None:
    """Of 29 classes: the float64 loss and gradient of all logits."""
    logits, target = (torch.randn(3, 7, 29) * 5).to(dtype), some_targets(21, 29).reshape(3, 7)
    exact = logits.double().clone().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), target.flatten(), label_smoothing=smoothing, reduction=reduction)
    expected = expected.reshape(() if reduction == "mean" else target.shape)
    dloss = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad(expected, exact, dloss)
    precise = torch.promote_types(dtype, FP32)
    loss, found = run_entropy(
        worker_pool,
        size,
        logits,
        target,
        dloss.to(precise),
        label_smoothing=smoothing,
        reduction=reduction,
        chunk_rows=4,
    )
    assert loss.dtype == precise and found.dtype == dtype
    tolerance = 1e-12 if dtype == FP64 else 2e-6
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.double(), gradient, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@WORLDS
def test_exact_cross_entropy(size: int, worker_pool: Pools) -> None:
    """Where no sum rounds, the bits are the unsharded ones': one logit above all others, on whatever rank."""
    classes = 10
    logits = torch.full((classes, classes), -200.0) + 300 * torch.eye(classes)
    target = torch.arange(classes).roll(1)
    own = logits.clone().requires_grad_()
    expected = cross_entropy(own, target, reduction="none")
    expected.sum().backward()
    loss, gradient = run_entropy(worker_pool, size, logits, target, torch.ones(classes), reduction="none")
    assert torch.equal(loss, expected.detach()) and torch.equal(loss, torch.full((classes,), 300.0))
    assert torch.equal(gradient, own.grad)


@WORLDS
def test_special_rows_of_cross_entropy(size: int, worker_pool: Pools) -> None:
    logits = torch.randn(6, 7)
    logits[0] = float("nan")
    logits[1, :4] = float("-inf")
    logits[2, 6], logits[3, 0] = float("nan"), float("inf")
    logits[4, 5:] = float("-inf")
    target = torch.tensor([-1, 6, 0, 1, 6, 2])
    own = logits.clone().requires_grad_()
    expected = cross_entropy(own, target, ignore_index=-1, reduction="none")
    expected.backward(torch.ones(6))
    loss, gradient = run_entropy(worker_pool, size, logits, target, torch.ones(6), ignore_index=-1, reduction="none")
    torch.testing.assert_close(loss, expected.detach(), equal_nan=True)
    torch.testing.assert_close(gradient, own.grad, equal_nan=True)
    assert loss[0] == 0 and loss.isfinite().tolist() == [True, True, False, False, False, True]
    assert not gradient[0].any()


@pytest.mark.parametrize("rows", [0, 4])
def test_no_target_counts(rows: int, worker_pool: Pools) -> None:
    logits, target = torch.randn(rows, 7), torch.full((rows,), -100)
    loss, gradient = run_entropy(worker_pool, 2, logits, target, torch.ones(()))
    assert loss.isnan() and gradient.shape == (rows, 7) and not gradient.any()


def test_cross_entropy_compiles_to_one_graph(worker_pool: Pools) -> None:
    logits, target = torch.randn(6, 9), some_targets(6, 9)
    for options in ({}, {"label_smoothing": 0.1}):
        eager, compiled = (
            worker_pool(2).run(entropy, logits, target, torch.ones(()), options, on) for on in (False, True)
        )
        for one, other in zip(eager, compiled, strict=True):
            torch.testing.assert_close(one[:2], other[:2])


# ---- Output head and cross entropy ----------------------------------------------------------------------------------


def head(rank: int, size: int, tensors: Any, options: dict[str, Any], rows: Any, compiled: bool) -> Any:
    """Loss and gradients of this rank's rows of hidden (all where ``rows`` is None) and of the head."""
    hidden, weight, bias, target = tensors
    shards = list(vocabulary_shards(len(weight), size).rows)
    w, b = (None if t is None else t.split(shards)[rank].clone().requires_grad_() for t in (weight, bias))
    x = (hidden if rows is None else hidden.split(list(rows))[rank]).clone().requires_grad_()
    ranks = {"tp_group": Group.of(process_group()), "classes": len(weight)}
    split = {} if rows is None else {"sequence_parallel": True, "rows_per_rank": rows}

    def loss_of(x: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, target, b, **options, **ranks, **split)  # type: ignore[arg-type]

    call = torch.compile(loss_of, fullgraph=True, backend="aot_eager") if compiled else loss_of
    loss = call(x, target)
    (2 * loss).backward()
    return loss.detach(), x.grad, *(t.grad for t in (w, b) if t is not None)


@each_pair
@WORLDS
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [FP64, FP32, BF16])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "reduction": "sum", "bias": True}])
def test_linear_cross_entropy(options: Any, dtype: Any, split: bool, size: int, worker_pool: Pools) -> None:
    """29 classes and 18 tokens in chunks of 4: the float64 loss and gradients, and the unsharded ones as closely."""
    options = dict(options)
    hidden, weight = torch.randn(9, 2, 12).to(dtype), torch.randn(29, 12).to(dtype)
    bias = torch.randn(29).to(dtype) if options.pop("bias", False) else None
    target = some_targets(18, 29).reshape(9, 2)
    leaves = [t.double().clone().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    exact = leaves[0] @ leaves[1].t() + (leaves[2] if bias is not None else 0)
    expected = F.cross_entropy(exact.flatten(0, 1), target.flatten(), **options)
    gradients = torch.autograd.grad(2 * expected, leaves)
    rows = {2: (4, 5), 3: (0, 7, 2)}[size] if split else None
    given = (hidden, weight, bias, target), {**options, "chunk_rows": 4}, rows, False
    losses, dhidden, *heads = zip(*worker_pool(size).run(head, *given), strict=True)
    found = [torch.cat(dhidden) if split else same_on_all_ranks(dhidden), *(torch.cat(each) for each in heads)]
    # A bf16 logit is rounded, and so is each rank's addend of the gradient of hidden.
    tolerance = {FP64: 1e-12, FP32: 5e-6, BF16: 3e-2}[dtype]
    torch.testing.assert_close(same_on_all_ranks(losses).double(), expected.detach(), rtol=tolerance, atol=tolerance)
    for one, other in zip(found, gradients, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


def default_chunks(rank: int, size: int, tensors: Any) -> tuple[Tensor, int]:
    """The loss in the chunks that the function chooses, here of 32 logits, and how often ranks exchanged statistics."""
    with (
        mock.patch.object(kernels, "_CHUNK_ELEMENTS", 32),
        mock.patch.object(
            sys.modules[linear_cross_entropy.__module__],
            "all_gather_rows",
            side_effect=all_gather_rows,
        ) as gathers,
    ):
        loss = head(rank, size, (*tensors[:2], None, tensors[2]), {}, None, False)[0]
    return loss, gathers.call_count


@pytest.mark.parametrize(("size", "vocabulary"), [(2, 9), (3, 13)])
def test_uneven_vocabularies_have_the_same_chunks(worker_pool: Pools, size: int, vocabulary: int) -> None:
    """The last rank has fewer classes: in chunks of its own there were fewer exchanges, and the others waited."""
    shards = vocabulary_shards(vocabulary, size).rows
    assert -(-20 // (32 // shards[0])) > -(-20 // (32 // shards[-1]))
    hidden, weight, target = torch.randn(20, 4), torch.randn(vocabulary, 4), some_targets(20, vocabulary)
    losses, exchanges = zip(*worker_pool(size).run(default_chunks, (hidden, weight, target)), strict=True)
    assert set(exchanges) == {-(-20 // (32 // shards[0]))}
    torch.testing.assert_close(same_on_all_ranks(losses), F.cross_entropy(hidden @ weight.t(), target))


def test_linear_cross_entropy_compiles_to_one_graph(worker_pool: Pools) -> None:
    tensors = torch.randn(6, 4), torch.randn(9, 4), torch.randn(9), some_targets(6, 9)
    eager, compiled = (worker_pool(2).run(head, tensors, {"chunk_rows": 4}, (2, 4), on) for on in (False, True))
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other)


@on_ranks(2)
def test_bad_input_of_a_shared_head_is_an_error_on_all_ranks(rank: int, size: int) -> None:
    hidden, weight, target = torch.randn(4, 3), torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    ranks: Any = {"tp_group": process_group(), "classes": 8}
    for classes, message in ((None, "classes="), (12, r"\(6, 6\)")):
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(hidden, weight, target, tp_group=process_group(), classes=classes)
    with pytest.raises(ValueError, match="linear_cross_entropy: rows_per_rank"):
        linear_cross_entropy(hidden, weight, target, **ranks, sequence_parallel=True, rows_per_rank=(3, 5))
    with pytest.raises(ValueError, match=r"target has shape \(4,\), input \(8, 3\)"):
        linear_cross_entropy(hidden, weight, target, **ranks, sequence_parallel=True)


def wrong_cross_entropy(rank: int, size: int) -> list[str]:
    found = []
    logits, target = torch.randn(2, 4), torch.tensor([0, 6])
    for arguments in ({}, {"classes": 6}):
        with pytest.raises(ValueError, match="cross_entropy") as error:
            cross_entropy(logits, target, tp_group=process_group(), **arguments)
        found.append(str(error.value))
    for wrong in (7, -1):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            own = logits[:, : 4 - rank]
            cross_entropy(own, torch.tensor([0, wrong]), tp_group=process_group(), classes=7)
    return found


def test_bad_input_of_cross_entropy_is_an_error_on_all_ranks(worker_pool: Pools) -> None:
    for rank, (untold, wrong) in enumerate(worker_pool(2).run(wrong_cross_entropy)):
        assert f"rank {rank} of 2" in untold and "classes=" in untold and "(3, 3)" in wrong
    with pytest.raises(ValueError, match=r"logits of 5 classes.*\(7,\)"):
        cross_entropy(torch.randn(2, 5), torch.tensor([0, 1]), classes=7)
