"""Zero-copy collectives for FSDP2.

import tide_triton

fully_shard(model)
tide_triton.attach(model)       # the same training loop, without layout copies
tide_triton.report(model)       # what went which way
tide_triton.detach(model)       # stock again

tide_triton.Collectives         the two collectives on their own, on a process group and a layout
tide_triton.layouts             layouts as Python values
tide_triton.kernels             the Triton kernels and their naive twins
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tide_triton.collectives import Collectives
    from tide_triton.fsdp import Report, attach, detach, report

__all__ = ["Collectives", "Report", "attach", "detach", "report"]

_HOMES = {
    "Collectives": "tide_triton.collectives",
    "Report": "tide_triton.fsdp",
    "attach": "tide_triton.fsdp",
    "detach": "tide_triton.fsdp",
    "report": "tide_triton.fsdp",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: layouts and the planner need no torch.
    if name == "__version__":
        from importlib.metadata import version

        return version("tide_triton")
    if name not in _HOMES:
        raise AttributeError(f"module 'tide_triton' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
