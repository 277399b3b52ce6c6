#include "device/backend.h"

#include "device/cuda_estimate.h"
#include "device/log_capture.h"
#include "device/zero_pages.h"
#include "error.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <random>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace dfl {

static std::vector<ggml_backend_buffer_type_t> cpu_extra_types() {
    std::vector<ggml_backend_buffer_type_t> types;
    ggml_backend_dev_t cpu = cpu_device();
    auto get =
        reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
    if (get != nullptr) {
        for (ggml_backend_buffer_type_t * type = get(cpu); type != nullptr && *type != nullptr;
             ++type) {
            types.push_back(*type);
        }
    }
    return types;
}

std::vector<std::string> extra_buffer_types() {
    std::vector<std::string> names;
    for (auto type : cpu_extra_types()) {
        names.push_back(ggml_backend_buft_name(type));
    }
    return names;
}

static void set_threads(ggml_backend_t backend, int n_threads) {
    auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(backend)),
        "ggml_backend_set_n_threads"));
    if (set != nullptr) {
        set(backend, n_threads);
    }
}

// Multiplies a quantised [256, 64] matrix, stored in buffer type `buft`, with n_cols columns.
static std::vector<float> probe_product(ggml_backend_t backend, ggml_backend_buffer_type_t buft,
                                        ggml_type type, int64_t n_cols,
                                        const std::vector<float> & values,
                                        const std::vector<float> & columns) {
    constexpr int64_t n_in = 256, n_out = 64;
    const ggml_init_params params = {16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr,
                                     true};
    ggml_context_ptr weight_ctx(ggml_init(params));
    ggml_tensor * w = ggml_new_tensor_2d(weight_ctx.get(), type, n_in, n_out);
    ggml_backend_buffer_ptr weight_buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(weight_ctx.get(), buft));
    DFL_CHECK(weight_buffer != nullptr, DFL_STATUS_MEMORY,
              "buffer type %s cannot be tested: out of memory", ggml_backend_buft_name(buft));
    ggml_context_ptr ctx(ggml_init(params));
    ggml_tensor * x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_in, n_cols);
    ggml_tensor * y = ggml_mul_mat(ctx.get(), w, x);
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, y);
    if (!ggml_backend_supports_op(backend, y)) {
        return {}; // the buffer type does not support this tensor type
    }
    std::vector<char> quantised(ggml_nbytes(w));
    ggml_quantize_chunk(type, values.data(), quantised.data(), 0, n_out, n_in, nullptr);
    ggml_backend_tensor_set(w, quantised.data(), 0, quantised.size());
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
    ggml_backend_tensor_set(x, columns.data(), 0, ggml_nbytes(x));
    DFL_CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS, DFL_STATUS_COMPUTE,
              "buffer type %s cannot be tested: the computation failed",
              ggml_backend_buft_name(buft));
    std::vector<float> result(ggml_nelements(y));
    ggml_backend_tensor_get(y, result.data(), 0, ggml_nbytes(y));
    return result;
}

void probe_buffer_type(const std::string & name) {
    ggml_backend_buffer_type_t buft = nullptr;
    for (auto type : cpu_extra_types()) {
        if (name == ggml_backend_buft_name(type)) {
            buft = type;
        }
    }
    DFL_CHECK(buft != nullptr, DFL_STATUS_ARGUMENT,
              "buffer type %s: the CPU backend has no such type", name.c_str());
    ggml_backend_ptr backend(ggml_backend_dev_init(cpu_device(), nullptr));
    set_threads(backend.get(), 1);
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> values(256 * 64), columns(256 * 16);
    std::generate(values.begin(), values.end(), [&] { return normal(random); });
    std::generate(columns.begin(), columns.end(), [&] { return normal(random); });
    ggml_backend_buffer_type_t plain = ggml_backend_dev_buffer_type(cpu_device());
    for (ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K,
                           GGML_TYPE_Q5_K, GGML_TYPE_Q6_K}) {
        for (int64_t n_cols : {1, 16}) {
            const auto got = probe_product(backend.get(), buft, type, n_cols, values, columns);
            const auto want = probe_product(backend.get(), plain, type, n_cols, values, columns);
            for (size_t i = 0; i < got.size(); ++i) {
                // A correct product is about 16 (sum of 256 products of unit normals), and differs
                // from that of the plain buffer by less than 1, by rounding.
                DFL_CHECK(std::fabs(got[i] - want[i]) < 1.0f, DFL_STATUS_COMPUTE,
                          "buffer type %s multiplies %s wrongly: %g instead of %g", name.c_str(),
                          ggml_type_name(type), got[i], want[i]);
            }
        }
    }
}

