"""The groups, by name, and one run of them."""
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from .machine import environment
from .noise import Noise
from .rows import Report, Row, failed
from .setting import Setting

# A group is a module of this package with ``rows(setting)``.
GROUPS = {
    "ticks": "a tick beside the raw engine's",
    "documents": "questions over one document, beside the peers",
    "forks": "forks of a long branch",
    "memory": "peak memory of 32 branches",
    "growth": "a tick's time by branches and by cells",
    "attention": "flash attention on and off",
    "contention": "beside a process on every core",
    "starts": "imports, and the first token",
    "micro": "Python's share of a tick",
    "headers": "reading a header, planning",
}


class NoisyError(Exception):
    """The machine is too noisy to tell; ``noise`` is what was measured of it."""

    def __init__(self, when: str, noise: Noise) -> None:
        super().__init__(f"too noisy {when}: {noise.describe()}")
        self.noise = noise


def rows_of_group(name: str, setting: Setting) -> Iterator[Row]:
    """A group's rows; what it raises becomes its last one."""
    try:
        yield from importlib.import_module(f".{name}", __package__).rows(setting)
    except Exception as error:
        yield failed(name, name, "product", "the group itself", error)


def measure_all(setting: Setting, names: Iterable[str], noise: Callable[[], Noise], *, even_if_noisy: bool = False, seen: Callable[[Row], object] | None = None) -> Report:
    """Measure the noise, the groups, and the noise again.

    Parameters
    ----------
    even_if_noisy : bool
        Report all the same; every row is then marked.
    seen : callable, optional
        Told each row as it comes.

    Raises
    ------
    NoisyError
        Before anything was measured, or after all was.
    """
    before = noise()
    if not before.is_quiet and not even_if_noisy:
        raise NoisyError("before anything was measured", before)
    rows = []
    for name in names:
        for row in rows_of_group(name, setting):
            rows.append(replace(row, bound=None) if setting.is_quick else row)  # figures that mean nothing keep no promise, and break none
            if seen is not None:
                seen(row)
    after = noise()
    is_quiet = before.is_quiet and after.is_quiet
    if not is_quiet:
        if not even_if_noisy:
            raise NoisyError("after all was measured", after)
        rows = [replace(row, state="contended") for row in rows]
    facts = {**environment(setting), "state": "quiet" if is_quiet else "contended", "noise_before": before.to_json(), "noise_after": after.to_json()}
    return Report(facts, rows)
