"""JSON Schema to GBNF: every keyword is taken and right, or refused by name. ``schema_oracle`` says what right is, and the public suite says whether the oracle is."""
from __future__ import annotations

import json
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from pylloyal import Grammar, Model, errors
from pylloyal._ffi.load import library, take_text_at
from tests.integration.schema_oracle import LIST, NULL, TEXT, WHOLE, check, closed, is_valid, text

DOC = Path(__file__).resolve().parents[2] / "docs" / "schema.md"
DRAFT_7, DRAFT_2020 = "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"


def refusal(schema: Any) -> tuple[str, str]:
    """Keyword and place of what is refused."""
    with pytest.raises(errors.UnsupportedOperationError) as info:
        Grammar.from_schema(schema)
    found = re.fullmatch(r"(.+?) at (#.*?): .+", str(info.value), re.S)
    assert found, f"no keyword and place in: {info.value}"
    assert (info.value.state, info.value.failure is not None) == ("unchanged", True)
    return found[1], found[2]


# ------------------------------------------------------------------------------------------------------- the decision table

# Beginnings of the rows of docs/schema.md -> (schema, values it takes, values it does not).
TAKEN: dict[tuple[str, str], list[tuple[Any, list[Any], list[Any]]]] = {
    ("`{}`, `true`", "anywhere"): [(top, [None, True, 0, -1.5, "", "é", [], {}, [{"a": [1]}]], []) for top in ({}, True)] + [({"type": "array", "items": True, "maxItems": 1}, [[], [{}]], [[1, 2]])],
    ("`type`", "one type"): [
        (NULL, [None], [False, 0, "", "null", [], {}]), ({"type": "boolean"}, [True, False], [None, 0, 1, "true"]),
        (WHOLE, [0, -0.0, 1.0, -7, 10**16 - 1, 1 - 10**16], [1.5, "1", None, True, [1]]), ({"type": "number"}, [0, -1, 1.5, 1e-7, -2.5e-10, 1e15, 12345.678], ["1", None, False]),
        (TEXT, ["", "a", "é€😀", "\"\\\b\f\n\r\t\0\x1f\x7f", "\ud7ff\ue000\uffff\U0010ffff"], [1, None, ["a"]]), (LIST, [[], [1, "a", [None]]], [{}, "[]", None]),
        ({"type": "object"}, [{}, {"a": 1, "": {"b": []}}], [[], None, "{}"]),
        ({"type": ["string", "null"], "minLength": 2}, [None, "ab"], ["", "a", 1]), ({"type": ["integer", "number"]}, [1, 1.5], ["1"]),
        ({"type": ["array", "object", "integer"], "maxItems": 1, "maximum": 9}, [[], [1], {}, {"a": 1}, 9], [[1, 2], 10, None])],
    ("`const`", "alone"): [
        ({"const": {"b": [1, None], "a": "é\"\\\n"}}, [{"b": [1, None], "a": "é\"\\\n"}, {"a": "é\"\\\n", "b": [1, None]}], [{"b": [1], "a": "é"}, {}, None]),
        ({"const": 0}, [0, 0.0], [False, None, "", [], {}, "0"]), ({"const": 1.5, "type": "number"}, [1.5], [1, 2, "1.5"]), ({"const": None, "type": ["null", "string"]}, [None], ["null", 0])],
    ("`enum`", "alone"): [
        ({"enum": ["a", 1, None, True, [], {"x": 1}]}, ["a", 1, None, True, [], {"x": 1}], ["b", False, 0, [1], {}, {"x": 2}]), ({"enum": ["red", "re"], "type": "string"}, ["red", "re"], ["r", "redd", ""]),
        ({"enum": list(range(1024))}, [0, 1023], [1024, -1, "0"])],
    ("`anyOf`", "alone"): [({"anyOf": [NULL, WHOLE, closed("a", a=TEXT), closed("a", a=NULL)]}, [None, 3, {"a": "x"}, {"a": None}], ["x", {"a": 1}, {}, []])],
    ("`oneOf`", "alone"): [
        ({"oneOf": [TEXT, NULL, {"type": "array", "items": NULL}]}, ["", None, [None]], [1, [1], {}]), ({"oneOf": [{"const": "a"}, {"enum": ["b", 3]}, {"const": 4, "type": "integer"}]}, ["a", "b", 3, 4], ["c", 5, None]),
        ({"oneOf": [WHOLE]}, [1], ["1"])],
    ("`allOf`", "alone"): [({"allOf": [WHOLE], "title": "one"}, [1], ["1", None])],
    ("`$ref`", "alone"): [
        ({"type": "object", "additionalProperties": {"$ref": "#"}}, [{}, {"a": {"b": {}}}], [[], {"a": 1}, {"a": {"b": 1}}]),
        (closed(a=TEXT, b={"$ref": "#/properties/a", "description": "as a"}), [{"a": "x", "b": "y"}, {"b": "y"}], [{"b": 1}]),
        ({"$ref": "#/$defs/a_b", "$defs": {"a_b": closed("v", v=WHOLE, n={"$ref": "#/$defs/a-b"}), "a-b": {"anyOf": [NULL, {"$ref": "#/$defs/a_b"}]}}}, [{"v": 1, "n": {"v": 2, "n": None}}], [None, {"v": None}, {"v": 1, "n": 2}]),
        # Names of rules that the converter would take for one another.
        ({**closed(a={"$ref": "#/$defs/a"}, b={"$ref": "#/$defs/a-b"}), "$defs": {"a": closed(b=WHOLE), "a-b": TEXT}}, [{"a": {"b": 1}, "b": "x"}], [{"b": 1}, {"a": "x"}]),
        ({**closed(**{f"ref-defs-{'q' * n}1x": {"type": "integer", "minimum": 5} for n in range(4)}, z={"$ref": "#/$defs/t"}), "$defs": {"t": text(minLength=1)}}, [{"z": "a"}, {"ref-defs-q1x": 5}], [{"z": 7}, {"ref-defs-q1x": "a"}]),
        (closed(**{"ref-defs-a": WHOLE, "ref": closed(defs=closed(a=NULL)), "x": {"$ref": "#/properties/ref"}}), [{"ref-defs-a": 1, "x": {"defs": {"a": None}}}], [{"x": 1}, {"x": {"defs": 1}}])],
    ("`properties`", "type object"): [
        (closed("b", a=WHOLE, b=TEXT, c=NULL), [{"b": ""}, {"a": 1, "b": "x", "c": None}, {"c": None, "b": "x"}], [{}, {"a": 1}, {"b": "", "d": 1}, {"b": 1}]),
        (closed(**{name: {"const": i} for i, name in enumerate(["string", "root", "space", "integer", "date_time", "a-b", "a_b", "a b", "é", "\"", "\\", "\n", "😀", "item", "qq0x", "$ref", "kv"])}),
         [{}, {"string": 0, "kv": 16}, {"\\": 10, "root": 1}, {"a_b": 6}, {"a b": 7, "a-b": 5}], [{"string": 1}, {"a_b": 5}, {"a_b": 7}, {"other": 1}]),
        (closed(*(f"p{i}" for i in range(256)), **{f"p{i}": NULL for i in range(256)}), [{f"p{i}": None for i in range(256)}], [{f"p{i}": None for i in range(255)}]),
        (closed(**{f"p{i}": NULL for i in range(256)}), [{}, {"p0": None, "p255": None}], [{"p256": None}])],
    ("`required`", "names among"): [(closed("a", "b", b=NULL, a=NULL), [{"b": None, "a": None}], [{}, {"a": None}, {"b": None}]), ({"type": "object", "required": []}, [{}, {"x": 1}], [[]])],
    ("`additionalProperties`", "`false`; without"): [
        ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]), ({"type": "object", "additionalProperties": True, "properties": {}}, [{}, {"a": [1]}], []),
        ({"type": "object", "additionalProperties": {"type": "array", "items": WHOLE}}, [{}, {"a": [], "\"\\": [1]}], [{"a": 1}, {"a": ["x"]}])],
    ("`items`", "type array"): [({"type": "array", "items": {"type": "array", "items": WHOLE}}, [[], [[]], [[1, 2], []]], [[1], [["a"]], {}])],
    ("`minItems`, `maxItems`", "type array"): [
        ({"type": "array", "minItems": low, "maxItems": high, "items": NULL}, [[None] * n for n in {low, high, (low + high) // 2}], [[None] * n for n in {max(low - 1, 0), high + 1} - {low}])
        for low, high in ((0, 0), (0, 1), (1, 1), (0, 3), (2, 3), (3, 3), (1000, 1000), (0, 1000))] + [
        ({"type": "array", "minItems": 2.0}, [[1, 2], [1, "a", None]], [[], [1]]), ({"type": "array", "maxItems": 2}, [[], [1, "a"]], [[1, 2, 3]])],
    ("`prefixItems`", "draft 2020-12"): [
        ({"type": "array", "prefixItems": [WHOLE, TEXT], "minItems": 2, "items": False}, [[1, "a"]], [[], [1], ["a", 1], [1, "a", 2]]),
        ({"$schema": DRAFT_2020, "type": "array", "prefixItems": [{}, NULL], "minItems": 2, "maxItems": 2}, [[1, None], [None, None]], [[1], [1, 2], [1, None, 3]])],
    ("`items`", "a list, draft 6"): [
        ({"type": "array", "items": [WHOLE, TEXT], "minItems": 2, "maxItems": 2}, [[1, "a"]], [[], [1], ["a", 1], [1, "a", 2]]),
        ({"$schema": DRAFT_7, "type": "array", "items": [True], "minItems": 1, "additionalItems": False}, [[1], [[]]], [[], [1, 2]])],
    ("`minLength`, `maxLength`", "type string"): [
        (text(minLength=2), ["ab", "é😀", "\"\\", "abcdef"], ["", "a", "😀"]), (text(maxLength=1), ["", "a", "😀", "\n"], ["ab", "😀😀"]), (text(minLength=0, maxLength=0), [""], ["a"]),
        (text(minLength=2, maxLength=2), ["é\0"], ["", "a", "abc", "😀"]), (text(minLength=2000), ["x" * 2000, "é" * 2100], ["x" * 1999]), (text(maxLength=2000), ["", "x" * 2000], ["x" * 2001])],
    ("`pattern`", "type string"): [
        (text(pattern="^[a-z]+(?:-[0-9]{2,3})?$"), ["a", "abc-12", "z-123"], ["", "a-1", "a-1234", "A", "a-12x", " a"]), (text(pattern="^$"), [""], ["a"]), (text(pattern=r"^\^\$\.\|\(\)\[\]\{\}\*\+\?$"), ["^$.|()[]{}*+?"], ["", "^"]),
        (text(pattern=r"^(a|b|)[\]\[\-x]\.+\x41(?:\u00e9){0,2}[\u00e0-\u00ff]?$"), ["a].A", "-...Aéé", "x.Aéà"], [".A", "a]A", "bx.é"]), (text(pattern=r"^ab*c\.d$"), ["abbc.d", "ac.d"], ["ababc.d", "abc.c.d"])],
    ("`format`", "type string, without"): [
        (text(format="uuid"), ["123e4567-e89b-12d3-a456-426614174000", "ABCDEF01-2345-6789-abcd-ef0123456789"], ["", "123e4567e89b12d3a456426614174000", "123e4567-e89b-12d3-a456-42661417400g"]),
        (text(format="date"), ["2024-02-29", "2000-02-29", "0000-02-29", "0004-12-31", "2023-02-28", "2023-04-30", "9999-01-31"],
         ["2023-02-29", "1900-02-29", "2100-02-29", "2023-02-30", "2023-04-31", "2023-13-01", "2023-00-01", "2023-01-00", "2023-01-32", "2023-1-01", "02023-01-01", "2023-01-01Z", "é023-01-01"])],
    ("`minimum`, `maximum`", "type integer"): [
        ({"type": "integer", "minimum": 100}, [100, 999, 1000, 10**16 - 1], [99, 10, 0, -100, -101]), ({"type": "integer", "maximum": -5}, [-5, -10, 1 - 10**16], [-4, 0, 5, 50]),
        ({"type": "integer", "exclusiveMinimum": -1, "exclusiveMaximum": 3}, [0, 1, 2, 2.0], [-1, 3, 1.5, 10]), ({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 2.5}, [1, 2], [0, 3]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": 5, "maximum": 7, "exclusiveMaximum": 7}, [6], [5, 7, 3]), ({"type": "integer", "minimum": -1e30, "maximum": 2**70}, [0, 10**16 - 1], [1.5])],
    ("`title`, `description`", "anywhere"): [({"title": 1, "description": "d", "default": {"not": {}}, "examples": [{"$ref": "x"}], "$comment": "", "deprecated": True, "readOnly": True, "writeOnly": False, **WHOLE}, [1], ["1"])],
    ("`$defs`, `definitions`", "anywhere"): [({"$defs": {"unread": {"not": {}}}, "definitions": {"a": {**WHOLE, "$defs": {"b": NULL}}}, "anyOf": [{"$ref": "#/definitions/a"}, {"$ref": "#/definitions/a/$defs/b"}]}, [1, None], ["1"])],
    ("`$schema`, `$id`", "outermost"): [
        ({"$schema": draft, "$id": "urn:example:x", "type": "array", "items": {"$ref": "#"}}, [[], [[]]], [[1]])
        for draft in (DRAFT_7, DRAFT_7[:-1], DRAFT_2020, "https://json-schema.org/draft/2019-09/schema", "http://json-schema.org/draft-06/schema#")],
}

UNREAD = ["not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies", "propertyNames", "patternProperties", "minProperties", "maxProperties", "unevaluatedProperties", "unevaluatedItems", "contains", "minContains", "maxContains", "uniqueItems", "multipleOf", "contentEncoding", "contentMediaType", "contentSchema", "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "$vocabulary", "id"]
OF_ONE_TYPE = {"properties": {}, "required": [], "additionalProperties": False, "items": {}, "prefixItems": [{}], "additionalItems": False, "minItems": 0, "maxItems": 1, "minLength": 0, "maxLength": 1, "pattern": "^a$",
               "format": "date", "minimum": 0, "maximum": 1, "exclusiveMinimum": 0, "exclusiveMaximum": 1}
SPOILED_PATTERNS = ["a", "^a", "a$", r"^a\$", "", "^", "^a|b$", "^.$", "^[^a]$", r"^\d$", r"^\w$", r"^\s$", r"^a\b$", r"^\p{L}$", r"^(a)\1$", "^(?=a)a$", "^(?<n>a)$", "^(?i)a$", "^a+?$", "^a??$", "^a**$", "^a{2}?$", "^(a*)*$", "^(a?)+$",
                    "^(a|){2}$", r"^a\.+$", r"^\.\.{2}$", r"^a\u0062*$", "^\"$", r"^\"$", r"^\\$", r"^\n$", r"^\t$", r"^\x22$", r"^\x0a$", r"^\u005c$", r"^\ud83d$", "^[ -~]$", r"^[\x00-\x1f]$", r"^[\u0080-\uffff]$", r"^[\w]$",
                    r"^[\.]$", "^[]$", "^[]a]$", "^[z-a]$", "^[a$", "^(a$", "^a)$", "^a]$", "^a}$", "^a{$", "^a{,2}$", "^a{2,1}$", "^a{2,3$", "^a{2001}$", "^a{x}$", "^{2}$", "^*a$", "^(+a)$", "^(a|*)$", r"^\x4$", r"^\u12$", "^é$", "^[é]$",
                    "^a^b$", "^a$b$", r"^a\/b$", "^" + "a?" * 65 + "$", "^" + "(" * 51 + "a" + ")" * 51 + "$", "^" + "a" * 4096 + "$", "^a\n$"]

# Beginnings of the rows -> (schema, the keyword named, its place).
REFUSED: dict[tuple[str, str], list[tuple[Any, str, str]]] = {
    ("any other", "anywhere"): [({**WHOLE, key: value}, key, "#") for key in UNREAD for value in ({}, 1)] + [
        (closed(a={**TEXT, key: 1}), key, "#/properties/a") for key in ("minlength", "nullable", "discriminator", "x-order", "description ", "Type")],
    ("`false`", "as a schema"): [(False, "false", "#"), (closed(a=False), "false", "#/properties/a"), ({"type": "array", "items": False}, "false", "#/items")],
    ("keyword of one type", "without `type`"): [({key: value}, key, "#") for key, value in OF_ONE_TYPE.items()] + [({"anyOf": [NULL, {"maxLength": 2}]}, "maxLength", "#/anyOf/1")],
    ("keyword of one type", "with another"): [({"type": "boolean", key: value}, key, "#") for key, value in OF_ONE_TYPE.items()] + [({"type": ["string", "null"], "minItems": 1}, "minItems", "#")],
    ("any keyword", "beside `$ref`"): [
        ({form: value, key: other, "$defs": {"a": {}}}, key, "#")
        for form, value in (("$ref", "#/$defs/a"), ("anyOf", [{}]), ("oneOf", [{}]), ("allOf", [{}]), ("const", 1), ("enum", [1]))
        for key, other in (*OF_ONE_TYPE.items(), ("type", "integer")) if key != "type" or form not in ("const", "enum")] + [({"anyOf": [{}], "allOf": [{}]}, "allOf", "#"), ({"const": 1, "enum": [1]}, "enum", "#")],
    ("`const`, `enum`", "not of the `type`"): [({"type": "string", "const": 1}, "const", "#"), ({"type": ["null", "integer"], "enum": [1, 1.5]}, "enum", "#"), ({"type": "number", "enum": [1, 1.5, True]}, "enum", "#")],
    ("`const`, `enum`", "a whole number"): [({"const": value}, "const", "#") for value in (1.0, -2.0, -0.0, 1e30, 1e-9, [[{"a": 5.0}]], 2**64)] + [({"enum": [1, 2.0]}, "enum", "#")],
    ("`enum`", "empty"): [({"enum": []}, "enum", "#"), ({"enum": list(range(1025))}, "enum", "#"), ({"enum": ["x" * 9] * 60_000}, "enum", "#")],
    ("`oneOf`", "alternatives a value"): [
        ({"oneOf": pair, "$defs": {"a": {"anyOf": [NULL, WHOLE]}}}, "oneOf", "#")
        for pair in ([WHOLE, {"type": "number"}], [{}, NULL], [NULL, NULL], [{"const": 1}, WHOLE], [{"enum": [1, 2]}, {"const": 2}], [{"const": []}, {"const": {}}, {"const": [1]}], [{"type": ["string", "null"]}, NULL], [{"$ref": "#/$defs/a"}, WHOLE], [closed("a", a=NULL), closed("b", b=NULL)])],
    ("`allOf`", "more than one"): [({"allOf": [{}, {}]}, "allOf", "#"), (closed(a={"allOf": [closed(a=NULL), closed(b=NULL)]}), "allOf", "#/properties/a")],
    ("`anyOf`, `oneOf`", "more than 1,024"): [
        ({"anyOf": [{"enum": list(range(600))}, {"enum": list(range(600))}]}, "anyOf", "#"), ({"anyOf": [NULL] * 1025}, "anyOf", "#"), ({"oneOf": [{"const": i} for i in range(1025)]}, "oneOf", "#"),
        ({"type": "array", "items": {"$ref": "#/$defs/a0"}, "$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} if i < 60 else NULL for i in range(61)}}, "anyOf", "#/$defs/a0")],
    ("`$ref`", "another document"): [
        ({"type": "array", "items": {"$ref": ref}, "$defs": {"a": WHOLE, "a/b": WHOLE, "a%b": WHOLE}, "examples": [{}], "x": 1} if ref == "#/x" else {"type": "array", "items": {"$ref": ref}, "$defs": {"a": WHOLE, "a/b": WHOLE}, "examples": [{}]}, "$ref", "#/items")
        for ref in ("http://json-schema.org/draft-07/schema#", "other.json", "other.json#/$defs/a", "", "#anchor", "#/$defs/a~1b", "#/$defs/a%25b", "#/$defs/b", "#/$defs", "#/", "#/$defs/a/type", "#/examples/0", "#/items/$ref", "#/type", "$defs/a", "file:///etc/passwd")],
    ("`$ref`", "through a schema"): [({"$ref": "#/$defs/a/$defs/b", "$defs": {"a": {"$id": "a.json", "$defs": {"b": WHOLE}}}}, "$ref", "#")],
    ("`$ref`", "back to itself"): [
        ({"$ref": "#"}, "$ref", "#"), ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [NULL, {"$ref": "#/$defs/a"}]}}}, "$ref", "#/$defs/a"), ({"allOf": [{"$ref": "#/allOf/0"}]}, "$ref", "#/allOf/0"),
        (closed("a", a={"$ref": "#"}), "$ref", "#"), ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "$ref", "#"), ({"type": "array", "items": {"$ref": "#/$defs/p"}, "$defs": {"p": {"type": "array", "prefixItems": [NULL, {"$ref": "#/$defs/p"}], "minItems": 2, "items": False}}}, "$ref", "#/$defs/p")],
    ("`$id`, `$schema`", "not outermost"): [
        ({"type": "array", "items": {"$id": "x"}}, "$id", "#/items"), ({"$ref": "#/$defs/a", "$defs": {"a": {"$schema": DRAFT_7}}}, "$schema", "#/$defs/a")] + [
        ({"$schema": draft}, "$schema", "#") for draft in ("http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-03/schema#", "http://localhost:1234/meta.json", "", 7)],
    ("`additionalProperties`", "missing"): [({"type": "object", "properties": {"a": {}}, **more}, "additionalProperties", "#") for more in ({}, {"additionalProperties": True}, {"additionalProperties": {}}, {"additionalProperties": NULL})],
    ("`required`", "a name"): [(closed("b", a={}), "required", "#"), ({"type": "object", "required": ["a"]}, "required", "#"), ({"type": "object", "required": ["a"], "additionalProperties": NULL}, "required", "#")],
    ("`properties`", "named"): [
        (closed(**{name: NULL}), "properties", "#") for name in ("", "*", "integral_part", "integral part", "decimal.part", "decimaléé_part", "x" * 257, "é" * 129)] + [
        (closed(a=closed(**{"": NULL})), "properties", "#/properties/a"), (closed(**{f"p{i}": NULL for i in range(257)}), "properties", "#")],
    ("`prefixItems`, a list", "shorter"): [
        ({"type": "array", key: [NULL, NULL], **more}, key, "#")
        for key, rest in (("prefixItems", "items"), ("items", "additionalItems")) for more in ({}, {"minItems": 2}, {rest: False}, {"minItems": 1, rest: False}, {"minItems": 3, rest: False}, {"maxItems": 2}, {"minItems": 2, "maxItems": 3})] + [
        ({"$schema": DRAFT_7, "type": "array", "prefixItems": [NULL], "minItems": 1, "maxItems": 1}, "prefixItems", "#"), ({"$schema": DRAFT_2020, "type": "array", "items": [NULL], "minItems": 1, "maxItems": 1}, "items", "#")],
    ("`items`, `additionalItems`", "beside such"): [
        ({"type": "array", "prefixItems": [NULL], "minItems": 1, "items": more}, "items", "#") for more in (True, NULL)] + [
        ({"type": "array", "items": [NULL], "minItems": 1, "additionalItems": more}, "additionalItems", "#") for more in (True, NULL)] + [({"type": "array", "items": NULL, "additionalItems": False}, "additionalItems", "#")],
    ("`minItems`, `maxItems`, `minLength`", "beyond"): [
        ({"type": kind, key: value}, key, "#") for kind, keys, values in (("array", ("minItems", "maxItems"), (1001, 10**6, 2**63, 1e300)), ("string", ("minLength", "maxLength"), (2001, 10**6, 2**63, 1e300))) for key in keys for value in values] + [
        ({"type": "array", "minItems": 2, "maxItems": 1}, "maxItems", "#"), (text(minLength=2, maxLength=1), "maxLength", "#")],
    ("`minLength`, `maxLength`, `format`", "beside `pattern`"): [(text(pattern="^a$", **{key: value}), key, "#") for key, value in (("minLength", 1), ("maxLength", 1), ("format", "date"))] + [(text(format="uuid", minLength=1), "minLength", "#")],
    ("`pattern`", "unanchored"): [(text(pattern=pattern), "pattern", "#") for pattern in SPOILED_PATTERNS],
    ("`format`", "any other"): [(text(format=name), "format", "#") for name in ("time", "date-time", "uuid4", "uuid1", "email", "ipv4", "uri", "regex", "hostname", "int32", "binary", "Date", "")],
    ("`minimum`, `maximum`", "type number"): [
        ({"type": kind, key: 1}, key, "#") for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") for kind in ("number", ["integer", "number"])] + [
        ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum", "#"), ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "exclusiveMinimum", "#"), ({"type": "integer", "maximum": -1e300}, "maximum", "#"),
        ({"type": "integer", "minimum": 10**16}, "minimum", "#")],
}


def rows(section: str) -> list[tuple[str, str]]:
    part = DOC.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
    return [(row[0], row[1]) for row in cells[2:]]


@pytest.mark.parametrize(("section", "cases"), [("Taken", TAKEN), ("Refused", REFUSED)])
def test_every_row_of_the_table_is_tested(section: str, cases: dict[tuple[str, str], Any]) -> None:
    found = {row: [key for key in cases if row[0].startswith(key[0]) and row[1].startswith(key[1])] for row in rows(section)}
    assert [row for row, keys in found.items() if len(keys) != 1] == []
    assert sorted(keys[0] for keys in found.values()) == sorted(cases)
    if section == "Refused":
        named = re.findall(r"`([^`]+)`", next(where for keyword, where in found if keyword == "any other"))
        assert named == UNREAD


@pytest.mark.parametrize("row", TAKEN, ids=" ".join)
def test_taken(tiny: Model, row: tuple[str, str]) -> None:
    for schema, good, bad in TAKEN[row]:
        grammar = Grammar.from_schema(schema)
        for value in good:
            assert is_valid(schema, value)
            check(tiny, schema, value, valid=True, grammar=grammar)
        for value in bad:
            assert not is_valid(schema, value)
            check(tiny, schema, value, valid=False, grammar=grammar)


@pytest.mark.parametrize("row", REFUSED, ids=" ".join)
def test_refused(row: tuple[str, str]) -> None:
    for schema, keyword, place in REFUSED[row]:
        assert refusal(schema) == (keyword, place), json.dumps(schema)[:200]


def test_what_is_no_schema() -> None:
    for schema, keyword in (
        ({"type": 5}, "type"), ({"type": "any"}, "type"), ({"type": []}, "type"), ({"type": ["null", "null"]}, "type"), ({"type": [NULL]}, "type"), ({"type": "object", "properties": []}, "properties"),
        ({"type": "object", "required": "a"}, "required"), (closed(1, a={}), "required"), (closed(a=5), "schema"), (closed(a=None), "schema"), ({"type": "array", "items": "x"}, "schema"), ({"type": "array", "prefixItems": {}}, "prefixItems"),
        ({"type": "array", "prefixItems": []}, "prefixItems"), ({"type": "array", "minItems": -1}, "minItems"), ({"type": "array", "maxItems": 1.5}, "maxItems"), ({"type": "array", "minItems": "1"}, "minItems"), (text(maxLength=None), "maxLength"),
        (text(pattern=1), "pattern"), (text(format=None), "format"), ({"type": "integer", "minimum": "1"}, "minimum"), ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, "exclusiveMinimum"), ({"enum": {"a": 1}}, "enum"), ({"anyOf": []}, "anyOf"),
        ({"anyOf": NULL}, "anyOf"), ({"oneOf": [1, 2]}, "schema"), ({"$ref": 1}, "$ref"), ({"$defs": []}, "$defs"), ({"definitions": 1}, "definitions"), ({"$id": 1}, "$id"), ("[]", "schema"), ("null", "schema"), ('"string"', "schema"), ("1", "schema")):
        with pytest.raises(errors.FormatError, match=rf"^{re.escape(keyword)} at #"):
            Grammar.from_schema(schema)


def test_what_is_no_json() -> None:
    cyclic: dict[str, Any] = {}
    cyclic["items"] = cyclic
    for schema in ("", "{", "{}{}", "{'a': 1}", "NaN", '{"const": NaN}', '{"const": "\ud800"}', '{"const": "\\ud800"}', '{"type": "null", "type": "string"}', '{"x": {"a": 1, "b": [{"c": 1, "c": 1}]}}', '{"maximum": 1e999}', "\ufeff", '{"a\0": 1',
                   {"const": math.nan}, {"const": math.inf}, {"const": {1}}, {"const": b"x"}, {"properties": {1: {}}}, {"enum": [{None: 1}]}, {"const": "\ud800"}, cyclic, {"const": object()}):
        with pytest.raises(errors.FormatError):
            Grammar.from_schema(schema)  # type: ignore[arg-type]
    for raw in (b"\xff", b'{"a": "\xed\xa0\x80"}', b'{"a": "\xc0\xaf"}'):
        with pytest.raises(errors.FormatError, match="UTF-8 at byte"):
            take_text_at(library().pyl_schema_to_gbnf, 2, raw, len(raw))


def test_schemas_in_every_dress() -> None:
    plain = closed("b", b=WHOLE, a=TEXT)
    grammar = Grammar.from_schema(plain)
    assert grammar.root == "root"
    assert Grammar.from_schema(json.dumps(plain)) == grammar
    assert Grammar.from_schema(MappingProxyType({**plain, "properties": MappingProxyType(plain["properties"])})) == grammar
    assert Grammar.from_schema({**plain, "required": ("b",)}) == grammar
    assert Grammar.from_schema(True) == Grammar.from_schema({}) == Grammar.from_schema("true")
    assert Grammar.from_schema(closed("a", a=TEXT, b=WHOLE)) != grammar


# ---------------------------------------------------------------------------------------------------------- the public suite


@pytest.fixture(scope="module")
def suite() -> Path:
    folder = os.environ.get("PYLLOYAL_SCHEMA_SUITE", "")
    if not folder or not (Path(folder) / "draft7").is_dir():
        pytest.fail(f"the public JSON-Schema test suite is not there (PYLLOYAL_SCHEMA_SUITE={folder!r}): `python tools/fetch_schema_suite.py` fetches it and prints its folder, or says why it cannot")
    return Path(folder)


def groups(suite: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The required tests of two drafts, and those of the formats that are taken."""
    for draft in ("draft7", "draft2020-12"):
        files = [*sorted((suite / draft).glob("*.json")), *(suite / draft / "optional" / "format" / f"{name}.json" for name in ("date", "uuid"))]
        for file in filter(Path.is_file, files):
            for group in json.loads(file.read_text(encoding="utf-8")):
                yield f"{draft}/{file.name}: {group['description']}", group


def spelled_out(schema: Any) -> Any:
    """A schema of the suite with what it leaves open: most of its schemas name no type, as a grammar needs."""
    if not isinstance(schema, dict):
        return schema
    out = {key: {name: spelled_out(each) for name, each in value.items()} if key in ("properties", "$defs", "definitions") and isinstance(value, dict) else
           [spelled_out(each) for each in value] if isinstance(value, list) and key in ("anyOf", "oneOf", "allOf", "prefixItems", "items") else
           spelled_out(value) if key in ("items", "additionalProperties", "additionalItems") else value for key, value in schema.items()}
    if not out.keys() & {"type", "const", "enum", "$ref", "anyOf", "oneOf", "allOf"}:
        kinds = {"object": ("properties", "required", "additionalProperties"), "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"), "string": ("minLength", "maxLength", "pattern", "format"),
                 "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")}
        if mine := [kind for kind, keys in kinds.items() if out.keys() & set(keys)]:
            out["type"] = mine[0] if len(mine) == 1 else mine
    if out.get("type") == "object" and (names := [*out.get("properties", ()), *out.get("required", ())]):
        out["properties"] = {name: out.get("properties", {}).get(name, {}) for name in names}
        out["additionalProperties"] = False
    if out.get("type") == "array" and (listed := out.get("prefixItems") or (isinstance(out.get("items"), list) and out["items"])):
        out["minItems"] = out["maxItems"] = len(listed)
        out.pop("items" if "prefixItems" in out else "additionalItems", None)
    return out


def count(model: Model, cases: Iterator[tuple[str, Any, list[tuple[Any, bool]]]]) -> tuple[Counter[str], Counter[str]]:
    """How many schemas and instances were right, and how many schemas were refused for which keyword. Anything else is an error."""
    taken: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for name, schema, instances in cases:
        try:
            grammar = Grammar.from_schema(schema)
        except errors.UnsupportedOperationError as error:
            refused[str(error).split(" at #")[0]] += 1
            continue
        taken["schemas"] += 1
        for value, valid in instances:
            assert is_valid(schema, value) == valid, f"the oracle is wrong about {name}"
            check(model, schema, value, valid=valid, grammar=grammar)
            taken["valid" if valid else "invalid"] += 1
    return taken, refused


def test_the_public_suite(tiny: Model, suite: Path) -> None:
    taken, refused = count(tiny, ((name, group["schema"], [(each["data"], each["valid"]) for each in group["tests"]]) for name, group in groups(suite)))
    print(f"\nas it stands: {dict(taken)}, refused {refused.total()}: {dict(refused.most_common())}")
    assert dict(taken) == {"schemas": 104, "valid": 164, "invalid": 232}
    assert refused.total() == 521
    assert set(refused) <= {*UNREAD, *OF_ONE_TYPE, "type", "const", "oneOf", "allOf", "$ref", "$id", "$schema", "false"}


def test_the_public_suite_spelled_out(tiny: Model, suite: Path) -> None:
    def cases() -> Iterator[tuple[str, Any, list[tuple[Any, bool]]]]:
        for name, group in groups(suite):
            schema = spelled_out(group["schema"])
            if schema != group["schema"]:
                values = [each["data"] for each in group["tests"]]
                try:
                    yield name, schema, [(value, is_valid(schema, value)) for value in values]
                except (KeyError, RecursionError):
                    yield name, schema, [(None, True), (None, False)]  # a keyword the oracle does not know, or a circle: the kernel has to refuse it

    taken, refused = count(tiny, cases())
    print(f"\nspelled out: {dict(taken)}, refused {refused.total()}: {dict(refused.most_common())}")
    assert dict(taken) == {"schemas": 111, "valid": 160, "invalid": 313}
    assert refused.total() == 176


# ----------------------------------------------------------------------------------------------------------------- hostile


def nested(n: int, inner: str = "{}") -> str:
    return '{"items":' * n + inner + "}" * n


def chain(n: int, link: Any) -> dict[str, Any]:
    return {"$ref": "#/$defs/a0", "$defs": {**{f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(n)}, f"a{n}": NULL}}


@pytest.mark.slow
def test_hostile_schemas_are_refused() -> None:
    """Each at once: what they would cost otherwise is a crash, or days, so that to come to an end is the test."""
    for schema in (
        "[" * 100_000, '{"a":' * 100_000, nested(100_000), "[" * 100_000 + "]" * 100_000, nested(129), json.dumps({"enum": ["x" * 100] * 100_000}), " " * 10_000_000 + "{}", json.dumps({"const": "\"" * 5_000_000}),
        json.dumps({f"k{i}": 1 for i in range(70_000)}), json.dumps({"default": {f"k{i}": 1 for i in range(1025)}}), {"anyOf": [{"enum": [i]} for i in range(5000)]},
        {"type": "array", "items": {"anyOf": [{"type": "array", "items": {"anyOf": [NULL] * 70}}] * 70}}, closed(**{f"p{i}": text(pattern=f"^a{i}$") for i in range(256)}, more=text(pattern="^a$")) | {"description": "256 properties are the limit"},
        {"type": "array", "items": {"anyOf": [text(pattern=f"^a{i}$") for i in range(257)]}}, chain(300, lambda link: link), chain(200, lambda link: {"type": "array", "items": link}), chain(200, lambda link: closed(p=link)), chain(200, lambda link: {"anyOf": [NULL, link]}),
        chain(60, lambda link: {"anyOf": [link, link]}), closed(*(f"p{i}" for i in range(200)), **{f"p{i}": {"type": "integer", "minimum": 1000 + i} for i in range(200)}),
        closed(**{f"{'é' * 100}{i}": closed(**{f"{'é' * 100}{j}": {} for j in range(100)}) for i in range(100)}), text(pattern="^" + "(" * 4000 + ")" * 4000 + "$"), text(pattern="^((((a{2000}){2000}){2000}){2000}){2001}$"),
        {"type": "array", "items": {"type": "array", "prefixItems": [text(minLength=2000, maxLength=2000)] * 1000, "minItems": 1000, "items": False}, "minItems": 10**9}):
        with pytest.raises(errors.UnsupportedOperationError):
            Grammar.from_schema(schema)


def test_numbers_of_a_refusal() -> None:
    with pytest.raises(errors.UnsupportedOperationError, match="more than 1048576 bytes") as info:
        Grammar.from_schema(" " * 1_048_575 + "{}")
    assert (info.value.need, info.value.have) == (1_048_577, 1_048_576)
    assert Grammar.from_schema(" " * 1_048_574 + "{}") == Grammar.from_schema({})
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(errors.FormatError, match="recursion"):
        Grammar.from_schema(deep)
    while deep:  # an object of that depth cannot be dropped at once
        deep = deep["items"]


@pytest.mark.slow
def test_the_largest_that_are_taken(tiny: Model) -> None:
    deep: Any = NULL
    for _ in range(127):
        deep = {"type": "array", "items": deep}
    wide = {"type": "array", "items": {"anyOf": [closed(**{f"{i}p{j}": NULL for j in range(256)}) for i in range(7)]}}
    for schema, value in (
        (deep, json.loads("[" * 127 + "null" + "]" * 127)), (wide, [{"3p0": None, "3p255": None}, {}]), ({"const": "é\"" * 100_000}, "é\"" * 100_000), (text(pattern="^" + "a?" * 64 + "$"), "a" * 64), (text(pattern="^(?:a{0,2000}b){2,2000}$"), "aab" * 5),
        (chain(255, lambda link: link), None), (chain(127, lambda link: {"type": "array", "items": link}), [])):
        check(tiny, schema, value, valid=True, grammar=Grammar.from_schema(schema))


def test_on_a_small_stack() -> None:
    """The converter recurses along references; what is taken has to fit the smallest stack a thread usually has."""
    found: list[Any] = []

    def convert() -> None:
        for link in (lambda x: {"type": "array", "items": x}, lambda x: closed(p=x), lambda x: {"anyOf": [NULL, x]}, lambda x: {"type": "array", "prefixItems": [x], "minItems": 1, "maxItems": 1}):
            found.append(Grammar.from_schema(chain(127, link)))

    before = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=convert)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert len(found) == 4
