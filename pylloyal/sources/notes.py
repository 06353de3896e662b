"""Text with moments: SubRip, WebVTT, or JSON, told by content."""
from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path

from .. import errors

_STAMP = r"(?:(\d{1,6}):)?(\d{1,2}):(\d{2})[.,](\d{1,3})"
_CUE = re.compile(rf"^\s*{_STAMP}\s*-->\s*{_STAMP}")
_TAG = re.compile(r"</?[A-Za-z][^<>]*>|<\d[\d:.]*>")  # markup; not "5 < 6"


def read_notes(path: str | os.PathLike[str]) -> list[tuple[float, str]]:
    """(seconds, text) pairs in time order: the cues of a subtitle file, or JSON ``[[seconds, text], ...]`` or ``[{"time", "text"}, ...]``.

    Raises
    ------
    MediaDecodeError
        It is none of these; the message names the file and the line.
    OSError
        It cannot be read.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise errors.MediaDecodeError(f"{name}: not UTF-8 text at byte {error.start}") from error
    notes = _json(text, name) if text.lstrip().startswith(("[", "{")) else _cues(text, name)
    return sorted(notes, key=lambda note: note[0])


def _json(text: str, name: str) -> list[tuple[float, str]]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.MediaDecodeError(f"{name}: {error}") from error
    out = []
    for i, row in enumerate(rows if isinstance(rows, list) else [rows]):
        at, said = (row.get("time"), row.get("text")) if isinstance(row, dict) else row if isinstance(row, list) and len(row) == 2 else (None, None)
        if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e9 or not isinstance(said, str):
            raise errors.MediaDecodeError(f'{name}: note {i} is neither [seconds, text] nor {{"time": seconds, "text": text}}')
        out.append((float(at), said))
    return out


def _cues(text: str, name: str) -> list[tuple[float, str]]:
    out = []
    is_vtt = text.lstrip().startswith("WEBVTT")
    for block in re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n").replace("\r", "\n")):
        lines = block.strip("\n").split("\n")
        cue = next((i for i, line in enumerate(lines) if "-->" in line), None)
        if cue is None:
            continue  # a header, a comment, a style
        found = _CUE.match(lines[cue])
        if not found:
            raise errors.MediaDecodeError(f"{name}: no times in {lines[cue]!r}")
        hours, minutes, seconds, part = found.group(1, 2, 3, 4)
        said = " ".join(_TAG.sub("", line).strip() for line in lines[cue + 1 :])
        said = html.unescape(said) if is_vtt else said
        if said.strip():
            out.append((int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds) + int(part.ljust(3, "0")) / 1000, said.strip()))
    if not out:
        raise errors.MediaDecodeError(f"{name}: no cues in it; SubRip, WebVTT and JSON are understood")
    return out
