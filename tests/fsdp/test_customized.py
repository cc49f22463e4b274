"""Groups with a communication of their own, groups sharded later, and a transport that gave up."""

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

import tide_triton
from tests.fsdp.models import MIXED, line, seeded, sharded
from tests.fsdp.parity import Loop, batch, cross_entropy, difference, train
from tests.ranks import RankPools, fresh_ranks
from tide_triton.errors import AttachError, PeerError, UnsupportedError


class CountedGather(DefaultAllGather):
    """A user's own all-gather."""

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)


class CountedReduce(DefaultReduceScatter):
    """A user's own reduce-scatter."""

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)


def _model(world_size: int) -> nn.Module:
    return sharded(seeded(), line(world_size))


def _keeps_custom(rank: int, world_size: int) -> dict[str, Any]:
    stock = train(_model(world_size), rank, Loop(steps=2))
    model = _model(world_size)
    gather, reduce = CountedGather(), CountedReduce()
    model.blocks[0].set_custom_all_gather(gather)
    model.blocks[1].set_custom_reduce_scatter(reduce)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tide_triton.attach(model, timeout_s=30)
    tide = train(model, rank, Loop(steps=2))
    rows = {g.name: (g.gather_path, g.reduce_path, g.why) for g in tide_triton.report(model, quiet=True).groups}
    tide_triton.detach(model)
    return {
        "departs": difference(stock, tide),
        "calls": (gather.calls, reduce.calls),
        "rows": rows,
        "warnings": [str(w.message) for w in caught],
        "kept": model.blocks[0]._get_fsdp_state()._fsdp_param_group._all_gather_comm is gather,
    }


def test_a_group_with_a_communication_of_its_own_is_left_alone_and_said_so(ranks: RankPools) -> None:
    for found in ranks(2).run(_keeps_custom):
        assert found["departs"] == ""
        assert found["calls"] == (4, 2)
        assert found["kept"]
        assert "CountedGather" in found["rows"]["blocks.0"][2]
        assert "CountedReduce" in found["rows"]["blocks.1"][2]
        assert found["rows"]["blocks.2"] == ("zero-copy", "zero-copy", "")
        assert len(found["warnings"]) == 2


def _replaces_while_attached(rank: int, world_size: int) -> list[str]:
    messages = []
    for replace in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        model = _model(world_size)
        tide_triton.attach(model, timeout_s=30)
        comm = CountedGather() if "gather" in replace else CountedReduce()
        getattr(model.blocks[1], replace)(comm)
        tokens, targets = batch(rank, 0)
        try:
            cross_entropy(model(tokens), targets).backward()
        except AttachError as error:
            messages.append(str(error))
    return messages


def test_a_communication_set_while_attached_is_refused_with_the_group_and_the_way_out() -> None:
    with fresh_ranks(2) as ranks:
        for messages in ranks.run(_replaces_while_attached):
            assert len(messages) == 2
            assert all("group 'blocks.1' was given Counted" in m and "tide_triton.detach" in m for m in messages)


def _sharded_later(rank: int, world_size: int) -> list[tuple[str, str, str]]:
    model, mesh = seeded(), line(world_size)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MIXED)
    tide_triton.attach(model, timeout_s=30)
    fully_shard(model, mesh=mesh, mp_policy=MIXED)
    train(model, rank, Loop(steps=1))
    return [(g.name, g.gather_path, g.why) for g in tide_triton.report(model, quiet=True).groups]


def test_groups_that_were_sharded_after_attach_have_a_row_that_says_so(ranks: RankPools) -> None:
    for rows in ranks(2).run(_sharded_later):
        assert ("(root)", "stock", "sharded after attach") in rows
        assert ("blocks.0", "zero-copy", "") in rows


def _strictly_resharded_to_fewer(rank: int, world_size: int) -> str:
    model = sharded(seeded(), line(world_size), reshard=2)
    try:
        tide_triton.attach(model, strict=True, timeout_s=30)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_strict_refuses_resharding_to_a_smaller_mesh_at_attach(ranks: RankPools) -> None:
    for message in ranks(4).run(_strictly_resharded_to_fewer):
        assert "group 'blocks.0': resharded to a smaller mesh after forward" in message


def _late(rank: int, world_size: int) -> tuple[str, str, bool]:
    """Rank 1 comes too late for a step; every rank detaches, and trains and attaches again."""
    model = _model(world_size)
    tide_triton.attach(model, timeout_s=2)
    train(model, rank, Loop(steps=1))
    if rank == 1:
        time.sleep(4)
    try:
        train(model, rank, Loop(steps=1))
        error = ""
    except PeerError as raised:
        error = type(raised).__name__
    dist.barrier()
    tide_triton.detach(model)
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    tide_triton.attach(model, timeout_s=30)
    again = train(model, rank, Loop(steps=1))
    tide_triton.detach(model)
    return error, "", all(bool(torch.isfinite(tensor).all()) for _, tensor in again)


@pytest.mark.skipif(not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"), reason="torch cannot go on")
def test_after_a_rank_was_too_late_every_rank_can_detach_and_go_on() -> None:
    with fresh_ranks(2) as ranks:
        outcomes = ranks.run(_late)
    assert all(error in ("WaitTimeoutError", "AbortedError", "PeerError") for error, _, _ in outcomes)
    assert all(good for _, _, good in outcomes)
