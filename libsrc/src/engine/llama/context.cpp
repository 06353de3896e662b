#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

#include "core/cpu.hpp"
#include "core/saved.hpp"
#include "engine/llama/assertion.hpp"
#include "engine/llama/llama_parts.hpp"
#include "engine/llama/pretend.hpp"
#include "ggml-cpu.h"
#include "llama-ext.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-iswa.h"
#include "llama-model.h"

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

// The cache of the sliding-window layers, where it is one of its own whose cells can be given back; the engine's public calls
// would remove the same positions from the other layers too. Not where attention stands beside recurrent layers: a dispatch is always
// cut into several there, and make_window_room() says what comes of that.
llama_kv_cache * window_of(llama_memory_t memory) {
    if (auto * m = dynamic_cast<llama_kv_cache_iswa *>(memory)) return m->get_swa();
    if (auto * m = dynamic_cast<llama_kv_cache_dsa_iswa *>(memory)) return m->get_swa();
    return nullptr;
}

class LlamaContext final : public Context {
public:
    LlamaContext(LlamaRun run, const ContextParams & params, int32_t flash_attn, uint64_t output_bytes)
        : run_(std::move(run)), flash_attn_(flash_attn), output_bytes_(output_bytes), n_seq_max_(params.n_seq_max), n_vocab_(static_cast<size_t>(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(run_.context.get()))))) {
        live_counts().contexts++;
        one_.assign(params.n_batch, 1);
        seq_at_.resize(params.n_batch);
        if (!params.swa_full) window_ = window_of(engine_memory());
        if (window_ && window_->get_size() >= n_ctx()) window_ = nullptr;  // holds all there can be: nothing has to go
    }
    ~LlamaContext() override { live_counts().contexts--; }

    uint32_t n_ctx() const override { return llama_n_ctx(run_.context.get()); }
    int32_t flash_attn() const override { return flash_attn_; }
    Memory memory() const override { return memory_of(run_.context.get(), flash_attn_, output_bytes_); }

    int32_t decode(const Batch & batch) override {
        Batch & rows = const_cast<Batch &>(batch);  // the engine's struct is not const-correct; it only reads
        for (size_t i = 0; i < rows.size(); i++) seq_at_[i] = &rows.seq[i];
        const llama_batch raw{static_cast<int32_t>(rows.size()), rows.token.data(), nullptr, rows.pos.data(), one_.data(), seq_at_.data(), rows.output.data()};
        int32_t rc = -3;
        make_window_room(rows.size());
        try {
            rc = llama_decode(run_.context.get(), raw);
        } catch (const std::exception & error) {
            log_add(LogLevel::error, std::string("decode threw: ") + error.what());
        }
        // Rows come in the order they were asked for; after "no room" and "invalid" the earlier ones still stand.
        if (rc == 0) logits_ = llama_get_logits(run_.context.get());
        return rc;
    }
    int32_t decode_rows(const RowBatch & batch) override {
        row_outputs_.assign(batch.n, 0);
        row_outputs_.back() = batch.wants_logits;
        Seq seq = batch.seq;
        for (size_t i = 0; i < batch.n; i++) seq_at_[i] = &seq;
        const llama_batch raw{static_cast<int32_t>(batch.n), nullptr, const_cast<float *>(batch.rows), const_cast<Pos *>(batch.pos.data()), one_.data(), seq_at_.data(), row_outputs_.data()};
        int32_t rc = -3;
        if (batch.is_non_causal) llama_set_causal_attn(run_.context.get(), false);
        try {
            rc = llama_decode(run_.context.get(), raw);
            if (rc == 1 && window_) {
                trim();
                rc = llama_decode(run_.context.get(), raw);
            }
        } catch (const std::exception & error) {
            log_add(LogLevel::error, std::string("decode threw: ") + error.what());
        }
        if (batch.is_non_causal) llama_set_causal_attn(run_.context.get(), true);  // what every other dispatch of ours has
        if (rc == 0) logits_ = llama_get_logits(run_.context.get());
        return rc;
    }
    const float * logits(size_t i) const override { return logits_ + i * n_vocab_; }

    void seq_copy(Seq from, Seq to) override { llama_memory_seq_cp(engine_memory(), from, to, -1, -1); }
    void seq_remove(Seq seq) override { llama_memory_seq_rm(engine_memory(), seq, -1, -1); }
    void seq_keep(Seq seq) override { llama_memory_seq_keep(engine_memory(), seq); }

    std::string seq_save(Seq seq) const override {
        const LogCapture log;
        std::string out(llama_state_seq_get_size_ext(run_.context.get(), seq, 0), '\0');
        const size_t n = out.empty() ? 0 : llama_state_seq_get_data_ext(run_.context.get(), reinterpret_cast<uint8_t *>(out.data()), out.size(), seq, 0);
        if (n == 0) throw Error(PYL_E_UNSUPPORTED, "the engine cannot save this model's memory: " + log.words("it gave no reason"));
        out.resize(n);
        return out;
    }
    void seq_load(Seq seq, std::string_view bytes) override {
        const LogCapture log;
        if (window_) trim();
        window_held_ += n_swa();  // at most
        if (llama_state_seq_set_data_ext(run_.context.get(), reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), seq, 0) == bytes.size()) return;
        seq_remove(seq);
        const std::string words = log.words("the engine gave no reason");
        const bool room = words.find("failed to find") != std::string::npos || words.find("not enough cells") != std::string::npos;
        throw Error(room ? PYL_E_NO_CELLS : PYL_E_FORMAT, "the engine does not take the saved cells: " + words);
    }

