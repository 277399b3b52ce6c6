// Placement of weights: mapped file, best buffer type of ggml, or packed for our own CPU kernels.
#include "device/devices.h"
#include "device/log_capture.h"
#include "error.h"
#include "gguf_schema.h"
#include "model/weights.h"

#include <algorithm>

namespace dfl {

ggml_context * WeightLoader::context_for(const Place & place) {
    auto context = contexts_.find(place);
    if (context == contexts_.end()) {
        // A ggml context has room for the file's tensors, a tied head, and one more for each layer.
        const size_t size = (file_.tensor_count() + 1 + hp_.n_layer()) * ggml_tensor_overhead();
        weights_.contexts.emplace_back(ggml_init({size, nullptr, true}));
        context = contexts_.emplace(place, weights_.contexts.back().get()).first;
    }
    return context->second;
}

static bool op_runs(const Backend & backend, ggml_backend_buffer_type_t buft,
                    const ggml_tensor * meta, ggml_op op, int64_t n_expert_used) {
    ggml_context_ptr ctx(ggml_init({8 * ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * w = ggml_dup_tensor(ctx.get(), meta);
    constexpr int64_t rows = 512;
    ggml_tensor * node = nullptr;
    if (op == GGML_OP_MUL_MAT_ID) {
        ggml_tensor * x =
            ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, w->ne[0], n_expert_used, rows);
        ggml_tensor * ids = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, n_expert_used, rows);
        node = ggml_mul_mat_id(ctx.get(), w, x, ids);
    } else {
        ggml_tensor * x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, w->ne[0], rows);
        node = ggml_mul_mat(ctx.get(), w, x);
    }
    // A buffer of 0 bytes is enough to tell the device the buffer type of the weight.
    ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(buft, 0));
    w->buffer = buffer.get();
    const bool runs = backend.runs(node);
    w->buffer = nullptr;
    return runs;
}

WeightLoader::Place WeightLoader::choose(const ggml_tensor * meta, ggml_op op) const {
    const Backend & backend = devices_.of_weight(meta->name);
    if (op == GGML_OP_MUL_MAT || op == GGML_OP_MUL_MAT_ID) {
        for (auto buft : backend.weight_buffer_types()) {
            if (op_runs(backend, buft, meta, op, std::max<int64_t>(1, hp_.experts.n_used))) {
                return {&backend, buft};
            }
        }
        throw Error(DFL_STATUS_UNSUPPORTED,
                    format("%s: device %s cannot multiply with tensor %s of type %s",
                           file_.path().c_str(), backend.name(), meta->name,
                           ggml_type_name(meta->type)));
    }
    return {&backend, backend.default_buffer_type()};
}

// Mapped pages serve the CPU in place, if aligned as ggml's kernels expect.
bool WeightLoader::can_map(const std::string & name, const Place & place) const {
    const auto address = reinterpret_cast<uintptr_t>(file_.tensor_data(name));
    return place.backend->is_host() && place.type == place.backend->default_buffer_type() &&
           address % ggml_backend_buft_get_alignment(place.type) == 0;
}

const cpu::PackedProduct * WeightLoader::product_for(const std::string & name,
                                                     ggml_type type) const {
    const Backend & backend = devices_.of_weight(name);
    if (!backend.runs_cpu_nodes()) {
        return nullptr;
    }
    return backend.packs_weights() ? cpu::packed_product(type) : cpu::product_in_place(type);
}

const PackedMatrix * WeightLoader::packed(const std::string & name, ggml_type type,
                                          PackedMatrix matrix) {
    matrix.product = product_for(name, type);
    matrix.name = name;
    if (matrix.product == nullptr || matrix.bytes() == 0) {
        return nullptr;
    }
    weights_.packed.push_back(matrix);
    TensorRequest request;
    request.file_names = {name};
    request.packed = &weights_.packed.back();
    request.mapped = matrix.product->in_place &&
                     reinterpret_cast<uintptr_t>(file_.tensor_data(name)) % sizeof(float) == 0;
    if (request.mapped) {
        request.packed->stride = matrix.n_file_rows() * ggml_row_size(type, matrix.n_in);
    }
    requests_.push_back(request);
    return request.packed;
}

