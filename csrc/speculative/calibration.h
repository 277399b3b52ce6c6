// Online calibration of candidate probabilities: Newton steps towards the maximum of a concave
// likelihood, one for each outcome (dflash_gguf/speculative/calibration.py defines the weights).
#pragma once

#include <cstdint>

namespace dfl {

struct CalibrationParams {
    static constexpr int64_t N = 5; // weights of a depth

    const double * prior; // [N] of the first depth; each later depth's prior is the depth before it
    const double * precision;    // [N]: diagonal of the initial information matrix, and its limit
    const double * pull;         // [N]: strength of the pull to the prior
    const double *lower, *upper; // [N]: bounds of the weights
    double forgetting;           // share of the earlier information that each outcome replaces
};

// Updates weights [n][N] and information [n][N][N] of depths 1 to n by one outcome, given its
// gradients [n][N] and curvatures [n][N][N] of the log-likelihood.
void calibration_step(const CalibrationParams & params, int64_t n, double * weights,
                      double * information, const double * gradients, const double * curvatures);

} // namespace dfl
