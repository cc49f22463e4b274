"""The `tide` command, in this process and as a real one."""

import json
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tide_triton.cli import app, main

SPEC = '{"world_size": 3, "tensors": [{"name": "w", "shape": [7, 3], "dtype": "bfloat16"}]}'
UNEVEN_AND_EMPTY = '{"world_size": 5, "tensors": [{"name": "größe", "shape": [4, 6], "dtype": "int8", "shard_dim": 1}]}'

#: The console script of the environment that runs the tests.
TIDE = str(Path(sys.executable).with_name("tide"))

run = CliRunner().invoke


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.json"
    path.write_text(SPEC)
    return path


def test_plan_prints_json_and_nothing_else(spec: Path) -> None:
    result = run(app, ["plan", "--spec", str(spec), "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    plan = json.loads(result.stdout)
    assert list(plan) == ["slot_bytes", "tensors", "shards", "all_gather"]
    assert plan["tensors"] == [{"name": "w", "offset": 0, "nbytes": 42, "shape": [7, 3]}]


def test_plan_prints_tables_without_json(spec: Path) -> None:
    result = run(app, ["plan", "--spec", str(spec)])
    assert (result.exit_code, result.stderr) == (0, "")
    for shown in ("bfloat16", "7 x 3", "0 to 1", "84 bytes on the wire"):
        assert shown in result.stdout


def test_uneven_and_empty_shards_are_planned(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(UNEVEN_AND_EMPTY, encoding="utf-8")
    result = run(app, ["plan", "--spec", str(path), "--json"])
    assert result.exit_code == 0
    shards = json.loads(result.stdout)["shards"]
    assert [rank["tensors"][0]["shape"] for rank in shards] == [[4, 2], [4, 2], [4, 2], [4, 0], [4, 0]]
    assert shards[0]["tensors"][0]["name"] == "größe"


@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (SPEC.replace("[7, 3]", "[7, -3]"), "tensors[0].shape[1]: must be an integer from 0 to 2**63 - 1, got -3"),
        (SPEC.replace("bfloat16", "bf16"), "tensors[0].dtype: must be one of float64, float32"),
        (SPEC.replace("3,", "0,", 1), "world_size: must be an integer from 1 to 1024"),
        (SPEC[:-1], "not valid JSON"),
    ],
)
def test_a_bad_spec_is_one_message_on_stderr_and_exit_code_2(
    spec: Path, content: str, message: str, flags: list[str]
) -> None:
    spec.write_text(content)
    result = run(app, ["plan", "--spec", str(spec), *flags])
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith(f"error: {spec}: {message}")


def test_a_missing_file_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    result = run(app, ["plan", "--spec", str(tmp_path / "nowhere.json")])
    assert result.exit_code == 2
    assert result.stderr == f"error: {tmp_path / 'nowhere.json'}: no such file; give the path of a JSON spec\n"


def test_plan_without_a_spec_names_the_option(spec: Path) -> None:
    result = run(app, ["plan"])
    assert result.exit_code == 2
    assert "--spec" in result.stderr


MEMORY = ["plan", "--model", "Llama-3.1-70B", "--gpus", "64"]


def test_plan_prints_the_memory_of_a_model_as_json_and_nothing_else() -> None:
    result = run(app, [*MEMORY, "--gpus-per-node", "4", "--layers", "5", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    plan = json.loads(result.stdout)
    identity = [plan[key] for key in ("model", "layers", "gpus", "nodes", "gpus_per_node")]
    assert identity == ["llama-3.1-70b", 5, 64, 16, 4]
    assert plan["variants"]["tide"]["peak"] < plan["variants"]["stock"]["peak"] < plan["variants"]["symm"]["peak"]


def test_plan_takes_all_layers_and_nodes_of_8_where_it_is_not_told() -> None:
    plan = json.loads(run(app, [*MEMORY, "--json"]).stdout)
    assert [plan[key] for key in ("layers", "nodes", "gpus_per_node")] == [80, 8, 8]
    two = json.loads(run(app, ["plan", "--model", "wan2.2-a14b", "--gpus", "2", "--json"]).stdout)
    assert [two[key] for key in ("layers", "nodes", "gpus_per_node")] == [40, 1, 2]


def test_plan_prints_the_memory_of_a_model_as_tables_without_json() -> None:
    result = run(app, MEMORY)
    assert (result.exit_code, result.stderr) == (0, "")
    for shown in ("llama-3.1-70b: 80 blocks on 64 GPUs in 8 nodes", "attach(nodes=8)", "reduce input", "167,771,648"):
        assert shown in result.stdout
    assert "tide_early" not in result.stdout
    assert "tide_early" in run(app, [*MEMORY, "--gpus-per-node", "64"]).stdout


def test_plan_lists_what_a_blocks_collectives_move_between_nodes() -> None:
    options = ["plan", "--model", "llama-3.1-70b", "--nodes", "6", "--gpus-per-node", "4"]
    plan = json.loads(run(app, [*options, "--json"]).stdout)
    assert [plan[key] for key in ("gpus", "nodes", "gpus_per_node")] == [24, 6, 4]
    gather, reduce = plan["network"]["all_gather"], plan["network"]["reduce_scatter"]
    shard = plan["block"]["cast"]
    assert (gather["rounds"], gather["rail_peers"], gather["link_peers"]) == (3, 3, 3)
    assert abs(gather["rail_nbytes"] - 5 * shard) < 0.01 * shard
    assert abs(reduce["rail_nbytes"] - 5 * 2 * shard) < 0.02 * shard
    assert reduce["partials"] == "float32"
    for load in (gather, reduce):
        assert 0 < load["rail_in_flight_nbytes"] <= load["depth"] * load["chunk_nbytes"]
        assert 0 < load["link_in_flight_nbytes"] <= load["depth"] * load["chunk_nbytes"]
    assert reduce["buffer_nbytes"] <= 128 << 20
    assert "bytes over its rail" in run(app, options).stdout


def test_plan_refuses_more_nodes_than_a_turn_counts() -> None:
    refused = run(app, ["plan", "--model", "qwen3-30b-a3b", "--nodes", "5000", "--gpus-per-node", "1"])
    assert refused.exit_code == 2
    assert "nodes must be at most 4095, got 5000" in refused.stderr


@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "give --spec FILE for a layout, or --model NAME and --gpus N or --nodes M for the memory"),
        ("--gpus 8", "give --spec FILE for a layout, or --model NAME and --gpus N or --nodes M for the memory"),
        ("--model gpt-9 --gpus 8", "model 'gpt-9' is unknown; use one of llama-3.1-70b, wan2.2-a14b, qwen3-30b-a3b"),
        ("--model wan2.2-a14b", "--model wan2.2-a14b needs --gpus N, the GPUs that it is sharded over"),
        ("--model wan2.2-a14b --nodes 2 --gpus-per-node 0", "gpus_per_node must be at least 1, got 0"),
        ("--model wan2.2-a14b --gpus 0", "gpus must be 2 to 1,048,576 (one has nothing to communicate), got 0"),
        ("--model wan2.2-a14b --gpus 1", "gpus must be 2 to 1,048,576 (one has nothing to communicate), got 1"),
        (
            "--model wan2.2-a14b --gpus 12",
            "gpus must be a multiple of gpus_per_node=8, got 12; give whole nodes, or another gpus_per_node",
        ),
        ("--model wan2.2-a14b --gpus 8 --gpus-per-node 0", "gpus_per_node must be at least 1, got 0"),
        ("--model wan2.2-a14b --gpus 8 --layers 41", "layers must be 1 to 40 (wan2.2-a14b has no more), got 41"),
        ("--spec x.json --model wan2.2-a14b", "--model wan2.2-a14b does not go with --spec"),
        ("--spec x.json --gpus 8", "--gpus 8 does not go with --spec"),
        ("--spec x.json --gpus-per-node 8", "--gpus-per-node 8 does not go with --spec"),
        ("--spec x.json --layers 8", "--layers 8 does not go with --spec"),
        ("--spec x.json --nodes 8", "--nodes 8 does not go with --spec"),
        ("--model wan2.2-a14b --nodes 0", "nodes must be at least 1, got 0"),
        ("--model wan2.2-a14b --nodes 2 --gpus 17", "--gpus 17 is not --nodes 2 of 8 GPUs; leave --gpus out"),
    ],
)
def test_what_makes_no_memory_plan_is_one_message_on_stderr_and_exit_code_2(
    options: str, message: str, flags: list[str]
) -> None:
    result = run(app, ["plan", *options.split(), *flags])
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith(f"error: {message}")


