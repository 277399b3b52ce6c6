#include "arch/model.h"

#include "device/cuda_estimate.h"
#include "error.h"

#include <algorithm>

namespace dfl {

static ggml_backend_dev_t choose_device(const std::string & path, const ModelParams & params) {
    ggml_backend_dev_t device = find_device(params.device);
    const bool hypothetical = params.dry_run == DFL_DRY_RUN_CUDA;
    const int n = params.n_gpu_layers;
    if (n == 0 || (device == cpu_device() && n < 0)) {
        return cpu_device();
    }
    DFL_CHECK(device != cpu_device() || hypothetical, DFL_STATUS_UNSUPPORTED,
              "%s: n_gpu_layers is %d, but %s", path.c_str(), n,
              params.device.empty()
                  ? "ggml finds no GPU; give 0, or build a GPU backend (dflash-backend)"
                  : "the device given is the CPU; give 0, or name a GPU");
    return hypothetical ? cpu_device() : device;
}

Model::Model(const std::string & path, const ModelParams & params)
    : file_(path), arch_(find_arch(file_)), hp_(arch_.read(file_)), dry_run_(params.dry_run) {
    check_no_key_skipped(file_);
    hp_.n_vocab = read_vocab_size(file_);
    device_ = choose_device(path, params);
    if (dry_run_ == DFL_DRY_RUN_CUDA && params.n_gpu_layers == 0) {
        dry_run_ = DFL_DRY_RUN_DEVICE;
    }
    if (on_gpu()) {
        const int64_t n = params.n_gpu_layers;
        split_.first = n < 0 ? 0 : std::max<int64_t>(0, hp_.n_layer() + 1 - n);
        if (hp_.experts.n_expert > 0) {
            split_.first_experts = std::min<int64_t>(params.n_cpu_experts, hp_.n_layer());
        }
    }
    Devices devices(device_, split_, params.n_threads, params.excluded_buffer_types, dry_run_,
                    params.repack);
    WeightLoader loader(file_, hp_, devices);
    arch_.bind(loader);
    weights_ = loader.load(params.progress);
}

const char * Model::device_name() const {
    return dry_run_ == DFL_DRY_RUN_CUDA ? cuda_estimate::NAME : ggml_backend_dev_name(device_);
}

void Model::embed(const int32_t * tokens, int64_t n, float * dst) const {
    embed_rows(*weights_, hp_.n_embd, hp_.embedding_scale, tokens, n, dst);
}

void Model::embed_per_layer(const int32_t * tokens, int64_t n, float * dst) const {
    dfl::embed_per_layer(*weights_, hp_, tokens, n, dst);
}

} // namespace dfl
