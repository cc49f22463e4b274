"""Plans: spec files in, data out, held against torch and against byte arrays on which the data alone is replayed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from rich.console import Console

from tests.layouts.strategies import as_bytes, chunks, comparing, contents, group_specs, moving, poisoned, read, write
from tide_triton.layouts import Copy, GroupSpec, Region, SpecError, TensorSpec, execute
from tide_triton.plan import MAX_PROBLEMS, Plan, SpecFileError, build_plan, read_spec, render, to_json

TENSOR: dict[str, Any] = {"name": "w", "shape": [7, 3], "dtype": "bfloat16", "shard_dim": 0}


def tensor(**fields: Any) -> dict[str, Any]:
    return {**TENSOR, **fields}


def without(field: str) -> dict[str, Any]:
    return {key: value for key, value in TENSOR.items() if key != field}


def spec_file(folder: Path, content: Any) -> Path:
    """A spec file that holds `content`, as JSON unless it is text already."""
    path = folder / "spec.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def refusal(folder: Path, content: Any) -> list[str]:
    """The lines of the refusal of `content`, without the file's name, which opens each."""
    path = spec_file(folder, content)
    with pytest.raises(SpecFileError) as error:
        read_spec(path)
    lines = str(error.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


def test_the_plan_of_7_rows_over_3_ranks_in_full() -> None:
    def copy(offset: int, width: int) -> dict[str, int]:
        return {"offset": offset, "rows": 1, "width": width, "pitch": width}

    def send(src: int, dst: int, offset: int, width: int) -> dict[str, Any]:
        pitches = {"rows": 1, "width": width, "src_pitch": width, "dst_pitch": width}
        return {"src": src, "dst": dst, "copies": [{"src_offset": offset, "dst_offset": offset, **pitches}]}

    plan = json.loads(to_json(build_plan(GroupSpec(3, (TensorSpec("w", (7, 3), "bfloat16"),)))))
    assert plan == {
        "slot_bytes": 256,
        "tensors": [{"name": "w", "offset": 0, "nbytes": 42, "shape": [7, 3]}],
        "shards": [
            {"rank": 0, "tensors": [{"name": "w", "shape": [3, 3], "copies": [copy(0, 18)]}]},
            {"rank": 1, "tensors": [{"name": "w", "shape": [3, 3], "copies": [copy(18, 18)]}]},
            {"rank": 2, "tensors": [{"name": "w", "shape": [1, 3], "copies": [copy(36, 6)]}]},
        ],
        "all_gather": [
            send(0, 1, 0, 18),
            send(0, 2, 0, 18),
            send(1, 0, 18, 18),
            send(1, 2, 18, 18),
            send(2, 0, 36, 6),
            send(2, 1, 36, 6),
        ],
    }


def test_a_rank_without_rows_keeps_entries_without_copies() -> None:
    plan = json.loads(to_json(build_plan(GroupSpec(2, (TensorSpec("w", (1, 8), "bfloat16"),)))))
    assert plan["shards"][1] == {"rank": 1, "tensors": [{"name": "w", "shape": [0, 8], "copies": []}]}
    assert plan["all_gather"][1] == {"src": 1, "dst": 0, "copies": []}


@given(group_specs(), st.integers(0, 2**32 - 1))
@moving
def test_a_plan_replayed_from_its_json_gathers_the_tensors_that_torch_cut(
    tmp_path_factory: pytest.TempPathFactory, spec: GroupSpec, seed: int
) -> None:
    tensors = [{"name": t.name, "shape": t.shape, "dtype": t.dtype, "shard_dim": t.shard_dim} for t in spec.tensors]
    path = spec_file(tmp_path_factory.getbasetemp(), {"world_size": spec.world_size, "tensors": tensors})
    assert read_spec(path) == spec
    plan = json.loads(to_json(build_plan(read_spec(path))))

    rng = np.random.default_rng(seed)
    whole = [contents(tensor, rng) for tensor in spec.tensors]
    cut = [chunks(full, spec.world_size, t.shard_dim) for full, t in zip(whole, spec.tensors, strict=True)]
    own, expected = [poisoned(plan["slot_bytes"]) for _ in range(spec.world_size)], poisoned(plan["slot_bytes"])
    for rank in plan["shards"]:
        for entry, of_ranks in zip(rank["tensors"], cut, strict=True):
            assert tuple(entry["shape"]) == of_ranks[rank["rank"]].shape
            assert len(entry["copies"]) == (of_ranks[rank["rank"]].numel() > 0)
            for region in entry["copies"]:
                assert np.all(read(own[rank["rank"]], Region(**region)) == 0xEE)
                write(own[rank["rank"]], Region(**region), as_bytes(of_ranks[rank["rank"]]))
    for placed, full in zip(plan["tensors"], whole, strict=True):
        assert (tuple(placed["shape"]), placed["nbytes"]) == (full.shape, full.nbytes)
        expected[placed["offset"] : placed["offset"] + placed["nbytes"]] = as_bytes(full)

    gathered = [slot.copy() for slot in own]
    for send in plan["all_gather"]:
        execute([Copy(**copy) for copy in send["copies"]], own[send["src"]], gathered[send["dst"]])
    assert all(np.array_equal(slot, expected) for slot in gathered)


@given(group_specs())
@comparing
def test_every_ordered_pair_of_ranks_occurs_once_and_the_wire_bytes_are_theirs(spec: GroupSpec) -> None:
    plan, world = build_plan(spec), range(spec.world_size)
    pairs = [(send.src, send.dst) for send in plan.all_gather]
    assert pairs == [(src, dst) for src in world for dst in world if src != dst]
    assert plan.wire_bytes == sum(copy.nbytes for send in plan.all_gather for copy in send.copies)
    assert plan.wire_bytes == sum(t.nbytes for t in spec.tensors) * (spec.world_size - 1)


@given(group_specs())
@comparing
def test_json_holds_the_whole_plan(spec: GroupSpec) -> None:
    plan = build_plan(spec)
    assert TypeAdapter(Plan).validate_json(to_json(plan)) == plan


def test_the_shard_dim_is_0_where_it_is_left_out(tmp_path: Path) -> None:
    path = spec_file(tmp_path, {"world_size": 3, "tensors": [without("shard_dim")]})
    assert read_spec(path) == GroupSpec(3, (TensorSpec("w", (7, 3), "bfloat16", shard_dim=0),))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "not valid JSON: EOF while parsing a value at line 1 column 0; give an object"),
        ('{"world_size": 3,', "not valid JSON: EOF while parsing"),
        ("[" * 1000, "not valid JSON: recursion limit exceeded"),
        ([], "spec: must be an object with the fields world_size, tensors, got []"),
        ({"tensors": []}, "world_size: missing; give an integer from 1 to 1024"),
        ({"world_size": 3}, "tensors: missing; give a list of objects with the fields name, shape, dtype, shard_dim"),
        ({"world_size": 3, "tensors": {}}, "tensors: must be a list of objects"),
        ({"world_size": 3, "tensors": [7]}, "tensors[0]: must be an object with the fields name, shape"),
        ({"world_size": 3, "tensors": [], "ranks": 3}, "ranks: unknown field, got 3; remove it or use one of world_"),
    ],
)
def test_a_file_that_is_no_spec_is_refused(tmp_path: Path, content: Any, problem: str) -> None:
    [line] = refusal(tmp_path, content)
    assert line.startswith(problem)


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True, None, "3", 1025, 10**30])
def test_a_bad_world_size_is_refused_naming_the_value(tmp_path: Path, world_size: Any) -> None:
    [line] = refusal(tmp_path, {"world_size": world_size, "tensors": [TENSOR]})
    expected = "an integer from 1 to 1024 (a plan lists every pair of ranks)"
    assert line == f"world_size: must be {expected}, got {json.dumps(world_size)}"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (without("name"), "tensors[1].name: missing; give a non-empty string"),
        (without("shape"), "tensors[1].shape: missing; give a list of at least one size, such as [7, 3]"),
        (without("dtype"), "tensors[1].dtype: missing; give one of float64, float32, bfloat16"),
        (tensor(name=""), 'tensors[1].name: must be a non-empty string, got ""'),
        (tensor(name=7), "tensors[1].name: must be a non-empty string, got 7"),
        (tensor(name="v"), 'tensors[1].name: must differ from tensors[0].name, got "v"'),
        (
            tensor(shape=[]),
            "tensors[1].shape: must be a list of at least one size, such as [7, 3]; give a scalar",
        ),
        (tensor(shape=7), "tensors[1].shape: must be a list of at least one size"),
        (tensor(shape=[7, -3]), "tensors[1].shape[1]: must be an integer from 0 to 2**63 - 1, got -3"),
        (tensor(shape=[7.0, 3]), "tensors[1].shape[0]: must be an integer from 0 to 2**63 - 1, got 7.0"),
        (tensor(shape=[True, 3]), "tensors[1].shape[0]: must be an integer from 0 to 2**63 - 1, got true"),
        (tensor(shape=[2**62, 2]), "tensors[1].shape: must leave the slot below 2**63 bytes, got [4611686018427387904"),
        (tensor(dtype="bf16"), "tensors[1].dtype: must be one of float64, float32, bfloat16, float16, int64, int32"),
        (tensor(dtype=16), "tensors[1].dtype: must be one of float64"),
        (tensor(shard_dim=2), "tensors[1].shard_dim: must be 0 to 1 for shape [7, 3], got 2"),
        (
            tensor(shard_dim=-1),
            "tensors[1].shard_dim: must be an integer >= 0, the dim that is cut (0 where",
        ),
        (tensor(shard_dim=None), "tensors[1].shard_dim: must be an integer >= 0"),
        (
            tensor(sharddim=0),
            "tensors[1].sharddim: unknown field, got 0; remove it or use one of name, shape",
        ),
        (tensor(**{"\x1b[2J": 0}), "tensors[1].\\x1b[2J: unknown field, got 0"),
    ],
)
def test_a_bad_tensor_is_refused_naming_the_field_by_its_path(
    tmp_path: Path, entry: dict[str, Any], problem: str
) -> None:
    [line] = refusal(tmp_path, {"world_size": 3, "tensors": [tensor(name="v"), entry]})
    assert line.startswith(problem)


