"""Rows of results: run, kept as JSON with what they ran on, and printed with the ratios first."""

import datetime
import json
import os
import platform
import subprocess
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.ranks import Here

Row = dict[str, Any]

#: What tells one row of a benchmark from another.
KEYS: Mapping[str, tuple[str, ...]] = {
    "kernels": ("kernel", "world", "ctas"),
    "all_gather": ("model",),
    "nodes": ("model", "nodes", "transport"),
    "reduce_scatter": ("model",),
    "interference": ("gemm", "beside"),
    "step": ("model", "layers", "tokens"),
    "memory": ("model", "tokens", "gpus"),
}

#: Fields of a summary, ratios first.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "kernels": ("kernel", "world", "ctas", "of_copy", "sm_us_per_gb", "gb_per_s", "ms", "exact"),
    "all_gather": (
        *("model", "tide_over_limit", "stock_over_limit", "limit_ms", "tide_ms", "symm_ms", "stock_ms"),
        *("tide_host_us", "stock_host_us", "symm_on_copy_engines", "exact"),
    ),
    "nodes": ("model", "nodes", "transport", "over_flat", "ms", "flat_ms", "host_us", "flat_host_us", "exact"),
    "reduce_scatter": (
        *("model", "tide_over_limit", "stock_over_tide", "stock_over_tide_sm", "limit_ms", "tide_ms", "symm_ms"),
        *("stock_ms", "tide_sm_ms", "stock_sm_ms", "tide_host_us", "stock_host_us", "exact"),
    ),
    "interference": ("gemm", "beside", "slowdown", "slowdown_median", "alone_us", "beside_us", "samples"),
    "step": (
        *("model", "layers", "tokens", "closed", "gain_over_stock", "gain_over_symm", "floor_ms", "tide_ms"),
        *("symm_ms", "stock_ms", "tide_ring_ms", "tide_early_ms", "peak_gib", "grads_equal"),
        *("tide_ring_grads_equal", "tide_early_grads_equal"),
    ),
    "memory": (
        *("model", "tokens", "gpus", "held_below_stock_gib", "held_gib", "peak_gib", "over_plan", "windows_gib"),
        *("slot_over_ring", "step_ms", "ring_bytes", "flag_bytes"),
    ),
}


def attempt(here: "Here", identity: Row, measure: Callable[[], Row]) -> Row:
    """A row of `identity` and what `measure` returns; where it raises, the traceback is printed and kept as `error`."""
    here.say(f"... {' '.join(str(value) for value in identity.values())}")
    try:
        return {**identity, **measure()}
    except Exception as error:
        print(f"rank {here.rank}: {traceback.format_exc()}", flush=True)
        return {**identity, "error": f"{type(error).__name__}: {error}"[:500]}


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def commit() -> str:
    """The commit that is checked out, with "+" where tracked files differ; or what BENCH_COMMIT says, or "unknown"."""
    if "BENCH_COMMIT" in os.environ:
        return os.environ["BENCH_COMMIT"]
    head = _output_of("git", "rev-parse", "HEAD")
    return head + ("+" if head and _output_of("git", "status", "--porcelain", "-uno") else "") or "unknown"


def gpus() -> list[tuple[str, str]]:
    """(name, driver version) of every GPU that nvidia-smi knows."""
    lines = _output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    return [(name.strip(), driver.strip()) for name, _, driver in (line.partition(",") for line in lines)]


def machine() -> str:
    """A name for this machine: "2x-nvidia-h200", or "cpu"."""
    found = gpus()
    return f"{len(found)}x-{found[0][0].lower().replace(' ', '-')}" if found else "cpu"


def _loaded_nccl() -> str | None:
    """The NCCL that is loaded, which need not be the one that torch was built with; None where nobody can tell."""
    try:
        import nccl.core
    except ImportError:
        return None
    library = nccl.core.get_version().libnccl
    return None if library is None else str(library.version)


def metadata() -> Row:
    """What results depend on: GPU, driver, versions, commit, and settings from the environment."""
    import torch
    import triton

    found = gpus()
    built_with = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    settings = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "TORCH_SYMM", "NVSHMEM_D"))}
    return {
        "machine": machine(),
        "gpu": found[0][0] if found else None,
        "gpus": len(found),
        "driver": found[0][1] if found else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _loaded_nccl() or built_with,
        "nccl_of_torch": built_with,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": settings,
    }


def failed(kept: Row) -> bool:
    """Whether a row of the last run that wrote the file `kept` has an error; rows of earlier ones do not count."""
    return any("error" in row and _is_last(kept, row) for row in kept["rows"])


def _is_last(kept: Row, row: Row) -> bool:
    return bool(row.get("when") == kept["meta"].get("when"))


def read(path: Path) -> Row:
    """A file of results: {"meta": ..., "rows": [...]}; empty where there is none.

    Raises ValueError where it is no such file.
    """
    if not path.exists():
        return {"meta": {}, "rows": []}
    try:
        kept = json.loads(path.read_text())
        if isinstance(kept["meta"], dict) and all(isinstance(row, dict) for row in kept["rows"]):
            return kept
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} holds no results of a benchmark ({error!r}); move it away") from error
    raise ValueError(f"{path} holds no results of a benchmark; move it away")


def write(path: Path, benchmark: str, meta: Row, rows: list[Row]) -> None:
    """Keep `rows`, each with its commit and time, beside those of earlier runs that are not measured again here."""
    stamp = {"commit": meta.get("commit"), "when": meta.get("when")}

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in KEYS[benchmark])

    fresh = [{**row, **stamp} for row in rows]
    again = {key(row) for row in fresh}
    kept = [row for row in read(path)["rows"] if key(row) not in again]
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps({"meta": meta, "rows": kept + fresh}, indent=1) + "\n")
    scratch.replace(path)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, dict):
        return " ".join(f"{k} {_shown(v)}" for k, v in value.items())
    return "-" if value is None else str(value)


def summary(benchmark: str, kept: Row) -> str:
    """A file of results as a table: what was measured, then ratios, then times. Errors follow in full."""
    rows = [{**row, "run": "" if _is_last(kept, row) else "earlier"} for row in kept["rows"]]
    # Of what not everything was measured, what nobody measured is left out.
    columns = [
        column for column in (*COLUMNS[benchmark], "run") if any(row.get(column) not in (None, "") for row in rows)
    ]
    cells = [[_shown(row.get(column)) for column in columns] for row in rows]
    errors = [
        f"{'in an earlier run, error' if row['run'] else 'error'} in "
        f"{' '.join(str(row.get(name)) for name in KEYS[benchmark])}: {row['error']}"
        for row in rows
        if "error" in row
    ]
    try:
        return "\n".join([_table(benchmark, columns, cells), *errors])
    except ImportError:
        # A machine that has GPUs but not rich.
        return "\n".join([benchmark, *("  ".join(line) for line in [columns, *cells]), *errors])


def _table(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    import io

    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for line in cells:
        table.add_row(*line)
    console = Console(width=220, file=io.StringIO())
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()
