"""AdamW whose moments may be kept in bf16, or in E4M3 codes with one scale for each 128 elements.

A moment moves by little: with beta2 = 0.999 by a thousandth a step, while a bf16 has steps of 1/256 to 1/128 of its
value and an E4M3 of 1/16 to 1/8. Rounded to the nearest it would stay where it is. So both low-precision forms round
stochastically, up or down with probabilities that make the mean exact, which holds the moments to their fp32 course.

E4M3 keeps the second moment as its square root: codes span a factor of about 2^18, which is 2^36 of the moment itself.
Blocks are of up to 128 consecutive elements of a row, ``p[i]``, so that FSDP2, which shards by rows, shards codes and
scales alike. Parameters of fewer than two dims, few elements in all, keep moments in fp32. Scales are powers of two:
then all codes but the smallest have the significant bits of the value, and rounding those stochastically leaves the
cast nothing to do. A root that is not zero gets a code that is not zero, since an update divides by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from minifloat.arguments import Fraction, NonNegativeFloat, checked
from minifloat.comm.pytorch import own_rows, sharded_like
from minifloat.formats import ROWWISE, Format
from minifloat.operand import Operand
from minifloat.optim.master import is_low_precision
from minifloat.quantizer import Quantizer, cast_all

Moments = Literal["fp32", "bf16", "fp8"]
State = dict[str, Any]

_BUCKET = 1 << 24
"""Elements whose moments are in fp32 at a time."""
_E4M3 = Quantizer(Format("e4m3", block=128, scale_rule="pow2"), columnwise=False)


class Form(NamedTuple):
    """How moments are kept.

    Args:
        dtype: of the values, or of their codes.
        dropped: bits of an fp32 mantissa, of 23, beyond those that are kept.
        second: what a state calls the second moment.
    """

    dtype: torch.dtype
    dropped: int
    second: str = "exp_avg_sq"


FORMS = {
    "fp32": Form(torch.float32, 0),
    "bf16": Form(torch.bfloat16, 16),
    "fp8": Form(torch.uint8, 20, "exp_avg_sq_root"),
}


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay, Loshchilov and Hutter 2019, as ``torch.optim.AdamW``.

    With g the gradient and t the step, counted from 1:
    p *= 1 - lr * weight_decay; m += (1 - beta1)(g - m); v = beta2 v + (1 - beta2) g^2;
    p -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps).

    ``moments`` is what m and v are kept in between steps; the step itself is in fp32, and the update takes m and v as
    they were before they were rounded, stochastically. bf16 takes 4 bytes a parameter and fp8 2.06, where fp32 takes 8.
    With ``"fp32"`` state dicts go to and from ``torch.optim.AdamW``. State of a parameter: ``step``; ``exp_avg`` and
    ``exp_avg_sq`` in the shape of the parameter, fp32 or bf16; with fp8 ``exp_avg`` and ``exp_avg_sq_root`` as uint8
    E4M3 codes in the shape of the parameter, and ``exp_avg_scale`` and ``exp_avg_sq_root_scale``, fp32 [rows, blocks of
    128 in a row], what codes are multiplied by. fp8 is for parameters of two dims or more; others have fp32.

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
            stepped = {p: self._state(p, _form_of(p, group["moments"])) for p in group["params"] if p.grad is not None}
            for params in _buckets(list(stepped), group["moments"]):
                kind, device = _form_of(params[0], group["moments"]), params[0].device
                states = [stepped[p] for p in params]
                for state in states:
                    state["step"] += 1
                if kind != "fp32" and device not in draws:
                    draws[device] = torch.Generator(device).manual_seed(int(states[0]["step"]))
                _update(params, states, group, kind, draws.get(device))
        return loss

    def _state(self, p: Tensor, kind: Moments) -> State:
        state = self.state[p]
        if not state:
            made = _new_moments(p, kind)
            state["step"] = torch.tensor(0.0, device="cpu")
            state.update(made)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            if unknown := [name for name in ("amsgrad", "maximize") if group.get(name)]:
                raise ValueError(f"the state dict has {unknown[0]}=True, which this AdamW does not compute")
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("moments", "fp32")  # PyTorch's, which does not say it
        for group in self.param_groups:  # load_state_dict gave all state the dtype of the parameter: exactly, if wider
            for p in group["params"]:
                held = self.state.get(p, {})
                form = FORMS[group["moments"]]
                form = form if form.second in held or group["moments"] != "fp8" else FORMS["fp32"]
                held.update({name: held[name].to(form.dtype) for name in ("exp_avg", form.second) if name in held})


def _update(
    whole: list[Tensor], states: list[State], group: dict[str, Any], kind: Moments, draws: torch.Generator | None
) -> None:
    """The formulas of the class over lists, in the order of operations of PyTorch's, so that fp32 has its bits."""
    lr, (beta1, beta2), second = float(group["lr"]), group["betas"], FORMS[kind].second
    params, grads = [own_rows(p) for p in whole], [_local_gradient(p) for p in whole]
    m, v = load_moments(states, "exp_avg", kind), load_moments(states, second, kind)
    if kind == "fp8":
        torch._foreach_mul_(v, v)  # kept as its root
    if group["weight_decay"] != 0:
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
    torch._foreach_lerp_(m, grads, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
    roots = torch._foreach_sqrt(v)
    store_moments(states, "exp_avg", m, kind, draws)
    store_moments(states, second, roots if kind == "fp8" else v, kind, draws)
    steps = [float(state["step"]) for state in states]
    torch._foreach_div_(roots, [(1 - beta2**step) ** 0.5 for step in steps])
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_addcdiv_(params, m, roots, [(lr / (1 - beta1**step)) * -1 for step in steps])


def _local_gradient(p: Tensor) -> Tensor:
    """Of the rows that this rank has."""
    assert p.grad is not None
    given, wanted = getattr(p.grad, "placements", None), getattr(p, "placements", None)
    if given != wanted:
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(p.shape)} is placed as {given}, the parameter as {wanted}: "
            "redistribute it first"
        )
    return own_rows(p.grad)


