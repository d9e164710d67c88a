/* Products of rows with matrices whose weights stay as they are stored, for CPUs.

   Weights are widened in registers, once for all rows of a tile. Every output of every row is a sum
   over inputs in one fixed order, so a row's results do not depend on the rows beside it, on the
   number of threads or on how the work is cut, bit for bit.

   Codes. Weights of 4 to 8 bits come in blocks of SPAN inputs, which share a scale and perhaps a
   least value. A row becomes integers of 16 bits with a scale per block, once per product: each
   number is off by about 2^-16 of the largest in its block. The sum over a block is then an
   integer, which is exact: a code is at most 2^8, a number 2^15, a block has 2^5 of them. Scale and
   least value enter once per block, in float32: d * dx * sum(q x) + m * sum(x).

   Numbers. Weights in bfloat16 and float32 are multiplied in float32; where the processor has an
   instruction for pairs of bfloat16, rows are rounded to it; where it has matrix units, these multiply
   such pairs for all numbers of rows.

   Layout. GROUP outputs lie together, block by block, and in a block pair of inputs by pair of
   inputs; of numbers TWO_GROUPS do. Of 64 bytes, each 4 belong to one output: the even input of
   a pair is in the lower half, the odd one in the upper. Such a half holds four codes of 4 bits,
   of as many pairs; of 8 bits it holds two, of the first and third of four pairs or of the
   second and fourth. So the 4 bytes of an output, or their upper or lower 4 bits, are codes of
   the same inputs whatever their width. A fifth and sixth bit lie apart, in the byte of the
   other four.

   matrix   `weights` in this layout (outpace_store makes it), `bias` or NULL
   operands rows as the products of a matrix want them; `product_room` says how many bytes
   piece    some groups of outputs for all rows: any thread may take any piece */

#pragma once

#include "lanes.h"
#include "tiles.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { GROUP = 16, TWO_GROUPS = 2 * GROUP, SPAN = 32, PAIRS = SPAN / 2, VECS = GROUP / LANES };
/* products.py has the same numbers. */
enum { F32, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, KINDS };
#define EACH_CODED(KIND)                                                                          \
    KIND(Q4_0); KIND(Q4_1); KIND(Q5_0); KIND(Q5_1); KIND(Q8_0); KIND(Q4_K); KIND(Q5_K); KIND(Q6_K)

typedef struct {
    int64_t kind, outputs, inputs;
    const void *weights;
    const float *bias; /* [outputs], filled up to whole groups, or NULL */
} Matrix;

typedef int16_t svec __attribute__((vector_size(BYTES), aligned(2), may_alias));

/* Compilers would keep products for later, more than there are registers, or read an operand from
   memory once per row. */
#if defined(__aarch64__)
#define IN_REGISTER(x) ({ __asm__("" : "+w"(x)); x; })
#else
#define IN_REGISTER(x) ({ __asm__("" : "+v"(x)); x; })
#endif
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

/* ---- What the instructions of a processor are needed for ---- */

/* Sums of products of integers, one per output. */
#if defined(__aarch64__)
typedef struct {
    int32x4_t low, high; /* each sum in two parts, beside each other */
} isum;
INLINE isum add_pair(isum sum, svec weights, const char *pair) {
    const int16x4_t x = vreinterpret_s16_s32(vld1_dup_s32((const int32_t *)pair));
    const int16x8_t w = (int16x8_t)weights;
    sum.low = vmlal_s16(sum.low, vget_low_s16(w), x);
    sum.high = vmlal_s16(sum.high, vget_high_s16(w), x);
    return sum;
}
INLINE vec total(isum sum) {
    return __builtin_convertvector((ivec)vpaddq_s32(sum.low, sum.high), vec);
}
#else
typedef ivec isum;
INLINE isum add_pair(isum sum, svec weights, const char *pair) {
    int32_t both;
    memcpy(&both, pair, sizeof both);
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(both));
#elif defined(__AVX512BW__)
    sum += (ivec)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(both));
#elif defined(__AVXVNNI__)
    return (ivec)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(both));
#else
    sum += (ivec)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(both));
#endif
    return IN_REGISTER(sum);
}
INLINE vec total(isum sum) { return __builtin_convertvector(sum, vec); }
#endif

/* Numbers of 16 bits as integers, and those of float16 as float32. */
INLINE ivec load_words(const uint16_t *from) {
    return __builtin_convertvector(*(const hvec *)from, ivec);
}
INLINE vec load_float16(const uint16_t *from) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
    const ivec bits = load_words(from); /* of numbers, not of infinities */
    const vec size = (vec)((bits & 0x7fff) << 13) * 0x1p112f;
    return (vec)((ivec)size | (bits & 0x8000) << 16);
#endif
}

/* Whether the first cache is no place for lines on their way from memory. On Intel's processors few can be; passes
   over one row took 2.7 times as long (bfloat16; three times as stored). On AMD's up to 0.13 of it is gained. */
static int small_first;
#if defined(__x86_64__)
static __attribute__((constructor)) void know_processor(void) {
    __builtin_cpu_init();
    small_first = __builtin_cpu_is("intel");
}
#endif

/* Ask memory for a line that is read once, for the first cache if `near`. */
INLINE void fetch(const char *line, const int near) {
    if (near && !small_first) __builtin_prefetch(line, 0, 0);
    else __builtin_prefetch(line, 0, 2);
}

