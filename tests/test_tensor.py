"""QuantizedTensor against the tensor of its values: every operation gives the same bits, stays quantized, or raises."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minifloat.formats import IDENTITY, Format, parse
from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer, cast_all
from minifloat.tensor import QuantizedTensor, base, quantize, quantize_all_
from tests.helpers.distributed_pool import Pools
from tests.helpers.sample import each_once, each_twice

NVFP4 = Format("e2m1", 16, scale_rule="two_level")
QUANTIZERS = {
    "current": Quantizer(Format()),
    "current_pow2": Quantizer(Format(scale_rule="pow2", amax_epsilon=1e-4)),
    "current_e5m2": Quantizer(Format("e5m2")),
    "delayed": Quantizer(Format(scale_rule="given")),
    "block_strips": Quantizer(Format(block=128)),
    "block_strips_pow2": Quantizer(Format(block=128, scale_rule="pow2")),
    "block_tiles": Quantizer(Format(block=128, tile=True)),
    "block_tiles_pow2": Quantizer(Format(block=128, tile=True, scale_rule="pow2")),
    "mxfp8": Quantizer(Format(block=32, scale_rule="e8m0")),
    "mxfp8_tiles": Quantizer(Format("e5m2", block=32, tile=True, scale_rule="e8m0")),
    "nvfp4": Quantizer(NVFP4),
    "nvfp4_tiles": Quantizer(Format("e2m1", 16, tile=True, scale_rule="two_level")),
    "nvfp4_rows": Quantizer(Format("e2m1", 16, scale_rule="two_level", amax_per_row=True)),
    "nvfp4_hadamard": Quantizer(NVFP4, Format("e2m1", 16, scale_rule="two_level", transform="hadamard16")),
    "nvfp4_stochastic": Quantizer(Format("e2m1", 16, scale_rule="two_level", rounding="stochastic")),
    "hybrid": Quantizer(Format(), Format(block=32, scale_rule="e8m0")),
    "chained": Quantizer(Format(block=32, scale_rule="e8m0"), columnwise_source="rowwise_dequantized"),
    "half_identity": Quantizer(IDENTITY, Format(block=128)),
    "identity": Quantizer.identity(),
}
USAGES = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}
WHOLE, BROKEN, UNEVEN = (256, 64), (37, 53), (130, 70)
CASES = [("both", WHOLE), ("columnwise", BROKEN), ("rowwise", UNEVEN), ("both", (1, 1)), ("columnwise", (0, 5))]
MORE = [(u, s) for u in USAGES for s in (WHOLE, BROKEN, UNEVEN, (1, 1), (0, 5), (4, 0)) if (u, s) not in CASES]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

everywhere = pytest.mark.parametrize("name", QUANTIZERS)
VARIANTS = ("current_pow2", "current_e5m2", "block_strips", "block_tiles_pow2", "mxfp8_tiles", "nvfp4_stochastic")
in_each_kind = pytest.mark.parametrize("name", [name for name in QUANTIZERS if name not in VARIANTS])
in_usages = pytest.mark.parametrize("usage", USAGES)


def quantizer_of(name: str, usage: str = "both") -> Quantizer:
    rowwise, columnwise = USAGES[usage]
    return QUANTIZERS[name].with_usage(rowwise=rowwise, columnwise=columnwise)


def scale_of(name: str) -> Tensor | None:
    return torch.tensor([3.0]) if name == "delayed" else None


def make(
    name: str, usage: str = "both", shape: tuple[int, ...] = (130, 70), dtype: Any = torch.bfloat16
) -> QuantizedTensor:
    x = torch.randn(shape).to(dtype) * 4
    return quantize(x, quantizer_of(name, usage), scale=scale_of(name))


def bits(t: Tensor) -> Tensor:
    t = t.dequantize() if isinstance(t, QuantizedTensor) else t.detach()
    return t.contiguous() if t.dtype == torch.bool else t.contiguous().view(-1).view(BITS[t.element_size()])


def same(a: Any, b: Any) -> bool:
    """The same bits, shapes and dtypes, in the same structure."""
    a, b = tree_leaves(a), tree_leaves(b)
    for x, y in zip(a, b, strict=True):
        if isinstance(x, Tensor):
            if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device) or not torch.equal(bits(x), bits(y)):
                return False
        elif x != y:
            return False
    return True


def buffers(t: QuantizedTensor) -> dict[str, Tensor]:
    return t._buffers()


def same_buffers(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return buffers(a).keys() == buffers(b).keys() and same(list(buffers(a).values()), list(buffers(b).values()))


def outcome(function: Callable[[], Any]) -> Any:
    """What it returns, or the type of what it raises: an empty tensor has no max in either form."""
    try:
        return function()
    except (RuntimeError, IndexError, ValueError) as error:
        return type(error)


# ---- operations that read ----

Op = Callable[[Any, Tensor], Any]

READS: dict[str, Op] = {
    "neg": lambda t, y: -t,
    "abs": lambda t, y: t.abs(),
    "relu": lambda t, y: F.relu(t),
    "softmax": lambda t, y: t.softmax(-1),
    "layer_norm": lambda t, y: F.layer_norm(t, t.shape[-1:]),
    "add": lambda t, y: t + y,
    "radd": lambda t, y: y + t,
    "mul": lambda t, y: t * y,
    "div": lambda t, y: t / y,
    "lerp": lambda t, y: torch.lerp(t, y, 0.3),
    "matmul": lambda t, y: t @ y.mT,
    "matmul_transposed": lambda t, y: y @ t.t(),
    "linear": lambda t, y: F.linear(y, t),
    "linear_input": lambda t, y: F.linear(t, y),
    "einsum": lambda t, y: torch.einsum("mk,nk->mn", t, y),
    "embedding": lambda t, y: F.embedding(torch.tensor([0, 0]), t),
    "cat": lambda t, y: torch.cat([t, y, t]),
    "cat_columns": lambda t, y: torch.cat([y, t], dim=1),
    "where": lambda t, y: torch.where(y > 0, t, y),
    "split": lambda t, y: t.split(128),
    "split_columns": lambda t, y: t.split(3, dim=1),
    "split_sizes": lambda t, y: t.split([1, t.shape[0] - 1]),
    "chunk": lambda t, y: t.chunk(2),
    "narrow": lambda t, y: t.narrow(0, 0, t.shape[0] // 2),
    "narrow_columns": lambda t, y: t.narrow(1, 0, t.shape[1] // 2),
    "slice_rows": lambda t, y: t[128:],
    "slice_negative": lambda t, y: t[-3:],
    "slice_step": lambda t, y: t[::2],
    "slice_empty": lambda t, y: t[0:0],
    "slice_columns": lambda t, y: t[:, 1:],
    "slice_transposed": lambda t, y: t.t()[:, : t.shape[0] // 2],
    "slice_flat": lambda t, y: t.view(-1)[: 32 * t.shape[1]],
    "select": lambda t, y: t[0],
    "select_last": lambda t, y: t[-1],
    "index": lambda t, y: t[torch.tensor([0, 0])],
    "index_select": lambda t, y: t.index_select(0, torch.tensor([0])),
    "iterate": lambda t, y: list(t[-8:]),
    "sum": lambda t, y: t.sum(),
    "argmax": lambda t, y: t.argmax(0),
    "norm": lambda t, y: t.norm(),
    "item": lambda t, y: t.sum().item(),
    "view_flat": lambda t, y: t.view(-1),
    "view_there_and_back": lambda t, y: t.view(-1).view(t.shape),
    "view_leading": lambda t, y: t.view(1, *t.shape),
    "view_other": lambda t, y: t.view(t.shape[1], t.shape[0]),
    "view_integers": lambda t, y: t.view(BITS[t.element_size()]),
    "reshape": lambda t, y: t.reshape(t.shape[1], -1),
    "reshape_transposed": lambda t, y: t.t().reshape(-1),
    "flatten": lambda t, y: t.flatten(),
    "unflatten": lambda t, y: t.unflatten(0, (-1, t.shape[0])),
    "unsqueeze": lambda t, y: t.unsqueeze(1),
    "squeeze": lambda t, y: t.unsqueeze(0).squeeze(0),
    "squeeze_all": lambda t, y: t.squeeze(),
    "t": lambda t, y: t.t(),
    "mT": lambda t, y: t.mT,
    "transpose": lambda t, y: t.transpose(0, 1),
    "permute": lambda t, y: t.permute(1, 0),
    "transpose_contiguous": lambda t, y: t.t().contiguous(),
    "transpose_clone": lambda t, y: t.t().clone(),
    "expand": lambda t, y: t.expand(3, *t.shape),
    "as_strided": lambda t, y: t.as_strided(t.shape, t.stride()),
    "as_strided_overlap": lambda t, y: t.as_strided(t.shape, (0, 1)),
    "contiguous": lambda t, y: t.contiguous(),
    "clone": lambda t, y: t.clone(),
    "detach": lambda t, y: t.detach(),
    "float": lambda t, y: t.float(),
    "double": lambda t, y: t.double(),
    "to_same": lambda t, y: t.to(t.dtype, copy=True),
    "zeros_like": lambda t, y: torch.zeros_like(t),
    "ones_like": lambda t, y: torch.ones_like(t, dtype=torch.float32),
    "empty_like": lambda t, y: type(torch.empty_like(t)) is Tensor,
    "new_zeros": lambda t, y: t.new_zeros(3, 17),
    "new_zeros_flat": lambda t, y: t.new_zeros(5),
    "new_zeros_scalar": lambda t, y: t.new_zeros(()),
    "new_ones": lambda t, y: t.new_ones(2, 2),
    "eq": lambda t, y: t == y,
    "equal": lambda t, y: torch.equal(t, t.clone()),
    "allclose": lambda t, y: torch.allclose(t, t.clone(), equal_nan=True),
    "isnan": lambda t, y: t.isnan(),
    "out_plain": lambda t, y: torch.add(t, 1, out=torch.zeros_like(y)),
    "copy_to_plain": lambda t, y: y.clone().copy_(t),
    "add_to_plain": lambda t, y: y.clone().add_(t),
    "foreach_norm": lambda t, y: torch._foreach_norm([t, y]),
    "foreach_add": lambda t, y: torch._foreach_add([t, y], [y, t]),
    "save_dict": lambda t, y: {"a": (t.clone(), [t.detach()])},
}


@each_twice
@everywhere
@pytest.mark.parametrize(("usage", "shape"), CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE])
def test_operations_give_what_they_give_on_the_values(name: str, usage: str, shape: tuple[int, int]) -> None:
    dtype = torch.float32 if shape == (130, 70) else torch.bfloat16
    t, y = make(name, usage, shape, dtype), torch.randn(shape).to(dtype)
    values = t.dequantize()
    different = []
    for op, function in READS.items():
        got, wanted = outcome(lambda f=function: f(t, y)), outcome(lambda f=function: f(values, y))
        if not same(got, wanted):
            different.append(op)
    assert not different
    assert same(t, values)  # none of them changed it


# ---- operations that stay quantized ----

STAY = [
    *("clone", "detach", "t", "mT", "transpose", "permute", "contiguous", "view_flat", "view_there_and_back"),
    *("to_same", "view_leading", "unsqueeze", "squeeze", "as_strided", "new_zeros", "new_zeros_flat"),
]
ROWS: dict[str, Op] = {
    "split": lambda t, y: t.split(128),
    "chunk": lambda t, y: t.chunk(2),
    "narrow": lambda t, y: t.narrow(0, 128, 128),
    "slice": lambda t, y: t[128:],
    "select": lambda t, y: t.view(2, 128, t.shape[1])[1],
    "unbind": lambda t, y: list(t.view(2, 128, t.shape[1])),
    "slice_transposed": lambda t, y: t.t()[:, :128],
}


@each_once
@in_each_kind
@in_usages
@pytest.mark.parametrize("shape", [(256, 128), (256, 37)])
def test_what_stays_quantized(name: str, usage: str, shape: tuple[int, int]) -> None:
    t, y = make(name, usage, shape), torch.randn(shape).bfloat16()
    for op, function in ({op: READS[op] for op in STAY} | ROWS).items():
        assert all(type(r) is QuantizedTensor for r in tree_leaves(function(t, y))), op


@each_once
@everywhere
@in_usages
def test_rows_have_the_bytes_of_the_whole(name: str, usage: str) -> None:
    """Part for part: codes and block scales of a range of rows are those of the whole tensor."""
    t = make(name, usage, (256, 48))
    pieces = t.split(128)
    for field, whole in buffers(t).items():
        parts = [getattr(piece, field) for piece in pieces]
        assert same(whole, parts[0] if same(parts[0], whole) else torch.cat(parts)), field
    assert all(piece.operands.any.shape == (128, 48) for piece in pieces)


def test_rows_that_break_blocks_give_values() -> None:
    t = make("block_tiles", shape=(256, 256))
    assert not any(isinstance(part, QuantizedTensor) for part in (t[:100], t[:, :128]))
    assert not any(isinstance(piece, QuantizedTensor) for piece in t.split([128, 100, 28]))  # one kind for all pieces
    assert type(make("mxfp8", "rowwise", (37, 53))[:5]) is QuantizedTensor  # strips lie within rows
    assert type(make("mxfp8", "both", (37, 53))[32:]) is QuantizedTensor  # the last block may be a short one


BROKEN_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda t: t[3:10],
    "one_row": lambda t: t[3],
    "columns": lambda t: t[:, :32],
    "diagonal": Tensor.diagonal,
    "strided": lambda t: t.as_strided((4, 4), (65, 2), 3),
    "piece": lambda t: t.chunk(3)[1],
    "of_a_view": lambda t: t.detach().t()[:8].t().data[5:],
    "expanded": lambda t: t[:, 5].expand(2, 256),
}


@each_twice
@pytest.mark.parametrize("name", ["hybrid", "block_tiles", "mxfp8", "nvfp4_tiles"])
@pytest.mark.parametrize("view", BROKEN_VIEWS)
def test_writing_to_a_view_that_breaks_blocks_raises(name: str, view: str) -> None:
    t = make(name, shape=(256, 64))
    values, part = t.dequantize(), BROKEN_VIEWS[view](t)
    shown = BROKEN_VIEWS[view](values)
    assert same(part, shown) and part.tolist() == shown.tolist() and str(part)[:12]
    assert same(copy.deepcopy(part), shown) and same(pickle.loads(pickle.dumps(part)), shown)
    assert type(part + 0) is Tensor and same(part.float(), shown.float())
    writes: list[Callable[[], Any]] = [
        lambda: part.zero_(),
        lambda: torch.nn.init.normal_(part),
        lambda: torch._foreach_add_([part], 1),
        lambda: torch.add(shown, 1, out=part),
        lambda: part.__setitem__(0, 1),
    ]
    for write in writes:
        with pytest.raises(NotImplementedError, match=r"would be lost.*\[index\] = values"):
            write()
    assert same(t, values)


def test_a_view_that_breaks_blocks_has_a_gradient() -> None:
    t = nn.Parameter(make("mxfp8", shape=(64, 64)))
    t[3:10].sum().backward()
    assert t.grad is not None and type(t.grad) is Tensor and t.grad.sum() == 7 * 64


@in_each_kind
def test_views_share_memory(name: str) -> None:
    t = make(name, shape=(256, 64))
    views = [
        t.detach(),
        t.data,
        t.t(),
        t.view(-1),
        t.view(2, 128, 64),
        nn.Parameter(t),
        t[:],
        t.as_strided((256, 64), (64, 1)),
    ]
    for view in views:
        assert {f: b.data_ptr() for f, b in buffers(view).items()} == {f: b.data_ptr() for f, b in buffers(t).items()}
    assert t[:128].operands.any.codes.data_ptr() == t.operands.any.codes.data_ptr()
    copied = t.clone()
    assert all(getattr(copied, f).data_ptr() != b.data_ptr() for f, b in buffers(t).items() if b.numel())


@in_each_kind
def test_writing_to_a_view_changes_the_tensor(name: str) -> None:
    t, y = make(name, shape=(256, 64)), torch.randn(64, 256).bfloat16()
    torch.manual_seed(2)
    t.t().copy_(y)
    torch.manual_seed(2)
    assert same_buffers(t, quantize(y.t().contiguous(), QUANTIZERS[name], scale=scale_of(name)))
    t.view(-1).zero_()
    assert not t.dequantize().any()


def test_operands_of_a_view_of_another_shape() -> None:
    t = make("current", shape=(8, 4, 16))
    assert t.operands.any.shape == (32, 16) and t.view(32, 16).operands is not None
    for view in (t.view(32, 16).t(), t.view(-1)):
        with pytest.raises(ValueError, match="quantize its values anew"):
            _ = view.operands


# ---- operations that write ----

WRITES: dict[str, Op] = {
    "zero_": lambda t, y: t.zero_(),
    "fill_": lambda t, y: t.fill_(0.3),
    "add_": lambda t, y: t.add_(y, alpha=-0.5),
    "iadd": lambda t, y: t.__iadd__(y),
    "add_scalar": lambda t, y: t.add_(1),
    "add_itself": lambda t, y: t.add_(t),
    "sub_": lambda t, y: t.sub_(y),
    "mul_": lambda t, y: t.mul_(0.9),
    "mul_tensor": lambda t, y: t.mul_(y),
    "div_": lambda t, y: t.div_(y.abs() + 1),
    "addcmul_": lambda t, y: t.addcmul_(y, y, value=2),
    "addcdiv_": lambda t, y: t.addcdiv_(y, y.abs() + 1, value=-0.1),
    "clamp_": lambda t, y: t.clamp_(-1, 1),
    "normal_": lambda t, y: t.normal_(0, 2),
    "uniform_": lambda t, y: t.uniform_(-1, 1),
    "constant": lambda t, y: nn.init.constant_(t, 2.0),
    "copy_": lambda t, y: t.copy_(y),
    "copy_broadcast": lambda t, y: t.copy_(y[:1] if len(y) else y),
    "copy_scalar": lambda t, y: t.copy_(torch.tensor(3.0)),
    "setitem": lambda t, y: t.__setitem__(slice(1, None), 1.0) or t,
    "setitem_mask": lambda t, y: t.__setitem__(y > 0, 1.0) or t,
}
FOREACH_WRITES: dict[str, Callable[[list[Any], list[Tensor]], Any]] = {
    "zero_": lambda ts, ys: torch._foreach_zero_(ts),
    "add_": lambda ts, ys: torch._foreach_add_(ts, ys, alpha=-0.1),
    "add_scalar": lambda ts, ys: torch._foreach_add_(ts, 1.0),
    "sub_": lambda ts, ys: torch._foreach_sub_(ts, ys),
    "mul_": lambda ts, ys: torch._foreach_mul_(ts, 0.9),
    "div_": lambda ts, ys: torch._foreach_div_(ts, 3.0),
    "addcmul_": lambda ts, ys: torch._foreach_addcmul_(ts, ys, ys, value=2),
    "addcdiv_": lambda ts, ys: torch._foreach_addcdiv_(ts, ys, [y.abs() + 1 for y in ys], value=-0.1),
    "clamp_": lambda ts, ys: torch._foreach_clamp_max_(ts, 0.5),
    "copy_": lambda ts, ys: torch._foreach_copy_(ts, ys),
}


@each_once
@everywhere
@pytest.mark.parametrize(
    ("usage", "shape"), [("rowwise", (128, 64)), ("columnwise", UNEVEN), ("both", BROKEN), ("columnwise", (0, 5))]
)
def test_writing_is_quantizing_what_the_operation_gives(name: str, usage: str, shape: tuple[int, int]) -> None:
    y = torch.randn(shape).bfloat16()
    for op, function in WRITES.items():
        t = make(name, usage, shape)
        values, before, version = t.dequantize(), {f: b.data_ptr() for f, b in buffers(t).items()}, t._version
        torch.manual_seed(3)
        assert function(t, y) is t, op
        torch.manual_seed(3)
        wanted = quantize(function(values, y), t.quantizer, scale=t.scale)
        assert same_buffers(t, wanted), op
        assert {f: b.data_ptr() for f, b in buffers(t).items()} == before, op
        assert t._version > version, op


@each_once
@pytest.mark.parametrize("name", ["current", "delayed", "block_tiles_pow2", "mxfp8", "nvfp4_hadamard", "identity"])
@pytest.mark.parametrize("op", FOREACH_WRITES)
def test_foreach_writing(name: str, op: str) -> None:
    ts, ys = [make(name) for _ in range(2)], [torch.randn(130, 70).bfloat16() for _ in range(3)]
    plain = ys[2].clone()
    wanted = [*(t.dequantize() for t in ts), plain.clone()]
    mixed = [*ts, plain]
    FOREACH_WRITES[op](mixed, ys)
    FOREACH_WRITES[op](wanted, ys)
    for t, values in zip(ts, wanted, strict=False):
        assert same_buffers(t, quantize(values, t.quantizer, scale=t.scale))
    assert same(plain, wanted[2])


def test_a_tensor_listed_twice_is_written_twice() -> None:
    t = quantize(torch.ones(4, 4), QUANTIZERS["current"])
    torch._foreach_add_([t, t], 1.0)
    assert t.dequantize().eq(3).all()


UNHANDLED: dict[str, Op] = {
    "relu_": lambda t, y: t.relu_(),
    "sqrt_": lambda t, y: t.sqrt_(),
    "clip_": lambda t, y: t.relu_(),
    "random_": lambda t, y: t.random_(),
    "erfinv_": lambda t, y: t.erfinv_(),
    "masked_fill_": lambda t, y: t.masked_fill_(y > 0, 0.0),
    "index_add_": lambda t, y: t.index_add_(0, torch.tensor([0]), y[:1]),
    "scatter_": lambda t, y: t.scatter_(0, torch.zeros(1, 1, dtype=torch.int64), 1.0),
    "resize_": lambda t, y: t.resize_(2, 2),
    "t_": lambda t, y: t.t_(),
    "baddbmm": lambda t, y: t.addmm_(y, y.mT),
    "out": lambda t, y: torch.add(y, 1, out=t),
    "out_mm": lambda t, y: torch.mm(y, y.mT, out=t),
    "out_list": lambda t, y: torch.max(y, 0, out=(t[0], torch.zeros(70, dtype=torch.int64))),
    "out_clone": lambda t, y: torch.ops.aten.clone.out(y, out=t),
    "foreach_sqrt_": lambda t, y: torch._foreach_sqrt_([t]),
    "foreach_sqrt_mixed": lambda t, y: torch._foreach_sqrt_([y.clone(), t]),
}


@each_once
@pytest.mark.parametrize("name", ["current", "nvfp4"])
@pytest.mark.parametrize("op", UNHANDLED)
def test_other_writing_raises(name: str, op: str) -> None:
    t, y = make(name, "rowwise"), torch.randn(130, 70).bfloat16()
    values = t.dequantize()
    with pytest.raises(NotImplementedError, match=r"aten\..*t\.copy_\(values\)"):
        UNHANDLED[op](t, y)
    assert same(t, values)


def test_leaf_that_requires_grad_is_protected() -> None:
    p = nn.Parameter(make("current"))
    with pytest.raises(RuntimeError, match="leaf"):
        p.add_(1)
    with pytest.raises(RuntimeError, match="leaf"):
        p[0] = 1


# ---- copies and quantize_ ----


@each_once
@everywhere
@in_usages
def test_copy_of_the_same_format_copies_bytes(name: str, usage: str) -> None:
    t, source = make(name, usage), make(name, "both")
    addresses = {f: b.data_ptr() for f, b in buffers(t).items()}
    assert t.copy_(source) is t
    for field, buffer in buffers(t).items():
        place = field if field in buffers(source) else field.replace("columnwise", "rowwise")
        assert same(buffer, getattr(source, place)) and buffer.data_ptr() == addresses[field], field


def test_copy_between_formats() -> None:
    t, source = make("mxfp8"), make("nvfp4")
    t.copy_(source)
    assert same_buffers(t, quantize(source.dequantize(), t.quantizer))
    plain = torch.zeros(130, 70)
    assert plain.copy_(source) is plain and same(plain, source.dequantize().float())


@in_each_kind
def test_quantize_in_place_casts_from_the_dtype_of_the_source(name: str) -> None:
    t, master = make(name), torch.randn(130, 70)
    t.quantize_(master)
    torch.manual_seed(4)
    t.quantize_(master)
    torch.manual_seed(4)
    wanted = quantize(master, t.quantizer, scale=t.scale)
    if QUANTIZERS[name].row_format.quantized:
        assert same_buffers(t, wanted)
    assert t.dtype == torch.bfloat16 and t.dequantize().dtype == torch.bfloat16
    assert t.source_version == master._version == 0 and t._version == 2


def test_quantize_in_place_with_agreed_amaxes() -> None:
    t, x = make("current"), torch.randn(130, 70).bfloat16()
    amaxes = (torch.tensor([100.0]),)
    t.quantize_(x, amaxes=amaxes)
    assert same_buffers(t, quantize(x, t.quantizer, amaxes=amaxes))
    with pytest.raises(ValueError, match=r"\(130, 70\) cannot take values of shape \(70,\)"):
        t.quantize_(x[0])


def test_data_that_is_rounded_warns() -> None:
    """Assigned values, and sums that were written through ``data``; codes that are copied are not rounded."""
    p = nn.Parameter(make("mxfp8"))
    message = r"^a QuantizedTensor of shape \(130, 70\) in e4m3/1x32/e8m0 rounds what is assigned to its data: "
    with pytest.warns(UserWarning, match=message) as warned:
        p.data = torch.ones(130, 70).bfloat16()
    assert warned[0].filename == __file__
    for p.owner, way in product(("", "Linear 'up'"), ("plain", "copy", "other format")):
        with pytest.warns(UserWarning, match="Linear 'up': its weight of shape" if p.owner else message):
            if way == "plain":
                p.data += 0.01
            elif way == "copy":
                values = p.data.clone()
                values += 0.01
                p.data = values
            else:
                p.data = quantize(torch.ones(130, 70).bfloat16(), QUANTIZERS["current"])
    assert p.detach().clone().owner == "Linear 'up'" and copy.deepcopy(p).owner == p.owner
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p.data = p.data
        p.data = p.data.contiguous()
        p.data = quantize(torch.ones(130, 70).bfloat16(), p.quantizer)
        p.data.mul_(2)
        nn.Parameter(make("identity")).data = torch.ones(130, 70).bfloat16()


def test_frozen_data_is_not_rounded() -> None:
    """Nothing changes before the error; in-place operations that are asked for by name write as before."""
    t = nn.Parameter(make("mxfp8"), requires_grad=False)
    t.owner, before = "Linear 'up'", t.dequantize()  # type: ignore[attr-defined]
    message = r"^Linear 'up': its weight of shape \(130, 70\) .* is frozen.*revert\(model\).*bfloat16.*quantize_weights"
    with pytest.raises(ValueError, match=message):
        t.data = before + 1
    with pytest.raises(ValueError, match=message):
        t.data += 1
    with pytest.raises(ValueError, match=message):
        t.data -= 1
    values = t.data.clone()
    values += 1
    with pytest.raises(ValueError, match=message):
        t.data = values
    assert torch.equal(t.dequantize(), before)
    t.data = t.data
    t.data.mul_(2)
    assert torch.equal(t.dequantize(), 2 * before)
    t -= 1
    assert torch.equal(t.data.dequantize(), quantize(2 * before - 1, t.quantizer).dequantize())  # type: ignore[attr-defined]
    plain = nn.Parameter(make("identity"), requires_grad=False)
    plain.data += 1


def test_delayed_scale_is_the_one_of_now() -> None:
    scale = torch.tensor([2.0])
    t, x = quantize(torch.ones(4, 4), QUANTIZERS["delayed"], scale=scale), torch.full((4, 4), 3.0)
    scale.fill_(8.0)
    t.copy_(x)
    assert t.operands.any.scale_inv.item() == 0.125 and t.operands.any.amax.item() == 3.0 and same(t, x)
    with pytest.raises(ValueError, match="scale=scale"):
        quantize(x, QUANTIZERS["delayed"])


def test_source_version() -> None:
    x = torch.randn(4, 4)
    x.add_(1)
    t = quantize(x, QUANTIZERS["current"])
    assert t.source_version == 1 == t.detach().source_version == t.clone().source_version
    assert t.copy_(x.mul_(2)).source_version == 2
    assert t.add_(1).source_version is None


def test_quantize_does_not_share_memory() -> None:
    x = torch.randn(4, 4)
    t = quantize(x, Quantizer.identity())
    t.zero_()
    t.dequantize().fill_(7)
    assert x.all() and not t.dequantize().any()


@pytest.mark.parametrize(
    ("quantizer", "x", "error", "match"),
    [
        (QUANTIZERS["current"], torch.ones(2, 2, dtype=torch.int32), TypeError, "floating"),
        (QUANTIZERS["current"], torch.ones(2, 2, dtype=torch.float64), ValueError, "float64"),
        (QUANTIZERS["current"], torch.tensor(1.0), ValueError, "no dims"),
        (Quantizer(Format(), rowwise=False, columnwise=False), torch.ones(2), ValueError, "no orientation"),
    ],
)
def test_mistakes(quantizer: Quantizer, x: Tensor, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        quantize(x, quantizer)


def test_from_operands_checks_the_shape() -> None:
    quantizer, x = QUANTIZERS["mxfp8"], torch.randn(6, 32)
    t = QuantizedTensor.from_operands(quantizer(x), quantizer, (2, 3, 32), torch.float32)
    assert t.shape == (2, 3, 32) and same(t.view(6, 32), quantize(x, quantizer))
    half = QuantizedTensor.from_operands(quantizer(x), quantizer, (6, 32), torch.float16)
    assert half.dtype == half.t().dtype == half.dequantize().dtype == torch.float16
    with pytest.raises(ValueError, match=r"flattens to \(3, 64\), but operands are \(6, 32\)"):
        QuantizedTensor.from_operands(quantizer(x), quantizer, (3, 64), torch.float32)
    with pytest.raises(ValueError, match="neither"):
        QuantizedTensor.from_operands(Quantized(None, None), quantizer, (6, 32), torch.float32)


# ---- rows that share a scale with others ----


def test_rows_of_zeros_take_a_shard() -> None:
    """FSDP2's uneven shard: padded zeros, of which the shard is the first rows."""
    full = make("current", shape=(7, 8))
    shard = full[4:]
    padded = shard.new_zeros(4, 8)
    padded.narrow(0, 0, 3).copy_(shard)
    flat, local = padded.view(-1), nn.Parameter(padded.narrow(0, 0, 3))
    assert type(flat) is QuantizedTensor and same(local, shard) and not padded[3:].dequantize().any()
    with torch.no_grad():
        local.mul_(3.0)
    assert same_buffers(local, quantize(shard.dequantize() * 3.0, full.quantizer))
    assert same(padded[:3], local) and not padded[3:].dequantize().any()


