"""The residual stream within the fused modules: added by the norm's kernel, in forward and in backward.

Modules are held to the model by hand of ``helpers.fused_model``, bit for bit, and to a plain addition before them: the
same bits in forward, and gradients within the one rounding that is saved.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from minifloat import Linear, MultiheadAttention, TransformerLayer, autocast
from minifloat.recipe import DelayedScaling, Recipe, named
from tests.helpers.fused_cases import LinearCase, MLPCase, unfused
from tests.helpers.fused_model import Model, assert_same, run
from tests.helpers.memory import Storages, saved_sizes
from tests.helpers.recipes import FUSED_RECIPES, NAMED, batch_scales, for_each
from tests.helpers.sample import each_once

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP32 = torch.bfloat16, torch.float32
BOTH: dict[str, LinearCase] = {"LayerNormLinear": LinearCase(), "LayerNormMLP": MLPCase(norm="RMSNorm")}
MODULES = pytest.mark.parametrize("case", BOTH.values(), ids=BOTH.keys())
SOME = {name: FUSED_RECIPES[name] for name in (*NAMED, "current high precision", "hybrid delayed weight")}
SIZES: dict[str, Any] = {"hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


# ---- the fused modules ----


@each_once
@for_each(SOME)
@MODULES
def test_numbers(case: LinearCase, recipe: Recipe) -> None:
    """Y, S and all gradients, with a residual and without: the bits of the model by hand, delayed state included."""
    for with_residual, with_norm in ((True, False), (True, True), (False, False)):
        module = case.module(return_layernorm_output=with_norm)
        model = Model(module, recipe)
        for scale in batch_scales(recipe):
            x, dy = case.batch(scale)
            ds, dn = torch.randn_like(x), torch.randn_like(x) if with_norm else None
            residual = torch.randn_like(x) if with_residual else None
            expected = model.step(x, dy, BF16, dn, residual=residual, ds=ds)
            found = run(module, x, dy, recipe, dn=dn, residual=residual, ds=ds)
            assert_same(found, {name: expected[name] for name in found})
            assert_same({k: v for k, v in module.state_dict().items() if "_scaling." in k}, model.state())


@pytest.mark.parametrize("lead", [(0,), (), (2, 3)], ids=str)
@MODULES
def test_shapes_and_special_values(case: LinearCase, lead: tuple[int, ...]) -> None:
    """No rows, a vector, more dims; sums that are NaN, zero or infinite."""
    for dtype in (BF16, FP32):
        kind = type(case)(lead, norm=case.norm, dtype=dtype)
        module, (x, dy) = kind.module(), kind.batch()
        residual, ds = torch.randn_like(x), torch.randn_like(x)
        if lead == (2, 3):
            residual[0, 1], x[1, 0, 3], x[1, 1, 2], residual[1, 1, 2] = -x[0, 1], torch.nan, torch.inf, -torch.inf
        expected = Model(module, NAMED["current"]).step(x, dy, dtype, residual=residual, ds=ds)
        assert_same(run(module, x, dy, NAMED["current"], residual=residual, ds=ds), expected)


@each_once
@for_each({name: recipe for name, recipe in NAMED.items() if name != "delayed"} | {"no recipe": None})  # type: ignore[dict-item]
@MODULES
def test_part_by_part(case: LinearCase, recipe: Recipe | None) -> None:
    """A hook on a part: the same bits in forward, and gradients but for one rounding more of dX."""
    case = type(case)(dtype=FP32) if recipe is None else case
    module, (x, dy) = case.module(return_layernorm_output=True), case.batch()
    residual, ds = torch.randn_like(x), torch.randn_like(x)
    options = {"dn": torch.randn_like(x), "residual": residual, "ds": ds}
    found, parts = (run(each, x, dy, recipe, **options) for each in (module, unfused(module)))
    alone = run(module, x, dy, recipe, **options | {"ds": torch.zeros_like(x)})["x"].float()
    rounding = torch.finfo(case.dtype).eps
    bound = rounding * (alone.abs() + (alone + ds.float()).abs())
    for name in ("x", "residual"):
        assert ((found.pop(name).float() - parts.pop(name).float()).abs() <= bound).all()
    assert_same(found, parts)


@for_each({name: NAMED[name] for name in ("delayed", "block")})
@MODULES
def test_some_gradients(case: LinearCase, recipe: Recipe) -> None:
    """Where only S is used, its gradient is that of both addends; where nothing needs one, S has none either."""
    module = case.module(recipe=recipe)
    data, _ = case.batch()
    x, residual = leaves(data, data)
    _, stream = module(x, residual=residual, return_residual=True)
    ds = torch.randn_like(data)
    stream.backward(ds)
    assert torch.equal(x.grad, ds) and torch.equal(residual.grad, ds)  # type: ignore[arg-type]
    assert all(p.grad is None for p in module.parameters())
    module.norm.requires_grad_(False)  # type: ignore[union-attr]
    for given in (None, data):
        y, stream = module(data, residual=given, return_residual=True)
        assert y.requires_grad and not stream.requires_grad
        assert torch.equal(stream, data if given is None else data + data)
    (x,) = leaves(data)
    y, stream = module(data, residual=x, return_residual=True)  # the residual alone
    (y.sum() + stream.sum()).backward()
    expected = leaves(data)[0]
    y, stream = module(expected, residual=data, return_residual=True)
    (y.sum() + stream.sum()).backward()
    assert x.grad is not None and (isinstance(recipe, DelayedScaling) or torch.equal(x.grad, expected.grad))  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.equal(module(data, residual=data, return_residual=True)[1], data + data)


@MODULES
def test_other_dtypes(case: LinearCase) -> None:
    """What the kernel cannot add PyTorch does, as before: under ``torch.autocast``, mixed dtypes, quantized X."""
    module, (data, _) = case.module(recipe="current"), case.batch()
    for autocasts, of_x, of_residual in ((True, FP32, BF16), (True, FP32, FP32), (False, BF16, FP32)):
        x, residual = leaves(data.to(of_x), data.to(of_residual))
        with torch.autocast("cpu", BF16, enabled=autocasts):
            y, stream = module(x, residual=residual, return_residual=True)
            expected = module(x + residual)
        assert torch.equal(stream, x + residual) and stream.dtype == FP32
        assert torch.equal(y, expected) and y.dtype == expected.dtype
        (y.sum() + stream.sum()).backward()
        assert x.grad is not None and x.grad.dtype == of_x and residual.grad.dtype == of_residual  # type: ignore[union-attr]
    producer = Linear(48, 48, recipe="current", params_dtype=BF16)
    hidden = producer(data, fp8_output=True)
    y, stream = module(hidden, residual=data, return_residual=True)
    assert torch.equal(stream, hidden.dequantize() + data) and torch.equal(y, module(stream))
    y, stream = module(hidden, return_residual=True)
    assert stream is hidden and torch.equal(y, module(hidden))


@pytest.mark.parametrize("recipe", [None, "current"])
@MODULES
def test_another_shape_is_refused(case: LinearCase, recipe: str | None) -> None:
    module, (x, _) = case.module(recipe=recipe, name="block").to(BF16), case.batch()
    with pytest.raises(ValueError, match=r"'block.*residual has shape \(48,\) but the input \(17, 48\)"):
        module(x, residual=x[0])


@for_each(NAMED)
def test_checkpoint(recipe: Recipe) -> None:
    """Y, S and gradients are those without a checkpoint; S alone is kept."""
    plain = MLPCase().module(recipe=recipe)
    saving = MLPCase().module(recipe=recipe, checkpoint=True)
    saving.load_state_dict(plain.state_dict())
    for _ in range(2):
        x, dy = MLPCase().batch()
        more = {"residual": torch.randn_like(x), "ds": torch.randn_like(x)}
        assert_same(run(saving, x, dy, None, **more), run(plain, x, dy, None, **more))
    assert_same(dict(saving.state_dict()), dict(plain.state_dict()))
    (x,) = leaves(x)
    with Storages() as storages:
        y, stream = saving(x * 1, residual=x * 2, return_residual=True)
    mine = [y, *saving.parameters(), *saving.buffers()]
    alive = storages.alive(mine)
    assert max(alive) == x.nbytes == stream.nbytes and sum(alive) <= x.nbytes + 128


# ---- attention ----


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_attention(norm: bool, cross: bool) -> None:
    """With its input norm and without, attention of X + R is attention of the sum; then comes the sum."""
    kind = "cross" if cross else "self"
    module = MultiheadAttention(32, 4, input_layernorm=norm, attention_type=kind, attention_dropout=0.0)  # type: ignore[arg-type]
    data, other = torch.randn(2, 5, 2, 32)
    x, residual, total = leaves(data, other, data + other)
    encoder = [other] if cross else []
    with autocast(recipe="current"):
        y, stream = module(x, None, *encoder, residual=residual, return_residual=True)
        expected = module(total, None, *encoder)
        only_x, back = module(total, None, *encoder, return_residual=True)
    assert torch.equal(y, expected) and torch.equal(stream, total)
    assert torch.equal(only_x, expected) and torch.equal(back, total)
    (y.sum() + stream.square().sum()).backward()
    (expected.sum() + total.square().sum()).backward()
    torch.testing.assert_close(x.grad, total.grad)
    assert torch.equal(x.grad, residual.grad)  # type: ignore[arg-type]


# ---- the layer ----


class Additions(TorchDispatchMode):
    """How many activations of a shape are added by kernels of PyTorch."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        adds = func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
        self.count += adds and isinstance(out, Tensor) and out.shape == self.shape
        return out


