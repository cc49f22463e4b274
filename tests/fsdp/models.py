"""Small models, of odd sizes on purpose, and how the tests shard them.

Shapes are chosen so that at 2 and at 4 ranks some parameters are cut evenly, some unevenly, and some leave ranks
without any rows: 17 rows, 11 rows, and whatever a test asks for.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

VOCABULARY = 11

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
FULL = MixedPrecisionPolicy()


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Attention(nn.Module):
    """One head over the sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(torch.softmax(q @ k.transpose(-2, -1) / 4, dim=-1) @ v)


class NestedBlock(nn.Module):
    """A block with modules that are sharded by themselves, and parameters of its own."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = Block(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x + self.attention(self.norm(x)))


class Model(nn.Module):
    """Embedding, blocks, norm and head.

    checkpointed: recompute each block in backward, by a call around its FSDP hooks.
    with_head: False leaves the head to whoever computes the loss.
    """

    def __init__(
        self,
        width: int = 12,
        hidden: int = 17,
        blocks: int = 4,
        *,
        tied: bool = False,
        checkpointed: bool = False,
        with_head: bool = True,
        block: type[nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(block(width, hidden) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed
        self.with_head = with_head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        x = self.norm(x)
        return self.head(x) if self.with_head else x


def line(world_size: int) -> DeviceMesh:
    """A mesh of all ranks."""
    return _mesh((world_size,), ("dp",))


def grid(outer: int, inner: int) -> DeviceMesh:
    """A mesh of outer x inner ranks."""
    return _mesh((outer, inner), ("outer", "inner"))


_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    # Kept: the ranks serve many tests, and every mesh of subgroups costs communicators.
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[shape]


def seeded(build: type[nn.Module] = Model, *args: Any, **kwargs: Any) -> nn.Module:
    """A model that is the same on every rank."""
    torch.manual_seed(0)
    return build(*args, **kwargs)


def sharded(
    model: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy = MIXED,
    *,
    reshard: bool | int | None = None,
    root_reshard: bool | int | None = None,
    **options: Any,
) -> nn.Module:
    """`model` with FSDP2 on every block (and on attention and mlp in it), and on the root."""
    shard: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, **options}
    for block in model.blocks:
        for name in ("attention", "mlp"):
            if hasattr(block, name):
                fully_shard(getattr(block, name), reshard_after_forward=reshard, **shard)
        fully_shard(block, reshard_after_forward=reshard, **shard)
    fully_shard(model, reshard_after_forward=root_reshard, **shard)
    return model


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
