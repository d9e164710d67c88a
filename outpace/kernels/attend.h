/* Attention of all rows of a pass over the dense cache, for CPUs: the same thing that
   attention.py does with products of matrices, in one reading of keys and values.

   What a row gets depends on its own sight alone, bit for bit: not on the rows beside it, not on
   the number of threads, and not on whether its ancestors stand in a chain or in a tree.
   - A score is summed coordinate by coordinate, by fused multiply-adds.
   - Positions are cut into blocks of 128. In a block, values are summed by position; weights are
     summed by position in each lane, and lanes in one fixed order.
   - From keys and values in bfloat16 both sums take two terms at a time, an even one and the next,
     for which there is an instruction. It wants queries and weights in bfloat16 as well.
   - Matrix units (tiles.h) take 32 terms at a time, even and odd ones apart, and do so for all rows.
   - Blocks are merged in order, each weighted by its own largest score.

   Work is cut into units, one block of positions for a few rows of one slot and one head of keys;
   then rows are merged. A unit reads each key and value once,
   for up to MOST query rows. Keys lie in tiles of neighbouring positions, coordinate by coordinate
   in each, so that positions fill a vector; values lie row by row, so that coordinates do.

   Letters: G query heads per head of keys, D width of a head, C rows of a slot, M = rows * G. */

#pragma once

#include "lanes.h"
#include "tiles.h"

/* TALL query rows by WIDE vectors is what a product holds in registers. */
enum { TALL = 6, WIDE = BYTES == 32 ? 2 : 4 };
enum { TILE = WIDE * LANES, BLOCK = 128, MOST = TILES ? 3 * TILED : TILED, WIDEST = 256 };
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define DOTS
#endif

#define EACH_ROW(m) _Pragma("GCC unroll 6") for (int m = 0; m < tall; m++)
#define EACH_VEC(n) _Pragma("GCC unroll 4") for (int n = 0; n < wide; n++)
/* The number of rows has to be known when a product is compiled. */
#define BY_HEIGHT(left, product)                                                                  \
    switch (left) {                                                                               \
    case 1: product(1); break;                                                                    \
    case 2: product(2); break;                                                                    \
    case 3: product(3); break;                                                                    \
    case 4: product(4); break;                                                                    \
    case 5: product(5); break;                                                                    \
    default: product(6);                                                                          \
    }

/* Which positions a row of the pass sees: those from `low` to `dense` in the rows of its slot that
   bear their numbers, and then `length` more, one by one, in the rows that `path` lists. */
typedef struct {
    int64_t low, dense, path, length;
} Sight;

/* Consecutive rows of one slot that are handled together, and the blocks that they see: first
   those of `listed` rows that a list names, then those of positions from block `first` on. */
typedef struct {
    int64_t slot, row, rows, first, blocks, part, listed;
    int64_t list, list_layer, list_head; /* address of int32, and steps from list to list */
    int64_t copies, copied; /* addresses, or 0: listed blocks side by side, and which are there */
    int64_t twin, same;     /* a slot whose first `same` rows are as those of `slot`: others read it too */
} Chunk;

/* Which rows of a slot a list shall name: see choose.h. */
typedef struct {
    int64_t slot, row;       /* the row of the pass whose queries choose */
    int64_t low, high;       /* rows of the slot that may be chosen */
    int64_t rule, run, runs; /* how many runs of neighbouring rows, and their length */
    int64_t list, list_layer, list_head;
    int64_t scores;  /* float [(G + 1) * kv, high - low] */
    int64_t tops;    /* float [G * kv, 2] */
    int64_t queries; /* float [layers, G * kv * D]: those that chose last, not rotated */
    int64_t turn;    /* float [D]: cosines and sines of the row's position */
    int64_t anew;    /* int64 [layers]: whether this pass chose anew */
    int64_t least;   /* cosine from which on a choice stays, in millionths */
    int64_t copied, lists; /* int32 [layers, kv, lists]: which blocks were copied; or 0 */
    int64_t read, which; /* how many coordinates of keys are read, and int32 [kv, read]: those; 0: all */
} Choice;

/* How work is cut where all blocks of a chunk are one piece, without parts: a chunk after the other, or a head. */
enum { WHOLE = 1, BY_HEAD };

