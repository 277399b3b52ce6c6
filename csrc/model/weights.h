// The weights of one model: bound by name, checked by shape, placed in the fastest buffer that
// works.
#pragma once

#include "model/gguf_file.h"
#include "model/hparams.h"
#include "model/packed_matrix.h"

#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace dfl {

class Backend;
class Devices;

// y = (weight x) * scale + bias; scale and bias are optional companions in the file.
struct Linear {
    ggml_tensor * weight = nullptr;        // [n_in, n_out], for ggml; or
    const PackedMatrix * packed = nullptr; // for our own kernels
    ggml_tensor * scale = nullptr;         // [1]; of experts [n_expert]
    ggml_tensor * bias = nullptr;          // [n_out]; of experts [n_out, n_expert]

    explicit operator bool() const { return weight != nullptr || packed != nullptr; }
    int64_t n_out() const { return packed != nullptr ? packed->n_out : weight->ne[1]; }
};

struct AttentionWeights {
    Linear q, k, v; // or
    Linear qkv;     // rows: q, then k, then v
    Linear output;
    ggml_tensor * q_norm = nullptr;       // [head_dim]
    ggml_tensor * k_norm = nullptr;       // [head_dim]
    ggml_tensor * sinks = nullptr;        // [n_head]
    ggml_tensor * rope_factors = nullptr; // [rope.n_dims / 2], divisors of the frequencies
};

struct DeltaNetWeights {
    Linear qkv, gate, output;
    Linear beta, alpha;              // or
    Linear beta_alpha;               // rows: of each key head its betas, then its alphas
    ggml_tensor * conv = nullptr;    // [d_conv, conv_channels]
    ggml_tensor * dt_bias = nullptr; // [n_v_heads]
    ggml_tensor * a = nullptr;       // [n_v_heads], -exp(A_log)
    ggml_tensor * norm = nullptr;    // [d_state]
};

struct FeedForwardWeights {
    Linear gate, up; // or
    Linear gate_up;  // rows: gate, then up
    Linear down;
};

struct ExpertWeights {
    Linear router;
    Linear gate, up;    // [n_embd, n_ff, n_expert], or
    Linear gate_up;     // [n_embd, 2 * n_ff, n_expert], rows: gate, then up
    Linear down;        // [n_ff, n_embd, n_expert]
    Linear shared_gate; // one output
    FeedForwardWeights shared;
};

// Norms of experts that stand beside a dense feed-forward, [n_embd] each.
struct ParallelExpertNorms {
    ggml_tensor * router = nullptr;       // of what the router reads
    ggml_tensor * experts = nullptr;      // of what the experts read
    ggml_tensor * post_dense = nullptr;   // on the dense part's output
    ggml_tensor * post_experts = nullptr; // on the experts' output
};

// What a layer takes of its token besides: x + norm(projection(act(gate x) * input)).
struct PerLayerWeights {
    Linear gate;       // [n_embd, n_per_layer]
    Linear projection; // [n_per_layer, n_embd]
};

struct LayerWeights {
    ggml_tensor * attn_norm = nullptr; // [n_embd]
    AttentionWeights attn;
    DeltaNetWeights delta;
    ggml_tensor * ffn_norm = nullptr; // [n_embd]
    FeedForwardWeights ffn;
    ExpertWeights experts;
    ParallelExpertNorms parallel_norms;
    ggml_tensor * post_attn_norm = nullptr; // [n_embd], on the attention's output
    ggml_tensor * post_ffn_norm = nullptr;  // [n_embd], on the feed-forward's output
    PerLayerWeights per_layer;
    ggml_tensor * per_layer_norm = nullptr; // [n_embd], on what it takes of its token
    ggml_tensor * output_scale = nullptr;   // [1], on what leaves the layer
};

// Bytes of weights that one kind of kernels multiplies with.
struct Placement {
    std::string kernels; // "q8_0 avx512vnni" of our own, or the name of a ggml buffer type
    uint64_t bytes;
};

struct Weights {
    ggml_tensor * output_norm = nullptr; // [n_embd]
    Linear output;                       // [n_embd, n_vocab]
    std::vector<LayerWeights> layers;

    // A drafter's: features [n_embd * n_taps] to its own width, and the norm after it.
    Linear fusion;
    ggml_tensor * fusion_norm = nullptr;
    // Matrices that only one kind of drafter has, by name.
    std::map<std::string, Linear> own;

    // Target token of each row of a drafter's reduced head; empty: the rows are the tokens.
    std::vector<int64_t> head_tokens;

    // Token embeddings stay in the mapped file; the engine converts the rows it needs. NULL for a
    // drafter that uses its target's.
    const void * token_embd = nullptr;
    ggml_type token_embd_type = GGML_TYPE_F32;

    // The same of what each layer takes of a token, [n_per_layer * n_layer] a row, or NULL; and
    // what is added to it, a projection of the embeddings, with its norm [n_per_layer].
    const void * per_layer_embd = nullptr;
    ggml_type per_layer_embd_type = GGML_TYPE_F32;
    Linear per_layer_projection;
    ggml_tensor * per_layer_projection_norm = nullptr;

    std::deque<PackedMatrix> packed; // Linear points to them
    std::vector<ggml_context_ptr> contexts;
    std::vector<ggml_backend_buffer_ptr> buffers;
    std::vector<Placement> placements;
    uint64_t mapped_bytes = 0;    // used where they lie in the file
    uint64_t copied_bytes = 0;    // in buffers of their own
    uint64_t cpu_split_bytes = 0; // of these, on the CPU beside another device
    uint64_t embedding_bytes = 0; // of token_embd, unless mapped_bytes has it as the head
};

