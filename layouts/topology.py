"""Ranks as nodes x GPUs. Rank = node * gpus_per_node + gpu; ranks with the same gpu index form a rail."""

from dataclasses import dataclass

from tide_triton.layouts.spec import SpecError


@dataclass(frozen=True, slots=True)
class Topology:
    """`nodes` machines of `gpus_per_node` GPUs each. Raises SpecError unless both are >= 1."""

    nodes: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        for field in ("nodes", "gpus_per_node"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecError(f"{field} must be an integer >= 1, got {value!r}")

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    def rank(self, node: int, gpu: int) -> int:
        """The rank of GPU `gpu` in node `node`."""
        if not (0 <= node < self.nodes and 0 <= gpu < self.gpus_per_node):
            raise SpecError(f"node={node}, gpu={gpu} is outside {self.nodes} nodes x {self.gpus_per_node} GPUs")
        return node * self.gpus_per_node + gpu

    def node(self, rank: int) -> int:
        """The node that holds `rank`."""
        self._check(rank)
        return rank // self.gpus_per_node

    def gpu(self, rank: int) -> int:
        """The GPU index of `rank` within its node, which is also the rail it belongs to."""
        self._check(rank)
        return rank % self.gpus_per_node

    def rail(self, gpu: int) -> tuple[int, ...]:
        """The ranks with GPU index `gpu`, one a node, in node order."""
        return tuple(self.rank(node, gpu) for node in range(self.nodes))

    def local_ranks(self, node: int) -> tuple[int, ...]:
        """The ranks of one node, in GPU order."""
        return tuple(self.rank(node, gpu) for gpu in range(self.gpus_per_node))

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise SpecError(f"rank must be 0 to {self.world_size - 1}, got {rank}")
