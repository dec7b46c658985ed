"""What ``benchmarks/digest.py`` records: steps of modules, casts, losses, optimizers, on one process and on ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import minifloat
from minifloat import DelayedScaling, Format, Linear, Quantizer, QuantizerRole, distributed

BF16, FP32 = torch.bfloat16, torch.float32
Results = dict[str, Any]
Entry = Callable[[torch.device], Results]


def hybrid(role: QuantizerRole) -> Any:
    """MXFP8 forward and NVFP4 backward for inputs, delayed scaling for weights, E5M2 for gradients."""
    if role.tensor_type == "weight":
        return minifloat.DelayedScalingRequest(amax_history_len=4)
    if role.tensor_type == "grad_output":
        return Quantizer(Format("e5m2"))
    rowwise, columnwise = Format(block=32, scale_rule="e8m0"), Format("e2m1", 16, scale_rule="two_level")
    return Quantizer(rowwise, columnwise, columnwise_source="rowwise_dequantized")


CURRENT, MXFP8, NVFP4 = minifloat.Float8CurrentScaling, minifloat.MXFP8BlockScaling, minifloat.NVFP4BlockScaling
HYBRID = MXFP8().fp8_format.HYBRID
MAIN: dict[str, Any] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": CURRENT(),
    "block": minifloat.Float8BlockScaling(),
    "mxfp8": MXFP8(),
    "nvfp4": NVFP4(),
    "custom": minifloat.CustomRecipe(hybrid),
}
VARIANTS: dict[str, Any] = {
    "delayed most_recent": DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=1),
    "current pow2": CURRENT(use_power_2_scales=True, amax_epsilon=1e-3),
    "current e4m3": CURRENT(fp8_format=HYBRID.E4M3),
    "block fp32": minifloat.Float8BlockScaling(use_f32_scales=True, fp8_format=HYBRID),
    "mxfp8 2d hybrid": MXFP8(enable_2d_quantization=True, fp8_format=HYBRID),
    "nvfp4 plain": NVFP4(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
    "nvfp4 row-scaled": NVFP4(disable_rht=True, row_scaled_activation=True),
    "nvfp4 4over6 mae": NVFP4(nvfp4_4over6="weights"),
    "nvfp4 4over6 mse": NVFP4(
        disable_rht=True, nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE", nvfp4_4over6_e4m3_use_256="weights"
    ),
} | {
    f"{name} {override}": replace(recipe, backward_override=override)
    for name, recipe in MAIN.items() if name not in ("delayed", "custom")
    for override in ("high_precision", "dequantized")
}  # fmt: skip
RECIPES = MAIN | VARIANTS


def data(shape: Any, device: torch.device, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


# ---- casts ----


def cast(quantizer: Quantizer, dtype: torch.dtype, device: torch.device) -> Results:
    """Codes, scales and amaxes of even and odd shapes, of few rows and none, and of special values."""
    special = data((33, 64), device, 1, dtype)
    special[0], special[1], special[2, :3] = 0, 1e-40, torch.tensor([float("inf"), -float("inf"), float("nan")])
    special[3], special[4, 5], special[:, 7] = special[3] * 1e-6, 3e38, -0.0
    xs = {f"{m}x{k}": data((m, k), device, m, dtype) for m, k in ((160, 256), (37, 53), (33, 66), (1, 16), (0, 48))}
    xs |= {"special": special, "transposed": data((64, 48), device, 2, dtype).t(), "3-D": xs["160x256"].view(5, 32, -1)}
    out: Results = {}
    for name, x in xs.items():
        scales = [torch.tensor([0.37], device=device)]
        try:
            for ready in (False, True):
                quantized = minifloat.cast_all([x], [quantizer], scales=scales, gemm_ready=ready)[0]
                values = [None if each is None else each.dequantize() for each in quantized]
                out[name + " for GEMMs" * ready] = [minifloat.find_amaxes([x], [quantizer]), quantized, values]
        except (ValueError, TypeError) as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


def quantizers() -> dict[str, Quantizer]:
    """Those of all recipes, each once."""
    found: dict[Quantizer, str] = {}
    for (name, recipe), role in product(RECIPES.items(), ("input", "weight", "grad_output")):
        found.setdefault(recipe.quantizer(QuantizerRole("linear", role)), f"{name} {role}")
    return {name: quantizer for quantizer, name in found.items()}


# ---- modules ----


@dataclass(frozen=True)
class Case:
    """A module and a few steps of it.

    Args:
        make: the module, from its options.
        shape: of X.
        options, call: of constructor and forward.
        ways: ``"autocast"``, ``"quantized"`` weights, ``"amp"``, ``"frozen"`` weights, ``"no dX"``, ``"no grad"``,
            ``"checkpoint"``, ``"aot_eager"``, ``"inductor"``, ``"parallel"``: the module is called by ranks.
        same: what is the same on all ranks, of ``"x"`` and ``"dy"``.
    """

    make: Callable[..., nn.Module]
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    ways: tuple[str, ...] = ()
    dtype: torch.dtype = BF16
    same: tuple[str, ...] = ()

    def seed(self, seed: int, name: str) -> int:
        return seed + (dist.get_rank() * 1000 if dist.is_initialized() and name not in self.same else 0)


def filled(module: nn.Module) -> nn.Module:
    """Norms and biases other than ones and zeros."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            seed = zlib.crc32(name.encode())
            parameter.data.add_(data(parameter.shape, parameter.device, seed, parameter.dtype) / 4)
    return module


