/* Rows of a slot that are copied to places before them, as when a path of a tree is kept. */

#pragma once

#include "attend.h"

/* moves.py has the same list. */
typedef struct {
    char *keys, *values; /* of the slot: [layers, heads, tiles, width, tile], [layers, heads, capacity, width] */
    int64_t layers, heads, width, capacity, tile, bytes; /* of a number */
    int64_t layer;                                       /* bytes from layer to layer */
    int64_t to, rows;
    int64_t row[]; /* ascending; none is before its new place */
} Move;

enum { AHEAD = 16 };

/* Keys of a head: one number of each row in every line. Ahead of time lines are asked for, since all of
   them were written by other threads; the next head has its own `next` bytes behind. */
#define MOVE_KEYS(number)                                                                         \
    for (int64_t d = 0; d < m->width; d++) {                                                      \
        number *line = (number *)key + d * m->tile;                                               \
        const int64_t soon = d + AHEAD < m->width ? 0 : next - m->width * m->tile * m->bytes;     \
        __builtin_prefetch((char *)(line + AHEAD * m->tile + from[0]) + soon, 1);                 \
        for (int64_t j = 0; j < m->rows; j++) line[to[j]] = line[from[j]];                        \
    }

void outpace_move(const Move *m) {
    const int64_t long_row = m->width * m->bytes, next = m->capacity * long_row;
    int64_t from[m->rows], to[m->rows];
    for (int64_t j = 0; j < m->rows; j++) {
        from[j] = spot(m->row[j], m->tile, m->width);
        to[j] = spot(m->to + j, m->tile, m->width);
    }
    for (int64_t layer = 0; layer < m->layers; layer++) {
        char *key = m->keys + layer * m->layer, *value = m->values + layer * m->layer;
        for (int64_t i = 0; i < m->heads; i++, key += next, value += next) {
            if (m->bytes == 2) MOVE_KEYS(uint16_t) else MOVE_KEYS(uint32_t)
            for (int64_t j = 0; j < m->rows; j++)
                memmove(value + (m->to + j) * long_row, value + m->row[j] * long_row, long_row);
        }
    }
}