private:
    llama_memory_t engine_memory() const { return llama_get_memory(run_.context.get()); }

    // Before the engine looks for room, never after it found none: it would then cut the dispatch into several, and while planning
    // the second let go of cells that the first can still see, which it does not take back. Its answer would be 0, and wrong.
    void make_window_room(size_t n) {
        if (!window_) return;
        if (window_held_ + n > window_->get_size()) trim();
        window_held_ += n;
    }

    // A cell that several sequences share is never recycled by the engine, even when it is out of all their windows. Each sequence
    // lets go of what it can no longer see: then it holds n_swa cells at most, and the cache has n_seq_max times that and a dispatch.
    void trim() {
        const llama_swa_type type = llama_get_model(run_.context.get())->hparams.swa_type;
        window_held_ = 0;
        for (Seq seq = 0; seq < static_cast<Seq>(n_seq_max_); seq++) {
            const Pos newest = window_->seq_pos_max(seq);
            Pos first = window_->seq_pos_min(seq);
            while (first >= 0 && first <= newest && llama_hparams::is_masked_swa(n_swa(), type, first, newest)) first++;
            if (first > 0) window_->seq_rm(seq, 0, first);
            if (first >= 0) window_held_ += static_cast<size_t>(newest - first + 1);
        }
    }
    uint32_t n_swa() const { return llama_get_model(run_.context.get())->hparams.n_swa; }

    LlamaRun run_;
    int32_t flash_attn_;
    uint64_t output_bytes_;
    uint32_t n_seq_max_;
    llama_kv_cache * window_ = nullptr;  // where it has to be trimmed
    size_t window_held_ = 0;             // cells of it, by positions, shared ones counted for each sequence: of text, never less than there are
    size_t n_vocab_;
    const float * logits_ = nullptr;
    std::vector<int32_t> one_;
    std::vector<llama_seq_id *> seq_at_;
    std::vector<int8_t> row_outputs_;
};

}  // namespace

