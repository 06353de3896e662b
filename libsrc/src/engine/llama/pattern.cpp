// The regular expressions llama.cpp's converter follows to the letter. It copies most of a pattern into the grammar as it
// stands, where the same characters may mean something else: in a JSON string a quotation mark, a backslash and a control
// character are written as escapes, a class such as \d is not known, and a quantifier after an escape takes in the letters
// before it. So a pattern is read here first, and everything but the part that carries over is refused.
#include <charconv>

#include "engine/llama/schema.hpp"

namespace pyl {
namespace {

constexpr size_t max_bytes = 4096;
constexpr size_t max_depth = 50;
constexpr size_t max_optional = 64;  // parts that may be left out: the engine follows every way through them
constexpr int max_repeat = 2000;  // beyond it the engine's grammar parser takes an upper bound for none
constexpr std::string_view special = "^$.[]()|{}*+?";

struct Problem {
    std::string words;
};

[[noreturn]] void refuse(std::string words) { throw Problem{std::move(words)}; }

bool is_special(char c) { return special.find(c) != std::string_view::npos; }

// Characters a JSON string holds as they are, and never as half of a pair.
void check_character(uint32_t c) {
    if (c < 0x20 || c == '"' || c == '\\') refuse("it takes in what JSON writes as an escape (a quotation mark, a backslash or a control character)");
    if (c >= 0xD800 && c <= 0xDFFF) refuse("it takes in a surrogate");
}

class Reader {
public:
    explicit Reader(std::string_view text) : text_(text) {}

    void read() {
        alternatives(0);
        if (at_ < text_.size()) refuse("a parenthesis is closed that was not opened");
    }

private:
    bool ends() const { return at_ == text_.size(); }
    char now() const { return text_[at_]; }
    bool next_is(char c) const { return !ends() && now() == c; }

    // Each of these returns whether the part may be empty.
    bool alternatives(size_t depth) {
        bool may_be_empty = sequence(depth);
        while (next_is('|')) {
            if (depth == 0) refuse("alternatives outside a group bind tighter than the anchors; write ^(?:a|b)$");
            at_++;
            may_be_empty |= sequence(depth);
        }
        return may_be_empty;
    }

    bool sequence(size_t depth) {
        bool all_may_be_empty = true;
        bool after_letter = false;  // letters that follow one another become one literal of the grammar
        while (!ends() && now() != '|' && now() != ')') {
            const bool is_escape = now() == '\\', is_letter = is_escape || !is_special(now());
            bool may_be_empty = part(depth);
            if (!ends() && (now() == '*' || now() == '+' || now() == '?' || now() == '{')) {
                if (is_escape && after_letter) refuse("a quantifier after an escaped character would take in the letters before it; put the character into a class or a group");
                may_be_empty = quantifier(may_be_empty);
                after_letter = false;
            } else {
                after_letter = is_letter;
            }
            all_may_be_empty &= may_be_empty;
        }
        return all_may_be_empty;
    }

    bool part(size_t depth) {
        const char c = text_[at_++];
        switch (c) {
            case '(': return group(depth);
            case '[': return character_class(), false;
            case '\\': return check_character(escape(is_special(next_or('\0')))), false;
            case '.': refuse("a dot takes in what JSON writes as an escape; name the characters in a class");
            case '^':
            case '$': refuse("an anchor inside the pattern");
            case '*':
            case '+':
            case '?':
            case '{': refuse("a quantifier with nothing before it");
            case ']':
            case '}': refuse(std::string("a lone ") + c);
            default: break;
        }
        if (c < 0x20 || c > 0x7E) refuse("a character that is not printable ASCII; write \\uXXXX");
        check_character(static_cast<unsigned char>(c));
        return false;
    }

    char next_or(char otherwise) const { return ends() ? otherwise : now(); }

    bool group(size_t depth) {
        if (depth == max_depth) refuse("more than " + std::to_string(max_depth) + " nested groups");
        if (next_is('?')) {
            if (text_.substr(at_, 2) != "?:") refuse("look-around, a named group or a flag");
            at_ += 2;
        }
        const bool may_be_empty = alternatives(depth + 1);
        if (!next_is(')')) refuse("a parenthesis is not closed");
        at_++;
        return may_be_empty;
    }

