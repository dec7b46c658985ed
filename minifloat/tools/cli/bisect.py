"""`minifloat bisect`: which layers of a model must stay in high precision for its loss to keep up with bf16's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from minifloat.nn.linear_state import LinearState
from minifloat.tools import bisect as search
from minifloat.tools.cli import choose_device, user_errors
from minifloat.tools.cli.names import check_recipe
from minifloat.tools.cli.sizes import OwnSizes, sizes_of
from minifloat.tools.cli.train_job import recipe_of
from minifloat.tools.train import data
from minifloat.tools.train.data import Batches
from minifloat.tools.train.loop import train
from minifloat.tools.train.run import NonFiniteError, TrainConfig
from minifloat.tools.train.step import batch_loss

SHOWN = 5


def command(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="text files or folders; default: Python's own sources")
    ] = None,
    recipe: Annotated[str, typer.Option(help="what the linears compute in")] = "nvfp4",
    gap: Annotated[float, typer.Option(help="the largest gap of the validation loss, a part of bf16's")] = 0.01,
    model: Annotated[str | None, typer.Option(help="as of minifloat train")] = None,
    hf: Annotated[Path | None, typer.Option(help="a model of transformers, as of minifloat train")] = None,
    steps: Annotated[int, typer.Option(help="of each run")] = 100,
    batch_size: Annotated[int, typer.Option(help="sequences in a step")] = 16,
    learning_rate: Annotated[float, typer.Option(help="the highest")] = 3e-3,
    seed: Annotated[int, typer.Option(help="of weights and batches, the same in all runs")] = 0,
    runs: Annotated[int, typer.Option(help="the most, beside bf16's", min=2)] = search.MOST_RUNS,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
) -> None:
    """Find the layers that must stay in high precision: by what their casts lose, then by short runs."""
    with user_errors():
        check_recipe(recipe)
        if (chosen := recipe_of(recipe)) is None:
            raise ValueError("--recipe bf16 is what runs are compared with; choose another recipe")
        sizes, on = sizes_of(model, OwnSizes(), hf), choose_device(device)
        corpus = data.load(paths or [], least=sizes.context + 1)
        sizes = sizes.with_vocabulary(corpus.vocabulary)
        config = TrainConfig(
            steps, batch_size, learning_rate, seed, evaluations=1, evaluation_batches=min(32, 2 * batch_size)
        )

        def loss(made: nn.Module) -> float:
            try:
                found = train(recipe, made, sizes.context, corpus, config, on).history[-1].validation_loss
            except NonFiniteError as error:
                typer.echo(f"  {error}")
                return float("nan")
            assert found is not None
            return found

        made = sizes.make(chosen, seed).to(on)
        batch = next(Batches(corpus.train, batch_size, sizes.context, seed))
        suspects = search.suspects(made, lambda: batch_loss(made, batch, config, on).backward())
        worst = [f"{name} ({100 * error:.0f} %)" for name, error in list(suspects.items())[:SHOWN]]
        typer.echo(f"{len(suspects)} layers; the casts of {', '.join(worst)} lose most of an element's value")
        reference = loss(sizes.make(None, seed))
        if not math.isfinite(reference):
            raise ValueError("the run in bf16 has no finite loss to compare with; give a lower --learning-rate")
        typer.echo(f"bf16: validation loss {reference:.4f} after {steps} steps")

        def gap_of(kept: Sequence[str]) -> float:
            model = sizes.make(chosen, seed)
            for name in kept:
                layer = model.get_submodule(name)
                assert isinstance(layer, LinearState)
                layer.recipe = "none"
            found = loss(model) / reference - 1
            typer.echo(f"{len(kept)} layers in bf16: {100 * found:+.3f} %")
            return found

        verdict = search.bisect(list(suspects), gap_of, gap, runs)
    if not verdict.kept:
        typer.echo(f"no layer has to stay in bf16: the gap is {100 * verdict.gap:+.3f} %")
        return
    more = "" if verdict.exact else f"; {runs} runs did not tell whether fewer are enough"
    typer.echo(f"with {len(verdict.kept)} layers in bf16 the gap is {100 * verdict.gap:+.3f} %{more}: {verdict.rules}")
