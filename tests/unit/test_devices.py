"""Pools of memory: what is free, read from fake machines and this one, and the claims that keep two plans apart."""
from __future__ import annotations

import gc
import itertools
import mmap
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pylloyal import opening
from pylloyal.capacity import devices
from pylloyal.capacity.devices import Claim, DeviceMemory, FixedPool, Pool, SystemMemory
from pylloyal.errors import InsufficientMemoryError, InvalidArgumentError
from pylloyal.kernel.devices import Device

GIB = 1 << 30
V1_NONE = 9223372036854771712  # PAGE_COUNTER_MAX, "no limit" of version 1


@pytest.fixture(autouse=True)
def no_claims() -> Iterator[None]:
    gc.collect()
    assert not devices._claims
    yield
    gc.collect()
    assert not devices._claims, "a test left a claim"


class Machine:
    """A tree of proc and sys, and the RAM of the machine."""

    def __init__(self, root: Path, total: int = 64 * GIB, available: int = 48 * GIB) -> None:
        self.root, self.total, self.available = root, total, available
        (root / "proc/self").mkdir(parents=True)
        self.mounts: list[str] = ["22 27 0:21 / /proc rw,relatime - proc proc rw", "a line that is no mount"]

    def mount(self, kind: str, point: str = "/sys/fs/cgroup", root: str = "/", options: str = "rw") -> None:
        self.mounts.append(f"31 23 0:28 {root} {point} rw,relatime shared:9 - {kind} {kind} {options}")
        self.write("proc/self/mountinfo", "\n".join(self.mounts) + "\n")
        (self.root / point.replace("\\040", " ")[1:]).mkdir(parents=True, exist_ok=True)

    def group(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "\n".join(lines) + "\n")

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n" if not isinstance(text, str) else text)

    def v2(self, path: str, most: object, used: int, inactive: int = 0, active: int = 0, high: object = "max", at: str = "sys/fs/cgroup") -> None:
        self.write(f"{at}/{path}/memory.max", f"{most}\n")
        self.write(f"{at}/{path}/memory.high", f"{high}\n")
        self.write(f"{at}/{path}/memory.current", used)
        self.write(f"{at}/{path}/memory.stat", f"anon 1\nactive_file {active}\ninactive_file {inactive}\nworkingset 2 3\n")

    def v1(self, path: str, most: int, used: int, inactive: int = 0, least: int = V1_NONE, at: str = "sys/fs/cgroup/memory") -> None:
        self.write(f"{at}/{path}/memory.limit_in_bytes", most)
        self.write(f"{at}/{path}/memory.usage_in_bytes", used)
        self.write(f"{at}/{path}/memory.stat", f"inactive_file 7\nhierarchical_memory_limit {least}\ntotal_inactive_file {inactive}\ntotal_active_file 0\n")

    def memory(self) -> SystemMemory:
        return SystemMemory(self.root, lambda: (self.total, self.available))

    @property
    def says(self) -> tuple[int | None, int | None]:
        memory = self.memory()
        return memory.total(), memory.free()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# ------------------------------------------------------------------------------------------------------------- system memory

def test_no_groups_is_the_machine(machine: Machine) -> None:
    assert machine.says == (64 * GIB, 48 * GIB)


def test_swap_is_not_memory() -> None:
    """The real reader, against psutil: total to the byte, free no more than RAM alone could give."""
    memory = SystemMemory()
    total = memory.total()
    assert total is not None and total <= psutil.virtual_memory().total
    assert devices._machine()[0] == psutil.virtual_memory().total
    free = memory.free()
    assert free is not None and 0 < free <= total


def test_version_2_with_every_ancestor(machine: Machine) -> None:
    machine.mount("cgroup2")
    machine.group("0::/user/app/worker")
    machine.v2("user/app/worker", "max", 2 * GIB)
    machine.v2("user/app", 16 * GIB, 10 * GIB, inactive=3 * GIB)
    machine.v2("user", 12 * GIB, 11 * GIB)
    machine.v2("elsewhere", GIB, GIB)
    assert machine.says == (12 * GIB, GIB)
    machine.v2("user", "max", 11 * GIB)
    assert machine.says == (16 * GIB, 9 * GIB)
    machine.v2("user/app/worker", 4 * GIB, 2 * GIB, inactive=GIB)
    assert machine.says == (4 * GIB, 3 * GIB)
    machine.v2("user/app/worker", 4 * GIB, 5 * GIB)  # lowered under what is used
    assert machine.says == (4 * GIB, 0)


