/* The C ABI of dflash-gguf. cffi reads this file as it is, so no macro stands in a declaration.
 *
 * Every fallible call returns a dfl_status and takes a dfl_error * (may be NULL) as its last
 * argument: the message is one sentence that names the thing, the value and the limit.
 */
#ifndef DFLASH_H
#define DFLASH_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)

enum { DFL_ABI_VERSION = 24 };

typedef enum {
    DFL_STATUS_OK = 0,
    DFL_STATUS_ARGUMENT = 1,    /* a bad argument of this call */
    DFL_STATUS_FILE = 2,        /* a missing, truncated, damaged or foreign file */
    DFL_STATUS_UNSUPPORTED = 3, /* well-formed, but not something this build or device can run */
    DFL_STATUS_MEMORY = 4,      /* not enough host or device memory; the sentence names the bytes */
    DFL_STATUS_COMPUTE = 5,     /* the device failed while computing */
    DFL_STATUS_CANCELLED = 6,   /* stopped because the caller asked for it; state is unchanged */
    DFL_STATUS_INTERNAL = 7     /* a defect of this library */
} dfl_status;

typedef struct {
    int32_t code;
    char message[512];
} dfl_error;

typedef enum {
    DFL_MAX_TOP = 64,       /* best tokens of a row that may be picked */
    DFL_MAX_VERIFY = 256,   /* rows of a verify */
    DFL_MAX_THREADS = 512,  /* threads of an engine, as many as ggml takes */
    DFL_MAX_PARALLEL = 256, /* sequences of an engine */
    DFL_PAGE = 64           /* K/V rows that sequences take at a time, and that prefixes share */
} dfl_limit;

/* ---- versions and devices ---- */

int32_t dfl_abi_version(void);

/* Version of the ggml library in this process, and of the one this library was built with. */
const char * dfl_ggml_version(void);
const char * dfl_ggml_build_version(void);

typedef enum { DFL_DEVICE_CPU = 0, DFL_DEVICE_GPU = 1, DFL_DEVICE_OTHER = 2 } dfl_device_type;

typedef struct {
    char name[64];
    char description[128];
    int32_t type; /* dfl_device_type */
    uint64_t free_bytes;
    uint64_t total_bytes;
} dfl_device_info;

/* Loads a ggml backend module (a libggml-*.so); its devices join the list below. */
dfl_status dfl_backend_load(const char * path, dfl_error * err);
int32_t dfl_device_count(void);
dfl_status dfl_device_get(int32_t index, dfl_device_info * info, dfl_error * err);

/* Names of the CPU's extra weight buffer types ("AMX", "CPU_REPACK", ...), separated by commas, as
 * many as fit into size bytes. */
dfl_status dfl_extra_buffer_types(char * names, uint64_t size, dfl_error * err);

/* Names of the instruction sets of our own kernels that this CPU runs, best first, separated by
 * commas. The environment variable DFLASH_CPU leaves out those before the set that it names.
 * Errors: DFL_STATUS_ARGUMENT (DFLASH_CPU names none of them, names need more than size bytes). */
dfl_status dfl_cpu_kernel_sets(char * names, uint64_t size, dfl_error * err);

/* Multiplies quantised matrices in a weight buffer type and compares with plain buffers. Kernels
 * that cannot run on this machine kill the process: call it in a child process.
 * Errors: DFL_STATUS_ARGUMENT (no such type), DFL_STATUS_COMPUTE (wrong products). */
dfl_status dfl_probe_buffer_type(const char * name, dfl_error * err);

/* ---- model: the weights of one GGUF file, immutable, shareable ---- */

typedef struct dfl_model dfl_model;

/* Called with the part done and the whole; a result other than 0 stops the call, which then
 * returns DFL_STATUS_CANCELLED. */
typedef int32_t (*dfl_progress)(void * user, uint64_t done, uint64_t total);

/* A dry run of a model, its drafter and its engines places weights and does not read them, counts
 * memory and does not allocate it; only infos can be asked for. */
