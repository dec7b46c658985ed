"""Text from a checkpoint: the sampling against probabilities, the window, the command."""

from __future__ import annotations

import math
import os
import pickle
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from minifloat.recipe import NAMES, named
from minifloat.tools.train.checkpoint import TOKENIZER, locate
from minifloat.tools.train.generate import draw, generate, load_model
from tests.helpers.checkpoint_files import change_index
from tests.helpers.micro_training import CPU, MICRO, invoke, micro_model, save_tokenizer, write_texts

LOGITS = torch.tensor([0.3, -1.0, 2.0, 1.9, -math.inf], dtype=torch.float64)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `minifloat train` leaves of 30 steps under delayed scaling."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text").mkdir()
    code, output = invoke(
        "train", write_texts(folder / "text"), "--model", "micro", "--recipe", "delayed", "--steps", 30,
        "--batch-size", 4, "--device", "cpu", "--out", folder / "out",
    )  # fmt: skip
    assert code == 0, output
    return folder / "out"


# Sampling


@pytest.mark.parametrize("temperature, top_k", [(1.0, None), (0.5, None), (2.0, 2), (1.0, 99)])
def test_draws_have_the_softmax_probabilities(temperature: float, top_k: int | None) -> None:
    allowed = [0, 1, 2, 3, 4] if top_k is None or top_k > 5 else [2, 3]
    weights = {i: math.exp(float(LOGITS[i]) / temperature) for i in allowed}
    generator, count = torch.Generator().manual_seed(0), 4000
    drawn = Counter(draw(LOGITS, temperature, top_k, generator) for _ in range(count))
    assert set(drawn) <= {i for i in allowed if weights[i] > 0}
    for i, weight in weights.items():
        p = weight / sum(weights.values())
        assert abs(drawn[i] / count - p) <= 4.5 * math.sqrt(p * (1 - p) / count)


def test_a_temperature_of_zero_or_near_it_takes_the_most_likely() -> None:
    generator = torch.Generator()
    assert {draw(LOGITS, temperature, None, generator) for temperature in (0.0, 1e-300, 1e-6)} == {2}


