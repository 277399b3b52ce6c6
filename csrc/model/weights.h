// The weights of a model: bound by name, checked by shape, placed in the fastest buffer that works.
#pragma once

#include "model/gguf_file.h"
#include "model/hparams.h"
#include "model/ngram_table.h"
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

// y = (weight x) * scale + bias: weight [n_in, n_out] for ggml, or packed for our own CPU kernels;
// optional scale [1], for experts [n_expert], and bias [n_out], for experts [n_out, n_expert].
struct Linear {
    ggml_tensor * weight = nullptr;
    const PackedMatrix * packed = nullptr;
    ggml_tensor * scale = nullptr;
    ggml_tensor * bias = nullptr;

    explicit operator bool() const { return weight != nullptr || packed != nullptr; }
    int64_t n_out() const { return packed != nullptr ? packed->n_out : weight->ne[1]; }
};

// Weights of attention: q, k and v, or their rows joined as qkv; q_norm and k_norm [head_dim],
// sinks [n_head], and rope_factors [rope.n_dims / 2], which divide the frequencies.
struct AttentionWeights {
    Linear q, k, v;
    Linear qkv;
    Linear output;
    ggml_tensor * q_norm = nullptr;
    ggml_tensor * k_norm = nullptr;
    ggml_tensor * sinks = nullptr;
    ggml_tensor * rope_factors = nullptr;
};

// Weights of a Gated DeltaNet: beta and alpha, or beta_alpha with betas, then alphas, by key head;
// conv [d_conv, conv_channels], dt_bias and a = -exp(A_log) [n_v_heads], norm [d_state].
struct DeltaNetWeights {
    Linear qkv, gate, output;
    Linear beta, alpha;
    Linear beta_alpha;
    ggml_tensor * conv = nullptr;
    ggml_tensor * dt_bias = nullptr;
    ggml_tensor * a = nullptr;
    ggml_tensor * norm = nullptr;
};

// Weights of a dense feed-forward: gate and up, or their rows joined as gate_up; and down.
struct FeedForwardWeights {
    Linear gate, up;
    Linear gate_up;
    Linear down;
};

// Weights of a mixture of experts: gate and up [n_embd, n_ff, n_expert], or their rows joined as
// gate_up; down [n_ff, n_embd, n_expert]; and those of a shared expert.
struct ExpertWeights {
    Linear router;
    Linear gate, up;
    Linear gate_up;
    Linear down;
    Linear shared_gate;
    FeedForwardWeights shared;
};

// Norms [n_embd] of a mixture of experts that runs beside a dense feed-forward.
struct ParallelExpertNorms {
    ggml_tensor * router = nullptr;
    ggml_tensor * experts = nullptr;
    ggml_tensor * post_dense = nullptr;
    ggml_tensor * post_experts = nullptr;
};

// Weights of per-layer token embeddings: x + norm(projection(act(gate x) * embedding)).
struct PerLayerWeights {
    Linear gate;
    Linear projection;
};

// Weights of a layer. All norms are [n_embd]; output_scale [1] multiplies the layer's output.
struct LayerWeights {
    ggml_tensor * attn_norm = nullptr;
    AttentionWeights attn;
    DeltaNetWeights delta;
    ggml_tensor * ffn_norm = nullptr;
    FeedForwardWeights ffn;
    ExpertWeights experts;
    ParallelExpertNorms parallel_norms;
    ggml_tensor * post_attn_norm = nullptr;
    ggml_tensor * post_ffn_norm = nullptr;
    PerLayerWeights per_layer;
    ggml_tensor * per_layer_norm = nullptr;
    ggml_tensor * output_scale = nullptr;
};

// Number of weight bytes that one kind of kernel multiplies with.
struct Placement {
    std::string kernels; // our kernel ("q8_0 avx512vnni"), or a ggml buffer type
    uint64_t bytes;
};

