"""Prepared launches over tensors that come back at other addresses.

Gradients and reduced shards are allocated anew in every step, mostly where they were, but not always. All that depends
on where they are is the addresses in the launches' tables, so these are corrected and uploaded again, in one copy for
all launches, instead of preparing everything anew.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tide_triton.kernels.launch import Prepared

#: Table entries to whose multiples tables are placed: Triton specialises on a table's alignment.
_ALIGN = 16
#: Bytes by whose multiples a tensor may move: kernels are specialised on the alignment of what they read and write.
STEP = 16


class Movable:
    """Prepared launches, and the tensors that may move; other memory they use must stay.

    prepared: reusable, their tables uploaded on the device's current stream.
    tensors: contiguous, as they are now. Starting the launches and `move` belong on one stream.
    """

    def __init__(self, prepared: Sequence[Prepared], tensors: Sequence[torch.Tensor]) -> None:
        self.prepared = list(prepared)
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        launches = [launch for one in prepared for launch in one.launches]
        starts, total = [], 0
        for launch in launches:
            starts.append(total)
            total += -(-launch.table.numel() // _ALIGN) * _ALIGN
        self._host = np.zeros(max(total, 1), dtype=np.int64)
        device = launches[0].table.device if launches else torch.device("cpu")
        self._device = torch.empty(max(total, 1), dtype=torch.int64, device=device)
        places = self._place(tensors)
        positions, owners = [], []
        moved = []
        for launch, start in zip(launches, starts, strict=True):
            stop = start + launch.table.numel()
            self._host[start:stop] = (launch.table if launch.host is None else launch.host).numpy()
            moved.append(replace(launch, table=self._device[start:stop], host=None))
            for entry in launch.addresses:
                owner = places(int(self._host[start + entry]))
                if owner is not None:
                    positions.append(start + entry)
                    owners.append(owner)
        self._positions, self._owners = np.array(positions, dtype=np.int64), np.array(owners, dtype=np.int64)
        following = iter(moved)
        for one in self.prepared:
            one.launches = tuple(next(following) for _ in one.launches)
        self._upload()

    def _place(self, tensors: Sequence[torch.Tensor]) -> "_Places":
        return _Places([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])

    def move(self, addresses: Sequence[int]) -> bool:
        """The tensors now lie at `addresses`. False, with nothing done, where their alignment has changed."""
        if addresses == self._addresses:
            return True
        by = np.array(addresses, dtype=np.int64) - np.array(self._addresses, dtype=np.int64)
        if (by % STEP).any():
            return False
        self._addresses = list(addresses)
        shifts = by[self._owners]
        if shifts.any():
            self._host[self._positions] += shifts
            self._upload()
        return True

    def _upload(self) -> None:
        host = torch.from_numpy(self._host)
        if self._device.device.type == "cuda":
            # A pinned copy of its own: the next correction must not reach an upload that is still under way.
            host = host.pin_memory()
        self._device.copy_(host, non_blocking=True)


class _Places:
    """Which of some disjoint stretches of memory an address lies in."""

    def __init__(self, stretches: Sequence[tuple[int, int]]) -> None:
        order = sorted(range(len(stretches)), key=lambda index: stretches[index][0])
        self._order = [index for index in order if stretches[index][1]]
        self._starts = [stretches[index][0] for index in self._order]
        self._ends = [stretches[index][0] + stretches[index][1] for index in self._order]

    def __call__(self, address: int) -> int | None:
        at = bisect_right(self._starts, address) - 1
        return self._order[at] if at >= 0 and address < self._ends[at] else None
