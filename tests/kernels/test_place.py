"""Shards cast into their places, bit by bit against the twin, and nothing written beside them."""

import importlib
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.helpers import (
    DEVICE,
    FLOATS,
    assert_only_written,
    assert_same_bits,
    bytes_of,
    groups,
    poisoned,
    region_view,
    values,
)
from tide_triton.kernels import TableCache, Tuning, UnsupportedDtypeError, pack, place, place_reference
from tide_triton.kernels.launch import start
from tide_triton.kernels.place import _prepare
from tide_triton.kernels.place_kernel import place_kernel
from tide_triton.layouts import GroupSpec, Region, SlotLayout, shard

# The interpreter adds infinities and casts to fp16 with numpy, which warns of what IEEE defines.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

#: Small blocks, so that small tensors have full and edge blocks.
SMALL = Tuning(block=128, warps=4, stages=2)

few = settings(deadline=None, max_examples=30)
ctas = st.sampled_from([None, 1, 3])


def places_of(memory: torch.Tensor, spec: GroupSpec, rank: int) -> list[torch.Tensor]:
    """Views of a slot on rank `rank`'s shards."""
    layout = SlotLayout(spec, 16)
    return [
        region_view(memory, layout.region(index, rank), getattr(torch, tensor.dtype))
        for index, tensor in enumerate(spec.tensors)
    ]


@given(groups(), st.data(), st.sampled_from(FLOATS), ctas)
@few
def test_the_kernel_places_shards_like_the_twin_and_writes_nothing_else(
    spec: GroupSpec, data: st.DataObject, source_dtype: torch.dtype, ctas: int | None
) -> None:
    rank = data.draw(st.integers(0, spec.world_size - 1))
    sources = [values(shard(t, spec.world_size, rank).numel, source_dtype, i) for i, t in enumerate(spec.tensors)]
    slot, twin = (poisoned(SlotLayout(spec, 16).nbytes) for _ in range(2))
    got, expected = places_of(slot, spec, rank), places_of(twin, spec, rank)

    place(sources, got, engine="triton", ctas=ctas, tuning=SMALL)
    place_reference(sources, expected)

    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_same_bits(a, b, f"tensor {index} of {spec}")
    assert_only_written(slot, got)
    assert_only_written(twin, expected)


@given(groups(), st.data(), ctas)
@few
def test_packing_what_was_placed_gives_the_shards_back(spec: GroupSpec, data: st.DataObject, ctas: int | None) -> None:
    rank = data.draw(st.integers(0, spec.world_size - 1))
    slot = poisoned(SlotLayout(spec, 16).nbytes)
    regions = places_of(slot, spec, rank)
    shards = [values(region.numel(), region.dtype, index) for index, region in enumerate(regions)]
    memory = [poisoned(8 * x.numel() + 8) for x in shards]
    packed = [m.view(x.dtype)[: x.numel()] for m, x in zip(memory, shards, strict=True)]

    place(shards, regions, engine="triton", ctas=ctas, tuning=SMALL)
    pack(regions, packed, engine="triton", ctas=ctas, tuning=SMALL)

    for x, back in zip(shards, packed, strict=True):
        assert_same_bits(back, x)
    for m, back in zip(memory, packed, strict=True):
        assert_only_written(m, [back])


@pytest.mark.parametrize(("source", "destination"), itertools.permutations(FLOATS, 2))
def test_every_cast_rounds_like_torch(source: torch.dtype, destination: torch.dtype) -> None:
    x = values(3000, source, seed=7)
    got = torch.empty(3000, dtype=destination, device=DEVICE)
    place([x], [got], engine="triton", tuning=Tuning(1024, 4, 1))
    assert_same_bits(got, x.to(destination))


