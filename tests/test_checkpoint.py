"""Checkpoints on disk: what is in them, which are complete, which are refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from minifloat.train import loop
from minifloat.train.checkpoint import MODEL, PLAIN, TRAINING, Checkpoint, Checkpoints, complete, latest, locate
from tests.micro_training import CPU, micro_corpus, micro_model, train_and_save


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_safetensors_and_tensors_of_dcp(tmp_path: Path) -> None:
    train_and_save(tmp_path, "delayed", 2, every=None)
    assert files_of(tmp_path) == ["step-00000002"]
    checkpoint = locate(tmp_path)
    expected = micro_model("delayed").state_dict()
    weights = load_file(checkpoint.path / MODEL)
    assert {name: tensor.shape for name, tensor in weights.items()} == {n: t.shape for n, t in expected.items()}
    described = FileSystemReader(checkpoint.path / TRAINING).read_metadata().state_dict_metadata
    assert all(isinstance(each, TensorStorageMetadata) for each in described.values())
    assert {"random/cpu", "random/batches", "history", "optimizer/head.weight/exp_avg"} <= set(described)
    plain = json.loads((checkpoint.path / PLAIN).read_text())
    assert plain["step"] == 2 and plain["settings"]["recipe"] == "delayed"


def test_the_last_few_stay(tmp_path: Path) -> None:
    train_and_save(tmp_path, None, 5, every=2)
    assert files_of(tmp_path) == ["step-00000004", "step-00000005"]


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    for name in (".step-00000001.partial", ".step-mine", "step-", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    checkpoints = Checkpoints(tmp_path, {"recipe": "x"}, keep=1, files={"note.txt": b"kept along"})
    for step in (3, 4):
        checkpoints.save(step, {"w": torch.ones(2)}, {"t": torch.zeros(0, 3)}, {"gemms": []})
    assert files_of(tmp_path) == [".step-mine", "notes", "step-", "step-00000004"]
    found = locate(tmp_path)
    assert found.step == 4 and (found.path / "note.txt").read_bytes() == b"kept along"
    assert torch.equal(found.model_state()["w"], torch.ones(2)) and found.training_state()["t"].shape == (0, 3)
    assert checkpoints.save(4, {}, {}, {}) == found.path  # there already


def test_a_save_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, {}, keep=1)
    checkpoints.save(1, {"w": torch.ones(2)}, {"t": torch.ones(1)}, {})
    with pytest.raises(TypeError):
        checkpoints.save(2, {"w": torch.ones(2)}, {"t": torch.ones(1)}, {"value": object()})
    assert [each.step for each in complete(tmp_path)] == [1]
    checkpoints.save(2, {"w": torch.ones(2)}, {"t": torch.ones(1)}, {})
    assert files_of(tmp_path) == ["step-00000002"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1 and 2; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    train_and_save(folder, "current", 2)
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda folder: cut(folder / MODEL), r"is incomplete: model.safetensors has [\d,]+ of [\d,]+ bytes"),
        (lambda folder: (folder / TRAINING / ".metadata").unlink(), r"is incomplete: training/.metadata is missing"),
        (lambda folder: (folder / PLAIN).unlink(), "is no checkpoint of minifloat: it has no readable checkpoint.json"),
        (lambda folder: cut(folder / PLAIN), "it has no readable checkpoint.json"),
        (lambda folder: (folder / PLAIN).write_text("[1]"), "is not of a minifloat checkpoint of version 1"),
    ],
)
def test_what_is_incomplete_is_passed_over_or_refused(
    trained: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    folder = shutil.copytree(trained, tmp_path / "copy")
    spoil(folder / "step-00000002")
    with pytest.raises(ValueError, match=message):
        locate(folder / "step-00000002")
    with pytest.warns(UserWarning, match=f"passed over: .*{message}"):
        newest = latest(folder)
    assert newest is not None and newest.step == 1


def test_another_training_is_refused_by_option_and_values(trained: Path) -> None:
    start = latest(trained)
    assert start is not None
    with pytest.raises(ValueError, match=r"with --batch-size 1, this command has 2; .*without --resume"):
        Checkpoints(trained, {**start.settings, "batch_size": 2}, start=start)
    with pytest.raises(ValueError, match=r"--recipe current, this command has nvfp4"):
        Checkpoints(trained, {**start.settings, "recipe": "nvfp4"}, start=start)
    with pytest.raises(ValueError, match=r"--model None, this command has dim=32,layers=2"):
        Checkpoints(trained, {**start.settings, "model": {"dim": 32, "layers": 2}}, start=start)
    with pytest.raises(ValueError, match=r"was trained with text None, this command has 7 bytes"):  # not --text
        Checkpoints(trained, {**start.settings, "text": "7 bytes"}, start=start)


def test_without_safetensors_a_message_says_so(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "safetensors" else find(name))
    for use in (locate(trained).model_state, lambda: Checkpoints(tmp_path, {})):
        with pytest.raises(ValueError, match=r"need safetensors; get it with: pip install minifloat\[train\]"):
            use()


def test_a_folder_with_later_checkpoints_is_refused(trained: Path) -> None:
    settings = Checkpoint.read(trained / "step-00000001").settings
    for start in (None, Checkpoint.read(trained / "step-00000001")):
        with pytest.raises(ValueError, match=r"step-00000002 is of an earlier training; .*--resume.*another --out"):
            Checkpoints(trained, settings, start=start)
    with pytest.raises(ValueError, match="save_every is 0; choose at least 1"):
        Checkpoints(trained / "new", {}, every=0)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    train_and_save(tmp_path, "current", 2, every=None)
    config = loop.TrainConfig(2, batch_size=1, learning_rate=1e-2, evaluations=2, evaluation_batches=1)
    model = micro_model()
    model.head = torch.nn.Linear(32, 8, bias=False)
    start = latest(tmp_path)
    assert start is not None
    checkpoints = Checkpoints(tmp_path, start.settings, start=start)
    with pytest.raises(ValueError, match=r"(?s)does not fit the model: .*head.weight"):
        loop.train("x", model, 64, micro_corpus(), config, CPU, checkpoints=checkpoints)


def test_locate(trained: Path, tmp_path: Path) -> None:
    assert locate(trained).step == 2 and locate(trained / "step-00000001").step == 1
    with pytest.raises(ValueError, match="there is no complete checkpoint in"):
        locate(tmp_path)
    for name in ("a", "b"):
        shutil.copytree(trained, tmp_path / "checkpoints" / name)
    with pytest.raises(ValueError, match=r"has several runs; choose .*a/step-00000002 or .*b/step-00000002"):
        locate(tmp_path)
