"""What a shared library says of itself: ELF (Linux), PE (Windows) and Mach-O (macOS) files, read without a tool of their platform.

    python tools/shared_library.py FILE...

Standard library only. What is read is what a loader would read: the dynamic section, the import and export directories, the load
commands; sections and debug symbols play no part, so that a stripped file tells as much.
"""
from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path


class NotALibraryError(Exception):
    """The file is of no known format, for 32 bits or the other byte order, or ends in the middle of something."""


@dataclass
class SharedLibrary:
    """A library's account of itself.

    Attributes
    ----------
    needed : list of str
        Libraries the loader must find, as they are named in the file.
    exports : list of str
        Functions and data others can link to, as C names them, sorted.
    name : str
        SONAME, install name, or the name in the export directory; "" for none.
    rpaths : list of str
        Folders the file adds to the loader's search.
    floor : tuple of int
        Oldest system: the glibc version its symbols need, or the macOS or Windows version in its header; () where there is none.
    versions : list of str
        Versions of symbols that are needed (ELF), as ``LIBRARY:VERSION``.
    initialisers : int
        Functions the loader runs when the library is opened.
    is_signed : bool
        A code signature is there (Mach-O): without one macOS does not open a file for arm64.
    """

    format: str
    machine: str
    needed: list[str] = field(default_factory=list)
    exports: list[str] = field(default_factory=list)
    name: str = ""
    rpaths: list[str] = field(default_factory=list)
    floor: tuple[int, ...] = ()
    versions: list[str] = field(default_factory=list)
    initialisers: int = 0
    is_signed: bool = False


def read(path: Path) -> SharedLibrary:
    """Read one file.

    Raises
    ------
    NotALibraryError
        It is not a shared library, or a damaged one.
    """
    data = path.read_bytes()
    try:
        if data[:4] == b"\x7fELF":
            return _elf(data)
        if data[:2] == b"MZ":
            return _pe(data)
        if data[:4] == b"\xcf\xfa\xed\xfe":
            return _macho(data)
    except (struct.error, IndexError, ValueError) as error:
        raise NotALibraryError(f"{path} is damaged: {error}") from error
    raise NotALibraryError(f"{path} is no ELF, PE or Mach-O file of 64 bits")


def _text(data: bytes, at: int) -> str:
    return data[at:data.index(b"\0", at)].decode()


def _place(address: int, parts: list[tuple[int, int, int]]) -> int:
    """Where in the file an address of memory lies; ``parts`` are (address, bytes in the file, place in the file)."""
    for start, size, offset in parts:
        if start <= address < start + size:
            return offset + address - start
    raise ValueError(f"the address {address:#x} is not in the file")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


# ------------------------------------------------------------------------------------------------------------------------- ELF

_NEEDED, _STRTAB, _SYMTAB, _SONAME, _RPATH, _INIT_ARRAYSZ, _RUNPATH, _GNU_HASH, _HASH, _VERNEED, _VERNEEDNUM = 1, 5, 6, 14, 15, 27, 29, 0x6FFFFEF5, 4, 0x6FFFFFFE, 0x6FFFFFFF


