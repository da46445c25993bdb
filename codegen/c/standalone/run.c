/* Runs a compiled program on tensors of the caller. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runner.h"

static const struct fusion_program *const program = &fusion_program;

struct run {
    fusion_model *model;
    const DLTensor *const *inputs;
    DLManagedTensor **outputs;
    DLManagedTensor **made; /* outputs that this run has allocated */
    char **copies;          /* of inputs, and of outputs that are copied at the end */
    char **memory;
    int64_t *sizes, *numbers;
};

static int item_of(DLDataType dtype) { return (dtype.bits * dtype.lanes + 7) / 8; }

static char *data_of(const DLTensor *tensor) { return (char *)tensor->data + tensor->byte_offset; }

/* Writes the shape of a tensor as text. */
static const char *shown(int ndim, const int64_t *shape, char *text, size_t room) {
    size_t at = (size_t)snprintf(text, room, "[");
    for (int dim = 0; dim < ndim && at < room; dim++)
        at += (size_t)snprintf(text + at, room - at, "%s%lld", dim > 0 ? ", " : "", (long long)shape[dim]);
    if (at < room) snprintf(text + at, room - at, "]");
    return text;
}

static int refuse_shape(const fusion_tensor *expected, const DLTensor *given) {
    char text[256];
    return fusion_fail("%s has shape %s, and the program is for %s", expected->name,
                       shown(given->ndim, given->shape, text, sizeof text), expected->shape);
}

static const char *dtype_shown(DLDataType dtype, char *text, size_t room) {
    const char *kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    const char *kind = dtype.code < sizeof kinds / sizeof *kinds ? kinds[dtype.code] : "float8 ";
    snprintf(text, room, dtype.lanes == 1 ? "%s%d" : "%s%d in lanes", kind, dtype.bits);
    return text;
}

static int examine(const fusion_tensor *expected, const DLTensor *given) {
    const DLDataType one = expected->dtype;
    char text[2][32];
    if (given == NULL) return fusion_fail("%s is missing", expected->name);
    const DLDataType other = given->dtype;
    if (given->device.device_type != kDLCPU) return fusion_fail("%s is not in the memory of the CPU", expected->name);
    if (one.code != other.code || one.bits != other.bits || one.lanes != other.lanes)
        return fusion_fail("%s is of %s, and the program is for %s", expected->name,
                           dtype_shown(other, text[0], sizeof text[0]), dtype_shown(one, text[1], sizeof text[1]));
    return given->ndim != expected->ndim ? refuse_shape(expected, given) : 0;
}

static int64_t size_in(const struct run *run, const struct fusion_size *size) {
    const DLTensor *tensor = run->inputs[size->input];
    int64_t number = 0;
    if (size->of == FUSION_VALUE) {
        memcpy(&number, data_of(tensor), sizeof number);
    } else if (size->of == FUSION_SIZE || tensor->strides == NULL) {
        number = size->of == FUSION_SIZE ? tensor->shape[size->dimension] : 1;
        for (int dim = size->dimension + 1; size->of == FUSION_STRIDE && dim < tensor->ndim; dim++)
            number *= tensor->shape[dim];
    } else {
        number = tensor->strides[size->dimension];
    }
    return (number - size->plus) / size->times;
}

static int read_sizes(struct run *run) {
    for (int k = 0; k < program->inputs; k++)
        if (examine(&program->input[k], run->inputs[k])) return 1;
    for (int k = 0; k < program->sizes; k++) run->sizes[k] = size_in(run, &program->size[k]);
    const int broken = program->broken(run->sizes);
    if (broken < 0) return 0;
    char known[512] = "";
    for (size_t k = 0, at = 0; k < (size_t)program->sizes && at < sizeof known; k++)
        at += (size_t)snprintf(known + at, sizeof known - at, "%s%s = %lld", k > 0 ? ", " : "", program->size[k].name,
                               (long long)run->sizes[k]);
    return fusion_fail("the program is for sizes with %s, and %s", program->condition[broken], known);
}

