"""The working memory of a local language model, programmable from Python.

Importing this package loads nothing: names are looked up on first use, and the native library on the first model.
"""
from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors as errors
    from .errors import PylloyalError as PylloyalError
    from .kernel.branch import Branch as Branch
    from .kernel.branch import Distribution as Distribution
    from .kernel.branch import LogitsView as LogitsView
    from .kernel.chat import ChatMessage as ChatMessage
    from .kernel.chat import ChatPrompt as ChatPrompt
    from .kernel.grammar import Grammar as Grammar
    from .kernel.model import Model as Model
    from .kernel.sampling import Sampling as Sampling
    from .kernel.store import Finish as Finish
    from .kernel.store import Pressure as Pressure
    from .kernel.store import Store as Store
    from .kernel.store import Ticks as Ticks
    from .kernel.system import LogLevel as LogLevel
    from .kernel.system import drain_logs as drain_logs
    from .kernel.system import live_objects as live_objects
    from .kernel.system import set_log_level as set_log_level
    from .kernel.system import system_info as system_info
    from .kernel.vocab import TextStream as TextStream
    from .kernel.vocab import TokenFlags as TokenFlags
    from .kernel.vocab import Vocab as Vocab

_HOME = {
    "PylloyalError": "errors",
    "Branch": "kernel.branch", "Distribution": "kernel.branch", "LogitsView": "kernel.branch",
    "ChatMessage": "kernel.chat", "ChatPrompt": "kernel.chat",
    "Grammar": "kernel.grammar", "Model": "kernel.model", "Sampling": "kernel.sampling",
    "Finish": "kernel.store", "Pressure": "kernel.store", "Store": "kernel.store", "Ticks": "kernel.store",
    "LogLevel": "kernel.system", "drain_logs": "kernel.system", "live_objects": "kernel.system", "set_log_level": "kernel.system", "system_info": "kernel.system",
    "TextStream": "kernel.vocab", "TokenFlags": "kernel.vocab", "Vocab": "kernel.vocab",
}
__all__ = [*_HOME, "__version__", "errors", "get_include", "get_library"]  # noqa: PLE0604 (strings all)


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
    return sorted(__all__)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pylloyal")
    except PackageNotFoundError:  # run from a clone
        import tomllib

        with open(Path(__file__).resolve().parents[1] / "pyproject.toml", "rb") as file:
            return str(tomllib.load(file)["project"]["version"])


def get_include() -> str:
    """Folder of ``pylloyal.h``, for other programs that link the kernel."""
    import importlib.resources

    installed = Path(str(importlib.resources.files(__name__).joinpath("include").joinpath("pylloyal.h")))
    return str(installed.parent if installed.is_file() else Path(__file__).resolve().parents[1] / "libsrc" / "include")


def get_library() -> str:
    """Path of the native library; loads it."""
    from ._ffi.load import library_path

    return str(library_path())
