"""What FSDP2 expects of whoever carries its collectives: ten expectations, each of which a careless carrier breaks.

They are the list "What FSDP2 itself expects" of docs and design; the settings that training itself shows are in
`test_parity`.
"""

import gc
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tide_triton
from tests.fsdp.models import (
    BF16,
    FP16,
    FULL,
    MIXED,
    Model,
    NestedBlock,
    fsdp_modules,
    grid,
    line,
    seeded,
    sharded,
)
from tests.fsdp.parity import (
    Loop,
    Outcome,
    assert_equal_to_stock,
    assert_zero_copy,
    batch,
    compare,
    cross_entropy,
    difference,
    gradients,
    parameters,
    plain_loss,
    set_divide_factor,
    set_prefetch,
    train,
)
from tests.fsdp.test_attach import attach, descriptors, group_is_usable, raised, shared_segments, trace_of_hooks
from tests.ranks import RankPools

#: What FSDP2 itself can do only from torch 2.13 on.
newer = pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="FSDP2 of this torch cannot do it")


def _model(world_size: int, policy: MixedPrecisionPolicy = MIXED, **options: Any) -> nn.Module:
    return sharded(seeded(Model, **options), line(world_size), policy)


# --- 1 and 2: reduce ops and the dtype on the wire, in closed form ---


