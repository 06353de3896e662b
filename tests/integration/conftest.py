"""Tiny models of random weights, made once per run."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models

import pylloyal


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("tiny") / "tiny-llama.gguf")


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> Iterator[pylloyal.Model]:
    with pylloyal.Model(tiny_path) as model:
        yield model


@pytest.fixture
def model(tiny: pylloyal.Model) -> pylloyal.Model:
    """The kernel suite's model: quantised and with flash attention, where a batch is bit-identical to its parts."""
    return tiny


@pytest.fixture
def tiny_with(tmp_path: Path) -> Iterator[Callable[..., pylloyal.Model]]:
    """Makes tiny models with another template, type or metadata."""
    opened: list[pylloyal.Model] = []

    def make(**options: Any) -> pylloyal.Model:
        opened.append(pylloyal.Model(tiny_models.write(tmp_path / f"{len(opened)}.gguf", **options)))
        return opened[-1]

    yield make
    for model in opened:
        model.close()
