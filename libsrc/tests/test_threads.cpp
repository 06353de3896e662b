// Threads and the ABI: separate stores side by side, two callers on one store, cancel, free and drain while a call is running.
// Nothing here waits for a time to pass: progress is polled, and every claim holds however the threads are scheduled.
#include <array>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "pylloyal.h"

namespace {

using Tokens = std::vector<int32_t>;

struct Model {
    pyl_model * handle = nullptr;
    explicit Model(const std::string & options) {
        const std::string path = "stub:" + options;
        CHECK_EQ(pyl_model_open(&handle, path.data(), path.size(), nullptr), PYL_OK);
    }
    ~Model() { CHECK_EQ(pyl_model_free(handle), PYL_OK); }
    Model(const Model &) = delete;
    Model & operator=(const Model &) = delete;
};

pyl_store * open_store(const Model & model, uint32_t n_ctx, uint32_t n_batch, uint32_t n_branches) {
    pyl_store_params p;
    pyl_store_params_init(&p, sizeof p);
    p.n_ctx = n_ctx, p.n_batch = n_batch, p.n_branches = n_branches, p.n_threads = 1;
    pyl_store * out = nullptr;
    CHECK_EQ(pyl_store_open(&out, model.handle, &p), PYL_OK);
    return out;
}

int32_t set_gbnf(pyl_store * store, pyl_branch branch, const char * text, size_t n, const char * root) {
    const pyl_grammar grammar = {sizeof grammar, PYL_GRAMMAR_GBNF, text, n, root, nullptr, 0};
    return pyl_branch_set_grammar(store, branch, &grammar);
}

pyl_branch create(pyl_store * store, uint64_t seed = 1) {
    pyl_sampling s;
    pyl_sampling_init(&s, sizeof s);
    s.seed_mode = PYL_SEED_SET, s.seed = seed;
    pyl_branch out = 0;
    CHECK_EQ(pyl_branch_create(store, &out, 0, &s, nullptr), PYL_OK);
    return out;
}

pyl_run run_of(pyl_branch branch, const Tokens & tokens) { return {sizeof(pyl_run), static_cast<uint32_t>(tokens.size()), branch, tokens.data(), 77, 77}; }

pyl_pressure pressure(const pyl_store * store) {
    pyl_pressure p{};
    p.struct_size = sizeof p;
    CHECK_EQ(pyl_store_pressure(store, &p), PYL_OK);
    return p;
}

pyl_branch_info describe(pyl_store * store, pyl_branch branch) {
    pyl_branch_info info{};
    info.struct_size = sizeof info;
    CHECK_EQ(pyl_branch_describe(store, branch, &info), PYL_OK);
    return info;
}

pyl_live live() {
    pyl_live out{};
    out.struct_size = sizeof out;
    CHECK_EQ(pyl_live_objects(&out), PYL_OK);
    return out;
}

std::vector<float> logits(pyl_store * store, pyl_branch branch) {
    pyl_logits_view view{};
    view.struct_size = sizeof view;
    if (!CHECK_EQ(pyl_branch_logits(store, branch, &view), PYL_OK)) return {};
    return {view.data, view.data + view.n_vocab};
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

// ------------------------------------------------------------------------------------------------------------------------

// A conversation on a store of its own; everything it saw, for comparison.
std::vector<float> conversation(uint32_t seed) {
    const Model model("n_vocab=" + std::to_string(260 + seed % 3));  // opened by each: some share weights, some do not
    pyl_store * store = open_store(model, 256, 16, 8);
    std::vector<float> seen;
    const auto see = [&](pyl_branch b) {
        const auto row = logits(store, b);
        seen.insert(seen.end(), row.begin(), row.end());
    };
    const pyl_branch root = create(store, seed);
    const Tokens prompt = text(40, seed);
    pyl_run run = run_of(root, prompt);
    CHECK_EQ(pyl_prefill_n(store, &run, 1, 0, nullptr), PYL_OK);
    see(root);
    std::array<pyl_branch, 3> kids{};
    const std::array<uint64_t, 3> seeds{seed, seed + 1, seed + 2};
    CHECK_EQ(pyl_branch_fork_n(store, root, kids.data(), 3, seeds.data(), 0), PYL_OK);
    for (int round = 0; round < 4; round++) {
        std::array<pyl_lane, 3> lanes{};
        for (size_t i = 0; i < 3; i++) lanes[i].struct_size = sizeof lanes[i], lanes[i].branch = kids[i];
        pyl_tick tick{sizeof(pyl_tick), 5, nullptr, 0, 0, 0, 0, 0, nullptr, 0};
        Tokens drawn(15, -1);
        CHECK_EQ(pyl_tick_n(store, &tick, lanes.data(), 3, drawn.data()), PYL_OK);
        for (const int32_t token : drawn) seen.push_back(static_cast<float>(token));
        for (const pyl_branch kid : kids) see(kid);
    }
    CHECK_EQ(pyl_branch_retain_only(store, kids[1]), PYL_OK);
    const int32_t token = 65;
    CHECK_EQ(pyl_commit_n(store, &kids[1], &token, 1), PYL_OK);
    see(kids[1]);
    CHECK_EQ(pyl_store_free(store), PYL_OK);
    return seen;
}

void test_separate_stores() {
    constexpr uint32_t n_threads = 4, n_rounds = 6;
    std::vector<std::vector<float>> alone, together(n_threads * n_rounds);
    for (uint32_t seed = 0; seed < n_threads * n_rounds; seed++) alone.push_back(conversation(seed));
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < n_threads; t++) {
        threads.emplace_back([&, t] {
            for (uint32_t round = 0; round < n_rounds; round++) together[t * n_rounds + round] = conversation(t * n_rounds + round);
        });
    }
    for (auto & thread : threads) thread.join();
    for (size_t i = 0; i < alone.size(); i++) CHECK(alone[i] == together[i]);
}

// Many threads open and free the same few models: each gets a working one, and in the end no weights are left.
void test_opening_together() {
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < 4; t++) {
        threads.emplace_back([t] {
            for (uint32_t i = 0; i < 150; i++) {
                const Model model("n_vocab=" + std::to_string(270 + (i + t) % 3));
                pyl_model_info info{};
                info.struct_size = sizeof info;
                CHECK_EQ(pyl_model_describe(model.handle, &info), PYL_OK);
                CHECK_EQ(info.n_vocab, 270 + (i + t) % 3);
            }
        });
    }
    for (auto & thread : threads) thread.join();
    CHECK_EQ(live().weights, 0);
}

