"""What decodes and what draws."""
from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import rule

from ..machine import Node
from .basis import ODD, ODDLY, PICK, PICKS, TEXTS
from .logits import Logits


class Decoding(Logits):
    @rule(picks=PICKS, texts=st.lists(TEXTS, min_size=6, max_size=6), cancel_after=st.sampled_from([None, None, 1, 2]), oddly=ODDLY)
    def scatter(self, picks: bytes, texts: list[list[int]], cancel_after: int | None, oddly: int) -> None:
        nodes = self.several(picks, self.healthy, oddly)
        if oddly == ODD - 2:
            texts[cancel_after or 0] = [97, 2**31 - 1]
        self.do_prefill("scatter", list(zip(nodes, texts, strict=False)), cancel_after)

    @rule(pick=PICK, text=TEXTS, n=st.integers(1, 32), oddly=ODDLY)
    def prefill(self, pick: int, text: list[int], n: int, oddly: int) -> None:
        """A long one; oddly, to the last cell or one beyond."""
        node = self.pick(pick, self.healthy)
        n = {ODD: self.ref.cells_left + 1, ODD - 1: self.ref.cells_left}.get(oddly, n)
        self.do_prefill("prefill", [(node, [text[i % len(text)] if text else 97 for i in range(n)])])

    @rule(picks=PICKS, oddly=ODDLY)
    def commit(self, picks: bytes, oddly: int) -> None:
        nodes = self.several(picks, self.healthy, oddly)
        self.do_commit("commit", nodes, [self.can_come_next(node, byte // 3) for node, byte in zip(nodes, picks + picks, strict=False)])

    @rule(pick=PICK, picks=PICKS, token=st.sampled_from([-1, 0, 97, 98, 256, 257, 258, -(2**31), 2**31 - 1]), kind=st.sampled_from(["token", "token", "outside", "fewer", "many"]))
    def commit_wrongly(self, pick: int, picks: bytes, token: int, kind: str) -> None:
        """A token the grammar may not take, or that is none; not a token for each; more branches than there can be. Some of it is right after all."""
        nodes = self.several(bytes([pick]) + picks, self.healthy)
        tokens = [self.can_come_next(node, 0) for node in nodes]
        if kind == "fewer":
            tokens = tokens[:-1]
        elif kind == "many":
            nodes, tokens = nodes * (self.ref.n_branches + 1), tokens * (self.ref.n_branches + 1)
        else:
            tokens[pick % len(tokens)] = token if kind == "token" else len(self.ref.pieces)
        self.do_commit("commit_wrongly", nodes, tokens)

    def do_commit(self, name: str, nodes: list[Node], tokens: list[int]) -> None:
        self.brace(nodes)
        branches = self.of(nodes)
        is_alone = len(nodes) == len(tokens) == 1
        self.act(name, lambda: self.ref.commit(nodes, tokens), lambda: branches[0].commit(tokens[0]) if is_alone else self.store.commit(branches, tokens), nodes, tokens)

    @rule(picks=PICKS, oddly=ODDLY)
    def sample(self, picks: bytes, oddly: int) -> None:
        """The same branch twice draws twice."""
        nodes = self.several(picks, self.ready, oddly)
        self.silence(nodes, oddly)
        branches = self.of(nodes)
        if done := self.act("sample", lambda: self.ref.sample(nodes, self.draw), lambda: [branches[0].sample()] if len(branches) == 1 else self.store.sample(branches), *nodes):
            assert done[0] == done[1]

    def silence(self, nodes: list[Node], oddly: int) -> None:
        """Now and then the last one has nothing that it could draw."""
        if oddly % 5 == 4 and nodes[1:] and nodes[-1] in self.ready():
            self.do_set_logits(nodes[-1], "none", 0)

    def do_tick(self, name: str, nodes: list[Node], n_steps: int, limits: list[int | None], stops: list[int], runs: list[tuple[Node, list[int]]] | None = None, most: int | None = None) -> None:
        self.brace(nodes)
        branches = self.of(nodes)
        limit = limits[0] if len(set(limits)) == 1 else limits
        given = runs or []
        if done := self.act(name, lambda: self.ref.tick(nodes, n_steps, limits, stops, self.draw, given, most),
                            lambda: self.store.tick(branches, n_steps=n_steps, max_tokens=limit, stop=stops, runs=[(self.handles[node], text) for node, text in given], max_run_tokens=most),
                            nodes, n_steps, limits, stops, given, most):
            self.same_ticks(*done)

    @rule(picks=PICKS, others=PICKS, texts=st.lists(TEXTS, min_size=5, max_size=5), n_steps=st.integers(1, 5), most=st.sampled_from([None, None, 1, 3, 0]), oddly=ODDLY)
    def tick_and_read(self, picks: bytes, others: bytes, texts: list[list[int]], n_steps: int, most: int | None, oddly: int) -> None:
        """Some speak, others read in the same dispatches; oddly, one does both."""
        nodes = self.several(picks, self.ready, oddly)
        readers = [node for node in self.several(others, self.healthy) if node not in nodes or oddly == ODD - 3]
        if oddly == ODD - 2:
            texts[0] = [97, 2**31 - 1]
        self.do_tick("tick_and_read", nodes, self.steps(n_steps), [None] * len(nodes), [], list(zip(readers, texts, strict=False)), most)

    @rule(picks=PICKS, stops=st.sampled_from([[], [], [], [97, 98], [-1]]), oddly=ODDLY)
    def tick(self, picks: bytes, stops: list[int], oddly: int) -> None:
        nodes = self.several(picks, self.ready, oddly)
        self.silence(nodes, oddly)
        self.do_tick("tick", nodes, 1, [None] * len(nodes), stops)

    @rule(picks=PICKS, n_steps=st.integers(2, 8), limits=st.lists(st.sampled_from([None, None, 1, 2, 5]), min_size=6, max_size=6), stops=st.lists(st.integers(0, 259), max_size=3), oddly=ODDLY)
    def ticks(self, picks: bytes, n_steps: int, limits: list[int | None], stops: list[int], oddly: int) -> None:
        nodes = self.several(picks, self.ready, oddly)
        if oddly % 3 == 0 and self.ready():  # one that is likely to be drawn
            stops = [*stops, int(np.argmax(self.row(self.ready()[0])))]
        if oddly == ODD - 1:
            limits, n_steps = [0, *limits[1:]], n_steps % 2
        self.do_tick("ticks", nodes, self.steps(n_steps), limits[: len(nodes)], stops)

    def steps(self, n: int) -> int:
        return n
