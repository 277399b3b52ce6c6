// Functions of the C ABI for sequences.
#include "api/handles.h"

#include <algorithm>

using dfl::guard;
using dfl::guard_busy;
using dfl::need;

dfl_status dfl_sequence_create(dfl_engine * engine, dfl_sequence ** sequence, dfl_error * err) {
    return guard_busy(engine, err, [&] {
        need(sequence);
        *sequence = new dfl_sequence(*engine);
    });
}

void dfl_sequence_free(dfl_sequence * sequence) { delete sequence; }

int64_t dfl_sequence_position(const dfl_sequence * sequence) {
    return sequence != nullptr ? sequence->sequence.position() : -1;
}

int64_t dfl_sequence_cells_needed(const dfl_sequence * sequence, int64_t n) {
    return sequence != nullptr ? sequence->sequence.cells_needed(n) : -1;
}

dfl_status dfl_sequence_get_tokens(const dfl_sequence * sequence, int32_t * tokens,
                                   dfl_error * err) {
    return guard(err, [&] {
        need(sequence, tokens);
        const std::vector<int32_t> & committed = sequence->sequence.tokens();
        std::copy(committed.begin(), committed.end(), tokens);
    });
}

dfl_status dfl_sequence_check_append(dfl_sequence * sequence, dfl_error * err) {
    return guard_busy(sequence, err, [&] { sequence->sequence.check_append(); });
}

dfl_status dfl_sequence_argmax(dfl_sequence * sequence, int64_t row, int32_t * token,
                               dfl_error * err) {
    return guard_busy(sequence, err, [&] {
        need(token);
        *token = sequence->sequence.argmax(row - sequence->sequence.first_row());
    });
}

dfl_status dfl_sequence_logits(dfl_sequence * sequence, const int64_t * rows, int64_t n,
                               float * logits, dfl_error * err) {
    return guard_busy(sequence, err, [&] {
        need(rows, logits);
        std::vector<int64_t> readable(rows, rows + n);
        for (int64_t & row : readable) {
            row -= sequence->sequence.first_row();
        }
        sequence->sequence.logits(readable, logits);
    });
}

dfl_status dfl_sequence_reset(dfl_sequence * sequence, dfl_error * err) {
    return guard_busy(sequence, err, [&] { sequence->sequence.reset(); });
}