/* Where sums of pairs of bfloat16 are one instruction, rows are bfloat16 too. */
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
enum { HALVES = 1 };
INLINE vec add_halves(vec sum, ivec weights, const bf16 *pair) {
    int32_t both;
    memcpy(&both, pair, sizeof both);
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(both));
}
#else
enum { HALVES = 0 };
INLINE vec add_halves(vec sum, ivec weights, const bf16 *pair) {
    (void)weights, (void)pair;
    return sum;
}
#endif

/* ---- Layout ---- */

INLINE int is_coded(const int kind) { return kind > BF16; }
INLINE int code_bits(const int kind) {
    return kind == Q8_0 ? 8 : kind == Q6_K ? 6 : kind == Q5_0 || kind == Q5_1 || kind == Q5_K ? 5 : 4;
}
INLINE int has_least(const int kind) {
    return kind == Q4_1 || kind == Q5_1 || kind == Q4_K || kind == Q5_K;
}
/* Bytes of a group: codes of a block, the block, what stands before `PER` blocks. */
INLINE int code_bytes(const int kind) { return code_bits(kind) * GROUP * SPAN / 8; }
INLINE int in_two_levels(const int kind) { return kind >= Q4_K; }
INLINE int block_bytes(const int kind) {
    return code_bytes(kind) + 2 * GROUP * (kind == Q4_1 || kind == Q5_1 ? 2 : 1);
}
INLINE int head_bytes(const int kind) {
    return in_two_levels(kind) ? 2 * GROUP * (has_least(kind) ? 2 : 1) : 0;
}
enum { PER = 8 };
INLINE int64_t block_at(const int kind, int64_t block) {
    return block * block_bytes(kind) + (block / PER + 1) * head_bytes(kind);
}
INLINE int64_t blocks_of(const Matrix *m) { return (m->inputs + SPAN - 1) / SPAN; }
INLINE int group_size(const int kind) { return is_coded(kind) ? GROUP : TWO_GROUPS; }
INLINE int64_t groups_of(const Matrix *m) {
    const int size = group_size((int)m->kind);
    return (m->outputs + size - 1) / size;
}
INLINE int64_t group_bytes(const int kind, int64_t inputs) {
    const int64_t blocks = (inputs + SPAN - 1) / SPAN;
    if (kind == F32) return inputs * TWO_GROUPS * 4;
    if (kind == BF16) return (inputs + 1) / 2 * TWO_GROUPS * 4;
    return blocks * block_bytes(kind) + (blocks + PER - 1) / PER * head_bytes(kind);
}

/* ---- Codes ---- */

/* Codes of four pairs: eighths `part` of a block's inputs, of LANES outputs from `v` on. */
INLINE void widen(const int kind, const char *block, const int part, const int v, svec *q) {
    typedef uint16_t uvec __attribute__((vector_size(BYTES), aligned(2), may_alias));
    const char *from = block + v * BYTES;
    if (kind == Q8_0) {
        EACH(i, 2) {
            const svec w = *(const svec *)(from + (2 * part + i) * 64);
            q[i] = (w << 8) >> 8;
            q[i + 2] = w >> 8;
        }
        return;
    }
    const uvec w = *(const uvec *)(from + part * 64);
    if (kind == Q4_0) {
        q[0] = (svec)(w << 12) >> 12;
        q[1] = (svec)(w << 8) >> 12;
        q[2] = (svec)(w << 4) >> 12;
        q[3] = (svec)w >> 12;
        return;
    }
    q[0] = (svec)(w & 15);
    q[1] = (svec)(w >> 4 & 15);
    q[2] = (svec)(w >> 8 & 15);
    q[3] = (svec)(w >> 12);
    if (code_bits(kind) == 4) return;
    /* One or two more bits of every code, pair after pair. */
    const int more = code_bits(kind) - 4;
    const uint16_t mask = more == 1 ? 16 : 48;
    const uvec h = *(const uvec *)(from + 256 + (more == 1 ? 0 : part / 2 * 64));
    EACH(t, 4) {
        const int at = t / 2 * 8 + (2 * part + t % 2) * more % 8;
        q[t] |= (svec)((at < 4 ? h << (4 - at) : h >> (at - 4)) & mask);
        if (kind == Q5_0) q[t] -= 16;
        if (kind == Q6_K) q[t] -= 32;
    }
}

/* What the blocks from a PER-th one on have in common stands before it. */
INLINE const char *head_of(const int kind, const char *panel, int64_t b) {
    return panel + block_at(kind, b / PER * PER) - head_bytes(kind);
}

/* Scales and least values of LANES outputs; `half` of a block where each has its own scale. */
INLINE vec scale_of(const int kind, const char *block, const char *head, const int v, const int half) {
    const uint16_t *own = (const uint16_t *)(block + code_bytes(kind)) + v * LANES;
    if (!in_two_levels(kind)) return load_float16(own);
    const ivec both = load_words(own);
    ivec whole = both & 255;
    if (kind == Q6_K) whole = both << (half ? 16 : 24) >> 24;
    return load_float16((const uint16_t *)head + v * LANES) * __builtin_convertvector(whole, vec);
}
INLINE vec least_of(const int kind, const char *block, const char *head, const int v) {
    const uint16_t *own = (const uint16_t *)(block + code_bytes(kind)) + v * LANES;
    if (!in_two_levels(kind)) return load_float16(own + GROUP);
    const vec whole = __builtin_convertvector(load_words(own) >> 8, vec);
    return load_float16((const uint16_t *)head + GROUP + v * LANES) * -whole;
}

