"""What the operations of a store do, in plain Python: to be read as the specification, and never to ask a kernel.

An operation does all of what it says, or raises: :class:`~.books.Refused`, and nothing has changed; :class:`~.books.Failed`,
which says what has.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pylloyal import Finish, Sampling, errors

from .books import INF, Bias, Books, Branch, Cell, Failed, Given, Merged, Reason, Seen, State, senseless, unplaced, wrong

Draw = Callable[[Branch], int | None]  # what a branch draws in the state it is in; None when nothing is legal
Row = npt.NDArray[np.float32]


@dataclass
class Ticked:
    tokens: list[list[int]]
    finish: list[Finish | None]
    n_ticks: int = 0
    n_dispatches: int = 0
    out_of_cells: bool = False


class Reference(Books):
    # ---------------------------------------------------------------------------------------------------------- the tree

    def root(self, sampling: Sampling, grammar: bytes | None, start: int, parses: bool = True) -> Branch:
        self.refuse(self.leases(1), senseless(sampling), wrong(not 0 <= start <= 2**24 - self.n_ctx), wrong(not parses, errors.GrammarError))
        return self._born(State(sampling, grammar=grammar), start)

    def fork(self, source: Branch, seeds: Sequence[int | None]) -> list[Branch]:
        self.refuse(unplaced(self.unfit(source)), self.leases(len(seeds)))
        made = []
        for seed in seeds:
            state = replace(source.state, steer=())
            made.append(self._born(state if seed is None else reseeded(state, seed), source.start))
            made[-1].parent, made[-1].cells, made[-1].inherited = source, source.cells, len(source.cells)
        return made

    def _born(self, state: State, start: int) -> Branch:
        self.n_born += 1
        self.live.append(Branch(state, start, self.n_born))
        return self.live[-1]

    def prune(self, branches: Sequence[Branch]) -> None:
        """What is gone already is skipped."""
        orphans = [branch for branch in branches if any(child not in branches for child in self.children(branch))]
        self.refuse(Reason(errors.BranchHasChildrenError, branches.index(branch)) for branch in orphans)
        self.live = [branch for branch in self.live if branch not in branches]

    def prune_subtree(self, branch: Branch) -> None:
        self.prune(self.below(branch))

    def retain_only(self, branch: Branch) -> None:
        self.refuse(unplaced(self.unfit(branch)))
        self.live = [branch]
        branch.parent, branch.inherited = None, 0

    def fast_forward(self, parent: Branch, child: Branch) -> None:
        """A poisoned parent is welcome: this repairs it."""
        has_strayed = child.parent is not parent or child.cells[: child.inherited] != parent.cells
        self.refuse(wrong(parent not in self.live, errors.StaleHandleError), unplaced(self.unfit(child)), wrong(has_strayed, errors.DivergedError))
        parent.state, parent.cells, parent.doubtful = child.state, child.cells, 0
        for grandchild in self.children(child):
            grandchild.parent = parent
        self.live.remove(child)

    # ---------------------------------------------------------------------------------------------------------- decoding

    def prefill(self, runs: Sequence[tuple[Branch, Sequence[int]]], order: Sequence[int] | None = None, cancel_after: int | None = None) -> int:
        """As few dispatches as will do. In which order runs are packed is the kernel's choice, and shows only when one fails."""
        branches, texts = [branch for branch, _ in runs], [text for _, text in runs]
        self.refuse(self.unfit(*branches), self.twice(branches), unplaced(self.strange(token for text in texts for token in text)), self.cells(sum(map(len, texts))))
        packed = pack([len(text) for text in texts], self.n_batch, order)
        for n, rows in enumerate(packed):
            if n and n == cancel_after:
                raise Failed(errors.DecodeCancelledError, "advanced", partial=True)
            self._dispatch([(branches[i], [texts[i][k] for k in at], at[-1] + 1 == len(texts[i])) for i, at in rows.items()], partial=n > 0)
        return len(packed)

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> None:
        """One token each, in one dispatch; grammars and penalty windows take it when it has landed."""
        illegal = (Reason(errors.GrammarError, i) for i, (branch, token) in enumerate(zip(branches, tokens, strict=False)) if not self.allows(branch.state.grammar, token))
        n = len(branches)
        self.refuse(self.unfit(*branches), self.twice(branches), self.strange(tokens), illegal, self.cells(n), wrong(n != len(tokens)), wrong(n > self.n_branches))
        if branches:
            self._take(branches, tokens, partial=False)

    def sample(self, branches: Sequence[Branch], draw: Draw) -> list[int]:
        """One draw after the other, so that a branch that stands twice draws twice; when one cannot, none has."""
        self.refuse(self.unfit(*branches, ready=True), wrong(len(branches) > self.n_branches))
        before = {branch: branch.state for branch in branches}
        drawn = [self._draw(branch, draw) for branch in branches]
        if None in drawn:
            for branch, state in before.items():
                branch.state = state
        self.refuse(Reason(errors.NothingLegalError, i) for i, token in enumerate(drawn) if token is None)
        self.n_sampled += len(drawn)
        return [token for token in drawn if token is not None]

    def tick(self, branches: Sequence[Branch], n_steps: int, limits: Sequence[int | None], stops: Sequence[int], draw: Draw) -> Ticked:
        """Draw, set aside those that end, commit the others: up to n_steps times while any can go on."""
        n = len(branches)
        self.refuse(self.unfit(*branches, ready=True), self.twice(branches), unplaced(self.strange(stops)), self.cells(n), wrong(n > self.n_branches),
                    wrong(n_steps < 1), wrong(any(limit is not None and limit < 1 for limit in limits)))
        done = Ticked([[] for _ in branches], [None] * n)
        while done.n_ticks < n_steps and (active := [i for i in range(n) if done.finish[i] is None]):
            if self.cells_left < len(active):
                done.out_of_cells = True
                break
            before = {i: branches[i].state for i in active}
            drawn = {i: self._draw(branches[i], draw) for i in active}
            for i, token in drawn.items():
                done.finish[i] = Finish.ILLEGAL if token is None else Finish.STOP if token in stops else Finish.END_OF_GENERATION if token in self.eog else None
            going = {i: token for i, token in drawn.items() if token is not None and done.finish[i] is None}
            if going:
                done.n_dispatches += 1
                try:
                    self._take([branches[i] for i in going], list(going.values()), partial=done.n_ticks > 0)
                except Failed as failed:
                    if failed.state != "poisoned":  # it is as if this tick had not been
                        for i, state in before.items():
                            branches[i].state, done.finish[i] = state, None
                    failed.result = done if failed.state != "unchanged" else None
                    raise
            done.n_ticks += 1
            self.n_sampled += sum(token is not None for token in drawn.values())
            for i, token in going.items():
                done.tokens[i].append(token)
                if len(done.tokens[i]) == limits[i]:
                    done.finish[i] = Finish.LENGTH
        return done

    def _draw(self, branch: Branch, draw: Draw) -> int | None:
        token = draw(branch)
        if token is not None and branch.state.sampling.temperature > 0:
            branch.state = replace(branch.state, n_sampled=branch.state.n_sampled + 1)
        return token

    def _take(self, branches: Sequence[Branch], tokens: Sequence[int], partial: bool) -> None:
        self._dispatch([(branch, [token], True) for branch, token in zip(branches, tokens, strict=True)], partial)
        for branch, token in zip(branches, tokens, strict=True):
            rest = branch.state.grammar
            branch.state = replace(branch.state, last_token=token, window=(*branch.state.window, token), grammar=rest[len(self.pieces[token]) :] if rest else rest)

    def _dispatch(self, parts: Sequence[tuple[Branch, Sequence[int], bool]], partial: bool) -> None:
        """Lands whole, or leaves everything as it was (codes 1 and -1), or poisons its branches and no others."""
        self.n_dispatches += 1
        rc = self.verdict(self.n_dispatches)
        if rc in (1, -1):
            raise Failed(errors.NoCellsError if rc == 1 else errors.InternalKernelError, "advanced" if partial else "unchanged", partial, rc)
        for branch, tokens, is_finished in parts:
            if rc:
                branch.doubtful = len(tokens)
            else:
                branch.cells += tuple(Cell(branch.position + i, token, self.n_dispatches, branch.born) for i, token in enumerate(tokens))
            branch.state = replace(branch.state, logits=seen(branch) if is_finished and not rc else None)
        if rc:
            raise Failed(errors.DecodeError, "poisoned", partial, rc)
        self.n_decoded += sum(len(tokens) for _, tokens, _ in parts)

    # ---------------------------------------------------------------------------------------------------------- settings

    def set_logits(self, branch: Branch, row: npt.NDArray[Any]) -> None:
        self.refuse(unplaced(self.unfit(branch)), wrong(row.shape != (len(self.pieces),) or not (row < INF).all()))
        branch.state = replace(branch.state, logits=Given(row.astype(np.float32).tobytes()))

    def merge_logits(self, branch: Branch, experts: Sequence[Branch], alpha: float) -> None:
        self.refuse(unplaced(self.unfit(branch, ready=True)), self.unfit(*experts, ready=True), wrong(not np.isfinite(alpha)))
        own, *others = [node.state.logits for node in (branch, *experts) if node.state.logits is not None]
        branch.state = replace(branch.state, logits=Merged(own, tuple(others), alpha))

    def set_sampling(self, branch: Branch, sampling: Sampling) -> None:
        """Without a seed, or with the one in force, the stream goes on; the window always does."""
        self.refuse(unplaced(self.unfit(branch)), senseless(sampling))
        state = replace(branch.state, sampling=replace(sampling, seed=branch.state.sampling.seed))
        branch.state = state if sampling.seed in (None, state.sampling.seed) else reseeded(state, sampling.seed)

    def set_grammar(self, branch: Branch, grammar: bytes | None, parses: bool = True) -> None:
        self.refuse(unplaced(self.unfit(branch)), wrong(not parses, errors.GrammarError))
        branch.state = replace(branch.state, grammar=grammar)

    def set_bias(self, branch: Branch, kind: str, bias: Bias) -> None:
        endless = (Reason(errors.InvalidArgumentError, i) for i, (_, by) in enumerate(bias) if not by < INF)
        self.refuse(unplaced(self.unfit(branch)), self.strange(token for token, _ in bias), endless)
        branch.state = replace(branch.state, bias=bias) if kind == "bias" else replace(branch.state, steer=bias)

    # ------------------------------------------------------------------------------------------------- what may come next

    def allows(self, grammar: bytes | None, token: int) -> bool:
        if grammar is None or not 0 <= token < len(self.pieces):
            return True
        return bool(self.pieces[token]) and grammar.startswith(self.pieces[token]) if grammar else token in self.eog

    def legal(self, branch: Branch, tokens: Sequence[int]) -> list[bool]:
        self.refuse(unplaced(self.unfit(branch)), self.strange(tokens))
        banned = {token for token, by in (*branch.state.bias, *branch.state.steer) if by == -INF}
        return [self.allows(branch.state.grammar, token) and token not in banned for token in tokens]

    def distribution(self, branch: Branch, row: Callable[[Branch], Row]) -> tuple[int, float, float, float]:
        """The most likely token, its logit, the entropy in nats, and the logarithm of the sum of exponentials."""
        self.refuse(unplaced(self.unfit(branch, ready=True)))
        logits = row(branch).astype(np.float64)
        top = float(logits.max())
        self.refuse(wrong(top == -INF, errors.NothingLegalError))
        e = np.exp(logits - top)
        p = e[e > 0] / e.sum()
        return int(np.argmax(logits)), top, float(-(p * np.log(p)).sum()), top + float(np.log(e.sum()))

    def scores(self, state: State, logits: Row) -> Row:
        """What it is sampled by: logits, biases, steering, then penalties; -infinity for what is not legal. Greedy is the first of the largest."""
        row, s = logits.copy(), state.sampling
        with np.errstate(over="ignore"):
            for token, by in (*state.bias, *state.steer):
                row[token] += np.float32(by)
            for token, n in Counter(state.window[-s.penalty_last_n :] if s.penalty_last_n else ()).items():
                if row[token] > -INF:
                    row[token] = row[token] * np.float32(s.penalty_repeat) if row[token] <= 0 else row[token] / np.float32(s.penalty_repeat)
                    row[token] -= np.float32(n * s.penalty_frequency + s.penalty_presence)
        return row if state.grammar is None else np.where([self.allows(state.grammar, token) for token in range(len(row))], row, np.float32(-INF))


