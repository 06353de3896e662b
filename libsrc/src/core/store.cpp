#include "core/store.hpp"

#include <algorithm>
#include <limits>
#include <thread>

namespace pyl {

LiveCounts & live_counts() {
    static LiveCounts counts;
    return counts;
}

Store::Store(std::shared_ptr<const Model> model, const ContextParams & params)
    : model_(std::move(model)), context_(model_->open(params)), params_(params), n_vocab_(static_cast<size_t>(model_->info().n_vocab)), slots_(params.n_seq_max), crew_(std::make_unique<Crew>(params.n_threads)), scratch_(crew_->size()) {
    for (uint32_t i = params.n_seq_max; i-- > 0;) {
        free_slots_.push_back(i);
        free_seqs_.push_back(static_cast<Seq>(i));
    }
    std::vector<std::pair<Token, float>> banned;
    const auto ban = [&](Token token) { banned.emplace_back(token, -std::numeric_limits<float>::infinity()); };
    for (const Token token : model_->suppressed()) {
        if (token >= 0 && static_cast<size_t>(token) < n_vocab_) ban(token);
    }
    if (!banned.empty()) suppressed_ = std::make_shared<const std::vector<std::pair<Token, float>>>(banned);
    for (Token token = 0; static_cast<size_t>(token) < n_vocab_; token++) {
        if (model_->token_flags(token) & PYL_TOKEN_EOG) ban(token);
    }
    endless_ = std::make_shared<const std::vector<std::pair<Token, float>>>(std::move(banned));
    live_.struct_size = sizeof live_;
    live_.n_ctx = context_->n_ctx();
    live_.n_batch = params.n_batch;
    live_.n_ubatch = params.n_ubatch;
    live_.n_threads = params.n_threads;
    live_.flash_attn = context_->flash_attn();
    live_.swa_full = params.swa_full;
    live_.deterministic = params.deterministic;
    publish();
}

Store::~Store() { drain(); }

Store::Call::Call(Store & store) : store_(store) {
    if (store_.in_call_.exchange(true)) {
        throw store_.is_closed_ ? Error(PYL_E_CLOSED, "the store is closed") : Error(PYL_E_BUSY, "another thread is inside this store; one call at a time");
    }
    store_.cancel_ = false;
    if (store_.is_closed_) {  // after the line above: a drain that came in between has set both
        store_.in_call_ = false;
        store_.in_call_.notify_all();
        throw Error(PYL_E_CLOSED, "the store is closed");
    }
}

Store::Call::~Call() {
    store_.publish();
    store_.in_call_ = false;
    store_.in_call_.notify_all();
}

void Store::drain() noexcept {
    is_closed_ = true;
    cancel_ = true;
    {
        const std::scoped_lock lock(published_mutex_);
        published_.is_draining = 1;
    }
    while (in_call_.exchange(true)) in_call_.wait(true);
    if (context_) {
        for (uint32_t i = 0; i < slots_.size(); i++) {
            if (slots_[i].is_live) release(i, false);
        }
        context_.reset();
        crew_.reset();
        epoch_++;
    }
    is_drained_ = true;
    in_call_ = false;
    in_call_.notify_all();
}

void Store::cancel() {
    if (is_drained_) throw Error(PYL_E_CLOSED, "the store is closed");
    cancel_ = true;
}

void Store::publish() {
    live_.cells_used = cells_used_;
    live_.cells_remaining = live_.n_ctx - std::min(cells_used_, live_.n_ctx);
    live_.leases_remaining = static_cast<uint32_t>(free_slots_.size());
    live_.leases_used = static_cast<uint32_t>(slots_.size() - free_slots_.size());
    const std::scoped_lock lock(published_mutex_);
    live_.is_draining = is_closed_;  // inside the lock: a drain that begins now must not be unsaid by what was read before it
    published_ = live_;
}

Memory Store::memory() const {
    Memory out = context_->memory();
    out.n_outputs = params_.n_outputs;
    return out;
}

pyl_pressure Store::pressure() const {
    if (is_drained_) throw Error(PYL_E_CLOSED, "the store is closed");
    const std::scoped_lock lock(published_mutex_);
    return published_;
}

// ---------------------------------------------------------------------------------------------------- handles and leases

Branch & Store::get(pyl_branch branch, size_t index) {
    const auto slot = static_cast<uint32_t>(branch), generation = static_cast<uint32_t>(branch >> 32);
    if (slot >= slots_.size() || !slots_[slot].is_live || slots_[slot].generation != generation) {
        Error error(PYL_E_STALE, "the branch is no longer alive (pruned, or never of this store)");
        throw index == SIZE_MAX ? std::move(error) : std::move(error).at(index);
    }
    return slots_[slot];
}

Branch & Store::get_healthy(pyl_branch branch, size_t index) {
    Branch & found = get(branch, index);
    if (found.is_poisoned) {
        Error error(PYL_E_POISONED, "an earlier decode of this branch failed half-way; it can only be pruned");
        throw index == SIZE_MAX ? std::move(error) : std::move(error).at(index);
    }
    return found;
}

pyl_branch Store::handle_of(uint32_t parent_field) const { return parent_field ? handle(parent_field - 1) : 0; }

std::vector<pyl_branch> Store::list(pyl_branch children_of) {
    std::vector<uint32_t> found;
    if (children_of) {
        found = get(children_of).children;
    } else {
        for (uint32_t i = 0; i < slots_.size(); i++) {
            if (slots_[i].is_live) found.push_back(i);
        }
        std::sort(found.begin(), found.end(), [&](uint32_t a, uint32_t b) { return slots_[a].born < slots_[b].born; });
    }
    std::vector<pyl_branch> out;
    for (const uint32_t slot : found) out.push_back(handle(slot));
    return out;
}

void Store::need_leases(size_t n) const {
    if (n > free_slots_.size()) {
        throw Error(PYL_E_NO_LEASE, std::to_string(n) + " branches wanted, " + std::to_string(free_slots_.size()) + " of " + std::to_string(slots_.size()) + " left; prune some, or open the store with more")
            .numbers(static_cast<int64_t>(n), static_cast<int64_t>(free_slots_.size()));
    }
}

void Store::need_cells(size_t n) const {
    const size_t left = live_.n_ctx - std::min(cells_used_, live_.n_ctx);
    if (n > left) {
        throw Error(PYL_E_CONTEXT, std::to_string(n) + " cells wanted, " + std::to_string(left) + " of " + std::to_string(live_.n_ctx) + " left").numbers(static_cast<int64_t>(n), static_cast<int64_t>(left));
    }
}

void Store::need_distinct(std::span<const uint32_t> slots) const {
    std::vector<bool> seen(slots_.size());
    for (size_t i = 0; i < slots.size(); i++) {
        if (seen[slots[i]]) throw Error(PYL_E_INVALID, "the same branch stands twice in one call").at(i);
        seen[slots[i]] = true;
    }
}

void Store::need_known(Token token, size_t index) const {
    if (token < 0 || static_cast<size_t>(token) >= n_vocab_) throw Error(PYL_E_INVALID, "token " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(n_vocab_)).at(index);
}

// Takes slot and sequence together; nothing here can fail once need_leases passed.
uint32_t Store::take_slot() {
    const uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    Branch & branch = slots_[slot];
    branch.generation++;
    branch.is_live = true;
    branch.seat.seq = free_seqs_.back();
    free_seqs_.pop_back();
    branch.born = ++born_;
    live_counts().branches++;
    return slot;
}

void Store::unlink(uint32_t slot) noexcept {
    if (const uint32_t parent = slots_[slot].parent) std::erase(slots_[parent - 1].children, slot);
    slots_[slot].parent = 0;
}

void Store::release(uint32_t slot, bool clear_cache) noexcept {
    Branch & branch = slots_[slot];
    empty_sequence(branch, clear_cache);
    cells_used_ -= branch.cells_own;
    free_seqs_.push_back(branch.seat.seq);  // capacity was there at construction: cannot throw
    free_slots_.push_back(slot);
    const uint32_t generation = branch.generation;
    branch = Branch{};
    branch.generation = generation;
    live_counts().branches--;
}

// ------------------------------------------------------------------------------------------------------------ the tree

pyl_branch Store::create(Pos start_pos, const SamplingParams & sampling, uint64_t seed, GrammarSource grammar) {
    if (const int64_t most = most_pos - std::min<int64_t>(live_.n_ctx, most_pos); start_pos < 0 || start_pos > most) {
        throw Error(PYL_E_INVALID, "start_pos is " + std::to_string(start_pos) + "; it must be in 0.." + std::to_string(most));
    }
    need_leases(1);
    Branch made;
    constrain(made, std::move(grammar));  // the last that can fail
    const uint32_t slot = take_slot();
    Branch & branch = slots_[slot];
    branch.grammar = std::move(made.grammar);
    branch.grammar_source = std::move(made.grammar_source);
    branch.position = branch.start = start_pos;
    branch.sampler.set_params(sampling);
    branch.sampler.reseed(seed);
    return handle(slot);
}

void Store::fork(pyl_branch source, std::span<pyl_branch> out, const uint64_t * seeds, bool with_logits) {
    Branch & from = get_healthy(source);
    need_leases(out.size());
    // Everything that can run out of memory happens before anything changes.
    std::vector<Sampler> samplers(out.size(), from.sampler);
    std::vector<std::unique_ptr<Grammar>> grammars(out.size());
    std::vector<History> taken(out.size());
    for (History & history : taken) history = from.grammar_taken.fork();
    for (auto & grammar : grammars) {
        if (from.grammar) grammar = from.grammar->clone();
    }
    from.children.reserve(from.children.size() + out.size());
    for (size_t i = 0; i < out.size(); i++) {
        const uint32_t slot = take_slot();
        Branch & child = slots_[slot];
        if (from.cells_inherited + from.cells_own) {
            child.seat.lender = from.seat.lender ? from.seat.lender : slot_of(from) + 1;
            slots_[child.seat.lender - 1].seat.n_borrowers++;
        }
        child.position = from.position;
        child.start = from.start;
        child.cells_inherited = from.cells_inherited + from.cells_own;
        child.parent = slot_of(from) + 1;
        child.last_token = from.last_token;
        if (with_logits) child.logits = from.logits;
        child.sampler = std::move(samplers[i]);
        if (seeds) child.sampler.reseed(seeds[i]);
        child.grammar = std::move(grammars[i]);
        child.grammar_source = from.grammar_source;
        child.grammar_taken = std::move(taken[i]);
        child.bias = from.bias;
        child.metrics = from.metrics;
        from.children.push_back(slot);
        out[i] = handle(slot);
    }
}

void Store::prune(std::span<const pyl_branch> branches) {
    std::vector<uint32_t> going;
    std::vector<bool> listed(slots_.size());
    std::vector<size_t> index_of(slots_.size());
    for (size_t i = 0; i < branches.size(); i++) {
        const auto slot = static_cast<uint32_t>(branches[i]);
        if (slot >= slots_.size() || !slots_[slot].is_live || slots_[slot].generation != branches[i] >> 32 || listed[slot]) continue;
        listed[slot] = true;
        index_of[slot] = i;
        going.push_back(slot);
    }
    for (const uint32_t slot : going) {
        for (const uint32_t child : slots_[slot].children) {
            if (!listed[child]) {
                throw Error(PYL_E_HAS_CHILDREN, "the branch has " + std::to_string(slots_[slot].children.size()) + " children; prune them first, or prune the subtree")
                    .at(index_of[slot])
                    .numbers(0, static_cast<int64_t>(slots_[slot].children.size()));
            }
        }
    }
    if (!going.empty()) epoch_++;
    for (const uint32_t slot : going) unlink(slot);
    for (const uint32_t slot : going) release(slot, true);
}

void Store::prune_subtree(pyl_branch branch) noexcept {
    const auto slot = static_cast<uint32_t>(branch);
    if (slot >= slots_.size() || !slots_[slot].is_live || slots_[slot].generation != branch >> 32) return;
    epoch_++;
    unlink(slot);
    // Post-order without recursion or memory of its own: walk to a leaf, release it, step back to its parent.
    for (uint32_t at = slot;;) {
        if (auto & children = slots_[at].children; !children.empty()) {
            at = children.back();
            continue;
        }
        const uint32_t parent = slots_[at].parent;
        unlink(at);
        release(at, true);
        if (at == slot) break;
        at = parent - 1;
    }
}

void Store::retain_only(pyl_branch branch) {
    Branch & kept = get_healthy(branch);
    const uint32_t slot = slot_of(kept);
    epoch_++;
    if (kept.seat.lender) std::swap(kept.seat.seq, slots_[kept.seat.lender - 1].seat.seq);
    for (Branch & each : slots_) each.seat.lender = each.seat.n_borrowers = 0;
    context_->seq_keep(kept.seat.seq);
    kept.parent = 0;
    kept.children.clear();
    for (uint32_t i = 0; i < slots_.size(); i++) {
        if (i != slot && slots_[i].is_live) release(i, false);
    }
    kept.cells_own += kept.cells_inherited;
    kept.cells_inherited = 0;
    cells_used_ = kept.cells_own;
}

void Store::fast_forward(pyl_branch parent, pyl_branch child) {
    Branch & to = get(parent);  // a poisoned one is welcome: this is how it is repaired
    Branch & from = get_healthy(child);
    const uint32_t to_slot = slot_of(to), from_slot = slot_of(from);
    if (from.parent != to_slot + 1) throw Error(PYL_E_DIVERGED, "the branch is not a direct child of the other");
    const uint32_t doubtful = to.is_poisoned ? to.cells_doubtful : 0;
    if (from.cells_inherited != to.cells_inherited + to.cells_own - doubtful) throw Error(PYL_E_DIVERGED, "the parent has decoded since the fork").numbers(from.cells_inherited, to.cells_inherited + to.cells_own);
    to.children.reserve(to.children.size() + from.children.size());  // the last thing that can fail
    epoch_++;
    std::erase(to.children, from_slot);
    for (const uint32_t grandchild : from.children) {
        slots_[grandchild].parent = to_slot + 1;
        to.children.push_back(grandchild);
    }
    std::sort(to.children.begin(), to.children.end(), [&](uint32_t a, uint32_t b) { return slots_[a].born < slots_[b].born; });
    to.cells_own += from.cells_own - doubtful;
    cells_used_ -= doubtful;
    std::swap(to.seat, from.seat);  // the parent's old sequence is cleared whole with the child's slot; shared cells live on
    for (Branch & each : slots_) {
        const uint32_t lender = each.seat.lender;
        each.seat.lender = lender == to_slot + 1 ? from_slot + 1 : lender == from_slot + 1 ? to_slot + 1 : lender;
    }
    to.position = from.position;
    to.start = from.start;
    to.last_token = from.last_token;
    to.is_poisoned = false;
    to.cells_doubtful = 0;
    to.logits = std::move(from.logits);
    to.sampler = std::move(from.sampler);
    to.grammar = std::move(from.grammar);
    to.grammar_source = std::move(from.grammar_source);
    to.grammar_taken = std::move(from.grammar_taken);
    to.metrics = from.metrics;
    to.bias = std::move(from.bias);
    to.steer = std::move(from.steer);
    cells_used_ += from.cells_own;  // they moved to the parent; release() takes them off again
    release(from_slot, true);
}

void Store::set_bias(pyl_branch branch, int32_t kind, std::span<const Token> tokens, const float * bias) {
    Branch & found = get_healthy(branch);
    std::vector<std::pair<Token, float>> pairs;
    for (size_t i = 0; i < tokens.size(); i++) {
        need_known(tokens[i], i);
        if (!(bias[i] < std::numeric_limits<float>::infinity())) throw Error(PYL_E_INVALID, "a bias is a number below +infinity").at(i);
        pairs.emplace_back(tokens[i], bias[i]);
    }
    Biases made = pairs.empty() ? nullptr : std::make_shared<const std::vector<std::pair<Token, float>>>(std::move(pairs));
    (kind == PYL_STEER ? found.steer : found.bias) = std::move(made);
}

void Store::constrain(Branch & branch, GrammarSource source, std::span<const Token> taken) {
    std::shared_ptr<const GrammarSource> kept;
    std::unique_ptr<Grammar> grammar;
    if (!source.is_empty()) {
        kept = std::make_shared<const GrammarSource>(std::move(source));
        grammar = model_->grammar(*kept);
    }
    for (size_t i = 0; i < taken.size(); i++) {
        if (!grammar || !grammar->allows(taken[i])) throw Error(PYL_E_FORMAT, "the saved grammar does not take the tokens saved with it").at(i);
        grammar->accept(taken[i]);
    }
    History fed(std::vector<Token>(taken.begin(), taken.end()));
    branch.grammar = std::move(grammar);  // nothing fails from here on
    branch.grammar_source = branch.grammar ? std::move(kept) : nullptr;
    branch.grammar_taken = std::move(fed);
}

void Store::set_grammar(pyl_branch branch, GrammarSource grammar) { constrain(get_healthy(branch), std::move(grammar)); }

}  // namespace pyl
