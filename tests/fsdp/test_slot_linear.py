"""Gradients written over the weights they belong to: the same bits, and only where nothing else reads the weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tide_triton
from tests.fsdp.models import BF16, MIXED, Model, line, seeded, sharded
from tests.fsdp.parity import Loop, cross_entropy, difference, train
from tests.ranks import RankPools
from tide_triton.errors import AttachError

OPTIONS: dict[str, Any] = {
    "slot_reuse": False,
    "early_reduce": True,
    "grads_in_slots": True,
    "ring_chunk_nbytes": 6144,
    "timeout_s": 30.0,
}


class Twice(nn.Module):
    """Uses one linear layer twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(torch.relu(self.up(x)))


class Elsewhere(nn.Module):
    """Uses its weight beside the layer, with a gradient of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.up.weight[0] + nn.functional.linear(x, self.up.weight).relu() + self.up(x)


class Detached(nn.Module):
    """Reads its weight beside the layer, without a gradient: nobody sees that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.up.weight.detach()[0]).relu() + self.up(x)


def _of(block: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    def build(world_size: int) -> nn.Module:
        return sharded(seeded(Model, block=lambda width, *_: block(width)), line(world_size))

    return build


def _not_resharded(world_size: int) -> nn.Module:
    return sharded(seeded(Model), line(world_size), reshard_after_forward=False)


def _retaining(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = cross_entropy(model(tokens), targets)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def _adversarial(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A gradient with respect to what is inside the model, and to no weight, before the backward."""
    kept: list[torch.Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        kept.append(output)

    handle = model.embedding.register_forward_hook(keep)
    first = cross_entropy(model(tokens), targets)
    torch.autograd.grad(first, kept)
    handle.remove()
    loss = cross_entropy(model(tokens), targets)
    loss.backward()
    return loss.detach()


def _keep_unsharded(model: nn.Module) -> None:
    model.set_reshard_after_backward(False)


#: How to build the model, how to train it, and whether gradients may stand in slots.
CASES: dict[str, tuple[Callable[[int], nn.Module], Loop, Callable[[nn.Module], Any] | None, bool]] = {
    "plain": (lambda w: sharded(seeded(Model), line(w)), Loop(steps=5), None, True),
    "bf16 reduction": (lambda w: sharded(seeded(Model), line(w), BF16), Loop(steps=5), None, True),
    "checkpointed": (lambda w: sharded(seeded(Model, checkpointed=True), line(w)), Loop(steps=5), None, True),
    "accumulated without sync": (
        lambda w: sharded(seeded(Model), line(w), MIXED),
        Loop(steps=4, micro=2, sync=False),
        None,
        False,
    ),
    "graph retained": (lambda w: sharded(seeded(Model), line(w)), Loop(steps=4, loss=_retaining), None, True),
    "not resharded after backward": (lambda w: sharded(seeded(Model), line(w)), Loop(steps=5), _keep_unsharded, False),
    "a gradient that is no weight's before the backward": (
        lambda w: sharded(seeded(Model), line(w)),
        Loop(steps=6, loss=_adversarial),
        None,
        True,
    ),
    "weights used beside their layers": (_of(Elsewhere), Loop(steps=5), None, False),
    "layers used twice": (_of(Twice), Loop(steps=5), None, False),
}


def _run(rank: int, world_size: int, name: str) -> tuple[str, int]:
    build, loop, after, _ = CASES[name]
    stock = build(world_size)
    if after is not None:
        after(stock)
    expected = train(stock, rank, loop)
    model = build(world_size)
    tide_triton.attach(model, **OPTIONS)
    if after is not None:
        after(model)
    found = train(model, rank, loop)
    report = tide_triton.report(model, quiet=True)
    tide_triton.detach(model)
    assert not any(type(m).__name__ == "SlotLinear" for m in model.modules())
    # The head outside of the blocks is a linear layer too.
    return difference(expected, found), sum(g.reduce.in_slot for g in report.groups if g.name.startswith("blocks"))


@pytest.mark.parametrize("name", CASES)
def test_training_is_stocks_bit_for_bit_and_gradients_stand_in_slots_only_where_they_may(
    ranks: RankPools, name: str
) -> None:
    for departs, in_slot in ranks(2).run(_run, name):
        assert departs == ""
        assert (in_slot > 0) == CASES[name][3]


def _read_elsewhere(rank: int, world_size: int) -> str:
    model = _of(Detached)(world_size)
    tide_triton.attach(model, **OPTIONS)
    try:
        train(model, rank, Loop(steps=5))
    except RuntimeError as error:
        return str(error)
    finally:
        torch.distributed.barrier()
    return ""


def test_a_weight_that_is_read_unseen_is_reported_and_not_misread(ranks: RankPools) -> None:
    for message in ranks(2).run(_read_elsewhere):
        assert "modified by an inplace operation" in message


def _without_early(rank: int, world_size: int) -> str:
    try:
        tide_triton.attach(sharded(seeded(), line(world_size)), grads_in_slots=True, timeout_s=30)
    except AttachError as error:
        return str(error)
    return ""


def test_gradients_in_slots_without_early_reductions_are_refused(ranks: RankPools) -> None:
    for message in ranks(2).run(_without_early):
        assert "grads_in_slots=True needs early_reduce=True" in message
