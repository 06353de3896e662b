// A vocabulary taken apart for grammars, once: the characters of every token, as llama.cpp's grammar engine reads them.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "llama-grammar.h"

namespace pyl {

class Words {
public:
    explicit Words(const llama_vocab * vocab);
    Words(const Words &) = delete;  // candidates point into it
    Words & operator=(const Words &) = delete;

    enum class Kind : uint8_t {
        nothing,  // no text, or none that can ever come
        end,      // of a generation
        text,
    };
    // Tokens that begin alike: those that say no more than that, and those of the groups below it, which go on alike.
    struct Group {
        std::span<const llama_grammar_candidate> own, all;
        uint32_t first = 0, n = 0;  // of the groups below
        size_t prefix = 0;          // what it begins with, in prefixes_
    };

    size_t size() const { return kinds_.size(); }
    Kind kind(Token token) const { return kinds_[static_cast<size_t>(token)]; }
    const std::vector<Token> & ends() const { return ends_; }

    // All that can come where a character begins is in the first n_roots() groups, but for those that do not come to the end of even
    // one character. A few tokens are a group without others below it.
    size_t n_groups() const { return groups_.size(); }
    size_t n_roots() const { return n_roots_; }
    const Group & group(size_t i) const { return groups_[i]; }
    std::span<const llama_grammar_candidate> fragments() const { return fragments_; }
    // What all of a group begin with, as if it were a token.
    llama_grammar_candidate head(size_t i) const { return {i, prefixes_.data() + groups_[i].prefix, {0, 0}, -1}; }
    // A token where a character begins; its id is -1 if it cannot come there under any grammar.
    llama_grammar_candidate at_start(Token token) const;

    // Tokens in the middle of a character, their characters being put into `points`.
    std::vector<llama_grammar_candidate> continued(const std::vector<Token> & tokens, llama_partial_utf8 so_far, std::vector<std::vector<uint32_t>> & points) const;
    // Those that can come there.
    const std::vector<Token> & continuing() const { return continuing_; }

private:
    struct Word {
        size_t at;  // in points_
        llama_partial_utf8 rest;
    };

    void group_by(size_t place, std::span<const llama_grammar_candidate> words);

    const llama_vocab * vocab_;
    std::vector<Kind> kinds_;
    std::vector<Word> words_;
    std::vector<uint32_t> points_;
    std::vector<Token> ends_, continuing_;
    std::vector<llama_grammar_candidate> fragments_, sorted_;
    std::vector<Group> groups_;
    std::vector<uint32_t> prefixes_;
    size_t n_roots_ = 0;
};

}  // namespace pyl