class Product(nn.Module):
    """A loss whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


_INTEGERS = torch.arange(1.0, 22.0).view(7, 3)


def _reduced(
    rank: int,
    world_size: int,
    policy: MixedPrecisionPolicy,
    dtype: torch.dtype,
    factor: float | None,
    force: bool,
    add: float,
) -> torch.Tensor:
    """This rank's shard of the reduced gradient, where rank r's gradient is (r + 1) * integers + add."""
    model = fully_shard(Product().to(dtype), mesh=line(world_size), mp_policy=policy)
    model.set_force_sum_reduction_for_comms(force)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    attach(model, strict=True)
    model((rank + 1) * _INTEGERS.to(dtype) + add).backward()
    tide_triton.detach(model)
    return model.weight.grad._local_tensor.clone()


_FP64_REDUCE = MixedPrecisionPolicy(reduce_dtype=torch.float64)
_BF16_REDUCE = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("policy", "dtype", "factor", "force", "scale"),
    [
        pytest.param(FULL, torch.float32, None, False, 1 / 4, id="AVG in fp32"),
        pytest.param(FULL, torch.float32, 4.0, False, 1 / 4, id="a factor equal to the world size is AVG"),
        pytest.param(FULL, torch.float32, 1.0, True, 1.0, id="SUM in fp32"),
        pytest.param(FULL, torch.float32, 8.0, False, 1 / 8, id="PREMUL_SUM in fp32"),
        pytest.param(BF16, torch.float32, 2.0, False, 1 / 2, id="PREMUL_SUM in bf16"),
        pytest.param(FULL, torch.float32, 8.0, True, 1 / 8, id="SUM, divided after"),
        pytest.param(FP16, torch.float32, None, False, 1 / 4, id="SUM in fp16, divided before and after"),
        pytest.param(FP16, torch.float32, 8.0, False, 1 / 8, id="SUM in fp16, divided by a factor before and after"),
        pytest.param(FULL, torch.float64, None, False, 1 / 4, id="SUM in fp64, divided before and after"),
        pytest.param(_FP64_REDUCE, torch.float32, None, False, 1 / 4, id="SUM of fp32 gradients in fp64"),
    ],
)
def test_expectation_1_every_reduce_op_gives_its_closed_form(
    ranks: RankPools, policy: MixedPrecisionPolicy, dtype: torch.dtype, factor: float | None, force: bool, scale: float
) -> None:
    got = torch.cat(ranks(4).run(_reduced, policy, dtype, factor, force, 0.0))
    # 1 + 2 + 3 + 4 = 10; sums, and powers of two of them, are exact in fp32 and fp64, and in 16 bits up to their eps.
    expected = 10 * scale * _INTEGERS.to(dtype)
    exact = policy not in (BF16, FP16)
    torch.testing.assert_close(got, expected, rtol=0 if exact else 2.0**-7, atol=0)


def test_expectation_1_a_factor_that_is_no_power_of_two_is_rounded_as_premul_sum_rounds_it(ranks: RankPools) -> None:
    got = torch.cat(ranks(2).run(_reduced, FULL, torch.float32, 3.0, False, 0.0))
    third = torch.tensor(1 / 3)
    assert torch.equal(got, _INTEGERS * third + 2 * _INTEGERS * third)


def test_expectation_2_what_is_wider_than_the_wire_is_rounded_before_the_sum(ranks: RankPools) -> None:
    # 1 + 2^-9 is 1 in bf16, and 2 + 2^-9 is 2; unrounded their mean would still be 1.5 + 2^-9, which is 1.5.
    # 3 * 2^-8 survives only a sum of unrounded values: 65 + 3/256 rounds to 65, twice that to 130, and the mean tells.
    got = torch.cat(ranks(2).run(_reduced, _BF16_REDUCE, torch.float32, 1.0, True, 2.0**-8 + 2.0**-9))
    sent = [((r + 1) * _INTEGERS + 2.0**-8 + 2.0**-9).bfloat16().float() for r in range(2)]
    unrounded = (3 * _INTEGERS + 2.0**-7 + 2.0**-8).bfloat16().float()
    expected = (sent[0] + sent[1]).bfloat16().float()
    assert not torch.equal(expected, unrounded), "the values do not tell the two apart"
    assert torch.equal(got, expected)


@pytest.mark.parametrize("policy", [FULL, _FP64_REDUCE])
def test_expectation_2_fp64_is_not_summed_in_fp32(ranks: RankPools, policy: MixedPrecisionPolicy) -> None:
    got = torch.cat(ranks(2).run(_reduced, policy, torch.float64, 1.0, True, 2.0**-40))
    assert torch.equal(got, 3 * _INTEGERS.double() + 2.0**-39)


# --- 3 and 4: slots ---


def _in_flight(rank: int, world_size: int, slots: int | None) -> dict[str, Any]:
    model = _model(world_size, blocks=7)
    expected = [p.to(torch.bfloat16) for p in seeded(Model, blocks=7).blocks.parameters()]
    attach(model, slots=slots)
    same = []
    for _ in range(2):
        handles = [block.unshard(async_op=True) for block in model.blocks]
        for handle in handles:
            handle.wait()
        same.append(all(torch.equal(a, b) for a, b in zip(expected, model.blocks.parameters(), strict=True)))
        for block in model.blocks:
            block.reshard()
    report = tide_triton.report(model, quiet=True)
    tide_triton.detach(model)
    return {"same": same, "grown": report.slots_grown, "slots": len({g.slot for g in report.groups})}


@pytest.mark.parametrize("slots", [None, 3])
def test_expectation_3_seven_unshards_in_flight_on_fewer_slots_give_right_values(
    ranks: RankPools, slots: int | None
) -> None:
    for found in ranks(2).run(_in_flight, slots):
        assert found["same"] == [True, True]
        # The root has one; the blocks had 2 or 3 and need 7. What has moved once need not move again.
        assert found["grown"] == 7 - (slots or 2)
        assert found["slots"] == 8


def _keep_after_forward(model: nn.Module) -> None:
    model.set_reshard_after_forward(False)


def _prefetch_backward_only(model: nn.Module, depth: int) -> None:
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_backward_prefetch(blocks[max(0, index - depth) : index][::-1])


def _unshard_all_before_backward(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = cross_entropy(model(tokens), targets)
    for block in model.blocks:
        block.unshard(async_op=True)
    loss.backward()
    return loss.detach()


_LENGTHENED: dict[str, tuple[Callable[[int], nn.Module], Loop, Callable[[nn.Module], Any] | None, bool]] = {
    "no resharding after forward, set after attach": (partial(_model, blocks=6), Loop(), _keep_after_forward, True),
    "prefetch of 4": (partial(_model, blocks=6), Loop(before=partial(set_prefetch, depth=4)), None, True),
    "backward prefetch of 4 only": (
        partial(_model, blocks=6),
        Loop(before=partial(_prefetch_backward_only, depth=4)),
        None,
        False,
    ),
    "backward prefetch over nested modules": (
        partial(_model, block=NestedBlock),
        Loop(before=partial(_prefetch_backward_only, depth=3)),
        None,
        True,
    ),
    "accumulation with nothing resharded after backward": (
        partial(_model, blocks=6),
        Loop(micro=3, sync=False),
        lambda model: model.set_reshard_after_backward(False),
        True,
    ),
    "all unsharded between forward and backward": (
        partial(_model, blocks=6),
        Loop(loss=_unshard_all_before_backward),
        None,
        False,
    ),
}


def _lengthened(rank: int, world_size: int, name: str) -> Outcome:
    build, loop, after, _ = _LENGTHENED[name]
    return compare(lambda: build(world_size), rank, loop, after=after)


@pytest.mark.parametrize("name", _LENGTHENED)
def test_expectation_4_slots_follow_from_use_and_no_default_raises(ranks: RankPools, name: str) -> None:
    outcomes = ranks(2).run(_lengthened, name)
    assert_equal_to_stock(outcomes)
    assert_zero_copy(outcomes)
    assert [o.grown > 0 for o in outcomes] == [_LENGTHENED[name][3]] * 2


def _held_by_one_rank(rank: int, world_size: int) -> Outcome:
    kept: list[torch.Tensor] = []

    def before(model: nn.Module) -> None:
        # One rank alone keeps a view of a parameter's memory, then more groups are unsharded than there are slots.
        if rank == 0 and not kept:
            model.blocks[3].unshard()
            kept.append(model.blocks[3].up.weight.detach())
            model.blocks[3].reshard()
        elif rank == 1 and not kept:
            model.blocks[3].unshard()
            kept.append(torch.zeros(()))
            model.blocks[3].reshard()
        for block in model.blocks:
            block.unshard(async_op=True)

    def loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        result = plain_loss(model, tokens, targets)
        kept.clear()
        return result

    return compare(lambda: _model(world_size), rank, Loop(steps=2, before=before, loss=loss), timeout_s=8.0)


def test_expectation_4_ranks_make_the_same_choice_though_one_keeps_a_view_of_a_parameter(ranks: RankPools) -> None:
    assert_equal_to_stock(ranks(2).run(_held_by_one_rank))


# --- 5: iterations that are abandoned ---


class AbandonedError(RuntimeError):
    pass


def _abandoning(rank: int, world_size: int, where: str) -> str:
    """Two steps with one in between that raises in block 2, under stock and under TIDE."""

    def run(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trace: list[tuple[str, torch.Tensor]] = []
        for step, fails in enumerate((False, True, False, True, True, False)):
            tokens, targets = batch(rank, step)
            handles = []
            if fails and where == "forward":
                handles.append(model.blocks[2].down.register_forward_hook(_raise))
            if fails and where == "backward":
                handles.append(model.blocks[1].down.register_full_backward_hook(_raise))
            try:
                trace.append((f"{step}: loss", plain_loss(model, tokens, targets)))
            except AbandonedError:
                model.reset_iter_state()
                optimizer.zero_grad()
                _drop_leftovers(model)
            else:
                assert not fails
            for handle in handles:
                handle.remove()
            # Graphs of an abandoned iteration hold views of parameters.
            gc.collect()
            if not fails:
                trace += gradients(model, f"{step}: ")
                optimizer.step()
                optimizer.zero_grad()
        return trace + parameters(model)

    stock = run(_model(world_size))
    model = _model(world_size)
    attach(model)
    tide = run(model)
    tide_triton.detach(model)
    return difference(stock, tide)


def _drop_leftovers(model: nn.Module) -> None:
    """Gradients of the abandoned backward, which stock FSDP2 would add to the next one's."""
    for module in fsdp_modules(model):
        for param in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def _raise(*unused: object) -> None:
    raise AbandonedError


