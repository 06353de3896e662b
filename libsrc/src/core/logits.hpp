// Arithmetic on one row of logits, without a store.
#pragma once

#include <cstddef>
#include <optional>

#include "pylloyal.h"

namespace pyl {

// At temperature 1; nothing when every logit is -infinity.
std::optional<pyl_distribution> distribution_of(const float * row, size_t n_vocab);

}  // namespace pyl
