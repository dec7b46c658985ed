"""The private parts of PyTorch's FSDP2 that quantized gathers depend on, alike in 2.11 and 2.13; read here alone.

FSDP2 asks the local tensor of a sharded parameter for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``. A tensor
that has them would have to keep them through ``to_empty``, ``load_state_dict(assign=True)``, optimizers and
checkpoints. So parameters stay the plain tensors that they are, and FSDP2's own record of one, its ``FSDPParam``, says
who has the hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState, alloc_storage, free_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.parallel.fsdp.rows import put_in_place
from minifloat.tensor import QuantizedTensor


class HookedParam(FSDPParam):
    """An ``FSDPParam`` whose hooks are those of :attr:`extension`.

    ``memory``: what a gather allocates and resharding frees. Several parameters may share one tensor of it.
    """

    extension: Any
    memory: list[Tensor]

    @property
    def _sharded_local_tensor(self) -> Any:
        return self.extension

    def alloc_all_gather_outputs(self) -> None:
        for tensor in self.memory:
            allocate(tensor)

    def free_unsharded_param(self) -> None:
        for tensor in self.memory:
            free(tensor)

    def to_sharded_post_forward(self) -> None:
        """Keeps this rank's share of what backward reads, which fewer ranks gather then."""
        self._assert_in_states(ShardedState.UNSHARDED)
        if self.is_dtensor:
            raise NotImplementedError("PyTorch reshards tensor-parallel parameters to all ranks only")
        fewer: Any = self.post_forward_mesh_info
        self.extension.keep_share(fewer.shard_mesh_rank, fewer.shard_mesh_size)
        self._setattr_on_modules(self.sharded_param)
        self.free_unsharded_param()
        self.sharded_state = ShardedState.SHARDED_POST_FORWARD

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        if self.sharded_state != ShardedState.SHARDED_POST_FORWARD:
            inputs: list[Tensor] = super().all_gather_inputs
            return inputs
        shares, self._extensions_data.all_gather_metadata = self.extension.send_share()
        self._extensions_data.all_gather_input_sizes = [each.size() for each in shares]
        return list(shares)

    def reset_sharded_param(self) -> None:
        """Takes note of what others have made of the parameter; codes need no padding, and would not stand it."""
        parameter: Any = getattr(self._module_info.module, self._module_info.param_name)
        if not isinstance(parameter._local_tensor, QuantizedTensor):
            super().reset_sharded_param()  # type: ignore[no-untyped-call]
            return
        before: Any = self.sharded_param
        put_in_place(parameter._local_tensor, before._local_tensor)
        self.sharded_param, self._sharding_spec = parameter, parameter._spec


def hook(param: FSDPParam, extension: Any) -> None:
    """Lets ``extension`` say what of ``param`` is gathered, and make the unsharded parameter of it."""
    param.__class__ = HookedParam
    param.extension, param.memory = extension, []  # type: ignore[attr-defined]
    param._init_extensions()


class NotingGroup(FSDPParamGroup):
    """An ``FSDPParamGroup`` that notes the grad mode of the code it gathers for: FSDP2 calls its hooks without."""

    grad_enabled: bool

    def unshard(self, async_op: bool = False) -> None:
        self.grad_enabled = torch.is_grad_enabled()
        super().unshard(async_op)


def note_grad_mode(group: Any) -> None:
    """Lets :func:`grad_enabled` know the group."""
    group.__class__ = NotingGroup
    group.grad_enabled = True


def grad_enabled(group: Any) -> bool:
    """The code that the group's latest gather is for has grad mode."""
    enabled: bool = group.grad_enabled
    return enabled


def param_groups(module: nn.Module) -> list[Any]:
    """What ``fully_shard`` made for the parameters of a module: none, one, or several for several meshes."""
    return _groups(_state(module))


class CastingState(FSDPState):
    """An ``FSDPState`` that casts the weights below before each outermost forward, whichever method that is."""

    cast: Callable[[list[Any]], None]
    _below: list[Any] | None = None  # found once: what is sharded does not change after the first forward

    def _root_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not in_backward():
            self._begin_forward()
        return super()._root_pre_forward(module, args, kwargs)

    def _begin_forward(self) -> None:
        self._lazy_init()
        context: Any = self._state_ctx
        root = context.iter_forward_root
        if root is not None and not isinstance(root, CastingState):
            raise ValueError(
                f"the outermost module of this forward, {type(root._modules[0]).__name__}, was given to PyTorch's own "
                "fully_shard, and the weights below it were not cast; give it to minifloat.distributed.fully_shard"
            )
        if root not in (None, self):  # itself: an earlier forward ended in an exception
            return
        if context.post_optim_event is not None:  # the casts, in this stream, come after the optimizer, before gathers
            self._device_handle.current_stream().wait_event(context.post_optim_event)
            context.post_optim_event = None
        if self._below is None:
            below = _extensions(context.all_states) if self._is_root else extensions_below(self._modules[0])
            self._below = list(below)
        self.cast(self._below)


