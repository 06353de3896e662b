"""libsrc/third_party.toml against what the linker kept and against every word about licences in the engine's source.

A new pin that brings somebody else's work, or a change that links what was dropped before, fails here until the table says so.
"""
from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path
from typing import Any

import llama_source
import pytest
import third_party

ROOT = Path(__file__).resolve().parents[2]
TABLE = tomllib.loads(third_party.TABLE.read_text(encoding="utf-8"))
WORDS = re.compile(r"copyright|SPDX-|public domain|\blicen[cs]e|\[MIT|adapted from|borrowed|\bport(ed)? (of|from)\b|copied from|taken from|stolen", re.IGNORECASE)
# What of the tree is compiled on CPU: other backends are not, and of ggml-cpu only the processor's own folder.
COMPILED = ("common/**", "src/**", "include/**", "tools/mtmd/*", "tools/mtmd/models/**", "vendor/**", "ggml/include/ggml*.h", "ggml/src/*", "ggml/src/ggml-cpu/**")
NOT_COMPILED = ("ggml/src/ggml-cpu/arch/[!x]*", "ggml/src/ggml-cpu/spacemit/*", "ggml/include/ggml-cann.h", "ggml/include/ggml-sycl.h", "*.txt", "*.md", "*/LICENSE*")


def matches(name: str, patterns: tuple[str, ...] | list[str]) -> bool:
    """``*`` within a folder and ``**`` below it; a pattern without a slash is for the name alone."""
    for pattern in patterns:
        if "**" in pattern or "/" not in pattern or pattern.startswith("*/"):
            if fnmatch.fnmatch(name, pattern.replace("**", "*")):
                return True
        elif fnmatch.fnmatch(name, pattern) and name.count("/") == pattern.count("/"):
            return True
    return False


@pytest.fixture(scope="module")
def sections() -> set[str]:
    """Names of the sections with code or data that are in the library."""
    path = ROOT / "build" / "native" / "libpylloyal.map"
    assert path.is_file(), "the linker leaves its map beside the library: python tools/build_lib.py native"
    text = path.read_text(encoding="utf-8", errors="replace")
    kept = text[text.index("Linker script and memory map"):]
    return {match[1] for match in re.finditer(r"^ (\.(?:text|rodata|data|bss|tdata|tbss)\.\S+)\s+0x0*[1-9a-f][0-9a-f]*\s+0x0*[1-9a-f][0-9a-f]*\s\S", kept, re.MULTILINE)}


def rows(kind: str) -> Any:
    return pytest.mark.parametrize("row", TABLE[kind], ids=lambda row: row["name"])


def test_the_map_is_read(sections: set[str]) -> None:
    assert len(sections) > 5000
    assert any("pyl_store_open" in name or "pyl_model_open" in name for name in sections)


@rows("component")
def test_what_the_table_has_is_linked(row: dict[str, Any], sections: set[str]) -> None:
    assert [name for name in sections if re.search(row["linked"], name)], "nothing of it is in the library: it belongs under [[absent]]"


@rows("absent")
def test_what_the_table_leaves_out_is_not_linked(row: dict[str, Any], sections: set[str]) -> None:
    assert [name for name in sections if re.search(row["sections"], name)] == [], "this is in the library now: it belongs under [[component]], with its licence"


def test_every_archive_has_its_row() -> None:
    """Archives of the engine's build, and files of vendor/: a new one is somebody's work."""
    text = (ROOT / "build" / "native" / "libpylloyal.map").read_text(encoding="utf-8", errors="replace")
    archives = {Path(name).name for name in re.findall(r"^LOAD (\S+\.a)$", text, re.MULTILINE) if "/lib/lib" in name and ("ggml" in name or "engine" in name)}
    assert archives == {"libcpp-httplib.a", "libggml-base.a", "libggml-cpu.a", "libggml.a", "libllama-common-base.a", "libllama-common.a", "libllama.a", "libmtmd.a", "libvendor-hash.a"}
    source = llama_source.find_source()
    known = [pattern for row in (*TABLE["component"], *TABLE["absent"]) for pattern in row["files"]]
    strange = [path.relative_to(source).as_posix() for path in (source / "vendor").rglob("*") if path.suffix in (".h", ".hpp", ".c", ".cpp")]
    assert [name for name in strange if not matches(name, [pattern for pattern in known if pattern.startswith("vendor/")])] == []


def test_every_word_about_licences_is_accounted_for() -> None:
    """Each line of compiled source that speaks of a licence or a borrowing is in a file of a row, or is named as harmless."""
    source = llama_source.find_source()
    own = {"llama.cpp", "ggml"}  # their rows cover whole folders, and would hide everything
    known = [pattern for row in (*TABLE["component"], *TABLE["absent"]) if row["name"] not in own for pattern in row["files"]]
    harmless = {(row["file"], row["words"]) for row in TABLE["harmless"]}
    used, strange, n_files = set(), [], 0
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if not path.is_file() or not matches(name, COMPILED) or matches(name, NOT_COMPILED):
            continue
        n_files += 1
        if matches(name, known):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if WORDS.search(line):
                excuse = {(file, words) for file, words in harmless if file == name and words in line}
                used |= excuse
                if not excuse:
                    strange.append(f"{name}:{number}: {line.strip()[:150]}")
    assert n_files > 400
    assert not strange, "\n".join(strange)
    assert used == harmless, "an excuse that excuses nothing"


def test_lines_the_table_rests_on_are_still_there() -> None:
    """Files of a row may hold more than the row says; what it was written for must be where it was."""
    source = llama_source.find_source()
    for row in TABLE["component"]:
        for file, words in row.get("evidence", {}).items():
            assert words in (source / file).read_text(encoding="utf-8", errors="replace"), f"{row['name']}: {file} no longer says {words!r}"
    assert sum(len(row.get("evidence", {})) for row in TABLE["component"]) >= 8
