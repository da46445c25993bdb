/* Runs a compiled program without Python.

   A library that Fusion has exported defines these functions.  They take and return tensors as DLPack describes them
   (https://dmlc.github.io/dlpack), and may be called from several threads at once, also for one model.

       fusion_model *model = fusion_open(NULL);
       const DLTensor *inputs[] = {&x};
       DLManagedTensor *outputs[] = {NULL};
       if (model == NULL || fusion_run(model, inputs, outputs) != 0)
           fprintf(stderr, "%s\n", fusion_error());
       ...
       outputs[0]->deleter(outputs[0]);
       fusion_close(model);

   Several exported libraries in one process define the same names: load them by dlopen with RTLD_LOCAL. */

#ifndef FUSION_H
#define FUSION_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef DLPACK_DLPACK_H_ /* a program that has <dlpack/dlpack.h> includes it before */
#define DLPACK_DLPACK_H_

typedef enum { kDLCPU = 1 } DLDeviceType;

typedef struct {
    DLDeviceType device_type;
    int32_t device_id;
} DLDevice;

typedef enum { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLComplex = 5, kDLBool = 6 } DLDataTypeCode;

typedef struct {
    uint8_t code; /* a DLDataTypeCode */
    uint8_t bits;
    uint16_t lanes;
} DLDataType;

typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL for a contiguous tensor */
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
    DLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;

#endif /* DLPACK_DLPACK_H_ */

#if defined(__GNUC__)
#define FUSION_API __attribute__((visibility("default")))
#else
#define FUSION_API
#endif

typedef struct fusion_model fusion_model;

/* A tensor that a program takes or returns. */
typedef struct {
    const char *name;
    DLDataType dtype;
    int32_t ndim;
    const char *shape; /* such as "[batch, 64]" */
} fusion_tensor;

/* Opens the program with the parameters and buffers in a file of safetensors, which is mapped into memory and must not
   be changed while the model is open.  NULL: the file that was written beside the library, in which each tensor must have
   the numbers that it was exported with; other files may have others.  Returns NULL on failure. */
FUSION_API fusion_model *fusion_open(const char *weights);

FUSION_API void fusion_close(fusion_model *model);

/* Runs the program.  Returns 0; or another number on failure, and then outputs are as before, but for the contents of
   tensors that were given.

   inputs: as fusion_input describes them.  A tensor in another layout than the program was compiled for is copied,
       unless the program changes it in place: then it is refused.
   outputs: NULL for a tensor to be allocated, which the caller releases by its deleter.  A tensor that is given, of the
       right shape, is written to; it must not share memory with inputs. */
FUSION_API int fusion_run(fusion_model *model, const DLTensor *const *inputs, DLManagedTensor **outputs);

/* Returns what the last call that failed in this thread has to say. */
FUSION_API const char *fusion_error(void);

/* Sets the number of threads of later runs, from 1.  By default they are as many as OpenMP says, or 1 without it. */
FUSION_API void fusion_set_threads(fusion_model *model, int threads);

/* Sets the seed of random numbers: the runs that follow draw the same ones after the same seed.  A model begins with 0.
   Runs that begin at the same time in several threads share out the numbers in either order. */
FUSION_API void fusion_seed(fusion_model *model, uint64_t seed);

/* The signature. */
FUSION_API int fusion_input_count(void);
FUSION_API int fusion_output_count(void);
FUSION_API const fusion_tensor *fusion_input(int number);  /* NULL if there is none */
FUSION_API const fusion_tensor *fusion_output(int number); /* NULL if there is none */
FUSION_API int fusion_condition_count(void);
FUSION_API const char *fusion_condition(int number); /* what sizes have to satisfy, such as "batch <= 1024" */

#ifdef __cplusplus
}
#endif

#endif /* FUSION_H */
