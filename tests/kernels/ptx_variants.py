"""Compile the variants whose PTX `test_compile.py` reads, and print it as JSON. Triton must not interpret."""

import json

import torch

from tide_triton.kernels.accumulate import AccumulateVariant
from tide_triton.kernels.compile import Compiled, compile_ptx
from tide_triton.kernels.place import PlaceVariant

BF16, FP32 = torch.bfloat16, torch.float32

ACCUMULATE = {
    "accumulate two": AccumulateVariant((BF16,) * 2, FP32, divide=True),
    "accumulate halves": AccumulateVariant((BF16,) * 2, FP32, divide=True, by_reciprocal=True),
    "accumulate eight": AccumulateVariant((BF16,) * 8, FP32),
    "accumulate strided": AccumulateVariant((BF16,) * 2, FP32, divide=True, strided=True),
    "accumulate all options": AccumulateVariant(
        (FP32, BF16), BF16, BF16, premultiply=True, divide=True, add=True, statistics=True
    ),
    "accumulate fp32 times": AccumulateVariant((FP32,) * 2, FP32, premultiply=True, statistics=True),
    "accumulate fp64": AccumulateVariant((torch.float64,) * 2, torch.float64, divide=True),
    "accumulate unaligned": AccumulateVariant((BF16,) * 2, FP32, aligned=False, even=False),
}
PLACE = {
    "place": PlaceVariant(FP32, BF16),
    "place strided": PlaceVariant(FP32, BF16, strided=True),
    "place wide": PlaceVariant(FP32, BF16, strided=True, wide=True),
    "place copy": PlaceVariant(torch.bool, torch.bool),
    "place unaligned": PlaceVariant(FP32, BF16, aligned=False, even=False),
}
#: Compiled for sm_100 too; the others would add time and say the same.
ON_BLACKWELL = ("accumulate two", "accumulate eight", "accumulate strided", "place", "place strided", "place unaligned")


def main() -> None:
    """One line of JSON: "sm: variant" -> the fields of `Compiled`."""
    found: dict[str, Compiled] = {}
    variants: dict[str, AccumulateVariant | PlaceVariant] = {**ACCUMULATE, **PLACE}
    for name, variant in variants.items():
        found[f"sm_90: {name}"] = compile_ptx(variant, 90)
    for name in ON_BLACKWELL:
        found[f"sm_100: {name}"] = compile_ptx(variants[name], 100)
    found["sm_90: accumulate two, a CTA per block"] = compile_ptx(ACCUMULATE["accumulate two"], 90, persistent=False)
    found["sm_90: place, a CTA per block"] = compile_ptx(PLACE["place"], 90, persistent=False)
    print(json.dumps({name: {"ptx": c.ptx, "shared": c.shared, "warps": c.num_warps} for name, c in found.items()}))


if __name__ == "__main__":
    main()
