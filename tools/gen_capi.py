"""Generate everything that must agree with ``pylloyal.h``: the ctypes table, the layout checks, the exports, the reference.

    python tools/gen_capi.py            write the four files
    python tools/gen_capi.py --check    exit 1 if any of them differs from what the header says

The header is written in a narrow style (fixed-width scalars and pointers, one declaration a statement), so a small parser of
our own reads it; anything it does not understand is an error, never skipped.
"""
from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "libsrc" / "include" / "pylloyal.h"
SCALARS = {"uint8_t": ("c_uint8", 1), "int32_t": ("c_int32", 4), "uint32_t": ("c_uint32", 4), "int64_t": ("c_int64", 8), "uint64_t": ("c_uint64", 8), "size_t": ("c_size_t", 8),
           "float": ("c_float", 4), "double": ("c_double", 8), "pyl_branch": ("c_uint64", 8)}
POINTED = {"char": "c_char_p", **{name: f"POINTER({ctype})" for name, (ctype, _) in SCALARS.items()}}


class HeaderError(Exception):
    """A construct the generator does not know."""


@dataclass
class Function:
    name: str
    result: str
    params: list[tuple[str, str]]
    prototype: str
    comment: str = ""
    section: str = ""


@dataclass
class Struct:
    name: str
    fields: list[tuple[str, str]] = field(default_factory=list)
    comment: str = ""

    def layout(self) -> tuple[int, list[tuple[str, int, int]]]:
        """Size and (name, offset, size) of each field, on a 64-bit machine."""
        at, widest, rows = 0, 1, []
        for name, ctype in self.fields:
            size = 8 if ctype.endswith("*") else SCALARS[ctype][1]
            at = -(-at // size) * size
            rows.append((name, at, size))
            at, widest = at + size, max(widest, size)
        return -(-at // widest) * widest, rows


@dataclass
class Header:
    constants: list[tuple[str, int]]
    opaque: list[str]
    structs: list[Struct]
    functions: list[Function]


def normal_type(text: str) -> str:
    """``const char *  text`` without the name: ``const char*``."""
    return re.sub(r"\s*\*\s*", "*", " ".join(text.split()))


def split_declarator(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"(.*?[\s*])(\w+)", text.strip(), re.S)
    if not match:
        raise HeaderError(f"not a declaration: {text!r}")
    return normal_type(match[1]), match[2]


def comment_before(source: str, at: int) -> str:
    """The comment block that ends right before position ``at``, as plain lines."""
    match = re.search(r"/\*((?:(?!\*/).)*)\*/\s*$", source[:at], re.S)
    if not match:
        return ""
    lines = [re.sub(r"^\s*\* ?", "", line).rstrip() for line in match[1].strip().splitlines()]
    return "\n".join(lines)


def parse(source: str) -> Header:
    """Read the header. Raises HeaderError for anything outside its style."""
    bare = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), source, flags=re.S)  # same offsets, no comments
    constants = []
    for name, value in re.findall(r"^#[ \t]*define[ \t]+(PYL_\w+(?:\(.*?\))?)[ \t]*(.*?)[ \t]*$", bare, re.M):
        number = re.fullmatch(r"\((-[1-9]\d*)\)|(0|[1-9]\d*)u?", value)
        if number:
            constants.append((name, int(number[1] or number[2])))
        elif name not in ("PYL_API", "PYL_BUILD", "PYLLOYAL_H"):
            raise HeaderError(f"a constant is a decimal number, (-N), N or Nu: #define {name} {value}")
    opaque = re.findall(r"^typedef struct (\w+) \1;", bare, re.M)
    sections = [(m.start(), m[1]) for m in re.finditer(r"^/\* -+ (.+?) -+ \*/$", source, re.M)]
    structs = []
    for match in re.finditer(r"^typedef struct (\w+) \{(.*?)^\} \1;", bare, re.M | re.S):
        struct = Struct(match[1], comment=comment_before(source, match.start()))
        for statement in filter(None, (s.strip() for s in match[2].split(";"))):
            first, *more = [part.strip() for part in statement.split(",")]
            ctype, name = split_declarator(first)
            for field_name in [name, *more]:
                if not re.fullmatch(r"\w+", field_name) or not (ctype.endswith("*") or ctype in SCALARS):
                    raise HeaderError(f"{struct.name}: cannot read the field {statement!r}")
                struct.fields.append((field_name, ctype))
        if not struct.fields or struct.fields[0] != ("struct_size", "uint32_t"):
            raise HeaderError(f"{struct.name} does not begin with uint32_t struct_size")
        structs.append(struct)
    functions = []
    for match in re.finditer(r"^PYL_API (.*?);", bare, re.M | re.S):
        text = " ".join(match[1].split())
        head = re.fullmatch(r"(.*?[\s*])(pyl_\w+)\((.*)\)", text)
        if not head:
            raise HeaderError(f"not a function: {text!r}")
        params = [] if head[3] == "void" else [split_declarator(p) for p in head[3].split(",")]
        comment = comment_before(source, match.start())
        functions.append(Function(head[2], normal_type(head[1]), params, text + ";", comment, next((t for at, t in reversed(sections) if at < match.start()), "")))
    rest = re.sub(r"^#.*$", "", bare, flags=re.M).replace('extern "C" {', "").replace("typedef uint64_t pyl_branch;", "")
    for pattern in (r"^typedef struct (\w+) \1;", r"^typedef struct (\w+) \{.*?^\} \1;", r"^PYL_API .*?;"):
        rest = re.sub(pattern, "", rest, flags=re.M | re.S)
    if rest.strip() not in ("", "}"):
        raise HeaderError("not understood: " + " ".join(rest.split())[:200])
    return Header(constants, opaque, structs, functions)


