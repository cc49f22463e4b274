"""What went which way: one row per parameter group, readable as data and as a table."""

import io
from dataclasses import dataclass, field

import torch

from tide_triton.layouts import Topology
from tide_triton.traffic import Traffic


@dataclass(frozen=True)
class GroupReport:
    """One parameter group on this rank.

    gather_path, reduce_path: "zero-copy", "stock", "mixed" where calls went both ways, or "local" where there is
    nothing to communicate (one rank).
    why: reasons for what was not zero-copy, with how often each applied; empty where everything was.
    slot: where its parameters lie, "-" where it has no slot.
    """

    name: str
    gather_path: str
    reduce_path: str
    why: str
    gather: Traffic
    reduce: Traffic
    slot: str
    slot_nbytes: int


@dataclass(frozen=True)
class Report:
    """All groups of one attached model on this rank. `str()` is a table.

    window_nbytes: bytes of all windows of this rank: slots, and the ring that gradients go through.
    ring_nbytes: the ring's part of them, 0 where none was needed.
    cast_nbytes: bytes of shards that are kept as they were cast (`keep_cast`), beside the windows.
    slots_grown: how many slots were added because groups were held longer than the model had shown at attach.
    topologies: of each process group, as which nodes x GPUs its ranks communicate.
    wire_dtype: what sums of gradients are rounded to between nodes, None for what they are summed in.
    """

    transport: str
    why_transport: str
    world_sizes: tuple[int, ...]
    groups: tuple[GroupReport, ...]
    window_nbytes: int
    slots_grown: int
    ring_nbytes: int
    cast_nbytes: int
    topologies: tuple[Topology, ...] = ()
    wire_dtype: torch.dtype | None = None
    _width: int = field(default=160, repr=False)

    @property
    def gather(self) -> Traffic:
        """Sums over the groups' all-gathers."""
        return _sum([g.gather for g in self.groups])

    @property
    def reduce(self) -> Traffic:
        """Sums over the groups' reduce-scatters."""
        return _sum([g.reduce for g in self.groups])

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        over = dict.fromkeys(f"{t.nodes} nodes x {t.gpus_per_node} GPUs" for t in self.topologies if t.nodes > 1)
        if over and self.wire_dtype is not None:
            over[f"sums rounded to {str(self.wire_dtype).removeprefix('torch.')} between nodes"] = None
        title = f"tide_triton over transport '{self.transport}' ({self.why_transport})"
        table = Table(title=", ".join([title, *over]), title_justify="left")
        for heading in ("group", "gather", "reduce", "slot"):
            table.add_column(heading, overflow="fold")
        for heading in ("gathers", "reduces", "wire MB", "layout copies MB"):
            table.add_column(heading, justify="right")
        table.add_column("why not zero-copy", overflow="fold")
        for g in self.groups:
            table.add_row(
                g.name,
                g.gather_path,
                g.reduce_path,
                g.slot,
                _gathers(g.gather),
                _reduces(g.reduce),
                f"{(g.gather.wire_bytes + g.reduce.wire_bytes) / 1e6:.3f}",
                f"{(g.gather.layout_copy_bytes + g.reduce.layout_copy_bytes) / 1e6:.3f}",
                g.why,
            )
        grown = f", {self.slots_grown} slots added on the way" if self.slots_grown else ""
        ring = f", {self.ring_nbytes / 1e6:.3f} of them the ring" if self.ring_nbytes else ""
        table.caption = f"{self.window_nbytes / 1e6:.3f} MB in windows on this rank{ring}{grown}"
        console = Console(width=self._width, file=io.StringIO())
        with console.capture() as capture:
            console.print(table)
        return capture.get().rstrip()


def _gathers(traffic: Traffic) -> str:
    """Calls, how many of them moved nothing, what was multicast, and what crossed nodes packed."""
    notes = [f"{traffic.reused} reused"] if traffic.reused else []
    notes += [f"{traffic.multicast_bytes / 1e6:.3f} MB multicast"] if traffic.multicast_bytes else []
    notes += [f"{traffic.packed_bytes / 1e6:.3f} MB packed between nodes"] if traffic.packed_bytes else []
    return f"{traffic.calls} ({', '.join(notes)})" if notes else str(traffic.calls)


def _reduces(traffic: Traffic) -> str:
    """Calls, how many of them began early or were summed by a switch, and how many gradients stood in slots."""
    notes = [f"{traffic.early} early"] if traffic.early else []
    notes += [f"{traffic.by_switch} by the switch"] if traffic.by_switch else []
    notes += [f"{traffic.in_slot} gradients in slots"] if traffic.in_slot else []
    return f"{traffic.calls} ({', '.join(notes)})" if notes else str(traffic.calls)


def _sum(parts: list[Traffic]) -> Traffic:
    total = Traffic()
    for part in parts:
        total += part
    return total
