"""Classification: the label is the one whose token the model finds likeliest after the item; nothing is generated.

The instructions and the worked examples are read once. Store.score then reads the items through forks, as many in a dispatch as
fit, and gives the logits of the label tokens alone: a few numbers for each item instead of a row over the whole vocabulary.

Saved: the instructions are decoded once and not with every item, many items share a dispatch, and no logits but the labels' are copied.
"""
from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt
from _work import Work, options, report, say

from pylloyal import Model

LABELS = ["positive", "negative"]
EXAMPLES = [
    ("The soup was cold and the waiter was rude.", "negative"),
    ("A charming little hotel, we slept like stones.", "positive"),
    ("It broke after two days, and nobody answers my letters.", "negative"),
    ("The best concert I have heard in years.", "positive"),
]
ITEMS = [
    ("I loved every page of this book.", "positive"),
    ("The room smelled and the bed was hard.", "negative"),
    ("A wonderful film, funny and wise.", "positive"),
    ("Terrible service, we shall never come back.", "negative"),
    ("The shoes fell apart in the first rain.", "negative"),
    ("Great food at a fair price.", "positive"),
    ("What a waste of money.", "negative"),
    ("Friendly staff and a beautiful garden.", "positive"),
    ("The plot is dull and the actors look bored.", "negative"),
    ("My children play with it every day and are happy.", "positive"),
    ("Arrived late, dirty and incomplete.", "negative"),
    ("It works perfectly and looks lovely.", "positive"),
]
ITEM = "\n\nReview: {}\nLabel:"  # begins with the gap: tokens at the end of what is read once must not hang on what follows
INSTRUCTIONS = "Say whether each review is positive or negative." + "".join(f"{ITEM.format(text)} {label}" for text, label in EXAMPLES)
Scores = npt.NDArray[np.float32]


def by_forks(model: Model, prompts: list[str], label_tokens: list[int], args: argparse.Namespace, work: Work) -> Scores:
    with model.store(n_ctx=2048, n_branches=32, n_threads=args.threads) as store, work.of(store):
        root = store.root()
        root.prefill(INSTRUCTIONS)
        scores = store.score(prompts, source=root, tokens=label_tokens)
        work.look(store, gone=store.pressure().n_tokens_decoded - root.position)      # its forks are pruned again by now
        return scores


def by_contexts(model: Model, prompts: list[str], label_tokens: list[int], args: argparse.Namespace, work: Work) -> Scores:
    """A context for each item that reads the instructions too, and gives a whole row of logits."""
    rows = []
    for prompt in prompts:
        with model.store(n_ctx=512, n_branches=1, n_threads=args.threads) as store, work.of(store):
            root = store.root()
            root.prefill(INSTRUCTIONS + prompt)
            rows.append(root.logits()[label_tokens])
    return np.stack(rows)


def labels(scores: Scores) -> list[str]:
    """The likeliest label of each item, once what speaks for a label whatever the item is taken off (the mean over all items)."""
    return [LABELS[i] for i in (scores - scores.mean(axis=0)).argmax(axis=1)]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("-n", type=int, default=len(ITEMS), help="items to take")
    args = parser.parse_args()
    items = ITEMS[: args.n]
    with Model(args.model) as model:
        label_tokens = [model.vocab.encode(f" {label}")[0] for label in LABELS]
        prompts = [ITEM.format(text) for text, _ in items]
        here, naive = Work(), Work() if args.compare else None
        scores = by_forks(model, prompts, label_tokens, args, here)
        found = labels(scores)
        for (text, truth), label in zip(items, found, strict=True):
            say(args, f"{label:9} {text}{'' if label == truth else f'    (it is {truth})'}")
        right = sum(label == truth for (_, truth), label in zip(items, found, strict=True))
        say(args, f"\n{right} of {len(items)} right")
        moved = None
        if naive:
            alone = by_contexts(model, prompts, label_tokens, args, naive)
            moved = float(np.abs(alone - scores).max())
            say(args, f"Alone, {sum(a == b for a, b in zip(labels(alone), found, strict=True))} get the same label; logits move by {moved:.2f} at most.")
            say(args, f"Bytes of logits copied to Python: {scores.nbytes:,} here, {4 * len(model.vocab) * len(items):,} the naive way.")
        report(args, "classify", here, naive, "a context for each item", labels=found, right=right, moved=moved, instruction_tokens=len(model.vocab.encode(INSTRUCTIONS)))


if __name__ == "__main__":
    main()
