"""Results of a training: the loss curves, a report, and whether it passed its checks."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minifloat.functional import Gemm
from minifloat.recipe import Recipe
from minifloat.tools.train.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
EARLY = 5  # steps


@dataclass(frozen=True)
class Comparison:
    """Comparison of the recipe's run with its high-precision twin, which saw the same batches from the same start.

    `gap` is the difference of the final validation losses in nats a token (of bytes, a byte). `gradient_gap` is the
    median over the first `EARLY` steps, before the two have gone their own ways, of |gradient norm / twin's - 1|. A
    scale that is off by two moves it by tens of percent, where training around the fault can leave less than one
    percent in the loss.
    """

    gap: float
    relative_gap: float
    gradient_gap: float


def compare(run: Run, twin: Run) -> Comparison:
    """The two runs' difference; they must have equally many steps."""
    gap = run.validation_loss - twin.validation_loss
    pairs = list(zip(run.history, twin.history, strict=True))[:EARLY]
    gradient_gap = statistics.median(abs(mine.gradient_norm / other.gradient_norm - 1) for mine, other in pairs)
    return Comparison(gap, gap / twin.validation_loss, gradient_gap)


def check_gemms(
    name: str, gemms: Counter[Gemm], expected: Mapping[str, tuple[str, str]], each: int, *, partly: bool = False
) -> list[str]:
    """Lists what is wrong with the executed GEMMs of a quantized run; nothing if the recipe did all that it promises.

    `expected` has the operand formats of fprop, dgrad and wgrad; `each` is how many of each the run's linears execute.
    `partly`: other layers or steps have no recipe, and no more of its linears' GEMMs than these may have one.
    """
    problems = []
    for gemm, formats in expected.items():
        executed = {(key.a, key.b): 0 for key in gemms if key.gemm == gemm}
        for key, count in gemms.items():
            if key.gemm == gemm:
                executed[key.a, key.b] += count
        right = executed.pop(formats, 0)
        if partly:
            executed.pop(("identity", "identity"), None)
        problems += [
            f"{name}: {count} {gemm} GEMMs ran as {a} x {b}, but the recipe has {formats[0]} x {formats[1]}"
            for (a, b), count in sorted(executed.items())
        ]
        if right < each or (partly and formats != ("identity", "identity") and right > each):
            problems.append(f"{name}: {right} {gemm} GEMMs ran as {formats[0]} x {formats[1]} instead of {each}")
    return problems


def has_4bit(recipe: Recipe) -> bool:
    """Whether any of its products has 4-bit elements, which may be farther off."""
    return any("e2m1" in spec for pair in recipe.expected_gemms().values() for spec in pair)


def check_loss(name: str, comparison: Comparison, max_gap: float, max_gradient_gap: float) -> list[str]:
    """Lists what is wrong with the recipe's losses and gradients; infinity switches a limit off.

    A run that is better than its twin by more than `max_gap` fails too: rounding has no way to that.
    """
    problems = []
    if not abs(comparison.relative_gap) <= max_gap:
        off = f"{comparison.relative_gap:+.2%}"
        problems.append(f"{name}: the final validation loss is {off} off its twin's, more than {max_gap:.2%}")
    if not comparison.gradient_gap <= max_gradient_gap:
        off = f"{comparison.gradient_gap:.2%}"
        problems.append(f"{name}: the first gradients are {off} off their twin's, more than {max_gradient_gap:.2%}")
    return problems


def figure(runs: Sequence[Run], entropy: float, title: str, unit: str = "byte") -> Figure:
    """Draws the training (thin) and validation (marked) losses of all runs and the unigram entropy (dashed).

    Of two runs a second panel has the gap: by how much the first one's loss is above the second's, relative.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    drawn = Figure(figsize=(8, 5 if len(runs) < 2 else 7), layout="constrained")
    heights = [2, 1][: len(runs)]
    losses, *gaps = drawn.subplots(len(heights), height_ratios=heights, sharex=True, squeeze=False)[:, 0]
    evaluated = [{m.step: m.validation_loss for m in run.history if m.validation_loss is not None} for run in runs]
    for i, run in enumerate(runs):
        label = f"{run.name}: validation {run.validation_loss:.4f}"
        color, dash = f"C{i}", "--" if i else "-"  # curves that coincide stay visible
        losses.plot([m.step for m in run.history], [m.loss for m in run.history], color=color, alpha=0.35, linewidth=1)
        losses.plot(
            list(evaluated[i]), list(evaluated[i].values()), color=color, linestyle=dash, marker="o", label=label
        )
    losses.axhline(entropy, color="gray", linestyle="--", linewidth=1, label=f"unigram entropy {entropy:.4f}")
    losses.set(ylabel=f"loss (nats per {unit})", title=f"{title}\nthin: training, marked: validation")
    losses.legend()
    for axes in gaps:
        trained = [{m.step: m.loss for m in run.history} for run in runs]
        for (mine, twin), marker in ((trained, ""), (evaluated, "o")):
            gap = [100 * (mine[step] / twin[step] - 1) for step in mine]
            axes.plot(list(mine), gap, color="C0", alpha=1 if marker else 0.35, linewidth=1, marker=marker)
        axes.axhline(0, color="gray", linewidth=1)
        axes.set(ylabel=f"gap to {runs[1].name} (%)")
    (gaps or [losses])[-1].set(xlabel="step")
    return drawn


def render(
    runs: Sequence[Run],
    facts: Mapping[str, str],
    entropy: float,
    comparison: Comparison | None,
    problems: Sequence[str],
    unit: str = "byte",
) -> str:
    """The report as Markdown; `facts` are the lines that say what was run where, `unit` what losses are per."""
    lines = ["# minifloat train", "", "**FAILED**" if problems else "**passed**", ""]
    lines += [f"- {problem}" for problem in problems] + [""] * bool(problems)
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", f"## Losses (nats per {unit})", "", "![losses](loss.png)", ""]
    lines += table(
        ("run", "first loss", "last loss", "validation loss", f"{unit}s/s", "peak memory"),
        [_summary(run) for run in runs],
    )
    lines += ["", f"Unigram entropy of the held-out text: {entropy:.4f}", ""]
    for run in runs:
        if (most := run.history[-1].imbalance) is not None:
            lines += [f"Experts of {run.name}: the busiest has {most:.2f} times the mean of choices, last step", ""]
    if comparison is not None:
        lines += [f"Gap: {describe(runs, comparison, unit)}", ""]
    lines += ["## Executed GEMMs of the linears, by operand format", ""]
    lines += table(
        ("run", "gemm", "a", "b", "backend", "count"),
        [(run.name, *key, f"{count:,}") for run in runs for key, count in sorted(run.gemms.items())],
    )
    return "\n".join(lines) + "\n"


def describe(runs: Sequence[Run], comparison: Comparison, unit: str = "byte") -> str:
    """One line that says how far the first run is from the second."""
    return (
        f"validation loss of {runs[0].name} - {runs[1].name} = {comparison.gap:+.4f} nats/{unit} "
        f"({comparison.relative_gap:+.2%}); their first gradient norms differ by {comparison.gradient_gap:.2%}"
    )


def _summary(run: Run) -> tuple[str, ...]:
    first, last = run.history[0], run.history[-1]
    peak = "unknown" if run.peak_bytes is None else f"{run.peak_bytes / MIB:,.0f} MiB"
    losses = (f"{first.loss:.4f}", f"{last.loss:.4f}", f"{run.validation_loss:.4f}")
    return (run.name, *losses, f"{run.tokens_per_second:,.0f}", peak)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
