/* The C ABI of dflash-gguf. cffi parses this file unchanged, so declarations must not use macros.
 *
 * A call that can fail returns a dfl_status and takes a dfl_error * (may be NULL) as last argument.
 * "Errors:" lists dfl_status codes without DFL_STATUS_. NULL pointers are ARGUMENT errors, but free
 * functions accept NULL. "out" marks memory that a call writes. Shapes are [rows][columns]. */
#ifndef DFLASH_H
#define DFLASH_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

enum { DFL_ABI_VERSION = 31 };

typedef enum {
    DFL_STATUS_OK = 0,
    DFL_STATUS_ARGUMENT = 1,    /* an argument of the call is invalid */
    DFL_STATUS_FILE = 2,        /* a file is missing, truncated, damaged or of another kind */
    DFL_STATUS_UNSUPPORTED = 3, /* the input is valid, but this build or device cannot run it */
    DFL_STATUS_MEMORY = 4,      /* host or device memory is full; the message names the bytes */
    DFL_STATUS_COMPUTE = 5,     /* the device failed, or its results are wrong or not finite */
    DFL_STATUS_CANCELLED = 6,   /* a progress callback stopped the call */
    DFL_STATUS_INTERNAL = 7     /* this library has a defect */
} dfl_status;

/* Result of a call: a dfl_status, and on failure one sentence with the value and its limit. */
typedef struct {
    int32_t code;
    char message[512];
} dfl_error;

typedef enum {
    DFL_MAX_TOP = 64,       /* largest number of best tokens that a device selects from a row */
    DFL_MAX_VERIFY = 256,   /* largest number of rows of all pending verifies together */
    DFL_MAX_THREADS = 512,  /* largest number of threads of an engine, as in ggml */
    DFL_MAX_PARALLEL = 256, /* largest number of sequences of an engine */
    DFL_PAGE = 64           /* number of K/V cells in a page, the unit of allocation and sharing */
} dfl_limit;

/* Returns DFL_ABI_VERSION of the library, which must equal that of the caller's header. */
int32_t dfl_abi_version(void);

/* Return the version of the loaded ggml, and of the ggml that this library was built with. */
const char * dfl_ggml_version(void);
const char * dfl_ggml_build_version(void);

typedef enum { DFL_DEVICE_CPU = 0, DFL_DEVICE_GPU = 1, DFL_DEVICE_OTHER = 2 } dfl_device_type;

typedef struct {
    char name[64];
    char description[128];
    int32_t type; /* kind of device, a dfl_device_type */
    uint64_t free_bytes;
    uint64_t total_bytes;
} dfl_device_info;

/* Loads a ggml backend module (a libggml-*.so) and adds its devices to ggml's. Errors: FILE. */
dfl_status dfl_backend_load(const char * path, dfl_error * err);
int32_t dfl_device_count(void);
/* Describes a device. index: 0 to dfl_device_count() - 1. Errors: ARGUMENT (index). */
dfl_status dfl_device_get(int32_t index, dfl_device_info * info, dfl_error * err);

/* Writes the names of the CPU's extra weight buffer types ("AMX", "CPU_REPACK", ...), separated by
 * commas. names: out, size bytes. Errors: ARGUMENT (the names need more than size bytes). */
dfl_status dfl_extra_buffer_types(char * names, uint64_t size, dfl_error * err);

/* Writes the names of the instruction sets that have kernels here and run on this CPU, best first,
 * separated by commas. The environment variable DFLASH_CPU names the best set to use. names: out,
 * size bytes. Errors: ARGUMENT (DFLASH_CPU names no such set; names need more than size bytes). */
dfl_status dfl_cpu_kernel_sets(char * names, uint64_t size, dfl_error * err);

/* Multiplies quantised matrices in a CPU weight buffer type and compares the products with those of
 * plain buffers. Call it in a child process: kernels that the machine cannot run kill the process.
 * Errors: ARGUMENT (no buffer type of this name), COMPUTE (wrong products). */
dfl_status dfl_probe_buffer_type(const char * name, dfl_error * err);

/* The weights of one GGUF file, immutable and shareable between threads; engines keep them. */
typedef struct dfl_model dfl_model;

/* Receives done and total bytes or tokens of a call; a result other than 0 cancels the call. */
typedef int32_t (*dfl_progress)(void * user, uint64_t done, uint64_t total);

/* Selects a dry run, which assigns weights to devices without reading them and counts memory
 * without allocating it. An engine of a dry run cannot hold sequences. */
typedef enum {
    DFL_DRY_RUN_NONE = 0,
    DFL_DRY_RUN_DEVICE = 1, /* counts memory on the device that a real load would use */
    DFL_DRY_RUN_CUDA = 2    /* estimates memory on a CUDA GPU that need not be present */
} dfl_dry_run;

