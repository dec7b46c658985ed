"""State of a linear layer beside its parameters: specs, quantized weights and amax histories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from minifloat.arguments import check_value, checked
from minifloat.autocast import DelayedCall, check_finite, checks_finite, first_equal
from minifloat.comm.dtensor_ddp import check_synchronized, watch_pipelines
from minifloat.delayed import AmaxHistory, history_length
from minifloat.functional.etp.weight import EtpWeightSource
from minifloat.functional.exchange import LOCAL, Exchange
from minifloat.functional.quantize import (
    BACKWARD_SLOTS,
    FORWARD_SLOTS,
    LinearConfig,
    Mode,
    delayed_scale,
    linear_config,
    pairs_with,
    quantize,
    record_all,
    reuse,
)
from minifloat.functional.spec import LinearConfigs, Spec
from minifloat.functional.weight_source import LOCAL_WEIGHT, WeightSource
from minifloat.nn.options import InitMethod
from minifloat.nn.quantized_parameters import (
    QuantizedWeights,
    bind_scale,
    bind_scales,
    keep_quantized,
    load_scales,
    quantized_rows,
)
from minifloat.nn.tensor_parallel import Partition
from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer
from minifloat.recipe import DelayedScaling, OwnRecipe, Recipe, RecipeLike, as_recipe, own_recipe
from minifloat.recompute import capturing, note_weight, replayed_weight
from minifloat.tensor import QuantizedTensor
from minifloat.tensor.base import count_steps, stop_counting, versions

_HISTORIES = {"forward_scaling": FORWARD_SLOTS, "backward_scaling": BACKWARD_SLOTS}


class CachedWeight(NamedTuple):
    """Quantized weight, and what it was cast from and with.

    ``in_capture``: by ``cast_weights``, while a CUDA graph was captured or not; None: by the layer itself.
    """

    sources: tuple[Tensor, ...]
    versions: tuple[float, ...]
    quantizer: Quantizer
    operands: Quantized
    in_capture: bool | None = None

    def holds(self, sources: tuple[Tensor, ...], quantizer: Quantizer) -> bool:
        """Whether a cast of the weight made of ``sources`` would give the same now."""
        return (
            len(self.sources) == len(sources)
            and all(mine is theirs for mine, theirs in zip(self.sources, sources, strict=True))
            and self.versions == versions(sources)
            and self.quantizer in (quantizer, quantizer.with_usage(columnwise=True))
            and self.in_capture in (None, capturing())  # a graph would cast no more when it is replayed
        )


class LinearState(QuantizedWeights):
    """State of a :class:`~minifloat.Linear`, beside its parameters; ``_groups`` linears may share it.

    Attributes:
        wgrad_in_weight_dtype: may be set: dW is computed in the dtype of the weight, as fp32. Else it is rounded to
            that of the activations, and autograd copies it.
        _keeps_weight: between microbatches; what is gathered for each is not worth it, nor known to have changed.
        _skip_weight_cast: fp32 [1] that a captured cast reads in each replay: where it is 1, codes stay.
        _agreed: recipes and groups whose ranks run the layer alike.
        _preserves_initial: quantized weights keep the values that they start with.
    """

    in_features: int
    out_features: int
    backward_scaling: AmaxHistory
    _partitions: dict[str, Partition]
    _configs: LinearConfigs
    _wgrad_tasks: list[Callable[[], None]]
    _wgrad_hooks: list[Callable[[], None]]

    name: str = ""
    fuse_wgrad_accumulation: bool = False
    delay_wgrad_compute: bool = False
    save_original_input: bool = False
    return_bias: bool = False
    wgrad_in_weight_dtype: bool = False
    init_method: InitMethod | None = None
    parameters_split: dict[str, int] | None = None
    parallel_mode: Mode | None = None
    sequence_parallel: bool = False
    _recipe: OwnRecipe = None
    _exchange: Exchange = LOCAL
    _keeps_weight: bool = True
    _weight_cache: CachedWeight | None = None
    _skip_weight_cast: Tensor | None = None
    _agreed: frozenset[tuple[str, ...]] = frozenset()
    _ran_under: tuple[Recipe | None, ...] = ()
    _weight_margin: int = 0
    _preserves_initial: bool = False

    # ---- what each kind of layer says of its parameters ----

    def _weight_matrix(self) -> Tensor:
        """Returns this rank's W in the shape that the autograd function takes."""
        raise NotImplementedError

    def _bias_vector(self) -> Tensor | None:
        """Returns this rank's b, likewise."""
        raise NotImplementedError

    def _weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Returns W, and b where forward adds it."""
        return self._weight_matrix(), None if self.return_bias else self._bias_vector()

    def _gathered_weight(self) -> QuantizedTensor | None:
        """Returns W where FSDP2 has gathered it as one, of several parameters."""
        return None

    # ---- recipes ----

    @property
    def recipe(self) -> OwnRecipe:
        """Recipe of its own; ``"none"``: high precision, whatever surrounds it; None: what ``autocast`` gives.

        A recipe or its short name may be assigned.
        """
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: RecipeLike | None) -> None:
        check_value(self._label, "recipe", recipe, RecipeLike | None)
        self._recipe = own_recipe(recipe)

    @property
    def _distribute_module_applied(self) -> bool:
        """Flag that PyTorch's ``parallelize_module`` and ``distribute_module`` read and set, on every rank.

        Raises:
            ValueError: a weight is quantized, which they would scatter as if it had the memory of its values; or there
                are histories of delayed scaling, which they would take for linears.
        """
        quantized = quantized_rows(self)
        if quantized or "forward_scaling" in self._modules:
            raise ValueError(
                f"{self._label}: PyTorch's parallelize_module and distribute_module do not split "
                f"{'quantized weights' if quantized else 'layers with histories of delayed scaling'}; use "
                "minifloat.distributed.parallelize, or parallel_mode='column' or 'row'"
            )
        return bool(self.__dict__.get("_is_distributed", False))

    @_distribute_module_applied.setter
    def _distribute_module_applied(self, applied: bool) -> None:
        self.__dict__["_is_distributed"] = applied

    def _init_state(self, recipe: RecipeLike | None, name: str) -> None:
        """Sets all that an ``nn.Linear`` lacks, which may become one of these by having its class changed."""
        watch_pipelines()
        kind = type(self)
        defaults = {key: getattr(kind, key) for key in LinearState.__annotations__ if key in vars(LinearState)}
        own: dict[str, Any] = {"_configs": LinearConfigs(), "_wgrad_tasks": [], "_wgrad_hooks": [], "_partitions": {}}
        given = {"name": name, "_recipe": own_recipe(recipe)}
        self.__dict__.update(defaults | own | given)  # nn.Module.__init__ may not have run yet

    def _config(self, recipe: Recipe) -> LinearConfig:
        return self._configs.under(recipe, self._new_config).config

    def _new_config(self, recipe: Recipe) -> LinearConfig:
        config = linear_config(recipe, self.name, self.save_original_input)
        if config.delayed is not None:
            self._make_histories(config.delayed)
        return config

    # ---- the start ----

    def _reset_histories(self) -> None:
        """Resets the state of delayed scaling."""
        for name in _HISTORIES:
            if name in self._modules:
                getattr(self, name).reset_parameters()

    # ---- the weight of a call ----

    def _weight_operands(
        self, spec: Spec, delayed_call: DelayedCall | None, weight: Tensor, is_first_microbatch: bool | None
    ) -> Quantized | None:
        """Finds operands of the weight: its own, or those cached for several microbatches; None: cast it.

        A sharded one gives None too: its rows are cast here and gathered when they are multiplied.
        """
        quantizer = spec.w
        if self._etp is not None:
            for rows in self._etp.rows.parameters():
                if isinstance(rows, QuantizedTensor) and pairs_with(rows._operands, spec.config, spec.options.needs_x):
                    quantizer = rows.quantizer  # as it is kept, whatever the recipe would make of it
            if delayed_call is not None:
                bind_scales(self)
            scales = None
            if delayed_call is not None and delayed_call.histories[0].scale is not self.forward_scaling.scale:
                replayed = delayed_scale(delayed_call, "weight")  # a recomputation's
                scales = None if replayed is None else list(replayed.split(1))
            parts = self._etp.cast(quantizer, spec.options.dtype, first=is_first_microbatch, scales=scales)
            self._record_weight(delayed_call, self._etp.rows.part(parts))
            return None
        compiling = torch.compiler.is_compiling()
        if compiling:  # which cannot look into a tensor that it has computed
            weight = weight if (whole := self._gathered_weight()) is None else whole
        if isinstance(weight, QuantizedTensor):
            check_synchronized(self)
            if weight.gatherer is not None and not compiling:
                weight.gatherer.fetch_for(quantizer, self._label)
            ready = reusable_operands(weight, spec)
            if ready is not None:
                self._follow_own_scale(weight, delayed_call, ready)
                return ready
        unnamed = is_first_microbatch is None
        if not self._keeps_weight or (unnamed and compiling):
            return None
        cached = self._weight_cache
        if (unnamed and (cached is None or cached.in_capture is None)) or not quantizer.quantized:
            return None
        sources = tuple(self._weight(name) for name in self._weight_names)
        kept = None if compiling else replayed_weight()  # another microbatch may have replaced the layer's
        if kept is None and not is_first_microbatch and cached is not None and cached.holds(sources, quantizer):
            kept = cached
        if kept is None:
            if unnamed:
                return None
            operands = self._quantize_weight(weight.detach(), quantizer, delayed_call)
            count_steps(sources)
            kept = self._weight_cache = CachedWeight(sources, versions(sources), quantizer, operands)
        if not compiling:
            note_weight(kept)
        return kept.operands

    def _quantize_weight(self, weight: Tensor, quantizer: Quantizer, delayed_call: DelayedCall | None) -> Quantized:
        return quantize(weight, quantizer, "weight", delayed_call, noop_flag=self._skip_weight_cast)

    def _follow_own_scale(self, weight: QuantizedTensor, delayed_call: DelayedCall | None, operands: Quantized) -> None:
        """Records the amax of a weight under delayed scaling where it is used: it was cast when it was written."""
        self._record_weight(delayed_call, operands)
        if delayed_call is not None and not torch.compiler.is_compiling():
            bind_scale(self, self._weight_names[0], weight)

    def _record_weight(self, delayed_call: DelayedCall | None, operands: Quantized) -> None:
        """Records the amax of a weight that is not cast in this call; of a sharded one that of this rank's rows."""
        if delayed_call is not None:
            record_all(delayed_call, ["weight"], [operands])

    # ---- calls ----

    _weight_as_it_is = LOCAL_WEIGHT

    def _weight_source(self, weight: Tensor) -> WeightSource:
        """Makes the weight source of this call, where operands come from or the gradient goes in a special way."""
        tasks = self._wgrad_tasks if self.delay_wgrad_compute else None
        dtype = weight.dtype if self.wgrad_in_weight_dtype else None
        if self._etp is not None:
            return EtpWeightSource(self._etp, tasks, dtype, self.fuse_wgrad_accumulation)
        own = self._own_parameters(weight) if tasks is not None or self.fuse_wgrad_accumulation else ()
        if not torch.compiler.is_compiling() and not all(each.is_leaf for each in own):
            own = ()  # autograd knows what they are computed from
        return type(self._weight_as_it_is)(own, tasks, dtype, self.fuse_wgrad_accumulation and len(own) > 0)

    def _own_parameters(self, weight: Tensor) -> Sequence[Any]:
        """Lists the parameters of a whole ``weight`` that backward may write to by itself."""
        return (weight,)

    def _own_values(self) -> Tensor:
        """Returns what this rank has of W."""
        return self._weight_matrix().detach() if self._etp is None else torch.cat(self._etp.rows.matrices())

    def _check_finite(self, x: Tensor, y: Tensor, offsets: Tensor | None = None) -> None:
        """Under ``check_finite``, raises if X, W or later the gradient of Y is not finite, in rows of some group."""
        if checks_finite():
            check_finite(self._label, x, self._own_values(), y, offsets)

    def backward_dw(self) -> None:
        """Computes the oldest weight gradient that backward left to do, then calls the registered hooks.

        Raises:
            ValueError: there is none, or the layer does not delay them.
        """
        if not self.delay_wgrad_compute:
            raise ValueError(f"{self._label}: backward_dw needs delay_wgrad_compute=True")
        if not self._wgrad_tasks:
            raise ValueError(f"{self._label}: no weight gradient is waiting; run backward before backward_dw")
        self._wgrad_tasks.pop(0)()
        for hook in self._wgrad_hooks:
            hook()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and drops weight gradients that wait for :meth:`backward_dw`."""
        self._wgrad_tasks.clear()
        super().zero_grad(set_to_none)

    @checked
    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Calls ``hook`` after each :meth:`backward_dw`."""
        self._wgrad_hooks.append(hook)

    # ---- delayed scaling ----

    def _make_histories(self, recipe: DelayedScaling) -> None:
        if torch.compiler.is_compiling() and "forward_scaling" not in self._modules:
            raise RuntimeError(
                f"{self._label}: delayed scaling keeps buffers, which a compiled graph cannot add to a module; "
                "call minifloat.prepare(model, recipe) before the first compiled step, or give the layer recipe="
            )
        for name, slots in _HISTORIES.items():
            if name not in self._modules:
                with torch.inference_mode(False):  # or training could not write to them later
                    device = self._weight(self._weight_names[0]).device
                    self._add_history(name, len(slots), recipe.amax_history_len, device)

    def _add_history(self, name: str, slots: int, length: int, device: torch.device) -> None:
        self.add_module(name, AmaxHistory(slots * self._groups, length, device))

    # ---- copies, moves and checkpoints ----

    def invalidate(self) -> None:
        self._weight_cache = None
        super().invalidate()

    def __getstate__(self) -> dict[str, Any]:
        # A copy's parameter counts its versions anew, and what waits for backward_dw belongs to the original's graph.
        return self.__dict__ | {"_weight_cache": None, "_wgrad_tasks": [], "_agreed": frozenset()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        bind_scales(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        stop_counting(self._weight(name) for name in self._weight_names)
        before = {name: (r.detach(), r.get_high_precision_init_val()) for name, r in quantized_rows(self).items()}
        super()._apply(fn, recurse)
        for name, (rows, initial) in before.items():
            assert isinstance(rows, QuantizedTensor)
            keep_quantized(self._weight(name), rows, initial, fn)
        bind_scales(self)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        stop_counting(self._weight(name) for name in self._weight_names)
        assign = local_metadata.get("assign_to_params_buffers", False)
        if self._etp is not None:
            self._etp.rows.cut_full(state_dict, prefix)
        self._load_histories(state_dict, prefix, assign)
        load_scales(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        if not assign:  # there the histories are replaced after the weight
            bind_scales(self)

    def _load_histories(self, state_dict: dict[str, Any], prefix: str, assign: bool) -> None:
        """Makes the histories that a state dict brings; those that it lacks beside a weight start anew.

        A layer that gets its recipe from autocast has none before its first step. What is there belongs to another
        weight, or is memory that nothing was written to.
        """
        weight = next(iter(self._fitting_weights(state_dict, prefix).values()), None)
        device = self._weight(self._weight_names[0]).device
        for name, slots in _HISTORIES.items():
            saved = state_dict.get(f"{prefix}{name}.amax_history")
            if saved is not None and name not in self._modules:
                self._add_history(name, len(slots), max(history_length(saved), 1), device)
            elif weight is not None and name in self._modules:
                getattr(self, name).reset_missing(state_dict, f"{prefix}{name}.", weight.device if assign else device)


def reusable_operands(weight: QuantizedTensor, spec: Spec) -> Quantized | None:
    """Returns the weight's own operands, if the GEMMs of ``spec`` take them as they are."""
    ready = reuse(weight, spec.w)
    if ready is None and weight.holds_own_matrix and pairs_with(weight.operands, spec.config, spec.options.needs_x):
        return weight.operands
    return ready


@checked
def prepare(model: nn.Module, recipe: RecipeLike) -> nn.Module:
    """Creates the configurations, and for delayed scaling the buffers, that a first step under ``recipe`` would.

    Call it before ``torch.compile`` of a model under delayed scaling, and before an optimizer or a checkpoint reads the
    buffers. Modules with their own recipe already have them. Pass the same recipe object as to ``autocast``, so that a
    custom recipe's factory is not called again.

    Returns:
        ``model``.
    """
    chosen = first_equal(as_recipe(recipe))  # the object that autocast gives
    for module in model.modules():
        if isinstance(module, LinearState) and module.recipe is None:
            module._config(chosen)
    return model
