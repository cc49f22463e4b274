"""How an attachment works: what `attach` was told, checked."""

from dataclasses import asdict, dataclass

from tide_triton.errors import AttachError
from tide_triton.windows import RING_CHUNK_NBYTES, RING_DEPTH


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `attach` that every rank must have alike; it explains them."""

    slots: int | None = None
    strict: bool = False
    reuse: bool = True
    slot_reuse: bool = True
    early_reduce: bool = False
    keep_cast: bool = False
    ring_depth: int = RING_DEPTH
    ring_chunk_nbytes: int = RING_CHUNK_NBYTES

    def check(self) -> None:
        """Raise AttachError for a value that cannot be."""
        if self.slots is not None and not _is_count(self.slots):
            raise AttachError(f"slots must be an integer >= 1, or None to size it from the model; got {self.slots!r}")
        for name in ("strict", "reuse", "slot_reuse", "early_reduce", "keep_cast"):
            if not isinstance(value := getattr(self, name), bool):
                raise AttachError(f"{name} must be True or False, got {value!r}")
        if not _is_count(self.ring_depth):
            raise AttachError(f"ring_depth must be an integer >= 1 (chunks of the ring), got {self.ring_depth!r}")
        if not _is_count(self.ring_chunk_nbytes):
            raise AttachError(f"ring_chunk_nbytes must be an integer >= 1 (bytes), got {self.ring_chunk_nbytes!r}")

    def described(self) -> list[tuple[str, str]]:
        """Names and values, for ranks to compare."""
        return [(f"attach({name}=...)", repr(value)) for name, value in asdict(self).items()]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
