// The part of the store that computes: prefill, sample, commit and tick.
//
// The failure rule. A dispatch either lands whole or does not: cells are checked before it, so the engine's "no room" and
// "invalid" (both undone by the engine) leave its branches as they were; any other failure may have left rows behind, and
// poisons exactly the branches of that dispatch. Sampler and grammar are fed after the dispatch landed, and checked for
// legality before: there is nothing to take back.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

#include "core/logits.hpp"
#include "core/store.hpp"

namespace pyl {

using Clock = std::chrono::steady_clock;

static double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

const float * Store::logits(const Branch & branch) const {
    if (branch.logits.row >= 0) return context_->logits(static_cast<size_t>(branch.logits.row));
    if (branch.logits.copy) return branch.logits.copy->data();
    throw Error(PYL_E_NO_LOGITS, "the branch has no logits: nothing was decoded on it since it was made or moved");
}

// The next decode overwrites the engine's output rows: whoever outlives it gets a copy first, one per row, shared.
void Store::save_rows(std::span<Branch * const> replaced) {
    std::map<int32_t, std::shared_ptr<const std::vector<float>>> copies;
    for (Branch & branch : slots_) {
        if (!branch.is_live || branch.logits.row < 0 || std::find(replaced.begin(), replaced.end(), &branch) != replaced.end()) continue;
        auto & copy = copies[branch.logits.row];
        if (!copy) {
            const float * row = context_->logits(static_cast<size_t>(branch.logits.row));
            copy = std::make_shared<const std::vector<float>>(row, row + n_vocab_);
        }
        branch.logits.copy = copy;
        branch.logits.row = -1;
    }
}

// An error whose words are given only if there is memory for them: what became of the state has to be told in any case.
static Error error_in_words(int32_t code, const char * words) {
    Error error(code, "");
    try {
        error.message = words;
    } catch (const std::bad_alloc &) {
    }
    return error;
}

Error decode_error(int32_t rc, bool partial) {
    char words[80];
    std::snprintf(words, sizeof words, "the engine failed in the middle of a dispatch (code %d)", static_cast<int>(rc));
    Error error = rc == 1    ? error_in_words(PYL_E_NO_CELLS, "the engine found no room for a dispatch that should have fitted")
                  : rc == -1 ? error_in_words(PYL_E_INTERNAL, "the engine refused a dispatch as invalid")
                             : error_in_words(PYL_E_DECODE, words);
    error.engine_rc = rc;
    error.partial = partial;
    error.state = rc != 1 && rc != -1 ? PYL_STATE_POISONED : partial ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED;
    return error;
}

// Out of memory before a dispatch: nothing of it happened, whatever landed before. No message: that would have to be allocated.
[[noreturn]] static void out_of_memory(bool landed_any) {
    Error error(PYL_E_OUT_OF_MEMORY, "");
    error.partial = landed_any;
    error.state = landed_any ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED;
    throw error;
}

// The engine goes through all cells to give a sequence's to another, and keeps a note of each: that is put off until the two differ,
// and spared a fork that is pruned before.
void Store::take_own_sequence(Branch & branch) {
    if (!branch.seat.lender) return;
    Branch & lender = slots_[branch.seat.lender - 1];
    try {
        context_->seq_copy(lender.seat.seq, branch.seat.seq);
    } catch (...) {
        context_->seq_remove(branch.seat.seq);
        throw;
    }
    branch.seat.lender = 0;
    lender.seat.n_borrowers--;
}

// Before a branch goes on: one of those who borrow from it takes what there is, and lends it to the others.
void Store::part_from_borrowers(Branch & branch) {
    if (!branch.seat.n_borrowers) return;
    Branch * heir = nullptr;
    for_borrowers(slot_of(branch), [&](Branch & borrower) {
        if (!heir) take_own_sequence(*(heir = &borrower));
        else borrower.seat.lender = slot_of(*heir) + 1;
    });
    heir->seat.n_borrowers = std::exchange(branch.seat.n_borrowers, 0);
}

// Leaves a branch with an empty sequence. What others borrow from it becomes the first one's, which moves nothing.
void Store::empty_sequence(Branch & branch, bool clear_cache) noexcept {
    if (branch.seat.lender) {
        slots_[branch.seat.lender - 1].seat.n_borrowers--;
        branch.seat.lender = 0;
    } else if (branch.seat.n_borrowers) {
        Branch * heir = nullptr;
        for_borrowers(slot_of(branch), [&](Branch & borrower) {
            if (!heir) {
                heir = &borrower;
                heir->seat.lender = 0;
                std::swap(heir->seat.seq, branch.seat.seq);
            } else {
                borrower.seat.lender = slot_of(*heir) + 1;
            }
        });
        heir->seat.n_borrowers = std::exchange(branch.seat.n_borrowers, 0) - 1;
    } else if (clear_cache) {
        context_->seq_remove(branch.seat.seq);
    }
}

// Where there is nothing but recurrent state, the engine computes sequences together only as far as their numbers follow each other
// without a gap: branches that stand apart, because others between them were pruned or rest, take numbers that do. No state is copied.
void Store::close_ranks(std::span<const Slice> slices) {
    if (!model_->info().is_recurrent || slices.size() < 2) return;
    const size_t n = slices.size(), first = static_cast<size_t>(slices.front().branch->seat.seq);
    if (static_cast<size_t>(slices.back().branch->seat.seq) - first + 1 == n) return;
    enum class Held : char { nobody, another, one_of_them };
    std::vector<Held> held(slots_.size(), Held::another);
    for (const Seq seq : free_seqs_) held[static_cast<size_t>(seq)] = Held::nobody;
    for (const Slice & slice : slices) held[static_cast<size_t>(slice.branch->seat.seq)] = Held::one_of_them;
    // Of all places where they could stand side by side, the one where most of them are already.
    size_t best = held.size(), best_seated = 0;
    for (size_t at = 0; at + n <= held.size(); at++) {
        const auto begin = held.begin() + static_cast<std::ptrdiff_t>(at), end = begin + static_cast<std::ptrdiff_t>(n);
        const auto seated = static_cast<size_t>(std::count(begin, end, Held::one_of_them));
        if (std::find(begin, end, Held::another) == end && (best == held.size() || seated > best_seated)) best = at, best_seated = seated;
    }
    if (best == held.size()) return;  // in parts, then
    Seq next = static_cast<Seq>(best);
    for (const Slice & slice : slices) {
        Seq & seq = slice.branch->seat.seq;
        if (seq >= static_cast<Seq>(best) && seq < static_cast<Seq>(best + n)) continue;
        while (held[static_cast<size_t>(next)] != Held::nobody) next++;
        try {
            context_->seq_copy(seq, next);
        } catch (...) {
            context_->seq_remove(next);
            throw;
        }
        context_->seq_remove(seq);
        *std::find(free_seqs_.begin(), free_seqs_.end(), next) = seq;
        seq = next++;
    }
}

// One dispatch, and the books of its branches. Recurrent models want its rows in the order of their sequences.
int32_t Store::dispatch(std::vector<Slice> & slices) {
    for (const Slice & slice : slices) take_own_sequence(*slice.branch);
    for (const Slice & slice : slices) part_from_borrowers(*slice.branch);
    const auto by_seq = [](const Slice & a, const Slice & b) { return a.branch->seat.seq < b.branch->seat.seq; };
    std::sort(slices.begin(), slices.end(), by_seq);
    close_ranks(slices);
    std::sort(slices.begin(), slices.end(), by_seq);
    batch_.clear();
    touched_.clear();
    for (const Slice & slice : slices) {
        for (uint32_t k = 0; k < slice.n; k++) batch_.add(slice.tokens[k], slice.branch->position + static_cast<Pos>(k), slice.branch->seat.seq, slice.finishes && k + 1 == slice.n);
        touched_.push_back(slice.branch);
    }
    save_rows(touched_);
    epoch_++;
    const int32_t rc = run([&] { return context_->decode(batch_); }, batch_.size());
    const bool intact = rc == 1 || rc == -1;
    int32_t row = 0;
    for (const Slice & slice : slices) {
        Branch & branch = *slice.branch;
        if (slice.run) slice.run->state = rc == 0 || (intact && slice.run->n_landed) ? PYL_STATE_ADVANCED : intact ? PYL_STATE_UNCHANGED : PYL_STATE_POISONED;
        if (intact) continue;
        branch.cells_own += slice.n;  // a poisoned branch stays charged for what may have landed
        cells_used_ += slice.n;
        branch.logits.clear();
        branch.is_poisoned = rc != 0;
        branch.cells_doubtful = rc != 0 ? slice.n : 0;
        if (rc != 0) continue;
        branch.position += static_cast<Pos>(slice.n);
        if (slice.run) slice.run->n_landed += slice.n;
        if (slice.finishes) branch.logits.row = row++;
    }
    publish();
    return rc;
}

// Adds what of these runs is still to be read, one after another, until the room is full.
void Store::fill(std::vector<Slice> & slices, std::span<pyl_run * const> runs, size_t room) {
    for (pyl_run * run : runs) {
        const uint32_t left = run->n_tokens - run->n_landed;
        const auto n = static_cast<uint32_t>(std::min<size_t>(left, room));
        if (n == 0) continue;
        slices.push_back({&get(run->branch), run->tokens + run->n_landed, n, n == left, run});
        room -= n;
    }
}

// Runs that can be read, none of it begun: their tokens. Adds the slots of their branches.
size_t Store::need_readable(std::span<pyl_run> runs, std::vector<uint32_t> & slots) {
    size_t total = 0;
    const size_t first = slots.size();
    for (pyl_run & run : runs) run.n_landed = 0, run.state = PYL_STATE_UNCHANGED;
    for (size_t i = 0; i < runs.size(); i++) {
        slots.push_back(slot_of(get_healthy(runs[i].branch, first + i)));
        for (uint32_t k = 0; k < runs[i].n_tokens; k++) {
            const Token token = runs[i].tokens[k];
            if (token < 0 || static_cast<size_t>(token) >= n_vocab_) {
                throw Error(PYL_E_INVALID, "token " + std::to_string(token) + " at " + std::to_string(k) + " is outside the vocabulary of " + std::to_string(n_vocab_)).at(first + i);
            }
        }
        total += runs[i].n_tokens;
    }
    return total;
}

void Store::prefill(std::span<pyl_run> runs, uint32_t max_dispatches, uint32_t & n_dispatches) {
    n_dispatches = 0;
    std::vector<uint32_t> slots;
    const size_t total = need_readable(runs, slots);
    need_distinct(slots);
    need_cells(total);
    // Neighbours share a dispatch: recurrent models compute those together whose sequences follow each other.
    std::vector<pyl_run *> queue;
    for (pyl_run & run : runs) queue.push_back(&run);
    std::sort(queue.begin(), queue.end(), [&](const pyl_run * a, const pyl_run * b) { return get(a->branch).seat.seq < get(b->branch).seat.seq; });
    for (size_t n_landed = 0; n_landed < total;) {
        if (cancel_) {  // also seen when max_dispatches is reached with tokens left, so that a cancel is never lost
            Error error = error_in_words(PYL_E_CANCELLED, "cancelled between two dispatches");
            error.partial = n_landed > 0;
            error.state = n_landed > 0 ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED;
            throw error;
        }
        if (max_dispatches != 0 && n_dispatches >= max_dispatches) return;
        int32_t rc = 0;
        try {
            slices_.clear();
            fill(slices_, queue, params_.n_batch);
            if (params_.deterministic) slices_.resize(1);
            rc = dispatch(slices_);
        } catch (const std::bad_alloc &) {
            out_of_memory(n_landed > 0);
        }
        n_dispatches++;
        if (rc != 0) throw decode_error(rc, n_landed > 0);
        n_landed += batch_.size();
    }
}

// each(i, scratch) for every branch, on as many threads as the store has when there is enough to do. Of several that fail the
// first is told of, as if they had been gone through in order. `cost`: logits that are looked at.
template <typename Each>
void Store::for_each_branch(std::span<Branch * const> branches, size_t cost, Each && each) {
    if (branches.size() < 2 || crew_->size() < 2 || cost < worth_sharing) {
        for (size_t i = 0; i < branches.size(); i++) each(i, scratch_[0]);
        return;
    }
    std::vector<std::exception_ptr> failures(branches.size());
    crew_->run(branches.size(), [&](size_t i, size_t worker) {
        try {
            each(i, scratch_[worker]);
        } catch (...) {
            failures[i] = std::current_exception();
        }
    });
    for (const auto & failure : failures) {
        if (failure) std::rethrow_exception(failure);
    }
}

// Whether a draw will not have to find out what may come next.
static bool is_known(Grammar & grammar) {
    try {
        return grammar.is_waiting() || grammar.known_mask() != nullptr;
    } catch (...) {  // it will say so again when it is drawn under
        return false;
    }
}

// Roughly, in logits looked at: what is sorted, what may have to be worked out, and what is only read.
static size_t cost_of(const Branch & branch, size_t n_vocab) {
    const SamplingParams & p = branch.sampler.params();
    return n_vocab * (p.temperature > 0 && p.top_k <= 0 ? 16 : branch.grammar && !is_known(*branch.grammar) ? 4 : 1);
}

Token Store::draw(Branch & branch, const float * row, SamplerScratch & scratch) {
    Biases refused;  // by a grammar that is only about to wake
    const uint64_t before = branch.sampler.draws();
    while (true) {
        const Token token = branch.sampler.sample(row, n_vocab_, branch.grammar.get(), scratch, {banned(branch), branch.bias, branch.steer, refused});
        if (token < 0 || !branch.grammar || !branch.grammar->is_waiting() || branch.grammar->allows(token)) return token;
        auto more = refused ? *refused : std::vector<std::pair<Token, float>>();
        more.emplace_back(token, -std::numeric_limits<float>::infinity());
        refused = std::make_shared<const std::vector<std::pair<Token, float>>>(std::move(more));
        branch.sampler.rewind(before);
    }
}

// A token for each of several branches, -1 where there is none to draw. If it throws, no stream has advanced.
void Store::draw_all(std::span<Branch * const> branches, Token * tokens) {
    std::vector<const float *> rows;
    std::vector<uint64_t> before;
    size_t cost = 0;
    for (const Branch * branch : branches) {
        rows.push_back(logits(*branch));  // the engine is asked by this thread alone
        before.push_back(branch->sampler.draws());
        cost += cost_of(*branch, n_vocab_);
    }
    std::vector<Branch *> sorted(branches.begin(), branches.end());
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) cost = 0;  // one that stands twice draws once and then again
    try {
        for_each_branch(branches, cost, [&](size_t i, SamplerScratch & scratch) { tokens[i] = draw(*branches[i], rows[i], scratch); });
    } catch (...) {
        for (size_t i = 0; i < branches.size(); i++) branches[i]->sampler.rewind(before[i]);
        throw;
    }
}

