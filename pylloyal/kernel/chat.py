"""Conversations through the model's own chat template, rendered and parsed by the engine's template code.

There is no fallback: a model without a template, a template that does not parse or raises, and a request the template cannot
take are :class:`~pylloyal.errors.TemplateError`, in the template's own words.
"""
from __future__ import annotations

import json
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
        The text to prefill; :meth:`tokens` gives it as the model wants it.
    generation_prompt : str
        The end of it that opens the assistant's turn.
    grammar : str
        GBNF that the answer has to follow (tool calls), or "".
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
    grammar_lazy: bool
    triggers: list[dict[str, Any]]
    stops: list[str]
    preserved_tokens: list[str]
    thinking: dict[str, Any]
    parser: dict[str, Any]
    notes: list[str]
    _model: Model

    def tokens(self) -> list[int]:
        """The prompt's tokens: control tokens read as such, and the model's own special tokens added."""
        return self._model.vocab.encode(self.prompt, add_special=self.add_special, parse_special=True)

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
    try:
        request = json.dumps({"messages": list(messages), **{k: v for k, v in options.items() if v is not None}}).encode()
    except (TypeError, ValueError) as error:
        raise errors.FormatError(f"chat request: not JSON: {error}") from error
    return ChatPrompt(**json.loads(take_text_at(library().pyl_chat_render, 3, model._ptr(), request, len(request))), _model=model)
