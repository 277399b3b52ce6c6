// Newton steps towards the maximum of a concave likelihood whose outcomes come in one after the
// other: what calibrations learn by (dflash_gguf/speculative/calibration.py says what the numbers are).
#pragma once

#include <cstdint>

namespace dfl {

struct NewtonRules {
    static constexpr int64_t N = 5; // numbers of a depth

    const double * prior;     // [N] of the first depth; a later one is drawn to the one before it
    const double * held;      // [N]: information that they begin with and fade to
    const double * back;      // [N]: how strongly they are drawn
    const double *low, *high; // [N]
    double fade;              // a part of what was before that goes with each outcome
};

// One step for depths 1 to n after outcomes at them. weights [n][N] and information [n][N][N] are
// changed; slopes [n][N] and spreads [n][N][N] are the outcomes'.
void newton_step(const NewtonRules & rules, int64_t n, double * weights, double * information,
                 const double * slopes, const double * spreads);

} // namespace dfl