def test_tensors_that_only_together_pass_64_bit_offsets_are_refused_at_the_first_that_does(tmp_path: Path) -> None:
    entries = [tensor(name=f"w{index}", shape=[2**61], dtype="int8") for index in range(6)]
    [line] = refusal(tmp_path, {"world_size": 1, "tensors": entries})
    assert line.startswith("tensors[3].shape: must leave the slot below 2**63 bytes")


def test_every_problem_is_named_and_many_are_counted(tmp_path: Path) -> None:
    two = refusal(tmp_path, {"world_size": 0, "tensors": [tensor(dtype="bf16")]})
    assert [line.split(":")[0] for line in two] == ["world_size", "tensors[0].dtype"]
    many = refusal(tmp_path, {"world_size": 3, "tensors": [tensor(dtype="bf16")] * 300})
    assert len(many) == MAX_PROBLEMS + 1
    assert many[-1] == f"{300 - MAX_PROBLEMS} more like these"


def test_a_long_value_is_cut_short(tmp_path: Path) -> None:
    [line] = refusal(tmp_path, {"world_size": "9" * 5000, "tensors": []})
    assert len(line) < 200
    assert line.endswith("999...")


def test_a_field_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(
        '{"world_size": 2, "world_size": 4, '
        '"tensors": [{"name": "w", "shape": [4], "dtype": "bfloat16", "shape": [8]}]}'
    )
    with pytest.raises(SpecFileError) as refusal:
        read_spec(path)
    assert str(refusal.value).splitlines() == [
        f"{path}: shape: occurs 2 times in one object; remove all but one",
        f"{path}: world_size: occurs 2 times in one object; remove all but one",
    ]