/* Options of loading a model or drafter. device: name of the device for layers that are not on the
 * CPU; NULL: the first GPU, else the CPU. n_gpu_layers: number of last layers on that device, the
 * output head counted as one; < 0: all, unless the device is the CPU. n_cpu_moe: number of first
 * layers whose experts stay on the CPU. n_threads: threads that rearrange weights; 0: one per
 * usable core. repack: 1: weights may be rearranged for faster CPU kernels; 0: weights stay as in
 * the file. excluded_buffer_types: CPU buffer types that must not hold weights, separated by
 * commas; may be NULL. progress: receives bytes, with `user`; may be NULL. dry_run: dfl_dry_run.
 * Choices that replace those of a drafter's file: draft_embedding_scale: factor of its token
 * embeddings, "raw" (1) or "sqrt" (that of the target's embeddings, else sqrt(hidden size)).
 * draft_attention: "causal" or "bidirectional" attention within a block. "auto" or NULL: the
 * file's. draft_tap_shift: added to the indices of the target layers that it reads.
 * draft_unwindowed: 1: its layers with a sliding window attend to all positions. draft_vocab:
 * number of tokens with the lowest ids that an MTP layer drafts, beside the end tokens; 0: all.
 * draft_gpu_layers: of a drafter: 0: it stays on the CPU, else it is on its target's device. */
typedef struct {
    const char * device;
    int32_t n_gpu_layers;
    int32_t n_cpu_moe;
    int32_t n_threads;
    int32_t repack;
    const char * excluded_buffer_types;
    dfl_progress progress;
    void * user;
    int32_t dry_run;
    const char * draft_embedding_scale;
    const char * draft_attention;
    int32_t draft_tap_shift;
    int32_t draft_unwindowed;
    int32_t draft_vocab;
    int32_t draft_gpu_layers;
} dfl_model_params;

typedef struct {
    char architecture[64];
    char name[256];
    char device[64];
    int64_t n_vocab;
    int64_t n_embd;
    int64_t n_layer;           /* number of executed layers, without MTP blocks */
    int64_t n_recurrent;       /* number of executed layers with a recurrent state */
    int64_t n_ctx_train;       /* context length of the training, in tokens */
    uint64_t mapped_bytes;     /* bytes of weights used in place in the mapped file */
    uint64_t copied_bytes;     /* bytes of weights copied to buffers */
    uint64_t cpu_split_bytes;  /* part of copied_bytes that is on the CPU beside another device */
    uint64_t embedding_bytes;  /* mapped bytes of token embeddings, which are not in mapped_bytes */
    int64_t n_expert;          /* number of experts of a layer; 0: the model has none */
    int64_t n_expert_used;     /* number of experts of a layer that a token uses */
    uint64_t expert_bytes;     /* bytes of the weights of all experts, without shared ones */
    uint64_t cpu_expert_bytes; /* part of expert_bytes that is on the CPU beside another device */
    int32_t on_gpu;            /* 1: the device is not the CPU, or a dry run assumes a CUDA GPU */
    int32_t has_drafter;       /* 1: dfl_drafter_load() takes the model's own file: its MTP layer */
    int32_t n_placements;
} dfl_model_info;

/* Bytes of the weights that one kind of kernel multiplies. */
typedef struct {
    char kernels[64]; /* kernels of this library ("q8_0 avx512vnni") or a ggml buffer type */
    uint64_t bytes;
} dfl_placement;

/* Loads the weights of a GGUF file. Errors: ARGUMENT, FILE, UNSUPPORTED, MEMORY, CANCELLED. */
dfl_status dfl_model_load(const char * path, const dfl_model_params * params, dfl_model ** model,
                          dfl_error * err);
void dfl_model_free(dfl_model * model);
dfl_status dfl_model_get_info(const dfl_model * model, dfl_model_info * info, dfl_error * err);
/* Describes a placement of a model's weights. index: 0 to n_placements - 1. Errors: ARGUMENT. */
dfl_status dfl_model_get_placement(const dfl_model * model, int32_t index,
                                   dfl_placement * placement, dfl_error * err);

/* The weights of a drafter, checked against a target. */
typedef struct dfl_drafter dfl_drafter;

typedef struct {
    char kind[16]; /* "dflash", "mtp" or "ngram" (an n-gram table) */
    char architecture[64];
    char name[256];
    int64_t n_layer;
    int64_t block_size; /* largest number of rows of a draft: the last token and drafted tokens;
                         * 0: no pass, for dfl_suffix_index_create() instead of an engine */
    int32_t mask_token;
    int32_t n_taps;        /* number of target layers whose input the drafter reads */
    int32_t n_causal;      /* number of layers with causal attention within a block */
    int32_t n_windowed;    /* number of layers with a sliding window */
    int32_t scale_is_open; /* 1: the target scales embeddings, the drafter's file has no scale */
    float embedding_scale; /* factor of token embeddings */
    float sqrt_scale;      /* factor that draft_embedding_scale "sqrt" chooses */
    uint64_t mapped_bytes;
    uint64_t copied_bytes;
    uint64_t cpu_split_bytes; /* part of copied_bytes that is on the CPU beside another device */
    int32_t n_placements;
} dfl_drafter_info;

