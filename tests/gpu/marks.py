"""What every test in this folder is marked with."""

import pytest

#: For a module's `pytestmark`. Where there are no two GPUs, the fixture `enough_gpus` skips the test and says so.
TWO_GPUS = [pytest.mark.gpu, pytest.mark.timeout(300)]
