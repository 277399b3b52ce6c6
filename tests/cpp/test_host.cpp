// Limits of memory and cores, read from kernel files that the test writes.
#include "device/host.h"

#include "check.h"

#include <filesystem>
#include <fstream>
#include <numeric>
#include <unistd.h>

using namespace dfl;
namespace fs = std::filesystem;

namespace {

constexpr uint64_t MIB = 1 << 20;

class Machine {
  public:
    Machine() : root_(fs::temp_directory_path() / ("dfl-host-" + std::to_string(getpid()))) {
        fs::remove_all(root_);
        write("/proc/meminfo",
              "MemTotal: 999999 kB\nMemAvailable: 8388608 kB\nHugePages_Free: 0\n");
    }
    ~Machine() { fs::remove_all(root_); }

    void write(const std::string & path, const std::string & text) const {
        const fs::path to = root_ / path.substr(1);
        fs::create_directories(to.parent_path());
        std::ofstream(to) << text;
    }
    void write(const std::string & path, uint64_t number) const {
        write(path, std::to_string(number) + "\n");
    }
    void mount(const std::string & mounted, const std::string & folder, const std::string & type,
               const std::string & options) const {
        write("/proc/self/mountinfo", "22 1 8:1 / / rw shared:1 - ext4 /dev/sda rw\n30 22 0:26 " +
                                          mounted + " " + folder + " rw shared:9 master:3 - " +
                                          type + " none rw," + options + "\n");
    }
    // Creates n CPUs with two hardware threads per core.
    std::vector<int> cpus(int n) const {
        std::vector<int> all(n);
        std::iota(all.begin(), all.end(), 0);
        for (const int cpu : all) {
            const int first = cpu / 2 * 2;
            write(format("/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu),
                  format("%d-%d\n", first, first + 1));
        }
        return all;
    }
    std::optional<uint64_t> memory() const { return available_memory(root_.string()); }
    int cores(const std::vector<int> & allowed) const {
        return usable_cores(allowed, root_.string());
    }

  private:
    fs::path root_;
};

void test_without_limits() {
    const Machine machine;
    CHECK(machine.memory() == 8192 * MIB);
    CHECK(machine.cores(machine.cpus(8)) == 4);
    CHECK(machine.cores({0, 1, 5}) == 2);
    CHECK(machine.cores({70, 71}) == 2);
    CHECK(machine.cores({}) == 1);
    CHECK(available_memory("/no/such/folder") == std::nullopt);
}

void test_version_2() {
    const Machine machine;
    const auto cpus = machine.cpus(16);
    machine.mount("/", "/sys/fs/cgroup", "cgroup2", "nsdelegate");
    machine.write("/proc/self/cgroup", "0::/user.slice/box.service\n");
    const std::string outer = "/sys/fs/cgroup/user.slice", inner = outer + "/box.service";

    machine.write(inner + "/memory.max", "max\n");
    machine.write(inner + "/memory.current", 100 * MIB);
    machine.write(inner + "/cpu.max", "max 100000\n");
    CHECK(machine.memory() == 8192 * MIB);
    CHECK(machine.cores(cpus) == 8);

    // Used memory excludes reclaimable page cache.
    machine.write(inner + "/memory.max", 1000 * MIB);
    CHECK(machine.memory() == 900 * MIB);
    machine.write(inner + "/memory.stat",
                  format("anon 1\nfile 77\ninactive_file %llu\nactive_file %llu\nshmem 9\n"
                         "slab_reclaimable %llu\n",
                         30ull * MIB, 20ull * MIB, 10ull * MIB));
    CHECK(machine.memory() == 960 * MIB);
    machine.write(inner + "/memory.high", 500 * MIB);
    CHECK(machine.memory() == 460 * MIB);
    machine.write(inner + "/memory.current", 600 * MIB);
    CHECK(machine.memory() == 0);
    // Kernel counters lag: the usage may be less than the page cache.
    machine.write(inner + "/memory.current", 1 * MIB);
    CHECK(machine.memory() == 500 * MIB);

    // Limits of parent groups apply too.
    machine.write(outer + "/memory.max", 300 * MIB);
    machine.write(outer + "/memory.current", 200 * MIB);
    CHECK(machine.memory() == 100 * MIB);
    machine.write("/sys/fs/cgroup/memory.max", 50 * MIB);
    machine.write("/sys/fs/cgroup/memory.current", 0);
    CHECK(machine.memory() == 50 * MIB);

    machine.write(inner + "/cpu.max", "350000 100000\n");
    CHECK(machine.cores(cpus) == 4);
    machine.write(inner + "/cpu.max", "340000 100000\n");
    CHECK(machine.cores(cpus) == 3);
    CHECK(machine.cores({0, 1, 2, 3}) == 2);
    machine.write(outer + "/cpu.max", "140000 100000\n");
    CHECK(machine.cores(cpus) == 1);
    machine.write(outer + "/cpu.max", "50000 100000\n");
    CHECK(machine.cores(cpus) == 1);
}

void test_version_1() {
    const Machine machine;
    const auto cpus = machine.cpus(16);
    machine.mount("/", "/sys/fs/cgroup/memory", "cgroup", "memory");
    machine.write("/proc/self/cgroup", "5:cpu,cpuacct:/a/b\n4:memory:/a/b\n0::/\n");
    const std::string group = "/sys/fs/cgroup/memory/a/b";
    machine.write(group + "/memory.limit_in_bytes", 9223372036854771712u);
    machine.write(group + "/memory.usage_in_bytes", 64 * MIB);
    CHECK(machine.memory() == 8192 * MIB);
    machine.write(group + "/memory.limit_in_bytes", 512 * MIB);
    CHECK(machine.memory() == 448 * MIB);
    machine.write(group + "/memory.stat",
                  format("inactive_file 5\ntotal_inactive_file %llu\ntotal_active_file %llu\n",
                         16ull * MIB, 8ull * MIB));
    CHECK(machine.memory() == 472 * MIB);
    machine.write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", 128 * MIB);
    machine.write("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", 64 * MIB);
    CHECK(machine.memory() == 64 * MIB);

    machine.mount("/", "/sys/fs/cgroup/cpu,cpuacct", "cgroup", "cpu,cpuacct");
    CHECK(machine.cores(cpus) == 8);
    const std::string quota = "/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_";
    machine.write(quota + "period_us", "50000\n");
    machine.write(quota + "quota_us", "-1\n");
    CHECK(machine.cores(cpus) == 8);
    machine.write(quota + "quota_us", "125000\n");
    CHECK(machine.cores(cpus) == 3);
}

// A container mounts only its own part of the cgroup hierarchy, and may see paths of the host.
void test_a_part_of_the_hierarchy() {
    const Machine machine;
    machine.mount("/docker/1234", "/sys/fs/cgroup/the\\040memory", "cgroup", "memory");
    machine.write("/sys/fs/cgroup/the memory/memory.limit_in_bytes", 512 * MIB);
    machine.write("/sys/fs/cgroup/the memory/memory.usage_in_bytes", 0);
    machine.write("/sys/fs/cgroup/the memory/in/memory.limit_in_bytes", 64 * MIB);
    machine.write("/sys/fs/cgroup/the memory/in/memory.usage_in_bytes", 0);
    const std::pair<const char *, uint64_t> cases[] = {{"/docker/1234", 512},
                                                       {"/docker/1234/in", 64},
                                                       {"/docker/12345/in", 512},
                                                       {"/docker/1234/../in", 512},
                                                       {"/", 512}};
    for (const auto & [group, expected] : cases) {
        machine.write("/proc/self/cgroup",
                      std::string("2:name=systemd:/x\n4:memory:") + group + "\n");
        CHECK(machine.memory() == expected * MIB);
    }
    machine.write("/proc/self/cgroup", "2:name=systemd:/x\n");
    CHECK(machine.memory() == 8192 * MIB);
}

void test_hybrid_processors() {
    {
        const Machine intel;
        const auto cpus = intel.cpus(16);
        intel.write("/sys/devices/cpu_core/cpus", "0-3,6-7\n");
        intel.write("/sys/devices/cpu_atom/cpus", "4-5,8-15\n");
        CHECK(intel.cores(cpus) == 3);
        CHECK(intel.cores({8, 9, 10}) == 2);
    }
    const Machine arm;
    auto write = [&](int cpu, int capacity) {
        arm.write(format("/sys/devices/system/cpu/cpu%d/cpu_capacity", cpu), capacity);
        return cpu;
    };
    const std::vector<int> cpus = {write(0, 250), write(1, 250), write(2, 250), write(3, 250),
                                   write(4, 870), write(5, 870), write(6, 870), write(7, 1024)};
    CHECK(arm.cores(cpus) == 4);
    CHECK(arm.cores({0, 1, 2}) == 3);
    CHECK(arm.cores({3, 7}) == 1);
}

} // namespace

int main() {
    test_without_limits();
    test_version_2();
    test_version_1();
    test_a_part_of_the_hierarchy();
    test_hybrid_processors();
    return 0;
}
