// What mtmd makes of a prompt with pictures or sound by its own whole path, with nothing of ours between: tests/integration/test_media_on_tiny.py
// and test_hearing.py compare its logits with the kernel's.
//
//   raw_media MODEL.gguf MMPROJ.gguf OUT N_BATCH PART...      a PART is t:words, i:WIDTH:HEIGHT:FILE, f:WIDTH:HEIGHT:FILE (a frame)
//                                                             or a:FILE (samples as floats)
//
// Writes the last logits to OUT as floats, and says where the next token would stand.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "llama.h"
#include "mtmd-helper.h"
#include "mtmd.h"

namespace {

[[noreturn]] void fail(const char * what) {
    std::fprintf(stderr, "raw_media: %s\n", what);
    std::exit(1);
}

void need(bool ok, const char * what) {
    if (!ok) fail(what);
}

std::vector<char> bytes_of(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

mtmd_bitmap * bitmap_of(const std::string & spec) {
    if (spec[0] == 'a') {
        const std::vector<char> bytes = bytes_of(spec.substr(2));
        std::vector<float> samples(bytes.size() / sizeof(float));
        std::memcpy(samples.data(), bytes.data(), samples.size() * sizeof(float));
        need(samples.size() > 1, "a sound's file is of two samples or more");
        return mtmd_bitmap_init_from_audio(samples.size(), samples.data());
    }
    const size_t first = spec.find(':', 2), second = spec.find(':', first + 1);
    need(second != std::string::npos, "a picture is i:WIDTH:HEIGHT:FILE");
    const std::vector<char> bytes = bytes_of(spec.substr(second + 1));
    const auto width = static_cast<uint32_t>(std::stoul(spec.substr(2))), height = static_cast<uint32_t>(std::stoul(spec.substr(first + 1)));
    need(bytes.size() == size_t{width} * height * 3, "a picture's file is of another size");
    mtmd_bitmap * out = mtmd_bitmap_init(width, height, reinterpret_cast<const unsigned char *>(bytes.data()));
    mtmd_bitmap_set_mergeable(out, spec[0] == 'f');
    return out;
}

}  // namespace

int main(int argc, char ** argv) {
    need(argc > 5, "MODEL MMPROJ OUT N_BATCH PART...");
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    mtmd_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    need(model, "the model did not load");
    llama_context_params c = llama_context_default_params();
    c.n_ctx = 2560;
    c.n_batch = c.n_ubatch = static_cast<uint32_t>(std::atoi(argv[4]));
    c.n_seq_max = 1;
    c.n_threads = c.n_threads_batch = 1;
    c.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    c.swa_full = true;
    llama_context * context = llama_init_from_model(model, c);
    need(context, "no context");
    mtmd_context_params p = mtmd_context_params_default();
    p.use_gpu = p.print_timings = p.warmup = false;
    p.n_threads = 1;
    mtmd_context * eye = mtmd_init_from_file(argv[2], model, p);
    need(eye, "the projector did not load");

    const int n = argc - 5;
    std::vector<mtmd_input_text> texts(static_cast<size_t>(n));
    std::vector<mtmd_input_part> parts(static_cast<size_t>(n));
    std::vector<const mtmd_input_part *> pointers;
    for (size_t i = 0; i < parts.size(); i++) {
        const char * spec = argv[5 + i];
        if (spec[0] == 't') {
            texts[i] = {spec + 2, std::strlen(spec + 2), false, false};
            parts[i].text = &texts[i];
        } else {
            parts[i].bitmap = bitmap_of(spec);
        }
        pointers.push_back(&parts[i]);
    }
    mtmd_input_chunks * chunks = mtmd_input_chunks_init();
    need(mtmd_tokenize_from_parts(eye, chunks, pointers.data(), pointers.size(), true) == 0, "the parts cannot be laid out");
    llama_pos end = 0;
    need(mtmd_helper_eval_chunks(eye, context, chunks, 0, 0, std::atoi(argv[4]), true, &end) == 0, "the parts cannot be decoded");
    std::ofstream out(argv[3], std::ios::binary);
    out.write(reinterpret_cast<const char *>(llama_get_logits_ith(context, -1)), static_cast<std::streamsize>(sizeof(float)) * llama_vocab_n_tokens(llama_model_get_vocab(model)));
    need(out.good(), "OUT cannot be written");
    std::printf("%d\n", end);
    for (const mtmd_input_part & part : parts) mtmd_bitmap_free(const_cast<mtmd_bitmap *>(part.bitmap));
    mtmd_input_chunks_free(chunks);
    mtmd_free(eye);
    llama_free(context);
    llama_model_free(model);
    return 0;
}
