"""A pool of worker processes that outlives a test.

A process spends up to a second on what it runs for the first time, and milliseconds on a task like an earlier one. So
the ranks start once, join one gloo group and wait for functions to run. A pool that may be out of step (a rank died,
hung, or failed alone) is killed, and the next run starts a new one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import inspect
import io
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.helpers.children import children

TIMEOUT = 120.0
GRACE = 1.0  # seconds that the other ranks have to answer after one has failed


def torchrun_environment(rank: int, world_size: int) -> Any:
    """A context in which the environment is as torchrun sets it; a pool's processes go on to other tests."""
    return mock.patch.dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))


class RankDiedError(RuntimeError):
    """A worker process ended while it ran a task (gloo aborts the process when collectives do not match)."""


class _Raised:
    """A task's exception on its way to the parent; a class of its own, since a task may also return an exception."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class WorkerPool:
    """`world_size` processes with one gloo group, which run functions on every rank.

    `setup`, a function of a module, runs once in each process before the group is made.
    """

    def __init__(self, world_size: int, setup: Callable[[], None] | None = None) -> None:
        self.world_size = world_size
        self._setup = setup
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Call `fn(rank, world_size, *args)` on every rank and return the results in the order of the ranks.

        Raises the first exception of a rank, with its rank and traceback as a note; `RankDiedError`; or `TimeoutError`.
        """
        task = _pack((fn, args))
        if not self._processes or not all(process.is_alive() for process in self._processes):
            self._restart()
        try:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # a rank that has died shows in _collect
                    connection.send_bytes(task)
            answers = self._collect(timeout)
        except BaseException:  # an interrupt leaves the ranks in the middle of a task
            self.kill()
            raise
        errors = [answer.error for answer in answers.values() if isinstance(answer, _Raised)]
        if not errors and len(answers) == self.world_size:
            return [answers[rank] for rank in range(self.world_size)]
        silent = sorted(set(range(self.world_size)) - answers.keys())
        died = [error for error in errors if isinstance(error, RankDiedError)]
        if died or len(errors) < self.world_size:  # where all ranks raise alike, none waits for another
            self.kill()
        # A death comes first: the errors of the other ranks ("connection closed by peer") follow from it.
        raise (died or errors or [TimeoutError(f"ranks {silent} gave no answer within {timeout:g} s")])[0]

    def close(self) -> None:
        """End the processes in order; a rank that does not follow is killed."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        for process in self._processes:
            process.join(5)
        self.kill()

    def kill(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _restart(self) -> None:
        self.kill()
        self._folder = tempfile.TemporaryDirectory(prefix="minifloat-ranks-")
        store = os.path.join(self._folder.name, "store")  # a file needs no free port, which another could take first
        context = children()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, store, theirs, self._setup)
            process = context.Process(target=_serve, args=args, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()  # so that the pipe ends with the process
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, timeout: float) -> dict[int, Any]:
        """The answers by rank, without those of ranks that gave none in time."""
        answers: dict[int, Any] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = _unpack(connection.recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = _Raised(self._death(rank))
                if isinstance(answers[rank], _Raised):
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _death(self, rank: int) -> RankDiedError:
        self._processes[rank].join(GRACE)
        code = self._processes[rank].exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return RankDiedError(f"rank {rank} of {self.world_size} died: {how}")


Pools = Callable[[int], WorkerPool]  # the fixture `worker_pool`: the pool of that many ranks


def on_ranks(*sizes: int) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a function that each of so many ranks runs, in a pool of each size: it returns what is wrong.

    Parameters behind rank and size are those of the test; nothing, or something empty, is a pass.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        def test(worker_pool: Pools, world_size: int, **arguments: Any) -> None:
            wrong = worker_pool(world_size).run(functools.partial(function, **arguments))
            assert not any(wrong), wrong

        others = list(inspect.signature(function).parameters.values())[2:]
        given = [*list(inspect.signature(test).parameters.values())[:2], *(p for p in others if p.default is p.empty)]
        test = functools.wraps(function)(test)
        test.__signature__ = inspect.Signature([p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in given])  # type: ignore
        function.__qualname__ += ".__wrapped__"  # where a worker finds it, whose name is the test's
        return pytest.mark.parametrize("world_size", sizes)(test)

    return decorate


def _serve(rank: int, world_size: int, store: str, connection: Connection, setup: Callable[[], None] | None) -> None:
    """The life of a worker process; an empty task ends it."""
    faulthandler.enable()  # an abort prints where it happened
    gc.freeze()  # what was imported stays: a collection need not walk it
    torch.set_num_threads(1)
    if setup is not None:
        setup()
    # Less than a task has, so that a rank that waits in vain raises and shows where.
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=TIMEOUT - 20), world_size, rank)
    with contextlib.suppress(EOFError):  # the parent is gone
        while task := connection.recv_bytes():
            connection.send_bytes(_answer(task, rank, world_size))
        dist.barrier()
    os._exit(0)  # destroying a gloo group that FSDP has used aborts now and then


def _answer(task: bytes, rank: int, world_size: int) -> bytes:
    torch.manual_seed(0)
    try:
        fn, args = _unpack(task)
        before = _groups_made()
        answer = _pack(fn(rank, world_size, *args))
        if _groups_made() > before:
            _end_groups()
        return answer
    except BaseException as error:
        note = f"on rank {rank} of {world_size}:\n{traceback.format_exc()}"
        error.add_note(note)
        try:
            answer = _pack(_Raised(error))
            _unpack(answer)  # an exception with an __init__ of its own may pickle but not come back
        except Exception:
            stand_in = RuntimeError(f"{type(error).__name__}: {error}")
            stand_in.add_note(note)
            answer = _pack(_Raised(stand_in))
        return answer


def _groups_made() -> int:
    """How many groups there have been, which is the same on every rank."""
    return int(dist.distributed_c10d._world.group_count)


def _end_groups() -> None:
    """Ends the groups that tasks have made: a gloo group has three threads, which wake up a hundred times a second."""
    dist.barrier()  # until no rank waits for another in one of them
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    _clear_sharding_prop_cache()  # DTensor's, which has meshes of these groups and takes them for equal new ones
    gc.collect()


def _pack(value: Any) -> bytes:
    """Pickle by way of torch.save, which also takes float8 tensors; sending them as they are would share memory."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def process_group() -> dist.ProcessGroup:
    """That of all ranks, in a worker."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD
