"""What a branch may say."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .. import errors
from .._ffi import capi
from .._ffi.load import library, take_text_at
from .._ffi.memory import i32, new, ref, size
from .chat import ChatPrompt

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
class Trigger:
    """What wakes a lazy grammar; it belongs to what the grammar then reads.

    Parameters
    ----------
    type : {"word", "pattern", "pattern_full", "token"}
        A text; a regular expression that is searched for in what was written (its first group, or else all it matches, is where the
        grammar begins); one that has to match all that was written; a token.
    value : str or int
        The text or expression, or the token's number.
    """

    type: Literal["word", "pattern", "pattern_full", "token"]
    value: str | int

    def _json(self) -> dict[str, Any]:
        return {"type": self.type, "token": self.value} if self.type == "token" else {"type": self.type, "value": self.value}


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
    triggers : sequence of Trigger, optional
        The grammar is lazy: it binds from the first of these on, and until then anything goes. None binds from the next token on.
    """

    gbnf: str
    root: str = "root"
    triggers: Sequence[Trigger] | None = None

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


def constraint_of(grammar: Grammar | ChatPrompt | str | None) -> Any:
    """The ABI's pyl_grammar, by reference; None for no constraint."""
    if grammar is None:
        return None
    if isinstance(grammar, ChatPrompt):
        spec = grammar._grammar_spec()
        return ref(new(capi.pyl_grammar, kind=capi.GRAMMAR_CHAT, text=spec, n_text=len(spec)))
    value = Grammar(grammar) if isinstance(grammar, str) else grammar
    raw = value.gbnf.encode()
    if not raw:
        raise errors.GrammarError("line 1, column 1: the grammar is empty")
    triggers = None if value.triggers is None else json.dumps([trigger._json() for trigger in value.triggers]).encode()
    return ref(new(capi.pyl_grammar, kind=capi.GRAMMAR_GBNF, text=raw, n_text=len(raw), root=value.root.encode(), triggers=triggers, n_triggers=len(triggers or b"")))


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
