#include "core/prompt.hpp"

#include "abi/guard.hpp"
#include "abi/handles.hpp"
#include "core/cpu.hpp"
#include "core/memory.hpp"
#include "core/json.hpp"

namespace pyl {

static HandleTable<const Projector, pyl_projector> & projectors() {
    static auto * table = new HandleTable<const Projector, pyl_projector>("projector");  // never destroyed: a thread may still call at exit
    return *table;
}

static HandleTable<const Prompt, pyl_prompt> & prompts() {
    static auto * table = new HandleTable<const Prompt, pyl_prompt>("prompt");
    return *table;
}

std::shared_ptr<const Prompt> prompt_of(const pyl_prompt * handle) { return prompts().find(handle); }
size_t live_projectors() { return projectors().size(); }
size_t live_prompts() { return prompts().size(); }

static Part part_of(const pyl_part & given, size_t index) {
    const auto invalid = [&](bool ok, const char * what) {
        if (!ok) throw Error(PYL_E_INVALID, what).at(index);
    };
    Part out;
    out.kind = given.kind;
    out.n = given.n;
    out.width = given.width, out.height = given.height;
    out.is_frame = given.is_frame != 0, out.is_non_causal = given.is_non_causal != 0;
    out.n_pos = given.n_pos;
    if (given.id) out.id = given.id;
    switch (given.kind) {
        case PYL_PART_TEXT:
            invalid(given.text != nullptr || given.n == 0, "a text is NULL");
            invalid(given.n <= INT32_MAX, "a text of more than 2 GiB");
            invalid((given.flags & ~PYL_TOKENIZE_PARSE_SPECIAL) == 0, "flags of a text are PYL_TOKENIZE_PARSE_SPECIAL or nothing");
            if (given.n) out.text.assign(given.text, given.n);
            if (const size_t ok = utf8_valid_prefix(out.text); ok != out.text.size()) throw Error(PYL_E_FORMAT, "a text is not UTF-8 at byte " + std::to_string(ok)).at(index);
            out.flags = given.flags;
            break;
        case PYL_PART_TOKENS:
            invalid(given.tokens != nullptr || given.n == 0, "tokens is NULL");
            invalid(given.n <= INT32_MAX, "more tokens than any cache holds");
            out.tokens.assign(given.tokens, given.tokens + given.n);
            break;
        case PYL_PART_IMAGE:
            invalid(given.width > 0 && given.height > 0, "a picture without width or height");
            invalid(given.width <= 65536 && given.height <= 65536, "a picture of more than 65536 pixels a side");
            // Encoders count pixels in 32 bits: of 65536 x 65536 they took it to be a few tokens' worth.
            invalid(static_cast<uint64_t>(given.width) * given.height <= INT32_MAX, "a picture of more than 2147483647 pixels");
            if (given.rgb) out.rgb.assign(given.rgb, given.rgb + static_cast<size_t>(given.width) * given.height * 3);
            break;
        case PYL_PART_AUDIO:
            invalid(given.n > 0 && given.n <= INT32_MAX, "a sound without samples, or of too many");
            if (given.samples) out.samples.assign(given.samples, given.samples + given.n);
            // Encoders square them: what is not a number, or too large, would come out as logits that are no numbers.
            for (const float sample : out.samples) {
                if (!(sample >= -65536.0f && sample <= 65536.0f)) throw Error(PYL_E_MEDIA, "a sound with a sample that is no number, or beyond 65536; they are about -1 to 1").at(index);
            }
            break;
        case PYL_PART_ROWS:
            invalid(given.samples != nullptr && given.n > 0 && given.n <= INT32_MAX && given.width > 0 && given.width <= 1u << 24, "rows are NULL, or of no size that can be");
            out.samples.assign(given.samples, given.samples + given.n * given.width);
            invalid(given.height == 0 || given.height == 1 || given.height == 4, "height of rows is the number of positions each has: 1 (or 0) or 4");
            if (given.tokens) out.positions.assign(given.tokens, given.tokens + given.n * (given.height == 4 ? 4 : 1));
            break;
        default: invalid(false, "kind is none of PYL_PART_*");
    }
    return out;
}

}  // namespace pyl

using namespace pyl;

void pyl_projector_params_init(pyl_projector_params * params, uint32_t struct_size) {
    init_struct(params, struct_size, {sizeof(pyl_projector_params), 0, 0, PYL_FLASH_ATTN_AUTO, 0, 0, 0});
}

static ProjectorParams projector_params_of(const pyl_projector_params * given) {
    pyl_projector_params p;
    pyl_projector_params_init(&p, sizeof p);
    if (given) p = read_struct(given, p);
    need(p.n_threads <= 512, "n_threads must be at most 512");
    need(p.flash_attn >= PYL_FLASH_ATTN_AUTO && p.flash_attn <= PYL_FLASH_ATTN_OFF, "flash_attn is none of PYL_FLASH_ATTN_*");
    need(p.image_min_tokens <= 65536 && p.image_max_tokens <= 65536 && (p.image_max_tokens == 0 || p.image_min_tokens <= p.image_max_tokens), "image_min_tokens and image_max_tokens must be at most 65536, and in order");
    return {p.n_threads ? p.n_threads : usable_cores(), p.use_gpu != 0, p.flash_attn, p.image_min_tokens, p.image_max_tokens, p.cache_bytes};
}

int32_t pyl_projector_open(pyl_projector ** out, const pyl_model * model, const char * path, size_t n_path, const pyl_projector_params * params) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        const auto found = model_of(model);
        const std::string file = path_text(path, n_path);
        *out = projectors().add(found->open_projector(found, file, projector_params_of(params)));
    });
}

int32_t pyl_projector_dry_run(pyl_text ** out, const char * path, size_t n_path, const pyl_projector_params * params, uint32_t width, uint32_t height, uint32_t n_frames) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        const std::string file = path_text(path, n_path);
        *out = new_text(memory_json(engine_for(file).projector_dry_run(file, projector_params_of(params), {width, height, n_frames})));
    });
}

int32_t pyl_projector_free(pyl_projector * projector) {
    return guarded([&] { projectors().remove(projector); });
}

int32_t pyl_projector_describe(const pyl_projector * projector, pyl_projector_info * out) {
    return guarded([&] { write_struct(out, projectors().find(projector)->info()); });
}

int32_t pyl_prompt_make(pyl_prompt ** out, const pyl_model * model, const pyl_projector * projector, const pyl_part * parts, size_t n_parts, uint32_t flags) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        need((flags & ~PYL_TOKENIZE_ADD_SPECIAL) == 0, "flags are PYL_TOKENIZE_ADD_SPECIAL or nothing");
        const auto found = model_of(model);
        const auto encoder = projector ? projectors().find(projector) : nullptr;
        std::vector<Part> own;
        const Structs<const pyl_part> given(parts, n_parts);
        for (const pyl_part & part : given.items()) own.push_back(part_of(part, own.size()));
        *out = prompts().add(make_prompt(found, encoder, std::move(own), (flags & PYL_TOKENIZE_ADD_SPECIAL) != 0));
    });
}

int32_t pyl_prompt_free(pyl_prompt * prompt) {
    return guarded([&] { prompts().remove(prompt); });
}

int32_t pyl_prompt_quote(const pyl_prompt * prompt, pyl_quote * out) {
    return guarded([&] { write_struct(out, prompt_of(prompt)->quote()); });
}

int32_t pyl_prompt_segments(const pyl_prompt * prompt, pyl_text ** out) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        *out = new_text(segments_json(*prompt_of(prompt)));
    });
}
