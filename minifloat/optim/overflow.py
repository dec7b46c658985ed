"""What a step that overflowed left behind in the delayed scaling of older versions."""

from __future__ import annotations

from torch import nn

from minifloat.arguments import checked
from minifloat.delayed import AmaxHistory


@checked
def forget_overflow(model: nn.Module) -> None:
    """Removes infinite and NaN amaxes from the delayed scaling histories of ``model``.

    There is no need to call it: what is not finite is not recorded, and an update drops what a checkpoint of an older
    version has of it. It does nothing to finite amaxes and never waits for the device.
    """
    for module in model.modules():
        if isinstance(module, AmaxHistory):
            module.drop_nonfinite()
