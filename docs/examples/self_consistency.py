"""Self-consistency: let the model reason N times, and take the answer that most lines of reasoning come to.

The worked examples are read once for all questions, a question once for all its forks, and the forks reason together, one dispatch
a tick. A fork that gave its answer is pruned at once; when the others can no longer change the vote, they are pruned too.

Saved: examples and question are decoded once and not N times, and reasoning whose outcome no longer matters is not finished.
"""
from __future__ import annotations

import argparse
import re
from collections import Counter

from _work import Work, options, report, say

from pylloyal import Branch, Model, Sampling

EXAMPLES = """Question: Tom has 4 pens and buys 5 more. How many pens has he?
Answer: He begins with 4 and gets 5 more. 4 + 5 = 9. The answer is 9.

Question: A ship has 20 sailors and 6 leave. How many are left?
Answer: It begins with 20 and loses 6. 20 - 6 = 14. The answer is 14.

Question: There are 3 boxes with 2 hats in each. How many hats are there?
Answer: Each of 3 boxes holds 2. 3 * 2 = 6. The answer is 6."""
QUESTIONS = [
    ("There are 3 carts with 3 barrels in each. How many barrels are there?", "9"),
    ("A tree has 10 birds and 3 leave. How many are left?", "7"),
    ("There are 5 bags with 6 nuts in each. How many nuts are there?", "30"),
]


def answer_in(text: str) -> str | None:
    found = re.search(r"answer is (\d+)\D", text)
    return found[1] if found else None


def winner(votes: Counter[str]) -> str | None:
    return max(votes, key=lambda answer: votes[answer], default=None)


def is_decided(votes: Counter[str], n_open: int) -> bool:
    """Whether the open votes cannot change the outcome any more."""
    first, second = ([count for _, count in votes.most_common(2)] + [0, 0])[:2]
    return first - second > n_open


def by_forks(root: Branch, question: str, stop: list[int], args: argparse.Namespace, work: Work) -> tuple[Counter[str], int]:
    """The votes of forks of what `root` has read, and how many forks were not needed any more."""
    store, vocab = root.store, root.store.model.vocab
    asked = root.fork()
    asked.prefill(question)
    said = {fork: list[int]() for fork in asked.fork(args.n, seed=args.seed)}
    votes: Counter[str] = Counter()
    while said and not is_decided(votes, len(said)):
        live = list(said)
        done = store.tick(live, n_steps=4, stop=stop)
        work.look(store)
        for fork, tokens, finish in zip(live, done.tokens, done.finish, strict=True):
            said[fork] += tokens
            ended = finish is not None or len(said[fork]) >= args.tokens
            answer = answer_in(vocab.decode(said[fork]) + ("\n" if ended else ""))
            if answer:
                votes[answer] += 1
            if answer or ended:
                del said[fork]
                fork.prune()
    asked.prune_subtree()
    return votes, len(said)


def by_contexts(model: Model, question: str, stop: list[int], args: argparse.Namespace, work: Work) -> Counter[str]:
    """The votes of contexts that each read everything and finish their reasoning."""
    votes: Counter[str] = Counter()
    for i in range(args.n):
        with model.store(n_ctx=1024, n_branches=1, n_threads=args.threads) as store, work.of(store):
            root = store.root(sampling=Sampling(temperature=0.7, seed=args.seed + i))
            root.prefill(EXAMPLES + question)
            answer = answer_in(model.vocab.decode(store.tick([root], n_steps=args.tokens, stop=stop).tokens[0]) + "\n")
            if answer:
                votes[answer] += 1
    return votes


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("-n", type=int, default=8, help="lines of reasoning for each question (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=2, help="how many to ask, at most 3 (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=40, help="most tokens of a line of reasoning (default: %(default)s)")
    args = parser.parse_args()
    with Model(args.model) as model:
        stop = [*model.vocab.encode("\n"), *model.vocab.encode("\n\n")]
        asked = [(f"\n\nQuestion: {question}\nAnswer:", truth) for question, truth in QUESTIONS[: args.questions]]
        here, naive = Work(), Work() if args.compare else None
        with model.store(n_ctx=1024, n_branches=args.n + 2, n_threads=args.threads) as store, here.of(store):
            root = store.root(sampling=Sampling(temperature=0.7))
            root.prefill(EXAMPLES)
            votes = [by_forks(root, question, stop, args, here) for question, _ in asked]
        alone = [by_contexts(model, question, stop, args, naive) for question, _ in asked] if naive else []
        for i, ((question, truth), (count, unneeded)) in enumerate(zip(asked, votes, strict=True)):
            say(args, f"{question.strip()} {winner(count)} ({truth} is right); votes {dict(count.most_common())}, {unneeded} not needed")
            say(args, f"    all {args.n}, each alone: {dict(alone[i].most_common())}" if alone else "")
        report(args, "self_consistency", here, naive, "a context for each line of reasoning, all of them finished",
               votes=[count for count, _ in votes], unneeded=[n for _, n in votes], answers=[winner(count) for count, _ in votes], truths=[truth for _, truth in asked], alone=alone)


if __name__ == "__main__":
    main()
