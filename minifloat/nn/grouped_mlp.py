"""``GroupedMLP``: the MLPs of many experts on rows that are sorted by expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from minifloat import recompute
from minifloat.arguments import Size, checked, label_of, shown
from minifloat.autocast import checks_finite, used
from minifloat.comm.group import Group
from minifloat.functional.autograd import apply, as_output
from minifloat.functional.expert_parallel import Dispatch, Plan, dispatch_of
from minifloat.functional.experts import AheadFunction, GroupedMLPCall, GroupedMLPFunction, LocalExperts, Tokens
from minifloat.functional.grouped import GroupLayout, check_groups, layout_of
from minifloat.functional.norm_activation import Activation, activate
from minifloat.functional.router import Routing, permute_probabilities, unpermute
from minifloat.nn import linear_call, parts
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.linear_call import compiles_backward, run_eager
from minifloat.nn.options import InitMethod, LinearOptions, check_meta, check_tensor, place
from minifloat.recipe import Recipe


class GroupedMLP(parts.LayerOfParts):
    """MLPs of all experts, fc2(activation(fc1(X))), on rows sorted by expert.

    ======  ==========================  =============================
    tensor  shape                       what
    ======  ==========================  =============================
    X, Y    [M, hidden_size]            rows of all experts
    W1      [E, ffn_hidden_size, H]     ``fc1``, twice as many rows if the activation is gated
    W2      [E, H, ffn_hidden_size]     ``fc2``
    ======  ==========================  =============================

    Args:
        num_experts: E.
        hidden_size, ffn_hidden_size, bias, activation, activation_params, init_method, output_layer_init_method,
            params_dtype, dtype, device, recipe, name: of each, as in :class:`~minifloat.LayerNormMLP`.
        single_grouped_weight, fuse_wgrad_accumulation, delay_wgrad_compute, etp_group, etp_reduction: as in
            :class:`~minifloat.GroupedLinear`; of W1 and W2 a rank holds some rows for each expert.
        ep_group: ranks that distribute the experts, E / p each (``functional/expert_parallel.py``); each rank passes
            its own tokens. Gradients of experts are sums over the tokens of all ranks.
        recompute_activation: save only the input of the activation, which its gradient needs anyway, and recompute
            fc2's operand in backward.

    The kernel of the activation casts or finds amaxes; results equal, to the bit, those of the parts called in turn
    (``docs/layers.md`` has two exceptions). The parts are called in turn if one has no recipe, has hooks, a
    ``backward_override`` or ``save_original_input``, or was replaced.
    """

    @checked
    def __init__(
        self,
        num_experts: Size,
        hidden_size: Size,
        ffn_hidden_size: Size,
        *,
        bias: bool = False,
        activation: str = "swiglu",
        activation_params: Mapping[str, float] | None = None,
        single_grouped_weight: bool = False,
        delay_wgrad_compute: bool = False,
        recompute_activation: bool = False,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        name: str | None = None,
        ep_group: ProcessGroup | DeviceMesh | None = None,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__()
        place(type(self).__name__, options)
        self.ep_group = Group.of(ep_group)
        self.activation = Activation.of(activation, activation_params)
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.recompute_activation = recompute_activation
        linear = partial(
            GroupedLinear, num_experts, bias=bias, single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_weight, delay_wgrad_compute=delay_wgrad_compute,
            ep_group=self.ep_group, **options,
        )  # fmt: skip
        width = ffn_hidden_size * (2 if self.activation.gated else 1)
        self.fc1 = linear(
            in_features=hidden_size, out_features=width, init_method=init_method, name=parts.part_name(name, "fc1")
        )
        self.fc2 = linear(
            in_features=ffn_hidden_size,
            out_features=hidden_size,
            init_method=output_layer_init_method or init_method,
            name=parts.part_name(name, "fc2"),
        )

    def _share_experts(self, ranks: Group, shared: MutableMapping[Tensor, nn.Parameter]) -> None:
        """Keeps this rank's of all experts, as in :class:`GroupedLinear`."""
        for fc in (self.fc1, self.fc2):
            fc._share_experts(ranks, shared)
        self.ep_group = ranks

    @property
    def _label(self) -> str:
        return label_of(self.fc1)

    @property
    def _adds_to_results(self) -> bool:
        """fc2 has a bias, which a factor of the activation would not reach; so may have what has replaced it."""
        return not isinstance(self.fc2, GroupedLinear) or self.fc2._has_bias

    def forward(
        self, x: Tensor, m_splits: Any, is_first_microbatch: bool | None = None, probabilities: Tensor | None = None,
        meanwhile: Callable[[], Any] | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes Y of the shape of X: [M, hidden_size] of rows sorted by expert, or tokens [T, hidden_size].

        Args:
            m_splits: as in :meth:`GroupedLinear.forward`, of this rank's experts under ``ep_group``; or a
                :class:`~minifloat.functional.Routing` of k choices for each of T tokens, of all ranks' experts: each is
                read as its k rows are cast, and gets the sum of their results.
            is_first_microbatch: as in :meth:`GroupedLinear.forward`.
            probabilities: factors of Y, [M] of rows, or with a routing [T, k] of choices. Without biases they multiply
                the activation, in fp32, before it is rounded and cast. Their gradient is fp32.
            meanwhile: called while ranks send results of tokens, if they do, to overlap its computation. Its backward
                runs while ranks send gradients.

        Raises:
            TypeError, ValueError: as in ``GroupedLinear``, ``permute`` and ``unpermute``.
        """
        check_tensor(x, self)
        if isinstance(m_splits, Routing):
            return self._forward_tokens(x, m_splits, is_first_microbatch, probabilities, meanwhile)
        layout = layout_of(x, m_splits, self.num_experts // self.ep_group.size, self.hidden_size, self)
        if probabilities is not None:
            if probabilities.shape != (layout.rows,) or not probabilities.is_floating_point():
                raise ValueError(
                    f"{self._label}: probabilities is {shown(probabilities)}; floating-point numbers of shape "
                    f"({layout.rows},) are needed, one for each row"
                )
            probabilities = probabilities.float()
        if self._adds_to_results and probabilities is not None:
            return _times(self.forward(x, layout, is_first_microbatch), probabilities, layout)
        recipes = self._fused(is_first_microbatch)
        if recipes is not None:
            return self._run(x, LocalExperts(layout), is_first_microbatch, probabilities, None, *recipes)
        h = self.fc1(x, layout, is_first_microbatch)
        offsets = None if probabilities is None else layout.offsets
        a = activate(h, self.activation, probabilities, offsets)
        y: Tensor = self.fc2(a, layout, is_first_microbatch)
        return y

    def _forward_tokens(
        self, x: Tensor, routing: Routing, is_first_microbatch: bool | None, probabilities: Tensor | None,
        meanwhile: Callable[[], Any] | None,
    ) -> Tensor:  # fmt: skip
        if self.ep_group.size > 1 and torch.compiler.is_compiling():  # the host waits for how many rows come
            return run_eager(GroupedMLP._forward_tokens, self, x, routing, is_first_microbatch, probabilities, None)
        recipes = self._fused(is_first_microbatch)
        of_rows = (
            None if probabilities is None or self._adds_to_results else permute_probabilities(probabilities, routing)
        )
        there = self._dispatch(x, routing, recipes is not None, of_rows)
        if isinstance(there, Dispatch) and torch.is_grad_enabled():
            x, of_rows = there.with_gradients(x, of_rows)
        if self._adds_to_results:
            y = self.forward(there.spread(x), there.layout, is_first_microbatch)
            return unpermute(there.collect(y), routing, probabilities)
        own = None if of_rows is None else there.probabilities_of(of_rows)
        fits = x.dim() == 2 and x.shape[0] == routing.inverse.shape[0]  # or ``permute`` tells of it
        if recipes is None or not (there.fused and fits):
            return there.gather(self.forward(there.spread(x), there.layout, is_first_microbatch, own))
        check_groups(there.layout, self.num_experts // self.ep_group.size, self)
        return self._run(x, there, is_first_microbatch, own, routing, *recipes, meanwhile)

    def _dispatch(
        self, x: Tensor, routing: Routing, fused: bool, probabilities: Tensor | None
    ) -> LocalExperts | Dispatch:
        """Finds where rows go; ``fused``: this rank would run both linears as one; ``probabilities``: of the rows.

        Raises:
            ValueError: ranks with different recipes, or other tokens than the routing has.
            RuntimeError: a CUDA graph is captured, and the host would have to wait.
        """
        if self.ep_group.size == 1:
            return LocalExperts(GroupLayout(routing.offsets, routing.order.shape[0]), routing)
        check_groups(GroupLayout(routing.offsets, 0), self.num_experts, self)
        if x.dim() != 2 or x.shape[0] != routing.inverse.shape[0]:
            raise ValueError(
                f"{self._label}: the input is {shown(x)}; the routing is of {routing.inverse.shape[0]} tokens, and "
                f"[{routing.inverse.shape[0]}, {self.hidden_size}] is needed"
            )
        recipes, trains = [], False
        for fc in (self.fc1, self.fc2):
            recipe = linear_call.recipe_in_force(fc) if isinstance(fc, GroupedLinear) else None
            config = None if recipe is None else fc._config(recipe)
            recipes.append("none" if config is None else config.describe())
            trains |= isinstance(fc, GroupedLinear) and any(fc._weight(name).requires_grad for name in fc._weight_names)
        if routing.counts.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self._label}: with ep_group the host waits for the numbers of rows that ranks exchange, which the "
                "capture of a CUDA graph cannot; capture the layers around"
            )
        grad, own = torch.is_grad_enabled(), trains or any(p.requires_grad for p in self.parameters())
        needs_x, needs_p = x.requires_grad, probabilities is not None and probabilities.requires_grad
        needs = grad and needs_x, grad and needs_p, grad and (needs_x or needs_p or own)
        plan = Plan(self._label, "; ".join(recipes), fused, grad and trains, needs)
        return dispatch_of(routing, self.ep_group, plan, probabilities)

    def _fused(self, is_first_microbatch: bool | None) -> tuple[Recipe, Recipe] | None:
        """The recipes of both linears, if one autograd function can run them."""
        both = self.fc1, self.fc2
        if (used.check_finite and checks_finite()) or not all(parts.is_own(fc, GroupedLinear) for fc in both):
            return None
        special = is_first_microbatch is False or recompute._inside
        if torch.compiler.is_compiling() and (
            special
            or compiles_backward()
            or any(fc.delay_wgrad_compute or fc.fuse_wgrad_accumulation or fc._etp is not None for fc in both)
        ):
            return None  # they know what of it can be traced
        first, second = (linear_call.recipe_in_force(fc) for fc in both)
        if first is None or second is None or any(fc.return_bias or fc.save_original_input for fc in both):
            return None
        configs = self.fc1._config(first), self.fc2._config(second)
        return None if any(config.backward_override is not None for config in configs) else (first, second)

    def _run(
        self, x: Tensor, there: LocalExperts | Dispatch, is_first_microbatch: bool | None,
        probabilities: Tensor | None, routing: Routing | None, first: Recipe, second: Recipe,
        meanwhile: Callable[[], Any] | None = None,
    ) -> Tensor:  # fmt: skip
        fc1, fc2 = self.fc1, self.fc2
        linear_call.check_input(fc1, x, is_first_microbatch)
        check_meta(x, fc2, fc2._weight(fc2._weight_names[0]))
        dtype = linear_call.compute_dtype(fc1, x)
        tokens = None if routing is None else Tokens(routing, routing.order // routing.inverse.shape[1])
        of_fc1, of_fc2 = there.exchange(tokens, None), there.exchange(None, tokens)
        call1, w1, b1 = linear_call.prepare_call(
            fc1, first, dtype, x.requires_grad, is_first_microbatch, exchange=of_fc1
        )
        needs_hidden = parts.needs_gradient(x, w1, b1, probabilities)
        call2, w2, b2 = linear_call.prepare_call(
            fc2, second, dtype, needs_hidden, is_first_microbatch, exchange=of_fc2,
            recompute_x=self.recompute_activation,
        )  # fmt: skip
        if meanwhile is not None:
            meanwhile = partial(_in_grad_mode, torch.is_grad_enabled(), meanwhile)
        mlp = GroupedMLPCall(self.activation, call1, call2, there.layout, meanwhile, [])
        y = apply(GroupedMLPFunction, mlp, x.to(dtype), probabilities, w1, b1, w2, b2)
        if meanwhile is not None and y.requires_grad:
            y = apply(AheadFunction, y, mlp)
        for call in (call1, call2):
            if call.given.delayed is not None:
                call.given.delayed.forward_finished()
        return y

    def extra_repr(self) -> str:
        return f"activation={self.activation.name}"


def _in_grad_mode(grad: bool, function: Callable[[], Any]) -> None:
    """Calls a function inside of an autograd function, which records nothing by itself."""
    with torch.set_grad_enabled(grad):
        function()


def _times(y: Tensor, probabilities: Tensor, layout: GroupLayout) -> Tensor:
    """The rows of ``y`` times their probabilities, rounded once; those that are no group's are 0, with gradients."""
    some_groups = torch.arange(layout.rows, device=y.device)[:, None] < layout.offsets[-1]
    products = torch.where(some_groups, y.float().reshape(layout.rows, y.shape[-1]) * probabilities[:, None], 0.0)
    return as_output(products.to(y.dtype), y.shape)
