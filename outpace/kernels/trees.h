/* Trees of guesses, all of their levels in one call.

   The first level runs a program on what waits. Every further one runs another on the nodes that were
   opened, each made from what the row of its parent gave. Between two levels trees grow by the rule of
   tree/dynamic.py, with the same sums in the same order: here are chosen guesses, in drawn.h drawn ones. Trees may
   have guesses to begin with, that others made: those grow by the rule of methods/hybrid/union.py. */

#pragma once

#include "see.h"

/* One tree. branching.py has the same list. */
typedef struct {
    int64_t nodes, depth, beam, fan; /* at most: nodes, levels, nodes opened at a level, children */
    int64_t pays;                    /* whether nodes and levels are weighed */
    double least;                    /* what the value of a guess has to be above */
    const double *row, *level;       /* prices, of every node and of every level */
    const double *temper;            /* what the logits of every level are divided by */
    int64_t planted;                 /* guesses to begin with: the first candidates */
    double *own, *said;              /* of these: the chance to be kept below the parent, by all and by the drafter */
    double bias, text, head;         /* how the two are weighed where a token is of both */
    int64_t draws;                   /* how guesses come to be, see drawn.h; of draws: */
    double temperature, sibling;     /* of the softmax; what another sibling of a race has to be worth more than */
    uint64_t key;                    /* what coins, or positions of races, are mixed into, */
    int64_t position;                /* and that of the pending token */
    int64_t truncated, top_k;        /* whether these leave less than all columns */
    double top_p, min_p;
    float *law;                      /* [groups, width]: distributions that were drawn from; where truncated */
    int64_t *support, *width;        /* the tokens of their entries, and how many each has */
    int64_t *group, groups;          /* for each node that was drawn below: it, and the row of its distribution */
    int64_t lead, offset;            /* rows of the slot's tail at first; position of the slot's row 0 */
    double *value;                   /* of every candidate: the chance to be reached and kept */
    int64_t *token, *parent;         /* in the end those of the nodes that stay */
    int64_t *seat, *out;             /* of expanded ones: row in the tail, and among what rows gave */
    int64_t *best;                   /* the most valuable candidates, best first, of equal ones the first */
    int64_t *open;                   /* nodes that are expanded next, ascending */
    int64_t *seated;                 /* nodes of the tail's rows behind the first ones, and see cut_tree */
    int64_t count, ranked, opens, seats; /* candidates, and how many of these lists are filled */
} Tree;

typedef struct {
    Program *program;
    const Program *first; /* of the first level: one row per tree is wanted */
    int64_t passes, trees;
    int64_t counts;             /* of rows, that the program has */
    int64_t lent, given, bytes; /* buffers of what a level reads and gives, or -1, and bytes of a row of it */
    char *gathered, *gave;      /* the rows that a level reads; what all levels gave */
    float *logits;              /* of every level */
    int64_t width, stride; /* columns that count, and numbers from row to row */
    int64_t tall;          /* rows that see together */
    const int64_t *window; /* of each pass; 0: none */
    Look *look;            /* of each tree; their tails have room */
    int64_t *position, *id;
    const int64_t *column; /* tokens of the columns; NULL: their places */
    float *spare;          /* [width], where something is drawn */
    Tree *tree;
} Trees;

enum { CHOSEN, SLOTS, RACES };

INLINE double worth(const Tree *g, int64_t node) { return node < 0 ? 1 : g->value[node]; }

static void rank_candidate(Tree *g, int64_t node) {
    const double value = g->value[node];
    int64_t at = g->ranked;
    if (at < g->nodes) g->ranked++;
    else if (value <= g->value[g->best[--at]]) return;
    for (; at > 0 && g->value[g->best[at - 1]] < value; at--) g->best[at] = g->best[at - 1];
    g->best[at] = node;
}

static int64_t add_candidate(Tree *g, int64_t parent, int64_t token, double value) {
    g->value[g->count] = value, g->token[g->count] = token, g->parent[g->count] = parent;
    return g->count++;
}

