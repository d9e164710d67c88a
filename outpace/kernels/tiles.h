/* Sums of products of bfloat16 by the matrix units of a processor (AMX): 16 rows and 16 outputs at once.

   A tile has up to 16 lines of 64 bytes: of rows, 32 numbers each; of weights, pairs of inputs of 16 outputs; of sums,
   16 outputs of a row. Of every 32 inputs, even ones and odd ones are summed apart, in float32; both are
   then added to the sum. So a row's sums do not depend on how many rows there are.

   Linux lends the units to a process that asks for them. Before the first use, a known product is computed with
   them: where its sums are wrong, they are not used.

   A test may give the operations in C, as `TILES`. */

#pragma once

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

enum { TILE_ROWS = 16, TILE_LINE = 64, TILE_INPUTS = 32, TILE_BYTES = TILE_ROWS * TILE_LINE };

/* How tiles are cut: bytes of a line, and lines, of each. */
typedef struct {
    uint8_t palette, start, none[14];
    uint16_t bytes[16];
    uint8_t lines[16];
} TileShape;

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && !defined(TILES)
#include <sys/syscall.h>
extern long syscall(long, ...);
#define TILES 1
/* Compilers' own names for these do not say that they read memory. */
#define TILE_ASM(...) __asm__ volatile(__VA_ARGS__ : "memory")
#define tile_shape(shape) TILE_ASM("ldtilecfg %0" ::"m"(*(shape)))
#define tile_end() TILE_ASM("tilerelease" ::)
#define tile_load(tile, from, stride)                                                             \
    TILE_ASM("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"((int64_t)(stride)), "i"(tile))
/* The same for what the first cache shall not keep: it comes out of the second one. */
#define tile_pass(tile, from, stride)                                                             \
    TILE_ASM("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"((int64_t)(stride)), "i"(tile))
