"""The two collectives on their own: exact, over random layouts, with nothing written that should not be."""

import gc
import os
import random
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPools, fresh_ranks
from tide_triton import Collectives
from tide_triton.errors import AbortedError, MismatchError, PeerLostError, TideError, WaitTimeoutError
from tide_triton.layouts import GroupSpec, SpecError, TensorSpec, Topology, shard
from tide_triton.views import DTYPES


def random_spec(world: int, seed: int) -> GroupSpec:
    """A few tensors with sizes that do and do not divide, and any shard dim."""
    draw = random.Random(seed)
    tensors = []
    for index in range(draw.randint(1, 6)):
        shape = tuple(draw.choice([1, 2, 3, 5, 7, 8, 16, 33]) for _ in range(draw.randint(1, 3)))
        dtype = draw.choice(["bfloat16", "bfloat16", "float16", "float32"])
        tensors.append(TensorSpec(f"t{index}", shape, dtype, draw.randrange(len(shape))))
    return GroupSpec(world, tuple(tensors))


def whole(tensor: TensorSpec, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator).to(dtype)


def part(tensor: TensorSpec, world: int, rank: int, of: torch.Tensor) -> torch.Tensor:
    chunks = torch.chunk(of, world, dim=tensor.shard_dim)
    if rank < len(chunks):
        return chunks[rank].contiguous()
    return of.new_empty(shard(tensor, world, rank).shape)


def gathered_wrong(collectives: Collectives, shards: list[torch.Tensor], sources: list[torch.Tensor]) -> str:
    """What an all-gather of `shards` has got wrong of `sources`, in a poisoned slot; "" for nothing.

    Whatever an earlier turn left must be overwritten, and what lies between tensors must not. What is behind them, for
    what crosses nodes packed, may be.
    """
    memory = collectives._slot.window.memory
    memory.fill_(0xFF)
    gathered = collectives.all_gather(shards)
    covered = torch.zeros_like(memory, dtype=torch.bool)
    covered[collectives._gather.layout.nbytes :] = True
    for source, got, place in zip(sources, gathered, collectives._gather.layout.places, strict=True):
        if not torch.equal(got, source.to(DTYPES[place.tensor.dtype])):
            return f"{place.tensor} gathered wrong"
        covered[place.offset : place.offset + place.nbytes] = True
    if not bool((memory[~covered] == 0xFF).all()):
        return "bytes between tensors were written"
    return ""


def gather_and_reduce(
    rank: int, world: int, seed: int, device: str = "cpu", transport: Any = "auto", topology: Topology | None = None
) -> str:
    """Both collectives against torch.chunk, cat and a sum in rank order, bit for bit, twice through the same slot.

    topology: nodes of one rank each, which add in rank order too, or None.
    """
    spec = random_spec(world, seed)
    on = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    with Collectives(
        dist.group.WORLD, spec, transport=transport, device=on, timeout_s=30, topology=topology
    ) as collectives:
        for turn in range(2):
            sources = [whole(t, 100 * seed + 10 * turn + i).to(on) for i, t in enumerate(spec.tensors)]
            shards = [part(t, world, rank, s) for t, s in zip(spec.tensors, sources, strict=True)]
            if wrong := gathered_wrong(collectives, shards, sources):
                return wrong

            for dtype in (torch.bfloat16, torch.float32):
                grads = [
                    [whole(t, 7000 * r + 100 * seed + 10 * turn + i, dtype).to(on) for i, t in enumerate(spec.tensors)]
                    for r in range(world)
                ]
                shards_of_sum = collectives.reduce_scatter(grads[rank])
                for index, (tensor, got) in enumerate(zip(spec.tensors, shards_of_sum, strict=True)):
                    total = part(tensor, world, rank, grads[0][index].float())
                    for peer in range(1, world):
                        total = total + part(tensor, world, rank, grads[peer][index].float())
                    if not torch.equal(got, total / world):
                        return f"{tensor} reduced wrong from {dtype}"
    return ""


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_layouts_are_gathered_and_reduced_bit_for_bit(ranks: RankPools, world: int) -> None:
    for seed in range(12):
        assert ranks(world).run(gather_and_reduce, seed) == [""] * world


