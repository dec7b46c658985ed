"""All that a training changes: what a checkpoint holds, and how one step is taken back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.delayed import AmaxHistory
from minifloat.functional import Gemm
from minifloat.tools.train.checkpoint import Checkpoint, CheckpointError
from minifloat.tools.train.checkpoint_writer import Saver
from minifloat.tools.train.data import Batches
from minifloat.tools.train.ranks import ALONE, Ranks
from minifloat.tools.train.run import Metrics
from minifloat.tools.train.weights import load_weights

MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW has of a parameter


@dataclass
class TrainState:
    """A training between two steps. It draws its random numbers from PyTorch's generators of the CPU and `device`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    stream: Batches
    device: torch.device
    ranks: Ranks = ALONE
    history: list[Metrics] = field(default_factory=list)
    gemms: Counter[Gemm] = field(default_factory=Counter)
    peak_bytes: int = 0  # of the processes before this one

    def __post_init__(self) -> None:
        self._delayed = [module for module in self.model.modules() if isinstance(module, AmaxHistory)]
        self.mark()

    @property
    def step(self) -> int:
        """Number of steps that are done."""
        return len(self.history)

    def save(self, saver: Saver, peak_bytes: int | None) -> Path:
        """Begins to write a copy; returns the folder that will be there."""
        saver.wait()  # before the copy, which takes memory
        model = self.ranks.local_tensors(self.model.state_dict(), dict(self.model.named_parameters()))
        training = self._optimizer_tensors() | self._random() | {"history": history_tensor(self.history)}
        gemms = [[*key, count] for key, count in sorted(self.gemms.items())]
        unused = sorted(set(self._parameter_names()) - set(self._optimizer_states()))
        values = {"gemms": gemms, "peak_bytes": peak_bytes or 0, "unused": unused}
        return saver.save(self.step, model, self.ranks.local_tensors(training, self._of_optimizer()), values)

    def load(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError when the files are damaged, or not of this model."""
        training, parameters = checkpoint.training_state(), dict(self.model.named_parameters())
        model = checkpoint.model_state()
        try:
            self.model.load_state_dict(self.ranks.shard(model, parameters))
            self._load_optimizer(training, checkpoint.values.get("unused", []))
            self._set_random(training)
            self.history = read_history(training["history"])
            self.gemms = Counter({Gemm(*map(str, key)): index(count) for *key, count in checkpoint.values["gemms"]})
            self.peak_bytes = index(checkpoint.values["peak_bytes"])
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(
                f"{checkpoint.path} does not fit the model: {type(error).__name__}: {error}; resume with the options "
                "that it was trained with"
            ) from error
        steps = [metrics.step for metrics in self.history]
        if len(steps) != checkpoint.step or steps != list(range(1, len(steps) + 1)):
            raise CheckpointError(f"{checkpoint.path} is of step {checkpoint.step}, but its history is another's")

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """The model's parameters alone, as the start of another run; raises ValueError when they do not fit."""
        weights = self.ranks.shard(checkpoint.model_state(), dict(self.model.named_parameters()))
        load_weights(self.model, weights, checkpoint.path)

    def mark(self) -> None:
        """Remembers what a step changes before the optimizer: random numbers, data, delayed scaling's buffers."""
        buffers = [buffer.flatten() for buffer in self._buffers()]
        self._marked = self._random(), torch.cat(buffers) if buffers else None

    def rewind(self) -> None:
        """Takes back, since `mark`, all but parameters and the optimizer's state."""
        random, buffers = self._marked
        self._set_random(random)
        if buffers is not None:
            current = list(self._buffers())
            for buffer, before in zip(current, buffers.split([b.numel() for b in current]), strict=True):
                buffer.copy_(before.view_as(buffer))
        self.optimizer.zero_grad(set_to_none=True)

    def _buffers(self) -> Iterator[Tensor]:
        return (buffer for module in self._delayed for buffer in (module.scale, module.amax_history))

    def _random(self) -> dict[str, Tensor]:
        states = {"random/cpu": torch.get_rng_state(), "random/batches": self.stream.generator.get_state()}
        if self.device.type == "cuda":
            states["random/cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def _set_random(self, states: dict[str, Tensor]) -> None:
        torch.set_rng_state(states["random/cpu"])
        self.stream.generator.set_state(states["random/batches"])
        if self.device.type == "cuda" and "random/cuda" in states:  # a run may continue on another device
            torch.cuda.set_rng_state(states["random/cuda"], self.device)

    def _parameter_names(self) -> list[str]:
        """Names of parameters by the optimizer's numbers."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [names[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]

    def _optimizer_states(self) -> dict[str, dict[str, Tensor]]:
        """States by the parameter's name; one that has never had a gradient, as an expert without tokens, has none."""
        names = self._parameter_names()
        return {names[i]: state for i, state in self.optimizer.state_dict()["state"].items()}

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        states = self._optimizer_states()
        return {f"optimizer/{name}/{key}": value for name, state in states.items() for key, value in state.items()}

    def _of_optimizer(self) -> dict[str, Tensor]:
        """The parameter of each of the optimizer's tensors."""
        states, parameters = self._optimizer_states(), dict(self.model.named_parameters())
        return {f"optimizer/{name}/{key}": parameters[name] for name, state in states.items() for key in state}

    def _load_optimizer(self, tensors: dict[str, Tensor], unused: list[str]) -> None:
        """Raises ValueError for tensors that are not AdamW's: its fused kernel would write beyond smaller ones."""
        states: dict[int, dict[str, Tensor]] = {}
        parameters = dict(self.model.named_parameters())
        for i, name in enumerate(self._parameter_names()):
            if name in unused:
                continue
            parameter, state = parameters[name], {key: tensors[f"optimizer/{name}/{key}"] for key in MOMENTS}
            for key, tensor in state.items():
                shape, dtype = ([], torch.float32) if key == "step" else (self.ranks.shape(parameter), parameter.dtype)
                if list(tensor.shape) != shape or tensor.dtype != dtype:
                    found = f"{tensor.dtype} of shape {list(tensor.shape)}"
                    raise ValueError(f"optimizer/{name}/{key} is {found}, not {dtype} of {shape}")
            states[i] = self.ranks.shard(state, dict.fromkeys(state, parameter))
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": states})


@contextmanager
def own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, PyTorch's generators of the CPU and `device` start from `seed`; afterwards they are as they were."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        seed_generators(seed, device)
        yield


def seed_generators(seed: int, device: torch.device) -> None:
    """PyTorch's generators of the CPU and `device` start from `seed`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def history_tensor(history: list[Metrics]) -> Tensor:
    """float64 [steps, fields]; NaN where nothing was measured."""
    rows = [[math.nan if value is None else float(value) for value in astuple(metrics)] for metrics in history]
    return torch.tensor(rows, dtype=torch.float64).view(len(rows), len(fields(Metrics)))


def read_history(rows: Tensor) -> list[Metrics]:
    """The inverse of `history_tensor`."""
    names = [each.name for each in fields(Metrics)]
    least = names.index("validation_loss") + 1  # what the first checkpoints had
    if not least <= rows.shape[-1] <= len(names):
        raise ValueError(f"a history has {rows.shape[-1]} columns; {least} to {len(names)} are known")
    records: list[dict[str, Any]] = [dict(zip(names, row, strict=False)) for row in rows.tolist()]
    for record in records:
        record["step"] = int(record["step"])
        for name in ("validation_loss", "imbalance"):
            record[name] = None if math.isnan(record.get(name, math.nan)) else record[name]
    return [Metrics(**record) for record in records]
