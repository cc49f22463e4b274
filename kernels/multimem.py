"""Sums over the ranks of a node, made by the NVSwitch: one launch for all ranges of a slot.

    multicast address         the switch                    outputs[i]
    rank 0  | x_0 |  bf16
    rank 1  | x_1 |  bf16     x_0 + x_1 + x_2, as bf16  ->  | sum | 0 0 |   fp32 or bf16, zeros in the padding
    rank 2  | x_2 |  bf16

A GPU receives its part of the sum instead of W - 1 contributions to it. Per element:

    s     = the sum of all x_r, added in fp32 in an order that the switch chooses, rounded to bf16
    value = s times premultiply, then / divisor, each rounded to fp32; then rounded to the output's dtype

With eps = 2^-24, exact sum S and |x| = sum of all |x_r|, where s is finite and not subnormal,

    |s - S| <= d + 2^-8 (|S| + d),   d = (W - 1) eps |x| / (1 - (W - 1) eps)

d is the fp32 additions in any order, about (W - 1) 2^-24 |x|. The other term is the rounding to bf16 on the way out of
the switch: an fp32 output holds values that fit bf16. So sums may differ between runs and from `accumulate`, which
adds in rank order and rounds no sum. Where this is not good enough, take `accumulate`.

Multicast is off until a transport reports it. Elsewhere, and in tests, the ranks' own tensors are passed in place of
multicast ranges: the same kernel then adds them in rank order and rounds as the switch does (the *emulated* switch), as
does `reference.multimem_reference`, bit by bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tide_triton.kernels.launch import Engine, Prepared, Tuning, check_ctas, interpreted, start, uses_triton
from tide_triton.kernels.multimem_kernel import multimem_kernel
from tide_triton.kernels.reference import multimem_reference
from tide_triton.kernels.tables import Launch, block_counts, divides_exactly, float_bits, make_launch
from tide_triton.kernels.views import TRITON_DTYPES, UnsupportedDtypeError, check_one_device

#: Bytes on whose bounds ranges and outputs start: the switch adds 16 bytes at a time.
ALIGNMENT = 16

#: What a sum may be written as.
OUTPUT_DTYPES = (torch.float32, torch.bfloat16)

#: Four loads of 16 bytes a thread, 32 KiB a CTA, are on their way at once; twice that spills registers. Not measured.
DEFAULT_TUNING = Tuning(block=16384, warps=16, stages=1)

#: Of the emulated switch, whose ranks' elements are all in registers.
EMULATED_TUNING = Tuning(block=4096, warps=16, stages=1)


@dataclass(frozen=True, slots=True)
class Multicast:
    """`numel` bf16 elements that every rank of the node holds, at one multicast address.

    Where numel is odd, the element after the last is read too, and dropped.
    """

    address: int
    numel: int


#: What is summed into one output: a multicast range, or for the emulated switch each rank's tensor in rank order.
Source = Multicast | Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class MultimemVariant:
    """What `multimem_kernel` is specialised on.

    ranks: how many tensors the emulated switch adds; 0 for the switch itself, which knows its ranks. by_reciprocal:
    whether the divisor is a power of two, by which dividing is multiplying. even: whether all ranges and outputs hold
    a multiple of 16 elements.
    """

    output: torch.dtype
    ranks: int = 0
    premultiply: bool = False
    divide: bool = False
    by_reciprocal: bool = False
    even: bool = True

    def tuning(self) -> Tuning:
        """The default tuning for this variant."""
        return EMULATED_TUNING if self.ranks else DEFAULT_TUNING

    def constants(self, tuning: Tuning, interpret: bool) -> dict[str, object]:
        """The kernel's compile-time arguments but for TENSORS."""
        return {
            "OUTPUT": TRITON_DTYPES[self.output],
            "PREMULTIPLY": self.premultiply,
            "DIVIDE": (1 if self.by_reciprocal else 2) if self.divide else 0,
            "EMULATED": self.ranks > 0,
            "W": self.ranks,
            "BLOCK": tuning.block,
            "EVEN": self.even,
            "INTERPRET": interpret,
        }


def _numel(source: Source) -> int:
    return source.numel if isinstance(source, Multicast) else source[0].numel()


def _addresses(source: Source) -> list[int]:
    return [source.address] if isinstance(source, Multicast) else [x.data_ptr() for x in source]


def _prepare(
    sources: Sequence[Source],
    outputs: Sequence[torch.Tensor],
    factors: tuple[float, float],
    tuning: Tuning | None,
) -> tuple[Launch, ...]:
    """One launch per dtype among the outputs that have any elements. factors: premultiply and divisor."""
    premultiply, divisor = factors
    by_reciprocal = divides_exactly(divisor)
    members: dict[torch.dtype, list[tuple[Source, torch.Tensor]]] = {}
    for source, output in zip(sources, outputs, strict=True):
        if output.numel():
            members.setdefault(output.dtype, []).append((source, output))

    launches = []
    for dtype, pairs in members.items():
        first = pairs[0][0]
        variant = MultimemVariant(
            dtype,
            0 if isinstance(first, Multicast) else len(first),
            premultiply != 1.0,
            divisor != 1.0,
            by_reciprocal=divisor != 1.0 and by_reciprocal,
            even=all(_numel(source) % 16 == 0 == output.numel() % 16 for source, output in pairs),
        )
        chosen = tuning or variant.tuning()
        rows = [(output.data_ptr(), _numel(source), output.numel(), *_addresses(source)) for source, output in pairs]
        counts = [block_counts(numel, written, chosen.block) for _, numel, written, *_ in rows]
        header = [float_bits(premultiply), float_bits(1.0 / divisor if variant.by_reciprocal else divisor)]
        # A multicast address is no tensor's: it must not be taken for one that moves.
        addresses = (0, *range(3, 3 + variant.ranks))
        constants = variant.constants(chosen, interpreted(multimem_kernel))
        launches.append(make_launch(header, rows, counts, outputs[0].device, constants, chosen.warps, addresses))
    return tuple(launches)