def test_no_limit_is_the_machine(machine: Machine) -> None:
    machine.mount("cgroup2")
    machine.group("0::/app")
    machine.v2("app", "max", 60 * GIB)
    assert machine.says == (64 * GIB, 48 * GIB)
    machine.v2("app", 1 << 50, 60 * GIB)  # a limit beyond the machine limits nothing
    assert machine.says == (64 * GIB, 48 * GIB)


def test_memory_high_is_a_limit(machine: Machine) -> None:
    machine.mount("cgroup2")
    machine.group("0::/app")
    machine.v2("app", 16 * GIB, GIB, high=8 * GIB)
    assert machine.says == (8 * GIB, 7 * GIB)


def test_used_less_than_inactive_never_gives_more_than_the_limit(machine: Machine) -> None:
    machine.mount("cgroup2")
    machine.group("0::/app")
    machine.v2("app", 8 * GIB, GIB, inactive=2 * GIB)  # two files, read one after the other
    assert machine.says == (8 * GIB, 8 * GIB)


def test_a_container_that_sees_its_own_group_as_the_top(machine: Machine) -> None:
    machine.mount("cgroup2")
    machine.group("0::/")
    machine.v2("", 6 * GIB, 2 * GIB)
    assert machine.says == (6 * GIB, 4 * GIB)


def test_a_container_without_its_own_namespace(machine: Machine) -> None:
    """The group's name is the host's, and only that group is mounted."""
    machine.mount("cgroup2", root="/docker/abc")
    machine.group("0::/docker/abc/inner")
    machine.v2("", 6 * GIB, 2 * GIB)
    machine.v2("inner", 3 * GIB, GIB)
    machine.v2("docker/abc/inner", GIB, GIB)  # the name must not be looked up from the top
    assert machine.says == (3 * GIB, 2 * GIB)


@pytest.mark.parametrize("group", ["/../outside", "/moved/away", "/docker"])
def test_a_group_that_is_not_below_the_mount_is_limited_by_the_mount(machine: Machine, group: str) -> None:
    machine.mount("cgroup2", root="/docker/abc" if group == "/docker" else "/")
    machine.group(f"0::{group}")
    machine.v2("", 6 * GIB, 2 * GIB)
    assert machine.says == (6 * GIB, 4 * GIB)


def test_version_1(machine: Machine) -> None:
    machine.mount("cgroup", "/sys/fs/cgroup/cpu", options="rw,cpu")
    machine.mount("cgroup", "/sys/fs/cgroup/memory", options="rw,memory")
    machine.group("5:cpu,cpuacct:/other", "4:memory:/jobs/one", "0::/")
    machine.v1("", V1_NONE, 60 * GIB)
    machine.v1("jobs", 20 * GIB, 18 * GIB, inactive=GIB)
    machine.v1("jobs/one", V1_NONE, GIB)
    machine.v1("other", GIB, GIB)
    assert machine.says == (20 * GIB, 3 * GIB)
    machine.v1("jobs/one", V1_NONE, GIB, least=2 * GIB)  # a group above that is not to be seen
    assert machine.says == (2 * GIB, GIB)
    machine.v1("jobs", V1_NONE, 18 * GIB)
    machine.v1("jobs/one", V1_NONE, GIB)
    assert machine.says == (64 * GIB, 48 * GIB)


def test_both_versions_at_once(machine: Machine) -> None:
    """The hybrid layout: version 2 is mounted without a memory controller."""
    machine.mount("cgroup", "/sys/fs/cgroup/memory", options="rw,memory")
    machine.mount("cgroup2", "/sys/fs/cgroup/unified")
    machine.group("4:memory:/a", "0::/b")
    machine.v1("a", 5 * GIB, GIB)
    (machine.root / "sys/fs/cgroup/unified/b").mkdir(parents=True)
    assert machine.says == (5 * GIB, 4 * GIB)


def test_a_mount_point_with_a_space(machine: Machine) -> None:
    machine.mount("cgroup2", "/sys/my\\040groups")
    machine.group("0::/app")
    machine.v2("app", 5 * GIB, GIB, at="sys/my groups")
    assert machine.says == (5 * GIB, 4 * GIB)


@pytest.mark.parametrize("text", ["", "max", "many\n", "-1\n", "\xff\xfe"])
def test_nonsense_in_a_group_is_no_limit(machine: Machine, text: str) -> None:
    machine.mount("cgroup2")
    machine.group("0::/app", "nonsense", "::", "3:memory")
    machine.v2("app", GIB, GIB)
    machine.write("sys/fs/cgroup/app/memory.max", text)
    assert machine.says == (64 * GIB, 48 * GIB)


