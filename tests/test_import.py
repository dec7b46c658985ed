"""Importing the package: what it brings along, what it leaves alone, and the names that it promises."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import minifloat

ROOT = Path(minifloat.__file__).parents[1]
PUBLIC = [
    "ConversionReport", "CustomRecipe", "DefaultFilter", "DelayedScaling", "DelayedScalingRequest",
    "DotProductAttention", "EtpEmbedding", "Float8BlockScaling", "Float8CurrentScaling", "Float8RowwiseScaling",
    "Format", "GroupedLinear", "GroupedMLP", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear",
    "MXFP4BlockScaling", "MXFP6BlockScaling", "MXFP8BlockScaling", "MoE", "MultiheadAttention", "NVFP4BlockScaling",
    "Operand", "Quantized", "QuantizedTensor", "Quantizer", "QuantizerRole", "RMSNorm", "Recipe",
    "RotaryPositionEmbedding", "TopKRouter", "TransformerLayer", "VocabParallelEmbedding", "W4A8BlockScaling",
    "apply_rotary_pos_emb", "autocast", "cast_all", "cast_weights", "checkpoint", "checkpoint_context_fn", "convert",
    "cross_entropy", "explain", "export", "find_amaxes", "get_default_recipe", "inspect", "linear_cross_entropy",
    "load_mxfp4", "make_graphed_callables", "optim", "prepare", "quantized_model_init", "revert", "router_losses",
    "save_mxfp4",
]  # fmt: skip
"""A name may be added here; one that is taken away or renamed breaks somebody's program."""

OPTIONAL = ["triton", "typer", "rich", "matplotlib", "ml_dtypes", "safetensors", "hypothesis", "pytest"]
"""Extras, and what only the tests use."""

LATE = ["torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "torch._inductor", "numpy"]
"""Parts that are slow to import, or absent in some installations, and that a model may never need."""

PROBE = """
import json, sys
import torch
before = set(sys.modules)
{statement}
loaded = sorted(set(sys.modules) - before)
print(json.dumps({{"loaded": loaded, "cuda": torch.cuda.is_initialized()}}))
"""


@functools.cache
def after(statement: str) -> Any:
    """What running ``statement`` in a new process adds to what ``import torch`` has loaded."""
    command = [sys.executable, "-W", "error::DeprecationWarning:minifloat", "-c", PROBE.format(statement=statement)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_import_makes_no_cuda_context() -> None:
    assert after("import minifloat")["cuda"] is False


@pytest.mark.parametrize("module", OPTIONAL + LATE)
def test_import_leaves_alone(module: str) -> None:
    """Neither an extra nor a slow part of PyTorch is loaded, beyond what ``import torch`` has loaded itself."""
    loaded = after("import minifloat")["loaded"]
    assert [name for name in loaded if name == module or name.startswith(f"{module}.")] == []


def test_import_loads_only_the_package_and_torch() -> None:
    loaded = {name.partition(".")[0] for name in after("import minifloat")["loaded"]}
    assert loaded - set(sys.stdlib_module_names) <= {"minifloat", "torch"}


def test_import_leaves_the_programs_that_use_it_out() -> None:
    loaded = after("import minifloat")["loaded"]
    assert [name for name in loaded if name.startswith(("minifloat.tools.cli", "minifloat.tools.train"))] == []


def test_names_of_other_libraries_are_loaded_at_use() -> None:
    for statement, used in (("import minifloat", False), ("from minifloat import fp8_autocast", True)):
        assert ("minifloat.compat.te" in after(statement)["loaded"]) is used


def test_building_a_layer_makes_no_cuda_context() -> None:
    statement = "import minifloat; minifloat.Linear(16, 16, recipe='delayed')(torch.ones(2, 16)).sum().backward()"
    assert after(statement)["cuda"] is False


def test_public_names() -> None:
    assert list(minifloat.__all__) == PUBLIC
    assert all(hasattr(minifloat, name) for name in PUBLIC)


def test_star_import_gives_the_public_names() -> None:
    names: dict[str, Any] = {}
    exec("from minifloat import *", names)
    assert set(names) - {"__builtins__"} == set(PUBLIC)


def test_names_that_submodules_promise_exist() -> None:
    for path in sorted(Path(minifloat.__file__).parent.glob("**/*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if {"cli", "train", "adapters", "__main__"} & set(parts):
            continue  # these need the extras
        module = import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        missing = [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)]
        assert not missing, f"{module.__name__}: {missing}"


def test_version_is_that_of_the_project() -> None:
    line = f'version = "{minifloat.__version__}"'
    assert line in (ROOT / "pyproject.toml").read_text().splitlines()
