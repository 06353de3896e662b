#include "engine/llama/words.hpp"

#include <algorithm>

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
    // By their characters, the first three in one number: few are alike in them.
    std::vector<std::pair<uint64_t, Token>> order;
    for (size_t i = 0; i < kinds_.size(); i++) {
        if (kinds_[i] != Kind::text || words_[i].rest.n_remain < 0) {
            words_[i].at = 0;
            continue;
        }
        const uint32_t * at = points_.data() + words_[i].at;
        uint64_t key = 0;
        for (int k = 0; k < 3; k++) key = key << 21 | std::min<uint32_t>(*at ? *at++ : 0, (1u << 21) - 1);
        order.emplace_back(key, static_cast<Token>(i));
    }
    std::sort(order.begin(), order.end(), [&](const auto & a, const auto & b) {
        if (a.first != b.first) return a.first < b.first;
        const uint32_t *p = points_.data() + words_[static_cast<size_t>(a.second)].at, *q = points_.data() + words_[static_cast<size_t>(b.second)].at;
        while (*p && *p == *q) p++, q++;
        return *p != *q ? *p < *q : a.second < b.second;
    });
    // Laid out anew in that order, in which they are gone through.
    std::vector<uint32_t> points{0};  // words that cannot come have none
    for (const auto & [key, token] : order) {
        Word & word = words_[static_cast<size_t>(token)];
        const uint32_t * at = points_.data() + std::exchange(word.at, points.size());
        while (*at) points.push_back(*at++);
        points.push_back(0);
    }
    points_ = std::move(points);
    for (const auto & [key, token] : order) (key ? sorted_ : fragments_).push_back(at_start(token));
    constexpr size_t few = 32;
    group_by(0, sorted_);
    n_roots_ = groups_.size();
    size_t place = 1;
    for (size_t i = 0, end = n_roots_; i < groups_.size(); i++) {
        if (i == end) end = groups_.size(), place++;  // all above are done: these begin with one character more
        const Group group = groups_[i];
        if (group.all.size() <= few) continue;
        size_t n_own = 0;
        while (n_own < group.all.size() && group.all[n_own].code_points[place] == 0) n_own++;
        groups_[i].own = group.all.first(n_own);
        groups_[i].first = static_cast<uint32_t>(groups_.size());
        group_by(place, group.all.subspan(n_own));
        groups_[i].n = static_cast<uint32_t>(groups_.size()) - groups_[i].first;
    }
}

// Appends a group for each character that these sorted words, alike before it, have at a place.
void Words::group_by(size_t place, std::span<const llama_grammar_candidate> words) {
    for (size_t i = 0; i < words.size();) {
        const uint32_t * points = words[i].code_points;
        size_t end = i;
        while (end < words.size() && words[end].code_points[place] == points[place]) end++;
        groups_.push_back({words.subspan(i, end - i), words.subspan(i, end - i), 0, 0, prefixes_.size()});
        prefixes_.insert(prefixes_.end(), points, points + place + 1);
        prefixes_.push_back(0);
        i = end;
    }
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