/* ---- Guesses to begin with ---- */

#define EACH_PLANTED(child, node)                                                                 \
    for (int64_t child = 0; child < g->planted; child++)                                          \
        if (g->parent[child] == node)

/* union.py has the same numbers. */
static const double UNSEEN = 0.01, SURE = 0.995;

/* Chance that none of those below a node is right. */
static double rest(const Tree *g, int64_t node) {
    double taken = 0;
    EACH_PLANTED(child, node) taken += g->own[child];
    return taken < 1 ? 1 - taken : 0;
}

static double odds(double chance) {
    chance = !(chance > 1 - SURE) ? 1 - SURE : chance > SURE ? SURE : chance;
    return log(chance / (1 - chance));
}

/* Give them values anew. */
static void value_planted(Tree *g) {
    for (int64_t i = 0; i < g->planted; i++) g->value[i] = g->own[i] * worth(g, g->parent[i]);
}

static void rank_anew(Tree *g) {
    g->ranked = 0;
    for (int64_t i = 0; i < g->count; i++) rank_candidate(g, i);
}

/* Add the likeliest tokens below a node as candidates, where some are there already. */
static void add_beside(Tree *g, int64_t node, const int64_t *token, const float *prob, int64_t count) {
    int64_t same[count];
    for (int64_t n = 0; n < count; n++) same[n] = 0;
    double over = 0, mass = 0;
    EACH_PLANTED(child, node) {
        g->said[child] = UNSEEN;
        for (int64_t n = 0; n < count; n++)
            if (token[n] == g->token[child]) same[n] = 1, g->said[child] = prob[n];
        const double known = g->bias + g->text * odds(g->own[child]);
        g->own[child] = 1 / (1 + exp(-(known + g->head * odds(g->said[child]))));
        over += g->own[child];
    }
    if (over > SURE) EACH_PLANTED(child, node) g->own[child] *= SURE / over;
    value_planted(g);
    EACH_PLANTED(child, node) mass += g->said[child];
    mass = 1 - mass;
    const double scale = rest(g, node) / (mass > UNSEEN ? mass : UNSEEN);
    for (int64_t n = 0; n < count; n++) {
        if (token[n] < 0 || same[n]) continue;
        const double most = 1 / (prob[n] > UNSEEN ? prob[n] : UNSEEN);
        const double value = worth(g, node) * (prob[n] * (scale < most ? scale : most));
        if (value > g->least || !g->count) add_candidate(g, node, token[n], value);
    }
}

/* ---- Growth ---- */

/* Chance that verification gets to a node, and has nothing below it that was there before. */
static double promise(const Tree *g, int64_t node) { return g->value[node] * rest(g, node); }

/* How many of the best are worth their rows. */
static int64_t staying(const Tree *g) {
    int64_t most = g->ranked;
    while (g->pays && most && g->value[g->best[most - 1]] < g->row[most - 1]) most--;
    return most;
}

/* What the best nodes bring over the price of their rows, if more, best first, come beside them. */
static double gain(const Tree *g, const double *more, int64_t count) {
    double total = 0;
    for (int64_t i = 0, own = 0, other = 0; i < g->nodes && own + other < g->ranked + count; i++) {
        const double mine = own < g->ranked ? g->value[g->best[own]] : -INFINITY;
        const int theirs = other < count && more[other] > mine;
        const double left = (theirs ? more[other] : mine) - g->row[i];
        total += left > 0 ? left : 0;
        other += theirs, own += !theirs;
    }
    return total;
}

/* The same, behind all that there are. */
static double gain_behind(const Tree *g, const double *more, int64_t count) {
    double total = 0;
    for (int64_t i = 0; i < count; i++) {
        const double left = more[i] - g->row[g->count + i];
        total += left > 0 ? left : 0;
    }
    return total;
}

