// Errors of the core: code throws dfl::Error, which guard() turns into a dfl_error of the C ABI.
#pragma once

#include "dflash.h"

#include <cstdarg>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>

namespace dfl {

class Error : public std::runtime_error {
  public:
    Error(dfl_status code, const std::string & message)
        : std::runtime_error(message), code_(code) {}
    dfl_status code() const { return code_; }

  private:
    dfl_status code_;
};

__attribute__((format(printf, 1, 2))) inline std::string format(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    va_list copy;
    va_copy(copy, args);
    const int n = std::vsnprintf(nullptr, 0, fmt, copy);
    va_end(copy);
    std::string text(n > 0 ? n : 0, '\0');
    std::vsnprintf(&text[0], text.size() + 1, fmt, args);
    va_end(args);
    return text;
}

#define DFL_CHECK(condition, status, ...)                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            throw ::dfl::Error(status, ::dfl::format(__VA_ARGS__));                                \
        }                                                                                          \
    } while (0)

// Runs body and returns its exception as a status and message: no exception may cross the C ABI.
template <typename Body>
dfl_status guard(dfl_error * err, Body && body) noexcept {
    dfl_status code = DFL_STATUS_OK;
    const char * message = "";
    std::string text;
    try {
        body();
    } catch (const Error & e) {
        code = e.code();
        text = e.what();
        message = text.c_str();
    } catch (const std::bad_alloc &) {
        code = DFL_STATUS_MEMORY;
        message = "out of host memory";
    } catch (const std::exception & e) {
        code = DFL_STATUS_INTERNAL;
        text = e.what();
        message = text.c_str();
    } catch (...) {
        code = DFL_STATUS_INTERNAL;
        message = "unknown C++ exception";
    }
    if (err != nullptr) {
        err->code = code;
        std::snprintf(err->message, sizeof err->message, "%s", message);
    }
    return code;
}

} // namespace dfl
