"""Checkpoints on disk: what is in them, which are complete, which are refused."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minifloat.tools.train import checkpoint_writer as module
from minifloat.tools.train import loop, tensor_file
from minifloat.tools.train.checkpoint import PLAIN, Checkpoint, CheckpointError, latest, locate
from minifloat.tools.train.checkpoint_writer import Checkpoints, SaveError
from minifloat.tools.train.local_tensors import LocalTensors
from minifloat.tools.train.tensor_file import Stored
from tests.helpers.checkpoint_files import MODEL, TRAINING, change_index, file_names, flip_bit, save, truncate
from tests.helpers.micro_training import CPU, losses, micro_corpus, micro_model, train_and_save
from tests.helpers.sample import each_once


def test_a_checkpoint_is_safetensors_and_json(tmp_path: Path) -> None:
    train_and_save(tmp_path, "delayed", 2, every=None)
    assert file_names(tmp_path) == ["step-00000002"]
    checkpoint = locate(tmp_path)
    assert file_names(checkpoint.path) == [PLAIN, MODEL, TRAINING]
    expected = micro_model("delayed").state_dict()
    weights, training = (load_file(checkpoint.path / name) for name in (MODEL, TRAINING))  # by the library
    assert {name: tensor.shape for name, tensor in weights.items()} == {n: t.shape for n, t in expected.items()}
    assert {"random/cpu", "random/batches", "history", "optimizer/head.weight/exp_avg"} <= set(training)
    for read, expected in ((checkpoint.model_state(), weights), (checkpoint.training_state(), training)):
        assert set(read) == set(expected)
        for name, tensor in read.items():
            assert tensor.dtype == expected[name].dtype and torch.equal(
                *(values.nan_to_num() for values in (tensor, expected[name]))
            ), name
    plain = json.loads((checkpoint.path / PLAIN).read_text())
    assert plain["step"] == 2 and plain["settings"]["recipe"] == "delayed"


def test_the_last_few_stay(tmp_path: Path) -> None:
    train_and_save(tmp_path, None, 5, every=2)
    assert file_names(tmp_path) == ["step-00000004", "step-00000005"]


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    for name in (".step-00000001.partial", ".step-mine", "step-", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    checkpoints = Checkpoints(tmp_path, {"recipe": "x"}, keep=1, files={"note.txt": b"kept along"})
    for step in (3, 4):
        saved = save(checkpoints, step)
    assert file_names(tmp_path) == [".step-mine", "notes", "step-", "step-00000004"]
    found = locate(tmp_path)
    assert found.step == 4 and found.path == saved and found.content("note.txt") == b"kept along"
    assert found.content("tokenizer.json") is None
    assert torch.equal(found.model_state()["w"], torch.ones(2)) and found.training_state()["t"].shape == (0, 3)
    assert (
        checkpoints.save(4, LocalTensors({}), LocalTensors({}), {}) == found.path and locate(tmp_path) == found
    )  # there already


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    sync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        done.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def renamed(source: Any, target: Any) -> None:
        done.append(("rename", str(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    run, partial = tmp_path / "out" / "run", tmp_path / "out" / "run" / ".step-00000001.partial"
    target = save(Checkpoints(run, {}, files={"note.txt": b"kept along"}), 1)
    synced_before = [path for what, path in done[: done.index(("rename", str(target)))] if what == "fsync"]
    assert set(synced_before) == {
        *(str(partial / name) for name in (MODEL, TRAINING, "note.txt", PLAIN)),
        *map(str, (partial, run, tmp_path, tmp_path / "out")),  # the entries of new folders
    }
    assert synced_before[-2:] == [str(partial / PLAIN), str(partial)]  # last, when all else is there
    assert done[done.index(("rename", str(target))) :] == [("rename", str(target)), ("fsync", str(run))]


# ---- saves that fail ----


def test_a_save_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, {}, keep=1)
    save(checkpoints, 1)
    with pytest.raises(SaveError, match=r"step 2 could not be written to .*not JSON serializable.*--resume"):
        save(checkpoints, 2, {"value": object()})
    assert file_names(tmp_path) == ["step-00000001"]
    save(checkpoints, 2)
    assert file_names(tmp_path) == ["step-00000002"]


def full(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The disk is full when a file of that name is written."""
    write, text = tensor_file.write_tensors, Path.write_text

    def check(path: Path) -> None:
        if path.name == name:
            path.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "write_tensors", lambda path, *rest: (check(path), write(path, *rest))[1])
    monkeypatch.setattr(Path, "write_text", lambda path, *rest: (check(path), text(path, *rest))[1])


