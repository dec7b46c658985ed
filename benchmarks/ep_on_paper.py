"""Expert parallelism on paper: bytes that a GPU sends and the time they take, for 8 to 1,024 GPUs.

    python benchmarks/ep_on_paper.py

A step of one layer dispatches X and dY, each token once to a rank, and combines Y and dX, a row for each choice.
Experts are drawn evenly. Ranks of a node of 8 are reached over NVLink, others over the network, both at once.
"""

from __future__ import annotations

from typing import NamedTuple

NODE = 8
NVLINK = 207e9  # bytes a second out of one GPU, all-to-all of two H100s (2026-11-27-h100-x2-experts.txt)
NETWORK = 45e9  # 400 Gb/s a GPU, of which an all-to-all reaches nine tenths; not measured by us
TOKENS = 16384  # of each GPU
COMPUTE = 476e12, 580e12  # FLOP/s of an MoE layer on one H200, bf16 and current scaling with weights cast before
RANKS = 8, 16, 32, 64, 128, 256, 512, 1024


class Layer(NamedTuple):
    """Sizes of a mixture of experts."""

    hidden: int
    ffn: int
    experts: int
    top_k: int


class Form(NamedTuple):
    """Bytes of an element that is dispatched, and of one that is combined."""

    name: str
    dispatch: float
    combine: float = 2.0


LAYERS = {"Qwen3-30B-A3B": Layer(2048, 768, 128, 8), "DeepSeek-V3": Layer(7168, 2048, 256, 8)}
FORMS = Form("bf16", 2.0), Form("FP8, blocks", 1 + 4 / 128), Form("NVFP4", 0.5 + 1 / 16)


def distinct(ranks: int, top_k: int) -> float:
    """Ranks that a token goes to: N (1 - (1 - 1/N)^k)."""
    return ranks * (1 - (1 - 1 / ranks) ** top_k)


def transfer(ranks: int, copies: float, width: float) -> tuple[float, float]:
    """Bytes that leave a GPU, and seconds, where each token is sent to ``copies`` ranks, ``width`` bytes each."""
    whole = TOKENS * copies * width
    near, far = whole * (min(NODE, ranks) - 1) / ranks, whole * max(ranks - NODE, 0) / ranks
    return near + far, max(near / NVLINK, far / NETWORK)


def step(layer: Layer, ranks: int, form: Form) -> tuple[float, float]:
    """Bytes and seconds of both directions of dispatch and combine."""
    each = [
        transfer(ranks, distinct(ranks, layer.top_k), form.dispatch * layer.hidden),
        transfer(ranks, layer.top_k, form.combine * layer.hidden),
    ]
    return 2 * sum(nbytes for nbytes, _ in each), 2 * sum(seconds for _, seconds in each)


def main() -> None:
    for name, layer in LAYERS.items():
        flops = 18.0 * TOKENS * layer.top_k * layer.ffn * layer.hidden
        of_bf16, of_fp8 = (1e3 * flops / speed for speed in COMPUTE)
        print(f"\n{name}, experts {of_bf16:.1f} ms in bf16, {of_fp8:.1f} in FP8; GB, ms:\n")
        names = [*[form.name for form in FORMS], "gain, FP8 codes sent", "gain, values sent"]
        print(f"| GPUs | {' | '.join(names)} |")
        print("|---" * (len(FORMS) + 3) + "|")
        for ranks in RANKS:
            if layer.experts % ranks:
                continue
            found = [step(layer, ranks, form) for form in FORMS]
            times = [1e3 * seconds for _, seconds in found]
            cells = [f"{nbytes / 1e9:.2f}, {ms:.1f}" for (nbytes, _), ms in zip(found, times, strict=True)]
            gains = [(of_bf16 + times[0]) / (of_fp8 + wire) for wire in (times[1], times[0])]
            print(f"| {ranks} | " + " | ".join(cells) + f" | {gains[0]:.2f} | {gains[1]:.2f} |")


if __name__ == "__main__":
    main()
