#include "core/match.hpp"

#include "core/error.hpp"

namespace pyl {

Match match_grammar(const Model & model, const std::string & gbnf, const std::string & root, std::string_view text) {
    const std::unique_ptr<Grammar> grammar = model.grammar({false, gbnf, root});
    const std::vector<Token> tokens = model.tokenize(text, 0);
    // Some tokenizers put a space in front, lower letters or drop what they do not know: that would be another text.
    std::string spelled;
    for (const Token token : tokens) spelled += model.piece(token, false);
    if (spelled != text) throw Error(PYL_E_UNSUPPORTED, "the tokens of this vocabulary do not spell the text as it is");
    Match out;
    for (const Token token : tokens) {
        if (!grammar->allows(token)) return out;
        grammar->accept(token);
        out.n_bytes += model.piece(token, false).size();
    }
    for (Token token = 0; token < model.info().n_vocab && !out.is_complete; token++) out.is_complete = (model.token_flags(token) & PYL_TOKEN_EOG) && grammar->allows(token);
    return out;
}

}  // namespace pyl
