"""Builds of the documentation: hooks of MkDocs, and types that a reader knows for the API reference.

``mkdocs.yml`` names this file twice. As hooks it lets pages link to files outside of ``docs/``, which the site then
serves below ``files/``; as an extension of griffe it prepares the signatures and docstrings of the reference.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)#:\s]+)((?:#[^)\s]*)?)\)")
FENCE = re.compile(r"^( *```python) .+$", re.MULTILINE)
"""Options of a block of code, which tests read."""
TABLE = re.compile(r"^=+(?: +=+)+\n(?:.+\n)*=+(?: +=+)+$", re.MULTILINE)
ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")


# ---- links to files outside of docs/ ----


def source_of(uri: str) -> Path:
    """Path of a page in the repository."""
    return ROOT / uri.removeprefix("files/") if uri.startswith("files/") else ROOT / "docs" / uri


def outside(uri: str, text: str) -> set[Path]:
    """Files outside of ``docs/`` that a page links to; folders, which have no page, stay as they are."""
    paths = {(source_of(uri).parent / link).resolve() for link, _ in LINK.findall(text)}
    return {path for path in paths if path.is_file() and not path.is_relative_to(ROOT / "docs")}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files that pages link to, and those that these link to."""
    pages = [file.src_uri for file in files.documentation_pages()]
    while pages:
        uri = pages.pop()
        for path in outside(uri, source_of(uri).read_text()):
            new = "files/" + path.relative_to(ROOT).as_posix()
            if new not in files.src_uris:
                files.append(File.generated(config, new, abs_src_path=str(path)))
                pages += [new] * (path.suffix == ".md")
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links at where the site has their files. A link to nothing stays, and fails a strict build."""
    uri = page.file.src_uri

    def pointed(match: re.Match[str]) -> str:
        path = (source_of(uri).parent / match[1]).resolve()
        if not path.is_relative_to(ROOT):
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        new = name.removeprefix("docs/") if name.startswith("docs/") else f"files/{name}"
        relative = os.path.relpath(new, os.path.dirname(uri) or ".")
        return f"]({relative}{match[2]})" if new in files.src_uris else match[0]

    return LINK.sub(pointed, FENCE.sub(r"\1", markdown))


def on_post_build(config: MkDocsConfig) -> None:
    """Removes what the theme brings for its own developers and for searches in other languages."""
    scripts = Path(config.site_dir, "assets/javascripts")
    shutil.rmtree(scripts / "lunr")
    for path in Path(config.site_dir, "assets").rglob("*.map"):
        path.unlink()


# ---- the API reference ----


def markdown_table(match: re.Match[str]) -> str:
    """Writes a table of a docstring, with columns below rules, as Markdown. A row without a first cell goes on."""
    rule, *lines = match[0].splitlines()
    starts = [column.start() for column in re.finditer("=+", rule)]
    spans = [slice(*ends) for ends in zip(starts, [*starts[1:], None], strict=True)]
    cut = [[line[span].strip() for span in spans] for line in lines if line[0] != "="]
    rows = [] if sum(line[0] == "=" for line in lines) > 1 else [[""] * len(spans)]
    for cells in cut:
        if cells[0] or not rows:
            rows.append(cells)
        else:
            rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], cells, strict=True)]
    rows.insert(1, ["---"] * len(spans))
    return "\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


class ReaderTypes(griffe.Extension):
    """Writes ``int`` where an annotation says ``Size``, lists the keywords of ``**options``, drops Sphinx's roles."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        self.package = pkg
        self.visit(pkg)

    def visit(self, parent: griffe.Module | griffe.Class) -> None:
        for member in parent.members.values():
            if member.is_alias:
                continue
            if member.docstring:
                member.docstring.value = TABLE.sub(markdown_table, ROLE.sub(r"`\1`", member.docstring.value))
            if isinstance(member, griffe.Function):
                self.rewrite(member)
            elif isinstance(member, griffe.Module | griffe.Class):
                self.visit(member)
            elif isinstance(member, griffe.Attribute) and isinstance(member.annotation, griffe.Expr):
                member.annotation = self.plain(member.annotation)

    def rewrite(self, function: griffe.Function) -> None:
        """Replaces the types of parameters and of the result."""
        parameters = []
        for parameter in function.parameters:
            annotation = parameter.annotation
            if isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Unpack":
                parameters += self.keywords(annotation.slice)
            else:
                parameters.append(parameter)
        for parameter in parameters:
            parameter.annotation = self.plain(parameter.annotation)
        function.parameters = griffe.Parameters(*parameters)
        function.returns = self.plain(function.returns)

    def keywords(self, options: Any) -> list[griffe.Parameter]:
        """Keywords of a ``TypedDict``, those of its bases first."""
        found = self.defined(options)
        if not isinstance(found, griffe.Class):
            return []
        inherited = [parameter for base in found.bases for parameter in self.keywords(base)]
        return inherited + [
            griffe.Parameter(name, annotation=one.annotation, kind=griffe.ParameterKind.keyword_only, default="...")
            for name, one in found.attributes.items()
        ]

    def defined(self, name: Any) -> griffe.Object | None:
        """Object of the package that a name in an annotation stands for."""
        path = name.canonical_path if isinstance(name, griffe.Expr) else ""
        try:
            found = self.package[path.removeprefix("minifloat.")] if path.startswith("minifloat.") else None
            return found.final_target if isinstance(found, griffe.Alias) else found
        except (KeyError, griffe.AliasResolutionError):
            return None

    def plain(self, annotation: Any) -> Any:
        """The annotation with ``Annotated`` types, literals and unions of ours spelled out."""
        if isinstance(annotation, griffe.ExprName):
            found = self.defined(annotation)
            if not isinstance(found, griffe.Attribute) or not isinstance(found.value, griffe.Expr):
                return annotation
            value = found.value
            if isinstance(value, griffe.ExprSubscript) and str(value.left) == "Annotated":
                return self.plain(value.slice.elements[0])
            return self.plain(value)
        if isinstance(annotation, griffe.ExprBinOp):
            left, right = self.plain(annotation.left), self.plain(annotation.right)
            return griffe.ExprBinOp(left, annotation.operator, right)
        if isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) != "Literal":
            return griffe.ExprSubscript(annotation.left, self.plain(annotation.slice))
        if isinstance(annotation, griffe.ExprTuple):
            return griffe.ExprTuple([self.plain(one) for one in annotation.elements], annotation.implicit)
        return annotation
