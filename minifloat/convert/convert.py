"""``convert`` and ``revert``: make the layers of a model those of minifloat, and what they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from warnings import warn

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from minifloat.arguments import checked
from minifloat.convert import select, weights
from minifloat.convert.experts import ExpertLinear, attach, attached, grouped_class, identity
from minifloat.convert.select import ConversionReport, Converted, DefaultFilter, FilterFn, LeftAlone, Named, Rule
from minifloat.delayed import AmaxHistory
from minifloat.functional.spec import LinearConfigs
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.linear import Linear
from minifloat.nn.linear_state import LinearState
from minifloat.nn.quantized_parameters import ParameterInit
from minifloat.recipe import OwnRecipe, Recipe, RecipeLike, own_recipe

_BEFORE = "_before_convert"  # the attribute of a converted module that holds its :class:`OriginalModule`

Histories = dict[str, nn.Module]
"""Histories of delayed scaling, by the name of the submodule."""


class Conv1DLinear(Linear):
    """``Linear`` in place of Hugging Face's ``Conv1D``, with W^T as parameter: [in_features, out_features]."""

    def _weight_matrix(self) -> Tensor:
        return self.weight.t()

    _weight_and_bias = LinearState._weight_and_bias

    def reset_parameters(self) -> None:
        """Resets as a new ``Conv1D``: normal values of standard deviation 0.02, a bias of 0, a new state of scaling."""
        super().reset_parameters()
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class OriginalModule(NamedTuple):
    """Class and attributes of a module before it was converted."""

    old_class: type[nn.Module]
    new_class: type[nn.Module] | None  # None if it kept its own
    values: dict[str, Any]  # of attributes that changed
    added: tuple[str, ...]  # names of attributes that it did not have
    submodules: tuple[str, ...]  # names of those that it had
    quantized: tuple[str, ...] = ()  # names of parameters that quantized ones have replaced


class _Decision(NamedTuple):
    """Decision on one linear: its recipe, or why it is left alone."""

    recipe: OwnRecipe
    reason: str | None = None


@checked
def convert(
    model: nn.Module,
    recipe: RecipeLike | None,
    filter_fn: FilterFn | None = None,
    rules: Iterable[tuple[str, RecipeLike | None]] = (),
    quantize_weights: bool | None = None,
) -> ConversionReport:
    """Turns the linears of any model into :class:`minifloat.Linear`, in place.

    Each converted module stays the same object and changes its class, so parameters, hooks, names, references and
    existing optimizers stay valid. Delayed scaling adds its histories to state dicts, which a checkpoint may lack.
    :func:`minifloat.revert` undoes the conversion. A converted model is reverted first; a layer that gets the
    same recipe again keeps its histories.

    It converts ``nn.Linear`` itself, Hugging Face's ``Conv1D``, and experts that transformers 5 keeps as one
    ``gate_up_proj`` and one ``down_proj``, each of which runs as a :class:`minifloat.GroupedLinear`. A linear of this
    library gets the recipe, unless that is None or its own is ``"none"``. The report says why others are skipped.

    Args:
        model: any module.
        recipe: recipe of each converted layer, or its short name, which takes precedence over ``autocast``; None:
            layers use the recipe of ``autocast``; ``"none"``: convert only layers that ``rules`` name.
        filter_fn: called with a linear and its first name, says whether it is converted; by default
            ``DefaultFilter(model)``, which is not asked about this library's own linears.
        rules: pairs of a glob pattern for dotted names (``*`` matches dots too) and a recipe, a short name, None or
            ``"none"``, which keeps layers in high precision inside of ``autocast`` too. The first match decides, before
            ``filter_fn`` and ``recipe``. Names are those of ``named_modules()`` without the parts of wrappers.
        quantize_weights: True replaces the weights of converted layers by quantized parameters
            (:class:`~minifloat.QuantizedTensor`), cast once, with no copy in high precision, in the format of
            ``quantized_model_init`` inside of it, else of each layer's recipe. They are new parameters: make optimizers
            afterwards. Each expert of a joint parameter gets its own. Weights of ``Conv1D``, and shared weights, do not
            change, with a warning. None: True inside of ``quantized_model_init``, else False.

    Returns:
        A report of converted and skipped layers, with reasons; print it. If no layer was converted, a ``UserWarning``
        says why.

    Raises:
        TypeError: ``model``, ``recipe`` or a rule is not one. Nothing was changed.
        ValueError: an unknown recipe name, a model that was given to ``fully_shard`` before, or weights that cannot be
            replaced (gradients, hooks, a ``DistributedDataParallel`` around, no recipe that says which format); the
            model is then as if reverted, as it is if a custom recipe's factory gives a wrong answer.
    """
    for names, module in select.named_modules(model):
        if select.is_sharded_by_fsdp(module):
            raise ValueError(
                f"convert: {names[0] or 'the model'} was given to fully_shard already, which gathers weights in high "
                "precision; convert the model before"
            )
    chosen, read = own_recipe(recipe), select.read_rules(rules)
    kept = _converted_histories(model)
    revert(model)
    modules = select.named_modules(model)
    linears = select.linears_of(modules)
    wanted = DefaultFilter(model) if filter_fn is None else filter_fn
    decisions = [(named, _decide(named, chosen, wanted, read)) for named in linears]
    layers = [(named, decision.recipe) for named, decision in decisions if decision.reason is None]
    others = list(select.other_matrices(modules))
    inits = weights.formats(model, layers, quantize_weights)
    try:
        for named, decision in decisions:
            recipe_before, histories = kept.get(identity(named.module), (None, {}))
            _apply(named, decision, histories if recipe_before == decision.recipe else {})
        for (_, module), decision in decisions:  # the other projection of partly converted experts
            if isinstance(module, ExpertLinear) and decision.reason is not None and attached(module.experts):
                attach(module, "none")
        unquantized = _quantize_weights(modules, inits)
    except BaseException:
        revert(model)
        raise
    if not layers and any(each != "none" for each in (chosen, *[rule.recipe for rule in read])):
        reasons = [decision.reason for _, decision in decisions]
        warn(_nothing_converted(reasons), stacklevel=3)  # past the wrapper of ``checked``
    return _report(modules, decisions, others, _unused_rules(read, linears) + unquantized)


