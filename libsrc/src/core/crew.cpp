#include "core/crew.hpp"

#include <algorithm>
#include <new>
#include <system_error>

#if !defined(_WIN32)
#include <csignal>
#endif

namespace pyl {

Crew::~Crew() {
    {
        const std::scoped_lock lock(mutex_);
        is_over_ = true;
    }
    called_.notify_all();
    for (std::thread & helper : helpers_) helper.join();
}

// Fewer than wanted, or none, are fine.
void Crew::start(size_t n_helpers) {
#if !defined(_WIN32)
    sigset_t all, before;  // signals belong to the caller's threads, whose calls they are to interrupt
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    try {
        helpers_.reserve(n_helpers);
        while (helpers_.size() < n_helpers) helpers_.emplace_back([this, worker = helpers_.size() + 1] { help(worker); });
    } catch (const std::system_error &) {
        has_failed_ = true;
    } catch (const std::bad_alloc &) {
        has_failed_ = true;
    }
#if !defined(_WIN32)
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
}

void Crew::do_parts(const Work & work, size_t worker) {
    for (size_t i = next_++; i < n_parts_; i = next_++) work(i, worker);
}

void Crew::help(size_t worker) {
    std::unique_lock lock(mutex_);
    for (uint64_t n_seen = 0;;) {
        called_.wait(lock, [&] { return is_over_ || (work_ && n_calls_ != n_seen); });
        if (is_over_) return;
        n_seen = n_calls_;
        const Work & work = *work_;
        n_inside_++;
        lock.unlock();
        do_parts(work, worker);
        lock.lock();
        if (--n_inside_ == 0) left_.notify_one();
    }
}

void Crew::run(size_t n, const Work & work) {
    if (const size_t wanted = std::min(size_, n); wanted > helpers_.size() + 1 && !has_failed_) start(wanted - 1);
    if (n <= 1 || helpers_.empty()) {
        for (size_t i = 0; i < n; i++) work(i, 0);
        return;
    }
    {
        const std::scoped_lock lock(mutex_);
        next_ = 0;
        n_parts_ = n;
        work_ = &work;
        n_calls_++;
    }
    for (size_t i = 1; i < n && i <= helpers_.size(); i++) called_.notify_one();
    do_parts(work, 0);
    std::unique_lock lock(mutex_);
    work_ = nullptr;
    left_.wait(lock, [&] { return n_inside_ == 0; });
}

}  // namespace pyl
