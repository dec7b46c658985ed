"""The private parts of PyTorch's FSDP2 that quantized gathers depend on, alike from 2.11 to 2.15; read here alone.

FSDP2 asks the local tensor of a sharded parameter for hooks around its all-gather. A tensor that has them would have to
keep them through ``to_empty``, ``load_state_dict(assign=True)``, optimizers and checkpoints. So parameters stay the
plain tensors that they are, and the objects that FSDP2 makes for parameters, groups and modules get subclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, alloc_storage, free_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from minifloat.comm.group import Group, ShardMap
from minifloat.tensor import QuantizedTensor
from minifloat.tensor.rows import adopt_group

if TYPE_CHECKING:
    from minifloat.parallel.fsdp.weight import Buffer, ShardedWeight

__all__ = ["alloc_storage", "free_storage"]


class ShardedParameter(FSDPParam):
    """An ``FSDPParam`` that is gathered as codes: the weight of a linear layer, or one of several that are its rows.

    Attributes:
        weight, number: what it is or belongs to, and its number among the parameters there.
        name: what the layer calls the parameter.
        shards, group: the rows of each rank, and the ranks.
    """

    weight: ShardedWeight
    number: int
    name: str
    shards: ShardMap
    group: Group
    fsdp_pre_all_gather = fsdp_post_all_gather = None  # what tells FSDP2 that a parameter is gathered otherwise
    _memory: list[Tensor]  # what a gather allocates and resharding frees; parameters of a weight may share it

    @staticmethod
    def hook(param: Any, weight: ShardedWeight, number: int, name: str) -> ShardedParameter:
        """Lets ``weight`` say from now on what of ``param`` is gathered, and what is made of it."""
        param.shards, param.group = shards_of(param)
        param.__class__ = ShardedParameter
        param.weight, param.number, param.name = weight, number, name
        param._memory = []
        param._init_extensions()
        hooked: ShardedParameter = param
        return hooked

    def unhook(self) -> None:
        """Leaves the parameter to FSDP2 from now on, which gathers it in high precision.

        Raises:
            ValueError: it has gradients of a microbatch that are not reduced yet.
        """
        if getattr(getattr(self, "_unsharded_param", None), "grad", None) is not None:
            raise ValueError(
                f"{self.weight.layer._label}: its recipe was set to 'none' between microbatches, whose gradients are "
                "not reduced yet; set it between optimizer steps"
            )
        self.weight.fsdp.wait_for_unshard()
        self.weight.fsdp.reshard()
        self.weight.cast, self.all_gather_outputs = None, []
        self.__dict__.pop("_unsharded_param", None)
        self.__class__ = FSDPParam  # type: ignore[assignment]
        self._init_extensions()

    @property
    def local(self) -> Tensor:
        """This rank's rows [m, K], in high precision or quantized, where they are kept."""
        local: Tensor = self.sharded_param._local_tensor  # type: ignore[attr-defined]
        return local

    @property
    def rows(self) -> Tensor:
        """The local rows on the device that computes."""
        return self.local.to(self.device, non_blocking=True) if self.offload_to_cpu else self.local

    def register_storage(self, buffers: Sequence[Buffer]) -> None:
        """Lets FSDP2 allocate and free the memory of ``buffers`` from now on, and gather into it."""
        self.all_gather_outputs = [buffer.received for buffer in buffers]
        self._memory = [tensor for buffer in buffers for tensor in buffer.memory]

    # ---- what FSDP2 calls ----

    @property
    def _sharded_local_tensor(self) -> Any:
        return self

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """Tensors that this rank sends, 1-D, of equal sizes on all ranks."""
        buffers, part = self.weight.begin_gather(self.number)
        self.register_storage(buffers)
        return [buffer.sent(part) for buffer in buffers]

    def alloc_all_gather_outputs(self) -> None:
        for tensor in self._memory:
            alloc_storage(tensor)

    def init_unsharded_param(self) -> None:
        """Makes the unsharded parameter of what was gathered, or fills it again."""
        if self.group.size == 1:
            self.alloc_all_gather_outputs()
        self.weight.end_gather(self.number)
        if not hasattr(self, "_unsharded_param"):
            full = self.weight.as_parameter(self.number, self.param_dtype or self.orig_dtype)
            self._unsharded_param = nn.Parameter(full, requires_grad=self.sharded_param.requires_grad)
            if hasattr(self, "unsharded_grad_dtype"):  # since PyTorch 2.15: fp32 for a weight in bf16, if reduced so
                self._unsharded_param.grad_dtype = self.unsharded_grad_dtype

    def free_unsharded_param(self) -> None:
        for tensor in self._memory:
            free_storage(tensor)

    def reset_sharded_param(self) -> None:
        """Takes note of what others have made of the parameter; codes need no padding, and would not stand it."""
        parameter: Any = getattr(self._module_info.module, self._module_info.param_name)
        if not isinstance(parameter._local_tensor, QuantizedTensor):
            super().reset_sharded_param()  # type: ignore[no-untyped-call]
            return
        before: Any = self.sharded_param
        adopt_group(parameter._local_tensor, before._local_tensor)
        self.sharded_param, self._sharding_spec = parameter, parameter._spec


