// The stub engine: no weights, exact bookkeeping. The logits of a row are a hash of the (position, token) cells its sequence
// can see, so "batched equals alone", "a fork equals a replay" and "pruning a sibling changes nothing" hold if and only if
// the kernel's books are right. It can be told to fail at a given decode, to test what is left behind.
//
//   stub:n_vocab=300;n_ctx_train=4096;fail_at=3;fail_rc=-2;fail_rows=1;spin_us=0
//
// Its projector sees a picture as blocks of 8 by 8 pixels, a row for each, and a sound as rows of 100 samples: with mrope=1 a
// picture stands at one time in rows and columns, with merge=2 two frames share their rows, with non_causal=1 rows see each other.
#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>

#include "core/bytes.hpp"
#include "core/error.hpp"
#include "core/json.hpp"
#include "core/prompt.hpp"
#include "core/store.hpp"
#include "engine/engine.hpp"

namespace pyl {
namespace {

constexpr Token bos = 256, eos = 257, eot = 258;
constexpr int64_t min_vocab = 260;
constexpr size_t n_embd = 4;

struct Options {
    int64_t n_vocab = 300;
    int64_t n_ctx_train = 4096;
    int64_t fail_at = 0;    // the n-th decode of a context fails; 0 never
    int64_t fail_rc = -2;
    int64_t fail_rows = 0;  // rows that land before it does
    int64_t spin_us = 0;    // time one decode takes
    int64_t mrope = 0, merge = 1, non_causal = 0;
    int64_t recurrent = 0;  // says that it is, and is not
    int64_t encode_fail_at = 0;  // the n-th encode of a projector fails
};

Options parse_options(std::string_view text) {
    Options options;
    const std::map<std::string_view, int64_t *> known{{"n_vocab", &options.n_vocab}, {"n_ctx_train", &options.n_ctx_train}, {"fail_at", &options.fail_at}, {"fail_rc", &options.fail_rc},
                                                      {"fail_rows", &options.fail_rows}, {"spin_us", &options.spin_us},
                                                      {"mrope", &options.mrope}, {"merge", &options.merge}, {"non_causal", &options.non_causal}, {"encode_fail_at", &options.encode_fail_at}, {"recurrent", &options.recurrent}};
    while (!text.empty()) {
        const std::string_view item = text.substr(0, text.find(';'));
        text.remove_prefix(std::min(text.size(), item.size() + 1));
        const size_t equals = item.find('=');
        const auto key = known.find(item.substr(0, equals));
        const std::string_view value = equals == std::string_view::npos ? std::string_view() : item.substr(equals + 1);
        const auto is_number = [&] {
            const auto [end, code] = std::from_chars(value.data(), value.data() + value.size(), *key->second);
            return code == std::errc() && end == value.data() + value.size();
        };
        if (key == known.end() || !is_number()) {
            throw Error(PYL_E_FORMAT, "the stub engine does not know the option '" + std::string(item) + "'");
        }
    }
    if (options.n_vocab < min_vocab || options.n_vocab > 1'000'000) throw Error(PYL_E_FORMAT, "the stub engine needs n_vocab in 260..1000000");
    return options;
}

constexpr const char * kv_unified_words = "kv_unified = 0: branches share cells";

uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDull;
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53ull;
    return x ^ (x >> 33);
}

// Its cells and rows are no engine's buffers: nothing to tell but the shape.
Memory stub_memory(const ContextParams & params) {
    Memory out;
    out.n_ctx = out.n_ctx_seq = params.n_ctx, out.n_batch = params.n_batch, out.n_ubatch = params.n_ubatch, out.n_seq_max = params.n_seq_max;
    out.n_outputs = params.n_outputs, out.flash_attn = params.flash_attn != PYL_FLASH_ATTN_OFF, out.kv_unified = params.kv_unified;
    return out;
}

class StubContext final : public Context {
public:
    StubContext(const Options & options, const ContextParams & params) : options_(options), params_(params), cells_(params.n_ctx) { live_counts().contexts++; }
    ~StubContext() override { live_counts().contexts--; }

