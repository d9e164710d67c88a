/* Levels of drafts that are chains, one after another in one call.

   A level runs the operations of a program on one row per sequence; the first one may run those of another
   program, on more rows. Between two levels a token of every sequence is picked from the logits, as
   draws.c does for Python, and is the next row. A level may read what the one before it gave. */

#pragma once

#include "see.h"

/* levels.py has the same list. */
typedef struct {
    Program *program;
    const Program *first; /* of the first level; NULL: the same */
    int64_t passes, rows, levels;
    int64_t lent, given, bytes;    /* what a level gives in one buffer is the next one's other; or -1 */
    const float *logits;           /* of every level */
    int64_t width, stride;         /* columns that count, and numbers from row to row */
    int64_t races;                 /* draws are races, else by coins */
    const int64_t *window;         /* of each pass; 0: none */
    Look *look;                    /* of each sequence, where the program runs first; they move on, */
    int64_t *position;             /* and so do the positions of the program */
    const int64_t *column;         /* tokens of the columns; NULL: their places */
    const double *temperature;     /* of each sequence; 0: the likeliest token is picked */
    const double *coin;            /* [levels, rows] */
    const int64_t *key;            /* [levels, rows], of races */
    int64_t *found;                /* [levels, rows]: the tokens picked */
    float *prob;                   /* [levels, rows]: and their probabilities */
    float *law;                    /* [levels, rows, width]: distributions that were drawn from */
} Levels;

/* Pick a token of a row of logits; gives 0 where there is none. */
static int64_t pick_token(const Levels *l, int64_t row, int64_t at) {
    const float *x = l->logits + row * l->stride;
    const double temperature = l->temperature[row];
    if (temperature == 0) {
        outpace_rank(x, l->column, 1, l->width, 1, l->found + at, l->prob + at);
        return l->found[at] >= 0;
    }
    float *law = l->law + at * l->width;
    if (!outpace_softmax(x, l->width, temperature, law)) return 0;
    int64_t place;
    if (!l->races) place = outpace_choose(law, l->width, l->coin[at]);
    else if (!outpace_race(law, l->column, l->width, l->key[at], 1, &place)) return 0;
    l->found[at] = l->column ? l->column[place] : place;
    l->prob[at] = law[place];
    return 1;
}

/* Run levels until one has a row without a token; gives how many have one for every row. */
int64_t outpace_levels(Levels *l) {
    Program *p = l->program;
    for (int64_t level = 0, at = 0; level < l->levels; level++) {
        const int apart = level == 0 && l->first;
        for (int64_t i = 0; i < l->passes && !apart; i++)
            outpace_see((Pass *)p->pass[i], l->look, l->rows, NULL, -1, l->window[i], 1);
        outpace_run(apart ? l->first : p);
        p->ids = l->found + at;
        for (int64_t row = 0; row < l->rows; row++, at++)
            if (!pick_token(l, row, at)) return level;
        if (apart) continue;
        if (l->lent >= 0) {
            char **buffer = (char **)p->buffer;
            buffer[l->lent] = buffer[l->given];
            buffer[l->given] += l->bytes;
        }
        for (int64_t row = 0; row < l->rows; row++) l->look[row].stored++, l->position[row]++;
    }
    return l->levels;
}
