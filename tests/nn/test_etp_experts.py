"""Experts whose rows are sharded over ranks with other data, beside unsharded ones, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import minifloat
from minifloat.comm import sharded_cast
from minifloat.comm.collectives import start_all_gather_rows
from minifloat.comm.group import Group
from minifloat.distributed import reduce_replicated
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE
from minifloat.functional.etp.prefetch_queue import queue_of
from minifloat.functional.etp.rows import ExpertRows
from minifloat.functional.quantize import linear_config
from minifloat.nn.moe import LayerNormMoE
from minifloat.nn.tensor_parallel import shard_rows
from minifloat.recipe import Recipe
from minifloat.tensor import QuantizedTensor
from tests.helpers.distributed_pool import Pools, on_ranks, process_group
from tests.helpers.etp_linears import set_prefetch, set_recast
from tests.helpers.recipes import NAMED

COUNTS = [5, 0, 9]  # rows of each expert; there are two more
ROWS, HIDDEN = 16, 40


class Rows(nn.Module):
    """A layer of experts on rows whose numbers never change."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        return self.layer(x, COUNTS, *args, **options)


def linear(width: int, **options: Any) -> nn.Module:
    """One grouped linear."""
    return Rows(minifloat.GroupedLinear(len(COUNTS), HIDDEN, width, **options))


def mlp(width: int, **options: Any) -> nn.Module:
    """Two of their MLPs."""
    layers = [minifloat.GroupedMLP(len(COUNTS), HIDDEN, width, **options) for _ in range(2)]
    return nn.Sequential(*[Rows(layer) for layer in layers])


def moe(width: int, **options: Any) -> nn.Module:
    """A norm and a mixture of experts with a shared MLP."""
    groups = {"expert_etp_group": options.get("etp_group")} if "etp_group" in options else {}
    return LayerNormMoE(
        HIDDEN, width, len(COUNTS), shared_ffn_hidden_size=24, aux_loss_coefficient=0.1, **groups, **options
    )


KINDS: dict[str, Callable[..., nn.Module]] = {"linear": linear, "mlp": mlp, "moe": moe}


@dataclass(frozen=True)
class Case:
    """What is compared: ``options`` are those of the layer.

    ``error``: of gradients, relative to the largest; they are exact on two ranks, which add in one order, unless the
    unsharded layer rounds them where the sharded one does not, or adds several in another order.
    """

    kind: str
    width: int
    recipe: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    reduction: str = "mean"
    dtype: torch.dtype = torch.float32
    depth: int = 1
    recast: bool = False
    own_recipe: Recipe | None = None
    call: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[..., Any] | None = None  # called with the model and X
    error: float = 0.0


def context(case: Case) -> AbstractContextManager[Any]:
    """``autocast`` as the case says; ranks agree on delayed scales."""
    recipe = case.own_recipe or (None if case.recipe is None else NAMED[case.recipe])
    return nullcontext() if recipe is None else minifloat.autocast(recipe=recipe, amax_reduction_group=process_group())


def made(case: Case, **options: Any) -> Any:
    """The model of a case, the same on every rank."""
    torch.manual_seed(3)
    return KINDS[case.kind](case.width, dtype=case.dtype, **case.options, **options)


