// A device in use: its memory, where weights lie best, computing graphs.
#pragma once

#include "device/registry.h"
#include "device/thread_count.h"

#include <functional>
#include <ggml-cpp.h>
#include <memory>
#include <string>
#include <vector>

namespace dfl {

// CPU buffer types other than the plain one that are offered for weights: "AMX", "CPU_REPACK"...
std::vector<std::string> extra_buffer_types();
// Multiplies quantised matrices in the named buffer type and compares with the plain one. Throws on
// a wrong result; where the kernels cannot run the process dies, so call it in a child process.
void probe_buffer_type(const std::string & name);

// Device memory for the tensors of a context; buffer is NULL where memory is only counted.
struct Allocation {
    std::shared_ptr<void> pages; // behind a buffer that does not own its memory
    ggml_backend_buffer_ptr buffer;
    uint64_t bytes = 0;
};

// One device a model runs on, its weight buffer types and its compute threads.
class Backend {
  public:
    // excluded: names of extra buffer types whose kernels must not be used. measure: memory is not
    // allocated but counted, with DFL_DRY_RUN_CUDA on a hypothetical GPU in the device's place.
    // repack: whether weights may be rearranged for the CPU's kernels, ours or ggml's.
    Backend(ggml_backend_dev_t device, int n_threads,
            const std::vector<std::string> & excluded = {}, dfl_dry_run dry_run = DFL_DRY_RUN_NONE,
            bool repack = true);

    ggml_backend_t get() const { return backend_.get(); }
    ggml_backend_dev_t device() const { return device_; }
    const char * name() const;
    // Most threads that compute; fewer do while other processes use the cores.
    int n_threads() const { return threads_.max(); }
    // Decides how many compute now.
    ThreadCount & threads() { return threads_; }
    // Sets the threads of the graphs to come, on a CPU.
    void set_threads(int n);
    bool is_host() const;
    // Whether its graphs may hold nodes of our own code.
    bool runs_cpu_nodes() const;
    bool is_dry_run() const { return dry_run_ != DFL_DRY_RUN_NONE; }
    bool is_hypothetical() const { return dry_run_ == DFL_DRY_RUN_CUDA; }
    // Whether its memory is managed by ggml's CUDA backend.
    bool is_cuda() const;
    bool runs(const ggml_tensor * node) const;

    ggml_backend_buffer_type_t default_buffer_type() const;
    // Buffer types to try for a weight, best first; the plain type is last.
    const std::vector<ggml_backend_buffer_type_t> & weight_buffer_types() const { return weights_; }
    // Whether weights are packed for our own kernels where there are some.
    bool packs_weights() const { return packs_weights_; }

    // Throws DFL_STATUS_MEMORY naming what, the bytes and what is free.
    void check_fits(uint64_t bytes, const char * what) const;

    // A zeroed buffer for all tensors of a context, NULL if it has none. Zeroed, since a NaN in a
    // place nobody may see still poisons the masked sums of some kernels; on the CPU by fresh
    // pages, so that a cache takes memory as it fills. Throws DFL_STATUS_MEMORY naming what and the
    // bytes.
    Allocation allocate(ggml_context * ctx, const char * what) const;
    // Bytes that all tensors of a context would take in a buffer, which they are told they have.
    Allocation count(ggml_context * ctx, ggml_backend_buffer_type_t buft) const;
    // Asks the operating system for large pages behind a buffer that nothing has been written to
    // yet; only host memory has any. It may refuse.
    void use_huge_pages(ggml_backend_buffer_t buffer) const;

    // Throws DFL_STATUS_COMPUTE or DFL_STATUS_MEMORY.
    void compute(ggml_cgraph * graph);
    // The same for work that submit hands to the device and wait waits for.
    void compute(const std::function<ggml_status()> & submit, const std::function<void()> & wait);
    // Time spent in compute(): until the device had its work, and then until it was done. Devices
    // that compute while they are given work have all of it in the first.
    uint64_t submit_ns() const { return submit_ns_; }
    uint64_t wait_ns() const { return wait_ns_; }

    // Copies a tensor's bytes to the host, and counts them.
    void read(const ggml_tensor * tensor, void * dst, size_t offset, size_t size) const;
    // The same of n pieces, stride bytes from one to the next.
    void read_rows(const ggml_tensor * tensor, void * dst, size_t offset, size_t size, int64_t n,
                   size_t stride) const;
    // Whole tensors, all in one wait for the device.
    struct Fetch {
        const ggml_tensor * tensor;
        void * to;
    };
    void read(const std::vector<Fetch> & fetches) const;
    uint64_t bytes_read() const { return bytes_read_; }

  private:
    ggml_backend_dev_t device_ = nullptr;
    dfl_dry_run dry_run_ = DFL_DRY_RUN_NONE;
    ggml_backend_ptr backend_;
    ThreadCount threads_;
    int n_set_ = 0; // thread count that ggml has
    bool packs_weights_ = false;
    std::vector<ggml_backend_buffer_type_t> weights_;
    mutable uint64_t bytes_read_ = 0;
    uint64_t submit_ns_ = 0, wait_ns_ = 0;
};

// The backend of each layer.
using LayerPlace = std::function<Backend &(int64_t il)>;

} // namespace dfl