typedef enum {
    DFL_DRY_RUN_NONE = 0,
    DFL_DRY_RUN_DEVICE = 1, /* where it would be loaded */
    DFL_DRY_RUN_CUDA = 2    /* on a CUDA GPU that is not there */
} dfl_dry_run;

typedef struct {
    const char * device;                /* name of a device; NULL: the first GPU, else the CPU */
    int32_t n_gpu_layers;               /* the last so many, the head included; < 0: all, if the
                                           device is a GPU; 0: none */
    int32_t n_cpu_moe;                  /* first layers whose experts stay on the CPU */
    int32_t n_threads;                  /* that rearrange weights; 0: one per usable core */
    int32_t repack;                     /* 1: the CPU may rearrange weights for faster kernels; 0:
                                            they stay as in the file */
    const char * excluded_buffer_types; /* separated by commas; may be NULL */
    dfl_progress progress;              /* bytes; may be NULL */
    void * user;
    int32_t dry_run; /* dfl_dry_run; a drafter's is its target's */
} dfl_model_params;

typedef struct {
    char architecture[64];
    char name[256]; /* general.name, or empty */
    char device[64];
    int64_t n_vocab;
    int64_t n_embd;
    int64_t n_layer;     /* executed layers: MTP blocks are not */
    int64_t n_recurrent; /* of them, layers with a recurrent state */
    int64_t n_ctx_train;
    uint64_t mapped_bytes;    /* weights used where they lie in the file */
    uint64_t copied_bytes;    /* weights in buffers of their own */
    uint64_t cpu_split_bytes; /* of copied_bytes, on the CPU beside another device */
    uint64_t embedding_bytes; /* token embeddings read from the file, if not mapped as the head */
    int32_t on_gpu;
    int32_t n_placements;
} dfl_model_info;

/* Weights that one kind of kernels multiplies with. */
typedef struct {
    char kernels[64]; /* of ours ("q8_0 avx512vnni"), or the ggml buffer type whose they are */
    uint64_t bytes;
} dfl_placement;

/* Errors: DFL_STATUS_FILE, DFL_STATUS_UNSUPPORTED, DFL_STATUS_MEMORY, DFL_STATUS_CANCELLED. */
dfl_status dfl_model_load(const char * path, const dfl_model_params * params, dfl_model ** model,
                          dfl_error * err);
void dfl_model_free(dfl_model * model);
dfl_status dfl_model_get_info(const dfl_model * model, dfl_model_info * info, dfl_error * err);
/* index: 0 to n_placements - 1. Errors: ARGUMENT. */
dfl_status dfl_model_get_placement(const dfl_model * model, int32_t index,
                                   dfl_placement * placement, dfl_error * err);

/* ---- drafter: a DFlash drafter's weights, checked against a target ---- */

typedef struct dfl_drafter dfl_drafter;

typedef struct {
    char architecture[64];
    char name[256];
    int64_t n_layer;
    int64_t block_size; /* the last token and block_size - 1 drafted ones */
    int32_t mask_token;
    int32_t n_taps; /* target layers it reads */
    uint64_t mapped_bytes;
    uint64_t copied_bytes;
    int32_t n_placements;
} dfl_drafter_info;

/* A tap is the residual stream entering a target layer: "target_layers" counts layer inputs.
 * Errors: as dfl_model_load; DFL_STATUS_FILE also for a drafter that does not fit the target, by
 * hidden size, tapped layers, mask token, tokens or merges. */
dfl_status dfl_drafter_load(const char * path, const dfl_model * target,
                            const dfl_model_params * params, dfl_drafter ** drafter,
                            dfl_error * err);
void dfl_drafter_free(dfl_drafter * drafter);
dfl_status dfl_drafter_get_info(const dfl_drafter * drafter, dfl_drafter_info * info,
                                dfl_error * err);
dfl_status dfl_drafter_get_placement(const dfl_drafter * drafter, int32_t index,
                                     dfl_placement * placement, dfl_error * err);

/* ---- engine: what costs memory and is there once: caches, graphs, the drafter's state ---- */

typedef struct dfl_engine dfl_engine;

