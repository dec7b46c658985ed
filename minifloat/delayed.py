"""Delayed scaling's state, and its update between steps: amaxes of all layers reduced at once, then the next scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat.arguments import label_of, shown
from minifloat.comm import dtensor_ddp
from minifloat.comm.collectives import all_reduce_max
from minifloat.comm.group import Group
from minifloat.ops import delayed as kernels
from minifloat.quantizer import are_scales
from minifloat.recipe import DelayedScaling


class ExpertShare(NamedTuple):
    """The experts that a rank has among all of a layer: ``own`` from ``first`` on.

    Histories [..., slots own] have a number for each of these in each slot.
    """

    first: int
    own: int
    all: int

    def of(self, whole: Tensor) -> Tensor:
        """This rank's numbers of those of all experts, [..., slots all]."""
        return whole.unflatten(-1, (-1, self.all))[..., self.first : self.first + self.own].flatten(-2)

    def among_all(self, own: Tensor) -> Tensor:
        """This rank's numbers among those of all experts; the others are 0."""
        others = self.first, self.all - self.first - self.own
        return torch.nn.functional.pad(own.unflatten(-1, (-1, self.own)), others).flatten(-2)


class History(NamedTuple):
    """One direction of one layer: scales fp32 [n], amaxes fp32 [L, n], and the rule from these to those.

    Row 0 is of the step in progress, the last row of the newest finished one.
    ``rule``: one of ``DelayedScaling.rules``; ``recipe``: it; ``share``: of experts that ranks share out.
    """

    scale: Tensor
    amax_history: Tensor
    recipe: DelayedScaling
    rule: str
    share: ExpertShare | None = None


# ---- updates ----

_AVAILABLE = dist.is_available()


def reduction_group(recipe: DelayedScaling, group: dist.ProcessGroup | None) -> Group | None:
    """The group that amaxes are reduced over, all ranks by default; None where ranks do not reduce.

    One of a single rank is a group, too: a module may be used under it and under a larger one.

    Raises:
        ValueError: of :func:`~minifloat.comm.dtensor_ddp.check_no_join`.
    """
    if not _AVAILABLE or not dist.is_initialized():
        return None
    dtensor_ddp.keep_histories()
    if not recipe.reduce_amax:
        return None
    found = Group.of(group if group is not None else dist.group.WORLD)
    if found.size > 1:
        dtensor_ddp.check_no_join()
    return found if dist.get_world_size() > 1 else None


def check_same_scale(layer: object, why: str, ranks: Group, recipe: DelayedScaling, group: Group | None) -> None:
    """Raises a ValueError unless all of ``ranks``, which gather a tensor, cast it with the same delayed scale.

    Args:
        why: what ``layer`` gathers, as errors say it: ``"the weight is sharded"``.
        group: the ranks over which amaxes are reduced; None if this rank keeps its own.
    """
    if not recipe.reduce_amax:
        raise ValueError(
            f"{label_of(layer)}: {why}, and all ranks must cast with one scale, but DelayedScaling(reduce_amax=False) "
            "gives each rank its own; use reduce_amax=True"
        )
    if group is not None and group.size == dist.get_world_size():
        return
    reducing = {dist.get_rank()} if group is None else set(dist.get_process_group_ranks(group.process_group))
    missing = set(dist.get_process_group_ranks(ranks.process_group)) - reducing
    if missing:
        raise ValueError(
            f"{label_of(layer)}: {why}, and all ranks must cast with one scale, but autocast's amax_reduction_group "
            f"leaves out ranks {sorted(missing)}; give it one that contains them"
        )


def reduce(histories: Sequence[History], group: Group) -> None:
    """Makes the newest amaxes the largest of all ranks: one MAX all-reduce for all of them.

    Ranks that have other experts of a layer each reduce those of all, of which the others' are 0 here.
    """
    if group.size == 1:
        return
    shares = [history.share for history in histories]
    newest = [history.amax_history[0] for history in histories]
    sent = [own if share is None else share.among_all(own) for own, share in zip(newest, shares, strict=True)]
    for own, share, largest in zip(newest, shares, all_reduce_max(sent, group), strict=True):
        own.copy_(largest if share is None else share.of(largest))


def update(histories: Sequence[History], group: Group | None = None) -> None:
    """Reduces the newest amaxes over a group, rolls the histories and computes the next scales."""
    if group is not None:
        reduce(histories, group)
    if histories:
        scales, amaxes, _, rules, _ = zip(*histories, strict=True)
        kernels.update_scales_(amaxes, scales, rules)


