"""Training under TIDE gives what FSDP2 gives, bit by bit, in every setting, and over the path that the setting is for.

At 2 ranks a sum has one order, so TIDE is held to stock FSDP2 itself. Above that gloo adds in an order of its own: TIDE
is held bit by bit to FSDP2 with a reduce-scatter in rank order, and to stock within the rounding of that sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.fsdp.models import BF16, FP16, FULL, MIXED, Model, NestedBlock, fsdp_modules, grid, line, seeded, sharded
from tests.fsdp.parity import (
    Loop,
    Outcome,
    assert_equal_to_reference,
    assert_equal_to_stock,
    assert_zero_copy,
    compare_all,
    cross_entropy,
    set_divide_factor,
    set_prefetch,
)
from tests.ranks import RankPools


@dataclass(frozen=True)
class Setting:
    """One way to use FSDP2.

    build: makes the sharded model for a world size. worlds: the world sizes it is for.
    shard_ranks: ranks that gradients are reduce-scattered over, None for all of them.
    fallbacks: groups that may not be zero-copy, and a part of the reason they must give.
    eps: unit roundoff of the dtype in which gradients are reduced.
    grows: whether slots are added on the way.
    """

    build: Callable[[int], nn.Module]
    loop: Loop = field(default_factory=Loop)
    after: Callable[[nn.Module], Any] | None = None
    worlds: tuple[int, ...] = (2, 4)
    shard_ranks: int | None = None
    fallbacks: dict[str, str] = field(default_factory=dict)
    eps: float = 2.0**-24
    grows: bool = False


def _model(world_size: int, policy: Any = MIXED, *, model: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    return sharded(seeded(Model, **(model or {})), line(world_size), policy, **options)


def _frozen(world_size: int) -> nn.Module:
    model = seeded()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    model.embedding.weight.requires_grad_(False)
    return sharded(model, line(world_size))


def _meta(world_size: int) -> nn.Module:
    with torch.device("meta"):
        model = Model()
    return sharded(model, line(world_size))


def _fill(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)


def _checkpoint_inside(world_size: int) -> nn.Module:
    model = seeded()
    for block in model.blocks:
        block.up = checkpoint_wrapper(block.up)
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    return sharded(model, line(world_size))


def _checkpoint_inside_nested(world_size: int) -> nn.Module:
    model = seeded(Model, block=NestedBlock)
    mesh = line(world_size)
    for index, block in enumerate(model.blocks):
        fully_shard(block.attention, mesh=mesh, mp_policy=MIXED)
        fully_shard(block.mlp, mesh=mesh, mp_policy=MIXED)
        model.blocks[index] = fully_shard(checkpoint_wrapper(block), mesh=mesh, mp_policy=MIXED)
    return fully_shard(model, mesh=mesh, mp_policy=MIXED)


def _several_modules(world_size: int) -> nn.Module:
    model = seeded()
    mesh = line(world_size)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MIXED)
    fully_shard([model.norm, model.head], mesh=mesh, mp_policy=MIXED)
    return fully_shard(model, mesh=mesh, mp_policy=MIXED)


def _head_apart(world_size: int, *, with_norm: bool) -> nn.Module:
    model = seeded(Model, with_head=False)
    mesh = line(world_size)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MIXED)
    fully_shard([model.norm, model.head] if with_norm else model.head, mesh=mesh, mp_policy=MIXED)
    return fully_shard(model, mesh=mesh, mp_policy=MIXED)


def _chunked_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The head is called by hand, chunk by chunk, after the root's forward."""
    chunks = zip(model(tokens).chunk(3, dim=1), targets.chunk(3, dim=1), strict=True)
    loss = torch.stack([cross_entropy(model.head(x), y) for x, y in chunks]).mean()
    loss.backward()
    return loss.detach()


