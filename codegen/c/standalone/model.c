/* Opens and closes a program: errors, weights, and memory that runs need. */

#define _GNU_SOURCE /* of dladdr */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#else /* what kernels call */
int omp_get_thread_num(void) { return 0; }
int omp_get_num_threads(void) { return 1; }
int omp_get_max_threads(void) { return 1; }
#endif

#include "runner.h"

static const struct fusion_program *const program = &fusion_program;

static _Thread_local char failure[1024] = "";

int fusion_fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(failure, sizeof failure, format, arguments);
    va_end(arguments);
    return 1;
}

const char *fusion_error(void) { return failure; }

/* Opening ------------------------------------------------------------------------------------------------------- */

static int beside(char *path, size_t room) {
    Dl_info info;
    if (dladdr((void *)(uintptr_t)&fusion_open, &info) == 0 || info.dli_fname == NULL)
        return fusion_fail("the path of the library is not known: give that of the weights");
    const char *end = strrchr(info.dli_fname, '/');
    const int folder = end == NULL ? 0 : (int)(end + 1 - info.dli_fname);
    const int length = snprintf(path, room, "%.*s%s", folder, info.dli_fname, program->weights_file);
    return length < 0 || (size_t)length >= room ? fusion_fail("the path of the library is too long") : 0;
}

/* Refuses a tensor with other numbers than the program was exported with. */
static int checked(const struct fusion_weight *weight, const char *found, const char *path) {
    int64_t bytes = weight->item;
    for (int dim = 0; dim < weight->ndim; dim++) bytes *= weight->shape[dim];
    if (fusion_sum(found, bytes) == weight->check) return 0;
    return fusion_fail("%s in %s has other numbers than the program was exported with: the file is damaged, or another"
                       " one; to use it all the same, open the program with its path",
                       weight->name, path);
}

static int place_weight(struct fusion_model *model, int k, const char *own) {
    const struct fusion_weight *weight = &program->weight[k];
    int64_t strides[64];
    for (int tied = 0; tied < k; tied++)
        if (strcmp(weight->name, program->weight[tied].name) == 0) {
            model->weights[k] = model->weights[tied];
            return 0;
        }
    char *found = fusion_find(&model->file, weight);
    if (found == NULL || (own != NULL && checked(weight, found, own))) return 1;
    fusion_contiguous(weight->ndim, weight->shape, strides);
    const int direct = fusion_same_layout(weight->ndim, weight->shape, strides, weight->strides);
    if (direct && (uintptr_t)found % (uintptr_t)weight->item == 0) {
        model->weights[k] = found;
        return 0;
    }
    const int64_t room = fusion_extent(weight->ndim, weight->shape, weight->strides) * weight->item;
    char *copy = model->owned[k] = fusion_aligned(room);
    if (copy == NULL) return fusion_fail("there is no memory for %s", weight->name);
    if (room > 0) fusion_copy(weight->ndim, weight->shape, weight->item, copy, weight->strides, found, strides);
    model->weights[k] = copy;
    return 0;
}

fusion_model *fusion_open(const char *weights) {
    char path[4096];
    const char *lacking = program->lacking();
    if (lacking != NULL) {
        fusion_fail("this CPU lacks %s, which the library was compiled for", lacking);
        return NULL;
    }
    fusion_model *model = calloc(1, sizeof *model);
    if (model == NULL) {
        fusion_fail("there is no memory for the model");
        return NULL;
    }
    pthread_mutex_init(&model->lock, NULL);
    pthread_mutex_init(&model->running, NULL);
    model->threads = omp_get_max_threads();
    model->weights = calloc((size_t)program->weights + 1, sizeof *model->weights);
    model->owned = calloc((size_t)program->weights + 1, sizeof *model->owned);
    int failed = model->weights == NULL || model->owned == NULL ? fusion_fail("there is no memory for the model") : 0;
    if (!failed && program->weights > 0) {
        failed = weights == NULL && beside(path, sizeof path);
        failed = failed || fusion_map(weights == NULL ? path : weights, &model->file);
    }
    for (int k = 0; k < program->weights && !failed; k++) {
        failed = place_weight(model, k, weights == NULL ? path : NULL);
        model->changes |= program->weight[k].changed;
    }
    if (!failed) return model;
    fusion_close(model);
    return NULL;
}

void fusion_close(fusion_model *model) {
    if (model == NULL) return;
    while (model->spare != NULL) {
        struct workspace *next = model->spare->next;
        free(model->spare->start);
        free(model->spare);
        model->spare = next;
    }
    for (int k = 0; k < program->weights && model->owned != NULL; k++) free(model->owned[k]);
    free(model->owned);
    free(model->weights);
    fusion_unmap(&model->file);
    pthread_mutex_destroy(&model->lock);
    pthread_mutex_destroy(&model->running);
    free(model);
}

void fusion_set_threads(fusion_model *model, int threads) { model->threads = threads > 1 ? threads : 1; }

int fusion_input_count(void) { return program->inputs; }
int fusion_output_count(void) { return program->outputs; }
int fusion_condition_count(void) { return program->conditions; }

const fusion_tensor *fusion_input(int number) {
    return number >= 0 && number < program->inputs ? &program->input[number] : NULL;
}

const fusion_tensor *fusion_output(int number) {
    return number >= 0 && number < program->outputs ? &program->output[number] : NULL;
}

const char *fusion_condition(int number) {
    return number >= 0 && number < program->conditions ? program->condition[number] : NULL;
}

/* Memory ------------------------------------------------------------------------------------------------------- */

struct workspace *fusion_taken(fusion_model *model, int64_t bytes) {
    pthread_mutex_lock(&model->lock);
    struct workspace *found = model->spare;
    if (found != NULL) model->spare = found->next;
    pthread_mutex_unlock(&model->lock);
    if (found == NULL) found = calloc(1, sizeof *found);
    if (found != NULL && found->bytes < bytes) {
        free(found->start);
        found->start = fusion_aligned(bytes);
        found->bytes = found->start == NULL ? 0 : bytes;
    }
    if (found == NULL || found->bytes < bytes || bytes < 0) {
        free(found);
        fusion_fail("there is no memory for the program's %lld bytes of intermediate results", (long long)bytes);
        return NULL;
    }
    return found;
}

void fusion_give_back(fusion_model *model, struct workspace *workspace) {
    pthread_mutex_lock(&model->lock);
    workspace->next = model->spare;
    model->spare = workspace;
    pthread_mutex_unlock(&model->lock);
}
