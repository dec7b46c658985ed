"""A factory that decides for each tensor of each layer, and a count of the GEMMs that ran because of it."""

from collections import Counter

import torch
from torch import nn

from minifloat import CustomRecipe, Float8CurrentScaling, Linear, MXFP8BlockScaling, Quantizer, QuantizerRole, autocast
from minifloat.functional import Gemm, count_gemms

MXFP8 = MXFP8BlockScaling()
CURRENT = Float8CurrentScaling()


def choose(role: QuantizerRole) -> Quantizer:
    """The ends in high precision, one layer's weight alone in MXFP8, the rest MXFP8 forward and per tensor backward."""
    if role.name in ("first", "last"):
        return Quantizer.identity()
    if role.name == "weight_only":
        return MXFP8.quantizer(role) if role.tensor_type == "weight" else Quantizer.identity()
    if role.tensor_type in ("grad_output", "grad_input"):
        return CURRENT.quantizer(role)
    # fprop reads the rowwise operands of input and weight, dgrad and wgrad read the columnwise ones.
    return Quantizer.hybrid(rowwise_quantizer=MXFP8.quantizer(role), columnwise_quantizer=CURRENT.quantizer(role))


def main() -> Counter[Gemm]:
    torch.manual_seed(0)
    model = nn.Sequential(
        Linear(64, 96, name="first"),
        Linear(96, 96, name="weight_only"),
        nn.ReLU(),
        Linear(96, 96, name="hybrid"),
        Linear(96, 32, name="last"),
    )
    x = torch.randn(48, 64, requires_grad=True)
    with count_gemms() as gemms:
        with autocast(recipe=CustomRecipe(choose)):
            y = model(x)
        y.square().mean().backward()
    for (gemm, a, b, backend), count in sorted(gemms.items()):
        print(f"{count} x {gemm}: {a:<16} by {b:<16} on {backend}")
    return gemms


if __name__ == "__main__":
    main()
