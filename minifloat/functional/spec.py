"""Decides what one kind of call of a linear computes: formats, dtypes, gradients; and keeps it for a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from minifloat import backends
from minifloat.autocast import DelayedCall
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional import gemm
from minifloat.functional.quantize import LinearConfig, Options, RoleCasts
from minifloat.operand import Quantized
from minifloat.ops.tape import Recorder
from minifloat.quantizer import Quantizer
from minifloat.recipe import CustomRecipe, Recipe
from minifloat.recipe.base import BackwardOverride, equal_in_graph

Saved = Literal["nothing", "values", "operand"]
_MOST_CUSTOM = 8  # recipes of a layer: a program that makes one for each step must not fill the memory


class LinearCasts(NamedTuple):
    """Casts of a kind of call: of X and W in one launch a phase, of each where the other exists already, of dY."""

    both: RoleCasts
    x: RoleCasts
    w: RoleCasts
    dy: RoleCasts


@dataclass(frozen=True, eq=False)
class Spec:
    """Decisions on one kind of call of a linear.

    Args:
        config: how the recipe quantizes each tensor.
        options: of the calls.
        x, w, dy: how X, W and dY are quantized, in the orientations that the GEMMs read and backward saves.
        casts_w: W is quantized at all.
        override: None, or what an unquantized backward computes on.
        along: the orientation of X and W that backward reads.
        saves_x: what backward gets of X.
        saves_value: backward reads X itself, or casts it again.
        again: casts that value, for wgrad; None: it is read as it was saved.
        recompute_x: as of the options, where that may be.
        emit_bf16: dims along which X and W are cast for an emulated product alone, and may be values in lieu of codes.
        casts: prepared; what they launch is recorded in them.
        forward, backward: record whole passes of calls that no rank has a part in, on a GPU.
        eager: no compiler traces it.
        multiply, multiply_rows: the GEMM, and that of fprop.
        seen: in an inspected step, gets the kind and the values of each tensor that is cast, and its operands.
    """

    config: LinearConfig
    options: Options
    x: Quantizer
    w: Quantizer
    dy: Quantizer
    casts_w: bool
    override: BackwardOverride
    along: int
    saves_x: Saved
    saves_value: bool
    again: Quantizer | None
    recompute_x: bool
    emit_bf16: tuple[int, ...]
    casts: LinearCasts
    forward: Any
    backward: Any
    eager: bool
    multiply: Callable[..., Tensor]
    multiply_rows: Callable[..., Tensor]
    seen: Callable[[str, Tensor, Quantized], None] | None = None


class Given:
    """Holds what differs between calls of one kind.

    Args:
        delayed: where delayed scaling reads its scales and records its amaxes.
        x, w: operands that exist already: of a quantized tensor, a cached weight.
        out: memory for Y, if the caller has some.
    """

    delayed: DelayedCall | None = None
    x: Quantized | None = None
    w: Quantized | None = None
    out: tuple[Tensor, ...] = ()


def make_spec(config: LinearConfig, options: Options, of_operation: bool = False) -> Spec:
    """Decides everything that depends on recipe and options alone; ``of_operation``: as of :class:`Recorder`."""
    override, ranks = config.backward_override, options.ranks
    needs_x, needs_w = options.needs_x, options.needs_w
    gathers_x = ranks is not None and ranks.sequence_parallel and ranks.mode == "column"
    saves_value = (
        needs_w and (config.save_original_input or override == "high_precision") and not options.input_is_quantized
    )
    recompute_x = options.recompute_x and needs_x and needs_w and override is None and not gathers_x
    x = config.input.with_usage(columnwise=needs_w and override is None and not saves_value and not recompute_x)
    w = config.weight.with_usage(columnwise=needs_x and override is None)
    dy = config.grad_output.with_usage(rowwise=needs_x, columnwise=needs_w)
    dy = dy if override is None else Quantizer.identity()
    saves_x: Saved = "operand"
    if not needs_w or recompute_x:
        saves_x = "nothing"
    elif override == "high_precision" or (saves_value and override is None):
        saves_x = "values"
    recasts = saves_value and override is None and config.input.format(COLUMNWISE).quantized
    device, (emit_bf16, dy_emit_bf16) = options.device, _bf16_dims(config, options)
    eager = not torch.compiler.is_compiling()
    multiply = gemm.multiply_eager if eager else gemm.multiply
    forward = backward = None
    alone = ranks is None and not (options.gathers_weight or options.batch_invariant or override or saves_value)
    if eager and alone and device == "cuda" and backends.kernels(torch.cuda.current_device())[0]:
        forward, backward = [Recorder(of_operation, of_operation) for _ in range(2)]
    casts = LinearCasts(
        RoleCasts((x, w), ("input", "weight"), device, emit_bf16),
        RoleCasts((x,), ("input",), device, emit_bf16),
        RoleCasts((w,), ("weight",), device, emit_bf16),
        RoleCasts((dy,), ("grad_output",), device, dy_emit_bf16),
    )
    return Spec(
        config, options, x, w, dy, casts_w=w.quantized, override=override, saves_x=saves_x, saves_value=saves_value,
        along=ROWWISE if override == "dequantized" else COLUMNWISE,
        again=config.input.with_usage(rowwise=False) if recasts else None,
        recompute_x=recompute_x, emit_bf16=emit_bf16, casts=casts,
        forward=forward, backward=backward, eager=eager, multiply=multiply,
        multiply_rows=gemm.multiply_rows if options.batch_invariant else multiply,
    )  # fmt: skip


def _bf16_dims(config: LinearConfig, options: Options) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Finds ``Spec.emit_bf16``, and the same of dY: operands that are neither saved nor gathered."""
    sharded = options.ranks is not None or options.gathers_weight
    if options.device != "cuda" or config.backward_override is not None or sharded or torch.compiler.is_compiling():
        return (), ()

    def emulated(a: Quantizer, b: Quantizer, a_dim: int, b_dim: int) -> bool:
        return backends.backend(a.format(a_dim), b.format(b_dim), torch.device("cuda")) == "emulated"

    alone = not options.batch_invariant and emulated(config.input, config.weight, ROWWISE, ROWWISE)
    forward = (ROWWISE,) if alone else ()
    backward: tuple[int, ...] = (ROWWISE,) if emulated(config.grad_output, config.weight, ROWWISE, COLUMNWISE) else ()
    if not options.delays_wgrad and emulated(config.grad_output, config.input, COLUMNWISE, COLUMNWISE):
        backward += (COLUMNWISE,)
    return forward, backward