def ctypes_of(ctype: str, header: Header) -> str:
    ctype = ctype.removeprefix("const ")
    if ctype in SCALARS:
        return SCALARS[ctype][0]
    if ctype == "void":
        return "None"
    base, stars = ctype.rstrip("*"), len(ctype) - len(ctype.rstrip("*"))
    if base in header.opaque:
        return f"{base}_p" if stars == 1 else f"POINTER({base}_p)"
    if base in {s.name for s in header.structs} and stars == 1:
        return f"POINTER({base})"
    if base in POINTED and stars == 1:
        return POINTED[base]
    raise HeaderError(f"no ctypes for {ctype!r}")


def is_checked(function: Function) -> bool:
    """True for functions whose int32_t is a status."""
    return function.result == "int32_t" and function.name != "pyl_abi_version"


def make_capi(h: Header) -> str:
    out = ['"""The ABI as ctypes: constants, structs, prototypes.', "", "GENERATED from libsrc/include/pylloyal.h by tools/gen_capi.py; do not edit.", '"""',
           "# ruff: noqa: F403, F405", "# fmt: off", "from ctypes import *", "from typing import Any, Final", ""]
    out += [f"{name.removeprefix('PYL_')}: Final = {value}" for name, value in h.constants]
    for name in h.opaque:
        out += ["", "", f"class {name}_p(c_void_p):", f'    """``{name} *``: opaque."""']
    for s in h.structs:
        out += ["", "", f"class {s.name}(Structure):", f'    """{s.comment.splitlines()[0] if s.comment else s.name}"""', "", "    _fields_ = ["]
        out += [f'        ("{name}", {ctypes_of(ctype, h)}),' for name, ctype in s.fields]
        out += ["    ]"]
    out += ["", "", "# name, result, arguments, whether the result is a status", "PROTOTYPES: Final[list[tuple[str, Any, list[Any], bool]]] = ["]
    for f in h.functions:
        args = ", ".join(ctypes_of(ctype, h) for ctype, _ in f.params)
        result = "c_void_p" if f.result == "const char*" else ctypes_of(f.result, h)  # c_char_p would copy, and stop at a NUL byte
        out.append(f'    ("{f.name}", {result}, [{args}], {is_checked(f)}),  # {f.prototype}')
    out += ["]", "", "STRUCTS: Final[list[type[Structure]]] = [" + ", ".join(s.name for s in h.structs) + "]", ""]
    return "\n".join(out)


