#include "core/json.hpp"

#include <array>
#include <cstdio>

namespace pyl {

// Length of the UTF-8 sequence that starts at text[i], 0 when it is not valid (overlong, surrogate, cut off, stray byte).
static size_t sequence_at(std::string_view text, size_t i) {
    const auto byte = [&](size_t k) { return static_cast<unsigned char>(text[k]); };
    const unsigned char lead = byte(i);
    if (lead < 0x80) return 1;
    const size_t n = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4 || i + n > text.size()) return 0;
    for (size_t k = 1; k < n; k++) {
        if ((byte(i + k) & 0xC0) != 0x80) return 0;
    }
    const unsigned char second = byte(i + 1);
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) || (lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F)) return 0;
    return n;
}

size_t utf8_valid_prefix(std::string_view text) {
    size_t i = 0;
    while (i < text.size()) {
        const size_t n = sequence_at(text, i);
        if (n == 0) break;
        i += n;
    }
    return i;
}

std::string json_quote(std::string_view text) {
    std::string out = "\"";
    for (size_t i = 0; i < text.size();) {
        const size_t n = sequence_at(text, i);
        if (n == 0) {
            out += "\xEF\xBF\xBD";
            i++;
            continue;
        }
        const char c = text[i];
        if (n > 1) {
            out.append(text.substr(i, n));
        } else if (c == '"' || c == '\\') {
            (out += '\\') += c;
        } else if (static_cast<unsigned char>(c) < 0x20) {
            std::array<char, 8> hex{};
            std::snprintf(hex.data(), hex.size(), "\\u%04x", c);
            out += hex.data();
        } else {
            out += c;
        }
        i += n;
    }
    return out += '"';
}

}  // namespace pyl
