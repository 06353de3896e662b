"""Find the native library, load it once, and turn its statuses into exceptions.

Looked for in ``PYLLOYAL_LIBRARY`` (a path, and then nowhere else), then in the package's own ``_lib/<platform>``. There is no
search through the system's library paths: a stranger's llama.cpp must never be picked up by name.
"""
from __future__ import annotations

import atexit
import ctypes
import os
import platform
import struct
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from .. import errors
from . import capi

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_path: Path | None = None
_CODES: dict[int, type[errors.PylloyalError]] = {getattr(capi, name): cls for name, cls in errors.STATUS.items()}
_STATES: dict[int, errors.State] = {capi.STATE_UNCHANGED: "unchanged", capi.STATE_ADVANCED: "advanced", capi.STATE_POISONED: "poisoned"}
_HOW = "Build it with `python3 tools/bootstrap.py lib` (or `cmake --preset native` in libsrc/), or install a wheel that carries it."

# One generation a process: fork() starts a new one, and handles of the old are dead in the child.
generation = 0


def _after_fork() -> None:
    global generation, _lock
    generation += 1
    _lock = threading.Lock()  # whoever held it does not exist here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Library:
    """Stands for the loaded library in the order of teardown; the first finalizer made is the last to run at exit."""

    is_torn_down = False
    is_exiting = False


_library_life = Library()


def _tear_down() -> None:
    Library.is_torn_down = True


weakref.finalize(_library_life, _tear_down)


def _begin_exit() -> None:
    Library.is_exiting = True


# Registered after weakref's own exit hook, so it runs before the finalizers close what is open.
atexit.register(_begin_exit)


def quiet_at_exit() -> None:
    """End a thread that is still inside while the process exits: its store was just closed, and nobody is left to be told."""
    if Library.is_exiting and threading.current_thread() is not threading.main_thread():
        raise SystemExit


def platform_folder() -> str:
    """Name of this platform's folder in ``_lib``: the same rule as in CMakeLists.txt."""
    return f"{platform.system()}-{platform.machine()}".lower()


def file_names() -> tuple[str, ...]:
    return {"darwin": ("libpylloyal.dylib",), "win32": ("pylloyal.dll", "libpylloyal.dll")}.get(sys.platform, ("libpylloyal.so",))


def candidates() -> list[Path]:
    """Paths where a library may be, in the order they are tried."""
    if given := os.environ.get("PYLLOYAL_LIBRARY"):
        return [Path(given).expanduser().absolute()]
    # Down to the file: in an editable install the package lies in two folders, and only what is in it has one path.
    places = list(sys.modules[__name__.partition(".")[0]].__path__)
    if len(places) == 1:
        return [Path(places[0]).absolute() / "_lib" / platform_folder() / name for name in file_names()]
    import importlib.resources  # more than a megabyte of modules

    package = importlib.resources.files("pylloyal")
    return [Path(str(package.joinpath("_lib").joinpath(platform_folder()).joinpath(name))) for name in file_names()]


def machine_of(path: Path) -> str:
    """What a file is: the processor a library was built for, as far as its header tells, or that it is none."""
    if path.is_dir():
        return "a folder"
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError as error:
        return f"unreadable: {error.strerror}"
    if head[:4] == b"\x7fELF" and len(head) >= 20:
        return "an ELF library for " + {3: "x86", 40: "arm", 62: "x86-64", 183: "arm64", 243: "riscv64"}.get(struct.unpack_from("<H", head, 18)[0], "an unknown machine")
    if head[:4] == b"\xcf\xfa\xed\xfe":
        return "a Mach-O library for " + {0x01000007: "x86-64", 0x0100000C: "arm64"}.get(struct.unpack_from("<I", head, 4)[0], "an unknown machine")
    if head[:2] == b"MZ" and len(head) >= 64:
        at = struct.unpack_from("<I", head, 60)[0]
        if at + 6 <= len(head):
            return "a DLL for " + {0x8664: "x86-64", 0xAA64: "arm64", 0x14C: "x86"}.get(struct.unpack_from("<H", head, at + 4)[0], "an unknown machine")
    return "not a library at all"


