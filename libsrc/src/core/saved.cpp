#include "core/saved.hpp"

#include <cstdio>

#include "core/json.hpp"

namespace pyl {

const char * kv_name(int32_t type) {
    static constexpr const char * names[] = {"f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"};
    return type >= PYL_KV_F16 && type <= PYL_KV_IQ4_NL ? names[type] : "unknown";
}

void SavedHead::write(ByteWriter & out) const {
    out.put(engine);
    out.put(model);
    out.put(fingerprint);
    for (const int32_t value : {n_vocab, type_k, type_v, flash_attn, position}) out.put(value);
    out.put(cells);
    out.put(last_token);
    out.put<uint8_t>(has_logits);
    out.put<uint8_t>(has_grammar);
    out.put(seed);
    out.put(draws);
}

SavedHead SavedHead::read(ByteReader & in) {
    SavedHead out;
    out.engine = in.get_text();
    out.model = in.get_text();
    out.fingerprint = in.get<uint64_t>();
    for (int32_t * value : {&out.n_vocab, &out.type_k, &out.type_v, &out.flash_attn, &out.position}) *value = in.get<int32_t>();
    out.cells = in.get<uint32_t>();
    out.last_token = in.get<Token>();
    out.has_logits = in.get<uint8_t>() != 0;
    out.has_grammar = in.get<uint8_t>() != 0;
    out.seed = in.get<uint64_t>();
    out.draws = in.get<uint64_t>();
    return out;
}

std::string SavedHead::json(size_t n_bytes) const {
    char print[17];
    std::snprintf(print, sizeof print, "%016llx", static_cast<unsigned long long>(fingerprint));
    const auto truth = [](bool value) { return value ? "true" : "false"; };
    return "{\"format\":2,\"bytes\":" + std::to_string(n_bytes) + ",\"engine\":" + json_quote(engine) + ",\"model\":{\"name\":" + json_quote(model) + ",\"fingerprint\":\"" + print +
           "\",\"n_vocab\":" + std::to_string(n_vocab) + "},\"kv\":{\"type_k\":\"" + kv_name(type_k) + "\",\"type_v\":\"" + kv_name(type_v) + "\",\"flash_attn\":" + truth(flash_attn == PYL_FLASH_ATTN_ON) +
           "},\"position\":" + std::to_string(position) + ",\"cells\":" + std::to_string(cells) + ",\"has_logits\":" + truth(has_logits) + ",\"has_grammar\":" + truth(has_grammar) + ",\"sampling\":{\"seed\":" +
           std::to_string(seed) + ",\"n_sampled\":" + std::to_string(draws) + "}}";
}

std::string_view checked_payload(std::string_view bytes) {
    if (!bytes.starts_with(saved_magic)) throw Error(PYL_E_FORMAT, "these bytes are not a saved branch (they do not begin with \"" + std::string(saved_magic) + "\")");
    ByteReader prefix(bytes.substr(saved_magic.size()));
    const auto total = prefix.get<uint64_t>(), sum = prefix.get<uint64_t>();
    if (total != bytes.size()) throw Error(PYL_E_FORMAT, "a saved branch of " + std::to_string(total) + " bytes, of which " + std::to_string(bytes.size()) + " are here").numbers(static_cast<int64_t>(total), static_cast<int64_t>(bytes.size()));
    const std::string_view payload = bytes.substr(saved_prefix);
    if (checksum(payload) != sum) throw Error(PYL_E_FORMAT, "the saved branch is damaged: its checksum does not fit");
    return payload;
}

void seal(std::string & bytes) {
    ByteWriter prefix;
    prefix.bytes() = saved_magic;
    prefix.put<uint64_t>(bytes.size());
    prefix.put<uint64_t>(checksum(std::string_view(bytes).substr(saved_prefix)));
    bytes.replace(0, saved_prefix, prefix.bytes());
}

}  // namespace pyl
