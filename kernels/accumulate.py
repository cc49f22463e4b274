"""Add the ranks' contributions to a shard in rank order: one launch for a group.

    contributions[i]            outputs[i]
    rank 0  | x_0 |  bf16
    rank 1  | x_1 |  bf16   ->  | x_0 + x_1 + x_2 | 0 0 |   fp32, zeros in the padding
    rank 2  | x_2 |  bf16

Per element, every step rounded to nearest even:

    x_r   = contribution r, rounded to wire_dtype; times premultiply, rounded to wire_dtype again
    s     = ((x_0 + x_1) + ...) + x_{W-1}, in fp32 (in fp64 where what is added is fp64)
    value = s / divisor, rounded to the output's dtype
    out   = value, or with `add` what the output held + value (in the output's dtype, at least fp32), rounded to it

So the result depends on nothing but these values: not on the engine, the number of CTAs, the block size, or where each
contribution lies. `reference.accumulate_reference` gives the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from tide_triton.kernels.accumulate_kernel import accumulate_kernel
from tide_triton.kernels.launch import Engine, Prepared, Tuning, check_ctas, interpreted, start, uses_triton
from tide_triton.kernels.reference import accumulate_reference
from tide_triton.kernels.tables import (
    Launch,
    TableCache,
    block_counts,
    divides_exactly,
    float_bits,
    make_launch,
    stream_key,
    tensor_key,
)
from tide_triton.kernels.views import (
    FLOAT_DTYPES,
    TRITON_DTYPES,
    View,
    check_float,
    check_one_device,
    common_cols,
    view_of,
)

#: Shared memory that the pipeline's buffers may take, in bytes, of the 227 KiB that a block has on sm_90 and sm_100.
_PIPELINE_BYTES = 200 * 1024


def default_tuning(world_size: int, loaded_bytes: int) -> Tuning:
    """Blocks as large as shared memory allows, since few CTAs need many bytes in flight to keep memory busy.

    world_size: contributions per element. loaded_bytes: bytes loaded per element, over all contributions and, with
    `add`, the output.

    32768 elements over all contributions: 8192 x 16 warps for W = 2 and 4, 4096 x 16 for W = 8 and 2048 x 8 for W = 16,
    of a few settings tried on an H200 with bf16; `python -m bench kernels` times W = 2 and 8. Fewer stages where
    that does not fit.
    """
    block = min(8192, max(1024, 32768 // triton.next_power_of_2(world_size)))
    while block > 1024 and block * loaded_bytes * 3 > _PIPELINE_BYTES:
        block //= 2
    stages = min(3, max(1, _PIPELINE_BYTES // (block * loaded_bytes)))
    return Tuning(block, min(16, max(4, block // 256)), stages)


@dataclass(frozen=True, slots=True)
class AccumulateVariant:
    """What `accumulate_kernel` is specialised on.

    contributions: each rank's dtype. by_reciprocal: whether the divisor is a power of two, by which dividing is
    multiplying. strided: whether a contribution falls into rows; aligned: whether every access may
    take 16 bytes; even: whether all tensors hold a multiple of 16 elements; wide: whether rows are too long for 32-bit
    column numbers.
    """

    contributions: tuple[torch.dtype, ...]
    output: torch.dtype
    wire: torch.dtype | None = None
    premultiply: bool = False
    divide: bool = False
    by_reciprocal: bool = False
    add: bool = False
    statistics: bool = False
    strided: bool = False
    aligned: bool = True
    even: bool = True
    wide: bool = False

    @property
    def vector(self) -> int:
        """Elements of one access of 16 bytes in the narrowest tensor, or 1."""
        itemsize = min(dtype.itemsize for dtype in (*self.contributions, self.output))
        return 16 // itemsize if self.aligned else 1

    def tuning(self) -> Tuning:
        """The default tuning for this variant."""
        loaded = sum(dtype.itemsize for dtype in self.contributions) + (self.output.itemsize if self.add else 0)
        return default_tuning(len(self.contributions), loaded)

    def constants(self, tuning: Tuning, persistent: bool, interpret: bool) -> dict[str, object]:
        """The kernel's compile-time arguments but for TENSORS."""
        added = self.contributions if self.wire is None else (self.wire,)
        return {
            "DTYPES": sum(FLOAT_DTYPES.index(dtype) << (2 * rank) for rank, dtype in enumerate(self.contributions)),
            "OUTPUT": TRITON_DTYPES[self.output],
            "WIRE": None if self.wire is None else TRITON_DTYPES[self.wire],
            "WIDE": tl.float64 if torch.float64 in added else tl.float32,
            "PREMULTIPLY": self.premultiply,
            "DIVIDE": (1 if self.by_reciprocal else 2) if self.divide else 0,
            "ADD": self.add,
            "STATISTICS": self.statistics,
            "W": len(self.contributions),
            "RANKS": triton.next_power_of_2(len(self.contributions)),
            "BLOCK": tuning.block,
            "VECTOR": self.vector,
            "STRIDED": self.strided,
            "ALIGNED": self.aligned,
            "EVEN": self.even,
            "INDEX": tl.int64 if self.wide else tl.int32,
            "INTERPRET": interpret,
            "STAGES": tuning.stages if persistent else 1,
        }


