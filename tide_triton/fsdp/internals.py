"""Where FSDP2 keeps what we need, on torch 2.11 to 2.14.

FSDP2 has public hooks for its collectives but not for its groups, so every private name is read here and nowhere else.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

__all__ = ["FSDPParam", "FSDPParamGroup", "ShardedState", "TrainingState"]


@dataclass(frozen=True, slots=True)
class GroupSite:
    """A parameter group and where it stands in the model.

    name: fully qualified names of its modules, "(root)" for the model itself.
    depth: how many modules around it take turns in slots, or None where the group itself stays unsharded.
    index: of the group within its module, which has several where its parameters lie on several meshes.
    """

    group: FSDPParamGroup
    module: FSDPModule
    name: str
    param_names: tuple[str, ...]
    depth: int | None
    index: int


def groups_of(module: FSDPModule) -> list[FSDPParamGroup]:
    """The parameter groups of one module that `fully_shard` was applied to."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def sites(model: nn.Module) -> list[GroupSite]:
    """Every parameter group below `model`, once each, in the order of the modules."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[int, GroupSite] = {}
    for module, ancestors in _fsdp_modules(model):
        around = sum(any(_rotates(g, outer, not i) for g in groups_of(outer)) for i, outer in enumerate(ancestors))
        for index, group in enumerate(groups_of(module)):
            if id(group) not in found and group.fsdp_params:
                found[id(group)] = GroupSite(
                    group,
                    module,
                    ", ".join(names.get(id(m), "?") or "(root)" for m in group.modules),
                    tuple(_param_name(names, p) for p in group.fsdp_params),
                    around if _rotates(group, module, not ancestors) else None,
                    index,
                )
    return list(found.values())


def _rotates(group: FSDPParamGroup, module: FSDPModule, is_outermost: bool) -> bool:
    """Whether the group reshards after use, as far as can be told before its first forward.

    FSDP2 decides at the first forward that the root stays unsharded, unless `reshard_after_forward` was passed.
    """
    if is_outermost and module._get_fsdp_state()._auto_reshard_after_forward:
        return False
    return not stays_unsharded(group)


def _fsdp_modules(model: nn.Module) -> Iterator[tuple[FSDPModule, tuple[FSDPModule, ...]]]:
    """FSDP modules in pre-order, each with the FSDP modules around it, outermost first."""
    stack: list[tuple[nn.Module, tuple[FSDPModule, ...]]] = [(model, ())]
    seen: set[int] = set()
    while stack:
        module, ancestors = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        inside = ancestors
        if isinstance(module, FSDPModule):
            yield module, ancestors
            inside = (*ancestors, module)
        stack += [(child, inside) for child in reversed(list(module.children()))]


def _param_name(names: dict[int, str], param: FSDPParam) -> str:
    info = param._module_info
    prefix = names.get(id(info.module), "?")
    return f"{prefix}.{info.param_name}" if prefix else info.param_name


def shard_group(group: FSDPParamGroup) -> dist.ProcessGroup | None:
    """The process group that the parameters are sharded over, None where they are only replicated."""
    return group.mesh_info.shard_process_group if isinstance(group.mesh_info, FSDPMeshInfo) else None


def process_groups(sites: Iterable[GroupSite]) -> list[dist.ProcessGroup]:
    """Every process group of more than one rank that the groups at `sites` are sharded or replicated over."""
    found: dict[dist.ProcessGroup, None] = {}
    for site in sites:
        info = site.group.mesh_info
        for name in ("shard_process_group", "replicate_process_group"):
            process_group = getattr(info, name, None)
            if process_group is not None and process_group.size() > 1:
                found[process_group] = None
    return list(found)


def stays_unsharded(group: FSDPParamGroup) -> bool:
    """Whether the group keeps its parameters unsharded past a forward or a backward, as it is set now."""
    return not group._reshard_after_forward or not group.reshard_after_backward


def is_held(group: FSDPParamGroup) -> bool:
    """Whether the group's parameters are unsharded, or about to be: its gather was issued and not yet waited for."""
    return group.is_unsharded or group._all_gather_result is not None


def is_in_backward(group: FSDPParamGroup) -> bool:
    """Whether FSDP2 unshards the group for a backward (its own, or ahead of it) and not for a forward or by hand."""
    return bool(group._training_state == TrainingState.PRE_BACKWARD)


def prefetch_depth(model: nn.Module) -> int:
    """How many groups are gathered ahead of the one that computes: one in backward by itself, more if asked for."""
    depth = 1
    for module, _ in _fsdp_modules(model):
        state = module._get_fsdp_state()
        for ahead in (state._states_to_forward_prefetch, state._states_to_backward_prefetch):
            count = sum(len(getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group]) for s in ahead)
            depth = max(depth, count)
    return depth


def slot_dtype(param: FSDPParam) -> torch.dtype:
    """The dtype of the unsharded parameter, known before FSDP2's own lazy initialization."""
    own: torch.dtype = param.sharded_param.dtype
    wanted: torch.dtype | None = param.mp_policy.param_dtype
    return wanted if wanted is not None and own.is_floating_point else own


def wraps_subclass(param: FSDPParam) -> bool:
    """Whether the parameter is a tensor subclass with all-gather extensions of its own (fp8, int8, NF4)."""
    return hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")


def unsharded_local(param: FSDPParam) -> torch.Tensor | None:
    """The plain tensor inside the unsharded parameter, if there has been one."""
    unsharded = getattr(param, "_unsharded_param", None)
    if unsharded is None:
        return None
    return unsharded._local_tensor if isinstance(unsharded, DTensor) else unsharded


def is_referred_to(param: FSDPParam) -> bool:
    """Whether others than FSDP2 refer to the unsharded parameter's storage, as autograd does until the backward."""
    # The all-gather output, and the unsharded parameter over it.
    expected = 1 if unsharded_local(param) is None else 2
    return any(aliases(output) > expected for output in param.all_gather_outputs)


def aliases(tensor: torch.Tensor) -> int:
    """How many tensors share `tensor`'s storage, itself included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1
