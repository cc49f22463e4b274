"""Memory plans: against what was measured on GPUs, against torch's chunks, and against themselves."""

import inspect
import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.layouts.strategies import comparing, group_specs
from tide_triton.layouts import GroupSpec, SlotLayout, SlotShortageError, SpecError, TensorSpec, Topology
from tide_triton.layouts.ring import RING_CHUNK_NBYTES, RING_DEPTH
from tide_triton.memory import (
    BUFFER_WORLDS,
    COUNTERS,
    STAGING_NBYTES,
    MemoryPlan,
    flags_nbytes,
    model_named,
    plan_memory,
    reduce_scatter_buffer,
    root_spec,
    topology_of,
)
from tide_triton.memory_moments import ITEMS, GroupBytes, in_flight, sent_with
from tide_triton.memory_show import render, to_json
from tide_triton.models import LLAMA_3_1_70B, MODELS, QWEN3_30B_A3B, WAN_2_2_A14B, ModelSpec

GIB = 1 << 30
TWO_GPUS = Topology(1, 2)

#: Peaks in GiB as `bench/step.py` measures them, allocator's peak and windows of the rank that has most: 2x H200, torch
#: 2.11, so many layers, no vocabulary, 2048 tokens with activation checkpointing. "tide, 3 slots" is attach(slots=3).
#: Activations and cuBLAS's workspaces are in them and in no plan: 0.1 to 0.5 GiB.
MEASURED: dict[str, tuple[int, dict[str, float]]] = {
    "llama-3.1-70b": (
        4,
        {"stock": 30.768, "symm": 33.893, "tide": 30.532, "tide, 3 slots": 32.126, "tide_ring": 30.657},
    ),
    "wan2.2-a14b": (
        10,
        {"stock": 28.561, "symm": 29.846, "tide": 28.425, "tide, 3 slots": 29.080, "tide_ring": 28.550},
    ),
    "qwen3-30b-a3b": (
        8,
        {"stock": 41.020, "symm": 43.334, "tide": 40.735, "tide, 3 slots": 41.895, "tide_ring": 40.860},
    ),
}

#: The windows of the same runs, from `bench/results/2x-nvidia-h200/step.json`, where TIDE had 3 slots. Exact, in GiB.
WINDOWS = {
    "llama-3.1-70b": {"symm": 3.1875762939453125, "tide, 3 slots": 4.7813568115234375},
    "wan2.2-a14b": {"symm": 1.3091697692871094, "tide, 3 slots": 1.963749885559082},
    "qwen3-30b-a3b": {"symm": 2.3213090896606445, "tide, 3 slots": 3.481961727142334},
}


def as_measured(model: str, variant: str) -> tuple[int, int]:
    """The planned peak, and the windows without the counters in front of them, which the runs did not count."""
    name, slots = (variant.removesuffix(", 3 slots"), 3) if variant.endswith("slots") else (variant, None)
    spec = replace(MODELS[model], vocab=0)
    planned = plan_memory(spec, TWO_GPUS, layers=MEASURED[model][0], slots=slots).variant(name)
    return planned.peak, planned.windows - planned.items["flags"]


@pytest.mark.parametrize(("model", "variant"), [(model, v) for model, (_, peaks) in MEASURED.items() for v in peaks])
def test_a_plan_is_within_3_percent_of_the_peak_that_was_measured_and_below_it(model: str, variant: str) -> None:
    measured = MEASURED[model][1][variant] * GIB
    peak, _ = as_measured(model, variant)
    assert 0.97 * measured < peak < measured


@pytest.mark.parametrize(("model", "variant"), [(model, v) for model, windows in WINDOWS.items() for v in windows])
def test_windows_are_planned_to_the_byte(model: str, variant: str) -> None:
    assert as_measured(model, variant)[1] == WINDOWS[model][variant] * GIB


def test_what_a_third_slot_and_a_ring_were_measured_to_cost_is_what_is_planned() -> None:
    for model, (_, peaks) in MEASURED.items():
        for variant in ("tide, 3 slots", "tide_ring"):
            planned = as_measured(model, variant)[0] - as_measured(model, "tide")[0]
            assert planned / GIB == pytest.approx(peaks[variant] - peaks["tide"], abs=0.002)