/* Loads a drafter for its target's device; device, n_gpu_layers, n_cpu_moe, dry_run are ignored.
 * Value i of the metadata key target_layers is the residual stream that enters target layer i.
 * Errors: as dfl_model_load; FILE also if hidden size, taps, mask token or tokens do not fit. */
dfl_status dfl_drafter_load(const char * path, const dfl_model * target,
                            const dfl_model_params * params, dfl_drafter ** drafter,
                            dfl_error * err);
void dfl_drafter_free(dfl_drafter * drafter);
dfl_status dfl_drafter_get_info(const dfl_drafter * drafter, dfl_drafter_info * info,
                                dfl_error * err);
dfl_status dfl_drafter_get_placement(const dfl_drafter * drafter, int32_t index,
                                     dfl_placement * placement, dfl_error * err);

/* The caches, graphs and drafter state that the sequences of one model share. */
typedef struct dfl_engine dfl_engine;

typedef struct {
    int64_t n_ctx;             /* number of tokens that all sequences can hold together */
    int32_t n_parallel;        /* largest number of sequences, 1 to DFL_MAX_PARALLEL */
    int64_t n_ubatch;          /* largest number of prompt tokens in a pass */
    int32_t n_threads;         /* compute threads; 0: one per fast physical core within the quota */
    const char * cache_type_k; /* ggml type of cached keys: "f32", "f16", "bf16", "q8_0", ... */
    const char * cache_type_v;
    const dfl_drafter * const * drafters; /* [n_drafters] made for the model, not of kind "ngram" */
    int32_t n_drafters;
    int64_t draft_window; /* number of last target positions that drafters attend to */
    const int32_t * taps; /* [n_taps] hidden states that all_features gets, see dfl_batch_entry */
    int32_t n_taps;
} dfl_engine_params;

typedef struct {
    int64_t n_ctx;
    int32_t n_parallel;
    int32_t n_threads;
    int32_t n_memory;
    uint64_t cell_bytes;       /* bytes of a K/V cell in all layers without a sliding window */
    int32_t partial_prefix_ok; /* 1: dfl_sequence_restore takes any part of a prefix */
    int64_t n_graphs_built;
    int64_t n_graph_nodes; /* number of nodes of the largest graph so far, views included */
    int64_t n_passes;
    uint64_t bytes_read;      /* bytes copied from device tensors to the host so far */
    uint64_t submit_ns;       /* nanoseconds spent submitting graphs; a CPU computes meanwhile */
    uint64_t wait_ns;         /* nanoseconds spent waiting for submitted graphs to finish */
    char largest_graph[16];   /* kind of graph that sizes the arena: "prefill", "verify", "draft" */
    char cpu_operations[128]; /* operations that only the CPU supports, separated by commas */
} dfl_engine_info;

/* Memory of one use on one device; a use of two devices has two records. place: name of the device.
 * name: "kv" (the target's K/V cache); "mask" (attention masks of target and drafters, none on a
 * CPU); "recurrent" (states of recurrent layers); "trace" (their node updates from a verify to its
 * commit); "draft" (K/V caches and features of the drafters); "arena" (results and inputs of
 * graphs); "pool" (estimate of the memory that the device's library takes beside the arena). */
typedef struct {
    char name[16];
    char place[64];
    uint64_t bytes;
} dfl_memory;

/* Creates an engine, which keeps the model and the drafters alive. Two threads must not use an
 * engine or its sequences at once; calls that change them fail with ARGUMENT within a callback.
 * Errors: ARGUMENT, UNSUPPORTED (cache types; the message lists the valid pairs), MEMORY. */
dfl_status dfl_engine_create(const dfl_model * model, const dfl_engine_params * params,
                             dfl_engine ** engine, dfl_error * err);
/* Frees an engine's handle. The engine stays until its sequences and prefixes are freed as well. */
void dfl_engine_free(dfl_engine * engine);
dfl_status dfl_engine_get_info(const dfl_engine * engine, dfl_engine_info * info, dfl_error * err);
/* Returns the number of K/V cells in pages that no sequence and no prefix holds; -1 for NULL. */
int64_t dfl_engine_n_free_cells(const dfl_engine * engine);
/* Returns the bytes that the engine's prefixes take in host memory; -1 for NULL. */
int64_t dfl_engine_prefix_bytes(const dfl_engine * engine);
/* Returns the largest number of rows of all pending verifies, or of a draft; -1 for NULL. */
int64_t dfl_engine_verify_rows(const dfl_engine * engine);
/* Describes memory of an engine. index: 0 to n_memory - 1. Errors: ARGUMENT (index). */
dfl_status dfl_engine_get_memory(const dfl_engine * engine, int32_t index, dfl_memory * memory,
                                 dfl_error * err);
