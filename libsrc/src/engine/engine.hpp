// The seam between the kernel and whatever computes: everything the kernel needs from an engine, and nothing more.
// Two engines stand behind it: llama (the only code that knows llama.cpp) and stub (whose logits are a hash of the cells a
// sequence can see, so that every bookkeeping mistake shows).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pylloyal.h"

namespace pyl {

using Token = int32_t;
using Pos = int32_t;
using Seq = int32_t;

struct Candidate {
    Token id;
    float logit;
    float p;
};

// Rows of one dispatch. Cleared and refilled, never reallocated in steady state.
struct Batch {
    std::vector<Token> token;
    std::vector<Pos> pos;
    std::vector<Seq> seq;
    std::vector<int8_t> output;

    size_t size() const { return token.size(); }
    void clear() { token.clear(), pos.clear(), seq.clear(), output.clear(); }
    void add(Token t, Pos p, Seq s, bool wants_logits) { token.push_back(t), pos.push_back(p), seq.push_back(s), output.push_back(wants_logits); }
};

// Rows of an encoder for one sequence, in one dispatch; the last one's logits are wanted or not.
struct RowBatch {
    const float * rows = nullptr;  // n * n_embd_inp
    size_t n = 0;
    std::vector<Pos> pos;  // n, or four sections of n
    Seq seq = -1;
    bool is_non_causal = false;
    bool wants_logits = false;
};

// The state of one grammar on one branch.
class Grammar {
public:
    virtual ~Grammar() = default;
    virtual std::unique_ptr<Grammar> clone() const = 0;
    // Sets the logit of every candidate that may not come next to -infinity.
    virtual void filter(std::span<Candidate> candidates) = 0;
    // Takes a token that filter() let through.
    virtual void accept(Token token) = 0;

    // Whether accept() would take a token.
    virtual bool allows(Token token) {
        Candidate one{token, 0.0f, 0.0f};
        filter({&one, 1});
        return one.logit == 0.0f;
    }
    // A bit for each token that filter() lets through, valid until the next accept(); null where it knows them only one by one.
    virtual const uint64_t * mask() { return nullptr; }
    // The same if nothing has to be worked out for it, else null.
    virtual const uint64_t * known_mask() { return nullptr; }
    // A lazy grammar before its trigger: filter() lets everything through, and still there may be tokens that allows() refuses, those
    // that would wake it with text it cannot take.
    virtual bool is_waiting() const { return false; }
};

// What a grammar is made from.
struct GrammarSource {
    bool is_chat = false;  // text is a rendered conversation, otherwise GBNF
    std::string text, root = "root";
    bool is_lazy = false;  // GBNF that binds from one of these triggers on, which are JSON
    std::string triggers{};

    bool is_empty() const { return text.empty(); }
};

struct ContextParams {
    uint32_t n_ctx, n_batch, n_seq_max, n_threads;
    int32_t flash_attn, type_k, type_v;
    bool swa_full;
    bool deterministic = false;  // the kernel's affair: one sequence a dispatch
    uint32_t n_ubatch = 0, n_rs_seq = 0, n_outputs = 0;
    bool kv_unified = true, offload_kqv = true, op_offload = true;
};

// What an engine has allocated, or would.
// Buffers of one type.
struct MemoryRow {
    std::string device, buffer;
    bool is_host = true;
    uint64_t model_bytes = 0, context_bytes = 0, compute_bytes = 0;
};

// One attention cache; a model may have several.
struct CacheRow {
    std::string name;
    uint64_t cells = 0, streams = 0, bytes = 0;
};

struct Memory {
    uint32_t n_ctx = 0, n_ctx_seq = 0, n_batch = 0, n_ubatch = 0, n_seq_max = 0, n_rs_seq = 0, n_outputs = 0;
    bool flash_attn = true, kv_unified = true;
    uint64_t recurrent_bytes = 0, output_bytes = 0;
    std::vector<CacheRow> caches;
    std::vector<MemoryRow> rows;
    std::optional<std::string> refusal;  // of a dry run: why a store would not be opened
};

struct EncoderRow {
    std::string kind;
    int32_t width = 0, height = 0;
    uint64_t compute_bytes = 0;
};
struct ProjectorRow {
    std::string device;
    uint64_t weights_bytes = 0, compute_bytes = 0;
};

// Pictures as the encoder gets them; 0 by 0 is the size it measures itself with.
struct PictureShape {
    uint32_t width = 0, height = 0, n_frames = 1;
};

struct ProjectorMemory {
    std::vector<EncoderRow> encoders;
    std::vector<ProjectorRow> rows;
};

// One KV cache. Sequences are 0..n_seq_max-1. Not thread-safe.
class Context {
public:
    virtual ~Context() = default;
    virtual uint32_t n_ctx() const = 0;
    virtual int32_t flash_attn() const = 0;
    virtual Memory memory() const = 0;
    // 0 ok; 1 no room and -1 invalid: undone, earlier logits still stand; 2 aborted and < -1 fatal: rows may have landed.
    virtual int32_t decode(const Batch & batch) = 0;
    virtual int32_t decode_rows(const RowBatch & batch) = 0;  // the same codes
    // Logits of the i-th row that asked for them in the last decode, valid until the next.
    virtual const float * logits(size_t i) const = 0;
    virtual void seq_copy(Seq from, Seq to) = 0;  // whole range, in a unified cache: no cell moves
    virtual void seq_remove(Seq seq) = 0;         // whole sequence: cannot fail
    virtual void seq_keep(Seq seq) = 0;
    // One sequence as bytes, and back into a sequence that is empty. Loading throws PYL_E_FORMAT for bytes it cannot take, and
    // PYL_E_NO_CELLS when there is no room; the sequence is empty then.
    virtual std::string seq_save(Seq seq) const = 0;
    virtual void seq_load(Seq seq, std::string_view bytes) = 0;
};

struct EmbedderParams {
    uint32_t n_ctx, n_threads;
    int32_t pooling, flash_attn;
};

// A context that gives one vector for each sequence of a dispatch. Not thread-safe.
class EmbedContext {
public:
    virtual ~EmbedContext() = default;
    virtual int32_t n_embd() const = 0;
    virtual uint32_t n_seq_max() const = 0;
    virtual int32_t pooling() const = 0;
    // Empties the cache and decodes whole texts, sequence i being the i-th; 0 ok, anything else failed.
    virtual int32_t embed(const Batch & batch) = 0;
    // The vector of sequence i, valid until the next dispatch.
    virtual const float * vector(size_t i) const = 0;
};

struct ModelParams {
    int32_t n_gpu_layers = 0;
    bool use_mmap = true;
    bool vocab_only = false;
    bool no_alloc = false;  // for a dry run: no weights, and nothing but the layout can be asked for
    auto operator<=>(const ModelParams &) const = default;
};

struct ProjectorParams {
    uint32_t n_threads = 1;
    bool use_gpu = false;
    int32_t flash_attn = PYL_FLASH_ATTN_AUTO;
    uint32_t image_min_tokens = 0, image_max_tokens = 0;
    uint64_t cache_bytes = 0;
};

class Model;
class Prompt;

// One part of a prompt, with memory of its own.
struct Part {
    int32_t kind = PYL_PART_TEXT;
    std::string text;
    std::vector<Token> tokens;
    std::vector<uint8_t> rgb;
    std::vector<float> samples;
    uint64_t n = 0;  // samples of a sound, also of a placeholder's
    uint32_t width = 0, height = 0, flags = 0;
    bool is_frame = false, is_non_causal = false;
    int32_t n_pos = 0;
    std::vector<Pos> positions;
    std::string id;