// Throws if the file has an unused tensor: ignoring it would change the model silently.
void WeightLoader::check_nothing_left() const {
    std::set<std::string> used = read_directly_;
    for (const TensorRequest & request : requests_) {
        used.insert(request.file_names.begin(), request.file_names.end());
    }
    for (int64_t i = 0; i < file_.tensor_count(); ++i) {
        const std::string name = file_.tensor_name(i);
        int block = -1;
        const bool is_other_block = std::sscanf(name.c_str(), "blk.%d.", &block) == 1 &&
                                    (block < first_block_ || block >= first_block_ + hp_.n_layer());
        const bool hint =
            name.size() > 12 && name.compare(name.size() - 12, 12, ".input_scale") == 0;
        const bool is_of_mtp = name == schema::TENSOR_D2T &&
                               file_.integer(schema::KEY_NEXTN_PREDICT_LAYERS).value_or(0) > 0;
        DFL_CHECK(is_other_block || hint || is_of_mtp || name == schema::TENSOR_TOKEN_EMBD ||
                      used.count(name) != 0,
                  DFL_STATUS_UNSUPPORTED,
                  "%s: tensor %s is not part of architecture %s as supported here",
                  file_.path().c_str(), name.c_str(), file_.arch().c_str());
    }
}

uint64_t WeightLoader::file_bytes(const TensorRequest & request) const {
    uint64_t bytes = 0;
    for (const std::string & name : request.file_names) {
        bytes += ggml_nbytes(file_.tensor(name));
    }
    if (!request.rows.empty()) {
        return request.rows.size() * file_.tensor(request.file_names[0])->nb[1];
    }
    const PackedMatrix * packed = request.packed;
    return packed != nullptr ? bytes / packed->n_file_rows() * packed->n_out : bytes;
}

uint64_t WeightLoader::bytes_of(const TensorRequest & request) {
    return request.packed != nullptr ? request.packed->bytes() : ggml_nbytes(request.tensor);
}

void WeightLoader::map_in_place() {
    std::map<const FileMapping *, ggml_backend_buffer_t> buffers;
    for (const TensorRequest & request : requests_) {
        if (!request.mapped) {
            continue;
        }
        void * data = const_cast<void *>(file_.tensor_data(request.file_names[0]));
        if (request.packed != nullptr) {
            const PackedMatrix & packed = *request.packed;
            request.packed->data =
                static_cast<char *>(data) +
                packed.first_row * ggml_row_size(packed.product->type, packed.n_in);
        } else {
            const FileMapping & map = file_.mapping_of(request.file_names[0]);
            ggml_backend_buffer_t & buffer = buffers[&map];
            if (buffer == nullptr) {
                buffer = ggml_backend_dev_buffer_from_host_ptr(cpu_device(), map.data(), map.size(),
                                                               map.size());
                DFL_CHECK(buffer != nullptr, DFL_STATUS_MEMORY,
                          "%s: the CPU cannot use mapped memory", file_.path().c_str());
                weights_.buffers.emplace_back(buffer);
                ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            }
            ggml_backend_tensor_alloc(buffer, request.tensor, data);
        }
        weights_.mapped_bytes += bytes_of(request);
        if (data == weights_.token_embd) {
            weights_.embedding_bytes -= ggml_nbytes(file_.tensor(schema::TENSOR_TOKEN_EMBD));
        }
    }
}

void WeightLoader::count_copied(const Backend & backend, uint64_t bytes) {
    weights_.copied_bytes += bytes;
    weights_.cpu_split_bytes += &backend == devices_.cpu() ? bytes : 0;
}

void WeightLoader::count_experts() {
    for (const TensorRequest & request : requests_) {
        if (!request.file_names.empty() && is_expert(request.file_names[0])) {
            const bool on_cpu = &devices_.of_weight(request.file_names[0]) == devices_.cpu();
            weights_.expert_bytes += bytes_of(request);
            weights_.cpu_expert_bytes += on_cpu ? bytes_of(request) : 0;
        }
    }
}

void WeightLoader::allocate(const Place & place, ggml_context * ctx) {
    uint64_t bytes = 0;
    for (const TensorRequest & request : requests_) {
        if (request.tensor != nullptr && !request.mapped &&
            ggml_get_tensor(ctx, request.tensor->name) == request.tensor) {
            bytes += ggml_backend_buft_get_alloc_size(place.type, request.tensor);
        }
    }
    if (bytes == 0) {
        return;
    }
    const Backend & backend = *place.backend;
    ggml_backend_buffer_ptr buffer;
    if (backend.is_dry_run()) {
        Allocation counted = backend.count(ctx, place.type);
        count_copied(backend, counted.bytes);
        buffer = std::move(counted.buffer);
    } else {
        backend.check_fits(bytes, format("weights of %s", file_.path().c_str()).c_str());
        // ggml's allocation skips tensors that have a buffer, such as mapped tensors.
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, place.type));
        DFL_CHECK(buffer != nullptr, DFL_STATUS_MEMORY,
                  "%s: device %s cannot allocate %llu bytes for weights", file_.path().c_str(),
                  backend.name(), (unsigned long long)bytes);
        backend.use_huge_pages(buffer.get());
        count_copied(backend, ggml_backend_buffer_get_size(buffer.get()));
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    weights_.buffers.push_back(std::move(buffer));
}

