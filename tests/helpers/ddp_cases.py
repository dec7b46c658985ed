"""Models in ``DistributedDataParallel`` and one process that has the data of all ranks, in lockstep."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import minifloat
from minifloat.delayed import AmaxHistory
from minifloat.optim import MasterWeights, clip_grad_norm_
from minifloat.parallel.data_parallel import data_parallel
from minifloat.tensor import QuantizedTensor
from tests.helpers.fsdp_cases import MODELS, width

CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "checkpoint": minifloat.checkpoint,
    "torch_checkpoint": lambda *args: torch_checkpoint(*args, use_reentrant=False),
    "reentrant": lambda *args: torch_checkpoint(*args, use_reentrant=True),
}
OF_DDP = ("static_graph", "find_unused_parameters", "gradient_as_bucket_view")
warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)


class Branches(nn.Module):
    """Each rank uses another one of two linears in each step, and nobody the third."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.linears = nn.ModuleList(minifloat.Linear(24, 20, recipe=recipe) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linears[int(x[0, 0, 0] > 0)](x)
        return y


class Case(NamedTuple):
    """A model and how it is stepped.

    Args:
        model: a name of ``fsdp_cases.MODELS``; ``"branches"``; ``"tensor_parallel"``, on a mesh of two dims.
        recipe: of all its linears.
        options: names of :data:`OF_DDP`, which are True then; ``"local_buffers"``: ``broadcast_buffers=False``;
            ``"plain"``: wrapped by PyTorch's class, and not by ``data_parallel``;
            ``"quantized"``: quantized parameters and fp32 masters; ``"preserve"``: which start from the values before
            the first cast; ``"own_amaxes"``: each rank scales by its own; ``"autocast"``: one around each forward;
            ``"accumulate"``: three microbatches, the first two in ``no_sync``; ``"region"``: two, neither in it, in one
            ``autocast`` and backward; ``"compress"``: gradients are sent in fp16; ``"bfloat16"``; ``"clip"``;
            ``"scaler"``: a ``GradScaler``, and gradients of one rank that overflow in the second step; a name of
            :data:`CHECKPOINTS`: of the first child; ``"compile_inside"``, ``"compile_outside"``.
    """

    model: str
    recipe: str
    options: tuple[str, ...] = ()

    def mesh(self, size: int, device: str) -> DeviceMesh | None:
        """Two ranks of data parallelism and the others tensor-parallel; None where all are of the former."""
        if self.model != "tensor_parallel":
            return None
        return init_device_mesh(device, (2, size // 2), mesh_dim_names=("dp", "tp"))

    def build(self, seed: int, mesh: DeviceMesh | None, device: str) -> nn.Module:
        torch.manual_seed(seed)
        own = "own_amaxes" in self.options
        recipe: Any = minifloat.DelayedScaling(reduce_amax=False) if own else self.recipe
        quantized = minifloat.quantized_model_init("quantized" in self.options, recipe, "preserve" in self.options)
        with torch.device(device), quantized:
            if mesh is not None:
                options: dict[str, Any] = {"tp_mesh": mesh["tp"], "set_parallel_mode": True, "sequence_parallel": True}
                return nn.Sequential(minifloat.LayerNormMLP(24, 40, recipe=recipe, **options))
            model = Branches(recipe) if self.model == "branches" else MODELS[self.model](recipe)
        return model.bfloat16() if "bfloat16" in self.options else model

    def wrap(self, model: nn.Module, mesh: DeviceMesh | None) -> tuple[DistributedDataParallel, Any]:
        """The wrapped model, and what is to be called."""
        for name in CHECKPOINTS.keys() & set(self.options):
            assert isinstance(model, nn.Sequential)
            model[0].forward = partial(CHECKPOINTS[name], model[0].forward)  # type: ignore[method-assign]
        options: dict[str, Any] = dict.fromkeys(set(OF_DDP) & set(self.options), True)
        if "local_buffers" in self.options:
            options["broadcast_buffers"] = False
        if mesh is not None:
            options["device_mesh"] = mesh["dp"]
        inside: Any = torch.compile(model, backend="aot_eager") if "compile_inside" in self.options else model
        wrapped = (DistributedDataParallel if "plain" in self.options else data_parallel)(inside, **options)
        if "compress" in self.options:
            wrapped.register_comm_hook(None, fp16_compress_hook)
        outside = torch.compile(wrapped, backend="aot_eager") if "compile_outside" in self.options else wrapped
        return wrapped, outside

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if "quantized" in self.options:
            return MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.02)
        return torch.optim.AdamW(model.parameters(), lr=0.02)

    def scaler(self, device: str) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device, 4.0, enabled="scaler" in self.options)

    def data(self, size: int, step: int, columns: int, tp_rank: int, device: str) -> list[list[Tensor]]:
        """Of all ranks, the microbatches of a step; those of the second rank are larger."""
        count = 3 if "accumulate" in self.options else 2 if "region" in self.options else 1
        if "static_graph" in self.options and step == 0:
            count = 1  # PyTorch fails an assertion of its own if a static graph's first backward is in no_sync
        data = []
        for rank in range(size):
            generator = torch.Generator().manual_seed(100 * step + 10 * tp_rank + rank)
            data.append([torch.randn(6, 2, columns, generator=generator) * (1 + rank) for _ in range(count)])
            if "scaler" in self.options and step == 1 and rank == 1:
                data[-1][0] *= 1e30  # gradients overflow
            for i, x in enumerate(data[-1]):
                x[0, 0, 0] = 1.0 if (rank + step + i) % 2 else -1.0  # which of the branches
        dtype = torch.bfloat16 if "bfloat16" in self.options else torch.float32
        return [[x.to(device, dtype) for x in own] for own in data]


