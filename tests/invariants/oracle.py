"""What logits and draws must be, from stores that have never held but one branch."""
from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from pylloyal import Model, Store

from .books import Given, Key, Seen, State
from .measured import Row
from .reference import merged


def gbnf(literal: bytes) -> str:
    """A grammar of exactly this string."""
    return f'root ::= "{literal.decode()}"'


class Oracle:
    """Replays a branch on its own, in dispatches of at most ``n_batch``.

    Parameters
    ----------
    model : Model
        An engine that does not fail.
    options
        How to open the stores.
    """

    def __init__(self, model: Model, *, n_rows: int = 4096, **options: Any) -> None:
        self.model = model
        self._options = options
        self._rows: OrderedDict[Key, Row] = OrderedDict()
        self._n_rows = n_rows

    def _opened(self, **options: Any) -> Store:
        return self.model.store(**{**self._options, **options})

    def row(self, key: Key) -> Row:
        """The logits a key stands for."""
        if key in self._rows:
            self._rows.move_to_end(key)
            return self._rows[key]
        if isinstance(key, Seen):
            cells = sorted(key.cells)
            with self._opened(n_branches=1) as store:
                branch = store.root(start_pos=cells[0][0])
                branch.prefill([token for _, token in cells])
                made: Row = branch.logits()
        elif isinstance(key, Given):
            made = np.frombuffer(key.row, np.float32)
        else:
            made = merged(self.row(key.own), [self.row(expert) for expert in key.experts], key.alpha)
        made.flags.writeable = False
        self._rows[key] = made
        if len(self._rows) > self._n_rows:
            self._rows.popitem(last=False)
        return made

    def draw(self, state: State, row: Row) -> int:
        """What a branch in this state draws from these logits: one that was brought into it by itself."""
        at_once = 16
        with self._opened(n_branches=at_once) as store:
            branch = store.root(sampling=state.sampling)
            branch.set_logits(np.zeros(len(self.model.vocab), np.float32))
            for done in range(0, state.n_sampled, at_once):
                store.sample([branch] * min(at_once, state.n_sampled - done))
            for token in state.window[max(0, len(state.window) - state.sampling.penalty_last_n) :]:
                branch.commit(token)
            if state.grammar is not None:
                branch.set_grammar(gbnf(state.grammar))
            branch.set_bias(dict(state.bias))
            branch.steer(dict(state.steer))
            branch.set_logits(row)
            return branch.sample()