/* Makes the device select the k best tokens of every row in later passes; k: 0 (off) to
 * DFL_MAX_TOP. active: out, k, or 0 if the device cannot select or is a CPU. Errors: ARGUMENT. */
dfl_status dfl_engine_set_top_k(dfl_engine * engine, int32_t k, int32_t * active, dfl_error * err);
/* Raises dfl_engine_verify_rows to n, 1 to DFL_MAX_VERIFY; a smaller n does nothing. Takes memory
 * for node updates, features and graphs. Rows of the last pass become unreadable. Errors: ARGUMENT
 * (n; a verify waits for its commit), MEMORY (the message names the bytes; nothing has changed). */
dfl_status dfl_engine_reserve_verify(dfl_engine * engine, int64_t n, dfl_error * err);

/* One text in an engine: its tokens, K/V cells and recurrent states. */
typedef struct dfl_sequence dfl_sequence;

/* Creates an empty sequence, which keeps the engine alive. Errors: ARGUMENT (the engine is a dry
 * run), UNSUPPORTED (the engine has n_parallel sequences already). */
dfl_status dfl_sequence_create(dfl_engine * engine, dfl_sequence ** sequence, dfl_error * err);
/* Frees a sequence and its cells. Must not be called from within a callback. */
void dfl_sequence_free(dfl_sequence * sequence);
/* Returns the number of tokens of a sequence in the caches; -1 for NULL. */
int64_t dfl_sequence_position(const dfl_sequence * sequence);
/* Returns the number of free cells of the engine that n more tokens take; -1 for NULL. */
int64_t dfl_sequence_cells_needed(const dfl_sequence * sequence, int64_t n);

/* Copies the tokens of a sequence. tokens: out, [dfl_sequence_position]. Errors: ARGUMENT. */
dfl_status dfl_sequence_get_tokens(const dfl_sequence * sequence, int32_t * tokens,
                                   dfl_error * err);

/* Part of a batch: tokens of one sequence. tokens: [n] to append or, if is_verify is 1, candidates.
 * parents: of candidates: NULL for a chain, else [n] parent nodes: -1 for node 0 (the root, which
 * is chosen but not appended yet), 0 <= parents[i] < i for the others. n_remaining: number of
 * prompt tokens that later passes append; if above 0, the append has no readable row. first_row:
 * out, number of the first readable row. all_logits: out, logits of all appended tokens,
 * [n][n_vocab], checked as by dfl_sequence_logits; may be NULL. all_features: out, hidden states of
 * all appended tokens, [n][n_taps][n_embd] in the order of the engine's taps; may be NULL. Tap i is
 * the residual stream that enters layer i; n_layer: the last layer's output; n_layer + 1: its norm,
 * the output head's input. */
typedef struct {
    dfl_sequence * sequence;
    int32_t is_verify;
    const int32_t * tokens;
    int64_t n;
    const int32_t * parents;
    int64_t n_remaining;
    int64_t first_row;
    float * all_logits;
    float * all_features;
} dfl_batch_entry;

/* Runs batch entries of different sequences in one pass. The results of a row do not depend on the
 * other rows of the pass, bit for bit. The next pass or draft makes all rows unreadable.
 *
 * Append: the tokens join the sequence, and the last token's row can be read. If results are not
 * finite, the sequence is emptied and its caches are zeroed (dfl_sequence_check_append). A single
 * append of any length is run in micro-batches; on an error the sequence ends after the last
 * completed one. Several entries together append at most max(n_ubatch, n_parallel) tokens.
 *
 * Verify: candidates are run after the sequence's tokens, each attending to its ancestors, and are
 * not appended. All their rows can be read until dfl_engine_commit, which must follow. All pending
 * verifies together have at most dfl_engine_verify_rows candidates.
 *
 * progress: receives tokens after each micro-batch of a single append; may be NULL. Errors:
 * ARGUMENT (token ids, parents, context length, free cells, number of candidates, features of an
 * engine without taps; nothing has run), MEMORY, COMPUTE (a single append is not finite, or the
 * device failed), CANCELLED. If the device failed, sequences with tokens to append are empty on
 * models with recurrent layers. */
dfl_status dfl_engine_run(dfl_engine * engine, dfl_batch_entry * entries, int64_t n_entries,
                          dfl_progress progress, void * user, dfl_error * err);

/* Samples tokens from rows of logits. A sampler has no state, so drafting changes no sample. */
typedef struct dfl_sampler dfl_sampler;