# ---- the recipes of a layer, and the specs that followed ----


class Configured(NamedTuple):
    """Recipe, how it quantizes a layer's tensors, and the specs that follow; read at once: threads take turns."""

    recipe: Recipe
    config: LinearConfig
    specs: dict[tuple[Any, ...], Spec]


class LinearConfigs:
    """Configs of a layer, each asked of its recipe at the first use, and kept.

    Attributes:
        latest: what was asked for last.
        custom: those of the latest few custom recipes, which may take turns: a factory is asked once.
    """

    def __init__(self) -> None:
        self.latest: Configured | None = None
        self.custom: list[tuple[Recipe, LinearConfig]] = []

    def under(self, recipe: Recipe, make: Callable[[Recipe], LinearConfig]) -> Configured:
        """Returns the config of ``recipe``; ``make``: asks it."""
        if torch.compiler.is_compiling():
            return Configured(recipe, self._in_graph(recipe, make), {})
        latest = self.latest
        if latest is None or latest.recipe is not recipe:
            config = next((config for known, config in self.custom if known is recipe), None) or make(recipe)
            if isinstance(recipe, CustomRecipe):
                kept = [pair for pair in self.custom if pair[0] is not recipe]
                self.custom = [*kept[1 - _MOST_CUSTOM :], (recipe, config)]
            latest = self.latest = Configured(recipe, config, {})
        return latest

    def _in_graph(self, recipe: Recipe, make: Callable[[Recipe], LinearConfig]) -> LinearConfig:
        """Finds a config in traced code: by equality, or a loop that makes its recipe would recompile.

        To keep what is found changes the layer, for which the graph is compiled once more. So it is kept where it is
        asked for later: a factory is called once, and checkpoints ask how histories are reduced. Of factories that are
        made anew the first is kept, and the others are traced: their code and what it reads are guarded.
        """
        latest = self.latest
        if latest is not None and equal_in_graph(latest.recipe, recipe):
            return latest.config
        custom = isinstance(recipe, CustomRecipe)
        for known, config in self.custom if custom else ():
            if equal_in_graph(known, recipe):
                return config
        config = make(recipe)
        if custom and not self.custom:
            self.custom = [(recipe, config)]
        if config.delayed is not None:
            self.latest = Configured(recipe, config, {})
        return config

    def __getstate__(self) -> dict[str, Any]:
        """Leaves specs out of copies: what is prepared in them is the original's."""
        return self.__dict__ | {"latest": self.latest and self.latest._replace(specs={})}
