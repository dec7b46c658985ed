"""The `minifloat` command. Its commands need typer and rich, `train` matplotlib too: the extra `train`."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import typer


NEEDED = ("typer", "rich", "matplotlib")


def main() -> None:
    """The entry point; `doctor` and `--version` need torch alone."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        build()(prog_name="minifloat")
    elif sys.argv[1:2] == ["--version"]:
        print_version(True)
    elif sys.argv[1:2] == ["doctor"]:
        plain_doctor(sys.argv[2:])
    else:
        sys.exit(f"the minifloat command needs {', '.join(missing)}; get them with: pip install {' '.join(missing)}")


def plain_doctor(arguments: Sequence[str]) -> None:
    """`minifloat doctor` without typer."""
    from argparse import ArgumentParser

    load()
    from minifloat.tools.cli.doctor import show

    parser = ArgumentParser("minifloat doctor")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    try:
        show(choose_device(parser.parse_args(arguments).device))
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")


def print_version(asked: bool) -> None:
    """Prints the version and ends the command, where it was asked for."""
    if asked:
        load()
        import minifloat

        print(f"minifloat {minifloat.__version__}")
        sys.exit()


def build() -> typer.Typer:
    """The application with all its commands."""
    import typer

    from minifloat.tools.cli import generate, train
    from minifloat.tools.cli.late import late
    from minifloat.tools.cli.options import Command

    app = typer.Typer(name="minifloat", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.command("train", cls=Command)(train.train)
    app.command("generate", cls=Command)(generate.generate)
    asked = typer.Option(False, "--version", callback=print_version, is_eager=True, help="show the version and end")
    name = typer.Option("auto", help="auto, cpu, cuda or cuda:N")

    @app.callback()
    def about(version: bool = asked) -> None:
        """Train PyTorch transformers in 8-bit and 4-bit floating point."""

    @app.command(cls=Command)
    def doctor(device: str = name) -> None:
        """Show what runs native, by our kernels or emulated on this machine, and why; with all versions."""
        load()
        from minifloat.tools.cli.doctor import show

        with user_errors():
            show(choose_device(device))

    late(app, "study", "Compare the final losses of recipes with bf16's over several seeds, beside control pairs.")
    late(app, "bench", "Measure speed beside plain torch, torchao and Transformer Engine, each result checked first.")
    late(app, "advise", "Predict which linears of a model gain from which recipe, from measured times.", "command")
    late(
        app, "bisect", "Find the layers that must stay in high precision, by their casts and by short runs.", "command"
    )
    late(app, "explain", "Show the kernels of a Linear under recipes, with shapes and bytes, in order.", "command")
    late(app, "inspect-report", "Draw what the casts of a run lose, as minifloat.inspect wrote it.", "command")
    late(app, "export-weights", "Write the weights of a model in a layout that inference engines load.", "command")
    return app


def load() -> None:
    """Executes the package, and imports PyTorch with it, where `minifloat_command` has put that off."""
    package = sys.modules["minifloat"]
    if not hasattr(package, "__version__"):
        assert package.__spec__ is not None and package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)


@contextmanager
def user_errors() -> Iterator[None]:
    """A ValueError or an OSError is a user's mistake: it is printed without a traceback, and the exit code is 2."""
    import typer

    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def program() -> str:
    """Command line that started this program, for a shell in any folder."""
    started = Path(sys.argv[0]).absolute()
    if started.parts[-2:] == ("minifloat", "__main__.py"):
        return f"{shlex.quote(sys.executable)} -m minifloat"
    return shlex.quote(str(started)) if started.name == "minifloat" else "minifloat"


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one, else the CPU. Raises ValueError for any other."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device: there is no device {name!r}; choose auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise ValueError(f"--device: minifloat does not run on {name!r}; choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device {name} was asked for, but PyTorch sees {torch.cuda.device_count()} GPUs; try --device cpu"
        )
    return device


def device_name(device: torch.device) -> str:
    """The device in words, such as "cuda: NVIDIA H200, compute capability 9.0"."""
    import platform

    import torch

    if device.type != "cuda":
        return f"{device}: {platform.machine()}, {torch.get_num_threads()} threads"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device}: {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
