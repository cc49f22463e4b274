"""Device code of `prepare_multimem`: sums that the NVSwitch makes while they are loaded.

One `multimem.ld_reduce` at a multicast address reads 16 bytes of every rank of the node and returns 8 bf16 sums. By
the PTX ISA (8.2 and later, sm_90 and later), and by what ptxas makes of it:

- `.acc::f32` keeps intermediate sums in fp32. What comes back is bf16 all the same: the sum is rounded once more, to
  nearest even, on its way out of the switch.
- The order in which the switch adds is not specified, so sums are not those of the rank order bit by bit, and need not
  repeat. See `multimem` for how far they may be off.
- `.relaxed.sys`, since what is read was written on other GPUs. `.weak` gives the same machine code.
- An access has 4, 8 or 16 bytes: there is none of a single bf16. Where a range ends on an odd element, the 4 bytes read
  last hold one element beyond it, which is dropped. As ranges start on 16 bytes, these 4 never leave the allocation.
- Nothing but `multimem` instructions may touch a multicast address.

With EMULATED the kernel reads the ranks' own memory instead, adds in rank order in fp32 and rounds to bf16: what the
switch does, in one of the orders it may take. No multimem instruction is compiled then.
"""

# Compile-time constants are upper-case by Triton's custom, and its functions take no types.
# ruff: noqa: N803, N806, SIM108
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from tide_triton.kernels.tiles import find_tensor, load_starts, narrow, tile, tile_limit, tile_pointers, widen

#: Table header: premultiply and divisor. Row: output, elements, elements to write, then the multicast address, or with
#: EMULATED each rank's address.
HEADER, ROW = tl.constexpr(2), tl.constexpr(3)

#: bf16 elements of an access of 16 bytes.
VECTOR = tl.constexpr(8)

#: In all of them: $0 to $3 are pairs of sums, $4 the address, $5 how many elements of the vector there are.
_SUM_VECTOR = tl.constexpr("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {$0, $1, $2, $3}, [$4];")

_SUM_WHOLE_VECTOR = tl.constexpr("""{
    .reg .pred whole;
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
    setp.ge.s32 whole, $5, 8;
    @whole multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {$0, $1, $2, $3}, [$4];
}""")

#: The pairs of a vector that is not whole. Apart from the above, since a register that may be loaded twice would make
#: every vector wait for the one before.
_SUM_PAIRS = tl.constexpr("""{
    .reg .pred part, some0, some1, some2, some3;
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
    setp.lt.s32 part, $5, 8;
    setp.gt.and.s32 some0, $5, 0, part;
    setp.gt.and.s32 some1, $5, 2, part;
    setp.gt.and.s32 some2, $5, 4, part;
    setp.gt.and.s32 some3, $5, 6, part;
    @some0 multimem.ld_reduce.relaxed.sys.global.add.acc::f32.bf16x2 $0, [$4];
    @some1 multimem.ld_reduce.relaxed.sys.global.add.acc::f32.bf16x2 $1, [$4+4];
    @some2 multimem.ld_reduce.relaxed.sys.global.add.acc::f32.bf16x2 $2, [$4+8];
    @some3 multimem.ld_reduce.relaxed.sys.global.add.acc::f32.bf16x2 $3, [$4+12];
}""")


