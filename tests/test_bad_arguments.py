"""Every bad value for every parameter of every public callable: an error of ours that names the argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import minifloat
import minifloat.distributed
import minifloat.functional
from minifloat.recipe import MMParams
from tests.helpers.sample import each_twice

OBJECT = object()
VALUES: dict[str, Any] = {
    "None": None,
    "text": "text",
    "list": [],
    "-1": -1,
    "0": 0,
    "1.5": 1.5,
    "NaN": float("nan"),
    "inf": float("inf"),
    "10**18": 10**18,
    "object": OBJECT,
    "True": True,
    "class": nn.Linear,
    "dict": {1: 2},
}
NOTHING: set[str] = set()

# What is no bad value, by what a parameter is.
FITS: dict[str, set[str]] = {
    "bool": {"True"},
    "size": NOTHING,
    "count": {"0"},
    "int": {"-1", "0", "10**18"},
    "small int": {"-1", "0"},
    "above 0": {"1.5", "10**18"},
    "at least 0": {"0", "1.5", "10**18"},
    "at least 0, or inf": {"0", "1.5", "10**18", "inf"},
    "fraction": {"0"},
    "text": {"text"},
    "callable": {"class"},
    "sizes": {"list"},
    "iterable": {"list", "dict"},
    "mapping": {"dict"},
    "values": {"list", "dict"},
    "object": NOTHING,  # an instance of one class, a tensor, a dtype, one of a few names
}

# What the parameters of a name are everywhere; "?" after it: None too.
NAMES: dict[str, str] = {
    "bool": (
        "single_grouped_weight single_grouped_bias batch_invariant force_load_balancing "
        "bias fuse_wgrad_accumulation delay_wgrad_compute save_original_input return_bias sequence_parallel "
        "check_finite return_layernorm_output zero_centered_gamma recompute_norm recompute_activation checkpoint "
        "set_parallel_mode input_layernorm output_layernorm fuse_qkv_params rotary_pos_interleaved qk_norm_before_rope "
        "parallel_attention_mlp apply_residual_connection_post_layernorm checkpoint_mlp save_memory "
        "shared_gate interleaved enabled calibrating tile preserve_high_precision_init_val check strict only_rank0 "
        "from_rank0 rowwise columnwise gemm_ready reduce_amax amax_per_row disable_rht "
        "disable_stochastic_rounding disable_2d_quantization row_scaled_activation fast_accum recast "
        "enable_2d_quantization enable_rht use_f32_scales use_power_2_scales scales_agree use_reentrant "
        "use_split_accumulator power_2_scale random_hadamard_transform stochastic_rounding "
        "fp4_2d_quantization accumulate score_before_top_k normalize_top_k allow_unused_input cache_quantized_params "
        "overlapped"
    ),
    "object": (
        "fp8_dpa fp8_mha rotary_percent model module optimizer normalization activation attention_type "
        "layer_type attn_mask_type qkv_format self_attn_mask_type enc_dec_attn_mask_type "
        "attn_input_format tensor_format reduction master moments element scale_rule transform rounding "
        "forward_element gradient_element "
        "fp8_format fp4_format x_block_scaling_dim w_block_scaling_dim grad_block_scaling_dim fp8_gemm_fprop "
        "fp8_gemm_dgrad fp8_gemm_wgrad nvfp4_4over6 nvfp4_4over6_e4m3_use_256 nvfp4_4over6_err_mode "
        "quantization_alignment tensor_type row_format columnwise_source logits target hidden weight t freqs "
        "quantizer shards group part x w dy out_dtype betas rows xs params "
        "indices routing y score_function amax_compute_algo "
        "drop_policy groups etp_reduction layer layout blocks offsets"
    ),
    "bool?": "quantize_weights bottom_right_diagonal enc_dec_bottom_right_diagonal",
    "size": (
        "hidden_size ffn_hidden_size num_attention_heads num_embeddings embedding_dim tp_size dim "
        "normalized_shape amax_history_len num_gemms num_experts top_k num_warmup_iters"
    ),
    "size?": (
        "shared_ffn_hidden_size kv_channels num_gqa_groups pretrained_max_position_embeddings chunk_rows classes "
        "num_groups group_top_k"
    ),
    "count": "every in_features out_features block smallest max_seq_len offset prefetch seq_dim",
    "count?": "layer_number prefetch_bytes",
    "int": "ignore_index",
    "int?": "padding_idx",
    "small int": "margin",
    "at least 0": (
        "eps layernorm_epsilon qk_norm_eps amax_epsilon lr weight_decay aux_loss_coefficient z_loss_coefficient "
        "seq_aux_loss_coefficient global_aux_loss_coefficient"
    ),
    "at least 0?": "expert_bias_rate",
    "above 0": "rotary_base block_scale_max scaling_factor",
    "above 0?": "capacity_factor softmax_scale softcap seq_len_interpolation_factor",
    "fraction": "drop_path_rate input_jitter_eps attention_dropout hidden_dropout label_smoothing",
    "at least 0, or inf": "max_norm",
    "text": "module_type",
    "text?": "name",
    "callable": "qfactory optimizer_class function hook",
    "callable?": "init_method output_layer_init_method filter_fn",
    "object?": (
        "recipe device dtype params_dtype reduce_dtype parallel_mode parameters_split tp_group tp_mesh etp_group "
        "expert_etp_group ep_group aux_loss_group "
        "fused_parts activation_params qk_norm_type backward_override amax_reduction_group mesh mp_policy "
        "offload_policy ignored_params window_size enc_dec_window_size column_format start_positions cu_seqlens plan "
        "scaling_factor_compute_algo moe router "
        "noop_flag pool into out amaxes scale rng rngs scales rows_per_rank probabilities logits_dtype"
    ),
    "mapping": "state",
    "iterable": "rules",
    "values": "parameters",
    "sizes": "quantizers parts modules sample_args",
    "sizes?": "_order",
    "iterable?": "sample_kwargs",
}
KINDS = {name: kind for kind, names in NAMES.items() for name in names.split()}

# Where a parameter is something else than those of its name elsewhere, or some value is one for a reason of its own.
OTHERS: dict[str, str] = {
    "parallelize.mesh": "object",
    "prepare.recipe": "object",
    "linear_cross_entropy.bias": "object?",
    "fprop.bias": "object?",
    "DotProductAttention.kv_channels": "size",
    "set_tensor_parallel_group.tp_group": "object",
    "update_expert_bias.group": "object?",
    "make_graphed_callables.enabled": "bool?",
}
EXTRA: dict[str, set[str]] = {
    "QuantizerRole.tensor_type": NOTHING,
    "fused_parts": NOTHING,
    "into": {"list"},
    "amaxes": {"list"},
    "rngs": {"list"},
    "scales": {"list"},
    "xs": {"list"},
    "rows_per_rank": {"list"},
    "groups": {"list"},
    "reshard_after_forward": {"True", "None", "-1", "0", "10**18"},
    "activation_params": NOTHING,
    "moe": NOTHING,
    "plan": NOTHING,
    "check": {"text"},  # of a collective: what errors call it
}
# Values that functions of ours give, which nobody makes; what goes on to another library as it is.
VALUES_OF_OURS = {"ConversionReport", "Operand", "Quantized", "QuantizedTensor", "Recipe", "Group", "Gemm", "Routing"}
FREE = {"args", "kwargs", "options", "dynamic_shapes", "reshard_after_forward"}


def _needed() -> dict[str, dict[str, Any]]:
    """What each callable cannot be called without, made anew."""
    model, weight = nn.Sequential(nn.Linear(4, 4)), nn.Parameter(torch.ones(2, 2))
    fmt = minifloat.Format()
    q = minifloat.Quantizer(fmt)
    x, group = torch.ones(4, 8), minifloat.distributed.Group()
    operands, shards = q(x), minifloat.distributed.ShardMap((4,))
    indices = torch.zeros(4, 2, dtype=torch.int64)
    routing = minifloat.functional.sort_by_expert(indices, 3)
    gather = {"shards": shards, "group": group, "rowwise": True, "columnwise": True}
    of_model = {"model": model}
    adam = torch.optim.AdamW([weight])
    with minifloat.quantized_model_init(recipe="w4a8"):
        layer = minifloat.Linear(32, 2)
    codes = minifloat.save_mxfp4(layer)
    return {
        "CustomRecipe": {"qfactory": lambda role: q},
        "DefaultFilter": of_model,
        "router_losses": of_model,
        "reduce_replicated": of_model | {"groups": group},
        "DotProductAttention": {"num_attention_heads": 2, "kv_channels": 4},
        "GroupedMLP": {"num_experts": 2, "hidden_size": 4, "ffn_hidden_size": 4},
        "MoE": {"hidden_size": 4, "ffn_hidden_size": 4, "num_experts": 2},
        "GroupedLinear": {"num_gemms": 2, "in_features": 4, "out_features": 4},
        "Linear": {"in_features": 4, "out_features": 4},
        "LayerNorm": {"normalized_shape": 4},
        "RMSNorm": {"normalized_shape": 4},
        "LayerNormLinear": {"in_features": 4, "out_features": 4},
        "LayerNormMLP": {"hidden_size": 4, "ffn_hidden_size": 4},
        "MultiheadAttention": {"hidden_size": 8, "num_attention_heads": 2},
        "TransformerLayer": {"hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2},
        "Quantizer": {"row_format": fmt},
        "RotaryPositionEmbedding": {"dim": 4},
        "TopKRouter": {"hidden_size": 4, "num_experts": 8, "top_k": 2},
        "VocabParallelEmbedding": {"num_embeddings": 4, "embedding_dim": 4},
        "EtpEmbedding": {"num_embeddings": 4, "embedding_dim": 4},
        "ep_parameters": of_model,
        "etp_parameters": of_model,
        "apply_rotary_pos_emb": {"t": torch.ones(2, 1, 1, 4), "freqs": torch.ones(2, 1, 1, 4)},
        "cast_all": {"xs": [x], "quantizers": [q]},
        "cast_weights": of_model,
        "find_amaxes": {"xs": [x], "quantizers": [q]},
        "checkpoint": {"function": lambda: torch.ones(1)},
        "convert": of_model | {"recipe": "mxfp8"},
        "export": {"model": nn.Linear(4, 4).eval(), "args": (torch.ones(2, 4),)},
        "cross_entropy": {"logits": x, "target": torch.zeros(4, dtype=torch.int64)},
        "load_mxfp4": {"layer": layer, "blocks": codes[0], "scales": codes[1]},
        "save_mxfp4": {"layer": layer},
        "linear_cross_entropy": {"hidden": x, "weight": x, "target": torch.zeros(4, dtype=torch.int64)},
        "prepare": of_model | {"recipe": "mxfp8"},
        "revert": of_model,
        "explain": {"layer": model, "input": torch.ones(2, 4)},
        "inspect": of_model,
        "ShardMap": {"rows": (1,)},
        "data_parallel": {"module": model},
        "make_graphed_callables": {"modules": [], "sample_args": []},
        "full_state_dict": of_model,
        "load_full_state_dict": of_model | {"state": {}},
        "load_sharded_state_dict": of_model | {"state": {}},
        "load_sharded_optimizer_state_dict": of_model | {"state": {}, "optimizer": adam},
        "sharded_optimizer_state_dict": of_model | {"optimizer": adam},
        "sharded_state_dict": of_model,
        "sharded_weights": {"module": model},
        "fully_shard": {"module": model},
        "parallelize": of_model | {"mesh": group},
        "gather": {"part": operands, **gather},
        "start_gather": {"parts": [operands], **gather},
        "prepare_shard": {"x": x, "quantizer": q, "shards": shards, "group": group},
        "quantize_shard": {"x": x, "quantizer": q, "shards": shards, "group": group},
        "MasterWeights": {"params": [weight], "optimizer_class": torch.optim.AdamW, "lr": 1e-3},
        "clip_grad_norm_": {"parameters": [weight], "max_norm": 1.0},
        "gradient_norm": {"parameters": [weight]},
        "fprop": {"x": operands, "w": operands, "out_dtype": torch.float32},
        "dgrad": {"dy": q(x.t().contiguous()), "w": operands, "out_dtype": torch.float32},
        "wgrad": {"dy": operands, "x": operands, "out_dtype": torch.float32},
        "quantize_groups": {"x": x, "offsets": torch.tensor([0, 4], dtype=torch.int32), "quantizer": q},
        "sort_by_expert": {"indices": indices, "num_experts": 3},
        "permute": {"x": x, "routing": routing},
        "permute_probabilities": {"probabilities": torch.ones(routing.inverse.shape), "routing": routing},
        "unpermute": {"y": torch.ones(8, 8), "routing": routing},
        "update_expert_bias": {},
        "forward": {"max_seq_len": 4},
    }


def _public() -> Iterator[tuple[str, Callable[..., Any]]]:
    modules: tuple[ModuleType, ...] = (minifloat, minifloat.distributed, minifloat.optim, minifloat.functional)
    for module in modules:
        for name in module.__all__:
            target = getattr(module, name)
            if callable(target) and name not in VALUES_OF_OURS:
                yield name, target
    layer = minifloat.Linear(4, 4)
    yield "MMParams", MMParams
    yield "QParams", minifloat.recipe.QParams
    yield "forward", minifloat.RotaryPositionEmbedding(4).forward
    yield "set_tensor_parallel_group", layer.set_tensor_parallel_group
    router = minifloat.TopKRouter(4, 8, 2, expert_bias_rate=0.1)
    yield "update_expert_bias", router.update_expert_bias
    yield "hooks", layer.register_wgrad_accumulation_and_reduce_hooks


def _accepted(function: str, parameter: str) -> set[str]:
    """The names of the values that are none for a parameter to refuse."""
    full = f"{function}.{parameter}"
    kind = OTHERS.get(full) or OTHERS.get(parameter) or KINDS[parameter]
    accepted = FITS[kind.rstrip("?")] | ({"None"} if kind.endswith("?") else NOTHING)
    accepted |= EXTRA.get(full, EXTRA.get(parameter, NOTHING))
    return accepted | ({"0"} if parameter == "device" and torch.cuda.is_available() else NOTHING)


def _outcome(target: Callable[..., Any], arguments: dict[str, Any], parameter: str) -> str | None:
    """None if the call raised an error of ours; else what it did."""
    try:
        result = target(**arguments)
        if isinstance(result, AbstractContextManager) and target is minifloat.quantized_model_init:
            result.__enter__()  # which is where a name is looked up
    except (TypeError, ValueError) as error:
        named = parameter in str(error) or parameter.rstrip("s") in str(error)
        return None if named else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "a result"


def _calls() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any], str]]:
    needed = _needed()
    for name, target in _public():
        for parameter in inspect.signature(target).parameters:
            if parameter in FREE:
                continue
            for label, value in VALUES.items():
                if label not in _accepted(name, parameter):
                    arguments = needed.get(name, {}) | {parameter: value}
                    yield f"{name}({parameter}={label})", target, arguments, parameter


def test_bad_values_are_refused_by_name() -> None:
    """All of them; a new parameter has to be added to the table."""
    names = {(name, each) for name, target in _public() for each in inspect.signature(target).parameters}
    unknown = {each for name, each in names if each not in {*KINDS, *FREE}}
    assert not unknown, f"say in NAMES what {unknown} are"
    calls = list(_calls())
    wrong = {call: outcome for call, *how in calls if (outcome := _outcome(*how)) is not None}
    share = 1 - len(wrong) / len(calls)
    shown = "\n".join(f"{call}: {outcome[:150]}" for call, outcome in wrong.items())
    assert len(calls) > 3000
    assert share == 1, f"{len(wrong)} of {len(calls)} bad calls ({share:.1%} refused):\n{shown}"


def test_what_is_needed_is_enough() -> None:
    """The calls of the table fail for nothing but the bad value."""
    needed, skipped = _needed(), {"full_state_dict", "data_parallel", "fully_shard", "load_full_state_dict"}
    for name, target in _public():
        ranks = name in skipped or "sharded" in name
        if not ranks and name not in ("set_tensor_parallel_group", "hooks"):
            made = target(**needed.get(name, {}))
            if name == "inspect":  # which stays open
                made.close()


@each_twice
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_results_of_products_are_floating_point(gemm: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"{gemm}: out_dtype is {dtype}; torch.float32, torch.bfloat16.* is needed"):
        getattr(minifloat.functional, gemm)(**_needed()[gemm] | {"out_dtype": dtype})


@pytest.mark.parametrize("x", ["text", None, [1.0], 3, OBJECT])
def test_what_is_quantized_is_a_tensor(x: Any) -> None:
    """An AttributeError of a method would name none of the arguments."""
    with pytest.raises(TypeError, match=r"x is .*; a torch.Tensor is needed"):
        minifloat.Quantizer(minifloat.Format())(x)


def test_lists_of_gradients_hold_tensors() -> None:
    """A model iterates over modules if it is a container."""
    wrong: tuple[Any, ...] = (nn.Sequential(nn.Linear(2, 2)), [None], ["weight"], [1.0])
    for parameters in wrong:
        for call in (lambda p: minifloat.optim.clip_grad_norm_(p, 1.0), minifloat.optim.gradient_norm):
            with pytest.raises(TypeError, match="parameters"):
                call(parameters)
