"""What llama.cpp printed on other people's machines, recomputed from the keys of a header alone (fixtures/oracles/public_logs.jsonl).

A log prints a model's figures and the buffers that came of them. The figures become GGUF keys here; what a log left out is supplied by
``CASES``, which says where it is from. Every buffer must then come out to the printed hundredth of a MiB, and a split over several
devices must be the split of some order of whole layers. Rows with nothing to recompute are in ``LISTED``, each under a reason that is
checked, so that nothing hides there.
"""
from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pylloyal.capacity.architectures import ARCHITECTURES
from pylloyal.capacity.geometry import Geometry, Group, geometry
from pylloyal.capacity.memory import Kept, kept
from pylloyal.capacity.settings import Context, Settings, context, row_bytes
from pylloyal.errors import MetadataError

ROWS: dict[str, dict[str, Any]] = {row["id"]: row for row in map(json.loads, (Path(__file__).resolve().parents[2] / "fixtures/oracles/public_logs.jsonl").read_text().splitlines())}
MIB = 1 << 20
HALF = 0.005 + 1e-9  # half of the last printed digit; printed figures are not exact in binary


def near(n_bytes: int, printed: float, half: float = HALF) -> bool:
    return abs(n_bytes / MIB - printed) <= half


# ------------------------------------------------------------------------------------------------------------- keys of a log's figures

HPARAMS = {
    "n_ctx_train": "context_length", "n_embd": "embedding_length", "n_layer": "block_count", "n_head": "attention.head_count", "n_head_kv": "attention.head_count_kv",
    "n_embd_head_k": "attention.key_length", "n_embd_head_v": "attention.value_length", "n_embd_head_k_swa": "attention.key_length_swa", "n_embd_head_v_swa": "attention.value_length_swa",
    "n_embd_head_k_mla": "attention.key_length_mla", "n_embd_head_v_mla": "attention.value_length_mla", "n_swa": "attention.sliding_window", "n_ff": "feed_forward_length",
    "ssm_d_conv": "ssm.conv_kernel", "ssm_d_inner": "ssm.inner_size", "ssm_d_state": "ssm.state_size", "ssm_n_group": "ssm.group_count", "n_vocab": "vocab_size",
    "full_attention_interval": "full_attention_interval",
}


def architecture(row: Mapping[str, Any]) -> str:
    return row["arch"].split(" ")[0]


