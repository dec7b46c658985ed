"""Cost of ``minifloat.inspect`` at its default rate, on a GPU: ``python benchmarks/inspect_cost.py``.

Eager steps with AdamW: of four transformer layers of 2048 with 4096 tokens, and of a mixture of experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import minifloat

EVERY = 100  # of inspect, by default


def seconds(step: Callable[[], None], steps: int) -> float:
    """Seconds of one step, after three that warm up."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def report(name: str, model: nn.Module, x: Tensor, recipe: str) -> None:
    """Prints the milliseconds of a step, of one between inspected steps, and of an inspected one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with minifloat.autocast(recipe=recipe):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds(step, 5)  # kernels are compiled
    plain = seconds(step, 10)
    with minifloat.inspect(model, every=1):
        inspected = seconds(step, 5)
    cost = (inspected - plain) / EVERY / plain
    print(f"{name:16} {1e3 * plain:8.2f} ms, inspected {1e3 * inspected:8.2f} ms: {cost:.2%} of a run", flush=True)


def main() -> None:
    torch.manual_seed(0)
    options = {"device": "cuda", "params_dtype": torch.bfloat16}
    x = torch.randn(4096, 1, 2048, device="cuda", dtype=torch.bfloat16)
    for recipe in ("current", "delayed", "block", "mxfp8", "nvfp4"):
        layers = [minifloat.TransformerLayer(2048, 8192, 16, **options) for _ in range(4)]  # type: ignore[arg-type]
        report(recipe, nn.Sequential(*layers), x, recipe)
    moe = minifloat.MoE(2048, 768, 32, 8, device="cuda", dtype=torch.bfloat16, single_grouped_weight=True)
    report("experts, current", moe, x[:, 0], "current")


if __name__ == "__main__":
    main()
