"""What is trained in each variant, and how: models, what comes after their backward, and what is put under them.

| variant | what                                                                                              |
|---------|---------------------------------------------------------------------------------------------------|
| floor   | forward and backward of the same bf16 layers without FSDP, and AdamW (fp32) on 1/W of the weights  |
| stock   | FSDP2 as it is: bf16 parameters, fp32 reduction                                                   |
| symm    | the same, all-gathers into symmetric memory, by a group of NCCL's zero-CTA policy                 |
| tide    | the same under `tide_triton.attach`                                                               |
| tide_ring | the same with `slot_reuse=False`: gradients go through the ring                             |
| tide_early | the same, and they do so as autograd produces them                                         |
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

import tide_triton
from bench import baselines, training
from bench.baselines import ZeroCta
from bench.ranks import TIMEOUT_S, Here
from tide_triton.models import ModelSpec
from tide_triton.transports.select import TransportName

#: Options of `attach` by variant.
TIDE: Mapping[str, dict[str, Any]] = {
    "tide": {},
    "tide_ring": {"slot_reuse": False},
    "tide_early": {"slot_reuse": False, "early_reduce": True},
}
VARIANTS = ("floor", "stock", "symm", "tide")

_SEED = 1234


@dataclass(frozen=True)
class Case:
    """What is trained, and how. strict: whether the compared step can be told to be deterministic."""

    here: Here
    model: ModelSpec
    layers: int
    tokens: int
    transport: TransportName
    steps: int
    zero: ZeroCta
    strict: bool = True


#: Windows of one size, and who has each: a weak reference to the tensor that was lent.
Lent = list[tuple[torch.Tensor, Callable[[], object]]]


def _nobody() -> None:
    return None


class WindowedAllGather(AllGather):
    """NCCL's all-gather in a zero-CTA group, into windows of it that are lent as FSDP2's allocator would lend memory.

    Whichever group FSDP2 names, of the same ranks: an FSDP2 model may be sharded over another.
    torch 2.13 has the like as `set_symm_mem_for_comm`; this one also runs on 2.11, on any NCCL with windows.
    A window is free again when FSDP2 has dropped its output, which it does after its streams wait for the copy-out.
    """

    def __init__(self, zero: ZeroCta, lent: dict[int, Lent]) -> None:
        """lent: windows by size and who has them, shared by all groups of a model."""
        self._zero, self._lent = zero, lent

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor over a window that nobody has."""
        nbytes = torch.Size(size).numel() * dtype.itemsize
        windows = self._lent.setdefault(nbytes, [])
        free = next((i for i, (_, holder) in enumerate(windows) if holder() is None), len(windows))
        if free == len(windows):
            windows.append((self._zero.window(nbytes), _nobody))
        window = windows[free][0]
        output = window.view(dtype).view(torch.Size(size))
        windows[free] = window, weakref.ref(output)
        return output

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """In place: FSDP2 has copied the shards into this rank's part of the output."""
        return baselines.all_gather_flat(output_tensor, input_tensor, group=self._zero.group, async_op=async_op)


# --- models ---


def _built(case: Case, experts: str) -> training.Stack:
    """The model in fp32, with the same weights on every rank."""
    with case.here.device:
        model = training.Stack(case.model, case.layers, experts)
    model.initialise(_SEED)
    return model


def inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """This rank's arguments of the model's forward."""
    return training.make_inputs(case.model, case.tokens, _SEED + 1 + case.here.rank, case.here.device)


def sharded(case: Case, experts: str) -> training.Stack:
    """The model under FSDP2 over all ranks, a group per block."""
    mesh = init_device_mesh(case.here.device.type, (case.here.world_size,))
    model = _built(case, experts)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def floor(case: Case, experts: str) -> tuple[training.Stack, Callable[[], None]]:
    """A bf16 model without FSDP, and what comes after its backward: AdamW on 1/W of the weights."""
    model = _built(case, experts).to(torch.bfloat16)
    world = case.here.world_size
    masters = []
    for parameter in model.parameters():
        master = nn.Parameter(torch.randn(-(-parameter.numel() // world), device=case.here.device))
        master.grad = torch.randn_like(master) * 1e-3
        masters.append(master)
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)

    def after_backward() -> None:
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return model, after_backward


def updating(model: training.Stack) -> Callable[[], None]:
    """What comes after backward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def after_backward() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return after_backward


# --- what is put under them ---


@contextlib.contextmanager
def attached(case: Case, model: training.Stack, options: dict[str, Any]) -> Iterator[None]:
    """`model` under TIDE. options: of `attach`."""
    tide_triton.attach(model, transport=case.transport, strict=True, timeout_s=TIMEOUT_S, **options)
    try:
        yield
    except BaseException:
        # Windows must go; a model that stopped half way through a step may refuse.
        with contextlib.suppress(Exception):
            tide_triton.detach(model)
        raise
    tide_triton.detach(model)


@contextlib.contextmanager
def windowed(case: Case, model: training.Stack) -> Iterator[None]:
    """`model` with its all-gathers' outputs in windows of the zero-CTA group, which are given back afterwards."""
    lent: dict[int, Lent] = {}
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_custom_all_gather(WindowedAllGather(case.zero, lent))
    try:
        yield
    finally:
        for module in modules:
            module.set_custom_all_gather(DefaultAllGather())
        case.here.synchronize()
        lent.clear()
        case.here.release()
        case.zero.close()
