"""Flash attention on and off, for many rows over one prefix: what the choice of a store's ``flash_attn`` costs or saves on this machine."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .pairs import Side, compare
from .rows import Row
from .setting import Setting
from .sides import Sides, both

GROUP = "attention"


def rows(setting: Setting) -> Iterator[Row]:
    n_steps, skip = setting.times(12, 2), setting.times(2, 1)
    with contextlib.ExitStack() as stack:
        def sides_of(flash_attn: str, **options: Any) -> Sides:
            return stack.enter_context(both(replace(setting, control=None, flash_attn=flash_attn), **options))

        for n_cells in (setting.times(512, 16), setting.times(2048, 64)):
            options: dict[str, Any] = {"n_ctx": n_cells + 32 * (n_steps + skip + 1), "n_branches": 33}
            off, on = sides_of("off", **options), sides_of("on", **options)

            def compared(what: str, unit: str, pick: Any, off: Sides = off, on: Sides = on, **work: Any) -> Iterator[Row]:
                def side(sides: Sides, flash: str) -> Side:
                    return sides.product(f"Store, flash_attn={flash}", pick, **work)

                yield from compare(GROUP, what, unit, side(off, "False"), [side(on, "True")], setting.times(3, 2))

            prefix = setting.tokens[:n_cells]
            for n in (1, 8, 32):
                work: dict[str, Any] = {"prefix": prefix, "n_branches": n, "n_steps": n_steps, "skip": skip, "mode": "greedy"}
                yield from compared(f"tick of {n}, {n_cells:,} cells full", "ms", lambda answer: float(answer["seconds"]) / n_steps * 1e3, op="ticks", **work)
            yield from compared(f"reading {n_cells:,} tokens", "s", lambda answer: float(answer["prefill_s"]), op="document", document=prefix, questions=[prefix[:1]], n_tokens=1)
