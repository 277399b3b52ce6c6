// Capture of ggml's log, the only place where ggml explains its errors. A process has one log.
#pragma once

#include <string>

namespace dfl {

// Collects, and hides, ggml's log lines of this thread while the object lives. Captures may nest.
class LogCapture {
  public:
    LogCapture();
    ~LogCapture();
    LogCapture(const LogCapture &) = delete;
    LogCapture & operator=(const LogCapture &) = delete;

    void append(const char * text) { text_ += text; }
    const std::string & text() const { return text_; }
    // Returns the first captured line without its function name, as the reason of an error.
    std::string reason() const;

  private:
    LogCapture * outer_;
    std::string text_;
};

// Hides ggml's log lines other than warnings and errors; some devices log each graph. A callback
// set by the user still gets every line.
void quiet_log();

} // namespace dfl
