"""The code in the documents runs, and what it asserts is true."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import re
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from minifloat import Format, Quantizer, formats
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.recipe import NAMES, QuantizerRole, named
from tests.helpers.distributed_pool import Pools, torchrun_environment

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")))
OPTIONAL = ("accelerate", "lightning", "peft", "torchao", "transformers")
"""Libraries that a guide is about: its code is skipped where they are not installed."""


class Block(NamedTuple):
    """A fenced python block: ``options`` is what follows the word python, such as ``no_run`` or ``ranks=2``."""

    code: str
    options: str


def python_blocks(document: str) -> list[Block]:
    """Those of a document that run, each by itself."""
    text = (ROOT / document).read_text()
    found = re.findall(r"^```python ?(.*)\n((?:.*\n)*?)```", text, re.MULTILINE)
    return [Block(code, options) for options, code in found if options != "no_run"]


BLOCKS = {document: python_blocks(document) for document in DOCUMENTS}


def parameters(on_ranks: bool) -> list[Any]:
    """Blocks for this process, or for a pool of ranks; an id is the document and the block's number."""
    return [
        pytest.param(block, id=f"{document}-{i}")
        for document, blocks in BLOCKS.items()
        for i, block in enumerate(blocks)
        if block.options.startswith("ranks=") == on_ranks
    ]


def run(code: str) -> None:
    exec(compile(code, "document", "exec", dont_inherit=True), {"__name__": "document"})


def run_on_rank(rank: int, world_size: int, code: str, folder: Path) -> None:
    """As torchrun would run it, in an empty folder that the ranks share."""
    with contextlib.chdir(folder), torchrun_environment(rank, world_size):
        run(code)


def test_documents_have_code() -> None:
    """The blocks are found: examples of use, the phases, the worked format and rule, a worked vector."""
    documents = "README.md", "docs/index.md", "docs/architecture.md", "docs/kernels.md", "docs/numerics.md"
    assert [len(BLOCKS[name]) for name in documents] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("block", parameters(on_ranks=False))
