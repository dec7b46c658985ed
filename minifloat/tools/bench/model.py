"""Suite ``model``: whole training steps of language models: forward, cross entropy, backward, a fused AdamW.

Blocks differ. Embedding, last norm, head, loss and optimizer are PyTorch's, and all contenders of a row train the same
parameters with the same moments, so that a model of a billion of them is in memory once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifloat import RotaryPositionEmbedding, TransformerLayer, autocast, cast_weights
from minifloat.graphs import capture
from minifloat.tools.bench import peers
from minifloat.tools.bench.fused import EPS, Sizes, TorchLayer
from minifloat.tools.bench.registry import Call, Case, Contender, Measure, Outputs, Row, UnavailableError
from minifloat.tools.bench.run import WARM_UP

Way = Literal["eager", "compiled", "reduce-overhead", "captured"]
Context = Callable[[], AbstractContextManager[Any]]

RECIPES = ("current", "delayed", "block")
WAYS: tuple[Way, ...] = ("eager", "compiled", "reduce-overhead", "captured")
FOUND = 4  # steps, in the last of which delayed scaling has its scales, of linears that follow each other too
STEPS = WARM_UP + 1  # which are checked before any is timed
RATE = 3e-4  # of learning, between the two
ROTARY_BASE = 500_000.0
COMPILED = ("compiled", "reduce-overhead")
META = torch.device("meta")
BOUNDS = {"bf16": 0.02, "current": 0.1, "delayed": 0.1, "block": 0.1, "mxfp8": 0.1}
"""The largest error of a training, as :meth:`Training.error` measures it."""


@dataclass(frozen=True)
class Model:
    """A model and the batch of a step. Llama: RMSNorm, SwiGLU, rotary positions; else GPT-2: biases and GELU."""

    sizes: Sizes
    layers: int
    vocabulary: int
    llama: bool
    goals: Mapping[tuple[str, Way], float]
    """Ratios to PyTorch's fastest way, by recipe and way."""

    def tiny(self) -> Model:
        """Sizes for a CPU."""
        sizes = Sizes(batch=2, tokens=32, hidden=64, ffn=256, heads=4, groups=2 if self.llama else 4)
        return replace(self, sizes=sizes, layers=2, vocabulary=256)


MODELS = {
    "Llama-3.2-1B, 4 x 2048 tokens": Model(
        Sizes(batch=4, tokens=2048, hidden=2048, ffn=8192, heads=32, groups=8), 16, 128256, True,
        {
            ("current", "eager"): 1.27, ("current", "compiled"): 1.27, ("current", "captured"): 1.32,
            ("delayed", "eager"): 1.33, ("delayed", "compiled"): 1.33, ("delayed", "captured"): 1.36,
            ("block", "eager"): 1.18, ("block", "compiled"): 1.18, ("block", "captured"): 1.22,
            ("current", "reduce-overhead"): 1.34, ("block", "reduce-overhead"): 1.28,
        },
    ),
    "GPT-2 small, 4 x 1024 tokens": Model(
        Sizes(batch=4, tokens=1024, hidden=768, ffn=3072, heads=12, groups=12), 12, 50304, False,
        {("current", "captured"): 1.1, ("current", "reduce-overhead"): 1.1},
    ),
}  # fmt: skip


class Made(NamedTuple):
    """A model, what its forward runs under, and what forward and backward together do."""

    module: nn.Module
    forward: Context = nullcontext
    step: Context = nullcontext


