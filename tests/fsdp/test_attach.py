"""attach, detach and report: what they refuse and how, what they leave behind, and what they say.

Every refusal is checked on every rank, and that the process group and the model are as good as before afterwards.
"""

import copy
import gc
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import tide_triton
from tests.fsdp.models import BF16, FULL, MIXED, Model, fsdp_modules, line, seeded, sharded
from tests.fsdp.parity import (
    Loop,
    batch,
    compare,
    cross_entropy,
    difference,
    set_prefetch,
    train,
)
from tests.ranks import RankPools, fresh_ranks
from tide_triton.fsdp import internals


def raised(call: Callable[[], Any]) -> str:
    """The exception that `call` raises, as "Type: message"; empty where it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def group_is_usable(world_size: int) -> bool:
    one = torch.ones(3)
    dist.all_reduce(one)
    return bool((one == world_size).all())


def trace_of_hooks(model: nn.Module) -> list[tuple[str, ...]]:
    """The classes of everything that attach changes."""
    return [
        (
            type(group).__name__,
            type(group._all_gather_comm).__name__,
            type(group._reduce_scatter_comm).__name__,
            *(type(param).__name__ for param in group.fsdp_params),
            *(key for param in group.fsdp_params for key in param.__dict__ if key.startswith("_tide")),
            *(key for key in group.__dict__ if key.startswith("_tide")),
        )
        for module in fsdp_modules(model)
        for group in internals.groups_of(module)
    ] + [tuple(key for key in model.__dict__ if key.startswith("_tide"))]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_segments() -> int:
    with open("/proc/self/maps") as maps:
        return sum("/dev/shm" in line for line in maps)


def attach(model: nn.Module, **options: Any) -> None:
    tide_triton.attach(model, **{"timeout_s": 10.0, **options})


def _sharded(world_size: int, **model: Any) -> nn.Module:
    return sharded(seeded(Model, **model), line(world_size))


def _refused(rank: int, world_size: int, case: str) -> dict[str, Any]:
    """Attach in the way `case` says is wrong; then in the right way, and train."""
    model = _sharded(world_size)
    before, fds, segments = trace_of_hooks(model), descriptors(), shared_segments()
    message = raised(lambda: REFUSALS[case](model, rank, world_size))
    found = {
        "message": message,
        "usable": group_is_usable(world_size),
        "unchanged": trace_of_hooks(model) == before,
        "left": (descriptors() - fds, shared_segments() - segments),
    }
    stock = train(_sharded(world_size), rank, Loop(steps=1))
    attach(model)
    found["then"] = difference(stock, train(model, rank, Loop(steps=1)))
    tide_triton.detach(model)
    return found


def _before_fully_shard(model: nn.Module, rank: int, world_size: int) -> None:
    attach(seeded())


def _no_module(model: nn.Module, rank: int, world_size: int) -> None:
    attach(model.parameters)


def _complex(model: nn.Module, rank: int, world_size: int) -> None:
    other = nn.Module()
    other.phase = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    attach(fully_shard(other, mesh=line(world_size)))


def _slots_for_prefetch(model: nn.Module, rank: int, world_size: int) -> None:
    other = _sharded(world_size, blocks=6)
    set_prefetch(other, 3)
    attach(other, slots=2)


def _shapes_differ(model: nn.Module, rank: int, world_size: int) -> None:
    attach(_sharded(world_size, hidden=16 if rank == world_size - 1 else 17))


def _reshard_differs(model: nn.Module, rank: int, world_size: int) -> None:
    attach(sharded(seeded(), line(world_size), reshard=rank == 0))


def _policy_differs(model: nn.Module, rank: int, world_size: int) -> None:
    attach(sharded(seeded(), line(world_size), FULL if rank == 0 else MIXED))


def _mid_unshard(model: nn.Module, rank: int, world_size: int) -> None:
    handle = model.blocks[1].unshard(async_op=True)
    try:
        attach(model)
    finally:
        handle.wait()
        model.blocks[1].reshard()


def _mid_unshard_on_one_rank(model: nn.Module, rank: int, world_size: int) -> None:
    # Both ranks take part in the gather; only one has not waited for it yet.
    handle = model.blocks[1].unshard(async_op=True)
    if rank == 1:
        handle.wait()
        model.blocks[1].reshard()
    try:
        attach(model)
    finally:
        handle.wait()
        model.blocks[1].reshard()


def _twice(model: nn.Module, rank: int, world_size: int) -> None:
    attach(model)
    try:
        attach(model)
    finally:
        tide_triton.detach(model)


def _part_of_an_attached_model(model: nn.Module, rank: int, world_size: int) -> None:
    attach(model.blocks[0])
    try:
        attach(model)
    finally:
        tide_triton.detach(model.blocks[0])


def _twice_on_one_rank(model: nn.Module, rank: int, world_size: int) -> None:
    attach(model)
    other = _sharded(world_size)
    try:
        attach(model if rank == 0 else other)
    finally:
        tide_triton.detach(model)


def _offloaded_and_strict(model: nn.Module, rank: int, world_size: int) -> None:
    offload = CPUOffloadPolicy(pin_memory=False)
    attach(sharded(seeded(), line(world_size), offload_policy=offload), strict=True)


def _with(**options: Any) -> Callable[[nn.Module, int, int], None]:
    return lambda model, rank, world_size: attach(model, **options)


def _on_one_rank(**options: Any) -> Callable[[nn.Module, int, int], None]:
    return lambda model, rank, world_size: attach(model) if rank else attach(model, **options)


REFUSALS: dict[str, Callable[[nn.Module, int, int], None]] = {
    "before fully_shard": _before_fully_shard,
    "no module": _no_module,
    "twice": _twice,
    "twice on one rank": _twice_on_one_rank,
    "part of it is attached": _part_of_an_attached_model,
    "a dtype without a kernel": _complex,
    "slots=0": _with(slots=0),
    "slots=-1": _with(slots=-1),
    "slots=True": _with(slots=True),
    "slots=2.0": _with(slots=2.0),
    "slots=1": _with(slots=1),
    "slots below the prefetch depth": _slots_for_prefetch,
    "an unknown transport": _with(transport="carrier pigeon"),
    "timeout_s=0": _with(timeout_s=0),
    "timeout_s=nan": _with(timeout_s=float("nan")),
    "timeout_s is text": _with(timeout_s="soon"),
    "slots=0 on one rank": _on_one_rank(slots=0),
    "timeout_s is text on one rank": _on_one_rank(timeout_s="soon"),
    "an unknown transport on one rank": _on_one_rank(transport="pigeon"),
    "ring_depth=100": _with(ring_depth=100),
    "transports differ": lambda model, rank, world_size: attach(model, transport="host_switch" if rank else "host"),
    "slots differ": lambda model, rank, world_size: attach(model, slots=4 + rank),
    "strict differs": lambda model, rank, world_size: attach(model, strict=rank == 0),
    "shapes differ": _shapes_differ,
    "reshard_after_forward differs": _reshard_differs,
    "dtypes differ": _policy_differs,
    "an unshard is under way": _mid_unshard,
    "an unshard is under way on one rank": _mid_unshard_on_one_rank,
    "strict with offloading": _offloaded_and_strict,
    "detach without attach": lambda model, rank, world_size: tide_triton.detach(model),
    "report without attach": lambda model, rank, world_size: tide_triton.report(model),
}

#: What the message must hold: the type, and what a user needs to put it right.
MESSAGES: dict[str, tuple[str, ...]] = {
    "before fully_shard": ("AttachError", "Model", "fully_shard"),
    "no module": ("AttachError", "nn.Module"),
    "twice": ("AttachError", "(root)", "attached already", "detach"),
    "twice on one rank": ("AttachError", "attached already"),
    "part of it is attached": ("AttachError", "'blocks.0'", "attached already"),
    "a dtype without a kernel": ("AttachError", "'phase'", "complex64", "ignored_params"),
    "slots=0": ("AttachError", "slots", "0"),
    "slots=-1": ("AttachError", "slots", "-1"),
    "slots=True": ("AttachError", "slots", "True"),
    "slots=2.0": ("AttachError", "slots", "2.0"),
    "slots=1": ("SlotShortageError", "slots=2"),
    "slots below the prefetch depth": ("SlotShortageError", "slots=2", "prefetch depth of 3", "slots=4"),
    "an unknown transport": ("AttachError", "transport", "'auto', 'host'", "carrier pigeon"),
    "timeout_s=0": ("AttachError", "timeout_s", "0"),
    "timeout_s=nan": ("AttachError", "timeout_s", "nan"),
    "timeout_s is text": ("AttachError", "timeout_s", "soon"),
    "slots=0 on one rank": ("AttachError", "slots", "0"),
    "timeout_s is text on one rank": ("AttachError", "timeout_s", "soon"),
    "an unknown transport on one rank": ("AttachError", "pigeon"),
    "ring_depth=100": ("AttachError", "ring_depth must be an integer from 1 to 64", "got 100"),
    "transports differ": (
        "MismatchError",
        "attach(transport=...)",
        "'host' on ranks [0]",
        "'host_switch' on ranks [1]",
    ),
    "slots differ": ("MismatchError", "slots", "4 on ranks [0]", "5 on ranks [1]"),
    "strict differs": ("MismatchError", "strict", "True on ranks [0]"),
    "shapes differ": ("MismatchError", "'blocks.0.up.weight'", "(17, 12)", "(16, 12)", "ranks [1]"),
    "reshard_after_forward differs": ("MismatchError", "blocks.0", "ranks [0]"),
    "dtypes differ": ("MismatchError", "float32", "bfloat16"),
    "an unshard is under way": ("AttachError", "'blocks.1'", "unshard"),
    "an unshard is under way on one rank": ("AttachError", "'blocks.1'", "unshard"),
    "strict with offloading": ("UnsupportedError", "(root)", "blocks.3", "offloaded"),
    "detach without attach": ("AttachError", "attach"),
    "report without attach": ("AttachError", "attach"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_wrong_call_raises_on_every_rank_and_changes_nothing(ranks: RankPools, case: str) -> None:
    for rank, found in enumerate(ranks(2).run(_refused, case)):
        for part in MESSAGES[case]:
            assert part in found["message"], f"rank {rank}: {found['message']!r} lacks {part!r}"
        assert found["usable"]
        assert found["unchanged"]
        assert found["left"] == (0, 0)
        assert found["then"] == ""


def _detach_mid_iteration(rank: int, world_size: int) -> dict[str, Any]:
    def step(model: nn.Module, *, interrupted: bool) -> tuple[list[torch.Tensor], str]:
        tokens, targets = batch(rank, 0)
        loss = cross_entropy(model(tokens), targets)
        message = raised(lambda: tide_triton.detach(model)) if interrupted else ""
        loss.backward()
        return [p.grad._local_tensor.clone() for p in model.parameters()], message

    stock, _ = step(_sharded(world_size), interrupted=False)
    model = _sharded(world_size)
    attach(model)
    gradients, message = step(model, interrupted=True)
    tide_triton.detach(model)
    return {"message": message, "same": all(map(torch.equal, stock, gradients)), "usable": group_is_usable(world_size)}


def test_detach_between_forward_and_backward_is_refused_and_the_backward_can_go_on(ranks: RankPools) -> None:
    for found in ranks(2).run(_detach_mid_iteration):
        assert "AttachError" in found["message"]
        assert "backward" in found["message"]
        assert found["same"]
        assert found["usable"]


def _attach_mid_iteration(rank: int, world_size: int) -> dict[str, Any]:
    model = _sharded(world_size)
    tokens, targets = batch(rank, 0)
    loss = cross_entropy(model(tokens), targets)
    message = raised(lambda: attach(model))
    loss.backward()
    gradients = [p.grad._local_tensor.clone() for p in model.parameters()]
    model.zero_grad()
    del loss
    attach(model)
    cross_entropy(model(tokens), targets).backward()
    again = [p.grad._local_tensor.clone() for p in model.parameters()]
    tide_triton.detach(model)
    return {"message": message, "same": all(map(torch.equal, gradients, again))}


def test_attach_between_forward_and_backward_is_refused_and_works_after_it(ranks: RankPools) -> None:
    for found in ranks(2).run(_attach_mid_iteration):
        assert found["message"].startswith("AttachError: group '(root)' is between a forward and its backward")
        assert found["same"]


def _two_forwards(rank: int, world_size: int, slots: int | None) -> tuple[str, bool]:
    """Two forwards before their backward, of layers whose input needs no gradient: the first one stays unsharded."""

    def gradients(by_tide: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(fully_shard(nn.Linear(6, 6), mesh=line(world_size)) for _ in range(5)))
        fully_shard(model, mesh=line(world_size))
        if by_tide:
            attach(model, slots=slots)
        x = torch.full((3, 6), rank + 1.0)
        (model(x).sum() + model(2 * x).sum()).backward()
        found = [p.grad._local_tensor.clone() for p in model.parameters()]
        if by_tide:
            tide_triton.detach(model)
        return found

    expected, got = gradients(False), []
    message = raised(lambda: got.extend(gradients(True)))
    return message, len(got) == len(expected) and all(map(torch.equal, expected, got))


def test_a_slot_conflict_says_how_many_slots_will_do_and_so_many_do(ranks: RankPools) -> None:
    for message, _ in ranks(2).run(_two_forwards, None):
        assert message.startswith("SlotConflictError: groups '")
        assert "stays so until the backward is over" in message
        assert "Pass slots=5 to attach()" in message
    for message, same in ranks(2).run(_two_forwards, 5):
        assert message == ""
        assert same


def _cycles(rank: int, world_size: int) -> dict[str, Any]:
    model = _sharded(world_size)
    plain = train(_sharded(world_size), rank, Loop(steps=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, before = [], trace_of_hooks(model)
    for step in range(4):
        # Attached and stock steps take turns.
        if step % 2 == 0:
            attach(model)
        tokens, targets = batch(rank, step)
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            tide_triton.detach(model)
    expected = [float(value) for name, value in plain if name.endswith(": loss")]
    final = [
        value for name, value in plain if name.startswith("step 3: ") and "grad" not in name and "loss" not in name
    ]
    same = all(torch.equal(a, b._local_tensor) for a, b in zip(final, model.state_dict().values(), strict=True))
    gc.collect()
    sizes = []
    for _ in range(20):
        attach(model)
        model(batch(rank, 0)[0])
        tide_triton.detach(model)
        gc.collect()
        sizes.append((descriptors(), shared_segments()))
    return {
        "losses": losses == expected,
        "same": same,
        "restored": trace_of_hooks(model) == before,
        "sizes": sizes,
    }


def test_attached_and_stock_steps_can_take_turns_and_twenty_cycles_leave_nothing(ranks: RankPools) -> None:
    for found in ranks(2).run(_cycles):
        assert found["losses"]
        assert found["same"]
        assert found["restored"]
        assert len(set(found["sizes"])) == 1, found["sizes"]
        assert found["sizes"][0][1] == 0


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in the middle of a backward")


def _dropped(rank: int, world_size: int, after: str) -> tuple[int, int]:
    def use(model: nn.Module) -> None:
        if after == "a step":
            train(model, rank, Loop(steps=1))
        elif after == "a forward":
            with torch.no_grad():
                model(batch(rank, 0)[0])
        else:
            model.blocks[1].register_forward_hook(lambda module, inputs, output: _Raises.apply(output))
            assert "in the middle of a backward" in raised(lambda: train(model, rank, Loop(steps=1)))

    gc.collect()
    fds, segments = descriptors(), shared_segments()
    for _ in range(3):
        model = _sharded(world_size)
        attach(model)
        use(model)
        del model
        gc.collect()
    dist.barrier()
    return descriptors() - fds, shared_segments() - segments


@pytest.mark.parametrize("after", ["a step", "a forward", "a backward that failed"])
def test_a_model_that_is_dropped_without_detach_gives_its_memory_back(ranks: RankPools, after: str) -> None:
    assert ranks(2).run(_dropped, after) == [(0, 0), (0, 0)]


def _outlived(rank: int, world_size: int) -> bool:
    """Parameters that a user kept stay readable after detach and after the windows are gone."""
    model = _sharded(world_size)
    attach(model)
    model.blocks[0].unshard()
    kept = model.blocks[0].up.weight.detach()
    value = kept.clone()
    del model
    gc.collect()
    return torch.equal(kept, value)


def test_a_parameter_that_outlives_its_model_stays_readable(ranks: RankPools) -> None:
    assert ranks(2).run(_outlived) == [True, True]


# --- the report ---


def _wire_bytes(model: nn.Module, world_size: int, rank: int, gathers: dict[str, int], reduces: int) -> dict[str, int]:
    """What each group must have sent, from torch.chunk and the shapes alone."""
    sizes: dict[str, int] = {}
    unsharded = dict(seeded().named_parameters())
    for name, param in unsharded.items():
        group = ".".join(name.split(".")[:2]) if name.startswith("blocks") else "(root)"
        chunks = list(torch.chunk(param, world_size))
        mine = chunks[rank].numel() if rank < len(chunks) else 0
        sent = mine * (world_size - 1) * 2 * gathers[group]
        sent += (param.numel() - mine) * 2 * reduces
        sizes[group] = sizes.get(group, 0) + sent
    return sizes


def _reported(rank: int, world_size: int) -> dict[str, Any]:
    model = _sharded(world_size)
    attach(model)
    empty = tide_triton.report(model, quiet=True)
    train(model, rank, Loop(steps=3))
    report = tide_triton.report(model, quiet=True)
    gathers = {g.name: g.gather.calls for g in report.groups}
    moved = {g.name: g.gather.calls - g.gather.reused for g in report.groups}
    expected = _wire_bytes(model, world_size, rank, moved, 3)
    found = {
        "names": [g.name for g in report.groups],
        "gathers": list(gathers.values()),
        "reduces": [g.reduce.calls for g in report.groups],
        "wire": {g.name: g.gather.wire_bytes + g.reduce.wire_bytes for g in report.groups},
        "expected": expected,
        "total": report.gather.wire_bytes + report.reduce.wire_bytes == sum(expected.values()),
        "copies": report.gather.layout_copy_bytes + report.reduce.layout_copy_bytes,
        "before": [g.gather.calls + g.reduce.calls for g in empty.groups],
        "worlds": report.world_sizes,
        "transport": report.transport,
        "window": report.window_nbytes - report.ring_nbytes,
        "slots": {g.slot: g.slot_nbytes for g in report.groups},
    }
    tide_triton.detach(model)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_report_counts_calls_and_the_bytes_that_shapes_imply(ranks: RankPools, world_size: int) -> None:
    for found in ranks(world_size).run(_reported):
        assert found["names"] == ["(root)", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
        # The root stays unsharded after forward; the last block's parameters are gathered again all the same.
        assert found["gathers"] == [3, 6, 6, 6, 6]
        assert found["reduces"] == [3] * 5
        assert found["wire"] == found["expected"]
        assert found["total"]
        assert found["copies"] == 0
        assert found["before"] == [0] * 5
        assert found["worlds"] == (world_size,)
        assert found["transport"] == "host"
        assert found["window"] == sum(found["slots"].values())


def _printed(rank: int, world_size: int) -> tuple[str, str]:
    import contextlib
    import io

    model = _sharded(world_size)
    attach(model)
    train(model, rank, Loop(steps=1))
    loud, quiet = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(loud):
        tide_triton.report(model)
    with contextlib.redirect_stdout(quiet):
        tide_triton.report(model, quiet=True)
    tide_triton.detach(model)
    return loud.getvalue(), quiet.getvalue()


def test_the_report_is_printed_once_and_not_at_all_when_quiet(ranks: RankPools) -> None:
    (first, quiet), (second, _) = ranks(2).run(_printed)
    for text in ("host", "(root)", "blocks.3", "zero-copy", "windows"):
        assert text in first
    assert second == ""
    assert quiet == ""


def _fell_back(rank: int, world_size: int) -> dict[str, Any]:
    model = sharded(seeded(), line(world_size), BF16, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attach(model)
        train(model, rank, Loop(steps=2))
    report = tide_triton.report(model, quiet=True)
    tide_triton.detach(model)
    said = [str(w.message) for w in caught if "tide_triton" in str(w.message)]
    return {
        "said": said,
        "paths": {(g.gather_path, g.reduce_path, g.why) for g in report.groups},
        "calls": [(g.gather.fallback, g.reduce.fallback) for g in report.groups],
        "copies": report.gather.layout_copy_bytes > 0 and report.reduce.layout_copy_bytes > 0,
    }


def test_a_group_that_keeps_the_stock_collectives_says_why_in_the_report_and_once_in_a_warning(
    ranks: RankPools,
) -> None:
    for found in ranks(2).run(_fell_back):
        assert found["paths"] == {("stock", "stock", "parameters are offloaded to the CPU")}
        assert found["calls"] == [(2, 2)] + [(4, 2)] * 4
        assert found["copies"]
        (said,) = found["said"]
        assert "offloaded" in said
        assert all(name in said for name in ("'(root)'", "'blocks.0'", "'blocks.3'"))


class Wrapped(torch.Tensor):
    """A gradient that is no plain tensor."""


def _strict_on_the_way(rank: int, world_size: int) -> tuple[str, bool]:
    """What only shows while training (a gradient of another kind) raises then, under strict."""
    model = _sharded(world_size)
    attach(model, strict=True)

    def wrap(weight: torch.Tensor) -> None:
        weight.grad = weight.grad.as_subclass(Wrapped)

    def wrap_gradient(module: nn.Module, args: Any) -> None:
        module.weight.register_post_accumulate_grad_hook(wrap)

    model.blocks[1].up.register_forward_pre_hook(wrap_gradient)
    message = raised(lambda: train(model, rank, Loop(steps=1)))
    return message, group_is_usable(world_size)


def test_strict_raises_instead_of_falling_back_while_training() -> None:
    with fresh_ranks(2) as ranks:
        for message, usable in ranks.run(_strict_on_the_way):
            assert "UnsupportedError" in message
            assert "a gradient is a Wrapped" in message
            assert usable


def _copied(rank: int, world_size: int) -> str:
    """A failed comparison of two models' hooks would make every refusal test pass."""
    model = _sharded(world_size)
    before = copy.copy(trace_of_hooks(model))
    attach(model)
    changed = trace_of_hooks(model) != before
    outcome = compare(lambda: _sharded(world_size), rank, Loop(steps=1))
    tide_triton.detach(model)
    return outcome.from_stock if changed else "attach changed nothing that trace_of_hooks sees"


def test_a_second_model_can_be_attached_while_the_first_is(ranks: RankPools) -> None:
    assert ranks(2).run(_copied) == ["", ""]
