#include "graph/graph.h"

#include "device/cuda_estimate.h"
#include "error.h"

#include <algorithm>

namespace dfl {

// Number of cached graphs, each with about 3 MiB of host memory for a 27B model.
static constexpr size_t MAX_CACHED = 128;
// Rows of an append up to which ggml's CUDA backend may capture its graph.
static constexpr int64_t MAX_CAPTURED_ROWS = 64;
// Minimum number of rows for which the GPU computes with weights of the CPU, which are copied to
// it. ggml's CUDA backend has the same minimum for matrix products. For other operations it counts
// rows times heads, so a single token would copy the CPU's recurrent states to the GPU.
static constexpr int64_t MIN_OFFLOADED_ROWS = 32;

ggml_tensor * make_input(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1,
                         const char * name) {
    ggml_tensor * tensor = ggml_new_tensor_2d(ctx, type, ne0, ne1);
    ggml_set_input(tensor);
    ggml_set_name(tensor, name);
    return tensor;
}

GraphInputs make_inputs(ggml_context * ctx, const Hparams & hp, const KvCache & kv,
                        const BatchShape & shape) {
    GraphInputs in;
    in.embd = make_input(ctx, GGML_TYPE_F32, hp.n_embd, shape.n_rows, "embd");
    if (hp.n_per_layer > 0) {
        in.per_layer = make_input(ctx, GGML_TYPE_F32, hp.n_per_layer * hp.n_layer(), shape.n_rows,
                                  "per_layer");
    }
    const auto attends = std::find_if(hp.layers.begin(), hp.layers.end(),
                                      [](const LayerShape & layer) { return !layer.recurrent; });
    if (attends != hp.layers.end()) {
        const int64_t n = attends->rope.n_position_ids() * shape.n_rows;
        in.positions = make_input(ctx, GGML_TYPE_I32, n, 1, "positions");
    }
    for (size_t i = 0; i < kv.groups().size(); ++i) {
        in.cells.push_back(make_input(ctx, GGML_TYPE_I64, shape.n_rows, 1, "cells"));
        in.masks.push_back(kv.groups()[i].masks().views(ctx, shape.n_kv[i], shape.n_rows));
    }
    if (shape.n_out > 0 && shape.n_out < shape.n_rows) {
        in.out_rows = make_input(ctx, GGML_TYPE_I32, shape.n_out, 1, "out_rows");
    }
    return in;
}

void CachedGraph::write_positions(ggml_tensor * input,
                                  const std::vector<int32_t> & positions) const {
    const auto n = static_cast<int64_t>(positions.size());
    write<int32_t>(input, [&](int32_t * data) {
        for (int64_t i = 0; i < ggml_nelements(input); ++i) {
            data[i] = i < 3 * n ? positions[i % n] : 0;
        }
    });
}

// Returns the tensor that owns a tensor's memory: a view's is its source.
static ggml_tensor * memory_owner(ggml_tensor * tensor) {
    return tensor->view_src != nullptr ? tensor->view_src : tensor;
}

void mark_output(ggml_tensor * tensor) {
    ggml_set_output(tensor);
    ggml_set_output(memory_owner(tensor));
}

ggml_tensor * add_output(CachedGraph & cached, ggml_tensor * tensor) {
    mark_output(tensor);
    ggml_build_forward_expand(cached.graph, tensor);
    return tensor;
}

ggml_tensor * add_result(CachedGraph & cached, ggml_tensor * tensor) {
    add_output(cached, tensor);
    cached.results.push_back(memory_owner(tensor));
    return tensor;
}

void add_top_rows(CachedGraph & cached, ggml_tensor * logits) {
    ggml_context * ctx = cached.ctx.get();
    cached.top.rows = make_top_rows(ctx, clamp_to_finite(ctx, logits), cached.shape.n_top,
                                    cached.shape.top_by_blocks);
    for (const TopRows::Level & level : cached.top.rows.levels) {
        add_result(cached, level.blocks);
    }
    add_result(cached, cached.top.rows.last);
    cached.top.logits = add_result(cached, cached.top.rows.gather(ctx, logits));
}

void finish_logits(CachedGraph & cached, ggml_tensor * logits, const Backend & backend) {
    cached.logits = logits;
    if (logits == nullptr) {
        return;
    }
    mark_output(logits);
    if (!backend.is_host()) {
        ggml_context * ctx = cached.ctx.get();
        cached.argmax = add_result(cached, ggml_argmax(ctx, logits));
        ggml_tensor * firsts = ggml_view_2d(ctx, logits, 1, logits->ne[1], logits->nb[1], 0);
        cached.firsts = add_result(cached, ggml_cont(ctx, firsts));
    }
    if (cached.shape.n_top > 0) {
        cached.top.sums = add_result(cached, ggml_sum_rows(cached.ctx.get(), logits));
        add_top_rows(cached, logits);
    }
}

GraphPool::GraphPool(Devices & devices, size_t max_nodes)
    : devices_(devices), backend_(devices.main()), max_nodes_(max_nodes),
      arena_(ggml_gallocr_new(backend_.default_buffer_type())),
      block_(backend_.is_host() ? nullptr : std::make_unique<IoBlock>(backend_)) {}

// Returns the kind whose scheduler runs split graphs of `kind`: VERIFY for APPEND, else `kind`.
static GraphKind scheduler_kind(GraphKind kind) {
    return kind == GraphKind::APPEND ? GraphKind::VERIFY : kind;
}

ArenaBytes GraphPool::arena_bytes() const {
    ArenaBytes bytes;
    if (backend_.is_dry_run()) {
        ArenaBytes in_arena;
        std::map<GraphKind, ArenaBytes> lanes;
        for (const auto & [kind, wanted] : needed_) {
            ArenaBytes & largest =
                split_kinds_.count(kind) > 0 ? lanes[scheduler_kind(kind)] : in_arena;
            largest = max_of(largest, wanted);
        }
        bytes = in_arena;
        for (const auto & [lane, wanted] : lanes) {
            bytes.main += wanted.main;
            bytes.cpu_split += wanted.cpu_split;
        }
    } else {
        bytes.main = ggml_gallocr_get_buffer_size(arena_.get(), 0);
        for (const auto & [lane, scheduler] : schedulers_) {
            bytes.main += scheduler.bytes().main;
            bytes.cpu_split += scheduler.bytes().cpu_split;
        }
    }
    bytes.main += block_ ? block_->bytes() : 0;
    return bytes;
}

uint64_t GraphPool::arena_bytes(GraphKind kind) const {
    const auto entry = needed_.find(kind);
    return entry == needed_.end() ? 0 : entry->second.main;
}

// Returns the arena, as the buffer of the first node that is no view: views may point to caches.
static ggml_backend_buffer_t arena_buffer(ggml_cgraph * graph) {
    int i = 0;
    while (ggml_graph_node(graph, i)->view_src != nullptr) {
        ++i;
    }
    return ggml_graph_node(graph, i)->buffer;
}

// Measures with an allocator of its own: measuring with the arena's would free the arena.
uint64_t GraphPool::arena_bytes_for(ggml_cgraph * graph) const {
    ggml_gallocr_ptr planner(ggml_gallocr_new(backend_.default_buffer_type()));
    size_t size = 0;
    ggml_gallocr_reserve_n_size(planner.get(), graph, nullptr, nullptr, &size);
    return size;
}

static std::string what_for(const BatchShape & shape) {
    return format("the compute buffer for %lld rows and %lld K/V cells", (long long)shape.n_rows,
                  (long long)(shape.n_kv.empty() ? 0 : shape.n_kv.front()));
}

void GraphPool::allocate(CachedGraph & fresh, uint64_t needed) {
    const std::string what = what_for(fresh.shape);
    const auto arena_size = [&] { return ggml_gallocr_get_buffer_size(arena_.get(), 0); };
    const uint64_t before = arena_size();
    if (needed > before) {
        backend_.check_fits(needed - before, what.c_str());
    }
    // Reserve first: otherwise ggml reuses the layout of the previous graph if that had as many
    // nodes, and results overwrite tensors that later nodes still read.
    const bool allocated = ggml_gallocr_reserve(arena_.get(), fresh.graph) &&
                           ggml_gallocr_alloc_graph(arena_.get(), fresh.graph);
    const bool moved = arena_size() != before;
    if (!allocated || moved) {
        forget_in_arena(); // graphs in the arena point into the replaced buffer
    }
    DFL_CHECK(allocated, DFL_STATUS_MEMORY, "device %s cannot allocate %llu bytes for %s",
              backend_.name(), (unsigned long long)needed, what.c_str());
    if (moved) {
        backend_.use_huge_pages(arena_buffer(fresh.graph));
    }
}

CachedGraph & GraphPool::get(const BatchShape & shape, const GraphBuilder & build) {
    for (auto it = cached_.begin(); it != cached_.end(); ++it) {
        if (it->shape == shape) {
            cached_.splice(cached_.begin(), cached_, it);
            return cached_.front();
        }
    }
    CachedGraph fresh = build_graph(shape, build);
    CachedGraph & cached =
        is_split(fresh) ? get_scheduled(std::move(fresh), build) : get_in_arena(std::move(fresh));
    ++n_built_;
    largest_n_nodes_ = std::max<int64_t>(largest_n_nodes_, ggml_graph_n_nodes(cached.graph));
    return cached;
}

CachedGraph GraphPool::build_graph(const BatchShape & shape, const GraphBuilder & build) const {
    CachedGraph fresh;
    fresh.shape = shape;
    fresh.cpu_nodes.n_threads = backend_.runs_cpu_nodes() ? backend_.n_threads() : 0;
    fresh.cpu_nodes.max_threads = devices_.host().n_threads();
    // The context also holds views and leaves, so its size allows for twice the nodes.
    fresh.ctx.reset(ggml_init(
        {2 * max_nodes_ * ggml_tensor_overhead() + ggml_graph_overhead_custom(max_nodes_, false),
         nullptr, true}));
    fresh.graph = ggml_new_graph_custom(fresh.ctx.get(), max_nodes_, false);
    build(fresh);
    return fresh;
}

bool GraphPool::is_split(const CachedGraph & fresh) {
    if (devices_.cpu() == nullptr || backend_.is_hypothetical()) {
        return false;
    }
    const std::set<std::string> lacking = unsupported_operations(backend_, fresh.graph);
    cpu_operations_.insert(lacking.begin(), lacking.end());
    return !lacking.empty() || reaches_cpu_split(backend_, fresh.graph);
}

void GraphPool::record_size(const CachedGraph & cached, const ArenaBytes & needed) {
    ArenaBytes & largest = needed_[cached.shape.kind];
    largest = max_of(largest, needed);
    if (backend_.is_cuda()) {
        pool_bytes_ = std::max(pool_bytes_, cuda_estimate::pool_bytes(cached.graph));
    }
}

CachedGraph & GraphPool::get_scheduled(CachedGraph fresh, const GraphBuilder & build) {
    SplitScheduler & scheduler =
        schedulers_.try_emplace(scheduler_kind(fresh.shape.kind), devices_, max_nodes_)
            .first->second;
    cached_.remove_if([&](const CachedGraph & cached) { return cached.scheduler == &scheduler; });
    fresh.scheduler = &scheduler;
    split_kinds_.insert(fresh.shape.kind);
    const bool op_offload = fresh.shape.n_rows >= MIN_OFFLOADED_ROWS;
    const uint64_t before = scheduler.bytes().main;
    if (backend_.is_dry_run()) {
        record_size(fresh, scheduler.measure(fresh.graph, op_offload));
    } else if (scheduler.allocate(fresh.graph, op_offload)) {
        const ArenaBytes now = scheduler.bytes();
        // Records no size if the buffers did not grow: they have the size of an earlier graph.
        record_size(fresh, now.main > before ? now : ArenaBytes{});
    } else {
        const ArenaBytes needed =
            scheduler.measure(build_graph(fresh.shape, build).graph, op_offload);
        throw Error(DFL_STATUS_MEMORY,
                    format("%s needs %llu MiB on %s and %llu MiB on %s, more than is free",
                           what_for(fresh.shape).c_str(), (unsigned long long)(needed.main >> 20),
                           backend_.name(), (unsigned long long)(needed.cpu_split >> 20),
                           devices_.cpu()->name()));
    }
    cached_.push_front(std::move(fresh));
    return cached_.front();
}

void GraphPool::forget_in_arena() {
    cached_.remove_if([](const CachedGraph & cached) { return cached.scheduler == nullptr; });
}

void GraphPool::place_in_block(CachedGraph & fresh) {
    const int64_t n_moves = block_->n_moves();
    fresh.io_bytes = block_->place(fresh.graph, fresh.results);
    fresh.block = block_.get();
    if (block_->n_moves() != n_moves) {
        forget_in_arena(); // tensors of graphs in the arena point into the replaced block
    }
}

// True if a pass computes for longer than it takes to submit its kernels one by one.
static bool is_long_append(const BatchShape & shape) {
    return shape.kind == GraphKind::APPEND && shape.n_rows > MAX_CAPTURED_ROWS;
}

// ggml captures a graph in its second run unless a node changed. A prompt seldom runs a graph more
// often, and the GPU idles during a capture: 8192 tokens of a 27B model took 4 % longer (H200).
static void prevent_capture(ggml_cgraph * graph, int64_t n_runs) {
    ggml_format_name(ggml_graph_node(graph, 0), "run %lld", (long long)n_runs);
}

CachedGraph & GraphPool::get_in_arena(CachedGraph fresh) {
    if (backend_.is_hypothetical()) {
        cuda_estimate::add_attention_copies(fresh.graph);
    }
    if (block_) {
        place_in_block(fresh);
    }
    const uint64_t needed = arena_bytes_for(fresh.graph);
    if (!backend_.is_dry_run()) {
        allocate(fresh, needed);
        join_neighbours(fresh.graph, fresh.cpu_nodes);
        if (backend_.is_cuda() && !is_long_append(fresh.shape)) {
            set_graph_id(devices_, fresh.graph);
        }
    }
    // The split of a graph is unknown for a hypothetical GPU: its bytes count on GPU and CPU.
    const GraphKind kind = fresh.shape.kind;
    const bool may_split =
        backend_.is_hypothetical() && !devices_.split().is_whole() &&
        (scheduler_kind(kind) == GraphKind::VERIFY || kind == GraphKind::PROMOTE);
    if (may_split) {
        split_kinds_.insert(kind);
    }
    record_size(fresh, {needed, may_split ? needed : 0});
    cached_.push_front(std::move(fresh));
    if (cached_.size() > MAX_CACHED) {
        cached_.pop_back();
    }
    return cached_.front();
}

void GraphPool::compute(CachedGraph & cached) {
    cached.candidates.clear();
    cached.cpu_nodes.begin_run();
    if (cached.scheduler != nullptr) {
        cached.scheduler->compute(cached.graph);
        cached.copies.clear();
        for (const ggml_tensor * result : cached.results) {
            cached.copies.emplace_back(ggml_nbytes(result));
            backend_.read(result, cached.copies.back().data(), 0, ggml_nbytes(result));
        }
        return;
    }
    if (backend_.is_cuda() && is_long_append(cached.shape)) {
        prevent_capture(cached.graph, ++n_uncaptured_runs_);
    }
    if (cached.block != nullptr) {
        cached.block->upload(cached.io_bytes);
        backend_.compute(cached.graph, [&] { cached.block->download(cached.io_bytes); });
        return;
    }
    if (cached.cpu_nodes.n_threads == 0) {
        backend_.compute(cached.graph);
        return;
    }
    ThreadCount & threads = backend_.threads();
    const int n = threads.now();
    backend_.set_threads(n);
    const auto began = ThreadCount::Clock::now();
    backend_.compute(cached.graph);
    const auto ended = ThreadCount::Clock::now();
    const Barrier::Waits waits = cached.cpu_nodes.barrier->waits(n);
    threads.record_run(ended, std::chrono::nanoseconds(ended - began).count(), waits.lost_ns,
                       waits.n_late);
}

} // namespace dfl
