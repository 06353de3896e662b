"""Open a store the careful way: plan it, refuse what does not fit before anything is allocated, and hold the plan against what came of it."""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from .capacity.admission import Admission
from .capacity.budget import Policy
from .capacity.devices import Claim, DeviceMemory, Pool, SystemMemory
from .capacity.footprint import Measured
from .capacity.header import Header
from .capacity.plan import Plan, plan
from .capacity.settings import Settings
from .capacity.weights import HOST
from .errors import InvalidArgumentError
from .kernel.devices import devices as engine_devices
from .kernel.dry_run import DryRun, Memory, dry_run
from .kernel.model import Model
from .kernel.store import Store
from .kernel.system import system_info

EXACT: Final = ("kv_bytes", "recurrent_bytes", "output_bytes", "compute_bytes")  # that a measured plan must meet to the byte


class PlanMismatchWarning(UserWarning):
    """The engine allocated something else than was planned: a bug of ours, and worth a report."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of a plan that did not come true."""

    name: str
    planned: int
    actual: int


class PlannedStore(Store):
    """A store that was planned and admitted. It owns its model: closing it closes both, and gives the memory back to later plans.

    Attributes
    ----------
    plan : Plan
    actual : Memory
        What the engine allocated.
    differences : tuple of Difference
        Between the two; empty, or something is wrong.
    admission : Admission
        The ledger of its cells.
    """

    plan: Plan
    actual: Memory
    differences: tuple[Difference, ...]
    admission: Admission
    _claims: list[Claim]
    _weights: Claim | None = None

    def close(self) -> None:
        super().close()
        self.model._children.discard(self)  # it closes its children first, and this one is
        self.model.close()
        for claim in self._claims:
            claim.release()
        self._weights = None


# The engine has the weights of a file once, however many stores are open on it, so they are claimed once: by (file, layers, pool). Every
# store holds the claim; it goes with the last of them, closed or collected.
_weights: weakref.WeakValueDictionary[tuple[object, ...], Claim] = weakref.WeakValueDictionary()


def _held(key: tuple[object, ...]) -> Claim | None:
    claim = _weights.get(key)
    return None if claim is None or claim.is_released else claim  # released: a parent's, in a forked child


