"""``export``: programs for inference that hold codes, equal to the bit to the model; and their files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from minifloat import (
    GroupedLinear,
    Linear,
    QuantizedTensor,
    QuantizerRole,
    autocast,
    convert,
    distributed,
    export,
    prepare,
    quantized_model_init,
)
from minifloat.recipe import named
from tests.helpers.distributed_pool import on_ranks
from tests.helpers.export_cases import (
    HIDDEN,
    IN,
    LAYERS,
    OUT,
    RECIPES,
    SHAPES,
    TOKENS,
    assert_same,
    trained,
    two_linears,
)
from tests.helpers.sample import each_once, each_pair, each_twice

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")

SIZES = dict.fromkeys(RECIPES, 1.0) | {"nvfp4": 0.5, "mxfp4": 0.5}
"""Bytes of the codes of an element."""


def casts(program: ExportedProgram) -> int:
    """How many tensors a call of the program casts, by the kernel of a norm or an activation, or by itself."""
    ours = [node for node in program.graph.nodes if "minifloat" in str(node.target)]
    # Experts' activation casts where the scale is known before, as under delayed scaling; ";;" if it does not.
    return sum("cast" in str(n.target) or ("grouped_activation" in str(n.target) and ";;" not in n.args) for n in ours)


def matrices(program: ExportedProgram) -> dict[str, Tensor]:
    """What the program holds but for vectors."""
    held = program.state_dict | {name: each for name, each in program.constants.items() if isinstance(each, Tensor)}
    return {name: each for name, each in held.items() if each.dim() > 1}


def slow_but(*fast: Any, of: Any) -> list[Any]:
    marks = [[] if each in fast else [pytest.mark.slow] for each in of]
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=mark)
        for each, mark in zip(of, marks, strict=True)
    ]


# ---- what a program holds, and that it computes the same ----


@each_pair
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kept", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe(name: str, kept: bool, strict: bool, tmp_path: Path) -> None:
    """One program serves all token counts, before and after it was saved, from weights in either form."""
    with quantized_model_init(enabled=kept, recipe=RECIPES[name]):
        model = trained(two_linears(RECIPES[name]))
    before = copy.deepcopy(model.state_dict())
    program = export(model, (torch.randn(6, 5, IN),), dynamic_shapes=TOKENS, strict=strict)
    program.validate()
    torch.export.save(program, tmp_path / "model.pt2")
    for run in (program.module(), torch.export.load(tmp_path / "model.pt2").module()):
        for shape in SHAPES:
            assert_same(run, model, torch.randn(*shape, IN))
    assert casts(program) == 2  # of the activations
    held = matrices(program)
    codes = [each for each in held.values() if each.numel() * 4 > OUT * HIDDEN]
    assert all(each.dtype == torch.uint8 for each in codes)
    assert sum(each.nbytes for each in codes) == SIZES[name] * HIDDEN * (IN + OUT)
    assert not any("history" in name or isinstance(each, QuantizedTensor) for name, each in program.state_dict.items())
    assert not any(each.requires_grad for each in program.state_dict.values())
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_names_and_values() -> None:
    """A buffer is named for the parameter that it stands for, and holds what casting that gives."""
    model = trained(two_linears("nvfp4"))
    program = export(model, (torch.randn(6, IN),))
    wanted = named("nvfp4").quantizer(QuantizerRole("linear", "weight"))(model[0].weight.detach()).rowwise  # type: ignore[index]
    assert wanted is not None
    for what in ("codes", "scale_inv", "amax"):
        assert torch.equal(program.state_dict[f"0.weight_{what}"], getattr(wanted, what))
    of_second = {f"2.weight_{what}" for what in ("codes", "scale_inv", "amax")}
    assert program.state_dict.keys() == {"0.bias"} | {name.replace("2.", "0.") for name in of_second} | of_second


def test_size_of_a_file(tmp_path: Path) -> None:
    """That of the codes, and not that of the weights: here a quarter, and 60 KB for the graph."""
    model = nn.Sequential(*[Linear(256, 256, recipe="mxfp8") for _ in range(4)]).eval()
    torch.export.save(export(model, (torch.randn(6, 256),)), tmp_path / "model.pt2")
    size, weights = (tmp_path / "model.pt2").stat().st_size, 4 * 256 * 256
    assert weights < size < 1.1 * weights + 60_000


def test_weight_in_a_buffer_that_is_not_saved() -> None:
    """A frozen weight that no state dict has is held as codes alone, like others."""
    layer = Linear(256, 256, recipe="mxfp8").eval()
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight, persistent=False)
    program = export(nn.Sequential(layer).eval(), (torch.randn(6, 256),))
    held = [each for each in (program.state_dict | program.constants).values() if isinstance(each, torch.Tensor)]
    assert sum(each.nbytes for each in held) < 1.1 * weight.numel()


NOT_KEPT = "grouped as one", "twice"
"""Those whose weights are not kept quantized: one parameter of all experts, and one that is read in high precision."""


WAYS = [(name, False, False) for name in RECIPES] + [
    (name, kept, strict)
    for name in ("current", "delayed", "nvfp4")
    for kept, strict in ((True, False), (False, True), (True, True))
]
"""Recipes, whether weights are kept quantized, and whether Dynamo traces."""


@each_twice
@pytest.mark.parametrize(("name", "kept", "strict"), slow_but(("current", False, False), of=WAYS))
@pytest.mark.parametrize(
    "layer", slow_but("split", "layernorm mlp", "transformer", "grouped", "experts", "twice", of=LAYERS)
)
@pytest.mark.filterwarnings("error::UserWarning")  # such as of attributes that a forward sets
def test_every_layer(layer: str, name: str, kept: bool, strict: bool, tmp_path: Path) -> None:
    make, activations = LAYERS[layer]
    with quantized_model_init(enabled=kept and layer not in NOT_KEPT, recipe=RECIPES[name]):
        model = make(RECIPES[name]).eval()
    if name == "delayed":
        prepare(model, RECIPES[name])
    program = export(model, (torch.randn(6, 5, IN),), dynamic_shapes=TOKENS, strict=strict)
    assert casts(program) == activations
    torch.export.save(program, tmp_path / "model.pt2")
    for run in (program.module(), torch.export.load(tmp_path / "model.pt2").module()):
        for shape in SHAPES:
            assert_same(run, model, torch.randn(*shape, IN))


@pytest.mark.parametrize("kept", [False, True])
def test_a_converted_model(kept: bool) -> None:
    """In bf16, with layers that stay in high precision, from weights in either form."""
    model = nn.Sequential(*(nn.Linear(IN, IN) for _ in range(4))).bfloat16().eval()
    convert(model, "block", lambda module, name: True, rules=[("3", "none")], quantize_weights=kept)
    program = export(model, (torch.randn(6, IN, dtype=torch.bfloat16),), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert_same(program.module(), model, torch.randn(9, IN, dtype=torch.bfloat16))
    assert casts(program) == 3
    wanted = ["3.weight", *[f"{i}.weight_{what}" for i in range(3) for what in ("codes", "scale_inv")]]
    assert sorted(matrices(program)) == sorted(wanted)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_models_of_transformers(kind: str) -> None:
    """Tied embeddings and experts included; for all batches and lengths."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    converted = convert(model, "mxfp8", filter_fn=lambda module, name: True).converted
    inputs = {"input_ids": torch.randint(0, 96, (2, 11)), "use_cache": False}
    program = export(model, (), inputs, dynamic_shapes={"input_ids": TOKENS[0], "use_cache": None})
    run = program.module()
    for shape in SHAPES:
        inputs["input_ids"] = torch.randint(0, 96, shape)
        with torch.no_grad():
            assert torch.equal(run(**inputs).logits, model(**inputs).logits)
    assert sum(name.endswith("_codes") for name in program.state_dict) == len(converted)


