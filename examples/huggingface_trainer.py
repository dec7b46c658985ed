"""Convert a Hugging Face model, train it with Trainer, save and reload it, and let it write.

    pip install transformers accelerate
    python examples/huggingface_trainer.py                          # a small Llama from scratch; a minute on a CPU
    python examples/huggingface_trainer.py --model Qwen/Qwen3-0.6B  # from the hub, with its tokenizer

The text is the source code of Python's standard library. It prints the report of the conversion, the loss of every
tenth step, and what the reloaded model writes.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import minifloat


class Bytes:
    """A tokenizer of 256 tokens, for a model from scratch."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def make_model(name: str | None, hidden: int) -> tuple[torch.nn.Module, "Bytes | AutoTokenizer"]:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_attention_heads": 4, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)), Bytes()


def main(arguments: list[str] | None = None) -> tuple[list[float], str]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or a name on the hub; default: a small Llama from scratch")
    parser.add_argument("--out", type=Path, default=Path("runs/huggingface"))
    parser.add_argument("--recipe", default="current")
    for name, value in {"hidden": 64, "context": 64, "steps": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model, tokenizer = make_model(options.model, options.hidden)
    smallest = min(256, options.hidden)  # the default leaves smaller layers alone
    print(minifloat.convert(model, options.recipe, minifloat.DefaultFilter(model, smallest=smallest)))

    checkpoints = {"use_reentrant": False, "context_fn": minifloat.checkpoint_context_fn}  # exact under every recipe
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoints)

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]
    tokens = torch.tensor(tokenizer.encode("\n".join(file.read_text() for file in files)))
    rows = tokens[: len(tokens) // options.context * options.context].view(-1, options.context)
    settings = TrainingArguments(
        str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        bf16=torch.cuda.is_available(),
        logging_steps=min(10, options.steps),
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(model, settings, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    with torch.autograd.set_multithreading_enabled(False):  # less host time on a GPU: docs/layers.md
        trainer.train()
    trainer.save_model(str(options.out / "model"))

    loaded = AutoModelForCausalLM.from_pretrained(options.out / "model")  # an ordinary model, which may be converted
    prompt = torch.tensor([tokenizer.encode("import ")])
    written = tokenizer.decode(loaded.generate(prompt, max_new_tokens=32, do_sample=False)[0].tolist())
    print(written)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], written


if __name__ == "__main__":
    main()
