"""`minifloat generate`: text from a checkpoint of `minifloat train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minifloat.tools.cli import load, user_errors
from minifloat.tools.cli.names import BF16, check_recipe


def generate(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CHECKPOINT]",
            help="a checkpoint, or a folder of them: the newest is taken; default: the newest run in runs/",
        ),
    ] = None,
    prompt: Annotated[str, typer.Option(help="what the text begins with")] = "\n",
    tokens: Annotated[int, typer.Option(help="how many tokens follow (of a byte-level model: bytes)")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="choose among so many most likely tokens")] = None,
    seed: Annotated[int, typer.Option(help="of the choices")] = 0,
    recipe: Annotated[
        str | None,
        typer.Option(help="what the linears compute in, and of two runs which one; default: as the last steps"),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, for a model of packed token files")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
) -> None:
    """Print the prompt and what a trained model says after it.

    Of two runs that `minifloat train --against bf16` leaves it takes the recipe's.
    """
    with user_errors():
        if recipe is not None:
            check_recipe(recipe)
        load()
        from minifloat.tools.cli import choose_device
        from minifloat.tools.cli.resume import last_recipe, newest_out
        from minifloat.tools.cli.train_job import recipe_of
        from minifloat.tools.train import generate as sampling
        from minifloat.tools.train.checkpoint import locate

        checkpoint = locate(run_of(path or newest_out(), recipe))
        trained = last_recipe(checkpoint)
        name = recipe or trained
        check_recipe(name)
        codec = sampling.Codec(checkpoint, tokenizer)
        model = sampling.load_model(checkpoint, recipe_of(name), choose_device(device))
        start = codec.encode(prompt)
        made = sampling.generate(
            model, start, tokens, context=model.config.context, temperature=temperature, top_k=top_k, seed=seed,
            dtype=sampling.trained_dtype(checkpoint),
        )  # fmt: skip
        if path is None:
            typer.echo(f"from {checkpoint.path}", err=True)
        text = codec.decode(start + list(made))
    typer.echo(text)


def run_of(path: Path, recipe: str | None) -> Path:
    """Finds the folder of the recipe's run in an `--out` of several, else of the one that is not bf16; else `path`."""
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    names = {file.parent.parent.name for file in folder.glob("*/*/checkpoint.json")}
    left = names & {recipe} or names - {BF16}
    return folder / left.pop() if len(names) > 1 and len(left) == 1 else path
