"""Text that every Python carries, cut into one shard a rank.

topics of pydoc, in sorted order, as bytes
|--- rank 0 ---|--- rank 1 ---|--- rank 2 ---|        each rank draws its windows from its own part alone
"""

from collections.abc import Iterator

import torch

#: What the demo trains on, as the results name it.
NAME = "pydoc_data.topics"

#: The token in front of every window, beyond the 256 bytes: the model predicts the first byte from it.
START = 256


def corpus() -> bytes:
    """The texts of pydoc's topics, concatenated in the order of their names."""
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics)).encode()


def part(text: bytes, rank: int, ranks: int) -> bytes:
    """Rank `rank`'s part of `text`: `ranks` consecutive parts that differ by at most one byte in length."""
    return text[len(text) * rank // ranks : len(text) * (rank + 1) // ranks]


def batches(text: bytes, rank: int, ranks: int, *, batch: int, context: int, seed: int) -> Iterator[torch.Tensor]:
    """Random windows of rank `rank`'s part of `text`, without end and the same ones at every call.

    Yields tokens of shape (batch, context + 1), int64, each row a START and `context` bytes: a model reads all but the
    last of them and predicts all but the first.
    """
    own = torch.frombuffer(bytearray(part(text, rank, ranks)), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed * ranks + rank)
    start = torch.full((batch, 1), START)
    while True:
        first = torch.randint(len(own) - context + 1, (batch, 1), generator=generator)
        yield torch.cat([start, own[first + torch.arange(context)]], dim=1)
