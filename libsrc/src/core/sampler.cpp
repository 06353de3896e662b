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

// Gives every token of the window, once, and how often it stands there.
template <typename Each>
static void for_window(const std::vector<Token> & history, int32_t last_n, std::vector<Token> & window, Each && each) {
    window.assign(history.end() - static_cast<std::ptrdiff_t>(std::min<size_t>(history.size(), static_cast<size_t>(last_n))), history.end());
    std::sort(window.begin(), window.end());
    for (auto it = window.begin(); it != window.end();) {
        const auto end = std::upper_bound(it, window.end(), *it);
        each(*it, end - it);
        it = end;
    }
}

// Biases and penalties touch few tokens as a rule, and the others are read where they are.
Weighed Sampler::weigh(const float * logits, size_t n_vocab, SamplerScratch & scratch, std::initializer_list<Biases> biases) const {
    auto & changed = scratch.changed;
    changed.clear();
    size_t n_changes = 0;
    for (const Biases & bias : biases) n_changes += bias ? bias->size() : 0;
    const bool has_window = params_.has_penalties() && !history_.empty();
    if (has_window) n_changes += std::min<size_t>(history_.size(), static_cast<size_t>(params_.penalty_last_n));
    if (n_changes == 0) return {logits, n_vocab, {}};
    const auto change = [&](auto && logit_of) {
        for (const Biases & bias : biases) {
            if (!bias) continue;
            for (const auto & [token, by] : *bias) logit_of(token) += by;
        }
        if (!has_window) return;
        for_window(history_, params_.penalty_last_n, scratch.window, [&](Token token, std::ptrdiff_t n) {
            float & logit = logit_of(token);
            if (!(logit > none)) return;
            logit = logit <= 0 ? logit * params_.penalty_repeat : logit / params_.penalty_repeat;
            logit -= static_cast<float>(n) * params_.penalty_frequency + params_.penalty_presence;
        });
    };
    if (n_changes > n_vocab / 8) {
        scratch.logits.assign(logits, logits + n_vocab);
        change([&](Token token) -> float & { return scratch.logits[static_cast<size_t>(token)]; });
        return {scratch.logits.data(), n_vocab, {}};
    }
    for (const Biases & bias : biases) {
        if (!bias) continue;
        for (const auto & item : *bias) changed.emplace_back(item.first, 0.0f);
    }
    if (has_window) for_window(history_, params_.penalty_last_n, scratch.window, [&](Token token, std::ptrdiff_t) { changed.emplace_back(token, 0.0f); });
    std::sort(changed.begin(), changed.end());
    changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
    for (auto & [token, logit] : changed) logit = logits[token];
    change([&](Token token) -> float & { return std::lower_bound(changed.begin(), changed.end(), token, [](const auto & pair, Token id) { return pair.first < id; })->second; });
    return {logits, n_vocab, changed};
}

// The k most likely candidates the grammar allows, most likely first. A grammar that does not know all it allows is asked about
// the most likely ones, and about more of them until there are enough, which gives the same k as asking about all.
static void select(const Weighed & row, size_t k, Grammar * grammar, SamplerScratch & scratch) {
    auto & c = scratch.candidates;
    const uint64_t * legal = grammar ? grammar->known_mask() : nullptr;
    if (!grammar || legal) {
        most_likely(row, k, legal, c, scratch.maxima);
    } else {
        for (size_t m = std::max<size_t>(2 * k, 64);; m *= 8) {
            most_likely(row, m, nullptr, c, scratch.maxima);
            const bool is_all = c.size() < m || m >= row.n;
            grammar->filter(c);
            std::erase_if(c, [](const Candidate & x) { return !(x.logit > none); });
            if (c.size() >= k || is_all) break;
            if (const uint64_t * all_legal = grammar->mask()) {
                most_likely(row, k, all_legal, c, scratch.maxima);
                break;
            }
        }
        if (c.size() > k) {
            std::nth_element(c.begin(), c.begin() + static_cast<std::ptrdiff_t>(k), c.end(), above);
            c.resize(k);
        }
    }
    sort_candidates(c, scratch.room);
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
    const bool greedy = params_.temperature <= 0;
    auto & c = scratch.candidates;
    select(weigh(logits, n_vocab, scratch, biases), greedy ? 1 : params_.top_k > 0 ? static_cast<size_t>(params_.top_k) : n_vocab, grammar, scratch);
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