typedef struct {
    int64_t n_ctx;             /* tokens that all sequences can hold together */
    int32_t n_parallel;        /* most sequences, 1 to DFL_MAX_PARALLEL */
    int64_t n_ubatch;          /* most tokens that one pass appends */
    int32_t n_threads;         /* 0: one per usable core: physical, fast, in the quota */
    const char * cache_type_k; /* "f32", "f16", "bf16", "q8_0", "q4_0", ... */
    const char * cache_type_v;
    const dfl_drafter * const * drafters; /* [n_drafters], loaded for this model */
    int32_t n_drafters;
    int64_t draft_window; /* target positions that they see */
} dfl_engine_params;

typedef struct {
    int64_t n_ctx;
    int32_t n_parallel;
    int32_t n_threads;
    int32_t n_memory;          /* records of dfl_engine_get_memory */
    uint64_t cell_bytes;       /* of a K/V row of all layers that keep every row */
    int32_t partial_prefix_ok; /* 1: dfl_sequence_restore takes any part of a prefix */
    int64_t n_graphs_built;    /* this and what follows: so far */
    int64_t n_graph_nodes;     /* of the largest graph, views included */
    int64_t n_passes;          /* forward passes of the target */
    uint64_t bytes_read;       /* copied from device tensors to the caller */
    uint64_t submit_ns;        /* spent handing graphs to the device; a CPU computes meanwhile */
    uint64_t wait_ns;          /* spent waiting until the device was done with them */
    char largest_graph[16];    /* that decides the arena's size: "prefill", "verify" or "draft" */
    char cpu_operations[128];  /* that the device lacks and the CPU does, separated by commas */
} dfl_engine_info;

/* Memory of one use in one place; a use in two places has two of them.
 * name: "kv" of the target; "mask" (attention masks, the drafter's too; a CPU has none);
 * "recurrent" (state) and "trace" (what a verify keeps of its rows) of recurrent layers; "draft"
 * (the drafter's cache and features); "arena" (results and inputs of graphs); "pool" (about what
 * the device's library takes beside the arena). */
typedef struct {
    char name[16];
    char place[64]; /* name of a device */
    uint64_t bytes;
} dfl_memory;

/* The engine keeps the model alive. Neither it nor its sequences may be used by two threads at
 * once, nor from within a callback of one of their calls: what runs or changes them is then refused
 * with DFL_STATUS_ARGUMENT.
 * Errors: DFL_STATUS_ARGUMENT, DFL_STATUS_UNSUPPORTED (cache types; the sentence lists the valid
 * pairs), DFL_STATUS_MEMORY. */
dfl_status dfl_engine_create(const dfl_model * model, const dfl_engine_params * params,
                             dfl_engine ** engine, dfl_error * err);
void dfl_engine_free(dfl_engine * engine);
dfl_status dfl_engine_get_info(const dfl_engine * engine, dfl_engine_info * info, dfl_error * err);
/* K/V rows that no sequence has, which sequences take by pages; bytes of prefixes on the host; most
 * rows that are verified at a time, of all sequences: a drafter's block and some, or what was
 * reserved. -1 for NULL. */
int64_t dfl_engine_n_free_cells(const dfl_engine * engine);
int64_t dfl_engine_prefix_bytes(const dfl_engine * engine);
int64_t dfl_engine_verify_rows(const dfl_engine * engine);
/* index: 0 to n_memory - 1. Errors: ARGUMENT. */
dfl_status dfl_engine_get_memory(const dfl_engine * engine, int32_t index, dfl_memory * memory,
                                 dfl_error * err);
/* Has the device select the k best (0 to DFL_MAX_TOP) of every row in the passes to come; 0 ends
 * it. active: out, k, or 0 where it cannot: a CPU has the rows at hand. Errors: ARGUMENT. */
dfl_status dfl_engine_set_top_k(dfl_engine * engine, int32_t k, int32_t * active, dfl_error * err);
/* Makes room to verify up to n rows at a time (1 to DFL_MAX_VERIFY); never less than there is.
 * Costs update and feature rows and compute memory, no state. Errors: ARGUMENT (also while a verify
 * waits for its commit), MEMORY (names the bytes; the room is as before). */