def stepped(case: Case, recipe: Any, device: torch.device) -> Results:
    """Outputs and gradients of all steps, the gradients of parameters and the buffers after the last."""
    own = None if "autocast" in case.ways else recipe
    with minifloat.quantized_model_init("quantized" in case.ways, recipe="current" if recipe == "none" else recipe):
        module = filled(case.make(recipe=own, **case.options)).to(device)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("frozen" not in case.ways or "weight" not in name)
        if "fuse_wgrad_accumulation" in case.options and parameter.dim() == 2:
            parameter.main_grad = torch.zeros(parameter.shape, dtype=FP32, device=device)  # type: ignore[attr-defined]
    call: Any = module
    if "autocast" in case.ways:
        minifloat.prepare(module, recipe)
    for backend in {"aot_eager", "inductor"} & set(case.ways):
        torch._dynamo.reset()
        call = torch.compile(module, backend=backend)
    if "checkpoint" in case.ways:
        call = partial(minifloat.checkpoint, module)
    stateful = isinstance(recipe, (DelayedScaling, minifloat.CustomRecipe))
    out: Results = {}
    for step in range(3 if stateful or "is_first_microbatch" in case.call else 1):
        x = data(case.shape, device, case.seed(step, "x"), case.dtype) * 3**step
        x.requires_grad_("no dX" not in case.ways)
        options = dict(case.call)
        if "is_first_microbatch" in options:
            options["is_first_microbatch"] = step != 1
        with ExitStack() as stack:
            if "autocast" in case.ways:
                stack.enter_context(minifloat.autocast(recipe=recipe))
            if "amp" in case.ways:
                stack.enter_context(torch.autocast(device.type, BF16))
            if "no grad" in case.ways:
                stack.enter_context(torch.no_grad())
            y = call(x, **options)
        ys = y if isinstance(y, tuple) else (y,)
        out[f"y {step}"] = ys
        ends = [each for each in ys if isinstance(each, Tensor) and each.requires_grad]
        if ends:
            seeds = range(100 + step, 1000, 10)
            torch.autograd.backward(
                ends,
                [data(e.shape, device, case.seed(s, "dy"), e.dtype) for e, s in zip(ends, seeds, strict=False)],
            )
        if case.options.get("delay_wgrad_compute"):
            module.backward_dw()
        out[f"dX {step}"] = x.grad
    for name, parameter in module.named_parameters():
        out[f"{name} gradient"] = [parameter.grad, getattr(parameter, "main_grad", None)]
    out["state"] = {name: value for name, value in module.state_dict().items() if "_scaling." in name}
    if "quantized" in case.ways:
        out["parameters"] = list(module.parameters())
    return out


