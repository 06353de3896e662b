// pylloyal.hpp: pylloyal.h for C++17, header only: handles that give themselves back, failures as exceptions with their numbers.
//
// SPDX-License-Identifier: Apache-2.0
//
// No behaviour of its own: what a call does, who may call it from which thread and what became of the state after a failure is said
// in pylloyal.h. What is not wrapped is called directly, with get() and check(). Objects can be moved and not copied; they may be
// destroyed in any order. A Branch prunes itself with everything below it, unless it is released.
#ifndef PYLLOYAL_HPP
#define PYLLOYAL_HPP

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pylloyal.h"

namespace pylloyal {

// ------------------------------------------------------------------------------------------------------------- failures

enum class State : int32_t { unchanged = PYL_STATE_UNCHANGED, advanced = PYL_STATE_ADVANCED, poisoned = PYL_STATE_POISONED };

// Any failure. need and have are -1 when no number applies, index when it is about no item of an array.
class Error : public std::runtime_error {
  public:
    explicit Error(const pyl_error & e)
        : std::runtime_error(e.message ? e.message : ""), code(e.code), state(static_cast<State>(e.state)), engine_rc(e.engine_rc), partial(e.partial != 0), index(e.index), need(e.need), have(e.have) {}
    int32_t code;
    State state;
    int32_t engine_rc;
    bool partial;
    int32_t index;
    int64_t need;
    int64_t have;
};

// A failure of one code. A library may know codes that this header does not: they arrive as Error.
template <int32_t Code>
class ErrorOf : public Error {
  public:
    using Error::Error;
};
using InvalidArgument = ErrorOf<PYL_E_INVALID>;
using Closed = ErrorOf<PYL_E_CLOSED>;
using Stale = ErrorOf<PYL_E_STALE>;
using Busy = ErrorOf<PYL_E_BUSY>;
using HasChildren = ErrorOf<PYL_E_HAS_CHILDREN>;
using Diverged = ErrorOf<PYL_E_DIVERGED>;
using NoLogits = ErrorOf<PYL_E_NO_LOGITS>;
using GrammarError = ErrorOf<PYL_E_GRAMMAR>;
using Unsupported = ErrorOf<PYL_E_UNSUPPORTED>;
using FormatError = ErrorOf<PYL_E_FORMAT>;
using IOError = ErrorOf<PYL_E_IO>;
using InternalError = ErrorOf<PYL_E_INTERNAL>;
using OutOfMemory = ErrorOf<PYL_E_OUT_OF_MEMORY>;
using NoLease = ErrorOf<PYL_E_NO_LEASE>;
using ContextFull = ErrorOf<PYL_E_CONTEXT>;
using NoCells = ErrorOf<PYL_E_NO_CELLS>;
using Cancelled = ErrorOf<PYL_E_CANCELLED>;
using DecodeError = ErrorOf<PYL_E_DECODE>;
using Poisoned = ErrorOf<PYL_E_POISONED>;
using TemplateError = ErrorOf<PYL_E_TEMPLATE>;
using Illegal = ErrorOf<PYL_E_ILLEGAL>;
using ProjectorError = ErrorOf<PYL_E_PROJECTOR>;
using MediaError = ErrorOf<PYL_E_MEDIA>;

namespace detail {
template <int32_t... Codes>
[[noreturn]] void raise(const pyl_error & e) {
    ((e.code == Codes ? throw ErrorOf<Codes>(e) : void()), ...);
    throw Error(e);
}
}  // namespace detail

// Throws what the calling thread's last failure was, unless `code` is PYL_OK.
inline void check(int32_t code) {
    if (code == PYL_OK) return;
    detail::raise<PYL_E_INVALID, PYL_E_CLOSED, PYL_E_STALE, PYL_E_BUSY, PYL_E_HAS_CHILDREN, PYL_E_DIVERGED, PYL_E_NO_LOGITS, PYL_E_GRAMMAR, PYL_E_UNSUPPORTED, PYL_E_FORMAT, PYL_E_IO, PYL_E_INTERNAL,
                  PYL_E_OUT_OF_MEMORY, PYL_E_NO_LEASE, PYL_E_CONTEXT, PYL_E_NO_CELLS, PYL_E_CANCELLED, PYL_E_DECODE, PYL_E_POISONED, PYL_E_TEMPLATE, PYL_E_ILLEGAL, PYL_E_PROJECTOR, PYL_E_MEDIA>(
        *pyl_error_last());
}

// Throws std::runtime_error when the loaded library speaks another ABI than this header. Call it first.
inline void check_abi() {
    if (const int32_t found = pyl_abi_version(); found != PYL_ABI_VERSION) {
        throw std::runtime_error("the library speaks ABI version " + std::to_string(found) + ", this program " + std::to_string(PYL_ABI_VERSION));
    }
}

// ------------------------------------------------------------------------------------------------ structs with their size

// A struct of the ABI, zero but for its size.
template <typename T>
T sized() {
    T out{};
    out.struct_size = sizeof(T);
    return out;
}

namespace detail {
template <typename T>
T defaults(void (*init)(T *, uint32_t)) {
    T out{};
    init(&out, sizeof(T));
    return out;
}
}  // namespace detail

inline pyl_model_params model_params() { return detail::defaults(pyl_model_params_init); }
inline pyl_store_params store_params() { return detail::defaults(pyl_store_params_init); }
inline pyl_projector_params projector_params() { return detail::defaults(pyl_projector_params_init); }
inline pyl_embedder_params embedder_params() { return detail::defaults(pyl_embedder_params_init); }
inline pyl_sampling sampling() { return detail::defaults(pyl_sampling_init); }
// Rules in GBNF, which must outlive the call they are given to.
inline pyl_grammar gbnf(std::string_view rules) {
    auto out = sized<pyl_grammar>();
    out.kind = PYL_GRAMMAR_GBNF, out.text = rules.data(), out.n_text = rules.size();
    return out;
}
inline pyl_sampling greedy() {
    pyl_sampling out = sampling();
    out.temperature = 0;
    return out;
}

// -------------------------------------------------------------------------------------------------------------- handles

// Bytes the library made, as a string; they are freed also when the call throws or the copy does not fit.
class Text {
  public:
    Text() = default;
    Text(const Text &) = delete;
    Text & operator=(const Text &) = delete;
    ~Text() { pyl_text_free(text_); }
    pyl_text ** out() { return &text_; }
    std::string_view view() const { return {pyl_text_data(text_), pyl_text_size(text_)}; }
    std::string str() const { return std::string(view()); }

