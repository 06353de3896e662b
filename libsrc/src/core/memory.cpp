#include "core/memory.hpp"

#include <string_view>

#include "core/json.hpp"

namespace pyl {

namespace {

// {"name":value,...}, in the order it is told.
class Object {
public:
    Object & add(std::string_view name, const std::string & json) {
        text_ += (text_.size() > 1 ? ",\"" : "\"") + std::string(name) + "\":" + json;
        return *this;
    }
    Object & number(std::string_view name, uint64_t value) { return add(name, std::to_string(value)); }
    Object & truth(std::string_view name, bool value) { return add(name, value ? "true" : "false"); }
    Object & text(std::string_view name, std::string_view value) { return add(name, json_quote(value)); }
    std::string done() const { return text_ + "}"; }

private:
    std::string text_ = "{";
};

template <typename Rows, typename Write>
std::string list(const Rows & rows, const Write & write) {
    std::string out = "[";
    for (const auto & row : rows) out += (out.size() > 1 ? "," : "") + write(row);
    return out + "]";
}

template <typename Rows, typename Row>
uint64_t sum(const Rows & rows, uint64_t Row::* field) {
    uint64_t out = 0;
    for (const auto & row : rows) out += row.*field;
    return out;
}

}  // namespace

std::string memory_json(const Memory & m, bool is_dry) {
    const uint64_t context_bytes = sum(m.rows, &MemoryRow::context_bytes);
    Object out;
    out.number("n_ctx", m.n_ctx).number("n_ctx_seq", m.n_ctx_seq).number("n_batch", m.n_batch).number("n_ubatch", m.n_ubatch).number("n_seq_max", m.n_seq_max);
    out.number("n_rs_seq", m.n_rs_seq).number("n_outputs", m.n_outputs).truth("flash_attn", m.flash_attn).truth("kv_unified", m.kv_unified);
    out.number("model_bytes", sum(m.rows, &MemoryRow::model_bytes)).number("context_bytes", context_bytes).number("compute_bytes", sum(m.rows, &MemoryRow::compute_bytes));
    out.number("kv_bytes", context_bytes - m.recurrent_bytes).number("recurrent_bytes", m.recurrent_bytes).number("output_bytes", m.output_bytes);
    out.add("caches", list(m.caches, [](const CacheRow & c) { return Object().text("name", c.name).number("cells", c.cells).number("streams", c.streams).number("bytes", c.bytes).done(); }));
    out.add("rows", list(m.rows, [](const MemoryRow & r) {
        return Object().text("device", r.device).text("buffer", r.buffer).truth("is_host", r.is_host).number("model_bytes", r.model_bytes).number("context_bytes", r.context_bytes).number("compute_bytes", r.compute_bytes).done();
    }));
    if (is_dry) out.add("refusal", m.refusal ? json_quote(*m.refusal) : "null");
    return out.done();
}

std::string memory_json(const ProjectorMemory & m) {
    Object out;
    out.number("weights_bytes", sum(m.rows, &ProjectorRow::weights_bytes)).number("compute_bytes", sum(m.rows, &ProjectorRow::compute_bytes));
    out.add("encoders", list(m.encoders, [](const EncoderRow & e) {
        return Object().text("kind", e.kind).number("width", static_cast<uint64_t>(e.width)).number("height", static_cast<uint64_t>(e.height)).number("compute_bytes", e.compute_bytes).done();
    }));
    out.add("rows", list(m.rows, [](const ProjectorRow & r) { return Object().text("device", r.device).number("weights_bytes", r.weights_bytes).number("compute_bytes", r.compute_bytes).done(); }));
    return out.done();
}

}  // namespace pyl
