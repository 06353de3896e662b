// The most likely tokens of a row of logits, found where the engine wrote them: one look at each, no copy, and no sorting of
// what is not among them.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "engine/engine.hpp"

namespace pyl {

// Logits as they are to be sampled. What differs from the engine's is told apart, by ascending id.
struct Weighed {
    const float * logits;
    size_t n;
    std::span<const std::pair<Token, float>> changed;
};

// Most likely first; of equals the lowest id.
inline bool above(const Candidate & a, const Candidate & b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; }

// The m most likely of those whose bit is set in `legal` (null: of all), in some order; fewer when there are no more. Never one
// that is -infinity or no number. `maxima` is memory to work in.
void most_likely(const Weighed & row, size_t m, const uint64_t * legal, std::vector<Candidate> & out, std::vector<float> & maxima);

// Puts them in the order of above(). `room` is memory to work in.
void sort_candidates(std::vector<Candidate> & candidates, std::vector<Candidate> & room);

}  // namespace pyl
