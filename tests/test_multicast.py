"""Gathers that are multicast and sums by a switch, on the host transport with an emulated one: exact, or said why."""

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPools
from tests.test_collectives import gathered_wrong, part, random_spec, whole
from tide_triton import Collectives
from tide_triton.all_gather import AllGather
from tide_triton.errors import MismatchError
from tide_triton.kernels import multimem_reference
from tide_triton.layouts import GroupSpec, LandingLayout, SpecError, SwitchLayout, TensorSpec, Topology, shard
from tide_triton.reducers import Reduction
from tide_triton.switch_reduce import SwitchReduceScatter
from tide_triton.traffic import Traffic
from tide_triton.transports import Transport
from tide_triton.transports.host import HostTransport
from tide_triton.transports.rendezvous import Rendezvous
from tide_triton.views import DTYPES
from tide_triton.windows import Slot, SlotPool

BF16, FP32 = torch.bfloat16, torch.float32
LARGE = 1 << 30


def opened(spec: GroupSpec, **options: Any) -> Collectives:
    return Collectives(dist.group.WORLD, spec, **{"transport": "host_switch", "timeout_s": 30, **options})


# --- all-gathers ---


def sources_of(spec: GroupSpec, seed: int) -> list[torch.Tensor]:
    return [whole(tensor, 100 * seed + index) for index, tensor in enumerate(spec.tensors)]


def shards_of(spec: GroupSpec, rank: int, sources: Sequence[torch.Tensor], *, cast: bool) -> list[torch.Tensor]:
    """This rank's shards; with `cast` in fp32, to be cast on the way, else of the slot's dtypes."""
    parts = [part(t, spec.world_size, rank, s) for t, s in zip(spec.tensors, sources, strict=True)]
    return parts if cast else [s.to(DTYPES[t.dtype]) for t, s in zip(spec.tensors, parts, strict=True)]


def gather(rank: int, world: int, seed: int, multicast_nbytes: int) -> str | tuple[int, int, int, int]:
    """Gathers of casts, and of shards as they are, in turns through one poisoned slot; then what was sent, how."""
    spec = random_spec(world, seed)
    shards = [shard(tensor, world, rank) for tensor in spec.tensors]
    in_rows = sum(own.nbytes for own in shards if own.region.rows > 1)
    in_one_row = sum(own.nbytes for own in shards) - in_rows
    once = in_one_row if in_one_row <= multicast_nbytes else 0
    to_each = in_rows + in_one_row - once
    with opened(spec, multicast_nbytes=multicast_nbytes) as collectives:
        for turn in range(4):
            sources = sources_of(spec, seed + turn)
            if wrong := gathered_wrong(collectives, shards_of(spec, rank, sources, cast=turn % 2 == 0), sources):
                return f"turn {turn}: {wrong}"
        found = collectives.gather_traffic
        if (found.multicast_bytes, found.wire_bytes) != (4 * once, 4 * (once + to_each * (world - 1))):
            return f"{once} and {to_each} bytes a turn, and {found} of {spec}"
        why = f"the smallest piece has {in_one_row} bytes" if in_one_row else "every shard is of several rows"
        remarked = [count for remark, count in found.remarks.items() if why in remark]
        if remarked != ([4] if to_each and not once else []):
            return f"{found.remarks} of {spec}"
    return int(once > 0), int(to_each > 0), int(in_one_row > multicast_nbytes), int(once > 0 and to_each > 0)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_layouts_are_gathered_bit_for_bit_whichever_way_pieces_go(ranks: RankPools, world: int) -> None:
    ways = [0, 0, 0, 0]
    for seed in range(10):
        for outcome in ranks(world).run(gather, seed, (60, 400, LARGE)[seed % 3]):
            assert not isinstance(outcome, str), outcome
            ways = [before + more for before, more in zip(ways, outcome, strict=True)]
    assert all(ways), f"multicast, to peers, too large, both in one piece: {ways}"