void Store::sample(std::span<const pyl_branch> branches, Token * tokens) {
    std::vector<Branch *> all;
    std::vector<uint64_t> before;
    for (size_t i = 0; i < branches.size(); i++) {
        Branch & branch = get_healthy(branches[i], i);
        if (!branch.logits.any()) throw Error(PYL_E_NO_LOGITS, "the branch has no logits to sample from").at(i);
        all.push_back(&branch);
        before.push_back(branch.sampler.draws());
    }
    const auto start = Clock::now();
    std::vector<Token> drawn(branches.size());
    draw_all(all, drawn.data());
    for (size_t i = 0; i < all.size(); i++) {
        if (drawn[i] >= 0) continue;
        for (size_t k = 0; k < all.size(); k++) all[k]->sampler.rewind(before[k]);
        throw Error(PYL_E_ILLEGAL, "grammar and logits leave no token to draw").at(i);
    }
    std::copy(drawn.begin(), drawn.end(), tokens);
    live_.n_tokens_sampled += drawn.size();
    live_.sample_s += seconds_since(start);
}

void Store::commit(std::span<const pyl_branch> branches, const Token * tokens) {
    std::vector<uint32_t> slots;
    std::vector<Branch *> touched;
    for (size_t i = 0; i < branches.size(); i++) {
        Branch & branch = get_healthy(branches[i], i);
        need_known(tokens[i], i);
        if (branch.grammar && !branch.grammar->allows(tokens[i])) throw Error(PYL_E_GRAMMAR, "token " + std::to_string(tokens[i]) + " is not legal under the branch's grammar here").at(i);
        slots.push_back(slot_of(branch));
        touched.push_back(&branch);
    }
    need_distinct(slots);
    if (branches.size() > params_.n_batch) throw Error(PYL_E_INVALID, "more branches than n_batch in one commit").numbers(static_cast<int64_t>(branches.size()), params_.n_batch);
    need_cells(branches.size());
    if (branches.empty()) return;
    size_t n_landed = 0;
    land(touched, tokens, n_landed);
}

