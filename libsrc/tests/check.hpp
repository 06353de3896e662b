// Plain checks: each reports its place, the test goes on, and main returns check::result(). No framework.
#pragma once

#include <atomic>
#include <cstdio>

namespace check {

inline std::atomic<int> n_done{0}, n_failed{0};

// Counted by every thread; a flood of the same failure is cut short, the count is not.
inline bool that(bool ok, const char * file, int line, const char * what) {
    n_done++;
    if (!ok && n_failed++ < 100) std::fprintf(stderr, "%s:%d: FAILED %s\n", file, line, what);
    return ok;
}

inline bool same(long long got, long long want, const char * file, int line, const char * what) {
    const bool ok = that(got == want, file, line, what);
    if (!ok && n_failed <= 100) std::fprintf(stderr, "    got %lld, want %lld\n", got, want);
    return ok;
}

inline int result(const char * name) {
    std::printf("%s: %d checks, %d failed\n", name, n_done.load(), n_failed.load());
    return n_failed ? 1 : 0;
}

}  // namespace check

#define CHECK(...) check::that(static_cast<bool>(__VA_ARGS__), __FILE__, __LINE__, #__VA_ARGS__)
#define CHECK_EQ(got, want) check::same(static_cast<long long>(got), static_cast<long long>(want), __FILE__, __LINE__, #got " == " #want)

// Runs a statement that must throw pyl::Error with this code, and gives the error back to look at its numbers.
#define CHECK_THROWS(want, ...)                                                                                        \
    [&]() -> pyl::Error {                                                                                              \
        try {                                                                                                          \
            __VA_ARGS__;                                                                                               \
        } catch (const pyl::Error & thrown_) {                                                                         \
            check::same(thrown_.code, want, __FILE__, __LINE__, #__VA_ARGS__ " throws " #want);                        \
            return thrown_;                                                                                            \
        }                                                                                                              \
        check::that(false, __FILE__, __LINE__, #__VA_ARGS__ " throws " #want ", but nothing was thrown");              \
        return {PYL_OK, "nothing was thrown"};                                                                         \
    }()
