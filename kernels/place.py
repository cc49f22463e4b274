"""Cast shards into their places of a slot, and back: one launch for a group.

    fp32 shard, contiguous   | 0 1 | 2 3 |            sources[i]
                               |     |
    slot, a run in each row  | 0 1 . . | 2 3 . . |    destinations[i]: (rows, cols) with strides (pitch, 1)

| pair of dtypes                 | what is done                                                     |
|--------------------------------|------------------------------------------------------------------|
| floats that differ             | cast, rounded to nearest even (fp64 to 16 bits by way of fp32)   |
| the same, of any kind          | bytes are copied, NaN payloads too                               |
| anything else                  | UnsupportedDtypeError                                            |
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl

from tide_triton.kernels.launch import Engine, Prepared, Tuning, check_ctas, interpreted, start, uses_triton
from tide_triton.kernels.place_kernel import place_kernel
from tide_triton.kernels.reference import place_reference
from tide_triton.kernels.tables import Launch, TableCache, block_counts, make_launch, stream_key, tensor_key
from tide_triton.kernels.views import TRITON_DTYPES, View, check_float, check_one_device, common_cols, view_of

#: 32 KiB of fp32 a block, and two such buffers in flight where a loop is pipelined.
DEFAULT_TUNING = Tuning(block=8192, warps=16, stages=3)

_COPY_DTYPES: dict[int, Any] = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@dataclass(frozen=True, slots=True)
class PlaceVariant:
    """What `place_kernel` is specialised on.

    source, destination: dtypes; equal ones are copied as integers of their size.
    strided: whether a view falls into rows; aligned: whether every access may take 16 bytes; even: whether all tensors
    hold a multiple of 16 elements; wide: whether rows are too long for 32-bit column numbers.
    """

    source: torch.dtype
    destination: torch.dtype
    strided: bool = False
    aligned: bool = True
    even: bool = True
    wide: bool = False

    @property
    def vector(self) -> int:
        """Elements of one access of 16 bytes on the narrower side, or 1."""
        itemsize = min(self.source.itemsize, self.destination.itemsize, 8)
        return 16 // itemsize if self.aligned else 1

    def constants(self, tuning: Tuning, persistent: bool, interpret: bool) -> dict[str, object]:
        """The kernel's compile-time arguments but for TENSORS."""
        if self.source == self.destination:
            source = destination = _COPY_DTYPES[min(self.source.itemsize, 8)]
        else:
            source, destination = TRITON_DTYPES[self.source], TRITON_DTYPES[self.destination]
        return {
            "SOURCE": source,
            "DESTINATION": destination,
            "BLOCK": tuning.block,
            "VECTOR": self.vector,
            "STRIDED": self.strided,
            "ALIGNED": self.aligned,
            "EVEN": self.even,
            "INDEX": tl.int64 if self.wide else tl.int32,
            "INTERPRET": interpret,
            "STAGES": tuning.stages if persistent else 1,
        }


def _scaled(view: View) -> View:
    """The view in elements of at most 8 bytes: complex128 counts as pairs."""
    if view.itemsize <= 8:
        return view
    factor = view.itemsize // 8
    return View(view.address, view.numel * factor, view.cols * factor, view.pitch * factor, 8)


def _prepare(
    sources: Sequence[torch.Tensor],
    destinations: Sequence[torch.Tensor],
    device: torch.device,
    tuning: Tuning,
    persistent: bool,
) -> tuple[Launch, ...]:
    """One launch per dtype pair, contiguity and alignment among the pairs that hold any elements."""
    members: dict[PlaceVariant, list[tuple[View, View, int]]] = {}
    for index, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        if source.numel() == 0:
            continue
        src = _scaled(view_of(source, f"sources[{index}]"))
        dst = _scaled(view_of(destination, f"destinations[{index}]"))
        cols = common_cols((src, dst), f"pair {index}")
        variant = PlaceVariant(source.dtype, destination.dtype, cols < src.numel)
        aligned = src.aligned(variant.vector) and dst.aligned(variant.vector)
        # Both sides walk in rows of the strided one, so these must suit a contiguous side too.
        aligned = aligned and (not variant.strided or cols % variant.vector == 0)
        variant = replace(variant, aligned=aligned)
        members.setdefault(variant, []).append((src, dst, cols))

    launches = []
    for variant, pairs in members.items():
        rows, counts = [], []
        for src, dst, cols in pairs:
            src_pitch, dst_pitch = (cols if view.contiguous else view.pitch for view in (src, dst))
            rows.append((src.address, dst.address, src.numel, cols, src_pitch, dst_pitch))
            counts.append(block_counts(src.numel, src.numel, tuning.block))
        variant = replace(
            variant,
            even=all(src.numel % 16 == 0 for src, _, _ in pairs),
            wide=any(cols + tuning.block >= 2**31 for _, _, cols in pairs),
        )
        # A loop from pair to pair pays where most hold full blocks; many tiny ones are better found one by one.
        pipelined = persistent and sum(full for full, _ in counts) >= len(counts)
        constants = variant.constants(tuning, pipelined, interpreted(place_kernel))
        launches.append(make_launch((), rows, counts, device, constants, tuning.warps, (0, 1)))
    return tuple(launches)