# ---- state ----


class Progress:
    """Progress of the update of one history. A plain object: setting an attribute of a module takes microseconds.

    Attributes:
        recording: a forward outside of any ``autocast`` records amaxes, or did when it raised.
        region: the latest outermost ``autocast`` that the module ran forward in.
        complete: the region whose amaxes a backward has completed, and what updates them as long as that backward runs.
        history: the buffers under the latest recipe.
    """

    def __init__(self, recording: bool = False) -> None:
        self.recording = recording
        self.region = Region()  # of no context yet: code that is compiled for None would be compiled again
        self.complete: tuple[Region | None, ref[Callable[[], None]]] | None = None
        self.history: History | None = None


def resized(amaxes: Tensor, length: int) -> Tensor:
    """A history [L, n] of so many steps: it lacks the oldest, or has zeros before them."""
    kept = amaxes[max(1, amaxes.shape[0] - length + 1) :]
    return torch.cat([amaxes[:1], torch.nn.functional.pad(kept, (0, 0, length - 1 - kept.shape[0], 0))])


def history_length(saved: Any) -> int:
    """The steps of a history [length, slots] of a state dict; 0 where it is none."""
    return saved.shape[0] if isinstance(saved, Tensor) and saved.dim() == 2 else 0


_VALID: dict[str, tuple[Callable[[Tensor], bool], str]] = {
    "scale": (are_scales, "not above 0 and finite, floating-point; scales are"),
    "amax_history": (  # infinity and NaN, as older checkpoints have them, are dropped
        lambda values: values.is_floating_point() and not bool((values < 0).any()),
        "below 0, or not floating-point; largest magnitudes are not",
    ),
}
"""Check of each buffer of a state dict, and the words of its error."""


