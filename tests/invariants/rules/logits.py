"""Logits that are set and merged."""
from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import rule

from ..machine import Node
from ..measured import INF
from .basis import ALPHAS, ODDLY, PICK, PICKS, Basis


class Logits(Basis):
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
