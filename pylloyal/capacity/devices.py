"""Where memory is: how much of it there is, how much is free now, and what this process has promised away already.

A number that is not known is None, never a guess. What a process maps or is about to allocate is not in the kernel's books yet, so it is
kept in a registry of this process's claims, and a second plan sees the first. After ``os.fork()`` the registry of the child is empty: it
has none of the parent's handles (:class:`pylloyal.ForkedProcessError`), and the parent is to it a process like any other.
"""
from __future__ import annotations

import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Final, Protocol, Self, runtime_checkable

from ..errors import InsufficientMemoryError, InvalidArgumentError
from .sizes import format_bytes

_NO_LIMIT: Final = 1 << 60  # version 1 says "none" as the largest multiple of a page; no machine has an EiB


@runtime_checkable
class Pool(Protocol):
    """Memory of one kind. Tests and users can give their own."""

    @property
    def name(self) -> str:
        """What people call it."""

    def total(self) -> int | None:
        """Bytes there are; None: not known."""

    def free(self) -> int | None:
        """Bytes that can be had now, this process's claims taken off; None: not known."""

    def claim(self, n_bytes: int, what: str, *, resident: bool = False) -> Claim:
        """Take bytes off what :meth:`free` says, until the claim is released."""


# ------------------------------------------------------------------------------------------------------------- claims

_claims: dict[int, tuple[Hashable, int]] = {}  # number -> (pool, bytes that no other book has)
_numbers = itertools.count()  # goes on in a forked child, so that a claim of the parent names none of the child's
_entering = threading.Lock()  # looking and entering are one step; leaving takes no lock, for the garbage collector may do it anywhere


def _after_fork() -> None:
    global _entering
    _claims.clear()
    _entering = threading.Lock()  # another thread of the parent may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _leave(number: int) -> None:
    _claims.pop(number, None)


def claimed(key: Hashable) -> int:
    """Bytes of one pool that this process has claimed and no other book has."""
    return sum(n for pool, n in list(_claims.values()) if pool == key)


@dataclass(frozen=True, eq=False)
class Claim:
    """Bytes of a pool that are somebody's, until released, left as a ``with`` block, or collected.

    Attributes
    ----------
    pool, what : str
    n_bytes : int
    resident : bool
        The bytes are in the system's own books already, so :meth:`Pool.free` does not take them off again.
    """

    pool: str
    n_bytes: int
    what: str
    resident: bool
    _number: int = field(repr=False)
    _finalizer: weakref.finalize[[int], Claim] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_finalizer", weakref.finalize(self, _leave, self._number))

    @property
    def is_released(self) -> bool:
        """Given back, or made by the process this one was forked from."""
        return self._number not in _claims

    def release(self) -> None:
        """Give the bytes back. Doing it again does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class _Claimable:
    """What every pool here has: a name and claims."""

    def __init__(self, name: str, key: Hashable) -> None:
        self._name, self._key = name, key

    @property
    def name(self) -> str:
        return self._name

    def free(self) -> int | None:
        raise NotImplementedError

    def _is_live(self) -> bool:
        """What is free is read from the system, so that it shows by itself what was written."""
        return True

    def claim(self, n_bytes: int, what: str, *, resident: bool = False) -> Claim:
        """Take bytes off what is free.

        Parameters
        ----------
        n_bytes : int
        what : str
            For people: "weights of tiny.gguf".
        resident : bool
            The bytes have been written: the system counts them as used, and a claim must not count them again. So it is with KV cells and
            recurrent states, which the engine clears when it creates them (``ggml_backend_buffer_clear`` in ``llama_kv_cache`` and
            ``llama_memory_recurrent``), with weights that were read or repacked rather than mapped, or are locked, and with everything
            on an accelerator, whose driver takes memory when it is asked for. It is not so with weights mapped from a file (their pages
            stay "available": the kernel can drop them) nor with a buffer nobody has written to yet: until the first decode a compute
            buffer in RAM is address space and no more. Whoever writes to one claims it anew.

        Raises
        ------
        InsufficientMemoryError
            That much is known not to be free. Looking and claiming are one step: of two threads that want the last bytes, one gets them.
        """
        if isinstance(n_bytes, bool) or not isinstance(n_bytes, int) or n_bytes < 0:
            raise InvalidArgumentError(f"a claim of {n_bytes!r} bytes cannot be")
        with _entering:
            counted = 0 if resident and self._is_live() else n_bytes
            free = self.free() if counted else None
            if free is not None and counted > free:
                error = InsufficientMemoryError(f"{what}: {n_bytes:,} bytes ({format_bytes(n_bytes)}) of {self.name}, and {free:,} ({format_bytes(free)}) are free")
                error.need, error.have = n_bytes, free
                raise error
            claim = Claim(self.name, n_bytes, what, resident, next(_numbers))
            _claims[claim._number] = self._key, counted
        return claim

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class FixedPool(_Claimable):
    """Memory of a size somebody states: "plan as if there were 24 GiB". Claims are all that changes it, resident ones too.

    Parameters
    ----------
    name : str
    total : int or None
        None: not known.
    free : int or None
        Of these; None: not known.
    """

    def __init__(self, name: str, total: int | None, free: int | None) -> None:
        super().__init__(name, object())
        for n in (total, free):
            if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
                raise InvalidArgumentError(f"{name}: {n!r} bytes cannot be")
        if total is not None and free is not None and free > total:
            raise InvalidArgumentError(f"{name}: {free:,} bytes free of {total:,}")
        self._total, self._free = total, free

    def total(self) -> int | None:
        return self._total

    def free(self) -> int | None:
        return None if self._free is None else max(0, self._free - claimed(self._key))

    def _is_live(self) -> bool:
        return False


class DeviceMemory(_Claimable):
    """An accelerator's own memory, as its driver tells it.

    Drivers that cannot tell say 0 of 0, or that all of it is free; neither is believed.

    Parameters
    ----------
    name : str
        Of the device, unique on this machine: pools of one name share their claims.
    read : callable
        Gives (free, total) in bytes, live.
    """

    def __init__(self, name: str, read: Callable[[], tuple[int, int]]) -> None:
        super().__init__(name, ("device", name))
        self._read = read

    def total(self) -> int | None:
        return self._read()[1] or None

    def free(self) -> int | None:
        free, total = self._read()
        return None if total == 0 or free >= total else max(0, free - claimed(self._key))


# ------------------------------------------------------------------------------------------------------------- system memory


def _machine() -> tuple[int, int]:
    """(total, available) of the machine's RAM, swap excluded."""
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


