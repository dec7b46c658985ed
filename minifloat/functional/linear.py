"""A linear layer, Y = X W^T + b, on quantized operands: its plan, its autograd function, and the steps of both.

A layer's calls differ in recipe, parallelism, options and in which gradients are needed. All of that is decided once,
in :func:`make_plan`: a :class:`LinearPlan` names one callable for each step, and the autograd function calls them in
their order. Fused modules (``layernorm_linear.py``, ``layernorm_mlp.py``) put the same steps together in their own way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.autocast import Use
from minifloat.comm.collectives import Pending
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE
from minifloat.functional import gemm, shared_cast
from minifloat.functional.autograd import as_output, as_output_eager, first_order, guarded
from minifloat.functional.gathered import Gathered
from minifloat.functional.gemm import WeightGemm
from minifloat.functional.plan import LinearConfig
from minifloat.functional.quantize import RoleCasts, cast_with, delayed_scale, quantize, quantize_part, reuse
from minifloat.functional.tensor_parallel import TensorParallel
from minifloat.functional.weight_gradient import Sink, into_main_grad, left_for_later, to_autograd
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Amaxes, Quantizer, as_matrix
from minifloat.tensor import QuantizedTensor

_UNQUANTIZED = Quantizer.identity()
Gemm = Callable[..., Tensor]


@dataclass(frozen=True)
class LinearOptions:
    """What a call asks of a linear, beside its recipe.

    Args:
        device: type of the device.
        dtype: of the activations: what the output and both gradients are computed to.
        needs_x, needs_w, needs_b: whether input, weight and bias need gradients.
        parallel: how the linear is split over ranks, with the rows of the call.
        input_is_quantized: X comes quantized and is its own original: nothing else is kept of it.
        recompute_x: backward recomputes the operand of X that wgrad reads, from what the norm or activation that
            computed X saves. Only where dX is needed, backward is quantized, and no rank gathers X.
        quantize_output, quantize_grad_input: return those as :class:`QuantizedTensor`.
        main_grad: dW is added to ``weight.main_grad``; no gradient is returned for it.
        overwrite_main_grad: in the first microbatch of a step it replaces what is there, once after each time that
            ``weight.main_grad_is_old`` was set.
        wgrad_tasks: the list to which backward appends the computation of dW, in lieu of computing it.
    """

    device: str
    dtype: torch.dtype
    needs_x: bool
    needs_w: bool
    needs_b: bool
    parallel: TensorParallel
    input_is_quantized: bool = False
    recompute_x: bool = False
    quantize_output: bool = False
    quantize_grad_input: bool = False
    main_grad: bool = False
    overwrite_main_grad: bool = False
    wgrad_tasks: list[Callable[[], None]] | None = None


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
        quantize_inputs: (call, X, W, ...) -> X for fprop, W, and this rank's X; gathers X where ranks split its rows.
        fprop: (X, W, b) -> Y [M, N], summed over the ranks.
        save_x, save_w: (value, operands) -> the operand that backward reads.
        output: (Y, shape of X, use) -> what forward returns; ``grad_input`` of dX what backward returns.
        quantize_dy: (dY, use, amaxes if known) -> its operands, gathered where ranks split its rows.
        load_x: (operand, delayed scale) -> what wgrad reads of X, gathered likewise.
        dgrad: (dY, W) -> dX [M, K]; ``reduce_dx`` ends its sum over the ranks, which goes on during wgrad.
        wgrad: (dY, X, dtype) -> dW [N, K].
        accumulate_dw: (weight, a function that computes dW) -> what autograd gets.
        bias_gradient: dY -> db [N]; ``reduce_db`` likewise.
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
    quantize_inputs: Callable[..., tuple[Any, Quantized, Quantized]]
    fprop: Callable[[Any, Quantized, Tensor | None], Tensor]
    save_x: Callable[[Tensor | None, Quantized], Operand | None]
    save_w: Callable[[Tensor, Quantized], Operand | None]
    output: Callable[[Tensor, torch.Size, Use | None], Tensor]
    quantize_dy: Callable[..., Any]
    load_x: Callable[[Operand, Tensor | None], Any]
    dgrad: Callable[[Any, Operand], Any]
    reduce_dx: Callable[[Any], Tensor]
    wgrad: Callable[[Any, Any, torch.dtype], Tensor]
    accumulate_dw: Sink
    grad_input: Callable[[Tensor, torch.Size, Use | None], Tensor]
    bias_gradient: Callable[[Tensor], Any]
    reduce_db: Callable[[Any], Tensor | None]


class Call:
    """What differs between calls under one plan.

    Args:
        use: where delayed scaling reads its scales and records its amaxes.
        x, w: operands that exist already: of a quantized tensor, a cached weight, a sibling's input.
        eager: no compiler traces it.
        shares_x: forward leaves the operands of X here, for siblings to come.
    """

    __slots__ = ("eager", "shares_x", "use", "w", "x")

    def __init__(self, use: Use | None, x: Quantized | None, w: Quantized | None, eager: bool) -> None:
        self.use, self.x, self.w, self.eager = use, x, w, eager
        self.shares_x = False


class LinearFunction(torch.autograd.Function):
    """Y = X W^T + b and its gradients.

    ======  ========  =================  ======================
    tensor  shape     contracted over    quantized along
    ======  ========  =================  ======================
    X       [..., K]  K (M in wgrad)     rowwise (columnwise)
    W       [N, K]    K (N in dgrad)     rowwise (columnwise)
    dY      [..., N]  N (M in wgrad)     rowwise (columnwise)
    ======  ========  =================  ======================

    fprop Y = X W^T + b; dgrad dX = dY W; wgrad dW = dY^T X; db = the sum of dY over the M rows. Saved are the
    columnwise X and W, the very codes of the rowwise ones where a format is symmetric; nothing that no gradient needs
    is saved or computed. Of a linear that is split over ranks these are the shapes of what a rank multiplies;
    :class:`~minifloat.functional.tensor_parallel.TensorParallel` has those of its inputs and outputs.
    """

    @staticmethod
    def forward(ctx: Any, plan: LinearPlan, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Delayed scaling: a backward that casts X again needs this forward's scale, which the next update replaces.
        x_scale = delayed_scale(call.use, "input", keep=True) if plan.saves_value else None
        x_operands, w_operands, own_x = plan.quantize_inputs(call, x, weight, x_scale)
        if call.shares_x:
            call.x = own_x
        y = plan.fprop(x_operands, w_operands, bias)
        ctx.plan, ctx.use, ctx.x_shape = plan, call.use, x.shape
        ctx.weight = weight if plan.writes_to_weight else None
        tensors, ctx.layouts = pack(plan.save_x(x, own_x), plan.save_w(weight, w_operands))
        ctx.save_for_backward(*tensors, x_scale)
        return plan.output(y, x.shape, call.use)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        plan: LinearPlan = ctx.plan
        *tensors, x_scale = ctx.saved_tensors
        x, w = unpack(ctx.layouts, tensors)
        db = plan.bias_gradient(dy)
        dx, dw = gradients(plan, plan.quantize_dy(dy, ctx.use), x, w, x_scale, ctx.weight)
        if dx is not None:
            dx = plan.grad_input(dx, ctx.x_shape, ctx.use)
        if ctx.use is not None:
            ctx.use.backward_finished()
        return None, None, dx, dw, plan.reduce_db(db)


def gradients(
    plan: LinearPlan, dy: Any, x: Operand | None, w: Operand | None, x_scale: Tensor | None, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """dgrad dX [M, K] and wgrad dW [N, K], each None if not needed; ``weight`` is the parameter that has main_grad.

    What is gathered for wgrad is gathered during dgrad, and dX is summed over the ranks during wgrad.
    """
    dx = dw = None
    loaded = None if x is None else plan.load_x(x, x_scale)
    if w is not None:
        dx = plan.dgrad(dy, w)
    if loaded is not None:
        dw = plan.accumulate_dw(weight, partial(plan.wgrad, dy.along(COLUMNWISE), loaded))
    return None if dx is None else plan.reduce_dx(dx), dw


# ---- what backward saves ----


def pack(*operands: Operand | None) -> tuple[list[Tensor | None], list[Any]]:
    """The tensors of operands, for ``save_for_backward``, where autograd's hooks see them, and all else of them.

    An amax that a cast measured is left out; no GEMM reads it.
    """
    tensors: list[Tensor | None] = []
    layouts: list[Any] = []
    for operand in operands:
        if operand is None:
            tensors += None, None, None
            layouts.append(None)
        else:
            amax = operand.amax if operand.format.scale_rule == "two_level" else None
            tensors += operand.codes, operand.scale_inv, amax
            layouts.append(operand[3:])
    return tensors, layouts


def unpack(layouts: Sequence[Any], tensors: Sequence[Tensor | None]) -> list[Operand | None]:
    """The operands that :func:`pack` was given."""
    operands: list[Operand | None] = []
    compiling = torch.compiler.is_compiling()
    for i, layout in enumerate(layouts):
        codes, scale_inv, amax = tensors[3 * i : 3 * i + 3]
        if layout is None or codes is None:
            operands.append(None)
            continue
        if not compiling:  # a read of memory that FSDP2 has freed would end the process
            assert not codes.numel() or codes.untyped_storage().nbytes(), "saved codes were freed before backward"
        operands.append(_new(Operand, (codes, scale_inv, amax, *layout)))
    return operands


_new = tuple.__new__  # a NamedTuple without a call of its Python constructor


def _nothing(*_: Any) -> None:
    return None


def _itself(x: Any) -> Any:
    return x


def _save_value(x: Tensor | None, operands: Quantized) -> Operand | None:
    """The value, which the caller may change before backward; None where it was never computed."""
    if x is None:
        return None
    operand = unquantized(x)
    return operand._replace(codes=guarded(operand.codes))


def _save_weight_value(weight: Tensor, operands: Quantized) -> Operand:
    return unquantized(weight)


def _save_along(dim: int, x: Tensor | None, operands: Quantized) -> Operand:
    return operands.along(dim)


def _save_x_along(dim: int, x: Tensor | None, operands: Quantized) -> Operand:
    operand = operands.along(dim)
    return operand if operand.format.quantized else operand._replace(codes=guarded(operand.codes))


def unquantized(x: Tensor) -> Operand:
    """The values of ``x`` [..., K] as an operand."""
    matrix = as_matrix(x.dequantize() if isinstance(x, QuantizedTensor) else x)
    return Operand(matrix, None, None, IDENTITY, ROWWISE, (matrix.shape[0], matrix.shape[1]), matrix.dtype)


# ---- forward ----


class _InputCasts(NamedTuple):
    """The casts of X and W together, and of each by itself where the other exists already."""

    both: RoleCasts
    x: RoleCasts
    w: RoleCasts


def _quantize_inputs(
    casts: _InputCasts,
    call: Call,
    x: Tensor | None,
    weight: Tensor,
    x_scale: Tensor | None = None,
    x_amaxes: Amaxes | None = None,
    label: Callable[[Quantized], Quantized] | None = None,
) -> tuple[Quantized, Quantized, Quantized]:
    """X and W in the orientations that forward and backward read, those that do not exist yet in one launch a phase.

    ``x``: None if its operands exist; ``x_scale``, ``x_amaxes``: what its cast needs to know, if that is known;
    ``label``: what is done to operands that are cast from it.
    """
    x_operands, w_operands = call.x, call.w
    if w_operands is None and isinstance(weight, QuantizedTensor):
        weight = weight.dequantize()
    if x_operands is None:
        assert x is not None
        x = x.dequantize() if isinstance(x, QuantizedTensor) else x
        given = None if x_amaxes is None else (x_amaxes, None)  # the weight's own are found
        if w_operands is None:
            x_operands, w_operands = casts.both((x, weight), call.use, x_scale, given)
        else:
            (x_operands,) = casts.x((x,), call.use, x_scale, None if given is None else given[:1])
        x_operands = x_operands if label is None else label(x_operands)
    elif w_operands is None:
        (w_operands,) = casts.w((weight,), call.use)
    assert w_operands is not None
    return x_operands, w_operands, x_operands


def _quantize_and_gather(
    casts: _InputCasts,
    quantizer: Quantizer,
    parallel: TensorParallel,
    call: Call,
    x: Tensor | None,
    weight: Tensor,
    x_scale: Tensor | None = None,
    x_amaxes: Amaxes | None = None,
    label: Callable[[Quantized], Quantized] | None = None,
) -> tuple[Any, Quantized, Quantized]:
    """The same where X is gathered, which goes on while the weight is cast."""
    part, w = call.x, call.w
    if part is None:
        assert x is not None
        part = quantize_part(x, quantizer, "input", call.use, parallel, x_scale, x_amaxes)
        part = part if label is None else label(part)
    gathered = shared_cast.gathered(part) or parallel.gather(part, rowwise=True)
    if w is None:
        weight = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
        (w,) = casts.w((weight,), call.use)
    return shared_cast.offer(part, gathered), w, part


def _fprop(multiply: Gemm, dtype: torch.dtype, fast: bool, x: Quantized, w: Quantized, bias: Tensor | None) -> Tensor:
    return multiply("fprop", x.along(ROWWISE), w.along(ROWWISE), dtype, bias, fast)


def _sharded_fprop(parallel: TensorParallel, dtype: torch.dtype, fast: bool, x: Any, w: Quantized, bias: Any) -> Tensor:
    return parallel.output(WeightGemm("fprop", w, dtype, fast), x, bias)


AsOutput = Callable[[Tensor, Sequence[int]], Tensor]


def _output(as_output: AsOutput, y: Tensor, x_shape: torch.Size, use: Use | None) -> Tensor:
    return as_output(y, (*x_shape[:-1], y.shape[1]))


def _sharded_output(
    as_output: AsOutput, parallel: TensorParallel, y: Tensor, x_shape: torch.Size, use: Use | None
) -> Tensor:
    return as_output(y, parallel.output_shape(x_shape, y.shape[1]))


def _grad_input(as_output: AsOutput, dx: Tensor, x_shape: torch.Size, use: Use | None) -> Tensor:
    return as_output(dx, x_shape)


def _quantized(
    output: Callable[..., Tensor], quantizer: Quantizer, kind: str, y: Tensor, x_shape: torch.Size, use: Use | None
) -> Tensor:
    return as_quantized_tensor(output(y, x_shape, use), quantizer, kind, use)


def as_quantized_tensor(x: Tensor, quantizer: Quantizer, kind: str, use: Use | None) -> Tensor:
    """``x`` as a tensor that the next layer takes as it is."""
    if not quantizer.quantized:
        return x
    operands = quantize(x, quantizer, kind, use, gemm_ready=False)
    scale = delayed_scale(use, kind)
    return QuantizedTensor.from_operands(
        operands, quantizer, x.shape, x.dtype, scale=None if scale is None else scale.clone()
    )


# ---- backward ----


def _quantize_dy(
    casts: RoleCasts, quantizer: Quantizer, dy: Tensor, use: Use | None, amaxes: Amaxes | None = None
) -> Quantized:
    if isinstance(dy, QuantizedTensor):
        existing = reuse(dy, quantizer)
        if existing is not None:
            return existing
        dy = dy.dequantize()
    return casts((dy,), use, None, None if amaxes is None else (amaxes,))[0]


def _unquantized_dy(dy: Tensor, use: Use | None, amaxes: Amaxes | None = None) -> Quantized:
    return Quantized(unquantized(dy), None)


def _gather_dy(plan_options: LinearOptions, quantizer: Quantizer | None, dy: Tensor, use: Use | None) -> Gathered:
    parallel = plan_options.parallel
    if quantizer is None:
        part = Quantized(unquantized(dy), None)
    else:
        part = quantize_part(dy, quantizer, "grad_output", use, parallel)
    return parallel.gather(part, rowwise=plan_options.needs_x, columnwise=plan_options.needs_w)


def _one_orientation(operand: Operand) -> Quantized:
    return Quantized(operand, None) if operand.dim == ROWWISE else Quantized(None, operand)


def _dequantized(operand: Operand) -> Operand:
    return unquantized(operand.dequantize())


def _saved_x(operand: Operand, scale: Tensor | None) -> Operand:
    return operand


def _cast_value(cast: Callable[..., Quantized], quantizer: Quantizer, value: Operand, scale: Tensor | None) -> Operand:
    """X was saved in high precision: cast now, and not recorded again."""
    return cast(value.codes, quantizer, scale).along(COLUMNWISE)


def _gather_x(
    parallel: TensorParallel, along: int, load: Callable[..., Operand], operand: Operand, scale: Tensor | None
) -> Gathered:
    part = _one_orientation(load(operand, scale))
    return parallel.gather(part, rowwise=along == ROWWISE, columnwise=along != ROWWISE, multiplied=False)


def _dgrad(
    multiply: Gemm, load: Callable[[Operand], Operand], dtype: torch.dtype, fast: bool, dy: Quantized, w: Operand
) -> Tensor:
    return multiply("dgrad", dy.along(ROWWISE), load(w), dtype, None, fast)


def _sharded_dgrad(
    options: LinearOptions, load: Callable[[Operand], Operand], fast: bool, dy: Quantized | Gathered, w: Operand
) -> Pending[Tensor]:
    wgrad_follows = options.needs_w and options.wgrad_tasks is None
    product = WeightGemm("dgrad", _one_orientation(load(w)), options.dtype, fast)
    return options.parallel.start_grad_input(product, dy, wgrad_follows)


def _wgrad(
    multiply: Gemm, load: Callable[[Operand], Operand], fast: bool, dy: Operand, x: Operand, dtype: torch.dtype
) -> Tensor:
    return multiply("wgrad", dy, load(x), dtype, None, fast)


def _wgrad_of_gathered(
    along: int, wgrad: Callable[..., Tensor], dy: Operand, x: Gathered, dtype: torch.dtype
) -> Tensor:
    return wgrad(dy, x.along(along), dtype)


def column_sum(dy: Tensor) -> Tensor:
    """The gradient of a bias, [N]: dY summed over its rows."""
    return as_matrix(dy.dequantize() if isinstance(dy, QuantizedTensor) else dy).sum(0)


def _reduced_column_sum(parallel: TensorParallel, dy: Tensor) -> Pending[Tensor | None]:
    return parallel.start_reduce_bias_gradient(column_sum(dy))


# ---- the plan ----


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
    casts = _InputCasts(
        RoleCasts((x_quantizer, w_quantizer), ("input", "weight"), options.device),
        RoleCasts((x_quantizer,), ("input",), options.device),
        RoleCasts((w_quantizer,), ("weight",), options.device),
    )
    along = ROWWISE if override == "dequantized" else COLUMNWISE  # the orientation of X and W that backward reads
    load: Callable[[Operand], Operand] = _dequantized if override == "dequantized" else _itself

    save_x: Callable[..., Operand | None] = partial(_save_x_along, along)
    load_x: Callable[..., Any] = _saved_x
    if override == "high_precision" or (saves_value and override is None):
        save_x = _save_value
    if saves_value and override is None and config.input.format(COLUMNWISE).quantized:
        cast = parallel.quantize_shard if gathers_x else cast_with
        load_x = partial(_cast_value, cast, config.input.with_usage(rowwise=False))
    if gathers_x:
        load_x = partial(_gather_x, parallel, along, load_x)

    dy_quantizer = config.grad_output.with_usage(rowwise=needs_x, columnwise=needs_w) if override is None else None
    quantize_dy: Callable[..., Any] = _unquantized_dy
    if dy_quantizer is not None:
        dy_casts = RoleCasts((dy_quantizer,), ("grad_output",), options.device)
        quantize_dy = partial(_quantize_dy, dy_casts, dy_quantizer)
    if gathers_dy:
        quantize_dy = partial(_gather_dy, options, dy_quantizer)

    sink: Sink = partial(to_autograd, options.dtype)
    if options.main_grad:
        sink = partial(into_main_grad, options.overwrite_main_grad)
    if options.wgrad_tasks is not None:
        sink = partial(left_for_later, options.wgrad_tasks, sink)

    sharded = parallel.mode is not None
    compiling = torch.compiler.is_compiling()
    own_memory = as_output if compiling else as_output_eager
    multiply = gemm.multiply if compiling else gemm.multiply_eager
    wgrad = partial(_wgrad, multiply, load, config.fast_wgrad)
    output: Callable[..., Tensor] = partial(_output, own_memory)
    if sharded:
        output = partial(_sharded_output, own_memory, parallel)
    if options.quantize_output:
        output = partial(_quantized, output, config.output, "output")
    grad_input: Callable[..., Tensor] = partial(_grad_input, own_memory)
    if options.quantize_grad_input:
        grad_input = partial(_quantized, grad_input, config.grad_input, "grad_input")
    return LinearPlan(
        config,
        options,
        x_quantizer,
        w_quantizer,
        dy_quantizer or _UNQUANTIZED,
        saves_value,
        not saves_value and shared_cast.is_shared(x_quantizer),
        gathers_x,
        options.main_grad or options.wgrad_tasks is not None,
        recompute_x,
        quantize_inputs=partial(_quantize_and_gather, casts, x_quantizer, parallel)
        if gathers_x
        else partial(_quantize_inputs, casts),
        fprop=partial(_sharded_fprop, parallel, options.dtype, config.fast_fprop)
        if sharded
        else partial(_fprop, multiply, options.dtype, config.fast_fprop),
        save_x=_nothing if not needs_w or recompute_x else save_x,
        save_w=_nothing
        if not needs_x
        else _save_weight_value
        if override == "high_precision"
        else partial(_save_along, along),
        output=output,
        quantize_dy=quantize_dy,
        load_x=load_x,
        dgrad=partial(_sharded_dgrad, options, load, config.fast_dgrad)
        if sharded
        else partial(_dgrad, multiply, load, options.dtype, config.fast_dgrad),
        reduce_dx=Pending.wait if sharded else _itself,
        wgrad=partial(_wgrad_of_gathered, along, wgrad) if gathers_x else wgrad,
        accumulate_dw=sink,
        grad_input=grad_input,
        bias_gradient=_nothing
        if not options.needs_b
        else partial(_reduced_column_sum, parallel)
        if sharded
        else column_sum,
        reduce_db=Pending.wait if sharded and options.needs_b else _itself,
    )