// What the metrics of a branch would be with this token.
void Store::measure(const Branch & branch, Token token, const float * row, pyl_metrics & metrics, SamplerScratch & scratch) {
    metrics = branch.metrics;
    if (!row) return;
    metrics.n_tokens++;
    if (metrics.levels & PYL_METRICS_MODEL) {
        const auto d = distribution_of(row, n_vocab_);  // nothing: every token is a surprise without bounds
        metrics.model_surprisal += metrics.last_model_surprisal = d ? d->log_sum - static_cast<double>(row[token]) : std::numeric_limits<double>::infinity();
        metrics.model_entropy += metrics.last_model_entropy = d ? d->entropy : 0;
    }
    if (metrics.levels & PYL_METRICS_SAMPLING) {
        const Measure m = branch.sampler.measure(token, row, n_vocab_, branch.grammar.get(), scratch, {banned(branch), branch.bias, branch.steer});
        metrics.last_sampling_surprisal = m.surprisal;
        metrics.last_sampling_entropy = m.entropy;
        if (std::isfinite(m.surprisal)) {
            metrics.n_inside++;
            metrics.sampling_surprisal += m.surprisal;
            metrics.sampling_entropy += m.entropy;
        }
    }
}

void Store::measure_all(std::span<Branch * const> branches, const Token * tokens) {
    std::vector<const float *> rows;
    size_t cost = 0;
    for (const Branch * branch : branches) {
        const int32_t levels = branch->metrics.levels;
        rows.push_back(levels && branch->logits.any() ? logits(*branch) : nullptr);
        if (rows.back() && levels & PYL_METRICS_MODEL) cost += 32 * n_vocab_;
        if (rows.back() && levels & PYL_METRICS_SAMPLING) cost += cost_of(*branch, n_vocab_);
    }
    measured_.resize(branches.size());
    for_each_branch(branches, cost, [&](size_t i, SamplerScratch & scratch) { measure(*branches[i], tokens[i], rows[i], measured_[i], scratch); });
}

