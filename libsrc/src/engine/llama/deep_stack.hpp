// The engine's template interpreter, JSON reader and regular expressions recurse with the depth or length of what they are given.
// Such work runs on a thread whose stack is large enough for all that is let through to them; the system backs only what is used.
#pragma once

#include <exception>
#include <functional>

#if !defined(_WIN32)
#  include <pthread.h>
#endif

namespace pyl {

constexpr size_t deep_stack_bytes = 256u << 20;

inline void on_deep_stack(const std::function<void()> & work, size_t bytes = deep_stack_bytes) {
#if defined(_WIN32)
    (void)bytes;
    work();
#else
    struct Task {
        const std::function<void()> & work;
        std::exception_ptr error;
    } task{work, nullptr};
    const auto body = [](void * given) -> void * {
        auto & mine = *static_cast<Task *>(given);
        try {
            mine.work();
        } catch (...) {
            mine.error = std::current_exception();
        }
        return nullptr;
    };
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, bytes);
    pthread_t thread;
    const int failed = pthread_create(&thread, &attributes, body, &task);
    pthread_attr_destroy(&attributes);
    if (failed) throw std::bad_alloc();
    pthread_join(thread, nullptr);
    if (task.error) std::rethrow_exception(task.error);
#endif
}

}  // namespace pyl
