// The table of the kinds of drafters.
#include "draft/drafter.h"

namespace dfl {

extern const DraftKind DFLASH;
extern const DraftKind MTP;
extern const DraftKind NGRAM;

const std::vector<const DraftKind *> & draft_kinds() {
    static const std::vector<const DraftKind *> table = {&DFLASH, &MTP, &NGRAM};
    return table;
}

} // namespace dfl
