"""Who sends to whom, in which order.

Flat: every rank sends straight to every other. Rank r starts with r + 1, so that in each round no two ranks send to the
same peer:

    round   0       1       2           (4 ranks)
    r0      -> 1    -> 2    -> 3
    r1      -> 2    -> 3    -> 0
    r2      -> 3    -> 0    -> 1
    r3      -> 0    -> 1    -> 2
"""

from tide_triton.layouts.spec import SpecError


def flat(world_size: int, rank: int) -> tuple[int, ...]:
    """The peers of `rank`, in the order in which it sends to them. Raises SpecError for a rank outside the world."""
    if world_size < 1:
        raise SpecError(f"world_size must be an integer >= 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise SpecError(f"rank must be 0 to {world_size - 1} for world_size={world_size}, got {rank}")
    return tuple((rank + step) % world_size for step in range(1, world_size))