def open(
    path: str | os.PathLike[str], *, context: int | str | None = None, branches: int = 8, batch: int = 512, ubatch: int = 0, kv: str | None = None, kv_k: str | None = None,
    kv_v: str | None = None, swa_full: bool = True, flash_attn: bool = True, rs_seq: int = 0, outputs: int = 0, gpu_layers: int = 0, offload_kqv: bool = True, memory: Pool | int | str | None = None,
    devices: Sequence[Pool] | None = None, mmproj: str | os.PathLike[str] | None = None, image: str | Sequence[str] = (), clip: str | Sequence[str] = (), policy: Policy | None = None,
    threads: int | None = None, deterministic: bool = False,
) -> PlannedStore:
    """Open a model and a store on it, if both fit; refuse before anything is allocated if not.

    Parameters
    ----------
    path : path
        A GGUF file.
    devices : sequence of Pool, optional
        Accelerators; None: those the engine finds, as far as it knows their memory.
    threads, deterministic
        As for :class:`Store`.
    context, branches, ... policy
        As for :func:`pylloyal.plan`.

    Returns
    -------
    PlannedStore

    Raises
    ------
    InsufficientMemoryError, UnknownMemoryError
        It does not fit, or nobody can say; nothing was allocated. ``remedies`` are settings that would do.
    MetadataError, InvalidArgumentError, OSError
        As for :func:`pylloyal.plan`.
    KernelError
        The engine refused; nothing stays open.

    Warns
    -----
    PlanMismatchWarning
        The engine allocated something else than was planned.

    Cost: the plan and one dry run of the engine (remembered on disk), and loading.
    """
    if gpu_layers and devices is None:
        devices = [DeviceMemory(device.name, _reader(device.name)) for device in engine_devices() if device.kind in ("gpu", "igpu")]
        if not devices:
            raise InvalidArgumentError(f"{gpu_layers} layers on accelerators, and the library finds none")
    pool = memory if memory is not None and not isinstance(memory, (int, str)) else None
    if memory is None:
        pool = SystemMemory()
    key = (os.path.realpath(path), gpu_layers, "RAM" if isinstance(pool, SystemMemory) else pool)
    wishes: dict[str, Any] = {
        "context": context, "branches": branches, "batch": batch, "ubatch": ubatch, "kv": kv, "kv_k": kv_k, "kv_v": kv_v, "swa_full": swa_full, "flash_attn": flash_attn, "rs_seq": rs_seq,
        "outputs": outputs, "gpu_layers": gpu_layers, "offload_kqv": offload_kqv, "threads": threads,
        "memory": pool if pool is not None else memory, "devices": tuple(devices or ()), "mmproj": mmproj, "image": image, "clip": clip, "policy": policy,
        "shares_weights": _held(key) is not None}
    ask = _Asker(path, tuple(p.name for p in devices or ()))
    found = plan(path, **wishes)
    wants = int(found.windows.requested.tokens) or int(found.windows.ceiling.tokens)
    if found.binding or int(found.windows.served.tokens) < min(wants, int(found.windows.ceiling.tokens)):
        found = plan(path, **wishes, measure=ask)  # the bound on compute buffers is what may be in the way
    else:
        found = replace(found, demand=found.demand.asking(ask))
    found.require()
    with contextlib.ExitStack() as undo:
        claims: list[Claim] = []
        if pool is not None:
            planned = undo.enter_context(pool.claim(sum(line.bytes for line in found.lines if line.device == HOST), f"opening {found.model}"))
            store = _open(path, found, threads, deterministic)
            undo.push(lambda *_: store.close())
            planned.release()
            claims = [pool.claim(n, f"{kind} of {found.model}", resident=is_resident) for kind, n, is_resident in _kept(found)]
            mapped = found.demand.weights.by_device.get(HOST, 0)
            store._weights = _weights[key] = _held(key) or pool.claim(mapped, f"weights of {found.model}")
        else:
            store = _open(path, found, threads, deterministic)
            undo.push(lambda *_: store.close())
        store._claims, store.plan = claims, found
        store.actual = store.memory()
        store.differences = compare(found, store.actual)
        for difference in store.differences:
            warnings.warn(f"{found.model}: {difference.name} was planned as {difference.planned:,} and is {difference.actual:,}", PlanMismatchWarning, stacklevel=2)
        floor = min(store.actual.n_batch, store.actual.n_ctx)
        store.admission = Admission(store.actual.n_ctx, lambda: store.pressure().cells_used, hard_floor=floor, soft_floor=max(floor, min(store.actual.n_ctx, store.actual.n_ctx // 10)),
                                    holders=lambda: [(repr(branch), branch.cells_own) for branch in store.branches()])
        undo.pop_all()
        return store


def _open(path: str | os.PathLike[str], found: Plan, threads: int | None, deterministic: bool) -> PlannedStore:
    s = found.settings
    model = Model(path, gpu_layers=s.gpu_layers)
    try:
        store = PlannedStore(model, n_threads=threads, deterministic=deterministic, **options(found.n_ctx, s))
    except BaseException:
        model.close()
        raise
    store._claims = []
    return store


def options(n_ctx: int, s: Settings) -> dict[str, Any]:
    """Settings as :class:`Store` takes them."""
    return {"n_ctx": n_ctx, "n_branches": s.n_branches, "n_batch": s.n_batch, "n_ubatch": s.n_ubatch or None, "flash_attn": s.flash_attn, "type_k": s.type_k, "type_v": s.type_v,
            "swa_full": s.swa_full, "n_rs_seq": s.n_rs_seq, "n_outputs": s.n_outputs or None, "offload_kqv": s.offload_kqv}


def _reader(name: str) -> Any:
    def read() -> tuple[int, int]:
        for device in engine_devices():
            if device.name == name:
                total = device.total_bytes or 0
                return total if device.free_bytes is None else device.free_bytes, total  # all of it free is what not known looks like
        return 0, 0

    return read


def _kept(found: Plan) -> list[tuple[str, int, bool]]:
    """(what, bytes, whether the system has them in its books already) of what an open store takes of the host."""
    host = [line for line in found.lines if line.device == HOST]
    written = sum(line.bytes for line in host if line.kind in ("kv", "recurrent", "output"))
    mapped = sum(line.bytes for line in host if line.kind == "projector")
    later = sum(line.bytes for line in host if line.kind in ("compute", "other"))
    return [("cells", written, True), ("projector", mapped, False), ("compute buffers", later, False)]


def compare(found: Plan, actual: Memory) -> tuple[Difference, ...]:
    """What of a plan did not come true: exact and measured figures must be met, bounds must hold."""
    totals, known = found.totals, {line.kind: line.known for line in found.lines}
    rows = [(name, getattr(found.context, name), getattr(actual, name), "exact") for name in ("n_ctx", "n_ctx_seq", "n_batch", "n_ubatch", "n_seq_max")]
    rows += [(name, totals[name], getattr(actual, name), known.get(name.removesuffix("_bytes"), "exact")) for name in EXACT]
    return tuple(Difference(name, planned, real) for name, planned, real, how in rows if (real > planned if how == "bound" else real != planned))


# ------------------------------------------------------------------------------------------------------- asking the engine


def ask_engine(path: str | os.PathLike[str], n_ctx: int, s: Settings) -> DryRun:
    """The engine's own figures for these settings; nothing is allocated.

    Cost: what the engine takes to read the header and vocabulary, and to lay out a graph.
    """
    return dry_run(path, gpu_layers=s.gpu_layers, kv_unified=s.unified, **options(n_ctx, s))


class _Asker:
    """Compute buffers as the engine lays them out, remembered in this process and on disk."""

    def __init__(self, path: str | os.PathLike[str], names: tuple[str, ...]) -> None:
        self._path, self._names = path, names
        self._known: dict[tuple[int, Settings], Measured] = {}
        self._digest = Header(path).digest()

    def __call__(self, n_ctx: int, s: Settings) -> Measured:
        key = (n_ctx, s)
        if key not in self._known:
            self._known[key] = self._remembered(n_ctx, s)
        return self._known[key]

    def _remembered(self, n_ctx: int, s: Settings) -> Measured:
        info = system_info()
        engine, found = info["engine"], [[device["name"], device["description"]] for device in info["devices"]]  # used without any layers on them, too
        words = json.dumps([self._digest, n_ctx, [getattr(s, name) for name in s.__slots__], engine["commit"], engine["cpu"], self._names, found], sort_keys=True)
        file = _cache() / f"{hashlib.blake2b(words.encode(), digest_size=16).hexdigest()}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return Measured({int(device): int(n) for device, n in json.loads(file.read_text())["compute"].items()})
        ran = ask_engine(self._path, n_ctx, s)
        compute: dict[int, int] = {}
        for row in ran.rows:
            device = HOST if row.is_host or row.device not in self._names else self._names.index(row.device)
            compute[device] = compute.get(device, 0) + row.compute_bytes
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps({"compute": compute}))
            partial.replace(file)
        return Measured(compute)


def _cache() -> Path:
    base = os.environ.get("PYLLOYAL_CACHE_DIR") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "pylloyal")
    return Path(base) / "dry-runs"