    uint32_t n_ctx() const override { return params_.n_ctx; }
    int32_t flash_attn() const override { return params_.flash_attn == PYL_FLASH_ATTN_OFF ? PYL_FLASH_ATTN_OFF : PYL_FLASH_ATTN_ON; }
    Memory memory() const override { return stub_memory(params_); }

    int32_t decode(const Batch & batch) override {
        const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(options_.spin_us);
        n_decodes_++;
        const bool fails = options_.fail_at > 0 && n_decodes_ == options_.fail_at;
        if (fails && (options_.fail_rc == 1 || options_.fail_rc == -1)) return static_cast<int32_t>(options_.fail_rc);
        if (batch.size() == 0 || batch.size() > params_.n_batch) return -1;
        const auto free = static_cast<size_t>(std::count_if(cells_.begin(), cells_.end(), [](const Cell & c) { return c.seqs.empty(); }));
        if (free < batch.size()) return 1;
        std::vector<size_t> outputs;
        for (size_t i = 0; i < batch.size(); i++) {
            if (fails && static_cast<int64_t>(i) >= options_.fail_rows) return static_cast<int32_t>(options_.fail_rc);
            const auto cell = std::find_if(cells_.begin(), cells_.end(), [](const Cell & c) { return c.seqs.empty(); });
            *cell = {batch.token[i], batch.pos[i], {batch.seq[i]}};
            if (batch.output[i]) outputs.push_back(i);
        }
        if (fails) return static_cast<int32_t>(options_.fail_rc);
        rows_.assign(outputs.size() * static_cast<size_t>(options_.n_vocab), 0.0f);
        for (size_t row = 0; row < outputs.size(); row++) fill(row, batch.seq[outputs[row]], batch.pos[outputs[row]]);
        while (std::chrono::steady_clock::now() < until) {}
        return 0;
    }

    int32_t decode_rows(const RowBatch & batch) override {
        n_decodes_++;
        const bool fails = options_.fail_at > 0 && n_decodes_ == options_.fail_at;
        if (fails && (options_.fail_rc == 1 || options_.fail_rc == -1)) return static_cast<int32_t>(options_.fail_rc);
        if (batch.n == 0 || batch.n > params_.n_batch || batch.pos.size() != batch.n * (options_.mrope ? 4 : 1)) return -1;
        Pos last = -1;
        for (const Cell & cell : cells_) last = cell.has(batch.seq) ? std::max(last, cell.pos) : last;
        if (options_.mrope ? batch.pos[0] < last : batch.pos[0] != last + 1) return -1;  // as llama.cpp has it
        if (static_cast<size_t>(std::count_if(cells_.begin(), cells_.end(), [](const Cell & c) { return c.seqs.empty(); })) < batch.n) return 1;
        for (size_t i = 0; i < batch.n; i++) {
            if (fails && static_cast<int64_t>(i) >= options_.fail_rows) return static_cast<int32_t>(options_.fail_rc);
            uint64_t seen = checksum({reinterpret_cast<const char *>(batch.rows + i * n_embd), n_embd * sizeof(float)});
            for (size_t at = batch.n + i; at < batch.pos.size(); at += batch.n) seen = mix(seen ^ static_cast<uint32_t>(batch.pos[at]));  // row and column
            const auto cell = std::find_if(cells_.begin(), cells_.end(), [](const Cell & c) { return c.seqs.empty(); });
            *cell = {static_cast<Token>(mix(seen) >> 33 | 1u << 30), batch.pos[i], {batch.seq}};
        }
        if (fails) return static_cast<int32_t>(options_.fail_rc);
        if (!batch.wants_logits) return 0;
        rows_.assign(static_cast<size_t>(options_.n_vocab), 0.0f);
        fill(0, batch.seq, batch.pos[batch.n - 1]);
        return 0;
    }
    const float * logits(size_t i) const override { return rows_.data() + i * static_cast<size_t>(options_.n_vocab); }

