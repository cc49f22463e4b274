"""A group's layout as data: where its tensors lie, which bytes each rank owns, and which copies an all-gather makes.

    spec file (JSON)  --read_spec-->  GroupSpec  --build_plan-->  Plan  --to_json-->  JSON
                                                                        --render-->   tables for humans

A spec file names the world size and the tensors; `shard_dim` is 0 where it is left out:

    {"world_size": 3, "tensors": [{"name": "w", "shape": [7, 3], "dtype": "bfloat16", "shard_dim": 0}]}

All offsets, widths and pitches are bytes, counted from the start of a slot.
"""

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tide_triton.layouts import (
    ITEMSIZES,
    Copy,
    GroupSpec,
    Region,
    SlotLayout,
    SpecError,
    TensorSpec,
    gather_copies,
    shard,
)
from tide_triton.layouts.slots import align

#: Ranks a plan can have: it lists every ordered pair of them, a million at this size.
MAX_WORLD_SIZE = 1024

#: Bytes that a 64-bit signed offset can address.
MAX_NBYTES = 2**63 - 1

#: Problems that one message lists before it only counts them, and characters it shows of a value.
MAX_PROBLEMS = 8
MAX_VALUE_CHARS = 60


class SpecFileError(SpecError):
    """A spec file that cannot be planned: one line a problem, each `file: field: what it must be, got value`."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor in every rank's slot: `nbytes` from `offset` on, the whole of it and no padding."""

    name: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A rank's shard of a tensor: its shape, and the one region of the slot that it fills (none where it is empty)."""

    name: str
    shape: tuple[int, ...]
    copies: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What rank `rank` owns, one entry a tensor."""

    rank: int
    tensors: tuple[ShardPlan, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the rank owns, and puts to each other rank in an all-gather."""
        return sum(region.nbytes for tensor in self.tensors for region in tensor.copies)


@dataclass(frozen=True, slots=True)
class SendPlan:
    """The copies with which rank `src` fills its part of rank `dst`'s slot from its own."""

    src: int
    dst: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything an all-gather of a group needs to know, for every rank and every ordered pair of ranks."""

    slot_bytes: int
    tensors: tuple[TensorPlan, ...]
    shards: tuple[RankPlan, ...]
    all_gather: tuple[SendPlan, ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes that all ranks together put into other ranks' slots in one all-gather."""
        return sum(rank.nbytes for rank in self.shards) * (len(self.shards) - 1)


def build_plan(spec: GroupSpec) -> Plan:
    """The plan of `spec`. What is empty keeps its entry: a rank without part in a tensor, a pair without copies."""
    layout, world = SlotLayout(spec), range(spec.world_size)

    def owned(index: int, rank: int) -> ShardPlan:
        region = layout.region(index, rank)
        tensor = spec.tensors[index]
        return ShardPlan(tensor.name, shard(tensor, spec.world_size, rank).shape, (region,) if region.nbytes else ())

    sends = [gather_copies(layout, rank) for rank in world]
    return Plan(
        slot_bytes=layout.nbytes,
        tensors=tuple(TensorPlan(p.tensor.name, p.offset, p.nbytes, p.tensor.shape) for p in layout.places),
        shards=tuple(RankPlan(rank, tuple(owned(i, rank) for i in range(len(spec.tensors)))) for rank in world),
        all_gather=tuple(SendPlan(src, dst, sends[src]) for src in world for dst in world if src != dst),
    )


def to_json(plan: Plan) -> bytes:
    """`plan` as one line of JSON in UTF-8, its keys the fields of the classes above."""
    return TypeAdapter(Plan).dump_json(plan)


