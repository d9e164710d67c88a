/* Mixtures of experts: a router scores all experts for every row, the row goes through the best few, and what
   they gave is added up.

   Rows are put in the order of experts, each row once for every expert that it goes through. So an expert's
   rows lie together, its weights are read once for all of them, and threads take pieces of experts as they
   come. How many experts a pass touches is known only when it runs: there are pieces for as many as it can
   touch at most, and those left over do nothing.

   A row's experts depend on its scores alone, the lowest number of equal ones first, and what these gave is
   added up in the order of their scores. So a row gets the same bits beside any other rows.

   Places are numbered from 0 to rows * chosen, in the order of experts; slots number the experts that the pass
   touches. All numbers of a pass are in one buffer, which the router writes and the others read. */

#pragma once

typedef struct {
    int64_t *slots;         /* how many experts are touched */
    int64_t *expert, *from; /* of each slot: which expert, and its first place; behind the last one all places */
    int64_t *pick, *place;  /* [rows, chosen]: which expert, and which place that is */
    int64_t *row, *slot;    /* of each place */
    int64_t *next;          /* of each expert: rows, and then its next place */
    float *share;           /* [rows, chosen]: weight of what it gives */
} Routes;

INLINE int64_t places_of(const Program *p, const Op *op) { return rows_of(p, op) * op->chosen; }
INLINE int64_t most_slots(const Program *p, const Op *op) {
    return places_of(p, op) < op->experts ? places_of(p, op) : op->experts;
}

/* models/buffers.py makes room for this. */
static Routes routes_of(const Program *p, const Op *op) {
    const int64_t places = places_of(p, op), slots = most_slots(p, op);
    Routes r = {.slots = p->buffer[op->routes]};
    r.expert = r.slots + 1;
    r.from = r.expert + slots;
    r.pick = r.from + slots + 1;
    r.place = r.pick + places;
    r.row = r.place + places;
    r.slot = r.row + places;
    r.next = r.slot + places;
    r.share = (float *)(r.next + op->experts);
    return r;
}

/* Choose the experts of rows. A chosen one's score is struck, so that the next one is the best of the others. */
static void route_rows(const void *context, const void *self, int64_t piece) {
    const Program *p = context;
    const Op *op = self;
    const Routes r = routes_of(p, op);
    const int64_t experts = op->experts, chosen = op->chosen, rows = rows_of(p, op);
    int64_t row, stop;
    part_of(rows, pieces_of(rows, experts * chosen), piece, &row, &stop);
    for (; row < stop; row++) {
        float *score = (float *)row_from(p, op, row, experts), *share = r.share + row * chosen;
        const double most = largest(score, experts);
        double sum = 0, each[chosen];
        for (int64_t i = 0; !op->normed && i < experts; i++) sum += exp(score[i] - most);
        for (int64_t n = 0; n < chosen; n++) {
            int64_t at = 0;
            for (int64_t i = 1; i < experts; i++) at = score[i] > score[at] ? i : at;
            r.pick[row * chosen + n] = at;
            each[n] = exp(score[at] - most);
            if (op->normed) sum += each[n];
            score[at] = -INFINITY;
        }
        for (int64_t n = 0; n < chosen; n++) share[n] = (float)(each[n] / sum);
    }
}

/* Put the rows of a pass in the order of experts. */
static void sort_places(const void *context, const void *self, int64_t piece) {
    const Program *p = context;
    const Op *op = self;
    const Routes r = routes_of(p, op);
    const int64_t places = places_of(p, op);
    int64_t at = 0;
    (void)piece;
    memset(r.next, 0, op->experts * sizeof *r.next);
    for (int64_t i = 0; i < places; i++) r.next[r.pick[i]]++;
    *r.slots = 0;
    for (int64_t e = 0; e < op->experts; e++) {
        const int64_t rows = r.next[e];
        if (!rows) continue;
        r.expert[*r.slots] = e, r.from[*r.slots] = at, r.next[e] = at;
        for (const int64_t end = at + rows; at < end; at++) r.slot[at] = *r.slots;
        ++*r.slots;
    }
    r.from[*r.slots] = places;
    for (int64_t i = 0; i < places; i++) {
        r.place[i] = r.next[r.pick[i]]++;
        r.row[r.place[i]] = i / op->chosen;
    }
}

/* The matrices of the expert in a slot, and its rows: of UP those of the pass, of DOWN those that UP gave. One
   row that all experts read has operands once. */
INLINE int is_shared(const Program *p, const Op *op) { return op->kind == UP && rows_of(p, op) == 1; }
static Product expert_of(const Program *p, const Op *op, const Routes *r, int64_t slot) {
    const Matrix *part = op->part + r->expert[slot] * op->parts;
    const int64_t from = r->from[slot], room = outpace_room(part, op->parts, 1);
    return (Product){.part = part, .parts = op->parts, .rows = r->from[slot + 1] - from,
                     .y = row_of(p, op->to, from, op->width), .stride = op->width,
                     .operands = (char *)p->buffer[op->more] + (is_shared(p, op) ? 0 : from * room)};
}