    void seq_copy(Seq from, Seq to) override {
        for (Cell & cell : cells_) {
            if (cell.has(from) && !cell.has(to)) cell.seqs.push_back(to);
        }
    }
    void seq_remove(Seq seq) override {
        for (Cell & cell : cells_) std::erase(cell.seqs, seq);
    }
    void seq_keep(Seq seq) override {
        for (Cell & cell : cells_) cell.seqs = cell.has(seq) ? std::vector<Seq>{seq} : std::vector<Seq>{};
    }
    std::string seq_save(Seq seq) const override {
        ByteWriter out;
        for (const Cell & cell : cells_) {
            if (cell.has(seq)) out.put(cell.token), out.put(cell.pos);
        }
        return std::move(out.bytes());
    }
    void seq_load(Seq seq, std::string_view bytes) override {
        if (bytes.size() % 8 != 0) throw Error(PYL_E_FORMAT, "the stub engine's cells have eight bytes each");
        const auto free = static_cast<size_t>(std::count_if(cells_.begin(), cells_.end(), [](const Cell & c) { return c.seqs.empty(); }));
        if (bytes.size() / 8 > free) throw Error(PYL_E_NO_CELLS, "no room for the saved cells");
        ByteReader in(bytes);
        while (!in.is_done()) {
            const auto cell = std::find_if(cells_.begin(), cells_.end(), [](const Cell & c) { return c.seqs.empty(); });
            cell->token = in.get<Token>();
            cell->pos = in.get<Pos>();
            cell->seqs = {seq};
        }
    }

private:
    struct Cell {
        Token token = -1;
        Pos pos = -1;
        std::vector<Seq> seqs;
        bool has(Seq seq) const { return std::find(seqs.begin(), seqs.end(), seq) != seqs.end(); }
    };

    // Order-free over the visible cells, so only the set of (position, token) matters.
    void fill(size_t row, Seq seq, Pos pos) {
        uint64_t seen = 0;
        for (const Cell & cell : cells_) {
            if (cell.has(seq) && cell.pos <= pos) seen += mix(static_cast<uint64_t>(cell.pos) << 32 | static_cast<uint32_t>(cell.token) | 1ull << 63);
        }
        for (int64_t id = 0; id < options_.n_vocab; id++) {
            const uint64_t h = mix(seen ^ mix(static_cast<uint64_t>(id) + 0x9E3779B97F4A7C15ull));
            rows_[row * static_cast<size_t>(options_.n_vocab) + static_cast<size_t>(id)] = static_cast<float>(h >> 40) * (8.0f / 16777216.0f) - 4.0f;
        }
    }

    Options options_;
    ContextParams params_;
    std::vector<Cell> cells_;
    std::vector<float> rows_;
    int64_t n_decodes_ = 0;
};

class StubPrompt;

class StubProjector final : public Projector {
public:
    StubProjector(const Options & options, std::shared_ptr<const Model> model) : options_(options), model_(std::move(model)) {}

