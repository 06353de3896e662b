"""A conversation that outgrows its context, and goes on.

The cache is the conversation: a turn reads only what is new (ChatPrompt.follow). When the next turn no longer fits, the branch is
read anew from what is worth keeping (Branch.reseed_kv): the system message, which also gives attention the first tokens it leans
on, and the last turns.

Saved: half of the context is free again, so many turns pass before the next time. Who drops the oldest turn only, as needed,
changes the beginning of the text with every turn, and so reads all of it with every turn.
"""
from __future__ import annotations

import argparse

from _work import Work, options, report, say

from pylloyal import ChatPrompt, Model, Sampling

SYSTEM = {"role": "system", "content": "You are Sam, the cook of a whaling ship. You answer in one short sentence."}
QUESTIONS = [
    "Good morning! What do you do on this ship?", "What is for breakfast?", "Do you like the sea?", "What do sailors like to eat?", "Is there any fresh bread?",
    "How do you keep the fish fresh?", "What is the weather like today?", "Who is the captain?", "What do you miss from home?", "Tell me what is for dinner.",
    "Do you sing when you cook?", "Where does the ship go next?", "Is the work hard?", "What is your name?",
]


def next_turn(prompt: ChatPrompt, said: list[int], question: str) -> tuple[ChatPrompt, list[int]]:
    """The conversation with an answer and the next question, and the tokens of it that are new: the end of the answer's turn, the question."""
    turn = prompt.follow(said, [{"role": "user", "content": question}])
    assert turn.is_append_only, turn.why
    return turn.prompt, turn.tokens


def by_reseeding(model: Model, args: argparse.Namespace, work: Work) -> tuple[list[str], int, int]:
    """The answers, the tokens of the whole conversation, and how many times the branch was read anew."""
    start_of_turn = model.vocab.encode("<|im_start|>", parse_special=True)[0]
    sinks = model.chat([SYSTEM], add_generation_prompt=False).tokens()
    with model.store(n_ctx=args.context, n_branches=1, n_threads=args.threads) as store, work.of(store):
        branch = store.root(sampling=Sampling(temperature=0.5, seed=args.seed))
        prompt = model.chat([SYSTEM, {"role": "user", "content": QUESTIONS[0]}])
        new, kept, said, answers, n_said, n_reseeds = prompt.tokens(), list[int](), list[int](), list[str](), 0, 0
        for question in QUESTIONS[: args.turns]:
            if answers:
                prompt, new = next_turn(prompt, said, question)
            if len(new) + args.tokens > store.pressure().cells_remaining:
                work.look(store)
                oldest = len(kept) - (store.pressure().n_ctx // 2 - len(sinks))
                tail = kept[next((i for i in range(oldest, len(kept)) if kept[i] == start_of_turn), len(kept)) :]
                branch.reseed_kv(sinks, tail)
                kept, n_reseeds = [*sinks, *tail], n_reseeds + 1
            branch.prefill(new)
            said = store.tick([branch], n_steps=args.tokens).tokens[0]
            kept += [*new, *said]                                                             # what is in the cache
            n_said += len(new) + len(said)
            answers.append(model.vocab.decode(said))
        return answers, n_said, n_reseeds


def by_dropping(model: Model, args: argparse.Namespace, work: Work) -> None:
    """The same, when the oldest turns are dropped as needed and the rest is read from the start."""
    with model.store(n_ctx=args.context, n_branches=1, n_threads=args.threads) as store, work.of(store):
        branch = store.root(sampling=Sampling(temperature=0.5, seed=args.seed))
        prompt = model.chat([SYSTEM, {"role": "user", "content": QUESTIONS[0]}])
        new, said = prompt.tokens(), list[int]()
        for i, question in enumerate(QUESTIONS[: args.turns]):
            if i:
                prompt, new = next_turn(prompt, said, question)
            if len(new) + args.tokens > store.pressure().cells_remaining:
                work.look(store)
                branch.prune()
                branch = store.root(sampling=Sampling(temperature=0.5, seed=args.seed))
                while len(new := prompt.tokens()) + args.tokens > store.pressure().n_ctx:
                    prompt = model.chat([SYSTEM, *prompt.messages[3:]])
            branch.prefill(new)
            said = store.tick([branch], n_steps=args.tokens).tokens[0]


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
