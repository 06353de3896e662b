// GBNF through llama.cpp's own grammar engine. Its parser is driven rule by rule, because its one-call form prints to stderr
// and tells neither line nor column. A grammar is parsed once and shared: what each branch has of its own is how far it has read,
// and forks share that too until one of them reads on.
#include <algorithm>
#include <limits>
#include <regex>
#include <utility>

#include "core/bytes.hpp"
#include "engine/llama/deep_stack.hpp"
#include "engine/llama/grammar_shelf.hpp"
#include "engine/llama/llama_parts.hpp"
#include "engine/llama/masks.hpp"
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

struct FreeGrammar {
    void operator()(llama_grammar * grammar) const { llama_grammar_free_impl(grammar); }
};
using Parsed = std::unique_ptr<llama_grammar, FreeGrammar>;

// What a branch has read.
struct Reading {
    GrammarPlace place;
    bool is_waiting = false;  // for the trigger of a lazy grammar
    std::string said;         // until then
    std::vector<llama_grammar::token_pos> said_tokens;

    void exchange(llama_grammar & grammar) noexcept {
        std::swap(place.stacks, grammar.stacks);
        std::swap(place.so_far, grammar.partial_utf8);
        std::swap(is_waiting, grammar.awaiting_trigger);
        std::swap(said, grammar.trigger_buffer);
        std::swap(said_tokens, grammar.trigger_buffer_positions);
    }
};

}  // namespace

class GrammarCore {
public:
    GrammarCore(Parsed grammar, std::shared_ptr<const Words> words) : grammar_(std::move(grammar)), masks(grammar_->rules, std::move(words)), start(std::make_shared<Reading>()) { start->exchange(*grammar_); }

    void accept(Reading & reading, Token token) {
        const std::scoped_lock lock(mutex_);
        struct Inside {
            Reading & reading;
            llama_grammar & grammar;
            Inside(Reading & r, llama_grammar & g) : reading(r), grammar(g) { reading.exchange(grammar); }
            ~Inside() { reading.exchange(grammar); }
        } const inside(reading, *grammar_);
        llama_grammar_accept_impl(*grammar_, token);
    }
    const std::string & piece(Token token) const { return grammar_->vocab->token_to_piece(token); }
    bool is_trigger(Token token) const { return std::find(grammar_->trigger_tokens.begin(), grammar_->trigger_tokens.end(), token) != grammar_->trigger_tokens.end(); }
    bool has_trigger(const std::string & text) const {
        return std::any_of(grammar_->trigger_patterns.begin(), grammar_->trigger_patterns.end(), [&](const auto & pattern) { return pattern.find(text) != std::string::npos; });
    }

private:
    Parsed grammar_;  // its rules stay as they are; the rest belongs to whoever is inside accept()
    std::mutex mutex_;

public:
    Masks masks;
    const std::shared_ptr<Reading> start;
};

namespace {

class LlamaGrammar final : public Grammar {
public:
    explicit LlamaGrammar(std::shared_ptr<GrammarCore> core) : core_(std::move(core)), reading_(core_->start) { live_counts().grammars++; }
    LlamaGrammar(const LlamaGrammar & other) : core_(other.core_), reading_(other.reading_), state_(other.state_) { live_counts().grammars++; }
    ~LlamaGrammar() override { live_counts().grammars--; }
    std::unique_ptr<Grammar> clone() const override { return std::make_unique<LlamaGrammar>(*this); }

