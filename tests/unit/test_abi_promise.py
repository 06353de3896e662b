"""What pylloyal.h promised in its frozen copy still holds; and what breaks a promise is noticed, what keeps it is not."""
from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import abi_ages  # noqa: E402
import gen_capi  # noqa: E402

NOW = gen_capi.HEADER.read_text(encoding="utf-8")


def edited(pattern: str, by: str) -> str:
    text, n = re.subn(pattern, by, NOW, count=1, flags=re.M)
    assert n == 1, pattern
    return text


def test_header_keeps_the_promise() -> None:
    assert abi_ages.main(["--check"]) == 0


@pytest.mark.parametrize(("pattern", "by", "named"), [
    (r"^PYL_API int32_t pyl_log_level\(.*?\);", "", "pyl_log_level was"),
    (r"(pyl_log_level\(int32_t level)\)", r"\1, uint32_t flags)", "pyl_log_level was"),
    (r"pyl_log_level\(int32_t level\)", "pyl_log_level(int64_t level)", "pyl_log_level was"),
    (r"^PYL_API int32_t pyl_log_level", "PYL_API uint32_t pyl_log_level", "pyl_log_level was"),
    (r"^#define PYL_E_MEDIA \(-23\)", "#define PYL_E_MEDIA (-24)", "PYL_E_MEDIA was -23 and is -24"),
    (r"^#define PYL_E_MEDIA .*$", "", "PYL_E_MEDIA was -23 and is gone"),
    (r"^typedef struct pyl_embedder pyl_embedder;", "", "pyl_embedder is gone"),
    (r"^    int32_t use_mmap;", "    int32_t added;\n    int32_t use_mmap;", "pyl_model_params.use_mmap was"),
    (r"^    int32_t vocab_only;", "    int64_t vocab_only;", "pyl_model_params.vocab_only was int32_t"),
    (r"^    int32_t vocab_only;.*$", "", "pyl_model_params.vocab_only was int32_t, and there is nothing"),
    (r"^    float top_p;(.*)\n    float min_p;", r"    float min_p;\1\n    float top_p;", "pyl_sampling.top_p was"),
    (r"^typedef struct pyl_quote \{[^}]*\} pyl_quote;", "", "pyl_quote is gone"),
    (r"^#define PYL_ABI_VERSION 1", "#define PYL_ABI_VERSION 0", "goes back"),
])
def test_what_breaks_it_is_noticed(pattern: str, by: str, named: str) -> None:
    if "pyl_embedder pyl_embedder" in pattern or "pyl_quote" in pattern:  # what uses them goes as well
        text = re.sub(r"^PYL_API [^;]*(?:pyl_embedder|pyl_quote) \*[^;]*;", "", edited(pattern, by), flags=re.M)
    else:
        text = edited(pattern, by)
    assert any(named in problem for problem in abi_ages.problems(NOW, text)), abi_ages.problems(NOW, text)


@pytest.mark.parametrize(("pattern", "by"), [
    (r"^(PYL_API int32_t pyl_log_level)", r"PYL_API int32_t pyl_more(int32_t level);\n\1"),
    (r"(pyl_log_level\(int32_t) level\)", r"\1 threshold)"),
    (r"^(#define PYL_E_MEDIA .*)$", r"\1\n#define PYL_E_MORE (-99)"),
    (r"^(    int32_t vocab_only;.*)$", r"\1\n    uint64_t added;"),
    (r"^#define PYL_ABI_VERSION 1", "#define PYL_ABI_VERSION 2"),
])
def test_what_keeps_it_passes(pattern: str, by: str) -> None:
    assert abi_ages.problems(NOW, edited(pattern, by)) == []


def test_a_new_number_may_break_everything() -> None:
    assert abi_ages.problems(NOW, re.sub(r"^PYL_API int32_t pyl_log_level\(.*?\);", "", edited(r"^#define PYL_ABI_VERSION 1", "#define PYL_ABI_VERSION 2"), flags=re.M)) == []


def test_headers_of_other_days_differ_in_every_struct_and_nothing_else() -> None:
    """What libsrc/tests/test_ages.c is compiled with."""
    now = gen_capi.parse(NOW)
    older, newer = gen_capi.parse(abi_ages.older(NOW)), gen_capi.parse(abi_ages.newer(NOW))
    sizes = [(a.layout()[0], b.layout()[0], c.layout()[0]) for a, b, c in zip(older.structs, now.structs, newer.structs, strict=True)]
    assert len(sizes) > 15
    assert all(a < b < c for a, b, c in sizes)
    assert abi_ages.problems(abi_ages.older(NOW), NOW) == []
    assert abi_ages.problems(NOW, abi_ages.newer(NOW)) == []
    assert [f.prototype for f in older.functions] == [f.prototype for f in now.functions] == [f.prototype for f in newer.functions]


def test_structs_that_declare_several_fields_in_a_line_are_cut_within_it() -> None:
    text = re.sub(r"^(typedef struct pyl_quote \{\n)[^}]*\}", r"\1    uint32_t struct_size;\n    int32_t bos, eos, /* one */ pad; /* two */\n}", NOW, flags=re.M)
    quote = next(s for s in gen_capi.parse(abi_ages.older(text)).structs if s.name == "pyl_quote")
    assert [name for name, _ in quote.fields] == ["struct_size", "bos", "eos"]
