#include "device/host.h"

#include "error.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

namespace dfl {

// Share of the fastest core's capacity below which a core is not used: threads get equal work, so
// fast cores would wait for it.
static constexpr double SLOW_SHARE = 0.5;

static std::optional<int64_t> read_number(const std::string & path) {
    std::ifstream file(path);
    int64_t number = 0;
    return file >> number ? std::optional(number) : std::nullopt; // a limit of "max" is none
}

// Reads lines of "name value" or "name: value".
static std::map<std::string, uint64_t> read_table(const std::string & path) {
    std::ifstream file(path);
    std::map<std::string, uint64_t> table;
    for (std::string line; std::getline(file, line);) {
        std::istringstream fields(line);
        std::string name;
        uint64_t value = 0;
        if (fields >> name >> value) {
            table[name] = value;
        }
    }
    return table;
}

static bool lists(const std::string & commas, const std::string & name) {
    return ("," + commas + ",").find("," + name + ",") != std::string::npos;
}

// Replaces octal escapes in paths of mountinfo, such as \040 for a blank.
static std::string unescaped(const std::string & text) {
    std::string plain;
    for (size_t i = 0; i < text.size(); ++i) {
        if (text[i] == '\\' && i + 3 < text.size()) {
            plain += static_cast<char>(std::strtol(text.substr(i + 1, 3).c_str(), nullptr, 8));
            i += 3;
        } else {
            plain += text[i];
        }
    }
    return plain;
}

// Returns the path of this process's control group for a controller ("" for cgroups version 2).
static std::optional<std::string> group_of(const std::string & root,
                                           const std::string & controller) {
    std::ifstream file(root + "/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) { // cgroup lines: number:controllers:path
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) {
            continue;
        }
        const std::string controllers = line.substr(first + 1, second - first - 1);
        if (controller.empty() ? controllers.empty() : lists(controllers, controller)) {
            return line.substr(second + 1);
        }
    }
    return std::nullopt;
}

// Returns the mounted folders of this process's control group and its ancestors (versions 1 and 2).
static std::vector<std::string> group_folders(const std::string & root,
                                              const std::string & controller) {
    std::vector<std::string> folders;
    std::ifstream file(root + "/proc/self/mountinfo");
    for (std::string line; std::getline(file, line);) {
        // mountinfo line: number parent device root folder options... - type source options
        std::istringstream fields(line);
        std::string skipped, mounted, folder, type, options;
        fields >> skipped >> skipped >> skipped >> mounted >> folder;
        while (fields >> skipped && skipped != "-") {
        }
        fields >> type >> skipped >> options;
        const bool is_v1 = type == "cgroup" && lists(options, controller);
        if (!is_v1 && type != "cgroup2") {
            continue;
        }
        const std::optional<std::string> group = group_of(root, is_v1 ? controller : "");
        if (!group) {
            continue;
        }
        // A container may see only its own subtree, or have a group outside the mounted subtree.
        mounted = mounted == "/" ? "" : unescaped(mounted);
        std::string below = *group + "/";
        const bool is_inside = below.compare(0, mounted.size() + 1, mounted + "/") == 0 &&
                               below.find("/../") == std::string::npos;
        below = is_inside ? below.substr(mounted.size()) : "/";
        for (size_t end = below.size(); end != 0 && end != std::string::npos;) {
            end = below.rfind('/', end - 1);
            if (end != std::string::npos) {
                folders.push_back(root + unescaped(folder) + below.substr(0, end));
            }
        }
    }
    return folders;
}

// Returns the bytes of page cache that the kernel reclaims before it refuses memory. In version 1,
// total_* are the sums over subgroups.
static uint64_t reclaimable_bytes(const std::string & folder) {
    std::map<std::string, uint64_t> stat = read_table(folder + "/memory.stat");
    const std::string sum = stat.count("total_inactive_file") > 0 ? "total_" : "";
    return stat[sum + "inactive_file"] + stat[sum + "active_file"] + stat["slab_reclaimable"];
}

