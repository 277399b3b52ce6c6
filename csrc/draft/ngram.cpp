// N-gram tables as a kind of drafter: a file with a tokenizer, and without weights of a forward
// pass. The suffix index proposes the table's tokens.
#include "draft/drafter.h"
#include "gguf_schema.h"

namespace dfl {

static bool is_ngram(const GgufFile & file) { return file.arch() == schema::ARCH_NGRAM; }

static DraftHparams read(const GgufFile &, const Model & target) {
    DraftHparams draft;
    draft.hp.n_embd = target.hparams().n_embd;
    draft.block_size = 0;
    return draft;
}

static void bind(WeightLoader & loader, const DraftHparams &) { loader.ngram_table(); }

extern const DraftKind NGRAM;
const DraftKind NGRAM = {"ngram", is_ngram, read, bind, nullptr};

} // namespace dfl
