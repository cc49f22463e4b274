"""Compile the kernels ahead of time, without a GPU, to look at their PTX.

    compiled = compile_ptx(AccumulateVariant((torch.bfloat16,) * 2, torch.float32), capability=90)
    print(compiled.ptx)

Needs a process in which Triton does not interpret (no `TRITON_INTERPRET` when it was imported).
"""

from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tide_triton.kernels.accumulate import AccumulateVariant
from tide_triton.kernels.accumulate_kernel import accumulate_kernel
from tide_triton.kernels.launch import Tuning, interpreted
from tide_triton.kernels.multimem import MultimemVariant
from tide_triton.kernels.multimem_kernel import multimem_kernel
from tide_triton.kernels.place import DEFAULT_TUNING, PlaceVariant
from tide_triton.kernels.place_kernel import place_kernel

Variant = PlaceVariant | AccumulateVariant | MultimemVariant


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel's PTX. shared: bytes of shared memory of a CTA, of which sm_90 and sm_100 allow 232448."""

    ptx: str
    shared: int
    num_warps: int


def compile_ptx(
    variant: Variant,
    capability: int = 90,
    *,
    persistent: bool = True,
    tuning: Tuning | None = None,
    tensors: int = 16,
) -> Compiled:
    """Compile the kernel of `variant` for compute capability `capability` (90: Hopper, 100: Blackwell).

    persistent: as with `ctas`, a pipelined loop over blocks. tuning: None for the default. tensors: how many the kernel
    takes, rounded up to a power of two.

    Raises RuntimeError where Triton interprets.
    """
    compiled = compile_kernel(variant, capability, persistent=persistent, tuning=tuning, tensors=tensors)
    return Compiled(compiled.asm["ptx"], compiled.metadata.shared, compiled.metadata.num_warps)


def compile_kernel(
    variant: Variant,
    capability: int = 90,
    *,
    persistent: bool = True,
    tuning: Tuning | None = None,
    tensors: int = 16,
) -> Any:
    """As `compile_ptx`, but Triton's own object, whose `asm` holds machine code too ("sass", on demand)."""
    if interpreted(place_kernel):
        raise RuntimeError("Triton interprets in this process; compile in one without TRITON_INTERPRET=1")
    signature = {"table": "*i64", "tensors": "i32", "full_blocks": "i32", "edge_blocks": "i32"}
    if isinstance(variant, MultimemVariant):
        kernel, chosen = multimem_kernel, tuning or variant.tuning()
        constants = variant.constants(chosen, interpret=False)
    elif isinstance(variant, AccumulateVariant):
        kernel, chosen = accumulate_kernel, tuning or variant.tuning()
        constants = variant.constants(chosen, persistent, interpret=False)
        # Without statistics `accumulate` passes the table once more.
        wide = "*fp64" if variant.output.itemsize == 8 else "*fp32"
        signature["partials"] = wide if variant.statistics else "*i64"
    else:
        kernel, chosen = place_kernel, tuning or DEFAULT_TUNING
        constants = variant.constants(chosen, persistent, interpret=False)
    constants["TENSORS"] = triton.next_power_of_2(tensors)
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    # Tables and partial sums are allocated by torch, on bounds of 16 bytes and more.
    attributes = {(index,): [["tt.divisibility", 16]] for index, t in enumerate(types.values()) if t.startswith("*")}
    return triton.compile(
        ASTSource(kernel, types, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": chosen.warps, "enable_fp_fusion": False},
    )
