// Random operations on the store next to a model of it that is too simple to be wrong: a list of branches, each with every token it
// sees. After every operation all books and all logits must agree; the first difference ends the run with the seed to repeat it.
//
//   test_random [seed] [operations]
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>

#include "check.hpp"
#include "stub_store.hpp"

using namespace stub;

namespace {

constexpr Token n_vocab = 260;
constexpr uint32_t ops_per_store = 250;

// A branch, as it should be.
struct Twin {
    pyl_branch handle = 0, parent = 0;
    Pos start = 0;
    Tokens path;  // all tokens it sees, inherited ones first
    uint32_t own = 0, inherited = 0;
    bool has_logits = false, is_poisoned = false;
    Token last_token = -1;
    Sampler sampler;
    std::unique_ptr<Grammar> grammar;
    Biases bias, steer;
    uint32_t doubtful = 0;  // of the own cells: charged by the dispatch that poisoned it
    pyl_metrics metrics = Branch{}.metrics;
    Row logits;             // after `path`; computed when first asked for, empty before, or set by hand
};

// A branch as it was saved.
struct Kept {
    Twin twin;
    std::string bytes;
};

bool near(double a, double b) { return a == b || std::abs(a - b) <= 1e-9 * (1 + std::abs(a)); }

class World {
public:
    World(std::mt19937_64 & rng) : rng_(rng) {
        n_ctx_ = 30 + below(150), n_seq_max_ = 1 + below(16), n_batch_ = n_seq_max_ + below(12);
        if (chance(70)) fail_at_ = 1 + below(100), fail_rc_ = std::vector{1, -1, 2, -2, -3}[below(5)];
        const std::string vocab = "n_vocab=" + std::to_string(n_vocab);
        model_ = stub::model(vocab + ";fail_at=" + std::to_string(fail_at_) + ";fail_rc=" + std::to_string(fail_rc_) + ";fail_rows=" + std::to_string(below(6)));
        store_ = std::make_unique<Store>(model_, context(n_ctx_, n_batch_, n_seq_max_));
        oracle_ = stub::model(vocab)->open(context(n_ctx_, n_ctx_, 1));
    }

    // One operation; its name is kept for the report.
    void step() {
        const uint32_t dice = below(118);
        if (live_.empty() || dice < 6) return create();
        if (dice < 18) return fork();
        if (dice < 33) return prefill();
        if (dice < 48) return commit();
        if (dice < 66) return tick();
        if (dice < 70) return sample();
        if (dice < 76) return prune();
        if (dice < 79) return prune_subtree();
        if (dice < 80) return retain_only();
        if (dice < 83) return set_grammar();
        if (dice < 85) return set_sampling();
        if (dice < 89) return fast_forward();
        if (dice < 91) return set_bias();
        if (dice < 93) return change_logits();
        if (dice < 94) return look();
        if (dice < 98) return score();
        if (dice < 102) return reseed_kv();
        if (dice < 106) return save();
        if (dice < 110) return load();
        if (dice < 112) return set_metrics();
        invalid();
    }

    bool agrees() {
        const int failed = check::n_failed;
        Branches handles;
        uint32_t used = 0;
        for (Twin * t : live_list()) {
            handles.push_back(t->handle);
            used += t->own;
            const Branch & b = store_->get(t->handle);
            CHECK_EQ(store_->handle_of(b.parent), t->parent);
            CHECK_EQ(b.position, t->start + static_cast<Pos>(t->path.size()));
            CHECK_EQ(b.cells_own, t->own);
            CHECK_EQ(b.cells_inherited, t->inherited);
            CHECK_EQ(b.is_poisoned, t->is_poisoned);
            CHECK_EQ(b.last_token, t->last_token);
            CHECK_EQ(b.sampler.seed(), t->sampler.seed());
            if (!t->is_poisoned) CHECK_EQ(b.sampler.draws(), t->sampler.draws());
            CHECK(b.sampler.params() == t->sampler.params());
            CHECK(b.sampler.history() == t->sampler.history());
            const pyl_metrics & m = b.metrics, & n = t->metrics;
            CHECK(m.levels == n.levels && m.n_tokens == n.n_tokens && m.n_inside == n.n_inside);
            CHECK(near(m.model_surprisal, n.model_surprisal) && near(m.model_entropy, n.model_entropy) && near(m.last_model_surprisal, n.last_model_surprisal) && near(m.last_model_entropy, n.last_model_entropy));
            CHECK(near(m.sampling_surprisal, n.sampling_surprisal) && near(m.sampling_entropy, n.sampling_entropy) && near(m.last_sampling_surprisal, n.last_sampling_surprisal) && near(m.last_sampling_entropy, n.last_sampling_entropy));
            CHECK_EQ(b.grammar != nullptr, t->grammar != nullptr);
            Branches kids = store_->list(t->handle), want = children(t->handle);
            std::sort(kids.begin(), kids.end()), std::sort(want.begin(), want.end());
            CHECK(kids == want);
            CHECK_EQ(b.logits.any(), t->has_logits);
            if (t->has_logits) CHECK(same_bits(row(*store_, t->handle), logits(*t)));
        }
        CHECK(store_->list(0) == handles);
        const pyl_pressure p = pressure(*store_);
        CHECK_EQ(p.cells_used, used);
        CHECK_EQ(p.cells_remaining, n_ctx_ - used);
        CHECK_EQ(p.leases_used, handles.size());
        CHECK_EQ(p.leases_remaining, n_seq_max_ - handles.size());
        CHECK_EQ(p.n_dispatches, n_dispatches_);
        CHECK_EQ(p.n_tokens_decoded, n_decoded_);
        CHECK_EQ(p.n_tokens_sampled, n_sampled_);
        for (const pyl_branch gone : gone_) {
            if (gone == 0 || chance(90)) continue;
            CHECK_THROWS(PYL_E_STALE, store_->get(gone));
        }
        return check::n_failed == failed;
    }