@pytest.mark.parametrize("strict", [False, True])
def test_without_a_recipe_quantized_weights_are_codes(strict: bool) -> None:
    """They are dequantized in each call."""
    with quantized_model_init(recipe="mxfp8"):
        model = two_linears().eval()
    program = export(model, (torch.randn(6, IN),), strict=strict)
    assert_same(program.module(), model, torch.randn(6, IN))
    assert {each.dtype for each in matrices(program).values()} == {torch.uint8}


@pytest.mark.parametrize("name", ["mxfp8", "delayed"])
def test_the_recipe_of_autocast(name: str) -> None:
    """And the dtype of PyTorch's: contexts around the export are those of the program."""
    model = prepare(two_linears(), RECIPES[name]).eval()
    with autocast(recipe=RECIPES[name]), torch.autocast("cpu", torch.bfloat16):
        program = export(model, (torch.randn(6, IN),), dynamic_shapes=({0: Dim.DYNAMIC},))
        x = torch.randn(9, IN)
        with torch.no_grad():
            y = model(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(program.module()(x), y) and casts(program) == 2


@each_once
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kept", ["rowwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("under", ["current", "block", "mxfp4"])
def test_weights_kept_in_another_recipe(kept: str, under: str, strict: bool) -> None:
    """The codes are those that a call casts the values to, and nothing else is held."""
    with quantized_model_init(recipe=kept):
        model = nn.Sequential(Linear(IN, OUT, bias=False, recipe=under)).eval()
    program = export(model, (x := torch.randn(6, IN),), strict=strict)
    assert_same(program.module(), model, x)
    assert casts(program) == 1 and program.state_dict.keys() == {"0.weight_codes", "0.weight_scale_inv"}


def test_casts_of_one_weight() -> None:
    """Three, each with buffers of its own, and one in both orientations."""

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(OUT, IN))

        def forward(self, x: Tensor) -> Tensor:
            both = named("mxfp8").quantizer(QuantizerRole("linear", "weight")).with_usage(rowwise=True, columnwise=True)
            operands = both(self.weight)
            assert operands.rowwise is not None and operands.columnwise is not None
            values = [operands.rowwise.dequantize(), operands.columnwise.dequantize()]
            for name in ("current", "nvfp4"):
                values.append(named(name).quantizer(QuantizerRole("linear", "weight"))(self.weight).dequantize())
            return torch.cat([x @ each.T for each in values], -1)

    model = Casts().eval()
    program = export(model, (x := torch.randn(2, IN),))
    assert_same(program.module(), model, x)
    numbers = {"codes": 4, "scale_inv": 4, "amax": 1}
    assert program.state_dict.keys() >= {
        f"weight_{kind}_{i}".removesuffix("_0") for kind, number in numbers.items() for i in range(number)
    }


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("counts", [[3, -1, 4], [3, 3, 1], [2**62, 2**62, 2**62]], ids=["negative", "excess", "large"])
def test_counts_of_experts_are_checked(counts: list[int], strict: bool) -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = GroupedLinear(3, IN, OUT, recipe="current")

        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            y: Tensor = self.linear(x, counts)
            return y

    model, x = Counted().eval(), torch.randn(6, IN)
    run = export(model, (x, torch.tensor([3, 0, 3])), strict=strict).module()
    assert_same(run, model, x, torch.tensor([1, 2, 2]))
    with pytest.raises(ValueError, match=r"GroupedLinear: m_splits .* with 6 rows"):
        run(x, torch.tensor(counts))


