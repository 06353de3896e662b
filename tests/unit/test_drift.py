"""The header, the generated files, the ctypes table and the built library cannot drift apart unnoticed.

Four checks, each a function from the text of a header to a list of problems. They find nothing wrong with the real header;
each of a list of mutants must be noticed by the checks named beside it, which is how we know that the checks can fail.
"""
from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gen_capi  # noqa: E402

from pylloyal import errors  # noqa: E402
from pylloyal._ffi import capi, load  # noqa: E402

HEADER = gen_capi.HEADER.read_text(encoding="utf-8")
RUNTIME = re.compile(r"(libc|libm|libstdc\+\+|libgcc_s|ld-linux[-\w]*|libpthread|libdl|librt)\.so(\.\d+)*")
Check = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def library() -> Path:
    return load.library_path()


# ------------------------------------------------------------------------------------------------------------- four checks


def generated(header: str) -> list[str]:
    """(a) What the generator makes of the header is what is committed."""
    try:
        parsed = gen_capi.parse(header)
        return [f"{path.name} differs from the header" for path, make in gen_capi.TARGETS.items() if make(parsed) != path.read_text(encoding="utf-8")]
    except gen_capi.HeaderError as error:
        return [f"the generator refuses it: {error}"]


Layout = dict[str, tuple[int, dict[str, tuple[int, int]]]]


def layout_of_library() -> Layout:
    found = json.loads(load.take_text(load.library().pyl_abi_layout))
    return {name: (about["size"], {field: (at, n) for field, (at, n) in about["fields"].items()}) for name, about in found.items()}


def layout_of_ctypes(structs: list[type[ctypes.Structure]]) -> Layout:
    return {s.__name__: (ctypes.sizeof(s), {name: (getattr(s, name).offset, getattr(s, name).size) for name, *_ in s._fields_}) for s in structs}


def differences(one: Any, other: Any, names: tuple[str, str], what: str = "") -> list[str]:
    """Both ways: what is in one and not the other, and what differs; the order of keys counts."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = [f"{what}{key} is in {names[0]} only" for key in one.keys() - other.keys()]
        found += [f"{what}{key} is in {names[1]} only" for key in other.keys() - one.keys()]
        if not found and list(one) != list(other):
            found.append(f"{what} is in another order")
        return found + [text for key in one.keys() & other.keys() for text in differences(one[key], other[key], names, f"{what}{key}.")]
    if isinstance(one, tuple) and isinstance(other, tuple) and isinstance(one[-1], dict):
        return differences(one[0], other[0], names, f"{what}size ") + differences(one[1], other[1], names, what)
    return [] if one == other else [f"{what} is {one} in {names[0]} and {other} in {names[1]}"]


def layout(header: str) -> list[str]:
    """(b) The built library lays out every struct as ctypes does, and as the generator works it out."""
    try:
        parsed = gen_capi.parse(header)
        namespace: dict[str, Any] = {}
        exec(gen_capi.make_capi(parsed), namespace)
    except gen_capi.HeaderError as error:
        return [f"the generator refuses it: {error}"]
    worked_out: Layout = {s.name: (s.layout()[0], {name: (at, n) for name, at, n in s.layout()[1]}) for s in parsed.structs}
    seen = layout_of_library()
    return differences(seen, layout_of_ctypes(namespace["STRUCTS"]), ("the library", "ctypes")) + differences(seen, worked_out, ("the library", "the generator"))


def without_comments(header: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", header, flags=re.S)


def declared_functions(header: str) -> list[str]:
    """Every pyl_* name with an argument list: read without the generator, so that what it overlooks is not overlooked here."""
    return re.findall(r"\b(pyl_\w+)\s*\(", without_comments(header))


def exported_symbols(library: Path) -> list[str]:
    out = subprocess.run(["nm", "-D", "--defined-only", "--format=posix", str(library)], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in out.splitlines()]


def symbols(header: str) -> list[str]:
    """(c) The library exports what the header declares, and nothing besides."""
    exported, declared = exported_symbols(load.library_path()), declared_functions(header)
    found = [f"{name} is exported, but is no pyl_ name" for name in exported if not re.fullmatch(r"pyl_\w+", name)]
    found += [f"{name} is declared, but not exported" for name in declared if name not in exported]
    found += [f"{name} is exported, but not declared" for name in exported if name not in declared]
    found += [f"{name} stands twice" for name in set(declared) if declared.count(name) > 1]
    return found


USE = """
static int32_t use(void) { struct_of_all_kinds s; return s.error.code + PYL_ABI_VERSION + pyl_abi_version() + (int32_t) (PYL_E_INVALID); }
int main(void) { return use(); }
"""


def compiles(header: str, tmp: Path) -> list[str]:
    """(d) The header is strict C99 and strict C++17, on its own and twice over."""
    tmp.mkdir(parents=True, exist_ok=True)
    (tmp / "pylloyal.h").write_text(header, encoding="utf-8")
    body = '#include "pylloyal.h"\n#include "pylloyal.h"\ntypedef struct struct_of_all_kinds { pyl_error error; } struct_of_all_kinds;\n' + USE
    found = []
    for variable, usual, standard, name in (("CC", "cc", "-std=c99", "use.c"), ("CXX", "c++", "-std=c++17", "use.cpp")):
        compiler = shlex.split(os.environ.get(variable, usual))
        (tmp / name).write_text(body.replace("struct_of_all_kinds s;", "struct_of_all_kinds s = {{sizeof(pyl_error), 0, 0, 0, 0, 0, 0, 0, 0}};"), encoding="utf-8")
        strict = ["-pedantic-errors", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *(["-Wstrict-prototypes"] if name == "use.c" else [])]
        done = subprocess.run([*compiler, standard, *strict, "-I", str(tmp), str(tmp / name)], capture_output=True, text=True, check=False)
        if done.returncode:
            found.append(f"{standard}: {done.stderr.strip()}")
    return found


# --------------------------------------------------------------------------------------------------------- the real header


def test_generated_files_are_those_of_the_header() -> None:
    assert generated(HEADER) == []


def test_check_option_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`gen_capi.py --check` is clean, writes nothing, and names the file that differs when one does."""
    assert gen_capi.main(["--check"]) == 0
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(gen_capi, "ROOT", tmp_path)
    path = tmp_path / "capi.py"
    monkeypatch.setattr(gen_capi, "TARGETS", {path: gen_capi.make_capi})
    assert gen_capi.main(["--check"]) == 1
    assert not path.exists()
    assert gen_capi.main([]) == 0
    assert gen_capi.main(["--check"]) == 0
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    capsys.readouterr()
    assert gen_capi.main(["--check"]) == 1
    assert "capi.py" in capsys.readouterr().err