def make_layout(h: Header) -> str:
    out = ["// GENERATED from pylloyal.h by tools/gen_capi.py; do not edit.", '#include "abi/layout.hpp"', "", "#include <cstddef>", "#include <cstdint>", "", '#include "pylloyal.h"', ""]
    out.append("#if UINTPTR_MAX == UINT64_MAX")
    for s in h.structs:
        size, rows = s.layout()
        out.append(f"static_assert(sizeof({s.name}) == {size});")
        out += [f"static_assert(offsetof({s.name}, {name}) == {at} && sizeof({s.name}::{name}) == {n});" for name, at, n in rows]
    out += ["#endif", "", "namespace pyl {", "", "std::string layout_json() {", '    std::string out = "{";', "    const auto field = [&](const char * name, size_t offset, size_t size, bool last) {",
            '        out += std::string("\\"") + name + "\\":[" + std::to_string(offset) + "," + std::to_string(size) + (last ? "]}}" : "],");', "    };"]
    for i, s in enumerate(h.structs):
        comma = "," if i else ""
        out.append(f'    out += "{comma}\\"{s.name}\\":{{\\"size\\":" + std::to_string(sizeof({s.name})) + ",\\"fields\\":{{";')
        out += [f'    field("{name}", offsetof({s.name}, {name}), sizeof({s.name}::{name}), {"true" if k + 1 == len(s.fields) else "false"});' for k, (name, _) in enumerate(s.fields)]
    out += ['    return out + "}";', "}", "", "}  // namespace pyl", ""]
    return "\n".join(out).replace('\\"fields\\":{{"', '\\"fields\\":{"')


def make_def(h: Header) -> str:
    return "; GENERATED from pylloyal.h by tools/gen_capi.py; do not edit.\nLIBRARY pylloyal\nEXPORTS\n" + "".join(f"    {f.name}\n" for f in h.functions)


def make_reference(h: Header) -> str:
    out = ["# The C ABI", "", "Generated from `libsrc/include/pylloyal.h` by `tools/gen_capi.py`; the header is the reference, this page makes it easy to read.", ""]
    intro = HEADER.read_text(encoding="utf-8").split("*/", 1)[0]
    lines = [re.sub(r"^\s*\* ?", "", line) for line in intro.splitlines()[1:]]
    out += ["```text", *[line for line in lines if "SPDX" not in line], "```"]
    section = None
    for f in h.functions:
        if f.section != section:
            section = f.section
            out += ["", f"## {section[0].upper()}{section[1:]}"]
        out += ["", f"### `{f.name}`", "", "```c", f.prototype, "```", "", "```text", f.comment, "```"]
    out += ["", "## Structs"]
    for s in h.structs:
        size, rows = s.layout()
        out += ["", f"### `{s.name}` ({size} bytes)", "", s.comment, "", "| field | type | offset |", "|---|---|---|"]
        out += [f"| `{name}` | `{ctype}` | {at} |" for (name, ctype), (_, at, _) in zip(s.fields, rows, strict=True)]
    return "\n".join(line.rstrip() for line in out) + "\n"


TARGETS = {ROOT / "pylloyal" / "_ffi" / "capi.py": make_capi, ROOT / "libsrc" / "src" / "abi" / "layout.cpp": make_layout,
           ROOT / "libsrc" / "cmake" / "exports.def": make_def, ROOT / "docs" / "abi.md": make_reference}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file differs")
    args = parser.parse_args(argv)
    header = parse(HEADER.read_text(encoding="utf-8"))
    stale = []
    for path, make in TARGETS.items():
        text = make(header)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.relative_to(ROOT).as_posix())
            if not args.check:
                path.write_text(text, encoding="utf-8", newline="\n")
    if args.check and stale:
        print("differs from the header (run tools/gen_capi.py): " + ", ".join(stale), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
