"""Single layers under extended tensor parallelism: every option, beside the unsharded layer of the same seed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import minifloat
from minifloat.distributed import reduce_replicated
from tests.helpers.distributed_pool import process_group
from tests.helpers.etp_cases import own_rows
from tests.helpers.tensor_parallel_oracle import in_rank_order

WIDTH = 24
Make = Callable[..., nn.Module]


def linear(**options: Any) -> nn.Module:
    return minifloat.LayerNormLinear(WIDTH, 37, dtype=torch.bfloat16, **options)


def mlp(**options: Any) -> nn.Module:
    return minifloat.LayerNormMLP(WIDTH, 41, dtype=torch.bfloat16, **options)


def attention(**options: Any) -> nn.Module:
    return minifloat.MultiheadAttention(WIDTH, 4, attention_dropout=0.0, dtype=torch.bfloat16, **options)


def decoder(**options: Any) -> nn.Module:
    sizes = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "layer_type": "decoder", "dtype": torch.bfloat16}
    return minifloat.TransformerLayer(WIDTH, 41, 4, **sizes, **options)


OPTIONS: dict[str, tuple[Make, dict[str, Any], dict[str, Any]]] = {
    "split": (linear, {"parameters_split": {"a": 30, "b": 7}, "recompute_norm": True}, {}),
    "split, empty rows": (linear, {"parameters_split": {"a": 1, "b": 35, "c": 1}, "return_bias": True}, {}),
    "norm's result": (linear, {"return_layernorm_output": True}, {"return_residual": True}),
    "quantized output": (linear, {}, {"fp8_output": True}),
    "main_grad": (mlp, {"fuse_wgrad_accumulation": True, "recompute_activation": True}, {}),
    "delayed dW": (mlp, {"delay_wgrad_compute": True, "activation": "swiglu"}, {}),
    "delayed dW to main_grad": (linear, {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}, {}),
    "checkpointed": (mlp, {"checkpoint": True, "recompute_norm": True, "activation": "geglu"}, {}),
    "attention": (attention, {"num_gqa_groups": 2, "input_layernorm": True, "qk_norm_type": "RMSNorm"}, {}),
    "no norm": (attention, {"save_original_input": True}, {"checkpoint_core_attention": True}),
    "decoder": (decoder, {"apply_residual_connection_post_layernorm": True}, {"encoder_output": True}),
}


def step(layer: nn.Module, x: Tensor, options: dict[str, Any], first: bool) -> dict[str, Tensor]:
    """Outputs, dX and the gradients, after one more microbatch."""
    options = options | ({"encoder_output": x.flip(0)} if options.get("encoder_output") else {})
    x = x.clone().requires_grad_()
    outputs = layer(x, is_first_microbatch=first, **options)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None and y.requires_grad]
    torch.autograd.backward(outputs, [torch.cos(3 * y.detach().float()).to(y.dtype) for y in outputs])
    if getattr(layer, "linear", getattr(layer, "fc1", layer)).__dict__.get("delay_wgrad_compute"):
        layer.backward_dw()
    found = {f"y{i}": y.detach().float() for i, y in enumerate(outputs)} | {"x": x.grad}
    for name, parameter in layer.named_parameters():
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            found[name] = gradient.clone()
    return found


def with_main_grad(layer: nn.Module) -> nn.Module:
    for each in layer.modules():
        if getattr(each, "fuse_wgrad_accumulation", False):
            each.weight.main_grad = torch.full_like(each.weight, 7.0, dtype=torch.float32)  # to be replaced
    return layer


def compare_layers(rank: int, size: int, recipe: str) -> list[str]:
    """What differs after two microbatches, for every entry of ``OPTIONS``: nothing."""
    different = []
    for case, (make, options, call) in OPTIONS.items():
        torch.manual_seed(1)
        whole = make(recipe=recipe, **options)
        torch.manual_seed(1)
        layer = copy.deepcopy(make(recipe=recipe, etp_group=process_group(), **options))
        assert "etp_size=2" in repr(layer)
        reduce_replicated(layer, process_group())
        rows = own_rows(layer)
        with_main_grad(layer)
        sums: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(2)
        for first in (True, False):
            xs = [torch.randn(6, 2, WIDTH, generator=generator).bfloat16() for _ in range(size)]
            found = step(layer, xs[rank], call, first)
            each = [step(with_main_grad(copy.deepcopy(whole)), x, call, True) for x in xs]
            assert found.keys() == each[rank].keys(), case
            for name, own in found.items():
                wanted = each[rank][name]
                if name in dict(layer.named_parameters()):
                    total = in_rank_order([of_rank[name] for of_rank in each]) / size
                    wanted = total[rows[name]] if name in rows else total
                    wanted = sums[name] = wanted if first else sums[name] + wanted
                if not torch.equal(own, wanted):
                    different.append(f"{case}: {name}, {'first' if first else 'second'}")
    return different
