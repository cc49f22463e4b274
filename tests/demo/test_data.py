"""The text, its parts and the windows that ranks draw."""

from itertools import islice

import pytest
import torch

from tide_triton.demo.data import START, batches, corpus, part


def test_the_text_is_what_this_python_documents() -> None:
    text = corpus()
    assert len(text) > 200_000
    assert b'The "while" statement is used for repeated execution' in text.replace(b"``while``", b'"while"')
    assert text == corpus()


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_the_ranks_parts_are_the_text_in_order(ranks: int) -> None:
    text = corpus()
    parts = [part(text, rank, ranks) for rank in range(ranks)]
    assert b"".join(parts) == text
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_windows_are_a_start_and_bytes_of_the_ranks_own_part() -> None:
    text = corpus()
    own = part(text, 1, 3)
    for tokens in islice(batches(text, 1, 3, batch=4, context=32, seed=0), 5):
        assert tokens.shape == (4, 33)
        assert tokens.dtype == torch.int64
        for row in tokens.tolist():
            assert row[0] == START
            assert bytes(row[1:]) in own


def test_windows_reach_both_ends_of_a_part_and_never_beyond() -> None:
    windows = {bytes(row[1:]) for row in next(batches(b"abcdef", 0, 1, batch=100, context=4, seed=0)).tolist()}
    assert windows == {b"abcd", b"bcde", b"cdef"}


def test_windows_follow_from_rank_and_seed_alone() -> None:
    def drawn(rank: int, seed: int) -> torch.Tensor:
        return torch.cat(list(islice(batches(corpus(), rank, 2, batch=2, context=16, seed=seed), 3)))

    assert torch.equal(drawn(0, 0), drawn(0, 0))
    assert not torch.equal(drawn(0, 0), drawn(1, 0))
    assert not torch.equal(drawn(0, 0), drawn(0, 1))
