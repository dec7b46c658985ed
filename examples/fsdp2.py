"""Train with FSDP2 whose ranks gather quantized weights, and continue from a distributed checkpoint.

    torchrun --nproc-per-node 2 examples/fsdp2.py            # processes on a CPU, through gloo, if there is no GPU
    torchrun --nproc-per-node 8 examples/fsdp2.py --hidden 4096 --layers 8 --context 4096 --recipe current

The model is made on `meta`, sharded, and only then given memory. The text is the source code of Python's standard
library. Rank 0 prints how many weights are gathered as codes, the loss every few steps, and whether a model that was
loaded from the checkpoint takes the same next step.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import minifloat
from minifloat import linear_cross_entropy, optim
from minifloat.distributed import fully_shard, sharded_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    """Bytes [sequence, batch] to the loss of the bytes that follow."""

    def __init__(self, hidden: int, layers: int, recipe: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, hidden)
        self.rope = minifloat.RotaryPositionEmbedding(hidden // 4)
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "normalization": "RMSNorm", "activation": "swiglu"}
        self.layers = nn.ModuleList(
            minifloat.TransformerLayer(hidden, 3 * hidden, 4, bias=False, recipe=recipe, **options)
            for _ in range(layers)
        )
        self.norm = minifloat.RMSNorm(hidden)
        self.head = nn.Linear(hidden, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, angles = self.embedding(tokens[:-1]), self.rope(len(tokens) - 1)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return linear_cross_entropy(self.norm(x), self.head.weight, tokens[1:])


def build(options: argparse.Namespace, mesh: DeviceMesh) -> tuple[Model, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = Model(options.hidden, options.layers, options.recipe)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device=DEVICE)
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """One step; the mean of the ranks' losses."""
    loss = model(tokens)
    with torch.autograd.set_multithreading_enabled(False):  # less host time on a GPU: docs/layers.md
        loss.backward()
    optim.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main(arguments: list[str] | None = None) -> tuple[list[float], bool]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2"))
    parser.add_argument("--recipe", default="current")
    for name, value in {"hidden": 64, "layers": 2, "context": 64, "batch": 4, "steps": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(arguments)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(DEVICE, (int(os.environ["WORLD_SIZE"]),))  # joins the ranks, too
    first = mesh.get_rank() == 0

    model, optimizer = build(options, mesh)
    if first:
        print(f"{len(sharded_weights(model))} weights are gathered as codes")
    content = b"\n".join(file.read_bytes() for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py")))
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(mesh.get_rank())  # ranks draw different text

    def draw() -> Tensor:
        starts = torch.randint(len(text) - options.context, (options.batch,), generator=generator)
        return text[torch.arange(options.context + 1)[:, None] + starts].long().to(DEVICE)

    losses = []
    for i in range(options.steps):
        losses.append(step(model, optimizer, draw()))
        if first and i % 5 == 0:
            print(f"step {i:5}  loss {losses[-1]:.3f}", flush=True)

    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=options.out)
    loaded, loaded_optimizer = build(options, mesh)
    states = dict(zip(("model", "optimizer"), get_state_dict(loaded, loaded_optimizer), strict=True))
    dcp.load(states, checkpoint_id=options.out)
    set_state_dict(loaded, loaded_optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    tokens = draw()
    same = step(loaded, loaded_optimizer, tokens) == step(model, optimizer, tokens)
    if first:
        print(f"loaded from {options.out}: the same next loss: {same}")
    return losses, same


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