llama_context_params llama_params_of(const LlamaModel & model, const ContextParams & params) {
    llama_context_params p = llama_context_default_params();
    // The engine cuts n_batch down to the n_ctx it is given, and only then rounds that up; a dispatch between the two would abort.
    p.n_ctx = (params.n_ctx + 255) / 256 * 256;
    p.n_batch = params.n_batch;
    p.n_ubatch = params.n_ubatch;
    p.n_seq_max = params.n_seq_max;
    p.n_rs_seq = params.n_rs_seq;
    p.n_outputs_max = params.n_outputs;  // 0 would size the buffers for n_batch of them
    p.n_threads = p.n_threads_batch = static_cast<int32_t>(params.n_threads);
    p.type_k = ggml_type_of(params.type_k);
    p.type_v = ggml_type_of(params.type_v);
    p.kv_unified = params.kv_unified;
    p.offload_kqv = params.offload_kqv;
    p.op_offload = params.op_offload;
    p.swa_full = params.swa_full;
    const llama_hparams & hparams = model.raw()->hparams;
    if (model.raw()->arch == LLM_ARCH_DEEPSEEK4) {  // its graph divides by what layers of either ratio have
        const auto has = [&](uint32_t ratio) { return std::find(hparams.dsv4_compress_ratios.begin(), hparams.dsv4_compress_ratios.begin() + hparams.n_layer_all, ratio) != hparams.dsv4_compress_ratios.begin() + hparams.n_layer_all; };
        if (!has(4) || !has(128)) throw Error(PYL_E_UNSUPPORTED, "a deepseek4 file without layers of both compression ratios, 4 and 128");
    }
    // A head that is no whole number of blocks aborts the engine or makes it compute NaN, unless flash attention happens to take it.
    for (const auto & [type, is_k] : {std::pair{params.type_k, true}, {params.type_v, false}}) {
        const auto block = static_cast<uint32_t>(ggml_blck_size(ggml_type_of(type)));
        for (uint32_t il = 0; il < hparams.n_layer() && block > 1; il++) {
            if (!hparams.has_kv(il)) continue;
            const uint32_t width = is_k ? hparams.n_embd_head_k(il) : hparams.n_embd_head_v(il);
            if (width % block != 0) throw Error(PYL_E_UNSUPPORTED, "a " + std::string(kv_name(type)) + " cache stores blocks of " + std::to_string(block) + ", and this model's heads are " + std::to_string(width) + " wide");
        }
    }
    // Where the engine keeps its books of cells in plain vectors, too many of them would end the process, not the call.
    const uint64_t books = uint64_t{48} * p.n_ctx, available = available_memory_bytes();
    if (available > 0 && books > available) {
        throw Error(PYL_E_OUT_OF_MEMORY, "the engine's books of " + std::to_string(p.n_ctx) + " cells alone take " + std::to_string(books) + " bytes, and " + std::to_string(available) + " are free")
            .numbers(static_cast<int64_t>(books), static_cast<int64_t>(available));
    }
    return p;
}

static void need_unified(const ContextParams & params) {
    if (!params.kv_unified) throw Error(PYL_E_UNSUPPORTED, "kv_unified = 0: a fork would copy cells, and a partial copy aborts the engine");
}

void need_forkable(const LlamaModel & model, const ContextParams & params, llama_context * context, int32_t flash) {
    if (!llama_get_memory(context)) throw Error(PYL_E_UNSUPPORTED, "this model keeps no memory between decodes, so there is nothing to fork");
    need_unified(params);
    if (!model.raw()->hparams.causal_attn) throw Error(PYL_E_UNSUPPORTED, "this model's attention is not causal: cut into dispatches, a text would get other logits than in one");
    if (llama_n_batch(context) < std::min(params.n_batch, llama_n_ctx(context))) throw Error(PYL_E_INTERNAL, "the engine opened the context with a smaller n_batch than asked for");
    if (!params.swa_full && model.info().n_swa > 0 && !window_of(llama_get_memory(context))) {
        throw Error(PYL_E_UNSUPPORTED, "swa_full = 0: this model's sliding-window cache cannot be trimmed, so forks would fill it for good");
    }
    // The engine keeps a sequence's last tokens in one part, as many as it takes snapshots and one more, or aborts in the decode.
    if (const uint32_t n_rs_seq = llama_n_rs_seq(context); n_rs_seq > 0 && llama_n_ubatch(context) <= n_rs_seq + 1) {
        throw Error(PYL_E_INVALID, "n_rs_seq = " + std::to_string(n_rs_seq) + " needs an n_ubatch of at least " + std::to_string(n_rs_seq + 2)).numbers(n_rs_seq + 2, llama_n_ubatch(context));
    }
    if (const llama_kv_cache * window = params.swa_full ? nullptr : window_of(llama_get_memory(context)); window && window->get_size() < llama_n_ctx(context) && llama_n_ubatch(context) < llama_n_batch(context)) {
        throw Error(PYL_E_UNSUPPORTED, "swa_full = 0 needs an n_ubatch of n_batch: the engine would let go of cells that a later part of the same dispatch can see").numbers(llama_n_batch(context), llama_n_ubatch(context));
    }
    if (params.deterministic && flash == PYL_FLASH_ATTN_OFF && !model.info().is_recurrent) {
        throw Error(PYL_E_UNSUPPORTED, "deterministic = 1 needs flash attention: without it the engine sums over all cells of the cache, and where a branch's lie depends on the others");
    }
    if (params.deterministic) {
        for (const auto & [type, bytes] : llama_get_memory_breakdown(context)) {
            if (bytes.context + bytes.compute == 0 || ggml_backend_buft_is_host(type)) continue;
            throw Error(PYL_E_UNSUPPORTED, "deterministic = 1 needs n_gpu_layers = 0: on a device the last bits depend on where a branch's cells lie");
        }
    }
}

