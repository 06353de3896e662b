// Whether a text follows a grammar.
#pragma once

#include <string>
#include <string_view>

#include "engine/engine.hpp"

namespace pyl {

struct Match {
    size_t n_bytes = 0;        // of the tokens that were taken
    bool is_complete = false;  // all of them were, and the generation may end there
};

// Token by token through the grammar a branch would carry; the text stays inert.
Match match_grammar(const Model & model, const std::string & gbnf, const std::string & root, std::string_view text);

}  // namespace pyl