def interleave(rank: int, world: int, seed: int) -> str:
    """Random orders of gathers and reductions over several groups, with ranks that are slow at random moments."""
    order = random.Random(seed)
    delay = random.Random(seed * 31 + rank)
    specs = [random_spec(world, seed + index) for index in range(3)]
    groups = [Collectives(dist.group.WORLD, spec, timeout_s=30) for spec in specs]
    try:
        for step in range(40):
            index = order.randrange(3)
            spec, collectives = specs[index], groups[index]
            if delay.random() < 0.2:
                time.sleep(delay.random() * 0.01)
            if order.random() < 0.5:
                sources = [whole(t, step + 50 * i) for i, t in enumerate(spec.tensors)]
                got = collectives.all_gather(
                    [part(t, world, rank, s) for t, s in zip(spec.tensors, sources, strict=True)]
                )
                want = [s.to(DTYPES[t.dtype]) for t, s in zip(spec.tensors, sources, strict=True)]
            else:
                grads = [[whole(t, step + 50 * i + 999 * r) for i, t in enumerate(spec.tensors)] for r in range(world)]
                got = collectives.reduce_scatter(grads[rank], average=False)
                want = []
                for i, tensor in enumerate(spec.tensors):
                    total = part(tensor, world, rank, grads[0][i])
                    for peer in range(1, world):
                        total = total + part(tensor, world, rank, grads[peer][i])
                    want.append(total)
            if not all(torch.equal(g, w) for g, w in zip(got, want, strict=True)):
                return f"step {step} on group {index} is wrong"
            # The owner poisons what it has read: a late or early write of a peer would show.
            collectives._slot.window.memory.fill_(0xFF)
    finally:
        for collectives in groups:
            collectives.close()
    return ""


@pytest.mark.parametrize("seed", [1, 2])
def test_random_interleavings_with_slow_ranks_stay_exact(ranks: RankPools, seed: int) -> None:
    assert ranks(3).run(interleave, seed) == [""] * 3


def gather_short_shards(rank: int, world: int) -> tuple[list[float], float]:
    """5 rows over 2 ranks: the short rank's shard is followed by a canary that no gather may carry."""
    spec = GroupSpec(world, (TensorSpec("w", (5, 1), "float32"),))
    storage = torch.full((3,), 77.0)
    size = (3, 2)[rank]
    storage[:size] = torch.arange(size) + 10.0 * rank
    with Collectives(dist.group.WORLD, spec, timeout_s=30) as collectives:
        (w,) = collectives.all_gather([storage])
        return w.flatten().tolist(), float(storage[-1])


def test_a_short_peer_sends_only_what_it_owns(ranks: RankPools) -> None:
    long, short = ranks(2).run(gather_short_shards)
    assert long[0] == short[0] == [0.0, 1.0, 2.0, 10.0, 11.0]
    assert short[1] == 77.0


def count(rank: int, world: int) -> tuple[int, int, int, int]:
    spec = GroupSpec(world, (TensorSpec("w", (7, 3), "bfloat16"), TensorSpec("b", (1,), "bfloat16")))
    with Collectives(dist.group.WORLD, spec, timeout_s=30) as collectives:
        collectives.all_gather([torch.zeros(shard(t, world, rank).shape) for t in spec.tensors])
        collectives.reduce_scatter([torch.zeros(t.shape, dtype=torch.bfloat16) for t in spec.tensors])
        gather, reduce = collectives.gather_traffic, collectives.reduce_traffic
        return gather.wire_bytes, reduce.wire_bytes, gather.zero_copy, reduce.zero_copy


def test_wire_bytes_are_what_was_sent_and_no_padding(ranks: RankPools) -> None:
    # w: 4 and 3 rows of 3 bf16; b: 1 element on rank 0, none on rank 1. Each sends its own shard, or the peer's slice.
    assert ranks(2).run(count) == [(26, 18, 1, 1), (18, 26, 1, 1)]


def misuse(rank: int, world: int) -> list[str]:
    spec = GroupSpec(world, (TensorSpec("w", (4, 2), "bfloat16"),))
    messages = []
    try:
        Collectives(dist.group.WORLD, GroupSpec(world + 1, spec.tensors))
    except SpecError as error:
        messages.append(str(error))
    with Collectives(dist.group.WORLD, spec, timeout_s=30) as collectives:
        for call in (
            lambda: collectives.all_gather([torch.zeros(3, 2)]),
            lambda: collectives.all_gather([]),
            lambda: collectives.reduce_scatter([torch.zeros(2, 4)]),
            lambda: collectives.reduce_scatter([torch.zeros(4, 2, dtype=torch.int32)]),
        ):
            try:
                call()
            except (SpecError, MismatchError) as error:
                messages.append(str(error))
    return messages


