"""`minifloat doctor`: what this machine has, what runs on it and how, in plain print: it needs torch alone."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

import minifloat
from minifloat.backends import table
from minifloat.tools.cli import device_name

PACKAGES = ("torch", "triton", "typer", "rich", "matplotlib")


def show(device: torch.device) -> None:
    """Prints all versions, and what runs native, by our kernels or emulated on the device, and why."""
    for name, version in versions().items():
        print(f"{name:<12}{version}")
    print(f"\non {device_name(device)}\n")
    rows = [("operation", "formats", "backend", "why"), *table(device)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]))


def versions() -> dict[str, str]:
    """The versions of all that decides the numbers and the speed; "not installed" where it is not."""
    found = {"minifloat": minifloat.__version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["torch"] = torch.__version__  # with the build that it is of
    found["cuda"] = torch.version.cuda or "not in this build of torch"
    for index in range(torch.cuda.device_count()):
        found[f"cuda:{index}"] = device_name(torch.device("cuda", index))
    return found
