/* What the text of a program tells the code that runs it. */

#ifndef FUSION_PROGRAM_H
#define FUSION_PROGRAM_H

#include <stdint.h>

#include "fusion.h"

/* Where a size is read: it is (number - plus) / times, for a "size" or "stride" of an input, or its value. */
enum { FUSION_SIZE, FUSION_STRIDE, FUSION_VALUE };

struct fusion_size {
    const char *name;
    int input, of, dimension;
    int64_t times, plus;
};

/* A parameter or buffer: the layout that kernels read, the name of the tensor in the file, and the sum of its bytes. */
struct fusion_weight {
    const char *name, *dtype;
    int item, ndim;
    const int64_t *shape, *strides;
    int changed;
    uint32_t check;
};

/* Memory pointers: of the weights, then of the inputs, then of the outputs. */
struct fusion_program {
    const char *weights_file; /* beside the library */
    int inputs, outputs, weights, sizes, conditions;
    const fusion_tensor *input, *output;
    const int *changed; /* for each input, whether it is changed in place */
    const struct fusion_weight *weight;
    const struct fusion_size *size;
    const char *const *condition;
    /* Returns a feature that the kernels need and this CPU lacks, or NULL. */
    const char *(*lacking)(void);
    /* Returns the number of the first condition that does not hold, or -1. */
    int (*broken)(const int64_t *sizes);
    /* Writes shape and strides of each input, then of each output, one after the other. */
    void (*layouts)(const int64_t *sizes, int64_t *numbers);
    /* Returns the bytes of memory that a run needs besides. */
    int64_t (*workspace)(const int64_t *sizes);
    /* Returns 0; or what a kernel has returned, and where in the program that was.  `random`: the state of a generator. */
    int (*run)(const int64_t *sizes, char *const *memory, char *workspace, int threads, uint64_t *random,
               const char **where);
};

extern const struct fusion_program fusion_program;

/* Copies a tensor of `item` bytes each. */
void fusion_copy(int ndim, const int64_t *shape, int item, char *to, const int64_t *to_strides, const char *from,
                 const int64_t *from_strides);

/* Draws a seed, from -2^62 to 2^62 - 1, and writes it. */
void fusion_draw(uint64_t *random, char *to);

/* Computes products of matrices of floats or doubles: their number, rows, columns and terms, and nine strides. */
void fusion_product(int item, const int64_t *sizes, const int64_t *steps, const char *left, const char *right, char *to,
                    int adds);

static inline int64_t fusion_floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
static inline int64_t fusion_mod(int64_t a, int64_t b) { return a - fusion_floor_div(a, b) * b; }
static inline int64_t fusion_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t fusion_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t fusion_pow(int64_t a, int64_t n) { return n > 0 ? a * fusion_pow(a, n - 1) : 1; }

#endif /* FUSION_PROGRAM_H */
