// Streams, events and captures.
//
// A stream's work runs when it is enqueued or, with SOFT_GPU_LATE, when somebody waits for it: the
// two extremes between which a real GPU is.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace soft_gpu {

struct Work {
    std::string kind; // must be the same when a graph is updated
    std::function<void()> run;
};
using Graph = std::vector<Work>;

void enqueue(void * stream, Work work); // into the graph that the stream captures, if it does
void synchronize(void * stream);
void synchronize_all();
void record(void * event, void * stream);
void wait_for_event(void * stream, void * event);
void synchronize_event(void * event);

// A capture takes in other streams that wait for an event of one of its streams.
void begin_capture(void * stream);
bool is_capturing(void * stream);
Graph end_capture(void * stream);

} // namespace soft_gpu
