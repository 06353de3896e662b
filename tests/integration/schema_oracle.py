# ruff: noqa: E701 (a case a line reads as the table it is)
"""What JSON Schema means, and how its values are written: told apart from any grammar, for the tests to compare with.

``is_valid`` knows the keywords the kernel takes and no others; the public suite decides whether it is right about them.
"""
from __future__ import annotations

import datetime
import json
import math
import re
import uuid
from collections.abc import Iterator
from typing import Any

from pylloyal import Grammar, Model

ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$defs", "definitions", "$schema", "$id"}


def is_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and (isinstance(value, int) or value.is_integer()))
    return name == {str: "string", list: "array", dict: "object", type(None): "null"}[type(value)]


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: 1 is 1.0 but not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def is_date(text: str) -> bool:
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        return False
    year = int(text[:4]) or 2000  # RFC 3339 has a year 0, a leap year; Python has none
    try:
        datetime.date(year, int(text[5:7]), int(text[8:]))
    except ValueError:
        return False
    return True


def is_uuid(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text)) and uuid.UUID(text) is not None


def target(root: Any, ref: str) -> Any:
    for step in ref.split("/")[1:]:
        root = root[int(step)] if isinstance(root, list) else root[step]
    return root


def is_valid(schema: Any, value: Any, root: Any = None) -> bool:
    """Whether a value satisfies a schema; raises KeyError for a keyword it does not know."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema

    def met(inner: Any, part: Any) -> bool:
        return is_valid(inner, part, root)

    def keyword(key: str, want: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        match key:
            case "$ref": return met(target(root, want), value)
            case "type": return any(is_type(value, name) for name in ([want] if isinstance(want, str) else want))
            case "const": return same(value, want)
            case "enum": return any(same(value, each) for each in want)
            case "anyOf": return any(met(each, value) for each in want)
            case "oneOf": return sum(met(each, value) for each in want) == 1
            case "allOf": return all(met(each, value) for each in want)
            case "minimum": return not number or value >= want
            case "maximum": return not number or value <= want
            case "exclusiveMinimum": return not number or value > want
            case "exclusiveMaximum": return not number or value < want
            case "minLength": return not isinstance(value, str) or len(value) >= want
            case "maxLength": return not isinstance(value, str) or len(value) <= want
            case "pattern": return not isinstance(value, str) or re.search(re.sub(r"\$$", r"\\Z", want), value) is not None
            case "format": return not isinstance(value, str) or {"date": is_date, "uuid": is_uuid}[want](value)
            case "minItems": return not isinstance(value, list) or len(value) >= want
            case "maxItems": return not isinstance(value, list) or len(value) <= want
            case "prefixItems": return not isinstance(value, list) or all(map(met, want, value))
            case "items" if isinstance(want, list): return not isinstance(value, list) or all(map(met, want, value))
            case "items": return not isinstance(value, list) or all(met(want, each) for each in value[len(schema.get("prefixItems", ())):])
            case "additionalItems": return not isinstance(value, list) or not isinstance(schema.get("items"), list) or all(met(want, each) for each in value[len(schema["items"]):])
            case "required": return not isinstance(value, dict) or all(name in value for name in want)
            case "properties": return not isinstance(value, dict) or all(met(want[name], part) for name, part in value.items() if name in want)
            case "additionalProperties": return not isinstance(value, dict) or all(met(want, part) for name, part in value.items() if name not in schema.get("properties", {}))
        raise KeyError(key)

    return all(keyword(key, want) for key, want in schema.items() if key not in ANNOTATIONS)


# ----------------------------------------------------------------------------------------------------------------- writing


def number(value: float) -> str:
    """Whole numbers without a fraction, others as short as they can be, exponents without leading zeros."""
    if isinstance(value, float) and value.is_integer() and math.isfinite(value):
        value = int(value)
    return re.sub(r"e([-+])0+(\d)", r"e\1\2", repr(value))


def written(value: Any, schema: Any = True, root: Any = None) -> str:
    """A value as a grammar writes it: compact, properties in the order of the schema, required ones first, unknown ones last."""
    return next(_written(value, schema, schema if root is None else root))


def all_written(value: Any, schema: Any) -> set[str]:
    """A value written in every order that some alternative of the schema might want, and as json.dumps writes it."""
    return {*_written(value, schema, schema), json.dumps(value), json.dumps(value, separators=(",", ":"), ensure_ascii=False)}


def _written(value: Any, schema: Any, root: Any) -> Iterator[str]:
    """The first is that of an alternative the value satisfies, where there is one."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield from _written(value, target(root, schema["$ref"]), root)
            return
        if constants := [each for each in (*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())) if same(each, value)]:
            yield _plain(constants[0])
            return
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                for each in sorted(schema[key], key=lambda each: not _fits(each, value, root)):
                    yield from _written(value, each, root)
                return
    else:
        schema = {}
    if isinstance(value, list):
        prefix = schema.get("prefixItems") or (schema["items"] if isinstance(schema.get("items"), list) else [])
        rest = schema.get("items", True) if not isinstance(schema.get("items"), list) else schema.get("additionalItems", True)
        parts = [(part, prefix[i] if i < len(prefix) else rest) for i, part in enumerate(value)]
        yield from ("[" + ",".join(row) + "]" for row in _each(parts, root))
    elif isinstance(value, dict):
        known = schema.get("properties", {})
        order = [*(name for name in known if name in schema.get("required", ())), *(name for name in known if name not in schema.get("required", ())), *value]
        names = list(dict.fromkeys(name for name in order if name in value))
        parts = [(value[name], known.get(name, schema.get("additionalProperties", True))) for name in names]
        yield from ("{" + ",".join(f"{_plain(name)}:{part}" for name, part in zip(names, row, strict=True)) + "}" for row in _each(parts, root))
    else:
        yield _plain(value)


def _each(parts: list[tuple[Any, Any]], root: Any) -> Iterator[list[str]]:
    """Every way to write the parts, the first first; of many parts only one way each and their last, for there could be too many."""
    ways = [list(_written(part, schema, root)) for part, schema in parts]
    yield [way[0] for way in ways]
    for i, way in enumerate(ways):
        for other in way[1:]:
            yield [*(w[0] for w in ways[:i]), other, *(w[0] for w in ways[i + 1:])]


def _fits(schema: Any, value: Any, root: Any) -> bool:
    try:
        return is_valid(schema, value, root)
    except (KeyError, TypeError):
        return False


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_plain(name)}:{_plain(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_plain, value)) + "]"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return json.dumps(value, ensure_ascii=False)


# --------------------------------------------------------------------------------------------------------- for short tests

NULL, TEXT, WHOLE, LIST = {"type": "null"}, {"type": "string"}, {"type": "integer"}, {"type": "array"}


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def text(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def accepts(model: Model, grammar: Grammar, written_as: str) -> bool:
    """Whether a text is taken whole and may end there; what is said of its bytes has to agree."""
    match = grammar.match(model, written_as)
    n = len(written_as.encode())
    assert match.n_bytes == n if match.is_complete else match.n_bytes <= n
    return match.is_complete


def check(model: Model, schema: Any, value: Any, *, valid: bool, grammar: Grammar) -> None:
    if valid:
        assert accepts(model, grammar, written(value, schema)), f"{json.dumps(schema)} does not take {written(value, schema)}"
    else:
        for each in all_written(value, schema):
            assert not accepts(model, grammar, each), f"{json.dumps(schema)} takes {each}"
