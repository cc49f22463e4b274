"""Steps of several variants by turns, so that drift, the host's moods and the allocator's choices meet all of them.

All variants but the floor train one and the same FSDP2 model, over and over: TIDE is attached for its turns and
detached after them, `symm` has its windows for its turns. Its reductions are stock's. The floor's model lies beside it.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench import training, variants
from bench.timing import Timing, consecutive, slowest
from bench.variants import Case

#: Steps of a turn that are not timed.
_WARMUP = 2


def by_turns(
    case: Case, names: Sequence[str], attach: Mapping[str, dict[str, Any]], experts: str, *, rounds: int
) -> dict[str, Timing]:
    """Time `case.steps` steps of every variant in each of `rounds` rounds.

    attach: options of TIDE, by variant.
    """
    inputs = variants.inputs(case)
    floor = _stepper(*variants.floor(case, experts), inputs) if "floor" in names else None
    model = variants.sharded(case, experts)
    step = _stepper(model, variants.updating(model), inputs)
    times: dict[str, list[float]] = {name: [] for name in names}
    hosts: dict[str, list[float]] = {name: [] for name in names}
    with training.flash_attention(case.here.device):
        for _ in range(rounds):
            for name in names:
                with _under(case, model, name, attach.get(name)):
                    run = floor if floor is not None and name == "floor" else step
                    for _ in range(_WARMUP):
                        run()
                    case.here.barrier()
                    taken = consecutive(case.here, case.steps, run)
                times[name] += taken[0]
                hosts[name] += taken[1]
    return {name: slowest(case.here, times[name], hosts[name]) for name in names}


def _stepper(model: training.Stack, after_backward: Callable[[], None], inputs: tuple[Any, ...]) -> Callable[[], None]:
    def step() -> None:
        model(*inputs).backward()
        after_backward()

    return step


def _under(
    case: Case, model: training.Stack, name: str, attach: dict[str, Any] | None
) -> contextlib.AbstractContextManager[None]:
    """What `model` is trained under in a turn of variant `name`."""
    if attach is not None:
        return variants.attached(case, model, attach)
    return variants.windowed(case, model) if name == "symm" else contextlib.nullcontext()
