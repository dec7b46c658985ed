"""Results of a loss study: its checks, its plots, and a report as Markdown and as JSON."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifloat.tools.train.report import check_gemms, table
from minifloat.tools.train.study import BASELINE, CONTROLS, Conditions, Job, Result
from minifloat.tools.train.study_noise import Noise, half_width
from minifloat.tools.train.study_statistics import CONFIDENCE, Outcome, interval, student_t

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Results = Mapping[Job, Result]


def problems_of_runs(results: Results) -> list[str]:
    """Lists what is wrong with single runs: they stopped early, or their linears ran in wrong formats."""
    problems = []
    for job, result in results.items():
        common, twin = result.conditions.common, results.get(Job(BASELINE, job.seed), result)
        if common and [m.loss for m in result.run.history[:common]] != [m.loss for m in twin.run.history[:common]]:
            problems.append(f"seed {job.seed}: {job.name} has other first steps than bf16; delete all runs of the seed")
        if result.error is not None:
            problems.append(f"seed {job.seed}: {result.error}")
        elif (variant := job.variant) is not None:
            sizes, config = result.conditions.sizes, result.conditions.config(job)
            layers, steps = variant.quantized_layers(sizes), config.quantized_steps - common
            each = sizes.linears // sizes.layers * layers * steps * config.accumulate
            partly = layers < sizes.layers or steps < config.steps
            wrong = check_gemms(job.name, result.run.gemms, variant.recipe.expected_gemms(), each, partly=partly)
            problems += [f"seed {job.seed}: {problem}" for problem in wrong]
        elif quantized := [gemm for gemm in result.run.gemms if (gemm.a, gemm.b) != ("identity", "identity")]:
            problems.append(f"seed {job.seed}: {job.name} ran quantized GEMMs, {quantized}")
    return problems


def whole(results: Results) -> dict[Job, Result]:
    """The results of bf16, controls and recipes none of whose runs broke down."""
    broken = {job.name for job, result in results.items() if result.error is not None}
    return {job: result for job, result in results.items() if job.name not in broken}


def broken_rows(results: Results) -> list[tuple[str, str]]:
    """Lists what broke down, by run name, and at which step of which seeds."""
    broken = _by_name({job: result for job, result in results.items() if result.broke_at is not None})
    return [
        (name, ", ".join(f"broke down at step {each.broke_at} (seed {each.job.seed})" for each in group))
        for name, group in broken.items()
    ]


def final_losses(results: Results) -> dict[str, list[float]]:
    """The final validation losses by run name, in the order of the seeds; all runs must have ended."""
    return {name: [result.run.validation_loss for result in each] for name, each in _by_name(results).items()}


def gemm_rows(results: Results) -> list[tuple[str, ...]]:
    """Executed GEMMs of the linears by run name, kind, formats and backend, summed over the seeds."""
    counts = {name: sum((each.run.gemms for each in group), Counter()) for name, group in _by_name(results).items()}
    return [(name, *key, f"{count:,}") for name, each in counts.items() for key, count in sorted(each.items())]


def gaps_by_step(results: Results) -> dict[str, dict[int, list[float]]]:
    """The relative gaps of the validation loss to bf16's, one a seed, by run name and evaluated step."""
    gaps: dict[str, dict[int, list[float]]] = {}
    for job, result in results.items():
        if job.name != BASELINE:
            twin = results[Job(BASELINE, job.seed)].validation()
            for step, loss in result.validation().items():
                gaps.setdefault(job.name, {}).setdefault(step, []).append(loss / twin[step] - 1)
    return gaps


