/* Rows of a slot that are copied to places before them, as when a path of a tree is kept. */

#pragma once

#include <stdint.h>
#include <string.h>

/* moves.py has the same list. */
typedef struct {
    char *keys, *values; /* of the slot: [layers, heads, width, capacity], [layers, heads, capacity, width] */
    int64_t layers, heads, width, capacity, bytes; /* of a number */
    int64_t layer;                                 /* bytes from layer to layer */
    int64_t to, rows;
    int64_t row[]; /* ascending; none is before its new place */
} Move;

/* Keys of a slot: one number of each row in every line. Ahead of time lines are asked for, since all of
   them were written by other threads. */
#define MOVE_KEYS(number)                                                                         \
    for (int64_t i = 0; i < lines; i++) {                                                         \
        number *line = (number *)keys + i * m->capacity;                                          \
        if (i + AHEAD < lines) __builtin_prefetch(line + AHEAD * m->capacity + m->row[0], 1);     \
        for (int64_t j = 0; j < m->rows; j++) line[m->to + j] = line[m->row[j]];                  \
    }

enum { AHEAD = 16 };

void outpace_move(const Move *m) {
    const int64_t long_row = m->width * m->bytes, lines = m->heads * m->width;
    for (int64_t layer = 0; layer < m->layers; layer++) {
        char *keys = m->keys + layer * m->layer, *value = m->values + layer * m->layer;
        if (m->bytes == 2) MOVE_KEYS(uint16_t) else MOVE_KEYS(uint32_t)
        for (int64_t i = 0; i < m->heads; i++, value += m->capacity * long_row)
            for (int64_t j = 0; j < m->rows; j++)
                memmove(value + (m->to + j) * long_row, value + m->row[j] * long_row, long_row);
    }
}
