/* A pass in one call: a list of operations, which models/program.py and models/plan.py make, over a team of threads.

   Rows lie one after another in buffers of float32. What a row gets depends on that row and on
   what it sees, bit for bit: not on the rows beside it and not on the number of threads. */

#include "attend.h"
#include "choose.h"
#include "draws.c"
#include "move.h"
#include "products.c"
#include "rowwise.h"
#include "team.h"
#include "truncate.h"

/* operations.py has the same lists. */
enum { NORM, PRODUCT, TURN, ATTEND, GATE, ADD, COPY, PICK, EMBED, BEST, BEND, ROUTE, UP, DOWN, MIX };

typedef struct {
    int64_t kind;
    int64_t rows;  /* which of the counts of rows */
    int64_t from;  /* buffer that is read */
    int64_t to;    /* buffer that is written */
    int64_t more;  /* NORM, ADD: buffer to be added to `from` first, or -1; PRODUCT, UP, DOWN: operands;
                      TURN: how many heads of queries are normed as one, and keys as another, or 0 */
    int64_t width; /* numbers of a row of `to`; TURN: of a head */
    int64_t index; /* ATTEND: which pass; TURN: which table; GATE, DOWN: which activation */
    int64_t layer; /* ATTEND: of keys and values */
    int64_t parts; /* PRODUCT: matrices, whose outputs stand side by side; UP, DOWN: of an expert */
    int64_t from_stride, to_stride; /* from row to row; 0: rows lie side by side */
    int64_t experts, chosen, normed, routes; /* of mixtures: experts, those of a row, whether the weights of
                                                these are divided by their sum, buffer of `Routes` */
    const Matrix *part;
    const float *weight; /* NORM: NULL copies; TURN: of all heads, or NULL */
    float floor;         /* EMBED: a factor */
    float scale;         /* NORM, ADD: a factor of `more` */
} Op;

typedef struct {
    const Op *op;
    int64_t ops;
    void *const *buffer;
    const int64_t *rows;
    const int64_t *picked;
    const int64_t *ids, *positions; /* of all rows */
    const Pass *const *pass;
    const float *const *turn; /* per table [positions, width]: cosines and sines of pairs */
    char *keys, *values;
    int64_t key_layer, value_layer; /* bytes */
    int64_t threads;
    int64_t heads, turned;          /* of queries, keys and values; of those that rotate */
} Program;

INLINE float *row_of(const Program *p, int64_t buffer, int64_t row, int64_t stride) {
    return (float *)p->buffer[buffer] + row * stride;
}
INLINE const float *row_from(const Program *p, const Op *op, int64_t row, int64_t width) {
    return row_of(p, op->from, row, op->from_stride ? op->from_stride : width);
}
INLINE float *row_to(const Program *p, const Op *op, int64_t row, int64_t width) {
    return row_of(p, op->to, row, op->to_stride ? op->to_stride : width);
}
static int64_t rows_of(const Program *p, const Op *op) { return p->rows[op->rows]; }

#define ROWS(numbers)                                                                             \
    const Program *p = context;                                                                   \
    const Op *op = self;                                                                          \
    const int64_t width = op->width;                                                              \
    int64_t row, stop;                                                                            \
    part_of(rows_of(p, op), pieces_of(rows_of(p, op), numbers), piece, &row, &stop);              \
    for (; row < stop; row++)

static void norm_rows(const void *context, const void *self, int64_t piece) {
    ROWS(width) {
        const float *more = op->more < 0 ? NULL : row_of(p, op->more, row, width);
        if (!op->weight) {
            float *x = (float *)row_from(p, op, row, width);
            for (int64_t i = 0; more && i < width; i++) x[i] += op->scale * more[i];
            memcpy(row_to(p, op, row, width), x, 4 * width);
            continue;
        }
        norm((float *)row_from(p, op, row, width), more, op->scale, op->weight, op->floor,
             row_to(p, op, row, width), width, 0, 0);
    }
}

