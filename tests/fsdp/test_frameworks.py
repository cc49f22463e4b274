"""What frameworks over FSDP2 do to it: each as small as it gets, bit by bit against stock, and over the right path."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

import tide_triton
from tests.fsdp.models import BF16, FULL, MIXED, Block, Model, fsdp_modules, grid, line, seeded, sharded
from tests.fsdp.parity import (
    Loop,
    Outcome,
    Row,
    assert_equal_to_stock,
    assert_zero_copy,
    batch,
    compare,
    cross_entropy,
    difference,
    gradients,
    local,
    plain_loss,
    rows_of,
    train,
)
from tests.fsdp.test_attach import attach, group_is_usable, raised
from tests.ranks import RankPools
from tide_triton.fsdp import internals


def _model(world_size: int, policy: MixedPrecisionPolicy = MIXED, **options: Any) -> nn.Module:
    return sharded(seeded(Model, **options), line(world_size), policy)


def _several_meshes(world_size: int) -> nn.Module:
    """Expert parallelism: `up` and `down` lie on the inner mesh, all else on all ranks."""
    model, mesh = seeded(), line(world_size)
    experts = _fsdp_common.FSDPMeshInfo(grid(2, 2)["inner"], shard_mesh_dim=0)
    for block in model.blocks:
        inside = {id(p) for p in (*block.up.parameters(), *block.down.parameters())}
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=MIXED,
            shard_placement_fn=lambda p, inside=inside: (
                _fsdp_common.ShardPlacementResult(Shard(0), experts) if id(p) in inside else None
            ),
        )
    return fully_shard(model, mesh=mesh, mp_policy=MIXED)


def _chunked_by_hand(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The head is unsharded by hand and kept; only the last chunk's backward syncs."""
    head = model.head
    hidden = model(tokens)
    apart = hidden.detach().requires_grad_()
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False)
    head.unshard()
    total, chunks = torch.zeros(()), list(zip(apart.chunk(3, dim=1), targets.chunk(3, dim=1), strict=True))
    for index, (x, y) in enumerate(chunks):
        if index == len(chunks) - 1:
            head.set_requires_gradient_sync(True)
        loss = cross_entropy(head(x), y) / len(chunks)
        loss.backward()
        total += loss.detach()
    head.reshard()
    hidden.backward(apart.grad)
    return total


def _head_apart(world_size: int) -> nn.Module:
    model, mesh = seeded(Model, with_head=False), line(world_size)
    for module in (*model.blocks, model.head):
        fully_shard(module, mesh=mesh, mp_policy=MIXED)
    return fully_shard(model, mesh=mesh, mp_policy=MIXED)


class Adapted(nn.Linear):
    """A frozen bf16 base with fp32 adapters."""

    def __init__(self, rows: int, cols: int) -> None:
        super().__init__(rows, cols, bias=False, dtype=torch.bfloat16)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(3, rows) * 0.3), nn.Parameter(torch.randn(cols, 3) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16()).float() + x @ self.a.T @ self.b.T


def _adapted(world_size: int) -> nn.Module:
    torch.manual_seed(0)
    model = Model(hidden=7)
    for block in model.blocks:
        block.up, block.down = Adapted(12, 7), Adapted(7, 12)
    return sharded(model, line(world_size), FULL)


def _adapters_apart(world_size: int) -> nn.Module:
    """Nested groups: every adapted linear is a group in its block's."""
    torch.manual_seed(0)
    model, mesh = Model(hidden=7), line(world_size)
    for block in model.blocks:
        block.up, block.down = Adapted(12, 7), Adapted(7, 12)
        for linear in (block.up, block.down):
            fully_shard(linear, mesh=mesh)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _frozen_groups(world_size: int) -> nn.Module:
    model = seeded()
    for index in (0, 2):
        model.blocks[index].requires_grad_(False)
    return sharded(model, line(world_size))


def _toggling(model: nn.Module) -> None:
    """Another block is frozen in each step, once gradients have been taken."""
    turn = model.__dict__["_turn"] = model.__dict__.get("_turn", -1) + 1
    for index, block in enumerate(model.blocks):
        # Not in the first step: FSDP2 itself refuses to thaw a group that was wholly frozen at its lazy init.
        block.requires_grad_(turn == 0 or index != turn % len(model.blocks))


def _unused(world_size: int) -> nn.Module:
    return sharded(seeded(Model, block=HalfUsed), line(world_size))


