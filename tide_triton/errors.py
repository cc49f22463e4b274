"""What can go wrong, as types: each message names the parameter, the value and the way out."""


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
    """The shared memory of this machine cannot hold a window."""


class AttachError(ValueError):
    """`attach` or `detach` was given something it cannot work with; nothing was changed."""


class UnsupportedError(AttachError):
    """With `strict=True`: something would have fallen back to the stock collective."""
