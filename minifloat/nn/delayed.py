"""Delayed scaling's state in a module: named fp32 buffers, nothing pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from minifloat import delayed
from minifloat.arguments import shown
from minifloat.autocast import Newest, Region
from minifloat.quantizer import are_scales
from minifloat.recipe import DelayedScaling


def history_length(saved: Any) -> int:
    """The steps of a history [length, slots] of a state dict; 0 where it is none."""
    return saved.shape[0] if isinstance(saved, Tensor) and saved.dim() == 2 else 0


def _are_amaxes(values: Tensor) -> bool:
    """All are floating point and none is below 0; infinity and NaN, as older checkpoints have them, are dropped."""
    return values.is_floating_point() and not bool((values < 0).any())


def _restorer(buffers: list[Tensor]) -> Callable[[], None]:
    copies = [(buffer, buffer.clone()) for buffer in buffers]

    @torch.no_grad()
    def restore() -> None:
        for buffer, copy in copies:
            buffer.copy_(copy)

    return restore


class AmaxHistory(nn.Module):
    """Scales and amaxes of one direction of a layer.

    Buffers: ``scale`` fp32 [slots], ones at first; ``amax_history`` fp32 [length, slots], zeros at first, with the step
    in progress in row 0 and the newest finished one in the last row. They stay fp32 when the module is cast, and a
    checkpoint without them, or with another length, loads.
    """

    scale: Tensor
    amax_history: Tensor

    def __init__(self, slots: int, length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.region = Region()  # of nobody yet
        self.newest = Newest()
        self.register_buffer("scale", torch.ones(slots, dtype=torch.float32, device=device))
        self.register_buffer("amax_history", torch.zeros(length, slots, dtype=torch.float32, device=device))

    def reset_parameters(self) -> None:
        """Forgets everything; also how the buffers get values after ``to_empty``."""
        for name in ("scale", "amax_history"):
            self._reset(name)

    @torch.no_grad()
    def _reset(self, name: str) -> None:
        getattr(self, name).fill_(1.0 if name == "scale" else 0.0)

    def reset_missing(self, state_dict: dict[str, Any], prefix: str, device: torch.device) -> None:
        """Resets what a state dict lacks; what is on ``meta`` gets memory on ``device`` first."""
        for name in ("scale", "amax_history"):
            if prefix + name not in state_dict:
                buffer = getattr(self, name)
                if buffer.is_meta:
                    setattr(self, name, torch.empty_like(buffer, device=device))
                self._reset(name)

    @torch.no_grad()
    def forget_newest(self) -> None:
        """Drops what the step in progress has recorded."""
        self.amax_history[0].zero_()

    def newest_restorer(self) -> Callable[[], None]:
        """What brings the amaxes of the step in progress back to how they are now."""
        return _restorer([self.amax_history[0]])

    def snapshot(self) -> Callable[[], None]:
        """What brings the buffers back to how they are now."""
        return _restorer([self.scale, self.amax_history])

    @torch.no_grad()
    def drop_nonfinite(self) -> None:
        """Clears infinite and NaN amaxes, which checkpoints of older versions may have."""
        self.amax_history.nan_to_num_(0.0, posinf=0.0, neginf=0.0)

    def history(self, recipe: DelayedScaling, forward: bool) -> delayed.History:
        """The buffers under a recipe, cut or zero-padded at the end to its ``amax_history_len``."""
        length, wanted = self.amax_history.shape[0], recipe.amax_history_len
        if length != wanted:
            kept = self.amax_history[:wanted]
            with torch.inference_mode(False):  # or training could not write to it later
                self.amax_history = torch.nn.functional.pad(kept.clone(), (0, 0, 0, wanted - kept.shape[0]))
        return delayed.History(self.scale, self.amax_history, recipe, delayed.rule(recipe, forward))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"region": Region()}  # which knows other modules: no part of a copy

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != torch.float32:
                self._buffers[name] = buffer.to(moved.device)
            if buffer is not None and buffer.is_meta and moved is not None and not moved.is_meta:
                self._reset(name)  # to_empty has given it memory that nothing was written to
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = len(error_msgs)
        scales, amaxes = state_dict.get(prefix + "scale"), state_dict.get(prefix + "amax_history")
        if isinstance(scales, Tensor) and not scales.is_meta and not are_scales(scales):
            error_msgs.append(
                f"{prefix}scale: {shown(scales)} has values that are not above 0 and finite, floating-point; scales are"
            )
        if isinstance(amaxes, Tensor) and not amaxes.is_meta and not _are_amaxes(amaxes):
            error_msgs.append(
                f"{prefix}amax_history: {shown(amaxes)} has values that are below 0, or not floating-point; "
                "largest magnitudes are not"
            )
        if len(error_msgs) > known:
            return
        self.newest.carried = True  # it may have been saved between two backward passes of a step
        for name in ("scale", "amax_history"):
            buffer, saved = getattr(self, name), state_dict.get(prefix + name)
            if saved is None:
                state_dict[prefix + name] = buffer
            elif name == "amax_history" and history_length(saved) and saved.shape[1:] == buffer.shape[1:]:
                setattr(self, name, torch.empty(saved.shape, dtype=torch.float32, device=buffer.device))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