class GPTBlock(nn.Module):
    """LayerNorm, causal attention, LayerNorm, GELU MLP, with biases: plain PyTorch."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, sizes.hidden, EPS, device=device, dtype=dtype)
        linear = partial(nn.Linear, device=device, dtype=dtype)
        self.heads = sizes.heads
        self.norm1, self.qkv, self.proj = norm(), linear(sizes.hidden, sizes.qkv), linear(sizes.hidden, sizes.hidden)
        self.norm2, self.fc1, self.fc2 = norm(), linear(sizes.hidden, sizes.ffn), linear(sizes.ffn, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        result: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))
        return result


class LanguageModel(nn.Module):
    """Tokens and the ones after them [B, T] to their mean cross entropy; the head is the embedding's table.

    ``rotary``: what each block takes for ``rotary_pos_emb``; None: they take none, and positions are learned.
    """

    def __init__(self, model: Model, blocks: Iterable[nn.Module], rotary: Any) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": META, "dtype": torch.bfloat16}
        self.embedding = nn.Embedding(model.vocabulary, model.sizes.hidden, **made)
        self.positions = None if model.llama else nn.Embedding(model.sizes.tokens, model.sizes.hidden, **made)
        self.blocks = nn.ModuleList(blocks)
        self.norm = (nn.RMSNorm if model.llama else nn.LayerNorm)(model.sizes.hidden, EPS, **made)
        self.options = {"rotary_pos_emb": rotary} if model.llama else {}

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        for block in self.blocks:
            x = block(x, **self.options)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Training:
    """Parameters, optimizer and batch that the contenders of a row share, and the results of :data:`STEPS` steps."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model, self.device, sizes = model, device, model.sizes
        generator = torch.Generator(device).manual_seed(0)
        drawn = torch.randint(model.vocabulary, (sizes.batch, sizes.tokens + 1), device=device, generator=generator)
        self.batch = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        self.angles = RotaryPositionEmbedding(sizes.hidden // sizes.heads, rotary_base=ROTARY_BASE)(sizes.tokens)
        self.angles = self.angles.to(device)
        named = list(self.torch_model().module.named_parameters())
        self.weights = [torch.empty_like(each, device=device, requires_grad=False) for _, each in named]
        self.states = [
            {"step": torch.zeros((), device=device)}
            | {name: torch.zeros_like(each) for name in ("exp_avg", "exp_avg_sq")}
            for each in self.weights
        ]
        self.means = [float(each.dim() == 1 and "bias" not in name) for name, each in named]  # 1 of norms' weights
        self.rate = torch.zeros((), device=device)
        self.pool: Any = None  # of graphs, which take the same memory in turn, on one stream
        self.reset()
        step = Step(self, self.torch_model())
        (self.first, _), *_, (self.last, self.norm) = [[float(each) for each in step()] for _ in range(STEPS)]

    @cached_property
    def stream(self) -> capture.CaptureStream:
        """Stream on which steps are captured."""
        return capture.Graph.Stream(self.device)

    def reset(self) -> None:
        """Weights and moments are as before the first step."""
        generator = torch.Generator(self.device).manual_seed(1)
        for weight, mean in zip(self.weights, self.means, strict=True):
            weight.normal_(mean, 0.02, generator=generator)
        for state in self.states:
            for each in state.values():
                each.zero_()

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Puts these weights in the place of the module's own, in their order; an optimizer that has these moments.

        The parameters are the module's own: autograd keeps the stream on which it first saw one.
        """
        for (name, old), weight in zip([*module.named_parameters()], self.weights, strict=True):
            owner, _, leaf = name.rpartition(".")
            assert old.shape == weight.shape, (name, old.shape, weight.shape)
            setattr(module.get_submodule(owner), leaf, nn.Parameter(weight))
        capturable = self.device.type == "cuda"
        made = torch.optim.AdamW(module.parameters(), self.rate, fused=True, capturable=capturable)
        made.state.update(zip(module.parameters(), self.states, strict=True))
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and moments."""
        moments = [each for state in self.states for each in state.values()]
        return sum(each.nbytes for each in (*self.weights, *moments))

    @property
    def flops(self) -> float:
        """Counts operations of a step: products, the head's too, and causal attention, 2.5 times in backward."""
        sizes, tokens = self.model.sizes, self.batch[0].numel()
        matrices = sum(each.numel() for each in self.weights if each.dim() == 2)
        learned = 0 if self.model.llama else sizes.tokens * sizes.hidden
        attention = 3.5 * 4 * sizes.tokens / 2 * sizes.hidden * self.model.layers
        return tokens * (6.0 * (matrices - learned) + attention)

    def error(self, outputs: Outputs) -> float:
        """Distance of the last loss from PyTorch's in bf16, of its fall; or the gradient norm's, if that is more."""
        (loss, norm), fall = outputs, self.first - self.last
        return float(torch.stack([(loss - self.last) / fall, norm / self.norm - 1]).abs().max())  # NaN where one is

    def torch_model(self) -> Made:
        """PyTorch's."""
        block = TorchLayer if self.model.llama else GPTBlock
        blocks = [block(self.model.sizes, META, torch.bfloat16) for _ in range(self.model.layers)]
        angles = self.angles.flatten(1)
        return Made(LanguageModel(self.model, blocks, (angles.cos().bfloat16(), angles.sin().bfloat16())))

    def torchao_model(self, scaling: str) -> Made:
        """torchao's linears in PyTorch's model."""
        return Made(peers.torchao_converted(lambda: self.torch_model().module, scaling, self.device.type))

    def te_model(self, recipe: str) -> Made:
        """Transformer Engine's."""
        sizes = self.model.sizes
        layer = partial(
            peers.transformer_engine, "TransformerLayer", recipe, self.device.type, sizes.hidden, sizes.ffn,
            sizes.heads, num_gqa_groups=sizes.groups, layernorm_epsilon=EPS, hidden_dropout=0.0, attention_dropout=0.0,
            qkv_weight_interleaved=False, **self._options(),
        )  # fmt: skip
        layers = [layer() for _ in range(self.model.layers)]
        return Made(LanguageModel(self.model, [each.inner for each in layers], self.angles), layers[0].autocast)

    def our_model(self, recipe: str, way: Way) -> Made:
        """Ours, as ``minifloat train`` runs it: histories are updated together, weights cast so in uncompiled code."""
        sizes = self.model.sizes
        layer = partial(
            TransformerLayer, sizes.hidden, sizes.ffn, sizes.heads, sizes.groups, EPS, 0.0, 0.0, device=self.device,
            recipe=recipe, **self._options(),
        )  # fmt: skip
        module = LanguageModel(self.model, [layer() for _ in range(self.model.layers)], self.angles)
        together = partial(cast_weights, module) if way in ("eager", "captured") else nullcontext
        return Made(module, partial(autocast, enabled=False), together)

    def _options(self) -> dict[str, Any]:
        norm, activation = ("RMSNorm", "swiglu") if self.model.llama else ("LayerNorm", "gelu")
        return {
            "attn_input_format": "bshd", "fuse_qkv_params": True, "normalization": norm, "activation": activation,
            "bias": not self.model.llama, "params_dtype": torch.bfloat16,
        }  # fmt: skip


class Step:
    """A step of a training, called again and again: gives the loss, and the gradient norm of step :data:`FOUND`.

    Until then the learning rate is 0, and delayed scaling finds its scales. After :data:`STEPS` it is 0 again: all are
    timed with the same weights, and random tokens are not learned by heart.
    """

    def __init__(self, training: Training, made: Made, way: Way = "eager", fullgraph: bool = True) -> None:
        self.training, self.made, self.way = training, made, way
        self.calls, self.norm = 0, torch.zeros(())
        self.optimizer = training.optimizer(made.module)
        training.rate.zero_()
        self.module: Callable[..., Tensor] = made.module
        if way in COMPILED:
            options = {} if way == "compiled" else torch._inductor.list_mode_options(way)
            options["guard_filter_fn"] = torch.compiler.skip_guard_on_all_nn_modules_unsafe
            # PyTorch keeps graphs by code: without guards on modules, one model would run another's.
            code = LanguageModel.forward.__code__.replace()
            made.module.forward = MethodType(FunctionType(code, globals()), made.module)
            self.module = torch.compile(made.module, options=options, fullgraph=fullgraph, dynamic=False)

    def __call__(self) -> Outputs:
        outputs = self.run()
        self.calls += 1
        if self.calls == FOUND:
            self.training.reset()  # of moments that have seen other gradients
            self.training.rate.fill_(RATE)
        elif self.calls == STEPS:
            self.training.rate.zero_()
        return outputs

    def run(self) -> list[Tensor]:
        """The step in its way."""
        if self.way == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        if self.calls or self.way not in COMPILED:
            return self.compute()
        with torch._dynamo.config.patch(recompile_limit=64):  # the models of a row share their code
            return self.compute()

    def compute(self) -> list[Tensor]:
        training = self.training
        with self.made.step():
            with self.made.forward():
                loss = self.module(*training.batch)
            loss.backward()
        if self.calls == FOUND - 1:
            gradients = [each.grad for each in self.made.module.parameters()]
            norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients if each is not None]
            self.norm = torch.linalg.vector_norm(torch.stack(norms))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return [loss.detach(), self.norm]


