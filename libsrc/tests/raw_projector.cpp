// What mtmd itself makes of a projector: bytes of its weights, the buffer its graph takes for a picture as it reaches the encoder, and the
// cells of pictures of any size. Nothing is computed and no weights are read, so files may be sparse. tests/integration/test_capacity_media.py
// holds pylloyal/capacity/media.py against it.
//
//   raw_projector MMPROJ TEXT-MODEL|- FLASH MIN MAX      (FLASH 1 or 0; MIN and MAX tokens of a picture, 0 for the file's own)
//
// Says {"weights": bytes} and then answers lines: "graph W H N" (N frames of one size), "cells W H N" (N frames).
#include "clip.cpp"  // its loader and its graphs are static
#include "mtmd.cpp"  // and only its own class opens a projector without the weights

#include <iostream>

#include "llama.h"
#include "mtmd.h"

namespace {

[[noreturn]] void fail(const char * what) {
    std::fprintf(stderr, "raw_projector: %s\n", what);
    std::exit(1);
}

size_t graph_bytes(clip_ctx & context, int width, int height, int n_frames) {
    context.sched.reset(ggml_backend_sched_new(context.backend_ptrs.data(), context.backend_buft.data(), static_cast<int>(context.backend_ptrs.size()), 8192, false, true));
    clip_image_f32_batch batch;
    for (int i = 0; i < n_frames; i++) {
        clip_image_f32 picture;
        picture.set_size({width, height}, true, false);
        batch.entries.push_back(picture);
    }
    size_t bytes[2] = {};
    ggml_backend_sched_reserve_size(context.sched.get(), clip_get_graph_builder(&context, batch)->build(), bytes);
    return bytes[0];
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 6) fail("MMPROJ TEXT-MODEL|- FLASH MIN MAX");
    const auto silent = [](ggml_log_level, const char *, void *) {};
    llama_log_set(silent, nullptr);
    mtmd_log_set(silent, nullptr);
    llama_backend_init();
    clip_context_params params{};
    params.flash_attn_type = argv[3][0] == '1' ? CLIP_FLASH_ATTN_TYPE_ENABLED : CLIP_FLASH_ATTN_TYPE_DISABLED;
    params.image_min_tokens = std::atoi(argv[4]) ? std::atoi(argv[4]) : -1;
    params.image_max_tokens = std::atoi(argv[5]) ? std::atoi(argv[5]) : -1;
    params.no_alloc = true;
    const clip_init_result made = clip_init(argv[1], params);
    if (!made.ctx_v && !made.ctx_a) fail("the projector does not load");
    size_t weights = 0;
    for (const clip_ctx * one : {made.ctx_v, made.ctx_a, made.ctx_gen_a}) weights += one ? ggml_backend_buffer_get_size(one->buf.get()) : 0;
    mtmd_context * eye = nullptr;
    if (argv[2][0] != '-') {
        llama_model_params m = llama_model_default_params();
        m.vocab_only = true;
        llama_model * model = llama_model_load_from_file(argv[2], m);
        if (!model) fail("the text model does not load");
        mtmd_context_params p = mtmd_context_params_default();
        p.use_gpu = p.print_timings = p.warmup = false;
        p.image_min_tokens = params.image_min_tokens, p.image_max_tokens = params.image_max_tokens;
        eye = new mtmd_context(argv[1], model, p, true);
    }
    std::cout << "{\"weights\": " << weights << "}" << std::endl;
    std::string what;
    for (int w = 0, h = 0, n = 0; std::cin >> what >> w >> h >> n;) {
        if (what == "graph") {
            std::cout << "{\"bytes\": " << graph_bytes(*made.ctx_v, w, h, n) << "}" << std::endl;
            continue;
        }
        std::vector<mtmd_bitmap *> frames;
        std::vector<mtmd_input_part> parts(static_cast<size_t>(n));
        std::vector<const mtmd_input_part *> pointers;
        for (mtmd_input_part & part : parts) {
            mtmd_bitmap * frame = mtmd_bitmap_init(static_cast<uint32_t>(w), static_cast<uint32_t>(h), nullptr);
            mtmd_bitmap_set_mergeable(frame, n > 1);
            part = {nullptr, frame};
            frames.push_back(frame);
            pointers.push_back(&part);
        }
        mtmd_input_chunks * chunks = mtmd_input_chunks_init();
        const int rc = mtmd_tokenize_from_parts(eye, chunks, pointers.data(), pointers.size(), false);
        size_t rows = 0, text = 0, largest = 0;
        for (size_t i = 0; i < mtmd_input_chunks_size(chunks); i++) {
            const mtmd_input_chunk * chunk = mtmd_input_chunks_get(chunks, i);
            const size_t tokens = mtmd_input_chunk_get_n_tokens(chunk);
            (mtmd_input_chunk_get_type(chunk) == MTMD_INPUT_CHUNK_TYPE_TEXT ? text : rows) += tokens;
            if (mtmd_input_chunk_get_type(chunk) != MTMD_INPUT_CHUNK_TYPE_TEXT) largest = std::max(largest, tokens);
        }
        std::cout << "{\"rc\": " << rc << ", \"rows\": " << rows << ", \"text\": " << text << ", \"largest\": " << largest << "}" << std::endl;
        mtmd_input_chunks_free(chunks);
        for (mtmd_bitmap * frame : frames) mtmd_bitmap_free(frame);
    }
    return 0;
}
