"""What runs: files, functions and Python calls of a forward and of a backward.

    python benchmarks/path.py [linear ...] [--json OUT]   a table of the cases whose name contains one of them
    python benchmarks/path.py --trace linear   every call of the first such case, indented, with file and line
    python benchmarks/path.py --docs   write the tables of lines and of calls in docs/architecture.md anew

A call is a Python frame that is entered: a function, an element that a generator gives, before Python 3.12 also a
comprehension; functions of C and this file's do not count. ``files`` and ``functions`` are minifloat's own, ``calls``
all: minifloat's, PyTorch's and others (the standard library, generated methods), of which ``in operations`` are
entered by PyTorch's dispatcher, on a CPU the references. Each pass is the fourth, on a CPU, in bf16. A backward runs in
the thread that calls it; new threads are counted too. Sharded cases run on two gloo ranks; the first is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import minifloat
from minifloat import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, TransformerLayer, distributed

PLACES = {"minifloat": Path(minifloat.__file__).parent, "torch": Path(torch.__file__).parent}
BF16 = torch.bfloat16
DOCS = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"


class Call(NamedTuple):
    """A frame; ``below`` an operation of PyTorch, its ``place`` a key of ``PLACES`` or others."""

    depth: int
    below: bool
    place: str
    file: str
    function: str
    line: int


def sequence(mode: str) -> nn.Module:
    sizes = (64, 128) if mode == "column" else (128, 64)
    ranks: dict[str, Any] = {"parallel_mode": mode, "sequence_parallel": True, "tp_group": dist.group.WORLD}
    return Linear(*sizes, dtype=BF16, recipe="current", **ranks)


def etp() -> nn.Module:
    return Linear(64, 64, dtype=BF16, recipe="current", etp_group=dist.group.WORLD)


class Split(nn.Module):
    """A grouped linear whose experts get equal shares of the rows."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.experts = GroupedLinear(4, 64, 64, dtype=BF16, recipe=recipe)

    def forward(self, x: torch.Tensor) -> Any:
        return self.experts(x, [8] * 4)


