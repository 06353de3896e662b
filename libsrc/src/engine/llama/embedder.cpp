// Pooled embeddings: a context of its own, emptied before every dispatch, one sequence for each text.
#include <algorithm>

#include "engine/llama/llama_parts.hpp"

namespace pyl {

namespace {

constexpr uint32_t n_seq_max = 64;

class LlamaEmbedder final : public EmbedContext {
public:
    LlamaEmbedder(LlamaRun run, const LlamaModel & model, uint32_t n_ctx, int32_t pooling) : run_(std::move(run)), n_embd_(llama_model_n_embd_out(model.raw())), pooling_(pooling) {
        live_counts().contexts++;
        one_.assign(n_ctx, 1);
        seq_at_.resize(n_ctx);
    }
    ~LlamaEmbedder() override { live_counts().contexts--; }

    int32_t n_embd() const override { return n_embd_; }
    uint32_t n_seq_max() const override { return pyl::n_seq_max; }
    int32_t pooling() const override { return pooling_; }
    int32_t embed(const Batch & batch) override {
        Batch & rows = const_cast<Batch &>(batch);  // the engine's struct is not const-correct; it only reads
        for (size_t i = 0; i < rows.size(); i++) seq_at_[i] = &rows.seq[i];
        const llama_batch raw{static_cast<int32_t>(rows.size()), rows.token.data(), nullptr, rows.pos.data(), one_.data(), seq_at_.data(), rows.output.data()};
        if (const llama_memory_t memory = llama_get_memory(run_.context.get())) llama_memory_clear(memory, false);
        try {
            return llama_decode(run_.context.get(), raw);  // encodes, where the model is an encoder
        } catch (const std::exception & error) {
            log_add(LogLevel::error, std::string("decode threw: ") + error.what());
            return -3;
        }
    }
    const float * vector(size_t i) const override { return llama_get_embeddings_seq(run_.context.get(), static_cast<Seq>(i)); }

private:
    LlamaRun run_;
    int32_t n_embd_, pooling_;
    std::vector<int32_t> one_;
    std::vector<llama_seq_id *> seq_at_;
};

}  // namespace

std::unique_ptr<EmbedContext> open_llama_embedder(const LlamaModel & model, const EmbedderParams & params) {
    static constexpr enum llama_pooling_type types[] = {LLAMA_POOLING_TYPE_UNSPECIFIED, LLAMA_POOLING_TYPE_MEAN, LLAMA_POOLING_TYPE_CLS, LLAMA_POOLING_TYPE_LAST};
    llama_context_params p = llama_context_default_params();
    // A text is never cut, so a dispatch holds the longest; models that are not causal could not be cut anyway.
    p.n_ctx = p.n_batch = p.n_ubatch = (params.n_ctx + 255) / 256 * 256;
    p.n_seq_max = n_seq_max;
    p.n_threads = p.n_threads_batch = static_cast<int32_t>(params.n_threads);
    p.kv_unified = true;
    p.swa_full = true;
    p.embeddings = true;
    p.pooling_type = types[params.pooling];
    int32_t flash = params.flash_attn;
    LlamaRun run = open_llama_run(model, p, flash);
    int32_t pooling = PYL_POOLING_MODEL;
    switch (llama_pooling_type(run.context.get())) {
        case LLAMA_POOLING_TYPE_MEAN: pooling = PYL_POOLING_MEAN; break;
        case LLAMA_POOLING_TYPE_CLS: pooling = PYL_POOLING_CLS; break;
        case LLAMA_POOLING_TYPE_LAST: pooling = PYL_POOLING_LAST; break;
        case LLAMA_POOLING_TYPE_RANK: throw Error(PYL_E_UNSUPPORTED, "this model ranks pairs of texts; it gives no vectors");
        default: throw Error(PYL_E_UNSUPPORTED, "the model file names no pooling; choose one");
    }
    return std::make_unique<LlamaEmbedder>(std::move(run), model, p.n_batch, pooling);
}

}  // namespace pyl
