#include "engine/llama/pretend.hpp"

#include <cstdint>
#include <map>

#include "ggml-backend-impl.h"

namespace pyl {

namespace {

using Allocate = decltype(ggml_backend_buffer_type_i::alloc_buffer);

thread_local BufferScope * current = nullptr;

// Written once, before any other thread can look.
std::map<ggml_backend_buffer_type_t, Allocate> & originals() {
    static auto * map = new std::map<ggml_backend_buffer_type_t, Allocate>;  // never destroyed: a thread may still allocate at exit
    return *map;
}

// Aligned for anything and never dereferenced: a touch faults rather than corrupts.
void * nowhere(ggml_backend_buffer_t) { return reinterpret_cast<void *>(uintptr_t{4096}); }

ggml_backend_buffer_t pretend(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_i calls{};
    calls.get_base = nowhere;
    calls.clear = [](ggml_backend_buffer_t, uint8_t) {};
    calls.set_tensor = [](ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {};
    calls.memset_tensor = [](ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {};
    return ggml_backend_buffer_init(type, calls, nullptr, size);
}

}  // namespace

ggml_backend_buffer_t allocate_watched(ggml_backend_buffer_type_t type, size_t size) {
    if (!current) return originals().at(type)(type, size);
    current->asked.emplace_back(type, size);
    if (current->mode_ == BufferScope::Mode::pretend) return pretend(type, size);
    const ggml_backend_buffer_t real = originals().at(type)(type, size);
    if (real || current->mode_ != BufferScope::Mode::covered) return real;
    current->missed_bytes = size;
    return pretend(type, size);
}

void watch_buffers() {
    const auto watch = [](ggml_backend_buffer_type_t type) {
        if (!type || !originals().emplace(type, type->iface.alloc_buffer).second) return;
        type->iface.alloc_buffer = allocate_watched;
    };
    watch(ggml_backend_cpu_buffer_type());
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        watch(ggml_backend_dev_buffer_type(ggml_backend_dev_get(i)));
        watch(ggml_backend_dev_host_buffer_type(ggml_backend_dev_get(i)));
    }
}

BufferScope::BufferScope(Mode mode) : mode_(mode), outer_(current) { current = this; }
bool BufferScope::has_missed() { return current && current->missed_bytes > 0; }
BufferScope::~BufferScope() { current = outer_; }

}  // namespace pyl