dfl_status dfl_engine_reserve_verify(dfl_engine * engine, int64_t n, dfl_error * err);

/* ---- sequence: a timeline in an engine, and its cursor ---- */

typedef struct dfl_sequence dfl_sequence;

/* The sequence keeps the engine alive. Errors: ARGUMENT (an engine of a dry run),
 * UNSUPPORTED (the engine has n_parallel sequences already). */
dfl_status dfl_sequence_create(dfl_engine * engine, dfl_sequence ** sequence, dfl_error * err);
void dfl_sequence_free(dfl_sequence * sequence); /* not from within a callback */
/* Tokens of the timeline that are in the caches; -1 for NULL. */
int64_t dfl_sequence_position(const dfl_sequence * sequence);
/* Cells that n more tokens take of dfl_engine_n_free_cells; 0 where its own pages have room; -1
 * for NULL. */
int64_t dfl_sequence_cells_needed(const dfl_sequence * sequence, int64_t n);

/* Copies those tokens to `tokens`, [dfl_sequence_position]. Errors: ARGUMENT. */
dfl_status dfl_sequence_get_tokens(const dfl_sequence * sequence, int32_t * tokens,
                                   dfl_error * err);

/* Part of a batch: the rows of a sequence. */
typedef struct {
    dfl_sequence * sequence;
    int32_t is_verify; /* 0: append them; 1: they are candidates, see dfl_engine_run */
    const int32_t * tokens;
    int64_t n;
    const int32_t * parents; /* of a verify: NULL for a chain, else [n]: -1 for the root, which is
                                chosen and not appended yet, and 0 <= parents[i] < i */
    int64_t n_remaining;     /* of an append: tokens that will follow it; if there are some, no row
                                can be read */
    int64_t first_row;       /* out: number of its only row, or of its first one */
    float * all_logits;      /* of an append: NULL, or out, [n][n_vocab] float32, checked as
                                dfl_sequence_logits does */
} dfl_batch_entry;

/* Runs entries of different sequences in one pass. Each row has the bits that it has alone.
 *
 * Tokens to append join their timeline; afterwards the last one's logits can be read. If what they
 * leave behind is not finite, the timeline is empty instead, and zeroed: dfl_sequence_check_append.
 * Candidates are run after the timeline, each seeing its ancestors, and are not appended; all of
 * their rows can be read until dfl_engine_commit, which must follow. Rows can be read until the
 * next pass or draft of the engine.
 *
 * A single append may have any number of tokens and is run in micro-batches; on an error its
 * timeline ends after the last finished one, or is empty where that is not finite. Several
 * entries take at most n_ubatch (or n_parallel, if that is more) tokens to append and verify_rows
 * candidates.
 *
 * progress: of a single append; may be NULL.
 * Errors: ARGUMENT (token ids, parents, context, cells that other sequences hold, room for
 * verifies; nothing has run then), MEMORY, COMPUTE (timelines are as before, but on a model with
 * recurrent layers those that were to be appended to are empty; a single append that is not
 * finite), CANCELLED. */
dfl_status dfl_engine_run(dfl_engine * engine, dfl_batch_entry * entries, int64_t n_entries,
                          dfl_progress progress, void * user, dfl_error * err);

/* A draft request: candidates for n_draft positions after last_token, which is chosen
 * but not appended. */
typedef struct {
    dfl_sequence * sequence;
    int32_t last_token;
    int64_t n_draft;
} dfl_draft_request;

/* Drafts: for each position of each request the k best tokens of a drafter (0 to n_drafters - 1)
 * and their raw logits, best first, request after request. Moves no cursor. n being the positions
 * of all requests together: tokens, logits: out, [n][k]; log_sum_exp: out, [n]: ln sum exp of the
 * whole row of raw logits, so logit - log_sum_exp is a log-probability. Where a request's scores
 * are not finite, all of its log_sum_exp are NaN, and the drafter has forgotten that timeline so
 * far. Errors: ARGUMENT (no such drafter; n_draft above block_size - 1; more rows than
 * dfl_engine_verify_rows, of each request last_token and those drafted; k above the drafter's head;
 * no room in the context for last_token and the draft), COMPUTE. */
