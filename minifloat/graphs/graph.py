"""One CUDA graph, whose capture leaves the process usable whatever raises inside."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, TypeVar

import torch

T = TypeVar("T")


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A graph that is found to be garbage and destroyed while another is captured breaks the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CaptureStream:
    """A stream of its own, for warm-ups and captures."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """What runs inside comes after all before it, and before all after it."""
        outside = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            yield
        outside.wait_stream(self.stream)


class Graph:
    """What one function launches on a GPU: captured once, and replayed on the stream that is then current.

    Args:
        stream: where it is captured. What warms the function up runs there too: autograd's nodes stay on their stream.
        pool: of ``torch.cuda.graph_pool_handle()``: graphs of one pool take memory that earlier ones have freed, and
            are replayed in the order of their capture. None: a pool of its own.
    """

    device_type: ClassVar[str] = "cuda"
    Stream = CaptureStream

    def __init__(self, stream: CaptureStream, pool: Any = None) -> None:
        self.stream = stream.stream
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], T]) -> T:
        """The result of ``function``, whose tensors have no values before the first replay, and new ones after each.

        Its backward runs in this thread. Other threads may use the GPU meanwhile.

        Raises:
            RuntimeError: PyTorch's, of an operation that no graph can hold, as one that waits for the GPU.
        """
        from minifloat.ops.quantize.pipeline import zeros_of_graph  # which needs Triton

        before = torch.cuda.current_stream(self.stream.device)
        capture = torch.cuda.graph(self.graph, self.pool, self.stream, capture_error_mode="thread_local")
        try:
            capture.__enter__()
            with no_garbage_collection(), torch.autograd.set_multithreading_enabled(False), zeros_of_graph():
                result = function()
        except BaseException:
            with suppress(RuntimeError):  # PyTorch's own about a capture that has failed
                capture.__exit__(None, None, None)
            self._recover(before)
            raise
        capture.__exit__(None, None, None)
        return result

    def replay(self) -> None:
        """Computes again, from what is in the memory that the function read."""
        self.graph.replay()

    def _recover(self, stream: torch.cuda.Stream) -> None:
        """Ends what PyTorch leaves begun where an operation has ended the capture."""
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # it was ended
            torch._C._cuda_endAllocateToPool(stream.device_index, self.pool)
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())  # the old one still counts for the graph