class CapturedStep(Step):
    """A step that is captured as one CUDA graph after :data:`FOUND` calls, and replayed from then on."""

    def __init__(self, training: Training, made: Made) -> None:
        super().__init__(training, made, "captured")
        self.graph = capture.Graph(training.stream, training.pool)
        self.outputs: list[Tensor] = []

    def run(self) -> list[Tensor]:
        if self.calls < FOUND:
            with self.training.stream.current():
                return self.compute()
        if not self.outputs:
            self.training.pool = None  # which a capture that fails leaves unusable
            self.outputs = self.graph.capture(self.compute)
            self.training.pool = self.graph.pool
        self.graph.replay()
        return self.outputs


def build(model: Model, recipes: tuple[str, ...], device: torch.device, tiny: bool) -> Case:
    """PyTorch's in all ways but captured, ours of these recipes in all ways, torchao's and Transformer Engine's."""
    training = Training(model.tiny() if tiny else model, device)

    def contender(name: str, make: Callable[[], Made], way: Way, recipe: str = "bf16", **options: Any) -> Contender:
        def setup() -> Call:
            if way == "captured" and device.type != capture.Graph.device_type:
                raise UnavailableError("a CUDA graph needs an NVIDIA GPU")
            made = make()
            training.reset()
            return CapturedStep(training, made) if way == "captured" else Step(training, made, way, **options)

        label = name if way == "eager" else f"{name}, {'compiled ' * (way == 'reduce-overhead')}{way}"
        goal = model.goals.get((recipe, way)) if name.startswith("minifloat") else None
        goals: dict[Measure, float] = {} if goal is None else {"ratio": goal}
        return Contender(label, setup, training.error, BOUNDS[recipe], goals=goals, compiled=way in COMPILED)

    contenders = [contender("torch bf16", training.torch_model, way) for way in WAYS if way != "captured"]
    baselines = tuple(each.name for each in contenders)
    for recipe in recipes:
        contenders += [
            contender(f"minifloat {recipe}", partial(training.our_model, recipe, way), way, recipe) for way in WAYS
        ]
    for scaling in ("tensorwise", "rowwise") if "current" in recipes else ():
        make = partial(training.torchao_model, scaling)
        contenders.append(contender(f"torchao {scaling}", make, "compiled", "current", fullgraph=False))
    for recipe in recipes:
        if recipe in peers.TE_RECIPES:
            contenders.append(contender(f"TE {recipe}", partial(training.te_model, recipe), "eager", recipe))
    return Case(
        tuple(contenders), baselines, training.flops, memory_baseline=baselines[0], shared_bytes=training.nbytes,
        step=True, burst=False,
    )  # fmt: skip


ROWS = tuple(
    Row("model", f"{prefix}{name}", partial(build, model, recipes))
    for prefix, recipes in (("", RECIPES), ("MXFP8, ", ("mxfp8",)))
    for name, model in MODELS.items()
)
