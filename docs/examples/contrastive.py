"""Contrastive decoding: what an expert would say and an amateur would not.

Both are forks of one document. The expert has read the question, the amateur only that an answer is due: what the amateur would
say anyway counts against a token (merge_logits with alpha below 0). Contrast alone also lifts nonsense that both find unlikely, so
only tokens that the expert finds at least a tenth as likely as its favourite may be drawn (priors, then steer).

Saved: the document is decoded once for both, one dispatch advances both, and no row of logits is copied to Python.
"""
from __future__ import annotations

import argparse
import math

import numpy as np
from _work import Work, options, read_document, report, say, with_document

from pylloyal import Branch, Model, Sampling

ALLOWED = 100.0  # added to every plausible token: the others then have no chance, and among themselves nothing changes


def steer_to_plausible(expert: Branch, share: float) -> int:
    """Leave only tokens at least `share` as likely as the likeliest; how many they are."""
    expert.steer(None)
    priors = expert.priors(64)
    plausible = priors.tokens[priors.log_probs >= priors.log_probs[0] + math.log(share)]
    expert.steer({int(token): ALLOWED for token in plausible})
    return len(plausible)


def by_forks(model: Model, document: list[int], tails: list[list[int]], args: argparse.Namespace, work: Work) -> tuple[list[int], list[int]]:
    """What contrast says, and what the expert says by itself."""
    with model.store(n_ctx=len(document) + sum(map(len, tails)) + 4 * args.tokens, n_branches=4, n_threads=args.threads) as store:
        with work.of(store):
            root = store.root(sampling=Sampling.greedy())
            root.prefill(document)
            expert, amateur = root.fork(2)
            store.prefill(zip((expert, amateur), tails, strict=True))
            said: list[int] = []
            alone = expert.fork()
            while len(said) < args.tokens:
                steer_to_plausible(expert, args.share)
                expert.merge_logits([amateur], args.alpha)
                token = expert.sample()
                if model.vocab.ends_generation(token):
                    break
                store.commit([expert, amateur], [token, token])
                said.append(token)
        return said, store.tick([alone], n_steps=args.tokens).tokens[0]


def by_contexts(model: Model, document: list[int], tails: list[list[int]], args: argparse.Namespace, work: Work) -> list[int]:
    """Two contexts that each read the document; rows of logits come to Python and are mixed there."""
    n_ctx = len(document) + max(map(len, tails)) + args.tokens
    with model.store(n_ctx=n_ctx, n_branches=1, n_threads=args.threads) as one, model.store(n_ctx=n_ctx, n_branches=1, n_threads=args.threads) as two, work.of(one, two):
        expert, amateur = one.root(), two.root()
        expert.prefill(document + tails[0])
        amateur.prefill(document + tails[1])
        said: list[int] = []
        while len(said) < args.tokens:
            row = expert.logits()
            mixed = np.where(row >= row.max() + math.log(args.share), row + np.float32(args.alpha) * amateur.logits(), -np.inf)
            token = int(mixed.argmax())
            if model.vocab.ends_generation(token):
                break
            expert.commit(token)
            amateur.commit(token)
            said.append(token)
        return said


def main() -> None:
    parser = with_document(options(__doc__), chars=1200)
    parser.add_argument("--question", default="Why does the narrator go to sea?")
    parser.add_argument("--alpha", type=float, default=-0.5)
    parser.add_argument("--share", type=float, default=0.1, help="least plausible: this share of the expert's favourite (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    with Model(args.model) as model:
        document = model.vocab.encode(read_document(args))
        tails = [model.vocab.encode(text) for text in (f"\n\nQuestion: {args.question}\nAnswer:", "\n\nAnswer:")]
        here, naive = Work(), Work() if args.compare else None
        said, alone = by_forks(model, document, tails, args, here)
        say(args, f"expert alone: {model.vocab.decode(alone)!r}\ncontrast:     {model.vocab.decode(said)!r}")
        mixed = by_contexts(model, document, tails, args, naive) if naive else []
        same = next((i for i, (a, b) in enumerate(zip(said, mixed, strict=False)) if a != b), min(len(said), len(mixed)))
        report(args, "contrastive", here, naive, "two contexts, logits mixed in Python",
               said=said, alone=alone, mixed=mixed, same_tokens=same, document_tokens=len(document), tail_tokens=sum(map(len, tails)))


if __name__ == "__main__":
    main()
