"""Conversations through the model's own chat template, rendered and parsed by the engine's template code.

There is no fallback: a model without a template, a template that does not parse or raises, and a request the template cannot
take are :class:`~pylloyal.errors.TemplateError`, in the template's own words.

What users, tools and the model itself say stays text. A control token spelled out in their words ("<|im_end|>") would end their
turn once the rendered prompt is tokenised; it goes through the template as a placeholder, and is tokenised on its own, inert.

A conversation that goes on is rendered whole, every time: templates look back and forth as they please. What a branch already
holds is then compared with that rendering, token for token, and only what is missing is given out (:meth:`ChatPrompt.follow`).
"""
from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .. import errors
from .._ffi.load import library, take_text_at
from .shield import Shield, cut, encode_inside, lexicon, spelled_out
from .vocab import TokenFlags, Vocab

if TYPE_CHECKING:
    from .model import Model

Message = Mapping[str, Any]
_NO_MARKS = re.compile("((?!))")


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
class Continuation:
    """What has to be decoded so that a branch goes on with the next turn of its conversation.

    Attributes
    ----------
    tokens : list of int
        To prefill: on the branch that holds the conversation and the answer when ``is_append_only``, on an empty one otherwise.
        The end of the answer's turn, which was drawn but not decoded, is part of it.
    is_append_only : bool
        False when the template writes earlier turns differently now (it drops old reasoning, say), or the answer differently
        from how the model wrote it: no branch can be continued, and ``tokens`` is the whole prompt.
    is_exact : bool
        True when the branch, or the empty one, then holds ``prompt.tokens()``, token for token. False when it holds the same text
        in other tokens: the model did not write its answer in those the tokenizer would choose, or the tokenizer cuts the text
        elsewhere now that the prompt goes on.
    why : str
        What differs and from where on; empty when nothing does.
    prompt : ChatPrompt
        The whole conversation as rendered from nothing: for the parser, grammar and stops of the next answer, and for
        :meth:`ChatPrompt.follow` after it.
    """

    tokens: list[int]
    is_append_only: bool
    is_exact: bool
    why: str
    prompt: ChatPrompt


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation, and everything the engine knows about what comes next.

    Attributes
    ----------
    prompt : str
        The text to prefill, to look at; :meth:`tokens` gives it as the model wants it.
    generation_prompt : str
        The end of it that opens the assistant's turn.
    add_special : bool
        Whether the tokenizer adds the model's own special tokens: False where the template has written them.
    grammar : str
        GBNF that the answer has to follow (tool calls), or ""; ``branch.set_grammar(prompt)`` puts it on a branch.
    grammar_prefill : str
        What that grammar has already seen: the end of the prompt, which template grammars begin with.
    grammar_lazy : bool
        True when the grammar only starts after one of ``triggers``.
    triggers : list of dict
        ``{"type": "word" | "pattern" | "pattern_full" | "token", "value", "token"}`` each.
    stops : list of str
        Text that ends the answer, beside the end-of-generation tokens.
    preserved_tokens : list of str
        Control tokens that the answer's format is made of: :meth:`parse` has to see them.
    thinking : dict
        ``{"supported": bool, "start": str, "ends": list of str}``: whether the template knows reasoning, and the tags around it.
    parser : dict
        What the engine takes the answer apart with; its form is the engine's.
    notes : list of str
        What had to be changed about the messages for this template; empty when nothing was.
    messages : list of dict
        The conversation it was rendered from.
    options : dict
        The options it was rendered with, of those of :meth:`Model.chat`.
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
    _model: Model = field(repr=False)
    _pieces: list[str] = field(repr=False)  # the prompt cut up: the template's own text, words to be kept inert, the template's, ...
    messages: list[Message] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    _spelled: dict[int, frozenset[str]] = field(default_factory=dict, repr=False)  # control tokens the model only spelled out, by its message's index
    _held: list[int] | None = field(default=None, repr=False)  # what a branch holds that got here by follow(), if not tokens()

    def tokens(self) -> list[int]:
        """The prompt's tokens: control tokens of the template read as such, the model's own special tokens added."""
        return self._atoms(_NO_MARKS, ())

    def _atoms(self, marks: re.Pattern[str], media: Sequence[Any]) -> list[Any]:
        """Tokens, and where a mark stands the medium of that number."""
        info, vocab = self._model.info, self._model.vocab
        out: list[Any] = []
        ends: list[int] = []
        for i, piece in enumerate(self._pieces):
            for k, text in enumerate(marks.split(piece)):
                if k % 2:
                    out.append(media[int(text)])
                elif i == k == 0:
                    out += vocab.encode(text, add_special=self.add_special, parse_special=True)
                    # Where the tokenizer adds an end-of-sequence token, the engine takes it off what it renders. It belongs to the end of a
                    # conversation, not behind a turn that has just begun.
                    ends = out[-1:] if self.add_special and info.add_eos else []
                    out = out[: len(out) - len(ends)]
                elif text:
                    out += encode_inside(vocab, text, parse_special=i % 2 == 0)
        return out + ends if self.options.get("add_generation_prompt") is False else out

    def _grammar_spec(self) -> bytes:
        return json.dumps({"grammar": self.grammar, "grammar_prefill": self.grammar_prefill, "grammar_lazy": self.grammar_lazy, "triggers": self.triggers}).encode()

    def parse(self, answer: str | Sequence[int], *, partial: bool = False) -> ChatMessage:
        """Take apart what the model wrote after this prompt.

        Parameters
        ----------
        answer : str or sequence of int
            Text, or tokens: of these, control tokens are left out but for those the format needs (``preserved_tokens``). It ends
            where one of ``stops`` begins. After a prompt rendered with ``continue_final_message`` the message that is continued
            is part of the result.
        partial : bool
            True while the answer is still growing.

        Raises
        ------
        FormatError
            The finished answer does not follow the template's format, or breaks off in a tool call.
        """
        text = answer if isinstance(answer, str) else self._read(answer, partial)
        text = text[: min((at for stop in self.stops if (at := text.find(stop)) >= 0), default=len(text))]
        request = json.dumps({"text": text, "partial": partial, "parser": self.parser}).encode()
        found = json.loads(take_text_at(library().pyl_chat_parse, 2, request, len(request)))
        return ChatMessage(found["content"], found["reasoning_content"], found["tool_calls"])

    def follow(self, answer: str | Sequence[int], messages: Sequence[Message], **options: Any) -> Continuation:
        """Go on with a conversation whose prompt and answer a branch already holds.

        Nothing is decoded, and no branch is looked at: it is taken to hold ``tokens()`` and then the answer, or what an earlier
        continuation said it would hold.

        Parameters
        ----------
        answer : str or sequence of int
            What the model wrote and the branch decoded, without the end-of-generation token that ended it. Best given as tokens:
            a text is taken for the tokens the tokenizer would choose. It becomes the assistant's message through :meth:`parse`,
            and control tokens it merely spells out stay inert.
        messages : sequence of dict
            What comes after it: the user's next words, or the results of tools.
        **options
            Options of :meth:`Model.chat` that are to change; the others stay as they were, ``tool_choice`` too. None puts one
            back to its default.

        Returns
        -------
        Continuation
            With ``is_append_only``, a branch that prefills its ``tokens`` holds what a fresh one would hold after
            ``prompt.tokens()``: token for token if ``is_exact``, else in the same text.

        Raises
        ------
        FormatError
            There is no new message, the answer does not follow the template's format, or an option is not of its form.
        TemplateError
            The template cannot take the longer conversation.

        Notes
        -----
        Cost: the whole conversation is rendered and tokenised.
        """
        if not messages:
            raise errors.FormatError("follow: there is no new message to go on with")
        vocab = self._model.vocab
        said = self._encode_answer(answer) if isinstance(answer, str) else [int(token) for token in answer]
        past = self.messages[:-1] if self.options.get("continue_final_message") else self.messages
        spelled = dict(self._spelled)
        if found := spelled_out(vocab, said):
            spelled[len(past)] = found
        cold = render(self._model, [*past, _as_message(self.parse(answer)), *messages], {**self.options, "continue_final_message": None, **options}, spelled)
        held = (self.tokens() if self._held is None else self._held) + said
        whole = cold.tokens()
        if whole[: len(held)] == held:
            return Continuation(whole[len(held) :], True, True, "", cold)
        at = _first_difference(held, whole)
        text, before = cold.prompt.encode(), self.prompt.encode() + vocab.decode_bytes(said, special=True)
        if not text.startswith(before):
            before_text = before.decode("utf-8", "replace")
            char = _first_difference(before_text, cold.prompt)
            why = (f"the template writes what came before differently now: from character {char} (token {at}) on, the branch holds {_excerpt(before_text, char)}, "
                   f"the whole conversation {_excerpt(cold.prompt, char)}")
            return Continuation(whole, False, True, why, cold)
        tokens = cold._tokens_from(len(before))
        why = f"the same text in other tokens: from token {at} on, the branch holds {_shown(vocab, held, at)}, the whole conversation {_shown(vocab, whole, at)}"
        return Continuation(tokens, True, False, why, replace(cold, _held=held + tokens))

    def _read(self, tokens: Sequence[int], partial: bool) -> str:
        """The text of an answer, as the parser wants it; of a growing one, without half a character at its end."""
        vocab = self._model.vocab
        kept = {token for text in self.preserved_tokens for token in vocab.encode(text, parse_special=True)}
        shown = [token for token, flags in zip(tokens, vocab.flags(tokens), strict=True) if TokenFlags.CONTROL not in flags or token in kept]
        return codecs.getincrementaldecoder("utf-8")("replace").decode(vocab.decode_bytes(shown, special=True), not partial)

    def _encode_answer(self, text: str) -> list[int]:
        """The tokens a model would have written a text in: of the control tokens in it, those its format needs."""
        pieces = cut(lexicon(self._model.vocab).control, text, keep=frozenset(self.preserved_tokens))
        return [token for i, piece in enumerate(pieces) if piece for token in encode_inside(self._model.vocab, piece, parse_special=i % 2 == 0)]

    def _tokens_from(self, n_bytes: int) -> list[int]:
        """Tokens of the prompt's text from some byte on."""
        out: list[int] = []
        for i, piece in enumerate(self._pieces):
            raw = piece.encode()
            if rest := raw[n_bytes:].decode():
                out += encode_inside(self._model.vocab, rest, parse_special=i % 2 == 0)
            n_bytes = max(0, n_bytes - len(raw))
        return out


