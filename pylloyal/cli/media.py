"""Look at pictures and clips as a model would be shown them: size, orientation, frames and their times, and with a projector the cells
they take. No model is run.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .commands import UsageError
from .interrupts import Interrupts
from .terminal import plural

if TYPE_CHECKING:
    from ..sources.image import Image
    from ..sources.video import Video


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="F", nargs="+", help="pictures, clips and animations, told by content")
    parser.add_argument("--as", dest="kind", choices=["auto", "image", "video"], default="auto", help="take animations as a picture, or as a clip (default: a clip when there is more than one frame)")
    add_clip_arguments(parser)
    parser.add_argument("--model", metavar="MODEL", help="with --mmproj: count cells for this model")
    parser.add_argument("--mmproj", metavar="P", help="the projector that would encode them")
    parser.add_argument("--sheet", metavar="PNG", help="write all pictures and frames side by side")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_clip_arguments(parser: argparse.ArgumentParser) -> None:
    """What is looked at of a clip."""
    parser.add_argument("--fps", metavar="N", type=float, default=2.0, help="moments of a clip to look at in a second (default: %(default)s)")
    parser.add_argument("--max-frames", metavar="N", type=int, default=64, help="thin out to this many frames of a clip (default: %(default)s)")
    parser.add_argument("--start", metavar="S", type=float, default=0.0, help="look at a clip from this second on")
    parser.add_argument("--end", metavar="S", type=float, help="look at a clip up to this second")
    parser.add_argument("--notes", metavar="F", help="text with moments that belongs to the clip: SubRip, WebVTT or JSON")


def clip_options(args: argparse.Namespace) -> dict[str, Any]:
    from ..sources.notes import read_notes

    return {"fps": args.fps, "max_frames": args.max_frames, "start": args.start, "end": args.end, "notes": read_notes(args.notes) if args.notes else []}


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Open each, and tell."""
    if (args.model is None) != (args.mmproj is None):
        raise UsageError("--model and --mmproj go together")
    media = []
    for path in args.files:
        interrupts.check()
        media.append(_open(path, args))
    told = [{"kind": "video" if hasattr(one, "frames") else "image", **dataclasses.asdict(one.report)} for one in media]
    if args.mmproj is not None:
        _count(args, media, told)
    if args.sheet:
        from ..sources.sheet import contact_sheet

        contact_sheet([picture for one in media for picture in pictures(one)]).save(args.sheet, "PNG")
    if args.json:
        sys.stdout.write(json.dumps({"media": told, "sheet": args.sheet}, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(line for one in told for line in _lines(one)) + "\n" + (f"contact sheet: {args.sheet}\n" if args.sheet else ""))
    return 0


def pictures(one: Image | Video) -> list[tuple[str, Any]]:
    """What a model is shown, with a label for each."""
    from ..sources.video import Video

    return [(f"{f.time:.3f} s", f.pixels) for f in one.frames] if isinstance(one, Video) else [(one.report.name.rsplit("/", 1)[-1], one.pixels)]


def _open(path: str, args: argparse.Namespace) -> Image | Video:
    from ..sources.image import Image, is_picture
    from ..sources.video import Video

    is_clip = args.kind == "video" or (args.kind == "auto" and (is_picture(path, animated=True) or not is_picture(path)))
    return Video(path, **clip_options(args)) if is_clip else Image(path)


def _count(args: argparse.Namespace, media: Sequence[Image | Video], told: list[dict[str, Any]]) -> None:
    from ..kernel.model import Model
    from ..sources.prompt import Prompt

    with Model(args.model) as model, model.projector(args.mmproj) as projector:
        for one, facts in zip(media, told, strict=True):
            with Prompt(projector, [one], add_special=False) as prompt:
                quote = prompt.quote()
                n_pairs = sum(segment["n_parts"] == 2 for segment in prompt.segments())
            facts.update(cells=quote.n_cells, positions=quote.n_pos, slack=quote.slack, segments=quote.n_segments, rows_blocks=quote.n_media, max_rows=quote.max_rows, pairs=n_pairs)


def _lines(one: dict[str, Any]) -> list[str]:
    stored, size = "x".join(map(str, one["stored_size"])), "x".join(map(str, one["size"]))
    lines = [one["name"]]
    if one["kind"] == "image":
        lines.append(f"  {one['format'] or 'pixels'}, mode {one['mode']}, {stored}" + (f", orientation {one['orientation']} applied: {size}" if one["orientation"] != 1 else ""))
        if one["has_alpha"]:
            lines.append(f"  transparency laid on {one['background']}")
        if one["profile"]:
            lines.append(f"  colours converted from {one['profile']!r} to sRGB")
        if one["n_frames"] > 1:
            lines.append(f"  frame {one['frame']} of {one['n_frames']}")
    else:
        lines.append(f"  {one['container']}, {one['codec']}, {stored}" + (f", rotated by {one['rotation']} degrees: {size}" if one["rotation"] else ""))
        lines.append(f"  {plural(one['n_frames'], 'frame')} in {one['length_s']:.2f} s by their own times"
                     + (f"; its clock begins at {one['origin_s']:.3f} s" if one["origin_s"] else "")
                     + (f"; the header says {one['declared_s']:.2f} s" if one["declared_s"] is not None and abs(one["declared_s"] - one["length_s"]) > 0.5 else ""))
        lines.append(f"  {plural(len(one['times_s']), 'frame')} fed, at " + ", ".join(f"{t:.2f}" for t in one["times_s"][:12]) + (", ..." if len(one["times_s"]) > 12 else "") + " s")
        for count, what in ((one["n_beyond"], "asked for beyond the end"), (one["n_thinned"], "thinned out"), (one["n_missing"], "damaged")):
            if count:
                lines.append(f"  {plural(count, 'frame')} {what}")
    lines += [f"  note: {note}" for note in one["notes"]]
    if "cells" in one:
        lines.append(f"  {plural(one['cells'], 'cell')}, {plural(one['positions'], 'position')} (slack {one['slack']}), {plural(one['rows_blocks'], 'block')} of rows"
                     + (f", {plural(one['pairs'], 'pair')} of frames fused" if one["pairs"] else ""))
    return lines