# --- what others say too ---


def test_defaults_and_counters_are_those_of_attach_and_transports() -> None:
    from tide_triton import attach
    from tide_triton.transports import base, device, over_nodes

    told = inspect.signature(attach).parameters
    assert (told["ring_chunk_nbytes"].default, told["ring_depth"].default) == (RING_CHUNK_NBYTES, RING_DEPTH)
    assert COUNTERS == base.COUNTERS
    assert STAGING_NBYTES == over_nodes.STAGING_NBYTES
    for several, transport in ((False, device.DeviceTransport), (True, over_nodes.OverNodes)):
        for world in (1, 2, 63, 64, 16384):
            assert flags_nbytes(world, several) == device.header_nbytes(world, transport.word_nbytes)


@given(group_specs())
@comparing
def test_a_group_takes_what_torch_chunk_gives_rank_0(spec: GroupSpec) -> None:
    sizes = GroupBytes.of(spec)
    chunks = [torch.empty(t.shape, device="meta").chunk(spec.world_size, t.shard_dim)[0] for t in spec.tensors]
    assert sizes.shard == sum(4 * chunk.numel() for chunk in chunks)
    assert sizes.cast == sum(chunk.numel() * t.itemsize for chunk, t in zip(chunks, spec.tensors, strict=True))
    assert sizes.reduce_input == sizes.shard * spec.world_size
    assert sizes.padded_nbytes == sizes.cast * spec.world_size
    assert sizes.nbytes == sum(sizes.gradients) == sum(t.nbytes for t in spec.tensors) <= sizes.padded_nbytes
    assert sizes.slot == SlotLayout(spec).nbytes >= sizes.padded_nbytes


@pytest.mark.parametrize("name", MODELS)
def test_blocks_and_root_hold_the_whole_model(name: str) -> None:
    model = MODELS[name]
    plan = plan_memory(model, Topology(8, 8))
    assert (plan.block.nbytes * plan.layers + plan.root.nbytes) // 2 == model.numel
    assert [t.name for t in root_spec(model, 2).tensors] == (["embedding", "norm", "head"] if model.vocab else ["norm"])


# --- what must hold of any plan ---

plans = st.builds(
    plan_memory,
    st.builds(
        ModelSpec,
        st.just("random"),
        st.sampled_from(["llama", "wan", "qwen"]),
        hidden=st.integers(1, 9).map(lambda n: 16 * n),
        ffn=st.integers(1, 300),
        heads=st.just(4),
        kv_heads=st.sampled_from([1, 2, 4]),
        head_dim=st.just(16),
        layers=st.integers(1, 5),
        vocab=st.sampled_from([0, 1, 777]),
        experts=st.integers(1, 9),
    ),
    st.builds(Topology, st.integers(1, 5), st.integers(1, 4)).filter(lambda topology: topology.world_size > 1),
    ring_chunk_nbytes=st.integers(1 << 13, 1 << 18),
    ring_depth=st.integers(1, 3),
)


@given(plans)
@comparing
def test_the_peak_is_the_worst_moment_and_every_moment_holds_shards_and_optimizer(plan: MemoryPlan) -> None:
    shards = plan.block.shard * plan.layers + plan.root.shard
    for variant in plan.variants:
        assert variant.peak == max(sum(moment.alive.values()) for moment in variant.moments) == variant.worst.nbytes
        assert variant.windows <= variant.peak <= sum(variant.items.values())
        assert variant.items["sharded_gradients"] == shards
        for moment in variant.moments:
            assert (moment.alive["shards"], moment.alive["optimizer"]) == (shards, 2 * shards)
            assert all(nbytes > 0 for nbytes in moment.alive.values())
            assert moment.alive.get("sharded_gradients", 0) <= shards