def _elf(data: bytes) -> SharedLibrary:
    if data[4:6] != b"\x02\x01":
        raise ValueError("not 64 bits, lowest byte first")
    kind, machine = struct.unpack_from("<HH", data, 16)
    if kind != 3:
        raise ValueError(f"an ELF file of type {kind}, not a shared object")
    first, = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    segments = [struct.unpack_from("<IIQQQQQQ", data, first + i * size) for i in range(count)]

    def at(address: int) -> int:
        return _place(address, [(start, n, offset) for kind, _, offset, start, _, n, *_ in segments if kind == 1])

    dynamic = next((s for s in segments if s[0] == 2), None)
    if dynamic is None:
        raise ValueError("it has no dynamic section")
    entries = []
    for place in range(dynamic[2], dynamic[2] + dynamic[5], 16):
        tag, value = struct.unpack_from("<qQ", data, place)
        if tag == 0:
            break
        entries.append((tag, value))
    one = dict(entries)
    if _STRTAB not in one or _SYMTAB not in one or not {_HASH, _GNU_HASH} & one.keys():
        raise ValueError("its dynamic section names no symbols")
    strings, symbols = at(one[_STRTAB]), at(one[_SYMTAB])
    out = SharedLibrary("ELF", {3: "x86", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}.get(machine, str(machine)))
    out.needed = [_text(data, strings + value) for tag, value in entries if tag == _NEEDED]
    out.rpaths = [_text(data, strings + value) for tag, value in entries if tag in (_RPATH, _RUNPATH)]
    out.name = _text(data, strings + one[_SONAME]) if _SONAME in one else ""
    out.initialisers = one.get(_INIT_ARRAYSZ, 0) // 8
    for i in range(_count_of_symbols(data, one, at)):
        name, info, _, section, _, _ = struct.unpack_from("<IBBHQQ", data, symbols + 24 * i)
        if section != 0 and info >> 4 in (1, 2, 10):  # defined here; global, weak or unique
            out.exports.append(_text(data, strings + name))
    out.exports.sort()
    place = at(one[_VERNEED]) if _VERNEED in one else 0
    for _ in range(one.get(_VERNEEDNUM, 0)):
        _, n, file, aux, following = struct.unpack_from("<HHIII", data, place)
        step = place + aux
        for _ in range(n):
            _, _, _, name, after = struct.unpack_from("<IHHII", data, step)
            out.versions.append(f"{_text(data, strings + file)}:{_text(data, strings + name)}")
            step += after
        place += following
    out.versions.sort()
    glibc = [_version(version.partition("GLIBC_")[2]) for version in out.versions if ":GLIBC_" in version and version.rpartition("_")[2][0].isdigit()]
    out.floor = max(glibc, default=())
    return out


def _count_of_symbols(data: bytes, one: dict[int, int], at: Callable[[int], int]) -> int:
    """The dynamic section does not say how many there are; its hash table does."""
    if _HASH in one:
        return int(struct.unpack_from("<II", data, at(one[_HASH]))[1])
    table = at(one[_GNU_HASH])
    n_buckets, first, n_bloom, _ = struct.unpack_from("<IIII", data, table)
    buckets = struct.unpack_from(f"<{n_buckets}I", data, table + 16 + 8 * n_bloom)
    last = max(buckets, default=0)
    if last < first:
        return int(first)
    chain = table + 16 + 8 * n_bloom + 4 * n_buckets
    while not struct.unpack_from("<I", data, chain + 4 * (last - first))[0] & 1:
        last += 1
    return last + 1


# -------------------------------------------------------------------------------------------------------------------------- PE

def _pe(data: bytes) -> SharedLibrary:
    head, = struct.unpack_from("<I", data, 60)
    if data[head:head + 4] != b"PE\0\0":
        raise ValueError("a DOS program")
    machine, n_sections = struct.unpack_from("<HH", data, head + 4)
    size, flags = struct.unpack_from("<HH", data, head + 20)
    if not flags & 0x2000:
        raise ValueError("a program, not a DLL")
    optional = head + 24
    if struct.unpack_from("<H", data, optional)[0] != 0x20B:
        raise ValueError("not of 64 bits")
    sections = [struct.unpack_from("<IIII", data, optional + size + 40 * i + 8) for i in range(n_sections)]

    def at(address: int) -> int:
        return _place(address, [(start, min(virtual or raw, raw), offset) for virtual, start, raw, offset in sections])

    directories = [struct.unpack_from("<II", data, optional + 112 + 8 * i) for i in range(struct.unpack_from("<I", data, optional + 108)[0])]
    out = SharedLibrary("PE", {0x8664: "x86_64", 0xAA64: "arm64", 0x14C: "x86"}.get(machine, hex(machine)))
    out.floor = struct.unpack_from("<HH", data, optional + 48)  # of the subsystem: the loader compares it with its own
    if directories[0][1]:
        table = at(directories[0][0])
        name, = struct.unpack_from("<I", data, table + 12)
        n_names, _, names = struct.unpack_from("<III", data, table + 24)
        out.name = _text(data, at(name))
        out.exports = sorted(_text(data, at(pointer)) for pointer in struct.unpack_from(f"<{n_names}I", data, at(names))) if n_names else []
    if directories[1][1]:
        place = at(directories[1][0])
        while (name := struct.unpack_from("<IIIII", data, place)[3]) != 0:
            out.needed.append(_text(data, at(name)))
            place += 20
    return out


