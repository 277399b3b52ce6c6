// Kernels of each architecture's CPU graphs: our own code multiplies every matrix exactly once,
// and only the ggml operations listed in ggml_nodes_of() remain.
#include "arch/model.h"
#include "cpu/isa/kernels.h"
#include "draft/drafter.h"
#include "graph/graph.h"
#include "layers/attention.h"
#include "layers/decoder.h"

#include "check.h"
#include "models.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <vector>

using namespace dfl;

namespace {

constexpr ggml_type TYPES[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q4_0,
                               GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0,
                               GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_MXFP4};
constexpr int64_t N_CELLS = 256, MOST_ROWS = 128;

struct Contents {
    std::map<std::string, int> products; // number of products by name of the packed matrix
    std::map<std::string, int> of_ggml;  // number of ggml operations by name
    int n_own = 0;                       // nodes with our own kernels
};

bool computes_nothing(const ggml_tensor * node) {
    return node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE ||
           node->op == GGML_OP_TRANSPOSE;
}

Contents contents_of(const CachedGraph & cached) {
    Contents found;
    std::map<const ggml_tensor *, const CpuStep *> steps;
    for (const auto & step : cached.cpu_nodes.list) {
        steps[step->dst] = step.get();
    }
    for (int i = 0; i < ggml_graph_n_nodes(cached.graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(cached.graph, i);
        if (computes_nothing(node)) {
            continue;
        }
        if (node->op != GGML_OP_CUSTOM) {
            ++found.of_ggml[ggml_op_name(node->op)];
            continue;
        }
        ++found.n_own;
        for (const PackedMatrix * matrix : steps.at(node)->node->weights()) {
            ++found.products[matrix->name];
        }
    }
    return found;
}

struct Graphs {
    Graphs(const Hparams & hp, const Weights & weights)
        : hp(hp), weights(weights), devices(cpu_device(), {}, 1, {}, DFL_DRY_RUN_NONE, true),
          place([this](int64_t) -> Backend & { return devices.main(); }),
          kv(hp, place, GGML_TYPE_F16, GGML_TYPE_F16, {N_CELLS, MOST_ROWS, 1}),
          recurrent(hp, place, 1), pool(devices, 4096) {
        recurrent.reserve_updates(MOST_ROWS, false);
    }

    Contents contents(BatchShape shape, const std::function<void(GraphContext & g)> & build) {
        shape.n_kv = {N_CELLS};
        shape.scans = hp.n_recurrent() > 0;
        return contents_of(pool.get(shape, [&](CachedGraph & cached) {
            cached.in = make_inputs(cached.ctx.get(), hp, kv, cached.shape);
            GraphContext g = {cached.ctx.get(), cached.graph, cached.cpu_nodes, hp, weights, kv,
                              recurrent,        cached.shape, cached.in};
            build(g);
        }));
    }

    const Hparams & hp;
    const Weights & weights;
    Devices devices;
    LayerPlace place;
    KvCache kv;
    RecurrentCache recurrent;
    GraphPool pool;
};

// Fewest own nodes of a layer. A norm, gate or residual that is no longer fused adds a ggml node; a
// product that is no longer joined with others adds an own node.
int attention_nodes() { return 4; } // nodes: QKV, norm with rope and store, attention, output
int recurrent_nodes() { return 4; } // nodes: four joined products, prepare, scan, output
int dense_nodes() { return 2; }     // nodes: gate and up, down
int expert_nodes(bool shared) {     // router, routing, gate and up, down; a shared expert adds 3
    return shared ? 4 + 3 : 4;
}

// Returns the number of different ropes among the layers. Each needs one table of angles.
int rope_kinds(const Hparams & hp) {
    std::vector<RopeShape> found;
    for (const LayerShape & layer : hp.layers) {
        if (!layer.recurrent && std::find(found.begin(), found.end(), layer.rope) == found.end()) {
            found.push_back(layer.rope);
        }
    }
    return static_cast<int>(found.size());
}

int nodes_of(const Hparams & hp, const Weights & weights) {
    int n = rope_kinds(hp) + 1; // nodes: input of each rope table, output head
    n += hp.logit_softcap > 0 ? 1 : 0;
    for (int64_t il = 0; il < hp.n_layer(); ++il) {
        n += hp.layers[il].recurrent ? recurrent_nodes() : attention_nodes();
        const LayerWeights & layer = weights.layers[il];
        for (const ggml_tensor * norm :
             {layer.post_attn_norm, layer.post_ffn_norm, layer.parallel_norms.post_dense,
              layer.parallel_norms.post_experts}) {
            n += norm != nullptr ? 1 : 0; // a norm fused with the residual and the layer scale
        }
        n += layer.parallel_norms.experts != nullptr ? dense_nodes() : 0;
        n += hp.experts.n_expert > 0 ? expert_nodes(hp.experts.n_ff_shared > 0) : dense_nodes();
    }
    return n;
}

// Returns the number of ggml nodes by operation: only ropes, which compute the angle tables.
std::map<std::string, int> ggml_nodes_of(const Hparams & hp) {
    std::map<std::string, int> nodes;
    nodes["ROPE"] = rope_kinds(hp);
    return nodes;
}

std::string kernels_of(ggml_type type) {
    std::string name = ggml_type_name(type);
    std::transform(name.begin(), name.end(), name.begin(), ::tolower);
    return name + " ";
}

void check_own_kernels(const Weights & weights, ggml_type type) {
    const bool here = cpu::row_kernel() != cpu::kernels().back().rows;
    int n_of_type = 0;
    for (const Placement & placement : weights.placements) {
        if (placement.kernels == "CPU" || placement.kernels == "CPU_Mapped") {
            continue;
        }
        const bool is_of_type = placement.kernels.rfind(kernels_of(type), 0) == 0;
        CHECK(is_of_type || placement.kernels.rfind("f32 ", 0) == 0);
        n_of_type += is_of_type;
        CHECK(!here ||
              (!contains(placement.kernels, "ggml") && !contains(placement.kernels, "portable")));
    }
    CHECK(n_of_type > 0);
}

// Checks that each matrix is multiplied once, or twice if one tensor holds gate and up.
void check_products(const Contents & found, const Weights & weights,
                    const std::set<std::string> & elsewhere) {
    for (const PackedMatrix & matrix : weights.packed) {
        const auto at = found.products.find(matrix.name);
        const int n = at == found.products.end() ? 0 : at->second;
        const int expected = matrix.n_out < matrix.n_file_rows() ? 2 : 1;
        CHECK(n == (elsewhere.count(matrix.name) > 0 ? 0 : expected));
    }
}

void check_nodes(const Contents & found, const Hparams & hp, const Weights & weights) {
    const int n_own = nodes_of(hp, weights);
    const auto expected = ggml_nodes_of(hp);
    for (const auto & [operation, n] : found.of_ggml) {
        const auto at = expected.find(operation);
        if (at == expected.end() || at->second != n) {
            std::fprintf(stderr, "%s: %d of ggml's\n", operation.c_str(), n);
        }
    }
    CHECK(found.of_ggml == expected);
    if (found.n_own != n_own) {
        std::fprintf(stderr, "%d nodes of ours, expected %d\n", found.n_own, n_own);
    }
    CHECK(found.n_own == n_own);
}

void check_target(const Model & model, ggml_type type) {
    const Hparams & hp = model.hparams();
    check_own_kernels(model.weights(), type);
    Graphs graphs(hp, model.weights());
    for (const GraphKind kind : {GraphKind::APPEND, GraphKind::VERIFY}) {
        BatchShape shape;
        shape.kind = kind;
        shape.n_rows = shape.n_out = kind == GraphKind::APPEND ? 1 : 4;
        const Contents found =
            graphs.contents(shape, [&](GraphContext & g) { model.arch().build(g); });
        check_products(found, model.weights(), {});
        check_nodes(found, hp, model.weights());
    }
}

void check_drafter(const std::shared_ptr<const Model> & model, const std::string & path,
                   ggml_type type) {
    const Drafter drafter(path, model, on_cpu());
    Graphs graphs(drafter.hparams(), drafter.weights());
    check_own_kernels(drafter.weights(), type);
    const std::set<std::string> fusion = {"fc.weight"};
    BatchShape shape;
    shape.kind = GraphKind::DRAFT;
    shape.n_rows = shape.n_out = 8;
    const Contents block = graphs.contents(shape, [&](GraphContext & g) {
        build_decoder(g, {mixer_sublayer(self_attention), feed_forward_sublayer()},
                      drafter.head(*model));
    });
    check_products(block, drafter.weights(), fusion);
    check_nodes(block, drafter.hparams(), drafter.weights());
}

} // namespace

int main() {
    std::set<const Arch *> met;
    for (const ggml_type type : TYPES) {
        const std::string ending = std::string("-") + ggml_type_name(type) + ".gguf";
        const std::string drafter = models_folder() + "/drafter" + ending;
        for (const auto & file : std::filesystem::directory_iterator(models_folder())) {
            const std::string path = file.path();
            if (path != drafter && path.find(ending) != std::string::npos) {
                const auto model = std::make_shared<const Model>(path, on_cpu());
                met.insert(&model->arch());
                check_target(*model, type);
                check_drafter(model, drafter, type);
            }
        }
    }
    CHECK(met.size() == architectures().size());
}
