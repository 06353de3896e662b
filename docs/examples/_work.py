"""What the examples share: their options, the count of what a way of doing a job took, and the report."""
from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pylloyal import Store

DOCUMENT = Path(__file__).resolve().parents[2] / "fixtures" / "texts" / "moby_dick_1.txt"


def options(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what every example takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a GGUF file")
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True, help="do the job the naive way too, and count that (default: yes)")
    parser.add_argument("--threads", type=int, help="default: the cores this process may use")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def with_document(parser: argparse.ArgumentParser, chars: int) -> argparse.ArgumentParser:
    parser.add_argument("--document", type=Path, default=DOCUMENT, metavar="F", help="UTF-8 text (default: a chapter of Moby-Dick)")
    parser.add_argument("--chars", type=int, default=chars, metavar="N", help="how much of it to read (default: %(default)s characters)")
    return parser


def read_document(args: argparse.Namespace) -> str:
    return str(args.document.read_text(encoding="utf-8")[: args.chars])


@dataclass
class Work:
    """What a way of doing a job took: the counts are the same on any machine, the seconds are not.

    Attributes
    ----------
    cells : int
        Most that were in use at once; of several stores the sum, as if all were open together.
    tokens_decoded, dispatches : int
    seconds : float
    """

    cells: int = 0
    tokens_decoded: int = 0
    dispatches: int = 0
    seconds: float = 0.0
    _peaks: dict[Store, int] = field(default_factory=dict, repr=False)

    @contextmanager
    def of(self, *stores: Store) -> Iterator[None]:
        """Count what is done inside."""
        start, before = time.perf_counter(), [store.pressure() for store in stores]
        yield
        self.seconds += time.perf_counter() - start
        for store, then in zip(stores, before, strict=True):
            self.look(store)
            now = store.pressure()
            self.cells += self._peaks.pop(store)
            self.tokens_decoded += now.n_tokens_decoded - then.n_tokens_decoded
            self.dispatches += now.n_dispatches - then.n_dispatches

    def look(self, store: Store, gone: int = 0) -> None:
        """Note the cells in use, before something is pruned; `gone` are cells that were in use and are free again."""
        self._peaks[store] = max(self._peaks.get(store, 0), store.pressure().cells_used + gone)

    def counts(self) -> dict[str, int]:
        return {"cells": self.cells, "tokens_decoded": self.tokens_decoded, "dispatches": self.dispatches}


def report(args: argparse.Namespace, name: str, here: Work, naive: Work | None, naive_way: str, **found: Any) -> None:
    """Print what it took here and the naive way, or with --json everything as one object."""
    mine, theirs = here.counts(), naive.counts() if naive else None
    if args.json:
        saved = {key: theirs[key] - mine[key] for key in mine} if theirs else None
        seconds = {"here": round(here.seconds, 3), "naive": round(naive.seconds, 3) if naive else None}
        print(json.dumps({"name": name, "here": mine, "naive": theirs, "saved": saved, "seconds": seconds, **found}))
        return
    print(f"\n{'':16}{'here':>8}" + (f"{'naive':>9}   (naive: {naive_way})" if naive else ""))
    for key, value in mine.items():
        print(f"{key.replace('_', ' '):16}{value:8,}" + (f"{theirs[key]:9,}   {_against(value, theirs[key])}" if theirs else ""))
    print(f"{'seconds':16}{here.seconds:8.1f}" + (f"{naive.seconds:9.1f}   {here.seconds / naive.seconds:.2f} of the time, on this machine, just now" if naive else ""))


def _against(here: int, naive: int) -> str:
    if here == naive:
        return "nothing saved"
    return f"{naive - here:,} saved, {1 - here / naive:.0%}" if here < naive else f"{here - naive:,} more here: the price"


def agreement(said: list[int], plain: list[int], leads: list[float]) -> dict[str, Any]:
    """Whether two greedy texts are the same; if not, where they part, and how far ahead the token that was plainly chosen was (nats).

    After a prune, new tokens fill the free cells, and attention adds up in another order; a quantised model makes more of that than
    the last bits. So texts can part, but only where two tokens are about equally likely.
    """
    at = next((i for i, (a, b) in enumerate(zip(said, plain, strict=False)) if a != b), None)
    return {"same": said == plain, "first_difference": at, "lead": None if at is None else leads[at]}


def say(args: argparse.Namespace, *words: object) -> None:
    """Print, unless --json wants one object alone."""
    if not args.json:
        print(*words, flush=True)