class _TensorEntry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = Field(min_length=1)
    shape: tuple[Annotated[int, Field(ge=0, le=MAX_NBYTES)], ...] = Field(min_length=1)
    dtype: str
    shard_dim: int = Field(default=0, ge=0)

    @field_validator("dtype")
    @classmethod
    def _known(cls, dtype: str) -> str:
        if dtype not in ITEMSIZES:
            raise PydanticCustomError("dtype", "unknown")
        return dtype

    @field_validator("shard_dim")
    @classmethod
    def _within_shape(cls, shard_dim: int, info: ValidationInfo) -> int:
        shape = info.data.get("shape")  # absent where it is itself refused
        if shape is not None and shard_dim >= len(shape):
            message = "must be 0 to {last} for shape {shape}"
            raise PydanticCustomError("shard_dim", message, {"last": len(shape) - 1, "shape": str(list(shape))})
        return shard_dim


class _SpecEntry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    world_size: int = Field(ge=1, le=MAX_WORLD_SIZE)
    tensors: tuple[_TensorEntry, ...]


#: What each field must be, for messages.
_EXPECTED = {
    "world_size": f"an integer from 1 to {MAX_WORLD_SIZE} (a plan lists every pair of ranks)",
    "tensors": f"a list of objects with the fields {', '.join(_TensorEntry.model_fields)}",
    "name": "a non-empty string",
    "shape": "a list of at least one size, such as [7, 3]; give a scalar as [1]",
    "dtype": f"one of {', '.join(ITEMSIZES)}",
    "shard_dim": "an integer >= 0, the dim that is cut (0 where it is left out)",
}
_EXPECTED_SIZE = "an integer from 0 to 2**63 - 1"
_EXPECTED_TENSOR = f"an object with the fields {', '.join(_TensorEntry.model_fields)}"
_EXPECTED_ROOT = f"an object with the fields {', '.join(_SpecEntry.model_fields)}"


def read_spec(path: Path) -> GroupSpec:
    """The group that the spec file `path` describes.

    Raises SpecFileError where the file cannot be read, is not JSON, or holds a field that cannot be laid out.
    """
    try:
        # Some editors put a byte order mark in front.
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        raise SpecFileError(f"{path}: no such file; give the path of a JSON spec") from None
    except OSError as error:
        raise SpecFileError(f"{path}: cannot be read ({error.strerror}); give the path of a JSON spec") from None
    try:
        entry = _SpecEntry.model_validate_json(text)
    except ValidationError as error:
        raise _refusal(path, [_problem(details) for details in error.errors(include_url=False)]) from None
    if problems := _repeated_keys(text) or list(_problems_between_tensors(entry)):
        raise _refusal(path, problems)
    return _group(entry)


def _repeated_keys(text: bytes) -> list[str]:
    """Fields that an object of the JSON `text` has twice, of which JSON leaves open which one counts."""
    found: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        times = Counter(key for key, _ in pairs)
        found.extend(
            f"{printable(key)}: occurs {n} times in one object; remove all but one" for key, n in times.items() if n > 1
        )

    json.loads(text, object_pairs_hook=look)
    return found


def _group(entry: _SpecEntry) -> GroupSpec:
    tensors = tuple(TensorSpec(t.name, t.shape, t.dtype, t.shard_dim) for t in entry.tensors)
    return GroupSpec(entry.world_size, tensors)


def _problems_between_tensors(entry: _SpecEntry) -> Iterator[str]:
    """What is wrong although each field is right by itself: names that occur twice, a slot past 64-bit offsets."""
    first: dict[str, int] = {}
    for index, tensor in enumerate(entry.tensors):
        taken = first.setdefault(tensor.name, index)
        if taken != index:
            yield f"tensors[{index}].name: must differ from tensors[{taken}].name, got {_shown(tensor.name)}"
    if len(first) < len(entry.tensors):
        return
    for index, place in enumerate(SlotLayout(_group(entry)).places):
        if align(place.offset + place.padded_nbytes) > MAX_NBYTES:
            shape = _shown(list(place.tensor.shape))
            yield f"tensors[{index}].shape: must leave the slot below 2**63 bytes, got {shape}"
            return  # one too many is enough


def _refusal(path: Path, problems: list[str]) -> SpecFileError:
    lines = [f"{path}: {problem}" for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"{path}: {len(problems) - MAX_PROBLEMS} more like these")
    return SpecFileError("\n".join(lines))


