#include "core/sampler.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "core/error.hpp"

namespace pyl {

static constexpr float none = -std::numeric_limits<float>::infinity();

void SamplingParams::validate() const {
    const auto check = [](bool ok, const char * field, double value, const char * range) {
        if (!ok) throw Error(PYL_E_INVALID, std::string(field) + " is " + std::to_string(value) + "; it must be " + range);
    };
    check(std::isfinite(temperature), "temperature", temperature, "finite");
    check(top_p > 0 && top_p <= 1, "top_p", top_p, "in (0, 1]");
    check(min_p >= 0 && min_p <= 1, "min_p", min_p, "in [0, 1]");
    check(typical_p > 0 && typical_p <= 1, "typical_p", typical_p, "in (0, 1]");
    check(std::isfinite(penalty_repeat) && penalty_repeat > 0, "penalty_repeat", penalty_repeat, "finite and above 0");
    check(std::isfinite(penalty_frequency), "penalty_frequency", penalty_frequency, "finite");
    check(std::isfinite(penalty_presence), "penalty_presence", penalty_presence, "finite");
    check(penalty_last_n >= 0 && penalty_last_n <= 65536, "penalty_last_n", penalty_last_n, "in 0..65536");
}

// SplitMix64's finaliser: a bijection that spreads every bit.
static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// The stream is counter-based: draw n of a seed is a pure function of both, so state is two integers.
double Sampler::uniform() {
    const uint64_t bits = mix(mix(seed_ ^ 0x6A09E667F3BCC909ull) + ++draws_ * 0x9E3779B97F4A7C15ull);
    return static_cast<double>(bits >> 11) * 0x1p-53;
}

uint64_t random_seed() {
    std::random_device device;
    return static_cast<uint64_t>(device()) << 32 | device();
}

void Sampler::accept(Token token) {
    const size_t keep = std::max<size_t>(min_history, static_cast<size_t>(params_.penalty_last_n));
    if (history_.size() >= 2 * keep) history_.erase(history_.begin(), history_.end() - static_cast<std::ptrdiff_t>(keep));
    history_.push_back(token);
}

void Sampler::penalise(std::vector<float> & logits) const {
    const size_t n = std::min<size_t>(history_.size(), static_cast<size_t>(params_.penalty_last_n));
    std::vector<Token> window(history_.end() - static_cast<std::ptrdiff_t>(n), history_.end());
    std::sort(window.begin(), window.end());
    for (auto it = window.begin(); it != window.end();) {
        const auto end = std::upper_bound(it, window.end(), *it);
        if (float & logit = logits[static_cast<size_t>(*it)]; logit > none) {
            logit = logit <= 0 ? logit * params_.penalty_repeat : logit / params_.penalty_repeat;
            logit -= static_cast<float>(end - it) * params_.penalty_frequency + params_.penalty_presence;
        }
        it = end;
    }
}

static bool above(const Candidate & a, const Candidate & b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; }

// The k most likely candidates the grammar allows, most likely first. Looks at no more of the vocabulary than it must:
// candidates are asked about in descending order, in growing batches, which gives the same k as asking about all of them.
static void select(SamplerScratch & scratch, size_t k, Grammar * grammar) {
    auto & all = scratch.candidates;
    auto & trial = scratch.trial;
    for (size_t m = std::min(all.size(), grammar ? std::max<size_t>(2 * k, 64) : k);; m = std::min(all.size(), m * 8)) {
        if (m < all.size()) std::nth_element(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(m), all.end(), above);
        trial.assign(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(m));
        if (grammar) {
            grammar->filter(trial);
            std::erase_if(trial, [](const Candidate & c) { return !(c.logit > none); });
        }
        if (trial.size() >= k || m == all.size()) break;
    }
    if (trial.size() > k) {
        std::nth_element(trial.begin(), trial.begin() + static_cast<std::ptrdiff_t>(k), trial.end(), above);
        trial.resize(k);
    }
    std::sort(trial.begin(), trial.end(), above);
    all.swap(trial);
}

// Probabilities of sorted candidates at temperature 1; returns nothing, fills p.
static void softmax(std::vector<Candidate> & c) {
    double sum = 0;
    for (auto & x : c) sum += x.p = std::exp(x.logit - c.front().logit);
    for (auto & x : c) x.p = static_cast<float>(x.p / sum);
}

static void keep_typical(std::vector<Candidate> & c, float typical_p) {
    softmax(c);
    double entropy = 0;
    for (const auto & x : c) entropy -= x.p > 0 ? x.p * std::log(static_cast<double>(x.p)) : 0;
    const auto surprise = [&](const Candidate & x) { return std::abs(-std::log(static_cast<double>(x.p)) - entropy); };
    std::stable_sort(c.begin(), c.end(), [&](const Candidate & a, const Candidate & b) { return surprise(a) < surprise(b); });
    double sum = 0;
    size_t n = 0;
    while (n < c.size() && sum < typical_p) sum += c[n++].p;
    c.resize(n);
    std::sort(c.begin(), c.end(), above);
}

static void keep_nucleus(std::vector<Candidate> & c, float top_p) {
    softmax(c);
    double sum = 0;
    size_t n = 0;
    while (n < c.size() && sum < top_p) sum += c[n++].p;
    c.resize(n);
}

double Sampler::shape(const float * logits, size_t n_vocab, Grammar * grammar, SamplerScratch & scratch, std::initializer_list<Biases> biases) const {
    auto & row = scratch.logits;
    row.assign(logits, logits + n_vocab);
    for (const Biases & bias : biases) {
        if (!bias) continue;
        for (const auto & [token, by] : *bias) row[static_cast<size_t>(token)] += by;
    }
    if (params_.has_penalties()) penalise(row);
    const bool greedy = params_.temperature <= 0;
    auto & c = scratch.candidates;
    c.clear();
    if (greedy && !grammar) {
        size_t best = n_vocab;
        for (size_t i = 0; i < n_vocab; i++) {
            if (row[i] > (best == n_vocab ? none : row[best])) best = i;
        }
        if (best == n_vocab) return 0;
        c.push_back({static_cast<Token>(best), row[best], 1});
        return 1;
    }
    for (size_t i = 0; i < n_vocab; i++) {
        if (row[i] > none) c.push_back({static_cast<Token>(i), row[i], 0});  // drops -infinity and NaN
    }
    const size_t k = greedy ? 1 : params_.top_k > 0 ? static_cast<size_t>(params_.top_k) : c.size();
    if (c.empty()) return 0;
    select(scratch, k, grammar);
    if (c.empty()) return 0;
    if (greedy) return c.front().p = 1;
    if (std::isinf(c.front().logit)) {  // more likely than anything finite, and no number to compute with
        std::erase_if(c, [](const Candidate & x) { return !std::isinf(x.logit); });
        for (auto & x : c) x.logit = 0;
    }
    if (params_.typical_p < 1) keep_typical(c, params_.typical_p);
    if (params_.top_p < 1) keep_nucleus(c, params_.top_p);
    if (params_.min_p > 0) {
        const float floor = c.front().logit + std::log(params_.min_p);
        std::erase_if(c, [&](const Candidate & x) { return x.logit < floor; });
    }
    double sum = 0;
    for (auto & x : c) sum += x.p = std::exp((x.logit - c.front().logit) / params_.temperature);
    return sum;
}

Token Sampler::sample(const float * logits, size_t n_vocab, Grammar * grammar, SamplerScratch & scratch, std::initializer_list<Biases> biases) {
    const double sum = shape(logits, n_vocab, grammar, scratch, biases);
    const auto & c = scratch.candidates;
    if (c.empty()) return -1;
    if (params_.temperature <= 0) return c.front().id;
    double at = uniform() * sum;
    for (const auto & x : c) {
        if ((at -= x.p) < 0) return x.id;
    }
    return c.back().id;
}

Measure Sampler::measure(Token token, const float * logits, size_t n_vocab, Grammar * grammar, SamplerScratch & scratch, std::initializer_list<Biases> biases) const {
    const double sum = shape(logits, n_vocab, grammar, scratch, biases);
    Measure out{std::numeric_limits<double>::infinity(), 0};
    for (const auto & x : scratch.candidates) {
        const double p = x.p / sum;
        if (p > 0) out.entropy -= p * std::log(p);
        if (x.id == token && p > 0) out.surprisal = 0 - std::log(p);  // 0, not -0, for the only one
    }
    return out;
}

}  // namespace pyl