class Echo(nn.Module):
    """Says the token after the last, modulo 10, and remembers what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.tolist()
        return nn.functional.one_hot((tokens + 1) % 10, 10).float() * 9


def test_the_window_slides() -> None:
    model = Echo()
    assert list(generate(model, [1, 2, 3], 4, context=4, temperature=0)) == [4, 5, 6, 7]
    assert model.seen == [[1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]
    assert list(generate(model, list(range(9)), 1, context=4, temperature=0)) == [9]
    assert model.seen[-1] == [5, 6, 7, 8]
    assert list(generate(model, [1], 0, context=4)) == []


def test_greedy_tokens_are_those_of_the_model(device: torch.device) -> None:
    model = micro_model().to(device).eval()
    made = list(generate(model, list(b"def "), 5, context=MICRO.context, temperature=0, dtype=torch.float32))
    tokens = list(b"def ")
    for token in made:
        assert token == int(model(torch.tensor([tokens], device=device))[0, -1].argmax())
        tokens.append(token)


# Checkpoints


@pytest.mark.parametrize("recipe", [None, *NAMES])
def test_any_recipe_loads_the_weights(out: Path, recipe: str | None) -> None:
    checkpoint = locate(out)
    model = load_model(checkpoint, None if recipe is None else named(recipe), CPU)
    saved = checkpoint.model_state()
    own = model.state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in own.items()) and not model.training
    assert any("amax_history" in name for name in own) == (recipe == "delayed")
    assert model(torch.zeros(1, 5, dtype=torch.int64)).isfinite().all()


# The command


def command(*arguments: object) -> tuple[int, str]:
    return invoke("generate", *arguments, "--device", "cpu")


def test_generate_command(out: Path) -> None:
    checkpoint = locate(out)
    code, text = command(checkpoint.path, "--prompt", "the quick", "--tokens", 20, "--temperature", 0)
    assert code == 0 and text.startswith("the quick") and len(text) == len("the quick") + 20 + 1
    for path in (out, out / "checkpoints", out / "checkpoints" / "delayed"):
        again = command(path, "--prompt", "the quick", "--tokens", 20, "--temperature", 0, "--recipe", "delayed")
        assert again == (0, text)
    samples = [command(out, "--tokens", 66, "--seed", seed, "--top-k", 20)[1] for seed in (0, 0, 1)]  # over the window
    assert samples[0] == samples[1] != samples[2]
    assert command(out, "--tokens", 3, "--recipe", "bf16")[0] == 0


def test_of_several_runs_it_takes_the_newest_and_the_recipe_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `make train` leaves them: the recipe's run beside its twin in bf16, in a folder of the newest date or not."""
    monkeypatch.chdir(tmp_path)
    code, output = command()
    assert code == 2 and "no run in runs has a checkpoint; name a CHECKPOINT" in output
    text = write_texts(tmp_path)
    for recipe, out in (("mxfp8", ()), ("current", ("--out", "runs/aside"))):
        code, output = invoke(
            "train", text, "--model", "micro", "--recipe", recipe, "--against", "bf16", "--steps", 1, "--batch-size", 2,
            "--max-gap", "inf", "--max-gradient-gap", "inf", "--device", "cpu", *out,
        )  # fmt: skip
        assert code == 0, output
    mxfp8 = next(Path("runs").glob("mxfp8-*"))
    for arguments, taken in (
        ((), "aside/checkpoints/current"),
        (("--recipe", "block"), "aside/checkpoints/current"),
        (("--recipe", "bf16"), "aside/checkpoints/bf16"),
    ):
        code, output = command(*arguments, "--tokens", 3)
        assert code == 0 and f"from runs/{taken}/step-00000001" in output, output
    asked = ("--tokens", 9, "--temperature", 0)
    own = command(mxfp8 / "checkpoints" / "mxfp8", *asked)
    assert command(mxfp8, *asked) == command(mxfp8 / "checkpoints", *asked) == own
    (mxfp8 / "checkpoints" / "bf16").rename(mxfp8 / "checkpoints" / "block")
    code, output = command(mxfp8)
    assert code == 2 and "has several runs; choose" in output


