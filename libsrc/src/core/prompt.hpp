// A prompt: text and rows of an encoder in order, each with the cells and positions it takes. Rows are encoded when they are
// asked for, one stretch at a time; everything else is known from the start.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "engine/engine.hpp"

namespace pyl {

// Where one row stands, relative to the position its stretch begins at; some models count rows and columns from 0 instead.
struct Place {
    int32_t at = 0;
    bool is_relative = true;
};

struct Segment {
    std::vector<Token> tokens;  // text, or empty
    uint32_t n_rows = 0;
    int32_t n_pos = 0;
    bool is_non_causal = false;
    bool is_whole = false;  // has to be read in one dispatch
    std::vector<Place> places;  // n_rows, or four sections of n_rows: time, row, column, and one more
    uint32_t part = 0, n_parts = 1;

    bool is_text() const { return n_rows == 0; }
    uint32_t n_cells() const { return is_text() ? static_cast<uint32_t>(tokens.size()) : n_rows; }
    int32_t span() const { return is_text() ? static_cast<int32_t>(tokens.size()) : n_pos; }
};

class Prompt {
public:
    Prompt(std::shared_ptr<const Model> model, std::vector<Segment> segments, bool is_decodable) : model_(std::move(model)), segments_(std::move(segments)), is_decodable_(is_decodable) {}
    virtual ~Prompt() = default;

    const std::shared_ptr<const Model> & model() const { return model_; }
    const std::vector<Segment> & segments() const { return segments_; }
    bool is_decodable() const { return is_decodable_; }
    // Calls `use` with the rows of a segment: n_rows * n_embd_inp floats, gone afterwards. PYL_E_MEDIA when they cannot be had.
    virtual void with_rows(size_t segment, const std::function<void(const float * rows)> & use) const = 0;

    pyl_quote quote() const {
        pyl_quote out{sizeof(pyl_quote), static_cast<uint32_t>(segments_.size()), 0, 0, 0, 0, is_decodable_};
        for (const Segment & s : segments_) {
            out.n_cells += s.n_cells();
            out.n_pos += static_cast<uint32_t>(s.span());
            out.n_media += !s.is_text();
            if (s.is_whole) out.max_rows = std::max(out.max_rows, s.n_rows);
        }
        return out;
    }

private:
    std::shared_ptr<const Model> model_;
    std::vector<Segment> segments_;
    bool is_decodable_;
};

// Parts in order to one prompt. `projector` may be null when no part needs one.
std::shared_ptr<Prompt> make_prompt(const std::shared_ptr<const Model> & model, const std::shared_ptr<const Projector> & projector, std::vector<Part> parts, bool add_special);
std::string segments_json(const Prompt & prompt);

}  // namespace pyl