class Oracle:
    """One process that has the data of all data-parallel ranks, each as a microbatch.

    It has a replica of the model for each rank, so that gradients can be added in the order of the collective; all
    with the same histories, where ranks agree on amaxes. No rank learns anything from another: amaxes are reduced, but
    they are those of all data everywhere.
    """

    def __init__(self, case: Case, size: int, mesh: DeviceMesh | None, device: str) -> None:
        self.case, self.model = case, case.build(0, mesh, device)
        self.replicas = [self.model, *(copy.deepcopy(self.model) for _ in range(size - 1))]
        for replica in self.replicas[1:] if "own_amaxes" not in case.options else ():
            for module, first in zip(replica.modules(), self.model.modules(), strict=True):
                for name, state in first.named_children():
                    if isinstance(state, AmaxHistory):
                        module._modules[name] = state

    def step(
        self, microbatches: list[list[Tensor]], seeds: list[int], scaler: torch.amp.GradScaler
    ) -> list[list[Tensor]]:
        """Each rank's outputs and then gradients of inputs; leaves gradients of parameters in :attr:`model`."""
        xs = [[x.clone().requires_grad_() for x in own] for own in microbatches]
        ys: list[list[Tensor]] = [[] for _ in xs]
        regions = [[0, 1]] if "region" in self.case.options else [[i] for i in range(len(xs[0]))]
        for region in regions:
            losses: list[Tensor] = []
            with minifloat.autocast():
                for rank, replica in enumerate(self.replicas):
                    for i in region:
                        torch.manual_seed(seeds[rank] + i)
                        ys[rank].append(replica(xs[rank][i]))
                    losses.append(torch.stack([scaler.scale(ys[rank][i].square().mean()) for i in region]).sum())
                    if self.case.recipe != "delayed":  # randomness in the order that it has on a rank
                        losses.pop().backward()
            if losses:  # in one backward, after which the histories move on once
                torch.stack(losses).sum().backward()
        for same in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            same[0].grad = self._reduced([p.grad for p in same])
        return [y + [x.grad for x in own if x.grad is not None] for y, own in zip(ys, xs, strict=True)]

    def _reduced(self, grads: list[Tensor | None]) -> Tensor | None:
        """What the all-reduce gives, in its order; a rank that has not used the parameter adds zeros."""
        found = [grad for grad in grads if grad is not None]
        if not found:
            return None
        sent = [(grad.half() if "compress" in self.case.options else grad) / len(grads) for grad in found]
        return sum(sent[1:], sent[0]).to(found[0].dtype)

    def follow(self) -> None:
        """Gives all replicas the parameters that the first has."""
        with torch.no_grad():
            for replica in self.replicas[1:]:
                for mine, theirs in zip(replica.parameters(), self.model.parameters(), strict=True):
                    mine.copy_(theirs)
                    mine.grad = None

    def differs(self, found: nn.Module, rank: int) -> str:
        """The first parameter, gradient or buffer of the rank's model that is another one, in any bit."""
        for (name, mine), theirs in zip(self.model.named_parameters(), found.parameters(), strict=True):
            if (mine.grad is None) != (theirs.grad is None):
                return f"{name}: only one has a gradient"
            if mine.grad is not None and theirs.grad is not None and not _same(mine.grad, theirs.grad):
                return f"gradient of {name} differs by {(mine.grad - theirs.grad).abs().max():.3g}"
            pairs = zip(_held(mine), _held(theirs), strict=True)
            if not all(torch.equal(own.view(torch.uint8), other.view(torch.uint8)) for own, other in pairs):
                return f"{name} differs by {(mine.detach() - theirs.detach()).abs().max():.3g}"
        for (name, mine), theirs in zip(self.replicas[rank].named_buffers(), found.buffers(), strict=True):
            if not torch.equal(mine, theirs):
                return f"buffer {name} differs: {mine.tolist()} and {theirs.tolist()}"
        return ""


