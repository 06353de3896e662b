"""Every template of the pinned source: rendered as another Jinja renders it, refused by name, or different for a reason in a table.

"Different for a reason" is checked too: the other Jinja, given what the engine gives the template, must print the same.
"""
from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import corpus
import jinja2
import pytest
from corpus import CASES, Message, jinja, refused, user

from pylloyal import ChatPrompt, Model, TokenFlags, errors

pytestmark = pytest.mark.slow

Options = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(corpus.write_model(tmp_path_factory.mktemp("corpus") / "bpe.gguf")) as model:
        yield model


# ----------------------------------------------------------------------------------- the forms in which the engine passes things on


def _each(messages: list[Message], change: Callable[[Message], None]) -> list[Message]:
    out = copy.deepcopy(messages)
    for message in out:
        change(message)
    return out


def filled(messages: list[Message], options: Options) -> tuple[list[Message], Options]:
    """Content of None is empty; a tool has a description and parameters."""
    tools = [{"type": "function", "function": {"name": t["function"]["name"], "description": t["function"].get("description", ""), "parameters": t["function"].get("parameters", {})}} for t in options.get("tools", ())]
    return _each(messages, lambda m: m.update(content=m["content"] or "")), {**options, **({"tools": tools} if tools else {})}


def _calls(messages: list[Message], change: Callable[[Any], Any]) -> list[Message]:
    def each(message: Message) -> None:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = change(call["function"]["arguments"])

    return _each(messages, each)


def objects(messages: list[Message], options: Options) -> tuple[list[Message], Options]:
    return filled(_calls(messages, lambda a: json.loads(a) if isinstance(a, str) else a), options)


def texts(messages: list[Message], options: Options) -> tuple[list[Message], Options]:
    return filled(_calls(messages, lambda a: a if isinstance(a, str) else json.dumps(a, separators=(",", ":"), ensure_ascii=False)), options)


def joined(messages: list[Message], options: Options) -> tuple[list[Message], Options]:
    return _each(messages, lambda m: m.update(content="\n".join(p["text"] for p in m["content"]) if isinstance(m["content"], list) else m["content"])), options


FORMS = {
    "as given": lambda messages, options: (messages, options),
    "what is missing is filled in": filled,
    "arguments are objects where the template can take them so": objects,
    "arguments are text where it cannot": texts,
    "parts are joined by line ends where the template takes text alone": joined,
}


# ------------------------------------------------------------------------------------------------ what the engine does for one template


def folded(messages: list[Message]) -> list[Message]:
    """No system role: its words go in front of the next message's."""
    if messages[0]["role"] != "system":
        return messages
    return [{**messages[1], "content": f"{messages[0]['content']}\n{messages[1]['content']}"}, *messages[2:]]


def trimmed(messages: list[Message]) -> list[Message]:
    return _each(messages, lambda m: m.update({key: m[key].strip() for key in ("content", "reasoning_content") if isinstance(m.get(key), str)}))


def thought(messages: list[Message]) -> list[Message]:
    """The template's name for reasoning is "thinking"; beside tool calls it takes no content."""
    def each(message: Message) -> None:
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]
            if message.get("tool_calls"):
                message.pop("content")

    return _each(messages, each)


def blocks(messages: list[Message]) -> list[Message]:
    """Reasoning is a block of the content."""
    def each(message: Message) -> None:
        if message["role"] in ("system", "assistant"):
            thinking = [{"type": "thinking", "thinking": message.pop("reasoning_content")}] if "reasoning_content" in message else []
            message["content"] = [*thinking, {"type": "text", "text": message["content"]}]

    return _each(messages, each)


def responses(messages: list[Message]) -> list[Message]:
    """A call, its results and the answer to them are one message."""
    out: list[Message] = []
    for message in copy.deepcopy(messages):
        turn = out[-1] if out and out[-1].get("tool_calls") else None
        if message["role"] == "tool" and turn is not None:
            try:
                response = json.loads(message["content"])
            except ValueError:
                response = message["content"]
            turn.setdefault("tool_responses", []).append({"name": message["name"], "response": response})
        elif message["role"] == "assistant" and turn is not None and turn.get("tool_responses") and "content" not in turn:
            turn["content"] = message["content"]
        else:
            if message.get("tool_calls"):
                message.pop("content")
            out.append(message)
    return out


def same(messages: list[Message]) -> list[Message]:
    return messages


