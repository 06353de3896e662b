"""What each architecture's loader decides about memory beside what every file says: one row for each name the pinned engine knows.

A header rarely tells the whole of it. Which layers have a sliding window, which are recurrent, which share another's cells and which
keep a second, smaller cache is often a constant in the engine's source, and keys that look decisive are not read at all. So every row
here was read from ``src/models`` and ``llama_model::create_memory`` of the pinned engine, and tests hold it against that very code on
random headers (``tests/integration/test_geometry.py``). A name that is not here is not guessed at.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Memory = Literal[
    "cells",  # one cell a token in every attention layer, and recurrent state in the others
    "none",  # encoders and diffusion models: nothing is kept between calls
    "indexed",  # cells, and beside them an indexer's keys in some layers
    "compressed",  # a window of cells, and beside it blocks of tokens in one cell
    "borrowed",  # draft models that look at another context's cells
    "unsupported",  # names the engine knows and cannot open as a model
]


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window, and the layers that have it.

    Attributes
    ----------
    every : int or str
        Every such layer attends to everything, the others to the window; 0: all have the window. A file may say otherwise, as a number
        or layer by layer. "listed": the file must say it layer by layer; "attention": all that are not recurrent have it.
    dense_first : bool
        The one layer comes first of its group, and not last.
    default : int
        Tokens, when the file does not say; 0: it must.
    fixed : int
        Tokens, whatever the file says.
    is_optional : bool
        Without a positive key there is no window at all.
    only_at : int
        It is there only in models of so many layers; 0: in all.
    is_constant : bool
        Every layer has it, those of a draft head too, whatever the file says.
    """

    every: int | Literal["listed", "attention"]
    dense_first: bool = False
    default: int = 0
    fixed: int = 0
    is_optional: bool = False
    only_at: int = 0
    is_constant: bool = False


Recurrent = Literal[
    "",  # none
    "all",  # every layer, and no attention
    "both",  # every layer, beside attention
    "zero heads",  # layers without KV heads, a draft head aside
    "zero heads, all",  # the same, a draft head included
    "zero heads and feed-forward",  # layers that have neither
    "interval",  # a list in the file, else all but every n-th
]
State = Literal["", "mamba", "mamba2", "rwkv", "shortconv", "kda", "lightning"]


@dataclass(frozen=True, slots=True)
class Rules:
    """One row.

    Attributes
    ----------
    interval : int
        Of ``recurrent`` "interval", when the file does not say.
    has_mla : bool
        Reads the two keys of multi-head latent attention; with them there are no V cells.
    indexer : str
        Layers that have one: "all", "lead" (after the leading dense ones), "listed" (the file lists them), "attention".
    shares_cells : bool
        The last layers attend to earlier ones' cells and have none of their own.
    takes_rollback : bool
        Its recurrent state can be kept several times over, for rolling back.
    is_causal : bool
        Unless the file says otherwise.
    """

    memory: Memory = "cells"
    window: Window | None = None
    recurrent: Recurrent = ""
    state: State = ""
    interval: int = 4
    has_mla: bool = False
    indexer: str = ""
    shares_cells: bool = False
    takes_rollback: bool = False
    is_causal: bool = True


_PLAIN: Final = [
    "llama", "deci", "falcon", "baichuan", "grok", "gpt2", "gptneox", "mpt", "starcoder", "refact", "bloom", "stablelm", "qwen", "qwen2", "qwen2moe", "qwen2vl", "qwen3",
    "qwen3moe", "qwen3vl", "qwen3vlmoe", "phi2", "phi3", "phimoe", "plamo", "codeshell", "orion", "internlm2", "minicpm", "minicpm3", "gemma", "starcoder2", "xverse",
    "command-r", "dbrx", "olmo", "olmoe", "openelm", "arctic", "deepseek", "deepseek2-ocr", "chatglm", "glm4", "glm4moe", "bitnet", "t5", "t5encoder", "jais", "jais2",
    "nemotron", "exaone", "granite", "granitemoe", "graniteswitch", "chameleon", "plm", "bailingmoe", "bailingmoe2", "dots1", "arcee", "ernie4_5", "ernie4_5-moe",
    "hunyuan-moe", "hunyuan-dense", "hunyuan_vl", "hy_v3", "smollm3", "seed_oss", "grovemoe", "apertus", "minimax-m2", "cogvlm", "pangu-embedded", "mistral3",
    "paddleocr", "llama-embed", "maincoder", "talkie", "nanbeige", "qwen3tts", "pockettts", "hrm_text",
]
_ENCODERS: Final = ["bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert", "wavtokenizer-dec"]
_LISTED: Final = Window("listed")  # the file must say which layers
_DELTA: Final = Rules(recurrent="interval", state="mamba2")

