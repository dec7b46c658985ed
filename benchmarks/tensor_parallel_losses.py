"""Loss curves of the main job on several ranks and on one.

Run as ``torchrun --nproc-per-node 2 benchmarks/tensor_parallel_losses.py --model small --steps 300``. Block scaling and
an odd number of tokens a sequence: blocks of 128 rows straddle sequences and ranks. Writes a JSON file and a plot: one
process, all ranks with sequence parallelism, all ranks without, and bf16. All see the same batches from the same start.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minifloat.comm.group import Group
from minifloat.recipe import named
from minifloat.tools.cli.ranks import leave
from minifloat.tools.train import data
from minifloat.tools.train.loop import TrainConfig, train
from minifloat.tools.train.model import MODELS
from minifloat.tools.train.ranks import ALONE, Ranks
from minifloat.tools.train.run import Run

RECIPE = "block"
RESULTS = Path(__file__).parent / "results"


def run(options: argparse.Namespace, name: str, ranks: Ranks, recipe: str | None, device: torch.device) -> Run:
    sizes = MODELS[options.model]
    config = TrainConfig(options.steps, batch_size=options.batch, learning_rate=sizes.learning_rate)
    model = sizes.make(None if recipe is None else named(recipe), 0, ranks)
    text = data.load((), least=options.context + 1)
    return train(name, model, options.context, text, config, device, ranks=ranks)


def plot(curves: dict[str, list[float]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, losses in curves.items():
        axes.plot(range(1, len(losses) + 1), losses, label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="training loss, nats a byte", title=title)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=127, help="tokens a sequence")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    group = Group.of(dist.group.WORLD)
    start = partial(run, options)
    jobs: dict[str, Callable[[], Run]] = {
        "one process": lambda: start("one process", ALONE, RECIPE, device),
        f"{group.size} ranks, sequence parallel": lambda: start("sp", Ranks(group, True), RECIPE, device),
        f"{group.size} ranks": lambda: start("tp", Ranks(group, False), RECIPE, device),
        "one process, bf16": lambda: start("bf16", ALONE, None, device),
    }
    runs = {name: job() for name, job in jobs.items()}  # each rank trains what one process does by itself
    if group.rank == 0:
        where = torch.cuda.get_device_name() if cuda else "CPU, gloo"
        told = {"device": where, "torch": torch.__version__, "recipe": RECIPE, "ranks": group.size}
        told |= {"model": options.model, "context": options.context, "batch": options.batch}
        told["validation"] = {name: each.validation_loss for name, each in runs.items()}
        told["losses"] = {name: [m.loss for m in each.history] for name, each in runs.items()}
        base = options.out / f"{date.today()}-tensor-parallel-losses-{options.model}"
        base.with_suffix(".json").write_text(json.dumps(told, indent=1))
        title = f"{options.model}, {RECIPE}, {options.context} tokens a sequence"
        plot(told["losses"], title, base.with_suffix(".png"))
        print(told["validation"])
    leave()


if __name__ == "__main__":
    main()
