"""The ABI as ctypes: constants, structs, prototypes.

GENERATED from libsrc/include/pylloyal.h by tools/gen_capi.py; do not edit.
"""
# ruff: noqa: F403, F405
# fmt: off
from ctypes import *
from typing import Any, Final

ABI_VERSION: Final = 1
OK: Final = 0
E_INVALID: Final = -1
E_CLOSED: Final = -2
E_STALE: Final = -3
E_BUSY: Final = -4
E_HAS_CHILDREN: Final = -5
E_DIVERGED: Final = -6
E_NO_LOGITS: Final = -7
E_GRAMMAR: Final = -8
E_UNSUPPORTED: Final = -9
E_FORMAT: Final = -10
E_IO: Final = -11
E_INTERNAL: Final = -12
E_OUT_OF_MEMORY: Final = -13
E_NO_LEASE: Final = -14
E_CONTEXT: Final = -15
E_NO_CELLS: Final = -16
E_CANCELLED: Final = -17
E_DECODE: Final = -18
E_POISONED: Final = -19
E_TEMPLATE: Final = -20
E_ILLEGAL: Final = -21
E_PROJECTOR: Final = -22
E_MEDIA: Final = -23
STATE_UNCHANGED: Final = 0
STATE_ADVANCED: Final = 1
STATE_POISONED: Final = 2
VOCAB_NONE: Final = 0
VOCAB_SPM: Final = 1
VOCAB_BPE: Final = 2
VOCAB_WPM: Final = 3
VOCAB_UGM: Final = 4
VOCAB_RWKV: Final = 5
VOCAB_OTHER: Final = 6
TOKENIZE_ADD_SPECIAL: Final = 1
TOKENIZE_PARSE_SPECIAL: Final = 2
DETOKENIZE_SPECIAL: Final = 1
TOKEN_EOG: Final = 1
TOKEN_CONTROL: Final = 2
TOKEN_BYTE: Final = 4
TOKEN_UNUSED: Final = 8
TOKEN_UNKNOWN: Final = 16
TOKEN_USER: Final = 32
FLASH_ATTN_AUTO: Final = 0
FLASH_ATTN_ON: Final = 1
FLASH_ATTN_OFF: Final = 2
KV_F16: Final = 0
KV_F32: Final = 1
KV_BF16: Final = 2
KV_Q8_0: Final = 3
KV_Q4_0: Final = 4
KV_Q4_1: Final = 5
KV_Q5_0: Final = 6
KV_Q5_1: Final = 7
KV_IQ4_NL: Final = 8
SEED_KEEP: Final = 0
SEED_SET: Final = 1
SEED_RESTART: Final = 2
GRAMMAR_GBNF: Final = 0
GRAMMAR_CHAT: Final = 1
BIAS: Final = 0
STEER: Final = 1
METRICS_NONE: Final = 0
METRICS_MODEL: Final = 1
METRICS_SAMPLING: Final = 2
FORK_WITHOUT_LOGITS: Final = 1
FINISH_NONE: Final = 0
FINISH_EOG: Final = 1
FINISH_STOP: Final = 2
FINISH_LENGTH: Final = 3
FINISH_ILLEGAL: Final = 4
SAVE_LOGITS: Final = 1
PART_TEXT: Final = 0
PART_TOKENS: Final = 1
PART_IMAGE: Final = 2
PART_AUDIO: Final = 3
PART_ROWS: Final = 4
POOLING_MODEL: Final = 0
POOLING_MEAN: Final = 1
POOLING_CLS: Final = 2
POOLING_LAST: Final = 3


class pyl_model_p(c_void_p):
    """``pyl_model *``: opaque."""


class pyl_store_p(c_void_p):
    """``pyl_store *``: opaque."""


class pyl_embedder_p(c_void_p):
    """``pyl_embedder *``: opaque."""


class pyl_projector_p(c_void_p):
    """``pyl_projector *``: opaque."""


class pyl_prompt_p(c_void_p):
    """``pyl_prompt *``: opaque."""


