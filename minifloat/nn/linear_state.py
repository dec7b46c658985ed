"""What a linear layer keeps beside its parameters: specs, quantized weights and amax histories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat.arguments import check_value
from minifloat.comm.ddp import check_synchronized
from minifloat.comm.dtensor import own_part, own_rows
from minifloat.delayed import AmaxHistory, history_length
from minifloat.delayed_call import DelayedCall
from minifloat.functional.etp.rows import EtpRows
from minifloat.functional.etp.weight import EtpWeight
from minifloat.functional.exchange import LOCAL, Local
from minifloat.functional.linear_config import BACKWARD_SLOTS, FORWARD_SLOTS, LinearConfig, Mode, Options, linear_config
from minifloat.functional.quantize import delayed_scale, pairs_with, quantize, record, reuse
from minifloat.functional.spec import Spec
from minifloat.nn.etp import mark_rows
from minifloat.nn.parameters import InitMethod, replace
from minifloat.nn.quantized_parameters import (
    ParameterInit,
    given_format,
    keep_quantized,
    quantized_parameter,
    set_scale,
)
from minifloat.nn.tensor_parallel import Partition
from minifloat.nn.weight_cache import CachedWeight
from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer
from minifloat.recipe import CustomRecipe, DelayedScaling, OwnRecipe, Recipe, RecipeLike, own_recipe
from minifloat.recipes.custom import equal_in_graph
from minifloat.tensor import QuantizedTensor
from minifloat.tensor.base import versions
from minifloat.tensor.steps import count_steps, stop_counting

_HISTORIES = ("forward_scaling", "backward_scaling")
Configured = tuple[Recipe, LinearConfig, dict[Options, Spec]]
"""A recipe, how it quantizes a layer's tensors, and the specs that follow; read at once, since threads take turns."""
_CONFIGS_KEPT = 8  # of custom recipes: a program that makes one for each step must not fill the memory


