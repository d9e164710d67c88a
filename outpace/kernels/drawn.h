/* Guesses of trees that are drawn, as tree/dynamic.py draws them: by the same coins the same tokens, from the same
   distributions, which are left for whoever judges them. What is drawn stays. */

#pragma once

#include "trees.h"

/* The hash of a state and one part more, as in coins.py. */
static uint64_t mixed(uint64_t state, int64_t part) {
    uint64_t hash = state * UINT64_C(0xD1342543DE82EF95) + (uint64_t)part * GOLDEN + GOLDEN;
    MIXED(hash);
    return hash;
}

/* The value of the first draw below a node. */
static double first_worth(const Tree *g, int64_t node) { return worth(g, node) * rest(g, node); }

/* A distribution: its entries, and their tokens, NULL if these are their places. */
typedef struct {
    float *prob;
    const int64_t *id;
    int64_t width;
} Drawn;

static Drawn law_of(const Trees *t, const Tree *g, int64_t row) {
    Drawn law = {g->law + row * t->width, t->column, t->width};
    if (g->truncated) law.id = g->support + row * t->width, law.width = g->width[row];
    return law;
}

/* Write the softmax of a row of logits, or what is left of it. Gives 0 where there is none. */
static int write_softmax(const Trees *t, const Tree *g, const float *x, int64_t row, float *prob) {
    if (!g->truncated) return (int)outpace_softmax(x, t->width, g->temperature, prob);
    int64_t *id = g->support + row * t->width;
    g->width[row] = outpace_truncate(x, t->width, g->temperature, g->top_k, g->top_p, g->min_p, id, prob);
    for (int64_t i = 0; t->column && i < g->width[row]; i++) id[i] = t->column[id[i]];
    return g->width[row] > 0;
}

/* Write what is drawn from below a node. Gives 0 where nothing may come, below 0 where there is no distribution. */
static int write_law(const Trees *t, const Tree *g, int64_t node, const float *x, int64_t row) {
    int64_t at[g->planted + 1], count = 0, there = 0;
    EACH_PLANTED(child, node) there++;
    if (!write_softmax(t, g, x, row, there ? t->spare : g->law + row * t->width)) return -1;
    const Drawn law = law_of(t, g, row);
    EACH_PLANTED(child, node) {
        const int64_t token = g->token[child];
        at[count] = law.id ? outpace_place(law.id, law.width, token) : token < law.width ? token : -1;
        count += at[count] >= 0;
    }
    return !there || outpace_strike(t->spare, law.width, at, count, law.prob);
}

/* Hang a draw below a node. */
static void add_draw(Tree *g, int64_t node, Drawn law, int64_t place, double value) {
    add_candidate(g, node, law.id ? law.id[place] : place, value);
}

static void note_group(Tree *g, int64_t node, int64_t row) {
    g->group[2 * g->groups] = node, g->group[2 * g->groups++ + 1] = row;
}

/* A guess how many slots below a node are worth more: values halve from level to level. */
static int64_t slots_below(const Tree *g, int64_t node, double least) {
    const double value = g->value[node];
    return value > least && least > 0 ? 1 + (int64_t)(log(value / least) / log(2.0)) : 0;
}

/* The next draw below an open node. */
typedef struct {
    double worth;
    int64_t node, drawn, row, closed; /* draws so far, and the row of their distribution */
    int64_t *place;                   /* of what was drawn */
} Slot;

/* The most valuable slot, of equal ones the first; NULL: all are closed. */
static Slot *best_slot(Slot *slot, int64_t count) {
    Slot *best = NULL;
    for (Slot *s = slot; s < slot + count; s++)
        if (!s->closed && (!best || s->worth > best->worth)) best = s;
    return best;
}

/* Whether a slot has to be left for what comes below nodes from a first one on, or is worth no row. */
static int is_full(const Tree *g, const Slot *s, int64_t first, int last) {
    int64_t wanted = 0;
    for (int64_t child = first; !last && child < g->count; child++) wanted += slots_below(g, child, s->worth);
    return g->nodes - g->count <= wanted || (s->worth <= g->least && g->count);
}

/* Whether a draw from a distribution is worth less than its row. */
static int is_dear(const Tree *g, const Slot *s, const float *law, int64_t width) {
    const double price = g->pays && g->count ? g->row[g->count] : 0;
    return price > 0 && s->worth * largest(law, width) <= price;
}

