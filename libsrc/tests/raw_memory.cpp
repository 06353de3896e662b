// What llama.cpp's own code makes of a header: the memory it would create, with no weights and nothing allocated but recurrent
// state. The oracle of pylloyal.capacity.
//
//   raw_memory < requests
//
// A request is a line, with types as ggml numbers them, an answer a line of JSON. What the engine asserts ends the process: the
// reader starts another one.
//   "cells HEADER.gguf n_ctx_seq n_seq_max n_ubatch unified flash swa_full type_k type_v n_rs_seq"
//       straight from its loader of hyperparameters and its choice of caches: any metadata will do
//   "graph HEADER.gguf n_ctx n_batch n_ubatch n_seq_max unified flash swa_full type_k type_v n_rs_seq n_outputs fused"
//       a whole context, with the tensors the metadata asks for and the compute graphs it reserves: "compute" is what it says of a
//       dispatch with every sequence in it, "single" what a dispatch of one sequence takes, "work" the CPU's scratch of both on one thread
#include <cstdio>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "ggml-cpu.h"
#include "llama-arch.h"
#include "llama-context.h"
#include "llama-cparams.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-memory.h"
#include "llama-model-loader.h"
#include "llama-model.h"
#include "llama.h"
#include "gguf.h"
#include "llama-ext.h"

namespace {

std::string words;  // the engine's complaints since the request

size_t total(const llama_memory_i & memory) {
    size_t out = 0;
    for (const auto & [type, bytes] : memory.memory_breakdown()) out += bytes;
    return out;
}

size_t recurrent(const llama_memory_i & memory) {
    if (auto * m = dynamic_cast<const llama_memory_recurrent *>(&memory)) return total(*m);
    if (auto * m = dynamic_cast<const llama_memory_hybrid *>(&memory)) return total(*m->get_mem_recr());
    if (auto * m = dynamic_cast<const llama_memory_hybrid_iswa *>(&memory)) return total(*m->get_mem_recr());
    return 0;
}

std::string list(uint32_t n, auto of) {
    std::string out = "[";
    for (uint32_t i = 0; i < n; i++) out += (i ? ", " : "") + std::to_string(of(i));
    return out + "]";
}

std::string cells(std::istringstream & in) {
    std::string path;
    llama_cparams cparams{};
    llama_memory_params memory{};
    uint32_t n_ctx_seq, n_seq_max, n_ubatch, type_k, type_v, n_rs_seq;
    int unified, flash, swa_full;
    if (!(in >> path >> n_ctx_seq >> n_seq_max >> n_ubatch >> unified >> flash >> swa_full >> type_k >> type_v >> n_rs_seq)) throw std::runtime_error("not a request");

    llama_model_params params = llama_model_default_params();
    params.no_alloc = true;
    std::vector<std::string> splits;
    llama_model_loader loader(nullptr, nullptr, nullptr, path, splits, nullptr, params.load_mode, false, true, params.load_mtp, nullptr, nullptr);
    std::unique_ptr<llama_model> owned(llama_model_create(loader, params));
    auto * model = dynamic_cast<llama_model_base *>(owned.get());
    model->hparams.vocab_only = false;
    model->hparams.no_alloc = true;
    model->load_hparams(loader);
    const llama_hparams & h = model->hparams;

    cparams.n_ctx_seq = n_ctx_seq;
    cparams.n_seq_max = n_seq_max;
    cparams.n_ctx = unified ? n_ctx_seq : n_ctx_seq * n_seq_max;
    cparams.n_ubatch = n_ubatch;
    cparams.n_batch = n_ubatch;
    cparams.kv_unified = unified != 0;
    cparams.flash_attn = flash != 0;
    cparams.offload_kqv = false;  // else it asks on which device each layer is
    cparams.n_rs_seq = llm_arch_supports_rs_rollback(model->arch) ? n_rs_seq : 0;
    memory.type_k = static_cast<ggml_type>(type_k);
    memory.type_v = static_cast<ggml_type>(type_v);
    memory.swa_full = swa_full != 0;
    std::unique_ptr<llama_memory_i> made(model->create_memory(memory, cparams));

    std::ostringstream out;
    out << "{\"n_layer\": " << h.n_layer() << ", \"n_layer_all\": " << h.n_layer_all << ", \"n_swa\": " << h.n_swa << ", \"swa_type\": " << h.swa_type
        << ", \"is_mla\": " << h.is_mla() << ", \"causal\": " << h.causal_attn << ", \"n_embd_out\": " << h.n_embd_out()
        << ", \"is_swa\": " << list(h.n_layer_all, [&](uint32_t i) { return static_cast<int>(h.is_swa(i)); })
        << ", \"is_recr\": " << list(h.n_layer_all, [&](uint32_t i) { return static_cast<int>(h.is_recr(i)); })
        << ", \"k\": " << list(h.n_layer_all, [&](uint32_t i) { return h.n_embd_k_gqa(i); })
        << ", \"v\": " << list(h.n_layer_all, [&](uint32_t i) { return h.n_embd_v_gqa(i); })
        << ", \"n_r\": " << h.n_embd_r() << ", \"n_s\": " << h.n_embd_s() << ", \"has_memory\": " << (made != nullptr);
    if (made) out << ", \"total\": " << total(*made) << ", \"recurrent\": " << recurrent(*made);
    return out.str() + "}";
}

// Metadata alone makes every optional tensor there could be, so that some graphs would be those of no file: what files of these
// leave out is taken away, and with "fused" Q, K and V become one tensor, as in many files.
class Tensors {
public:
    void settle(llama_model & model, bool fused) {
        for (llama_layer & layer : model.layers) {
            if (model.arch == LLM_ARCH_RWKV6QWEN2) layer.time_mix_first = nullptr;
            if (!fused) continue;
            if (layer.wq && layer.wk && layer.wv && !layer.wqkv && layer.wq->ne[0] == layer.wk->ne[0] && layer.wq->ne[0] == layer.wv->ne[0]) {
                layer.wqkv = like(*layer.wq, layer.wq->ne[1] + layer.wk->ne[1] + layer.wv->ne[1]);
                layer.wq = layer.wk = layer.wv = nullptr;
            }
        }
    }

private:
    ggml_tensor * like(const ggml_tensor & from, int64_t rows) {
        made.push_back(std::make_unique<ggml_tensor>(from));
        ggml_tensor & t = *made.back();
        t.ne[1] = rows;
        for (int i = 2; i < GGML_MAX_DIMS; i++) t.nb[i] = t.nb[i - 1] * t.ne[i - 1];
        return &t;
    }

