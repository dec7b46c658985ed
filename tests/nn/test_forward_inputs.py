"""What is no dense tensor, or has no values, raises an error that names the layer, the argument and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import minifloat
from tests.helpers.distributed_pool import on_ranks
from tests.helpers.sample import each_once

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **options: minifloat.Linear(64, 64, **options),
    "LayerNormLinear": lambda **options: minifloat.LayerNormLinear(64, 64, **options),
    "LayerNormMLP": lambda **options: minifloat.LayerNormMLP(64, 64, **options),
    "MultiheadAttention": lambda **options: minifloat.MultiheadAttention(64, 4, **options),
    "TransformerLayer": lambda **options: minifloat.TransformerLayer(64, 64, 4, **options),
    "LayerNorm": lambda recipe=None, **options: minifloat.LayerNorm(64, **options),
    "RMSNorm": lambda recipe=None, **options: minifloat.RMSNorm(64, **options),
}
dense = torch.ones(2, 3, 64)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "None": (None, TypeError, "is None; a tensor is needed"),
    "list": (dense.tolist(), TypeError, r"is list; a tensor is needed, as torch.tensor\(...\) makes it"),
    "text": ("x", TypeError, "is str; a tensor is needed"),
    "numpy": (dense.numpy(), TypeError, r"is ndarray; a tensor is needed, as torch.from_numpy\(...\) makes it"),
    "sparse": (dense.to_sparse(), ValueError, r"layout torch.sparse_coo; use a dense one: to_dense\(\)"),
    "csr": (dense[0].to_sparse_csr(), ValueError, r"layout torch.sparse_csr; use a dense one"),
    "nested": (torch.nested.nested_tensor([dense[0], dense[1, :2]]), ValueError, "nested tensor; use a padded one"),
    "jagged": (
        torch.nested.nested_tensor([dense[0], dense[1, :2]], layout=torch.jagged), ValueError, "nested tensor; use",
    ),
}  # fmt: skip


@each_once
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_no_dense_tensor(kind: str, recipe: str | None) -> None:
    layer = LAYERS[kind](recipe=recipe)
    name = "hidden_states" if kind in ("MultiheadAttention", "TransformerLayer") else "input"
    for bad, error, message in BAD.values():
        with pytest.raises(error, match=rf"{kind}.*: {name}.*{message}"):
            layer(bad)


def test_other_arguments() -> None:
    for kind in ("LayerNormLinear", "LayerNormMLP"):
        with pytest.raises(TypeError, match="residual is list"):
            LAYERS[kind](recipe="mxfp8")(dense, residual=[1.0])
    attention = minifloat.DotProductAttention(4, 16)
    heads = torch.ones(3, 2, 4, 16)
    for place, name in enumerate(("query", "key", "value")):
        given: list[Any] = [heads] * 3
        given[place] = heads.numpy()
        with pytest.raises(TypeError, match=f"DotProductAttention: {name} is ndarray"):
            attention(*given)
    with pytest.raises(TypeError, match="MultiheadAttention: encoder_output is str"):
        minifloat.MultiheadAttention(64, 4, attention_type="cross")(dense, encoder_output="x")


@each_once
@pytest.mark.parametrize("recipe", [None, "current", "mxfp8"])
@pytest.mark.parametrize("kind", LAYERS)
def test_parameters_on_meta(kind: str, recipe: str | None) -> None:
    layer = LAYERS[kind](recipe=recipe, device="meta")
    with pytest.raises(ValueError, match=r"parameters are on the meta device.*to_empty\(device=...\)"):
        layer(dense)
    assert layer(dense.to("meta")).shape == dense.shape


def test_main_grad_on_meta() -> None:
    layer = minifloat.Linear(64, 64, recipe="mxfp8", fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(64, 64, device="meta")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"Linear\(64, 64\): weight.main_grad is on the meta device.*make it on cpu"):
        layer(dense)


@each_once
@pytest.mark.parametrize(
    "main_grad",
    [
        *[torch.zeros(64, 64, dtype=dtype) for dtype in (torch.int32, torch.bool, torch.complex64)],
        torch.zeros(64, 64).to(torch.float8_e5m2), torch.zeros(64, 32), torch.zeros(1, 64), torch.zeros(2, 64, 64),
    ],
    ids=lambda main_grad: f"{main_grad.dtype} {tuple(main_grad.shape)}",
)  # fmt: skip
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_main_grad_that_takes_no_gradients(recipe: str | None, main_grad: Tensor) -> None:
    grouped = minifloat.GroupedLinear(2, 64, 64, recipe=recipe, fuse_wgrad_accumulation=True)
    layer = minifloat.Linear(64, 64, recipe=recipe, fuse_wgrad_accumulation=True)
    for p in (*layer.parameters(), *grouped.parameters()):
        p.main_grad = main_grad if p.dim() > 1 else None  # type: ignore[attr-defined]
    message = rf"weight.main_grad is {re.escape(f'{main_grad.dtype} {tuple(main_grad.shape)}')}.*use torch.float32"
    with pytest.raises(ValueError, match=rf"Linear\(64, 64\): {message}"):
        layer(dense)
    with pytest.raises(ValueError, match=rf"GroupedLinear\(2, 64, 64\): {message}"):
        grouped(dense[0], [1, 2])


@each_once
@pytest.mark.parametrize("bad", ["x", 1, 0, 1.0, torch.tensor(True)], ids=["text", "1", "0", "1.0", "tensor"])
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer", "MoE"])
def test_what_is_no_first_microbatch(kind: str, recipe: str | None, bad: Any) -> None:
    layer = minifloat.MoE(64, 64, 4, recipe=recipe) if kind == "MoE" else LAYERS[kind](recipe=recipe)
    with pytest.raises(TypeError, match=r"Linear.*: is_first_microbatch is .*; True or False or None is needed"):
        layer(dense, is_first_microbatch=bad)


SIXTYFOUR: dict[str, Callable[..., nn.Module]] = {
    **{kind: make for kind, make in LAYERS.items() if kind not in ("LayerNorm", "RMSNorm")},
    "GroupedLinear": lambda **options: minifloat.GroupedLinear(2, 64, 64, **options),
    "GroupedMLP": lambda **options: minifloat.GroupedMLP(2, 64, 64, **options),
    "MoE": lambda **options: minifloat.MoE(64, 64, 4, **options),
}


@pytest.mark.parametrize("kind", SIXTYFOUR)
def test_no_recipe_quantizes_float64(kind: str) -> None:
    """Known where the layer is made; without a recipe of its own it is made."""
    make = partial(SIXTYFOUR[kind], dtype=torch.float64)
    make()
    make(recipe="none")
    for recipe in ("mxfp8", minifloat.CustomRecipe(lambda role: minifloat.Quantizer.identity())):
        with pytest.raises(ValueError, match=r"Linear.*: cannot quantize a torch.float64 weight; use bf16"):
            make(recipe=recipe)


def test_parameters_and_subclasses_are_tensors() -> None:
    layer = minifloat.Linear(64, 64, recipe="mxfp8")
    plain = layer(dense)
    assert torch.equal(layer(nn.Parameter(dense)), plain)
    first = minifloat.Linear(64, 64, recipe="mxfp8")
    assert torch.isfinite(layer(first(dense, fp8_output=True))).all()


CUSTOM_ERROR = "_set_storage_data_ptr_access_error_msg"  # PyTorch 2.14


@pytest.mark.parametrize("recipe", [None, "current"])
@on_ranks(2)
def test_pytorchs_tensor_parallelism(rank: int, size: int, recipe: str | None) -> None:
    mesh = init_device_mesh("cpu", (size,))
    found = []
    for style in (ColwiseParallel(), RowwiseParallel()):
        model = nn.Sequential(minifloat.Linear(64, 64, recipe=recipe))
        try:
            parallelize_module(model, mesh, {"0": style})
            model(dense if isinstance(style, ColwiseParallel) else dense.chunk(size, -1)[rank]).sum().backward()
            found.append("ran")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    delayed = nn.Sequential(minifloat.Linear(64, 64, recipe="delayed"))
    with pytest.raises(ValueError, match=r"Linear\(64, 64\): .*histories of delayed scaling; use minifloat"):
        parallelize_module(delayed, mesh, {"0": style})
    for kind in ("LayerNormMLP", "RMSNorm", "TransformerLayer"):
        with pytest.raises(ValueError, match=rf"{kind}.* is a DTensor.*parallelize"):
            LAYERS[kind](recipe=recipe)(DTensor.from_local(dense, mesh, [Replicate()]))
    for message in found:
        if recipe is None:
            assert message == "ran"  # without a recipe the layer is PyTorch's own
        else:
            assert message.startswith("ValueError: Linear(64, 64): input is a DTensor")
            assert "parallel_mode='column' or 'row'" in message and "minifloat.distributed.parallelize" in message


@on_ranks(2)
def test_collectives_of_quantized_parameters(rank: int, size: int) -> None:
    """They were done on a copy of the values, and lost."""
    with minifloat.quantized_model_init(recipe="current"):
        weight = minifloat.Linear(64, 64, recipe="current").weight
    refused = r"c10d.* QuantizedTensor; communicate t.dequantize\(\).*minifloat.distributed.parallelize"
    with pytest.raises(NotImplementedError, match=refused):
        dist.broadcast(weight, 0)
    with pytest.raises(NotImplementedError, match=refused):
        dist.all_reduce(weight)


@on_ranks(2)
def test_scatter_of_quantized_parameters(rank: int, size: int) -> None:
    """The dispatcher does not see tensors within lists of lists, and C++ read their null pointers."""
    with minifloat.quantized_model_init(recipe="mxfp8"):
        layer = minifloat.Linear(64, 64)
    assert isinstance(layer.weight, minifloat.QuantizedTensor)
    mesh = init_device_mesh("cpu", (size,))
    with pytest.raises(
        ValueError, match=r"Linear\(64, 64\): PyTorch's parallelize_module .*quantized weights; use mini"
    ):
        parallelize_module(layer, mesh, ColwiseParallel())
    refused = "no memory of its values; read t.deq" if hasattr(torch._C, CUSTOM_ERROR) else "data pointer of Tensor"
    group = dist.new_group()
    if rank == 0:  # raises before it communicates
        with pytest.raises(RuntimeError, match=refused):
            dist.scatter(torch.zeros(32, 64), list(layer.weight.detach().chunk(size)), src=0, group=group)
    plain = minifloat.Linear(64, 64)
    parallelize_module(plain, mesh, ColwiseParallel())
    with pytest.raises(RuntimeError, match="should only be called once"):
        parallelize_module(plain, mesh, ColwiseParallel())
