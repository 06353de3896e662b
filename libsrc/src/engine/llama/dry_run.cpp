// What the engine has allocated, or would: its own account of a context, real or laid out only.
#include <map>

#include "engine/llama/llama_parts.hpp"
#include "engine/llama/pretend.hpp"
#include "llama-ext.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"

namespace pyl {

namespace {

template <typename T>
uint64_t bytes_of(const T & memory) {
    uint64_t out = 0;
    for (const auto & [type, bytes] : memory.memory_breakdown()) out += bytes;
    return out;
}

// Takes a memory apart into attention caches and recurrent state.
class Caches {
public:
    explicit Caches(Memory & out) : out_(out) {}
    void take(llama_memory_t memory) {
        if (auto * m = dynamic_cast<llama_kv_cache *>(memory)) return add("kv", m);
        if (auto * m = dynamic_cast<llama_kv_cache_iswa *>(memory)) return add(m);
        if (auto * m = dynamic_cast<llama_kv_cache_dsa *>(memory)) return add(m);
        if (auto * m = dynamic_cast<llama_kv_cache_dsa_iswa *>(memory)) return add(m->get_dsa()), add("swa", m->get_swa());
        if (auto * m = dynamic_cast<llama_kv_cache_dsv4 *>(memory)) return add(m);
        if (auto * m = dynamic_cast<llama_kv_cache_msa *>(memory)) return add(m);
        if (auto * m = dynamic_cast<llama_memory_hybrid_idx *>(memory)) return add("kv", m->get_mem_attn()), add("index", m->get_mem_idx()), add(m->get_mem_recr());
        if (auto * m = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) return add(m->get_mem_attn()), add(m->get_mem_recr());
        if (auto * m = dynamic_cast<llama_memory_hybrid *>(memory)) return add("kv", m->get_mem_attn()), add(m->get_mem_recr());
        if (auto * m = dynamic_cast<llama_memory_recurrent *>(memory)) return add(m);
        if (memory) throw Error(PYL_E_UNSUPPORTED, "this model's memory is of a kind that is not taken apart");
    }

private:
    void add(const char * name, const llama_kv_cache * cache) {
        if (!cache) return;
        if (const uint64_t bytes = bytes_of(*cache)) out_.caches.push_back({name, cache->get_size(), cache->get_n_stream(), bytes});
    }
    void add(const llama_kv_cache_iswa * m) { add("kv", m->get_base()), add("swa", m->get_swa()); }
    void add(const llama_kv_cache_dsa * m) { add("kv", m->get_mla()), add("index", m->get_lid()); }
    void add(const llama_kv_cache_msa * m) {
        add("kv", m->get_base());
        // No way to the index itself; it has a row beside every one of the base.
        const llama_kv_cache & base = *m->get_base();
        if (const uint64_t bytes = bytes_of(*m) - bytes_of(base)) out_.caches.push_back({"index", base.get_size(), base.get_n_stream(), bytes});
    }
    void add(const llama_kv_cache_dsv4 * m) {
        add(m->get_raw());
        add("csa", m->get_csa()), add("hca", m->get_hca()), add("index", m->get_lid());
        for (const auto * state : {m->get_csa_state(), m->get_hca_state(), m->get_lid_state()}) out_.recurrent_bytes += bytes_of(*state);
    }
    void add(const llama_memory_recurrent * m) { out_.recurrent_bytes += bytes_of(*m); }

    Memory & out_;
};

std::string device_of(ggml_backend_buffer_type_t type) {
    const ggml_backend_dev_t device = ggml_backend_buft_get_device(type);
    return ggml_backend_dev_name(device ? device : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));  // the CPU's own type names none
}

}  // namespace

Memory memory_of(const llama_context * context, int32_t flash_attn, uint64_t output_bytes) {
    Memory out;
    out.n_ctx = llama_n_ctx(context), out.n_ctx_seq = llama_n_ctx_seq(context);
    out.n_batch = llama_n_batch(context), out.n_ubatch = llama_n_ubatch(context), out.n_seq_max = llama_n_seq_max(context);
    out.n_rs_seq = llama_n_rs_seq(context);
    out.flash_attn = flash_attn == PYL_FLASH_ATTN_ON;
    out.output_bytes = output_bytes;
    Caches(out).take(llama_get_memory(context));
    std::map<std::pair<std::string, std::string>, MemoryRow> rows;  // by name: the order of addresses is another on every run
    for (const auto & [type, bytes] : llama_get_memory_breakdown(context)) {
        const std::string device = device_of(type), buffer = ggml_backend_buft_name(type);
        MemoryRow & row = rows[{device, buffer}];
        row.device = device, row.buffer = buffer, row.is_host = ggml_backend_buft_is_host(type);
        row.model_bytes += bytes.model, row.context_bytes += bytes.context, row.compute_bytes += bytes.compute;
    }
    for (auto & [name, row] : rows) out.rows.push_back(std::move(row));
    return out;
}

Memory llama_dry_run(const std::string & path, const ModelParams & params, const std::function<ContextParams(const pyl_model_info &)> & context) {
    const BufferScope nothing(BufferScope::Mode::pretend);
    const LogCapture quiet(true);
    ModelParams p = params;
    p.no_alloc = true;
    const LlamaModel model(path, p);
    model.need_decoder();
    const ContextParams c = context(model.info());
    const BufferScope of_context(BufferScope::Mode::pretend);
    int32_t flash = c.flash_attn;
    const auto run = init_llama_context(model, llama_params_of(model, c), flash);
    Memory out = memory_of(run.get(), flash, output_bytes_of(of_context));
    out.n_outputs = c.n_outputs;
    for (MemoryRow & row : out.rows) {
        if (row.buffer == "Vulkan_Host" && row.compute_bytes > 0) row.compute_bytes += 32;  // that buffer type takes so many more than it is asked for
    }
    try {
        need_forkable(model, c, run.get(), flash);
    } catch (const Error & error) {
        out.refusal = error.message;
    }
    return out;
}

}  // namespace pyl