    std::string what;
    static inline std::map<int32_t, int> outcomes;  // how often which code came back

private:
    // What a call must throw; nothing when it must not.
    struct Expected {
        Error error{PYL_OK, ""};
        Expected() = default;
        Expected(Error thrown) : error(std::move(thrown)) {}
        explicit operator bool() const { return error.code != PYL_OK; }
    };

    uint32_t below(size_t n) { return static_cast<uint32_t>(rng_() % n); }
    bool chance(uint32_t percent) { return below(100) < percent; }
    Token any_token() { return static_cast<Token>(below(n_vocab)); }
    template <typename List>
    auto & any_of(List && list) { return list[below(list.size())]; }

    // ------------------------------------------------------------------------------------------------------- the model

    // Oldest first: a handle is never reused, but it does not tell age either, so age is kept.
    std::vector<Twin *> live_list() {
        std::vector<Twin *> out;
        for (auto & [age, twin] : live_) out.push_back(&twin);
        return out;
    }
    Twin & twin(pyl_branch handle) {
        for (auto & [age, t] : live_) {
            if (t.handle == handle) return t;
        }
        std::abort();
    }
    Branches children(pyl_branch of) {
        Branches out;
        for (Twin * t : live_list()) {
            if (t->parent == of) out.push_back(t->handle);
        }
        return out;
    }
    template <typename Test>
    Branches which(Test && test) {
        Branches out;
        for (Twin * t : live_list()) {
            if (test(*t)) out.push_back(t->handle);
        }
        return out;
    }
    Branches healthy() { return which([](const Twin & t) { return !t.is_poisoned; }); }
    Branches ready() { return which([](const Twin & t) { return !t.is_poisoned && t.has_logits; }); }
    Branches some(Branches from, size_t at_most) {
        std::shuffle(from.begin(), from.end(), rng_);
        from.resize(std::min<size_t>(from.size(), 1 + below(at_most)));
        return from;
    }
    uint32_t used() {
        uint32_t out = 0;
        for (const Twin * t : live_list()) out += t->own;
        return out;
    }
    uint32_t left() { return n_ctx_ - used(); }
    size_t leases() { return n_seq_max_ - live_.size(); }

    Twin & add(pyl_branch handle) {
        Twin & t = live_[++age_];
        t.handle = handle;
        return t;
    }
    void forget(pyl_branch handle) {
        std::erase_if(live_, [&](const auto & item) { return item.second.handle == handle; });
        gone_.push_back(handle);
        if (gone_.size() > 300) gone_.erase(gone_.begin(), gone_.begin() + 100);
    }

    // What a context that decoded these tokens and nothing else says.
    Row replay(Pos start, const Tokens & path) {
        Batch batch;
        for (size_t i = 0; i < path.size(); i++) batch.add(path[i], start + static_cast<Pos>(i), 0, i + 1 == path.size());
        oracle_->seq_remove(0);
        if (oracle_->decode(batch) != 0) std::abort();
        return Row(oracle_->logits(0), oracle_->logits(0) + n_vocab);
    }
    const Row & logits(Twin & t) {
        if (t.logits.empty()) t.logits = replay(t.start, t.path);
        return t.logits;
    }
    static Twin copy_of(const Twin & t) {
        Twin out;
        out.handle = t.handle, out.parent = t.parent, out.start = t.start, out.path = t.path, out.own = t.own, out.inherited = t.inherited;
        out.has_logits = t.has_logits, out.last_token = t.last_token, out.sampler = t.sampler, out.bias = t.bias, out.steer = t.steer, out.metrics = t.metrics, out.logits = t.logits;
        if (t.grammar) out.grammar = t.grammar->clone();
        return out;
    }

    // Entropy, and the logarithm of the sum of exponentials.
    struct Certainty {
        double entropy = 0, log_sum = 0, top = 0;
    };
    static Certainty certainty(const Row & x) {
        Certainty out;
        out.top = static_cast<double>(*std::max_element(x.begin(), x.end()));
        double sum = 0;
        for (const float logit : x) sum += std::exp(static_cast<double>(logit) - out.top);
        for (const float logit : x) {
            const double p = std::exp(static_cast<double>(logit) - out.top) / sum;
            out.entropy -= p > 0 ? p * std::log(p) : 0;
        }
        out.log_sum = out.top + std::log(sum);
        return out;
    }
    // A token against what it was chosen from.
    void measure(Twin & t, Token token) {
        pyl_metrics & m = t.metrics;
        if (!m.levels || !t.has_logits) return;
        m.n_tokens++;
        const Row & x = logits(t);
        if (m.levels & PYL_METRICS_MODEL) {
            const Certainty c = certainty(x);
            m.model_surprisal += m.last_model_surprisal = c.log_sum - static_cast<double>(x[static_cast<size_t>(token)]);
            m.model_entropy += m.last_model_entropy = c.entropy;
        }
        if (m.levels & PYL_METRICS_SAMPLING) {
            const Measure drawn = t.sampler.measure(token, x.data(), n_vocab, t.grammar.get(), scratch_, {t.bias, t.steer, never(t)});
            m.last_sampling_surprisal = drawn.surprisal, m.last_sampling_entropy = drawn.entropy;
            if (std::isinf(drawn.surprisal)) return;
            m.n_inside++, m.sampling_surprisal += drawn.surprisal, m.sampling_entropy += drawn.entropy;
        }
    }

