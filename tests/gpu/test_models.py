"""Blocks of published models, at their published sizes, train under TIDE exactly as under stock FSDP2."""

import math

import pytest

from tests.gpu.marks import TWO_GPUS
from tests.gpu.model_jobs import Case, equals_stock
from tests.ranks import Ranks
from tide_triton.models import MODELS

pytestmark = TWO_GPUS

#: Three blocks take turns in two slots, so that backward has to gather the first one again.
LAYERS, SLOTS = 3, 2

#: Every model through NCCL's windows, and one through torch's symmetric memory.
CASES = [(name, "nccl") for name in MODELS] + [("llama-3.1-70b", "symm")]


@pytest.mark.parametrize(("name", "transport"), CASES)
def test_blocks_of_published_models_train_as_under_stock_bit_for_bit(gpus: Ranks, name: str, transport: str) -> None:
    case = Case(name, transport, LAYERS, tokens=512, steps=2, options={"slots": SLOTS})
    for found in gpus.run(equals_stock, case):
        assert found.unlike_itself == [], "stock does not repeat itself, so nothing can be compared with it"
        assert found.unlike_stock == []
        assert all(math.isfinite(loss) for loss in found.losses)
        assert found.why_not_zero_copy == []
        assert found.layout_copy_bytes == 0
        groups = LAYERS + 1
        assert found.moved == case.steps * (groups + 1)
        assert found.reduces == case.steps * groups
