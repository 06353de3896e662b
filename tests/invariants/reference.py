"""What the operations of a store do, in plain Python: to be read as the specification, and never to ask a kernel.

An operation does all of what it says, or raises: :class:`~.books.Refused`, and nothing has changed; :class:`~.books.Failed`,
which says what has.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from pylloyal import Finish, Sampling, errors

from .books import Bias, Books, Branch, Cell, Failed, Given, Kept, Key, Merged, Reason, Refused, Seen, State, senseless, unplaced, wrong
from .measured import INF, Measured, Priors, Row, certainty, priors_of

Draw = Callable[[Branch], int | None]  # what a branch draws in the state it is in; None when nothing is legal


@dataclass
class Ticked:
    tokens: list[list[int]]
    finish: list[Finish | None]
    n_ticks: int = 0
    n_dispatches: int = 0
    out_of_cells: bool = False
    n_read: list[int] = field(default_factory=list)


class Reference(Books):
    # ---------------------------------------------------------------------------------------------------------- the tree

    def root(self, sampling: Sampling, grammar: bytes | None, start: int, parses: bool = True) -> Branch:
        self.refuse(self.leases(1), senseless(sampling), wrong(not 0 <= start <= 2**24 - self.n_ctx), wrong(not parses, errors.GrammarError))
        return self._born(State(sampling, grammar=grammar), start)

    def fork(self, source: Branch, seeds: Sequence[int | None], with_logits: bool = True) -> list[Branch]:
        self.refuse(unplaced(self.unfit(source)), self.leases(len(seeds)))
        made = []
        for seed in seeds:
            state = replace(source.state, steer=(), logits=source.state.logits if with_logits else None)
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
        packed = self.pack([len(text) for text in texts], order)
        for n, rows in enumerate(packed):
            if n and n == cancel_after:
                raise Failed(errors.DecodeCancelledError, "advanced", partial=True)
            self._dispatch([(branches[i], [texts[i][k] for k in at], at[-1] + 1 == len(texts[i])) for i, at in rows.items()], partial=n > 0)
        return len(packed)

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> None:
        """One token each, in one dispatch or, in a deterministic store, in one for each; grammars and penalty windows take it when it has landed."""
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

    def tick(self, branches: Sequence[Branch], n_steps: int, limits: Sequence[int | None], stops: Sequence[int], draw: Draw, runs: Sequence[tuple[Branch, Sequence[int]]] = (), most: int | None = None) -> Ticked:
        """Draw, set aside those that end, commit the others: up to n_steps times while any can go on; what room is left in a dispatch
        takes of the runs in their order."""
        n, unread = len(branches), sum(len(text) for _, text in runs)
        others = [branch for branch, _ in runs]
        placed = (replace(reason, index=n + reason.index) for reason in self.unfit(*others) if reason.index is not None)
        self.refuse(self.unfit(*branches, ready=True), placed, self.twice([*branches, *others]), unplaced(self.strange(stops)), self.cells(n + unread), wrong(n > self.n_branches),
                    wrong(n_steps < 1), wrong(any(limit is not None and limit < 1 for limit in limits)), unplaced(self.strange(token for _, text in runs for token in text)),
                    wrong(unread and self.is_deterministic, errors.UnsupportedOperationError), wrong(most is not None and most < 1))
        done = Ticked([[] for _ in branches], [None] * n, n_read=[0] * len(runs))
        while done.n_ticks < n_steps and (active := [i for i in range(n) if done.finish[i] is None]):
            if self.cells_left < len(active) + unread - sum(done.n_read):
                done.out_of_cells = True
                break
            before = {i: branches[i].state for i in active}
            drawn = {i: self._draw(branches[i], draw) for i in active}
            for i, token in drawn.items():
                done.finish[i] = Finish.ILLEGAL if token is None else Finish.STOP if token in stops else Finish.END_OF_GENERATION if token in self.eog else None
            going = {i: token for i, token in drawn.items() if token is not None and done.finish[i] is None}
            n_before = self.n_dispatches
            room = min(self.n_batch - len(going), self.n_batch if most is None else most)
            chunks: list[Sequence[int]] = []
            for (_, text), read in zip(runs, done.n_read, strict=True):
                chunks.append(text[read : read + room])
                room -= len(chunks[-1])
            along = [(other, chunk, read + len(chunk) == len(text)) for (other, text), read, chunk in zip(runs, done.n_read, chunks, strict=True) if chunk]
            try:
                if going:
                    self._take([branches[i] for i in going], list(going.values()), done.n_ticks > 0, along)
                    done.n_read = [read + len(chunk) for read, chunk in zip(done.n_read, chunks, strict=True)]
            except Failed as failed:
                if failed.state != "poisoned" and not failed.n_landed:  # it is as if this tick had not been
                    for i, state in before.items():
                        branches[i].state, done.finish[i] = state, None
                for n, i in enumerate(going):
                    if n < failed.n_landed:
                        self._taken(done, i, going[i], limits[i])
                    elif not branches[i].is_poisoned:  # refused, or never tried
                        branches[i].state = before[i]
                failed.index = None if failed.index is None else [*going][failed.index]
                done.n_dispatches += self.n_dispatches - n_before
                failed.result = done if failed.state != "unchanged" else None
                raise
            done.n_dispatches += self.n_dispatches - n_before
            done.n_ticks += 1
            self.n_sampled += sum(token is not None for token in drawn.values())
            for i, token in going.items():
                self._taken(done, i, token, limits[i])
        return done

    @staticmethod
    def _taken(done: Ticked, i: int, token: int, limit: int | None) -> None:
        done.tokens[i].append(token)
        if len(done.tokens[i]) == limit:
            done.finish[i] = Finish.LENGTH

    def _draw(self, branch: Branch, draw: Draw) -> int | None:
        token = draw(branch)
        if token is not None and branch.state.sampling.temperature > 0:
            branch.state = replace(branch.state, n_sampled=branch.state.n_sampled + 1)
        return token

    def _take(self, branches: Sequence[Branch], tokens: Sequence[int], partial: bool, along: Sequence[tuple[Branch, Sequence[int], bool]] = ()) -> None:
        if not self.is_deterministic:
            self._land(branches, tokens, partial, along)
            return
        for n, (branch, token) in enumerate(zip(branches, tokens, strict=True)):
            try:
                self._land([branch], [token], partial or n > 0)
            except Failed as failed:
                failed.index = failed.n_landed = n
                raise

    def _land(self, branches: Sequence[Branch], tokens: Sequence[int], partial: bool, along: Sequence[tuple[Branch, Sequence[int], bool]] = ()) -> None:
        measured = [self._measured(branch, token) for branch, token in zip(branches, tokens, strict=True)]
        self._dispatch([*((branch, [token], True) for branch, token in zip(branches, tokens, strict=True)), *along], partial)
        for branch, token, sums in zip(branches, tokens, measured, strict=True):
            rest = branch.state.grammar
            branch.state = replace(branch.state, last_token=token, window=(*branch.state.window, token), grammar=rest[len(self.pieces[token]) :] if rest else rest, measured=sums)

    def _measured(self, branch: Branch, token: int) -> Measured:
        """Against what it was chosen from: the logits, and what the sampler makes of them before it takes the token."""
        state = branch.state
        if not (state.measured.of_model or state.measured.of_sampling) or state.logits is None:
            return state.measured
        logits = self.logits_of(branch)
        return state.measured.take(token, logits, self.scores(state, logits), state.sampling)

    def _dispatch(self, parts: Sequence[tuple[Branch, Sequence[int], bool]], partial: bool) -> None:
        """Lands whole, or leaves everything as it was (codes 1 and -1), or poisons its branches and no others."""
        self.n_dispatches += 1
        rc = self.verdict(self.n_dispatches)
        if rc in (1, -1):
            raise Failed(kind_of(rc), "advanced" if partial else "unchanged", partial, rc)
        for branch, tokens, is_finished in parts:
            if rc:
                branch.doubtful = len(tokens)
            else:
                branch.cells += tuple(Cell(branch.position + i, token, self.n_dispatches, branch.born) for i, token in enumerate(tokens))
            branch.state = replace(branch.state, logits=seen(branch) if is_finished and not rc else None)
        if rc:
            raise Failed(errors.DecodeError, "poisoned", partial, rc)
        self.n_decoded += sum(len(tokens) for _, tokens, _ in parts)

    def pack(self, lengths: Sequence[int], order: Sequence[int] | None = None) -> list[dict[int, list[int]]]:
        return packs(lengths, self.n_batch, order, self.is_deterministic)

    # ----------------------------------------------------------------------------------------------- anew, and elsewhere

    def score(self, source: Branch | None, prompts: Sequence[Sequence[int]], ids: Sequence[int] | None, told: int | None = None) -> list[Key]:
        """Through forks that are gone again, as many at a time as leases and cells allow. How many tokens the kernel has decoded by now,
        ``told``, shows in what order it packed when one failed."""
        outside = list(unplaced(self.strange(token for prompt in prompts for token in prompt)))
        self.refuse(wrong(source and source not in self.live, errors.StaleHandleError), outside)
        if not prompts or ids == []:  # nothing is asked for
            return []
        state, cells, start = (source.state, source.cells, source.start) if source else (None, (), 0)
        after_nothing = state.logits if state else None
        self.refuse(unplaced(self.unfit(source)) if source else [], self.strange(ids or []), self.leases(1),
                    (Reason(errors.InvalidArgumentError, i) for i, prompt in enumerate(prompts) if not prompt and after_nothing is None),
                    (Reason(errors.ContextOverflowError, i, len(prompt), self.cells_left) for i, prompt in enumerate(prompts) if len(prompt) > self.cells_left))
        for wave in self.waves(prompts):
            self.has_recycled = self.has_recycled or any(wave)
            self._throw_away([len(prompt) for prompt in wave], told)
        seen = {(cell.position, cell.token) for cell in cells}
        return [Seen(frozenset(seen | {(start + len(cells) + n, token) for n, token in enumerate(prompt)})) if prompt or after_nothing is None else after_nothing for prompt in prompts]

    def waves(self, prompts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
        waves: list[list[Sequence[int]]] = [[]]
        for prompt in prompts:
            if waves[-1] and (len(waves[-1]) == self.leases_left or sum(map(len, waves[-1])) + len(prompt) > self.cells_left):
                waves.append([])
            waves[-1].append(prompt)
        return waves

    def _throw_away(self, lengths: Sequence[int], told: int | None) -> None:
        """Decodes on branches that nobody will see: nothing is left of them, whatever became of it."""
        n = len(self.pack(lengths))
        codes = [self.verdict(self.n_dispatches + 1 + i) for i in range(n)]
        at = next((i for i, rc in enumerate(codes) if rc), n)
        orders = permutations(range(len(lengths))) if 0 < at < n else [range(len(lengths))]
        landed = {sum(len(tokens) for rows in self.pack(lengths, order)[:at] for tokens in rows.values()) for order in orders}
        self.n_decoded += told - self.n_decoded if told is not None and told - self.n_decoded in landed else min(landed)
        self.n_dispatches += min(at + 1, n)
        if at < n:
            raise Failed(kind_of(codes[at]), "unchanged", partial=False, engine_rc=codes[at])

    def reseed_kv(self, branch: Branch, tokens: Sequence[int]) -> None:
        """A leaf, emptied and decoded anew from position 0; everything else about it stays."""
        room = self.cells_left + branch.own
        self.refuse(unplaced(self.unfit(branch)), wrong(self.children(branch), errors.BranchHasChildrenError), wrong(not tokens), unplaced(self.strange(tokens)),
                    [Reason(errors.ContextOverflowError, None, len(tokens), room)] if len(tokens) > room else [])
        self.has_recycled = self.has_recycled or branch.own > 0
        branch.cells, branch.start, branch.inherited = (), 0, 0
        branch.state = replace(branch.state, logits=None)
        for rows in self.pack([len(tokens)]):
            self._dispatch([(branch, [tokens[k] for k in rows[0]], rows[0][-1] + 1 == len(tokens))], partial=True)

    def save(self, branch: Branch, with_logits: bool) -> Kept:
        self.refuse(unplaced(self.unfit(branch)))
        return Kept(branch.state if with_logits else replace(branch.state, logits=None), branch.start, branch.cells)

    def load(self, kept: Kept) -> Branch:
        """A root that is as the saved one was, in cells of its own."""
        self.refuse(self.leases(1), self.cells(len(kept.cells)))
        made = self._born(kept.state, kept.start)
        made.cells = tuple(cell._replace(dispatch=-made.born, owner=made.born) for cell in kept.cells)
        return made

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

    def reseed(self, branch: Branch, seed: int) -> None:
        """From the beginning of the stream, also when it is the one that is there."""
        self.refuse(unplaced(self.unfit(branch)))
        branch.state = reseeded(branch.state, seed)

    def set_metrics(self, branch: Branch, of_model: bool, of_sampling: bool) -> None:
        self.refuse(unplaced(self.unfit(branch)))
        branch.state = replace(branch.state, measured=Measured(of_model, of_sampling))

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
        banned = {token for token, by in (*branch.state.bias, *branch.state.steer) if by == -INF} | (self.eog if branch.state.sampling.ignore_eog else set())
        return [self.allows(branch.state.grammar, token) and token not in banned for token in tokens]

    def distribution(self, branch: Branch) -> tuple[int, float, float, float]:
        """The most likely token, its logit, the entropy in nats, and the logarithm of the sum of exponentials."""
        self.refuse(unplaced(self.unfit(branch, ready=True)))
        found = certainty(self.logits_of(branch))
        if found is None:
            raise Refused([Reason(errors.NothingLegalError)])
        return found

    def surprisal(self, branch: Branch, token: int) -> float:
        outside = list(unplaced(self.strange([token])))
        try:
            log_sum = self.distribution(branch)[3]
        except Refused as refused:
            raise Refused([*refused.reasons, *outside]) from None
        self.refuse(outside)
        return log_sum - float(self.logits_of(branch)[token])

    def logits_at(self, branch: Branch, tokens: Sequence[int]) -> list[float]:
        self.refuse(unplaced(self.unfit(branch, ready=True)), self.strange(tokens))
        row = self.logits_of(branch)
        return [float(row[token]) for token in tokens]

    def priors(self, branch: Branch, n: int | None) -> Priors:
        """Of what grammar, bias and steering allow; penalties and truncation have no say."""
        self.refuse(wrong(n is not None and n < 0), unplaced(self.unfit(branch, ready=True)))
        free = replace(branch.state, sampling=replace(branch.state.sampling, penalty_last_n=0))
        found = priors_of(self.scores(free, self.logits_of(branch)), len(self.pieces) if n is None else n)
        if found is None:
            raise Refused([Reason(errors.NothingLegalError)])
        return found

    def scores(self, state: State, logits: Row) -> Row:
        """What it is sampled by: logits, biases, steering, then penalties; -infinity for what is not legal. Greedy is the first of the largest."""
        row, s = logits.copy(), state.sampling
        if s.ignore_eog:
            row[list(self.eog)] = -INF
        with np.errstate(over="ignore"):
            for token, by in (*state.bias, *state.steer):
                row[token] += np.float32(by)
            for token, n in Counter(state.window[-s.penalty_last_n :] if s.penalty_last_n else ()).items():
                if row[token] > -INF:
                    row[token] = row[token] * np.float32(s.penalty_repeat) if row[token] <= 0 else row[token] / np.float32(s.penalty_repeat)
                    row[token] -= np.float32(n * s.penalty_frequency + s.penalty_presence)
        return row if state.grammar is None else np.where([self.allows(state.grammar, token) for token in range(len(row))], row, np.float32(-INF))


def kind_of(rc: int) -> type[errors.PylloyalError]:
    kinds: dict[int, type[errors.PylloyalError]] = {1: errors.NoCellsError, -1: errors.InternalKernelError}
    return kinds.get(rc, errors.DecodeError)


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


def packs(lengths: Sequence[int], n_batch: int, order: Sequence[int] | None = None, alone: bool = False) -> list[dict[int, list[int]]]:
    """Dispatches: for each of the runs in it, which of its tokens. Alone, a dispatch holds tokens of one run."""
    packed: list[dict[int, list[int]]] = []
    room = 0
    for i in order if order is not None else range(len(lengths)):
        room = 0 if alone else room
        for k in range(lengths[i]):
            if not room:
                packed.append({})
                room = n_batch
            packed[-1].setdefault(i, []).append(k)
            room -= 1
    return packed