// The last error is the thread's own.
void test_errors_are_per_thread() {
    CHECK_EQ(pyl_store_free(nullptr), PYL_E_CLOSED);
    std::thread([] {
        CHECK_EQ(pyl_error_last()->code, PYL_OK);  // nothing has failed on this thread yet
        CHECK_EQ(pyl_log_level(99), PYL_E_INVALID);
        CHECK_EQ(pyl_error_last()->code, PYL_E_INVALID);
    }).join();
    CHECK_EQ(pyl_error_last()->code, PYL_E_CLOSED);
}

// Two callers on one store: each call either does its work or is told BUSY and does nothing.
void test_two_callers() {
    constexpr int n_calls = 400;
    const Model model("n_vocab=260;spin_us=20");
    pyl_store * store = open_store(model, 2048, 64, 16);
    const Tokens prompt = text(6);
    struct Caller {
        pyl_branch branch = 0;
        Tokens landed;
        uint32_t busy = 0;
    };
    std::array<Caller, 2> callers;
    for (Caller & c : callers) c.branch = create(store);
    for (Caller & c : callers) {
        pyl_run run = run_of(c.branch, prompt);
        CHECK_EQ(pyl_prefill_n(store, &run, 1, 0, nullptr), PYL_OK);
    }
    const auto work = [&](Caller & me) {
        const auto ok = [&](int32_t code) {
            CHECK(code == PYL_OK || code == PYL_E_BUSY);
            if (code == PYL_E_BUSY) {
                me.busy++;
                CHECK_EQ(pyl_error_last()->code, PYL_E_BUSY);
                CHECK_EQ(pyl_error_last()->state, PYL_STATE_UNCHANGED);
            }
            return code == PYL_OK;
        };
        const auto again = [&](auto && call) {
            wait_until([&] { return ok(call()); });
        };
        for (int i = 0; i < n_calls; i++) {
            const int32_t token = i % 250;
            again([&] { return pyl_commit_n(store, &me.branch, &token, 1); });
            me.landed.push_back(token);
            pyl_branch kid = 0;
            while (!ok(pyl_branch_fork_n(store, me.branch, &kid, 1, nullptr, 0))) CHECK_EQ(kid, 0);
            again([&] { return pyl_branch_prune_n(store, &kid, 1); });
            int32_t drawn = -77;
            while (!ok(pyl_sample_n(store, &me.branch, 1, &drawn))) CHECK_EQ(drawn, -77);
            CHECK(drawn >= 0 && drawn < 260);
            const pyl_pressure p = pressure(store);  // never busy, and consistent
            CHECK_EQ(p.cells_used + p.cells_remaining, p.n_ctx);
            CHECK_EQ(p.leases_used + p.leases_remaining, 16);
            CHECK(pyl_store_epoch(store) > 0);
        }
    };
    std::thread other([&] { work(callers[1]); });
    work(callers[0]);
    other.join();
    size_t cells = 0;
    for (Caller & c : callers) {
        const pyl_branch_info info = describe(store, c.branch);
        cells += prompt.size() + c.landed.size();
        CHECK_EQ(info.cells_own, prompt.size() + c.landed.size());
        CHECK_EQ(info.position, info.cells_own);
        CHECK_EQ(info.n_children, 0);
        CHECK(!info.is_poisoned);
        CHECK_EQ(info.n_sampled, n_calls);
        // And what it sees is exactly what landed.
        pyl_store * fresh = open_store(model, 2048, 1024, 2);
        Tokens all = prompt;
        all.insert(all.end(), c.landed.begin(), c.landed.end());
        const pyl_branch replay = create(fresh);
        pyl_run run = run_of(replay, all);
        CHECK_EQ(pyl_prefill_n(fresh, &run, 1, 0, nullptr), PYL_OK);
        CHECK(logits(fresh, replay) == logits(store, c.branch));
        CHECK_EQ(pyl_store_free(fresh), PYL_OK);
    }
    CHECK_EQ(pressure(store).cells_used, cells);
    CHECK_EQ(pressure(store).leases_used, 2);
    std::printf("two callers: %u and %u times busy in %d calls each\n", callers[0].busy, callers[1].busy, 4 * n_calls);
    CHECK_EQ(pyl_store_free(store), PYL_OK);
}