std::optional<uint64_t> available_memory(const std::string & root) {
    std::optional<uint64_t> available;
    const auto bound = [&](uint64_t bytes) {
        available = std::min(available.value_or(bytes), bytes);
    };
    const auto machine = read_table(root + "/proc/meminfo");
    if (const auto found = machine.find("MemAvailable:"); found != machine.end()) {
        bound(found->second * 1024);
    }
    for (const std::string & folder : group_folders(root, "memory")) {
        std::optional<int64_t> used = read_number(folder + "/memory.current");
        used = used ? used : read_number(folder + "/memory.usage_in_bytes");
        // memory.high counts as a limit, because processes above it are throttled severely.
        for (const char * name : {"/memory.max", "/memory.high", "/memory.limit_in_bytes"}) {
            const std::optional<int64_t> limit = read_number(folder + name);
            if (limit && used && *limit >= 0) {
                const auto max_bytes = static_cast<uint64_t>(*limit);
                const uint64_t used_bytes = *used, cache = reclaimable_bytes(folder);
                bound(max_bytes - std::min(max_bytes, used_bytes - std::min(used_bytes, cache)));
            }
        }
    }
    return available;
}

// Reads a list of CPUs like "0-3,8".
static std::set<int> read_cpus(const std::string & path) {
    std::ifstream file(path);
    std::set<int> cpus;
    for (std::string range; std::getline(file, range, ',');) {
        int first = 0, last = 0;
        const int n = std::sscanf(range.c_str(), "%d-%d", &first, &last);
        for (int cpu = first; n > 0 && cpu <= (n > 1 ? last : first); ++cpu) {
            cpus.insert(cpu);
        }
    }
    return cpus;
}

// Returns the allowed CPUs without slow cores of hybrid processors: Linux lists Intel's fast cores
// and gives capacities of ARM's. Clock rates do not tell slow cores apart.
static std::vector<int> fast_cpus(const std::vector<int> & allowed, const std::string & root) {
    const std::set<int> listed = read_cpus(root + "/sys/devices/cpu_core/cpus");
    std::map<int, int64_t> capacity;
    int64_t max_capacity = 0;
    for (const int cpu : allowed) {
        const std::string path = format("/sys/devices/system/cpu/cpu%d/cpu_capacity", cpu);
        capacity[cpu] = listed.empty() ? read_number(root + path).value_or(0) : listed.count(cpu);
        max_capacity = std::max(max_capacity, capacity[cpu]);
    }
    std::vector<int> fast;
    std::copy_if(allowed.begin(), allowed.end(), std::back_inserter(fast),
                 [&](int cpu) { return capacity[cpu] >= SLOW_SHARE * max_capacity; });
    return fast;
}

// Returns the CPU quota of this process's control groups, in CPUs; empty without a quota.
static std::optional<double> cpu_quota(const std::string & root) {
    std::optional<double> quota_of_all;
    for (const std::string & folder : group_folders(root, "cpu")) {
        int64_t quota = -1, period = 0;
        if (std::ifstream file(folder + "/cpu.max"); file) { // the CPU quota may be "max"
            if (!(file >> quota >> period)) {
                continue;
            }
        } else {
            quota = read_number(folder + "/cpu.cfs_quota_us").value_or(-1);
            period = read_number(folder + "/cpu.cfs_period_us").value_or(0);
        }
        if (quota > 0 && period > 0) {
            const double cpus = static_cast<double>(quota) / static_cast<double>(period);
            quota_of_all = std::min(quota_of_all.value_or(cpus), cpus);
        }
    }
    return quota_of_all;
}

int usable_cores(const std::vector<int> & allowed_cpus, const std::string & root) {
    // Threads on the same core share its vector units, so a second thread per core gains nothing.
    std::set<std::string> cores;
    for (const int cpu : fast_cpus(allowed_cpus, root)) {
        std::ifstream file(
            root + format("/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu));
        std::string siblings;
        cores.insert(file >> siblings ? siblings : std::to_string(cpu));
    }
    const double n_cores = std::max<double>(1, static_cast<double>(cores.size()));
    // Threads that use up the quota stand still until the next period: two threads decode as fast
    // as one at a quota of 1.3 to 1.4 CPUs (measured with SmolLM2-135M).
    const double quota = cpu_quota(root).value_or(n_cores);
    return std::max(1, static_cast<int>(std::lround(std::min(quota, n_cores))));
}

} // namespace dfl
