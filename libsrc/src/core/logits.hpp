// Arithmetic on one row of logits, without a store.
#pragma once

#include <cstddef>

#include "pylloyal.h"

namespace pyl {

// At temperature 1; PYL_E_ILLEGAL when every logit is -infinity.
pyl_distribution distribution_of(const float * row, size_t n_vocab);

}  // namespace pyl
