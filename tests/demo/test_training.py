"""The digests by which trainings are compared."""

import pytest
import torch

from tide_triton.demo.training import digest

TENSORS = [torch.arange(6, dtype=torch.float32), torch.tensor(2.0), torch.empty(0, 3), None]


@pytest.mark.parametrize(
    "other",
    [
        [torch.arange(6, dtype=torch.float32).nextafter(torch.ones(6)), *TENSORS[1:]],
        [torch.arange(6, dtype=torch.int32), *TENSORS[1:]],
        [torch.arange(6, dtype=torch.float32).view(2, 3), *TENSORS[1:]],
        TENSORS[:3],
        [TENSORS[1], TENSORS[0], *TENSORS[2:]],
        [TENSORS[0], torch.tensor(-0.0), *TENSORS[2:]],
    ],
    ids=["a bit", "dtype", "shape", "one less", "order", "another value"],
)
def test_digests_tell_apart_whatever_differs(other: list[torch.Tensor | None]) -> None:
    assert digest(TENSORS) != digest(other)


def test_digests_see_values_and_not_how_they_lie_in_memory() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    assert digest([tensor]) == digest([tensor.t().contiguous().t()]) == digest([tensor.clone()])