def _prepare(
    contributions: Sequence[Sequence[torch.Tensor]],
    outputs: Sequence[torch.Tensor],
    base: AccumulateVariant,
    factors: tuple[float, float],
    tuning: Tuning | None,
    persistent: bool,
) -> tuple[Launch, ...]:
    """One launch per combination of dtypes, contiguity and alignment among the tensors that have anything to write.

    base: the options all of them share. factors: premultiply and divisor.
    """
    members: dict[AccumulateVariant, list[tuple[View, list[View], int]]] = {}
    for index, (ranks, output) in enumerate(zip(contributions, outputs, strict=True)):
        numel = ranks[0].numel()
        out = view_of(output, f"outputs[{index}]")
        if (numel if base.add else out.numel) == 0:
            continue
        views = [view_of(x, f"contributions[{index}][{rank}]") for rank, x in enumerate(ranks)]
        cols = common_cols(views, f"contributions[{index}]")
        variant = replace(
            base, contributions=tuple(x.dtype for x in ranks), output=output.dtype, strided=cols < numel, aligned=True
        )
        vector = variant.vector
        aligned = all(view.aligned(vector) for view in (out, *views))
        # All tensors walk in rows of the strided ones, so these must suit the contiguous ones too.
        aligned = aligned and (not variant.strided or cols % vector == 0)
        members.setdefault(replace(variant, aligned=aligned), []).append((out, views, cols))

    launches = []
    for variant, tensors in members.items():
        chosen = tuning or variant.tuning()
        rows, counts, sizes = [], [], set[int]()
        for out, views, cols in tensors:
            numel = views[0].numel
            written = numel if variant.add else out.numel
            places = (value for view in views for value in (view.address, cols if view.contiguous else view.pitch))
            rows.append((out.address, numel, written, max(cols, 1), *places))
            counts.append(block_counts(numel, written, chosen.block))
            sizes |= {numel, written}
        variant = replace(
            variant,
            even=all(size % 16 == 0 for size in sizes),
            wide=any(cols + chosen.block >= 2**31 for _, _, cols in tensors),
        )
        # A loop from tensor to tensor pays where most hold full blocks; many tiny ones are better found one by one.
        pipelined = persistent and sum(full for full, _ in counts) >= len(counts)
        constants = variant.constants(chosen, pipelined, interpreted(accumulate_kernel))
        premultiply, divisor = factors
        header = [float_bits(premultiply), float_bits(1.0 / divisor if variant.by_reciprocal else divisor)]
        addresses = (0, *(4 + 2 * rank for rank in range(len(variant.contributions))))
        launches.append(make_launch(header, rows, counts, outputs[0].device, constants, chosen.warps, addresses))
    return tuple(launches)


def _variant(
    wire_dtype: torch.dtype | None, premultiply: float, divisor: float, add: bool, statistics: bool
) -> AccumulateVariant:
    """What all launches of a call share; contributions and output are filled in by launch."""
    return AccumulateVariant(
        (),
        torch.float32,
        wire_dtype,
        premultiply != 1.0,
        divisor != 1.0,
        by_reciprocal=divisor != 1.0 and divides_exactly(divisor),
        add=add,
        statistics=statistics,
    )


def _check(
    contributions: Sequence[Sequence[torch.Tensor]], outputs: Sequence[torch.Tensor], wire_dtype: torch.dtype | None
) -> None:
    if len(contributions) != len(outputs):
        raise ValueError(f"got contributions to {len(contributions)} tensors and {len(outputs)} outputs")
    if wire_dtype is not None:
        check_float(wire_dtype, "wire_dtype, in which contributions are rounded,")
    for index, (ranks, output) in enumerate(zip(contributions, outputs, strict=True)):
        if not ranks:
            raise ValueError(f"contributions[{index}] is empty; there must be one per rank, at least one")
        if len(ranks) != len(contributions[0]):
            raise ValueError(
                f"contributions[{index}] has {len(ranks)} ranks and contributions[0] has {len(contributions[0])}"
            )
        check_float(output.dtype, f"outputs[{index}]")
        if not output.is_contiguous():
            raise ValueError(
                f"outputs[{index}] must be contiguous, got shape {list(output.shape)} with strides "
                f"{list(output.stride())}"
            )
        for rank, contribution in enumerate(ranks):
            check_float(contribution.dtype, f"contributions[{index}][{rank}]")
            if contribution.numel() != ranks[0].numel():
                raise ValueError(
                    f"contributions[{index}][{rank}] has shape {list(contribution.shape)}, which holds "
                    f"{contribution.numel()} elements, and [{index}][0] {list(ranks[0].shape)}, "
                    f"which holds {ranks[0].numel()}"
                )
        if output.numel() < ranks[0].numel():
            raise ValueError(
                f"outputs[{index}] has shape {list(output.shape)}, too small for contributions of shape "
                f"{list(ranks[0].shape)}"
            )
        if ranks[0].numel():
            views = [view_of(x, f"contributions[{index}][{rank}]") for rank, x in enumerate(ranks)]
            common_cols(views, f"contributions[{index}]")
    check_one_device([x for ranks in contributions for x in ranks] + list(outputs))


