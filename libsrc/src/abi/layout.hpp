// Sizes and offsets of the ABI's structs: frozen here, and told to bindings.
#pragma once

#include <string>

namespace pyl {

std::string layout_json();

}  // namespace pyl
