"""One document, many questions: the shared prefix is decoded once, every question is a fork of it.

The prompts are rendered and tokenised whole, each by itself; what they have in common is then found in their tokens. That is right
whatever the template does around the document and wherever the tokeniser merges across the seam. Nothing has to be left over for a
fork to decode: forks inherit the logits of the prefix, so equal prompts, and a prompt that is the beginning of another, need no case
of their own.
"""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import errors
from .._ffi import capi
from ..kernel.branch import Branch
from ..kernel.model import Model
from ..kernel.outcomes import Finish
from ..kernel.parts import PartSource
from ..kernel.projector import LaidOut, Projector
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
    projector: str | None = None
    media: tuple[PartSource, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """What a prompt is made of, and what its template says about it.

    Attributes
    ----------
    atoms : list
        Tokens, and the media between them.
    """

    atoms: list[Any]
    stops: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def make_prompt(model: Model, request: Request, question: str | None, projector: Projector | None = None) -> Prompt:
    """The prompt of one question, through the model's chat template unless the request is raw. Media come first, then the document.

    Raises
    ------
    TemplateError
        In the template's own words, and what to do about it.
    """
    content = "\n\n".join(part for part in (request.document, question) if part)
    if request.is_raw:
        atoms: list[Any] = model.vocab.encode(content if question is None else content + "\n", add_special=not request.media)
        bos = [model.info.bos] if request.media and model.info.add_bos else []
        return Prompt([*bos, *request.media, *atoms])
    system = [] if request.system is None else [{"role": "system", "content": request.system}]
    try:
        if projector is not None:
            from ..sources.chat import chat as render

            media_chat = render(projector, [*system, {"role": "user", "content": [*request.media, *([content] if content else [])]}])
            return Prompt(list(media_chat.atoms), tuple(media_chat.chat.stops), tuple(media_chat.chat.notes))
        chat = model.chat([*system, {"role": "user", "content": content}])
    except errors.TemplateError as error:
        raise errors.TemplateError(f"{error}; pass --raw to ask in plain text, without a chat template", error.failure) from error
    return Prompt(list(chat.tokens()), tuple(chat.stops), tuple(chat.notes))


def shared(prompts: Sequence[Sequence[Any]]) -> int:
    """How many atoms all prompts begin with."""
    first, n = prompts[0], min(map(len, prompts))
    return next((i for i in range(n) if any(prompt[i] != first[i] for prompt in prompts)), n)


def admit(prefix: int, rests: Sequence[int], max_tokens: int, context: int | None, n_ctx_train: int, positions: int | None = None) -> int:
    """Cells to open a store with, before anything is decoded.

    Parameters
    ----------
    prefix : int
        Cells that all prompts share.
    rests : sequence of int
        Tokens of each prompt after those.
    context : int, optional
        Cells the user allows; as many as needed by default.
    n_ctx_train : int
        Positions one branch may reach.
    positions : int, optional
        Positions those cells stand at; as many as cells by default.

    Raises
    ------
    ContextOverflowError
        With ``need`` and ``have``.
    """
    longest = (prefix if positions is None else positions) + max(rests)
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


def lay_out(projector: Projector, atoms: Sequence[Any]) -> LaidOut:
    """Tokens and media of a prefix as one prompt."""
    from ..sources.prompt import Prompt as Laid

    items: list[Any] = []
    for atom in atoms:
        if isinstance(atom, int) and items and isinstance(items[-1], list):
            items[-1].append(atom)
        else:
            items.append([atom] if isinstance(atom, int) else atom)
    return Laid(projector, items, add_special=False)


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
        with model, contextlib.ExitStack() as stack:
            self._check()
            projector = None
            if request.projector is not None:
                with report.timed("load"):
                    projector = stack.enter_context(model.projector(request.projector, n_threads=request.threads))
            made = {question: make_prompt(model, request, question, projector) for question in request.questions}
            prompts = [made[question] for question in request.questions]
            self._display.notes(sorted({note for prompt in made.values() for note in prompt.notes}))
            n = shared([prompt.atoms for prompt in made.values()])
            prefix, rests = prompts[0].atoms[:n], [prompt.atoms[n:] for prompt in prompts]
            laid, n_batch = None, None
            cells = positions = n
            if projector is not None:
                laid = stack.enter_context(lay_out(projector, prefix))
                quote = laid.quote()
                cells, positions, n_batch = quote.n_cells, quote.n_pos, max(512, len(prompts) + 1, quote.max_rows)
                report.media, report.slack = quote.n_media, quote.slack
            n_ctx = admit(cells, [len(rest) for rest in rests], request.max_tokens, request.context, model.info.n_ctx_train, positions)
            self._check()
            with report.timed("load"):
                store = model.store(n_ctx=n_ctx, n_branches=len(prompts) + 1, n_threads=request.threads, n_batch=n_batch)
            with store:
                report.n_ctx, report.n_batch = (pressure := store.pressure()).n_ctx, pressure.n_batch
                try:
                    self._write(store, self._read(store, prefix if laid is None else laid, rests), [model.vocab.stream(prompt.stops) for prompt in prompts])
                finally:
                    report.cells_used = store.pressure().cells_used
                    if projector is not None:
                        report.encoder_runs = projector.statistics().n_encodes

    def _read(self, store: Store, prefix: list[int] | LaidOut, rests: list[list[int]]) -> list[Branch]:
        """Decode the prefix, fork it, decode the rest of each prompt."""
        report, display = self._report, self._display
        length = prefix.quote().n_cells if isinstance(prefix, LaidOut) else len(prefix)
        total, start = length + sum(map(len, rests)), time.perf_counter()
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
                    if isinstance(prefix, LaidOut):
                        report.prefill_dispatches += root.prefill(prefix)
                        read = length
                    else:
                        prefill([(root, prefix)])
                finally:
                    report.prefix_tokens = report.prefix_cells = store.pressure().cells_used
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
                    is_last = answers[going[0]].tokens + 1 == self._request.max_tokens  # those that go on have said as much as each other
                    tokens_of, finish_of = self._advance(store, [forks[i] for i in going], is_last)
                    for i, tokens, finish in zip(going, tokens_of, finish_of, strict=True):
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

    def _advance(self, store: Store, forks: list[Branch], is_last: bool) -> tuple[list[list[int]], list[Finish | None]]:
        """The next token of each fork, or why there is none. The last one is drawn and not decoded: nobody asks what comes after it."""
        if is_last:
            with contextlib.suppress(errors.NothingLegalError):  # of one fork; a tick tells of which
                drawn = store.sample(forks)
                self._report.ticks += 1
                ends = [store.model.vocab.ends_generation(token) for token in drawn]
                return [[] if end else [token] for token, end in zip(drawn, ends, strict=True)], [Finish.END_OF_GENERATION if end else None for end in ends]
        ticks = store.tick(forks)
        self._report.ticks += ticks.n_ticks
        self._report.tick_dispatches += ticks.n_dispatches
        return ticks.tokens, ticks.finish

    def _say(self, i: int, text: str) -> None:
        self._report.answers[i].text += text
        self._display.add(i, text)

    def _end(self, i: int, stream: TextStream, finish: str) -> None:
        self._say(i, stream.feed([], final=True))
        self._report.answers[i].finish = finish
        self._display.finish(i)
