"""A conversation that outgrows its context, and goes on.

The cache is the conversation: a turn reads only what is new. When the next turn no longer fits, the branch is read anew from what
is worth keeping (Branch.reseed_kv): the system message, which also gives attention the first tokens it leans on, and the last turns.

Saved: half of the context is free again, so many turns pass before the next time. Who drops the oldest turn only, as needed,
changes the beginning of the text with every turn, and so reads all of it with every turn.
"""
from __future__ import annotations

import argparse

from _work import Work, options, report, say

from pylloyal import Model, Sampling

SYSTEM = "You are Sam, the cook of a whaling ship. You answer in one short sentence."
QUESTIONS = [
    "Good morning! What do you do on this ship?", "What is for breakfast?", "Do you like the sea?", "What do sailors like to eat?", "Is there any fresh bread?",
    "How do you keep the fish fresh?", "What is the weather like today?", "Who is the captain?", "What do you miss from home?", "Tell me what is for dinner.",
    "Do you sing when you cook?", "Where does the ship go next?", "Is the work hard?", "What is your name?",
]
Message = dict[str, str]


def new_part(model: Model, messages: list[Message], seen: str) -> tuple[list[int], str]:
    """Tokens of what the conversation has beyond what was seen (the end of the last answer, the question), and all of it as text.

    parse_special reads control tokens in the questions too: good for questions of our own, not for those of a stranger.
    """
    text = model.chat(messages).prompt
    assert text.startswith(seen), "the template changes what was said before"
    return model.vocab.encode(text.removeprefix(seen), parse_special=True), text


def by_reseeding(model: Model, args: argparse.Namespace, work: Work) -> tuple[list[str], int, int]:
    """The answers, the tokens of the whole conversation, and how many times the branch was read anew."""
    start_of_turn = model.vocab.encode("<|im_start|>", parse_special=True)[0]
    sinks = model.chat([{"role": "system", "content": SYSTEM}], add_generation_prompt=False).tokens()
    with model.store(n_ctx=args.context, n_branches=1, n_threads=args.threads) as store, work.of(store):
        branch = store.root(sampling=Sampling(temperature=0.5, seed=args.seed))
        messages, answers, seen, n_said, n_reseeds = [{"role": "system", "content": SYSTEM}], list[str](), "", 0, 0
        kept: list[int] = []                                                                   # what is in the cache
        for question in QUESTIONS[: args.turns]:
            messages.append({"role": "user", "content": question})
            new, seen = new_part(model, messages, seen)
            if len(new) + args.tokens > store.pressure().cells_remaining:
                work.look(store)
                oldest = len(kept) - (store.pressure().n_ctx // 2 - len(sinks))
                tail = kept[next((i for i in range(oldest, len(kept)) if kept[i] == start_of_turn), len(kept)) :]
                branch.reseed_kv(sinks, tail)
                kept, n_reseeds = [*sinks, *tail], n_reseeds + 1
            branch.prefill(new)
            said = store.tick([branch], n_steps=args.tokens).tokens[0]
            kept += [*new, *said]
            n_said += len(new) + len(said)
            answers.append(model.vocab.decode(said))
            messages.append({"role": "assistant", "content": answers[-1]})
            seen += answers[-1]
        return answers, n_said, n_reseeds


def by_dropping(model: Model, args: argparse.Namespace, work: Work) -> list[str]:
    """The answers, when the oldest turns are dropped as needed and the rest is read from the start."""
    with model.store(n_ctx=args.context, n_branches=1, n_threads=args.threads) as store, work.of(store):
        branch = store.root(sampling=Sampling(temperature=0.5, seed=args.seed))
        messages, answers, seen = [{"role": "system", "content": SYSTEM}], list[str](), ""
        for question in QUESTIONS[: args.turns]:
            messages.append({"role": "user", "content": question})
            new, seen = new_part(model, messages, seen)
            if len(new) + args.tokens > store.pressure().cells_remaining:
                work.look(store)
                branch.prune()
                branch = store.root(sampling=Sampling(temperature=0.5, seed=args.seed))
                while len(new := model.chat(messages).tokens()) + args.tokens > store.pressure().n_ctx:
                    del messages[1:3]
                seen = model.chat(messages).prompt
            branch.prefill(new)
            answers.append(model.vocab.decode(store.tick([branch], n_steps=args.tokens).tokens[0]))
            messages.append({"role": "assistant", "content": answers[-1]})
            seen += answers[-1]
        return answers


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--context", type=int, default=256, help="cells, a multiple of 256 (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of an answer")
    args = parser.parse_args()
    with Model(args.model) as model:
        here, naive = Work(), Work() if args.compare else None
        answers, n_said, n_reseeds = by_reseeding(model, args, here)
        for question, answer in zip(QUESTIONS, answers, strict=False):
            say(args, f"- {question}\n  {answer.strip()}")
        say(args, f"\n{n_said} tokens of conversation in {args.context} cells; read anew {n_reseeds} times.")
        if naive:
            by_dropping(model, args, naive)
        report(args, "long_chat", here, naive, "drop the oldest turns as needed, and read the rest from the start", answers=answers, reseeds=n_reseeds, conversation_tokens=n_said, n_ctx=args.context)


if __name__ == "__main__":
    main()
