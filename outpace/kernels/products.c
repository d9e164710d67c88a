/* Products of rows with matrices (products.h), to be called alone; and how matrices get into the
   layout that they are multiplied in. */

#include "products.h"

/* ---- Products ---- */

static int64_t cut(int64_t groups, int64_t threads) {
    const int64_t piece = groups / (8 * threads);
    return piece < 1 ? 1 : piece > 32 ? 32 : piece;
}

/* Bytes that outpace_product wants as `operands`. */
int64_t outpace_room(const Matrix *parts, int64_t count, int64_t rows) {
    int64_t room[3] = {0};
    for (int64_t i = 0; i < count; i++)
        room[product_operands(parts[i].kind)] = product_room(parts + i, rows);
    return room[0] + room[1] + room[2];
}

/* Rows times some matrices of equal inputs; their outputs stand side by side in y [rows, stride]. */
void outpace_product(const Matrix *parts, int64_t count, const void *x, int64_t x_stride,
                     int64_t x_half, int64_t rows, void *y, int64_t stride, int64_t half,
                     void *operands, int64_t threads) {
    const void *of[3] = {0};
    char *next = operands;
    int64_t pieces = 0;
    const Matrix *first[3] = {0};
    for (int64_t i = 0; i < count; i++) {
        const int kind = product_operands(parts[i].kind);
        if (!first[kind]) {
            first[kind] = parts + i, of[kind] = next;
            next += product_room(parts + i, rows);
        }
        const int64_t groups = groups_of(parts + i), size = cut(groups, threads);
        pieces += (groups + size - 1) / size;
    }
#pragma omp parallel num_threads((int)threads)
    {
        for (int kind = 0; kind < 3; kind++) if (first[kind]) {
#pragma omp for schedule(static) nowait
            for (int64_t r = 0; r < rows; r++)
                product_prepare(first[kind], x, x_stride, (int)x_half, rows, r, r + 1, (void *)of[kind]);
        }
#pragma omp barrier
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < pieces; i++) {
            int64_t left = i, column = 0;
            for (const Matrix *m = parts;; column += m++->outputs) {
                const int64_t groups = groups_of(m), size = cut(groups, threads);
                const int64_t here = (groups + size - 1) / size;
                if (left >= here) {
                    left -= here;
                    continue;
                }
                const int64_t from = left * size, to = from + size < groups ? from + size : groups;
                product_piece(m, of[product_operands(m->kind)], rows, (void *)past(y, column, (int)half), stride, (int)half, from, to);
                break;
            }
        }
    }
}

/* ---- Layout ---- */

/* A block of 32 inputs of one output, as it lies in a GGUF file. */
typedef struct {
    uint8_t code[SPAN]; /* as `widen` reads them */
    uint16_t own[2], head[2];
} One;

INLINE int file_bytes(const int kind) { /* of a block, or of PER blocks */
    static const int bytes[KINDS] = {[Q4_0] = 18, [Q4_1] = 20, [Q5_0] = 22, [Q5_1] = 24,
                                     [Q8_0] = 34, [Q4_K] = 144, [Q5_K] = 176, [Q6_K] = 210};
    return bytes[kind];
}
INLINE uint16_t word(const uint8_t *from) { return (uint16_t)(from[0] | from[1] << 8); }

