"""Questions over one document: the product beside a raw fork, and beside each peer on the same file, document and questions."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from .answers import differences, not_near, summary
from .pairs import Side, compare
from .questions import Work, work
from .rows import Row, failed
from .runner import Runner, RunnerError
from .setting import Setting
from .sides import both

GROUP = "documents"
PEER_SECONDS = 7200.0  # a peer may take minutes, and must not hang for ever
CONTEXTS = "N contexts"

# Time of the product over the peer's, at most; by questions where it differs. What stands nowhere is measured and promised nothing.
BOUNDS: Mapping[str, Mapping[int | None, float]] = {
    "server": {None: 0.2},
    "server, one slot": {8: 0.75, 32: 0.55},
    "llama-cpp-python": {None: 0.25},
    CONTEXTS: {None: 0.25},
}
PATHS = {
    "server": "llama-server in xllamacpp, as many slots as questions, unified cache, all asked at once",
    "server, one slot": "llama-server in xllamacpp, one slot with its prompt cache, one question after another",
    "server, restored slots": "llama-server in xllamacpp, the document read once, saved and restored into every slot",
    "llama-cpp-python": "llama_cpp.Llama with its prefix cache, one question after another",
    "llama-cpp-python batched": "LlamaBatch, llama_decode and llama_memory_seq_cp through llama-cpp-python's ctypes",
    CONTEXTS: "this package, a store for each question, one after another",
}
AGAIN = {"server", CONTEXTS}  # read the document for every question: minutes, so measured once
FEW = 8  # questions; what takes more of them is measured less often


def bound(peer: str, n_questions: int) -> float | None:
    """What is promised of the product beside a peer."""
    promised = BOUNDS.get(peer, {})
    return promised.get(n_questions, promised.get(None))


class Asked:
    """A side that is asked, and its last answers."""

    def __init__(self, name: str, ask: Callable[..., dict[str, Any]], todo: Work) -> None:
        self.name, self._asked, self.todo = name, ask, todo
        self.answers: list[list[int]] | None = None
        self.n_read: int | None = None

    def run(self) -> float:
        """Ask everything; the seconds it took inside the runner.

        Raises
        ------
        RunnerError
            It failed, or the answers are not as many or as long as was asked for.
        """
        answer = self._ask(self.todo)
        self.answers, self.n_read = answer["answers"], answer.get("n_read")
        return float(answer["seconds"])

    def warm(self) -> None:
        """Hardly anything, so that code and tables are there."""
        self._ask(self.todo.small())

    def _ask(self, todo: Work) -> dict[str, Any]:
        answer = self._asked("document", document=todo.document, questions=todo.questions, n_tokens=todo.n_tokens, timeout=PEER_SECONDS)
        lengths = [len(tokens) for tokens in answer["answers"]]
        if lengths != [todo.n_tokens] * len(todo.questions):
            raise RunnerError(f"{self.name}: answers of {lengths} tokens where {len(todo.questions)} of {todo.n_tokens} were asked for")
        return answer


def rows(setting: Setting) -> Iterator[Row]:
    everything = work(setting, setting.times(2000, 200), setting.times(48, 6))
    for n in (setting.times(8, 2), setting.times(32, 4)):
        yield from rows_of_work(setting, everything.first(n))


def rows_of_work(setting: Setting, todo: Work) -> Iterator[Row]:
    """All sides on one number of questions. A side that fails is a failed row, and the others go on."""
    n = len(todo.questions)
    what = f"{n} questions on {len(todo.document):,} tokens, {todo.n_tokens} each"
    # The same for all: what the product needs; peers that keep the document more than once make their own room.
    options = {"n_ctx": -(-(todo.n_cells + 64) // 256) * 256, "n_branches": n + 1, "n_batch": 512}
    with both(setting, **options) as sides:
        product, control = (Asked(name, partial(sides.ask, name), todo) for name in ("product", "control"))
        try:
            product.warm()
        except RunnerError as error:
            yield failed(GROUP, what, "product", "forks of one store", error)
            return

        def anew() -> None:
            sides.open()
            for side in (product, control):
                with suppress(RunnerError):  # it fails again when it is measured
                    side.warm()

        raw = Side("control", "llama_decode and llama_memory_seq_cp, nothing else", control.run, note=todo.source) if setting.control else None
        ours = Side("product", "forks of one store", product.run, note=todo.source)
        yield from compare(GROUP, what, "s", raw, [ours], min(setting.n, 5 if n <= FEW else 3), n_warm=0, before=anew, against="the raw control" if raw else "")
        if raw is not None and raw.reason is None:
            yield same_answers(setting, todo, f"{what}: the raw control", "control", product.answers, control.answers)
        for peer, command in peers(setting).items():
            yield from beside_peer(setting, todo, f"{what}: {peer}", peer, command, options, product)


def peers(setting: Setting) -> dict[str, Sequence[str]]:
    """Those that were given, and the naive way, which needs nothing that is not here."""
    return {**setting.peers, CONTEXTS: (sys.executable, "-m", "pylloyal.bench.contexts")}


def beside_peer(setting: Setting, todo: Work, what: str, peer: str, command: Sequence[str], options: Mapping[str, Any], product: Asked) -> Iterator[Row]:
    """A peer and the product in turns, and whether they said the same."""
    path = PATHS.get(peer, " ".join(command))
    try:
        with Runner(peer, command) as runner:
            runner.ask("open", model=setting.model, n_threads=setting.n_threads, flash_attn=setting.flash_attn, **options)
            asked = Asked(peer, runner.ask, todo)
            asked.warm()
            theirs = Side("peer", path, asked.run, note=versions(runner))
            promised = None if setting.is_quick else bound(peer, len(todo.questions))  # of 2,000 tokens, not of a few
            ours = Side("product", "forks of one store", product.run, bound=promised)
            measured = list(compare(GROUP, what, "s", theirs, [ours], 1 if peer in AGAIN or len(todo.questions) > FEW or setting.is_quick else 3, n_warm=0, against=peer))
    except RunnerError as error:
        yield failed(GROUP, what, "peer", path, error)
        return
    yield from measured
    if theirs.reason is None:
        yield same_answers(setting, todo, what, "peer", product.answers, asked.answers, path, "" if asked.n_read is None else f"; {asked.n_read:,} tokens of prompts were read")


def same_answers(setting: Setting, todo: Work, what: str, label: Any, ours: Sequence[Sequence[int]] | None, theirs: Sequence[Sequence[int]] | None, path: str = "llama_decode", more: str = "") -> Row:
    """A row that counts the answers which differ where no near tie excuses it: none are promised."""
    name = f"{what}, answers that differ"
    if ours is None or theirs is None:
        return failed(GROUP, name, label, path, "there are no answers to compare")
    try:
        found = differences(setting.model, setting.n_threads, todo, ours, theirs)
    except (ValueError, MemoryError) as error:
        return failed(GROUP, name, label, path, error)
    n = float(not_near(found))
    return Row(GROUP, name, label, path, "answers", 1, n, n, n, bound=0.0, bound_on="median", note=summary(len(todo.questions), found) + more)


def versions(runner: Runner) -> str:
    """What a peer is made of, for a note: its versions, and the instructions it was compiled for."""
    said = dict(runner.versions)
    system = str(said.pop("system", ""))
    flags = [part.split("=")[0].split(":")[-1].strip() for part in system.split("|") if part.split("=")[-1].strip() == "1"]
    parts = [f"{name} {' '.join(map(str, value.values())) if isinstance(value, dict) else value}" for name, value in said.items()]
    return "; ".join([*parts, *([" ".join(flags)] if flags else [])])