LINEAR = {"even": Case(partial(Linear, 256, 144), (2, 80, 256)), "odd": Case(partial(Linear, 53, 39), (3, 7, 53))}
LINEAR_OPTIONS: dict[str, Results] = {
    "no bias": {"options": {"bias": False}},
    "three parameters": {"options": {"parameters_split": ("one", "two", "three")}},
    "main_grad": {"options": {"fuse_wgrad_accumulation": True}},
    "main_grad microbatches": {
        "options": {"fuse_wgrad_accumulation": True}, "call": {"is_first_microbatch": True}
    },
    "dW later": {"options": {"delay_wgrad_compute": True}},
    "original input": {"options": {"save_original_input": True}},
    "bias apart": {"options": {"return_bias": True}},
    "bf16 parameters": {"options": {"dtype": BF16}},
    "fp8_output": {"call": {"fp8_output": True}},
    "fp8_grad": {"call": {"fp8_grad": True}},
    "microbatches": {"call": {"is_first_microbatch": True}},
    "fp32": {"dtype": FP32},
} | {way: {"ways": (way,)} for way in ("autocast", "quantized", "frozen", "no dX", "no grad", "checkpoint")} | {
    "amp": {"ways": ("amp",), "dtype": FP32},
    "quantized microbatches": {"ways": ("quantized",), "call": {"is_first_microbatch": True}},
}  # fmt: skip
NORM_LINEAR = Case(partial(minifloat.LayerNormLinear, 64, 48), (3, 16, 64))
MLP = Case(partial(minifloat.LayerNormMLP, 64, 96), (3, 16, 64))
ODD_MLP = Case(partial(minifloat.LayerNormMLP, 38, 50), (3, 7, 38))
ATTENTION = Case(partial(minifloat.MultiheadAttention, 64, 4, attention_dropout=0.0), (16, 2, 64))
LAYER = Case(partial(minifloat.TransformerLayer, 64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0), (16, 2, 64))
GATED = {"activation": "swiglu", "normalization": "RMSNorm"}
SPLITS = {"m_splits": [33, 0, 14, 1]}
GROUPED = Case(partial(minifloat.GroupedLinear, 4, 64, 48), (48, 64), call=SPLITS)
EXPERTS = Case(partial(minifloat.GroupedMLP, 4, 64, 96), (48, 64), call=SPLITS)
MIXTURE = Case(partial(minifloat.MoE, 64, 96, 8), (3, 16, 64))
FUSED: dict[str, tuple[Case, dict[str, Results]]] = {
    "LayerNormLinear": (NORM_LINEAR, {
        "": {}, "RMSNorm": {"options": {"normalization": "RMSNorm", "zero_centered_gamma": True, "bias": False}},
        "norm's result": {"options": {"return_layernorm_output": True}}, "quantized": {"ways": ("quantized",)},
        "recompute_norm": {"options": {"recompute_norm": True}}, "fp8_output": {"call": {"fp8_output": True}},
        "dW later, main_grad": {"options": {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}},
        "residual": {"call": {"return_residual": True}}, "fp32": {"dtype": FP32}, "autocast": {"ways": ("autocast",)},
        "odd": {"make": partial(minifloat.LayerNormLinear, 53, 37), "shape": (3, 7, 53)},
    }),
    "LayerNormMLP": (MLP, {
        "": {}, "gated": {"options": GATED}, "checkpoint": {"options": {"checkpoint": True}},
        "recomputed": {"options": {"recompute_norm": True, "recompute_activation": True, **GATED}},
        "microbatches": {"call": {"is_first_microbatch": True}}, "quantized": {"ways": ("quantized",)},
        "dW later, main_grad": {"options": {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}},
        "odd": {"make": ODD_MLP.make, "shape": ODD_MLP.shape}, "fp32": {"dtype": FP32, "options": {"bias": False}},
        "odd gated": {"make": ODD_MLP.make, "shape": ODD_MLP.shape, "options": GATED}, "amp": {"ways": ("amp",)},
    }),
    "MultiheadAttention": (ATTENTION, {
        "": {}, "norm": {"options": {"input_layernorm": True, "fuse_qkv_params": True}},
        "grouped": {"options": {"num_gqa_groups": 2, "qk_norm_type": "RMSNorm"}},
        "cross": {"options": {"attention_type": "cross", "input_layernorm": True}},
        "checkpoint": {"call": {"checkpoint_core_attention": True}},
    }),
    "TransformerLayer": (LAYER, {
        "": {}, "gated": {"options": GATED | {"num_gqa_groups": 2}}, "save_memory": {"options": {"save_memory": True}},
        "decoder": {"options": {"layer_type": "decoder"}}, "parallel": {"options": {"parallel_attention_mlp": True}},
        "norm's residual": {"options": {"apply_residual_connection_post_layernorm": True}},
        "quantized": {"ways": ("quantized",)}, "autocast": {"ways": ("autocast",)}, "checkpoint": {
            "ways": ("checkpoint",)}, "dropout": {"make": partial(minifloat.TransformerLayer, 64, 96, 4)},
    }),
    "GroupedLinear": (GROUPED, {
        "": {}, "one weight": {"options": {"single_grouped_weight": True}}, "quantized": {"ways": ("quantized",)},
        "dW later, main_grad": {"options": {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}},
        "odd": {"make": partial(minifloat.GroupedLinear, 4, 53, 37), "shape": (48, 53)}, "fp32": {"dtype": FP32},
        "microbatches": {"call": SPLITS | {"is_first_microbatch": True}}, "autocast": {"ways": ("autocast",)},
        "frozen": {"ways": ("frozen",)}, "no dX": {"ways": ("no dX",)}, "no bias": {"options": {"bias": False}},
        "fp8_output": {"call": SPLITS | {"fp8_output": True}}, "aot_eager": {"ways": ("aot_eager",)},
    }),
    "GroupedMLP": (EXPERTS, {
        "": {}, "geglu, biases": {"options": {"activation": "geglu", "bias": True}}, "quantized": {
            "ways": ("quantized",)}, "recomputed": {"options": {"recompute_activation": True}},
        "srelu": {"options": {"activation": "srelu"}}, "one weight": {"options": {"single_grouped_weight": True}},
        "odd": {"make": partial(minifloat.GroupedMLP, 4, 38, 50), "shape": (48, 38)}, "fp32": {"dtype": FP32},
    }),
    "MoE": (MIXTURE, {
        "": {}, "shared": {"options": {"shared_ffn_hidden_size": 48}}, "autocast": {"ways": ("autocast",)},
        "quantized": {"ways": ("quantized",)}, "microbatches": {"call": {"is_first_microbatch": True}},
    }),
}  # fmt: skip
ACTIVATIONS = (
    "gelu", "qgelu", "relu", "srelu", "silu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu", "glu"
)  # fmt: skip