/* Whether a level below these nodes, likeliest first, should bring more than it costs. */
static int opens(const Tree *g, const int64_t *fresh, int64_t count, int64_t depth) {
    if (!g->pays || !count) return count > 0;
    double above = 0, below = 0, more[count];
    for (int64_t i = 0; i < count; i++) {
        const int64_t parent = g->parent[fresh[i]];
        double likeliest = 0;
        int64_t first = 0;
        while (g->parent[fresh[first]] != parent) first++;
        for (int64_t j = i; j < count && first == i; j++)
            if (g->parent[fresh[j]] == parent && g->value[fresh[j]] > likeliest) likeliest = g->value[fresh[j]];
        if (first == i) below += likeliest, above += worth(g, parent);
    }
    const double kept = below / above;
    for (int64_t i = 0; i < count; i++) more[i] = kept * promise(g, fresh[i]);
    if (g->draws) return gain_behind(g, more, count) > g->level[depth];
    return gain(g, more, count) - gain(g, NULL, 0) > g->level[depth];
}

/* Put a node among others, likeliest first, of which there are at most so many. */
static int64_t open_node(const Tree *g, int64_t node, int64_t *fresh, int64_t count) {
    const double own = promise(g, node);
    int64_t at = count;
    for (; at > 0 && promise(g, fresh[at - 1]) < own; at--)
        if (at < g->beam) fresh[at] = fresh[at - 1];
    if (at < g->beam) fresh[at] = node;
    return count < g->beam ? count + 1 : count;
}

/* Open some of these nodes, likeliest first, and of guesses that were there below those that were open. */
static void open_best(Tree *g, int64_t *fresh, int64_t count, int64_t depth) {
    for (int64_t i = 0; i < g->opens; i++)
        EACH_PLANTED(child, g->open[i]) count = open_node(g, child, fresh, count);
    g->opens = 0;
    if (depth + 1 == g->depth || !opens(g, fresh, count, depth + 1)) return;
    for (int64_t i = 0; i < count; i++) {
        int64_t at = g->opens++;
        for (; at > 0 && g->open[at - 1] > fresh[i]; at--) g->open[at] = g->open[at - 1];
        g->open[at] = fresh[i];
    }
}

static int draw_level(const Trees *t, Tree *g, const float *x, int64_t depth);

/* Hang the likeliest tokens below the open nodes, whose logits these are, and open the next ones. */
static void grow_tree(const Trees *t, Tree *g, float *x, int64_t depth) {
    const int64_t fan = g->fan, last = g->count, temper = g->temper[depth] != 1;
    int64_t token[g->opens * fan], fresh[g->beam], count = 0;
    float prob[g->opens * fan];
    for (int64_t i = 0; i < g->opens; i++, x += t->stride) {
        for (int64_t n = 0; temper && n < t->width; n++) x[n] /= (float)g->temper[depth];
        outpace_rank(x, t->column, 1, t->width, fan, token + i * fan, prob + i * fan);
    }
    for (int64_t i = 0; i < g->opens; i++) {
        if (g->planted) add_beside(g, g->open[i], token + i * fan, prob + i * fan, fan);
        else for (int64_t n = i * fan; n < (i + 1) * fan && token[n] >= 0; n++) {
            const double value = worth(g, g->open[i]) * prob[n];
            if (value > g->least || !g->count) rank_candidate(g, add_candidate(g, g->open[i], token[n], value));
        }
    }
    if (g->planted) rank_anew(g);
    const int64_t stay = staying(g);
    for (int64_t i = 0; i < stay; i++)
        if (g->best[i] >= last && g->value[g->best[i]] > g->least) count = open_node(g, g->best[i], fresh, count);
    open_best(g, fresh, count, depth);
}