def render(model: Model, messages: Sequence[Message], options: Mapping[str, Any], spelled: Mapping[int, frozenset[str]] | None = None) -> ChatPrompt:
    """``spelled``: of messages that the model wrote, by their index, the control tokens it only spelled out."""
    said = copy.deepcopy(list(messages))
    given = {key: copy.deepcopy(value) for key, value in options.items() if value is not None}
    spelled = dict(spelled or {})
    shield = Shield(model.vocab)
    try:
        request = json.dumps({"messages": [shield.message(message, spelled.get(i)) for i, message in enumerate(said)], **given}).encode()
    except (TypeError, ValueError) as error:
        raise errors.FormatError(f"chat request: not JSON: {error}") from error
    found = json.loads(take_text_at(library().pyl_chat_render, 3, model._ptr(), request, len(request)))
    pieces = shield.lift(found["prompt"])
    return ChatPrompt(**{**found, "prompt": "".join(pieces)}, messages=said, options=given, _model=model, _pieces=pieces, _spelled=spelled)


def _as_message(said: ChatMessage) -> Message:
    calls = [{key: value for key, value in call.items() if value} for call in said.tool_calls]  # an id the format does not have is none
    return {"role": "assistant", "content": said.content, **({"reasoning_content": said.reasoning_content} if said.reasoning_content else {}), **({"tool_calls": calls} if calls else {})}


def _first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _excerpt(text: str, at: int) -> str:
    return repr(text[at : at + 40]) if at < len(text) else "no more"


def _shown(vocab: Vocab, tokens: Sequence[int], at: int) -> str:
    return repr([vocab.piece(token).decode("utf-8", "replace") for token in tokens[at : at + 3]])
