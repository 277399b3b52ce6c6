// A module: variables and kernels of PTX text, or of the fat binary that holds it.
#pragma once

#include "decoder.h"

#include <memory>
#include <mutex>

namespace soft_gpu {

class Module {
  public:
    explicit Module(const std::string & ptx);
    // Returns a kernel, decoded when it is asked for first.
    const Kernel & kernel(const std::string & name);
    // Decodes all kernels, and lists the instructions that they must not reach, a line each.
    std::string unknown_instructions();
    // Returns the address of a global variable, 0 if there is none.
    u64 address(const std::string & variable) const;

  private:
    struct Entry {
        std::string parameters, body;
        u32 max_threads;
        std::unique_ptr<Kernel> decoded;
    };
    void read_variable(const std::string & text);
    void read_entry(const std::string & head, const std::string & body);

    std::mutex mutex_;
    Variables variables_;
    std::unordered_map<std::string, Entry> entries_;
    std::vector<std::unique_ptr<u8, void (*)(void *)>> memory_;
};

// Returns the uncompressed PTX of the fat binary that nvcc registers at start.
std::string ptx_of_fat_binary(const void * wrapper);

} // namespace soft_gpu
