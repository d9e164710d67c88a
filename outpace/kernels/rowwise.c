/* What happens row by row between two products of matrices, for CPUs: the same things that
   rowwise.py does with operations of torch, each in one reading. What a row gets depends on that
   row alone, bit for bit. */

#include "lanes.h"

enum { SMALL = 1 << 14 }; /* numbers that are not worth waking another thread for */
enum { SILU, GELU_TANH }; /* rowwise.py has the same numbers */

INLINE vec read(Row from, int64_t at, const int half) {
    return half ? load_half((const bf16 *)from + at) : load((const float *)from + at);
}
INLINE void write(void *to, int64_t at, vec x, const int half) {
    if (half) store_half((bf16 *)to + at, x);
    else store((float *)to + at, x);
}

/* Add `more` to x, if it is given; write x / sqrt(|x|^2 + floor^2) * weight. */
INLINE void norm(float *x, Row more, const float *weight, float floor, void *out,
                 int64_t width, const int half_more, const int half_out) {
    vec squares = {0};
    float total = floor * floor;
    for (int64_t i = 0; i < width; i += LANES) {
        vec one = load(x + i);
        if (more) {
            one += read(more, i, half_more);
            store(x + i, one);
        }
        squares += one * one;
    }
    for (int i = 0; i < LANES; i++) total += squares[i];
    const vec by = all(1 / sqrtf(total));
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

/* An activation of the first half of a row, times the second. */
INLINE void gate(Row from, void *out, int64_t width, const int half, const int kind) {
    for (int64_t i = 0; i < width; i += LANES) {
        const vec x = read(from, i, half), up = read(from, width + i, half);
        /* x / 2 * (1 + tanh y) is x * sigmoid(2 y). */
        vec y = x;
        if (kind == GELU_TANH) y = (x + x * x * x * 0.044715f) * 1.5957691f;
        write(out, i, x * sigmoid(y) * up, half);
    }
}

#define ROWS                                                                                      \
    _Pragma("omp parallel for schedule(static) num_threads((int)threads) if (rows * width > SMALL)") \
    for (int64_t row = 0; row < rows; row++)

/* x [rows, width] float32; more [rows, width]; weight [width]; out [rows, stride]. `half_more` and
   `half_out` say what is bfloat16. */
void outpace_norm(float *x, const void *more, const float *weight, float floor, void *out,
                  int64_t stride, int64_t rows, int64_t width, int64_t half_more,
                  int64_t half_out, int64_t threads) {
    ROWS {
        float *own = x + row * width;
        Row add = more ? past(more, row * width, half_more) : NULL;
        void *to = (void *)past(out, row * stride, half_out);
        if (half_out && half_more) norm(own, add, weight, floor, to, width, 1, 1);
        else if (half_out) norm(own, add, weight, floor, to, width, 0, 1);
        else if (half_more) norm(own, add, weight, floor, to, width, 1, 0);
        else norm(own, add, weight, floor, to, width, 0, 0);
    }
}

/* from [rows, 2 * width]; out [rows, width]; both bfloat16 if `half` is set. */
void outpace_gate(const void *from, void *out, int64_t rows, int64_t width, int64_t half,
                  int64_t kind, int64_t threads) {
    ROWS {
        Row own = past(from, 2 * row * width, half);
        void *to = (void *)past(out, row * width, half);
        if (kind == SILU) {
            if (half) gate(own, to, width, 1, SILU);
            else gate(own, to, width, 0, SILU);
        } else {
            if (half) gate(own, to, width, 1, GELU_TANH);
            else gate(own, to, width, 0, GELU_TANH);
        }
    }
}
