"""The graphs of the encoders, as the engine builds them for one picture, so that the buffer they take is known without the engine.

Source: clip.cpp and models/*.cpp of the pinned engine's tools/mtmd. Positions, rotations and reshapes are here for when they live; numbers are not.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ..errors import MetadataError
from .eye import Eye, number
from .graph import Graph, Node, shape
from .header import Tensor

_SWAPPED: Final = frozenset(("mlp", "ldp", "ldpv2", "qwen2vl_merger", "qwen2.5vl_merger", "exaone4_5", "adapter", "gemma3", "idefics3", "resampler", "minicpmv4_6"))


class Encoder:
    """Builds the graph of one projector; one object a graph."""

    def __init__(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor], eye: Eye, size: tuple[int, int], n_frames: int, flash: bool) -> None:
        self.header, self.tensors, self.eye, self.flash, self.n_frames = header, tensors, eye, flash, n_frames
        self.g = Graph()
        self.width, self.height = size
        self.nx, self.ny = size[0] // eye.patch, size[1] // eye.patch
        self.n = self.nx * self.ny
        self.e = number(header, "clip.vision.embedding_length", least=1, most=1 << 20)
        self.heads = number(header, "clip.vision.attention.head_count", least=1, most=4096)
        self.heads_kv = number(header, "clip.vision.attention.head_count_kv", self.heads, least=1, most=4096)
        self.head = number(header, "clip.vision.attention.head_dim", 0, most=1 << 16) or self.e // self.heads
        self.n_layer = number(header, "clip.vision.block_count", most=1024)
        self._weights: dict[str, Node] = {}

    # --------------------------------------------------------------------------------------------------------------- pieces

    def has(self, name: str) -> bool:
        return name in self.tensors

    def w(self, name: str) -> Node:
        if name not in self.tensors:
            raise MetadataError(f"the projector has no tensor {name!r}")
        if name not in self._weights:
            self._weights[name] = Node("weight", shape(self.tensors[name].shape), 4, is_weight=True)
        return self._weights[name]

    def mm(self, name: str, x: Node, *, biased: bool = True) -> Node:
        if self.eye.kind == "gemma4v":  # whose linear layers clip what goes in and comes out
            x = self.g.like("clamp", self.g.matmul(self.w(name + ".weight"), self.g.like("clamp", x)))
        else:
            x = self.g.matmul(self.w(name + ".weight"), x)
        return self.g.like("add", x, self.w(name + ".bias")) if biased and self.has(name + ".bias") else x

    def norm(self, x: Node, name: str, kind: str = "norm") -> Node:
        x = self.g.like(kind, x)
        for end, op in ((".weight", "mul"), (".bias", "add")):
            if self.has(name + end):
                x = self.g.like(op, x, self.w(name + end))
        return x

    def ffn(self, x: Node, up: str, down: str, gate: str = "", split: bool = True) -> Node:
        tmp = self.mm(up, x)
        cur = self.mm(gate, x) if gate and self.has(gate + ".weight") else None
        x = self.g.like("glu" if split else "unary", cur, tmp) if cur is not None else self.g.like("unary", tmp)
        return self.mm(down, x)

    def raw(self) -> Node:
        return self.g.leaf(self.width, self.height, 3, self.n_frames)

    def conv(self, name: str, x: Node, stride: int) -> Node:
        kernel = self.w(name)
        kw, kh, channels, out = kernel.ne
        x_n, y_n = (x.ne[0] - kw) // stride + 1, (x.ne[1] - kh) // stride + 1
        wide = 4 if self.tensors[name].type == "BF16" else 2
        columns = self.g.make("im2col", (channels * kh * kw, x_n, y_n, x.ne[3]), kernel, x, width=wide)
        flat = self.g.view(columns, columns.ne[0], x_n * y_n * x.ne[3])
        y = self.g.make("mul_mat", (flat.ne[1], out), flat, self.g.view(kernel, kw * kh * channels, out))
        return self.cont(self.g.view(self.g.view(y, x_n, y_n, x.ne[3], out), x_n, y_n, out, x.ne[3]))

    def cont(self, x: Node, *ne: int) -> Node:
        return self.g.make("cont", ne or x.ne, x)

    def patches(self) -> Node:
        x = self.g.view(self.conv("v.patch_embd.weight", self.raw(), self.eye.patch), self.n, self.e, self.n_frames)
        x = self.cont(self.g.view(x, self.e, self.n, self.n_frames))
        return self.g.like("add", x, self.w("v.patch_embd.bias")) if self.has("v.patch_embd.bias") else x

    def positions(self) -> Node:
        """The learned ones, scaled to the picture where they must."""
        table = self.w("v.position_embd.weight")
        side = int(table.ne[1] ** 0.5)
        if (self.nx, self.ny) == (side, side):
            return table
        x = self.g.view(self.g.view(table, self.e, side, side), side, side, self.e)
        x = self.g.make("upscale", (self.nx, self.ny, self.e), x)
        return self.cont(self.g.view(x, self.e, self.nx, self.ny), self.e, self.n)

    def beside(self, *rows: Node) -> Node:
        x = rows[0]
        for more in rows[1:]:
            x = self.g.make("concat", (x.ne[0] + more.ne[0], *x.ne[1:]), x, more)
        return x

    def below(self, x: Node, more: Node) -> Node:
        return self.g.make("concat", (x.ne[0], x.ne[1] + more.ne[1], *x.ne[2:]), x, more)

    def folded(self, x: Node) -> Node:
        """Patches that will be merged, side by side."""
        x = self.cont(x, self.e * 2, self.nx // 2, self.ny)
        x = self.g.view(self.g.view(x, self.e * 2, self.nx // 2, 2, self.ny // 2), self.e * 2, 2, self.nx // 2, self.ny // 2)
        return self.cont(x, self.e, self.n)

    def attention(self, name: str, q: Node, k: Node, v: Node, mask: Node | None = None) -> Node:
        g = self.g
        for node in (q, k, v):
            g.expand(node)
        q, k = (g.view(x, x.ne[0], x.ne[2], x.ne[1], x.ne[3]) for x in (q, k))
        if self.flash:
            k, v = (g.make("cast", x.ne, x, width=2) for x in (k, g.view(v, v.ne[0], v.ne[2], v.ne[1], v.ne[3])))
            masks = (g.make("cast", mask.ne, mask, width=2),) if mask is not None else ()
            x = g.make("flash", (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), q, k, v, *masks)
            x = g.view(x, x.ne[0] * x.ne[1], x.ne[2] * x.ne[3])
        else:
            v = self.cont(g.view(v, v.ne[2], v.ne[0], v.ne[1], v.ne[3]))
            x = g.make("mul_mat", (k.ne[1], q.ne[1], q.ne[2], q.ne[3]), k, q)
            x = g.like("soft_max", x, *((mask,) if mask is not None else ()))
            x = g.make("mul_mat", (v.ne[1], x.ne[1], x.ne[2], x.ne[3]), v, x)
            x = g.view(x, x.ne[0], x.ne[2], x.ne[1], x.ne[3])
            x = self.cont(x, x.ne[0] * x.ne[1], x.ne[2] * x.ne[3])
        return self.mm(name, x) if self.has(name + ".weight") else x

    def block_ffn(self, x: Node, at: str) -> Node:
        up, down = at + "ffn_up", at + "ffn_down"
        if self.eye.kind in _SWAPPED and self.w(down + ".weight").ne[0] == self.e:
            up, down = down, up
        return self.ffn(x, up, down, at + "ffn_gate")

    def heads_of(self, x: Node, heads: int, n: int) -> Node:
        return self.g.view(x, self.head, heads, n)

    def qkv(self, x: Node, at: str, n: int, kind: str) -> tuple[Node, Node, Node]:
        if self.has(at + "attn_qkv.weight"):
            x = self.mm(at + "attn_qkv", x)
            heads = self.heads_kv if self.eye.kind == "exaone4_5" else self.heads
            parts = [self.heads_of(x, count, n) for count in (self.heads, heads, heads)]
            return self._normed(parts, at, kind)
        parts = [self.mm(at + "attn_" + letter, x) for letter in "qkv"]
        is_early = self.has(at + "attn_q_norm.weight") and self.w(at + "attn_q_norm.weight").ne[0] != self.head
        if is_early:
            parts = list(self._normed(parts, at, kind))
        parts = [self.heads_of(x, heads, n) for x, heads in zip(parts, (self.heads, self.heads_kv, self.heads_kv), strict=True)]
        return (parts[0], parts[1], parts[2]) if is_early else self._normed(parts, at, kind)

    def _normed(self, parts: list[Node], at: str, kind: str) -> tuple[Node, Node, Node]:
        q, k = (self.norm(x, f"{at}attn_{letter}_norm", kind) if self.has(f"{at}attn_{letter}_norm.weight") else x for x, letter in zip(parts, "qk", strict=False))
        return q, k, parts[2]

    def vit(self, x: Node, n: int, kind: str = "norm", learned: Node | None = None, rope: Callable[[Node], Node] | None = None, after: Callable[[Node, int], None] | None = None,
            mask: Callable[[int], Node | None] = lambda _: None, value: str = "", n_layer: int | None = None, *, has_post: bool = True) -> Node:
        g = self.g
        if learned is not None:
            x = g.like("add", x, learned)
        x = g.view(x, self.e, n * x.ne[2])
        if self.has("v.pre_ln.weight"):
            x = self.norm(x, "v.pre_ln", kind)
        for i in range(self.n_layer if n_layer is None else n_layer):
            at = f"v.blk.{i}."
            q, k, v = self.qkv(self.norm(x, at + "ln1", kind), at, n, kind)
            if rope is not None:
                q, k = rope(q), rope(k)
            if value:
                v = g.like(value, v)
            cur = self.attention(at + "attn_out", q, k, v, mask(i))
            x = self.block_end(x, cur, at, kind)
            if after is not None:
                after(x, i)
        if has_post and self.has("v.post_ln.weight"):
            x = self.norm(x, "v.post_ln", kind)
        return x

    def block_end(self, x: Node, cur: Node, at: str, kind: str) -> Node:
        g = self.g
        if self.has(at + "ls1.weight"):
            cur = g.like("mul", cur, self.w(at + "ls1.weight"))
        if self.has(at + "attn_post_norm.weight"):
            cur = self.norm(cur, at + "attn_post_norm", kind)
        x = g.like("add", cur, x)
        cur = self.block_ffn(self.norm(x, at + "ln2", kind), at)
        if self.has(at + "ffn_post_norm.weight"):
            cur = self.norm(cur, at + "ffn_post_norm", kind)
        if self.has(at + "ls2.weight"):
            cur = g.like("mul", cur, self.w(at + "ls2.weight"))
        x = g.like("add", x, cur)
        return g.like("mul", x, self.w(at + "out_scale.weight")) if self.has(at + "out_scale.weight") else x

    def multi_rope(self) -> Callable[[Node], Node]:
        places = self.g.leaf(self.n * 4)
        return lambda x: self.g.like("rope", x, places)

    def rope_2d(self, n: int) -> Callable[[Node], Node]:
        first, second = self.g.leaf(n), self.g.leaf(n)
        return lambda x: self.g.like("rope", self.g.like("rope", x, first), second)

    def shuffled(self, x: Node, s: int) -> Node:
        """``build_patch_merge_permute``."""
        g = self.g
        wide, high = -(-self.nx // s) * s, -(-self.ny // s) * s
        width = x.ne[0]
        x = g.view(x, width, self.nx, self.ny)
        if (wide, high) != (self.nx, self.ny):
            x = g.make("pad", (width, wide, high), x)
        x = g.view(g.view(x, width * s, wide // s, high), width * s, high, wide // s)
        x = self.cont(x, width * s * s, high // s, wide // s)
        return self.cont(g.view(x, width * s * s, wide // s, high // s), width * s * s, (wide // s) * (high // s))
