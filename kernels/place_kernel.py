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
def _place_block(
    table, row, block, SOURCE: tl.constexpr, DESTINATION: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    STRIDED: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr, INDEX: tl.constexpr, INTERPRET: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Copy block `block` (int64, within its tensor) of the tensor whose table row starts at `row`."""
    begin = block * BLOCK
    rows = 0
    cols = 0
    if STRIDED:
        rows, cols = tile_rows(begin, tl.load(table + row + 3), BLOCK, VECTOR, INDEX)
    source = tile_pointers(
        tl.load(table + row), begin, rows, cols, tl.load(table + row + 4), SOURCE, BLOCK, VECTOR, STRIDED, ALIGNED
    )
    destination = tile_pointers(
        tl.load(table + row + 1), begin, rows, cols, tl.load(table + row + 5), DESTINATION, BLOCK, VECTOR, STRIDED,
        ALIGNED,
    )  # fmt: skip
    if MASKED:
        live = tile(BLOCK, VECTOR) < tile_limit(tl.load(table + row + 2), begin, BLOCK, EVEN)
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
    """Copy every tensor of `table` (no header; rows of `ROW`), dealing blocks out to the programs in turn."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    table_rows = tensors.to(tl.int64) * 2

    first_full = load_starts(table, tensors, TENSORS)
    for block in tl.range(program, full_blocks, programs, num_stages=STAGES):
        tensor = find_tensor(first_full, block)
        within = block - tl.load(table + tensor)
        _place_block(
            table, table_rows + tensor * ROW, within, SOURCE, DESTINATION, BLOCK, VECTOR, STRIDED, ALIGNED, EVEN,
            INDEX, INTERPRET, False,
        )  # fmt: skip

    # Edge blocks go on where the full ones ended, so that no program gets two blocks more than another.
    first_edge = load_starts(table + tensors, tensors, TENSORS)
    turn = (program + programs - full_blocks % programs) % programs
    for block in tl.range(turn, edge_blocks, programs, num_stages=1):
        tensor = find_tensor(first_edge, block)
        row = table_rows + tensor * ROW
        within = block - tl.load(table + tensors + tensor) + tl.load(table + row + 2) // BLOCK
        _place_block(
            table, row, within, SOURCE, DESTINATION, BLOCK, VECTOR, STRIDED, ALIGNED, EVEN, INDEX, INTERPRET, True
        )
