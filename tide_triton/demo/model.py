"""A small byte-level GPT whose sizes do not divide by the number of ranks.

    tokens (batch, context) -> token + position embedding -> blocks -> norm -> logits (batch, context, VOCAB)

Sharding cuts dim 0. VOCAB and `hidden` are prime and `width` has no divisor among 3, 4, 6, 7 and 8, so that in every
FSDP2 group, at every number of ranks from 2 to 8, some shards are padded: the layouts that are hard to get right.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import gelu

#: 256 bytes and the token that starts a window.
VOCAB = 257


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a GPT. `width` must divide by `heads`."""

    context: int = 64
    width: int = 130
    heads: int = 5
    hidden: int = 509
    layers: int = 4


class Block(nn.Module):
    """Causal self-attention and a feed-forward net, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)
        self.feed_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(self.attention_norm(x))
        down: torch.Tensor = self.down(gelu(self.up(self.feed_norm(x))))
        return x + down

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        heads = self.query_key_value(x).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
        future = torch.ones(context, context, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
        output: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, context, width))
        return output


class GPT(nn.Module):
    """The model: embeddings, `blocks`, and a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCAB, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's: layers that write to the residual are scaled by how many of them there are.
                scale = (2 * shape.layers) ** -0.5 if name.endswith(("output.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