dfl_status dfl_engine_draft(dfl_engine * engine, int32_t drafter,
                            const dfl_draft_request * requests, int64_t n_requests, int64_t k,
                            int32_t * tokens, float * logits, float * log_sum_exp, dfl_error * err);

/* An accepted path of a pending verify: n nodes, root first, each a child of the one before; nodes
 * of NULL: the first n. */
typedef struct {
    dfl_sequence * sequence;
    const int32_t * nodes;
    int64_t n;
} dfl_path;

/* Appends paths of pending verifies of different sequences; their other nodes are forgotten. With n
 * = 0 there may be no pending verify, and then nothing is done. Errors: ARGUMENT,
 * MEMORY, COMPUTE (after the last two sequences of a model with recurrent layers are empty; for a
 * node whose logits are not finite its sequence is, and nothing is appended). */
dfl_status dfl_engine_commit(dfl_engine * engine, const dfl_path * paths, int64_t n_paths,
                             dfl_error * err);

/* Checks the last append, also where no row of it can be read. Errors: COMPUTE if it was not
 * finite, so that the sequence is empty. */
dfl_status dfl_sequence_check_append(dfl_sequence * sequence, dfl_error * err);
/* Largest logit of a row of the last pass, by its number; the lowest id on ties. Errors, also of
 * the next: ARGUMENT for a row that is gone, or never was; COMPUTE if its logits are not
 * finite. Its caches are then no better, so they are zeroed: the sequence is empty as after a
 * reset. */
dfl_status dfl_sequence_argmax(dfl_sequence * sequence, int64_t row, int32_t * token,
                               dfl_error * err);
/* logits: out, [n_vocab] float32; single tokens may have -inf. */
dfl_status dfl_sequence_logits(dfl_sequence * sequence, int64_t row, float * logits,
                               dfl_error * err);

/* ---- sampler: samples tokens from rows; it keeps no state, so drafts change nothing ---- */

typedef struct dfl_sampler dfl_sampler;
typedef struct {
    double temperature; /* 0: the best token after biases, bans and penalties */
    double top_p, min_p;
    int64_t top_k;                     /* 0 and below: all */
    float repeat, presence, frequency; /* penalties of tokens of the history; 1, 0, 0: none */
    int64_t repeat_last_n;             /* tokens that they look back */
    uint64_t seed, sequence;           /* of the noise */
    const int32_t * biased;            /* tokens; ids beyond a vocabulary do nothing */
    const float * biases;              /* [n_biased], added to their logits */
    int64_t n_biased;
    const int32_t * banned; /* never sampled */
    int64_t n_banned;
} dfl_sampler_params;

dfl_status dfl_sampler_create(const dfl_sampler_params * params, dfl_sampler ** sampler,
                              dfl_error * err);
void dfl_sampler_free(dfl_sampler * sampler);
/* The token for a position from a row that the caller has. logits: [n], not changed. tokens: NULL,
 * or [n], those of the row's best logits in place of all, best first: as many as top_k and the
 * banned ones. history: [n_history], prompt and answer so far; NULL if n_history is 0. margin: out,
 * the best score less the second, infinite if one token was left; scores are logits at temperature
 * 0. Errors: ARGUMENT (no values; NaN or +inf; nothing left to sample; ids outside the vocabulary
 * in the history). */
dfl_status dfl_sampler_sample(const dfl_sampler * sampler, const float * logits,
                              const int32_t * tokens, int64_t n, const int32_t * history,
                              int64_t n_history, int64_t position, int32_t * token, double * margin,
                              dfl_error * err);
/* The tokens that can be sampled from it: tokens, values: out, [n] each, of which n_kept are
 * written, best first; all in their own order where nothing is cut off. Errors: as
 * dfl_sampler_sample. */
