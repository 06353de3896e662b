"""The build backend: scikit-build-core's, with its wheels' members in an order of their own.

scikit-build-core writes what goes into `.dist-info` in the order in which the file system lists it; two machines may differ in that
and in nothing else. Everything that a reproducible wheel needs besides (times, permissions) it does itself (pyproject.toml).
"""
from __future__ import annotations

import csv
import io
import os
import zipfile
from pathlib import Path
from typing import Any

from scikit_build_core import build as _skbuild
from scikit_build_core.build import (  # noqa: F401  (a front end finds them here)
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

# Named, because zlib's default is nobody's promise.
LEVEL = 9


# What was prepared is not handed on: it lacks the SBOM, which is made of the built library, and scikit-build-core insists on every file.
def build_editable(wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None) -> str:  # noqa: ARG001
    return _skbuild.build_editable(wheel_directory, config_settings)


def build_wheel(wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None) -> str:  # noqa: ARG001
    name = _skbuild.build_wheel(wheel_directory, config_settings)
    sort_members(Path(wheel_directory) / name)
    return name


def sort_members(wheel: Path) -> None:
    """Write ``wheel`` anew with its members sorted, those of `.dist-info` last as before and RECORD at the very end."""
    with zipfile.ZipFile(wheel) as old:
        infos = sorted(old.infolist(), key=lambda info: (".dist-info/" in info.filename, info.filename.endswith("/RECORD"), info.filename))
        record = infos[-1].filename
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(sorted(csv.reader(old.read(record).decode("utf-8").splitlines())))
        scratch = wheel.with_suffix(".sorted")
        with zipfile.ZipFile(scratch, "w") as new:
            for info in infos:
                new.writestr(info, text.getvalue().encode("utf-8") if info.filename == record else old.read(info), zipfile.ZIP_DEFLATED, LEVEL)
    os.replace(scratch, wheel)
