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

void outpace_move(const Move *m) {
    const int64_t long_row = m->width * m->bytes, heads = m->heads;
    for (int64_t layer = 0; layer < m->layers; layer++) {
        char *key = m->keys + layer * m->layer, *value = m->values + layer * m->layer;
        for (int64_t i = 0; i < heads * m->width; i++, key += m->capacity * m->bytes)
            for (int64_t j = 0; j < m->rows; j++)
                memcpy(key + (m->to + j) * m->bytes, key + m->row[j] * m->bytes, m->bytes);
        for (int64_t i = 0; i < heads; i++, value += m->capacity * long_row)
            for (int64_t j = 0; j < m->rows; j++)
                memmove(value + (m->to + j) * long_row, value + m->row[j] * long_row, long_row);
    }
}
