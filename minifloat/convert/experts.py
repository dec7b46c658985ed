"""Experts that are kept as one tensor for each projection, as transformers 5 does, through grouped linears.

No class of transformers is imported: experts are known by their parameters ``gate_up_proj`` and ``down_proj`` and by
the attributes that ``transformers.integrations.use_experts_implementation`` sets on them.
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from minifloat.autocast import current
from minifloat.functional.grouped import GroupLayout
from minifloat.functional.router import permute, route, unpermute
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.linear_call import recipe_in_force, replayed_scale
from minifloat.quantizer import DTYPES
from minifloat.recipe import RecipeLike

_PROJECTIONS = {"gate_up_proj": "gate_up_linear", "down_proj": "down_linear"}
"""The parameters of experts, and the submodules that multiply by them."""
_FLAGS = ("is_transposed", "has_bias", "has_gate")


class ExpertLinear(GroupedLinear):
    """One projection of all experts: a grouped linear whose weight is a parameter of another module.

    Args:
        experts: the module that holds the parameters; it is not made a submodule.
        parameter: the name of the weight, [E, N, K], or [E, K, N] if ``experts.is_transposed``.
        name: what recipes and errors call the layer.
    """

    experts: nn.Module
    parameter: str

    def __init__(self, experts: nn.Module, parameter: str, name: str) -> None:
        nn.Module.__init__(self)
        self._init_state(None, name)
        self.__dict__.update(experts=experts, parameter=parameter)  # not a submodule: it holds this one
        self.transposed, self.biased = bool(experts.is_transposed), bool(experts.has_bias)
        groups, *sizes = experts._parameters[parameter].shape  # type: ignore[union-attr]
        self.num_gemms = self.num_experts = self._groups = groups
        self.in_features, self.out_features = sizes if self.transposed else reversed(sizes)
        self.single_grouped_weight = self.single_grouped_bias = True

    @property
    def _label(self) -> str:
        return f"experts {self.name!r}"

    @property
    def _weight_names(self) -> tuple[str, ...]:
        return (self.parameter,) if self.single_grouped_weight else super()._weight_names

    @property
    def _holder(self) -> nn.Module:
        return self.experts

    def _weight(self, name: str) -> Any:
        return getattr(self.experts, name) if self.single_grouped_weight else super()._weight(name)

    def _weight_matrix(self) -> Tensor:
        """W [E, N, K]; the cast copies it if it is a transposed view."""
        if not self.single_grouped_weight:
            return super()._weight_matrix()
        weight: Tensor = getattr(self.experts, self.parameter)
        return weight.transpose(1, 2) if self.transposed else weight

    def _bias_vector(self) -> Tensor | None:
        """Returns b [E, N]."""
        return getattr(self.experts, f"{self.parameter}_bias") if self.biased else None

    def reset_parameters(self) -> None:
        """Delayed scaling's state as new; the parameters are those of another module."""
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]

    def _fitting_weights(self, state_dict: dict[str, Any], prefix: str) -> dict[str, Tensor]:
        own = f"{_PROJECTIONS[self.parameter]}." if self.single_grouped_weight else ""
        return super()._fitting_weights(state_dict, prefix.removesuffix(own))

    def _rename_weights(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Gives a state dict, with the ``prefix`` of the experts, the weights of the parameters that there are."""
        whole, child = f"{prefix}{self.parameter}", f"{prefix}{_PROJECTIONS[self.parameter]}."
        each = [f"{child}{number}.weight" for number in self._numbers()]
        if self.single_grouped_weight and all(name in state_dict for name in each):
            values = torch.stack([state_dict.pop(name) for name in each])
            state_dict[whole] = values.mT if self.transposed else values
        elif not self.single_grouped_weight and whole in state_dict:
            values = state_dict.pop(whole)
            state_dict[f"{child}weight"] = values.mT if self.transposed else values


class _GroupedExperts(nn.Module):
    """The forward of experts whose projections are grouped linears; a base of the class that converted ones get."""

    gate_up_linear: ExpertLinear
    down_linear: ExpertLinear

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes Y [T, H]: of each token of X [T, H] the sum of its k experts' results, times their weights [T, k].

        Where neither projection has a recipe in force it is the forward that the experts had before.
        """
        linears = self.gate_up_linear, self.down_linear
        if not any(_computes(linear) for linear in linears):
            for linear in linears:  # checkpoints note under which recipe a layer runs
                replayed_scale(linear, None, None, torch.compiler.is_compiling())
            before: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return before
        experts = self.gate_up_linear.num_gemms
        index = top_k_index.masked_fill(top_k_index == experts, -1)  # of another rank, if transformers splits them
        routing = route(index, experts, self.gate_up_linear)
        layout = GroupLayout(routing.offsets, routing.order.shape[0])
        gate_up = self.gate_up_linear(permute(hidden_states, routing), layout)
        rows = self.down_linear(self._apply_gate(gate_up), layout)  # type: ignore[operator]
        return unpermute(rows, routing, top_k_weights).to(hidden_states.dtype)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        assign = local_metadata.get("assign_to_params_buffers", False)
        for child in _PROJECTIONS.values():  # which are shown their own part of the state dict only, without weights
            getattr(self, child)._rename_weights(state_dict, prefix)
            getattr(self, child)._load_histories(state_dict, f"{prefix}{child}.", assign)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)


