"""How large the compute buffer of a context can be, offline: never less than what the engine takes on one device, the CPU.

The engine lays out one graph, of a dispatch of ``n_ubatch`` tokens from every sequence with every cell in use, and takes its size. For
the plain architectures that graph is followed here tensor by tensor (:mod:`.layouts`, :mod:`.blocks`, :mod:`.allocator`), which gives
the engine's figure to the byte; where Q, K and V may be one tensor or three and nothing tells which, the larger is said. The others are
bounded term by term (:mod:`.terms`). Both are asked for a dispatch of one sequence as well, which some graphs need more for and the
engine's own dry run leaves out.

Not in it: the CPU's scratch beside the buffer, allocated at the first decode, is :func:`work_bound`; the output buffer and everything a
context keeps is :mod:`.memory`; adapters, samplers inside the graph and encoders of other media are no part of a plan's context.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from .allocator import Node
from .architectures import ARCHITECTURES
from .blocks import Blocks
from .geometry import Geometry
from .hyperparameters import Hyperparameters
from .layouts import LAYOUTS, Layout
from .settings import _ROWS, Context, Settings, window_cells
from .terms import Terms

_MOST_LAYERS: Final = 14  # followed one by one: what repeats does not change the layout any more


def compute_bound(geometry: Geometry, metadata: Mapping[str, Any], made: Context, settings: Settings) -> int:
    """Bytes that the compute buffer never exceeds, all layers on the CPU.

    Parameters
    ----------
    geometry : Geometry
    metadata : Mapping
        What ``geometry`` was made of.
    made : Context
        What :func:`.settings.context` makes of the settings.
    settings : Settings

    Raises
    ------
    MetadataError
        A key that the architecture needs is missing.
    """
    layout = LAYOUTS[geometry.architecture] if is_followed(geometry, metadata) else None
    sequences = {settings.n_branches, 1}
    if layout is None:
        return max(Terms(geometry, metadata, made, settings, n).total() for n in sequences)
    if not settings.unified:
        sequences = {settings.n_branches}  # the graph of one sequence has its cells alone, and no more scores
    return max(_Followed(geometry, metadata, made, settings, form, n, is_fused).size() for n in sequences for form, is_fused in _forms(geometry.architecture, metadata, layout))


def _forms(architecture: str, metadata: Mapping[str, Any], layout: Layout) -> list[tuple[Layout, bool]]:
    """What files of the architecture differ in: norms, and whether Q, K and V are one tensor. What the file's tensors say, else all."""
    names = [tensor.name for tensor in getattr(metadata, "tensors", ())]
    layouts = [layout]
    if layout.residual == "twin":  # of falcon the larger ones have the second norm
        one = replace(layout, residual="parallel")
        layouts = [layout, one] if not names else [layout if any(".attn_norm_2." in name for name in names) else one]
    if architecture == "gptneox" and metadata.get("gptneox.use_parallel_residual") is False:
        layouts = [replace(layout, residual="pre")]
    fused = [True] if layout.is_fused else [any(".attn_qkv." in name for name in names)] if names else [False, True]
    return [(one, is_fused) for one in layouts for is_fused in fused]


def is_followed(geometry: Geometry, metadata: Mapping[str, Any]) -> bool:
    """The bound is the size of a graph followed tensor by tensor."""
    if geometry.architecture == "granite" and "granite.deepstack_mapping" in metadata:
        return False  # parts of pictures enter where the file says
    layout = LAYOUTS.get(geometry.architecture)
    groups = metadata.get(f"{geometry.architecture}.expert_group_count")
    return layout is not None and not (layout.experts and isinstance(groups, int) and groups > 1)  # experts chosen by groups are not followed