    std::vector<std::unique_ptr<ggml_tensor>> made;
};

struct Model {
    std::string path;
    bool fused = false;
    Tensors tensors;
    std::unique_ptr<llama_model, decltype(&llama_model_free)> model{nullptr, llama_model_free};
};

std::string graph(std::istringstream & in, Model & last) {
    std::string path;
    llama_context_params p = llama_context_default_params();
    int unified, flash, swa_full, fused;
    uint32_t type_k, type_v;
    if (!(in >> path >> p.n_ctx >> p.n_batch >> p.n_ubatch >> p.n_seq_max >> unified >> flash >> swa_full >> type_k >> type_v >> p.n_rs_seq >> p.n_outputs_max >> fused)) throw std::runtime_error("not a request");
    if (path != last.path || last.fused != (fused != 0)) {
        last.path.clear();
        gguf_init_params init{true, nullptr};
        const std::unique_ptr<gguf_context, decltype(&gguf_free)> metadata(gguf_init_from_file(path.c_str(), init), gguf_free);
        if (!metadata) throw std::runtime_error("not a header");
        llama_model_params params = llama_model_default_params();
        params.no_alloc = true;
        last.model.reset(llama_model_init_from_user(metadata.get(), [](ggml_tensor *, void *) {}, nullptr, params));
        if (!last.model) throw std::runtime_error("no model: " + words);
        last.fused = fused != 0;
        last.tensors = {};
        last.tensors.settle(*last.model, last.fused);
        last.path = path;
    }
    p.n_threads = p.n_threads_batch = 1;
    p.kv_unified = unified != 0;
    p.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    p.swa_full = swa_full != 0;
    p.type_k = static_cast<ggml_type>(type_k);
    p.type_v = static_cast<ggml_type>(type_v);
    const std::unique_ptr<llama_context, decltype(&llama_free)> context(llama_init_from_model(last.model.get(), p), llama_free);
    if (!context) throw std::runtime_error("no context: " + words);
    size_t model = 0, kept = 0, compute = 0;
    for (const auto & [type, bytes] : llama_get_memory_breakdown(context.get())) {
        model += bytes.model;
        kept += bytes.context;
        compute += bytes.compute;
    }
    size_t single = 0, work = 0;
    {
        const auto memory = context->get_memory() ? context->get_memory()->init_full() : nullptr;
        const uint32_t n_tokens = std::min(llama_n_ctx(context.get()), llama_n_ubatch(context.get()));
        for (const uint32_t n_seqs : {p.n_seq_max, 1u}) {
            if (n_seqs != p.n_seq_max && (!unified || last.model->arch == LLM_ARCH_DEEPSEEK4)) continue;  // the full memory has all streams
            size_t sizes[16] = {};
            ggml_cgraph * made = context->graph_reserve(n_tokens, n_seqs, std::min(n_tokens, p.n_outputs_max), memory.get(), true, sizes);
            work = std::max(work, ggml_graph_plan(made, 1, nullptr).work_size);
            single = sizes[0];
        }
    }
    std::ostringstream out;
    out << "{\"n_ctx\": " << llama_n_ctx(context.get()) << ", \"n_ctx_seq\": " << llama_n_ctx_seq(context.get()) << ", \"n_batch\": " << llama_n_batch(context.get()) << ", \"n_ubatch\": "
        << llama_n_ubatch(context.get()) << ", \"model\": " << model << ", \"kept\": " << kept << ", \"compute\": " << compute << ", \"single\": " << single << ", \"work\": " << work << "}";
    return out.str();
}

}  // namespace

int main(int argc, char ** argv) {
    llama_log_set([](ggml_log_level level, const char * text, void *) { if (level >= GGML_LOG_LEVEL_ERROR) words += text; }, nullptr);
    if (argc > 1 && std::string(argv[1]) == "architectures") {
        for (const llm_arch arch : llm_arch_all()) {
            if (arch == LLM_ARCH_UNKNOWN) continue;
            std::cout << llm_arch_name(arch) << ' ' << llm_arch_is_recurrent(arch) << ' ' << llm_arch_is_hybrid(arch) << ' ' << llm_arch_supports_rs_rollback(arch) << '\n';
        }
        return 0;
    }
    Model last;
    for (std::string line; std::getline(std::cin, line);) {
        try {
            words.clear();
            std::istringstream in(line);
            std::string verb;
            in >> verb;
            std::cout << (verb == "graph" ? graph(in, last) : cells(in)) << std::endl;
        } catch (const std::exception & error) {
            std::string why = error.what();
            for (char & c : why) if (c == '"' || c == '\\' || static_cast<unsigned char>(c) < 32) c = ' ';
            std::cout << "{\"error\": \"" << why << "\"}" << std::endl;
        }
    }
}