/* ---- Codes as bytes ----

   Where the processor sums products of four bytes at once, codes stay bytes, and a row's integers
   are cut into an upper and a lower byte: a sum is 256 times that of the upper ones and that of the
   lower ones. Such codes count from zero; how far below it they begin enters as a least value.

   Codes of 4 bits are stored two to a byte, and such a byte is multiplied as it is. Let p and q be
   its codes, p + 16 q, and x and y the integers they belong to. With three bytes a, b and c,

       a (p + 16 q) + b 16 p + c q = p x + q y   where   a + 16 b = x,   16 a + c = y.

   For any x and y of -1919 to 1919 there is one such a within eight steps of y / 16: the one that
   leaves as much as x when both are divided by 16. So three products do the work of four, and
   integers have 12 bits: they are off by 2^-12 of the largest in their block. */

enum { COUNT = SPAN / LANES };
typedef struct {
    float scale, sum, half[2]; /* the sums of a block and of its halves */
} Meaning;
typedef int16_t small __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
enum { LARGEST = 127 * 256 + 127, LARGEST_PAIRED = 1919 }; /* so that all parts fit into bytes */

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
enum { BYTEWISE = 1 };
INLINE ivec add_four(ivec sum, ivec codes, const char *four) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const int32_t *)four));
    return sum;
}
/* Few stores: another processor's cache may hold every line. */
INLINE __m128i meant(Meaning says) {
    return _mm_castps_si128(_mm_setr_ps(says.scale, says.sum, says.half[0], says.half[1]));
}
INLINE __m512i joined(const small *x) {
    return _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)x[0]), (__m256i)x[1], 1);
}
/* Cut the integers of a block into bytes: first all upper ones, of every eight inputs in the order
   0 4 1 5 2 6 3 7, as codes lie, and then the lower ones, which are -128 to 127. */
INLINE void put_bytes(char *to, const small *x, Meaning says) {
    const __m128i eight = _mm_setr_epi8(1, 9, 3, 11, 5, 13, 7, 15, 0, 8, 2, 10, 4, 12, 6, 14);
    const __m512i half = _mm512_set1_epi16(128), parts = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i cut = _mm512_xor_si512(_mm512_add_epi16(joined(x), half), half);
    const __m512i apart = _mm512_shuffle_epi8(cut, _mm512_broadcast_i32x4(eight));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi64(parts, apart));
    _mm_storeu_si128((__m128i *)(to + 2 * SPAN), meant(says));
}
/* Cut them into a, b and c of 16 pairs each; the pairs are as codes lie. */
INLINE void put_paired(char *to, const small *x, Meaning says) {
    const __m128i four = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    const __m512i parts = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i apart = _mm512_shuffle_epi8(joined(x), _mm512_broadcast_i32x4(four));
    const __m512i both = _mm512_permutexvar_epi64(parts, apart);
    typedef int16_t words __attribute__((vector_size(32), may_alias));
    const words first = (words)_mm512_castsi512_si256(both);
    const words second = (words)_mm512_extracti64x4_epi64(both, 1);
    const words near = (second >> 4) + 1, a = near + (((first - near + 8) & 15) - 8);
    const words part[3] = {a, (first - a) >> 4, second - (a << 4)};
    __m512i line = _mm512_castsi128_si512(_mm256_cvtepi16_epi8((__m256i)part[0]));
    line = _mm512_inserti32x4(line, _mm256_cvtepi16_epi8((__m256i)part[1]), 1);
    line = _mm512_inserti32x4(line, _mm256_cvtepi16_epi8((__m256i)part[2]), 2);
    _mm512_storeu_si512(to, _mm512_inserti32x4(line, meant(says), 3));
}
#else
enum { BYTEWISE = 0 };
INLINE ivec add_four(ivec sum, ivec codes, const char *four) {
    (void)codes, (void)four;
    return sum;
}
INLINE void put_bytes(char *to, const small *x, Meaning says) {
    EACH(i, COUNT) *(small *)(to + i * BYTES / 2) = x[i];
    memcpy(to + 2 * SPAN, &says, sizeof says);
}
INLINE void put_paired(char *to, const small *x, Meaning says) { put_bytes(to, x, says); }
#endif

INLINE int is_paired(const int kind) { return BYTEWISE && is_coded(kind) && code_bits(kind) == 4; }

INLINE int below_zero(const int kind) {
    return kind == Q4_0 ? 8 : kind == Q5_0 ? 16 : kind == Q6_K ? 32 : kind == Q8_0 ? 128 : 0;
}

/* Codes of a block: a vector has four of each output, of the inputs that `put_bytes` puts together; or
   pairs as a, b and c want them. */
INLINE void read_codes(const int kind, const char *block, ivec *q) {
    const int more = code_bits(kind) - 4;
    if (is_paired(kind)) {
        EACH(part, 4) {
            q[part] = *(const ivec *)(block + part * 64);
            if (kind == Q4_0) q[part] ^= (int32_t)0x88888888;
            q[part + 4] = q[part] << 4 & (int32_t)0xf0f0f0f0;
            q[part + 8] = q[part] >> 4 & 0x0f0f0f0f;
        }
        return;
    }
    EACH(part, 4) EACH(i, 2) {
        ivec *to = q + 2 * part + i;
        if (kind == Q8_0) {
            *to = *(const ivec *)(block + (2 * part + i) * 64) ^ (int32_t)0x80808080;
            continue;
        }
        *to = *(const ivec *)(block + part * 64) >> 4 * i & 0x0f0f0f0f;
        const ivec h = *(const ivec *)(block + 256 + (more == 1 ? 0 : part / 2 * 64));
        const int at = (2 * part + i) * more % 8;
        *to |= (at < 4 ? h << (4 - at) : h >> (at - 4)) & (more == 1 ? 0x10101010 : 0x30303030);
    }
}

