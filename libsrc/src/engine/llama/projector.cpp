// Pictures and sound through mtmd. A prompt is laid out with placeholders, which give exact counts without a pixel; when a stretch of
// rows is wanted, its pictures alone are prepared and encoded. So a long clip costs its pixels and one frame's preparation. What was
// prepared of a picture with several stretches (tiles, half minutes of sound) is kept until its last one is encoded.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <list>

#include "core/prompt.hpp"
#include "core/registry.hpp"
#include "engine/llama/assertion.hpp"
#include "engine/llama/llama_parts.hpp"
#include "engine/llama/pretend.hpp"
#include "gguf.h"
#include "mtmd.h"

namespace pyl {

namespace {

struct FreeGguf {
    void operator()(gguf_context * context) const { gguf_free(context); }
};

// What the file says of itself, before any of it is loaded.
struct ProjectorHeader {
    std::string type;
    int64_t width = 0;  // of its rows, when the file says
    std::string width_key;
    bool has_vision = false, has_audio = false;
    uint64_t n_bytes = 0;  // of its tensors
};

ProjectorHeader read_header(const std::string & path) {
    check_gguf_file(path);
    const LogCapture log;
    const std::unique_ptr<gguf_context, FreeGguf> file(gguf_init_from_file(path.c_str(), {true, nullptr}));
    if (!file) throw Error(PYL_E_FORMAT, "cannot read the header of " + path + ": " + log.words("the engine gave no reason"));
    const auto text = [&](const char * key) {
        const int64_t id = gguf_find_key(file.get(), key);
        return id >= 0 && gguf_get_kv_type(file.get(), id) == GGUF_TYPE_STRING ? std::string(gguf_get_val_str(file.get(), id)) : std::string();
    };
    const auto truth = [&](const char * key) {
        const int64_t id = gguf_find_key(file.get(), key);
        return id >= 0 && gguf_get_kv_type(file.get(), id) == GGUF_TYPE_BOOL && gguf_get_val_bool(file.get(), id);
    };
    std::error_code gone;
    ProjectorHeader out;
    const uint64_t has_bytes = std::filesystem::file_size(path_of(path), gone);
    for (int64_t i = 0; !gone && i < gguf_get_n_tensors(file.get()); i++) {  // the engine reads short and goes on
        out.n_bytes += gguf_get_tensor_size(file.get(), i);
        const uint64_t end = gguf_get_data_offset(file.get()) + gguf_get_tensor_offset(file.get(), i) + gguf_get_tensor_size(file.get(), i);
        if (end > has_bytes) throw Error(PYL_E_FORMAT, path + " is cut off: tensor '" + gguf_get_tensor_name(file.get(), i) + "' ends at byte " + std::to_string(end) + " of " + std::to_string(has_bytes));
    }
    if (const std::string arch = text("general.architecture"); arch != "clip") throw Error(PYL_E_PROJECTOR, path + " is no projector: its general.architecture is '" + arch + "', not 'clip'");
    for (const char * key : {"clip.projector_type", "clip.vision.projector_type", "clip.audio.projector_type"}) {
        if (out.type.empty()) out.type = text(key);
    }
    out.has_vision = truth("clip.has_vision_encoder"), out.has_audio = truth("clip.has_audio_encoder");
    for (const char * key : {"clip.vision.projection_dim", "clip.audio.projection_dim"}) {
        const int64_t id = gguf_find_key(file.get(), key);
        if (out.width == 0 && id >= 0 && gguf_get_kv_type(file.get(), id) == GGUF_TYPE_UINT32) out.width = gguf_get_val_u32(file.get(), id), out.width_key = key;
    }
    return out;
}

}  // namespace

void check_projector_file(const std::string & path) { read_header(path); }

namespace {

class LlamaPrompt;

// Encoded rows by content, the least recently used first to go.
class RowCache {
public:
    explicit RowCache(uint64_t limit_bytes) : limit_(limit_bytes) {}
    std::shared_ptr<const std::vector<float>> find(const std::string & key) {
        const auto found = at_.find(key);
        if (found == at_.end()) return nullptr;
        order_.splice(order_.end(), order_, found->second);
        return found->second->second;
    }
    bool contains(const std::string & key) const { return at_.contains(key); }
    void add(const std::string & key, std::shared_ptr<const std::vector<float>> rows) {
        const uint64_t bytes = rows->size() * sizeof(float);
        if (bytes > limit_ || at_.contains(key)) return;
        while (bytes_ + bytes > limit_) {
            bytes_ -= order_.front().second->size() * sizeof(float);
            at_.erase(order_.front().first);
            order_.pop_front();
        }
        order_.emplace_back(key, std::move(rows));
        at_[key] = std::prev(order_.end());
        bytes_ += bytes;
    }
    uint64_t bytes() const { return bytes_; }

private:
    uint64_t limit_, bytes_ = 0;
    std::list<std::pair<std::string, std::shared_ptr<const std::vector<float>>>> order_;
    std::map<std::string, decltype(order_)::iterator> at_;
};

struct Block {
    size_t ordinal;  // which of the part's blocks: tiling projectors make several of one picture
    bool is_last;    // of its part
};

using Rows = std::shared_ptr<const std::vector<float>>;

// A picture or sound made ready for the encoder.
struct Prepared {
    uint32_t part = 0;
    mtmd::input_chunks_ptr chunks;
};

using Load = std::function<std::shared_ptr<mtmd_context>()>;

class LlamaProjector final : public Projector {
public:
    LlamaProjector(std::shared_ptr<const Model> model, std::shared_ptr<mtmd_context> context, Load load, const ProjectorParams & params, int n_frames_merged, bool takes_several, uint64_t weights_bytes)
        : model_(std::move(model)), context_(std::move(context)), load_(std::move(load)), cache_(params.cache_bytes), max_rows_(params.image_max_tokens), n_frames_merged_(n_frames_merged), takes_several_(takes_several), weights_bytes_(weights_bytes) {
        const mtmd_context * c = context_.get();
        has_vision_ = mtmd_support_vision(c), has_audio_ = mtmd_support_audio(c), is_mrope_ = mtmd_decode_use_mrope(c), is_non_causal_ = mtmd_decode_use_non_causal(c, nullptr);
        sample_rate_ = std::max(0, mtmd_get_audio_sample_rate(c));
    }

