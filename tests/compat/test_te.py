"""Transformer Engine's names: each works or names the way out, and its quickstart's calls run as they stand."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import minifloat
import minifloat.compat.te as te
from minifloat.graphs import capture
from minifloat.recipe import DelayedScaling, Format
from tests.helpers.graph_on_cpu import GraphOnCpu

PAGE = (Path(minifloat.__file__).parents[1] / "docs" / "from-transformer-engine.md").read_text()

# What transformer_engine.pytorch 2.20 exports, and its submodules.
WORKING = """
    DelayedScalingRequest DotProductAttention GroupedLinear LayerNorm LayerNormLinear LayerNormMLP Linear
    MultiheadAttention QuantizedTensor Quantizer QuantizerRole RMSNorm RotaryPositionEmbedding TransformerLayer
    autocast checkpoint fp8_autocast fp8_model_init get_default_recipe is_fp8_available
    is_fp8_block_scaling_available is_mxfp8_available is_nvfp4_available make_graphed_callables optimizers
    parallel_cross_entropy quantized_model_init
"""
ABSENT = """
    CPLoadBalancingStrategy CudaRNGStatesTracker CusolverMpCtx DType Float8BlockQuantizer Float8BlockwiseQTensor
    Float8BlockwiseQTensorStorage Float8CurrentScalingQuantizer Float8Quantizer Float8Tensor Float8TensorStorage
    Fp8Padding Fp8Unpadding FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant GatedDeltaNetAttention
    HybridQuantizedTensor HybridQuantizedTensorStorage HybridQuantizer IdentityQuantizer IdentityTensor
    IdentityTensorStorage InferenceParams MXFP8Quantizer MXFP8Tensor MXFP8TensorStorage ManualOffloadSynchronizer
    NVFP4Quantizer NVFP4Tensor NVFP4TensorStorage QuantizedTensorStorage QuantizerRequest UserBufferQuantizationMode
    apply_recipe attention constants cpp_extensions deinterleave_glu_tensor destroy_ub distributed
    get_cpu_offload_context get_cudnn_version get_device_compute_capability initialize_ub interleave_glu_tensor
    is_bf16_available mark_not_offload module moe_permute moe_permute_and_pad_with_probs moe_permute_with_probs
    moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs moe_unpermute newton_schulz newton_schulz_tp
    onnx_export ops prepare_for_saving quantizer_factory restore_from_func_ctx restore_from_saved tensor transformer
"""


@pytest.mark.parametrize("name", WORKING.split() + ABSENT.split())
def test_a_name_that_a_newcomer_types(name: str) -> None:
    """It is there, and in the guide's tables, of the package too; or the error says what the guide says."""
    assert f"`{name}`" in PAGE or f"`{name}(" in PAGE
    for module in (te, minifloat):
        if name in WORKING.split():
            assert getattr(module, name)
        elif module is te or name not in ("distributed", "ops", "tensor"):  # which are packages of ours too
            with pytest.raises(AttributeError, match=rf"{module.__name__}' has .* '{name}'; (use|leave|build)"):
                getattr(module, name)


def test_the_table_of_the_guide_is_that_of_the_errors() -> None:
    ways: dict[str, list[str]] = {}
    for name, way in te.WAYS_OUT.items():
        ways.setdefault(way, []).append(f"`{name}`")
    missing = [row for way, names in ways.items() if (row := f"| {', '.join(names)} | {way} |\n") not in PAGE]
    assert not missing, "".join(missing)


def test_other_names_stay_pythons_errors() -> None:
    with pytest.raises(AttributeError, match=r"module 'minifloat' has no attribute 'Linaer'$") as error:
        minifloat.Linaer  # type: ignore[attr-defined]  # noqa: B018
    assert (error.value.name, error.value.obj) == ("Linaer", minifloat)  # from which Python finds what was meant
    with pytest.raises(ImportError, match="Linaer"):
        exec("from minifloat import Linaer")