// A prefill that takes seconds when nobody stops it; `ending` stops it from this thread once a few dispatches have landed.
struct LongCall {
    static constexpr uint32_t n_tokens = 1500;
    Model model{"n_vocab=260;spin_us=2000"};
    pyl_store * store = nullptr;
    pyl_branch branch = 0;
    Tokens tokens = text(n_tokens);
    pyl_run run{};
    uint32_t n_dispatches = 77;
    int32_t code = 77;
    pyl_error error{};
    std::thread thread;

    explicit LongCall(uint32_t n_batch) : store(open_store(model, n_tokens + 8, n_batch, 1)), branch(create(store)), run(run_of(branch, tokens)) {
        thread = std::thread([this] {
            code = pyl_prefill_n(store, &run, 1, 0, &n_dispatches);
            error = *pyl_error_last();
        });
        wait_until([&] { return pressure(store).n_dispatches >= 3; });
    }
    ~LongCall() { CHECK(!thread.joinable()); }
    LongCall(const LongCall &) = delete;
    LongCall & operator=(const LongCall &) = delete;

    void check_stopped(uint32_t n_batch) {
        thread.join();
        CHECK_EQ(code, PYL_E_CANCELLED);
        CHECK_EQ(error.state, PYL_STATE_ADVANCED);
        CHECK_EQ(error.partial, 1);
        CHECK(n_dispatches >= 3 && run.n_landed < n_tokens);
        CHECK_EQ(run.n_landed, n_dispatches * n_batch);  // whole dispatches
        CHECK_EQ(run.state, PYL_STATE_ADVANCED);
    }
};

