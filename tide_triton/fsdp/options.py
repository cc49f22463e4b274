"""How an attachment works: what `attach` was told, checked."""

from dataclasses import asdict, dataclass

import torch

from tide_triton.all_gather import multicast_problem
from tide_triton.errors import AttachError
from tide_triton.kernels.views import FLOAT_DTYPES
from tide_triton.layouts.ring import MAX_RING_DEPTH, RING_CHUNK_NBYTES, RING_DEPTH


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `attach` that every rank must have alike; it explains them."""

    slots: int | None = None
    strict: bool = False
    reuse: bool = True
    slot_reuse: bool = True
    early_reduce: bool = False
    keep_cast: bool = False
    grads_in_slots: bool = False
    ring_depth: int = RING_DEPTH
    ring_chunk_nbytes: int = RING_CHUNK_NBYTES
    nodes: int | None = None
    wire_dtype: torch.dtype | None = None
    multicast_nbytes: int | None = None
    switch_sums: bool = False

    @property
    def wants_multicast(self) -> bool:
        return self.multicast_nbytes is not None or self.switch_sums

    def check(self) -> None:
        """Raise AttachError for a value that cannot be."""
        if self.slots is not None and not _is_count(self.slots):
            raise AttachError(f"slots must be an integer >= 1, or None to size it from the model; got {self.slots!r}")
        for name in ("strict", "reuse", "slot_reuse", "early_reduce", "keep_cast", "grads_in_slots", "switch_sums"):
            if not isinstance(value := getattr(self, name), bool):
                raise AttachError(f"{name} must be True or False, got {value!r}")
        if self.grads_in_slots and not self.early_reduce:
            raise AttachError(
                "grads_in_slots=True needs early_reduce=True: a gradient that stands in the slot must have left before "
                "the slot is gathered into again"
            )
        if not _is_count(self.ring_depth) or self.ring_depth > MAX_RING_DEPTH:
            raise AttachError(
                f"ring_depth must be an integer from 1 to {MAX_RING_DEPTH} (chunks of the ring), got "
                f"{self.ring_depth!r}"
            )
        if not _is_count(self.ring_chunk_nbytes):
            raise AttachError(f"ring_chunk_nbytes must be an integer >= 1 (bytes), got {self.ring_chunk_nbytes!r}")
        if self.nodes is not None and not _is_count(self.nodes):
            raise AttachError(f"nodes must be an integer >= 1, or None for one node; got {self.nodes!r}")
        if self.early_reduce and (self.nodes or 1) > 1:
            with_it = ", and grads_in_slots=False" if self.grads_in_slots else ""
            raise AttachError(
                f"early_reduce=True works on one node only, got nodes={self.nodes}: over several, gradients leave when "
                f"their group's last one is there; pass early_reduce=False{with_it}"
            )
        if self.wire_dtype is not None and self.nodes is None:
            raise AttachError(
                f"wire_dtype={self.wire_dtype!r} is what sums are rounded to between nodes: leave it "
                f"out, or pass nodes=N"
            )
        if self.wire_dtype is not None and self.wire_dtype not in FLOAT_DTYPES:
            raise AttachError(
                f"wire_dtype must be one of {', '.join(map(str, FLOAT_DTYPES))}, or None for what gradients are summed "
                f"in; got {self.wire_dtype!r}"
            )
        self._check_multicast()

    def _check_multicast(self) -> None:
        if problem := multicast_problem(self.multicast_nbytes):
            raise AttachError(problem)
        if self.wants_multicast and (self.nodes or 1) > 1:
            asked = "switch_sums=True" if self.switch_sums else f"multicast_nbytes={self.multicast_nbytes}"
            raise AttachError(
                f"{asked} works on one node only, got nodes={self.nodes}: a switch reaches no other node; leave it "
                f"out, or pass nodes=None"
            )
        if self.switch_sums and self.early_reduce:
            raise AttachError(
                "switch_sums=True needs early_reduce=False: the switch sums what lies in a group's slot, which is not "
                "vacant before the group's last gradient is there"
            )
        if self.switch_sums and not self.slot_reuse:
            raise AttachError("switch_sums=True needs slot_reuse=True: the switch sums what lies in a group's slot")

    def described(self) -> list[tuple[str, str]]:
        """Names and values, for ranks to compare."""
        return [(f"attach({name}=...)", repr(value)) for name, value in asdict(self).items()]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
