"""Graphs of encoders that take pictures of any shape."""
from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .encoder import Encoder
from .eye import number, numbers
from .graph import Node


def _pair_of_convolutions(b: Encoder) -> Node:
    raw = b.raw()
    frames = (raw, raw) if b.n_frames == 1 else (b.g.view(raw, b.width, b.height, 3), b.g.view(raw, b.width, b.height, 3))
    x = b.g.like("add", b.conv("v.patch_embd.weight", frames[0], b.eye.patch), b.conv("v.patch_embd.weight.1", frames[1], b.eye.patch))
    return b.folded(b.g.view(x, b.e, b.nx, b.ny))


def _qwen2vl(b: Encoder) -> Node:
    g = b.g
    kind = "norm" if b.eye.kind == "qwen2vl_merger" else "rms_norm"
    x = _pair_of_convolutions(b)
    rope = b.multi_rope()
    pattern = number(b.header, "clip.vision.n_wa_pattern", None if b.eye.kind == "qwen2.5vl_merger" else 0)
    mask: Node | None = None
    if b.has("v.pre_ln.weight"):
        x = b.norm(x, "v.pre_ln", kind)
    if pattern:
        order = g.leaf(b.n // 4)
        mask = g.leaf(b.n, b.n)
        if b.flash:
            mask = g.make("cast", mask.ne, mask, width=2)
        x = g.make("get_rows", (b.e * 4, b.n // 4), g.view(x, b.e * 4, b.n // 4), order)
        x = g.view(x, b.e, b.n)
    for i in range(b.n_layer):
        at = f"v.blk.{i}."
        cur = b.norm(x, at + "ln1", kind)
        q, k, v = b.qkv(cur, at, b.n, kind)
        cur = b.attention(at + "attn_out", rope(q), rope(k), v, mask if pattern and (i + 1) % pattern else None)
        x = g.like("add", cur, x)
        x = g.like("add", x, b.block_ffn(b.norm(x, at + "ln2", kind), at))
    if b.has("v.post_ln.weight"):
        x = b.norm(x, "v.post_ln", kind)
    x = b.ffn(g.view(x, b.e * 4, b.n // 4), "mm.0", "mm.2")
    return g.view(g.make("get_rows", x.ne, x, g.leaf(b.n // 4)), *x.ne) if pattern else x


def _qwen3vl(b: Encoder) -> Node:
    g, deep = b.g, list[Node]()
    x = _pair_of_convolutions(b)
    x = g.like("add", x, b.w("v.patch_embd.bias"))
    x = g.like("add", x, b.folded(b.positions()))
    rope = b.multi_rope()
    if b.has("v.pre_ln.weight"):
        x = b.norm(x, "v.pre_ln")
    merged = b.eye.merge * b.eye.merge
    for i in range(b.n_layer):
        at = f"v.blk.{i}."
        q, k, v = b.qkv(b.norm(x, at + "ln1"), at, b.n, "norm")
        x = g.like("add", b.attention(at + "attn_out", rope(q), rope(k), v), x)
        x = g.like("add", x, b.block_ffn(b.norm(x, at + "ln2"), at))
        if b.has(f"v.deepstack.{i}.fc1.weight"):
            feature = b.norm(g.view(x, b.e * merged, b.n // merged), f"v.deepstack.{i}.norm")
            feature = b.ffn(feature, f"v.deepstack.{i}.fc1", f"v.deepstack.{i}.fc2")
            deep = [b.beside(*deep, feature)]
    if b.has("v.post_ln.weight"):
        x = b.norm(x, "v.post_ln")
    return b.beside(b.ffn(g.view(x, b.e * 4, b.n // 4), "mm.0", "mm.2"), *deep)


def _ling3vl(b: Encoder) -> Node:
    x = _pair_of_convolutions(b)
    if b.has("v.patch_embd.bias"):
        x = b.g.like("add", x, b.w("v.patch_embd.bias"))
    learned = b.folded(b.positions())
    x = b.norm(b.vit(x, b.n, learned=learned, rope=b.multi_rope()), "mm.input_norm")
    return b.ffn(b.g.view(x, b.e * 4, b.n // 4), "mm.0", "mm.2")


def _pixtral(b: Encoder) -> Node:
    g, m = b.g, b.eye.merge
    rope = b.rope_2d(b.n)
    x = b.vit(b.patches(), b.n, "rms_norm", rope=rope)
    if b.has("mm.patch_merger.weight"):
        x = g.like("mul", g.like("rms_norm", x), b.w("mm.input_norm.weight"))
        x = b.cont(g.view(g.view(x, b.e, b.nx, b.ny), b.nx, b.ny, b.e))
        x = g.make("im2col", (m * m * b.e, b.nx // m, b.ny // m), g.view(x, m, m, b.e), x)
        x = b.mm("mm.patch_merger", g.view(x, x.ne[0], x.ne[1] * x.ne[2]), biased=False)
    x = b.ffn(x, "mm.1", "mm.2")
    if b.has("v.token_embd.img_break"):
        wide, high = b.nx // m, b.ny // m
        token = g.like("scale", g.leaf(x.ne[0], 1, high))
        token = g.like("add", token, b.w("v.token_embd.img_break"))
        x = g.view(b.below(g.view(x, x.ne[0], wide, high), token), x.ne[0], wide * high + high - 1)
    return x


def _kimivl(b: Encoder) -> Node:
    g, m = b.g, b.eye.merge
    rope, learned = b.rope_2d(b.n), b.positions()
    x = b.shuffled(b.vit(b.patches(), b.n, learned=learned, rope=rope), m)
    wide = x.ne[0]
    x = b.norm(g.view(x, b.e, x.ne[1] * m * m), "mm.input_norm")
    return b.ffn(g.view(x, wide, x.ne[1] // m // m), "mm.1", "mm.2")


def _kimik25(b: Encoder) -> Node:
    g, m = b.g, b.eye.merge
    rope, table = b.rope_2d(b.n), b.w("v.position_embd.weight")
    if table.ne[1:3] != (b.nx, b.ny):
        table = g.make("upscale", (b.ny, b.nx, b.e), g.view(table, table.ne[2], table.ne[1], b.e))
        table = g.view(table, b.e, b.nx, b.ny)
    x = g.like("add", b.patches(), b.cont(table, b.e, b.n))
    x = b.shuffled(b.vit(x, b.n, rope=rope), m)
    wide, rows = x.ne[0], x.ne[1]
    x = b.norm(g.view(x, b.e, rows * m * m), "mm.input_norm")
    return b.ffn(g.view(x, wide, rows), "mm.1", "mm.2")


def _paddle(b: Encoder) -> Node:
    rope, learned = b.multi_rope(), b.positions()
    x = b.norm(b.vit(b.patches(), b.n, learned=learned, rope=rope), "mm.input_norm")
    return b.ffn(b.shuffled(x, b.eye.merge), "mm.1", "mm.2")


def _dots(b: Encoder) -> Node:
    x = b.vit(b.patches(), b.n, "rms_norm", rope=b.multi_rope(), has_post=False)
    x = b.norm(b.g.like("mul", b.g.like("rms_norm", x), b.w("mm.post_norm.weight")), "mm.input_norm")
    return b.ffn(b.shuffled(x, b.eye.merge), "mm.0", "mm.2")


def _glm4v(b: Encoder) -> Node:
    g, m = b.g, b.eye.merge
    raw = b.raw()
    x = g.like("add", b.conv("v.patch_embd.weight", raw, b.eye.patch), b.conv("v.patch_embd.weight.1", raw, b.eye.patch))
    x = g.like("add", b.folded(g.view(x, b.e, b.nx, b.ny)), b.w("v.patch_embd.bias"))
    if b.has("v.norm_embd.weight"):
        x = b.norm(x, "v.norm_embd", "rms_norm")
    learned = b.folded(b.positions()) if b.has("v.position_embd.weight") else None
    x = b.vit(x, b.n, "rms_norm", learned=learned, rope=b.multi_rope())
    out = b.n // m // m
    x = b.conv("mm.patch_merger.weight", b.cont(g.view(g.view(x, b.e, m, m, out), m, m, b.e, out)), m)
    x = g.like("add", g.view(x, x.ne[2], out), b.w("mm.patch_merger.bias"))
    x = g.like("unary", b.norm(b.mm("mm.model.fc", x, biased=False), "mm.post_norm"))
    return b.ffn(x, "mm.up", "mm.down", "mm.gate")


def _gemma4(b: Encoder) -> Node:
    g, s = b.g, b.eye.merge
    x = g.view(b.conv("v.patch_embd.weight", g.like("scale", b.raw()), b.eye.patch), b.n, b.e)
    x = b.cont(g.view(x, b.e, b.n))
    across, down, table = g.leaf(b.n), g.leaf(b.n), b.w("v.position_embd.weight")
    for places in (across, down):
        x = g.like("add", x, g.make("get_rows", (b.e, b.n), g.view(table, b.e, table.ne[1]), places))
    x = b.vit(x, b.n, "rms_norm", rope=lambda y: g.like("rope", g.like("rope", y, across), down), value="rms_norm")
    x = g.make("pool", (b.nx // s, b.ny // s, b.e), b.cont(g.view(x, b.n, b.e), b.nx, b.ny, b.e))
    n = (b.nx // s) * (b.ny // s)
    x = g.like("scale", b.cont(g.view(g.view(x, n, b.e), b.e, n)))
    if b.has("v.std_bias") and b.has("v.std_scale"):
        x = g.like("mul", g.like("sub", x, b.w("v.std_bias")), b.w("v.std_scale"))
    return b.mm("mm.input_projection", g.like("rms_norm", x), biased=False)


def _hunyuan(b: Encoder) -> Node:
    g, m = b.g, b.eye.merge
    learned = g.leaf(b.e, b.n)
    x = b.norm(b.vit(b.patches(), b.n, learned=learned), "mm.pre_norm", "rms_norm")
    x = b.cont(g.view(g.view(x, b.e, b.nx, b.ny), b.nx, b.ny, b.e))
    x = g.like("add", b.conv("mm.0.weight", x, m), g.view(b.w("mm.0.bias"), 1, 1, b.w("mm.0.bias").ne[0]))
    x = g.like("unary", x)
    x = g.like("add", b.conv("mm.2.weight", x, 1), g.view(b.w("mm.2.bias"), 1, 1, b.w("mm.2.bias").ne[0]))
    wide, high, out = b.nx // m, b.ny // m, x.ne[2]
    line = g.make("repeat", (1, high, out), g.view(b.w("v.image_newline"), 1, 1, out))
    x = g.make("concat", (wide + 1, high, out), x, line)
    x = b.cont(g.view(x, out, wide + 1, high), out, (wide + 1) * high)
    x = b.mm("mm.model.fc", x)
    first, last = (g.view(b.w(f"mm.image_{end}"), x.ne[0], 1) for end in ("begin", "end"))
    return b.norm(b.below(b.below(first, x), last), "mm.post_norm", "rms_norm")


def _youtu(b: Encoder) -> Node:
    g, p, wide, high = b.g, b.eye.patch, b.nx // 2, b.ny // 2
    x = g.view(b.raw(), wide * 2 * p, 2 * p, high, 3)
    for ne in ((6 * p, wide, 2 * p, high), (6 * p, p, 2, high * wide), (p, 3, p, high * wide * 4), (3 * p * p, high * wide * 4)):
        x = b.cont(g.view(x, *x.ne), *ne)
    x = g.view(b.mm("v.patch_embd", x), b.e, b.n)
    rope, full, mask = b.multi_rope(), numbers(b.header, "clip.vision.wa_layer_indexes", most=1 << 20), None
    if b.has("v.pre_ln.weight"):
        x = b.norm(x, "v.pre_ln")
    if full:
        order, mask = g.leaf(b.n // 4), g.leaf(b.n, b.n)
        if b.flash:
            mask = g.make("cast", mask.ne, mask, width=2)
        x = g.view(g.make("get_rows", (b.e * 4, b.n // 4), g.view(x, b.e * 4, b.n // 4), order), b.e, b.n)
    for i in range(b.n_layer):
        at = f"v.blk.{i}."
        q, k, v = b.qkv(b.norm(x, at + "ln1"), at, b.n, "norm")
        x = g.like("add", b.attention(at + "attn_out", rope(q), rope(k), v, None if i in full else mask), x)
        x = g.like("add", x, b.block_ffn(b.norm(x, at + "ln2"), at))
    if full:
        x = g.view(g.make("get_rows", (b.e * 4, b.n // 4), g.view(x, b.e * 4, b.n // 4), g.leaf(b.n // 4)), b.e, b.n)
    if b.has("v.post_ln.weight"):
        x = b.norm(x, "v.post_ln")
    x = b.norm(x, "mm.input_norm", "rms_norm")
    return b.ffn(g.view(x, b.e * 4, b.n // 4), "mm.0", "mm.2")


GRAPHS: Final[dict[str, Callable[[Encoder], Node]]] = {
    "qwen2vl_merger": _qwen2vl, "qwen2.5vl_merger": _qwen2vl, "exaone4_5": _qwen2vl, "qwen3vl_merger": _qwen3vl, "ling3vl": _ling3vl, "pixtral": _pixtral, "lightonocr": _pixtral, "kimivl": _kimivl,
    "kimik25": _kimik25, "paddleocr": _paddle, "dots_ocr": _dots, "glm4v": _glm4v, "glm5v": _glm4v, "gemma4v": _gemma4, "hunyuanvl": _hunyuan, "youtuvl": _youtu,
}