Backend::Backend(ggml_backend_dev_t device, int n_threads,
                 const std::vector<std::string> & excluded, dfl_dry_run dry_run, bool repack)
    : device_(device), dry_run_(dry_run), threads_(n_threads > 0 ? n_threads : default_threads()) {
    quiet_log();
    backend_.reset(ggml_backend_dev_init(device_, nullptr));
    DFL_CHECK(backend_ != nullptr, DFL_STATUS_COMPUTE, "device %s cannot be opened", name());
    set_threads(threads_.now());
    packs_weights_ = repack && runs_cpu_nodes();
    if (packs_weights_) {
        for (auto type : cpu_extra_types()) {
            const char * type_name = ggml_backend_buft_name(type);
            if (std::find(excluded.begin(), excluded.end(), type_name) == excluded.end()) {
                weights_.push_back(type);
            }
        }
    }
    weights_.push_back(default_buffer_type());
}

const char * Backend::name() const {
    return is_hypothetical() ? cuda_estimate::NAME : ggml_backend_dev_name(device_);
}

bool Backend::is_host() const {
    return !is_hypothetical() && ggml_backend_buft_is_host(default_buffer_type());
}

bool Backend::runs_cpu_nodes() const { return device_ == cpu_device() && !is_hypothetical(); }

bool Backend::is_cuda() const { return is_hypothetical() || std::strncmp(name(), "CUDA", 4) == 0; }

bool Backend::runs(const ggml_tensor * node) const {
    return is_hypothetical() ? cuda_estimate::runs(node)
                             : ggml_backend_dev_supports_op(device_, node);
}

ggml_backend_buffer_type_t Backend::default_buffer_type() const {
    return ggml_backend_dev_buffer_type(device_);
}

void Backend::check_fits(uint64_t bytes, const char * what) const {
    if (is_dry_run()) {
        return;
    }
    const uint64_t free = free_bytes(device_);
    DFL_CHECK(bytes <= free, DFL_STATUS_MEMORY, "%s needs %llu MiB, %s has %llu MiB free", what,
              (unsigned long long)(bytes >> 20), name(), (unsigned long long)(free >> 20));
}

Allocation Backend::count(ggml_context * ctx, ggml_backend_buffer_type_t buft) const {
    Allocation counted;
    counted.bytes = ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, buft);
    counted.buffer.reset(ggml_backend_buft_alloc_buffer(buft, 0));
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        if (t->buffer == nullptr) {
            t->buffer = counted.buffer.get();
        }
    }
    return counted;
}

Allocation Backend::allocate(ggml_context * ctx, const char * what) const {
    const uint64_t bytes =
        ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, default_buffer_type());
    if (bytes == 0) {
        return {};
    }
    if (is_dry_run()) {
        return count(ctx, default_buffer_type());
    }
    check_fits(bytes, what);
    Allocation memory;
    memory.bytes = bytes;
    if (device_ != cpu_device()) {
        memory.buffer.reset(ggml_backend_alloc_ctx_tensors(ctx, get()));
    } else if ((memory.pages = zero_pages(bytes))) {
        memory.buffer.reset(ggml_backend_cpu_buffer_from_ptr(memory.pages.get(), bytes));
    }
    DFL_CHECK(memory.buffer != nullptr, DFL_STATUS_MEMORY,
              "device %s cannot allocate %llu bytes for %s", name(), (unsigned long long)bytes,
              what);
    use_huge_pages(memory.buffer.get());
    if (memory.pages) {
        ggml_tallocr next = ggml_tallocr_new(memory.buffer.get());
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
            ggml_tallocr_alloc(&next, t);
        }
    } else {
        ggml_backend_buffer_clear(memory.buffer.get(), 0);
    }
    return memory;
}

