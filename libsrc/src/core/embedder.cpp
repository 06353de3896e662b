#include "core/embedder.hpp"

#include <algorithm>
#include <cmath>

namespace pyl {

Embedder::Embedder(std::shared_ptr<const Model> model, const EmbedderParams & params)
    : model_(std::move(model)), params_(params), context_(model_->open_embedder(params)), n_embd_(context_->n_embd()), pooling_(context_->pooling()) {}

static void normalise(float * row, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += static_cast<double>(row[i]) * row[i];
    const double scale = sum > 0 ? 1 / std::sqrt(sum) : 0;
    for (size_t i = 0; i < n; i++) row[i] = static_cast<float>(row[i] * scale);
}

void Embedder::embed(std::span<const std::span<const Token>> texts, bool normalize, float * out) {
    const std::unique_lock call(call_mutex_, std::try_to_lock);
    if (!call) throw Error(PYL_E_BUSY, "another thread is inside this embedder; one call at a time");
    if (!context_) throw Error(PYL_E_CLOSED, "the embedder is closed");
    const auto n_vocab = model_->info().n_vocab;
    for (size_t i = 0; i < texts.size(); i++) {
        if (texts[i].empty()) throw Error(PYL_E_INVALID, "a text without tokens has no vector").at(i);
        if (texts[i].size() > params_.n_ctx) {
            throw Error(PYL_E_INVALID, "a text of " + std::to_string(texts[i].size()) + " tokens; this embedder takes " + std::to_string(params_.n_ctx)).at(i).numbers(static_cast<int64_t>(texts[i].size()), params_.n_ctx);
        }
        for (const Token token : texts[i]) {
            if (token < 0 || token >= n_vocab) throw Error(PYL_E_INVALID, "token " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(n_vocab)).at(i);
        }
    }
    const auto width = static_cast<size_t>(n_embd_);
    std::vector<float> rows(texts.size() * width);
    for (size_t first = 0; first < texts.size();) {
        batch_.clear();
        size_t n = 0;
        for (; first + n < texts.size() && n < context_->n_seq_max() && batch_.size() + texts[first + n].size() <= params_.n_ctx; n++) {
            for (size_t k = 0; k < texts[first + n].size(); k++) batch_.add(texts[first + n][k], static_cast<Pos>(k), static_cast<Seq>(n), true);
        }
        const int32_t rc = context_->embed(batch_);
        n_dispatches_++;
        if (rc != 0) throw Error(PYL_E_DECODE, "the engine failed to embed (code " + std::to_string(rc) + ")").at(first).from_engine(rc);
        for (size_t i = 0; i < n; i++) {
            float * row = rows.data() + (first + i) * width;
            std::copy_n(context_->vector(i), width, row);
            if (normalize) normalise(row, width);
        }
        n_texts_ += n;
        n_tokens_ += batch_.size();
        first += n;
    }
    std::copy(rows.begin(), rows.end(), out);
}

pyl_embedder_info Embedder::info() const { return {sizeof(pyl_embedder_info), n_embd_, params_.n_ctx, pooling_, n_dispatches_, n_texts_, n_tokens_}; }

void Embedder::close() noexcept {
    const std::scoped_lock call(call_mutex_);
    context_.reset();
}

}  // namespace pyl
