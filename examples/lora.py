"""Train LoRA adapters over a frozen base in FP8 or FP4, and save and reload the adapters.

    pip install transformers peft
    python examples/lora.py                                        # a small Llama with random weights; under a minute
    python examples/lora.py --model Qwen/Qwen3-0.6B --recipe nvfp4

The weights of the base's blocks are codes and scales alone, cast once: a byte each under block or per-tensor scaling,
half a byte under NVFP4, two under MXFP8. It prints the loss of every step, and whether the reloaded adapters give the
same logits.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import minifloat


def make_base(name: str | None, hidden: int, recipe: str) -> torch.nn.Module:
    """The same weights in each call, those of the blocks quantized."""
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    else:
        torch.manual_seed(0)
        sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes)).bfloat16()
    only = minifloat.DefaultFilter(model, smallest=min(256, hidden))
    minifloat.convert(model, recipe, only, quantize_weights=True)
    return model.requires_grad_(False)


def main(arguments: list[str] | None = None) -> tuple[list[float], bool]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or a name on the hub; default: a small Llama with random weights")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    parser.add_argument("--recipe", default="block")
    for name, value in {"hidden": 64, "rank": 8, "steps": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(arguments)

    base = make_base(options.model, options.hidden, options.recipe)
    settings = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    model = get_peft_model(base, settings)
    model.print_trainable_parameters()

    tokens = torch.tensor(list(Path(__file__).read_bytes()[:256])).view(8, 32)  # bytes, as text to learn by heart
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step in range(options.steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step:3}  loss {losses[-1]:.3f}")

    model.save_pretrained(options.out)
    loaded = PeftModel.from_pretrained(make_base(options.model, options.hidden, options.recipe), options.out)
    with torch.no_grad():
        same = torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)
    print(f"reloaded: the same logits: {same}")
    return losses, same


if __name__ == "__main__":
    main()
