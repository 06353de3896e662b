"""A report as a picture, in SVG: ratios with their quartiles and promises, then curves of the product beside the control."""
from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from xml.sax.saxutils import escape

from .rows import Report, Row
from .table import number

WIDTH, MARGIN, LINE = 1000, 24, 20
LABELS, PLOT = 560, 300  # columns: what, and where ratios are drawn
PANEL = 240
COLOURS = {"product": "#4c72b0", "control": "#8c8c8c", "peer": "#dd8452", "micro": "#55a868"}


def picture(report: Report) -> str:
    """An SVG document."""
    facts = report.environment
    out = [text(MARGIN, MARGIN + 6, f"{facts['model']['name']}: {facts['cpu']}, {facts['n_threads']} threads, engine {facts['engine_commit'][:12]}, {facts['state']}", weight="bold")]
    ratios = [row for row in report.rows if row.x is None and (row.ratio is not None or row.failed is not None)]
    y: float = MARGIN + 2 * LINE
    for group, found in groupby(ratios, key=lambda row: row.group):
        y = _ratios(out, group, list(found), y) + LINE
    for what, rows in _curves(report.rows):
        y = _panel(out, what, rows, y + LINE)
    body = "\n".join(out)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + MARGIN:g}" viewBox="0 0 {WIDTH} {y + MARGIN:g}" font-family="sans-serif" font-size="12">\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n')


def text(x: float, y: float, words: str, *, anchor: str = "start", fill: str = "black", weight: str = "normal") -> str:
    """A line of text, its words escaped."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">{escape(words)}</text>'


def _ratios(out: list[str], group: str, rows: list[Row], y: float) -> float:
    """A line each: the median's dot on its quartiles' bar, on the group's own scale of logarithms, with a tick where the promise is."""
    figures = [v for row in rows for v in (row.ratio_low, row.ratio, row.ratio_high, row.bound if row.bound_on == "ratio" else None, 1.0) if v is not None and v > 0]
    low, high = math.log(min(figures)) - 0.05, math.log(max(figures)) + 0.05

    def at(ratio: float) -> float:
        place = (math.log(ratio) - low) / (high - low) if ratio > 0 else 0.0  # a slope may fall where the other rises: the left end
        return LABELS + PLOT * min(1.0, max(0.0, place))

    top = y
    out += [text(MARGIN, y, group, weight="bold"), text(LABELS, y, "ratio (left is better; line: 1; mark: promised)", fill="#404040")]
    for row in rows:
        y += LINE
        out.append(text(LABELS - 12, y + 4, shortened(f"{row.what}: {row.path}", 78), anchor="end"))
        if row.failed is not None or row.ratio is None or row.ratio_low is None or row.ratio_high is None:
            out.append(text(LABELS, y + 4, shortened(f"failed: {row.failed}", 60), fill="#c44e52"))
            continue
        colour = COLOURS[row.label]
        out.append(f'<rect x="{at(row.ratio_low):.1f}" y="{y - 3:g}" width="{max(1.0, at(row.ratio_high) - at(row.ratio_low)):.1f}" height="6" fill="{colour}" fill-opacity="0.45"/>')
        out.append(f'<circle cx="{at(row.ratio):.1f}" cy="{y:g}" r="4" fill="{colour}"/>')
        if row.bound is not None and row.bound_on == "ratio":
            out.append(f'<line x1="{at(row.bound):.1f}" y1="{y - 8:g}" x2="{at(row.bound):.1f}" y2="{y + 8:g}" stroke="#c44e52" stroke-width="2"/>')
        kept = row.is_kept if row.bound_on == "ratio" else None  # another promise is not about what is drawn
        out.append(text(LABELS + PLOT + 12, y + 4, f"{row.ratio:.3f}" + {True: " kept", False: " NOT KEPT", None: ""}[kept], fill="#c44e52" if kept is False else "black"))
    out.append(f'<line x1="{at(1):.1f}" y1="{top + 6:g}" x2="{at(1):.1f}" y2="{y + 10:g}" stroke="#404040" stroke-dasharray="3 3"/>')
    return y + LINE


def _curves(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    points = [row for row in rows if row.x is not None and row.median is not None]
    return [(what, list(found)) for what, found in groupby(points, key=lambda row: row.what)]


def _panel(out: list[str], what: str, rows: list[Row], y: float) -> float:
    """Medians with their quartiles over x, a line for each label; both axes begin at 0, so that slopes can be seen."""
    left, width, height = MARGIN + 60, WIDTH - 2 * MARGIN - 200, PANEL - 3 * LINE
    x_most, y_most = max(row.x or 0 for row in rows) or 1, max(row.high or 0 for row in rows) or 1
    top = y + LINE
    bottom = top + height

    def at(x: float, value: float) -> tuple[float, float]:
        return left + width * x / x_most, bottom - height * value / y_most

    out.append(text(MARGIN, y + 4, what, weight="bold"))
    out.append(f'<path d="M{left:g} {top:g}V{bottom:g}H{left + width:g}" fill="none" stroke="#404040"/>')
    out += [text(left - 6, top + 8, f"{number(y_most)} {rows[0].unit}", anchor="end"), text(left - 6, bottom, "0", anchor="end")]
    out += [text(at(x, 0)[0], bottom + 16, f"{x:,.0f}", anchor="middle") for x in sorted({row.x for row in rows if row.x is not None})]
    for i, label in enumerate(dict.fromkeys(row.label for row in rows)):
        series, colour = [row for row in rows if row.label == label], COLOURS[label]
        points = [at(row.x or 0, row.median or 0) for row in series]
        out.append(f'<polyline points="{" ".join(f"{px:.1f},{py:.1f}" for px, py in points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for row, (px, _) in zip(series, points, strict=True):
            out.append(f'<line x1="{px:.1f}" y1="{at(0, row.low or 0)[1]:.1f}" x2="{px:.1f}" y2="{at(0, row.high or 0)[1]:.1f}" stroke="{colour}"/>')
        out.append(text(left + width + 12, top + 12 + LINE * i, label, fill=colour))
    return bottom + LINE


def shortened(words: str, n: int) -> str:
    """At most n characters."""
    return words if len(words) <= n else words[: n - 1] + "…"