def test_a_machine_that_does_not_say_is_unknown(tmp_path: Path) -> None:
    memory = SystemMemory(tmp_path, lambda: (0, 0))
    assert (memory.total(), memory.free()) == (None, None)


# ------------------------------------------------------------------------------------------------------------- claims

def test_a_second_plan_sees_the_first(machine: Machine) -> None:
    with machine.memory().claim(40 * GIB, "weights") as claim:
        assert (claim.n_bytes, claim.pool, claim.what, claim.resident, claim.is_released) == (40 * GIB, "RAM", "weights", False, False)
        assert machine.says == (64 * GIB, 8 * GIB)
        with pytest.raises(InsufficientMemoryError, match="other weights.*are free") as caught:
            machine.memory().claim(9 * GIB, "other weights")
        assert (caught.value.need, caught.value.have, caught.value.binding) == (9 * GIB, 8 * GIB, "memory")
        assert machine.says == (64 * GIB, 8 * GIB), "a refused claim took something"
        machine.memory().claim(8 * GIB, "what is left").release()
    assert claim.is_released
    assert machine.says == (64 * GIB, 48 * GIB)
    claim.release()
    assert machine.says == (64 * GIB, 48 * GIB)


def test_resident_bytes_are_in_the_books_already(machine: Machine) -> None:
    machine.available = GIB
    with machine.memory().claim(40 * GIB, "cells, written", resident=True) as claim:  # more than is free: they are what is not
        assert claim.resident and machine.says == (64 * GIB, GIB)


def test_mapped_weights_in_use_are_not_taken_off_twice(machine: Machine) -> None:
    """Once read they are active file pages: used in the group's books, available in the machine's."""
    machine.mount("cgroup2")
    machine.group("0::/app")
    machine.v2("app", 16 * GIB, 2 * GIB)
    with machine.memory().claim(8 * GIB, "weights"):
        assert machine.says[1] == 6 * GIB  # nothing read yet
        machine.v2("app", 16 * GIB, 5 * GIB, inactive=3 * GIB)  # read once
        assert machine.says[1] == 6 * GIB
        machine.write("proc/self/statm", f"9 9 {8 * GIB // mmap.PAGESIZE} 0 0 0 0\n")
        machine.v2("app", 16 * GIB, 10 * GIB, active=8 * GIB)  # in use
        assert machine.says[1] == 6 * GIB
        machine.v2("app", 16 * GIB, 7 * GIB, active=5 * GIB)  # 3 of 8 not read, or dropped again
        assert machine.says[1] == 6 * GIB
        machine.write("proc/self/statm", "9 9 0 0 0 0 0\n")  # the active pages are somebody else's
        machine.v2("app", 16 * GIB, 7 * GIB, active=5 * GIB)
        assert machine.says[1] == GIB


def test_a_claim_nobody_holds_is_no_claim(machine: Machine) -> None:
    claim = machine.memory().claim(GIB, "dropped")
    assert machine.says[1] == 47 * GIB
    del claim
    gc.collect()
    assert machine.says[1] == 48 * GIB


def test_a_claim_cannot_be_changed(machine: Machine) -> None:
    with machine.memory().claim(1, "x") as claim, pytest.raises(AttributeError):
        claim.n_bytes = 0  # type: ignore[misc]


@pytest.mark.parametrize("n", [-1, True, 1.5, "1"])
def test_claims_are_counts(n: int) -> None:
    with pytest.raises(InvalidArgumentError):
        FixedPool("test", GIB, GIB).claim(n, "x")


def test_a_stated_size() -> None:
    pool = FixedPool("24 GiB", 24 * GIB, 20 * GIB)
    assert isinstance(pool, Pool) and (pool.name, pool.total(), pool.free()) == ("24 GiB", 24 * GIB, 20 * GIB)
    with pool.claim(5 * GIB, "weights"), pool.claim(3 * GIB, "cells", resident=True):  # no other book has the second
        assert pool.free() == 12 * GIB
        assert FixedPool("24 GiB", 24 * GIB, 20 * GIB).free() == 20 * GIB  # another pool, whatever its name
    assert pool.free() == 20 * GIB
    for total, free in ((-1, 0), (GIB, -1), (GIB, 2 * GIB), (True, 1), (1.5, 1)):
        with pytest.raises(InvalidArgumentError):
            FixedPool("nonsense", total, free)  # type: ignore[arg-type]


def test_unknown_stays_unknown() -> None:
    pool = FixedPool("unknown", None, None)
    with pool.claim(GIB, "on trust"):
        assert (pool.total(), pool.free()) == (None, None)


