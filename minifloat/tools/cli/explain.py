"""`minifloat explain`: the kernels of a Linear, forward and backward, under recipes."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from minifloat.nn import Linear
from minifloat.tools.cli import choose_device, device_name, user_errors
from minifloat.tools.cli.names import check_recipe
from minifloat.tools.cli.train_job import recipe_of
from minifloat.tools.explain import explain


def command(
    recipes: Annotated[list[str], typer.Argument(help="short names, or bf16")],
    rows: Annotated[int, typer.Option(help="of X", min=1)] = 512,
    in_features: Annotated[int, typer.Option(min=1)] = 768,
    out_features: Annotated[int, typer.Option(min=1)] = 768,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
) -> None:
    """Show which kernels a Linear of bf16 launches, on what, in order, and the bytes that they make and free."""
    with user_errors():
        on = choose_device(device)
        for name in recipes:
            check_recipe(name, "RECIPES")
        with torch.device(on):
            x = torch.randn(rows, in_features, dtype=torch.bfloat16, requires_grad=True)
        for name in recipes:
            layer = Linear(in_features, out_features, dtype=x.dtype, device=on, recipe=recipe_of(name) or "none")
            typer.echo(f"{name} on {device_name(on)}, torch {torch.__version__}\n\n{explain(layer, x)}\n")
