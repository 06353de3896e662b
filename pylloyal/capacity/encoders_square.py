"""Graphs of encoders of squares, tiles and slices, and of those built like them."""
from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .encoder import Encoder
from .eye import numbers
from .graph import Node


def _siglip(tail: Callable[[Encoder, Node], Node], *, scaled: bool = False) -> Callable[[Encoder], Node]:
    def build(b: Encoder) -> Node:
        return tail(b, b.vit(b.patches(), b.n, learned=b.positions() if scaled else b.w("v.position_embd.weight")))

    return build


def _gemma3(b: Encoder, x: Node) -> Node:
    g, s = b.g, b.eye.merge
    x = b.cont(g.view(x, b.n, b.e), b.nx, b.nx, b.e)
    x = g.make("pool", (b.nx // s, b.nx // s, b.e), x)
    n = (b.nx // s) ** 2
    x = b.cont(g.view(g.view(x, n, b.e), b.e, n))
    x = g.like("mul", g.like("rms_norm", x), b.w("mm.soft_emb_norm.weight"))
    weight = b.w("mm.input_projection.weight")
    turned = b.cont(g.view(weight, weight.ne[1], weight.ne[0]))
    return g.make("mul_mat", (turned.ne[1], x.ne[1]), turned, x)


def _lfm2(b: Encoder, x: Node) -> Node:
    x = b.shuffled(x, b.eye.merge) if b.eye.merge > 1 else x
    if b.has("mm.input_norm.weight"):
        x = b.norm(x, "mm.input_norm")
    return b.ffn(x, "mm.1", "mm.2")


def _llava(b: Encoder) -> Node:
    """Up to the second to last layer, or to the deepest one that is named."""
    g = b.g
    features = numbers(b.header, "clip.vision.feature_layer", most=b.n_layer)
    deepest = max([*features, -1])
    last = b.n_layer - 1 if deepest < 0 else deepest
    x = b.patches()
    n = b.n + b.has("v.class_embd")
    if b.has("v.class_embd"):
        x = b.below(x, b.w("v.class_embd"))
    places = g.leaf(n)
    x = g.like("add", x, g.make("get_rows", (b.e, n), b.w("v.position_embd.weight"), places))
    kept: list[Node] = []
    if b.has("v.pre_ln.weight"):
        x = b.norm(x, "v.pre_ln")
    for i in range(last):
        if i in features:
            kept.append(x)
        at = f"v.blk.{i}."
        cur = b.norm(x, at + "ln1")
        q, k, v = (b.heads_of(b.mm(at + "attn_" + letter, cur), b.heads, n) for letter in "qkv")
        x = g.like("add", b.attention(at + "attn_out", q, k, v), x)
        x = g.like("add", x, b.block_ffn(b.norm(x, at + "ln2"), at))
    if b.has("v.post_ln.weight"):
        x = b.norm(x, "v.post_ln")
    if last in features:
        kept.append(x)
    x = b.beside(*kept) if kept else x
    x = g.make("get_rows", (x.ne[0], b.n), g.view(x, x.ne[0], x.ne[1]), g.leaf(b.n))
    x = b.mm("mm.0", x)
    if b.has("mm.3.weight"):
        x = g.like("add", g.like("mul", g.like("norm", x), b.w("mm.1.weight")), b.w("mm.1.bias"))
        x = b.mm("mm.3", g.like("unary", x))
        return g.like("add", g.like("mul", g.like("norm", x), b.w("mm.4.weight")), b.w("mm.4.bias"))
    x = g.like("unary", x)
    return b.mm("mm.2", x) if b.has("mm.2.weight") else x


def _internvl(b: Encoder) -> Node:
    g, s = b.g, b.eye.merge
    first = g.make("repeat", (b.e, 1, 1), b.w("v.class_embd"))
    x = b.below(b.patches(), first)
    kind = "rms_norm" if (b.e, b.n_layer) == (3200, 45) else "norm"
    x = b.vit(x, b.n + 1, kind, learned=b.w("v.position_embd.weight"))
    x = b.cont(g.view(x, b.e, b.n))
    x = g.view(g.view(x, b.e * s, b.ny // s, b.nx), b.e * s, b.nx, b.ny // s)
    x = b.cont(x, b.e * s * s, b.ny // s, b.nx // s)
    x = b.cont(g.view(x, b.e * s * s, b.nx // s, b.ny // s), b.e * s * s, (b.ny // s) * (b.nx // s))
    return b.ffn(b.norm(x, "mm.model.mlp.0"), "mm.model.mlp.1", "mm.model.mlp.3")


def _llama4(b: Encoder) -> Node:
    g, s, n = b.g, b.eye.merge, b.n + 1
    rope, raw = b.rope_2d(n), b.raw()
    kernel = g.view(b.w("v.patch_embd.weight"), b.eye.patch, b.eye.patch, 3, b.e)
    x = g.make("im2col", (b.eye.patch * b.eye.patch * 3, b.nx, b.ny), kernel, raw)
    x = g.view(g.make("mul_mat", (b.e, b.nx, b.ny), b.w("v.patch_embd.weight"), x), b.e, b.n)
    x = b.vit(b.below(x, b.w("v.class_embd")), n, learned=b.w("v.position_embd.weight"), rope=rope)
    x = g.view(g.view(g.view(x, b.e, b.n), b.e * s, b.nx // s, b.ny), b.e * s, b.ny, b.nx // s)
    x = b.cont(b.cont(x, b.e * s * s, b.nx // s, b.ny // s), b.e * s * s, b.n // s // s)
    for name in ("mm.model.mlp.1", "mm.model.mlp.2"):
        x = g.like("unary", b.mm(name, x, biased=False))
    return b.mm("mm.model.fc", x, biased=False)


def _nemotron(b: Encoder) -> Node:
    g = b.g
    extra = b.w("v.class_embd")
    x = g.like("add", b.patches(), b.w("v.position_embd.weight"))
    x = g.make("concat", (b.e, b.n + extra.ne[1]), extra, x)
    x = g.view(b.vit(x, b.n + extra.ne[1]), b.e, b.n)
    x = b.norm(b.shuffled(x, b.eye.merge), "mm.model.mlp.0", "rms_norm")
    x = g.like("sqr", g.like("unary", b.mm("mm.model.mlp.1", x, biased=False)))
    return b.mm("mm.model.mlp.3", x, biased=False)


def _resampler(b: Encoder) -> Node:
    g, n = b.g, b.n
    query = b.w("resampler.query")
    wide = b.w("resampler.proj.weight").ne[0]
    omega, high, across, places = g.leaf(wide // 4), g.leaf(1, n), g.leaf(1, n), g.leaf(n)
    learned = g.make("get_rows", (b.e, n), b.w("v.position_embd.weight"), places)
    x = b.vit(b.patches(), n, learned=learned)
    v = g.matmul(b.w("resampler.kv.weight"), x)
    q, v = b.norm(query, "resampler.ln_q"), b.norm(v, "resampler.ln_kv")
    spread = g.make("repeat", (wide // 4, n), omega)
    angles = (g.like("mul", spread, across), g.like("mul", spread, high))
    both = [b.beside(g.like("sin", a), g.like("cos", a)) for a in angles]
    k = g.like("add", v, b.beside(*both))
    q, k, v = (b.mm(f"resampler.attn.{letter}", y) for letter, y in (("q", q), ("k", k), ("v", v)))
    q, k, v = (g.view(y, 128, wide // 128, y.ne[1]) for y in (q, k, v))
    x = b.norm(b.attention("resampler.attn.out", q, k, v), "resampler.ln_post")
    return b.mm("resampler.proj", x, biased=False)


def _cogvlm(b: Encoder) -> Node:
    g, n = b.g, b.n + 1
    x = g.like("add", b.below(b.patches(), b.w("v.class_embd")), b.w("v.position_embd.weight"))
    for i in range(b.n_layer):
        at = f"v.blk.{i}."
        cur = b.attention(at + "attn_out", *b.qkv(x, at, n, "norm"))
        x = g.like("add", b.norm(cur, at + "ln1"), x)
        x = g.like("add", b.norm(b.block_ffn(x, at), at + "ln2"), x)
    x = b.norm(b.mm("mm.model.fc", g.view(x, b.e, b.n), biased=False), "mm.post_fc_norm")
    x = g.view(x, *x.ne)  # a function computed in place
    up, gate = b.mm("mm.up", x, biased=False), b.mm("mm.gate", x, biased=False)
    x = b.mm("mm.down", g.like("glu", gate, up), biased=False)
    return b.below(b.below(b.w("v.boi"), x), b.w("v.eoi"))


def _minicpm46(b: Encoder) -> Node:
    """Four patches become one within the tower (unless that is left out), and four of those behind it."""
    g, n = b.g, b.n
    fewer = (b.nx // 2) * (b.ny // 2)

    def layers(x: Node, first: int, last: int, n: int) -> Node:
        for i in range(first, last):
            at = f"v.blk.{i}."
            q, k, v = b.qkv(b.norm(x, at + "ln1"), at, n, "norm")
            x = b.block_end(x, b.attention(at + "attn_out", q, k, v), at, "norm")
        return x

    def quarters(x: Node, n: int) -> list[Node]:
        return [g.make("get_rows", (b.e, n), x, g.leaf(n)) for _ in range(4)]

    x = g.like("add", b.patches(), g.make("get_rows", (b.e, n), b.w("v.position_embd.weight"), g.leaf(n)))
    if b.has("v.pre_ln.weight"):
        x = b.norm(x, "v.pre_ln")
    if b.eye.merge == 2:
        x, out = layers(x, 0, b.n_layer, n), fewer
    else:
        at = [*numbers(b.header, "clip.vision.wa_layer_indexes", most=b.n_layer), 0][0] + 1
        mask = g.leaf(n, n)
        mask = g.make("cast", mask.ne, mask, width=2) if b.flash else mask
        x = layers(x, 0, at, n)
        cur = g.make("get_rows", (b.e, n), b.norm(x, "v.vit_merger.ln1"), g.leaf(n))
        q, k, v = (b.heads_of(b.mm(f"v.vit_merger.attn_{letter}", cur), b.heads, n) for letter in "qkv")
        cur = b.attention("v.vit_merger.attn_out", q, k, v, mask)
        x = g.like("add", g.make("get_rows", (b.e, n), cur, g.leaf(n)), x)
        parts = quarters(x, fewer)
        mean = parts[0]
        for part in parts[1:]:
            mean = g.like("add", mean, part)
        mean = g.like("scale", mean)
        cur = b.ffn(b.norm(b.beside(*parts), "v.vit_merger.ds_ln"), "v.vit_merger.ds_ffn_up", "v.vit_merger.ds_ffn_down")
        x, out = layers(g.like("add", cur, mean), at, b.n_layer, fewer), (b.ny // 4) * (b.nx // 4)
    if b.has("v.post_ln.weight"):
        x = b.norm(x, "v.post_ln")
    return b.ffn(b.norm(b.beside(*quarters(x, out)), "mm.input_norm"), "mm.up", "mm.down")


GRAPHS: Final[dict[str, Callable[[Encoder], Node]]] = {
    "gemma3": _siglip(_gemma3), "idefics3": _siglip(lambda b, x: b.mm("mm.model.fc", b.shuffled(x, b.eye.merge), biased=False)), "lfm2": _siglip(_lfm2, scaled=True),
    "janus_pro": _siglip(lambda b, x: b.ffn(x, "mm.0", "mm.1")), "phi4": _siglip(lambda b, x: b.ffn(x, "mm.0", "mm.2"), scaled=True), "mlp": _llava, "internvl": _internvl, "llama4": _llama4,
    "nemotron_v2_vl": _nemotron, "resampler": _resampler, "minicpmv4_6": _minicpm46, "cogvlm": _cogvlm,
}
