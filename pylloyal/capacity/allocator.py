"""The engine's graph allocator, followed step by step: where it puts each tensor of a graph, and so how large the compute buffer is.

What the buffer takes is more than what lives at once: the allocator takes the best fitting hole and never moves a tensor, and what
falls between holes is lost, at times a third of the whole. So there is no closed formula; but the allocator is deterministic, and
given the sizes of a graph's tensors and who reads whom its answer is exact. Source: ``ggml-alloc.c`` and the order of
``ggml_build_forward_expand`` of the pinned engine.
"""
from __future__ import annotations

from typing import Final

ALIGNMENT: Final = 32


class Node:
    """A tensor of a graph.

    Attributes
    ----------
    bytes : int
    layout : object
        Tensors of one layout have the same shape, strides and type.
    sources : tuple of Node
        What it is computed from, in the engine's order. Weights and caches, which are not the allocator's, are left out.
    is_inplace : bool
        Its operation may overwrite a source of the same layout that nobody else reads. The engine never does that through a view.
    base : Node or None
        What it is a view of.
    """

    __slots__ = ("base", "bytes", "is_inplace", "is_output", "layout", "n_children", "n_views", "place", "sources", "state")

    def __init__(self, n_bytes: int, layout: object, sources: tuple[Node, ...] = (), is_inplace: bool = False, base: Node | None = None) -> None:
        self.bytes, self.layout, self.sources, self.is_inplace = -(-n_bytes // ALIGNMENT) * ALIGNMENT, layout, sources, is_inplace
        self.base: Node | None = base if base is None or base.base is None else base.base
        self.is_output = False
        self.n_children = self.n_views = 0
        self.place, self.state = -1, 0  # state: 0 unknown, 1 in the order, 2 placed once


class Graph:
    """Nodes in the order in which they are computed."""

    def __init__(self) -> None:
        self.leaves: list[Node] = []
        self.nodes: list[Node] = []

    def expand(self, node: Node) -> Node:
        """Put in everything a node needs, and itself."""
        if node.state:
            return node
        stack = [(node, iter(node.sources))]
        node.state = 1
        while stack:
            top, rest = stack[-1]
            for source in rest:
                if not source.state:
                    source.state = 1
                    stack.append((source, iter(source.sources)))
                    break
            else:
                stack.pop()
                (self.nodes if top.sources or top.base is not None else self.leaves).append(top)
        return node

    def size(self) -> int:
        """Bytes of the buffer. A graph can be asked once."""
        free = _Free()
        for leaf in self.leaves:
            leaf.place, leaf.state = free.take(leaf.bytes), 2
        for node in self.nodes:
            if node.base is not None:
                node.base.n_views += 1
            for source in node.sources:
                source.n_children += 1
        for node in self.nodes:
            if node.base is None and node.state != 2:
                self._place(node, free)
            for source in node.sources:
                source.n_children -= 1
                if source.n_children or source.n_views:
                    continue
                owner = source
                if source.base is not None:
                    owner = source.base
                    owner.n_views -= 1
                    if owner.n_views or owner.n_children:
                        continue
                if owner.place >= 0 and not owner.is_output:
                    free.give(owner.place, owner.bytes)
                    owner.place = -1
        return free.most

    @staticmethod
    def _place(node: Node, free: _Free) -> None:
        node.state = 2
        if node.is_inplace:
            for source in node.sources:
                if source.base is not None or source.place < 0 or source.is_output or source.layout != node.layout or source.n_children != 1 or source.n_views:
                    continue
                node.place, source.place = source.place, -1
                return
        node.place = free.take(node.bytes)


class _Free:
    """Holes, by offset; the last has no end."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = [[0, 1 << 62]]
        self.most = 0

    def take(self, size: int) -> int:
        blocks = self.blocks
        best, best_size = len(blocks) - 1, 1 << 63
        for i in range(len(blocks) - 1):
            if size <= blocks[i][1] <= best_size:
                best, best_size = i, blocks[i][1]
        block = blocks[best]
        place = block[0]
        block[0] += size
        block[1] -= size
        if block[1] == 0:
            del blocks[best]
        self.most = max(self.most, place + size)
        return place

    def give(self, place: int, size: int) -> None:
        if size == 0:
            return
        blocks = self.blocks
        i = 0
        while i < len(blocks) and blocks[i][0] < place:
            i += 1
        if i and blocks[i - 1][0] + blocks[i - 1][1] == place:
            blocks[i - 1][1] += size
            if i < len(blocks) and blocks[i - 1][0] + blocks[i - 1][1] == blocks[i][0]:
                blocks[i - 1][1] += blocks[i][1]
                del blocks[i]
        elif i < len(blocks) and place + size == blocks[i][0]:
            blocks[i][0], blocks[i][1] = place, blocks[i][1] + size
        else:
            blocks.insert(i, [place, size])