    pyl_projector_info info() const override {
        const std::scoped_lock lock(mutex_);
        uint64_t compute_bytes = 0;
        for (const auto & [where, bytes] : graph_bytes_) compute_bytes += bytes;
        return {sizeof(pyl_projector_info), has_vision_, has_audio_, sample_rate_, model_->info().n_embd_inp, is_mrope_, is_non_causal_,
                n_frames_merged_, n_encodes_, n_cache_hits_, cache_.bytes(), encode_s_, n_prepared_, weights_bytes_, compute_bytes};
    }
    const std::shared_ptr<const Model> & model() const override { return model_; }
    std::shared_ptr<Prompt> lay_out(std::shared_ptr<const Projector> self, std::vector<Part> parts) const override;

    // The chunks of these parts, with their pixels or as placeholders.
    mtmd::input_chunks_ptr chunks_of(std::span<const Part> parts, bool with_content) const;
    // The rows of a segment; with an encoder that takes several pictures at once, those of the segments behind it too, for when they are asked for.
    Rows encode(const LlamaPrompt & prompt, size_t index) const;

private:
    Rows encode_run(const LlamaPrompt & prompt, size_t index) const;
    const mtmd_input_chunk * prepare(const LlamaPrompt & prompt, size_t index, std::vector<Prepared> & kept) const;
    std::shared_ptr<mtmd_context> context() const {
        const std::scoped_lock lock(context_mutex_);
        if (!context_) context_ = load_();
        return context_;
    }