/* Checks an input, or an output that was given; one in another layout gets memory of its own. */
static int lay_out(struct run *run, const fusion_tensor *expected, const DLTensor *given, const int64_t *numbers,
                   int number, int kept, int is_input) {
    int64_t packed[64];
    const int ndim = expected->ndim;
    const int64_t *shape = numbers, *strides = numbers + ndim, *actual = given->strides;
    for (int dim = 0; dim < ndim; dim++)
        if (given->shape[dim] != shape[dim]) return refuse_shape(expected, given);
    fusion_contiguous(ndim, shape, packed);
    if (actual == NULL) actual = packed;
    if (fusion_same_layout(ndim, shape, actual, strides)) {
        run->memory[number] = data_of(given);
        return 0;
    }
    if (kept) return fusion_fail("%s is changed in place, and has other strides than the program is for", expected->name);
    const int item = item_of(given->dtype);
    char *copy = run->copies[number] = fusion_aligned(fusion_extent(ndim, shape, strides) * item);
    if (copy == NULL) return fusion_fail("there is no memory for a copy of %s", expected->name);
    if (is_input) fusion_copy(ndim, shape, item, copy, strides, data_of(given), actual);
    run->memory[number] = copy;
    return 0;
}

static void release(DLManagedTensor *tensor) {
    free(tensor->dl_tensor.data);
    free(tensor->manager_ctx);
    free(tensor);
}

static DLManagedTensor *allocated(const fusion_tensor *described, const int64_t *numbers) {
    const int ndim = described->ndim;
    DLManagedTensor *tensor = calloc(1, sizeof *tensor);
    int64_t *layout = malloc((2 * (size_t)ndim + 1) * sizeof *layout);
    void *data = fusion_aligned(fusion_extent(ndim, numbers, numbers + ndim) * item_of(described->dtype));
    if (tensor == NULL || layout == NULL || data == NULL) {
        free(tensor);
        free(layout);
        free(data);
        fusion_fail("there is no memory for %s", described->name);
        return NULL;
    }
    memcpy(layout, numbers, 2 * (size_t)ndim * sizeof *layout);
    DLDevice cpu = {kDLCPU, 0};
    tensor->dl_tensor = (DLTensor){.data = data, .device = cpu, .ndim = ndim, .dtype = described->dtype,
                                   .shape = layout, .strides = layout + ndim};
    tensor->manager_ctx = layout;
    tensor->deleter = release;
    return tensor;
}

/* Finds memory for inputs and outputs. */
static int place_tensors(struct run *run) {
    const int64_t *numbers = run->numbers;
    const int first = program->weights + program->inputs;
    program->layouts(run->sizes, run->numbers);
    memcpy(run->memory, run->model->weights, (size_t)program->weights * sizeof *run->memory);
    for (int k = 0; k < program->inputs; k++) {
        const fusion_tensor *expected = &program->input[k];
        if (lay_out(run, expected, run->inputs[k], numbers, program->weights + k, program->changed[k], 1)) return 1;
        numbers += 2 * expected->ndim;
    }
    for (int k = 0; k < program->outputs; k++) {
        const fusion_tensor *expected = &program->output[k];
        DLManagedTensor *given = run->outputs[k];
        if (given == NULL) {
            run->made[k] = allocated(expected, numbers);
            if (run->made[k] == NULL) return 1;
            run->memory[first + k] = run->made[k]->dl_tensor.data;
        } else {
            if (examine(expected, &given->dl_tensor)) return 1;
            if (lay_out(run, expected, &given->dl_tensor, numbers, first + k, 0, 0)) return 1;
        }
        numbers += 2 * expected->ndim;
    }
    return 0;
}

/* Bytes of a tensor from its first to its last one; strides are not negative. */
static void span(const DLTensor *tensor, const char **begin, const char **end) {
    int64_t packed[64];
    fusion_contiguous(tensor->ndim, tensor->shape, packed);
    const int64_t *strides = tensor->strides == NULL ? packed : tensor->strides;
    *begin = data_of(tensor);
    *end = *begin + fusion_extent(tensor->ndim, tensor->shape, strides) * item_of(tensor->dtype);
}