def test_buffers_that_a_call_writes_stay() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = Linear(IN, OUT, recipe="current")
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            y: Tensor = self.linear(x) * self.calls
            return y

    model = Counts().eval()
    twin, x = copy.deepcopy(model), torch.randn(6, IN)
    program = export(model, (x,)).module()
    for _ in range(3):
        assert_same(program, twin, x)
    assert program.calls == twin.calls == 3 and model.calls == 0


def test_casts_of_what_a_call_writes_stay() -> None:
    """A cache that is quantized, and a weight that is computed in place, through a view."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(OUT, IN))
            self.register_buffer("cache", torch.zeros(4, IN))
            self.register_buffer("sums", torch.zeros(2, IN))

        def forward(self, x: Tensor) -> Tensor:
            self.cache[:2].add_(x)
            torch.add(self.sums[:1], x[:1], out=self.sums[:1])
            weight = self.weight.clone()
            weight.view(-1)[: 2 * IN].mul_(x.sum())
            quantizer = named("current").quantizer(QuantizerRole("linear", "weight"))
            values = [quantizer(each).dequantize() for each in (self.cache, weight, self.weight, self.sums)]
            return (values[0] + values[3].sum(0)) @ (values[1] + values[2]).T

    model = Writes().eval()
    twin = copy.deepcopy(model)
    program = export(model, (torch.randn(2, IN),))
    run = program.module()
    for _ in range(3):
        assert_same(run, twin, torch.randn(2, IN))
    assert casts(program) == 3 and {"cache", "sums", "weight", "weight_codes"} <= program.state_dict.keys()


def test_views_of_codes() -> None:
    """The codes are kept once, as the cast gave them."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(OUT, IN))

        def forward(self, x: Tensor) -> Tensor:
            quantizer = named("current").quantizer(QuantizerRole("linear", "weight"))
            operand = quantizer(self.weight).any
            y: Tensor = x @ operand.codes.t().float() + operand.codes.flatten()[:OUT] + operand.codes[:, 0]
            return y * operand.dequantize().sum()

    model = Views().eval()
    program = export(model, (torch.randn(2, IN),))
    assert_same(program.module(), model, torch.randn(2, IN))
    assert program.state_dict.keys() == {"weight_codes", "weight_scale_inv"}


