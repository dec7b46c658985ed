"""Names of Transformer Engine: ``import minifloat.compat.te as te`` in place of ``import transformer_engine.pytorch``.

Modules take its arguments and are made on CUDA where there is one; options that have nothing to do here are dropped.
Other names are minifloat's own or thin aliases, which ``minifloat.fp8_autocast`` finds too. What is missing raises an
AttributeError that names the way out (``docs/from-transformer-engine.md``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from inspect import signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat import backends, graphs, recipe, recompute
from minifloat import nn as layers
from minifloat.arguments import RENAMED, needless
from minifloat.autocast import autocast, get_default_recipe
from minifloat.compat import find
from minifloat.functional.cross_entropy import cross_entropy
from minifloat.functional.rope import apply_rotary_pos_emb
from minifloat.nn import quantized_model_init
from minifloat.optim import MasterWeights
from minifloat.quantizer import Quantizer
from minifloat.recipe import DelayedScalingRequest, QuantizerRole, RecipeLike
from minifloat.tensor import QuantizedTensor

M = TypeVar("M", bound=nn.Module)
pytorch = common = sys.modules[__name__]

_DEFAULTS: dict[str, Any] = {
    "return_layernorm_output_gathered": False, "softmax_type": "vanilla", "use_grouped_tensor": None, "cp_group": None,
    "cp_global_ranks": None, "cp_stream": None, "cp_comm_type": "p2p", "return_max_logit": False,
    "bias_correction": True, "master_weight_dtype": torch.float32, "exp_avg_dtype": torch.float32,
    "exp_avg_sq_dtype": torch.float32, "use_decoupled_grad": False, "set_grad_none": None,
    "wd_after_momentum": False, "materialize_master_grads": True, "_num_layers_per_chunk": None,
    "retain_graph_in_backward": False, "_reuse_graph_input_output_buffers": False,
    "clone_param_grads_on_return": True, "pre_warmup_hook": None, "post_warmup_hook": None, "capture_time_hooks": None,
}  # fmt: skip
"""Arguments that minifloat lacks, with the one value that they may have."""


def _ours(owner: str, options: dict[str, Any]) -> dict[str, Any]:
    """Gives options the names that they have here, without those that have nothing to do."""
    for name, value in options.items():
        if name in _DEFAULTS and value != _DEFAULTS[name]:
            raise ValueError(f"{owner}: {name} is {value!r}; minifloat has {_DEFAULTS[name]!r} only, leave it out")
    kept = {name: value for name, value in options.items() if name not in _DEFAULTS and not needless(name)}
    return {RENAMED.get(name, name): value for name, value in kept.items()}


class _Port(type):
    """Class of the modules here, of which minifloat's own are instances, as they are not of a user's subclasses."""

    def __instancecheck__(cls, instance: object) -> bool:
        ported = cls.__module__ == __name__
        return isinstance(instance, cls.__base__) if ported else super().__instancecheck__(instance)  # type: ignore[arg-type]


def _ported(layer: type[M], positional: int) -> type[M]:
    """Makes a class that takes Transformer Engine's arguments and gives instances of ``layer``, to be subclassed too.

    ``positional``: how many arguments begin as those of ``layer`` do.
    """
    label, has_place = layer.__name__, "device" in signature(layer).parameters

    def init(self: nn.Module, *args: Any, **options: Any) -> None:
        if len(args) > positional:
            raise TypeError(f"{label}: {len(args)} arguments without a name; give those after {positional} by keyword")
        place = {"device": "cuda"} if has_place and torch.cuda.is_available() else {}
        layer.__init__(self, *args, **place | _ours(label, options))
        if type(self).__module__ == __name__:
            self.__class__ = layer

    members = {"__init__": init, "__doc__": layer.__doc__, "__module__": __name__}
    return _Port(label, (layer,), members)  # type: ignore[return-value]


Linear = _ported(layers.Linear, 2)
GroupedLinear = _ported(layers.GroupedLinear, 3)
LayerNormLinear = _ported(layers.LayerNormLinear, 3)
LayerNormMLP = _ported(layers.LayerNormMLP, 3)
LayerNorm = _ported(layers.LayerNorm, 2)
RMSNorm = _ported(layers.RMSNorm, 2)
DotProductAttention = _ported(layers.DotProductAttention, 6)
MultiheadAttention = _ported(layers.MultiheadAttention, 5)
RotaryPositionEmbedding = _ported(layers.RotaryPositionEmbedding, 6)
TransformerLayer = _ported(layers.TransformerLayer, 7)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: RecipeLike | None = None,
    fp8_group: dist.ProcessGroup | None = None,
) -> autocast:
    """Makes a :class:`~minifloat.autocast`."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


