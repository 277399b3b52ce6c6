#include "speculative/calibration.h"

#include <algorithm>
#include <cmath>

namespace dfl {

static constexpr int64_t N = CalibrationParams::N;

// Solves a x = g by Gaussian elimination with partial pivoting; g becomes x.
static void solve(double (&a)[N][N], double * g) {
    for (int64_t k = 0; k < N; ++k) {
        int64_t pivot = k;
        for (int64_t i = k + 1; i < N; ++i) {
            pivot = std::fabs(a[i][k]) > std::fabs(a[pivot][k]) ? i : pivot;
        }
        std::swap_ranges(a[k], a[k] + N, a[pivot]);
        std::swap(g[k], g[pivot]);
        for (int64_t i = k + 1; i < N; ++i) {
            const double factor = a[i][k] / a[k][k];
            for (int64_t j = k; j < N; ++j) {
                a[i][j] -= factor * a[k][j];
            }
            g[i] -= factor * g[k];
        }
    }
    for (int64_t i = N; i-- > 0;) {
        for (int64_t j = i + 1; j < N; ++j) {
            g[i] -= a[i][j] * g[j];
        }
        g[i] /= a[i][i];
    }
}

void calibration_step(const CalibrationParams & params, int64_t n, double * weights,
                      double * information, const double * gradients, const double * curvatures) {
    double before[N];
    std::copy_n(params.prior, N, before);
    for (int64_t depth = 0; depth < n; ++depth) {
        double * w = weights + depth * N;
        double * info = information + depth * N * N;
        double a[N][N], step[N];
        for (int64_t i = 0; i < N; ++i) {
            for (int64_t j = 0; j < N; ++j) {
                const double precision = i == j ? params.precision[i] : 0.0;
                double & value = info[i * N + j];
                value +=
                    curvatures[(depth * N + i) * N + j] + params.forgetting * (precision - value);
                a[i][j] = value;
            }
            const double drawn = params.forgetting * (before[i] - w[i]) * params.pull[i];
            step[i] = gradients[depth * N + i] + drawn;
        }
        solve(a, step);
        std::copy_n(w, N, before);
        for (int64_t i = 0; i < N; ++i) {
            w[i] = std::min(std::max(w[i] + step[i], params.lower[i]), params.upper[i]);
        }
    }
}

} // namespace dfl
