#include <algorithm>

#include "engine/llama/llama_parts.hpp"
#include "ggml-cpu.h"

namespace pyl {

namespace {

ggml_type ggml_type_of(int32_t type) {
    switch (type) {
        case PYL_KV_F16: return GGML_TYPE_F16;
        case PYL_KV_F32: return GGML_TYPE_F32;
        case PYL_KV_BF16: return GGML_TYPE_BF16;
        case PYL_KV_Q8_0: return GGML_TYPE_Q8_0;
        case PYL_KV_Q4_0: return GGML_TYPE_Q4_0;
        case PYL_KV_Q4_1: return GGML_TYPE_Q4_1;
        case PYL_KV_Q5_0: return GGML_TYPE_Q5_0;
        case PYL_KV_Q5_1: return GGML_TYPE_Q5_1;
        case PYL_KV_IQ4_NL: return GGML_TYPE_IQ4_NL;
        default: throw Error(PYL_E_INVALID, "unknown KV type " + std::to_string(type));
    }
}

struct FreeContext {
    void operator()(llama_context * context) const { llama_free(context); }
};
struct FreePool {
    void operator()(ggml_threadpool * pool) const { ggml_threadpool_free(pool); }
};

class LlamaContext final : public Context {
public:
    LlamaContext(llama_context * context, const ContextParams & params, int32_t flash_attn)
        : context_(context), flash_attn_(flash_attn), n_vocab_(static_cast<size_t>(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context))))) {
        live_counts().contexts++;
        // One pool for the life of the context (without one the engine starts threads for every dispatch); idle threads sleep.
        ggml_threadpool_params p = ggml_threadpool_params_default(static_cast<int>(params.n_threads));
        p.poll = 0;
        pool_.reset(ggml_threadpool_new(&p));
        llama_attach_threadpool(context, pool_.get(), pool_.get());
        one_.assign(params.n_batch, 1);
        seq_at_.resize(params.n_batch);
    }
    ~LlamaContext() override {
        context_.reset();  // before the pool it computes on
        live_counts().contexts--;
    }

    uint32_t n_ctx() const override { return llama_n_ctx(context_.get()); }
    int32_t flash_attn() const override { return flash_attn_; }

    int32_t decode(const Batch & batch) override {
        Batch & rows = const_cast<Batch &>(batch);  // the engine's struct is not const-correct; it only reads
        for (size_t i = 0; i < rows.size(); i++) seq_at_[i] = &rows.seq[i];
        const llama_batch raw{static_cast<int32_t>(rows.size()), rows.token.data(), nullptr, rows.pos.data(), one_.data(), seq_at_.data(), rows.output.data()};
        int32_t rc = -3;
        try {
            rc = llama_decode(context_.get(), raw);
        } catch (const std::exception & error) {
            log_add(LogLevel::error, std::string("decode threw: ") + error.what());
        }
        // Rows come in the order they were asked for; after "no room" and "invalid" the earlier ones still stand.
        if (rc == 0) logits_ = llama_get_logits(context_.get());
        return rc;
    }
    const float * logits(size_t i) const override { return logits_ + i * n_vocab_; }

    void seq_copy(Seq from, Seq to) override { llama_memory_seq_cp(memory(), from, to, -1, -1); }
    void seq_remove(Seq seq) override { llama_memory_seq_rm(memory(), seq, -1, -1); }
    void seq_keep(Seq seq) override { llama_memory_seq_keep(memory(), seq); }

private:
    llama_memory_t memory() const { return llama_get_memory(context_.get()); }

    std::unique_ptr<ggml_threadpool, FreePool> pool_;
    std::unique_ptr<llama_context, FreeContext> context_;
    int32_t flash_attn_;
    size_t n_vocab_;
    const float * logits_ = nullptr;
    std::vector<int32_t> one_;
    std::vector<llama_seq_id *> seq_at_;
};

}  // namespace

std::unique_ptr<Context> open_llama_context(const LlamaModel & model, const ContextParams & params) {
    llama_context_params p = llama_context_default_params();
    // The engine cuts n_batch down to the n_ctx it is given, and only then rounds that up; a dispatch between the two would abort.
    p.n_ctx = (params.n_ctx + 255) / 256 * 256;
    p.n_batch = p.n_ubatch = params.n_batch;
    p.n_seq_max = params.n_seq_max;
    p.n_outputs_max = params.n_seq_max;  // one row of logits a branch; 0 would size the buffers for n_batch of them
    p.n_threads = p.n_threads_batch = static_cast<int32_t>(params.n_threads);
    p.type_k = ggml_type_of(params.type_k);
    p.type_v = ggml_type_of(params.type_v);
    p.kv_unified = true;  // otherwise a fork would copy cells, and a partial copy aborts
    p.swa_full = params.swa_full;
    p.no_perf = true;
    const LogCapture log;
    for (const int32_t flash : {PYL_FLASH_ATTN_ON, PYL_FLASH_ATTN_OFF}) {
        if (params.flash_attn != PYL_FLASH_ATTN_AUTO && params.flash_attn != flash) continue;
        p.flash_attn_type = flash == PYL_FLASH_ATTN_ON ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        std::unique_ptr<llama_context, FreeContext> context(llama_init_from_model(model.raw(), p));
        if (!context) continue;
        if (!llama_get_memory(context.get())) throw Error(PYL_E_UNSUPPORTED, "this model keeps no memory between decodes, so there is nothing to fork");
        if (llama_n_batch(context.get()) < std::min(params.n_batch, llama_n_ctx(context.get()))) throw Error(PYL_E_INTERNAL, "the engine opened the context with a smaller n_batch than asked for");
        return std::make_unique<LlamaContext>(context.release(), params, flash);
    }
    const std::string words = log.words("the engine gave no reason");
    const bool memory = words.find("alloc") != std::string::npos;
    throw Error(memory ? PYL_E_OUT_OF_MEMORY : PYL_E_UNSUPPORTED, "the engine cannot open a context of " + std::to_string(params.n_ctx) + " cells: " + words);
}

}  // namespace pyl