def gather_in_pieces(rank: int, world: int) -> tuple[str, int, int]:
    """A first piece that is multicast, and larger ones that are not, as on a transport where pieces overlap."""
    spec = GroupSpec(world, tuple(TensorSpec(f"w{i}", (64 * 4**i,), "bfloat16") for i in range(4)))
    with opened(spec, multicast_nbytes=512) as collectives:
        collectives._gather = AllGather(collectives._gather.layout, rank, smallest_piece=100, multicast_nbytes=512)
        for turn in range(3):
            sources = sources_of(spec, turn)
            if wrong := gathered_wrong(collectives, shards_of(spec, rank, sources, cast=turn == 1), sources):
                return f"turn {turn}: {wrong}", 0, 0
        found = collectives.gather_traffic
        return "", found.multicast_bytes, found.wire_bytes


def test_small_pieces_of_a_gather_are_multicast_and_large_ones_are_not(ranks: RankPools) -> None:
    # In pieces of 32 + 128, 512 and 2048 bytes a rank. What is multicast counts once, what goes to peers three times.
    multicast, wire = 160 + 512, 160 + 512 + 3 * 2048
    assert ranks(4).run(gather_in_pieces) == [("", 3 * multicast, 3 * wire)] * 4


def hurry(rank: int, world: int, seed: int) -> str:
    """Many gathers with ranks that are slow at random moments: who puts before a credit overwrites what is read."""
    spec = random_spec(world, 3)
    delay = random.Random(seed * 31 + rank)
    with opened(spec, multicast_nbytes=LARGE) as collectives:
        for turn in range(60):
            if delay.random() < 0.2:
                time.sleep(delay.random() * 0.01)
            sources = sources_of(spec, turn)
            gathered = collectives.all_gather(shards_of(spec, rank, sources, cast=turn % 2 == 0))
            if delay.random() < 0.2:
                time.sleep(delay.random() * 0.01)
            for tensor, source, got in zip(spec.tensors, sources, gathered, strict=True):
                if not torch.equal(got, source.to(DTYPES[tensor.dtype])):
                    return f"turn {turn}: {tensor}"
    return ""


def test_slow_ranks_are_not_overwritten(ranks: RankPools) -> None:
    assert ranks(3).run(hurry, 1) == [""] * 3


def fall_back(rank: int, world: int) -> tuple[str, int, str, int]:
    """On a transport that does not multicast, both options leave everything as it is."""
    spec = random_spec(world, 4)
    gradients = [whole(t, 9, BF16) for t in spec.tensors]
    with pytest.warns(UserWarning, match="the transport 'host' does not multicast"):
        collectives = opened(spec, transport="host", multicast_nbytes=LARGE, switch_sums=True)
    with collectives:
        sources = sources_of(spec, 1)
        wrong = gathered_wrong(collectives, shards_of(spec, rank, sources, cast=True), sources)
        sums = collectives.reduce_scatter(gradients)
        for tensor, gradient, got in zip(spec.tensors, gradients, sums, strict=True):
            if not torch.equal(got, part(tensor, world, rank, gradient).float()):
                wrong += f"{tensor} reduced wrong"
        traffic = collectives.reduce_traffic
        return wrong, collectives.gather_traffic.multicast_bytes, str(dict(traffic.remarks)), traffic.by_switch


def test_without_a_switch_everything_goes_as_before_and_a_warning_says_why(ranks: RankPools) -> None:
    assert ranks(2).run(fall_back) == [("", 0, "{}", 0)] * 2


# --- options ---