/* A request to draft the n_draft positions after last_token, which is not appended yet. sampler: of
 * the text; a drafter that drafts step by step follows the tokens that it is predicted to sample,
 * which come first among the candidates of a position; NULL: the best tokens. */
typedef struct {
    dfl_sequence * sequence;
    int32_t last_token;
    int64_t n_draft;
    const dfl_sampler * sampler;
} dfl_draft_request;

/* Sets the factor of a drafter's token embeddings for later drafts. Errors: ARGUMENT (drafter). */
dfl_status dfl_engine_set_draft_scale(dfl_engine * engine, int32_t drafter, float scale,
                                      dfl_error * err);
/* Drafts the k best tokens of a drafter (0 to n_drafters - 1) for each position of each request. No
 * sequence changes, but rows of the last pass become unreadable. With n the sum of all n_draft:
 * tokens, logits: out, [n][k], raw logits, best first, request after request; log_sum_exp: out,
 * [n], of the whole row, so that logit - log_sum_exp is a log-probability. If scores of a request
 * are not finite, all of its log_sum_exp are NaN, and the drafter has dropped its K/V of that
 * sequence. Errors: ARGUMENT (drafter; n_draft above block_size - 1; k; more than
 * dfl_engine_verify_rows rows, n_draft + 1 a request; context length), MEMORY, COMPUTE. */
dfl_status dfl_engine_draft(dfl_engine * engine, int32_t drafter,
                            const dfl_draft_request * requests, int64_t n_requests, int64_t k,
                            int32_t * tokens, float * logits, float * log_sum_exp, dfl_error * err);

/* The accepted path of a sequence's pending verify. nodes: [n], root first, each a child of the
 * node before; NULL: the first n nodes. */
typedef struct {
    dfl_sequence * sequence;
    const int32_t * nodes;
    int64_t n;
} dfl_path;

/* Appends the accepted paths of pending verifies and discards all other nodes. A path of 0 nodes
 * discards the whole verify, if one is pending. Errors: ARGUMENT (no path), MEMORY, COMPUTE. If an
 * accepted node's logits are not finite (COMPUTE), its sequence is emptied and no path is appended.
 * After other MEMORY or COMPUTE errors, sequences with recurrent states are empty. */
dfl_status dfl_engine_commit(dfl_engine * engine, const dfl_path * paths, int64_t n_paths,
                             dfl_error * err);

/* Checks the last append of a sequence, even if it has no readable row. Errors: COMPUTE (its
 * results are not finite, and the sequence is empty). */
dfl_status dfl_sequence_check_append(dfl_sequence * sequence, dfl_error * err);
/* Finds the token with the largest logit of a row, the lowest id on ties. row: first_row of the
 * sequence's entry in the last pass, plus the node in a verify. Errors: ARGUMENT (the row is not
 * readable), COMPUTE (logits are not finite; the sequence is then emptied, its caches zeroed). */
dfl_status dfl_sequence_argmax(dfl_sequence * sequence, int64_t row, int32_t * token,
                               dfl_error * err);
/* Copies the logits of n rows of the last pass; a device is waited for once. logits: out,
 * [n][n_vocab]; single logits may be -inf. rows and errors: as for dfl_sequence_argmax. */
dfl_status dfl_sequence_logits(dfl_sequence * sequence, const int64_t * rows, int64_t n,
                               float * logits, dfl_error * err);

typedef struct {
    double temperature;  /* temperature 0 selects the best token after biases, bans and penalties */
    double top_p, min_p; /* cutoffs of top-p (1: off) and min-p (0: off) */
    int64_t top_k;       /* number of best tokens to sample from; <= 0: all tokens */
    float repeat, presence, frequency; /* penalties on history tokens; off: repeat 1, others 0 */
    int64_t repeat_last_n;             /* number of last history tokens that are penalised */
    uint64_t seed, sequence;           /* inputs of the hash that makes the sampling noise */
    const int32_t * biased;            /* ids of biased tokens, [n_biased]; ignored if >= n_vocab */
    const float * biases;              /* [n_biased] values added to the logits of biased tokens */
    int64_t n_biased;
    const int32_t * banned; /* [n_banned] tokens that are never sampled */
    int64_t n_banned;
} dfl_sampler_params;

/* Creates a sampler, which copies params and their arrays. Errors: ARGUMENT. */
dfl_status dfl_sampler_create(const dfl_sampler_params * params, dfl_sampler ** sampler,
                              dfl_error * err);
void dfl_sampler_free(dfl_sampler * sampler);
/* Returns how many of a row's best logits dfl_sampler_sample needs at least; 0: it needs the whole
 * row, or dfl_sequence_argmax finds the token unless it is banned; -1 for NULL. */
