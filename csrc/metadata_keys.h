// Keys of a model file that nothing reads: whether that changes the model's numbers.
#pragma once

namespace dfl {

class GgufFile;

// Call when the hyper-parameters have been read. Throws DFL_STATUS_UNSUPPORTED naming the first key
// of the file's architecture that nobody asked for, unless it or its value is known to change
// nothing.
void check_no_key_skipped(const GgufFile & file);

} // namespace dfl