def _why(path: Path, error: OSError) -> str:
    """One line on why ``path`` did not load."""
    if not path.exists():
        return f"{path}: no such file"
    return f"{path}: it is {machine_of(path)}, this Python runs on {platform.machine()} {platform.system()}; the system says: {error}"


def _check(result: int, _function: Any, _arguments: Any) -> int:
    if result < 0:
        quiet_at_exit()
        raise last_error(result)
    return result


def last_error(code: int) -> errors.PylloyalError:
    """The exception for the last failure on this thread."""
    record = library().pyl_error_last().contents
    message = (record.message or b"").decode("utf-8", "replace")
    failure = errors.Failure(code=code, state=_STATES.get(record.state, "unchanged"), engine_rc=record.engine_rc, partial=bool(record.partial),
                             index=record.index if record.index >= 0 else None, need=record.need if record.need >= 0 else None,
                             have=record.have if record.have >= 0 else None, message=message)
    return _CODES.get(code, errors.InternalKernelError)(message, failure)


def error_of(code: int, message: str, state: int, engine_rc: int, partial: bool) -> errors.PylloyalError:
    """The exception for a failure told in other words than ``pyl_error_last``."""
    failure = errors.Failure(code, _STATES.get(state, "unchanged"), engine_rc, partial, None, None, None, message)
    return _CODES.get(code, errors.InternalKernelError)(message, failure)


def _bind(path: Path, lib: ctypes.CDLL) -> None:
    try:
        found = lib.pyl_abi_version()
    except AttributeError as error:
        raise errors.ABIMismatchError(f"{path} is not libpylloyal: it has no pyl_abi_version. {_HOW}") from error
    if found != capi.ABI_VERSION:
        raise errors.ABIMismatchError(f"{path} speaks ABI version {found}; this package needs {capi.ABI_VERSION}. {_HOW}")
    for name, result, arguments, is_status in capi.PROTOTYPES:
        try:
            function = getattr(lib, name)
        except AttributeError as error:
            raise errors.ABIMismatchError(f"{path} claims ABI version {found} but has no {name}. {_HOW}") from error
        function.restype, function.argtypes = result, arguments
        if is_status:
            function.errcheck = _check


def library() -> Any:
    """The loaded library. The first call loads it; later calls cost a global look-up.

    Raises
    ------
    LibraryNotFoundError, ABIMismatchError
        Nothing is loaded; the next call tries again.
    """
    global _library, _path
    if _library is not None:
        return _library
    with _lock:
        if _library is None:
            said = []
            for path in candidates():
                try:
                    lib = ctypes.CDLL(str(path))
                except OSError as error:
                    said.append(_why(path, error))
                    continue
                _bind(path, lib)
                _path, _library = path, lib
                break
            else:
                raise errors.LibraryNotFoundError("libpylloyal could not be loaded:\n  " + "\n  ".join(said) + f"\n{_HOW}")
    return _library


def library_path() -> Path:
    """Where the loaded library lies; loads it if need be."""
    library()
    assert _path is not None
    return _path


def take_text(call: Any, *arguments: Any) -> bytes:
    """Call a function whose first argument is a ``pyl_text **``, and return the text it made; the text is freed."""
    return take_text_at(call, 0, *arguments)


def take_text_at(call: Any, at: int, *arguments: Any) -> bytes:
    """As :func:`take_text`, with the output at position ``at`` of the arguments."""
    lib = library()
    text = capi.pyl_text_p()
    full = list(arguments)
    full.insert(at, ctypes.byref(text))
    try:  # around the call too: an interrupt may come right after it
        call(*full)
        return ctypes.string_at(lib.pyl_text_data(text), lib.pyl_text_size(text))
    finally:
        lib.pyl_text_free(text)
