"""What the kernels share: finding a block's tensor, addressing a tile, and loading and rounding floats.

A block is a tile of (BLOCK // VECTOR, VECTOR) elements, VECTOR of which lie next to each other in every view. Rows of a
strided view are found by one 32-bit division per vector instead of one 64-bit division per element; a contiguous view
needs none.

A block's tensor is found by comparing its number with all tensors' first blocks, which stay in registers, and
counting. A table with an entry per block would be one load where this is a few shuffles, but a load in front of the
loads that are pipelined, and of the size of the group (a Llama-3.1-70B block has 52 thousand blocks); a binary search
is a chain of dependent loads, or a loop inside the pipelined loop, which the compiler then does not pipeline.
"""

# Compile-time constants are upper-case by Triton's custom, and its functions take no types.
# ruff: noqa: N803, N806, SIM108, SIM300
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def load_starts(table, tensors, TENSORS: tl.constexpr):
    """First blocks of all tensors, int64 [TENSORS], with an unreachable block number beyond `tensors`."""
    index = tl.arange(0, TENSORS)
    return tl.load(table + index, mask=index < tensors, other=0x7FFFFFFFFFFFFFFF)


@triton.jit
def find_tensor(starts, block):
    """The last tensor that starts at or before `block`, which is the one that holds it."""
    return tl.sum((starts <= block).to(tl.int32), axis=0) - 1


@triton.jit
def tile(BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Elements of a tile counted from its start, int32 [BLOCK // VECTOR, VECTOR]."""
    return (tl.arange(0, BLOCK // VECTOR) * VECTOR)[:, None] + tl.arange(0, VECTOR)[None, :]


@triton.jit
def tile_rows(start, cols, BLOCK: tl.constexpr, VECTOR: tl.constexpr, INDEX: tl.constexpr):
    """Row (int64) and column (INDEX) of each vector of the tile at element `start`, both [BLOCK // VECTOR].

    INDEX: a type that holds cols + BLOCK. With VECTOR > 1, start and cols are multiples of it.
    """
    row = start // cols
    first = (start - row * cols) // VECTOR
    width = cols // VECTOR
    vector = first.to(INDEX) + tl.arange(0, BLOCK // VECTOR).to(INDEX)
    down = vector // width.to(INDEX)
    return row + down.to(tl.int64), (vector - down * width.to(INDEX)) * VECTOR


@triton.jit
def tile_pointers(
    address, start, rows, cols, pitch, DTYPE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    STRIDED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Pointers to a tile's elements. rows, cols: from `tile_rows` where STRIDED, else unused.

    Addresses come from memory, where the compiler knows nothing of them: without the hints it takes one element at a
    time.
    """
    base = address.to(tl.pointer_type(DTYPE))
    if STRIDED:
        if ALIGNED:
            base = tl.multiple_of(base, 16)
            # Changes nothing, but tells the compiler. A `multiple_of` on an argument is lost when the call is inlined.
            pitch = pitch // VECTOR * VECTOR
        return base + (rows * pitch + cols)[:, None] + tl.arange(0, VECTOR)[None, :]
    base = base + start
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base + tile(BLOCK, VECTOR)


@triton.jit
def tile_limit(numel, start, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """How many of a tile's elements lie before element `numel`, int32 in [0, BLOCK]. EVEN: it is a multiple of 16."""
    limit = tl.minimum(tl.maximum(numel - start, 0), BLOCK).to(tl.int32)
    if EVEN:
        limit = tl.multiple_of(limit, 16)
    return limit


@triton.jit
def widen(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """`x` as DTYPE, fp32 or fp64, which holds it exactly."""
    if INTERPRET and x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def narrow(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """`x` (fp32 or fp64) as DTYPE, rounded to nearest even; from fp64 to 16 bits by way of fp32, as torch does.

    INTERPRET: round to bf16 in integers, since Triton's interpreter truncates.
    """
    if x.dtype == tl.float64 and (DTYPE == tl.bfloat16 or DTYPE == tl.float16):
        x = x.to(tl.float32)
    if INTERPRET and DTYPE == tl.bfloat16:
        x = x.to(tl.float32)
        bits = x.to(tl.uint32, bitcast=True)
        # Adding just under half of the last kept bit, and that bit, carries exactly when nearest-even rounds up. A NaN
        # could carry into infinity: it keeps its upper bits and is made quiet instead.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, (bits >> 16) | 0x40)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def convert(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """`x`, any float, as DTYPE, any float, rounded like `narrow`."""
    if x.dtype != DTYPE:
        if x.dtype != tl.float64:
            x = widen(x, tl.float32, INTERPRET)
        x = narrow(x, DTYPE, INTERPRET)
    return x


@triton.jit
def load_float(
    address, start, rows, cols, pitch, live, CODE: tl.constexpr, WIRE: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr, STRIDED: tl.constexpr, ALIGNED: tl.constexpr, INTERPRET: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile of floats, rounded to WIRE (None: as it is). CODE: its dtype, as the index in `views.FLOAT_DTYPES`.

    Elements outside `live` are 0 where MASKED.
    """
    DTYPE: tl.constexpr = (
        tl.float32 if CODE == 0 else tl.bfloat16 if CODE == 1 else tl.float16 if CODE == 2 else tl.float64
    )
    pointers = tile_pointers(address, start, rows, cols, pitch, DTYPE, BLOCK, VECTOR, STRIDED, ALIGNED)
    if MASKED:
        x = tl.load(pointers, mask=live, other=0.0)
    else:
        x = tl.load(pointers)
    if WIRE is not None:
        x = convert(x, WIRE, INTERPRET)
    return x
