"""What is decoded and thrown away again (scores), and what is thrown away and decoded again (a branch reseeded)."""
from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import rule

from ..books import Key
from .basis import ODD, ODDLY, PICK, TEXTS, Basis


class Anew(Basis):
    @rule(pick=PICK, texts=st.lists(TEXTS, max_size=5), ids=st.none() | st.lists(st.integers(0, 259), max_size=3), oddly=ODDLY)
    def score(self, pick: int, texts: list[list[int]], ids: list[int] | None, oddly: int) -> None:
        """Oddly, with a prompt that is too long, or tokens that are none."""
        source = self.pick(pick, self.healthy) if oddly % 4 else None
        branch = self.handles[source] if source is not None else None
        ids = ids if ids is None else [token % len(self.ref.pieces) for token in ids]
        if oddly == ODD and texts:
            texts[-1] = [97] * (self.ref.cells_left + 1)
        elif oddly == ODD - 1 and ids is not None:
            ids = [*ids, len(self.ref.pieces)]
        elif oddly == ODD - 2 and texts:
            texts[0] = [97, -1]
        exactly: list[bool] = []

        def expected() -> list[Key]:
            n_waves = len(self.ref.waves(texts)) if self.ref.leases_left else 0
            keys = self.ref.score(source, texts, ids, self.store.pressure().n_tokens_decoded)
            exactly.extend(n_waves == 1 and self.is_exact(key) for key in keys)
            return keys

        if done := self.act("score", expected, lambda: self.store.score(texts, source=branch, tokens=ids), source, texts, ids):
            keys, rows = done
            assert rows.shape == (len(texts), len(self.ref.pieces) if ids is None else len(ids))
            for key, row, exact in zip(keys, rows, exactly, strict=False):
                want = self.oracle.row(key) if ids is None else self.oracle.row(key)[ids]
                assert np.allclose(row, want, rtol=0, atol=0 if exact else self.tolerance), f"the logits after {texts} on {source} are not those of what was read"

    @rule(pick=PICK, sinks=TEXTS, tail=TEXTS, oddly=ODDLY)
    def reseed_kv(self, pick: int, sinks: list[int], tail: list[int], oddly: int) -> None:
        """Oddly, to the last cell there is with its own, or one beyond; or with a token that is none."""
        node = self.pick(pick, self.leaves if oddly % 4 else self.healthy)
        if oddly >= ODD - 1 and node in self.ref.live:
            tail = [97] * (self.ref.cells_left + node.own - len(sinks) + oddly - ODD + 1)
        elif oddly == ODD - 2:
            tail = [*tail, len(self.ref.pieces)]
        self.act("reseed_kv", lambda: self.ref.reseed_kv(node, [*sinks, *tail]), lambda: self.handles[node].reseed_kv(sinks, tail), node, sinks, tail)
