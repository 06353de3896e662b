"""Ask a model about a document. The document is decoded once; every question is a fork of it, and all of them are answered
together, one dispatch per token for all. With --branches N, N samples of one answer instead.

Text such as <|im_end|> inside a document stays text: it does not end the turn.
"""
from __future__ import annotations

import argparse
import codecs
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import errors
from .commands import UsageError
from .display import choose
from .interrupts import Interrupts
from .media import add_clip_arguments, clip_options
from .report import Answer, Report
from .terminal import DIM, Terminal

MAX_BRANCHES = 255  # a store holds 256, and one is the root


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count = _whole(1, 2**31 - 1)
    parser.add_argument("model", metavar="MODEL", help="a GGUF file")
    parser.add_argument("questions", metavar="question", nargs="*", default=[], help="each is answered on a branch of its own")
    parser.add_argument("--document", metavar="F", help="UTF-8 text that comes before every question; - for standard input")
    parser.add_argument("--mmproj", metavar="P", help="the projector that encodes --image and --video")
    parser.add_argument("--image", metavar="F", action="append", default=[], help="a picture that comes before every question; may be given again")
    parser.add_argument("--video", metavar="F", action="append", default=[], help="a clip that comes before every question; may be given again")
    add_clip_arguments(parser)
    parser.add_argument("--branches", metavar="N", type=_whole(1, MAX_BRANCHES), help="answer the one question N times, with seeds S, S + 1, ...")
    parser.add_argument("--seed", metavar="S", type=_whole(0, 2**64 - 1), help="seed of the first branch; the next one has S + 1 (default: from the operating system)")
    parser.add_argument("--max-tokens", metavar="N", type=count, default=256, help="most tokens of each answer (default: %(default)s)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--context", metavar="N", type=count, help="most cells to use, in tokens (default: what the prompts and answers need)")
    warmth = parser.add_mutually_exclusive_group()
    warmth.add_argument("--temperature", metavar="T", type=_temperature, default=0.8, help="0 takes the most likely token (default: %(default)s)")
    warmth.add_argument("--greedy", action="store_true", help="always take the most likely token")
    parser.add_argument("--threads", metavar="N", type=count, help="default: the cores this process may use")
    parser.add_argument("--raw", action="store_true", help="plain text, without the model's chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object in the end, and nothing else")


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Answer, and report what it took."""
    questions = _questions(args)
    seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    report = Report(args.model, seed, [Answer(question, (seed + i) % 2**64) for i, question in enumerate(questions)])
    err, out = Terminal(sys.stderr), Terminal(sys.stdout)
    headings = [f"[{i}] {one.question if len(args.questions) > 1 else f'seed {one.seed}'}" for i, one in enumerate(report.answers, 1)]
    display = choose(err, out, headings, is_json=args.json)
    status = 0
    try:
        document = "" if args.document is None else _read(args.document, interrupts)
        if not document and questions[0] is None:
            raise errors.PylloyalError(f"{args.document} is empty, and there is no question")
        from ..kernel.sampling import Sampling
        from .generation import Generation, Request

        interrupts.check()
        sampling = Sampling(temperature=0.0 if args.greedy else args.temperature)
        request = Request(args.model, document, questions, args.system, args.raw, args.max_tokens, sampling, args.context, args.threads, args.mmproj, _media(args, interrupts))
        Generation(request, report, display, interrupts.check).run()
    except KeyboardInterrupt:
        report.cancel()
        status = 130
    finally:
        display.close()
    if args.json:
        out.write(report.to_json() + "\n")
    else:
        lines = ["cancelled"] * (status == 130) + (report.summary() if report.n_ctx else [])
        err.write("".join(f"{err.paint(line, DIM)}\n" for line in lines))
    return status


def _questions(args: argparse.Namespace) -> list[str | None]:
    """One question per branch; None where the document says it all."""
    given: list[str] = args.questions
    if (args.image or args.video) and args.mmproj is None:
        raise UsageError("--image and --video need --mmproj, the projector that encodes them")
    if args.mmproj is not None and not (args.image or args.video):
        raise UsageError("--mmproj has nothing to encode: give an --image or a --video")
    if not given and args.document is None:
        raise UsageError("nothing to ask: give a question, a --document, or both")
    if len(given) > 1 and args.branches is not None:
        raise UsageError("--branches takes one question at most")
    if len(given) > MAX_BRANCHES:
        raise UsageError(f"{len(given)} questions; {MAX_BRANCHES} at most")
    if args.raw and args.system is not None:
        raise UsageError("--system needs the chat template that --raw leaves out")
    if not all(text.strip() for text in given):
        raise UsageError("a question is empty")
    if any("\ud800" <= c <= "\udfff" for text in (*given, args.system or "") for c in text):
        raise UsageError("a question or --system is not UTF-8 text")
    return [*given] if len(given) > 1 else [given[0] if given else None] * (args.branches or 1)


def _media(args: argparse.Namespace, interrupts: Interrupts) -> tuple[Any, ...]:
    """Pictures, then clips, in the order they were given."""
    if not (args.image or args.video):
        return ()
    from ..sources.image import Image
    from ..sources.video import Video

    out: list[Any] = []
    for path in args.image:
        interrupts.check()
        out.append(Image(path))
    for path in args.video:
        interrupts.check()
        out.append(Video(path, **clip_options(args)))
    return tuple(out)


def _read(path: str, interrupts: Interrupts) -> str:
    """The text of a document; Ctrl-C ends the wait for it."""
    with interrupts.at_once():
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise errors.PylloyalError(f"{'standard input' if path == '-' else path} is not UTF-8 text: {error.reason} at byte {error.start:,}") from error


def _whole(least: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not in {least}..{most}")
        return value

    whole.__name__ = "whole number"
    return whole


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value
