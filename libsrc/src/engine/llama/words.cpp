#include "engine/llama/words.hpp"

#include <algorithm>
#include <map>

#include "llama-vocab.h"

namespace pyl {

// As the engine does it, which keeps this function to itself: the characters and a 0, and what is left over at the end. -1 bytes
// remaining stands for bytes that are no UTF-8; nothing matches them.
static llama_partial_utf8 decode(const std::string & piece, llama_partial_utf8 so_far, std::vector<uint32_t> & points) {
    static constexpr int lengths[] = {1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 2, 2, 3, 4};
    const size_t begin = points.size();
    const char * at = piece.c_str();
    uint32_t value = so_far.value;
    int remain = so_far.n_remain;
    for (; *at && remain > 0; at++, remain--) {
        const auto byte = static_cast<uint8_t>(*at);
        if (byte >> 6 != 2) {
            points.push_back(0);
            return {0, -1};
        }
        value = (value << 6) + (byte & 0x3F);
    }
    if (so_far.n_remain > 0 && remain == 0) points.push_back(value);
    while (*at) {
        const auto first = static_cast<uint8_t>(*at++);
        remain = lengths[first >> 4] - 1;
        if (remain < 0) {
            points.resize(begin);
            points.push_back(0);
            return {0, -1};
        }
        value = first & ((1u << (7 - remain)) - 1);
        for (; *at && remain > 0; at++, remain--) value = (value << 6) + (static_cast<uint8_t>(*at) & 0x3F);
        if (remain == 0) points.push_back(value);
    }
    points.push_back(0);
    return {value, remain};
}

static uint8_t first_byte(const std::string & piece) { return static_cast<uint8_t>(piece[0]); }

// The engine puts characters together from bytes without looking whether UTF-8 allows them: overlong ones, halves of surrogate
// pairs and those beyond the last would pass through any class that names what may not come. The first byte tells.
static bool is_broken(const std::string & piece, llama_partial_utf8 so_far) {
    const auto [value, remain] = so_far;
    uint8_t low = 0x00, high = 0xF4;
    if (remain == 2 && value == 0x0) low = 0xA0;
    if (remain == 2 && value == 0xD) high = 0x9F;
    if (remain == 3 && value == 0x0) low = 0x90;
    if (remain == 3 && value == 0x4) high = 0x8F;
    return first_byte(piece) < low || first_byte(piece) > high;
}

Words::Words(const llama_vocab * vocab) : vocab_(vocab), kinds_(vocab->n_tokens()), words_(kinds_.size()) {
    for (size_t i = 0; i < kinds_.size(); i++) {
        const auto token = static_cast<Token>(i);
        const std::string & piece = vocab->token_to_piece(token);
        kinds_[i] = vocab->is_eog(token) ? Kind::end : piece.empty() || piece[0] == 0 ? Kind::nothing : Kind::text;
        words_[i].at = points_.size();
        if (kinds_[i] == Kind::end) ends_.push_back(token);
        if (kinds_[i] != Kind::text) continue;
        words_[i].rest = decode(piece, {0, 0}, points_);
        if (is_broken(piece, {0, 0})) words_[i].rest.n_remain = -1;
        if (first_byte(piece) >> 6 == 2) continuing_.push_back(token);
    }
    std::map<uint32_t, std::vector<llama_grammar_candidate>> by_first;
    for (size_t i = 0; i < kinds_.size(); i++) {
        if (kinds_[i] != Kind::text || words_[i].rest.n_remain < 0) continue;
        const llama_grammar_candidate word = at_start(static_cast<Token>(i));
        if (*word.code_points) {
            by_first[*word.code_points].push_back(word);
        } else {
            fragments_.push_back(word);
        }
    }
    for (auto & [point, members] : by_first) groups_.push_back({{point, 0}, std::move(members)});
    for (size_t i = 0; i < groups_.size(); i++) heads_.push_back({i, groups_[i].points, {0, 0}, -1});
}

llama_grammar_candidate Words::at_start(Token token) const {
    const Word & word = words_[static_cast<size_t>(token)];
    return {static_cast<size_t>(token), points_.data() + word.at, word.rest, word.rest.n_remain < 0 ? -1 : token};
}

std::vector<llama_grammar_candidate> Words::continued(const std::vector<Token> & tokens, llama_partial_utf8 so_far, std::vector<std::vector<uint32_t>> & points) const {
    std::vector<llama_grammar_candidate> out;
    for (const Token token : tokens) {
        const std::string & piece = vocab_->token_to_piece(token);
        if (first_byte(piece) >> 6 != 2 || is_broken(piece, so_far)) continue;
        const llama_partial_utf8 rest = decode(piece, so_far, points.emplace_back());
        out.push_back({static_cast<size_t>(token), points.back().data(), rest, token});
    }
    return out;
}

}  // namespace pyl
