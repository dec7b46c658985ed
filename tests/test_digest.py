"""``benchmarks/digest.py``: digests repeat, and a change of one bit shows."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from benchmarks import digest
from minifloat import Linear, Quantizer
from minifloat.formats import Format

ONLY = "Linear odd no bias"


def test_records_the_same_twice() -> None:
    first, second = (digest.record(only=ONLY) for _ in range(2))
    assert len(first["entries"]) >= 6 and first == second and not digest.compare(first, second)
    assert not [error for entry in first["entries"].values() for error in digest.errors(entry)]
    assert first["header"]["torch"] == torch.__version__


def test_one_bit_shows() -> None:
    """In a value, in its dtype, in its shape, in a code of an operand."""
    x = torch.linspace(1, 2, 32).view(2, 16)
    quantized = Quantizer(Format("e4m3"))(x)
    results = {"x": x, "quantized": quantized, "none": None}
    before, other = digest.digests(results), x.clone()
    other[1, 3] = torch.nextafter(other[1, 3], torch.tensor(9.0))
    quantized.rowwise.codes[0, 0] ^= 1  # type: ignore[union-attr]
    for changed in (other, x.bfloat16(), x.view(4, 8), [x], None):
        assert digest.digests(results | {"x": changed})["x"] != before["x"]
    after = digest.digests(results)
    assert after["quantized"] != before["quantized"] and after["x"] == before["x"]


def test_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(digest, "set_up", lambda device: None)  # the threads of this process stay as they are
    paths = [str(tmp_path / f"{name}.json") for name in "ab"]
    assert digest.main(["record", paths[0], "--only", f"{ONLY}, current"]) == 0
    found = json.loads(Path(paths[0]).read_text())
    changed = copy.deepcopy(found)
    changed["entries"][f"{ONLY}, current"]["y 0"] = "0"
    changed["entries"]["another"] = {}
    changed["header"]["threads"] = 1000
    Path(paths[1]).write_text(json.dumps(changed))
    capsys.readouterr()
    assert digest.main(["compare", paths[0], paths[0]]) == 0
    assert digest.main(["compare", *paths]) == 1
    told = capsys.readouterr().out
    assert f"differs: {ONLY}, current: y 0\n" in told and "new: another" in told and "threads was" in told


def test_error_is_recorded() -> None:
    def broken(device: torch.device) -> digest.Results:
        Linear(4, 4, device=device)(torch.ones(3, 5))
        return {}

    found = digest.run({"broken": broken, "other": broken}, torch.device("cpu"), "broken")
    assert list(found) == ["broken"] and "ValueError" in found["broken"]["error"]


@pytest.mark.slow
def test_ranks() -> None:
    name = "ranks: column odd, current"
    found = digest.of_ranks(2, "cpu", name)
    assert list(found) == [name] and {key[-1] for key in found[name]} == {"0", "1"}
    assert found[name] and not digest.errors(found[name])
    assert found == digest.of_ranks(2, "cpu", name)