/* Rows as codes want them: [blocks, rows] parcels, each its integers and then what they mean. So
   threads that prepare rows beside each other write to lines of their own. */
typedef struct {
    const char *parcel;
    int64_t rows;
} Whole;
INLINE int whole_bytes(const int kind) { return is_paired(kind) ? SPAN / 2 * 3 : 2 * SPAN; }
INLINE int parcel_bytes(const int kind) { return whole_bytes(kind) + (int)sizeof(Meaning); }
INLINE const Meaning *meaning(const int kind, const char *parcel) {
    return (const Meaning *)(parcel + whole_bytes(kind));
}

#if defined(__AVX512F__)
INLINE int32_t largest_lane(ivec x) { return _mm512_reduce_max_epi32((__m512i)x); }
INLINE int32_t sum_lanes(ivec x) { return _mm512_reduce_add_epi32((__m512i)x); }
#else
INLINE int32_t largest_lane(ivec x) {
    int32_t lane[LANES], most = 0;
    memcpy(lane, &x, sizeof lane);
    for (int i = 0; i < LANES; i++) most = lane[i] > most ? lane[i] : most;
    return most;
}
INLINE int32_t sum_lanes(ivec x) {
    int32_t lane[LANES], sum = 0;
    memcpy(lane, &x, sizeof lane);
    for (int i = 0; i < LANES; i++) sum += lane[i];
    return sum;
}
#endif

INLINE void prepare_block(const float *from, const int kind, char *parcel) {
    const int paired = is_paired(kind);
    vec x[COUNT];
    small whole[COUNT];
    ivec most = {0}, count[2] = {{0}, {0}};
    EACH(i, COUNT) {
        x[i] = load(from + i * LANES);
        const ivec size = (ivec)x[i] & 0x7fffffff; /* in the order of the numbers */
        const ivec more = size > most;
        most = (size & more) | (most & ~more);
    }
    const int32_t bits = largest_lane(most);
    float top;
    memcpy(&top, &bits, sizeof top);
    const int tiny = top < 1e-30f;
    const float largest = paired ? LARGEST_PAIRED : LARGEST;
    const vec by = all(tiny ? 0.0f : largest / top);
    EACH(i, COUNT) {
        /* The sum with 1.5 * 2^23 ends in the nearest whole number. */
        const ivec one = (ivec)(x[i] * by + 12582912.0f) - 0x4b400000;
        whole[i] = __builtin_convertvector(one, small);
        /* Of 16 bits: the sum of what is made of numbers that are not finite would overflow. */
        count[i * 2 / COUNT] += __builtin_convertvector(whole[i], ivec);
    }
    const int32_t half[2] = {sum_lanes(count[0]), sum_lanes(count[1])};
    const float scale = tiny ? 0 : top / largest + 0 * top; /* NaN where a number is not finite */
    const Meaning says = {scale, scale * (float)(half[0] + half[1]), {scale * (float)half[0], scale * (float)half[1]}};
    if (paired) put_paired(parcel, whole, says);
    else put_bytes(parcel, whole, says);
}

/* A few rows, few enough for registers. */
INLINE void few_rows(const int kind, const int tall, const char *panel, int64_t blocks, Whole w,
                     int64_t row, float *out) {
    const int halves = kind == Q6_K ? 2 : 1, size = parcel_bytes(kind);
    vec sum[4][VECS];
    EACH(r, tall) EACH(v, VECS) sum[r][v] = (vec){0};
    for (int64_t b = 0; b < blocks; b++) {
        const char *block = panel + block_at(kind, b);
        const char *head = head_of(kind, panel, b);
        const char *x = w.parcel + (b * w.rows + row) * size;
        EACH(half, halves) {
            isum part[4][VECS];
            EACH(r, tall) EACH(v, VECS) part[r][v] = (isum){0};
            EACH(i, 4 / halves) {
                const int eighth = half * 2 + i;
                svec q[VECS][4];
                EACH(v, VECS) widen(kind, block, eighth, v, q[v]);
                EACH(t, 4) EACH(r, tall) EACH(v, VECS)
                part[r][v] = add_pair(part[r][v], q[v][t], x + r * size + eighth * 16 + 4 * t);
            }
            EACH(v, VECS) {
                const vec d = scale_of(kind, block, head, v, half);
                EACH(r, tall)
                sum[r][v] = fused(total(part[r][v]) * d, all(meaning(kind, x + r * size)->scale), sum[r][v]);
            }
        }
        if (has_least(kind)) EACH(v, VECS) {
            const vec least = least_of(kind, block, head, v);
            EACH(r, tall) sum[r][v] = fused(least, all(meaning(kind, x + r * size)->sum), sum[r][v]);
        }
    }
    EACH(r, tall) EACH(v, VECS) store(out + r * GROUP + v * LANES, sum[r][v]);
}

/* A block of a group, widened: for many rows. */
typedef struct {
    svec q[PAIRS][VECS];
    vec scale[2][VECS], least[VECS];
} Wide;

INLINE void widen_block(const int kind, const char *panel, int64_t b, Wide *wide) {
    const char *block = panel + block_at(kind, b);
    const char *head = head_of(kind, panel, b);
    EACH(part, 4) EACH(v, VECS) {
        svec q[4];
        widen(kind, block, part, v, q);
        EACH(t, 4) wide->q[4 * part + t][v] = q[t];
    }
    EACH(v, VECS) {
        wide->scale[0][v] = scale_of(kind, block, head, v, 0);
        if (kind == Q6_K) wide->scale[1][v] = scale_of(kind, block, head, v, 1);
        if (has_least(kind)) wide->least[v] = least_of(kind, block, head, v);
    }
}

