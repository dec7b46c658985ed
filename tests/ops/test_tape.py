"""Tapes: what replays give, keep and free, and what is called each time."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from minifloat.ops import tape
from minifloat.ops.launch import count_launches
from minifloat.ops.matmul import count_gemms
from minifloat.ops.tape import Recorder, opaque
from tests.helpers.compare import assert_same_bits
from tests.helpers.replay_on_cpu import replay_on_cpu

Function = Callable[..., list[Tensor | None]]


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_on_cpu(monkeypatch)


def taped(function: Function, *inputs: Tensor | None, apart: bool = False) -> Callable[..., Sequence[Tensor | None]]:
    """Calls ``function`` once, and returns its replay, which never calls it again."""
    recorder = Recorder(apart=apart)
    recorder(None, inputs, lambda: (function(*inputs), None))
    (replay,) = recorder.known.values()
    assert replay is not None

    def never() -> Any:
        raise AssertionError("called")

    def run(*others: Tensor | None) -> Sequence[Tensor | None]:
        return recorder(None, others, never)[0]

    run.source = replay.source  # type: ignore[attr-defined]
    return run


def several(x: Tensor, y: Tensor) -> list[Tensor | None]:
    values, places = x.max(0)
    return [values, places, torch.cat([x, y.t()], 1)[:, 1:], None, x, x.view(-1)[4:8], x + y.t().mul(2)]


def in_place(x: Tensor, y: Tensor) -> list[Tensor | None]:
    y[1:].add_(x[1:])
    made = torch.zeros(4, 4)
    made[0].copy_(x[0])
    return [made, made.view(torch.int32)[1:3]]


@pytest.mark.parametrize("function", [several, in_place])
def test_replays(function: Function) -> None:
    run = taped(function, torch.randn(4, 4), torch.randn(4, 4))
    for _ in range(2):
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        written = y.clone()
        want, got = function(x, written), run(x, y)
        for one, other in zip(got, want, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.stride() == other.stride() and not one._is_view()
                assert_same_bits(one, other)
        assert_same_bits(y, written)


def test_a_result_that_is_an_input_is_that_very_tensor() -> None:
    run = taped(lambda x: [x, x + 1], torch.randn(4))
    x = torch.randn(4)
    assert run(x)[0] is x


def test_which_inputs_are_the_same_is_told_apart() -> None:
    recorder, a, b = Recorder(), torch.randn(4), torch.randn(4)
    for x, y in ((a, a), (a, b), (b, a), (b, b)):
        (got,), _ = recorder(None, (x, y), lambda x=x, y=y: ([x - 2 * y], None))
        assert_same_bits(got, x - 2 * y)


def test_one_look_finds_the_latest_replay() -> None:
    """And nothing else: whatever differs, a call decides."""
    recorder, memory = Recorder(), torch.randn(40)
    x, y = torch.randn(4, 4), torch.randn(4, 4)

    def call(key: Any, *tensors: Tensor) -> Tensor | None:
        return recorder(key, [*tensors], lambda: ([tensors[0] - 2 * tensors[-1]], None))[0][0]

    assert recorder.again("key", [x, y]) is None
    for _ in range(2):  # taped, then replayed
        call("key", x, y)
    given = [x, y]
    found = recorder.again("key", given)
    assert found is not None and not given
    assert_same_bits(found[0][0], x - 2 * y)
    others: dict[str, tuple[Any, list[Tensor]]] = {
        "a key": ("other", [x, y]),
        "a number": ("key", [x]),
        "a shape": ("key", [x, torch.randn(1, 4)]),
        "a stride": ("key", [x, y.t()]),
        "a dtype": ("key", [x, y.double()]),
        "a type": ("key", [x, torch.nn.Parameter(y)]),
        "the same twice": ("key", [x, x]),
        "parts of one": ("key", [memory[:16].view(4, 4), memory[:16].view(4, 4)]),
        "an address": ("key", [x, memory[1:17].view(4, 4)]),
    }
    for call_of_twins in range(2):  # what is taped of one tensor given twice is no replay of two
        call("twins", *[(x, x), (x, y)][call_of_twins])
    call("twins", x, x)
    found = recorder.again("twins", [x, y])
    assert found is None or torch.equal(found[0][0], x - 2 * y)  # type: ignore[arg-type]
    for name, (key, tensors) in others.items():
        kept = [*tensors]
        assert recorder.again(key, tensors) is None and len(tensors) == len(kept), name
        assert_same_bits(call(key, *kept), kept[0] - 2 * kept[-1])
    with TorchDispatchMode():
        assert recorder.again("key", [x, y]) is None
    with count_gemms():
        assert recorder.again("key", [x, y]) is None
    with torch.autocast("cpu"):
        assert recorder.again("key", [x, y]) is None


def test_what_nobody_reads_is_left_out_and_memory_is_freed() -> None:
    def function(x: Tensor) -> list[Tensor | None]:
        x.exp()
        y = x.sin()
        torch.empty(1000)
        return [y.cos() + y]

    source: str = taped(function, torch.randn(4)).source  # type: ignore[attr-defined]
    assert source.count(" = c") == 3 and "empty" not in source
    assert source.index("del t") < source.index("return")


def test_random_numbers_are_drawn_as_often() -> None:
    def function(x: Tensor) -> list[Tensor | None]:
        torch.randn(3)  # read by nobody, and yet the generator goes on
        return [x + torch.rand(4)]

    run, x = taped(function, torch.randn(4)), torch.randn(4)
    torch.manual_seed(0)
    want = function(x)[0], torch.get_rng_state()
    torch.manual_seed(0)
    assert_same_bits(run(x)[0], want[0])
    assert torch.equal(torch.get_rng_state(), want[1])


@pytest.mark.parametrize("apart", [False, True])
def test_zeros(apart: bool) -> None:
    """Each replay has new ones, of which no result shares memory with another where that is asked for."""

    def function(x: Tensor) -> list[Tensor | None]:
        return [torch.zeros(3), torch.zeros(1), x + 1]

    run = taped(function, torch.randn(4), apart=apart)
    kept = [run(torch.randn(4)) for _ in range(3)]
    results = [x for results in kept for x in results[:2]]
    for number, x in enumerate(results):
        assert x is not None and not x.any()
        x.fill_(number + 1)
    assert [x[0].item() for x in results if x is not None] == [1, 2, 3, 4, 5, 6]
    if apart:
        assert len({x.untyped_storage().data_ptr() for x in results if x is not None}) == 6


def test_what_a_library_does_is_called_again() -> None:
    """And may return a new tensor at one call and its argument at the next."""

    def library(tensors: Sequence[Tensor], limit: float) -> Tensor:
        x, out = tensors
        return out.add_(x) if x.sum() > limit else x * 3

    run = taped(lambda x, out: [opaque(library, [x, out], 0.0) + 1], torch.ones(4), torch.zeros(4))
    out = torch.zeros(4)
    assert run(-torch.ones(4), out)[0].tolist() == [-2] * 4 and not out.any()  # type: ignore[union-attr]
    assert run(torch.ones(4), out)[0].tolist() == [2] * 4 and out.all()  # type: ignore[union-attr]


class Described:
    """A TMA descriptor."""

    def __init__(self, base: Tensor) -> None:
        self.base, self.shape = base, [*base.shape]


def test_launches_get_addresses_and_keep_no_tensor() -> None:
    launched: list[Any] = []

    def launch(*args: Any) -> None:
        launched.append(args)

    def function(x: Tensor, y: Tensor) -> list[Tensor | None]:
        made, of = torch.empty(8), tape.current()
        assert of is not None
        of.launched("kernel", launch, ("head",), 3, [made, (x[4:], y), Described(y), 7, "e4m3"])
        return [made, x + made]

    inputs = torch.randn(8), torch.randn(8)
    run, left = taped(function, *inputs), [weakref.ref(x) for x in inputs]
    del inputs
    gc.collect()
    assert not [x for x in left if x() is not None]
    x, y = torch.randn(8), torch.randn(8)
    with count_launches() as counted:
        made = run(x, y)[0]
    assert made is not None and counted == {"kernel": 1}
    ((*grid, head, first, pair, described, number, text),) = launched
    assert grid == [3, 1, 1, 0] and (head, number, text) == ("head", 7, "e4m3")
    assert (first, pair) == (made.data_ptr(), (x.data_ptr() + 16, y.data_ptr()))
    assert (described.data_ptr(), described.shape, described.base) == (y.data_ptr(), [8], described)


OTHER = torch.randn(4)
REFUSED: dict[str, Function] = {
    "a value on the host": lambda x: [x * x.sum().item()],
    "a decision by a value": lambda x: [x + 1 if x.sum() > 0 else x - 1],
    "a tensor that is not given": lambda x: [x + OTHER],
    "a new tensor of Python's": lambda x: [x + torch.tensor([1.0, 2.0, 3.0, 4.0])],
    "a kernel past both eyes": lambda x: [tape.refuse("it is launched elsewhere") or x + 1],
    "nothing": lambda x: [x],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_called_each_time(name: str) -> None:
    recorder, calls = Recorder(), []

    def function(x: Tensor) -> list[Tensor | None]:
        calls.append(x)
        return REFUSED[name](x)

    for scale in (1, -1, 2):
        x = scale * torch.ones(4)
        (got,), _ = recorder(None, (x,), lambda x=x: (function(x), None))
        assert_same_bits(got, REFUSED[name](x)[0])
    assert len(calls) == 3 and [type(why) for why in recorder.known.values()] == [str]


def test_odd_addresses_and_empty_tensors_are_called_each_time() -> None:
    recorder, memory = Recorder(), torch.randn(9)
    for x in (memory[1:], memory[:0]):
        (got,), _ = recorder(None, (x,), lambda x=x: ([x + 1], None))
        assert_same_bits(got, x + 1)
    assert not recorder.known


def test_a_part_of_one_input() -> None:
    """What lies in an input, but begins in none, is a part of that one; in two, it is not known of which."""
    memory = torch.randn(3, 16)
    run = taped(lambda x, y: [x[4:] + y[4:]], memory[0], memory[2])
    x, y = torch.randn(16), torch.randn(16)
    assert_same_bits(run(x, y)[0], x[4:] + y[4:])
    recorder = Recorder()
    recorder(None, (memory[:2], memory[1:].view(-1)), lambda: ([memory[1][4:] + 1], None))
    assert [*recorder.known.values()] == ["it reads torch.float32 (12,), which it was not given"]


def test_a_recorder_inside_of_another_is_a_part_of_it() -> None:
    inner = Recorder()

    def function(x: Tensor) -> list[Tensor | None]:
        (y,), _ = inner(None, (x,), lambda: ([x + 1], None))
        return [y]

    run = taped(function, torch.randn(4))
    assert_same_bits(run(OTHER)[0], OTHER + 1)
    assert not inner.known


def test_an_error_leaves_no_tape() -> None:
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="size"):
        recorder(None, (OTHER,), lambda: ([OTHER + torch.zeros(3)], None))
    assert tape.current() is None and not recorder.known and torch._C._len_torch_dispatch_stack() == 0


def test_a_tape_is_of_its_thread() -> None:
    """Autograd has a thread for each device, which computes while the main thread tapes."""
    found: list[Any] = []

    def function(x: Tensor) -> list[Tensor | None]:
        other = threading.Thread(target=lambda: found.append((tape.current(), torch.randn(3) + 1)))
        other.start()
        other.join()
        return [x + 1]

    source: str = taped(function, torch.randn(4)).source  # type: ignore[attr-defined]
    assert found[0][0] is None and source.count(" = c") == 1
