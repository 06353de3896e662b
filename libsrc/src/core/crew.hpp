// Threads that help with work made of separate parts. They sleep between two calls, and none is waited for that has not woken
// up by the time the work is done: on a busy machine the caller does it all, as if it had been alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pyl {

class Crew {
public:
    // What is to be done for part i; `worker` is below size() and differs between threads that work at the same time. Must not throw.
    using Work = std::function<void(size_t i, size_t worker)>;

    // n_threads counts the caller; the others are started when there is work for them.
    explicit Crew(uint32_t n_threads) : size_(n_threads < 1 ? 1 : n_threads) {}
    ~Crew();
    Crew(const Crew &) = delete;
    Crew & operator=(const Crew &) = delete;

    size_t size() const { return size_; }
    // Does parts 0..n-1, each once, and returns when all are done. One caller at a time.
    void run(size_t n, const Work & work);

private:
    void start(size_t n_helpers);
    void help(size_t worker);
    void do_parts(const Work & work, size_t worker);

    const size_t size_;
    bool has_failed_ = false;  // to start one: there is no asking again and again
    std::vector<std::thread> helpers_;
    std::mutex mutex_;
    std::condition_variable called_, left_;
    const Work * work_ = nullptr;  // null when there is nothing to come in for
    uint64_t n_calls_ = 0;
    size_t n_inside_ = 0;  // helpers
    bool is_over_ = false;
    size_t n_parts_ = 0;
    std::atomic<size_t> next_{0};
};

}  // namespace pyl
