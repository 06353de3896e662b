"""The commands, and what their exceptions look like from outside.

A command is a module of this package with ``add_arguments(parser)`` and ``run(args, interrupts)``. Only the one that was asked for is
imported, and it imports numpy and the native library no sooner than it needs them: ``--help`` costs nothing.
"""
from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import errors
from .interrupts import Interrupts

COMMANDS = {
    "ask": "ask one document many questions, read once and answered side by side",
    "bench": "what this library costs on this machine, beside the raw engine",
    "config": "what a compiler is told, for programs in other languages",
    "demo": "one picture and one clip, encoded once and questioned by many forks",
    "info": "what the native library is, and the devices it can use",
    "media": "pictures and clips as a model would be shown them",
    "plan": "what fits this machine, and why, from a model's header alone",
}


class UsageError(Exception):
    """The arguments contradict each other."""


def run(argv: Sequence[str] | None, interrupts: Interrupts) -> int:
    """Run one command; see :func:`pylloyal.cli.main`."""
    try:
        if argv is None:
            _complete_streams()
        return _run(sys.argv[1:] if argv is None else argv, interrupts)
    except BrokenPipeError:
        _abandon_output()
        return 141
    except KeyboardInterrupt:
        return 130
    except (errors.PylloyalError, OSError) as error:
        with contextlib.suppress(OSError):
            print(f"pylloyal: {_reason(error)}", file=sys.stderr, flush=True)
        _abandon_output()
        return 1


def _run(words: Sequence[str], interrupts: Interrupts) -> int:
    names = argparse.ArgumentParser(
        prog="pylloyal", usage="pylloyal [-h] command ...", description="The working memory of a local language model, as a tree of branches.",
        epilog="commands:\n" + "\n".join(f"  {name:<8}{text}" for name, text in COMMANDS.items()) + "\n\n`pylloyal <command> --help` tells more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    names.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    name = names.parse_args(words[:1]).command
    command = importlib.import_module(f".{name}", __package__)
    parser = _Parser(prog=f"pylloyal {name}", description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.usage_status = getattr(command, "USAGE_STATUS", 2)
    command.add_arguments(parser)
    args = parser.parse_intermixed_args(words[1:])
    try:
        status: int = command.run(args, interrupts)
    except UsageError as error:
        parser.error(str(error))
    sys.stdout.flush()
    return status


class _Parser(argparse.ArgumentParser):
    """Of one command; a status of 2 may mean something else to it than wrong arguments."""

    usage_status = 2

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(self.usage_status, f"{self.prog}: error: {message}\n")


def _complete_streams() -> None:
    """Stand-ins for standard streams that were closed, and no character that cannot be written."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _reason(error: errors.PylloyalError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, errors.PylloyalError) or error.strerror is None:
        return str(error)
    return error.strerror


def _abandon_output() -> None:
    """Give up what could not be written, so that the interpreter does not try, and complain, once more when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
