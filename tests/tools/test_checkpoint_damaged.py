"""Checkpoints that are damaged, cannot be read or are another's: what a run that goes on does with them."""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from minifloat.tools.train import loop, tensor_file
from minifloat.tools.train.checkpoint import PLAIN, CheckpointError, latest, locate
from minifloat.tools.train.checkpoint_writer import Checkpoints, SaveError
from minifloat.tools.train.loop import Run
from tests.helpers.checkpoint_files import MODEL, TRAINING, change_index, file_names, flip_bit, save, truncate
from tests.helpers.micro_training import losses, train_and_save


def test_a_run_goes_on_beyond_a_damaged_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is set aside when its step is saved again, and stays; nothing is a warning of Python's."""
    whole = train_and_save(tmp_path / "whole", None, 8)
    out = tmp_path / "out"

    def go_on(steps: int) -> Run:
        left = iter(range(steps - 1))
        return train_and_save(out, None, 8, stop=lambda: next(left, None) is None)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for damaged, damage, steps in ((3, truncate, 3), (4, flip_bit, 2), (5, flip_bit, 2), (5, truncate, 1)):
            with pytest.raises(loop.Interrupted):
                go_on(steps)
            damage(out / f"step-{damaged:08}" / MODEL)
        assert losses(go_on(99)) == losses(whole)
    assert re.search(r"set aside as .*damaged-step-0*5: .*model.safetensors", caplog.text)
    damaged = [f"damaged-step-0000000{number}" for number in ("3", "4", "5", "5-2")]
    assert file_names(out) == [*damaged, "step-00000007", "step-00000008"]


def test_keeping_does_not_count_what_is_damaged(tmp_path: Path) -> None:
    """Nor is it deleted; it is set aside when its own step is saved."""
    checkpoints = Checkpoints(tmp_path, {}, keep=2)
    for step in (1, 2):
        save(checkpoints, step)
    for step in (4, 9):
        save(Checkpoints(tmp_path, {}, keep=9, start=latest(tmp_path)), step)
        flip_bit(tmp_path / f"step-{step:08}" / MODEL)
    start = latest(tmp_path)
    assert start is not None and start.step == 2
    checkpoints = Checkpoints(tmp_path, {}, keep=2, start=start)
    for step in (3, 5, 6):
        save(checkpoints, step)
    assert file_names(tmp_path) == [f"step-{step:08}" for step in (4, 5, 6, 9)]
    save(checkpoints, 9)
    assert file_names(tmp_path) == ["damaged-step-00000009", *(f"step-{step:08}" for step in (4, 6, 9))]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES])
def test_what_cannot_be_read_for_a_moment_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Neither is it passed over, which would lose its steps, nor renamed."""
    checkpoints = Checkpoints(tmp_path, {}, keep=9)
    for step in (1, 2, 3):
        save(checkpoints, step)

    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tensor_file, "open_plain", fail)
    for action in (latest, locate):
        with pytest.raises(OSError, match=f"step-0000000. cannot be read now: .*{os.strerror(number)}.*mend that"):
            action(tmp_path)
    with pytest.raises(SaveError, match=r"step 3 could not be written.*cannot be read now"):
        save(checkpoints, 3)
    monkeypatch.undo()
    assert file_names(tmp_path) == [f"step-{step:08}" for step in (1, 2, 3)]


def test_a_save_has_not_failed_where_an_older_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, {}, keep=1)
    save(checkpoints, 1)

    def fail(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(shutil, "rmtree", fail)
    for step in (2, 3):
        assert save(checkpoints, step).is_dir()
    assert "older checkpoints than that of step 2 are not removed: " in caplog.text
    monkeypatch.undo()
    save(checkpoints, 4)
    assert file_names(tmp_path) == ["step-00000004"]


@pytest.mark.parametrize("version", [1, 2, 4])
def test_checkpoints_of_another_version_stay(tmp_path: Path, version: int) -> None:
    old = save(Checkpoints(tmp_path, {}), 1)
    change_index(old, lambda plain: plain.update(minifloat=version))
    why = "of an older minifloat" if version == 1 else f"is of version {version}, this"
    with pytest.raises(CheckpointError, match=why):
        Checkpoints(tmp_path, {})
    assert latest(tmp_path) is None


def test_a_link_in_place_of_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    checkpoints = Checkpoints(run, {}, keep=1)
    save(checkpoints, 1)
    (run / "step-00000001").rename(elsewhere)
    (run / "step-00000001").symlink_to(elsewhere)
    (run / ".step-00000009.partial").symlink_to(elsewhere)
    save(checkpoints, 2)
    assert file_names(run) == ["step-00000002"] and file_names(elsewhere) == [PLAIN, MODEL, TRAINING]
