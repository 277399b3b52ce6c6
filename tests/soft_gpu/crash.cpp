#include "crash.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>

namespace soft_gpu {

thread_local const Warp * running_warp = nullptr;

namespace {

thread_local const Kernel * running_kernel = nullptr;

void report(int signal) {
    char text[4096];
    if (running_kernel != nullptr) {
        const bool is_known =
            running_warp != nullptr && running_warp->pc < running_kernel->texts.size();
        const int n =
            std::snprintf(text, sizeof(text), "SOFT GPU FAILED: %s: an address is not mapped: %s\n",
                          running_kernel->name.c_str(),
                          is_known ? running_kernel->texts[running_warp->pc].c_str() : "");
        if (write(STDERR_FILENO, text, n < 4096 ? n : 4095) < 0) {
            std::abort();
        }
    }
    std::signal(signal, SIG_DFL);
    std::raise(signal);
}

} // namespace

CrashReport::CrashReport(const Kernel & kernel) {
    static const bool is_installed = [] {
        struct sigaction action = {};
        action.sa_handler = report;
        return sigaction(SIGSEGV, &action, nullptr) == 0;
    }();
    running_kernel = is_installed ? &kernel : nullptr;
}

CrashReport::~CrashReport() { running_kernel = nullptr; }

} // namespace soft_gpu
