#include "log_capture.h"

#include <cstdio>

namespace dfl {

static void print_warnings(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) {
        std::fputs(text, stderr);
    }
}

void quiet_log() {
    std::lock_guard<std::recursive_mutex> lock(LogCapture::mutex());
    ggml_log_callback set = nullptr, by_default = nullptr;
    void *data = nullptr, *no_data = nullptr;
    ggml_log_get(&set, &data);
    ggml_log_set(nullptr, nullptr);
    ggml_log_get(&by_default, &no_data);
    if (set == by_default) {
        ggml_log_set(print_warnings, nullptr);
    } else {
        ggml_log_set(set, data);
    }
}

} // namespace dfl