def test_a_byte_order_mark_in_front_is_no_part_of_the_spec(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text('{"world_size": 2, "tensors": []}', encoding="utf-8-sig")
    assert read_spec(path) == GroupSpec(2, ())


def test_a_file_that_cannot_be_read_is_refused_naming_it(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere\.json: no such file; give the path of a JSON spec"):
        read_spec(tmp_path / "nowhere.json")
    with pytest.raises(SpecError, match=r"cannot be read \(Is a directory\)"):
        read_spec(tmp_path)


def test_bytes_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_bytes(b'{"world_size": 3, "tensors": [{"name": "\xff"}]}')
    with pytest.raises(SpecFileError, match="not valid JSON: invalid unicode"):
        read_spec(path)


def rendered(spec: GroupSpec, width: int = 200) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(spec, build_plan(spec)))
    return capture.get()


def test_the_tables_show_offsets_shard_bytes_and_wire_bytes() -> None:
    spec = GroupSpec(3, (TensorSpec("w[0]", (7, 3), "bfloat16"), TensorSpec("v", (64, 1024), "float32", 1)))
    lines = [" ".join(line.replace("│", " ").split()) for line in rendered(spec).splitlines()]
    assert "w[0] bfloat16 7 x 3 0 0 42" in lines
    assert "v float32 64 x 1024 1 256 262,144" in lines
    assert "0 to 1 87,570 175,140" in lines
    assert "2 87,046 174,092" in lines
    assert (
        "2 tensors over 3 ranks: 262,912 bytes (256.8 KiB) of slot on every rank, "
        "524,372 bytes (512.1 KiB) on the wire in one all-gather"
    ) in lines


def test_names_cannot_act_on_the_terminal_or_as_markup() -> None:
    shown = rendered(GroupSpec(1, (TensorSpec("[red]a\x1b[31m\n", (1,), "int8"),)))
    assert "[red]a\\x1b[31m\\n" in shown
    assert "\x1b" not in shown


def test_a_narrow_terminal_costs_no_digits() -> None:
    shown = rendered(GroupSpec(1, (TensorSpec("w", (123_456_789,), "int8"),)), width=36)
    assert "…" not in shown


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [(1023, "1,023 bytes "), (1024, "1,024 bytes (1.0 KiB)"), (2**52, "4,503,599,627,370,496 bytes (4,096.0 TiB)")],
)
def test_sizes_are_exact_and_in_a_unit(nbytes: int, size: str) -> None:
    wire = rendered(GroupSpec(2, (TensorSpec("w", (nbytes,), "int8"),))).splitlines()[-1]
    assert f", {size}" in wire.replace("  ", " ") + " "
