// Random small models written with ggml's own GGUF writer, so that no reader here is its own judge.
#pragma once

#include "arch/model.h"

#include <string>

constexpr int TINY_VOCAB = 50;

inline dfl::ModelParams on_cpu() {
    dfl::ModelParams params;
    params.n_gpu_layers = 0;
    return params;
}

// A folder of its own, removed with what is in it.
class TemporaryFolder {
  public:
    TemporaryFolder();
    ~TemporaryFolder();
    TemporaryFolder(const TemporaryFolder &) = delete;
    TemporaryFolder & operator=(const TemporaryFolder &) = delete;
    std::string file(const char * name) const { return path_ + "/" + name; }

  private:
    std::string path_;
};

// Two layers of attention.
void write_tiny_llama(const std::string & path);
// A Gated DeltaNet layer, then one of gated attention.
void write_tiny_qwen35(const std::string & path);
// The same with slow decays: its state remembers a thousand tokens.
void write_lasting_qwen35(const std::string & path);
// A model of any known architecture, two layers of it, of rows that all types' blocks fit; type: of
// its matrices.
void write_wide(const std::string & arch, ggml_type type, const std::string & path);
// Gemma 4 with experts beside its feed-forward.
void write_wide_gemma4_experts(ggml_type type, const std::string & path);
// A DFlash drafter for any of these.
void write_wide_drafter(ggml_type type, const std::string & path);