class Layer(nn.Module):
    """A transformer layer on [s, b, h], b = 1."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.layer = TransformerLayer(64, 128, 4, dtype=BF16, recipe=recipe)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x[:, None])[:, 0]


def two_sharded() -> nn.Module:
    model = nn.Sequential(*[Linear(64, 64, dtype=BF16, recipe="current") for _ in range(2)])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model, model):
        distributed.fully_shard(part, mesh=mesh)
    return model


RECIPES = ("current", "delayed", "block", "mxfp8", "nvfp4")
CASES: dict[str, Any] = {f"linear {recipe}": partial(Linear, 64, 64, dtype=BF16, recipe=recipe) for recipe in RECIPES}
CASES |= {"LayerNormLinear current": partial(LayerNormLinear, 64, 64, dtype=BF16, recipe="current")}
CASES |= {"MLP current": partial(LayerNormMLP, 64, 64, dtype=BF16, recipe="current")}
CASES |= {"layer current": partial(Layer, "current"), "experts mxfp8": partial(Split, "mxfp8")}
CASES |= {"torch linear": partial(nn.Linear, 64, 64, dtype=BF16)}
SHARDED = {"column sequence-parallel current": partial(sequence, "column"), "etp current": etp}
SHARDED |= {"row sequence-parallel current": partial(sequence, "row")}
SHARDED |= {"fully_shard of two linears current": two_sharded}


def calls_of(function: Callable[[], Any]) -> tuple[list[Call], Any]:
    """The frames that ``function`` enters, in order, and what it returns."""
    found: list[Call] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or (path := frame.f_code.co_filename) == __file__:
            return
        depth, below, caller = 0, False, frame.f_back
        while caller is not None and caller.f_code.co_filename != __file__:
            depth, below = depth + 1, below or caller.f_code.co_filename == torch._ops.__file__
            caller = caller.f_back
        place = next((name for name, folder in PLACES.items() if path.startswith(f"{folder}{os.sep}")), "others")
        file = os.path.relpath(path, PLACES[place].parent) if place in PLACES else path
        found.append(Call(depth, below, place, file, frame.f_code.co_qualname, frame.f_code.co_firstlineno))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        result = function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found, result


def passes(make: Callable[[], nn.Module]) -> dict[str, list[Call]]:
    """The calls of the fourth forward and backward."""
    torch.manual_seed(0)
    module, x = make(), torch.randn(32, 64, dtype=BF16, requires_grad=True)
    for _ in range(4):
        forward, y = calls_of(lambda: module(x))
        backward, _ = calls_of(partial(y.backward, torch.ones_like(y)))
        module.zero_grad()
        x.grad = None
    return {"forward": forward, "backward": backward}


def counts(calls: list[Call]) -> dict[str, int]:
    functions = {call[3:] for call in calls if call.place == "minifloat"}
    found = {"files": len({file for file, *_ in functions}), "functions": len(functions), "calls": len(calls)}
    found |= {place: sum(call.place == place for call in calls) for place in (*PLACES, "others")}
    return found | {"in operations": sum(call.below for call in calls)}


def table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """A table in Markdown."""
    body = [f"| {' | '.join(map(str, row))} |" for row in (columns, *rows)]
    return "\n".join([body[0], "|---" * len(columns) + "|", *body[1:]])


def lines() -> list[tuple[str, int, int]]:
    """Each folder of the library, its files and their lines; of all but the tools last."""
    library = PLACES["minifloat"]
    files = [file.relative_to(library) for file in library.rglob("*.py")]
    folders = [file.parts[0] if len(file.parts) > 1 else "files beside the folders" for file in files]
    found = {folder: (0, 0) for folder in [*sorted(set(folders) - {"tools"}), "tools", "all but tools"]}
    for file, folder in zip(files, folders, strict=True):
        count = len((library / file).read_text().splitlines())
        for key in [folder] if folder == "tools" else [folder, "all but tools"]:
            found[key] = found[key][0] + 1, found[key][1] + count
    return [(folder, *numbers) for folder, numbers in found.items()]


def write_docs(found: dict[str, dict[str, int]]) -> None:
    """Writes the two tables in place of those in the document, from their header rows to the next empty line."""
    each = {name: ", ".join(str(row[key]) for key in ("files", "functions", "calls")) for name, row in found.items()}
    names = [name.removesuffix(", forward") for name in each if name.endswith("forward")]
    calls = [(name, each[f"{name}, forward"], each[f"{name}, backward"]) for name in names]
    text = DOCS.read_text()
    for columns, rows in ((("folder", "files", "lines"), lines()), (("module", "forward", "backward"), calls)):
        start = text.index(f"\n| {' | '.join(columns)} |") + 1
        text = text[:start] + table(columns, rows) + text[text.index("\n\n", start) :]
    DOCS.write_text(text)


def on_rank(rank: int, names: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", world_size=2, rank=rank)
    Path(folder, f"{rank}.json").write_text(json.dumps({name: passes(SHARDED[name]) for name in names}))
    dist.barrier()
    os._exit(0)  # destroying a gloo group that FSDP has used aborts now and then


def measure(names: list[str]) -> dict[str, list[Call]]:
    """The calls of each pass of the named cases."""
    found = {name: passes(CASES[name]) for name in names if name in CASES}
    if sharded := [name for name in names if name in SHARDED]:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(on_rank, (sharded, folder), nprocs=2)  # type: ignore[no-untyped-call]
            found |= json.loads(Path(folder, "0.json").read_text())
    return {f"{name}, {key}": [Call(*call) for call in calls] for name in found for key, calls in found[name].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", default=[""])
    parser.add_argument("--trace", metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [options.trace] if options.trace else options.only
    names = [name for name in (*CASES, *SHARDED) if any(each in name for each in wanted)]
    found = measure(names[:1] if options.trace else names)
    for name, calls in found.items() if options.trace else ():
        print(name, *(f"{'  ' * each.depth}{each.function}  {each.file}:{each.line}" for each in calls), sep="\n")
    numbers = {name: counts(calls) for name, calls in found.items()}
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    for name, row in numbers.items():
        print(f"{name:45}" + "".join(f"{number:6} {column:9}" for column, number in row.items()).rstrip())
    if options.docs:
        write_docs(numbers)
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