def _repr(value: Any) -> str:
    """The engine's notation for a value; Python's would choose its quotes otherwise."""
    if isinstance(value, str):
        return '"' + value.replace('"', '\\"') + '"' if "'" in value else f"'{value}'"
    return f"[{', '.join(map(_repr, value))}]" if isinstance(value, list) else repr(value)


def _printed(value: Any) -> Any:
    """The engine prints a list as its items, and nothing for None or an object."""
    if isinstance(value, list):
        return "".join(str(_printed(item)) for item in value)
    return "" if value is None or isinstance(value, dict) else value


corpus.ENVIRONMENTS["printed as the engine does"] = corpus._environment(finalize=_printed, filters={"string": lambda value: _repr(value) if isinstance(value, list) else str(value)})

@dataclasses.dataclass(frozen=True)
class Special:
    """Why a template's rendering differs, and how Jinja comes to print the same."""

    why: str
    env: str = "transformers"
    messages: Callable[[list[Message]], list[Message]] = same
    text: Callable[[str], str] = str


UNDEFINED = Special("an undefined value adds nothing to a text instead of raising", "undefined is nothing")
GROWS = Special("list.append is allowed in a template", "lists can grow")
PRINTED = Special("values are printed in the engine's way", "printed as the engine does")
SPECIAL: dict[str, list[Special]] = {
    "CohereForAI-c4ai-command-r-plus-tool_use": [UNDEFINED],
    "fireworks-ai-llama-3-firefunction-v2": [UNDEFINED],
    "Kimi-K2-Instruct": [GROWS],
    "Kimi-K2-Thinking": [GROWS],
    "llama-cpp-deepseek-r1": [Special("map() gives a list that goes into JSON", "a generator is a list")],
    "meetkai-functionary-medium-v3.1": [Special("|safe does not make the rest of a text unsafe, to be escaped", "nothing is escaped")],
    "google-gemma-2-2b-it": [Special("the system message is put in front of the next one", messages=folded)],
    "StepFun3.5-Flash": [Special("contents are trimmed", messages=trimmed)],
    "openai-gpt-oss-120b": [Special("reasoning goes by the template's own name", messages=thought),
                            Special("a finished answer is history: <|end|>, not <|return|>", text=lambda text: text.replace("<|return|>", "<|end|>"))],
    "LFM2.5-8B-A1B": [Special("reasoning goes by the template's own name", messages=thought), PRINTED],
    "mistralai-Ministral-3-14B-Reasoning-2512": [Special("reasoning goes by the template's own name", messages=blocks)],
    "google-gemma-4-31B-it-interleaved": [Special("a call, its results and the answer are one message", messages=responses)],
    "google-gemma-4-31B-it": [dataclasses.replace(PRINTED, text=lambda text: text + "<|turn>model\n")],  # and the turn is opened that the template forgets after content and a call
    "ByteDance-Seed-OSS": [UNDEFINED, PRINTED],
    "openbmb-MiniCPM5-1B": [PRINTED],
}

# ----------------------------------------------------------------------------------------------------------------------- the tables

