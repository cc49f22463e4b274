"""Made-up runs, and the results of two ranks that had them."""

from tide_triton.demo.results import Corpus, Results, Run, Way, combine
from tide_triton.traffic import Traffic


def _traffic(zero_copy: int, fallback: int, wire_bytes: int, layout_copy_bytes: int) -> Traffic:
    return Traffic(zero_copy, fallback, wire_bytes, layout_copy_bytes)


def made_up(rank: int, way: Way) -> Run:
    """A run of two steps on `rank`."""
    counts = {
        Way.STOCK: (_traffic(0, 10, 100, 70), _traffic(0, 5, 200, 30), 1000),
        Way.TIDE: (_traffic(10, 0, 99, 0), _traffic(4, 1, 90, 3), 700),
        Way.REFERENCE: (Traffic(), Traffic(), 0),
    }
    gather, reduce, buffer_nbytes = counts[way]
    return Run(
        losses=(5.0 + rank, 4.0 + rank),
        digests=(f"{rank} a", f"{rank} b", f"{rank} end"),
        seconds=1.0 + rank,
        gather=gather,
        reduce=reduce,
        buffer_nbytes=buffer_nbytes,
        transport="host" if way is Way.TIDE else "",
        parameters=42,
    )


def combined(**changed: Run) -> Results:
    """Of two ranks; `changed` replaces runs of rank 1, by their way."""
    by_rank = [{way: made_up(rank, way) for way in Way} for rank in range(2)]
    by_rank[1].update({Way(way): run for way, run in changed.items()})
    return combine(by_rank, Corpus(name="a text", bytes=123), {"torch": "2"})
