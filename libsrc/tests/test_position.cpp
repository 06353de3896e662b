// Positions are 32-bit: a branch made near the end of their range must be refused what does not fit (at birth or later), never
// wrap around. Alone in its program because signed overflow stops a sanitised build on the spot.
#include <algorithm>
#include <limits>

#include "check.hpp"
#include "stub_store.hpp"

using namespace stub;

int main() {
    constexpr Pos last = std::numeric_limits<Pos>::max();
    const Tokens tokens = text(6);
    for (const Pos left : {0, 1, 2, 3, 6, 7}) {      // positions up to the last one
        for (const int by : {0, 1, 2}) {             // taken by prefill at once, commits, ticks
            Store store(model(), context());
            const auto advance = [&](pyl_branch a) {
                if (by == 0) return prefill(store, a, tokens), void();
                prefill(store, a, {1});
                for (int i = 1; i < 6; i++) {
                    Lanes l = lanes({a}, 1);
                    by == 1 ? commit(store, {a}, {tokens[static_cast<size_t>(i)]}) : run_tick(store, l);
                }
            };
            pyl_branch a = 0;
            try {
                a = store.create(last - left, greedy(), 1);
                advance(a);
                CHECK(left >= 6);
            } catch (const Error & error) {
                CHECK(error.code == PYL_E_INVALID || error.code == PYL_E_CONTEXT);
            }
            if (a) CHECK_EQ(static_cast<int64_t>(store.get(a).position), static_cast<int64_t>(last) - left + store.get(a).cells_own);
        }
    }
    // The latest start that is accepted leaves room for every cell of the cache.
    Store store(model(), context(256, 64, 2));
    Pos latest = 0;
    for (Pos step = 1 << 30; step > 0; step /= 2) {
        try {
            store.prune(Branches{store.create(latest + step, greedy(), 1)});
            latest += step;
        } catch (const Error & error) {
            CHECK_EQ(error.code, PYL_E_INVALID);
        }
    }
    CHECK(latest > 1'000'000);
    const pyl_branch a = store.create(latest, greedy(), 1);
    prefill(store, a, text(256));
    CHECK_EQ(store.get(a).position, latest + 256);
    CHECK(same_bits(row(store, a), replay(text(256), latest)));
    CHECK_THROWS(PYL_E_INVALID, store.create(latest + 1, greedy(), 1));
    return check::result("test_position");
}
