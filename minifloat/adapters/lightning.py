"""Lightning's Trainer: a precision plugin that converts the model."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from minifloat.convert import ConversionReport, convert
from minifloat.recipe import RecipeLike


class MinifloatPrecision(MixedPrecision):
    """Converts the model when training begins, and runs it in bf16 autocast: ``Trainer(plugins=MinifloatPrecision())``.

    Lightning loads ``ckpt_path`` before that, so under delayed scaling, whose histories are in the checkpoint, call
    :func:`minifloat.convert` in ``configure_model`` in place of this plugin.

    Args:
        recipe: a recipe or its short name.
        device_type: of ``torch.autocast``; None: "cuda" where there is a GPU, else "cpu".
        **options: further arguments of :func:`minifloat.convert`, such as ``filter_fn`` and ``rules``.

    Attributes:
        report: what was converted, and why the rest was not; None before training begins.
    """

    def __init__(self, recipe: RecipeLike = "current", *, device_type: str | None = None, **options: Any) -> None:
        super().__init__("bf16-mixed", device_type or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.recipe, self.options = recipe, options
        self.report: ConversionReport | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Returns the module, whose linears are converted; what has been converted before stays."""
        self.report = convert(module, self.recipe, **self.options)
        return super().convert_module(module)
