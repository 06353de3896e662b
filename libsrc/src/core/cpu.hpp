// How many cores this process may really use.
#pragma once

#include <cstdint>
#include <string>

namespace pyl {

// Cores allowed by affinity and by the cgroup's CPU quota, at least 1. A pool larger than this is ruinous: threads that
// wait for each other are then scheduled in turns.
uint32_t usable_cores();

// The tightest CPU quota of this process's cgroups, in cores, 0 for none. `root`: where /proc and /sys are looked for.
double cpu_quota(const std::string & root = "");

// Bytes of memory this process could still take without swapping (the cgroup's limit counts), 0 when that is not known.
uint64_t available_memory_bytes();

}  // namespace pyl
