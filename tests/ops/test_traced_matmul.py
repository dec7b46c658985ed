"""What a compiler makes of the scaled product: PyTorch's own where a GPU runs nothing else, or the operation.

Traced with fake tensors of a GPU, so that no test needs one; what was traced runs on a CPU, on integers, without error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from minifloat import backends
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.functional import gemm
from minifloat.ops import matmul
from minifloat.ops.matmul import count_gemms
from minifloat.quantizer import Quantizer, cast_all
from tests.helpers.sample import each_pair

E4, E5 = Format("e4m3"), Format("e5m2")
ROWS = Format(amax_per_row=True)
STRIP, TILE = Format(block=128), Format(block=128, tile=True)
GEMMS = {"fprop": (ROWWISE, ROWWISE), "dgrad": (ROWWISE, COLUMNWISE), "wgrad": (COLUMNWISE, COLUMNWISE)}
M, N, DEPTH = 16, 48, 32
OURS, NATIVE = torch.ops.minifloat.scaled_mm.default, torch.ops.aten._scaled_mm.default


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any CUDA device is an sm_90; what was found for it is forgotten."""
    facts = backends._device_facts
    hopper = (9, 0), (13, 0)
    monkeypatch.setattr(backends, "_device_facts", lambda device: hopper if device.type == "cuda" else facts(device))
    for cache in (backends.choose, backends.kernels, matmul.product):
        cache.cache_clear()
    yield
    for cache in (backends.choose, backends.kernels, matmul.product):
        cache.cache_clear()


def codes_of(outer: int, depth: int, along: int, k_major: bool) -> Tensor:
    """-1, 0 and 1 as [M, K], contracted along ``along``, whose elements are consecutive in memory if ``k_major``."""
    x = torch.randint(-1, 2, (outer, depth))
    x = x if k_major else x.t().contiguous().t()
    return x if along == ROWWISE else x.t()


def arguments(
    gemm: str,
    a_fmt: Format,
    b_fmt: Format,
    size: tuple[int, int, int] = (M, N, DEPTH),
    k_major: bool = True,
    bias: torch.dtype | None = None,
) -> list[Tensor | None]:
    """Codes and scale of both operands, and a bias."""
    m, n, depth = size
    tensors: list[Tensor | None] = []
    for fmt, outer, along, scale in zip((a_fmt, b_fmt), (m, n), GEMMS[gemm], (0.5, 8.0), strict=True):
        codes = codes_of(outer, depth, along, k_major).to(fmt.encoding.dtype).view(torch.uint8)
        shape = (outer, 1) if fmt.amax_per_row else (1,)
        tensors += codes, torch.full(shape, scale)
    return [*tensors, None if bias is None else torch.randint(-7, 8, (n,)).to(bias)]


