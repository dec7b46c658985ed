"""What AOTInductor makes of exported programs computes what the model computes; and files in another process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from minifloat import Linear, export
from tests.helpers.export_cases import IN, LAYERS, RECIPES, SHAPES, TOKENS, assert_same, trained, two_linears

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")

COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), reason="AOTInductor needs a C++ compiler"
)
IN_ANOTHER_PROCESS = """
import sys, torch, minifloat
x, y = torch.load(sys.argv[2])
with torch.no_grad():
    assert torch.equal(torch.export.load(sys.argv[1] + "/model.pt2").module()(x), y)
    assert torch.equal(torch._inductor.aoti_load_package(sys.argv[1] + "/package.pt2")(x), y)
"""


QUICKLY = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "cpp.vec_isa_ok": True,  # in lieu of compiling a program that tries it
}


def packaged(model: nn.Module, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[ExportedProgram, Any]:
    """The program, and what AOTInductor made of it."""
    program = export(model, (torch.randn(6, 5, IN, dtype=dtype),), dynamic_shapes=TOKENS)
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(folder / "package.pt2"), inductor_configs=QUICKLY
    )
    return program, torch._inductor.aoti_load_package(path)


@COMPILER
def test_aot_inductor(tmp_path: Path) -> None:
    """Every recipe in one model; its own code changes no bit of linears and ReLU."""
    parts = [nn.Sequential(Linear(IN, IN, recipe=recipe), nn.ReLU()) for recipe in RECIPES.values()]
    model = trained(nn.Sequential(*parts))
    _, run = packaged(model, tmp_path)
    for shape in SHAPES:
        assert_same(run, model, torch.randn(*shape, IN))


@COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["delayed", "current", "nvfp4"])
@pytest.mark.parametrize("layer", ["layernorm mlp", "transformer", "experts"])
def test_layers_by_aot_inductor(layer: str, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """To the bit, but for a router's softmax and the sums of experts' results, which Inductor computes in its order.

    Those differ in the last bits of fp32, of sums of at most four numbers; a later cast may round them apart.
    """
    model = LAYERS[layer][0](RECIPES[name]).to(dtype).eval()
    _, run = packaged(model, tmp_path, dtype)
    for shape in SHAPES:
        x = torch.randn(*shape, IN, dtype=dtype)
        if layer != "experts":
            assert_same(run, model, x)
            continue
        with torch.no_grad():
            y = model(x)
            torch.testing.assert_close(run(x), y, rtol=0, atol=4 * torch.finfo(dtype).eps * float(y.abs().max()))


@COMPILER
@pytest.mark.slow
def test_in_another_process(tmp_path: Path) -> None:
    """One that imported minifloat runs both kinds of files."""
    model, x = trained(two_linears("mxfp8")), torch.randn(4, 3, IN)
    program, _ = packaged(model, tmp_path)
    torch.export.save(program, tmp_path / "model.pt2")
    with torch.no_grad():
        torch.save((x, model(x)), tmp_path / "data.pt")
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path), str(tmp_path / "data.pt")]
    subprocess.run(command, check=True, timeout=200)
