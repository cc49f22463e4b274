"""What every test in this folder is marked with."""

import pytest
import torch

#: For a module's `pytestmark`: skipped, and said so, where there are no two GPUs.
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs of one machine"
    ),
    pytest.mark.timeout(300),
]
