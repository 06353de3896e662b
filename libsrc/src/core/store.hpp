// A store: one KV cache and the tree of branches that lives in it. Knows cells, positions, leases and logits; knows neither
// the C ABI nor llama.cpp.
//
// Books kept here, exactly: a branch owns the cells it decoded and inherits those before its fork point; cells_used is the
// sum of what is owned, so a shared cell counts once; a vacant lease's sequence is empty in the cache.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/crew.hpp"
#include "core/error.hpp"
#include "core/history.hpp"
#include "core/prompt.hpp"
#include "core/sampler.hpp"
#include "engine/engine.hpp"

namespace pyl {

// No position can run over; and beyond 2^24 a float no longer tells neighbours apart, which is what rotary embeddings do.
constexpr Pos most_pos = 1 << 24;

// Logits of a branch: a row of the engine's last output, or a copy when the branch outlives it. Copies are shared by forks.
struct Logits {
    int32_t row = -1;
    std::shared_ptr<const std::vector<float>> copy;

    bool any() const { return row >= 0 || copy != nullptr; }
    void clear() { row = -1, copy.reset(); }
};

struct Branch {
    uint32_t generation = 0;
    bool is_live = false;
    bool is_poisoned = false;
    // A fork borrows the sequence of the branch it came from until one of the two goes on. Whoever lends has not changed since, and
    // does not borrow itself; the own sequence of one who borrows is empty.
    struct Seat {
        Seq seq = -1;
        uint32_t lender = 0;  // slot + 1; 0 for none
        uint32_t n_borrowers = 0;
    } seat;
    Pos position = 0;
    Pos start = 0;  // where its cells begin: position - start + slack = cells
    uint32_t cells_own = 0;
    uint32_t cells_inherited = 0;
    uint32_t cells_doubtful = 0;  // of the own ones: charged by the dispatch that poisoned it, landed or not
    uint32_t parent = 0;  // slot + 1; 0 for a root
    std::vector<uint32_t> children;
    uint64_t born = 0;
    Token last_token = -1;
    Logits logits;
    Sampler sampler;
    std::unique_ptr<Grammar> grammar;
    std::shared_ptr<const GrammarSource> grammar_source;  // to make it again when a saved branch is loaded
    History grammar_taken;  // what it was fed since
    Biases bias, steer;
    pyl_metrics metrics{sizeof(pyl_metrics), PYL_METRICS_NONE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
};

// One prompt on its way into one branch.
struct PromptItem {
    pyl_branch branch;
    std::shared_ptr<const Prompt> prompt;
    uint32_t n_segments_landed = 0, n_cells_landed = 0;
    std::optional<Error> error;
};

class Store {
public:
    // Logits to be looked at that are worth sharing out: about a millisecond. For less, a thread that the system takes off its core in
    // the middle costs more than it saves.
    static constexpr size_t worth_sharing = 1u << 21;

    Store(std::shared_ptr<const Model> model, const ContextParams & params);
    ~Store();

    // One call at a time: enters, or throws PYL_E_BUSY / PYL_E_CLOSED. Everything below but drain, cancel, pressure and epoch
    // is to be called inside one.
    class Call {
    public:
        explicit Call(Store & store);
        ~Call();
        Call(const Call &) = delete;
        Call & operator=(const Call &) = delete;

    private:
        Store & store_;
    };

    void drain() noexcept;
    void cancel();
    pyl_pressure pressure() const;
    uint64_t epoch() const { return is_drained_ ? 0 : epoch_.load(); }

    Memory memory() const;
    pyl_branch create(Pos start_pos, const SamplingParams & sampling, uint64_t seed, GrammarSource grammar = {});
    void fork(pyl_branch source, std::span<pyl_branch> out, const uint64_t * seeds, bool with_logits = true);
    void prune(std::span<const pyl_branch> branches);
    void prune_subtree(pyl_branch branch) noexcept;
    void retain_only(pyl_branch branch);
    void fast_forward(pyl_branch parent, pyl_branch child);
    void reseed_kv(pyl_branch branch, std::span<const Token> tokens, uint32_t & n_landed);
    std::string save(pyl_branch branch, bool with_logits);
    pyl_branch load(std::string_view bytes);

    Branch & get(pyl_branch branch, size_t index = SIZE_MAX);         // live, or PYL_E_STALE
    Branch & get_healthy(pyl_branch branch, size_t index = SIZE_MAX);  // live and not poisoned
    pyl_branch handle_of(uint32_t parent_field) const;
    std::vector<pyl_branch> list(pyl_branch children_of);
    void set_grammar(pyl_branch branch, GrammarSource grammar);

    void set_metrics(pyl_branch branch, int32_t levels);
    void set_bias(pyl_branch branch, int32_t kind, std::span<const Token> tokens, const float * bias);

    const float * logits(const Branch & branch) const;  // or PYL_E_NO_LOGITS
    void set_logits(pyl_branch branch, std::span<const float> logits);
    void merge_logits(pyl_branch branch, std::span<const pyl_branch> experts, float alpha);
    void legal(pyl_branch branch, std::span<const Token> tokens, uint8_t * legal);
    pyl_distribution distribution(pyl_branch branch);
    void logits_at(pyl_branch branch, std::span<const Token> tokens, float * out);
    struct Priors {
        size_t n, n_legal;
    };
    Priors priors(pyl_branch branch, std::span<Token> tokens, float * log_probs);
    void score(pyl_branch source, std::span<const std::span<const Token>> prompts, std::span<const Token> ids, float * out);
    void prefill(std::span<pyl_run> runs, uint32_t max_dispatches, uint32_t & n_dispatches);
    // Refuses all of it, or tells of each item what became of it.
    void decode_prompts(std::span<PromptItem> items);
    void sample(std::span<const pyl_branch> branches, Token * tokens);
    void commit(std::span<const pyl_branch> branches, const Token * tokens);
    void tick(pyl_tick & tick, std::span<pyl_lane> lanes, Token * tokens);

