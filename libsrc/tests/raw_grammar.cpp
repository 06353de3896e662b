// Masks against the engine's own masking, token by token over the whole vocabulary, along random texts of many grammars.
//   raw_grammar MODEL ROUNDS    prints the states compared; says where they differ and fails
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/llama/masks.hpp"
#include "llama-vocab.h"
#include "llama.h"

using namespace pyl;

namespace {

constexpr float illegal = -std::numeric_limits<float>::infinity();

const char * const grammars[] = {
    R"~(root ::= "yes" | "no" | "yesterday")~",
    R"~(root ::= "{" ws "\"name\":" ws string "," ws "\"age\":" ws [0-9]+ ws "}"
string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
ws ::= [ \n]{0,3})~",
    R"~(root ::= [^a]+)~",
    R"~(root ::= .+ "!")~",
    R"~(root ::= [a-z ]{1,12} ("." | "?" [é-ü]* | [一-龥]+ | [😀-😿]))~",
    R"~(root ::= expr
expr ::= term ([-+*/] term)*
term ::= "x" | [0-9]+ | "(" expr ")")~",
    R"~(root ::= ("a" | "aa" | "ab" | [a-c]+ | "abc" root)*)~",
    R"~(root ::= <[70]> "b" | !<[71]> [c-z]* <[72]> root | "q" .)~",
    R"~(root ::= "é" "ü"* [^\x01-\x7F]* | "日本" .*)~",
    R"~(root ::= ([^\x80-\U0010FFFF] | "\n")* | [\u0400-\u04FF]+)~",
    R"~(root ::= "")~",
};

struct FreeGrammar {
    void operator()(llama_grammar * grammar) const { llama_grammar_free_impl(grammar); }
};

// As it would be done without anything remembered: the engine's masking, and no broken characters.
std::vector<bool> legal_of(const llama_grammar & grammar, const llama_vocab * vocab) {
    std::vector<llama_token_data> data;
    for (Token t = 0; t < static_cast<Token>(vocab->n_tokens()); t++) data.push_back({t, 0, 0});
    llama_token_data_array array{data.data(), data.size(), -1, false};
    llama_grammar_apply_impl(grammar, &array);
    const auto [value, n_remain] = grammar.partial_utf8;
    std::vector<bool> out;
    for (const auto & d : data) {
        uint8_t low = 0x00, high = 0xF4;
        if (n_remain == 2 && value == 0x0) low = 0xA0;
        if (n_remain == 2 && value == 0xD) high = 0x9F;
        if (n_remain == 3 && value == 0x0) low = 0x90;
        if (n_remain == 3 && value == 0x4) high = 0x8F;
        const auto first = static_cast<uint8_t>(vocab->token_to_piece(d.id)[0]);
        out.push_back(d.logit == 0 && (vocab->is_eog(d.id) || (first >= low && first <= high)));
    }
    return out;
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 3) return 2;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    const std::unique_ptr<llama_model, void (*)(llama_model *)> model(llama_model_load_from_file(argv[1], params), llama_model_free);
    if (!model) return 2;
    const llama_vocab * vocab = llama_model_get_vocab(model.get());
    const auto words = std::make_shared<const Words>(vocab);
    const size_t n = words->size();
    std::mt19937 rng(7);
    size_t n_states = 0, n_inside = 0, n_wrong = 0;
    for (const char * gbnf : grammars) {
        const std::unique_ptr<llama_grammar, FreeGrammar> start(llama_grammar_init_impl(vocab, gbnf, "root", false, nullptr, 0, nullptr, 0));
        if (!start) return 2;
        Masks masks(start->rules, words), forgetful(start->rules, words, 4096);
        const auto first = start->stacks;
        for (int round = std::atoi(argv[2]); round > 0; round--) {
            llama_grammar & grammar = *start;  // the same rules, so that places found again are found again
            grammar.stacks = first;
            grammar.partial_utf8 = {};
            for (int step = 0; step < 24; step++) {
                const std::vector<bool> want = legal_of(grammar, vocab);
                const GrammarPlace place{grammar.stacks, grammar.partial_utf8};
                n_states++;
                n_inside += place.so_far.n_remain > 0;
                const auto check = [&](Token token, bool got, const char * how) {
                    if (got == want[static_cast<size_t>(token)] || n_wrong++ >= 20) return;
                    std::fprintf(stderr, "%s\n    step %d: token %d '%s' is %s, by %s it is not\n", gbnf, step, token, vocab->token_to_piece(token).c_str(), got ? "illegal" : "legal", how);
                };
                const auto state = masks.find(place);
                std::vector<Candidate> few;
                for (int i = 0; i < 40; i++) few.push_back({static_cast<Token>(rng() % n), 1.5f, 0});
                for (const Candidate & c : few) check(c.id, masks.allows(place, c.id), "itself");
                masks.filter(*state, place, few);
                for (const Candidate & c : few) check(c.id, c.logit == 1.5f, "a few"), n_wrong += c.logit != 1.5f && c.logit != illegal;
                const uint64_t * bits = masks.work_out(*state, place);
                for (Token t = 0; t < static_cast<Token>(n); t++) check(t, bits[static_cast<size_t>(t) / 64] >> t % 64 & 1, "the mask");
                if (state->known() != bits || masks.find(place) != state) n_wrong++;
                const auto other = forgetful.find(place);
                const uint64_t * again = forgetful.work_out(*other, place);
                if (!std::equal(bits, bits + (n + 63) / 64, again) || forgetful.bytes() > 4096) n_wrong++;
                std::vector<Token> next;
                for (Token t = 0; t < static_cast<Token>(n); t++) {
                    if (want[static_cast<size_t>(t)] && !vocab->is_eog(t)) next.push_back(t);
                }
                if (next.empty()) break;
                // Into the middle of characters as often as can be.
                std::vector<Token> high;
                for (const Token t : next) {
                    if (static_cast<uint8_t>(vocab->token_to_piece(t)[0]) >= 0x80) high.push_back(t);
                }
                const auto & from = !high.empty() && rng() % 2 ? high : next;
                llama_grammar_accept_impl(grammar, from[rng() % from.size()]);
            }
        }
    }
    std::printf("states %zu\ninside %zu\nwrong %zu\n", n_states, n_inside, n_wrong);
    return n_wrong ? 1 : 0;
}