def test_layout_of_the_library_is_that_of_ctypes() -> None:
    assert layout(HEADER) == []
    assert differences(layout_of_library(), layout_of_ctypes(capi.STRUCTS), ("the library", "capi.py")) == []
    assert all(s._fields_[0] == ("struct_size", ctypes.c_uint32) for s in capi.STRUCTS)


def test_library_exports_what_the_header_declares(library: Path) -> None:
    assert symbols(HEADER) == []
    assert {row[0] for row in capi.PROTOTYPES} == set(exported_symbols(library))


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF")
def test_library_needs_nothing_but_the_runtime(library: Path) -> None:
    out = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", out)
    assert needed, "readelf said nothing"
    assert [name for name in needed if not RUNTIME.fullmatch(name)] == []
    assert "RPATH" not in out
    assert "RUNPATH" not in out
    assert "TEXTREL" not in out


def test_header_is_strict_c99_and_cxx17(tmp_path: Path) -> None:
    assert compiles(HEADER, tmp_path) == []


def test_get_include_serves_this_header() -> None:
    """The copy that is installed with the library, where there is one, is the header of the tree."""
    import pylloyal

    assert (Path(pylloyal.get_include()) / "pylloyal.h").read_text(encoding="utf-8") == HEADER


# ---------------------------------------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Mutant:
    """A change of the header, and the checks that must notice it (others may)."""

    name: str
    old: str
    new: str
    noticed_by: tuple[str, ...]

    def text(self) -> str:
        assert HEADER.count(self.old) == 1, f"the mutation {self.name!r} no longer fits the header: {self.old!r} stands {HEADER.count(self.old)} times"
        return HEADER.replace(self.old, self.new)