class HalfUsed(Block):
    """Uses its second half only when told to."""

    used = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.used else x + self.norm(x)


def _use_on_last_microbatch(model: nn.Module) -> None:
    turn = model.__dict__["_turn"] = model.__dict__.get("_turn", -1) + 1
    for block in model.blocks:
        block.used = turn % 2 == 1


def _for_all(name: str, *args: Any) -> Callable[[nn.Module], None]:
    def set_them(model: nn.Module) -> None:
        for module in fsdp_modules(model):
            getattr(module, name)(*args)

    return set_them


def _keep_embedding(model: nn.Module) -> None:
    model.embedding.set_unshard_in_backward(False)


def _embedding_apart(world_size: int) -> nn.Module:
    model, mesh = seeded(), line(world_size)
    for module in (model.embedding, *model.blocks):
        fully_shard(module, mesh=mesh, mp_policy=MIXED)
    return fully_shard(model, mesh=mesh, mp_policy=MIXED)


def _separate_groups(model: nn.Module) -> None:
    model.set_separate_reduce_scatter_group(True)


def _evaluate(model: nn.Module) -> None:
    """An evaluation between steps, as Lightning and accelerate have them."""
    with torch.no_grad():
        model(batch(3, 99)[0])


def _clip(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = plain_loss(model, tokens, targets)
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.1)
    return loss