def run(case: Case, model: nn.Module, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Y and dX of one forward and backward."""
    x = x.clone().requires_grad_()
    torch.manual_seed(step)  # NVFP4 draws random bits
    with context(case):
        y = (case.wrap or nn.Module.__call__)(model, x, **case.call)
    loss = minifloat.router_losses(model)
    torch.manual_seed(step + 1)
    ((y.float() * weights_like(y)).sum() + loss).backward()
    if any(getattr(module, "delay_wgrad_compute", False) for module in model.modules()):
        for module in reversed([each for each in model.modules() if isinstance(each, minifloat.GroupedLinear)]):
            module.backward_dw()
    assert x.grad is not None
    return y.detach(), x.grad


def weights_like(y: Tensor) -> Tensor:
    """Of the sum of Y that is differentiated, other ones for each element."""
    return torch.linspace(-1.0, 2.0, y.numel()).view(y.shape)


def own_rows(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """This rank's rows of what belongs to the parameter ``name``, if it is sharded."""
    path, _, kind = name.rpartition(".")
    layer = model.get_submodule(path)
    if kind == "weight" and not isinstance(layer, minifloat.Linear | minifloat.GroupedLinear):
        parent, _, last = path.rpartition(".")
        layer = model.get_submodule(parent) if last.isdigit() else layer
    sharded = getattr(layer, "_etp", None) is not None and kind == "weight"
    return whole[..., layer._etp.rows.range(0), :] if sharded else whole  # type: ignore[union-attr]


def gradient(parameter: Any) -> Tensor | None:
    """Where it was accumulated."""
    return getattr(parameter, "main_grad", parameter.grad)


def assert_alike(found: Tensor | None, wanted: Tensor | None, error: float, what: str) -> None:
    """But for an error relative to the largest element; 0: bit for bit."""
    assert (found is None) == (wanted is None), what
    if found is None or wanted is None:
        return
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, what
    if not error or not wanted.numel():
        assert torch.equal(found, wanted), f"{what}: {(found.float() - wanted.float()).abs().max()}"
    else:
        atol = error * float(wanted.abs().max())
        torch.testing.assert_close(found, wanted, rtol=error, atol=atol, msg=lambda why: f"{what}: {why}")


def reduced(whole: Tensor, size: int, reduction: str) -> Tensor:
    """The gradient of all ranks."""
    total = whole.clone()
    dist.all_reduce(total)
    return total.div_(size) if reduction == "mean" else total


def compare(model: nn.Module, reference: nn.Module, case: Case, x: Tensor, step: int) -> None:
    """Y, dX and all gradients of one step, which are cleared."""
    size = dist.get_world_size()
    y, dx = run(case, model, x, step)
    wanted_y, wanted_dx = run(case, reference, x, step)
    assert_alike(y, wanted_y, 0.0, f"Y in step {step}")
    assert_alike(dx, wanted_dx, 0.0, f"dX in step {step}")
    for name, parameter in reference.named_parameters():
        own, wanted = gradient(model.get_parameter(name)), gradient(parameter)
        wanted = None if wanted is None else reduced(wanted, size, case.reduction)
        wanted = None if wanted is None else own_rows(model, name, wanted)
        assert_alike(own, wanted, max(case.error, 3e-6 * (size > 2)), f"gradient of {name} in step {step}")
    for each in (*model.parameters(), *reference.parameters()):
        each.grad = None
        if hasattr(each, "main_grad"):
            each.main_grad.zero_()


def beside(rank: int, size: int, case: Case, steps: int = 1, prepare: Callable[[nn.Module], None] | None = None) -> int:
    """Compares a sharded model with an unsharded one in each of some steps; gives the number of gathers."""
    group = process_group()
    queue = queue_of(Group.of(group))
    before = queue.gathered
    model, reference = made(case, etp_group=group, etp_reduction=case.reduction), made(case)
    set_prefetch(model, case.depth)
    if case.recast:
        set_recast(model)
    reduce_replicated(model, group, case.reduction)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        whole = reference.get_parameter(name).detach()
        assert torch.equal(parameter, own_rows(model, name, whole)), name
    for each in (model, reference):
        if prepare is not None:
            prepare(each)
    for step in range(steps):
        x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank)).to(case.dtype)
        compare(model, reference, case, x * (1.0, 8.0, 0.25)[step % 3], step)
        for each in (model, reference) if step + 1 < steps else ():
            scale_parameters(each, (1.0, 3.0, 0.5)[step % 3])
    return queue.gathered - before