@pytest.mark.parametrize("name", ["current", "nvfp4_tiles"])
def test_rows_do_not_change_the_scale_of_the_rest(name: str) -> None:
    whole = make(name, shape=(64, 64))
    before = whole.dequantize()
    for write in (lambda part: part.zero_(), lambda part: part.copy_(make(name, shape=(32, 64)).mul_(9))):
        with pytest.raises(NotImplementedError, match=r"32 rows .* share its scale.*whole\[rows\] = values"):
            write(whole.detach()[:32])
    assert same(whole, before)
    whole[:32] = 0.0
    before[:32] = 0.0
    assert same_buffers(whole, quantize(before, whole.quantizer))


def test_rows_with_block_scales_are_written_alone() -> None:
    whole = make("mxfp8", shape=(64, 64))
    rest = whole.dequantize()[32:]
    whole[:32].zero_()
    assert not whole.dequantize()[:32].any() and same(whole.dequantize()[32:], rest)


def test_rows_may_be_written_with_the_same_scale() -> None:
    whole = make("current", shape=(64, 64))
    other = whole.clone()
    whole.zero_()
    for part, source in zip(whole.split(32), other.split(32), strict=True):
        part.copy_(source)
    assert same_buffers(whole, other)


# ---- usage ----


@in_each_kind
def test_update_usage_drops(name: str) -> None:
    t = make(name)
    row, column = t.operands
    t.update_usage(columnwise=False)
    assert t.operands == (row, None) and not t.quantizer.columnwise
    t.add_(1)
    assert t.operands.columnwise is None
    with pytest.raises(ValueError, match="at least one"):
        t.update_usage(rowwise=False)
    other = make(name)
    other.update_usage(rowwise=False)
    assert other.operands.rowwise is None and (name in ("current", "identity")) <= (column is row)


