"""Node-local sums: the emulated switch against its twin, the kernel's assembly on a model of a switch, and its PTX.

Nothing here runs a multimem instruction: run as a module, this file compiles the kernel and prints what came of it.
"""

import json
import re
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder

from tests.kernels.helpers import DEVICE, assert_only_written, assert_same_bits, poisoned, values
from tests.kernels.multimem_switch import Switch
from tests.kernels.test_compile import without_interpreter
from tide_triton.kernels import Multicast, Tuning, UnsupportedDtypeError, multimem_reference, prepare_multimem
from tide_triton.kernels.compile import compile_kernel
from tide_triton.kernels.launch import interpreted, start
from tide_triton.kernels.multimem import MultimemVariant, _check_switch, _prepare
from tide_triton.kernels.multimem_kernel import multimem_kernel

# The interpreter adds infinities with numpy, which warns of what IEEE defines.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BF16, FP32 = torch.bfloat16, torch.float32

#: Small blocks, so that small ranges have full and edge blocks.
SMALL = Tuning(block=128, warps=4, stages=1)

few = settings(deadline=None, max_examples=30)
ranges = st.lists(
    st.tuples(st.one_of(st.integers(0, 40), st.integers(100, 400), st.sampled_from((128, 256))), st.integers(0, 20)),
    min_size=1,
    max_size=4,
)
outputs = st.sampled_from((FP32, BF16))
factors = st.sampled_from((1.0, 3.0, 1 / 3, 0.125))
ctas = st.sampled_from((None, 1, 3))


