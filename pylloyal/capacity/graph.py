"""A graph of the engine's tensors, and the buffer its allocator would lay them out in.

Nothing is computed: a tensor is its shape, and what matters is when it comes and goes. Source: ``ggml_gallocr`` of the pinned engine's
ggml-alloc.c (best fit, operations in place), and the order of ``ggml_build_forward_expand``.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_ALIGN: Final = 32
_IN_PLACE: Final = frozenset(("scale", "add", "sub", "mul", "div", "sqr", "unary", "rope", "rms_norm", "clamp", "soft_max"))
Shape = tuple[int, int, int, int]


class Node:
    """A tensor. ``owner`` is what a view looks into; ``is_weight`` lies in a buffer of its own."""

    __slots__ = ("at", "form", "is_placed", "is_weight", "n_bytes", "n_children", "n_views", "ne", "op", "owner", "sources", "width")

    def __init__(self, op: str, ne: Shape, width: int, sources: Sequence[Node] = (), owner: Node | None = None, form: object = None, *, is_weight: bool = False) -> None:
        self.op, self.ne, self.width, self.sources, self.owner, self.is_weight = op, ne, width, tuple(sources), owner, is_weight
        self.form = form or (ne, width)  # two tensors of one form have one layout
        self.n_bytes = -(-math.prod(ne) * width // _ALIGN) * _ALIGN
        self.n_children = self.n_views = self.at = 0
        self.is_placed = False


class Graph:
    """Operations in the order they run."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.leaves: list[Node] = []
        self._seen: set[Node] = set()

    def expand(self, node: Node) -> None:
        if node in self._seen:
            return
        self._seen.add(node)
        for source in node.sources:
            self.expand(source)
        (self.nodes if node.sources else self.leaves).append(node)

    # ------------------------------------------------------------------------------------------------------------ operations

    def leaf(self, *ne: int, width: int = 4) -> Node:
        return Node("input", shape(ne), width)

    def make(self, op: str, ne: Sequence[int], *sources: Node, width: int = 4) -> Node:
        return Node(op, shape(ne), width, sources)

    def like(self, op: str, a: Node, *more: Node) -> Node:
        return Node(op, a.ne, a.width, (a, *more))

    def view(self, a: Node, *ne: int) -> Node:
        """A reshape, a permutation or a part: only what it keeps alive matters."""
        made = shape(ne)
        return Node("view", made, a.width, (a,), a.owner or a, form=("view", made, object()))

    def matmul(self, weight: Node, x: Node) -> Node:
        return self.make("mul_mat", (weight.ne[1], *x.ne[1:]), weight, x)

    # ------------------------------------------------------------------------------------------------------------ allocation

    def buffer_bytes(self) -> int:
        space = _Space()

        def place(node: Node) -> None:
            if node.is_placed or node.is_weight or node.owner is not None:
                return
            node.is_placed = True
            if node.op in _IN_PLACE:
                for parent in node.sources:
                    if parent.is_placed and parent.form == node.form and parent.n_children == 1 and parent.n_views == 0:
                        node.at, parent.is_placed = parent.at, False
                        return
            node.at = space.take(node.n_bytes)

        for leaf in self.leaves:
            place(leaf)
        for node in self.nodes:
            if node.owner is not None:
                node.owner.n_views += 1
            for source in node.sources:
                source.n_children += 1
        for node in self.nodes:
            place(node)
            for parent in node.sources:
                parent.n_children -= 1
                if parent.n_children or parent.n_views:
                    continue
                if parent.owner is not None:
                    owner = parent.owner
                    owner.n_views -= 1
                    if owner.n_views == 0 and owner.n_children == 0 and owner.is_placed:
                        space.give(owner.at, owner.n_bytes)
                        owner.is_placed = False
                elif parent.is_placed:
                    space.give(parent.at, parent.n_bytes)
                    parent.is_placed = False
        return space.most


class _Space:
    """Free blocks in order; the last has no end."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = [[0, 1 << 62]]
        self.most = 0

    def take(self, n_bytes: int) -> int:
        best = len(self.blocks) - 1
        for i, (_, size) in enumerate(self.blocks[:-1]):
            if size >= n_bytes and (best == len(self.blocks) - 1 or size <= self.blocks[best][1]):
                best = i
        block = self.blocks[best]
        at = block[0]
        block[0] += n_bytes
        block[1] -= n_bytes
        if block[1] == 0:
            del self.blocks[best]
        self.most = max(self.most, at + n_bytes)
        return at

    def give(self, at: int, n_bytes: int) -> None:
        i = next((i for i, (start, _) in enumerate(self.blocks) if start >= at), len(self.blocks))
        self.blocks.insert(i, [at, n_bytes])
        for left in (i, i - 1):
            if 0 <= left < len(self.blocks) - 1 and sum(self.blocks[left]) == self.blocks[left + 1][0]:
                self.blocks[left][1] += self.blocks.pop(left + 1)[1]


def shape(ne: Sequence[int]) -> Shape:
    padded = (*ne, 1, 1, 1)[:4]
    return padded[0], padded[1], padded[2], padded[3]