    // After a backslash: the character meant.
    uint32_t escape(bool is_plain) {
        const char c = next_or('\0');
        if (is_plain || c == '-') return at_++, static_cast<unsigned char>(c);
        if (c == 'x' || c == 'u') {
            const size_t digits = c == 'x' ? 2 : 4;
            const std::string_view hex = text_.substr(at_ + 1, digits);
            uint32_t value = 0;
            const auto [end, code] = std::from_chars(hex.data(), hex.data() + hex.size(), value, 16);
            if (code != std::errc() || hex.size() != digits || end != hex.data() + digits) refuse(std::string("\\") + c + " without its " + std::to_string(digits) + " hexadecimal digits");
            at_ += 1 + digits;
            return value;
        }
        if (c == '\0') refuse("a backslash at its end");
        if (c == '\\' || c == '"' || c == 'n' || c == 'r' || c == 't' || c == 'f' || c == 'v' || c == '0') check_character('"');
        refuse(std::string("the escape \\") + (c > 0x20 && c < 0x7F ? std::string(1, c) : "") + "; write the characters it stands for");
    }

    uint32_t class_character() {
        const char c = text_[at_++];
        uint32_t value = static_cast<unsigned char>(c);
        if (c == '\\') {
            value = escape(next_or('\0') == '[' || next_or('\0') == ']');
        } else if (c < 0x20 || c > 0x7E) {
            refuse("a character that is not printable ASCII; write \\uXXXX");
        }
        check_character(value);
        return value;
    }

    void character_class() {
        if (next_is('^')) refuse("a negated class takes in what JSON writes as an escape; name the characters it may be");
        if (next_is(']')) refuse("an empty class");
        while (!ends() && now() != ']') {
            const uint32_t low = class_character();
            if (!next_is('-') || text_.substr(at_ + 1, 1) == "]" || at_ + 1 == text_.size()) continue;
            at_++;
            const uint32_t high = class_character();
            if (high < low) refuse("a range that runs backwards");
            for (const uint32_t c : {uint32_t{'"'}, uint32_t{'\\'}, uint32_t{0xD800}}) {
                if (low <= c && c <= high) check_character(c);
            }
        }
        if (ends()) refuse("a class is not closed");
        at_++;
    }

    int number() {
        int value = 0;
        const char * const begin = text_.data() + at_;
        const auto [end, code] = std::from_chars(begin, text_.data() + text_.size(), value);
        if (end == begin || *begin == '-') refuse("a { that is no quantifier");
        if (code != std::errc() || value > max_repeat) refuse("more than " + std::to_string(max_repeat) + " repetitions");
        at_ += static_cast<size_t>(end - begin);
        return value;
    }

    bool quantifier(bool may_be_empty) {
        const char c = text_[at_++];
        bool may_be_absent = c == '*' || c == '?';
        if (c == '{') {
            const int least = number();
            if (next_is(',')) {
                at_++;
                if (!next_is('}') && number() < least) refuse("a quantifier whose bounds are the wrong way round");
            }
            if (!next_is('}')) refuse("a { that is no quantifier");
            at_++;
            may_be_absent = least == 0;
        }
        if (may_be_empty && c != '?') refuse("a repeated part that may be empty");
        if (!ends() && (now() == '*' || now() == '+' || now() == '?' || now() == '{')) refuse("a quantifier on a quantifier (a lazy one matches the same; leave out the ?)");
        if (may_be_absent && ++n_optional_ > max_optional) refuse("more than " + std::to_string(max_optional) + " optional parts");
        return may_be_absent || may_be_empty;
    }

    std::string_view text_;
    size_t at_ = 0, n_optional_ = 0;
};

}  // namespace

std::string pattern_problem(std::string_view pattern) {
    try {
        if (pattern.size() > max_bytes) refuse("more than " + std::to_string(max_bytes) + " bytes");
        size_t n_backslashes = 0;
        while (n_backslashes + 1 < pattern.size() && pattern[pattern.size() - 2 - n_backslashes] == '\\') n_backslashes++;
        if (pattern.size() < 2 || !pattern.starts_with('^') || !pattern.ends_with('$') || n_backslashes % 2) refuse("it is not anchored at both ends; write ^...$");
        Reader(pattern.substr(1, pattern.size() - 2)).read();
    } catch (const Problem & problem) {
        return problem.words;
    }
    return "";
}

}  // namespace pyl
