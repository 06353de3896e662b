"""What a branch may say."""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import errors
from .._ffi.load import library, take_text_at
from .._ffi.memory import i32, ref, size

if TYPE_CHECKING:
    from .model import Model


@dataclass(frozen=True, slots=True)
class GrammarMatch:
    """How far a text follows a grammar.

    Attributes
    ----------
    n_bytes : int
        Bytes (of UTF-8) that could be taken, in whole tokens, before the first token that could not.
    is_complete : bool
        True when all of the text was taken and a generation may end there.
    """

    n_bytes: int
    is_complete: bool


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

    @classmethod
    def from_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """The grammar of the JSON that satisfies a JSON Schema (draft 6, 7, 2019-09 or 2020-12).

        Made at once, by the engine's converter. What that would pass over or follow only roughly is refused, never dropped:
        ``docs/schema.md`` lists what is taken and how the JSON is written (properties in the schema's order, the required ones
        first). Cost: milliseconds for a schema of a hundred properties.

        Parameters
        ----------
        schema : mapping, bool or str
            The schema, or its JSON text. Nothing is fetched.

        Raises
        ------
        UnsupportedOperationError
            Names the keyword and its place, ``KEYWORD at #/properties/a: ...``; or the schema is too large, or has no value that
            satisfies it; or this library was built without llama.cpp.
        FormatError
            It is not JSON (NaN, a key that is no string, the same key twice), or a keyword's value is not of its form.
        """
        raw = _json_of(schema).encode("utf-8", "surrogatepass")
        return cls(take_text_at(library().pyl_schema_to_gbnf, 2, raw, len(raw)).decode())

    def match(self, model: Model, text: str) -> GrammarMatch:
        """Whether a text follows this grammar, token by token as a branch under it would be held to. Needs no store.

        Raises
        ------
        GrammarError
            The grammar does not parse.
        UnsupportedOperationError
            The tokens of the model's vocabulary do not spell the text exactly, or it has none.
        FormatError
            The text holds lone surrogates.
        """
        gbnf, raw = self.gbnf.encode("utf-8", "surrogatepass"), text.encode("utf-8", "surrogatepass")
        n_bytes, is_complete = size(), i32()
        library().pyl_grammar_match(model._ptr(), gbnf, len(gbnf), self.root.encode(), raw, len(raw), ref(n_bytes), ref(is_complete))
        return GrammarMatch(n_bytes.value, bool(is_complete.value))


def _json_of(schema: Mapping[str, Any] | bool | str) -> str:
    """The schema as JSON text, its keys in their order."""
    if isinstance(schema, str):
        return schema

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"{type(value).__name__} is not JSON")

    try:
        text = json.dumps(schema, allow_nan=False, default=plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.FormatError(f"the schema is not JSON: {error}") from error
    todo: list[Any] = [schema]  # json.dumps would write other keys as strings
    while todo:
        value = todo.pop()
        if isinstance(value, Mapping):
            if bad := [key for key in value if not isinstance(key, str)]:
                raise errors.FormatError(f"the schema is not JSON: the key {bad[0]!r} is no string")
            todo.extend(value.values())
        elif isinstance(value, list | tuple):
            todo.extend(value)
    return text
