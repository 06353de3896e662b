#include "core/prompt.hpp"

#include "core/json.hpp"

namespace pyl {

namespace {

// Segments from several places, in one order.
class Composed final : public Prompt {
public:
    struct Origin {
        std::shared_ptr<const Prompt> prompt;  // whose segment `index` it was; or rows of the caller's own; or neither, for text
        size_t index = 0;
        std::vector<float> rows;
    };
    Composed(std::shared_ptr<const Model> model, std::vector<Segment> segments, std::vector<Origin> origins, bool is_decodable)
        : Prompt(std::move(model), std::move(segments), is_decodable), origins_(std::move(origins)) {}

    void with_rows(size_t segment, const std::function<void(const float *)> & use) const override {
        const Origin & origin = origins_[segment];
        if (origin.prompt) return origin.prompt->with_rows(origin.index, use);
        use(origin.rows.data());
    }

private:
    std::vector<Origin> origins_;
};

// The engine reads as many sections as its model has, whatever it is given.
Segment rows_segment(const Part & part, const Model & model, size_t index) {
    const pyl_model_info & info = model.info();
    const size_t n_sections = model.n_sections();
    const auto invalid = [&](const std::string & what) { throw Error(PYL_E_INVALID, what).at(index); };
    const size_t n = part.width ? part.samples.size() / part.width : 0;
    if (n == 0) invalid("rows without anything in them");
    if (static_cast<int32_t>(part.width) != info.n_embd_inp) {
        throw Error(PYL_E_INVALID, "rows of " + std::to_string(part.width) + " floats; the model reads " + std::to_string(info.n_embd_inp)).at(index).numbers(info.n_embd_inp, part.width);
    }
    if (part.n_pos < 1 || static_cast<size_t>(part.n_pos) > n) invalid("n_pos is " + std::to_string(part.n_pos) + "; it must be in 1.." + std::to_string(n));
    for (const float value : part.samples) {
        if (!(value - value == 0)) invalid("rows hold a NaN or an infinity");
    }
    Segment out;
    out.n_rows = static_cast<uint32_t>(n);
    out.n_pos = part.n_pos;
    // Where a row has one position the engine wants every dispatch to begin one behind the last, so shared positions cannot be cut.
    out.is_non_causal = part.is_non_causal;
    out.is_whole = part.is_non_causal || (n_sections == 1 && static_cast<size_t>(part.n_pos) < n);
    out.part = static_cast<uint32_t>(index);
    if (part.positions.empty()) {
        if (static_cast<size_t>(part.n_pos) != n) invalid("rows one after another take as many positions");
        for (size_t i = 0; i < n_sections * n; i++) out.places.push_back({static_cast<int32_t>(i % n), true});
        return out;
    }
    if (part.positions.size() != n && part.positions.size() != 4 * n) invalid(std::to_string(part.positions.size()) + " positions for " + std::to_string(n) + " rows; one or four each");
    if (part.positions.size() != n && n_sections == 1) invalid("four positions a row are for M-RoPE models; this one reads one");
    for (size_t i = 0; i < part.positions.size(); i++) {
        const Pos at = part.positions[i];
        if (at < 0 || at >= part.n_pos) invalid("position " + std::to_string(at) + " is outside 0.." + std::to_string(part.n_pos - 1));
        if (i > 0 && i < n && at < part.positions[i - 1]) invalid("positions run backwards");
        const Pos before = i == 0 ? -1 : part.positions[i - 1];
        if (n_sections == 1 && (at > before + 1 || (i + 1 == n && at + 1 != part.n_pos))) invalid("positions leave a gap; this model reads all of 0.." + std::to_string(part.n_pos - 1));
        out.places.push_back({at, true});
    }
    while (out.places.size() < n_sections * n) out.places.push_back(out.places[out.places.size() - n]);  // as text stands
    return out;
}

}  // namespace

std::shared_ptr<Prompt> make_prompt(const std::shared_ptr<const Model> & model, const std::shared_ptr<const Projector> & projector, std::vector<Part> parts, bool add_special) {
    const pyl_model_info & info = model->info();
    if (projector && projector->model() != model) throw Error(PYL_E_PROJECTOR, "the projector was opened for another model");
    std::vector<Segment> segments;
    std::vector<Composed::Origin> origins;
    bool is_decodable = true;
    const auto add_text = [&](const std::vector<Token> & tokens, size_t part) {
        if (tokens.empty()) return;
        if (segments.empty() || !segments.back().is_text()) {
            segments.push_back({});
            segments.back().part = static_cast<uint32_t>(part);
            origins.push_back({});
        }
        segments.back().tokens.insert(segments.back().tokens.end(), tokens.begin(), tokens.end());
        segments.back().n_parts = static_cast<uint32_t>(part) - segments.back().part + 1;
    };
    if (add_special && info.add_bos && info.bos >= 0) add_text({info.bos}, 0);
    for (size_t i = 0; i < parts.size();) {
        Part & part = parts[i];
        if (part.kind == PYL_PART_TOKENS) {
            for (const Token token : part.tokens) {
                if (token < 0 || token >= info.n_vocab) throw Error(PYL_E_INVALID, "token " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(info.n_vocab)).at(i);
            }
            add_text(part.tokens, i++);
        } else if (part.kind == PYL_PART_ROWS) {
            segments.push_back(rows_segment(part, *model, i));
            origins.push_back({nullptr, 0, std::move(part.samples)});
            i++;
        } else {
            size_t end = i;
            bool any_media = false;
            for (; end < parts.size() && (parts[end].kind == PYL_PART_TEXT || parts[end].is_media()); end++) {
                any_media |= parts[end].is_media();
                is_decodable &= !parts[end].is_placeholder();
                if (parts[end].is_media() && !projector) throw Error(PYL_E_PROJECTOR, "a picture or sound needs a projector").at(end);
            }
            if (!any_media) {
                for (; i < end; i++) add_text(model->tokenize(parts[i].text, parts[i].flags), i);
                continue;
            }
            std::shared_ptr<const Prompt> laid;
            try {
                laid = projector->lay_out(projector, {std::make_move_iterator(parts.begin() + static_cast<std::ptrdiff_t>(i)), std::make_move_iterator(parts.begin() + static_cast<std::ptrdiff_t>(end))});
            } catch (Error & error) {
                if (error.index >= 0) error.index += static_cast<int32_t>(i);
                throw;
            }
            for (size_t k = 0; k < laid->segments().size(); k++) {
                Segment segment = laid->segments()[k];
                segment.part += static_cast<uint32_t>(i);
                if (segment.is_text()) {
                    add_text(segment.tokens, segment.part);
                } else {
                    segments.push_back(std::move(segment));
                    origins.push_back({laid, k, {}});
                }
            }
            i = end;
        }
    }
    if (add_special && info.add_eos && info.eos >= 0) add_text({info.eos}, parts.empty() ? 0 : parts.size() - 1);
    return std::make_shared<Composed>(model, std::move(segments), std::move(origins), is_decodable);
}

std::string segments_json(const Prompt & prompt) {
    std::string out = "[";
    for (const Segment & s : prompt.segments()) {
        out += out.size() > 1 ? "," : "";
        out += std::string("{\"kind\":") + (s.is_text() ? "\"text\"" : "\"rows\"") + ",\"n_cells\":" + std::to_string(s.n_cells()) + ",\"n_pos\":" + std::to_string(s.span()) + ",\"part\":" + std::to_string(s.part) +
               ",\"n_parts\":" + std::to_string(s.n_parts) + ",\"non_causal\":" + (s.is_non_causal ? "true" : "false") + (s.is_text() ? ",\"tokens\":[" : ",\"positions\":[");
        std::string list;
        for (const Token token : s.tokens) list += (list.empty() ? "" : ",") + std::to_string(token);
        for (const Place & place : s.places) list += (list.empty() ? "" : ",") + std::to_string(place.at);
        out += list + "]}";
    }
    return out + "]";
}

}  // namespace pyl
