// Looking at logits and changing them: nothing here decodes or touches the cache.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/logits.hpp"
#include "core/store.hpp"

namespace pyl {

static constexpr float inf = std::numeric_limits<float>::infinity();

void Store::set_logits(pyl_branch branch, std::span<const float> logits) {
    Branch & found = get_healthy(branch);
    if (logits.size() != n_vocab_) {
        throw Error(PYL_E_INVALID, std::to_string(logits.size()) + " logits for a vocabulary of " + std::to_string(n_vocab_)).numbers(static_cast<int64_t>(n_vocab_), static_cast<int64_t>(logits.size()));
    }
    for (size_t i = 0; i < logits.size(); i++) {
        if (!(logits[i] < inf)) throw Error(PYL_E_INVALID, "a logit is a number below +infinity").at(i);
    }
    found.logits.copy = std::make_shared<const std::vector<float>>(logits.begin(), logits.end());
    found.logits.row = -1;
    epoch_++;
}

void Store::merge_logits(pyl_branch branch, std::span<const pyl_branch> experts, float alpha) {
    Branch & into = get_healthy(branch);
    if (!std::isfinite(alpha)) throw Error(PYL_E_INVALID, "alpha is not finite");
    const float * own = logits(into);
    std::vector<const float *> rows;
    for (size_t i = 0; i < experts.size(); i++) {
        const Branch & expert = get_healthy(experts[i], i);
        if (!expert.logits.any()) throw Error(PYL_E_NO_LOGITS, "an expert has no logits").at(i);
        rows.push_back(logits(expert));
    }
    std::vector<float> merged(own, own + n_vocab_);
    for (size_t t = 0; t < n_vocab_; t++) {
        if (own[t] == -inf) continue;  // banned stays banned
        double sum = 0;
        for (const float * row : rows) sum += row[t];
        if (std::isfinite(sum)) {
            constexpr double most = std::numeric_limits<float>::max();  // a sum too large for a float is no ban and no certainty
            merged[t] = static_cast<float>(std::clamp(own[t] + static_cast<double>(alpha) * sum, -most, most));
        } else if (sum == -inf && alpha > 0) {
            merged[t] = -inf;  // what an expert bans is banned; against an expert (alpha < 0) its ban says nothing
        }
    }
    into.logits.copy = std::make_shared<const std::vector<float>>(std::move(merged));
    into.logits.row = -1;
    epoch_++;
}

void Store::legal(pyl_branch branch, std::span<const Token> tokens, uint8_t * legal) {
    Branch & found = get_healthy(branch);
    std::vector<Candidate> candidates;
    for (size_t i = 0; i < tokens.size(); i++) {
        need_known(tokens[i], i);
        candidates.push_back({tokens[i], 0.0f, 0.0f});
    }
    if (found.grammar) found.grammar->filter(candidates);
    for (const Biases & bias : {banned(found), found.bias, found.steer}) {
        if (!bias) continue;
        for (const auto & [token, by] : *bias) {
            for (Candidate & c : candidates) c.logit = c.id == token ? c.logit + by : c.logit;
        }
    }
    const bool is_waiting = found.grammar && found.grammar->is_waiting();
    for (size_t i = 0; i < candidates.size(); i++) legal[i] = candidates[i].logit > -inf && (!is_waiting || found.grammar->allows(tokens[i]));
}

std::optional<pyl_distribution> distribution_of(const float * row, size_t n_vocab) {
    size_t best = n_vocab;
    for (size_t t = 0; t < n_vocab; t++) {
        if (row[t] > (best == n_vocab ? -inf : row[best])) best = t;
    }
    if (best == n_vocab) return std::nullopt;
    const double top = row[best];
    double sum = 0, weighted = 0;
    for (size_t t = 0; t < n_vocab; t++) {
        if (!(row[t] > -inf)) continue;
        const double below = row[t] - top, e = std::exp(below);
        sum += e;
        weighted += e * below;
    }
    const double log_sum = std::log(sum);
    return pyl_distribution{sizeof(pyl_distribution), static_cast<int32_t>(best), log_sum - weighted / sum, top + log_sum, top};
}

pyl_distribution Store::distribution(pyl_branch branch) {
    if (const auto found = distribution_of(logits(get_healthy(branch)), n_vocab_)) return *found;
    throw Error(PYL_E_ILLEGAL, "every logit is -infinity");
}

void Store::logits_at(pyl_branch branch, std::span<const Token> tokens, float * out) {
    const float * row = logits(get_healthy(branch));
    for (size_t i = 0; i < tokens.size(); i++) need_known(tokens[i], i);
    for (size_t i = 0; i < tokens.size(); i++) out[i] = row[tokens[i]];
}

Store::Priors Store::priors(pyl_branch branch, std::span<Token> tokens, float * log_probs) {
    Branch & found = get_healthy(branch);
    const float * row = logits(found);
    std::vector<float> biased(row, row + n_vocab_);
    for (const Biases & bias : {banned(found), found.bias, found.steer}) {
        if (!bias) continue;
        for (const auto & [token, by] : *bias) biased[static_cast<size_t>(token)] += by;
    }
    std::vector<Candidate> legal;
    for (size_t t = 0; t < n_vocab_; t++) {
        if (biased[t] > -inf) legal.push_back({static_cast<Token>(t), biased[t], 0});
    }
    if (found.grammar) {
        found.grammar->filter(legal);
        std::erase_if(legal, [](const Candidate & c) { return !(c.logit > -inf); });
    }
    if (legal.empty()) throw Error(PYL_E_ILLEGAL, "grammar and bias allow no token");
    const size_t n = std::min(tokens.size(), legal.size());
    std::partial_sort(legal.begin(), legal.begin() + static_cast<std::ptrdiff_t>(std::max<size_t>(n, 1)), legal.end(),
                      [](const Candidate & a, const Candidate & b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; });
    const double top = legal.front().logit;
    // Biases may add up to infinity: then that is more likely than anything finite, as it is for the sampler, and no number to compute with.
    const auto below = [&](const Candidate & c) { return std::isinf(top) ? (std::isinf(c.logit) ? 0.0 : -std::numeric_limits<double>::infinity()) : c.logit - top; };
    double sum = 0;
    for (const Candidate & c : legal) sum += std::exp(below(c));
    for (size_t i = 0; i < n; i++) {
        tokens[i] = legal[i].id;
        log_probs[i] = static_cast<float>(below(legal[i]) - std::log(sum));
    }
    return {n, legal.size()};
}

void Store::set_metrics(pyl_branch branch, int32_t levels) {
    Branch & found = get_healthy(branch);
    if (levels & ~(PYL_METRICS_MODEL | PYL_METRICS_SAMPLING)) throw Error(PYL_E_INVALID, "levels is none of PYL_METRICS_*, nor their sum");
    found.metrics = Branch{}.metrics;
    found.metrics.levels = levels;
}

}  // namespace pyl
