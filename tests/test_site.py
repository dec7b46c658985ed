"""The documentation builds as a site: a broken link is an error, and the API reference has every public name."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", out]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_site(tmp_path: Path) -> None:
    """One build for all checks: it takes seconds."""
    built = build(ROOT / "mkdocs.yml", tmp_path)
    assert built.returncode == 0, built.stderr
    check_api_reference_has_every_public_name(tmp_path)
    check_types_of_the_reference_are_those_of_python(tmp_path)
    check_pages_reach_files_outside_of_docs(tmp_path)


def text_of(page: Path) -> str:
    return unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def check_api_reference_has_every_public_name(site: Path) -> None:
    """Once, as a class or a function; a module of the same name does not count."""
    pages = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    assert "doc-object doc-class" in pages and "doc-object doc-module" not in pages
    for module in ("minifloat", "minifloat.functional", "minifloat.distributed", "minifloat.optim"):
        names = set(importlib.import_module(module).__all__) - {"optim"}  # a module, which has a page of its own
        headings = re.findall(rf'<h2 id="{module}(?:\.\w+)*\.(\w+)"', pages)
        assert sorted(name for name in names if headings.count(name) != 1) == [], module


def check_types_of_the_reference_are_those_of_python(site: Path) -> None:
    """``Size`` is an int to a reader, ``RecipeLike`` a recipe or a name; keywords behind ``**options`` are listed."""
    text = text_of(site / "api/layers.html")
    layer = text[text.index("TransformerLayer(") :]
    layer = layer[: layer.index("\n)")]
    assert "hidden_size: int" in layer and "recipe: Recipe | str | None" in layer and "tp_size: int" in layer
    reference = "".join(text_of(page) for page in (site / "api").glob("*.html"))
    ours = r"[:|\[] (Size|Count|PositiveFloat|NonNegativeFloat|Probability|FloatDtype|RecipeLike|Unpack)\b"
    assert re.findall(ours, reference) == []
    assert not re.search("^====", reference, re.MULTILINE)  # tables of docstrings are tables
    assert ":class:" not in reference and ":func:" not in reference and ":meth:" not in reference


def check_pages_reach_files_outside_of_docs(site: Path) -> None:
    """Results are served with the site, and their links among each other lead somewhere."""
    links = set(re.findall(r'href="(files/[^"#]+)', (site / "benchmarks.html").read_text()))
    assert "files/benchmarks/results/2026-11-27-h200-model.txt" in links
    pages = [site / "benchmarks.html", *(site / "files").rglob("*.html")]
    for page in pages:
        for link in re.findall(r'(?:href|src)="([^":#]+)["#]', page.read_text()):
            assert (page.parent / link).exists(), (page, link)


@pytest.mark.parametrize("link", ["../benchmarks/results/no-such-result.txt", "no-such-page.md", "#no-such-heading"])
def test_a_broken_link_fails(tmp_path: Path, link: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# A page\n\n[a link]({link})\n")
    settings = (ROOT / "mkdocs.yml").read_text().replace("[docs/site.py]", f"[{ROOT}/docs/site.py]")
    config = tmp_path / "mkdocs.yml"
    config.write_text(re.sub(r"(?s)\nnav:.*?(?=\nvalidation:)|\nplugins:.*", "\n", settings) + "plugins: []\n")
    built = build(config, tmp_path / "site")
    assert built.returncode != 0 and link.removeprefix("#") in built.stderr