def test_the_model_trains_on() -> None:
    """Delayed scaling included, as if it had not been exported; the program stays what it is."""
    model, x = trained(two_linears(RECIPES["delayed"])), torch.randn(6, IN)
    twin, program = copy.deepcopy(model), export(model, (x,)).module()
    with torch.no_grad():
        y = model(x)
    for each in (model, twin):
        each.train()(x).square().sum().backward()
    for (name, one), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), twin.buffers(), strict=True))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(program(x), y) and not torch.equal(model(x), y)


# ---- what is refused ----


def test_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear\(40, 48\) is in training mode.*model\.eval\(\)"):
        export(two_linears("current"), (torch.randn(6, IN),))


def test_looking_for_what_is_not_finite_is_refused() -> None:
    model = two_linears("current").eval()
    with autocast(check_finite=True), pytest.raises(ValueError, match=r"check_finite=True\) has Linear.*outside of it"):
        export(model, (torch.randn(6, IN),))


def test_contexts_that_a_forward_enters_are_refused() -> None:
    class Lower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = Linear(IN, OUT, recipe="current")

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y: Tensor = self.proj(x)
            return y

    with pytest.raises(ValueError, match=r"layer 'proj' runs inside of torch\.autocast.*around export"):
        export(Lower().eval(), (torch.randn(6, IN),))


def test_options_that_cannot_be_traced_are_refused() -> None:
    """Each by the layer that is called with it."""
    layer, x = Linear(IN, OUT, recipe="current", name="proj").eval(), torch.randn(6, IN)
    for option in ({"fp8_output": True}, {"is_first_microbatch": False}):
        with pytest.raises(RuntimeError, match=rf"Linear 'proj': {next(iter(option))}=.*use (False|None)"):
            export(layer, (x,), dict(option))


def test_delayed_scaling_without_buffers_is_refused() -> None:
    with autocast(recipe="delayed"), pytest.raises(RuntimeError, match=r"minifloat\.prepare\(model, recipe\)"):
        export(two_linears().eval(), (torch.randn(6, IN),))


def test_quantized_weights_that_others_read_are_refused() -> None:
    """But not their values, from which the layer may cast its own."""

    class Reads(nn.Module):
        def __init__(self, recipe: str) -> None:
            super().__init__()
            with quantized_model_init(recipe="mxfp8"):
                self.proj = Linear(IN, IN, recipe=recipe)

        def forward(self, x: Tensor, values: bool) -> Tensor:
            weight = self.proj.weight.dequantize() if values else self.proj.weight
            y: Tensor = self.proj(x) + F.linear(x, weight)
            return y

    model, x = Reads("mxfp8").eval(), torch.randn(6, IN)
    with pytest.raises(ValueError, match=r"export: proj\.weight is quantized, and something other.*dequantize\(\)"):
        export(model, (x, False))
    for other in (model, Reads("nvfp4").eval()):
        assert_same(export(other, (x, True)).module(), other, x, True)


@on_ranks(2)
def test_layers_that_are_split_over_ranks_are_refused(rank: int, world_size: int) -> None:
    """The errors of a layer that is split over ranks, and of one that is sharded."""
    group = torch.distributed.group.WORLD
    split = Linear(IN, HIDDEN, recipe="current", name="up", parallel_mode="column", tp_group=group)
    sharded = Linear(IN, HIDDEN, recipe="current", name="down")
    distributed.fully_shard(sharded)
    found = []
    for layer in (split, sharded):
        try:
            export(layer.eval(), (torch.randn(6, IN),))
        except ValueError as error:
            found.append(str(error))
    split, sharded = found
    assert split.startswith("export: Linear 'up' is split over 2 ranks; export a model that is built without")
    assert sharded.startswith("export: the weight of Linear 'down' is sharded over ranks; export a model that is")
