"""Triton kernels over lists of tensors, each with a naive torch twin that gives the same bits.

| function           | moves                                           | kernel              | twin in `reference`    |
|--------------------|-------------------------------------------------|---------------------|------------------------|
| `place`            | shards, cast, into their places of a slot       | `place_kernel`      | `place_reference`      |
| `pack`             | strided regions back into contiguous shards     | `place_kernel`      | `place_reference`      |
| `accumulate`       | contributions, added in rank order, into shards | `accumulate_kernel` | `accumulate_reference` |
| `prepare_multimem` | contributions, added by NVSwitch, into shards   | `multimem_kernel`   | `multimem_reference`   |

A list takes one launch, whatever the number of tensors in it: they reach the kernel through a table in device memory
(`tables`). On CPU tensors the twins run. `compile` gives the kernels' PTX without a GPU.
"""

from tide_triton.kernels.accumulate import accumulate, default_tuning, prepare_accumulate
from tide_triton.kernels.launch import Tuning
from tide_triton.kernels.multimem import Multicast, prepare_multimem
from tide_triton.kernels.place import pack, place, prepare_place
from tide_triton.kernels.reference import accumulate_reference, multimem_reference, place_reference
from tide_triton.kernels.tables import TableCache
from tide_triton.kernels.views import UnsupportedDtypeError

__all__ = [
    "Multicast",
    "TableCache",
    "Tuning",
    "UnsupportedDtypeError",
    "accumulate",
    "accumulate_reference",
    "default_tuning",
    "multimem_reference",
    "pack",
    "place",
    "place_reference",
    "prepare_accumulate",
    "prepare_multimem",
    "prepare_place",
]
