"""The plan of a linear: which step each of its callables is, chosen once for a recipe and the options of its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minifloat import capability
from minifloat.comm.collectives import Pending
from minifloat.delayed_call import DelayedCall
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional import batch_invariant, gemm, shared_cast
from minifloat.functional import linear_steps as steps
from minifloat.functional.autograd import as_output, as_output_eager
from minifloat.functional.linear_config import LinearConfig, LinearOptions
from minifloat.functional.quantize import RoleCasts, cast_with
from minifloat.functional.tensor_parallel import TensorParallel
from minifloat.functional.weight_gradient import (
    Sink,
    into_grad,
    into_main_grad,
    into_main_grad_in_graph,
    left_for_later,
    to_autograd,
)
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Quantizer

UNQUANTIZED = Quantizer.identity()


@dataclass(frozen=True, eq=False)
class LinearPlan:
    """The steps of one linear, in the order in which forward and backward take them.

    Args:
        config: how each tensor is quantized.
        options: of the calls under this plan.
        x_quantizer, w_quantizer, dy_quantizer: in the orientations that the GEMMs read and backward saves.
        saves_value: backward reads X itself, or casts it again.
        shares_x: the operands of X serve siblings: they are the same, and do not live as long as the graph.
        gathers_x: X is gathered for fprop and wgrad.
        writes_to_weight: backward writes to the parameter by itself and needs it with its Python attributes.
        recompute_x: as of the options, where that may be.
        passing: dims along which X and W are cast for an emulated product alone, and may be values in lieu of codes.
        quantize_inputs: (call, X, W, ...) -> X for fprop, W, and this rank's X; gathers X where ranks split its rows.
        fprop: (X, W, b) -> Y [M, N], summed over the ranks; of a grouped linear also (X, W, b, out), and so dgrad.
        save_x, save_w: (value, operands) -> the operand that backward reads.
        output: (Y, shape of X, delayed call) -> what forward returns; ``grad_input`` of dX what backward returns.
        quantize_dy: (dY, delayed call, amaxes if known, groups) -> its operands, gathered where ranks split its rows.
        load_x: (operand, delayed scale) -> what wgrad reads of X, gathered likewise; None: the operand.
        load_w: (operand, weight) -> what dgrad reads of W, gathered where ranks split its rows; None: the operand.
        dgrad: (dY, W) -> dX [M, K]; ``reduce_dx`` ends its sum over the ranks, if any, which goes on during wgrad.
        wgrad: (dY, X, dtype, out, accumulate) -> dW [N, K], where to and how as of ``gemm.wgrad``.
        accumulate_dw: (weight, a function that computes dW) -> what autograd gets.
        bias_gradient: (dY, groups) -> db [N]; ``reduce_db`` likewise.
    """

    config: LinearConfig
    options: LinearOptions
    x_quantizer: Quantizer
    w_quantizer: Quantizer
    dy_quantizer: Quantizer
    saves_value: bool
    shares_x: bool
    gathers_x: bool
    writes_to_weight: bool
    recompute_x: bool
    passing: tuple[int, ...]
    quantize_inputs: Callable[..., tuple[Any, Quantized, Quantized]]
    fprop: Callable[..., Tensor]
    save_x: Callable[[Tensor | None, Quantized], Operand | None]
    save_w: Callable[[Tensor, Quantized], Operand | None]
    output: Callable[[Tensor, torch.Size, DelayedCall | None], Tensor]
    quantize_dy: Callable[..., Any]
    load_x: steps.Load | None
    load_w: steps.Load | None
    dgrad: Callable[..., Any]
    reduce_dx: Callable[[Any], Tensor] | None
    wgrad: Callable[..., Tensor]
    accumulate_dw: Sink
    grad_input: Callable[[Tensor, torch.Size, DelayedCall | None], Tensor]
    bias_gradient: Callable[..., Any]
    reduce_db: Callable[[Any], Tensor | None]


def make_plan(config: LinearConfig, options: LinearOptions) -> LinearPlan:
    """Chooses the step functions; every branch on recipe, parallelism or option of a linear is here."""
    override, parallel = config.backward_override, options.parallel
    needs_x, needs_w = options.needs_x, options.needs_w
    gathers_x, gathers_dy = parallel.gathers_input, parallel.gathers_grad_output
    reads_value = needs_w and (config.save_original_input or override == "high_precision")
    saves_value = reads_value and not options.input_is_quantized
    recompute_x = options.recompute_x and needs_x and needs_w and override is None and not gathers_x
    x_quantizer = config.input.with_usage(
        columnwise=needs_w and override is None and not saves_value and not recompute_x
    )
    w_quantizer = config.weight.with_usage(columnwise=needs_x and override is None)
    passing, dy_passing = _passing(config, options)
    along = ROWWISE if override == "dequantized" else COLUMNWISE  # the orientation of X and W that backward reads
    save_w: Callable[..., Operand | None] = steps.nothing
    if needs_x and options.gathers_weight:
        save_w = steps.save_part_value if override == "high_precision" else partial(steps.save_part, along)
    elif needs_x:
        save_w = steps.save_weight_value if override == "high_precision" else partial(steps.save_along, along)
    save_x, load_x = _save_and_load(config, parallel, along, saves_value)
    dy_quantizer = config.grad_output.with_usage(rowwise=needs_x, columnwise=needs_w) if override is None else None
    quantize_dy: Callable[..., Any] = steps.unquantized_dy
    if dy_quantizer is not None:
        dy_casts = RoleCasts((dy_quantizer,), ("grad_output",), options.device, dy_passing)
        quantize_dy = partial(steps.quantize_dy, dy_casts, dy_quantizer)
    if gathers_dy:
        quantize_dy = partial(steps.gather_dy, options, dy_quantizer)

    sharded = parallel.mode is not None
    compiling = torch.compiler.is_compiling()
    multiply = gemm.multiply if compiling else gemm.multiply_eager
    wgrad: Callable[..., Tensor] = partial(steps.wgrad, multiply, config.fast_wgrad)
    dgrad: Callable[..., Any] = partial(steps.dgrad, multiply, options.dtype, config.fast_dgrad)
    if sharded:
        dgrad = partial(steps.sharded_dgrad, options, config.fast_dgrad)
    if override == "dequantized":
        dgrad, wgrad = (partial(steps.of_values, steps.dequantized, product) for product in (dgrad, wgrad))
    output, grad_input = _outputs(config, options, compiling)
    return LinearPlan(
        config,
        options,
        x_quantizer,
        w_quantizer,
        dy_quantizer or UNQUANTIZED,
        saves_value,
        not saves_value and shared_cast.is_shared(x_quantizer),
        gathers_x,
        options.main_grad or options.gathers_weight or options.wgrad_tasks is not None,
        recompute_x,
        passing,
        quantize_inputs=_quantize_inputs(options, x_quantizer, w_quantizer, passing),
        fprop=partial(
            partial(steps.sharded_fprop, parallel) if sharded else steps.fprop,
            batch_invariant.multiply if options.batch_invariant else multiply,
            options.dtype,
            config.fast_fprop,
        ),
        save_x=steps.nothing if not needs_w or recompute_x else save_x,
        save_w=save_w,
        output=output,
        quantize_dy=quantize_dy,
        load_x=load_x,
        load_w=partial(steps.gather_w, along, override == "high_precision") if options.gathers_weight else None,
        dgrad=dgrad,
        reduce_dx=Pending.wait if sharded else None,
        wgrad=partial(steps.wgrad_of_gathered, along, wgrad) if gathers_x else wgrad,
        accumulate_dw=_sink(options, compiling),
        grad_input=grad_input,
        bias_gradient=steps.nothing
        if not options.needs_b
        else partial(steps.reduced_column_sum, parallel)
        if sharded
        else steps.column_sum,
        reduce_db=Pending.wait if sharded and options.needs_b else steps.identity,
    )


def _passing(config: LinearConfig, options: LinearOptions) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``LinearPlan.passing``, and the same of dY: what is neither saved nor gathered."""
    sharded = options.parallel.mode is not None or options.gathers_weight
    if options.device != "cuda" or config.backward_override is not None or sharded or torch.compiler.is_compiling():
        return (), ()

    def emulated(a: Quantizer, b: Quantizer, a_dim: int, b_dim: int) -> bool:
        return capability.backend(a.format(a_dim), b.format(b_dim), torch.device("cuda")) == "emulated"

    alone = not options.batch_invariant and emulated(config.input, config.weight, ROWWISE, ROWWISE)
    forward = (ROWWISE,) if alone else ()
    backward: tuple[int, ...] = (ROWWISE,) if emulated(config.grad_output, config.weight, ROWWISE, COLUMNWISE) else ()
    if options.wgrad_tasks is None and emulated(config.grad_output, config.input, COLUMNWISE, COLUMNWISE):
        backward += (COLUMNWISE,)
    return forward, backward


