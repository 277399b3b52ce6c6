// A device in use: its memory, the buffer types for weights, and the computation of graphs.
#pragma once

#include "device/registry.h"
#include "device/thread_count.h"

#include <functional>
#include <ggml-cpp.h>
#include <memory>
#include <string>
#include <vector>

namespace dfl {

// Returns the CPU's buffer types for weights besides the plain one, e.g. "AMX", "CPU_REPACK".
std::vector<std::string> extra_buffer_types();
// Throws unless quantised products in the named buffer type match those in the plain type. Illegal
// instructions would kill the process, so call this in a child process.
void probe_buffer_type(const std::string & name);

// Device memory of a context's tensors; buffer is NULL if memory is only counted.
struct Allocation {
    std::shared_ptr<void> pages; // memory that `buffer` uses but does not own; else NULL
    ggml_backend_buffer_ptr buffer;
    uint64_t bytes = 0;
};

class Backend {
  public:
    // excluded: names of extra buffer types not to use. dry_run: count memory, do not allocate it.
    // repack: weights may be rearranged for CPU kernels, ours or ggml's.
    Backend(ggml_backend_dev_t device, int n_threads,
            const std::vector<std::string> & excluded = {}, dfl_dry_run dry_run = DFL_DRY_RUN_NONE,
            bool repack = true);

    ggml_backend_t get() const { return backend_.get(); }
    ggml_backend_dev_t device() const { return device_; }
    const char * name() const;
    // Returns the largest number of threads; fewer run while other processes use the cores.
    int n_threads() const { return threads_.max(); }
    ThreadCount & threads() { return threads_; }
    void set_threads(int n);
    bool is_host() const;
    // True if graphs may have nodes of our own CPU code.
    bool runs_cpu_nodes() const;
    bool is_dry_run() const { return dry_run_ != DFL_DRY_RUN_NONE; }
    bool is_hypothetical() const { return dry_run_ == DFL_DRY_RUN_CUDA; }
    // True if the memory is managed by ggml's CUDA backend.
    bool is_cuda() const;
    bool runs(const ggml_tensor * node) const;

    ggml_backend_buffer_type_t default_buffer_type() const;
    // Returns the buffer types to try for a weight, best first; the plain type is last.
    const std::vector<ggml_backend_buffer_type_t> & weight_buffer_types() const { return weights_; }
    // True if weights are packed for our own CPU kernels.
    bool packs_weights() const { return packs_weights_; }

    // Throws DFL_STATUS_MEMORY naming `what`, its bytes and the free bytes.
    void check_fits(uint64_t bytes, const char * what) const;

    // Allocates zeroed memory for a context's tensors: a NaN in a masked cell would poison the sums
    // of some kernels. CPU memory is taken from the system only when written to. Throws
    // DFL_STATUS_MEMORY naming `what` and the bytes.
    Allocation allocate(ggml_context * ctx, const char * what) const;
    // Counts the bytes of a context's tensors in a buffer type, and marks the tensors as allocated.
    Allocation count(ggml_context * ctx, ggml_backend_buffer_type_t buft) const;
    // Asks for large pages for a host buffer that has not been written to; the system may refuse.
    void use_huge_pages(ggml_backend_buffer_t buffer) const;

    // Run a graph, or call submit() and wait(). then: submits further work before the device is
    // waited for. Throw DFL_STATUS_COMPUTE or DFL_STATUS_MEMORY.
    void compute(ggml_cgraph * graph, const std::function<void()> & then = {});
    void compute(const std::function<ggml_status()> & submit, const std::function<void()> & wait);
    // Nanoseconds spent submitting work, and waiting for it. A device that computes while work is
    // submitted has nearly all its time in submit_ns().
    uint64_t submit_ns() const { return submit_ns_; }
    uint64_t wait_ns() const { return wait_ns_; }

    // Copies `size` bytes of a tensor to the host. All reads count in bytes_read().
    void read(const ggml_tensor * tensor, void * dst, size_t offset, size_t size) const;
    // Copies n pieces of a tensor to the host, `size` bytes each and `stride` bytes apart.
    void read_rows(const ggml_tensor * tensor, void * dst, size_t offset, size_t size, int64_t n,
                   size_t stride) const;
    // Bytes of a tensor to copy to the host. read() waits for the device once for all fetches.
    struct Fetch {
        Fetch(const ggml_tensor * tensor, void * to) : Fetch(tensor, to, 0, ggml_nbytes(tensor)) {}
        Fetch(const ggml_tensor * tensor, void * to, size_t offset, size_t size)
            : tensor(tensor), to(to), offset(offset), size(size) {}
        const ggml_tensor * tensor;
        void * to;
        size_t offset, size;
    };
    void read(const std::vector<Fetch> & fetches) const;
    // Starts copying `size` bytes of a tensor to the host, behind all submitted work.
    void start_read(const ggml_tensor * tensor, void * dst, size_t offset, size_t size) const;
    uint64_t bytes_read() const { return bytes_read_; }

  private:
    ggml_backend_dev_t device_ = nullptr;
    dfl_dry_run dry_run_ = DFL_DRY_RUN_NONE;
    ggml_backend_ptr backend_;
    ThreadCount threads_;
    int n_set_ = 0; // number of threads that ggml uses
    bool packs_weights_ = false;
    std::vector<ggml_backend_buffer_type_t> weights_;
    mutable uint64_t bytes_read_ = 0;
    uint64_t submit_ns_ = 0, wait_ns_ = 0;
};

// Function that returns the backend of layer il.
using LayerPlace = std::function<Backend &(int64_t il)>;

} // namespace dfl
