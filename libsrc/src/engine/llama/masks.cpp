#include "engine/llama/masks.hpp"

#include <algorithm>
#include <limits>
#include <string_view>

namespace pyl {

static constexpr float illegal = -std::numeric_limits<float>::infinity();

size_t Masks::Hash::operator()(const Key & key) const { return std::hash<std::string_view>()({reinterpret_cast<const char *>(key.data()), key.size() * sizeof key[0]}); }

std::shared_ptr<Masks::State> Masks::find(const GrammarPlace & place) {
    Key key{static_cast<uint64_t>(place.so_far.value) << 32 | static_cast<uint32_t>(place.so_far.n_remain)};
    for (const auto & stack : place.stacks) {
        key.push_back(stack.size());
        for (const llama_grammar_element * element : stack) key.push_back(reinterpret_cast<uintptr_t>(element));
    }
    const std::scoped_lock lock(mutex_);
    if (const auto it = recent_.find(key); it != recent_.end()) return it->second;
    std::shared_ptr<State> state;
    if (const auto it = older_.find(key); it != older_.end()) state = it->second;
    if (!state) state = std::make_shared<State>();
    const size_t bytes = key.size() * sizeof key[0] + words_->size() / 8 + sizeof(State) + 100;
    if (bytes > most_bytes_ / 4) return state;
    if (recent_bytes_ + bytes > most_bytes_ / 2) {
        older_.swap(recent_);
        recent_.clear();
        older_bytes_ = std::exchange(recent_bytes_, 0);
    }
    recent_.emplace(std::move(key), state);
    recent_bytes_ += bytes;
    return state;
}

// Those that no stack takes; the engine itself decides.
std::vector<llama_grammar_candidate> Masks::rejects(const GrammarPlace & place, std::vector<llama_grammar_candidate> words) const {
    for (const auto & stack : place.stacks) {
        if (words.empty()) break;
        words = llama_grammar_reject_candidates_for_stack(rules_, stack, words);
    }
    return words;
}

static bool can_end(const GrammarPlace & place) {
    return std::any_of(place.stacks.begin(), place.stacks.end(), [](const auto & stack) { return stack.empty(); });
}

void Masks::ask(const GrammarPlace & place, std::span<Candidate> candidates) const {
    const bool is_inside = place.so_far.n_remain > 0, ends = can_end(place);
    std::vector<std::vector<uint32_t>> points;
    std::vector<llama_grammar_candidate> words;
    std::vector<size_t> where;
    for (size_t i = 0; i < candidates.size(); i++) {
        const Token token = candidates[i].id;
        const Words::Kind kind = words_->kind(token);
        if (kind == Words::Kind::end && ends) continue;
        const float logit = std::exchange(candidates[i].logit, illegal);
        if (kind != Words::Kind::text) continue;
        const size_t n = words.size();
        if (is_inside) {
            for (const auto & word : words_->continued({token}, place.so_far, points)) words.push_back(word);
        } else if (const auto word = words_->at_start(token); word.id >= 0) {
            words.push_back(word);
        }
        if (words.size() == n) continue;
        words.back().index = i;
        candidates[i].logit = logit;
    }
    for (const auto & word : rejects(place, std::move(words))) candidates[word.index].logit = illegal;
}

std::vector<uint64_t> Masks::bits(const GrammarPlace & place) const {
    std::vector<uint64_t> out((words_->size() + 63) / 64);
    const auto allow = [&](Token token) { out[static_cast<size_t>(token) / 64] |= uint64_t{1} << token % 64; };
    const auto is_allowed = [&](Token token) { return out[static_cast<size_t>(token) / 64] >> token % 64 & 1; };
    if (can_end(place)) {
        for (const Token token : words_->ends()) allow(token);
    }
    std::vector<bool> is_rejected(words_->size());
    // Of words that nothing before has taken.
    const auto take = [&](const llama_grammar_stack & stack, const std::vector<llama_grammar_candidate> & words) {
        const auto rejected = llama_grammar_reject_candidates_for_stack(rules_, stack, words);
        for (const auto & word : rejected) is_rejected[static_cast<size_t>(word.id)] = true;
        for (const auto & word : words) {
            if (!is_rejected[static_cast<size_t>(word.id)]) allow(word.id);
        }
        for (const auto & word : rejected) is_rejected[static_cast<size_t>(word.id)] = false;
    };
    std::vector<llama_grammar_candidate> words, heads, next;
    const auto add = [&](std::span<const llama_grammar_candidate> more) {
        for (const auto & word : more) {
            if (!is_allowed(word.id)) words.push_back(word);
        }
    };
    std::vector<std::vector<uint32_t>> points;
    const auto continued = place.so_far.n_remain > 0 ? words_->continued(words_->continuing(), place.so_far, points) : std::vector<llama_grammar_candidate>();
    std::vector<bool> is_out(words_->n_groups());
    for (const auto & stack : place.stacks) {
        if (stack.empty()) continue;
        words.clear();
        if (place.so_far.n_remain > 0) {
            add(continued);
            take(stack, words);
            continue;
        }
        add(words_->fragments());
        heads.clear();
        for (size_t i = 0; i < words_->n_roots(); i++) heads.push_back(words_->head(i));
        if (const auto type = stack.back()->type; type == LLAMA_GRETYPE_TOKEN || type == LLAMA_GRETYPE_TOKEN_NOT) {
            for (const auto & head : heads) add(words_->group(head.index).all);  // asked for by their ids here, whatever they say
            heads.clear();
        }
        // What a group begins with is looked at before what is in it.
        while (!heads.empty()) {
            const auto rejected = llama_grammar_reject_candidates_for_stack(rules_, stack, heads);
            for (const auto & head : rejected) is_out[head.index] = true;
            next.clear();
            for (const auto & head : heads) {
                if (is_out[head.index]) continue;
                const Words::Group & group = words_->group(head.index);
                add(group.own);
                for (size_t i = 0; i < group.n; i++) next.push_back(words_->head(group.first + i));
            }
            for (const auto & head : rejected) is_out[head.index] = false;
            heads.swap(next);
        }
        take(stack, words);
    }
    return out;
}

const uint64_t * Masks::work_out(State & state, const GrammarPlace & place) const {
    const std::scoped_lock lock(state.mutex_);  // who else wants it waits, which costs less than doing it twice
    if (!state.is_known_) {
        state.bits_ = bits(place);
        state.is_known_ = true;
    }
    return state.bits_.data();
}

void Masks::filter(State & state, const GrammarPlace & place, std::span<Candidate> candidates) const {
    const size_t n_asked = state.n_asked_ += candidates.size();
    const uint64_t * known = state.known();
    if (!known && n_asked > std::max<size_t>(256, words_->size() / 32)) known = work_out(state, place);
    if (!known) return ask(place, candidates);
    for (Candidate & c : candidates) {
        if (!(known[static_cast<size_t>(c.id) / 64] >> c.id % 64 & 1)) c.logit = illegal;
    }
}

bool Masks::allows(const GrammarPlace & place, Token token) const {
    Candidate one{token, 0, 0};
    ask(place, {&one, 1});
    return one.logit == 0;
}

}  // namespace pyl