struct Weights {
    ggml_tensor * output_norm = nullptr;
    Linear output;
    std::vector<LayerWeights> layers;

    // Drafter: projection of features [n_embd * n_taps] to its width, and the norm of the result.
    Linear fusion;
    ggml_tensor * fusion_norm = nullptr;
    // MTP: norm of the token embeddings; fusion_norm is that of the hidden states.
    ggml_tensor * embedding_norm = nullptr;
    // Drafter: matrices that only this kind of drafter has, by name.
    std::map<std::string, Linear> own;

    // Drafter: target token of each row of a reduced head; empty: row i is token i.
    std::vector<int64_t> head_tokens;
    // N-gram table, in the mapped file: NULL for other kinds of drafters.
    std::unique_ptr<const NgramTable> ngrams;

    // Token embeddings in the mapped file; NULL for a drafter that uses its target's.
    const void * token_embd = nullptr;
    ggml_type token_embd_type = GGML_TYPE_F32;

    // Per-layer token embeddings in the mapped file, rows [n_per_layer * n_layer], or NULL; and the
    // projection of token embeddings that is added to them, with its norm [n_per_layer].
    const void * per_layer_embd = nullptr;
    ggml_type per_layer_embd_type = GGML_TYPE_F32;
    Linear per_layer_projection;
    ggml_tensor * per_layer_projection_norm = nullptr;

    std::deque<PackedMatrix> packed; // packed matrices, which Linear::packed points to
    std::vector<ggml_context_ptr> contexts;
    std::vector<ggml_backend_buffer_ptr> buffers;
    std::vector<Placement> placements;
    // Bytes of weights in the mapped file, in buffers, in buffers on the CPU of a split model, and
    // of mapped embedding tables that are not the head too.
    uint64_t mapped_bytes = 0;
    uint64_t copied_bytes = 0;
    uint64_t cpu_split_bytes = 0;
    uint64_t embedding_bytes = 0;
    // Bytes of all weights of experts, mapped or not, and of those that a GPU leaves to the CPU.
    uint64_t expert_bytes = 0;
    uint64_t cpu_expert_bytes = 0;
};

// Returns the name of a block's tensor. pattern: a schema::TENSOR_* constant.
std::string tensor_name(const char * pattern, int block);

// Writes scaled embeddings of tokens: dst [n_embd, n].
void embed_rows(const Weights & w, int64_t n_embd, float scale, const int32_t * tokens, int64_t n,
                float * dst);

// Writes scaled per-layer embeddings of tokens: dst [n_per_layer * n_layer, n].
void embed_per_layer(const Weights & w, const Hparams & hp, const int32_t * tokens, int64_t n,
                     float * dst);

// Called with the loaded and the total bytes; returns true to cancel.
using LoadProgress = std::function<bool(uint64_t done, uint64_t total)>;

// Declares the tensors that an architecture needs, then places and loads them.
class WeightLoader {
  public:
    // first_block: block of the file that is layer 0 of hp.
    WeightLoader(const GgufFile & file, const Hparams & hp, Devices & devices, int first_block = 0);
    ~WeightLoader();

    const Hparams & hparams() const { return hp_; }
    const std::string & path() const { return file_.path(); }