    void filter(std::span<Candidate> candidates) override {
        check_ways();
        if (!is_waiting()) core_->masks.filter(state(), reading_->place, candidates);
    }
    const uint64_t * mask() override {
        check_ways();
        return is_waiting() ? nullptr : core_->masks.work_out(state(), reading_->place);
    }
    const uint64_t * known_mask() override {
        check_ways();
        return is_waiting() ? nullptr : state().known();
    }
    void accept(Token token) override {
        if (reading_.use_count() > 1) reading_ = std::make_shared<Reading>(*reading_);  // forks go on from it
        state_.reset();
        if (is_waiting() && std::exchange(asleep_after_, -1) == token) {  // as the engine would, without searching all of it once more
            const std::string & piece = core_->piece(token);
            std::string & said = reading_->said;
            reading_->said_tokens.push_back({token, {said.size(), said.size() + piece.size()}});
            said += piece;
        } else if (is_waiting()) {
            searching([&] { core_->accept(*reading_, token); });
        } else {
            core_->accept(*reading_, token);
        }
    }
    bool is_waiting() const override { return reading_->is_waiting; }
    bool allows(Token token) override {
        check_ways();
        if (!is_waiting()) {
            const uint64_t * known = state_ ? state_->known() : nullptr;
            return known ? known[static_cast<size_t>(token) / 64] >> token % 64 & 1 : core_->masks.allows(reading_->place, token);
        }
        if (reading_->said.size() > max_waiting) return false;
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
    void check_ways() const {
        if (const size_t n = reading_->place.stacks.size(); n > max_ways) {
            throw Error(PYL_E_GRAMMAR, "the text so far can be read in more than " + std::to_string(max_ways) + " ways under this grammar").numbers(static_cast<int64_t>(n), max_ways);
        }
    }
    Masks::State & state() {
        if (!state_) state_ = core_->masks.find(reading_->place);
        return *state_;
    }
    bool wakes(Token token) const {
        if (core_->is_trigger(token)) return true;
        const std::string text = reading_->said + core_->piece(token);
        bool found = false;
        searching([&] { found = core_->has_trigger(text); });
        return found;
    }
    // The matcher's recursion takes some two hundred bytes of stack for each byte of text.
    void searching(const std::function<void()> & work) const {
        if (reading_->said.size() < 4096) return work();
        on_deep_stack(work, (1u << 20) + 512 * reading_->said.size());
    }

    std::shared_ptr<GrammarCore> core_;
    std::shared_ptr<Reading> reading_;
    std::shared_ptr<Masks::State> state_;  // of what is read, once asked for
    Token asleep_after_ = -1;              // the token that allows() last found not to wake it
};

Parsed parse(const llama_vocab * vocab, const std::string & gbnf, const std::string & root, const GrammarTriggers * lazy) {
    check_syntax(vocab, gbnf, root);
    std::vector<const char *> patterns;
    if (lazy) {
        for (const std::string & pattern : lazy->patterns) patterns.push_back(pattern.c_str());
    }
    const LogCapture log;
    Parsed grammar;
    try {
        grammar.reset(llama_grammar_init_impl(vocab, gbnf.c_str(), root.c_str(), lazy != nullptr, patterns.data(), patterns.size(), lazy ? lazy->tokens.data() : nullptr, lazy ? lazy->tokens.size() : 0));
    } catch (const std::regex_error & error) {
        throw Error(PYL_E_GRAMMAR, std::string("line 1, column 1: a trigger's pattern does not compile: ") + error.what());
    }
    if (!grammar) throw Error(PYL_E_GRAMMAR, "line 1, column 1: " + log.words("the engine refused the grammar"));
    return grammar;
}

// Everything that makes two grammars the same one.
std::string name_of(const std::string & gbnf, const std::string & root, const GrammarTriggers * lazy) {
    ByteWriter out;
    out.put(gbnf);
    out.put(root);
    out.put<uint8_t>(lazy != nullptr);
    if (lazy) {
        for (const std::string & pattern : lazy->patterns) out.put(pattern);
        out.put_all(lazy->tokens.data(), lazy->tokens.size());
    }
    return std::move(out.bytes());
}

}  // namespace

void check_llama_grammar(const std::string & gbnf) { parse(nullptr, gbnf, "root", nullptr); }

std::unique_ptr<Grammar> GrammarShelf::make(const std::string & gbnf, const std::string & root, const GrammarTriggers * lazy) {
    const std::string name = name_of(gbnf, root, lazy);
    const std::scoped_lock lock(mutex_);
    std::shared_ptr<GrammarCore> core;
    if (const auto it = cores_.find(name); it != cores_.end()) core = it->second.lock();
    if (!core) {
        if (!words_) words_ = std::make_shared<const Words>(vocab_);
        core = std::make_shared<GrammarCore>(parse(vocab_, gbnf, root, lazy), words_);
        std::erase_if(cores_, [](const auto & item) { return item.second.expired(); });
        cores_[name] = core;
    }
    newest_ = core;
    return std::make_unique<LlamaGrammar>(std::move(core));
}

GrammarShelf::GrammarShelf(const llama_vocab * vocab) : vocab_(vocab) {}
GrammarShelf::~GrammarShelf() = default;

}  // namespace pyl
