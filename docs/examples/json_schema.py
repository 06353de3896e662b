"""JSON under a schema: every record fits the first time, because nothing else can be drawn.

The instructions, which all items share, are read once. Every item is a fork with the grammar of the schema on it: the rest of its
prompt is read in one dispatch with the others', and all of them answer in one dispatch a tick, until each has closed its object.

Saved: the usual way is to ask for JSON, look whether it fits, and ask again. Every attempt then reads everything anew.
"""
from __future__ import annotations

import argparse
import json
from typing import Any

from _work import Work, options, report, say

from pylloyal import Grammar, Model, Sampling

TRADES = ["sailor", "cook", "smith", "farmer"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "trade": {"enum": TRADES}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "trade", "age"],
    "additionalProperties": False,
}
GRAMMAR = Grammar.from_schema(SCHEMA)
INSTRUCTIONS = "Answer with a JSON object that has name (string), trade (sailor, cook, smith or farmer) and age (integer)."
ITEMS = [
    "Peter, who is 41, has baked bread and cooked soup on ships all his life.",
    "Old Martha keeps cows and grows barley; she will be 63 in May.",
    "At 19, John Reed went to sea before the mast.",
    "Ask for Will at the forge: he shoes horses, and is 35.",
]


def record(text: str) -> dict[str, Any] | None:
    """The record in an answer, also when there is talk around it; None when there is none that the schema allows."""
    try:
        found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except ValueError:
        return None
    fits = isinstance(found, dict) and set(found) == set(SCHEMA["required"]) and isinstance(found["name"], str) and len(found["name"]) <= 24
    return found if fits and found["trade"] in TRADES and type(found["age"]) is int and 1 <= found["age"] <= 99 else None


def by_forks(model: Model, prompts: list[list[int]], args: argparse.Namespace, work: Work) -> list[str]:
    n_shared = next((i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1), 0)
    n_ctx = sum(map(len, prompts)) + len(prompts) * args.tokens
    with model.store(n_ctx=n_ctx, n_branches=len(prompts) + 1, n_threads=args.threads) as store, work.of(store):
        root = store.root(sampling=Sampling(temperature=0.7), grammar=GRAMMAR)                # the grammar goes to the forks
        root.prefill(prompts[0][:n_shared])
        forks = root.fork(len(prompts), seed=args.seed)
        store.prefill((fork, prompt[n_shared:]) for fork, prompt in zip(forks, prompts, strict=True))
        return [model.vocab.decode(tokens) for tokens in store.tick(forks, n_steps=args.tokens).tokens]


def by_asking_again(model: Model, prompts: list[list[int]], args: argparse.Namespace, work: Work) -> tuple[list[dict[str, Any] | None], int]:
    """The records, None where no attempt gave one, and how many attempts there were."""
    records, attempts = [], 0
    for prompt in prompts:
        found = None
        for attempt in range(args.attempts):
            with model.store(n_ctx=len(prompt) + args.tokens, n_branches=1, n_threads=args.threads) as store, work.of(store):
                root = store.root(sampling=Sampling(temperature=0.7, seed=args.seed + attempt))
                root.prefill(prompt)
                found = record(model.vocab.decode(store.tick([root], n_steps=args.tokens).tokens[0]))
            attempts += 1
            if found:
                break
        records.append(found)
    return records, attempts


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("-n", type=int, default=len(ITEMS), help="items to take")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--attempts", type=int, default=3, help="of the naive way, for one item")
    args = parser.parse_args()
    with Model(args.model) as model:
        prompts = [model.chat([{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": item}]).tokens() for item in ITEMS[: args.n]]
        here, naive = Work(), Work() if args.compare else None
        answers = by_forks(model, prompts, args, here)
        for item, answer in zip(ITEMS, answers, strict=False):
            say(args, f"{item}\n    {answer}{'' if record(answer) else '    DOES NOT FIT'}")
        found: dict[str, Any] = {}
        if naive:
            records, attempts = by_asking_again(model, prompts, args, naive)
            found = {"naive_fitting": sum(r is not None for r in records), "naive_attempts": attempts}
            say(args, f"\nWithout the grammar {attempts} attempts gave {found['naive_fitting']} records that fit, of {len(prompts)}.")
        report(args, "json_schema", here, naive, f"ask, check, ask again, at most {args.attempts} times", answers=answers, fitting=sum(record(a) is not None for a in answers), **found)


if __name__ == "__main__":
    main()
