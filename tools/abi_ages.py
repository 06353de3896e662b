"""The promise of the ABI, in headers: what an older and a newer program was compiled with, and what may not change.

    python tools/abi_ages.py --check            exit 1 if pylloyal.h breaks what its frozen copy (fixtures/abi) promised
    python tools/abi_ages.py --freeze           the copy becomes today's header: with a release, or a new PYL_ABI_VERSION
    python tools/abi_ages.py --write FOLDER     FOLDER/{older,newer,frozen}/pylloyal.h, for libsrc/tests/test_ages.c

Older: every struct without its last fields, as many as it takes to make it smaller. Newer: every struct with one more.
"""
from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gen_capi

FROZEN = gen_capi.ROOT / "fixtures" / "abi"


def abi_version(header: gen_capi.Header) -> int:
    return dict(header.constants)["PYL_ABI_VERSION"]


def _each_struct(source: str, edit: Callable[[gen_capi.Struct, str, str], str]) -> str:
    """The header with the body of every struct edited: ``edit(struct, body, body without comments)``."""
    bare = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), source, flags=re.S)
    structs = {s.name: s for s in gen_capi.parse(source).structs}
    out, at = [], 0
    for match in re.finditer(r"^typedef struct (\w+) \{(.*?)^\} \1;", bare, re.M | re.S):
        out += [source[at:match.start(2)], edit(structs[match[1]], source[match.start(2):match.end(2)], match[2])]
        at = match.end(2)
    return "".join(out) + source[at:]


def older(source: str) -> str:
    """The header a program of earlier days may have been compiled with."""
    def cut(struct: gen_capi.Struct, body: str, bare: str) -> str:
        full, fields = struct.layout()[0], list(struct.fields)
        while gen_capi.Struct(struct.name, fields).layout()[0] == full:
            fields.pop()
        end = re.search(rf"\b{fields[-1][0]}\b[^;]*;", bare)
        assert end, struct.name
        # A statement may name several fields; those behind the last that stays go with the rest.
        keep = bare[: end.end()]
        tail = keep[keep.rindex(fields[-1][0]) + len(fields[-1][0]): -1]
        return body[: end.end() - 1 - len(tail)] + ";\n"

    return _each_struct(source, cut)


def newer(source: str) -> str:
    """A header of days to come."""
    return _each_struct(source, lambda _struct, body, _bare: body + "    uint64_t added_later;\n")


def problems(was: str, today: str) -> list[str]:
    """What a program compiled with the header ``was`` would miss in a library of ``today``."""
    old, new = gen_capi.parse(was), gen_capi.parse(today)
    if abi_version(new) != abi_version(old):
        return [] if abi_version(new) > abi_version(old) else [f"PYL_ABI_VERSION goes back from {abi_version(old)} to {abi_version(new)}"]
    found = []
    constants, functions, structs = dict(new.constants), {f.name: f for f in new.functions}, {s.name: s for s in new.structs}
    for name, value in old.constants:
        if constants.get(name) != value:
            found.append(f"{name} was {value} and is {constants.get(name, 'gone')}")
    for function in old.functions:
        there = functions.get(function.name)
        # Names of parameters are nobody's promise.
        if there is None or (there.result, [t for t, _ in there.params]) != (function.result, [t for t, _ in function.params]):
            found.append(f"{function.name} was `{function.prototype}` and is {f'`{there.prototype}`' if there else 'gone'}")
    for name in old.opaque:
        if name not in new.opaque:
            found.append(f"{name} is gone")
    for struct in old.structs:
        if struct.name not in structs:
            found.append(f"{struct.name} is gone")
            continue
        first = structs[struct.name].fields[: len(struct.fields)]
        if first != struct.fields:
            there_now = [f"{ctype} {name}" for name, ctype in first] + ["nothing"] * (len(struct.fields) - len(first))
            found += [f"{struct.name}.{name} was {ctype}, and there is {now}" for (name, ctype), now in zip(struct.fields, there_now, strict=True) if f"{ctype} {name}" != now]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true")
    what.add_argument("--freeze", action="store_true")
    what.add_argument("--write", type=Path, metavar="FOLDER")
    args = parser.parse_args(argv)
    now = gen_capi.HEADER.read_text(encoding="utf-8")
    frozen = FROZEN / f"pylloyal-{abi_version(gen_capi.parse(now))}.h"
    if args.freeze:
        frozen.parent.mkdir(parents=True, exist_ok=True)
        frozen.write_text(now, encoding="utf-8", newline="\n")
        return 0
    if args.write:
        for age, text in (("older", older(now)), ("newer", newer(now)), ("frozen", frozen.read_text(encoding="utf-8"))):
            path = args.write / age / "pylloyal.h"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        return 0
    if not frozen.exists():
        print(f"{frozen.relative_to(gen_capi.ROOT)} is missing: a new PYL_ABI_VERSION begins with --freeze", file=sys.stderr)
        return 1
    if found := problems(frozen.read_text(encoding="utf-8"), now):
        print("\n".join(["breaks what the ABI promised (raise PYL_ABI_VERSION, or, before a release, --freeze):", *found]), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
