/*
 * pylloyal.h: the working memory of a local language model, as a flat C ABI.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * This header is the whole public surface of libpylloyal, and its comments are the reference. C99; needs nothing but
 * <stddef.h> and <stdint.h>.
 *
 * Conventions
 *   Results      Every call that can fail returns int32_t: PYL_OK or a negative PYL_E_*. Outputs come first, or through the
 *                pointers named `out`; on failure they are untouched unless the comment says otherwise.
 *   State        Each error code says what became of the state: unchanged, advanced or poisoned. pyl_error_last() carries
 *                that, the live numbers (need, have), the engine's own return code and the index of the offending item.
 *   Handles      All pointers but pyl_text* are opaque tokens, never addresses: using one after its free, or freeing it twice,
 *                is PYL_E_CLOSED, not undefined behaviour. Parents outlive their children inside the library, so the order
 *                of frees does not matter. A branch is a 64-bit integer (generation << 32 | slot); 0 is never valid, and a
 *                stale one never aliases a newer branch.
 *   Ownership    Owned: the caller frees it, with the call named. Borrowed: valid until what the comment says. Copied: the
 *                library keeps its own copy, the caller's memory is free again when the call returns.
 *   Threads      "any": callable from any thread at any time. "store": one call at a time per store; a second one at the
 *                same time is PYL_E_BUSY and changes nothing. Different stores run in parallel.
 *   Structs      Each begins with struct_size: set it to sizeof before the call (the *_init calls are given it). The library reads and
 *                writes no more than struct_size bytes. In an array all have the same one, and lie that far apart.
 *   Strings      UTF-8 with an explicit length in bytes unless marked NUL-terminated.
 *   Callbacks    None. Logs are drained, progress is polled, cancel is a flag.
 *   Units        ride in names: _bytes, _cells, _tokens, _pos. A cell is one row of the KV cache.
 *
 * What stays as it is
 *   Within one PYL_ABI_VERSION (also the number in the SONAME, libpylloyal.so.1) a program keeps working, without being compiled again,
 *   with every later library.
 *   Never        a function goes, or gets other parameters or another meaning; a constant changes its value; a field of a struct moves,
 *                goes, changes its type or meaning; a struct is no longer passed by pointer with its struct_size.
 *   In a minor   functions, constants, error codes and struct kinds are added; a struct gets fields at its end, whose zero (or the default that
 *                *_init gives) means what the library did before; JSON gets keys; messages, log lines and the default of a 0 that stands
 *                for "the library's choice" change. So: take an unknown code for a failure, skip keys you do not know, parse no messages.
 *   Older program, newer library: works. A field the program does not know of has its default, and is not written.
 *   Newer program, older library: a function that is missing keeps it from being loaded, or from being looked up. A struct that has grown is refused where it is
 *                passed: PYL_E_INVALID, unchanged, need its struct_size and have what the library knows. What the library hands out
 *                (pyl_error_last) says in its own struct_size how far it goes. pyl_abi_layout lists what the library knows.
 *   Another number: nothing is promised; pyl_abi_version() is the one call that any version answers. Saved branches (pyl_branch_save) are not
 *                part of this: they say themselves what can load them.
 */
#ifndef PYLLOYAL_H
#define PYLLOYAL_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#  if defined(PYL_BUILD)
#    define PYL_API __declspec(dllexport)
#  else
#    define PYL_API __declspec(dllimport)
#  endif
#else
#  define PYL_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------ version and build -- */

#define PYL_ABI_VERSION 1

typedef struct pyl_model pyl_model; /* a loaded model: weights, vocabulary, chat templates */
typedef struct pyl_store pyl_store; /* one KV cache and the tree of branches that lives in it */
typedef struct pyl_embedder pyl_embedder; /* a context that turns texts into vectors */
typedef struct pyl_projector pyl_projector; /* an encoder of pictures or sound, and its projection into one model */
typedef struct pyl_prompt pyl_prompt; /* text and media in order, laid out: how many cells and positions each stretch takes */
typedef struct pyl_text pyl_text;   /* bytes the library made for the caller */
typedef uint64_t pyl_branch;        /* generation << 32 | slot; 0 is never valid */

/* The ABI of the loaded library; a caller compiled against another number must not go on. Thread: any. */
PYL_API int32_t pyl_abi_version(void);

/* Sizes and offsets of every struct below, as JSON {"pyl_error": {"size": N, "fields": {"code": [offset, size], ...}}, ...},
 * for bindings to compare with their own. Owned (pyl_text_free). Thread: any. */
PYL_API int32_t pyl_abi_layout(pyl_text ** out);

/* What this library is, as JSON: version, abi_version, engine.{name,commit,cpu,threads,attention}, backends [names], cpu_features
 * [names the code was compiled to use], cpu_missing [those this machine lacks: opening a model then refuses]. Owned
 * (pyl_text_free). Thread: any. */
PYL_API int32_t pyl_build_info(pyl_text ** out);

/* The devices the engine can use, as JSON [{name, description, backend, kind (cpu|gpu|igpu|accel), total_bytes, free_bytes}]. A pair
 * of zeros, or free == total on an accelerator, means unknown, not empty; so does free 0 on a CPU. Owned (pyl_text_free). Thread: any. */
PYL_API int32_t pyl_devices(pyl_text ** out);

/* The bytes of a text (also NUL-terminated) and their number without the NUL. Borrowed until pyl_text_free. Thread: any. */
PYL_API const char * pyl_text_data(const pyl_text * text);
PYL_API size_t pyl_text_size(const pyl_text * text);

/* Frees a text; NULL is fine. Thread: any. */
PYL_API void pyl_text_free(pyl_text * text);

/* ------------------------------------------------------------------------------------------------------------ errors -- */

#define PYL_OK 0
#define PYL_E_INVALID (-1)      /* an argument is out of its range or contradicts another. Unchanged. */
#define PYL_E_CLOSED (-2)       /* the model or store was freed or drained. Unchanged. */
#define PYL_E_STALE (-3)        /* the branch was pruned, or its slot lives on as another branch. Unchanged. */
#define PYL_E_BUSY (-4)         /* another thread is inside this store. Unchanged. */
#define PYL_E_HAS_CHILDREN (-5) /* the branch has children and the operation needs a leaf. Unchanged. */
#define PYL_E_DIVERGED (-6)     /* the parent moved on after the fork. Unchanged. */
#define PYL_E_NO_LOGITS (-7)    /* the branch has no logits to sample from (nothing decoded yet). Unchanged. */
#define PYL_E_GRAMMAR (-8)      /* the grammar does not parse, or the token is not legal under it. Unchanged: the old grammar stays. */
#define PYL_E_UNSUPPORTED (-9)  /* this model, engine or build cannot do it. Unchanged. */
#define PYL_E_FORMAT (-10)      /* data is not in the format it should be in (model file, JSON). Unchanged. */
#define PYL_E_IO (-11)          /* a file could not be opened or read. Unchanged. */
#define PYL_E_INTERNAL (-12)    /* a broken promise inside the library; please report it. State as pyl_error says. */
#define PYL_E_OUT_OF_MEMORY (-13) /* an allocation failed. Unchanged, advanced by the dispatches before, or poisoned. */
#define PYL_E_NO_LEASE (-14)    /* every sequence of the store is taken; need and have are in leases. Unchanged. */
#define PYL_E_CONTEXT (-15)     /* the tokens do not fit the cells that are left; need and have are in cells. Unchanged. */
#define PYL_E_NO_CELLS (-16)    /* the engine found no room although cells were left. Unchanged, or poisoned if partial. */
#define PYL_E_CANCELLED (-17)   /* the cancel flag was seen between two dispatches. Advanced: whole dispatches landed. */
#define PYL_E_DECODE (-18)      /* the engine failed in mid-dispatch. The branches of that dispatch are poisoned. */
#define PYL_E_POISONED (-19)    /* the branch was poisoned earlier and can only be pruned. Unchanged. */
#define PYL_E_TEMPLATE (-20)    /* no chat template, or it does not parse, or it raised; the message holds its own words. Unchanged. */
#define PYL_E_ILLEGAL (-21)     /* nothing can be sampled: grammar and bias leave no token. Unchanged. */
#define PYL_E_PROJECTOR (-22)   /* the projector is not of this model, or no projector; both sides are named. Unchanged. */
#define PYL_E_MEDIA (-23)       /* a picture or sound cannot be encoded. Unchanged, or advanced by the stretches before it. */