@newer
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_expectation_5_an_iteration_abandoned_by_an_exception_does_not_spoil_the_next(
    ranks: RankPools, where: str
) -> None:
    assert ranks(2).run(_abandoning, where) == ["", ""]


# --- 6: where and when attach may be called ---


class Shell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens)


def _no_root_parameters(world_size: int) -> nn.Module:
    model = seeded(Shell)
    mesh = line(world_size)
    for block in model.inner.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MIXED)
    fully_shard(model.inner, mesh=mesh, mp_policy=MIXED)
    return fully_shard(model, mesh=mesh, mp_policy=MIXED)


class Pair(nn.Module):
    """Two roots in a plain module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Model(), Model()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.a(tokens) + self.b(tokens)

    def set_requires_gradient_sync(self, sync: bool) -> None:
        self.a.set_requires_gradient_sync(sync)
        self.b.set_requires_gradient_sync(sync)


def _several_roots(world_size: int) -> nn.Module:
    model = seeded(Pair)
    sharded(model.a, line(world_size))
    sharded(model.b, line(world_size))
    return model


def _shards_of_one(world_size: int) -> nn.Module:
    return sharded(seeded(), grid(2, 1))


def _alone(world_size: int) -> nn.Module:
    return sharded(seeded(), line(1))


def _cast_before(world_size: int) -> nn.Module:
    return _model(world_size, FULL).to(torch.bfloat16)


def _load_assigned(model: nn.Module) -> None:
    torch.manual_seed(9)
    state = {k: torch.randn_like(v).to(torch.float32) * 0.2 for k, v in Model().state_dict().items()}
    mesh = line(2)
    placed = {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in state.items()}
    model.load_state_dict(placed, assign=True)


_PLACES: dict[str, tuple[Callable[[int], nn.Module], Callable[[nn.Module], Any] | None]] = {
    "a root without parameters": (_no_root_parameters, None),
    "a plain module with several roots": (_several_roots, None),
    "modules cast before attach": (_cast_before, None),
    "modules cast after attach": (partial(_model, policy=FULL), lambda model: model.to(torch.bfloat16)),
    "modules widened after attach": (partial(_model, policy=FULL), lambda model: model.double()),
    "a state dict loaded with assign after attach": (_model, _load_assigned),
    "a root's modules cast, mixed precision on top": (_model, lambda model: model.double()),
}


def _placed(rank: int, world_size: int, name: str) -> Outcome:
    build, after = _PLACES[name]
    return compare(lambda: build(world_size), rank, Loop(steps=2), after=after)


@pytest.mark.parametrize("name", _PLACES)
def test_expectation_6_attach_works_on(ranks: RankPools, name: str) -> None:
    outcomes = ranks(2).run(_placed, name)
    assert_equal_to_stock(outcomes)
    assert_zero_copy(outcomes)


def _slots_of_roots(rank: int, world_size: int) -> dict[str, Any]:
    pair = _several_roots(world_size)
    attach(pair)
    report = tide_triton.report(pair, quiet=True)
    tide_triton.detach(pair)
    return {"names": [g.name for g in report.groups], "slots": [g.slot for g in report.groups], "w": report.world_sizes}


def test_expectation_6_several_roots_share_one_set_of_slots(ranks: RankPools) -> None:
    for found in ranks(2).run(_slots_of_roots):
        assert found["w"] == (2,)
        assert found["names"][:2] == ["a", "a.blocks.0"]
        # Two roots that stay unsharded, and two slots in which all eight blocks take turns.
        assert len(set(found["slots"])) == 4


def _one(rank: int, world_size: int, name: str) -> Outcome:
    return compare(
        lambda: {"shards": _shards_of_one, "world": _alone}[name](world_size), rank, Loop(micro=2, sync=False)
    )


@pytest.mark.parametrize(("name", "world_size"), [("shards", 2), ("world", 1)])
def test_expectation_6_over_one_rank_nothing_is_communicated(ranks: RankPools, name: str, world_size: int) -> None:
    outcomes = ranks(world_size).run(_one, name)
    assert_equal_to_stock(outcomes)
    for outcome in outcomes:
        assert {(r.gather, r.reduce, r.gathers, r.reduces, r.wire_bytes) for r in outcome.rows} == {
            ("local", "local", 0, 0, 0)
        }


def _unshard_first(rank: int, world_size: int) -> list[bool]:
    model = _model(world_size)
    attach(model)
    plain = seeded()
    same = []
    for block, expected in zip(model.blocks, plain.blocks, strict=True):
        block.unshard()
        pairs = zip(block.parameters(), expected.parameters(), strict=True)
        same.append(all(torch.equal(a, b.to(torch.bfloat16)) for a, b in pairs))
        block.reshard()
    same.append(all(isinstance(p, DTensor) for p in model.blocks.parameters()))
    return same


def test_expectation_6_the_first_use_may_be_an_unshard_before_any_forward(ranks: RankPools) -> None:
    assert ranks(2).run(_unshard_first) == [[True] * 5] * 2


class Collectives(TorchDispatchMode):
    """Counts the c10d operators that run below it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def _transformed(rank: int, world_size: int, transform: str) -> dict[str, Any]:
    """The gradient by the input, under a transform, as the very first use."""
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(rank))
    results, collectives = [], []
    for tide in (False, True):
        model = fully_shard(seeded().blocks[0], mesh=line(world_size))
        if tide:
            attach(model)
        function = torch.func.grad(lambda value, model=model: model(value).square().sum())
        with Collectives() as counted:
            result = torch.func.vmap(function)(x) if transform == "vmap" else function(x)
        # Outside the transform it still hangs on the weights.
        results.append(result.detach())
        del result
        collectives.append(dict(counted.seen))
        if tide:
            tide_triton.detach(model)
    return {"same": torch.equal(*results), "stock": collectives[0], "tide": collectives[1]}