@torch.no_grad()
def scale_parameters(model: nn.Module, factor: float) -> None:
    """In the place of an optimizer's step: every rank can do it to its rows, to the bit."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(factor)


class Gathers:
    """Counts the gathers and the bytes that this rank sends in each: codes and scales, however many experts."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self._patch = mock.patch.object(sharded_cast, "start_all_gather_rows", self._start)

    def _start(self, xs: Any, maps: Any, *args: Any, **options: Any) -> Any:
        assert len(xs) <= 2
        sizes = [rows.largest * x[:0].new_empty(1, *x.shape[1:]).nbytes for x, rows in zip(xs, maps, strict=True)]
        self.sent.append(sum(sizes))
        return start_all_gather_rows(xs, maps, *args, **options)

    def __enter__(self) -> list[int]:
        self._patch.start()
        return self.sent

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


# ---- experts whose rows are sharded over ranks with other data, beside unsharded ones, bit for bit ----

RECIPES = (None, *NAMED)
SINGLE = {"single_grouped_weight": True}
BF16 = torch.bfloat16


@on_ranks(2)
def test_experts_have_other_ranks_than_the_shared_mlp(rank: int, size: int) -> None:
    alone, everyone = [dist.new_group([each]) for each in range(size)][rank], dist.group.WORLD
    for shared, experts in ((alone, everyone), (everyone, alone)):
        moe: Any = minifloat.MoE(32, 48, 4, 2, shared_ffn_hidden_size=16, etp_group=shared, expert_etp_group=experts)
        for layer, group in ((moe.shared_fc1, shared), (moe.shared_fc2, shared), (moe.experts.fc1, experts)):
            assert (layer._etp is not None) == (group is everyone)


NUMBERS = [
    # three ranks differ from two in the rows that they have: of some recipes each
    pytest.param(kind, size, recipe, marks=[pytest.mark.slow] * (recipe not in few and (size == 3 or kind != "linear")))
    for kind, few in {"linear": ("nvfp4", "block"), "mlp": ("block", None), "moe": ("mxfp8", "delayed")}.items()
    for size, recipe in product((2, 3), RECIPES)
]


@pytest.mark.parametrize(("kind", "size", "recipe"), NUMBERS)
def test_numbers(worker_pool: Pools, kind: str, size: int, recipe: str | None) -> None:
    """Rows of blocks that straddle ranks, uneven shards and empty ones; one parameter and several.

    Of a mixture of experts the router too, whose parameters every rank has.
    """
    reduction = "sum" if recipe in ("current", "mxfp8") else "mean"
    separate, single = {"bias": True}, {"single_grouped_weight": True}
    sizes = [(200, separate), (1, single)] if kind == "linear" else [(71, separate if size == 2 else single)]
    for width, options in sizes:
        worker_pool(size).run(beside, Case(kind, width, recipe, options, reduction), 3 if recipe == "delayed" else 2)


def frozen(model: nn.Module) -> None:
    """The second expert of all, and all of the last layer's weights."""
    layers = [each for each in model.modules() if isinstance(each, minifloat.GroupedLinear)]
    for layer in layers:
        layer.get_parameter("1.weight").requires_grad_(False)
    for i in range(len(COUNTS)):
        layers[-1].get_parameter(f"{i}.weight").requires_grad_(False)


def with_main_grad(model: nn.Module) -> None:
    for layer in [each for each in model.modules() if isinstance(each, minifloat.GroupedLinear)]:
        for name in layer._weight_names:
            weight: Any = layer.get_parameter(name)
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)


def checkpointed(model: nn.Module, x: Tensor) -> Any:
    return minifloat.checkpoint(model, x)


def first_microbatch(model: nn.Module, x: Tensor) -> Any:
    """Two of them, of which the second uses the weights that the first has cast."""
    return model(x, is_first_microbatch=True) + model(x * 0.5, is_first_microbatch=False)


def into_memory(model: nn.Module, x: Tensor) -> Any:
    out, dgrad_out = torch.empty(ROWS, model.layer.out_features, dtype=x.dtype), torch.empty_like(x)  # type: ignore[union-attr]
    y = model(x, out=out, dgrad_out=dgrad_out)
    assert y.data_ptr() == out.data_ptr()
    return y


