"""Command lines that are wrong: each ends at once, with an error that names the option and the way out."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.helpers.micro_training import write_texts

WAY_OUT = re.compile(
    r"choose|give |check |change |try |name |leave |get it with|start |--help|[Ii]nvalid value|is not (a valid|one of)"
    "|No such option|Missing|requires|does not take"
)
"""What our errors say, and those of typer, which name the option and its type."""

HUGE = 10**18

VALUES = {
    "train TEXT": {
        "--steps": f"0 -1 {HUGE} 1.5 many nan", "--batch-size": f"0 -3 {HUGE} 10000000 x", "--accumulate": f"0 {HUGE}",
        "--learning-rate": "0 -1 nan inf fast", "--finish": "-0.1 1 nan x", "--steps 9 --finish": "0.95",
        "--seed": f"{10**30} x", "--save-every": "0 -1 x", "--keep": "0 -1 all",
        "--layers": f"0 -1 {HUGE} 1000000000 10001 x", "--hidden": f"0 -16 {HUGE} 40 17", "--heads": f"0 -1 {HUGE} 3 x",
        "--kv-heads": f"0 3 {HUGE} -2", "--mlp-hidden": f"0 100 {HUGE} -16", "--context": f"0 -1 {HUGE} x",
        "--experts": "-1", "--experts 4 --top-k": "5 0", "--experts 4 --expert-bias-rate": "-1 nan inf x",
        "--expert-bias-rate": "0.1",
        "--timeout": f"0 -1 nan inf {HUGE} soon", "--max-gap": "-1 nan x", "--max-gradient-gap": "-0.1 nan x",
        "--tp": f"0 -1 2 {HUGE} x", "--etp": f"0 -1 2 {HUGE} x", "--ep": f"0 -1 2 {HUGE} x",
        "--recipe": "fp7 MXFP8 '' current,block none", "--model": "huge '' Tiny gpt2",
        "--device": "tpu '' cuda:77 meta cuda:x cpu:1", "--token-dtype": "int8 float32",
        "--tokenizer": "nowhere.json TEXT/a.txt TEXT", "--vocabulary": "9", "--against": "current",
        "--out": "TEXT/a.txt TEXT/a.txt/b /proc/nothing ''", "--top-k": "2", "--resume-from": "nowhere TEXT TEXT/a.txt",
    },
    "train TEXT/tokens.bin": {
        "--vocabulary": f"2 {HUGE} x", "--vocabulary 70000 --token-dtype": "uint64",
        "--vocabulary 70000 --tokenizer": "nowhere.json",
    },
    "study TEXT --model micro": {
        "--recipes": "fp7 current,current nvfp4+fast current+no-rht current+parameters+parameters",
        "--seeds": f"1 0 -1 x 1,1 {HUGE}", "--resolution": "0", "--warmup": "2", "--clip": "0",
        "--experts": "-1", "--steps": f"0 {HUGE} x",
        "--batch-size": f"0 {HUGE}", "--learning-rate": "0 nan", "--evaluations": f"0 {HUGE}", "--workers": f"0 {HUGE}",
        "--minutes": "-1 nan x", "--max-gap": "-1 nan", "--max-gap-4bit": "nan", "--device": "tpu",
        "--out": "TEXT/a.txt ''",
    },
    "study TEXT": {"--model": "huge ''"},
    "generate TEXT": {"--tokens": "x", "--top-k": "x", "--temperature": "hot", "--seed": "x"},
    "bench": {"--rounds": f"0 -1 {HUGE} x", "--only": "nothing", "--device": "tpu", "--out": "''"},
    "doctor": {"--device": "tpu ''"},
}  # fmt: skip

OTHERS = {
    "train TEXT --against fp7": "--against: there is no recipe 'fp7'", "train TEXT --out 'a\nb'": "--out",
    "train TEXT --context 1000000": "context", "train nowhere": "nowhere",
    "train TEXT --layers 9000 --hidden 65536 --heads 64": "--layers", "train TEXT/empty": "TEXT/empty",
    "train TEXT/a.txt/b": "a.txt/b", "train TEXT/tokens.bin": "--vocabulary", "train TEXT --resume": "--out",
    "train TEXT/tokens.bin TEXT/a.txt --vocabulary 70000": "one token file", "train TEXT --resume --out no": "--out",
    "train TEXT --resume --resume-from nowhere": "--resume", "train TEXT --fsdp": "--fsdp", "train TEXT --x": "--x",
    "train TEXT --steps": "--steps", "train TEXT --resume=yes": "--resume", "trian": "trian", "--quick": "--quick",
    "generate": "CHECKPOINT", "generate nowhere": "nowhere", "generate TEXT/a.txt": "TEXT/a.txt", "doctor more": "more",
    "study nowhere": "nowhere",
    "study TEXT --model micro --seeds many": "give a number of seeds, as 3",
    f"study TEXT --model micro --seeds 0,{10**30}": "the seed is",
    "study TEXT/tokens.bin --model micro": "text files", "bench nothing": "nothing",
}  # fmt: skip

BAD = {
    f"{command} {option}": [(f"{command} {option} {value}", option.split()[-1]) for value in values.split()]
    for command, options in VALUES.items()
    for option, values in options.items()
} | {"others": list(OTHERS.items())}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with TEXT, two text files, an empty folder and a token file."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "TEXT" / "empty").mkdir(parents=True)
    write_texts(folder / "TEXT")
    (folder / "TEXT" / "tokens.bin").write_bytes(bytes(range(256)) * 1000)
    return folder


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    yield
    assert sorted(place.rglob("*")) == before, "a command that is refused leaves nothing behind"


@functools.cache
def application() -> Any:
    from minifloat.tools.cli import build

    return build()


def run(line: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(application(), shlex.split(line), env={"COLUMNS": "200", "TERM": "dumb"})
    unexpected = None if isinstance(result.exception, SystemExit) else result.exception
    return result.exit_code, " ".join(result.output.split()), unexpected


@pytest.mark.parametrize("lines", BAD.values(), ids=BAD)
def test_it_names_the_option_and_the_way_out(lines: list[tuple[str, str]]) -> None:
    for line, named in lines:
        code, said, unexpected = run(line)
        assert unexpected is None and code == 2, (line, code, said, unexpected)
        assert named in said and WAY_OUT.search(said), (line, said)
        assert "Traceback" not in said and len(said) < 900, line


TYPED = {
    "train --recipie mxfp8": "--recipe", "train --recipe fp8": "did you mean mxfp8?",
    "train --recipe MXFP-8": "did you mean mxfp8?",
    "train --recipe delayd": "did you mean delayed?", "train --recipe Float8BlockScaling": "did you mean block?",
    "train --against bf-16": "did you mean bf16?", "train --model Small": "did you mean small?",
    "train --format mxfp8": "--recipe", "train --lr 1e-3": "--learning-rate", "train --batch 8": "--batch-size",
    "train --epochs 3": "--steps", "train --output x": "--out", "train --dim 64": "--hidden",
    "train --seq-len 128": "--context", "train --compare bf16": "--against", "train --continue": "--resume",
    "train --checkpoint runs": "--resume-from", "train --data TEXT": "PATHS, without an option",
    "generate --max-new-tokens 9": "--tokens", "bench --gpu": "--device", "benchmark": "'bench'",
}  # fmt: skip
"""What newcomers type, and what they mean."""


@pytest.mark.parametrize("line, meant", TYPED.items(), ids=TYPED)
def test_it_names_what_was_meant(line: str, meant: str) -> None:
    code, said, unexpected = run(line)
    said = said.replace(shlex.split(line)[-2 if len(line.split()) > 2 else -1], "", 1)  # not what was typed
    assert unexpected is None and code == 2 and meant in said, said
