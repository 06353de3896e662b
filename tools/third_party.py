"""Say what of other people's work is in the library: the notices that travel with it, and a CycloneDX SBOM for the wheel or the install tree.

    python tools/third_party.py notices --source LLAMA_CPP --processor x86_64 --out THIRD_PARTY_NOTICES.txt
    python tools/third_party.py sbom --source LLAMA_CPP --processor x86_64 --library libpylloyal.so --out pylloyal.cdx.json ...

Both come from `libsrc/third_party.toml`. The same inputs give the same bytes: no time, no random number, no path. CMake calls
this file; it needs nothing but the standard library.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tomllib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cache import sha256_of
from llama_source import read_pin

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "libsrc" / "third_party.toml"
LICENCES = ROOT / "libsrc" / "licences"
# A C++ runtime that is not loaded from the system is in the library itself.
RUNTIMES = (b"libstdc++.so", b"libc++.so", b"libc++.1.dylib", b"libstdc++-6.dll", b"libc++.dll")


class ThirdPartyError(Exception):
    """The table and the source do not fit together; the message says where."""


@dataclass(frozen=True)
class Component:
    """A row of the table: somebody else's work that is in the library. ``licence`` is "" where its source names none."""

    name: str
    licence: str
    copyright: str
    files: tuple[str, ...]
    linked: str
    text: str
    what: str
    purl: str
    processors: tuple[str, ...]
    version: dict[str, Any]


def components(processor: str | None = None, table: Path = TABLE) -> list[Component]:
    """The rows that are compiled in on ``processor``, all of them for None."""
    rows = [Component(row["name"], row.get("licence", ""), row["copyright"], tuple(row["files"]), row["linked"], row.get("text", ""), row["what"], row.get("purl", ""),
                      tuple(row.get("processors", ())), row.get("version", {})) for row in tomllib.loads(table.read_text(encoding="utf-8"))["component"]]
    return [row for row in rows if processor is None or not row.processors or processor.lower() in row.processors]


def version_of(row: Component, source: Path) -> str:
    """Its version as the engine's tree states it; "" for code that was taken without one."""
    if not row.version:
        return ""
    text = (source / row.version["file"]).read_text(encoding="utf-8")
    found = [re.search(pattern, text) for pattern in row.version["patterns"]]
    if not all(found):
        raise ThirdPartyError(f"{row.name}: its version is no longer where libsrc/third_party.toml looks for it, in {row.version['file']}")
    return ".".join(match[1] for match in found if match)


def licence_text(row: Component, source: Path) -> str:
    if not row.text:
        return "No licence of the original is named where it was taken from.\n"
    if row.text == "Apache-2.0":
        return "Apache License, Version 2.0: the text is that of pylloyal's own licence.\n"
    for folder in (source, LICENCES):
        if (folder / row.text).is_file():
            return (folder / row.text).read_text(encoding="utf-8")
    raise ThirdPartyError(f"{row.name}: the licence {row.text} is neither in the engine's source nor in libsrc/licences")


def notices(source: Path, processor: str) -> str:
    """The text of THIRD_PARTY_NOTICES.txt: everybody once, and each licence's words once."""
    parts = ["libpylloyal contains work of the following projects.\n"]
    shown: dict[str, str] = {}
    for row in components(processor):
        text = licence_text(row, source)
        body = text[text.index("Permission is hereby granted"):] if row.licence.split()[:1] == ["MIT"] else text  # without a heading and another's copyright
        same = " ".join(body.split())  # however the lines are broken
        parts.append(f"\n==== {row.name} ({row.licence or 'licence not named'}) ====\n\n{row.what}\n\n" + (f"{row.copyright}\n\n" if row.copyright else ""))
        if first := shown.get(same):
            parts[-1] += f"Under the same words as {first}, above.\n"
        else:
            shown[same] = row.name
            parts[-1] += body
    return "".join(parts)


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def licensed(expression: str) -> list[dict[str, Any]]:
    if not expression:
        return [{"license": {"name": "not named in the engine's source"}}]
    return [{"expression": expression}] if " " in expression else [{"license": {"id": expression}}]


