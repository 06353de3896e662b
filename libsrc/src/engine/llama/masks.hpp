// Which tokens may come next in each state of a grammar that has been asked about, shared by all branches that follow it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "engine/llama/words.hpp"

namespace pyl {

// How far a text under a grammar has been read: on its stacks and in the middle of which character. All that decides what may
// come next.
struct GrammarPlace {
    llama_grammar_stacks stacks;
    llama_partial_utf8 so_far{};
};

class Masks {
public:
    // Remembers no more than `most_bytes` of states that nobody has any more.
    Masks(const llama_grammar_rules & rules, std::shared_ptr<const Words> words, size_t most_bytes = 8u << 20) : rules_(rules), words_(std::move(words)), most_bytes_(most_bytes) {}

    class State {
    public:
        // The bits if they have been worked out.
        const uint64_t * known() const { return is_known_ ? bits_.data() : nullptr; }

    private:
        friend class Masks;
        std::mutex mutex_;
        std::atomic<bool> is_known_{false};
        std::atomic<size_t> n_asked_{0};
        std::vector<uint64_t> bits_;
    };

    // Safe from any thread, all of them. A state lives as long as somebody has it.
    std::shared_ptr<State> find(const GrammarPlace & place);
    const uint64_t * work_out(State & state, const GrammarPlace & place) const;
    // Some tokens; works the bits out when they have been asked about often enough for that to be less work.
    void filter(State & state, const GrammarPlace & place, std::span<Candidate> candidates) const;
    bool allows(const GrammarPlace & place, Token token) const;
    size_t bytes() const { return recent_bytes_ + older_bytes_; }

private:
    using Key = std::vector<uint64_t>;
    struct Hash {
        size_t operator()(const Key & key) const;
    };
    using Found = std::unordered_map<Key, std::shared_ptr<State>, Hash>;

    std::vector<llama_grammar_candidate> rejects(const GrammarPlace & place, std::vector<llama_grammar_candidate> words) const;
    void ask(const GrammarPlace & place, std::span<Candidate> candidates) const;
    std::vector<uint64_t> bits(const GrammarPlace & place) const;

    const llama_grammar_rules & rules_;
    std::shared_ptr<const Words> words_;
    const size_t most_bytes_;
    std::mutex mutex_;
    Found recent_, older_;  // what is in neither has not been asked about for a while, and is worked out again
    size_t recent_bytes_ = 0, older_bytes_ = 0;
};

}  // namespace pyl
