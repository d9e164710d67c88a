/* Which committed rows a layer attends to: those whose keys a row's queries score highest.

   VOTE    runs of neighbouring rows, by the largest score in each: by the sum of the shares that
           these would get, over the query heads of one head of keys
   MEAN    runs, by their mean score, summed over the query heads of one head of keys

   There is a list for each head of keys.
   Scores may be of a few coordinates: those where the queries of a head of keys are largest, by
   the sum of what they are without sign (SparQ, arXiv:2312.04985). Keys lie coordinate by
   coordinate, so the others are not read.

   Rows come out in rising order; of equally good runs the first ones. A layer whose query points
   where the one that chose last did keeps its list. */

#pragma once

#include "attend.h"

enum { VOTE, MEAN };
enum { EARLY = 192, REACH = 2048 }; /* positions of a piece of work */

/* Name the coordinates where the queries of each head of keys are largest, in rising order. */
static void name_coordinates(const Pass *p, const Choice *c, const float *query) {
    const int64_t G = p->group, D = p->width;
    for (int64_t head = 0; head < p->kv; head++, query += G * D) {
        int32_t *which = (int32_t *)c->which + head * c->read;
        float size[WIDEST];
        for (int64_t d = 0; d < D; d++) {
            size[d] = 0;
            for (int64_t g = 0; g < G; g++) size[d] += fabsf(query[g * D + d]);
        }
        for (int64_t d = 0; d < D; d++) {
            int64_t larger = 0;
            for (int64_t i = 0; i < D; i++)
                larger += size[i] > size[d] || (size[i] == size[d] && i < d);
            if (larger < c->read) *which++ = (int32_t)d;
        }
    }
}

/* Rotate a query back, compare it with the one that chose last, and note whether to choose anew. */
static void ask(const Pass *p, int64_t piece, int64_t layer) {
    const Choice *c = p->choice + piece;
    const int64_t D = p->width, size = p->group * p->kv * D, X = (p->group + 2) * p->kv;
    const float *query = p->head + c->row * X * D, *turn = (const float *)c->turn;
    float *known = (float *)c->queries + layer * size, both = 0, old = 0, new = 0;
    float back[size];
    for (int64_t i = 0; i < size; i += 2) {
        const float cosine = turn[i % D], sine = turn[i % D + 1];
        back[i] = query[i] * cosine + query[i + 1] * sine;
        back[i + 1] = query[i + 1] * cosine - query[i] * sine;
    }
    for (int64_t i = 0; i < size; i++)
        both += back[i] * known[i], old += known[i] * known[i], new += back[i] * back[i];
    const float alike = old > 0 && new > 0 ? both / sqrtf(old * new) : -2;
    int64_t *anew = (int64_t *)c->anew + layer;
    *anew = alike < 1e-6f * (float)c->least;
    if (!*anew) return;
    memcpy(known, back, sizeof back);
    if (c->read) name_coordinates(p, c, query);
    if (c->copied)
        memset((int32_t *)c->copied + layer * p->kv * c->lists, 0, 4 * p->kv * c->lists);
}

INLINE int wanted(const Choice *c, int64_t layer) { return ((const int64_t *)c->anew)[layer] != 0; }
INLINE float *scores_of(const Choice *c, int64_t head) {
    return (float *)c->scores + head * (c->high - c->low);
}

static int64_t score_pieces(const Pass *p) {
    int64_t most = 1;
    for (int64_t i = 0; i < p->choices; i++) {
        const int64_t spans = (p->choice[i].high + REACH - 1) / REACH;
        if (spans > most) most = spans;
    }
    return p->choices * p->kv * most;
}

INLINE void score_span(const Pass *p, const Choice *c, int64_t head, int64_t from, int64_t to,
                       const int half, Row keys) {
    const int64_t G = p->group, P = p->tile, X = (G + 2) * p->kv;
    const int64_t D = p->width, read = c->read ? c->read : D;
    const int32_t *which = c->read ? (const int32_t *)c->which + head * read : NULL;
    const float *query = p->head + (c->row * X + head * G) * D;
    Row key = past(keys, c->slot * p->key_stride + head * D * p->capacity, half);
    float full_q[MOST * WIDEST], out[MOST * BLOCK] __attribute__((aligned(64)));
    bf16 half_q[MOST * WIDEST];
    Row q = half ? (Row)half_q : full_q;
    for (int64_t i = 0; i < G * read; i++) {
        const float one = query[which ? i / read * D + which[i % read] : i] * p->scale;
        if (half) half_q[i] = rounded(one);
        else full_q[i] = one;
    }
    for (int64_t i = from / TILE * TILE; i < to; i += TILE) {
        for (int64_t d = 0; which && d < read; d++)
            for (int n = 0; n < (half ? 2 : 4) * TILE; n += 64)
                __builtin_prefetch((const char *)past(key, which[d] * P + spot(i + EARLY, P, D), half) + n, 0, 2);
        score_tile(half, G, q, read, past(key, spot(i, P, D), half), P, which, out, NULL);
        const int64_t first = i < from ? from : i, last = i + TILE < to ? i + TILE : to;
        for (int64_t m = 0; m < G; m++)
            memcpy(scores_of(c, head * G + m) + first - c->low, out + m * BLOCK + first - i,
                   4 * (last - first));
    }
}

