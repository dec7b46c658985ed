"""Weights of a checkpoint in a model whose linears may compute in another recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from minifloat.tools.train.checkpoint import CheckpointError

OF_SCALING = (".scale", ".amax_history")  # the ends of the names of delayed scaling's buffers


def load_weights(model: nn.Module, state: Mapping[str, Tensor], source: Path) -> None:
    """Loads a model's state dict; delayed scaling's buffers come along where both have them.

    Raises CheckpointError, naming `source`, when the weights are of another model.
    """
    own = model.state_dict()
    scaling = {name for name in own.keys() ^ state.keys() if name.endswith(OF_SCALING)}
    kept = {name: own[name] for name in scaling & own.keys()}
    try:
        model.load_state_dict(kept | {name: tensor for name, tensor in state.items() if name not in scaling})
    except RuntimeError as error:
        raise CheckpointError(f"{source} does not fit the model: {error}") from error