  private:
    pyl_text * text_ = nullptr;
};

template <typename T, int32_t (*Free)(T *)>
class Handle {
  public:
    Handle() = default;
    Handle(Handle && other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Handle & operator=(Handle && other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    Handle(const Handle &) = delete;
    Handle & operator=(const Handle &) = delete;
    ~Handle() {
        if (handle_) Free(handle_);
    }
    T * get() const { return handle_; }

  protected:
    T * handle_ = nullptr;
};

class Model : public Handle<pyl_model, pyl_model_free> {
  public:
    explicit Model(std::string_view path, const pyl_model_params & params = model_params()) { check(pyl_model_open(&handle_, path.data(), path.size(), &params)); }

    pyl_model_info describe() const {
        auto out = sized<pyl_model_info>();
        check(pyl_model_describe(handle_, &out));
        return out;
    }
    std::vector<int32_t> tokenize(std::string_view text, uint32_t flags = 0) const {
        std::vector<int32_t> tokens(text.size() + 8);  // as a rule enough; else it is asked again with what it said it needs
        for (;;) {
            size_t n = 0;
            const int32_t code = pyl_tokenize(handle_, text.data(), text.size(), flags, tokens.data(), tokens.size(), &n);
            if (code != PYL_OK && n <= tokens.size()) check(code);
            const bool is_done = n <= tokens.size();
            tokens.resize(n);
            if (is_done) return tokens;
        }
    }
    std::string detokenize(const int32_t * tokens, size_t n, uint32_t flags = 0) const {
        Text text;
        check(pyl_detokenize(handle_, tokens, n, flags, text.out()));
        return text.str();
    }
};

class Projector : public Handle<pyl_projector, pyl_projector_free> {
  public:
    Projector(const Model & model, std::string_view path, const pyl_projector_params & params = projector_params()) {
        check(pyl_projector_open(&handle_, model.get(), path.data(), path.size(), &params));
    }
};

class Prompt : public Handle<pyl_prompt, pyl_prompt_free> {
  public:
    Prompt(const Model & model, const Projector * projector, const std::vector<pyl_part> & parts, uint32_t flags = 0) {
        check(pyl_prompt_make(&handle_, model.get(), projector ? projector->get() : nullptr, parts.data(), parts.size(), flags));
    }
    pyl_quote quote() const {
        auto out = sized<pyl_quote>();
        check(pyl_prompt_quote(handle_, &out));
        return out;
    }
};

// A branch of a store. One that outlives its store does nothing any more.
class Branch {
  public:
    Branch(pyl_store * store, pyl_branch id) : store_(store), id_(id) {}
    Branch(Branch && other) noexcept : store_(other.store_), id_(std::exchange(other.id_, 0)) {}
    Branch & operator=(Branch && other) noexcept {
        std::swap(store_, other.store_);
        std::swap(id_, other.id_);
        return *this;
    }
    Branch(const Branch &) = delete;
    Branch & operator=(const Branch &) = delete;
    ~Branch() {
        if (id_) pyl_branch_prune_subtree(store_, id_);
    }

    pyl_branch id() const { return id_; }
    // The branch lives on without this object.
    pyl_branch release() { return std::exchange(id_, 0); }

    // n children that continue exactly as this branch would, or one for each seed; flags are PYL_FORK_*.
    std::vector<Branch> fork(size_t n, uint32_t flags = 0) const { return fork(n, nullptr, flags); }
    std::vector<Branch> fork(const std::vector<uint64_t> & seeds, uint32_t flags = 0) const { return fork(seeds.size(), seeds.data(), flags); }

    void set_grammar(const pyl_grammar * grammar) { check(pyl_branch_set_grammar(store_, id_, grammar)); }
    void set_sampling(const pyl_sampling & sampling) { check(pyl_branch_set_sampling(store_, id_, &sampling)); }
    void prefill(const std::vector<int32_t> & tokens) {
        auto run = sized<pyl_run>();
        run.branch = id_, run.tokens = tokens.data(), run.n_tokens = static_cast<uint32_t>(tokens.size());
        check(pyl_prefill_n(store_, &run, 1, 0, nullptr));
    }
    void prefill(const Prompt & prompt) {
        auto item = sized<pyl_item>();
        item.branch = id_, item.prompt = prompt.get();
        const int32_t code = pyl_decode_prompts_n(store_, &item, 1);
        pyl_text_free(item.message);  // pyl_error_last has the same words
        check(code);
    }
    pyl_branch_info describe() const {
        auto out = sized<pyl_branch_info>();
        check(pyl_branch_describe(store_, id_, &out));
        return out;
    }

  private:
    std::vector<Branch> fork(size_t n, const uint64_t * seeds, uint32_t flags) const {
        std::vector<pyl_branch> ids(n);
        std::vector<Branch> out;
        out.reserve(n);  // before there is anything to lose
        check(pyl_branch_fork_n(store_, id_, ids.data(), n, seeds, flags));
        for (const pyl_branch id : ids) out.emplace_back(store_, id);
        return out;
    }

    pyl_store * store_;
    pyl_branch id_;
};

// What one branch said.
struct Said {
    std::vector<int32_t> tokens;
    int32_t finish;       // PYL_FINISH_*
    int32_t final_token;  // -1 unless EOG or STOP
};

class Store : public Handle<pyl_store, pyl_store_free> {
  public:
    explicit Store(const Model & model, const pyl_store_params & params = store_params()) { check(pyl_store_open(&handle_, model.get(), &params)); }

    Branch root(const pyl_sampling & sampling = pylloyal::sampling(), const pyl_grammar * grammar = nullptr) {
        pyl_branch id = 0;
        check(pyl_branch_create(handle_, &id, 0, &sampling, grammar));
        return {handle_, id};
    }
    // Up to n_steps tokens of each branch, all branches in one dispatch a step.
    std::vector<Said> tick(const std::vector<Branch> & branches, uint32_t n_steps) {
        std::vector<int32_t> tokens(branches.size() * n_steps);
        std::vector<pyl_lane> lanes(branches.size(), sized<pyl_lane>());
        auto tick = sized<pyl_tick>();
        tick.n_steps = n_steps;
        for (size_t i = 0; i < lanes.size(); i++) lanes[i].branch = branches[i].id();
        check(pyl_tick_n(handle_, &tick, lanes.data(), lanes.size(), tokens.data()));
        std::vector<Said> out;
        for (size_t i = 0; i < lanes.size(); i++) {
            const auto row = tokens.begin() + static_cast<std::ptrdiff_t>(i * n_steps);
            out.push_back({{row, row + lanes[i].n_tokens}, lanes[i].finish, lanes[i].final_token});
        }
        return out;
    }
    pyl_pressure pressure() const {
        auto out = sized<pyl_pressure>();
        check(pyl_store_pressure(handle_, &out));
        return out;
    }
};

// What pyl_dry_run says, as JSON: what a store would take, without opening it.
inline std::string dry_run(std::string_view path, const pyl_store_params & params, const pyl_model_params & model = model_params()) {
    Text text;
    check(pyl_dry_run(text.out(), path.data(), path.size(), &model, &params));
    return text.str();
}

inline pyl_live live_objects() {
    auto out = sized<pyl_live>();
    check(pyl_live_objects(&out));
    return out;
}

}  // namespace pylloyal

#endif  // PYLLOYAL_HPP
