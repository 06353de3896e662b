#include "core/embedder.hpp"

#include "abi/guard.hpp"
#include "abi/handles.hpp"
#include "core/cpu.hpp"

namespace pyl {

static HandleTable<Embedder, pyl_embedder> & embedders() {
    static auto * table = new HandleTable<Embedder, pyl_embedder>("embedder");  // never destroyed: a thread may still call at exit
    return *table;
}

size_t live_embedders() { return embedders().size(); }

}  // namespace pyl

using namespace pyl;

void pyl_embedder_params_init(pyl_embedder_params * params, uint32_t struct_size) {
    init_struct(params, struct_size, {sizeof(pyl_embedder_params), 0, 0, PYL_POOLING_MODEL, PYL_FLASH_ATTN_AUTO});
}

int32_t pyl_embedder_open(pyl_embedder ** out, const pyl_model * model, const pyl_embedder_params * params) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        const auto found = model_of(model);
        pyl_embedder_params p;
        pyl_embedder_params_init(&p, sizeof p);
        if (params) p = read_struct(params, p);
        const auto trained = static_cast<uint32_t>(std::max(0, found->info().n_ctx_train));
        EmbedderParams e{p.n_ctx ? p.n_ctx : std::min(trained, 512u), p.n_threads ? p.n_threads : usable_cores(), p.pooling, p.flash_attn};
        need(e.pooling >= PYL_POOLING_MODEL && e.pooling <= PYL_POOLING_LAST, "pooling is none of PYL_POOLING_*");
        need(e.flash_attn >= PYL_FLASH_ATTN_AUTO && e.flash_attn <= PYL_FLASH_ATTN_OFF, "flash_attn is none of PYL_FLASH_ATTN_*");
        need(e.n_threads <= 512, "n_threads must be at most 512");
        need(e.n_ctx > 0, "n_ctx is 0, and the model declares no context to take instead");
        // Learned positions end there, and reading beyond them aborts.
        if (e.n_ctx > std::min(trained ? trained : 65536u, 65536u)) throw Error(PYL_E_INVALID, "n_ctx is beyond the context the model was trained with, or 65536").numbers(e.n_ctx, trained);
        *out = embedders().add(std::make_shared<Embedder>(found, e));
    });
}

int32_t pyl_embedder_free(pyl_embedder * embedder) {
    return guarded([&] { embedders().remove(embedder)->close(); });
}

int32_t pyl_embedder_describe(const pyl_embedder * embedder, pyl_embedder_info * out) {
    return guarded([&] { write_struct(out, embedders().find(embedder)->info()); });
}

int32_t pyl_embed_n(pyl_embedder * embedder, const int32_t * tokens, const uint32_t * lengths, size_t n_texts, int32_t normalize, float * out) {
    return guarded([&] {
        const auto found = embedders().find(embedder);
        const auto texts = split(tokens, lengths, n_texts);
        need(out != nullptr || n_texts == 0, "an output is NULL");
        found->embed(texts, normalize != 0, out);
    });
}
