"""Finding, checking and unpacking the pinned source: on a tiny fake archive, a fake pin, and caches of the test's own.

The tools are copied beside a pin of our own, so that what runs is the command line as CMake calls it.
"""
from __future__ import annotations

import hashlib
import io
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import _cache  # noqa: E402
import llama_source  # noqa: E402
from _cache import FetchError  # noqa: E402

PACKAGE, VERSION = "pylloyal-fake-engine", "1.0"
TOP = "pylloyal_fake_engine-1.0"
INNER = f"{TOP}/vendor/llama.cpp"
WANTED = {name: f"// {name}\n".encode() for name in (
    "CMakeLists.txt", "LICENSE", "include/llama.h", "ggml/include/ggml.h", "ggml/src/ggml.c", "common/chat.h", "tools/mtmd/mtmd.h", "src/llama.cpp",
    "vendor/json/json.hpp", "models/templates/one.jinja", "cmake/common.cmake", "licenses/LICENSE-x")}
JUNK = ("examples/main.cpp", "models/big.gguf", "tools/server/server.cpp", "CMakeLists.txt.bak", "srcs/x.c", "tests/t.cpp")
UNWANTED = {f"{INNER}/{name}": b"no" for name in JUNK} | {
    f"{TOP}/PKG-INFO": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n".encode(),
    f"{TOP}/pyproject.toml": b'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    f"{TOP}/backend.py": f"""
import os
def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    name = "pylloyal_fake_engine-1.0.dist-info"
    os.mkdir(os.path.join(metadata_directory, name))
    with open(os.path.join(metadata_directory, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {PACKAGE}\\nVersion: {VERSION}\\n")
    return name
def build_wheel(*given, **more):
    raise RuntimeError("nothing is to be compiled here")
""".encode(),
    f"{TOP}/vendor/other/CMakeLists.txt": b"no",
}


def plain(files: dict[str, bytes]) -> list[tuple[tarfile.TarInfo, bytes]]:
    """Members of regular files."""
    members = []
    for name, data in files.items():
        info = tarfile.TarInfo(name)
        info.size = len(data)
        members.append((info, data))
    return members


def special(name: str, kind: bytes, target: str = "", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    """A member that is no regular file."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, mode
    return info, b""


def inside(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{INNER}/{name}": data for name, data in files.items()}


def write_archive(path: Path, members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, links followed by nobody."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and not p.is_symlink()}


@dataclass
class Bench:
    """A copy of the tools with a pin of its own, an archive that fits the pin, and an empty cache."""

    folder: Path
    archive: Path
    cache: Path
    outside: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def pin(self) -> dict[str, str]:
        return {"package": PACKAGE, "version": VERSION, "sha256": sha256(self.archive), "commit": "0123456"}

    @property
    def final(self) -> Path:
        return self.cache / "source" / self.pin["sha256"][:16]

    def write_pin(self) -> None:
        self.pin_file.write_text("# a comment\n" + "".join(f"{k} = {v}\n" for k, v in self.pin.items()), encoding="utf-8")

    @property
    def pin_file(self) -> Path:
        return self.folder / "libsrc" / "LLAMA_CPP_PIN"

    @property
    def script(self) -> Path:
        return self.folder / "tools" / "llama_source.py"

    def use(self, members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> None:
        """Another archive, and the pin that goes with it."""
        write_archive(self.archive, members)
        self.write_pin()

    def cli(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(self.script), *args], env=self.env | env, capture_output=True, text=True, timeout=60, check=False)

    def start(self, code: str, log: Path, *args: str) -> subprocess.Popen[bytes]:
        """A process that runs ``code`` with the tools importable; what it says goes to ``log``.out and ``log``.err."""
        with open(f"{log}.out", "wb") as out, open(f"{log}.err", "wb") as err:
            return subprocess.Popen([sys.executable, "-c", code, *args], env=self.env | {"PYTHONPATH": str(self.script.parent)}, stdout=out, stderr=err)

    def scraps(self) -> list[str]:
        """What lies in the cache beside finished trees and locks."""
        where = self.cache / "source"
        return [p.name for p in where.iterdir() if p.name.startswith(".partial-")] if where.exists() else []


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name in ("LLAMA_CPP_DIR", "LLAMA_CPP_ARCHIVE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "project"
    (folder / "libsrc").mkdir(parents=True)
    (folder / "tools").mkdir()
    for name in ("_cache.py", "llama_source.py"):
        shutil.copy(ROOT / "tools" / name, folder / "tools" / name)
    outside = tmp_path / "outside"
    outside.mkdir()
    made = Bench(folder, tmp_path / f"{TOP}.tar.gz", tmp_path / "cache", outside)
    made.use(plain(inside(WANTED) | UNWANTED))
    monkeypatch.setenv("PYLLOYAL_CACHE_DIR", str(made.cache))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    empty = tmp_path / "no packages"
    empty.mkdir()
    made.env = kept | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(empty), "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1",
                       "PYTHONDONTWRITEBYTECODE": "1"}
    return made


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Downloads fail, and are listed."""
    asked: list[Any] = []

    def fail(*args: Any, **more: Any) -> Path:
        asked.append((args, more))
        raise FetchError("the test has no network")

    monkeypatch.setattr(llama_source, "pip_download", fail)
    return asked


def until(fact: Callable[[], Any], seconds: float = 30) -> Any:
    """Poll until ``fact`` holds, or fail."""
    end = time.monotonic() + seconds
    while not (value := fact()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
    return value


# ------------------------------------------------------------------------------------------------------------ what is kept


def test_unpacks_only_what_is_built(bench: Bench) -> None:
    folder = llama_source.find_source(bench.archive, bench.pin)
    assert folder == bench.final
    found = tree(folder)
    stamp = found.pop(llama_source.STAMP)
    assert found == WANTED
    assert stamp.decode().split() == [bench.pin["sha256"], str(len(WANTED))]
    assert bench.scraps() == []


def test_second_call_reads_nothing_but_the_cache(bench: Bench, no_download: list[Any]) -> None:
    pin = bench.pin
    first = llama_source.find_source(bench.archive, pin)
    before = {p: p.stat().st_mtime_ns for p in first.rglob("*")}
    bench.archive.unlink()
    assert llama_source.find_source(None, pin) == first
    assert {p: p.stat().st_mtime_ns for p in first.rglob("*")} == before
    assert no_download == []


def test_a_member_that_stands_twice_does_not_spoil_the_cache(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stamp counts files, and the same name twice is one file; else every later call would unpack again."""
    bench.use(plain(inside(WANTED)) + plain(inside({"LICENSE": b"later"})))
    llama_source.find_source(bench.archive, bench.pin)
    monkeypatch.setattr(llama_source, "unpack", lambda *_: pytest.fail("unpacked again"))
    assert (llama_source.find_source(bench.archive, bench.pin) / "LICENSE").read_bytes() == b"later"


def test_tarballs_with_dot_and_double_slash_in_names(bench: Bench) -> None:
    bench.use(plain({f"./{TOP}//vendor/./llama.cpp/{name}": data for name, data in WANTED.items()}))
    found = tree(llama_source.find_source(bench.archive, bench.pin))
    assert {k: v for k, v in found.items() if k != llama_source.STAMP} == WANTED


# ------------------------------------------------------------------------------------------------------- order of sources


def test_llama_cpp_dir_wins_over_a_full_cache(bench: Bench, monkeypatch: pytest.MonkeyPatch, no_download: list[Any]) -> None:
    llama_source.find_source(bench.archive, bench.pin)
    own = bench.folder / "own tree"
    for name in llama_source.SENTINELS:
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_bytes(b"mine")
    monkeypatch.setenv("LLAMA_CPP_DIR", str(own))
    assert llama_source.find_source(bench.archive, bench.pin) == own
    assert no_download == []


def test_llama_cpp_dir_that_is_no_tree_is_an_error_not_a_hint(bench: Bench, monkeypatch: pytest.MonkeyPatch, no_download: list[Any]) -> None:
    llama_source.find_source(bench.archive, bench.pin)
    own = bench.folder / "own"
    (own / "include").mkdir(parents=True)
    (own / "include" / "llama.h").write_bytes(b"")
    monkeypatch.setenv("LLAMA_CPP_DIR", str(own))
    with pytest.raises(FetchError, match="LLAMA_CPP_DIR") as caught:
        llama_source.find_source(bench.archive, bench.pin)
    assert "CMakeLists.txt" in str(caught.value)
    assert "include/llama.h" not in str(caught.value)
    assert no_download == []


def test_cache_wins_over_archive(bench: Bench, monkeypatch: pytest.MonkeyPatch, no_download: list[Any]) -> None:
    llama_source.find_source(bench.archive, bench.pin)
    monkeypatch.setattr(llama_source, "check_sha256", lambda *_: pytest.fail("an archive was read"))
    monkeypatch.setenv("LLAMA_CPP_ARCHIVE", str(bench.outside / "missing.tar.gz"))
    assert llama_source.find_source(bench.archive, bench.pin) == bench.final
    assert llama_source.find_source(None, bench.pin) == bench.final
    assert no_download == []


def test_archive_argument_wins_over_the_variable_and_both_over_a_download(bench: Bench, monkeypatch: pytest.MonkeyPatch, no_download: list[Any]) -> None:
    monkeypatch.setenv("LLAMA_CPP_ARCHIVE", str(bench.outside / "missing.tar.gz"))
    assert llama_source.find_source(bench.archive, bench.pin) == bench.final
    shutil.rmtree(bench.final)
    monkeypatch.setenv("LLAMA_CPP_ARCHIVE", str(bench.archive))
    assert llama_source.find_source(None, bench.pin) == bench.final
    assert no_download == []


def test_download_comes_last_and_asks_for_the_pin(bench: Bench, no_download: list[Any]) -> None:
    with pytest.raises(FetchError, match="no network"):
        llama_source.find_source(None, bench.pin)
    [(args, more)] = no_download
    assert args[:3] == (PACKAGE, VERSION, bench.pin["sha256"])
    assert more == {"source": True}
    assert bench.scraps() == []


# --------------------------------------------------------------------------------------------------------- bad archives


def refuse(bench: Bench, match: str) -> str:
    """The archive must be refused, and the cache left as it was: without a tree."""
    with pytest.raises(FetchError, match=match) as caught:
        llama_source.find_source(bench.archive, bench.pin)
    assert not bench.final.exists()
    assert bench.scraps() == []
    return str(caught.value)


def test_wrong_hash_names_both_digests(bench: Bench) -> None:
    pin = bench.pin | {"sha256": "ab" * 32}
    with pytest.raises(FetchError) as caught:
        llama_source.find_source(bench.archive, pin)
    assert "ab" * 32 in str(caught.value)
    assert sha256(bench.archive) in str(caught.value)
    assert str(bench.archive) in str(caught.value)
    assert tree(bench.cache).keys() <= {"source/" + "ab" * 8 + ".lock"}


def test_a_good_tree_survives_a_later_wrong_archive(bench: Bench) -> None:
    pin = bench.pin
    llama_source.find_source(bench.archive, pin)
    before = tree(bench.final)
    (bench.final / llama_source.STAMP).unlink()
    write_archive(bench.archive, plain({"x": b"y"}))
    with pytest.raises(FetchError):
        llama_source.find_source(bench.archive, pin)
    after = tree(bench.cache / "source" / pin["sha256"][:16])
    assert after == {k: v for k, v in before.items() if k != llama_source.STAMP}


def test_archive_missing(bench: Bench) -> None:
    with pytest.raises(FetchError, match=r"missing\.tar\.gz does not exist"):
        llama_source.find_source(bench.outside / "missing.tar.gz", bench.pin)
    with pytest.raises(FetchError, match="does not exist"):
        llama_source.find_source(bench.outside, bench.pin)
    assert not bench.final.exists()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.6, 0.95, 0.999])
def test_truncated_archive(bench: Bench, share: float) -> None:
    noise = random.Random(1).randbytes(200_000)
    bench.use(plain(inside(WANTED | {"src/noise.bin": noise, "src/last.c": b"x"})))
    whole = bench.archive.read_bytes()
    bench.archive.write_bytes(whole[: int(len(whole) * share)])
    refuse(bench, "could not be unpacked|holds no usable")


@pytest.mark.parametrize("seed", range(3))
def test_damaged_archive(bench: Bench, seed: int) -> None:
    """Bytes turned over in the middle: whatever zlib or tarfile says, the user gets one FetchError."""
    text = b"".join(b"%d int x_%d;\n" % (i, i) for i in range(40_000))
    bench.use(plain(inside({"src/text.c": text} | WANTED)))
    data = bytearray(bench.archive.read_bytes())
    for at in random.Random(seed).sample(range(len(data) // 4, len(data) // 2), 40):
        data[at] ^= 0xFF
    bench.archive.write_bytes(data)
    refuse(bench, "could not be unpacked|holds no usable")


@pytest.mark.parametrize("data", [b"", b"not an archive at all", b"\x1f\x8b\x08\x00"], ids=["empty", "text", "gzip magic"])
def test_not_an_archive(bench: Bench, data: bytes) -> None:
    bench.archive.write_bytes(data)
    refuse(bench, "could not be unpacked|holds no usable")


@pytest.mark.parametrize("absent", llama_source.SENTINELS)
def test_archive_without_a_sentinel(bench: Bench, absent: str) -> None:
    bench.use(plain(inside({name: data for name, data in WANTED.items() if name != absent}) | UNWANTED))
    said = refuse(bench, "no usable llama.cpp tree")
    assert absent in said
    assert not any(other in said for other in llama_source.SENTINELS if other != absent)


Members = list[tuple[tarfile.TarInfo, bytes]]
UP = "../" * 12
HOSTILE: dict[str, Callable[[Path], Members]] = {
    "an absolute path": lambda outside: plain({f"{outside}/evil": b"evil"}),
    "an absolute path of the right shape": lambda _: plain({"/vendor/llama.cpp/src/evil": b"evil"}),
    "a wanted folder, then up to an absolute path": lambda outside: plain({f"{INNER}/src/{UP}{outside.as_posix().lstrip('/')}/evil": b"evil"}),
    "up from the tree to an absolute path": lambda outside: plain({f"{INNER}/{UP}{outside.as_posix().lstrip('/')}/evil": b"evil"}),
    "a wanted folder, then up beside the cache": lambda _: plain({f"{INNER}/src/../../../../../outside/evil": b"evil"}),
    "a wanted folder, then up within the scratch folder": lambda _: plain({f"{INNER}/include/../../evil": b"evil"}),
    "a top folder that is ..": lambda _: plain({"../vendor/llama.cpp/../../evil": b"evil"}),
    "through a symlink out": lambda outside: [special(f"{INNER}/src/out", tarfile.SYMTYPE, str(outside)), *plain(inside({"src/out/evil": b"evil"}))],
    "a wanted folder is a symlink out": lambda outside: [special(f"{INNER}/src", tarfile.SYMTYPE, str(outside)), *plain(inside({"src/evil": b"evil"}))],
    "a wanted file is a symlink out": lambda outside: [
        special(f"{INNER}/src/link", tarfile.SYMTYPE, str(outside / "precious")), *plain(inside({"src/link": b"evil"}))],
    "through a hard link": lambda outside: [special(f"{INNER}/src/hard", tarfile.LNKTYPE, str(outside / "precious")), *plain(inside({"src/hard": b"evil"}))],
    "a relative hard link": lambda _: [special(f"{INNER}/src/hard", tarfile.LNKTYPE, "../../../../outside/precious"), *plain(inside({"src/hard": b"evil"}))],
    "a symlink that stays inside": lambda _: [special(f"{INNER}/src/inner", tarfile.SYMTYPE, "llama.cpp")],
    "a hard link that stays inside": lambda _: [special(f"{INNER}/src/inner", tarfile.LNKTYPE, f"{INNER}/src/llama.cpp")],
    "device nodes": lambda _: [special(f"{INNER}/src/{kind.decode()}", kind) for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("evil", HOSTILE)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_hostile_members_write_nothing_outside(bench: Bench, evil: str, first: bool, tmp_path: Path) -> None:
    """Refused or left out, as may be; but nothing outside appears or changes, and nothing special lands in the cache."""
    (bench.outside / "precious").write_bytes(b"precious")
    good, bad = plain(inside(WANTED)), HOSTILE[evil](bench.outside)
    bench.use(bad + good if first else good + bad)

    def around() -> dict[str, bytes]:
        return {name: data for name, data in tree(tmp_path).items() if not name.startswith("cache/")}

    before = around()
    at_root = {name: Path("/", name).exists() for name in ("evil", "vendor")}
    try:
        folder = llama_source.find_source(bench.archive, bench.pin)
    except FetchError:
        assert not bench.final.exists()
    else:
        found = tree(folder)
        assert all(found[name] == data for name, data in WANTED.items())
    assert around() == before
    assert {name: Path("/", name).exists() for name in at_root} == at_root
    for path in bench.cache.rglob("*"):
        assert path.is_dir() or path.is_file(), f"{path} is a device"
        assert not path.is_symlink()
        if path.is_file():
            assert path.stat().st_nlink == 1
    assert bench.scraps() == []


def test_modes_are_tamed(bench: Bench) -> None:
    """No set-user-id bit and nothing writable for the world comes out of an archive."""
    info = tarfile.TarInfo(f"{INNER}/src/tool")
    info.size, info.mode, info.uid = 1, 0o6777, 12345
    bench.use([*plain(inside(WANTED)), (info, b"x")])
    found = (llama_source.find_source(bench.archive, bench.pin) / "src" / "tool").stat()
    assert not found.st_mode & 0o6022
    assert found.st_uid == os.getuid()


# ----------------------------------------------------------------------------------------------------- half-written caches


def strip_stamp(folder: Path) -> None:
    (folder / llama_source.STAMP).unlink()


def lose_a_sentinel(folder: Path) -> None:
    (folder / llama_source.SENTINELS[-1]).unlink()


def lose_another_file(folder: Path) -> None:
    (folder / "src" / "llama.cpp").unlink()


def a_sentinel_for_another_file(folder: Path) -> None:
    (folder / llama_source.SENTINELS[-1]).rename(folder / "src" / "stray.c")


def other_hash(folder: Path) -> None:
    (folder / llama_source.STAMP).write_text(f"{'0' * 64} {len(WANTED)}\n", encoding="utf-8")


def other_count(folder: Path) -> None:
    text = (folder / llama_source.STAMP).read_text(encoding="utf-8")
    (folder / llama_source.STAMP).write_text(f"{text.split()[0]} {len(WANTED) + 1}\n", encoding="utf-8")


def stamp_of_words(folder: Path) -> None:
    text = (folder / llama_source.STAMP).read_text(encoding="utf-8")
    (folder / llama_source.STAMP).write_text(f"{text.split()[0]} many\n", encoding="utf-8")


def empty_stamp(folder: Path) -> None:
    (folder / llama_source.STAMP).write_bytes(b"")


def binary_stamp(folder: Path) -> None:
    (folder / llama_source.STAMP).write_bytes(b"\xff\xfe\x00")


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


HARM = [strip_stamp, lose_a_sentinel, lose_another_file, a_sentinel_for_another_file, other_hash, other_count, stamp_of_words, empty_stamp, binary_stamp,
        empty_folder]


@pytest.mark.parametrize("harm", HARM)
def test_half_written_cache_is_repaired(bench: Bench, harm: Callable[[Path], None]) -> None:
    folder = llama_source.find_source(bench.archive, bench.pin)
    good = tree(folder)
    harm(folder)
    assert tree(folder) != good
    assert not llama_source.is_complete(folder, bench.pin["sha256"])
    assert llama_source.find_source(bench.archive, bench.pin) == folder
    assert tree(folder) == good
    assert bench.scraps() == []


def test_leftover_scratch_folder_does_no_harm(bench: Bench) -> None:
    """A killed run leaves its scratch folder behind; the next one neither trips over it nor takes anything from it."""
    old = bench.cache / "source" / ".partial-killed" / "tree"
    (old / "src").mkdir(parents=True)
    (old / "src" / "llama.cpp").write_bytes(b"half")
    found = tree(llama_source.find_source(bench.archive, bench.pin))
    assert {k: v for k, v in found.items() if k != llama_source.STAMP} == WANTED


def test_a_failed_unpack_leaves_no_scratch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even an exception nobody expected (here: out of memory) cleans up, and the next run succeeds."""
    real = tarfile.TarFile.extract
    calls = itertools.count()

    def fail(self: tarfile.TarFile, *args: Any, **more: Any) -> None:
        if next(calls) == 3:
            raise MemoryError
        real(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "extract", fail)
        with pytest.raises(MemoryError):
            llama_source.find_source(bench.archive, bench.pin)
    assert not bench.final.exists()
    assert bench.scraps() == []
    assert llama_source.find_source(bench.archive, bench.pin) == bench.final


# ---------------------------------------------------------------------------------------------------- several processes

RACER = """
import pathlib, sys, time
import llama_source
log, me, others = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
real = llama_source.unpack
def unpack(*args):
    with open(log / "unpacked", "a") as file:
        file.write(me + "\\n")
    end = time.monotonic() + 30
    while not all("waiting for it" in (log / (o + ".err")).read_text() for o in others):  # the others stand at the lock now
        assert time.monotonic() < end, "the others never came"
        time.sleep(0.005)
    real(*args)
llama_source.unpack = unpack
sys.exit(llama_source.main(["--archive", str(log / "archive.tar.gz")]))
"""


@pytest.mark.slow
def test_three_processes_at_once_unpack_once(bench: Bench, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    shutil.copy(bench.archive, log / "archive.tar.gz")
    names = ["a", "b", "c"]
    for name in names:
        (log / f"{name}.err").touch()
    racers = [bench.start(RACER, log / name, str(log), name, *(o for o in names if o != name)) for name in names]
    assert [racer.wait(60) for racer in racers] == [0, 0, 0], [(log / f"{name}.err").read_text() for name in names]
    assert len((log / "unpacked").read_text().split()) == 1
    assert {(log / f"{name}.out").read_text() for name in names} == {f"{bench.final}\n"}
    said = [(log / f"{name}.err").read_text().count("another process is preparing the llama.cpp source; waiting for it") for name in names]
    assert sorted(said) == [0, 1, 1]
    assert bench.scraps() == []


HOLDER = """
import pathlib, sys, threading
import _cache
lock = _cache.cache_dir() / "source" / (sys.argv[1] + ".lock")
with _cache.locked(lock, "something"), _cache.scratch_beside(lock) as scratch:
    (scratch / "half").write_bytes(b"half")
    print("held", flush=True)
    threading.Event().wait()
"""


@pytest.mark.slow
def test_killed_holder_does_not_block_the_next(bench: Bench, tmp_path: Path) -> None:
    """SIGKILL while it holds the lock and a half-filled scratch folder: whoever waits goes on, and so does whoever comes later."""
    holder = bench.start(HOLDER, tmp_path / "holder", bench.final.name)
    try:
        until(lambda: (tmp_path / "holder.out").read_text() == "held\n" or holder.poll() is not None)
        waiter = bench.start("import sys, llama_source; sys.exit(llama_source.main(sys.argv[1:]))", tmp_path / "waiter", "--archive", str(bench.archive))
        try:
            until(lambda: "waiting for it" in (tmp_path / "waiter.err").read_text() or waiter.poll() is not None)
            assert waiter.poll() is None
            assert not bench.final.exists()
            holder.send_signal(signal.SIGKILL)
            assert holder.wait(30) == -signal.SIGKILL
            assert waiter.wait(30) == 0
        finally:
            waiter.kill()
            waiter.wait()
    finally:
        holder.kill()
        holder.wait()
    assert (tmp_path / "waiter.out").read_text() == f"{bench.final}\n"
    assert len(bench.scraps()) == 1
    done = bench.cli()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{bench.final}\n", "")


def test_lock_is_released_by_an_error(bench: Bench) -> None:
    """A failed run in this very process leaves nothing locked for the next."""
    with pytest.raises(FetchError):
        llama_source.find_source(bench.outside / "missing.tar.gz", bench.pin)
    assert llama_source.find_source(bench.archive, bench.pin) == bench.final


# ------------------------------------------------------------------------------------------------------- the command line


def test_cli_prints_only_the_path(bench: Bench) -> None:
    done = bench.cli("--archive", str(bench.archive))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{bench.final}\n", "")
    again = bench.cli()
    assert (again.returncode, again.stdout, again.stderr) == (0, f"{bench.final}\n", "")


def test_cli_reports_a_wrong_archive_on_stderr(bench: Bench) -> None:
    wrong = write_archive(bench.outside / "other.tar.gz", plain({"x": b"y"}))
    done = bench.cli("--archive", str(wrong))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("llama_source: ")
    assert sha256(wrong) in done.stderr
    assert bench.pin["sha256"] in done.stderr
    assert "Traceback" not in done.stderr


def test_cli_reports_a_cache_that_cannot_be_written(bench: Bench) -> None:
    """One line that names the folder, not a traceback."""
    blocker = bench.outside / "a file"
    blocker.write_bytes(b"")
    done = bench.cli("--archive", str(bench.archive), PYLLOYAL_CACHE_DIR=str(blocker / "cache"))
    assert (done.returncode, done.stdout) == (1, "")
    assert str(blocker) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_no_network(bench: Bench) -> None:
    done = bench.cli()
    assert (done.returncode, done.stdout) == (1, "")
    assert f"pip could not download {PACKAGE}=={VERSION}" in done.stderr
    assert "No matching distribution found" in done.stderr, "pip's own words are missing"
    assert "--archive" in done.stderr
    assert "Traceback" not in done.stderr
    assert not bench.final.exists()
    assert bench.scraps() == []


@pytest.mark.slow
def test_download_through_pip(bench: Bench) -> None:
    links = bench.outside / "links"
    links.mkdir()
    shutil.copy(bench.archive, links / f"{TOP}.tar.gz")
    done = bench.cli(PIP_FIND_LINKS=str(links))
    assert (done.returncode, done.stdout) == (0, f"{bench.final}\n"), done.stderr
    found = tree(bench.final)
    assert {k: v for k, v in found.items() if k != llama_source.STAMP} == WANTED
    assert bench.scraps() == []


@pytest.mark.slow
def test_download_of_another_file_is_refused(bench: Bench) -> None:
    """The index hands out a file with the right name and the wrong content."""
    links = bench.outside / "links"
    links.mkdir()
    wrong = write_archive(links / f"{TOP}.tar.gz", plain(inside(WANTED | {"LICENSE": b"changed"}) | UNWANTED))
    done = bench.cli(PIP_FIND_LINKS=str(links))
    assert (done.returncode, done.stdout) == (1, "")
    assert bench.pin["sha256"] in done.stderr
    assert sha256(wrong) in done.stderr
    assert not bench.final.exists()
    assert bench.scraps() == []


def test_pip_that_leaves_no_file_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cache.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "", ""))
    with pytest.raises(FetchError, match="0 files"):
        llama_source.find_source(None, bench.pin)
    assert not bench.final.exists()


def test_pip_that_leaves_another_file_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip checks the hash; so do we."""

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        write_archive(Path(command[command.index("-d") + 1]) / f"{TOP}.tar.gz", plain(inside(WANTED | {"LICENSE": b"changed"})))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(_cache.subprocess, "run", pip)
    with pytest.raises(FetchError, match=bench.pin["sha256"]):
        llama_source.find_source(None, bench.pin)
    assert not bench.final.exists()
    assert bench.scraps() == []


# ---------------------------------------------------------------------------------------------------------------- the pin


def test_the_real_pin_is_whole() -> None:
    pin = llama_source.read_pin()
    assert pin.keys() == {"package", "version", "sha256", "commit"}
    assert len(pin["sha256"]) == 64
    int(pin["sha256"], 16)
    int(pin["commit"], 16)


@pytest.mark.parametrize("absent", ["package", "version", "sha256", "commit"])
def test_a_pin_that_lacks_a_line_is_refused(bench: Bench, absent: str) -> None:
    bench.pin_file.write_text("".join(f"{k} = {v}\n" for k, v in bench.pin.items() if k != absent), encoding="utf-8")
    with pytest.raises(FetchError, match=absent):
        llama_source.read_pin(bench.pin_file)
    done = bench.cli("--archive", str(bench.archive))
    assert done.returncode == 1
    assert absent in done.stderr


@pytest.mark.parametrize(("given", "expect"), [("here", "here"), ("~/x", "home/x")], ids=["relative", "home"])
def test_cache_dir_is_made_absolute(given: str, expect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYLLOYAL_CACHE_DIR", given)
    assert _cache.cache_dir() == tmp_path / expect