def test_version_is_that_of_the_package() -> None:
    result = run(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"tide {version('tide_triton')}\n")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_commands(flag: str) -> None:
    result = run(app, [flag])
    assert result.exit_code == 0
    assert "plan" in result.stdout
    assert "--version" in result.stdout


def test_help_is_shown_without_arguments() -> None:
    assert "Usage: tide" in run(app, [], prog_name="tide").output


def test_the_console_script_is_main() -> None:
    [script] = entry_points(group="console_scripts", name="tide")
    assert script.load() is main


def test_the_console_script_prints_json_in_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(UNEVEN_AND_EMPTY, encoding="utf-8")
    command = [TIDE, "plan", "--spec", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, check=True, env={"PYTHONIOENCODING": "ascii"})
    assert json.loads(done.stdout)["tensors"][0]["name"] == "größe"
    assert done.stderr == b""


def test_the_console_script_refuses_without_a_traceback(spec: Path) -> None:
    spec.write_text("{}")
    command = [TIDE, "plan", "--spec", str(spec)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert [line.split(": ")[:3:2] for line in done.stderr.splitlines()] == [
        ["error", "world_size"],
        ["error", "tensors"],
    ]


@pytest.mark.parametrize("memory", [False, True])
def test_planning_imports_neither_torch_nor_numpy(spec: Path, memory: bool) -> None:
    arguments = MEMORY if memory else ["plan", "--spec", str(spec)]
    command = [sys.executable, "-X", "importtime", "-m", "tide_triton.cli", *arguments]
    trace = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    imported = {line.rsplit("|")[-1].strip().split(".")[0] for line in trace.splitlines()}
    assert "rich" in imported
    assert not imported & {"torch", "triton", "numpy"}