def _chunked_backward(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As above, but each chunk's backward runs at once, before the rest of the model's."""
    hidden = model(tokens)
    apart = hidden.detach().requires_grad_()
    total = torch.zeros(())
    for x, y in zip(apart.chunk(3, dim=1), targets.chunk(3, dim=1), strict=True):
        loss = cross_entropy(model.head(x), y) / 3
        loss.backward()
        total += loss.detach()
    hidden.backward(apart.grad)
    return total


def _two_forwards(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = cross_entropy(model(tokens), targets) + cross_entropy(model(tokens.flip(0)), targets)
    loss.backward()
    return loss.detach()


def _tensor_parallel(world_size: int) -> nn.Module:
    mesh = grid(2, 2)
    model = seeded(Model, hidden=16)
    for block in model.blocks:
        parallelize_module(block, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sharded(model, mesh["outer"])


def _unshard(model: nn.Module, blocks: int) -> None:
    for block in list(model.blocks)[:blocks]:
        block.unshard(async_op=True)


def _fp64(world_size: int) -> nn.Module:
    return sharded(seeded().double(), line(world_size), FULL)


def _columns(param: nn.Parameter) -> Shard:
    return Shard(1) if param.ndim == 2 and param.shape[1] % 4 == 0 else Shard(0)


def _columns_of_3d(world_size: int) -> nn.Module:
    model = seeded(Experts)
    return sharded(model, line(world_size), shard_placement_fn=lambda p: Shard(min(p.ndim - 1, 1)))


class Experts(Model):
    """Blocks with one 3-D parameter each."""

    def __init__(self) -> None:
        super().__init__(blocks=0)
        self.blocks = nn.ModuleList(_Expert() for _ in range(3))
        self.embedding = nn.Embedding(11, 12)
        self.norm = nn.Identity()


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 12, 12) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(torch.relu(x @ w) for w in self.weight)


_RESHARDED_TO_SMALLER = {f"blocks.{i}": "gather: resharded to a smaller mesh after forward (x3)" for i in range(4)}
_BF16_EPS, _FP16_EPS, _FP64_EPS = 2.0**-8, 2.0**-11, 2.0**-53

SETTINGS: dict[str, Setting] = {
    "bf16 parameters, fp32 reduce": Setting(_model),
    "fp32 without mixed precision": Setting(partial(_model, policy=FULL)),
    "bf16 reduce": Setting(partial(_model, policy=BF16), eps=_BF16_EPS),
    "fp16 reduce with pre-division": Setting(partial(_model, policy=FP16), eps=_FP16_EPS),
    "fp64 with pre-division": Setting(_fp64, eps=_FP64_EPS),
    "one row, so that shards are empty": Setting(partial(_model, model={"hidden": 1})),
    "seven rows": Setting(partial(_model, model={"hidden": 7})),
    "five rows and a width of three": Setting(partial(_model, model={"hidden": 5, "width": 3})),
    "some parameters frozen": Setting(_frozen),
    "tied weights": Setting(partial(_model, model={"tied": True})),
    "attached on meta, then materialized": Setting(_meta, after=_fill),
    "activation checkpointing around FSDP": Setting(partial(_model, model={"checkpointed": True})),
    "activation checkpointing inside FSDP": Setting(_checkpoint_inside),
    "reshard_after_forward=True": Setting(partial(_model, reshard=True)),
    "reshard_after_forward=False": Setting(partial(_model, reshard=False)),
    "reshard_after_forward=2": Setting(
        partial(_model, reshard=2, model={"hidden": 16}), worlds=(4,), fallbacks=_RESHARDED_TO_SMALLER
    ),
    "the root reshards": Setting(partial(_model, root_reshard=True)),
    "everything reshards, and nothing does after backward": Setting(
        partial(_model, root_reshard=True),
        after=lambda model: model.set_reshard_after_backward(False),
        loop=Loop(micro=2),
        grows=True,
    ),
    "prefetch of 1 set before each step": Setting(_model, loop=Loop(before=partial(set_prefetch, depth=1))),
    "prefetch of 2 set before each step": Setting(_model, loop=Loop(before=partial(set_prefetch, depth=2)), grows=True),
    "prefetch of 3 set before each step": Setting(
        partial(_model, model={"blocks": 6}), loop=Loop(before=partial(set_prefetch, depth=3)), grows=True
    ),
    "one async unshard": Setting(_model, loop=Loop(before=partial(_unshard, blocks=1))),
    "four async unshards in flight": Setting(_model, loop=Loop(before=partial(_unshard, blocks=4)), grows=True),
    "accumulation with sync": Setting(_model, loop=Loop(micro=2)),
    "accumulation without sync, fp32 reduce": Setting(_model, loop=Loop(micro=3, sync=False)),
    "accumulation without sync, no reduce_dtype": Setting(
        partial(_model, policy=BF16), loop=Loop(micro=3, sync=False), eps=_BF16_EPS
    ),
    "accumulation without sync, fp32": Setting(partial(_model, policy=FULL), loop=Loop(micro=2, sync=False)),
    "gradient divide factor 8": Setting(_model, after=partial(set_divide_factor, factor=8.0)),
    "gradient divide factor 3, bf16 reduce": Setting(
        partial(_model, policy=BF16), after=partial(set_divide_factor, factor=3.0), eps=_BF16_EPS
    ),
    "gradient divide factor 6, fp16 reduce": Setting(
        partial(_model, policy=FP16), after=partial(set_divide_factor, factor=6.0), eps=_FP16_EPS
    ),
    "Shard(1)": Setting(partial(_model, model={"hidden": 16}, shard_placement_fn=_columns)),
    "Shard(1) of 3-D parameters": Setting(_columns_of_3d),
    "Shard(1), bf16 reduce, accumulation without sync": Setting(
        partial(_model, policy=BF16, model={"hidden": 16}, shard_placement_fn=_columns),
        loop=Loop(micro=2, sync=False),
        eps=_BF16_EPS,
    ),
    "tensor parallelism": Setting(
        _tensor_parallel, loop=Loop(data_rank=lambda rank: rank // 2), worlds=(4,), shard_ranks=2
    ),
    "HSDP": Setting(lambda _: sharded(seeded(), grid(2, 2)), worlds=(4,), shard_ranks=2),
    "HSDP, bf16 reduce, accumulation without sync": Setting(
        lambda _: sharded(seeded(), grid(2, 2), BF16), Loop(micro=2, sync=False), worlds=(4,), shard_ranks=2
    ),
    "HSDP with all-reduce of the last microbatch only": Setting(
        lambda _: sharded(seeded(), grid(2, 2)),
        Loop(
            micro=2,
            loss=lambda model, tokens, targets: _loss_all_reducing_every_other_time(model, tokens, targets),
        ),
        worlds=(4,),
        shard_ranks=2,
    ),
    "torch.compile, eager": Setting(
        partial(_model, model={"blocks": 2}), loop=Loop(wrap=partial(torch.compile, backend="eager")), worlds=(2,)
    ),
    "torch.compile, aot_eager": Setting(
        partial(_model, model={"blocks": 2}), loop=Loop(wrap=partial(torch.compile, backend="aot_eager")), worlds=(2,)
    ),
    "chunked head called by hand": Setting(partial(_head_apart, with_norm=False), loop=Loop(loss=_chunked_loss)),
    "chunked head with norm, called by hand": Setting(
        partial(_head_apart, with_norm=True), loop=Loop(loss=_chunked_loss)
    ),
    "chunked head, backward per chunk": Setting(
        partial(_head_apart, with_norm=False), loop=Loop(loss=_chunked_backward)
    ),
    "groups of several modules": Setting(_several_modules),
    "nested FSDP": Setting(partial(_model, model={"block": NestedBlock})),
    "nested FSDP, prefetch of 2": Setting(
        partial(_model, model={"block": NestedBlock}), loop=Loop(before=partial(set_prefetch, depth=2)), grows=True
    ),
    "FSDP in FSDP in activation checkpointing": Setting(
        partial(_model, model={"block": NestedBlock, "checkpointed": True})
    ),
    "FSDP in activation checkpointing in FSDP": Setting(_checkpoint_inside_nested),
    "two forwards before a backward": Setting(_model, loop=Loop(loss=_two_forwards)),
    "two forwards before a backward, checkpointed and nested": Setting(
        partial(_model, model={"block": NestedBlock, "checkpointed": True}), loop=Loop(loss=_two_forwards)
    ),
    "sgd": Setting(_model, loop=Loop(optimizer="sgd")),
}


def _loss_all_reducing_every_other_time(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    turn = model.__dict__["_turn"] = model.__dict__.get("_turn", 0) + 1
    model.set_requires_all_reduce(turn % 2 == 0)
    loss = cross_entropy(model(tokens), targets)
    loss.backward()
    return loss.detach()


#: Ways in which gradients travel. Chunks of a few KiB, so that each group of these small models takes many pieces.
_VARIANTS: list[dict[str, Any]] = [
    {
        "slot_reuse": slot_reuse,
        "ring_depth": depth,
        "ring_chunk_nbytes": 6144,
        "early_reduce": depth != 2,
        "keep_cast": depth == 4,
        "grads_in_slots": depth == 1,
    }
    for slot_reuse in (False, True)
    for depth in (1, 2, 4)
]


def _run(rank: int, world_size: int, name: str, variants: list[dict[str, Any]]) -> list[Outcome]:
    setting = SETTINGS[name]
    reference = (setting.shard_ranks or world_size) > 2
    build = partial(setting.build, world_size)
    return compare_all(build, rank, setting.loop, variants, after=setting.after, reference=reference)


_CASES = [
    pytest.param(name, world, number, id=f"{name}, {world} ranks")
    for number, (name, world) in enumerate((name, world) for name, s in SETTINGS.items() for world in s.worlds)
]


@pytest.mark.parametrize(("name", "world_size", "number"), _CASES)
def test_training_under_tide_equals_fsdp2(ranks: RankPools, name: str, world_size: int, number: int) -> None:
    _check(ranks, name, world_size, [{}, _VARIANTS[number % len(_VARIANTS)]])


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "world_size", "number"), _CASES)
def test_training_equals_fsdp2_with_and_without_slot_reuse_at_every_ring_depth(
    ranks: RankPools, name: str, world_size: int, number: int
) -> None:
    _check(ranks, name, world_size, _VARIANTS)


def _check(ranks: RankPools, name: str, world_size: int, variants: list[dict[str, Any]]) -> None:
    setting = SETTINGS[name]
    by_rank = ranks(world_size).run(_run, name, variants)
    for number, variant in enumerate(variants):
        outcomes = [outcomes[number] for outcomes in by_rank]
        assert_zero_copy(outcomes, except_for=setting.fallbacks)
        assert_equal_to_reference(outcomes)
        assert_equal_to_stock(outcomes)
        summed = setting.shard_ranks or world_size
        # Two sums of W terms differ by at most 2 (W - 1) roundings of a partial sum, and a partial sum is at most W
        # times the largest mean. The factor 4 is for gradients that nearly cancel between ranks, and for the mean's
        # rounding.
        assert max(o.distance for o in outcomes) <= 4 * 2 * (summed - 1) * summed * setting.eps, variant
        assert len({o.grown for o in outcomes}) == 1
        assert (outcomes[0].grown > 0) == setting.grows, f"slots grew by {outcomes[0].grown}"


def _trained_on_another_rank(rank: int, world_size: int) -> tuple[str, float]:
    """The comparison itself, on runs that differ: stock against stock with one rank's data changed."""
    from tests.fsdp.parity import difference, distance, train

    one = train(_model(world_size), rank, Loop(steps=1))
    other = train(_model(world_size), rank, Loop(steps=1, data_rank=lambda r: 7 if r == 0 else r))
    return difference(one, other), distance(one, other)


def test_the_comparison_sees_a_change_of_data_on_one_rank(ranks: RankPools) -> None:
    for difference, distance in ranks(2).run(_trained_on_another_rank):
        assert "differ" in difference
        assert distance > 1e-3


def _modules_in(rank: int, world_size: int) -> int:
    return len(fsdp_modules(_model(world_size, model={"block": NestedBlock})))


def test_the_nested_model_has_a_group_per_level(ranks: RankPools) -> None:
    assert ranks(2).run(_modules_in) == [4 * 3 + 1] * 2