KINDS: dict[str, dict[str, Any]] = {
    "encoder": {},
    "decoder": {"layer_type": "decoder"},
    "post": {"apply_residual_connection_post_layernorm": True},
    "parallel": {"parallel_attention_mlp": True},
    "checkpoint": {"checkpoint_mlp": True},
}
PLAIN = {"encoder": (2, 2), "decoder": (3, 3), "post": (2, 2), "parallel": (2, 2), "checkpoint": (2, 2)}
FUSED = {"encoder": (1, 0), "decoder": (1, 0), "post": (1, 2), "parallel": (2, 1), "checkpoint": (2, 0)}


@each_once
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_layer(kind: str, dropout: float) -> None:
    """A layer whose parts are seen adds as PyTorch does: the same Y, and more additions."""
    torch.manual_seed(3)
    layer = TransformerLayer(**SIZES, **KINDS[kind], hidden_dropout=dropout, attention_dropout=0.0, recipe="mxfp8")
    seen = copy.deepcopy(layer)
    inputs: list[Tensor] = []
    for part in (seen.self_attention, seen.inter_attention, seen.layernorm_mlp):
        if part is not None:
            part.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    data, encoder = torch.randn(2, 6, 3, 32)
    given = {"encoder_output": encoder} if kind == "decoder" else {}
    dy = torch.randn_like(data)
    results = []
    for each, counts in ((layer, FUSED), (seen, PLAIN)):
        (x,) = leaves(data)
        torch.manual_seed(7)
        with Additions(x.shape) as forward:
            y = each(x, **given)
        with Additions(x.shape) as backward:
            y.backward(dy)
        results.append((y, x.grad, [p.grad for p in each.parameters()]))
        assert (forward.count, backward.count) == counts[kind]
    assert torch.equal(inputs[0], data) and len(inputs) == (3 if kind == "decoder" else 2)
    (y, dx, grads), (expected, dx_too, grads_too) = results
    assert torch.equal(y, expected)
    for a, b in zip((dx, *grads), (dx_too, *grads_too), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # in fp32, but dW and dX pass codes


@for_each({name: named(name) for name in ("current", "nvfp4")})
@pytest.mark.parametrize("kind", ["encoder", "post", "checkpoint"])
def test_a_layer_keeps_no_more(kind: str, recipe: Recipe) -> None:
    """Live storages between forward and backward are those with plain additions: S and no addend among them."""
    layer = TransformerLayer(**SIZES, **KINDS[kind], **NO_DROPOUT, params_dtype=BF16)
    seen = copy.deepcopy(layer)
    for part in (seen.self_attention, seen.layernorm_mlp):
        part.register_forward_pre_hook(lambda *_: None)
    (x,) = leaves(torch.randn(64, 4, 32, dtype=BF16))
    assert saved_sizes(layer, x, recipe) == saved_sizes(seen, x, recipe)


def test_parts_that_were_replaced() -> None:
    """An MLP that takes X alone, and one that is a subclass with a forward of its own."""

    class Own(type(TransformerLayer(**SIZES).layernorm_mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return super().forward(x)

    layer = TransformerLayer(**SIZES, **NO_DROPOUT, recipe="current")
    x = torch.randn(6, 3, 32)
    expected = layer(x)
    inner = layer.layernorm_mlp
    layer.layernorm_mlp = nn.Sequential(inner)  # type: ignore[assignment]
    assert torch.equal(layer(x), expected)
    inner.__class__ = Own
    layer.layernorm_mlp = inner
    assert torch.equal(layer(x), expected)
