// The engine's dry run still allocates in places: the output buffer, recurrent state, an encoder's weights and its graph. While one of
// these lives, what this thread asks ggml's buffer types for is noted, and given or pretended.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "ggml-backend.h"

namespace pyl {

// Puts a look-out into every buffer type there is. Once, before any buffer is allocated.
void watch_buffers();

class BufferScope {
public:
    enum class Mode {
        real,     // noted only
        covered,  // real, but pretended when memory is out: for calls that die of a buffer they did not get
        pretend,  // a buffer with a size and no memory, good as long as nothing is computed: what is written to it goes nowhere
    };
    explicit BufferScope(Mode mode);
    ~BufferScope();
    BufferScope(const BufferScope &) = delete;
    BufferScope & operator=(const BufferScope &) = delete;

    // What was asked for, in order. Not what has size 0: ggml answers that itself.
    std::vector<std::pair<ggml_backend_buffer_type_t, size_t>> asked;
    size_t missed_bytes = 0;  // of the last one that was not to be had

    // Whether this thread is in a scope that missed something: what is computed now would be computed nowhere.
    static bool has_missed();

private:
    friend ggml_backend_buffer_t allocate_watched(ggml_backend_buffer_type_t, size_t);
    Mode mode_;
    BufferScope * outer_;
};

// The first thing a context asks for is the buffer it gives logits in, which its account of itself leaves out.
inline size_t output_bytes_of(const BufferScope & scope) { return scope.asked.empty() ? 0 : scope.asked.front().second; }

}  // namespace pyl