#define PYL_STATE_UNCHANGED 0
#define PYL_STATE_ADVANCED 1
#define PYL_STATE_POISONED 2

/* Everything known about a failure. */
typedef struct pyl_error {
    uint32_t struct_size;
    int32_t code;         /* PYL_E_*; PYL_OK when nothing has failed on this thread yet */
    int32_t state;        /* PYL_STATE_* */
    int32_t engine_rc;    /* the engine's own return code, 0 when it was not involved */
    int32_t partial;      /* 1 when part of the call landed before it failed */
    int32_t index;        /* index of the offending item of an array argument, -1 when there is none */
    int64_t need;         /* what was asked for, -1 when no number applies */
    int64_t have;         /* what there was, in the same unit */
    const char * message; /* NUL-terminated, Borrowed until the next failing call on this thread */
} pyl_error;

/* The last failure on the calling thread; successes leave it in place. Borrowed until the thread's next failing call.
 * Thread: any (each has its own). */
PYL_API const pyl_error * pyl_error_last(void);

/* -------------------------------------------------------------------------------------------------------------- logs -- */

/* Moves the log lines collected since the last call into `out`: one per line, "LEVEL text", oldest first. Lines beyond the
 * newest 4,096 are dropped and counted in *dropped. Owned (pyl_text_free). Thread: any. */
PYL_API int32_t pyl_log_drain(pyl_text ** out, uint64_t * dropped);

/* Lines below this level are not collected: 1 debug, 2 info, 3 warning (default), 4 error, 5 nothing. Thread: any. */
PYL_API int32_t pyl_log_level(int32_t level);

/* Number of native objects alive, for leak tests. */
typedef struct pyl_live {
    uint32_t struct_size;
    uint32_t models;   /* pyl_model handles */
    uint32_t weights;  /* distinct weights in memory */
    uint32_t stores;   /* pyl_store handles */
    uint32_t contexts; /* engine contexts: KV caches in memory */
    uint32_t branches; /* live branches of all stores */
    uint32_t grammars; /* engine grammar objects */
    uint32_t texts;    /* pyl_text not yet freed */
    uint32_t embedders; /* pyl_embedder handles */
    uint32_t projectors; /* pyl_projector handles */
    uint32_t prompts;  /* pyl_prompt handles */
} pyl_live;

/* Counts of what is alive right now. Thread: any. */
PYL_API int32_t pyl_live_objects(pyl_live * out);

/* ------------------------------------------------------------------------------------------------------------ models -- */

typedef struct pyl_model_params {
    uint32_t struct_size;
    int32_t n_gpu_layers; /* layers to put on accelerators, negative for all; 0 (default) for none, and then nothing is computed on one */
    int32_t use_mmap;     /* 1 map the file (default), 0 read it */
    int32_t vocab_only;   /* 1: vocabulary and metadata, no weights; such a model opens no store */
} pyl_model_params;

/* Fills in the defaults, as far as the caller's struct goes: struct_size is its sizeof. NULL: nothing. The same of every *_init. Thread: any. */
PYL_API void pyl_model_params_init(pyl_model_params * params, uint32_t struct_size);

/* Opens a model file (GGUF), or the built-in stub engine with a path of the form "stub:key=value;..." (docs/testing.md).
 * Weights already open with the same file and params are shared, and freed with the last handle or store that uses them.
 *   out     Owned (pyl_model_free).
 *   path    Copied; n_path bytes of UTF-8.
 *   params  Copied; NULL for the defaults.
 * Errors: PYL_E_IO, PYL_E_FORMAT (the engine's words in the message), PYL_E_UNSUPPORTED (this CPU lacks instructions the
 * library was compiled to use), PYL_E_OUT_OF_MEMORY. Thread: any. */
PYL_API int32_t pyl_model_open(pyl_model ** out, const char * path, size_t n_path, const pyl_model_params * params);

/* Gives the handle back; stores opened from it live on. Thread: any. */
PYL_API int32_t pyl_model_free(pyl_model * model);

#define PYL_VOCAB_NONE 0
#define PYL_VOCAB_SPM 1
#define PYL_VOCAB_BPE 2
#define PYL_VOCAB_WPM 3
#define PYL_VOCAB_UGM 4
#define PYL_VOCAB_RWKV 5
#define PYL_VOCAB_OTHER 6

typedef struct pyl_model_info {
    uint32_t struct_size;
    int32_t n_vocab;      /* tokens in the vocabulary */
    int32_t n_ctx_train;  /* context the model declares, in tokens */
    int32_t n_embd;       /* width of a hidden state */
    int32_t n_embd_inp;   /* width of an input row (embedding rail) */
    int32_t n_layer;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t n_swa;        /* sliding window in tokens, 0 for none */
    int32_t vocab_type;   /* PYL_VOCAB_* */
    int32_t is_recurrent; /* 1 when there is recurrent state and no attention cache */
    int32_t is_hybrid;    /* 1 when there are both */
    int32_t has_encoder;
    int32_t has_decoder;
    int32_t add_bos;      /* 1 when tokenising with PYL_TOKENIZE_SPECIAL puts a beginning-of-sequence token first */
    int32_t add_eos;
    int32_t bos, eos, eot, sep, nl, pad; /* token ids, -1 for none */
    uint64_t n_params;
    uint64_t n_bytes;     /* bytes of all tensors */
} pyl_model_info;

/* Facts about the model. Thread: any. */
PYL_API int32_t pyl_model_describe(const pyl_model * model, pyl_model_info * out);

/* All scalar metadata of the model file as one JSON object of strings, and under "" the engine's one-line description.
 * Arrays are not included. Owned (pyl_text_free). Thread: any. */
PYL_API int32_t pyl_model_metadata(const pyl_model * model, pyl_text ** out);

/* -------------------------------------------------------------------------------------------------------- vocabulary -- */

#define PYL_TOKENIZE_ADD_SPECIAL 1u   /* add the model's BOS / EOS where it wants them */
#define PYL_TOKENIZE_PARSE_SPECIAL 2u /* text such as "<|im_end|>" becomes the control token; off, it stays inert text */

/* Text to tokens. *n_tokens is always set to the number the text needs; when that exceeds `capacity` nothing is written and
 * the result is PYL_E_INVALID with need and have, so a first call with capacity 0 asks for the size.
 * Errors also: PYL_E_FORMAT (not UTF-8). Thread: any. */
PYL_API int32_t pyl_tokenize(const pyl_model * model, const char * text, size_t n_text, uint32_t flags, int32_t * tokens, size_t capacity, size_t * n_tokens);

#define PYL_DETOKENIZE_SPECIAL 1u /* show control tokens as their text; off, they are left out */

/* Tokens to bytes: the pieces one after another, exactly (a token may end in mid-character). Owned (pyl_text_free).
 * Errors: PYL_E_INVALID with the index of an id outside the vocabulary. Thread: any. */
PYL_API int32_t pyl_detokenize(const pyl_model * model, const int32_t * tokens, size_t n_tokens, uint32_t flags, pyl_text ** out);

#define PYL_TOKEN_EOG 1u     /* ends a generation */
#define PYL_TOKEN_CONTROL 2u /* control token, not text */
#define PYL_TOKEN_BYTE 4u    /* a single raw byte */
#define PYL_TOKEN_UNUSED 8u
#define PYL_TOKEN_UNKNOWN 16u
#define PYL_TOKEN_USER 32u   /* user-defined */

/* Flags (PYL_TOKEN_*) of each token. Errors: PYL_E_INVALID with the index of an id outside the vocabulary. Thread: any. */
PYL_API int32_t pyl_token_flags(const pyl_model * model, const int32_t * tokens, size_t n_tokens, uint32_t * flags);

