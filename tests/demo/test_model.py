"""The model: hard to shard, causal, and able to learn."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tide_triton.demo.model import GPT, VOCAB, Shape

SMALL = Shape(context=12, width=10, heads=5, hidden=13, layers=2)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_group_has_parameters_that_do_not_divide_by_the_ranks(ranks: int) -> None:
    with torch.device("meta"):
        model = GPT(Shape())
    blocks = list(model.blocks)
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    root = [p for p in model.parameters() if id(p) not in in_blocks]
    for group in (root, *(list(block.parameters()) for block in blocks)):
        uneven = [tuple(p.shape) for p in group if p.shape[0] % ranks]
        assert uneven


def test_no_token_is_told_what_comes_after_it() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    tokens = torch.randint(VOCAB, (2, SMALL.context))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-4)


def test_it_starts_without_a_guess_and_learns_a_sequence() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    tokens = torch.randint(VOCAB, (1, SMALL.context + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.1)
    assert losses[-1] < 0.5


def test_every_parameter_has_a_gradient() -> None:
    model: nn.Module = GPT(SMALL)
    model(torch.randint(VOCAB, (2, SMALL.context))).float().logsumexp(-1).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