def keys(row: Mapping[str, Any], supplied: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF keys: those the log printed, then its figures, then what is supplied. The latter never contradicts the former."""
    arch, printed = architecture(row), row.get("hparams", {})
    out: dict[str, Any] = {}
    for name, key in HPARAMS.items():
        value = printed.get(name)
        if isinstance(value, int) or (isinstance(value, list) and name == "n_head_kv"):
            out[key] = value
    if "n_layer_all" in printed:  # with a draft head
        out["block_count"], out["nextn_predict_layers"] = printed["n_layer_all"], printed["n_layer_all"] - printed["n_layer"]
    if arch == "gemma4" and isinstance(printed.get("n_embd_k_gqa"), list):  # the log cuts the array of the pattern off, and prints the widths that come of it
        out["attention.sliding_window_pattern"] = [width == printed["n_embd_head_k_swa"] * printed["n_head_kv"] for width in printed["n_embd_k_gqa"]]
    for key, value in row.get("gguf_kv", {}).items():
        name = key.removeprefix(f"{arch}.")
        if re.fullmatch(r"\d+", str(value)):
            assert out.setdefault(name, int(value)) == int(value), key
    for key, value in supplied.items():
        assert out.setdefault(key, value) == value, f"{row['id']}: {key} is in the log, and is not {value}"
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in {"context_length": 4096, "embedding_length": 2048, **out}.items()}}


# ------------------------------------------------------------------------------------------------------------- what is supplied

@dataclass(frozen=True)
class Case:
    """How a row is recomputed.

    ``keys`` is what the log left out; ``origin`` where it is from: another row, the model's published configuration, or ("figures") the
    only round numbers its figures leave, which then prove consistency and not the model. ``settings`` and ``n_ctx`` likewise.
    """

    keys: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    n_ctx: int = 0
    embeddings: bool = False  # the output buffer has a row of embeddings beside the logits
    cells_as_printed: bool = False  # made by a build that rounded contexts otherwise: bytes are recomputed for the cells it printed
    lost: tuple[tuple[str, int], ...] = ()  # (device, cache) whose line the excerpt lacks
    skipped: tuple[str, ...] = ()  # caches of another context, or another model, in the same log
    has_all_caches: bool = True  # False: the excerpt lacks the window's line


QWEN35_27B = {"block_count": 64, "attention.head_count": 24, "attention.head_count_kv": 4, "attention.key_length": 256, "attention.value_length": 256, "ssm.conv_kernel": 4, "ssm.inner_size": 6144,
              "ssm.state_size": 128, "ssm.group_count": 16, "vocab_size": 248320}
QWEN35_27B_MTP = {**QWEN35_27B, "block_count": 65, "nextn_predict_layers": 1}
QWEN35_9B = {"block_count": 32, "attention.head_count": 16, "attention.head_count_kv": 4, "attention.key_length": 256, "attention.value_length": 256, "ssm.conv_kernel": 4, "ssm.inner_size": 4096,
             "ssm.state_size": 128, "ssm.group_count": 16, "vocab_size": 248320}
QWEN35_35B = {"block_count": 40, "attention.head_count": 16, "attention.head_count_kv": 2, "attention.key_length": 256, "attention.value_length": 256, "ssm.conv_kernel": 4, "ssm.inner_size": 4096,
              "ssm.state_size": 128, "ssm.group_count": 16, "vocab_size": 248320}
GPT_OSS_20B = {"block_count": 24, "attention.head_count": 64, "attention.head_count_kv": 8, "attention.key_length": 64, "attention.value_length": 64, "attention.sliding_window": 128, "vocab_size": 201088}
GEMMA3_270M = {"block_count": 18, "attention.head_count": 4, "attention.head_count_kv": 1, "attention.key_length": 256, "attention.value_length": 256, "attention.sliding_window": 512}
GEMMA4_E4B = {key.removeprefix("gemma4."): value for key, value in keys(ROWS["O005"], {}).items() if key.startswith("gemma4.")}
GLM_DSA = {"attention.indexer.key_length": 128}
CONFIG = "the model's published configuration"

CASES: dict[str, Case] = {
    **{name: Case() for name in ("O001", "O002", "O003", "O004", "O005", "O007", "O008", "O011", "O045", "O046", "O059")},
    "O012": Case(cells_as_printed=True, origin="its build kept contexts in steps of 32; n_seq_max is not printed, and one sequence is what its output buffer has"),
    "O044": Case(embeddings=True, origin="its output buffer is one row of logits and one of embeddings"),
    "O047": Case(GLM_DSA, "the width of an indexer's key, printed with its cache"),
    "O106": Case({**GLM_DSA, "context_length": 1048576, "attention.head_count": 64, "attention.head_count_kv": 1, "attention.value_length": 512,
                  "attention.key_length_mla": 256, "attention.value_length_mla": 256, "vocab_size": 154880}, "O047, the same model"),
    "O062": Case(QWEN35_27B, CONFIG, {"n_branches": 1, "n_rs_seq": 6}),
    "O063": Case(QWEN35_27B_MTP, CONFIG),
    "O064": Case(QWEN35_27B_MTP, CONFIG, n_ctx=4096),
    "O065": Case(QWEN35_9B, "O123, and " + CONFIG),
    "O066": Case(QWEN35_9B, "O123, and " + CONFIG),
    "O067": Case(QWEN35_9B, "O123, and " + CONFIG),
    "O068": Case(QWEN35_9B, "O123, and " + CONFIG),
    "O069": Case(QWEN35_9B, "O123, and " + CONFIG),
    "O070": Case(QWEN35_35B, "O003", n_ctx=4096),
    "O071": Case(QWEN35_35B, "O003"),
    "O073": Case({"block_count": 56, "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 128, "attention.value_length": 128, "attention.sliding_window": 2048}, "figures"),
    "O075": Case({"attention.head_count": 16, "attention.head_count_kv": [8, 8, 8, 8, 8, 1] * 8, "attention.key_length": 512, "attention.value_length": 512, "attention.key_length_swa": 256,
                  "attention.value_length_swa": 256, "attention.sliding_window_pattern": [True, True, True, True, True, False] * 8}, "figures", {"type_k": "q8_0", "type_v": "q8_0"}),
    "O076": Case(GPT_OSS_20B, CONFIG, {"n_ubatch": 256, "unified": False}),  # 129 to 384 give these cells
    "O077": Case({"block_count": 16, "attention.head_count": 16, "attention.head_count_kv": 16, "attention.key_length": 128, "attention.value_length": 128, "vocab_size": 50304}, CONFIG),
    "O078": Case(GPT_OSS_20B, CONFIG, {"n_ubatch": 128}, lost=(("HTP2", 1),), has_all_caches=False),
    **{name: Case(GEMMA3_270M, CONFIG) for name in ("O080", "O082", "O083", "O084", "O085", "O088", "O089")},
    "O101": Case({"attention.head_count": 8, "ssm.conv_kernel": 4, "ssm.inner_size": 3072, "ssm.state_size": 256, "ssm.group_count": 1}, CONFIG, {"n_branches": 1}),
    "O102": Case({"attention.head_count": 128, "attention.head_count_kv": 128, "attention.key_length": 192, "attention.value_length": 128}, CONFIG, {"n_branches": 1, "flash_attn": False}),
    "O109": Case({"attention.head_count_kv": 2, "attention.key_length": 256, "attention.value_length": 256, "ssm.conv_kernel": 4, "ssm.inner_size": 2048, "ssm.state_size": 128, "ssm.group_count": 16,
                  "vocab_size": 248320}, CONFIG),
    "O112": Case(QWEN35_27B_MTP, CONFIG, {"n_rs_seq": 4}),
    "O113": Case(QWEN35_27B, CONFIG, n_ctx=32768, skipped=("drafter (0 layers, never allocated)", "drafter SWA")),
    "O117": Case(QWEN35_27B_MTP, CONFIG, {"n_branches": 4}),  # or one with n_rs_seq 3: four states are four states
    "O118": Case({"attention.head_count": 64, "attention.head_count_kv": [0, 0, 0, 0, 2, 0, 0, 0, 0] * 12, "attention.key_length": 128, "attention.value_length": 128,
                  "feed_forward_length": [0, 1, 0, 1, 0, 1, 0, 1, 0] * 12, "ssm.conv_kernel": 4, "ssm.inner_size": 16384, "ssm.state_size": 128, "ssm.group_count": 8, "vocab_size": 131072}, "figures"),
    "O119": Case({"attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 256, "attention.value_length": 256, "attention.sliding_window": 512}, CONFIG, {"n_branches": 1},
                 has_all_caches=False),
}

NOTHING, UNNAMED, ELSEWHERE = "no buffer that a header decides", "names no architecture", "recomputed in a test of its own"
LISTED: dict[str, str] = {
    **dict.fromkeys(("O090", "O091", "O092", "O093", "O096", "O098", "O099"), NOTHING),  # compute buffers alone
    **dict.fromkeys(("O114", "O115", "O116"), NOTHING),  # projectors and their graphs
    "O121": NOTHING,  # checkpoints a server keeps in host memory
    **dict.fromkeys(("O123", "O125", "O127", "O128", "O129"), NOTHING),  # figures of models, and no log
    "O074": UNNAMED, "O108": UNNAMED,
    "O079": ELSEWHERE,
}


def test_every_row_is_recomputed_or_listed_and_none_is_both() -> None:
    assert set(CASES) | set(LISTED) == set(ROWS)
    assert not set(CASES) & set(LISTED)
    assert all(name in CASES for name, row in ROWS.items() if row["tier"] == "A")


BUFFERS = ("kv", "kv_extra", "recurrent", "kv_rs_buffers", "output_mib", "observed_total_kv_mib")


@pytest.mark.parametrize(("name", "reason"), LISTED.items(), ids=list(LISTED))
def test_what_is_listed_cannot_be_recomputed(name: str, reason: str) -> None:
    row = ROWS[name]
    if reason == NOTHING:
        assert not any(row.get(key) for key in BUFFERS)
    elif reason == UNNAMED:
        assert architecture(row) not in ARCHITECTURES
        with pytest.raises(MetadataError):
            geometry(keys(row, {}))
    else:
        assert name == "O079"


def test_only_what_a_log_left_out_is_supplied() -> None:
    """Rows of tier A have everything, but the width of a key that is printed with its cache, not with the model."""
    assert {name for name, case in CASES.items() if ROWS[name]["tier"] == "A" and case.keys} == {"O047"}
    assert all(case.origin for case in CASES.values() if case.keys)


# ------------------------------------------------------------------------------------------------------------- recomputing

def settings_of(row: Mapping[str, Any], case: Case) -> Settings:
    asked = row.get("ctx", {})
    types = next(((line["type_k"], line.get("type_v", line["type_k"])) for line in row.get("kv", []) if "type_k" in line), (asked.get("type_k", "f16"), asked.get("type_v", "f16")))
    states = next((line for line in row.get("recurrent", [])), {})
    facts = {
        "n_branches": asked.get("n_seq_max") or states.get("n_seq") or 1, "n_batch": asked.get("n_batch", 2048), "n_ubatch": asked.get("n_ubatch", 512), "type_k": types[0], "type_v": types[1],
        "swa_full": False,  # what llama.cpp's own programs ask for, if not told otherwise
        "flash_attn": asked.get("flash_attn_resolved", asked.get("flash_attn", "enabled")) not in (0, "disabled"),
        "unified": str(asked.get("kv_unified", "true")) == "true", "n_rs_seq": states.get("rs_seq", 0),
    }
    return Settings(**{**facts, **case.settings})


@dataclass(frozen=True)
class Made:
    """A row, recomputed."""

    shape: Geometry
    asked: Settings
    made: Context
    caches: tuple[tuple[Group, Kept], ...]
    states: tuple[Kept, ...]

    @property
    def streams(self) -> int:
        return 1 if self.asked.unified else self.made.n_seq_max


def recompute(row: Mapping[str, Any], case: Case, **changes: Any) -> Made:
    shape = geometry(keys(row, case.keys))
    asked = settings_of(row, case).but(**changes)
    assert asked.conflicts(shape) == ""
    made = context(shape, row.get("ctx", {}).get("n_ctx") or case.n_ctx, asked)
    if case.cells_as_printed:
        n = row["ctx"]["n_ctx"]
        assert made.n_ctx != n, "the pinned engine makes the same of it, and no exception is needed"
        made = Context(n, n, made.n_batch, made.n_ubatch, made.n_seq_max, n, 0)
    all_kept = kept(shape, made, asked)
    n_groups = len(shape.groups)
    return Made(shape, asked, made, tuple(zip(shape.groups, all_kept[:n_groups], strict=True)), all_kept[n_groups:])


@pytest.mark.parametrize("name", CASES)
def test_contexts(name: str) -> None:
    """n_ctx, n_ctx_seq, n_batch and n_ubatch as they were printed."""
    row = ROWS[name]
    it, asked = recompute(row, CASES[name]), row.get("ctx", {})
    printed = {"n_ctx": it.made.n_ctx, "n_ctx_seq": it.made.n_ctx_seq, "n_ctx_per_seq": it.made.n_ctx_seq, "n_batch": it.made.n_batch, "n_ubatch": it.made.n_ubatch, "n_seq_max": it.made.n_seq_max}
    if name == "O089":  # three streams of 341 tokens are three of 512
        assert (it.made.n_ctx, it.made.kv_cells) == (row["misc"]["np3_cells_total"],) * 2
        del printed["n_ctx"]
    if name == "O118":
        assert it.made.n_ubatch == 16  # no more than the batch
    assert {key: value for key, value in printed.items() if key in asked and asked[key] is not None} == {key: asked[key] for key in printed if asked.get(key) is not None}
    if "n_swa" in row.get("hparams", {}) and "is_swa_any" in row["hparams"]:
        assert it.shape.has_window == bool(row["hparams"]["is_swa_any"])


@pytest.mark.parametrize("name", [name for name in CASES if ROWS[name].get("kv")])
def test_caches(name: str) -> None:
    """Every line of a KV cache: cells, layers, and the sizes of it, of K and of V."""
    row, case = ROWS[name], CASES[name]
    lines = [line for line in (*row["kv"], *row.get("kv_extra", [])) if line["cache"] not in case.skipped]
    it = recompute(row, case)
    if name == "O062":  # the second is of the draft head's context: one layer like any of the model
        draft = lines.pop()
        assert near(it.caches[0][1].layer_bytes[3], draft["size_mib"])
    if name == "O102":  # one model twice, with K of two types
        for line in lines:
            check_line(line, recompute(row, case, type_k=line["type_k"]), 0)
        return
    assert len(it.caches) == len(lines) if case.has_all_caches else len(it.caches) > len(lines)
    for i, line in enumerate(lines):
        check_line(line, it, i)


def check_line(line: Mapping[str, Any], it: Made, i: int) -> None:
    group, cache = it.caches[i]
    assert near(cache.bytes, line["size_mib"]), (line["cache"], cache.bytes / MIB)
    assert cache.cells == line.get("cells", it.made.n_ctx) * it.streams  # old builds print neither
    assert len(cache.layer_bytes) == line.get("layers", it.shape.n_layer)
    assert (line.get("n_stream") or it.streams) == it.streams
    if "k_mib" in line:
        assert near(sum(row_bytes(it.asked.type_k, k) for k in group.k) * cache.cells, line["k_mib"])
        assert near(sum(row_bytes(it.asked.type_v, v) for v in group.v) * cache.cells, line["v_mib"])


@pytest.mark.parametrize("name", [name for name in CASES if ROWS[name].get("iswa_cells")])
def test_cells_of_windows(name: str) -> None:
    it = recompute(ROWS[name], CASES[name])
    assert [(group.span, cache.cells // it.streams) for group, cache in it.caches] == list(zip(("context", "window"), (cells for _, cells in ROWS[name]["iswa_cells"]), strict=True))


@pytest.mark.parametrize("name", [name for name in CASES if ROWS[name].get("recurrent")])
def test_recurrent_states(name: str) -> None:
    row = ROWS[name]
    it, (line,) = recompute(row, CASES[name]), row["recurrent"]
    (cache,), (states,) = it.states, it.shape.states
    assert near(cache.bytes, line["size_mib"]), cache.bytes / MIB
    assert len(cache.layer_bytes) == row.get("n_recurrent_layers", len(cache.layer_bytes))
    if "cells" in line:
        assert it.made.n_seq_max == line["cells"]
    for letter, n in zip("rs", states.rows, strict=True):
        if f"{letter}_mib" in line:
            assert near(4 * n * cache.cells * len(states.layers), line[f"{letter}_mib"])


@pytest.mark.parametrize("name", [name for name in CASES if ROWS[name].get("output_mib")])
def test_output_buffers(name: str) -> None:
    """A row of logits for each sequence."""
    it, (printed,) = recompute(ROWS[name], CASES[name]), ROWS[name]["output_mib"].values()
    row = it.shape.n_vocab + (it.shape.n_embd_out if CASES[name].embeddings else 0)
    assert near(4 * row * it.made.n_seq_max, printed)


@pytest.mark.parametrize("name", [name for name in CASES if ROWS[name].get("observed_total_kv_mib")])
def test_totals_that_were_observed(name: str) -> None:
    row, case = ROWS[name], CASES[name]
    assert near(sum(cache.bytes for _, cache in recompute(row, case).caches), row["observed_total_kv_mib"])
    if name == "O089":
        four = recompute(row, case, n_branches=4)
        assert (four.made.n_ctx, sum(cache.bytes for _, cache in four.caches)) == (row["misc"]["np4_cells_total"], row["misc"]["np4_total_mib"] * MIB)


# ------------------------------------------------------------------------------------------------------------- devices

Wanted = dict[str, list[tuple[Mapping[int, int], float]]]  # device -> (bytes by layer of a cache, MiB of it there)


def splits(n_layer: int, order: Sequence[str], wanted: Wanted, start: int = 0) -> Iterator[tuple[int, ...]]:
    """Every way to give the devices runs of whole layers, in this order, so that each has what was printed: where the runs end."""
    here, rest = order[0], order[1:]
    for end in range(start, n_layer + 1) if rest else (n_layer,):
        if all(near(sum(layers.get(i, 0) for i in range(start, end)), printed) for layers, printed in wanted[here]):
            if not rest:
                yield (end,)
            else:
                yield from ((end, *ends) for ends in splits(n_layer, rest, wanted, end))


DRAFT = "KV (MTP draft ctx)"


@pytest.mark.parametrize("name", [name for name in CASES if ROWS[name].get("kv_rs_buffers") and name != "O064"])
def test_devices(name: str) -> None:
    """What each device has is what some run of whole layers takes, the same run for cells and states; the CPU's are the first."""
    row, case = ROWS[name], CASES[name]
    it = recompute(row, case)
    caches = {("KV", i): cache for i, (_, cache) in enumerate(it.caches)} | {("RS", i): cache for i, cache in enumerate(it.states)}
    names = {"KV": 0, "KV main": 0, "KV indexer": 1, "RS": 0}
    printed: dict[tuple[str, int, str], float] = {}
    for kind, device, mib in row["kv_rs_buffers"]:
        if kind == DRAFT:
            assert near(it.caches[0][1].layer_bytes[3], mib)  # one layer like any of the model
            continue
        number = names[kind]
        while (kind[:2], number, device) in printed:  # the second line of a device is of the second cache
            number += 1
        printed[kind[:2], number, device] = mib
    devices = list(dict.fromkeys(device for _, _, device in printed))
    shown = {(kind, number) for kind, number, _ in printed}
    wanted: Wanted = {device: [(caches[place].layer_bytes, printed.get((*place, device), 0.0)) for place in sorted(shown) if (device, place[1]) not in case.lost] for device in devices}
    cpu = [device for device in devices if device == "CPU"]
    others = [device for device in devices if device != "CPU"]
    found = [(order, ends) for others_ in itertools.permutations(others) for order in [(*cpu, *others_)] for ends in splits(it.shape.n_layer, order, wanted)]
    assert found, f"no runs of whole layers give {printed}"
    offloaded = re.fullmatch(r"(\d+)/(\d+)", row.get("misc", {}).get("offloaded", ""))
    if offloaded and cpu and others:
        on_cpu = int(offloaded[2]) - int(offloaded[1])  # the output layer, which is one of the offloaded, is the last
        assert any(ends[0] == on_cpu for _, ends in found)


def test_a_split_in_no_order_of_layers_is_seen() -> None:
    """The check above can fail: half a layer less on one device is no run of layers."""
    it = recompute(ROWS["O003"], CASES["O003"])
    layers = [it.caches[0][1].layer_bytes, it.states[0].layer_bytes]
    for shift, ok in ((0.0, True), (4.2, False)):
        wanted: Wanted = {"a": [(layers[0], 320.0), (layers[1], 134.0 - shift)], "b": [(layers[0], 320.0), (layers[1], 117.25 + shift)]}
        assert bool(list(splits(it.shape.n_layer, ("a", "b"), wanted))) == ok


# ------------------------------------------------------------------------------------------------------------- rows of more than one run

@pytest.mark.parametrize(("swa_full", "cells", "mib"), [(False, 1536, 60.0), (True, 4096, 160.0)])
def test_the_window_with_all_of_its_cells(swa_full: bool, cells: int, mib: float) -> None:
    """O079: one model, and what swa_full does to it."""
    row = ROWS["O079"]
    assert {tuple(line) for line in row["kv_rs_buffers"]} >= {(f"KV SWA swa_full={str(swa_full).lower()}", "HTP0", mib), ("KV non-SWA", "HTP0", 64.0)}
    assert [f"SWA swa_full={str(swa_full).lower()}", cells] in row["iswa_cells"]
    it = recompute(row, Case(GEMMA4_E4B, "O005, the same model", {"n_ubatch": 1024}), swa_full=swa_full)
    (_, full), (_, window) = it.caches
    assert (full.bytes, window.bytes, window.cells) == (64 * MIB, mib * MIB, cells)


def test_states_over_three_devices_in_one() -> None:
    """O064: the line of the device is one of three equal shares of the total."""
    row = ROWS["O064"]
    ((kind, _, mib),) = row["kv_rs_buffers"]
    assert kind == "RS" and near(recompute(row, CASES["O064"]).states[0].bytes // 3, mib)


def test_figures_beside_the_lines() -> None:
    """Round figures that people wrote beside their logs, each of another context or model."""
    for name in ("O067", "O068"):  # whole MiB
        it, misc = recompute(ROWS[name], CASES[name]), ROWS[name]["misc"]
        assert near(it.states[0].bytes, misc["recurrent_mib"], 0.5) and near(4 * it.shape.n_vocab, misc["output_mib"], 0.5)
    assert sum(cache.bytes for _, cache in recompute({**ROWS["O068"], "ctx": {"n_ctx": 1 << 18, "n_seq_max": 1}}, CASES["O068"]).caches) == ROWS["O068"]["misc"]["kv_q4_0_at_256k_mib"] * MIB
    misc = ROWS["O101"]["misc"]
    assert recompute({**ROWS["O101"], "ctx": {"n_ctx": 4096}}, CASES["O101"]).caches[0][1].bytes == misc["kv_at_4k_mib"] * MIB
    qwen = Case({"block_count": 28, "attention.head_count": 12, "attention.head_count_kv": 2, "attention.key_length": 128, "attention.value_length": 128}, CONFIG)
    for n_ctx, key in ((4096, "qwen2.5-1.5B_kv_at_4k_mib"), (32768, "qwen2.5-1.5B_kv_at_32k_mib")):
        assert recompute({"id": key, "arch": "qwen2", "ctx": {"n_ctx": n_ctx}}, qwen).caches[0][1].bytes == misc[key] * MIB
    mamba = Case({"block_count": 48, "ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 16, "ssm.group_count": 0}, CONFIG)
    for n_ctx in (256, 131072):  # constant
        assert recompute({"id": "mamba", "arch": "mamba", "ctx": {"n_ctx": n_ctx}}, mamba).states[0].bytes == misc["mamba-1.4B_recurrent_mib"] * MIB


# ------------------------------------------------------------------------------------------------------------- models people know

def total(metadata: Mapping[str, Any], n_ctx: int, settings: Settings) -> int:
    shape = geometry(metadata)
    return sum(cache.bytes for cache in kept(shape, context(shape, n_ctx, settings), settings))


def test_gemma_3_270m() -> None:
    """The pattern of the window is not in the file: one of six layers, a constant of the architecture."""
    metadata = keys({"id": "gemma", "arch": "gemma3"}, {**GEMMA3_270M, "context_length": 32768, "embedding_length": 640})
    settings = Settings(n_branches=1, n_batch=2048, n_ubatch=512)
    assert total(metadata, 32768, settings) == 576 * MIB
    assert total(metadata, 32768, settings.but(swa_full=False)) == 111 * MIB


def test_smollm2_135m() -> None:
    metadata = keys({"id": "smollm2", "arch": "llama"}, {"block_count": 30, "context_length": 8192, "embedding_length": 576, "attention.head_count": 9, "attention.head_count_kv": 3})
    for kv_type, a_token in (("f16", 23_040), ("q8_0", 12_240)):
        settings = Settings(type_k=kv_type, type_v=kv_type)
        assert total(metadata, 8192, settings) == a_token * 8192
        assert total(metadata, 8192, settings) - total(metadata, 8192 - 256, settings) == a_token * 256