def _quantize_weights(modules: Sequence[Named], inits: Mapping[Named, ParameterInit]) -> list[str]:
    """Replaces the weights of converted layers by quantized parameters; warns of each that stays as it is."""
    found = {module: init for (_, module), init in inits.items() if isinstance(module, LinearState)}
    obstacles = weights.obstacles(modules, found)
    layers = {layer: init for layer, init in found.items() if layer not in obstacles}
    for layer, init in layers.items():  # all plans first: a factory that fails must find the weights as they were
        layer._config(init.recipe)
    for layer, init in layers.items():
        holder = layer.experts if isinstance(layer, ExpertLinear) else layer
        if _BEFORE not in holder.__dict__:
            _give_recipe(layer, layer.recipe, {})
        before: OriginalModule = holder.__dict__[_BEFORE]
        holder.__dict__[_BEFORE] = before._replace(quantized=(*before.quantized, *weights.quantize(layer, init)))
    return [
        f"the weight of {named.names[0]} stays in high precision: {obstacles[named.module]}"
        for named in inits
        if named.module in obstacles
    ]


@checked
def revert(model: nn.Module) -> None:
    """Restores every module of ``model`` to its state before :func:`convert`: class, attributes and submodules.

    Parameters keep their trained values; quantized parameters of ``quantize_weights`` are replaced by their values in
    high precision. Without a conversion it does nothing.

    Raises:
        ValueError: something else has changed the class of a converted module since, as ``fully_shard`` does.
    """
    converted = [named for named in select.named_modules(model) if _BEFORE in named.module.__dict__]
    for names, module in converted:
        before: OriginalModule = module.__dict__[_BEFORE]
        if before.new_class is not None and type(module) is not before.new_class:
            raise ValueError(
                f"revert: {names[0]!r} was made a {before.new_class.__name__} and is a {type(module).__name__} now; "
                "undo what changed it since convert first"
            )
    for _, module in converted:
        _restore(module)