@newer
@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_expectation_6_the_first_use_may_be_inside_a_functorch_transform(ranks: RankPools, transform: str) -> None:
    for found in ranks(2).run(_transformed, transform):
        assert found["same"]
        assert found["tide"] == {}


# --- 7 and 8: errors, and what they leave ---


def _named(rank: int, world_size: int) -> list[str]:
    outer = nn.Module()
    outer.tower = seeded(Model, hidden=16 + rank)
    sharded(outer.tower, line(world_size))
    odd = nn.Module()
    odd.part = nn.Module()
    odd.part.phase = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    fully_shard(odd.part, mesh=line(world_size))
    return [raised(lambda: attach(outer)), raised(lambda: attach(odd))]


def test_expectation_7_errors_before_lazy_init_name_the_parameter_from_the_attached_module(ranks: RankPools) -> None:
    for differing, unknown in ranks(2).run(_named):
        assert "'tower.blocks.0.up.weight'" in differing
        assert "'part.phase'" in unknown


def _fails_on_one(rank: int, world_size: int, mesh: str, at: int) -> dict[str, Any]:
    """Shared memory runs out on the last rank, at its `at`-th segment."""
    from tide_triton.errors import SharedMemoryError
    from tide_triton.transports import shared_memory

    def build() -> nn.Module:
        return sharded(seeded(), grid(2, 2) if mesh == "grid" else line(world_size))

    model, create, made = build(), shared_memory.create, [0]

    def short(nbytes: int, what: str) -> int:
        made[0] += 1
        if rank == world_size - 1 and made[0] == at:
            raise SharedMemoryError("no room on purpose")
        return create(nbytes, what)

    gc.collect()
    before, fds, segments = trace_of_hooks(model), descriptors(), shared_segments()
    shared_memory.create = short
    try:
        message = raised(lambda: attach(model))
    finally:
        shared_memory.create = create
    gc.collect()
    found = {
        "message": message,
        "unchanged": trace_of_hooks(model) == before,
        "left": (descriptors() - fds, shared_segments() - segments),
        "usable": group_is_usable(world_size),
    }
    stock = train(build(), rank, Loop(steps=1))
    attach(model)
    found["then"] = difference(stock, train(model, rank, Loop(steps=1)))
    tide_triton.detach(model)
    return found


