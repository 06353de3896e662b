"""How the graphs of the plain architectures are put together: one row for each that is followed tensor by tensor.

Read from ``src/models`` of the pinned engine. A row says only what changes where the allocator puts things: operations done in place
(biases, scales, RMS norms, most activations) leave no trace. A row is here when it gave the engine's figure to the byte, on every header
and every setting tried; the others are bounded term by term (:mod:`.terms`).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Norm = Literal["", "rms", "layer"]


@dataclass(frozen=True, slots=True)
class Layout:
    """One row.

    Attributes
    ----------
    norm : {"rms", "layer"}
        Of a layer's input; layer norms are not done in place.
    qk_norm : str
        Of Q and K before they are rotated: "rms" or "layer"; "wide" for RMS norms of whole rows.
    residual : str
        "pre": norm, attention, sum, norm, feed-forward, sum. "post": no norms before, one after each. "parallel": both parts read
        the same norm. "twin": norms of their own. "own": likewise, the second after the attention; both read the layer's input, through norms of their own.
    sums : str
        In which order a parallel layer adds attention, feed-forward part and input: "fia", "fai" or "afi"; "ifa" in a plain one:
        the input first.
    gated : bool
        The feed-forward part has a gate.
    is_double : bool
        Gate and up are one product.
    experts : {"", "all", "lead"}
        Layers with experts: all, or those after the leading dense ones.
    is_wide : bool
        Experts are as wide as the feed-forward part.
    shared : {"", "after", "own", "gated", "first"}
        An expert for every token: computed after the others; that with a width of its own; and with a gate too; or before them.
    biased, softmax_late : bool
        Experts are chosen by biased scores; the softmax is over the chosen ones.
    normed : bool or str
        Experts' weights are normed; "said": when the file says so.
    is_scaled : bool
        And scaled, when the file says by how much.
    is_capped : bool
        Scores are capped.
    is_fused : bool
        Q, K and V are one tensor in every file.
    is_late : bool
        Rows are chosen after the last layer, not in it.
    rotates : bool
        Q and K are rotated; "windows": in layers with a window, when there is one; "three of four": not in every fourth.
    n_positions : int
        Numbers of a token's position.
    has_places : bool
        Positions have embeddings of their own.
    token_norm : str
        Of what comes in.
    is_deep : bool
        Rows of pictures have parts for later layers, when the file says so.
    """

    norm: Norm = "rms"
    qk_norm: Literal["", "rms", "layer", "wide"] = ""
    residual: Literal["pre", "post", "parallel", "twin", "own"] = "pre"
    sums: Literal["fia", "fai", "afi", "ifa"] = "fia"
    gated: bool = True
    is_double: bool = False
    experts: Literal["", "all", "lead"] = ""
    is_wide: bool = False
    shared: Literal["", "after", "own", "gated", "first"] = ""
    biased: bool = False
    normed: bool | Literal["said"] = True
    is_scaled: bool = False
    softmax_late: bool = False
    is_capped: bool = False
    is_fused: bool = False
    is_late: bool = False
    rotates: bool | Literal["windows", "three of four"] = True
    n_positions: int = 1
    has_places: bool = False
    token_norm: Norm = ""
    is_deep: bool = False


def _rows(names: str, layout: Layout) -> dict[str, Layout]:
    return dict.fromkeys(names.split(), layout)


LAYOUTS: Final[dict[str, Layout]] = {
    **_rows("deci ernie4_5 exaone gemma qwen2 internlm2 xverse seed_oss pangu-embedded nanbeige", Layout()),
    **_rows("smollm3", Layout(rotates="three of four")),
    **_rows("qwen2vl paddleocr", Layout(n_positions=4)),
    **_rows("chatglm", Layout(is_double=True)),
    **_rows("phi3", Layout(is_double=True, sums="ifa")),
    **_rows("glm4", Layout(is_double=True, n_positions=4)),
    **_rows("gemma2", Layout(is_capped=True)),
    **_rows("gemma3 qwen3 maincoder hunyuan-dense", Layout(qk_norm="rms")),
    **_rows("qwen3vl", Layout(qk_norm="rms", n_positions=4, is_deep=True)),
    **_rows("hunyuan_vl", Layout(qk_norm="rms", n_positions=4)),
    **_rows("apertus", Layout(qk_norm="rms", gated=False)),
    **_rows("arcee", Layout(gated=False)),
    **_rows("olmo", Layout(norm="layer")),
    **_rows("orion", Layout(norm="layer")),
    **_rows("codeshell starcoder2 nemotron jais2 pockettts", Layout(norm="layer", gated=False)),
    **_rows("gpt2 starcoder", Layout(norm="layer", gated=False, is_fused=True, rotates=False, has_places=True)),
    **_rows("bloom", Layout(norm="layer", gated=False, is_fused=True, rotates=False, token_norm="layer")),
    **_rows("jais", Layout(norm="layer", is_fused=True, rotates=False)),
    **_rows("mpt", Layout(norm="layer", gated=False, is_fused=True, rotates=False, has_places=True)),
    **_rows("falcon", Layout(norm="layer", residual="twin", sums="fai", gated=False, is_fused=True)),
    **_rows("phi2", Layout(norm="layer", residual="parallel", sums="afi", gated=False)),
    **_rows("gptneox", Layout(norm="layer", residual="own", gated=False, is_fused=True)),
    **_rows("command-r", Layout(norm="layer", residual="parallel", qk_norm="layer")),
    **_rows("cohere2", Layout(norm="layer", residual="parallel", rotates="windows")),
    **_rows("plamo", Layout(residual="parallel", sums="fai")),
    **_rows("exaone4", Layout(residual="post", qk_norm="rms", rotates="windows")),
    **_rows("olmo2", Layout(residual="post", qk_norm="wide")),
    **_rows("llama mistral3 minicpm", Layout(experts="all", is_wide=True)),
    **_rows("granite granitemoe", Layout(experts="all", is_wide=True, shared="own")),
    **_rows("olmoe", Layout(experts="all", is_wide=True, normed=False, qk_norm="wide")),
    **_rows("minimax-m2", Layout(qk_norm="wide", experts="all", is_wide=True, biased=True)),
    **_rows("qwen3moe", Layout(qk_norm="rms", experts="all")),
    **_rows("qwen3vlmoe", Layout(qk_norm="rms", experts="all", n_positions=4, is_deep=True)),
    **_rows("qwen2moe", Layout(experts="all", normed=False, shared="gated")),
    **_rows("deepseek", Layout(experts="lead", normed=False, is_scaled=True, shared="after")),
    **_rows("dots1 exaone-moe", Layout(experts="lead", normed="said", is_scaled=True, shared="after", biased=True, qk_norm="rms")),
    **_rows("ernie4_5-moe", Layout(experts="lead", shared="after", biased=True)),
    **_rows("glm4moe", Layout(qk_norm="rms", experts="lead", normed="said", is_scaled=True, shared="after", biased=True, n_positions=4)),
    **_rows("hunyuan-moe", Layout(qk_norm="rms", experts="all", is_wide=True, shared="first")),
    **_rows("mellum", Layout(qk_norm="rms", experts="all")),
    **_rows("gpt-oss", Layout(experts="all", softmax_late=True, is_late=True)),
}
