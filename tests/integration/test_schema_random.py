# ruff: noqa: E701 (a case a line reads as the table it is)
"""JSON Schema to GBNF on schemas, patterns, bounds and outputs that nobody wrote."""
from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections import Counter
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from pylloyal import Finish, Grammar, Model, Sampling, errors
from tests.integration.schema_oracle import NULL, TEXT, WHOLE, accepts, check, closed, is_valid, target, text

EXAMPLES = int(os.environ.get("PYLLOYAL_SCHEMA_EXAMPLES", "0"))  # more, and other ones each time, on demand
LONG_RUN = hypothesis.settings(max_examples=EXAMPLES or 250, derandomize=not EXAMPLES, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
# Names that the converter might confuse with those of its rules, and names that have to be escaped.
NAMES = ["a", "b", "a-b", "a_b", "string", "root", "integer", "number", "date-time", "date_time", "space", "char", "dot", "item", "tuple-0", "additional", "x y", "é", "q", "qq1x", "ref-defs-qq1x", "ref_defs_qq1x", "ref", "defs", "0", "value", "kv",
         "rest", "a-kv", "k-rest", "\"", "\\", "\n", "😀", "integral", "part", "decimal", "null", "0-1", "alternative-0", "$ref", "type", "anyOf", "\x7f"]
PATTERNS = {"^[a-z]{2,3}$": ["ab", "xyz"], "^(?:a|bc)*d$": ["d", "abcad"], "^x?[0-9]+$": ["7", "x12"], "^$": [""], r"^\u00e9+$": ["é", "éé"], "^(a|)b{0,2}$": ["", "abb", "b"]}
STRINGS = ["", "a", "ab", "d", "x12", "2024-02-29", "2023-02-29", "123e4567-e89b-12d3-a456-426614174000", "é", "😀x", "a\"b", "\\", "\n\t", "\x7f", "\ud7ff", "\uffff"]


class Maker:
    """Draws schemas of what is taken, values that satisfy them (nearly always), and values that nearly do."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.names = [self.pick(NAMES) for _ in range(3)] + ["c"]
        self.defs: dict[str, Any] = {}

    def pick(self, choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def upto(self, high: int, low: int = 0) -> int:
        return int(self.draw(st.integers(low, high)))

    def string(self) -> str:
        return str(self.draw(st.one_of(st.sampled_from(STRINGS), st.text(max_size=5))))

    def value(self, depth: int) -> Any:
        match self.upto(7 if depth else 4):
            case 0: return self.pick([None, True, False])
            case 1 | 2: return self.pick([0, 1, -1, 0.5, -1.25, self.upto(10**15, -10**15)])
            case 3 | 4: return self.string()
            case 5 | 6: return [self.value(depth - 1) for _ in range(self.upto(2))]
        return {self.pick([*self.names, "zz"]): self.value(depth - 1) for _ in range(self.upto(2))}

    def schema(self, depth: int) -> Any:
        match self.upto(19 if depth else 11):
            case 0: return self.pick([True, {}, NULL, {"type": "boolean"}, {"title": "x"}])
            case 1: return self.pick([WHOLE, {"type": "number"}, TEXT])
            case 2: return {"type": self.pick([["null", "integer"], ["array", "string"], ["object", "number", "boolean"]])}
            case 3 | 4: return text(minLength=(low := self.upto(3)), **({"maxLength": low + self.upto(2)} if self.upto(1) else {}))
            case 5: return text(pattern=self.pick(sorted(PATTERNS)))
            case 6: return text(format=self.pick(["date", "uuid"]))
            case 7 | 8:
                size = 10 ** self.upto(15, 1)
                low, high = sorted((self.upto(size, -size), self.upto(size, -size)))
                return {"type": "integer", **self.pick([{"minimum": low}, {"maximum": high}, {"exclusiveMinimum": low - 0.5, "maximum": high}, {"minimum": low, "exclusiveMaximum": high + 1}])}
            case 9: return {"const": self.value(2)}
            case 10: return {"enum": [self.value(1) for _ in range(self.upto(3, 1))]}
            case 11: return {"oneOf": [text(minLength=1), NULL, WHOLE][: self.upto(3, 1)]}
            case 12 | 13 | 14:
                properties = {self.pick(self.names): self.schema(depth - 1) for _ in range(self.upto(4, 1))}
                return closed(*(name for name in properties if self.upto(1)), **properties)
            case 15: return {"type": "object", "additionalProperties": self.pick([False, True, self.schema(depth - 1)])}
            case 16: return {"type": "array", "items": self.schema(depth - 1), "minItems": (least := self.upto(2)), **({"maxItems": least + self.upto(2)} if self.upto(1) else {})}
            case 17:
                items = [self.schema(depth - 1) for _ in range(self.upto(3, 1))]
                return {"type": "array", "minItems": len(items), **self.pick([{"prefixItems": items, "items": False}, {"items": items, "maxItems": len(items)}])}
            case 18: return {self.pick(["anyOf", "anyOf", "allOf"]): [self.schema(depth - 1)]} if self.upto(2) == 0 else {"anyOf": [self.schema(depth - 1), self.schema(depth - 1)]}
        name = self.pick(["n-1", "n_1", "x"])
        if name not in self.defs:
            self.defs[name] = True  # until it is made, it may refer to itself
            self.defs[name] = self.schema(depth - 1)
        return {"$ref": f"#/$defs/{name}"}

    def example(self, schema: Any, root: Any, depth: int = 0) -> Any:
        if isinstance(schema, bool) or not schema.keys() - {"title", "$defs"} or depth > 9:
            return self.value(1)
        if "$ref" in schema:
            return self.example(target(root, schema["$ref"]), root, depth + 1)
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return self.example(self.pick(schema[key]), root, depth + 1)
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else self.pick(schema["enum"])
        kind = schema["type"] if isinstance(schema["type"], str) else self.pick(schema["type"])
        if kind == "integer":
            low, high = math.ceil(max(schema.get("minimum", -10**15), schema.get("exclusiveMinimum", -10**15))), math.floor(min(schema.get("maximum", 10**15), schema.get("exclusiveMaximum", 10**15)))
            return self.pick([low, high, low + 1, high - 1, low - 1, high + 1, (low + high) // 2, self.upto(max(low, high), low)])
        if kind == "string":
            if "pattern" in schema:
                return self.pick([*PATTERNS[schema["pattern"]], *STRINGS])
            found = self.pick(STRINGS[5:8]) if "format" in schema else self.string()
            return (found + self.pick("aé😀\"") * max(schema.get("minLength", 0) - len(found), 0))[: schema.get("maxLength", 99)]
        if kind == "array":
            listed = schema.get("prefixItems") or (schema["items"] if isinstance(schema.get("items"), list) else None)
            n = self.upto(schema.get("maxItems", schema.get("minItems", 0) + 2), schema.get("minItems", 0))
            return [self.example(each, root, depth + 1) for each in listed or [schema.get("items", True)] * n]
        if kind == "object":
            if properties := schema.get("properties"):
                return {name: self.example(each, root, depth + 1) for name, each in properties.items() if name in schema["required"] or self.upto(1)}
            return {} if schema.get("additionalProperties") is False else {self.pick([*self.names, "", "\""]): self.example(schema.get("additionalProperties", True), root, depth + 1) for _ in range(self.upto(2))}
        return {"null": None, "boolean": True, "number": self.pick([0, -3, 12.5, 1e-7, 1e15, 0.1])}[kind]

    def spoiled(self, value: Any) -> Any:
        """Something else, but not much."""
        if isinstance(value, list | dict) and value and self.upto(2):
            keys = range(len(value)) if isinstance(value, list) else list(value)
            key, out = self.pick(keys), value.copy()
            match self.upto(3):
                case 0: out.pop(key)
                case 1 if isinstance(out, list): out.insert(key, self.value(1))
                case 1: out[self.pick(["zz", *self.names])] = self.value(1)
                case _: out[key] = self.spoiled(value[key])
            return out
        if isinstance(value, str) and self.upto(1):
            return value[:-1] if self.upto(1) else value + self.pick("a0é")
        if isinstance(value, int | float) and not isinstance(value, bool) and self.upto(1):
            return value + self.pick([1, -1, 0.5])
        return self.value(1)


@pytest.mark.slow
def test_random_schemas(tiny: Model) -> None:
    seen: Counter[str] = Counter()

    @LONG_RUN
    @hypothesis.given(st.data())
    def run(data: st.DataObject) -> None:
        make = Maker(data.draw)
        inner = make.schema(3)
        schema = {"anyOf": [inner], "$defs": make.defs}
        try:
            grammar = Grammar.from_schema(schema)
        except errors.UnsupportedOperationError as error:
            if not re.match(r"\$ref at .*(leads back to itself|no value satisfies it)", str(error)):
                raise
            return
        values = [make.example(inner, schema) for _ in range(3)]
        for value in (*values, *map(make.spoiled, values), make.value(2)):
            valid = is_valid(schema, value)
            seen["valid" if valid else "invalid"] += 1
            check(tiny, schema, value, valid=valid, grammar=grammar)

    run()
    assert min(seen["valid"], seen["invalid"]) > 500, seen


@st.composite
def patterns(draw: st.DrawFn, depth: int = 0) -> str:
    atom = st.sampled_from([*"ab01-_ /!", *(f"\\{c}" for c in "^$.[]()|{}*+?-"), r"\x41", r"\u00e9", "[ab]", "[a-c0-9]", "[-a]", "[a-]", r"[\]\[]", r"[\u00e0-\u00ff]", "[+-]", "[a^]", "[.*]", "[(|)]"])
    parts = []
    for _ in range(draw(st.integers(0 if depth else 1, 3))):
        if depth > 2 or draw(st.booleans()):
            parts.append(draw(atom) + draw(st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "{0}"])))
        else:  # no group without an upper bound inside another, for which Python's own engine would take for ever
            inner = "|".join(draw(st.lists(patterns(depth + 1), min_size=1, max_size=2)))
            parts.append(draw(st.sampled_from(["(", "(?:"])) + inner + ")" + draw(st.sampled_from(["", "", "?", "{2}", "{1,2}", "{0}", *([] if depth else ["+", "*"])])))
    return "".join(parts)


@pytest.mark.slow
def test_random_patterns(tiny: Model) -> None:
    seen: Counter[bool] = Counter()
    letters = st.characters(codec="latin-1", categories=("L", "N", "P", "S", "Zs"))

    @LONG_RUN
    @hypothesis.given(st.data())
    def run(data: st.DataObject) -> None:
        pattern = data.draw(patterns())
        try:
            grammar = Grammar.from_schema(text(pattern=f"^{pattern}$"))
        except errors.UnsupportedOperationError as error:
            if not re.search("escaped character|may be empty", str(error)):
                raise
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # "[[" might once mean something else
            meant = re.compile(pattern)
        good = data.draw(st.lists(st.from_regex(meant, fullmatch=True, alphabet=letters), min_size=1, max_size=3))
        good = [word for word in good if len(word) <= 20]
        for value in (*good, *(word[:-1] for word in good), *(word + "a" for word in good), *(word.replace("a", "b", 1) for word in good), "", "a"):
            matches = bool(meant.fullmatch(value))
            seen[matches] += 1
            assert accepts(tiny, grammar, json.dumps(value, ensure_ascii=False)) == matches, (pattern, value)

    run()
    assert min(seen[True], seen[False]) > 500, seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["minimum", "maximum", "both"])
def test_bounds_of_every_size(tiny: Model, kind: str) -> None:
    edges = sorted({0, 1, 2, 5, 9, 10, 11, 19, 20, 50, 99, 100, 101, 109, 110, 190, 199, 200, 305, 999, 1000, 1001, 4321, 10**8 - 1, 10**8, 10**15, 123456789012345, 10**16 - 1})
    edges = sorted({*edges, *(-n for n in edges)})
    texts = {n: str(n) for base in edges for n in (base - 1, base, base + 1) if abs(n) < 10**16}
    for low, high in [(low, 10**16 - 1) for low in edges] if kind == "minimum" else [(1 - 10**16, high) for high in edges] if kind == "maximum" else [(a, b) for i, a in enumerate(edges) for b in edges[i::7]]:
        schema = {"type": "integer", **({"minimum": low} if kind != "maximum" else {}), **({"maximum": high} if kind != "minimum" else {})}
        grammar = Grammar.from_schema(schema)
        sample = {*range(-12, 13), 55, 99, 111, *(n + d for n in (low, high) for d in (-10, -1, 0, 1, 10))} if kind == "both" else texts
        for n in sample:
            if abs(n) < 10**16:
                assert accepts(tiny, grammar, str(n)) == (low <= n <= high), (schema, n)
        assert not any(accepts(tiny, grammar, odd) for odd in ("", "-", "00", "01", "-01", "007", "1.0", "+1", "1e1"))


# -------------------------------------------------------------------------------------------------------------- generation

PERSON = {**closed("name", "age", "tags", "kind", name=text(minLength=1, maxLength=8), age={"type": "integer", "minimum": 0, "maximum": 120}, tags={"type": "array", "items": {"enum": ["red", "blue", "é\"\\"]}, "maxItems": 3},
                            kind={"oneOf": [NULL, {"$ref": "#/$defs/code"}]}, next={"$ref": "#"}), "$defs": {"code": text(pattern="^[A-Z]{2}-[0-9]{1,3}$")}}
GENERATED = [PERSON, text(maxLength=6), {"type": "array", "items": text(minLength=1, maxLength=3), "minItems": 2, "maxItems": 2}, text(format="date"), {"type": "integer", "minimum": 100, "maximum": 31000}, {"type": "number"},
             {"type": "array", "items": {"anyOf": [WHOLE, {"type": "boolean"}, {"$ref": "#"}]}, "maxItems": 3}, {"type": "object", "additionalProperties": {"type": ["null", "integer"]}}, {"enum": [1.5, {"a": [None]}, "é"]}]


@pytest.mark.parametrize("schema", GENERATED, ids=range(len(GENERATED)))
def test_whatever_a_model_says_satisfies_the_schema(tiny: Model, schema: dict[str, Any]) -> None:
    """Weights at random, so anything that may be said is said; all of it is JSON, UTF-8 and valid."""
    closing = dict.fromkeys(tiny.vocab.encode('"}],'), 2.0)  # so that it comes to an end
    high = {t: 2.5 for t in range(len(tiny.vocab)) if tiny.vocab.piece(t)[:1] >= b"\x80"}
    n_done = 0
    with tiny.store(n_ctx=4096, n_branches=9, n_threads=1) as store:
        root = store.root(grammar=Grammar.from_schema(schema))
        root.prefill("say")
        for start in (0, 8):
            forks = root.fork(8, seed=range(start, start + 8))
            for i, fork in enumerate(forks):
                fork.sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=start + i)
                fork.set_bias(closing | (high if i % 2 else {}))
            done = store.tick(forks, n_steps=200)
            for tokens, finish in zip(done.tokens, done.finish, strict=True):
                assert finish in (Finish.END_OF_GENERATION, Finish.LENGTH, None)
                said = tiny.vocab.decode_bytes(tokens)
                if finish is Finish.END_OF_GENERATION:
                    n_done += 1
                    assert is_valid(schema, json.loads(said.decode()))
            store.prune(forks)
    assert n_done >= 8