/* Seat the open nodes of a tree in its tail and in the pass; gives the rows of the pass up to them. */
static int64_t seat_nodes(const Trees *t, int64_t which, int64_t rows, int64_t outs, int64_t *tail) {
    Tree *g = t->tree + which;
    Look *l = t->look + which;
    int64_t *parents = (int64_t *)tail[1], *depths = (int64_t *)tail[2];
    l->row = rows, l->rows = g->opens, l->stored = l->base + tail[0];
    for (int64_t i = 0; i < g->opens; i++, rows++) {
        const int64_t node = g->open[i], above = g->parent[node], seat = tail[0]++;
        const int64_t parent = above < 0 ? g->lead - 1 : g->seat[above];
        g->seat[node] = seat, g->out[node] = outs + rows, g->seated[g->seats++] = node;
        parents[seat] = parent, depths[seat] = depths[parent] + 1;
        if (parent != seat - 1) l->parents = tail[1], l->depths = tail[2]; /* no chain any more */
        t->id[rows] = g->token[node], t->position[rows] = g->offset + l->base + depths[seat];
        if (t->lent >= 0)
            memcpy(t->gathered + rows * t->bytes, t->gave + (above < 0 ? which : g->out[above]) * t->bytes,
                   t->bytes);
    }
    return rows;
}

/* Leave the nodes that stay, in the order in which they came. Of the tail's rows are left the nodes that they
   are then, or -1, behind these their tokens, and the rows that they hang from. */
static void cut_tree(Tree *g) {
    const int64_t stay = staying(g), last = g->count, room = (g->depth - 1) * g->beam;
    for (int64_t i = 0; i < g->seats; i++) {
        const int64_t node = g->seated[i], above = g->parent[node];
        g->seated[room + i] = g->token[node];
        g->seated[2 * room + i] = above < 0 ? g->lead - 1 : g->seat[above];
    }
    for (int64_t i = 0; i < last; i++) g->seat[i] = g->draws ? 0 : -1;
    for (int64_t i = 0; i < stay; i++) g->seat[g->best[i]] = 0;
    g->count = 0;
    for (int64_t i = 0; i < last; i++) {
        if (g->seat[i] < 0) continue;
        const int64_t parent = g->parent[i];
        g->token[g->count] = g->token[i], g->parent[g->count] = parent < 0 ? -1 : g->seat[parent];
        g->seat[i] = g->count++;
    }
    for (int64_t i = 0; i < g->seats; i++) g->seated[i] = g->seat[g->seated[i]];
}

/* Grow trees until none goes on; gives how many levels were run, and 0 where there is nothing to draw from. */
int64_t outpace_trees(const Trees *t) {
    Program *p = t->program;
    char **buffer = (char **)p->buffer;
    int64_t *counts = (int64_t *)p->rows, most = counts[0], level = 0, fine = 1, tail[t->trees][3];
    for (int64_t i = 0; i < t->trees; i++) {
        Look *l = t->look + i;
        tail[i][0] = t->tree[i].lead, tail[i][1] = l->parents, tail[i][2] = l->depths;
        l->parents = l->depths = 0;
        Tree *g = t->tree + i;
        g->open[0] = -1, g->opens = 1, g->count = g->planted;
        g->ranked = g->seats = g->groups = 0;
        value_planted(g);
    }
    p->ids = t->id;
    for (int64_t outs = 0, rows = t->trees; rows && fine; level++) {
        if (level) {
            if (t->lent >= 0) buffer[t->lent] = t->gathered, buffer[t->given] = t->gave + outs * t->bytes;
            for (int64_t i = 0; i < t->counts; i++) counts[i] = rows;
            for (int64_t i = 0; i < t->passes; i++)
                outpace_see((Pass *)p->pass[i], t->look, t->trees, NULL, -1, t->window[i], t->tall);
        }
        outpace_run(level ? p : t->first);
        outs += rows, rows = 0;
        float *x = t->logits;
        for (int64_t i = 0; i < t->trees; i++) {
            Tree *g = t->tree + i;
            const int64_t opened = g->opens;
            if (opened && g->draws) fine &= draw_level(t, g, x, level);
            else if (opened) grow_tree(t, g, x, level);
            x += opened * t->stride;
            rows = seat_nodes(t, i, rows, outs, tail[i]);
        }
    }
    for (int64_t i = 0; i < t->counts; i++) counts[i] = most;
    for (int64_t i = 0; i < t->trees; i++) cut_tree(t->tree + i);
    return fine ? level : 0;
}
