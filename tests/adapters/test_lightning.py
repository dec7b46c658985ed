"""Lightning's Trainer with our precision plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat.functional import count_gemms

lightning = pytest.importorskip("lightning")


def everything(module: nn.Module, name: str) -> bool:
    return True


def make_task() -> Any:
    class Task(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)))

        def training_step(self, x: Tensor, index: int) -> Tensor:
            return (self.model(x) - x).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    return Task()


def fit(task: Any, epochs: int, plugins: list[Any], folder: Path, resume: Path | None = None, **more: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", plugins=plugins, default_root_dir=folder, **quiet, **more
    )
    data = torch.randn(21, 24, generator=torch.Generator().manual_seed(1))
    trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=7), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_plugin_trains_as_convert_under_autocast_does(tmp_path: Path, recipe: str) -> None:
    """To the bit, also when it goes on from Lightning's own checkpoint, unless that has delayed scaling's histories."""
    from minifloat.adapters.lightning import MinifloatPrecision

    def plugin() -> MinifloatPrecision:
        return MinifloatPrecision(recipe, device_type="cpu", filter_fn=everything)

    task, own = make_task(), plugin()
    assert own.report is None
    with count_gemms() as gemms:
        fit(task, 2, [own], tmp_path)
    assert own.report is not None and len(own.report.converted) == 3
    assert sum(gemms.values()) == 2 * 3 * 3 * 3 - 2 * 3 and "bfloat16" not in {key.a for key in gemms}
    by_hand = make_task()
    minifloat.convert(by_hand, recipe, filter_fn=everything)
    fit(by_hand, 2, [], tmp_path, precision="bf16-mixed")
    same(task, by_hand)
    fit(make_task(), 1, [plugin()], tmp_path).save_checkpoint(tmp_path / "one.ckpt")
    resumed = make_task()
    if recipe == "delayed":  # Lightning loads before the plugin is asked: docs/lightning.md
        with pytest.raises(RuntimeError, match="amax_history"):
            fit(resumed, 2, [plugin()], tmp_path, tmp_path / "one.ckpt")
    else:
        fit(resumed, 2, [plugin()], tmp_path, tmp_path / "one.ckpt")
        same(task, resumed)


def same(task: nn.Module, other: nn.Module) -> None:
    mine, others = task.state_dict(), other.state_dict()
    assert mine.keys() == others.keys() and all(torch.equal(value, others[key]) for key, value in mine.items())
