// Just enough JSON writing for what the library says about itself.
#pragma once

#include <string>
#include <string_view>

namespace pyl {

// A JSON string literal; bytes that are not UTF-8 become U+FFFD, so the result always parses.
std::string json_quote(std::string_view text);

// Length of the valid UTF-8 prefix of text: equal to its size when all of it is valid.
size_t utf8_valid_prefix(std::string_view text);

}  // namespace pyl