class pyl_text_p(c_void_p):
    """``pyl_text *``: opaque."""


class pyl_error(Structure):
    """Everything known about a failure."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("code", c_int32),
        ("state", c_int32),
        ("engine_rc", c_int32),
        ("partial", c_int32),
        ("index", c_int32),
        ("need", c_int64),
        ("have", c_int64),
        ("message", c_char_p),
    ]


class pyl_live(Structure):
    """Number of native objects alive, for leak tests."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("models", c_uint32),
        ("weights", c_uint32),
        ("stores", c_uint32),
        ("contexts", c_uint32),
        ("branches", c_uint32),
        ("grammars", c_uint32),
        ("texts", c_uint32),
        ("embedders", c_uint32),
        ("projectors", c_uint32),
        ("prompts", c_uint32),
    ]


class pyl_model_params(Structure):
    """------------------------------------------------------------------------------------------------------------ models --"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("n_gpu_layers", c_int32),
        ("use_mmap", c_int32),
        ("vocab_only", c_int32),
    ]


class pyl_model_info(Structure):
    """pyl_model_info"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("n_vocab", c_int32),
        ("n_ctx_train", c_int32),
        ("n_embd", c_int32),
        ("n_embd_inp", c_int32),
        ("n_layer", c_int32),
        ("n_head", c_int32),
        ("n_head_kv", c_int32),
        ("n_swa", c_int32),
        ("vocab_type", c_int32),
        ("is_recurrent", c_int32),
        ("is_hybrid", c_int32),
        ("has_encoder", c_int32),
        ("has_decoder", c_int32),
        ("add_bos", c_int32),
        ("add_eos", c_int32),
        ("bos", c_int32),
        ("eos", c_int32),
        ("eot", c_int32),
        ("sep", c_int32),
        ("nl", c_int32),
        ("pad", c_int32),
        ("n_params", c_uint64),
        ("n_bytes", c_uint64),
    ]


class pyl_store_params(Structure):
    """pyl_store_params"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_branches", c_uint32),
        ("n_threads", c_uint32),
        ("flash_attn", c_int32),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("swa_full", c_int32),
        ("deterministic", c_int32),
        ("n_ubatch", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs", c_uint32),
        ("kv_unified", c_int32),
        ("offload_kqv", c_int32),
        ("op_offload", c_int32),
    ]


class pyl_pressure(Structure):
    """pyl_pressure"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_threads", c_uint32),
        ("cells_used", c_uint32),
        ("cells_remaining", c_uint32),
        ("leases_used", c_uint32),
        ("leases_remaining", c_uint32),
        ("flash_attn", c_int32),
        ("is_draining", c_int32),
        ("n_dispatches", c_uint64),
        ("n_tokens_decoded", c_uint64),
        ("n_tokens_sampled", c_uint64),
        ("decode_s", c_double),
        ("sample_s", c_double),
        ("swa_full", c_int32),
        ("deterministic", c_int32),
        ("n_ubatch", c_uint32),
    ]


class pyl_sampling(Structure):
    """Tokens the model file says to suppress are never drawn. Order: grammar, bias, steering, penalties, top_k, typical_p, top_p, min_p, temperature, draw. temperature <= 0 takes the most likely token."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("min_p", c_float),
        ("typical_p", c_float),
        ("penalty_repeat", c_float),
        ("penalty_frequency", c_float),
        ("penalty_presence", c_float),
        ("penalty_last_n", c_int32),
        ("seed_mode", c_int32),
        ("seed", c_uint64),
        ("ignore_eog", c_int32),
    ]


class pyl_grammar(Structure):
    """What a branch may say."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_int32),
        ("text", c_char_p),
        ("n_text", c_size_t),
        ("root", c_char_p),
        ("triggers", c_char_p),
        ("n_triggers", c_size_t),
    ]