int64_t dfl_sampler_n_best(const dfl_sampler * sampler);
/* Samples the token for a position (its index in prompt and answer) from a row. logits: [n], not
 * changed. tokens: NULL if the row has all tokens; else [n], the tokens of the row's best logits,
 * best first, at least dfl_sampler_n_best. history: [n_history], prompt and answer so far, NULL if
 * empty. margin: out, best score less the second, infinite if one token was left; scores are logits
 * at temperature 0. Errors: ARGUMENT (n < 1; NaN or +inf; no token is left; history ids outside the
 * vocabulary; biases, bans and penalties lower so many of the best logits that others may win). */
dfl_status dfl_sampler_sample(const dfl_sampler * sampler, const float * logits,
                              const int32_t * tokens, int64_t n, const int32_t * history,
                              int64_t n_history, int64_t position, int32_t * token, double * margin,
                              dfl_error * err);
/* Lists the tokens that dfl_sampler_sample can return for a row of all tokens. tokens, values: out,
 * room for [n] each: tokens and their logits after biases and penalties, best first, or by token id
 * if no cutoff applies. n_left: out, number of tokens listed. Errors: as dfl_sampler_sample. */
dfl_status dfl_sampler_filter(const dfl_sampler * sampler, const float * logits, int64_t n,
                              const int32_t * history, int64_t n_history, int32_t * tokens,
                              float * values, int64_t * n_left, dfl_error * err);

/* A request to sample from a sequence's rows of the last pass: after an append one token from the
 * last row; in a pending verify one token a node, from the root down while the sampled tokens are
 * candidates. "rows" is 1 after an append, else the number of nodes. history: [n_history], prompt
 * and answer so far, for penalties. position: index of the first sampled token in prompt and
 * answer. masks: [rows][(n_vocab + 31) / 32], bit t % 32 of word t / 32: token t is allowed; NULL:
 * all are. sampled: out, room for [rows]. n_sampled: out, number of sampled tokens; sampling stops
 * before a row that is not finite or has no token left: see dfl_sequence_logits of the row. */
typedef struct {
    dfl_sequence * sequence;
    const dfl_sampler * sampler;
    const int32_t * history;
    int64_t n_history;
    int64_t position;
    const uint32_t * masks;
    int32_t * sampled;
    int64_t n_sampled;
} dfl_sample_request;

/* Samples tokens for requests of different sequences. Errors: ARGUMENT (a sequence has no readable
 * row; a penalised history has ids outside the vocabulary). */
dfl_status dfl_engine_sample(dfl_engine * engine, dfl_sample_request * requests, int64_t n_requests,
                             dfl_error * err);

/* Removes all tokens of a sequence, and its pending verify. */
dfl_status dfl_sequence_reset(dfl_sequence * sequence, dfl_error * err);

/* A snapshot of a sequence for sequences that begin alike: K/V rows of target and drafters, and
 * recurrent states. The target's rows stay in cells if sequences can share cells (all layers attend
 * in this library's CPU code), else on the host. Prefixes of one sequence share pages. */
typedef struct dfl_prefix dfl_prefix;

typedef struct {
    int64_t n_draft;  /* number of last positions in the drafters' K/V */
    int32_t n_caches; /* number of K/V groups of the target and the drafters */
    int32_t n_parts;  /* number of tensors in a file of the prefix */
} dfl_prefix_info;

/* A tensor in a file of a prefix. type: name of the ggml type. ne: shape; the tensors of a K/V
 * group have one row for each of the last ne[1] tokens. */
typedef struct {
    char name[64];
    char type[16];
    int64_t ne[2];
    uint64_t bytes;
} dfl_prefix_part;

/* Computes the bytes of host memory that dfl_sequence_snapshot would take. Errors: ARGUMENT. */
dfl_status dfl_sequence_snapshot_bytes(const dfl_sequence * sequence, uint64_t * bytes,
                                       dfl_error * err);
/* Takes a snapshot of all tokens of a sequence, which does not change; rows of the last pass may
 * become unreadable. prefix: out, counted by dfl_engine_prefix_bytes until dfl_prefix_free. Errors:
 * ARGUMENT (no tokens; a verify waits for its commit), MEMORY, COMPUTE. */
dfl_status dfl_sequence_snapshot(dfl_sequence * sequence, dfl_prefix ** prefix, dfl_error * err);
/* Frees a prefix. Must not be called from within a callback. */
void dfl_prefix_free(dfl_prefix * prefix);
dfl_status dfl_prefix_get_info(const dfl_prefix * prefix, dfl_prefix_info * info, dfl_error * err);
/* Returns the free cells that an empty sequence takes to restore n tokens; -1 for NULL or bad n. */
int64_t dfl_prefix_cells_needed(const dfl_prefix * prefix, int64_t n);
/* Restores the first n tokens of a prefix to a sequence that is empty or begins with these tokens,
 * and cuts off later tokens. Errors: ARGUMENT (other tokens; another engine's prefix; n; too few
 * free cells), UNSUPPORTED (a part of a prefix without partial_prefix_ok), MEMORY. */
