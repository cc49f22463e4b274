"""What is sharded: tensors with their shapes, dtypes and shard dims, over a number of ranks."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from types import MappingProxyType

#: Bytes per element of every dtype a slot can hold, by torch's name for it.
ITEMSIZES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }
)


class SpecError(ValueError):
    """A layout spec that cannot be laid out. The message names the field, its value and what would be accepted."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_dtype(dtype: object, what: str) -> None:
    """Raise SpecError unless `dtype` is a key of `ITEMSIZES`; `what` opens the message."""
    if not isinstance(dtype, str) or dtype not in ITEMSIZES:
        name = str(dtype).removeprefix("torch.")
        if name in ITEMSIZES:
            raise SpecError(f"{what} {dtype!r} must be given by its name, {name!r}")
        raise SpecError(f"{what} {dtype!r} has no layout; use one of {', '.join(ITEMSIZES)}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor before it is sharded.

    name: unique within its group; for a parameter, its fully qualified name.
    shape: sizes of the unsharded tensor, at least one dim.
    dtype: torch's name of the dtype it has in a slot, e.g. "bfloat16"; a key of `ITEMSIZES`.
    shard_dim: the dim that is cut, 0 <= shard_dim < len(shape).

    Raises SpecError for anything else.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard_dim: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise SpecError(f"name must be a non-empty string, got {self.name!r}")
        where = f"tensor {self.name!r}"
        if not isinstance(self.shape, Iterable):
            raise SpecError(f"{where}: shape must be a sequence of integers >= 0, got {self.shape!r}")
        # A plain tuple, whatever sequence was given (a list, a torch.Size): specs that are equal then look equal too.
        object.__setattr__(self, "shape", tuple(self.shape))
        if not self.shape:
            raise SpecError(f"{where}: shape has no dims, and a scalar cannot be sharded; reshape it to (1,)")
        for size in self.shape:
            if not _is_int(size) or size < 0:
                raise SpecError(f"{where}: shape must hold integers >= 0, got {list(self.shape)}")
        check_dtype(self.dtype, f"{where}: dtype")
        if not _is_int(self.shard_dim) or not 0 <= self.shard_dim < len(self.shape):
            raise SpecError(
                f"{where}: shard_dim must be 0 to {len(self.shape) - 1} for shape {list(self.shape)}, "
                f"got {self.shard_dim!r}"
            )

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZES[self.dtype]

    @property
    def numel(self) -> int:
        """Elements of the unsharded tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded tensor."""
        return self.numel * self.itemsize

    @property
    def outer(self) -> int:
        """Product of the sizes before the shard dim: the rows into which a shard falls."""
        return math.prod(self.shape[: self.shard_dim])

    @property
    def inner(self) -> int:
        """Product of the sizes after the shard dim: the elements of one step along it."""
        return math.prod(self.shape[self.shard_dim + 1 :])


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The tensors that communicate together, and the ranks they are sharded over.

    Raises SpecError where world_size < 1 or a name occurs twice.
    """

    world_size: int
    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if not _is_int(self.world_size) or self.world_size < 1:
            raise SpecError(f"world_size must be an integer >= 1, got {self.world_size!r}")
        object.__setattr__(self, "tensors", tuple(self.tensors))
        seen: set[str] = set()
        for tensor in self.tensors:
            if tensor.name in seen:
                raise SpecError(f"tensor {tensor.name!r} occurs twice in its group; give each tensor a name of its own")
            seen.add(tensor.name)

    @property
    def digest(self) -> str:
        """64 bits, as hex, that differ when any field differs and are equal for equal specs."""
        # JSON rather than repr(): ranks must agree on values, not on the classes that carry them (str and int enums).
        return hashlib.blake2b(json.dumps(astuple(self)).encode(), digest_size=8).hexdigest()
