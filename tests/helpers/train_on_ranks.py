"""Trainings on several ranks: in the workers of a pool, and as the command, in processes like those of torchrun."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minifloat.recipe import named
from minifloat.tools.train.checkpoint import latest
from minifloat.tools.train.checkpoint_writer import Checkpoints
from minifloat.tools.train.loop import TrainConfig, train
from minifloat.tools.train.model import MODELS, ModelConfig
from minifloat.tools.train.ranks import ALONE, Ranks, etp_rows, is_dtensor
from tests.helpers.children import children
from tests.helpers.micro_training import CPU, MICRO, micro_corpus

SIZES = replace(MICRO, heads=2, kv_heads=2)  # for two tensor-parallel ranks
CONFIG = TrainConfig(4, batch_size=2, learning_rate=1e-2, evaluations=2, evaluation_batches=1)


class Outcome(NamedTuple):
    """Of each step the loss and the gradient norm, where measured the validation loss; parameters of one process.

    ``parameters``, and how many they are, are those of the whole model; on the first rank alone.
    """

    losses: list[float]
    norms: list[float]
    validation: list[float]
    parameters: dict[str, Tensor]
    count: int
    gemms: int

    @property
    def numbers(self) -> Tensor:
        return torch.tensor([*self.losses, *self.norms, *self.validation])


def run(
    rank: int,
    world_size: int,
    recipe: str | None,
    config: TrainConfig = CONFIG,
    tp: int = 1,
    sequence_parallel: bool = True,
    folder: Path | None = None,
    context: int = MICRO.context,
    etp: int | None = None,
    sizes: ModelConfig = SIZES,
    ep: int | None = None,
) -> Outcome:
    """A training from the newest checkpoint in ``folder`` on, which saves every second step there."""
    ranks = ALONE if world_size == 1 else Ranks.of_world(CPU, tp, sequence_parallel, etp=etp, ep=ep)
    model = sizes.make(None if recipe is None else named(recipe), 3, ranks)
    checkpoints = None
    if folder is not None:
        checkpoints = Checkpoints(folder, {"of": "a test"}, 2, keep=9, start=latest(folder))
    result = train("micro", model, context, micro_corpus(), config, CPU, checkpoints=checkpoints, ranks=ranks)
    parameters = dict(model.named_parameters())
    gathered = {name: whole(parameter.detach(), parameter, ranks) for name, parameter in parameters.items()}
    if ranks.ep.size > 1:
        of_all: list[Any] = [None] * ranks.ep.size
        dist.all_gather_object(of_all, gathered, group=ranks.ep.process_group)
        gathered = {name: tensor for of_rank in of_all for name, tensor in of_rank.items()}
    validation = [m.validation_loss for m in result.history if m.validation_loss is not None]
    return Outcome(
        [m.loss for m in result.history], [m.gradient_norm for m in result.history], validation,
        gathered if ranks.first else {}, result.parameters, sum(result.gemms.values()),
    )  # fmt: skip


def whole(tensor: Tensor, parameter: Tensor, ranks: Ranks) -> Tensor:
    """What all ranks together have of a parameter, gathered by PyTorch; a collective."""
    tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    if etp_rows(parameter) is not None:
        shards: list[Any] = [None] * ranks.etp.size
        dist.all_gather_object(shards, tensor, group=ranks.etp.process_group)
        tensor = torch.cat(shards)
    cut = ranks.partition(parameter)
    if cut is None:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(ranks.tp.size)]
    dist.all_gather(parts, tensor.contiguous(), group=ranks.tp.process_group)
    pieces = zip(*[part.split([length // cut.size for length in cut.parts], cut.dim) for part in parts], strict=True)
    return torch.cat([piece for of_all in pieces for piece in of_all], cut.dim)


def close(mine: Outcome, other: Outcome, numbers: float, parameters: float) -> None:
    """Losses and norms up to a relative, parameters up to an absolute difference."""
    torch.testing.assert_close(mine.numbers, other.numbers, rtol=numbers, atol=0)
    for name, parameter in other.parameters.items():
        torch.testing.assert_close(mine.parameters[name], parameter, rtol=0, atol=parameters, msg=name)


# ---- the command ----


class Command:
    """``minifloat`` on so many ranks; what they write is in ``folder``."""

    def __init__(self, folder: Path, ranks: int, *arguments: object, hook: Callable[[], None] | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        words = [str(argument) for argument in arguments]
        self.processes = [
            children().Process(target=_rank, args=(folder, rank, ranks, port, words, hook)) for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def wait(self, timeout: float = 100) -> list[int]:
        """The exit codes of all ranks; kills, as torchrun would, what is left when one has failed."""
        for process in self.processes:
            process.join(timeout)
            if process.exitcode != 0:
                break
        self.kill()
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def said(self, rank: int = 0) -> tuple[str, str]:
        """What a rank wrote to its standard output, and to its standard error."""
        out, err = ((self.folder / f"rank-{rank}.{stream}").read_text() for stream in ("out", "err"))
        return out, err


@contextmanager
def command(folder: Path, ranks: int, *arguments: object, hook: Callable[[], None] | None = None) -> Iterator[Command]:
    """Starts one, and leaves no process behind."""
    started = Command(folder, ranks, *arguments, hook=hook)
    try:
        yield started
    finally:
        started.kill()


def of_torchrun(rank: int, ranks: int, port: int = 0) -> dict[str, str]:
    """What torchrun tells a process that it starts."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    names = {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost"}
    return {name: str(value) for name, value in place.items()} | names


@contextmanager
def launched(
    folder: Path, ranks: int, *arguments: object, hook: Callable[[], None] | None = None
) -> Iterator[tuple[Any, int]]:
    """The first of so many ranks in a process that another one starts, as torchrun does: that one, and the rank's id.

    Both are killed at the end.
    """
    words, (receiver, sender) = [str(argument) for argument in arguments], children().Pipe(duplex=False)
    launcher = children().Process(target=_launch, args=(sender, folder, ranks, words, hook))
    launcher.start()
    rank = receiver.recv()
    try:
        yield launcher, rank
    finally:
        launcher.kill()
        launcher.join()
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def _launch(sender: Any, folder: Path, ranks: int, arguments: list[str], hook: Callable[[], None] | None) -> None:
    os.environ.update(of_torchrun(0, ranks))
    rank = multiprocessing.get_context("fork").Process(target=_rank, args=(folder, 0, 1, 0, arguments, hook))
    rank.start()
    sender.send(rank.pid)
    rank.join()


def _rank(
    folder: Path, rank: int, ranks: int, port: int, arguments: list[str], hook: Callable[[], None] | None
) -> None:
    from minifloat.tools.cli import main

    torch.set_num_threads(1)
    for stream, descriptor in (("out", 1), ("err", 2)):
        file = os.open(folder / f"rank-{rank}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    if ranks > 1:
        os.environ.update(of_torchrun(rank, ranks, port))
    MODELS["micro"] = SIZES
    sys.argv = ["minifloat", *arguments]
    if hook is not None:
        hook()
    main()
