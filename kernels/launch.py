"""Which engine runs, and how a prepared launch is started."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton

from tide_triton.kernels.tables import Launch

Engine = Literal["auto", "triton", "torch"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Elements per block, warps per CTA, and stages of the software pipeline, which runs only where `ctas` is given.

    Raises ValueError unless block and warps are powers of two, block >= 16 and stages >= 1.
    """

    block: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        for name, value, least in (("block", self.block, 16), ("warps", self.warps, 1)):
            if value < least or value & (value - 1):
                raise ValueError(f"{name} must be a power of two >= {least}, got {value}")
        if self.stages < 1:
            raise ValueError(f"stages must be >= 1, got {self.stages}")


def interpreted(kernel: object) -> bool:
    """Whether Triton was told to interpret (`TRITON_INTERPRET=1`) when `kernel` was defined."""
    return not isinstance(kernel, triton.runtime.JITFunction)


def uses_triton(engine: Engine, device: torch.device, kernel: object) -> bool:
    """Whether Triton runs (else the torch twin): "auto" takes it for CUDA tensors only, as interpreting it is slow.

    Raises ValueError for an unknown engine, and for "triton" on CPU tensors where Triton does not interpret.
    """
    if engine not in ("auto", "triton", "torch"):
        raise ValueError(f'engine must be "auto", "triton" or "torch", got {engine!r}')
    if engine == "triton" and device.type != "cuda" and not interpreted(kernel):
        raise ValueError(
            f'engine="triton" needs CUDA tensors, got {device}; set TRITON_INTERPRET=1 before triton is imported '
            'to interpret kernels on CPU, or leave engine="auto"'
        )
    return engine == "triton" or (engine == "auto" and device.type == "cuda")


def start(kernel: Any, launch: Launch, ctas: int | None, *arguments: torch.Tensor, stream: int | None = None) -> None:
    """Start `kernel` on the table's device, on at most `ctas` CTAs (None: one per block).

    stream: a CUDA stream's handle; None for torch's current stream.

    Raises ValueError where ctas < 1.
    """
    check_ctas(ctas)
    if launch.blocks == 0:
        return
    grid = launch.blocks if ctas is None else min(ctas, launch.blocks)
    options: dict[str, Any] = {"num_warps": launch.num_warps}
    if not interpreted(kernel):
        # A fused multiply-add would skip a rounding that the semantics promise.
        options["enable_fp_fusion"] = False
    device = launch.table.device
    given = (launch.table, *arguments, launch.tensors, launch.full_blocks, launch.edge_blocks)
    if device.type == "cuda" and (known := launch.compiled.get(kernel.__name__)) is not None:
        compiled, constants = known
        # A stream names its device; without one, torch's current device must be the table's.
        if stream is not None or torch.cuda.current_device() == device.index:
            compiled[(grid, 1, 1)](*given, *constants, stream=stream)
            return
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            if stream is not None:
                external = torch.cuda.ExternalStream(stream, device)  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.stream(external))
        compiled = kernel[(grid,)](*given, **launch.constants, **options)
        if device.type == "cuda":
            names = kernel.arg_names[len(given) :]
            launch.compiled[kernel.__name__] = compiled, tuple(launch.constants[name] for name in names)


class Prepared:
    """Launches that can be started again and again while the memory they were prepared for stays where it is.

    launches: what is started; empty where the work is not done by kernels.
    is_reusable: whether it holds addresses only, and keeps no tensor alive.
    """

    def __init__(
        self, run: Callable[[Sequence[Launch], int | None], None], launches: Sequence[Launch], *, is_reusable: bool
    ) -> None:
        self._run = run
        self.launches = tuple(launches)
        self.is_reusable = is_reusable

    def __call__(self, stream: int | None = None) -> None:
        """Start the launches on `stream`, a CUDA stream's handle; None for torch's current stream."""
        self._run(self.launches, stream)


def check_ctas(ctas: int | None) -> None:
    """Raises ValueError unless `ctas` is None or >= 1."""
    if ctas is not None and ctas < 1:
        raise ValueError(f"ctas must be >= 1, or None for one CTA per block, got {ctas}")
