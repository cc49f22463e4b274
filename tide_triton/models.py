"""Shapes of three published models, as their blocks are trained: what benchmarks and tests are cut from.

| name           | family | a block holds                                                       |
|----------------|--------|---------------------------------------------------------------------|
| llama-3.1-70b  | llama  | GQA attention, SwiGLU, two RMSNorms                                 |
| wan2.2-a14b    | wan    | self and cross attention, FFN, modulation (1, 6, dim)               |
| qwen3-30b-a3b  | qwen   | GQA attention with q/k norms, router, 128 experts of 768, 8 at work |

The figures are those of the models' published config.json files. Nothing here needs torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from tide_triton.layouts import GroupSpec, SpecError, TensorSpec

Family = Literal["llama", "wan", "qwen"]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model: sizes of its blocks, how many there are, and what lies around them.

    hidden, ffn, head_dim: elements. ffn is the width of one expert where there are experts.
    vocab: entries of the embedding and of the untied head; 0 for a model that has neither.
    text_tokens: length of what cross attention attends to; 0 where there is none.
    """

    name: str
    family: Family
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int = 0
    experts: int = 0
    top_k: int = 0
    text_tokens: int = 0

    @property
    def block_shapes(self) -> Shapes:
        """(name, shape) of every parameter of one block, in the order in which the block has them."""
        return _BLOCKS[self.family](self)

    @property
    def block_numel(self) -> int:
        """Parameters of one block."""
        return sum(math.prod(shape) for _, shape in self.block_shapes)

    @property
    def numel(self) -> int:
        """Parameters of all blocks, the final norm, and the embedding and head where the model has a vocabulary.

        For the wan family that leaves out patch, text and time embeddings (0.2 of 14.3 billion).
        """
        return self.layers * self.block_numel + self.hidden + 2 * self.vocab * self.hidden


def _llama(m: ModelSpec) -> Shapes:
    queries, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim
    return (
        ("attention_norm", (m.hidden,)),
        ("q", (queries, m.hidden)),
        ("k", (keys, m.hidden)),
        ("v", (keys, m.hidden)),
        ("o", (m.hidden, queries)),
        ("ffn_norm", (m.hidden,)),
        ("gate", (m.ffn, m.hidden)),
        ("up", (m.ffn, m.hidden)),
        ("down", (m.hidden, m.ffn)),
    )


def _wan(m: ModelSpec) -> Shapes:
    attention = tuple(
        (f"{kind}_{name}", shape)
        for kind in ("self", "cross")
        for name, shape in (
            ("q", (m.hidden, m.hidden)),
            ("q_bias", (m.hidden,)),
            ("k", (m.hidden, m.hidden)),
            ("k_bias", (m.hidden,)),
            ("v", (m.hidden, m.hidden)),
            ("v_bias", (m.hidden,)),
            ("o", (m.hidden, m.hidden)),
            ("o_bias", (m.hidden,)),
            ("q_norm", (m.hidden,)),
            ("k_norm", (m.hidden,)),
        )
    )
    return (
        ("modulation", (1, 6, m.hidden)),
        *attention,
        ("cross_norm", (m.hidden,)),
        ("cross_norm_bias", (m.hidden,)),
        ("up", (m.ffn, m.hidden)),
        ("up_bias", (m.ffn,)),
        ("down", (m.hidden, m.ffn)),
        ("down_bias", (m.hidden,)),
    )


def _qwen(m: ModelSpec) -> Shapes:
    queries, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim
    return (
        ("attention_norm", (m.hidden,)),
        ("q", (queries, m.hidden)),
        ("k", (keys, m.hidden)),
        ("v", (keys, m.hidden)),
        ("o", (m.hidden, queries)),
        ("q_norm", (m.head_dim,)),
        ("k_norm", (m.head_dim,)),
        ("ffn_norm", (m.hidden,)),
        ("router", (m.experts, m.hidden)),
        ("gate", (m.experts, m.hidden, m.ffn)),
        ("up", (m.experts, m.hidden, m.ffn)),
        ("down", (m.experts, m.ffn, m.hidden)),
    )


_BLOCKS = {"llama": _llama, "wan": _wan, "qwen": _qwen}

#: https://huggingface.co/meta-llama/Llama-3.1-70B, config.json: 70.6 billion parameters, 856 million a block.
LLAMA_3_1_70B = ModelSpec("llama-3.1-70b", "llama", 8192, 28672, 64, 8, 128, 80, vocab=128256)

#: https://huggingface.co/Wan-AI/Wan2.2-T2V-A14B, one of its two experts: 14 billion parameters, 351 million a block.
WAN_2_2_A14B = ModelSpec("wan2.2-a14b", "wan", 5120, 13824, 40, 40, 128, 40, text_tokens=512)

#: https://huggingface.co/Qwen/Qwen3-30B-A3B, config.json: 30.5 billion parameters, 623 million a block.
QWEN3_30B_A3B = ModelSpec("qwen3-30b-a3b", "qwen", 2048, 768, 32, 4, 128, 48, vocab=151936, experts=128, top_k=8)

MODELS: Mapping[str, ModelSpec] = MappingProxyType({m.name: m for m in (LLAMA_3_1_70B, WAN_2_2_A14B, QWEN3_30B_A3B)})


def block_spec(model: ModelSpec | str, world_size: int, dtype: str = "bfloat16") -> GroupSpec:
    """One block of `model` as a group sharded over `world_size` ranks along dim 0.

    model: a `ModelSpec`, or the name of one of `MODELS`. dtype: torch's name of the dtype in a slot.

    Raises SpecError for a name that is not in `MODELS`, and for what `GroupSpec` refuses.
    """
    if isinstance(model, str):
        if model not in MODELS:
            raise SpecError(f"model {model!r} is unknown; use one of {', '.join(MODELS)}")
        model = MODELS[model]
    return GroupSpec(world_size, tuple(TensorSpec(name, shape, dtype) for name, shape in model.block_shapes))
