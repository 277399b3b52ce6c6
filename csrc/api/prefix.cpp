// Functions of the C ABI for prefixes.
#include "api/handles.h"

#include <algorithm>

using dfl::copy_text;
using dfl::guard;
using dfl::guard_busy;
using dfl::need;

dfl_status dfl_sequence_snapshot_bytes(const dfl_sequence * sequence, uint64_t * bytes,
                                       dfl_error * err) {
    return guard(err, [&] {
        need(sequence, bytes);
        *bytes = sequence->sequence.snapshot_bytes();
    });
}

dfl_status dfl_sequence_snapshot(dfl_sequence * sequence, dfl_prefix ** prefix, dfl_error * err) {
    return guard_busy(sequence, err, [&] {
        need(prefix);
        *prefix = new dfl_prefix{sequence->sequence.snapshot(), sequence->is_busy};
    });
}

void dfl_prefix_free(dfl_prefix * prefix) { delete prefix; }

dfl_status dfl_prefix_get_info(const dfl_prefix * prefix, dfl_prefix_info * info, dfl_error * err) {
    return guard(err, [&] {
        need(prefix, info);
        const dfl::Prefix & p = *prefix->prefix;
        *info = {};
        info->n_draft = p.n_draft();
        info->n_caches = static_cast<int32_t>(p.blocks().size());
        info->n_parts = static_cast<int32_t>(p.parts().size());
    });
}

int64_t dfl_prefix_cells_needed(const dfl_prefix * prefix, int64_t n) {
    return prefix != nullptr && n >= 0 && n <= prefix->prefix->size()
               ? prefix->prefix->cells_needed(n)
               : -1;
}

dfl_status dfl_sequence_restore(dfl_sequence * sequence, const dfl_prefix * prefix, int64_t n,
                                dfl_error * err) {
    return guard_busy(sequence, err, [&] {
        need(prefix);
        sequence->sequence.restore(*prefix->prefix, n);
    });
}

dfl_status dfl_prefix_keep_in_cells(dfl_prefix * prefix, int32_t keeps, dfl_error * err) {
    return guard(err, [&] {
        need(prefix);
        prefix->prefix->keep_in_cells(keeps != 0);
    });
}

dfl_status dfl_engine_offload_prefixes(dfl_engine * engine, int64_t n, uint64_t bytes,
                                       int32_t * is_done, dfl_error * err) {
    return guard_busy(engine, err, [&] {
        need(is_done);
        *is_done = engine->engine->offload(n, bytes);
    });
}

static void check_part(const dfl_prefix & prefix, int32_t index) {
    const auto n = static_cast<int32_t>(prefix.prefix->parts().size());
    DFL_CHECK(index >= 0 && index < n, DFL_STATUS_ARGUMENT,
              "part %d is out of range, the prefix has %d parts", index, n);
}

dfl_status dfl_prefix_get_part(const dfl_prefix * prefix, int32_t index, dfl_prefix_part * part,
                               dfl_error * err) {
    return guard(err, [&] {
        need(prefix, part);
        check_part(*prefix, index);
        const dfl::Prefix::Part & of = prefix->prefix->parts()[index];
        *part = {};
        copy_text(part->name, of.name);
        copy_text(part->type, ggml_type_name(of.type));
        part->ne[0] = of.ne[0];
        part->ne[1] = of.ne[1];
        part->bytes = of.bytes;
    });
}

dfl_status dfl_prefix_get_rows(const dfl_prefix * prefix, int64_t * n_rows, dfl_error * err) {
    return guard(err, [&] {
        need(prefix, n_rows);
        for (size_t i = 0; i < prefix->prefix->blocks().size(); ++i) {
            n_rows[i] = prefix->prefix->n_rows(i);
        }
    });
}

dfl_status dfl_prefix_read(const dfl_prefix * prefix, int32_t part, void * data, dfl_error * err) {
    return guard_busy(prefix, err, [&] {
        need(data);
        check_part(*prefix, part);
        prefix->prefix->read(part, static_cast<uint8_t *>(data));
    });
}

dfl_status dfl_prefix_create(dfl_engine * engine, const int32_t * tokens, int64_t n,
                             const int64_t * n_rows, int32_t n_caches, const dfl_prefix * base,
                             dfl_prefix ** prefix, dfl_error * err) {
    return guard_busy(engine, err, [&] {
        need(tokens, n_rows, prefix);
        engine->engine->check_ids(tokens, n, 0);
        const std::vector<int64_t> rows(n_rows, n_rows + std::max(0, n_caches));
        *prefix = new dfl_prefix{
            std::make_shared<dfl::Prefix>(engine->engine, std::vector<int32_t>(tokens, tokens + n),
                                          rows, base != nullptr ? base->prefix.get() : nullptr),
            engine->is_busy};
    });
}

dfl_status dfl_prefix_without(const dfl_prefix * prefix, const dfl_prefix * base,
                              dfl_prefix ** rest, dfl_error * err) {
    return guard_busy(prefix, err, [&] {
        need(base, rest);
        *rest = new dfl_prefix{std::make_shared<dfl::Prefix>(*prefix->prefix, *base->prefix),
                               prefix->is_busy};
    });
}

dfl_status dfl_prefix_write(dfl_prefix * prefix, int32_t part, const void * data, dfl_error * err) {
    return guard_busy(prefix, err, [&] {
        need(data);
        check_part(*prefix, part);
        prefix->prefix->write(part, static_cast<const uint8_t *>(data));
    });
}