/* -------------------------------------------------------------------------------------------------------------- chat -- */

/* Renders a conversation through the model's own chat template, with the engine's template code.
 *   request  JSON: messages (required; content may be null = empty), tools, tool_choice (auto|required|none),
 *            parallel_tool_calls, add_generation_prompt (default true), continue_final_message (bool), enable_thinking
 *            (default true), reasoning_format (none|auto|deepseek|deepseek-legacy), grammar, template (source
 *            of another template, the caller's own choice), template_kwargs {name: any JSON, but no name that has an option
 *            here}, parser (auto|content). An unknown key is PYL_E_FORMAT, in messages, their parts and calls, and tools too.
 *   out      JSON: prompt, generation_prompt, add_special (true when the prompt is to be tokenised with
 *            PYL_TOKENIZE_ADD_SPECIAL), grammar (pass the whole JSON as a pyl_grammar of PYL_GRAMMAR_CHAT), grammar_prefill, grammar_lazy, triggers [{type (word|token|pattern|pattern_full), value, token}],
 *            stops, preserved_tokens, thinking {supported, start, ends}, parser {format, reasoning_format, generation_prompt,
 *            rules}: pass `parser` to pyl_chat_parse; notes [what the engine had to change about the messages].
 *            Owned (pyl_text_free).
 * Never another template: a model without one, one that does not parse, one that raises and one that cannot take what was
 * asked (tools, a lone system message, content that would be lost) are PYL_E_TEMPLATE, with the template's own words. Thread: any. */
PYL_API int32_t pyl_chat_render(const pyl_model * model, const char * request, size_t n_request, pyl_text ** out);

/* Parses what the model wrote.
 *   request  JSON: text, partial (default false), parser (as pyl_chat_render gave it).
 *   out      JSON: role, content, reasoning_content, tool_calls [{id, type, function {name, arguments}}]. Owned (pyl_text_free).
 * Errors: PYL_E_FORMAT (bad request, or finished text that does not follow the template's format or breaks off in a tool
 * call). Thread: any. */
PYL_API int32_t pyl_chat_parse(const char * request, size_t n_request, pyl_text ** out);

/* ---------------------------------------------------------------------------------------------------------- grammars -- */

/* Makes a grammar of a JSON Schema (draft 6, 7, 2019-09 or 2020-12) with the engine's converter; pass it to
 * pyl_branch_set_grammar. docs/schema.md lists what is taken, what is refused, and how the JSON it admits is written.
 *   schema  JSON. Nothing is fetched.
 *   out     GBNF with the start rule "root". Owned (pyl_text_free).
 * Errors: PYL_E_UNSUPPORTED before anything the converter would pass over or follow only roughly: the message begins
 * "KEYWORD at PLACE: ", PLACE a JSON pointer such as #/properties/a. Also when the schema is too large, has no value that
 * satisfies it or refers to itself with nothing in between, and in a library without llama.cpp. PYL_E_FORMAT: not UTF-8, not
 * JSON, a key twice, a keyword whose value is not of its form (keyword and place as above). Thread: any. */
PYL_API int32_t pyl_schema_to_gbnf(const char * schema, size_t n_schema, pyl_text ** out);

/* Whether a text follows a grammar, token by token as a branch under it would be held to.
 *   root             NUL-terminated name of the start rule; NULL for "root".
 *   text             UTF-8, tokenised as inert text.
 *   n_matched_bytes  out: bytes of the tokens that could be taken before the first that could not.
 *   is_complete      out: 1 when all were taken and an end-of-generation token may come next.
 * Errors: PYL_E_GRAMMAR as pyl_branch_set_grammar, and for an empty grammar; PYL_E_FORMAT (the text is not UTF-8);
 * PYL_E_UNSUPPORTED (no vocabulary, or one whose tokens do not spell the text exactly: a space is put in front, letters are
 * lowered). Thread: any. */
PYL_API int32_t pyl_grammar_match(const pyl_model * model, const char * gbnf, size_t n_gbnf, const char * root, const char * text, size_t n_text, size_t * n_matched_bytes, int32_t * is_complete);

/* ------------------------------------------------------------------------------------------------------------ stores -- */

#define PYL_FLASH_ATTN_AUTO 0 /* on, unless the engine cannot open this model with it; pyl_store_pressure tells which */
#define PYL_FLASH_ATTN_ON 1
#define PYL_FLASH_ATTN_OFF 2

#define PYL_KV_F16 0
#define PYL_KV_F32 1
#define PYL_KV_BF16 2
#define PYL_KV_Q8_0 3
#define PYL_KV_Q4_0 4
#define PYL_KV_Q4_1 5
#define PYL_KV_Q5_0 6
#define PYL_KV_Q5_1 7
#define PYL_KV_IQ4_NL 8

typedef struct pyl_store_params {
    uint32_t struct_size;
    uint32_t n_ctx;       /* cells; 0 for the model's trained context. Rounded up to the engine's 256 */
    uint32_t n_batch;     /* tokens in one dispatch, and the grain of cancel; 0 for 512. At least n_branches */
    uint32_t n_branches;  /* branches that can be alive at once, 1..256; 0 for 8 */
    uint32_t n_threads;   /* 0 for the cores this process may use (affinity and cgroup quota) */
    int32_t flash_attn;   /* PYL_FLASH_ATTN_* */
    int32_t type_k;       /* PYL_KV_* */
    int32_t type_v;
    int32_t swa_full;     /* 1 (default): sliding-window layers keep full-length cells. 0: they keep a window of cells for each branch, much
                             smaller for long contexts; PYL_E_UNSUPPORTED for the few models whose cache cannot be trimmed. Forks see
                             the same cells either way; recycled ones lie in another order, which can move last bits */
    int32_t deterministic; /* 1: every dispatch holds one branch only, so that what is decoded beside a branch cannot move the last bits
                             of its logits; commit_n and tick_n then take a dispatch for each branch. 0 is the default. Needs flash
                             attention (recurrent models aside) and n_gpu_layers = 0, or PYL_E_UNSUPPORTED. The engine adds up a branch's cells in the order
                             they lie, so it holds until a cell that was given back is taken again (pruning, score_n, swa_full = 0), and
                             with fewer than 512 cells in use, or one thread, or, where attention is this library's own (docs/adr/0012), at
                             most twice as many threads as attention heads: others share cells out by where they lie */
    uint32_t n_ubatch;    /* tokens the engine computes at once; 0 (default) for n_batch, at most n_batch, at least n_branches. A smaller one
                             takes less compute buffer: a dispatch is then computed in several parts. Rows that see each other must fit
                             it. PYL_E_UNSUPPORTED below n_batch when swa_full = 0 leaves a window's cells: parts let go of cells that
                             later ones can see */
    uint32_t n_rs_seq;    /* snapshots of recurrent state the engine keeps for each branch, 0 (default) to 64; models that cannot take a
                             part back keep none. A store never asks for one (a draft is a fork): more memory and nothing else. At most n_ubatch - 2 */
    uint32_t n_outputs;   /* rows of logits the compute buffer has room for; 0 (default) for n_branches, at least that, at most n_batch.
                             A store never asks for more than n_branches */
    int32_t kv_unified;   /* 1 (default). 0: each branch has cells of its own, n_ctx / n_branches, which cannot be shared: pyl_dry_run takes
                             it, pyl_store_open is PYL_E_UNSUPPORTED */
    int32_t offload_kqv;  /* 1 (default): cells lie on the device of their layer, 0: in host memory */
    int32_t op_offload;   /* 1 (default): an accelerator may compute with weights that lie in host memory, 0: never */
} pyl_store_params;

/* Fills in the defaults. Thread: any. */
PYL_API void pyl_store_params_init(pyl_store_params * params, uint32_t struct_size);

