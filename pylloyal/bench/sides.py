"""The product and the control with the same model open, as sides to compare."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .pairs import Side
from .rows import BoundOn
from .runner import Runner, RunnerError
from .setting import Setting

Pick = Callable[[dict[str, Any]], float]


class Sides:
    """Makes sides that ask an operation. One that could not be opened fails when it is measured, and the other goes on."""

    def __init__(self, setting: Setting, options: dict[str, Any]) -> None:
        self._setting, self._options = setting, options
        self._stack = contextlib.ExitStack()
        self._runners: dict[str, Runner | Exception] = {}

    def open(self) -> None:
        """Both in new processes; those there were are ended. Where a process's memory lies is worth a percent or two for as long as it lives."""
        self.close()
        for name in ("product", *(["control"] if self._setting.control else [])):
            try:
                self._runners[name] = self._stack.enter_context(self._setting.opened(name, **self._options))
            except Exception as error:
                self._runners[name] = error

    def close(self) -> None:
        self._runners.clear()
        self._stack.close()

    def ask(self, name: str, op: str, **arguments: Any) -> dict[str, Any]:
        """An answer of "product" or "control"; raises what kept it from being opened."""
        runner = self._runners.get(name) or RunnerError(f"there is no {name}")
        if isinstance(runner, Exception):
            raise runner
        return runner.ask(op, **arguments)

    def product(self, path: str, pick: Pick, op: str, *, bound: float | None = None, bound_on: BoundOn = "ratio", note: str = "", **arguments: Any) -> Side:
        return Side("product", path, lambda: pick(self.ask("product", op, **arguments)), bound, bound_on, note)

    def control(self, path: str, pick: Pick, op: str, **arguments: Any) -> Side | None:
        """None where no control was given."""
        if not self._setting.control:
            return None
        return Side("control", path, lambda: pick(self.ask("control", op, **arguments)))


@contextlib.contextmanager
def both(setting: Setting, **options: Any) -> Iterator[Sides]:
    """Both sides with the model open, as the operation "open" has the options; ended at the end."""
    sides = Sides(setting, options)
    try:
        sides.open()
        yield sides
    finally:
        sides.close()


def fresh(setting: Setting, name: str, options: dict[str, Any], work: Callable[[Runner], float]) -> Callable[[], float]:
    """The figure of a process that did nothing before: one is started for every run."""

    def run() -> float:
        with setting.opened(name, **options) as runner:
            return work(runner)

    return run
