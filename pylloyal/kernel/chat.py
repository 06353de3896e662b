"""Conversations through the model's own chat template, rendered and parsed by the engine's template code.

There is no fallback: a model without a template, a template that does not parse or raises, and a request the template cannot
take are :class:`~pylloyal.errors.TemplateError`, in the template's own words.

What users and tools say stays text. A control token spelled out in their messages ("<|im_end|>") would end their turn once the
rendered prompt is tokenised; such a message goes through the template as a placeholder, and is tokenised on its own, inert.
"""
from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import errors
from .._ffi.load import library, take_text_at

if TYPE_CHECKING:
    from .model import Model

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatMessage:
    """What the model said, taken apart.

    Attributes
    ----------
    content, reasoning_content : str
    tool_calls : list of dict
        ``{"id", "type": "function", "function": {"name", "arguments"}}``, arguments as JSON text.
    """

    content: str
    reasoning_content: str
    tool_calls: list[dict[str, Any]]


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation, and everything the engine knows about what comes next.

    Attributes
    ----------
    prompt : str
        The text to prefill, to look at; :meth:`tokens` gives it as the model wants it.
    generation_prompt : str
        The end of it that opens the assistant's turn.
    grammar : str
        GBNF that the answer has to follow (tool calls), or ""; ``branch.set_grammar(prompt)`` puts it on a branch.
    grammar_prefill : str
        What that grammar has already seen: the end of the prompt, which template grammars begin with.
    grammar_lazy : bool
        True when the grammar only starts after one of ``triggers``.
    stops : list of str
        Text that ends the answer, beside the end-of-generation tokens.
    notes : list of str
        What had to be changed about the messages for this template; empty when nothing was.
    """

    prompt: str
    generation_prompt: str
    add_special: bool
    grammar: str
    grammar_prefill: str
    grammar_lazy: bool
    triggers: list[dict[str, Any]]
    stops: list[str]
    preserved_tokens: list[str]
    thinking: dict[str, Any]
    parser: dict[str, Any]
    notes: list[str]
    _model: Model
    _pieces: list[str]  # the prompt cut up: the template's own text, a user's words to be kept inert, the template's, ...

    def tokens(self) -> list[int]:
        """The prompt's tokens: control tokens of the template read as such, the model's own special tokens added."""
        encode = self._model.vocab.encode
        return [token for i, piece in enumerate(self._pieces) for token in encode(piece, add_special=self.add_special and i == 0, parse_special=i % 2 == 0)]

    def _constraint(self) -> bytes:
        return json.dumps({"grammar": self.grammar, "grammar_prefill": self.grammar_prefill, "grammar_lazy": self.grammar_lazy, "triggers": self.triggers}).encode()

    def parse(self, text: str, *, partial: bool = False) -> ChatMessage:
        """Take apart what the model wrote after this prompt.

        Parameters
        ----------
        partial : bool
            True while the text is still growing.

        Raises
        ------
        FormatError
            The finished text does not follow the template's format.
        """
        request = json.dumps({"text": text, "partial": partial, "parser": self.parser}).encode()
        found = json.loads(take_text_at(library().pyl_chat_parse, 2, request, len(request)))
        return ChatMessage(found["content"], found["reasoning_content"], found["tool_calls"])


def render(model: Model, messages: Sequence[Message], options: Mapping[str, Any]) -> ChatPrompt:
    shielded, words = _shield(model, messages)
    try:
        request = json.dumps({"messages": shielded, **{k: v for k, v in options.items() if v is not None}}).encode()
    except (TypeError, ValueError) as error:
        raise errors.FormatError(f"chat request: not JSON: {error}") from error
    found = json.loads(take_text_at(library().pyl_chat_render, 3, model._ptr(), request, len(request)))
    pieces = re.split("(" + "|".join(words) + ")", found["prompt"]) if words else [found["prompt"]]
    if len(set(pieces[1::2])) != len(words):
        raise errors.TemplateError("a message spells out control tokens, and the chat template does not pass its text through unchanged, so they cannot be kept inert")
    pieces = [words.get(piece, piece) for piece in pieces]
    return ChatPrompt(**{**found, "prompt": "".join(pieces)}, _model=model, _pieces=pieces)


def _shield(model: Model, messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
    """The messages with placeholders for texts of users and tools that spell out control tokens, and what they stand for."""
    words: dict[str, str] = {}

    def shield(text: Any) -> Any:
        if not isinstance(text, str) or not model.vocab.spells_control(text):
            return text
        placeholder = f"x{secrets.token_hex(16)}x"
        words[placeholder] = text
        return placeholder

    out: list[Message] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "tool"):
            out.append(message)
        elif isinstance(content, list):
            out.append({**message, "content": [{**part, "text": shield(part["text"])} if isinstance(part, Mapping) and "text" in part else part for part in content]})
        else:
            out.append({**message, "content": shield(content)} if "content" in message else message)
    return out, words
