"""What a collective has moved, as counts."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Counts of one collective of one group on one rank.

    zero_copy: calls that went straight from place to place; `reused` of them moved nothing at all: what they gather was
        still there.
    wire_bytes: bytes this rank sent to others; `multicast_bytes` of them to all at once, counted once.
    layout_copy_bytes: bytes written only to change a layout (copy-in, copy-out, packing); 0 on zero-copy paths within a
        node, and over several nodes what is packed for the rail.
    packed_bytes: those of them that crossed nodes packed.
    fallback_reasons: how often each reason sent a call to the stock collective.
    early: reductions whose gradients were sent as autograd produced them.
    in_slot: gradients that were written into the slot, over the weight that they are the gradient of.
    by_switch: reductions that a switch summed.
    remarks: how often each thing worth knowing happened that is no fallback.
    """

    zero_copy: int = 0
    fallback: int = 0
    wire_bytes: int = 0
    layout_copy_bytes: int = 0
    fallback_reasons: Counter[str] = field(default_factory=Counter)
    reused: int = 0
    early: int = 0
    in_slot: int = 0
    multicast_bytes: int = 0
    by_switch: int = 0
    packed_bytes: int = 0
    remarks: Counter[str] = field(default_factory=Counter)

    @property
    def calls(self) -> int:
        return self.zero_copy + self.fallback

    def fell_back(self, reason: str, wire_bytes: int, layout_copy_bytes: int) -> None:
        """Count one call of the stock collective."""
        self.fallback += 1
        self.fallback_reasons[reason] += 1
        self.wire_bytes += wire_bytes
        self.layout_copy_bytes += layout_copy_bytes

    def __iadd__(self, other: "Traffic") -> "Traffic":
        self.zero_copy += other.zero_copy
        self.fallback += other.fallback
        self.reused += other.reused
        self.early += other.early
        self.in_slot += other.in_slot
        self.multicast_bytes += other.multicast_bytes
        self.packed_bytes += other.packed_bytes
        self.by_switch += other.by_switch
        self.wire_bytes += other.wire_bytes
        self.layout_copy_bytes += other.layout_copy_bytes
        self.fallback_reasons.update(other.fallback_reasons)
        self.remarks.update(other.remarks)
        return self