def with_bias(model: nn.Module, x: Tensor) -> Any:
    y, biases = model(x)
    return y + biases.sum()


def unlike_dtype(model: nn.Module, x: Tensor) -> Any:
    """Parameters in fp32, activations in bf16."""
    return model(x.to(BF16))


def without_rows(model: nn.Module, x: Tensor) -> Any:
    """The first rank has no tokens at all, the second one's are all of one expert."""
    counts = [0, 0, 0] if dist.get_rank() == 0 else [0, 0, ROWS]
    for each in model.children():
        x = each.layer(x[: sum(counts)], counts)  # type: ignore[operator, union-attr]
    return x


def transformer(width: int, **options: Any) -> nn.Module:
    moe = {"num_experts": 3, "dtype": torch.float32}
    if "etp_group" in options:
        moe["expert_etp_group"] = options["etp_group"]
    options |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}
    return nn.Sequential(nn.Unflatten(0, (-1, 2)), minifloat.TransformerLayer(HIDDEN, width, 4, moe=moe, **options))


KINDS["transformer"] = transformer


def overridden(recipe: str, override: str) -> Any:
    return replace(NAMED[recipe], backward_override=override)  # type: ignore[type-var]


OPTIONS = {
    "main_grad": (Case("mlp", 72, "mxfp8", {"fuse_wgrad_accumulation": True}, "sum"), with_main_grad),
    "main_grad of one": (Case("mlp", 71, "current", {"fuse_wgrad_accumulation": True, **SINGLE}), with_main_grad),
    "recast": (Case("mlp", 128, "mxfp8", recast=True), None),
    "recast of one": (Case("mlp", 71, "current", SINGLE, depth=2, recast=True), None),
    "recast under delayed scaling": (Case("mlp", 64, "delayed", recast=True), None),
    "delayed wgrad": (Case("linear", 33, "block", {"delay_wgrad_compute": True}), None),
    "delayed wgrad of two": (Case("mlp", 33, "nvfp4", {"delay_wgrad_compute": True, **SINGLE}), None),
    "first microbatch": (Case("linear", 33, "delayed", wrap=first_microbatch, error=3e-6), None),
    "original input": (Case("linear", 33, "mxfp8", {"save_original_input": True}), None),
    "returned bias": (
        Case("linear", 33, "current", {"return_bias": True, "single_grouped_bias": True}, wrap=with_bias), None,
    ),
    "frozen": (Case("mlp", 72, "current"), frozen),
    "out": (Case("linear", 33, "mxfp8", wrap=into_memory), None),
    "bf16": (Case("mlp", 72, None, {"bias": True}, dtype=BF16), None),
    "bf16 activations": (Case("linear", 72, "current", wrap=unlike_dtype, error=2**-7), None),
    "recomputed activation": (Case("mlp", 72, "block", {"recompute_activation": True}), None),
    "checkpoint": (Case("mlp", 72, "mxfp8", wrap=checkpointed), None),
    "checkpoint of delayed scaling": (Case("mlp", 72, "delayed", wrap=checkpointed), None),
    "no rows": (Case("mlp", 72, "mxfp8", wrap=without_rows), None),
    "no rows, no recipe": (Case("mlp", 72, None, wrap=without_rows), None),
    "transformer": (Case("transformer", 48, "current"), None),
    "checkpoint of moe": (Case("moe", 72, "block", {"checkpoint": True}), None),
    "high precision backward": (Case("linear", 33, own_recipe=overridden("nvfp4", "high_precision")), None),
    "dequantized backward": (Case("mlp", 72, own_recipe=overridden("block", "dequantized")), None),
    "high precision backward, unlike dtype": (
        Case("linear", 9, None, SINGLE, own_recipe=overridden("mxfp8", "high_precision"), wrap=unlike_dtype,
             error=2**-7), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_options(worker_pool: Pools, option: str) -> None:
    case, prepare = OPTIONS[option]
    worker_pool(2).run(beside, case, 4 if case.recipe == "delayed" else 2, prepare)


def test_gathers_ahead_change_no_bit(worker_pool: Pools) -> None:
    """Each weight is gathered once in forward and once in backward, but for the first guesses."""
    for depth in (0, 1, 2):
        gathered = worker_pool(2).run(beside, Case("mlp", 72, "mxfp8", depth=depth), 3)
        assert gathered[0] == gathered[1] and gathered[0] in range(3 * 8, 3 * 8 + 1 + 2 * depth)


@on_ranks(2, 3)
def test_start_values_and_checkpoints(rank: int, size: int) -> None:
    """From one seed, from meta and again: the unsharded layer's rows; checkpoints of one parameter and of several."""
    group = process_group()
    for single, biased in product((False, True), (False, True)):
        options = {"single_grouped_weight": single, "single_grouped_bias": single, "bias": biased}
        torch.manual_seed(5)
        whole = minifloat.GroupedLinear(3, 8, 7, **options)
        torch.manual_seed(5)
        sharded = minifloat.GroupedLinear(3, 8, 7, etp_group=group, **options)
        empty = minifloat.GroupedLinear(3, 8, 7, device="meta", etp_group=group, **options).to_empty(device="cpu")
        copied = copy.deepcopy(sharded)
        for again in (sharded, empty):
            torch.manual_seed(5)
            again.reset_parameters()
        other = minifloat.GroupedLinear(
            3, 8, 7, bias=biased, single_grouped_weight=not single, single_grouped_bias=not single, etp_group=group
        )
        other.load_state_dict(sharded.state_dict())
        back = minifloat.GroupedLinear(3, 8, 7, etp_group=group, **options)
        back.load_state_dict(other.state_dict())
        for name, parameter in whole.named_parameters():
            own = own_rows(sharded, name, parameter)
            for model in (sharded, empty, back, copied):
                assert torch.equal(model.get_parameter(name), own), name
                assert hasattr(model.get_parameter(name), "etp_group") == name.endswith("weight")


def volume(rank: int, size: int, recipe: str | None, single: bool) -> None:
    """All experts in one gather, of the bytes that the formula says."""
    case = Case("linear", 70, recipe, {"bias": False, "single_grouped_weight": single})
    model = made(case, etp_group=process_group())
    set_prefetch(model, 0)
    with Gathers() as sent:
        run(case, model, torch.randn(ROWS, HIDDEN), 0)
    weight = None if recipe is None else linear_config(NAMED[recipe]).weight
    formats = [IDENTITY] * 2 if weight is None else [weight.format(ROWWISE), weight.format(COLUMNWISE)]
    dims = [ROWWISE, ROWWISE if formats[1].symmetric else COLUMNWISE]
    shards = model.layer._etp.sharding.shards
    wanted = [len(COUNTS) * shards.gather_bytes(fmt, dim, HIDDEN, 4) for fmt, dim in zip(formats, dims, strict=True)]
    assert sent == wanted


@pytest.mark.parametrize("recipe", RECIPES)
def test_volume(worker_pool: Pools, recipe: str | None) -> None:
    for size, single in ((2, True), (3, False)):
        worker_pool(size).run(volume, recipe, single)


OTHER_SIZES = [
    pytest.param(recipe, dense, marks=[pytest.mark.slow] * ((recipe == "mxfp8") != (dense == 2)))
    for recipe, dense in product((None, "mxfp8", "current"), (4, 2))
]


@pytest.mark.parametrize(("recipe", "dense"), OTHER_SIZES)
@on_ranks(4)
def test_experts_over_other_ranks_than_dense_layers(rank: int, size: int, dense: int, recipe: str | None) -> None:
    """Dense layers over ``dense`` of four ranks, experts over two; rows that several have are reduced over them too."""
    pairs = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))], [dist.new_group(ranks) for ranks in ((0, 2), (1, 3))]
    beside_me, across = pairs[0][rank // 2], pairs[1][rank % 2]
    torch.manual_seed(2)
    reference = nn.Sequential(minifloat.Linear(HIDDEN, HIDDEN, recipe=recipe), KINDS["moe"](48, recipe=recipe))
    model = copy.deepcopy(reference)
    linears = [each for each in model.modules() if isinstance(each, minifloat.Linear | minifloat.GroupedLinear)]
    for layer in linears:
        experts = isinstance(layer, minifloat.GroupedLinear)
        group, replicas = (across, beside_me) if experts else (beside_me, across) if dense == 2 else (None, None)
        shard_rows(layer, Group.of(group or process_group()), "mean", () if replicas is None else (Group.of(replicas),))
        layer._mark_parameters()
    reduce_replicated(model, process_group())
    case = Case("moe", 48, error=3e-6)
    for step in range(2):
        x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank))
        compare(model, reference, case, x, step)


