"""How a branch is to be sampled."""
from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import rule

from pylloyal import Grammar, Sampling

from ..oracle import gbnf
from .basis import BAD_BIASES, BAD_GRAMMAR, BAD_SAMPLINGS, BIASES, LITERALS, PICK, SAMPLINGS, Basis


class Settings(Basis):
    @rule(pick=PICK, sampling=SAMPLINGS | st.sampled_from(BAD_SAMPLINGS), change=st.integers(0, 5))
    def set_sampling(self, pick: int, sampling: Sampling, change: int) -> None:
        node = self.pick(pick, self.healthy)
        if change < 3:  # equal settings, or another temperature: the stream goes on
            sampling = replace(node.state.sampling, temperature=[node.state.sampling.temperature, 2.0, 0.0][change], seed=None)
        self.do_set_sampling(node, sampling)

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

    @rule(pick=PICK, again=st.booleans(), seed=st.integers(0, 2**64 - 1))
    def reseed(self, pick: int, again: bool, seed: int) -> None:
        """The stream that is there, from its beginning, or another."""
        node = self.pick(pick, self.healthy)
        mine = node.state.sampling.seed
        seed = mine if again and mine is not None else seed
        self.act("reseed", lambda: self.ref.reseed(node, seed), lambda: self.handles[node].reseed(seed), node, seed)

    @rule(pick=PICK, model=st.booleans(), sampling=st.booleans())
    def set_metrics(self, pick: int, model: bool, sampling: bool) -> None:
        self.do_set_metrics(self.pick(pick, self.healthy), model, sampling)