void Backend::use_huge_pages(ggml_backend_buffer_t buffer) const {
#ifdef __linux__
    // Large pages save TLB misses, about 10 % of a prefill in virtual machines (nested page walks).
    if (is_host()) {
        const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
        const auto base = reinterpret_cast<uintptr_t>(ggml_backend_buffer_get_base(buffer));
        const uintptr_t first = (base + page - 1) / page * page;
        const uintptr_t end = (base + ggml_backend_buffer_get_size(buffer)) / page * page;
        if (first < end) {
            madvise(reinterpret_cast<void *>(first), end - first, MADV_HUGEPAGE);
        }
    }
#else
    (void)buffer;
#endif
}

void Backend::set_threads(int n) {
    if (n != n_set_) {
        dfl::set_threads(get(), n);
        n_set_ = n;
    }
}

void Backend::compute(ggml_cgraph * graph, const std::function<void()> & then) {
    const auto submit = [&] {
        const ggml_status status = ggml_backend_graph_compute_async(get(), graph);
        if (then && status == GGML_STATUS_SUCCESS) {
            then();
        }
        return status;
    };
    compute(submit, [&] { ggml_backend_synchronize(get()); });
}

void Backend::compute(const std::function<ggml_status()> & submit,
                      const std::function<void()> & wait) {
    const auto began = std::chrono::steady_clock::now();
    const ggml_status status = submit();
    const auto submitted = std::chrono::steady_clock::now();
    wait();
    submit_ns_ += std::chrono::nanoseconds(submitted - began).count();
    wait_ns_ += std::chrono::nanoseconds(std::chrono::steady_clock::now() - submitted).count();
    DFL_CHECK(status != GGML_STATUS_ALLOC_FAILED, DFL_STATUS_MEMORY, "device %s: out of memory",
              name());
    DFL_CHECK(status == GGML_STATUS_SUCCESS, DFL_STATUS_COMPUTE,
              "device %s: the computation failed (%s)", name(), ggml_status_to_string(status));
}

void Backend::read(const ggml_tensor * tensor, void * dst, size_t offset, size_t size) const {
    ggml_backend_tensor_get(tensor, dst, offset, size);
    bytes_read_ += size;
}

void Backend::read_rows(const ggml_tensor * tensor, void * dst, size_t offset, size_t size,
                        int64_t n, size_t stride) const {
    ggml_backend_tensor_get_2d(tensor, dst, offset, size, n, stride, size);
    bytes_read_ += size * n;
}

void Backend::read(const std::vector<Fetch> & fetches) const {
    for (const Fetch & fetch : fetches) {
        // Results of nodes that the device cannot run are in CPU memory, read synchronously.
        if (ggml_backend_supports_buft(get(), ggml_backend_buffer_get_type(fetch.tensor->buffer))) {
            ggml_backend_tensor_get_async(get(), fetch.tensor, fetch.to, fetch.offset, fetch.size);
        } else {
            ggml_backend_tensor_get(fetch.tensor, fetch.to, fetch.offset, fetch.size);
        }
        bytes_read_ += fetch.size;
    }
    ggml_backend_synchronize(get());
}

void Backend::start_read(const ggml_tensor * tensor, void * dst, size_t offset, size_t size) const {
    ggml_backend_tensor_get_async(get(), tensor, dst, offset, size);
    bytes_read_ += size;
}

} // namespace dfl
