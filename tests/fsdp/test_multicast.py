"""Training with a switch between the ranks: multicast gathers change no bit, sums by the switch what they must."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tide_triton
from tests.fsdp.models import FULL, MIXED, Model, line, seeded, sharded
from tests.fsdp.parity import TIMEOUT_S, Loop, Outcome, compare_all, difference, train
from tests.ranks import RankPools
from tide_triton.errors import AttachError

SWITCH: dict[str, Any] = {"transport": "host_switch"}

#: HALF: bf16 gradients that are reduced in fp16, which FSDP2 divides by before it sums.
POLICIES = {
    "MIXED": MIXED,
    "FULL": FULL,
    "HALF": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16),
}


def build(world: int, policy: MixedPrecisionPolicy = MIXED) -> nn.Module:
    return sharded(seeded(Model), line(world), policy)


def train_with_multicast(rank: int, world: int) -> list[Outcome]:
    variants = [
        {**SWITCH, "multicast_nbytes": nbytes, **more}
        for nbytes, more in ((1 << 30, {}), (1 << 30, {"keep_cast": True}), (300, {"early_reduce": True}))
    ]
    return compare_all(lambda: build(world), rank, Loop(steps=2), variants, reference=world > 2)


@pytest.mark.parametrize("world", [2, 4])
def test_training_with_multicast_gathers_is_stocks_bit_for_bit(ranks: RankPools, world: int) -> None:
    for outcomes in ranks(world).run(train_with_multicast):
        for outcome in outcomes:
            assert not (outcome.from_reference if world > 2 else outcome.from_stock)
            assert all(row.gather == row.reduce == "zero-copy" and not row.layout_copy_bytes for row in outcome.rows)


def report_of(rank: int, world: int, options: dict[str, Any], policy: str = "MIXED") -> tuple[Any, ...]:
    """One step under TIDE: what the report counts and says."""
    model = build(world, POLICIES[policy])
    tide_triton.attach(model, timeout_s=TIMEOUT_S, **options)
    train(model, rank, Loop(steps=1))
    report = tide_triton.report(model, quiet=True)
    tide_triton.detach(model)
    reduce, gather = report.reduce, report.gather
    return gather.multicast_bytes, reduce.by_switch, reduce.calls, report.why_transport, str(report)


def test_the_report_counts_what_was_multicast_and_summed_by_the_switch(ranks: RankPools) -> None:
    options = {**SWITCH, "multicast_nbytes": 1 << 30, "switch_sums": True}
    for multicast, summed, reductions, why, text in ranks(2).run(report_of, options):
        assert multicast > 0
        assert 0 < summed == reductions
        assert why.endswith("with multicast")
        assert "MB multicast" in text
        assert "by the switch" in text


def sum_in_a_tight_slot(rank: int, world: int) -> tuple[int, int, int]:
    """84 bytes of a weight a rank: three fit into 256, where parts of 96, as the switch needs them, take 512."""
    torch.manual_seed(1)
    model = fully_shard(nn.Sequential(nn.Linear(42, 3, bias=False)), mesh=line(world), mp_policy=MIXED)
    tide_triton.attach(model, timeout_s=TIMEOUT_S, **SWITCH, switch_sums=True)
    model(torch.ones(2, 42)).sum().backward()
    report = tide_triton.report(model, quiet=True)
    tide_triton.detach(model)
    return report.reduce.by_switch, report.reduce.calls, max(group.slot_nbytes for group in report.groups)


def test_slots_are_as_large_as_sums_by_the_switch_need_them(ranks: RankPools) -> None:
    assert ranks(3).run(sum_in_a_tight_slot) == [(1, 1, 512)] * 3


def test_the_report_says_why_there_was_no_multicast(ranks: RankPools) -> None:
    options = {"transport": "host", "multicast_nbytes": 1 << 30, "switch_sums": True}
    for multicast, summed, _, why, _ in ranks(2).run(report_of, options):
        assert multicast == summed == 0
        assert why.endswith("no multicast: the transport 'host' does not multicast")


def test_by_default_nothing_is_multicast_where_it_could_be(ranks: RankPools) -> None:
    for multicast, summed, _, why, _ in ranks(2).run(report_of, SWITCH):
        assert multicast == summed == 0
        assert "multicast" not in why


@pytest.mark.parametrize(
    ("policy", "reason"),
    [("FULL", "gradients are float32"), ("HALF", "contributions are scaled before the sum")],
)
def test_the_report_says_what_the_switch_did_not_sum(ranks: RankPools, policy: str, reason: str) -> None:
    for _, summed, reductions, _, text in ranks(2).run(report_of, {**SWITCH, "switch_sums": True}, policy):
        assert summed == 0 < reductions
        assert f"not summed by the switch: {reason}" in " ".join(text.replace("│", " ").split())


def train_with_switch_sums(rank: int, world: int) -> tuple[list[Outcome], str]:
    """Against stock; and against itself, as the emulated switch repeats."""
    variants = [{**SWITCH, "switch_sums": True}, {**SWITCH, "switch_sums": True, "multicast_nbytes": 1 << 30}]

    def run(options: dict[str, Any]) -> Any:
        model = build(world)
        tide_triton.attach(model, timeout_s=TIMEOUT_S, **options)
        trace = train(model, rank, Loop(steps=2))
        tide_triton.detach(model)
        return trace

    return compare_all(lambda: build(world), rank, Loop(steps=2), variants), difference(*map(run, variants))


@pytest.mark.parametrize("world", [2, 3])
def test_sums_by_the_switch_train_within_their_bound_and_not_bit_for_bit(ranks: RankPools, world: int) -> None:
    for outcomes, among_each_other in ranks(world).run(train_with_switch_sums):
        assert not among_each_other
        for outcome in outcomes:
            # Of the sum, 2^-8, and what rank-ordered sums may be off by themselves; `distance` is of the largest value.
            assert 0 < outcome.distance < 2**-7
            assert outcome.from_stock
            assert all(row.gather == row.reduce == "zero-copy" for row in outcome.rows)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "zero bytes": ({"multicast_nbytes": 0}, "multicast_nbytes must be an integer >= 1 .* got 0"),
    "text": ({"multicast_nbytes": "1MB"}, "multicast_nbytes must be an integer >= 1 .* got '1MB'"),
    "not a bool": ({"switch_sums": 1}, "switch_sums must be True or False, got 1"),
    "many nodes": ({"multicast_nbytes": 8, "nodes": 2}, "multicast_nbytes=8 works on one node only, got nodes=2"),
    "sums over many nodes": ({"switch_sums": True, "nodes": 2}, "switch_sums=True works on one node only, got nodes=2"),
    "early": ({"switch_sums": True, "early_reduce": True}, "switch_sums=True needs early_reduce=False"),
    "no slots": ({"switch_sums": True, "slot_reuse": False}, "switch_sums=True needs slot_reuse=True"),
}


def attach_wrongly(rank: int, world: int, name: str) -> str:
    try:
        tide_triton.attach(build(world), timeout_s=TIMEOUT_S, **SWITCH, **WRONG[name][0])
    except AttachError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", WRONG)
def test_options_that_cannot_be_are_refused_with_the_way_out(ranks: RankPools, name: str) -> None:
    for message in ranks(2).run(attach_wrongly, name):
        assert re.search(WRONG[name][1], message)


def attach_differently(rank: int, world: int) -> str:
    try:
        tide_triton.attach(build(world), timeout_s=TIMEOUT_S, **SWITCH, multicast_nbytes=100 + rank)
    except tide_triton.errors.MismatchError as error:
        return str(error)
    return ""


def test_ranks_must_agree_on_what_is_multicast(ranks: RankPools) -> None:
    for message in ranks(2).run(attach_differently):
        assert "attach(multicast_nbytes=...)" in message
        assert "100 on ranks [0]; 101 on ranks [1]" in message