void test_cancel_prefill() {
    for (const uint32_t n_batch : {1u, 4u}) {
        LongCall call(n_batch);
        CHECK_EQ(pyl_store_cancel(call.store), PYL_OK);
        call.check_stopped(n_batch);
        const pyl_pressure p = pressure(call.store);
        CHECK_EQ(p.cells_used, call.run.n_landed);
        CHECK_EQ(p.n_tokens_decoded, call.run.n_landed);
        CHECK_EQ(p.n_dispatches, call.n_dispatches);
        const pyl_branch_info info = describe(call.store, call.branch);
        CHECK_EQ(info.position, call.run.n_landed);
        CHECK_EQ(info.has_logits, 0);
        CHECK_EQ(info.is_poisoned, 0);
        // The rest can go on later, and nothing was lost. A cancel between the calls is for nobody.
        CHECK_EQ(pyl_store_cancel(call.store), PYL_OK);
        const uint32_t landed = call.run.n_landed;
        Tokens rest(call.tokens.begin() + landed, call.tokens.begin() + landed + 9);
        pyl_run more = run_of(call.branch, rest);
        CHECK_EQ(pyl_prefill_n(call.store, &more, 1, 0, nullptr), PYL_OK);
        const Model quick("n_vocab=260");
        pyl_store * fresh = open_store(quick, 2048, 2048, 1);
        const pyl_branch replay = create(fresh);
        const Tokens all(call.tokens.begin(), call.tokens.begin() + landed + 9);
        pyl_run whole = run_of(replay, all);
        CHECK_EQ(pyl_prefill_n(fresh, &whole, 1, 0, nullptr), PYL_OK);
        CHECK(logits(fresh, replay) == logits(call.store, call.branch));
        CHECK_EQ(pyl_store_free(fresh), PYL_OK);
        CHECK_EQ(pyl_store_free(call.store), PYL_OK);
    }
}

void test_cancel_tick() {
    constexpr uint32_t n_steps = 1500;
    const Model model("n_vocab=260;spin_us=2000");
    pyl_store * store = open_store(model, n_steps + 8, 8, 1);
    const pyl_branch branch = create(store);
    const Tokens prompt = text(2);
    pyl_run run = run_of(branch, prompt);
    CHECK_EQ(pyl_prefill_n(store, &run, 1, 0, nullptr), PYL_OK);
    const std::string grammar = "root ::= \"" + std::string(n_steps + 8, 'a') + "\"";  // so that chance does not end it early
    CHECK_EQ(set_gbnf(store, branch, grammar.data(), grammar.size(), nullptr), PYL_OK);
    pyl_lane lane{sizeof(pyl_lane), 77, branch, 0, 77, 77, 77};
    pyl_tick tick{sizeof(pyl_tick), n_steps, nullptr, 0, 77, 77, 77, 0, nullptr, 0};
    Tokens drawn(n_steps, -77);
    int32_t code = 77;
    std::thread thread([&] { code = pyl_tick_n(store, &tick, &lane, 1, drawn.data()); });
    wait_until([&] { return pressure(store).n_dispatches >= 4; });
    CHECK_EQ(pyl_store_cancel(store), PYL_OK);
    thread.join();
    CHECK_EQ(code, PYL_E_CANCELLED);
    CHECK(lane.n_tokens >= 3 && lane.n_tokens < n_steps);
    CHECK_EQ(lane.n_tokens, tick.n_ticks);
    CHECK_EQ(lane.n_tokens, tick.n_dispatches);
    CHECK_EQ(lane.finish, PYL_FINISH_NONE);
    CHECK_EQ(lane.state, PYL_STATE_ADVANCED);
    for (uint32_t i = 0; i < n_steps; i++) CHECK_EQ(drawn[i], i < lane.n_tokens ? 'a' : -77);
    const pyl_branch_info info = describe(store, branch);
    CHECK_EQ(info.position, 2 + lane.n_tokens);
    CHECK_EQ(info.n_sampled, lane.n_tokens);
    CHECK_EQ(info.has_logits, 1);
    tick.n_steps = 3;
    CHECK_EQ(pyl_tick_n(store, &tick, &lane, 1, drawn.data()), PYL_OK);
    CHECK_EQ(lane.n_tokens, 3);
    CHECK_EQ(pyl_store_free(store), PYL_OK);
}

// A free or a drain from another thread stops the call in flight, and when it returns that call is out of the store: it will
// not write to its caller's memory any more, and the cache is gone.
void test_free_while_a_call_runs(bool drain) {
    LongCall call(1);
    CHECK_EQ(drain ? pyl_store_drain(call.store) : pyl_store_free(call.store), PYL_OK);
    const uint32_t landed = call.run.n_landed, dispatches = call.n_dispatches;
    const pyl_live n = live();
    CHECK_EQ(n.contexts, 0);
    CHECK_EQ(n.branches, 0);
    call.check_stopped(1);
    CHECK_EQ(call.run.n_landed, landed);
    CHECK_EQ(call.n_dispatches, dispatches);
    if (drain) {
        CHECK_EQ(live().stores, 1);
        CHECK_EQ(pyl_prefill_n(call.store, &call.run, 1, 0, nullptr), PYL_E_CLOSED);
        CHECK_EQ(pyl_store_drain(call.store), PYL_OK);  // again is fine
        CHECK_EQ(pyl_store_free(call.store), PYL_OK);
    }
    CHECK_EQ(live().stores, 0);
    CHECK_EQ(pyl_store_drain(call.store), PYL_E_CLOSED);
    CHECK_EQ(pyl_store_free(call.store), PYL_E_CLOSED);
}