def _check(sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    if len(sources) != len(destinations):
        raise ValueError(f"got {len(sources)} sources and {len(destinations)} destinations")
    for index, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        if source.numel() != destination.numel():
            raise ValueError(
                f"pair {index}: source {list(source.shape)} and destination {list(destination.shape)} "
                f"hold {source.numel()} and {destination.numel()} elements"
            )
        if source.dtype != destination.dtype:
            check_float(source.dtype, f"sources[{index}], which is to be cast to {destination.dtype},")
            check_float(destination.dtype, f"destinations[{index}], which is cast from {source.dtype},")
        views = view_of(source, f"sources[{index}]"), view_of(destination, f"destinations[{index}]")
        if source.numel():
            common_cols(views, f"pair {index}")
    check_one_device([*sources, *destinations])


def place(
    sources: Sequence[torch.Tensor],
    destinations: Sequence[torch.Tensor],
    *,
    tables: TableCache | None = None,
    engine: Engine = "auto",
    ctas: int | None = None,
    tuning: Tuning = DEFAULT_TUNING,
) -> None:
    """Copy each source into its destination, cast to the destination's dtype with rounding to nearest even.

    sources, destinations: tensors of one device, pairwise of equally many elements, which correspond in row-major
    order. Each is contiguous, or 2-D (rows, cols) with strides (pitch, 1), in elements. float32, bfloat16, float16 and
    float64 are cast into each other; a pair of one dtype, whatever it is, is copied byte by byte. Empty tensors are
    skipped. Destinations must overlap neither each other nor sources.

    tables: keeps the uploaded tensor tables, so that a later call with the same memory uploads nothing.
    engine: "triton", "torch" (the naive twin), or "auto": Triton for CUDA tensors, else torch.
    ctas: at most so many CTAs, each with a pipelined loop over blocks; None for a CTA per block.
    tuning: elements per block, warps per CTA and stages of the pipeline.

    A list takes one launch for each combination of dtypes, contiguity and 16-byte alignment in it, on the current
    stream. Raises ValueError for a pair of different sizes, strides other than the above, several devices or ctas < 1,
    and UnsupportedDtypeError for dtypes that cannot be cast.
    """
    check_ctas(ctas)
    tensors = (*sources, *destinations)
    device = tensors[0].device if tensors else torch.device("cpu")
    if not tensors or not uses_triton(engine, device, place_kernel):
        _check(sources, destinations)
        place_reference(sources, destinations)
        return

    def prepare() -> tuple[Launch, ...]:
        _check(sources, destinations)
        return _prepare(sources, destinations, device, tuning, ctas is not None)

    if tables is None:
        launches = prepare()
    else:
        # All that is checked is part of the key, so that a hit needs no checks.
        key = ("place", stream_key(device), tuning, ctas is None, len(sources), *map(tensor_key, tensors))
        launches = tables.get(key, prepare)
    for launch in launches:
        start(place_kernel, launch, ctas)


def prepare_place(
    sources: Sequence[torch.Tensor],
    destinations: Sequence[torch.Tensor],
    *,
    ctas: int | None = None,
    tuning: Tuning = DEFAULT_TUNING,
) -> Prepared:
    """`place` for tensors that stay where they are, to be called any number of times."""
    device = sources[0].device if sources else torch.device("cpu")
    if device.type != "cuda":
        return Prepared(lambda *_: place(sources, destinations), (), is_reusable=False)
    _check(sources, destinations)
    launches = _prepare(sources, destinations, device, tuning, ctas is not None)

    def run(launches: Sequence[Launch], stream: int | None) -> None:
        for launch in launches:
            start(place_kernel, launch, ctas, stream=stream)

    return Prepared(run, launches, is_reusable=True)


def pack(
    regions: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    *,
    tables: TableCache | None = None,
    engine: Engine = "auto",
    ctas: int | None = None,
    tuning: Tuning = DEFAULT_TUNING,
) -> None:
    """Gather strided regions of a slot or of gradients into contiguous shards: the inverse of placing a shard.

    regions: 2-D (rows, cols) views with strides (pitch, 1), or contiguous tensors. shards: contiguous tensors of as
    many elements. Dtypes, options and errors are those of `place`; a shard that is not contiguous is a ValueError.
    """
    for index, shard in enumerate(shards):
        if not shard.is_contiguous():
            raise ValueError(
                f"shards[{index}] must be contiguous, got shape {list(shard.shape)} with strides {list(shard.stride())}"
            )
    place(regions, shards, tables=tables, engine=engine, ctas=ctas, tuning=tuning)
