#include "block.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <thread>

namespace soft_gpu {

namespace {

constexpr u32 JUMPS_AT_ONCE = 20000; // of a warp, so that others run that it waits for
constexpr size_t ALIGNMENT = 1024;

u64 number_of(const char * variable, u64 otherwise) {
    const char * text = std::getenv(variable);
    return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

std::unique_ptr<u8, void (*)(void *)> buffer(size_t bytes) {
    const size_t whole = (bytes + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    auto * made = static_cast<u8 *>(std::aligned_alloc(ALIGNMENT, whole));
    require(made != nullptr, "no memory for a block");
    return {made, std::free};
}

} // namespace

Settings & settings() {
    static Settings all = [] {
        Settings read;
        read.is_reversed = std::getenv("SOFT_GPU_REVERSE") != nullptr;
        read.n_threads =
            static_cast<u32>(number_of("SOFT_GPU_THREADS", std::thread::hardware_concurrency()));
        read.n_multiprocessors =
            static_cast<u32>(number_of("SOFT_GPU_SMS", read.n_multiprocessors));
        read.max_jumps_back = number_of("SOFT_GPU_MAX_JUMPS", read.max_jumps_back);
        return read;
    }();
    return all;
}

Block::Block(const Launch & launch, u64 workspace)
    : launch_(launch), kernel_(*launch.kernel), warps_((launch.n_threads() + 31) / 32),
      registers_(buffer(kernel_.registers.size() * warps_.size())),
      shared_(buffer(kernel_.shared_bytes + launch.dynamic_bytes)),
      local_(buffer(static_cast<size_t>(kernel_.local_bytes) * N_LANES * warps_.size())),
      register_bytes_(kernel_.registers.size()),
      shared_bytes_(kernel_.shared_bytes + launch.dynamic_bytes) {
    place_.n_warps = static_cast<u32>(warps_.size());
    place_.workspace = workspace;
    place_.n_multiprocessors = settings().n_multiprocessors;
    place_.shared_bytes = static_cast<u32>(shared_bytes_);
    place_.dynamic_bytes = launch.dynamic_bytes;
    std::copy_n(launch.block, 3, place_.block_size);
    std::copy_n(launch.grid, 3, place_.grid_size);
    for (u32 i = 0; i < warps_.size(); ++i) {
        Warp & warp = warps_[i];
        warp.registers = registers_.get() + i * register_bytes_;
        warp.shared = shared_.get();
        warp.shared_bytes = static_cast<u32>(shared_bytes_);
        warp.local = local_.get() + static_cast<size_t>(i) * N_LANES * kernel_.local_bytes;
        warp.local_bytes = kernel_.local_bytes;
        warp.parameters = const_cast<u8 *>(launch.parameters.data());
        warp.parameter_bytes = static_cast<u32>(launch.parameters.size());
        std::memcpy(warp.registers, kernel_.registers.data(), register_bytes_);
        place_.warp = i;
        set_special_registers(warp, false);
    }
}

void Block::set_special_registers(Warp & warp, bool only_of_block) {
    Register at = 0;
    for (const SpecialRegister & special : special_registers()) {
        if (special.is_of_block) {
            std::fill_n(warp.at<u32>(at), N_LANES, special.value(place_));
        } else if (!only_of_block) {
            for (place_.lane = 0; place_.lane < N_LANES; ++place_.lane) {
                place_.thread = place_.warp * N_LANES + place_.lane;
                warp.at<u32>(at)[place_.lane] = special.value(place_);
            }
        }
        at += N_LANES * sizeof(u32);
    }
}

void Block::start(u64 index) {
    std::memset(shared_.get(), 0xff, shared_bytes_);
    std::memset(local_.get(), 0xff,
                static_cast<size_t>(kernel_.local_bytes) * N_LANES * warps_.size());
    const u32 * grid = launch_.grid;
    place_.block[0] = static_cast<u32>(index % grid[0]);
    place_.block[1] = static_cast<u32>(index / grid[0] % grid[1]);
    place_.block[2] = static_cast<u32>(index / grid[0] / grid[1]);
    for (u32 i = 0; i < warps_.size(); ++i) {
        Warp & warp = warps_[i];
        const u32 n = std::min<u32>(N_LANES, launch_.n_threads() - i * N_LANES);
        warp.active = warp.alive = n == N_LANES ? ALL_LANES : (1u << n) - 1;
        warp.pc = 0;
        warp.state = State::READY;
        warp.waiting.clear();
        warp.copies.clear();
        warp.n_jumps_back = 0;
        set_special_registers(warp, true);
    }
}

bool Block::step() {
    const size_t n = warps_.size();
    bool moved = false;
    for (size_t i = 0; i < n; ++i) {
        Warp & warp = warps_[settings().is_reversed ? n - 1 - i : i];
        if (warp.state == State::READY) {
            run(kernel_, warp, JUMPS_AT_ONCE);
            require(warp.n_jumps_back < settings().max_jumps_back,
                    kernel_.name + ": a loop without end");
            moved = true;
        }
    }
    if (std::all_of(warps_.begin(), warps_.end(),
                    [](const Warp & warp) { return warp.state == State::DONE; })) {
        return true;
    }
    const bool opened = open_barriers();
    require(moved || opened,
            kernel_.name + ": warps wait at a barrier for others that never arrive");
    return false;
}

bool Block::open_barriers() {
    std::map<u32, std::vector<Warp *>> waiting; // by the barrier's number
    u32 n_alive = 0;
    for (Warp & warp : warps_) {
        n_alive += warp.state != State::DONE;
        if (warp.state == State::AT_BARRIER) {
            const u32 * number = warp.at<u32>(warp.barrier->source[0]);
            waiting[number[__builtin_ctz(warp.alive)]].push_back(&warp);
        }
    }
    bool opened = false;
    for (const auto & [number, warps] : waiting) {
        opened = open_barrier(warps, n_alive) || opened;
    }
    return opened;
}

// Opens a barrier if all warps have arrived that it expects, and gives them its reduction.
bool Block::open_barrier(const std::vector<Warp *> & warps, u32 n_alive) {
    const Instruction & first = *warps[0]->barrier;
    u32 n_expected = n_alive;
    if (first.source[1] != NO_REGISTER) {
        const u32 * n_threads = warps[0]->at<u32>(first.source[1]);
        n_expected = (n_threads[__builtin_ctz(warps[0]->alive)] + N_LANES - 1) / N_LANES;
    }
    if (warps.size() < n_expected) {
        return false;
    }
    u32 n_lanes = 0, n_true = 0;
    for (const Warp * warp : warps) {
        const Instruction & barrier = *warp->barrier;
        require(barrier.mode == first.mode, kernel_.name + ": warps reduce at different barriers");
        if (barrier.mode != 0) {
            n_lanes += __builtin_popcount(warp->alive);
            n_true += __builtin_popcount(lanes_with(*warp, barrier.source[2], barrier.flag) &
                                         warp->alive);
        }
    }
    for (Warp * warp : warps) {
        const Instruction & barrier = *warp->barrier;
        warp->active = warp->alive;
        warp->state = State::READY;
        for_lanes(*warp, [&](int lane) {
            if (barrier.mode == 3) {
                warp->at<u32>(barrier.target)[lane] = n_true;
            } else if (barrier.mode != 0) {
                warp->at<u8>(barrier.target)[lane] =
                    barrier.mode == 1 ? n_true == n_lanes : n_true != 0;
            }
        });
    }
    return true;
}

} // namespace soft_gpu
