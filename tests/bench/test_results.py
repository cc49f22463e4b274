"""Rows survive being written and read, and become tables and pictures that are not empty."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import plots, results

COLLECTIVE = [
    {
        "model": f"m{i}",
        "bytes": 1 << 30,
        **{f"{name}_ms": ms * (i + 1) for name, ms in (("stock", 4.0), ("symm", 3.0), ("tide", 2.3), ("limit", 2.2))},
        **{f"{name}_sm_ms": ms for name, ms in (("stock", 300.0), ("symm", 90.0), ("tide", 20.0))},
        "tide_over_limit": 2.3 / 2.2,
        "sm_kernels": {"place_kernel": 3.0},
        "exact": True,
    }
    for i in range(3)
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "all_gather": COLLECTIVE,
    "reduce_scatter": COLLECTIVE,
    "nodes": [
        {"model": m, "nodes": 2, "transport": t, "ms": ms, "flat_ms": 2.3, "over_flat": ms / 2.3, "host_us": 900.0}
        for m in ("llama", "wan")
        for t, ms in (("nccl_rma", 2.6), ("nvshmem", 2.5))
    ],
    "interference": [
        {"gemm": "1x2x3", "beside": name, "alone_us": 100.0, "slowdown": s, "slowdown_median": s, "samples": 9}
        for name, s in (("nothing", 1.0), ("nccl", 1.9), ("tide", 1.1))
    ],
    "step": [
        {
            "model": "m",
            "layers": 4,
            "tokens": tokens,
            "floor_ms": 372.0,
            "stock_ms": 424.0,
            "symm_ms": None,
            "tide_ms": 384.0,
            "peak_gib": {"stock": 33.0, "tide": 34.5},
            "grads_equal": True,
        }
        for tokens in (2048, 8192)
    ],
    "kernels": [
        {"kernel": k, "world": w, "ctas": c, "gb_per_s": 1000.0, "sm_us_per_gb": 11000.0, "ms": 0.1, "of_copy": 0.9}
        for k, w in (("place", 1), ("accumulate", 2))
        for c in (16, "all")
    ],
}


@pytest.mark.parametrize("name", ROWS)
def test_every_benchmark_has_keys_columns_and_a_picture(name: str, tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / f"{name}.png"
    assert plots.draw(name, ROWS[name], path)
    with Image.open(path) as image:
        assert image.width >= 1000
        # A blank canvas has one colour.
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 20
    table = results.summary(name, {"meta": {}, "rows": ROWS[name]})
    assert all(str(row[results.KEYS[name][0]]) in table for row in ROWS[name])


def test_nothing_is_drawn_where_every_row_failed(tmp_path: Path) -> None:
    assert not plots.draw("all_gather", [{"model": "m", "error": "RuntimeError: no"}], tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_rows_come_back_with_their_commit_and_replace_only_their_like(tmp_path: Path) -> None:
    path = tmp_path / "all_gather.json"
    meta = {"commit": "abc", "when": "2026-01-01T00:00:00+00:00", "gpu": "H200"}
    results.write(path, "all_gather", meta, COLLECTIVE)
    again = {"model": "m1", "tide_ms": 1.0}
    results.write(path, "all_gather", {**meta, "commit": "def"}, [again])
    rows = {row["model"]: row for row in results.read(path)["rows"]}
    assert set(rows) == {"m0", "m1", "m2"}
    assert rows["m1"] == {**again, "commit": "def", "when": meta["when"]}
    assert rows["m0"] == {**COLLECTIVE[0], "commit": "abc", "when": meta["when"]}
    assert json.loads(path.read_text())["meta"]["commit"] == "def"


def test_a_case_that_raises_becomes_a_row_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    class Here:
        rank = 3

        def say(self, text: str) -> None:
            pass

    def fail() -> results.Row:
        raise ArithmeticError("not timed: tide gathers other bits")

    here: Any = Here()
    row = results.attempt(here, {"model": "m"}, fail)
    assert row == {"model": "m", "error": "ArithmeticError: not timed: tide gathers other bits"}
    assert "rank 3: Traceback" in capsys.readouterr().out
    kept = {"meta": {}, "rows": [row]}
    assert results.failed(kept)
    assert "\nerror in m: ArithmeticError" in results.summary("all_gather", kept)


def test_a_row_that_failed_in_an_earlier_run_does_not_make_later_ones_fail(tmp_path: Path) -> None:
    path = tmp_path / "all_gather.json"
    results.write(path, "all_gather", {"when": "2026-01-01T00:00:00+00:00"}, [{"model": "m0", "error": "no"}])
    assert results.failed(results.read(path))
    results.write(path, "all_gather", {"when": "2026-01-01T00:00:07+00:00"}, [{"model": "m1", "tide_ms": 1.0}])
    kept = results.read(path)
    assert not results.failed(kept)
    assert "in an earlier run, error in m0: no" in results.summary("all_gather", kept)


def test_metadata_names_what_results_depend_on() -> None:
    wanted = {"machine", "gpu", "driver", "torch", "nccl", "triton", "commit", "when"}
    assert wanted <= set(results.metadata())
