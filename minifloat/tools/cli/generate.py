"""`minifloat generate`: text from a checkpoint of `minifloat train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minifloat.tools.cli import choose_device, user_errors
from minifloat.tools.cli.resume import recipe_name
from minifloat.tools.cli.train_job import check_recipe, recipe_of
from minifloat.tools.train import generate as sampling
from minifloat.tools.train.checkpoint import locate


def generate(
    path: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="a checkpoint, or a folder of them: the newest is taken")
    ],
    prompt: Annotated[str, typer.Option(help="what the text begins with")] = "\n",
    tokens: Annotated[int, typer.Option(help="how many tokens follow (of a byte-level model: bytes)")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="choose among so many most likely tokens")] = None,
    seed: Annotated[int, typer.Option(help="of the choices")] = 0,
    recipe: Annotated[str | None, typer.Option(help="what the linears compute in; default: as trained")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, for a model of packed token files")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
) -> None:
    """Print the prompt and what a trained model says after it."""
    with user_errors():
        checkpoint = locate(path)
        trained = recipe_name(checkpoint)
        name = recipe or trained
        check_recipe(name)
        codec = sampling.Codec(checkpoint, tokenizer)
        model = sampling.load_model(checkpoint, recipe_of(name), choose_device(device))
        start = codec.encode(prompt)
        made = sampling.generate(
            model, start, tokens, context=model.config.context, temperature=temperature, top_k=top_k, seed=seed,
            dtype=sampling.trained_dtype(checkpoint),
        )  # fmt: skip
        text = codec.decode(start + list(made))
    typer.echo(text)
