"""A report as a table to read."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from .machine import is_same_engine
from .rows import Report, Row


def table(report: Report) -> str:
    """What it was measured on, then a block for each thing measured."""
    lines = list(_head(report.environment))
    for what, rows in groupby(report.rows, key=lambda row: (row.group, row.what)):
        lines += ["", f"{what[0]}: {what[1]}"]
        lines += [f"  {_line(row)}" for row in rows]
    promised = [row.is_kept for row in report.rows if row.is_kept is not None]
    n_failed = sum(row.failed is not None for row in report.rows)
    lines += ["", f"{len(report.rows)} rows; of {len(promised)} promises {sum(promised)} kept; {n_failed} failed"]
    return "\n".join(lines) + "\n"


def progress(row: Row) -> str:
    """That a row is there, without its figures: they may yet turn out to be noise."""
    at = "" if row.x is None else f" at {row.x:g}"
    return f"{row.group}: {row.what}{at}: {row.label}, {row.path}: " + ("measured" if row.failed is None else f"FAILED: {row.failed}")


def number(value: float) -> str:
    """Three digits that mean something."""
    if value == 0:
        return "0"
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.2g}"


def _line(row: Row) -> str:
    at = "" if row.x is None else f"{row.x:>6,.0f}  "
    if row.failed is not None:
        return f"{at}{row.label:<8} {row.path}: FAILED: {row.failed}" + (f" ({row.note})" if row.note else "")
    spread = f" [{number(row.low or 0)}..{number(row.high or 0)}]" if row.n > 1 else ""
    ratio = "" if row.ratio is None else f"ratio {row.ratio:.3f}" + (f" [{row.ratio_low:.3f}..{row.ratio_high:.3f}]" if row.n > 1 else "")
    kept = "" if row.bound is None else f"promised {row.bound:g}: " + {True: "kept", False: "NOT KEPT", None: "nothing to hold it against"}[row.is_kept]
    words = "; ".join(filter(None, (row.note, "contended" if row.state == "contended" else "")))
    parts = (f"{number(row.median or 0)} {row.unit}{spread}", ratio, kept, f"{row.path}, n {row.n}", f"({words})" if words else "")
    return f"{at}{row.label:<8} " + "  ".join(part for part in parts if part)


def _head(facts: dict[str, Any]) -> Iterator[str]:
    model = facts["model"]
    yield f"{model['name']}" + (f" ({model['architecture']}, {model['bytes']:,} bytes, header sha256 {model['header_sha256'][:16]})" if "header_sha256" in model else "")
    yield f"{facts['cpu']}, {facts['n_threads']} threads on {facts['usable_cores']} usable cores, {facts['system']}, Python {facts['python']}"
    yield f"pylloyal {facts['pylloyal']}, engine {facts['engine_commit']}, built {facts['preset']}, {facts['threads']} threads, {facts['attention']} attention, flash attention {facts['flash_attn']}"
    yield f"compiled for: {' '.join(facts['cpu_features']) or 'any CPU'}"
    if not is_same_engine(facts):
        yield f"THE CONTROL IS ANOTHER ENGINE, or built otherwise: {', '.join(f'{key} {value}' for key, value in facts['control'].items())}"
    yield f"the machine was {facts['state']}" + (", and this was a quick run: its figures mean nothing" if facts["is_quick"] else "")
    noises = [noise for around in facts["noise"].values() for noise in around.values()]
    if noises:
        steal = max((noise["steal"] for noise in noises if noise["steal"] is not None), default=None)
        yield (f"noise before and after each group, the worst of {len(noises)}: spread {max(noise['spread'] for noise in noises):.2f}, waited {max(noise['waited'] for noise in noises):.1%}"
               + ("" if steal is None else f", {steal:.1%} stolen"))
