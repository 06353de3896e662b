// GBNF through llama.cpp's own grammar engine. Its parser is driven rule by rule, because its one-call form prints to stderr
// and tells neither line nor column.
#include <algorithm>
#include <limits>
#include <regex>
#include <utility>

#include "engine/llama/deep_stack.hpp"
#include "engine/llama/llama_parts.hpp"
#include "llama-grammar.h"
#include "llama-vocab.h"

namespace pyl {

static_assert(sizeof(Candidate) == sizeof(llama_token_data) && offsetof(Candidate, id) == offsetof(llama_token_data, id) && offsetof(Candidate, logit) == offsetof(llama_token_data, logit) &&
              offsetof(Candidate, p) == offsetof(llama_token_data, p));

namespace {

constexpr size_t max_bytes = 4u << 20;
constexpr size_t max_depth = 200;     // the parser recurses once per open parenthesis
constexpr size_t max_waiting = 2u << 20;  // bytes said before a lazy grammar's trigger; nothing is legal beyond
constexpr size_t max_rules = 16384;   // and the check for left recursion once per rule
constexpr size_t max_ways = 2048;     // each is followed on its own, and they can multiply with every token

std::string place(const std::string & gbnf, size_t at) {
    const size_t line = 1 + static_cast<size_t>(std::count(gbnf.begin(), gbnf.begin() + static_cast<std::ptrdiff_t>(at), '\n'));
    const size_t start = at == 0 ? std::string::npos : gbnf.rfind('\n', at - 1);
    return "line " + std::to_string(line) + ", column " + std::to_string(at - (start == std::string::npos ? 0 : start + 1) + 1);
}

size_t skip_space(const std::string & gbnf, size_t i) {
    while (i < gbnf.size()) {
        if (gbnf[i] == '#') {
            while (i < gbnf.size() && gbnf[i] != '\n') i++;
        } else if (gbnf[i] == ' ' || gbnf[i] == '\t' || gbnf[i] == '\r' || gbnf[i] == '\n') {
            i++;
        } else {
            break;
        }
    }
    return i;
}

// Refuses what would overflow the parser's stack; literals, classes and comments do not count.
void check_depth(const std::string & gbnf) {
    size_t depth = 0;
    for (size_t i = 0; i < gbnf.size(); i++) {
        const char c = gbnf[i];
        if (c == '#') {
            while (i < gbnf.size() && gbnf[i] != '\n') i++;
        } else if (c == '"' || c == '[') {
            const char end = c == '"' ? '"' : ']';
            for (i++; i < gbnf.size() && gbnf[i] != end; i++) i += gbnf[i] == '\\';
        } else if (c == '(') {
            if (++depth > max_depth) throw Error(PYL_E_GRAMMAR, place(gbnf, i) + ": more than " + std::to_string(max_depth) + " nested parentheses");
        } else if (c == ')') {
            depth -= depth > 0;
        }
    }
}

// The engine ends its messages with " at " and the rest of the source: turn that into a place.
[[noreturn]] void throw_at_place(const std::string & gbnf, size_t rule_start, const std::string & said) {
    for (size_t at = said.find(" at "); at != std::string::npos; at = said.find(" at ", at + 1)) {
        const std::string_view rest = std::string_view(said).substr(at + 4);
        if (rest.size() <= gbnf.size() && std::string_view(gbnf).ends_with(rest)) throw Error(PYL_E_GRAMMAR, place(gbnf, gbnf.size() - rest.size()) + ": " + said.substr(0, at));
    }
    throw Error(PYL_E_GRAMMAR, place(gbnf, rule_start) + ": in this rule: " + said.substr(0, 500));
}

void check_syntax(const llama_vocab * vocab, const std::string & gbnf, const std::string & root) {
    if (gbnf.size() > max_bytes) throw Error(PYL_E_GRAMMAR, "a grammar of more than " + std::to_string(max_bytes) + " bytes").numbers(static_cast<int64_t>(gbnf.size()), max_bytes);
    if (const size_t nul = gbnf.find('\0'); nul != std::string::npos) throw Error(PYL_E_GRAMMAR, place(gbnf, nul) + ": a NUL byte");
    check_depth(gbnf);
    llama_grammar_parser parser(vocab);
    size_t at = skip_space(gbnf, 0);
    if (at == gbnf.size()) throw Error(PYL_E_GRAMMAR, "line 1, column 1: the grammar is empty");
    while (at < gbnf.size()) {
        try {
            at = static_cast<size_t>(parser.parse_rule(gbnf.c_str() + at) - gbnf.c_str());
        } catch (const std::exception & error) {
            throw_at_place(gbnf, at, error.what());
        }
        if (parser.rules.size() > max_rules) throw Error(PYL_E_GRAMMAR, place(gbnf, at) + ": more than " + std::to_string(max_rules) + " rules").numbers(static_cast<int64_t>(parser.rules.size()), max_rules);
    }
    for (const auto & [name, id] : parser.symbol_ids) {
        if (id >= parser.rules.size() || parser.rules[id].empty()) {
            const size_t used = gbnf.find(name);
            throw Error(PYL_E_GRAMMAR, place(gbnf, used == std::string::npos ? 0 : used) + ": the rule '" + name + "' is used but not defined");
        }
    }
    if (!parser.symbol_ids.contains(root)) throw Error(PYL_E_GRAMMAR, "line 1, column 1: no rule is named '" + root + "', the start");
}

class LlamaGrammar final : public Grammar {
public:
    explicit LlamaGrammar(llama_grammar * grammar) : grammar_(grammar) { live_counts().grammars++; }
    ~LlamaGrammar() override {
        llama_grammar_free_impl(grammar_);
        live_counts().grammars--;
    }
    std::unique_ptr<Grammar> clone() const override { return std::make_unique<LlamaGrammar>(llama_grammar_clone_impl(*grammar_)); }
    void filter(std::span<Candidate> candidates) override {
        if (const size_t n = llama_grammar_get_stacks(grammar_).size(); n > max_ways) {
            throw Error(PYL_E_GRAMMAR, "the text so far can be read in more than " + std::to_string(max_ways) + " ways under this grammar").numbers(static_cast<int64_t>(n), max_ways);
        }
        llama_token_data_array array{reinterpret_cast<llama_token_data *>(candidates.data()), candidates.size(), -1, false};
        llama_grammar_apply_impl(*grammar_, &array);
        if (!grammar_->awaiting_trigger) forbid_broken_characters(candidates);
    }
    void accept(Token token) override {
        if (is_waiting() && std::exchange(asleep_after_, -1) == token) {  // as the engine would, without searching all of it once more
            const std::string & piece = grammar_->vocab->token_to_piece(token);
            std::string & said = grammar_->trigger_buffer;
            grammar_->trigger_buffer_positions.push_back({token, {said.size(), said.size() + piece.size()}});
            said += piece;
        } else if (is_waiting()) {
            searching([&] { llama_grammar_accept_impl(*grammar_, token); });
        } else {
            llama_grammar_accept_impl(*grammar_, token);
        }
    }
    bool is_waiting() const override { return grammar_->awaiting_trigger; }
    bool allows(Token token) override {
        if (!Grammar::allows(token)) return false;
        if (!is_waiting()) return true;
        if (grammar_->trigger_buffer.size() > max_waiting) return false;
        if (!wakes(token)) {
            asleep_after_ = token;
            return true;
        }
        try {
            clone()->accept(token);
            return true;
        } catch (const std::runtime_error &) {  // "unexpected empty grammar stack": the text that woke it is not of its language
            return false;
        }
    }

private:
    bool wakes(Token token) const {
        const auto & tokens = grammar_->trigger_tokens;
        if (std::find(tokens.begin(), tokens.end(), token) != tokens.end()) return true;
        const std::string text = grammar_->trigger_buffer + grammar_->vocab->token_to_piece(token);
        bool found = false;
        searching([&] { found = std::any_of(grammar_->trigger_patterns.begin(), grammar_->trigger_patterns.end(), [&](const auto & pattern) { return pattern.find(text) != std::string::npos; }); });
        return found;
    }
    // The matcher's recursion takes some two hundred bytes of stack for each byte of text.
    void searching(const std::function<void()> & work) const {
        if (grammar_->trigger_buffer.size() < 4096) return work();
        on_deep_stack(work, (1u << 20) + 512 * grammar_->trigger_buffer.size());
    }
    // The engine puts characters together from bytes without looking whether UTF-8 allows them: overlong ones, halves of
    // surrogate pairs and those beyond the last would pass through any class that names what may not come.
    void forbid_broken_characters(std::span<Candidate> candidates) const {
        const auto [value, n_remain] = grammar_->partial_utf8;
        uint8_t low = 0x00, high = 0xF4;
        if (n_remain == 2 && value == 0x0) low = 0xA0;
        if (n_remain == 2 && value == 0xD) high = 0x9F;
        if (n_remain == 3 && value == 0x0) low = 0x90;
        if (n_remain == 3 && value == 0x4) high = 0x8F;
        for (Candidate & c : candidates) {
            if (c.logit == -std::numeric_limits<float>::infinity() || grammar_->vocab->is_eog(c.id)) continue;
            const auto first = static_cast<uint8_t>(grammar_->vocab->token_to_piece(c.id)[0]);
            if (first < low || first > high) c.logit = -std::numeric_limits<float>::infinity();
        }
    }

    llama_grammar * grammar_;
    Token asleep_after_ = -1;  // the token that allows() last found not to wake it
};

}  // namespace

std::unique_ptr<Grammar> make_llama_grammar(const llama_vocab * vocab, const std::string & gbnf, const std::string & root, const GrammarTriggers * lazy) {
    check_syntax(vocab, gbnf, root);
    std::vector<const char *> patterns;
    if (lazy) {
        for (const std::string & pattern : lazy->patterns) patterns.push_back(pattern.c_str());
    }
    const LogCapture log;
    llama_grammar * grammar = nullptr;
    try {
        grammar = llama_grammar_init_impl(vocab, gbnf.c_str(), root.c_str(), lazy != nullptr, patterns.data(), patterns.size(), lazy ? lazy->tokens.data() : nullptr, lazy ? lazy->tokens.size() : 0);
    } catch (const std::regex_error & error) {
        throw Error(PYL_E_GRAMMAR, std::string("line 1, column 1: a trigger's pattern does not compile: ") + error.what());
    }
    if (!grammar) throw Error(PYL_E_GRAMMAR, "line 1, column 1: " + log.words("the engine refused the grammar"));
    return std::make_unique<LlamaGrammar>(grammar);
}

}  // namespace pyl
