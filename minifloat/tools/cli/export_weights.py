"""`minifloat export-weights`: weights of a model of transformers in the layout of an inference engine."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, get_args

import typer

from minifloat.convert import export_weights
from minifloat.convert.layouts import WeightLayout
from minifloat.tools.cli import user_errors
from minifloat.tools.cli.names import check_recipe
from minifloat.tools.cli.resume import recipe_name
from minifloat.tools.cli.train_job import recipe_of
from minifloat.tools.train.checkpoint import Checkpoint, locate
from minifloat.tools.train.hf import HuggingFace
from minifloat.tools.train.weights import load_weights


def command(
    path: Annotated[
        Path, typer.Argument(metavar="MODEL", help="what minifloat train --hf left, or a folder of transformers")
    ],
    layout: Annotated[str, typer.Option(help=f"one of {', '.join(get_args(WeightLayout))}")],
    out: Annotated[Path, typer.Option(help="a folder, in which are no weights yet")],
    recipe: Annotated[str | None, typer.Option(help="what the linears compute in; default: as trained")] = None,
    requantize: Annotated[bool, typer.Option(help="cast weights that the layout does not hold as trained")] = False,
) -> None:
    """Write codes and scales as trained for Transformers, vLLM and SGLang: safetensors and config.json."""
    with user_errors():
        chosen = next((each for each in get_args(WeightLayout) if each == layout), None)
        if chosen is None:
            raise ValueError(f"--layout {layout}: choose from {', '.join(get_args(WeightLayout))}")
        checkpoint = None if (path / "config.json").is_file() else locate(path)
        if checkpoint is None and recipe is None:
            raise ValueError(f"{path} does not say what it was trained in: give --recipe")
        name = recipe or recipe_name(checkpoint)  # type: ignore[arg-type]
        check_recipe(name)
        model = (HuggingFace.read(path) if checkpoint is None else _trained(checkpoint)).make(recipe_of(name), seed=0)
        if checkpoint is not None:
            load_weights(model, checkpoint.model_state(), checkpoint.path)
        files = export_weights(model.eval(), out, chosen, requantize)
    typer.echo(f"wrote {sum(file.stat().st_size for file in files):,} bytes of weights to {out}")


def _trained(checkpoint: Checkpoint) -> HuggingFace:
    """Returns the model of a checkpoint; raises ValueError where that is none of transformers."""
    values = (checkpoint.settings.get("model") or {}).get("transformers")
    if values is None:
        raise ValueError(f"{checkpoint.path} is of minifloat's own model, which no engine knows; train with --hf")
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        return HuggingFace.read(Path(folder))
