"""A whole step of a training as one CUDA graph: losses, gradients, clipping and the optimizer."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minifloat.functional import Gemm, count_gemms
from minifloat.graphs import capture
from minifloat.tools.train.ranks import Ranks
from minifloat.tools.train.run import TrainConfig
from minifloat.tools.train.step import Batch, clipped_gradients, imbalance_of, update_expert_biases


def check_capture(device: torch.device, ranks: Ranks) -> None:
    """Raises ValueError where no step can be captured."""
    if device.type != capture.Graph.device_type:
        raise ValueError(f"--cuda-graph needs an NVIDIA GPU, and the device is {device}; leave it out")
    if not ranks.alone:
        raise ValueError(
            f"--cuda-graph captures the steps of one process, and this is one of {ranks.size}; leave it out"
        )


class StepResult(NamedTuple):
    """Measurements of a step: the loss, the gradient norm before clipping, the imbalance of experts, and its GEMMs."""

    loss: float
    norm: float
    imbalance: float | None
    gemms: Counter[Gemm]


class CapturedStep:
    """`train_step` as a CUDA graph, with the same results to the bit; called with a batch and a learning rate.

    The first call runs it uncaptured, which is the warm-up, the second one captures it; all but the first replay it.
    The optimizer is AdamW. Its learning rate is a tensor on the device, and a flag there keeps a step whose loss or
    gradient norm is not finite from changing anything.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, device: torch.device
    ) -> None:
        self.model, self.optimizer, self.config, self.device = model, optimizer, config, device
        self.stream = capture.Graph.Stream(device)
        self.rate = torch.zeros((), dtype=torch.float32, device=device)
        self.batch: Batch | None = None
        self.graph: capture.Graph | None = None
        self.result: list[Tensor] = []
        self.gemms: Counter[Gemm] = Counter()

    def __call__(self, batch: Batch, rate: float) -> StepResult:
        """Waits for the device.

        Raises:
            ValueError: the model cannot be captured.
        """
        self.rate.fill_(rate)
        if self.batch is None:
            inputs, targets = (part.to(self.device) for part in batch)
            self.batch = inputs, targets
            with self.stream.current(), count_gemms() as self.gemms:
                result = self._compute()
        else:
            for own, part in zip(self.batch, batch, strict=True):
                own.copy_(part)
            if self.graph is None:
                self._capture()
            assert self.graph is not None
            self.graph.replay()
            result = self.result
        loss, norm, *imbalance = torch.stack(result).tolist()
        return StepResult(loss, norm, imbalance[0] if imbalance else None, Counter(self.gemms))

    def _capture(self) -> None:
        captured = capture.Graph(self.stream)
        for group in self.optimizer.param_groups:
            group["capturable"] = True  # its step counts are on the device
        try:
            self.result = captured.capture(self._compute)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(f"--cuda-graph: this model cannot be captured, leave it out: {error}") from error
        self.graph = captured

    def _compute(self) -> list[Tensor]:
        """The step; loss, norm and maybe imbalance."""
        assert self.batch is not None
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        measured = clipped_gradients(self.model, self.batch, self.config, self.device)
        bad = (~measured.isfinite()).any()
        found = bad.to(torch.float32)
        self.optimizer.found_inf = found  # type: ignore[attr-defined] # what GradScaler gives it: PyTorch's own reads it
        self.optimizer.step()
        del self.optimizer.found_inf  # type: ignore[attr-defined]
        self.optimizer.zero_grad(set_to_none=True)
        update_expert_biases(self.model, bad=bad)
        imbalance = imbalance_of(self.model)
        return [*measured.unbind(), *([] if imbalance is None else [imbalance.to(torch.float32)])]
