"""A store beside its reference: every operation on both, and everything compared after it."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine, invariant

import pylloyal
from pylloyal import Branch, Level, LogitsView, Metrics, Model, Sampling, Ticks, TokenFlags, errors

from . import books
from .books import Failed, Kept, Key, Refused
from .measured import INF, Row, Sums
from .oracle import Oracle
from .reference import Reference, Ticked

T = TypeVar("T")
Node = books.Branch  # a branch as the reference has it; a Branch is the kernel's
LOOKING_BACK = Sampling(temperature=0.0, penalty_presence=64.0, penalty_frequency=1.0, penalty_last_n=32)
COUNTED = ("stores", "contexts", "branches", "grammars", "texts")


class Tally:
    """What has been done in all runs of a machine."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.runs = self.n_compared = self.n_branches = self.n_cells = self.n_measured = self.n_unsure = 0

    @property
    def total(self) -> int:
        return self.operations.total()

    def __str__(self) -> str:
        lists: dict[str, dict[str, Any]] = {
            "operations (of them done)": {name: f"{n} ({self.done[name]})" for name, n in self.operations.most_common()},
            "refused": dict(self.refused.most_common()), "failed": dict(self.failed.most_common())}
        n = max(1, self.total)
        return "\n".join([f"{self.total} operations in {self.runs} runs, on {self.n_branches / n:.1f} branches and {self.n_cells / n:.0f} cells on average; {self.n_compared} logits compared with a replay, {self.n_measured} sums of metrics ({self.n_unsure} hang on a rounding)",
                          *(f"  {what}: " + ", ".join(f"{name} {count}" for name, count in counts.items()) for what, counts in lists.items())])


class Shown(NamedTuple):
    """What a branch tells about itself."""

    branch: Branch
    parent: Branch | None
    children: list[Branch]
    position: int
    cells_own: int
    cells_inherited: int
    is_poisoned: bool
    has_logits: bool
    last_token: int
    has_grammar: bool
    n_sampled: int
    sampling: Sampling


