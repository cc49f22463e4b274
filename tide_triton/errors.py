"""What can go wrong, as types: each message names the parameter, the value and the way out.

TideError               while tensors move
    PeerError           another rank is why: PeerLostError, WaitTimeoutError, AbortedError
    MismatchError       ranks disagree
    SlotConflictError   two groups need one slot
    SharedMemoryError   no room for a window (an OSError too)
AttachError             attach or detach cannot work with what it was given (a ValueError); UnsupportedError
SpecError               a layout that cannot be laid out (a ValueError); SlotShortageError
"""

import errno

from tide_triton.layouts import SlotShortageError, SpecError

__all__ = [
    "AbortedError",
    "AttachError",
    "MismatchError",
    "PeerError",
    "PeerLostError",
    "SharedMemoryError",
    "SlotConflictError",
    "SlotShortageError",
    "SpecError",
    "TideError",
    "UnsupportedError",
    "WaitTimeoutError",
]


class TideError(RuntimeError):
    """Base of every error raised while tensors move."""


class PeerError(TideError):
    """A rank cannot go on because of another. Ranks that raise it agree that the transport is no longer usable."""


class PeerLostError(PeerError):
    """The process of a peer has ended."""


class WaitTimeoutError(PeerError):
    """A peer did not do its part within `timeout_s`."""


class AbortedError(PeerError):
    """Another rank gave up and told the others why."""


class MismatchError(TideError):
    """Ranks disagree on what they are about to exchange."""


class SlotConflictError(TideError):
    """Two groups need the same slot at once, and neither can move."""


class SharedMemoryError(TideError, OSError):
    """The shared memory of this machine, or the memory of a device, cannot hold a window."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.ENOSPC


class AttachError(ValueError):
    """`attach` or `detach` was given something it cannot work with; nothing was changed."""


class UnsupportedError(AttachError):
    """With `strict=True`: something would have fallen back to the stock collective."""