/* Opens a store: allocates the KV cache and the compute buffers.
 *   out  Owned (pyl_store_free).
 * Errors: PYL_E_INVALID, PYL_E_UNSUPPORTED (no decoder, vocab_only), PYL_E_OUT_OF_MEMORY, PYL_E_FORMAT (the engine's words).
 * Thread: any. */
PYL_API int32_t pyl_store_open(pyl_store ** out, const pyl_model * model, const pyl_store_params * params);

/* Cancels a call in flight on another thread, waits for it to return, releases every branch and the memory. Thread: any. */
PYL_API int32_t pyl_store_free(pyl_store * store);

/* The same teardown while the handle stays valid: afterwards every call but pyl_store_free is PYL_E_CLOSED. Calling it
 * again is fine. Thread: any. */
PYL_API int32_t pyl_store_drain(pyl_store * store);

/* Asks the call that is running in this store to stop at its next dispatch boundary: it then fails with PYL_E_CANCELLED.
 * With no call running there is nothing to stop and nothing happens later. Thread: any. */
PYL_API int32_t pyl_store_cancel(pyl_store * store);

typedef struct pyl_pressure {
    uint32_t struct_size;
    uint32_t n_ctx;            /* cells of the cache */
    uint32_t n_batch;
    uint32_t n_threads;
    uint32_t cells_used;       /* every cell counted once, however many branches share it */
    uint32_t cells_remaining;
    uint32_t leases_used;      /* live branches */
    uint32_t leases_remaining;
    int32_t flash_attn;        /* PYL_FLASH_ATTN_ON or _OFF, as opened */
    int32_t is_draining;       /* 1 while a drain waits for a call in flight */
    uint64_t n_dispatches;     /* decodes since the store was opened */
    uint64_t n_tokens_decoded; /* tokens in them */
    uint64_t n_tokens_sampled;
    double decode_s;           /* seconds inside the engine's decode */
    double sample_s;           /* seconds sampling */
    int32_t swa_full;          /* as opened; 1 for a model without a sliding window */
    int32_t deterministic;     /* as opened */
    uint32_t n_ubatch;         /* tokens the engine computes at once */
} pyl_pressure;

/* Live numbers, consistent at the last dispatch boundary even while another thread is inside the store: this is also how
 * progress is polled. Thread: any. */
PYL_API int32_t pyl_store_pressure(const pyl_store * store, pyl_pressure * out);

/* What the engine has allocated for a store, as JSON, in bytes, by its own account:
 *   n_ctx, n_ctx_seq (cells a branch can have), n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs, flash_attn and kv_unified (booleans)
 *   model_bytes, context_bytes, compute_bytes   sums over the rows
 *   kv_bytes, recurrent_bytes                   the parts of context_bytes: cells; and state that is the same for any n_ctx
 *   output_bytes                                the buffer logits are given in; host memory, in none of the rows
 *   caches  [{name, cells, streams, bytes}]     the attention caches that kv_bytes is the sum of
 *   rows    [{device, buffer, is_host, model_bytes, context_bytes, compute_bytes}]   a row for each type of buffer
 * A mapped model's bytes are those of the mapping. Not in it: the vocabulary, descriptions of graphs (some 20 MB), and the engine's
 * books of cells (48 bytes a cell and cache). Owned (pyl_text_free). Thread: store. */
PYL_API int32_t pyl_store_memory(pyl_store * store, pyl_text ** out);

/* What pyl_store_memory would say if this model were opened and this store on it, without either: the engine lays everything out and
 * allocates none of it. The file's header and vocabulary are read, no tensor data; nothing is shared or kept.
 *   path, model_params  as for pyl_model_open; weights count as not mapped, whatever use_mmap says.
 *   store_params        as for pyl_store_open; NULL for the defaults. n_threads is not looked at.
 *   out                 the JSON above, and refusal: null, or why pyl_store_open would refuse these params although the engine could
 *                       be made to take them (kv_unified = 0, attention that is not causal, ...).
 * Errors: as pyl_model_open and pyl_store_open have them; PYL_E_OUT_OF_MEMORY with need and have in bytes when not even the engine's
 * books of n_ctx cells fit the memory that is free. Owned (pyl_text_free). Thread: any. */
PYL_API int32_t pyl_dry_run(pyl_text ** out, const char * path, size_t n_path, const pyl_model_params * model_params, const pyl_store_params * store_params);

/* ---------------------------------------------------------------------------------------------------- sampling params -- */

#define PYL_SEED_KEEP 0  /* keep the stream that is there (a new branch gets one from the operating system) */
#define PYL_SEED_SET 1   /* the stream of `seed`: a new one, or the one that is there, as far as it has come, when it has that seed already */
#define PYL_SEED_RESTART 2 /* the stream of `seed` from its beginning */

/* Tokens the model file says to suppress are never drawn. Order: grammar, bias, steering, penalties, top_k, typical_p, top_p, min_p, temperature, draw. temperature <= 0 takes the most likely token. */
typedef struct pyl_sampling {
    uint32_t struct_size;
    float temperature;       /* > 0 draws; <= 0 greedy */
    int32_t top_k;           /* <= 0 off */
    float top_p;             /* 1 off */
    float min_p;             /* 0 off */
    float typical_p;         /* 1 off */
    float penalty_repeat;    /* 1 off; > 0 */
    float penalty_frequency; /* 0 off; finite */
    float penalty_presence;  /* 0 off; finite */
    int32_t penalty_last_n;  /* tokens looked back at, 0..65536 */
    int32_t seed_mode;       /* PYL_SEED_* */
    uint64_t seed;
    int32_t ignore_eog;      /* 1: no token that ends a generation is ever drawn */
} pyl_sampling;

/* Fills in the defaults: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05, the rest off, PYL_SEED_KEEP. Thread: any. */
PYL_API void pyl_sampling_init(pyl_sampling * sampling, uint32_t struct_size);

/* Changes how a branch is sampled. Equal params are a no-op; a change of temperature or truncation keeps the random stream
 * and the penalty window. Errors: PYL_E_INVALID (NaN, out of range), PYL_E_STALE. Thread: store. */
PYL_API int32_t pyl_branch_set_sampling(pyl_store * store, pyl_branch branch, const pyl_sampling * sampling);

/* The params in force, with the seed really used (also when it came from the operating system). Thread: store. */
PYL_API int32_t pyl_branch_get_sampling(pyl_store * store, pyl_branch branch, pyl_sampling * out);

#define PYL_GRAMMAR_GBNF 0
#define PYL_GRAMMAR_CHAT 1

/* What a branch may say. */
typedef struct pyl_grammar {
    uint32_t struct_size;
    int32_t kind;          /* PYL_GRAMMAR_* */
    const char * text;     /* n_text bytes; none, or a conversation without a grammar: no constraint. GBNF: the rules. CHAT: the JSON
                              pyl_chat_render gave, or an object with its grammar, grammar_prefill (what the grammar has already seen: the
                              end of the prompt, which template grammars begin with), grammar_lazy and triggers */
    size_t n_text;
    const char * root;     /* GBNF: NUL-terminated name of the start rule; NULL for "root" */
    const char * triggers; /* GBNF: n_triggers bytes of JSON as in what pyl_chat_render gives: [{type (word|token|pattern|pattern_full), value,
                              token}]. The grammar then is lazy: it binds from the first trigger on, which belongs to it, and until then
                              anything goes. NULL: it binds from the next token on */
    size_t n_triggers;
} pyl_grammar;

/* Constrains a branch from its next token on; NULL lifts the constraint. Copied. Otherwise, the grammar in force stays: PYL_E_GRAMMAR, with line and
 * column, when it does not parse (or does not take what it is told to have seen), PYL_E_FORMAT (CHAT, triggers: not the JSON above),
 * PYL_E_STALE, PYL_E_POISONED. When a text can be read in more than 2,048 ways (need tells how many), whatever would draw or commit
 * next under the grammar is PYL_E_GRAMMAR, unchanged. Thread: store. */
PYL_API int32_t pyl_branch_set_grammar(pyl_store * store, pyl_branch branch, const pyl_grammar * grammar);

