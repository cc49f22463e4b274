"""The benchmark's models have the published shapes, learn, and are the same under FSDP2, windows and TIDE."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench import cases, training
from bench.step import fingerprint
from bench.variants import Lent, WindowedAllGather
from tests.ranks import RankPools
from tide_triton.models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_a_block_has_the_parameters_of_its_spec_and_no_others(name: str) -> None:
    with torch.device("meta"):
        block = training.Block(MODELS[name])
    assert [(n, tuple(p.shape)) for n, p in block.named_parameters()] == list(MODELS[name].block_shapes)


@pytest.mark.parametrize("name", cases.TINY)
def test_a_model_gives_every_parameter_a_gradient_and_its_loss_falls(name: str) -> None:
    spec = cases.TINY[name]
    model = training.Stack(spec, 1)
    model.initialise(0)
    model.to(torch.bfloat16)
    inputs = training.make_inputs(spec, 32, 1, torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = model(*inputs)
        loss.backward()
        idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert not idle
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_evenly_loaded_experts_compute_what_the_grouped_gemm_computes_for_the_same_routes() -> None:
    torch.manual_seed(0)
    spec = cases.TINY["tiny-qwen"]
    rows = torch.randn(64, spec.hidden).to(torch.bfloat16)
    weights = torch.randn(spec.experts, spec.hidden, spec.ffn).to(torch.bfloat16)
    ends = torch.arange(8, 65, 8, dtype=torch.int32)
    torch.testing.assert_close(
        training._grouped_mm(rows, weights, ends), torch.bmm(rows.view(8, 8, -1), weights).flatten(0, 1)
    )


def test_dispatch_and_permute_bring_gradients_back_where_they_came_from() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    order = torch.randperm(10, generator=generator)
    inverse = order.argsort()
    assert torch.autograd.gradcheck(lambda t: training.Dispatch.apply(t, order, inverse, 2), (x,))
    y = torch.randn(10, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: training.Permute.apply(t, order, inverse), (y,))


def test_fingerprints_tell_values_positions_and_signs_of_zero_apart() -> None:
    base = torch.randn(1000)
    moved, flipped = base.roll(1), base.clone()
    flipped[17] = -flipped[17]
    signed = torch.zeros(4)
    variants = [base, moved, flipped, torch.zeros(4), -signed, torch.zeros(5), torch.zeros(4, dtype=torch.bfloat16)[:3]]
    for a, b in itertools.combinations(variants, 2):
        assert fingerprint(a) != fingerprint(b)
    assert fingerprint(base) == fingerprint(base.clone())
    assert fingerprint(None) == (0, 0)


def gradients_through_windows(rank: int, world_size: int) -> tuple[list[bool], dict[int, int]]:
    """Gradients of stock FSDP2 against those through lent windows: which are equal, and how many windows there are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    spec = cases.TINY["tiny-llama"]
    inputs = training.make_inputs(spec, 32, rank, torch.device("cpu"))
    prints = []
    lent: dict[int, Lent] = {}
    for windowed in (False, True):
        model = training.Stack(spec, 5)
        model.initialise(0)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if windowed:
            # A fresh window is poisoned, so that lending one too early shows.
            zero: Any = SimpleNamespace(
                group=dist.group.WORLD, window=lambda nbytes: torch.full((nbytes,), 255, dtype=torch.uint8)
            )
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_all_gather(WindowedAllGather(zero, lent))
        for _ in range(2):
            model.zero_grad()
            model(*inputs).backward()
        prints.append([fingerprint(parameter.grad) for parameter in model.parameters()])
    counts = {nbytes: len(windows) for nbytes, windows in lent.items()}
    return [a == b for a, b in zip(*prints, strict=True)], counts


def test_windows_are_lent_no_sooner_than_fsdp2_is_done_with_them(ranks: RankPools) -> None:
    for equal, counts in ranks(2).run(gradients_through_windows):
        assert all(equal)
        # Lent again and again, instead of one for each of 5 layers in 2 passes of 2 steps.
        assert all(count <= 3 for count in counts.values())
