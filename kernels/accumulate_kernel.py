"""Device code of `accumulate`, whose head says what is rounded where."""

# Compile-time constants are upper-case by Triton's custom, and its functions take no types.
# ruff: noqa: N803, N806, SIM108, SIM300
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from tide_triton.kernels.tiles import (
    find_tensor,
    load_float,
    load_starts,
    narrow,
    tile,
    tile_limit,
    tile_pointers,
    tile_rows,
    widen,
)

#: Table header: premultiply and divisor. Row: output, elements, elements to write, row length, then each contribution's
#: address and pitch.
HEADER, ROW = tl.constexpr(2), tl.constexpr(4)


@triton.jit
def _accumulate_block(
    table, row, block, partial, partial_stride, DTYPES: tl.constexpr, OUTPUT: tl.constexpr, WIRE: tl.constexpr,
    WIDE: tl.constexpr, PREMULTIPLY: tl.constexpr, DIVIDE: tl.constexpr, ADD: tl.constexpr, STATISTICS: tl.constexpr,
    W: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, STRIDED: tl.constexpr, ALIGNED: tl.constexpr,
    EVEN: tl.constexpr, INDEX: tl.constexpr, INTERPRET: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sum block `block` (int64, within its tensor) of the tensor whose table row starts at `row`."""
    begin = block * BLOCK
    rows = 0
    cols = 0
    live = None
    if STRIDED:
        rows, cols = tile_rows(begin, tl.load(table + row + 3), BLOCK, VECTOR, INDEX)
    if MASKED:
        live = tile(BLOCK, VECTOR) < tile_limit(tl.load(table + row + 1), begin, BLOCK, EVEN)

    for r in tl.static_range(W):
        contribution = table + row + ROW + 2 * r
        x = load_float(
            tl.load(contribution), begin, rows, cols, tl.load(contribution + 1), live, (DTYPES >> (2 * r)) & 3, WIRE,
            BLOCK, VECTOR, STRIDED, ALIGNED, INTERPRET, MASKED,
        )  # fmt: skip
        x = widen(x, WIDE, INTERPRET)
        if PREMULTIPLY:
            x = x * tl.load(table).to(tl.float64, bitcast=True).to(WIDE)
            if WIRE is not None:
                x = widen(narrow(x, WIRE, INTERPRET), WIDE, INTERPRET)
        # Starting from x_0, not from 0: 0.0 + -0.0 would be 0.0.
        if r == 0:
            total = x
        else:
            total = total + x
    if DIVIDE:
        divisor = tl.load(table + 1).to(tl.float64, bitcast=True).to(WIDE)
        # On fp32, `/` is an approximation. On fp64 it is correctly rounded, and div_rn does not exist.
        if WIDE == tl.float64:
            total = total / divisor
        else:
            total = tl.div_rn(total, tl.zeros_like(total) + divisor)

    value = narrow(total, OUTPUT, INTERPRET)
    output = tile_pointers(
        tl.load(table + row), begin, 0, 0, 0, OUTPUT, BLOCK, VECTOR, False, ALIGNED
    )  # fmt: skip
    if ADD:
        SUM: tl.constexpr = tl.float64 if OUTPUT == tl.float64 else tl.float32
        existing = tl.load(output, mask=live)
        value = narrow(widen(existing, SUM, INTERPRET) + widen(value, SUM, INTERPRET), OUTPUT, INTERPRET)
    if MASKED:
        written = live
        if not ADD:
            value = tl.where(live, value, 0.0)
            written = tile(BLOCK, VECTOR) < tile_limit(tl.load(table + row + 2), begin, BLOCK, EVEN)
        tl.store(output, value, mask=written)
    else:
        tl.store(output, value)

    if STATISTICS:
        SQUARE: tl.constexpr = tl.float64 if OUTPUT == tl.float64 else tl.float32
        wide = widen(value, SQUARE, INTERPRET)
        finite = tl.abs(wide) < float("inf")
        if MASKED:
            wide = tl.where(live, wide, 0.0)
            finite = finite | (live == 0)
        tl.store(partial, tl.sum(tl.sum(wide * wide, axis=1), axis=0))
        tl.store(partial + partial_stride, tl.sum(tl.sum((finite == 0).to(tl.int32), axis=1), axis=0).to(SQUARE))


@triton.jit(do_not_specialize=["tensors", "full_blocks", "edge_blocks"])
def accumulate_kernel(
    table, partials, tensors, full_blocks, edge_blocks, TENSORS: tl.constexpr, DTYPES: tl.constexpr,
    OUTPUT: tl.constexpr, WIRE: tl.constexpr, WIDE: tl.constexpr, PREMULTIPLY: tl.constexpr, DIVIDE: tl.constexpr,
    ADD: tl.constexpr, STATISTICS: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    STRIDED: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, INDEX: tl.constexpr, INTERPRET: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sum every tensor of `table` (`HEADER`, then rows of `ROW` + 2 W), dealing blocks out to the programs in turn.

    partials: with STATISTICS, [2, blocks]: each block's sum of squares and count of non-finite values, so that what
    they add up to does not depend on which program took which block.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    starts = table + HEADER
    first_row = HEADER + tensors.to(tl.int64) * 2
    partial_stride = full_blocks + edge_blocks

    first_full = load_starts(starts, tensors, TENSORS)
    for block in tl.range(program, full_blocks, programs, num_stages=STAGES):
        tensor = find_tensor(first_full, block)
        within = block - tl.load(starts + tensor)
        _accumulate_block(
            table, first_row + tensor * (ROW + 2 * W), within, partials + block, partial_stride, DTYPES, OUTPUT, WIRE,
            WIDE, PREMULTIPLY, DIVIDE, ADD, STATISTICS, W, BLOCK, VECTOR, STRIDED, ALIGNED, EVEN, INDEX, INTERPRET,
            False,
        )  # fmt: skip

    # Edge blocks go on where the full ones ended, so that no program gets two blocks more than another.
    first_edge = load_starts(starts + tensors, tensors, TENSORS)
    turn = (program + programs - full_blocks % programs) % programs
    for block in tl.range(turn, edge_blocks, programs, num_stages=1):
        tensor = find_tensor(first_edge, block)
        row = first_row + tensor * (ROW + 2 * W)
        within = block - tl.load(starts + tensors + tensor) + tl.load(table + row + 1) // BLOCK
        _accumulate_block(
            table, row, within, partials + full_blocks + block, partial_stride, DTYPES, OUTPUT, WIRE, WIDE, PREMULTIPLY,
            DIVIDE, ADD, STATISTICS, W, BLOCK, VECTOR, STRIDED, ALIGNED, EVEN, INDEX, INTERPRET, True,
        )  # fmt: skip
