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
def _pick(values, index: tl.constexpr, RANKS: tl.constexpr):
    """Element `index` of `values` [RANKS]: registers only, so that a loop's loads do not wait for another load."""
    return tl.sum(tl.where(tl.arange(0, RANKS) == index, values, 0), axis=0)


@triton.jit
def _load_row(table, row, W: tl.constexpr, RANKS: tl.constexpr):
    """A tensor's output address, elements, elements to write, row length, addresses [RANKS] and pitches [RANKS]."""
    rank = tl.arange(0, RANKS)
    places = table + row + ROW + 2 * rank
    addresses = tl.load(places, mask=rank < W, other=0)
    pitches = tl.load(places + 1, mask=rank < W, other=0)
    at = table + row
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), addresses, pitches


@triton.jit
def _accumulate_block(
    output_address, numel, writes, length, addresses, pitches, block, premultiply, divisor, partial, partial_stride,
    DTYPES: tl.constexpr, OUTPUT: tl.constexpr, WIRE: tl.constexpr, WIDE: tl.constexpr, PREMULTIPLY: tl.constexpr,
    DIVIDE: tl.constexpr, ADD: tl.constexpr, STATISTICS: tl.constexpr, W: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, STRIDED: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
    INDEX: tl.constexpr, INTERPRET: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Sum block `block` (int64, within its tensor) of the tensor whose table row `_load_row` gave."""
    begin = block * BLOCK
    rows = 0
    cols = 0
    live = None
    if STRIDED:
        rows, cols = tile_rows(begin, length, BLOCK, VECTOR, INDEX)
    if MASKED:
        live = tile(BLOCK, VECTOR) < tile_limit(numel, begin, BLOCK, EVEN)

    for r in tl.static_range(W):
        x = load_float(
            _pick(addresses, r, RANKS), begin, rows, cols, _pick(pitches, r, RANKS), live, (DTYPES >> (2 * r)) & 3,
            WIRE, BLOCK, VECTOR, STRIDED, ALIGNED, INTERPRET, MASKED,
        )  # fmt: skip
        x = widen(x, WIDE, INTERPRET)
        if PREMULTIPLY:
            x = x * premultiply
            if WIRE is not None:
                x = widen(narrow(x, WIRE, INTERPRET), WIDE, INTERPRET)
        # Starting from x_0, not from 0: 0.0 + -0.0 would be 0.0.
        if r == 0:
            total = x
        else:
            total = total + x
    if DIVIDE == 1:
        # By a power of two: multiplying by its reciprocal is the same, and a fraction of the instructions.
        total = total * divisor
    elif DIVIDE == 2:
        # On fp32, `/` is an approximation. On fp64 it is correctly rounded, and div_rn does not exist.
        if WIDE == tl.float64:
            total = total / divisor
        else:
            total = tl.div_rn(total, tl.zeros_like(total) + divisor)

    value = narrow(total, OUTPUT, INTERPRET)
    output = tile_pointers(output_address, begin, 0, 0, 0, OUTPUT, BLOCK, VECTOR, False, ALIGNED)
    if ADD:
        SUM: tl.constexpr = tl.float64 if OUTPUT == tl.float64 else tl.float32
        existing = tl.load(output, mask=live)
        value = narrow(widen(existing, SUM, INTERPRET) + widen(value, SUM, INTERPRET), OUTPUT, INTERPRET)
    if MASKED:
        written = live
        if not ADD:
            value = tl.where(live, value, 0.0)
            written = tile(BLOCK, VECTOR) < tile_limit(writes, begin, BLOCK, EVEN)
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
    ADD: tl.constexpr, STATISTICS: tl.constexpr, W: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr, STRIDED: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, INDEX: tl.constexpr,
    INTERPRET: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum every tensor of `table` (`HEADER`, then rows of `ROW` + 2 W), dealing blocks out to the programs in turn.

    STAGES > 1: few programs take many blocks each. They then go tensor by tensor, so that addresses are loaded outside
    of the loop whose loads are pipelined.
    DIVIDE: 0 for no division, 1 to multiply by the reciprocal that the header then holds, 2 to divide.
    partials: with STATISTICS, [2, blocks]: each block's sum of squares and count of non-finite values, so that what
    they add up to does not depend on which program took which block.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    starts = table + HEADER
    first_row = HEADER + tensors.to(tl.int64) * 2
    partial_stride = full_blocks + edge_blocks
    premultiply = tl.load(table).to(tl.float64, bitcast=True).to(WIDE)
    divisor = tl.load(table + 1).to(tl.float64, bitcast=True).to(WIDE)

    if STAGES > 1:
        for tensor in range(tensors):
            start = tl.load(starts + tensor)
            after = tl.load(starts + tensor + 1, mask=tensor + 1 < tensors, other=full_blocks)
            output, numel, writes, length, addresses, pitches = _load_row(
                table, first_row + tensor * (ROW + 2 * W), W, RANKS
            )
            # Deal on where the tensor before ended: programs' shares differ by one block at most.
            turn = (program + programs - start % programs) % programs
            for block in tl.range(turn, after - start, programs, num_stages=STAGES):
                _accumulate_block(
                    output, numel, writes, length, addresses, pitches, block, premultiply, divisor,
                    partials + start + block, partial_stride, DTYPES, OUTPUT, WIRE, WIDE, PREMULTIPLY, DIVIDE, ADD,
                    STATISTICS, W, RANKS, BLOCK, VECTOR, STRIDED, ALIGNED, EVEN, INDEX, INTERPRET, False,
                )  # fmt: skip
    else:
        first_full = load_starts(starts, tensors, TENSORS)
        for block in tl.range(program, full_blocks, programs, num_stages=1):
            tensor = find_tensor(first_full, block)
            output, numel, writes, length, addresses, pitches = _load_row(
                table, first_row + tensor * (ROW + 2 * W), W, RANKS
            )
            _accumulate_block(
                output, numel, writes, length, addresses, pitches, block - tl.load(starts + tensor), premultiply,
                divisor, partials + block, partial_stride, DTYPES, OUTPUT, WIRE, WIDE, PREMULTIPLY, DIVIDE, ADD,
                STATISTICS, W, RANKS, BLOCK, VECTOR, STRIDED, ALIGNED, EVEN, INDEX, INTERPRET, False,
            )  # fmt: skip

    # Edge blocks go on where the full ones ended, so that no program gets two blocks more than another.
    first_edge = load_starts(starts + tensors, tensors, TENSORS)
    turn = (program + programs - full_blocks % programs) % programs
    for block in tl.range(turn, edge_blocks, programs, num_stages=1):
        tensor = find_tensor(first_edge, block)
        output, numel, writes, length, addresses, pitches = _load_row(
            table, first_row + tensor * (ROW + 2 * W), W, RANKS
        )
        within = block - tl.load(starts + tensors + tensor) + numel // BLOCK
        _accumulate_block(
            output, numel, writes, length, addresses, pitches, within, premultiply, divisor,
            partials + full_blocks + block, partial_stride, DTYPES, OUTPUT, WIRE, WIDE, PREMULTIPLY, DIVIDE, ADD,
            STATISTICS, W, RANKS, BLOCK, VECTOR, STRIDED, ALIGNED, EVEN, INDEX, INTERPRET, True,
        )  # fmt: skip