#define PYL_BIAS 0  /* part of the branch: forks carry it */
#define PYL_STEER 1 /* for this branch alone: forks do not carry it, fast_forward moves it */

/* Adds to the logits of some tokens whenever this branch is sampled, before penalties and truncation; -infinity bans a token.
 * Replaces what was set before for the same `kind`; n == 0 clears it. Copied.
 * Errors: PYL_E_INVALID with the index of a NaN, a +infinity or an id outside the vocabulary. Thread: store. */
PYL_API int32_t pyl_branch_set_bias(pyl_store * store, pyl_branch branch, int32_t kind, const int32_t * tokens, const float * bias, size_t n);

#define PYL_METRICS_NONE 0
#define PYL_METRICS_MODEL 1    /* the model's own distribution at temperature 1: one pass over the vocabulary for each token */
#define PYL_METRICS_SAMPLING 2 /* the distribution tokens are drawn from: one more run of the sampler for each token */

typedef struct pyl_metrics {
    uint32_t struct_size;
    int32_t levels;              /* PYL_METRICS_*, or their sum */
    uint64_t n_tokens;           /* tokens measured: those that commit_n and tick_n decoded while the branch had logits */
    double model_surprisal;      /* sum over them, nats; perplexity is exp(model_surprisal / n_tokens). A token whose logit was -infinity
                                    (set_logits) makes it +infinity */
    double model_entropy;        /* sum, nats */
    double last_model_surprisal; /* of the newest of them */
    double last_model_entropy;
    uint64_t n_inside;           /* those the sampler could have drawn; the sums below are over these */
    double sampling_surprisal;
    double sampling_entropy;
    double last_sampling_surprisal; /* +infinity when the newest could not have been drawn */
    double last_sampling_entropy;
} pyl_metrics;

/* Starts measuring how surprising the tokens of a branch are, at the levels given, from zero. Each token is measured against the
 * distribution it was chosen from. Forks carry the sums on. Errors: PYL_E_INVALID, PYL_E_STALE, PYL_E_POISONED. Thread: store. */
PYL_API int32_t pyl_branch_set_metrics(pyl_store * store, pyl_branch branch, int32_t levels);

/* The sums so far. Errors: PYL_E_STALE. Thread: store. */
PYL_API int32_t pyl_branch_get_metrics(pyl_store * store, pyl_branch branch, pyl_metrics * out);

/* ---------------------------------------------------------------------------------------------------------- branches -- */

/* Makes a new root: empty, no logits, its own lease.
 *   start_pos  first position it will decode at (0 for a fresh conversation); earlier cells are not charged to it.
 *   sampling   Copied; NULL for the defaults.
 *   grammar    Copied; NULL for none.
 * Errors: PYL_E_NO_LEASE, PYL_E_INVALID, and those of pyl_branch_set_grammar. All or nothing. Thread: store. */
PYL_API int32_t pyl_branch_create(pyl_store * store, pyl_branch * out, int32_t start_pos, const pyl_sampling * sampling, const pyl_grammar * grammar);

#define PYL_FORK_WITHOUT_LOGITS 1u /* the children begin without logits: for those that decode before they are sampled */

/* Forks `source` n times in O(n), without decoding or copying a cell. Each child shares the parent's cells and clones its
 * sampling (random stream and penalty window), grammar state and logits: without a seed of its own it continues exactly
 * as the parent would.
 *   out    n handles, all or none.
 *   seeds  n seeds, or NULL to keep the parent's stream in every child. Copied.
 *   flags  PYL_FORK_*, or 0.
 * Errors: PYL_E_NO_LEASE (need, have), PYL_E_STALE, PYL_E_POISONED, PYL_E_INVALID. Thread: store. */
PYL_API int32_t pyl_branch_fork_n(pyl_store * store, pyl_branch source, pyl_branch * out, size_t n, const uint64_t * seeds, uint32_t flags);

/* Prunes leaves: their own cells and leases are free again. A handle that is stale already is skipped. With any that has
 * children outside the list, PYL_E_HAS_CHILDREN with its index, and nothing is pruned. Thread: store. */
PYL_API int32_t pyl_branch_prune_n(pyl_store * store, const pyl_branch * branches, size_t n);

/* Prunes a branch with everything below it, whatever the depth. Stale: nothing to do. Never fails otherwise. Thread: store. */
PYL_API int32_t pyl_branch_prune_subtree(pyl_store * store, pyl_branch branch);

/* Keeps one branch and releases every other one (ancestors, siblings, its own descendants). The handle stays and becomes
 * a root that owns all its cells. Errors: PYL_E_STALE, PYL_E_POISONED. Thread: store. */
PYL_API int32_t pyl_branch_retain_only(pyl_store * store, pyl_branch branch);

/* Lets a branch take over where its child stands: the child's sequence, position, sampling, grammar, bias, steering and
 * logits become the parent's, which keeps its handle, its own parent and its other children; the child's children become its own. No
 * decode, no copy of a cell, one lease free again, cells_used unchanged. Also works on recurrent models, and repairs a
 * poisoned parent. Errors: PYL_E_DIVERGED (not a direct child, or the parent decoded since the fork), PYL_E_STALE,
 * PYL_E_POISONED (the child). Thread: store. */
PYL_API int32_t pyl_branch_fast_forward(pyl_store * store, pyl_branch parent, pyl_branch child);

/* Empties a leaf and decodes `tokens` on its own sequence from position 0: what to keep of a conversation that grew too long, say
 * its first tokens (attention sinks) and its tail. Sampling, grammar, bias and metrics stay as they are; the logits are those of the
 * last token. The old cells are given back first, so it also fits a full cache.
 *   n_landed  out, may be NULL: how many of the tokens are in the cache now, also after a failure.
 * Errors, unchanged: PYL_E_HAS_CHILDREN, PYL_E_CONTEXT, PYL_E_INVALID (no tokens, an id outside the vocabulary), PYL_E_STALE,
 * PYL_E_POISONED. Advanced, the old cells gone and n_landed tokens in: PYL_E_CANCELLED, PYL_E_NO_CELLS. Poisoned: PYL_E_DECODE.
 * Thread: store. */
PYL_API int32_t pyl_branch_reseed_kv(pyl_store * store, pyl_branch branch, const int32_t * tokens, size_t n_tokens, uint32_t * n_landed);

typedef struct pyl_branch_info {
    uint32_t struct_size;
    int32_t position;         /* where its next token goes */
    uint32_t cells_own;       /* cells decoded by this branch */
    uint32_t cells_inherited; /* cells before its fork point, owned by ancestors */
    pyl_branch parent;        /* 0 for a root */
    uint32_t n_children;
    int32_t has_logits;
    int32_t is_poisoned;
    int32_t last_token;       /* the last token decoded through commit or tick, -1 for none */
    int32_t has_grammar;
    uint64_t n_sampled;       /* draws since the seed was set */
    int32_t slack;            /* cells it reads less the positions they stand at: pictures take more cells than positions */
    uint32_t reserved;        /* zero */
} pyl_branch_info;

/* Facts about a branch. Errors: PYL_E_STALE. Thread: store. */
PYL_API int32_t pyl_branch_describe(pyl_store * store, pyl_branch branch, pyl_branch_info * out);

/* The live branches, oldest first: *n is set to their number; PYL_E_INVALID with need and have when capacity is short.
 * children_of 0 lists all, otherwise only that branch's children. Thread: store. */
PYL_API int32_t pyl_branch_list(pyl_store * store, pyl_branch children_of, pyl_branch * out, size_t capacity, size_t * n);

/* ---------------------------------------------------------------------------------------------------------- decoding -- */

typedef struct pyl_run {
    uint32_t struct_size;
    uint32_t n_tokens;
    pyl_branch branch;
    const int32_t * tokens; /* Copied as they are dispatched */
    uint32_t n_landed;      /* out: tokens of this run now in the cache, also after a failure */
    int32_t state;          /* out: PYL_STATE_* of this branch after a failure */
} pyl_run;