def test_casting_to_bf16_rounds_ties_to_even_and_keeps_nans() -> None:
    # Two NaNs that would round to -0.0 and to infinity if rounding carried out of their payloads.
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32, device=DEVICE).view(torch.float32)
    odd = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 3.4e38, -0.0, float("nan")]
    x = torch.cat([torch.tensor(odd, device=DEVICE), nans])
    got = torch.empty(9, dtype=torch.bfloat16, device=DEVICE)
    place([x], [got], engine="triton")
    expected = [1.0, 1 + 2**-6, -1.0, 1 + 2**-7, float("inf"), -0.0] + [float("nan")] * 3
    assert_same_bits(got, torch.tensor(expected, dtype=torch.bfloat16, device=DEVICE))


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128, *FLOATS],
)
def test_a_pair_of_one_dtype_is_copied_byte_by_byte(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (80, 48 * dtype.itemsize), dtype=torch.uint8).to(DEVICE)
    source = raw.view(dtype)[:, 8:40]
    aligned, odd = (poisoned(80 * 64 * dtype.itemsize).view(dtype).view(80, 64) for _ in range(2))
    destinations = [aligned[:, 16:48], odd[:, 17:49]]
    place([source, source], destinations, engine="triton", tuning=Tuning(512, 4, 1))
    for destination in destinations:
        assert torch.equal(bytes_of(destination), bytes_of(source))
    assert_only_written(aligned.view(-1).view(torch.uint8), destinations[:1])
    assert_only_written(odd.view(-1).view(torch.uint8), destinations[1:])


def test_tensors_are_launched_together_and_unaligned_ones_apart() -> None:
    memory = poisoned(1 << 14).view(torch.bfloat16)
    sources = [torch.ones(n, device=DEVICE) for n in (512, 96, 0, 21, 64)]
    destinations = [
        memory[:512],
        memory[512:608],
        memory[608:608],
        memory[609:630],
        memory[1024:2048].view(8, 128)[:, :8],
    ]
    launches = _prepare(sources, destinations, DEVICE, SMALL, False)
    found = [
        (x.tensors, x.full_blocks, x.edge_blocks, x.constants["ALIGNED"], x.constants["STRIDED"]) for x in launches
    ]
    assert found == [(2, 4, 1, True, False), (1, 0, 1, False, False), (1, 0, 1, True, True)]


def test_a_strided_view_reaches_past_two_to_the_31_elements() -> None:
    pitch = 2**31 + 4096
    memory = torch.empty(pitch + 64, dtype=torch.uint8, device=DEVICE)  # untouched, so it takes no memory on CPU
    rows = torch.as_strided(memory, (2, 64), (pitch, 1))
    x = torch.arange(128, dtype=torch.uint8, device=DEVICE)
    place([x], [rows], engine="triton")
    assert torch.equal(memory[-64:], x[64:])
    assert torch.equal(memory[:64], x[:64])


def test_a_block_may_start_past_two_to_the_31_elements() -> None:
    x = torch.randn(8192, device=DEVICE)
    got = torch.empty(8192, dtype=torch.bfloat16, device=DEVICE)
    (launch,) = _prepare([x], [got], DEVICE, Tuning(8192, 16, 1), False)
    # The same block, counted from a tensor that began 2^19 blocks before memory that is never touched.
    launch.table[0] = -(2**19)
    launch.table[2] -= 2**32 * 4
    launch.table[3] -= 2**32 * 2
    start(place_kernel, launch, None)
    assert_same_bits(got, x.bfloat16())


def test_an_empty_list_and_empty_tensors_write_nothing() -> None:
    place([], [], engine="triton")
    empty = torch.empty(0, device=DEVICE)
    place([empty], [empty.bfloat16()], engine="triton")
    place([torch.empty(3, 0, device=DEVICE)], [empty.bfloat16()], engine="torch")


def test_cpu_tensors_take_the_twin_unless_triton_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    module = importlib.import_module(
        "tide_triton.kernels.place"
    )  # the package's attribute of that name is the function
    monkeypatch.setattr(module, "start", lambda *_: calls.append("triton"))
    monkeypatch.setattr(module, "place_reference", lambda *_: calls.append("torch"))
    x, y = torch.ones(4), torch.ones(4)
    place([x], [y])
    place([x], [y], engine="torch")
    assert calls == ["torch", "torch"]
    if DEVICE.type == "cpu":
        place([x], [y], engine="triton")
        assert calls[2:] == ["triton"]


