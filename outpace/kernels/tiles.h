/* Sums of products of bytes by the matrix units of a processor (AMX): 16 rows and 16 outputs at once.

   A tile has up to 16 lines of 64 bytes. Sums of rows and outputs are integers, so they are those of
   any other instructions; only how long they take differs. Linux lends the units to a process that
   asks for them. Before the first use, a known product is computed with them: where its sums are
   wrong, they are not used.

   A test may give the five operations in C, as `TILES`. */

#pragma once

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

enum { TILE_ROWS = 16, TILE_LINE = 64 };

/* How tiles are cut: bytes of a line, and lines, of each. */
typedef struct {
    uint8_t palette, start, none[14];
    uint16_t bytes[16];
    uint8_t lines[16];
} TileShape;

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && !defined(TILES)
#include <sys/syscall.h>
extern long syscall(long, ...);
#define TILES 1
/* Compilers' own names for these do not say that they read memory. */
#define TILE_ASM(...) __asm__ volatile(__VA_ARGS__ : "memory")
#define tile_shape(shape) TILE_ASM("ldtilecfg %0" ::"m"(*(shape)))
#define tile_end() TILE_ASM("tilerelease" ::)
#define tile_load(tile, from, stride)                                                             \
    TILE_ASM("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"((int64_t)(stride)), "i"(tile))
#define tile_store(tile, to, stride)                                                              \
    TILE_ASM("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)), "i"(tile))
#define tile_zero(tile) TILE_ASM("tilezero %%tmm%c0" ::"i"(tile))
/* sums += rows of signed bytes times columns of unsigned ones */
#define tile_add(sums, rows, columns)                                                             \
    TILE_ASM("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(columns))
static int tiles_lent(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#elif !defined(TILES)
#define TILES 0
#define tile_shape(shape) (void)(shape)
#define tile_end() (void)0
#define tile_load(tile, from, stride) (void)(from)
#define tile_zero(tile) (void)0
#define tile_add(sums, rows, columns) (void)0
#define tile_store(tile, to, stride) (void)(to)
static inline int tiles_lent(void) { return 0; }
#endif

enum { T_UPPER, T_LOWER, T_X_UPPER, T_X_LOWER, T_CODES }; /* numbers of tiles */

/* Cut tiles for `rows` rows and `inputs` inputs. */
static inline void cut_tiles(int rows, int inputs) {
    TileShape shape = {.palette = 1};
    for (int sums = T_UPPER; sums <= T_LOWER; sums++)
        shape.lines[sums] = (uint8_t)rows, shape.bytes[sums] = TILE_LINE;
    for (int x = T_X_UPPER; x <= T_X_LOWER; x++)
        shape.lines[x] = (uint8_t)rows, shape.bytes[x] = (uint16_t)inputs;
    shape.lines[T_CODES] = (uint8_t)(inputs / 4), shape.bytes[T_CODES] = TILE_LINE;
    tile_shape(&shape);
}

/* Sums of upper and of lower bytes, [rows, 16] each; of upper ones alone where there are no others.
   `stride`: bytes from one row of x to the next. */
static inline void tile_sums(const char *upper_x, const char *lower_x, int64_t stride,
                             const char *codes, int32_t *upper, int32_t *lower) {
    tile_load(T_CODES, codes, TILE_LINE);
    tile_load(T_X_UPPER, upper_x, stride);
    tile_zero(T_UPPER);
    tile_add(T_UPPER, T_X_UPPER, T_CODES);
    tile_store(T_UPPER, upper, TILE_LINE);
    if (!lower_x) return;
    tile_load(T_X_LOWER, lower_x, stride);
    tile_zero(T_LOWER);
    tile_add(T_LOWER, T_X_LOWER, T_CODES);
    tile_store(T_LOWER, lower, TILE_LINE);
}

/* Whether a product of the largest and other bytes is right. */
static int tiles_right(void) {
    enum { ROWS = 11, INPUTS = 16 };
    int8_t x[ROWS][2 * INPUTS];
    uint8_t codes[INPUTS / 4][TILE_LINE];
    int32_t sums[2][TILE_ROWS][TILE_ROWS];
    for (int i = 0; i < ROWS * 2 * INPUTS; i++) ((int8_t *)x)[i] = (int8_t)(i * 37 + i / 7);
    for (int i = 0; i < INPUTS * TILE_ROWS; i++) ((uint8_t *)codes)[i] = (uint8_t)(255 - i * 53 - i / 5);
    cut_tiles(ROWS, INPUTS);
    tile_sums((const char *)x, (const char *)x + INPUTS, sizeof *x, (const char *)codes, sums[0][0], sums[1][0]);
    tile_end();
    for (int part = 0; part < 2; part++)
        for (int row = 0; row < ROWS; row++)
            for (int output = 0; output < TILE_ROWS; output++) {
                int32_t want = 0;
                for (int i = 0; i < INPUTS; i++)
                    want += x[row][part * INPUTS + i] * codes[i / 4][output * 4 + i % 4];
                if (sums[part][row][output] != want) return 0;
            }
    return 1;
}

/* Whether this process has tiles, and they compute what they should. */
static inline int has_tiles(void) {
    static _Atomic int known; /* 1: no, 2: yes */
    if (!TILES) return 0;
    int found = atomic_load_explicit(&known, memory_order_relaxed);
    if (found == 0) {
        found = tiles_lent() && tiles_right() ? 2 : 1;
        atomic_store_explicit(&known, found, memory_order_relaxed);
    }
    return found == 2;
}
