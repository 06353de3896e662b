"""Speculative decoding with one model: guess several tokens ahead, check all guesses in one dispatch.

The guesses are looked up: what followed where the last two tokens stood before may follow here again. Every prefix of a guess is
read by a fork of its own, all of them in one scatter dispatch, and each fork then says what the model would say next. The longest
prefix the model agrees with is taken over (fast_forward), so the text is that of greedy decoding, whatever was guessed. (Near-ties
can turn out otherwise: tokens that fill the cells of pruned forks are added up in another order.)

Saved: dispatches, where text repeats. The price is tokens: of K guesses every prefix is decoded, not only the longest.
"""
from __future__ import annotations

import argparse

from _work import Work, agreement, options, read_document, report, say, with_document

from pylloyal import Branch, Model, Sampling


def look_up(text: list[int], n: int) -> list[int]:
    """The tokens, at most n, that followed the last two where they stood before."""
    for at in range(len(text) - 3, -1, -1):
        if text[at : at + 2] == text[-2:]:
            return text[at + 2 : at + 2 + n]
    return []


def advance(branch: Branch, sure: int, guess: list[int], work: Work) -> tuple[list[int], int]:
    """Read a sure token and as much of the guess as the model agrees with: what was read, and what the model says next."""
    forks = branch.fork(len(guess) + 1)
    branch.store.prefill([(fork, [sure, *guess[:i]]) for i, fork in enumerate(forks)])        # one dispatch
    says = branch.store.sample(forks)
    agreed = next((i for i, token in enumerate(guess) if says[i] != token), len(guess))
    winner = forks.pop(agreed)
    work.look(branch.store)
    branch.store.prune(forks)
    branch.fast_forward(winner)
    return [sure, *guess[:agreed]], says[agreed]


def by_guessing(model: Model, prompt: list[int], args: argparse.Namespace, work: Work) -> tuple[list[int], int, int]:
    """What it says, how many tokens were guessed, and how many of them rightly."""
    room = (args.guess + 1) * (args.guess + 2) // 2
    with model.store(n_ctx=len(prompt) + args.tokens + room, n_branches=args.guess + 2, n_threads=args.threads) as store, work.of(store):
        root = store.root(sampling=Sampling.greedy())
        root.prefill(prompt)
        said, token, guessed, right = list[int](), root.sample(), 0, 0
        while len(said) < args.tokens and not model.vocab.ends_generation(token):
            guess = look_up([*prompt, *said, token], min(args.guess, args.tokens - len(said) - 1))
            read, token = advance(root, token, guess, work)
            said += read
            guessed, right = guessed + len(guess), right + len(read) - 1
        return said, guessed, right


def plainly(model: Model, prompt: list[int], args: argparse.Namespace, work: Work) -> tuple[list[int], list[float]]:
    """Plain greedy decoding, and how far each token was ahead of the next best."""
    with model.store(n_ctx=len(prompt) + args.tokens, n_branches=1, n_threads=args.threads) as store, work.of(store):
        root = store.root(sampling=Sampling.greedy())
        root.prefill(prompt)
        said, leads = list[int](), list[float]()
        while len(said) < args.tokens and not model.vocab.ends_generation(root.sample()):
            best = root.priors(2).log_probs
            leads.append(float(best[0] - best[1]))
            said += store.tick([root]).tokens[0]
        return said, leads


def main() -> None:
    parser = with_document(options(__doc__), chars=700)
    parser.add_argument("--opening", default="Call me Ishmael.", help="how the text that it is to give again begins")
    parser.add_argument("--guess", type=int, default=4, metavar="K", help="most tokens to guess at a time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    with Model(args.model) as model:
        prompt = model.vocab.encode(f"Text:\n{read_document(args)}\n\nThe same text again:\n{args.opening}")
        here, naive = Work(), Work() if args.compare else None
        said, guessed, right = by_guessing(model, prompt, args, here)
        say(args, f"{model.vocab.decode(said)}\n\n{guessed} tokens guessed, {right} rightly")
        found = {}
        if naive:
            plain, leads = plainly(model, prompt, args, naive)
            found = agreement(said, plain, leads)
            parted = f"parted from it at token {found['first_difference']}, where that was {found['lead'] or 0:.3f} nats ahead of the next best"
            say(args, f"Plain greedy decoding: {'the same text' if found['same'] else parted}.")
        report(args, "speculative", here, naive, "plain greedy decoding", said=said, prompt=prompt, guessed=guessed, right=right, **found)


if __name__ == "__main__":
    main()
