"""A plan as a picture: each device's ledger as a bar, and what fits by context and type of the cells."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..capacity.plan import Plan

WIDTH: Final = 960
MARGIN: Final = 24
LINE: Final = 18
COLOURS: Final = {"weights": "#4c72b0", "kv": "#dd8452", "recurrent": "#c44e52", "compute": "#8172b3", "output": "#937860", "projector": "#da8bc3",
                  "used by others": "#8c8c8c", "reserve": "#b8b8b8", "headroom": "#d5d5d5", "left over": "#ffffff"}


def draw(made: Plan, rows: list[dict[str, Any]]) -> Image:
    """The picture, in RGB."""
    from PIL import Image, ImageDraw, ImageFont

    from ..capacity.sizes import format_bytes

    devices = [(budget, [line for line in made.ledger if line.device == budget.device and line.bytes > 0]) for budget in made.budgets if budget.is_known]
    height = 2 * MARGIN + 3 * LINE + sum(4 * LINE + LINE * len(lines) for _, lines in devices) + (LINE * (len(rows) + 3) if rows else 0)
    picture = Image.new("RGB", (WIDTH, height), "white")
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    y = MARGIN
    pen.text((MARGIN, y), f"{made.model}: {made.verdict}, {made.n_ctx:,} tokens, {made.settings.n_branches} branches", "black", font)
    y += 2 * LINE
    for budget, lines in devices:
        total = budget.total if budget.total is not None else budget.free or 1
        whole = max(total, sum(line.bytes for line in lines), 1)
        pen.text((MARGIN, y), f"{budget.name}: {format_bytes(total)}", "black", font)
        y += LINE
        x, room = MARGIN, WIDTH - 2 * MARGIN
        passed = 0
        for line in lines:
            passed += line.bytes
            end = MARGIN + passed * room // whole
            pen.rectangle((x, y, max(x, end), y + LINE), COLOURS.get(line.kind, COLOURS.get(line.name, "#eeeeee")), "#404040")
            x = end
        edge = MARGIN + min(total, whole) * room // whole
        pen.line((edge, y - 4, edge, y + LINE + 4), "red", 2)  # the end of the device: what is right of it does not fit
        y += 2 * LINE
        for line in lines:
            pen.rectangle((MARGIN, y + 3, MARGIN + 10, y + 13), COLOURS.get(line.kind, COLOURS.get(line.name, "#eeeeee")), "#404040")
            pen.text((MARGIN + 18, y), f"{line.name}: {format_bytes(line.bytes)} ({line.known})", "black", font)
            y += LINE
        y += LINE
    if rows:
        pen.text((MARGIN, y), "everything together, by context and type of the cells (red does not fit)", "black", font)
        y += LINE
        step = (WIDTH - 2 * MARGIN - 60) // max(1, len(rows[0]["contexts"]))
        for i, cell in enumerate(rows[0]["contexts"]):
            pen.text((MARGIN + 60 + i * step, y), f"{cell['context']:,}", "#606060", font)
        for row in rows:
            y += LINE
            pen.text((MARGIN, y), row["kv"], "black", font)
            for i, cell in enumerate(row["contexts"]):
                pen.text((MARGIN + 60 + i * step, y), format_bytes(cell["bytes"]), "black" if cell["fits"] else "red", font)
    return picture
