// CHECK and error_of(), the assertions of the C++ tests.
#pragma once

#include "error.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                   \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (0)

// Returns the message of the dfl::Error that body throws, or an empty string if it throws none.
template <typename Body>
std::string error_of(Body && body) {
    try {
        body();
    } catch (const dfl::Error & error) {
        return error.what();
    }
    return "";
}

inline bool contains(const std::string & text, const char * part) {
    return text.find(part) != std::string::npos;
}
