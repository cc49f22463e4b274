"""Ranks of a process group exchange small messages, under a time limit and without a collective.

Messages go through the store that the group itself was built on, so that setting up needs neither a communicator nor
an order between groups, and leaves the group usable whatever happens.
"""

import math
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from tide_triton.errors import MismatchError, WaitTimeoutError


def usable_timeout(timeout_s: object) -> float:
    """`timeout_s` where it is one, else a minute, in which ranks can still tell each other that it is not."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        return 60.0
    try:
        seconds = float(timeout_s)
    except OverflowError:
        # An integer beyond what a float holds.
        return 60.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 60.0


def timeout_problem(timeout_s: object) -> str | None:
    """What is wrong with it as a time limit, None where nothing is."""
    if usable_timeout(timeout_s) == timeout_s:
        return None
    return f"timeout_s must be a positive, finite number of seconds, got {timeout_s!r}"


class Rendezvous:
    """A sequence of exchanges between the ranks of `group`; every rank makes the same ones in the same order.

    timeout_s: seconds that one exchange may take.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        self.global_ranks: list[int] = dist.get_process_group_ranks(group)
        self.timeout_s = timeout_s
        self._store = _get_process_group_store(group)
        # Counted in the store itself: ranks agree on it as long as each takes part in every rendezvous.
        self._generation = self._store.add(f"tide/generation/{self.rank}", 1)
        self._round = 0
        self._said: list[str] = []
        #: Whether all ranks have been in this rendezvous.
        self._has_met = False

    def exchange(self, message: str, what: str) -> list[str]:
        """Every rank's message, in rank order. Raises WaitTimeoutError naming the ranks that did not come."""
        prefix = f"tide/{self._generation}/{self._round}"
        self._round += 1
        self._store.set(f"{prefix}/{self.rank}", message)
        self._said.append(f"{prefix}/{self.rank}")
        keys = [f"{prefix}/{peer}" for peer in range(self.world_size)]
        deadline = time.monotonic() + self.timeout_s
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout_s))
        except (RuntimeError, dist.DistStoreError) as error:
            missing = [self.global_ranks[peer] for peer, key in enumerate(keys) if not self._store.check([key])]
            if not missing or time.monotonic() < deadline - 1:
                raise
            self._withdraw()
            raise WaitTimeoutError(
                f"rank {self.global_ranks[self.rank]} waited {self.timeout_s:g} s in phase '{what}' for ranks "
                f"{missing}; every rank must make this call, or raise timeout_s"
            ) from error
        self._has_met = True
        messages = [self._store.get(key).decode() for key in keys]
        # Whoever is here has read the messages before: this rank's can go, or the store grows with every call.
        for key in self._said[:-1]:
            self._store.delete_key(key)
        del self._said[:-1]
        return messages

    def unanimous(self, wish: bool, within_s: float) -> bool:
        """Whether every rank wishes the same within `within_s` seconds: true on all of them, or false on all of them.

        Returns at once where this rank does not wish it; never raises for ranks that do not come.
        """
        prefix = f"tide/{self._generation}/{self._round}"
        self._round += 1
        verdict = f"{prefix}/verdict"
        # The first verdict stands, whoever gives it.
        if not wish:
            self._store.compare_set(verdict, "", "no")
        elif self._store.add(f"{prefix}/wishes", 1) == self.world_size:
            self._store.compare_set(verdict, "", "yes")
        else:
            try:
                self._store.wait([verdict], timedelta(seconds=within_s))
            except (RuntimeError, dist.DistStoreError):
                self._store.compare_set(verdict, "", "no")
        return bool(self._store.get(verdict) == b"yes")

    def _withdraw(self) -> None:
        """Take back what was said. Where ranks have never come, the next rendezvous starts where theirs will."""
        for key in self._said:
            self._store.delete_key(key)
        if not self._has_met:
            self._store.add(f"tide/generation/{self.rank}", -1)

    def first_problem(self, problem: Exception | None, what: str) -> tuple[int, str] | None:
        """The first rank that has a problem, and what it is; None where none has. `problem` is this rank's."""
        texts = self.exchange("" if problem is None else str(problem) or repr(problem), what)
        found = ((rank, text) for rank, text in zip(self.global_ranks, texts, strict=True) if text)
        return next(found, None)

    def require_equal(self, message: str, describe: Sequence[tuple[str, str]], what: str) -> None:
        """Raise MismatchError on every rank unless all gave the same `message`.

        describe: the message's parts as (name, value), exchanged only where messages differ, to name what differs.
        """
        messages = self.exchange(message, what)
        if len(set(messages)) == 1:
            return
        texts = self.exchange("\x1e".join(f"{name}\x1f{value}" for name, value in describe), what)
        parts = [dict(line.split("\x1f") for line in text.split("\x1e")) for text in texts]
        for name in dict.fromkeys(key for part in parts for key in part):
            by_value: dict[str, list[int]] = {}
            for peer, part in enumerate(parts):
                by_value.setdefault(part.get(name, "absent"), []).append(self.global_ranks[peer])
            if len(by_value) > 1:
                differing = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
                raise MismatchError(f"ranks disagree on {name}: {differing}. Make it the same on every rank")
        raise MismatchError(f"ranks disagree in phase '{what}': {messages}")
