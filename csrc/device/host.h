// What this process may use of the machine: memory and cores, as the files of a Linux kernel say.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace dfl {

// Bytes this process can still take: of the machine's, and within the limits of the control groups
// it is in, as containers are, and of all groups around them. Nothing where the kernel does not
// say. root: the folder that holds /proc and /sys.
std::optional<uint64_t> available_memory(const std::string & root = "");

// Threads worth computing with on these CPUs, at least 1: their physical cores, of hybrid
// processors the fast ones only, within the CPU quotas of the same groups.
int usable_cores(const std::vector<int> & allowed_cpus, const std::string & root = "");

} // namespace dfl
