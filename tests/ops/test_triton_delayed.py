"""The kernels of delayed scaling's histories and scales against their reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from minifloat.ops import delayed as definition
from minifloat.ops.delayed import gpu
from minifloat.ops.launch import count_launches
from minifloat.ops.tape import Recorder
from tests.helpers import triton_interpreter  # noqa: F401
from tests.helpers.replay_on_cpu import replay_on_cpu


@pytest.fixture(autouse=True)
def _replay(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is prepared yet; a CPU replays launches, too."""
    monkeypatch.setattr(gpu, "_recorder", Recorder())
    if device.type == "cpu":
        replay_on_cpu(monkeypatch)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("shape", [(4, 3), (16, 2), (1024, 3), (1, 3), (1024, 19)], ids=str)
def test_delayed_bookkeeping(shape: tuple[int, int], algorithm: str, device: torch.device) -> None:
    """Of one call, and of the next ones, which launch by addresses alone; of the slots of many experts too."""
    for _ in range(3):
        check_bookkeeping(shape, f"e4m3/margin=1/{algorithm}", device)
    assert len(gpu._recorder.known) == 2
    assert all(map(callable, gpu._recorder.known.values()))


@pytest.mark.parametrize("layers", [1, 2, 8, 9, 33])
def test_update_of_many_layers(layers: int, device: torch.device) -> None:
    """A launch for 32 of them, of one model and of the next."""
    rules = ["e4m3/margin=0/max"] * layers
    for _ in range(2):
        histories = [torch.rand(4, 3, device=device) for _ in range(layers)]
        scales = [torch.rand(3, device=device) for _ in range(layers)]
        expected = [each.clone() for each in (*histories, *scales)]
        definition.update_scales_.reference(expected[:layers], expected[layers:], rules)
        with count_launches() as launches:
            gpu.update(histories, scales, rules)
        assert launches == {"update_kernel": 1 + layers // 33}
        assert all(torch.equal(got, want) for got, want in zip((*histories, *scales), expected, strict=True))
        assert all(scale._version == 1 for scale in scales)  # by which stale casts are known


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_launches_by_address_are_of_one_dtype(dtype: torch.dtype, device: torch.device) -> None:

    for each in (torch.float32, dtype, torch.float32):
        history = torch.zeros(4, 3, dtype=each, device=device)
        gpu.record(history, [0, 2], [torch.tensor([3.0], device=device), torch.tensor([4.0], device=device)])
        assert history[0].tolist() == [3.0, 0.0, 4.0] and not history[1:].any()


def check_bookkeeping(shape: tuple[int, int], rule: str, device: torch.device) -> None:
    """One step of three layers gives what the references give."""
    histories = [torch.rand(shape, device=device) for _ in range(3)]
    histories[1][0, :3] = torch.tensor([0.0, torch.inf, torch.nan][: shape[1]], device=device)
    histories[0][0, 1] = torch.inf
    histories[2][-1, :3] = torch.tensor([torch.nan, torch.inf, 0.5][: shape[1]], device=device)
    scales = [torch.rand(shape[1], device=device) for _ in range(3)]
    amaxes = [torch.tensor([v], device=device) for v in (torch.inf, 0.3, torch.nan)]
    expected = [(history.clone(), scale.clone()) for history, scale in zip(histories, scales, strict=True)]
    definition.record_amax_.reference(expected[0][0], [0, 1, 0], amaxes)
    for history, scale in expected:
        definition.update_scales_.reference([history], [scale], [rule])
    with count_launches() as launches:
        gpu.record(histories[0], [0, 1, 0], amaxes)
        gpu.update(histories, scales, [rule] * 3)
    assert launches == {"record_kernel": 1, "update_kernel": 1}
    for history, scale, (wanted, wanted_scale) in zip(histories, scales, expected, strict=True):
        torch.testing.assert_close(history, wanted, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(scale, wanted_scale)
