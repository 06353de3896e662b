// What an encoder would take: its weights and the peak of its graph, laid out and not allocated.
#include <algorithm>
#include <array>
#include <map>

#include "clip-impl.h"
#include "clip-model.h"
#include "clip.h"
#include "engine/llama/llama_parts.hpp"
#include "engine/llama/pretend.hpp"

namespace pyl {

namespace {

using ByDevice = std::map<ggml_backend_dev_t, size_t>;

struct Encoders {
    explicit Encoders(const std::string & path, clip_context_params params, bool with_graph) {
        params.warmup = with_graph;
        const LogCapture log(true);
        found = clip_init(path.c_str(), params);
        if (!found.ctx_v && !found.ctx_a) throw Error(PYL_E_FORMAT, "the engine cannot load the projector " + path + ": " + log.words("it gave no reason"));
    }
    ~Encoders() {
        for (clip_ctx * one : {found.ctx_v, found.ctx_a, found.ctx_gen_a}) clip_free(one);
    }
    Encoders(const Encoders &) = delete;
    Encoders & operator=(const Encoders &) = delete;

    clip_init_result found{};
};

// Those of the encoders whose graph is known to take any picture of whole patches. For others a size of no kind the encoder was made
// for may be an assertion, which is the end of the process.
constexpr std::array any_size = {PROJECTOR_TYPE_QWEN2VL, PROJECTOR_TYPE_QWEN25VL, PROJECTOR_TYPE_QWEN3VL};

void need_size(const clip_ctx * encoder, uint32_t width, uint32_t height) {
    const clip_hparams & h = *clip_get_hparams(encoder);
    const auto is_square = [&](int32_t side) { return side > 0 && width == static_cast<uint32_t>(side) && height == width; };
    if (is_square(h.image_size) || is_square(h.warmup_image_size)) return;
    if (std::find(any_size.begin(), any_size.end(), clip_get_projector_type(encoder)) == any_size.end()) {
        throw Error(PYL_E_INVALID, "this encoder is measured with square pictures of " + std::to_string(h.image_size) + (h.warmup_image_size == h.image_size ? "" : " or " + std::to_string(h.warmup_image_size)) + " pixels a side only");
    }
    const auto grain = static_cast<uint32_t>(std::max(1, h.patch_size * h.n_merge));
    if (width == 0 || height == 0 || width % grain != 0 || height % grain != 0 || width > 16384 || height > 16384) {
        throw Error(PYL_E_INVALID, "width and height must be multiples of " + std::to_string(grain) + ", at most 16384; they are " + std::to_string(width) + " and " + std::to_string(height));
    }
}

struct BeforeComputing : std::exception {};

// The first encode lays the graph out for its picture; a picture without pixels then throws where they are copied in, and what would
// get past that throws before the first node is computed.
void lay_out(clip_ctx * encoder, const PictureShape & shape) {
    clip_image_f32_batch pictures;
    pictures.entries.resize(shape.n_frames);
    for (clip_image_f32 & one : pictures.entries) one.set_size({static_cast<int>(shape.width), static_cast<int>(shape.height)}, true, false);
    std::vector<float> rows;
    const BufferScope graph(BufferScope::Mode::pretend);
    const LogCapture log(true);
    try {
        clip_image_batch_encode(encoder, 1, &pictures, rows);
    } catch (const std::exception &) {
        if (!graph.asked.empty()) return;
    }
    throw Error(PYL_E_UNSUPPORTED, "the engine lays out no graph for such a picture: " + log.words("it gave no reason"));
}

uint64_t sum(const ByDevice & bytes) {
    uint64_t out = 0;
    for (const auto & [device, n] : bytes) out += n;
    return out;
}

}  // namespace

ProjectorMemory llama_projector_dry_run(const std::string & path, const ProjectorParams & params, const PictureShape & picture) {
    check_projector_file(path);
    clip_context_params p{};
    p.use_gpu = params.use_gpu;
    p.flash_attn_type = params.flash_attn == PYL_FLASH_ATTN_ON ? CLIP_FLASH_ATTN_TYPE_ENABLED : params.flash_attn == PYL_FLASH_ATTN_OFF ? CLIP_FLASH_ATTN_TYPE_DISABLED : CLIP_FLASH_ATTN_TYPE_AUTO;
    p.image_min_tokens = params.image_min_tokens ? static_cast<int>(params.image_min_tokens) : -1;
    p.image_max_tokens = params.image_max_tokens ? static_cast<int>(params.image_max_tokens) : -1;
    p.no_alloc = true;
    p.cb_eval = [](ggml_tensor *, bool, void *) -> bool { throw BeforeComputing(); };
    const ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const BufferScope weights(BufferScope::Mode::pretend);
    const Encoders bare(path, p, false);
    std::map<ggml_backend_dev_t, ProjectorRow> rows;
    for (const auto & [type, bytes] : weights.asked) {
        const ggml_backend_dev_t device = ggml_backend_buft_get_device(type);
        rows[device ? device : cpu].weights_bytes += bytes;
    }
    const BufferScope graphs(BufferScope::Mode::pretend);
    const Encoders whole(path, p, true);  // with its graphs: the difference is theirs
    ProjectorMemory out;
    const bool is_given = picture.width > 0 || picture.height > 0 || picture.n_frames != 1;
    const auto add = [&](const char * kind, clip_ctx * without, clip_ctx * with) {
        if (!with) return;
        const bool is_picture = with == whole.found.ctx_v;
        const clip_hparams & h = *clip_get_hparams(with);
        EncoderRow row{kind, is_picture ? h.warmup_image_size : h.warmup_audio_size, is_picture ? h.warmup_image_size : h.n_mel_bins, 0};
        const ByDevice weights_alone = clip_get_mem_usage(without);
        ByDevice compute = clip_get_mem_usage(with);
        if (is_picture && is_given) {
            const auto own = static_cast<uint32_t>(h.warmup_image_size);
            const PictureShape shape = picture.width > 0 || picture.height > 0 ? picture : PictureShape{own, own, picture.n_frames};
            need_size(without, shape.width, shape.height);
            if (const auto most = static_cast<uint32_t>(std::max(1, clip_model_n_temporal_merge(without))); shape.n_frames < 1 || shape.n_frames > most) {
                throw Error(PYL_E_INVALID, "n_frames must be in 1.." + std::to_string(most)).numbers(shape.n_frames, most);
            }
            row.width = static_cast<int32_t>(shape.width), row.height = static_cast<int32_t>(shape.height);
            lay_out(without, shape);
            compute = clip_get_mem_usage(without);
        }
        for (const auto & [device, bytes] : weights_alone) compute[device] -= bytes;
        row.compute_bytes = sum(compute);
        for (const auto & [device, bytes] : compute) rows[device].compute_bytes += bytes;
        out.encoders.push_back(row);
    };
    if (is_given && !whole.found.ctx_v) throw Error(PYL_E_INVALID, "this projector does not see, and no picture of any size can be measured");
    add("vision", bare.found.ctx_v, whole.found.ctx_v);
    add("audio", bare.found.ctx_a, whole.found.ctx_a);
    for (auto & [device, row] : rows) {
        row.device = ggml_backend_dev_name(device);
        out.rows.push_back(row);
    }
    return out;
}

}  // namespace pyl
