"""Trains a small MLP on a toy regression in bf16 and under each recipe, from the same start on the same data."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifloat import Linear

RECIPES = ("none", "delayed", "current", "block", "mxfp8", "nvfp4")  # "none" keeps a layer in high precision: bf16 here
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model(recipe: str) -> nn.Module:
    """The same initial weights under every recipe."""
    torch.manual_seed(0)
    return nn.Sequential(
        Linear(16, 96, recipe=recipe, name="up"),
        nn.GELU(),
        Linear(96, 1, recipe=recipe, name="down"),
    ).to(DEVICE)


def make_data() -> tuple[Tensor, Tensor]:
    """A smooth function of two random projections."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(128, 16, generator=generator)
    a, b = (x @ torch.randn(16, 2, generator=generator) / 4).unbind(1)
    return x.to(DEVICE), (a.sin() + a * b)[:, None].to(DEVICE)


def train(recipe: str, steps: int) -> list[float]:
    """The loss of each step."""
    model, (x, target) = make_model(recipe), make_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(steps):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(steps: int = 30) -> dict[str, list[float]]:
    losses = {recipe: train(recipe, steps) for recipe in RECIPES}
    for recipe, curve in losses.items():
        label = "bf16" if recipe == "none" else recipe
        print(f"{label:<8} first loss {curve[0]:.4f}, last loss {curve[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
