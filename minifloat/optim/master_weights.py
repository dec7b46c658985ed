"""``MasterWeights`` around any optimizer: it steps fp32 copies, from which the model's parameters are rounded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from minifloat.arguments import checked
from minifloat.nn.linear_call import waiting
from minifloat.optim.gradient_norm import gradient
from minifloat.optim.master_parameter import KEYS, Master, is_low_precision, write
from minifloat.recompute import capturing

_OWN_ENTRIES = ("params", "param_names")


class MasterWeights(torch.optim.Optimizer):
    """Optimizer that steps fp32 masters with any optimizer class, and rounds the low-precision parameters to them.

    ``MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3, weight_decay=0.1)``. Parameters that are
    :class:`~minifloat.QuantizedTensor`, bf16 or fp16 have masters; others are stepped themselves. Quantized parameters
    are written in one multi-tensor cast, 16-bit ones in one ``_foreach_copy_``. Param groups, schedulers, hooks,
    closures and ``zero_grad`` are as for any optimizer. Move the model to its device first.

    A master starts from the parameter's ``get_high_precision_init_val()`` if it has one, which is then cleared,
    otherwise from its value. A later write to the parameter (loading a model, clipping) replaces its master. The
    gradient is ``p.grad``; where ``p.grad_added_to_main_grad`` is set, ``p.main_grad`` plus ``p.grad`` if there is one.

    A ``GradScaler`` is unscaled here, in fp32; a step that overflowed changes nothing (``docs/optimizers.md``). The
    state dict is the inner optimizer's, plus one entry a parameter, ``"master"`` or ``"remainder"``; with a remainder
    load the model's state dict too, before or after.

    Args:
        params: parameters, param groups or named parameters, as for any optimizer.
        optimizer_class: called with param groups and ``options``; what it makes is :attr:`inner`.
        master: ``"fp32"``, or ``"bf16+remainder"``: masters of bf16 parameters are kept as 16 bits beyond the
            parameter's own, exactly, and are whole during a step only, which saves 2 bytes a parameter between steps.
            Parameters are then rounded with ties away from zero, and what others write to one is the upper half of its
            master.
        options: of ``optimizer_class``, as keyword arguments; param groups may have their own.

    Raises:
        ValueError: ``master`` is neither, or a remainder of sharded parameters, or what the optimizer class raises.
    """

    inner: torch.optim.Optimizer
    counts_its_writes = True  # a version raised after the step would read as a write by others, looked at element-wise
    _step_supports_amp_scaling = True  # GradScaler then leaves unscaling and skipping to step

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        master: Literal["fp32", "bf16+remainder"] = "fp32",
        **options: Any,
    ) -> None:
        self._with_remainder = master == "bf16+remainder"
        self._masters: dict[Tensor, Master] = {}
        self._make_inner: Callable[..., torch.optim.Optimizer] | None = partial(optimizer_class, **options)
        super().__init__(params, {})
        self.defaults = dict(self.inner.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, with masters for those that train and are of low precision."""
        super().add_param_group(param_group)
        outer = self.param_groups[-1]
        for p in outer["params"]:
            if is_low_precision(p) and p.requires_grad:
                self._masters[p] = Master(p, self._with_remainder)
        group = _options(outer) | {"params": [self._stepped(p) for p in outer["params"]]}
        if self._make_inner is not None:
            self.inner, self._make_inner = self._make_inner([group]), None
        else:
            self.inner.add_param_group(group)
        for key, value in _options(self.inner.param_groups[-1]).items():
            outer.setdefault(key, value)
        for master in self._masters.values():
            master.release()

    def _stepped(self, p: Tensor) -> Tensor:
        return self._masters[p].values if p in self._masters else p

    def _params(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    # ---- step ----

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the inner optimizer, and rounds the parameters that follow from it.

        Raises:
            ValueError: a parameter has moved to another device, or ``GradScaler`` is used with ``main_grad``.
            RuntimeError: a CUDA graph is captured with a ``GradScaler``, and the inner optimizer is not fused.
        """
        found = self._found_inf()
        if found is True:
            return None
        in_graph = found if isinstance(found, Tensor) else None
        with torch.no_grad():
            self._prepare()
            gradients = _SteppedGradients(list(self._params()), self._masters, getattr(self, "grad_scale", None))
            try:
                if in_graph is not None:
                    self.inner.found_inf = in_graph  # type: ignore[attr-defined]
                if closure is None:
                    gradients.set()
                    loss = self.inner.step()
                else:
                    loss = self.inner.step(self._reevaluation(closure, gradients))
                stepped = self._with_gradient()
                if not capturing() and all(_at_rest(group) for group in self.inner.param_groups):
                    stepped = [master for master in stepped if not master.is_written()]
                write(stepped, in_graph)
            finally:
                gradients.restore()
                self.inner.__dict__.pop("found_inf", None)
                for master in self._masters.values():
                    master.release()
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update(_options(inner))  # some optimizers keep state in their groups
        self._refresh_state()
        return loss

    def _found_inf(self) -> bool | Tensor:
        """Reads what ``GradScaler`` found, which sets ``found_inf`` and ``grad_scale`` for the time of a step.

        A CUDA graph cannot wait for it: its inner optimizer and casts take the number on the device.
        """
        found: Tensor | int | None = getattr(self, "found_inf", None)  # 0 where nothing has a gradient
        if found is None:
            return False
        if any(getattr(p, "grad_added_to_main_grad", False) for p in self._params()):
            raise ValueError(
                "GradScaler looks at p.grad alone and would miss an overflow in main_grad; train in bf16 without a "
                "scaler, or without fuse_wgrad_accumulation"
            )
        if not (isinstance(found, Tensor) and capturing()):
            return bool(found)
        if not getattr(self.inner, "_step_supports_amp_scaling", False):
            raise RuntimeError(
                f"a CUDA graph cannot wait to see whether gradients overflowed, as {type(self.inner).__name__} does: "
                "make the inner optimizer with fused=True, or capture no step"
            )
        return found

    def _prepare(self) -> None:
        for p in self._params():
            if p not in self._masters and is_low_precision(p) and gradient(p) is not None:
                self._adopt(p)
        for p, master in self._masters.items():
            if master.values.device != p.device:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is on {p.device} and its master on "
                    f"{master.values.device}: move the model to its device before MasterWeights is made"
                )
            master.follow()
            master.load()
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_options(outer))

    def _adopt(self, p: Tensor) -> None:
        """Makes a master for a parameter that was frozen when it was added."""
        master = self._masters[p] = Master(p, self._with_remainder)
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["params"] = [self._stepped(each) for each in outer["params"]]
        if p in self.inner.state:  # what some optimizers make at once, in the dtype of the parameter
            state = self.inner.state.pop(p)
            lower = {k: v.float() for k, v in state.items() if isinstance(v, Tensor) and v.dtype == p.dtype}
            self.inner.state[master.values] = state | lower

    def _with_gradient(self) -> list[Master]:
        return [master for master in self._masters.values() if master.values.grad is not None]

    def _reevaluation(self, closure: Callable[[], Any], gradients: _SteppedGradients) -> Callable[[], Any]:
        """Wraps the closure for an inner optimizer that calls it often: at the parameters of its latest masters."""

        def evaluate() -> Any:
            with torch.no_grad():
                write(self._with_gradient())
            gradients.restore()
            with torch.enable_grad():
                loss = closure()
            gradients.set()
            return loss

        return evaluate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, ``main_grad`` where backward has added to it, and what waits for ``backward_dw``."""
        for layer in waiting(self):
            layer._wgrad_tasks.clear()
        super().zero_grad(set_to_none)
        for p in self._params():
            if getattr(p, "grad_added_to_main_grad", False):
                p.main_grad.zero_()  # type: ignore[attr-defined]
                p.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    # ---- state ----

    def _refresh_state(self) -> None:
        """Shows in :attr:`state`, by the model's parameters, what the inner optimizer keeps for what it steps."""
        self.state = defaultdict(dict)
        for p in self._params():
            master = self._masters.get(p)
            held = self.inner.state.get(self._stepped(p), {}) | ({} if master is None else master.state())
            if held:
                self.state[p] = held

    def state_dict(self) -> dict[str, Any]:
        """Returns the inner optimizer's, with ``"master"`` (fp32) or ``"remainder"`` (int16) beside its entries."""
        self._refresh_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the dict of :meth:`state_dict`, and rounds the parameters from the loaded masters.

        Raises:
            ValueError: it is that of another optimizer or model; nothing is loaded then.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saved = self._by_parameter(state_dict)
        saved_groups = state_dict["param_groups"]
        groups = [{k: v for k, v in group.items() if k != "param_names"} for group in saved_groups]
        states = {
            i: {k: v for k, v in entries.items() if k not in KEYS} if isinstance(entries, dict) else entries
            for i, entries in state_dict["state"].items()
        }
        self.inner.load_state_dict({"state": states, "param_groups": groups})
        for outer, inner, group in zip(self.param_groups, self.inner.param_groups, saved_groups, strict=True):
            outer.update(_options(inner))
            if "param_names" in group:
                outer["param_names"] = group["param_names"]
        for p, master in self._masters.items():
            if any(key in saved[p] for key in KEYS):
                master.restore(saved[p])
        # With a remainder the parameter is a part of the master: it comes with the model's state. And codes that came
        # with it stay, where they were cast with an earlier delayed scale.
        whole = [master for master in self._masters.values() if master.remainder is None]
        write([master for master in whole if not master.is_written()])
        self._refresh_state()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _by_parameter(self, state_dict: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
        """Checks the state of each parameter. Those that trained when it was saved get a master if they have none.

        Those that did not, and train now, keep the master that they have.
        """
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != saved_sizes:
            raise ValueError(
                f"the state dict has param groups of {saved_sizes} parameters, the optimizer of {sizes}: make the "
                "groups as they were when it was saved"
            )
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        saved = {p: state_dict["state"].get(i, {}) for i, p in zip(ids, self._params(), strict=True)}
        with_master = {p for p, entries in saved.items() if any(key in entries for key in KEYS)}
        if self._masters and not with_master:
            raise ValueError(
                "the state dict has no master weights, it is that of a plain optimizer: load it into one, or start "
                "MasterWeights from the loaded model"
            )
        for i, (p, entries) in enumerate(saved.items()):
            if p in with_master and not is_low_precision(p):
                raise ValueError(f"the state of parameter {i} has a master, but it is {p.dtype} here and needs none")
            if p in with_master and p not in self._masters:
                self._adopt(p)
            if p in with_master:
                self._masters[p].check(entries, i)
        return saved

    def __getstate__(self) -> dict[str, Any]:
        own = {"inner": self.inner, "_masters": self._masters, "_with_remainder": self._with_remainder}
        return super().__getstate__() | own | {"_make_inner": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for master in self._masters.values():  # a copied parameter counts its versions anew
            if master.remainder is None:
                master.mark_written()
            else:
                master.mark_unknown()


class _SteppedGradients:
    """Gradients of a step, given to what the inner optimizer steps; those of the parameters stay as they are."""

    def __init__(self, params: list[Tensor], masters: dict[Tensor, Master], grad_scale: Tensor | None) -> None:
        self._params = params
        self._masters = masters
        # Through float64, as GradScaler does, so that what is stepped has the same bits.
        self._unscale = None if grad_scale is None else grad_scale.double().reciprocal().float()
        self._replaced: list[tuple[Tensor, Tensor | None]] = []

    def set(self) -> None:
        """Sets ``grad`` of what the inner optimizer steps, in its dtype and unscaled."""
        for p in self._params:
            master = self._masters.get(p)
            stepped = p if master is None else master.values
            grad = gradient(p)
            if grad is not None:
                grad = grad.to(stepped.dtype)
                grad = grad if self._unscale is None else grad * self._unscale.to(grad.device)
            if master is None and grad is not p.grad:
                self._replaced.append((p, p.grad))
            stepped.grad = grad

    def restore(self) -> None:
        """Undoes :meth:`set`."""
        for master in self._masters.values():
            master.values.grad = None
        for p, grad in self._replaced:
            p.grad = grad
        self._replaced.clear()


def _at_rest(group: dict[str, Any]) -> bool:
    """Whether a step should change no master, such as the one by which PyTorch gives an optimizer state to be loaded.

    Writing parameters then would cast them anew, with another delayed scale than their codes have been loaded with.
    """
    rate = group.get("lr", 1.0)
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        return False  # to look would wait for the device
    return float(rate) == 0


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OWN_ENTRIES}