/* All that the layers of a pass have in common. fused.py has the same list. */
typedef struct {
    int64_t kv, group, width, capacity, tile, key_stride, value_stride, bfloat16, half;
    int64_t news, units, chunks, parts, choices;
    int64_t whole; /* 0, WHOLE or BY_HEAD; see.h chooses */
    float *head;          /* [T, (G + 2) * kv, D]: queries, keys, values of the pass */
    void *out;            /* [T, kv * G * D], float32, or bfloat16 if `bfloat16` is set */
    const int64_t *place; /* [news, 2]: slot and row of each new key */
    const int64_t *unit;  /* [units, 2]: chunk, and which of its blocks */
    const Chunk *chunk;
    const Sight *sight; /* of every row */
    const int64_t *path;
    float *part; /* [., D]: per chunk, block, head and query row the weighted values */
    float *tops; /* [., 2]: likewise the largest score, and the sum of weights */
    const Choice *choice;
    float scale; /* multiplies queries; scores are powers of two */
    float cap;   /* of these scores, or 0 */
} Pass;

/* A vector of pairs, the even one in the lower half of each lane, times one pair. */
INLINE vec dot(vec sum, ivec pairs, const bf16 *pair) {
#ifdef DOTS
    int32_t both;
    memcpy(&both, pair, sizeof both);
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(both));
#else
    sum = fused((vec)(pairs & (int32_t)0xffff0000), all(widened(pair[1])), sum);
    return fused((vec)(pairs << 16), all(widened(pair[0])), sum);
#endif
}

/* LANES numbers of two rows in pairs; without `odd` it counts as zeros. */
INLINE ivec pair_lanes(const bf16 *even, const bf16 *odd) {
    const ivec lower = __builtin_convertvector(*(const hvec *)even, ivec);
    if (odd == NULL) return lower;
    return lower | (__builtin_convertvector(*(const hvec *)odd, ivec) << 16);
}

/* Two vectors of them. With DOTS in the order in which it takes least: of 32 numbers the first vector has
   0 to 3, 8 to 11, 16 to 19 and 24 to 27, the second one those between. */
INLINE void pair_two(const bf16 *even, const bf16 *odd, ivec *pairs) {
#ifdef DOTS
    const __m512i a = _mm512_loadu_si512(even), b = odd ? _mm512_loadu_si512(odd) : _mm512_setzero_si512();
    pairs[0] = (ivec)_mm512_unpacklo_epi16(a, b);
    pairs[1] = (ivec)_mm512_unpackhi_epi16(a, b);
#else
    for (int n = 0; n < 2; n++) pairs[n] = pair_lanes(even + n * LANES, odd ? odd + n * LANES : NULL);
#endif
}
INLINE void pair_tile(const bf16 *even, const bf16 *odd, ivec *pairs) {
    for (int n = 0; n < WIDE; n += 2) pair_two(even + n * LANES, odd ? odd + n * LANES : NULL, pairs + n);
}

/* Store what comes of two vectors of a tile of pairs, in order. */
INLINE void order_pair(float *to, const vec *sum) {
#ifdef DOTS
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    store(to, (vec)_mm512_permutex2var_ps((__m512)sum[0], low, (__m512)sum[1]));
    store(to + LANES, (vec)_mm512_permutex2var_ps((__m512)sum[0], high, (__m512)sum[1]));
#else
    for (int n = 0; n < 2; n++) store(to + n * LANES, sum[n]);
#endif
}
INLINE void store_tile(float *to, const vec *sum) {
    for (int n = 0; n < WIDE; n += 2) order_pair(to + n * LANES, sum + n);
}

/* Where the keys of a head have the first coordinate of a row; the next one is `tile` numbers behind. */
INLINE int64_t spot(int64_t row, int64_t tile, int64_t width) { return row / tile * tile * width + row % tile; }

INLINE int64_t clip(int64_t x) { return x < 0 ? 0 : x > BLOCK ? BLOCK : x; }

INLINE vec larger(vec a, vec b) {
    ivec which = a > b;
    return (vec)(((ivec)a & which) | ((ivec)b & ~which));
}

/* Scores of `tall` query rows with TILE neighbouring positions. Meanwhile the values of these
   positions are asked for, if `values` is given. `which` names the coordinates of keys that there
   are queries for; without it they are all there. */
INLINE void score(const int tall, const int half, Row q, int64_t width, Row key, int64_t tile,
                  const int32_t *which, float *out, const char *values) {
    enum { wide = WIDE };
    const int step = half ? 2 : 1;
    vec sum[TALL][WIDE];
    EACH_ROW(m) EACH_VEC(n) sum[m][n] = (vec){0};
    for (int64_t d = 0; d < width; d += step) {
        if (values)
            for (int i = 0; i < 4 * TILE; i += 64)
                __builtin_prefetch(values + d / step * 4 * TILE + i, 0, 2);
        if (half) {
            const bf16 *even = (const bf16 *)key + (which ? which[d] : d) * tile;
            const bf16 *odd = which ? (const bf16 *)key + which[d + 1] * tile : even + tile;
            ivec pairs[WIDE];
            pair_tile(even, odd, pairs);
            EACH_ROW(m)
            EACH_VEC(n) sum[m][n] = dot(sum[m][n], pairs[n], (const bf16 *)q + m * width + d);
        } else {
            vec k[WIDE];
            const float *from = (const float *)key + (which ? which[d] : d) * tile;
            EACH_VEC(n) k[n] = load(from + n * LANES);
            EACH_ROW(m) EACH_VEC(n) sum[m][n] = fused(k[n], all(((const float *)q)[m * width + d]), sum[m][n]);
        }
    }
    EACH_ROW(m) {
        if (half) store_tile(out + m * BLOCK, sum[m]);
        else EACH_VEC(n) store(out + m * BLOCK + n * LANES, sum[m][n]);
    }
}