NO_TOOLS = {"HuggingFaceTB-SmolLM3-3B", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.1", "fireworks-ai-llama-3-firefunction-v2",
            "google-gemma-2-2b-it", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct"}
REFUSED = {
    "does not take tools": NO_TOOLS,
    "does not take tool calls or tool results": {"LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct"},
    "only supports single tool-c": {"meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"},
    "Function has no builtins": {"CohereForAI-c4ai-command-r-plus-tool_use"},  # a macro's attribute: the engine's Jinja has none
    "would be lost beside its reasoning_content": {"unsloth-mistral-Devstral-Small-2507"},
    "would be lost beside its tool calls": {"google-gemma-4-31B-it-interleaved"},
}
COUNTS = {
    "equal": 1455,
    "refused": 116,
    "parts are joined by line ends where the template takes text alone": 88,
    "what is missing is filled in": 64,
    "the engine opens the turn that is continued itself": 40,
    "arguments are objects where the template can take them so": 39,
    "an undefined value adds nothing to a text instead of raising": 25,
    "list.append is allowed in a template": 14,
    "|safe does not make the rest of a text unsafe, to be escaped": 12,
    "map() gives a list that goes into JSON": 12,
    "arguments are text where it cannot": 6,
    "a call, its results and the answer are one message": 6,
    "reasoning goes by the template's own name": 5,
    "values are printed in the engine's way": 4,
    "the system message is put in front of the next one": 2,
    "a finished answer is history: <|end|>, not <|return|>": 1,
    "contents are trimmed": 1,
}


def expected(source: str, messages: list[Message], options: Options, env: str, prompt: ChatPrompt) -> str | None:
    """What Jinja prints, None if it cannot."""
    try:
        if not options.get("continue_final_message"):
            return jinja(source, messages, options, env)
        # The engine opens the turn itself, closed reasoning first where the model is one that reasons.
        return jinja(source, messages[:-1], {**options, "continue_final_message": False, "add_generation_prompt": False}, env) + prompt.generation_prompt
    except (jinja2.TemplateError, TypeError):
        return None


def compare(name: str, case: str, model: Model) -> str:
    """What became of it: a refusal's reason, "equal", or why it is different."""
    source, (messages, options) = corpus.templates()[name], CASES[case]
    prompts: list[ChatPrompt] = []
    if words := refused(lambda: prompts.append(model.chat(messages, template=source, **options))):
        return next((f"refused: {reason}" for reason in REFUSED if reason in words), words)
    prompt, = prompts
    try:
        if jinja(source, messages, options) == prompt.prompt:
            return "equal"
    except (jinja2.TemplateError, TypeError):
        pass
    for special in [Special(""), *SPECIAL.get(name, [])]:
        for form, change in FORMS.items():
            given, asked = change(messages, options)
            given = special.messages(given)
            if special == Special("") and (given, asked) == (messages, options) and not options.get("continue_final_message"):
                continue  # that was the first look
            text = expected(source, given, asked, special.env, prompt)
            if text is not None and special.text(text) == prompt.prompt:
                if options.get("continue_final_message"):
                    assert prompt.generation_prompt.endswith(messages[-1]["content"])
                    return "the engine opens the turn that is continued itself"
                return special.why or form
    return f"different: {prompt.prompt!r}"


@pytest.fixture(scope="module")
def census(model: Model) -> dict[tuple[str, str], str]:
    return {(name, case): compare(name, case, model) for name in corpus.templates() for case in CASES}


def test_every_template_renders_as_jinja_does_or_for_a_known_reason_not(census: dict[tuple[str, str], str]) -> None:
    unknown = {key: what for key, what in census.items() if what.startswith(("different", "TemplateError", "FormatError"))}
    assert not unknown
    counts = Counter("refused" if what.startswith("refused") else what for what in census.values())
    print(counts)
    assert counts == COUNTS


def test_the_documentation_gives_these_figures() -> None:
    text = (Path(corpus.tiny_models.__file__).parents[1] / "docs" / "chat.md").read_text(encoding="utf-8")
    known = sum(n for why, n in COUNTS.items() if why not in ("equal", "refused"))
    total = sum(COUNTS.values())
    parsed: Counter[str] = sum(map(Counter, PARSED.values()), Counter())
    for words in (f"{len(corpus.templates())} templates", f"each with {total // len(corpus.templates())} requests", f"| equal | {COUNTS['equal']:,} |", f"error | {COUNTS['refused']} |", f"the same | {known} |",
                  f"{parsed['comes back']} come back", f"{parsed['comes back, in part']} without"):
        assert words in text


def test_refusals_are_those_of_the_table(census: dict[tuple[str, str], str]) -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for (name, _), what in census.items():
        if what.startswith("refused: "):
            found[what.removeprefix("refused: ")].add(name)
    assert found == REFUSED


@pytest.mark.parametrize(("source", "value", "printed"), [("{{ x }}", ["a", "b"], "ab"), ("{{ x }}", {"k": 1}, ""), ("{{ x }}", None, ""), ("{{ x | string }}", ["it's \"so\""], "[\"it's \\\"so\\\"\"]"), ("{{ x | tojson }}", 3.0, "3"), ("{{ x }}", 1e-7, "0.0")])
def test_what_the_engine_prints_otherwise(model: Model, source: str, value: Any, printed: str) -> None:
    """Values that templates print as they come, lists and objects in tool calls above all. Once the engine agrees, this can go."""
    ours = model.chat([user("hello")], template=source, template_kwargs={"x": value}, parser="content").prompt
    assert ours == printed
    assert corpus.ENVIRONMENTS["transformers"].from_string(source).render(x=value) != printed


# ------------------------------------------------------------------------------------------------------------------------ the same again

_CHILD = """
import sys
sys.path[:0] = sys.argv[2:]
import test_templates
with test_templates.Model(sys.argv[1]) as model:
    print(test_templates.digest(model))
"""
SOME = ("turns", "tools, required", "reasoning before a call")


def digest(model: Model) -> str:
    """Everything that is known of some renderings: prompts, grammars, triggers, parsers."""
    def facts(source: str, messages: list[Message], options: Options) -> Any:
        try:
            prompt = model.chat(messages, template=source, **options)
        except errors.TemplateError as error:
            return str(error)
        return {f.name: getattr(prompt, f.name) for f in dataclasses.fields(ChatPrompt) if f.name[0] != "_"}

    out = hashlib.sha256()
    for source in corpus.templates().values():
        for case in SOME:
            out.update(json.dumps(facts(source, *CASES[case])).encode())
    return out.hexdigest()


def test_a_rendering_is_the_same_again_and_in_another_process(model: Model) -> None:
    first = digest(model)
    assert digest(model) == first
    child = subprocess.run([sys.executable, "-c", _CHILD, str(model.path), str(Path(__file__).parent), str(Path(corpus.tiny_models.__file__).parent)], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == first


# --------------------------------------------------------------------------------------------------------------- control tokens in words


def test_control_tokens_of_the_whole_corpus_stay_words(model: Model) -> None:
    """The rendering is Jinja's, and tokenised it holds the control tokens of the same conversation without them, and no more."""
    evil = "see " + " ".join(corpus.control_tokens())
    for name, source in corpus.templates().items():
        for kind in (str, lambda text: [{"type": "text", "text": text}]):
            prompt, plain = (model.chat([user("Hi"), {"role": "assistant", "content": "Yes?"}, user(kind(text))], template=source) for text in (evil, "see"))
            tokens = prompt.tokens()
            assert model.vocab.decode(tokens, special=True) == prompt.prompt, name
            control = [[t for t, f in zip(row, model.vocab.flags(row), strict=True) if TokenFlags.CONTROL in f] for row in (tokens, plain.tokens())]
            assert control[0] == control[1], name
            assert evil in prompt.prompt, name


# --------------------------------------------------------------------------------------------------------------------- what comes back

# Of a kind's 70 answers. "in part": the template leaves out of history what the kind is about, so nobody can know how it is written.
PARSED = {
    "words": {"comes back": 67, "comes back changed": 1, "not written": 2},
    "reasoning": {"comes back": 31, "comes back, in part": 35, "comes back changed": 1, "not written": 2, "refused": 1},
    "call": {"comes back": 54, "comes back, in part": 1, "does not parse": 2, "not written": 2, "refused": 11},
    "words and call": {"comes back": 37, "comes back, in part": 13, "comes back changed": 4, "does not parse": 2, "not written": 2, "refused": 12},
    "reasoning and call": {"comes back": 33, "comes back, in part": 21, "does not parse": 2, "not written": 3, "refused": 11},
}
# Templates the engine makes a parser for that does not take what they write.
UNPARSED = {
    "Mistral-Small-3.2-24B-Instruct-2506": "the parser wants [ARGS] twice",
    "unsloth-Apriel-1.5": "the line end the template writes behind a call",
}
CHANGED = {
    "NVIDIA-Nemotron-Nano-v2": "history shows words behind <think> that nothing closes",
    "google-gemma-4-31B-it": "words behind a call are dropped",
    "meetkai-functionary-medium-v3.2": "a call behind words is taken for words",
    "openai-gpt-oss-120b": "words beside a call are the template's analysis",
}


@pytest.fixture(scope="module")
def written(model: Model) -> dict[str, dict[str, corpus.Written | str]]:
    """By kind and template: what a model would write, or why that is not known."""
    def one(name: str, kind: str) -> corpus.Written | str:
        try:
            return corpus.written(model, name, kind) or "not written"
        except errors.TemplateError:
            return "refused"

    return {kind: {name: one(name, kind) for name in corpus.templates()} for kind in PARSED}


@pytest.mark.parametrize("kind", PARSED)
def test_what_a_model_would_write_comes_back(model: Model, written: dict[str, dict[str, corpus.Written | str]], kind: str) -> None:
    counts: Counter[str] = Counter()
    changed, unparsed = set(), set()
    for name, what in written[kind].items():
        if isinstance(what, str):
            counts[what] += 1
            continue
        try:
            found = what.prompt.parse(what.text)
        except errors.FormatError:
            counts["does not parse"] += 1
            unparsed.add(name)
            continue
        calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found.tool_calls]
        if (found.content.strip(), found.reasoning_content.strip(), calls) != (what.content, what.reasoning, what.calls):
            counts["comes back changed"] += 1
            changed.add(name)
        else:
            counts["comes back" if what.is_whole else "comes back, in part"] += 1
            assert what.prompt.parse(model.vocab.encode(what.text, parse_special=True)) == found, name  # as tokens too
    print(kind, dict(counts))
    assert counts == PARSED[kind]
    assert unparsed <= UNPARSED.keys() and changed <= CHANGED.keys()


@pytest.mark.parametrize("kind", ["reasoning", "words and call", "reasoning and call"])
def test_a_growing_answer_only_grows(written: dict[str, dict[str, corpus.Written | str]], kind: str) -> None:
    """Every prefix parses, nothing that was given out is taken back, and the whole gives what the finished answer does."""
    shrunk = set()
    for name, what in written[kind].items():
        if isinstance(what, str) or name == "Mistral-Small-3.2-24B-Instruct-2506":  # its parser gives up in the middle
            continue
        last = what.prompt.parse("", partial=True)
        for n in range(1, len(what.text) + 1):
            now = what.prompt.parse(what.text[:n], partial=True)
            grows = now.content.startswith(last.content) and now.reasoning_content.startswith(last.reasoning_content) and len(now.tool_calls) >= len(last.tool_calls)
            for before, after in zip(last.tool_calls, now.tool_calls, strict=False):
                grows = grows and all(after["function"][key].startswith(before["function"][key]) for key in ("name", "arguments"))
            if not grows:
                shrunk.add(name)
            last = now
        if name not in UNPARSED:
            assert what.prompt.parse(what.text) == last, name
    assert shrunk <= {"unsloth-Apriel-1.5"}  # at the line end behind the call it has no place for


def test_half_a_character_is_not_given_out(model: Model) -> None:
    prompt = model.chat([user("Hi")], template=tiny_chatml())
    tokens = model.vocab.encode("ab🐳")
    assert [prompt.parse(tokens[:n], partial=True).content for n in range(len(tokens) + 1)] == ["", "a", "ab", "ab", "ab", "ab", "ab🐳"]
    assert prompt.parse(tokens[:4]).content == "ab\ufffd"  # finished there


def tiny_chatml() -> str:
    return corpus.tiny_models.CHATML


def test_a_call_that_breaks_off_is_no_call(written: dict[str, dict[str, corpus.Written | str]]) -> None:
    """The engine takes a text that ends in the middle of a call's arguments for a finished one."""
    counts: Counter[str] = Counter()
    for name, what in written["call"].items():
        if isinstance(what, str) or not what.calls or name in UNPARSED:
            continue
        try:
            found = what.prompt.parse(what.text[: what.text.index("Troms") + 3])
            assert not found.tool_calls, name
            counts["no call"] += 1
        except errors.FormatError:
            counts["refused"] += 1
    print(dict(counts))
    assert counts == {"refused": 54}


# ------------------------------------------------------------------------------------------------------------------------- the grammar

NO_GRAMMAR = {"meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"}  # nothing to trigger one
ILLEGAL = {
    **UNPARSED,
    "google-gemma-4-31B-it": "words behind a call",
    "meetkai-functionary-medium-v3.2": "a call behind words",
    "upstage-Solar-Open-100B": "the grammar wants <|calls|> as text, which is the token that ends the answer",
}
SLEEPS = {"meetkai-functionary-medium-v3.2"}  # its trigger ends the prompt already


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_grammar_takes_what_a_model_would_write(model: Model, written: dict[str, dict[str, corpus.Written | str]], choice: str) -> None:
    """Token for token; then it may end, and in the middle of the call it may not."""
    end, = model.vocab.encode("<|im_end|>", parse_special=True)
    taken, strange = 0, set()
    with model.store(n_ctx=1024, n_threads=1) as store:
        for kind in ("call", "words and call", "reasoning and call"):
            for name, what in written[kind].items():
                if isinstance(what, str) or not what.calls:
                    continue
                prompt = what.prompt if choice == "auto" else model.chat(what.prompt.messages, **{**what.prompt.options, "tool_choice": choice})
                with store.root(grammar=prompt) as root:
                    root.prefill([end])
                    may_end = []
                    for token in model.vocab.encode(what.text, parse_special=True):
                        is_legal, ends = root.legal([token, end])
                        may_end.append(ends)
                        if not is_legal:
                            break
                        root.commit(token)
                    else:
                        if root.legal([end])[0]:
                            taken += 1
                            is_free = choice == "auto" and (name in NO_GRAMMAR or (name in SLEEPS and kind != "words and call"))
                            assert may_end[0] == (choice == "auto") and (False in may_end) == (not is_free), name
                            continue
                strange.add(name)
    print(choice, taken)
    assert strange == ILLEGAL.keys() - (SLEEPS if choice == "auto" else set())
    assert taken == {"auto": 154, "required": 153}[choice]
