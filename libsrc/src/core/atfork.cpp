#include "core/atfork.hpp"

#include <mutex>
#include <utility>
#include <vector>

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace pyl {

using Pair = std::pair<std::function<void()>, std::function<void()>>;

// Never destroyed: a thread may fork while the process exits.
static std::vector<Pair> & pairs() {
    static auto * all = new std::vector<Pair>;
    return *all;
}

static std::mutex & own() {
    static auto * mutex = new std::mutex;
    return *mutex;
}

#if !defined(_WIN32)
static void before() {
    own().lock();
    for (auto & pair : pairs()) pair.first();
}
static void after() {
    for (auto & pair : pairs()) pair.second();
    own().unlock();
}
#endif

void guard_across_fork(std::function<void()> lock, std::function<void()> unlock) {
    const std::scoped_lock guard(own());
    pairs().emplace_back(std::move(lock), std::move(unlock));
#if !defined(_WIN32)
    static const int registered = pthread_atfork(before, after, after);
    (void)registered;
#endif
}

}  // namespace pyl