static void turn_rows(const void *context, const void *self, int64_t piece) {
    ROWS(p->heads * width) {
        float *own = row_of(p, op->to, row, p->heads * width);
        const float *turn = p->turn[op->index] + p->positions[row] * width;
        if (op->more > 0) {
            const int64_t q = op->more * width, k = p->turned * width - q;
            norm(own, NULL, 1, op->weight, op->floor, own, q, 0, 0);
            norm(own + q, NULL, 1, op->weight + q, op->floor * sqrtf((float)k / q), own + q, k, 0, 0);
        }
        for (int64_t head = 0; head < p->turned; head++, own += width) {
            if (op->weight && op->more <= 0)
                norm(own, NULL, 1, op->weight + head * width, op->floor, own, width, 0, 0);
            rotate(own, turn, width);
        }
    }
}

static void gate_rows(const void *context, const void *self, int64_t piece) {
    ROWS(width) {
        const float *from = row_from(p, op, row, 2 * width);
        if (op->index == SILU) gate(from, row_to(p, op, row, width), width, 0, SILU);
        else gate(from, row_to(p, op, row, width), width, 0, GELU_TANH);
    }
}

static void add_more(const void *context, const void *self, int64_t piece) {
    ROWS(width) {
        float *to = row_to(p, op, row, width);
        const float *more = row_of(p, op->more, row, width);
        for (int64_t i = 0; i < width; i++) to[i] += op->scale * more[i];
    }
}

static void bend_rows(const void *context, const void *self, int64_t piece) {
    ROWS(width) bend(row_from(p, op, row, width), row_to(p, op, row, width), width);
}

static void copy_rows(const void *context, const void *self, int64_t piece) {
    ROWS(width) {
        const int64_t from = op->kind == PICK ? p->picked[row] : row;
        memcpy(row_to(p, op, row, width), row_from(p, op, from, width), 4 * width);
    }
}

static void embed_rows(const void *context, const void *self, int64_t piece) {
    ROWS(width) {
        float *to = row_to(p, op, row, width);
        const int64_t id = p->ids[row], size = group_size((int)op->part->kind);
        dense_outputs(op->part, id / size, id % size, id % size + 1, to);
        for (int64_t i = 0; i < width; i++) to[i] *= op->floor;
    }
}

static void best_rows(const void *context, const void *self, int64_t piece) {
    ROWS(width) best(row_of(p, op->from, row, width), width, (double *)p->buffer[op->to] + 2 * row);
}

/* Whether this operation and the two behind it are the gate of an MLP and its products; see gated.h. */
static int is_gated(const Program *p, const Op *op) {
    const Op *gate = op + 1, *next = op + 2;
    if (next >= p->op + p->ops || op->kind != PRODUCT || gate->kind != GATE || next->kind != PRODUCT) return 0;
    const int64_t width = gate->width;
    const int halves = op->parts == 1 ? op->part->outputs == 2 * width : op->parts == 2 && op->part->outputs == width;
    return halves && width % SPAN == 0 && op->width == 2 * width && next->parts == 1 && next->part->inputs == width &&
           gate->from == op->to && next->from == gate->to && gate->rows == op->rows && next->rows == op->rows &&
           !(op->to_stride | gate->from_stride | gate->to_stride | next->from_stride);
}
static int is_gate(const Program *p, const Op *op) { return op > p->op && is_gated(p, op - 1); }
static int is_behind_gate(const Program *p, const Op *op) { return op > p->op + 1 && is_gated(p, op - 2); }

static Product product_of(const Program *p, const Op *op) {
    return (Product){.part = op->part, .parts = op->parts, .x = p->buffer[op->from],
                     .x_stride = op->from_stride ? op->from_stride : op->part->inputs,
                     .rows = rows_of(p, op), .y = p->buffer[op->to],
                     .stride = op->to_stride ? op->to_stride : op->width,
                     .operands = p->buffer[is_behind_gate(p, op) ? op->from : op->more], .threads = p->threads};
}
static void prepare_rows(const void *context, const void *self, int64_t piece) {
    const Product product = product_of(context, self);
    prepare_piece(&product, piece);
}
static void multiply_rows(const void *context, const void *self, int64_t piece) {
    const Product product = product_of(context, self);
    multiply_piece(&product, piece);
}

#include "gated.h"
#include "experts.h"

#define LAYER                                                                                     \
    const Program *p = context;                                                                   \
    const Op *op = self;                                                                          \
    const Pass *pass = p->pass[op->index];                                                        \
    char *keys = p->keys + op->layer * p->key_layer;                                              \
    char *values = p->values + op->layer * p->value_layer;

static void store_new(const void *context, const void *self, int64_t piece) {
    LAYER keep_piece(pass, piece, keys, values);
}

