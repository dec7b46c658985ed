"""``convert`` and ``revert`` on grouped linears of the model's own, alone and inside of mixtures of experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat import GroupedLinear, MoE
from minifloat.convert import convert, revert

pytestmark = pytest.mark.usefixtures("one_thread")

COUNTS = [3, 0, 8, 5]


class Experts(nn.Module):
    """Two grouped linears, with weights in one parameter or one each, and a mixture of experts."""

    def __init__(self, recipe: str | None = None) -> None:
        super().__init__()
        self.up = GroupedLinear(4, 32, 48, recipe=recipe, single_grouped_weight=True)
        self.down = GroupedLinear(4, 48, 32, recipe=recipe)
        self.moe = MoE(32, 64, 4, 2, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(self.down(self.up(x, COUNTS), COUNTS))
        return y


def made(recipe: str | None = None) -> Experts:
    torch.manual_seed(0)
    return Experts(recipe)


def trained(model: nn.Module) -> list[Tensor]:
    """Output and gradients of a step."""
    torch.manual_seed(1)
    x = torch.randn(16, 32, requires_grad=True)
    y = model(x)
    grads = torch.autograd.grad(y, (x, *model.parameters()), torch.randn_like(y))
    return [y.detach(), *grads]


@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "mxfp8"])
def test_is_as_made_with_the_recipe(recipe: str) -> None:
    model = made()
    parameters = dict(model.named_parameters())
    before = trained(model)
    report = convert(model, recipe)
    names = {each.names[0]: each.num_experts for each in report.converted}
    experts = {name: 4 for name, module in model.named_modules() if isinstance(module, GroupedLinear)}
    assert {"up", "down"} < set(experts) and experts.items() <= names.items()
    assert not [each for each in report.left_alone if each.names[0].startswith(("up", "down"))]
    for found, expected in zip(trained(model), trained(made(recipe)), strict=True):
        assert torch.equal(found, expected)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    revert(model)
    assert all(torch.equal(a, b) for a, b in zip(trained(model), before, strict=True))
    assert model.state_dict().keys() == made().state_dict().keys()


def test_rules_and_layers_that_stay() -> None:
    """``"none"`` of the layer's own stays unless a rule says otherwise; experts' parameters are nobody else's."""
    model = made("none")
    with pytest.warns(UserWarning, match="nothing was converted.*a minifloat.GroupedLinear with recipe='none'"):
        report = convert(model, "current")
    left = {each.names[0]: each.reason for each in report.left_alone}
    assert left["up"] == "a minifloat.GroupedLinear with recipe='none'"
    assert not [name for name in left if name.startswith("down.")]
    report = convert(model, "current", rules=[("down", "mxfp8")])
    assert [each.names[0] for each in report.converted] == ["down"]
    assert model.down.recipe == minifloat.recipe.named("mxfp8") and model.up.recipe == "none"


def test_histories_stay_with_an_equal_recipe() -> None:
    model = made()
    convert(model, "delayed")
    trained(model)
    history = model.up.forward_scaling
    convert(model, "delayed")
    assert model.up.forward_scaling is history
    revert(model)
    assert "forward_scaling" not in dict(model.up.named_children())


def test_quantized_weights() -> None:
    """Each expert of one parameter gets its own, with the operands that a cast of all gives; revert makes it one."""
    model, twin, plain = made(), made("mxfp8"), made()
    report = convert(model, "mxfp8", quantize_weights=True)
    assert not report.warnings and all(each.quantized_weight for each in report.converted)
    layers = [module for module in model.modules() if isinstance(module, GroupedLinear)]
    weights = [layer._weight(name) for layer in layers for name in layer._weight_names]
    assert len(weights) == 16 and all(isinstance(weight, minifloat.QuantizedTensor) for weight in weights)
    (y, dx, *_), (expected, dx_expected, *_) = trained(model), trained(twin)
    assert torch.equal(y, expected) and torch.equal(dx, dx_expected)
    values = [weight.dequantize() for weight in (model.up._each("weight"))]
    model.up.get_parameter("2.weight").grad = torch.ones(48, 32)
    revert(model)
    assert [(name, p.shape) for name, p in model.named_parameters()] == [
        (name, p.shape) for name, p in plain.named_parameters()
    ]
    assert torch.equal(model.up.get_parameter("weight"), torch.stack(values)) and model.up.single_grouped_weight
    plain.load_state_dict(model.state_dict())
    assert all(map(torch.equal, trained(model), trained(plain)))
