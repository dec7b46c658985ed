"""``inspect``: watches what the casts of a model lose, layer by layer, while it trains."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minifloat import recompute
from minifloat.arguments import Count, checked
from minifloat.autocast import used
from minifloat.formats import ROWWISE
from minifloat.functional.quantize import RoleCasts
from minifloat.functional.spec import LinearCasts, Spec
from minifloat.inspection import MEANINGS, Losses, combine, measure, read
from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer, as_matrix
from minifloat.tensor import QuantizedTensor

_ROLES = {"input": "X", "weight": "W", "grad_output": "dY"}


class Place(NamedTuple):
    """Names an operand: the layer, ``"X"``, ``"W"`` or ``"dY"``, and ``"rowwise"``, ``"columnwise"`` or ``"both"``."""

    layer: str
    role: str
    orientation: str


class NonFinite(NamedTuple):
    """The first operand that held infinity or NaN: the step, its number in the step, the rank, and how many."""

    step: int
    order: int
    rank: int
    place: Place
    elements: int


def own_file(folder: str | Path) -> Path:
    """Names the file of this rank's lines in ``folder``."""
    return Path(folder) / (f"inspect.rank{_rank()}.jsonl" if _rank() else "inspect.jsonl")


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _WatchedCasts(RoleCasts):
    """Makes the operands that the casts of a spec make, codes where those would leave values, and reports them."""

    needs_values = True

    def __init__(self, casts: RoleCasts, device: str, seen: Callable[[str, Tensor, Quantized], None]) -> None:
        super().__init__(casts.quantizers, casts.kinds, device)
        self.made_by, self.seen = RoleCasts(casts.quantizers, casts.kinds, device), seen
        self.casts = None  # or exchanges would call them past this object

    def __call__(self, xs: Sequence[Tensor], *args: Any, **options: Any) -> list[Quantized]:
        made = self.made_by(xs, *args, **options)
        for kind, x, quantized in zip(self.kinds, xs, made, strict=True):
            self.seen(kind, x, quantized)
        return made

    def like(self, quantizer: Quantizer, gemm_ready_on: str) -> RoleCasts:
        return _WatchedCasts(self.made_by.like(quantizer, gemm_ready_on), gemm_ready_on, self.seen)

    def of_groups(self, x: Tensor, offsets: Tensor, *args: Any, **known: Any) -> Quantized:
        made = self.made_by.of_groups(x, offsets, *args, **known)
        rows = known.get("rows")
        self.seen(self.kinds[0], x if rows is None else x.index_select(0, rows), made)
        return made


