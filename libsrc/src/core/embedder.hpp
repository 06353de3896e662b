// Texts to vectors: a context of its own, empty before every dispatch. Knows neither the C ABI nor llama.cpp.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>

#include "core/error.hpp"
#include "engine/engine.hpp"

namespace pyl {

class Embedder {
public:
    Embedder(std::shared_ptr<const Model> model, const EmbedderParams & params);

    // One call at a time, or PYL_E_BUSY; `out` is written when all texts are done.
    void embed(std::span<const std::span<const Token>> texts, bool normalize, float * out);
    pyl_embedder_info info() const;
    // Waits for a call in flight; every later one is PYL_E_CLOSED.
    void close() noexcept;

private:
    std::shared_ptr<const Model> model_;
    EmbedderParams params_;
    mutable std::mutex call_mutex_;
    std::unique_ptr<EmbedContext> context_;
    int32_t n_embd_, pooling_;
    Batch batch_;
    std::atomic<uint64_t> n_dispatches_{0}, n_texts_{0}, n_tokens_{0};
};

}  // namespace pyl
