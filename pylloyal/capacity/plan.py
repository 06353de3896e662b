"""What fits, why, and what would help: computed from headers before anything is loaded.

A plan is a record, not a wish: it holds the machine as it was when it was made, every byte with how it is known, and either "fits" or a
refusal with the numbers that made it one. :meth:`Plan.require` turns the latter into an exception; nothing here allocates.
"""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

from ..errors import InsufficientMemoryError, InvalidArgumentError, MetadataError, UnknownMemoryError
from .budget import Budget, Policy
from .devices import FixedPool, Pool, SystemMemory
from .footprint import Demand, Known, Line, Measure
from .geometry import Geometry, geometry
from .header import Header
from .remedies import Remedy, find_remedies
from .search import CAP, largest, shortfall
from .settings import CELL_GRAIN, Context, Settings, padded
from .sizes import format_bytes, parse_bytes
from .weights import HOST
from .windows import Advice, Bound, Window, Windows

SCHEMA: Final = 1  # of the JSON form; a reader may rely on the keys docs/capacity.md names
Verdict = Literal["fits", "refused"]


@dataclass(frozen=True)
class Plan:
    """What was found.

    Attributes
    ----------
    model : str
        Name of the file, or of the architecture.
    demand : Demand
        The model and settings.
    budgets : tuple of Budget
        Devices, the host first.
    windows : Windows
    n_ctx : int
        The context the ledger is of: the one that would be served, or, in a refusal, the one that was wanted.
    binding : str
        In a refusal, what it is for; "" otherwise.
    why : str
        The same in words.
    policy : Policy
    media : tuple of (str, int)
        Pictures and clips that are to fit, with the cells each takes.
    notes : tuple of str
        What a reader should know beside the numbers.
    """

    model: str
    demand: Demand
    budgets: tuple[Budget, ...]
    windows: Windows
    n_ctx: int
    binding: Bound | Literal[""]
    why: str
    policy: Policy
    media: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return "refused" if self.binding else "fits"

    @property
    def geometry(self) -> Geometry:
        return self.demand.geometry

    @property
    def settings(self) -> Settings:
        return self.demand.settings

    @cached_property
    def context(self) -> Context:
        """As the engine would create it."""
        return self.demand.context(self.n_ctx)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """What is taken, and nothing else."""
        return self.demand.lines(self.n_ctx)

    @cached_property
    def ledger(self) -> tuple[Line, ...]:
        """Every byte of every device: it sums to their totals exactly. In a refusal what is left over is below zero."""
        out: list[Line] = []
        for budget in self.budgets:
            own = [line for line in self.lines if line.device == budget.device]
            if not budget.is_known:
                out += own
                continue
            others = [("used by others", budget.used_by_others), ("reserve", budget.reserve), ("headroom", budget.headroom)]
            out += [Line(name, budget.device, n, "exact" if name != "used by others" else "measured", "other") for name, n in others]
            out += own
            out.append(Line("left over", budget.device, budget.bytes - sum(line.bytes for line in own), "bound" if any(line.known == "bound" for line in own) else "exact", "other"))
        return tuple(out)

    @property
    def totals(self) -> dict[str, int]:
        """Bytes by kind, all devices together."""
        return {f"{kind}_bytes": sum(line.bytes for line in self.lines if line.kind == kind) for kind in ("kv", "recurrent", "compute", "output", "weights", "projector")}

    @property
    def need(self) -> int:
        """Bytes taken, all devices together."""
        return sum(line.bytes for line in self.lines)

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """What would give the context that was wanted, or the longest one; each opens when it is followed."""
        return find_remedies(self.demand, self.budgets, int(self.windows.requested.tokens) or self._wanted(), int(self.windows.ceiling.tokens))

    def _wanted(self) -> int:
        ceiling = int(self.windows.ceiling.tokens)
        return min(self.policy.least_tokens, ceiling) if self.binding else ceiling

    def require(self) -> Plan:
        """This plan, if it fits.

        Raises
        ------
        InsufficientMemoryError
            It does not; ``need``, ``have``, ``binding``, ``largest`` and ``remedies`` say what, how much and what would help.
        UnknownMemoryError
            What a device has free is not known.
        """
        if not self.binding:
            return self
        if self.binding == "UNKNOWN":
            raise UnknownMemoryError(self.why)
        error = InsufficientMemoryError(self.why)
        tight = min(self.budgets, key=lambda budget: budget.bytes - self._on(budget.device))
        error.need, error.have = self._on(tight.device), tight.bytes
        error.binding, error.largest = self.binding, int(self.windows.served.tokens)
        error.remedies = tuple(str(remedy) for remedy in self.remedies)
        raise error

    def _on(self, device: int) -> int:
        return sum(line.bytes for line in self.lines if line.device == device)

    def device_name(self, device: int) -> str:
        return next((budget.name for budget in self.budgets if budget.device == device), "RAM" if device == HOST else f"device {device}")

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON can say it; the keys are documented in docs/capacity.md."""
        made, s = self.context, self.settings
        return {
            "schema": SCHEMA, "model": self.model, "architecture": self.geometry.architecture, "verdict": self.verdict, "binding": self.binding, "why": self.why,
            "windows": self.windows.to_json() | {"requested": self.windows.requested.to_json() | {"tokens": int(self.windows.requested.tokens) or None}},
            "context": {name: getattr(made, name) for name in ("n_ctx", "n_ctx_seq", "n_batch", "n_ubatch", "n_seq_max", "kv_cells", "swa_cells")},
            "totals": self.totals,
            "ledger": [{"name": line.name, "device": self.device_name(line.device), "bytes": line.bytes, "known": line.known} for line in self.ledger],
            "devices": [{"name": b.name, "total_bytes": b.total, "free_bytes": b.free, "budget_bytes": b.bytes if b.is_known else None} for b in self.budgets],
            "layers": {"n_layer": self.geometry.n_layer, "by_device": {self.device_name(d): [i for i, at in enumerate(self.demand.placement.layers) if at == d] for d in self.demand.placement.devices},
                       "output": self.device_name(self.demand.placement.output)},
            "settings": {name: getattr(s, name) for name in s.__slots__},
            "media": [{"what": what, "cells": cells} for what, cells in self.media],
            "remedies": [remedy.to_json() for remedy in self.remedies],
            "notes": list(self.notes),
        }


def plan(
    model: str | os.PathLike[str] | Mapping[str, Any], *, context: int | str | None = None, branches: int = 8, batch: int = 512, ubatch: int = 0, kv: str | None = None,
    kv_k: str | None = None, kv_v: str | None = None, swa_full: bool = True, flash_attn: bool = True, unified: bool = True, rs_seq: int = 0, outputs: int = 0, gpu_layers: int = 0,
    offload_kqv: bool = True, threads: int | None = None, memory: Pool | int | str | None = None, devices: Sequence[Pool] = (), mmproj: str | os.PathLike[str] | None = None,
    image: str | Sequence[str] = (), clip: str | Sequence[str] = (), beside: Sequence[Plan] = (), policy: Policy | None = None, measure: Measure | None = None,
    shares_weights: bool = False,
) -> Plan:
    """Say from a model's header what a context would take and what fits. Opens no library and allocates nothing.

    Parameters
    ----------
    model : path or Mapping
        A GGUF file, the first of a split model, or the keys of a header: then the weights are not counted, for keys do not tell them.
    context : int, str or None
        Tokens wanted, "32k" for 32,768; None: as many as the model is trained for and memory allows.
    branches, batch, ubatch : int
        Branches alive at once; tokens of a call and of a dispatch (0: the same).
    kv : str
        Type of the cells, "f16" unless said; ``kv_k`` and ``kv_v`` for K and V apart.
    swa_full, flash_attn, unified, rs_seq, outputs, gpu_layers, offload_kqv, threads
        As in :class:`.Settings`.
    memory : Pool, int, str or None
        System memory: a pool, bytes, "24GiB"; None: this machine's, control groups and other claims of this process taken off.
    devices : sequence of Pool
        Accelerators, in the engine's order.
    mmproj : path, optional
        A projector to be open beside the model.
    image, clip : str or sequence of str
        Pictures ("1024x768") and clips ("30s@2fps", with a size: "30s@2fps:640x360") that are to fit beside the text.
    beside : sequence of Plan
        What is to be open at the same time, a draft model for instance: a second context is a second set of everything.
    policy : Policy, optional
    measure : callable, optional
        Asks the engine for its compute buffers in place of the bound; see ``pylloyal.open``.
    shares_weights : bool
        The same file is open already in this process, with the same layers on the same devices: its weights are there once.

    Returns
    -------
    Plan

    Raises
    ------
    MetadataError
        The header is damaged, or what its memory takes is not known.
    InvalidArgumentError
        A parameter is none, or the engine would refuse it for this model.
    OSError
        The file cannot be read.

    Cost: milliseconds; the header is mapped, and no string of its vocabulary is built.
    """
    metadata = model if isinstance(model, Mapping) else Header(model)
    shape = geometry(metadata)
    settings = Settings(branches, batch, ubatch, kv_k or kv or "f16", kv_v or kv or "f16", swa_full, flash_attn, unified, rs_seq, outputs, gpu_layers, offload_kqv, threads or 0)
    conflict = settings.conflicts(shape)
    if conflict:
        raise InvalidArgumentError(conflict)
    policy = policy or Policy()
    pools = (_system(memory), *devices)
    budgets = tuple(Budget.of(number, pool, policy) for number, pool in zip(range(HOST, len(devices)), pools, strict=True))
    shares = [budget.free or 0 for budget in budgets[1:]]
    if gpu_layers and not devices:
        raise InvalidArgumentError(f"{gpu_layers} layers on accelerators, and no accelerator is given")
    extras, media = _media(mmproj, [image] if isinstance(image, str) else image, [clip] if isinstance(clip, str) else clip, flash_attn=flash_attn)
    extras += _others(beside)
    demand = Demand.of(shape, metadata, settings, shares if any(shares) else [1] * len(shares), extras, measure, shares_weights=shares_weights)
    notes = [] if isinstance(metadata, Header) else ["the weights are not in it: keys alone do not tell them"]
    request = parse_tokens(context)
    if request > shape.n_ctx_train:
        notes.append(f"{request:,} tokens were asked for, and the model is trained for {shape.n_ctx_train:,}")
    name = os.path.basename(os.fspath(model)) if not isinstance(model, Mapping) else str(metadata.get("general.name", shape.architecture))
    return _decide(name, demand, budgets, request, policy, media, tuple(notes))


def _media(mmproj: str | os.PathLike[str] | None, images: Sequence[str], clips: Sequence[str], *, flash_attn: bool) -> tuple[tuple[Line, ...], tuple[tuple[str, int], ...]]:
    """Lines of a projector, and cells of what it shows."""
    if mmproj is None:
        if images or clips:
            raise InvalidArgumentError("pictures and clips need a projector to be seen with: mmproj")
        return (), ()
    from .media import media_demand

    found = media_demand(Header(mmproj), images, clips, flash_attn=flash_attn)
    lines = tuple(Line(name, HOST, n, "exact" if known == "exact" else "bound", "projector") for name, n, known in found.lines if n)
    unknown = next((name for name, _, known in found.lines if known == "unknown"), None)
    if unknown:
        raise MetadataError(f"{os.fspath(mmproj)}: the {unknown} of this kind of projector cannot be told from its header")
    return lines, found.cells


def _others(beside: Sequence[Plan]) -> tuple[Line, ...]:
    """What other plans take, a line for each and each device."""
    out = []
    for other in beside:
        for device in dict.fromkeys(line.device for line in other.lines):
            own = [line for line in other.lines if line.device == device]
            known: Known = "bound" if any(line.known == "bound" for line in own) else "measured" if any(line.known == "measured" for line in own) else "exact"
            out.append(Line(f"beside: {other.model}", device, sum(line.bytes for line in own), known, "other"))
    return tuple(out)


def _system(memory: Pool | int | str | None) -> Pool:
    if memory is None:
        return SystemMemory()
    if isinstance(memory, str):
        memory = parse_bytes(memory)
    if isinstance(memory, int):
        return FixedPool("RAM", memory, memory)
    return memory


def parse_tokens(context: int | str | None) -> int:
    """Tokens of a request: 32768, "32768", "32k"; 0 for none.

    Raises
    ------
    TypeError
        It is not a request: advice of an earlier plan, for one.
    InvalidArgumentError
        It is out of range.
    """
    if context is None:
        return 0
    if isinstance(context, str):
        text = context.strip().lower().replace(",", "").replace("_", "")
        scale = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:], 1)
        digits = text[:-1] if scale > 1 else text
        if not digits.isdecimal():
            raise InvalidArgumentError(f'{context!r} is not a number of tokens; "32k" is one')
        context = int(digits) * scale
    if isinstance(context, bool) or not isinstance(context, int):
        raise TypeError(f"a context is asked for as a number, not as {type(context).__name__}: what a plan advises is no request")
    if not 0 < context <= CAP:
        raise InvalidArgumentError(f"a context of {context:,} tokens; 1 to {CAP:,} can be")
    return context


# ------------------------------------------------------------------------------------------------------------ the decision


def _decide(model: str, demand: Demand, budgets: tuple[Budget, ...], request: int, policy: Policy, media: tuple[tuple[str, int], ...],
            notes: tuple[str, ...]) -> Plan:
    ceiling = demand.geometry.n_ctx_train
    is_known = all(budget.is_known for budget in budgets if budget.device in demand.placement.devices)
    fits = largest(demand, budgets) if is_known else 0
    why_fits: Bound = _what_binds(demand, budgets, fits) if is_known else "UNKNOWN"
    most = max(ceiling // CELL_GRAIN * CELL_GRAIN, min(ceiling, CELL_GRAIN))  # a model trained for less than one step gets one
    asked = padded(request) if request else 0
    served = min(most, fits, asked or most)
    bound: Bound = why_fits if served == fits < min(most, asked or most) else ("REQUEST" if asked and served == asked < most else "MODEL")
    wanted = min(asked or most, most)
    shown = padded(sum(cells for _, cells in media))
    least = max(min(policy.least_tokens, most), shown)
    binding: Bound | Literal[""] = ""
    why = ""
    if not is_known:
        unknown = next(budget for budget in budgets if not budget.is_known)
        binding, why = "UNKNOWN", f"{unknown.name}: how much of it is free is not known, so nothing is planned on it; say how much there is"
    elif shown > wanted:
        binding = "REQUEST" if asked and asked < most else "MODEL"
        room = f"{request:,} were asked for" if binding == "REQUEST" else f"{ceiling:,} are what the model is trained for"
        why = f"{model}: the pictures and clips alone take {sum(cells for _, cells in media):,} cells, and {room}"
    elif fits < (wanted if request else least):
        goal = wanted if request else least
        binding = why_fits
        why = f"{model}: a context of {goal:,} tokens misses {format_bytes(shortfall(demand, budgets, goal))} ({_WORDS[binding]}); " + (f"{fits:,} would fit" if fits else "none fits")
    n_ctx = (wanted if request else max(served, least)) if binding else served
    window = Window(Advice(served), bound)
    windows = Windows(Window(Advice(ceiling), "MODEL"), Window(Advice(request), "REQUEST"), Window(Advice(fits), why_fits), window, window, window)
    made = Plan(model, demand, budgets, windows, n_ctx or CELL_GRAIN, binding, why, policy, media, notes)
    return replace(made, windows=_explained(made))


_WORDS: Final[dict[str, str]] = {
    "WEIGHTS": "the weights alone are more than there is", "KV": "cells take what the rest leaves", "COMPUTE": "compute buffers take what the rest leaves",
    "PROJECTOR": "the projector takes what the weights leave", "RESERVE": "it would fit without headroom and reserve", "CAP": "the engine counts no further",
    "MODEL": "the model is trained for no more", "REQUEST": "no more was asked for", "COLD": "the cold store is full", "SEQUENCES": "sequences share it", "UNKNOWN": "it is not known",
}


def _what_binds(demand: Demand, budgets: Sequence[Budget], fits: int) -> Bound:
    """What keeps the next step from fitting."""
    if fits >= CAP:
        return "CAP"
    lines = demand.lines(fits + CELL_GRAIN)
    over = max(budgets, key=lambda b: sum(line.bytes for line in lines if line.device == b.device) - b.bytes)
    by_kind: dict[str, int] = {}
    for line in lines:
        if line.device == over.device:
            by_kind[line.kind] = by_kind.get(line.kind, 0) + line.bytes
    if fits == 0:
        if sum(by_kind.values()) <= (over.free or 0):
            return "RESERVE"
        if by_kind.get("weights", 0) > over.bytes:
            return "WEIGHTS"
        if by_kind.get("weights", 0) + by_kind.get("projector", 0) > over.bytes:
            return "PROJECTOR"
    kept = by_kind.get("kv", 0) + by_kind.get("recurrent", 0)
    return "KV" if kept >= by_kind.get("compute", 0) else "COMPUTE"


def _explained(made: Plan) -> Windows:
    """The windows with what would make each more."""
    w, demand = made.windows, made.demand
    ceiling, fits = int(w.ceiling.tokens), int(w.fits.tokens)
    request = int(w.requested.tokens)
    goal = min(padded(request) if request else max(2 * int(w.served.tokens), CELL_GRAIN), max(ceiling, CELL_GRAIN))
    goal = goal // CELL_GRAIN * CELL_GRAIN or CELL_GRAIN
    text = ""
    if w.fits.bound == "UNKNOWN":
        text = "say how much memory there is"
    elif w.fits.bound != "CAP" and fits < goal:
        text = f"+{format_bytes(shortfall(demand, made.budgets, goal))}" + "".join(f", or {remedy.change}," for remedy in made.remedies[:1] if remedy.n_ctx >= goal) + f" gives {goal:,}"
    more = text if fits < goal else ("a longer request" if request and padded(request) < ceiling else "")
    beyond = f"{ceiling:,} tokens are what the model is trained for" if request > ceiling else ""
    return Windows(w.ceiling, replace(w.requested, counterfactual=beyond), replace(w.fits, counterfactual=text), replace(w.served, counterfactual=more), replace(w.hot, counterfactual=more),
                   replace(w.planned, counterfactual=more))