    // The engine's verdict on the next dispatch.
    int32_t dispatch(size_t n_tokens) {
        const int32_t rc = ++n_dispatches_ == fail_at_ ? fail_rc_ : 0;
        if (rc == 0) n_decoded_ += n_tokens;
        return rc;
    }
    static bool intact(int32_t rc) { return rc == 1 || rc == -1; }
    static Error engine_error(int32_t rc, bool partial) {
        Error error(rc == 1 ? PYL_E_NO_CELLS : rc == -1 ? PYL_E_INTERNAL : PYL_E_DECODE, "");
        error.partial = partial;
        error.state = !intact(rc) ? PYL_STATE_POISONED : partial ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED;
        return error;
    }
    void poison(Twin & t, uint32_t n_tokens) { t.is_poisoned = true, t.has_logits = false, t.own += n_tokens, t.doubtful = n_tokens; }
    void decoded(Twin & t, Token token) { t.path.push_back(token), t.logits.clear(), t.own++; }
    void taken(Twin & t, Token token) {
        measure(t, token);
        decoded(t, token);
        t.has_logits = true, t.last_token = token;
        t.sampler.accept(token);
        if (t.grammar) t.grammar->accept(token);
    }
    static Biases never(const Twin & t) {
        constexpr float none = -std::numeric_limits<float>::infinity();
        static const Biases endings = std::make_shared<const std::vector<std::pair<Token, float>>>(std::initializer_list<std::pair<Token, float>>{{257, none}, {258, none}});
        return t.sampler.params().ignore_eog ? endings : nullptr;
    }
    Token draw(Twin & t) { return t.sampler.sample(logits(t).data(), n_vocab, t.grammar.get(), scratch_, {t.bias, t.steer, never(t)}); }
    Token legal_token(Twin & t) {
        if (!t.grammar) return any_token();
        for (Token token = 0; token < n_vocab; token++) {
            if (t.grammar->allows(token)) return token;
        }
        std::abort();
    }

    template <typename Call>
    void expect(const Expected & want, Call && call) {
        outcomes[want.error.code]++;
        try {
            call();
            CHECK(!want);
        } catch (const Error & got) {
            if (!CHECK(want)) return void(std::fprintf(stderr, "    threw %d: %s\n", got.code, got.what()));
            CHECK_EQ(got.code, want.error.code);
            CHECK_EQ(got.state, want.error.state);
            CHECK_EQ(got.partial, want.error.partial);
            if (want.error.index >= 0) CHECK_EQ(got.index, want.error.index);
            if (want.error.need >= 0) CHECK_EQ(got.need, want.error.need);
            if (want.error.have >= 0) CHECK_EQ(got.have, want.error.have);
        }
    }
    Expected need_cells(size_t n) {
        if (n <= left()) return {};
        return Error(PYL_E_CONTEXT, "").numbers(static_cast<int64_t>(n), left());
    }

    SamplingParams any_sampling() {
        SamplingParams p;
        p.temperature = chance(30) ? 0.0f : 0.5f + static_cast<float>(below(20)) / 10.0f;
        p.top_k = static_cast<int32_t>(below(60));
        p.typical_p = chance(20) ? 0.8f : 1.0f;
        p.penalty_repeat = chance(30) ? 1.3f : 1.0f;
        p.penalty_presence = chance(30) ? 0.4f : 0.0f;
        p.penalty_last_n = static_cast<int32_t>(below(30));
        p.ignore_eog = chance(20);
        return p;
    }

    // -------------------------------------------------------------------------------------------------- the operations

    void create() {
        what = "create";
        const Pos start = chance(70) ? 0 : static_cast<Pos>(below(1000));
        const SamplingParams p = any_sampling();
        const uint64_t seed = rng_();
        const Expected want = leases() ? Expected() : Expected(Error(PYL_E_NO_LEASE, "").numbers(1, 0));
        const std::string gbnf = chance(70) ? "" : "root ::= \"" + std::string(below(4), 'c') + "\"";
        expect(want, [&] {
            Twin & t = add(store_->create(start, p, seed, {false, gbnf, "root"}));
            t.start = start;
            if (!gbnf.empty()) t.grammar = model_->grammar({false, gbnf, "root"});
            t.sampler = Sampler(seed);
            t.sampler.set_params(p);
        });
    }

    void fork() {
        const Branches from = healthy();
        if (from.empty()) return invalid();
        const size_t n = 1 + below(4);
        what = "fork " + std::to_string(n);
        const pyl_branch source = any_of(from);
        std::vector<uint64_t> seeds;
        if (chance(50)) for (size_t i = 0; i < n; i++) seeds.push_back(rng_());
        const bool with_logits = chance(80);
        Branches out(n, 4711);
        const Expected want = n <= leases() ? Expected() : Expected(Error(PYL_E_NO_LEASE, "").numbers(static_cast<int64_t>(n), static_cast<int64_t>(leases())));
        expect(want, [&] { store_->fork(source, out, seeds.empty() ? nullptr : seeds.data(), with_logits); });
        if (want) return void(CHECK(out == Branches(n, 4711)));
        for (size_t i = 0; i < n; i++) {
            Twin & t = add(out[i]);
            Twin & s = twin(source);
            t.parent = source, t.start = s.start, t.path = s.path;
            t.inherited = s.inherited + s.own;
            if (with_logits) t.has_logits = s.has_logits, t.logits = s.logits;
            t.last_token = s.last_token;
            t.sampler = s.sampler, t.bias = s.bias, t.metrics = s.metrics;
            if (!seeds.empty()) t.sampler.reseed(seeds[i]);
            if (s.grammar) t.grammar = s.grammar->clone();
        }
    }