class SystemMemory(_Claimable):
    """RAM this process can have: the machine's, or what its control groups leave of it. Swap is not memory.

    Every group above the process counts, with version 1 and 2. Of what a group has used, file pages that nobody used lately
    (``inactive_file``) can be had again, as the kernel reckons for the whole machine. ``memory.high`` counts as a limit beside
    ``memory.max``: beyond it the kernel stops nobody, but pushes the group's memory out.

    Parameters
    ----------
    root : path
        Where ``proc`` and ``sys`` are; tests give a tree of their own.
    machine : callable
        Gives (total, available) of the machine, live.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and cgroups(7).
    """

    def __init__(self, root: str | os.PathLike[str] = "/", machine: Callable[[], tuple[int, int]] = _machine) -> None:
        self._root = Path(root)
        super().__init__("RAM", ("RAM", str(self._root.absolute())))
        self._machine = machine

    def total(self) -> int | None:
        total = self._machine()[0]
        return min([total, *(limit.most for limit in self._limits())]) if total > 0 else None

    def free(self) -> int | None:
        total, available = self._machine()
        if total <= 0:
            return None
        mine = claimed(self._key)
        left = [available - mine]
        for limit in self._limits():
            # Mapped weights that are in use are active file pages, which a group has in its books and the machine counts as available:
            # claims for them would be taken off twice. How many these are is not told; at most so many:
            seen = min(mine, limit.active_file, self._resident_file_bytes()) if mine else 0
            left.append(limit.most - max(0, limit.used - limit.inactive_file) - (mine - seen))
        return max(0, min(left))

    def _limits(self) -> Iterator[_Limit]:
        paths = _groups(self._root / "proc/self/cgroup")
        for mount in _mounts(self._root / "proc/self/mountinfo"):
            path = paths.get("" if mount.is_v2 else "memory")
            if path is None:
                continue
            top = self._root / mount.point.relative_to("/")
            place = _below(path, mount.root)
            while not (top / place).is_dir() and place.parts:  # moved, or mounted from a namespace where it has another name
                place = place.parent
            for group in (place, *place.parents):
                limit = _limit_v2(top / group) if mount.is_v2 else _limit_v1(top / group)
                if limit is not None:
                    yield limit

    def _resident_file_bytes(self) -> int:
        """File pages this process has mapped and touched."""
        words = _text(self._root / "proc/self/statm").split()
        return int(words[2]) * mmap.PAGESIZE if len(words) > 2 and words[2].isdigit() else 0


@dataclass(frozen=True, slots=True)
class _Limit:
    most: int
    used: int
    inactive_file: int
    active_file: int


@dataclass(frozen=True, slots=True)
class _Mount:
    root: str  # the group that is mounted
    point: PurePosixPath
    is_v2: bool


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # no such group, controller, or system
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no number


def _groups(path: Path) -> dict[str, str]:
    """Controller -> group of this process; "" is version 2's only hierarchy."""
    found: dict[str, str] = {}
    for line in _text(path).splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, group = rest.partition(":")
        if colon and group.startswith("/"):
            found |= dict.fromkeys(controllers.split(","), group)
    return found


def _mounts(path: Path) -> Iterator[_Mount]:
    """Where groups that may limit memory are mounted."""
    for line in _text(path).splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kind) < 3 or not fields[4].startswith("/"):
            continue
        if kind[0] == "cgroup2" or (kind[0] == "cgroup" and "memory" in kind[2].split(",")):
            yield _Mount(_unescaped(fields[3]), PurePosixPath(_unescaped(fields[4])), kind[0] == "cgroup2")


def _unescaped(path: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


def _below(group: str, mounted: str) -> PurePosixPath:
    """A group's place under the mount of another; the mount itself when it is not under it, as in some containers."""
    here = PurePosixPath(group)
    if ".." in here.parts or not here.is_relative_to(mounted):
        return PurePosixPath()
    return here.relative_to(mounted)


def _limit_v2(group: Path) -> _Limit | None:
    limits = [n for name in ("memory.max", "memory.high") if (n := _number(group / name)) is not None and n < _NO_LIMIT]
    used = _number(group / "memory.current")
    if not limits or used is None:
        return None
    facts = _facts(group / "memory.stat")
    return _Limit(min(limits), used, facts.get("inactive_file", 0), facts.get("active_file", 0))


def _limit_v1(group: Path) -> _Limit | None:
    facts = _facts(group / "memory.stat")
    # The second is the least of all groups above, those that a container does not see included.
    limits = [n for n in (_number(group / "memory.limit_in_bytes"), facts.get("hierarchical_memory_limit")) if n is not None and n < _NO_LIMIT]
    used = _number(group / "memory.usage_in_bytes")
    if not limits or used is None:
        return None
    return _Limit(min(limits), used, facts.get("total_inactive_file", 0), facts.get("total_active_file", 0))


def _facts(path: Path) -> dict[str, int]:
    words = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}

