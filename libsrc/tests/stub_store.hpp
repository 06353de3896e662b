// What the tests of the store share: a stub model, short calls, and a snapshot of everything a refused call must leave alone.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/store.hpp"

namespace stub {

using namespace pyl;
using Tokens = std::vector<Token>;
using Row = std::vector<float>;
using Branches = std::vector<pyl_branch>;

inline std::shared_ptr<Model> model(const std::string & options = "n_vocab=300") { return stub_engine().open("stub:" + options, {}); }

inline ContextParams context(uint32_t n_ctx = 256, uint32_t n_batch = 64, uint32_t n_seq_max = 16) { return {n_ctx, n_batch, n_seq_max, 1, PYL_FLASH_ATTN_AUTO, PYL_KV_F16, PYL_KV_F16, true, false, n_batch, 0, n_seq_max}; }

inline SamplingParams greedy() {
    SamplingParams p;
    p.temperature = 0;
    return p;
}

// Different tokens for different `of`, all inside every stub vocabulary and none special.
inline Tokens text(size_t n, uint32_t of = 1) {
    Tokens out;
    uint32_t x = of * 2654435761u + 12345u;
    for (size_t i = 0; i < n; i++) out.push_back(static_cast<Token>((x = x * 1664525u + 1013904223u) >> 24));
    return out;
}

inline Tokens operator+(Tokens a, const Tokens & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// Numbers as they would be told after the call; entering and leaving a call is what publishes them.
inline pyl_pressure pressure(Store & store) {
    { const Store::Call call(store); }
    return store.pressure();
}

inline pyl_run run(pyl_branch branch, const Tokens & tokens) { return {sizeof(pyl_run), static_cast<uint32_t>(tokens.size()), branch, tokens.data(), 77, 77}; }

// Dispatches it took.
inline uint32_t prefill(Store & store, std::vector<pyl_run> & runs, uint32_t max_dispatches = 0) {
    uint32_t n = 0;
    store.prefill(runs, max_dispatches, n);
    return n;
}
inline uint32_t prefill(Store & store, pyl_branch branch, const Tokens & tokens) {
    std::vector<pyl_run> runs{run(branch, tokens)};
    return prefill(store, runs);
}
inline void commit(Store & store, const Branches & branches, const Tokens & tokens) { store.commit(branches, tokens.data()); }

inline Branches fork(Store & store, pyl_branch source, size_t n, const std::vector<uint64_t> & seeds = {}) {
    Branches out(n);
    store.fork(source, out, seeds.empty() ? nullptr : seeds.data());
    return out;
}

inline pyl_branch root(Store & store, const Tokens & tokens = {}, const SamplingParams & sampling = greedy(), uint64_t seed = 1) {
    const pyl_branch out = store.create(0, sampling, seed);
    if (!tokens.empty()) prefill(store, out, tokens);
    return out;
}

inline Row row(Store & store, pyl_branch branch) {
    const float * data = store.logits(store.get(branch));
    return Row(data, data + store.n_vocab());
}

inline bool same_bits(const Row & a, const Row & b) { return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0; }

// The logits after these tokens in a store where nothing else ever happened.
inline Row replay(const Tokens & tokens, Pos start_pos = 0, const std::string & options = "n_vocab=300") {
    Store store(model(options), context(static_cast<uint32_t>(tokens.size()), static_cast<uint32_t>(tokens.size()), 1));
    const pyl_branch branch = store.create(start_pos, greedy(), 1);
    prefill(store, branch, tokens);
    return row(store, branch);
}

struct Lanes {
    pyl_tick tick{};
    std::vector<pyl_lane> lanes;
    Tokens tokens;  // lanes.size() rows of n_steps
    Tokens stops;

    Tokens taken(size_t i) const {
        const auto from = tokens.begin() + static_cast<std::ptrdiff_t>(i * tick.n_steps);
        return Tokens(from, from + static_cast<std::ptrdiff_t>(lanes[i].n_tokens));
    }
};

// Outputs start as garbage, so that one that is not filled in shows.
inline Lanes lanes(const Branches & branches, uint32_t n_steps, const Tokens & stops = {}, const std::vector<uint32_t> & max_tokens = {}) {
    Lanes out;
    out.stops = stops;
    out.tick = {sizeof(pyl_tick), n_steps, nullptr, stops.size(), 77, 77, 77, 0, nullptr, 0};
    for (size_t i = 0; i < branches.size(); i++) out.lanes.push_back({sizeof(pyl_lane), 77, branches[i], max_tokens.empty() ? 0 : max_tokens[i], 77, 77, 77});
    out.tokens.assign(branches.size() * n_steps, -77);
    return out;
}
inline void run_tick(Store & store, Lanes & l) {
    l.tick.stop_tokens = l.stops.data();
    store.tick(l.tick, l.lanes, l.tokens.data());
}

struct Facts {
    pyl_branch handle, parent;
    Branches children;
    Pos position;
    uint32_t cells_own, cells_inherited;
    bool is_poisoned, has_grammar;
    Token last_token;
    uint64_t draws, seed;
    Tokens history;
    SamplingParams params;
    Tokens taken;
    pyl_metrics metrics;
    Row logits;  // empty for none
    bool operator==(const Facts & o) const;
};

inline bool same_metrics(const pyl_metrics & a, const pyl_metrics & b) { return std::memcmp(&a, &b, sizeof a) == 0; }

inline bool Facts::operator==(const Facts & o) const {
    const auto rest = [](const Facts & f) { return std::tie(f.handle, f.parent, f.children, f.position, f.cells_own, f.cells_inherited, f.is_poisoned, f.has_grammar, f.last_token, f.draws, f.seed, f.history, f.params, f.taken, f.logits); };
    return rest(*this) == rest(o) && same_metrics(metrics, o.metrics);
}

inline Facts facts(Store & store, pyl_branch handle) {
    const Branch & b = store.get(handle);
    Row logits = b.logits.any() ? row(store, handle) : Row();
    return {handle, store.handle_of(b.parent), store.list(handle), b.position, b.cells_own, b.cells_inherited, b.is_poisoned, b.grammar != nullptr, b.last_token,
            b.sampler.draws(), b.sampler.seed(), b.sampler.history(), b.sampler.params(), b.grammar_taken.tokens(), b.metrics, std::move(logits)};
}

// Everything a caller can see of a store but counters of work done.
struct Snapshot {
    std::vector<Facts> branches;
    uint32_t cells_used, cells_remaining, leases_used, leases_remaining;
    bool operator==(const Snapshot &) const = default;
};

inline Snapshot snapshot(Store & store) {
    Snapshot out{};
    for (const pyl_branch handle : store.list(0)) out.branches.push_back(facts(store, handle));
    const pyl_pressure p = pressure(store);
    out.cells_used = p.cells_used, out.cells_remaining = p.cells_remaining, out.leases_used = p.leases_used, out.leases_remaining = p.leases_remaining;
    return out;
}

// The stub engine with somebody looking over its shoulder: `around` is called with each call into the cache and makes it.
class Watched final : public Model {
public:
    using Around = std::function<void(const std::function<void()> & call)>;
    using Sees = std::function<void(const Batch & batch)>;  // what is about to be decoded
    Watched(std::shared_ptr<Model> model, Around around, Sees sees = [](const Batch &) {}) : model_(std::move(model)), around_(std::move(around)), sees_(std::move(sees)) {}

    const pyl_model_info & info() const override { return model_->info(); }
    std::string metadata() const override { return model_->metadata(); }
    Tokens tokenize(std::string_view text, uint32_t flags) const override { return model_->tokenize(text, flags); }
    std::string piece(Token token, bool special) const override { return model_->piece(token, special); }
    uint32_t token_flags(Token token) const override { return model_->token_flags(token); }
    std::unique_ptr<Grammar> grammar(const GrammarSource & source) const override { return model_->grammar(source); }
    std::string chat_render(std::string_view request) const override { return model_->chat_render(request); }
    size_t n_sections() const override { return model_->n_sections(); }
    ModelIdentity identity() const override { return model_->identity(); }
    std::unique_ptr<Context> open(const ContextParams & params) const override { return std::make_unique<Cache>(model_->open(params), around_, sees_); }
    std::shared_ptr<Projector> open_projector(std::shared_ptr<const Model> self, const std::string & path, const ProjectorParams & params) const override { return model_->open_projector(self, path, params); }
    std::unique_ptr<EmbedContext> open_embedder(const EmbedderParams & params) const override { return model_->open_embedder(params); }

private:
    class Cache final : public Context {
    public:
        Cache(std::unique_ptr<Context> context, Around around, Sees sees) : context_(std::move(context)), around_(std::move(around)), sees_(std::move(sees)) {}
        uint32_t n_ctx() const override { return context_->n_ctx(); }
        int32_t flash_attn() const override { return context_->flash_attn(); }
        Memory memory() const override { return context_->memory(); }
        const float * logits(size_t i) const override { return context_->logits(i); }
        int32_t decode(const Batch & batch) override {
            sees_(batch);
            int32_t rc = 0;
            watch([&] { rc = context_->decode(batch); });
            return rc;
        }
        int32_t decode_rows(const RowBatch & batch) override {
            int32_t rc = 0;
            watch([&] { rc = context_->decode_rows(batch); });
            return rc;
        }
        void seq_copy(Seq from, Seq to) override {
            watch([&] { context_->seq_copy(from, to); });
        }
        void seq_remove(Seq seq) override {
            watch([&] { context_->seq_remove(seq); });
        }
        void seq_keep(Seq seq) override {
            watch([&] { context_->seq_keep(seq); });
        }
        std::string seq_save(Seq seq) const override { return context_->seq_save(seq); }
        void seq_load(Seq seq, std::string_view bytes) override {
            watch([&] { context_->seq_load(seq, bytes); });
        }

    private:
        template <typename Call>
        void watch(Call && call) {
            around_(std::ref(call));  // by reference, so that watching itself allocates nothing
        }

        std::unique_ptr<Context> context_;
        Around around_;
        Sees sees_;
    };

    std::shared_ptr<Model> model_;
    Around around_;
    Sees sees_;
};

// A grammar the stub engine would not write: allows what it is told to.
class OnlyThese final : public Grammar {
public:
    explicit OnlyThese(Tokens legal) : legal_(std::move(legal)) {}
    std::unique_ptr<Grammar> clone() const override { return std::make_unique<OnlyThese>(legal_); }
    void filter(std::span<Candidate> candidates) override {
        for (Candidate & c : candidates) {
            if (std::find(legal_.begin(), legal_.end(), c.id) == legal_.end()) c.logit = -std::numeric_limits<float>::infinity();
        }
    }
    void accept(Token) override {}

private:
    Tokens legal_;
};

}  // namespace stub
