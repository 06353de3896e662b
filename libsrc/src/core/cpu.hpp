// How many cores this process may really use.
#pragma once

#include <cstdint>

namespace pyl {

// Cores allowed by affinity and by the cgroup's CPU quota, at least 1. A pool larger than this is ruinous: threads that
// wait for each other are then scheduled in turns.
uint32_t usable_cores();

}  // namespace pyl