dfl_status dfl_sequence_restore(dfl_sequence * sequence, const dfl_prefix * prefix, int64_t n,
                                dfl_error * err);
/* Keeps a prefix's K/V rows in cells (1), or lets dfl_engine_offload_prefixes move them (0). */
dfl_status dfl_prefix_keep_in_cells(dfl_prefix * prefix, int32_t keeps, dfl_error * err);
/* Moves K/V rows of prefixes from cells to the host until n more cells are free or no row is left
 * to move. Rows that a sequence uses, or that a prefix keeps in cells, stay. bytes: largest number
 * of host bytes to take. is_done: out, 0 if bytes was too low. Errors: MEMORY. */
dfl_status dfl_engine_offload_prefixes(dfl_engine * engine, int64_t n, uint64_t bytes,
                                       int32_t * is_done, dfl_error * err);

/* Describes a tensor of a prefix. index: 0 to n_parts - 1. Errors: ARGUMENT (index). */
dfl_status dfl_prefix_get_part(const dfl_prefix * prefix, int32_t index, dfl_prefix_part * part,
                               dfl_error * err);
/* Counts the tokens that a prefix has in each K/V group. n_rows: out, [n_caches]. */
dfl_status dfl_prefix_get_rows(const dfl_prefix * prefix, int64_t * n_rows, dfl_error * err);
/* Copies tensor `part` of a prefix. data: out, the tensor's bytes. Errors: ARGUMENT (part). */
dfl_status dfl_prefix_read(const dfl_prefix * prefix, int32_t part, void * data, dfl_error * err);
/* Creates a prefix of n tokens on the host, filled in by dfl_prefix_write from an engine of equal
 * model and settings. n_rows: [n_caches] of dfl_prefix_get_rows. base: a longer prefix of the same
 * text, whose K/V rows the new prefix shares where it can, or NULL. Errors: ARGUMENT, MEMORY. */
dfl_status dfl_prefix_create(dfl_engine * engine, const int32_t * tokens, int64_t n,
                             const int64_t * n_rows, int32_t n_caches, const dfl_prefix * base,
                             dfl_prefix ** prefix, dfl_error * err);
/* Creates a copy of a prefix whose tensors leave out the K/V rows that `base` has too, for a file
 * that dfl_prefix_create reads back with this base. rest: out. Errors: ARGUMENT (base is not a
 * longer prefix of the same text and engine). */
dfl_status dfl_prefix_without(const dfl_prefix * prefix, const dfl_prefix * base,
                              dfl_prefix ** rest, dfl_error * err);
/* Fills in tensor `part` of a created prefix. data: the tensor's bytes. Errors: ARGUMENT (part). */
dfl_status dfl_prefix_write(dfl_prefix * prefix, int32_t part, const void * data, dfl_error * err);

/* Minimum number of expected accepted tokens for a pass to break even, by its number of verified
 * nodes. sizes: [n] numbers of nodes, rising, >= 1. chains, trees: [n] tokens if the nodes are
 * chains, or trees. n = 0: no threshold. */
typedef struct dfl_break_even {
    const int32_t * sizes;
    const double * chains;
    const double * trees;
    int32_t n;
} dfl_break_even;

/* Selects the nodes to verify of n candidate trees together: the most probable nodes, as many as
 * maximise the gain (expected accepted tokens less break_even), either of the trees or of their
 * chains of first children. counts: [2][n], nodes of each tree with its root, then the largest
 * number of nodes below each root. parents, log_probs: tree after tree, the parent (-1: none) and
 * the path's log-probability of each node; children after their parents, most probable first.
 * min_value: gain to exceed. n_nodes: out, [n], nodes selected below each root. is_tree: out, 0 for
 * chains. value: out, the gain, or min_value if none exceeds it. Errors: ARGUMENT, MEMORY. */
dfl_status dfl_select_nodes(int32_t n, const int32_t * counts, const int32_t * parents,
                            const double * log_probs, const dfl_break_even * break_even,
                            double min_value, int32_t * n_nodes, int32_t * is_tree, double * value,
                            dfl_error * err);

/* An index of a text that proposes continuations of earlier occurrences of the text's end. */
typedef struct dfl_suffix_index dfl_suffix_index;

enum { DFL_SUFFIX_OUTCOMES = 96 }; /* number of candidate classes with an acceptance rate each */

/* Creates a suffix index of 2 to 2^29 - 1 tokens, which drops its older half when it is full.
 * ngrams: a drafter of kind "ngram", whose tokens are proposed too; may be NULL. Errors: ARGUMENT
 * (max_tokens, the drafter's kind). */
dfl_status dfl_suffix_index_create(int64_t max_tokens, const dfl_drafter * ngrams,
                                   dfl_suffix_index ** index, dfl_error * err);
