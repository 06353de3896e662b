// Weights are opened once per process: stores that use the same file with the same params share them, and the last one out
// frees them.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "engine/engine.hpp"

namespace pyl {

// A path from the UTF-8 of the ABI, on every platform.
inline std::filesystem::path path_of(const std::string & utf8) { return std::filesystem::path(reinterpret_cast<const char8_t *>(utf8.c_str())); }

std::shared_ptr<Model> open_shared(const Engine & engine, const std::string & path, const ModelParams & params);

}  // namespace pyl