@pytest.mark.parametrize(
    ("mesh", "world_size", "at"),
    [("line", 2, 2), ("line", 2, 4), ("grid", 4, 3)],
    ids=["first slot", "third slot", "HSDP"],
)
def test_expectation_8_an_attach_that_fails_on_one_rank_leaves_nothing_behind_on_any(
    ranks: RankPools, mesh: str, world_size: int, at: int
) -> None:
    for found in ranks(world_size).run(_fails_on_one, mesh, at):
        assert found["message"] != ""
        assert found["unchanged"]
        assert found["left"] == (0, 0)
        assert found["usable"]
        # Bit by bit at 2 ranks; at 4 the shard groups have 2.
        assert found["then"] == ""


# --- 9 and 10 ---


def _counted(rank: int, world_size: int, mesh: str) -> tuple[dict[str, int], dict[str, int]]:
    counts = []
    for tide in (False, True):
        model = sharded(seeded(), grid(2, 2) if mesh == "grid" else line(world_size))
        if tide:
            attach(model)
        with Collectives() as counted:
            train(model, rank, Loop(steps=2, micro=2))
        counts.append(dict(counted.seen))
        if tide:
            tide_triton.detach(model)
    return counts[0], counts[1]


@pytest.mark.parametrize(("mesh", "world_size"), [("line", 2), ("grid", 4)])
def test_expectation_9_a_step_makes_no_c10d_collective_besides_what_stock_makes(
    ranks: RankPools, mesh: str, world_size: int
) -> None:
    for stock, tide in ranks(world_size).run(_counted, mesh):
        replaced = {name for name in stock if "gather" in name or "reduce_scatter" in name}
        assert len(replaced) == 2, stock
        assert tide == {name: count for name, count in stock.items() if name not in replaced}
        assert (mesh == "grid") == any("allreduce" in name for name in tide)


_SCALES: dict[str, tuple[MixedPrecisionPolicy, float | None]] = {
    "fp32 reduce": (MIXED, None),
    "fp32 reduce, divided by 5": (MIXED, 5.0),
    "bf16 reduce": (BF16, None),
    "bf16 reduce, divided by 5": (BF16, 5.0),
    "fp16 reduce": (FP16, None),
    "fp16 reduce, divided by 12": (FP16, 12.0),
    "no mixed precision": (FULL, None),
}


def _scaled(rank: int, world_size: int, name: str) -> Outcome:
    policy, factor = _SCALES[name]
    after = None if factor is None else partial(set_divide_factor, factor=factor)
    return compare(lambda: _model(world_size, policy), rank, Loop(optimizer="sgd", micro=2), after=after)


@pytest.mark.parametrize("name", _SCALES)
def test_expectation_10_sgd_which_does_not_hide_a_wrong_scale_gives_the_same_bits(ranks: RankPools, name: str) -> None:
    outcomes = ranks(2).run(_scaled, name)
    assert_equal_to_stock(outcomes)
    assert_zero_copy(outcomes)
