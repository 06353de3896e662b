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

void guard_across_fork(std::function<void()> lock, std::function<void()> unlock) {
    static auto * mutex = new std::mutex;
    const std::scoped_lock guard(*mutex);
    pairs().emplace_back(std::move(lock), std::move(unlock));
#if !defined(_WIN32)
    static const int registered = pthread_atfork([] { for (auto & p : pairs()) p.first(); }, [] { for (auto & p : pairs()) p.second(); }, [] { for (auto & p : pairs()) p.second(); });
    (void)registered;
#endif
}

}  // namespace pyl