class AmaxHistory(nn.Module):
    """Scales and amaxes of one direction of a layer.

    Buffers: ``scale`` fp32 [slots], ones at first; ``amax_history`` fp32 [length, slots], zeros at first, with the step
    in progress in row 0 and the newest finished one in the last row. They stay fp32 when the module is cast, and a
    checkpoint without them, or with another length, loads; of all experts of a layer, a rank's ``share`` of them.
    """

    scale: Tensor
    amax_history: Tensor

    def __init__(
        self, slots: int, length: int, device: torch.device | str | None = None, share: ExpertShare | None = None
    ) -> None:
        super().__init__()
        self.progress, self.share = Progress(), share
        self.register_buffer("scale", torch.ones(slots, dtype=torch.float32, device=device))
        self.register_buffer("amax_history", torch.zeros(length, slots, dtype=torch.float32, device=device))

    def reset_parameters(self) -> None:
        """Forgets everything; also how the buffers get values after ``to_empty``."""
        for name in _VALID:
            self._reset(name)

    @torch.no_grad()
    def _reset(self, name: str) -> None:
        getattr(self, name).fill_(1.0 if name == "scale" else 0.0)

    def reset_missing(self, state_dict: dict[str, Any], prefix: str, device: torch.device) -> None:
        """Resets what a state dict lacks; what is on ``meta`` gets memory on ``device`` first."""
        for name in _VALID:
            if prefix + name not in state_dict:
                buffer = getattr(self, name)
                if buffer.is_meta:
                    setattr(self, name, torch.empty_like(buffer, device=device))
                self._reset(name)

    @torch.no_grad()
    def forget_newest(self) -> None:
        """Drops what the step in progress has recorded."""
        self.amax_history[0].zero_()

    @torch.no_grad()
    def keep(self, share: ExpertShare) -> None:
        """Keeps a rank's share of what are those of all experts."""
        self.share, self.progress.history = share, None
        for name in _VALID:
            setattr(self, name, share.of(getattr(self, name)).clone())

    def history(self, recipe: DelayedScaling, forward: bool, compiling: bool, records: bool = False) -> History:
        """The buffers under a recipe; if a pass ``records``, as long as it asks for."""
        known, buffers, length = None if compiling else self.progress.history, self._buffers, recipe.amax_history_len
        scale, amaxes = buffers["scale"], buffers["amax_history"]
        if known is not None and known[0] is scale and known[1] is amaxes and known[2] is recipe:
            return known
        if records and amaxes is not None and amaxes.shape[0] != length:
            with torch.inference_mode(False):  # or training could not write to it later
                self.amax_history = resized(amaxes, length)
        found = History(self.scale, self.amax_history, recipe, recipe.rules[0 if forward else 1], self.share)
        if not compiling and found.amax_history.shape[0] == length:
            self.progress.history = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        # The rest knows other modules, and backwards that run: no part of a copy.
        return self.__dict__ | {"progress": Progress(self.progress.recording)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        except NotImplementedError:
            if not self.scale.is_meta:  # where a checkpoint without histories leaves them
                raise
            self.to_empty(device=fn(torch.empty(0)).device)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != torch.float32:
                self._buffers[name] = buffer.to(moved.device)
            if buffer is not None and buffer.is_meta and moved is not None and not moved.is_meta:
                self._reset(name)  # to_empty has given it memory that nothing was written to
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        *_, error_msgs = args
        known = len(error_msgs)
        for name, (are_valid, what) in _VALID.items():
            saved = state_dict.get(prefix + name)
            if isinstance(saved, Tensor) and not saved.is_meta and not are_valid(saved):
                error_msgs.append(f"{prefix}{name}: {shown(saved)} has values that are {what}")
        if len(error_msgs) > known:
            return
        for name in _VALID:
            buffer, saved = getattr(self, name), state_dict.get(prefix + name)
            if isinstance(saved, Tensor) and saved.is_floating_point():
                saved = saved.float()  # or assign=True would take another dtype
                of_all = buffer if self.share is None else self.share.among_all(buffer)
                if self.share is not None and saved.shape[-1:] == of_all.shape[-1:] != buffer.shape[-1:]:
                    saved = self.share.of(saved)
                state_dict[prefix + name] = saved
            if saved is None:
                state_dict[prefix + name] = buffer
            elif name == "amax_history" and history_length(saved) and saved.shape[1:] == buffer.shape[1:]:
                setattr(self, name, torch.empty(saved.shape, dtype=torch.float32, device=buffer.device))
        super()._load_from_state_dict(state_dict, prefix, *args)


# ---- what is updated together ----


class Region:
    """Modules with amax histories that ran inside one outermost ``autocast``, by direction.

    Modules and not their buffers: a compiled forward may not hand out buffers that its backward will write to. Linked
    and not a list: a compiler guards the length of a list, and would compile each layer anew for its place in it.

    ``calls``: what a CUDA graph that is being captured is told of instead, see ``autocast.captured``; ``latest``: the
    recipe of each backward history's latest use by code that is not compiled.
    """

    def __init__(self, calls: list[Any] | None = None) -> None:
        self.calls = calls
        self.latest: dict[AmaxHistory, DelayedScaling] = {}
        # A compiler guards None, and that two are one object: it would tell the region's first layer from the others.
        nobody: Any = None
        self.forward, self.backward, self.compiled = [Member(nobody, nobody, None, None) for _ in range(3)]

    def update(self, forward: bool) -> None:
        """Reduces and updates the histories of one direction, each once, with one reduction a group."""
        members = in_order(self.forward if forward else self.backward)
        compiling = torch.compiler.is_compiling()
        histories: dict[AmaxHistory, History] = {}
        groups: dict[Group, dict[AmaxHistory, None]] = {}
        for member in members:
            histories[member.state] = member.state.history(member.recipe, forward, compiling)
            if member.group is not None:
                groups.setdefault(member.group, {})[member.state] = None
        for group, states in groups.items():
            reduce([histories[state] for state in states], group)
        update(list(histories.values()))

    def add_compiled(self, member: Member, first: bool) -> None:
        """Adds a module whose backward is compiled, which reduces over the group of the module's first use.

        Raises:
            RuntimeError: it has been used under another group.
        """
        before = () if first else in_order(self.compiled)
        if any(other.state is member.state and other.group != member.group for other in before):
            raise RuntimeError(
                "a module is used under two amax_reduction_group in one compiled region, whose backward reduces over "
                "the first alone; use one group, or leave the module uncompiled"
            )
        self.compiled = member

    def forget(self) -> None:
        """Drops what a forward has recorded that did not end well."""
        for member in in_order(self.forward):
            member.state.forget_newest()


class Member:
    """A module in a region, and what was in it before."""

    def __init__(self, state: AmaxHistory, recipe: DelayedScaling, group: Group | None, before: Member | None) -> None:
        self.state = state
        self.recipe = recipe
        self.group = group
        self.before = before


def in_order(newest: Member) -> list[Member]:
    """Lists ``newest`` and those before it, the first one first."""
    members: list[Member] = []
    while newest.before is not None:
        members.append(newest)
        newest = newest.before
    return members[::-1]