/* Decodes many tokens of many branches, packed into as few dispatches as n_batch allows. Logits are kept for the last token
 * of each finished run. Sampler and grammar are not fed. Runs without tokens are skipped; a branch may stand only once.
 *   max_dispatches  stop after this many with PYL_OK and the rest unlanded (n_landed tells); 0 for no limit.
 *   n_dispatches    out, may be NULL.
 * Errors: PYL_E_CONTEXT before anything runs when the tokens of all runs exceed the cells left; PYL_E_INVALID, PYL_E_STALE,
 * PYL_E_POISONED with the run's index, unchanged; PYL_E_CANCELLED, advanced: whole dispatches landed, the unfinished runs
 * can go on later; PYL_E_NO_CELLS and PYL_E_DECODE: per run in `state`. Thread: store. */
PYL_API int32_t pyl_prefill_n(pyl_store * store, pyl_run * runs, size_t n_runs, uint32_t max_dispatches, uint32_t * n_dispatches);

/* Draws one token for each branch; none is decoded. Only the random streams advance.
 * Errors: PYL_E_NO_LOGITS, PYL_E_ILLEGAL with the branch's index: then no stream has advanced. Thread: store. */
PYL_API int32_t pyl_sample_n(pyl_store * store, const pyl_branch * branches, size_t n, int32_t * tokens);

/* Decodes one token for each branch in exactly one dispatch, and feeds it to that branch's grammar and penalty window.
 * In a deterministic store it takes a dispatch for each branch, in the order given.
 * Errors: PYL_E_CONTEXT, PYL_E_GRAMMAR (not legal; its index), PYL_E_INVALID (a branch twice, more than n_batch, an id outside
 * the vocabulary), PYL_E_STALE, PYL_E_POISONED: unchanged. PYL_E_NO_CELLS: unchanged. PYL_E_DECODE: these branches are
 * poisoned. In a deterministic store these two tell the index of the branch they struck: those before it have landed, those after
 * were not tried. Thread: store. */
PYL_API int32_t pyl_commit_n(pyl_store * store, const pyl_branch * branches, const int32_t * tokens, size_t n);

#define PYL_FINISH_NONE 0   /* can go on */
#define PYL_FINISH_EOG 1    /* drew an end-of-generation token: not decoded, not counted in n_tokens */
#define PYL_FINISH_STOP 2   /* drew one of the stop tokens: not decoded, not counted */
#define PYL_FINISH_LENGTH 3 /* reached its max_tokens */
#define PYL_FINISH_ILLEGAL 4 /* grammar and bias left nothing to draw */

typedef struct pyl_lane {
    uint32_t struct_size;
    int32_t finish;      /* out: PYL_FINISH_* */
    pyl_branch branch;
    uint32_t max_tokens; /* most tokens to take in this call; 0 for n_steps */
    uint32_t n_tokens;   /* out: tokens taken and decoded */
    int32_t final_token; /* out: the undecoded token that ended it (EOG, STOP), -1 otherwise */
    int32_t state;       /* out: PYL_STATE_* of this branch after a failure */
} pyl_lane;

typedef struct pyl_tick {
    uint32_t struct_size;
    uint32_t n_steps;             /* most ticks to run without returning; 0 counts as 1 */
    const int32_t * stop_tokens;  /* Copied; may be NULL */
    size_t n_stop_tokens;
    uint32_t n_ticks;             /* out: ticks run, each at most one dispatch */
    uint32_t n_dispatches;        /* out */
    int32_t out_of_cells;         /* out: 1 when it returned early because the next tick no longer fits */
    uint32_t max_run_tokens;      /* most tokens of runs in one dispatch; 0 for as many as fit n_batch */
    pyl_run * runs;               /* prompts of other branches, read in the ticks' dispatches; NULL for none */
    size_t n_runs;
} pyl_tick;

/* The inner loop: sample each branch, set aside those that end, decode the others in one dispatch, feed their grammars and
 * penalty windows; repeated up to n_steps times while any lane can go on.
 *   tokens  n_lanes rows of n_steps ids; row i holds lanes[i].n_tokens of them.
 * Each dispatch is filled up with tokens of the runs, in their order, as pyl_prefill_n would decode them: reading goes on without a dispatch of its own while
 * others speak. What is left when the lanes are done stays unread (n_landed tells). Not with deterministic = 1.
 * Errors before anything runs, unchanged: PYL_E_CONTEXT when even the first tick and the runs do not fit, PYL_E_NO_LOGITS, PYL_E_STALE,
 * PYL_E_POISONED, PYL_E_INVALID, PYL_E_UNSUPPORTED; an index counts the lanes, then the runs. After a later tick failed or was cancelled the outputs are filled in, the code says why and
 * lanes[i].state what became of each. Thread: store. */
PYL_API int32_t pyl_tick_n(pyl_store * store, pyl_tick * tick, pyl_lane * lanes, size_t n_lanes, int32_t * tokens);

typedef struct pyl_logits_view {
    uint32_t struct_size;
    uint32_t n_vocab;
    const float * data; /* n_vocab floats, Borrowed until the branch or the store decodes, forks or is pruned */
    uint64_t epoch;     /* changes with everything that can invalidate the view: compare with pyl_store_epoch */
} pyl_logits_view;

/* A look at the logits of a branch without a copy. Errors: PYL_E_NO_LOGITS, PYL_E_STALE. Thread: store. */
PYL_API int32_t pyl_branch_logits(pyl_store * store, pyl_branch branch, pyl_logits_view * out);

/* Replaces the logits of a branch: n_vocab floats, Copied; -infinity bans a token. Position and cells stay.
 * Errors: PYL_E_INVALID (n is not the vocabulary's size, a NaN or +infinity). Thread: store. */
PYL_API int32_t pyl_branch_set_logits(pyl_store * store, pyl_branch branch, const float * logits, size_t n);

/* Adds alpha times the sum of the experts' logits to those of `branch`: contrast (alpha < 0), ensembles, guidance. Nothing is
 * decoded and no cache is touched. The branch may be its own expert. A token that is -infinity for the branch stays so; what an
 * expert bans is banned when alpha > 0 and keeps its logit otherwise, so no infinity or NaN comes of it. Errors: PYL_E_NO_LOGITS with the expert's index, PYL_E_INVALID (alpha not finite), PYL_E_STALE,
 * PYL_E_POISONED: unchanged. Thread: store. */
PYL_API int32_t pyl_branch_merge_logits(pyl_store * store, pyl_branch branch, const pyl_branch * experts, size_t n, float alpha);

/* Whether each token may come next under the branch's grammar and bias (1) or not (0). Neither changes.
 *   legal  n bytes. Errors: PYL_E_INVALID with the index of an id outside the vocabulary. Thread: store. */
PYL_API int32_t pyl_branch_legal_n(pyl_store * store, pyl_branch branch, const int32_t * tokens, size_t n, uint8_t * legal);

typedef struct pyl_distribution {
    uint32_t struct_size;
    int32_t most_likely;  /* token */
    double entropy;       /* nats, of the model's distribution at temperature 1 */
    double log_sum;       /* natural log of the sum of exponentials: surprisal of token t is log_sum - logit[t] */
    double max_logit;
} pyl_distribution;

/* How sure the model is of the next token, from the branch's logits alone (no bias, no grammar). Cost: one pass over the
 * vocabulary. Errors: PYL_E_NO_LOGITS, PYL_E_ILLEGAL when every logit is -infinity. Thread: store. */
PYL_API int32_t pyl_branch_distribution(pyl_store * store, pyl_branch branch, pyl_distribution * out);

/* The logits of some tokens. Errors: PYL_E_NO_LOGITS, PYL_E_INVALID with the index of an id outside the vocabulary. Thread: store. */
PYL_API int32_t pyl_branch_logits_at(pyl_store * store, pyl_branch branch, const int32_t * tokens, size_t n, float * logits);

