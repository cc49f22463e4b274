"""What is measured: models and sizes, from the generator that tests use too (`tide_triton.models`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from tide_triton.layouts import GroupSpec, SpecError, TensorSpec
from tide_triton.models import MODELS, ModelSpec, block_spec

#: Models small enough to run every benchmark's code on a CPU; never part of a default run.
TINY = {
    m.name: m
    for m in (
        ModelSpec("tiny-llama", "llama", 64, 96, 4, 2, 16, 2, vocab=32),
        ModelSpec("tiny-wan", "wan", 64, 96, 4, 4, 16, 2, text_tokens=8),
        ModelSpec("tiny-qwen", "qwen", 64, 32, 4, 2, 16, 2, vocab=32, experts=8, top_k=2),
    )
}

#: Layers of each model in a step: as many as fit with all of training's state on two GPUs.
STEP_LAYERS = {"llama-3.1-70b": 4, "wan2.2-a14b": 10, "qwen3-30b-a3b": 8}

#: Tokens of each rank in a step.
STEP_TOKENS = (8192, 2048)

#: Those, and so few that activations hardly count: the plan of a step's memory leaves them out.
MEMORY_TOKENS = (*STEP_TOKENS, 256)

#: 300 parameters of 4 KiB in bf16: a group whose cost is the host's.
MANY_SMALL = "300x4KiB"


@dataclass(frozen=True, slots=True)
class Case:
    """A group to gather and reduce: its name in results, and its tensors."""

    name: str
    spec: GroupSpec

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded group, in the dtype it has in a slot."""
        return sum(tensor.nbytes for tensor in self.spec.tensors)


def model_named(name: str) -> ModelSpec:
    """Raises SpecError, naming what there is, for an unknown model."""
    known = {**MODELS, **TINY}
    if name not in known:
        raise SpecError(f"model {name!r} is unknown; use one of {', '.join(known)}")
    return known[name]


def models_named(names: Sequence[str]) -> list[ModelSpec]:
    """The models of these names, or all published ones where none is given."""
    return [model_named(name) for name in names or MODELS]


def group_cases(names: Sequence[str], world_size: int) -> list[Case]:
    """One block of every model, and where no model is named the group of many small parameters."""
    cases = [Case(model.name, block_spec(model, world_size)) for model in models_named(names)]
    if not names:
        small = tuple(TensorSpec(f"p{i}", (2048,), "bfloat16") for i in range(300))
        cases.append(Case(MANY_SMALL, GroupSpec(world_size, small)))
    return cases


def step_layers(model: ModelSpec) -> int:
    """Layers that a step of `model` trains."""
    return STEP_LAYERS.get(model.name, model.layers)
