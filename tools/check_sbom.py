"""Hold a CycloneDX document against its published schema.

    python tools/check_sbom.py DOCUMENT...

Needs what requirements/sbom.txt locks, which is installed into a folder of its own (build/sbom) on first use.
"""
from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "sbom.txt"
PACKAGES = ROOT / "build" / "sbom"


def packages() -> Path:
    """The folder with what the lock names, for this Python; made or brought up to date if need be."""
    stamp = PACKAGES / ".locked"
    wanted = hashlib.sha256(LOCK.read_bytes() + sys.version.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "--only-binary", ":all:", "--upgrade",
                        "--target", str(PACKAGES), "-r", str(LOCK)], check=True)
        stamp.write_text(wanted)
    return PACKAGES


def problems(document: Any) -> list[str]:
    """What the schema of its own version says against ``document``; [] when nothing."""
    if str(packages()) not in sys.path:
        sys.path.insert(0, str(PACKAGES))
    import jsonschema
    import referencing.jsonschema

    schemas = PACKAGES / "cyclonedx" / "schema" / "_res"
    read = {path.name: json.loads(path.read_text(encoding="utf-8")) for name in ("bom-1.6", "spdx", "jsf-0.82") for path in schemas.glob(f"{name}.SNAPSHOT.schema.json")}
    # They name each other by file, whatever address they give themselves.
    resources = [(name, referencing.jsonschema.DRAFT7.create_resource({**schema, "$id": name})) for name, schema in read.items()]
    validator = jsonschema.Draft7Validator({**read["bom-1.6.SNAPSHOT.schema.json"], "$id": "bom-1.6.SNAPSHOT.schema.json"}, registry=referencing.Registry().with_resources(resources))
    found = [f"{'/'.join(map(str, error.absolute_path)) or 'the document'}: {error.message[:200]}" for error in validator.iter_errors(document)]
    refs = [component["bom-ref"] for component in (document["metadata"]["component"], *document["components"])] if not found else []
    named = [ref for entry in document["dependencies"] for ref in (entry["ref"], *entry.get("dependsOn", []))] if not found else []
    # The schema does not look at these.
    if len(set(refs)) != len(refs) or set(named) != set(refs):
        found.append(f"references do not fit together: {sorted(set(refs) ^ set(named))}, {len(refs) - len(set(refs))} twice")
    return found


def main(argv: list[str]) -> int:
    bad = 0
    for name in argv:
        for problem in problems(json.loads(Path(name).read_text(encoding="utf-8"))):
            print(f"{name}: {problem}", file=sys.stderr)
            bad = 1
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