    std::shared_ptr<const Model> model_;
    // Loaded again when it is wanted after memory ran out in it: what it then holds is of no use, and kills the engine.
    mutable std::shared_ptr<mtmd_context> context_;
    Load load_;
    mutable std::mutex context_mutex_;
    mutable std::mutex mutex_;  // the encoder has one output buffer
    mutable RowCache cache_;
    uint32_t max_rows_;  // of a picture; 0 for what the file says
    int n_frames_merged_, sample_rate_;
    mutable bool takes_several_;  // pictures in one run
    bool has_vision_, has_audio_, is_mrope_, is_non_causal_;
    uint64_t weights_bytes_;
    // The engine tells nobody what its encoders hold; what they last asked for is it, by kind of chunk and type of buffer.
    mutable std::map<std::pair<int, ggml_backend_buffer_type_t>, uint64_t> graph_bytes_;
    mutable uint64_t n_encodes_ = 0, n_cache_hits_ = 0, n_prepared_ = 0;
    mutable double encode_s_ = 0;
};

class LlamaPrompt final : public Prompt {
public:
    LlamaPrompt(std::shared_ptr<const LlamaProjector> projector, std::vector<Segment> segments, std::vector<Block> blocks, std::vector<Part> parts, bool is_decodable)
        : Prompt(projector->model(), std::move(segments), is_decodable), projector_(std::move(projector)), blocks_(std::move(blocks)), parts_(std::move(parts)) {}
    void with_rows(size_t segment, const std::function<void(const float *)> & use) const override {
        const Rows rows = projector_->encode(*this, segment);
        use(rows->data());
    }

private:
    friend LlamaProjector;
    std::span<const Part> parts_of(const Segment & segment) const { return std::span(parts_).subspan(segment.part, segment.n_parts); }

    // What the cache knows the rows of a segment by; empty for what has no name.
    std::string key_of(size_t index) const {
        const Segment & segment = segments()[index];
        std::string key;
        for (const Part & part : parts_of(segment)) {
            if (part.id.empty()) return {};
            key += std::to_string(part.id.size()) + ":" + part.id + "|";  // lengths keep "a|b" apart from "a" and "b"
        }
        // and the number of rows what should never have had one id
        return key + std::to_string(blocks_[index].ordinal) + "/" + std::to_string(segment.n_rows);
    }

    // Whether two segments may share a run. mtmd compares numbers of rows alone, and would read a picture of 32 x 64 by the width of one of 64 x 32;
    // tiles of one picture are of one shape in all encoders that take several.
    bool is_alike(size_t a, size_t b) const {
        const Segment &s = segments()[a], &t = segments()[b];
        const Part &p = parts_[s.part], &q = parts_[t.part];
        if (p.kind != PYL_PART_IMAGE || q.kind != PYL_PART_IMAGE || s.n_rows != t.n_rows || s.n_parts != 1 || t.n_parts != 1) return false;
        return s.part == t.part || (p.width == q.width && p.height == q.height && blocks_[a].ordinal == blocks_[b].ordinal);
    }