std::unique_ptr<Context> open_llama_context(const LlamaModel & model, const ContextParams & params) {
    const llama_context_params p = llama_params_of(model, params);
    need_unified(params);  // before anything is allocated
    int32_t flash = params.flash_attn;
    const BufferScope watch(BufferScope::Mode::real);
    LlamaRun run = open_llama_run(model, p, flash);
    need_forkable(model, params, run.context.get(), flash);
    return std::make_unique<LlamaContext>(std::move(run), params, flash, output_bytes_of(watch));
}

// The engine aborts when it cannot start its threads, so they are started here first.
static void check_threads(int32_t n) {
    std::vector<std::thread> threads;
    bool failed = false;
    std::atomic<bool> may_end{false};
    try {
        for (int32_t i = 1; i < n; i++) {
            threads.emplace_back([&] { may_end.wait(false); });
        }
    } catch (const std::system_error &) {
        failed = true;
    }
    const size_t started = threads.size() + 1;
    may_end = true;
    may_end.notify_all();
    for (std::thread & thread : threads) thread.join();
    if (failed) {
        throw Error(PYL_E_OUT_OF_MEMORY, "the system gives " + std::to_string(started) + " of the " + std::to_string(n) + " threads wanted").numbers(n, static_cast<int64_t>(started));
    }
}

std::unique_ptr<llama_context, FreeContext> init_llama_context(const LlamaModel & model, llama_context_params p, int32_t & flash_attn) {
    p.no_perf = true;
    const LogCapture log;
    const AssertionScope assertions;
    for (const int32_t flash : {PYL_FLASH_ATTN_ON, PYL_FLASH_ATTN_OFF}) {
        if (flash_attn != PYL_FLASH_ATTN_AUTO && flash_attn != flash) continue;
        p.flash_attn_type = flash == PYL_FLASH_ATTN_ON ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        std::unique_ptr<llama_context, FreeContext> context(llama_init_from_model(model.raw(), p));
        if (!context) continue;
        flash_attn = flash;
        return context;
    }
    const std::string words = log.words("the engine gave no reason");
    const bool memory = words.find("alloc") != std::string::npos;
    throw Error(memory ? PYL_E_OUT_OF_MEMORY : PYL_E_UNSUPPORTED, "the engine cannot open a context of " + std::to_string(p.n_ctx) + " cells: " + words);
}

LlamaRun open_llama_run(const LlamaModel & model, llama_context_params p, int32_t & flash_attn) {
    check_threads(p.n_threads);
    LlamaRun run;
    run.context = init_llama_context(model, p, flash_attn);
    // One pool for the life of the context (without one the engine starts threads for every dispatch); idle threads sleep.
    ggml_threadpool_params pool = ggml_threadpool_params_default(p.n_threads);
    pool.poll = 0;
    run.pool.reset(ggml_threadpool_new(&pool));
    llama_attach_threadpool(run.context.get(), run.pool.get(), run.pool.get());
    return run;
}

void FreeContext::operator()(llama_context * context) const { llama_free(context); }
void FreePool::operator()(ggml_threadpool * pool) const { ggml_threadpool_free(pool); }

}  // namespace pyl