INLINE One read_one(const int kind, const uint8_t *row, int64_t b) {
    One one;
    const uint8_t *from = row + (in_two_levels(kind) ? b / PER : b) * file_bytes(kind);
    const int s = (int)(b % PER);
    if (kind == Q8_0) {
        one.own[0] = word(from);
        memcpy(one.code, from + 2, SPAN);
    } else if (!in_two_levels(kind)) {
        const int least = has_least(kind), five = code_bits(kind) == 5;
        const uint8_t *high = from + (least ? 4 : 2), *codes = high + (five ? 4 : 0);
        const uint32_t bits = high[0] | high[1] << 8 | high[2] << 16 | (uint32_t)high[3] << 24;
        one.own[0] = word(from), one.own[1] = word(from + 2);
        for (int i = 0; i < 16; i++) {
            one.code[i] = (codes[i] & 15) ^ (kind == Q4_0 ? 8 : 0);
            one.code[i + 16] = codes[i] >> 4 ^ (kind == Q4_0 ? 8 : 0);
        }
        if (five) for (int i = 0; i < SPAN; i++) one.code[i] |= (bits >> i & 1) << 4;
    } else if (kind == Q6_K) {
        const int half = s / 4, quarter = s % 4;
        const uint8_t *low = from + half * 64 + quarter % 2 * 32, *high = from + 128 + half * 32;
        for (int i = 0; i < SPAN; i++)
            one.code[i] = (low[i] >> quarter / 2 * 4 & 15) | (high[i] >> 2 * quarter & 3) << 4;
        one.own[0] = word(from + 192 + 2 * s);
        one.head[0] = word(from + 208);
    } else {
        const uint8_t *scales = from + 4, *high = from + 16;
        const uint8_t *codes = from + (kind == Q5_K ? 48 : 16) + s / 2 * 32;
        for (int i = 0; i < SPAN; i++) one.code[i] = codes[i] >> s % 2 * 4 & 15;
        if (kind == Q5_K) for (int i = 0; i < SPAN; i++) one.code[i] |= (high[i] >> s & 1) << 4;
        one.head[0] = word(from), one.head[1] = word(from + 2);
        const int scale = s < 4 ? scales[s] & 63 : (scales[s + 4] & 15) | scales[s - 4] >> 6 << 4;
        const int least = s < 4 ? scales[s + 4] & 63 : scales[s + 4] >> 4 | scales[s] >> 6 << 4;
        one.own[0] = (uint16_t)(scale | least << 8);
    }
    return one;
}

/* Some bits of four numbers, each in 16 bits, side by side. */
INLINE uint16_t squeeze(uint64_t x, const int bits) {
    const uint64_t one = (1u << bits) - 1, two = (1u << 2 * bits) - 1;
    x &= one * 0x0001000100010001;
    x = (x | x >> (16 - bits)) & two * 0x0000000100000001;
    return (uint16_t)(x | x >> (32 - 2 * bits));
}

INLINE void write_one(const int kind, const One *one, int o, char *panel, int64_t b) {
    char *block = panel + block_at(kind, b), *head = panel + block_at(kind, b / PER * PER) - head_bytes(kind);
    uint16_t *to = (uint16_t *)block + 2 * o, high[2][2] = {{0}};
    for (int part = 0; part < 4; part++) {
        uint64_t codes;
        memcpy(&codes, one->code + 8 * part, sizeof codes);
        for (int odd = 0; odd < 2; odd++) {
            const uint64_t four = codes >> 8 * odd;
            if (kind == Q8_0) {
                to[(2 * part) * 32 + odd] = squeeze(four & 0xffffffff, 8);
                to[(2 * part + 1) * 32 + odd] = squeeze(four >> 32, 8);
                continue;
            }
            to[part * 32 + odd] = squeeze(four, 4);
            if (code_bits(kind) == 5) high[0][odd] |= squeeze(four >> 4, 1) << 4 * part;
            if (code_bits(kind) == 6) high[part / 2][odd] |= squeeze(four >> 4, 2) << 8 * (part % 2);
        }
    }
    for (int odd = 0; odd < 2; odd++) {
        if (code_bits(kind) == 5 || code_bits(kind) == 6) to[4 * 32 + odd] = high[0][odd];
        if (code_bits(kind) == 6) to[5 * 32 + odd] = high[1][odd];
    }
    uint16_t *own = (uint16_t *)(block + code_bytes(kind)) + o;
    own[0] = one->own[0];
    if (has_least(kind) && !in_two_levels(kind)) own[GROUP] = one->own[1];
    if (in_two_levels(kind) && b % PER == 0) {
        ((uint16_t *)head)[o] = one->head[0];
        if (has_least(kind)) ((uint16_t *)head)[o + GROUP] = one->head[1];
    }
}

/* One group. `row` lists where its outputs begin; fewer than GROUP are filled up with zeros. */
INLINE void store_group(const int kind, const uint8_t *const *row, int count, int64_t inputs, char *to) {
    if (count < GROUP) memset(to, 0, group_bytes(kind, inputs));
    if (!is_coded(kind)) {
        for (int o = 0; o < count; o++)
            for (int64_t i = 0; i < inputs; i++) {
                if (kind == F32) ((float *)to)[i * GROUP + o] = ((const float *)row[o])[i];
                else ((bf16 *)to)[(i / 2 * GROUP + o) * 2 + i % 2] = ((const bf16 *)row[o])[i];
            }
        if (kind == BF16 && inputs % 2)
            for (int o = 0; o < GROUP; o++) ((bf16 *)to)[(inputs / 2 * GROUP + o) * 2 + 1] = 0;
        return;
    }
    for (int64_t b = 0; b < (inputs + SPAN - 1) / SPAN; b++)
        for (int o = 0; o < count; o++) {
            const One one = read_one(kind, row[o], b);
            write_one(kind, &one, o, to, b);
        }
}

