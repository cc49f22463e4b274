"""`tide demo` as a user runs it: on real processes, with files, and with what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from typer.testing import CliRunner

from tests.demo import work
from tests.demo.runs import combined, made_up
from tide_triton.cli import app
from tide_triton.demo import runner
from tide_triton.demo.results import Way

#: The console script of the environment that runs the tests.
TIDE = str(Path(sys.executable).with_name("tide"))
RANKS, STEPS = 2, 3
#: FSDP2 groups of the model: four blocks, and the root.
BLOCKS = 4


def _environment(temporary: Path) -> dict[str, str]:
    """Of a user: this process's without what is set for tests, and with a directory of its own for temporary files."""
    temporary.mkdir()
    foreign = ("TRITON_INTERPRET", "TORCHINDUCTOR_CACHE_DIR")
    return {k: v for k, v in os.environ.items() if k not in foreign} | {"TMPDIR": str(temporary)}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a finished demo with results.json and losses.png, and what it printed."""
    directory = tmp_path_factory.mktemp("demo")
    (directory / "here").mkdir()
    options = ["--ranks", str(RANKS), "--steps", str(STEPS), "--json", "../results.json", "--plot", "../losses.png"]
    done = subprocess.run(
        [TIDE, "demo", *options],
        cwd=directory / "here",
        env=_environment(directory / "tmp"),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory, done.stdout


@pytest.fixture(scope="module")
def results(demo: tuple[Path, str]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((demo[0] / "results.json").read_text())
    return loaded


def test_the_json_has_the_keys_that_readers_rely_on(results: dict[str, Any]) -> None:
    counts = {"calls", "zero_copy", "fallback", "wire_bytes", "layout_copy_bytes"}
    assert {
        "ranks",
        "steps",
        "transport",
        "data",
        "loss",
        "max_abs_loss_diff",
        "all_gather",
        "reduce_scatter",
        "stock",
        "peak_buffer_bytes",
        "seconds",
        "grads_match_reference",
    } <= set(results)
    assert results["ranks"] == RANKS
    assert results["steps"] == STEPS
    assert results["transport"] == "host"
    assert results["data"]["name"] == "pydoc_data.topics"
    assert results["data"]["bytes"] > 200_000
    assert set(results["loss"]) == {"stock", "tide", "reference"}
    assert set(results["all_gather"]) == set(results["reduce_scatter"]) == counts
    assert {"wire_bytes", "layout_copy_bytes"} <= set(results["stock"])
    assert set(results["peak_buffer_bytes"]) == set(results["seconds"]) == {"stock", "tide"}
    assert set(results["versions"]) == {"python", "torch", "tide_triton"}


def test_on_two_ranks_every_loss_and_gradient_is_bitwise_equal(results: dict[str, Any]) -> None:
    loss = results["loss"]
    assert len(loss["tide"]) == STEPS
    assert loss["tide"] == loss["stock"] == loss["reference"]
    assert loss["tide"][-1] < loss["tide"][0] - 0.3
    assert results["max_abs_loss_diff"] == 0
    assert results["grads_match_reference"] is True
    assert results["grads_match_stock"] is True


def test_every_call_was_zero_copy_and_moved_no_more_than_it_must(results: dict[str, Any]) -> None:
    gather, reduce, stock = results["all_gather"], results["reduce_scatter"], results["stock"]
    # Blocks are gathered for the forward and again for the backward; the root stays.
    assert gather["calls"] == gather["zero_copy"] == stock["all_gather_calls"] == RANKS * STEPS * (2 * BLOCKS + 1)
    assert reduce["calls"] == reduce["zero_copy"] == stock["reduce_scatter_calls"] == RANKS * STEPS * (BLOCKS + 1)
    assert gather["fallback"] == reduce["fallback"] == 0
    assert gather["layout_copy_bytes"] == reduce["layout_copy_bytes"] == 0 < stock["layout_copy_bytes"]
    assert stock["wire_bytes"] == stock["all_gather_wire_bytes"] + stock["reduce_scatter_wire_bytes"]
    assert 0 < gather["wire_bytes"] <= stock["all_gather_wire_bytes"]
    assert 0 < reduce["wire_bytes"] <= stock["reduce_scatter_wire_bytes"] / 2


def test_buffers_and_seconds_are_measured(results: dict[str, Any]) -> None:
    assert results["peak_buffer_bytes"]["stock"] > RANKS * 4 * results["parameters"] / (BLOCKS + 1)
    assert results["peak_buffer_bytes"]["tide"] > RANKS * 2 * results["parameters"] / (BLOCKS + 1)
    assert all(seconds > 0 for seconds in results["seconds"].values())


def test_the_verdicts_are_printed_under_the_table(demo: tuple[Path, str]) -> None:
    for line in (
        "losses bitwise equal to stock: yes",
        "gradients bitwise equal to stock: yes",
        "equal to rank-ordered reference: yes",
        "max abs difference of losses, TIDE to stock: 0",
        "TIDE / stock",
    ):
        assert line in demo[1]


def test_the_plot_shows_something(demo: tuple[Path, str]) -> None:
    image = matplotlib.image.imread(demo[0] / "losses.png")
    assert image.shape[0] > 400
    assert image.shape[1] > 600
    assert image[..., :3].std() > 0.05


def test_nothing_else_is_written(demo: tuple[Path, str]) -> None:
    directory, _ = demo
    assert sorted(p.name for p in directory.iterdir()) == ["here", "losses.png", "results.json", "tmp"]
    assert list((directory / "here").iterdir()) == []
    assert _left_in(directory / "tmp") == []


def test_ctrl_c_ends_every_process_and_leaves_no_file(tmp_path: Path) -> None:
    command = [TIDE, "demo", "--ranks", "2", "--steps", "100000"]
    environment = _environment(tmp_path / "tmp")
    with subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "step 1 of" in line:
                    break
            # As a terminal does: to all processes in the foreground.
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode not in (0, 2)
    assert "Traceback" not in errors
    assert _left_in(tmp_path / "tmp") == []
    # Python's own tracker of resources ends by itself once the command has.
    deadline = time.monotonic() + 20
    while (living := _living(session=process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert living == []


def test_a_rank_that_fails_ends_the_command_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "train_all_ways", work.raise_on_rank_1)
    done = CliRunner().invoke(app, ["demo", "--ranks", "2", "--steps", "1"])
    assert done.exit_code == 1
    assert "error: rank 1 failed: ValueError: the cat sat on rank 1" in done.stderr
    assert "raise_on_rank_1" in done.stderr


def test_a_tide_that_is_not_the_reference_is_an_error_after_all_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    differing = replace(made_up(1, Way.TIDE), digests=("0 a", "0 b", "another"))
    monkeypatch.setattr(runner, "run", lambda *_: combined(tide=differing))
    done = CliRunner().invoke(app, ["demo", "--json", str(tmp_path / "results.json")])
    assert done.exit_code == 1
    assert "equal to rank-ordered reference: no" in done.stdout
    assert "error: TIDE is not bitwise equal" in done.stderr
    assert json.loads((tmp_path / "results.json").read_text())["grads_match_reference"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "1"], "2 or more"),
        (["--ranks", "0"], "2 or more"),
        (["--ranks", "-4"], "2 or more"),
        (["--ranks", "1000"], "at most"),
        (["--ranks", "two"], "--ranks"),
        (["--steps", "0"], "--steps"),
        (["--json", "{tmp}/absent/a.json"], "cannot write"),
        (["--json", "{tmp}"], "cannot write"),
        (["--plot", "{tmp}/absent/a.png"], "cannot write"),
        (["--plot", "{tmp}/a.txt"], "must end in"),
        (["--plot", "{tmp}/a"], "must end in"),
        (["--json", "{tmp}/a.png", "--plot", "{tmp}/a.png"], "files of their own"),
    ],
)
def test_what_cannot_work_is_refused_before_any_process_starts(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    given = [option.format(tmp=tmp_path) for option in options]
    done = CliRunner().invoke(app, ["demo", *given], env={"COLUMNS": "400"})
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_keeps_its_content_until_there_are_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "train_all_ways", work.raise_on_rank_1)
    kept, absent = tmp_path / "kept.json", tmp_path / "absent.png"
    kept.write_text("of yesterday")
    done = CliRunner().invoke(app, ["demo", "--ranks", "2", "--json", str(kept), "--plot", str(absent)])
    assert done.exit_code == 1
    assert kept.read_text() == "of yesterday"
    assert not absent.exists()


def _left_in(directory: Path) -> list[str]:
    """What is in a directory for temporary files, but for matplotlib's fonts where it has no other place for them."""
    return [path.name for path in directory.iterdir() if not path.name.startswith("matplotlib")]


def _living(session: int) -> list[str]:
    """Command lines of the processes in `session` that run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = stat.read_text().rsplit(")", 1)[1].split()[:4]
            if int(of) == session and state not in "ZX":
                found.append((stat.parent / "cmdline").read_text())
        except OSError:
            continue
    return found
