// The DFlash drafter: a few layers that attend to the target's features and to a block of masks.
#pragma once

#include "draft/draft_model.h"

namespace dfl {

std::unique_ptr<DraftModel> attach_dflash(const std::shared_ptr<const Drafter> & drafter,
                                          const DraftHost & host);

} // namespace dfl
