/* Distributions over a vocabulary, and draws from them: the same things that draws.py does with
   operations of torch. A row's numbers depend on that row alone, bit for bit. */

#include "lanes.h"
#include <float.h>

#if defined(__x86_64__) && defined(__GLIBC__)
/* As old as the rest of a wheel; newer ones differ in what they do with errors alone. */
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
#endif

enum { DOUBLES = LANES / 2, STRETCH = 1024 };
typedef double dvec __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef uint64_t uvec __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef float fvec __attribute__((vector_size(BYTES / 2), aligned(4), may_alias));

INLINE dvec doubles(const float *from) {
    return __builtin_convertvector(*(const fvec *)from, dvec);
}

/* The sum in float64. */
INLINE double sum_of(const float *x, int64_t width) {
    dvec part[4] = {0};
    int64_t i = 0;
    for (; i + 4 * DOUBLES <= width; i += 4 * DOUBLES)
        for (int n = 0; n < 4; n++) part[n] += doubles(x + i + n * DOUBLES);
    part[0] += part[1] + part[2] + part[3];
    double total = 0;
    for (int n = 0; n < DOUBLES; n++) total += part[0][n];
    for (; i < width; i++) total += x[i];
    return total;
}

/* Divide weights by their sum, and give that; 0, and nothing is divided, where they are all 0. */
INLINE double normed(float *weight, int64_t width) {
    const double sum = sum_of(weight, width);
    const float share = (float)(1 / sum);
    int64_t i = 0;
    if (!(sum > 0)) return 0;
    for (; i + LANES <= width; i += LANES) store(weight + i, load(weight + i) * share);
    for (; i < width; i++) weight[i] *= share;
    return sum;
}

/* Write softmax(x / temperature). Gives 0, and writes nothing, where there is none: where the
   largest score is no number of float32. */
int64_t outpace_softmax(const float *x, int64_t width, double temperature, float *out) {
    const float most = largest(x, width), by = (float)(1.4426950408889634 / temperature);
    if (!(fabs(most / temperature) <= FLT_MAX)) return 0;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, power((load(x + i) - most) * by));
    if (i < width) {
        float rest[LANES] = {0};
        memcpy(rest, x + i, 4 * (width - i));
        store(rest, power((load(rest) - most) * by));
        memcpy(out + i, rest, 4 * (width - i));
    }
    normed(out, width);
    return 1;
}

/* The first entry up to which the weights sum to more than `coin` of all, for a coin below 1. */
int64_t outpace_choose(const float *weight, int64_t width, double coin) {
    const int64_t stretches = (width + STRETCH - 1) / STRETCH;
    double sum[stretches], total = 0, edge = 0;
    for (int64_t s = 0; s < stretches; s++) {
        const int64_t left = width - s * STRETCH;
        total += sum[s] = sum_of(weight + s * STRETCH, left < STRETCH ? left : STRETCH);
    }
    int64_t at = 0;
    while (at < stretches && edge + sum[at] <= coin * total) edge += sum[at++];
    for (int64_t i = at * STRETCH; i < width; i++)
        if ((edge += weight[i]) > coin * total) return i;
    int64_t last = width - 1; /* rounding went past the last one that may come */
    while (last > 0 && !(weight[last] > 0)) last--;
    return last;
}

/* The place of a token among `id`; -1 if it is not there. */
int64_t outpace_place(const int64_t *id, int64_t width, int64_t token) {
    enum { STEP = 64 };
    for (int64_t start = 0; start < width; start += STEP) {
        const int64_t stop = start + STEP < width ? start + STEP : width;
        int64_t some = 0;
        for (int64_t i = start; i < stop; i++) some |= id[i] == token;
        for (int64_t i = start; some && i < stop; i++)
            if (id[i] == token) return i;
    }
    return -1;
}

/* Write the distribution without the entries at these places. Gives 0 where no other may come. */
int64_t outpace_strike(const float *prob, int64_t width, const int64_t *at, int64_t count,
                       float *out) {
    memcpy(out, prob, 4 * width);
    for (int64_t n = 0; n < count; n++) out[at[n]] = 0;
    return normed(out, width) > 0;
}

/* Write [weight * p - q]_+ as a distribution, and its mass. `id` names the place in p of each entry of q,
   and NULL their own; places behind p count for nothing. Gives 0 where nothing is left. */
int64_t outpace_excess(const float *p, int64_t width, double weight, const float *q,
                       const int64_t *id, int64_t count, float *out, double *mass) {
    const float by = (float)weight;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, load(p + i) * by);
    for (; i < width; i++) out[i] = p[i] * by;
    for (int64_t n = 0; n < count; n++) {
        const int64_t at = id ? id[n] : n;
        if (at >= width) continue;
        const float left = out[at] - q[n];
        out[at] = left > 0 ? left : 0;
    }
    *mass = normed(out, width);
    return *mass > 0;
}