@in_each_kind
def test_update_usage_of_what_was_dropped(name: str) -> None:
    t, quantizer = make(name, "rowwise"), QUANTIZERS[name]
    if quantizer.row_format.symmetric and quantizer.column_format is None:
        t.update_usage(columnwise=True)
        assert t.operands.columnwise is t.operands.rowwise
        ones = torch.ones(130, 70).bfloat16()
        assert same_buffers(t.copy_(ones), quantize(ones, quantizer, scale=t.scale))
    else:
        with pytest.raises(ValueError, match=r"columnwise operand .*\.with_usage\(columnwise=True\)"):
            t.update_usage(columnwise=True)


# ---- copies of the object: pickle, deepcopy, flatten, devices ----


def reloaded(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


ROUND_TRIPS: dict[str, Callable[[Any], Any]] = {
    "save": reloaded,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "deepcopy": copy.deepcopy,
    "flatten": lambda t: QuantizedTensor.__tensor_unflatten__(
        buffers(t), t.__tensor_flatten__()[1], t.shape, t.stride()
    ),
    "clone": lambda t: t.clone(),
}


@each_once
@everywhere
@in_usages
@pytest.mark.parametrize("trip", ROUND_TRIPS)
def test_round_trips(name: str, usage: str, trip: str) -> None:
    for t in (make(name, usage, (37, 53)), make(name, usage, (2, 3, 16)), make(name, usage, (32, 16)).t()):
        back = ROUND_TRIPS[trip](t)
        assert type(back) is QuantizedTensor and same_buffers(t, back) and same(t, back)
        assert (back.quantizer, back.shape, back.stride()) == (t.quantizer, t.shape, t.stride())
        assert (back._operands.rowwise is back._operands.columnwise) == (t._operands.rowwise is t._operands.columnwise)
        assert [o and o.layout for o in back._operands] == [o and o.layout for o in t._operands]


@in_each_kind
def test_damaged_files_are_refused(name: str) -> None:
    """Fewer codes or scales than a matrix has would be repeated by a write, and read beyond their end by kernels."""
    t = make(name, "both", (64, 96))
    rebuild, (inner, *others) = t.__reduce_ex__(4)
    for key, buffer in inner.items():
        if key == "scale" or key.endswith("amax"):
            continue
        for damaged in (buffer[:0], buffer.double(), buffer[:1].expand(2 * len(buffer), *buffer.shape[1:])):
            with pytest.raises(ValueError, match=f"{key.replace('_', ' ', 1)} .* the file is damaged"):
                rebuild(inner | {key: damaged}, *others)
    context, _, stride, *rest = others
    with pytest.raises(ValueError, match="no view of its matrix; the file is damaged"):
        rebuild(inner, context, (640, 96), stride, *rest)


@pytest.mark.parametrize("trip", ["save", "pickle", "deepcopy"])
def test_parameters_stay_parameters(trip: str) -> None:
    p = nn.Parameter(make("delayed"))
    p.tag = "kept"
    back = ROUND_TRIPS[trip](p)
    assert isinstance(back, nn.Parameter) and back.requires_grad and back.tag == "kept" and same_buffers(p, back)
    assert back.scale is not p.scale


def test_deepcopy_keeps_group_grad_and_sharing() -> None:
    t = nn.Parameter(make("current"))
    t._group, t.grad = "ranks", torch.ones(130, 70).bfloat16()
    a, b = copy.deepcopy([t, t])
    assert a is b and a._group == "ranks" and same(a.grad, t.grad) and a.grad is not t.grad
    assert a.operands.any.codes.data_ptr() != t.operands.any.codes.data_ptr()
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(t.clone())


@in_each_kind
def test_module_to(name: str) -> None:
    module = nn.Linear(70, 130)
    module.weight = nn.Parameter(make(name))
    module.weight._group = "ranks"
    codes = module.weight.operands.any.codes
    module.float()
    assert isinstance(module.weight, nn.Parameter) and type(module.weight) is QuantizedTensor
    assert module.weight.dtype == module.weight.dequantize().dtype == torch.float32
    assert same(module.weight.operands.any.codes, codes.to(module.weight.operands.any.codes.dtype))
    module.to("meta")
    assert module.weight.is_meta and all(b.is_meta for b in buffers(module.weight).values())
    assert repr(module.weight).endswith("device=meta, requires_grad=True)")
    module.to_empty(device="cpu")
    assert type(module.weight) is QuantizedTensor and module.weight.device.type == "cpu"
    assert module.weight._group == "ranks"


def test_factories_have_the_requested_shape() -> None:
    t = make("nvfp4_hadamard")
    for make_one, shape in (
        (t.new_zeros, (3, 5)),
        (t.new_empty, (300, 2, 4)),
        (t.new_zeros, (7,)),
        (t.new_zeros, (0, 70)),
    ):
        new = make_one(shape)
        assert type(new) is QuantizedTensor and new.shape == shape and not new.dequantize().any()
    assert type(t.new_zeros(3, 5, dtype=torch.float64)) is Tensor and type(torch.zeros_like(t)) is Tensor
    empty = buffers(torch.empty_like(t, device="cpu"))
    assert {f: b.shape for f, b in empty.items()} == {f: b.shape for f, b in buffers(t).items()}
    assert torch.empty_like(t, device="meta").is_meta and t.new_empty(3, 4, device="meta").is_meta


def test_other_protocols() -> None:
    t = make("current")
    assert not t.is_pinned() and t.data_ptr() == 0 and t.untyped_storage().nbytes() >= 0
    assert t.is_contiguous() and not t.t().is_contiguous() and t.numel() == 9100 and t.element_size() == 2
    for pull in (t.numpy, t.tolist):
        with pytest.raises((RuntimeError, ValueError)):
            pull()
    held = "rowwise=e4m3/tensor/fp32, columnwise=e4m3/tensor/fp32"
    assert repr(t) == f"QuantizedTensor((130, 70), torch.bfloat16, {held}, device=cpu)"
    mode = torch._subclasses.FakeTensorMode()
    fake = mode.from_tensor(t)
    assert type(fake) is QuantizedTensor and repr(fake) == repr(t) and fake.dequantize().shape == (130, 70)


def test_inference_mode_sees_composite_operations() -> None:
    t, x = make("current"), torch.randn(3, 70).bfloat16()
    values = t.dequantize()
    with torch.inference_mode():
        for view in (t.reshape(-1), t.contiguous(), t.to("meta"), t.chunk(2)[0], t[:3], t.detach(), t.t(), t.view(-1)):
            assert type(view) is QuantizedTensor
        assert same([t[:, 1:], t[0], t.expand(2, 130, 70)], [values[:, 1:], values[0], values.expand(2, 130, 70)])
        assert same(t.unbind(), t.dequantize().unbind()) and make("mxfp8")[:1].is_inference()
        assert same(F.linear(x, t), F.linear(x, t.dequantize()))
        values = t.dequantize().clip_(0, 1)
        assert same_buffers(t.clip_(0, 1), quantize(values, t.quantizer))
        with pytest.raises(NotImplementedError, match="relu_"):
            t.relu_()


@pytest.mark.gpu
@everywhere
def test_on_a_device(name: str) -> None:
    t, y = make(name), torch.randn(130, 70).bfloat16()
    moved = t.cuda()
    assert type(moved) is QuantizedTensor and same_buffers(moved.cpu(), t) and same(moved.dequantize().cpu(), t)
    pinned = t.pin_memory()
    assert pinned.is_pinned() and same_buffers(pinned, t) and not t.is_pinned()
    assert same_buffers(pinned.to("cuda", non_blocking=True).cpu(), t)
    moved.record_stream(torch.cuda.Stream())
    addresses = [b.data_ptr() for b in buffers(moved).values()]
    moved.copy_(t)
    assert same_buffers(moved.cpu(), t)
    moved.copy_(y)
    if "stochastic" not in name:
        assert same_buffers(moved.cpu(), quantize(y, t.quantizer, scale=t.scale))
    assert [b.data_ptr() for b in buffers(moved).values()] == addresses
    module = nn.Linear(70, 130)
    module.weight = nn.Parameter(t)
    assert module.cuda().weight.is_cuda and type(module.weight) is QuantizedTensor
    assert torch.empty_like(t, device="cuda").is_cuda and t.new_zeros(3, 5, device="cuda").is_cuda


# ---- training ----


@each_once
@in_each_kind
@in_usages
def test_gradient_of_a_parameter(name: str, usage: str) -> None:
    p, x = nn.Parameter(make(name, usage)), torch.randn(5, 70).bfloat16()
    plain = nn.Parameter(p.detach().dequantize())
    for weight in (p, plain):
        (F.linear(x, weight).square().sum() + weight.view(-1)[3] + weight.t().sum()).backward()
    assert type(p.grad) is Tensor and p.grad.dtype == torch.bfloat16 and same(p.grad, plain.grad)


@each_once
@in_each_kind
@in_usages
@pytest.mark.parametrize("shape", [WHOLE, (2, 3, 8)])
def test_what_dequantize_gives_can_be_written(name: str, usage: str, shape: tuple[int, ...]) -> None:
    p = nn.Parameter(quantize(torch.randn(shape).bfloat16(), quantizer_of(name, usage), scale=torch.tensor([2.0])))
    for dtype in (None, torch.float32):
        p.grad = None
        held = p.detach().dequantize(dtype)
        values = p.dequantize(dtype)
        values[0] = 0
        values.mul_(2)
        held[0] = 0
        assert torch.equal(values, held * 2)
        values.sum().backward()
        assert p.grad is not None and p.grad[0].eq(0).all() and p.grad[1:].eq(2).all()


def test_writes_count_in_the_tensors_inside() -> None:
    """What autograd saved of a tensor, or of any it is rows of, is known to have changed."""
    whole = make("mxfp8_tiles")
    rows = whole[:64][32:]
    values = rows.dequantize()
    buffers = [operand.codes for operand in (*whole.operands, *rows.operands) if operand is not None]
    for write in (lambda: rows.mul_(2), lambda: rows.quantize_(torch.ones_like(values)), lambda: rows.t().zero_()):
        before = [codes._version for codes in buffers]
        write()
        assert all(codes._version > old for codes, old in zip(buffers, before, strict=True))
    with torch.inference_mode():
        inference = make("mxfp8")
        assert inference.mul_(0).dequantize().eq(0).all()


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, foreach=False),
    "sgd_foreach": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.1, foreach=False),
    "adamw_foreach": lambda ps: torch.optim.AdamW(ps, 0.1, foreach=True),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, 0.1, fused=True),
}


