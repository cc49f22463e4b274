"""The models that `step` trains: real blocks of the right shapes between random hidden states and a loss.

No embedding and no head: what is trained are blocks and a final norm. Every block checkpoints its activations, weights
are random everywhere (power follows data), and every operation is deterministic but for attention's backward, which the
step that is compared makes deterministic.

A block's parameters are those of `ModelSpec.block_shapes`, flat, by name.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tide_triton.models import ModelSpec

Tensor = torch.Tensor


class Dispatch(torch.autograd.Function):
    """Rows of x (T, d) copied to their experts: (T * k, d), sorted by expert. Its backward adds in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        """order: (T * k,), which (token, choice) each row is; inverse: the way back."""
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).view(-1, ctx.k, grad.shape[-1]).sum(1), None, None, None


class Permute(torch.autograd.Function):
    """Rows in another order, both ways by index_select."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """order: which row comes where; inverse: the way back."""
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class Block(nn.Module):
    """One block of `spec`; parameters by the names of `block_shapes`."""

    def __init__(self, spec: ModelSpec, experts: str = "grouped") -> None:
        """experts: "grouped" (torch's grouped GEMM over routed tokens) or "even" (bmm, all experts equally busy)."""
        super().__init__()
        self.spec = spec
        self.experts = experts
        for name, shape in spec.block_shapes:
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def initialise(self, generator: torch.Generator) -> None:
        """Random weights: norms near 1, the rest so small that depth does not blow activations up."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                fan_in = parameter.shape[-2] if parameter.dim() == 3 and self.spec.experts else parameter.shape[-1]
                if parameter.dim() == 1:
                    parameter.normal_(0.0, 0.02, generator=generator)
                    if "norm" in name and "bias" not in name:
                        parameter.add_(1.0)
                else:
                    parameter.normal_(0.0, fan_in**-0.5, generator=generator)

    def forward(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (1, tokens, hidden). context: (1, text tokens, hidden) for wan, else anything."""
        compute = {"llama": self._llama, "wan": self._wan, "qwen": self._qwen}[self.spec.family]
        result: Tensor = checkpoint(
            compute, x, context, cos, sin, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )
        return result

    def _llama(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._grouped_query(F.rms_norm(x, x.shape[-1:], self.attention_norm, 1e-5), cos, sin)
        y = F.rms_norm(x, x.shape[-1:], self.ffn_norm, 1e-5)
        return x + F.linear(F.silu(F.linear(y, self.gate)) * F.linear(y, self.up), self.down)

    def _qwen(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._grouped_query(F.rms_norm(x, x.shape[-1:], self.attention_norm, 1e-6), cos, sin)
        y = F.rms_norm(x, x.shape[-1:], self.ffn_norm, 1e-6)
        return x + self._mixture(y.view(-1, y.shape[-1])).view_as(y)

    def _wan(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = self.modulation.chunk(6, dim=1)
        y = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        x = x + self._attend("self", y, y, (cos, sin)) * gate
        y = F.layer_norm(x, x.shape[-1:], self.cross_norm, self.cross_norm_bias)
        x = x + self._attend("cross", y, context, None)
        y = F.layer_norm(x, x.shape[-1:]) * (1 + ffn_scale) + ffn_shift
        y = F.gelu(F.linear(y, self.up, self.up_bias), approximate="tanh")
        return x + F.linear(y, self.down, self.down_bias) * ffn_gate

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        """(1, tokens, heads * head_dim) -> (1, heads, tokens, head_dim)."""
        return x.unflatten(-1, (heads, self.spec.head_dim)).transpose(1, 2)

    def _grouped_query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.spec
        q, k = self._heads(F.linear(x, self.q), s.heads), self._heads(F.linear(x, self.k), s.kv_heads)
        v = self._heads(F.linear(x, self.v), s.kv_heads)
        if s.family == "qwen":
            q = F.rms_norm(q, q.shape[-1:], self.q_norm, 1e-6)
            k = F.rms_norm(k, k.shape[-1:], self.k_norm, 1e-6)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(y.transpose(1, 2).flatten(-2), self.o)

    def _attend(self, kind: str, x: Tensor, context: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Wan's attention, "self" or "cross": norms of q and k over all heads."""
        w = {name: getattr(self, f"{kind}_{name}") for name in ("q", "k", "v", "o", "q_norm", "k_norm")}
        b = {name: getattr(self, f"{kind}_{name}_bias") for name in ("q", "k", "v", "o")}
        q = F.rms_norm(F.linear(x, w["q"], b["q"]), x.shape[-1:], w["q_norm"], 1e-6)
        k = F.rms_norm(F.linear(context, w["k"], b["k"]), x.shape[-1:], w["k_norm"], 1e-6)
        v = F.linear(context, w["v"], b["v"])
        q, k, v = (self._heads(t, self.spec.heads) for t in (q, k, v))
        if rotation is not None:
            q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        y = F.scaled_dot_product_attention(q, k, v)
        return F.linear(y.transpose(1, 2).flatten(-2), w["o"], b["o"])

    def _mixture(self, x: Tensor) -> Tensor:
        """Top-k experts of each of (T, hidden) tokens, without a word to the host."""
        s = self.spec
        weights, chosen = torch.topk(F.linear(x, self.router).float().softmax(-1), s.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        if self.experts == "even":
            # Equally many rows for every expert, whatever the router says: the same work, and bmm can do it.
            chosen = torch.arange(chosen.numel(), device=x.device).remainder(s.experts).view_as(chosen)
        expert, order = chosen.flatten().sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        rows = Dispatch.apply(x, order, inverse, s.top_k)
        if self.experts == "even":
            rows = rows.view(s.experts, -1, rows.shape[-1])
            hidden = F.silu(torch.bmm(rows, self.gate)) * torch.bmm(rows, self.up)
            out = torch.bmm(hidden, self.down).flatten(0, 1)
        else:
            every = torch.arange(s.experts, device=x.device)
            ends = torch.searchsorted(expert, every, right=True).to(torch.int32)
            hidden = F.silu(_grouped_mm(rows, self.gate, ends)) * _grouped_mm(rows, self.up, ends)
            out = _grouped_mm(hidden, self.down, ends)
        back = Permute.apply(out, inverse, order).view(-1, s.top_k, x.shape[-1])
        return (back * weights.unsqueeze(-1)).sum(1)


class Stack(nn.Module):
    """Blocks and a final norm. forward takes hidden states and returns a scalar loss."""

    def __init__(self, spec: ModelSpec, layers: int, experts: str = "grouped") -> None:
        super().__init__()
        self.spec = spec
        self.blocks = nn.ModuleList(Block(spec, experts) for _ in range(layers))
        self.norm = nn.Parameter(torch.empty(spec.hidden))

    def initialise(self, seed: int) -> None:
        """The same weights on every rank, from `seed`."""
        generator = torch.Generator(self.norm.device).manual_seed(seed)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.initialise(generator)
        with torch.no_grad():
            self.norm.normal_(1.0, 0.02, generator=generator)

    def forward(self, x: Tensor, context: Tensor, target: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, context, cos, sin)
        return F.mse_loss(F.rms_norm(x, x.shape[-1:], self.norm, 1e-5).float(), target.float())


def make_inputs(spec: ModelSpec, tokens: int, seed: int, device: torch.device) -> tuple[Tensor, ...]:
    """What `Stack.forward` takes, in bf16: hidden states, text, target, and the rotation's cosines and sines."""
    generator = torch.Generator(device).manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

    half = spec.head_dim // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=device) / half)
    angles = torch.arange(tokens, device=device).unsqueeze(1) * frequencies
    shape = 1, tokens, spec.hidden
    return (
        noise(*shape),
        noise(1, max(spec.text_tokens, 1), spec.hidden),
        noise(*shape),
        angles.cos().to(torch.bfloat16),
        angles.sin().to(torch.bfloat16),
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (..., tokens, head_dim); cos, sin: (tokens, head_dim / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """(R, K) x (E, K, N), rows of each expert ending at `ends` -> (R, N)."""
    function = getattr(F, "grouped_mm", None) or torch._grouped_mm
    result: Tensor = function(rows, weights, offs=ends)
    return result


def experts_that_work(device: torch.device) -> tuple[str, str]:
    """("grouped", "") where torch's grouped GEMM runs and differentiates in bf16 here, else ("even", why not)."""
    spec = ModelSpec("probe", "qwen", 256, 128, 2, 2, 64, 1, experts=8, top_k=2)
    try:
        rows = torch.randn(333, 256, device=device).to(torch.bfloat16).requires_grad_()
        weights = torch.randn(8, 256, 128, device=device).to(torch.bfloat16).requires_grad_()
        ends = torch.tensor([40, 41, 99, 150, 150, 201, 300, 333], dtype=torch.int32, device=device)
        _grouped_mm(rows, weights, ends).float().pow(2).sum().backward()
        assert rows.grad is not None
        assert weights.grad is not None
        wanted = torch.cat([r @ w for r, w in zip(rows.tensor_split(ends[:-1].cpu().long()), weights, strict=True)])
        slope = 2 * rows.detach()[:40].float().T @ wanted.detach()[:40].float()
        if not torch.allclose(weights.grad[0].float(), slope, rtol=0.1, atol=1.0 * slope.abs().mean().item()):
            return "even", "the grouped GEMM's gradient is wrong here"
        if not weights.grad.is_contiguous() or weights.grad[4].abs().max() != 0:
            return "even", "the grouped GEMM's gradient is not contiguous, or not zero for an idle expert"
    except (RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
        return "even", f"no grouped GEMM for {spec.name} here: {error}"[:200]
    return "grouped", ""


@contextmanager
def flash_attention(device: torch.device) -> Iterator[None]:
    """Flash attention on a GPU, which can be made deterministic; whatever there is elsewhere."""
    if device.type == "cuda":
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            yield
    else:
        yield


@contextmanager
def deterministic(*, strict: bool = True) -> Iterator[None]:
    """The same bits from the same inputs. strict: an operation that cannot raises; else it goes on, flash too."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def why_not_deterministic(device: torch.device, spec: ModelSpec) -> str:
    """What stops a small model of `spec`'s family under strict determinism; empty where nothing does."""
    small = replace(
        spec, hidden=512, ffn=256, heads=4, kv_heads=2 if spec.heads != spec.kv_heads else 4, head_dim=128, layers=1
    )
    experts = experts_that_work(device)[0] if spec.experts else "none"
    with device:
        model = Stack(small, 1, experts)
    model.initialise(0)
    model.to(torch.bfloat16)
    try:
        with flash_attention(device), deterministic():
            model(*make_inputs(small, 256, 0, device)).backward()
    except RuntimeError as error:
        return str(error)[:200]
    return ""
