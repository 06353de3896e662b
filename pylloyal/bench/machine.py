"""What a report was measured on: the machine, the library, the model."""
from __future__ import annotations

import hashlib
import platform
import sys
from pathlib import Path
from typing import Any

from .. import system_info
from ..capacity.header import Header
from .noise import usable_cores
from .runner import RunnerError
from .setting import Setting


def environment(setting: Setting) -> dict[str, Any]:
    """All that figures depend on and that can be told; no paths."""
    info = system_info()
    engine = info["engine"]
    return {
        "cpu": cpu_name(), "cpu_features": info["cpu_features"], "usable_cores": len(usable_cores()), "n_threads": setting.n_threads,
        "system": platform.platform(), "python": platform.python_version(),
        "pylloyal": info["version"], "engine_commit": engine["commit"], "preset": engine["cpu"], "threads": engine["threads"], "attention": engine["attention"],
        "model": model_facts(setting.model), "flash_attn": setting.flash_attn, "is_quick": setting.is_quick, "control": control_facts(setting), "peers": sorted(setting.peers),
    }


def control_facts(setting: Setting) -> dict[str, Any] | None:
    """What the control was built of; None without one."""
    if setting.control is None:
        return None
    try:
        with setting.start("control") as runner:
            return runner.versions
    except RunnerError as error:
        return {"error": str(error)}


def is_same_engine(facts: dict[str, Any]) -> bool:
    """Whether the control was built as the library was; ratios to another engine compare two engines. True where it does not say."""
    control = facts["control"] or {}
    return all(control.get(theirs, facts[ours]) == facts[ours] for theirs, ours in (("llama.cpp", "engine_commit"), ("cpu", "preset"), ("threads", "threads"), ("attention", "attention")))


def model_facts(path: str) -> dict[str, Any]:
    """Its name, and what tells it from another of that name."""
    if path.startswith("stub:"):
        return {"name": path}
    header = Header(path)
    with open(header.paths[0], "rb") as file:
        digest = hashlib.sha256(file.read(header.header_bytes)).hexdigest()
    return {"name": Path(path).name, "architecture": header.get("general.architecture"), "bytes": header.file_bytes, "header_sha256": digest}


def cpu_name() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or sys.platform