/* Values of the positions from `first`, which is even, to `last`, weighted for `tall` query rows:
   `wide` vectors of neighbouring coordinates. */
INLINE void mix(const int tall, const int wide, const int half, Row weight, int64_t first,
                int64_t last, Row value, int64_t width, float *out) {
    vec sum[TALL][WIDE];
    EACH_ROW(m) EACH_VEC(n) sum[m][n] = (vec){0};
    for (int64_t i = first; i < last; i += half ? 2 : 1) {
        if (half) {
            const bf16 *even = (const bf16 *)value + i * width;
            const bf16 *odd = i + 1 < last ? even + width : NULL;
            ivec pairs[WIDE];
            if (wide == WIDE) pair_tile(even, odd, pairs);
            else pairs[0] = pair_lanes(even, odd);
            EACH_ROW(m)
            EACH_VEC(n) sum[m][n] = dot(sum[m][n], pairs[n], (const bf16 *)weight + m * BLOCK + i);
        } else {
            vec v[WIDE];
            EACH_VEC(n) v[n] = load((const float *)value + i * width + n * LANES);
            EACH_ROW(m)
            EACH_VEC(n) sum[m][n] = fused(v[n], all(((const float *)weight)[m * BLOCK + i]), sum[m][n]);
        }
    }
    EACH_ROW(m) {
        if (half && wide == WIDE) store_tile(out + m * width, sum[m]);
        else EACH_VEC(n) store(out + m * width + n * LANES, sum[m][n]);
    }
}

/* Scores between -cap and cap: cap * tanh(score / cap). */
INLINE void soften(float *row, float cap) {
    for (int i = 0; i < BLOCK; i += LANES) {
        const vec x = load(row + i), down = (vec)((ivec)x | (int32_t)0x80000000); /* -|x| */
        const vec e = power(down * (2.885390f / cap)), y = cap * (1 - e) / (1 + e);
        store(row + i, (vec)((ivec)y | ((ivec)x & (int32_t)0x80000000)));
    }
}

/* Have no columns seen but those from `first` to `last`. */
INLINE void hide(float *row, int64_t first, int64_t last) {
    if (first <= 0 && last >= BLOCK) return;
    float place[LANES];
    for (int n = 0; n < LANES; n++) place[n] = (float)n;
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        const vec at = load(place) + (float)i;
        const ivec seen = (at >= all((float)first)) & (at < all((float)last));
        store(row + i, (vec)(((ivec)load(row + i) & seen) | ((ivec)all(-INFINITY) & ~seen)));
    }
}

/* The largest score of a block. */
INLINE float top_score(const float *row) {
    vec top = all(-INFINITY);
    for (int i = 0; i < BLOCK; i += LANES) top = larger(load(row + i), top);
    return lanes_top(top);
}

/* Turn the scores of one block, of which `most` is the largest, into weights, in their place, or if `half` is given
   there, in bfloat16, each 32 of them `step` behind the last; gives the sum of weights. */
INLINE float weigh(float *row, float most, bf16 *half, int64_t step) {
    vec sum = {0};
    /* Where nothing is seen, all weights are 0 whatever is taken off. */
    vec off = all(most == -INFINITY ? 0.0f : most);
    for (int i = 0; i < BLOCK; i += 2 * LANES) {
        vec x[2] = {power(load(row + i) - off), power(load(row + i + LANES) - off)};
        if (half) round_two(half + i / TILE_INPUTS * step + i % TILE_INPUTS, x);
        else store(row + i, x[0]), store(row + i + LANES, x[1]);
        sum += x[0], sum += x[1];
    }
    return lanes_sum(sum);
}

/* Copy `count` numbers. */
INLINE void copy_run(const int half, Row from, void *to, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        if (half) *(hvec *)((bf16 *)to + i) = *(const hvec *)((const bf16 *)from + i);
        else store((float *)to + i, load((const float *)from + i));
    }
    for (; i < count; i++) {
        if (half) ((bf16 *)to)[i] = ((const bf16 *)from)[i];
        else ((float *)to)[i] = ((const float *)from)[i];
    }
}

