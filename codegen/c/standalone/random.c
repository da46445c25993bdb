/* Draws the seeds from which kernels make random numbers: SplitMix64 (Steele, Lea and Flood, 2014). */

#include <string.h>

#include "runner.h"

static uint64_t mixed(uint64_t word) {
    word = (word ^ word >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    word = (word ^ word >> 27) * UINT64_C(0x94D049BB133111EB);
    return word ^ word >> 31;
}

static uint64_t next(uint64_t *state) { return mixed(*state += UINT64_C(0x9E3779B97F4A7C15)); }

void fusion_seed(fusion_model *model, uint64_t seed) {
    pthread_mutex_lock(&model->lock);
    model->seed = seed;
    model->runs = 0;
    pthread_mutex_unlock(&model->lock);
}

uint64_t fusion_random(fusion_model *model) {
    pthread_mutex_lock(&model->lock);
    uint64_t state = mixed(model->seed) ^ model->runs++;
    pthread_mutex_unlock(&model->lock);
    return next(&state); /* the sequences of two runs begin far apart */
}

void fusion_draw(uint64_t *random, char *to) {
    const int64_t seed = (int64_t)(next(random) >> 1) - (INT64_C(1) << 62);
    memcpy(to, &seed, sizeof seed);
}