class ShardedGroup(FSDPParamGroup):
    """An ``FSDPParamGroup`` that says what its latest gather is for."""

    grad_enabled = True  # the grad mode of the code that is gathered for: FSDP2 calls its hooks without

    def unshard(self, async_op: bool = False) -> None:
        self.grad_enabled = torch.is_grad_enabled()
        super().unshard(async_op)

    @property
    def training_state(self) -> str:
        """``"FORWARD"``, ``"PRE_BACKWARD"``, ``"POST_BACKWARD"`` or ``"IDLE"``; a prefetch has that of its pass."""
        return self._training_state.name

    @property
    def gathers_for_backward(self) -> bool:
        """Whether backward gathers what it reads anew, so that a forward need not gather it."""
        return bool(self._reshard_after_forward)


class CastingState(FSDPState):
    """An ``FSDPState`` that casts the weights below before each outermost forward, whichever method that is."""

    cast: Callable[[list[ShardedParameter]], None]
    _below: list[ShardedParameter] | None = None  # what is sharded does not change after the first forward

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.forget_failed_forward()  # of another method than forward, which has a hook
        return super()._pre_forward(module, args, kwargs)

    def _root_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not in_backward():
            self._begin_forward()
        return super()._root_pre_forward(module, args, kwargs)

    @torch.compiler.disable  # as FSDP2's own hooks are
    def forget_failed_forward(self, *_: Any) -> None:
        """Ends a forward that an exception has ended, of which FSDP2 takes the next one for a part: nothing is cast."""
        if self._training_state.name == "FORWARD" and not in_backward():
            idle = type(self._training_state).IDLE
            for state in self._state_ctx.all_states:
                state._training_state = idle
                for group in param_groups(state._modules[0]):
                    group._training_state = idle
                    group.wait_for_unshard()
                    group.reshard()
            self._state_ctx.iter_forward_root = None

    def _begin_forward(self) -> None:
        self._lazy_init()
        context: Any = self._state_ctx
        root = context.iter_forward_root
        if root is not None and not isinstance(root, CastingState):
            raise ValueError(
                f"the outermost module of this forward, {type(root._modules[0]).__name__}, was given to PyTorch's own "
                "fully_shard, and the weights below it were not cast; give it to minifloat.distributed.fully_shard"
            )
        if root is not None:
            return
        if context.post_optim_event is not None:  # the casts, in this stream, come after the optimizer, before gathers
            self._device_handle.current_stream().wait_event(context.post_optim_event)
            context.post_optim_event = None
        if self._below is None:
            self._below = parameters_below(self._modules[0])
        below = [each for each in self._below if isinstance(each, ShardedParameter)]  # less those that were unhooked
        for each in [each for each in below if each.weight.left_unquantized]:
            each.unhook()
        self.cast([each for each in below if isinstance(each, ShardedParameter)])


def cast_before_forward(module: nn.Module, cast: Callable[[list[ShardedParameter]], None]) -> None:
    """Lets ``cast`` have the parameters below ``module`` that are gathered as codes before each outermost forward.

    A forward then raises a ValueError where the outermost module was sharded by PyTorch's ``fully_shard``.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    state.__class__ = CastingState
    state.cast = cast
    module.register_forward_pre_hook(state.forget_failed_forward, prepend=True)


def param_groups(module: nn.Module) -> list[Any]:
    """Lists what ``fully_shard`` made for the parameters of a module: none, one, or one for each mesh."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def parameters_below(module: nn.Module) -> list[ShardedParameter]:
    """Lists the parameters of ``module`` that are gathered as codes."""
    groups = [group for each in module.modules() if isinstance(each, FSDPModule) for group in param_groups(each)]
    return [param for group in groups for param in group.fsdp_params if isinstance(param, ShardedParameter)]


def managed_below(module: nn.Module) -> set[tuple[nn.Module, str]]:
    """Lists what FSDP2 shards and reduces below ``module``, by the modules that have it and its names."""
    groups = [group for each in module.modules() if isinstance(each, FSDPModule) for group in param_groups(each)]
    found: set[tuple[nn.Module, str]] = set()
    for info in [param._module_info for group in groups for param in group.fsdp_params]:
        found |= {(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)}
    return found


def in_backward() -> bool:
    """Whether a backward is running, inside of which a recomputation runs forwards."""
    return torch._C._current_graph_task_id() != -1


# ---- a parameter that fully_shard has just sharded ----


def holder_of(param: Any) -> tuple[nn.Module, str, bool]:
    """Finds the module of a parameter, its name there, and whether other modules share it."""
    info = param._module_info
    return info.module, info.param_name, bool(info.shared_modules)


def is_sharded_by_rows(param: Any) -> bool:
    """Whether it is a plain tensor of which each rank has rows."""
    sharded = hasattr(param.mesh_info, "shard_process_group")
    return sharded and not param.is_dtensor and param.fsdp_placement.dim == 0


def shards_of(param: Any) -> tuple[ShardMap, Group]:
    """Returns the rows of every rank, and the ranks: of the mesh dim that shards, not of one that replicates."""
    group = Group.of(param.mesh_info.shard_process_group)
    return ShardMap.chunks(param._orig_size[0], group.size), group


# ---- memory ----


def record_stream(tensors: Iterable[Tensor]) -> None:
    """Notes that the current stream may read these GPU tensors, which another one allocated, when they are freed."""
    for tensor in tensors:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def preserved_versions(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Hides writes from autograd, which has saved the tensors to read what will be written."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined]
