// What an engine allocates, or would, as the JSON the ABI gives of it.
#pragma once

#include <string>

#include "engine/engine.hpp"

namespace pyl {

std::string memory_json(const Memory & memory, bool is_dry);
std::string memory_json(const ProjectorMemory & memory);

}  // namespace pyl