def _problem(details: ErrorDetails) -> str:
    """One of pydantic's errors as `field: what it must be, got value`."""
    loc, kind, got = details["loc"], details["type"], _shown(details["input"])
    field = "".join(f"[{key}]" if isinstance(key, int) else f".{printable(key)}" for key in loc).removeprefix(".")
    if kind == "json_invalid":
        return f"not valid JSON: {details['ctx']['error']}; give {_EXPECTED_ROOT}"
    if kind == "missing":
        return f"{field}: missing; give {_expected(loc)}"
    if kind == "extra_forbidden":
        known = _SpecEntry.model_fields if len(loc) == 1 else _TensorEntry.model_fields
        return f"{field}: unknown field, got {got}; remove it or use one of {', '.join(known)}"
    if kind == "shard_dim":
        return f"{field}: {details['msg']}, got {got}"
    return f"{field or 'spec'}: must be {_expected(loc)}, got {got}"


def _expected(loc: tuple[int | str, ...]) -> str:
    match loc:
        case (*_, "shape", int()):
            return _EXPECTED_SIZE
        case ("tensors", int()):
            return _EXPECTED_TENSOR
        case (*_, str(field)):
            return _EXPECTED[field]
    return _EXPECTED_ROOT


def _shown(value: Any) -> str:
    """`value` as JSON, cut short."""
    text = printable(json.dumps(value, ensure_ascii=False, default=repr))
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def printable(name: str) -> str:
    """`name` with what a terminal would act upon, or not show, escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


def render(spec: GroupSpec, plan: Plan) -> Group:
    """`plan` for humans: tensors with their offsets, what each rank owns, and the bytes on the wire."""
    return Group(_tensor_table(spec, plan), Text(), _rank_table(plan), Text(), _summary(spec, plan))


def _tensor_table(spec: GroupSpec, plan: Plan) -> Table:
    table = Table(title="Tensors in a slot", title_justify="left")
    # Folded, since a narrow terminal must not cost digits.
    for header in ("tensor", "dtype", "shape", "shard\ndim"):
        table.add_column(header, overflow="fold")
    for header in ("offset", "bytes"):
        table.add_column(header, overflow="fold", justify="right")
    for tensor, place in zip(spec.tensors, plan.tensors, strict=True):
        shape = " x ".join(map(str, tensor.shape))
        # Text, since a plain string is read as markup and a name may hold brackets.
        table.add_row(
            Text(printable(tensor.name)),
            tensor.dtype,
            shape,
            str(tensor.shard_dim),
            f"{place.offset:,}",
            f"{place.nbytes:,}",
        )
    return table


def _rank_table(plan: Plan) -> Table:
    """One row for each run of ranks that own equally much."""
    table = Table(title="Shards", title_justify="left")
    table.add_column("ranks")
    for header in ("bytes owned by each", "sent by each"):
        table.add_column(header, overflow="fold", justify="right")
    for nbytes, run in groupby(plan.shards, key=lambda rank: rank.nbytes):
        ranks = [rank.rank for rank in run]
        label = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        table.add_row(label, f"{nbytes:,}", f"{nbytes * (len(plan.shards) - 1):,}")
    return table


def _summary(spec: GroupSpec, plan: Plan) -> Text:
    tensors, ranks = _count(len(spec.tensors), "tensor"), _count(spec.world_size, "rank")
    return Text(
        f"{tensors} over {ranks}: {_size(plan.slot_bytes)} of slot on every rank, "
        f"{_size(plan.wire_bytes)} on the wire in one all-gather"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _size(nbytes: int) -> str:
    """Bytes exactly, and from 1 KiB on in a unit that is quickly read."""
    if nbytes < 1024:
        return f"{nbytes:,} bytes"
    power = min((nbytes.bit_length() - 1) // 10, 4)
    return f"{nbytes:,} bytes ({nbytes / 1024**power:,.1f} {'KMGT'[power - 1]}iB)"