# ---------------------------------------------------------------------------------------------------------------------- Mach-O

def _macho(data: bytes) -> SharedLibrary:
    machine, _, kind, n_commands = struct.unpack_from("<IIII", data, 4)
    if kind != 6:
        raise ValueError(f"a Mach-O file of type {kind}, not a dynamic library")
    trie: list[str] | None = None
    out = SharedLibrary("Mach-O", {0x01000007: "x86_64", 0x0100000C: "arm64"}.get(machine, hex(machine)))
    place = 32
    for _ in range(n_commands):
        command, size = struct.unpack_from("<II", data, place)
        if size < 8:
            raise ValueError("a load command without a size")
        words = struct.unpack_from(f"<{size // 4}I", data, place)
        if command in (0xC, 0x18 | 0x80000000, 0x1F | 0x80000000):  # a library; one that may be absent; one that is shown on
            out.needed.append(_text(data, place + words[2]))
        elif command == 0xD:
            out.name = _text(data, place + words[2])
        elif command == 0x1C | 0x80000000:
            out.rpaths.append(_text(data, place + words[2]))
        elif command == 0x32:  # the version it was built for
            out.floor = (words[3] >> 16, words[3] >> 8 & 255)
        elif command == 0x24:
            out.floor = (words[2] >> 16, words[2] >> 8 & 255)
        elif command == 0x1D:
            out.is_signed = True
        elif command == 0x33 | 0x80000000 or (command in (0x22, 0x22 | 0x80000000) and words[11]):
            start, length = words[2:4] if command == 0x33 | 0x80000000 else words[10:12]
            trie = list(_exports(data[start:start + length])) if length else []
        elif command == 0x19:
            out.initialisers += sum(_initialisers(data, place))
        elif command == 0x2:
            symbols, count, strings = words[2:5]
            for i in range(count):
                name, kind, _, _, _ = struct.unpack_from("<IBBHQ", data, symbols + 16 * i)
                if not kind & 0xE0 and kind & 1 and not kind & 0x10 and kind & 0xE:  # no debugger's entry; external, not private, defined
                    out.exports.append(_text(data, strings + name).removeprefix("_"))
        place += size
    # What the loader looks in; the table of symbols also has what the linker made for itself.
    out.exports = sorted(out.exports if trie is None else [name.removeprefix("_") for name in trie])
    return out


def _exports(trie: bytes) -> Iterator[str]:
    """Names in a trie of exports: each node says whether a name ends there, and with which letters others go on."""
    def number(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (trie[at] & 127) << shift
            shift += 7
            at += 1
            if not trie[at - 1] & 128:
                return value, at

    nodes, seen = [(0, "")], {0}
    while nodes:
        place, name = nodes.pop()
        size, place = number(place)
        if size:
            yield name
        place += size
        n_children = trie[place]
        place += 1
        for _ in range(n_children):
            letters = _text(trie, place)
            child, place = number(place + len(letters.encode()) + 1)
            if child in seen:
                raise ValueError("a trie of exports that goes round in circles")
            seen.add(child)
            nodes.append((child, name + letters))


def _initialisers(data: bytes, segment: int) -> Iterator[int]:
    for i in range(struct.unpack_from("<I", data, segment + 64)[0]):
        section = segment + 72 + 80 * i
        size, kind = struct.unpack_from("<Q", data, section + 40)[0], data[section + 64]
        if kind == 9:
            yield size // 8
        elif kind == 22:  # offsets of 32 bits
            yield size // 4


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps(asdict(read(Path(argument))), indent=1))