def test_an_accelerator_that_cannot_tell_is_unknown() -> None:
    says = [(0, 0)]
    pool = DeviceMemory("GPU0", lambda: says[0])
    assert (pool.total(), pool.free()) == (None, None)
    says[0] = (8 * GIB, 8 * GIB)  # nothing is ever all free
    assert (pool.total(), pool.free()) == (8 * GIB, None)
    says[0] = (6 * GIB, 8 * GIB)
    with pool.claim(GIB, "to be allocated"), pool.claim(3 * GIB, "allocated", resident=True):
        assert (pool.total(), pool.free()) == (8 * GIB, 5 * GIB)
        assert DeviceMemory("GPU0", lambda: says[0]).free() == 5 * GIB
        assert DeviceMemory("GPU1", lambda: says[0]).free() == 6 * GIB
    says[0] = (0, 8 * GIB)
    assert pool.free() == 0  # full is not unknown


@pytest.mark.parametrize("says", [None, 3 * GIB])
def test_what_the_engine_does_not_know_of_a_device_is_not_taken_for_none_left(monkeypatch: pytest.MonkeyPatch, says: int | None) -> None:
    monkeypatch.setattr("pylloyal.opening.engine_devices", lambda: [Device("Vulkan0", "a device", "gpu", "Vulkan", says, 8 * GIB)])
    pool = DeviceMemory("Vulkan0", opening._reader("Vulkan0"))
    assert (pool.total(), pool.free()) == (8 * GIB, says)
    assert DeviceMemory("Vulkan1", opening._reader("Vulkan1")).total() is None  # gone


# ------------------------------------------------------------------------------------------------------------- threads, collection, fork

def test_looking_and_claiming_are_one_step(tmp_path: Path) -> None:
    """While one claim looks, no other can."""
    seen = []

    def machine() -> tuple[int, int]:
        seen.append(devices._entering.locked())
        return GIB, GIB

    memory = SystemMemory(tmp_path, machine)
    with memory.claim(1, "x"):
        memory.free()
    assert seen == [True, False]


def test_of_many_threads_no_two_get_the_same_bytes() -> None:
    pool, got = FixedPool("small", 50, 50), []
    start = threading.Barrier(8)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def take() -> None:
        start.wait()
        for _ in range(40):
            try:
                got.append(pool.claim(1, "a byte"))
            except InsufficientMemoryError:
                break

    try:
        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert (len(got), pool.free(), len({claim._number for claim in got})) == (50, 0, 50)
    for claim in got:
        claim.release()
    assert pool.free() == 50


def test_a_claim_may_be_collected_while_another_is_made(tmp_path: Path) -> None:
    """The collector may run anywhere, so releasing takes no lock."""
    kept: list[Claim] = []

    def machine() -> tuple[int, int]:
        kept.clear()
        gc.collect()
        return GIB, GIB

    memory = SystemMemory(tmp_path, machine)
    kept.append(FixedPool("other", 9, 9).claim(9, "old"))
    with memory.claim(GIB, "new"):
        assert len(devices._claims) == 1


FORK = """
import itertools, os, sys, threading, warnings
warnings.simplefilter("ignore")
from pylloyal.capacity.devices import SystemMemory
inside, go_on, calls = threading.Event(), threading.Event(), itertools.count()

def machine():
    if next(calls) == 1:  # the thread's: it holds the lock while the process forks
        inside.set()
        go_on.wait()
    return 100, 100

memory = SystemMemory({root!r}, machine)
first = memory.claim(60, "the parent's")
thread = threading.Thread(target=lambda: memory.claim(10, "the thread's").release())
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    assert memory.free() == 100, memory.free()
    assert first.is_released
    own = memory.claim(70, "the child's")
    first.release()
    assert memory.free() == 30, memory.free()
    own.release()
    os._exit(0 if memory.free() == 100 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
go_on.set()
thread.join()
assert memory.free() == 40, memory.free()
print("fine")
"""


def test_a_forked_child_has_no_claims_and_no_foreign_lock(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORK.format(root=str(tmp_path))], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_numbers_of_claims_are_never_used_again() -> None:
    pool = FixedPool("pool", 9, 9)
    numbers = []
    for _ in range(3):
        with pool.claim(1, "x") as claim:
            numbers.append(claim._number)
    assert all(a < b for a, b in itertools.pairwise(numbers))


def test_psutil_is_loaded_when_it_is_asked() -> None:
    code = "import sys, pylloyal.capacity.devices as d; m = d.SystemMemory(); assert 'psutil' not in sys.modules; assert m.total() > 0; assert 'psutil' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
