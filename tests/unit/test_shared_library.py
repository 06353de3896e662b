"""The reader of ELF, PE and Mach-O files, on files made here byte by byte, on what the compiler of this machine makes, and on the built library."""
from __future__ import annotations

import importlib.util
import os
import random
import shlex
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from pylloyal import system_info
from pylloyal._ffi import load

ROOT = Path(__file__).resolve().parents[2]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="compiles ELF files")


def tool(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "tools"))


reader = tool("shared_library")
platforms = tool("platforms")


def compiled(path: Path, source: str, *options: str) -> Path:
    file = path.with_suffix(".c")
    file.write_text(source, encoding="utf-8")
    subprocess.run([*shlex.split(os.environ.get("CC", "cc")), "-shared", "-fPIC", "-o", str(path), str(file), *options], check=True)
    return path


def pe_file(exports: list[str], needed: list[str], machine: int = 0x8664, flags: int = 0x2022, magic: int = 0x20B) -> bytes:
    """A DLL of one section, whose addresses are those of the file plus 0x1000."""
    body = bytearray()

    def put(data: bytes) -> int:
        place = 0x1000 + len(body)
        body.extend(data)
        return place

    name = put(b"made.dll\0")
    names = [put(n.encode() + b"\0") for n in exports]
    pointers = put(struct.pack(f"<{len(names)}I", *names))
    table = put(struct.pack("<IIHHIIIIIII", 0, 0, 0, 0, name, 1, len(exports), len(exports), 0, pointers, 0))
    libraries = [put(n.encode() + b"\0") for n in needed]
    imports = put(b"".join(struct.pack("<IIIII", 0, 0, 0, n, 0) for n in libraries) + bytes(20))
    optional = bytearray(240)
    struct.pack_into("<H", optional, 0, magic)
    struct.pack_into("<HH", optional, 48, 6, 1)
    struct.pack_into("<IIIII", optional, 108, 16, table, 40 if exports else 0, imports, 20 if needed else 0)
    head = b"MZ" + bytes(58) + struct.pack("<I", 64) + b"PE\0\0" + struct.pack("<HHIIIHH", machine, 1, 0, 0, 0, len(optional), flags) + optional
    start = len(head) + 40
    return head + b".rdata\0\0" + struct.pack("<IIII", len(body), 0x1000, len(body), start) + bytes(16) + bytes(body)