@on_ranks(2)
def test_gathered_weights_are_freed_after_their_product(rank: int, size: int) -> None:
    """No gathered weight is alive any more when the next one is put together."""
    wholes: list[Any] = []
    join = ExpertRows.join

    def joined(self: Any, matrices: Any) -> Any:
        assert not [each for each in wholes if each() is not None]
        operands = join(self, matrices)
        wholes.append(ref(operands.any.codes))
        return operands

    with mock.patch.object(ExpertRows, "join", joined):
        for depth, kind, recipe in ((0, "mlp", "mxfp8"), (1, "mlp", None), (1, "moe", "mxfp8"), (0, "moe", None)):
            beside(rank, size, Case(kind, 72, recipe, {"bias": True}, depth=depth), 2)
    assert len(wholes) > 30


@pytest.mark.parametrize("recipe", NAMED)
@on_ranks(2)
def test_quantized_parameters(rank: int, size: int, recipe: str) -> None:
    """Weights that are kept quantized are gathered as they are; an optimizer's write is the whole's."""
    group = process_group()

    def build(**options: Any) -> Any:
        torch.manual_seed(1)
        with minifloat.quantized_model_init(recipe=recipe):
            return minifloat.GroupedLinear(3, HIDDEN, 70, recipe=recipe, **options)

    whole, sharded = build(), build(etp_group=group)
    reduce_replicated(sharded, group)
    case = Case("linear", 70)
    for step in range(3):
        x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank))
        compare(Rows(sharded), Rows(whole), case, x, step)
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                values = parameter.dequantize() if name.endswith("weight") else parameter.clone()
                sharded.get_parameter(name).copy_(own_rows(sharded, name, values * 1.5 + 0.25))
                parameter.copy_(values * 1.5 + 0.25)
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, QuantizedTensor) == name.endswith("weight")


