/* Computes with layouts, and copies tensors from one to another. */

#include <stdlib.h>
#include <string.h>

#include "runner.h"

void *fusion_aligned(int64_t bytes) {
    void *memory = NULL;
    return bytes >= 0 && posix_memalign(&memory, 64, bytes > 0 ? (size_t)bytes : 1) == 0 ? memory : NULL;
}

void fusion_copy(int ndim, const int64_t *shape, int item, char *to, const int64_t *to_strides, const char *from,
                 const int64_t *from_strides) {
    if (ndim == 0) {
        memcpy(to, from, (size_t)item);
        return;
    }
    if (ndim == 1 && to_strides[0] == 1 && from_strides[0] == 1) {
        memcpy(to, from, (size_t)(shape[0] * item));
        return;
    }
    for (int64_t k = 0; k < shape[0]; k++)
        fusion_copy(ndim - 1, shape + 1, item, to + k * to_strides[0] * item, to_strides + 1,
                    from + k * from_strides[0] * item, from_strides + 1);
}

void fusion_contiguous(int ndim, const int64_t *shape, int64_t *strides) {
    int64_t stride = 1;
    for (int dim = ndim - 1; dim >= 0; dim--) {
        strides[dim] = stride;
        stride *= shape[dim];
    }
}

/* Elements from the first to the last one of a tensor. */
int64_t fusion_extent(int ndim, const int64_t *shape, const int64_t *strides) {
    int64_t last = 0;
    for (int dim = 0; dim < ndim; dim++) {
        if (shape[dim] == 0) return 0;
        last += (shape[dim] - 1) * strides[dim];
    }
    return last + 1;
}

int fusion_same_layout(int ndim, const int64_t *shape, const int64_t *one, const int64_t *other) {
    for (int dim = 0; dim < ndim; dim++)
        if (shape[dim] == 0) return 1;
    for (int dim = 0; dim < ndim; dim++)
        if (shape[dim] > 1 && one[dim] != other[dim]) return 0;
    return 1;
}
