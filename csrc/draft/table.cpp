// The table of the kinds of drafters.
#include "draft/drafter.h"

namespace dfl {

extern const DraftKind DFLASH;
extern const DraftKind MTP;

const std::vector<const DraftKind *> & draft_kinds() {
    static const std::vector<const DraftKind *> table = {&DFLASH, &MTP};
    return table;
}

} // namespace dfl
