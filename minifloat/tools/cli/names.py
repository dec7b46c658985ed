"""Names in the help of `minifloat train`: plain values, which need no PyTorch."""

from difflib import get_close_matches

RECIPES = "delayed", "current", "block", "mxfp8", "nvfp4", "rowwise", "mxfp4", "w4a8", "mxfp6"
BF16 = "bf16"  # the name of no recipe: the same model and the same bf16 activations, nothing quantized
MODELS = "micro", "tiny", "mini", "small", "30m", "124m", "base"
MODEL = "tiny"

# Relative, of the final validation losses of FP8; 4-bit elements learn visibly slower in a run this short.
MAX_GAP = 0.05
MAX_GAP_4BIT = 0.10
FINISH_4BIT = 0.2  # share of the steps, the last ones, that a 4-bit recipe leaves to bf16
# Relative, of the first gradient norms: rounding moves them by up to 6 %, a scale off by two by 20 % and more.
MAX_GRADIENT_GAP = 0.12

TIMEOUT = 10.0
"""Minutes that a rank may hang: PyTorch's own default for NCCL, and longer than a checkpoint takes to write."""


def check_recipe(name: str, option: str = "--recipe") -> None:
    """Raises ValueError, which names the option and the nearest name, for a recipe that does not exist."""
    if name not in (*RECIPES, BF16):
        raise ValueError(f"{option}: there is no recipe {name!r}; {choice(name, (*RECIPES, BF16))}")


def check_names(recipe: str, against: str | None) -> tuple[str, ...]:
    """The names of the runs; raises ValueError for a recipe that does not exist."""
    check_recipe(recipe)
    if against is None:
        return (recipe,)
    check_recipe(against, "--against")
    if recipe == against:
        raise ValueError(f"--against {against} compares {recipe} with itself; choose another recipe")
    return recipe, against


def choice(wrong: str, names: tuple[str, ...]) -> str:
    """The way out of a name that does not exist: the nearest one, and all there are."""
    within = [name for name in names if name in wrong.lower()]  # Float8CurrentScaling
    near = within or get_close_matches(wrong.lower(), names, 1)
    guess = f"did you mean {near[0]}? " if near else ""
    return f"{guess}choose from {', '.join(names)}"
