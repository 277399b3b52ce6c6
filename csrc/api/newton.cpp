// extern "C" bodies only: what calibrations learn by.
#include "draft/newton.h"
#include "api/handles.h"

using dfl::guard;
using dfl::need;
using dfl::NewtonRules;

static_assert(DFL_NEWTON_SIZE == NewtonRules::N);

dfl_status dfl_newton_steps(const dfl_newton_rules * rules, double * weights, double * information,
                            int64_t n_depths, const double * slopes, const double * spreads,
                            const int64_t * counts, int64_t n, dfl_error * err) {
    return guard(err, [&] {
        need(rules, weights, information, slopes, spreads, counts);
        for (int64_t i = 0; i < n; ++i) {
            DFL_CHECK(counts[i] >= 0 && counts[i] <= n_depths, DFL_STATUS_ARGUMENT,
                      "outcomes at %lld depths, there are %lld", static_cast<long long>(counts[i]),
                      static_cast<long long>(n_depths));
        }
        const NewtonRules of = {rules->prior, rules->held, rules->back,
                                rules->low,   rules->high, rules->fade};
        for (int64_t i = 0; i < n; ++i) {
            dfl::newton_step(of, counts[i], weights, information, slopes, spreads);
            slopes += counts[i] * NewtonRules::N;
            spreads += counts[i] * NewtonRules::N * NewtonRules::N;
        }
    });
}