def test_generate_with_a_tokenizer(out: Path, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "own.json")
    (tmp_path / "text").mkdir()
    code, output = invoke(
        "train", write_texts(tmp_path / "text"), "--tokenizer", tokenizer, "--model", "micro", "--steps", 2,
        "--batch-size", 2, "--device", "cpu", "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0, output
    asked = ("--prompt", "the quick brown", "--tokens", 3, "--temperature", 0)
    code, text = command(tmp_path / "out", *asked)
    assert code == 0 and text.startswith("the quick brown"), text
    saved = locate(tmp_path / "out")
    (saved.path / TOKENIZER).unlink()
    change_index(saved.path, lambda plain: plain["files"].pop(TOKENIZER))  # as packed token files leave it
    code, output = command(saved.path)
    assert code == 2 and "was trained on tokens without a tokenizer; give --tokenizer" in output
    again = command(
        saved.path, "--tokenizer", tokenizer, "--prompt", "the quick brown", "--tokens", 3, "--temperature", 0
    )
    assert again == (0, text)
    code, output = command(out, "--tokenizer", tokenizer)
    assert code == 2 and "tokens, the model 256" in output


def test_mistakes_of_generating_end_with_a_message(out: Path, tmp_path: Path) -> None:
    def changed(name: str, **settings: Any) -> Path:
        """The checkpoint with other settings."""
        folder = shutil.copytree(locate(out).path, tmp_path / "changed" / name / "step-00000030")
        change_index(folder, lambda plain: plain["settings"].update(settings))
        return folder

    sizes = locate(out).settings["model"]
    (tmp_path / "study").mkdir()
    study = shutil.copytree(locate(out).path, tmp_path / "study" / "step-00000030")
    settings = {"name": "bf16", "seed": 0, "model": "micro", "steps": 30}  # as a study's runs have them
    change_index(study, lambda plain: plain.update(settings=settings))
    for arguments, message in (
        ((tmp_path,), "there is no complete checkpoint in"),
        ((out, "--recipe", "fp7"), "there is no recipe 'fp7'"),
        ((out, "--prompt", ""), "the prompt is empty"),
        ((out, "--prompt", "a\udcff"), "--prompt: 'a\\udcff' is not UTF-8; give text"),
        ((out, "--tokenizer", tmp_path / "nowhere"), "--tokenizer: "),
        ((out, "--temperature", -1), "the temperature is -1"),
        ((out, "--temperature", "inf"), "the temperature is inf; choose 0"),
        ((out, "--top-k", 0), "--top-k is 0; choose"),
        ((out, "--tokens", -1), "tokens is -1"),
        ((out, "--seed", 10**30), f"the seed is {10**30}; choose one of 64 bits"),
        ((study,), "is no checkpoint of `minifloat train`"),
        ((changed("a", model=None),), "does not say which model it is of: TypeError"),
        ((changed("j", model=5),), "does not say which model it is of: TypeError"),
        ((changed("b", model={"dim": 32}),), "does not say which model it is of: TypeError"),
        ((changed("c", model=sizes | {"heads": 0}),), "does not say which model it is of: ValueError: --heads is 0"),
        ((changed("d", model=sizes | {"layers": "2"}),), "model it is of: ValueError: --layers is '2'"),
        ((changed("e", model=sizes | {"layers": 10**9}),), "ValueError: --layers is 1000000000; choose"),
        ((changed("f", model=sizes | {"hidden": 2**40}),), "ValueError: --mlp-hidden is 1099511627776"),
        ((changed("g", dtype="load"),), "does not say in which dtype it was trained"),
        ((changed("h", recipe=["mxfp8"]),), "is no checkpoint of `minifloat train`"),
        ((changed("i", unit=None),), "was trained on tokens without a tokenizer"),
        ((study, "--recipe", "bf16"), "is no checkpoint of `minifloat train`"),
    ):
        code, output = command(*arguments)
        assert code == 2 and message in output, output


class Bomb:
    """A pickle that writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_a_checkpoint_does_not_run(out: Path, tmp_path: Path) -> None:
    """Wherever it stands, and in a checkpoint as minifloat wrote them when these had one."""
    folder, text = tmp_path / "out" / "checkpoints" / "delayed" / "step-00000030", out.parent / "text"
    resume = ("train", text, "--model", "micro", "--recipe", "delayed", "--steps", 30, "--batch-size", 4)
    bomb = pickle.dumps(Bomb(tmp_path / "it ran"))
    for name in ("training/.metadata", "training.safetensors", "model.safetensors", "checkpoint.json", "old"):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.copytree(locate(out).path, folder)
        (folder / "training").mkdir()
        if name == "old":
            (folder / "training" / ".metadata").write_bytes(bomb)
            (folder / "checkpoint.json").write_text('{"minifloat": 1, "files": {}}')
        else:
            (folder / name).write_bytes(bomb)
        for arguments in (
            (*resume, "--device", "cpu", "--out", tmp_path / "out", "--resume"),
            (*resume, "--device", "cpu", "--out", tmp_path / "other", "--resume-from", folder),
            ("generate", folder, "--device", "cpu", "--tokens", 1),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                code, output = invoke(*arguments)
            assert (code == 0) == (name == "training/.metadata"), (name, output)  # which is no file of it
            assert code == 0 or "step-00000030" in output or "no complete checkpoint" in output
            assert not (tmp_path / "it ran").exists(), name
