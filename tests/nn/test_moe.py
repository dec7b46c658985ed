"""``MoE`` against a loop over experts that are linears of their own; its losses, and what it stands in for."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import minifloat
from minifloat.functional.norm_activation import Activation, activate
from minifloat.nn import GroupedLinear, Linear, MoE, TopKRouter, TransformerLayer, router_losses
from minifloat.nn.moe import LayerNormMoE
from tests.helpers.sample import each_once, first_by_default

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = torch.bfloat16
H, F, E, K = 32, 48, 5, 2
RECIPES = ["none", "current", "delayed", "block", "mxfp8"]


def make(recipe: Any, **options: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(H, F, E, K, dtype=BF16, recipe=recipe, **options)


class Loop(nn.Module):
    """The same by a loop over the experts, each of which computes its tokens in their order."""

    def __init__(self, of: MoE, recipe: Any) -> None:
        super().__init__()
        self.router, self.shared = copy.deepcopy(of.router), copy.deepcopy(nn.ModuleList())
        self.experts = nn.ModuleList()
        for i in range(E):
            fc1, fc2 = (Linear(*sizes, bias=False, dtype=BF16, recipe=recipe) for sizes in ((H, 2 * F), (F, H)))
            fc1.load_state_dict({"weight": of.experts.fc1.get_parameter(f"{i}.weight")})
            fc2.load_state_dict({"weight": of.experts.fc2.get_parameter(f"{i}.weight")})
            self.experts.append(nn.ModuleList([fc1, fc2]))

    def forward(self, x: Tensor) -> Tensor:
        probabilities, indices, _ = self.router(x)
        rows: list[list[Tensor]] = [[] for _ in x]
        for i, pair in enumerate(self.experts):
            fc1, fc2 = pair  # type: ignore[misc]
            tokens, slots = (indices == i).nonzero(as_tuple=True)
            own = probabilities[tokens, slots], torch.tensor([0, len(tokens)], dtype=torch.int32)
            y = fc2(activate(fc1(x[tokens]), Activation.of("swiglu"), *own))
            for token, slot, row in zip(tokens.tolist(), slots.tolist(), y, strict=True):
                rows[token].append((slot, row.float()))  # type: ignore[arg-type]
        sums = []
        for own in rows:
            total = torch.zeros(H)
            for _, row in sorted(own, key=lambda pair: pair[0]):
                total = total + row
            sums.append(total)
        return torch.stack(sums).to(x.dtype)


@pytest.mark.parametrize("recipe", RECIPES)
def test_as_a_loop_over_experts(recipe: str) -> None:
    moe = make(recipe)
    loop = Loop(moe, recipe)
    for _ in range(2):
        x = torch.randn(23, H).to(BF16).requires_grad_()
        own_x, dy = x.detach().clone().requires_grad_(), torch.randn(23, H).to(BF16)
        y, expected = moe(x), loop(own_x)
        assert torch.equal(y, expected)
        y.backward(dy), expected.backward(dy)
    for i, pair in enumerate(loop.experts):
        for mine, linear in zip((moe.experts.fc1, moe.experts.fc2), pair, strict=True):  # type: ignore[arg-type]
            assert torch.equal(mine.get_parameter(f"{i}.weight").grad, linear.weight.grad)  # type: ignore[arg-type]
    assert x.grad is not None and own_x.grad is not None
    torch.testing.assert_close(x.grad, own_x.grad)  # sums over k rows and the router are rounded in another order
    torch.testing.assert_close(moe.router.weight.grad, loop.router.weight.grad)


def test_shared_experts_see_every_token() -> None:
    moe = make("current", shared_ffn_hidden_size=16)
    without = make("current")
    without.load_state_dict(moe.state_dict(), strict=False)
    x = torch.randn(3, 7, H).to(BF16)
    assert moe.shared_fc1 is not None and moe.shared_fc2 is not None
    shared = moe.shared_fc2(activate(moe.shared_fc1(x), Activation.of("swiglu")))
    assert torch.equal(moe(x), without(x) + shared)
    assert moe(x).shape == x.shape


@pytest.mark.usefixtures("quiet_transformers")
def test_shared_gate_is_that_of_qwen2_moe() -> None:
    """Its weights load under our names; Y and all gradients."""
    from transformers import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    sizes = {"moe_intermediate_size": F, "shared_expert_intermediate_size": 16, "num_experts": E}
    theirs = Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(hidden_size=H, num_experts_per_tok=K, **sizes))
    for each in theirs.parameters():
        nn.init.normal_(each, std=0.3)
    moe = MoE(H, F, E, router=TopKRouter(H, E, K), shared_ffn_hidden_size=16, shared_gate=True)
    moe.load_state_dict(named_as_ours(theirs.state_dict()))
    x, dy = torch.randn(3, 7, H), torch.randn(3, 7, H)
    found = []
    for module in (moe, theirs):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(dy)
        gradients = {name: each.grad for name, each in module.named_parameters()}
        found.append({"y": y, "x": leaf.grad} | (gradients if module is moe else named_as_ours(gradients)))
    assert found[0].keys() == found[1].keys() and bool(found[0]["shared_gate.weight"].any())
    for name, got in found[0].items():
        torch.testing.assert_close(got, found[1][name], rtol=1e-4, atol=1e-4, msg=name)


def named_as_ours(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of a Qwen2MoeSparseMoeBlock by the names that a MoE has for them."""
    shared = {name: state[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")}
    ours = {
        "router.weight": state["gate.weight"],
        "shared_gate.weight": state["shared_expert_gate.weight"],
        "shared_fc1.weight": torch.cat([shared["gate"], shared["up"]]),
        "shared_fc2.weight": shared["down"],
    }
    for ours_name, name in (("fc1", "gate_up_proj"), ("fc2", "down_proj")):
        ours |= {f"experts.{ours_name}.{i}.weight": each for i, each in enumerate(state[f"experts.{name}"])}
    return ours


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_shared_gate_stays_in_high_precision(recipe: str) -> None:
    """Under a recipe, in the dtype of X, also where torch.autocast says which; ``convert`` leaves it alone."""
    moe = MoE(H, F, E, K, shared_ffn_hidden_size=16, shared_gate=True, recipe=recipe)
    without = MoE(H, F, E, K, recipe=recipe)
    without.load_state_dict(moe.state_dict(), strict=False)
    assert moe.shared_fc1 is not None and moe.shared_fc2 is not None and moe.shared_gate is not None
    x = torch.randn(9, H)
    for autocasts in (False, True):
        with torch.autocast("cpu", BF16, enabled=autocasts):
            y, experts = moe(x), without(x)
            shared = moe.shared_fc2(activate(moe.shared_fc1(x), Activation.of("swiglu")))
        own = (x.to(y.dtype), moe.shared_gate.weight.to(y.dtype))
        assert y.dtype == (BF16 if autocasts else torch.float32)
        assert torch.equal(y, experts + torch.sigmoid(nn.functional.linear(*own)) * shared)
    report = minifloat.convert(moe, "block", filter_fn=lambda module, name: True)
    assert [layer.names for layer in report.left_alone if "shared_gate" in layer.names[0]] == [("shared_gate",)]
    with pytest.raises(ValueError, match=r"MoE 'layer3': shared_gate is True.*give shared_ffn_hidden_size"):
        MoE(H, F, E, K, shared_gate=True, name="layer3")


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_later_microbatches_read_the_casts_of_the_first(recipe: str) -> None:
    """Those of all linears: a write that PyTorch does not see changes no output before the next first one."""
    options: dict[str, Any] = {"shared_ffn_hidden_size": 16, "dtype": BF16, "recipe": recipe}
    for layer in (MoE(H, F, E, K, **options), LayerNormMoE(H, F, E, K, **options)):
        x = torch.randn(7, H).to(BF16)
        linears = [each for each in layer.modules() if isinstance(each, (Linear, GroupedLinear))]
        assert len(linears) == 4
        for linear in linears:
            first = layer(x, is_first_microbatch=True)
            for weight in linear.parameters():
                weight.data += weight.data
            assert torch.equal(layer(x, is_first_microbatch=False), first)
            assert not torch.equal(layer(x, is_first_microbatch=True), first)


def test_weights_are_drawn_by_their_own_methods() -> None:
    moe = make("none", shared_ffn_hidden_size=16, init_method=nn.init.ones_, output_layer_init_method=nn.init.zeros_)
    assert moe.shared_fc1 is not None and moe.shared_fc2 is not None
    for fc1, fc2 in ((moe.experts.fc1, moe.experts.fc2), (moe.shared_fc1, moe.shared_fc2)):
        assert all(p.eq(1).all() for p in fc1.parameters()) and not any(p.any() for p in fc2.parameters())


def test_masked_tokens_go_nowhere() -> None:
    moe = make("current")
    x, mask = torch.randn(9, H).to(BF16), torch.arange(9) < 6
    y = moe(torch.where(mask[:, None], x, torch.nan), token_mask=mask)
    assert torch.equal(y[:6], moe(x[:6])) and not y[6:].any()
    assert moe.expert_counts is not None and int(moe.expert_counts.sum()) == 6 * K


def test_masked_tokens_have_no_part_in_gradients() -> None:
    x, mask, dy = torch.randn(9, H).to(BF16), torch.arange(9) < 6, torch.randn(9, H).to(BF16)
    found = []
    for given, options in ((torch.where(mask[:, None], x, torch.nan), {"token_mask": mask}), (x[:6], {})):
        moe, given = make("current"), given.requires_grad_()
        moe(given, **options).backward(dy[: len(given)])
        assert given.grad is not None and not given.grad[6:].any()
        found.append([given.grad[:6], *(p.grad for p in moe.parameters())])
    torch.testing.assert_close(*found)


def test_a_mask_of_other_tokens_is_refused() -> None:
    """Of as many, but [s, b] where the tokens are [b, s]: flattened it would hide the wrong ones."""
    moe, x = make("current"), torch.randn(2, 3, H).to(BF16)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    y = moe(x, token_mask=mask)
    assert not y[1, 1:].any() and y[0].any() and y[1, 0].any()
    with pytest.raises(ValueError, match=r"token_mask is .*; bools of shape \(2, 3\) are needed"):
        moe(x, token_mask=mask.t())


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_dropped_choices_add_nothing(recipe: str) -> None:
    """To Y and to gradients; a token whose choices are all dropped gets 0."""
    x, dy, found = torch.randn(23, H).to(BF16), torch.randn(23, H).to(BF16), []
    moe = make(recipe, router=TopKRouter(H, E, K, capacity_factor=0.5, dtype=BF16))
    for module in (moe, Loop(moe, recipe)):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(dy)
        found.append([y, leaf.grad, module.router.weight.grad])  # type: ignore[union-attr]
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1:], found[1][1:])
    gone = (moe.router(x).indices < 0).all(1)
    assert gone.any() and not gone.all() and not found[0][0][gone].any()
    assert moe.expert_counts is not None and int(moe.expert_counts.max()) == math.ceil(23 * K / E * 0.5)


