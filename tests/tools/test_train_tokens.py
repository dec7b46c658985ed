"""Data of the user's own: packed token files and tokenizers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from minifloat.tools.train import data, tokens
from minifloat.tools.train.checkpoint import locate
from tests.helpers.micro_training import TEXTS, invoke, save_tokenizer, write_texts

TOKENS = [(7 * i * i + i // 5) % 1000 for i in range(4000)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer") / "own.json")


def packed(path: Path, dtype: str, values: list[int] = TOKENS) -> Path:
    array = np.array(values, dtype=dtype)
    np.save(path, array) if path.suffix == ".npy" else array.tofile(path)
    return path


# Packed token files


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npy"])
@pytest.mark.parametrize("dtype", tokens.DTYPES)
def test_a_token_file_is_read_as_it_is_used_and_its_end_held_out(tmp_path: Path, name: str, dtype: str) -> None:
    corpus = data.load([packed(tmp_path / name, dtype)], least=65, vocabulary=1000, token_dtype=dtype)
    assert corpus.train.dtype == getattr(torch, dtype)
    assert isinstance(corpus.train, tokens.TokenFile) and isinstance(corpus.validation, tokens.TokenFile)
    assert corpus.train.long().tolist() == TOKENS[:3800] and corpus.validation.long().tolist() == TOKENS[3800:]
    assert [piece.long().tolist() for piece in corpus.validation.split(150)] == [TOKENS[3800:3950], TOKENS[3950:]]
    assert (corpus.vocabulary, corpus.unit) == (1000, "token")
    inputs, targets = next(data.Batches(corpus.train, 3, 16, seed=0))
    assert inputs.dtype == torch.int64 and torch.equal(inputs[:, 1:], targets[:, :-1])
    start = TOKENS.index(int(inputs[0, 0]))
    assert any(inputs[0].tolist() == TOKENS[i : i + 16] for i in range(start, 3800))
    counted = data.unigram_entropy(corpus.train, corpus.validation, 1000)
    by_hand = data.unigram_entropy(torch.tensor(TOKENS[:3800]), torch.tensor(TOKENS[3800:]), 1000)
    assert counted == by_hand


def test_a_token_file_that_is_cut_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is trained on. Mapped, it would end the process."""
    file, windows = packed(tmp_path / "tokens.bin", "uint16"), data.Batches.__next__

    def cut(self: data.Batches) -> tuple[torch.Tensor, torch.Tensor]:
        os.truncate(file, 100)
        return windows(self)

    monkeypatch.setattr(data.Batches, "__next__", cut)
    code, output = invoke(
        "train", file, "--vocabulary", 1000, "--model", "micro", "--steps", 3, "--device", "cpu", "--out",
        tmp_path / "out",
    )  # fmt: skip
    assert code == 1 and "tokens.bin was cut while it was read" in output and "continue with --resume" in output


