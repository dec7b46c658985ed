"""The gradients of a step: from where backward left them to what an inner optimizer steps."""

from __future__ import annotations

from torch import Tensor

from minifloat.optim.masters import Master


class Gradients:
    """The gradients of a step, given to what the inner optimizer steps; those of the parameters stay as they are."""

    def __init__(self, params: list[Tensor], masters: dict[Tensor, Master], grad_scale: Tensor | None) -> None:
        self._params = params
        self._masters = masters
        # Through float64, as GradScaler does, so that what is stepped has the same bits.
        self._unscale = None if grad_scale is None else grad_scale.double().reciprocal().float()
        self._set_aside: list[tuple[Tensor, Tensor | None]] = []

    def hand_over(self) -> None:
        """Sets ``grad`` of what the inner optimizer steps, in its dtype and unscaled."""
        for p in self._params:
            master = self._masters.get(p)
            stepped = p if master is None else master.values
            grad = gradient(p)
            if grad is not None:
                grad = grad.to(stepped.dtype)
                grad = grad if self._unscale is None else grad * self._unscale.to(grad.device)
            if master is None and grad is not p.grad:
                self._set_aside.append((p, p.grad))
            stepped.grad = grad

    def take_back(self) -> None:
        """Undoes :meth:`hand_over`."""
        for master in self._masters.values():
            master.values.grad = None
        for p, grad in self._set_aside:
            p.grad = grad
        self._set_aside.clear()


def gradient(p: Tensor) -> Tensor | None:
    """``main_grad`` and ``grad``, where backward has put something into them."""
    if not getattr(p, "grad_added_to_main_grad", False):
        return p.grad
    main_grad: Tensor = p.main_grad  # type: ignore[attr-defined]
    return main_grad if p.grad is None else main_grad + p.grad