class Machine(RuleBasedStateMachine):
    """Two sides of the same. Its rules are in :mod:`.operations`; the engine it runs on is chosen by an ``initialize`` rule that calls :meth:`begin`."""

    tally: ClassVar[Tally]
    oracle: ClassVar[Oracle]
    tolerance: ClassVar[float] = 0.0  # of logits that are not held to the last bit
    agrees = True  # what has been done has been compared

    def begin(self, model: Model, verdict: Callable[[int], int] = lambda n: 0, **options: Any) -> None:
        self.store = model.store(n_threads=1, **options)
        self.other = model.store(n_threads=1, **options)
        self.stranger = self.other.root()
        tokens = range(len(model.vocab))
        eog = frozenset(token for token, flags in zip(tokens, model.vocab.flags(tokens), strict=True) if TokenFlags.END_OF_GENERATION in flags)
        self.ref = Reference(self.store.pressure().n_ctx, options["n_batch"], options["n_branches"], [model.vocab.piece(token) for token in tokens], eog, self.row, verdict, options.get("deterministic", False))
        self.handles: dict[Node, Branch] = {}
        self.gone: list[Node] = []
        self.views: list[tuple[LogitsView, bytes]] = []
        self.kept: list[tuple[Kept, bytes]] = []
        self.agree()
        self.tally.runs += 1

    # ------------------------------------------------------------------------------------------------------ one operation

    def act(self, name: str, expected: Callable[[], Any], call: Callable[[], T], *told: object, counts: bool = True) -> tuple[Any, T] | None:
        """One operation on both sides: the same refusal and nothing changed, the same failure, or both answers.

        The kernel goes first: where its contract leaves it a choice, ``expected`` may see which of those allowed it took.
        """
        if not self.agrees:  # a step of several operations
            self.agree()
        note(" ".join([name, *map(str, told)]))
        if counts:
            self.tally.operations[name] += 1
        self.agrees = False
        got: errors.PylloyalError | None = None
        result: Any = None
        try:
            result = call()
        except errors.PylloyalError as error:
            got = error
        try:
            answer = expected()
        except Refused as want:
            self.is_refused(want, got)
        except Failed as want:
            self.has_failed(want, got)
        else:
            assert got is None, f"refused, and nothing is wrong with it: {got!r}"
            if counts:
                self.tally.done[name] += 1
            return answer, result
        return None

    def is_refused(self, want: Refused, got: errors.PylloyalError | None) -> None:
        assert got is not None, f"done, and it should have been refused: {want.reasons}"
        self.tally.refused[type(got).__name__] += 1
        assert any(type(got) is why.kind and why.index in (None, got.index) and why.need in (None, got.need) and why.have in (None, got.have) for why in want.reasons), (
            f"refused for another reason than {want.reasons}: {got!r}, index {got.index}, need {got.need}, have {got.have}")
        assert (got.state, got.partial, got.engine_rc, got.result) == ("unchanged", False, 0, None)
        before = self.shown, self.rows, self.metrics
        self.look()
        assert (self.shown, self.rows, self.metrics) == before
        self.agrees = True

    def has_failed(self, want: Failed, got: errors.PylloyalError | None) -> None:
        assert got is not None, f"done, and it should have failed: {want.kind.__name__}"
        self.tally.failed[f"{type(got).__name__} {got.state}"] += 1
        assert (type(got), got.state, got.partial, got.engine_rc) == (want.kind, want.state, want.partial, want.engine_rc)
        assert want.index in (None, got.index)
        if want.result is None:
            assert got.result is None
        else:
            self.same_ticks(want.result, got.result)

    def same_ticks(self, want: Ticked, got: Ticks) -> None:
        assert (got.tokens, got.finish, got.n_ticks, got.n_dispatches, got.out_of_cells, got.n_read) == (want.tokens, want.finish, want.n_ticks, want.n_dispatches, want.out_of_cells, want.n_read)

    # --------------------------------------------------------------------------------------------------- what is compared

    def look(self) -> None:
        """Everything the store and its branches tell, logits included."""
        p = self.store.pressure()
        branches = []
        self.rows: dict[Branch, bytes] = {}
        self.metrics: dict[Branch, Metrics] = {}
        for branch in self.store.branches():
            info, children = branch._info(), branch.children
            branches.append(Shown(branch, branch.parent, children, info.position, info.cells_own, info.cells_inherited, bool(info.is_poisoned), bool(info.has_logits), info.last_token,
                                  bool(info.has_grammar), info.n_sampled, branch.sampling))
            assert info.n_children == len(children)
            self.metrics[branch] = branch.metrics
            if info.has_logits:
                self.rows[branch] = branch.logits().tobytes()
        self.shown = ((p.cells_used, p.cells_remaining, p.leases_used, p.leases_remaining, p.n_dispatches, p.n_tokens_decoded, p.n_tokens_sampled), branches)

    def to_be_shown(self) -> tuple[tuple[int, ...], list[Shown]]:
        """The same, from the reference."""
        ref, handle = self.ref, self.handles
        pressure = (ref.cells_used, ref.cells_left, len(ref.live), ref.leases_left, ref.n_dispatches, ref.n_decoded, ref.n_sampled)
        return pressure, [Shown(handle[node], handle[node.parent] if node.parent else None, [handle[child] for child in ref.children(node)], node.position, node.own, node.inherited, node.is_poisoned,
                                node.state.logits is not None, -1 if node.state.last_token is None else node.state.last_token, node.state.grammar is not None, node.state.n_sampled,
                                node.state.sampling) for node in ref.live]

    @invariant()
    def agree(self) -> None:
        ref = self.ref
        self.gone += [node for node in self.handles if node not in ref.live and node not in self.gone]
        self.look()
        assert self.shown == self.to_be_shown()
        assert sum(node.own for node in ref.live) == ref.cells_used  # counted by branch as counted by cell
        for node in ref.live:
            self.same_metrics(node)
            if node.state.logits is not None:
                self.tally.n_compared += 1
                self.same_logits(node, node.state.logits)
        for view, row in self.views:
            try:
                array = view.array
            except errors.StaleHandleError:
                continue
            assert array.tobytes() == row  # a view that can be read tells the truth
        self.tally.n_branches += len(ref.live)
        self.tally.n_cells += ref.cells_used
        self.agrees = True

    def same_logits(self, node: Node, key: Key) -> None:
        """Bit for bit those of a store that has decoded what this branch sees and nothing else: so any two that see the same have the same."""
        assert self.is_row(np.frombuffer(self.rows[self.handles[node]], np.float32), key), f"{node} does not have the logits of what it sees"

    def is_row(self, row: Row, key: Key) -> bool:
        return row.tobytes() == self.oracle.row(key).tobytes() if self.is_exact(key) else float(np.abs(row - self.oracle.row(key)).max()) <= self.tolerance

    def is_exact(self, key: Key) -> bool:
        """Whether logits are held to the last bit."""
        return True

    def same_metrics(self, node: Node) -> None:
        want, got = node.state.measured, self.metrics[self.handles[node]]
        assert (got.n_tokens, got.model is not None, got.sampling is not None) == (want.n_tokens, want.of_model, want.of_sampling)
        if got.model is not None:
            assert is_near(want.model, got.model, 1e-9), f"{node} measures {got.model}, and it is {want.model}"
        if got.sampling is not None:
            self.tally.n_measured += want.n_tokens > 0
            if want.is_sure:
                assert is_near(want.sampling, got.sampling, 1e-5), f"{node} measures {got.sampling}, and it is {want.sampling}"
            else:
                self.tally.n_unsure += 1

    # ------------------------------------------------------------------------------------------------------ what is drawn

    def row(self, node: Node) -> Row:
        assert node.state.logits is not None
        return self.oracle.row(node.state.logits)

    def draw(self, node: Node) -> int | None:
        """What it must draw now: the reference's own answer when greedy, that of a branch brought into the same state otherwise."""
        row = self.row(node)
        scores = self.ref.scores(node.state, row)
        best = int(np.argmax(scores))
        if scores[best] == -INF:
            return None
        if node.state.sampling.temperature <= 0:
            return best
        token = self.oracle.draw(node.state, row)
        assert scores[token] > -INF
        return token

    # --------------------------------------------------------------------------------------------------------------- end

    def teardown(self) -> None:
        """Penalty windows and settings are told by what is drawn last; then nothing is left."""
        if not hasattr(self, "ref"):
            return
        try:
            if self.agrees:
                self.last_words()
        finally:
            self.store.close()
            self.other.close()
        left = pylloyal.live_objects()
        assert not any(left[kind] for kind in COUNTED), left
        assert not any(branch.is_alive for branch in self.handles.values())

    def last_words(self) -> None:
        for node in self.ref.live:
            if node.state.logits is None:
                continue
            branch = self.handles[node]
            for sampling in (node.state.sampling, LOOKING_BACK):
                branch.sampling = replace(sampling, seed=None)
                self.ref.set_sampling(node, replace(sampling, seed=None))
                want = self.draw(node)
                try:
                    assert branch.sample() == want
                except errors.NothingLegalError:
                    assert want is None
        for node in self.ref.live:
            if node.state.window and not node.is_poisoned:
                self.remembers(node)
        if len(self.ref.live) % 2:  # every second time it is closed with everything open
            for node in self.ref.live:
                if node.parent is None:
                    self.handles[node].prune_subtree()
            p = self.store.pressure()
            assert (p.cells_used, p.leases_used) == (0, 0)

    def remembers(self, node: Node) -> None:
        """Were a token of its window forgotten, it would be drawn."""
        branch, window = self.handles[node], node.state.window[-LOOKING_BACK.penalty_last_n :]
        row = np.zeros(len(self.ref.pieces), np.float32)
        row[list(window)] = 32
        branch.set_grammar(None)
        branch.set_bias(None)
        branch.steer(None)
        branch.sampling = LOOKING_BACK
        branch.set_logits(row)
        assert branch.sample() == min(set(range(len(row))) - set(window)), f"{node} has forgotten some of {window}"


def is_near(want: Sums, got: Level, tolerance: float) -> bool:
    """The same numbers, but for the order in which they were added up."""
    return want.n == got.n_tokens and np.allclose([want.surprisal, want.entropy, want.last_surprisal, want.last_entropy],
                                                  [got.surprisal, got.entropy, got.last_surprisal, got.last_entropy], rtol=tolerance, atol=tolerance)
