#include "engine/engine.h"

#include "engine/sequence.h"
#include "error.h"
#include "graph/recurrent_batch.h"
#include "layers/cpu_ops/scan_delta_net.h"
#include "layers/delta_net.h"
#include "layers/delta_rule.h"
#include "layers/device_ops.h"

#include <algorithm>

namespace dfl {

static EngineParams checked(EngineParams params) {
    DFL_CHECK(params.n_ctx >= 1 && params.n_ctx <= (1 << 24), DFL_STATUS_ARGUMENT,
              "n_ctx is %lld, expected 1 to %d", (long long)params.n_ctx, 1 << 24);
    DFL_CHECK(params.n_ubatch >= 1 && params.n_ubatch <= 65536, DFL_STATUS_ARGUMENT,
              "n_ubatch is %lld, expected 1 to 65536", (long long)params.n_ubatch);
    DFL_CHECK(params.n_threads >= 0 && params.n_threads <= DFL_MAX_THREADS, DFL_STATUS_ARGUMENT,
              "n_threads is %d, expected 0 to %d", params.n_threads, DFL_MAX_THREADS);
    DFL_CHECK(params.draft_window >= 1 && params.draft_window <= (1 << 24), DFL_STATUS_ARGUMENT,
              "draft_window is %lld, expected 1 to %d", (long long)params.draft_window, 1 << 24);
    DFL_CHECK(params.n_parallel >= 1 && params.n_parallel <= DFL_MAX_PARALLEL, DFL_STATUS_ARGUMENT,
              "n_parallel is %d, expected 1 to %d", params.n_parallel, DFL_MAX_PARALLEL);
    params.n_ubatch = std::min(params.n_ubatch, params.n_ctx);
    params.draft_window = std::min(params.draft_window, params.n_ctx);
    return params;
}

// Returns an upper bound of the nodes of any graph. n_ubatch: rows of a prefill if ggml computes
// recurrent layers, else 0. is_fused: a chain of recurrent rows is one operation.
static size_t max_nodes(const Model & model, const EngineParams & params, int64_t n_ubatch,
                        bool is_fused) {
    const Hparams & hp = model.hparams();
    size_t n = 512 + hp.n_layer() * (96 + 4 * hp.experts.n_used);
    n += hp.n_recurrent() * std::max(tree_form_nodes(Engine::MAX_VERIFY, Engine::MAX_VERIFY),
                                     is_fused ? 0 : 2 * tree_form_nodes(n_ubatch, TREE_FORM_CHUNK));
    n += n_ubatch > 0 ? hp.n_recurrent() * max_recurrent_batches(n_ubatch) * RECURRENT_BATCH_NODES
                      : 0;
    for (const auto & drafter : params.drafters) {
        n = std::max<size_t>(n, 512 + drafter->hparams().n_layer() * 128);
    }
    return n;
}

LayerPlace Engine::layer_place() {
    return [this](int64_t il) -> Backend & { return devices_.of_layer(il); };
}

// Returns the type of the drafter's K/V: f32 only if the target's is f32.
static ggml_type draft_cache_type(const EngineParams & params) {
    return params.type_k == GGML_TYPE_F32 ? GGML_TYPE_F32 : GGML_TYPE_F16;
}

// Returns the most uncommitted rows, of one sequence and of all; a verify may add a padding row.
static KvGroup::UncommittedRows max_uncommitted(const EngineParams & params) {
    const int64_t of_one = std::max(params.n_ubatch, Engine::MAX_VERIFY + 1);
    const int64_t n = params.n_parallel;
    return {of_one, n == 1 ? of_one : std::max(params.n_ubatch, n) + Engine::MAX_VERIFY + n};
}

Engine::Engine(std::shared_ptr<const Model> model, const EngineParams & params)
    : model_(std::move(model)), params_(checked(params)),
      devices_(model_->device(), model_->split(), params_.n_threads, {}, model_->dry_run()),
      is_recurrent_(model_->hparams().n_recurrent() > 0),
      kv_(model_->hparams(), layer_place(), params_.type_k, params_.type_v,
          {GGML_PAD(params_.n_ctx, 256), std::max<int64_t>(params_.n_ubatch, params_.n_parallel),
           params_.n_parallel, max_uncommitted(params_)}),
      recurrent_(model_->hparams(), layer_place(), params_.n_parallel),
      scans_(is_recurrent_ && params_.delta_form == DeltaForm::OWN &&
             devices_.main().runs_cpu_nodes() && can_scan_delta_net(model_->hparams().recurrent)),
      fused_(scans_ || (is_recurrent_ && params_.delta_form != DeltaForm::STOCK &&
                        has_fused_delta_rule(recurrent_, model_->hparams().recurrent))),
      sizes_(devices_, params_.n_parallel),
      graphs_(devices_,
              max_nodes(*model_, params_, is_recurrent_ && !scans_ ? params_.n_ubatch : 0, fused_)),
      sequences_(params_.n_parallel, nullptr), n_kv_(kv_.groups().size(), 0),
      recent_cells_(kv_.groups().size()) {
    for (KvGroup & group : kv_.groups()) {
        caches_.push_back({&group, nullptr});
    }
    for (const auto & part : recurrent_.parts()) {
        part->has_kernels = params_.delta_form == DeltaForm::OWN && fused_ &&
                            runs_device_ops(*part->backend, model_->hparams(), MAX_VERIFY);
    }
    attach_drafters();
    reserve_graphs();
}

void Engine::allocate_ring() {
    std::vector<std::vector<int64_t>> taps;
    for (const auto & drafter : params_.drafters) {
        taps.push_back(drafter->draft().taps);
    }
    for (const int64_t tap : params_.taps) {
        const int64_t max_tap = model_->hparams().n_layer() + 1;
        DFL_CHECK(tap >= 0 && tap <= max_tap, DFL_STATUS_ARGUMENT,
                  "tap %lld is out of range, the model has taps 0 to %lld", (long long)tap,
                  (long long)max_tap);
    }
    if (!params_.taps.empty()) {
        taps.push_back(params_.taps);
    }
    if (!taps.empty()) {
        ring_ = std::make_unique<FeatureRing>(devices_.main(), model_->hparams().n_embd, taps);
        ring_->allocate(n_ring_rows(verify_rows_));
    }
}

void Engine::attach_drafters() {
    if (params_.drafters.empty()) {
        allocate_ring();
        return;
    }
    int64_t max_block = 1;
    for (const auto & drafter : params_.drafters) {
        DFL_CHECK(drafter->fits(model_), DFL_STATUS_ARGUMENT,
                  "the drafter %s was loaded for another model than %s",
                  drafter->file().path().c_str(), model_->file().path().c_str());
        DFL_CHECK(drafter->kind().attach != nullptr, DFL_STATUS_ARGUMENT,
                  "the drafter %s is an n-gram table, which no engine runs",
                  drafter->file().path().c_str());
        max_block = std::max(max_block, drafter->max_block());
    }
    // Rows to verify for each sequence after the first: more sequences verify fewer nodes each.
    constexpr int64_t more_rows = 3;
    verify_rows_ = sizes_.verify_rows(
        std::min(max_block + more_rows * (params_.n_parallel - 1), MAX_VERIFY), model_->weights());
    recurrent_.reserve_updates(verify_rows_, !scans_);
    kv_.reserve_masks(max_masked_rows(verify_rows_));
    allocate_ring();
    for (size_t i = 0; i < params_.drafters.size(); ++i) {
        const auto & drafter = params_.drafters[i];
        drafts_.push_back(drafter->kind().attach(
            drafter,
            {*model_, devices_, graphs_, *ring_, i,
             DraftSizes{draft_cache_type(params_),
                        drafter->draft().sees_all ? params_.n_ctx : params_.draft_window,
                        params_.n_ctx, params_.n_ubatch, verify_rows_, params_.n_parallel}}));
        for (KvGroup & group : drafts_.back()->kv().groups()) {
            caches_.push_back({&group, drafts_.back().get()});
        }
    }
}

// Returns the rows of the feature ring: those of a largest pass, and spare rows, so that a pass
// rarely waits for drafters to compute K/V from features and so free rows.
int64_t Engine::n_ring_rows(int64_t n_verify) const {
    constexpr int64_t more_rows = 64, more_of_each = 4;
    return max_appended() + n_verify + more_rows + more_of_each * (params_.n_parallel - 1);
}

int32_t Engine::register_sequence(Sequence * sequence) {
    DFL_CHECK(model_->dry_run() == DFL_DRY_RUN_NONE, DFL_STATUS_ARGUMENT,
              "the engine is a dry run: it has no memory for a sequence");
    const auto place = std::find(sequences_.begin(), sequences_.end(), nullptr);
    DFL_CHECK(place != sequences_.end(), DFL_STATUS_UNSUPPORTED,
              "the engine has %d sequence%s already, and holds %d at a time (n_parallel)",
              n_parallel(), n_parallel() == 1 ? "" : "s", n_parallel());
    *place = sequence;
    return static_cast<int32_t>(place - sequences_.begin());
}

void Engine::unregister_sequence(const Sequence * sequence) {
    std::replace(sequences_.begin(), sequences_.end(), const_cast<Sequence *>(sequence),
                 static_cast<Sequence *>(nullptr));
}

void Engine::forget_rows() {
    for (Sequence * sequence : sequences_) {
        if (sequence != nullptr) {
            sequence->forget_rows();
        }
    }
}

int64_t Engine::max_masked_rows(int64_t n_verify) const {
    if (params_.n_parallel == 1) { // a pass of a single sequence appends or verifies, never both
        return sizes_.verify_rows(n_verify, model_->weights());
    }
    if (!sizes_.uses_few_sizes()) {
        return sizes_.verify_rows(max_appended() + n_verify, model_->weights());
    }
    return max_appended() + sizes_.mixed_verify_rows(n_verify);
}

int64_t Engine::max_rows() const {
    return std::max<int64_t>({params_.n_ubatch, params_.n_parallel, verify_rows_});
}

std::vector<int64_t> Engine::max_cells() const {
    std::vector<int64_t> cells;
    for (const KvGroup & group : kv_.groups()) {
        cells.push_back(group.has_layers() ? group.cells().size() : 0);
    }
    return cells;
}

// Builds the largest graphs, which size the arena, so that memory runs out here or not at all.
void Engine::reserve_graphs() {
    BatchShape largest;
    largest.n_rows = params_.n_ubatch;
    largest.n_kv = max_cells();
    largest.n_out = 1;
    largest.scans = scans_;
    largest.taps = ring_ != nullptr;
    const bool has_lanes = is_recurrent_ && !scans_;
    const auto identity_layout = [&](int64_t n_rows) {
        return RecurrentBatchShape{n_rows, 1, false, !fused_, true, true};
    };
    if (has_lanes) {
        largest.recurrent = {identity_layout(largest.n_rows)};
    }
    select_top(largest, can_select_top(DFL_MAX_TOP) ? DFL_MAX_TOP : 0);
    graphs_.get(largest, [&](CachedGraph & cached) { build_forward(cached); });
    if (params_.n_parallel > 1) {
        largest.n_rows = max_rows();
        largest.n_out = params_.n_parallel;
        if (has_lanes) { // worst case: padding makes lanes twice as long
            const int64_t n = params_.n_parallel, rows = 2 * largest.n_rows / n;
            largest.recurrent = {{1, n, false, !fused_, true, false},
                                 {std::max<int64_t>(rows, 2), n, false, !fused_, false, false}};
        }
        graphs_.get(largest, [&](CachedGraph & cached) { build_forward(cached); });
    }
    if (!drafts_.empty()) {
        reserve_verify_graphs(verify_rows_);
    }
    for (const auto & draft : drafts_) {
        draft->reserve();
    }
}

void Engine::reserve_verify_graphs(int64_t n) {
    BatchShape largest;
    largest.kind = GraphKind::VERIFY;
    largest.n_rows = largest.n_out = sizes_.verify_rows(n, model_->weights());
    largest.n_kv = max_cells();
    largest.scans = scans_;
    largest.taps = ring_ != nullptr;
    if (is_recurrent_ && !scans_) {
        const int64_t n_lanes = params_.n_parallel;
        const int64_t longest = sizes_.lane_rows(std::max<int64_t>(n - n_lanes + 1, 1));
        largest.recurrent = {n_lanes == 1
                                 ? RecurrentBatchShape{largest.n_rows, 1, true, true, true, true}
                                 : RecurrentBatchShape{longest, n_lanes, true, true, true, false}};
    }
    select_top(largest, can_select_top(DFL_MAX_TOP) ? DFL_MAX_TOP : 0);
    graphs_.get(largest, [&](CachedGraph & cached) { build_forward(cached); });
    if (params_.n_parallel > 1) { // builds the largest graph of verifies beside prompt chunks too
        largest.n_rows = max_masked_rows(n);
        largest.n_out =
            std::min(largest.n_rows - 1, sizes_.mixed_verify_rows(n + params_.n_parallel));
        if (!largest.recurrent.empty()) {
            const int64_t n_lanes = params_.n_parallel, rows = 2 * largest.n_rows / n_lanes;
            largest.recurrent.insert(largest.recurrent.begin(),
                                     {rows, n_lanes, false, !fused_, false, false});
        }
        graphs_.get(largest, [&](CachedGraph & cached) { build_forward(cached); });
    }
    if (scans_) {
        scan_promote_graph();
    } else if (is_recurrent_) {
        promote_graph(sizes_.promote_steps(std::min(n, MAX_STEPS)), params_.n_parallel, true);
    }
}

void Engine::reserve_verify(int64_t n) {
    for (const Sequence * sequence : sequences_) {
        if (sequence != nullptr) {
            sequence->check_no_pending_verify();
        }
    }
    DFL_CHECK(n >= 1 && n <= MAX_VERIFY, DFL_STATUS_ARGUMENT,
              "the rows to reserve for verifies are %lld, expected 1 to %lld", (long long)n,
              (long long)MAX_VERIFY);
    if (n <= verify_rows_) {
        return;
    }
    forget_rows();
    for (const auto & draft : drafts_) {
        draft->catch_up(); // computes K/V of pending features, which the old ring holds
        draft->reserve_rows(n);
    }
    if (ring_) {
        ring_->allocate(n_ring_rows(n));
    }
    graphs_.clear(); // cached graphs use tensors that are about to be replaced
    const int64_t n_rows = sizes_.verify_rows(n, model_->weights());
    recurrent_.reserve_updates(n_rows, !scans_);
    kv_.reserve_masks(max_masked_rows(n));
    reserve_verify_graphs(n);
    for (const auto & draft : drafts_) {
        draft->reserve();
    }
    verify_rows_ = n;
}

bool Engine::set_top_k(int64_t k) {
    DFL_CHECK(k >= 0 && k <= DFL_MAX_TOP && k <= model_->hparams().n_vocab, DFL_STATUS_ARGUMENT,
              "k is %lld, expected 0 to %d best tokens of a row", (long long)k, DFL_MAX_TOP);
    n_top_ = k > 0 && can_select_top(k) ? k : 0;
    return n_top_ == k;
}

bool Engine::can_select_top(int64_t k) const {
    const Backend & backend = devices_.main();
    ggml_context_ptr ctx(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * row = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, model_->hparams().n_vocab);
    return can_select_on_device(backend, row->ne[0], k) &&
           backend.runs(ggml_sum_rows(ctx.get(), row));
}

void Engine::select_top(BatchShape & shape, int64_t k) const {
    shape.n_top = std::min(k, model_->hparams().n_vocab);
    shape.top_by_blocks = shape.n_top > 0 && selects_by_blocks(devices_.main());
}

void Engine::build_forward(CachedGraph & cached) {
    cached.in = make_inputs(cached.ctx.get(), model_->hparams(), kv_, cached.shape);
    make_recurrent_inputs(cached, model_->hparams().recurrent);
    GraphContext g = {cached.ctx.get(),  cached.graph,      cached.cpu_nodes,
                      model_->hparams(), model_->weights(), kv_,
                      recurrent_,        cached.shape,      cached.in};
    if (cached.shape.taps) {
        ring_->add_taps(cached, g);
    }
    g.tap = [&cached, n_layer = model_->hparams().n_layer(), tap = g.tap](int il, ggml_tensor * x) {
        if (tap) {
            tap(il, x);
        }
        if (il == n_layer - 1) {
            cached.row_sums = add_result(cached, ggml_sum_rows(cached.ctx.get(), x));
        }
    };
    finish_logits(cached, model_->arch().build(g), devices_.main());
}

std::vector<MemoryUse> Engine::memory() const {
    const Backend * cpu = devices_.cpu();
    const ArenaBytes arena = graphs_.arena_bytes();
    std::vector<MemoryUse> uses;
    // Records a use of `bytes` bytes of memory: cpu_split on the CPU, the rest on the main device.
    const auto add = [&](const char * name, uint64_t bytes, uint64_t cpu_split) {
        if (bytes > cpu_split) {
            uses.push_back({name, devices_.main().name(), bytes - cpu_split});
        }
        if (cpu_split > 0) {
            uses.push_back({name, cpu->name(), cpu_split});
        }
    };
    uint64_t draft_masks = 0, draft_bytes = ring_ ? ring_->bytes() : 0, draft_on_cpu = 0;
    for (const auto & draft : drafts_) {
        draft_masks += draft->kv().mask_bytes();
        draft_bytes += draft->kv().bytes();
        draft_on_cpu += draft->drafter().is_on_cpu() ? draft->kv().bytes() : 0;
    }
    const bool has_cpu = cpu != nullptr;
    add("kv", kv_.bytes(), has_cpu ? kv_.bytes(cpu) : 0);
    add("recurrent", recurrent_.bytes(), has_cpu ? recurrent_.bytes(cpu) : 0);
    add("trace", recurrent_.update_bytes(), has_cpu ? recurrent_.update_bytes(cpu) : 0);
    add("mask", kv_.mask_bytes() + draft_masks, has_cpu ? kv_.mask_bytes(cpu) : 0);
    add("draft", draft_bytes, draft_on_cpu);
    add("arena", arena.main + arena.cpu_split, arena.cpu_split);
    add("pool", graphs_.pool_bytes(), 0);
    return uses;
}

const char * Engine::largest_graph() const {
    const uint64_t prefill = graphs_.arena_bytes(GraphKind::APPEND);
    const uint64_t verify = graphs_.arena_bytes(GraphKind::VERIFY);
    const uint64_t draft = graphs_.arena_bytes(GraphKind::DRAFT);
    if (draft > std::max(prefill, verify)) {
        return "draft";
    }
    return verify > prefill ? "verify" : "prefill";
}

} // namespace dfl