ARCHITECTURES: Final[dict[str, Rules]] = {
    **{name: Rules() for name in _PLAIN},
    **{name: Rules(memory="none") for name in _ENCODERS},
    **{name: Rules(memory="none", is_causal=False) for name in ("dream", "llada", "llada-moe", "rnd1")},
    "modern-bert": Rules(memory="none", window=Window(3, dense_first=True, is_optional=True)),
    "gemma-embedding": Rules(memory="none", window=Window(6), is_causal=False),
    # sliding windows
    "afmoe": Rules(window=Window(4, is_optional=True)),
    "cohere2": Rules(window=Window(4)),
    "cohere2moe": Rules(window=Window(4, dense_first=True)),
    "exaone-moe": Rules(window=Window(4)),
    "exaone4": Rules(window=Window(4, default=4096, only_at=64)),
    "gemma2": Rules(window=Window(2, default=4096)),
    "gemma3": Rules(window=Window(6, is_optional=True)),
    "gemma3n": Rules(window=Window(5), shares_cells=True),
    "gemma4": Rules(window=_LISTED, shares_cells=True),
    "gpt-oss": Rules(window=Window(2)),
    "granite_swa": Rules(window=_LISTED),
    "laguna": Rules(window=Window(4, dense_first=True, is_optional=True)),
    "llama4": Rules(window=Window(4, fixed=8192)),
    "maple": Rules(window=_LISTED),
    "mellum": Rules(window=Window(4, is_optional=True)),
    "mimo2": Rules(window=_LISTED),
    "muse-glimmer": Rules(window=Window(4)),
    "olmo2": Rules(window=Window(4, is_optional=True)),
    "plamo3": Rules(window=Window(8, is_optional=True)),
    "smallthinker": Rules(window=Window(4, dense_first=True, fixed=4096, is_optional=True)),
    "spark2_5": Rules(window=_LISTED),
    "step35": Rules(window=_LISTED),
    # multi-head latent attention, indexers
    "deepseek2": Rules(has_mla=True),
    "mistral4": Rules(has_mla=True),
    "deepseek32": Rules(memory="indexed", has_mla=True, indexer="all"),
    "glm-dsa": Rules(memory="indexed", has_mla=True, indexer="listed"),
    "hy_v4": Rules(memory="indexed", has_mla=True, indexer="listed"),
    "dots3note": Rules(memory="indexed", has_mla=True, indexer="listed", window=_LISTED),
    "minimax-m3": Rules(memory="indexed", indexer="lead"),
    "deepseek4": Rules(memory="compressed", window=Window(0, is_constant=True), takes_rollback=True),
    # recurrent, and hybrids
    "mamba": Rules(recurrent="all", state="mamba"),
    "mamba2": Rules(recurrent="all", state="mamba2"),
    **{name: Rules(recurrent="all", state="rwkv") for name in ("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")},
    "jamba": Rules(recurrent="zero heads", state="mamba"),
    "falcon-h1": Rules(recurrent="both", state="mamba2"),
    "plamo2": Rules(recurrent="zero heads", state="mamba2"),
    "granitehybrid": Rules(recurrent="zero heads", state="mamba2"),
    "nemotron_h": Rules(recurrent="zero heads and feed-forward", state="mamba2", takes_rollback=True),
    "nemotron_h_moe": Rules(recurrent="zero heads and feed-forward", state="mamba2", takes_rollback=True),
    "lfm2": Rules(recurrent="zero heads", state="shortconv", window=Window("attention", is_optional=True), takes_rollback=True),
    "lfm2moe": Rules(recurrent="zero heads", state="shortconv", takes_rollback=True),
    "qwen3next": _DELTA,
    "qwen35": Rules(recurrent="interval", state="mamba2", takes_rollback=True),
    "qwen35moe": Rules(recurrent="interval", state="mamba2", takes_rollback=True),
    "qwen4exp": Rules(memory="indexed", recurrent="interval", state="mamba2", indexer="attention", takes_rollback=True),
    "minimax-01": Rules(recurrent="interval", state="lightning", interval=8),
    "kimi-linear": Rules(recurrent="zero heads, all", state="kda", has_mla=True),
    "kimi-k3": Rules(recurrent="zero heads, all", state="kda", has_mla=True, takes_rollback=True),
    "bailingmoe3": Rules(recurrent="zero heads", state="kda", has_mla=True, takes_rollback=True),
    "glm5-next": Rules(memory="indexed", recurrent="zero heads, all", state="kda", has_mla=True, indexer="attention", takes_rollback=True),
    # draft models: their memory depends on the context they draft for
    "gemma4-assistant": Rules(memory="borrowed"),
    "eagle3": Rules(memory="borrowed"),
    "dflash": Rules(memory="borrowed"),
    "clip": Rules(memory="unsupported"),
    "gptj": Rules(memory="unsupported"),
}