def module_entries() -> Iterator[tuple[str, Case, str]]:
    """Name, case and recipe."""
    for recipe, (size, case) in product(RECIPES | {"none": "none"}, LINEAR.items()):
        yield f"Linear {size}", replace(case, dtype=FP32) if recipe == "none" else case, recipe
    for recipe, (size, case), (name, changes) in product(MAIN, LINEAR.items(), LINEAR_OPTIONS.items()):
        yield f"Linear {size} {name}", replace(case, **changes), recipe
    for kind, (case, rows) in FUSED.items():
        for recipe, (name, changes) in product(MAIN | {"none": "none"}, rows.items()):
            changed = replace(case, **(changes | {"dtype": FP32} if recipe == "none" else changes))
            if recipe == "none" and "autocast" in changed.ways:
                continue
            if "residual" in name and kind == "LayerNormLinear":
                changed = replace(changed, make=with_residual(changed.make))
            if name in ("cross", "decoder"):
                changed = replace(changed, make=with_encoder(changed.make))
            yield f"{kind} {name}".strip(), changed, recipe
    for recipe in VARIANTS:
        yield "LayerNormMLP gated", replace(MLP, options=GATED), recipe
    for recipe, name in product(("delayed", "mxfp8"), ACTIVATIONS):
        yield f"LayerNormMLP {name}", replace(MLP, options={"activation": name}), recipe
    for recipe in MAIN:
        yield "Linear even aot_eager", replace(LINEAR["even"], ways=("aot_eager",)), recipe
    for recipe in ("current", "mxfp8"):
        yield "LayerNormMLP aot_eager", replace(MLP, ways=("aot_eager",)), recipe
    yield "Linear even inductor", replace(LINEAR["even"], ways=("inductor",), options={"bias": False}), "current"