fp8_model_init = quantized_model_init


def make_graphed_callables(modules: Any, sample_args: Any, *args: Any, **options: Any) -> Any:
    """Calls :func:`minifloat.make_graphed_callables`; without ``enabled`` it quantizes nothing."""
    given = {name: value for name, value in options.items() if value is not None}
    return graphs.make_graphed_callables(
        modules, sample_args, *args, **{"enabled": False} | _ours("make_graphed_callables", given)
    )


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = False, tp_group: Any = None, **kwargs: Any
) -> Any:
    """Calls :func:`minifloat.checkpoint`, which is not reentrant whatever ``use_reentrant`` says."""
    return recompute.checkpoint(function, *args, **_ours("checkpoint", kwargs))


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: dist.ProcessGroup | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> Tensor:
    """Calls :func:`minifloat.cross_entropy`; the mean is over targets that are not ignored."""
    classes = None if dist_process_group is None else inp.shape[-1] * dist_process_group.size()
    reduction: Any = "mean" if reduce_loss else "none"
    return cross_entropy(
        inp, target, label_smoothing, ignore_idx, reduction, tp_group=dist_process_group, classes=classes
    )


class FusedAdam(MasterWeights):
    """:class:`~minifloat.optim.MasterWeights` of AdamW, or of Adam; parameters of low precision always have masters."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        store_param_remainders: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            params, torch.optim.AdamW if adam_w_mode else torch.optim.Adam, lr=lr, betas=betas, eps=eps,
            weight_decay=weight_decay, amsgrad=amsgrad, master="bf16+remainder" if store_param_remainders else "fp32",
            **_ours("FusedAdam", options),
        )  # fmt: skip


class FusedSGD(MasterWeights):
    """:class:`~minifloat.optim.MasterWeights` of SGD."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.0, **options: Any) -> None:
        super().__init__(params, torch.optim.SGD, lr=lr, momentum=momentum, **_ours("FusedSGD", options))


optimizers = SimpleNamespace(FusedAdam=FusedAdam, FusedSGD=FusedSGD)


def _available(name: str) -> Callable[..., bool | tuple[bool, str]]:
    """Makes a function that says whether the device in use multiplies a recipe's formats without emulation."""

    def available(return_reason: bool = False) -> bool | tuple[bool, str]:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        found = [backends.supports(a, b, device) for _, a, b in recipe.named(name).pairs]
        lacking = [f"{why}; the same numbers are computed another way" for native, why in found if not native]
        reason = lacking[0] if lacking else ""
        return (not lacking, reason) if return_reason else not lacking

    return available


is_fp8_available = _available("delayed")
is_mxfp8_available = _available("mxfp8")
is_fp8_block_scaling_available = _available("block")
is_nvfp4_available = _available("nvfp4")

