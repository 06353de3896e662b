"""The pieces graphs are built of, as ``llm_graph_context`` of the pinned engine puts them together, with sizes in place of numbers."""
from __future__ import annotations

from typing import Final

from .allocator import Graph, Node

Shape = tuple[int, ...]
_WIDTH: Final = {"f32": 4, "f16": 2, "i32": 4, "i64": 8}


class Blocks:
    """A graph in the making.

    Attributes
    ----------
    n_tokens : int
        Of the dispatch.
    flash : bool
    is_fused : bool
        The file has Q, K and V in one tensor.
    """

    def __init__(self, n_tokens: int, flash: bool, is_fused: bool) -> None:
        self.graph, self.cache = Graph(), Node(0, object())
        self.n_tokens, self.flash, self.is_fused = n_tokens, flash, is_fused

    # ---------------------------------------------------------------------------------------------------------- single operations

    def leaf(self, *shape: int, kind: str = "f32") -> Node:
        return Node(_elements(shape) * _WIDTH[kind], (_four(shape), kind))

    def op(self, shape: Shape, *sources: Node | None, inplace: bool = False, kind: str = "f32") -> Node:
        """A tensor computed from others; those that are weights or caches are None."""
        return Node(_elements(shape) * _WIDTH[kind], (_four(shape), kind), tuple(source for source in sources if source is not None), inplace)

    def reshape(self, x: Node, *shape: int) -> Node:
        return Node(0, (_four(shape), _kind(x)), (x,), base=x)

    def view(self, x: Node, *shape: int) -> Node:
        """Of other strides than a tensor of that shape: nothing is written over it."""
        return Node(0, (_four(shape), "view", id(x), len(self.graph.nodes)), (x,), base=x)

    def into_cache(self, *sources: Node) -> Node:
        """A write to the cache: a node without memory of its own."""
        return Node(0, object(), sources, base=self.cache)

    def cached(self) -> Node:
        """Cells of the cache, seen in some shape."""
        return Node(0, object(), base=self.cache)

    def mm(self, x: Node, n_rows: int) -> Node:
        """A product with weights."""
        return self.op((n_rows, *_shape(x)[1:]), x)

    def same(self, x: Node, *others: Node | None) -> Node:
        """What may be done in place: additions, products, scales, rotations, activations of one tensor."""
        return self.op(_shape(x), x, *others, inplace=True)

    def norm(self, x: Node, kind: str, n_weights: int = 1) -> Node:
        """RMS norms are done in place, the others are not; then come weights and biases."""
        cur = self.op(_shape(x), x, inplace=kind == "rms")
        for _ in range(n_weights):
            cur = self.same(cur)
        return cur

    def rows(self, x: Node, ids: Node, n: int) -> Node:
        return self.op((_shape(x)[0], n), x, ids)

    def expand(self, x: Node) -> Node:
        return self.graph.expand(x)

    # ---------------------------------------------------------------------------------------------------------- build_*

    def qkv(self, x: Node, head_k: int, head_v: int, n_head: int, n_head_kv: int) -> tuple[Node, Node, Node]:
        t = self.n_tokens
        if self.is_fused:
            fused = self.mm(x, head_k * (n_head + n_head_kv) + head_v * n_head_kv)
            return self.view(fused, head_k, n_head, t), self.view(fused, head_k, n_head_kv, t), self.view(fused, head_v, n_head_kv, t)
        q, k, v = self.mm(x, head_k * n_head), self.mm(x, head_k * n_head_kv), self.mm(x, head_v * n_head_kv)
        return self.reshape(q, head_k, n_head, t), self.reshape(k, head_k, n_head_kv, t), self.reshape(v, head_v, n_head_kv, t)

    def hadamard(self, x: Node, rotation: Node) -> Node:
        size, shape = _shape(rotation)[0], _shape(x)
        if _kind(x) == "view":
            x = self.op(shape, x)
        cur = self.op((size, _elements(shape) // size), rotation, self.reshape(x, size, _elements(shape) // size))
        return self.reshape(cur, *shape)

    def ffn(self, x: Node, n_ff: int, n_out: int, gated: bool = True) -> Node:
        if not gated:
            return self.mm(self.same(self.mm(x, n_ff)), n_out)
        up, gate = self.mm(x, n_ff), self.mm(x, n_ff)
        return self.mm(self.op(_shape(up), gate, up), n_out)

    def moe(self, x: Node, n_expert: int, n_used: int, n_ff: int, *, norm: bool, scaled: bool, biased: bool, late: bool) -> Node:
        """The sum of what the chosen experts say."""
        t, n_embd = _shape(x)[1], _shape(x)[0]
        logits = self.mm(x, n_expert)
        probs = logits if late else self.same(logits)
        chosen = self.same(probs) if biased else probs
        order = self.op((n_expert, t), chosen, kind="i32")
        ids = self.view(order, n_used, t)
        weights = self.op((1, n_used, t), self.reshape(probs, 1, n_expert, t), ids)
        if late:
            weights = self.reshape(self.same(self.reshape(weights, n_used, t)), 1, n_used, t)
        elif norm:
            flat = self.reshape(weights, n_used, t)
            total = self.same(self.op((1, t), flat))
            weights = self.reshape(self.same(flat, total), 1, n_used, t)
        if scaled:
            weights = self.same(weights)
        self.expand(weights)
        cur = self.reshape(x, n_embd, 1, t)
        up, gate = self.op((n_ff, n_used, t), cur, ids), self.op((n_ff, n_used, t), cur, ids)
        inner = self.op((n_ff, n_used, t), gate, up)
        experts = self.expand(self.same(self.op((n_embd, n_used, t), inner, ids), weights))
        each = [self.expand(self.view(experts, n_embd, t)) for _ in range(n_used)]
        out = each[0]
        for one in each[1:]:
            out = self.expand(self.op((n_embd, t), out, one, inplace=True))
        return out if n_used > 1 else self.op((n_embd, t), out)

    def attend(self, q: Node, head_v: int, n_head: int, n_kv: int, n_streams: int, mask: Node, halves: tuple[Node, ...] = (), n_extra: int = 0) -> Node:
        """``build_attn_mha``: q is (head_k, n_head, n_tokens)."""
        t = self.n_tokens
        q = self.view(self.view(q, 0), 0)
        if self.flash:
            return self.expand(self.reshape(self.op((head_v, n_head, t), q, *halves, mask), head_v * n_head, t))
        scores = self.op((n_kv, t // n_streams, n_head, n_streams), q)
        for _ in range(n_extra):
            scores = self.same(scores)
        scores = self.same(scores, mask)
        cur = self.op((head_v, t // n_streams, n_head, n_streams), scores)
        return self.expand(self.op((head_v * n_head, t), self.view(cur, 0)))


def _four(shape: Shape) -> Shape:
    return (*shape, *([1] * (4 - len(shape))))


def _elements(shape: Shape) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _shape(x: Node) -> Shape:
    shape: Shape = x.layout[0]  # type: ignore[index]
    return shape


def _kind(x: Node) -> str:
    kind: str = x.layout[1]  # type: ignore[index]
    return kind