class Requantized(nn.Parameter):
    """The semantics in words: a plain tensor of values that is quantized and dequantized after each write to it."""

    quantizer: Quantizer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func.__name__.endswith("_") and not func.__name__.startswith("__"):
            written = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            with torch._C.DisableTorchFunctionSubclass():
                for p in written:
                    if isinstance(p, Requantized):
                        p.data.copy_(quantize(p.data, p.quantizer).dequantize())
        return result


@each_twice
@pytest.mark.parametrize("name", ["current", "block_tiles", "mxfp8", "nvfp4_tiles"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_quantize_after_each_of_their_writes(name: str, optimizer: str) -> None:
    p = nn.Parameter(make(name, shape=(64, 64), dtype=torch.float32))
    before = p.detach().dequantize()
    plain = Requantized(before.clone())
    plain.quantizer = p.quantizer
    steps = [OPTIMIZERS[optimizer]([each]) for each in (p, plain)]
    for _ in range(3):
        grad = torch.randn(64, 64)
        for each, step in zip((p, plain), steps, strict=True):
            each.grad = grad.clone()
            step.step()
    assert same(p.detach(), plain.detach().as_subclass(Tensor)) and not same(p.detach(), before)
    assert all(type(value) is Tensor for value in steps[0].state[p].values() if isinstance(value, Tensor))


@pytest.mark.parametrize("name", ["current", "nvfp4_hadamard", "half_identity"])
def test_compile_with_a_parameter(name: str) -> None:
    p, x = nn.Parameter(make(name, dtype=torch.float32)), torch.randn(3, 70)
    p.source_version = None

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight) + weight.dequantize().sum()

    y = forward(x, p)
    y.sum().backward()
    grad, p.grad = p.grad, None
    wanted = F.linear(x, p) + p.dequantize().sum()
    wanted.sum().backward()
    assert same(y, wanted) and same(grad, p.grad)


def test_compile_an_optimizer_step() -> None:
    p, grad = nn.Parameter(make("mxfp8")), torch.randn(130, 70).bfloat16()
    wanted = quantize(p.detach().dequantize().add_(grad), p.quantizer)
    addresses = [b.data_ptr() for b in buffers(p).values()]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(weight: Tensor, grad: Tensor) -> None:
        with torch.no_grad():
            weight.add_(grad)

    step(p, grad)
    assert same_buffers(p, wanted) and [b.data_ptr() for b in buffers(p).values()] == addresses


def test_a_part_that_a_file_lacks() -> None:
    """The error names the format and the part."""
    t = quantize(torch.randn(4, 32), QUANTIZERS["mxfp8"])
    names, description = t.__tensor_flatten__()
    parts = {name: getattr(t, name) for name in names if name != "rowwise_codes"}
    with pytest.raises(ValueError, match="e4m3/1x32/e8m0 has no rowwise codes"):
        QuantizedTensor.__tensor_unflatten__(parts, description, t.shape, t.stride())


# ---- groups ----


def requantized(rank: int, world_size: int) -> Iterator[Tensor]:
    full = torch.randn(64, 64)
    group = torch.distributed.group.WORLD
    results = []
    for name in ("current", "nvfp4_hadamard", "nvfp4_rows", "mxfp8"):
        t = quantize(full.chunk(world_size)[rank], QUANTIZERS[name], amax_group=group)
        t = QuantizedTensor.__tensor_unflatten__(buffers(t), t.__tensor_flatten__()[1], t.shape, t.stride())
        assert t.amax_group is group and t.detach().amax_group is group and t.new_zeros(2, 2).amax_group is group
        assert pickle.loads(pickle.dumps(t)).amax_group is None and copy.deepcopy(t).amax_group is group
        t.copy_(full.mul(2).chunk(world_size)[rank])
        results.append(t.dequantize())
        t.update_usage(rowwise=False)
        results.append(t.dequantize())
    return results


def test_amaxes_are_reduced_over_the_group(worker_pool: Pools) -> None:
    parts = worker_pool(2).run(requantized)
    torch.manual_seed(0)
    full = torch.randn(64, 64) * 2
    for name, rows, columns in zip(
        ("current", "nvfp4_hadamard", "nvfp4_rows", "mxfp8"),
        *[[torch.cat([part[i] for part in parts]) for i in range(start, 8, 2)] for start in (0, 1)],
        strict=True,
    ):
        for usage, got in (("rowwise", rows), ("columnwise", columns)):
            assert same(got, quantize(full, quantizer_of(name, usage)).dequantize()), (name, usage)


# ---- many tensors in one cast ----


class CountOps(TorchDispatchMode):
    """How often each operation of minifloat, or of a collective, is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def all_kinds() -> list[QuantizedTensor]:
    """One tensor of every quantizer, of changing shapes, dtypes and usages, one of them transposed, one empty."""
    shapes, usages = [WHOLE, BROKEN, UNEVEN, (1, 1), (3, 4, 16)], list(USAGES)
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    made = [
        make(name, usages[i % 3], shapes[i % 5], dtypes[i % 3])
        for i, name in enumerate(QUANTIZERS)
        if name != "chained"
    ]
    return [*made, make("chained", "both"), make("current").t(), make("mxfp8", "both", (0, 5))]


def new_sources(targets: list[QuantizedTensor]) -> list[Tensor]:
    """Sources of every dtype, some quantized in the same form, some in another."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    plain = [(torch.randn(t.shape) * 3).to(dtypes[i % 3]) for i, t in enumerate(targets)]
    for i in range(0, len(plain) - 1, 4):
        plain[i] = quantize(plain[i], targets[i].quantizer, scale=targets[i].scale)
        plain[i + 1] = quantize(plain[i + 1], QUANTIZERS["mxfp8"])
    return plain


@pytest.mark.parametrize("write", ["quantize_all_", "_foreach_copy_"])
def test_writing_many_is_writing_each(write: str) -> None:
    targets = all_kinds()
    wanted, sources = [copy.deepcopy(t) for t in targets], new_sources(targets)
    addresses = [b.data_ptr() for t in targets for b in buffers(t).values()]
    versions = [t._version for t in targets]
    torch.manual_seed(3)
    for t, source in zip(wanted, sources, strict=True):
        t.quantize_(source)
    torch.manual_seed(3)
    if write == "quantize_all_":
        quantize_all_(targets, sources)
    else:
        torch._foreach_copy_(targets, sources)
    assert all(same_buffers(t, w) for t, w in zip(targets, wanted, strict=True))
    assert [b.data_ptr() for t in targets for b in buffers(t).values()] == addresses
    assert all(t._version > before for t, before in zip(targets, versions, strict=True))
    assert [t.source_version for t in targets] == [source._version for source in sources]


def test_foreach_copy_between_plain_and_quantized() -> None:
    t, plain, values = make("mxfp8"), torch.zeros(3, 5), torch.randn(130, 70)
    torch._foreach_copy_([t, plain], [values, make("current", shape=(3, 5)).fill_(2.0)])
    assert same_buffers(t, make("mxfp8").quantize_(values)) and plain.eq(2).all()


def test_many_tensors_take_one_launch_a_phase() -> None:
    targets = [make(name) for name in ("current", "nvfp4", "block_tiles", "delayed", "current_e5m2")]
    with CountOps() as counted:
        quantize_all_(targets, [torch.randn(130, 70) for _ in targets])
    assert counted.calls["minifloat::amax"] == counted.calls["minifloat::cast"] == 1
    with CountOps() as counted:
        quantize_all_([], [])
    assert not counted.calls


def test_a_foreach_operation_casts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cast, lengths = base.cast_all, []
    monkeypatch.setattr(base, "cast_all", lambda xs, *args, **kw: lengths.append(len(xs)) or cast(xs, *args, **kw))
    targets = [make(name) for name in ("current", "nvfp4", "block_tiles")]
    lengths.clear()
    torch._foreach_mul_(targets, 2.0)
    torch._foreach_copy_(targets, [torch.randn(130, 70) for _ in targets])
    assert lengths == [3, 3]


def test_a_mistake_among_many_writes_nothing() -> None:
    targets = [make("current"), make("delayed"), make("mxfp8")]
    before, good = [copy.deepcopy(t) for t in targets], [torch.randn(130, 70) for _ in targets]
    with pytest.raises(ValueError, match=r"cannot take values of shape \(70,\) \(number 2 of 3\)"):
        quantize_all_(targets, [*good[:2], torch.randn(70)])
    with pytest.raises(ValueError, match="3 tensors cannot take the values of 2"):
        quantize_all_(targets, good[:2])
    targets[1].scale = None
    with pytest.raises(ValueError, match="delayed scale"):
        quantize_all_(targets, good)
    targets[1].scale = before[1].scale
    assert all(same_buffers(t, b) for t, b in zip(targets, before, strict=True))


def test_many_with_agreed_amaxes() -> None:
    targets, sources = [make("current"), make("nvfp4")], [torch.randn(130, 70), torch.randn(130, 70)]
    agreed = (torch.tensor([9.0]),)
    quantize_all_(targets, sources, amaxes=[agreed, None])
    wanted = [make("current").quantize_(sources[0], amaxes=agreed), make("nvfp4").quantize_(sources[1])]
    assert all(same_buffers(t, w) for t, w in zip(targets, wanted, strict=True))


GROUPED = ("current", "nvfp4_hadamard", "mxfp8", "nvfp4_rows", "current_e5m2")


def written_together(rank: int, world_size: int) -> tuple[list[Tensor], int]:
    """Shards over one group, one tensor of no group and one of a group of this rank alone."""
    alone = [torch.distributed.new_group([each]) for each in range(world_size)][rank]
    groups = [torch.distributed.group.WORLD] * len(GROUPED) + [None, alone]
    torch.manual_seed(0)
    shards = [torch.randn(64, 64).chunk(world_size)[rank] for _ in groups]
    targets = [
        quantize(torch.zeros_like(x), QUANTIZERS[name], amax_group=group)
        for name, group, x in zip((*GROUPED, "current", "current"), groups, shards, strict=True)
    ]
    with CountOps() as counted:
        quantize_all_(targets, shards)
    return [t.dequantize() for t in targets], sum(n for op, n in counted.calls.items() if "allreduce" in op)


def test_amaxes_of_many_are_reduced_in_one_call_a_group(worker_pool: Pools) -> None:
    results = worker_pool(2).run(written_together)
    torch.manual_seed(0)
    for i, name in enumerate((*GROUPED, "current", "current")):
        full = torch.randn(64, 64)
        shards = [full] if i < len(GROUPED) else full.chunk(2)
        wanted = torch.cat([quantize(x, QUANTIZERS[name]).dequantize() for x in shards])
        assert same(torch.cat([values[i] for values, _ in results]), wanted), name
    assert [calls for _, calls in results] == [1, 1]  # none in the group of one rank


@pytest.mark.parametrize("spec", ["e4m3/tensor/fp32", "e4m3/128x128/pow2", "e2m1/16x16/two_level"])
@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_a_flag_on_the_device_leaves_codes_and_scales(spec: str, flag: float, device: torch.device) -> None:
    quantizer = Quantizer(parse(spec))
    before, after = torch.randn(32, 48, device=device), 3 * torch.randn(32, 48, device=device)
    tensor = quantize(before, quantizer)
    tensor.quantize_(after, noop_flag=torch.tensor([flag], device=device))
    expected = quantize(before if flag else after, quantizer)
    assert torch.equal(tensor.dequantize(), expected.dequantize())


# ---- scales as values, shared memory, what an error names ----


@pytest.mark.parametrize(
    "spec", ["e4m3/tensor/fp32", "e4m3/1x32/e8m0", "e5m2/1x128/pow2", "e2m1/1x16/two_level", "e4m3/128x128/pow2"]
)
def test_scale_values_are_what_codes_are_multiplied_by(spec: str) -> None:
    fmt = parse(spec)
    operand = Quantizer(fmt)(torch.randn(40, 96) * 3).any
    scales = operand.scale_values()
    assert scales is not None and operand.scale_inv is not None
    assert scales.dtype == torch.float32 and scales.shape == operand.scale_inv.shape
    values = operand.dequantize(torch.float32)
    rows, cols = scales.shape if fmt.block else (1, 1)
    tall, wide = (40 if rows == 1 else fmt.block if rows < 40 else 1), (96 if cols == 1 else fmt.block)
    expanded = scales.reshape(rows, cols).repeat_interleave(tall, 0).repeat_interleave(wide, 1)[:40, :96]
    elements = values / expanded  # what the codes alone stand for: few of them, whatever the scale
    largest = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}[fmt.element]
    assert elements.abs().max() <= largest
    assert len((elements * 2**16).round().unique()) <= 2**8 and torch.equal(elements * expanded, values)
    assert Quantizer(IDENTITY)(torch.randn(4, 4)).any.scale_values() is None


