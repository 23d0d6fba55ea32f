"""Attention, MLPs and blocks as users write them, in the idioms that the recogniser must read."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NanoGPTAttention(nn.Module):
    """Fused c_attn, split and view, SDPA or a softmax under a registered triangle."""

    def __init__(self, dim: int, heads: int, *, flash: bool, dropout: float = 0.1) -> None:
        super().__init__()
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout = heads, dim, dropout
        self.flash = flash
        if not flash:
            self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0,
                is_causal=True,
            )  # fmt: skip
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            att = self.attn_dropout(att)
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GroupedAttention(nn.Module):
    """Separate projections, fewer key heads, an optional SDPA mask, causal without one."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * head_dim)
        self.out_proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).reshape(b, s, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).reshape(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).reshape(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=attn_mask is None
        )
        return self.out_proj(y.transpose(1, 2).reshape(b, s, -1))


class EinsumAttention(nn.Module):
    """Einsum, its own scale, a mask of zeros and ones that must be given."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)) for t in (self.to_q(x), self.to_k(x), self.to_v(x))
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
        scores = scores.masked_fill(mask == 0, -1e9)
        weights = scores.softmax(dim=-1)
        y = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.to_out(y.flatten(-2))


class TimmAttention(nn.Module):
    """qkv reshaped to (3, heads), permuted and unbound; the scale on the query."""

    def __init__(self, dim: int, heads: int, *, per_head: bool = False) -> None:
        super().__init__()
        self.heads, self.per_head = heads, per_head
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attn_drop = nn.Dropout(0.2)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        if self.per_head:
            qkv = self.qkv(x).reshape(B, N, self.heads, 3, C // self.heads).permute(3, 0, 2, 1, 4)
        else:
            qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = self.attn_drop(attn.softmax(dim=-1))
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class CausalOnTheFly(nn.Module):
    """A triangle made in the forward, a comprehension over chunks, scores masked in place."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        ]
        T = x.shape[1]
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
        scores.masked_fill_(torch.triu(torch.ones(T, T, device=x.device), 1).bool(), float("-inf"))
        y = torch.matmul(torch.softmax(scores.float(), -1).type_as(v), v)
        return self.proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), the product either way."""

    def __init__(self, dim: int, hidden: int, *, gate_last: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.gate_last = gate_last

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        if self.gate_last:
            return self.w2(self.w3(x) * F.silu(self.w1(x)))
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class FusedGateMLP(nn.Module):
    """One projection for gate and up; ``form`` is how its halves are taken."""

    def __init__(self, dim: int, hidden: int, form: str) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden)
        self.down = nn.Linear(hidden, dim)
        self.form, self.hidden = form, hidden

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate_up(x)
        if self.form == "chunk":
            gate, up = y.chunk(2, dim=-1)
        elif self.form == "split":
            gate, up = y.split(self.hidden, dim=-1)
        elif self.form == "slices":
            gate, up = y[..., : self.hidden], y[..., self.hidden :]
        elif self.form == "unbind":
            gate, up = y.unflatten(-1, (2, -1)).unbind(-2)
        elif self.form == "second":
            up, gate = y.chunk(2, dim=-1)
        elif self.form == "glu":
            return self.down(F.glu(y, dim=-1))
        else:  # interleaved
            gate, up = y[..., ::2], y[..., 1::2]
        return self.down(F.gelu(gate) * up)


class FunctionalMLP(nn.Module):
    """Everything functional, dropouts included."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc1(x), approximate="tanh")
        h = F.dropout(h, p=0.3, training=self.training)
        return F.dropout(self.fc2(h), 0.2, self.training)


class InlineBlock(nn.Module):
    """Norm, attention module, and an MLP written in the block's own forward."""

    def __init__(self, dim: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = NanoGPTAttention(dim, heads, flash=True)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(self.drop(self.act(self.fc1(self.norm2(x)))))


class PlainGPT(nn.Module):
    """A small language model around blocks, with tied or separate output weights."""

    def __init__(
        self, blocks: list[nn.Module], dim: int = 16, vocab: int = 37, *, tied: bool
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(16, dim)
        self.h = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))
