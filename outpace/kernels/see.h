/* What the rows of a pass see, cut into units of work. */

#pragma once

#include "attend.h"

/* Rows of one slot that stand side by side in a pass. fused.py has the same list. */
typedef struct {
    int64_t slot, row, rows; /* the first row, and how many there are */
    int64_t stored, base;    /* storage row of the first one; committed rows of the slot */
    int64_t first;           /* position from which on a layer without a window sees */
    int64_t listed, list, list_layer, list_head, copies, copied, twin, same; /* as in Chunk */
    int64_t parents, depths; /* addresses of those of the whole tail; 0: in the order of positions */
} Look;

/* Note where rows are stored, the first position that they see, up to where positions lie in order,
   and the storage rows of those behind. Gives the end of the path. */
static int64_t look_at(Pass *p, const Look *l, int64_t window, int64_t path) {
    int64_t *place = (int64_t *)p->place, *way = (int64_t *)p->path;
    const int64_t *parents = (const int64_t *)l->parents, *depths = (const int64_t *)l->depths;
    for (int64_t i = 0; i < l->rows; i++) {
        const int64_t stored = l->stored + i, row = l->row + i;
        const int64_t position = depths ? l->base + depths[stored - l->base] : stored;
        Sight sight = {l->first, position + 1, path, 0};
        if (window) sight.low = position < window ? 0 : position - window + 1;
        if (parents) {
            sight.dense = l->base;
            for (int64_t at = stored - l->base; at >= 0; at = parents[at]) sight.length++;
            path += sight.length;
            for (int64_t at = stored - l->base, n = path; at >= 0; at = parents[at])
                way[--n] = l->base + at;
        }
        place[2 * row] = l->slot, place[2 * row + 1] = stored;
        ((Sight *)p->sight)[row] = sight;
    }
    return path;
}

/* Cut rows of a slot into chunks of at most `tall`, and what they see into blocks. */
static void cut_rows(Pass *p, const Look *l, int64_t row, int64_t end, int64_t tall) {
    for (; row < end; row += tall) {
        const int64_t rows = row + tall < end ? tall : end - row;
        int64_t low = INT64_MAX, stop = 0, *unit = (int64_t *)p->unit + 2 * p->units;
        for (int64_t i = row; i < row + rows; i++) {
            const Sight *s = p->sight + i;
            if (s->low < low) low = s->low;
            if (s->dense + s->length > stop) stop = s->dense + s->length;
        }
        const int64_t first = low / BLOCK, listed = (l->listed + BLOCK - 1) / BLOCK;
        const int64_t blocks = (stop + BLOCK - 1) / BLOCK - first + listed;
        for (int64_t i = 0; i < blocks; i++) unit[2 * i] = p->chunks, unit[2 * i + 1] = i;
        ((Chunk *)p->chunk)[p->chunks++] =
            (Chunk){l->slot, row, rows, first, blocks, p->parts, l->listed,
                    l->list, l->list_layer, l->list_head, l->copies, l->copied, l->twin, l->same};
        p->units += blocks;
        p->parts += blocks * rows * p->kv * p->group;
    }
}

/* HIGH chunks or more of a slot become a third as many for matrix units, which then put keys and values in pairs less
   often: 512 rows take 0.97 of a pass so, and 256 rows behind 3,000 positions 0.93. */
enum { HIGH = 8 };
static int64_t height(const Pass *p, int64_t rows, int64_t tall) {
    return by_units(p, (int)p->half) && rows >= HIGH * tall ? MOST / p->group : tall;
}

/* A chunk is one piece of work for each head where `tall` rows of the longest have less than 1 / EVEN of all: threads
   end together all the same, and no parts are written, read and merged. One row of each of 64 sequences of 450 tokens
   takes 0.92 so, and 256 rows behind 1,000 positions 0.88. Behind 3,000 they take 0.83, and 0.73 where a head follows
   the other: its keys and values stay in the second cache, of which NEAR bytes count. */
enum { EVEN = 32, NEAR = 1 << 20 };

/* Fill in what the rows of a pass see through a window (0: none). Of the rows wanted, ascending, neighbours
   in a slot attend together; a count of -1 means all rows. There is room for all of it but the parts, which
   are counted. */
void outpace_see(Pass *p, const Look *look, int64_t looks, const int64_t *wanted, int64_t count,
                 int64_t window, int64_t tall) {
    int64_t path = 0, at = 0, all = 0, most = 0, longest = 0;
    p->news = p->chunks = p->units = p->parts = 0;
    for (const Look *l = look; l < look + looks; l++) {
        const int64_t end = l->row + l->rows;
        path = look_at(p, l, window, path);
        p->news += l->rows;
        if (count < 0) cut_rows(p, l, l->row, end, height(p, l->rows, tall));
        while (at < count && wanted[at] < end) {
            const int64_t first = wanted[at++];
            int64_t next = first + 1;
            for (; at < count && wanted[at] == next && next < end; at++) next++;
            cut_rows(p, l, first, next, height(p, next - first, tall));
        }
    }
    for (const Chunk *c = p->chunk; c < p->chunk + p->chunks; c++) {
        const int64_t work = (c->rows < tall ? c->rows : tall) * c->blocks;
        all += c->rows * c->blocks, most = work > most ? work : most;
        longest = c->blocks > longest ? c->blocks : longest;
    }
    const int64_t seen = longest * BLOCK * p->kv * p->width * 4; /* bytes of keys and values, at most */
    p->whole = most * EVEN > all * p->kv ? 0 : seen > NEAR ? BY_HEAD : WHOLE;
    if (p->whole) p->parts = 0;
}