    void prefill() {
        if (healthy().empty()) return invalid();
        const Branches chosen = some(healthy(), 5);
        std::vector<Tokens> texts;
        size_t total = 0;
        for (size_t i = 0; i < chosen.size(); i++) {
            texts.emplace_back(chance(15) ? 0 : 1 + below(14));
            for (Token & token : texts.back()) token = any_token();
            total += texts.back().size();
        }
        const uint32_t max_dispatches = chance(60) ? 0 : 1 + below(3);
        what = "prefill " + std::to_string(chosen.size()) + " runs, " + std::to_string(total) + " tokens, at most " + std::to_string(max_dispatches) + " dispatches";
        std::vector<pyl_run> runs;
        for (size_t i = 0; i < chosen.size(); i++) runs.push_back(run(chosen[i], texts[i]));

        // In the order of the sequences, filling one dispatch after the other.
        Expected want = need_cells(total);
        std::vector<size_t> order;
        for (size_t i = 0; i < chosen.size(); i++) {
            if (!texts[i].empty()) order.push_back(i);
        }
        std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return store_->get(chosen[a]).seat.seq < store_->get(chosen[b]).seat.seq; });
        std::vector<uint32_t> landed(chosen.size());
        std::vector<int32_t> state(chosen.size(), PYL_STATE_UNCHANGED);
        uint32_t n_dispatches = 0;
        for (size_t at = 0; !want && at < order.size() && (max_dispatches == 0 || n_dispatches < max_dispatches);) {
            std::vector<std::pair<size_t, uint32_t>> parts;
            uint32_t n = 0;
            for (size_t k = at; k < order.size() && n < n_batch_; k++) {
                parts.emplace_back(order[k], std::min(n_batch_ - n, static_cast<uint32_t>(texts[order[k]].size()) - landed[order[k]]));
                n += parts.back().second;
            }
            const int32_t rc = dispatch(n);
            if (rc) want = engine_error(rc, n_dispatches > 0);
            n_dispatches++;
            for (const auto & [i, m] : parts) {
                Twin & t = twin(chosen[i]);
                if (rc == 0) {
                    for (uint32_t k = 0; k < m; k++) decoded(t, texts[i][landed[i] + k]);
                    landed[i] += m, state[i] = PYL_STATE_ADVANCED;
                    t.has_logits = landed[i] == texts[i].size();
                } else if (!intact(rc)) {
                    poison(t, m), state[i] = PYL_STATE_POISONED;
                }
            }
            while (at < order.size() && landed[order[at]] == texts[order[at]].size()) at++;
        }
        uint32_t told = 77;
        expect(want, [&] { store_->prefill(runs, max_dispatches, told); });
        CHECK_EQ(told, n_dispatches);
        for (size_t i = 0; i < runs.size(); i++) {
            CHECK_EQ(runs[i].n_landed, landed[i]);
            CHECK_EQ(runs[i].state, state[i]);
        }
    }

    void commit() {
        if (healthy().empty()) return invalid();
        const Branches chosen = some(healthy(), 8);
        what = "commit " + std::to_string(chosen.size());
        Tokens tokens;
        for (const pyl_branch b : chosen) tokens.push_back(legal_token(twin(b)));
        Expected want = need_cells(chosen.size());
        if (!want) {
            const int32_t rc = dispatch(chosen.size());
            if (rc) want = engine_error(rc, false);
            for (size_t i = 0; i < chosen.size(); i++) {
                if (rc == 0) taken(twin(chosen[i]), tokens[i]);
                if (rc != 0 && !intact(rc)) poison(twin(chosen[i]), 1);
            }
        }
        expect(want, [&] { store_->commit(chosen, tokens.data()); });
    }

    void sample() {
        if (ready().empty()) return invalid();
        Branches chosen = some(ready(), 6);
        if (chance(20)) chosen.push_back(chosen[0]);  // the same one twice draws twice
        what = "sample " + std::to_string(chosen.size());
        Tokens tokens(chosen.size(), -77), drawn;
        std::vector<uint64_t> draws;
        Expected want;
        for (size_t i = 0; i < chosen.size() && !want; i++) {
            Twin & t = twin(chosen[i]);
            draws.push_back(t.sampler.draws());
            drawn.push_back(draw(t));
            if (drawn.back() < 0) want = Error(PYL_E_ILLEGAL, "").at(i);
        }
        if (want) {
            for (size_t i = draws.size(); i-- > 0;) twin(chosen[i]).sampler.rewind(draws[i]);
            drawn.assign(chosen.size(), -77);
        } else {
            n_sampled_ += chosen.size();
        }
        expect(want, [&] { store_->sample(chosen, tokens.data()); });
        CHECK(tokens == drawn);
    }

    void tick() {
        if (ready().empty()) return invalid();
        const Branches chosen = some(ready(), 6);
        const uint32_t n_steps = 1 + below(8);
        Tokens stops(chance(50) ? below(30) : 0);
        for (Token & token : stops) token = any_token();
        std::vector<uint32_t> limits;
        for (size_t i = 0; i < chosen.size(); i++) limits.push_back(chance(60) ? 0 : 1 + below(8));
        what = "tick " + std::to_string(chosen.size()) + " lanes, " + std::to_string(n_steps) + " steps";
        Lanes got = lanes(chosen, n_steps, stops, limits);

        Expected want = need_cells(chosen.size());
        const bool ran = !want;
        std::vector<Tokens> rows(chosen.size());
        std::vector<int32_t> finish(chosen.size(), PYL_FINISH_NONE), state(chosen.size(), PYL_STATE_UNCHANGED);
        Tokens final_token(chosen.size(), -1);
        uint32_t n_ticks = 0, n_dispatches = 0;
        bool out_of_cells = false;
        for (uint32_t step = 0; ran && step < n_steps; step++) {
            std::vector<size_t> active, going;
            for (size_t i = 0; i < chosen.size(); i++) {
                if (finish[i] == PYL_FINISH_NONE) active.push_back(i);
            }
            if (active.empty()) break;
            if (left() < active.size()) {
                out_of_cells = true;
                break;
            }
            std::vector<uint64_t> draws;
            Tokens drawn(chosen.size());
            for (const size_t i : active) {
                Twin & t = twin(chosen[i]);
                draws.push_back(t.sampler.draws());
                drawn[i] = draw(t);
                const bool stop = std::find(stops.begin(), stops.end(), drawn[i]) != stops.end();
                if (drawn[i] < 0) finish[i] = PYL_FINISH_ILLEGAL;
                else if (stop || drawn[i] == 257 || drawn[i] == 258) finish[i] = stop ? PYL_FINISH_STOP : PYL_FINISH_EOG, final_token[i] = drawn[i];
                else going.push_back(i);
            }
            int32_t rc = 0;
            if (!going.empty()) rc = dispatch(going.size()), n_dispatches++;
            if (rc) {
                want = engine_error(rc, step > 0);
                if (!intact(rc)) {
                    for (const size_t i : going) poison(twin(chosen[i]), 1), state[i] = PYL_STATE_POISONED;
                    break;
                }
                for (size_t k = 0; k < active.size(); k++) {
                    twin(chosen[active[k]]).sampler.rewind(draws[k]);
                    finish[active[k]] = PYL_FINISH_NONE, final_token[active[k]] = -1;
                }
                break;
            }
            n_ticks++;
            for (const size_t i : active) n_sampled_ += drawn[i] >= 0;
            for (const size_t i : going) {
                taken(twin(chosen[i]), drawn[i]);
                rows[i].push_back(drawn[i]);
                state[i] = PYL_STATE_ADVANCED;
                if (rows[i].size() == limits[i]) finish[i] = PYL_FINISH_LENGTH;
            }
        }
        expect(want, [&] { run_tick(*store_, got); });
        if (!ran) return;
        CHECK_EQ(got.tick.n_ticks, n_ticks);
        CHECK_EQ(got.tick.n_dispatches, n_dispatches);
        CHECK_EQ(got.tick.out_of_cells, out_of_cells);
        for (size_t i = 0; i < chosen.size(); i++) {
            CHECK_EQ(got.lanes[i].finish, finish[i]);
            CHECK_EQ(got.lanes[i].final_token, final_token[i]);
            CHECK_EQ(got.lanes[i].state, state[i]);
            if (CHECK_EQ(got.lanes[i].n_tokens, rows[i].size())) CHECK(got.taken(i) == rows[i]);
        }
    }

    void prune() {
        // Leaves, sometimes with a parent whose children are all listed, in any order, with stale ones and repetitions between.
        Branches chosen = some(which([&](const Twin & t) { return children(t.handle).empty(); }), 3);
        std::set<pyl_branch> listed(chosen.begin(), chosen.end());
        for (const pyl_branch b : Branches(chosen)) {
            const pyl_branch parent = twin(b).parent;
            if (!parent || listed.contains(parent)) continue;
            const Branches kids = children(parent);
            if (std::all_of(kids.begin(), kids.end(), [&](pyl_branch kid) { return listed.contains(kid); })) listed.insert(parent), chosen.push_back(parent);
        }
        what = "prune " + std::to_string(chosen.size());
        if (!gone_.empty()) chosen.push_back(any_of(gone_));
        if (chance(30)) chosen.push_back(chosen[0]);
        std::shuffle(chosen.begin(), chosen.end(), rng_);
        expect({}, [&] { store_->prune(chosen); });
        for (const pyl_branch b : listed) forget(b);
    }

    void prune_subtree() {
        const pyl_branch top = any_of(live_list())->handle;
        Branches going{top};
        for (size_t i = 0; i < going.size(); i++) {
            for (const pyl_branch kid : children(going[i])) going.push_back(kid);
        }
        what = "prune_subtree of " + std::to_string(going.size());
        store_->prune_subtree(top);
        for (const pyl_branch b : going) forget(b);
    }

    void retain_only() {
        if (healthy().empty()) return invalid();
        what = "retain_only";
        const pyl_branch kept = any_of(healthy());
        expect({}, [&] { store_->retain_only(kept); });
        for (const pyl_branch b : which([&](const Twin & t) { return t.handle != kept; })) forget(b);
        Twin & t = twin(kept);
        t.own += t.inherited, t.inherited = 0, t.parent = 0;
    }

    void set_grammar() {
        if (healthy().empty()) return invalid();
        what = "set_grammar";
        const pyl_branch b = any_of(healthy());
        std::string literal;
        for (uint32_t n = below(5); n-- > 0;) literal += static_cast<char>('a' + below(26));
        const std::string gbnf = literal.empty() ? "" : "root ::= \"" + literal + "\"";
        expect({}, [&] { store_->set_grammar(b, {false, gbnf, "root"}); });
        twin(b).grammar = gbnf.empty() ? nullptr : model_->grammar({false, gbnf, "root"});
    }

    void set_sampling() {
        if (healthy().empty()) return invalid();
        what = "set_sampling";
        const pyl_branch b = any_of(healthy());
        const SamplingParams p = any_sampling();
        store_->get_healthy(b).sampler.set_params(p);
        twin(b).sampler.set_params(p);
    }

    void fast_forward() {
        const Branches kids = which([](const Twin & t) { return t.parent != 0; });
        if (kids.empty()) return invalid();
        const pyl_branch child = any_of(kids), parent = chance(85) ? twin(child).parent : any_of(live_list())->handle;
        Twin & c = twin(child);
        Twin & p = twin(parent);
        what = p.is_poisoned ? "fast_forward of a poisoned parent" : "fast_forward";
        const uint32_t doubtful = p.is_poisoned ? p.doubtful : 0;
        Expected want;
        if (c.is_poisoned) want = Error(PYL_E_POISONED, "");
        else if (c.parent != parent || c.inherited != p.inherited + p.own - doubtful) want = Error(PYL_E_DIVERGED, "");
        expect(want, [&] { store_->fast_forward(parent, child); });
        if (want) return;
        p.path = c.path, p.own += c.own - doubtful, p.doubtful = 0, p.is_poisoned = false;
        p.has_logits = c.has_logits, p.logits = c.logits, p.last_token = c.last_token;
        p.sampler = c.sampler, p.grammar = std::move(c.grammar), p.bias = c.bias, p.steer = c.steer, p.metrics = c.metrics, p.start = c.start;
        for (const pyl_branch grandchild : children(child)) twin(grandchild).parent = parent;
        forget(child);
    }

    void set_bias() {
        if (healthy().empty()) return invalid();
        const bool steer = chance(50);
        what = steer ? "set_steer" : "set_bias";
        Twin & t = twin(any_of(healthy()));
        Tokens tokens(below(40));
        std::vector<float> by;
        std::vector<std::pair<Token, float>> pairs;
        for (Token & token : tokens) {
            token = chance(50) ? 'a' + static_cast<Token>(below(26)) : any_token();  // letters are what grammars here ask for
            by.push_back(chance(60) ? -std::numeric_limits<float>::infinity() : static_cast<float>(below(9)) - 4.0f);
            pairs.emplace_back(token, by.back());
        }
        expect({}, [&] { store_->set_bias(t.handle, steer ? PYL_STEER : PYL_BIAS, tokens, by.data()); });
        (steer ? t.steer : t.bias) = pairs.empty() ? nullptr : std::make_shared<const std::vector<std::pair<Token, float>>>(pairs);
    }

    void change_logits() {
        if (ready().empty()) return invalid();
        Twin & t = twin(any_of(ready()));
        Row made = logits(t);
        if (chance(50)) {
            what = "set_logits";
            for (float & x : made) x = static_cast<float>(below(1000)) / 100.0f;
            if (chance(50)) made[below(made.size())] = -std::numeric_limits<float>::infinity();
            expect({}, [&] { store_->set_logits(t.handle, made); });
        } else {
            what = "merge_logits";
            Branches experts = some(ready(), 3);
            if (chance(30)) experts.push_back(t.handle);  // its own expert, too
            const float alpha = static_cast<float>(below(9)) / 2.0f - 2.0f;
            for (size_t i = 0; i < made.size(); i++) {
                double sum = 0;
                for (const pyl_branch expert : experts) sum += static_cast<double>(logits(twin(expert))[i]);
                const bool banned = std::isinf(sum);
                if (std::isinf(made[i]) || (banned && alpha <= 0)) continue;
                made[i] = banned ? -std::numeric_limits<float>::infinity() : static_cast<float>(static_cast<double>(made[i]) + static_cast<double>(alpha) * sum);
            }
            expect({}, [&] { store_->merge_logits(t.handle, experts, alpha); });
            const Row got = row(*store_, t.handle);
            for (size_t i = 0; i < made.size(); i++) CHECK(got[i] == made[i] || std::abs(got[i] - made[i]) <= 1e-5f * (1 + std::abs(made[i])));
            made = got;  // the last bit depends on the machine
        }
        t.logits = made;
    }

    void look() {
        if (ready().empty()) return invalid();
        what = "look";
        Twin & t = twin(any_of(ready()));
        Tokens all;
        for (Token token = 0; token < n_vocab; token++) all.push_back(token);
        std::vector<uint8_t> legal(all.size(), 7);
        expect({}, [&] { store_->legal(t.handle, all, legal.data()); });
        for (const Token token : all) {
            bool want = !t.grammar || t.grammar->allows(token);
            for (const Biases & biases : {t.bias, t.steer, never(t)}) {
                for (const auto & [id, by] : biases ? *biases : std::vector<std::pair<Token, float>>()) want = want && (id != token || !std::isinf(by));
            }
            CHECK_EQ(legal[static_cast<size_t>(token)], want);
        }
        const Row & x = logits(t);
        const Certainty c = certainty(x);
        const pyl_distribution d = store_->distribution(t.handle);
        CHECK_EQ(d.most_likely, std::max_element(x.begin(), x.end()) - x.begin());
        CHECK(std::abs(d.entropy - c.entropy) < 1e-9 && std::abs(d.log_sum - c.log_sum) < 1e-9);
        CHECK(std::abs(d.max_logit - c.top) == 0);
    }

    // Through forks that nobody sees: rows are those of a replay, and whatever becomes of it nothing has changed but the counters.
    void score() {
        Twin * source = !healthy().empty() && chance(70) ? &twin(any_of(healthy())) : nullptr;
        std::vector<Tokens> prompts(1 + below(6));
        for (Tokens & prompt : prompts) {
            prompt.resize(chance(10) ? 0 : chance(3) ? left() + 1 : 1 + below(12));
            for (Token & token : prompt) token = any_token();
        }
        Tokens ids(chance(50) ? below(4) : 0);
        for (Token & token : ids) token = any_token();
        what = "score " + std::to_string(prompts.size()) + " prompts";
        Expected want;
        for (size_t i = 0; i < prompts.size() && !want; i++) {
            if (prompts[i].empty() && !(source && source->has_logits)) want = Error(PYL_E_INVALID, "").at(i);
            else if (prompts[i].size() > left()) want = Error(PYL_E_CONTEXT, "").at(i).numbers(static_cast<int64_t>(prompts[i].size()), left());
        }
        if (!want && leases() == 0) want = Error(PYL_E_NO_LEASE, "").numbers(1, 0);
        for (size_t first = 0; !want && first < prompts.size();) {
            size_t n = 0, cells = 0;
            for (; first + n < prompts.size() && n < leases() && cells + prompts[first + n].size() <= left(); n++) cells += prompts[first + n].size();
            for (; cells > 0 && !want; cells -= std::min<size_t>(cells, n_batch_)) {
                if (const int32_t rc = dispatch(std::min<size_t>(cells, n_batch_))) want = engine_error(rc, false), want.error.state = PYL_STATE_UNCHANGED;
            }
            first += n;
        }
        const size_t width = ids.empty() ? n_vocab : ids.size();
        Row out(prompts.size() * width, 4711.0f);
        const std::vector<std::span<const Token>> views(prompts.begin(), prompts.end());
        expect(want, [&] { store_->score(source ? source->handle : 0, views, ids, out.data()); });
        for (size_t i = 0; i < prompts.size() && !want; i++) {
            Tokens path = source ? source->path : Tokens();
            path.insert(path.end(), prompts[i].begin(), prompts[i].end());
            const Row row = prompts[i].empty() ? logits(*source) : replay(source ? source->start : 0, path);
            Row picked = ids.empty() ? row : Row();
            for (const Token id : ids) picked.push_back(row[static_cast<size_t>(id)]);
            CHECK(same_bits(picked, Row(out.begin() + static_cast<std::ptrdiff_t>(i * width), out.begin() + static_cast<std::ptrdiff_t>((i + 1) * width))));
        }
    }

    void reseed_kv() {
        if (healthy().empty()) return invalid();
        const Branches leaves = which([&](const Twin & t) { return !t.is_poisoned && children(t.handle).empty(); });
        const pyl_branch b = leaves.empty() || chance(15) ? any_of(healthy()) : any_of(leaves);
        Twin & t = twin(b);
        const uint32_t room = left() + t.own;
        Tokens tokens(chance(10) ? room + below(2) : 1 + below(24));
        for (Token & token : tokens) token = any_token();
        what = "reseed_kv " + std::to_string(tokens.size());
        const auto n = static_cast<uint32_t>(tokens.size());
        Expected want;
        uint32_t landed = 0, told = 77;
        if (!children(b).empty()) want = Error(PYL_E_HAS_CHILDREN, "");
        else if (tokens.empty()) want = Error(PYL_E_INVALID, "");
        else if (n > room) want = Error(PYL_E_CONTEXT, "").numbers(n, room);
        else {
            t.own = t.inherited = 0, t.start = 0, t.has_logits = false;
            t.path.clear(), t.logits.clear();
            while (landed < n && !want) {
                const uint32_t m = std::min(n - landed, n_batch_);
                if (const int32_t rc = dispatch(m)) {
                    want = engine_error(rc, true);
                    if (!intact(rc)) poison(t, m);
                    break;
                }
                for (uint32_t k = 0; k < m; k++) decoded(t, tokens[landed++]);
                t.has_logits = landed == n;
            }
        }
        expect(want, [&] { store_->reseed_kv(b, tokens, told); });
        CHECK_EQ(told, landed);
    }

    void save() {
        if (healthy().empty()) return invalid();
        what = "save";
        Twin & t = twin(any_of(healthy()));
        const bool with_logits = chance(70);
        Kept kept{copy_of(t), store_->save(t.handle, with_logits)};
        CHECK(kept.bytes == store_->save(t.handle, with_logits));
        if (!with_logits) kept.twin.has_logits = false, kept.twin.logits.clear();
        kept_.push_back(std::move(kept));
        if (kept_.size() > 6) kept_.erase(kept_.begin());
    }

    void load() {
        if (kept_.empty()) return save();
        what = "load";
        const Kept & kept = any_of(kept_);
        if (chance(20)) {
            std::string damaged = kept.bytes;
            if (chance(30)) damaged.resize(below(damaged.size()));
            else damaged[below(damaged.size())] ^= static_cast<char>(1 << below(8));
            return expect(Error(PYL_E_FORMAT, ""), [&] { store_->load(damaged); });
        }
        const size_t cells = kept.twin.path.size();
        Expected want = need_cells(cells);
        if (!want && leases() == 0) want = Error(PYL_E_NO_LEASE, "").numbers(1, 0);
        expect(want, [&] {
            const pyl_branch made = store_->load(kept.bytes);
            Twin & t = add(made);
            t = copy_of(kept.twin);
            t.handle = made, t.parent = 0, t.own = static_cast<uint32_t>(cells), t.inherited = 0;
        });
    }

    void set_metrics() {
        if (healthy().empty()) return invalid();
        what = "set_metrics";
        Twin & t = twin(any_of(healthy()));
        const auto levels = static_cast<int32_t>(below(5));
        expect(levels < 4 ? Expected() : Expected(Error(PYL_E_INVALID, "")), [&] { store_->set_metrics(t.handle, levels); });
        if (levels < 4) t.metrics = Branch{}.metrics, t.metrics.levels = levels;
    }

    // A call with one thing wrong with it: refused with the right code, and agrees() sees to it that nothing has changed.
    void invalid() {
        const uint32_t kind = below(8);
        Branches good = healthy(), able = ready();
        const auto bad_at = [&](int32_t code, size_t i) { return Expected(Error(code, "").at(i)); };
        switch (kind) {
            case 0:
            case 1: {  // a handle that is not alive, or poisoned
                const Branches poisoned = which([](const Twin & t) { return t.is_poisoned; });
                const bool stale = poisoned.empty() || kind == 0;
                const pyl_branch bad = !stale ? any_of(poisoned) : gone_.empty() || chance(20) ? rng_() << 32 | 999 : any_of(gone_);
                const int32_t code = stale ? PYL_E_STALE : PYL_E_POISONED;
                what = "a dead handle";
                Branches list = able.empty() ? able : some(able, 4);
                Tokens tokens;
                for (const pyl_branch b : list) tokens.push_back(legal_token(twin(b)));
                const size_t at = below(list.size() + 1);
                list.insert(list.begin() + static_cast<std::ptrdiff_t>(at), bad);
                tokens.insert(tokens.begin() + static_cast<std::ptrdiff_t>(at), 1);
                std::vector<pyl_run> runs;
                const Tokens one{1};
                for (const pyl_branch b : list) runs.push_back(run(b, one));
                Lanes l = lanes(list, 2);
                Branches out(1);
                expect(bad_at(code, at), [&] { store_->commit(list, tokens.data()); });
                expect(bad_at(code, at), [&] { stub::prefill(*store_, runs); });
                expect(bad_at(code, at), [&] { store_->sample(list, tokens.data()); });
                expect(bad_at(code, at), [&] { run_tick(*store_, l); });
                expect(Error(code, ""), [&] { store_->fork(bad, out, nullptr); });
                expect(Error(code, ""), [&] { store_->retain_only(bad); });
                expect(Error(code, ""), [&] { store_->set_grammar(bad, {false, "", "root"}); });
                expect(Error(code, ""), [&] { store_->set_metrics(bad, PYL_METRICS_MODEL); });
                expect(Error(code, ""), [&] { store_->save(bad, true); });
                uint32_t landed = 0;
                expect(Error(code, ""), [&] { store_->reseed_kv(bad, one, landed); });
                const std::vector<std::span<const Token>> prompts{one};
                Row out_row(n_vocab);
                expect(Error(code, ""), [&] { store_->score(bad, prompts, {}, out_row.data()); });
                if (stale) store_->prune_subtree(bad), store_->prune(Branches{bad});
                return;
            }
            case 2: {  // one branch twice
                if (able.empty()) return;
                what = "the same branch twice";
                Branches list = some(able, 4);
                list.push_back(list[0]);
                Tokens tokens;
                for (const pyl_branch b : list) tokens.push_back(legal_token(twin(b)));
                std::vector<pyl_run> runs;
                for (const pyl_branch b : list) runs.push_back(run(b, tokens));
                Lanes l = lanes(list, 2);
                expect(bad_at(PYL_E_INVALID, list.size() - 1), [&] { store_->commit(list, tokens.data()); });
                expect(bad_at(PYL_E_INVALID, list.size() - 1), [&] { stub::prefill(*store_, runs); });
                expect(bad_at(PYL_E_INVALID, list.size() - 1), [&] { run_tick(*store_, l); });
                return;
            }
            case 3: {  // no such token
                if (good.empty()) return;
                what = "a token outside the vocabulary";
                const Token bad = any_of(std::vector<Token>{-1, n_vocab, n_vocab + 1, INT32_MAX, INT32_MIN});
                const Tokens tokens{1, bad};
                std::vector<pyl_run> runs{run(any_of(good), tokens)};
                expect(bad_at(PYL_E_INVALID, 0), [&] { store_->commit(Branches{runs[0].branch}, &tokens[1]); });
                expect(bad_at(PYL_E_INVALID, 0), [&] { stub::prefill(*store_, runs); });
                return;
            }
            case 4: {  // one cell more than there is
                if (good.empty()) return;
                what = "one cell too many";
                const Tokens tokens(left() + 1, 7);
                expect(Error(PYL_E_CONTEXT, "").numbers(left() + 1, left()), [&] { stub::prefill(*store_, any_of(good), tokens); });
                return;
            }
            case 5: {  // children in the way, leases gone
                const Branches parents = which([&](const Twin & t) { return !children(t.handle).empty(); });
                what = "prune with children, fork without leases";
                if (!parents.empty()) {
                    Branches list = some(which([&](const Twin & t) { return children(t.handle).empty(); }), 3);
                    const pyl_branch bad = any_of(parents);
                    std::erase(list, children(bad)[0]);
                    list.push_back(bad);
                    expect(bad_at(PYL_E_HAS_CHILDREN, list.size() - 1), [&] { store_->prune(list); });
                }
                if (good.empty()) return;
                Branches out(leases() + 1);
                expect(Error(PYL_E_NO_LEASE, "").numbers(static_cast<int64_t>(out.size()), static_cast<int64_t>(leases())), [&] { store_->fork(any_of(good), out, nullptr); });
                return;
            }
            case 6: {  // nothing to sample from
                const Branches blank = which([](const Twin & t) { return !t.is_poisoned && !t.has_logits; });
                if (blank.empty()) return;
                what = "no logits";
                Branches list = able.empty() ? able : some(able, 4);
                list.push_back(any_of(blank));
                Tokens tokens(list.size());
                Lanes l = lanes(list, 2);
                expect(bad_at(PYL_E_NO_LOGITS, list.size() - 1), [&] { store_->sample(list, tokens.data()); });
                expect(bad_at(PYL_E_NO_LOGITS, list.size() - 1), [&] { run_tick(*store_, l); });
                return;
            }
            default: {  // against the grammar
                const Branches strict = which([](const Twin & t) { return !t.is_poisoned && t.grammar; });
                what = "against the grammar";
                if (!good.empty()) expect(Error(PYL_E_GRAMMAR, ""), [&] { store_->set_grammar(any_of(good), {false, "no grammar", "root"}); });
                if (strict.empty()) return;
                const pyl_branch b = any_of(strict);
                const Token bad = 0;  // no literal here holds it, nor does it end a generation
                expect(bad_at(PYL_E_GRAMMAR, 0), [&] { store_->commit(Branches{b}, &bad); });
                return;
            }
        }
    }

    std::mt19937_64 & rng_;
    uint32_t n_ctx_ = 0, n_seq_max_ = 0, n_batch_ = 0;
    uint64_t fail_at_ = 0, n_dispatches_ = 0, n_decoded_ = 0, n_sampled_ = 0, age_ = 0;
    int32_t fail_rc_ = 0;
    std::shared_ptr<Model> model_;
    std::unique_ptr<Store> store_;
    std::unique_ptr<Context> oracle_;
    std::map<uint64_t, Twin> live_;
    Branches gone_;
    std::vector<Kept> kept_;
    SamplerScratch scratch_;
};

}  // namespace

int main(int argc, char ** argv) {
    const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20240607;
    const unsigned long n_ops = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 20000;
    std::mt19937_64 rng(seed);
    std::unique_ptr<World> world;
    std::map<std::string, int> kinds;
    for (unsigned long i = 0; i < n_ops; i++) {
        if (i % ops_per_store == 0) world.reset(), world = std::make_unique<World>(rng);
        world->what = "nothing";
        world->step();
        kinds[world->what.substr(0, world->what.find(' '))]++;
        if (!world->agrees() || check::n_failed) {
            const auto told = static_cast<unsigned long long>(seed);
            std::fprintf(stderr, "operation %lu (%s) of seed %llu; repeat with: test_random %llu %lu\n", i, world->what.c_str(), told, told, i + 1);
            return check::result("test_random");
        }
    }
    world.reset();
    CHECK_EQ(live_counts().branches + live_counts().contexts + live_counts().grammars + live_counts().weights, 0);
    for (const auto & [kind, n] : kinds) std::printf("%s %d, ", kind.c_str(), n);
    std::printf("\nresults: ");
    for (const auto & [code, n] : World::outcomes) std::printf("%d: %d, ", code, n);
    std::printf("\n");
    return check::result("test_random");
}
