// How ggml's threads wait for each other at the end of every graph node: look for a few microseconds, then sleep in the
// kernel. Pure spinning is as fast on a quiet machine and ruinous on a busy one, where the thread that is waited for has no
// core to run on (docs/adr/0002 has the figures). cmake/edit_barrier.cmake puts the two calls into ggml.
#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <condition_variable>
#include <mutex>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace {

constexpr int spins = 1000;  // 10 to 40 microseconds: longer than a healthy wait, shorter than a time slice by far

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

std::atomic<int> n_sleeping{0};

#if defined(__linux__)
void sleep_while(int * address, int old) { syscall(SYS_futex, address, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0); }
void wake_all(int * address) { syscall(SYS_futex, address, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#elif defined(_WIN32)
void sleep_while(int * address, int old) { WaitOnAddress(address, &old, sizeof old, INFINITE); }
void wake_all(int * address) { WakeByAddressAll(address); }
#else
std::mutex mutex;
std::condition_variable changed;
void sleep_while(int * address, int old) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return reinterpret_cast<std::atomic<int> *>(address)->load() != old; });
}
void wake_all(int *) {
    { const std::scoped_lock lock(mutex); }
    changed.notify_all();
}
#endif

}  // namespace

extern "C" void pyl_barrier_wait(int * address, int old);
extern "C" void pyl_barrier_wake(int * address);

// Returns once *address is no longer `old`.
extern "C" void pyl_barrier_wait(int * address, int old) {
    const auto & value = *reinterpret_cast<std::atomic<int> *>(address);
    for (int i = 0; i < spins; i++) {
        if (value.load(std::memory_order_relaxed) != old) return;
        relax();
    }
    n_sleeping.fetch_add(1, std::memory_order_seq_cst);
    while (value.load(std::memory_order_seq_cst) == old) sleep_while(address, old);
    n_sleeping.fetch_sub(1, std::memory_order_relaxed);
}

// Called after *address was changed; no system call unless somebody sleeps.
extern "C" void pyl_barrier_wake(int * address) {
    if (n_sleeping.load(std::memory_order_seq_cst) > 0) wake_all(address);
}