def misuse(rank: int, world: int) -> list[str]:
    spec = GroupSpec(world, (TensorSpec("w", (4, 2), "bfloat16"),))
    told = []
    options: list[dict[str, Any]] = [
        {"multicast_nbytes": 0},
        {"multicast_nbytes": True},
        {"multicast_nbytes": 2.0},
        {"switch_sums": 1},
        {"multicast_nbytes": 8, "topology": Topology(2, 1)},
        {"switch_sums": True, "topology": Topology(2, 1)},
        {"multicast_nbytes": 8 + rank},
        {"switch_sums": rank == 0},
    ]
    for wrong in options:
        try:
            opened(spec, **wrong).close()
        except (SpecError, MismatchError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_wrong_options_are_named_with_their_value_and_the_way_out(ranks: RankPools) -> None:
    for told in ranks(2).run(misuse):
        assert len(told) == 8
        for text, value in zip(told, ("got 0", "got True", "got 2.0"), strict=False):
            assert text.startswith("SpecError: multicast_nbytes must be an integer >= 1")
            assert text.endswith(value)
        assert told[3] == "SpecError: switch_sums must be True or False, got 1"
        assert all("one node only" in text for text in told[4:6])
        assert told[6].startswith("MismatchError: ranks disagree on multicast_nbytes: 8 on ranks [0]; 9 on ranks [1]")
        assert told[7].startswith("MismatchError: ranks disagree on switch_sums: True on ranks [0]; False on ranks [1]")


# --- sums by the switch ---


def gradients_of(spec: GroupSpec, seed: int, rank: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    return [whole(t, 7000 * rank + 100 * seed + index, dtype) for index, t in enumerate(spec.tensors)]


def switch_sum(spec: GroupSpec, seed: int, index: int, owner: int, into: torch.Tensor, divisor: float) -> torch.Tensor:
    """What the switch must give of tensor `index`, into memory like `into`."""
    world, tensor = spec.world_size, spec.tensors[index]
    parts = [part(tensor, world, owner, gradients_of(spec, seed, rank)[index]) for rank in range(world)]
    expected = torch.empty_like(into)
    multimem_reference([parts], [expected], divisor=divisor)
    return expected


def reduce(rank: int, world: int, seed: int) -> str | int:
    """Sums and averages, as fp32 and bf16, against the twin, with gathers in between; gradients of fp32 go as ever."""
    spec = random_spec(world, seed)
    differ = 0
    with opened(spec, switch_sums=True, multicast_nbytes=LARGE if seed % 2 else None) as collectives:
        assert collectives._sums is not None
        for turn, (average, dtype) in enumerate(((True, FP32), (False, FP32), (True, BF16), (False, BF16))):
            collectives._sums.window.memory.fill_(0xFF)
            own = gradients_of(spec, seed + turn, rank)
            before = [one.clone() for one in own]
            sources = sources_of(spec, seed + turn)
            gathered = collectives.all_gather(shards_of(spec, rank, sources, cast=True))
            sums = collectives.reduce_scatter(own, average=average, dtype=dtype)
            for index, got in enumerate(sums):
                divisor = float(world) if average else 1.0
                expected = switch_sum(spec, seed + turn, index, rank, got, divisor)
                if not torch.equal(got, expected):
                    return f"turn {turn}: {spec.tensors[index]} summed wrong"
                if not torch.equal(gathered[index], sources[index].to(gathered[index].dtype)):
                    return f"turn {turn}: {spec.tensors[index]} was overwritten"
                exact = sum(
                    part(spec.tensors[index], world, rank, gradients_of(spec, seed + turn, r)[index]).float()
                    for r in range(world)
                )
                differ += not torch.equal(got.float(), torch.as_tensor(exact) / divisor)
            if not all(map(torch.equal, own, before)):
                return "gradients were changed"
        traffic = collectives.reduce_traffic
        copied = 4 * sum(t.numel * 2 for t in spec.tensors)
        sent = copied - 4 * sum(shard(t, world, rank).numel * 2 for t in spec.tensors)
        if (traffic.by_switch, traffic.wire_bytes, traffic.layout_copy_bytes) != (4, sent, copied):
            return f"{traffic}"
        wide = gradients_of(spec, seed, rank, FP32)
        total = [part(t, world, rank, gradients_of(spec, seed, 0, FP32)[i]) for i, t in enumerate(spec.tensors)]
        for peer in range(1, world):
            more = gradients_of(spec, seed, peer, FP32)
            total = [
                before + part(t, world, rank, more[i])
                for i, (t, before) in enumerate(zip(spec.tensors, total, strict=True))
            ]
        if not all(map(torch.equal, collectives.reduce_scatter(wide, average=False), total)):
            return "fp32 gradients summed wrong"
        remarks = dict(traffic.remarks)
        if remarks != {"not summed by the switch: gradients are float32, and a switch sums bfloat16": 1}:
            return str(remarks)
    return differ


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_switch_gives_what_its_twin_gives_bit_for_bit(ranks: RankPools, world: int) -> None:
    rounded = 0
    for seed in range(6):
        for outcome in ranks(world).run(reduce, seed):
            assert not isinstance(outcome, str), outcome
            rounded += outcome
    # Or the twin would not tell a switch from sums in fp32.
    assert rounded


def pool_with_slot(nbytes: int) -> tuple[SlotPool, Slot]:
    transport: Transport = HostTransport(Rendezvous(dist.group.WORLD, 30.0), 30.0, emulate_switch=True)
    pool = SlotPool(transport)
    return pool, pool.add(nbytes, "0", "a slot")


def reduce_into_odd_places(rank: int, world: int) -> str:
    """Outputs side by side in one buffer, as FSDP2 has them: on no 16 bytes, with padding, and nothing around them."""
    spec = GroupSpec(
        world,
        tuple(TensorSpec(f"w{i}", s, "bfloat16", d) for i, (s, d) in enumerate((((5,), 0), ((3, 7), 0), ((2, 9), 1)))),
    )
    reducer = SwitchReduceScatter(LandingLayout(spec, "bfloat16"), rank)
    pool, slot = pool_with_slot(reducer.layout.nbytes)
    # In another order than the layout's, and not all tensors.
    for order in ((0, 1, 2), (2, 0), (1,), (2, 1, 0)):
        slot.window.memory.fill_(0xFF)
        sizes = [reducer.padded_numels[index] for index in order]
        flat = torch.full((1 + sum(sizes) + 1,), float("nan"))
        outputs = list(flat[1:-1].split(sizes))
        own = gradients_of(spec, 1, rank)
        traffic = Traffic()
        reducer(
            slot, [(index, own[index]) for index in order], outputs, Reduction(FP32, divisor=3.0), "a group", traffic
        )
        for index, output in zip(order, outputs, strict=True):
            if not torch.equal(output, switch_sum(spec, 1, index, rank, output, 3.0)):
                return f"{order}: {spec.tensors[index]}"
        if not (bool(flat[0].isnan()) and bool(flat[-1].isnan())) or traffic.by_switch != 1:
            return f"{order}: {flat} {traffic}"
    pool.close()
    return ""


@pytest.mark.parametrize("world", [2, 3])
def test_outputs_may_start_anywhere_and_end_in_zeros(ranks: RankPools, world: int) -> None:
    assert ranks(world).run(reduce_into_odd_places) == [""] * world


REFUSED = {
    "scaled": (Reduction(FP32, premultiply=0.5), BF16, FP32, "contributions are scaled before the sum"),
    "fp16": (Reduction(torch.float16), BF16, FP32, "contributions are rounded to torch.float16 before the sum"),
    "fp64": (
        Reduction(torch.float64),
        BF16,
        torch.float64,
        "contributions are rounded to torch.float64 before the sum",
    ),
    "fp64 out": (Reduction(), BF16, torch.float64, "sums are torch.float64, and a switch gives bfloat16 or float32"),
    "fp32 in": (Reduction(FP32), FP32, FP32, "gradients are float32, and a switch sums bfloat16"),
    "small": (Reduction(FP32), BF16, FP32, "gradients do not fit into the slot"),
}


def reduce_otherwise(rank: int, world: int, name: str) -> tuple[float, dict[str, int], int]:
    reduction, dtype, into, _ = REFUSED[name]
    # 84 bytes an owner, of which three fit into 256 where 96 each, as a switch needs them, do not.
    spec = GroupSpec(world, tuple(TensorSpec(f"w{i}", (42 * world,), "bfloat16") for i in range(3)))
    landing = LandingLayout(spec, "bfloat16" if dtype == BF16 else "float32")
    reducer = SwitchReduceScatter(landing, rank)
    small = landing.nbytes
    pool, slot = pool_with_slot(small if name == "small" else max(small, SwitchLayout(spec).nbytes))
    outputs = [torch.empty(42, dtype=into) for _ in spec.tensors]
    traffic = Traffic()
    gradients = [(i, torch.full((42 * world,), 2.0 + rank, dtype=dtype)) for i in range(len(spec.tensors))]
    reducer(slot, gradients, outputs, reduction, "a group", traffic)
    pool.close()
    values = {float(value) for output in outputs for value in output}
    assert len(values) == 1
    return values.pop(), dict(traffic.remarks), traffic.by_switch


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_switch_cannot_sum_goes_by_puts_and_says_so(ranks: RankPools, name: str) -> None:
    total = 4.5 if name == "scaled" else 9.0
    remarks = {f"not summed by the switch: {REFUSED[name][3]}": 1}
    assert ranks(3).run(reduce_otherwise, name) == [(total, remarks, 0)] * 3
