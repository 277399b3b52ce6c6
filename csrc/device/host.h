// Memory and cores of the machine that this process may use, read from files of the Linux kernel.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace dfl {

// Returns the bytes that this process can still allocate within its control groups, as in a
// container; empty if the kernel does not say. root: folder that holds /proc and /sys.
std::optional<uint64_t> available_memory(const std::string & root = "");

// Returns the number of threads to compute with, at least 1: fast physical cores among the allowed
// CPUs, within the CPU quotas of control groups.
int usable_cores(const std::vector<int> & allowed_cpus, const std::string & root = "");

} // namespace dfl