def test_options_of_the_router() -> None:
    """Also from a TransformerLayer; what they do not name is as without them."""
    options = {"score_function": "sigmoid", "expert_bias_rate": 0.5, "z_loss_coefficient": 0.25}
    layer = TransformerLayer(
        H, F, 2, moe={"num_experts": E, "router": options, "aux_loss_coefficient": 0.5}, dtype=BF16
    )
    moe = layer.layernorm_mlp.moe
    router = moe.router
    assert isinstance(router, TopKRouter) and router.weight.dtype == BF16 and router.expert_bias is not None
    assert (router.selection.score_function, router.selection.normalize_top_k) == ("sigmoid", True)
    assert (router.aux_loss_coefficient, router.z_loss_coefficient) == (0.5, 0.25)
    with pytest.raises(TypeError, match="scores"):
        make("current", router={"scores": "sigmoid"})


def test_a_layer_knows_where_sequences_lie() -> None:
    """The loss of each sequence is that of either format."""
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
    mixture = {"num_experts": E, "router": {"seq_aux_loss_coefficient": 1.0}}
    layers = [TransformerLayer(H, F, 2, attn_input_format=f, moe=mixture, **options) for f in ("sbhd", "bshd")]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(7, 3, H)
    y, other = layers[0](x), layers[1](x.transpose(0, 1))
    torch.testing.assert_close(other.transpose(0, 1), y)
    torch.testing.assert_close(router_losses(layers[1]), router_losses(layers[0]))
    assert mixture["router"] == {"seq_aux_loss_coefficient": 1.0}


