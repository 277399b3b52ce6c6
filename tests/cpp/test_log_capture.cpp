// ggml's log lines go to the thread that captures them, or else to the callback of the application.
#include "check.h"
#include "device/log_capture.h"

#include <atomic>
#include <future>
#include <ggml.h>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

extern "C" void ggml_log_internal(ggml_log_level level, const char * format, ...);

using namespace dfl;

namespace {

constexpr int N_LINES = 2000;

struct Lines {
    std::mutex mutex;
    std::string text;
};

void keep(ggml_log_level, const char * text, void * data) {
    auto * lines = static_cast<Lines *>(data);
    std::lock_guard<std::mutex> lock(lines->mutex);
    lines->text += text;
}

std::string repeated(const std::string & line, int n) {
    std::string text;
    while (n-- > 0) {
        text += line;
    }
    return text;
}

void captures_end_in_any_order() {
    LogCapture outer;
    ggml_log_internal(GGML_LOG_LEVEL_ERROR, "load: broken\nload: more\n");
    {
        LogCapture inner;
        ggml_log_internal(GGML_LOG_LEVEL_INFO, "inner\n");
        CHECK(inner.text() == "inner\n");
    }
    CHECK(outer.text() == "load: broken\nload: more\n");
    CHECK(outer.reason() == "broken");
}

// Loading in one thread never waits for a capture of another thread.
void no_capture_waits_for_another() {
    LogCapture held;
    auto other = std::async(std::launch::async, [] { LogCapture one; });
    if (other.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
        std::fprintf(stderr, "a capture waits for that of another thread\n");
        std::_Exit(1);
    }
}

void each_thread_captures_its_own(Lines & set) {
    set.text.clear();
    std::vector<std::thread> threads;
    std::atomic<int> n_ready{0};
    for (int i = 0; i < 8; ++i) {
        threads.emplace_back([i, &n_ready] {
            const std::string line = "line of " + std::to_string(i) + "\n";
            ++n_ready;
            while (n_ready < 8) {
            }
            for (int round = 0; round < 4; ++round) {
                if (i % 2 == 0) {
                    LogCapture capture;
                    for (int n = 0; n < N_LINES; ++n) {
                        ggml_log_internal(GGML_LOG_LEVEL_INFO, "%s", line.c_str());
                    }
                    CHECK(capture.text() == repeated(line, N_LINES));
                } else {
                    for (int n = 0; n < N_LINES; ++n) {
                        ggml_log_internal(GGML_LOG_LEVEL_INFO, "the same\n");
                    }
                }
            }
        });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    CHECK(set.text == repeated("the same\n", 4 * 4 * N_LINES));
}

} // namespace

int main() {
    Lines first, second;
    ggml_log_set(keep, &first);
    captures_end_in_any_order();
    no_capture_waits_for_another();
    CHECK(first.text.empty());
    each_thread_captures_its_own(first);
    // A new callback replaces the first, with its own user data.
    first.text.clear();
    ggml_log_set(keep, &second);
    each_thread_captures_its_own(second);
    CHECK(first.text.empty());
}