/* SplitMix64's finalizer, as in coins.py. */
#define MIXED(z)                                                                                  \
    z ^= z >> 30, z *= UINT64_C(0xBF58476D1CE4E5B9);                                              \
    z ^= z >> 27, z *= UINT64_C(0x94D049BB133111EB);                                              \
    z ^= z >> 31
static const uint64_t GOLDEN = UINT64_C(0x9E3779B97F4A7C15);

/* Name the entries with the earliest arrivals of those that may come, the first one first. Gives
   how many there are, at most `count`. `id` names the token of each entry; NULL: their places.

   An entry arrives at -log(u) / p. Since 1 - u <= -log(u), one whose 1 - u is above the latest
   arrival that counts, times p, needs no logarithm. Vectors read u to 2^-52, which BLUR covers. */
int64_t outpace_race(const float *prob, const int64_t *id, int64_t width, int64_t key,
                     int64_t count, int64_t *winner) {
    enum { MANY_VECS = 4, STEP = MANY_VECS * DOUBLES };
    const uint64_t one = UINT64_C(0x3ff) << 52; /* the exponent of numbers from 1 to 2 */
    const double BLUR = 0x1p-51;
    double when[count], bound = INFINITY;
    int64_t found = 0;
    uvec place;
    for (int n = 0; n < DOUBLES; n++) place[n] = n;
    for (int64_t start = 0; start < width; start += STEP) {
        const int64_t stop = start + STEP < width ? start + STEP : width;
        if (stop - start == STEP && found == count) {
            uvec may = {0};
            for (int n = 0; n < MANY_VECS; n++) {
                const int64_t i = start + n * DOUBLES;
                uvec hash = place + (uint64_t)i;
                if (id) hash = *(const uvec *)(id + i);
                hash = hash * GOLDEN + (uint64_t)key;
                MIXED(hash);
                const dvec close = 2 - (dvec)(hash >> 12 | one);
                may |= (uvec)(close <= bound * doubles(prob + i) + BLUR);
            }
            uint64_t some = 0;
            for (int n = 0; n < DOUBLES; n++) some |= may[n];
            if (!some) continue;
        }
        for (int64_t i = start; i < stop; i++) {
            if (!(prob[i] > 0)) continue;
            uint64_t hash = (uint64_t)(id ? id[i] : i) * GOLDEN + (uint64_t)key;
            MIXED(hash);
            const double u = ((double)(hash >> 11) + 0.5) * 0x1p-53;
            if (1 - u > bound * prob[i] + BLUR) continue;
            const double time = -log(u) / prob[i];
            if (found == count && !(time < bound)) continue;
            int64_t at = found < count ? found++ : count - 1;
            for (; at > 0 && when[at - 1] > time; at--)
                when[at] = when[at - 1], winner[at] = winner[at - 1];
            when[at] = time, winner[at] = i;
            if (found == count) bound = when[count - 1];
        }
    }
    return found;
}

/* Name the `count` likeliest entries of every row, best first and the lowest one of equal ones, and
   their probabilities under softmax; -1 where none are left that may come. `id` as above. */
void outpace_rank(const float *x, const int64_t *id, int64_t rows, int64_t width, int64_t count,
                  int64_t *best, float *prob) {
    for (int64_t row = 0; row < rows; row++, x += width, best += count, prob += count) {
        float bound = -INFINITY;
        int64_t found = 0;
        for (int64_t start = 0; start < width; start += STRETCH / 8) {
            const int64_t stop = start + STRETCH / 8 < width ? start + STRETCH / 8 : width;
            if (found == count && !(largest(x + start, stop - start) > bound)) continue;
            for (int64_t i = start; i < stop; i++) {
                if (!(x[i] > bound)) continue;
                int64_t at = found < count ? found++ : count - 1;
                for (; at > 0 && x[best[at - 1]] < x[i]; at--) best[at] = best[at - 1];
                best[at] = i;
                if (found == count) bound = x[best[count - 1]];
            }
        }
        for (int64_t n = found; n < count; n++) best[n] = -1;
        if (!found) continue;
        const float most = x[best[0]];
        dvec total = {0};
        double sum = 0;
        int64_t i = 0;
        for (; i < width; i += LANES) {
            float rest[LANES];
            const float *from = x + i;
            if (width - i < LANES) {
                for (int n = 0; n < LANES; n++) rest[n] = i + n < width ? x[i + n] : -INFINITY;
                from = rest;
            }
            float share[LANES];
            store(share, power((load(from) - most) * 1.4426950f));
            total += doubles(share) + doubles(share + DOUBLES);
        }
        for (int n = 0; n < DOUBLES; n++) sum += total[n];
        for (int64_t n = 0; n < found; n++) {
            prob[n] = (float)(exp((double)x[best[n]] - most) / sum);
            if (id) best[n] = id[best[n]];
        }
    }
}
