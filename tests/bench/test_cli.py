"""`python -m bench`: help, refusals, and a whole run of the two collectives on the CPU."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench import cases, results
from bench.__main__ import app

COMMANDS = ("kernels", "all_gather", "reduce_scatter", "interference", "step", "memory", "all", "show")


def test_help_names_every_benchmark() -> None:
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    assert all(command in done.output for command in COMMANDS)


def test_an_unknown_model_is_refused_with_the_names_there_are() -> None:
    done = CliRunner().invoke(app, ["step", "--model", "gpt-9"])
    assert done.exit_code == 2
    assert "gpt-9" in done.output
    assert "llama-3.1-70b" in done.output.replace("\n", "")


def test_an_unknown_variant_is_refused() -> None:
    done = CliRunner().invoke(app, ["step", "--variants", "floor,best"])
    assert done.exit_code == 2
    assert "best" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="other transports fit, and there may be more ranks")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["all_gather", "--transport", "nope"], "'nope'"),
        (["step", "--transport", "nccl"], "'host_switch'"),
        (["all_gather", "--nodes", "2", "--transport", "nope"], "'nope'"),
        (["all_gather", "--nodes", "2", "--transport", "host_switch"], "between nodes"),
        (["all_gather", "--nodes", "3"], "does not divide the 2 ranks"),
    ],
)
def test_what_cannot_be_run_here_is_refused_before_anything_starts(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_default_cases_are_the_published_models_and_many_small_parameters() -> None:
    names = [case.name for case in cases.group_cases([], 2)]
    assert names == ["llama-3.1-70b", "wan2.2-a14b", "qwen3-30b-a3b", cases.MANY_SMALL]
    small = cases.group_cases([], 2)[-1]
    assert len(small.spec.tensors) == 300
    assert {tensor.nbytes for tensor in small.spec.tensors} == {4096}


def test_a_benchmark_runs_on_ranks_of_its_own_and_keeps_exact_rows(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["reduce_scatter", "--model", "tiny-wan", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (row,) = results.read(tmp_path / "reduce_scatter.json")["rows"]
    assert row["exact"]
    assert row["model"] == "tiny-wan"
    assert all(row[field] > 0 for field in ("bytes", "stock_ms", "tide_ms", "limit_ms"))
    assert (tmp_path / "reduce_scatter.png").stat().st_size > 10_000


def test_steps_are_compared_with_stocks_and_then_timed_by_turns(tmp_path: Path) -> None:
    options = ["step", "--model", "tiny-llama", "--tokens", "64", "--layers", "2", "--steps", "2"]
    done = CliRunner().invoke(app, [*options, "--variants", "floor,stock,tide,tide_early", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (row,) = results.read(tmp_path / "step.json")["rows"]
    assert row["stock_repeats"]
    assert row["grads_equal"]
    assert row["tide_early_grads_equal"]
    assert all(row[f"{name}_ms"] > 0 for name in ("floor", "stock", "tide", "tide_early"))
    assert row["gain_over_stock"] == 1 - row["tide_ms"] / row["stock_ms"]


def test_an_all_gather_between_nodes_is_kept_by_itself_with_the_flat_one_beside_it(tmp_path: Path) -> None:
    options = ["all_gather", "--nodes", "2", "--model", "tiny-wan", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    (row,) = results.read(tmp_path / "nodes.json")["rows"]
    assert (row["model"], row["nodes"], row["transport"], row["exact"]) == ("tiny-wan", 2, "host", True)
    assert all(row[field] > 0 for field in ("bytes", "ms", "flat_ms", "over_flat", "host_us"))
    assert not (tmp_path / "all_gather.json").exists()


@pytest.mark.parametrize(
    ("options", "content", "said"),
    [
        (["all", "--budget", "nan"], None, "above 0, got nan"),
        (["kernels"], "{}", "holds no results of a benchmark"),
        (["kernels"], "nonsense", "holds no results of a benchmark"),
    ],
)
def test_a_budget_or_a_folder_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, options: list[str], content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "kernels.json").write_text(content)
    done = CliRunner().invoke(app, [*options, "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_a_file_is_no_folder_for_results(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["kernels", "--out", str(tmp_path / "file")])
    assert done.exit_code == 2
    assert "--out" in done.output


def test_an_empty_folder_is_shown_as_such(tmp_path: Path) -> None:
    assert "there are no results in" in CliRunner().invoke(app, ["show", str(tmp_path)]).output.replace("\n", " ")