ADD_HERE = "PYL_API void pyl_text_free(pyl_text * text);\n"
MUTANTS = [
    Mutant("rename a function", "PYL_API int32_t pyl_model_free(", "PYL_API int32_t pyl_model_release(", ("generated", "symbols")),
    Mutant("rename a function that returns nothing", "PYL_API void pyl_text_free(", "PYL_API void pyl_text_release(", ("generated", "symbols")),
    Mutant("drop a parameter", "pyl_model_metadata(const pyl_model * model, pyl_text ** out);", "pyl_model_metadata(const pyl_model * model);", ("generated",)),
    Mutant("drop the last parameter", "pyl_abi_layout(pyl_text ** out);", "pyl_abi_layout(void);", ("generated",)),
    Mutant("add a parameter", "pyl_store_cancel(pyl_store * store);", "pyl_store_cancel(pyl_store * store, uint32_t flags);", ("generated",)),
    Mutant("swap two parameters", "pyl_branch_get_sampling(pyl_store * store, pyl_branch branch,", "pyl_branch_get_sampling(pyl_branch branch, pyl_store * store,",
           ("generated",)),
    Mutant("rename a parameter", "pyl_log_level(int32_t level);", "pyl_log_level(int32_t lowest);", ("generated",)),
    Mutant("change a parameter's type", "pyl_log_level(int32_t level);", "pyl_log_level(int64_t level);", ("generated",)),
    Mutant("drop a const", "pyl_store_pressure(const pyl_store * store,", "pyl_store_pressure(pyl_store * store,", ("generated",)),
    Mutant("int32_t to int64_t in a field", "    int32_t engine_rc;    /* the", "    int64_t engine_rc;    /* the", ("generated", "layout")),
    Mutant("uint32_t to int32_t in a field", "    uint32_t n_vocab;\n    const float", "    int32_t n_vocab;\n    const float", ("generated",)),
    Mutant("float to double in a field", "    float top_p; ", "    double top_p; ", ("generated", "layout")),
    Mutant("reorder two fields of the same type", "    int32_t n_layer;\n    int32_t n_head;\n", "    int32_t n_head;\n    int32_t n_layer;\n",
           ("generated", "layout")),
    Mutant("reorder two fields of different types", "    int32_t finish;      /* out: PYL_FINISH_* */\n    pyl_branch branch;\n",
           "    pyl_branch branch;\n    int32_t finish;\n", ("generated", "layout")),
    Mutant("insert a field", "    double decode_s; ", "    uint32_t late;\n    double decode_s; ", ("generated", "layout")),
    Mutant("reorder two names in one declaration", "int32_t bos, eos, eot,", "int32_t eos, bos, eot,", ("generated", "layout")),
    Mutant("append a field", "    int64_t have; ", "    int64_t have, spare; ", ("generated", "layout")),
    Mutant("append a field into the padding at the end", "    int32_t vocab_only;", "    int32_t spare;\n    int32_t vocab_only;", ("generated", "layout")),
    Mutant("remove a field", "    int32_t partial; ", "    /* */ ", ("generated", "layout")),
    Mutant("rename a field", "    int32_t use_mmap;", "    int32_t use_map;", ("generated", "layout")),
    Mutant("a pointer becomes a number", "    const char * message; ", "    uint64_t message; ", ("generated",)),
    Mutant("rename a struct", "} pyl_live;", "} pyl_alive;", ("compiles",)),
    Mutant("rename a struct's tag", "typedef struct pyl_lane {", "typedef struct pyl_lanes {", ("generated", "layout")),
    Mutant("change a constant", "#define PYL_E_BUSY (-4)", "#define PYL_E_BUSY (-40)", ("generated",)),
    Mutant("change a flag", "#define PYL_TOKEN_BYTE 4u", "#define PYL_TOKEN_BYTE 64u", ("generated",)),
    Mutant("write a flag in hexadecimal", "#define PYL_TOKEN_BYTE 4u", "#define PYL_TOKEN_BYTE 0x4u", ("generated",)),
    Mutant("change the ABI version", "#define PYL_ABI_VERSION 1\n", "#define PYL_ABI_VERSION 2\n", ("generated",)),
    Mutant("rename a constant", "#define PYL_FINISH_STOP 2", "#define PYL_FINISH_HALT 2", ("generated",)),
    Mutant("remove a constant", "#define PYL_VOCAB_OTHER 6\n", "", ("generated",)),
    Mutant("add a constant", "#define PYL_VOCAB_OTHER 6\n", "#define PYL_VOCAB_OTHER 6\n#define PYL_VOCAB_NEW 7\n", ("generated",)),
    Mutant("remove a function", "PYL_API size_t pyl_text_size(const pyl_text * text);\n", "", ("generated", "symbols")),
    Mutant("add a function", ADD_HERE, ADD_HERE + "PYL_API int32_t pyl_text_new(pyl_text ** out);\n", ("generated", "symbols")),
    Mutant("add a function without PYL_API", ADD_HERE, ADD_HERE + "int32_t pyl_text_new(pyl_text ** out);\n", ("symbols",)),
    Mutant("drop a PYL_API", "PYL_API size_t pyl_text_size(", "size_t pyl_text_size(", ("generated",)),
    Mutant("declare a function twice", ADD_HERE, ADD_HERE + ADD_HERE, ("generated", "symbols")),
    Mutant("const char* to pyl_text*", "PYL_API const char * pyl_text_data(", "PYL_API pyl_text * pyl_text_data(", ("generated",)),
    Mutant("const char* to pyl_text* in a parameter", "pyl_chat_parse(const char * request,", "pyl_chat_parse(const pyl_text * request,", ("generated",)),
    Mutant("int32_t to int64_t as a result", "PYL_API int32_t pyl_commit_n(", "PYL_API int64_t pyl_commit_n(", ("generated",)),
    Mutant("a status becomes void", "PYL_API int32_t pyl_store_free(", "PYL_API void pyl_store_free(", ("generated",)),
    Mutant("an unknown type as a result", "PYL_API uint64_t pyl_store_epoch(", "PYL_API long pyl_store_epoch(", ("generated", "layout")),
    Mutant("an unknown type as a parameter", "pyl_log_level(int32_t level);", "pyl_log_level(long level);", ("generated", "layout")),
    Mutant("an unknown type in a field", "    int32_t n_gpu_layers;", "    long n_gpu_layers;", ("generated", "layout")),
    Mutant("a bool in a field", "    int32_t is_draining;", "    _Bool is_draining;", ("generated", "layout", "compiles")),
    Mutant("a struct that does not begin with struct_size", "typedef struct pyl_run {\n    uint32_t struct_size;", "typedef struct pyl_run {\n    uint32_t size;",
           ("generated", "layout")),
    Mutant("a struct that begins with another field", "typedef struct pyl_run {\n", "typedef struct pyl_run {\n    uint32_t flags;\n", ("generated", "layout")),
    Mutant("a struct_size of another type", "typedef struct pyl_run {\n    uint32_t struct_size;", "typedef struct pyl_run {\n    uint64_t struct_size;",
           ("generated", "layout")),
    Mutant("a C++ reference", "pyl_store_drain(pyl_store * store);", "pyl_store_drain(pyl_store & store);", ("generated", "compiles")),
    Mutant("a C++ scope", "typedef uint64_t pyl_branch;", "typedef ::uint64_t pyl_branch;", ("compiles",)),
    Mutant("nullptr as a constant", "#define PYL_OK 0\n", "#define PYL_OK 0\nstatic const void * const pyl_none = nullptr;\n", ("compiles",)),
    Mutant("a C++ keyword as a parameter", "pyl_log_level(int32_t level);", "pyl_log_level(int32_t class);", ("compiles",)),
    Mutant("a prototype without (void)", "pyl_abi_version(void);", "pyl_abi_version();", ("generated", "compiles")),
    Mutant("a stray semicolon", "PYL_API int32_t pyl_abi_version(void);", "PYL_API int32_t pyl_abi_version(void);;", ("compiles",)),
    Mutant("a missing semicolon", "pyl_abi_version(void);", "pyl_abi_version(void)", ("compiles",)),
    Mutant("a missing include", "#include <stdint.h>\n", "", ("compiles",)),
    Mutant("no include guard", "#ifndef PYLLOYAL_H\n", "#if 1\n", ("compiles",)),
    Mutant("a comment that is not closed", "/* a loaded model: weights, vocabulary, chat templates */", "/* a loaded model", ("compiles",)),
    Mutant("a changed comment", "Frees a text; NULL is fine.", "Frees a text; NULL is not fine.", ("generated",)),
]