dfl_status dfl_sampler_filter(const dfl_sampler * sampler, const float * logits, int64_t n,
                              const int32_t * history, int64_t n_history, int32_t * tokens,
                              float * values, int64_t * n_left, dfl_error * err);

/* Request to sample from a sequence's rows of the last pass: after an append from the last token's
 * row, of a pending verify from the root down while the sampled tokens are candidates. */
typedef struct {
    dfl_sequence * sequence;
    const dfl_sampler * sampler;
    const int32_t *
        history; /* [n_history], prompt and answer so far, where penalties look at them */
    int64_t n_history;
    int64_t position; /* of the first token sampled: length of prompt and answer */
    /* Allowed tokens of each row, or NULL for all: bit t % 32 of word t / 32 for token t. [rows of
     * the verify, 1 after an append][(n_vocab + 31) / 32] */
    const uint32_t * masks;
    int32_t * sampled; /* out, [rows of the verify, 1 after an append] */
    int64_t n_sampled; /* out: fewer than a path's where a row has nothing to sample from or is not
                          finite: dfl_sequence_logits of it says what is wrong */
} dfl_sample_request;

/* Samples for each request. Errors: ARGUMENT (a sequence without rows, ids outside the vocabulary
 * in a history, a mask that allows none of a row that is sampled from). */
dfl_status dfl_engine_sample(dfl_engine * engine, dfl_sample_request * requests, int64_t n_requests,
                             dfl_error * err);

/* Back to position 0. */
dfl_status dfl_sequence_reset(dfl_sequence * sequence, dfl_error * err);

/* ---- prefix: K/V and states of first tokens of a sequence, for others that begin alike ---- */

/* Attention rows lie in the engine's cells where sequences can share them (all layers attend on the
 * CPU by our own code), else on the host; with them go the recurrent state after the last token and
 * what the drafter remembers. Prefixes of one timeline have pages in common. */
typedef struct dfl_prefix dfl_prefix;

typedef struct {
    int64_t n_draft;  /* last positions that the drafter remembers */
    int32_t n_caches; /* groups of attention layers, and the drafter's */
    int32_t n_parts;  /* of a file */
} dfl_prefix_info;

/* A tensor of a file; rows of a cache are those of the last ne[1] tokens. */
typedef struct {
    char name[64];
    char type[16]; /* of ggml */
    int64_t ne[2];
    uint64_t bytes;
} dfl_prefix_part;

/* Bytes that dfl_sequence_snapshot takes on the host, where attention rows are moved when the
 * sequence gives up their cells. */
dfl_status dfl_sequence_snapshot_bytes(const dfl_sequence * sequence, uint64_t * bytes,
                                       dfl_error * err);
/* Takes a snapshot of all tokens of a sequence, which goes on as it was; rows of its last pass may
 * be gone. The snapshot counts in dfl_engine_prefix_bytes until dfl_prefix_free. Errors:
 * ARGUMENT (no tokens, a verify that waits for its commit), MEMORY. */
dfl_status dfl_sequence_snapshot(dfl_sequence * sequence, dfl_prefix ** prefix, dfl_error * err);
void dfl_prefix_free(dfl_prefix * prefix); /* not from within a callback */
dfl_status dfl_prefix_get_info(const dfl_prefix * prefix, dfl_prefix_info * info, dfl_error * err);
/* Number of dfl_engine_n_free_cells that a sequence takes to restore n tokens of it. */
int64_t dfl_prefix_cells_needed(const dfl_prefix * prefix, int64_t n);
/* Restores the first n tokens of a prefix to a sequence that is empty or begins with them: all of
 * them on a model with recurrent layers or windows. Its own attention rows of them stay where they
 * are. Errors: ARGUMENT (it holds others, another engine's, n, cells that are not free),
 * UNSUPPORTED (a part where partial_prefix_ok is 0), MEMORY. */
dfl_status dfl_sequence_restore(dfl_sequence * sequence, const dfl_prefix * prefix, int64_t n,
                                dfl_error * err);
