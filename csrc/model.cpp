#include "model.h"

#include "error.h"

namespace dfl {

static bool use_gpu(const std::string & path, int n_gpu_layers, int64_t n_layer) {
    if (n_gpu_layers == 0 || ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU) == nullptr) {
        return false;
    }
    DFL_CHECK(n_gpu_layers < 0 || n_gpu_layers > n_layer, DFL_STATUS_UNSUPPORTED,
              "%s: %d of %lld layers on the GPU: only none (0) or all (%lld, head included) can be "
              "placed",
              path.c_str(), n_gpu_layers, (long long)n_layer, (long long)n_layer + 1);
    return true;
}

Model::Model(const std::string & path, const ModelParams & params)
    : file_(path), arch_(find_arch(file_)), hp_(arch_.read(file_)) {
    hp_.n_vocab = read_vocab_size(file_);
    on_gpu_ = use_gpu(path, params.n_gpu_layers, hp_.n_layer());
    Backend backend(on_gpu_, params.n_threads, params.repack, params.excluded_buffer_types);
    device_name_ = backend.name();
    if (!backend.is_host() && hp_.n_recurrent() > 0) {
        const int64_t d = hp_.recurrent.d_state;
        DFL_CHECK(d == 16 || d == 32 || d == 64 || d == 128, DFL_STATUS_UNSUPPORTED,
                  "%s: device %s has no Gated DeltaNet kernel for heads of %lld", path.c_str(),
                  backend.name(), (long long)d);
    }
    WeightLoader loader(file_, hp_, backend);
    arch_.bind(loader);
    weights_ = loader.load(params.progress);
}

void Model::embed(const int32_t * tokens, int64_t n, float * dst) const {
    embed_rows(*weights_, hp_.n_embd, tokens, n, dst);
}

} // namespace dfl
