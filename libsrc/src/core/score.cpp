// Many prompts through few leases, and a branch read anew on its own sequence.
#include <algorithm>

#include "core/store.hpp"

namespace pyl {

void Store::score(pyl_branch source, std::span<const std::span<const Token>> prompts, std::span<const Token> ids, float * out) {
    const Branch * from = source ? &get_healthy(source) : nullptr;
    for (size_t i = 0; i < ids.size(); i++) need_known(ids[i], i);
    const size_t left = live_.n_ctx - std::min(cells_used_, live_.n_ctx);
    for (size_t i = 0; i < prompts.size(); i++) {
        if (prompts[i].empty() && !(from && from->logits.any())) throw Error(PYL_E_INVALID, "an empty prompt continues nothing that has logits").at(i);
        if (prompts[i].size() > left) {
            throw Error(PYL_E_CONTEXT, std::to_string(prompts[i].size()) + " cells wanted, " + std::to_string(left) + " left").at(i).numbers(static_cast<int64_t>(prompts[i].size()), static_cast<int64_t>(left));
        }
        for (const Token token : prompts[i]) need_known(token, i);
    }
    if (prompts.empty()) return;
    need_leases(1);
    const size_t width = ids.empty() ? n_vocab_ : ids.size();
    std::vector<pyl_branch> made;
    made.reserve(std::min(prompts.size(), free_slots_.size()));
    std::vector<pyl_run> runs;
    const auto prune_made = [&]() noexcept {  // never fails, unlike a prune that may be refused
        for (const pyl_branch branch : made) prune_subtree(branch);
        made.clear();
    };
    for (size_t first = 0; first < prompts.size();) {
        size_t n = 0;
        for (size_t cells = 0; first + n < prompts.size() && n < free_slots_.size() && cells + prompts[first + n].size() <= left; n++) cells += prompts[first + n].size();
        try {
            made.resize(n);
            if (from) {
                fork(source, made, nullptr);
            } else {
                for (pyl_branch & branch : made) branch = create(0, SamplingParams(), 0);
            }
            runs.clear();
            for (size_t i = 0; i < n; i++) {
                const auto & prompt = prompts[first + i];
                runs.push_back({sizeof(pyl_run), static_cast<uint32_t>(prompt.size()), made[i], prompt.data(), 0, 0});
            }
            uint32_t n_dispatches = 0;
            prefill(runs, 0, n_dispatches);
            for (size_t i = 0; i < n; i++) {
                const float * row = logits(get(made[i]));
                float * to = out + (first + i) * width;
                if (ids.empty()) std::copy(row, row + n_vocab_, to);
                for (size_t k = 0; k < ids.size(); k++) to[k] = row[ids[k]];
            }
        } catch (Error & error) {  // whatever became of the forks, they are gone, and nothing else was touched
            prune_made();
            error.state = PYL_STATE_UNCHANGED;
            error.partial = false;
            if (error.index >= 0) error.index += static_cast<int32_t>(first);
            throw;
        } catch (...) {
            prune_made();
            throw;
        }
        prune_made();
        first += n;
    }
}

void Store::reseed_kv(pyl_branch branch, std::span<const Token> tokens, uint32_t & n_landed) {
    n_landed = 0;
    Branch & found = get_healthy(branch);
    if (!found.children.empty()) throw Error(PYL_E_HAS_CHILDREN, "the branch has children, which read its cells").numbers(0, static_cast<int64_t>(found.children.size()));
    if (tokens.empty()) throw Error(PYL_E_INVALID, "no tokens to read");
    for (size_t i = 0; i < tokens.size(); i++) need_known(tokens[i], i);
    const size_t left = live_.n_ctx - std::min(cells_used_, live_.n_ctx) + found.cells_own;
    if (tokens.size() > left) {
        throw Error(PYL_E_CONTEXT, std::to_string(tokens.size()) + " cells wanted, " + std::to_string(left) + " left with the branch's own").numbers(static_cast<int64_t>(tokens.size()), static_cast<int64_t>(left));
    }
    epoch_++;
    empty_sequence(found, true);
    cells_used_ -= found.cells_own;
    found.cells_own = found.cells_inherited = 0;
    found.position = found.start = 0;
    found.logits.clear();
    pyl_run run{sizeof(pyl_run), static_cast<uint32_t>(tokens.size()), branch, tokens.data(), 0, 0};
    uint32_t n_dispatches = 0;
    try {
        prefill({&run, 1}, 0, n_dispatches);
    } catch (Error & error) {
        n_landed = run.n_landed;
        error.partial = true;  // the old cells are gone
        if (error.state == PYL_STATE_UNCHANGED) error.state = PYL_STATE_ADVANCED;
        throw;
    } catch (const std::bad_alloc &) {
        Error error(PYL_E_OUT_OF_MEMORY, "");
        error.partial = true;
        error.state = PYL_STATE_ADVANCED;
        throw error;
    }
    n_landed = run.n_landed;
}

}  // namespace pyl