def test_misuse_is_named_before_anything_moves(ranks: RankPools) -> None:
    for messages in ranks(2).run(misuse):
        assert len(messages) == 5
        assert "world_size is 3" in messages[0]
        assert "'w'" in messages[1]
        assert "int32" in messages[4]


def open_with_different_shapes(rank: int, world: int) -> None:
    Collectives(dist.group.WORLD, GroupSpec(world, (TensorSpec("w", (4 + rank, 2), "bfloat16"),)), timeout_s=20)


def test_ranks_with_different_shapes_are_told_which_tensor(ranks: RankPools) -> None:
    for outcome in ranks(2).outcomes(open_with_different_shapes):
        assert isinstance(outcome, MismatchError)
        assert "tensor 'w'" in str(outcome)
        assert "[4, 2]" in str(outcome)
        assert "[5, 2]" in str(outcome)


def gather_until_killed(rank: int, world: int) -> None:
    spec = GroupSpec(world, (TensorSpec("w", (64, 64), "bfloat16"),))
    with Collectives(dist.group.WORLD, spec, timeout_s=60) as collectives:
        own = torch.zeros(shard(spec.tensors[0], world, rank).shape)
        while True:
            collectives.all_gather([own])


def test_a_rank_killed_amid_gathers_is_named_by_the_others_with_the_phase() -> None:
    with fresh_ranks(3) as group:
        group.start(gather_until_killed)
        time.sleep(2.5)
        os.kill(group.processes[1].pid, signal.SIGKILL)
        outcomes = group.finish(timeout_s=20)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], (PeerLostError, AbortedError))
        assert "rank 1 (pid" in str(outcomes[rank])
        assert "all-gather of Collectives" in str(outcomes[rank])


def refuse_then_go_on(rank: int, world: int) -> list[str]:
    """Calls that are refused on every rank leave the next, correct one alone."""
    spec = GroupSpec(world, (TensorSpec("w", (4, 2), "bfloat16"), TensorSpec("u", (3,), "bfloat16")))
    w, u = (torch.ones(shard(t, world, rank).shape) for t in spec.tensors)
    gw, gu = torch.ones(4, 2), torch.ones(3)
    messages = []
    with Collectives(dist.group.WORLD, spec, timeout_s=10) as collectives:
        for call in (
            lambda: collectives.all_gather([w.long(), u]),
            lambda: collectives.all_gather([w.to(torch.complex64), u]),
            lambda: collectives.all_gather([w.to("meta"), u]),
            lambda: collectives.all_gather([None, u]),  # type: ignore[list-item]
            lambda: collectives.reduce_scatter([gw.to("meta"), gu]),
            lambda: collectives.reduce_scatter([gw, gu.bfloat16()]),
            lambda: collectives.reduce_scatter([gw, gu], dtype=torch.int32),
            lambda: collectives.reduce_scatter([gw, None]),  # type: ignore[list-item]
        ):
            try:
                call()
            except SpecError as error:
                messages.append(str(error))
            gathered = collectives.all_gather([w, u])
            assert all(bool((tensor == 1).all()) for tensor in gathered)
            assert all(bool((tensor == 1).all()) for tensor in collectives.reduce_scatter([gw, gu]))
    return messages


def test_a_refused_call_names_the_tensor_and_leaves_the_next_one_alone(ranks: RankPools) -> None:
    for messages in ranks(2).run(refuse_then_go_on):
        assert len(messages) == 8
        for message, name in zip(messages, ["'w'", "'w'", "'w'", "'w'", "'w'", "'u'", "dtype", "'u'"], strict=True):
            assert name in message


def drop_without_closing(rank: int, world: int) -> int:
    """Descriptors left by collectives that are dropped without `close`."""
    spec = GroupSpec(world, (TensorSpec("w", (4, 2), "bfloat16"),))

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    Collectives(dist.group.WORLD, spec, timeout_s=30)
    before = descriptors()
    for _ in range(20):
        Collectives(dist.group.WORLD, spec, timeout_s=30).all_gather(
            [torch.ones(shard(spec.tensors[0], world, rank).shape)]
        )
    return descriptors() - before


