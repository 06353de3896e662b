// Version, errors, logs, texts and counts: what is not about a model or a store.
#include <array>
#include <atomic>
#include <cstring>

#include "abi/guard.hpp"
#include "abi/layout.hpp"
#include "core/json.hpp"
#include "core/log.hpp"

namespace pyl {

static std::atomic<uint32_t> n_texts{0};

namespace {
// Fixed memory, so that remembering an out-of-memory error allocates nothing.
struct LastError {
    pyl_error error{};
    std::array<char, 4096> message{};
    LastError() {
        error.struct_size = sizeof error;
        error.index = -1;
        error.need = error.have = -1;
        error.message = message.data();
    }
};
LastError & last_error() {
    thread_local LastError last;
    return last;
}
void set_message(LastError & last, std::string_view text) {
    size_t n = std::min(text.size(), last.message.size() - 1);
    n = utf8_valid_prefix(text.substr(0, n));
    std::memcpy(last.message.data(), text.data(), n);
    last.message[n] = '\0';
}
}  // namespace

int32_t remember(const Error & error) noexcept {
    LastError & last = last_error();
    last.error.code = error.code;
    last.error.state = error.state;
    last.error.engine_rc = error.engine_rc;
    last.error.partial = error.partial;
    last.error.index = error.index;
    last.error.need = error.need;
    last.error.have = error.have;
    set_message(last, error.code == PYL_E_OUT_OF_MEMORY && error.message.empty() ? "an allocation failed" : std::string_view(error.message));
    return error.code;
}

int32_t remember_out_of_memory() noexcept {
    LastError & last = last_error();
    last.error = pyl_error{sizeof(pyl_error), PYL_E_OUT_OF_MEMORY, PYL_STATE_UNCHANGED, 0, 0, -1, -1, -1, last.message.data()};
    set_message(last, "an allocation failed");
    return PYL_E_OUT_OF_MEMORY;
}

pyl_text * new_text(std::string bytes) {
    auto * text = new pyl_text{std::move(bytes)};
    n_texts++;
    return text;
}

size_t live_handles(bool stores);
size_t live_embedders();
size_t live_projectors();
size_t live_prompts();

static std::string names(const std::vector<std::string> & list) {
    std::string out = "[";
    for (const auto & name : list) out += (out.size() > 1 ? "," : "") + json_quote(name);
    return out + "]";
}

static const Engine & main_engine() {
#if defined(PYL_WITH_LLAMA)
    return llama_engine();
#else
    return stub_engine();
#endif
}

}  // namespace pyl

using namespace pyl;

int32_t pyl_abi_version(void) { return PYL_ABI_VERSION; }

int32_t pyl_abi_layout(pyl_text ** out) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        *out = new_text(layout_json());
    });
}

int32_t pyl_build_info(pyl_text ** out) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        const EngineInfo info = main_engine().info();
        *out = new_text("{\"version\":" + json_quote(PYL_VERSION) + ",\"abi_version\":" + std::to_string(PYL_ABI_VERSION) + ",\"engine\":{\"name\":" + json_quote(info.name) +
                        ",\"commit\":" + json_quote(info.commit) + ",\"cpu\":" + json_quote(info.cpu) + ",\"threads\":" + json_quote(info.threads) + ",\"attention\":" + json_quote(info.attention) + "},\"backends\":" + names(info.backends) +
                        ",\"cpu_features\":" + names(info.cpu_features) + ",\"cpu_missing\":" + names(info.cpu_missing) + "}");
    });
}

int32_t pyl_devices(pyl_text ** out) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        std::string json = "[";
        for (const Device & d : main_engine().devices()) {
            json += (json.size() > 1 ? "," : "") + ("{\"name\":" + json_quote(d.name)) + ",\"description\":" + json_quote(d.description) + ",\"backend\":" + json_quote(d.backend) + ",\"kind\":" + json_quote(d.kind) +
                    ",\"total_bytes\":" + std::to_string(d.total_bytes) + ",\"free_bytes\":" + std::to_string(d.free_bytes) + "}";
        }
        *out = new_text(json + "]");
    });
}

const char * pyl_text_data(const pyl_text * text) { return text ? text->bytes.c_str() : ""; }

size_t pyl_text_size(const pyl_text * text) { return text ? text->bytes.size() : 0; }

void pyl_text_free(pyl_text * text) {
    if (text) n_texts--;
    delete text;
}

const pyl_error * pyl_error_last(void) { return &last_error().error; }

int32_t pyl_log_drain(pyl_text ** out, uint64_t * dropped) {
    return guarded([&] {
        need(out != nullptr, "out is NULL");
        uint64_t n = 0;
        *out = new_text(log_drain(n));
        if (dropped) *dropped = n;
    });
}

int32_t pyl_log_level(int32_t level) {
    return guarded([&] {
        need(level >= 1 && level <= 5, "level must be 1..5");
        log_set_level(static_cast<LogLevel>(level));
    });
}

int32_t pyl_live_objects(pyl_live * out) {
    return guarded([&] {
        const LiveCounts & n = live_counts();
        write_struct(out, {sizeof(pyl_live), static_cast<uint32_t>(live_handles(false)), n.weights, static_cast<uint32_t>(live_handles(true)), n.contexts, n.branches, n.grammars, n_texts, static_cast<uint32_t>(live_embedders()), static_cast<uint32_t>(live_projectors()), static_cast<uint32_t>(live_prompts())});
    });
}