@pytest.mark.parametrize("engine", ["triton", "torch"])
def test_pairs_that_do_not_fit_are_refused_with_index_and_shapes(engine: Any) -> None:
    x = torch.zeros(6, device=DEVICE)
    with pytest.raises(ValueError, match=r"pair 1: source \[6\] and destination \[5\] hold 6 and 5 elements"):
        place([x, x], [x.clone(), x[:5].clone()], engine=engine)
    with pytest.raises(ValueError, match="got 1 sources and 0 destinations"):
        place([x], [], engine=engine)
    with pytest.raises(
        ValueError, match=r"sources\[0\] must be contiguous, or 2-D .* got shape \[3\] with strides \[2\]"
    ):
        place([x[::2]], [x[:3].clone()], engine=engine)
    with pytest.raises(ValueError, match=r"destinations\[0\] must be contiguous.*\[3, 2\] with strides \[1, 3\]"):
        place([x], [x.clone().view(2, 3).t()], engine=engine)
    with pytest.raises(ValueError, match=r"pair 0: strided views .* equally long rows, got \[2, 3\]"):
        place([torch.zeros(3, 4, device=DEVICE)[:, :2]], [torch.zeros(2, 4, device=DEVICE)[:, :3]], engine=engine)
    with pytest.raises(ValueError, match=r"shards\[0\] must be contiguous"):
        pack([torch.zeros(6, device=DEVICE)], [torch.zeros(3, 4, device=DEVICE)[:, :2]], engine=engine)


@pytest.mark.parametrize("engine", ["triton", "torch"])
def test_dtypes_that_cannot_be_cast_are_refused_by_name(engine: Any) -> None:
    x = torch.zeros(4, device=DEVICE)
    message = r"sources\[0\].* has dtype int32; supported are float32, bfloat16, float16, float64"
    with pytest.raises(UnsupportedDtypeError, match=message):
        place([x.int()], [x], engine=engine)
    with pytest.raises(TypeError, match=r"destinations\[0\].* has dtype bool"):
        place([x], [x.bool()], engine=engine)


def test_options_that_mean_nothing_are_refused() -> None:
    x = torch.zeros(4, device=DEVICE)
    with pytest.raises(ValueError, match="ctas must be >= 1"):
        place([x], [x.clone()], ctas=0)
    with pytest.raises(ValueError, match='engine must be "auto", "triton" or "torch", got'):
        place([x], [x.clone()], engine="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block must be a power of two >= 16, got 24"):
        Tuning(24, 4, 1)
    with pytest.raises(ValueError, match="warps must be a power of two"):
        Tuning(32, 3, 1)
    with pytest.raises(ValueError, match="stages must be >= 1"):
        Tuning(32, 4, 0)


def test_a_repeated_call_takes_its_table_from_the_cache_and_still_copies() -> None:
    tables = TableCache()
    x, got = torch.ones(300, device=DEVICE), torch.zeros(300, dtype=torch.bfloat16, device=DEVICE)
    place([x], [got], tables=tables, engine="triton")
    x.fill_(2)
    place([x], [got], tables=tables, engine="triton")
    assert (tables.misses, tables.hits) == (1, 1)
    assert bool((got == 2).all())
    place([x[:200]], [got[:200]], tables=tables, engine="triton")
    assert (tables.misses, tables.hits) == (2, 1)


def test_rows_of_one_column_and_single_rows_are_views_too() -> None:
    region = Region(4, 5, 4, 12)
    memory = poisoned(region.end)
    column = region_view(memory, region, torch.float32)
    x = torch.arange(5, dtype=torch.float32, device=DEVICE)
    place([x], [column], engine="triton")
    assert torch.equal(column.reshape(-1), x)
    assert_only_written(memory, [column])
    row = torch.zeros(4, 8, device=DEVICE)[1:2, 2:7]
    place([x], [row], engine="triton")
    assert torch.equal(row[0], x)
