#include "speculative/calibration.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace dfl {

static constexpr int64_t N = NewtonRules::N;

// Solves a x = b by elimination with the largest pivots; b becomes x.
static void solve(double (&a)[N][N], double * b) {
    for (int64_t k = 0; k < N; ++k) {
        int64_t pivot = k;
        for (int64_t i = k + 1; i < N; ++i) {
            pivot = std::fabs(a[i][k]) > std::fabs(a[pivot][k]) ? i : pivot;
        }
        std::swap_ranges(a[k], a[k] + N, a[pivot]);
        std::swap(b[k], b[pivot]);
        for (int64_t i = k + 1; i < N; ++i) {
            const double factor = a[i][k] / a[k][k];
            for (int64_t j = k; j < N; ++j) {
                a[i][j] -= factor * a[k][j];
            }
            b[i] -= factor * b[k];
        }
    }
    for (int64_t i = N; i-- > 0;) {
        for (int64_t j = i + 1; j < N; ++j) {
            b[i] -= a[i][j] * b[j];
        }
        b[i] /= a[i][i];
    }
}

void newton_step(const NewtonRules & rules, int64_t n, double * weights, double * information,
                 const double * slopes, const double * spreads) {
    double before[N]; // of the depth before, as they were
    std::copy_n(rules.prior, N, before);
    for (int64_t depth = 0; depth < n; ++depth) {
        double * w = weights + depth * N;
        double * info = information + depth * N * N;
        double a[N][N], step[N];
        for (int64_t i = 0; i < N; ++i) {
            for (int64_t j = 0; j < N; ++j) {
                const double held = i == j ? rules.held[i] : 0.0;
                double & value = info[i * N + j];
                value += spreads[(depth * N + i) * N + j] + rules.fade * (held - value);
                a[i][j] = value;
            }
            const double drawn = rules.fade * (before[i] - w[i]) * rules.back[i];
            step[i] = slopes[depth * N + i] + drawn;
        }
        solve(a, step);
        std::copy_n(w, N, before);
        for (int64_t i = 0; i < N; ++i) {
            w[i] = std::min(std::max(w[i] + step[i], rules.low[i]), rules.high[i]);
        }
    }
}

} // namespace dfl
