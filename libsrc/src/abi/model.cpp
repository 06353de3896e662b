#include "abi/guard.hpp"
#include "abi/handles.hpp"
#include "core/json.hpp"
#include "core/match.hpp"
#include "core/registry.hpp"

namespace pyl {

static HandleTable<Model, pyl_model> & models() {
    static auto * table = new HandleTable<Model, pyl_model>("model");  // never destroyed: a thread may still call at exit
    return *table;
}

std::shared_ptr<Model> model_of(const pyl_model * handle) { return models().find(handle); }

size_t live_models() { return models().size(); }

static void check_tokens(const Model & model, const int32_t * tokens, size_t n) {
    need(tokens != nullptr || n == 0, "tokens is NULL");
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || tokens[i] >= model.info().n_vocab) {
            throw Error(PYL_E_INVALID, "token " + std::to_string(tokens[i]) + " is outside the vocabulary of " + std::to_string(model.info().n_vocab)).at(i);
        }
    }
}

const Engine & engine_for(const std::string & path) {
    if (path.starts_with("stub:")) return stub_engine();
#if defined(PYL_WITH_LLAMA)
    return llama_engine();
#else
    throw Error(PYL_E_UNSUPPORTED, "this library was built without llama.cpp (preset stub); it opens only \"stub:\" models");
#endif
}

std::string path_text(const char * path, size_t n) {
    need(path != nullptr || n == 0, "the path is NULL");
    std::string out = n ? std::string(path, n) : std::string();
    need(!out.empty() && out.find('\0') == std::string::npos, "the path is empty or holds a NUL byte");
    return out;
}

ModelParams model_params_of(const pyl_model_params * given) {
    pyl_model_params p;
    pyl_model_params_init(&p, sizeof p);
    if (given) p = read_struct(given, p);
    return {p.n_gpu_layers, p.use_mmap != 0, p.vocab_only != 0};
}

static std::string_view text_of(const char * text, size_t n) {
    need(text != nullptr || n == 0, "the text is NULL");
    return n ? std::string_view(text, n) : std::string_view();
}

}  // namespace pyl

using namespace pyl;

void pyl_model_params_init(pyl_model_params * params, uint32_t struct_size) {
    init_struct(params, struct_size, {sizeof(pyl_model_params), 0, 1, 0});
}

int32_t pyl_model_open(pyl_model ** out, const char * path, size_t n_path, const pyl_model_params * params) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        const std::string file = path_text(path, n_path);
        const ModelParams p = model_params_of(params);
        *out = models().add(open_shared(engine_for(file), file, p));
    });
}

int32_t pyl_model_free(pyl_model * model) {
    return guarded([&] { models().remove(model); });
}

int32_t pyl_model_describe(const pyl_model * model, pyl_model_info * out) {
    return guarded([&] { write_struct(out, model_of(model)->info()); });
}

int32_t pyl_model_metadata(const pyl_model * model, pyl_text ** out) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        *out = new_text(model_of(model)->metadata());
    });
}

int32_t pyl_tokenize(const pyl_model * model, const char * text, size_t n_text, uint32_t flags, int32_t * tokens, size_t capacity, size_t * n_tokens) {
    return guarded([&] {
        need(n_tokens != nullptr && (tokens != nullptr || capacity == 0), "an output is NULL");
        need((flags & ~(PYL_TOKENIZE_ADD_SPECIAL | PYL_TOKENIZE_PARSE_SPECIAL)) == 0, "unknown flags");
        const std::string_view view = text_of(text, n_text);
        if (const size_t ok = utf8_valid_prefix(view); ok != view.size()) throw Error(PYL_E_FORMAT, "the text is not UTF-8 at byte " + std::to_string(ok));
        const std::vector<Token> found = model_of(model)->tokenize(view, flags);
        *n_tokens = found.size();
        if (found.size() > capacity) throw Error(PYL_E_INVALID, "the token buffer is too small").numbers(static_cast<int64_t>(found.size()), static_cast<int64_t>(capacity));
        std::copy(found.begin(), found.end(), tokens);
    });
}

int32_t pyl_detokenize(const pyl_model * model, const int32_t * tokens, size_t n_tokens, uint32_t flags, pyl_text ** out) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        need((flags & ~PYL_DETOKENIZE_SPECIAL) == 0, "unknown flags");
        const auto found = model_of(model);
        check_tokens(*found, tokens, n_tokens);
        std::string bytes;
        for (size_t i = 0; i < n_tokens; i++) bytes += found->piece(tokens[i], (flags & PYL_DETOKENIZE_SPECIAL) != 0);
        *out = new_text(std::move(bytes));
    });
}

int32_t pyl_token_flags(const pyl_model * model, const int32_t * tokens, size_t n_tokens, uint32_t * flags) {
    return guarded([&] {
        need(flags != nullptr || n_tokens == 0, "flags is NULL");
        const auto found = model_of(model);
        check_tokens(*found, tokens, n_tokens);
        for (size_t i = 0; i < n_tokens; i++) flags[i] = found->token_flags(tokens[i]);
    });
}

int32_t pyl_chat_render(const pyl_model * model, const char * request, size_t n_request, pyl_text ** out) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        *out = new_text(model_of(model)->chat_render(text_of(request, n_request)));
    });
}

static const Engine & text_engine() {
#if defined(PYL_WITH_LLAMA)
    return llama_engine();
#else
    return stub_engine();
#endif
}

int32_t pyl_chat_parse(const char * request, size_t n_request, pyl_text ** out) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        *out = new_text(text_engine().chat_parse(text_of(request, n_request)));
    });
}

int32_t pyl_schema_to_gbnf(const char * schema, size_t n_schema, pyl_text ** out) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        *out = new_text(text_engine().schema_to_gbnf(text_of(schema, n_schema)));
    });
}

int32_t pyl_grammar_match(const pyl_model * model, const char * gbnf, size_t n_gbnf, const char * root, const char * text, size_t n_text, size_t * n_matched_bytes, int32_t * is_complete) {
    return guarded([&] {
        need(n_matched_bytes != nullptr && is_complete != nullptr, "an output is NULL");
        const std::string_view view = text_of(text, n_text);
        if (const size_t ok = utf8_valid_prefix(view); ok != view.size()) throw Error(PYL_E_FORMAT, "the text is not UTF-8 at byte " + std::to_string(ok));
        const Match found = match_grammar(*model_of(model), std::string(text_of(gbnf, n_gbnf)), root ? root : "root", view);
        *n_matched_bytes = found.n_bytes;
        *is_complete = found.is_complete;
    });
}
