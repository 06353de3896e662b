// A vocabulary taken apart for grammars, once: the characters of every token, as llama.cpp's grammar engine reads them.
#pragma once

#include <cstdint>
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
    // Tokens whose first character is the same.
    struct Group {
        uint32_t points[2];  // that character, and the 0 after it
        std::vector<llama_grammar_candidate> members;
    };

    size_t size() const { return kinds_.size(); }
    Kind kind(Token token) const { return kinds_[static_cast<size_t>(token)]; }
    const std::vector<Token> & ends() const { return ends_; }

    // All that can come where a character begins, and one for each group, whose index is the group's.
    const std::vector<Group> & groups() const { return groups_; }
    const std::vector<llama_grammar_candidate> & heads() const { return heads_; }
    // Those that do not come to the end of even one character.
    const std::vector<llama_grammar_candidate> & fragments() const { return fragments_; }
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

    const llama_vocab * vocab_;
    std::vector<Kind> kinds_;
    std::vector<Word> words_;
    std::vector<uint32_t> points_;
    std::vector<Token> ends_, continuing_;
    std::vector<Group> groups_;
    std::vector<llama_grammar_candidate> heads_, fragments_;
};

}  // namespace pyl