def accumulate(
    contributions: Sequence[Sequence[torch.Tensor]],
    outputs: Sequence[torch.Tensor],
    *,
    wire_dtype: torch.dtype | None = None,
    premultiply: float = 1.0,
    divisor: float = 1.0,
    add: bool = False,
    statistics: bool = False,
    tables: TableCache | None = None,
    engine: Engine = "auto",
    ctas: int | None = None,
    tuning: Tuning | None = None,
) -> torch.Tensor | None:
    """Write the sum of all ranks' contributions to each output; the module's head says what is rounded where.

    contributions: for tensor i, one tensor per rank in rank order, all of equally many elements and of any of float32,
    bfloat16, float16 and float64, rank by rank. Each is contiguous, or 2-D (rows, cols) with strides (pitch, 1) in
    elements; all strided ones of a tensor have the same cols.
    outputs: contiguous tensors of those dtypes with at least as many elements. What an output holds beyond them is
    padding: set to 0, or left alone with `add`. An output may overlap no contribution and no other output.

    wire_dtype: dtype that contributions have been rounded to when sent, so that one still in its place counts as much
    as one that was sent. None: contributions are taken as they are, and `premultiply` is not rounded after.
    premultiply, divisor: 1 skips the step. Both are rounded to the dtype that is added in.
    statistics: return float64 [2] on the outputs' device: the sum of squares of the values written, each squared in
    fp32 (fp64 outputs: in fp64), and how many of them are not finite. Padding does not count.
    tables: keeps the uploaded tensor tables, so that a later call with the same memory uploads nothing.
    engine: "triton", "torch" (the naive twin), or "auto": Triton for CUDA tensors, else torch.
    ctas: at most so many CTAs, each with a pipelined loop over blocks; None for a CTA per block.
    tuning: overrides `default_tuning`.

    A group takes one launch for each combination of dtypes, contiguity and 16-byte alignment in it, on the current
    stream. Raises ValueError for sizes, strides or devices other than the above, and UnsupportedDtypeError for dtypes.
    """
    check_ctas(ctas)
    device = outputs[0].device if outputs else torch.device("cpu")
    if not outputs or not uses_triton(engine, device, accumulate_kernel):
        _check(contributions, outputs, wire_dtype)
        return accumulate_reference(
            contributions,
            outputs,
            wire_dtype=wire_dtype,
            premultiply=premultiply,
            divisor=divisor,
            add=add,
            statistics=statistics,
        )

    def prepare() -> tuple[Launch, ...]:
        _check(contributions, outputs, wire_dtype)
        base = _variant(wire_dtype, premultiply, divisor, add, statistics)
        return _prepare(contributions, outputs, base, (premultiply, divisor), tuning, ctas is not None)

    if tables is None:
        launches = prepare()
    else:
        # All that is checked is part of the key, so that a hit needs no checks.
        options = wire_dtype, premultiply, divisor, add, statistics, tuning, ctas is None
        tensors = tuple(tuple(map(tensor_key, ranks)) for ranks in contributions)
        key = ("accumulate", stream_key(device), options, tensors, *map(tensor_key, outputs))
        launches = tables.get(key, prepare)

    sums = torch.zeros(2, dtype=torch.float64, device=device) if statistics else None
    for launch in launches:
        if sums is None:
            start(accumulate_kernel, launch, ctas, launch.table)
            continue
        wide = launch.constants["OUTPUT"] == tl.float64
        partials = torch.empty(2, launch.blocks, dtype=torch.float64 if wide else torch.float32, device=device)
        start(accumulate_kernel, launch, ctas, partials)
        sums += partials.sum(1, dtype=torch.float64)
    return sums


def prepare_accumulate(
    contributions: Sequence[Sequence[torch.Tensor]],
    outputs: Sequence[torch.Tensor],
    *,
    wire_dtype: torch.dtype | None = None,
    premultiply: float = 1.0,
    divisor: float = 1.0,
    add: bool = False,
    engine: Engine = "auto",
    ctas: int | None = None,
    tuning: Tuning | None = None,
) -> Prepared:
    """`accumulate` for tensors that stay where they are, to be called any number of times."""
    device = outputs[0].device if outputs else torch.device("cpu")
    if not outputs or not uses_triton(engine, device, accumulate_kernel):

        def run_on_host(*_: object) -> None:
            accumulate(contributions, outputs, wire_dtype=wire_dtype, premultiply=premultiply, divisor=divisor, add=add)

        return Prepared(run_on_host, (), is_reusable=False)
    _check(contributions, outputs, wire_dtype)
    base = _variant(wire_dtype, premultiply, divisor, add, False)
    launches = _prepare(contributions, outputs, base, (premultiply, divisor), tuning, ctas is not None)

    def run(launches: Sequence[Launch], stream: int | None) -> None:
        for launch in launches:
            start(accumulate_kernel, launch, ctas, launch.table, stream=stream)

    return Prepared(run, launches, is_reusable=True)
