"""Shapes of the published models add up to what their authors publish."""

import subprocess
import sys

import pytest

from tide_triton.layouts import SpecError
from tide_triton.models import LLAMA_3_1_70B, MODELS, QWEN3_30B_A3B, WAN_2_2_A14B, block_spec


def test_a_llama_block_has_856_million_parameters_and_the_model_70_6_billion() -> None:
    assert LLAMA_3_1_70B.block_numel == 855_654_400
    assert LLAMA_3_1_70B.numel == 70_553_706_496


def test_a_qwen_block_has_623_million_parameters_and_the_model_30_5_billion() -> None:
    assert QWEN3_30B_A3B.block_numel / 1e6 == pytest.approx(623.1, abs=0.1)
    assert QWEN3_30B_A3B.numel == 30_532_122_624


def test_a_wan_block_has_351_million_parameters_and_its_blocks_14_billion() -> None:
    assert WAN_2_2_A14B.block_numel / 1e6 == pytest.approx(351.4, abs=0.1)
    assert WAN_2_2_A14B.numel / 1e9 == pytest.approx(14.06, abs=0.01)
    assert ("modulation", (1, 6, 5120)) in WAN_2_2_A14B.block_shapes


def test_qwen_experts_are_three_dimensional_tensors() -> None:
    shapes = dict(QWEN3_30B_A3B.block_shapes)
    assert shapes["gate"] == shapes["up"] == (128, 2048, 768)
    assert shapes["down"] == (128, 768, 2048)


@pytest.mark.parametrize("name", MODELS)
def test_a_block_spec_holds_the_blocks_parameters(name: str) -> None:
    spec = block_spec(name, 2, "float32")
    assert spec.world_size == 2
    assert sum(tensor.numel for tensor in spec.tensors) == MODELS[name].block_numel
    assert {tensor.dtype for tensor in spec.tensors} == {"float32"}


def test_an_unknown_model_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(SpecError, match=r"'gpt-9' is unknown; use one of llama-3\.1-70b, wan2\.2-a14b"):
        block_spec("gpt-9", 2)


def test_models_are_importable_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import tide_triton.models as m; print(len(m.MODELS))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3"
