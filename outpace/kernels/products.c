/* Products of rows with matrices (products.h), to be called alone; and how matrices get into the
   layout that they are multiplied in. */

#pragma once

#include "products.h"
#include "team.h"

/* ---- Products ---- */

/* Some matrices of equal inputs, whose outputs stand side by side in y [rows, stride]. Matrices that
   want the same operands share them. */
typedef struct {
    const Matrix *part;
    int64_t parts;
    const void *x;
    int64_t x_stride, x_half, rows;
    void *y;
    int64_t stride, half;
    char *operands;
    int64_t threads;
} Product;

/* Groups of a piece. Behind each beginning the processor waits for weights, so a few rows have as few pieces as
   there are threads, of LONG outputs at most: nobody waits long for a thread that was stopped. Over MANY rows
   the processor computes, and more pieces end together. */
enum { FEWEST = 64, LONG = 2048 };
static int64_t cut(const Matrix *m, int64_t rows, int64_t threads) {
    const int64_t groups = groups_of(m), fewest = FEWEST / group_size((int)m->kind);
    const int64_t longest = (m->outputs + LONG * threads - 1) / (LONG * threads);
    const int64_t turns = 1 + rows / MANY < longest ? longest : 1 + rows / MANY;
    const int64_t piece = (groups + turns * threads - 1) / (turns * threads);
    return piece < fewest ? fewest : piece;
}

/* Where the operands of each kind are; gives the bytes of all. */
static int64_t spread(const Matrix *part, int64_t parts, int64_t rows, int64_t *at, const Matrix **first) {
    int64_t room = 0;
    for (int64_t i = 0; i < parts; i++) {
        const int kind = product_operands(part[i].kind);
        if (first[kind]) continue;
        first[kind] = part + i, at[kind] = room;
        room += product_room(part + i, rows);
    }
    return room;
}

/* Bytes that outpace_product wants as `operands`. */
int64_t outpace_room(const Matrix *part, int64_t parts, int64_t rows) {
    int64_t at[OPERANDS];
    const Matrix *first[OPERANDS] = {0};
    return spread(part, parts, rows, at, first);
}

static int64_t prepare_pieces(const Product *p) { return pieces_of(p->rows, p->part->inputs); }
static void prepare_piece(const Product *p, int64_t piece) {
    int64_t at[OPERANDS], row, stop;
    const Matrix *first[OPERANDS] = {0};
    spread(p->part, p->parts, p->rows, at, first);
    part_of(p->rows, prepare_pieces(p), piece, &row, &stop);
    for (int kind = 0; kind < OPERANDS; kind++)
        if (first[kind])
            product_prepare(first[kind], p->x, p->x_stride, (int)p->x_half, p->rows, row, stop,
                            p->operands + at[kind]);
}

/* Whether each thread computes all outputs of rows of its own, by matrix units. It then reads all weights, and finds
   in its cache what it wrote of the rows. With other outputs for each thread, 512 rows take 1.15 of a pass. */
enum { OWN_ROWS = 96 }; /* of a thread, at least */
static int owns_rows(const Product *p) {
    for (int64_t i = 0; i < p->parts; i++)
        if (!in_tiles(p->part + i)) return 0;
    return p->rows >= OWN_ROWS * p->threads;
}
/* Which rows a thread owns: whole tiles. */
static void own_rows(const Product *p, int64_t piece, int64_t *row, int64_t *stop) {
    part_of((p->rows + TILED - 1) / TILED, p->threads, piece, row, stop);
    *row *= TILED, *stop *= TILED;
    if (*stop > p->rows) *stop = p->rows;
}
/* Those of a row that a tile begins with; of row 0 for all kinds of matrices. */
static const char *operands_of(const Matrix *m, const char *operands, int64_t row) {
    return operands + row * m->inputs * (int64_t)sizeof(bf16);
}

static int64_t pieces_in(const Product *p, const Matrix *m) {
    const int64_t size = cut(m, p->rows, p->threads);
    return (groups_of(m) + size - 1) / size;
}
static int64_t multiply_pieces(const Product *p) {
    if (owns_rows(p)) return p->threads;
    int64_t pieces = 0;
    for (int64_t i = 0; p->rows && i < p->parts; i++) pieces += pieces_in(p, p->part + i);
    return pieces;
}
/* Which piece stands at a place. Where all matrices have as many, the first ones of all come first: who takes
   pieces from the front then computes a gate and its factor. */
