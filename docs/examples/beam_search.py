"""Beam search: keep the K likeliest continuations, token by token, as a tree of branches.

Every leaf is a beam. A step forks a beam once for each of its tokens that made it among the best K, and decodes all of them in
one dispatch. A beam that lost is pruned; a parent left with one child takes over where that child stands (fast_forward), so the
tree holds fewer than 2 K branches however long it grows.

Saved: a beam that splits shares all it read and said so far. Without forks, its second half would read all of it again.
"""
from __future__ import annotations

import argparse
from dataclasses import dataclass

from _work import Work, options, report, say

from pylloyal import Branch, Model


@dataclass
class Beam:
    branch: Branch
    tokens: list[int]
    log_prob: float = 0.0

    def score(self) -> float:
        """The mean log-probability of a token: length-normalised, or short answers would always win."""
        return self.log_prob / max(len(self.tokens), 1)


@dataclass
class Tree:
    """How beams split and end: as forks."""

    prompt: list[int]
    width: int

    def split(self, beam: Beam, n: int) -> list[Branch]:
        return beam.branch.fork(n)

    def drop(self, branch: Branch, beams: list[Beam]) -> None:
        """Prune a leaf that lost. Above it: let go of a parent without children, promote an only child."""
        parent = branch.parent
        branch.prune()
        if parent and not parent.children:
            self.drop(parent, beams)
        elif parent and len(parent.children) == 1:
            child = parent.children[0]
            parent.fast_forward(child)                 # the parent's handle stands where the child's stood, which is gone
            for beam in beams:
                beam.branch = parent if beam.branch == child else beam.branch


class Contexts(Tree):
    """Without forks: the other halves of a beam that splits read everything again."""

    def split(self, beam: Beam, n: int) -> list[Branch]:
        store = beam.branch.store
        twins = [store.root() for _ in range(n - 1)]
        store.prefill([(twin, self.prompt + beam.tokens) for twin in twins])
        return [beam.branch, *twins]


def search(model: Model, how: Tree, args: argparse.Namespace, work: Work) -> Beam:
    ends, width = model.vocab.ends_generation, how.width
    with model.store(n_ctx=2 * width * (len(how.prompt) + args.tokens), n_branches=3 * width, n_threads=args.threads) as store, work.of(store):
        root = store.root()
        root.prefill(how.prompt)
        beams, ended = [Beam(root, [])], list[Beam]()
        while len(ended) < width and len(beams[0].tokens) < args.tokens:
            ways = []
            for beam in beams:
                priors = beam.branch.priors(width + 1)                                        # the likeliest tokens, and how likely
                ways += [(beam.log_prob + float(p), beam, int(token)) for token, p in zip(priors.tokens, priors.log_probs, strict=True)]
            ways.sort(key=lambda way: -way[0])                                                # equally long: log-probabilities compare
            ended += [Beam(beam.branch, [*beam.tokens, token], p) for p, beam, token in ways[:width] if ends(token)]
            ways = [way for way in ways if not ends(way[2])][:width]
            grown, lost = list[Beam](), list[Beam]()
            for beam in beams:
                mine = [(p, token) for p, owner, token in ways if owner is beam]
                branches = how.split(beam, len(mine)) if len(mine) > 1 else [beam.branch] * len(mine)
                grown += [Beam(branch, [*beam.tokens, token], p) for branch, (p, token) in zip(branches, mine, strict=True)]
                lost += [] if mine else [beam]
            work.look(store)
            for beam in lost:
                how.drop(beam.branch, grown + lost)
            store.commit([beam.branch for beam in grown], [beam.tokens[-1] for beam in grown])
            beams = grown
        return max(ended + beams, key=Beam.score)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--prompt", default="Describe the sea in one short sentence.")
    parser.add_argument("--width", type=int, default=4, help="beams to keep (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of an answer (default: %(default)s)")
    args = parser.parse_args()
    with Model(args.model) as model:
        prompt = model.chat([{"role": "user", "content": args.prompt}]).tokens()
        here, naive = Work(), Work() if args.compare else None
        found = {"greedy": search(model, Tree(prompt, 1), args, Work()), "beam": search(model, Tree(prompt, args.width), args, here)}
        if naive:
            found["beam_alone"] = search(model, Contexts(prompt, args.width), args, naive)
        for name, beam in found.items():
            say(args, f"{name:10} {beam.log_prob:8.3f}, {beam.score():7.4f} a token: {model.vocab.decode(beam.tokens).strip()}")
        report(args, "beam_search", here, naive, "a beam that splits reads the prompt and what it said again", prompt=prompt,
               **{name: {"log_prob": beam.log_prob, "score": beam.score(), "tokens": beam.tokens} for name, beam in found.items()})


if __name__ == "__main__":
    main()