/* Whether the next operation begins with the rows that this one writes, cut in the same way: a product with
   its operands, attention with new keys. Then one thread does both, with no hand-over between. */
static int feeds(const Program *p, const Op *op) {
    const Op *next = op + 1;
    if (next == p->op + p->ops || next->rows != op->rows || is_gate(p, op)) return 0;
    if (op->kind == NORM || op->kind == GATE)
        return next->kind == PRODUCT && next->from == op->to && next->part->inputs == op->width;
    const Pass *pass = next->kind == ATTEND ? p->pass[next->index] : NULL;
    return op->kind == TURN && pass && !pass->choices && pass->news == rows_of(p, op) &&
           (pass->group + 2) * pass->kv * pass->width == p->heads * op->width;
}
static int is_fed(const Program *p, const Op *op) { return op > p->op && feeds(p, op - 1); }
static void feed_rows(const void *context, const void *self, int64_t piece) {
    const Op *op = self;
    (op->kind == NORM ? norm_rows : op->kind == GATE ? gate_rows : turn_rows)(context, op, piece);
    (op->kind == TURN ? store_new : prepare_rows)(context, op + 1, piece);
}

static void attend_blocks(const void *context, const void *self, int64_t piece) {
    LAYER block_piece(pass, piece, op->layer, keys, values);
}
static void merge_blocks(const void *context, const void *self, int64_t piece) {
    const Program *p = context;
    merge_piece(p->pass[((const Op *)self)->index], piece);
}

static void ask_query(const void *context, const void *self, int64_t piece) {
    const Op *op = self;
    ask(((const Program *)context)->pass[op->index], piece, op->layer);
}
static void score_keys(const void *context, const void *self, int64_t piece) {
    LAYER
    (void)values;
    score_piece(pass, piece, op->layer, keys);
}
static void top_scores(const void *context, const void *self, int64_t piece) {
    const Op *op = self;
    top_piece(((const Program *)context)->pass[op->index], piece, op->layer);
}
static void choose_rows(const void *context, const void *self, int64_t piece) {
    const Op *op = self;
    choose_piece(((const Program *)context)->pass[op->index], piece, op->layer);
}

/* An operation is up to seven tasks. */
static Task *plan(const Program *p, const Op *op, Task *task) {
    const int64_t rows = rows_of(p, op), width = op->width;
    if (feeds(p, op)) {
        *task++ = (Task){feed_rows, op, pieces_of(rows, op->kind == TURN ? p->heads * width : width)};
        return task;
    }
    switch (op->kind) {
    case NORM: *task++ = (Task){norm_rows, op, pieces_of(rows, width)}; break;
    case TURN: *task++ = (Task){turn_rows, op, pieces_of(rows, p->heads * width)}; break;
    case GATE: if (!is_gate(p, op)) *task++ = (Task){gate_rows, op, pieces_of(rows, width)}; break;
    case ADD: *task++ = (Task){add_more, op, pieces_of(rows, width)}; break;
    case BEND: *task++ = (Task){bend_rows, op, pieces_of(rows, width)}; break;
    case COPY:
    case PICK: *task++ = (Task){copy_rows, op, pieces_of(rows, width)}; break;
    case EMBED: *task++ = (Task){embed_rows, op, pieces_of(rows, width)}; break;
    case BEST: *task++ = (Task){best_rows, op, pieces_of(rows, width)}; break;
    case PRODUCT: {
        const Product product = product_of(p, op);
        const int prepared = is_fed(p, op) || is_behind_gate(p, op);
        if (!prepared) *task++ = (Task){prepare_rows, op, prepare_pieces(&product)};
        if (is_gated(p, op)) *task++ = (Task){gated_piece, op, gated_pieces(p, op)};
        else *task++ = (Task){multiply_rows, op, multiply_pieces(&product)};
        break;
    }
    case ATTEND:
        if (p->pass[op->index]->choices) {
            const Pass *pass = p->pass[op->index];
            *task++ = (Task){ask_query, op, pass->choices};
            *task++ = (Task){score_keys, op, score_pieces(pass)};
            *task++ = (Task){top_scores, op, pass->choices * pass->kv * pass->group};
            *task++ = (Task){choose_rows, op, pass->choices * pass->kv};
        }
        if (!is_fed(p, op)) *task++ = (Task){store_new, op, keep_pieces(p->pass[op->index])};
        *task++ = (Task){attend_blocks, op, block_pieces(p->pass[op->index])};
        *task++ = (Task){merge_blocks, op, merge_pieces(p->pass[op->index])};
        break;
    default: task = plan_experts(p, op, task);
    }
    return task;
}