def run_check(name: str, header: str, tmp: Path) -> list[str]:
    return compiles(header, tmp / "header") if name == "compiles" else {"generated": generated, "layout": layout, "symbols": symbols}[name](header)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutants_are_noticed(mutant: Mutant, tmp_path: Path) -> None:
    header = mutant.text()
    found = {name: run_check(name, header, tmp_path) for name in mutant.noticed_by}
    assert [name for name, problems in found.items() if not problems] == [], "these checks saw nothing wrong"


def test_every_check_notices_something_the_others_may_not() -> None:
    """No check is there for show: each is named by several mutants."""
    named = list(itertools.chain.from_iterable(m.noticed_by for m in MUTANTS))
    assert all(named.count(name) >= 4 for name in ("generated", "layout", "symbols", "compiles"))
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


# --------------------------------------------------------------------------- the generator: "an error, never skipped"

UNREADABLE = {
    "a constant in hexadecimal": "#define PYL_NEW 0x10\n",
    "a constant in hexadecimal, unsigned": "#define PYL_NEW 0x10u\n",
    "a constant that is an expression": "#define PYL_NEW (1 << 4)\n",
    "a constant that is another's name": "#define PYL_NEW PYL_OK\n",
    "a long constant": "#define PYL_NEW 10L\n",
    "a constant that is a fraction": "#define PYL_NEW 0.5\n",
    "a constant that is a string": '#define PYL_NEW "text"\n',
    "a constant in octal": "#define PYL_NEW 010\n",
    "a macro with arguments": "#define PYL_NEW(x) (x)\n",
    "an enum": "enum pyl_new { PYL_NEW = 1 };\n",
    "a typedef of an enum": "typedef enum pyl_new { PYL_NEW = 1 } pyl_new;\n",
    "a union": "typedef union pyl_new { uint32_t struct_size; float f; } pyl_new;\n",
    "a struct without typedef": "struct pyl_new { uint32_t struct_size; };\n",
    "a struct without a tag": "typedef struct { uint32_t struct_size; } pyl_new;\n",
    "a struct on one line": "typedef struct pyl_new { uint32_t struct_size; } pyl_new;\n",
    "a struct whose tag differs": "typedef struct pyl_tag {\n    uint32_t struct_size;\n} pyl_new;\n",
    "an array in a struct": "typedef struct pyl_new {\n    uint32_t struct_size;\n    int32_t rows[4];\n} pyl_new;\n",
    "a bit field": "typedef struct pyl_new {\n    uint32_t struct_size;\n    uint32_t flag : 1;\n} pyl_new;\n",
    "a struct in a struct": "typedef struct pyl_new {\n    uint32_t struct_size;\n    pyl_live live;\n} pyl_new;\n",
    "a function pointer in a struct": "typedef struct pyl_new {\n    uint32_t struct_size;\n    void (*call)(void);\n} pyl_new;\n",
    "a function pointer as a type": "typedef void (*pyl_new)(void);\n",
    "a function pointer as a parameter": "PYL_API int32_t pyl_new(void (*call)(void));\n",
    "a struct by value": "PYL_API int32_t pyl_new(pyl_live live);\n",
    "a struct by value as a result": "PYL_API pyl_live pyl_new(void);\n",
    "a variadic function": "PYL_API int32_t pyl_new(const char * format, ...);\n",
    "a parameter without a name": "PYL_API int32_t pyl_new(int32_t);\n",
    "an array as a parameter": "PYL_API int32_t pyl_new(int32_t rows[4]);\n",
    "a pointer to a pointer of numbers": "PYL_API int32_t pyl_new(int32_t ** rows);\n",
    "a function of another prefix": "PYL_API int32_t other_new(void);\n",
    "a variable": "PYL_API int32_t pyl_new;\n",
    "two functions on one line": "PYL_API int32_t pyl_new(void); PYL_API int32_t pyl_newer(void);\n",
    "an indented function": "    PYL_API int32_t pyl_new(void);\n",
    "a function without PYL_API": "int32_t pyl_new(void);\n",
    "an extern function without PYL_API": "extern int32_t pyl_new(void);\n",
    "an inline function": "static inline int32_t pyl_new(void) { return 1; }\n",
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_generator_skips_nothing(what: str) -> None:
    """Whatever it does not understand is a HeaderError, not a row that is missing from the table."""
    header = HEADER.replace(ADD_HERE, ADD_HERE + UNREADABLE[what])
    assert header != HEADER
    with pytest.raises(gen_capi.HeaderError):
        gen_capi.make_capi(gen_capi.parse(header))


# ------------------------------------------------------------------------------------------------------------- exceptions


def test_status_table_names_every_error_of_the_header_and_nothing_else() -> None:
    codes = re.findall(r"^#define PYL_(E_\w+)", HEADER, re.M)
    assert len(codes) > 20
    assert set(errors.STATUS) == set(codes)
    values = [getattr(capi, name) for name in codes]
    assert len(set(values)) == len(values)
    assert all(value < 0 for value in values)
    assert len(set(errors.STATUS.values())) == len(errors.STATUS), "two codes share a class: which one was it?"
    assert set(load._CODES) == set(values)
    states = re.findall(r"^#define PYL_(STATE_\w+)", HEADER, re.M)
    assert {getattr(capi, name) for name in states} == set(load._STATES)
    assert {name.removeprefix("STATE_").lower() for name in states} == set(load._STATES.values())


BASES = {
    "PylloyalError": (Exception,),
    "LibraryError": ("PylloyalError", ImportError), "LibraryNotFoundError": ("LibraryError",), "ABIMismatchError": ("LibraryError",),
    "ClosedError": ("PylloyalError", ValueError), "ForkedProcessError": ("PylloyalError", RuntimeError),
    "KernelError": ("PylloyalError",),
    "InvalidArgumentError": ("KernelError", ValueError), "StaleHandleError": ("KernelError", LookupError), "BusyError": ("KernelError",),
    "BranchHasChildrenError": ("KernelError",), "DivergedError": ("KernelError",), "NoLogitsError": ("KernelError",), "NothingLegalError": ("KernelError",),
    "GrammarError": ("KernelError", ValueError), "TemplateError": ("KernelError", ValueError), "UnsupportedOperationError": ("KernelError",),
    "FormatError": ("KernelError", ValueError), "KernelIOError": ("KernelError", OSError), "InternalKernelError": ("KernelError",),
    "DecodeError": ("KernelError",), "NoCellsError": ("DecodeError",), "DecodeCancelledError": ("DecodeError",), "BranchPoisonedError": ("DecodeError",),
    "CapacityError": ("PylloyalError",), "ContextOverflowError": ("CapacityError",), "NoLeaseError": ("CapacityError",),
    "InsufficientMemoryError": ("CapacityError", MemoryError), "MetadataError": ("CapacityError", ValueError), "UnknownMemoryError": ("CapacityError",),
    "MediaError": ("PylloyalError", ValueError), "MediaDecodeError": ("MediaError",), "UnsupportedMediaError": ("MediaError",),
    "ProjectorMismatchError": ("MediaError",), "MediaEncodeError": ("MediaError",),
}
CLASSES = {name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, BaseException)}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_exception_has_the_documented_bases(name: str) -> None:
    expected = tuple(CLASSES[base] if isinstance(base, str) else base for base in BASES[name])
    assert CLASSES[name].__bases__ == expected
    assert CLASSES[name].__doc__


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_exceptions_can_be_made_and_carry_the_numbers(name: str) -> None:
    """Several bases of builtin exceptions with fields of their own (OSError, ImportError) must not swallow ours."""
    failure = errors.Failure(-1, "advanced", 7, True, 3, 10, 4, "words")
    made = CLASSES[name]("words", failure)
    assert (str(made), made.code, made.state, made.engine_rc, made.partial, made.index, made.need, made.have) == ("words", -1, "advanced", 7, True, 3, 10, 4)
    assert made.failure is failure
    bare = CLASSES[name]("words")
    assert (str(bare), bare.code, bare.state, bare.index, bare.failure) == ("words", 0, "unchanged", None, None)


def test_capacity_errors_say_what_ran_out_and_what_helps() -> None:
    for name, cls in CLASSES.items():
        if issubclass(cls, errors.CapacityError) and cls is not errors.CapacityError and not issubclass(cls, ValueError):
            assert cls.binding, name
            assert cls.remedies, name


def test_the_core_classes_are_all_there() -> None:
    others = {"LibraryError", "LibraryNotFoundError", "ABIMismatchError", "ForkedProcessError", "KernelError", "CapacityError"}
    assert set(CLASSES) >= {cls.__name__ for cls in errors.STATUS.values()} | others


def test_tools_are_there() -> None:
    """The checks above would be empty without them."""
    assert all(shutil.which(name) for name in ("nm", "readelf"))
