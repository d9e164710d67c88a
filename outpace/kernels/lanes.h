/* Vectors of float32 as wide as the processor's, and what they are read from and written to. */

#pragma once

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
enum { BYTES = 64 };
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
enum { BYTES = 32 };
#elif defined(__aarch64__)
#include <arm_neon.h>
enum { BYTES = 16 };
#else
#error "needs vectors with fused multiply-add"
#endif
enum { LANES = BYTES / 4 };

typedef float vec __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef uint16_t bf16; /* the upper half of a float32 */
typedef bf16 hvec __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec x) { *(vec *)to = x; }
INLINE vec all(float x) { return x - (vec){0}; }

/* a * b + c, rounded once. Compilers fuse nothing by themselves: GCC for Zen 3 fuses a sum of one row and not the same
   sum of the next one. */
INLINE vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

/* Nearest, even on ties. Not for NaN. */
INLINE bf16 rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE float widened(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* Numbers of a row are float32, or bfloat16 if `half` is set, which is known when code is
   compiled. */
typedef const void *Row;
INLINE Row past(Row from, int64_t count, const int half) {
    return (const char *)from + count * (half ? 2 : 4);
}

/* Numbers of bfloat16, read and written as float32. */
INLINE vec load_half(const bf16 *from) {
    return (vec)(__builtin_convertvector(*(const hvec *)from, ivec) << 16);
}
INLINE void store_half(bf16 *to, vec x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    const ivec bits = (ivec)x, upper = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *(hvec *)to = __builtin_convertvector(upper, hvec);
#endif
}

/* Round two vectors, and store them side by side too. */
INLINE void round_two(bf16 *to, vec *x) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]);
    _mm512_storeu_si512(to, both);
    x[0] = (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both)), 16);
    x[1] = (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16);
#else
    for (int i = 0; i < 2; i++) store_half(to + i * LANES, x[i]), x[i] = load_half(to + i * LANES);
#endif
}

/* Whether cores hear late of each other, for they have no cache in common; see team.h. */
_Atomic int outpace_apart;

/* Write a line of the caches, 64 bytes, that other threads read. A core that writes into a line which another one
   holds waits for it, up to 70 ns where they have no cache in common. There it is written past the caches, if `to`
   begins a line. The team sees to it that whoever reads it finds it written. */
enum { CACHE_LINE = 64 };
INLINE void publish(void *to, const void *line) {
#if defined(__AVX512F__)
    if (outpace_apart && (uintptr_t)to % CACHE_LINE == 0) {
        _mm512_stream_si512(to, _mm512_loadu_si512(line));
        return;
    }
#elif defined(__AVX2__)
    if (outpace_apart && (uintptr_t)to % CACHE_LINE == 0) {
        const __m256i *half = line;
        for (int i = 0; i < 2; i++) _mm256_stream_si256((__m256i *)to + i, _mm256_loadu_si256(half + i));
        return;
    }
#endif
    memcpy(to, line, CACHE_LINE);
}

/* 2 to the power of x, for x <= 0; below 2^-126 it is 0. The part of x between -1/2 and 1/2 goes
   through a polynomial fitted to it (2e-9 off, less than float32 shows), the rest to the
   exponent. */
INLINE vec power(vec x) {
#if defined(__AVX512F__)
    const __m512 near = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vec f = x - (vec)near;
#else
    const ivec none = x < -126.0f;
    x = (vec)((ivec)x & ~none);
    const vec shifted = x + 12582912.0f; /* 1.5 * 2^23: the whole part ends up in the last bits */
    const ivec whole = (ivec)shifted - 0x4b400000;
    const vec f = x - (shifted - 12582912.0f);
#endif
    vec y = all(1.5353360e-4f);
    y = fused(y, f, all(1.3398875e-3f));
    y = fused(y, f, all(9.6184374e-3f));
    y = fused(y, f, all(5.5503325e-2f));
    y = fused(y, f, all(2.4022648e-1f));
    y = fused(y, f, all(6.9314720e-1f));
    y = fused(y, f, all(1.0f));
#if defined(__AVX512F__)
    const __mmask16 some = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vec)_mm512_maskz_scalef_ps(some, (__m512)y, near);
#else
    return (vec)(((ivec)y + (whole << 23)) & ~none);
#endif
}

/* The sum of all lanes in one fixed order, and the largest. */
#if defined(__AVX512F__)
INLINE float lanes_sum(vec x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float lanes_top(vec x) { return _mm512_reduce_max_ps((__m512)x); }
#else
INLINE float lanes_sum(vec x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}
INLINE float lanes_top(vec x) {
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}
#endif

/* The largest number of a row; NaN if it holds one. */
INLINE float largest(const float *x, int64_t width) {
    vec top = all(-INFINITY);
    ivec odd = {0};
    float most = -INFINITY;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const vec one = load(x + i);
        const ivec more = one > top;
        top = (vec)(((ivec)one & more) | ((ivec)top & ~more));
        odd |= one != one;
    }
    for (int n = 0; n < LANES; n++) {
        most = top[n] > most ? top[n] : most;
        if (odd[n]) most = NAN;
    }
    for (; i < width; i++)
        if (!(x[i] <= most)) most = isnan(most) ? most : x[i];
    return most;
}

/* Rows are worked on in pieces of about GRAIN numbers, as many for each of two threads: 3 to 10 rows as stored take
   0.99 so. */
enum { GRAIN = 1 << 11 };
INLINE int64_t pieces_of(int64_t rows, int64_t width) {
    int64_t pieces = (rows * width + GRAIN - 1) / GRAIN;
    if (pieces > 1) pieces += pieces % 2;
    return pieces < rows ? pieces : rows;
}
INLINE void part_of(int64_t rows, int64_t pieces, int64_t piece, int64_t *start, int64_t *stop) {
    *start = rows * piece / pieces;
    *stop = rows * (piece + 1) / pieces;
}