/* Refuses a tensor that is written to and shares memory with another one. */
static int refuse_overlaps(const struct run *run) {
    const int count = program->inputs + program->outputs;
    for (int k = 0; k < count; k++) {
        const int is_input = k < program->inputs;
        const DLManagedTensor *output = is_input ? NULL : run->outputs[k - program->inputs];
        if (is_input ? !program->changed[k] : output == NULL) continue;
        const DLTensor *written = is_input ? run->inputs[k] : &output->dl_tensor;
        const char *name = is_input ? program->input[k].name : program->output[k - program->inputs].name;
        const char *begin, *end;
        span(written, &begin, &end);
        for (int other = 0; other < count; other++) {
            const int reads = other < program->inputs;
            const DLManagedTensor *second = reads ? NULL : run->outputs[other - program->inputs];
            const char *start, *stop;
            if (other == k || (!reads && second == NULL)) continue;
            span(reads ? run->inputs[other] : &second->dl_tensor, &start, &stop);
            if (begin < stop && start < end)
                return fusion_fail("%s is written to, and shares memory with another tensor", name);
        }
    }
    return 0;
}

static int compute(struct run *run) {
    fusion_model *model = run->model;
    const char *where = "";
    struct workspace *workspace = fusion_taken(model, program->workspace(run->sizes));
    if (workspace == NULL) return 1;
    if (model->changes) pthread_mutex_lock(&model->running);
    uint64_t random = fusion_random(model);
    const int result = program->run(run->sizes, run->memory, workspace->start, model->threads, &random, &where);
    if (model->changes) pthread_mutex_unlock(&model->running);
    fusion_give_back(model, workspace);
    if (result & 2) return fusion_fail("there is no memory for the scratch arrays of %s", where);
    return result ? fusion_fail("a number in the inputs, such as an index, is out of range for %s", where) : 0;
}

/* Writes results where they were computed in another layout than that of the caller's tensor. */
static void hand_over(struct run *run) {
    const int first = program->weights + program->inputs;
    const int64_t *numbers = run->numbers;
    for (int k = 0; k < program->inputs; k++) numbers += 2 * program->input[k].ndim;
    for (int k = 0; k < program->outputs; k++) {
        const int ndim = program->output[k].ndim;
        if (run->made[k] != NULL) {
            run->outputs[k] = run->made[k];
            run->made[k] = NULL;
        } else if (run->copies[first + k] != NULL) {
            const DLTensor *to = &run->outputs[k]->dl_tensor;
            int64_t packed[64];
            fusion_contiguous(ndim, to->shape, packed);
            fusion_copy(ndim, numbers, item_of(to->dtype), data_of(to), to->strides == NULL ? packed : to->strides,
                        run->copies[first + k], numbers + ndim);
        }
        numbers += 2 * ndim;
    }
}

int fusion_run(fusion_model *model, const DLTensor *const *inputs, DLManagedTensor **outputs) {
    const size_t tensors = (size_t)(program->weights + program->inputs + program->outputs);
    int64_t dims = 0;
    for (int k = 0; k < program->inputs; k++) dims += 2 * program->input[k].ndim;
    for (int k = 0; k < program->outputs; k++) dims += 2 * program->output[k].ndim;
    if (model == NULL) return fusion_fail("there is no model");
    struct run run = {.model = model, .inputs = inputs, .outputs = outputs};
    run.made = calloc((size_t)program->outputs + 1, sizeof *run.made);
    run.copies = calloc(tensors + 1, sizeof *run.copies);
    run.memory = calloc(tensors + 1, sizeof *run.memory);
    run.sizes = calloc((size_t)program->sizes + 1, sizeof *run.sizes);
    run.numbers = calloc((size_t)dims + 1, sizeof *run.numbers);
    int failed = !run.made || !run.copies || !run.memory || !run.sizes || !run.numbers;
    if (failed) fusion_fail("there is no memory for a run");
    failed = failed || read_sizes(&run) || place_tensors(&run) || refuse_overlaps(&run) || compute(&run);
    if (!failed) hand_over(&run);
    for (int k = 0; k < program->outputs && run.made != NULL; k++)
        if (run.made[k] != NULL) release(run.made[k]);
    for (size_t k = 0; k < tensors && run.copies != NULL; k++) free(run.copies[k]);
    free(run.made);
    free(run.copies);
    free(run.memory);
    free(run.sizes);
    free(run.numbers);
    return failed;
}
