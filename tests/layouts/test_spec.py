"""Specs: sizes, what they refuse, and the digest by which ranks compare them."""

from dataclasses import FrozenInstanceError, replace
from enum import StrEnum
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts.strategies import comparing, group_specs, tensor_specs
from tide_triton.layouts import ITEMSIZES, GroupSpec, SpecError, TensorSpec

W = TensorSpec("w", (7, 3), "bfloat16")


@given(tensor_specs())
@comparing
def test_sizes_are_those_of_the_torch_tensor(spec: TensorSpec) -> None:
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    assert (spec.numel, spec.itemsize, spec.nbytes) == (tensor.numel(), tensor.itemsize, tensor.nbytes)
    assert spec.outer * spec.shape[spec.shard_dim] * spec.inner == spec.numel


@pytest.mark.parametrize("dtype", ITEMSIZES)
def test_every_dtype_is_one_of_torch_with_its_size(dtype: str) -> None:
    assert getattr(torch, dtype).itemsize == ITEMSIZES[dtype]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "name must be a non-empty string, got ''"),
        ({"name": None}, "name must be a non-empty string, got None"),
        ({"shape": ()}, "tensor 'w': shape has no dims"),
        ({"shape": 7}, "tensor 'w': shape must be a sequence of integers >= 0, got 7"),
        ({"shape": (7, -3)}, r"tensor 'w': shape must hold integers >= 0, got \[7, -3\]"),
        ({"shape": (7, 3.0)}, r"tensor 'w': shape must hold integers >= 0, got \[7, 3.0\]"),
        ({"shape": (7, True)}, r"tensor 'w': shape must hold integers >= 0, got \[7, True\]"),
        ({"shape": "73"}, r"tensor 'w': shape must hold integers >= 0, got \['7', '3'\]"),
        ({"dtype": "bf16"}, "tensor 'w': dtype 'bf16' has no layout; use one of float64, float32, bfloat16"),
        ({"dtype": torch.bfloat16}, "tensor 'w': dtype torch.bfloat16 must be given by its name, 'bfloat16'"),
        ({"dtype": ["bfloat16"]}, r"tensor 'w': dtype \['bfloat16'\] has no layout"),
        ({"shard_dim": 2}, r"tensor 'w': shard_dim must be 0 to 1 for shape \[7, 3\], got 2"),
        ({"shard_dim": -1}, r"tensor 'w': shard_dim must be 0 to 1 for shape \[7, 3\], got -1"),
        ({"shard_dim": True}, r"tensor 'w': shard_dim must be 0 to 1 for shape \[7, 3\], got True"),
        ({"shard_dim": None}, r"tensor 'w': shard_dim must be 0 to 1 for shape \[7, 3\], got None"),
    ],
)
def test_a_bad_tensor_is_refused_naming_field_and_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(W, **fields)


@pytest.mark.parametrize("world_size", [0, -1, 1.0, True, None, "2"])
def test_a_bad_world_size_is_refused_naming_the_value(world_size: Any) -> None:
    with pytest.raises(SpecError, match=f"world_size must be an integer >= 1, got {world_size!r}"):
        GroupSpec(world_size, (W,))


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(SpecError, match="tensor 'w' occurs twice in its group"):
        GroupSpec(2, (W, TensorSpec("v", (1,), "int8"), replace(W, shape=(2,))))


def test_a_spec_error_is_a_value_error() -> None:
    assert issubclass(SpecError, ValueError)


def test_specs_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        W.name = "v"  # type: ignore[misc]


@given(group_specs())
@comparing
def test_any_sequence_makes_the_same_spec_with_the_same_digest(spec: GroupSpec) -> None:
    tensors = [TensorSpec(t.name, torch.Size(t.shape), t.dtype, t.shard_dim) for t in spec.tensors]
    again = GroupSpec(spec.world_size, tensors)  # type: ignore[arg-type]
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.digest == spec.digest
    assert all(type(tensor.shape) is tuple for tensor in again.tensors)


def test_the_digest_does_not_depend_on_the_class_that_carries_a_value() -> None:
    class Dtype(StrEnum):
        BF16 = "bfloat16"

    assert GroupSpec(2, (replace(W, dtype=Dtype.BF16),)).digest == GroupSpec(2, (W,)).digest


@given(group_specs(min_tensors=1), st.data())
@comparing
def test_the_digest_changes_with_every_field(spec: GroupSpec, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(spec.tensors) - 1))
    tensor = spec.tensors[index]
    grown = tuple(size + (dim == 0) for dim, size in enumerate(tensor.shape))
    changed = [
        replace(tensor, name=tensor.name + "'"),
        replace(tensor, shape=grown),
        replace(tensor, shape=(*tensor.shape, 1)),
        *(replace(tensor, dtype=dtype) for dtype in ITEMSIZES if dtype != tensor.dtype),
        *(replace(tensor, shard_dim=dim) for dim in range(len(tensor.shape)) if dim != tensor.shard_dim),
    ]
    specs = [GroupSpec(spec.world_size, (*spec.tensors[:index], t, *spec.tensors[index + 1 :])) for t in changed]
    specs += [GroupSpec(spec.world_size + 1, spec.tensors), GroupSpec(spec.world_size, spec.tensors[1:])]
    if len(spec.tensors) > 1:
        specs.append(GroupSpec(spec.world_size, spec.tensors[::-1]))
    digests = [spec.digest, *(s.digest for s in specs)]
    assert len(set(digests)) == len(digests)


@given(group_specs())
@comparing
def test_the_digest_is_64_bits_of_hex(spec: GroupSpec) -> None:
    assert len(spec.digest) == 16
    assert int(spec.digest, 16) >= 0
