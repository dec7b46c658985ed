"""What a step that overflowed leaves behind in delayed scaling."""

from __future__ import annotations

from torch import nn

from minifloat.nn.delayed import AmaxHistory


def forget_overflow(model: nn.Module) -> None:
    """Removes infinite amaxes from the delayed scaling histories of ``model``, each as if nothing had been recorded.

    A scale stands still while an infinite amax is in its history (``docs/numerics.md``): for ``amax_history_len``
    steps with ``amax_compute_algo="max"``. ``GradScaler`` makes such steps on purpose, since it raises the loss scale
    until gradients overflow. Call this after each optimizer step, skipped or not: the next update then computes the
    scales from the finite amaxes. It does nothing to finite ones and never waits for the device.
    """
    for module in model.modules():
        if isinstance(module, AmaxHistory):
            module.drop_nonfinite()