class LinearState(nn.Module):
    """The state of a :class:`~minifloat.Linear`, beside its parameters; ``_groups`` linears may share it.

    ``wgrad_in_weight_dtype`` may be set: dW is computed in the dtype of the weight, as fp32. Else it is rounded to that
    of the activations, and autograd copies it.
    """

    _groups = 1
    _rows_kind = EtpRows
    wgrad_in_weight_dtype: bool = False

    in_features: int
    out_features: int
    name: str
    fuse_wgrad_accumulation: bool
    delay_wgrad_compute: bool
    parameters_split: dict[str, int] | None
    init_method: InitMethod | None
    parallel_mode: Mode | None
    sequence_parallel: bool
    forward_scaling: AmaxHistory
    backward_scaling: AmaxHistory
    save_original_input: bool
    return_bias: bool
    _exchange: Local
    _partitions: dict[str, Partition]
    _etp: EtpWeight | None  # where ranks with other data share its rows
    _recipe: OwnRecipe
    _keeps_weight: bool  # between microbatches; what is gathered for each is not worth it, nor known to have changed
    _wgrad_tasks: list[Callable[[], None]]
    _wgrad_hooks: list[Callable[[], None]]
    _weight_cache: CachedWeight | None
    _skip_weight_cast: Tensor | None  # fp32 [1] that a captured cast reads in each replay: where it is 1, codes stay
    _latest_config: Configured | None
    _custom_configs: list[tuple[Recipe, LinearConfig]]
    _agreed: set[tuple[str, ...]]  # recipes and groups whose ranks run the layer alike
    _ran_under: tuple[Recipe | None, ...]
    _weight_margin: int
    _preserves_initial: bool  # quantized weights keep the values that they start with

    # ---- what each kind of layer says of its parameters ----

    @property
    def _label(self) -> str:
        """What errors call the layer."""
        raise NotImplementedError

    @property
    def _weight_names(self) -> tuple[str, ...]:
        """The names of the parameters that make up the weight."""
        raise NotImplementedError

    @property
    def _matrices(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of each matrix [N, K] that is quantized by itself; none if parameters are no rows."""
        raise NotImplementedError

    def _weight(self, name: str) -> nn.Parameter:
        return getattr(self, name)

    def _weight_matrix(self) -> Tensor:
        """W, this rank's, in the shape that the autograd function takes."""
        raise NotImplementedError

    def _bias_vector(self) -> Tensor | None:
        """b, likewise."""
        raise NotImplementedError

    def _weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """W, and b where forward adds it."""
        raise NotImplementedError

    def _gathered_weight(self) -> QuantizedTensor | None:
        """W where FSDP2 has gathered it as one, of several parameters."""
        return None

    def reset_parameters(self) -> None:
        """Initial values."""
        raise NotImplementedError

    # ---- recipes ----

    @property
    def recipe(self) -> OwnRecipe:
        """The layer's own recipe; ``"none"``: high precision, whatever surrounds it; None: what ``autocast`` gives.

        A recipe or its short name may be assigned.
        """
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: RecipeLike | None) -> None:
        check_value(self._label, "recipe", recipe, RecipeLike | None)
        self._recipe = own_recipe(recipe)

    @property
    def _distribute_module_applied(self) -> bool:
        """PyTorch's ``parallelize_module`` and ``distribute_module`` read and set it, on every rank.

        Raises:
            ValueError: a weight is quantized, which they would scatter as if it had the memory of its values.
        """
        if self._quantized_rows():
            raise ValueError(
                f"{self._label}: PyTorch's parallelize_module and distribute_module do not split quantized weights; "
                "use minifloat.distributed.parallelize, or parallel_mode='column' or 'row'"
            )
        return bool(self.__dict__.get("_is_distributed", False))

    @_distribute_module_applied.setter
    def _distribute_module_applied(self, applied: bool) -> None:
        self.__dict__["_is_distributed"] = applied

    def _init_state(self, recipe: RecipeLike | None, name: str) -> None:
        """Everything that an ``nn.Linear`` lacks, which may become one of these by having its class changed."""
        state: dict[str, Any] = {
            "name": name,
            "_recipe": own_recipe(recipe),
            "fuse_wgrad_accumulation": False,
            "delay_wgrad_compute": False,
            "save_original_input": False,
            "return_bias": False,
            "init_method": None,
            "parameters_split": None,
            "parallel_mode": None,
            "sequence_parallel": False,
            "_exchange": LOCAL,
            "_partitions": {},
            "_etp": None,
            "_keeps_weight": True,
            "_wgrad_tasks": [],
            "_wgrad_hooks": [],
            "_weight_cache": None,
            "_skip_weight_cast": None,
            "_latest_config": None,
            "_custom_configs": [],
            "_agreed": set(),
            "_ran_under": (),
            "_weight_margin": 0,
            "_preserves_initial": False,
        }
        self.__dict__.update(state)  # nn.Module.__init__ may not have run yet

    def _config(self, recipe: Recipe) -> LinearConfig:
        """How ``recipe`` quantizes the layer's tensors: asked at its first use, and kept."""
        return self._configured(recipe)[1]

    def _configured(self, recipe: Recipe) -> Configured:
        if torch.compiler.is_compiling():
            return recipe, self._config_in_graph(recipe), {}
        latest = self._latest_config
        if latest is None or latest[0] is not recipe:
            make = self._custom_config if isinstance(recipe, CustomRecipe) else self._new_config
            latest = self._latest_config = recipe, make(recipe), {}
        return latest

    def _config_in_graph(self, recipe: Recipe) -> LinearConfig:
        """The same in traced code: an equal recipe is the same one, or a loop that makes its recipe would recompile.

        To keep what is found changes the layer, for which the graph is compiled once more. So it is kept where it is
        asked for later: a factory is called once, and checkpoints ask how histories are reduced. Of factories that are
        made anew the first is kept, and the others are traced: their code and what it reads are guarded.
        """
        latest = self._latest_config
        if latest is not None and equal_in_graph(latest[0], recipe):
            return latest[1]
        custom = isinstance(recipe, CustomRecipe)
        for known, config in self._custom_configs if custom else ():
            if equal_in_graph(known, recipe):
                return config
        config = self._new_config(recipe)
        if custom and not self._custom_configs:
            self._custom_configs = [(recipe, config)]
        if config.delayed is not None:
            self._latest_config = recipe, config, {}
        return config

    def _custom_config(self, recipe: Recipe) -> LinearConfig:
        """Recipes may take turns, and a factory is asked once: the configs of the latest few are kept."""
        for known, config in self._custom_configs:
            if known is recipe:
                return config
        config = self._new_config(recipe)
        self._custom_configs = [*self._custom_configs[1 - _CONFIGS_KEPT :], (recipe, config)]
        return config

    def _new_config(self, recipe: Recipe) -> LinearConfig:
        config = linear_config(recipe, self.name, self.save_original_input)
        if config.delayed is not None:
            self._make_histories(config.delayed)
        return config

    # ---- the start ----

    def _reset_histories(self) -> None:
        """Delayed scaling's state as new."""
        for name in _HISTORIES:
            if name in self._modules:
                getattr(self, name).reset_parameters()

    @torch.no_grad()
    def _write(self, name: str, parameter: Tensor, values: Tensor) -> None:
        rows, own = own_rows(parameter), self._own_part(name, values)
        if isinstance(rows, QuantizedTensor):
            self._bind_scale(name, rows, [values])
            rows.quantize_(own)
            if self._preserves_initial and not own.is_meta:
                rows.set_high_precision_init_val(own)
        else:
            rows.copy_(own)

    def _own_part(self, name: str, values: Tensor) -> Tensor:
        """Of ``values`` in the whole shape of the parameter ``name`` what this rank has."""
        extent = None if self._etp is None else self._etp.rows.extents().get(name)
        return own_part(values, self._weight(name)) if extent is None else values[..., extent[1], :]

    def _mark_parameters(self) -> None:
        """Notes on the parameters which ranks share them."""
        mark_rows(self)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of ``nn.Module``; what takes the place of a parameter that ranks share says so too."""
        replaced = self._parameters.get(name)
        super().register_parameter(name, param)
        if replaced is not None and param is not None:
            self._mark_parameters()

    def _quantize_weights(self, init: ParameterInit | None) -> None:
        """Replaces the weights by quantized parameters as ``init`` says; None: keeps them in high precision."""
        if init is None or self.recipe == "none":
            return
        config = self._config(init.recipe)
        if not config.weight.quantized:
            return
        self._weight_margin = 0 if config.delayed is None else config.delayed.margin
        self._preserves_initial = init.preserve_high_precision_init_val
        for name in self._weight_names:
            weight = self._quantized_weight(name, self._weight(name), config.weight, self._preserves_initial)
            replace(self, name, weight)

    def _quantized_weight(self, name: str, values: nn.Parameter, quantizer: Quantizer, preserve: bool) -> nn.Parameter:
        """``values`` as the weight ``name`` kept quantized, under delayed scaling with their own scale."""
        fmt = given_format(quantizer)
        scale = None if fmt is None else self._weight_scale(name)
        if scale is not None and fmt is not None:
            set_scale(scale, [values], fmt, self._weight_margin)
        parameter = quantized_parameter(values, quantizer, scale, preserve)
        parameter.owner = self._label  # type: ignore[attr-defined]
        return parameter

    def _weight_scale(self, name: str) -> Tensor:
        """What delayed scaling casts the weight ``name`` with, fp32 [1]: a view of the history's scales."""
        slot = FORWARD_SLOTS.index("weight") * self._groups + self._group_of(name)
        return self.forward_scaling.scale[slot : slot + 1]

    def _group_of(self, name: str) -> int:
        """Which of the ``_groups`` linears has the weight ``name``."""
        return 0

    def _bind_scale(
        self,
        name: str,
        weight: QuantizedTensor,
        values: Sequence[Tensor] = (),
        amax_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Under delayed scaling: lets the weight be cast with the layer's scale from now on, first that of ``values``.

        Writes of an optimizer then use the scale that earlier amaxes gave, though no forward casts the weight.
        ``amax_group``: the ranks that have the other rows of the values.
        """
        fmt = given_format(weight.quantizer)
        if fmt is None or "forward_scaling" not in self._modules:
            return
        weight.scale = self._weight_scale(name)
        if values:
            set_scale(weight.scale, values, fmt, self._weight_margin, amax_group)

    def _bind_scales(self) -> None:
        """The same for all weights, after something has replaced them or the scale: no compiled forward could."""
        for name, rows in self._quantized_rows().items():
            self._bind_scale(name, rows)

    def _quantized_rows(self) -> dict[str, QuantizedTensor]:
        """By name the weights that are kept quantized; of a DTensor, as FSDP2 makes them, this rank's rows."""
        weights = {name: self._weight(name) for name in self._weight_names}
        rows = {name: own_rows(weight) for name, weight in weights.items()}
        return {name: own for name, own in rows.items() if isinstance(own, QuantizedTensor)}

    # ---- the weight of a call ----

    def _weight_operands(
        self, spec: Spec, delayed_call: DelayedCall | None, weight: Tensor, is_first_microbatch: bool | None
    ) -> Quantized | None:
        """Operands of the weight that exist: its own, or those cached for several microbatches; None: cast it.

        None as well of a sharded one, whose rows are cast here and gathered when they are multiplied.
        """
        quantizer = spec.w
        if self._etp is not None:
            for rows in self._etp.rows.parameters():
                if isinstance(rows, QuantizedTensor) and pairs_with(rows._operands, spec.config, spec.options.needs_x):
                    quantizer = rows.quantizer  # as it is kept, whatever the recipe would make of it
            if delayed_call is not None:
                self._bind_scales()
            scales = self._replayed_scales(delayed_call)
            parts = self._etp.cast(quantizer, spec.options.dtype, first=is_first_microbatch, scales=scales)
            self._record_weight(delayed_call, self._etp.rows.part(parts))
            return None
        if torch.compiler.is_compiling():  # which cannot look into a tensor that it has computed
            weight = weight if (whole := self._gathered_weight()) is None else whole
        if isinstance(weight, QuantizedTensor):
            check_synchronized(self)
            if weight.gatherer is not None and not torch.compiler.is_compiling():
                weight.gatherer.fetch_for(quantizer, self._label)
            ready = fitting(weight, spec)
            if ready is not None:
                self._follow_own_scale(weight, delayed_call, ready)
                return ready
        unnamed = is_first_microbatch is None
        if not self._keeps_weight or (unnamed and torch.compiler.is_compiling()):
            return None
        cached = self._weight_cache
        if (unnamed and (cached is None or cached.in_capture is None)) or not quantizer.quantized:
            return None
        sources = tuple(self._weight(name) for name in self._weight_names)
        if not is_first_microbatch and cached is not None and cached.of(sources, quantizer):
            return cached.operands
        if unnamed:
            return None
        operands = self._quantize_weight(weight.detach(), quantizer, delayed_call)
        count_steps(sources)
        self._weight_cache = CachedWeight(sources, versions(sources), quantizer, operands)
        return operands

    def _quantize_weight(self, weight: Tensor, quantizer: Quantizer, delayed_call: DelayedCall | None) -> Quantized:
        return quantize(weight, quantizer, "weight", delayed_call, noop_flag=self._skip_weight_cast)

    def _follow_own_scale(self, weight: QuantizedTensor, delayed_call: DelayedCall | None, operands: Quantized) -> None:
        """A weight under delayed scaling was cast when it was written: its amax is recorded where it is used."""
        self._record_weight(delayed_call, operands)
        if delayed_call is not None and not torch.compiler.is_compiling():
            self._bind_scale(self._weight_names[0], weight)

    def _record_weight(self, delayed_call: DelayedCall | None, operands: Quantized) -> None:
        """Records the amax of a weight that is not cast in this call; of a sharded one that of this rank's rows."""
        if delayed_call is not None:
            record(delayed_call, "weight", operands)

    def _replayed_scales(self, delayed_call: DelayedCall | None) -> list[Tensor | None] | None:
        """Those of the matrices, where a recomputation reads other scales than the layer has by now."""
        if delayed_call is None or delayed_call.histories[0].scale is self.forward_scaling.scale:
            return None
        scales = delayed_scale(delayed_call, "weight")
        return None if scales is None else list(scales.split(1))

    # ---- delayed scaling ----

    def _make_histories(self, recipe: DelayedScaling) -> None:
        if torch.compiler.is_compiling() and "forward_scaling" not in self._modules:
            raise RuntimeError(
                f"{self._label}: delayed scaling keeps buffers, which a compiled graph cannot add to a module; "
                "call minifloat.prepare(model, recipe) before the first compiled step, or give the layer recipe="
            )
        for name, slots in zip(_HISTORIES, (FORWARD_SLOTS, BACKWARD_SLOTS), strict=True):
            if name not in self._modules:
                with torch.inference_mode(False):  # or training could not write to them later
                    device = self._weight(self._weight_names[0]).device
                    self.add_module(name, AmaxHistory(len(slots) * self._groups, recipe.amax_history_len, device))

    # ---- copies, moves and checkpoints ----

    def invalidate(self) -> None:
        """Forgets the quantized weight: call it after writing to the parameter in a way that PyTorch does not see."""
        self._weight_cache = None
        if self._etp is not None:
            self._etp.forget()

    def __getstate__(self) -> dict[str, Any]:
        # A copy's parameter counts its versions anew, and what waits for backward_dw belongs to the original's graph.
        latest = self._latest_config and (*self._latest_config[:2], {})
        own: dict[str, Any] = {"_latest_config": latest, "_weight_cache": None, "_wgrad_tasks": [], "_agreed": set()}
        return self.__dict__ | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._bind_scales()
        self._mark_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.invalidate()  # module.to() and the like write through .data
        stop_counting(self._weight(name) for name in self._weight_names)
        before = {name: (r.detach(), r.get_high_precision_init_val()) for name, r in self._quantized_rows().items()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, (rows, initial) in before.items():
            assert isinstance(rows, QuantizedTensor)
            keep_quantized(self._weight(name), rows, initial, fn)
        self._bind_scales()
        self._mark_parameters()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        self.invalidate()
        stop_counting(self._weight(name) for name in self._weight_names)
        assign = local_metadata.get("assign_to_params_buffers", False)
        if self._etp is not None:
            self._etp.rows.cut_wholes(state_dict, prefix)
        self._load_histories(state_dict, prefix, assign)
        self._load_scale(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        if not assign:  # there the histories are replaced after the weight
            self._bind_scales()
        self._mark_parameters()  # which may be others now

    def _load_histories(self, state_dict: dict[str, Any], prefix: str, assign: bool) -> None:
        """Makes the histories that a state dict brings; those that it lacks beside a weight start anew.

        A layer that gets its recipe from autocast has none before its first step. What is there belongs to another
        weight, or is memory that nothing was written to.
        """
        weight = next(iter(self._fitting_weights(state_dict, prefix).values()), None)
        device = self._weight(self._weight_names[0]).device
        for name, slots in zip(_HISTORIES, (FORWARD_SLOTS, BACKWARD_SLOTS), strict=True):
            saved = state_dict.get(f"{prefix}{name}.amax_history")
            if saved is not None and name not in self._modules:
                slots_of_all = len(slots) * self._groups
                self.add_module(name, AmaxHistory(slots_of_all, max(history_length(saved), 1), device))
            elif weight is not None and name in self._modules:
                getattr(self, name).reset_missing(state_dict, f"{prefix}{name}.", weight.device if assign else device)

    def _fitting_weights(self, state_dict: dict[str, Any], prefix: str) -> dict[str, Tensor]:
        """By name the weights that a state dict brings, but those of another shape, which PyTorch refuses."""
        brought = {name: state_dict.get(prefix + name) for name in self._weight_names}
        return {n: w for n, w in brought.items() if isinstance(w, Tensor) and w.shape == self._weight(n).shape}

    def _load_scale(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Sets delayed scaling's scale to that of the weight which a state dict brings, where it brings none itself.

        Codes that are copied as they are need it too: the next write to the weight casts with it.
        """
        rows = {n: own for n, own in self._quantized_rows().items() if given_format(own.quantizer) is not None}
        if not rows or "forward_scaling" not in self._modules:
            return
        has_scale, fitting = f"{prefix}forward_scaling.scale" in state_dict, self._fitting_weights(state_dict, prefix)
        for names in self._matrices:
            self._load_scale_of({name: rows[name] for name in names if name in rows}, fitting, has_scale)

    def _load_scale_of(self, rows: dict[str, QuantizedTensor], fitting: dict[str, Tensor], has_scale: bool) -> None:
        """The same for one matrix; ``fitting``: what the state dict brings, with its scale if ``has_scale``."""
        loaded: dict[str, Tensor] = {}
        amax_group = None
        for name, own in rows.items():
            saved = fitting.get(name)
            values = saved if saved is None else own_rows(saved)
            if values is None or (has_scale and isinstance(values, QuantizedTensor) and own._same_form(values)):
                continue
            loaded[name] = values.dequantize() if isinstance(values, QuantizedTensor) else values
            amax_group = None if values is saved and self._etp is None else own.amax_group
        if loaded:  # parameters_split share one scale
            device = self.forward_scaling.scale.device  # of the weight to come, where that is assigned
            present = [loaded.get(name, own) for name, own in rows.items() if name in loaded or not own.is_meta]
            all_values = [each.to(device) for each in present]
            for name, own in rows.items():
                self._bind_scale(name, own, all_values, amax_group)


def owners(model: nn.Module) -> dict[tuple[nn.Module, str], tuple[LinearState, tuple[str, ...], str]]:
    """Whose weights the parameters below ``model`` are, by the module that holds each and its name there.

    Returns:
        For each the layer, and what that calls the parameters of the matrix, and this one.
    """
    found: dict[tuple[nn.Module, str], tuple[LinearState, tuple[str, ...], str]] = {}
    for layer in [each for each in model.modules() if isinstance(each, LinearState)]:
        for names in layer._matrices:
            for name in names:
                path, _, own = name.rpartition(".")
                found[layer.get_submodule(path), own] = layer, names, name
    return found


def fitting(weight: QuantizedTensor, spec: Spec) -> Quantized | None:
    """The weight's own operands, if the GEMMs of ``spec`` take them as they are."""
    ready = reuse(weight, spec.w)
    if ready is None and weight.holds_own_matrix and pairs_with(weight.operands, spec.config, spec.options.needs_x):
        return weight.operands
    return ready
