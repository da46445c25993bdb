/* What the parts of the code that runs a program share. */

#ifndef FUSION_RUNNER_H
#define FUSION_RUNNER_H

#include <pthread.h>

#include "program.h"

/* A file of safetensors in memory. */
struct fusion_file {
    char *start;
    int64_t bytes;
};

/* Memory that a run needs, kept for the next one. */
struct workspace {
    struct workspace *next;
    int64_t bytes;
    char *start;
};

struct fusion_model {
    struct fusion_file file;
    char **weights;
    char **owned; /* weights in another layout than in the file */
    int threads, changes;
    uint64_t seed, runs; /* of the generator, and how often it was used */
    pthread_mutex_t lock; /* of the list of workspaces */
    pthread_mutex_t running; /* of a program that changes its weights */
    struct workspace *spare;
};

/* Keeps what is wrong for fusion_error, and returns 1. */
int fusion_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

int fusion_map(const char *path, struct fusion_file *file);
void fusion_unmap(struct fusion_file *file);

/* Finds a tensor by name and checks its dtype and shape; returns NULL, with an error, if there is none. */
char *fusion_find(const struct fusion_file *file, const struct fusion_weight *weight);

/* Returns the CRC-32 of some bytes. */
uint32_t fusion_sum(const char *start, int64_t bytes);

/* Returns the state of a generator for one run. */
uint64_t fusion_random(fusion_model *model);

/* Returns memory for a run, which the run gives back; NULL, with an error, if there is none. */
struct workspace *fusion_taken(fusion_model *model, int64_t bytes);
void fusion_give_back(fusion_model *model, struct workspace *workspace);

/* Returns memory for vectors, or NULL. */
void *fusion_aligned(int64_t bytes);

/* Writes the strides of a contiguous tensor. */
void fusion_contiguous(int ndim, const int64_t *shape, int64_t *strides);

/* Returns the elements from the first to the last one of a tensor. */
int64_t fusion_extent(int ndim, const int64_t *shape, const int64_t *strides);

/* Returns whether strides are the same wherever they matter. */
int fusion_same_layout(int ndim, const int64_t *shape, const int64_t *one, const int64_t *other);

#endif /* FUSION_RUNNER_H */
