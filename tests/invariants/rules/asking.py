"""What the logits of a branch say, and what may come next: nothing changes."""
from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import rule

from ..machine import Node
from .basis import PICK, Basis

STRANGE = st.sampled_from([[], [], [], [-1], [2**31 - 1]])


class Asking(Basis):
    @rule(pick=PICK, strange=STRANGE)
    def ask(self, pick: int, strange: list[int]) -> None:
        """What is legal, the distribution, a view: nothing changes, not even by a cancel with nothing to cancel."""
        node = self.pick(pick, self.ready)
        branch, tokens = self.handles[node], [*range(len(self.ref.pieces)), *strange]
        self.store.cancel()
        if done := self.act("ask", lambda: self.ref.legal(node, tokens), lambda: branch.legal(tokens), node, strange):
            assert done[0] == done[1]
        if told := self.act("ask", lambda: self.ref.distribution(node), branch.distribution, node, counts=False):
            want, got = told
            assert (got.most_likely, got.max_logit) == want[:2]
            assert np.allclose((got.entropy, got.log_sum), want[2:], rtol=1e-9, atol=1e-9)
        if node in self.ready():
            self.views = [*self.views[-2:], (branch.logits_view(), self.rows[branch])]

    @rule(pick=PICK, tokens=st.lists(st.integers(0, 259), max_size=4), strange=STRANGE)
    def ask_of_tokens(self, pick: int, tokens: list[int], strange: list[int]) -> None:
        """The logits of some, and of each whether it may come and how surprising it would be."""
        node = self.pick(pick, self.ready)
        branch, tokens = self.handles[node], [token % len(self.ref.pieces) for token in tokens] + strange
        if done := self.act("ask_of_tokens", lambda: self.ref.logits_at(node, tokens), lambda: branch.logits_at(tokens).tolist(), node, tokens):
            assert done[0] == done[1]
        for token in tokens:
            self.ask_of_one(node, token)

    def ask_of_one(self, node: Node, token: int) -> None:
        branch = self.handles[node]
        if legal := self.act("is_legal", lambda: self.ref.legal(node, [token]), lambda: branch.is_legal(token), node, token, counts=False):
            assert legal[0] == [legal[1]]
        if told := self.act("surprisal", lambda: self.ref.surprisal(node, token), lambda: branch.surprisal(token), node, token, counts=False):
            assert np.isclose(told[0], told[1], rtol=1e-9, atol=1e-9)

    @rule(pick=PICK, n=st.sampled_from([None, 0, 1, 5, 259, 260, 1000, -1]))
    def priors(self, pick: int, n: int | None) -> None:
        node = self.pick(pick, self.ready)
        if done := self.act("priors", lambda: self.ref.priors(node, n), lambda: self.handles[node].priors(n), node, n):
            want, got = done
            assert (got.tokens.tolist(), got.n_legal) == (want.tokens, want.n_legal)
            assert np.allclose(got.log_probs, want.log_probs, rtol=1e-6, atol=1e-6)
