"""The model in torch, operation for operation what llama.cpp computes for `qwen2vl` (text) and `qwen2vl_merger` (tower and projector).

What is easy to get wrong: the engine ignores the RMS epsilon key of this architecture and uses 0; the feed-forward of the tower is quick GELU
where the file names none; the tower's tokens go in 2 x 2 blocks, and its rotary frequencies begin anew for x; in the text model they do not.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tokenizer import SIZE

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
PATCH, MERGE = 8, 2
N_LABELS = 22  # 18 objects, 3 backgrounds, and 0 that never occurs
GRID = 8  # rows or columns of tokens the auxiliary head can tell apart


@dataclass(frozen=True)
class Config:
    vocabulary: int = SIZE
    width: int = 128
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 384
    sections: tuple[int, int, int] = (4, 6, 6)  # pairs of a head turned by t, y, x
    rope_base: float = 100.0
    tower_width: int = 96
    tower_layers: int = 3
    tower_heads: int = 3
    tower_feed_forward: int = 384
    tower_epsilon: float = 1e-6

    @property
    def head(self) -> int:
        return self.width // self.heads


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs are (i, i + half)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """[n, heads, length, head] -> [n, length, width], in single precision: the backward pass of the half precision kernel is several times slower."""
    with torch.autocast("cpu", enabled=False):
        seen = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal)
    return seen.transpose(1, 2).flatten(2)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 0.0)


class TextLayer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads = c.heads, c.kv_heads
        self.attn_norm, self.ffn_norm = RMSNorm(c.width), RMSNorm(c.width)
        self.attn_q = nn.Linear(c.width, c.width)
        self.attn_k = nn.Linear(c.width, c.kv_heads * c.head)
        self.attn_v = nn.Linear(c.width, c.kv_heads * c.head)
        self.attn_output = nn.Linear(c.width, c.width, bias=False)
        self.ffn_gate = nn.Linear(c.width, c.feed_forward, bias=False)
        self.ffn_up = nn.Linear(c.width, c.feed_forward, bias=False)
        self.ffn_down = nn.Linear(c.feed_forward, c.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, length, _ = x.shape
        y = self.attn_norm(x)
        q = rotate(self.attn_q(y).view(n, length, self.heads, -1).transpose(1, 2), cos, sin)
        k = rotate(self.attn_k(y).view(n, length, self.kv_heads, -1).transpose(1, 2), cos, sin)
        v = self.attn_v(y).view(n, length, self.kv_heads, -1).transpose(1, 2)
        group = self.heads // self.kv_heads
        x = x + self.attn_output(attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), True))
        y = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(y)) * self.ffn_up(y))


class TowerLayer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        width = c.tower_width
        self.heads = c.tower_heads
        self.ln1, self.ln2 = nn.LayerNorm(width, c.tower_epsilon), nn.LayerNorm(width, c.tower_epsilon)
        self.attn_q, self.attn_k, self.attn_v, self.attn_out = (nn.Linear(width, width) for _ in range(4))
        self.ffn_up, self.ffn_down = nn.Linear(width, c.tower_feed_forward), nn.Linear(c.tower_feed_forward, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, length, _ = x.shape
        y = self.ln1(x)
        q, k, v = (f(y).view(n, length, self.heads, -1).transpose(1, 2) for f in (self.attn_q, self.attn_k, self.attn_v))
        x = x + self.attn_out(attention(rotate(q, cos, sin), rotate(k, cos, sin), v, False))
        y = self.ffn_up(self.ln2(x))
        return x + self.ffn_down(y * torch.sigmoid(1.702 * y))


class Tower(nn.Module):
    """Pairs of pictures [n, 2, height, width, 3], bytes -> tokens [n, (height / 16) * (width / 16), width of the text model], raster order."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.patch0 = nn.Linear(3 * PATCH * PATCH, c.tower_width, bias=False)
        self.patch1 = nn.Linear(3 * PATCH * PATCH, c.tower_width, bias=False)
        self.layers = nn.ModuleList(TowerLayer(c) for _ in range(c.tower_layers))
        self.post_ln = nn.LayerNorm(c.tower_width, c.tower_epsilon)
        block = c.tower_width * MERGE * MERGE
        self.mm0, self.mm2 = nn.Linear(block, block), nn.Linear(block, c.width)

    def forward(self, pixels: Tensor) -> Tensor:
        n, _, height, width, _ = pixels.shape
        rows, columns = height // PATCH, width // PATCH
        x = (pixels.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
        # Patches in 2 x 2 blocks; inside a patch channel, y, x: the order of the engine's convolution kernel.
        x = x.view(n, 2, rows // 2, 2, PATCH, columns // 2, 2, PATCH, 3).permute(0, 1, 2, 5, 3, 6, 8, 4, 7).reshape(n, 2, rows * columns, -1)
        x = self.patch0(x[:, 0]) + self.patch1(x[:, 1])
        y_of = torch.arange(rows).view(rows // 2, 1, 2, 1).expand(rows // 2, columns // 2, 2, 2).reshape(-1, 1)
        x_of = torch.arange(columns).view(1, columns // 2, 1, 2).expand(rows // 2, columns // 2, 2, 2).reshape(-1, 1)
        head = self.c.tower_width // self.c.tower_heads
        frequencies = 10000.0 ** (-torch.arange(head // 4) * 4 / head)
        angles = torch.cat([y_of * frequencies, x_of * frequencies], -1)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.post_ln(x).reshape(n, rows * columns // 4, -1)
        return self.mm2(F.gelu(self.mm0(x), approximate="tanh"))


class TinyVLM(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.token_embd = nn.Embedding(c.vocabulary, c.width)
        self.blk = nn.ModuleList(TextLayer(c) for _ in range(c.layers))
        self.output_norm = RMSNorm(c.width)
        self.tower = Tower(c)
        # Heads of the training alone: what each token shows in either frame, and, in the middle of the text model, where its M-RoPE position is.
        self.aux_object = nn.ModuleList(nn.Linear(c.width, N_LABELS) for _ in range(2))
        self.aux_place = nn.Linear(c.width, GRID * GRID)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.token_embd.weight, std=0.1)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if name.endswith(("attn_output.weight", "ffn_down.weight", "attn_out.weight")):
                    p.mul_(0.4)
                elif ".patch" in name:
                    p.mul_(0.5)

    def forward(self, ids: Tensor, positions: Tensor, image_id: int, images: Tensor | None) -> tuple[Tensor, Tensor]:
        """`ids` [n, length], `positions` [3, n, length] (t, y, x), `images` [tokens, width] for the slots of `image_id` -> hidden states, and those of the middle."""
        x = self.token_embd(ids)
        if images is not None:
            x = x.masked_scatter((ids == image_id)[..., None], images.to(x.dtype))
        half = self.c.head // 2
        section = torch.repeat_interleave(torch.arange(3), torch.tensor(self.c.sections))
        angles = positions[section].permute(1, 2, 0) * self.c.rope_base ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        middle = x
        for i, layer in enumerate(self.blk):
            x = layer(x, cos, sin)
            if i == self.c.layers // 2 - 1:
                middle = x
        return self.output_norm(x), middle

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.token_embd.weight)


def numbers_of(state: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """A state as numpy arrays, the heads of the training left out."""
    return {name: x.detach().float().numpy() for name, x in state.items() if not name.startswith("aux")}
