// Looking at logits and changing them: nothing here decodes or touches the cache.
#include <algorithm>
#include <cmath>
#include <limits>

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
        if (tokens[i] < 0 || static_cast<size_t>(tokens[i]) >= n_vocab_) throw Error(PYL_E_INVALID, "token " + std::to_string(tokens[i]) + " is outside the vocabulary of " + std::to_string(n_vocab_)).at(i);
        candidates.push_back({tokens[i], 0.0f, 0.0f});
    }
    if (found.grammar) found.grammar->filter(candidates);
    for (const Biases & bias : {suppressed_, found.bias, found.steer}) {
        if (!bias) continue;
        for (const auto & [token, by] : *bias) {
            for (Candidate & c : candidates) c.logit = c.id == token ? c.logit + by : c.logit;
        }
    }
    for (size_t i = 0; i < candidates.size(); i++) legal[i] = candidates[i].logit > -inf;
}

pyl_distribution Store::distribution(pyl_branch branch) {
    const float * row = logits(get_healthy(branch));
    size_t best = n_vocab_;
    for (size_t t = 0; t < n_vocab_; t++) {
        if (row[t] > (best == n_vocab_ ? -inf : row[best])) best = t;
    }
    if (best == n_vocab_) throw Error(PYL_E_ILLEGAL, "every logit is -infinity");
    const double top = row[best];
    double sum = 0, weighted = 0;
    for (size_t t = 0; t < n_vocab_; t++) {
        if (!(row[t] > -inf)) continue;
        const double below = row[t] - top, e = std::exp(below);
        sum += e;
        weighted += e * below;
    }
    const double log_sum = std::log(sum);
    return {sizeof(pyl_distribution), static_cast<int32_t>(best), log_sum - weighted / sum, top + log_sum, top};
}

}  // namespace pyl
