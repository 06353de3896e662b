"""What a branch may say."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in GBNF, llama.cpp's notation.

    A value, not a resource: the kernel compiles it when it is put on a branch, for that model's vocabulary, and a mistake is a
    :class:`~pylloyal.errors.GrammarError` with line and column there.

    Parameters
    ----------
    gbnf : str
        The rules.
    root : str
        Name of the rule to start from.
    """

    gbnf: str
    root: str = "root"