    pyl_projector_info info() const override {
        return {sizeof(pyl_projector_info), 1, 1, 16000, n_embd, options_.mrope != 0, options_.non_causal != 0, static_cast<int32_t>(options_.merge), n_encodes_, 0, 0, 0.0, n_encodes_, 0, 0};
    }
    const std::shared_ptr<const Model> & model() const override { return model_; }
    std::shared_ptr<Prompt> lay_out(std::shared_ptr<const Projector> self, std::vector<Part> parts) const override;
    void encode(std::span<const Part> parts, const Segment & segment, std::vector<float> & rows) const;

private:
    Options options_;
    std::shared_ptr<const Model> model_;
    mutable std::atomic<uint64_t> n_encodes_{0};
};

class StubPrompt final : public Prompt {
public:
    StubPrompt(std::shared_ptr<const StubProjector> projector, std::vector<Segment> segments, std::vector<Part> parts)
        : Prompt(projector->model(), std::move(segments), true), projector_(std::move(projector)), parts_(std::move(parts)) {}
    void with_rows(size_t segment, const std::function<void(const float *)> & use) const override {
        std::vector<float> rows;
        projector_->encode(parts_, segments()[segment], rows);
        use(rows.data());
    }

private:
    std::shared_ptr<const StubProjector> projector_;
    std::vector<Part> parts_;
};

std::shared_ptr<Prompt> StubProjector::lay_out(std::shared_ptr<const Projector> self, std::vector<Part> parts) const {
    std::vector<Segment> segments;
    for (size_t i = 0; i < parts.size(); i++) {
        const Part & part = parts[i];
        Segment s;
        s.part = static_cast<uint32_t>(i);
        if (part.kind == PYL_PART_TEXT) {
            s.tokens = model_->tokenize(part.text, part.flags);
            if (!s.tokens.empty()) segments.push_back(std::move(s));
            continue;
        }
        const uint32_t nx = part.kind == PYL_PART_IMAGE ? (part.width + 7) / 8 : static_cast<uint32_t>((part.n + 99) / 100), ny = part.kind == PYL_PART_IMAGE ? (part.height + 7) / 8 : 1;
        const bool grid = options_.mrope && part.kind == PYL_PART_IMAGE;
        s.n_rows = nx * ny;
        s.n_pos = static_cast<int32_t>(grid ? std::max(nx, ny) : s.n_rows);
        s.is_non_causal = s.is_whole = options_.non_causal && part.kind == PYL_PART_IMAGE;
        for (uint32_t section = 0; section < (options_.mrope ? 4u : 1u); section++) {
            for (uint32_t r = 0; r < s.n_rows; r++) s.places.push_back({static_cast<int32_t>(!grid ? r : section == 1 ? r / nx : section == 2 ? r % nx : 0), !grid || section < 3});
        }
        if (options_.merge == 2 && part.is_frame && i + 1 < parts.size() && parts[i + 1].is_frame && parts[i + 1].width == part.width && parts[i + 1].height == part.height) s.n_parts = 2, i++;
        segments.push_back(std::move(s));
    }
    return std::make_shared<StubPrompt>(std::static_pointer_cast<const StubProjector>(self), std::move(segments), std::move(parts));
}

void StubProjector::encode(std::span<const Part> parts, const Segment & segment, std::vector<float> & rows) const {
    if (++n_encodes_ == static_cast<uint64_t>(options_.encode_fail_at)) throw Error(PYL_E_MEDIA, "the stub projector was told to fail");
    rows.resize(segment.n_rows * n_embd);
    for (uint32_t r = 0; r < segment.n_rows; r++) {
        uint64_t seen = 0;
        for (uint32_t p = 0; p < segment.n_parts; p++) {
            const Part & part = parts[segment.part + p];
            const uint32_t nx = part.kind == PYL_PART_IMAGE ? (part.width + 7) / 8 : segment.n_rows;
            if (part.kind == PYL_PART_AUDIO) {
                for (size_t k = r * 100; k < std::min<size_t>(part.samples.size(), r * 100 + 100); k++) seen = mix(seen ^ static_cast<uint64_t>(part.samples[k] * 32768.0f));
            } else {
                for (uint32_t y = r / nx * 8; y < std::min(part.height, r / nx * 8 + 8); y++) {
                    for (uint32_t x = r % nx * 8; x < std::min(part.width, r % nx * 8 + 8); x++) {
                        for (size_t c = 0; c < 3; c++) seen = mix(seen ^ part.rgb[(static_cast<size_t>(y) * part.width + x) * 3 + c]);
                    }
                }
            }
            seen = mix(seen + p + 1);
        }
        for (size_t k = 0; k < n_embd; k++) rows[r * n_embd + k] = static_cast<float>(mix(seen + k) >> 40) * (1.0f / 16777216.0f);
    }
}

// Vectors that are a hash of a text's tokens and places: another packing of texts must not change them.
class StubEmbedder final : public EmbedContext {
public:
    StubEmbedder(const Options & options, int32_t pooling) : options_(options), pooling_(pooling == PYL_POOLING_MODEL ? PYL_POOLING_MEAN : pooling) { live_counts().contexts++; }
    ~StubEmbedder() override { live_counts().contexts--; }
    int32_t n_embd() const override { return 8; }
    uint32_t n_seq_max() const override { return 4; }
    int32_t pooling() const override { return pooling_; }
    int32_t embed(const Batch & batch) override {
        if (++n_decodes_ == options_.fail_at) return static_cast<int32_t>(options_.fail_rc);
        std::vector<uint64_t> seen(n_seq_max());
        for (size_t i = 0; i < batch.size(); i++) seen[static_cast<size_t>(batch.seq[i])] += mix(static_cast<uint64_t>(batch.pos[i]) << 32 | static_cast<uint32_t>(batch.token[i]) | 1ull << 63);
        vectors_.clear();
        for (const uint64_t text : seen) {
            for (uint64_t k = 0; k < 8; k++) vectors_.push_back(static_cast<float>(mix(text ^ mix(k + static_cast<uint64_t>(pooling_) * 8)) >> 40) * (8.0f / 16777216.0f) - 4.0f);
        }
        return 0;
    }
    const float * vector(size_t i) const override { return vectors_.data() + i * 8; }

private:
    Options options_;
    int32_t pooling_;
    std::vector<float> vectors_;
    int64_t n_decodes_ = 0;
};

// Understands one form, root ::= "literal": enough to test what the kernel does with any grammar.
class StubGrammar final : public Grammar {
public:
    explicit StubGrammar(std::string literal, size_t at = 0) : literal_(std::move(literal)), at_(at) { live_counts().grammars++; }
    ~StubGrammar() override { live_counts().grammars--; }
    std::unique_ptr<Grammar> clone() const override { return std::make_unique<StubGrammar>(literal_, at_); }
    void filter(std::span<Candidate> candidates) override {
        for (Candidate & c : candidates) {
            const bool legal = at_ < literal_.size() ? c.id == static_cast<unsigned char>(literal_[at_]) : c.id == eos || c.id == eot;
            if (!legal) c.logit = -std::numeric_limits<float>::infinity();
        }
    }
    void accept(Token) override { at_ += at_ < literal_.size(); }

private:
    std::string literal_;
    size_t at_;
};

class StubModel final : public Model {
public:
    StubModel(const Options & options, bool vocab_only) : options_(options), vocab_only_(vocab_only) {
        live_counts().weights++;
        info_.struct_size = sizeof info_;
        info_.n_vocab = static_cast<int32_t>(options.n_vocab);
        info_.n_ctx_train = static_cast<int32_t>(options.n_ctx_train);
        info_.vocab_type = PYL_VOCAB_OTHER;
        info_.n_embd = info_.n_embd_inp = n_embd;
        info_.has_decoder = info_.add_bos = 1;
        info_.is_recurrent = options.recurrent != 0;
        info_.bos = bos, info_.eos = eos, info_.eot = eot, info_.sep = -1, info_.nl = '\n', info_.pad = -1;
    }
    ~StubModel() override { live_counts().weights--; }