enum { TALL_CODES = 4, MANY = 64 };

/* What a block brings to `tall` rows, added to [tall, GROUP]. */
INLINE void add_tile(const int halves, const int least, const int tall, const Wide *wide,
                     const char *x, float *out) {
    enum { SIZE = 2 * SPAN + sizeof(Meaning) };
    EACH(half, halves) {
        isum part[TALL_CODES][VECS];
        EACH(r, tall) EACH(v, VECS) part[r][v] = (isum){0};
        EACH(i, PAIRS / halves) {
            const int pair = half * PAIRS / 2 + i;
            svec q[VECS];
            EACH(v, VECS) q[v] = wide->q[pair][v], IN_REGISTER(q[v]);
            EACH(r, tall) EACH(v, VECS)
            part[r][v] = add_pair(part[r][v], q[v], x + r * SIZE + 4 * pair);
        }
        EACH(r, tall) EACH(v, VECS) {
            const Meaning *says = (const Meaning *)(x + r * SIZE + 2 * SPAN);
            float *to = out + r * GROUP + v * LANES;
            vec sum = fused(total(part[r][v]) * wide->scale[half][v], all(says->scale), load(to));
            if (least) sum = fused(wide->least[v], all(says->sum), sum);
            store(to, sum);
        }
    }
}
/* The same for some rows. */
INLINE void add_rows(const int halves, const int least, const Wide *wide, const char *x, int64_t rows,
                     float *out) {
#define TILE(tall) add_tile(halves, least, tall, wide, x + r * (2 * SPAN + sizeof(Meaning)), out + r * GROUP)
    int64_t r = 0;
    for (; r + TALL_CODES <= rows; r += TALL_CODES) TILE(TALL_CODES);
    switch (rows - r) {
    case 3: TILE(3); break;
    case 2: TILE(2); break;
    case 1: TILE(1); break;
    }
#undef TILE
}
#define ROWS(name, halves, least)                                                                 \
    static __attribute__((noinline)) void name(const Wide *wide, const char *x, int64_t rows, float *out) { \
        add_rows(halves, least, wide, x, rows, out);                                              \
    }
ROWS(add_scaled, 1, 0)
ROWS(add_lifted, 1, 1)
ROWS(add_halved, 2, 0)
#undef ROWS

/* Rows by few or by many; y [rows, GROUP] of a group, by `put`. */
typedef struct {
    void *to;
    int64_t stride;
    int half, own; /* bfloat16; read by the same thread */
} Result;

/* Sums [groups, count, GROUP] of so many groups; what a row gets of them is written at once, for it lies together. */
INLINE void put(const Matrix *m, int64_t group, const int groups, const float *sums, int64_t count, Result y,
                int64_t row) {
    const int64_t first = group * GROUP;
    for (int64_t r = 0; r < count; r++) EACH(n, groups) {
        float one[GROUP];
        const int64_t at = (row + r) * y.stride + first + n * GROUP, left = m->outputs - first - n * GROUP;
        EACH(v, VECS) {
            vec sum = load(sums + (n * count + r) * GROUP + v * LANES);
            if (m->bias) sum += load(m->bias + first + n * GROUP + v * LANES);
            store(one + v * LANES, sum);
        }
        if (left >= GROUP && y.half) EACH(v, VECS)
            store_half((bf16 *)y.to + at + v * LANES, load(one + v * LANES));
        else if (left >= GROUP && y.own) memcpy((float *)y.to + at, one, sizeof one);
        else if (left >= GROUP) publish((float *)y.to + at, one);
        else if (y.half) for (int i = 0; i < left; i++) ((bf16 *)y.to)[at + i] = rounded(one[i]);
        else if (left > 0) memcpy((float *)y.to + at, one, left * sizeof *one);
    }
}

/* FETCHED: bytes ahead that are asked for: what memory gives while it takes to answer, and more than a page,
   for the processor itself does not look past the end of one. */
enum { FEW = 2, TALL_BYTES = 8, FETCHED = 1 << 13 };

/* The least value where codes count from zero. */
INLINE vec least_of_bytes(const int kind, const char *block, const char *head, vec d) {
    vec least = d * (float)-below_zero(kind);
    if (has_least(kind)) least = least_of(kind, block, head, 0);
    return least;
}

/* What a block brings to the sums of a row. */
INLINE vec with_block(vec sum, ivec part, vec d, vec least, const Meaning *says, float x_sum) {
    sum = fused(__builtin_convertvector(part, vec) * d, all(says->scale), sum);
    return fused(least, all(x_sum), sum);
}

