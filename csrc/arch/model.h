// A loaded model: immutable, and shareable between engines and threads.
#pragma once

#include "arch/arch.h"
#include "device/devices.h"
#include "model/gguf_file.h"
#include "model/weights.h"

#include <memory>
#include <string>
#include <vector>

namespace dfl {

// Choices of a drafter that replace those of its file, for files that were written wrongly.
struct DraftChoices {
    enum class Scale { AUTO, RAW, SQRT } embedding_scale = Scale::AUTO;
    enum class Attention { AUTO, CAUSAL, BIDIRECTIONAL } attention = Attention::AUTO;
    int64_t tap_shift = 0;      // added to the layer index of every tap
    bool is_unwindowed = false; // layers with a window attend to all positions
    int64_t vocab = 0;          // number of lowest tokens in the head of an MTP layer; 0: all
};

struct ModelParams {
    // Number of last layers on the GPU, the head included; negative: all, if there is a GPU.
    int n_gpu_layers = -1;
    std::vector<std::string> excluded_buffer_types;
    LoadProgress progress;
    std::string device = "";                // device of layers not on the CPU; empty: the first GPU
    int n_threads = 0;                      // threads that repack weights; 0: default_threads()
    bool repack = true;                     // weights may be repacked for faster CPU kernels
    dfl_dry_run dry_run = DFL_DRY_RUN_NONE; // a dry run assigns weights to devices, but loads none
    int n_cpu_experts = 0;                  // number of first layers with experts on the CPU
    bool drafter_on_cpu = false;            // a drafter stays on the CPU beside another device
    DraftChoices draft;
};

class Model {
  public:
    Model(const std::string & path, const ModelParams & params);

    const GgufFile & file() const { return file_; }
    const Hparams & hparams() const { return hp_; }
    const Arch & arch() const { return arch_; }
    const Weights & weights() const { return *weights_; }
    // Returns the device that holds the weights; the CPU in a dry run for a hypothetical GPU.
    ggml_backend_dev_t device() const { return device_; }
    const Split & split() const { return split_; }
    dfl_dry_run dry_run() const { return dry_run_; }
    const char * device_name() const;
    bool on_gpu() const { return dry_run_ == DFL_DRY_RUN_CUDA || device_ != cpu_device(); }

    // Writes the scaled embeddings of n tokens to dst [n_embd, n].
    void embed(const int32_t * tokens, int64_t n, float * dst) const;
    // Writes the scaled per-layer embeddings of n tokens to dst [n_per_layer * n_layer, n].
    void embed_per_layer(const int32_t * tokens, int64_t n, float * dst) const;

  private:
    GgufFile file_;
    const Arch & arch_;
    Hparams hp_;
    dfl_dry_run dry_run_;
    ggml_backend_dev_t device_ = nullptr;
    Split split_;
    std::unique_ptr<Weights> weights_;
};

} // namespace dfl