/* Draw from a slot, or close it. Gives 0 where there is no distribution. */
static int draw_slot(const Trees *t, Tree *g, Slot *s, const float *x, int64_t *laws) {
    const int found = s->drawn ? 1 : write_law(t, g, s->node, x, *laws);
    if (found < 0) return 0;
    const Drawn law = law_of(t, g, s->drawn ? s->row : *laws);
    const float *left = s->drawn ? t->spare : law.prob;
    s->closed = !found || s->drawn == g->fan;
    if (s->drawn && !s->closed) s->closed = !outpace_strike(law.prob, law.width, s->place, s->drawn, t->spare);
    s->closed = s->closed || is_dear(g, s, left, law.width);
    if (s->closed) return 1;
    const uint64_t coin = mixed(mixed(g->key, s->node), s->drawn) >> 11;
    const int64_t place = outpace_choose(left, law.width, (double)coin * 0x1p-53);
    if (!s->drawn) s->row = (*laws)++;
    s->place[s->drawn++] = place;
    add_draw(g, s->node, law, place, s->worth * left[place]);
    s->worth *= 1 - (double)left[place];
    return 1;
}

/* Draw without replacement. */
static int draw_slots(const Trees *t, Tree *g, const float *x, int last) {
    const int64_t first = g->count, opens = g->opens;
    int64_t laws = g->groups, place[opens][g->fan];
    Slot slot[opens], *s;
    for (int64_t i = 0; i < opens; i++) {
        const int64_t node = g->open[i];
        slot[i] = (Slot){.worth = first_worth(g, node), .node = node, .place = place[i]};
    }
    while ((s = best_slot(slot, opens)) && !is_full(g, s, first, last))
        if (!draw_slot(t, g, s, x + (s - slot) * t->stride, &laws)) return 0;
    for (int64_t i = 0; i < opens; i++)
        if (slot[i].drawn) note_group(g, slot[i].node, slot[i].row);
    return 1;
}

/* The largest numbers of a row, in descending order. */
static void largest_few(const float *x, int64_t width, float *top, int64_t count) {
    for (int64_t n = 0; n < count; n++) top[n] = -INFINITY;
    for (int64_t start = 0; start < width; start += STRETCH / 8) {
        const int64_t stop = start + STRETCH / 8 < width ? start + STRETCH / 8 : width;
        if (!(largest(x + start, stop - start) > top[count - 1])) continue;
        for (int64_t i = start; i < stop; i++) {
            int64_t at = count;
            for (; at > 0 && top[at - 1] < x[i]; at--)
                if (at < count) top[at] = top[at - 1];
            if (at < count) top[at] = x[i];
        }
    }
}

/* How many siblings are worth their rows, by their distribution alone. */
static int64_t count_siblings(const Tree *g, int64_t node, const float *law, int64_t width) {
    const int64_t left = g->nodes - g->count, room = left < g->fan ? left : g->fan;
    const int64_t most = room < width ? room : width;
    const double whole = first_worth(g, node);
    double lost = whole, taken = 0;
    float top[most];
    int64_t fan = 0;
    largest_few(law, width, top, most);
    for (; fan < most && lost > g->sibling; fan++) {
        taken += top[fan];
        const double then = whole * (1 - taken);
        if (g->pays && lost - then <= g->row[g->count + fan]) break;
        lost = then;
    }
    return fan || g->count ? fan : most > 0;
}

/* Draw siblings together, by a race. */
static int draw_races(const Trees *t, Tree *g, const float *x, int64_t depth) {
    const uint64_t key = mixed(g->key, g->position + depth + 1);
    for (int64_t i = 0; i < g->opens && g->count < g->nodes; i++) {
        const int64_t node = g->open[i];
        int64_t winner[g->fan];
        const int found = write_law(t, g, node, x + i * t->stride, g->groups);
        if (found < 0) return 0;
        const Drawn law = law_of(t, g, g->groups);
        const int64_t fan = found ? count_siblings(g, node, law.prob, law.width) : 0;
        const int64_t count = fan ? outpace_race(law.prob, law.id, law.width, (int64_t)key, fan, winner) : 0;
        for (int64_t n = 0; n < count; n++)
            add_draw(g, node, law, winner[n], worth(g, node) * law.prob[winner[n]]);
        if (count) note_group(g, node, g->groups);
    }
    return 1;
}

/* Draw below the open nodes, whose logits these are, and open the next ones. Gives 0 where some node has no
   distribution. */
static int draw_level(const Trees *t, Tree *g, const float *x, int64_t depth) {
    int64_t node = g->count, fresh[g->beam], count = 0;
    const int fine = g->draws == RACES ? draw_races(t, g, x, depth) : draw_slots(t, g, x, depth + 1 == g->depth);
    if (!fine) return 0;
    for (; g->count < g->nodes && node < g->count; node++)
        if (g->value[node] > g->least) count = open_node(g, node, fresh, count);
    open_best(g, fresh, count, depth);
    return 1;
}