/* Keeps the rows of a prefix in cells (1) or lets them be offloaded (0, as at first). */
dfl_status dfl_prefix_keep_in_cells(dfl_prefix * prefix, int32_t keeps, dfl_error * err);
/* Moves rows to the host from cells that no sequence uses and for which no prefix is kept in cells,
 * until n cells are free or none is left to move. bytes: limit of what this takes. is_done: out, 0
 * where the limit was too low. Errors: MEMORY. */
dfl_status dfl_engine_offload_prefixes(dfl_engine * engine, int64_t n, uint64_t bytes,
                                       int32_t * is_done, dfl_error * err);

/* index: 0 to n_parts - 1. Errors: ARGUMENT. */
dfl_status dfl_prefix_get_part(const dfl_prefix * prefix, int32_t index, dfl_prefix_part * part,
                               dfl_error * err);
/* Rows of each cache, [n_caches]. */
dfl_status dfl_prefix_get_rows(const dfl_prefix * prefix, int64_t * n_rows, dfl_error * err);
/* data: the part's bytes. Errors: ARGUMENT. */
dfl_status dfl_prefix_read(const dfl_prefix * prefix, int32_t part, void * data, dfl_error * err);
/* One of n tokens to be filled in by dfl_prefix_write, all on the host, of an engine like that
 * whose parts were read. n_rows: of each cache, [n_caches]. Errors: ARGUMENT (tokens, rows),
 * MEMORY. */
dfl_status dfl_prefix_create(dfl_engine * engine, const int32_t * tokens, int64_t n,
                             const int64_t * n_rows, int32_t n_caches, dfl_prefix ** prefix,
                             dfl_error * err);
dfl_status dfl_prefix_write(dfl_prefix * prefix, int32_t part, const void * data, dfl_error * err);

/* ---- selection of the nodes to verify ---- */

/* Minimum expected accepted tokens for a pass to break even, by its number of verified nodes:
 * [n] sizes, rising from 1 on, and the tokens where the nodes are chains and where they are trees.
 * n is 0: there is no threshold. */
typedef struct dfl_break_even {
    const int32_t * sizes;
    const double * chains;
    const double * trees;
    int32_t n;
} dfl_break_even;

/* Selects the nodes to verify of n candidate trees together: as many of the likeliest as gain the
 * most expected tokens beyond break_even, either of the trees or of the chains that follow the
 * first child of every node. counts: [n] nodes of each tree with its root, and [n] nodes below the
 * root that may be verified. parents and log_probs (of paths): tree after tree, children after
 * their parents and likeliest first, the root's parent -1. min_value: the gain must exceed it. Out:
 * n_nodes: [n], the number of nodes selected below each root; is_tree: 0 for the chains; value: the
 * gain, or min_value where none exceeds it. Errors: ARGUMENT, MEMORY. */
dfl_status dfl_select_nodes(int32_t n, const int32_t * counts, const int32_t * parents,
                            const double * log_probs, const dfl_break_even * break_even,
                            double min_value, int32_t * n_nodes, int32_t * is_tree, double * value,
                            dfl_error * err);

/* ---- suffix index: what followed earlier occurrences of the end of a text ---- */

typedef struct dfl_suffix_index dfl_suffix_index;

enum { DFL_SUFFIX_OUTCOMES = 84 }; /* classes of guesses that outcomes are counted for */

/* Keeps at most the last max_tokens tokens and at least half of them. Errors: ARGUMENT (max_tokens
 * below 2). */
dfl_status dfl_suffix_index_create(int64_t max_tokens, dfl_suffix_index ** index, dfl_error * err);
void dfl_suffix_index_free(dfl_suffix_index * index);
/* Appends n tokens to the text, none below 0. is_generated: by the target, so that the outcomes of
 * guesses are updated. length: out, of the longest suffix of the text that occurs in it before; may
 * be NULL. Errors: ARGUMENT, MEMORY. */
dfl_status dfl_suffix_index_append(dfl_suffix_index * index, const int32_t * tokens, int64_t n,
                                   int32_t is_generated, int64_t * length, dfl_error * err);