def _decide(named: Named, recipe: OwnRecipe, wanted: FilterFn, rules: list[Rule]) -> _Decision:
    """Decides on a linear: what is impossible first, then rules, then the filter."""
    names, module = named
    reason = select.obstacle(module)
    if reason is not None:
        return _Decision(None, reason)
    for rule in rules:
        if rule.matches(names):
            return _Decision(rule.recipe, f"rule {rule.pattern!r}" if rule.recipe == "none" else None)
    own = module.recipe if select.is_own(module) else None
    if isinstance(wanted, DefaultFilter) and select.is_own(module):
        kind = "GroupedLinear" if isinstance(module, GroupedLinear) else "Linear"
        reason = f"a minifloat.{kind} with recipe={own!r}" if own == "none" or recipe is None else None
    elif isinstance(wanted, DefaultFilter):
        reason = wanted.reason(module)
    elif not wanted(module, names[0]):
        reason = "filter_fn"
    if reason is not None:
        return _Decision(own, reason)
    return _Decision(recipe, 'recipe="none"' if recipe == "none" else None)


def _converted_histories(model: nn.Module) -> dict[Any, tuple[OwnRecipe, Histories]]:
    """Finds each converted layer's recipe and the histories that it got since, by its identity."""
    found: dict[Any, tuple[OwnRecipe, Histories]] = {}
    for module in model.modules():
        if _BEFORE in module.__dict__:
            for layer in [module] if isinstance(module, LinearState) else attached(module):
                found[identity(layer)] = layer.recipe, _added(layer, module.__dict__[_BEFORE])
    return found


def _added(layer: nn.Module, before: OriginalModule) -> Histories:
    """Finds histories, and of experts their linears."""
    children = layer._modules.items()
    return {k: m for k, m in children if isinstance(m, (AmaxHistory, ExpertLinear)) and k not in before.submodules}


def _apply(named: Named, decision: _Decision, histories: Histories) -> None:
    """Converts a linear, or gives a ``Linear`` of the model's own its recipe; with histories that it had, if any."""
    names, module = named
    if isinstance(module, ExpertLinear):
        if decision.reason is None:
            _attach(module, decision.recipe, histories)
    elif isinstance(module, LinearState):
        if module.recipe != decision.recipe:
            _give_recipe(module, decision.recipe, histories)
    elif decision.reason is None:
        _change_class(module, decision.recipe, names[0], histories)


def _attach(linear: ExpertLinear, recipe: OwnRecipe, histories: Histories) -> None:
    """Makes ``linear`` part of its experts, whose class it changes if that is not done yet."""
    experts = linear.experts
    if _BEFORE not in experts.__dict__:
        before = OriginalModule(type(experts), grouped_class(experts), {}, (), tuple(experts._modules))
        experts.__class__ = grouped_class(experts)
        experts.__dict__[_BEFORE] = before
    attach(linear, recipe)
    linear._modules.update(histories)
    if isinstance(recipe, Recipe):
        linear._config(recipe)


def _give_recipe(module: LinearState, recipe: OwnRecipe, histories: Histories) -> None:
    values = {key: module.__dict__[key] for key in ("_recipe", "_configs")}  # plans, which rely on histories
    module.__dict__[_BEFORE] = OriginalModule(type(module), None, values, (), tuple(module._modules))
    module._modules.update(histories)
    module.recipe, module._configs = recipe, LinearConfigs()
    if isinstance(recipe, Recipe):
        module._config(recipe)


def _change_class(module: nn.Module, recipe: OwnRecipe, name: str, histories: Histories) -> None:
    before, old, (out_features, in_features) = dict(module.__dict__), type(module), select.linear_shape(module)
    new = Conv1DLinear if select.is_conv1d(module) else Linear
    module.__class__ = new
    assert isinstance(module, Linear)
    module._init_state(recipe, name)
    module.__dict__.update(in_features=in_features, out_features=out_features)
    now = module.__dict__
    values = {key: before[key] for key in now if key in before and before[key] is not now[key]}
    added = tuple(key for key in now if key not in before)
    now[_BEFORE] = OriginalModule(old, new, values, added, tuple(module._modules))
    module._modules.update(histories)
    if isinstance(module.recipe, Recipe):
        module._config(module.recipe)


