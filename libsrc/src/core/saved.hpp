// The head of a saved branch: everything that is checked, or told, without touching a store.
//
//   "PYLSAVE2"  u64 bytes in all  u64 checksum of the rest  head  body
//
// The body is what only a store can take: sampler, grammar, biases, metrics, logits, and the engine's own bytes of the sequence.
#pragma once

#include <string>
#include <string_view>

#include "core/bytes.hpp"
#include "engine/engine.hpp"

namespace pyl {

struct SavedHead {
    std::string engine, model;
    uint64_t fingerprint = 0;
    int32_t n_vocab = 0, type_k = 0, type_v = 0, flash_attn = 0;
    Pos position = 0;
    uint32_t cells = 0;
    Token last_token = -1;
    bool has_logits = false, has_grammar = false;
    uint64_t seed = 0, draws = 0;

    void write(ByteWriter & out) const;
    static SavedHead read(ByteReader & in);
    std::string json(size_t n_bytes) const;
};

constexpr std::string_view saved_magic = "PYLSAVE2";
constexpr size_t saved_prefix = 24;  // magic, length, checksum

// What follows the prefix, whole and undamaged, or PYL_E_FORMAT.
std::string_view checked_payload(std::string_view bytes);
// Puts the prefix in front of a payload written behind saved_prefix bytes of room.
void seal(std::string & bytes);

// "q8_0" for PYL_KV_Q8_0.
const char * kv_name(int32_t type);

}  // namespace pyl
