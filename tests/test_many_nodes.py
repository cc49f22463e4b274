"""Collectives over several nodes, which here are processes of one machine: exact, within their traffic, one by one."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import tide_triton
from tests.fsdp.models import BF16, FP16, FULL, MIXED, Model, grid, line, seeded, sharded
from tests.fsdp.parity import Loop, Row, difference, rows_of, train
from tests.ranks import RankPools, fresh_ranks
from tests.test_collectives import gathered_wrong, part, random_spec, whole
from tide_triton import Collectives, collectives
from tide_triton.errors import AbortedError, AttachError, MismatchError, PeerLostError
from tide_triton.fsdp.reference import reduce_in_rank_order
from tide_triton.layouts import (
    GroupSpec,
    Hierarchy,
    Pacing,
    TensorSpec,
    Topology,
    gather_load,
    packing,
    reduce_load,
    shard,
)
from tide_triton.layouts import pacing as layouts_pacing
from tide_triton.views import DTYPES

TOPOLOGIES = [Topology(2, 2), Topology(4, 2), Topology(3, 2), Topology(2, 4), Topology(5, 1)]
ids = [f"{t.nodes} nodes x {t.gpus_per_node} GPUs" for t in TOPOLOGIES]


@contextmanager
def opened(
    spec: GroupSpec, topology: Topology | None, nbytes: int, depth: int, **options: Any
) -> Iterator[Collectives]:
    """Collectives with rings of `depth` times `nbytes` bytes."""
    with (
        mock.patch.object(collectives, "RING_CHUNK_NBYTES", nbytes),
        mock.patch.object(collectives, "RING_DEPTH", depth),
        Collectives(dist.group.WORLD, spec, timeout_s=30, topology=topology, **options) as opened,
    ):
        yield opened


def sum_over_nodes(
    contributions: list[torch.Tensor], topology: Topology, wire: torch.dtype | None = None
) -> torch.Tensor:
    """In rank order inside each node, rounded to `wire`, then in node order; both in fp32."""
    total = None
    for node in range(topology.nodes):
        partial = None
        for rank in topology.local_ranks(node):
            x = contributions[rank].float()
            partial = x if partial is None else partial + x
        assert partial is not None
        if wire is not None:
            partial = partial.to(wire).float()
        total = partial if total is None else total + partial
    assert total is not None
    return total


def without_packing() -> Any:
    """Nothing crosses nodes packed, as where everything is large."""
    return mock.patch.object(packing, "RUN_NBYTES", 0)


def gather_and_reduce(rank: int, world: int, topology: Topology, seed: int, wire: torch.dtype | None) -> str:
    """Both against torch.chunk and the stated sum, bit for bit, over several turns of the same slots."""
    spec, depth = random_spec(world, seed), seed % 3 + 1
    nbytes = 256 * (topology.gpus_per_node + 1)
    packs = without_packing() if seed == 3 else nullcontext()
    with packs, opened(spec, topology, nbytes, depth, wire_dtype=wire) as both:
        # The third has but one tensor.
        if bool(both._gather.packing.indices) != (seed < 2):
            return f"packs {both._gather.packing.indices}"
        for turn in range(3):
            sources = [whole(t, 100 * seed + 10 * turn + i) for i, t in enumerate(spec.tensors)]
            shards = [part(t, world, rank, s) for t, s in zip(spec.tensors, sources, strict=True)]
            if wrong := gathered_wrong(both, shards, sources):
                return f"{wrong} in turn {turn}"

            for dtype in (torch.bfloat16, torch.float32):
                grads = [
                    [whole(t, 7000 * r + 100 * seed + 10 * turn + i, dtype) for i, t in enumerate(spec.tensors)]
                    for r in range(world)
                ]
                rings = both._ring
                assert rings.label == "rings"
                rings.window.memory.fill_(0xFF)
                # Nobody may put before everyone's rings are poisoned.
                dist.barrier()
                shards = both.reduce_scatter(grads[rank])
                for index, (tensor, got) in enumerate(zip(spec.tensors, shards, strict=True)):
                    own = [part(tensor, world, rank, grads[r][index]) for r in range(world)]
                    # Nodes of one GPU put gradients as they are, unless the wire is narrower.
                    as_they_are = topology.gpus_per_node == 1 and wire is not None and dtype.itemsize <= wire.itemsize
                    if not torch.equal(got, sum_over_nodes(own, topology, None if as_they_are else wire) / world):
                        return f"{tensor} reduced wrong from {dtype} in turn {turn}"
    return ""


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=ids)
def test_random_layouts_are_gathered_and_reduced_bit_for_bit(ranks: RankPools, topology: Topology) -> None:
    for seed, wire in enumerate((None, torch.bfloat16, None, torch.float16)):
        outcomes = ranks(topology.world_size).run(gather_and_reduce, topology, seed, wire)
        assert outcomes == [""] * topology.world_size


def interleave(rank: int, world: int, topology: Topology, seed: int) -> str:
    """Random orders of gathers and reductions over several groups, with ranks that are slow at random moments."""
    order, delay = random.Random(seed), random.Random(seed * 31 + rank)
    specs = [random_spec(world, seed + index) for index in range(3)]
    with ExitStack() as stack:
        groups = [stack.enter_context(opened(spec, topology, 1024, 1 + index)) for index, spec in enumerate(specs)]
        for step in range(24):
            index = order.randrange(3)
            spec, both = specs[index], groups[index]
            if delay.random() < 0.2:
                time.sleep(delay.random() * 0.01)
            if order.random() < 0.5:
                sources = [whole(t, step + 50 * i) for i, t in enumerate(spec.tensors)]
                got = both.all_gather([part(t, world, rank, s) for t, s in zip(spec.tensors, sources, strict=True)])
                want = [s.to(DTYPES[t.dtype]) for t, s in zip(spec.tensors, sources, strict=True)]
            else:
                grads = [[whole(t, step + 50 * i + 999 * r) for i, t in enumerate(spec.tensors)] for r in range(world)]
                got = both.reduce_scatter(grads[rank], average=False)
                want = [
                    sum_over_nodes([part(t, world, rank, grads[r][i]) for r in range(world)], topology)
                    for i, t in enumerate(spec.tensors)
                ]
            if not all(torch.equal(g, w) for g, w in zip(got, want, strict=True)):
                return f"step {step} on group {index} is wrong"
            # The owner poisons what it has read: a late or early write of a peer would show.
            both._slot.window.memory.fill_(0xFF)
    return ""


@pytest.mark.parametrize("topology", [Topology(3, 2), Topology(5, 1)], ids=str)
def test_random_interleavings_with_slow_ranks_stay_exact(ranks: RankPools, topology: Topology) -> None:
    assert ranks(topology.world_size).run(interleave, topology, 1) == [""] * topology.world_size


def in_many_turns(rank: int, world: int, topology: Topology, counted: int) -> list[Any]:
    """A reduction of more chunks, and a gather of more of them, than a turn can count."""
    spec = GroupSpec(world, (TensorSpec("w", (world * 150 + 1, 7), "bfloat16"), TensorSpec("b", (5,), "float32")))
    with (
        mock.patch.object(layouts_pacing, "COUNTED", counted - 1),
        opened(spec, topology, 256 * (topology.gpus_per_node + 1), 2) as both,
    ):
        sources = [whole(t, i) for i, t in enumerate(spec.tensors)]
        gathered = both.all_gather([part(t, world, rank, s) for t, s in zip(spec.tensors, sources, strict=True)])
        grads = [[whole(t, r + i) for i, t in enumerate(spec.tensors)] for r in range(world)]
        shards = both.reduce_scatter(grads[rank], average=False)
        wanted = [
            sum_over_nodes([part(t, world, rank, grads[r][i]) for r in range(world)], topology)
            for i, t in enumerate(spec.tensors)
        ]
        return [
            all(torch.equal(g, s.to(g.dtype)) for g, s in zip(gathered, sources, strict=True)),
            all(torch.equal(s, w) for s, w in zip(shards, wanted, strict=True)),
            both._gather.pacing.chunk_nbytes,
            both._ring.turn,
        ]


def test_what_a_turn_cannot_count_takes_several_or_larger_chunks(ranks: RankPools) -> None:
    topology = Topology(2, 2)
    for exact, summed, chunk_nbytes, turns in ranks(4).run(in_many_turns, topology, 2 * 3 + 1):
        assert exact
        assert summed
        # 2122 bytes a block in three chunks, since two blocks come from a node's other GPU and six chunks are counted.
        assert chunk_nbytes == 768
        # 17 chunks of 64 fp32 elements, three of them a turn.
        assert turns == 6


# --- what it costs ---


def traffic(rank: int, world: int, topology: Topology, wire: torch.dtype | None) -> tuple[int, int, int]:
    spec = GroupSpec(world, (TensorSpec("w", (world * 40, 6), "bfloat16"), TensorSpec("b", (world,), "bfloat16")))
    with opened(spec, topology, 768, 2, wire_dtype=wire) as both:
        both.all_gather([torch.zeros(shard(t, world, rank).shape) for t in spec.tensors])
        both.reduce_scatter([torch.zeros(t.shape, dtype=torch.bfloat16) for t in spec.tensors])
        return both.gather_traffic.wire_bytes, both.reduce_traffic.wire_bytes, both._pool.nbytes


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=ids)
def test_bytes_sent_are_those_of_the_load_model(ranks: RankPools, topology: Topology) -> None:
    pacing = Pacing(256, 2)
    for wire in (None, torch.bfloat16):
        hierarchy = Hierarchy(topology, pacing, "bfloat16", None if wire is None else "bfloat16")
        gather, reduce = gather_load(topology, 241 * 2, pacing), reduce_load(hierarchy, 241)
        for gathered, reduced, _ in ranks(topology.world_size).run(traffic, topology, wire):
            assert gathered == gather.rail_nbytes + gather.link_nbytes * gather.link_peers
            assert reduced == reduce.rail_nbytes + reduce.link_nbytes * reduce.link_peers


def window_nbytes(rank: int, world: int, topology: Topology, rows: int) -> tuple[int, int, str]:
    spec = GroupSpec(world, (TensorSpec("w", (world * rows, 64), "bfloat16"),))
    with opened(spec, topology, 3 * 4096, 2) as both:
        gradients = [whole(spec.tensors[0], r, torch.bfloat16) for r in range(world)]
        (got,) = both.reduce_scatter([gradients[rank]])
        want = sum_over_nodes([part(spec.tensors[0], world, rank, g) for g in gradients], topology) / world
        return both._ring.window.nbytes, both._slot.window.nbytes, "" if torch.equal(got, want) else "wrong"


def test_rings_grow_with_neither_the_group_nor_the_nodes(ranks: RankPools) -> None:
    seen = set()
    for topology, rows in ((Topology(2, 2), 32), (Topology(2, 2), 128), (Topology(3, 2), 32), (Topology(4, 2), 64)):
        for rings, slot, wrong in ranks(topology.world_size).run(window_nbytes, topology, rows):
            assert slot == topology.world_size * rows * 64 * 2
            assert not wrong
            seen.add(rings)
    # Two of: a slice of the node's other GPU, a partial, a partial on its way.
    assert seen == {2 * 3 * 4096}


# --- partials in bf16 ---


def errors(rank: int, world: int, topology: Topology) -> list[tuple[float, float]]:
    """Of fp32 gradients over a bf16 wire, the worst error and its bound, as multiples of the bound and in all."""
    spec = GroupSpec(world, (TensorSpec("w", (world * 64, 33), "float32"),))
    found = []
    with opened(spec, topology, 4096, 2, wire_dtype=torch.bfloat16) as both:
        for seed in range(4):
            gradients = [whole(spec.tensors[0], 100 * seed + r) * 4.0 ** (r % 3) for r in range(world)]
            own = [part(spec.tensors[0], world, rank, g).double() for g in gradients]
            (got,) = both.reduce_scatter([gradients[rank]])
            of_nodes = [sum(own[r] for r in topology.local_ranks(n)) for n in range(topology.nodes)]
            bound = 2.0**-8 * sum(p.abs() for p in of_nodes) / world
            # The sums themselves are in fp32.
            bound = bound * (1 + 2.0**-8) + world * 2.0**-24 * sum(x.abs() for x in own) / world
            error = (got.double() - sum(own) / world).abs()
            found.append((float((error / bound).max()), float(error.max())))
    return found


@pytest.mark.parametrize("topology", [Topology(4, 2), Topology(5, 1)], ids=str)
def test_a_bf16_wire_stays_within_its_bound_and_is_not_exact(ranks: RankPools, topology: Topology) -> None:
    found = [pair for pairs in ranks(topology.world_size).run(errors, topology) for pair in pairs]
    assert max(share for share, _ in found) <= 1
    assert max(share for share, _ in found) > 0.1, "the bound says nothing"
    assert min(error for _, error in found) > 0


# --- what is refused ---


def misuse(rank: int, world: int) -> list[str]:
    spec = GroupSpec(world, (TensorSpec("w", (4, 2), "bfloat16"),))
    messages = []
    for options in (
        {"topology": Topology(3, 2)},
        {"topology": Topology(2, 2), "wire_dtype": torch.int8},
        {"topology": Topology(2, 2) if rank else Topology(4, 1)},
        {"topology": Topology(2, 2), "wire_dtype": None if rank else torch.bfloat16},
        {"topology": 2},
        {"wire_dtype": torch.bfloat16},
        {"transport": "host_switch" if rank else "host"},
        {"topology": Topology(3, 2) if rank == 1 else None},
        {"timeout_s": 30 if rank else -1},
        {"transport": "host" if rank else "nccl"},
        {"topology": Topology(2, 2), "switch_sums": True},
        {"device": "cuda:7" if rank == 2 else "cpu"},
        {"device": "nonsense"},
    ):
        try:
            Collectives(dist.group.WORLD, spec, **{"timeout_s": 30, **options})
        except (ValueError, MismatchError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_what_cannot_be_or_differs_is_refused_on_every_rank(ranks: RankPools) -> None:
    for rank, messages in enumerate(ranks(4).run(misuse)):
        assert messages[0] == "SpecError: topology has 3 nodes x 2 GPUs, but spec.world_size is 4"
        assert messages[1].startswith("SpecError: wire_dtype must be one of torch.float64")
        assert messages[1].endswith("got torch.int8")
        assert messages[2].startswith("MismatchError: ranks disagree on topology: ")
        assert messages[3].startswith("MismatchError: ranks disagree on wire_dtype: torch.bfloat16 on ranks [0]; None")
        assert messages[4].startswith("SpecError: topology must be a Topology(nodes, gpus_per_node), or None for one")
        assert messages[5].startswith("SpecError: wire_dtype=torch.bfloat16 is what sums are rounded to between nodes")
        assert messages[6].startswith("MismatchError: ranks disagree on transport: 'host' on ranks [0]; 'host_switch'")
        elsewhere = "SpecError: Collectives failed on rank {}: "
        assert messages[7].startswith("SpecError: topology has" if rank == 1 else elsewhere.format(1) + "topology has")
        assert messages[8].startswith(elsewhere.format(0) + "timeout_s" if rank else "SpecError: timeout_s must be")
        assert messages[9].startswith(elsewhere.format(0) + "transport" if rank else "SpecError: transport='nccl'")
        assert messages[10].startswith("SpecError: switch_sums=True works on one node only, and topology has 2")
        assert messages[11].startswith("SpecError: device='cuda:7'" if rank == 2 else elsewhere.format(2) + "device=")
        assert messages[12].startswith("SpecError: device='nonsense' is none that torch knows")


# --- several process groups at once ---


def in_rows_and_columns(rank: int, world: int, seed: int) -> str:
    """Every rank goes over nodes with its row and with its column of a grid, each in an order of its own."""
    mesh, delay = grid(2, 4), random.Random(seed * 31 + rank)
    row, column = mesh.get_group("inner"), mesh.get_group("outer")
    kinds = [(row, Topology(2, 2)), (column, Topology(2, 1)), (row, Topology(4, 1))]
    specs = [random_spec(topology.world_size, seed + index) for index, (_, topology) in enumerate(kinds)]
    with ExitStack() as stack:
        both = [
            stack.enter_context(Collectives(group, spec, timeout_s=30, topology=topology))
            for (group, topology), spec in zip(kinds, specs, strict=True)
        ]
        order = random.Random(seed)
        for step in range(20):
            index = order.randrange(len(kinds))
            (group, topology), spec, this = kinds[index], specs[index], both[index]
            if delay.random() < 0.3:
                time.sleep(delay.random() * 0.01)
            size, own, salt = topology.world_size, group.rank(), 10_000 * min(dist.get_process_group_ranks(group))
            sources = [whole(t, salt + step + 50 * i) for i, t in enumerate(spec.tensors)]
            gathered = this.all_gather([part(t, size, own, s) for t, s in zip(spec.tensors, sources, strict=True)])
            if not all(torch.equal(g, s.to(g.dtype)) for g, s in zip(gathered, sources, strict=True)):
                return f"step {step}: gathered wrong by {kinds[index]}"
            grads = [
                [whole(t, salt + step + 50 * i + 999 * r) for i, t in enumerate(spec.tensors)] for r in range(size)
            ]
            shards = this.reduce_scatter(grads[own], average=False)
            for i, (t, got) in enumerate(zip(spec.tensors, shards, strict=True)):
                if not torch.equal(got, sum_over_nodes([part(t, size, own, g[i]) for g in grads], topology)):
                    return f"step {step}: reduced wrong by {kinds[index]}"
    return ""


def test_groups_that_cross_each_other_share_no_flags(ranks: RankPools) -> None:
    assert ranks(8).run(in_rows_and_columns, 3) == [""] * 8


# --- under FSDP2 ---


@dataclass(frozen=True)
class Setting:
    """A model over nodes. is_large: whether nothing of it crosses nodes packed."""

    build: Callable[[], nn.Module]
    topology: Topology
    loop: Loop = field(default_factory=lambda: Loop(steps=2))
    world_size: int = 4
    wire: torch.dtype | None = None
    is_large: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def _model(policy: Any = MIXED, **options: Any) -> nn.Module:
    return sharded(seeded(Model, blocks=2, **options), line(dist.get_world_size()), policy)


def _columns() -> nn.Module:
    def placement(param: nn.Parameter) -> Shard:
        return Shard(1) if param.ndim == 2 and param.shape[1] % 4 == 0 else Shard(0)

    return sharded(seeded(Model, blocks=2, hidden=16), line(dist.get_world_size()), shard_placement_fn=placement)


def _hybrid(outer: int, inner: int) -> nn.Module:
    return sharded(seeded(Model, blocks=2), grid(outer, inner))


SETTINGS: dict[str, Setting] = {
    "plain": Setting(_model, Topology(2, 2)),
    "fp32": Setting(partial(_model, FULL), Topology(2, 2)),
    "fp32, 3 nodes": Setting(partial(_model, FULL), Topology(3, 2), world_size=6),
    "plain, large": Setting(_model, Topology(2, 2), is_large=True),
    "plain, large, a node a rank": Setting(_model, Topology(4, 1), is_large=True),
    "fp32, a node a rank": Setting(partial(_model, FULL), Topology(4, 1)),
    "plain, a node a rank": Setting(_model, Topology(4, 1)),
    "plain, more nodes": Setting(_model, Topology(4, 2), world_size=8),
    "plain, larger nodes": Setting(_model, Topology(2, 4), world_size=8),
    "plain, five nodes": Setting(_model, Topology(5, 1), world_size=5),
    "uneven": Setting(partial(_model, hidden=5, width=3), Topology(3, 2), world_size=6),
    "bf16 wire": Setting(_model, Topology(2, 2), wire=torch.bfloat16),
    "bf16 wire, fp32 gradients": Setting(partial(_model, FULL), Topology(2, 2), wire=torch.bfloat16),
    "bf16 wire, fp32 gradients, a node a rank": Setting(partial(_model, FULL), Topology(4, 1), wire=torch.bfloat16),
    "bf16 reduce": Setting(partial(_model, BF16), Topology(2, 2)),
    "fp16 reduce with pre-division": Setting(partial(_model, FP16), Topology(2, 2)),
    "fp16 reduce with pre-division, a node a rank": Setting(partial(_model, FP16), Topology(4, 1)),
    "accumulation without sync": Setting(_model, Topology(2, 2), Loop(steps=2, micro=2, sync=False)),
    "cast shards kept": Setting(_model, Topology(2, 2), options={"keep_cast": True, "reuse": False}),
    "Shard(1)": Setting(_columns, Topology(2, 2)),
    "HSDP": Setting(partial(_hybrid, 2, 2), Topology(2, 1)),
    "HSDP, more ranks": Setting(partial(_hybrid, 2, 4), Topology(2, 2), world_size=8),
}


def train_over_nodes(rank: int, world: int, name: str) -> tuple[str, list[Row], str, tuple[Topology, ...]]:
    """Where TIDE over nodes differs from stock FSDP2 with a reduction in node order; its report, and that as text."""
    setting = SETTINGS[name]
    nodes = setting.topology.nodes
    reference = setting.build()
    reduce_in_rank_order(reference, nodes, setting.wire)
    expected = train(reference, rank, setting.loop)
    model = setting.build()
    chunk = 512 * (setting.topology.gpus_per_node + 1)
    options: dict[str, Any] = {"wire_dtype": setting.wire, "ring_chunk_nbytes": chunk, "ring_depth": 2}
    with without_packing() if setting.is_large else nullcontext():
        tide_triton.attach(model, nodes=nodes, timeout_s=30, **options, **setting.options)
    got = train(model, rank, setting.loop)
    report = tide_triton.report(model, quiet=True)
    assert 0 < report.ring_nbytes <= 2 * chunk
    tide_triton.detach(model)
    return difference(expected, got), rows_of(report), str(report), report.topologies


@pytest.mark.parametrize("name", SETTINGS)
def test_training_over_nodes_equals_fsdp2_with_a_reduction_in_node_order(ranks: RankPools, name: str) -> None:
    setting = SETTINGS[name]
    for differing, rows, text, topologies in ranks(setting.world_size).run(train_over_nodes, name):
        assert not differing
        assert {(row.gather, row.reduce, row.why) for row in rows} == {("zero-copy", "zero-copy", "")}
        # What crosses nodes packed, and nothing else.
        copied = sum(row.layout_copy_bytes for row in rows)
        assert copied == 0 if setting.is_large else 0 < copied <= 2 * sum(row.wire_bytes for row in rows)
        assert all(row.gathers and row.reduces for row in rows)
        assert ("packed" in text) == (not setting.is_large)
        assert topologies == (setting.topology,)
        title = text.splitlines()[0]
        assert f"{setting.topology.nodes} nodes x {setting.topology.gpus_per_node} GPUs" in title
        assert ("sums rounded to" in title) == (setting.wire is not None)


def orders(rank: int, world: int) -> tuple[str, str]:
    """What the order of nodes and the rounding of what travels change."""
    traces = []
    for nodes, wire in ((1, None), (2, None), (2, torch.bfloat16)):
        # fp32 gradients: sums of few bf16 values are mostly exact in fp32, in whatever order.
        model = _model(FULL)
        reduce_in_rank_order(model, nodes, wire)
        traces.append(train(model, rank, Loop(steps=1)))
    return difference(traces[0], traces[1]), difference(traces[1], traces[2])


def test_the_comparison_sees_the_order_of_nodes_and_the_rounding_of_partials(ranks: RankPools) -> None:
    found = ranks(4).run(orders)
    assert any(order for order, _ in found)
    assert all(rounding for _, rounding in found)


def one_node(rank: int, world: int) -> tuple[str, str]:
    """With one node, both options change nothing."""
    loop, traces = Loop(steps=1), []
    for options in ({}, {"nodes": 1, "wire_dtype": torch.bfloat16}):
        model = _model()
        tide_triton.attach(model, timeout_s=30, **options)
        traces.append(train(model, rank, loop))
        text = str(tide_triton.report(model, quiet=True))
        tide_triton.detach(model)
    return difference(*traces), text


def test_one_node_is_as_without(ranks: RankPools) -> None:
    for differing, text in ranks(4).run(one_node):
        assert not differing
        assert "nodes x" not in text


def gather_until_killed(rank: int, world: int) -> None:
    spec = GroupSpec(world, (TensorSpec("w", (64, 64), "bfloat16"),))
    with opened(spec, Topology(3, 2), 768, 1) as both:
        own = torch.zeros(shard(spec.tensors[0], world, rank).shape)
        gradient = torch.zeros(64, 64)
        while True:
            both.all_gather([own])
            both.reduce_scatter([gradient])


def test_a_rank_that_dies_is_named_by_all_others_with_the_phase() -> None:
    with fresh_ranks(6) as group:
        group.start(gather_until_killed)
        time.sleep(2.5)
        os.kill(group.processes[3].pid, signal.SIGKILL)
        outcomes = group.finish(timeout_s=20)
    for outcome in (*outcomes[:3], *outcomes[4:]):
        assert isinstance(outcome, (PeerLostError, AbortedError))
        assert "rank 3 (pid" in str(outcome)
        assert "all-gather of Collectives: " in str(outcome) or "reduce-scatter of Collectives: " in str(outcome)


def refused(rank: int, world: int) -> list[str]:
    messages = []
    for options in (
        {"nodes": 3},
        {"nodes": 0},
        {"nodes": 2 if rank else 4},
        {"nodes": 3 if rank else 2},
        {"nodes": 2, "wire_dtype": torch.int32},
        {"nodes": 2, "early_reduce": True, "grads_in_slots": True},
        {"nodes": 2, "early_reduce": True},
    ):
        model = _model()
        try:
            tide_triton.attach(model, timeout_s=30, **options)
        except (AttachError, MismatchError) as error:
            messages.append(str(error))
    return messages


def test_nodes_that_cannot_be_are_refused_on_every_rank(ranks: RankPools) -> None:
    for rank, messages in enumerate(ranks(4).run(refused)):
        assert messages[0].startswith("nodes=3 does not divide the 4 ranks that group '(root)' is sharded over; pass")
        assert messages[1] == "nodes must be an integer >= 1, or None for one node; got 0"
        assert messages[2].startswith("ranks disagree on attach(nodes=...): 4 on ranks [0]; 2 on ranks [1, 2, 3]")
        assert ("" if rank else "attach failed on rank 1: ") + "nodes=3 does not divide" in messages[3]
        assert messages[4].startswith("wire_dtype must be one of torch.float32")
        assert messages[5].startswith("early_reduce=True works on one node only, got nodes=2: over several, gradients")
        assert messages[5].endswith("pass early_reduce=False, and grads_in_slots=False")
        assert messages[6].endswith("pass early_reduce=False")