def cast_before_forward(module: nn.Module, cast: Callable[[list[Any]], None]) -> None:
    """Lets ``cast`` have the extensions of all weights below ``module`` before each forward that is the outermost one.

    A forward then raises a ValueError where the outermost module was sharded by PyTorch's ``fully_shard``.
    """
    state = _state(module)
    state.__class__ = CastingState
    state.cast = cast


def extensions_below(module: nn.Module) -> list[Any]:
    """The extensions of all parameters of ``module`` that have one."""
    return list(_extensions(_state(each) for each in module.modules() if isinstance(each, FSDPModule)))


def _extensions(states: Iterable[Any]) -> Iterator[Any]:
    for state in states:
        for group in _groups(state):
            yield from (param.extension for param in group.fsdp_params if isinstance(param, HookedParam))


def in_backward() -> bool:
    """A recomputation runs forwards inside of backward."""
    return torch._C._current_graph_task_id() != -1


# ---- one parameter ----


def layer_of(param: Any) -> tuple[nn.Module, str, bool]:
    """The module of a parameter, its name there, and whether other modules share it."""
    info = param._module_info
    return info.module, info.param_name, bool(info.shared_modules)


def is_sharded_by_rows(param: Any) -> bool:
    """A plain tensor of which each rank has rows."""
    sharded = hasattr(param.mesh_info, "shard_process_group")
    return sharded and not param.is_dtensor and param.fsdp_placement.dim == 0


def shards_of(param: Any) -> tuple[ShardMap, Group]:
    """The rows of every rank, and the ranks: those of the mesh dim that shards, not of one that replicates."""
    group = Group.of(param.mesh_info.shard_process_group)
    return rows_of_ranks(param._orig_size[0], group.size), group


def rows_of_ranks(rows: int, size: int) -> ShardMap:
    """How FSDP2 cuts: equal numbers of rows, rounded up, so that the last ranks may have fewer or none."""
    most = -(-rows // size)
    return ShardMap(tuple([max(0, min(most, rows - rank * most)) for rank in range(size)]))


def set_own_rows(param: Any, rows: Tensor) -> None:
    """Replaces this rank's rows [m, K] of the sharded parameter."""
    param.sharded_param._local_tensor = rows
    param._sharded_param_data = rows.new_empty(0, dtype=torch.uint8)  # nobody reads it: let go of what FSDP2 has cut


def own_rows(param: Any) -> Tensor:
    """This rank's rows [m, K] of the sharded parameter, on the device that computes."""
    local: Tensor = param.sharded_param._local_tensor
    return local.to(param.device, non_blocking=True) if param.offload_to_cpu else local


def is_quantized(param: Any) -> bool:
    """The sharded parameter is kept quantized."""
    return isinstance(param.sharded_param._local_tensor, QuantizedTensor)


def set_memory(param: Any, received: list[Tensor], memory: list[Tensor]) -> None:
    """What FSDP2 allocates for a gather and frees at the next reshard (``memory``), and what of it it fills."""
    param.all_gather_outputs, param.memory = received, memory


def allocate(tensor: Tensor) -> None:
    """Gives a tensor its memory, if it has none."""
    alloc_storage(tensor)


def used_here(tensors: Iterable[Tensor]) -> None:
    """The current stream may read them still when they are let go, which another one has allocated."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def free(tensor: Tensor) -> None:
    """Takes a tensor's memory; it stays the tensor that it is, and what is saved for backward with it."""
    free_storage(tensor)


def versions_kept(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """What is written inside is no change to autograd, which has saved the tensors to read what will be written."""
    kept: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(  # type: ignore[attr-defined]
        tuple(tensors)
    )
    return kept


def is_allocated(tensor: Tensor) -> bool:
    """The tensor has memory, or needs none."""
    return tensor.numel() == 0 or tensor.untyped_storage().size() > 0


# ---- what a gather is for ----


def training_state(group: Any) -> str:
    """``"FORWARD"``, ``"PRE_BACKWARD"``, ``"POST_BACKWARD"`` or ``"IDLE"``; that of a prefetch is what it is for."""
    name: str = group._training_state.name
    return name


def reshards_after_forward(group: Any) -> bool:
    """Whether backward gathers again."""
    return bool(group._reshard_after_forward)


def is_unsharded(group: Any) -> bool:
    """Its parameters are gathered, and have not been resharded since."""
    return bool(group.is_unsharded)


def reshards_to_fewer(group: Any) -> bool:
    """Whether fewer ranks gather for backward than for forward, of what forward has gathered."""
    return bool(group._use_post_forward_mesh)


def reshards_after_backward(group: Any) -> bool:
    """Whether the next forward gathers again."""
    return bool(group.reshard_after_backward)


def _state(module: nn.Module) -> Any:
    return module._get_fsdp_state()  # type: ignore[operator]


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
