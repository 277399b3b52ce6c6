// A ggml backend module for tests: a device that computes with ggml's CPU kernels, to the same bits
// as the CPU. Its buffers are inaccessible outside of ggml's calls: host access is a segmentation
// fault.
//
// Environment, read at each use: FAKE_DEVICE_MIB, memory in MiB (default 4096). FAKE_DEVICE_LACKS,
// unsupported operations, comma-separated names of GGML_OP; SHARED_MATRIX: products whose matrix
// serves several groups. FAKE_DEVICE_MISLEADS: TOP_K of NaNs returns a row out of range, as on
// Vulkan.
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

namespace {

// Memory of a buffer, mapped twice: `base` is open to kernels only, copies go through `copies`.
struct Memory {
    char * base;
    char * copies;
    size_t size;
    char * at(const void * data) const { return copies + (static_cast<const char *>(data) - base); }
};

struct Device {
    size_t used = 0;
    ggml_backend_buffer_type buft = {};
    ggml_backend_device device = {};
};

std::mutex mutex;
std::set<Memory *> memories;
Device fake;

size_t total() {
    const char * mib = std::getenv("FAKE_DEVICE_MIB");
    return (mib != nullptr ? std::strtoull(mib, nullptr, 10) : 4096) << 20;
}

bool lacks(const char * operation) {
    const char * list = std::getenv("FAKE_DEVICE_LACKS");
    std::stringstream names(list != nullptr ? list : "");
    for (std::string name; std::getline(names, name, ',');) {
        if (name == operation) {
            return true;
        }
    }
    return false;
}

// Makes the device's memory accessible to kernels during its lifetime.
class Opened {
  public:
    Opened() : lock_(mutex) { protect(PROT_READ | PROT_WRITE); }
    ~Opened() { protect(PROT_NONE); }

  private:
    static void protect(int how) {
        for (const Memory * memory : memories) {
            mprotect(memory->base, memory->size, how);
        }
    }
    std::lock_guard<std::mutex> lock_;
};

Memory & memory_of(ggml_backend_buffer_t buffer) { return *static_cast<Memory *>(buffer->context); }

void free_buffer(ggml_backend_buffer_t buffer) {
    Memory * memory = &memory_of(buffer);
    std::lock_guard<std::mutex> lock(mutex);
    fake.used -= memory->size;
    memories.erase(memory);
    munmap(memory->base, memory->size);
    munmap(memory->copies, memory->size);
    delete memory;
}
void * get_base(ggml_backend_buffer_t buffer) { return memory_of(buffer).base; }
void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset,
                   size_t size) {
    std::memset(memory_of(buffer).at(tensor->data) + offset, value, size);
}
std::atomic<uint64_t> kv_bytes; // bytes of K and V copied between host and device
std::atomic<uint64_t> in_bytes; // bytes copied to the device
void count_bytes(const ggml_tensor * tensor, size_t size) {
    if (std::strncmp(tensor->name, "k.", 2) == 0 || std::strncmp(tensor->name, "v.", 2) == 0) {
        kv_bytes += size;
    }
}
void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data,
                size_t offset, size_t size) {
    count_bytes(tensor, size);
    in_bytes += size;
    std::memcpy(memory_of(buffer).at(tensor->data) + offset, data, size);
}
void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data,
                size_t offset, size_t size) {
    count_bytes(tensor, size);
    std::memcpy(data, memory_of(buffer).at(tensor->data) + offset, size);
}
void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(memory_of(buffer).copies, value, buffer->size);
}

const char * buft_name(ggml_backend_buffer_type_t) { return "Fake0"; }
size_t alignment(ggml_backend_buffer_type_t) { return 64; }

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    constexpr size_t page = 4096;
    const size_t whole = std::max(page, (size + page - 1) / page * page);
    std::lock_guard<std::mutex> lock(mutex);
    if (fake.used + whole > total()) {
        return nullptr;
    }
    const int file = memfd_create("device", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(whole)) != 0) {
        return nullptr;
    }
    void * base = mmap(nullptr, whole, PROT_NONE, MAP_SHARED, file, 0);
    void * copies = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (base == MAP_FAILED || copies == MAP_FAILED) {
        return nullptr;
    }
    auto * memory = new Memory{static_cast<char *>(base), static_cast<char *>(copies), whole};
    memories.insert(memory);
    fake.used += whole;
    ggml_backend_buffer_i iface = {};
    iface.free_buffer = free_buffer;
    iface.get_base = get_base;
    iface.memset_tensor = memset_tensor;
    iface.set_tensor = set_tensor;
    iface.get_tensor = get_tensor;
    iface.clear = clear;
    return ggml_backend_buffer_init(buft, iface, memory, size);
}

