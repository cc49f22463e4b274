"""Early reductions: what goes early, and that what differs from the backwards before is reduced all the same."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import tide_triton
from tests.fsdp.models import line
from tests.ranks import RankPools

OPTIONS: dict[str, Any] = {
    "slot_reuse": False,
    "early_reduce": True,
    "ring_depth": 2,
    "ring_chunk_nbytes": 1024,
    "timeout_s": 20.0,
}


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Parameter(torch.randn(16, 16) * 0.1), nn.Parameter(torch.randn(16, 16) * 0.1)
        self.turned = False
        self.uses_other = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.uses_other:
            return x @ self.inner
        return x @ self.other @ self.inner if self.turned else x @ self.inner @ self.other


class Parent(nn.Module):
    """Its own parameters are used around its child's, in an order that can be turned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(16, 16) * 0.1), nn.Parameter(torch.randn(16, 16) * 0.1)
        self.child = Child()
        self.turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, after = (self.first, self.second) if self.turned else (self.second, self.first)
        return self.child(x @ before) @ after


def _train(rank: int, world_size: int, change: str, options: dict[str, Any] | None) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = Parent()
    model.turned = change == "parents turned" and rank == 1
    model.child.turned = change == "children turned" and rank == 1
    for module in (model.child, model):
        fully_shard(module, mesh=line(world_size))
    if options is not None:
        tide_triton.attach(model, **options)
    gradients = []
    for step in range(7):
        if change == "others unused later":
            model.child.uses_other = step not in (3, 5)
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 2 + rank))
        model(x).square().sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                gradients.append(parameter.grad.to_local().clone())
            parameter.grad = None
    report = None if options is None else tide_triton.report(model, quiet=True)
    if options is not None:
        tide_triton.detach(model)
    return gradients, report


def _equal(rank: int, world_size: int, change: str) -> tuple[bool, list[int], str]:
    stock, _ = _train(rank, world_size, change, None)
    tide, report = _train(rank, world_size, change, OPTIONS)
    same = len(stock) == len(tide) and all(torch.equal(a, b) for a, b in zip(stock, tide, strict=True))
    return same, [group.reduce.early for group in report.groups], report.groups[1].why


def test_gradients_go_early_once_two_backwards_went_alike(ranks: RankPools) -> None:
    for same, early, _ in ranks(2).run(_equal, "nothing"):
        assert same
        assert early == [0, 5]


def test_ranks_that_produce_a_groups_gradients_in_different_orders_still_agree(ranks: RankPools) -> None:
    for same, early, _ in ranks(2).run(_equal, "children turned"):
        assert same
        assert early == [0, 5]


def test_a_parents_gradients_which_come_mixed_with_its_childs_never_go_early(ranks: RankPools) -> None:
    for same, early, _ in ranks(2).run(_equal, "parents turned"):
        assert same
        assert early == [0, 5]


def test_a_parameter_without_a_gradient_where_there_was_one_costs_a_copy_and_no_correctness(ranks: RankPools) -> None:
    for same, early, why in ranks(2).run(_equal, "others unused later"):
        assert same
        assert early[1] > 0
        assert "other parameters had gradients" in why
