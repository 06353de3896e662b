// How one branch draws its tokens. Ours rather than the engine's chain because its state must outlive its settings: the
// random stream is a counter and the penalty window a plain list, so both survive a change of temperature, a fork and a save.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "core/candidates.hpp"

namespace pyl {

struct SamplingParams {
    float temperature = 0.8f;
    int32_t top_k = 40;
    float top_p = 0.95f;
    float min_p = 0.05f;
    float typical_p = 1.0f;
    float penalty_repeat = 1.0f;
    float penalty_frequency = 0.0f;
    float penalty_presence = 0.0f;
    int32_t penalty_last_n = 64;
    bool ignore_eog = false;  // the store knows which tokens these are

    bool operator==(const SamplingParams &) const = default;
    // Throws PYL_E_INVALID naming the field that is out of range.
    void validate() const;
    bool has_penalties() const { return penalty_last_n > 0 && (penalty_repeat != 1.0f || penalty_frequency != 0.0f || penalty_presence != 0.0f); }
};

// What is added to the logits of some tokens; shared by forks, replaced as a whole.
using Biases = std::shared_ptr<const std::vector<std::pair<Token, float>>>;

// Working memory of sampling, shared by all branches of a store: no allocation in steady state.
struct SamplerScratch {
    std::vector<float> logits;
    std::vector<std::pair<Token, float>> changed;
    std::vector<Token> window;
    std::vector<float> maxima;
    std::vector<Candidate> candidates;
    std::vector<Candidate> room;
};

// In nats; surprisal is +infinity for a token that cannot come.
struct Measure {
    double surprisal, entropy;
};

class Sampler {
public:
    static constexpr size_t min_history = 1024;

    Sampler() = default;
    explicit Sampler(uint64_t seed) : seed_(seed) {}

    const SamplingParams & params() const { return params_; }
    void set_params(const SamplingParams & params) { params_ = params; }
    uint64_t seed() const { return seed_; }
    void reseed(uint64_t seed) { seed_ = seed, draws_ = 0; }
    uint64_t draws() const { return draws_; }
    void rewind(uint64_t draws) { draws_ = draws; }
    // As it was saved.
    void restore(uint64_t seed, uint64_t draws, std::vector<Token> history) { seed_ = seed, draws_ = draws, history_ = std::move(history); }

    // The next token for these logits, or -1 when grammar and logits leave nothing. Advances the stream by one unless greedy.
    Token sample(const float * logits, size_t n_vocab, Grammar * grammar, SamplerScratch & scratch, std::initializer_list<Biases> biases = {});
    // How surprising a token is under the distribution sample() draws from. Nothing advances.
    Measure measure(Token token, const float * logits, size_t n_vocab, Grammar * grammar, SamplerScratch & scratch, std::initializer_list<Biases> biases = {}) const;
    // Records a token that was really decoded; cannot fail after make_room().
    void accept(Token token);
    void make_room() {
        if (history_.size() == history_.capacity()) history_.reserve(2 * history_.size() + 16);
    }
    const std::vector<Token> & history() const { return history_; }

private:
    // Fills scratch.candidates with what may be drawn, most likely first, p being its weight; returns the sum of the weights,
    // 0 when there is nothing. Greedy leaves one.
    double shape(const float * logits, size_t n_vocab, Grammar * grammar, SamplerScratch & scratch, std::initializer_list<Biases> biases) const;
    Weighed weigh(const float * logits, size_t n_vocab, SamplerScratch & scratch, std::initializer_list<Biases> biases) const;
    double uniform();

    SamplingParams params_;
    uint64_t seed_ = 0;
    uint64_t draws_ = 0;
    std::vector<Token> history_;
};

// A seed from the operating system.
uint64_t random_seed();

}  // namespace pyl
