"""Texts with moments: SubRip, WebVTT and JSON, and what is wrong with broken ones."""
from __future__ import annotations

from pathlib import Path

import pytest

from pylloyal import errors
from pylloyal.sources.notes import read_notes

SRT = """1
00:00:01,500 --> 00:00:03,000
Hello <i>there</i>,
second line.

2
01:02:03,004 --> 01:02:04,000
{later} 5 < 6 and 7 > 3

3
00:00:00,000 --> 00:00:01,000

"""
VTT = """WEBVTT - a title

NOTE
a comment

STYLE
::cue { color: red }

intro
00:01.250 --> 00:02.000 align:start position:0%
<v Mary>fish &amp; <c.loud>chips</c> <00:01.500>now &lt;b&gt;

01:00:00.000 --> 01:00:01.000
an hour in
"""


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "notes.dat"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_subtitles_by_content(tmp_path: Path, ends: str, mark: bytes) -> None:
    srt = [(1.5, "Hello there, second line."), (3723.004, "{later} 5 < 6 and 7 > 3")]
    assert read_notes(written(tmp_path, mark + SRT.replace("\n", ends).encode())) == srt
    vtt = [(1.25, "fish & chips now <b>"), (3600.0, "an hour in")]
    assert read_notes(written(tmp_path, mark + VTT.replace("\n", ends).encode())) == vtt


def test_json_in_both_shapes_is_put_in_order(tmp_path: Path) -> None:
    assert read_notes(written(tmp_path, '[[2, "b"], [1.5, "a"], {"time": 0, "text": "<|im_end|>", "who": 1}]')) == [(0.0, "<|im_end|>"), (1.5, "a"), (2.0, "b")]
    assert read_notes(written(tmp_path, ' {"time": 3, "text": "one"}')) == [(3.0, "one")]
    assert read_notes(written(tmp_path, "[]")) == []


@pytest.mark.parametrize(("text", "why"), [
    ('[[1, "a"]', "line 1"), ('[["1", "a"]]', "note 0"), ('[[1, "a"], [true, "b"]]', "note 1"), ('[[NaN, "a"]]', "note 0"), ('[[-1, "a"]]', "note 0"), ("[[1e300, \"a\"]]", "note 0"),
    ('[[1, 2]]', "note 0"), ("[1]", "note 0"), ('[[1, "a", 3]]', "note 0"), ('{"time": 1}', "note 0"), ("[" * 100_000, ""), ("", "no cues"), ("just text\n\nmore", "no cues"), ("WEBVTT\n", "no cues"),
    ("1\n00:00 --> bad\nx", "no times in '00:00 --> bad'"), ("1\n" + "9" * 5000 + ":00:01,0 --> 00:00:02,0\nx", "no times"), (b"\xff\xfe1\x00", "not UTF-8 text at byte 0"),
    ("[[" + "9" * 5000 + ', "a"]]', "")])
def test_broken_notes_name_the_file(tmp_path: Path, text: str | bytes, why: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(errors.MediaDecodeError) as caught:
        read_notes(path)
    assert str(path) in str(caught.value)
    assert why in str(caught.value)


def test_notes_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        read_notes(tmp_path / "absent.srt")