def _check_address(address: int, what: str) -> None:
    if address % ALIGNMENT:
        raise ValueError(f"{what} must start on {ALIGNMENT} bytes, got address {address:#x}")


def _check_tensor(tensor: torch.Tensor, dtypes: Sequence[torch.dtype], what: str) -> None:
    if tensor.dtype not in dtypes:
        supported = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise UnsupportedDtypeError(
            f"{what} has dtype {str(tensor.dtype).removeprefix('torch.')}; it must be {supported}"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{what} must be contiguous, got shape {list(tensor.shape)} with strides {list(tensor.stride())}"
        )
    if tensor.numel():
        _check_address(tensor.data_ptr(), what)


def _check_source(source: Source, what: str) -> None:
    if isinstance(source, Multicast):
        if source.numel < 0 or source.address <= 0:
            raise ValueError(f"{what} must have an address > 0 and numel >= 0, got {source}")
        _check_address(source.address, what)
        return
    for rank, x in enumerate(source):
        _check_tensor(x, (torch.bfloat16,), f"{what}[{rank}]")
        if x.numel() != source[0].numel():
            raise ValueError(f"{what}[{rank}] holds {x.numel()} elements and {what}[0] {source[0].numel()}")


def _check(sources: Sequence[Source], outputs: Sequence[torch.Tensor]) -> None:
    if len(sources) != len(outputs):
        raise ValueError(f"got {len(sources)} sources and {len(outputs)} outputs")
    ranks = ["a multicast range" if isinstance(source, Multicast) else f"{len(source)} ranks" for source in sources]
    for index, (source, output) in enumerate(zip(sources, outputs, strict=True)):
        if ranks[index] == "0 ranks":
            raise ValueError(f"sources[{index}] is empty; there must be one tensor per rank, at least one")
        if ranks[index] != ranks[0]:
            raise ValueError(f"sources[{index}] has {ranks[index]} and sources[0] {ranks[0]}")
        _check_source(source, f"sources[{index}]")
        _check_tensor(output, OUTPUT_DTYPES, f"outputs[{index}]")
        if output.numel() < _numel(source):
            raise ValueError(
                f"outputs[{index}] holds {output.numel()} elements, too few for sources[{index}] of {_numel(source)}"
            )
    emulated = (x for source in sources if not isinstance(source, Multicast) for x in source)
    check_one_device([*emulated, *outputs])


def _check_switch(device: torch.device, engine: Engine) -> None:
    """Raises ValueError where multicast ranges cannot be summed."""
    if engine == "torch":
        raise ValueError('engine="torch" cannot read multicast ranges; pass each rank\'s tensor instead')
    if device.type != "cuda":
        raise ValueError(f"multicast ranges need CUDA outputs, got {device}; pass each rank's tensor instead")
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        raise ValueError(
            f"multicast ranges need compute capability 9.0, and {device} has {capability[0]}.{capability[1]}"
        )


def prepare_multimem(
    sources: Sequence[Source],
    outputs: Sequence[torch.Tensor],
    *,
    premultiply: float = 1.0,
    divisor: float = 1.0,
    engine: Engine = "auto",
    ctas: int | None = None,
    tuning: Tuning | None = None,
) -> Prepared:
    """Sums of `sources` into `outputs`, to be made any number of times; the module's head says what is rounded where.

    sources: for output i a multicast range of bf16; or, for the emulated switch, one contiguous bf16 tensor per rank
    in rank order, all of equally many elements. All are of one kind, and start on 16 bytes. Every rank has written its
    part, by kernels or copies that are complete, and nobody writes to it before the sums are made.
    outputs: contiguous, fp32 or bf16, on 16 bytes, with at least as many elements. What an output holds beyond them is
    padding: set to 0. An output may overlap no source and no other output.

    premultiply, divisor: the sum is multiplied and divided by them, rounded to fp32; 1 skips the step. The switch adds
    what lies in memory: unlike with `accumulate`, no contribution is scaled before.
    engine: of the emulated switch: "triton", "torch" (the naive twin), or "auto": Triton for CUDA tensors, else torch.
    Multicast ranges take Triton.
    ctas: at most so many CTAs; None for a CTA per block. tuning: overrides the default; its stages mean nothing here.

    Raises ValueError for sources and outputs that do not fit together or are not aligned, multicast ranges on a device
    that cannot sum them, several devices or ctas < 1, and UnsupportedDtypeError for other dtypes.
    """
    check_ctas(ctas)
    _check(sources, outputs)
    device = outputs[0].device if outputs else torch.device("cpu")
    emulated = [source for source in sources if not isinstance(source, Multicast)]
    if len(emulated) < len(sources):
        _check_switch(device, engine)
    if not outputs or not uses_triton(engine, device, multimem_kernel):

        def run_on_host(*_: object) -> None:
            multimem_reference(emulated, outputs, premultiply=premultiply, divisor=divisor)

        return Prepared(run_on_host, (), is_reusable=False)
    launches = _prepare(sources, outputs, (premultiply, divisor), tuning)

    def run(launches: Sequence[Launch], stream: int | None) -> None:
        for launch in launches:
            start(multimem_kernel, launch, ctas, stream=stream)

    return Prepared(run, launches, is_reusable=True)