def _quantize_inputs(
    options: LinearOptions, x_quantizer: Quantizer, w_quantizer: Quantizer, passing: tuple[int, ...]
) -> Callable[..., Any]:
    """How forward gets the operands of X and W."""
    casts = steps.InputCasts(
        RoleCasts((x_quantizer, w_quantizer), ("input", "weight"), options.device, passing),
        RoleCasts((x_quantizer,), ("input",), options.device, passing),
        RoleCasts((w_quantizer,), ("weight",), options.device, passing),
    )
    quantize: Callable[..., Any] = partial(steps.quantize_inputs, casts)
    if options.parallel.gathers_input:
        quantize = partial(steps.quantize_and_gather, casts, x_quantizer, options.parallel)
    if not (w_quantizer.quantized or options.gathers_weight):
        quantize = partial(steps.with_w_in, options.dtype, quantize)
    return partial(steps.with_gathered_w, quantize) if options.gathers_weight else quantize


def _save_and_load(
    config: LinearConfig, parallel: TensorParallel, along: int, saves_value: bool
) -> tuple[Callable[..., Operand | None], steps.Load | None]:
    """What backward needs of X: how forward saves it, and how wgrad gets its operand of that."""
    save: Callable[..., Operand | None] = partial(steps.save_x_along, along)
    load: steps.Load | None = None
    if config.backward_override == "high_precision" or (saves_value and config.backward_override is None):
        save = steps.save_value
    if saves_value and config.backward_override is None and config.input.format(COLUMNWISE).quantized:
        cast = parallel.quantize_shard if parallel.gathers_input else cast_with
        load = partial(steps.cast_value, cast, config.input.with_usage(rowwise=False))
    if parallel.gathers_input:
        load = partial(steps.gather_x, parallel, along, load)
    return save, load