// Whoever polls while a drain waits sees it, until there is nothing to see any more.
void test_polling_during_drain() {
    LongCall call(1);
    std::thread drainer([&] { CHECK_EQ(pyl_store_drain(call.store), PYL_OK); });
    bool seen = false;
    pyl_pressure p{};
    p.struct_size = sizeof p;
    wait_until([&] {
        const int32_t code = pyl_store_pressure(call.store, &p);
        if (code != PYL_OK) return CHECK_EQ(code, PYL_E_CLOSED) || true;
        CHECK(p.is_draining == 1 || !seen);  // once it has begun there is no way back
        seen = seen || p.is_draining;
        return false;
    });
    drainer.join();
    call.check_stopped(1);
    CHECK_EQ(pyl_store_free(call.store), PYL_OK);
}

// Several threads tear down at once: one frees, the others are told it is gone or wait for the same end.
void test_tearing_down_together() {
    for (int round = 0; round < 8; round++) {
        LongCall call(1);
        std::array<int32_t, 4> codes{};
        std::vector<std::thread> threads;
        for (size_t t = 0; t < codes.size(); t++) threads.emplace_back([&, t] { codes[t] = t < 2 ? pyl_store_drain(call.store) : pyl_store_free(call.store); });
        for (auto & thread : threads) thread.join();
        call.check_stopped(1);
        for (size_t t = 0; t < 2; t++) CHECK(codes[t] == PYL_OK || codes[t] == PYL_E_CLOSED);
        CHECK((codes[2] == PYL_OK) + (codes[3] == PYL_OK) == 1);  // exactly one has freed it
        CHECK_EQ(codes[2] + codes[3], PYL_OK + PYL_E_CLOSED);
    }
}

// Callers keep calling while the store goes away: OK, BUSY, CANCELLED or CLOSED, and nothing else, ever.
void test_calls_during_free() {
    const Model model("n_vocab=260;spin_us=5");
    for (int round = 0; round < 20; round++) {
        pyl_store * store = open_store(model, 512, 8, 8);
        std::atomic<int> started{0};
        std::vector<std::thread> threads;
        for (int t = 0; t < 3; t++) {
            threads.emplace_back([&, t] {
                const Tokens prompt = text(16, static_cast<uint32_t>(t));
                for (int i = 0;; i++) {
                    pyl_branch b = 0;
                    int32_t code = pyl_branch_create(store, &b, 0, nullptr, nullptr);
                    if (code == PYL_OK) {
                        pyl_run run = run_of(b, prompt);
                        code = pyl_prefill_n(store, &run, 1, 0, nullptr);
                        CHECK(code == PYL_OK || code == PYL_E_BUSY || code == PYL_E_CLOSED || code == PYL_E_CANCELLED);
                        wait_until([&] { return (code = pyl_branch_prune_n(store, &b, 1)) != PYL_E_BUSY; });
                    }
                    CHECK(code == PYL_OK || code == PYL_E_BUSY || code == PYL_E_CLOSED);
                    if (i == 0) started++;
                    if (code == PYL_E_CLOSED) break;
                }
            });
        }
        wait_until([&] { return started == 3; });
        CHECK_EQ(pyl_store_free(store), PYL_OK);
        for (auto & thread : threads) thread.join();
        CHECK_EQ(live().branches, 0);
        CHECK_EQ(live().contexts, 0);
    }
}

}  // namespace

int main() {
    test_errors_are_per_thread();
    test_separate_stores();
    test_opening_together();
    test_two_callers();
    test_cancel_prefill();
    test_cancel_tick();
    test_free_while_a_call_runs(false);
    test_free_while_a_call_runs(true);
    test_polling_during_drain();
    test_tearing_down_together();
    test_calls_during_free();
    const pyl_live n = live();
    CHECK_EQ(n.models + n.weights + n.stores + n.contexts + n.branches + n.grammars + n.texts, 0);
    return check::result("test_threads");
}