class OneBased(nn.Module):
    """A router whose experts are numbered from 1 on."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ones(len(x), 1), torch.arange(len(x))[:, None] % E + 1, torch.zeros(())


def test_experts_that_are_none_are_refused() -> None:
    moe = make("current", router=OneBased(), name="layer3.moe")
    with pytest.raises(ValueError, match=r"GroupedLinear 'layer3.moe.experts.fc1': 2 of the indices \(10, 1\) are no "):
        moe(torch.randn(10, H).to(BF16))


def test_router_losses_are_taken_once() -> None:
    model = nn.Sequential(make("current", aux_loss_coefficient=0.1), make("current", aux_loss_coefficient=0.1))
    assert router_losses(model) == 0.0
    y = model(torch.randn(9, H).to(BF16))
    found = model[0].router_loss + model[1].router_loss
    total = router_losses(model)
    assert isinstance(total, Tensor) and torch.equal(total, found) and total > 0
    (y.sum() * 0 + total).backward()
    assert all(bool(moe.router.weight.grad.any()) for moe in model)  # type: ignore[union-attr]
    assert router_losses(model) == 0.0


def test_copies_after_a_forward() -> None:
    moe, x = make("current", aux_loss_coefficient=0.1), torch.randn(9, H).to(BF16)
    y, own = moe(x), moe.router_loss
    copied = copy.deepcopy(moe)
    assert copied.router_loss is copied.expert_counts is None and moe.router_loss is own is not None
    assert torch.equal(copied(x), y)


def test_recomputed_losses_are_nobodys() -> None:
    """That of a later forward stays, and a recomputation leaves none that would keep its activations."""
    moe, after = make("current", aux_loss_coefficient=0.1), nn.Linear(H, H, dtype=BF16)
    x = torch.randn(9, H).to(BF16).requires_grad_()
    y = minifloat.checkpoint(lambda x: after(moe(x)).exp(), x)  # what is saved after the loss is recomputed after it
    first = router_losses(moe)
    moe(2 * x[:4])
    loss, counts = moe.router_loss, moe.expert_counts
    (y.sum() + first).backward()
    assert moe.router_loss is loss is not None and moe.expert_counts is counts
    assert bool(moe.router.weight.grad.any())  # type: ignore[union-attr]


@first_by_default
@pytest.mark.parametrize("recipe", ["current", "block", "none"])
def test_compiled(recipe: str) -> None:
    torch._dynamo.reset()
    moe = make(recipe, aux_loss_coefficient=0.1)
    twin = copy.deepcopy(moe)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x = torch.randn(16, H).to(BF16).requires_grad_()
        own_x, dy = x.detach().clone().requires_grad_(), torch.randn(16, H).to(BF16)
        y, expected = compiled(own_x), moe(x)
        assert torch.equal(y, expected)
        ((y * dy).sum() + router_losses(twin)).backward()
        ((expected * dy).sum() + router_losses(moe)).backward()
        gradients = [(x.grad, own_x.grad)]
    gradients += [(mine.grad, other.grad) for mine, other in zip(moe.parameters(), twin.parameters(), strict=True)]
    for got, want in gradients:  # PyTorch 2.11 gives a compiler other steps of the router's softmax in backward
        assert got is not None and want is not None
        assert (got - want).abs().max() <= 2**-7 * want.abs().max()


@pytest.mark.parametrize(
    "form", ["own", "refused", *[pytest.param(f, marks=pytest.mark.slow) for f in ("no loss", "option")]]
)
def test_compiled_inside_of_a_checkpoint(form: str) -> None:
    """A graph's checkpoint sets no attribute: the layer's own hands them out, else PyTorch's option keeps them."""
    torch._dynamo.reset()
    coefficient = 0.0 if form == "no loss" else 0.1
    model = LayerNormMoE(H, F, E, aux_loss_coefficient=coefficient, recipe="current", checkpoint=form == "own")
    twin, x = copy.deepcopy(model), torch.randn(9, H)

    def run(x: Tensor) -> Tensor:
        y: Tensor = model(x) if form == "own" else minifloat.checkpoint(model, x)
        return y

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    if form == "refused":
        with pytest.raises(RuntimeError, match=r"GroupedLinear.*drops the loss.*skip_fwd_side_effects_in_bwd"):
            compiled(x)
        compiled = torch.compile(run, backend="aot_eager")
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=form == "option"):
        for each, call in ((model, compiled), (twin, twin)):
            (call(x).square().sum() + router_losses(each)).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    if form != "no loss":
        assert model.moe.expert_counts is not None and torch.equal(model.moe.expert_counts, twin.moe.expert_counts)