    bool is_media() const { return kind == PYL_PART_IMAGE || kind == PYL_PART_AUDIO; }
    bool is_placeholder() const { return kind == PYL_PART_IMAGE ? rgb.empty() : kind == PYL_PART_AUDIO && samples.empty(); }
};

// An encoder of pictures or sound. Thread-safe; one encode at a time.
class Projector {
public:
    virtual ~Projector() = default;
    virtual pyl_projector_info info() const = 0;
    virtual const std::shared_ptr<const Model> & model() const = 0;
    // TEXT, IMAGE and AUDIO parts to segments. `self` is kept by the prompt.
    virtual std::shared_ptr<Prompt> lay_out(std::shared_ptr<const Projector> self, std::vector<Part> parts) const = 0;
};

// What a saved branch has to agree with.
struct ModelIdentity {
    std::string engine;  // name and commit
    std::string name;
    uint64_t fingerprint;  // of the file
};

// Weights and vocabulary. Thread-safe; shared by every store that uses it.
class Model {
public:
    virtual ~Model() = default;
    virtual const pyl_model_info & info() const = 0;
    virtual std::string metadata() const = 0;  // JSON
    virtual std::vector<Token> tokenize(std::string_view text, uint32_t flags) const = 0;
    virtual std::string piece(Token token, bool special) const = 0;
    virtual uint32_t token_flags(Token token) const = 0;
    // Null when nothing is constrained: by a conversation to which no grammar belongs.
    virtual std::unique_ptr<Grammar> grammar(const GrammarSource & source) const = 0;
    // Positions each row of an encoder stands at: 1, or 4 where they are sections (time, row, column, one more).
    virtual size_t n_sections() const { return 1; }
    // Tokens the model file says must never be drawn.
    virtual std::vector<Token> suppressed() const { return {}; }
    virtual std::string chat_render(std::string_view request) const = 0;  // JSON to JSON
    virtual ModelIdentity identity() const = 0;
    virtual std::unique_ptr<Context> open(const ContextParams & params) const = 0;
    // `self` is this model, kept by the projector.
    virtual std::shared_ptr<Projector> open_projector(std::shared_ptr<const Model> self, const std::string & path, const ProjectorParams & params) const = 0;
    virtual std::unique_ptr<EmbedContext> open_embedder(const EmbedderParams & params) const = 0;
};

struct Device {
    std::string name, description, backend, kind;
    uint64_t total_bytes, free_bytes;
};

struct EngineInfo {
    std::string name, commit, cpu, threads, attention;
    std::vector<std::string> backends, cpu_features, cpu_missing;
};

// What an engine offers as a whole.
struct Engine {
    EngineInfo (*info)();
    std::vector<Device> (*devices)();
    std::shared_ptr<Model> (*open)(const std::string & path, const ModelParams & params);
    std::string (*chat_parse)(std::string_view request);
    std::string (*schema_to_gbnf)(std::string_view schema);
    // What opening a store would allocate; its params are asked for once the model is known.
    Memory (*dry_run)(const std::string & path, const ModelParams & params, const std::function<ContextParams(const pyl_model_info &)> & context);
    ProjectorMemory (*projector_dry_run)(const std::string & path, const ProjectorParams & params, const PictureShape & picture);
};

const Engine & stub_engine();
const Engine & llama_engine();  // only where the library was built with it

}  // namespace pyl
