// What handles point to, and what bodies of the C ABI share.
#pragma once

#include "dflash.h"

#include "engine/session.h"
#include "error.h"

#include <atomic>
#include <cstdio>
#include <memory>
#include <string>

struct dfl_model {
    std::shared_ptr<const dfl::Model> model;
};
struct dfl_drafter {
    std::shared_ptr<const dfl::Drafter> drafter;
};
struct dfl_session {
    dfl::Session session;
    std::atomic<bool> is_busy{false};
};
struct dfl_checkpoint {
    dfl::Checkpoint checkpoint;
};

namespace dfl {

template <typename... Pointers>
void need(const Pointers *... pointers) {
    const bool all = ((pointers != nullptr) && ...);
    DFL_CHECK(all, DFL_STATUS_ARGUMENT, "a required pointer is NULL");
}

template <size_t N>
void copy_text(char (&to)[N], const std::string & from) {
    std::snprintf(to, N, "%s", from.c_str());
}

} // namespace dfl
