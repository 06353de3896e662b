#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>

#include "core/bytes.hpp"
#include "core/json.hpp"
#include "core/registry.hpp"
#include "engine/llama/assertion.hpp"
#include "engine/llama/llama_parts.hpp"

namespace pyl {

// Opens nothing the engine would only half explain: a missing file, a folder, or something that is not GGUF.
void check_gguf_file(const std::string & path) {
    std::error_code ignored;
    if (std::filesystem::is_directory(path_of(path), ignored)) throw Error(PYL_E_IO, path + " is a folder, not a model file");
    std::ifstream file(path_of(path), std::ios::binary);
    if (!file) throw Error(PYL_E_IO, "cannot open " + path + ": " + std::strerror(errno));
    char magic[4] = {};
    file.read(magic, sizeof magic);
    if (file.gcount() != sizeof magic || std::memcmp(magic, "GGUF", sizeof magic) != 0) throw Error(PYL_E_FORMAT, path + " is not a GGUF file (it does not begin with \"GGUF\")");
}

// What tells this file from another of the same make: its size, its beginning (the header, most of it) and a page of tensor data here
// and there. A few hundred kilobytes are read, whatever the file's size.
static uint64_t fingerprint_of(const std::string & path) {
    std::ifstream file(path_of(path), std::ios::binary | std::ios::ate);
    const auto size = static_cast<uint64_t>(std::max<std::streamoff>(0, file.tellg()));
    uint64_t hash = checksum({reinterpret_cast<const char *>(&size), sizeof size});
    std::string page(256 << 10, '\0');
    const auto add = [&](uint64_t at, size_t n) {
        file.clear();
        file.seekg(static_cast<std::streamoff>(at));
        file.read(page.data(), static_cast<std::streamsize>(n));
        hash = checksum({page.data(), static_cast<size_t>(std::max<std::streamsize>(0, file.gcount()))}, hash);
    };
    add(0, page.size());
    for (uint64_t i = 1; i <= 64; i++) add(size / 65 * i, 4096);
    return hash;
}

static int32_t vocab_type_of(const llama_vocab * vocab) {
    switch (llama_vocab_type(vocab)) {
        case LLAMA_VOCAB_TYPE_NONE: return PYL_VOCAB_NONE;
        case LLAMA_VOCAB_TYPE_SPM: return PYL_VOCAB_SPM;
        case LLAMA_VOCAB_TYPE_BPE: return PYL_VOCAB_BPE;
        case LLAMA_VOCAB_TYPE_WPM: return PYL_VOCAB_WPM;
        case LLAMA_VOCAB_TYPE_UGM: return PYL_VOCAB_UGM;
        case LLAMA_VOCAB_TYPE_RWKV: return PYL_VOCAB_RWKV;
        default: return PYL_VOCAB_OTHER;
    }
}

static uint8_t flags_of(const llama_vocab * vocab, Token token) {
    const auto attr = static_cast<unsigned>(llama_vocab_get_attr(vocab, token));
    unsigned flags = 0;
    if (llama_vocab_is_eog(vocab, token)) flags |= PYL_TOKEN_EOG;
    if (attr & LLAMA_TOKEN_ATTR_CONTROL) flags |= PYL_TOKEN_CONTROL;
    if (attr & LLAMA_TOKEN_ATTR_BYTE) flags |= PYL_TOKEN_BYTE;
    if (attr & LLAMA_TOKEN_ATTR_UNUSED) flags |= PYL_TOKEN_UNUSED;
    if (attr & LLAMA_TOKEN_ATTR_UNKNOWN) flags |= PYL_TOKEN_UNKNOWN;
    if (attr & LLAMA_TOKEN_ATTR_USER_DEFINED) flags |= PYL_TOKEN_USER;
    return static_cast<uint8_t>(flags);
}

LlamaModel::LlamaModel(const std::string & path, const ModelParams & params) : params_(params), name_(path_of(path).filename().string()) {
    check_gguf_file(path);
    check_divisors(path);
    fingerprint_ = params.no_alloc ? 0 : fingerprint_of(path);
    llama_model_params p = llama_model_default_params();
    p.n_gpu_layers = params.n_gpu_layers;
    ggml_backend_dev_t no_device[] = {nullptr};
    if (params.n_gpu_layers == 0) p.devices = no_device;  // or large batches would go to one all the same, with buffers that no plan has
    p.no_alloc = params.no_alloc;
    p.load_mode = params.use_mmap && !params.no_alloc ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    p.vocab_only = params.vocab_only;
    const LogCapture log;
    const AssertionScope assertions;
    model_.reset(llama_model_load_from_file(path.c_str(), p));
    if (!model_) {
        const std::string words = log.words("it gave no reason");
        const bool memory = words.find("failed to allocate") != std::string::npos || words.find("bad_alloc") != std::string::npos || words.find("unable to allocate") != std::string::npos;
        throw Error(memory ? PYL_E_OUT_OF_MEMORY : PYL_E_FORMAT, "the engine cannot load " + path + ": " + words);
    }
    const llama_model * m = model_.get();
    const llama_vocab * v = vocab();
    info_.struct_size = sizeof info_;
    info_.vocab_type = vocab_type_of(v);
    info_.n_vocab = llama_vocab_n_tokens(v);
    info_.add_bos = llama_vocab_get_add_bos(v), info_.add_eos = llama_vocab_get_add_eos(v);
    info_.bos = llama_vocab_bos(v), info_.eos = llama_vocab_eos(v), info_.eot = llama_vocab_eot(v);
    info_.sep = llama_vocab_sep(v), info_.nl = llama_vocab_nl(v), info_.pad = llama_vocab_pad(v);
    if (!params.vocab_only) {
        info_.n_ctx_train = llama_model_n_ctx_train(m);
        info_.n_embd = llama_model_n_embd(m), info_.n_embd_inp = llama_model_n_embd_inp(m);
        info_.n_layer = llama_model_n_layer(m), info_.n_head = llama_model_n_head(m), info_.n_head_kv = llama_model_n_head_kv(m);
        info_.n_swa = llama_model_n_swa(m);
        info_.is_recurrent = llama_model_is_recurrent(m), info_.is_hybrid = llama_model_is_hybrid(m);
        info_.has_encoder = llama_model_has_encoder(m), info_.has_decoder = llama_model_has_decoder(m);
        info_.n_params = llama_model_n_params(m), info_.n_bytes = llama_model_size(m);
    }
    if (params.no_alloc) return;
    if (info_.vocab_type != PYL_VOCAB_NONE) {
        for (Token t = 0; t < info_.n_vocab; t++) flags_.push_back(flags_of(v, t));
    } else {
        flags_.assign(static_cast<size_t>(info_.n_vocab), 0);
    }
    grammars_ = std::make_unique<GrammarShelf>(v);
    live_counts().weights++;
}

LlamaModel::~LlamaModel() {
    if (model_ && !params_.no_alloc) live_counts().weights--;
}

// The engine's two-step string calls: the length first, then the text.
template <typename Get>
static std::string read_string(const Get & get) {
    const int32_t n = get(nullptr, 0);
    if (n < 0) return "";
    std::string text(static_cast<size_t>(n) + 1, '\0');
    get(text.data(), text.size());
    text.resize(static_cast<size_t>(n));
    return text;
}

std::string LlamaModel::metadata() const {
    const llama_model * m = model_.get();
    std::string out = "{\"\":" + json_quote(read_string([&](char * b, size_t n) { return llama_model_desc(m, b, n); }));
    for (int32_t i = 0; i < llama_model_meta_count(m); i++) {
        const std::string key = read_string([&](char * b, size_t n) { return llama_model_meta_key_by_index(m, i, b, n); });
        if (key.empty()) continue;
        out += "," + json_quote(key) + ":" + json_quote(read_string([&](char * b, size_t n) { return llama_model_meta_val_str_by_index(m, i, b, n); }));
    }
    return out + "}";
}

std::vector<Token> LlamaModel::tokenize(std::string_view text, uint32_t flags) const {
    if (info_.vocab_type == PYL_VOCAB_NONE) throw Error(PYL_E_UNSUPPORTED, "this model file carries no vocabulary");
    if (text.size() > INT32_MAX) throw Error(PYL_E_INVALID, "text of more than 2 GiB");
    std::vector<Token> out(text.size() / 3 + 8);
    const auto run = [&] {
        return llama_tokenize(vocab(), text.data(), static_cast<int32_t>(text.size()), out.data(), static_cast<int32_t>(out.size()), (flags & PYL_TOKENIZE_ADD_SPECIAL) != 0,
                              (flags & PYL_TOKENIZE_PARSE_SPECIAL) != 0);
    };
    int32_t n = run();
    if (n == INT32_MIN) throw Error(PYL_E_INVALID, "the text is too long for the tokenizer");
    if (n < 0) {
        out.resize(static_cast<size_t>(-n));
        n = run();
    }
    out.resize(static_cast<size_t>(n));
    return out;
}

std::string LlamaModel::piece(Token token, bool special) const {
    if (info_.vocab_type == PYL_VOCAB_NONE) throw Error(PYL_E_UNSUPPORTED, "this model file carries no vocabulary");
    std::string out(32, '\0');
    int32_t n = llama_token_to_piece(vocab(), token, out.data(), static_cast<int32_t>(out.size()), 0, special);
    if (n < 0) {
        out.resize(static_cast<size_t>(-n));
        n = llama_token_to_piece(vocab(), token, out.data(), static_cast<int32_t>(out.size()), 0, special);
    }
    out.resize(static_cast<size_t>(n));
    return out;
}

GrammarShelf & LlamaModel::grammars() const {
    if (info_.vocab_type == PYL_VOCAB_NONE) throw Error(PYL_E_UNSUPPORTED, "this model file carries no vocabulary, so nothing can be constrained");
    return *grammars_;
}

std::unique_ptr<Grammar> LlamaModel::grammar(const GrammarSource & source) const {
    if (source.is_chat) return chat_grammar(source.text);
    if (!source.is_lazy) return grammars().make(source.text, source.root);
    const GrammarTriggers triggers = read_triggers(source.triggers);
    return grammars().make(source.text, source.root, &triggers);
}

size_t LlamaModel::n_sections() const {
    const llama_rope_type type = llama_model_rope_type(raw());
    return type == LLAMA_ROPE_TYPE_MROPE || type == LLAMA_ROPE_TYPE_IMROPE ? 4 : 1;
}

std::vector<Token> LlamaModel::suppressed() const {
    int32_t n = 0;
    const llama_token * tokens = llama_vocab_get_suppress_tokens(vocab(), &n);
    return tokens ? std::vector<Token>(tokens, tokens + n) : std::vector<Token>();
}

ModelIdentity LlamaModel::identity() const {
    return {"llama.cpp " PYL_ENGINE_COMMIT, name_ + " (" + read_string([&](char * b, size_t n) { return llama_model_desc(raw(), b, n); }) + ")", fingerprint_};
}

std::unique_ptr<EmbedContext> LlamaModel::open_embedder(const EmbedderParams & params) const {
    if (params_.vocab_only) throw Error(PYL_E_UNSUPPORTED, "the model was opened with vocab_only: it has no weights to run");
    if ((info_.has_encoder && info_.has_decoder) || llama_model_is_diffusion(raw())) throw Error(PYL_E_UNSUPPORTED, "embeddings of this kind of model are not supported");
    return open_llama_embedder(*this, params);
}

void LlamaModel::need_decoder() const {
    if (params_.vocab_only) throw Error(PYL_E_UNSUPPORTED, "the model was opened with vocab_only: it has no weights to run");
    if (info_.has_encoder || !info_.has_decoder || llama_model_is_diffusion(raw())) throw Error(PYL_E_UNSUPPORTED, "a store needs a decoder-only model; this one is not");
}

std::unique_ptr<Context> LlamaModel::open(const ContextParams & params) const {
    need_decoder();
    return open_llama_context(*this, params);
}

}  // namespace pyl