    std::shared_ptr<const LlamaProjector> projector_;
    std::vector<Block> blocks_;
    std::vector<Part> parts_;
    // Under the projector's lock: the picture whose stretches are being encoded, and rows that were encoded with earlier ones.
    mutable Prepared prepared_;
    mutable std::map<size_t, Rows> ahead_;
};

mtmd::input_chunks_ptr LlamaProjector::chunks_of(std::span<const Part> parts, bool with_content) const {
    std::vector<mtmd_input_text> texts(parts.size());
    std::vector<mtmd::bitmap_ptr> bitmaps(parts.size());
    std::vector<mtmd_input_part> raw(parts.size());
    std::vector<const mtmd_input_part *> pointers;
    for (size_t i = 0; i < parts.size(); i++) {
        const Part & part = parts[i];
        if (part.kind == PYL_PART_TEXT) {
            texts[i] = {part.text.data(), part.text.size(), false, (part.flags & PYL_TOKENIZE_PARSE_SPECIAL) != 0};
            raw[i].text = &texts[i];
        } else {
            bitmaps[i].reset(part.kind == PYL_PART_IMAGE ? mtmd_bitmap_init(part.width, part.height, with_content ? part.rgb.data() : nullptr)
                                                         : mtmd_bitmap_init_from_audio(part.n, with_content ? part.samples.data() : nullptr));
            mtmd_bitmap_set_id(bitmaps[i].get(), std::to_string(i).c_str());  // says which part a chunk came from
            mtmd_bitmap_set_mergeable(bitmaps[i].get(), part.is_frame);
            raw[i].bitmap = bitmaps[i].get();
        }
        pointers.push_back(&raw[i]);
    }
    mtmd::input_chunks_ptr out(mtmd_input_chunks_init());
    const LogCapture log;
    if (mtmd_tokenize_from_parts(context().get(), out.get(), pointers.data(), pointers.size(), false) != 0) throw Error(PYL_E_MEDIA, "a picture or sound cannot be prepared: " + log.words("the engine gave no reason"));
    return out;
}

std::vector<Place> places_of(const mtmd_input_chunk * chunk, bool is_mrope) {
    const size_t n = mtmd_input_chunk_get_n_tokens(chunk);
    std::vector<Place> out((is_mrope ? 4 : 1) * n);
    const mtmd_image_tokens * image = is_mrope ? mtmd_input_chunk_get_tokens_image(chunk) : nullptr;
    for (size_t i = 0; i < n; i++) {
        if (!image) {
            for (size_t at = i; at < out.size(); at += n) out[at] = {static_cast<int32_t>(i), true};
            continue;
        }
        // Some models count rows and columns from 0 wherever the picture stands: asked at two places, they tell which.
        constexpr llama_pos elsewhere = 1000;
        const mtmd_decoder_pos here = mtmd_image_tokens_get_decoder_pos(image, 0, i), there = mtmd_image_tokens_get_decoder_pos(image, elsewhere, i);
        const uint32_t a[4] = {here.t, here.y, here.x, here.z}, b[4] = {there.t, there.y, there.x, there.z};
        for (size_t section = 0; section < 4; section++) out[section * n + i] = {static_cast<int32_t>(a[section]), b[section] == a[section] + elsewhere};
    }
    return out;
}

std::shared_ptr<Prompt> LlamaProjector::lay_out(std::shared_ptr<const Projector> self, std::vector<Part> parts) const {
    bool is_decodable = true;
    for (size_t i = 0; i < parts.size(); i++) {
        const Part & part = parts[i];
        is_decodable &= !part.is_placeholder();
        if (part.kind == PYL_PART_IMAGE && !has_vision_) throw Error(PYL_E_PROJECTOR, "this projector does not see").at(i);
        if (part.kind == PYL_PART_AUDIO && !has_audio_) throw Error(PYL_E_PROJECTOR, "this projector does not hear").at(i);
        // Of one sample alone the engine aborts the process.
        if (part.kind == PYL_PART_AUDIO && part.n < 2) throw Error(PYL_E_MEDIA, "a sound of one sample; its encoder takes 2 or more").at(i).numbers(2, static_cast<int64_t>(part.n));
    }
    const mtmd::input_chunks_ptr chunks = chunks_of(parts, false);
    // Sizes are counted for any shape, but a very thin picture may not be one that can be scaled: better known now than half-way.
    for (size_t i = 0; i < parts.size(); i++) {
        const Part & part = parts[i];
        if (part.kind != PYL_PART_IMAGE || part.is_placeholder() || std::max(part.width, part.height) < 32 * std::min(part.width, part.height)) continue;
        try {
            chunks_of({&part, 1}, true);
        } catch (Error & error) {
            throw std::move(error).at(i);
        }
    }
    std::vector<Segment> segments;
    std::vector<Block> blocks;
    for (size_t k = 0; k < mtmd_input_chunks_size(chunks.get()); k++) {
        const mtmd_input_chunk * chunk = mtmd_input_chunks_get(chunks.get(), k);
        Segment s;
        size_t ordinal = 0;
        if (mtmd_input_chunk_get_type(chunk) == MTMD_INPUT_CHUNK_TYPE_TEXT) {
            size_t n = 0;
            const llama_token * tokens = mtmd_input_chunk_get_tokens_text(chunk, &n);
            s.tokens.assign(tokens, tokens + n);
            s.part = segments.empty() ? 0 : segments.back().part;
            if (n == 0) continue;
        } else {
            s.part = static_cast<uint32_t>(std::stoul(mtmd_input_chunk_get_id(chunk)));
            for (size_t b = segments.size(); b-- > 0;) {
                if (segments[b].is_text()) continue;
                if (segments[b].part == s.part) ordinal = blocks[b].ordinal + 1, blocks[b].is_last = false;
                break;
            }
            s.n_rows = static_cast<uint32_t>(mtmd_input_chunk_get_n_tokens(chunk));
            s.n_pos = mtmd_input_chunk_get_n_pos(chunk);
            s.is_non_causal = s.is_whole = mtmd_decode_use_non_causal(context().get(), chunk);
            s.places = places_of(chunk, is_mrope_);
            if (s.n_rows == 0 || s.n_pos < 1) throw Error(PYL_E_MEDIA, "a picture or sound takes no rows").at(s.part);
        }
        segments.push_back(std::move(s));
        blocks.push_back({ordinal, true});
    }
    // A medium that heads no block was merged into the one before it.
    for (size_t i = 0; i < parts.size(); i++) {
        if (!parts[i].is_media()) continue;
        bool heads = false;
        Segment * before = nullptr;
        uint32_t n_rows = 0, n_blocks = 0, largest = 0;
        for (Segment & s : segments) {
            if (s.is_text()) continue;
            if (s.part == i) heads = true, n_rows += s.n_rows, n_blocks++, largest = std::max(largest, s.n_rows);
            if (s.part < i) before = &s;
        }
        // The engine takes the bound as an area, and what is too thin for one row or column of it grows beyond; encoders of one size never look.
        // The view of the whole that stands beside tiles is not counted, there or here.
        if (n_blocks > 1) n_rows -= largest;
        if (max_rows_ && parts[i].kind == PYL_PART_IMAGE && n_rows > max_rows_) {
            const std::string size = std::to_string(parts[i].width) + " x " + std::to_string(parts[i].height);
            throw Error(PYL_E_MEDIA, "a picture of " + size + " pixels takes " + std::to_string(n_rows) + " rows of this projector, more than image_max_tokens (" + std::to_string(max_rows_) + "), and the engine makes it no smaller: it is too thin, or this encoder has sizes of its own")
                .at(i)
                .numbers(n_rows, max_rows_);
        }
        if (heads) continue;
        if (!before || before->part + 1 != i || !parts[i].is_frame) throw Error(PYL_E_MEDIA, "a picture or sound was left out by the engine").at(i);
        before->n_parts = 2;
    }
    return std::make_shared<LlamaPrompt>(std::static_pointer_cast<const LlamaProjector>(self), std::move(segments), std::move(blocks), std::move(parts), is_decodable);
}

// The chunk of a segment, of a picture that is prepared now if it is not yet. Pictures that are done go to `kept`, with the chunks given out before.
const mtmd_input_chunk * LlamaProjector::prepare(const LlamaPrompt & prompt, size_t index, std::vector<Prepared> & kept) const {
    const Segment & segment = prompt.segments()[index];
    Prepared & prepared = prompt.prepared_;
    if (!prepared.chunks || prepared.part != segment.part) {
        if (prepared.chunks) kept.push_back(std::move(prepared));
        prepared.chunks.reset();
        prepared = {segment.part, chunks_of(prompt.parts_of(segment), true)};
        n_prepared_++;
    }
    const mtmd_input_chunk * chunk = nullptr;
    for (size_t k = 0, media = 0; k < mtmd_input_chunks_size(prepared.chunks.get()); k++) {
        const mtmd_input_chunk * one = mtmd_input_chunks_get(prepared.chunks.get(), k);
        if (mtmd_input_chunk_get_type(one) != MTMD_INPUT_CHUNK_TYPE_TEXT && media++ == prompt.blocks_[index].ordinal) chunk = one;
    }
    if (!chunk || mtmd_input_chunk_get_n_tokens(chunk) != segment.n_rows) throw Error(PYL_E_MEDIA, "the engine lays a picture out differently alone than in its prompt; this projector is not supported");
    return chunk;
}

Rows LlamaProjector::encode(const LlamaPrompt & prompt, size_t index) const {
    const std::scoped_lock lock(mutex_);
    try {
        return encode_run(prompt, index);
    } catch (const Error & error) {
        if (error.code != PYL_E_OUT_OF_MEMORY || !takes_several_) throw;
        takes_several_ = false;  // one alone may fit, now and from now on
        return encode_run(prompt, index);
    }
}

Rows LlamaProjector::encode_run(const LlamaPrompt & prompt, size_t index) const {
    if (auto node = prompt.ahead_.extract(index)) return std::move(node.mapped());
    const std::string key = prompt.key_of(index);
    if (auto found = key.empty() ? nullptr : cache_.find(key)) {
        n_cache_hits_++;
        return found;
    }
    const auto & segments = prompt.segments();
    const auto encoder = context();
    std::vector<Prepared> kept;
    std::vector<std::pair<size_t, const mtmd_input_chunk *>> run;
    std::vector<std::string> keys;
    if (prompt.prepared_.chunks && prompt.prepared_.part != segments[index].part) prompt.prepared_.chunks.reset();  // not two at once where one is enough
    run.emplace_back(index, prepare(prompt, index, kept));
    keys.push_back(key);
    const mtmd::batch_ptr batch(mtmd_batch_init(encoder.get()));
    mtmd_batch_add_chunk(batch.get(), run[0].second);
    for (size_t i = index + 1; takes_several_ && i < segments.size(); i++) {
        if (segments[i].is_text()) continue;
        if (!prompt.is_alike(index, i)) break;
        std::string name = prompt.key_of(i);
        if (prompt.ahead_.contains(i) || (!name.empty() && (cache_.contains(name) || std::find(keys.begin(), keys.end(), name) != keys.end()))) continue;
        try {
            const mtmd_input_chunk * chunk = prepare(prompt, i, kept);
            if (mtmd_batch_add_chunk(batch.get(), chunk) != 0) break;
            run.emplace_back(i, chunk);
        } catch (const Error &) {
            break;  // what is wrong with it is said when its turn comes
        }
        keys.push_back(std::move(name));
    }
    const auto start = std::chrono::steady_clock::now();
    const LogCapture log;
    const BufferScope watch(BufferScope::Mode::covered);
    const auto need_all = [&] {
        if (watch.missed_bytes == 0) return;
        const std::scoped_lock spent(context_mutex_);
        context_.reset();
        graph_bytes_.clear();
        throw Error(PYL_E_OUT_OF_MEMORY, "the encoder's graph takes " + std::to_string(watch.missed_bytes) + " bytes for this picture or sound, which are not to be had").numbers(static_cast<int64_t>(watch.missed_bytes), -1);
    };
    const bool is_several = run.size() > 1 && mtmd_batch_encode(batch.get()) == 0;
    need_all();
    const int32_t rc = is_several ? 0 : mtmd_encode_chunk(encoder.get(), run[0].second);  // alone too when several were too much
    need_all();
    for (const auto & [type, bytes] : watch.asked) graph_bytes_[{static_cast<int>(mtmd_input_chunk_get_type(run[0].second)), type}] = bytes;
    encode_s_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    n_encodes_++;
    const size_t last = is_several ? run.back().first : index;
    if (prompt.blocks_[last].is_last && segments[last].part == prompt.prepared_.part) kept.push_back(std::move(prompt.prepared_));  // goes with this call
    if (rc != 0) throw Error(PYL_E_MEDIA, "a picture or sound cannot be encoded: " + log.words("the engine gave no reason")).from_engine(rc);
    Rows out;
    for (size_t k = 0; k < (is_several ? run.size() : 1); k++) {
        const Segment & segment = segments[run[k].first];
        const float * data = is_several ? mtmd_batch_get_output_embd(batch.get(), run[k].second) : mtmd_get_output_embd(encoder.get());
        auto rows = std::make_shared<const std::vector<float>>(data, data + static_cast<size_t>(segment.n_rows) * static_cast<size_t>(model_->info().n_embd_inp));
        if (!keys[k].empty()) cache_.add(keys[k], rows);
        if (k == 0) out = std::move(rows);
        else prompt.ahead_[run[k].first] = std::move(rows);
    }
    return out;
}

}  // namespace

std::shared_ptr<Projector> LlamaModel::open_projector(std::shared_ptr<const Model> self, const std::string & path, const ProjectorParams & params) const {
    if (params_.vocab_only) throw Error(PYL_E_UNSUPPORTED, "the model was opened with vocab_only: it has no weights to run");
    const ProjectorHeader header = read_header(path);
    // Encoders with deep stacks give rows several times as wide as they say; the engine itself compares the width it really makes.
    if (header.width > 0 && info_.n_embd_inp % header.width != 0) {
        throw Error(PYL_E_PROJECTOR, "the projector makes rows of " + std::to_string(header.width) + " (" + header.width_key + " of " + path + "), the model reads " + std::to_string(info_.n_embd_inp) + " (" + name_ + ")")
            .numbers(info_.n_embd_inp, header.width);
    }
    mtmd_context_params p = mtmd_context_params_default();
    p.use_gpu = params.use_gpu;
    p.print_timings = false;
    p.n_threads = static_cast<int>(params.n_threads);
    p.flash_attn_type = params.flash_attn == PYL_FLASH_ATTN_ON ? LLAMA_FLASH_ATTN_TYPE_ENABLED : params.flash_attn == PYL_FLASH_ATTN_OFF ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_AUTO;
    p.warmup = false;
    if (params.image_min_tokens) p.image_min_tokens = static_cast<int>(params.image_min_tokens);
    if (params.image_max_tokens) p.image_max_tokens = static_cast<int>(params.image_max_tokens);
    // Where an encode misses its buffer it goes on without one, up to the first node: there is no other way out of it alive.
    p.cb_eval = [](ggml_tensor *, bool, void *) -> bool {
        if (BufferScope::has_missed()) throw std::bad_alloc();
        return false;
    };
    const auto load = [path, p, type = header.type, n_bytes = header.n_bytes, model = raw()] {
        // The engine reads weights into whatever it got for them.
        void * volatile room = std::malloc(n_bytes);  // volatile: a compiler may take a pair of malloc and free for one that succeeds
        const bool has_room = room != nullptr || n_bytes == 0;
        std::free(room);
        if (!has_room) {
            throw Error(PYL_E_OUT_OF_MEMORY, "the projector's weights take " + std::to_string(n_bytes) + " bytes, which are not to be had").numbers(static_cast<int64_t>(n_bytes), -1);
        }
        const LogCapture log;
        const AssertionScope assertions;
        std::shared_ptr<mtmd_context> out(mtmd_init_from_file(path.c_str(), model, p), mtmd_free);
        if (out) return out;
        const std::string words = log.words("the engine gave no reason");
        throw Error(words.find("mismatch") != std::string::npos ? PYL_E_PROJECTOR : PYL_E_FORMAT, "the engine cannot load the projector " + path + " (type '" + type + "'): " + words);
    };
    uint64_t weights_bytes = 0;
    std::shared_ptr<mtmd_context> context;
    {
        const BufferScope watch(BufferScope::Mode::real);
        context = load();
        for (const auto & [type, bytes] : watch.asked) weights_bytes += bytes;
    }
    // Whether two frames share rows, and whether two pictures may share a run: asked with placeholders of one size.
    const auto lay_two = [&](bool are_frames) {
        mtmd::input_chunks_ptr chunks(mtmd_input_chunks_init());
        const mtmd::bitmap_ptr a(mtmd_bitmap_init(64, 64, nullptr)), b(mtmd_bitmap_init(64, 64, nullptr));
        mtmd_bitmap_set_id(a.get(), "0"), mtmd_bitmap_set_id(b.get(), "1");
        mtmd_bitmap_set_mergeable(a.get(), are_frames), mtmd_bitmap_set_mergeable(b.get(), are_frames);
        const mtmd_input_part one{nullptr, a.get()}, two{nullptr, b.get()};
        const mtmd_input_part * const both[] = {&one, &two};
        if (mtmd_tokenize_from_parts(context.get(), chunks.get(), both, 2, false) != 0) chunks.reset(mtmd_input_chunks_init());
        return chunks;
    };
    const auto first_of = [](const mtmd::input_chunks_ptr & chunks, const char * part) -> const mtmd_input_chunk * {
        for (size_t k = 0; k < mtmd_input_chunks_size(chunks.get()); k++) {
            const mtmd_input_chunk * chunk = mtmd_input_chunks_get(chunks.get(), k);
            const char * id = mtmd_input_chunk_get_id(chunk);
            if (id && std::string(id) == part) return chunk;
        }
        return nullptr;
    };
    int merged = 1;
    bool takes_several = false;
    if (mtmd_support_vision(context.get())) {
        const mtmd::input_chunks_ptr frames = lay_two(true), pictures = lay_two(false);
        if (first_of(frames, "0") && !first_of(frames, "1")) merged = 2;
        const mtmd_input_chunk *a = first_of(pictures, "0"), *b = first_of(pictures, "1");
        const mtmd::batch_ptr batch(mtmd_batch_init(context.get()));
        takes_several = a && b && mtmd_batch_add_chunk(batch.get(), a) == 0 && mtmd_batch_add_chunk(batch.get(), b) == 0;
    }
    return std::make_shared<LlamaProjector>(std::move(self), std::move(context), load, params, merged, takes_several, weights_bytes);
}

}  // namespace pyl
