"""Weights of a captured module whose rows ranks share: what crosses the begin and the end of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from minifloat.nn.etp import etp_weights


class SharedWeights:
    """Those below ``module``.

    A graph gathers and reduces by itself: nothing is in flight over its group where it begins or ends, and no gather is
    predicted across. Gradients are results of the graph of a backward, which autograd adds to ``.grad`` after each
    replay; those that go to ``main_grad`` are added in the graph.
    """

    def __init__(self, module: nn.Module) -> None:
        self.weights = list(etp_weights(module))
        self.lanes = list(dict.fromkeys(weight.lane for weight in self.weights))

    def settle(self) -> None:
        """What follows in the stream comes after all that was started over these weights' groups."""
        for lane in self.lanes:
            lane.settle()

    @contextmanager
    def in_graph(self, collected: dict[Tensor, Tensor] | None = None) -> Iterator[None]:
        """Inside, a graph is captured, or warmed up, which finishes what it starts.

        That of a forward casts; ``collected``: that of a backward puts there the gradients that autograd adds.
        """
        self.settle()
        for lane in self.lanes:
            lane.in_graph = {each: None for each in self.weights if collected is None and each.lane is lane}
            lane.collected = collected
        try:
            yield
            self.settle()
        except BaseException:
            for lane in self.lanes:
                lane.fail()
            raise
        finally:
            for lane in self.lanes:
                lane.in_graph = lane.collected = None

    def gradients(
        self, targets: Sequence[Tensor], compute: Callable[[list[Tensor]], Sequence[Tensor | None]]
    ) -> list[Tensor | None]:
        """The gradients of ``targets``; ``compute``: gives those that autograd sees."""
        leaves = [each.leaf for each in self.weights if each.leaf is not None and each.leaf.requires_grad]
        collected: dict[Tensor, Tensor] = {}
        with self.in_graph(collected):
            seen = compute([*targets, *leaves])
        return [collected.get(target, grad) for target, grad in zip(targets, seen, strict=False)]
