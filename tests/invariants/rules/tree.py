"""Roots, forks, and what becomes of them."""
from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from pylloyal import Sampling

from ..oracle import gbnf
from .basis import ANY, BAD_ROOTS, LITERALS, ODD, ODDLY, PICK, PICKS, SAMPLINGS, Basis


class Tree(Basis):
    @precondition(lambda self: sum(node.parent is None for node in self.ref.live) < 3)
    @rule(sampling=SAMPLINGS, literal=st.none() | LITERALS, start=st.sampled_from([0, 0, 0, 7, 1000]))
    def root(self, sampling: Sampling, literal: bytes | None, start: int) -> None:
        self.do_root("root", sampling, literal, start, None if literal is None else gbnf(literal))

    @rule(bad=st.sampled_from(BAD_ROOTS))
    def root_wrongly(self, bad: tuple[Sampling, str | None, int]) -> None:
        sampling, grammar, start = bad
        self.do_root("root_wrongly", sampling, None, start, grammar)

    @rule(source=PICK, n=st.integers(0, 4), seed=st.none() | st.integers(0, 2**64 - 1), oddly=ODDLY)
    def fork(self, source: int, n: int, seed: int | None, oddly: int) -> None:
        node = self.pick(source, self.healthy)
        self.do_fork(node, self.ref.leases_left + 1 if oddly == ODD else n, seed, oddly)

    @precondition(lambda self: self.is_crowded(2))
    @rule(picks=PICKS, oddly=ODDLY)
    def prune(self, picks: bytes, oddly: int) -> None:
        nodes = self.several(picks, self.anyone if oddly < 4 else self.leaves, oddly)
        for parent in [node.parent for node in nodes]:  # whose children are all going may go with them
            if oddly % 2 and parent in self.ref.live and parent not in nodes and all(child in nodes for child in self.ref.children(parent)):
                nodes.insert(oddly % len(nodes), parent)
        branches = self.of(nodes)
        self.act("prune", lambda: self.ref.prune(nodes), branches[0].prune if len(nodes) == 1 else lambda: self.store.prune(branches), *nodes)

    @precondition(lambda self: self.is_crowded(3))
    @rule(pick=PICK)
    def prune_subtree(self, pick: int) -> None:
        node = self.pick(pick, self.anyone)
        self.act("prune_subtree", lambda: self.ref.prune_subtree(node), self.handles[node].prune_subtree, node)

    @precondition(lambda self: len(self.ref.live) > 3 and self.is_crowded(3))
    @rule(pick=PICK, oddly=ODDLY)
    def retain_only(self, pick: int, oddly: int) -> None:
        node = self.pick(pick, self.healthy)
        branch = self.handles[node]
        self.act("retain_only", lambda: self.ref.retain_only(node), branch.retain_only if oddly % 2 else lambda: self.store.retain_only(branch), node)

    @rule(pick=PICK, other=PICK, oddly=ODDLY)
    def fast_forward(self, pick: int, other: int, oddly: int) -> None:
        if not self.followers() and oddly < ODD - 2 and self.ref.leases_left:
            self.do_fork(self.pick(other % ANY, self.healthy), 1 + other % 2, None)
            self.do_prefill("prefill", [(self.ref.live[-1], [97] * (other % 4))])
        child = self.pick(pick, self.followers)
        parent = child.parent if child.parent is not None and oddly < ODD - 1 else self.pick(other, self.anyone)
        branch = self.handles[child]
        name = "repair" if parent.is_poisoned else "fast_forward"
        self.act(name, lambda: self.ref.fast_forward(parent, child), lambda: self.handles[parent].fast_forward(branch), parent, child)
