"""Weights for inference engines: the codes and scales that layers compute with, under the names that engines know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from minifloat.arguments import PositiveFloat, checked
from minifloat.autocast import DelayedCall
from minifloat.comm.dtensor_ddp import is_dtensor
from minifloat.convert.experts import ExpertLinear, are_experts
from minifloat.convert.export import check_whole
from minifloat.convert.layouts import LAYOUTS, WeightLayout
from minifloat.convert.select import merged, named_modules
from minifloat.convert.weights import BLOCK, obstacles
from minifloat.delayed import AmaxHistory
from minifloat.formats import ROWWISE, Format
from minifloat.functional.quantize import LinearConfig, cast_with, delayed_scale, pairs_with, reuse
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.linear_call import recipe_in_force
from minifloat.nn.linear_state import LinearState
from minifloat.operand import Operand
from minifloat.quantizer import Quantizer
from minifloat.tensor import QuantizedTensor

_PLAIN = {"Chunk", "Concatenate", "SplitModulelist", "MergeModulelist"}
"""Operations of transformers on whole rows, experts and their order, which codes and scales follow alike."""


@checked
def quantized_weights(model: nn.Module, layout: WeightLayout, requantize: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Iterates over all that an engine loads: names and tensors, on the device of the model, one layer at a time.

    Arguments and errors are those of :func:`export_weights`, which writes the same; errors come before any tensor.
    """
    return _Weights(model, layout, requantize).tensors()


