"""The tables of mutants are kept up with the code; ``make mutants`` runs them."""

from __future__ import annotations

from tests.helpers.mutants import ROOT, mutants


def test_mutants_fit_the_code() -> None:
    """The text of each is in its file once, what takes its place is Python, and its tests are there."""
    found = list(mutants())
    for mutant in found:
        source = (ROOT / mutant.path).read_text()
        changed = mutant.applied(source)
        assert changed != source, mutant.name
        compile(changed, mutant.path, "exec")
        files = [ROOT / each.partition("::")[0] for each in mutant.tests if ".py" in each]
        assert files and all(each.is_file() for each in files), mutant.name
    assert len({mutant.name for mutant in found}) == len(found) > 100