class Block(nn.Module):
    """A layer of the fused modules that the quickstart has."""

    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_qkv = te.LayerNormLinear(hidden, 3 * hidden, eps=1e-5, bias=True)
        self.attention = te.DotProductAttention(heads, hidden // heads)
        self.projection = te.Linear(hidden, hidden, bias=True)
        self.ln_mlp = te.LayerNormMLP(hidden, ffn, eps=1e-5, bias=True)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.ln_qkv(x).unflatten(-1, (self.heads, -1)).chunk(3, -1)
        x = x + self.projection(self.attention(q, k, v, attention_mask))
        return x + self.ln_mlp(x)


@pytest.mark.parametrize("make", [Block, te.TransformerLayer], ids=["fused", "layer"])
def test_quickstart(make: Any, device: torch.device) -> None:
    """Its calls as they stand: modules without a device, ``to(dtype=)``, a recipe by its old keyword, an optimizer."""
    torch.manual_seed(1234)
    layer = make(32, 64, 4)
    layer.to(dtype=torch.float16).to(device)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=1e-2, master_weights=True)
    x = torch.rand(6, 2, 32).to(device=device, dtype=torch.float16)
    losses = []
    for _ in range(4):
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            y = layer.eval()(x, attention_mask=None)
        loss = (y.float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    scalings = [each.forward_scaling for each in layer.modules() if hasattr(each, "forward_scaling")]
    assert len(scalings) == 4 and all(scaling.amax_history.any() for scaling in scalings)


def test_the_first_example_is_as_with_our_own_names() -> None:
    """To the bit: positional sizes, ``recipe`` from the module, a loss's backward."""
    torch.manual_seed(0)
    model = te.Linear(24, 40, bias=True)
    ours = minifloat.Linear(24, 40)
    ours.load_state_dict(model.state_dict())
    x = torch.randn(16, 24).to(model.weight.device)
    ours.to(x.device)
    with te.pytorch.autocast(enabled=True, recipe=te.common.recipe.DelayedScaling(margin=0, fp8_format=Format.E4M3)):
        out = model(x)
    with minifloat.autocast(recipe=DelayedScaling(fp8_format=Format.E4M3)):
        expected = ours(x)
    (out.sum() + expected.sum()).backward()
    assert torch.equal(out, expected)
    assert torch.equal(model.weight.grad, ours.weight.grad)


# ---- arguments ----


def test_modules_are_ours_and_take_its_options() -> None:
    options: dict[str, Any] = {"ub_overlap_ag": True, "seq_length": 7, "micro_batch_size": 2, "softmax_type": "vanilla"}
    layer = te.TransformerLayer(
        32, 64, 4, None, 1e-5, 0.0, 0.0, get_rng_state_tracker=None, qkv_weight_interleaved=True, **options
    )
    assert type(layer) is type(pickle.loads(pickle.dumps(layer))) is minifloat.TransformerLayer
    ours = minifloat.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0)
    assert isinstance(ours, te.TransformerLayer) and not isinstance(ours, te.MultiheadAttention)
    ours.load_state_dict(layer.state_dict())
    x = torch.randn(5, 2, 32)
    assert torch.equal(layer.cpu()(x), ours(x))
    with pytest.raises(ValueError, match="TransformerLayer: softmax_type is 'learnable'; minifloat has 'vanilla' only"):
        te.TransformerLayer(32, 64, 4, softmax_type="learnable")
    with pytest.raises(TypeError, match="Linear: 3 arguments without a name; give those after 2 by keyword"):
        te.Linear(32, 64, False)  # sequence_parallel there, bias here
    with pytest.raises(TypeError, match=r"Linear got an unexpected keyword argument 'biass'$"):
        te.Linear(32, 64, biass=False)


class OwnLinear(te.Linear):  # type: ignore[misc, valid-type]
    def __init__(self, size: int, ub_name: str) -> None:
        super().__init__(size, size, bias=False, ub_name=ub_name)


def test_subclasses_stay_what_they_are() -> None:
    layer = OwnLinear(4, "qkv")
    assert type(layer) is OwnLinear and isinstance(layer, te.Linear) and isinstance(layer, minifloat.Linear)
    assert not isinstance(minifloat.Linear(4, 4), OwnLinear)
    assert layer(torch.ones(2, 4, device=layer.weight.device)).shape == (2, 4)


def test_positional_arguments_mean_the_same() -> None:
    """Of each module as many as stand in the same place in both."""
    rotary = te.RotaryPositionEmbedding(16, 0.5, None, None, 10.0, True)
    assert (rotary.dim, rotary.rotary_base, rotary.interleaved) == (8, 10.0, True)
    core = te.DotProductAttention(4, 8, 2, 0.25, "bshd", "no_mask")
    assert (core.num_gqa_groups, core.attention_dropout, core.qkv_format) == (2, 0.25, "bshd")
    assert (
        te.LayerNormLinear(8, 4, 0.5).norm.norm.eps
        == te.MultiheadAttention(8, 2, 6, 0.0, 0.5, input_layernorm=True).qkv.norm.norm.eps
    )


