// Online calibration of candidate probabilities: a Newton step for each draft outcome maximises a
// concave likelihood (dflash_gguf/speculative/calibration.py defines the weights).
#pragma once

#include <cstdint>

namespace dfl {

struct CalibrationParams {
    static constexpr int64_t N = 5; // number of weights at each depth

    const double * prior; // [N]: prior of depth 1; the weights of depth i - 1 are the prior of i
    const double * precision; // [N]: diagonal of the information matrix before any outcome
    const double * pull;      // [N]: strength of the pull of the weights towards their prior
    const double *lower, *upper;
    // Fraction by which each draft outcome moves the information matrix back to `precision`.
    double forgetting;
};

// Updates weights [n][N] and information matrices [n][N][N] of depths 1 to n by one draft outcome,
// given gradients [n][N] and curvatures [n][N][N] of its log-likelihood.
void calibration_step(const CalibrationParams & params, int64_t n, double * weights,
                      double * information, const double * gradients, const double * curvatures);

} // namespace dfl