@on_ranks(2)
def test_checks(rank: int, size: int) -> None:
    group, x = process_group(), torch.randn(ROWS, HIDDEN)
    with minifloat.quantized_model_init(recipe="mxfp8"):
        kept = minifloat.GroupedLinear(3, HIDDEN, 8, single_grouped_weight=True, etp_group=group)
    assert all(isinstance(kept.get_parameter(f"{expert}.weight"), QuantizedTensor) for expert in range(3))
    assert kept(x, COUNTS).shape == (ROWS, 8)
    whole = minifloat.GroupedLinear(3, HIDDEN, 9)
    layer = copy.deepcopy(whole)
    shard_rows(layer, Group.of(group), "mean")
    for each in (layer, whole):
        with minifloat.autocast(False, recipe=NAMED["delayed"], calibrating=True, amax_reduction_group=group):
            each(x, COUNTS)
    assert torch.equal(layer.forward_scaling.scale, whole.forward_scaling.scale)
    with pytest.raises(RuntimeError, match=r"GroupedLinear.*etp_group gathers weights .* no graph"):
        torch.compile(layer, backend="eager", fullgraph=True)(x, COUNTS)
    with minifloat.autocast(recipe=NAMED["current"], check_finite=True):
        layer(x, COUNTS)
        with torch.no_grad():
            layer.get_parameter("2.weight").fill_(float("nan"))
        with pytest.raises(FloatingPointError, match=r"weight of shape .* is not finite"):
            layer(x, COUNTS)