static int64_t piece_at(const Product *p, int64_t place) {
    const int64_t each = pieces_in(p, p->part);
    for (int64_t i = 1; i < p->parts; i++)
        if (pieces_in(p, p->part + i) != each) return place;
    return place % p->parts * each + place / p->parts;
}
static void multiply_piece(const Product *p, int64_t place) {
    int64_t at[OPERANDS], column = 0, row, stop;
    const Matrix *first[OPERANDS] = {0};
    spread(p->part, p->parts, p->rows, at, first);
    if (owns_rows(p)) {
        own_rows(p, place, &row, &stop);
        for (const Matrix *m = p->part; m < p->part + p->parts; column += m++->outputs) {
            const Result y = {(void *)past(p->y, row * p->stride + column, (int)p->half), p->stride, (int)p->half, 1};
            product_piece(m, operands_of(m, p->operands, row), stop - row, y, 0, groups_of(m));
        }
        return;
    }
    int64_t piece = piece_at(p, place);
    for (const Matrix *m = p->part;; column += m++->outputs) {
        const int64_t groups = groups_of(m), size = cut(m, p->rows, p->threads);
        const int64_t here = pieces_in(p, m), from = piece * size;
        if (piece < here) {
            const Result y = {(void *)past(p->y, column, (int)p->half), p->stride, (int)p->half, 0};
            product_piece(m, p->operands + at[product_operands(m->kind)], p->rows, y, from,
                          from + size < groups ? from + size : groups);
            return;
        }
        piece -= here;
    }
}

static void prepare_alone(const void *context, const void *self, int64_t piece) {
    (void)context;
    prepare_piece(self, piece);
}
static void multiply_alone(const void *context, const void *self, int64_t piece) {
    (void)context;
    multiply_piece(self, piece);
}

/* Rows times some matrices of equal inputs; their outputs stand side by side in y [rows, stride]. */
void outpace_product(const Matrix *part, int64_t parts, const void *x, int64_t x_stride,
                     int64_t x_half, int64_t rows, void *y, int64_t stride, int64_t half,
                     void *operands, int64_t threads) {
    const Product p = {part, parts, x, x_stride, x_half, rows, y, stride, half, operands, threads};
    const Task task[] = {{prepare_alone, &p, prepare_pieces(&p)},
                         {multiply_alone, &p, multiply_pieces(&p)}};
    run_tasks(task, 2, NULL, threads);
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
                for (int i = 0; i < 2; i++) {
                    const uint64_t two = four >> 16 * i;
                    to[(2 * part + i) * 32 + odd] = (uint16_t)((two & 255) | (two >> 32 & 255) << 8);
                }
                continue;
            }
            to[part * 32 + odd] = squeeze(four, 4);
            const int more = code_bits(kind) - 4;
            if (more == 0) continue;
            /* Those of the first two pairs in the lower byte, of the others in the upper. */
            const uint16_t rest = squeeze(four >> 4, more), first = (1 << 2 * more) - 1;
            high[more == 1 ? 0 : part / 2][odd] |=
                ((rest & first) | rest >> 2 * more << 8) << 2 * part * more % 8;
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

/* One group. `row` lists where its outputs begin; fewer than it has are filled up with zeros. */
INLINE void store_group(const int kind, const uint8_t *const *row, int count, int64_t inputs, char *to) {
    const int size = group_size(kind);
    if (count < size) memset(to, 0, group_bytes(kind, inputs));
    if (!is_coded(kind)) {
        for (int o = 0; o < count; o++)
            for (int64_t i = 0; i < inputs; i++) {
                if (kind == F32) ((float *)to)[i * size + o] = ((const float *)row[o])[i];
                else ((bf16 *)to)[(i / 2 * size + o) * 2 + i % 2] = ((const bf16 *)row[o])[i];
            }
        if (kind == BF16 && inputs % 2)
            for (int o = 0; o < size; o++) ((bf16 *)to)[(inputs / 2 * size + o) * 2 + 1] = 0;
        return;
    }
    for (int64_t b = 0; b < (inputs + SPAN - 1) / SPAN; b++)
        for (int o = 0; o < count; o++) {
            const One one = read_one(kind, row[o], b);
            write_one(kind, &one, o, to, b);
        }
}