def test_collectives_that_are_dropped_give_everything_back(ranks: RankPools) -> None:
    assert max(ranks(2).run(drop_without_closing)) <= 0


def reduce_what_differs(rank: int, world: int) -> list[str]:
    spec = GroupSpec(world, (TensorSpec("w", (8, 4), "bfloat16"),))
    ones = torch.ones(8, 4)
    found = []
    with Collectives(dist.group.WORLD, spec, timeout_s=30) as collectives:
        for gradient, options in (
            (ones if rank else ones.bfloat16(), {}),
            (ones, {"dtype": torch.float32 if rank else torch.float64}),
            (ones, {"average": rank == 0}),
        ):
            with pytest.raises(MismatchError) as refused:
                collectives.reduce_scatter([gradient], **options)
            found.append(str(refused.value))
        # Nothing was sent, so that all may go on.
        (shard_,) = collectives.reduce_scatter([ones.bfloat16()])
        found.append("" if torch.equal(shard_, torch.ones_like(shard_)) else str(shard_))
    return found


def test_reductions_that_differ_between_ranks_are_refused_on_all_of_them(ranks: RankPools) -> None:
    for dtypes, results, average, then in ranks(2).run(reduce_what_differs):
        assert dtypes.startswith("ranks disagree on the dtype of gradients: torch.bfloat16 on ranks [0]; torch.float32")
        assert results.startswith("ranks disagree on dtype: torch.float64 on ranks [0]; torch.float32 on ranks [1]")
        assert average.startswith("ranks disagree on average: True on ranks [0]; False on ranks [1]")
        assert then == ""


def use_after_closing(rank: int, world: int) -> list[str]:
    spec = GroupSpec(world, (TensorSpec("w", (8, 4), "bfloat16"),))
    found = []
    with Collectives(dist.group.WORLD, spec, timeout_s=30) as collectives:
        for not_tensors in (None, iter([torch.ones(4, 4)])):
            with pytest.raises(SpecError) as refused:
                collectives.all_gather(not_tensors)  # type: ignore[arg-type]
            found.append(str(refused.value))
    for call in (collectives.all_gather, collectives.reduce_scatter):
        with pytest.raises(TideError) as closed:
            call([torch.ones(8, 4)])
        found.append(str(closed.value))
    return found


def test_what_is_no_list_and_what_is_closed_is_said_to_be_so(ranks: RankPools) -> None:
    for nothing, iterator, *closed in ranks(2).run(use_after_closing):
        assert nothing == "shards must be a list of tensors, one per tensor of the spec, got NoneType"
        assert iterator.endswith("got list_iterator")
        assert closed == ["these Collectives are closed; make new ones"] * 2


def move_nothing(rank: int, world: int) -> list[Any]:
    with Collectives(dist.group.WORLD, GroupSpec(world, ()), timeout_s=10) as collectives:
        return [collectives.all_gather([]), collectives.reduce_scatter([])]


def test_a_spec_without_tensors_moves_nothing(ranks: RankPools) -> None:
    assert ranks(2).run(move_nothing) == [[[], []]] * 2


def compare_alone(rank: int, world: int) -> tuple[str, str]:
    """Rank 1 reduces gradients of a dtype that rank 0 has reduced before; rank 0 does something else meanwhile."""
    spec = GroupSpec(world, (TensorSpec("w", (8, 4), "bfloat16"),))
    message = ""
    with Collectives(dist.group.WORLD, spec, timeout_s=2) as collectives:
        if rank == 1:
            with pytest.raises(WaitTimeoutError) as alone:
                collectives.reduce_scatter([torch.ones(8, 4)])
            message = str(alone.value)
        dist.barrier()
    with Collectives(dist.group.WORLD, spec, timeout_s=30) as collectives:
        (found,) = collectives.reduce_scatter([torch.ones(8, 4)])
    return message, "" if torch.equal(found, torch.ones_like(found)) else str(found)


def test_a_rank_that_compares_alone_says_for_whom_it_waited_and_the_group_stays_usable(ranks: RankPools) -> None:
    (_, nothing), (message, wrong) = ranks(2).run(compare_alone)
    assert message.startswith(
        "rank 1 waited 2 s in phase 'the first reduction of its kind in Collectives' for ranks [0]"
    )
    assert nothing == wrong == ""