    const pyl_model_info & info() const override { return info_; }
    std::string metadata() const override { return R"({"":"stub","general.architecture":"stub"})"; }

    std::vector<Token> tokenize(std::string_view text, uint32_t flags) const override {
        std::vector<Token> out;
        if (flags & PYL_TOKENIZE_ADD_SPECIAL) out.push_back(bos);
        while (!text.empty()) {
            Token token = static_cast<unsigned char>(text.front());
            size_t n = 1;
            for (const Token special : {bos, eos, eot}) {
                const std::string name = piece(special, true);
                if ((flags & PYL_TOKENIZE_PARSE_SPECIAL) && text.starts_with(name)) token = special, n = name.size();
            }
            out.push_back(token);
            text.remove_prefix(n);
        }
        return out;
    }
    std::string piece(Token token, bool special) const override {
        if (token < 256) return std::string(1, static_cast<char>(token));
        if (!special || token > eot) return "";
        return token == bos ? "<bos>" : token == eos ? "<eos>" : "<eot>";
    }
    uint32_t token_flags(Token token) const override {
        return token < 256 ? PYL_TOKEN_BYTE : token == bos ? PYL_TOKEN_CONTROL : token <= eot ? PYL_TOKEN_CONTROL | PYL_TOKEN_EOG : PYL_TOKEN_UNUSED;
    }
    std::unique_ptr<Grammar> grammar(const GrammarSource & source) const override {
        if (source.is_chat) throw Error(PYL_E_UNSUPPORTED, "the stub model has no chat template");
        if (source.is_lazy) throw Error(PYL_E_UNSUPPORTED, "the stub engine knows no lazy grammars");
        const std::string & gbnf = source.text;
        const std::string head = source.root + " ::= \"";
        if (!gbnf.starts_with(head) || gbnf.size() < head.size() + 1 || gbnf.back() != '"') throw Error(PYL_E_GRAMMAR, "line 1, column 1: the stub engine reads only: " + head + "literal\"");
        return std::make_unique<StubGrammar>(gbnf.substr(head.size(), gbnf.size() - head.size() - 1));
    }
    std::string chat_render(std::string_view) const override { throw Error(PYL_E_TEMPLATE, "the stub model has no chat template"); }
    std::unique_ptr<Context> open(const ContextParams & params) const override {
        need_weights();
        if (!params.kv_unified) throw Error(PYL_E_UNSUPPORTED, kv_unified_words);
        return std::make_unique<StubContext>(options_, params);
    }
    std::unique_ptr<EmbedContext> open_embedder(const EmbedderParams & params) const override {
        need_weights();
        return std::make_unique<StubEmbedder>(options_, params.pooling);
    }
    std::shared_ptr<Projector> open_projector(std::shared_ptr<const Model> self, const std::string & path, const ProjectorParams &) const override {
        if (path != "stub:") throw Error(PYL_E_PROJECTOR, "the stub model has the projector \"stub:\" and no other");
        return std::make_shared<StubProjector>(options_, std::move(self));
    }
    void need_weights() const {
        if (vocab_only_) throw Error(PYL_E_UNSUPPORTED, "the model was opened with vocab_only: it has no weights to run");
    }
    size_t n_sections() const override { return options_.mrope ? 4 : 1; }
    ModelIdentity identity() const override { return {"stub 1", "stub of " + std::to_string(options_.n_vocab), static_cast<uint64_t>(options_.n_vocab)}; }

private:
    Options options_;
    bool vocab_only_;
    pyl_model_info info_{};
};

}  // namespace