// Decodes one token for each branch, in one dispatch or, in a deterministic store, in one for each; throws with the state after.
// The first n_landed are in the cache in either case. A common dispatch takes along what of the runs has room.
void Store::land(std::span<Branch * const> branches, const Token * tokens, size_t & n_landed, std::span<pyl_run * const> runs, size_t room) {
    n_landed = 0;
    if (!params_.deterministic) {
        land_together(branches, tokens, runs, room);
        n_landed = branches.size();
        return;
    }
    for (; n_landed < branches.size(); n_landed++) {
        try {
            land_together(branches.subspan(n_landed, 1), tokens + n_landed);
        } catch (Error & error) {
            error.partial = n_landed > 0;
            error.index = static_cast<int32_t>(n_landed);
            if (n_landed > 0 && error.state == PYL_STATE_UNCHANGED) error.state = PYL_STATE_ADVANCED;
            throw;
        } catch (const std::bad_alloc &) {
            out_of_memory(n_landed > 0);
        }
    }
}

void Store::land_together(std::span<Branch * const> branches, const Token * tokens, std::span<pyl_run * const> runs, size_t room) {
    slices_.clear();
    for (size_t i = 0; i < branches.size(); i++) slices_.push_back({branches[i], tokens + i, 1, true});
    fill(slices_, runs, room);
    for (Branch * branch : branches) {
        branch->sampler.make_room();
        if (branch->grammar) branch->grammar_taken.make_room();
    }
    measure_all(branches, tokens);
    if (const int32_t rc = dispatch(slices_); rc != 0) throw decode_error(rc, false);
    for (size_t i = 0; i < branches.size(); i++) branches[i]->last_token = tokens[i];
    for (size_t i = 0; i < branches.size(); i++) {
        try {
            branches[i]->metrics = measured_[i];
            branches[i]->sampler.accept(tokens[i]);
            if (!branches[i]->grammar) continue;
            branches[i]->grammar->accept(tokens[i]);
            branches[i]->grammar_taken.push_back(tokens[i]);
        } catch (const std::exception & cause) {  // a grammar failed with the tokens already in the cache
            for (Branch * branch : branches) branch->is_poisoned = true;
            const bool memory = dynamic_cast<const std::bad_alloc *>(&cause) != nullptr;
            Error error = memory ? Error(PYL_E_OUT_OF_MEMORY, "") : error_in_words(PYL_E_INTERNAL, cause.what());
            error.state = PYL_STATE_POISONED;
            throw std::move(error).at(i);
        }
    }
}