/* Keys and values of the rows that a list names, at most BLOCK, side by side. Coordinate by
   coordinate and in rising order: so each cache line is fetched once, and ahead. */
enum { SOON = 8 };
INLINE void gather(const int half, const int32_t *list, int64_t count, Row key, Row value,
                   int64_t tile, int64_t width, char *keys, char *values) {
    int64_t run[BLOCK + 1], runs = 0;
    for (int64_t i = 0; i < count; i++)
        if (i == 0 || list[i] != list[i - 1] + 1 || list[i] % tile == 0) run[runs++] = i;
    run[runs] = count;
    int64_t from[BLOCK];
    for (int64_t i = 0; i < runs; i++) from[i] = spot(list[run[i]], tile, width);
    const int64_t row = (half ? 2 : 4) * width;
    for (int64_t d = 0; d < width; d++)
        for (int64_t i = 0; i < runs; i++) {
            __builtin_prefetch(past(key, (d + SOON) * tile + from[i], half));
            if (64 * d < (run[i + 1] - run[i]) * row)
                __builtin_prefetch((const char *)past(value, list[run[i]] * width, half) + 64 * d);
            copy_run(half, past(key, d * tile + from[i], half),
                     (void *)past(keys, d * BLOCK + run[i], half), run[i + 1] - run[i]);
        }
    for (int64_t i = 0; i < runs; i++)
        copy_run(half, past(value, list[run[i]] * width, half),
                 (void *)past(values, run[i] * width, half), (run[i + 1] - run[i]) * width);
}

/* Scores of all query rows with TILE neighbouring positions; out [M, BLOCK]. */
INLINE void score_tile(const int half, int64_t M, Row q, int64_t D, Row key, int64_t tile,
                       const int32_t *which, float *out, const char *values) {
    for (int64_t m = 0; m < M; m += TALL) {
#define PRODUCT(tall)                                                                             \
    score(tall, half, past(q, m * D, half), D, key, tile, which, out + m * BLOCK, m ? NULL : values)
        BY_HEIGHT(M - m, PRODUCT)
#undef PRODUCT
    }
}

/* ---- By matrix units ---- */

INLINE int by_units(const Pass *p, const int half) { return half && p->width % TILE_INPUTS == 0 && has_tiles(); }

/* Results of such pairs in order again. */
INLINE void order_rows(float *out, int64_t stride, int64_t rows) {
    for (int64_t m = 0; m < rows; m++, out += stride) {
        const vec pair[2] = {load(out), load(out + LANES)};
        order_pair(out, pair);
    }
}
enum { BESIDE = 2 * TILE_INPUTS }; /* numbers of two vectors of pairs */

/* A line of pairs. `many` rows, more than TILED, find it in order; of few rows what comes of it is put in order. */
INLINE void pair_line(const bf16 *even, const bf16 *odd, const int many, bf16 *to) {
    pair_two(even, odd, (ivec *)to);
    if (many) order_rows((float *)to, 0, 1);
}

/* M rows, which lie in tiles, times `stop` inputs of pairs, TILED rows at a time. Tiles are cut for few rows. */
INLINE void sum_pairs(const int many, int M, const bf16 *x, int64_t inputs, int64_t stop, const bf16 *pairs,
                      float *out, int64_t stride) {
    for (int m = 0; m < M; m += TILED) {
        const int rows = M - m < TILED ? M - m : TILED;
        const Sums to = {out + m * stride, stride * (int64_t)sizeof *out, TILE_LINE};
        if (many && (m == 0 || rows < TILED)) cut_tiles(rows);
        tile_sums(1, (const char *)(x + m * inputs), rows, inputs, 0, stop, (const char *)pairs, (Share){0}, to, to);
    }
    if (!many) order_rows(out, stride, M);
}

/* Scores of M query rows, which lie in tiles, with TILE neighbouring positions; out [M, BLOCK]. Values are asked for
   as in `score`. */
INLINE void score_pairs(const int many, int M, const bf16 *q, int64_t D, const bf16 *key, int64_t tile, float *out,
                        const char *values) {
    bf16 pairs[WIDEST / 2 * BESIDE] __attribute__((aligned(64)));
    for (int64_t i = 0; i < TILE; i += TILE_INPUTS) {
        for (int64_t d = 0; d < D; d += 2) {
            for (int n = 0; values && n < 4 * TILE_INPUTS; n += CACHE_LINE) __builtin_prefetch(values + n, 0, 2);
            if (values) values += 4 * TILE_INPUTS;
            pair_line(key + d * tile + i, key + (d + 1) * tile + i, many, pairs + d / 2 * BESIDE);
        }
        sum_pairs(many, M, q, D, D, pairs, out + i, BLOCK);
    }
}
static __attribute__((noinline)) void score_units(int M, const bf16 *q, int64_t D, const bf16 *key, int64_t tile,
                                                  float *out, const char *values) {
    if (M > TILED) score_pairs(1, M, q, D, key, tile, out, values);
    else score_pairs(0, M, q, D, key, tile, out, values);
}