/* Run all operations; gives how many threads were used. */
int64_t outpace_run(const Program *p) {
    Task task[7 * p->ops + 1], *end = task;
    for (int64_t i = 0; i < p->ops; i++) end = plan(p, p->op + i, end);
    return run_tasks(task, end - task, p, p->threads);
}

#include "levels.h"
#include "trees.h"
#include "drawn.h"

/* Store the new keys and values of a layer, and attend. */
void outpace_attend(const Pass *pass, int64_t layer, void *keys, void *values,
                    int64_t key_layer, int64_t value_layer, int64_t threads) {
    const Op op = {.kind = ATTEND, .layer = layer};
    const Program p = {.op = &op, .ops = 1, .pass = &pass, .rows = &pass->news, .keys = keys,
                       .values = values, .key_layer = key_layer, .value_layer = value_layer,
                       .threads = threads};
    outpace_run(&p);
}

/* Rows apart from a pass, of either dtype. */
typedef struct {
    float *x;
    const void *more;
    const float *weight;
    float floor, by;
    void *out;
    int64_t stride, rows, width, half_more, half_out, kind;
} Apart;

static void norm_apart(const void *context, const void *self, int64_t piece) {
    const Apart *a = self;
    int64_t row, stop;
    part_of(a->rows, pieces_of(a->rows, a->width), piece, &row, &stop);
    for (; row < stop; row++) {
        float *own = a->x + row * a->width;
        Row add = a->more ? past(a->more, row * a->width, a->half_more) : NULL;
        void *to = (void *)past(a->out, row * a->stride, a->half_out);
        if (a->half_out && a->half_more) norm(own, add, a->by, a->weight, a->floor, to, a->width, 1, 1);
        else if (a->half_out) norm(own, add, a->by, a->weight, a->floor, to, a->width, 0, 1);
        else if (a->half_more) norm(own, add, a->by, a->weight, a->floor, to, a->width, 1, 0);
        else norm(own, add, a->by, a->weight, a->floor, to, a->width, 0, 0);
    }
}

static void gate_apart(const void *context, const void *self, int64_t piece) {
    const Apart *a = self;
    int64_t row, stop;
    part_of(a->rows, pieces_of(a->rows, 2 * a->width), piece, &row, &stop);
    for (; row < stop; row++) {
        Row own = past(a->more, 2 * row * a->width, a->half_out);
        void *to = (void *)past(a->out, row * a->width, a->half_out);
        if (a->kind == SILU) {
            if (a->half_out) gate(own, to, a->width, 1, SILU);
            else gate(own, to, a->width, 0, SILU);
        } else {
            if (a->half_out) gate(own, to, a->width, 1, GELU_TANH);
            else gate(own, to, a->width, 0, GELU_TANH);
        }
    }
}

/* x [rows, width] float32; more [rows, width], of which `by` times is added; weight [width]; out [rows, stride].
   `half_more` and `half_out` say what is bfloat16. */
void outpace_norm(float *x, const void *more, float by, const float *weight, float floor, void *out,
                  int64_t stride, int64_t rows, int64_t width, int64_t half_more,
                  int64_t half_out, int64_t threads) {
    const Apart a = {x, more, weight, floor, by, out, stride, rows, width, half_more, half_out, 0};
    const Task task = {norm_apart, &a, pieces_of(rows, width)};
    run_tasks(&task, 1, NULL, threads);
}

/* from [rows, 2 * width]; out [rows, width]; both bfloat16 if `half` is set. */
void outpace_gate(const void *from, void *out, int64_t rows, int64_t width, int64_t half,
                  int64_t kind, int64_t threads) {
    const Apart a = {NULL, from, NULL, 0, 1, out, width, rows, width, 0, half, kind};
    const Task task = {gate_apart, &a, pieces_of(rows, 2 * width)};
    run_tasks(&task, 1, NULL, threads);
}

/* Rows for which quantized weights are widened once. */
int64_t outpace_tile(void) { return BYTEWISE ? TALL_BYTES : MANY; }
