"""A loaded model: weights, vocabulary, chat template."""
from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._ffi import capi
from .._ffi.handle import Handle
from .._ffi.load import library, take_text_at
from .._ffi.memory import new, ref
from .chat import ChatPrompt, Message, render
from .params import model_params, path_bytes
from .vocab import Vocab

if TYPE_CHECKING:
    from .embedder import Embedder
    from .projector import Projector
    from .store import Store


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """What a model is made of, and who uses it.

    Attributes
    ----------
    n_params, n_bytes : int
        Numbers in its tensors, and their bytes.
    n_vocab, n_layer : int
    n_open : int
        Stores and embedders open on this object.
    """

    n_params: int
    n_bytes: int
    n_vocab: int
    n_layer: int
    n_open: int


class Model(Handle):
    """A model file, opened. The same file with the same settings is in memory once, however often it is opened.

    Parameters
    ----------
    path : str or os.PathLike
        A GGUF file, or ``"stub:..."`` for the engine without weights that the tests use.
    gpu_layers : int
        Layers to put on accelerators; negative for all.
    mmap : bool
        Map the file rather than read it.
    vocab_only : bool
        Vocabulary, metadata and chat template without the weights; such a model opens no store.

    Raises
    ------
    KernelIOError
        The file cannot be read.
    FormatError
        It is not a model the engine can load; the engine's words are in the message.
    UnsupportedOperationError
        This CPU lacks instructions the library was built to use.
    """

    def __init__(self, path: str | os.PathLike[str], *, gpu_layers: int = 0, mmap: bool = True, vocab_only: bool = False) -> None:
        lib = library()
        params = model_params(gpu_layers=gpu_layers, mmap=mmap, vocab_only=vocab_only)
        self.path = os.fspath(path)
        raw = path_bytes(self.path)
        pointer = capi.pyl_model_p()
        super().__init__(pointer, lib.pyl_model_free)
        lib.pyl_model_open(ref(pointer), raw, len(raw), ref(params))
        self.info = new(capi.pyl_model_info)
        lib.pyl_model_describe(pointer, ref(self.info))
        self.vocab = Vocab(self)

    def __repr__(self) -> str:
        return f"<Model {self.path!r}{' closed' if self.is_closed else ''}>"

    @functools.cached_property
    def metadata(self) -> Mapping[str, str]:
        """Scalar metadata of the file as text, and under ``""`` the engine's one-line description."""
        return dict(json.loads(take_text_at(library().pyl_model_metadata, 1, self._ptr())))

    def chat(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, tool_choice: str | None = None, parallel_tool_calls: bool | None = None,
             add_generation_prompt: bool | None = None, continue_final_message: bool | None = None, enable_thinking: bool | None = None, reasoning_format: str | None = None,
             grammar: str | None = None, template: str | None = None, template_kwargs: Mapping[str, Any] | None = None, parser: str | None = None) -> ChatPrompt:
        """Render a conversation with the model's chat template.

        Parameters
        ----------
        messages : sequence of dict
            ``{"role", "content", ...}``; a content of None is empty.
        tools : sequence of dict, optional
            Tools in the usual ``{"type": "function", "function": {...}}`` form.
        tool_choice : {"auto", "required", "none"}, optional
            Whether the model may, has to, or must not call one; "auto" by default.
        parallel_tool_calls : bool, optional
            Whether one answer may hold several calls; False by default.
        add_generation_prompt : bool, optional
            Whether the prompt ends with what opens the assistant's turn; True by default.
        continue_final_message : bool, optional
            Whether the last message, the assistant's, is left open for the model to go on with, instead; False by default.
        enable_thinking : bool, optional
            Told to templates that know such a switch; True by default.
        reasoning_format : {"none", "auto", "deepseek", "deepseek-legacy"}, optional
            "none", the default: :meth:`ChatPrompt.parse` leaves reasoning in the content. The others put it into ``reasoning_content``, all alike
            in this engine.
        grammar : str, optional
            GBNF that the answer has to follow. Not with tools, unless ``tool_choice`` is "none".
        template : str, optional
            The source of another template, the caller's own choice.
        template_kwargs : mapping, optional
            Further variables for the template, of any JSON type; none that has an option here.
        parser : {"auto", "content"}, optional
            "content" takes all output as text, for templates whose format the engine cannot work out.

        Raises
        ------
        TemplateError
            No template, or it does not parse, raises, or cannot take what was asked; in its own words.
        FormatError
            A message or option is not of its form.
        """
        options = {"tools": tools, "tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls, "add_generation_prompt": add_generation_prompt,
                   "continue_final_message": continue_final_message, "enable_thinking": enable_thinking, "reasoning_format": reasoning_format, "grammar": grammar,
                   "template": template, "template_kwargs": template_kwargs, "parser": parser}
        return render(self, messages, options)

    def statistics(self) -> ModelStatistics:
        """What is in memory."""
        return ModelStatistics(self.info.n_params, self.info.n_bytes, self.info.n_vocab, self.info.n_layer, sum(not child.is_closed for child in self._children))

    def projector(self, path: str | os.PathLike[str], **options: Any) -> Projector:
        """Open a projector file for this model; takes the options of :class:`~pylloyal.Projector`."""
        from .projector import Projector

        return Projector(self, path, **options)

    def embedder(self, **options: Any) -> Embedder:
        """Open an embedder on this model; takes the options of :class:`~pylloyal.Embedder`."""
        from .embedder import Embedder

        return Embedder(self, **options)

    def store(self, **options: Any) -> Store:
        """Open a store on this model; takes the options of :class:`~pylloyal.Store`."""
        from .store import Store

        return Store(self, **options)
