"""What the ranks do in a long training whose every step is drawn at random, the same on every rank.

A script is a list of actions, each a method of `Training` with its arguments:

    sync(on)       whether the next backward reduces gradients
    reshard(on)    whether it reshards parameters
    read(block)    unshard a block by hand, copy some of it, and reshard it
    ahead(block)   unshard a block by hand and leave it to the next forward or backward
    forward()      of a microbatch
    backward()     of the latest forward that has not had one
    evaluate()     a forward without gradients
    update()       the optimizer's step

Under TIDE each rank is late at moments of its own: its GPU sleeps between operations, forward and backward, and now
and then its host.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tide_triton
from tests.fsdp.parity import Trace, difference, gradients, parameters
from tests.gpu.jobs import Model, device_of

Action = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """What is trained.

    keeps: whether blocks are also kept unsharded for longer than FSDP2 does, for which TIDE has to add slots. Without,
    groups take turns in few slots to the end. checkpointed: whether activations are. options: of attach.
    hidden, blocks, batch: sizes of the model and of a microbatch (sequences, tokens). By default two blocks share each
    of the four slots that prefetching of two takes.
    """

    transport: str
    seed: int
    keeps: bool
    checkpointed: bool
    options: dict[str, Any]
    steps: int = 60
    hidden: int = 2048
    blocks: int = 8
    batch: tuple[int, int] = (4, 256)


@dataclass
class Found:
    """What one rank saw.

    unlike_itself, unlike_stock: what differs first between two stock runs, and under TIDE from stock; empty for
    nothing. slots_grown, reused: of the report, slots added on the way and gathers that found everything in place.
    """

    unlike_itself: str
    unlike_stock: str
    why_not_zero_copy: list[str]
    layout_copy_bytes: int
    slots_grown: int
    reused: int


def equals_stock(rank: int, world: int, case: Case) -> Found:
    """Follow the script by stock FSDP2, by it again, and under TIDE with ranks that are late; compare all three."""
    (stock, _), (again, _), (tide, report) = (_train(rank, case, by_tide) for by_tide in (False, False, True))
    return Found(
        unlike_itself=difference(stock, again),
        unlike_stock=difference(stock, tide),
        why_not_zero_copy=[
            f"{group.name}: {group.why}" for group in report.groups if group.gather.fallback + group.reduce.fallback
        ],
        layout_copy_bytes=report.gather.layout_copy_bytes + report.reduce.layout_copy_bytes,
        slots_grown=report.slots_grown,
        reused=report.gather.reused,
    )


# --- the script ---


def script(case: Case) -> list[Action]:
    """The case's actions. The first step is plain: FSDP2 sets itself up in the root's first forward."""
    draw = random.Random(case.seed)
    actions: list[Action] = [("forward",), ("backward",), ("update",)]
    for _ in range(case.steps - 1):
        actions += _step(draw, case)
    return actions


def _step(draw: random.Random, case: Case) -> list[Action]:
    actions: list[Action] = []
    microbatches = draw.randint(1, 3)
    for microbatch in range(microbatches):
        is_last = microbatch == microbatches - 1
        actions.append(("sync", is_last or draw.random() < 0.5))
        if case.keeps:
            actions.append(("reshard", is_last or draw.random() < 0.6))
        actions += _by_hand(draw, case, may_keep=case.keeps)
        graphs = 2 if draw.random() < 0.15 else 1
        actions += [("forward",)] * graphs
        # Parameters that autograd refers to cannot move to another slot: gathers are put off instead.
        actions += _by_hand(draw, case, may_keep=case.keeps or not case.checkpointed)
        actions += [("backward",)] * graphs
        if not is_last and draw.random() < 0.2:
            actions.append(("evaluate",))
    actions.append(("update",))
    # Not before the update: FSDP2 keeps the root unsharded after a forward, and would not see it.
    if draw.random() < 0.3:
        actions.append(("evaluate",))
    return actions


def _by_hand(draw: random.Random, case: Case, *, may_keep: bool) -> list[Action]:
    """Nothing, or one block unsharded by hand."""
    kind = draw.choice(["", "", "read", "ahead" if may_keep else "read"])
    return [(kind, draw.randrange(case.blocks))] if kind else []


# --- following it ---


class Training:
    """One model, and all that its training has shown. late: called wherever a rank may lose time."""

    def __init__(self, model: Model, rank: int, batch: tuple[int, int], late: Callable[[], object]) -> None:
        self.model = model
        self.seen: Trace = []
        self._rank, self._batch, self._late = rank, batch, late
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self._losses: list[torch.Tensor] = []
        self._forwards = 0

    def follow(self, actions: list[Action]) -> None:
        for number, (name, *arguments) in enumerate(actions):
            self._where = f"action {number}, {name}{tuple(arguments)}"
            self._late()
            getattr(self, name)(*arguments)
        self.seen += parameters(self.model, "finally: ")

    def sync(self, on: bool) -> None:
        self.model.set_requires_gradient_sync(on)

    def reshard(self, on: bool) -> None:
        self.model.set_reshard_after_backward(on)

    def read(self, index: int) -> None:
        block = self.model.blocks[index]
        block.unshard()
        self._late()
        self._keep("weight", block.down.weight[:, :8])
        block.reshard()

    def ahead(self, index: int) -> None:
        self.model.blocks[index].unshard(async_op=True)

    def forward(self) -> None:
        self._losses.append(self._loss_of_the_next_batch())
        self._keep("loss", self._losses[-1])

    def backward(self) -> None:
        self._losses.pop().backward()

    def evaluate(self) -> None:
        with torch.no_grad():
            self._keep("loss", self._loss_of_the_next_batch())

    def update(self) -> None:
        self.seen += gradients(self.model, f"{self._where}: ")
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss_of_the_next_batch(self) -> torch.Tensor:
        device = self.model.head.weight.device
        generator = torch.Generator(device).manual_seed(self._forwards * 10 + self._rank)
        self._forwards += 1
        tokens = torch.randint(0, 1001, self._batch, generator=generator, device=device)
        return nn.functional.cross_entropy(self.model(tokens).float().flatten(0, 1), tokens.flatten())

    def _keep(self, what: str, tensor: torch.Tensor) -> None:
        self.seen.append((f"{self._where}: {what}", tensor.detach().clone()))


class Lateness:
    """Now and then some time lost, on this rank's GPU or on its host; drawn apart from the script and from peers."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device, self._draw = device, random.Random(seed)

    def __call__(self, *unused: object) -> None:
        chance, share = self._draw.random(), self._draw.random()
        if chance < 0.08 and self._device.type == "cuda":
            # Two milliseconds at most, several gathers long.
            torch.cuda._sleep(int(share * 4_000_000))
        elif chance < 0.10:
            time.sleep(share * 0.002)

    def within(self, model: Model) -> None:
        """Be late too between the operations of each block, which read its parameters, in forward and in backward."""

        def after(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
            self()
            if output.requires_grad:
                output.register_hook(self)

        for block in model.blocks:
            for module in block.children():
                module.register_forward_hook(after)


def _train(rank: int, case: Case, by_tide: bool) -> tuple[Trace, Any]:
    """All that was seen, and TIDE's report (None for stock)."""
    device = device_of(rank)
    model = _sharded(case, device)
    late: Callable[[], object] = lambda: None  # noqa: E731
    if by_tide:
        late = Lateness(device, case.seed * 31 + rank)
        late.within(model)
        tide_triton.attach(model, transport=case.transport, timeout_s=30, **case.options)  # type: ignore[arg-type]
    training = Training(model, rank, case.batch, late)
    training.follow(script(case))
    if device.type == "cuda":
        torch.cuda.synchronize()
    report = None
    if by_tide:
        report = tide_triton.report(model, quiet=True)
        tide_triton.detach(model)
    return training.seen, report


def _sharded(case: Case, device: torch.device) -> Model:
    """A group for each block and one for the rest; blocks prefetch one or two others, as drawn."""
    torch.manual_seed(case.seed)
    with device:
        model = Model(case.hidden, case.checkpointed, case.blocks)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    draw, blocks = random.Random(case.seed), list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + draw.randint(1, 2)])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - draw.randint(1, 2)) : index][::-1])
    return model
