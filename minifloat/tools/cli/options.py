"""Names of options elsewhere: who types such a name is told ours."""

from typing import Any

from typer.core import TyperCommand

OURS = {
    "--lr": "--learning-rate",
    "--epochs": "--steps", "--max-steps": "--steps", "--iterations": "--steps",
    "--micro-batch-size": "--batch-size", "--bs": "--batch-size", "--gradient-accumulation-steps": "--accumulate",
    "--format": "--recipe", "--precision": "--recipe", "--fp8-recipe": "--recipe", "--dtype": "--recipe",
    "--compare": "--against", "--baseline": "--against", "--config": "--hf",
    "--dim": "--hidden", "--hidden-size": "--hidden", "--ffn-hidden-size": "--mlp-hidden", "--num-experts": "--experts",
    "--seq-len": "--context", "--seq-length": "--context", "--max-seq-len": "--context", "--block-size": "--context",
    "--output": "--out", "--output-dir": "--out", "--save": "--out", "--gpu": "--device", "--cpu": "--device",
    "--continue": "--resume", "--checkpoint": "--resume-from", "--load": "--resume-from",
    "--data": "PATHS, without an option", "--dataset": "PATHS, without an option",
    "--length": "--tokens", "--max-tokens": "--tokens", "--max-new-tokens": "--tokens",
}  # fmt: skip


class Command(TyperCommand):
    """A command whose error of an option that it does not have names ours, where we know what was meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            ours = OURS.get(getattr(error, "option_name", ""), "")
            if ours.partition(",")[0].lower() in {name for parameter in self.params for name in parameter.opts}:
                error.possibilities = [ours]  # type: ignore[attr-defined]
            raise