/* Some rows, few enough for registers. */
INLINE void byte_rows(const int kind, const int tall, const char *panel, int64_t blocks, Whole w,
                      int64_t row, float *out) {
    const int halves = kind == Q6_K ? 2 : 1, cuts = is_paired(kind) ? 1 : 2;
    const int each = (is_paired(kind) ? 12 : 8) / halves, size = parcel_bytes(kind);
    vec sum[TALL_BYTES];
    EACH(r, tall) sum[r] = (vec){0};
    for (int64_t b = 0; b < blocks; b++) {
        const char *block = panel + block_at(kind, b);
        const char *head = head_of(kind, panel, b);
        const char *x = w.parcel + (b * w.rows + row) * size;
        for (int line = 0; line < block_bytes(kind); line += 64)
            fetch(block + FETCHED + line, 1);
        ivec q[12];
        read_codes(kind, block, q);
        EACH(half, halves) {
            ivec part[TALL_BYTES];
            EACH(r, tall) part[r] = (ivec){0};
            EACH(lower, cuts) {
                if (lower) EACH(r, tall) part[r] <<= 8;
                EACH(n, each) EACH(r, tall) {
                    const int i = half * each + n;
                    part[r] = add_four(part[r], q[i], x + r * size + lower * SPAN + 4 * i);
                }
            }
            const vec d = scale_of(kind, block, head, 0, half);
            const vec least = least_of_bytes(kind, block, head, d);
            EACH(r, tall) {
                const Meaning *says = meaning(kind, x + r * size);
                sum[r] = with_block(sum[r], part[r], d, least, says, halves == 2 ? says->half[half] : says->sum);
            }
        }
    }
    EACH(r, tall) store(out + r * GROUP, sum[r]);
}

INLINE void byte_piece(const int kind, const Matrix *m, const Whole w, Result y, int64_t first,
                       int64_t last) {
#define BYTE_ROWS(tall)                                                                           \
    case tall: byte_rows(kind, tall, panel, blocks, w, row, sums); break;
    const int64_t blocks = blocks_of(m), bytes = group_bytes(kind, m->inputs);
    float sums[TALL_BYTES * GROUP] __attribute__((aligned(64)));
    for (int64_t g = first; g < last; g++) {
        const char *panel = (const char *)m->weights + g * bytes;
        for (int64_t row = 0, tall; row < w.rows; row += tall) {
            tall = w.rows - row < TALL_BYTES ? w.rows - row : TALL_BYTES;
            switch (tall) {
                BYTE_ROWS(1) BYTE_ROWS(2) BYTE_ROWS(3) BYTE_ROWS(4)
                BYTE_ROWS(5) BYTE_ROWS(6) BYTE_ROWS(7) BYTE_ROWS(8)
            }
            put(m, g, 1, sums, tall, y, row);
        }
    }
#undef BYTE_ROWS
}

INLINE void coded_piece(const int kind, const Matrix *m, const void *operands, int64_t rows,
                        Result y, int64_t first, int64_t last) {
    const int64_t blocks = blocks_of(m), bytes = group_bytes(kind, m->inputs);
    const char *weights = m->weights;
    const Whole w = {operands, rows};
    if (BYTEWISE) {
        byte_piece(kind, m, w, y, first, last);
        return;
    }
    float sums[MANY * GROUP] __attribute__((aligned(64)));
    if (rows <= FEW) {
        for (int64_t g = first; g < last; g++) {
            if (rows == 1) few_rows(kind, 1, weights + g * bytes, blocks, w, 0, sums);
            else few_rows(kind, 2, weights + g * bytes, blocks, w, 0, sums);
            put(m, g, 1, sums, rows, y, 0);
        }
        return;
    }
    for (int64_t row = 0; row < rows; row += MANY) {
        const int64_t count = rows - row < MANY ? rows - row : MANY;
        for (int64_t g = first; g < last; g++) {
            memset(sums, 0, count * GROUP * sizeof *sums);
            for (int64_t b = 0; b < blocks; b++) {
                Wide wide;
                widen_block(kind, weights + g * bytes, b, &wide);
                const char *x = w.parcel + (b * rows + row) * parcel_bytes(kind);
                (kind == Q6_K ? add_halved : has_least(kind) ? add_lifted : add_scaled)(&wide, x, count, sums);
            }
            put(m, g, 1, sums, count, y, row);
        }
    }
}

/* ---- Numbers ---- */

/* Rows as numbers want them: float32 or bfloat16 [rows, inputs], filled up to even with zeros. */
INLINE int in_halves(const int kind) { return HALVES && kind == BF16; }
INLINE int64_t filled(int64_t inputs) { return (inputs + 1) / 2 * 2; }

/* ---- Numbers by matrix units ---- */

/* Rows that one reading of weights serves: their sums stay in the second cache. With half as many 512 rows take 1.03 of
   a pass. */
enum { MANY_TILED = 8 * TILED };
INLINE int in_tiles(const Matrix *m) { return in_halves((int)m->kind) && m->inputs % TILE_INPUTS == 0 && has_tiles(); }

/* The part of weights that a tile of rows asks for, where all of `rows` read them. */
INLINE Share share_of(int64_t row, int64_t rows) {
    const int64_t lines = 2 * TILE_BYTES / TILE_LINE, turns = (rows + TILED - 1) / TILED, turn = row / TILED;
    return (Share){(int)(turn * lines / turns) * TILE_LINE, (int)((turn + 1) * lines / turns) * TILE_LINE};
}