void dfl_suffix_index_free(dfl_suffix_index * index);
/* Appends n tokens to an index's text. tokens: [n], none below 0. is_generated: 1 if the target
 * generated them, which updates acceptance rates. length: out, length of the longest suffix of the
 * text that occurs earlier in the text; may be NULL. Errors: ARGUMENT, MEMORY. */
dfl_status dfl_suffix_index_append(dfl_suffix_index * index, const int32_t * tokens, int64_t n,
                                   int32_t is_generated, int64_t * length, dfl_error * err);
/* Ends the text of a suffix index: no match crosses the end of a text. */
dfl_status dfl_suffix_index_separate(dfl_suffix_index * index, dfl_error * err);
/* Appends generated tokens to n texts, then proposes a tree of candidates for each; together the
 * trees have the nodes that dfl_select_nodes would select. tokens: text after text. counts: [3][n],
 * tokens to append, largest depth and largest number of nodes of each tree. n_nodes: out, [n],
 * nodes of each tree with its root, which is the text's last token; 0: no tree. out_tokens,
 * out_parents (-1 for the root), out_depths, out_log_probs (of the path to a node): out, tree after
 * tree, with room for all roots and nodes. Errors: ARGUMENT (nothing is appended), MEMORY. */
dfl_status dfl_suffix_index_propose(dfl_suffix_index * const * index, int32_t n,
                                    const int32_t * tokens, const int32_t * counts,
                                    const dfl_break_even * break_even, int32_t * out_tokens,
                                    int32_t * out_parents, int32_t * out_depths,
                                    double * out_log_probs, int32_t * n_nodes, dfl_error * err);
/* Copies the numbers of tried and accepted candidates by class: out, [DFL_SUFFIX_OUTCOMES][2]. */
dfl_status dfl_suffix_index_get_outcomes(const dfl_suffix_index * index, double * outcomes,
                                         dfl_error * err);
/* Sets the numbers of tried and accepted candidates by class: [DFL_SUFFIX_OUTCOMES][2]. Errors:
 * ARGUMENT (not 0 < accepted <= tried < 1e9). */
dfl_status dfl_suffix_index_set_outcomes(dfl_suffix_index * index, const double * outcomes,
                                         dfl_error * err);
/* Returns the number of tokens in a suffix index, separators of texts included; -1 for NULL. */
int64_t dfl_suffix_index_size(const dfl_suffix_index * index);
/* Returns the bytes of memory that a suffix index takes; 0 for NULL. */
uint64_t dfl_suffix_index_bytes(const dfl_suffix_index * index);

enum { DFL_CALIBRATION_SIZE = 5 }; /* number of calibration weights of each depth */

/* Parameters of online calibration; arrays are [DFL_CALIBRATION_SIZE]. prior: weights to which
 * depth 1 is pulled; each later depth is pulled to the depth before it. precision: diagonal of a
 * depth's information matrix before any outcome. pull: strength of the pull. lower, upper: bounds
 * of the weights. forgetting: share of the information matrix that the outcome of each draft
 * replaces by that diagonal. */
typedef struct dfl_calibration_params {
    const double * prior;
    const double * precision;
    const double * pull;
    const double * lower;
    const double * upper;
    double forgetting;
} dfl_calibration_params;

/* Updates calibration weights by one Newton step for the outcome of each of n drafts, at depths 1
 * to counts[i] of outcome i. With S = DFL_CALIBRATION_SIZE: weights, information: in and out,
 * [n_depths][S] and [n_depths][S][S]. gradients, curvatures: of the log-likelihood, [S] and [S][S]
 * for each depth of each outcome, outcome after outcome. Errors: ARGUMENT (counts above n_depths;
 * nothing is changed). */
dfl_status dfl_calibration_update(const dfl_calibration_params * params, double * weights,
                                  double * information, int64_t n_depths, const double * gradients,
                                  const double * curvatures, const int64_t * counts, int64_t n,
                                  dfl_error * err);

/* Computes the bytes of one row of n_per_row values in a ggml type ("q8_0", "q4_K", "f16", ...).
 * Errors: ARGUMENT (unknown type; n_per_row is not a positive multiple of the type's block). */
dfl_status dfl_quantize_row_size(const char * type, int64_t n_per_row, uint64_t * size,
                                 dfl_error * err);

/* Quantises float32 rows with ggml's reference quantiser. src: [n_rows][n_per_row]. dst: out, at
 * least n_rows times dfl_quantize_row_size bytes. n_threads: <= 0: one per usable core. Errors:
 * ARGUMENT (as dfl_quantize_row_size; dst_size too small; the type needs an importance matrix). */
dfl_status dfl_quantize(const char * type, const float * src, int64_t n_rows, int64_t n_per_row,
                        void * dst, uint64_t dst_size, int32_t n_threads, dfl_error * err);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
