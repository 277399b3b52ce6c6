#include "model.h"

#include "card.h"
#include "error.h"

namespace dfl {

static ggml_backend_dev_t choose_device(const std::string & path, const ModelParams & params,
                                        int64_t n_layer) {
    ggml_backend_dev_t device = find_device(params.device);
    const bool imagined = params.measure == DFL_MEASURE_CARD;
    const int n = params.n_gpu_layers;
    if (n == 0 || (device == cpu_device() && n < 0)) {
        return cpu_device();
    }
    DFL_CHECK(device != cpu_device() || imagined, DFL_STATUS_UNSUPPORTED,
              "%s: %d layers on a GPU: %s; a backend module may bring one", path.c_str(), n,
              params.device.empty() ? "ggml has no such device here"
                                    : "the device given is the CPU");
    DFL_CHECK(n < 0 || n > n_layer, DFL_STATUS_UNSUPPORTED,
              "%s: %d of %lld layers on the GPU: only none (0) or all (%lld, head included) can be "
              "placed",
              path.c_str(), n, (long long)n_layer, (long long)n_layer + 1);
    return imagined ? cpu_device() : device;
}

Model::Model(const std::string & path, const ModelParams & params)
    : file_(path), arch_(find_arch(file_)), hp_(arch_.read(file_)), measure_(params.measure) {
    hp_.n_vocab = read_vocab_size(file_);
    device_ = choose_device(path, params, hp_.n_layer());
    if (measure_ == DFL_MEASURE_CARD && params.n_gpu_layers == 0) {
        measure_ = DFL_MEASURE_DEVICE; // nothing is on the card
    }
    Backend backend(device_, params.n_threads, params.excluded_buffer_types, measure_,
                    params.repack);
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

const char * Model::device_name() const {
    return measure_ == DFL_MEASURE_CARD ? card::NAME : ggml_backend_dev_name(device_);
}

void Model::embed(const int32_t * tokens, int64_t n, float * dst) const {
    embed_rows(*weights_, hp_.n_embd, tokens, n, dst);
}

} // namespace dfl