def _pipelined(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As pipelining does it: no backward is the last, nothing syncs, and then post_backward is called on each group."""
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    total = torch.zeros(())
    for x, y in zip(tokens.chunk(2), targets.chunk(2), strict=True):
        loss = cross_entropy(model(x), y)
        loss.backward()
        total += loss.detach()
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    for module in fsdp_modules(model):
        for group in internals.groups_of(module):
            group.post_backward()
    model._get_fsdp_state()._root_post_backward_final_callback()
    return total


CASES: dict[str, tuple[Callable[[int], nn.Module], Loop, Callable[[nn.Module], Any] | None, int]] = {
    "several meshes in one module": (_several_meshes, Loop(), None, 4),
    "several meshes, accumulation without sync": (_several_meshes, Loop(micro=2, sync=False), None, 4),
    "no_sync accumulation in fp32": (_model, Loop(micro=3, sync=False), None, 2),
    "chunked losses with both reshards off": (_head_apart, Loop(loss=_chunked_by_hand), None, 2),
    "mixed dtypes in one group": (_adapted, Loop(), None, 2),
    "mixed dtypes in nested groups": (_adapters_apart, Loop(), None, 2),
    "groups wholly frozen": (_frozen_groups, Loop(), None, 2),
    "requires_grad toggled between steps": (_model, Loop(steps=5, before=_toggling), None, 2),
    "parameters first used on the last microbatch, each synced": (
        _unused,
        Loop(micro=2, before=_use_on_last_microbatch),
        None,
        2,
    ),
    "unused parameters reduced as zeros": (
        _unused,
        Loop(micro=2, before=_use_on_last_microbatch),
        _for_all("set_reduce_scatter_unused_params", True),
        2,
    ),
    "a divide factor set after attach": (_model, Loop(optimizer="sgd"), _for_all("set_gradient_divide_factor", 2.0), 2),
    "reshard_after_forward switched off after attach": (
        _model,
        Loop(),
        _for_all("set_reshard_after_forward", False),
        2,
    ),
    "a separate reduce-scatter group set after attach": (_model, Loop(), _separate_groups, 2),
    "several reduce-scatter inputs in flight": (_model, Loop(), _for_all("set_reduce_scatter_max_input_buffers", 3), 2),
    "unshard_async_op set after attach": (_model, Loop(), lambda model: model._set_unshard_async_op(True), 2),
    "an embedding that is not unsharded in backward": (_embedding_apart, Loop(), _keep_embedding, 2),
    "an evaluation before each step": (_model, Loop(before=_evaluate), None, 2),
    "gradients clipped by their norm": (_model, Loop(loss=_clip), None, 2),
    "post_backward called directly": (_model, Loop(loss=_pipelined), None, 2),
    "no_sync accumulation, bf16": (partial(_model, policy=BF16), Loop(micro=2, sync=False), None, 2),
}


def _run(rank: int, world_size: int, name: str) -> Outcome:
    build, loop, after, _ = CASES[name]
    return compare(lambda: build(world_size), rank, loop, after=after, reference=world_size > 2)


@pytest.mark.parametrize("name", CASES)
def test_frameworks_get_the_same_bits_without_copies_from(ranks: RankPools, name: str) -> None:
    if "several meshes" in name and not hasattr(_fsdp_common, "ShardPlacementResult"):
        pytest.skip("FSDP2 of this torch has one mesh a module")
    outcomes = ranks(CASES[name][3]).run(_run, name)
    assert [o.from_stock + o.from_reference for o in outcomes] == [""] * len(outcomes)
    assert max(o.distance for o in outcomes) < 1e-4
    assert_zero_copy(outcomes)


# --- a tensor that gathers in a way of its own ---


def _quantized(world_size: int) -> nn.Module:
    """Block 1's `up` is gathered by extensions of its own, in bf16, as fp8 and NF4 weights are."""
    model = sharded(seeded(Model, hidden=16), line(world_size))
    weight = local(model.blocks[1].up.weight)

    def pre(mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        return (weight.detach().to(torch.bfloat16),), None

    def post(outputs: tuple[torch.Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)

    weight.fsdp_pre_all_gather, weight.fsdp_post_all_gather = pre, post
    return model


def _quantized_run(rank: int, world_size: int) -> Outcome:
    return compare(lambda: _quantized(world_size), rank, Loop())


def test_a_weight_with_extensions_of_its_own_keeps_stock_for_its_group_and_says_so(ranks: RankPools) -> None:
    outcomes = ranks(2).run(_quantized_run)
    assert_equal_to_stock(outcomes)
    assert_zero_copy(outcomes, except_for={"blocks.1": "extensions of its own"})
    for outcome in outcomes:
        row: Row = next(r for r in outcome.rows if r.name == "blocks.1")
        assert (row.gather, row.reduce) == ("stock", "stock")
        assert row.layout_copy_bytes > 0


# --- what is shared with others ---


def _side_by_side(rank: int, world_size: int) -> list[str]:
    """Two attached models whose steps take turns, one of them detached on the way."""
    stock = [train(_model(world_size, policy), rank, Loop(steps=1)) for policy in (MIXED, FULL)]
    one, two = _model(world_size, MIXED), _model(world_size, FULL)
    attach(one)
    attach(two)
    tokens, targets = batch(rank, 0)
    loss_one, loss_two = (cross_entropy(model(tokens), targets) for model in (one, two))
    loss_one.backward()
    loss_two.backward()
    expected = [[(n, t) for n, t in trace if n.startswith("step 0: grad")] for trace in stock]
    got = [gradients(model, "step 0: ") for model in (one, two)]
    found = [difference(e, g) for e, g in zip(expected, got, strict=True)]
    tide_triton.detach(one)
    for param in two.parameters():
        param.grad = None
    plain_loss(two, tokens, targets)
    found.append(difference(expected[1], gradients(two, "step 0: ")))
    rows = rows_of(tide_triton.report(two, quiet=True))
    found.append("" if all(r.reduces == 2 for r in rows) else str(rows))
    tide_triton.detach(two)
    return found


def test_a_second_model_is_attached_while_the_first_lives(ranks: RankPools) -> None:
    assert ranks(2).run(_side_by_side) == [[""] * 4] * 2


def _random_state(rank: int, world_size: int) -> bool:
    model = _model(world_size)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        plain_loss(model, *batch(rank, step))
        optimizer.step()
    tide_triton.report(model, quiet=True)
    tide_triton.detach(model)
    return torch.equal(before, torch.get_rng_state())


def test_torchs_random_state_is_not_consumed(ranks: RankPools) -> None:
    assert ranks(2).run(_random_state) == [True, True]


def _mixed_gradients(rank: int, world_size: int) -> list[str]:
    """A group with gradients in fp32, accumulated, and in bf16, used first on the last microbatch."""
    found = []
    for tide in (False, True):
        model = _unused(world_size)
        if tide:
            attach(model)
        loop = Loop(steps=1, micro=2, sync=False, before=_use_on_last_microbatch)
        found.append(raised(lambda model=model, loop=loop: train(model, rank, loop)))
        found.append(str(group_is_usable(world_size)))
    return found


def test_gradients_of_several_dtypes_in_one_group_are_refused_as_fsdp2_refuses_them(ranks: RankPools) -> None:
    for stock, _, tide, usable in ranks(2).run(_mixed_gradients):
        assert "uniform gradient dtype" in stock
        assert tide == stock
        assert usable == "True"