@first_by_default
@pytest.mark.parametrize("recipe", ["current", None])
def test_microbatches_in_one_graph(recipe: str | None) -> None:
    """Without a recipe nothing is cast that could be kept; a cast that is kept is refused, by its name."""
    torch._dynamo.reset()
    moe, x = MoE(H, F, E, recipe=recipe), torch.randn(9, H)
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, True), moe(x))
    if recipe is not None:
        with pytest.raises(RuntimeError, match=r"GroupedLinear.*is_first_microbatch=False reads a cached weight"):
            compiled(x, False)
        return
    for first in (False, True, False):
        assert torch.equal(compiled(x, first), moe(x))


def test_traced() -> None:
    with FakeTensorMode():
        moe = make("current")
        x = torch.randn(16, H, dtype=BF16, requires_grad=True)
        moe(x).sum().backward()
        assert x.grad is not None and all(p.grad is not None for p in moe.parameters())


@each_once
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", [{}, {"checkpoint_mlp": True}, {"parallel_attention_mlp": True}])
def test_transformer_layer(recipe: str, options: dict[str, Any]) -> None:
    """With experts in the place of its MLP it is attention, norm and experts one after the other."""
    torch.manual_seed(0)
    layer = TransformerLayer(
        H, F, 2, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", activation="swiglu", bias=False,
        recipe=recipe, dtype=BF16, moe={"num_experts": E, "top_k": K, "aux_loss_coefficient": 0.1}, **options,
    )  # fmt: skip
    plain = copy.deepcopy(layer)
    assert isinstance(layer.layernorm_mlp, LayerNormMoE) and layer.recipe == plain.recipe
    x = torch.randn(6, 2, H).to(BF16).requires_grad_()
    own_x = x.detach().clone().requires_grad_()
    attended = plain.self_attention(own_x)
    stream = own_x if options.get("parallel_attention_mlp") else own_x + attended
    mlp = plain.layernorm_mlp
    experts = mlp.moe(mlp.norm(stream))  # type: ignore[union-attr, operator]
    expected = own_x + attended + experts if options.get("parallel_attention_mlp") else stream + experts
    y = layer(x)
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    y.backward(dy), expected.backward(dy)
    for (name, mine), other in zip(layer.named_parameters(), plain.parameters(), strict=True):
        if ".moe." in name:
            assert torch.equal(mine.grad, other.grad), name  # type: ignore[arg-type]
        else:  # the gradients of the residual stream are added in another order
            torch.testing.assert_close(mine.grad, other.grad, rtol=0.05, atol=0.05)
    torch.testing.assert_close(x.grad, own_x.grad, rtol=0.05, atol=0.05)


def test_recipe_is_that_of_all_linears() -> None:
    moe = make("current", shared_ffn_hidden_size=16)
    moe.recipe = "mxfp8"
    linears = moe.experts.fc1, moe.experts.fc2, moe.shared_fc1, moe.shared_fc2
    assert len({id(linear.recipe) for linear in linears if linear is not None}) == 1
    assert make("current").recipe == make("current").experts.fc2.recipe


def test_a_layer_with_experts_that_wait() -> None:
    """With its norm, and an MLP for every token."""
    options = {"recipe": "current", "shared_ffn_hidden_size": 16}
    layer, twin = (LayerNormMoE(H, F, E, delay_wgrad_compute=delay, **options) for delay in (True, False))
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(20, H)
    for each in (layer, twin):
        each(x).sum().backward()
    layer.backward_dw()
    for mine, other in zip(layer.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]


def test_tensor_parallel_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="experts are not tensor-parallel"):
        TransformerLayer(H, F, 2, moe={"num_experts": E}, set_parallel_mode=True)
