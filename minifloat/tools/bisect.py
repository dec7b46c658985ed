"""Finds the layers that must stay in high precision: suspects by what their casts lose, then short runs by halving."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.functional.quantize import LinearConfig, cast_with
from minifloat.nn.linear_call import recipe_in_force
from minifloat.nn.linear_state import LinearState
from minifloat.quantizer import Quantizer, as_matrix

MOST_RUNS = 8


@dataclass(frozen=True)
class Verdict:
    """The layers that were found in ``runs`` runs.

    Attributes:
        kept: the layers that stay in high precision; empty: none needs to.
        gap, gap_before: that of the loss with these and without any.
        exact: no smaller part of the suspects, in their order, is enough; False: the runs ended before.
    """

    kept: tuple[str, ...]
    gap: float
    gap_before: float
    runs: int
    exact: bool

    @property
    def rules(self) -> str:
        """The argument of :func:`minifloat.convert`."""
        return f"rules={[(name, 'none') for name in self.kept]}"


def bisect(
    suspects: Sequence[str], gap_of: Callable[[Sequence[str]], float], limit: float, most: int = MOST_RUNS
) -> Verdict:
    """Finds the fewest of the first suspects that bring the gap to ``limit`` if they stay in high precision.

    Without any the gap is measured first. Then the first suspect alone, and halves of the others: about log2(n) runs.
    A last run tries the last one found without those before it, which an order that is wrong had put first.

    Args:
        suspects: all layers that are quantized, the likeliest first.
        gap_of: runs a training in which these layers stay in high precision; gives how far its loss is from bf16's,
            as a part of that. NaN is a gap without bound.
        limit: the largest gap that is accepted.
        most: how many runs there may be.

    Raises:
        ValueError: there are no suspects, or fewer than two runs.
    """
    if not suspects or most < 2:
        raise ValueError(f"bisect: {len(suspects)} layers and {most} runs; give a layer and two runs at least")
    runs = 0

    def run(kept: Sequence[str]) -> float:
        nonlocal runs
        runs += 1
        gap = gap_of(kept)
        return math.inf if math.isnan(gap) else gap

    before = run(())
    if before <= limit:
        return Verdict((), before, before, runs, True)
    too_few, enough, gap, guess = 0, len(suspects), 0.0, 1  # with all of them it is bf16's run
    while enough - too_few > 1 and runs < most:
        found = run(suspects[:guess])
        if found <= limit:
            enough, gap = guess, found
        else:
            too_few = guess
        guess = (too_few + enough) // 2
    exact = enough - too_few == 1
    if exact and enough > 1 and runs < most:
        alone = run(suspects[enough - 1 : enough])
        if alone <= limit:
            return Verdict((suspects[enough - 1],), alone, before, runs, True)
    return Verdict(tuple(suspects[:enough]), gap, before, runs, exact)


def suspects(model: nn.Module, step: Callable[[], object]) -> dict[str, float]:
    """Orders the quantized linears by the worst cast of their X, W and dY, as :func:`relative_error` measures it.

    Args:
        step: runs a forward and a backward of ``model``; its layers then compute part by part, so that other bits may
            come out, and nothing is kept.

    Returns:
        Errors by name, the largest first. Experts, whose groups are cast apart, come last.
    """
    worst: dict[str, float] = {}
    handles = []
    for name, layer in model.named_modules():
        recipe = recipe_in_force(layer) if isinstance(layer, LinearState) else None
        if recipe is None or not isinstance(layer, LinearState) or layer._config(recipe).weight == Quantizer.identity():
            continue
        worst[name] = 0.0
        config = layer._config(recipe)

        def look(x: object, quantizer: Quantizer, name: str) -> None:
            if isinstance(x, Tensor):
                worst[name] = max(worst[name], relative_error(x, quantizer))

        def before(module: nn.Module, args: tuple[Any, ...], name: str = name, config: LinearConfig = config) -> None:
            look(args[0], config.input, name)
            for parameter in module._weight_names:  # type: ignore[union-attr]
                look(module.get_parameter(parameter), config.weight, name)

        def after(
            module: nn.Module, dx: Any, dy: tuple[Any, ...], name: str = name, config: LinearConfig = config
        ) -> None:
            look(dy[0], config.grad_output, name)

        handles += [layer.register_forward_pre_hook(before), layer.register_full_backward_hook(after)]
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()
    return dict(sorted(worst.items(), key=lambda each: -each[1]))


@torch.no_grad()
def relative_error(x: Tensor, quantizer: Quantizer) -> float:
    """Computes the mean of |q(x) / x - 1|, at most 1, over elements that are not 0; infinite where one is not finite.

    Outliers hide nothing, as they do in a ratio of signal to noise: an element that is cast to 0 counts 1.
    """
    x = as_matrix(x.detach())
    if x.dim() != 2 or not x.numel() or not quantizer.row_format.quantized:
        return 0.0
    if not bool(x.isfinite().all()):
        return math.inf
    if quantizer.row_format.scale_rule == "given":  # delayed scaling, at its best
        scale = quantizer.row_format.max / x.abs().amax().float().clamp(min=1e-30).view(1)
        operands = cast_with(x, quantizer, scale, gemm_ready=False)
    else:
        operands = quantizer(x)
    values = x.float()
    errors = [
        ((each.dequantize(torch.float32) - values) / values).abs().clamp(max=1)[values != 0].mean().nan_to_num()
        for each in operands
        if each is not None
    ]
    return float(torch.stack(errors).max())