const char * backend_name(ggml_backend_t) { return "Fake0"; }
void free_backend(ggml_backend_t backend) {
    ggml_backend_free(static_cast<ggml_backend_t>(backend->context));
    delete backend;
}

bool has_nans(const ggml_tensor * tensor) {
    const auto * values = static_cast<const float *>(tensor->data);
    return std::any_of(values, values + ggml_nelements(tensor), [](float x) { return x != x; });
}

ggml_status compute_misled(ggml_backend_t worker, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_cgraph one = ggml_graph_view(graph, i, i + 1);
        const ggml_status status = ggml_backend_graph_compute(worker, &one);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_TOP_K && has_nans(node->src[0])) {
            static_cast<int32_t *>(node->data)[0] = INT32_MAX;
        }
    }
    return GGML_STATUS_SUCCESS;
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    Opened opened;
    auto worker = static_cast<ggml_backend_t>(backend->context);
    return std::getenv("FAKE_DEVICE_MISLEADS") != nullptr
               ? compute_misled(worker, graph)
               : ggml_backend_graph_compute(worker, graph);
}

ggml_backend_dev_t cpu() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

ggml_guid_t guid() {
    static ggml_guid id = {0xfa, 0x4e, 0xde, 0xc1};
    return &id;
}

ggml_backend_t init_backend(ggml_backend_dev_t dev, const char *) {
    ggml_backend_t worker = ggml_backend_dev_init(cpu(), nullptr);
    auto set_threads =
        reinterpret_cast<ggml_backend_set_n_threads_t>(ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(cpu()), "ggml_backend_set_n_threads"));
    set_threads(worker, 1);
    ggml_backend_i iface = {};
    iface.get_name = backend_name;
    iface.free = free_backend;
    iface.graph_compute = graph_compute;
    return new ggml_backend{guid(), iface, dev, worker};
}

const char * device_name(ggml_backend_dev_t) { return "Fake0"; }
const char * description(ggml_backend_dev_t) { return "memory out of the host's reach"; }
void get_memory(ggml_backend_dev_t, size_t * free, size_t * all) {
    *all = total();
    *free = *all - std::min(*all, fake.used);
}
enum ggml_backend_dev_type type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }
void get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props = {};
    props->name = device_name(dev);
    props->description = description(dev);
    get_memory(dev, &props->memory_free, &props->memory_total);
    props->type = type(dev);
}
ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t) { return &fake.buft; }
bool shares_matrices(const ggml_tensor * op) {
    return op->op == GGML_OP_MUL_MAT && op->src[0]->ne[3] != op->src[1]->ne[3];
}
bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return !lacks(ggml_op_name(op->op)) && !(lacks("SHARED_MATRIX") && shares_matrices(op)) &&
           op->op != GGML_OP_CUSTOM && ggml_backend_dev_supports_op(cpu(), op);
}
bool supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft == buffer_type(dev);
}

// As ggml's CUDA backend: rows times heads of most operations, from 32 on.
bool offload_op(ggml_backend_dev_t, const ggml_tensor * op) {
    switch (op->op) {
    case GGML_OP_GET_ROWS:
        return false;
    case GGML_OP_MUL_MAT:
        return op->ne[1] >= 32;
    case GGML_OP_MUL_MAT_ID:
    case GGML_OP_ROPE:
        return op->ne[2] >= 32;
    default:
        return ggml_nrows(op) >= 32;
    }
}

const char * reg_name(ggml_backend_reg_t) { return "Fake"; }
size_t count(ggml_backend_reg_t) { return 1; }
ggml_backend_dev_t get_device(ggml_backend_reg_t, size_t) { return &fake.device; }
void * no_functions(ggml_backend_reg_t, const char *) { return nullptr; }

ggml_backend_reg reg = {
    GGML_BACKEND_API_VERSION, {reg_name, count, get_device, no_functions}, nullptr};

} // namespace

extern "C" __attribute__((visibility("default"))) uint64_t fake_kv_bytes(void) { return kv_bytes; }
extern "C" __attribute__((visibility("default"))) uint64_t fake_in_bytes(void) { return in_bytes; }

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    fake.buft.iface.get_name = buft_name;
    fake.buft.iface.alloc_buffer = alloc_buffer;
    fake.buft.iface.get_alignment = alignment;
    fake.buft.device = &fake.device;
    fake.device.iface.get_name = device_name;
    fake.device.iface.get_description = description;
    fake.device.iface.get_memory = get_memory;
    fake.device.iface.get_type = type;
    fake.device.iface.get_props = get_props;
    fake.device.iface.init_backend = init_backend;
    fake.device.iface.get_buffer_type = buffer_type;
    fake.device.iface.supports_op = supports_op;
    fake.device.iface.supports_buft = supports_buft;
    fake.device.iface.offload_op = offload_op;
    fake.device.reg = &reg;
    return &reg;
}