const Engine & stub_engine() {
    static const Engine engine{
        [] { return EngineInfo{"stub", "none", "none", "none", "none", {"stub"}, {}, {}}; },
        [] { return std::vector<Device>{}; },
        [](const std::string & path, const ModelParams & params) -> std::shared_ptr<Model> { return std::make_shared<StubModel>(parse_options(std::string_view(path).substr(5)), params.vocab_only); },
        [](std::string_view) -> std::string { throw Error(PYL_E_UNSUPPORTED, "this library was built without llama.cpp, which parses chat output"); },
        [](std::string_view) -> std::string { throw Error(PYL_E_UNSUPPORTED, "this library was built without llama.cpp, which makes grammars of schemas"); },
        [](const std::string & path, const ModelParams & params, const std::function<ContextParams(const pyl_model_info &)> & context) {
            const StubModel model(parse_options(std::string_view(path).substr(5)), params.vocab_only);
            model.need_weights();
            const ContextParams c = context(model.info());
            Memory out = stub_memory(c);
            if (!c.kv_unified) out.refusal = kv_unified_words;
            return out;
        },
        [](const std::string & path, const ProjectorParams &, const PictureShape &) {
            if (path != "stub:") throw Error(PYL_E_PROJECTOR, "the stub engine has the projector \"stub:\" and no other");
            return ProjectorMemory{};
        },
    };
    return engine;
}

}  // namespace pyl
