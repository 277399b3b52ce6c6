// The exponential function for vectors of floats.
#pragma once

namespace dfl::cpu {
namespace {

// Returns exp(x) for x <= 0; 0 below -87, NaN for NaN. The largest relative error is about 2e-7.
template <class V>
typename V::F exp_lanes(typename V::F x) {
    using F = typename V::F;
    const F low = V::max(V::spread(-87.0f), x); // if x is NaN, V::max returns NaN
    const F n = V::round(V::mul(low, V::spread(1.44269504f)));
    F r = V::mul_add(n, V::spread(-0.693359375f), low);
    r = V::mul_add(n, V::spread(2.12194440e-4f), r);
    F p = V::spread(1.0f / 720);
    for (const float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        p = V::mul_add(p, r, V::spread(c));
    }
    return V::zero_below(x, -87.0f, V::times_power_of_two(p, n));
}

} // namespace
} // namespace dfl::cpu