class Inspection:
    """Statistics of the operands of a model's linears in every ``every``-th step; made by :func:`inspect`."""

    def __init__(self, model: nn.Module, every: int) -> None:
        if used.inspection is not None:
            raise RuntimeError("inspect: another inspection is open; close() it first")
        for name, module in model.named_modules():
            if getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules:
                raise ValueError(
                    f"inspect: {name or type(module).__name__} is compiled, and compiled code reports no casts; "
                    "inspect the model that torch.compile was given, in steps of its own"
                )
        self.every, self.step, self._active, self._within = every, -1, False, False
        self._names = {module: name for name, module in model.named_modules()}
        self._pending: list[tuple[int, int, Place, Tensor]] = []
        self._measured: dict[tuple[int, Place], Tensor] = {}
        self._first: NonFinite | None = None
        self._order = self._earlier = 0  # casts that were measured, in all and before the step
        ends = model.register_forward_hook(self._end, always_call=True)
        self._hooks = model.register_forward_pre_hook(self._begin, prepend=True), ends
        used.inspection = self

    def _begin(self, model: nn.Module, args: Any) -> None:
        """Counts the steps, and fetches what the last one measured: its backward is over."""
        if torch.compiler.is_compiling() or recompute.recomputes():
            return
        capturing = recompute.capturing()
        training = model.training and torch.is_grad_enabled() and not capturing
        if training:
            self.step, self._earlier = self.step + 1, self._order
        self._active = self._within = training and self.step % self.every == 0
        if not capturing:
            self._fetch()

    def _end(self, model: nn.Module, args: Any, y: Any) -> None:
        self._within = False

    def _label(self, layer: nn.Module) -> str | None:
        """Names a layer whose casts are of an inspected step: an evaluation of a part of the model is not."""
        inside = self._active and (self._within or torch.is_grad_enabled() or recompute.recomputes())
        name = self._names.get(layer) if inside else None
        return name if name != "" else str(getattr(layer, "_label", ""))

    def watch(self, layer: nn.Module, spec: Spec) -> Spec:
        """Returns ``spec``, or in an inspected step one that computes the same bits and reports its casts."""
        if (label := self._label(layer)) is None:
            return spec
        step = self.step

        def seen(kind: str, x: Tensor, made: Quantized) -> None:
            self._observe(step, label, kind, x, made)

        # Nothing is replayed, and no operand is left as values.
        casts = LinearCasts(*(_WatchedCasts(each, spec.options.device, seen) for each in spec.casts))
        return replace(spec, forward=None, backward=None, emit_bf16=(), seen=seen, casts=casts)

    def see_rows(self, layer: nn.Module, rows: Tensor, part: Quantized) -> None:
        """Measures the cast of this rank's ``rows`` of a sharded weight."""
        if (label := self._label(layer)) is not None:
            self._observe(self.step, label, "weight", rows, part)

    def _observe(self, step: int, layer: str, kind: str, x: Tensor, made: Quantized) -> None:
        if isinstance(x, QuantizedTensor) or x.is_meta or (kind != "grad_output" and recompute.recomputes()):
            return  # a recomputation casts once more what the forward cast
        row, column = made
        twice = row is not None and column is not None and row.format == column.format and row.format.symmetric
        for operand in made[:1] if twice else made:
            if operand is None or operand.codes.dtype != torch.uint8:
                continue
            orientation = "rowwise" if operand.dim == ROWWISE else "columnwise"
            place = Place(layer, _ROLES[kind], "both" if operand.format.symmetric else orientation)
            self._order += 1
            self._pending.append((step, self._order - self._earlier, place, measure(as_matrix(x), operand)))

    def _fetch(self) -> None:
        """Brings what is measured to the host, in one copy for each device."""
        pending, self._pending = self._pending, []
        for device in dict.fromkeys(each.device for *_, each in pending):
            own = [entry for entry in pending if entry[-1].device == device]
            values = torch.stack([each for *_, each in own]).cpu()
            for (step, order, place, _), sums in zip(own, values, strict=True):
                self._add(step, place, sums)
                if elements := read(sums).nonfinite:
                    found = NonFinite(step, order, _rank(), place, elements)
                    self._first = found if self._first is None else min(self._first, found)

    def _add(self, step: int, place: Place, sums: Tensor) -> None:
        before = self._measured.get((step, place))
        self._measured[step, place] = sums if before is None else combine(torch.stack([before, sums]))

    @property
    def first_nonfinite(self) -> NonFinite | None:
        """The first operand with an element that is infinite or NaN in high precision; waits for the device."""
        self._fetch()
        return self._first

    def rows(self) -> list[tuple[Place, Losses]]:
        """Lists the statistics of all inspected steps together, worst first: non-finite, then by excess."""
        self._fetch()
        sums: dict[Place, list[Tensor]] = {}
        for (_, place), each in self._measured.items():
            sums.setdefault(place, []).append(each)
        rows = [(place, read(combine(torch.stack(each)))) for place, each in sums.items()]
        return sorted(rows, key=lambda row: (-row[1].nonfinite, -row[1].excess, row[1].snr))

    def table(self) -> str:
        """Writes :meth:`rows` as plain text, and what each column means."""
        rows = self.rows()
        width = max([5, *(len(place.layer) for place, _ in rows)])
        lines = [
            f"{'layer':{width}}  role  orientation  excess        amax  underflow  saturation   SNR dB  non-finite",
            *(
                f"{place.layer:{width}}  {place.role:4}  {place.orientation:11}  {of.excess:6.1%}  {of.amax:10.3g}  "
                f"{of.underflow:9.2%}  {of.saturation:10.2%}  {of.snr:7.1f}  {of.nonfinite:10}"
                for place, of in rows
            ),
            *(f"{name}: {meaning}" for name, meaning in MEANINGS.items()),
        ]
        return "\n".join(lines)

    def lines(self, forget: bool = False) -> list[dict[str, Any]]:
        """Lists what :meth:`write` writes: a step, the names of a :class:`Place` and its ``Losses``, as JSON has them.

        An SNR of minus infinity is "-inf", other numbers that are infinite or NaN are None. With ``forget`` they are
        given once, and neither :meth:`rows` nor a later call has them: a long run need not hold them.
        """
        self._fetch()
        lines = []
        for (step, place), sums in self._measured.items():
            of: dict[str, Any] = read(sums)._asdict()
            of = {name: v if math.isfinite(v) else "-inf" if v < 0 else None for name, v in of.items()}
            lines.append({"step": step, **place._asdict(), **of})
        if forget:
            self._measured = {}
        return lines

    def write(self, folder: str | Path) -> Path:
        """Writes :meth:`lines` as JSON to ``inspect.jsonl``, or ``inspect.rank1.jsonl`` on rank 1."""
        path = own_file(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines()), encoding="utf-8")
        return path

    def reduce(self, group: ProcessGroup | None = None) -> None:
        """Adds up the statistics of the ranks of ``group``, on each of them; all must call it, once.

        A rank's statistics are of what it cast: its rows of X and dY, its W, which counts once for each rank that has
        it. ``first_nonfinite`` becomes that of the earliest step, and of the earliest cast in it.
        """
        self._fetch()
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, (self._measured, self._first), group)
        self._measured = {}
        for measured, _ in parts:
            for (step, place), sums in measured.items():
                self._add(step, place, sums)
        self._first = min((first for _, first in parts if first is not None), default=None)

    def close(self) -> None:
        """Ends the inspection; what it has found can still be read."""
        if used.inspection is self:
            used.inspection = None
        self._active = False
        for hook in self._hooks:
            hook.remove()
        self._fetch()
        self._names = {}
        if not self._order:
            warnings.warn(
                "inspect: no step has reported a cast: the model is compiled or captured, computes under no recipe, or "
                "was not called in training mode",
                stacklevel=2,
            )

    def __enter__(self) -> Inspection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@checked
def inspect(model: nn.Module, every: Count = 100) -> Inspection:
    """Measures the error of each operand that the linears in ``model`` cast for their GEMMs.

    It sees linears alone, in fused modules, in converted models and of experts, in eager code. A step is a forward of
    ``model`` itself in training mode with its backward; the first is inspected, then each ``every``-th. Outputs and
    gradients keep their bits. Microbatches are steps, so under gradient accumulation ``every`` counts microbatches.

    It does not see models that are compiled or captured into a CUDA graph, layers that are added later, and quantized
    parameters. A rank sees its own rows, of a sharded weight and of tensors that sequence parallelism gathers, unless
    another rank owns their block: call this after ``fully_shard``.

    Returns:
        An :class:`Inspection`: a context manager, or to be ended with ``close()``.

    Raises:
        RuntimeError: another inspection is open.
        ValueError: a module is compiled.
    """
    return Inspection(model, every)
