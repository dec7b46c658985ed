"""A training that takes a moment: shared by the tests of the loop, of checkpoints and of generation."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from minifloat.recipe import named
from minifloat.tools.train import checkpoint_writer, data
from minifloat.tools.train.checkpoint import latest
from minifloat.tools.train.checkpoint_writer import Checkpoints
from minifloat.tools.train.loop import Run, TrainConfig, train
from minifloat.tools.train.model import MODELS, Transformer

MICRO = MODELS["micro"]
CPU = torch.device("cpu")
TEXTS = {
    "a.txt": "def double(number):\n    return 2 * number\n" * 400,
    "b.txt": "the quick brown fox jumps over the lazy dog\n" * 400,
}


def micro_model(recipe: str | None = None, seed: int = 0) -> Transformer:
    chosen = None if recipe is None else named(recipe)
    return Transformer(MICRO, chosen, seed=seed)


def write_texts(folder: Path) -> Path:
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def save_tokenizer(path: Path) -> Path:
    """A byte-level BPE tokenizer of at most 300 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS.values(), trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    made.save(str(path))
    return path


def micro_corpus() -> data.Corpus:
    text = torch.frombuffer(bytearray("\n".join(TEXTS.values()), "ascii"), dtype=torch.uint8)
    return data.Corpus(*data.split(text), "two texts")


def train_and_save(folder: Path, recipe: str | None, steps: int, *, every: int | None = 1, **more: Any) -> Run:
    """Trains `steps` steps on the CPU, from the newest checkpoint in `folder` on."""
    config = TrainConfig(steps, batch_size=1, learning_rate=1e-2, evaluations=2, evaluation_batches=1)
    checkpoints = Checkpoints(folder, {"recipe": recipe} | config.settings(), every, start=latest(folder))
    name = recipe or "bf16"
    return train(name, micro_model(recipe), MICRO.context, micro_corpus(), config, CPU, checkpoints=checkpoints, **more)


def losses(run: Run) -> list[tuple[float, float, float | None]]:
    """Everything of a run's history that its computation decides."""
    return [(m.loss, m.gradient_norm, m.validation_loss) for m in run.history]


def train_in_child(folder: Path, recipe: str, steps: int, slow_saves: bool = False) -> None:
    """What a child process runs until it is killed; on request its save of the second step takes seconds."""
    torch.set_num_threads(1)
    if slow_saves:
        sync = checkpoint_writer._sync

        def slow(path: Path) -> None:
            time.sleep(0.5 if ".step-00000002" in str(path) else 0.0)
            sync(path)

        checkpoint_writer._sync = slow
    train_and_save(folder, recipe, steps)


def invoke(*arguments: object) -> tuple[int, str]:
    """Exit code and output of the `minifloat` command with these arguments."""
    from typer.testing import CliRunner

    from minifloat.tools.cli import build

    result = CliRunner().invoke(build(), [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output
