"""One document, many questions: the shared prefix is decoded once, every question is a fork of it.

The prompts are rendered and tokenised whole, each by itself; what they have in common is then found in their tokens. That is right
whatever the template does around the document and wherever the tokeniser merges across the seam. Nothing has to be left over for a
fork to decode: forks inherit the logits of the prefix, so equal prompts, and a prompt that is the beginning of another, need no case
of their own.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .. import errors
from .._ffi import capi
from ..kernel.branch import Branch
from ..kernel.model import Model
from ..kernel.sampling import Sampling
from ..kernel.store import Store
from ..kernel.vocab import TextStream
from .display import Display
from .report import Report

CELL_GRAIN = 256  # the engine rounds a cache up to this


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line; ``context`` and ``threads`` may be left open."""

    model: str
    document: str
    questions: list[str | None]
    system: str | None
    is_raw: bool
    max_tokens: int
    sampling: Sampling
    context: int | None
    threads: int | None


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt, and what its template says about it."""

    tokens: list[int]
    stops: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def make_prompt(model: Model, request: Request, question: str | None) -> Prompt:
    """The prompt of one question, through the model's chat template unless the request is raw.

    Raises
    ------
    TemplateError
        In the template's own words, and what to do about it.
    """
    content = "\n\n".join(part for part in (request.document, question) if part)
    if request.is_raw:
        return Prompt(model.vocab.encode(content if question is None else content + "\n", add_special=True))
    system = [] if request.system is None else [{"role": "system", "content": request.system}]
    try:
        chat = model.chat([*system, {"role": "user", "content": content}])
    except errors.TemplateError as error:
        raise errors.TemplateError(f"{error}; pass --raw to ask in plain text, without a chat template", error.failure) from error
    return Prompt(chat.tokens(), tuple(chat.stops), tuple(chat.notes))


def shared(prompts: list[list[int]]) -> int:
    """How many tokens all prompts begin with; the least and the greatest tell it for those between."""
    first, last = min(prompts), max(prompts)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def admit(prefix: int, rests: Sequence[int], max_tokens: int, context: int | None, n_ctx_train: int) -> int:
    """Cells to open a store with, before anything is decoded.

    Parameters
    ----------
    prefix : int
        Tokens that all prompts share.
    rests : sequence of int
        Tokens of each prompt after those.
    context : int, optional
        Cells the user allows; as many as needed by default.
    n_ctx_train : int
        Positions one branch may reach.

    Raises
    ------
    ContextOverflowError
        With ``need`` and ``have``.
    """
    longest = prefix + max(rests)
    if longest + max_tokens > n_ctx_train:
        raise _overflow(longest + max_tokens, n_ctx_train, f"the longest prompt has {longest:,} tokens, and with {max_tokens:,} for its answer it needs {longest + max_tokens:,}; "
                        f"the model was trained for {n_ctx_train:,}: shorten the document, or lower --max-tokens")
    need = prefix + sum(rests) + len(rests) * max_tokens
    if context is not None and need > context:
        raise _overflow(need, context, f"{need:,} cells are needed ({prefix:,} shared + {sum(rests):,} of questions + {len(rests)} x {max_tokens:,} of answers), "
                        f"--context allows {context:,}: raise it, or lower --max-tokens")
    return context or -(-need // CELL_GRAIN) * CELL_GRAIN


def _overflow(need: int, have: int, message: str) -> errors.ContextOverflowError:
    return errors.ContextOverflowError(message, errors.Failure(capi.E_CONTEXT, "unchanged", 0, False, None, need, have, message))


class Generation:
    """Answers the questions of one request; the report and the display follow at every dispatch.

    Parameters
    ----------
    check : callable
        Called between dispatches; what it raises ends the work there.
    """

    def __init__(self, request: Request, report: Report, display: Display, check: Callable[[], None]) -> None:
        self._request, self._report, self._display, self._check = request, report, display, check

    def run(self) -> None:
        """Load, admit, read, write."""
        request, report = self._request, self._report
        with report.timed("load"):
            model = Model(request.model)
        with model:
            self._check()
            made = {question: make_prompt(model, request, question) for question in request.questions}
            prompts = [made[question] for question in request.questions]
            self._display.notes(sorted({note for prompt in made.values() for note in prompt.notes}))
            n = shared([prompt.tokens for prompt in made.values()])
            prefix, rests = prompts[0].tokens[:n], [prompt.tokens[n:] for prompt in prompts]
            n_ctx = admit(n, [len(rest) for rest in rests], request.max_tokens, request.context, model.info.n_ctx_train)
            self._check()
            with report.timed("load"):
                store = model.store(n_ctx=n_ctx, n_branches=len(prompts) + 1, n_threads=request.threads)
            with store:
                report.n_ctx, report.n_batch = (pressure := store.pressure()).n_ctx, pressure.n_batch
                try:
                    self._write(store, self._read(store, prefix, rests), [model.vocab.stream(prompt.stops) for prompt in prompts])
                finally:
                    report.cells_used = store.pressure().cells_used

    def _read(self, store: Store, prefix: list[int], rests: list[list[int]]) -> list[Branch]:
        """Decode the prefix, fork it, decode the rest of each prompt."""
        report, display = self._report, self._display
        total, start = len(prefix) + sum(map(len, rests)), time.perf_counter()
        read = 0

        def prefill(runs: list[tuple[Branch, list[int]]]) -> None:
            nonlocal read
            before, dispatches = read, 0

            def landed(n: int, _of: int) -> None:
                nonlocal read, dispatches
                read, dispatches = before + n, dispatches + 1
                display.reading(read, total, time.perf_counter() - start)
                self._check()

            try:
                dispatches = store.prefill(runs, progress=landed)
            finally:
                report.prefill_dispatches += dispatches

        root = store.root(sampling=self._request.sampling)
        display.reading(0, total, 0.0)
        with report.timed("prefill"):
            try:
                self._check()
                try:
                    prefill([(root, prefix)])
                finally:
                    report.prefix_tokens, report.prefix_cells = root.position, store.pressure().cells_used
                forks = root.fork(len(rests), seed=report.seed)
                prefill(list(zip(forks, rests, strict=True)))
            finally:
                report.question_tokens = read - report.prefix_tokens
                display.has_read(read, total, time.perf_counter() - start, report.prefill_dispatches)
        return forks

    def _write(self, store: Store, forks: list[Branch], streams: list[TextStream]) -> None:
        """Tick all forks until each has finished: one dispatch a tick for all of them."""
        report, answers = self._report, self._report.answers
        with report.timed("generate"):
            start = time.perf_counter()
            try:
                while going := [i for i, one in enumerate(answers) if one.finish is None]:
                    self._check()
                    ticks = store.tick([forks[i] for i in going])
                    report.ticks += ticks.n_ticks
                    report.tick_dispatches += ticks.n_dispatches
                    for i, tokens, finish in zip(going, ticks.tokens, ticks.finish, strict=True):
                        answers[i].tokens += len(tokens)
                        self._say(i, streams[i].feed(tokens))
                        if streams[i].stopped_by is not None:
                            self._end(i, streams[i], "stop")
                        elif finish is not None:
                            self._end(i, streams[i], finish.name.lower())
                        elif answers[i].tokens >= self._request.max_tokens:
                            self._end(i, streams[i], "length")
                    self._display.draw(report.ticks, report.tokens_generated, time.perf_counter() - start)
            except KeyboardInterrupt:
                for i in going:
                    if answers[i].finish is None:
                        self._end(i, streams[i], "cancelled")
                raise

    def _say(self, i: int, text: str) -> None:
        self._report.answers[i].text += text
        self._display.add(i, text)

    def _end(self, i: int, stream: TextStream, finish: str) -> None:
        self._say(i, stream.feed([], final=True))
        self._report.answers[i].finish = finish
        self._display.finish(i)
