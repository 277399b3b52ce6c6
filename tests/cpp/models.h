// Paths and load parameters of the models that write_models.py writes for the C++ tests.
#pragma once

#include "arch/model.h"

#include <cstdlib>
#include <string>

constexpr int N_VOCAB = 301; // vocabulary size in tests/support/small_models.py

inline dfl::ModelParams on_cpu() {
    dfl::ModelParams params;
    params.n_gpu_layers = 0;
    return params;
}

inline std::string models_folder() { return std::getenv("DFLASH_TEST_MODELS"); }

inline std::string model_path(const std::string & name) {
    return models_folder() + "/" + name + ".gguf";
}
