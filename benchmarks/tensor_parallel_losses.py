"""Loss curves of the main job on two ranks and on one.

Run as ``torchrun --nproc-per-node 2 benchmarks/tensor_parallel_losses.py``. Block scaling and sequences of 127 tokens:
blocks of 128 rows straddle sequences and ranks. Writes a JSON file and a plot: one process, two ranks with sequence
parallelism, and two without. All see the same batches from the same start.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minifloat import Linear
from minifloat.distributed.group import Group
from minifloat.recipe import named
from minifloat.train import data
from minifloat.train.loop import TrainConfig, train
from minifloat.train.model import MODELS, Transformer
from minifloat.train.ranks import ALONE, Ranks
from minifloat.train.run import Run

RECIPE, MODEL, CONTEXT = "block", "tiny", 127
RESULTS = Path(__file__).parent / "results"


def run(name: str, ranks: Ranks, recipe: str | None, device: torch.device) -> Run:
    sizes = MODELS[MODEL]
    config = TrainConfig(100, batch_size=4, learning_rate=sizes.learning_rate)
    linear = partial(Linear, bias=False, recipe=None if recipe is None else named(recipe))
    model = Transformer(sizes, linear, seed=0, ranks=ranks)
    return train(name, model, CONTEXT, data.load((), least=CONTEXT + 1), config, device, ranks=ranks)


def plot(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, losses in curves.items():
        axes.plot(range(1, len(losses) + 1), losses, label=name, linewidth=1)
    axes.set(
        xlabel="step", ylabel="training loss, nats a byte", title=f"{MODEL}, {RECIPE}, {CONTEXT} tokens a sequence"
    )
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    group = Group.of(dist.group.WORLD)
    jobs: dict[str, Callable[[], Run]] = {
        "one process": lambda: run("one process", ALONE, RECIPE, device),
        f"{group.size} ranks, sequence parallel": lambda: run("sp", Ranks(group, True), RECIPE, device),
        f"{group.size} ranks": lambda: run("tp", Ranks(group, False), RECIPE, device),
        "one process, bf16": lambda: run("bf16", ALONE, None, device),
    }
    runs = {name: job() for name, job in jobs.items()}  # each rank trains what one process does by itself
    if group.rank == 0:
        where = torch.cuda.get_device_name() if cuda else "CPU, gloo"
        told = {"device": where, "torch": torch.__version__, "recipe": RECIPE, "model": MODEL, "context": CONTEXT}
        told["validation"] = {name: each.validation_loss for name, each in runs.items()}
        told["losses"] = {name: [m.loss for m in each.history] for name, each in runs.items()}
        base = RESULTS / f"{date.today()}-tensor-parallel-losses"
        base.with_suffix(".json").write_text(json.dumps(told, indent=1))
        plot(told["losses"], base.with_suffix(".png"))
        print(told["validation"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
