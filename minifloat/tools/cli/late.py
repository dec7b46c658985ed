"""Commands whose options are in modules that need PyTorch: those are imported when the command runs."""

import importlib

import typer

from minifloat.tools.cli import load
from minifloat.tools.cli.options import Command


def late(app: typer.Typer, name: str, about: str, function: str = "") -> None:
    """Adds the command that is `function`, or `name`, of the module `name`; `app` says `about` of it alone."""
    untouched = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}

    @app.command(name, help=about, add_help_option=False, context_settings=untouched)
    def command(context: typer.Context) -> None:
        load()
        module = importlib.import_module("minifloat.tools.cli." + name.replace("-", "_"))
        own = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        own.command(name, cls=Command)(getattr(module, function or name))
        own(args=context.args, prog_name=context.command_path)