/* Lay out a matrix [outputs, row_bytes]: as blocks of a GGUF file, or as numbers. `order`, if given,
   lists which row each output is. `to` has outpace_group_bytes(kind, inputs) per group. */
void outpace_store(int64_t kind, const uint8_t *from, int64_t row_bytes, const int64_t *order,
                   int64_t outputs, int64_t inputs, char *to, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t g = 0; g < (outputs + GROUP - 1) / GROUP; g++) {
        const uint8_t *row[GROUP];
        const int64_t left = outputs - g * GROUP, count = left < GROUP ? left : GROUP;
        for (int64_t o = 0; o < count; o++)
            row[o] = from + (order ? order[g * GROUP + o] : g * GROUP + o) * row_bytes;
        char *group = to + g * group_bytes((int)kind, inputs);
#define KIND(kind)                                                                                \
    case kind: store_group(kind, row, (int)count, inputs, group); break
        switch (kind) {
        KIND(F32);
        KIND(BF16);
        KIND(Q4_0);
        KIND(Q4_1);
        KIND(Q5_0);
        KIND(Q5_1);
        KIND(Q8_0);
        KIND(Q4_K);
        KIND(Q5_K);
        KIND(Q6_K);
        }
#undef KIND
    }
}

int64_t outpace_group_bytes(int64_t kind, int64_t inputs) { return group_bytes((int)kind, inputs); }

/* Codes times scales, and then least values: two roundings, which compilers shall not make one. */
static __attribute__((noinline)) void scaled(const Wide *wide, const int halves, float *out) {
    for (int i = 0; i < SPAN; i++)
        for (int o = 0; o < GROUP; o++) {
            const int16_t q = ((const int16_t *)wide->q)[(i / 2 * GROUP + o) * 2 + i % 2];
            out[i * GROUP + o] = q * ((const float *)wide->scale[i * halves / SPAN])[o];
        }
}
static __attribute__((noinline)) void lifted(const Wide *wide, float *out) {
    for (int i = 0; i < SPAN * GROUP; i++) out[i] += ((const float *)wide->least)[i % GROUP];
}

/* The numbers that a matrix stands for, [outputs, inputs], float32. */
void outpace_dense(const Matrix *m, float *out, int64_t threads) {
    const int kind = (int)m->kind;
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t g = 0; g < groups_of(m); g++) {
        const char *panel = (const char *)m->weights + g * group_bytes(kind, m->inputs);
        const int64_t left = m->outputs - g * GROUP, count = left < GROUP ? left : GROUP;
        for (int64_t b = 0; b < blocks_of(m); b++) {
            float one[SPAN * GROUP];
            Wide wide;
#define KIND(kind)                                                                                \
    case kind: widen_block(kind, panel, b, &wide); break
            switch (kind) {
            KIND(Q4_0);
            KIND(Q4_1);
            KIND(Q5_0);
            KIND(Q5_1);
            KIND(Q8_0);
            KIND(Q4_K);
            KIND(Q5_K);
            KIND(Q6_K);
            }
#undef KIND
            const int64_t here = m->inputs - b * SPAN < SPAN ? m->inputs - b * SPAN : SPAN;
            if (is_coded(kind)) {
                scaled(&wide, kind == Q6_K ? 2 : 1, one);
                if (has_least(kind)) lifted(&wide, one);
            } else for (int64_t i = 0; i < here; i++)
                for (int o = 0; o < GROUP; o++) {
                    const int64_t in = b * SPAN + i;
                    if (kind == F32) one[i * GROUP + o] = ((const float *)panel)[in * GROUP + o];
                    else one[i * GROUP + o] = widened(((const bf16 *)panel)[(in / 2 * GROUP + o) * 2 + in % 2]);
                }
            for (int64_t o = 0; o < count; o++)
                for (int64_t i = 0; i < here; i++)
                    out[(g * GROUP + o) * m->inputs + b * SPAN + i] = one[i * GROUP + o];
        }
    }
}