@pytest.mark.parametrize(
    "header",
    [b"{'descr': '<u2', 'fortran_order': False, 'shape': (1000000000000,)}", b"(" * 9000, b"[[[", b"\xff" * 90, b" {",
     b"{'descr': '|O', 'fortran_order': False, 'shape': (4,)}", b"{'descr': '<u2'}", b"__import__('os').getcwd()",
     b"{'descr': '<u2', 'fortran_order': False, 'shape': (-4,)}"],
)  # fmt: skip
def test_hostile_headers(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "tokens.npy"
    file.write_bytes(b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n" + bytes(8))
    with pytest.raises(ValueError, match=r"tokens.npy holds no tokens"):
        data.load([file], least=1, vocabulary=9)


def test_mistakes_with_token_files(tmp_path: Path, tokenizer: Path) -> None:
    file = packed(tmp_path / "a.bin", "uint16")
    for paths, options, message in (
        ([file], {}, "give --vocabulary .its largest token is 999. or --tokenizer"),
        ([file], {"vocabulary": 999}, "the largest token of .*a.bin is 999, but the vocabulary has 999"),
        ([file], {"vocabulary": 0}, "is 999, but the vocabulary has 0"),
        ([file], {"vocabulary": 0, "tokenizer": tokenizer}, "is 999, but the vocabulary has 0"),
        ([file], {"tokenizer": tokenizer}, "is 999, but the vocabulary has 300"),
        ([file, file], {"vocabulary": 1000}, "2 paths with a token file among them"),
        ([file], {"vocabulary": 1000, "token_dtype": "int8"}, "no tokens of 'int8'; choose uint16 or uint32"),
        ([tmp_path / "b.bin"], {"vocabulary": 9}, "b.bin is no file; check its spelling"),
        ([tmp_path], {"vocabulary": 9}, "--vocabulary is for packed token files"),
    ):
        with pytest.raises(ValueError, match=message):
            data.load(paths, least=65, **options)
    np.save(tmp_path / "c.npy", np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"c.npy holds float64 \[2, 3\]; token files are vectors of uint16 or uint32"):
        data.load([tmp_path / "c.npy"], least=65, vocabulary=9)
    np.save(tmp_path / "big.npy", np.zeros(99, dtype=">u2"))
    with pytest.raises(ValueError, match=r"big.npy holds uint16 of another byte order"):
        data.load([tmp_path / "big.npy"], least=65, vocabulary=9)
    (tmp_path / "junk.npy").write_bytes(b"no array at all" * 99)
    with pytest.raises(ValueError, match=r"junk.npy holds no tokens") as raised:
        data.load([tmp_path / "junk.npy"], least=65, vocabulary=9)
    assert "pickle" not in str(raised.value)
    np.save(tmp_path / "none.npy", np.zeros(0, dtype=np.uint16))
    for name in ("empty.bin", "empty.npy", "none.npy"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=f"{name} holds no tokens"):
            data.load([tmp_path / name], least=65, vocabulary=9)
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"odd.bin holds no tokens"):
        data.load([tmp_path / "odd.bin"], least=65, vocabulary=9)
    with pytest.raises(ValueError, match="40 tokens of text leave 38 to train on and 2 held out, but each needs 65"):
        data.load([packed(tmp_path / "d.bin", "uint16", TOKENS[:40])], least=65, vocabulary=1000)


def test_train_on_a_token_file(tmp_path: Path) -> None:
    file = packed(tmp_path / "tokens.npy", "uint32")
    code, output = invoke(
        "train", file, "--vocabulary", 1000, "--model", "micro", "--steps", 3, "--batch-size", 2, "--device", "cpu",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0, output
    assert "nats/token" in output and "tokens/s" in output and "byte" not in output
    text = (tmp_path / "out" / "report.md").read_text()
    assert "nats per token" in text and "vocabulary=1000" in text and "byte" not in text
    saved = locate(tmp_path / "out")
    assert saved.model_state()["head.weight"].shape == (1000, 32) and saved.settings["unit"] == "token"
    first = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(np.log(1000), abs=1)


# Tokenizers


def test_text_is_encoded_and_split(tmp_path: Path, tokenizer: Path) -> None:
    corpus = data.load([write_texts(tmp_path)], least=65, tokenizer=tokenizer)
    loaded = tokens.load_tokenizer(tokenizer)
    assert (corpus.vocabulary, corpus.unit, corpus.train.dtype) == (loaded.get_vocab_size(), "token", torch.uint16)
    assert corpus.tokenizer == tokenizer.read_bytes()
    expected = [token for text in TEXTS.values() for token in loaded.encode(text + "\n").ids]
    assert len(corpus.train) + len(corpus.validation) == len(expected) < sum(map(len, TEXTS.values())) / 2
    chunk = len(expected) // data.HELD_OUT_EVERY
    assert corpus.train[: chunk * 19].tolist() == expected[: chunk * 19]
    assert corpus.validation.tolist() == expected[chunk * 19 : chunk * 20]
    other = data.load([tmp_path], least=65)
    assert other.fingerprint != corpus.fingerprint == data.load([tmp_path], least=65, tokenizer=tokenizer).fingerprint


def test_mistakes_with_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.json").write_text("{}")
    for name in ("broken.json", "missing.json"):
        with pytest.raises(ValueError, match=f"{name} is no readable tokenizer of the tokenizers library"):
            tokens.load_tokenizer(tmp_path / name)
    panic = type("PanicException", (BaseException,), {})  # what Rust's panics become
    for error in (panic("in Rust"), Exception("no [UNK] token")):
        with (
            pytest.raises(ValueError, match=r"cannot encode .(in Rust|no \[UNK\] token).; give its"),
            tokens.tokenizer_errors("cannot encode"),
        ):
            raise error
    with pytest.raises(KeyboardInterrupt), tokens.tokenizer_errors("x"):
        raise KeyboardInterrupt
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"get it with: pip install tokenizers"):
        tokens.load_tokenizer(tmp_path / "broken.json")
