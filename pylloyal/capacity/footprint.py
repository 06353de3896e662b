"""What a model and a context take, line by line and device by device, as a function of the context's length."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal

from .compute import compute_bound
from .geometry import Geometry
from .header import Header
from .memory import kept
from .scratch import work_bound
from .settings import Context, Settings, context
from .weights import HOST, Placement, Weights, place, weights

BOOKS: Final = 48  # bytes the engine keeps about each cell of each cache, beside what is in it
Known = Literal["exact", "measured", "bound"]
_NAMES: Final = {"attention": "KV cells", "window": "KV cells, window", "indexer": "KV cells, indexer", "recurrent": "recurrent states"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a ledger.

    Attributes
    ----------
    name : str
    device : int
        Number of an accelerator, or ``HOST``.
    bytes : int
    known : {"exact", "measured", "bound"}
        Arithmetic the engine follows; the engine's own figure; or no more than.
    kind : str
        "weights", "kv", "recurrent", "compute", "output", "projector", "other".
    """

    name: str
    device: int
    bytes: int
    known: Known
    kind: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The engine's own figures for one context.

    Attributes
    ----------
    compute : dict of int to int
        Bytes of compute buffers by device.
    """

    compute: dict[int, int]


Measure = Callable[[int, Settings], Measured]


@dataclass(frozen=True)
class Demand:
    """A model with settings: what it would take for any context.

    Attributes
    ----------
    geometry : Geometry
    metadata : Mapping
        A :class:`.Header`, or keys alone: then weights are not known.
    settings : Settings
    placement : Placement
    weights : Weights
        Bytes of tensors; none when keys are all there is.
    extras : tuple of Line
        What is there whatever the context: a projector, a media cache.
    measure : callable or None
        Asks the engine for compute buffers; without it there is a bound.
    shares_weights : bool
        They are in memory already, for another store of this process.
    """

    geometry: Geometry
    metadata: Mapping[str, Any]
    settings: Settings
    placement: Placement
    weights: Weights
    extras: tuple[Line, ...] = ()
    measure: Measure | None = None
    shares_weights: bool = False
    _found: dict[int, tuple[Line, ...]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, geometry: Geometry, metadata: Mapping[str, Any], settings: Settings, shares: Sequence[int], extras: tuple[Line, ...] = (), measure: Measure | None = None,
           *, shares_weights: bool = False) -> Demand:
        placement = place(geometry, settings, shares)
        found = weights(metadata, geometry, placement) if isinstance(metadata, Header) else Weights({}, False, 0)
        return cls(geometry, metadata, settings, placement, found, extras, measure, shares_weights)

    def but(self, settings: Settings) -> Demand:
        """The same with settings that leave every layer where it is."""
        return replace(self, settings=settings, _found={})

    def context(self, n_ctx: int) -> Context:
        return context(self.geometry, n_ctx, self.settings)

    def asking(self, measure: Measure) -> Demand:
        """The same with compute buffers as the engine lays them out."""
        return replace(self, measure=measure, _found={})

    @cached_property
    def fixed(self) -> tuple[Line, ...]:
        """What does not depend on the context: weights and extras."""
        lines = []
        if isinstance(self.metadata, Header):
            known: Known = "exact" if self.weights.is_exact else "bound"
            name, share = ("weights, shared", 0) if self.shares_weights else ("weights", 1)
            lines = [Line(name, device, share * self.weights.by_device.get(device, 0), known, "weights") for device in self.placement.devices]
        return (*lines, *self.extras)

    def lines(self, n_ctx: int) -> tuple[Line, ...]:
        """Everything, for a context of so many tokens."""
        if n_ctx not in self._found:
            self._found[n_ctx] = (*self.kept(n_ctx), *self._compute(n_ctx))
        return self._found[n_ctx]

    def kept(self, n_ctx: int) -> tuple[Line, ...]:
        """Everything but compute buffers: what is quickly told."""
        out, cells = list(self.fixed), 0
        for group in kept(self.geometry, self.context(n_ctx), self.settings):
            cells += 0 if group.is_recurrent else group.cells
            on: dict[int, int] = {}
            for layer, n_bytes in group.layer_bytes.items():
                device = self.placement.where(layer) if self.settings.offload_kqv else HOST
                on[device] = on.get(device, 0) + n_bytes
            kind = "recurrent" if group.is_recurrent else "kv"
            out += [Line(_NAMES.get(group.name, f"KV cells, {group.name}" if kind == "kv" else group.name), device, on[device], "exact", kind) for device in sorted(on)]
        return (*out, Line("output", HOST, self.output_bytes(), "exact", "output"), Line("books of cells", HOST, BOOKS * cells, "bound", "other"))

    def _compute(self, n_ctx: int) -> list[Line]:
        made = self.context(n_ctx)
        if self.measure is not None:
            buffers = [Line("compute", device, n_bytes, "measured", "compute") for device, n_bytes in sorted(self.measure(n_ctx, self.settings).compute.items())]
        else:
            bound = compute_bound(self.geometry, self.metadata, made, self.settings)
            buffers = [Line("compute", device, bound, "bound", "compute") for device in self.placement.devices]
        return [*buffers, Line("CPU scratch", HOST, work_bound(self.geometry, self.metadata, made, self.settings, self.settings.threads), "bound", "other")]

    def output_bytes(self) -> int:
        """Logits of one row for each branch, in single precision. Source: ``llama_context::output_reserve``."""
        per_row = self.geometry.n_vocab + (self.geometry.n_embd_out if self.geometry.architecture == "t5" else 0)
        return 4 * per_row * max(self.settings.n_branches, 1)
