"""Ranks that run their schedules in any order that the schedules allow.

A rank has lanes of tasks. The first task of a lane may run once the rank's counters have reached what it waits for.
What it puts or signals is under way in a channel until it is delivered; channels keep their order, nothing else does.
Who goes next is drawn: with `haste` near 1 tasks start while any can, so that as much as possible is under way; near 0
everything is delivered first. `starving` prefers the same lanes throughout.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from tide_triton.layouts import Hierarchy, Pacing, Topology, Wait


@dataclass(frozen=True, slots=True)
class Task:
    """Something `rank` does once all of `waits` are over; `what` names it where it never is."""

    rank: int
    waits: tuple[Wait, ...]
    run: Callable[[], None]
    what: object


@dataclass(frozen=True, slots=True)
class Order:
    """Who goes next."""

    seed: int
    haste: float
    starving: bool


orders = st.builds(Order, st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), st.booleans())


def topologies(max_nodes: int, max_gpus: int) -> st.SearchStrategy[Topology]:
    """Topologies of any number of nodes and GPUs, powers of two or not."""
    return st.builds(Topology, st.integers(1, max_nodes), st.integers(1, max_gpus))


pacings = st.builds(Pacing, st.sampled_from([16, 32]), st.integers(1, 4))

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")


def hierarchies(max_nodes: int, max_gpus: int) -> st.SearchStrategy[Hierarchy]:
    """Reductions of any dtype, with partials of any dtype."""
    dtypes = st.sampled_from(FLOAT_DTYPES)
    return st.builds(Hierarchy, topologies(max_nodes, max_gpus), pacings, dtypes, st.none() | dtypes)


class Stuck(AssertionError):  # noqa: N818, a state more than an error
    """Nothing is under way, and every lane waits."""


class Machine:
    """Counters, channels and lanes of all ranks."""

    def __init__(self) -> None:
        self._lanes: list[deque[Task]] = []
        self._channels: dict[Hashable, deque[Callable[[], object]]] = defaultdict(deque)
        self._counters: Counter[tuple[int, str, int]] = Counter()

    def add(self, tasks: Iterable[Task], without: str | None = None) -> None:
        """A lane of `tasks`; those that wait for a counter of kind `without` do not."""
        lane = deque(Task(t.rank, tuple(w for w in t.waits if w.counter != without), t.run, t.what) for t in tasks)
        if lane:
            self._lanes.append(lane)

    def send(self, channel: Hashable, deliver: Callable[[], object]) -> None:
        """Have `deliver` called some time later, after all that was sent to `channel` before."""
        self._channels[channel].append(deliver)

    def count(self, rank: int, counter: str, of: int) -> int:
        """Raise a counter of `rank` by one, and say what it is then."""
        self._counters[rank, counter, of] += 1
        return self._counters[rank, counter, of]

    def run(self, order: Order) -> None:
        """Run every lane to its end. Raises Stuck where that cannot be."""
        random = Random(order.seed)
        while self._lanes or self._channels:
            moves: Sequence[Callable[[Random, bool], bool]] = (self._start, self._deliver)
            if random.random() >= order.haste:
                moves = (self._deliver, self._start)
            if not any(move(random, order.starving) for move in moves):
                stuck = "\n".join(f"rank {lane[0].rank}: {lane[0].what}" for lane in self._lanes)
                raise Stuck(f"every lane waits:\n{stuck}")

    def _start(self, random: Random, starving: bool) -> bool:
        first = 0 if starving or not self._lanes else random.randrange(len(self._lanes))
        for index in (*range(first, len(self._lanes)), *range(first)):
            lane = self._lanes[index]
            if self._is_ready(lane[0]):
                lane.popleft().run()
                if not lane:
                    del self._lanes[index]
                return True
        return False

    def _is_ready(self, task: Task) -> bool:
        return all(self._counters[task.rank, wait.counter, wait.rank] >= wait.count for wait in task.waits)

    def _deliver(self, random: Random, starving: bool) -> bool:
        if not self._channels:
            return False
        keys = list(self._channels)
        key = keys[0 if starving else random.randrange(len(keys))]
        self._channels[key].popleft()()
        if not self._channels[key]:
            del self._channels[key]
        return True
