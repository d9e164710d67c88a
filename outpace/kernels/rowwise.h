/* What happens row by row between two products of matrices, for CPUs: the same things that
   rowwise.py does with operations of torch, each in one reading. What a row gets depends on that
   row alone, bit for bit. */

#pragma once

#include "lanes.h"

enum { SILU, GELU_TANH }; /* rowwise.py has the same numbers */

INLINE vec read(Row from, int64_t at, const int half) {
    return half ? load_half((const bf16 *)from + at) : load((const float *)from + at);
}
INLINE void write(void *to, int64_t at, vec x, const int half) {
    if (half) store_half((bf16 *)to + at, x);
    else store((float *)to + at, x);
}

/* Add `more`, times a factor, to x, if it is given; write x / sqrt(|x|^2 + floor^2) * weight. */
INLINE void norm(float *x, Row more, float times, const float *weight, float floor, void *out,
                 int64_t width, const int half_more, const int half_out) {
    vec squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        vec one = load(x + i);
        if (more) {
            one = fused(read(more, i, half_more), all(times), one);
            store(x + i, one);
        }
        squares = fused(one, one, squares);
    }
    const vec by = all(1 / sqrtf(floor * floor + lanes_sum(squares)));
    for (int64_t i = 0; i < width; i += LANES)
        write(out, i, load(x + i) * by * load(weight + i), half_out);
}

/* 1 / (1 + e^-x) */
INLINE vec sigmoid(vec x) {
    const ivec negative = x < 0;
    const vec down = (vec)((ivec)x | (int32_t)0x80000000); /* -|x| */
    const vec e = power(down * 1.4426950f);
    const vec top = (vec)(((ivec)e & negative) | ((ivec)all(1) & ~negative));
    return top / (1 + e);
}

/* Rotate neighbouring numbers of a row by the angle whose cosine and sine `turn` has. Two numbers
   fill 64 bits, the even one below. */
typedef uint64_t pairs __attribute__((vector_size(BYTES), aligned(4), may_alias));
INLINE void rotate(float *x, const float *turn, int64_t width) {
    const uint64_t low = 0xffffffff;
    for (int64_t i = 0; i < width; i += LANES) {
        const pairs both = *(const pairs *)(x + i), angle = *(const pairs *)(turn + i);
        const pairs cosine = (angle & low) | (angle << 32), sine = (angle & ~low) | (angle >> 32);
        const vec other = (vec)(((both >> 32) | (both << 32)) ^ 0x80000000); /* -odd, even */
        store(x + i, fused((vec)both, (vec)cosine, other * (vec)sine));
    }
}

/* An activation of the first half of a row, times the second. */
INLINE void gate(Row from, void *out, int64_t width, const int half, const int kind) {
    for (int64_t i = 0; i < width; i += LANES) {
        const vec x = read(from, i, half), up = read(from, width + i, half);
        /* x / 2 * (1 + tanh y) is x * sigmoid(2 y). */
        vec y = x;
        if (kind == GELU_TANH) y = fused(x * x * x, all(0.044715f), x) * 1.5957691f;
        write(out, i, x * sigmoid(y) * up, half);
    }
}

/* Add x * sigmoid(x) to `out`. */
INLINE void bend(const float *x, float *out, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES)
        store(out + i, fused(load(x + i), sigmoid(load(x + i)), load(out + i)));
}

/* Index and value of the largest number of a row, the lowest index on ties. A row that holds a NaN
   gives it. */
INLINE void best(const float *x, int64_t width, double *out) {
    const float most = largest(x, width);
    int64_t at = 0;
    while (at + 1 < width && x[at] != most && !isnan(most)) at++;
    out[0] = (double)at, out[1] = most;
}