@pytest.mark.parametrize("name", [MODEL, TRAINING, PLAIN])
def test_a_full_disk_ends_a_training_that_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole = train_and_save(tmp_path / "whole", None, 4)
    out = tmp_path / "out"
    train_and_save(out, None, 4, every=2)
    shutil.rmtree(out / "step-00000004")
    full(monkeypatch, name)
    with pytest.raises(
        SaveError, match=r"step \d could not be written to .*: .*No space left on device.*mend that.*--resume"
    ):
        train_and_save(out, None, 4)
    assert file_names(out) == ["step-00000002"]
    monkeypatch.undo()
    assert losses(train_and_save(out, None, 4)) == losses(whole)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save of step 2 ends when step 3 is done: a training that waited for it would never get there."""
    whole = train_and_save(tmp_path / "whole", "delayed", 4)
    sync, enough = module._sync, threading.Event()
    out = tmp_path / "out"

    def slow(path: Path) -> None:
        if ".step-00000002" in str(path):
            assert enough.wait(60), "step 3 was not done meanwhile"
        sync(path)

    def observe(metrics: loop.Metrics) -> None:
        if metrics.step == 3:
            assert latest(out) is None and file_names(out) == [".step-00000002.partial"]
            enough.set()

    monkeypatch.setattr(module, "_sync", slow)
    train_and_save(out, "delayed", 4, every=2, observe=observe)
    monkeypatch.undo()
    assert file_names(out) == ["step-00000002", "step-00000004"]  # the last one was awaited
    shutil.rmtree(out / "step-00000004")
    assert losses(train_and_save(out, "delayed", 4)) == losses(whole)  # step 3 changed nothing of what was saved


def test_a_save_that_fails_ends_the_training_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, TRAINING)
    steps: list[int] = []

    def observe(metrics: loop.Metrics) -> None:
        steps.append(metrics.step)
        for thread in threading.enumerate():
            if thread.name.startswith("save-"):
                thread.join()

    with pytest.raises(SaveError, match="step 2 could not be written"):
        train_and_save(tmp_path, None, 6, every=2, observe=observe)
    assert steps == [1, 2, 3] and not list(tmp_path.iterdir())


# ---- damage ----


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1 and 2; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    train_and_save(folder, "current", 2)
    return folder


def replaced(name: str, content: bytes) -> Callable[[Path], None]:
    """As an attacker would: another file, with the size and digest that belong to it."""

    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(content)
        stored = Stored.of(content)
        change_index(
            folder, lambda plain: plain["files"].update({name: {"size": stored.size, "sha256": stored.sha256}})
        )

    return spoil


def without(key: str) -> Callable[[Path], None]:
    return lambda folder: change_index(folder, lambda plain: plain.pop(key))


def linked(folder: Path) -> None:
    """A file of the checkpoint is a link out of it."""
    (folder / MODEL).rename(folder.parent / "elsewhere")
    (folder / MODEL).symlink_to(folder.parent / "elsewhere")


def names(path: str) -> Callable[[Path], None]:
    """The index names a file elsewhere that is there, and has the size and the digest."""

    def spoil(folder: Path) -> None:
        shutil.copy(folder / MODEL, folder.parent / "elsewhere")
        where = path.replace("ABSOLUTE", str(folder.parent / "elsewhere"))
        change_index(folder, lambda plain: plain["files"].update({where: plain["files"].pop(MODEL)}))

    return spoil


DEEP = "[" * 100_000 + "]" * 100_000
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda folder: truncate(folder / MODEL), r"is incomplete: model.safetensors has [\d,]+ of [\d,]+ bytes"),
    "missing": (lambda folder: (folder / TRAINING).unlink(), "is incomplete: training.safetensors is missing"),
    "a bit of the model": (
        lambda folder: flip_bit(folder / MODEL),
        "is damaged: model.safetensors has other bytes .*; copy it again",
    ),
    "a bit of the training": (
        lambda f: flip_bit(f / TRAINING, 0.9),
        "is damaged: training.safetensors has other bytes",
    ),
    "a bit of a header": (lambda f: flip_bit(f / TRAINING, 0.001), "is damaged: training.safetensors has other bytes"),
    "a bit of the index": (lambda folder: flip_bit(folder / PLAIN, 0.7), "checkpoint.json"),
    "no index": (lambda folder: (folder / PLAIN).unlink(), "it has no readable checkpoint.json"),
    "a cut index": (lambda folder: truncate(folder / PLAIN), "it has no readable checkpoint.json .JSONDecodeError"),
    "noise": (
        lambda folder: (folder / PLAIN).write_bytes(b"\xff\x00noise" * 99),
        "no readable checkpoint.json .Unicode",
    ),
    "another index": (
        lambda folder: (folder / PLAIN).write_text("[1]"),
        "is not of a minifloat checkpoint",
    ),
    "a bit of the version": (
        lambda f: flip_bit(f / PLAIN, (f / PLAIN).read_bytes().index(b"2,")),
        "its SHA-256 is not",
    ),
    "a deep index": (lambda folder: (folder / PLAIN).write_text(DEEP), "no readable checkpoint.json .RecursionError"),
    "an older version": (
        lambda f: (f / PLAIN).write_text('{"minifloat": 1}'),
        "had a pickle in them, which is not read",
    ),
    **{f"no {key}": (without(key), "checkpoint.json is damaged: KeyError") for key in ("step", "settings", "files")},
    "a step that is text": (
        lambda folder: change_index(folder, lambda plain: plain.update(step="x")),
        "json is damaged: its",
    ),
    "sizes of text": (
        lambda f: change_index(f, lambda p: p["files"][MODEL].update(size="9")),
        "json is damaged: ValueError",
    ),
    "a link": (linked, "names the file 'model.safetensors', which is not in its folder; do not trust it"),
    "a path above": (names("../elsewhere"), r"names the file '../elsewhere', which is not in its folder"),
    "a path anywhere": (names("ABSOLUTE"), "names the file '/.*, which is not in its folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_passed_over_or_refused(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    spoil, message = DAMAGES[damage]
    folder = shutil.copytree(trained, tmp_path / "copy")
    spoil(folder / "step-00000002")
    with pytest.raises(CheckpointError, match=message):
        locate(folder / "step-00000002")
    newest = latest(folder)
    assert newest is not None and newest.step == 1 and re.search(f"passed over: .*{message}", caplog.text)


def header(**tensors: Any) -> bytes:
    described = json.dumps(tensors).encode()
    return len(described).to_bytes(8, "little") + described


HOSTILE: dict[str, tuple[bytes, str]] = {
    "noise": (bytes(range(256)) * 9, "its header would have [\\d,]+ bytes, the file has 2,304"),
    "empty": (b"", "its header would have 0 bytes, the file has 0"),
    "huge": (header(w={"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}), "would be at bytes"),
    "more than there is": (header(w={"dtype": "F32", "shape": [10**30], "data_offsets": [0, 0]}), "has no shape"),
    "negative": (header(w={"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}) + bytes(4), "has no shape"),
    "shared": (
        header(**{key: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for key in "ab"}) + bytes(4),
        "at bytes",
    ),
    "a hole": (header(w={"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}) + bytes(9), "have 4 bytes, the file 9"),
    "an unknown dtype": (
        header(w={"dtype": "O", "shape": [1], "data_offsets": [0, 8]}) + bytes(8),
        "unknown dtype 'O'",
    ),
    "no offsets": (header(w={"dtype": "F32", "shape": [1]}), "data_offsets"),
    "a list": ((2).to_bytes(8, "little") + b"[]", "its header is no JSON object"),
    "deep": (len(DEEP).to_bytes(8, "little") + DEEP.encode(), "recursion"),
    "other metadata": (header(__metadata__={"parts": 1}), "its metadata is no text"),
    "deep metadata": (header(__metadata__={"parts": DEEP}), "places of a file's parts are unreadable"),
    "a part": (
        header(
            __metadata__={"parts": json.dumps({"w": [[[10**12], [0], 4]]})},
            w={"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        )
        + bytes(4),
        "tensor 'w' of shape .1000000000000. is not complete",
    ),
    "a part outside": (
        header(
            __metadata__={"parts": json.dumps({"w": [[[4], [8], 4]]})},
            w={"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        )
        + bytes(4),
        "the parts of tensor .w. have no place in it.*copy it again, or use the one before it",
    ),
    "another model": (header(w={"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}) + bytes(4), "does not fit"),
}


@each_once
@pytest.mark.parametrize("name", [MODEL, TRAINING])
@pytest.mark.parametrize("kind", HOSTILE)
def test_files_that_were_made_to_harm_end_with_an_error(trained: Path, tmp_path: Path, kind: str, name: str) -> None:
    """Their digests are right."""
    content, message = HOSTILE[kind]
    folder = shutil.copytree(trained / "step-00000002", tmp_path / "step-00000002")
    replaced(name, content)(folder)
    with pytest.raises(CheckpointError, match=message) as raised:
        train_and_save(tmp_path, "current", 2)
    assert str(folder) in str(raised.value)


def test_another_training_is_refused_by_option_and_values(trained: Path) -> None:
    start = latest(trained)
    assert start is not None
    with pytest.raises(ValueError, match=r"with --batch-size 1, this command has 2; .*without --resume"):
        Checkpoints(trained, {**start.settings, "batch_size": 2}, start=start)
    with pytest.raises(ValueError, match=r"--finish 0.0, this command has 0.2"):  # which older ones do not name
        Checkpoints(trained, {**start.settings, "finish": 0.2}, start=start)
    with pytest.raises(ValueError, match=r"--recipe current, this command has nvfp4"):
        Checkpoints(trained, {**start.settings, "recipe": "nvfp4"}, start=start)
    with pytest.raises(ValueError, match=r"--model None, this command has dim=32,layers=2"):
        Checkpoints(trained, {**start.settings, "model": {"dim": 32, "layers": 2}}, start=start)
    with pytest.raises(ValueError, match=r"was trained with text None, this command has 7 bytes"):  # not --text
        Checkpoints(trained, {**start.settings, "text": "7 bytes"}, start=start)


def test_a_folder_with_later_checkpoints_is_refused(trained: Path) -> None:
    settings = Checkpoint.read(trained / "step-00000001").settings
    for start in (None, Checkpoint.read(trained / "step-00000001")):
        with pytest.raises(ValueError, match=r"step-00000002 is of an earlier training; .*--resume.*another --out"):
            Checkpoints(trained, settings, start=start)
    with pytest.raises(ValueError, match="--save-every is 0; choose at least 1"):
        Checkpoints(trained / "new", {}, every=0)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    train_and_save(tmp_path, "current", 2, every=None)
    config = loop.TrainConfig(2, batch_size=1, learning_rate=1e-2, evaluations=2, evaluation_batches=1)
    model = micro_model()
    model.head = torch.nn.Linear(32, 8, bias=False)
    start = latest(tmp_path)
    assert start is not None
    checkpoints = Checkpoints(tmp_path, start.settings, start=start)
    with pytest.raises(ValueError, match=r"(?s)does not fit the model: .*head.weight.*resume with the options"):
        loop.train("x", model, 64, micro_corpus(), config, CPU, checkpoints=checkpoints)


def test_locate(trained: Path, tmp_path: Path) -> None:
    assert locate(trained).step == 2 and locate(trained / "step-00000001").step == 1
    with pytest.raises(ValueError, match="there is no complete checkpoint in"):
        locate(tmp_path)
    for name in ("a", "b"):
        shutil.copytree(trained, tmp_path / "checkpoints" / name)
    with pytest.raises(ValueError, match=r"has several runs; choose .*a/step-00000002 or .*b/step-00000002"):
        locate(tmp_path)