def _computes(linear: ExpertLinear) -> bool:
    """Whether a recipe is in force, ``autocast`` calibrates the layer, or its weights are kept quantized."""
    if not linear.single_grouped_weight:
        return True
    context = current()
    calibrates = context is not None and context.calibrating and linear.recipe is None
    return calibrates or recipe_in_force(linear) is not None


class _ExpertsType(type):
    """The type of the classes that :func:`_grouped` makes, by which they are pickled."""


@lru_cache(64)  # classes of experts that a program defines anew for each model must not fill the memory
def _grouped(old: Any) -> Any:
    """Makes the class that experts of class ``old`` get: a subclass, which keeps its gate."""
    members = {"__module__": __name__, "__doc__": _GroupedExperts.__doc__}
    return _ExpertsType(f"Grouped{old.__name__}", (_GroupedExperts, old), members)


copyreg.pickle(_ExpertsType, lambda made: (_grouped, (made.__bases__[1],)))


# ---- which modules are experts ----


def are_experts(module: nn.Module) -> bool:
    """Whether the module has the parameters of transformers' experts, converted or not."""
    computed = module._modules.get("parametrizations")
    held = {**module._parameters, **({} if computed is None else computed._modules)}
    weights = [held.get(name) for name in _PROJECTIONS]
    return all(w is not None and (not isinstance(w, Tensor) or w.dim() == 3) for w in weights)


def experts_obstacle(module: nn.Module) -> str | None:
    """Why experts cannot be converted; None if they can."""
    if hasattr(module, "parametrizations"):
        return "their weights are computed by torch.nn.utils.parametrize"
    if "forward" in module.__dict__:
        return "their forward was replaced on the object; convert the model before whatever did that"
    missing = [name for name in ("num_experts", *_FLAGS) if not isinstance(getattr(module, name, None), int)]
    if missing:
        return f"they do not say how they compute, as those of transformers 5 do: no {', '.join(missing)}"
    if not hasattr(type(module).forward, "__wrapped__") or not callable(getattr(module, "_apply_gate", None)):
        return f"{type(module).__name__} has a forward of its own, not that of transformers' use_experts_implementation"
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return "they have no gate" if not module.has_gate else "they have a norm of their own"
    if getattr(module, "_is_expert_parallel", False):
        return "they are split over ranks (expert parallelism)"
    return _parameters_obstacle(module)


def _parameters_obstacle(module: nn.Module) -> str | None:
    biases = [f"{name}_bias" for name in _PROJECTIONS] if module.has_bias else []
    held: dict[str, Any] = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    if set(held) != {*_PROJECTIONS, *biases}:
        return f"their parameters are {', '.join(held)}; expected are {', '.join([*_PROJECTIONS, *biases])}"
    for name in _PROJECTIONS:
        if is_traceable_wrapper_subclass(held[name]):
            return f"{name} is a {type(held[name]).__name__}, which keeps its values in a way of its own"
        if held[name].dtype not in DTYPES:
            return f"{name} is {held[name].dtype}; only bf16, fp16 and fp32 can be quantized"
    down: Any = held["down_proj"]
    groups, *sizes = down.shape
    ffn, hidden = sizes if module.is_transposed else reversed(sizes)
    gate_up = (hidden, 2 * ffn) if module.is_transposed else (2 * ffn, hidden)
    wanted = {"gate_up_proj": (groups, *gate_up), "gate_up_proj_bias": (groups, 2 * ffn)}
    wanted["down_proj_bias"] = groups, hidden
    odd = [name for name in held if tuple(held[name].shape) != wanted.get(name, tuple(down.shape))]
    if groups != module.num_experts or odd:
        shown = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in held.items())
        return f"their sizes do not fit together: {module.num_experts} experts, {shown}"
    return None


def expert_linears(experts: nn.Module, names: Sequence[str]) -> list[tuple[tuple[str, ...], ExpertLinear]]:
    """Lists both projections, with their dotted names: linears that are not part of ``experts`` yet."""
    found = []
    for parameter in _PROJECTIONS:
        own = tuple(f"{name}.{parameter}" if name else parameter for name in names)
        found.append((own, ExpertLinear(experts, parameter, own[0])))
    return found


def identity(module: nn.Module) -> Any:
    """Tells linears apart: the module itself, or experts and parameter, which have a new module each time."""
    return (module.experts, module.parameter) if isinstance(module, ExpertLinear) else module


# ---- converting them ----


def grouped_class(experts: nn.Module) -> type[nn.Module]:
    """The class that ``experts`` become."""
    old: Any = type(experts)
    made: type[nn.Module] = _grouped(old)
    return made


def attach(linear: ExpertLinear, recipe: RecipeLike | None) -> None:
    """Makes ``linear`` the submodule of its experts that their forward calls."""
    linear.recipe = recipe
    linear.experts.add_module(_PROJECTIONS[linear.parameter], linear)


def attached(experts: nn.Module) -> list[ExpertLinear]:
    """The linears of converted experts; none of others."""
    children = (experts._modules.get(child) for child in _PROJECTIONS.values())
    return [child for child in children if isinstance(child, ExpertLinear)]
