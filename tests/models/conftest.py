"""Real models: named by PYLLOYAL_TEST_MODEL, which the `models` session sets after fetching SmolLM2-135M."""
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import pylloyal


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return Path(os.environ["PYLLOYAL_TEST_MODEL"])


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[pylloyal.Model]:
    with pylloyal.Model(smollm2_path) as model:
        yield model
