"""The meter of stock FSDP2's buffers."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.ranks import RankPools
from tide_triton.demo.memory import BufferMeter


def test_buffers_count_while_they_live() -> None:
    meter = BufferMeter(nn.Linear(1, 1))
    first = torch.empty(1000, dtype=torch.uint8)
    meter.holds(first)
    meter.holds(second := torch.empty(300, dtype=torch.uint8))
    assert meter.peak_nbytes == 1300
    view = first[:10]
    del first
    meter.holds(torch.empty(1, dtype=torch.uint8))
    assert meter.peak_nbytes == 1301
    del view, second
    meter.holds(torch.empty(1200, dtype=torch.uint8))
    assert meter.peak_nbytes == 1301


def _peak_of_one_layer(rank: int, ranks: int) -> dict[str, Any]:
    model = nn.Linear(64, 64, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=policy, reshard_after_forward=True)
    meter = BufferMeter(model)
    loss = model(torch.ones(2, 64)).sum()
    forward = meter.peak_nbytes
    loss.backward()
    return {"forward": forward, "backward": meter.peak_nbytes}


def test_under_fsdp2_flat_buffers_and_gradients_to_reduce_are_counted(ranks: RankPools) -> None:
    numel = 64 * 64
    for peaks in ranks(2).run(_peak_of_one_layer):
        # The flat all-gather output in bf16; later the flat fp32 gradients, with what is still held of the gather.
        assert peaks["forward"] == 2 * numel
        assert 4 * numel <= peaks["backward"] <= (4 + 2 + 2) * numel