def training_gaps(results: Results) -> dict[str, list[float]]:
    """Relative gaps to bf16 of the mean training loss of the last tenth of the steps, one a seed, by run name.

    Steps in common do not count. The control's scatter less than those of the final evaluation, for they are means over
    many steps, on batches that all runs of a seed see.
    """
    late = {}
    for job, result in results.items():
        steps, common = result.conditions.steps, result.conditions.common
        late[job] = statistics.fmean(_training(result)[-max(1, min(steps // 10, steps - common)) :])
    gaps: dict[str, list[float]] = {}
    for job in late:
        if job.name != BASELINE:
            gaps.setdefault(job.name, []).append(late[job] / late[Job(BASELINE, job.seed)] - 1)
    return gaps


# ---- Plots ----


def plot_losses(results: Results, entropy: float, unit: str, path: Path) -> None:
    """Means over the seeds of all runs' losses: the whole training, and the validation losses of its second half."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, (name, seeds) in enumerate(_by_name(results).items()):
        style: dict[str, Any] = {"color": f"C{i}", "linestyle": "--" if name in (BASELINE, *CONTROLS) else "-"}
        training = [statistics.fmean(losses) for losses in zip(*(_training(seed) for seed in seeds), strict=True)]
        validation = {
            step: statistics.fmean(seed.validation()[step] for seed in seeds) for step in seeds[0].validation()
        }
        left.plot(range(1, len(training) + 1), _smooth(training), linewidth=1, alpha=0.4, **style)
        left.plot(list(validation), list(validation.values()), marker="o", markersize=3, label=name, **style)
        late = {step: loss for step, loss in validation.items() if 2 * step >= len(training)}
        right.plot(list(late), list(late.values()), marker="o", markersize=3, label=name, **style)
    left.axhline(entropy, color="gray", linestyle=":", linewidth=1, label=f"unigram entropy {entropy:.3f}")
    left.set(
        xlabel="step", ylabel=f"loss (nats per {unit})", title="mean over seeds; thin: training, marked: validation"
    )
    right.set(xlabel="step", ylabel=f"loss (nats per {unit})", title="validation, the second half")
    for axes in (left, right):
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def plot_gaps(results: Results, found: Sequence[Outcome], path: Path) -> None:
    """A panel for each run: the absolute relative gap to bf16 over the steps, its interval, each seed and the limit."""
    from matplotlib.figure import Figure

    columns = max(1, min(4, len(found)))  # without any bf16 to compare with, an empty figure of the same name
    rows = max(1, -(-len(found) // columns))
    figure = Figure(figsize=(3.6 * columns, 3.0 * rows), layout="constrained")
    # One scale for a row: its panels are there to be compared.
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey="row").flatten()
    gaps = gaps_by_step(results) if found else {}
    tops = [_plot_gap(panel, outcome, gaps[outcome.name]) for panel, outcome in zip(panels, found, strict=False)]
    for row in range(len(tops[::columns])):
        panels[row * columns].set_ylim(0, max(tops[row * columns : (row + 1) * columns]) or 1.0)
    for panel in panels[len(found) :]:
        panel.remove()
    for panel in panels[max(0, len(found) - columns) : len(found)]:
        panel.tick_params(labelbottom=True)  # under which no panel is left
    figure.suptitle(
        f"|validation loss / bf16's - 1|, percent: mean over seeds, {CONFIDENCE:.0%} interval, seeds (thin)"
    )
    figure.savefig(path, dpi=110)


def plot_summary(found: Sequence[Outcome], noise: Noise | None, resolution: float, path: Path) -> None:
    """One line for each run: its gap to bf16 with its interval and its seeds, over the noise floor."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.4 + 0.32 * len(found)), layout="constrained")
    axes = figure.subplots()
    if noise is not None:
        wide = 100 * half_width(noise.floor, noise.seeds)
        axes.axvspan(-wide, wide, color="C7", alpha=0.3, label="interval that noise alone has")
        axes.set_title(
            f"noise floor {noise.floor:.3%}, at most {noise.interval[1]:.3%}; {noise.seeds} seeds", fontsize=9
        )
    for edge in (-resolution, resolution):
        axes.axvline(100 * edge, color="C3", linestyle="--", linewidth=1)
    for y, outcome in enumerate(found):
        color = "C7" if outcome.limit is None else "C0"
        signed = outcome.signed
        axes.errorbar(100 * signed.mean, y, xerr=100 * signed.half, fmt="o", color=color, capsize=3)
        axes.plot([100 * gap for gap in outcome.gaps], [y] * len(outcome.gaps), "|", color=color)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(found)), [outcome.name for outcome in found])
    axes.invert_yaxis()
    axes.set_xlabel(f"final validation loss against bf16, percent; dashed: +-{resolution:.2%}")
    if noise is not None:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _plot_gap(axes: Axes, outcome: Outcome, gaps: Mapping[int, Sequence[float]]) -> float:
    """Draws one panel; returns how high its scale must reach."""
    steps = list(gaps)
    percents = [[100 * abs(gap) for gap in each] for each in gaps.values()]
    bands = [interval(each) for each in percents]
    for seed in zip(*percents, strict=True):
        axes.plot(steps, seed, color="C0", linewidth=0.7, alpha=0.5)
    axes.fill_between(steps, [max(0.0, b.lower) for b in bands], [b.upper for b in bands], color="C0", alpha=0.2)
    axes.plot(steps, [b.mean for b in bands], color="C0", marker="o", markersize=3)
    limit = 100 * outcome.limit if outcome.limit is not None and math.isfinite(outcome.limit) else 0.0
    if limit:
        axes.axhline(limit, color="C3", linestyle="--", linewidth=1)
    axes.set(xlabel="step", title=outcome.name)
    return 1.1 * max(limit, bands[-1].upper, *(max(each) for each in percents))  # early bands of few seeds may be cut


def _by_name(results: Results) -> dict[str, list[Result]]:
    named_results: dict[str, list[Result]] = {}
    for job, result in results.items():
        named_results.setdefault(job.name, []).append(result)
    return named_results


def _training(result: Result) -> list[float]:
    return [metrics.loss for metrics in result.run.history]


def _smooth(values: Sequence[float]) -> list[float]:
    """Each value averaged with its neighbours, a hundredth of all on each side."""
    half = len(values) // 100
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


# ---- Report ----


def render(
    results: Results,
    found: Sequence[Outcome],
    facts: Mapping[str, str],
    unit: str,
    images: tuple[str, str, str],
    problems: Sequence[str],
    left: Sequence[Job],
    alone: bool,
) -> str:
    """The report as Markdown.

    `facts` say what was run where, `unit` what losses are per, `images` name the plots, `left` is what has not ended
    yet, and `alone` says that each run had a device to itself.
    """
    seeds = sorted({job.seed for job in results})
    verdict = "**FAILED**" if problems else "**passed**"
    lines = ["# minifloat study", "", f"{verdict} so far: {len(left)} runs are left" if left else verdict, ""]
    lines += [f"- {problem}" for problem in problems] + [""] * bool(problems)
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "## Final validation loss, relative to bf16 of the same seed", "", _METHOD.format(
        n=len(seeds), t=student_t(len(seeds) - 1), level=f"{CONFIDENCE:.0%}",
        ways=1 + sum(outcome.limit is None for outcome in found),
    ), ""]  # fmt: skip
    header = ("run", "mean of abs. gap", "interval", "signed mean", "interval", "each seed", "limit", "p", "verdict")
    rows = [outcome_row(outcome) for outcome in found]
    rows += [(name, *[""] * (len(header) - 2), steps) for name, steps in broken_rows(results)]
    lines += table(header, rows)
    if found:
        lines += ["", "The same of the mean training loss of the last tenth of the steps:", ""]
        rows = [(name, *signed_cells(gaps)) for name, gaps in training_gaps(whole(results)).items()]
        lines += table(("run", *header[3:6]), rows)
    lines += ["", f"![gaps against the noise floor]({images[2]})"]
    lines += ["", f"![gaps over the steps]({images[1]})", "", f"## Losses (nats per {unit})", ""]
    lines += [f"![losses]({images[0]})", "", "Final validation losses:", ""]
    losses = final_losses(whole(results))
    lines += table(
        ("run", *(f"seed {seed}" for seed in seeds), "mean", *["tokens/s"] * alone, "peak memory"),
        [(name, *(f"{x:.4f}" for x in each), f"{statistics.fmean(each):.4f}", *_cost(_by_name(results)[name], alone))
         for name, each in losses.items()],
    )  # fmt: skip
    shared = "Runs shared the device, so that their tokens/s compare nothing and are not given."
    lines += ["", "Tokens/s are medians over the steps." if alone else shared, ""]
    lines += ["## Executed GEMMs of the linears, all seeds", ""]
    lines += table(("run", "gemm", "a", "b", "backend", "count"), gemm_rows(results))
    return "\n".join(lines) + "\n"


_METHOD = """\
All runs of a seed start from the same weights and see the same batches. The gap of a run is its final validation loss
over bf16's of that seed, less one. Intervals are Student's over the {n} seeds, {level}, t = {t:.3f}. `bf16-reordered`
and `fp32` are controls: bf16 with the sums of its linears in reverse order, and all in fp32.

A recipe passes if the upper end of the interval of its mean absolute gap is at most its limit, or if it is not
distinguishable from the controls: p, from an exact permutation test within seeds, is the share of the {ways}^{n} ways
to take the absolute gap of the recipe or of a control at each seed whose mean is at least the recipe's. At p <= 0.05 it
is distinguishable; seeds too few to give such a p excuse nothing. Nor is a recipe excused whose mean absolute gap is
above the upper ends of all the controls' intervals. With three seeds p is at most 0.05 only for a recipe that is
farthest from bf16 at every seed. That a recipe is not distinguishable is no proof that it equals bf16, and nothing
corrects for testing several recipes."""


def outcome_row(outcome: Outcome) -> tuple[str, ...]:
    """A line of the table of gaps, in percent."""
    absolute = outcome.absolute
    return (
        outcome.name,
        f"{absolute.mean:.3%}",
        f"{absolute.lower:.3%} to {absolute.upper:.3%}",
        *signed_cells(outcome.gaps),
        "" if outcome.limit is None else f"{outcome.limit:.2%}",
        "" if outcome.p_value is None else f"{outcome.p_value:.3f}",
        outcome.verdict,
    )


def signed_cells(gaps: Sequence[float]) -> tuple[str, str, str]:
    """The mean of the gaps, its interval, and each of them, in percent."""
    mean = interval(gaps)
    return f"{mean.mean:+.3%}", f"{mean.lower:+.3%} to {mean.upper:+.3%}", ", ".join(f"{gap:+.3%}" for gap in gaps)


def as_json(
    results: Results, found: Sequence[Outcome], facts: Mapping[str, str], problems: Sequence[str], left: Sequence[Job]
) -> dict[str, Any]:
    """All numbers of the report, and every run's curves."""
    conditions: Conditions = next(iter(results.values())).conditions
    return {
        "passed": not problems,
        "left": [str(job) for job in left],
        "problems": list(problems),
        "facts": dict(facts),
        "conditions": asdict(conditions),
        "confidence": CONFIDENCE,
        "outcomes": [
            asdict(outcome) | {"absolute": asdict(outcome.absolute), "signed": asdict(outcome.signed)}
            | {"verdict": outcome.verdict} for outcome in found
        ],
        "training_gaps": training_gaps(whole(results)) if found else {},
        "broken": dict(broken_rows(results)),
        "gemms": [list(row) for row in gemm_rows(results)],
        "runs": [
            asdict(job)
            | {"training": [round(loss, 5) for loss in _training(result)], "validation": result.validation()}
            for job, result in results.items()
        ],
    }  # fmt: skip


def _cost(results: Sequence[Result], alone: bool) -> list[str]:
    """Tokens/s, if nothing shared the device, and peak memory."""
    peaks = [result.run.peak_bytes for result in results if result.run.peak_bytes is not None]
    own = [replace(each.run, history=each.run.history[each.conditions.common :]) for each in results]
    speed = statistics.median(run.tokens_per_second for run in own)
    return [f"{speed:,.0f}"] * alone + [f"{max(peaks) / 2**20:,.0f} MiB" if peaks else "unknown"]
