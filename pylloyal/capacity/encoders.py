"""One graph for each kind of projector."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .encoder import Encoder
from .eye import MERGING, Eye
from .graph import Node
from .header import Tensor


def encoder_bytes(header: Mapping[str, Any], tensors: Mapping[str, Tensor], eye: Eye, size: tuple[int, int], flash: bool, n_frames: int = 1) -> int | None:
    """Bytes of the buffer the graph takes for a picture as it reaches the encoder; None when the graph of this kind is not written down here."""
    build = GRAPHS.get(eye.kind)
    if build is None or size[0] < eye.patch or size[1] < eye.patch:
        return None
    encoder = Encoder(header, tensors, eye, size, n_frames if eye.kind in MERGING else 1, flash)
    encoder.g.expand(build(encoder))
    return encoder.g.buffer_bytes()


def _pair_of_convolutions(b: Encoder) -> Node:
    raw = b.raw()
    frames = (raw, raw) if b.n_frames == 1 else (b.g.view(raw, b.width, b.height, 3), b.g.view(raw, b.width, b.height, 3))
    x = b.g.like("add", b.conv("v.patch_embd.weight", frames[0], b.eye.patch), b.conv("v.patch_embd.weight.1", frames[1], b.eye.patch))
    return b.folded(b.g.view(x, b.e, b.nx, b.ny))


def _qwen2vl(b: Encoder) -> Node:
    g = b.g
    kind = "rms_norm" if b.eye.kind == "qwen2.5vl_merger" else "norm"
    x = _pair_of_convolutions(b)
    rope = b.multi_rope()
    pattern = b.header.get("clip.vision.n_wa_pattern", 0)
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
        q, k, v = (b.heads_of(b.mm(at + "attn_" + letter, cur), b.heads, b.n) for letter in "qkv")
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
            deep = [_beside(b, *deep, feature)]
    if b.has("v.post_ln.weight"):
        x = b.norm(x, "v.post_ln")
    return _beside(b, b.ffn(g.view(x, b.e * 4, b.n // 4), "mm.0", "mm.2"), *deep)


def _beside(b: Encoder, *rows: Node) -> Node:
    x = rows[0]
    for more in rows[1:]:
        x = b.g.make("concat", (x.ne[0] + more.ne[0], *x.ne[1:]), x, more)
    return x


def _below(b: Encoder, x: Node, more: Node) -> Node:
    return b.g.make("concat", (x.ne[0], x.ne[1] + more.ne[1], *x.ne[2:]), x, more)


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
        x = g.view(_below(b, g.view(x, x.ne[0], wide, high), token), x.ne[0], wide * high + high - 1)
    return x


def _kimivl(b: Encoder) -> Node:
    g, m = b.g, b.eye.merge
    rope, learned = b.rope_2d(b.n), b.positions()
    x = b.shuffled(b.vit(b.patches(), b.n, learned=learned, rope=rope), m)
    wide = x.ne[0]
    x = b.norm(g.view(x, b.e, x.ne[1] * m * m), "mm.input_norm")
    return b.ffn(g.view(x, wide, x.ne[1] // m // m), "mm.1", "mm.2")


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


def _llava(b: Encoder) -> Node:
    """Up to the second to last layer, or to the deepest one that is named."""
    g = b.g
    features = [int(i) for i in b.header.get("clip.vision.feature_layer", ()) if isinstance(i, int)]
    deepest = max([*features, -1])
    last = b.n_layer - 1 if deepest < 0 else min(deepest, b.n_layer)
    x = b.patches()
    n = b.n + b.has("v.class_embd")
    if b.has("v.class_embd"):
        x = _below(b, x, b.w("v.class_embd"))
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
    x = _beside(b, *kept) if kept else x
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
    x = _below(b, b.patches(), first)
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
    x = b.vit(_below(b, x, b.w("v.class_embd")), n, learned=b.w("v.position_embd.weight"), rope=rope)
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
    both = [_beside(b, g.like("sin", a), g.like("cos", a)) for a in angles]
    k = g.like("add", v, _beside(b, *both))
    q, k, v = (b.mm(f"resampler.attn.{letter}", y) for letter, y in (("q", q), ("k", k), ("v", v)))
    q, k, v = (g.view(y, 128, wide // 128, y.ne[1]) for y in (q, k, v))
    x = b.norm(b.attention("resampler.attn.out", q, k, v), "resampler.ln_post")
    return b.mm("resampler.proj", x, biased=False)


GRAPHS: dict[str, Callable[[Encoder], Node]] = {
    "qwen2vl_merger": _qwen2vl, "qwen2.5vl_merger": _qwen2vl, "qwen3vl_merger": _qwen3vl,
    "gemma3": _siglip(_gemma3), "idefics3": _siglip(lambda b, x: b.mm("mm.model.fc", b.shuffled(x, b.eye.merge), biased=False)), "lfm2": _siglip(_lfm2, scaled=True),
    "janus_pro": _siglip(lambda b, x: b.ffn(x, "mm.0", "mm.1")), "phi4": _siglip(lambda b, x: b.ffn(x, "mm.0", "mm.2"), scaled=True),
    "pixtral": _pixtral, "lightonocr": _pixtral, "kimivl": _kimivl, "paddleocr": _paddle, "dots_ocr": _dots, "glm4v": _glm4v, "glm5v": _glm4v, "mlp": _llava, "internvl": _internvl, "llama4": _llama4,
    "nemotron_v2_vl": _nemotron, "resampler": _resampler,
}