@given(plans)
@comparing
def test_windows_are_always_there_and_only_flat_buffers_come_and_go(plan: MemoryPlan) -> None:
    stock, symm, *tide = plan.variants
    for flat, windowed in zip(stock.moments, symm.moments, strict=True):
        others = [item for item in ITEMS if item != "gathered"]
        assert [flat.alive.get(item) for item in others] == [windowed.alive.get(item) for item in others]
        assert flat.alive.get("gathered", 0) <= windowed.alive["gathered"] == symm.windows
    assert stock.windows == 0
    for variant in tide:
        assert not any(variant.items[item] for item in ("gathered", "casts", "parameters", "reduce_input"))
        assert {sum(m.alive.get(i, 0) for i in ("slots", "ring", "flags")) for m in variant.moments} == {
            variant.windows
        }
    over_nodes = plan.topology.nodes > 1
    assert [bool(variant.items["ring"]) for variant in tide] == ([True] if over_nodes else [False, True, True])
    if over_nodes:
        assert tide[0].how == f"attach(nodes={plan.topology.nodes})"
        # Nodes of one GPU leave a part of the rings unused.
        assert tide[0].items["ring"] >= plan.network.reduce_scatter.buffer_nbytes + STAGING_NBYTES


@given(plans)
@comparing
def test_more_than_two_groups_of_gradients_and_the_root_are_never_alive(plan: MemoryPlan) -> None:
    for variant in plan.variants:
        assert max(plan.block.gradients) <= variant.items["gradients"] <= 2 * plan.block.nbytes + plan.root.nbytes


def test_one_block_needs_one_slot_and_one_output() -> None:
    plan = plan_memory(WAN_2_2_A14B, TWO_GPUS, layers=1)
    assert plan.variant("symm").windows == plan.block.padded_nbytes + plan.root.padded_nbytes
    assert plan.variant("tide").items["slots"] == plan.block.slot + plan.root.slot
    assert not any("block 0 is gathered ahead" in moment.name for moment in plan.variant("stock").moments)


def test_large_gradients_that_leave_as_they_come_are_two_at_a_time() -> None:
    plan = plan_memory(replace(LLAMA_3_1_70B, vocab=0), TWO_GPUS)
    largest = max(plan.block.gradients)
    # And the smallest ones with them, which wait for more to fill a piece with.
    assert 2 * largest <= plan.variant("tide_early").items["gradients"] < 2.001 * largest


# --- gradients on their way ---


def test_gradients_are_dropped_oldest_first_once_the_next_has_come() -> None:
    each_by_itself = [(10, 0), (20, 1), (30, 2), (5, 3), (5, 4)]
    assert in_flight(each_by_itself, 0) == [10, 30, 50, 35, 10]
    assert in_flight(each_by_itself, 30) == [10, 30, 60, 65, 40]
    assert in_flight(each_by_itself, 1000) == [10, 30, 60, 65, 70]


def test_a_gradient_whose_end_shares_a_piece_lives_until_the_other_has_come() -> None:
    # The first is whole on its way only with the third, and is dropped when the fourth has come.
    assert in_flight([(10, 2), (20, 1), (30, 2), (5, 3), (5, 4)], 0) == [10, 30, 60, 45, 10]


def test_a_small_gradient_waits_for_the_next_one_to_fill_a_piece_with() -> None:
    def sent(*numels: int) -> tuple[int, ...]:
        # Of 2 ranks, with n elements each. A chunk of 4096 bytes takes 2048 of them, and the last tensor comes first.
        return sent_with(GroupSpec(2, tuple(TensorSpec(str(n), (2 * n,), "bfloat16") for n in numels)), 4096)

    assert sent(100) == (0,)
    assert sent(2048, 3072) == (0, 1)
    assert sent(2048, 511) == (1, 1)
    assert sent(2048, 512, 511) == (1, 1, 2)


@given(group_specs(), st.integers(1, 64))
@comparing
def test_a_gradient_is_sent_when_it_comes_or_later_and_in_the_order_of_coming(spec: GroupSpec, chunks: int) -> None:
    sent = sent_with(spec, 256 * max(spec.world_size - 1, 1) * chunks)
    assert len(sent) == len(spec.tensors)
    assert all(place <= at < len(sent) for place, at in enumerate(sent))
    full = [at for at, tensor in zip(sent, spec.tensors[::-1], strict=True) if tensor.numel]
    assert full == sorted(full)