/* The most likely tokens among those that grammar, bias and steering allow, most likely first, with the natural logs of their
 * probabilities (temperature 1, no penalties; they sum to 1 over all tokens allowed). Nothing changes.
 *   capacity  most to give.
 *   n         out: how many were given.
 *   n_legal   out, may be NULL: how many tokens are allowed.
 * Errors: PYL_E_NO_LOGITS, PYL_E_ILLEGAL when nothing is allowed. Thread: store. */
PYL_API int32_t pyl_branch_priors(pyl_store * store, pyl_branch branch, int32_t * tokens, float * log_probs, size_t capacity, size_t * n, size_t * n_legal);

/* The store's epoch now; a view whose epoch differs must not be read any more. 0 for a store that is closed. Thread: any. */
PYL_API uint64_t pyl_store_epoch(const pyl_store * store);

/* The logits after each of many prompts, all continuing `source` (0 for an empty start): as many at a time as leases and cells allow,
 * through forks that are pruned again. The store is the same afterwards, whether it succeeded or not.
 *   tokens   all prompts, one after another; lengths[i] tokens belong to prompt i.
 *   ids      tokens whose logits are wanted; n_ids == 0 for the whole vocabulary.
 *   out      n_prompts rows of n_ids (or n_vocab) floats; rows before a failure's index may have been written.
 * Errors: PYL_E_CONTEXT (index of a prompt that does not fit the cells left), PYL_E_NO_LEASE, PYL_E_INVALID (index of an empty prompt
 * without a source, an id outside the vocabulary), PYL_E_CANCELLED, PYL_E_DECODE: the branches of the store are unchanged. Thread: store. */
PYL_API int32_t pyl_score_n(pyl_store * store, pyl_branch source, const int32_t * tokens, const uint32_t * lengths, size_t n_prompts, const int32_t * ids, size_t n_ids, float * out);

/* ------------------------------------------------------------------------------------------------------ saved branches -- */

#define PYL_SAVE_LOGITS 1u /* the logits too, so that the branch can be sampled as soon as it is loaded */

/* A branch as bytes: its cells, position, sampling with random stream and penalty window, grammar with what it has seen, bias, steering
 * and metrics. The bytes begin with what they need to be loaded again: engine commit, model fingerprint, KV types, flash attention.
 * Cost: the bytes of its cells, copied once. Owned (pyl_text_free).
 * Errors: PYL_E_STALE, PYL_E_POISONED, PYL_E_OUT_OF_MEMORY, PYL_E_UNSUPPORTED (this memory cannot be saved). Thread: store. */
PYL_API int32_t pyl_branch_save(pyl_store * store, pyl_branch branch, uint32_t flags, pyl_text ** out);

/* Makes a new root of a saved branch: it continues token for token, in a library built the same way bit for bit if its cells lay in the order of its
 * tokens (after pruning, and with swa_full = 0, they may not, and last bits may differ). All or nothing. The bytes are checked against damage, not
 * against malice: load what you would also load as a model.
 * Errors: PYL_E_FORMAT (damaged, or not a saved branch), PYL_E_UNSUPPORTED (saved with another model, engine, KV type or flash
 * attention; the message names both sides; or so far on that in this store positions could get beyond 2^24), PYL_E_NO_LEASE,
 * PYL_E_CONTEXT (need and have in cells). Thread: store. */
PYL_API int32_t pyl_branch_load(pyl_store * store, pyl_branch * out, const uint8_t * data, size_t n_data);

/* What saved bytes hold, as JSON: format, bytes, engine, model {name, fingerprint, n_vocab}, kv {type_k, type_v, flash_attn}, position, cells,
 * has_logits, has_grammar, sampling {seed, n_sampled}. Reads the header only, and the checksum of all. Owned (pyl_text_free).
 * Errors: PYL_E_FORMAT. Thread: any. */
PYL_API int32_t pyl_saved_describe(const uint8_t * data, size_t n_data, pyl_text ** out);

/* ------------------------------------------------------------------------------------------------ pictures and sound -- */

typedef struct pyl_projector_params {
    uint32_t struct_size;
    uint32_t n_threads;        /* 0 for the cores this process may use */
    int32_t use_gpu;           /* 1: on an accelerator where there is one; 0 (default) */
    int32_t flash_attn;        /* PYL_FLASH_ATTN_* of the encoder */
    uint32_t image_min_tokens; /* bounds that encoders of dynamic resolution scale to; 0 for what the file says */
    uint32_t image_max_tokens; /* a picture that would take more rows all the same is refused when it is laid out, with need and have; the view of
                                  the whole that tiling projectors add is not counted */
    uint64_t cache_bytes;      /* most bytes of encoded rows to keep for pictures that come again; 0 (default) keeps none */
} pyl_projector_params;

/* Fills in the defaults. Thread: any. */
PYL_API void pyl_projector_params_init(pyl_projector_params * params, uint32_t struct_size);

/* Opens a projector file (GGUF, "mmproj") for a model. Its metadata are checked before anything is loaded.
 *   out   Owned (pyl_projector_free).
 *   path  Copied; n_path bytes of UTF-8. With a stub model: "stub:".
 * Errors: PYL_E_IO, PYL_E_FORMAT, PYL_E_PROJECTOR (made for another width; both numbers and where each comes from), PYL_E_UNSUPPORTED,
 * PYL_E_OUT_OF_MEMORY. Thread: any. */
PYL_API int32_t pyl_projector_open(pyl_projector ** out, const pyl_model * model, const char * path, size_t n_path, const pyl_projector_params * params);

/* What a projector would take, without opening it: the encoder is laid out, nothing is allocated, no tensor data is read.
 *   path, params   as for pyl_projector_open; no model is needed, and none is checked against.
 *   width, height  the picture's size in pixels as it reaches the encoder, which prepares pictures first; multiples of the patches it
 *                  merges. 0 and 0 for the size the engine itself measures with, which for encoders of dynamic resolution is
 *                  not the largest. Sound is measured with the engine's own length.
 *   n_frames       pictures encoded together: 1, or up to n_frames_merged of pyl_projector_info for the frames of a clip, which take more.
 *   out            JSON: weights_bytes, compute_bytes (the peak of the encoder's graph; of two encoders the sum, for their buffers are
 *                  there at the same time), encoders [{kind (vision|audio), width, height, compute_bytes}] (of sound: frames and bins),
 *                  rows [{device, weights_bytes, compute_bytes}]. Owned (pyl_text_free).
 * Errors: as pyl_projector_open; PYL_E_INVALID (a size or number of frames the encoder cannot take). Thread: any. */
PYL_API int32_t pyl_projector_dry_run(pyl_text ** out, const char * path, size_t n_path, const pyl_projector_params * params, uint32_t width, uint32_t height, uint32_t n_frames);

/* Gives the handle back; prompts made with it live on. Thread: any. */
PYL_API int32_t pyl_projector_free(pyl_projector * projector);

typedef struct pyl_projector_info {
    uint32_t struct_size;
    int32_t has_vision;
    int32_t has_audio;
    int32_t sample_rate;     /* of the sound it takes, in Hz; 0 when it takes none */
    int32_t n_embd;          /* floats in a row */
    int32_t is_mrope;        /* 1 when rows stand at (time, row, column) and take fewer positions than cells */
    int32_t is_non_causal;   /* 1 when a picture's rows see each other: they must fit one dispatch */
    int32_t n_frames_merged; /* frames of a clip that share one set of rows: 1 or 2 */
    uint64_t n_encodes;      /* encoder runs since it was opened; pictures of one shape share a run where the encoder can */
    uint64_t n_cache_hits;   /* rows that came from the cache instead */
    uint64_t cache_bytes;    /* rows in the cache now */
    double encode_s;         /* seconds in the encoder */
    uint64_t n_prepared;     /* pictures and sounds that were scaled and cut for the encoder; once for all stretches of one */
    uint64_t weights_bytes;  /* of the encoders' weights */
    uint64_t compute_bytes;  /* of their graphs' buffers now: 0 before the first encode, and they only grow */
} pyl_projector_info;

/* Facts about a projector. Thread: any. */
PYL_API int32_t pyl_projector_describe(const pyl_projector * projector, pyl_projector_info * out);