/* Some of many rows times a group: a block of inputs after the other. */
INLINE void tile_group(const Matrix *m, const char *x, int64_t above, int64_t below, int64_t group, int *cut,
                       Result y) {
    float sums[MANY_TILED * TWO_GROUPS] __attribute__((aligned(64)));
    const int64_t inputs = m->inputs, block = tile_block(inputs);
    const char *weights = (const char *)m->weights + group * group_bytes(BF16, inputs);
    /* Where nothing is left to do, the units write results where they belong. */
    const int plain = !m->bias && !y.half && (y.own || !outpace_apart) && (group + 1) * TWO_GROUPS <= m->outputs;
    for (int64_t from = 0, to; from < inputs; from = to) {
        to = inputs - from < block ? inputs : from + block;
        for (int64_t row = above, tall; row < below; row += tall) {
            tall = below - row < TILED ? below - row : TILED;
            if (tall != *cut) cut_tiles(*cut = (int)tall);
            const Sums own = {sums + (row - above) * TWO_GROUPS, TILE_LINE, tall * TILE_LINE};
            const Sums there = {(float *)y.to + row * y.stride + group * TWO_GROUPS, 4 * y.stride, TILE_LINE};
            tile_sums(0, x + row * inputs * (int)sizeof(bf16), (int)tall, inputs, from, to, weights,
                      above ? (Share){0} : share_of(row, below), own, plain && to == inputs ? there : own);
            if (!plain && to == inputs) put(m, 2 * group, 2, own.at, tall, y, row);
        }
    }
}
static __attribute__((noinline)) void tile_many(const Matrix *m, const char *x, int64_t rows, Result y, int64_t first,
                                                int64_t last) {
    int cut = 0;
    for (int64_t g = first; g < last; g++)
        for (int64_t above = 0; above < rows; above += MANY_TILED)
            tile_group(m, x, above, rows - above < MANY_TILED ? rows : above + MANY_TILED, g, &cut, y);
    tile_end();
}

/* Of up to TILED rows weights are read once, and memory is all that counts. In one function with the other, one row
   took 1.02. */
static __attribute__((noinline)) void tile_few(const Matrix *m, const char *x, int rows, Result y, int64_t first,
                                               int64_t last) {
    float sums[TILED * TWO_GROUPS] __attribute__((aligned(64)));
    const int64_t inputs = m->inputs, bytes = group_bytes(BF16, inputs);
    const Sums own = {sums, TILE_LINE, rows * TILE_LINE};
    cut_tiles(rows);
    for (int64_t g = first; g < last; g++) {
        const char *weights = (const char *)m->weights + g * bytes;
        tile_sums(1, x, rows, inputs, 0, inputs, weights, (Share){0, 2 * TILE_BYTES}, own, own);
        put(m, 2 * g, 2, sums, rows, y, 0);
    }
    tile_end();
}

/* ---- Numbers by vectors ---- */

/* Rows of a tile, whose sums stay in registers: as many as fit, for weights come from memory with the first tile.
   Of several tiles the others compute, best with fewer rows: prompts of 512 rows take 0.95 with 6 in place of 8.
   BY_ROW each number of a row is read once and weights stay in registers, else the other way round. */
enum { BY_ROW = LANES == 16, TALL_NUMBERS = BY_ROW ? 12 : 2, BEST_NUMBERS = BY_ROW ? 6 : 2 };

/* FETCHED_FAR: bytes ahead for more than FEW_NUMBERS rows, into the second cache: lines on their way to the first
   one hold up what is read there of the rows (9 to 21 % of a pass over 8 rows on Zen 4). */
enum { FEW_NUMBERS = 3, FETCHED_FAR = 6 << 10 };

INLINE void number_rows(const int kind, const int tall, const char *panel, int64_t bytes,
                        int64_t inputs, const char *x, float *out) {
    enum { LINE = TWO_GROUPS * 4 }; /* bytes of an input, or of a pair */
    vec sum[TALL_NUMBERS][2 * VECS];
    const int64_t row = filled(inputs);
    EACH(r, tall) EACH(v, 2 * VECS) sum[r][v] = (vec){0};
    for (int64_t line = 0; line < bytes / LINE; line++) {
        const char *from = panel + line * LINE;
        const float *one = (const float *)x + line * (kind == F32 ? 1 : 2);
        const bf16 *half = (const bf16 *)x + line * 2;
        EACH(i, BY_ROW ? tall : 2 * VECS) EACH(j, BY_ROW ? 2 * VECS : tall) {
            const int r = BY_ROW ? i : j, v = BY_ROW ? j : i;
            const vec w = load((const float *)from + v * LANES);
            const vec even = (vec)((ivec)w << 16), odd = (vec)((ivec)w & (int32_t)0xffff0000);
            if (kind == F32) sum[r][v] = fused(w, all(one[r * row]), sum[r][v]);
            else if (HALVES) sum[r][v] = add_halves(sum[r][v], (ivec)w, half + r * row);
            else sum[r][v] = fused(odd, all(one[r * row + 1]), fused(even, all(one[r * row]), sum[r][v]));
            if (r || (v + 1) % VECS) continue;
            if (tall <= FEW_NUMBERS) fetch(from + FETCHED + v / VECS * 64, 1);
            else fetch(from + FETCHED_FAR + v / VECS * 64, 0);
            /* A line is used, then one is asked for: on Intel two rows take 0.9 so. */
            if (BY_ROW && tall < FEW_NUMBERS) __asm__ volatile("" ::: "memory");
        }
    }
    EACH(r, tall) EACH(v, 2 * VECS) store(out + (v / VECS * tall + r) * GROUP + v % VECS * LANES, sum[r][v]);
}

/* Functions of their own: inside of a larger one compilers use registers worse, by up to a tenth of a pass. */
typedef void NumberRows(const char *panel, int64_t bytes, int64_t inputs, const char *x, float *out);
#define NUMBERS(tall)                                                                             \
    static __attribute__((noinline)) void full_##tall(const char *panel, int64_t bytes, int64_t inputs, const char *x, \
                                                      float *out) {                               \
        number_rows(F32, tall, panel, bytes, inputs, x, out);                                     \
    }                                                                                             \
    static __attribute__((noinline)) void half_##tall(const char *panel, int64_t bytes, int64_t inputs, const char *x, \
                                                      float *out) {                               \
        number_rows(BF16, tall, panel, bytes, inputs, x, out);                                    \
    }
