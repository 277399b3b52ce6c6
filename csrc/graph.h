// The life of a graph: build, allocate, set inputs, compute, read. Live graphs are kept by shape
// and share one arena: only one runs at a time, and inputs are written before every run.
#pragma once

#include "backend.h"
#include "cache.h"
#include "layers/build.h"
#include "model.h"

#include <functional>
#include <list>

namespace dfl {

struct LiveGraph {
    BatchShape shape;
    ggml_context_ptr ctx;
    ggml_cgraph * graph = nullptr;
    GraphInputs in;
    ggml_tensor * logits = nullptr; // [n_vocab, n_out]
    ggml_tensor * argmax = nullptr; // i32 [n_out]; only where logits do not lie in host memory
};

// Writes an input tensor: directly where it lies in host memory, else through a staging copy. One
// that no node reads has no memory: where no row wants logits, the last layer's mask is idle.
template <typename T>
void write_input(ggml_tensor * tensor, const std::function<void(T * data)> & fill) {
    if (tensor->buffer == nullptr) {
        return;
    }
    if (ggml_backend_buffer_is_host(tensor->buffer)) {
        fill(static_cast<T *>(tensor->data));
        return;
    }
    std::vector<T> staging(ggml_nelements(tensor));
    fill(staging.data());
    ggml_backend_tensor_set(tensor, staging.data(), 0, ggml_nbytes(tensor));
}

class GraphPool {
  public:
    GraphPool(const Model & model, Backend & backend, const KvCache & kv,
              const RecurrentCache & recurrent);

    // The live graph of this shape, built if there is none. Throws DFL_STATUS_MEMORY.
    LiveGraph & get(const BatchShape & shape);
    uint64_t arena_bytes() const;
    // Graphs built so far: a round that builds none reuses what is there.
    int64_t n_built() const { return n_built_; }

  private:
    LiveGraph build(const BatchShape & shape) const;

    const Model & model_;
    Backend & backend_;
    const KvCache & kv_;
    const RecurrentCache & recurrent_;
    ggml_gallocr_ptr arena_;
    std::list<LiveGraph> live_; // most recently used first
    int64_t n_built_ = 0;
};

} // namespace dfl
