"""Copies and signals that no SM takes part in: the only file that calls cuda-bindings.

    copy        batched peer copies, strided ones row by row of the engine, one by one while a graph is captured
    write       a word of 32 or 64 bits into a peer's memory, in stream order
    wait        until a local word has reached a value, in stream order

Streams are torch's handles (`torch.cuda.Stream.cuda_stream`). The legacy stream is refused: batched copies fail on it,
and everything on it waits for everything else.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from tide_triton.layouts import Copy

#: (destination address, source address, what moves between them).
AddressedCopy = tuple[int, int, Copy]


@dataclass(frozen=True, slots=True)
class Batch:
    """Copies by their addresses: contiguous ones as the lists that CUDA takes, strided ones one by one.

    strided: (destination, its pitch, source, its pitch, width, rows), in bytes.
    order: of each contiguous copy, then of each strided one, its number among the copies it was made from.
    engine_only: no kernel may copy them (they are contiguous): a batch also where there is one, and never captured.
    """

    destinations: list[int]
    sources: list[int]
    sizes: list[int]
    strided: tuple[tuple[int, int, int, int, int, int], ...]
    order: tuple[int, ...]
    is_reusable: bool = True
    engine_only: bool = False

    def moved(self, by: Sequence[int]) -> "Batch":
        """The same copies from sources that lie `by` bytes further on, given per copy it was made from."""
        whole = len(self.sources)
        sources = [source + by[number] for source, number in zip(self.sources, self.order, strict=False)]
        strided = tuple(
            (dst, dst_pitch, src + by[number], src_pitch, width, rows)
            for (dst, dst_pitch, src, src_pitch, width, rows), number in zip(
                self.strided, self.order[whole:], strict=True
            )
        )
        return replace(self, sources=sources, strided=strided)


def batch(copies: Sequence[AddressedCopy]) -> Batch:
    """Copies that may run in any order, ready to be enqueued."""
    whole = [(dst + c.dst_offset, src + c.src_offset, c.width) for dst, src, c in copies if c.rows == 1]
    strided = tuple(
        (dst + c.dst_offset, c.dst_pitch, src + c.src_offset, c.src_pitch, c.width, c.rows)
        for dst, src, c in copies
        if c.rows > 1
    )
    numbers = range(len(copies))
    order = (*(n for n in numbers if copies[n][2].rows == 1), *(n for n in numbers if copies[n][2].rows > 1))
    return Batch([d for d, _, _ in whole], [s for _, s, _ in whole], [n for _, _, n in whole], strided, order)


class CudaCallError(RuntimeError):
    """A CUDA call failed. The message holds the call, the driver's name for the error and its explanation."""


class CopyEngine:
    """cuda-bindings 12 or 13, loaded when the first transport needs it.

    Raises ImportError with the way out where it is not installed.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver, runtime
        except ImportError as error:
            raise ImportError(
                "GPU transports need cuda-bindings: pip install 'tide_triton[cu13]' (or cu12, as your torch)"
            ) from error
        self._driver: Any = driver
        self._runtime: Any = runtime
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        # cudaMemcpyFlagPreferOverlapWithCompute: leave the SMs alone where the hardware has a choice.
        attributes.flags = 1
        self._attributes = [attributes]
        self._device_to_device = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice

    def copy(self, batch: "Batch", stream: int) -> None:
        """Run `batch` on `stream`, in no order among its copies; what follows on the stream waits for all of them.

        Raises ValueError where a graph is captured and the batch is for the engine only.
        """
        _refuse_legacy(stream)
        together = len(batch.sizes) > 1 or batch.engine_only
        if together and not torch.cuda.is_current_stream_capturing():
            self._check(
                "cudaMemcpyBatchAsync",
                self._runtime.cudaMemcpyBatchAsync(
                    batch.destinations, batch.sources, batch.sizes, len(batch.sizes), self._attributes, [0], 1, stream
                ),
            )
        elif batch.engine_only:
            raise ValueError("copies for the engine alone cannot be captured in a CUDA graph")
        else:
            for dst, src, nbytes in zip(batch.destinations, batch.sources, batch.sizes, strict=True):
                self._check(
                    "cudaMemcpyAsync", self._runtime.cudaMemcpyAsync(dst, src, nbytes, self._device_to_device, stream)
                )
        for dst, dst_pitch, src, src_pitch, width, rows in batch.strided:
            self._check(
                "cudaMemcpy2DAsync",
                self._runtime.cudaMemcpy2DAsync(
                    dst, dst_pitch, src, src_pitch, width, rows, self._device_to_device, stream
                ),
            )

    def write(self, address: int, value: int, stream: int, nbytes: int = 4) -> None:
        """Set the word of `nbytes` bytes, 4 or 8, at `address` to `value`, after all that went before on `stream`."""
        _refuse_legacy(stream)
        write = self._driver.cuStreamWriteValue64 if nbytes == 8 else self._driver.cuStreamWriteValue32
        self._check(f"cuStreamWriteValue{8 * nbytes}", write(stream, address, value, 0))

    def wait(self, address: int, value: int, stream: int, nbytes: int = 4) -> None:
        """Hold `stream` until the word of `nbytes` bytes at `address` is at least `value` (as signed difference)."""
        _refuse_legacy(stream)
        wait = self._driver.cuStreamWaitValue64 if nbytes == 8 else self._driver.cuStreamWaitValue32
        self._check(f"cuStreamWaitValue{8 * nbytes}", wait(stream, address, value, 0))

    def capture(self, stream: int) -> int:
        """The number of the CUDA graph that `stream` is being captured into. Raises CudaCallError where none is."""
        result = self._runtime.cudaStreamGetCaptureInfo(stream)
        self._check("cudaStreamGetCaptureInfo", result)
        return int(result[2])

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Let this thread allocate, query and copy while a graph is captured: on streams that are not part of it."""
        modes = self._runtime.cudaStreamCaptureMode
        result = self._runtime.cudaThreadExchangeStreamCaptureMode(modes.cudaStreamCaptureModeRelaxed)
        self._check("cudaThreadExchangeStreamCaptureMode", result)
        try:
            yield
        finally:
            self._check(
                "cudaThreadExchangeStreamCaptureMode", self._runtime.cudaThreadExchangeStreamCaptureMode(result[1])
            )

    def _check(self, call: str, result: Any) -> None:
        code = result[0] if isinstance(result, tuple) else result
        if int(code) == 0:
            return
        if isinstance(code, self._driver.CUresult):
            name = _text(self._driver.cuGetErrorName(code))
            explanation = _text(self._driver.cuGetErrorString(code))
        else:
            name = _text(self._runtime.cudaGetErrorName(code))
            explanation = _text(self._runtime.cudaGetErrorString(code))
        raise CudaCallError(f"{call}: {name}: {explanation}")


def _text(result: Any) -> str:
    value = result[1] if isinstance(result, tuple) else result
    return value.decode() if isinstance(value, bytes) else str(value)


def _refuse_legacy(stream: int) -> None:
    if stream == 0:
        raise ValueError("stream must not be the legacy default stream; use torch.cuda.Stream()")