# --- the buffer of the reduce-scatter ---


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("gpus", [2, 64, 256])
def test_the_ring_is_exactly_as_large_at_16_gpus_as_at_16384(name: str, gpus: int) -> None:
    buffers = plan_memory(MODELS[name], Topology(1, gpus)).buffers
    assert [buffer.world_size for buffer in buffers] == [16, 32, 64, 1024, 16384] == list(BUFFER_WORLDS)
    assert {buffer.ring for buffer in buffers} == {RING_DEPTH * RING_CHUNK_NBYTES}
    assert [buffer.flags for buffer in buffers] == [RING_DEPTH * flags_nbytes(world) for world in BUFFER_WORLDS]


@pytest.mark.parametrize("name", MODELS)
def test_over_nodes_the_rings_are_exactly_as_large_at_16_gpus_as_at_16384_and_those_that_are_held(name: str) -> None:
    plan = plan_memory(MODELS[name], Topology(8, 8))
    assert [buffer.world_size for buffer in plan.buffers] == list(BUFFER_WORLDS)
    assert {buffer.ring for buffer in plan.buffers} == {plan.variant("tide").items["ring"]}
    assert [buffer.flags for buffer in plan.buffers] == [
        2 * flags_nbytes(world, over_nodes=True) for world in BUFFER_WORLDS
    ]
    wide = plan_memory(MODELS[name], Topology(2, 64))
    assert [buffer.world_size for buffer in wide.buffers] == [128, 1024, 16384]


@given(st.lists(st.integers(1 << 24, 1 << 40), min_size=1, max_size=9), st.lists(st.integers(2, 16384), min_size=2))
@comparing
def test_the_ring_of_an_output_larger_than_a_chunk_is_exactly_constant(output: list[int], worlds: list[int]) -> None:
    rings = {reduce_scatter_buffer(output, Topology(1, world)).ring for world in worlds}
    assert rings == {RING_DEPTH * RING_CHUNK_NBYTES}


@given(st.lists(st.integers(0, 1 << 20), max_size=9), st.integers(2, 16384), st.integers(1, 4))
@comparing
def test_the_ring_of_a_small_output_is_smaller_and_flags_know_the_peers_alone(
    output: list[int], world: int, depth: int
) -> None:
    buffer = reduce_scatter_buffer(output, Topology(1, world), ring_depth=depth)
    assert 0 < buffer.ring <= depth * RING_CHUNK_NBYTES
    assert buffer.flags == depth * flags_nbytes(world)
    assert 0 <= flags_nbytes(world) - world * COUNTERS * 4 < 256


# --- refusals ---