def test_code_in_documents(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block runs by itself; what it asserts holds."""
    assert not block.options
    for library in OPTIONAL:
        if re.search(rf"^(import|from) {library}\b", block.code, re.MULTILINE):
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    run(block.code)


@pytest.mark.parametrize("block", parameters(on_ranks=True))
def test_code_for_ranks_in_documents(block: Block, tmp_path: Path, worker_pool: Pools) -> None:
    """The same of blocks that torchrun starts."""
    worker_pool(int(block.options.removeprefix("ranks="))).run(run_on_rank, block.code, tmp_path)


def test_a_new_scale_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/kernels.md: an object that is made known by its name; casts, products and compilers follow."""
    code = next(block.code for block in BLOCKS["docs/kernels.md"] if "class Headroom" in block.code)
    monkeypatch.setitem(formats.SCALE_RULES, "headroom", None)  # type: ignore[arg-type]  # which restores the registry
    del formats.SCALE_RULES["headroom"]
    exec(compile(code, "document", "exec"), {"__name__": "document"})
    fmt = Format("e4m3", block=64, scale_rule="headroom")
    assert formats.parse(fmt.spec) == fmt
    operand = Quantizer(fmt)(torch.tensor([[3.0, -1.5]])).rowwise
    assert operand is not None and operand.codes.tolist() == [[0x76, 0xEE]]  # 224 and -112
    torch.testing.assert_close(operand.dequantize(), torch.tensor([[3.0, -1.5]]))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_are_tidy(document: str) -> None:
    """ASCII, lines of at most 120 characters outside of tables, and links to files that exist."""
    path = ROOT / document
    text = path.read_text()
    assert text.isascii()
    assert [line for line in text.splitlines() if len(line) > 120 and line[0] != "|"] == []
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_no_path_of_a_machine() -> None:
    """Results, and what the package carries, name no folder of whoever made them."""
    kinds = {".json", ".jsonl", ".md", ".py", ".svg", ".txt"}
    tops = (ROOT / name for name in ("benchmarks", "docs", "examples", "minifloat"))
    files = [file for top in tops for file in top.rglob("*") if file.suffix in kinds]
    path = re.compile(r"/(root|home|Users|work|workspace)/[\w.]")
    assert len(files) > 200 and [str(file) for file in files if path.search(file.read_text(errors="replace"))] == []


FILES = [
    str(file.relative_to(ROOT))
    for top in ("minifloat", "tests", "benchmarks", "docs")
    for file in (ROOT / top).rglob("*")
]
OF_READERS = ("tests/test_x.py", "train.py")
"""Files that a document tells its reader to write."""


@pytest.mark.parametrize("document", [*DOCUMENTS, "CONTRIBUTING.md"])
def test_files_in_documents_exist(document: str) -> None:
    """A path may begin in any folder: `nn/linear.py`."""
    spans = re.findall(r"`([^`\n]+)`", (ROOT / document).read_text())
    paths = {path for span in spans for path in re.findall(r"[\w./*-]+\.py\b|\btests/[\w./*-]+", span)}
    patterns = {path: re.escape(path.removesuffix("/")).replace(r"\*", "[^/]*") for path in paths - {*OF_READERS}}
    assert [path for path, one in patterns.items() if not any(re.search(rf"(^|/){one}$", file) for file in FILES)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names_in_documents_exist(document: str) -> None:
    """What follows ``minifloat.``, and what blocks import from it, those that do not run included."""
    text = (ROOT / document).read_text()
    names = {name.rstrip(".") for name in re.findall(r"\bminifloat(?:\.[A-Za-z_]\w*)+", text)}
    for code in re.findall(r"^```python.*\n((?:.*\n)*?)```", text, re.MULTILINE):
        imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
        ours = [node for node in imports if (node.module or "").startswith("minifloat")]
        names |= {f"{node.module}.{alias.name}" for node in ours for alias in node.names}
    assert [name for name in sorted(names) if not exists(name)] == []


def test_names_in_errors_exist() -> None:
    """What the library's strings name is found as a user writes it, where a function may hide a module."""
    named = {}
    for file in (ROOT / "minifloat").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        strings = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docs]
        for node in strings:
            for name in re.findall(r"\bminifloat(?:\.[A-Za-z_]\w*)+", str(node.value)):
                named[name] = f"{file.relative_to(ROOT)}:{node.lineno} names {name}"
    missing = [where for name, where in named.items() if not (exists(name) and is_attribute(name))]
    assert len(named) > 20 and missing == []


def is_attribute(name: str) -> bool:
    """Whether each part is an attribute of what is before it, once :func:`exists` has imported the modules."""
    found: Any = importlib.import_module("minifloat")
    return all((found := getattr(found, part, None)) is not None for part in name.split(".")[1:])


def exists(name: str) -> bool:
    """A module, or an attribute of one; or of an adapter whose library is not installed, it cannot be known."""
    if (adapter := re.match(r"minifloat\.adapters\.(\w+)", name)) and importlib.util.find_spec(adapter[1]) is None:
        return True
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            found: Any = importlib.import_module(".".join(parts[:end]))
            return all((found := getattr(found, part, None)) is not None for part in parts[end:])
    return False


def test_bytes_that_shared_weights_send() -> None:
    """The table of docs/etp.md, for an element of a weight, from the operands that ranks gather."""
    text = (ROOT / "docs/etp.md").read_text()
    found = re.findall(r"^\| (.+) \| (\S+) \| (\S+) \| 2 \| (\S+) \|$", text, re.MULTILINE)
    rows = {title.split(",")[0]: [float(number) for number in numbers] for title, *numbers in found}
    weight = torch.randn(512, 1024)
    for title, recipe in {"one scale": "current", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}.items():
        quantized = named(recipe).resolve(QuantizerRole("linear", "weight"))[0](weight)
        both = [
            sum(tensor.nbytes for tensor in (operand.codes, operand.scale_inv) if tensor is not None) / weight.numel()
            for operand in (quantized.along(ROWWISE), quantized.along(COLUMNWISE))
        ]
        assert rows[title] == pytest.approx([*both, sum(both) + 2], abs=0.005), title


def test_pictures_are_drawn() -> None:
    """The script of the pictures gives the files that are there."""
    drawn = runpy.run_path(str(ROOT / "docs/pictures/draw.py"))["PICTURES"]
    assert {name: draw() for name, draw in drawn.items()} == {
        path.name: path.read_text() for path in (ROOT / "docs/pictures").glob("*.svg")
    }


def test_every_recipe_has_a_row() -> None:
    text = (ROOT / "docs/recipes.md").read_text()
    assert [name for name in NAMES if f"`{type(named(name)).__name__}`, `{name}` |" not in text] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180
