"""The release: an sdist, the wheel that is built from it, and what runs of that where PyTorch alone is installed."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
USE = """
import importlib.metadata, pathlib, sys
import torch, minifloat
assert pathlib.Path(minifloat.__file__).is_relative_to(sys.prefix), minifloat.__file__
assert importlib.metadata.version("minifloat") == minifloat.__version__
layer = minifloat.Linear(32, 48, recipe="mxfp8")
layer(torch.randn(3, 32)).sum().backward()
assert layer.weight.grad.isfinite().all()
"""


def run(*command: object, cwd: Path, code: int = 0) -> str:
    """What a command writes, which ends with this code; it finds nothing by PYTHONPATH."""
    done = subprocess.run(
        [str(each) for each in command], cwd=cwd, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def closure(names: list[str]) -> set[str]:
    """The distributions that these need, as they are installed here."""
    found: set[str] = set()
    while names:
        name = re.split(r"[^\w.-]", names.pop())[0].lower().replace("_", "-")
        try:
            needed = importlib.metadata.requires(name) or [] if name not in found else []
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
        found.add(name)
        names += [each for each in needed if "extra ==" not in each]
    return found


def link(names: list[str], folder: Path) -> None:
    """Puts links to what these distributions and those that they need have into a folder."""
    folder.mkdir(exist_ok=True)
    for name in closure(names):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel made of that."""
    place = tmp_path_factory.mktemp("release")
    (place / "tree").mkdir()
    for name in ("minifloat", "tests", "minifloat_command.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        source, ignored = ROOT / name, shutil.ignore_patterns("__pycache__")
        if source.is_dir():
            shutil.copytree(source, place / "tree" / name, ignore=ignored)
        else:
            shutil.copy(source, place / "tree" / name)
    build = "from setuptools import build_meta; print(build_meta.build_{}({!r}))"
    run(sys.executable, "-c", build.format("sdist", str(place)), cwd=place / "tree")
    (sdist,) = place.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        file.extractall(place / "unpacked", filter="data")
    (source,) = (place / "unpacked").iterdir()
    run(sys.executable, "-c", build.format("wheel", str(place)), cwd=source)
    return place


def test_wheel_has_the_package_its_types_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"minifloat-{PROJECT['version']}-py3-none-any.whl"
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = [file.relative_to(ROOT) for file in (ROOT / "minifloat").rglob("*") if file.is_file()]
    sources = {str(file) for file in package if "__pycache__" not in file.parts}
    assert files == sources | {"minifloat_command.py"} and "minifloat/py.typed" in files
    metadata = zipfile.ZipFile(wheel).read(f"minifloat-{PROJECT['version']}.dist-info/METADATA").decode()
    assert re.findall("^Requires-Dist: (.*)$", metadata, re.M)[0] == "torch>=2.11" and "Typing :: Typed" in metadata


def test_it_runs_where_only_pytorch_is(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python, command = venv / "bin" / "python", venv / "bin" / "minifloat"
    pip = sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel
    run(*pip, cwd=tmp_path)
    packages = next(venv.glob("lib/python*/site-packages"))
    (packages / "linked.pth").write_text(f"{tmp_path / 'linked'}\n")
    link(["torch"], tmp_path / "linked")
    run(python, "-c", USE, cwd=tmp_path)
    assert "scaled product" in run(command, "doctor", "--device", "cpu", cwd=tmp_path)
    assert "pip install typer rich matplotlib" in run(command, "train", cwd=tmp_path, code=1)
    link(PROJECT["optional-dependencies"]["train"], tmp_path / "linked")
    assert "--recipe" in run(command, "train", "--help", cwd=tmp_path)


EXTRAS = PROJECT["optional-dependencies"]


def requirements(extras: str) -> set[str]:
    """The distributions that extras name, those of extras in them too."""
    found = set()
    for extra in extras.split(","):
        for needed in EXTRAS[extra]:
            other = re.match(r"minifloat\[(.*)\]", needed)
            found |= requirements(other[1]) if other else {re.split("[<>= ]", needed)[0]}
    return found


@pytest.mark.parametrize(
    "page, extras", [("docs/huggingface.md", "hf,peft"), ("docs/lightning.md", "lightning"), ("docs/torchtitan.md", "")]
)
def test_extras_bring_what_a_page_imports(page: str, extras: str) -> None:
    named = requirements(extras) if extras else set()
    blocks = re.findall(r"^```python.*\n((?:.*\n)*?)```", (ROOT / page).read_text(), re.M)
    imported = {name for block in blocks for name in re.findall(r"^(?:from|import) (\w+)", block, re.M)}
    foreign = imported - sys.stdlib_module_names - {"torch", "minifloat"}
    assert foreign <= closure(list(named)) | named, foreign
    assert not extras or f'pip install ".[{extras}]"' in (ROOT / page).read_text()


def test_the_extra_of_transformers_brings_what_its_trainer_imports() -> None:
    assert requirements("hf") == {"transformers", "accelerate"} and requirements("test") >= requirements(
        "train,hf,peft"
    )