class pyl_metrics(Structure):
    """the distribution tokens are drawn from: one more run of the sampler for each token"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("levels", c_int32),
        ("n_tokens", c_uint64),
        ("model_surprisal", c_double),
        ("model_entropy", c_double),
        ("last_model_surprisal", c_double),
        ("last_model_entropy", c_double),
        ("n_inside", c_uint64),
        ("sampling_surprisal", c_double),
        ("sampling_entropy", c_double),
        ("last_sampling_surprisal", c_double),
        ("last_sampling_entropy", c_double),
    ]


class pyl_branch_info(Structure):
    """pyl_branch_info"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("position", c_int32),
        ("cells_own", c_uint32),
        ("cells_inherited", c_uint32),
        ("parent", c_uint64),
        ("n_children", c_uint32),
        ("has_logits", c_int32),
        ("is_poisoned", c_int32),
        ("last_token", c_int32),
        ("has_grammar", c_int32),
        ("n_sampled", c_uint64),
        ("slack", c_int32),
        ("reserved", c_uint32),
    ]


class pyl_run(Structure):
    """---------------------------------------------------------------------------------------------------------- decoding --"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("n_tokens", c_uint32),
        ("branch", c_uint64),
        ("tokens", POINTER(c_int32)),
        ("n_landed", c_uint32),
        ("state", c_int32),
    ]


class pyl_lane(Structure):
    """grammar and bias left nothing to draw"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("finish", c_int32),
        ("branch", c_uint64),
        ("max_tokens", c_uint32),
        ("n_tokens", c_uint32),
        ("final_token", c_int32),
        ("state", c_int32),
    ]


class pyl_tick(Structure):
    """pyl_tick"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("n_steps", c_uint32),
        ("stop_tokens", POINTER(c_int32)),
        ("n_stop_tokens", c_size_t),
        ("n_ticks", c_uint32),
        ("n_dispatches", c_uint32),
        ("out_of_cells", c_int32),
        ("max_run_tokens", c_uint32),
        ("runs", POINTER(pyl_run)),
        ("n_runs", c_size_t),
    ]


class pyl_logits_view(Structure):
    """pyl_logits_view"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("n_vocab", c_uint32),
        ("data", POINTER(c_float)),
        ("epoch", c_uint64),
    ]


class pyl_distribution(Structure):
    """pyl_distribution"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("most_likely", c_int32),
        ("entropy", c_double),
        ("log_sum", c_double),
        ("max_logit", c_double),
    ]


class pyl_projector_params(Structure):
    """------------------------------------------------------------------------------------------------ pictures and sound --"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("n_threads", c_uint32),
        ("use_gpu", c_int32),
        ("flash_attn", c_int32),
        ("image_min_tokens", c_uint32),
        ("image_max_tokens", c_uint32),
        ("cache_bytes", c_uint64),
    ]


class pyl_projector_info(Structure):
    """pyl_projector_info"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("has_vision", c_int32),
        ("has_audio", c_int32),
        ("sample_rate", c_int32),
        ("n_embd", c_int32),
        ("is_mrope", c_int32),
        ("is_non_causal", c_int32),
        ("n_frames_merged", c_int32),
        ("n_encodes", c_uint64),
        ("n_cache_hits", c_uint64),
        ("cache_bytes", c_uint64),
        ("encode_s", c_double),
        ("n_prepared", c_uint64),
        ("weights_bytes", c_uint64),
        ("compute_bytes", c_uint64),
    ]


class pyl_part(Structure):
    """pyl_part"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_int32),
        ("text", c_char_p),
        ("tokens", POINTER(c_int32)),
        ("rgb", POINTER(c_uint8)),
        ("samples", POINTER(c_float)),
        ("n", c_size_t),
        ("flags", c_uint32),
        ("width", c_uint32),
        ("height", c_uint32),
        ("is_frame", c_int32),
        ("n_pos", c_int32),
        ("is_non_causal", c_int32),
        ("id", c_char_p),
    ]


