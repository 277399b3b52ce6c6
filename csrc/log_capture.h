// ggml explains itself only through its log, which is one for the process.
#pragma once

#include <ggml.h>
#include <mutex>
#include <string>

namespace dfl {

// Collects what ggml logs while it lives, for our own sentence; nothing reaches the terminal.
class LogCapture {
  public:
    LogCapture() : lock_(mutex()) {
        ggml_log_get(&old_callback_, &old_data_);
        ggml_log_set(collect, &text_);
    }
    ~LogCapture() { ggml_log_set(old_callback_, old_data_); }
    LogCapture(const LogCapture &) = delete;
    LogCapture & operator=(const LogCapture &) = delete;

    // The first line without its function name.
    std::string reason() const {
        std::string line = text_.substr(0, text_.find('\n'));
        const size_t colon = line.find(": ");
        return colon == std::string::npos ? line : line.substr(colon + 2);
    }

    // Held by whoever changes the callback.
    static std::recursive_mutex & mutex() {
        static std::recursive_mutex one; // a progress callback may load another file
        return one;
    }

  private:
    static void collect(ggml_log_level, const char * text, void * data) {
        static_cast<std::string *>(data)->append(text);
    }

    std::lock_guard<std::recursive_mutex> lock_;
    ggml_log_callback old_callback_ = nullptr;
    void * old_data_ = nullptr;
    std::string text_;
};

// Keeps what ggml logs of its work from the terminal, warnings and errors aside; some devices have
// a line for every graph they compute. A callback that somebody has set stays.
void quiet_log();

} // namespace dfl