class Second(nn.Module):
    """Calls a module with X, and with the same as its second tensor under ``name``."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module, self.name = module, name

    def forward(self, x: Tensor, **options: Any) -> Any:
        return self.module(x, **{self.name: (x * 0.5).roll(1, 0)}, **options)


def with_residual(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    return lambda **options: Second(make(**options), "residual")


def with_encoder(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    return lambda **options: Second(make(**options), "encoder_output")


# ---- losses, optimizers, conversion, training ----


def losses(device: torch.device, **options: Any) -> Results:
    """Both losses of odd sizes, some targets ignored, with their gradients."""
    hidden, weight = (data(s, device, i).requires_grad_() for i, s in enumerate([(3, 7, 24), (53, 24)]))
    bias, target = data((53,), device, 2).requires_grad_(), data((3, 7), device, 3, FP32).mul(20).abs().long() % 53
    target[0, :2] = -100
    logits = (hidden @ weight.t()).detach().requires_grad_()
    out: Results = {}
    for reduction in ("mean", "sum", "none"):
        loss = minifloat.cross_entropy(logits, target, reduction=reduction, **options)
        out[f"loss {reduction}"] = loss, torch.autograd.grad(loss.sum(), logits)
    for reduction in ("mean", "sum"):
        loss = minifloat.linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, **options)
        out[f"linear loss {reduction}"] = loss, torch.autograd.grad(loss, [hidden, weight, bias])
    return out


def model_of(recipe: Any) -> nn.Sequential:
    """Odd sizes, a fused module, a part in high precision."""
    return nn.Sequential(
        Linear(24, 70, recipe=recipe),
        minifloat.LayerNormMLP(70, 33, recipe=recipe, activation="swiglu"),
        nn.LayerNorm(70),
        Linear(70, 17, recipe="none"),
    )


def optimized(recipe: Any, kind: str, device: torch.device) -> Results:
    """Parameters and losses of three steps. ``kind``: of the masters of quantized parameters."""
    with minifloat.quantized_model_init(True, recipe, preserve_high_precision_init_val=True):
        model = model_of(recipe).to(device)
    master: Any = kind.removesuffix(" masters")
    if master == "bf16+remainder":
        model.bfloat16()
    optimizer = minifloat.optim.MasterWeights(model.parameters(), torch.optim.AdamW, master=master, lr=0.02)
    out = trained(model, optimizer, device, 3)
    return out | {"optimizer": optimizer.state_dict()["state"]}


def trained(model: nn.Module, optimizer: Any, device: torch.device, steps: int) -> Results:
    """Steps on data that differ by rank: outputs, norms of clipped gradients, gradients, parameters, buffers."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    out: Results = {}
    for step in range(steps):
        x = data((5, 3, 24), device, 10 * step + rank, next(model.parameters()).dtype).requires_grad_()
        y = model(x)
        y.backward(data(y.shape, device, 10 * step + 5 + rank, y.dtype))
        norm = minifloat.optim.clip_grad_norm_(model.parameters(), 1.0)
        out[f"step {step}"] = y, x.grad, norm, {name: p.grad for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return out | {"state": model.state_dict()}


def converted(recipe: Any, device: torch.device, quantize_weights: bool) -> Results:
    """A model of torch.nn, converted with a rule and reverted."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 48, bias=False)).to(device)
    rules = [("3", "mxfp8")]
    minifloat.convert(model, recipe, filter_fn=lambda *_: True, rules=rules, quantize_weights=quantize_weights)
    out = of_model(model, device)
    minifloat.revert(model)
    return out | {f"reverted {name}": value for name, value in of_model(model, device).items()}


def of_model(model: nn.Module, device: torch.device) -> Results:
    x = data((4, 16, 64), device, 0, FP32).requires_grad_()
    y = model(x)
    gradients = torch.autograd.grad(y, [x, *model.parameters()], data(y.shape, device, 1, y.dtype))
    return {"y": y, "gradients": gradients, "state": model.state_dict()}


class Language(nn.Module):
    """A small decoder: embedding, one layer, head."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 32)
        layer = partial(minifloat.TransformerLayer, 32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0)
        self.layer = layer(recipe=recipe, bias=False, **GATED)
        self.head = Linear(32, 96, bias=False, recipe=recipe)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, BF16):
            return minifloat.cross_entropy(self.head(self.layer(self.embedding(tokens))), target)


