"""Branches as bytes, and branches of bytes."""
from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

import pylloyal
from pylloyal import Model, errors

from ..books import Reason
from .basis import PICK, Basis


@cache
def of_another_model() -> bytes:
    with Model("stub:n_vocab=261") as model, model.store(n_branches=1, n_ctx=8, n_threads=1) as store:
        return store.root().to_bytes()


class Saving(Basis):
    @rule(pick=PICK, logits=st.booleans())
    def save(self, pick: int, logits: bool) -> None:
        node = self.pick(pick, self.healthy)
        branch = self.handles[node]
        if done := self.act("save", lambda: self.ref.save(node, logits), lambda: branch.to_bytes(logits=logits), node, logits):
            kept, data = done
            assert branch.to_bytes(logits=logits) == data  # nothing of it is chance
            told = pylloyal.describe_saved(data)
            assert (told["bytes"], told["position"], told["cells"], told["has_logits"], told["has_grammar"]) == (
                len(data), kept.start + len(kept.cells), len(kept.cells), kept.state.logits is not None, kept.state.grammar is not None)
            assert told["sampling"] == {"seed": kept.state.sampling.seed, "n_sampled": kept.state.n_sampled}
            self.kept = [*self.kept[-3:], (kept, data)]

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 3), times=st.integers(1, 2))
    def load(self, which: int, times: int) -> None:
        """Whatever became of the branch since; and of the same bytes more than one can be made."""
        kept, data = self.kept[which % len(self.kept)]
        for _ in range(times):
            if done := self.act("load", lambda: self.ref.load(kept), lambda: self.store.from_bytes(data), kept):
                self.handles[done[0]] = done[1]

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 3), at=st.integers(0, 2**32), bit=st.integers(0, 7), kind=st.sampled_from(["bit", "short", "long", "empty", "other"]))
    def load_wrongly(self, which: int, at: int, bit: int, kind: str) -> None:
        """A bit that is another, too few bytes or too many; or those of another model."""
        _, data = self.kept[which % len(self.kept)]
        at %= len(data)
        damaged = {"bit": data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], "short": data[:at], "long": data + b"\0", "empty": b"", "other": of_another_model()}[kind]
        why = Reason(errors.UnsupportedOperationError if kind == "other" else errors.FormatError)
        self.act("load_wrongly", lambda: self.ref.refuse([why]), lambda: self.store.from_bytes(damaged), kind, at, bit)

    @rule(which=st.integers(0, 3))
    def load_elsewhere(self, which: int) -> None:
        """In another store of this model it is the same branch."""
        if not self.kept or self.other.pressure().leases_remaining == 0:
            return
        kept, data = self.kept[which % len(self.kept)]
        self.tally.operations["load_elsewhere"] += 1
        if len(kept.cells) > self.other.pressure().cells_remaining:
            return
        with self.other.from_bytes(data) as made:
            again = made.to_bytes()
            assert len(again) == len(data) and pylloyal.describe_saved(again) == pylloyal.describe_saved(data)
            if str(self.store.model.path).startswith("stub:"):  # llama.cpp also writes which sequence each cell was in
                assert again == data
            self.tally.done["load_elsewhere"] += 1
