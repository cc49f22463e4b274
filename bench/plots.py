"""Bars of ratios to the limit, and curves of SM-time: one picture per benchmark."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.results import Row

_COLOURS = {
    "stock": "#8d99ae",
    "symm": "#f4a261",
    "tide": "#2a9d8f",
    "tide_ring": "#52b788",
    "tide_early": "#95d5b2",
    "tide_in_slots": "#40916c",
}


def draw(benchmark: str, rows: Sequence[Row], path: Path) -> bool:
    """Draw `rows` that have no error into `path`; False where there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    good = [row for row in rows if "error" not in row]
    if not good:
        return False
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    try:
        _DRAWINGS[benchmark](axes, good)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)
    return True


def _bars(axis: Any, labels: Sequence[str], series: dict[str, list[float | None]], title: str, unit: str) -> None:
    """Grouped bars; a line at 1 where they are ratios."""
    width = 0.8 / max(len(series), 1)
    for place, (name, values) in enumerate(series.items()):
        at = [i + (place - (len(series) - 1) / 2) * width for i in range(len(labels))]
        bars = axis.bar(at, [v or 0.0 for v in values], width, label=name, color=_COLOURS.get(name))
        axis.bar_label(bars, [f"{v:.2f}" if v else "-" for v in values], fontsize=7, padding=1)
    if unit.startswith("x "):
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(labels)), labels, fontsize=8)
    axis.set_title(title)
    axis.set_ylabel(unit)
    if len(series) > 1:
        axis.legend(fontsize=8)


def _ratios(rows: Sequence[Row], below: str, suffix: str = "_ms") -> dict[str, list[float | None]]:
    """Each variant's value / `below`'s, row by row."""
    return {
        name: [_ratio(row.get(f"{name}{suffix}"), row.get(below)) for row in rows]
        for name in ("stock", "symm", "tide")
        if any(row.get(f"{name}{suffix}") is not None for row in rows)
    }


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _collective(axes: Any, rows: Sequence[Row], what: str) -> None:
    labels = [row["model"] for row in rows]
    _bars(axes[0], labels, _ratios(rows, "limit_ms"), f"{what}: time / peer copy of the same bytes", "x limit")
    _bars(axes[1], labels, _ratios(rows, "stock_sm_ms", "_sm_ms"), f"{what}: SM-time / stock's", "x stock")


def _all_gather(axes: Any, rows: Sequence[Row]) -> None:
    _collective(axes, rows, "all-gather")


def _nodes(axes: Any, rows: Sequence[Row]) -> None:
    models = list(dict.fromkeys(row["model"] for row in rows))
    names = list(dict.fromkeys(row["transport"] for row in rows))
    for axis, field, title, unit in (
        (axes[0], "over_flat", "all-gather between logical nodes: time / flat", "x flat"),
        (axes[1], "host_us", "the same: time of the host", "us"),
    ):
        found = {(row["model"], row["transport"]): row.get(field) for row in rows}
        _bars(axis, models, {name: [found.get((m, name)) for m in models] for name in names}, title, unit)


def _reduce_scatter(axes: Any, rows: Sequence[Row]) -> None:
    _collective(axes, rows, "reduce-scatter")


def _interference(axes: Any, rows: Sequence[Row]) -> None:
    labels = [row["beside"].replace("_", "\n") for row in rows]
    for axis, field, title in (
        (axes[0], "slowdown", "GEMM beside a collective: mean"),
        (axes[1], "slowdown_median", "the same: median"),
    ):
        _bars(axis, labels, {"slowdown": [row.get(field) for row in rows]}, title, "x alone")
        axis.tick_params(axis="x", labelsize=5)


def _step(axes: Any, rows: Sequence[Row]) -> None:
    labels = [f"{row['model']}\n{row['layers']} layers, {row['tokens']}" for row in rows]
    _bars(axes[0], labels, _ratios(rows, "floor_ms"), "step time / floor", "x floor")
    peaks = [row.get("peak_gib") or {} for row in rows]
    series = {name: [peak.get(name) for peak in peaks] for name in ("stock", "symm", "tide")}
    _bars(axes[1], labels, series, "peak memory, windows included", "GiB")
    for axis in axes:
        axis.tick_params(axis="x", labelsize=6)


def _memory(axes: Any, rows: Sequence[Row]) -> None:
    rows = [row for row in rows if row.get("held_gib")]
    labels = [f"{row['model']}\n{row['tokens']} tokens" for row in rows]
    names = list(rows[0]["held_gib"]) if rows else []
    for axis, field, title in (
        (axes[0], "held_gib", "memory in use on the device, windows included"),
        (axes[1], "peak_gib", "allocated at the peak, windows included"),
    ):
        _bars(axis, labels, {name: [row[field].get(name) for row in rows] for name in names}, title, "GiB")
        axis.tick_params(axis="x", labelsize=6)


def _kernels(axes: Any, rows: Sequence[Row]) -> None:
    for kernel, world in sorted({(row["kernel"], row["world"]) for row in rows}):
        curve = [row for row in rows if (row["kernel"], row["world"]) == (kernel, world)]
        at = [132 if row["ctas"] == "all" else row["ctas"] for row in curve]
        label = f"{kernel}, W={world}"
        axes[0].plot(at, [row["gb_per_s"] for row in curve], "o", label=label, linestyle="-")
        axes[1].plot(at, [row["sm_us_per_gb"] for row in curve], "o", label=label, linestyle="-")
    for axis, title, unit in (
        (axes[0], "bandwidth, read and written", "GB/s"),
        (axes[1], "SM-time", "SM-us per GB"),
    ):
        axis.set_title(title)
        axis.set_xlabel("CTAs (132: one per block)")
        axis.set_ylabel(unit)
        axis.legend(fontsize=8)


_DRAWINGS: dict[str, Callable[[Any, Sequence[Row]], None]] = {
    "kernels": _kernels,
    "all_gather": _all_gather,
    "nodes": _nodes,
    "reduce_scatter": _reduce_scatter,
    "interference": _interference,
    "step": _step,
    "memory": _memory,
}
