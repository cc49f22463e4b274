"""A model of a switch that executes the assembly of `multimem_kernel` where Triton interprets."""

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tests.kernels.helpers import poisoned


class Switch:
    """Executes the kernel's assembly over the ranks' windows, adding in any order, and keeps account of what is read.

    base: an address that stands for the windows' multicast address. An ordinary load there would find NaNs.
    """

    LOAD = re.compile(r"multimem\.ld_reduce\.relaxed\.sys\.global\.add\.acc::f32\.(v4\.)?bf16x2 (.*), \[\$4(\+\d+)?\]")
    SETP = re.compile(r"setp\.(ge|gt|lt)(\.and)?\.s32 (\w+), \$5, (\d+)(?:, (\w+))?")

    def __init__(self, memories: Sequence[torch.Tensor], order: Sequence[int]) -> None:
        self.decoy = poisoned(memories[0].numel())
        self.base = self.decoy.data_ptr()
        self.parts = [memories[rank].view(torch.bfloat16).float().numpy() for rank in order]
        self.reads = np.zeros(memories[0].numel() // 4, dtype=np.int64)

    def create_inline_asm(
        self, asm: str, constraints: str, operands: Sequence[Any], types: object, is_pure: bool, pack: int
    ) -> Any:
        """In place of the method of Triton's interpreter."""
        assert (constraints, is_pure, pack) == ("=&r,=&r,=&r,=&r,l,r", False, 1)
        places, counts = np.broadcast_arrays(*(operand.data for operand in operands))
        pairs = [np.full(places.shape, 0xFFFFFFFF, dtype=np.uint32) for _ in range(4)]
        predicates: dict[str, Any] = {}
        for line in filter(None, (line.strip(" {}\n") for line in asm.replace("$0, $1, $2, $3", "*").split(";"))):
            guard, _, line = line[1:].partition(" ") if line.startswith("@") else ("", "", line)
            live = predicates[guard] if guard else np.ones(places.shape, dtype=bool)
            if load := self.LOAD.fullmatch(line):
                first = (places - self.base + int(load[3] or 0))[live]
                for number, name in enumerate("0123" if load[1] else load[2][1]):
                    pairs[int(name)][live] = self.load(first, 16 if load[1] else 4, number)
            elif setp := self.SETP.fullmatch(line):
                compare = {"ge": np.greater_equal, "gt": np.greater, "lt": np.less}[setp[1]]
                also = predicates[setp[5]] if setp[2] else True
                predicates[setp[3]] = compare(counts, int(setp[4])) & also
            elif move := re.fullmatch(r"mov\.b32 \$(\d), 0", line):
                pairs[int(move[1])][:] = 0
            else:
                assert line.startswith(".reg .pred "), line
        return SimpleNamespace(get_result=lambda index: TensorHandle(pairs[index], tl.uint32))

    def load(self, offsets: Any, nbytes: int, number: int) -> Any:
        """Pair `number` of accesses of `nbytes` bytes at `offsets`, as uint32."""
        assert not (offsets % nbytes if nbytes == 16 else offsets % 4).any()
        words = offsets // 4 + number
        np.add.at(self.reads, words, 1)
        contributions = [part.reshape(-1, 2)[words] for part in self.parts]
        total = contributions[0]
        for contribution in contributions[1:]:
            total = total + contribution
        rounded = torch.from_numpy(total).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        return rounded[..., 0] | rounded[..., 1] << 16
