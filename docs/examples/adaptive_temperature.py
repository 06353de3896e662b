"""Adaptive temperature: draw boldly where the model has many good ways on, and carefully where it is sure of one.

Before every token each fork is asked how uncertain the model is (Branch.distribution), and its temperature is set from that
entropy. Sampling() without a seed keeps the random stream of the branch, so every token has a draw of its own and the same seed
gives the same text again; with the seed named each time, every token would be chosen by the same draw.

Saved: the entropy is worked out beside the logits, none of which is copied to Python; the forks share the prompt and the dispatches.
Against a fixed temperature nothing is saved: it costs one more pass over the logits for each token.
"""
from __future__ import annotations

import argparse

import numpy as np
from _work import Work, options, report, say

from pylloyal import Model, Sampling


def temperature(entropy: float, most: float) -> float:
    """Close to 0 where there is no choice, towards `most` where there is much (entropy in nats)."""
    return float(most * 0.8 ** (1 / max(entropy, 0.01)))


def by_forks(model: Model, prompt: list[int], args: argparse.Namespace, work: Work) -> tuple[list[list[int]], list[tuple[float, float]], list[int]]:
    """The answers, the least and the highest temperature of each, and the number of draws of each."""
    with model.store(n_ctx=len(prompt) + args.n * args.tokens, n_branches=args.n + 1, n_threads=args.threads) as store, work.of(store):
        root = store.root()
        root.prefill(prompt)
        forks = root.fork(args.n, seed=args.seed)
        said = {fork: list[int]() for fork in forks}
        used = {fork: list[float]() for fork in forks}
        live = forks
        for _ in range(args.tokens):
            for fork in live:
                used[fork].append(temperature(fork.distribution().entropy, args.most))
                fork.sampling = Sampling(temperature=used[fork][-1])                          # no seed: the stream goes on
            done = store.tick(live)
            for fork, tokens in zip(live, done.tokens, strict=True):
                said[fork] += tokens
            live = [fork for fork, finish in zip(live, done.finish, strict=True) if finish is None]
            if not live:
                break
        return [said[fork] for fork in forks], [(min(used[fork]), max(used[fork])) for fork in forks], [fork.statistics().n_sampled for fork in forks]


def by_contexts(model: Model, prompt: list[int], args: argparse.Namespace, work: Work) -> int:
    """The same in a context for each answer, sampled in Python: how many bytes of logits were copied for it."""
    n_bytes = 0
    for i in range(args.n):
        draw = np.random.default_rng(args.seed + i)
        with model.store(n_ctx=len(prompt) + args.tokens, n_branches=1, n_threads=args.threads) as store, work.of(store):
            root = store.root()
            root.prefill(prompt)
            for _ in range(args.tokens):
                row = root.logits().astype(np.float64)
                n_bytes += 4 * row.size
                p = np.exp(row - row.max())
                p /= p.sum()
                t = temperature(float(-(p * np.log(np.maximum(p, 1e-30))).sum()), args.most)
                row[row < np.partition(row, -40)[-40]] = -np.inf                              # the 40 likeliest, as Sampling() has it
                p = np.exp((row - row.max()) / t)
                token = int(draw.choice(p.size, p=p / p.sum()))
                if model.vocab.ends_generation(token):
                    break
                root.commit(token)
    return n_bytes


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--prompt", default="Write a short poem about the sea.")
    parser.add_argument("-n", type=int, default=4, help="answers, with seeds SEED, SEED + 1, ...")
    parser.add_argument("--most", type=float, default=1.5, help="the highest temperature (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    with Model(args.model) as model:
        prompt = model.chat([{"role": "user", "content": args.prompt}]).tokens()
        here, naive = Work(), Work() if args.compare else None
        answers, temperatures, draws = by_forks(model, prompt, args, here)
        for tokens, (least, highest), n in zip(answers, temperatures, draws, strict=True):
            say(args, f"[{n} draws at {least:.2f} to {highest:.2f}] {' '.join(model.vocab.decode(tokens).split())}")
        again = by_forks(model, prompt, args, Work())[0]
        say(args, f"\nOnce more with the same seeds: {'the same texts' if again == answers else 'OTHER TEXTS'}.")
        n_bytes = by_contexts(model, prompt, args, naive) if naive else None
        if n_bytes:
            say(args, f"Bytes of logits copied to Python: 0 here, {n_bytes:,} the naive way.")
        report(args, "adaptive_temperature", here, naive, "a context for each answer, sampled in Python", answers=answers, temperatures=temperatures, draws=draws,
               reproducible=again == answers, logits_bytes=n_bytes)


if __name__ == "__main__":
    main()