/* Values of the positions from `first` to `last`, weighted for M query rows. Weights lie in tiles; those of other
   positions are 0 for all rows. out [M, D] */
INLINE void mix_pairs(const int many, int M, const bf16 *weight, int64_t first, int64_t last, const bf16 *value,
                      int64_t D, float *out) {
    static const bf16 none[TILE_INPUTS];
    const int64_t stop = (last + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
    bf16 pairs[BLOCK / 2 * BESIDE] __attribute__((aligned(64)));
    memset(pairs, 0, first / 2 * BESIDE * sizeof *pairs);
    for (int64_t d = 0; d < D; d += TILE_INPUTS) {
        for (int64_t i = first; i < stop; i += 2)
            pair_line(i < last ? value + i * D + d : none, i + 1 < last ? value + (i + 1) * D + d : NULL, many,
                      pairs + i / 2 * BESIDE);
        sum_pairs(many, M, weight, BLOCK, stop, pairs, out + d, D);
    }
}
static __attribute__((noinline)) void mix_units(int M, const bf16 *weight, int64_t first, int64_t last,
                                                const bf16 *value, int64_t D, float *out) {
    if (M > TILED) mix_pairs(1, M, weight, first, last, value, D, out);
    else mix_pairs(0, M, weight, first, last, value, D, out);
}

/* Add values of the positions from `from` to `stop`, of which those from `dense` on lie where `path` says, weighted
   for query row `m` of M: as the units would add them. */
INLINE void mix_path(int64_t m, int64_t M, const bf16 *weight, int64_t from, int64_t stop, int64_t dense,
                     const int64_t *path, int64_t low, const bf16 *value, int64_t D, float *out) {
    for (int64_t at = from; at < stop; at += TILE_INPUTS) {
        const bf16 *own = weight + tile_at(m, M, BLOCK, at / TILE_INPUTS);
        const int64_t end = stop - at < TILE_INPUTS ? stop - at : TILE_INPUTS;
        for (int64_t d = 0; d < D; d += LANES) {
            vec sum[2] = {{0}, {0}};
            for (int64_t i = 0; i < end; i++) {
                const int64_t row = at + i < dense ? at + i : path[at + i] - low;
                sum[i % 2] = fused(load_half(value + row * D + d), all(widened(own[i])), sum[i % 2]);
            }
            store(out + d, load(out + d) + (sum[0] + sum[1]));
        }
    }
}

/* Scores by either. */
INLINE void score_rows(const Pass *p, const int half, int64_t M, Row q, Row key, int64_t tile, float *out,
                       const char *values) {
    if (by_units(p, half)) score_units((int)M, q, p->width, key, tile, out, values);
    else score_tile(half, M, q, p->width, key, tile, NULL, out, values);
}

/* Scores of the positions of a block that rows of a chunk see by their paths. Nodes of a tree lie close together:
   all rows are scored with all of them, and each takes those of its path. */
INLINE void score_paths(const Pass *p, const Chunk *c, int64_t low, const int half, Row q, Row key, float *out) {
    const int64_t G = p->group, D = p->width, dense = p->sight[c->row].dense - low;
    int64_t lowest = INT64_MAX, highest = -1;
    for (int64_t r = 0; r < c->rows; r++) {
        const Sight *sight = p->sight + c->row + r;
        const int64_t *path = p->path + sight->path - dense;
        for (int64_t i = clip(dense); i < clip(dense + sight->length); i++) {
            if (path[i] < lowest) lowest = path[i];
            if (path[i] > highest) highest = path[i];
        }
    }
    float near[MOST * BLOCK] __attribute__((aligned(64)));
    for (int64_t at = lowest / TILE * TILE; at <= highest; at += TILE) {
        score_rows(p, half, c->rows * G, q, past(key, spot(at, p->tile, D), half), p->tile, near, NULL);
        for (int64_t m = 0; m < c->rows * G; m++) {
            const Sight *sight = p->sight + c->row + m / G;
            const int64_t *path = p->path + sight->path - dense;
            for (int64_t i = clip(dense); i < clip(dense + sight->length); i++)
                if (path[i] >= at && path[i] < at + TILE) out[m * BLOCK + i] = near[m * BLOCK + path[i] - at];
        }
    }
}

/* Queries of a chunk's rows for one head of keys, as products want them; q [MOST, WIDEST] */
INLINE void scale_queries(const Pass *p, const Chunk *c, int64_t head, const int half, const int units, void *q) {
    const int64_t G = p->group, D = p->width, M = c->rows * G, heads = (G + 2) * p->kv;
    const float scale = p->scale;
    for (int64_t r = 0; r < c->rows; r++) {
        const float *from = p->head + ((c->row + r) * heads + head * G) * D;
        for (int64_t m = r * G; m < (r + 1) * G; m++)
            for (int64_t d = 0; d < D; d += LANES, from += LANES) {
                const int64_t to = units ? tile_at(m, M, D, d / TILE_INPUTS) + d % TILE_INPUTS : m * D + d;
                for (int n = 0; n < LANES; n++) {
                    if (half) ((bf16 *)q)[to + n] = rounded(from[n] * scale);
                    else ((float *)q)[to + n] = from[n] * scale;
                }
            }
    }
}

/* One block of positions or of listed rows, for the rows of a chunk and one head of keys.
   out: the weighted values of each query row; tops: its largest score and the sum of weights. */
INLINE void attend_block(const Pass *p, const Chunk *c, int64_t block, int64_t layer, int64_t head, const int half,
                         const int units, Row keys, Row values, Row q, float *out, float *tops) {
    const int64_t G = p->group, D = p->width, M = c->rows * G;
    const int64_t lists = (c->listed + BLOCK - 1) / BLOCK;
    const int64_t low = block < lists ? 0 : (c->first + block - lists) * BLOCK;
    const int64_t C = p->capacity;
    int64_t P = p->tile, listed = 0;
    const int64_t slot = block >= lists && low + BLOCK <= c->same ? c->twin : c->slot;
    Row key = past(keys, slot * p->key_stride + head * D * C, half);
    Row value = past(values, slot * p->value_stride + (head * C + low) * D, half);
    char own_keys[4 * WIDEST * BLOCK] __attribute__((aligned(64)));
    char own_values[4 * WIDEST * BLOCK] __attribute__((aligned(64)));
    if (block < lists) {
        const int32_t *list = (const int32_t *)c->list + layer * c->list_layer + head * c->list_head;
        listed = c->listed - block * BLOCK < BLOCK ? c->listed - block * BLOCK : BLOCK;
        char *to_keys = own_keys, *to_values = own_values;
        int32_t *copied = NULL;
        if (c->copies) {
            const int64_t one = (layer * p->kv + head) * lists + block;
            to_keys = (char *)past((Row)c->copies, 2 * one * D * BLOCK, half);
            to_values = (char *)past(to_keys, D * BLOCK, half);
            copied = (int32_t *)c->copied + one;
        }
        if (copied == NULL || !__atomic_load_n(copied, __ATOMIC_ACQUIRE)) {
            gather(half, list + block * BLOCK, listed, key, value, P, D, to_keys, to_values);
            if (copied) __atomic_store_n(copied, 1, __ATOMIC_RELEASE);
        }
        key = to_keys, value = to_values, P = BLOCK;
    }
    float full_weight[MOST * BLOCK] __attribute__((aligned(64)));
    bf16 half_weight[MOST * BLOCK] __attribute__((aligned(64)));
    Row weight = half ? (Row)half_weight : full_weight;

    /* Columns that some row sees at the place of their position: those from `first` to `last`. */
    int64_t first = listed ? 0 : BLOCK, last = listed;
    for (int64_t r = 0; r < c->rows && !listed; r++) { /* all rows see all of those listed */
        const Sight *sight = p->sight + c->row + r;
        if (clip(sight->low - low) < first) first = clip(sight->low - low);
        if (clip(sight->dense - low) > last) last = clip(sight->dense - low);
    }
    first = first / TILE * TILE;
    /* All keys are asked for at once: computing is no slower then, and 64 sequences of 300 take 0.86 of a pass. */
    for (int64_t i = first; i < last && !listed; i += TILE) {
        const char *from = past(key, spot(low + i, P, D), half);
        for (const char *line = from; line < (const char *)past(from, D * TILE, half); line += 64)
            __builtin_prefetch(line, 0, 2);
    }
    for (int64_t i = first; i < last; i += TILE)
        score_rows(p, half, M, q, past(key, spot(low + i, P, D), half), P, full_weight + i, past(value, i * D, half));
    /* Rows that see more by their paths all end at the same `dense`. */
    const int by_path = !listed && p->sight[c->row].length > 0;
    if (by_path) score_paths(p, c, low, half, q, key, full_weight);
    for (int64_t m = 0; m < M; m++) {
        const Sight *sight = p->sight + c->row + m / G;
        const int64_t seen = clip(sight->low - low), stop = clip(sight->dense - low + sight->length);
        float *row = full_weight + m * BLOCK;
        if (p->cap > 0) soften(row, p->cap);
        hide(row, listed ? 0 : seen, listed ? listed : stop);
        tops[2 * m] = top_score(row);
    }
    /* In a loop of its own, for the processor would wait for each row's largest score: 64 sequences took 1.02. */
    for (int64_t m = 0; m < M; m++) {
        const int64_t begin = units ? tile_at(m, M, BLOCK, 0) : m * BLOCK;
        const int64_t step = units ? tile_at(m, M, BLOCK, 1) - begin : TILE_INPUTS;
        tops[2 * m + 1] = weigh(full_weight + m * BLOCK, tops[2 * m], half ? half_weight + begin : NULL, step);
    }
    /* What is seen by paths comes behind here, with those before it that are summed together with it. */
    const int together = units ? TILE_INPUTS : half ? 2 : 1;
    if (by_path) last = last / together * together;
    if (units) mix_units((int)M, half_weight, first, last, value, D, out);
    for (int64_t m = 0; !units && m < M; m += TALL) {
        int64_t d = 0;
        for (; d + TILE <= D; d += TILE) {
#define PRODUCT(tall)                                                                             \
    mix(tall, WIDE, half, past(weight, m * BLOCK, half), first, last, past(value, d, half), D,    \
        out + m * D + d)
            BY_HEIGHT(M - m, PRODUCT)
#undef PRODUCT
        }
        for (; d < D; d += LANES) {
#define PRODUCT(tall)                                                                             \
    mix(tall, 1, half, past(weight, m * BLOCK, half), first, last, past(value, d, half), D,       \
        out + m * D + d)
            BY_HEIGHT(M - m, PRODUCT)
#undef PRODUCT
        }
    }
    for (int64_t m = 0; by_path && m < M; m++) {
        const Sight *sight = p->sight + c->row + m / G;
        const int64_t dense = sight->dense - low, stop = clip(dense + sight->length);
        const int64_t *path = p->path + sight->path - dense;
        if (units) {
            mix_path(m, M, half_weight, last, stop, dense, path, low, value, D, out + m * D);
            continue;
        }
        for (int64_t i = half ? clip(dense) / 2 * 2 : clip(dense); i < stop; i += half ? 2 : 1) {
            Row even = past(value, (i < dense ? i : path[i] - low) * D, half);
            Row odd = i + 1 < stop ? past(value, (path[i + 1] - low) * D, half) : NULL;
            for (int64_t d = 0; d < D; d += LANES) {
                float *to = out + m * D + d;
                if (half) {
                    const bf16 *next = odd ? (const bf16 *)odd + d : NULL;
                    const ivec pairs = pair_lanes((const bf16 *)even + d, next);
                    store(to, dot(load(to), pairs, half_weight + m * BLOCK + i));
                } else {
                    const vec v = load((const float *)even + d);
                    store(to, fused(v, all(full_weight[m * BLOCK + i]), load(to)));
                }
            }
        }
    }
}

/* Add weighted values of one more block to those of a query row. */
static void add_block(int64_t D, float *sum, float *tops, const float *more, const float *next) {
    if (next[0] == -INFINITY) return;
    const float both = next[0] > tops[0] ? next[0] : tops[0];
    const vec old = power(all(tops[0] - both)), new = power(all(next[0] - both));
    tops[1] = fmaf(next[1], new[0], tops[1] * old[0]);
    for (int64_t d = 0; d < D; d += LANES) store(sum + d, fused(load(more + d), new, load(sum + d) * old));
    tops[0] = both;
}

/* Write what query row `m` of a chunk comes to. */
static void give_row(const Pass *p, const Chunk *c, int64_t head, int64_t m, const float *sum, float total) {
    const int64_t D = p->width, row = c->row + m / p->group;
    const int64_t to = ((row * p->kv + head) * p->group + m % p->group) * D;
    for (int64_t d = 0; d < D; d++) {
        if (p->bfloat16) ((bf16 *)p->out)[to + d] = rounded(sum[d] / total);
        else ((float *)p->out)[to + d] = sum[d] / total;
    }
}

/* Merge the blocks of a chunk's rows for one head of keys. */
static void merge(const Pass *p, const Chunk *c, int64_t head) {
    const int64_t D = p->width, M = c->rows * p->group;
    for (int64_t m = 0; m < M; m++) {
        int64_t at = c->part + head * M + m;
        float sum[WIDEST], tops[] = {p->tops[2 * at], p->tops[2 * at + 1]};
        memcpy(sum, p->part + at * D, D * sizeof *sum);
        for (int64_t block = 1; block < c->blocks; block++) {
            at += p->kv * M;
            add_block(D, sum, tops, p->part + at * D, p->tops + 2 * at);
        }
        give_row(p, c, head, m, sum, tops[1]);
    }
}

/* All blocks that the rows of a chunk see, or one whose part is merged later. */
INLINE void attend_unit(const Pass *p, const Chunk *c, int64_t block, int64_t layer, int64_t head, const int half,
                        Row keys, Row values) {
    const int64_t D = p->width, M = c->rows * p->group;
    const int units = by_units(p, half);
    char q[MOST * WIDEST * sizeof(float)] __attribute__((aligned(64)));
    float sum[2][MOST * WIDEST] __attribute__((aligned(64))), tops[2][2 * MOST];
    scale_queries(p, c, head, half, units, q);
    if (units && M <= TILED) cut_tiles((int)M);
    for (int64_t i = p->whole ? 0 : block, stop = p->whole ? c->blocks : block + 1; i < stop; i++) {
        const int64_t at = c->part + (i * p->kv + head) * M;
        float *out = p->whole ? sum[i > 0] : p->part + at * D, *top = p->whole ? tops[i > 0] : p->tops + 2 * at;
        attend_block(p, c, i, layer, head, half, units, keys, values, q, out, top);
        for (int64_t m = 0; m < M && p->whole && i; m++)
            add_block(D, sum[0] + m * D, tops[0] + 2 * m, sum[1] + m * D, tops[1] + 2 * m);
    }
    if (units) tile_end();
    for (int64_t m = 0; m < M && p->whole; m++) give_row(p, c, head, m, sum[0] + m * D, tops[0][2 * m + 1]);
}

/* Store the new keys and values of some rows: keys coordinate by coordinate, so that rows that follow one another
   share lines. */
enum { KEPT = 8 };
INLINE void keep(const Pass *p, int64_t first, int64_t count, const int half, void *keys, void *values) {
    const int64_t D = p->width, C = p->capacity, stride = (p->group + 2) * p->kv * D;
    const float *new = p->head + first * stride + p->group * p->kv * D;
    const int64_t *place = p->place + 2 * first;
    int64_t key_at[KEPT];
    for (int64_t r = 0; r < count; r++)
        key_at[r] = place[2 * r] * p->key_stride + spot(place[2 * r + 1], p->tile, D);
    for (int64_t i = 0; i < p->kv * D; i += LANES) {
        float full_key[KEPT][LANES];
        bf16 half_key[KEPT][LANES];
        for (int64_t r = 0; r < count; r++) {
            const vec key = load(new + r * stride + i), value = load(new + r * stride + p->kv * D + i);
            const int64_t to = place[2 * r] * p->value_stride + (i / D * C + place[2 * r + 1]) * D + i % D;
            if (half) store_half(half_key[r], key), store_half((bf16 *)values + to, value);
            else store(full_key[r], key), store((float *)values + to, value);
        }
        for (int64_t n = 0; n < LANES; n++)
            for (int64_t r = 0; r < count; r++) {
                const int64_t to = key_at[r] + i / D * C * D + (i % D + n) * p->tile;
                if (half) ((bf16 *)keys)[to] = half_key[r][n];
                else ((float *)keys)[to] = full_key[r][n];
            }
    }
}

/* Pieces of the three tasks of a layer: storing, blocks, merging. */
static int64_t keep_pieces(const Pass *p) { return pieces_of(p->news, (p->group + 2) * p->kv * p->width); }
static int64_t block_pieces(const Pass *p) { return (p->whole ? p->chunks : p->units) * p->kv; }
static int64_t merge_pieces(const Pass *p) {
    if (p->whole) return 0;
    return p->parts * p->width <= 2 * GRAIN ? p->chunks > 0 : p->chunks * p->kv;
}

static void keep_piece(const Pass *p, int64_t piece, void *keys, void *values) {
    int64_t row, stop;
    part_of(p->news, keep_pieces(p), piece, &row, &stop);
    for (int64_t count; row < stop; row += count) {
        count = stop - row < KEPT ? stop - row : KEPT;
        if (p->half) keep(p, row, count, 1, keys, values);
        else keep(p, row, count, 0, keys, values);
    }
}

static void block_piece(const Pass *p, int64_t piece, int64_t layer, Row keys, Row values) {
    const int64_t count = block_pieces(p) / p->kv, by_head = p->whole == BY_HEAD;
    const int64_t head = by_head ? piece / count : piece % p->kv, place = by_head ? piece % count : piece / p->kv;
    const int64_t *unit = p->unit + 2 * place;
    const Chunk *c = p->chunk + (p->whole ? place : unit[0]);
    if (p->half) attend_unit(p, c, unit[1], layer, head, 1, keys, values);
    else attend_unit(p, c, unit[1], layer, head, 0, keys, values);
}

static void merge_piece(const Pass *p, int64_t piece) {
    int64_t one, stop;
    part_of(p->chunks * p->kv, merge_pieces(p), piece, &one, &stop);
    for (; one < stop; one++) merge(p, p->chunk + one / p->kv, one % p->kv);
}