def _buckets(params: Sequence[Tensor], kind: Moments) -> Iterator[list[Tensor]]:
    """Parameters of one device and form of moments, few enough for fp32 copies of these to take little memory."""
    bucket: list[Tensor] = []
    held = 0
    for p in sorted(params, key=lambda p: _form_of(p, kind)):
        size = own_rows(p).numel()
        alike = not bucket or (p.device, _form_of(p, kind)) == (bucket[0].device, _form_of(bucket[0], kind))
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


# ---- moments ----


def _form_of(p: Tensor, moments: Moments) -> Moments:
    """What the moments of a parameter are kept as where ``moments`` is asked for."""
    return "fp32" if moments == "fp8" and p.dim() < 2 else moments


def _new_moments(p: Tensor, kind: Moments) -> State:
    """The moments of a parameter that has not been stepped; DTensors where it is one.

    Raises:
        ValueError: a DTensor is sharded by another dim than rows, which would cut blocks.
    """
    names = "exp_avg", FORMS[kind].second
    values = {name: torch.zeros_like(p, dtype=FORMS[kind].dtype) for name in names}
    if kind != "fp8":
        return values
    if any(placement.is_shard() and placement.dim != 0 for placement in getattr(p, "placements", ())):
        raise ValueError(
            f"fp8 moments are in blocks of a row, which a parameter of shape {tuple(p.shape)} sharded as "
            f"{p.placements} cuts: use moments='bf16'"  # type: ignore[attr-defined]
        )
    rows, blocks = own_rows(p).shape[0], -(-math.prod(p.shape[1:]) // 128)
    scales = [torch.ones(rows, blocks, dtype=torch.float32, device=p.device) for _ in names]
    whole = p.shape[0], blocks
    return values | {f"{name}_scale": sharded_like(p, own, whole) for name, own in zip(names, scales, strict=True)}


def load_moments(states: Sequence[State], name: str, kind: Moments) -> list[Tensor]:
    """The moments called ``name`` in fp32, of this rank's rows: with ``"fp32"`` the very tensors of the states."""
    held = [own_rows(state[name]) for state in states]
    if kind != "fp8":
        return [moment.float() for moment in held]
    return [_decode(codes, own_rows(state[f"{name}_scale"])) for codes, state in zip(held, states, strict=True)]


def store_moments(
    states: Sequence[State], name: str, values: Sequence[Tensor], kind: Moments, generator: torch.Generator | None
) -> None:
    """Writes moments that :func:`load_moments` gave and the step changed."""
    if kind == "fp32":
        return
    assert generator is not None
    rounded = [stochastic_round(x, FORMS[kind].dropped, generator) for x in values]
    held = [own_rows(state[name]) for state in states]
    if kind == "bf16":
        torch._foreach_copy_(held, rounded)
        return
    matrices = [x.flatten(1) for x in rounded]
    casts = cast_all(matrices, [_E4M3] * len(matrices))
    for state, own, operands, x in zip(states, held, casts, matrices, strict=True):
        operand = operands.any
        assert operand.scale_inv is not None
        codes = operand.codes.masked_fill((operand.codes == 0) & (x > 0), 1)  # 1 is the smallest code above zero
        own.copy_(codes.view(own.shape))
        own_rows(state[f"{name}_scale"]).copy_(operand.scale_inv)


def stochastic_round(x: Tensor, dropped: int, generator: torch.Generator) -> Tensor:
    """fp32 ``x`` with its last ``dropped`` bits zero: one of two neighbours, in the mean ``x``. Inf and NaN stay."""
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << dropped, bits.shape, dtype=torch.int32, device=x.device, generator=generator)
    rounded = ((bits + noise) & -(1 << dropped)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def _decode(codes: Tensor, scale_inv: Tensor) -> Tensor:
    matrix = codes.flatten(1)
    shape = matrix.shape[0], matrix.shape[1]
    operand = Operand(matrix, scale_inv, None, _E4M3.row_format, ROWWISE, shape, torch.float32)
    return operand.dequantize().view(codes.shape)