def _same(x: Tensor, y: Tensor) -> bool:
    """Equal, or NaN in both."""
    return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())


def _held(parameter: Tensor) -> list[Tensor]:
    """The bytes: of a quantized parameter those of its codes, scales and values before the first cast."""
    if not isinstance(parameter, QuantizedTensor):
        return [parameter.detach()]
    initial = parameter.get_high_precision_init_val()
    return [getattr(parameter, name) for name in parameter.__tensor_flatten__()[0]] + [initial] * (initial is not None)


def lockstep(rank: int, size: int, case: Case, steps: int, device: str = "cpu") -> str:
    """Steps the wrapped model, which each rank starts with another seed, and the oracle; what differs first, or ""."""
    mesh, tp_rank = case.mesh(size, device), 0
    if mesh is not None:
        rank, size, tp_rank = mesh.get_local_rank("dp"), 2, mesh.get_local_rank("tp")
    oracle, model = Oracle(case, size, mesh, device), case.build(rank, mesh, device)
    wrapped, call = case.wrap(model, mesh)
    difference = oracle.differs(model, rank)
    optimizers, scalers = (
        [case.optimizer(each) for each in (oracle.model, model)],
        [case.scaler(device), case.scaler(device)],
    )
    for step in range(steps):
        microbatches = case.data(size, step, width(model), tp_rank, device)
        seeds = [1000 * step + 100 * each for each in range(size)]
        expected = oracle.step(microbatches, seeds, scalers[0])[rank]
        found = _step(wrapped, call, case, microbatches[rank], seeds[rank], scalers[1])
        for number, (mine, theirs) in enumerate(zip(expected, found, strict=True)):
            if not _same(mine, theirs):
                difference = difference or f"result {number} differs by {(mine - theirs).abs().max():.3g}"
        if "clip" in case.options:
            for each in (oracle.model, model):
                clip_grad_norm_(each.parameters(), 1e-3, None if mesh is None else mesh["tp"])
        difference = difference or oracle.differs(model, rank)
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if "scaler" in case.options and {each.get_scale() for each in scalers} != {2.0 if step else 4.0}:
            difference = difference or f"scales of the loss: {[each.get_scale() for each in scalers]}"
        oracle.follow()
        difference = difference or oracle.differs(model, rank)
        if difference:
            return f"step {step}: {difference}"
    return ""


def _step(
    wrapped: DistributedDataParallel, call: Any, case: Case, data: list[Tensor], seed: int, scaler: torch.amp.GradScaler
) -> list[Tensor]:
    """Outputs and gradients of the inputs."""
    xs, ys = [x.clone().requires_grad_() for x in data], []
    one_region = "region" in case.options
    with minifloat.autocast() if one_region else nullcontext():
        for i, x in enumerate(xs):
            torch.manual_seed(seed + i)
            with nullcontext() if one_region or i == len(xs) - 1 else wrapped.no_sync():
                with minifloat.autocast() if "autocast" in case.options else nullcontext():
                    ys.append(call(x))
                if not one_region:
                    scaler.scale(ys[i].square().mean()).backward()
    if one_region:
        torch.stack([scaler.scale(y.square().mean()) for y in ys]).sum().backward()
    return [*(y.detach() for y in ys), *(x.grad for x in xs if x.grad is not None)]
