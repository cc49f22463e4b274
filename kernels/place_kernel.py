"""Device code of `place` and `pack`."""

# Compile-time constants are upper-case by Triton's custom, and its functions take no types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from tide_triton.kernels.tiles import (
    convert,
    find_tensor,
    load_starts,
    tile,
    tile_limit,
    tile_pointers,
    tile_rows,
)

#: Columns of a table row: source, destination, elements, row length, source pitch, destination pitch.
ROW = tl.constexpr(6)


@triton.jit
def _load_row(table, row):
    """A pair's source and destination address, elements, row length, source and destination pitch."""
    at = table + row
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def _place_block(
    source_address, destination_address, numel, length, source_pitch, destination_pitch, block, SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, STRIDED: tl.constexpr, ALIGNED: tl.constexpr,
    EVEN: tl.constexpr, INDEX: tl.constexpr, INTERPRET: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Copy block `block` (int64, within its tensor) of the pair whose table row `_load_row` gave."""
    begin = block * BLOCK
    rows = 0
    cols = 0
    if STRIDED:
        rows, cols = tile_rows(begin, length, BLOCK, VECTOR, INDEX)
    source = tile_pointers(source_address, begin, rows, cols, source_pitch, SOURCE, BLOCK, VECTOR, STRIDED, ALIGNED)
    destination = tile_pointers(
        destination_address, begin, rows, cols, destination_pitch, DESTINATION, BLOCK, VECTOR, STRIDED, ALIGNED
    )
    if MASKED:
        live = tile(BLOCK, VECTOR) < tile_limit(numel, begin, BLOCK, EVEN)
        x = tl.load(source, mask=live)
    else:
        x = tl.load(source)
    if SOURCE != DESTINATION:
        x = convert(x, DESTINATION, INTERPRET)
    if MASKED:
        tl.store(destination, x, mask=live)
    else:
        tl.store(destination, x)


@triton.jit(do_not_specialize=["tensors", "full_blocks", "edge_blocks"])
def place_kernel(
    table, tensors, full_blocks, edge_blocks, TENSORS: tl.constexpr, SOURCE: tl.constexpr, DESTINATION: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, STRIDED: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
    INDEX: tl.constexpr, INTERPRET: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Copy every tensor of `table` (no header; rows of `ROW`), dealing blocks out to the programs in turn.

    STAGES > 1: few programs take many blocks each. They then go pair by pair, so that addresses are loaded outside of
    the loop whose loads are pipelined.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    table_rows = tensors.to(tl.int64) * 2

    if STAGES > 1:
        for tensor in range(tensors):
            start = tl.load(table + tensor)
            after = tl.load(table + tensor + 1, mask=tensor + 1 < tensors, other=full_blocks)
            src, dst, numel, length, src_pitch, dst_pitch = _load_row(table, table_rows + tensor * ROW)
            # Deal on where the pair before ended: programs' shares differ by one block at most.
            turn = (program + programs - start % programs) % programs
            for block in tl.range(turn, after - start, programs, num_stages=STAGES):
                _place_block(
                    src, dst, numel, length, src_pitch, dst_pitch, block, SOURCE, DESTINATION, BLOCK, VECTOR, STRIDED,
                    ALIGNED, EVEN, INDEX, INTERPRET, False,
                )  # fmt: skip
    else:
        first_full = load_starts(table, tensors, TENSORS)
        for block in tl.range(program, full_blocks, programs, num_stages=1):
            tensor = find_tensor(first_full, block)
            src, dst, numel, length, src_pitch, dst_pitch = _load_row(table, table_rows + tensor * ROW)
            _place_block(
                src, dst, numel, length, src_pitch, dst_pitch, block - tl.load(table + tensor), SOURCE, DESTINATION,
                BLOCK, VECTOR, STRIDED, ALIGNED, EVEN, INDEX, INTERPRET, False,
            )  # fmt: skip

    # Edge blocks go on where the full ones ended, so that no program gets two blocks more than another.
    first_edge = load_starts(table + tensors, tensors, TENSORS)
    turn = (program + programs - full_blocks % programs) % programs
    for block in tl.range(turn, edge_blocks, programs, num_stages=1):
        tensor = find_tensor(first_edge, block)
        src, dst, numel, length, src_pitch, dst_pitch = _load_row(table, table_rows + tensor * ROW)
        within = block - tl.load(table + tensors + tensor) + numel // BLOCK
        _place_block(
            src, dst, numel, length, src_pitch, dst_pitch, within, SOURCE, DESTINATION, BLOCK, VECTOR, STRIDED,
            ALIGNED, EVEN, INDEX, INTERPRET, True,
        )  # fmt: skip