/* Ends the text: no match crosses its end. */
dfl_status dfl_suffix_index_separate(dfl_suffix_index * index, dfl_error * err);
/* Runs a round of n texts: appends counts[i] generated tokens to each (`tokens`, text after text)
 * and proposes a tree for each, of all texts together the nodes that dfl_select_nodes would take.
 * counts: [n] tokens, [n] largest depths of a tree and [n] largest numbers of its nodes. Out:
 * n_nodes: [n], 0 or a tree's nodes with the root, which is the text's last token; and the trees
 * one after the other: tokens, parents (of the root -1), depths and log-probabilities of paths,
 * with room for all roots and nodes asked for. Errors: ARGUMENT, with nothing done; MEMORY. */
dfl_status dfl_suffix_index_propose(dfl_suffix_index * const * index, int32_t n,
                                    const int32_t * tokens, const int32_t * counts,
                                    const dfl_break_even * break_even, int32_t * out_tokens,
                                    int32_t * out_parents, int32_t * out_depths,
                                    double * out_log_probs, int32_t * n_nodes, dfl_error * err);
/* Reads or sets how many guesses of each class were tried and accepted: [DFL_SUFFIX_OUTCOMES][2].
 * Errors: ARGUMENT (to set: 0 < accepted <= tried everywhere). */
dfl_status dfl_suffix_index_get_outcomes(const dfl_suffix_index * index, double * outcomes,
                                         dfl_error * err);
dfl_status dfl_suffix_index_set_outcomes(dfl_suffix_index * index, const double * outcomes,
                                         dfl_error * err);
/* Number of tokens, and bytes, that the index holds. */
int64_t dfl_suffix_index_size(const dfl_suffix_index * index);
uint64_t dfl_suffix_index_bytes(const dfl_suffix_index * index);

/* ---- calibration: online learning of a drafter's probabilities ---- */

enum { DFL_CALIBRATION_SIZE = 5 }; /* weights of a depth */

/* Each [DFL_CALIBRATION_SIZE]. */
typedef struct dfl_calibration_params {
    const double * prior;     /* weights of the first depth; each later depth's prior is the depth
                                 before it */
    const double * precision; /* diagonal of the initial information matrix, and its limit */
    const double * pull;      /* strength of the pull to the prior */
    const double * lower;     /* bounds of the weights */
    const double * upper;
    double forgetting; /* share of the earlier information that each outcome replaces */
} dfl_calibration_params;

/* Takes one Newton step for each of n outcomes, at depths 1 to counts[i]. weights:
 * [n_depths][SIZE], information: [n_depths][SIZE][SIZE], in and out. gradients: [SIZE] and
 * curvatures: [SIZE][SIZE] of the log-likelihood at each depth of each outcome, outcome after
 * outcome. Errors: ARGUMENT (counts beyond n_depths), with nothing done. */
dfl_status dfl_calibration_update(const dfl_calibration_params * params, double * weights,
                                  double * information, int64_t n_depths, const double * gradients,
                                  const double * curvatures, const int64_t * counts, int64_t n,
                                  dfl_error * err);

/* ---- quantisation ---- */

/* Bytes of one row of n_per_row values in the named ggml type ("q8_0", "q4_K", "f16"...).
 * Errors: DFL_STATUS_ARGUMENT (unknown type, n_per_row not a multiple of the type's block). */
dfl_status dfl_quantize_row_size(const char * type, int64_t n_per_row, uint64_t * size,
                                 dfl_error * err);

/* Quantises n_rows rows of n_per_row float32 values with ggml's reference quantiser.
 * src: [n_rows][n_per_row]; dst: n_rows * row size bytes. n_threads <= 0: one per usable core.
 * Errors: DFL_STATUS_ARGUMENT (as above; dst_size too small; type needs an importance matrix). */
dfl_status dfl_quantize(const char * type, const float * src, int64_t n_rows, int64_t n_per_row,
                        void * dst, uint64_t dst_size, int32_t n_threads, dfl_error * err);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