def placed(sizes: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Poisoned memory, and tensors of these sizes in it, on 16 bytes each and with poison between them."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += (size * dtype.itemsize + 16) // 16 * 16
    memory = poisoned(total)
    return memory, [memory.view(dtype)[at // dtype.itemsize :][:size] for at, size in zip(starts, sizes, strict=True)]


def windows(world_size: int, sizes: Sequence[int], *, special: bool) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Each rank's window: the same ranges at the same offsets, with values of its own."""
    made = []
    for rank in range(world_size):
        memory, tensors = placed(sizes, BF16)
        for index, tensor in enumerate(tensors):
            tensor.copy_(values(tensor.numel(), BF16, seed=100 * index + rank, special=special))
        made.append((memory, tensors))
    return made


@given(st.integers(1, 8), ranges, outputs, factors, factors, ctas)
@few
def test_the_emulated_switch_adds_like_the_twin_and_writes_nothing_else(
    world_size: int,
    sizes: list[tuple[int, int]],
    dtype: torch.dtype,
    premultiply: float,
    divisor: float,
    ctas: int | None,
) -> None:
    ranks = windows(world_size, [numel for numel, _ in sizes], special=True)
    sources = [[tensors[index] for _, tensors in ranks] for index in range(len(sizes))]
    written = [numel + padding for numel, padding in sizes]
    (memory, got), (twin, expected) = placed(written, dtype), placed(written, dtype)
    options: dict[str, Any] = {"premultiply": premultiply, "divisor": divisor}
    prepare_multimem(sources, got, engine="triton", ctas=ctas, tuning=SMALL, **options)()
    multimem_reference(sources, expected, **options)
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_same_bits(a, b, f"range {index} of {sizes}")
    assert_only_written(memory, got)
    assert_only_written(twin, expected)


def test_a_sum_has_fp32_inside_and_bf16_at_the_end() -> None:
    parts = [torch.full((20,), x, dtype=BF16, device=DEVICE) for x in (1.0, 2**-9, 2**-9, 2**-9, -1.0)]
    got = torch.empty(20, device=DEVICE)
    prepare_multimem([parts], [got], engine="triton")()
    assert torch.equal(got, torch.full_like(got, 3 * 2**-9))  # Added in bf16, it were 0.
    prepare_multimem([parts[:3]], [got], engine="triton")()
    assert torch.equal(got, torch.ones_like(got))  # 1 + 2^-8 is no bf16.


def test_on_cpu_the_twin_runs() -> None:
    parts = [torch.full((20,), x, dtype=BF16) for x in (1.0, 2.0)]
    got = torch.full((23,), float("nan"))
    prepared = prepare_multimem([parts], [got], divisor=2.0)
    assert not prepared.is_reusable
    prepared()
    assert got.tolist() == [1.5] * 20 + [0.0] * 3


def on_switch(
    sizes: Sequence[tuple[int, int]],
    order: Sequence[int],
    dtype: torch.dtype,
    ctas: int | None = None,
    *,
    factors: tuple[float, float] = (1.0, 1.0),
    special: bool = False,
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """What the kernel writes where the switch adds the ranks in `order`, and what the ranks hold, per range.

    Checks that every pair of a range is read once, nothing else is read, and nothing is written beside the outputs.
    """
    ranks = windows(len(order), [numel for numel, _ in sizes], special=special)
    switch = Switch([memory for memory, _ in ranks], order)
    own_memory, own = ranks[0]
    offsets = [tensor.data_ptr() - own_memory.data_ptr() for tensor in own]
    sources = [Multicast(switch.base + at, x.numel()) for at, x in zip(offsets, own, strict=True)]
    memory, got = placed([numel + padding for numel, padding in sizes], dtype)
    with patch.object(InterpreterBuilder, "create_inline_asm", switch.create_inline_asm):
        for launch in _prepare(sources, got, factors, SMALL):
            start(multimem_kernel, launch, ctas)
    expected = np.zeros_like(switch.reads)
    for at, (numel, _) in zip(offsets, sizes, strict=True):
        expected[at // 4 : at // 4 + -(-numel // 2)] = 1
    assert (switch.reads == expected).all()
    results = [x.clone() for x in got]
    assert_only_written(memory, got)
    return results, [[tensors[index] for _, tensors in ranks] for index in range(len(sizes))]


needs_interpreter = pytest.mark.skipif(not interpreted(multimem_kernel), reason="Triton compiles in this process")


@needs_interpreter
@given(st.integers(1, 8), ranges, outputs, factors, factors, ctas)
@few
def test_the_assembly_reads_every_element_once_and_the_kernel_puts_each_in_its_place(
    world_size: int,
    sizes: list[tuple[int, int]],
    dtype: torch.dtype,
    premultiply: float,
    divisor: float,
    ctas: int | None,
) -> None:
    got, sources = on_switch(sizes, range(world_size), dtype, ctas, factors=(premultiply, divisor), special=True)
    _, expected = placed([x.numel() for x in got], dtype)
    multimem_reference(sources, expected, premultiply=premultiply, divisor=divisor)
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_same_bits(a, b, f"range {index} of {sizes}")


@needs_interpreter
@given(st.permutations(range(8)), st.integers(1, 8))
@few
def test_in_any_order_sums_stay_within_the_bound(order: list[int], world_size: int) -> None:
    order = [rank for rank in order if rank < world_size]
    (got,), (source,) = on_switch([(300, 0)], order, FP32)
    exact = sum(x.double() for x in source)
    eps = (world_size - 1) * 2**-24
    inside = eps / (1 - eps) * sum(x.double().abs() for x in source)
    assert bool(((got.double() - exact).abs() <= inside + 2**-8 * (exact.abs() + inside)).all())
    assert torch.equal(got, got.to(BF16).float())


@needs_interpreter
def test_the_owners_parts_of_a_node_make_up_the_whole_sum() -> None:
    whole, cut = 1000, [0, 136, 264, 600, 1000]
    ranks = [values(whole, BF16, seed=rank, special=False) for rank in range(4)]
    expected = torch.empty(whole)
    multimem_reference([ranks], [expected], divisor=4.0)
    parts = [torch.empty(b - a) for a, b in pairwise(cut)]
    switch = Switch([x.view(torch.uint8) for x in ranks], range(4))
    with patch.object(InterpreterBuilder, "create_inline_asm", switch.create_inline_asm):
        for begin, part in zip(cut, parts, strict=False):
            for launch in _prepare([Multicast(switch.base + 2 * begin, part.numel())], [part], (1.0, 4.0), None):
                start(multimem_kernel, launch, 1)
    assert torch.equal(torch.cat(parts), expected)


def _refused(error: type[Exception], match: str, sources: Any, outputs: Any, **options: Any) -> None:
    with pytest.raises(error, match=match):
        prepare_multimem(sources, outputs, **options)


def test_what_does_not_fit_is_refused_by_name_and_value() -> None:
    x, out = torch.zeros(24, dtype=BF16), torch.zeros(24)
    _refused(ValueError, "got 1 sources and 0 outputs", [[x]], [])
    _refused(ValueError, r"sources\[1\] is empty", [[x], []], [out, out])
    _refused(ValueError, r"sources\[1\] has 1 ranks and sources\[0\] 2 ranks", [[x, x], [x]], [out, out])
    _refused(ValueError, r"sources\[1\] has a multicast range", [[x], Multicast(1024, 24)], [out, out])
    _refused(ValueError, r"sources\[0\]\[1\] holds 8 elements and sources\[0\]\[0\] 24", [[x, x[:8]]], [out])
    _refused(ValueError, r"outputs\[0\] holds 8 elements, too few for sources\[0\] of 24", [[x]], [out[:8]])
    _refused(ValueError, r"sources\[0\]\[0\] must be contiguous", [[x.view(4, 6)[:, :2]]], [out])
    _refused(ValueError, r"sources\[0\]\[1\] must start on 16 bytes, got address 0x", [[x[:16], x[4:20]]], [out])
    _refused(ValueError, r"outputs\[0\] must start on 16 bytes, got address 0x", [[x[:16]]], [out[2:]])
    _refused(ValueError, "must start on 16 bytes, got address 0x408", [Multicast(0x408, 24)], [out])
    _refused(ValueError, "must have an address > 0", [Multicast(0, 24)], [out])
    _refused(ValueError, "ctas must be >= 1", [[x]], [out], ctas=0)
    _refused(UnsupportedDtypeError, r"sources\[0\]\[0\] has dtype float16; it must be bfloat16", [[x.half()]], [out])
    _refused(UnsupportedDtypeError, r"outputs\[0\] has dtype float64; it must be float32 or", [[x]], [out.double()])


def test_multicast_ranges_are_refused_where_no_switch_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    multicast, out = Multicast(1024, 24), torch.zeros(24)
    _refused(ValueError, "multicast ranges need CUDA outputs, got cpu; pass each rank's", [multicast], [out])
    _refused(ValueError, 'engine="torch" cannot read multicast ranges', [multicast], [out], engine="torch")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"need compute capability 9\.0, and cuda:0 has 8\.0"):
        _check_switch(torch.device("cuda:0"), "auto")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    _check_switch(torch.device("cuda:0"), "auto")


VARIANTS = {
    "even": MultimemVariant(FP32),
    "odd": MultimemVariant(FP32, premultiply=True, divide=True, even=False),
    "bf16 odd": MultimemVariant(BF16, divide=True, by_reciprocal=True, even=False),
    "emulated": MultimemVariant(FP32, ranks=8, divide=True, even=False),
}
#: Compiled for sm_100 too; the others would add time and say the same.
ON_BLACKWELL = ("even", "odd")
LOAD = "multimem.ld_reduce.relaxed.sys.global.add.acc::f32"


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    """PTX, machine code and shared memory by "sm_90: variant"."""
    found: dict[str, dict[str, Any]] = json.loads(without_interpreter("-m", "tests.kernels.test_multimem"))
    return found


def test_the_switch_adds_16_bytes_an_access_in_fp32_on_hopper_and_blackwell(compiled: dict[str, Any]) -> None:
    for name, found in compiled.items():
        vectors, pairs = (found["ptx"].count(f"{LOAD}.{form} ") for form in ("v4.bf16x2", "bf16x2"))
        if "emulated" in name:
            assert not re.search(r"multimem\.\w+\.|\bLDGMC", found["ptx"] + found["sass"]), name
            continue
        # A thread has 4 vectors of a block, in each of the two loops; only tails go by pairs.
        assert (vectors, pairs) == (8, 16 if "odd" in name else 0), name
        assert len(re.findall(r"multimem\.\w+\.", found["ptx"])) == vectors + pairs, name
        instruction = "LDGMC.E.F32ADD.BF16x8.RN.STRONG.SYS" if "sm_90" in name else "LDGMC.E.HPADD.BF16x8.RN.STRONG.SYS"
        assert found["sass"].count(instruction) == vectors, name


def test_nothing_spills_and_stores_take_16_bytes(compiled: dict[str, Any]) -> None:
    for name, found in compiled.items():
        assert not re.search(r"\.local\b|__local_depot", found["ptx"]), name
        assert not re.search(r"\b(?:STL|LDL)\b", found["sass"]), name
        assert found["shared"] <= 227 * 1024, name
        assert "st.global.v4.b32" in found["ptx"], name
        assert not re.search(r"\bfma\.|\.ftz|\.approx|div\.full", found["ptx"]), name


def main() -> None:
    """One line of JSON for `compiled`. Triton must not interpret."""
    found = {}
    for capability, name in [*product((90,), VARIANTS), *product((100,), ON_BLACKWELL)]:
        kernel = compile_kernel(VARIANTS[name], capability)
        parts = {"ptx": kernel.asm["ptx"], "sass": kernel.asm["sass"], "shared": kernel.metadata.shared}
        found[f"sm_{capability}: {name}"] = parts
    print(json.dumps(found))


if __name__ == "__main__":
    main()