class _Followed(Blocks):
    """The graph of a plain architecture."""

    def __init__(self, geometry: Geometry, metadata: Mapping[str, Any], made: Context, settings: Settings, layout: Layout, n_seqs: int, is_fused: bool) -> None:
        rules = ARCHITECTURES[geometry.architecture]
        self.h = h = Hyperparameters(geometry.architecture, rules, metadata)
        self.geometry, self.settings, self.layout = geometry, settings, layout
        n_tokens = min(made.n_ctx, made.n_ubatch)
        self.n_outputs = min(n_tokens, made.n_batch if geometry.has_encoder else settings.n_outputs or settings.n_branches)
        super().__init__(-(-n_tokens // n_seqs) * n_seqs, settings.uses_flash(geometry), is_fused)
        self.n_streams = 1 if settings.unified else n_seqs
        self.has_window = h.n_swa > 0
        self.n_kv = {False: made.n_ctx_seq, True: window_cells(geometry, made, settings, False) if self.has_window else 0}
        self.widest_v = max(h.v(i) for i in range(h.n_layer_all))
        self.is_still = geometry.architecture == "granite" and h.keys.raw("rope.scaling.finetuned") is False
        self.inputs: dict[str, Node] = {}

    def size(self) -> int:
        h, layout, t = self.h, self.layout, self.n_tokens
        tokens, n_deep = self.leaf(t, kind="i32"), h.keys.number("n_deepstack_layers", 0) if layout.is_deep else 0
        x = self.op((h.n_embd, t), tokens)
        if n_deep:  # pictures have a part for each of the first layers
            self.deep = x = self.op((h.n_embd * (1 + n_deep), t), x)
        self.expand(x)
        self.expand(self.leaf(h.n_embd * (1 + n_deep), t))  # rows of embeddings, which a dispatch of tokens does not read
        if n_deep:
            x = self.view(x, h.n_embd, t)
        if layout.has_places:
            x = self.same(x, self.op((h.n_embd, t), self._input("positions", t, kind="i32")))
        if layout.token_norm:
            x = self.norm(x, layout.token_norm)
        if h.keys.raw("attention.temperature_scale") is not None:  # one for each token
            self.expand(self.leaf(t))
        ids = self.leaf(self.n_outputs, kind="i32")
        for i in self._layers():
            x = self._layer(x, i, ids if i == h.n_layer - 1 and not layout.is_late else None)
            if i < n_deep:
                x = self.same(x, self.view(self.deep, h.n_embd, t))
        if layout.is_late:
            x.is_output = True
            x = self.rows(x, ids, self.n_outputs)
        x = self.norm(x, layout.norm)
        x.is_output = True
        x = self.mm(x, self.geometry.n_vocab)
        x.is_output = True
        self.expand(x)
        return self.graph.size()

    def _layers(self) -> list[int]:
        n = self.h.n_layer
        return list(range(n)) if n <= _MOST_LAYERS else [*range(_MOST_LAYERS - 4), *range(n - 4, n)]

    def _input(self, name: str, *shape: int, kind: str = "f32") -> Node:
        if name not in self.inputs:
            self.inputs[name] = self.leaf(*shape, kind=kind)
        return self.inputs[name]

    # ------------------------------------------------------------------------------------------------------------------ a layer

    def _layer(self, x: Node, i: int, ids: Node | None) -> Node:
        layout, n = self.layout, self.n_outputs
        norm = x if layout.residual == "post" else self.norm(x, layout.norm)
        cur = self._attention(self.norm(x, layout.norm) if layout.residual == "twin" else norm, i)
        if ids is not None:
            cur, x = self.rows(cur, ids, n), self.rows(x, ids, n)
            if layout.residual in ("parallel", "twin"):
                norm = self.rows(norm, ids, n)
        if layout.residual in ("parallel", "twin", "own"):
            out = self._feed_forward(self.norm(x, layout.norm) if layout.residual == "own" else norm, i)
            first, second, third = (({"f": out, "a": cur, "i": x})[letter] for letter in layout.sums)
            return self.same(self.same(first, second), third)
        if layout.residual == "post":
            cur = self.same(self.norm(cur, layout.norm), x)
            return self.same(self.norm(self._feed_forward(cur, i), layout.norm), cur)
        cur = self.same(cur, x)
        out = self._feed_forward(self.norm(cur, layout.norm), i)
        return self.same(cur, out) if layout.sums == "ifa" else self.same(out, cur)

    def _attention(self, x: Node, i: int) -> Node:
        h, layout, t, settings = self.h, self.layout, self.n_tokens, self.settings
        has_window = h.is_swa[i]
        head_k, head_v = (h.head_k_swa, h.head_v_swa) if has_window else (h.head_k, h.head_v)
        n_head, n_head_kv = h.n_head[i], h.n_head_kv[i]
        if layout.qk_norm == "wide":
            widths = (head_k * n_head, head_k * n_head_kv, head_v * n_head_kv)
            if self.is_fused:
                fused = self.mm(x, sum(widths))
                q, k, v = (self.op((width, t), self.view(fused, width, t)) for width in widths)
            else:
                q, k, v = (self.mm(x, width) for width in widths)
            q, k, v = self.reshape(self.norm(q, "rms"), head_k, n_head, t), self.reshape(self.norm(k, "rms"), head_k, n_head_kv, t), self.reshape(v, head_v, n_head_kv, t)
        else:
            q, k, v = self.qkv(x, head_k, head_v, n_head, n_head_kv)
            if layout.qk_norm:
                q, k = self.norm(q, layout.qk_norm), self.norm(k, layout.qk_norm)
        if self.is_still:
            pass
        elif layout.rotates is True or (layout.rotates == "windows" and (has_window or not self.has_window)) or (layout.rotates == "three of four" and (i + 1) % 4):
            positions = self._input("positions", t * layout.n_positions, kind="i32")
            q, k = self.same(q, positions), self.same(k, positions)
        rotation_k, rotation_v = self._rotations(head_k, has_window)
        if rotation_k is not None:
            q, k = self.hadamard(q, rotation_k), self.hadamard(k, rotation_k)
        if rotation_v is not None:
            v = self.hadamard(v, rotation_v)
        for part in (q, k, v) if self.has_window else (q, v, k):
            self.expand(part)
        self._store(k, v, head_k * n_head_kv, head_v * n_head_kv, has_window)
        n_kv = self.n_kv[has_window]
        mask = self._input(f"mask {has_window}", n_kv, t // self.n_streams, 1, self.n_streams, kind="f16" if self.flash else "f32")
        halves: tuple[Node, ...] = ()
        if self.flash:  # which takes no cells of single precision
            halves = tuple(self.op((head, n_kv, n_head_kv, self.n_streams), self.cached(), kind="f16") for head, kind in ((head_k, settings.type_k), (head_v, settings.type_v)) if kind == "f32")
        cur = self.attend(q, head_v, n_head, n_kv, self.n_streams, mask, halves, n_extra=3 if layout.is_capped else 0)
        if rotation_v is not None:
            cur = self.hadamard(cur, rotation_v)
        return self.mm(cur, h.n_embd)

    def _rotations(self, head_k: int, has_window: bool) -> tuple[Node | None, Node | None]:
        """Quantised cells are rotated, heads of one size that 64 divides."""
        h, of_k, of_v = self.h, None, None
        if _ROWS[self.settings.type_k][0] > 1 and h.head_k % 64 == 0:
            size = 64
            while head_k % (2 * size) == 0:
                size *= 2
            of_k = self._input(f"rotation of K {has_window}", size, size)
        if _ROWS[self.settings.type_v][0] > 1 and h.head_v % 64 == 0:
            of_v = self._input(f"rotation of V {has_window}", 64, 64)
        return of_k, of_v

    def _store(self, k: Node, v: Node, k_row: int, v_row: int, has_window: bool) -> None:
        t = self.n_tokens
        self.expand(self.into_cache(self.view(k, k_row, t), self._input(f"cells of K {has_window}", t, kind="i64")))
        places = self._input(f"cells of V {has_window}", t if self.flash else t * self.widest_v, kind="i64")
        if self.flash:
            v = self.view(v, v_row, t)
        else:  # V lies transposed, so that every number has a place of its own
            v = self.op((v_row, t), v) if self.is_fused and self.layout.qk_norm != "wide" and v.layout[1] == "view" else self.reshape(v, v_row, t)  # type: ignore[index]
            if v_row < self.widest_v:
                v = self.op((self.widest_v, t), v)
            v = self.reshape(v, 1, v_row * t)
        self.expand(self.into_cache(v, places))

    def _feed_forward(self, x: Node, i: int) -> Node:
        h, layout, keys = self.h, self.layout, self.h.keys
        n_expert = keys.number("expert_count", 0)
        is_dense = not layout.experts or n_expert == 0 or (layout.experts == "lead" and i < keys.number("leading_dense_block_count", 0))
        if is_dense:
            if layout.is_double:
                return self.mm(self.op((h.n_ff[i], x.layout[0][1]), self.mm(x, 2 * h.n_ff[i])), h.n_embd)  # type: ignore[index]
            return self.ffn(x, h.n_ff[i], h.n_embd, layout.gated)
        n_ff = h.n_ff[i] if layout.is_wide else self._width("expert_feed_forward_length", i)

        normed = bool(keys.raw("expert_weights_norm")) if layout.normed == "said" else layout.normed
        scaled = layout.is_scaled and (keys.raw("expert_weights_scale") or 1.0) != 1.0

        def experts() -> Node:
            return self.moe(x, n_expert, keys.number("expert_used_count", 0), n_ff, norm=normed, scaled=scaled, biased=layout.biased, late=layout.softmax_late)

        width = keys.number("expert_shared_feed_forward_length", 0) if layout.shared in ("own", "gated", "first") else n_ff * keys.number("expert_shared_count", 0)
        if not layout.shared or width == 0:
            return experts()
        if layout.shared == "first":
            shared = self.ffn(x, width, h.n_embd)
            return self.same(experts(), shared)
        out = experts()
        shared = self.ffn(x, width, h.n_embd)
        if layout.shared == "gated":
            shared = self.same(shared, self.same(self.mm(x, 1)))
        return self.same(out, shared)

    def _width(self, key: str, i: int) -> int:
        values = self.h.keys.array(key)
        return self.h.keys.number(key, 0) if values is None else values[i]
