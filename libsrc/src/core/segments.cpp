// Decoding prompts that hold more than text. Text goes the way of every prefill; rows of an encoder land as one block: their
// branch either stands before it or after it, or is poisoned.
#include <algorithm>

#include "core/store.hpp"

namespace pyl {

void Store::decode_rows(Branch & branch, const Segment & segment, const float * rows, bool landed_any) {
    const size_t width = static_cast<size_t>(model_->info().n_embd_inp), sections = segment.places.size() / segment.n_rows;
    Branch * const touched[] = {&branch};
    uint32_t done = 0;
    // Here and nowhere after: half of a picture cannot be taken back, so no memory may be missing between its dispatches.
    row_batch_.pos.reserve(sections * std::min(segment.n_rows, params_.n_batch));
    take_own_sequence(branch);
    part_from_borrowers(branch);
    save_rows(touched);
    while (done < segment.n_rows) {
        const uint32_t n = std::min(segment.n_rows - done, params_.n_batch);
        row_batch_.rows = rows + done * width;
        row_batch_.n = n;
        row_batch_.seq = branch.seat.seq;
        row_batch_.is_non_causal = segment.is_non_causal;
        row_batch_.wants_logits = done + n == segment.n_rows;
        row_batch_.pos.clear();
        for (size_t section = 0; section < sections; section++) {  // every section is cut alike
            for (uint32_t k = 0; k < n; k++) {
                const Place & place = segment.places[section * segment.n_rows + done + k];
                row_batch_.pos.push_back(place.at + (place.is_relative ? branch.position : 0));
            }
        }
        epoch_++;
        const int32_t rc = run([&] { return context_->decode_rows(row_batch_); }, n);
        const bool undone = rc == 1 || rc == -1;
        if (undone && done == 0) throw decode_error(rc, landed_any);
        if (!undone) {
            branch.cells_own += n;
            cells_used_ += n;
            branch.cells_doubtful += n;  // until the whole block is in
        }
        branch.logits.clear();
        done += n;
        publish();
        if (rc != 0) {
            branch.is_poisoned = true;
            Error error = decode_error(rc, landed_any);
            error.state = PYL_STATE_POISONED;
            throw error;
        }
    }
    branch.cells_doubtful = 0;
    branch.position += segment.n_pos;
    branch.logits.row = 0;
}

void Store::decode_prompt(Branch & branch, PromptItem & item) {
    const auto & segments = item.prompt->segments();
    for (size_t i = 0; i < segments.size(); i++) {
        const Segment & segment = segments[i];
        const bool landed_any = item.n_cells_landed > 0;
        try {
            if (segment.is_text()) {
                pyl_run run{sizeof(pyl_run), static_cast<uint32_t>(segment.tokens.size()), handle(slot_of(branch)), segment.tokens.data(), 0, 0};
                uint32_t n_dispatches = 0;
                try {
                    prefill({&run, 1}, 0, n_dispatches);
                } catch (...) {
                    item.n_cells_landed += run.n_landed;
                    throw;
                }
            } else {
                if (cancel_) throw Error(PYL_E_CANCELLED, "cancelled between two stretches of a prompt");
                item.prompt->with_rows(i, [&](const float * rows) { decode_rows(branch, segment, rows, landed_any); });
            }
        } catch (Error & error) {
            error.index = -1;
            error.partial = item.n_cells_landed > 0;
            if (error.state == PYL_STATE_UNCHANGED && item.n_cells_landed > 0) error.state = PYL_STATE_ADVANCED;
            throw;
        } catch (const std::bad_alloc &) {
            Error error(PYL_E_OUT_OF_MEMORY, "");
            error.partial = item.n_cells_landed > 0;
            error.state = error.partial ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED;
            throw error;
        }
        item.n_cells_landed += segment.n_cells();
        item.n_segments_landed++;
    }
}

void Store::decode_prompts(std::span<PromptItem> items) {
    std::vector<uint32_t> slots;
    size_t total = 0;
    for (size_t i = 0; i < items.size(); i++) {
        slots.push_back(slot_of(get_healthy(items[i].branch, i)));
        const Prompt & prompt = *items[i].prompt;
        if (prompt.model() != model_) throw Error(PYL_E_PROJECTOR, "the prompt was laid out for another model than this store's").at(i);
        if (!prompt.is_decodable()) throw Error(PYL_E_INVALID, "the prompt holds a placeholder: it can be counted, not decoded").at(i);
        const pyl_quote quote = prompt.quote();
        if (quote.max_rows > params_.n_ubatch) {
            throw Error(PYL_E_INVALID, "a stretch of " + std::to_string(quote.max_rows) + " rows, which see each other or share positions, must be computed at once; " + (params_.n_ubatch < params_.n_batch ? "n_ubatch" : "n_batch") + " is " + std::to_string(params_.n_ubatch))
                .at(i)
                .numbers(quote.max_rows, params_.n_ubatch);
        }
        for (const Segment & segment : prompt.segments()) {
            for (const Token token : segment.tokens) need_known(token, i);
        }
        total += quote.n_cells;
    }
    need_distinct(slots);
    need_cells(total);
    for (size_t i = 0; i < items.size(); i++) {
        try {
            decode_prompt(slots_[slots[i]], items[i]);
        } catch (Error & error) {
            items[i].error = std::move(error);
        }
    }
}

}  // namespace pyl
