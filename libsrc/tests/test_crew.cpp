// Several threads in one store: the crew itself, and draws that are shared out among it. Nothing here waits for a time to pass; what
// has to happen at the same time meets at a barrier, which hangs (and times out) if it does not.
#include <atomic>
#include <barrier>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "core/crew.hpp"
#include "stub_store.hpp"

using namespace stub;

namespace {

void test_every_part_once() {
    for (const uint32_t n_threads : {0u, 1u, 2u, 5u}) {
        Crew crew(n_threads);
        CHECK_EQ(crew.size(), std::max(1u, n_threads));
        std::vector<std::atomic<int>> at_work(crew.size());
        for (int round = 0; round < 120; round++) {
            const size_t n = static_cast<size_t>(round) % 23;
            std::vector<std::atomic<int>> done(n);
            std::atomic<int> n_shared{0};
            crew.run(n, [&](size_t i, size_t worker) {
                n_shared += at_work[worker]++ != 0;  // two threads with the same memory to work in
                done[i]++;
                at_work[worker]--;
            });
            for (const auto & times : done) CHECK_EQ(times, 1);
            CHECK_EQ(n_shared, 0);
        }
    }
    const auto here = std::this_thread::get_id();
    Crew alone(1);
    alone.run(50, [&](size_t, size_t worker) { CHECK(std::this_thread::get_id() == here && worker == 0); });
}

void test_helpers_come_in() {
    Crew crew(3);
    for (int round = 0; round < 20; round++) {
        std::barrier met(3);
        crew.run(3, [&](size_t, size_t) { met.arrive_and_wait(); });
    }
    { const Crew idle(4); }  // gone without ever having worked
}

constexpr size_t n_vocab = 210000;  // enough that two branches under grammars that have to be asked, and two more, are worth sharing out
static_assert((4 + 4 + 1 + 1) * n_vocab >= Store::worth_sharing);

ContextParams threads(uint32_t n) {
    ContextParams params = context();
    params.n_threads = n;
    return params;
}

// Lets everything through, once `meet` has been called.
class Meets final : public Grammar {
public:
    explicit Meets(std::function<void()> meet) : meet_(std::move(meet)) {}
    std::unique_ptr<Grammar> clone() const override { return std::make_unique<Meets>(meet_); }
    void filter(std::span<Candidate>) override { meet_(); }
    void accept(Token) override {}

private:
    std::function<void()> meet_;
};

SamplingParams hot(int32_t top_k) {
    SamplingParams p;
    p.temperature = 2;
    p.top_k = top_k;
    p.penalty_repeat = 1.1f;
    return p;
}

Branches five(Store & store) {
    Branches out;
    for (uint32_t i = 0; i < 5; i++) out.push_back(root(store, text(3 + i, i), i == 2 ? greedy() : hot(i == 3 ? 0 : 40), i));
    store.get(out[1]).grammar = std::make_unique<OnlyThese>(text(200));
    store.get(out[4]).grammar = std::make_unique<OnlyThese>(text(9, 3));
    for (const size_t i : {0u, 2u, 4u}) store.set_metrics(out[i], PYL_METRICS_MODEL | PYL_METRICS_SAMPLING);
    return out;
}

void test_the_same_as_alone() {
    const auto model = stub::model("n_vocab=" + std::to_string(n_vocab));
    Store one(model, threads(1)), many(model, threads(3));
    const Branches a = five(one), b = five(many);
    Tokens drawn_a(5), drawn_b(5);
    for (int round = 0; round < 3; round++) {
        one.sample(a, drawn_a.data());
        many.sample(b, drawn_b.data());
        CHECK(drawn_a == drawn_b);
        commit(one, a, drawn_a);
        commit(many, b, drawn_b);
        Lanes in_a = lanes(a, 4), in_b = lanes(b, 4);
        run_tick(one, in_a);
        run_tick(many, in_b);
        CHECK(in_a.tokens == in_b.tokens);
        CHECK(snapshot(one) == snapshot(many));
    }
    // One that stands twice draws once and then again.
    Tokens eight_a(8), eight_b(8);
    one.sample(Branches{a[0], a[1], a[0], a[3], a[4], a[0], a[2], a[3]}, eight_a.data());
    many.sample(Branches{b[0], b[1], b[0], b[3], b[4], b[0], b[2], b[3]}, eight_b.data());
    CHECK(eight_a == eight_b);
    CHECK(snapshot(one) == snapshot(many));
    many.drain();
}

void test_at_the_same_time() {
    Store store(model("n_vocab=" + std::to_string(n_vocab)), threads(2));
    Branches both;
    for (uint32_t i = 0; i < 4; i++) both.push_back(root(store, text(4, i), hot(40), i));
    std::barrier met(2);
    for (const size_t i : {0u, 1u}) store.get(both[i]).grammar = std::make_unique<Meets>([&] { met.arrive_and_wait(); });
    Tokens drawn(4);
    store.sample(both, drawn.data());  // comes back only if the first two are drawn by two threads
    Lanes l = lanes(both, 1);
    for (const size_t i : {0u, 1u}) store.get(both[i]).grammar = std::make_unique<Meets>([&, n = std::make_shared<int>()] { if ((*n)++ == 0) met.arrive_and_wait(); });  // not by allows()
    run_tick(store, l);
    CHECK_EQ(l.tick.n_ticks, 1);
}

// Whatever fails, and on whichever thread: told of as if the branches had been gone through in order, and nothing has changed.
void test_failures() {
    Store store(model("n_vocab=" + std::to_string(n_vocab)), threads(3));
    const Branches all = five(store);
    const auto throws = [](int kind) {
        return std::make_unique<Meets>([kind] {
            if (kind == 1) throw Error(PYL_E_GRAMMAR, "too many ways");
            throw std::bad_alloc();
        });
    };
    const auto told = [&](auto && call) {
        const Snapshot before = snapshot(store);
        std::string out = "nothing";
        try {
            call();
        } catch (const Error & error) {
            out = std::to_string(error.code) + " " + std::to_string(error.index);
        } catch (const std::bad_alloc &) {
            out = "memory";
        }
        CHECK(snapshot(store) == before);
        return out;
    };
    for (int round = 0; round < 4; round++) {
        for (const bool error_first : {false, true}) {
            store.get(all[1]).grammar = throws(error_first);
            store.get(all[3]).grammar = throws(!error_first);
            Tokens drawn(5, -7);
            CHECK(told([&] { store.sample(all, drawn.data()); }) == (error_first ? std::to_string(PYL_E_GRAMMAR) + " -1" : "memory"));
            CHECK(drawn == Tokens(5, -7));
            Lanes l = lanes(all, 3);
            CHECK(told([&] { run_tick(store, l); }) == (error_first ? std::to_string(PYL_E_GRAMMAR) : std::to_string(PYL_E_OUT_OF_MEMORY)) + " -1");
            CHECK_EQ(l.tick.n_ticks, 0);
            store.get(all[0]).grammar = std::make_unique<OnlyThese>(Tokens{});  // nothing legal is only told of when nothing has failed
            CHECK(told([&] { store.sample(all, drawn.data()); }) == (error_first ? std::to_string(PYL_E_GRAMMAR) + " -1" : "memory"));
            for (const size_t i : {1u, 3u}) store.get(all[i]).grammar = nullptr;
            CHECK(told([&] { store.sample(all, drawn.data()); }) == std::to_string(PYL_E_ILLEGAL) + " 0");
            store.get(all[0]).grammar = nullptr;
        }
    }
}

}  // namespace

int main() {
    test_every_part_once();
    test_helpers_come_in();
    test_the_same_as_alone();
    test_at_the_same_time();
    test_failures();
    return check::result("test_crew");
}
