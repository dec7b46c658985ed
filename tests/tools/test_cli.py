"""The command itself: how it is started, and what of it needs torch alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import minifloat
from minifloat.recipe import NAMES
from minifloat.tools import cli
from minifloat.tools.cli import names
from minifloat.tools.train.model import MODELS

ROOT = Path(__file__).parents[2]

# A Python in which only torch, and what it brings along, can be found.
WITHOUT = """
import importlib.util, sys
find, gone = importlib.util.find_spec, ("typer", "rich", "matplotlib", "safetensors", "click")
importlib.util.find_spec = lambda name, *rest: None if name in gone else find(name, *rest)
for name in gone:
    sys.modules[name] = None
from minifloat.tools.cli import main
main()
"""


def test_no_message_installs_from_an_index_what_is_on_none() -> None:
    assert not [file for file in (ROOT / "minifloat").rglob("*.py") if "minifloat[" in file.read_text()]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False, env=environment
    )


def test_it_is_a_module_too() -> None:
    done = python("-m", "minifloat", "--version")
    assert (done.returncode, done.stdout) == (0, f"minifloat {minifloat.__version__}\n"), done.stderr


def test_doctor_needs_torch_alone() -> None:
    done = python("-c", WITHOUT, "doctor", "--device", "cpu")
    assert done.returncode == 0 and "scaled product" in done.stdout and "rich" in done.stdout, done.stderr


@pytest.mark.parametrize("line", ["--help", "train --help", "generate --help", "doctor --help", "train --recipe fp7"])
def test_help_and_a_wrong_recipe_wait_for_no_pytorch(line: str) -> None:
    """Which takes seconds to import; all the rest is a fifth of one."""
    probe = (
        "import atexit, sys; from minifloat_command import main; "
        "atexit.register(lambda: print('torch' in sys.modules, 'minifloat' in sys.modules)); main()"
    )
    done = python("-c", probe, *line.split())
    assert done.returncode == (2 if "fp7" in line else 0) and done.stdout.endswith("False True\n"), done


def test_names_in_the_help_are_those_that_exist() -> None:
    """Help names them without the modules that define them."""
    assert sorted(names.RECIPES) == sorted(NAMES) and tuple(MODELS) == names.MODELS


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (("--version",), 0, f"minifloat {minifloat.__version__}"),
        (("doctor", "--device", "tpu"), 2, "--device: there is no device 'tpu'; choose auto"),
        (("doctor", "--x"), 2, "--x"),
        (("train",), 1, "needs typer, rich, matplotlib; get them with: pip install typer rich matplotlib"),
    ],
)
def test_without_extras(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["minifloat", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = "".join(capsys.readouterr())
    assert said in printed + str(ended.value.code)
    # What sys.exit makes a process's exit code of: a message is printed, and the code is 1.
    assert code == (1 if isinstance(ended.value.code, str) else ended.value.code or 0)