@pytest.mark.parametrize(
    ("gpus", "gpus_per_node", "message"),
    [
        (1, 1, r"gpus must be 2 to 1,048,576 \(one has nothing to communicate\), got 1$"),
        (-8, 8, r"gpus must be 2 to 1,048,576 .*, got -8$"),
        (1 << 21, 8, r"gpus must be 2 to 1,048,576 .*, got 2097152$"),
        (64, 0, "gpus_per_node must be at least 1, got 0$"),
        (12, 8, "gpus must be a multiple of gpus_per_node=8, got 12; give whole nodes, or another gpus_per_node$"),
        (4, 8, "gpus must be a multiple of gpus_per_node=8, got 4; give whole nodes, or another gpus_per_node$"),
    ],
)
def test_gpus_that_make_no_nodes_are_refused(gpus: int, gpus_per_node: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        topology_of(gpus, gpus_per_node)


def test_whole_nodes_are_a_topology() -> None:
    assert topology_of(16384, 8) == Topology(2048, 8)


def test_an_unknown_model_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(SpecError, match=r"'gpt-9' is unknown; use one of llama-3\.1-70b, wan2\.2-a14b, qwen3-30b-a3b"):
        model_named("gpt-9")
    assert model_named("Llama-3.1-70B") is LLAMA_3_1_70B


@pytest.mark.parametrize("layers", [0, -1, 41])
def test_layers_that_a_model_has_not_are_refused(layers: int) -> None:
    with pytest.raises(SpecError, match=rf"layers must be 1 to 40 \(wan2\.2-a14b has no more\), got {layers}"):
        plan_memory(WAN_2_2_A14B, TWO_GPUS, layers=layers)


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(SlotShortageError, match="slots=1 is too few"):
        plan_memory(WAN_2_2_A14B, TWO_GPUS, slots=1)


# --- data and tables ---


def everything_in(data: Any) -> list[Any]:
    """The leaves of JSON data."""
    if isinstance(data, dict):
        return [leaf for value in data.values() for leaf in everything_in(value)]
    return [leaf for value in data for leaf in everything_in(value)] if isinstance(data, list) else [data]


def test_json_holds_every_variant_with_integers_and_says_what_it_leaves_out() -> None:
    plan = plan_memory(LLAMA_3_1_70B, Topology(8, 8))
    data = json.loads(to_json(plan))
    assert list(data) == [
        "model",
        "layers",
        "gpus",
        "nodes",
        "gpus_per_node",
        "activations",
        "contexts",
        "allocator_rounding",
        "block",
        "root",
        "variants",
        "reduce_scatter_output",
        "reduce_scatter_buffer",
        "network",
    ]
    assert [data[key] for key in ("gpus", "nodes", "gpus_per_node", "activations")] == [64, 8, 8, "excluded"]
    assert list(data["variants"]) == ["stock", "symm", "tide"]
    flat = json.loads(to_json(plan_memory(LLAMA_3_1_70B, Topology(1, 8))))
    assert list(flat["variants"]) == ["stock", "symm", "tide", "tide_ring", "tide_early"]
    assert flat["network"] is None
    for name, variant in data["variants"].items():
        assert list(variant) == ["how", "items", "moments", "peak", "windows"]
        assert list(variant["items"]) == list(ITEMS)
        assert variant["peak"] == max(moment["nbytes"] for moment in variant["moments"]) == plan.variant(name).peak
        assert all(moment["nbytes"] == sum(moment["alive"].values()) for moment in variant["moments"])
    assert data["reduce_scatter_output"] == plan.block.shard
    assert {world: set(buffer) for world, buffer in data["reduce_scatter_buffer"].items()} == {
        str(world): {"ring", "flags"} for world in BUFFER_WORLDS
    }
    assert {type(leaf) for leaf in everything_in(data)} == {int, str}


def rendered(plan: MemoryPlan, width: int = 200) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(plan))
    return capture.get()


def test_the_tables_show_the_peak_and_what_it_is_made_of() -> None:
    shown = rendered(plan_memory(replace(LLAMA_3_1_70B, vocab=0), TWO_GPUS, layers=4))
    lines = [" ".join(line.replace("│", " ").split()) for line in shown.splitlines()]
    assert "llama-3.1-70b: 4 blocks on 2 GPUs in 1 node" in lines
    assert "peak 30.282 33.469 30.282 30.407 29.688" in lines
    assert "in windows - 3.188 3.188 3.313 3.313" in lines
    assert "tide attach() backward: block 0 reduces" in lines
    assert "16,384 134,217,728 786,432" in lines
    assert lines[-1].startswith("Not in these figures: activations, CUDA's and NCCL's contexts, and")


def test_padding_that_takes_more_than_the_parameters_is_said() -> None:
    shown = rendered(plan_memory(QWEN3_30B_A3B, Topology(2048, 8)))
    assert "99% of what is gathered of a block is padding" in shown
    assert "padding" not in rendered(plan_memory(QWEN3_30B_A3B, Topology(8, 8)))


def test_a_narrow_terminal_costs_no_digits() -> None:
    assert "…" not in rendered(plan_memory(QWEN3_30B_A3B, Topology(8, 8)), width=60)


# --- anywhere, and at any size ---


def test_a_plan_for_16384_gpus_takes_no_longer_than_a_moment() -> None:
    begin = time.perf_counter()
    for model in MODELS.values():
        plan_memory(model, Topology(2048, 8))
    assert time.perf_counter() - begin < 5


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from tide_triton import layouts, memory, memory_show, models;"
        "print(memory_show.to_json(memory.plan_memory(models.WAN_2_2_A14B, layouts.Topology(1, 2)))[:9])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '{"model":'
