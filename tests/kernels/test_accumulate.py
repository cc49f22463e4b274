"""Sums of the ranks' contributions, bit by bit against the twin, and nothing written beside them."""

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
    groups,
    poisoned,
    region_view,
    values,
)
from tide_triton.kernels import (
    TableCache,
    Tuning,
    UnsupportedDtypeError,
    accumulate,
    accumulate_reference,
    default_tuning,
)
from tide_triton.kernels.accumulate import AccumulateVariant, _prepare
from tide_triton.kernels.accumulate_kernel import accumulate_kernel
from tide_triton.kernels.launch import start
from tide_triton.layouts import GroupSpec, LandingLayout, shard

# The interpreter adds infinities and casts to fp16 with numpy, which warns of what IEEE defines.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

#: Small blocks, so that small tensors have full and edge blocks.
SMALL = Tuning(block=128, warps=4, stages=2)

few = settings(deadline=None, max_examples=30)
ctas = st.sampled_from([None, 1, 3])
wires = st.sampled_from([None, *FLOATS])
factors = st.sampled_from([1.0, 1.0, 3.0, 1 / 3, 0.125])


def outputs_of(memory: torch.Tensor, spec: GroupSpec, owner: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Padded shards of rank `owner`, one after the other with 3 elements between them."""
    views, begin = [], 0
    for tensor in spec.tensors:
        size = shard(tensor, spec.world_size, owner).padded_numel
        views.append(memory.view(dtype)[begin : begin + size])
        begin += size + 3
    return views


def output_memory(spec: GroupSpec) -> torch.Tensor:
    """Memory for `outputs_of` in any dtype."""
    return poisoned(8 * sum(shard(t, spec.world_size, 0).padded_numel + 3 for t in spec.tensors))


@given(groups(), st.data(), st.sampled_from(FLOATS), wires, factors, factors, st.booleans(), ctas)
@few
def test_the_kernel_adds_landed_and_local_gradients_like_the_twin_and_writes_nothing_else(
    spec: GroupSpec,
    data: st.DataObject,
    output: torch.dtype,
    wire: torch.dtype | None,
    premultiply: float,
    divisor: float,
    add: bool,
    ctas: int | None,
) -> None:
    owner = data.draw(st.integers(0, spec.world_size - 1))
    landing = LandingLayout(spec, None, 16)
    staged = poisoned(landing.nbytes)
    contributions = []
    for index, tensor in enumerate(landing.tensors):
        dtype = getattr(torch, tensor.dtype)
        own = shard(tensor, spec.world_size, owner)
        gradient = values(tensor.numel, dtype, seed=index)
        ranks = []
        for rank in range(spec.world_size):
            if rank == owner:
                ranks.append(region_view(gradient.view(torch.uint8), own.region, dtype))
            else:
                segment = region_view(staged, landing.segment(index, rank, owner), dtype)
                segment.copy_(values(own.numel, dtype, seed=100 * index + rank + 1))
                ranks.append(segment)
        contributions.append(ranks)

    memory, twin = output_memory(spec), output_memory(spec)
    got, expected = outputs_of(memory, spec, owner, output), outputs_of(twin, spec, owner, output)
    if add:
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            a.copy_(values(a.numel(), output, seed=1000 + index))
            b.copy_(a)
    options: dict[str, Any] = {"wire_dtype": wire, "premultiply": premultiply, "divisor": divisor, "add": add}
    accumulate(contributions, got, engine="triton", ctas=ctas, tuning=SMALL, **options)
    accumulate_reference(contributions, expected, **options)

    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_same_bits(a, b, f"tensor {index} of {spec}")
    assert_only_written(memory, got)
    assert_only_written(twin, expected)


@given(
    st.lists(st.sampled_from(FLOATS), min_size=1, max_size=8), st.sampled_from(FLOATS), wires, factors, st.booleans()
)
@few
def test_ranks_may_differ_in_dtype_and_memory(
    dtypes: list[torch.dtype], output: torch.dtype, wire: torch.dtype | None, premultiply: float, odd: bool
) -> None:
    ranks = []
    for rank, dtype in enumerate(dtypes):
        wide = values(6 * 96, dtype, seed=rank).view(6, 96)
        ranks.append(wide[:, 9:57] if odd and rank == 1 else wide[:, 16:64] if rank % 2 else wide[:3].reshape(-1))
    got, expected = (poisoned(301 * 8).view(output)[:301] for _ in range(2))
    accumulate([ranks], [got], wire_dtype=wire, premultiply=premultiply, engine="triton", tuning=SMALL)
    accumulate_reference([ranks], [expected], wire_dtype=wire, premultiply=premultiply)
    assert_same_bits(got, expected)
    assert torch.equal(got[288:], torch.zeros(13, dtype=output, device=DEVICE))


@pytest.mark.parametrize("world_size", range(1, 9))
def test_contributions_are_added_in_rank_order(world_size: int) -> None:
    x = [values(5000, torch.float32, seed=rank, special=False) for rank in range(world_size)]
    got = torch.empty(5000, device=DEVICE)
    accumulate([x], [got], engine="triton")
    total = x[0]
    for contribution in x[1:]:
        total = total + contribution
    assert_same_bits(got, total)
    if world_size > 2:
        backwards = torch.empty_like(got)
        accumulate([x[::-1]], [backwards], engine="triton")
        assert not torch.equal(got, backwards)


@pytest.mark.parametrize("engine", ["triton", "torch"])
def test_a_sum_of_negative_zeros_is_negative_zero(engine: Any) -> None:
    x = torch.full((40,), -0.0, device=DEVICE)
    got = torch.ones(40, device=DEVICE)
    accumulate([[x, x]], [got], engine=engine)
    assert_same_bits(got, x)


@pytest.mark.parametrize("engine", ["triton", "torch"])
def test_fp64_is_not_summed_in_fp32(engine: Any) -> None:
    x = [torch.full((20,), v, dtype=torch.float64, device=DEVICE) for v in (1.0, 2**-40, 2**-41)]
    got = torch.zeros(20, dtype=torch.float64, device=DEVICE)
    accumulate([x], [got], divisor=3.0, engine=engine)
    assert got.tolist() == [(1 + 2**-40 + 2**-41) / 3.0] * 20
    accumulate([x], [got], wire_dtype=torch.float32, engine=engine)
    assert got.tolist() == [1.0] * 20


@pytest.mark.parametrize("output", FLOATS)
def test_adding_is_writing_elsewhere_and_then_adding_that(output: torch.dtype) -> None:
    x = [values(700, torch.bfloat16, seed=rank) for rank in range(3)]
    existing = values(720, output, seed=9)
    got, written = existing.clone(), torch.empty(700, dtype=output, device=DEVICE)
    accumulate([x], [got], add=True, divisor=3.0, engine="triton", tuning=SMALL)
    accumulate([x], [written], divisor=3.0, engine="triton", tuning=SMALL)
    assert_same_bits(got, torch.cat([existing[:700] + written, existing[700:]]))


def test_padding_is_zeroed_even_where_no_contribution_reaches_a_block() -> None:
    memory = poisoned(4 * 1000)
    outputs = [memory.view(torch.float32)[:600], memory.view(torch.float32)[700:900]]
    contributions = [[values(70, torch.bfloat16, 1)] * 2, [torch.empty(0, dtype=torch.bfloat16, device=DEVICE)] * 2]
    accumulate(contributions, outputs, premultiply=float("inf"), divisor=-2.0, engine="triton", tuning=SMALL)
    assert_same_bits(outputs[0][70:], torch.zeros(530, device=DEVICE))
    assert_same_bits(outputs[1], torch.zeros(200, device=DEVICE))
    assert_only_written(memory, outputs)


@pytest.mark.parametrize("block", [128, 1024])
@pytest.mark.parametrize("ctas", [None, 1, 2, 5])
def test_neither_ctas_nor_blocks_change_a_bit(block: int, ctas: int | None) -> None:
    x = [[values(n, torch.bfloat16, n + rank) for rank in range(2)] for n in (1500, 64, 900)]
    got, expected = ([torch.empty(n, device=DEVICE) for n in (1500, 64, 900)] for _ in range(2))
    accumulate(x, got, divisor=3.0, engine="triton", ctas=ctas, tuning=Tuning(block, 4, 2))
    accumulate_reference(x, expected, divisor=3.0)
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("output", FLOATS)
@pytest.mark.parametrize("add", [False, True])
def test_statistics_hold_the_sum_of_squares_and_the_count_of_non_finite_values(output: torch.dtype, add: bool) -> None:
    sizes = (1000, 37, 256)
    finite = [[values(n, torch.bfloat16, n + rank, special=False) for rank in range(2)] for n in sizes]
    outputs = [torch.ones(n + 40, dtype=output, device=DEVICE) for n in sizes]
    got = accumulate(finite, outputs, add=add, statistics=True, engine="triton", tuning=SMALL)
    stored = torch.cat([x[:n].double() for x, n in zip(outputs, sizes, strict=True)])
    assert got is not None
    # Squares are rounded to fp32 and summed in a tree of 128: at most 9 roundings of 2^-24 each.
    assert got[0].item() == pytest.approx(stored.square().sum().item(), rel=9 * 2**-24)
    assert got[1].item() == 0

    wild = [[values(n, torch.bfloat16, n + rank) for rank in range(2)] for n in sizes]
    counted = accumulate(wild, outputs, add=add, statistics=True, engine="triton", tuning=SMALL)
    stored = torch.cat([x[:n].double() for x, n in zip(outputs, sizes, strict=True)])
    assert counted is not None
    assert counted[1].item() == int((~stored.isfinite()).sum()) > 0
    assert not counted[0].isfinite()


def test_statistics_do_not_depend_on_the_number_of_ctas() -> None:
    x = [[values(1000, torch.bfloat16, rank, special=False) for rank in range(2)]]
    output = torch.empty(1000, device=DEVICE)
    found = [
        accumulate(x, [output], statistics=True, engine="triton", ctas=ctas, tuning=SMALL) for ctas in (None, 1, 3)
    ]
    assert len({tuple(sums.tolist()) for sums in found if sums is not None}) == 1
    assert all(sums is not None for sums in found)


def test_statistics_of_nothing_are_zero() -> None:
    for engine in ("triton", "torch"):
        got = accumulate([], [], statistics=True, engine=engine)
        assert got is not None
        assert got.tolist() == [0.0, 0.0]


def test_a_group_takes_one_launch_and_what_is_unaligned_another() -> None:
    memory = poisoned(1 << 14).view(torch.bfloat16)
    contributions = [[memory[:512], memory[512:1024]], [memory[1024:1056]] * 2, [memory[1057:1078]] * 2]
    outputs = [torch.empty(n, device=DEVICE) for n in (512, 32, 24)]
    launches = _prepare(contributions, outputs, AccumulateVariant((), torch.float32), (1.0, 1.0), SMALL, False)
    found = [(x.tensors, x.full_blocks, x.edge_blocks, x.constants["ALIGNED"]) for x in launches]
    assert found == [(2, 4, 1, True), (1, 0, 1, False)]


def test_a_block_may_start_past_two_to_the_31_elements() -> None:
    x = [values(1024, torch.bfloat16, rank) for rank in range(2)]
    got, expected = (torch.empty(1024, device=DEVICE) for _ in range(2))
    variant = AccumulateVariant((), torch.float32)
    (launch,) = _prepare([x], [got], variant, (1.0, 1.0), Tuning(1024, 4, 1), False)
    # The same block, counted from a tensor that began 2^22 blocks before memory that is never touched.
    launch.table[2] = -(2**22)
    launch.table[4] -= 2**32 * 4
    launch.table[8] -= 2**32 * 2
    launch.table[10] -= 2**32 * 2
    start(accumulate_kernel, launch, None, launch.table)
    accumulate_reference([x], [expected])
    assert_same_bits(got, expected)


def test_a_repeated_call_takes_its_table_from_the_cache_and_other_options_do_not() -> None:
    tables = TableCache()
    x = [torch.ones(100, device=DEVICE), torch.ones(100, device=DEVICE)]
    got = torch.empty(100, device=DEVICE)
    for value, divisor in ((1.0, 2.0), (5.0, 2.0), (5.0, 4.0)):
        x[0].fill_(value)
        accumulate([x], [got], divisor=divisor, tables=tables, engine="triton")
        assert got.tolist() == [(value + 1) / divisor] * 100
    assert (tables.misses, tables.hits) == (2, 1)


def test_the_default_tuning_is_what_was_measured_and_fits_in_shared_memory() -> None:
    assert default_tuning(2, 4) == Tuning(8192, 16, 3)
    assert default_tuning(8, 16) == Tuning(4096, 16, 3)
    for world_size, itemsize, add in itertools.product(range(1, 65), (2, 4, 8), (0, 4, 8)):
        loaded = world_size * itemsize + add
        tuning = default_tuning(world_size, loaded)
        assert tuning.stages == 1 or tuning.block * loaded * tuning.stages <= 227 * 1024


@pytest.mark.parametrize("engine", ["triton", "torch"])
def test_lists_that_do_not_fit_are_refused_with_index_and_shapes(engine: Any) -> None:
    x = torch.zeros(6, device=DEVICE)
    cases: list[tuple[Any, Any, str]] = [
        ([[x]], [], "got contributions to 1 tensors and 0 outputs"),
        ([[]], [x], r"contributions\[0\] is empty"),
        ([[x, x], [x]], [x, x], r"contributions\[1\] has 1 ranks and contributions\[0\] has 2"),
        ([[x, x[:4]]], [x], r"contributions\[0\]\[1\] has shape \[4\], which holds 4 elements, and \[0\]\[0\] \[6\]"),
        ([[x, x]], [x[:4]], r"outputs\[0\] has shape \[4\], too small for contributions of shape \[6\]"),
        ([[x[::2]]], [x], r"contributions\[0\]\[0\] must be contiguous, or 2-D"),
        ([[x[:3]]], [x[::2]], r"outputs\[0\] must be contiguous, got shape \[3\] with strides \[2\]"),
        (
            [[torch.zeros(3, 4, device=DEVICE)[:, :2], torch.zeros(2, 4, device=DEVICE)[:, :3]]],
            [x],
            r"contributions\[0\]: strided views .* equally long rows, got \[2, 3\]",
        ),
    ]
    for contributions, outputs, message in cases:
        with pytest.raises(ValueError, match=message):
            accumulate(contributions, outputs, engine=engine)


@pytest.mark.parametrize("engine", ["triton", "torch"])
def test_dtypes_that_cannot_be_added_are_refused_by_name(engine: Any) -> None:
    x = torch.zeros(4, device=DEVICE)
    with pytest.raises(UnsupportedDtypeError, match=r"contributions\[0\]\[1\] has dtype int64; supported are float32"):
        accumulate([[x, x.long()]], [x], engine=engine)
    with pytest.raises(UnsupportedDtypeError, match=r"outputs\[0\] has dtype int32"):
        accumulate([[x]], [x.int()], engine=engine)
    with pytest.raises(UnsupportedDtypeError, match=r"wire_dtype.* has dtype int8"):
        accumulate([[x]], [x], wire_dtype=torch.int8, engine=engine)