def training(recipe: Any, device: torch.device, steps: int = 20) -> Results:
    """The losses of the steps, and the parameters after them."""
    model = Language(recipe).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for step in range(steps):
        tokens = (data((17, 4), device, step, FP32).abs() * 30).long() % 96
        loss = model(tokens[:-1], tokens[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return {"losses": torch.stack(found), "state": model.state_dict()}


def entries() -> dict[str, Entry]:
    """All of one process, by name."""
    found: dict[str, Entry] = {}
    for (name, quantizer), dtype in product(quantizers().items(), (BF16, FP32)):
        found[f"cast {name} {str(dtype)[6:]}"] = partial(cast, quantizer, dtype)
    for name, case, recipe in module_entries():
        found[f"{name}, {recipe}"] = partial(stepped, case, RECIPES.get(recipe, "none"))
    for name, options in {"": {}, "smoothed": {"label_smoothing": 0.1}, "chunks": {"chunk_rows": 4}}.items():
        found[f"cross entropy {name}".strip()] = partial(losses, **options)
    for name, recipe in MAIN.items():
        for kind in ("fp32 masters", "bf16+remainder masters"):
            found[f"optimizer {kind}, {name}"] = lambda device, r=recipe, k=kind: optimized(r, k, device)
        for quantized in (False, True):
            found[f"convert{' quantized' * quantized}, {name}"] = lambda device, r=recipe, q=quantized: converted(
                r, device, q
            )
    for name, recipe in (MAIN | {"none": "none"}).items():
        found[f"training, {name}"] = partial(training, recipe)
    return found


# ---- ranks ----


def exchanged(quantizer: Quantizer, rows: tuple[int, ...], device: torch.device) -> Results:
    """A rank's part of the quantized whole, the gathered whole, and the same of operands that exist."""
    group, shards = distributed.Group.of(dist.group.WORLD), distributed.ShardMap(rows)
    x, scale = data((rows[group.rank], 64), device, group.rank), torch.tensor([0.37], device=device)
    rng = torch.tensor([7, 8], device=device)
    part = distributed.quantize_shard(x, quantizer, shards, group, scale=scale, rng=rng)
    own = minifloat.cast_all([x], [quantizer], scales=[scale], rngs=[rng])[0]
    again = distributed.prepare_shard(own, quantizer, shards, group, scale=scale, rng=rng)
    out: Results = {"part": part, "prepared": again}
    for ready in (False, True):
        gather = partial(distributed.gather, shards=shards, group=group, gemm_ready=ready)
        out["whole" + " for GEMMs" * ready] = gather(part, rowwise=quantizer.rowwise, columnwise=quantizer.columnwise)
    return out | {"prepared whole": distributed.gather(again, shards, group, rowwise=True, columnwise=True)}


def parallel(case: Case, recipe: Any, device: torch.device) -> Results:
    """A tensor-parallel module; X has this rank's of ``rows_per_rank`` unless the module is row-parallel."""
    rows = None if case.options.get("parallel_mode") == "row" else case.call.get("rows_per_rank")
    shape = case.shape if rows is None else (rows[dist.get_rank()], *case.shape[1:])
    return stepped(replace(case, shape=shape, options=case.options | {"tp_group": dist.group.WORLD}), recipe, device)


def parallel_cases() -> Iterator[tuple[str, Case]]:
    column, row = {"parallel_mode": "column"}, {"parallel_mode": "row"}
    sequence = {"sequence_parallel": True}
    for size, k, n, rows in (("even", 128, 256, 64), ("odd", 38, 54, 5)):
        unequal = {"rows_per_rank": (rows + 3, rows - 2)}
        linear, norm = partial(Linear, k, n), partial(minifloat.LayerNormLinear, k, n)
        mlp = partial(minifloat.LayerNormMLP, k, n, set_parallel_mode=True, **GATED)
        whole, half = (rows, 2, k), (rows, 2, k // 2)
        yield f"column {size}", Case(linear, whole, column, same=("x",))
        yield f"row {size}", Case(linear, half, row, same=("dy",))
        yield f"MLP {size}", Case(mlp, whole, same=("x", "dy"))
        for name, call in (("", {}), (" unequal", unequal)):
            total = sum(unequal["rows_per_rank"]) if call else 2 * rows
            yield f"column sequence {size}{name}", Case(linear, whole, column | sequence, call)
            yield f"row sequence {size}{name}", Case(linear, (total, 2, k // 2), row | sequence, call)
            yield f"LayerNormLinear sequence {size}{name}", Case(norm, whole, column | sequence, call)
            yield f"MLP sequence {size}{name}", Case(mlp, whole, sequence, call)
        for way in ("main_grad", "original input", "microbatches", "dW later", "quantized", "autocast"):
            changes = LINEAR_OPTIONS[way]
            case = Case(linear, whole, column | sequence | changes.get("options", {}), changes.get("call", {}))
            yield f"column sequence {size} {way}", replace(case, ways=changes.get("ways", ()))
    layer = Case(partial(LAYER.make, set_parallel_mode=True), LAYER.shape, same=("x", "dy"))
    yield "TransformerLayer", layer
    yield "TransformerLayer sequence", replace(layer, options=GATED | sequence, same=())


def sharded(recipe: Any, quantized: bool, device: torch.device) -> Results:
    """Three steps under fully_shard, and the whole state."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with minifloat.quantized_model_init(quantized, recipe, preserve_high_precision_init_val=True):
        model = model_of(recipe).to(device)
    for part in [*model, model]:
        distributed.fully_shard(part, mesh=mesh)
    if quantized:
        optimizer: Any = minifloat.optim.MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.02)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return trained(model, optimizer, device, 3) | {"whole": distributed.full_state_dict(model)}


def replicated(recipe: Any, device: torch.device) -> Results:
    """Two steps under DistributedDataParallel."""
    model = distributed.data_parallel(model_of(recipe).to(device))
    return trained(model, torch.optim.AdamW(model.parameters(), lr=0.02), device, 2)


def shared_losses(device: torch.device) -> Results:
    """The losses of classes that are split over the ranks, and the embedding of such a vocabulary."""
    group, rank = dist.group.WORLD, dist.get_rank()
    weight, hidden = data((53, 24), device, 1), data((3, 7, 24), device, 2).requires_grad_()
    own = weight.split([27, 26])[rank].contiguous().requires_grad_()
    target = data((3, 7), device, 3, FP32).mul(20).abs().long() % 53
    logits = (hidden @ own.t()).detach().requires_grad_()
    loss = minifloat.cross_entropy(logits, target, tp_group=group, classes=53)
    linear_loss = minifloat.linear_cross_entropy(hidden, own, target, tp_group=group, classes=53)
    embedding = minifloat.VocabParallelEmbedding(53, 24, tp_group=group).to(device)
    y = embedding(target)
    y.backward(data(y.shape, device, 4, y.dtype))
    return {
        "loss": [loss, torch.autograd.grad(loss, logits)],
        "linear loss": [linear_loss, torch.autograd.grad(linear_loss, [hidden, own])],
        "embedding": [y, embedding.weight.grad],
    }


def parallelized(recipe: Any, device: torch.device) -> Results:
    """A layer that ``parallelize`` made parallel."""
    make = lambda **options: distributed.parallelize(LAYER.make(**options), dist.group.WORLD)  # noqa: E731
    return stepped(replace(LAYER, make=make), recipe, device)


def rank_entries() -> dict[str, Entry]:
    """All of two ranks, by name."""
    found: dict[str, Entry] = {}
    for (name, quantizer), rows in product(quantizers().items(), ((64, 64), (37, 20), (0, 5))):
        found[f"gather {rows} {name}"] = partial(exchanged, quantizer, rows)
    for name, case in parallel_cases():
        for recipe_name, recipe in MAIN.items():
            found[f"{name}, {recipe_name}"] = partial(parallel, case, recipe)
        if "autocast" not in case.ways:
            found[f"{name}, none"] = partial(parallel, replace(case, dtype=FP32), "none")
    for name, recipe in MAIN.items():
        for quantized in (False, True):
            found[f"fully_shard{' quantized' * quantized}, {name}"] = partial(sharded, recipe, quantized)
        found[f"DDP, {name}"] = partial(replicated, recipe)
        found[f"parallelize, {name}"] = partial(parallelized, recipe)
    found["vocabulary"] = shared_losses
    return {f"ranks: {name}": entry for name, entry in found.items()}