    const Model & model() const { return *model_; }
    size_t n_vocab() const { return n_vocab_; }

private:
    template <typename Each>
    void for_borrowers(uint32_t slot, Each && each) {
        for (Branch & branch : slots_) {
            if (branch.is_live && branch.seat.lender == slot + 1) each(branch);
        }
    }
    uint32_t slot_of(const Branch & branch) const { return static_cast<uint32_t>(&branch - slots_.data()); }
    pyl_branch handle(uint32_t slot) const { return static_cast<pyl_branch>(slots_[slot].generation) << 32 | slot; }
    void need_leases(size_t n) const;
    void need_cells(size_t n) const;
    void need_distinct(std::span<const uint32_t> slots) const;
    void need_known(Token token, size_t index) const;
    void constrain(Branch & branch, GrammarSource source, std::span<const Token> taken = {});
    uint32_t take_slot();
    void release(uint32_t slot, bool clear_cache) noexcept;
    void unlink(uint32_t slot) noexcept;
    void save_rows(std::span<Branch * const> replaced);
    template <typename Decode>
    int32_t run(Decode && decode, size_t n_rows);
    void decode_rows(Branch & branch, const Segment & segment, const float * rows, bool landed_any);
    void decode_prompt(Branch & branch, PromptItem & item);
    // What one branch has in a dispatch; logits are wanted after its last token or not at all.
    struct Slice {
        Branch * branch;
        const Token * tokens;
        uint32_t n;
        bool finishes;
        pyl_run * run = nullptr;  // that it is a part of
    };
    int32_t dispatch(std::vector<Slice> & slices);
    void close_ranks(std::span<const Slice> slices);
    void take_own_sequence(Branch & branch);
    void part_from_borrowers(Branch & branch);
    void empty_sequence(Branch & branch, bool clear_cache) noexcept;
    Seq sequence_of(const Branch & branch) const { return branch.seat.lender ? slots_[branch.seat.lender - 1].seat.seq : branch.seat.seq; }
    void fill(std::vector<Slice> & slices, std::span<pyl_run * const> runs, size_t room);
    size_t need_readable(std::span<pyl_run> runs, std::vector<uint32_t> & slots);
    void land(std::span<Branch * const> branches, const Token * tokens, size_t & n_landed, std::span<pyl_run * const> runs = {}, size_t room = 0);
    void land_together(std::span<Branch * const> branches, const Token * tokens, std::span<pyl_run * const> runs = {}, size_t room = 0);
    Token draw(Branch & branch, const float * row, SamplerScratch & scratch);
    void draw_all(std::span<Branch * const> branches, Token * tokens);
    void measure(const Branch & branch, Token token, const float * row, pyl_metrics & metrics, SamplerScratch & scratch);
    void measure_all(std::span<Branch * const> branches, const Token * tokens);
    template <typename Each>
    void for_each_branch(std::span<Branch * const> branches, size_t cost, Each && each);
    void publish();
    // What this branch never draws.
    const Biases & banned(const Branch & branch) const { return branch.sampler.params().ignore_eog ? endless_ : suppressed_; }

    std::shared_ptr<const Model> model_;
    std::unique_ptr<Context> context_;
    ContextParams params_;
    size_t n_vocab_;
    Biases suppressed_;  // what the model file says must never be drawn
    Biases endless_;     // and what ends a generation
    std::vector<Branch> slots_;
    std::vector<uint32_t> free_slots_;
    std::vector<Seq> free_seqs_;
    uint32_t cells_used_ = 0;
    uint64_t born_ = 0;
    Batch batch_;
    std::vector<Slice> slices_;
    std::vector<Branch *> touched_;
    RowBatch row_batch_;
    std::unique_ptr<Crew> crew_;
    std::vector<SamplerScratch> scratch_;  // one for each of the crew
    std::vector<pyl_metrics> measured_;  // of the branches of a dispatch, were it to land

    std::atomic<bool> in_call_{false};
    std::atomic<bool> cancel_{false};
    std::atomic<bool> is_closed_{false};   // a drain has begun
    std::atomic<bool> is_drained_{false};  // and is over
    std::atomic<uint64_t> epoch_{1};
    mutable std::mutex published_mutex_;
    pyl_pressure published_{};
    pyl_pressure live_{};
};

// What a failed dispatch is called, and what became of the state.
Error decode_error(int32_t rc, bool partial);

template <typename Decode>
int32_t Store::run(Decode && decode, size_t n_rows) {
    const auto start = std::chrono::steady_clock::now();
    int32_t rc = -3;
    try {
        rc = decode();
    } catch (const std::exception &) {
        // Out of memory inside the engine: rows may have landed, as after any other failure of its own.
    }
    live_.decode_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    live_.n_dispatches++;
    if (rc == 0) live_.n_tokens_decoded += n_rows;
    return rc;
}

// Objects alive in this process, for leak tests.
struct LiveCounts {
    std::atomic<uint32_t> weights{0}, contexts{0}, branches{0}, grammars{0};
};
LiveCounts & live_counts();

}  // namespace pyl
