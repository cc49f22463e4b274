"""Tensor tables: how a list of tensors reaches one kernel launch.

Triton takes a fixed number of arguments, a group any number of tensors. So a launch gets one int64 table in device
memory, and casts the addresses in it to pointers:

    | header                | first_full[T] | first_edge[T] | T rows of addresses, sizes and pitches |
    | scalars, as int64     | block numbers at which each     | columns: see the kernel                |
    | or as bits of float64 | tensor starts                   |                                        |

Every tensor is cut into blocks of the same size. *Full* blocks lie wholly inside it and take no masks; what is left,
with any padding to be written, are *edge* blocks. The two are numbered apart, so that a launch runs one loop without a
mask (which the compiler vectorises and pipelines) and one with.
"""

import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate as running_sums
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch, all but the grid's size: its table in device memory and its compile-time constants.

    host: the table's pinned host copy (None on CPU). It lives as long as the table, since a CUDA graph that captured
    the upload reads it again at every replay.
    addresses: where in the table addresses stand.
    compiled: the kernel that Triton picked at the first start, by its name, and its arguments in order. Later starts
    go straight to it: looking it up again would cost more host time than starting it.
    """

    table: torch.Tensor
    host: torch.Tensor | None
    tensors: int
    full_blocks: int
    edge_blocks: int
    constants: Mapping[str, object]
    num_warps: int
    addresses: tuple[int, ...] = ()
    compiled: dict[str, tuple[Any, tuple[object, ...]]] = field(default_factory=dict, compare=False)

    @property
    def blocks(self) -> int:
        return self.full_blocks + self.edge_blocks


class TableCache:
    """The last `capacity` prepared launches, each under the values it was prepared from.

    A key holds everything that a table is made of (addresses, sizes, strides, dtypes, options, device, stream), so an
    entry never goes stale: the same key means the same table, whoever owns the memory now. It holds the stream because
    a table is uploaded on one stream and may be freed while its last kernel runs, both of which that stream orders.

    A captured CUDA graph uses the tables of its capture: the cache must then outlive the graph, and be large enough to
    drop none of them. Not safe to share between threads.
    """

    def __init__(self, capacity: int = 256) -> None:
        """Raises ValueError where capacity < 1."""
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}")
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Hashable, tuple[Launch, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, build: Callable[[], tuple[Launch, ...]]) -> tuple[Launch, ...]:
        """What `build` returned for this key, now or earlier. The least recently used entry makes room."""
        launches = self._entries.get(key)
        if launches is not None:
            self.hits += 1
            self._entries.move_to_end(key)
            return launches
        self.misses += 1
        launches = self._entries[key] = build()
        if len(self._entries) > self.capacity:
            self._entries.popitem(last=False)
        return launches

    def clear(self) -> None:
        """Drop all tables."""
        self._entries.clear()


def tensor_key(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """All that a table, and the checks before it, take from `tensor`."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def stream_key(device: torch.device) -> tuple[Hashable, ...]:
    """The device and its current stream, on which tables are uploaded and kernels run."""
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def float_bits(value: float) -> int:
    """The bits of `value` as float64, as a signed integer: Triton would pass a float argument as fp32."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def divides_exactly(divisor: float) -> bool:
    """Whether dividing by `divisor` is multiplying by its reciprocal: for powers of two.

    Within 2^+-64, far from where a reciprocal would be subnormal.
    """
    mantissa, exponent = math.frexp(divisor)
    return mantissa == 0.5 and abs(exponent) < 64


def block_counts(numel: int, written: int, block: int) -> tuple[int, int]:
    """Full and edge blocks of a tensor of `numel` elements of which `written` >= numel are written, with padding."""
    full = numel // block
    return full, -(-written // block) - full


def make_launch(
    header: Sequence[int],
    rows: Sequence[Sequence[int]],
    counts: Sequence[tuple[int, int]],
    device: torch.device,
    constants: Mapping[str, object],
    num_warps: int,
    address_columns: Sequence[int] = (),
) -> Launch:
    """Lay out a table, upload it on the device's current stream and return its launch.

    rows, counts: each tensor's row, and its numbers of full and edge blocks.
    address_columns: columns of a row that hold addresses.
    """
    first_full = [0, *running_sums(full for full, _ in counts)]
    first_edge = [0, *running_sums(edge for _, edge in counts)]
    values = [*header, *first_full[:-1], *first_edge[:-1], *(value for row in rows for value in row)]
    table = torch.tensor(values, dtype=torch.int64)
    host = None
    if device.type == "cuda":
        host = table.pin_memory()
        table = host.to(device, non_blocking=True)
    constants = {**constants, "TENSORS": 1 << (len(rows) - 1).bit_length()}
    first_row = len(header) + 2 * len(rows)
    addresses = tuple(
        first_row + number * len(row) + column for number, row in enumerate(rows) for column in address_columns
    )
    return Launch(table, host, len(rows), first_full[-1], first_edge[-1], constants, num_warps, addresses)
