// Locks of the library, held across fork(): a child must not inherit one that a thread it does not have had taken.
#pragma once

#include <functional>

namespace pyl {

// From now on fork() takes this lock first and gives it back afterwards, in the parent and in the child.
void guard_across_fork(std::function<void()> lock, std::function<void()> unlock);

template <typename Mutex>
void guard_across_fork(Mutex & mutex) {
    guard_across_fork([&mutex] { mutex.lock(); }, [&mutex] { mutex.unlock(); });
}

}  // namespace pyl
