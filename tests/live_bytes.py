"""Bytes of tensors alive in a real training step on the CPU, to hold memory plans against.

A step runs under a `TorchDispatchMode` that remembers the storage of every tensor it sees and adds them up after every
operator: what torch's allocator would count on a GPU, without its rounding. What happens in `unseen` functions is left
out: gloo's own buffers, and the copies that a kernel's twin makes on the CPU.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tide_triton
from bench.training import Block
from bench.variants import Lent, WindowedAllGather
from tide_triton.all_gather import AllGather
from tide_triton.models import ModelSpec
from tide_triton.reduce_scatter import Reducing


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors alive after any operator."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, StorageWeakRef] = {}
        self._hidden = 0

    def see(self, tensor: object) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if type(tensor) in (torch.Tensor, nn.Parameter):
            storage = tensor.untyped_storage()  # type: ignore[attr-defined]
            self._seen.setdefault(storage._cdata, StorageWeakRef(storage))

    def now(self) -> int:
        """Bytes alive, each counted once however many storages lie over it."""
        spans = []
        for key, reference in list(self._seen.items()):
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._seen[key]
            else:
                spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        total = end = 0
        for start, stop in sorted(spans):
            total += max(0, stop - max(start, end))
            end = max(end, stop)
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._hidden:
            for tensor in tree_leaves((args, kwargs, result)):
                self.see(tensor)
            self.peak = max(self.peak, self.now())
        return result

    @contextmanager
    def unseen(self, *functions: tuple[object, str]) -> Iterator[None]:
        """What these functions do, each an attribute of an object, is not looked at."""
        with ExitStack() as stack:
            for owner, name in functions:
                stack.enter_context(mock.patch.object(owner, name, self._hiding(getattr(owner, name))))
            yield

    def _hiding(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def hidden(*args: Any, **kwargs: Any) -> Any:
            self._hidden += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._hidden -= 1

        return hidden


class Model(nn.Module):
    """The blocks of `spec`, and around them what a model has: the root's parameters in the order of a plan."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab, spec.hidden) if spec.vocab else nn.Identity()
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.hidden)
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False) if spec.vocab else nn.Identity()
        generator = torch.Generator().manual_seed(0)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.initialise(generator)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, x, cos, sin)
        return F.mse_loss(self.head(self.norm(x)).float(), torch.zeros(()))


def measure(rank: int, world_size: int, spec: ModelSpec, variant: str, attach: dict[str, Any]) -> tuple[int, int]:
    """Bytes alive before a step of one token, and at most in it."""
    model = Model(spec)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (world_size,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if variant == "symm":
        lent: dict[int, Lent] = {}
        zero: Any = SimpleNamespace(
            group=dist.group.WORLD, window=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
        )
        for module in (*model.blocks, model):
            module.set_custom_all_gather(WindowedAllGather(zero, lent))
    elif variant != "stock":
        tide_triton.attach(model, **attach)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    x = torch.zeros(1, 1, dtype=torch.long) if spec.vocab else torch.zeros(1, 1, spec.hidden)
    rotation = torch.ones(2, 1, spec.head_dim // 2, dtype=torch.bfloat16)

    def step() -> None:
        model(x, *rotation).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    # One for the optimizer's states, or as many as it takes until gradients are sent as they come.
    for _ in range(4 if attach.get("early_reduce") else 1):
        step()
    gc.collect()
    live = LiveBytes()
    for tensor in gc.get_objects():
        if isinstance(tensor, torch.Tensor):
            live.see(tensor)
    before = live.now()
    # The first of either is torch 2.13's, the second 2.11's.
    names = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
    gloo = [(dist, name) for name in names]
    kernels = [(AllGather, "start"), (Reducing, "_send"), (Reducing, "finish")]
    with live.unseen(*(place for place in (*gloo, *kernels) if hasattr(*place))), live:
        step()
    if variant not in ("stock", "symm"):
        tide_triton.detach(model)
    return before, live.peak
