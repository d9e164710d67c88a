/* What top-k, top-p and min-p leave of a distribution, each of what the one before it left. The rule is that of
   sampling.py. */

#pragma once

#include "choose.h"
#include <stdlib.h>

/* Name the entries that reach a bound, in rising order. */
static int64_t take_above(const float *x, int64_t width, float bound, int64_t *at) {
    int64_t count = 0;
    for (int64_t start = 0; start < width; start += STRETCH / 8) {
        const int64_t stop = start + STRETCH / 8 < width ? start + STRETCH / 8 : width;
        if (!(largest(x + start, stop - start) >= bound)) continue;
        for (int64_t i = start; i < stop; i++)
            if (x[i] >= bound) at[count++] = i;
    }
    return count;
}

/* Name the k largest entries in rising order, of equal ones the first. */
static int64_t take_best(const float *x, int64_t width, int64_t k, int64_t *at, float *room) {
    enum { RUN = 64 };
    const int64_t runs = (width + RUN - 1) / RUN;
    int64_t left = k, count = 0;
    for (int64_t n = 0; k < runs && n < runs; n++)
        room[n] = largest(x + n * RUN, n * RUN + RUN < width ? RUN : width - n * RUN);
    const float *few = k < runs ? room : x;
    const uint32_t first = kth_order(few, k < runs ? runs : width, &left);
    float bound = INFINITY;
    for (int64_t n = 0; n < (k < runs ? runs : width); n++)
        if (order(few[n]) >= first && few[n] < bound) bound = few[n];
    const int64_t some = take_above(x, width, bound, at);
    for (int64_t i = 0; i < some; i++) room[i] = x[at[i]] + 0.0f; /* no zero is below another */
    left = k;
    const uint32_t last = kth_order(room, some, &left);
    for (int64_t i = 0; i < some; i++) {
        const uint32_t one = order(room[i]);
        if (one > last || (one == last && left-- > 0)) at[count++] = at[i];
    }
    return count;
}

/* Name entries in rising order, among them the likeliest ones that weigh p together. */
static int64_t take_heavy(const float *prob, int64_t width, double p, int64_t *at) {
    /* Those below (1 - p) / width weigh at most 1 - p together; half of that, so that rounding loses none. */
    for (double floor = (1 - p) / 64;; floor /= 8) {
        const int64_t count = take_above(prob, width, (float)floor, at);
        double mass = 0;
        for (int64_t i = 0; i < count; i++) mass += prob[at[i]];
        if (mass >= p || floor * width <= 0.5 * (1 - p)) return count;
    }
}

/* A number for an entry: the less, the larger it is, and of equal ones the first has the least. */
INLINE uint64_t rank_of(const float *x, int64_t i) { return (uint64_t)~order(x[i] + 0.0f) << 32 | (uint64_t)i; }

static int compare_ranks(const void *a, const void *b) {
    const uint64_t one = *(const uint64_t *)a, other = *(const uint64_t *)b;
    return (one > other) - (one < other);
}

/* Leave those entries, in rising order, that are among the best: of which all before weigh less than p, and that
   reach a bound. The best one stays, also where p is too small for a number. */
static int64_t cut_best(const float *x, int64_t count, int64_t *at, const float *prob, double p, float bound) {
    uint64_t *rank = malloc(8 * count);
    int64_t keep = 0, kept = 0;
    double above = 0;
    if (!rank) return 0;
    for (int64_t i = 0; i < count; i++) rank[i] = rank_of(x, at[i]);
    qsort(rank, count, 8, compare_ranks);
    for (; keep < count; keep++) {
        const int64_t i = (int64_t)(rank[keep] & UINT32_MAX);
        if (keep && (!(above < p) || !(x[i] >= bound))) break;
        above += prob[i];
    }
    for (int64_t i = 0; i < count; i++)
        if (rank_of(x, at[i]) <= rank[keep - 1]) at[kept++] = at[i];
    free(rank);
    return kept;
}

/* Name the entries that are left, in rising order, and write their distribution; there is room for all. Gives
   how many there are; 0 where there is no distribution, see outpace_softmax. 0 as k, 1 as p and 0 as m leave all. */
int64_t outpace_truncate(const float *x, int64_t width, double temperature, int64_t k, double p, double m,
                         int64_t *at, float *prob) {
    if (!outpace_softmax(x, width, temperature, prob)) return 0;
    const float bound = m > 0 ? largest(x, width) + (float)(temperature * log(m)) : -INFINITY;
    int64_t count = 0;
    if (k > 0 && k < width) {
        float *room = malloc(4 * width);
        double mass = 0;
        if (room) count = take_best(x, width, k, at, room);
        for (int64_t i = 0; i < count; i++) mass += prob[at[i]];
        if (p < 1 || m > 0) count = cut_best(x, count, at, prob, p < 1 ? p * mass : INFINITY, bound);
        free(room);
    } else if (p < 1) {
        count = cut_best(x, take_heavy(prob, width, p, at), at, prob, p, bound);
    } else {
        count = take_above(x, width, bound, at);
    }
    for (int64_t i = 0; i < count; i++) prob[i] = x[at[i]];
    return outpace_softmax(prob, count, temperature, prob) ? count : 0;
}
