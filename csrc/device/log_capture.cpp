#include "device/log_capture.h"

#include <cstdio>
#include <forward_list>
#include <ggml.h>
#include <mutex>

namespace dfl {

namespace {

struct Callback {
    ggml_log_callback function;
    void * data;
};

thread_local LogCapture * innermost = nullptr;

// Former callbacks of ggml's log. Never destroyed, as ggml may log until the process ends.
struct LogCallbacks {
    std::mutex mutex;
    ggml_log_callback by_default = nullptr;
    std::forward_list<Callback> callbacks; // the user's; a list, as ggml holds their addresses
};

LogCallbacks & log_callbacks() {
    static LogCallbacks * one = new LogCallbacks;
    return *one;
}

void print_warnings(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) {
        std::fputs(text, stderr);
    }
}

// Receives ggml's log lines. data: the callback set before this one; as ggml sets callback and data
// without a lock, a line may arrive with another callback's data.
void route(ggml_log_level level, const char * text, void * data) {
    if (innermost != nullptr) {
        innermost->append(text);
        return;
    }
    Callback before = {print_warnings, nullptr};
    {
        LogCallbacks & all = log_callbacks();
        std::lock_guard<std::mutex> lock(all.mutex);
        for (const Callback & one : all.callbacks) {
            before = &one == data ? one : before;
        }
    }
    before.function(level, text, before.data);
}

} // namespace

LogCapture::LogCapture() : outer_(innermost) {
    quiet_log();
    innermost = this;
}

LogCapture::~LogCapture() { innermost = outer_; }

std::string LogCapture::reason() const {
    const std::string line = text_.substr(0, text_.find('\n'));
    const size_t colon = line.find(": ");
    return colon == std::string::npos ? line : line.substr(colon + 2);
}

void quiet_log() {
    LogCallbacks & all = log_callbacks();
    std::lock_guard<std::mutex> lock(all.mutex);
    Callback set = {nullptr, nullptr};
    ggml_log_get(&set.function, &set.data);
    if (set.function == route) {
        return;
    }
    if (all.by_default == nullptr) {
        // Resets ggml's log to read its default callback; only once, as other threads' lines are
        // unfiltered meanwhile.
        void * no_data = nullptr;
        ggml_log_set(nullptr, nullptr);
        ggml_log_get(&all.by_default, &no_data);
        ggml_log_set(set.function, set.data);
    }
    if (set.function == all.by_default) {
        set = {print_warnings, nullptr};
    }
    for (Callback & one : all.callbacks) {
        if (one.function == set.function && one.data == set.data) {
            ggml_log_set(route, &one);
            return;
        }
    }
    all.callbacks.push_front(set);
    ggml_log_set(route, &all.callbacks.front());
}

} // namespace dfl