#define PYL_PART_TEXT 0
#define PYL_PART_TOKENS 1
#define PYL_PART_IMAGE 2
#define PYL_PART_AUDIO 3
#define PYL_PART_ROWS 4

typedef struct pyl_part {
    uint32_t struct_size;
    int32_t kind;           /* PYL_PART_* */
    const char * text;      /* TEXT: n bytes of UTF-8 */
    const int32_t * tokens; /* TOKENS: n of them. ROWS: n positions relative to where the part begins, or 4 * n in four sections (time, row,
                               column, 0) when height is 4, which M-RoPE models alone read; NULL for one after another. Other models
                               want all of 0..n_pos-1, and rows that share a position in one dispatch */
    const uint8_t * rgb;    /* IMAGE: width * height * 3 bytes; NULL for a placeholder that can be counted but not decoded */
    const float * samples;  /* AUDIO: n samples, mono, at the projector's rate; NULL for a placeholder. ROWS: n * n_embd_inp floats */
    size_t n;
    uint32_t flags;         /* TEXT: PYL_TOKENIZE_PARSE_SPECIAL */
    uint32_t width;         /* IMAGE: pixels. ROWS: floats in a row */
    uint32_t height;        /* IMAGE: pixels. ROWS: positions each row has, 1 or 4 */
    int32_t is_frame;       /* IMAGE: 1 for a frame of a clip, which may share rows with the frame beside it */
    int32_t n_pos;          /* ROWS: positions they take, 1..n */
    int32_t is_non_causal;  /* ROWS: 1 when they see each other; they must fit one dispatch */
    const char * id;        /* IMAGE, AUDIO: NUL-terminated name of the content for the cache of encoded rows; NULL: never cached */
} pyl_part;

/* Lays out text and media for decoding. Nothing is encoded and no store is involved: what it takes is known from here on.
 *   out        Owned (pyl_prompt_free). Keeps copies of all that the parts point to.
 *   projector  NULL when no part is an image or sound.
 *   flags      PYL_TOKENIZE_ADD_SPECIAL.
 * Special tokens are read only in TEXT parts that say so; the projector's own begin and end tokens are added around each medium.
 * Errors: PYL_E_INVALID with the part's index (empty media, wrong width, positions out of order), PYL_E_PROJECTOR (an image and no
 * projector that sees; sound and none that hears), PYL_E_MEDIA (it cannot be prepared), PYL_E_FORMAT (not UTF-8). Thread: any. */
PYL_API int32_t pyl_prompt_make(pyl_prompt ** out, const pyl_model * model, const pyl_projector * projector, const pyl_part * parts, size_t n_parts, uint32_t flags);

/* Frees a prompt. Thread: any. */
PYL_API int32_t pyl_prompt_free(pyl_prompt * prompt);

typedef struct pyl_quote {
    uint32_t struct_size;
    uint32_t n_segments;
    uint32_t n_cells;      /* what decoding it will be charged */
    uint32_t n_pos;        /* how far it will move a branch */
    uint32_t n_media;      /* stretches of rows */
    uint32_t max_rows;     /* rows of the longest stretch that has to fit one dispatch; 0 for none */
    int32_t is_decodable;  /* 0 when a part is a placeholder */
} pyl_quote;

/* What a prompt takes: exact, and what it will be charged. Thread: any. */
PYL_API int32_t pyl_prompt_quote(const pyl_prompt * prompt, pyl_quote * out);

/* Its stretches in order, as JSON [{kind (text|rows), n_cells, n_pos, part, n_parts, non_causal, tokens [ids] or positions [ints]}]: for looking at,
 * and for tests. Owned (pyl_text_free). Thread: any. */
PYL_API int32_t pyl_prompt_segments(const pyl_prompt * prompt, pyl_text ** out);

typedef struct pyl_item {
    uint32_t struct_size;
    int32_t code;                /* out: PYL_OK, or what failed */
    pyl_branch branch;
    const pyl_prompt * prompt;
    pyl_text * message;          /* out: NULL, or the words of the failure. Owned (pyl_text_free) */
    uint32_t n_segments_landed;  /* out */
    uint32_t n_cells_landed;     /* out */
    int32_t state;               /* out: PYL_STATE_* */
    int32_t engine_rc;           /* out */
} pyl_item;

/* Decodes prompts on branches, encoding media as they come: one after another, and one that fails does not stop the others. Sampler and grammar are not fed.
 * A picture lands whole or, if the engine fails within it, poisons its branch; what fails between two stretches leaves the branch at the
 * end of the last whole one (advanced). Logits are kept of each prompt's last row.
 * Errors before anything runs, unchanged: PYL_E_CONTEXT for all together, PYL_E_INVALID (a branch twice, placeholders, rows that see each
 * other or share positions and exceed n_batch, with need and have), PYL_E_PROJECTOR (a prompt of another model), PYL_E_STALE, PYL_E_POISONED. Afterwards the code is
 * that of the first item that failed, with its index. Thread: store. */
PYL_API int32_t pyl_decode_prompts_n(pyl_store * store, pyl_item * items, size_t n_items);

/* ---------------------------------------------------------------------------------------------------------- embeddings -- */

#define PYL_POOLING_MODEL 0 /* as the model file says */
#define PYL_POOLING_MEAN 1
#define PYL_POOLING_CLS 2
#define PYL_POOLING_LAST 3

typedef struct pyl_embedder_params {
    uint32_t struct_size;
    uint32_t n_ctx;     /* longest text in tokens, and tokens in one dispatch; 0 for the model's trained context, at most 512 */
    uint32_t n_threads; /* 0 for the cores this process may use */
    int32_t pooling;    /* PYL_POOLING_* */
    int32_t flash_attn; /* PYL_FLASH_ATTN_* */
} pyl_embedder_params;

/* Fills in the defaults. Thread: any. */
PYL_API void pyl_embedder_params_init(pyl_embedder_params * params, uint32_t struct_size);

/* Opens a context for embeddings, with a cache of its own that is empty before every dispatch.
 *   out  Owned (pyl_embedder_free).
 * Errors: PYL_E_UNSUPPORTED (the model names no pooling and PYL_POOLING_MODEL was asked for; it ranks; it needs an encoder and a
 * decoder), PYL_E_INVALID (n_ctx beyond the trained context), PYL_E_OUT_OF_MEMORY. Thread: any. */
PYL_API int32_t pyl_embedder_open(pyl_embedder ** out, const pyl_model * model, const pyl_embedder_params * params);

/* Waits for a call in flight, then frees. Thread: any. */
PYL_API int32_t pyl_embedder_free(pyl_embedder * embedder);

typedef struct pyl_embedder_info {
    uint32_t struct_size;
    int32_t n_embd;        /* floats in a vector */
    uint32_t n_ctx;        /* tokens in the longest text */
    int32_t pooling;       /* PYL_POOLING_*, never PYL_POOLING_MODEL */
    uint64_t n_dispatches; /* since it was opened */
    uint64_t n_texts;
    uint64_t n_tokens;
} pyl_embedder_info;

/* Facts about an embedder. Thread: any. */
PYL_API int32_t pyl_embedder_describe(const pyl_embedder * embedder, pyl_embedder_info * out);

/* One vector for each text, packed into as few dispatches as n_ctx allows.
 *   tokens      all texts, one after another; lengths[i] tokens belong to text i.
 *   normalize   1: each vector has length 1; 0: as the model gives it.
 *   out         n_texts rows of n_embd floats; untouched unless all succeeded.
 * Errors: PYL_E_INVALID (index of an empty text, or of one longer than n_ctx, with need and have; an id outside the vocabulary),
 * PYL_E_BUSY, PYL_E_DECODE (nothing is left behind: the cache is emptied before each dispatch). Thread: one call at a time. */
PYL_API int32_t pyl_embed_n(pyl_embedder * embedder, const int32_t * tokens, const uint32_t * lengths, size_t n_texts, int32_t normalize, float * out);

#ifdef __cplusplus
}
#endif

#endif /* PYLLOYAL_H */
