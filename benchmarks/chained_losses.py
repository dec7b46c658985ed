"""What ``columnwise_source="rowwise_dequantized"`` costs in loss: small models trained on a CPU, with and without it.

    python benchmarks/chained_losses.py block --seeds 3 --steps 60 --model micro

wgrad then reads X and dY that were rounded twice. The two models of a seed start alike and see the same batches. Prints
validation losses, in nats a byte of Python's standard library, the mean of the last two evaluations of four, and the
mean gap of codes alone to the recipe with its standard error over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minifloat.recipe import Float8BlockScaling, MXFP8BlockScaling, Recipe
from minifloat.tools.train import data
from minifloat.tools.train.loop import TrainConfig, train
from minifloat.tools.train.model import MODELS, Transformer

RECIPES: dict[str, Float8BlockScaling | MXFP8BlockScaling] = {
    "block": Float8BlockScaling(), "mxfp8": MXFP8BlockScaling(),
}  # fmt: skip


def validation_loss(recipe: Recipe, model: str, corpus: data.Corpus, config: TrainConfig) -> float:
    """Returns the mean of the last two evaluations."""
    sizes = MODELS[model]
    made = Transformer(sizes, recipe, seed=config.seed)
    run = train("run", made, sizes.context, corpus, config, torch.device("cpu"))
    found = [each.validation_loss for each in run.history if each.validation_loss is not None]
    return statistics.mean(found[-2:])


def gap(losses: list[float], of: list[float]) -> str:
    """Returns the mean of relative differences by seed, and its standard error, in percent."""
    apart = [100 * (a / b - 1) for a, b in zip(losses, of, strict=True)]
    error = statistics.stdev(apart) / len(apart) ** 0.5
    return f"{statistics.mean(apart):+.3f} % +- {error:.3f} ({', '.join(f'{each:+.3f}' for each in apart)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", choices=MODELS, default="micro")
    parser.add_argument("--batch-size", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus = data.load(least=MODELS[options.model].context + 1)
    plain = RECIPES[options.recipe]
    runs = {options.recipe: plain, "codes": replace(plain, columnwise_source="rowwise_dequantized")}
    found: dict[str, list[float]] = {name: [] for name in runs}
    print(
        f"{options.recipe}, {options.model}, {options.steps} steps of {options.batch_size} sequences; {corpus.source}"
    )
    for seed in range(options.seeds):
        for name, recipe in runs.items():
            begin = time.monotonic()
            config = TrainConfig(options.steps, options.batch_size, 1e-2, seed, evaluations=4, evaluation_batches=8)
            found[name].append(validation_loss(recipe, options.model, corpus, config))
            print(f"seed {seed}, {name}: {found[name][-1]:.4f}, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"codes over {options.recipe}: {gap(found['codes'], found[options.recipe])}")


if __name__ == "__main__":
    main()