_GROUPS: dict[str, str] = {
    "Fp8Padding Fp8Unpadding": "leave it out, groups of any size are multiplied",
    "initialize_ub destroy_ub UserBufferQuantizationMode": "leave it out, gathers run beside products without it",
    "CudaRNGStatesTracker": "leave it out, ranks draw different numbers where they hold different activations",
    "InferenceParams": "use Hugging Face's generate of a model that minifloat.convert was given",
    "moe_permute moe_permute_with_probs moe_permute_and_pad_with_probs moe_unpermute": (
        "use sort_by_expert, permute, permute_probabilities and unpermute of minifloat.functional, or minifloat.MoE"
    ),
    "moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs": "use minifloat.MoE(ep_group=...)",
    "get_cpu_offload_context mark_not_offload ManualOffloadSynchronizer": "use torch.autograd.graph.save_on_cpu",
    "onnx_export": "use minifloat.export, which gives a torch.export program",
    "ops": "use LayerNormLinear, LayerNormMLP and TransformerLayer, which are fused",
    "deinterleave_glu_tensor interleave_glu_tensor": "leave it out, gates are kept apart",
    "get_cudnn_version": "use torch.backends.cudnn.version()",
    "get_device_compute_capability": "use torch.cuda.get_device_capability()",
    "is_bf16_available": "use torch.cuda.is_bf16_supported()",
    "prepare_te_modules_for_fsdp": "use minifloat.distributed.fully_shard",
    "replace_raw_data cast_master_weights_to_fp8 quantize_master_weights": "use minifloat.optim.MasterWeights",
    "FP8GlobalStateManager fp8 quantization check_fp8_support": "use minifloat.autocast, and ask minifloat doctor",
    "QuantizerRequest quantizer_factory apply_recipe": "use minifloat.CustomRecipe",
    "DType": "use a minifloat.Format",
    "newton_schulz newton_schulz_tp CusolverMpCtx": "use torch.optim.Muon",
    "Float8Quantizer Float8CurrentScalingQuantizer MXFP8Quantizer Float8BlockQuantizer NVFP4Quantizer HybridQuantizer "
    "IdentityQuantizer QuantizedTensorStorage Float8TensorStorage MXFP8TensorStorage Float8BlockwiseQTensorStorage "
    "NVFP4TensorStorage HybridQuantizedTensorStorage IdentityTensorStorage": (
        "use minifloat.Quantizer and the minifloat.Quantized of two operands that it makes"
    ),
    "Float8Tensor MXFP8Tensor Float8BlockwiseQTensor NVFP4Tensor HybridQuantizedTensor IdentityTensor": (
        "use minifloat.QuantizedTensor, which has every format"
    ),
    "prepare_for_saving restore_from_saved restore_from_func_ctx": "use minifloat.Operand, whose tensors are ordinary",
    "GatedDeltaNetAttention FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant": "build it of minifloat.Linear",
    "attention module transformer distributed tensor constants cpp_extensions": (
        "use minifloat.compat.te itself, or minifloat.functional"
    ),
    "CPLoadBalancingStrategy": "use torch.distributed.tensor.experimental.context_parallel",
}
WAYS_OUT = {name: way for names, way in _GROUPS.items() for name in names.split()}
"""Names that minifloat has nothing for, and what to do."""

__all__ = [
    "DelayedScalingRequest", "DotProductAttention", "FusedAdam", "FusedSGD", "GroupedLinear", "LayerNorm",
    "LayerNormLinear", "LayerNormMLP", "Linear", "MultiheadAttention", "QuantizedTensor", "Quantizer", "QuantizerRole",
    "RMSNorm", "RotaryPositionEmbedding", "TransformerLayer", "apply_rotary_pos_emb", "autocast", "checkpoint",
    "common", "fp8_autocast", "fp8_model_init", "get_default_recipe", "is_fp8_available",
    "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available", "make_graphed_callables",
    "optimizers", "parallel_cross_entropy", "pytorch", "quantized_model_init", "recipe",
]  # fmt: skip

if not TYPE_CHECKING:  # which would take every name for one that exists

    def __getattr__(name: str) -> Any:
        return find(name, __name__)
