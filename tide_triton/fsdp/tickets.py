"""Tensors without storage that stand for FSDP2's flat buffers.

FSDP2 asks its comm to `allocate()` a flat buffer, lays tensors out in it with operators of its own, and hands it back
to the comm. A ticket is what we allocate: those operators, dispatched on it, record or do nothing instead of moving
bytes. Anything else raises, with the torch version, rather than compute with memory that is not there.

| ticket        | stands for                    | operators it knows                                               |
|---------------|-------------------------------|------------------------------------------------------------------|
| GatherTicket  | the all-gather's flat output  | fsdp.all_gather_copy_in, fsdp.split_with_sizes_copy (ends it)    |
| ReduceTicket  | the reduce-scatter's input    | fsdp.chunk_cat, div_ (FSDP2's pre-division)                      |
| GradTicket    | a gradient of Shard(dim > 0)  | chunk and cat (FSDP2's reordering for Shard(dim > 0)), chunk_cat |
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives  # noqa: F401  defines torch.ops.fsdp

_aten = torch.ops.aten
_fsdp = torch.ops.fsdp
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.alias.default, _aten.detach.default)


class _Ticket(torch.Tensor):
    """What all tickets share: no storage, views of themselves, and refusing what they do not know."""

    @staticmethod
    def make(cls: type, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, torch.Size(size), dtype=dtype, device=device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"


def _unexpected(ticket: str, func: object) -> RuntimeError:
    return RuntimeError(
        f"FSDP2 of torch {torch.__version__} did {func} with a {ticket}, which tide_triton does not know; "
        f"call tide_triton.detach(model) to go on with the stock collectives, and report this"
    )


def _view_size(ticket: torch.Tensor, args: Sequence[Any]) -> tuple[int, ...]:
    """The shape that a view operator asks for."""
    if len(args) < 2:
        return tuple(ticket.shape)
    size = list(args[1])
    if -1 in size:
        known = 1
        for extent in size:
            known *= extent if extent != -1 else 1
        size[size.index(-1)] = ticket.numel() // max(known, 1)
    return tuple(size)


class GatherTicket(_Ticket):
    """The flat output of an all-gather that delivers in place.

    finish: called when FSDP2 copies out, which is when the parameters must be there.
    """

    finish: Callable[[], None]

    @staticmethod
    def __new__(
        cls, size: Sequence[int], dtype: torch.dtype, device: torch.device, finish: Callable[[], None]
    ) -> "GatherTicket":
        ticket: GatherTicket = _Ticket.make(cls, size, dtype, device)
        ticket.finish = finish
        return ticket

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _fsdp.all_gather_copy_in.default:
            _inputs, output, _splits, numel, _rank = args
            return GatherTicket((numel,), output.dtype, output.device, output.finish), output
        if func is _fsdp.split_with_sizes_copy.default:
            args[0].finish()
            return None
        if func in _VIEWS:
            return GatherTicket(_view_size(args[0], args), args[0].dtype, args[0].device, args[0].finish)
        raise _unexpected(cls.__name__, func)


class Predivision(Protocol):
    """Whoever takes note of FSDP2's pre-division."""

    def predivide(self, factor: float) -> None: ...


class ReduceTicket(_Ticket):
    """The flat input of a reduce-scatter that reads gradients where they are.

    keep: whatever holds the gradients that are being read, alive as long as the ticket.
    """

    to_whom: Predivision
    keep: Sequence[object]

    @staticmethod
    def __new__(cls, size: Sequence[int], dtype: torch.dtype, device: torch.device, to: Predivision) -> "ReduceTicket":
        ticket: ReduceTicket = _Ticket.make(cls, size, dtype, device)
        ticket.to_whom, ticket.keep = to, ()
        return ticket

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _fsdp.chunk_cat.default:
            return None
        if func is _aten.div_.Tensor or func is _aten.div_.Scalar:
            args[0].to_whom.predivide(float(args[1]))
            return args[0]
        if func in _VIEWS:
            return ReduceTicket(_view_size(args[0], args), args[0].dtype, args[0].device, args[0].to_whom)
        raise _unexpected(cls.__name__, func)


class GradTicket(_Ticket):
    """A gradient sharded on another dim than 0, on its way from autograd to the reduce-scatter.

    gradient: the tensor itself.
    chunked: the dim along which FSDP2 cut it and stacked the chunks on dim 0, None while it has not.
    """

    gradient: torch.Tensor
    chunked: int | None

    @staticmethod
    def __new__(
        cls, gradient: torch.Tensor, chunked: int | None = None, size: Sequence[int] | None = None
    ) -> "GradTicket":
        ticket: GradTicket = _Ticket.make(cls, size or gradient.shape, gradient.dtype, gradient.device)
        ticket.gradient, ticket.chunked = gradient, chunked
        return ticket

    def laid_out(self, chunks: int) -> torch.Tensor:
        """The gradient as stock FSDP2 would hand it over: reordered, where it cut along another dim than 0."""
        if self.chunked is None:
            return self.gradient
        return torch.cat(torch.chunk(self.gradient, chunks, dim=self.chunked), dim=0)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.split.Tensor or func is _aten.chunk.default:
            ticket, extent = args[0], args[1]
            dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
            if func is _aten.chunk.default:
                extent = -(-ticket.shape[dim] // extent)
            sizes = [min(extent, ticket.shape[dim] - at) for at in range(0, ticket.shape[dim], extent)]
            return [GradTicket(ticket.gradient, dim, (*ticket.shape[:dim], n, *ticket.shape[dim + 1 :])) for n in sizes]
        if func is _aten.cat.default:
            parts = args[0]
            size = (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
            return GradTicket(parts[0].gradient, parts[0].chunked, size)
        if func is _fsdp.chunk_cat.default:
            out = kwargs["out"] if "out" in kwargs else args[3]
            if isinstance(out, ReduceTicket):
                return None
            # The stock reduce-scatter was chosen: do the layout it needs.
            chunks = kwargs.get("num_chunks", args[2] if len(args) > 2 else None)
            laid_out = [t.laid_out(chunks) if isinstance(t, GradTicket) else t for t in args[0]]
            return _fsdp.chunk_cat(laid_out, 0, chunks, out=out)
        raise _unexpected(cls.__name__, func)