@checked
def export_weights(
    model: nn.Module,
    folder: str | Path,
    layout: WeightLayout,
    requantize: bool = False,
    shard_bytes: PositiveFloat = 5e9,
) -> list[Path]:
    """Writes safetensors and ``config.json`` that Transformers, vLLM and SGLang load.

    Codes and scales are those that a forward in ``eval()`` computes with now: what is served is what was trained.
    Layers that compute in high precision are written as they are, and named in ``config.json``.

    Args:
        model: converted, or made of this library's linears; its weights may be kept quantized. Layers without a recipe
            of their own take that of the ``autocast`` that surrounds the call. Of a compiled, averaged or data parallel
            one what it wraps is written.
        folder: made where it is missing; it gets all files or, if something raises, none.
        layout: ``"fp8-block"`` (``weight_scale_inv``, DeepSeek's), ``"mxfp4"`` (experts of gpt-oss), or one of
            ``compressed-tensors``: ``"fp8-tensor"``, ``"fp8-channel"``, ``"fp8-block-compressed"``, ``"mxfp8"`` and
            ``"nvfp4"``.
        requantize: casts weights that are in another format, and in NVFP4 those of which engines make one linear, to
            the layout. Served is then another model than was trained.
        shard_bytes: the most that a file holds, unless one tensor has more.

    Returns:
        The files of weights.

    Raises:
        ValueError: a layer computes with weights that the layout does not hold, is split over ranks, or has sizes that
            the layout does not; nothing is quantized; ``folder`` has weights.
    """
    weights, folder = _Weights(model, layout, requantize), Path(folder)
    if any(folder.glob("*.safetensors*")):
        raise ValueError(f"export_weights: {folder} has weights, which engines would load too; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".") as made:  # what is not whole is nowhere to be loaded
        new = Path(made)
        _write_config(weights.model, new, weights.spec.config(weights.ignored, list(weights.experts), weights.static))
        names = _write_tensors(weights.tensors(), new, shard_bytes)
        _read_back(weights, new)
        for file in sorted(new.iterdir(), key=lambda file: file.name == "config.json"):
            file.rename(folder / file.name)
    return [folder / name for name in names]


def _write_tensors(tensors: Iterator[tuple[str, Tensor]], folder: Path, shard_bytes: float) -> list[str]:
    """Writes safetensors and their index, and returns the names of the files."""
    from safetensors.torch import save_file

    parts: list[list[str]] = []
    total, part, size = 0, dict[str, Tensor](), 0
    for name, tensor in chain(tensors, [("", torch.empty(0))]):
        if part and (not name or size + tensor.nbytes > shard_bytes):
            save_file(part, folder / f"part-{len(parts)}", {"format": "pt"})
            parts.append(list(part))
            total, part, size = total + size, {}, 0
        part[name], size = tensor, size + tensor.nbytes
    endings = [f"-{i + 1:05}-of-{len(parts):05}" for i in range(len(parts))] if len(parts) > 1 else [""]
    files = [f"model{ending}.safetensors" for ending in endings]
    for i, file in enumerate(files):
        (folder / f"part-{i}").rename(folder / file)
    if len(files) > 1:
        places = {name: file for names, file in zip(parts, files, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return files


def _write_config(model: nn.Module, folder: Path, quantization: dict[str, Any]) -> None:
    """Writes ``config.json``, and ``generation_config.json`` of a model of transformers that has one."""
    values: dict[str, Any] = {}
    for kind in ("config", "generation_config"):
        config: Any = getattr(model, kind, None)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)
    if (file := folder / "config.json").exists():
        values = json.loads(file.read_text()) | {"architectures": [type(model).__name__]}
        values["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    file.write_text(json.dumps(values | {"quantization_config": quantization}, indent=2))


def _read_back(weights: _Weights, folder: Path) -> None:
    """Raises ValueError where Transformers finds other names or shapes in the files of its models than it expects."""
    model: Any = weights.model
    if not weights.files.known:
        return
    config, found = type(model.config).from_pretrained(folder), weights.others | weights.codes
    if weights.layout in ("mxfp8", "nvfp4", "fp8-block-compressed") and any(w.stacked for w in weights.weights):
        del config.quantization_config  # Transformers reads no experts in these: what they are without
        found = weights.others | weights.shapes
    try:
        _, told = type(model).from_pretrained(
            None, config=config, state_dict=found, dtype=model.dtype, device_map={"": "meta"}, output_loading_info=True
        )
    except ImportError:  # of what decodes a layout, as compressed-tensors
        return
    except RuntimeError as error:
        told = {"error": error}
    if wrong := {kind: found for kind, found in told.items() if found}:
        raise ValueError(
            f"export_weights: Transformers would not load these files ({wrong}); choose another layout than "
            f"{weights.layout!r}, or leave what it names in high precision"
        )


class _Weight(NamedTuple):
    """Matrices [N, K] of a layer, of its experts from ``group`` on, and what files call them and their parts.

    ``stacked``: they are one parameter, ``full``.
    """

    names: tuple[str, ...]
    matrices: tuple[Tensor, ...]
    layer: LinearState
    group: int
    full: str
    stacked: bool


class _Files:
    """Names and shapes in files: by the mapping that ``save_pretrained`` of transformers applies, or as they are."""

    def __init__(self, model: Any) -> None:
        self.known = any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__)
        self.config, self.get_parameter = getattr(model, "config", None), model.get_parameter
        self._weight_conversions: list[Any] = []
        if self.known:
            from transformers import conversion_mapping, core_model_loading

            own = None if getattr(model, "hf_quantizer", None) else getattr(model, "_weight_conversions", None)
            if own is None:
                mapping = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
                own = [each for each in mapping if not isinstance(each, core_model_loading.PrefixChange)]
            self._weight_conversions = own
        self.backward = [each.reverse_transform() for each in self._weight_conversions[::-1]]

    def source(self, name: str) -> tuple[str, set[str]]:
        """Names what a parameter is converted to, perhaps with others, and the operations."""
        for each in self.backward:
            if hasattr(each, "operations") and (found := each.rename_source_key(name))[1] is not None:
                return found[0], {type(operation).__name__ for operation in each.operations}
        return name, set()

    def __call__(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns what files hold of parameters."""
        if not self._weight_conversions:
            return tensors
        from transformers.core_model_loading import revert_weight_conversion

        model: Any = self  # of which it reads these attributes
        found: dict[str, Tensor] = revert_weight_conversion(model, tensors)
        return found


class _Weights:
    """Weights of a model in a layout. Making one checks all, and casts nothing."""

    def __init__(self, model: nn.Module, layout: WeightLayout, requantize: bool) -> None:
        self.layout, self.spec, self.requantize = layout, LAYOUTS[layout], requantize
        self.ignored: list[str] = []
        self.experts: dict[str, None] = {}  # in high precision
        self.levels: dict[str, Tensor] = {}  # amaxes that fused linears are to share
        self.entries: dict[str, _Weight | dict[str, Tensor]] = {}  # by what transformers makes of them together
        self.shapes: dict[str, Tensor] = {}  # of weights in files, on meta
        self.codes: dict[str, Tensor] = {}  # and scales, written so far, on meta
        self.others: dict[str, Tensor] = {}  # likewise
        wrappers = nn.DataParallel, DistributedDataParallel, AveragedModel
        while isinstance(model, wrappers) or "_orig_mod" in model._modules:
            model = model._modules.get("_orig_mod") or model.module  # type: ignore[assignment]
        self.model = model
        self.files = _Files(model)
        modules = named_modules(model)
        for (name, *_), module in modules:
            bases = {base.__module__.partition(".")[0] for base in type(module).__mro__}
            if "peft" in bases or "lora_" in name:
                raise ValueError(
                    f"export_weights: the model has adapters ({name or 'it'} is a {type(module).__name__}); revert it, "
                    "merge_and_unload(), and convert it again"
                )
            if "_fsdp_wrapped_module" in module._modules:
                raise ValueError(
                    f"export_weights: {name or 'it'} is wrapped in FullyShardedDataParallel; load its state dict "
                    "(FullStateDictConfig) into a model that is not, and export that"
                )
        owners: dict[int, tuple[LinearState, int]] = {}
        layers = [named.module for named in modules if isinstance(named.module, LinearState)]
        for layer in layers:
            check_whole(layer, "export_weights")
            owners |= {id(layer._weight(name)): (layer, i) for i, name in enumerate(layer._weight_names)}
        reasons = obstacles(modules, [each for each in layers if each._matrices or not isinstance(each, GroupedLinear)])
        seen: set[int] = set()  # of tied parameters the first is written
        for paths, module in modules:
            prefix = paths[0]
            if isinstance(module, ExpertLinear) and not module.single_grouped_weight:  # kept quantized, a weight each
                each = tuple(module._weight(name) for name in module._weight_names)
                seen.update(map(id, each))
                self._add(module.experts, f"{prefix.rpartition('.')[0]}.{module.parameter}", each, (module, 0))
            if isinstance(module, (AmaxHistory, ExpertLinear)):
                continue
            for name, tensor in (module._parameters | module._buffers).items():
                if tensor is None or name in module._non_persistent_buffers_set:
                    continue
                owner = owners.get(id(tensor))
                if owner is not None and not isinstance(tensor, QuantizedTensor) and _config(owner[0]) is None:
                    owner = None
                if owner is None and name == "weight" and tensor.dim() == 2 and not isinstance(module, nn.Embedding):
                    for path in paths:  # tied ones too, as heads
                        file = next(iter(self.files({f"{path}.weight": torch.empty(tensor.shape, device="meta")})))
                        self.ignored += dict.fromkeys((file.removesuffix(".weight"), path))
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    self._add(module, f"{prefix}.{name}" if prefix else name, tensor, owner)
        self.weights = [each for each in self.entries.values() if isinstance(each, _Weight)]
        if not self.weights:
            raise ValueError(
                f"export_weights: no layer is quantized, so nothing is to be written as {layout!r}; convert the model "
                "with a recipe, or call it inside of minifloat.autocast(recipe=...)"
            )
        for weight in self.weights:
            if weight.layer in reasons:
                raise _refusal(weight, f"{reasons[weight.layer]}, which no layout holds")
            self._check(weight)
        own = [(name.removesuffix(".weight"), True) for each in self.weights for name in each.names]
        for group in merged([*own, *((name, False) for name in (*self.ignored, *self.experts))]):
            if len(example := {quantized: name for name, quantized in group.items()}) > 1:
                raise ValueError(
                    f"export_weights: engines merge {example[True]} with {example[False]}, which computes in high "
                    "precision; convert both or none of them"
                )
        if self.spec.format.scale_rule == "two_level":
            self._share_levels()
        inputs = {config.input.row_format.scale_rule for each in self.weights if (config := _config(each.layer))}
        self.static = layout == "fp8-tensor" and inputs == {"given"}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterates over names and tensors."""
        for entry in self.entries.values():
            written = self.codes if isinstance(entry, _Weight) else self.others
            for name, tensor in self._written(entry) if isinstance(entry, _Weight) else self.files(entry).items():
                written[name] = tensor.to("meta")
                yield name, tensor.contiguous()

    def _add(
        self, module: nn.Module, full: str, tensor: Tensor | tuple[Tensor, ...], owner: tuple[LinearState, int] | None
    ) -> None:
        """Adds a parameter or buffer, or those of experts: as a weight where its layer, ``owner``, is quantized."""
        separate = isinstance(tensor, tuple)
        matrices = tuple(each.detach() for each in (tensor if isinstance(tensor, tuple) else (tensor,)))
        if is_dtensor(matrices[0]):
            raise ValueError(
                f"export_weights: {full} is sharded over ranks; load minifloat.distributed.full_state_dict(model) into "
                "a model that is not, and export that"
            )
        values, (base, _, name) = matrices[0], full.rpartition(".")
        experts = separate or (values.dim() == 3 and are_experts(module))
        stacked = experts and owner is not None
        if stacked and not separate:
            matrices = tuple(values.mT if getattr(module, "is_transposed", False) else values)
        parts = [(full, matrices, owner[1] if owner else 0)]
        if owner is not None and not stacked and values.dim() == 3:  # of this library, with a number each
            parts = [(f"{base}.{e}.{name}", (own,), e) for e, own in enumerate(values)]
        for full, own, group in parts:
            shape = (len(own), *own[0].shape) if stacked else own[0].shape
            pieces = self.files({full: torch.empty(shape, device="meta")})
            source = self.files.source(full)[0]
            others = self.entries.setdefault(source, {})
            if owner is not None and not others:
                self.entries[source] = _Weight(tuple(pieces), own, owner[0], group, full, stacked)
                self.shapes |= pieces
            elif owner is None and isinstance(others, dict):
                others[full] = own[0]
            else:
                raise ValueError(f"export_weights: files have {full} and others as one; give them the recipe 'none'")
        if owner is None and experts:
            first = next(iter(pieces))
            self.experts |= dict.fromkeys((re.sub("[.](0[.])?[^.]+([.]weight)?$", "", first), base))

    def _check(self, weight: _Weight) -> None:
        """Raises ValueError where the layout does not hold this weight as it is, nor, if asked, requantized."""
        layer, (rows, cols) = weight.layer, weight.matrices[0].shape
        fmt = _held(layer, weight.matrices[0])[1]
        of_gpt_oss = isinstance(layer, ExpertLinear) and layer.transposed
        if of_gpt_oss != (self.layout == "mxfp4"):
            other = "which are served as 'mxfp4' alone" if of_gpt_oss else "and 'mxfp4' holds no others"
            raise _refusal(weight, f"experts of gpt-oss are stored transposed, {other}; give it the recipe 'none'")
        if isinstance(layer, GroupedLinear) and layer.num_gemms != layer.num_experts:
            raise _refusal(weight, f"it has {layer.num_gemms} of {layer.num_experts} experts, the others are elsewhere")
        if layer.parameters_split is not None:
            raise _refusal(weight, "its weight is split into several parameters; load it into one without")
        if not self.spec.holds(fmt) and not self.requantize:
            others = " or ".join(repr(name) for name, spec in LAYOUTS.items() if spec.holds(fmt)) or "another recipe"
            why = f"its weights are {fmt.spec}, and {self.layout!r} holds {self.spec.format.spec}; choose {others}, or "
            raise _refusal(weight, f"{why}requantize=True, which serves another model than was trained")
        fmt = fmt if self.spec.holds(fmt) else self.spec.format
        block = 0 if self.spec.format.tile else self.spec.format.block
        if block and cols % block:
            raise _refusal(weight, f"{cols} columns, and {self.layout!r} has whole blocks of {block}")
        if self.layout == "fp8-block" and (odd := [n for n in (rows, cols) if n > 128 and n % 128]):
            why = f"Transformers decodes blocks of 128 of whole ones alone, and a side has {odd[0]}"
            raise _refusal(weight, f"{why}; choose 'fp8-block-compressed', or give it the recipe 'none'")
        unit = fmt.scale_block(ROWWISE)[0]
        cut = [each for each in weight.names if unit and self.shapes[each].shape[-2] % unit]
        if len(weight.names) > len(weight.matrices) and cut:
            own = self.shapes[cut[0]].shape[-2]
            raise _refusal(weight, f"{cut[0]} and {cut[-1]} of {own} rows would share tiles of {unit}")
        if changes := self.files.source(weight.full)[1] - _PLAIN:
            raise _refusal(weight, f"files have {weight.full} changed by {', '.join(changes)}, which no codes can be")

    def _share_levels(self) -> None:
        """Finds what fused linears are to share where their amaxes differ; raises ValueError unless ``requantize``."""
        alone = ((each.names[0].removesuffix(".weight"), each) for each in self.weights if len(each.names) == 1)
        for weights in (list(group.values()) for group in merged(alone, experts=False)):
            amaxes = [_amax(each.layer, each.matrices[0], self.spec.format) for each in weights]
            if all(torch.equal(amax, amaxes[0]) for amax in amaxes):
                continue
            if not self.requantize:
                names = ", ".join(each.names[0].removesuffix(".weight") for each in weights)
                found = ", ".join(f"{float(amax):.4g}" for amax in amaxes)
                raise ValueError(
                    f"export_weights: engines make {names} one linear with one amax, and they have {found}; choose "
                    "requantize=True, which casts them with the largest and serves another model than was trained"
                )
            self.levels |= {each.names[0]: torch.stack(amaxes).amax(0) for each in weights}

    def _written(self, weight: _Weight) -> Iterator[tuple[str, Tensor]]:
        """Iterates over the tensors of one weight."""
        found: dict[str, list[Tensor]] = {}
        rows = weight.matrices[0].shape[0]
        for place in range(len(weight.matrices)):
            for ending, tensor in self.spec.tensors(self._operand(weight, place)):
                found.setdefault(ending, []).append(tensor)
            if self.static:
                scale = _delayed_scale(weight.layer, "input", weight.group + place)
                assert scale is not None
                found.setdefault("input_scale", []).append(scale.reciprocal())
        for ending, each in found.items():
            single = each[0].dim() == 1  # for all rows, wherever they go
            each = [scale.expand(rows, 1) for scale in each] if single else each
            whole = torch.stack(each) if weight.stacked else each[0]
            whole = whole.unflatten(-1, (-1, BLOCK // 2)) if ending == "_blocks" else whole
            for name, tensor in self.files({weight.full: whole}).items():
                name = name.removesuffix("weight") + ending if ending == "input_scale" else name + ending
                yield name, tensor.flatten()[0].clone().view(1) if single else tensor

    def _operand(self, weight: _Weight, place: int) -> Operand:
        layer, values, level = weight.layer, weight.matrices[place], self.levels.get(weight.names[0])
        held, fmt = _held(layer, values)
        if self.spec.holds(fmt) and level is None:
            if held is not None:
                return held
            given = _delayed_scale(layer, "weight", weight.group + place)
            return cast_with(values, Quantizer(fmt, columnwise=False), given, gemm_ready=False).any
        quantizer, known = Quantizer(self.spec.format, columnwise=False), None if level is None else (level,)
        return cast_with(_values(values), quantizer, None, known, gemm_ready=False).any


def _refusal(weight: _Weight, why: str) -> ValueError:
    return ValueError(f"export_weights: {weight.layer._label}: {why}")


def _values(weight: Tensor) -> Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight


def _config(layer: LinearState) -> LinearConfig | None:
    """Finds how the layer quantizes its tensors; None where it computes in high precision."""
    recipe = recipe_in_force(layer)
    config = None if recipe is None else layer._config(recipe)
    return config if config is not None and config.weight.row_format.quantized else None


def _held(layer: LinearState, weight: Tensor) -> tuple[Operand | None, Format]:
    """Returns the operand that forward multiplies by, if the weight has it, and its format."""
    config = _config(layer)
    if isinstance(weight, QuantizedTensor):
        used = config is None or reuse(weight, config.weight.with_usage(columnwise=False)) is not None
        if used or (weight.holds_own_matrix and config is not None and pairs_with(weight.operands, config, False)):
            operand = weight.operands.along(ROWWISE)
            return operand, operand.format
    assert config is not None
    return None, config.weight.row_format


def _amax(layer: LinearState, weight: Tensor, fmt: Format) -> Tensor:
    """The second level of NVFP4 that a weight has, or gets."""
    held = _held(layer, weight)[0]
    if held is not None and held.format.scale_rule == "two_level" and held.amax is not None:
        return held.amax
    (amax,) = Quantizer(fmt, columnwise=False).amax(_values(weight))
    assert amax is not None
    return amax


def _delayed_scale(layer: LinearState, kind: str, group: int) -> Tensor | None:
    """The scale of delayed scaling that the next forward casts with, fp32 [1]; None under other recipes."""
    config = _config(layer)
    if config is None or config.delayed is None:
        return None
    states = layer.forward_scaling, layer.backward_scaling
    scales = delayed_scale(DelayedCall(states, config.delayed, False, False, None), kind)
    assert scales is not None
    return scales[group : group + 1]
