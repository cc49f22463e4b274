"""Backward gathers nothing where forward's parameters still lie in their slot, and only there."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import tide_triton
from tests.fsdp.models import line, seeded, sharded
from tests.fsdp.parity import Loop, Trace, batch, cross_entropy, difference, gradients, parameters, train
from tests.ranks import RankPools


def _model(world_size: int) -> nn.Module:
    return sharded(seeded(), line(world_size))


def _gathers(rank: int, world_size: int, slots: int | None, reuse: bool) -> tuple[list[int], list[int], str]:
    """Gathers and reused ones per group after three steps, and where the training departs from stock."""
    stock = train(_model(world_size), rank, Loop(steps=3))
    model = _model(world_size)
    tide_triton.attach(model, slots=slots, reuse=reuse, timeout_s=30)
    tide = train(model, rank, Loop(steps=3))
    report = tide_triton.report(model, quiet=True)
    tide_triton.detach(model)
    return (
        [g.gather.calls for g in report.groups],
        [g.gather.reused for g in report.groups],
        difference(stock, tide),
    )


@pytest.mark.parametrize(
    ("slots", "reused"),
    [(None, [0, 0, 0, 3, 3]), (3, [0, 0, 3, 3, 3]), (4, [0, 3, 3, 3, 3])],
)
def test_the_groups_that_forward_gathered_last_are_not_gathered_again(
    ranks: RankPools, slots: int | None, reused: list[int]
) -> None:
    for calls, found, departs in ranks(2).run(_gathers, slots, True):
        assert departs == ""
        assert calls == [3, 6, 6, 6, 6]
        assert found == reused


def test_without_reuse_every_gather_moves(ranks: RankPools) -> None:
    for calls, found, departs in ranks(2).run(_gathers, None, False):
        assert departs == ""
        assert calls == [3, 6, 6, 6, 6]
        assert found == [0] * 5


def _two_losses(model: nn.Module, rank: int) -> Trace:
    """Two forwards, then each one's backward and an optimizer step: the second backward meets changed shards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: Trace = []
    for step in range(2):
        losses = []
        for micro in range(2):
            tokens, targets = batch(rank, step, micro)
            losses.append(cross_entropy(model(tokens), targets))
        for number, loss in enumerate(reversed(losses)):
            loss.backward()
            seen += gradients(model, f"step {step} loss {number} ")
            optimizer.step()
            optimizer.zero_grad()
    return seen + parameters(model)


def _evaluation_between(model: nn.Module, rank: int) -> Trace:
    """An evaluation after each step leaves parameters in the slots that a later step has changed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: Trace = []
    for step in range(3):
        tokens, targets = batch(rank, step)
        cross_entropy(model(tokens), targets).backward()
        seen += gradients(model, f"step {step} ")
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append((f"evaluation {step}", model(tokens).clone()))
    return seen + parameters(model)


def _run(rank: int, world_size: int, name: str) -> tuple[str, int]:
    loop = {"two losses": _two_losses, "evaluation": _evaluation_between}[name]
    stock = loop(_model(world_size), rank)
    model = _model(world_size)
    tide_triton.attach(model, timeout_s=30)
    tide = loop(model, rank)
    report = tide_triton.report(model, quiet=True)
    tide_triton.detach(model)
    return difference(stock, tide), report.gather.reused


@pytest.mark.parametrize("name", ["two losses", "evaluation"])
def test_what_a_step_or_a_reduction_has_changed_is_gathered_again(ranks: RankPools, name: str) -> None:
    for departs, reused in ranks(2).run(_run, name):
        assert departs == ""
        assert reused > 0


def _change_between(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    """What is warned of where parameters change between a forward and its backward, in three steps."""
    model = _model(world_size)
    tide_triton.attach(model, timeout_s=30, **options)
    tokens, targets = batch(rank, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            loss = cross_entropy(model(tokens), targets)
            if step:
                with torch.no_grad():
                    # The root stays unsharded, and autograd would refuse a change of what it has saved.
                    for parameter in (p for p in model.parameters() if isinstance(p, DTensor)):
                        parameter.mul_(1.5)
            loss.backward()
            if step == 0:
                assert not [w for w in caught if "have changed" in str(w.message)]
    tide_triton.detach(model)
    return [str(w.message) for w in caught if "have changed between a forward and its backward" in str(w.message)]


@pytest.mark.parametrize(
    ("options", "warns"), [({}, True), ({"reuse": False, "keep_cast": True}, True), ({"reuse": False}, False)], ids=str
)
def test_parameters_that_change_before_backward_are_warned_of_once_a_group_where_it_keeps_the_old_ones(
    ranks: RankPools, options: dict[str, Any], warns: bool
) -> None:
    for messages in ranks(2).run(_change_between, options):
        assert bool(messages) == warns
        assert len(set(messages)) == len(messages)