def test_checkpoint() -> None:
    """Its options of ranks are dropped, and those of the function reach it."""
    layer = te.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0).cpu()
    x = torch.randn(5, 2, 32, requires_grad=True)
    options: dict[str, Any] = {"distribute_saved_activations": False, "tp_group": None, "use_reentrant": True}
    y = te.checkpoint(layer, x, get_rng_state_tracker=None, checkpoint_core_attention=True, **options)
    assert torch.equal(*torch.autograd.grad(y.sum(), x), *torch.autograd.grad(layer(x).sum(), x))


def test_make_graphed_callables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keywords are those of ours; a recipe counts where it is enabled. The pool is the user's."""
    monkeypatch.setattr(capture, "Graph", GraphOnCpu)
    x = torch.randn(8, 16, requires_grad=True)
    for enabled in (True, False, None):
        layer = minifloat.Linear(16, 16)
        with minifloat.autocast(bool(enabled), recipe="current"):
            expected = layer(x).detach()
        graphed = te.make_graphed_callables(
            layer, (x,), fp8_enabled=enabled, fp8_recipe=minifloat.Float8CurrentScaling(), fp8_weight_caching=False,
            pool=(0, 1), retain_graph_in_backward=False, pre_warmup_hook=None,
        )  # fmt: skip
        assert "forward" in vars(layer) and torch.equal(graphed(x), expected)
    with pytest.raises(ValueError, match="make_graphed_callables: retain_graph_in_backward is True"):
        te.make_graphed_callables(minifloat.Linear(16, 16), (x,), retain_graph_in_backward=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers(dtype: torch.dtype) -> None:
    """Steps and defaults are those of PyTorch's optimizers on fp32 masters."""
    cases: list[tuple[Any, Any]] = [
        (lambda p: te.FusedAdam([p]), lambda p: torch.optim.AdamW([p], weight_decay=0.0)),
        (lambda p: te.FusedAdam([p], 0.1, adam_w_mode=False, weight_decay=0.5, exp_avg_dtype=torch.float32),
         lambda p: torch.optim.Adam([p], 0.1, weight_decay=0.5)),
        (lambda p: te.FusedAdam([p], store_param_remainders=dtype == torch.bfloat16),
         lambda p: torch.optim.AdamW([p], weight_decay=0.0)),
        (lambda p: te.FusedSGD([p], 0.1, 0.9, nesterov=True),
         lambda p: torch.optim.SGD([p], 0.1, 0.9, nesterov=True)),
    ]  # fmt: skip
    for ours, theirs in cases:
        p = nn.Parameter(torch.randn(3, 5).to(dtype))
        q = nn.Parameter(p.detach().float().clone())
        for optimizer in (one := ours(p), other := theirs(q)):
            assert isinstance(optimizer, torch.optim.Optimizer)
        for _ in range(3):
            p.grad = torch.randn(3, 5).to(dtype)
            q.grad = p.grad.float()
            one.step()
            other.step()
        torch.testing.assert_close(p, q.to(dtype), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"FusedAdam: exp_avg_dtype is torch.uint8; minifloat has torch.float32 only"):
        te.FusedAdam([p], exp_avg_dtype=torch.uint8)


def test_parallel_cross_entropy() -> None:
    logits, target = torch.randn(4, 3, 11), torch.randint(0, 11, (4, 3))
    target[1, 2] = -7
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=-7, reduction="none", label_smoothing=0.1
    )
    losses = te.parallel_cross_entropy(logits, target, 0.1, False, None, -7)
    torch.testing.assert_close(losses, expected.view(4, 3))
    mean = te.parallel_cross_entropy(logits, target, 0.1, reduce_loss=True, ignore_idx=-7)
    torch.testing.assert_close(mean, expected.sum() / 11)


def test_what_a_device_has() -> None:
    """FP8 products with one scale a tensor are exact on a CPU; others say why not."""
    if torch.cuda.is_available():
        assert te.is_fp8_available() == (torch.cuda.get_device_capability() >= (8, 9))
    else:
        assert te.is_fp8_available(return_reason=True) == (True, "")
        available, reason = te.is_nvfp4_available(return_reason=True)
        assert not available and "cpu has no" in reason and "computed another way" in reason
