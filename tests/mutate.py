"""Runs the tests against mutants of the package, small wrong changes of it, and reports those that no test notices.

``python -m tests.mutate`` runs those of ``tests/mutants/``, each on a copy of the package, with the tests of its table;
``--only NAME`` those whose name or file has NAME in it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.helpers.mutants import ROOT, Mutant, mutants

COPIED = ("minifloat", "tests", "benchmarks", "pyproject.toml")
OUTCOMES = {0: "SURVIVED", 1: "killed"}


def run(tests: Sequence[str], mutant: Mutant | None) -> tuple[int, str]:
    """pytest's exit status and output, on a copy of the package that ``mutant`` has changed."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for source in (ROOT / name for name in COPIED):  # with times, so that bytecode that is there serves
            if source.is_dir():
                shutil.copytree(source, copy / source.name, ignore=shutil.ignore_patterns("results"))
            else:
                shutil.copy2(source, copy)
        if mutant is not None:
            (copy / mutant.path).write_text(mutant.applied((copy / mutant.path).read_text()))
        command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"PYTHONPATH": directory}  # for processes that tests start
        done = subprocess.run(
            command, cwd=copy, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return done.returncode, done.stdout


def failed(output: str) -> list[str]:
    """The tests that pytest's summary names."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", output, re.MULTILINE)


def report(mutant: Mutant) -> tuple[bool, list[str]]:
    """Runs the tests of a mutant, and prints and returns whether it was killed, and by which."""
    status, output = run(mutant.tests, mutant)
    killers = failed(output)
    print(
        f"{OUTCOMES.get(status, f'BROKEN ({status})'):9} {mutant.name} ({mutant.path}) {' '.join(killers)}", flush=True
    )
    if status not in OUTCOMES:
        print(output[-2000:], flush=True)
    return status == 1, killers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="mutants whose name or file has NAME in it")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at a time")
    options = parser.parse_args()
    chosen = [each for each in mutants() if options.only in each.name or options.only in each.path]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(report, chosen))
    left = [each.name for each, (killed, _) in zip(chosen, found, strict=True) if not killed]
    tests = sorted({test for _, killers in found for test in killers})
    status, output = run(tests, None) if tests else (0, "")
    if status:
        print(f"fails without a mutant, too: {' '.join(failed(output)) or output[-2000:]}")
    print(f"{len(chosen) - len(left)} of {len(chosen)} killed; left: {', '.join(left) or 'none'}")
    sys.exit(bool(status or left or not chosen))


if __name__ == "__main__":
    main()
