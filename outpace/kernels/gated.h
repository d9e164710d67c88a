/* An MLP's gate: a product of two matrices, an activation of the first half times the second, and a product of
   that. Whoever computes some outputs of both matrices gates them too, while they are in its caches, and writes them
   as the next product wants its rows. Results are those of one operation after the other, bit for bit. */

#pragma once

enum { GATED_NUMBERS = 1 << 14 }; /* of the two matrices that a thread holds at a time; a quarter to twice as many make
                                     less than 1 % */

/* Some outputs of a matrix, whole groups. */
static Matrix outputs_of(const Matrix *m, int64_t first, int64_t count) {
    Matrix some = *m;
    some.outputs = count;
    some.weights = (const char *)m->weights + first / group_size((int)m->kind) * group_bytes((int)m->kind, m->inputs);
    if (m->bias) some.bias = m->bias + first;
    return some;
}

/* Of the gate or of its factor: these may be one matrix. */
static Matrix half_of(const Op *op, int half, int64_t first, int64_t count) {
    if (op->parts == 1) return outputs_of(op->part, half * op[1].width + first, count);
    return outputs_of(op->part + half, first, count);
}

static int64_t gated_pieces(const Program *p, const Op *op) {
    const Product product = product_of(p, op);
    const Matrix half = half_of(op, 0, 0, op[1].width);
    if (owns_rows(&product)) return product.threads;
    return product.rows ? pieces_in(&product, &half) : 0;
}

static void gated_piece(const void *context, const void *self, int64_t piece) {
    const Program *p = context;
    const Op *op = self, *gated = op + 1;
    const Product product = product_of(p, op), next = product_of(p, op + 2);
    const int64_t width = gated->width;
    int64_t at[OPERANDS], span = 0, stop = width / SPAN, above = 0, below = product.rows;
    const Matrix *first[OPERANDS] = {0};
    spread(op->part, op->parts, product.rows, at, first);
    if (owns_rows(&product)) own_rows(&product, piece, &above, &below);
    else part_of(width / SPAN, gated_pieces(p, op), piece, &span, &stop);
    const int64_t rows = below - above;
    float *both = (float *)product.y + 2 * (above * width + rows * span * SPAN); /* a place of its own */
    int64_t most = GATED_NUMBERS / (2 * SPAN * rows);
    if (most < 1) most = 1;
    for (int64_t spans; span < stop; span += spans) {
        spans = stop - span < most ? stop - span : most;
        const int64_t some = spans * SPAN;
        for (int i = 0; i < 2; i++) {
            const Matrix part = half_of(op, i, span * SPAN, some);
            const Result own = {both + i * some, 2 * some, 0, 1};
            const char *operands = operands_of(&part, product.operands + at[product_operands(part.kind)], above);
            product_piece(&part, operands, rows, own, 0, groups_of(&part));
        }
        for (int64_t row = 0; row < rows; row++) {
            float *own = both + row * 2 * some;
            if (gated->index == SILU) gate(own, own, some, 0, SILU);
            else gate(own, own, some, 0, GELU_TANH);
            for (int64_t i = 0; i < spans; i++)
                prepare_span(next.part, own + i * SPAN, product.rows, above + row, span + i, next.operands);
        }
    }
}
