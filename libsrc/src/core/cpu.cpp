#include "core/cpu.hpp"

#include <algorithm>
#include <fstream>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace pyl {

#if defined(__linux__)
// Cores granted by one cgroup folder's quota, 0 when it sets none.
static double quota_in(const std::string & folder) {
    double quota = 0, period = 0;
    if (std::ifstream v2(folder + "/cpu.max"); v2) return v2 >> quota >> period && period > 0 ? quota / period : 0;  // "max" is no number
    std::ifstream v1_quota(folder + "/cpu.cfs_quota_us"), v1_period(folder + "/cpu.cfs_period_us");
    return v1_quota >> quota && v1_period >> period && quota > 0 && period > 0 ? quota / period : 0;
}

// Folders of this process's cgroup and of those above it.
static std::vector<std::string> own_cgroups(const std::string & root) {
    std::vector<std::string> out;
    std::ifstream own(root + "/proc/self/cgroup");
    for (std::string line; std::getline(own, line);) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        if (!controllers.empty() && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
        const std::string mount = root + (controllers.empty() ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu");
        for (std::string path = line.substr(second + 1);; path = path.substr(0, path.rfind('/'))) {
            out.push_back(mount + (path == "/" ? "" : path));
            if (path.empty() || path == "/") break;
        }
    }
    return out;
}
#endif

double cpu_quota([[maybe_unused]] const std::string & root) {
    double tightest = 0;
#if defined(__linux__)
    for (const std::string & folder : own_cgroups(root)) {
        if (const double q = quota_in(folder); q > 0) tightest = tightest > 0 ? std::min(tightest, q) : q;
    }
#endif
    return tightest;
}

uint64_t available_memory_bytes() {
    uint64_t available = 0;
#if defined(__linux__)
    std::ifstream info("/proc/meminfo");
    for (std::string key, unit; info >> key;) {
        uint64_t kib = 0;
        if (!(info >> kib)) break;
        std::getline(info, unit);
        if (key == "MemAvailable:") available = kib * 1024;
    }
    for (const std::string & folder : own_cgroups("")) {
        uint64_t limit = 0, used = 0;
        if (std::ifstream(folder + "/memory.max") >> limit && std::ifstream(folder + "/memory.current") >> used) available = std::min(available, limit - std::min(limit, used));
    }
#endif
    return available;
}

uint32_t usable_cores() {
    double cores = std::max(1u, std::thread::hardware_concurrency());
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
#endif
    if (const double quota = cpu_quota(); quota > 0) cores = std::min(cores, quota);
    return std::max(1u, static_cast<uint32_t>(cores));
}

}  // namespace pyl
