// What the files of the llama engine share.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/error.hpp"
#include "core/log.hpp"
#include "core/store.hpp"
#include "engine/engine.hpp"
#include "engine/llama/grammar_shelf.hpp"
#include "ggml-cpu.h"
#include "llama.h"

struct common_chat_templates;

namespace pyl {

struct FreeModel {
    void operator()(llama_model * model) const { llama_model_free(model); }
};

// A chat template that was parsed once; opaque here so that only chat.cpp sees llama.cpp's heavy headers.
struct ChatTemplates;

class LlamaModel final : public Model {
public:
    LlamaModel(const std::string & path, const ModelParams & params);
    ~LlamaModel() override;

    const pyl_model_info & info() const override { return info_; }
    std::string metadata() const override;
    std::vector<Token> tokenize(std::string_view text, uint32_t flags) const override;
    std::string piece(Token token, bool special) const override;
    uint32_t token_flags(Token token) const override { return flags_[static_cast<size_t>(token)]; }
    std::unique_ptr<Grammar> grammar(const GrammarSource & source) const override;
    size_t n_sections() const override;
    std::vector<Token> suppressed() const override;
    std::string chat_render(std::string_view request) const override;
    ModelIdentity identity() const override;
    std::unique_ptr<Context> open(const ContextParams & params) const override;
    std::shared_ptr<Projector> open_projector(std::shared_ptr<const Model> self, const std::string & path, const ProjectorParams & params) const override;
    std::unique_ptr<EmbedContext> open_embedder(const EmbedderParams & params) const override;

    llama_model * raw() const { return model_.get(); }
    void need_decoder() const;  // or PYL_E_UNSUPPORTED
    const llama_vocab * vocab() const { return llama_model_get_vocab(model_.get()); }

private:
    GrammarShelf & grammars() const;
    std::unique_ptr<Grammar> chat_grammar(std::string_view rendered) const;
    std::string chat_render_here(std::string_view request) const;

    std::unique_ptr<llama_model, FreeModel> model_;
    ModelParams params_;
    std::string name_;
    uint64_t fingerprint_;
    pyl_model_info info_{};
    std::vector<uint8_t> flags_;
    std::unique_ptr<GrammarShelf> grammars_; 
    mutable std::mutex chat_mutex_;
    mutable std::map<std::string, std::shared_ptr<ChatTemplates>> chat_;  // by override source; "" is the model's own
};

// Opens nothing the engine would only half explain; PYL_E_IO or PYL_E_FORMAT.
void check_gguf_file(const std::string & path);
void check_divisors(const std::string & path);
// The same for a projector, and that it is whole; PYL_E_PROJECTOR when it is none.
void check_projector_file(const std::string & path);

struct FreeContext {
    void operator()(llama_context * context) const;
};
struct FreePool {
    void operator()(ggml_threadpool * pool) const;
};
// An engine context and the threads it computes on, freed after it.
struct LlamaRun {
    std::unique_ptr<ggml_threadpool, FreePool> pool;
    std::unique_ptr<llama_context, FreeContext> context;
};
// The context alone, for looking at. `flash_attn` is what was asked for, and afterwards what it is.
std::unique_ptr<llama_context, FreeContext> init_llama_context(const LlamaModel & model, llama_context_params params, int32_t & flash_attn);
LlamaRun open_llama_run(const LlamaModel & model, llama_context_params params, int32_t & flash_attn);
// The engine's params, or a refusal of what would abort it.
llama_context_params llama_params_of(const LlamaModel & model, const ContextParams & params);
// Refuses a context that the engine can make and a store cannot be right on.
void need_forkable(const LlamaModel & model, const ContextParams & params, llama_context * context, int32_t flash_attn);
Memory memory_of(const llama_context * context, int32_t flash_attn, uint64_t output_bytes);
Memory llama_dry_run(const std::string & path, const ModelParams & params, const std::function<ContextParams(const pyl_model_info &)> & context);
ProjectorMemory llama_projector_dry_run(const std::string & path, const ProjectorParams & params, const PictureShape & picture);
std::unique_ptr<Context> open_llama_context(const LlamaModel & model, const ContextParams & params);
std::unique_ptr<EmbedContext> open_llama_embedder(const LlamaModel & model, const EmbedderParams & params);
// Whether a grammar can be put on a branch with whatever vocabulary, or PYL_E_GRAMMAR.
void check_llama_grammar(const std::string & gbnf);
std::string llama_chat_parse(std::string_view request);
std::string llama_schema_to_gbnf(std::string_view schema);

}  // namespace pyl
