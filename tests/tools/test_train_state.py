"""What a checkpoint says of a training is checked before it is used: hostile files, whose digests are right."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from minifloat.tools.cli.resume import choose
from minifloat.tools.train import loop
from minifloat.tools.train.checkpoint import CheckpointError, locate
from minifloat.tools.train.checkpoint_writer import Checkpoints, Saver
from minifloat.tools.train.data import Batches
from minifloat.tools.train.local_tensors import assemble
from minifloat.tools.train.ranks import ALONE
from minifloat.tools.train.state import TrainState
from minifloat.tools.train.tensor_file import Stored
from tests.helpers.checkpoint_files import change_index
from tests.helpers.micro_training import CPU, micro_corpus, train_and_save

TRAINING = "training.safetensors"
MOMENT = "optimizer/head.weight/exp_avg"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two steps; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    train_and_save(folder, None, 2, every=None)
    return folder / "step-00000002"


def change_training(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the tensors of a training as an attacker would, with the size and digest that belong to them."""
    tensors = load_file(folder / TRAINING)
    change(tensors)
    content = save(tensors)
    (folder / TRAINING).write_bytes(content)
    stored = Stored.of(content)
    change_index(folder, lambda plain: plain["files"][TRAINING].update(size=stored.size, sha256=stored.sha256))


def drop_optimizer(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("optimizer/")]:
        del tensors[name]


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "a small moment": (
        lambda t: t.update({MOMENT: torch.zeros(1, 1)}),
        rf"{MOMENT} is torch.float32 of shape \[1, 1\]",
    ),
    "a flat moment": (lambda t: t.update({MOMENT: t[MOMENT].flatten()}), rf"{MOMENT} is torch.float32 of shape"),
    "a moment of bytes": (lambda t: t.update({MOMENT: t[MOMENT].to(torch.uint8)}), rf"{MOMENT} is torch.uint8 of"),
    "no moment": (lambda t: t.pop(MOMENT), rf"KeyError: '{MOMENT}'"),
    "no optimizer": (drop_optimizer, "KeyError: 'optimizer/"),
    "two steps": (
        lambda t: t.update({"optimizer/head.weight/step": torch.ones(2)}),
        r"weight/step is .*of shape \[2\]",
    ),
    "an endless history": (lambda t: t["history"][0].fill_(math.inf), "OverflowError"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_do_not_fit_are_refused(trained: Path, tmp_path: Path, kind: str) -> None:
    change, message = TENSORS[kind]
    folder = shutil.copytree(trained, tmp_path / trained.name)
    change_training(folder, change)
    with pytest.raises(CheckpointError, match=message) as raised:
        train_and_save(tmp_path, None, 3, every=None)
    assert str(folder) in str(raised.value) and "resume with the options" in str(raised.value)


VALUES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "infinite memory": (lambda plain: plain["values"].update(peak_bytes=math.inf), "TypeError: 'float' object cannot"),
    "memory of text": (lambda plain: plain["values"].update(peak_bytes="1"), "TypeError: 'str' object cannot"),
    "GEMMs counted in text": (
        lambda plain: plain["values"].update(gemms=[["fprop", "a", "b", "c", "7"]]),
        "TypeError: 'str'",
    ),
    "GEMMs of too few words": (lambda plain: plain["values"].update(gemms=[["fprop", 7]]), "TypeError"),
    "a negative step": (lambda plain: plain.update(step=-2), "is damaged: its step"),
    "a step too far": (lambda plain: plain.update(step=10**17), "is of step 1000.*, which is not the one of its name"),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_that_are_none_are_refused(trained: Path, tmp_path: Path, kind: str) -> None:
    change, message = VALUES[kind]
    folder = shutil.copytree(trained, tmp_path / trained.name)
    change_index(folder, change)
    with pytest.raises(CheckpointError, match=message) as raised:
        locate(folder)
        train_and_save(tmp_path, None, 3, every=None)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    "key, message", [("model", r"has the weights of a model with --model \['x'\]"), ("recipe", "is")]
)
def test_settings_of_another_kind_are_refused(trained: Path, tmp_path: Path, key: str, message: str) -> None:
    folder = shutil.copytree(trained, tmp_path / trained.name)
    settings = {"recipe": "bf16", "model": {"dim": 32}}
    change_index(folder, lambda plain: plain.update(settings=settings | {key: ["x"]}))
    with pytest.raises(ValueError, match=f"{folder} {message}"):
        choose({"bf16": settings | {"seed": 1}}, tmp_path / "out", False, folder)


class Idle(nn.Module):
    """A model with a parameter that never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))


def test_a_parameter_without_gradients_has_no_moments(tmp_path: Path) -> None:
    model, config = Idle(), loop.TrainConfig(1, learning_rate=1e-2)
    stream = Batches(micro_corpus().train, 1, 8, 0)
    state = TrainState(model, loop.make_optimizer(model, config), stream, CPU)
    model.used.grad = torch.ones(3, 2)
    state.optimizer.step()
    state.history.append(loop.Metrics(1, 0.5, 1.0, 1e-2, 0.1, 7.0))
    saver = Saver(Checkpoints(tmp_path, {}), ALONE)
    state.save(saver, None)
    saver.wait()
    other = TrainState(Idle(), loop.make_optimizer(Idle(), config), stream, CPU)
    other.optimizer = loop.make_optimizer(other.model, config)
    other.load(locate(tmp_path))
    assert torch.equal(other.model.used, model.used) and list(other._optimizer_states()) == ["used"]
    assert torch.equal(other._optimizer_states()["used"]["exp_avg"], state._optimizer_states()["used"]["exp_avg"])


@pytest.mark.parametrize("second", [0, 1, -3])
def test_parts_that_overlap_are_refused(second: int) -> None:
    """Their elements are as many as the whole has; the rows that none has were never written."""
    files = [({"w": torch.ones(2, 3)}, {"parts": json.dumps({"w": [[[4, 3], [row, 0], 2]]})}) for row in (0, second)]
    with pytest.raises(ValueError, match="the parts of tensor 'w' overlap"):
        assemble(files)


def test_parts_in_any_order_are_joined() -> None:
    whole = torch.arange(24.0).view(4, 6)
    places = [(0, 4), (3, 0), (0, 0), (3, 4)]
    pieces = [whole[:3, 4:], whole[3:, :4], whole[:3, :4], whole[3:, 4:]]
    files = [
        ({"w": piece}, {"parts": json.dumps({"w": [[[4, 6], list(start), len(piece)]]})})
        for start, piece in zip(places, pieces, strict=True)
    ]
    assert torch.equal(assemble(files)["w"], whole)


def test_rows_of_a_part_may_lie_apart() -> None:
    """As a tensor-parallel rank's rows of query, key and value, which are one weight."""
    whole = torch.arange(24.0).view(6, 4)
    files = [
        ({"w": whole[rows]}, {"parts": json.dumps({"w": [[[6, 4], [first, 0], 2], [[6, 4], [last, 0], 1]]})})
        for rows, first, last in (([0, 1, 4], 0, 4), ([2, 3, 5], 2, 5))
    ]
    assert torch.equal(assemble(files)["w"], whole)
