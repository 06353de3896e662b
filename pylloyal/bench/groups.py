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


TOO_NOISY = "too noisy"
TRIES = 5  # to find the machine quiet before a group


def noise_after(noise: Callable[[], Noise]) -> Noise:
    """How noisy the machine is after a group. If it seems so, it is asked twice more, and what two of three say counts: a second's trouble is not worth a group of minutes."""
    first = noise()
    if first.is_quiet:
        return first
    again = [noise(), noise()]
    return again[0] if all(found.is_quiet for found in again) else first


def rows_of_group(name: str, setting: Setting) -> Iterator[Row]:
    """A group's rows; what it raises becomes its last one."""
    try:
        yield from importlib.import_module(f".{name}", __package__).rows(setting)
    except Exception as error:
        yield failed(name, name, "product", "the group itself", error)


def measure_all(setting: Setting, names: Iterable[str], noise: Callable[[], Noise], *, even_if_noisy: bool = False,
                seen: Callable[[Row], object] | None = None, done: Callable[[Report], object] | None = None) -> Report:
    """Measure the groups, and before and after each of them how noisy the machine is. A group that was measured in noise is refused: one failed row.

    Parameters
    ----------
    even_if_noisy : bool
        Report it all the same; its rows are then marked.
    seen : callable, optional
        Told each row as it comes, whatever becomes of it.
    done : callable, optional
        Given the report as far as it is, after each group: what is measured then is not lost if the run is stopped.
    """
    report = Report({**environment(setting), "state": "quiet", "noise": {}})
    for name in names:
        before = next((found for _ in range(TRIES - 1) if (found := noise()).is_quiet), None) or noise()
        rows = []
        if before.is_quiet or even_if_noisy:
            for row in rows_of_group(name, setting):
                rows.append(replace(row, bound=None) if setting.is_quick else row)  # figures that mean nothing keep no promise, and break none
                if seen is not None:
                    seen(row)
        after = noise_after(noise) if rows else before
        if not (before.is_quiet and after.is_quiet):
            if even_if_noisy:
                report.environment["state"] = "contended"
                rows = [replace(row, state="contended") for row in rows]
            else:
                when, found = ("before", before) if not before.is_quiet else ("after", after)
                rows = [failed(name, name, "product", "the group itself", f"{TOO_NOISY} {when} it: {found.describe()}")]
        report.environment["noise"][name] = {"before": before.to_json(), "after": after.to_json()}
        report.rows.extend(rows)
        if done is not None:
            done(report)
    return report


def was_refused(row: Row) -> bool:
    """Whether a row stands for a group that was measured in noise."""
    return row.failed is not None and row.failed.startswith(TOO_NOISY)