def reseeded(state: State, seed: int) -> State:
    return replace(state, sampling=replace(state.sampling, seed=seed), n_sampled=0)


def seen(branch: Branch) -> Seen:
    return Seen(frozenset((cell.position, cell.token) for cell in branch.cells))


def merged(row: Row, experts: Sequence[Row], alpha: float) -> Row:
    """A ban of one's own stays, an expert's counts when alpha is positive, and nothing becomes infinite that was not."""
    total = sum((expert.astype(np.float64) for expert in experts), np.zeros(len(row)))
    most = float(np.finfo(np.float32).max)
    with np.errstate(invalid="ignore"):
        both = np.where(np.isfinite(total), np.clip(row + alpha * total, -most, most), -INF if alpha > 0 else row)
    return np.where(row == -INF, row, both).astype(np.float32)


def pack(lengths: Sequence[int], n_batch: int, order: Sequence[int] | None = None) -> list[dict[int, list[int]]]:
    """Dispatches: for each of the runs in it, which of its tokens."""
    rows = [(i, k) for i in (order if order is not None else range(len(lengths))) for k in range(lengths[i])]
    packed: list[dict[int, list[int]]] = []
    for at, (i, k) in enumerate(rows):
        if at % n_batch == 0:
            packed.append({})
        packed[-1].setdefault(i, []).append(k)
    return packed
