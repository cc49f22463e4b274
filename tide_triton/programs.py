"""What a collective prepared for memory that came back at the same addresses.

Caching allocators hand a step the addresses of the step before, so that everything that depends on addresses (kernel
tables, views) is prepared once. A program holds addresses, never tensors: it keeps no gradient alive. One that can be
moved is kept for memory at any addresses.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Program = TypeVar("Program")


class Programs(Generic[Program]):
    """The last `capacity` programs, by what they were prepared for."""

    def __init__(self, capacity: int = 16) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[Hashable, Program] = OrderedDict()

    def get(self, key: Hashable, prepare: Callable[[], Program], is_reusable: Callable[[Program], bool]) -> Program:
        """The program for `key`, prepared now unless it was before. What is not reusable is not kept."""
        program = self._kept.get(key)
        if program is not None:
            self._kept.move_to_end(key)
            return program
        program = prepare()
        if is_reusable(program):
            self._kept[key] = program
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        return program
