"""The command `minifloat train` on several ranks: it is stopped and goes on, ranks die, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from minifloat.tools.cli.ranks import check_started
from minifloat.tools.cli.train_job import check_experts
from minifloat.tools.inspected import read_lines
from minifloat.tools.train import loop
from minifloat.tools.train.data import Batches
from minifloat.tools.train.model import MODELS, ModelConfig
from tests.helpers.micro_training import invoke, write_texts
from tests.helpers.train_on_ranks import SIZES, command, of_torchrun


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    monkeypatch.setitem(MODELS, "micro", SIZES)
    texts = tmp_path / "texts"
    texts.mkdir()
    return ("train", write_texts(texts), "--model", "micro", "--device", "cpu", "--batch-size", 4)


def written(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def interrupt_the_second_rank() -> None:
    """In the middle of its third step."""
    step, left = loop.train_step, [2]

    def interrupted(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and os.environ["RANK"] == "1":
            left[0] = 99
            for _ in range(2):  # its own, and torchrun's
                signal.raise_signal(signal.SIGTERM)
        return step(*arguments)

    loop.train_step = interrupted


def test_the_command_is_stopped_and_goes_on(options: tuple[object, ...], tmp_path: Path) -> None:
    out, more = tmp_path / "out", ("--recipe", "mxfp8", "--steps", 5)
    shared = (*options, *more, "--fsdp", "--out", out, "--inspect", 2)
    with command(tmp_path / "a", 2, *shared, hook=interrupt_the_second_rank) as stopped:
        assert stopped.wait() == [128 + signal.SIGINT, 128 + signal.SIGTERM], stopped.said()
    told = stopped.said()[1]
    assert "mxfp8: stopped after step 3" in told and "continue with: torchrun --nproc-per-node 2 " in told
    assert "UserWarning" not in told, told
    with command(tmp_path / "b", 2, *shared, "--resume") as finished:
        assert finished.wait() == [0, 0], finished.said()
    inspected = [
        Counter((line.step, line.place) for line in read_lines(out / "inspect" / "mxfp8") if line.rank == rank)
        for rank in (0, 1)
    ]
    assert inspected[0] == inspected[1] and {step for step, _ in inspected[0]} == {1, 3, 5}
    assert set(inspected[0].values()) == {1} and {place.role for _, place in inspected[0]} == {"X", "W", "dY"}
    assert finished.said()[0].count("mxfp8: validation loss") == 1 and not finished.said(1)[0]  # the first alone talks
    code, text = invoke(*options, *more, "--out", tmp_path / "alone")
    assert code == 0, text
    losses, expected = ([record["loss"] for record in written(each)] for each in (out, tmp_path / "alone"))
    assert len(losses) == 5 and losses == pytest.approx(expected, rel=0.01)
    report = (out / "report.md").read_text()
    assert "ranks: 2, which shard the parameters and share the batch" in report and "**passed**" in report
    parameters = re.compile(r"model: ([\d,]+) parameters")
    assert parameters.findall(report) == parameters.findall((tmp_path / "alone" / "report.md").read_text())
    code, text = invoke("generate", out, "--tokens", 3, "--temperature", 0, "--prompt", "the ", "--device", "cpu")
    assert code == 0 and text.startswith("the ")


def test_the_command_goes_on_on_one_rank(options: tuple[object, ...], tmp_path: Path) -> None:
    out, more = tmp_path / "out", ("--recipe", "mxfp8", "--save-every", 2)
    with command(tmp_path / "a", 2, *options, *more, "--etp", 2, "--steps", 2, "--out", out) as finished:
        assert finished.wait() == [0, 0], finished.said()
    assert not finished.said(1)[0]  # the first alone talks
    report = (out / "report.md").read_text()
    assert "ranks: 2, which share the batch, and 2 at a time the rows of each weight" in report and "passed" in report
    code, text = invoke(*options, *more, "--steps", 3, "--out", out, "--resume")
    assert code == 0, text


def test_the_command_shares_out_experts(options: tuple[object, ...], tmp_path: Path) -> None:
    """It goes on on one rank, which generates text, too."""
    out, more = tmp_path / "out", ("--recipe", "current", "--experts", 4, "--top-k", 2)
    with command(tmp_path / "a", 2, *options, *more, "--ep", 2, "--steps", 2, "--out", out) as finished:
        assert finished.wait() == [0, 0], finished.said()
    report = (out / "report.md").read_text()
    assert "ranks: 2, which share the batch, and 2 at a time experts" in report
    assert "**passed**" in report
    code, text = invoke(*options, *more, "--steps", 3, "--out", out, "--resume")
    assert code == 0, text
    code, text = invoke("generate", out, "--tokens", 3, "--temperature", 0, "--prompt", "the ", "--device", "cpu")
    assert code == 0 and text.startswith("the ")


@pytest.mark.parametrize(
    "ep, sizes, names, message",
    [
        (2, SIZES, ("current",), "--ep 2 shares out experts, and the model has none; give --experts"),
        (3, replace(SIZES, experts=4), ("current",), "--experts 4 cannot be shared out over --ep 3 ranks"),
        (2, replace(SIZES, experts=4), ("current", "delayed"), "--ep 2 and the recipe delayed: delayed scaling"),
    ],
)
def test_experts_that_ranks_cannot_share(ep: int, sizes: ModelConfig, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_experts(ep, sizes, names)
    check_experts(None, sizes, names)


# `micro`, with heads for two ranks, in two processes that torchrun starts
COMMAND = """
from minifloat.tools.cli import main
from tests.helpers import train_on_ranks
train_on_ranks.MODELS["micro"] = train_on_ranks.SIZES
main()
"""


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable]
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [*started, "-c", COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_command(options: tuple[object, ...], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = torchrun(*options, "--steps", 2, "--tp", 2, "--recipe", "block", "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("block: validation loss") == 1, "the first rank alone talks"
    assert "2, which share each linear; split by tokens elsewhere" in (out / "report.md").read_text()


def die_at_the_third_step() -> None:
    draw, drawn = Batches.__next__, count(1)

    def die(self: Batches) -> tuple[torch.Tensor, torch.Tensor]:
        if next(drawn) == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(self)

    Batches.__next__ = die  # type: ignore[method-assign]


def test_a_rank_that_dies_ends_the_command(options: tuple[object, ...], tmp_path: Path) -> None:
    """The other one by itself, with gloo; with NCCL torchrun ends it."""
    out = tmp_path / "out"
    more = ("--steps", 50, "--tp", 2, "--out", out)
    with command(tmp_path / "ranks", 2, *options, *more, hook=die_at_the_third_step) as started:
        for process in started.processes:
            process.join(60)
        assert started.processes[1].exitcode == -signal.SIGKILL and started.processes[0].exitcode not in (0, None)
    assert (out / "metrics.jsonl").read_text().count("\n") == 2  # it had begun
    assert not (out / "report.md").exists()


@pytest.mark.parametrize(
    "started, tp, fsdp, ep, message",
    [
        (4, 1, True, 2, "--fsdp shards all parameters over the ranks that share the batch, --ep 2 experts over some"),
        (4, 2, False, 2, "--ep 2 shares out experts, which are not tensor-parallel; use --etp in place of --tp 2"),
        (3, 1, False, 2, "--ep is 2, but torchrun has started 3; start a multiple of 2, or start 2 with: torchrun"),
        (1, 1, False, 2, "start 2 with: torchrun --nproc-per-node 2 --no-python minifloat train --ep 2 ..."),
        (2, 1, False, 0, "--ep is 0; choose 1 or more"),
    ],
)
def test_other_processes_than_experts_need(
    monkeypatch: pytest.MonkeyPatch, started: int, tp: int, fsdp: bool, ep: int, message: str
) -> None:
    for name, value in of_torchrun(0, started).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_started(tp, fsdp, None, ep)


@pytest.mark.parametrize(
    "started, tp, fsdp, etp, message",
    [
        (2, 4, False, None, "--tp is 4, but torchrun has started 2; give --tp 2, or --fsdp or --etp to share the"),
        (4, 1, False, None, "--tp is 1, but torchrun has started 4; give --tp 4, or --fsdp or --etp to share the"),
        (1, 2, False, None, "start 2 with: torchrun --nproc-per-node 2 --no-python minifloat train --tp 2 ..."),
        (4, 3, True, None, "--tp is 3, but torchrun has started 4; start a multiple of 3, or start 3 with"),
        (4, 0, True, None, "--tp is 0; choose 1 or more"),
        (0, 1, True, None, "start N with: torchrun --nproc-per-node N --no-python minifloat train --fsdp ..."),
        (4, 1, True, 2, "--fsdp shards all parameters over the ranks that share the batch, --etp 2 the rows of"),
        (3, 1, False, 2, "--etp is 2, but torchrun has started 3; start a multiple of 2, or start 2 with: torchrun"),
        (2, 2, False, 2, "--tp is 2 and --etp is 2, but torchrun has started 2; start a multiple of 4, or start 4 "),
        (1, 1, False, 2, "start 2 with: torchrun --nproc-per-node 2 --no-python minifloat train --etp 2 ..."),
        (2, 1, False, 0, "--etp is 0; choose 1 or more"),
    ],
)
def test_other_processes_than_the_options_say(
    monkeypatch: pytest.MonkeyPatch, started: int, tp: int, fsdp: bool, etp: int | None, message: str
) -> None:
    for name, value in (of_torchrun(0, started) if started else {}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_started(tp, fsdp, etp)


def test_a_context_that_ranks_cannot_split_is_a_users_mistake(options: tuple[object, ...], tmp_path: Path) -> None:
    """No traceback, on no rank."""
    short = ("--context", 1, "--tp", 2, "--out", tmp_path / "out")
    with command(tmp_path / "ranks", 2, *options, "--steps", 2, *short) as refused:
        for rank, process in enumerate(refused.processes):
            process.join(60)
            said = refused.said(rank)[1]
            assert process.exitcode == 2 and "error: 1 tokens in a sequence are too few" in said
            assert "Traceback" not in said


def test_mistakes_end_with_a_message(options: tuple[object, ...], tmp_path: Path) -> None:
    code, said = invoke(*options, "--fsdp", "--out", tmp_path / "out")
    assert code == 2 and "start N with: torchrun --nproc-per-node N" in said.replace("\n", " ")
    few = ("--batch-size", 1, "--steps", 1, "--fsdp")
    with command(tmp_path / "few", 2, *options, *few, "--out", tmp_path / "out") as refused:
        for process in refused.processes:
            process.join(60)
            assert process.exitcode == 2
    assert "1 sequences in a step are too few for 2 ranks that share them" in refused.said()[1]