def _outputs(
    config: LinearConfig, options: LinearOptions, compiling: bool
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """What forward does to Y before it returns it, and backward to dX."""
    own_memory = as_output if compiling else as_output_eager
    output: Callable[..., Tensor] = partial(steps.output, own_memory)
    if options.parallel.mode is not None:
        output = partial(steps.sharded_output, own_memory, options.parallel)
    if options.quantize_output and not compiling:  # else by ``steps.quantized_in_graph``
        output = partial(steps.quantized, output, config.output, "output")
    grad_input: Callable[..., Tensor] = partial(steps.grad_input, own_memory)
    if options.quantize_grad_input:
        grad_input = partial(steps.quantized, grad_input, config.grad_input, "grad_input")
    return output, grad_input


def _sink(options: LinearOptions, compiling: bool) -> Sink:
    """Where dW goes."""
    sink: Sink = partial(to_autograd, options.wgrad_dtype or options.dtype)
    if options.main_grad:
        sink = into_main_grad_in_graph if compiling else partial(into_main_grad, options.overwrite_main_grad)
    if options.gathers_weight:
        sink = partial(steps.reduce_dw, sink if options.main_grad else into_grad, options)
    if options.wgrad_tasks is not None:
        sink = partial(left_for_later, options.wgrad_tasks, sink)
    return sink
