"""`minifloat advise`: which layers of a model gain from which recipe, before it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from minifloat.tools.advise import PACKAGED, Measured, advise
from minifloat.tools.cli import choose_device, device_name, user_errors
from minifloat.tools.train.hf import HuggingFace
from minifloat.tools.train.model import MODELS, Transformer


def command(
    model: Annotated[
        str, typer.Argument(help=f"one of {', '.join(MODELS)}, or a config.json of transformers or the folder of one")
    ],
    tokens: Annotated[int, typer.Option(help="of a step on one device", min=1)],
    table: Annotated[
        Path, typer.Option(help="a result of minifloat bench shapes", show_default="one that comes with the package")
    ] = PACKAGED,
) -> None:
    """Predict which linears of a model gain from which recipe, from measured times of single linears."""
    with user_errors():
        measured = Measured.read(table)
        if model in MODELS:
            with torch.device("meta"):
                made: torch.nn.Module = Transformer(MODELS[model])
        else:
            if not Path(model).exists():
                raise ValueError(f"there is no model {model!r}: give one of {', '.join(MODELS)}, or a config.json")
            made = HuggingFace.read(Path(model)).on_meta
        advice = advise(made, tokens, measured)
    here = device_name(choose_device("auto"))
    elsewhere = "" if here == measured.device else f"; this machine is {here}: give --table of your own device"
    typer.echo(f"measured {measured.date} on {measured.device}{elsewhere}\n{advice}")
