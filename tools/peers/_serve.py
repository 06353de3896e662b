"""What all runners of the benchmark's peers do alike: one JSON request a line in, one JSON answer a line out (pylloyal/bench/runner.py is the other end).

Nothing of pylloyal is imported here or in the runners: a peer is measured in a process that has never seen us. `seconds` are measured inside the
runner around the work alone, so that starting, loading and passing JSON count for nobody.
"""
from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Operation = Callable[[dict[str, Any]], dict[str, Any]]


def memory(_request: dict[str, Any]) -> dict[str, Any]:
    """This process's memory, now and at most."""
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return {"peak_rss_kib": int(fields["VmHWM"].split()[0]), "rss_kib": int(fields["VmRSS"].split()[0])}


def serve(name: str, versions: dict[str, str], operations: dict[str, Operation]) -> None:
    """Answer requests until "close" or the end of the input. What a library writes to standard output goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="ascii") as out:
        os.dup2(2, 1)  # the engine's own printing must not get between our lines

        def say(answer: dict[str, Any]) -> None:
            out.write(json.dumps(answer) + "\n")
            out.flush()

        say({"runner": name, "versions": versions})
        for line in sys.stdin:
            if not line.strip():
                continue
            request = json.loads(line)
            if request["op"] == "close":
                say({})
                return
            try:
                operation = ({"memory": memory} | operations).get(request["op"])
                say({"error": f"{name} cannot do {request['op']}"} if operation is None else operation(request))
            except Exception as error:
                traceback.print_exc()
                say({"error": f"{type(error).__name__}: {error}"})
