"""Train a small Llama-like language model from scratch on real text, with minifloat's own modules.

    python examples/train_llama.py                   # 100 steps; a minute on a CPU
    python examples/train_llama.py --hidden 512 --layers 8 --context 512 --batch 16 --steps 2000 --recipe block

The text is the source code of Python's standard library, the tokens are its bytes. Weights are quantized parameters
with fp32 masters in the optimizer, layers are checkpointed, and the loss never holds all logits. It prints the loss in
nats a byte every few steps, and at the end that of text that was held out.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

import minifloat
from minifloat import linear_cross_entropy, optim, quantized_model_init

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Llama(nn.Module):
    """Bytes [sequence, batch] to the loss of the bytes that follow."""

    def __init__(self, hidden: int, layers: int, recipe: str) -> None:
        super().__init__()
        heads = hidden // 32
        self.embedding = nn.Embedding(256, hidden, dtype=torch.bfloat16)
        self.rope = minifloat.RotaryPositionEmbedding(32)
        with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            self.layers = nn.ModuleList(
                minifloat.TransformerLayer(
                    hidden,
                    3 * hidden,
                    heads,
                    num_gqa_groups=max(1, heads // 4),
                    hidden_dropout=0.0,
                    attention_dropout=0.0,
                    normalization="RMSNorm",
                    activation="swiglu",
                    bias=False,
                    params_dtype=torch.bfloat16,
                    recipe=recipe,
                    layer_number=i + 1,
                )
                for i in range(layers)
            )
        self.norm = minifloat.RMSNorm(hidden, params_dtype=torch.bfloat16)
        self.head = nn.Linear(hidden, 256, bias=False, dtype=torch.bfloat16)  # heads stay in high precision
        nn.init.normal_(self.embedding.weight, std=hidden**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x, angles = self.embedding(tokens[:-1]), self.rope(len(tokens) - 1)
        for layer in self.layers:
            x = minifloat.checkpoint(layer, x, rotary_pos_emb=angles)
        return linear_cross_entropy(self.norm(x), self.head.weight, tokens[1:])


def read_text() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def draw(text: Tensor, context: int, batch: int) -> Tensor:
    starts = torch.randint(len(text) - context, (batch,))
    return text[torch.arange(context + 1)[:, None] + starts].long().to(DEVICE)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="current")
    for name, value in {"hidden": 64, "layers": 2, "context": 64, "batch": 4, "steps": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    text = read_text()
    train, held_out = text[: -len(text) // 20], text[-len(text) // 20 :]
    model = Llama(options.hidden, options.layers, options.recipe).to(DEVICE)
    optimizer = optim.MasterWeights(model.parameters(), torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, options.steps)
    losses = []
    for step in range(options.steps):
        loss = model(draw(train, options.context, options.batch))
        with torch.autograd.set_multithreading_enabled(False):  # less host time on a GPU: docs/layers.md
            loss.backward()
        optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step:5}  loss {losses[-1]:.3f}", flush=True)
    with torch.no_grad():
        found = [model(draw(held_out, options.context, options.batch)).item() for _ in range(8)]
    print(f"held out: {sum(found) / len(found):.3f} nats a byte")
    return losses


if __name__ == "__main__":
    main()
