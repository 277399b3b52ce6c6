// Instructions that compute each lane's result from the same lane's operands.
#pragma once

#include "warp.h"

#include <tuple>
#include <utility>

namespace soft_gpu {

// Operations that round to 16 bits themselves. Others are computed in float32 and rounded, which
// gives the exact sum, product and quotient.
template <const auto & OPERATION>
constexpr bool ROUNDS_HALF = false;

template <const auto & OPERATION, class Result, class... Source>
inline Result apply(Source... source) {
    if constexpr (IS_PAIR<Result> && (IS_PAIR<Source> && ...)) {
        using Half = decltype(Result::low);
        return {apply<OPERATION, Half>(source.low...), apply<OPERATION, Half>(source.high...)};
    } else if constexpr (IS_HALF<Result> && !ROUNDS_HALF<OPERATION>) {
        return static_cast<Result>(static_cast<f32>(OPERATION(static_cast<f32>(source)...)));
    } else {
        return static_cast<Result>(OPERATION(source...));
    }
}

template <const auto & OPERATION, class Result, class... Source, size_t... I>
inline void elementwise_at(Warp & warp, const Instruction & instruction,
                           std::index_sequence<I...>) {
    Result * target = warp.at<Result>(instruction.target);
    const std::tuple<const Source *...> sources{warp.at<Source>(instruction.source[I])...};
    for_lanes(warp, [&](int lane) {
        target[lane] = apply<OPERATION, Result>(std::get<I>(sources)[lane]...);
    });
}

template <const auto & OPERATION, class Result, class... Source>
void elementwise(Warp & warp, const Instruction & instruction) {
    elementwise_at<OPERATION, Result, Source...>(warp, instruction,
                                                 std::index_sequence_for<Source...>());
}

template <class T, size_t>
using Repeated = T;

template <const auto & OPERATION, class T, size_t... I>
constexpr Execute uniform(std::index_sequence<I...>) {
    return elementwise<OPERATION, T, Repeated<T, I>...>;
}

// Returns the operation on n operands of a type, or nullptr if the type is not in the list.
template <const auto & OPERATION, size_t N, class... T>
Execute choose(Type type, Types<T...>) {
    Execute found = nullptr;
    ((type == type_of<T>() ? void(found = uniform<OPERATION, T>(std::make_index_sequence<N>()))
                           : void()),
     ...);
    return found;
}

template <const auto & OPERATION, size_t N, class List>
Execute choose(Type type) {
    return choose<OPERATION, N>(type, List());
}

} // namespace soft_gpu