def test_share_memory() -> None:
    """It ended the process: a tensor that has no storage of its own was asked for its storage's memory."""
    x = torch.randn(40, 64)
    t = quantize(x, Quantizer(Format("e4m3", 32, scale_rule="e8m0")))
    before = t.dequantize()
    assert not t.is_shared()
    assert t.share_memory_() is t and t.is_shared()
    assert torch.equal(t.dequantize(), before)
    layer = nn.Linear(64, 40)
    layer.weight = nn.Parameter(t)
    layer.share_memory()
    assert layer.weight.is_shared() and torch.equal(layer.weight.dequantize(), before)
    t.mul_(2.0)
    assert torch.equal(t.dequantize(), 2 * before)


def test_delayed_cast_names_its_arguments() -> None:
    x, scale = torch.randn(4, 32), torch.ones(1)
    quantizer = Quantizer(Format("e4m3", scale_rule="given"))
    for cast in (lambda: quantizer(x), lambda: cast_all([x], [quantizer])):
        with pytest.raises(ValueError, match=r"Quantizer.cast amaxes=\(scale,\), or cast_all scales=\[scale\]"):
            cast()
    expected = quantizer.cast(x, amaxes=(scale,)).dequantize()
    assert torch.equal(cast_all([x], [quantizer], scales=[scale])[0].dequantize(), expected)
