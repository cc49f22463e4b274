"""A memory plan as JSON and as tables.

    {"model": "llama-3.1-70b", "layers": 80, "gpus": 64, "nodes": 8, "gpus_per_node": 8,
     "activations": "excluded", "contexts": "excluded", "allocator_rounding": "excluded",
     "block": {...}, "root": {...},                     one group each, in the fields of `GroupBytes`
     "variants": {"stock": {"how": "FSDP2 as it is",
                            "items": {"shards": 4409606656, ...},     each in the moment that has most of it
                            "moments": [{"name": "forward: the root is gathered", "nbytes": 17497196288,
                                         "alive": {"shards": 4409606656, ...}}, ...],
                            "peak": 32260750848,        the worst moment's
                            "windows": 0}, ...},        its part in symmetric windows
     "reduce_scatter_output": 53478400,                 fp32 shards of one block on every GPU
     "reduce_scatter_buffer": {"16": {"ring": 134217728, "flags": 1024}, ...},      for that output on 16 GPUs, ...
     "network": {"all_gather": {"chunk_nbytes": 7456512, "depth": 2,        one gather of a block
                                "rounds": 3, "rail_peers": 3, "rail_nbytes": 187174400,     in the fields of `Load`
                                "link_peers": 7, "link_nbytes": ..., "rail_in_flight_nbytes": ..., ...},
                 "reduce_scatter": {"partials": "float32", ...}}}           one reduction; null on one node

All sizes are integers, in bytes on one GPU.
"""

import json
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tide_triton.memory import MemoryPlan
from tide_triton.memory_moments import ITEMS, GroupBytes
from tide_triton.network import NetworkPlan

#: What no figure holds, by its key in JSON.
EXCLUDED = {
    "activations": "activations",
    "contexts": "CUDA's and NCCL's contexts",
    "allocator_rounding": "what the allocator rounds up",
}

_GIB = 1 << 30

#: Padding worth a word, of what is gathered.
_MUCH_PADDING = 0.01


def to_json(plan: MemoryPlan) -> str:
    """`plan` as one line of JSON, as the head of this file shows it."""
    return json.dumps(as_data(plan))


def as_data(plan: MemoryPlan) -> dict[str, Any]:
    """`plan` as JSON has it."""
    network = plan.network
    return {
        "model": plan.model,
        "layers": plan.layers,
        "gpus": plan.topology.world_size,
        "nodes": plan.topology.nodes,
        "gpus_per_node": plan.topology.gpus_per_node,
        **dict.fromkeys(EXCLUDED, "excluded"),
        "block": asdict(plan.block),
        "root": asdict(plan.root),
        "variants": {
            variant.name: {
                "how": variant.how,
                "items": variant.items,
                "moments": [{"name": m.name, "nbytes": m.nbytes, "alive": m.alive} for m in variant.moments],
                "peak": variant.peak,
                "windows": variant.windows,
            }
            for variant in plan.variants
        },
        "reduce_scatter_output": plan.block.shard,
        "reduce_scatter_buffer": {
            str(buffer.world_size): {"ring": buffer.ring, "flags": buffer.flags} for buffer in plan.buffers
        },
        "network": None
        if network is None
        else {
            "all_gather": {**asdict(network.gather_pacing), **asdict(network.all_gather)},
            "reduce_scatter": {
                "partials": network.partials,
                **asdict(network.reduce_pacing),
                **asdict(network.reduce_scatter),
            },
        },
    }


def render(plan: MemoryPlan) -> Group:
    """`plan` for humans: what is alive in each variant's worst moment, and the buffer of the reduce-scatter."""
    nodes, layers = plan.topology.nodes, plan.layers
    head = Text(
        f"{plan.model}: {layers} {'block' if layers == 1 else 'blocks'} on {plan.topology.world_size:,} GPUs "
        f"in {nodes:,} {'node' if nodes == 1 else 'nodes'}"
    )
    tables = [_peak_table(plan), _moment_table(plan), _buffer_table(plan)]
    if plan.network is not None:
        tables.append(_network_table(plan.network))
    return Group(head, *(part for table in tables for part in (Text(), table)), Text(), _remarks(plan))


def _peak_table(plan: MemoryPlan) -> Table:
    table = Table(title="Alive on one GPU at the peak (at most), GiB", title_justify="left")
    table.add_column("item", overflow="fold")
    for variant in plan.variants:
        table.add_column(variant.name, overflow="fold", justify="right")
    for item in ITEMS:
        cells = []
        for variant in plan.variants:
            now, most = _gib(variant.worst.alive.get(item, 0)), _gib(variant.items[item])
            cells.append(now if now == most else f"{now} ({most})")
        table.add_row(item.replace("_", " "), *cells)
    table.add_section()
    table.add_row("peak", *(_gib(variant.peak) for variant in plan.variants))
    table.add_row("in windows", *(_gib(variant.windows) for variant in plan.variants))
    return table


def _moment_table(plan: MemoryPlan) -> Table:
    table = Table(title="When", title_justify="left")
    for heading in ("variant", "is", "has its peak"):
        table.add_column(heading, overflow="fold")
    for variant in plan.variants:
        table.add_row(variant.name, variant.how, variant.worst.name)
    return table


def _buffer_table(plan: MemoryPlan) -> Table:
    table = Table(title="Reduce-scatter buffer, bytes", title_justify="left")
    for heading in ("GPUs", "ring", "flags"):
        table.add_column(heading, overflow="fold", justify="right")
    for buffer in plan.buffers:
        table.add_row(f"{buffer.world_size:,}", f"{buffer.ring:,}", f"{buffer.flags:,}")
    return table


def _network_table(network: NetworkPlan) -> Table:
    table = Table(title="A block's collectives over the nodes, of one GPU", title_justify="left")
    for heading in ("", "all-gather", "reduce-scatter"):
        table.add_column(heading, overflow="fold", justify="right" if heading else "left")
    gather, reduce = network.all_gather, network.reduce_scatter
    for name, what in (
        ("rounds", "rounds"),
        ("rail_peers", "ranks put to over its rail"),
        ("rail_nbytes", "bytes over its rail"),
        ("rail_in_flight_nbytes", "of these under way at once"),
        ("link_nbytes", "bytes to each GPU of its node"),
        ("link_in_flight_nbytes", "of these under way at once"),
        ("buffer_nbytes", "bytes of its areas in a slot, of the rings it uses"),
    ):
        table.add_row(what, f"{getattr(gather, name):,}", f"{getattr(reduce, name):,}")
    return table


def _remarks(plan: MemoryPlan) -> Text:
    *most, last = EXCLUDED.values()
    held = ": the rings of the largest group, and the staging of puts between nodes" if plan.topology.nodes > 1 else ""
    lines = [
        f"The reduce-scatter buffer is for {plan.block.shard:,} bytes of output a GPU, however many there are{held}.",
        f"Not in these figures: {', '.join(most)}, and {last}.",
    ]
    lines += _padding("a block", plan.block) + _padding("the root", plan.root)
    return Text("\n".join(lines))


def _padding(what: str, group: GroupBytes) -> list[str]:
    share = 1 - group.nbytes / group.padded_nbytes
    if share < _MUCH_PADDING:
        return []
    return [
        f"{share:.0%} of what is gathered of {what} is padding: a dim has fewer entries than there are GPUs, or does "
        f"not divide by them. Shard another dim (fully_shard's shard_placement_fn), or over fewer GPUs."
    ]


def _gib(nbytes: int) -> str:
    if nbytes == 0:
        return "-"
    return "< 0.001" if nbytes < _GIB // 1000 else f"{nbytes / _GIB:,.3f}"
