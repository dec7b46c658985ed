"""Joining the ranks that torchrun has started for one command."""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from minifloat.tools.cli.names import TIMEOUT
from minifloat.tools.train.ranks import ALONE, Ranks

T = TypeVar("T")
MOST_MINUTES = 7 * 24 * 60
PATIENCE = timedelta(hours=1)
"""Until the first step is done, and after the last: ranks read, load, compile and report at speeds of their own."""


@contextmanager
def joined(
    tp: int, fsdp: bool, etp: int | None, ep: int | None, sequence_parallel: bool, device: torch.device,
    timeout: float = TIMEOUT,
) -> Iterator[tuple[Ranks, torch.device]]:  # fmt: skip
    """The ranks of this command and the device of this one; inside, all but the first one's standard output is lost.

    A rank that hangs is noticed after `timeout` minutes, and of ranks that die torchrun ends the others. With several
    ranks the end of this context is that of the process.

    Raises:
        ValueError: torchrun has not started `tp` processes, with `fsdp` a multiple of that, with `etp` or `ep` one of
            their product; options are given that exclude each other; there are fewer GPUs than ranks on this machine,
            or `device` is one of them; `timeout` is no number of minutes.
    """
    import typer

    patience = minutes(timeout)
    if check_started(tp, fsdp, etp, ep) == 1:
        yield ALONE, device
        return
    if device.type == "cuda":
        if device.index is not None:
            raise ValueError(f"each rank has a GPU of its own, and --device is {device}; use --device cuda")
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"rank {local} of this machine has no GPU of its own: there are {torch.cuda.device_count()}"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    ranks = Ranks.of_world(device, tp, sequence_parallel, patience, etp, ep)
    with ExitStack() as stack:
        if not ranks.first:
            stack.enter_context(redirect_stdout(io.StringIO()))
        try:
            yield ranks, device
        except typer.Exit as ended:  # the other ranks may wait in a collective, and torchrun ends them
            leave(ended.exit_code)
    leave()


def minutes(timeout: float) -> timedelta:
    """So many minutes; raises ValueError for what is no sensible number of them."""
    if not 0 < timeout <= MOST_MINUTES:
        raise ValueError(f"--timeout is {timeout:g} minutes; choose more than 0 and at most {MOST_MINUTES}, a week")
    return timedelta(minutes=timeout)


def check_started(tp: int, fsdp: bool, etp: int | None = None, ep: int | None = None) -> int:
    """Counts the processes that torchrun started, 1 without it; raises ValueError where options differ."""
    sharing = {name: count for name, count in (("--etp", etp), ("--ep", ep)) if count is not None}
    for name, count in ({"--tp": tp} | sharing).items():
        if count < 1:
            raise ValueError(f"{name} is {count}; choose 1 or more ranks")
    launched = dist.is_torchelastic_launched()
    if fsdp and (etp, ep) != (None, None):
        part = f"--ep {ep} experts" if etp is None else f"--etp {etp} the rows of weights"
        raise ValueError(
            f"--fsdp shards all parameters over the ranks that share the batch, {part} over some of them; give one of "
            "the two"
        )
    if ep is not None and tp != 1:
        raise ValueError(
            f"--ep {ep} shares out experts, which are not tensor-parallel; use --etp in place of --tp {tp}"
        )
    if fsdp and not launched:
        raise ValueError(
            f"--fsdp shards over the processes that torchrun starts, and this is none; start N with: {launcher('N')}"
            "minifloat train --fsdp ..."
        )
    given = sharing if sharing and tp == 1 else {"--tp": tp} | sharing
    started = int(os.environ["WORLD_SIZE"]) if launched else 1
    wanted, shares = math.prod(given.values()), fsdp or sharing
    if started % wanted if shares else started != wanted:
        right = f"give --tp {started}, or --fsdp or --etp to share the batch"
        right = f"start a multiple of {wanted}" if shares else right
        told = " and ".join(f"{name} is {each}" for name, each in given.items())
        again = " ".join(f"{name} {each}" for name, each in given.items())
        raise ValueError(
            f"{told}, but torchrun has started {started}; {right}, or start {wanted} with: {launcher(wanted)}"
            f"minifloat train {again} ..."
        )
    return started


def leave(code: int = 0) -> NoReturn:
    """Ends this process with that exit code; with 0, in order, once all ranks are here.

    At once, without taking the group down: with transfers behind it gloo then aborts a process every so often, at the
    end of a run that went well, or after the message of one that did not.
    """
    if code == 0:
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def launcher(ranks: int | str) -> str:
    """Prefix of a command that starts so many ranks on one machine; nothing for one."""
    return "" if ranks == 1 else f"torchrun --nproc-per-node {ranks} --no-python "


def decided_by_first(decide: Callable[[], T], ranks: Ranks) -> T:
    """Returns on all ranks what `decide` returns on the first; its ValueError or OSError is raised on all alike."""
    answers: list[T] = []
    problem: Exception | None = None
    if ranks.first:
        try:
            answers.append(decide())
        except (ValueError, OSError) as error:
            problem = error
    answers, problem = from_first((answers, problem), ranks)
    if problem is not None:
        raise problem
    return answers[0]


def from_first(value: T, ranks: Ranks) -> T:
    """The first rank's value, on all of them."""
    if ranks.alone:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
