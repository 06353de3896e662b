#include "core/registry.hpp"

#include <chrono>
#include <map>
#include <mutex>

#if defined(_WIN32)
#include <process.h>
#define getpid _getpid
#else
#include <unistd.h>
#endif

#include "core/atfork.hpp"

namespace pyl {

namespace {
struct Entry {
    std::mutex opening;          // two threads that want the same weights load them once
    std::weak_ptr<Model> model;  // under the registry's mutex
};
}  // namespace

std::shared_ptr<Model> open_shared(const Engine & engine, const std::string & path, const ModelParams & params) {
    // The file's identity, not its name: a file that was replaced is another model.
    namespace fs = std::filesystem;
    std::error_code ignored;
    const fs::path file = fs::canonical(path_of(path), ignored);
    std::string key = (file.empty() ? path : file.string()) + '|' + std::to_string(params.n_gpu_layers) + (params.use_mmap ? "m" : "") + (params.vocab_only ? "v" : "");
    if (!file.empty()) {
        // The clock of files counts in __int128 in some C++ libraries, which to_string does not know.
        const auto written = std::chrono::duration_cast<std::chrono::nanoseconds>(fs::last_write_time(file, ignored).time_since_epoch());
        key += '|' + std::to_string(fs::file_size(file, ignored)) + '|' + std::to_string(written.count());
    }
    // Never destroyed: a thread may open a model while the process exits.
    static auto & mutex = *new std::mutex;
    static auto & entries = *new std::map<std::string, std::shared_ptr<Entry>>;
    // A child forked while another thread was loading must not wait for that thread: it starts with entries of its own.
    static const bool is_guarded = (guard_across_fork([] { mutex.lock(); }, [pid = getpid()]() mutable {
        if (const auto now = getpid(); now != pid) {
            pid = now;
            new std::map<std::string, std::shared_ptr<Entry>>(std::move(entries));
            entries.clear();
        }
        mutex.unlock();
    }), true);
    (void)is_guarded;
    std::shared_ptr<Entry> entry;
    {
        const std::scoped_lock lock(mutex);
        std::erase_if(entries, [](const auto & item) { return item.second.use_count() == 1 && item.second->model.expired(); });
        auto & found = entries[key];
        if (!found) found = std::make_shared<Entry>();
        entry = found;
    }
    const std::scoped_lock opening(entry->opening);
    {
        const std::scoped_lock lock(mutex);
        if (auto shared = entry->model.lock()) return shared;
    }
    auto opened = engine.open(path, params);
    const std::scoped_lock lock(mutex);
    entry->model = opened;
    return opened;
}

}  // namespace pyl
