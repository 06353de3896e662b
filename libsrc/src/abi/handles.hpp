// The tables behind opaque handles: one counter for all kinds, that never repeats, mapped to a shared owner. A model's handle
// is therefore never mistaken for a store's.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "core/atfork.hpp"
#include "core/error.hpp"

namespace pyl {

inline std::atomic<uintptr_t> last_handle{0x1000};

template <typename T, typename Handle>
class HandleTable {
public:
    explicit HandleTable(std::string kind) : kind_(std::move(kind)) { guard_across_fork(mutex_); }

    Handle * add(std::shared_ptr<T> object) {
        const uintptr_t handle = ++last_handle;
        const std::scoped_lock lock(mutex_);
        objects_.emplace(handle, std::move(object));
        return reinterpret_cast<Handle *>(handle);
    }
    std::shared_ptr<T> find(const Handle * handle) const {
        const std::scoped_lock lock(mutex_);
        const auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
        if (found == objects_.end()) throw Error(PYL_E_CLOSED, "the " + kind_ + " is closed, or never was one");
        return found->second;
    }
    std::shared_ptr<T> remove(const Handle * handle) {
        const std::scoped_lock lock(mutex_);
        const auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
        if (found == objects_.end()) throw Error(PYL_E_CLOSED, "the " + kind_ + " is closed already, or never was one");
        auto object = std::move(found->second);
        objects_.erase(found);
        return object;
    }
    size_t size() const {
        const std::scoped_lock lock(mutex_);
        return objects_.size();
    }

private:
    std::string kind_;
    mutable std::mutex mutex_;  // not a shared_mutex: a child of fork() could not unlock that
    std::unordered_map<uintptr_t, std::shared_ptr<T>> objects_;
};

}  // namespace pyl
