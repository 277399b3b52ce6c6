#include "graph/io_block.h"

#include "error.h"

#include <algorithm>
#include <vector>

namespace dfl {

// Returns the inputs that nodes of a graph read and that have no memory yet, each once.
static std::vector<ggml_tensor *> inputs_of(ggml_cgraph * graph) {
    std::vector<ggml_tensor *> inputs;
    auto add = [&](ggml_tensor * tensor) {
        if (tensor != nullptr && tensor->view_src != nullptr) {
            tensor = tensor->view_src;
        }
        if (tensor != nullptr && (tensor->flags & GGML_TENSOR_FLAG_INPUT) != 0 &&
            tensor->buffer == nullptr &&
            std::find(inputs.begin(), inputs.end(), tensor) == inputs.end()) {
            inputs.push_back(tensor);
        }
    };
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        std::for_each_n(ggml_graph_node(graph, i)->src, GGML_MAX_SRC, add);
    }
    return inputs;
}

void IoBlock::grow(size_t bytes) {
    ggml_context_ptr ctx(ggml_init({ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * block = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, bytes);
    Allocation memory = backend_.allocate(ctx.get(), "inputs and results of graphs");
    if (!backend_.is_dry_run()) {
        ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(backend_.device());
        if (type == nullptr) {
            type = ggml_backend_dev_buffer_type(cpu_device());
        }
        host_.reset(ggml_backend_buft_alloc_buffer(type, bytes));
        DFL_CHECK(host_ != nullptr, DFL_STATUS_MEMORY,
                  "cannot allocate %llu bytes of main memory for inputs and results of graphs",
                  (unsigned long long)bytes);
    }
    ctx_ = std::move(ctx);
    memory_ = std::move(memory);
    block_ = block;
    ++n_moves_;
}

IoBytes IoBlock::place(ggml_cgraph * graph, const std::vector<ggml_tensor *> & results) {
    std::vector<ggml_tensor *> tensors = inputs_of(graph);
    const size_t n_inputs = tensors.size();
    tensors.insert(tensors.end(), results.begin(), results.end());
    ggml_backend_buffer_type_t type = backend_.default_buffer_type();
    const size_t alignment = ggml_backend_buft_get_alignment(type);
    std::vector<size_t> offsets = {0};
    for (const ggml_tensor * tensor : tensors) {
        const size_t end = offsets.back() + ggml_backend_buft_get_alloc_size(type, tensor);
        offsets.push_back((end + alignment - 1) / alignment * alignment);
    }
    if (block_ == nullptr || offsets.back() > ggml_nbytes(block_)) {
        grow(offsets.back());
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
        if (backend_.is_dry_run()) {
            tensors[i]->buffer = memory_.buffer.get(); // dry run: a buffer, but no data
        } else {
            ggml_backend_tensor_alloc(memory_.buffer.get(), tensors[i],
                                      static_cast<char *>(block_->data) + offsets[i]);
        }
    }
    return {offsets[n_inputs], offsets.back() - offsets[n_inputs]};
}

void * IoBlock::host(const ggml_tensor * tensor) const {
    const auto offset =
        static_cast<const char *>(tensor->data) - static_cast<const char *>(block_->data);
    return static_cast<char *>(ggml_backend_buffer_get_base(host_.get())) + offset;
}

void IoBlock::upload(const IoBytes & bytes) {
    if (bytes.inputs > 0) {
        ggml_backend_tensor_set_async(backend_.get(), block_,
                                      ggml_backend_buffer_get_base(host_.get()), 0, bytes.inputs);
    }
}

void IoBlock::download(const IoBytes & bytes) {
    if (bytes.results > 0) {
        char * to = static_cast<char *>(ggml_backend_buffer_get_base(host_.get())) + bytes.inputs;
        backend_.start_read(block_, to, bytes.inputs, bytes.results);
    }
}

} // namespace dfl