// Embeddings of tokens as the model takes them, scaled: dst [n_embd, n].
void embed_rows(const Weights & w, const Hparams & hp, const int32_t * tokens, int64_t n,
                float * dst);

// What all layers take of tokens, scaled: dst [n_per_layer * n_layer, n].
void embed_per_layer(const Weights & w, const Hparams & hp, const int32_t * tokens, int64_t n,
                     float * dst);

// Done and total bytes; true: stop.
using LoadProgress = std::function<bool(uint64_t done, uint64_t total)>;

// Declares the tensors an architecture needs, then places and loads them all.
class WeightLoader {
  public:
    WeightLoader(const GgufFile & file, const Hparams & hp, Devices & devices);
    ~WeightLoader();

    const Hparams & hparams() const { return hp_; }

    // pattern: a schema::TENSOR_* constant. A missing tensor or another shape throws.
    ggml_tensor * vector(const char * pattern, int il, int64_t n);
    ggml_tensor * matrix(const char * pattern, int il, std::initializer_list<int64_t> ne,
                         ggml_op op);
    // Makes a tensor of values that are not in the file.
    ggml_tensor * computed(const char * name, const std::vector<float> & values);
    // Times a constant.
    ggml_tensor * scaled_vector(const char * pattern, int il, int64_t n, float factor);
    // With its ".scale" and ".bias" companions; plain: without, where such names mean other things.
    Linear linear(const char * pattern, int il, int64_t n_in, int64_t n_out, bool plain = false);
    // A stack of expert matrices, with their companions. packs: for our own kernels, which take the
    // n_out rows of each from first_row on; without, they are all that a matrix has.
    Linear expert_linear(const char * pattern, int il, int64_t n_in, int64_t n_out, bool packs,
                         int64_t first_row = 0, int64_t file_rows = 0);
    // Several matrices of one input as one, rows in this order: one product instead of several.
    // Empty where that is not to be had: other types, companions, or mapped weights that do not
    // follow each other in the file; and for our own kernels, which join products as they are.
    struct Part {
        const char * pattern;
        int64_t n_out;
    };
    Linear stacked(const std::vector<Part> & parts, int il, int64_t n_in);
    bool has(const char * pattern, int il) const;

    // Token embeddings, final norm, head (tied to the embeddings if the file has none), rope
    // factors.
    void shared_tensors();
    // Token embeddings alone.
    void token_embeddings();
    // What layers take of tokens besides, with its projections.
    void per_layer_inputs();
    // A tensor that the file may have and nobody uses.
    void ignore(const char * pattern, int il);
    // The factors of rope, for the layers that take them.
    void rope_factors();
    // A drafter's own head, or its own embeddings as one; nothing if the target's serves. Its rows
    // are n_vocab, or fewer where the file maps them to the target's tokens.
    void drafter_head();
    // q, k, v (separate or fused), output and their biases. q_width: rows of q.
    void attention(int il, int64_t q_width);
    void feed_forward(int il);
    // The router is the usual one unless the architecture has bound another.
    void experts(int il);

    Weights & weights() { return weights_; }

    // Allocates and fills. Throws DFL_STATUS_MEMORY or DFL_STATUS_CANCELLED.
    std::unique_ptr<Weights> load(const LoadProgress & progress);

  private:
    // A tensor or a packed matrix, and what fills it.
    struct TensorRequest {
        std::vector<std::string> file_names; // several: their rows one after the other
        std::vector<float> values;           // in place of the file's
        ggml_tensor * tensor = nullptr;
        PackedMatrix * packed = nullptr;
        bool mapped = false; // used where it lies in the file
    };

    ggml_tensor * request(const std::string & name, std::vector<int64_t> ne, ggml_op op);
    const ggml_tensor * checked(const std::string & name, const std::vector<int64_t> & ne,
                                ggml_op op) const;
    // Our own kernels for a tensor of this name; NULL where they have none, or do not run.
    const cpu::PackedProduct * product_for(const std::string & name, ggml_type type) const;
    // A tensor for our own kernels; NULL where they have none for it.
    const PackedMatrix * packed(const std::string & name, ggml_type type, PackedMatrix matrix);
    // Whether our own kernels serve all experts' matrices of a layer.
    bool packs_experts(int il) const;
    // Where tensors of one kind of buffer go.
    struct Place {
        const Backend * backend;
        ggml_backend_buffer_type_t type;

        bool operator<(const Place & o) const {
            return std::tie(backend, type) < std::tie(o.backend, o.type);
        }
    };
    Place choose(const ggml_tensor * meta, ggml_op op) const;
    bool can_map(const std::string & name, const Place & place) const;
    ggml_context * context_for(const Place & place);
    void check_nothing_left() const;
    uint64_t file_bytes(const TensorRequest & request) const;
    static uint64_t bytes_of(const TensorRequest & request);
    void map_in_place();
    void allocate(const Place & place, ggml_context * ctx);
    void count_copied(const Backend & backend, uint64_t bytes);
    void allocate_packed();
    void record_placement(const TensorRequest & request);
    void fill(const TensorRequest & request) const;

    const GgufFile & file_;
    const Hparams & hp_;
    Devices & devices_;
    std::unique_ptr<Weights> owned_;
    Weights & weights_;
    std::vector<TensorRequest> requests_;
    std::map<Place, ggml_context *> contexts_;
    std::set<std::string> read_directly_; // tensors nobody computes with
};

} // namespace dfl
