"""Extended tensor parallelism of linears: numbers are those of unsharded ones whatever is predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers import etp_linears as etp
from tests.helpers.distributed_pool import Pools
from tests.helpers.etp_linears import Data, lane, make


def scenarios(rank: int, size: int, recipe: Any, names: list[str], depth: int, most: int | None) -> list[str]:
    wrong = []
    for name in names:
        results = []
        for sharded in (True, False):
            net = make(sharded, recipe)
            if sharded:
                etp_net = net
                lane(net).depth, lane(net).most_bytes = depth, most
            torch.manual_seed(7)
            results.append(etp.SCENARIOS[name](net, Data(rank)))
        wrong += [f"{name}: {each}" for each in etp.differences(etp_net, net, *results, 1e-5 * (name == "used twice"))]
        wrong += [f"{name}: a gather is left"] * bool(lane(etp_net)._ahead)
    return wrong


FEW = ["steps", "used twice", "interleaved", "checkpoint", "saved on CPU"]
DEPTHS = [(0, None), (1, None), (2, None), (3, 600)]


@pytest.mark.parametrize(("depth", "most"), DEPTHS)
def test_predictions_change_no_number(worker_pool: Pools, depth: int, most: int | None) -> None:
    assert worker_pool(2).run(scenarios, "current", list(etp.SCENARIOS), depth, most) == [[]] * 2


@pytest.mark.parametrize("recipe", ["none", "mxfp8", "nvfp4", "block"])
def test_predictions_change_no_number_under(worker_pool: Pools, recipe: str) -> None:
    assert worker_pool(2).run(scenarios, recipe, FEW, 2, None) == [[]] * 2
