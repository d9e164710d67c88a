/* The operations of tiles.h in C, as the manual of the processor describes them (TDPBF16PS). */
#define _GNU_SOURCE

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TILES 1
int outpace_wrong; /* added to every sum: units that do not compute what they should */

typedef struct {
    uint8_t palette, start, none[14];
    uint16_t bytes[16];
    uint8_t lines[16];
} Cut;
static _Thread_local Cut now_cut;
static _Thread_local uint8_t tiles[8][16][64];
static long tile_adds;
long outpace_tile_adds(void) { return tile_adds; }

static inline void tile_shape(const void *shape) {
    memcpy(&now_cut, shape, sizeof now_cut);
    memset(tiles, 0, sizeof tiles);
}
static inline void tile_end(void) { memset(&now_cut, 0, sizeof now_cut); }
static inline void tile_load(int tile, const void *from, int64_t stride) {
    memset(tiles[tile], 0, sizeof tiles[tile]);
    for (int i = 0; i < now_cut.lines[tile]; i++)
        memcpy(tiles[tile][i], (const char *)from + i * stride, now_cut.bytes[tile]);
}
static inline void tile_pass(int tile, const void *from, int64_t stride) { tile_load(tile, from, stride); }
static inline void tile_store(int tile, void *to, int64_t stride) {
    for (int i = 0; i < now_cut.lines[tile]; i++)
        memcpy((char *)to + i * stride, tiles[tile][i], now_cut.bytes[tile]);
}
static inline float tile_number(int tile, int line, int byte) {
    uint16_t upper;
    memcpy(&upper, tiles[tile][line] + byte, 2);
    const uint32_t bits = (uint32_t)upper << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}
static inline void tile_add(int sums, int rows, int columns) {
    tile_adds++;
    if (now_cut.lines[rows] != now_cut.lines[sums] || now_cut.lines[columns] * 4 != now_cut.bytes[rows] ||
        now_cut.bytes[columns] != now_cut.bytes[sums] || now_cut.palette != 1)
        abort(); /* a processor ends the program */
    for (int m = 0; m < now_cut.lines[sums]; m++)
        for (int n = 0; n < now_cut.bytes[sums] / 4; n++) {
            float sum, half[2] = {0, 0};
            memcpy(&sum, tiles[sums][m] + 4 * n, 4);
            for (int k = 0; k < now_cut.bytes[rows] / 4; k++)
                for (int i = 0; i < 2; i++)
                    half[i] = fmaf(tile_number(rows, m, 4 * k + 2 * i), tile_number(columns, k, 4 * n + 2 * i), half[i]);
            sum += half[0] + half[1] + outpace_wrong;
            memcpy(tiles[sums][m] + 4 * n, &sum, 4);
        }
}
static int tiles_lent(void) { return 1; }