void WeightLoader::allocate_packed() {
    const Backend & backend = devices_.host();
    constexpr uint64_t alignment = 64;
    uint64_t bytes = 0;
    for (const PackedMatrix & matrix : weights_.packed) {
        bytes += matrix.data == nullptr ? GGML_PAD(matrix.bytes(), alignment) : 0;
    }
    count_copied(backend, bytes);
    if (bytes == 0 || backend.is_dry_run()) {
        return;
    }
    backend.check_fits(bytes, format("rearranging the weights of %s (--no-repack leaves them in "
                                     "the file)",
                                     file_.path().c_str())
                                  .c_str());
    weights_.buffers.emplace_back(
        ggml_backend_buft_alloc_buffer(backend.default_buffer_type(), bytes));
    ggml_backend_buffer_t buffer = weights_.buffers.back().get();
    DFL_CHECK(buffer != nullptr, DFL_STATUS_MEMORY,
              "%s: device %s cannot allocate %llu bytes for weights", file_.path().c_str(),
              backend.name(), (unsigned long long)bytes);
    backend.use_huge_pages(buffer);
    auto * next = static_cast<char *>(ggml_backend_buffer_get_base(buffer));
    for (PackedMatrix & matrix : weights_.packed) {
        if (matrix.data == nullptr) {
            matrix.data = next;
            next += GGML_PAD(matrix.bytes(), alignment);
        }
    }
}

void WeightLoader::record_placement(const TensorRequest & request) {
    const std::string kernels = request.packed != nullptr
                                    ? request.packed->product->name()
                                    : ggml_backend_buffer_name(request.tensor->buffer);
    auto placement = std::find_if(weights_.placements.begin(), weights_.placements.end(),
                                  [&](const Placement & p) { return p.kernels == kernels; });
    if (placement == weights_.placements.end()) {
        placement = weights_.placements.insert(placement, {kernels, 0});
    }
    placement->bytes += bytes_of(request);
}

void WeightLoader::fill(const TensorRequest & request) const {
    if (request.file_names.empty()) {
        ggml_backend_tensor_set(request.tensor, request.values.data(), 0,
                                ggml_nbytes(request.tensor));
        return;
    }
    const void * rows = file_.tensor_data(request.file_names[0]);
    // Buffer types that rearrange weights accept only whole tensors.
    std::vector<char> whole;
    if (!request.rows.empty()) {
        const size_t row_size = file_.tensor(request.file_names[0])->nb[1];
        whole.reserve(file_bytes(request));
        for (const int64_t row : request.rows) {
            const auto * data = static_cast<const char *>(rows) + row * row_size;
            whole.insert(whole.end(), data, data + row_size);
        }
        rows = whole.data();
    } else if (!file_.are_adjacent(request.file_names)) {
        whole.reserve(file_bytes(request));
        for (const std::string & name : request.file_names) {
            const auto * data = static_cast<const char *>(file_.tensor_data(name));
            whole.insert(whole.end(), data, data + ggml_nbytes(file_.tensor(name)));
        }
        rows = whole.data();
    }
    if (request.packed != nullptr) {
        request.packed->pack(rows, devices_.host().n_threads());
        if (request.packed->first_row + request.packed->n_out < request.packed->n_file_rows()) {
            return; // keeps the mapped pages: another request reads the tensor's other rows
        }
    } else {
        ggml_backend_tensor_set(request.tensor, rows, 0, ggml_nbytes(request.tensor));
    }
    for (const std::string & name : request.file_names) {
        file_.mapping_of(name).release(file_.tensor_data(name), ggml_nbytes(file_.tensor(name)));
    }
}

std::unique_ptr<Weights> WeightLoader::load(const LoadProgress & progress) {
    LogCapture quiet; // ggml logs a line for each repacked tensor
    check_nothing_left();
    map_in_place();
    for (auto [place, ctx] : contexts_) {
        allocate(place, ctx);
    }
    allocate_packed();
    count_experts();
    if (devices_.main().is_dry_run()) {
        return std::move(owned_);
    }
    uint64_t total = 0, done = 0;
    for (const TensorRequest & request : requests_) {
        total += file_bytes(request);
    }
    for (const TensorRequest & request : requests_) {
        if (!request.mapped) {
            fill(request);
        }
        record_placement(request);
        done += file_bytes(request);
        DFL_CHECK(!progress || !progress(done, total), DFL_STATUS_CANCELLED,
                  "loading %s was cancelled", file_.path().c_str());
    }
    return std::move(owned_);
}

} // namespace dfl
