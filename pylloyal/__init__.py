"""The working memory of a local language model, programmable from Python.

Importing this package loads nothing: names are looked up on first use, and the native library on the first model.
"""
from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors as errors
    from .capacity.admission import Admission as Admission
    from .capacity.admission import Cells as Cells
    from .capacity.admission import Reservation as Reservation
    from .capacity.budget import Policy as Policy
    from .capacity.devices import FixedPool as FixedPool
    from .capacity.devices import Pool as Pool
    from .capacity.devices import SystemMemory as SystemMemory
    from .capacity.plan import Plan as Plan
    from .capacity.plan import plan as plan
    from .errors import PylloyalError as PylloyalError
    from .kernel.branch import Branch as Branch
    from .kernel.chat import ChatMessage as ChatMessage
    from .kernel.chat import ChatPrompt as ChatPrompt
    from .kernel.chat import Continuation as Continuation
    from .kernel.embedder import Embedder as Embedder
    from .kernel.embedder import EmbedderStatistics as EmbedderStatistics
    from .kernel.grammar import Grammar as Grammar
    from .kernel.grammar import GrammarMatch as GrammarMatch
    from .kernel.grammar import Trigger as Trigger
    from .kernel.measures import BranchStatistics as BranchStatistics
    from .kernel.measures import Distribution as Distribution
    from .kernel.measures import Level as Level
    from .kernel.measures import LogitsView as LogitsView
    from .kernel.measures import Metrics as Metrics
    from .kernel.measures import Priors as Priors
    from .kernel.model import Model as Model
    from .kernel.model import ModelStatistics as ModelStatistics
    from .kernel.outcomes import Finish as Finish
    from .kernel.outcomes import Pressure as Pressure
    from .kernel.outcomes import PromptOutcome as PromptOutcome
    from .kernel.outcomes import StoreStatistics as StoreStatistics
    from .kernel.outcomes import Ticks as Ticks
    from .kernel.parts import Part as Part
    from .kernel.parts import PartSource as PartSource
    from .kernel.parts import PixelPart as PixelPart
    from .kernel.parts import PlaceholderPart as PlaceholderPart
    from .kernel.parts import RowPart as RowPart
    from .kernel.parts import SoundPart as SoundPart
    from .kernel.parts import TextPart as TextPart
    from .kernel.parts import TokenPart as TokenPart
    from .kernel.projector import Projector as Projector
    from .kernel.projector import ProjectorStatistics as ProjectorStatistics
    from .kernel.projector import Quote as Quote
    from .kernel.sampling import Sampling as Sampling
    from .kernel.store import Store as Store
    from .kernel.system import LogLevel as LogLevel
    from .kernel.system import describe_saved as describe_saved
    from .kernel.system import drain_logs as drain_logs
    from .kernel.system import live_objects as live_objects
    from .kernel.system import set_log_level as set_log_level
    from .kernel.system import system_info as system_info
    from .kernel.vocab import TextStream as TextStream
    from .kernel.vocab import TokenFlags as TokenFlags
    from .kernel.vocab import Vocab as Vocab
    from .opening import PlanMismatchWarning as PlanMismatchWarning
    from .opening import PlannedStore as PlannedStore
    from .opening import open as open
    from .sources.audio import Audio as Audio
    from .sources.audio import AudioReport as AudioReport
    from .sources.embeddings import Embeddings as Embeddings
    from .sources.image import Image as Image
    from .sources.image import ImageReport as ImageReport
    from .sources.notes import read_notes as read_notes
    from .sources.prompt import Prompt as Prompt
    from .sources.video import ClipReport as ClipReport
    from .sources.video import Video as Video

_HOME = {
    "PylloyalError": "errors",
    "Admission": "capacity.admission", "Cells": "capacity.admission", "Reservation": "capacity.admission",
    "Plan": "capacity.plan", "plan": "capacity.plan", "Policy": "capacity.budget", "FixedPool": "capacity.devices", "Pool": "capacity.devices", "SystemMemory": "capacity.devices",
    "PlanMismatchWarning": "opening", "PlannedStore": "opening", "open": "opening",
    "Branch": "kernel.branch",
    "ChatMessage": "kernel.chat", "ChatPrompt": "kernel.chat", "Continuation": "kernel.chat",
    "Embedder": "kernel.embedder", "EmbedderStatistics": "kernel.embedder",
    "Grammar": "kernel.grammar", "GrammarMatch": "kernel.grammar", "Trigger": "kernel.grammar", "Model": "kernel.model", "ModelStatistics": "kernel.model", "Sampling": "kernel.sampling",
    "BranchStatistics": "kernel.measures", "Distribution": "kernel.measures", "Level": "kernel.measures", "LogitsView": "kernel.measures", "Metrics": "kernel.measures", "Priors": "kernel.measures",
    "Finish": "kernel.outcomes", "Pressure": "kernel.outcomes", "PromptOutcome": "kernel.outcomes", "StoreStatistics": "kernel.outcomes", "Ticks": "kernel.outcomes",
    **dict.fromkeys(("Part", "PartSource", "PixelPart", "PlaceholderPart", "RowPart", "SoundPart", "TextPart", "TokenPart"), "kernel.parts"),
    "Projector": "kernel.projector", "ProjectorStatistics": "kernel.projector", "Quote": "kernel.projector",
    "Audio": "sources.audio", "AudioReport": "sources.audio", "Embeddings": "sources.embeddings", "Image": "sources.image", "ImageReport": "sources.image",
    "read_notes": "sources.notes", "Prompt": "sources.prompt", "ClipReport": "sources.video", "Video": "sources.video",
    "Store": "kernel.store",
    "LogLevel": "kernel.system", "describe_saved": "kernel.system", "drain_logs": "kernel.system", "live_objects": "kernel.system", "set_log_level": "kernel.system", "system_info": "kernel.system",
    "TextStream": "kernel.vocab", "TokenFlags": "kernel.vocab", "Vocab": "kernel.vocab",
}
# Without open, which a star would put over Python's own.
__all__ = [*(name for name in _HOME if name != "open"), "__version__", "errors", "get_include", "get_library"]  # noqa: PLE0604 (strings all)


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module(".errors", __name__)
    if name == "__version__":
        return _version()
    if home := _HOME.get(name):
        value = getattr(importlib.import_module(f".{home}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "open"])


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pylloyal")
    except PackageNotFoundError:  # run from a clone
        import tomllib

        return str(tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def get_include() -> str:
    """Folder of ``pylloyal.h``, for other programs that link the kernel."""
    import importlib.resources

    installed = Path(str(importlib.resources.files(__name__).joinpath("include").joinpath("pylloyal.h")))
    return str(installed.parent if installed.is_file() else Path(__file__).resolve().parents[1] / "libsrc" / "include")


def get_library() -> str:
    """Path of the native library; loads it."""
    from ._ffi.load import library_path

    return str(library_path())
