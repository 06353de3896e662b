"""Talks to a *runner*: a child process that does the work of one side and is measured from inside.

It prints a first line ``{"runner": name, "versions": {...}}``, then answers each JSON object a line on its standard input with one JSON line;
``{"error": words}`` is a failure after which it goes on. Nothing else may go to its standard output.
"""
from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from ..errors import PylloyalError

START_SECONDS = 120.0
ANSWER_SECONDS = 900.0


class RunnerError(PylloyalError):
    """A runner could not do what it was asked, or is no longer there. The message has its last words on standard error."""


class RunnerTimeoutError(RunnerError):
    """It did not answer in time, and was ended."""


class Runner:
    """A child process that works on demand. As a context manager it is ended at the end.

    Parameters
    ----------
    name : str
        For messages.
    command : sequence of str
    env : mapping, optional
        Added to this process's own.
    timeout : float
        Seconds until its first line.

    Attributes
    ----------
    versions : dict
        What its first line says.

    Raises
    ------
    RunnerError, RunnerTimeoutError
        It does not start, or begins with something else.
    """

    def __init__(self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = START_SECONDS) -> None:
        self.name = name
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 closed with the process
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        try:
            # A session of its own: whatever it starts is ended with it.
            self._process = subprocess.Popen(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, env={**os.environ, **(env or {})}, start_new_session=os.name == "posix")
        except OSError as error:
            self._words.close()
            raise RunnerError(f"{name} does not start: {error.strerror or error}") from error
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            first = self._answer(timeout)
            if not isinstance(first.get("runner"), str) or not isinstance(first.get("versions", {}), dict):
                raise self._broken(f"began with {json.dumps(first)[:200]}")
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, Any] = first.get("versions", {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._kill()  # nobody waits for what it was at
        self.close()

    @property
    def is_alive(self) -> bool:
        """False once it ended, was ended, or broke the protocol."""
        return not self._words.closed and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, *, timeout: float = ANSWER_SECONDS, **arguments: Any) -> dict[str, Any]:
        """One operation, and its answer.

        Raises
        ------
        RunnerError
            It refused (and goes on), died, or said what is no answer (and was ended).
        RunnerTimeoutError
            It was ended.
        """
        if self._words.closed:
            raise RunnerError(f"{self.name} has ended")
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._broken(self._ended()) from None
        answer = self._answer(timeout)
        if "error" in answer:
            raise RunnerError(f"{self.name}, {op}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End it, with everything it started. Again is fine."""
        if self._words.closed:
            return
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()  # its cue to end by itself
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._kill()
            self._reader.join(timeout=5)
            if self._process.stdout is not None and not self._reader.is_alive():
                self._process.stdout.close()
            self._words.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _answer(self, timeout: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise self._broken(f"no answer in {timeout:g} s", RunnerTimeoutError) from None
        if line is None:
            raise self._broken(self._ended())
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._broken(f"said what is no answer: {line[:200]!r}")
        return answer

    def _ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(timeout=5)
            return f"ended with status {status}" if status >= 0 else f"died of {signal.Signals(-status).name}"
        return "closed its output"

    def _broken(self, what: str, kind: type[RunnerError] = RunnerError) -> RunnerError:
        """The exception for a runner that is of no more use; ends it."""
        self._kill()
        words = b""
        if not self._words.closed:
            end = self._words.seek(0, os.SEEK_END)
            self._words.seek(max(0, end - 2000))
            words = self._words.read()
        self.close()
        lines = [line for line in words.decode("utf-8", "replace").splitlines() if line.strip()]
        return kind(f"{self.name} {what}" + ("; its last words: " + " | ".join(lines[-4:]) if lines else ""))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()
