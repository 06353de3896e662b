"""Best of N: draw N answers to one question, keep the one the model itself finds least surprising.

The prompt is read once; every answer is a fork of it with its own seed, and all forks advance in one dispatch a tick. The forks
measure themselves (Branch.metrics), so half-way the worse half is pruned: their cells and leases are free again.

Saved: the prompt is decoded once and not N times, a dispatch serves all answers, and a pruned fork stops costing tokens.
"""
from __future__ import annotations

import argparse

from _work import Work, options, read_document, report, say, with_document

from pylloyal import Branch, ChatPrompt, Model, Sampling

Answer = tuple[float, int, list[int]]  # perplexity, seed, tokens


def perplexity(branch: Branch) -> float:
    level = branch.metrics.model
    assert level is not None  # set_metrics() asked for it
    return level.perplexity


def by_forks(model: Model, prompt: ChatPrompt, args: argparse.Namespace, work: Work) -> list[Answer]:
    """The better half of the answers, best first."""
    half = args.tokens // 2
    with model.store(n_ctx=len(prompt.tokens()) + args.n * args.tokens, n_branches=args.n + 1, n_threads=args.threads) as store, work.of(store):
        root = store.root(sampling=Sampling(temperature=0.8))
        root.set_metrics()                                                 # forks carry it on
        root.prefill(prompt)
        forks = root.fork(args.n, seed=args.seed)                          # fork i draws from the stream of seed + i
        done = store.tick(forks, n_steps=half)
        said, finish = dict(zip(forks, done.tokens, strict=True)), dict(zip(forks, done.finish, strict=True))
        ranked = sorted(forks, key=perplexity)
        kept, dropped = ranked[: (args.n + 1) // 2], ranked[(args.n + 1) // 2 :]
        work.look(store)
        store.prune(dropped)
        unfinished = [fork for fork in kept if finish[fork] is None]
        for fork, tokens in zip(unfinished, store.tick(unfinished, n_steps=args.tokens - half).tokens, strict=True):
            said[fork] += tokens
        return sorted((perplexity(fork), args.seed + forks.index(fork), said[fork]) for fork in kept)


def by_contexts(model: Model, prompt: ChatPrompt, args: argparse.Namespace, work: Work) -> list[Answer]:
    """All N answers, from contexts that each read the prompt and finish theirs."""
    answers = []
    for seed in range(args.seed, args.seed + args.n):
        with model.store(n_ctx=len(prompt.tokens()) + args.tokens, n_branches=1, n_threads=args.threads) as store, work.of(store):
            root = store.root(sampling=Sampling(temperature=0.8, seed=seed))
            root.set_metrics()
            root.prefill(prompt)
            tokens = store.tick([root], n_steps=args.tokens).tokens[0]
            answers.append((perplexity(root), seed, tokens))
    return sorted(answers)


def main() -> None:
    parser = with_document(options(__doc__), chars=1200)
    parser.add_argument("--question", default="In one sentence: why does the narrator go to sea?")
    parser.add_argument("-n", type=int, default=8, help="answers to draw (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=40, help="most tokens of an answer (default: %(default)s)")
    args = parser.parse_args()
    with Model(args.model) as model:
        prompt = model.chat([{"role": "user", "content": f"{read_document(args)}\n\n{args.question}"}])
        here, naive = Work(), Work() if args.compare else None
        ranked = by_forks(model, prompt, args, here)
        for score, seed, tokens in ranked:
            say(args, f"[seed {seed}] perplexity {score:.2f}: {model.vocab.decode(tokens).strip()}")
        alone = by_contexts(model, prompt, args, naive) if naive else []
        if alone:
            same = sum(any(tokens == other for _, _, other in alone) for _, _, tokens in ranked)
            say(args, f"\nOf {args.n} finished alone the best has perplexity {alone[0][0]:.2f}; {same} of the {len(ranked)} above are among them, word for word.")
        report(args, "best_of_n", here, naive, f"{args.n} contexts that each read the prompt and finish their answer",
               prompt_tokens=len(prompt.tokens()), ranked=ranked, ranked_alone=alone, best=model.vocab.decode(ranked[0][2]))


if __name__ == "__main__":
    main()
