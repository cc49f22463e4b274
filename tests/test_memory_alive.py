"""Memory plans against what is alive in real steps of FSDP2 on the CPU: stock, symm and TIDE.

Blocks are small and steps are of one token, so that activations are next to nothing and every byte must be explained.
"""

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tide_triton
from tests.fsdp.models import MIXED
from tests.live_bytes import Model, measure
from tests.ranks import RankPools
from tide_triton.layouts import Topology
from tide_triton.memory import STAGING_NBYTES, plan_memory
from tide_triton.models import ModelSpec

#: Chunks so small that gradients do not pass in one, as those of large models do not.
CHUNK = 1 << 15

ATTACH: dict[str, dict[str, Any]] = {
    "stock": {},
    "symm": {},
    "tide": {"slot_reuse": True},
    "tide_ring": {"slot_reuse": False},
    "tide_early": {"slot_reuse": False, "early_reduce": True},
}


def in_windows(rank: int, world: int, spec: ModelSpec, nodes: int) -> int:
    """Bytes of all windows of an attached model."""
    model = Model(spec)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)), mp_policy=MIXED)
    tide_triton.attach(model, nodes=nodes, ring_chunk_nbytes=CHUNK)
    found = tide_triton.report(model, quiet=True).window_nbytes
    tide_triton.detach(model)
    return found


def test_over_nodes_a_plan_has_the_windows_of_attach_and_what_is_alive_in_a_step(ranks: RankPools) -> None:
    spec, attach = ModelSpec("small", "llama", 128, 512, 4, 2, 32, 2, vocab=1000), {"ring_chunk_nbytes": CHUNK}
    planned = plan_memory(spec, Topology(2, 2), ring_chunk_nbytes=CHUNK).variant("tide")
    # Windows on the host need no staging, and reports do not count the counters in front of them.
    told = planned.windows - STAGING_NBYTES - planned.items["flags"]
    assert ranks(4).run(in_windows, spec, 2) == [told] * 4
    before, most = ranks(4).run(measure, spec, "tide", {**attach, "nodes": 2})[0]
    always = planned.items["shards"] + planned.items["optimizer"] + planned.windows
    assert most - before == pytest.approx(planned.peak - always, rel=0.01)


@pytest.mark.parametrize("variant", ATTACH)
@pytest.mark.parametrize(("world_size", "layers", "vocab"), [(2, 1, 1000), (2, 4, 0), (3, 2, 1000)])
def test_a_plan_is_what_is_alive_in_a_step(
    ranks: RankPools, world_size: int, layers: int, vocab: int, variant: str
) -> None:
    spec = ModelSpec("small", "llama", 128, 512, 4, 2, 32, layers, vocab=vocab)
    planned = plan_memory(spec, Topology(1, world_size), ring_chunk_nbytes=CHUNK).variant(variant)
    before, most = ranks(world_size).run(measure, spec, variant, {**ATTACH[variant], "ring_chunk_nbytes": CHUNK})[0]
    always = planned.items["shards"] + planned.items["optimizer"] + planned.windows
    if variant in ("stock", "symm"):
        # Other tests of the same processes may have left some tensors.
        assert before == pytest.approx(always, rel=0.01, abs=64 << 10)
    # What a step adds. On the CPU a rank has the other ranks' windows mapped as well, so only that can be compared.
    assert most - before == pytest.approx(planned.peak - always, rel=0.01)