def python_requirements(project: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Name, requirement and scope of each package the wheel asks for."""
    for requirement in project["dependencies"]:
        yield re.split(r"[^\w.-]", requirement)[0], requirement, "required"
    for extra, wanted in sorted(project.get("optional-dependencies", {}).items()):
        for requirement in wanted:
            yield re.split(r"[^\w.-]", requirement)[0], f"{requirement}; extra == '{extra}'", "optional"


def sbom(source: Path, library: Path, processor: str, *, engine_commit: str, compiler: str, cpu: str, threads: str, attention: str, models: list[Path], static: Path | None = None,
         python: bool = True) -> dict[str, Any]:
    """A CycloneDX 1.6 document of the wheel, or of the install tree, that holds ``library``.

    Parameters
    ----------
    engine_commit : str
        The pinned commit, or "LLAMA_CPP_DIR" for a tree of the user's own, of which nothing more is known.
    models : list of Path
        Model files that come with the package.
    static : Path, optional
        The static library beside the shared one, of the same parts.
    python : bool
        It is the Python package, and asks for others.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pin = read_pin()
    pinned = engine_commit == pin["commit"]
    name, version = project["name"], project["version"]
    root, kernel, engine = f"pkg:pypi/{name}@{version}" if python else f"{name}-install-tree", "libpylloyal", "llama.cpp"
    found: list[dict[str, Any]] = [{
        "type": "library", "bom-ref": kernel, "name": "libpylloyal", "version": version, "licenses": licensed(project["license"]), "hashes": [{"alg": "SHA-256", "content": sha256_of(library)}],
        "properties": [{"name": f"pylloyal:{key}", "value": value} for key, value in (("compiler", compiler), ("cpu", cpu), ("processor", processor), ("threads", threads), ("attention", attention))]}]
    for row in components(processor):
        version_is = version_of(row, source)
        entry: dict[str, Any] = {"type": "library", "bom-ref": slug(row.name), "name": row.name, "description": row.what, "licenses": licensed(row.licence)}
        if row.copyright:
            entry["copyright"] = row.copyright
        if version_is:
            entry["version"] = version_is
        if row.purl:
            entry["purl"] = row.purl + (f"@{version_is}" if version_is else "")
        if row.name == engine:
            entry |= engine_entry(pin if pinned else None, threads, attention)
        found.append(entry)
    runtime = next((needed.decode() for needed in RUNTIMES if needed in library.read_bytes()), None)
    found[0]["properties"].append({"name": "pylloyal:cxx-runtime", "value": f"{runtime}, of the system" if runtime else "linked in"})
    if runtime is None:
        expression = "GPL-3.0-or-later WITH GCC-exception-3.1" if compiler.startswith("GNU") else "Apache-2.0 WITH LLVM-exception"
        found.append({"type": "library", "bom-ref": "cxx-runtime", "name": f"C++ runtime of {compiler}", "licenses": licensed(expression)})
    inside = [entry["bom-ref"] for entry in found[1:]]
    ours = [kernel]
    if static is not None:
        ours.append("libpylloyal-static")
        # The C++ runtime is the business of whoever links it.
        found.append({**found[0], "bom-ref": ours[1], "name": "libpylloyal (static)", "hashes": [{"alg": "SHA-256", "content": sha256_of(static)}],
                      "properties": [entry for entry in found[0]["properties"] if entry["name"] != "pylloyal:cxx-runtime"]})
    for path in models:
        found.append({"type": "machine-learning-model", "bom-ref": path.name, "name": path.name, "licenses": licensed(project["license"]), "hashes": [{"alg": "SHA-256", "content": sha256_of(path)}]})
    wanted = []
    for package, requirement, scope in python_requirements(project) if python else ():
        found.append({"type": "library", "bom-ref": f"pkg:pypi/{package}", "name": package, "purl": f"pkg:pypi/{package}", "scope": scope,
                      "properties": [{"name": "pylloyal:requires", "value": requirement}]})
        wanted.append(f"pkg:pypi/{package}")
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"lifecycles": [{"phase": "build"}],
                     "component": {"type": "library", "bom-ref": root, "name": name, "version": version, **({"purl": root} if python else {}), "description": project["description"],
                                   "licenses": licensed(project["license"])}},
        "components": found,
        "dependencies": [{"ref": root, "dependsOn": [*ours, *(path.name for path in models), *wanted]},
                         *({"ref": one, "dependsOn": [ref for ref in inside if one == kernel or ref != "cxx-runtime"]} for one in ours),
                         *({"ref": ref} for ref in (*inside, *(path.name for path in models), *wanted))]}
    # The same contents have the same number.
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    return document | {"serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}"}


def engine_entry(pin: dict[str, str] | None, threads: str, attention: str) -> dict[str, Any]:
    """Which llama.cpp it is, where its source comes from, and what is done to it."""
    edits = {
        "two calls in ggml_barrier: libsrc/cmake/edit_barrier.cmake": threads == "blocking",
        "three calls in ggml-cpu's flash attention: libsrc/cmake/edit_attention.cmake, and what they call, libsrc/src/engine/ggml_cpu/attention.hpp,": attention == "shared"}
    patches = [{"type": "unofficial", "diff": {"text": {"content": f"{what} of pylloyal's source"}}} for what, is_made in edits.items() if is_made]
    pedigree: dict[str, Any] = {"patches": patches} if patches else {}
    if pin is None:
        return {"version": "unknown: built from LLAMA_CPP_DIR", "pedigree": pedigree}
    archive = f"{pin['package']} {pin['version']} of the Python package index, source archive, folder vendor/llama.cpp"
    return {"version": pin["commit"], "purl": f"pkg:github/ggml-org/llama.cpp@{pin['commit']}",
            "pedigree": {"commits": [{"uid": pin["commit"]}], **pedigree, "notes": f"Source: {archive}"},
            "externalReferences": [{"type": "source-distribution", "url": f"pkg:pypi/{pin['package']}@{pin['version']}", "comment": archive,
                                    "hashes": [{"alg": "SHA-256", "content": pin["sha256"]}]}]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["notices", "sbom"])
    parser.add_argument("--source", type=Path, required=True, help="the llama.cpp tree that is built")
    parser.add_argument("--processor", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--static", type=Path, help="the static library beside it")
    parser.add_argument("--no-python", action="store_true", help="of the install tree, not of the Python package")
    parser.add_argument("--engine-commit", default="")
    parser.add_argument("--compiler", default="")
    parser.add_argument("--cpu", default="")
    parser.add_argument("--threads", default="")
    parser.add_argument("--attention", default="")
    parser.add_argument("--model", type=Path, action="append", default=[])
    args = parser.parse_args(argv)
    if args.what == "sbom" and args.library is None:
        parser.error("sbom needs --library")
    try:
        if args.what == "notices":
            text = notices(args.source, args.processor)
        else:
            made = sbom(args.source, args.library, args.processor, engine_commit=args.engine_commit, compiler=args.compiler, cpu=args.cpu, threads=args.threads, attention=args.attention,
                        models=args.model, static=args.static, python=not args.no_python)
            text = json.dumps(made, indent=2, ensure_ascii=False) + "\n"
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_bytes(text.encode("utf-8"))
    except (ThirdPartyError, OSError) as error:
        print(f"third_party: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