def _restore(module: nn.Module) -> None:
    before: OriginalModule = module.__dict__[_BEFORE]
    weights.dequantize(module, before.quantized)
    for name in _added(module, before):
        del module._modules[name]
    del module.__dict__[_BEFORE]
    if before.new_class is not None:
        module.__class__ = before.old_class
    for name in before.added:
        module.__dict__.pop(name, None)
    module.__dict__.update(before.values)


def _report(
    modules: list[Named], decisions: list[tuple[Named, _Decision]], others: list[tuple[Named, str]], warnings: list[str]
) -> ConversionReport:
    converted, left_alone = [], []
    for (names, module), (recipe, reason) in decisions:
        holder = module.experts if isinstance(module, ExpertLinear) else module
        before: OriginalModule | None = holder.__dict__.get(_BEFORE)
        shape = select.linear_shape(module)
        num_experts = module.num_gemms if isinstance(module, GroupedLinear) else None
        if reason is None:
            assert recipe != "none"
            quantized = () if before is None else before.quantized
            quantized_weight = module.parameter in quantized if isinstance(module, ExpertLinear) else bool(quantized)
            converted.append(Converted(names, shape, recipe, quantized_weight, num_experts))
        else:
            kind = type(holder) if before is None else before.old_class
            left_alone.append(LeftAlone(names, kind.__name__, shape, reason, num_experts))
    left_alone += [LeftAlone(names, type(module).__name__, None, reason) for (names, module), reason in others]
    layers = [named.module for named, decision in decisions if decision.reason is None]
    linears = [named.module for named, _ in decisions]  # with new modules, of quantized experts
    everything = _count_elements([*linears, *(named.module for named in modules)])
    fraction = _count_elements(layers) / everything if everything else 0.0
    recipes = ((n[0], "none" if why and not select.is_own(m) else own) for (n, m), (own, why) in decisions)
    uneven = dict.fromkeys(select.pattern_of(tuple(g)) for g in select.merged(recipes) if len(set(g.values())) > 1)
    warnings = warnings + _fast_paths(modules, layers)
    warnings += [f"{each}: engines merge these, and export_weights refuses unequal recipes" for each in uneven]
    return ConversionReport(tuple(converted), tuple(left_alone), tuple(warnings), fraction)


def _fast_paths(modules: list[Named], converted: list[nn.Module]) -> list[str]:
    """Warns if PyTorch may read converted weights without calling their modules."""
    blocks = [named.module for named in modules if isinstance(named.module, nn.TransformerEncoderLayer)]
    if not any(child in converted for block in blocks for child in block.children()):
        return []
    return [
        "nn.TransformerEncoderLayer in evaluation without gradients does not call its linears but computes in high "
        "precision; torch.backends.mha.set_fastpath_enabled(False) makes it call them"
    ]


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Lists the parameters of the module itself; of a projection of experts its weight and bias."""
    if not isinstance(module, ExpertLinear):
        return list(module.parameters(recurse=isinstance(module, GroupedLinear)))
    held = module.experts._parameters
    whole = held.get(module.parameter), held.get(f"{module.parameter}_bias")
    return [*module.parameters(), *[p for p in whole if p is not None]]


def _count_elements(modules: list[nn.Module]) -> int:
    """Counts the elements of parameters of modules, shared ones once."""
    return sum({id(p): p.numel() for module in modules for p in _own_parameters(module) if not is_lazy(p)}.values())


def _nothing_converted(reasons: Sequence[str | None]) -> str:
    """Words a warning, with the most frequent reasons."""
    if not reasons:
        return "convert: nothing was converted: the model has no linears"
    why = "; ".join(f"{count} of {len(reasons)} linears: {each}" for each, count in Counter(reasons).most_common(3))
    return f"convert: nothing was converted: {why}; filter_fn chooses among the layers that can be"


def _unused_rules(rules: list[Rule], linears: list[Named]) -> list[str]:
    """Warns of each rule that no linear is left for."""
    warnings, left = [], linears
    for rule in rules:
        matched = [named for named in left if rule.matches(named.names)]
        if not matched:
            earlier = any(rule.matches(named.names) for named in linears)
            why = "earlier rules match all of its" if earlier else "there are no such"
            warnings.append(f"rule {rule.pattern!r} decides nothing: {why} linears")
        left = [named for named in left if named not in matched]
    return warnings
