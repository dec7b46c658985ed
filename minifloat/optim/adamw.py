"""AdamW whose moments may be kept in bf16 or FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, get_args

import torch
from torch import Tensor

from minifloat.arguments import Fraction, NonNegativeFloat, checked
from minifloat.comm.dtensor import own_rows
from minifloat.optim import moments
from minifloat.optim.masters import is_low_precision
from minifloat.optim.moments import Moments, kept_as

_BUCKET = 1 << 24
"""Elements whose moments are in fp32 at a time."""


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay, Loshchilov and Hutter 2019, as ``torch.optim.AdamW``.

    With g the gradient and t the step, counted from 1:
    p *= 1 - lr * weight_decay; m += (1 - beta1)(g - m); v = beta2 v + (1 - beta2) g^2;
    p -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps).

    ``moments`` is what m and v are kept in between steps; the step itself is in fp32, and the update takes m and v as
    they were before they were rounded. bf16 takes 4 bytes a parameter and fp8 2.06, where fp32 takes 8. See
    ``minifloat.optim.moments`` for how they are rounded. With ``"fp32"`` state dicts go to and from
    ``torch.optim.AdamW``. State of a parameter: ``step``; ``exp_avg`` and ``exp_avg_sq`` in the shape of the parameter,
    fp32 or bf16; with fp8 ``exp_avg`` and ``exp_avg_sq_root`` as uint8 E4M3 codes in the shape of the parameter, and
    ``exp_avg_scale`` and ``exp_avg_sq_root_scale``, fp32 [rows, blocks of 128 in a row], what codes are multiplied by.
    fp8 is for parameters of two dims or more; others have fp32.

    Of DTensors, as FSDP2 makes them, each rank steps what it has; the state is DTensors, cut as the parameter is, so
    that ``torch.distributed.checkpoint`` loads it on any number of ranks.

    The random bits of a step follow from the number of the step, so that a resumed run has the same; on another kind of
    device, or another number of ranks, they are others.

    Args:
        params: fp32 parameters, or param groups; bf16, fp16 and quantized ones go through ``MasterWeights``.
        lr: learning rate.
        betas: decay of the first and the second moment, in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled, times ``lr``.
        moments: ``"fp32"``, ``"bf16"`` or ``"fp8"``; a param group may have its own. That of a loaded state dict wins.

    Raises:
        ValueError: an option is out of its range, a parameter is not fp32, or, in ``step``, a gradient is sparse or
            another one is sharded than its parameter, or fp8 moments of one that is not sharded by rows.
    """

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: NonNegativeFloat | Tensor = 1e-3,
        betas: tuple[Fraction, Fraction] = (0.9, 0.999),
        eps: NonNegativeFloat = 1e-8,
        weight_decay: NonNegativeFloat = 1e-2,
        *,
        moments: Moments = "fp32",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "moments": moments}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, with the options of this optimizer where ``param_group`` has none of its own."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient; returns what ``closure`` does.

        Raises:
            ValueError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in chain.from_iterable(group["params"] for group in self.param_groups):
            if p.grad is not None and p.grad.is_sparse:
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(p.shape)} is sparse, which AdamW does not take: use "
                    "torch.optim.SparseAdam for it, or an embedding with sparse=False"
                )
        draws: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            stepped = {p: self._state(p, group["moments"]) for p in group["params"] if p.grad is not None}
            for params in _buckets(list(stepped), group["moments"]):
                kind, states = kept_as(params[0], group["moments"]), [stepped[p] for p in params]
                for state in states:
                    state["step"] += 1
                device = params[0].device
                if kind != "fp32" and device not in draws:
                    draws[device] = torch.Generator(device).manual_seed(int(states[0]["step"]))
                _update(params, states, group, kind, draws.get(device))
        return loss

    def _state(self, p: Tensor, asked: Moments) -> dict[str, Any]:
        state, kind = self.state[p], kept_as(p, asked)
        if not state:
            made = moments.zeros(p, _names(kind), kind)
            state["step"] = torch.tensor(0.0)
            state.update(made)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # load_state_dict gave all state the dtype of the parameter: exactly, if wider
            for p in group["params"]:
                held = self.state.get(p, {})
                kind: Moments = group["moments"]
                kind = "fp32" if kind == "fp8" and _names(kind)[1] not in held else kind
                held.update({name: held[name].to(moments.dtype(kind)) for name in _names(kind) if name in held})


def _update(
    whole: list[Tensor],
    states: list[dict[str, Any]],
    group: dict[str, Any],
    kind: Moments,
    draws: torch.Generator | None,
) -> None:
    """The formulas of the class over lists, in the order of operations of PyTorch's, so that fp32 has its bits."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    first, second = _names(kind)
    params, grads = [own_rows(p) for p in whole], [_own_gradient(p) for p in whole]
    m, v = moments.load(states, first, kind), moments.load(states, second, kind)
    if kind == "fp8":
        torch._foreach_mul_(v, v)  # kept as its root
    if group["weight_decay"] != 0:
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
    torch._foreach_lerp_(m, grads, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
    roots = torch._foreach_sqrt(v)
    moments.store(states, first, m, kind, draws)
    moments.store(states, second, roots if kind == "fp8" else v, kind, draws)
    steps = [float(state["step"]) for state in states]
    torch._foreach_div_(roots, [(1 - beta2**step) ** 0.5 for step in steps])
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_addcdiv_(params, m, roots, [(lr / (1 - beta1**step)) * -1 for step in steps])


def _own_gradient(p: Tensor) -> Tensor:
    """Of the rows that this rank has."""
    assert p.grad is not None
    given, wanted = getattr(p.grad, "placements", None), getattr(p, "placements", None)
    if given != wanted:
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(p.shape)} is placed as {given}, the parameter as {wanted}: "
            "redistribute it first"
        )
    return own_rows(p.grad)


def _names(kind: Moments) -> tuple[str, str]:
    return ("exp_avg", "exp_avg_sq_root") if kind == "fp8" else ("exp_avg", "exp_avg_sq")


def _buckets(params: Sequence[Tensor], kind: Moments) -> Iterator[list[Tensor]]:
    """Parameters of one device and form of moments, few enough for fp32 copies of these to take little memory."""
    bucket: list[Tensor] = []
    held = 0
    for p in sorted(params, key=lambda p: kept_as(p, kind)):
        size = own_rows(p).numel()
        alike = not bucket or (p.device, kept_as(p, kind)) == (bucket[0].device, kept_as(bucket[0], kind))
        if bucket and (not alike or held + size > _BUCKET):
            yield bucket
            bucket, held = [], 0
        bucket.append(p)
        held += size
    if bucket:
        yield bucket


def _check(group: dict[str, Any]) -> None:
    if group["moments"] not in get_args(Moments):
        raise ValueError(f"moments is {group['moments']!r}; known: {', '.join(get_args(Moments))}")
    for name, value in (("lr", group["lr"]), ("eps", group["eps"]), ("weight_decay", group["weight_decay"])):
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it must be 0 or more")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas are {group['betas']}; both must be in [0, 1)")
    for p in group["params"]:
        if is_low_precision(p) or p.dtype != torch.float32:
            raise ValueError(
                f"AdamW steps fp32 parameters, got one of shape {tuple(p.shape)} in {p.dtype}: use "
                "MasterWeights(params, AdamW, ...), which gives low-precision ones fp32 masters"
            )