typedef struct {
    int64_t kind;
    const uint8_t *from;
    int64_t row_bytes;
    const int64_t *order;
    int64_t outputs, inputs;
    char *to;
} Storing;

static void store_piece(const void *context, const void *self, int64_t g) {
    (void)context;
    const Storing *s = self;
    const uint8_t *row[TWO_GROUPS];
    const int size = group_size((int)s->kind);
    const int64_t left = s->outputs - g * size, count = left < size ? left : size;
    for (int64_t o = 0; o < count; o++)
        row[o] = s->from + (s->order ? s->order[g * size + o] : g * size + o) * s->row_bytes;
    char *group = s->to + g * group_bytes((int)s->kind, s->inputs);
#define KIND(kind)                                                                                \
    case kind: store_group(kind, row, (int)count, s->inputs, group); break
    switch (s->kind) {
    KIND(F32);
    KIND(BF16);
    EACH_CODED(KIND);
    }
#undef KIND
}

/* Lay out a matrix [outputs, row_bytes]: as blocks of a GGUF file, or as numbers. `order`, if given,
   lists which row each output is. `to` has outpace_group_bytes(kind, inputs) per group. */
void outpace_store(int64_t kind, const uint8_t *from, int64_t row_bytes, const int64_t *order,
                   int64_t outputs, int64_t inputs, char *to, int64_t threads) {
    const Storing s = {kind, from, row_bytes, order, outputs, inputs, to};
    const Matrix m = {kind, outputs, inputs, to, NULL};
    const Task task = {store_piece, &s, groups_of(&m)};
    run_tasks(&task, 1, NULL, threads);
}

int64_t outpace_group_bytes(int64_t kind, int64_t inputs) { return group_bytes((int)kind, inputs); }

static void spell_out(const Wide *wide, const int halves, const int least, float *out) {
    for (int i = 0; i < SPAN; i++)
        for (int o = 0; o < GROUP; o++) {
            const int16_t q = ((const int16_t *)wide->q)[(i / 2 * GROUP + o) * 2 + i % 2];
            float *to = out + i * GROUP + o;
            *to = q * ((const float *)wide->scale[i * halves / SPAN])[o];
            if (least) *to += ((const float *)wide->least)[o];
        }
}

/* The numbers that outputs `first` to `last` of a group stand for, one output after the other. */
static void dense_outputs(const Matrix *m, int64_t group, int64_t first, int64_t last, float *out) {
    const int kind = (int)m->kind, size = group_size(kind);
    const char *panel = (const char *)m->weights + group * group_bytes(kind, m->inputs);
    for (int64_t b = 0; b < blocks_of(m); b++) {
        float one[SPAN * TWO_GROUPS];
        Wide wide;
#define KIND(kind)                                                                                \
    case kind: widen_block(kind, panel, b, &wide); break
        switch (kind) {
        EACH_CODED(KIND);
        }
#undef KIND
        const int64_t here = m->inputs - b * SPAN < SPAN ? m->inputs - b * SPAN : SPAN;
        if (is_coded(kind)) spell_out(&wide, kind == Q6_K ? 2 : 1, has_least(kind), one);
        else for (int64_t i = 0; i < here; i++)
            for (int64_t o = first; o < last; o++) {
                const int64_t in = b * SPAN + i;
                const bf16 *half = (const bf16 *)panel + (in / 2 * size + o) * 2 + in % 2;
                one[i * size + o] = kind == F32 ? ((const float *)panel)[in * size + o] : widened(*half);
            }
        for (int64_t o = first; o < last; o++)
            for (int64_t i = 0; i < here; i++)
                out[(o - first) * m->inputs + b * SPAN + i] = one[i * size + o];
    }
}

static void dense_piece(const void *to, const void *self, int64_t g) {
    const Matrix *m = self;
    const int size = group_size((int)m->kind);
    const int64_t left = m->outputs - g * size;
    dense_outputs(m, g, 0, left < size ? left : size, (float *)to + g * size * m->inputs);
}

/* The numbers that a matrix stands for, [outputs, inputs], float32. */
void outpace_dense(const Matrix *m, float *out, int64_t threads) {
    const Task task = {dense_piece, m, groups_of(m)};
    run_tasks(&task, 1, out, threads);
}
