"""Digests of results, by which a refactoring shows that it has changed no bit.

    python benchmarks/digest.py record OUT.json [--device cuda] [--ranks 2] [--only SUBSTRING]
    python benchmarks/digest.py compare A.json B.json

An entry is a few steps of one module, cast, loss or optimizer under one recipe. Each of its results (codes and scales,
outputs, gradients, buffers, parameters) is recorded as the first 16 hexadecimal digits of its SHA-256. All data come
from seeded generators on the CPU. An entry that raises records the error. Digests are those of one machine, version of
PyTorch and number of threads (OMP_NUM_THREADS, default 1): the header says which, and ``compare`` warns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import minifloat  # noqa: E402
from benchmarks.digest_entries import Entry, Results, entries, rank_entries  # noqa: E402

# ---- digests ----


def add(digest: Any, value: Any) -> None:
    """Adds everything that ``value`` holds: dtype, shape and bytes of tensors in any nest."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, minifloat.QuantizedTensor):
        value = [value.operands if value.holds_own_matrix else value.dequantize(), value.scale]
    if isinstance(value, minifloat.Operand):
        value = [value.codes, value.scale_inv, value.amax, value.dim]
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        add(digest, [part for item in value.items() for part in item])
    elif isinstance(value, (list, tuple)):
        digest.update(b"[")
        for part in value:
            add(digest, part)
        digest.update(b"]")
    else:
        digest.update(f"{value};".encode())


def digests(results: Results) -> dict[str, str]:
    found = {}
    for name, value in results.items():
        add(digest := hashlib.sha256(), value)
        found[name] = digest.hexdigest()[:16]
    return found


def run(entries: dict[str, Entry], device: torch.device, only: str) -> dict[str, dict[str, str]]:
    """The digests of each entry, or the error that it raised."""
    found = {}
    for name, entry in entries.items():
        if only not in name:
            continue
        torch.manual_seed(0)
        try:
            found[name] = digests(entry(device))
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


# ---- recording ----


def of_ranks(size: int, device: str, only: str) -> dict[str, dict[str, str]]:
    """The digests of all ranks, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_rank, (size, device, only, folder), nprocs=size)  # type: ignore[no-untyped-call]
        parts = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    return {
        name: {f"{key}, rank {rank}": each for rank, part in enumerate(parts) for key, each in part[name].items()}
        for name in parts[0]
    }


def one_rank(rank: int, size: int, kind: str, only: str, folder: str) -> None:
    set_up(kind)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{folder}/store", timedelta(seconds=60), size, rank)
    found = run(rank_entries(), device, only)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # destroying a gloo group that FSDP has used aborts now and then


def set_up(device: str) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    warnings.simplefilter("ignore")
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)  # flash attention's backward adds in any order else
        torch.backends.cuda.enable_mem_efficient_sdp(False)  # as do these, even so
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.utils.deterministic.fill_uninitialized_memory = False


def header(device: str) -> dict[str, Any]:
    """What digests depend on besides the code."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return {
        "revision": subprocess.run(command, capture_output=True, text=True).stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu or platform.processor(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def record(device: str = "cpu", ranks: int = 1, only: str = "") -> dict[str, Any]:
    """Header and entries; those of ranks too if there are several."""
    found = run(entries(), torch.device(device), only)
    if ranks > 1:
        found |= of_ranks(ranks, device, only)
    return {"header": header(device), "entries": found}


# ---- comparing ----


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each entry that differs, naming its results, is missing or is new."""
    old, new = before["entries"], after["entries"]
    lines = []
    for name in old | new:
        if name not in new:
            lines.append(f"missing: {name}")
        elif name not in old:
            lines.append(f"new: {name}")
        elif old[name] != new[name]:
            keys = [key for key in old[name] | new[name] if old[name].get(key) != new[name].get(key)]
            raised = [f"\n    {error}" for entry in (old[name], new[name]) for error in errors(entry)]
            lines.append(f"differs: {name}: {', '.join(keys)}" + "".join(raised))
    return lines


def errors(entry: dict[str, str]) -> list[str]:
    """What was raised, by any rank."""
    return [value for key, value in entry.items() if key.startswith("error")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    options = commands.add_parser("record", help="record digests to OUT")
    options.add_argument("out", type=Path)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--ranks", type=int, default=1, help="2 records those of two ranks too, on two GPUs with cuda")
    options.add_argument("--only", default="", help="entries whose name contains this")
    options = commands.add_parser("compare", help="print entries that differ; exit code 1 if there are any")
    options.add_argument("before", type=Path)
    options.add_argument("after", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.command == "record":
        set_up(chosen.device)
        found = record(chosen.device, chosen.ranks, chosen.only)
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in found["entries"].items())
        text = f'{{"header": {json.dumps(found["header"])},\n"entries": {{\n{lines}\n}}}}\n'  # an entry a line
        chosen.out.write_text(text)
        raised = [f"raised: {name}: {error}" for name, entry in found["entries"].items() for error in errors(entry)]
        print(*raised, f"{len(found['entries'])} entries in {chosen.out}", sep="\n")
        return 0
    before, after = (json.loads(path.read_text()) for path in (chosen.before, chosen.after))
    for key, value in before["header"].items():
        if key != "revision" and after["header"].get(key) != value:
            print(f"warning: {key} was {value} and is {after['header'].get(key)}: digests may differ for that alone")
    lines = compare(before, after)
    print(*lines, f"{len(before['entries'])} entries before, {len(after['entries'])} after", sep="\n")
    return int(any(line.startswith("differs") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
