// Many threads at once: stores of one model side by side, polling, cancel, teardown, the registry, errors and texts. Written for
// ThreadSanitizer (session tsan) and run without it too: then it checks that every result is what it would have been alone.
//
//   test_parallel [model.gguf [n_threads]]   on the stub engine, or on a real model of q8_0 weights, where bits repeat;
//                                            with so many engine threads to a store (1)
//
// No time decides anything. A call that is to be hit in the middle is repeated until it was, and what only a stop can end is stopped.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "pylloyal.h"

namespace {

using Tokens = std::vector<int32_t>;

std::string real_path;  // empty for the stub
uint32_t n_threads_of_a_store = 1;
bool is_real() { return !real_path.empty(); }
std::string path_of(const std::string & stub_options) { return is_real() ? real_path : "stub:" + stub_options; }

// Draws without an end: 'a' for ever, as far as the engine's grammars can say it.
std::string endless() { return is_real() ? R"(root ::= "a" root)" : "root ::= \"" + std::string(4000, 'a') + "\""; }

pyl_model * open_model(const std::string & path, int32_t vocab_only = 0) {
    pyl_model_params p;
    pyl_model_params_init(&p, sizeof p);
    p.vocab_only = vocab_only;
    pyl_model * out = nullptr;
    CHECK_EQ(pyl_model_open(&out, path.data(), path.size(), &p), PYL_OK);
    return out;
}

// A model's handle for the length of a scope.
struct Model {
    pyl_model * handle;
    explicit Model(const std::string & stub_options) : handle(open_model(path_of(stub_options))) {}
    ~Model() { CHECK_EQ(pyl_model_free(handle), PYL_OK); }
    Model(const Model &) = delete;
    Model & operator=(const Model &) = delete;
};

pyl_store * open_store(const pyl_model * model, uint32_t n_ctx, uint32_t n_batch, uint32_t n_branches) {
    pyl_store_params p;
    pyl_store_params_init(&p, sizeof p);
    p.n_ctx = n_ctx, p.n_batch = n_batch, p.n_branches = n_branches, p.n_threads = n_threads_of_a_store;
    pyl_store * out = nullptr;
    CHECK_EQ(pyl_store_open(&out, model, &p), PYL_OK);
    return out;
}

pyl_sampling seeded(uint64_t seed) {
    pyl_sampling s;
    pyl_sampling_init(&s, sizeof s);
    s.seed_mode = PYL_SEED_SET, s.seed = seed;
    return s;
}

int32_t set_gbnf(pyl_store * store, pyl_branch branch, const char * text, size_t n, const char * root) {
    const pyl_grammar grammar = {sizeof grammar, PYL_GRAMMAR_GBNF, text, n, root, nullptr, 0};
    return pyl_branch_set_grammar(store, branch, &grammar);
}

int32_t set_chat(pyl_store * store, pyl_branch branch, const char * text, size_t n) {
    const pyl_grammar grammar = {sizeof grammar, PYL_GRAMMAR_CHAT, text, n, nullptr, nullptr, 0};
    return pyl_branch_set_grammar(store, branch, &grammar);
}

pyl_branch create(pyl_store * store, uint64_t seed = 1) {
    const pyl_sampling s = seeded(seed);
    pyl_branch out = 0;
    CHECK_EQ(pyl_branch_create(store, &out, 0, &s, nullptr), PYL_OK);
    return out;
}

pyl_run run_of(pyl_branch branch, const Tokens & tokens) { return {sizeof(pyl_run), static_cast<uint32_t>(tokens.size()), branch, tokens.data(), 77, 77}; }

int32_t prefill(pyl_store * store, pyl_branch branch, const Tokens & tokens) {
    pyl_run run = run_of(branch, tokens);
    return pyl_prefill_n(store, &run, 1, 0, nullptr);
}

template <typename T>
T sized() {
    T out{};
    out.struct_size = sizeof out;
    return out;
}

pyl_pressure pressure(const pyl_store * store) {
    auto p = sized<pyl_pressure>();
    CHECK_EQ(pyl_store_pressure(store, &p), PYL_OK);
    return p;
}

pyl_branch_info describe(pyl_store * store, pyl_branch branch) {
    auto info = sized<pyl_branch_info>();
    CHECK_EQ(pyl_branch_describe(store, branch, &info), PYL_OK);
    return info;
}

pyl_live live() {
    auto out = sized<pyl_live>();
    CHECK_EQ(pyl_live_objects(&out), PYL_OK);
    return out;
}

std::vector<float> logits(pyl_store * store, pyl_branch branch) {
    auto view = sized<pyl_logits_view>();
    if (!CHECK_EQ(pyl_branch_logits(store, branch, &view), PYL_OK)) return {};
    return {view.data, view.data + view.n_vocab};
}

bool same_bits(const std::vector<float> & a, const std::vector<float> & b) { return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0; }

std::string taken(pyl_text * text) {
    std::string out(pyl_text_data(text), pyl_text_size(text));
    pyl_text_free(text);
    return out;
}

Tokens text(size_t n, uint32_t of = 1) {
    Tokens out;
    uint32_t x = of * 2654435761u;
    for (size_t i = 0; i < n; i++) out.push_back(static_cast<int32_t>((x = x * 1664525u + 1013904223u) >> 24));
    return out;
}

template <typename Test>
void wait_until(Test && test) {
    while (!test()) std::this_thread::yield();
}

// Runs body(0..n-1) on a thread each, all let go at the same moment, and waits for them.
template <typename Body>
void together(size_t n, Body && body) {
    std::atomic<size_t> n_ready{0};
    std::vector<std::thread> threads;
    for (size_t t = 0; t < n; t++) {
        threads.emplace_back([&, t] {
            n_ready++;
            wait_until([&] { return n_ready == n; });
            body(t);
        });
    }
    for (auto & thread : threads) thread.join();
}

// A thread that does something over and over until this goes out of scope.
class Meanwhile {
public:
    template <typename Body>
    explicit Meanwhile(Body body) : thread_([this, body = std::move(body)]() mutable {
          while (!is_over_) body(), n_rounds_++, std::this_thread::yield();
      }) {
        wait_until([&] { return n_rounds_ > 0; });
    }
    ~Meanwhile() {
        is_over_ = true;
        thread_.join();
    }
    Meanwhile(const Meanwhile &) = delete;
    Meanwhile & operator=(const Meanwhile &) = delete;

private:
    std::atomic<bool> is_over_{false};
    std::atomic<uint64_t> n_rounds_{0};
    std::thread thread_;
};

// ---------------------------------------------------------------------------------------------------------- side by side

struct Seen {
    std::vector<float> rows;
    Tokens tokens;
};

// Some of everything on a store of its own, and all that it showed. `shown` lets others poll that store meanwhile.
Seen conversation(const pyl_model * model, uint32_t seed, std::atomic<pyl_store *> * shown = nullptr) {
    pyl_store * store = open_store(model, 512, 16, 8);
    if (shown) *shown = store;
    Seen seen;
    const auto see = [&](pyl_branch b) {
        const auto row = logits(store, b);
        seen.rows.insert(seen.rows.end(), row.begin(), row.end());
    };
    const pyl_branch root = create(store, seed);
    CHECK_EQ(prefill(store, root, text(40, seed)), PYL_OK);
    see(root);
    std::array<pyl_branch, 3> kids{};
    const std::array<uint64_t, 3> seeds{seed, seed + 1, seed + 2};
    CHECK_EQ(pyl_branch_fork_n(store, root, kids.data(), 3, seeds.data(), 0), PYL_OK);
    const std::string grammar = endless();
    CHECK_EQ(set_gbnf(store, kids[2], grammar.data(), grammar.size(), nullptr), PYL_OK);
    for (int round = 0; round < 3; round++) {
        std::array<pyl_lane, 3> lanes{};
        for (size_t i = 0; i < 3; i++) lanes[i] = {sizeof(pyl_lane), 77, kids[i], 0, 77, 77, 77};
        pyl_tick tick{sizeof(pyl_tick), 4, nullptr, 0, 0, 0, 0, 0, nullptr, 0};
        Tokens drawn(12, -1);
        CHECK_EQ(pyl_tick_n(store, &tick, lanes.data(), 3, drawn.data()), PYL_OK);
        seen.tokens.insert(seen.tokens.end(), drawn.begin(), drawn.end());
        for (const pyl_branch kid : kids) see(kid);
    }
    pyl_branch grandchild = 0;
    CHECK_EQ(pyl_branch_fork_n(store, kids[1], &grandchild, 1, nullptr, 0), PYL_OK);
    const std::array<pyl_branch, 2> pair{kids[0], grandchild};
    const std::array<int32_t, 2> letters{65, 66};
    CHECK_EQ(pyl_commit_n(store, pair.data(), letters.data(), 2), PYL_OK);
    CHECK_EQ(pyl_branch_merge_logits(store, kids[0], &grandchild, 1, 0.5f), PYL_OK);
    see(kids[0]);
    CHECK_EQ(pyl_branch_fast_forward(store, kids[1], grandchild), PYL_OK);
    see(kids[1]);
    CHECK_EQ(pyl_branch_prune_n(store, kids.data(), 1), PYL_OK);
    CHECK_EQ(pyl_branch_prune_subtree(store, kids[2]), PYL_OK);
    CHECK_EQ(pyl_branch_retain_only(store, kids[1]), PYL_OK);
    CHECK_EQ(prefill(store, kids[1], text(20, seed + 1)), PYL_OK);
    see(kids[1]);
    CHECK_EQ(pressure(store).leases_used, 1);
    CHECK_EQ(pyl_store_free(store), PYL_OK);
    return seen;
}

// Stores of one model on threads of their own draw and see what they do one after another, whoever looks on.
void test_stores_of_one_model() {
    constexpr uint32_t n_threads = 4, n_rounds = 3;
    const Model model("n_vocab=300;spin_us=20");
    std::vector<Seen> alone, parallel(n_threads * n_rounds);
    for (uint32_t seed = 0; seed < n_threads * n_rounds; seed++) alone.push_back(conversation(model.handle, seed));
    std::array<std::atomic<pyl_store *>, n_threads> shown{};
    std::atomic<uint64_t> n_seen{0};
    {
        const Meanwhile polling([&, last = std::array<std::pair<pyl_store *, std::array<uint64_t, 2>>, n_threads>{}]() mutable {
            for (size_t t = 0; t < n_threads; t++) {
                pyl_store * store = shown[t];
                if (last[t].first != store) last[t] = {store, {0, 0}};
                auto & [epoch, dispatches] = last[t].second;
                const uint64_t now = pyl_store_epoch(store);
                CHECK(now == 0 || now >= epoch);  // it only grows, and a closed store has none
                epoch = now;
                auto p = sized<pyl_pressure>();
                const int32_t code = pyl_store_pressure(store, &p);
                if (code != PYL_OK) {
                    CHECK_EQ(code, PYL_E_CLOSED);
                    continue;
                }
                n_seen++;
                CHECK_EQ(p.cells_used + p.cells_remaining, p.n_ctx);
                CHECK_EQ(p.leases_used + p.leases_remaining, 8);
                CHECK(p.n_dispatches >= dispatches);
                dispatches = p.n_dispatches;
            }
            CHECK_EQ(live().weights, 1);
            CHECK(live().stores <= n_threads);
        });
        const Meanwhile draining([] {
            pyl_text * lines = nullptr;
            uint64_t dropped = 0;
            CHECK_EQ(pyl_log_drain(&lines, &dropped), PYL_OK);
            pyl_text_free(lines);
        });
        together(n_threads, [&](size_t t) {
            for (size_t round = 0; round < n_rounds; round++) parallel[t * n_rounds + round] = conversation(model.handle, static_cast<uint32_t>(t * n_rounds + round), &shown[t]);
            // A last one that stays open until it has been looked at, so that the polling above is sure to have seen something.
            const uint64_t before = n_seen;
            pyl_store * store = open_store(model.handle, 256, 8, 8);
            shown[t] = store;
            wait_until([&] { return n_seen > before + n_threads; });
            CHECK_EQ(pyl_store_free(store), PYL_OK);
        });
    }
    for (size_t i = 0; i < alone.size(); i++) {
        CHECK(alone[i].tokens == parallel[i].tokens);
        CHECK(same_bits(alone[i].rows, parallel[i].rows));
    }
    CHECK(!same_bits(alone[0].rows, alone[1].rows));  // else the comparison above says nothing
}

// What needs no store: vocabulary, texts and chat of one model, asked by all at once.
void test_model_calls() {
    const Model model("n_vocab=300");
    const auto ask = [&] {
        std::string all;
        pyl_text * out = nullptr;
        const std::string words = "The whale, and the sea.\n";
        size_t n = 0;
        Tokens tokens(64);
        CHECK_EQ(pyl_tokenize(model.handle, words.data(), words.size(), PYL_TOKENIZE_PARSE_SPECIAL, tokens.data(), tokens.size(), &n), PYL_OK);
        CHECK_EQ(pyl_detokenize(model.handle, tokens.data(), n, 0, &out), PYL_OK);
        all += taken(out);
        CHECK_EQ(pyl_model_metadata(model.handle, &out), PYL_OK);
        all += taken(out);
        CHECK_EQ(pyl_build_info(&out), PYL_OK);
        all += taken(out);
        const std::string request = R"({"messages":[{"role":"user","content":"Hello."}]})";
        const int32_t code = pyl_chat_render(model.handle, request.data(), request.size(), &out);
        CHECK_EQ(code, is_real() ? PYL_OK : PYL_E_TEMPLATE);
        return code == PYL_OK ? all + taken(out) : all;
    };
    const std::string alone = ask();
    CHECK(alone.size() > 20);
    together(4, [&](size_t) {
        for (int i = 0; i < 20; i++) CHECK(ask() == alone);
    });
    CHECK_EQ(live().texts, 0);
}

// -------------------------------------------------------------------------------------------------------------- registry

// Everybody opens the same file at once and gives the handle back before using the store: the last store frees the weights.
void test_registry() {
    const size_t n_rounds = is_real() ? 12 : 60;
    for (const bool is_held : {false, true}) {
        const std::string path = path_of("n_vocab=270");
        pyl_model * held = is_held ? open_model(path) : nullptr;
        together(4, [&](size_t t) {
            for (size_t round = 0; round < n_rounds; round++) {
                pyl_model * model = open_model(path);
                if (is_held) CHECK_EQ(live().weights, 1);  // shared, however many have it open
                pyl_store * store = open_store(model, 256, 8, 2);
                CHECK_EQ(pyl_model_free(model), PYL_OK);
                CHECK_EQ(pyl_model_free(model), PYL_E_CLOSED);
                const pyl_branch root = create(store);
                CHECK_EQ(prefill(store, root, text(8, static_cast<uint32_t>(t))), PYL_OK);
                CHECK_EQ(logits(store, root).empty(), false);
                CHECK_EQ(pyl_store_free(store), PYL_OK);
            }
        });
        if (is_held) CHECK_EQ(pyl_model_free(held), PYL_OK);
        CHECK_EQ(live().weights, 0);
    }
    // Another way of opening the same file is another model.
    together(4, [&](size_t t) {
        for (size_t round = 0; round < n_rounds; round++) {
            pyl_model * model = open_model(path_of("n_vocab=270"), t % 2);
            pyl_store_params p;
            pyl_store_params_init(&p, sizeof p);
            p.n_ctx = 256, p.n_threads = n_threads_of_a_store;
            pyl_store * store = nullptr;
            CHECK_EQ(pyl_store_open(&store, model, &p), t % 2 ? PYL_E_UNSUPPORTED : PYL_OK);
            if (store) CHECK_EQ(pyl_store_free(store), PYL_OK);
            CHECK_EQ(pyl_model_free(model), PYL_OK);
        }
    });
    CHECK_EQ(live().weights, 0);
    CHECK_EQ(live().contexts, 0);
}

// ---------------------------------------------------------------------------------------------------------------- errors

// Each thread fails in a way of its own, over and over, and always finds its own words and numbers.
void test_errors() {
    const Model model("n_vocab=300");
    together(4, [&](size_t t) {
        pyl_store * store = open_store(model.handle, 256, 8, static_cast<uint32_t>(t) + 1);
        const pyl_branch root = create(store);
        std::array<pyl_branch, 8> none{};
        for (int i = 0; i < 50; i++) {
            CHECK_EQ(pyl_branch_fork_n(store, root, none.data(), none.size(), nullptr, 0), PYL_E_NO_LEASE);
            const pyl_error * lease = pyl_error_last();
            CHECK_EQ(lease->code, PYL_E_NO_LEASE);
            CHECK_EQ(lease->need, 8);
            CHECK_EQ(lease->have, t);
            CHECK(std::string(lease->message).find("8 branches wanted, " + std::to_string(t) + " of " + std::to_string(t + 1)) == 0);
            Tokens tokens(t + 1, 65);
            tokens.back() = -1 - static_cast<int32_t>(t);
            uint32_t flags = 0;
            std::vector<uint32_t> room(t + 1);
            CHECK_EQ(pyl_token_flags(model.handle, tokens.data(), tokens.size(), room.data()), PYL_E_INVALID);
            CHECK_EQ(pyl_error_last()->index, t);
            CHECK(std::string(pyl_error_last()->message).find("token " + std::to_string(tokens.back())) == 0);
            CHECK_EQ(pyl_token_flags(model.handle, tokens.data(), t ? 1 : 0, &flags), PYL_OK);
            CHECK_EQ(pyl_error_last()->code, PYL_E_INVALID);  // a success leaves it in place
        }
        CHECK_EQ(pyl_store_free(store), PYL_OK);
    });
}

// ---------------------------------------------------------------------------------------------------------------- cancel

// Cancels until the call says that it was: earlier ones may have come before it began or after it was through.
template <typename Call>
void cancel_in_the_middle(pyl_store * store, Call && call_until_cancelled) {
    const uint64_t start = pressure(store).n_dispatches;
    std::atomic<bool> is_cancelled{false};
    std::thread caller([&] {
        call_until_cancelled();
        is_cancelled = true;
    });
    wait_until([&] { return pressure(store).n_dispatches >= start + 3; });
    std::vector<std::thread> cancellers;
    for (int t = 0; t < 2; t++) {
        cancellers.emplace_back([&] {
            while (!is_cancelled) {
                CHECK_EQ(pyl_store_cancel(store), PYL_OK);
                CHECK(pyl_store_epoch(store) > 0);
                std::this_thread::yield();
            }
        });
    }
    caller.join();
    for (auto & thread : cancellers) thread.join();
}

void test_cancel_prefill() {
    const Model model("n_vocab=300;spin_us=500");
    for (const uint32_t n_batch : {2u, 5u}) {
        pyl_store * store = open_store(model.handle, 1024, n_batch, 2);
        const Tokens prompt = text(10, 3), tokens = text(900);
        const pyl_branch root = create(store);
        CHECK_EQ(prefill(store, root, prompt), PYL_OK);
        pyl_branch kid = 0;
        pyl_run run{};
        uint32_t n_dispatches = 0;
        cancel_in_the_middle(store, [&] {
            for (int32_t code = PYL_OK; code == PYL_OK;) {
                if (kid) CHECK_EQ(pyl_branch_prune_n(store, &kid, 1), PYL_OK);
                CHECK_EQ(pyl_branch_fork_n(store, root, &kid, 1, nullptr, 0), PYL_OK);
                run = run_of(kid, tokens);
                code = pyl_prefill_n(store, &run, 1, 0, &n_dispatches);
                CHECK(code == PYL_OK || code == PYL_E_CANCELLED);
                CHECK(code == PYL_OK || pyl_error_last()->state == (run.n_landed ? PYL_STATE_ADVANCED : PYL_STATE_UNCHANGED));
            }
        });
        CHECK(run.n_landed < tokens.size());
        CHECK_EQ(run.n_landed, n_dispatches * n_batch);  // whole dispatches
        const pyl_branch_info info = describe(store, kid);
        CHECK_EQ(info.position, prompt.size() + run.n_landed);
        CHECK_EQ(info.cells_own, run.n_landed);
        CHECK_EQ(info.is_poisoned, 0);
        CHECK_EQ(pressure(store).cells_used, prompt.size() + run.n_landed);
        // The next call is nobody's to cancel, and what the branch sees is what landed.
        const Tokens rest(tokens.begin() + run.n_landed, tokens.begin() + run.n_landed + std::min<uint32_t>(7, 900 - run.n_landed));
        CHECK_EQ(prefill(store, kid, rest), PYL_OK);
        Tokens all = prompt;
        all.insert(all.end(), tokens.begin(), tokens.begin() + run.n_landed);
        all.insert(all.end(), rest.begin(), rest.end());
        const Model quick("n_vocab=300");
        pyl_store * fresh = open_store(quick.handle, 1024, n_batch, 1);
        const pyl_branch replay = create(fresh);
        CHECK_EQ(prefill(fresh, replay, all), PYL_OK);
        CHECK(same_bits(logits(fresh, replay), logits(store, kid)));
        CHECK_EQ(pyl_store_free(fresh), PYL_OK);
        CHECK_EQ(pyl_store_free(store), PYL_OK);
    }
}

void test_cancel_tick() {
    constexpr uint32_t n_steps = 400;
    const Model model("n_vocab=300;spin_us=500");
    pyl_store * store = open_store(model.handle, 1024, 8, 3);
    const pyl_branch root = create(store);
    CHECK_EQ(prefill(store, root, text(5)), PYL_OK);
    const std::string grammar = endless();
    CHECK_EQ(set_gbnf(store, root, grammar.data(), grammar.size(), nullptr), PYL_OK);
    std::array<pyl_branch, 2> kids{};
    std::array<pyl_lane, 2> lanes{};
    pyl_tick tick{};
    Tokens drawn;
    cancel_in_the_middle(store, [&] {
        for (int32_t code = PYL_OK; code == PYL_OK;) {
            if (kids[0]) CHECK_EQ(pyl_branch_prune_n(store, kids.data(), 2), PYL_OK);
            CHECK_EQ(pyl_branch_fork_n(store, root, kids.data(), 2, nullptr, 0), PYL_OK);
            for (size_t i = 0; i < 2; i++) lanes[i] = {sizeof(pyl_lane), 77, kids[i], 0, 77, 77, 77};
            tick = {sizeof(pyl_tick), n_steps, nullptr, 0, 77, 77, 77, 0, nullptr, 0};
            drawn.assign(2 * n_steps, -77);
            code = pyl_tick_n(store, &tick, lanes.data(), 2, drawn.data());
            CHECK(code == PYL_OK || code == PYL_E_CANCELLED);
        }
    });
    CHECK(tick.n_ticks >= 1 && tick.n_ticks < n_steps);
    CHECK_EQ(tick.n_ticks, tick.n_dispatches);
    for (size_t i = 0; i < 2; i++) {
        CHECK_EQ(lanes[i].n_tokens, tick.n_ticks);
        CHECK_EQ(lanes[i].finish, PYL_FINISH_NONE);
        CHECK_EQ(lanes[i].state, PYL_STATE_ADVANCED);
        CHECK_EQ(describe(store, kids[i]).position, 5 + lanes[i].n_tokens);
        for (uint32_t k = lanes[i].n_tokens; k < n_steps; k++) CHECK_EQ(drawn[i * n_steps + k], -77);
    }
    // Forks without seeds of their own are alike, and go on alike.
    CHECK(std::equal(drawn.begin(), drawn.begin() + tick.n_ticks, drawn.begin() + n_steps));
    tick.n_steps = 2;
    CHECK_EQ(pyl_tick_n(store, &tick, lanes.data(), 2, drawn.data()), PYL_OK);
    CHECK(same_bits(logits(store, kids[0]), logits(store, kids[1])));
    CHECK_EQ(pyl_store_free(store), PYL_OK);
}

// -------------------------------------------------------------------------------------------------------------- teardown

// Threads that use a store, poll it and cancel in it, while another takes it away: each is told OK, BUSY, CANCELLED or CLOSED.
void test_teardown() {
    for (int round = 0; round < 12; round++) {
        pyl_model * model = open_model(path_of("n_vocab=270;spin_us=20"));
        pyl_store * store = open_store(model, 512, 4, 4);
        if (round % 2) CHECK_EQ(pyl_model_free(model), PYL_OK);
        std::atomic<size_t> n_inside{0};
        const auto is_known = [](int32_t code) { return code == PYL_OK || code == PYL_E_BUSY || code == PYL_E_CLOSED || code == PYL_E_CANCELLED; };
        std::vector<std::thread> threads;
        for (uint32_t t = 0; t < 3; t++) {
            threads.emplace_back([&, t] {
                const Tokens prompt = text(12, t);
                for (bool is_first = true;; is_first = false) {
                    pyl_branch branch = 0;
                    int32_t code = pyl_branch_create(store, &branch, 0, nullptr, nullptr);
                    CHECK(is_known(code));
                    if (code == PYL_OK) {
                        code = prefill(store, branch, prompt);
                        CHECK(is_known(code));
                        if (code == PYL_OK) {
                            pyl_lane lane{sizeof(pyl_lane), 77, branch, 0, 77, 77, 77};
                            pyl_tick tick{sizeof(pyl_tick), 4, nullptr, 0, 77, 77, 77, 0, nullptr, 0};
                            Tokens drawn(4, -77);
                            code = pyl_tick_n(store, &tick, &lane, 1, drawn.data());
                            CHECK(is_known(code));
                        }
                        wait_until([&] { return (code = pyl_branch_prune_subtree(store, branch)) != PYL_E_BUSY; });
                    }
                    if (is_first) n_inside++;
                    if (code == PYL_E_CLOSED) return;
                }
            });
        }
        threads.emplace_back([&] {
            for (bool was_draining = false;;) {
                auto p = sized<pyl_pressure>();
                const int32_t code = pyl_store_pressure(store, &p);
                CHECK(code == PYL_OK || code == PYL_E_CLOSED);
                if (code == PYL_E_CLOSED) return;
                CHECK(p.is_draining || !was_draining);
                was_draining = p.is_draining;
                CHECK_EQ(p.cells_used + p.cells_remaining, p.n_ctx);
            }
        });
        threads.emplace_back([&] {
            for (int32_t code = PYL_OK; code == PYL_OK; std::this_thread::yield()) CHECK(is_known(code = pyl_store_cancel(store)));
        });
        wait_until([&] { return n_inside == 3; });
        if (round % 4 < 2) CHECK_EQ(pyl_store_drain(store), PYL_OK);
        CHECK_EQ(pyl_store_free(store), PYL_OK);
        CHECK_EQ(live().contexts, 0);
        CHECK_EQ(live().branches, 0);
        for (auto & thread : threads) thread.join();
        CHECK_EQ(pyl_store_epoch(store), 0);
        if (round % 2 == 0) CHECK_EQ(pyl_model_free(model), PYL_OK);
        CHECK_EQ(live().weights, 0);
    }
}

// ------------------------------------------------------------------------------------------------------------------ busy

// While one thread is inside, every other call on that store is refused, writes nothing and changes nothing.
void test_busy() {
    constexpr uint32_t n_tokens = 3000, n_vocab = 300;
    const Model model("n_vocab=300;spin_us=10000");  // half a minute, if nobody cancelled
    pyl_store * store = open_store(model.handle, n_tokens + 64, 4, 4);
    pyl_branch root = create(store, 5), kid = 0, busy = 0;
    CHECK_EQ(prefill(store, root, text(3)), PYL_OK);
    CHECK_EQ(pyl_branch_fork_n(store, root, &kid, 1, nullptr, 0), PYL_OK);
    busy = create(store);
    const auto row = logits(store, kid);
    const pyl_branch_info root_before = describe(store, root), kid_before = describe(store, kid);

    const Tokens tokens = text(n_tokens);
    pyl_run run = run_of(busy, tokens);
    uint32_t n_dispatches = 0;
    int32_t ended = 77;
    const uint64_t start = pressure(store).n_dispatches;
    std::thread inside([&] { ended = pyl_prefill_n(store, &run, 1, 0, &n_dispatches); });
    wait_until([&] { return pressure(store).n_dispatches > start; });

    // What the calls would write to; 0x5A stays where they are refused.
    struct Outputs {
        pyl_sampling sampling;
        pyl_branch branches[4];
        pyl_branch_info info;
        size_t n;
        uint32_t dispatches;
        int32_t tokens[8];
        pyl_logits_view view;
        pyl_distribution distribution;
        uint8_t legal[4];
    } out, untouched;
    std::memset(&out, 0x5A, sizeof out);
    out.sampling.struct_size = sizeof out.sampling, out.info.struct_size = sizeof out.info, out.view.struct_size = sizeof out.view, out.distribution.struct_size = sizeof out.distribution;
    std::memcpy(&untouched, &out, sizeof out);
    const pyl_sampling sampling = seeded(9);
    const std::string grammar = "root ::= \"x\"";
    const std::vector<float> other(n_vocab, 1.0f);
    const Tokens few{1, 2};
    const float bias[] = {1, 2};
    pyl_run small = run_of(kid, few);
    pyl_lane lane{sizeof(pyl_lane), 77, kid, 0, 77, 77, 77};
    pyl_tick tick{sizeof(pyl_tick), 2, nullptr, 0, 77, 77, 77, 0, nullptr, 0};
    const std::vector<std::pair<const char *, std::function<int32_t()>>> calls{
        {"set_sampling", [&] { return pyl_branch_set_sampling(store, kid, &sampling); }},
        {"get_sampling", [&] { return pyl_branch_get_sampling(store, kid, &out.sampling); }},
        {"set_grammar", [&] { return set_gbnf(store, kid, grammar.data(), grammar.size(), nullptr); }},
        {"set_chat_grammar", [&] { return set_chat(store, kid, grammar.data(), grammar.size()); }},
        {"set_bias", [&] { return pyl_branch_set_bias(store, kid, PYL_BIAS, few.data(), bias, 2); }},
        {"create", [&] { return pyl_branch_create(store, out.branches, 0, nullptr, nullptr); }},
        {"fork", [&] { return pyl_branch_fork_n(store, root, out.branches, 1, nullptr, 0); }},
        {"prune", [&] { return pyl_branch_prune_n(store, &kid, 1); }},
        {"prune_subtree", [&] { return pyl_branch_prune_subtree(store, root); }},
        {"retain_only", [&] { return pyl_branch_retain_only(store, kid); }},
        {"fast_forward", [&] { return pyl_branch_fast_forward(store, root, kid); }},
        {"describe", [&] { return pyl_branch_describe(store, kid, &out.info); }},
        {"list", [&] { return pyl_branch_list(store, 0, out.branches, 4, &out.n); }},
        {"prefill", [&] { return pyl_prefill_n(store, &small, 1, 0, &out.dispatches); }},
        {"sample", [&] { return pyl_sample_n(store, &kid, 1, out.tokens); }},
        {"commit", [&] { return pyl_commit_n(store, &kid, few.data(), 1); }},
        {"tick", [&] { return pyl_tick_n(store, &tick, &lane, 1, out.tokens); }},
        {"logits", [&] { return pyl_branch_logits(store, kid, &out.view); }},
        {"set_logits", [&] { return pyl_branch_set_logits(store, kid, other.data(), other.size()); }},
        {"merge_logits", [&] { return pyl_branch_merge_logits(store, kid, &root, 1, 1.0f); }},
        {"legal", [&] { return pyl_branch_legal_n(store, kid, few.data(), 2, out.legal); }},
        {"distribution", [&] { return pyl_branch_distribution(store, kid, &out.distribution); }},
    };
    for (const auto & [name, call] : calls) {
        const int32_t code = call();
        if (!CHECK_EQ(code, PYL_E_BUSY)) std::fprintf(stderr, "    %s\n", name);
        CHECK_EQ(pyl_error_last()->code, PYL_E_BUSY);
        CHECK_EQ(pyl_error_last()->state, PYL_STATE_UNCHANGED);
    }
    CHECK(std::memcmp(&out, &untouched, sizeof out) == 0);
    CHECK(small.n_landed == 77 && small.state == 77 && tick.n_ticks == 77 && tick.n_dispatches == 77 && lane.n_tokens == 77 && lane.finish == 77);
    CHECK_EQ(pyl_store_cancel(store), PYL_OK);
    inside.join();
    CHECK_EQ(ended, PYL_E_CANCELLED);
    CHECK(n_dispatches >= 1 && run.n_landed == 4 * n_dispatches);

    const pyl_pressure p = pressure(store);
    CHECK_EQ(p.leases_used, 3);
    CHECK_EQ(p.cells_used, 3 + run.n_landed);
    CHECK_EQ(p.n_dispatches - start, n_dispatches);
    CHECK_EQ(p.n_tokens_sampled, 0);
    for (const auto & [branch, before] : {std::pair{root, root_before}, {kid, kid_before}}) {
        const pyl_branch_info now = describe(store, branch);
        CHECK(now.position == before.position && now.cells_own == before.cells_own && now.cells_inherited == before.cells_inherited && now.parent == before.parent);
        CHECK(now.n_children == before.n_children && now.has_logits == 1 && !now.is_poisoned && now.last_token == -1 && !now.has_grammar && now.n_sampled == 0);
        auto kept = sized<pyl_sampling>();
        CHECK_EQ(pyl_branch_get_sampling(store, branch, &kept), PYL_OK);
        CHECK_EQ(kept.seed, 5);
    }
    CHECK(same_bits(logits(store, kid), row));
    CHECK_EQ(pyl_branch_legal_n(store, kid, few.data(), 2, out.legal), PYL_OK);
    CHECK_EQ(out.legal[0] + out.legal[1], 2);
    CHECK_EQ(pyl_store_free(store), PYL_OK);
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc > 1) real_path = argv[1];
    if (argc > 2) n_threads_of_a_store = static_cast<uint32_t>(std::stoul(argv[2]));
    test_stores_of_one_model();
    test_model_calls();
    test_registry();
    test_errors();
    test_cancel_prefill();
    test_cancel_tick();
    test_teardown();
    if (!is_real()) test_busy();  // needs a call that lasts; what refuses the others is the same code
    const pyl_live n = live();
    CHECK_EQ(n.models + n.weights + n.stores + n.contexts + n.branches + n.grammars + n.texts, 0);
    return check::result("test_parallel");
}
