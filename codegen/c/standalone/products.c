/* Computes products of matrices with the BLAS that the library links, and by loops where it does not take a layout. */

#include "blas.h"
#include "runner.h"

enum { BY_ROWS = 101, AS_IT_IS = 111, TRANSPOSED = 112 };

/* A matrix: its size, and its steps from row to row and from column to column. */
struct matrix {
    int64_t rows, columns, row, column;
};

/* Finds the step between the rows of a matrix, or of its transpose, as BLAS wants it. */
static int stored(struct matrix matrix, int64_t *step, int *kind) {
    const int64_t row = matrix.rows > 1 ? matrix.row : matrix.columns;
    const int64_t column = matrix.columns > 1 ? matrix.column : matrix.rows;
    if ((matrix.columns <= 1 || matrix.column == 1) && row >= matrix.columns) {
        *step = row > 1 ? row : 1;
        *kind = AS_IT_IS;
    } else if ((matrix.rows <= 1 || matrix.row == 1) && column >= matrix.rows) {
        *step = column > 1 ? column : 1;
        *kind = TRANSPOSED;
    } else {
        return 0;
    }
    return *step <= INT32_MAX && matrix.rows <= INT32_MAX && matrix.columns <= INT32_MAX;
}

static struct matrix turned(struct matrix matrix) {
    return (struct matrix){matrix.columns, matrix.rows, matrix.column, matrix.row};
}

#define PRODUCT(type, name, gemm)                                                                                     \
    void gemm(int, int, int, FUSION_INT, FUSION_INT, FUSION_INT, type, const type *, FUSION_INT, const type *,        \
              FUSION_INT, type, type *, FUSION_INT);                                                                  \
    static void name(struct matrix a, const type *left, struct matrix b, const type *right, struct matrix c, type *to, \
                     int adds) {                                                                                      \
        int64_t steps[3];                                                                                             \
        int kinds[3];                                                                                                 \
        const int known = stored(a, &steps[0], &kinds[0]) && stored(b, &steps[1], &kinds[1]) &&                       \
                          stored(c, &steps[2], &kinds[2]);                                                            \
        if (known && kinds[2] == TRANSPOSED) {                                                                        \
            name(turned(b), right, turned(a), left, turned(c), to, adds);                                             \
            return;                                                                                                   \
        }                                                                                                             \
        if (known) {                                                                                                  \
            gemm(BY_ROWS, kinds[0], kinds[1], (FUSION_INT)c.rows, (FUSION_INT)c.columns, (FUSION_INT)a.columns, 1,    \
                 left, (FUSION_INT)steps[0], right, (FUSION_INT)steps[1], (type)adds, to, (FUSION_INT)steps[2]);      \
            return;                                                                                                   \
        }                                                                                                             \
        for (int64_t i = 0; i < c.rows; i++)                                                                          \
            for (int64_t j = 0; j < c.columns; j++) {                                                                 \
                type *const result = to + i * c.row + j * c.column, sum = adds ? *result : 0;                         \
                for (int64_t k = 0; k < a.columns; k++)                                                               \
                    sum += left[i * a.row + k * a.column] * right[k * b.row + j * b.column];                          \
                *result = sum;                                                                                        \
            }                                                                                                         \
    }

PRODUCT(float, of_floats, FUSION_SGEMM)
PRODUCT(double, of_doubles, FUSION_DGEMM)

void fusion_product(int item, const int64_t *sizes, const int64_t *steps, const char *left, const char *right, char *to,
                    int adds) {
    const struct matrix a = {sizes[1], sizes[3], steps[1], steps[2]}, b = {sizes[3], sizes[2], steps[4], steps[5]};
    const struct matrix c = {sizes[1], sizes[2], steps[7], steps[8]};
    if (c.rows < 1 || c.columns < 1) return;
    for (int64_t batch = 0; batch < sizes[0]; batch++) {
        const char *const ours = left + item * batch * steps[0], *const theirs = right + item * batch * steps[3];
        char *const result = to + item * batch * steps[6];
        if (item == (int)sizeof(float))
            of_floats(a, (const float *)ours, b, (const float *)theirs, c, (float *)result, adds);
        else
            of_doubles(a, (const double *)ours, b, (const double *)theirs, c, (double *)result, adds);
    }
}
