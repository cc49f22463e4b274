"""Where gradients lie for a switch: every part on 16 bytes, apart, and whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts.strategies import (
    CANARY,
    addresses,
    as_bytes,
    chunks,
    comparing,
    contents,
    group_specs,
    moving,
    poisoned,
    read,
    times_written,
)
from tide_triton.layouts import GroupSpec, SpecError, SwitchLayout, TensorSpec, execute

#: What a switch reads at once.
LINE = 16


@given(group_specs())
@comparing
def test_parts_start_on_16_bytes_and_reads_of_16_stay_within_the_layout_and_apart(spec: GroupSpec) -> None:
    layout = SwitchLayout(spec)
    read_at: set[int] = set()
    for index in range(len(spec.tensors)):
        for owner in range(spec.world_size):
            part = layout.part(index, owner)
            assert part.rows <= 1
            assert part.offset % LINE == 0
            # A switch reads 16 bytes at a time, also where the part ends before.
            lines = range(part.offset // LINE, -(-part.end // LINE))
            assert read_at.isdisjoint(lines)
            assert lines.stop * LINE <= layout.nbytes or not lines
            read_at.update(lines)


@given(group_specs(), st.integers(0, 2**32 - 1))
@moving
def test_copies_fill_every_owners_part_with_its_chunk_and_nothing_else(spec: GroupSpec, seed: int) -> None:
    layout, rng = SwitchLayout(spec), np.random.default_rng(seed)
    memory = poisoned(layout.nbytes)
    times = times_written([], memory)
    for index, tensor in enumerate(layout.tensors):
        assert tensor.dtype == "bfloat16"
        gradient = contents(tensor, rng)
        copies = list(layout.copies(index))
        execute(copies, as_bytes(gradient), memory)
        times += times_written(copies, memory)
        for owner, chunk in enumerate(chunks(gradient, spec.world_size, tensor.shard_dim)):
            assert np.array_equal(read(memory, layout.part(index, owner)), as_bytes(chunk))
    parts = [layout.part(i, owner) for i in range(len(spec.tensors)) for owner in range(spec.world_size)]
    covered = np.array([address for part in parts for address in addresses(part)], dtype=np.int64)
    assert (np.delete(memory, covered) == CANARY).all()
    assert times.max(initial=0) <= 1


def test_an_owner_outside_the_world_has_no_part() -> None:
    layout = SwitchLayout(GroupSpec(2, (TensorSpec("w", (4,), "float32"),)))
    with pytest.raises(SpecError, match="rank must be 0 to 1"):
        layout.part(0, 2)