static int64_t expert_rows(const Program *p, const Op *op) {
    return is_shared(p, op) ? 1 : places_of(p, op);
}
static void prepare_experts(const void *context, const void *self, int64_t piece) {
    const Program *p = context;
    const Op *op = self;
    const Routes r = routes_of(p, op);
    const int64_t inputs = op->part->inputs, count = expert_rows(p, op);
    int64_t place, stop, at[OPERANDS];
    part_of(count, pieces_of(count, inputs), piece, &place, &stop);
    for (; place < stop; place++) {
        const int64_t slot = r.slot[place], nth = place - r.from[slot];
        const Product own = expert_of(p, op, &r, slot);
        const Matrix *first[OPERANDS] = {0};
        float *x = row_of(p, op->from, op->kind == UP ? r.row[place] : place, op->kind == UP ? inputs : 2 * inputs);
        if (op->kind == DOWN && op->index == SILU) gate(x, x, inputs, 0, SILU);
        else if (op->kind == DOWN) gate(x, x, inputs, 0, GELU_TANH);
        spread(own.part, own.parts, own.rows, at, first);
        for (int kind = 0; kind < OPERANDS; kind++)
            if (first[kind])
                product_prepare(first[kind], x, 0, 0, own.rows, nth, nth + 1, own.operands + at[kind]);
    }
}

/* Pieces of each matrix of an expert: several for each thread, if there are few experts. */
enum { EACH_THREAD = 4 };
static int64_t expert_cuts(const Program *p, const Op *op) {
    const Matrix *m = op->part;
    const int64_t matrices = most_slots(p, op) * op->parts, wanted = EACH_THREAD * p->threads;
    const int64_t longest = (m->outputs + LONG - 1) / LONG, most = m->outputs / FEWEST;
    int64_t cuts = matrices ? (wanted + matrices - 1) / matrices : 1;
    if (cuts < longest) cuts = longest;
    if (cuts > most) cuts = most;
    return cuts < 1 ? 1 : cuts;
}
static void multiply_experts(const void *context, const void *self, int64_t piece) {
    const Program *p = context;
    const Op *op = self;
    const Routes r = routes_of(p, op);
    const int64_t cuts = expert_cuts(p, op), slot = piece / (op->parts * cuts), nth = piece / cuts % op->parts;
    int64_t at[OPERANDS], column = 0, group, stop;
    if (slot >= *r.slots) return;
    const Product own = expert_of(p, op, &r, slot);
    const Matrix *first[OPERANDS] = {0}, *m = own.part + nth;
    for (int64_t i = 0; i < nth; i++) column += own.part[i].outputs;
    spread(own.part, own.parts, own.rows, at, first);
    part_of(groups_of(m), cuts, piece % cuts, &group, &stop);
    const Result y = {(float *)own.y + column, own.stride, 0, 0};
    product_piece(m, own.operands + at[product_operands(m->kind)], own.rows, y, group, stop);
}

/* Add up what the experts of each row gave. */
static void mix_rows(const void *context, const void *self, int64_t piece) {
    const Program *p = context;
    const Op *op = self;
    const Routes r = routes_of(p, op);
    const int64_t width = op->width, rows = rows_of(p, op), chosen = op->chosen;
    int64_t row, stop;
    part_of(rows, pieces_of(rows, width * chosen), piece, &row, &stop);
    for (; row < stop; row++) {
        float *to = row_of(p, op->to, row, width);
        for (int64_t n = 0; n < chosen; n++) {
            const float *from = row_of(p, op->from, r.place[row * chosen + n], width);
            const float share = r.share[row * chosen + n];
            for (int64_t i = 0; i < width; i += LANES)
                store(to + i, fused(load(from + i), all(share), n ? load(to + i) : (vec){0}));
        }
    }
}

/* The tasks of an operation on experts. */
static Task *plan_experts(const Program *p, const Op *op, Task *task) {
    const int64_t rows = rows_of(p, op);
    if (op->kind == ROUTE) {
        *task++ = (Task){route_rows, op, pieces_of(rows, op->experts * op->chosen)};
        *task++ = (Task){sort_places, op, rows > 0};
    } else if (op->kind == MIX) {
        *task++ = (Task){mix_rows, op, pieces_of(rows, op->width * op->chosen)};
    } else {
        const int64_t count = expert_rows(p, op);
        *task++ = (Task){prepare_experts, op, pieces_of(count, op->part->inputs)};
        *task++ = (Task){multiply_experts, op, most_slots(p, op) * op->parts * expert_cuts(p, op)};
    }
    return task;
}