#define tile_store(tile, to, stride)                                                              \
    TILE_ASM("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)), "i"(tile))
/* sums += rows times columns */
#define tile_add(sums, rows, columns)                                                             \
    TILE_ASM("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(columns))
static int tiles_lent(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#elif !defined(TILES)
#define TILES 0
#define tile_shape(shape) (void)(shape)
#define tile_end() (void)0
#define tile_load(tile, from, stride) (void)(from)
#define tile_pass(tile, from, stride) (void)(from)
#define tile_add(sums, rows, columns) (void)0
#define tile_store(tile, to, stride) (void)(to)
static inline int tiles_lent(void) { return 0; }
#endif

/* Numbers of tiles: sums of two groups of outputs, for upper and for lower rows; rows; weights of both groups. */
enum { T_UPPER, T_LOWER = 2, T_ROWS = 4, T_MORE_ROWS, T_WEIGHTS };
enum { TILED = 2 * TILE_ROWS }; /* rows at a time */

/* Cut tiles for `rows` rows. */
static inline void cut_tiles(int rows) {
    TileShape shape = {.palette = 1};
    const int upper = rows < TILE_ROWS ? rows : TILE_ROWS, lower = rows - upper;
    const int lines[] = {upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS};
    for (int i = 0; i < 8; i++) {
        shape.lines[i] = (uint8_t)lines[i];
        shape.bytes[i] = lines[i] ? TILE_LINE : 0;
    }
    tile_shape(&shape);
}

/* Begin with zeros. The processor has an instruction for it, behind which the next product waits 40 cycles. */
static const char tile_zeros[TILE_BYTES] __attribute__((aligned(64)));
#define tile_zero(tile) tile_load(tile, tile_zeros, TILE_LINE)

/* Weights of so many inputs at most are read by many rows, one tile after the other: those of two groups fit into the
   first cache, which keeps them while rows pass. With half as many 512 rows take 1.05 of a pass. */
enum { TILE_BLOCK = 576 };
static inline int64_t tile_block(int64_t inputs) {
    const int64_t blocks = (inputs + TILE_BLOCK - 1) / TILE_BLOCK, lines = inputs / TILE_INPUTS;
    return (lines + blocks - 1) / blocks * TILE_INPUTS;
}

/* Weights are asked for as many bytes ahead, into the second cache. Where several tiles of rows read them, each asks
   for a part: so memory works while the units do. */
enum { TILES_FETCHED = TILE_BLOCK * TILE_LINE };
typedef struct {
    int from, to; /* of the bytes of 32 inputs */
} Share;
static inline void fetch_tiles(const char *from, Share share) {
    for (int i = share.from; i < share.to; i += TILE_LINE) __builtin_prefetch(from + TILES_FETCHED + i, 0, 2);
}

/* Rows as tiles want them: of each 16 rows, 32 inputs of all of them, then the next 32. Where those of a row are, in
   numbers. */
static inline int64_t tile_at(int64_t row, int64_t rows, int64_t inputs, int64_t block) {
    const int64_t above = row / TILE_ROWS * TILE_ROWS, high = rows - above < TILE_ROWS ? rows - above : TILE_ROWS;
    return above * inputs + (block * high + row - above) * TILE_INPUTS;
}

/* Where sums of rows and two groups of outputs lie: bytes from row to row, and from one group to the other. */
typedef struct {
    float *at;
    int64_t stride, groups;
} Sums;

/* Add products of inputs `from` to `to` to the sums of up to TILED rows and two groups of outputs, which begin at
   input 0. x: the rows in tiles, which the first cache keeps if they `stay`; weights: as `products.h` lays them out,
   of which `share` is asked for. */
static inline void tile_sums(const int stay, const char *x, int rows, int64_t inputs, int64_t from, int64_t to,
                             const char *weights, Share share, Sums sums, Sums out) {
    const int both = rows > TILE_ROWS, upper = (both ? TILE_ROWS : rows) * TILE_LINE, lower = rows * TILE_LINE - upper;
    const char *more = x + TILE_ROWS * inputs * 2;
#define EACH_TILE(with)                                                                           \
    with(T_UPPER, 0, 0) with(T_UPPER + 1, 0, 1)                                                   \
    if (both) { with(T_LOWER, TILE_ROWS, 0) with(T_LOWER + 1, TILE_ROWS, 1) }
#define BEGIN(tile, row, group)                                                                   \
    if (from) tile_load(tile, (char *)sums.at + row * sums.stride + group * sums.groups, sums.stride); \
    else tile_zero(tile);
#define END(tile, row, group) tile_store(tile, (char *)out.at + row * out.stride + group * out.groups, out.stride);
    EACH_TILE(BEGIN)
    weights += from / TILE_INPUTS * 2 * TILE_BYTES;
    for (int64_t at = from / TILE_INPUTS; at < to / TILE_INPUTS; at++, weights += 2 * TILE_BYTES) {
        fetch_tiles(weights, share);
        tile_load(T_WEIGHTS, weights, 2 * TILE_LINE);
        if (stay) tile_load(T_ROWS, x + at * upper, TILE_LINE);
        else tile_pass(T_ROWS, x + at * upper, TILE_LINE);
        tile_add(T_UPPER, T_ROWS, T_WEIGHTS);
        tile_load(T_WEIGHTS + 1, weights + TILE_LINE, 2 * TILE_LINE);
        tile_add(T_UPPER + 1, T_ROWS, T_WEIGHTS + 1);
        if (!both) continue;
        if (stay) tile_load(T_MORE_ROWS, more + at * lower, TILE_LINE);
        else tile_pass(T_MORE_ROWS, more + at * lower, TILE_LINE);
        tile_add(T_LOWER, T_MORE_ROWS, T_WEIGHTS);
        tile_add(T_LOWER + 1, T_MORE_ROWS, T_WEIGHTS + 1);
    }
    EACH_TILE(END)
#undef END
#undef BEGIN
#undef EACH_TILE
}

/* Whether a product of small whole numbers, whose sums are exact, is right. */
static int tiles_right(void) {
    enum { ROWS = 19, INPUTS = 2 * TILE_INPUTS, OUTPUTS = 2 * TILE_ROWS };
    static const uint16_t numbers[] = {0x3f80, 0xc000, 0x4040, 0xbf80, 0x0000, 0x4080, 0xc0a0}; /* 1 -2 3 -1 0 4 -5 */
    static const int whole[] = {1, -2, 3, -1, 0, 4, -5};
    uint16_t x[ROWS * INPUTS], weights[INPUTS / 2][OUTPUTS][2];
    float sums[2][ROWS][TILE_ROWS];
#define X_AT(row, i) (((row) * 5 + (i) * 3 + (i) / 7) % 7)
#define W_AT(i, output) (((i) * 2 + (output) * 3 + (i) / 5) % 7)
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < INPUTS; i++)
            x[tile_at(row, ROWS, INPUTS, i / TILE_INPUTS) + i % TILE_INPUTS] = numbers[X_AT(row, i)];
    for (int i = 0; i < INPUTS; i++)
        for (int output = 0; output < OUTPUTS; output++) weights[i / 2][output][i % 2] = numbers[W_AT(i, output)];
    cut_tiles(ROWS);
    const Sums all = {**sums, TILE_LINE, sizeof *sums};
    for (int i = 0; i < INPUTS; i += TILE_INPUTS)
        tile_sums(1, (const char *)x, ROWS, INPUTS, i, i + TILE_INPUTS, (const char *)weights, (Share){0}, all, all);
    tile_end();
    for (int row = 0; row < ROWS; row++)
        for (int output = 0; output < OUTPUTS; output++) {
            int want = 0;
            for (int i = 0; i < INPUTS; i++) want += whole[X_AT(row, i)] * whole[W_AT(i, output)];
            if (sums[output / TILE_ROWS][row][output % TILE_ROWS] != (float)want) return 0;
        }
    return 1;
#undef X_AT
#undef W_AT
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