def product(
    gemm: str, a_fmt: Format, b_fmt: Format, dtype: torch.dtype, fast: bool = False, backend: str = ""
) -> Callable[..., Tensor]:
    """The operation as a function of :func:`arguments`."""
    a_along, b_along = GEMMS[gemm]

    def call(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = matmul.scaled_mm(
            gemm, a, a_scale, None, a_fmt.spec, a_along, a_along, a.shape[0 if a_along == ROWWISE else 1],
            b, b_scale, None, b_fmt.spec, b_along, b_along, b.shape[0 if b_along == ROWWISE else 1],
            dtype, bias, fast, backend,
        )  # fmt: skip
        return result

    return call


def traced(call: Callable[..., Tensor], tensors: list[Tensor | None], dynamic: bool = False) -> GraphModule:
    """The graph of ``call`` on a GPU."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        fakes = [
            x if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in tensors
        ]
        graph: GraphModule = make_fx(call, tracing_mode="symbolic" if dynamic else "fake")(*fakes)
    return graph


def operations(graph: GraphModule) -> list[Any]:
    """What it calls, but for views."""
    views = "view", "t", "sym_size"
    return [
        node.target
        for node in graph.graph.nodes
        if node.op == "call_function" and node.target.overloadpacket.__name__ not in views
    ]


@each_pair
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pair", [(E4, E4), (E5, E4)], ids=lambda pair: f"{pair[0].element}-{pair[1].element}")
@pytest.mark.parametrize("gemm", GEMMS)
def test_a_graph_calls_the_library(
    gemm: str, pair: tuple[Format, Format], bias: torch.dtype | None, dtype: torch.dtype, fast: bool
) -> None:
    """One product by ``torch._scaled_mm``, of views, which is the product of the operation; no GEMM is counted."""
    tensors = arguments(gemm, *pair, bias=bias)
    with count_gemms() as counts:
        graph = traced(product(gemm, *pair, dtype, fast), tensors)
    assert not counts
    epilogue = [] if bias in (None, dtype) else [torch.ops.aten._to_copy.default]
    added = [] if bias is None or dtype != torch.float32 else [torch.ops.aten.add.Tensor]
    assert sorted(map(str, operations(graph))) == sorted(map(str, [*epilogue, NATIVE, *added]))
    (node,) = graph.graph.find_nodes(op="call_function", target=NATIVE)
    assert (node.args[7:] == (True,)) == fast
    assert torch.equal(graph(*tensors), product(gemm, *pair, dtype, backend="native")(*tensors))


def test_a_graph_calls_the_library_with_scales_of_rows() -> None:
    """Scales as [M, 1] and [1, N], where the output is bf16."""
    graph = traced(product("fprop", ROWS, ROWS, torch.bfloat16), arguments("fprop", ROWS, ROWS, bias=torch.bfloat16))
    assert operations(graph) == [NATIVE]
    (node,) = graph.graph.find_nodes(op="call_function", target=NATIVE)
    assert [scale.meta["val"].shape for scale in node.args[2:4]] == [(M, 1), (1, N)]


KEPT: dict[str, tuple[str, Format, Format, torch.dtype, dict[str, Any]]] = {
    "rows to pad": ("fprop", E4, E4, torch.bfloat16, {"size": (M + 1, N, DEPTH)}),
    "columns to pad": ("dgrad", E4, E4, torch.bfloat16, {"size": (M, N + 8, DEPTH)}),
    "depth to pad": ("wgrad", E4, E4, torch.bfloat16, {"size": (M, N, DEPTH + 4)}),
    "no rows": ("fprop", E4, E4, torch.bfloat16, {"size": (0, N, DEPTH)}),
    "no depth": ("fprop", E4, E4, torch.bfloat16, {"size": (M, N, 0)}),
    "codes to transpose": ("fprop", E4, E4, torch.bfloat16, {"k_major": False}),
    "columnwise codes to transpose": ("wgrad", E4, E4, torch.bfloat16, {"k_major": False}),
    "two E5M2": ("fprop", E5, E5, torch.bfloat16, {}),
    "blocks": ("fprop", STRIP, TILE, torch.bfloat16, {"size": (M, 128, 128)}),
    "scales of rows, fp16": ("fprop", ROWS, ROWS, torch.float16, {}),
    "scales of rows, fp32": ("fprop", ROWS, ROWS, torch.float32, {}),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_graph_keeps_the_operation(case: str) -> None:
    """Where a kernel of ours pads or transposes, where no library multiplies, or where a compiler would fuse an FMA."""
    gemm, a_fmt, b_fmt, dtype, options = KEPT[case]
    graph = traced(product(gemm, a_fmt, b_fmt, dtype), arguments(gemm, a_fmt, b_fmt, **options))
    assert operations(graph) == [OURS]


def test_a_graph_of_another_device_or_backend_keeps_the_operation() -> None:
    """A CPU multiplies in fp64, and a backend that is asked for is meant."""
    tensors = arguments("fprop", E4, E4)
    assert operations(make_fx(product("fprop", E4, E4, torch.bfloat16))(*tensors)) == [OURS]
    assert operations(traced(product("fprop", E4, E4, torch.bfloat16, backend="reference"), tensors)) == [OURS]


def three_gemms(x: Tensor, w: Tensor, dy: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Those of a linear layer, and the casts."""
    x_operands, w_operands = cast_all([x, w], [Quantizer(E4), Quantizer(E4)], gemm_ready=True)
    (dy_operands,) = cast_all([dy], [Quantizer(E5)], gemm_ready=True)
    return (
        gemm.fprop(x_operands, w_operands, bias, out_dtype=x.dtype, fast_accum=True),
        gemm.dgrad(dy_operands, w_operands, out_dtype=x.dtype),
        gemm.wgrad(dy_operands, x_operands, out_dtype=x.dtype),
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_gemms(dynamic: bool, fresh_compiler: None) -> None:
    """All are the library's, of codes as the casts lay them out; with dynamic rows one graph serves all numbers."""
    graphs: list[list[Any]] = []

    def keep(graph: GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append([node.target for node in graph.graph.nodes if node.target in (OURS, NATIVE)])
        return make_boxed_func(graph.forward)

    compiled = torch.compile(three_gemms, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    with FakeTensorMode(), torch.no_grad():

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device="cuda", dtype=torch.bfloat16)

        for rows in (64, 63, 48) if dynamic else (64,):
            x, dy = empty(rows, DEPTH), empty(rows, N)
            for each in (x, dy) if dynamic else ():
                torch._dynamo.mark_dynamic(each, 0)
            y, dx, dw = compiled(x, empty(N, DEPTH), dy, empty(N))
            assert (y.shape, dx.shape, dw.shape) == ((rows, N), (rows, DEPTH), (N, DEPTH))
    assert graphs == [[OURS if dynamic else NATIVE] * 3]