class pyl_quote(Structure):
    """pyl_quote"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("n_segments", c_uint32),
        ("n_cells", c_uint32),
        ("n_pos", c_uint32),
        ("n_media", c_uint32),
        ("max_rows", c_uint32),
        ("is_decodable", c_int32),
    ]


class pyl_item(Structure):
    """pyl_item"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("code", c_int32),
        ("branch", c_uint64),
        ("prompt", pyl_prompt_p),
        ("message", pyl_text_p),
        ("n_segments_landed", c_uint32),
        ("n_cells_landed", c_uint32),
        ("state", c_int32),
        ("engine_rc", c_int32),
    ]


class pyl_embedder_params(Structure):
    """pyl_embedder_params"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("n_ctx", c_uint32),
        ("n_threads", c_uint32),
        ("pooling", c_int32),
        ("flash_attn", c_int32),
    ]


class pyl_embedder_info(Structure):
    """pyl_embedder_info"""

    _fields_ = [
        ("struct_size", c_uint32),
        ("n_embd", c_int32),
        ("n_ctx", c_uint32),
        ("pooling", c_int32),
        ("n_dispatches", c_uint64),
        ("n_texts", c_uint64),
        ("n_tokens", c_uint64),
    ]


# name, result, arguments, whether the result is a status
PROTOTYPES: Final[list[tuple[str, Any, list[Any], bool]]] = [
    ("pyl_abi_version", c_int32, [], False),  # int32_t pyl_abi_version(void);
    ("pyl_abi_layout", c_int32, [POINTER(pyl_text_p)], True),  # int32_t pyl_abi_layout(pyl_text ** out);
    ("pyl_build_info", c_int32, [POINTER(pyl_text_p)], True),  # int32_t pyl_build_info(pyl_text ** out);
    ("pyl_devices", c_int32, [POINTER(pyl_text_p)], True),  # int32_t pyl_devices(pyl_text ** out);
    ("pyl_text_data", c_void_p, [pyl_text_p], False),  # const char * pyl_text_data(const pyl_text * text);
    ("pyl_text_size", c_size_t, [pyl_text_p], False),  # size_t pyl_text_size(const pyl_text * text);
    ("pyl_text_free", None, [pyl_text_p], False),  # void pyl_text_free(pyl_text * text);
    ("pyl_error_last", POINTER(pyl_error), [], False),  # const pyl_error * pyl_error_last(void);
    ("pyl_log_drain", c_int32, [POINTER(pyl_text_p), POINTER(c_uint64)], True),  # int32_t pyl_log_drain(pyl_text ** out, uint64_t * dropped);
    ("pyl_log_level", c_int32, [c_int32], True),  # int32_t pyl_log_level(int32_t level);
    ("pyl_live_objects", c_int32, [POINTER(pyl_live)], True),  # int32_t pyl_live_objects(pyl_live * out);
    ("pyl_model_params_init", None, [POINTER(pyl_model_params), c_uint32], False),  # void pyl_model_params_init(pyl_model_params * params, uint32_t struct_size);
    ("pyl_model_open", c_int32, [POINTER(pyl_model_p), c_char_p, c_size_t, POINTER(pyl_model_params)], True),  # int32_t pyl_model_open(pyl_model ** out, const char * path, size_t n_path, const pyl_model_params * params);
    ("pyl_model_free", c_int32, [pyl_model_p], True),  # int32_t pyl_model_free(pyl_model * model);
    ("pyl_model_describe", c_int32, [pyl_model_p, POINTER(pyl_model_info)], True),  # int32_t pyl_model_describe(const pyl_model * model, pyl_model_info * out);
    ("pyl_model_metadata", c_int32, [pyl_model_p, POINTER(pyl_text_p)], True),  # int32_t pyl_model_metadata(const pyl_model * model, pyl_text ** out);
    ("pyl_tokenize", c_int32, [pyl_model_p, c_char_p, c_size_t, c_uint32, POINTER(c_int32), c_size_t, POINTER(c_size_t)], True),  # int32_t pyl_tokenize(const pyl_model * model, const char * text, size_t n_text, uint32_t flags, int32_t * tokens, size_t capacity, size_t * n_tokens);
    ("pyl_detokenize", c_int32, [pyl_model_p, POINTER(c_int32), c_size_t, c_uint32, POINTER(pyl_text_p)], True),  # int32_t pyl_detokenize(const pyl_model * model, const int32_t * tokens, size_t n_tokens, uint32_t flags, pyl_text ** out);
    ("pyl_token_flags", c_int32, [pyl_model_p, POINTER(c_int32), c_size_t, POINTER(c_uint32)], True),  # int32_t pyl_token_flags(const pyl_model * model, const int32_t * tokens, size_t n_tokens, uint32_t * flags);
    ("pyl_chat_render", c_int32, [pyl_model_p, c_char_p, c_size_t, POINTER(pyl_text_p)], True),  # int32_t pyl_chat_render(const pyl_model * model, const char * request, size_t n_request, pyl_text ** out);
    ("pyl_chat_parse", c_int32, [c_char_p, c_size_t, POINTER(pyl_text_p)], True),  # int32_t pyl_chat_parse(const char * request, size_t n_request, pyl_text ** out);
    ("pyl_schema_to_gbnf", c_int32, [c_char_p, c_size_t, POINTER(pyl_text_p)], True),  # int32_t pyl_schema_to_gbnf(const char * schema, size_t n_schema, pyl_text ** out);
    ("pyl_grammar_match", c_int32, [pyl_model_p, c_char_p, c_size_t, c_char_p, c_char_p, c_size_t, POINTER(c_size_t), POINTER(c_int32)], True),  # int32_t pyl_grammar_match(const pyl_model * model, const char * gbnf, size_t n_gbnf, const char * root, const char * text, size_t n_text, size_t * n_matched_bytes, int32_t * is_complete);
    ("pyl_store_params_init", None, [POINTER(pyl_store_params), c_uint32], False),  # void pyl_store_params_init(pyl_store_params * params, uint32_t struct_size);
    ("pyl_store_open", c_int32, [POINTER(pyl_store_p), pyl_model_p, POINTER(pyl_store_params)], True),  # int32_t pyl_store_open(pyl_store ** out, const pyl_model * model, const pyl_store_params * params);
    ("pyl_store_free", c_int32, [pyl_store_p], True),  # int32_t pyl_store_free(pyl_store * store);
    ("pyl_store_drain", c_int32, [pyl_store_p], True),  # int32_t pyl_store_drain(pyl_store * store);
    ("pyl_store_cancel", c_int32, [pyl_store_p], True),  # int32_t pyl_store_cancel(pyl_store * store);
    ("pyl_store_pressure", c_int32, [pyl_store_p, POINTER(pyl_pressure)], True),  # int32_t pyl_store_pressure(const pyl_store * store, pyl_pressure * out);
    ("pyl_store_memory", c_int32, [pyl_store_p, POINTER(pyl_text_p)], True),  # int32_t pyl_store_memory(pyl_store * store, pyl_text ** out);
    ("pyl_dry_run", c_int32, [POINTER(pyl_text_p), c_char_p, c_size_t, POINTER(pyl_model_params), POINTER(pyl_store_params)], True),  # int32_t pyl_dry_run(pyl_text ** out, const char * path, size_t n_path, const pyl_model_params * model_params, const pyl_store_params * store_params);
    ("pyl_sampling_init", None, [POINTER(pyl_sampling), c_uint32], False),  # void pyl_sampling_init(pyl_sampling * sampling, uint32_t struct_size);
    ("pyl_branch_set_sampling", c_int32, [pyl_store_p, c_uint64, POINTER(pyl_sampling)], True),  # int32_t pyl_branch_set_sampling(pyl_store * store, pyl_branch branch, const pyl_sampling * sampling);
    ("pyl_branch_get_sampling", c_int32, [pyl_store_p, c_uint64, POINTER(pyl_sampling)], True),  # int32_t pyl_branch_get_sampling(pyl_store * store, pyl_branch branch, pyl_sampling * out);
    ("pyl_branch_set_grammar", c_int32, [pyl_store_p, c_uint64, POINTER(pyl_grammar)], True),  # int32_t pyl_branch_set_grammar(pyl_store * store, pyl_branch branch, const pyl_grammar * grammar);
    ("pyl_branch_set_bias", c_int32, [pyl_store_p, c_uint64, c_int32, POINTER(c_int32), POINTER(c_float), c_size_t], True),  # int32_t pyl_branch_set_bias(pyl_store * store, pyl_branch branch, int32_t kind, const int32_t * tokens, const float * bias, size_t n);
    ("pyl_branch_set_metrics", c_int32, [pyl_store_p, c_uint64, c_int32], True),  # int32_t pyl_branch_set_metrics(pyl_store * store, pyl_branch branch, int32_t levels);
    ("pyl_branch_get_metrics", c_int32, [pyl_store_p, c_uint64, POINTER(pyl_metrics)], True),  # int32_t pyl_branch_get_metrics(pyl_store * store, pyl_branch branch, pyl_metrics * out);
    ("pyl_branch_create", c_int32, [pyl_store_p, POINTER(c_uint64), c_int32, POINTER(pyl_sampling), POINTER(pyl_grammar)], True),  # int32_t pyl_branch_create(pyl_store * store, pyl_branch * out, int32_t start_pos, const pyl_sampling * sampling, const pyl_grammar * grammar);
    ("pyl_branch_fork_n", c_int32, [pyl_store_p, c_uint64, POINTER(c_uint64), c_size_t, POINTER(c_uint64), c_uint32], True),  # int32_t pyl_branch_fork_n(pyl_store * store, pyl_branch source, pyl_branch * out, size_t n, const uint64_t * seeds, uint32_t flags);
    ("pyl_branch_prune_n", c_int32, [pyl_store_p, POINTER(c_uint64), c_size_t], True),  # int32_t pyl_branch_prune_n(pyl_store * store, const pyl_branch * branches, size_t n);
    ("pyl_branch_prune_subtree", c_int32, [pyl_store_p, c_uint64], True),  # int32_t pyl_branch_prune_subtree(pyl_store * store, pyl_branch branch);
    ("pyl_branch_retain_only", c_int32, [pyl_store_p, c_uint64], True),  # int32_t pyl_branch_retain_only(pyl_store * store, pyl_branch branch);
    ("pyl_branch_fast_forward", c_int32, [pyl_store_p, c_uint64, c_uint64], True),  # int32_t pyl_branch_fast_forward(pyl_store * store, pyl_branch parent, pyl_branch child);
    ("pyl_branch_reseed_kv", c_int32, [pyl_store_p, c_uint64, POINTER(c_int32), c_size_t, POINTER(c_uint32)], True),  # int32_t pyl_branch_reseed_kv(pyl_store * store, pyl_branch branch, const int32_t * tokens, size_t n_tokens, uint32_t * n_landed);
    ("pyl_branch_describe", c_int32, [pyl_store_p, c_uint64, POINTER(pyl_branch_info)], True),  # int32_t pyl_branch_describe(pyl_store * store, pyl_branch branch, pyl_branch_info * out);
    ("pyl_branch_list", c_int32, [pyl_store_p, c_uint64, POINTER(c_uint64), c_size_t, POINTER(c_size_t)], True),  # int32_t pyl_branch_list(pyl_store * store, pyl_branch children_of, pyl_branch * out, size_t capacity, size_t * n);
    ("pyl_prefill_n", c_int32, [pyl_store_p, POINTER(pyl_run), c_size_t, c_uint32, POINTER(c_uint32)], True),  # int32_t pyl_prefill_n(pyl_store * store, pyl_run * runs, size_t n_runs, uint32_t max_dispatches, uint32_t * n_dispatches);
    ("pyl_sample_n", c_int32, [pyl_store_p, POINTER(c_uint64), c_size_t, POINTER(c_int32)], True),  # int32_t pyl_sample_n(pyl_store * store, const pyl_branch * branches, size_t n, int32_t * tokens);
    ("pyl_commit_n", c_int32, [pyl_store_p, POINTER(c_uint64), POINTER(c_int32), c_size_t], True),  # int32_t pyl_commit_n(pyl_store * store, const pyl_branch * branches, const int32_t * tokens, size_t n);
    ("pyl_tick_n", c_int32, [pyl_store_p, POINTER(pyl_tick), POINTER(pyl_lane), c_size_t, POINTER(c_int32)], True),  # int32_t pyl_tick_n(pyl_store * store, pyl_tick * tick, pyl_lane * lanes, size_t n_lanes, int32_t * tokens);
    ("pyl_branch_logits", c_int32, [pyl_store_p, c_uint64, POINTER(pyl_logits_view)], True),  # int32_t pyl_branch_logits(pyl_store * store, pyl_branch branch, pyl_logits_view * out);
    ("pyl_branch_set_logits", c_int32, [pyl_store_p, c_uint64, POINTER(c_float), c_size_t], True),  # int32_t pyl_branch_set_logits(pyl_store * store, pyl_branch branch, const float * logits, size_t n);
    ("pyl_branch_merge_logits", c_int32, [pyl_store_p, c_uint64, POINTER(c_uint64), c_size_t, c_float], True),  # int32_t pyl_branch_merge_logits(pyl_store * store, pyl_branch branch, const pyl_branch * experts, size_t n, float alpha);
    ("pyl_branch_legal_n", c_int32, [pyl_store_p, c_uint64, POINTER(c_int32), c_size_t, POINTER(c_uint8)], True),  # int32_t pyl_branch_legal_n(pyl_store * store, pyl_branch branch, const int32_t * tokens, size_t n, uint8_t * legal);
    ("pyl_branch_distribution", c_int32, [pyl_store_p, c_uint64, POINTER(pyl_distribution)], True),  # int32_t pyl_branch_distribution(pyl_store * store, pyl_branch branch, pyl_distribution * out);
    ("pyl_branch_logits_at", c_int32, [pyl_store_p, c_uint64, POINTER(c_int32), c_size_t, POINTER(c_float)], True),  # int32_t pyl_branch_logits_at(pyl_store * store, pyl_branch branch, const int32_t * tokens, size_t n, float * logits);
    ("pyl_branch_priors", c_int32, [pyl_store_p, c_uint64, POINTER(c_int32), POINTER(c_float), c_size_t, POINTER(c_size_t), POINTER(c_size_t)], True),  # int32_t pyl_branch_priors(pyl_store * store, pyl_branch branch, int32_t * tokens, float * log_probs, size_t capacity, size_t * n, size_t * n_legal);
    ("pyl_store_epoch", c_uint64, [pyl_store_p], False),  # uint64_t pyl_store_epoch(const pyl_store * store);
    ("pyl_score_n", c_int32, [pyl_store_p, c_uint64, POINTER(c_int32), POINTER(c_uint32), c_size_t, POINTER(c_int32), c_size_t, POINTER(c_float)], True),  # int32_t pyl_score_n(pyl_store * store, pyl_branch source, const int32_t * tokens, const uint32_t * lengths, size_t n_prompts, const int32_t * ids, size_t n_ids, float * out);
    ("pyl_branch_save", c_int32, [pyl_store_p, c_uint64, c_uint32, POINTER(pyl_text_p)], True),  # int32_t pyl_branch_save(pyl_store * store, pyl_branch branch, uint32_t flags, pyl_text ** out);
    ("pyl_branch_load", c_int32, [pyl_store_p, POINTER(c_uint64), POINTER(c_uint8), c_size_t], True),  # int32_t pyl_branch_load(pyl_store * store, pyl_branch * out, const uint8_t * data, size_t n_data);
    ("pyl_saved_describe", c_int32, [POINTER(c_uint8), c_size_t, POINTER(pyl_text_p)], True),  # int32_t pyl_saved_describe(const uint8_t * data, size_t n_data, pyl_text ** out);
    ("pyl_projector_params_init", None, [POINTER(pyl_projector_params), c_uint32], False),  # void pyl_projector_params_init(pyl_projector_params * params, uint32_t struct_size);
    ("pyl_projector_open", c_int32, [POINTER(pyl_projector_p), pyl_model_p, c_char_p, c_size_t, POINTER(pyl_projector_params)], True),  # int32_t pyl_projector_open(pyl_projector ** out, const pyl_model * model, const char * path, size_t n_path, const pyl_projector_params * params);
    ("pyl_projector_dry_run", c_int32, [POINTER(pyl_text_p), c_char_p, c_size_t, POINTER(pyl_projector_params), c_uint32, c_uint32, c_uint32], True),  # int32_t pyl_projector_dry_run(pyl_text ** out, const char * path, size_t n_path, const pyl_projector_params * params, uint32_t width, uint32_t height, uint32_t n_frames);
    ("pyl_projector_free", c_int32, [pyl_projector_p], True),  # int32_t pyl_projector_free(pyl_projector * projector);
    ("pyl_projector_describe", c_int32, [pyl_projector_p, POINTER(pyl_projector_info)], True),  # int32_t pyl_projector_describe(const pyl_projector * projector, pyl_projector_info * out);
    ("pyl_prompt_make", c_int32, [POINTER(pyl_prompt_p), pyl_model_p, pyl_projector_p, POINTER(pyl_part), c_size_t, c_uint32], True),  # int32_t pyl_prompt_make(pyl_prompt ** out, const pyl_model * model, const pyl_projector * projector, const pyl_part * parts, size_t n_parts, uint32_t flags);
    ("pyl_prompt_free", c_int32, [pyl_prompt_p], True),  # int32_t pyl_prompt_free(pyl_prompt * prompt);
    ("pyl_prompt_quote", c_int32, [pyl_prompt_p, POINTER(pyl_quote)], True),  # int32_t pyl_prompt_quote(const pyl_prompt * prompt, pyl_quote * out);
    ("pyl_prompt_segments", c_int32, [pyl_prompt_p, POINTER(pyl_text_p)], True),  # int32_t pyl_prompt_segments(const pyl_prompt * prompt, pyl_text ** out);
    ("pyl_decode_prompts_n", c_int32, [pyl_store_p, POINTER(pyl_item), c_size_t], True),  # int32_t pyl_decode_prompts_n(pyl_store * store, pyl_item * items, size_t n_items);
    ("pyl_embedder_params_init", None, [POINTER(pyl_embedder_params), c_uint32], False),  # void pyl_embedder_params_init(pyl_embedder_params * params, uint32_t struct_size);
    ("pyl_embedder_open", c_int32, [POINTER(pyl_embedder_p), pyl_model_p, POINTER(pyl_embedder_params)], True),  # int32_t pyl_embedder_open(pyl_embedder ** out, const pyl_model * model, const pyl_embedder_params * params);
    ("pyl_embedder_free", c_int32, [pyl_embedder_p], True),  # int32_t pyl_embedder_free(pyl_embedder * embedder);
    ("pyl_embedder_describe", c_int32, [pyl_embedder_p, POINTER(pyl_embedder_info)], True),  # int32_t pyl_embedder_describe(const pyl_embedder * embedder, pyl_embedder_info * out);
    ("pyl_embed_n", c_int32, [pyl_embedder_p, POINTER(c_int32), POINTER(c_uint32), c_size_t, c_int32, POINTER(c_float)], True),  # int32_t pyl_embed_n(pyl_embedder * embedder, const int32_t * tokens, const uint32_t * lengths, size_t n_texts, int32_t normalize, float * out);
]

STRUCTS: Final[list[type[Structure]]] = [pyl_error, pyl_live, pyl_model_params, pyl_model_info, pyl_store_params, pyl_pressure, pyl_sampling, pyl_grammar, pyl_metrics, pyl_branch_info, pyl_run, pyl_lane, pyl_tick, pyl_logits_view, pyl_distribution, pyl_projector_params, pyl_projector_info, pyl_part, pyl_quote, pyl_item, pyl_embedder_params, pyl_embedder_info]
