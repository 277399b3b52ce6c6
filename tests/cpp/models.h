// The models that write_models.py wrote.
#pragma once

#include "arch/model.h"

#include <cstdlib>
#include <string>

constexpr int N_VOCAB = 301; // as small_models.py has it

inline dfl::ModelParams on_cpu() {
    dfl::ModelParams params;
    params.n_gpu_layers = 0;
    return params;
}

inline std::string models_folder() { return std::getenv("DFLASH_TEST_MODELS"); }

// Path of a file of that folder, without its ending.
inline std::string model_path(const std::string & name) {
    return models_folder() + "/" + name + ".gguf";
}