#if defined(__AVX512F__)
#define EACH_TALL(with)                                                                           \
    with(1) with(2) with(3) with(4) with(5) with(6) with(7) with(8) with(9) with(10) with(11) with(12)
#else
#define EACH_TALL(with) with(1) with(2)
#endif
EACH_TALL(NUMBERS)
#undef NUMBERS

INLINE void number_piece(const int kind, const Matrix *m, const void *operands, int64_t rows,
                         Result y, int64_t first, int64_t last) {
#define FULL(tall) full_##tall,
#define HALF(tall) half_##tall,
    static NumberRows *const each[2][TALL_NUMBERS] = {{EACH_TALL(FULL)}, {EACH_TALL(HALF)}};
#undef HALF
#undef FULL
    if (kind == BF16 && in_tiles(m)) {
        if (rows <= TILED) tile_few(m, operands, (int)rows, y, first, last);
        else tile_many(m, operands, rows, y, first, last);
        return;
    }
    const int64_t bytes = group_bytes(kind, m->inputs);
    const int64_t row_bytes = filled(m->inputs) * (in_halves(kind) ? 2 : 4);
    float sums[TALL_NUMBERS * TWO_GROUPS] __attribute__((aligned(64)));
    for (int64_t g = first; g < last; g++) {
        const char *panel = (const char *)m->weights + g * bytes;
        for (int64_t row = 0, tall; row < rows; row += tall) {
            const int64_t left = rows - row, tiles = (left + BEST_NUMBERS - 1) / BEST_NUMBERS;
            tall = left <= TALL_NUMBERS ? left : (left + tiles - 1) / tiles;
            each[kind == BF16][tall - 1](panel, bytes, m->inputs, (const char *)operands + row * row_bytes, sums);
            put(m, 2 * g, 2, sums, tall, y, row);
        }
    }
}

/* ---- What is called ---- */

/* Bytes of the operands of so many rows. Matrices of equal `product_operands` share them. */
enum { OPERANDS = 4 };
INLINE int product_operands(int64_t kind) {
    return is_paired(kind) ? 3 : is_coded(kind) ? 0 : in_halves(kind) ? 1 : 2;
}
INLINE int64_t product_room(const Matrix *m, int64_t rows) {
    const int64_t bytes = is_coded(m->kind) ? blocks_of(m) * parcel_bytes(m->kind)
                                            : filled(m->inputs) * (in_halves(m->kind) ? 2 : 4);
    return (rows * bytes + 63) / 64 * 64;
}

/* Write the operands of a row's inputs of one block; `rows` in all. */
INLINE void prepare_span(const Matrix *m, const float *from, int64_t rows, int64_t row, int64_t block, void *operands) {
    const int64_t at = row * filled(m->inputs) + block * SPAN;
    if (is_coded(m->kind)) {
        char *to = (char *)operands + (block * rows + row) * parcel_bytes((int)m->kind), parcel[CACHE_LINE];
        if (is_paired(m->kind)) prepare_block(from, Q4_0, parcel), publish(to, parcel);
        else prepare_block(from, Q8_0, to);
    } else if (in_halves((int)m->kind)) {
        bf16 line[SPAN], *to = (bf16 *)operands + (in_tiles(m) ? tile_at(row, rows, m->inputs, block) : at);
        for (int n = 0; n < SPAN; n++) line[n] = rounded(from[n]);
        if (rows < 4 * TILED) publish(to, line);
        else memcpy(to, line, sizeof line); /* half of the rows are the reader's own */
    } else {
        publish((float *)operands + at, from), publish((float *)operands + at + SPAN / 2, from + SPAN / 2);
    }
}

/* Write the operands of rows `first` to `last` of `rows`; x [rows, stride], bfloat16 if `half`. */
static void product_prepare(const Matrix *m, const void *x, int64_t stride, int half, int64_t rows,
                            int64_t first, int64_t last, void *operands) {
    const int64_t inputs = m->inputs;
    for (int64_t r = first; r < last; r++) {
        Row row = past(x, r * stride, half);
        for (int64_t i = 0; i < inputs; i += SPAN) {
            float one[SPAN] = {0};
            const int64_t count = inputs - i < SPAN ? inputs - i : SPAN, at = r * filled(inputs) + i;
            const float *from = one;
            if (half) for (int n = 0; n < count; n++) one[n] = widened(((const bf16 *)row)[i + n]);
            else if (count == SPAN) from = (const float *)row + i;
            else memcpy(one, (const float *)row + i, count * sizeof *one);
            bf16 *narrow = (bf16 *)operands + at;
            if (count == SPAN || is_coded(m->kind)) prepare_span(m, from, rows, r, i / SPAN, operands);
            else if (in_halves(m->kind)) for (int n = 0; n < filled(count); n++) narrow[n] = rounded(from[n]);
            else memcpy((float *)operands + at, from, filled(count) * sizeof *from);
        }
    }
}

/* Write outputs of groups `first` to `last` for all rows. */
static void product_piece(const Matrix *m, const void *operands, int64_t rows, Result y, int64_t first, int64_t last) {
#define KIND(kind)                                                                                \
    case kind: coded_piece(kind, m, operands, rows, y, first, last); break
    switch (m->kind) {
    case F32: number_piece(F32, m, operands, rows, y, first, last); break;
    case BF16: number_piece(BF16, m, operands, rows, y, first, last); break;
    EACH_CODED(KIND);
    }
#undef KIND
}
