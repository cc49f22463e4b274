"""What the trainings came to: per rank as they ran, and all together as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from tide_triton.traffic import Traffic


class Way(StrEnum):
    """Through which collectives a model is trained."""

    STOCK = "stock"
    TIDE = "tide"
    REFERENCE = "reference"


@dataclass(frozen=True)
class Run:
    """One training on one rank.

    losses: this rank's mean cross-entropy, one a step.
    digests: one a step, of every gradient shard; then one of the final parameters and optimizer state.
    seconds: spent in the steps but for the first, or in the first where it is the only one.
    gather, reduce, buffer_nbytes, transport: what was counted, 0 and "" in the reference, which is not metered.
    parameters: of the whole model.
    """

    losses: tuple[float, ...]
    digests: tuple[str, ...]
    seconds: float
    gather: Traffic
    reduce: Traffic
    buffer_nbytes: int
    transport: str
    parameters: int


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Corpus(_Data):
    """What the model was trained on."""

    name: str
    bytes: int


class Losses(_Data):
    """The loss of every step, in each of the ways."""

    stock: tuple[float, ...]
    tide: tuple[float, ...]
    reference: tuple[float, ...]


class Collective(_Data):
    """TIDE's counts of one collective, summed over the ranks."""

    calls: int
    zero_copy: int
    fallback: int
    wire_bytes: int
    layout_copy_bytes: int


class StockCounts(_Data):
    """Stock FSDP2's counts, summed over the ranks; of both collectives where none is named."""

    wire_bytes: int
    layout_copy_bytes: int
    all_gather_wire_bytes: int
    reduce_scatter_wire_bytes: int
    all_gather_calls: int
    reduce_scatter_calls: int


class Bytes(_Data):
    """Bytes with stock FSDP2 and with TIDE, summed over the ranks."""

    stock: int
    tide: int


class Seconds(_Data):
    """Of the slowest rank in the training loop, without the first step (unless it is the only one)."""

    stock: float
    tide: float


class Results(_Data):
    """Everything `tide demo` found, with the keys of its JSON.

    grads_match_reference, grads_match_stock: whether all gradient shards of every step, and the parameter and optimizer
    shards in the end, are bitwise those of the other training on every rank.
    """

    ranks: int
    steps: int
    transport: str
    parameters: int
    data: Corpus
    loss: Losses
    max_abs_loss_diff: float
    all_gather: Collective
    reduce_scatter: Collective
    stock: StockCounts
    peak_buffer_bytes: Bytes
    seconds: Seconds
    grads_match_reference: bool
    grads_match_stock: bool
    versions: dict[str, str]

    @property
    def equals_stock(self) -> bool:
        """Whether every loss is bitwise what stock FSDP2 came to."""
        return self.loss.tide == self.loss.stock

    @property
    def equals_reference(self) -> bool:
        """Whether losses, gradients, parameters and optimizer state are bitwise the reference's."""
        return self.grads_match_reference and self.loss.tide == self.loss.reference

    @property
    def max_relative_loss_diff(self) -> float:
        """The largest difference between TIDE's loss and stock's, as a part of stock's."""
        return max(abs(t - s) / abs(s) for t, s in zip(self.loss.tide, self.loss.stock, strict=True))


def combine(by_rank: Sequence[dict[Way, Run]], corpus: Corpus, versions: dict[str, str]) -> Results:
    """The results of all ranks, given in rank order."""
    stock, tide, reference = ([runs[way] for runs in by_rank] for way in (Way.STOCK, Way.TIDE, Way.REFERENCE))
    loss = Losses(stock=_mean_losses(stock), tide=_mean_losses(tide), reference=_mean_losses(reference))
    gather, reduce = (_total([run.gather for run in stock]), _total([run.reduce for run in stock]))
    return Results(
        ranks=len(by_rank),
        steps=len(loss.tide),
        transport=tide[0].transport,
        parameters=tide[0].parameters,
        data=corpus,
        loss=loss,
        max_abs_loss_diff=max(abs(t - s) for t, s in zip(loss.tide, loss.stock, strict=True)),
        all_gather=_collective([run.gather for run in tide]),
        reduce_scatter=_collective([run.reduce for run in tide]),
        stock=StockCounts(
            wire_bytes=gather.wire_bytes + reduce.wire_bytes,
            layout_copy_bytes=gather.layout_copy_bytes + reduce.layout_copy_bytes,
            all_gather_wire_bytes=gather.wire_bytes,
            reduce_scatter_wire_bytes=reduce.wire_bytes,
            all_gather_calls=gather.calls,
            reduce_scatter_calls=reduce.calls,
        ),
        peak_buffer_bytes=Bytes(
            stock=sum(run.buffer_nbytes for run in stock), tide=sum(run.buffer_nbytes for run in tide)
        ),
        seconds=Seconds(stock=max(run.seconds for run in stock), tide=max(run.seconds for run in tide)),
        grads_match_reference=[run.digests for run in tide] == [run.digests for run in reference],
        grads_match_stock=[run.digests for run in tide] == [run.digests for run in stock],
        versions=versions,
    )


def _mean_losses(runs: Sequence[Run]) -> tuple[float, ...]:
    return tuple(sum(losses) / len(losses) for losses in zip(*(run.losses for run in runs), strict=True))


def _total(parts: Sequence[Traffic]) -> Traffic:
    total = Traffic()
    for part in parts:
        total += part
    return total


def _collective(parts: Sequence[Traffic]) -> Collective:
    total = _total(parts)
    return Collective(
        calls=total.calls,
        zero_copy=total.zero_copy,
        fallback=total.fallback,
        wire_bytes=total.wire_bytes,
        layout_copy_bytes=total.layout_copy_bytes,
    )