@triton.jit
def _load_pairs(ASM: tl.constexpr, places, counts):
    """Four uint32 of two bf16 sums for each of `places`. Not pure: a load may be neither repeated nor moved."""
    return tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,l,r", [places, counts],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _unpack(pair):
    """The two bf16 of each uint32, lower half first, as fp32."""
    return (pair << 16).to(tl.float32, bitcast=True), (pair & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _switch_sum(address, numel, begin, BLOCK: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr):
    """Sums of a tile at a multicast address as fp32 [BLOCK // VECTOR, VECTOR], each of them a bf16.

    Zeros from element `numel` on, but for one of no meaning where that is odd. EVEN: it is a multiple of 16.
    """
    first = begin + tl.arange(0, BLOCK // VECTOR) * VECTOR
    places = address + first * 2
    if MASKED:
        counts = tl.minimum(tl.maximum(numel - first, 0), VECTOR).to(tl.int32)
        p0, p1, p2, p3 = _load_pairs(_SUM_WHOLE_VECTOR, places, counts)
        if not EVEN:
            t0, t1, t2, t3 = _load_pairs(_SUM_PAIRS, places, counts)
            # One of the two is 0.
            p0, p1, p2, p3 = p0 | t0, p1 | t1, p2 | t2, p3 | t3
    else:
        p0, p1, p2, p3 = _load_pairs(_SUM_VECTOR, places, VECTOR)
    x0, x1 = _unpack(p0)
    x2, x3 = _unpack(p1)
    x4, x5 = _unpack(p2)
    x6, x7 = _unpack(p3)
    # Each join adds a dimension that runs fastest, so the last one puts neighbours side by side.
    even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return tl.reshape(tl.join(even, odd), (BLOCK // VECTOR, VECTOR))


@triton.jit
def _emulated_sum(
    addresses, begin, live, W: tl.constexpr, BLOCK: tl.constexpr, INTERPRET: tl.constexpr, MASKED: tl.constexpr
):
    """What `_switch_sum` gives, from the `W` addresses at `addresses`, in rank order; zeros outside `live`."""
    for rank in tl.static_range(W):
        pointers = tile_pointers(
            tl.load(addresses + rank), begin, 0, 0, 0, tl.bfloat16, BLOCK, VECTOR, False, True
        )  # fmt: skip
        if MASKED:
            x = tl.load(pointers, mask=live, other=0.0)
        else:
            x = tl.load(pointers)
        x = widen(x, tl.float32, INTERPRET)
        # Starting from the first, not from 0: 0.0 + -0.0 would be 0.0.
        if rank == 0:
            total = x
        else:
            total = total + x
    return widen(narrow(total, tl.bfloat16, INTERPRET), tl.float32, INTERPRET)


@triton.jit
def _sum_block(
    at, block, premultiply, divisor, OUTPUT: tl.constexpr, PREMULTIPLY: tl.constexpr, DIVIDE: tl.constexpr,
    EMULATED: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, INTERPRET: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Sum block `block` (int64, within its range) of the range whose table row is at `at`; MASKED: an edge block, of
    which `block` counts from the last full one.
    """
    numel = tl.load(at + 1)
    live = None
    if MASKED:
        begin = (block + numel // BLOCK) * BLOCK
        live = tile(BLOCK, VECTOR) < tile_limit(numel, begin, BLOCK, EVEN)
    else:
        begin = block * BLOCK
    if EMULATED:
        total = _emulated_sum(at + ROW, begin, live, W, BLOCK, INTERPRET, MASKED)
    else:
        total = _switch_sum(tl.load(at + ROW), numel, begin, BLOCK, EVEN, MASKED)
    if PREMULTIPLY:
        total = total * premultiply
    if DIVIDE == 1:
        # By a power of two: multiplying by its reciprocal is the same, and a fraction of the instructions.
        total = total * divisor
    elif DIVIDE == 2:
        total = tl.div_rn(total, tl.zeros_like(total) + divisor)

    value = narrow(total, OUTPUT, INTERPRET)
    output = tile_pointers(tl.load(at), begin, 0, 0, 0, OUTPUT, BLOCK, VECTOR, False, True)
    if MASKED:
        written = tile(BLOCK, VECTOR) < tile_limit(tl.load(at + 2), begin, BLOCK, EVEN)
        tl.store(output, tl.where(live, value, 0.0), mask=written)
    else:
        tl.store(output, value)


@triton.jit(do_not_specialize=["tensors", "full_blocks", "edge_blocks"])
def multimem_kernel(
    table, tensors, full_blocks, edge_blocks, TENSORS: tl.constexpr, OUTPUT: tl.constexpr, PREMULTIPLY: tl.constexpr,
    DIVIDE: tl.constexpr, EMULATED: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Sum every range of `table` (`HEADER`, then rows of `ROW` + 1, or of `ROW` + W with EMULATED), dealing blocks out
    to the programs in turn.

    DIVIDE: 0 for no division, 1 to multiply by the reciprocal that the header then holds, 2 to divide.
    EVEN: all ranges and outputs hold a multiple of 16 elements.
    """
    WIDTH: tl.constexpr = ROW + W if EMULATED else ROW + 1
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    starts = table + HEADER
    rows = table + HEADER + tensors.to(tl.int64) * 2
    premultiply = tl.load(table).to(tl.float64, bitcast=True).to(tl.float32)
    divisor = tl.load(table + 1).to(tl.float64, bitcast=True).to(tl.float32)

    first_full = load_starts(starts, tensors, TENSORS)
    for block in tl.range(program, full_blocks, programs, num_stages=1):
        tensor = find_tensor(first_full, block)
        _sum_block(
            rows + tensor * WIDTH, block - tl.load(starts + tensor), premultiply, divisor, OUTPUT, PREMULTIPLY, DIVIDE,
            EMULATED, W, BLOCK, EVEN, INTERPRET, False,
        )  # fmt: skip

    # Edge blocks go on where the full ones ended, so that no program gets two blocks more than another.
    first_edge = load_starts(starts + tensors, tensors, TENSORS)
    turn = (program + programs - full_blocks % programs) % programs
    for block in tl.range(turn, edge_blocks, programs, num_stages=1):
        tensor = find_tensor(first_edge, block)
        _sum_block(
            rows + tensor * WIDTH, block - tl.load(starts + tensors + tensor), premultiply, divisor, OUTPUT,
            PREMULTIPLY, DIVIDE, EMULATED, W, BLOCK, EVEN, INTERPRET, True,
        )  # fmt: skip
