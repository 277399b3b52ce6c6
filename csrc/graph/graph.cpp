#include "graph/graph.h"

#include "device/cuda_estimate.h"
#include "error.h"

#include <algorithm>

namespace dfl {

// Decode, draft, promote and a few sizes of each that appends and verifies; older ones are rebuilt
// when wanted. One of a 27B holds 3 MiB of the host's memory.
static constexpr size_t MAX_LIVE = 128;

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

void keep_output(ggml_tensor * tensor) {
    ggml_set_output(tensor);
    if (tensor->view_src != nullptr) { // whose memory it is
        ggml_set_output(tensor->view_src);
    }
}

ggml_tensor * wanted(LiveGraph & live, ggml_tensor * tensor) {
    keep_output(tensor);
    ggml_build_forward_expand(live.graph, tensor);
    return tensor;
}

void add_top(LiveGraph & live, ggml_tensor * logits) {
    ggml_context * ctx = live.ctx.get();
    live.top.found =
        find_top(ctx, without_nans(ctx, logits), live.shape.n_top, live.shape.top_by_blocks);
    for (const TopRows::Level & level : live.top.found.levels) {
        wanted(live, level.blocks);
    }
    wanted(live, live.top.found.last);
    live.top.logits = wanted(live, live.top.found.gather(ctx, logits));
}

void finish_logits(LiveGraph & live, ggml_tensor * logits, const Backend & backend) {
    live.logits = logits;
    if (logits == nullptr) {
        return;
    }
    keep_output(logits);
    if (!backend.is_host()) {
        live.argmax = ggml_argmax(live.ctx.get(), logits);
        ggml_set_output(live.argmax);
        ggml_build_forward_expand(live.graph, live.argmax);
    }
    if (live.shape.n_top > 0) {
        live.top.sums = wanted(live, ggml_sum_rows(live.ctx.get(), logits)); // then NaNs go
        add_top(live, logits);
    }
}

GraphPool::GraphPool(Devices & devices, size_t max_nodes)
    : devices_(devices), backend_(devices.main()), max_nodes_(max_nodes),
      arena_(ggml_gallocr_new(backend_.default_buffer_type())),
      block_(backend_.is_host() ? nullptr : std::make_unique<InputBlock>(backend_)) {}

// The kind whose scheduler graphs of a kind use where they are split over two devices.
static GraphKind lane_of(GraphKind kind) {
    return kind == GraphKind::APPEND ? GraphKind::VERIFY : kind;
}

ArenaBytes GraphPool::arena_bytes() const {
    ArenaBytes bytes;
    if (backend_.measures()) {
        ArenaBytes in_arena;
        std::map<GraphKind, ArenaBytes> lanes;
        for (const auto & [kind, wanted] : wanted_) {
            ArenaBytes & most = split_kinds_.count(kind) > 0 ? lanes[lane_of(kind)] : in_arena;
            most = most_of(most, wanted);
        }
        bytes = in_arena;
        for (const auto & [lane, wanted] : lanes) {
            bytes.main += wanted.main;
            bytes.beside += wanted.beside;
        }
    } else {
        bytes.main = ggml_gallocr_get_buffer_size(arena_.get(), 0);
        for (const auto & [lane, scheduler] : schedulers_) {
            bytes.main += scheduler.bytes().main;
            bytes.beside += scheduler.bytes().beside;
        }
    }
    bytes.main += block_ ? block_->bytes() : 0;
    return bytes;
}

uint64_t GraphPool::arena_bytes(GraphKind kind) const {
    const auto found = wanted_.find(kind);
    return found == wanted_.end() ? 0 : found->second.main;
}

// The buffer that holds a graph's results; views may lie in caches instead.
static ggml_backend_buffer_t arena_buffer(ggml_cgraph * graph) {
    int i = 0;
    while (ggml_graph_node(graph, i)->view_src != nullptr) {
        ++i;
    }
    return ggml_graph_node(graph, i)->buffer;
}

// By an allocator of its own: asking the arena's would free its memory.
uint64_t GraphPool::arena_bytes_for(ggml_cgraph * graph) const {
    ggml_gallocr_ptr planner(ggml_gallocr_new(backend_.default_buffer_type()));
    size_t size = 0;
    ggml_gallocr_reserve_n_size(planner.get(), graph, nullptr, nullptr, &size);
    return size;
}

static std::string what_for(const BatchShape & shape) {
    return format("the compute buffer of %lld rows over %lld cells", (long long)shape.n_rows,
                  (long long)(shape.n_kv.empty() ? 0 : shape.n_kv.front()));
}

void GraphPool::allocate(LiveGraph & fresh, uint64_t wanted) {
    const std::string what = what_for(fresh.shape);
    const auto arena_size = [&] { return ggml_gallocr_get_buffer_size(arena_.get(), 0); };
    const uint64_t before = arena_size();
    if (wanted > before) {
        backend_.check_fits(wanted - before, what.c_str());
    }
    // Without a plan of its own ggml gives a graph the places of the last one where it has as many
    // nodes, none of them larger: results would lie in what others are still read from.
    const bool allocated = ggml_gallocr_reserve(arena_.get(), fresh.graph) &&
                           ggml_gallocr_alloc_graph(arena_.get(), fresh.graph);
    const bool moved = arena_size() != before;
    if (!allocated || moved) {
        forget_in_arena(); // they point into what was just replaced
    }
    DFL_CHECK(allocated, DFL_STATUS_MEMORY, "device %s cannot allocate %llu bytes for %s",
              backend_.name(), (unsigned long long)wanted, what.c_str());
    if (moved) {
        backend_.use_huge_pages(arena_buffer(fresh.graph));
    }
}

LiveGraph & GraphPool::get(const BatchShape & shape, const GraphBuilder & build) {
    for (auto it = live_.begin(); it != live_.end(); ++it) {
        if (it->shape == shape) {
            live_.splice(live_.begin(), live_, it);
            return live_.front();
        }
    }
    LiveGraph fresh = built(shape, build);
    LiveGraph & live =
        is_split(fresh) ? get_scheduled(std::move(fresh), build) : get_in_arena(std::move(fresh));
    ++n_built_;
    most_nodes_ = std::max<int64_t>(most_nodes_, ggml_graph_n_nodes(live.graph));
    return live;
}

LiveGraph GraphPool::built(const BatchShape & shape, const GraphBuilder & build) const {
    LiveGraph fresh;
    fresh.shape = shape;
    fresh.cpu_nodes.n_threads = backend_.runs_cpu_nodes() ? backend_.n_threads() : 0;
    fresh.cpu_nodes.most_threads = devices_.host().n_threads();
    // Views and leaves count as tensors too, though not as nodes.
    fresh.ctx.reset(ggml_init(
        {2 * max_nodes_ * ggml_tensor_overhead() + ggml_graph_overhead_custom(max_nodes_, false),
         nullptr, true}));
    fresh.graph = ggml_new_graph_custom(fresh.ctx.get(), max_nodes_, false);
    build(fresh);
    return fresh;
}

bool GraphPool::is_split(const LiveGraph & fresh) {
    if (devices_.cpu() == nullptr || backend_.is_hypothetical()) {
        return false;
    }
    const std::set<std::string> lacking = lacking_operations(backend_, fresh.graph);
    cpu_operations_.insert(lacking.begin(), lacking.end());
    return !lacking.empty() || reaches_beside(backend_, fresh.graph);
}

void GraphPool::note_size(const LiveGraph & live, const ArenaBytes & wanted) {
    ArenaBytes & most = wanted_[live.shape.kind];
    most = most_of(most, wanted);
    if (backend_.is_cuda()) {
        pool_bytes_ = std::max(pool_bytes_, cuda_estimate::pool_bytes(live.graph));
    }
}

LiveGraph & GraphPool::get_scheduled(LiveGraph fresh, const GraphBuilder & build) {
    Scheduler & scheduler =
        schedulers_.try_emplace(lane_of(fresh.shape.kind), devices_, max_nodes_).first->second;
    live_.remove_if([&](const LiveGraph & live) { return live.scheduler == &scheduler; });
    fresh.scheduler = &scheduler;
    split_kinds_.insert(fresh.shape.kind);
    const uint64_t before = scheduler.bytes().main;
    if (backend_.measures()) {
        note_size(fresh, scheduler.measure(fresh.graph));
    } else if (scheduler.hold(fresh.graph)) {
        const ArenaBytes now = scheduler.bytes();
        note_size(fresh, now.main > before ? now : ArenaBytes{}); // else a larger graph was here
    } else {
        const ArenaBytes wanted = scheduler.measure(built(fresh.shape, build).graph);
        throw Error(DFL_STATUS_MEMORY,
                    format("%s needs %llu MiB on %s and %llu MiB on %s, which there are not",
                           what_for(fresh.shape).c_str(), (unsigned long long)(wanted.main >> 20),
                           backend_.name(), (unsigned long long)(wanted.beside >> 20),
                           devices_.cpu()->name()));
    }
    live_.push_front(std::move(fresh));
    return live_.front();
}

void GraphPool::forget_in_arena() {
    live_.remove_if([](const LiveGraph & live) { return live.scheduler == nullptr; });
}

void GraphPool::place_inputs(LiveGraph & fresh) {
    const int64_t n_moves = block_->n_moves();
    fresh.input_bytes = block_->place(fresh.graph);
    fresh.block = block_.get();
    if (block_->n_moves() != n_moves) {
        forget_in_arena(); // their inputs lay in the block that was just replaced
    }
}

LiveGraph & GraphPool::get_in_arena(LiveGraph fresh) {
    if (backend_.is_hypothetical()) {
        cuda_estimate::add_attention_copies(fresh.graph);
    }
    if (block_) {
        place_inputs(fresh);
    }
    const uint64_t wanted = arena_bytes_for(fresh.graph);
    if (!backend_.measures()) {
        allocate(fresh, wanted);
        join_neighbours(fresh.graph, fresh.cpu_nodes);
        if (backend_.is_cuda()) {
            number_graph(devices_, fresh.graph);
        }
    }
    // Of a split of a hypothetical GPU nobody knows what goes over both: at most all of these, and
    // each with all results on either.
    const GraphKind kind = fresh.shape.kind;
    const bool may_split = backend_.is_hypothetical() && !devices_.split().is_whole() &&
                           (lane_of(kind) == GraphKind::VERIFY || kind == GraphKind::PROMOTE);
    if (may_split) {
        split_kinds_.insert(kind);
    }
    note_size(fresh, {wanted, may_split ? wanted : 0});
    live_.push_front(std::move(fresh));
    if (live_.size() > MAX_LIVE) {
        live_.pop_back();
    }
    return live_.front();
}

void GraphPool::compute(LiveGraph & live) {
    live.best.clear();
    live.firsts.clear();
    live.candidates.clear();
    live.cpu_nodes.begin_run();
    if (live.scheduler != nullptr) {
        live.scheduler->compute(live.graph);
        return;
    }
    if (live.block != nullptr) {
        live.block->upload(live.input_bytes);
    }
    if (live.cpu_nodes.n_threads == 0) {
        backend_.compute(live.graph);
        return;
    }
    ThreadCount & threads = backend_.threads();
    const int n = threads.now();
    backend_.set_threads(n);
    const auto began = ThreadCount::Clock::now();
    backend_.compute(live.graph);
    const auto ended = ThreadCount::Clock::now();
    const Barrier::Waits waits = live.cpu_nodes.barrier->waits(n);
    threads.note(ended, std::chrono::nanoseconds(ended - began).count(), waits.lost_ns,
                 waits.n_late);
}

} // namespace dfl
