"""Branches where they cannot be."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis.stateful import precondition, rule

from pylloyal import errors

from ..books import Reason, unplaced
from .basis import PICK, PLAIN
from .logits import Logits


class Refusals(Logits):
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
            "distribution": (lambda: ref.distribution(node), branch.distribution),
            "logits_at": (lambda: ref.logits_at(node, [97]), lambda: branch.logits_at([97])),
            "surprisal": (lambda: ref.surprisal(node, 97), lambda: branch.surprisal(97)),
            "priors": (lambda: ref.priors(node, 1), lambda: branch.priors(1)),
            "score": (lambda: ref.score(node, [[97]], None), lambda: store.score([[97]], source=branch)),
            "reseed_kv": (lambda: ref.reseed_kv(node, [97]), lambda: branch.reseed_kv([97])),
            "save": (lambda: ref.save(node, True), branch.to_bytes),
            "reseed": (lambda: ref.reseed(node, 1), lambda: branch.reseed(1)),
            "set_metrics": (lambda: ref.set_metrics(node, True, True), lambda: branch.set_metrics(sampling=True)),
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
                                             lambda: store.commit([branch, stranger], [97, 97]), lambda: store.sample([stranger]), lambda: store.tick([branch, stranger]), lambda: branch.merge_logits([stranger]),
                                             lambda: store.score([[97]], source=stranger)]
        self.tally.operations["of_another_store"] += 1
        for call in calls:
            self.act("of another store", lambda: self.ref.refuse([Reason(errors.InvalidArgumentError)]), call, node, counts=False)