static void score_piece(const Pass *p, int64_t piece, int64_t layer, Row keys) {
    const int64_t each = score_pieces(p) / p->choices, spans = each / p->kv;
    const Choice *c = p->choice + piece / each;
    const int64_t head = piece % each / spans, at = piece % spans * REACH;
    const int64_t from = at < c->low ? c->low : at, to = at + REACH < c->high ? at + REACH : c->high;
    if (!wanted(c, layer) || from >= to) return;
    if (p->half) score_span(p, c, head, from, to, 1, keys);
    else score_span(p, c, head, from, to, 0, keys);
}

/* How many scores of a head there are: VOTE leaves one of each run. */
INLINE int64_t scored(const Choice *c) {
    return (c->high - c->low) / (c->rule == VOTE ? c->run : 1);
}

/* Leave the largest of each run. */
static void leave_peaks(float *own, int64_t runs, int64_t run) {
    for (int64_t i = 0; i < runs; i++) {
        const float *from = own + i * run;
        int64_t j = 0;
        vec top = all(-INFINITY);
        for (; j + LANES <= run; j += LANES) top = larger(load(from + j), top);
        float most = lanes_top(top);
        for (; j < run; j++) most = from[j] > most ? from[j] : most;
        own[i] = most;
    }
}

static void top_piece(const Pass *p, int64_t piece, int64_t layer) {
    const int64_t H = p->kv * p->group, head = piece % H;
    const Choice *c = p->choice + piece / H;
    float *own = scores_of(c, head);
    const int64_t count = scored(c);
    float most = -INFINITY, total = 0, *tops = (float *)c->tops + 2 * head;
    if (!wanted(c, layer) || c->rule == MEAN) return;
    if (c->run > 1) leave_peaks(own, count, c->run);
    for (int64_t i = 0; i < count; i++) most = own[i] > most ? own[i] : most;
    int64_t i = 0;
    vec sum = {0};
    for (; i + LANES <= count; i += LANES) sum += power(load(own + i) - most);
    for (; i < count; i++) total += power(all(own[i] - most))[0];
    for (int j = 0; j < LANES; j++) total += sum[j];
    tops[0] = most, tops[1] = total;
}

/* Whole numbers in the order of the numbers that they stand for. */
INLINE uint32_t order(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The order of the k-th largest number; of those equal to it, k is then how many are among the k largest. */
static uint32_t kth_order(const float *x, int64_t count, int64_t *k) {
    uint32_t prefix = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t many[256] = {0}, digit = 255;
        for (int64_t i = 0; i < count; i++) {
            const uint32_t one = order(x[i]);
            many[one >> shift & 255] += (one & mask) == prefix;
        }
        while (many[digit] < *k) *k -= many[digit--];
        prefix |= (uint32_t)digit << shift, mask |= 255u << shift;
    }
    return prefix;
}

/* Name the runs with the highest votes. */
static void name_best(const float *vote, int64_t votes, const Choice *c, int32_t *list) {
    int64_t left = c->runs;
    const uint32_t prefix = kth_order(vote, votes, &left);
    for (int64_t i = 0; i < votes; i++) {
        const uint32_t one = order(vote[i]);
        if (one < prefix || (one == prefix && left-- <= 0)) continue;
        for (int64_t j = 0; j < c->run; j++) *list++ = (int32_t)(c->low + i * c->run + j);
    }
}

static void choose_piece(const Pass *p, int64_t piece, int64_t layer) {
    const int64_t G = p->group, head = piece % p->kv;
    const Choice *c = p->choice + piece / p->kv;
    const int64_t count = scored(c), votes = (c->high - c->low) / c->run;
    if (!wanted(c, layer)) return;
    float *vote = scores_of(c, p->kv * G + head);
    memset(vote, 0, 4 * count);
    for (int64_t h = head * G; h < (head + 1) * G; h++) {
        const float *own = scores_of(c, h), *tops = (const float *)c->tops + 2 * h;
        int64_t i = 0;
        if (c->rule == VOTE) {
            for (; i + LANES <= count; i += LANES)
                store(vote + i, fused(power(load(own + i) - tops[0]), all(1 / tops[1]), load(vote + i)));
            for (; i < count; i++) vote[i] = fmaf(power(all(own[i] - tops[0]))[0], 1 / tops[1], vote[i]);
        } else {
            for (; i < count; i++) vote[i] += own[i];
        }
    }
    for (int64_t i = 0; votes < count && i < votes; i++) {
        float sum = 0;
        for (int64_t j = 0; j < c->run; j++) sum += vote[i * c->run + j];
        vote[i] = sum;
    }
    name_best(vote, votes, c,
              (int32_t *)c->list + layer * c->list_layer + head * c->list_head);
}
