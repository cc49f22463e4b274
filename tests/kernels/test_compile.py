"""What the compiler makes of the kernels on sm_90 and sm_100, read from PTX; and imports that need no GPU."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tide_triton.kernels.compile import compile_ptx
from tide_triton.kernels.launch import interpreted
from tide_triton.kernels.place import PlaceVariant
from tide_triton.kernels.place_kernel import place_kernel

ROOT = Path(__file__).parents[2]

#: Accesses to global memory of less than 16 bytes, but for the 8 bytes of a table entry or a block's partial sum.
NARROW = re.compile(r"(?:ld|st)\.global\.(?:v2\.)?[bfsu](?:8|16|32)\b|cp\.async\.ca\.shared\.global [^;]*, 0x4,")
WIDE_LOAD = re.compile(r"cp\.async\.cg\.shared\.global [^;]*, 0x10,|ld\.global\.v4\.b32|ld\.global\.v2\.b64")
WIDE_STORE = re.compile(r"st\.global\.v4\.b32|st\.global\.v2\.b64")

Variants = dict[str, dict[str, Any]]
Select = Callable[..., dict[str, str]]


def without_interpreter(*command: str) -> str:
    """Standard output of a Python process in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def variants() -> Variants:
    """All variants of `ptx_variants`, compiled in one process."""
    found: Variants = json.loads(without_interpreter("-m", "tests.kernels.ptx_variants"))
    return found


@pytest.fixture(scope="module")
def ptx(variants: Variants) -> Select:
    """`ptx("two", "strided")`: PTX by name of the variants whose names hold any of the words; without words, all."""

    def select(*words: str) -> dict[str, str]:
        found = {name: v["ptx"] for name, v in variants.items() if not words or any(word in name for word in words)}
        assert found
        return found

    return select


def test_aligned_kernels_move_16_bytes_an_access(ptx: Select) -> None:
    for name, text in ptx().items():
        if "unaligned" in name:
            continue
        assert WIDE_LOAD.search(text), name
        assert WIDE_STORE.search(text), name
        narrow = set(NARROW.findall(text))
        # Statistics store two fp32 numbers per block.
        allowed = {"st.global.b32"} if "all options" in name or "fp32 times" in name else set()
        assert narrow <= allowed, name


def test_unaligned_kernels_assume_nothing_of_addresses(ptx: Select) -> None:
    for name, text in ptx("unaligned").items():
        assert not re.search(r"(?:ld|st)\.global\.v\d|cp\.async\.cg", text), name
        assert NARROW.search(text), name


def test_loops_over_blocks_are_pipelined(ptx: Select, variants: Variants) -> None:
    for name, text in ptx("accumulate two", "eight", "strided", "all options").items():
        buffered = len(re.findall(r"cp\.async\.cg", text))
        assert (buffered == 0) == ("a CTA per block" in name), name
    assert variants["sm_90: accumulate two"]["shared"] >= 2 * 2 * 8192 * 2
    assert variants["sm_90: accumulate eight"]["shared"] >= 2 * 8 * 2048 * 2


def test_shared_memory_fits_and_nothing_spills_to_local_memory(ptx: Select, variants: Variants) -> None:
    for name, text in ptx().items():
        assert not re.search(r"\.local\b|__local_depot", text), name
        assert variants[name]["shared"] <= 227 * 1024, name


def test_addresses_have_64_bits(ptx: Select) -> None:
    for name, text in ptx().items():
        assert ".address_size 64" in text, name
        assert not re.search(r"(?:ld|st)\.global\.\S+\s[^;]*\[\s*%r\d", text), name


def test_sums_are_added_divided_and_cast_as_they_are_written(ptx: Select) -> None:
    for name, text in ptx().items():
        assert not re.search(r"\bfma\.|\.ftz|\.approx|div\.full", text), name
    for name, text in ptx("accumulate two", "accumulate strided", "all options").items():
        assert "div.rn.f32" in text, name
    for name, text in ptx("halves").items():
        assert "div.rn.f32" not in text, name
        assert "mul.rn.f32" in text or "mul.f32" in text, name
    for name, text in ptx("fp64").items():
        assert "div.rn.f64" in text, name
        assert "add.rn.f64" in text or "add.f64" in text, name
    for name, text in ptx("eight").items():
        assert "div.rn.f32" not in text, name
    for name, text in ptx("sm_90: place", "sm_90: place strided").items():
        if "copy" not in name:
            assert re.search(r"cvt\.rn\.bf16x?2?\.f32", text), name


def test_rows_are_found_by_32_bit_division_unless_they_are_too_long_for_it(ptx: Select) -> None:
    for name, text in ptx("strided").items():
        # Vectors of 8: one division each, for the 2 a thread has in each of the two loops.
        assert len(re.findall(r"div\.[su]32", text)) <= 16, name
    for name, text in ptx("wide").items():
        assert len(re.findall(r"div\.[su]64", text)) > 4, name
    for name, text in ptx("accumulate two", "eight").items():
        assert not re.search(r"div\.[su](?:32|64)", text), name


def test_compiling_where_triton_interprets_is_refused() -> None:
    if interpreted(place_kernel):
        with pytest.raises(RuntimeError, match="Triton interprets in this process"):
            compile_ptx(PlaceVariant(torch.float32, torch.bfloat16))


def test_importing_needs_no_gpu_and_leaves_the_environment_alone() -> None:
    code = (
        "import os; before = dict(os.environ); import torch, tide_triton.kernels as k;"
        "assert dict(os.environ) == before; assert not torch.cuda.is_initialized();"
        "x = torch.ones(4); y = torch.zeros(4, dtype=torch.bfloat16); k.place([x], [y]); assert y.sum() == 4;\n"
        "try: k.place([x], [y], engine='triton')\n"
        "except ValueError as e: assert 'needs CUDA tensors, got cpu' in str(e)\n"
        "else: raise SystemExit('no error')"
    )
    without_interpreter("-c", code)
