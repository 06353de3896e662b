// The grammars of one model. Texts under the same one share what was worked out about it.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.hpp"

struct llama_vocab;

namespace pyl {

class GrammarCore;
class Words;

// Text or tokens that wake a lazy grammar; a pattern's first group, or else its match, is where the grammar begins.
struct GrammarTriggers {
    std::vector<std::string> patterns;
    std::vector<Token> tokens;
};

// From JSON as pyl_chat_render gives them, or PYL_E_FORMAT.
GrammarTriggers read_triggers(std::string_view list);

// Safe from any thread.
class GrammarShelf {
public:
    explicit GrammarShelf(const llama_vocab * vocab);
    ~GrammarShelf();
    std::unique_ptr<Grammar> make(const std::string & gbnf, const std::string & root, const GrammarTriggers * lazy = nullptr);

private:
    const llama_vocab * vocab_;
    std::mutex mutex_;
    std::shared_ptr<const Words> words_;  // made for the first grammar
    std::map<std::string, std::weak_ptr<GrammarCore>> cores_;
    std::shared_ptr<GrammarCore> newest_;  // outlives its branches: the next one often has the same
};

}  // namespace pyl