void Store::tick(pyl_tick & tick, std::span<pyl_lane> lanes, Token * tokens) {
    const uint32_t n_steps = std::max(1u, tick.n_steps);
    for (pyl_lane & lane : lanes) lane.finish = PYL_FINISH_NONE, lane.n_tokens = 0, lane.final_token = -1, lane.state = PYL_STATE_UNCHANGED;
    tick.n_ticks = tick.n_dispatches = 0;
    tick.out_of_cells = 0;
    std::vector<uint32_t> slots;
    std::vector<Branch *> all;
    std::vector<size_t> active;
    for (size_t i = 0; i < lanes.size(); i++) {
        Branch & branch = get_healthy(lanes[i].branch, i);
        if (!branch.logits.any()) throw Error(PYL_E_NO_LOGITS, "the branch has no logits to sample from").at(i);
        slots.push_back(slot_of(branch));
        all.push_back(&branch);
        active.push_back(i);
    }
    const std::span<pyl_run> runs(tick.runs, tick.n_runs);
    size_t n_unread = need_readable(runs, slots);
    if (n_unread && params_.deterministic) throw Error(PYL_E_UNSUPPORTED, "runs in a tick share its dispatches, and in a deterministic store branches share none");
    need_distinct(slots);
    if (lanes.size() > params_.n_batch) throw Error(PYL_E_INVALID, "more branches than n_batch in one tick").numbers(static_cast<int64_t>(lanes.size()), params_.n_batch);
    need_cells(lanes.size() + n_unread);
    std::vector<pyl_run *> queue;
    for (pyl_run & run : runs) queue.push_back(&run);
    const auto count_unread = [&] {
        n_unread = 0;
        for (const pyl_run & run : runs) n_unread += run.n_tokens - run.n_landed;
    };
    const std::span<const Token> stops(tick.stop_tokens, tick.n_stop_tokens);
    for (const Token token : stops) {
        if (token < 0 || static_cast<size_t>(token) >= n_vocab_) throw Error(PYL_E_INVALID, "stop token " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(n_vocab_));
    }
    const auto is_stop = [&](Token token) { return std::find(stops.begin(), stops.end(), token) != stops.end(); };
    std::vector<Branch *> drawing, going;
    std::vector<Token> tokens_drawn, drawn;
    std::vector<size_t> lane_of;
    std::vector<uint64_t> draws, going_draws;
    for (uint32_t step = 0; step < n_steps && !active.empty(); step++) {
        if (step > 0 && cancel_) {
            Error error = error_in_words(PYL_E_CANCELLED, "cancelled between two ticks");
            error.partial = true;
            error.state = PYL_STATE_ADVANCED;
            throw error;
        }
        if (live_.n_ctx - cells_used_ < active.size() + n_unread) {  // the first tick's cells are there
            tick.out_of_cells = 1;
            return;
        }
        going.clear(), drawn.clear(), lane_of.clear(), draws.clear(), going_draws.clear();
        for (const size_t i : active) draws.push_back(all[i]->sampler.draws());
        const auto undo = [&] {
            for (size_t k = 0; k < active.size(); k++) {
                pyl_lane & lane = lanes[active[k]];
                all[active[k]]->sampler.rewind(draws[k]);
                lane.finish = PYL_FINISH_NONE, lane.final_token = -1;
            }
        };
        size_t n_landed = 0;
        const auto record = [&] {
            for (size_t k = 0; k < n_landed; k++) {
                pyl_lane & lane = lanes[lane_of[k]];
                tokens[lane_of[k] * n_steps + lane.n_tokens++] = drawn[k];
                lane.state = PYL_STATE_ADVANCED;
                if (lane.max_tokens && lane.n_tokens >= lane.max_tokens) lane.finish = PYL_FINISH_LENGTH;
            }
        };
        const uint64_t dispatches_before = live_.n_dispatches;
        try {
            const auto start = Clock::now();
            drawing.clear();
            for (const size_t i : active) drawing.push_back(all[i]);
            tokens_drawn.resize(drawing.size());
            draw_all(drawing, tokens_drawn.data());
            for (size_t k = 0; k < active.size(); k++) {
                const size_t i = active[k];
                const Token token = tokens_drawn[k];
                if (token >= 0 && !(model_->token_flags(token) & PYL_TOKEN_EOG) && !is_stop(token)) {
                    going.push_back(all[i]), drawn.push_back(token), lane_of.push_back(i), going_draws.push_back(draws[k]);
                    continue;
                }
                lanes[i].finish = token < 0 ? PYL_FINISH_ILLEGAL : is_stop(token) ? PYL_FINISH_STOP : PYL_FINISH_EOG;
                lanes[i].final_token = token;
            }
            live_.sample_s += seconds_since(start);
            const size_t room = params_.n_batch - going.size();
            if (!going.empty()) land(going, drawn.data(), n_landed, queue, tick.max_run_tokens ? std::min<size_t>(room, tick.max_run_tokens) : room);
            count_unread();
            tick.n_dispatches += static_cast<uint32_t>(live_.n_dispatches - dispatches_before);
        } catch (Error & error) {
            tick.n_dispatches += static_cast<uint32_t>(live_.n_dispatches - dispatches_before);
            if (error.state == PYL_STATE_UNCHANGED) {
                undo();
            } else {  // in a deterministic store some of this step's tokens may be in, and some never tried
                record();
                for (size_t k = n_landed; k < going.size(); k++) {
                    if (!going[k]->is_poisoned) going[k]->sampler.rewind(going_draws[k]);
                }
            }
            for (const size_t i : lane_of) {
                if (all[i]->is_poisoned) lanes[i].state = PYL_STATE_POISONED;
            }
            if (error.index >= 0) error.index = static_cast<int32_t>(lane_of[static_cast<size_t>(error.index)]);
            error.partial = step > 0 || n_landed > 0;
            if (error.state == PYL_STATE_UNCHANGED && step > 0) error.state = PYL_STATE_ADVANCED;
            throw;
        } catch (const std::bad_alloc &) {
            undo();
            out_of_memory(step > 0);
        }
        tick.n_ticks++;
        live_.n_tokens_sampled += static_cast<uint64_t>(std::count_if(active.begin(), active.end(), [&](size_t i) { return lanes[i].finish != PYL_FINISH_ILLEGAL; }));
        record();
        std::erase_if(active, [&](size_t i) { return lanes[i].finish != PYL_FINISH_NONE; });
    }
}

}  // namespace pyl
