"""Choosing what an operation is about, and the few operations that others need: every family of rules stands on this."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations

from hypothesis import strategies as st

from pylloyal import Branch, Sampling

from ..machine import Machine, Node
from ..measured import INF

PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
SAMPLINGS = st.builds(
    Sampling, temperature=st.sampled_from([0.0, 0.5, 1.0, 4.0]), top_k=st.sampled_from([0, 1, 7, 40]), top_p=st.sampled_from([1.0, 0.9375]), min_p=st.sampled_from([0.0, 0.0625]),
    typical_p=st.sampled_from([1.0, 0.875]), penalty_repeat=st.sampled_from([1.0, 2.0, 0.5]), penalty_frequency=st.sampled_from([0.0, 0.25, -1.0]), penalty_presence=st.sampled_from([0.0, 0.5, 64.0]),
    penalty_last_n=st.sampled_from([0, 1, 5, 32]), ignore_eog=st.sampled_from([False, False, True]), seed=st.sampled_from([None, None, 1, 2, 2**64 - 1]))
BAD_SAMPLINGS = [Sampling(temperature=float("nan")), Sampling(top_p=0.0), Sampling(min_p=1.5), Sampling(penalty_repeat=0.0), Sampling(penalty_last_n=-1)]
BAD_GRAMMAR = "root ::= ("
BAD_ROOTS = [*((sampling, None, 0) for sampling in BAD_SAMPLINGS), (PLAIN, BAD_GRAMMAR, 0), (PLAIN, None, -1), (PLAIN, None, 2**24)]
BIASES = st.dictionaries(st.integers(95, 105), st.sampled_from([-INF, -2.0, 0.5, 16.0]), max_size=4)
BAD_BIASES = [(-1, 0.0), (2**31 - 1, 0.0), (99, INF), (99, float("nan"))]
ALPHAS = [1.0, -1.0, 0.5, -0.25, 2.0, 0.0, float("nan"), INF]
LITERALS = st.text("abcdef", max_size=4).map(str.encode)
TEXTS = st.binary(max_size=14).map(lambda raw: [97 + byte % 6 for byte in raw])  # few letters: branches often come to see the same
# A byte for each branch of a call. Most name one that fits; the higher ones any, the highest one that is gone.
PICK = st.integers(0, 255)
PICKS = st.binary(max_size=5)
ANY, GONE = 224, 246
ODDLY = st.integers(0, 15)  # 15, sometimes 14: with something wrong
ODD = 15
BARE = 7  # a fork without logits


class Basis(Machine):
    # ----------------------------------------------------------------------------------------------------------- choosing

    def anyone(self) -> list[Node]:
        return self.ref.live

    def healthy(self) -> list[Node]:
        return [node for node in self.ref.live if not node.is_poisoned]

    def ready(self) -> list[Node]:
        return [node for node in self.healthy() if node.state.logits is not None]

    def leaves(self) -> list[Node]:
        return [node for node in self.ref.live if not self.ref.children(node)]

    def followers(self) -> list[Node]:
        """Those their parent can be moved to; first of all where that repairs it."""
        fit = [node for node in self.healthy() if node.parent is not None and node.cells[: node.inherited] == node.parent.cells]
        return [node for node in fit if node.parent is not None and node.parent.is_poisoned] or fit

    def pick(self, byte: int, fit: Callable[[], list[Node]]) -> Node:
        """One of those that fit, or sometimes one that does not. No operation is wasted on an empty store, nor on one without logits."""
        if not self.ref.live:
            self.do_root("root", PLAIN, None, 0, None)
        if fit == self.ready and not self.ready() and self.healthy():
            self.do_prefill("prefill", [(self.healthy()[-1], [97, 98])])
            self.agree()
        pool = self.gone if byte >= GONE and self.gone else self.ref.live if byte >= ANY else fit() or self.ref.live
        if byte % 2:  # rather a leaf: where parents stand still, more can be done with their children
            pool = [node for node in pool if not self.ref.children(node)] or pool
        return pool[byte // 2 % len(pool)]

    def several(self, picks: bytes, fit: Callable[[], list[Node]], oddly: int = 0) -> list[Node]:
        """Different branches; oddly, the first once more."""
        nodes = list(dict.fromkeys(self.pick(byte, fit) for byte in picks))
        return nodes[:1] * (oddly == ODD - 1) + nodes + nodes[:1] * (oddly == ODD)

    def of(self, nodes: Sequence[Node]) -> list[Branch]:
        return [self.handles[node] for node in nodes]

    def can_come_next(self, node: Node, byte: int) -> int:
        if node.state.grammar is None:
            return 97 + byte % 6
        tokens = [token for token in range(len(self.ref.pieces)) if self.ref.allows(node.state.grammar, token)]
        return tokens[byte % len(tokens)]

    def is_crowded(self, quarters: int) -> bool:
        """What makes room comes when room is short, or trees would never grow."""
        return 4 * len(self.ref.live) >= quarters * self.ref.n_branches or self.ref.cells_left < 8

    # ------------------------------------------------------------------------------------ operations that others begin with

    def grow(self, bushy: int) -> None:
        """Something to begin with: a trunk, and boughs that fork in their turn."""
        for n in range(min(bushy, self.ref.leases_left)):
            if n:
                self.do_fork(self.pick(n % 3 * 2, self.healthy), 1, None)
            else:
                self.do_root("root", PLAIN, None, 0, None)
                self.do_set_metrics(self.ref.live[-1], bushy % 2 == 0, bushy % 3 == 0)
            self.do_prefill("prefill", [(self.ref.live[-1], [97, 98, 99][: n % 4])])

    def do_root(self, name: str, sampling: Sampling, literal: bytes | None, start: int, grammar: str | None) -> None:
        made: list[Branch] = []

        def expected() -> Node:
            seed = made[0].sampling.seed if sampling.seed is None and made else sampling.seed
            return self.ref.root(replace(sampling, seed=seed), literal, start, grammar != BAD_GRAMMAR)

        if done := self.act(name, expected, lambda: made.append(self.store.root(sampling=sampling, grammar=grammar, start_pos=start)), sampling, grammar, start):
            self.handles[done[0]] = made[0]
            if sampling.seed is None:  # the operating system's is anybody's guess, and traces have to be repeatable
                self.do_set_sampling(done[0], replace(sampling, seed=3))

    def do_fork(self, node: Node, n: int, seed: int | None, way: int = 0) -> None:
        branch, seeds = self.handles[node], [None if seed is None else (seed + i) % 2**64 for i in range(n)]
        logits = way != BARE
        ways: list[Callable[[], list[Branch]]] = [lambda: branch.fork(n, seed=seed, logits=logits), lambda: branch.fork(n, seed=None if seed is None else [s for s in seeds if s is not None], logits=logits)]
        if n == 1:
            ways.append(lambda: [branch.fork(seed=seed, logits=logits)])
        if done := self.act("fork", lambda: self.ref.fork(node, seeds, logits), ways[way % len(ways)], node, n, seed, logits):
            self.handles.update(zip(*done, strict=True))

    def brace(self, nodes: Sequence[Node]) -> None:
        """Before a decode that is going to fail for good, the first of its branches has a child it can be repaired with."""
        if nodes and nodes[0] in self.healthy() and self.ref.leases_left and self.ref.verdict(self.ref.n_dispatches + 1) not in (0, 1, -1):
            self.do_fork(nodes[0], 1, None)

    def do_prefill(self, name: str, runs: list[tuple[Node, list[int]]], cancel_after: int | None = None) -> None:
        self.brace([node for node, _ in runs])
        n = 0

        def progress(landed: int, total: int) -> None:
            nonlocal n
            n += 1
            if n == cancel_after:
                self.store.cancel()

        def call() -> int:
            return self.store.prefill([(self.handles[node], run) for node, run in runs], progress=progress)

        if done := self.act(name, lambda: self.ref.prefill(runs, self.order_taken(runs, cancel_after), cancel_after), call, runs, cancel_after):
            assert done[0] == done[1] == n

    def order_taken(self, runs: list[tuple[Node, list[int]]], cancel_after: int | None) -> Sequence[int] | None:
        """In which order runs were packed, told by what had landed when a prefill ended early; None when it does not show, or none explains it."""
        lengths = [len(run) for _, run in runs]
        codes = [self.ref.verdict(self.ref.n_dispatches + 1 + n) for n in range(len(self.ref.pack(lengths)))]
        ends = [n for n, rc in enumerate(codes) if rc or (n and n == cancel_after)]
        if not ends or any(node not in self.ref.live for node, _ in runs):
            return None
        is_fatal = ends[0] != cancel_after and codes[ends[0]] not in (1, -1)
        infos = [self.handles[node]._info() for node, _ in runs]
        seen = [(info.position - node.position, bool(info.is_poisoned), info.cells_own - node.own) for info, (node, _) in zip(infos, runs, strict=True)]
        for order in permutations(range(len(runs))):
            packed = self.ref.pack(lengths, order)
            landed = Counter(i for rows in packed[: ends[0]] for i, at in rows.items() for _ in at)
            doubtful = {i: len(at) for i, at in packed[ends[0]].items()} if is_fatal else {}
            if seen == [(landed[i], i in doubtful, landed[i] + doubtful.get(i, 0)) for i in range(len(runs))]:
                return order
        return None

    def do_set_sampling(self, node: Node, sampling: Sampling) -> None:
        self.act("set_sampling", lambda: self.ref.set_sampling(node, sampling), lambda: setattr(self.handles[node], "sampling", sampling), node, sampling)

    def do_set_metrics(self, node: Node, of_model: bool, of_sampling: bool) -> None:
        self.act("set_metrics", lambda: self.ref.set_metrics(node, of_model, of_sampling), lambda: self.handles[node].set_metrics(model=of_model, sampling=of_sampling), node, of_model, of_sampling)
