// Captures ggml's log, where its errors are explained; a process has one log.
#pragma once

#include <string>

namespace dfl {

// Collects what ggml logs in this thread while it lives, for our own sentence; nothing of it
// reaches the terminal. One may live within another; other threads' lines go where they went
// before.
class LogCapture {
  public:
    LogCapture();
    ~LogCapture();
    LogCapture(const LogCapture &) = delete;
    LogCapture & operator=(const LogCapture &) = delete;

    void append(const char * text) { text_ += text; }
    const std::string & text() const { return text_; }
    // The first line without its function name.
    std::string reason() const;

  private:
    LogCapture * outer_;
    std::string text_;
};

// Keeps what ggml logs of its work from the terminal, warnings and errors aside; some devices have
// a line for every graph they compute. A callback that somebody has set goes on getting all of it.
void quiet_log();

} // namespace dfl
