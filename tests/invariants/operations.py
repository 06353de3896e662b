"""The operations of a trace.

To add one: what it means goes into :mod:`.reference`, a rule here draws its arguments and hands both sides to :meth:`Machine.act`;
and if it shows anything new, :meth:`Machine.look` and :meth:`Machine.to_be_shown` tell it.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from pylloyal import Branch, Grammar, Sampling, errors

from .books import INF, Reason, unplaced
from .machine import Machine, Node
from .oracle import gbnf
from .reference import pack

# Every number here is a sum of a few powers of two, so that reference and kernel round alike whatever the order of their steps.
PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
SAMPLINGS = st.builds(
    Sampling, temperature=st.sampled_from([0.0, 0.5, 1.0, 4.0]), top_k=st.sampled_from([0, 1, 7, 40]), top_p=st.sampled_from([1.0, 0.9375]), min_p=st.sampled_from([0.0, 0.0625]),
    typical_p=st.sampled_from([1.0, 0.875]), penalty_repeat=st.sampled_from([1.0, 2.0, 0.5]), penalty_frequency=st.sampled_from([0.0, 0.25, -1.0]), penalty_presence=st.sampled_from([0.0, 0.5, 64.0]),
    penalty_last_n=st.sampled_from([0, 1, 5, 32]), seed=st.sampled_from([None, None, 1, 2, 2**64 - 1]))
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


class Traces(Machine):
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

    # ----------------------------------------------------------------------------------------------------------- the tree

    def grow(self, bushy: int) -> None:
        """Something to begin with: a trunk, and boughs that fork in their turn."""
        for n in range(min(bushy, self.ref.leases_left)):
            if n:
                self.do_fork(self.pick(n % 3 * 2, self.healthy), 1, None)
            else:
                self.do_root("root", PLAIN, None, 0, None)
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

    def do_fork(self, node: Node, n: int, seed: int | None, way: int = 0) -> None:
        branch, seeds = self.handles[node], [None if seed is None else (seed + i) % 2**64 for i in range(n)]
        ways: list[Callable[[], list[Branch]]] = [lambda: branch.fork(n, seed=seed), lambda: branch.fork(n, seed=None if seed is None else [s for s in seeds if s is not None])]
        if n == 1:
            ways.append(lambda: [branch.fork(seed=seed)])
        if done := self.act("fork", lambda: self.ref.fork(node, seeds), ways[way % len(ways)], node, n, seed):
            self.handles.update(zip(*done, strict=True))

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

    # ----------------------------------------------------------------------------------------------------------- decoding

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
        codes = [self.ref.verdict(self.ref.n_dispatches + 1 + n) for n in range(len(pack(lengths, self.ref.n_batch)))]
        ends = [n for n, rc in enumerate(codes) if rc or (n and n == cancel_after)]
        if not ends or any(node not in self.ref.live for node, _ in runs):
            return None
        is_fatal = ends[0] != cancel_after and codes[ends[0]] not in (1, -1)
        infos = [self.handles[node]._info() for node, _ in runs]
        seen = [(info.position - node.position, bool(info.is_poisoned)) for info, (node, _) in zip(infos, runs, strict=True)]
        for order in permutations(range(len(runs))):
            packed = pack(lengths, self.ref.n_batch, order)
            landed = Counter(i for rows in packed[: ends[0]] for i, at in rows.items() for _ in at)
            if seen == [(landed[i], is_fatal and i in packed[ends[0]]) for i in range(len(runs))]:
                return order
        return None

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

    def do_tick(self, name: str, nodes: list[Node], n_steps: int, limits: list[int | None], stops: list[int]) -> None:
        self.brace(nodes)
        branches = self.of(nodes)
        limit = limits[0] if len(set(limits)) == 1 else limits
        if done := self.act(name, lambda: self.ref.tick(nodes, n_steps, limits, stops, self.draw), lambda: self.store.tick(branches, n_steps=n_steps, max_tokens=limit, stop=stops),
                            nodes, n_steps, limits, stops):
            self.same_ticks(*done)

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

    # ----------------------------------------------------------------------------------------------------------- settings

    @rule(pick=PICK, kind=st.sampled_from(["equal", "steps", "banned", "one", "none", "huge", "nan", "infinite", "short", "two rows"]), salt=st.integers(0, 63))
    def set_logits(self, pick: int, kind: str, salt: int) -> None:
        self.do_set_logits(self.pick(pick, self.healthy), kind, salt)

    def do_set_logits(self, node: Node, kind: str, salt: int) -> None:
        n = len(self.ref.pieces)
        steps = (np.arange(n) * (2 * salt + 1)) % 64 / 8 - 4
        at = np.arange(n) == 97 + salt % 6
        kinds = {"equal": np.zeros(n), "banned": np.where(steps > 0, steps, -INF), "one": np.where(at, 1.0, -INF), "none": np.full(n, -INF), "huge": np.where(steps > 3, 3e38, -3e38),
                 "nan": np.where(at, np.nan, steps), "infinite": np.where(at, INF, steps), "short": steps[1:], "two rows": np.stack([steps, steps])}
        row = kinds.get(kind, steps).astype(np.float32)
        self.act("set_logits", lambda: self.ref.set_logits(node, row), lambda: self.handles[node].set_logits(row), node, kind, salt)

    @rule(pick=PICK, picks=PICKS, alpha=st.sampled_from(ALPHAS), oddly=ODDLY)
    def merge_logits(self, pick: int, picks: bytes, alpha: float, oddly: int) -> None:
        node = self.pick(pick, self.ready)
        experts = self.several(picks[:3], self.ready, oddly)
        if oddly % 4 == 1:
            experts.append(node)  # its own expert
        branches = self.of(experts)
        self.act("merge_logits", lambda: self.merge(node, experts, alpha), lambda: self.handles[node].merge_logits(branches, alpha), node, experts, alpha)

    def merge(self, node: Node, experts: list[Node], alpha: float) -> None:
        self.ref.merge_logits(node, experts, alpha)

    @rule(pick=PICK, sampling=SAMPLINGS | st.sampled_from(BAD_SAMPLINGS), change=st.integers(0, 5))
    def set_sampling(self, pick: int, sampling: Sampling, change: int) -> None:
        node = self.pick(pick, self.healthy)
        if change < 3:  # equal settings, or another temperature: the stream goes on
            sampling = replace(node.state.sampling, temperature=[node.state.sampling.temperature, 2.0, 0.0][change], seed=None)
        self.do_set_sampling(node, sampling)

    def do_set_sampling(self, node: Node, sampling: Sampling) -> None:
        self.act("set_sampling", lambda: self.ref.set_sampling(node, sampling), lambda: setattr(self.handles[node], "sampling", sampling), node, sampling)

    @rule(pick=PICK, literal=st.none() | LITERALS, is_bad=st.sampled_from([False, False, False, True]))
    def set_grammar(self, pick: int, literal: bytes | None, is_bad: bool) -> None:
        node = self.pick(pick, self.healthy)
        text = BAD_GRAMMAR if is_bad else None if literal is None else gbnf(literal)
        grammar = Grammar(text) if text is not None and pick % 2 else text
        self.act("set_grammar", lambda: self.ref.set_grammar(node, literal, not is_bad), lambda: self.handles[node].set_grammar(grammar), node, text)

    @rule(pick=PICK, bias=BIASES, kind=st.sampled_from(["bias", "steer"]), bad=st.sampled_from([None, None, None, *BAD_BIASES]))
    def set_bias(self, pick: int, bias: dict[int, float], kind: str, bad: tuple[int, float] | None) -> None:
        node = self.pick(pick, self.healthy)
        bias = {**bias, **dict([bad] if bad else [])}
        branch = self.handles[node]
        self.act("set_bias", lambda: self.ref.set_bias(node, kind, tuple(bias.items())), lambda: (branch.set_bias if kind == "bias" else branch.steer)(bias or None), node, kind, bias)

    # ------------------------------------------------------------------------------------------------------------- asking

    @rule(pick=PICK, strange=st.sampled_from([[], [], [], [-1], [2**31 - 1]]))
    def ask(self, pick: int, strange: list[int]) -> None:
        """What is legal, the distribution, a view: nothing changes, not even by a cancel with nothing to cancel."""
        node = self.pick(pick, self.ready)
        branch, tokens = self.handles[node], [*range(len(self.ref.pieces)), *strange]
        self.store.cancel()
        if done := self.act("ask", lambda: self.ref.legal(node, tokens), lambda: branch.legal(tokens), node, strange):
            assert done[0] == done[1]
        if told := self.act("ask", lambda: self.ref.distribution(node, self.row), branch.distribution, node, counts=False):
            want, got = told
            assert (got.most_likely, got.max_logit) == want[:2]
            assert np.allclose((got.entropy, got.log_sum), want[2:], rtol=1e-9, atol=1e-9)
        if node in self.ready():
            self.views = [*self.views[-2:], (branch.logits_view(), self.rows[branch])]

    # ------------------------------------------------------------------------------------------------- where it cannot be

    @precondition(lambda self: self.gone or any(node.is_poisoned for node in self.ref.live))
    @rule(pick=PICK)
    def of_no_use(self, pick: int) -> None:
        """A branch that is gone or poisoned, wherever a branch can stand."""
        useless = [*self.gone, *(node for node in self.ref.live if node.is_poisoned)]
        node = useless[-1 - pick % len(useless)]
        ref, store, branch = self.ref, self.store, self.handles[node]
        row = np.zeros(len(ref.pieces), np.float32)
        mates = self.ready()[:1]
        two, hands = [*mates, node], self.of([*mates, node])
        calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "fork": (lambda: ref.fork(node, [None]), branch.fork),
            "retain_only": (lambda: ref.retain_only(node), branch.retain_only),
            "fast_forward": (lambda: ref.fast_forward(two[0], node), lambda: hands[0].fast_forward(branch)),
            "prefill": (lambda: ref.prefill([(node, [97])]), lambda: branch.prefill([97])),
            "scatter": (lambda: ref.prefill([(each, []) for each in two]), lambda: store.prefill([(hand, []) for hand in hands])),
            "commit": (lambda: ref.commit(two, [97] * len(two)), lambda: store.commit(hands, [97] * len(two))),
            "sample": (lambda: ref.sample(two, self.draw), lambda: store.sample(hands)),
            "tick": (lambda: ref.tick(two, 1, [None] * len(two), [], self.draw), lambda: store.tick(hands)),
            "set_logits": (lambda: ref.set_logits(node, row), lambda: branch.set_logits(row)),
            "merge_logits": (lambda: ref.merge_logits(node, mates, 1.0), lambda: branch.merge_logits(self.of(mates), 1.0)),
            "merge_logits of it": (lambda: ref.merge_logits(two[0], [node], 1.0), lambda: hands[0].merge_logits([branch], 1.0)),
            "set_sampling": (lambda: ref.set_sampling(node, PLAIN), lambda: setattr(branch, "sampling", PLAIN)),
            "set_grammar": (lambda: ref.set_grammar(node, None), lambda: branch.set_grammar(None)),
            "set_bias": (lambda: ref.set_bias(node, "bias", ((97, 1.0),)), lambda: branch.set_bias({97: 1.0})),
            "legal": (lambda: ref.legal(node, [97]), lambda: branch.legal([97])),
            "distribution": (lambda: ref.distribution(node, self.row), branch.distribution),
            "logits": (lambda: ref.refuse(unplaced(ref.unfit(node))), branch.logits),
        }
        self.tally.operations["of_no_use"] += 1
        for name, (expected, call) in calls.items():
            assert self.act(f"{name} of no use", expected, call, node, counts=False) is None
        assert branch.is_alive == (node in ref.live)
        if node in self.gone:  # what is gone can be pruned again
            self.act("prune of no use", lambda: ref.prune([node]), branch.prune, node, counts=False)
            self.act("prune_subtree of no use", lambda: None, branch.prune_subtree, node, counts=False)

    @precondition(lambda self: self.ready())
    @rule(pick=PICK)
    def of_another_store(self, pick: int) -> None:
        node = self.ready()[pick % len(self.ready())]
        store, branch, stranger = self.store, self.handles[node], self.stranger
        calls: list[Callable[[], object]] = [lambda: store.prune([stranger]), lambda: store.retain_only(stranger), lambda: branch.fast_forward(stranger), lambda: store.prefill([(branch, [97]), (stranger, [97])]),
                                             lambda: store.commit([branch, stranger], [97, 97]), lambda: store.sample([stranger]), lambda: store.tick([branch, stranger]), lambda: branch.merge_logits([stranger])]
        self.tally.operations["of_another_store"] += 1
        for call in calls:
            self.act("of another store", lambda: self.ref.refuse([Reason(errors.InvalidArgumentError)]), call, node, counts=False)