def macho_file(exports: list[str], needed: list[str], name: str = "@rpath/made.dylib", rpaths: tuple[str, ...] = (), floor: tuple[int, int] = (11, 0),
               hidden: tuple[str, ...] = (), imported: tuple[str, ...] = (), signed: bool = True, kind: int = 6, trie: bytes | None = None) -> bytes:
    def command(number: int, body: bytes) -> bytes:
        body += bytes(-len(body) % 8)
        return struct.pack("<II", number, 8 + len(body)) + body

    def text(words: bytes, string: str) -> bytes:
        return struct.pack("<I", 12 + len(words)) + words + string.encode() + b"\0"

    commands = [command(0xD, text(bytes(12), name)), *(command(0xC, text(bytes(12), n)) for n in needed), *(command(0x8000001C, text(b"", r)) for r in rpaths),
                command(0x32, struct.pack("<IIII", 1, floor[0] << 16 | floor[1] << 8, 0, 0)), *([command(0x1D, bytes(8))] if signed else [])]
    section = b"__init".ljust(16, b"\0") + b"__DATA".ljust(16, b"\0") + struct.pack("<QQIIIIIIII", 0, 24, 0, 0, 0, 0, 9, 0, 0, 0)
    commands.append(command(0x19, b"__DATA".ljust(16, b"\0") + struct.pack("<QQQQIIII", 0, 0, 0, 0, 0, 0, 1, 0) + section))
    strings, entries = bytearray(b"\0"), bytearray()
    for names, flags in ((exports, 0x0F), (hidden, 0x1F), (imported, 0x01)):
        for n in names:
            entries += struct.pack("<IBBHQ", len(strings), flags, 1, 0, 0)
            strings += b"_" + n.encode() + b"\0"
    place = 32 + sum(map(len, commands)) + 24 + (16 if trie is not None else 0)
    if trie is not None:
        commands.append(command(0x80000033, struct.pack("<II", place + len(entries) + len(strings), len(trie))))
    commands.append(command(0x2, struct.pack("<IIII", place, len(entries) // 16, place + len(entries), len(strings))))
    return struct.pack("<IIIIIIII", 0xFEEDFACF, 0x0100000C, 0, kind, len(commands), sum(map(len, commands)), 0, 0) + b"".join(commands) + entries + strings + (trie or b"")


def read(tmp_path: Path, data: bytes) -> object:
    path = tmp_path / "made"
    path.write_bytes(data)
    return reader.read(path)


# ----------------------------------------------------------------------------------------------------------------------- formats


def test_a_dll(tmp_path: Path) -> None:
    assert read(tmp_path, pe_file(["b", "a"], ["KERNEL32.dll", "ntdll.dll"])) == reader.SharedLibrary(
        "PE", "x86_64", needed=["KERNEL32.dll", "ntdll.dll"], exports=["a", "b"], name="made.dll", floor=(6, 1))


def test_a_dylib(tmp_path: Path) -> None:
    made = macho_file(["b", "a"], ["/usr/lib/libSystem.B.dylib"], rpaths=("@loader_path/x",), hidden=("private",), imported=("malloc",))
    assert read(tmp_path, made) == reader.SharedLibrary(
        "Mach-O", "arm64", needed=["/usr/lib/libSystem.B.dylib"], exports=["a", "b"], name="@rpath/made.dylib", rpaths=["@loader_path/x"], floor=(11, 0), initialisers=3, is_signed=True)


# The names _ab and _ac: a node "_a" with two children, each with a terminal of two bytes.
TRIE = bytes([0, 1]) + b"_a\0" + bytes([6, 0, 2]) + b"b\0" + bytes([14]) + b"c\0" + bytes([18]) + bytes([2, 0, 9, 0]) + bytes([2, 0, 9, 0])


def test_a_dylib_shows_what_its_trie_has_and_not_what_the_linker_left_in_the_table(tmp_path: Path) -> None:
    found = read(tmp_path, macho_file(["ab", "ac", "_mh_dylib_header"], [], trie=TRIE))
    assert found.exports == ["ab", "ac"]  # type: ignore[attr-defined]
    with pytest.raises(reader.NotALibraryError, match="circles"):
        read(tmp_path, macho_file([], [], trie=TRIE[:13] + bytes([14]) + TRIE[14:]))


@linux_only
@pytest.mark.parametrize("style", ["gnu", "sysv"])
def test_an_elf_library(style: str, tmp_path: Path) -> None:
    source = """
    #include <stdlib.h>
    int shown; static int started;
    __attribute__((visibility("hidden"))) int hidden(void) { return started; }
    __attribute__((constructor)) static void start(void) { started = 1; }
    void * call(void) { return malloc(7); }
    """
    found = reader.read(compiled(tmp_path / "made.so", source, f"-Wl,--hash-style={style}", "-Wl,-soname,made.so.1", "-Wl,-rpath,/somewhere"))
    assert found.format == "ELF"
    assert {"shown", "call"} <= set(found.exports)
    assert not {"hidden", "start", "malloc"} & set(found.exports)
    assert (found.name, found.rpaths) == ("made.so.1", ["/somewhere"])
    assert any(name.startswith("libc.so") for name in found.needed)
    assert found.initialisers >= 1
    assert found.floor[0] == 2
    assert f"libc.so.6:GLIBC_{'.'.join(map(str, found.floor))}" in found.versions


@pytest.mark.parametrize(("data", "word"), [
    (b"", "no ELF"), (b"text, and a lot of it" * 9, "no ELF"), (b"MZ" + bytes(62), "DOS"),
    (pe_file([], [], flags=0x22), "not a DLL"), (pe_file([], [], magic=0x10B), "64 bits"), (macho_file([], [], kind=2), "type 2"),
    (b"\x7fELF\x01\x01" + bytes(99), "64 bits"), (b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 2, 62) + bytes(99), "type 2"),
    (b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 3, 62) + bytes(99), "dynamic"),
], ids=["empty", "text", "DOS", "program", "32 bits", "Mach-O program", "ELF of 32 bits", "ELF program", "ELF without symbols"])
def test_what_is_no_library_is_said(data: bytes, word: str, tmp_path: Path) -> None:
    with pytest.raises(reader.NotALibraryError, match=word):
        read(tmp_path, data)


@pytest.mark.parametrize("whole", [pe_file(["a", "b"], ["k.dll"]), macho_file(["a", "b"], ["/usr/lib/k.dylib"])], ids=["PE", "Mach-O"])
def test_a_damaged_file_is_an_error_and_nothing_else(whole: bytes, tmp_path: Path) -> None:
    """Cut anywhere, and with bytes of any value anywhere: read, or NotALibraryError."""
    chance = random.Random(7)
    damaged = [whole[:n] for n in range(0, len(whole), 3)]
    for _ in range(300):
        data = bytearray(whole)
        data[chance.randrange(len(data))] = chance.choice([0, 1, 127, 255, chance.randrange(256)])
        damaged.append(bytes(data))
    refused = 0
    for data in damaged:
        try:
            read(tmp_path, data)
        except reader.NotALibraryError:
            refused += 1
    assert len(damaged) > refused > len(whole) // 6


# -------------------------------------------------------------------------------------------------------- what is held to be right

GOOD = {"needed": ["/usr/lib/libSystem.B.dylib"], "name": "@rpath/libpylloyal.dylib"}


def wrong(tmp_path: Path, **other: object) -> list[str]:
    """Problems of a library for macos-arm64 that is right in all but what is given."""
    made = macho_file(**({"exports": platforms.abi_names(), **GOOD} | other))  # type: ignore[arg-type]
    return platforms.problems(read(tmp_path, made), platforms.PLATFORMS["macos-arm64"])  # type: ignore[no-any-return]


def test_a_library_as_it_should_be(tmp_path: Path) -> None:
    assert wrong(tmp_path) == []
    assert len(platforms.abi_names()) > 50


@pytest.mark.parametrize(("other", "word"), [
    ({"exports": [*platforms.abi_names(), "ggml_init"]}, "ggml_init"),
    ({"exports": platforms.abi_names()[1:]}, "lacks"),
    ({"needed": ["/usr/lib/libSystem.B.dylib", "/opt/homebrew/lib/libomp.dylib"]}, "libomp"),
    ({"needed": ["/usr/lib/libSystem.B.dylib.evil"]}, "evil"),
    ({"rpaths": ("/opt/build",)}, "/opt/build"),
    ({"name": "/opt/build/libpylloyal.dylib"}, "its name"),
    ({"floor": (11, 1)}, "11.1"),
    ({"signed": False}, "not signed"),
])
def test_every_check_can_fail(other: dict[str, object], word: str, tmp_path: Path) -> None:
    [problem] = wrong(tmp_path, **other)
    assert word in problem


def test_a_library_of_another_platform(tmp_path: Path) -> None:
    made = read(tmp_path, macho_file(platforms.abi_names(), **GOOD))  # type: ignore[arg-type]
    assert "Mach-O for arm64" in platforms.problems(made, platforms.PLATFORMS["linux-x86_64"])[0]


def test_a_dylib_may_describe_types_that_are_nobodys(tmp_path: Path) -> None:
    assert wrong(tmp_path, exports=[*platforms.abi_names(), "_ZTIFbcE", "_ZTSPFbcE", "__dso_handle"]) == []
    assert "_ZTIN3pyl5StoreE" in wrong(tmp_path, exports=[*platforms.abi_names(), "_ZTIN3pyl5StoreE"])[0]


def test_the_table_names_windows_c_runtime_once_and_the_size_of_the_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "made.whl"
    wheel.write_bytes(bytes(3 << 19))
    made = reader.SharedLibrary("PE", "x86_64", needed=["KERNEL32.dll", "api-ms-win-crt-heap-l1-1-0.dll", "api-ms-win-crt-math-l1-1-0.dll"], exports=platforms.abi_names())
    line = platforms.table([platforms.Row(platforms.PLATFORMS["windows-x86_64"], 5 << 20, made, "win_amd64", "looked at", wheel)]).splitlines()[-1]
    assert line == (f"| windows-x86_64 | 5.0 MiB | {len(platforms.abi_names())} | KERNEL32.dll, the Universal C Runtime (api-ms-win-crt-*.dll) | Windows 10 "
                    "| win_amd64, 1.5 MiB | looked at |")


def test_a_library_that_names_the_clone_or_the_cache_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "libpylloyal.dylib"
    file.write_bytes(b"\0llama.cpp/src/llama.cpp\0")
    assert platforms.paths_of_this_machine(file) == []
    file.write_bytes(f"\0{ROOT}/build/core.o\0".encode())
    assert str(ROOT) in platforms.paths_of_this_machine(file)[0]


def test_tags_are_what_the_file_needs() -> None:
    made = reader.SharedLibrary
    assert platforms.tag_of(made("ELF", "x86_64", floor=(2, 28))) == "manylinux_2_28_x86_64"
    assert platforms.tag_of(made("ELF", "aarch64", floor=(2, 4))) == "manylinux_2_17_aarch64"
    assert platforms.tag_of(made("Mach-O", "arm64", floor=(11, 0))) == "macosx_11_0_arm64"
    assert platforms.tag_of(made("PE", "x86_64", floor=(6, 0))) == "win_amd64"


def test_a_retagged_wheel_is_a_right_one(tmp_path: Path) -> None:
    """Its RECORD has the digest of what is in it; nothing but WHEEL and RECORD changed."""
    old = tmp_path / "pylloyal-1.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(old, "w") as file:
        file.writestr("pylloyal/_lib/darwin-arm64/libpylloyal.dylib", b"library")
        file.writestr("pylloyal-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-linux_x86_64\n")
        file.writestr("pylloyal-1.0.dist-info/RECORD", "to be written anew")
    new = platforms.retag(old, "macosx_11_0_arm64", tmp_path / "out", "pylloyal/_lib/darwin-arm64/libpylloyal.dylib")
    assert new.name == "pylloyal-1.0-py3-none-macosx_11_0_arm64.whl"
    with zipfile.ZipFile(new) as file:
        assert file.namelist() == zipfile.ZipFile(old).namelist()
        assert file.read("pylloyal-1.0.dist-info/WHEEL").decode().splitlines() == ["Wheel-Version: 1.0", "Root-Is-Purelib: false", "Tag: py3-none-macosx_11_0_arm64"]
        record = file.read("pylloyal-1.0.dist-info/RECORD").decode().splitlines()
    # sha256(b"library"), by `printf library | openssl dgst -sha256 -binary | basenc --base64url`, without the padding
    assert record[0] == "pylloyal/_lib/darwin-arm64/libpylloyal.dylib,sha256=txjxNU9yRzEuyghtmgJK_l-nF93qWt7d1vErz5RbLow,7"
    assert record[-1] == "pylloyal-1.0.dist-info/RECORD,,"
    with pytest.raises(platforms.BuildError, match="darwin-arm64"):
        platforms.retag(old, "win_amd64", tmp_path / "out", "pylloyal/_lib/windows-amd64/libpylloyal.dll")


def test_folders_are_those_the_loader_looks_in() -> None:
    assert {p.folder for p in platforms.PLATFORMS.values()} == {"linux-x86_64", "linux-aarch64", "windows-amd64", "darwin-arm64", "darwin-x86_64"}
    if sys.platform == "linux":
        assert load.platform_folder() in {p.folder for p in platforms.PLATFORMS.values()}


@linux_only
def test_the_built_library_shows_the_abi_alone() -> None:
    found = reader.read(load.library_path())
    assert found.exports == platforms.abi_names()
    assert found.rpaths == []
    assert found.name.startswith("libpylloyal.so")
    assert all(name.startswith(("libc.", "libm.", "libstdc++.", "libgcc_s.", "libpthread.", "libdl.", "ld-linux")) for name in found.needed), found.needed


def test_the_engines_code_for_amx_is_left_out() -> None:
    """Where the processor has AMX, -march=native would bring it in (docs/adr/0013)."""
    assert "amx_int8" not in system_info()["cpu_features"]
