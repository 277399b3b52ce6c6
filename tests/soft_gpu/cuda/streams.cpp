#include "streams.h"

#include "api.h"

#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace soft_gpu {

namespace {

struct Capture {
    void * origin; // the stream that began it
    Graph graph;
};

struct Stream;

// Work, or a wait for a position of another stream.
struct Item {
    Work work;
    Stream * other = nullptr;
    int64_t position = 0;
};

struct Stream {
    std::deque<Item> items;
    int64_t n_added = 0, n_done = 0;
    bool is_running = false;
    std::shared_ptr<Capture> capture;
};

struct Event {
    Stream * stream = nullptr;
    int64_t position = 0;
    std::shared_ptr<Capture> capture; // in which it was recorded
};

std::recursive_mutex mutex;
std::unordered_map<void *, Stream> streams; // addresses of its elements are stable
std::unordered_map<void *, Event> events;

bool is_late() {
    static const bool late = std::getenv("SOFT_GPU_LATE") != nullptr;
    return late;
}

void drain(Stream & stream, int64_t until) {
    if (stream.is_running) {
        return; // an item of it waits
    }
    stream.is_running = true;
    while (stream.n_done < until) {
        const Item item = std::move(stream.items.front());
        stream.items.pop_front();
        ++stream.n_done;
        if (item.other != nullptr) {
            drain(*item.other, item.position);
        } else {
            loudly(item.work.run);
        }
    }
    stream.is_running = false;
}

void add(Stream & stream, Item item) {
    stream.items.push_back(std::move(item));
    ++stream.n_added;
    if (!is_late()) {
        drain(stream, stream.n_added);
    }
}

using Lock = std::lock_guard<std::recursive_mutex>;

} // namespace

void enqueue(void * handle, Work work) {
    const Lock lock(mutex);
    Stream & stream = streams[handle];
    if (stream.capture != nullptr) {
        stream.capture->graph.push_back(std::move(work));
    } else {
        add(stream, {std::move(work), nullptr, 0});
    }
}

void synchronize(void * handle) {
    const Lock lock(mutex);
    Stream & stream = streams[handle];
    if (stream.capture != nullptr) {
        fail("a stream is waited for while it is captured");
    }
    drain(stream, stream.n_added);
}

void synchronize_all() {
    const Lock lock(mutex);
    for (auto & [handle, stream] : streams) {
        drain(stream, stream.n_added);
    }
}

void record(void * event, void * handle) {
    const Lock lock(mutex);
    Stream & stream = streams[handle];
    events[event] = {&stream, stream.n_added, stream.capture};
}

void wait_for_event(void * handle, void * event) {
    const Lock lock(mutex);
    Stream & stream = streams[handle];
    const Event & awaited = events[event];
    if (awaited.capture != nullptr) {
        if (stream.capture != nullptr && stream.capture != awaited.capture) {
            fail("a captured stream waits for another capture");
        }
        stream.capture = awaited.capture;
    } else if (stream.capture == nullptr && awaited.stream != nullptr &&
               awaited.stream != &stream) {
        add(stream, {{}, awaited.stream, awaited.position});
    }
}

void synchronize_event(void * event) {
    const Lock lock(mutex);
    const Event & awaited = events[event];
    if (awaited.capture != nullptr) {
        fail("the host waits for an event of a capture");
    }
    if (awaited.stream != nullptr) {
        drain(*awaited.stream, awaited.position);
    }
}

void begin_capture(void * handle) {
    const Lock lock(mutex);
    Stream & stream = streams[handle];
    if (stream.capture != nullptr) {
        fail("a capture begins inside another");
    }
    stream.capture = std::make_shared<Capture>(Capture{handle, {}});
    ++counts().captures;
}

bool is_capturing(void * handle) {
    const Lock lock(mutex);
    return streams[handle].capture != nullptr;
}

Graph end_capture(void * handle) {
    const Lock lock(mutex);
    const std::shared_ptr<Capture> capture = streams[handle].capture;
    if (capture == nullptr || capture->origin != handle) {
        fail("a capture ends that the stream did not begin");
    }
    for (auto & [other, stream] : streams) {
        if (stream.capture == capture) {
            stream.capture = nullptr;
        }
    }
    for (auto & [other, event] : events) {
        if (event.capture == capture) {
            event = {};
        }
    }
    return std::move(capture->graph);
}

} // namespace soft_gpu