    // Load a tensor; pattern: a schema::TENSOR_* constant. Throw if it is missing or misshapen.
    ggml_tensor * vector(const char * pattern, int il, int64_t n);
    ggml_tensor * matrix(const char * pattern, int il, std::initializer_list<int64_t> ne,
                         ggml_op op);
    // Makes a tensor of computed values, which the file does not have.
    ggml_tensor * computed(const char * name, const std::vector<float> & values);
    // Loads a vector times a constant factor.
    ggml_tensor * scaled_vector(const char * pattern, int il, int64_t n, float factor);
    // Loads a matrix, with ".scale" and ".bias" unless plain (if these names mean other things).
    Linear linear(const char * pattern, int il, int64_t n_in, int64_t n_out, bool plain = false);
    // Loads the matrices of all experts. packs: true for our own CPU kernels, which get the rows
    // [first_row, first_row + n_out) of the file_rows rows of each matrix.
    Linear expert_linear(const char * pattern, int il, int64_t n_in, int64_t n_out, bool packs,
                         int64_t first_row = 0, int64_t file_rows = 0);
    // Joins matrices of the same input. Returns an empty Linear if types differ, scales or biases
    // exist, mapped matrices are not adjacent, or our own CPU kernels join products anyway.
    struct Part {
        const char * pattern;
        int64_t n_out;
    };
    Linear stacked(const std::vector<Part> & parts, int il, int64_t n_in);
    bool has(const char * pattern, int il) const;
    // Returns the rows of a matrix outside of the layers; 0 if the file lacks it.
    int64_t n_rows(const char * name) const;

    // Loads token embeddings, final norm, head (by default the embeddings) and rope factors.
    void shared_tensors();
    void token_embeddings(const char * pattern);
    // Loads per-layer token embeddings and their projections.
    void per_layer_inputs();
    // Declares that a tensor of the file is not used.
    void ignore(const char * pattern, int il);
    void rope_factors();
    // Reads the drafter's map from rows of its head to the target's token ids, if it has one.
    void head_map();
    // Loads the head: of a matrix with a row for each token, the rows in weights().head_tokens.
    void reduced_head(const char * pattern);
    // Loads a drafter's head, or its embeddings as head, or neither if it uses the target's head. A
    // head with fewer rows than n_vocab needs a map to the target's tokens in the file.
    void drafter_head();
    // Loads the n-gram table of a drafter file that is one.
    void ngram_table();
    // Loads Q, K, V and output projections with biases. q_width: rows of Q.
    void attention(int il, int64_t q_width);
    void feed_forward(int il);
    // Loads experts, and the usual router unless the architecture has loaded another router.
    void experts(int il);

    Weights & weights() { return weights_; }

    // Allocates and fills all tensors. Throws DFL_STATUS_MEMORY or DFL_STATUS_CANCELLED.
    std::unique_ptr<Weights> load(const LoadProgress & progress);

  private:
    // A tensor or packed matrix to load, and the source of its values.
    struct TensorRequest {
        std::vector<std::string> file_names; // tensors of the file whose rows are joined in order
        std::vector<int64_t> rows;           // rows of the file's tensor to load; empty: all
        std::vector<float> values;           // values of a tensor that is not in the file
        ggml_tensor * tensor = nullptr;
        PackedMatrix * packed = nullptr;
        bool mapped = false; // true: the weights stay in the mapped file
    };

    // Returns the name of a tensor of layer il, or of no layer.
    std::string name_of(const char * pattern, int il) const;
    ggml_tensor * request(const std::string & name, std::vector<int64_t> ne, ggml_op op);
    const ggml_tensor * checked(const std::string & name, const std::vector<int64_t> & ne,
                                ggml_op op) const;
    // Returns our own CPU kernel for a tensor; NULL if there is none or the device cannot run it.
    const cpu::PackedProduct * product_for(const std::string & name, ggml_type type) const;
    // Returns the tensor packed for our own CPU kernels, or NULL if there is no kernel.
    const PackedMatrix * packed(const std::string & name, ggml_type type, PackedMatrix matrix);
    bool packs_experts(int il) const;
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
    void count_experts();
    void allocate_packed();
    void record_placement(const TensorRequest & request);
    void fill(const TensorRequest & request) const;

    const GgufFile & file_;
    const Hparams & hp_;
    Devices & devices_;
    int first_block_;
    std::unique_ptr<Weights> owned_;
    Weights & weights_;
    std::vector<TensorRequest> requests_;
    std::map<Place, ggml_context *> contexts_;
    std::set<std::string> read_directly_; // tensors that the loader has read itself or may ignore
};

} // namespace dfl
