/* A kernel of a CUDA device as a callable on tensors: the work of Python for a launch, in C.
 *
 * A `Launch` holds a launch without its addresses and its stream.  Called with tensors, it asks them for their addresses,
 * and passes these to the driver.  In all other cases it calls the function `otherwise` with the same arguments: if
 * nothing is loaded yet, if addresses are not multiples of 16 where the kernel assumes so, if another device is the
 * current one, or if the driver refuses.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cuda.h"

typedef CUresult (*Entry)(const CUlaunchConfig *, CUfunction, void **, void **);

/* A launch of a binary, except its arguments and its stream. */
typedef struct {
  Entry entry;
  CUfunction function;
  CUlaunchConfig config;
  CUlaunchAttribute how[2];
} Prepared;

/* entry, function, programs, threads, shared, dependent, cooperative */
static int prepare(Prepared *made, PyObject *described) {
  unsigned long long entry, function;
  unsigned int programs, threads, shared;
  int dependent, cooperative;
  if (!PyArg_ParseTuple(described, "KKIIIpp", &entry, &function, &programs, &threads, &shared, &dependent, &cooperative))
    return -1;
  memset(made, 0, sizeof *made);
  made->entry = (Entry)(uintptr_t)entry;
  made->function = (CUfunction)(uintptr_t)function;
  made->config.gridDimX = programs, made->config.gridDimY = made->config.gridDimZ = 1;
  made->config.blockDimX = threads, made->config.blockDimY = made->config.blockDimZ = 1;
  made->config.sharedMemBytes = shared;
  if (dependent) {
    CUlaunchAttribute *attribute = &made->how[made->config.numAttrs++];
    attribute->id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute->value.programmaticStreamSerializationAllowed = 1;
  }
  if (cooperative) {
    CUlaunchAttribute *attribute = &made->how[made->config.numAttrs++];
    attribute->id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attribute->value.cooperative = 1;
  }
  return 0;
}

/* Passes a launch to the driver, which waits if too many are pending. */
static CUresult submit(const Prepared *prepared, long long stream, void **params) {
  CUlaunchConfig config = prepared->config;
  config.hStream = (CUstream)(uintptr_t)stream;
  config.attrs = (CUlaunchAttribute *)prepared->how;
  CUresult result;
  Py_BEGIN_ALLOW_THREADS
  result = prepared->entry(&config, prepared->function, params, NULL);
  Py_END_ALLOW_THREADS
  return result;
}

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *attributes;    /* a name, for printing the callable */
  PyObject *otherwise;     /* (*tensors) -> None */
  PyObject *current;       /* () -> the number of the current device */
  PyObject *stream_of;     /* (the number of a device) -> the handle of its current stream */
  PyObject *device_object; /* the number of the device of this launch */
  PyObject *counters;      /* the handle of a stream -> the address of its counters, or None without counters */
  PyObject *capturing;     /* () -> is the current stream being captured? */
  Py_ssize_t tensors;
  Py_ssize_t on_device;    /* the position of a tensor that is on the device of the launch */
  char *promised;          /* for each tensor: does the kernel assume that its address is a multiple of 16? */

  /* once there is a binary: */
  int loaded;
  long device;
  Prepared prepared;
  Py_ssize_t count;        /* of `values` */
  int64_t *values;         /* the integers passed after the addresses */
} Launch;

static PyObject *name_of_device, *name_of_address;

/* The number that a call has returned; -1 with an exception set if it has failed. */
static long long number(PyObject *result) {
  if (result == NULL)
    return -1;
  long long value = PyLong_AsLongLong(result);
  Py_DECREF(result);
  return value;
}

static long long method(PyObject *tensor, PyObject *name) {
  PyObject *args[] = {tensor};
  return number(PyObject_VectorcallMethod(name, args, 1, NULL));
}

/* Can the prepared launch be used?  -1 with an exception set if that cannot be determined. */
static int applies(Launch *self, PyObject *const *args, Py_ssize_t given, PyObject *names) {
  if (!self->loaded || given != self->tensors || names != NULL)
    return 0;
  long long device = method(args[self->on_device], name_of_device);
  if (device == -1 && PyErr_Occurred())
    return -1;
  if (device != self->device)
    return 0;
  long long current = number(PyObject_CallNoArgs(self->current));
  if (current == -1 && PyErr_Occurred())
    return -1;
  return current == device;
}

/* The address of the counters of a launch on this stream; 0 if it has none yet; -1 with an exception set. */
static long long counters_of(Launch *self, PyObject *stream) {
  PyObject *captured = PyObject_CallNoArgs(self->capturing);
  if (captured == NULL)
    return -1;
  Py_DECREF(captured);
  if (captured != Py_False) /* each launch that is captured has counters of its own */
    return 0;
  PyObject *found = PyDict_GetItemWithError(self->counters, stream);
  return found != NULL ? PyLong_AsLongLong(found) : PyErr_Occurred() ? -1 : 0;
}

static PyObject *call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
  Launch *self = (Launch *)callable;
  Py_ssize_t given = PyVectorcall_NARGS(flags);
  int here = applies(self, args, given, names);
  if (here < 0)
    return NULL;
  if (!here)
    return PyObject_Vectorcall(self->otherwise, args, flags, names);

  uint64_t addresses[given], uneven = 0;
  void *params[given + self->count + 3];
  for (Py_ssize_t k = 0; k < given; ++k) {
    long long address = method(args[k], name_of_address);
    if (address == -1 && PyErr_Occurred())
      return NULL;
    addresses[k] = (uint64_t)address;
    if (self->promised[k])
      uneven |= addresses[k] & 15;
    params[k] = &addresses[k];
  }
  if (uneven)
    return PyObject_Vectorcall(self->otherwise, args, flags, names);
  Py_ssize_t count = given;
  for (Py_ssize_t k = 0; k < self->count; ++k)
    params[count++] = &self->values[k];

  PyObject *device[] = {self->device_object};
  PyObject *handle = PyObject_Vectorcall(self->stream_of, device, 1, NULL);
  if (handle == NULL)
    return NULL;
  long long counted = self->counters == Py_None ? 0 : counters_of(self, handle);
  long long stream = number(handle);
  if (PyErr_Occurred())
    return NULL;
  if (self->counters != Py_None) {
    if (counted == 0)
      return PyObject_Vectorcall(self->otherwise, args, flags, names);
    params[count++] = &counted;
  }
  uint64_t nothing = 0; /* Triton's kernels take private memory, and memory for a profiler, which these do not use */
  params[count] = params[count + 1] = &nothing;
  if (submit(&self->prepared, stream, params) != CUDA_SUCCESS)
    return PyObject_Vectorcall(self->otherwise, args, flags, names); /* it raises the error */
  Py_RETURN_NONE;
}

/* The integers of a tuple, or NULL with an exception set. */
static int64_t *integers(PyObject *tuple) {
  Py_ssize_t count = PyTuple_GET_SIZE(tuple);
  int64_t *taken = PyMem_Calloc(count + 1, sizeof *taken);
  if (taken == NULL)
    return (int64_t *)PyErr_NoMemory();
  for (Py_ssize_t k = 0; k < count; ++k) {
    taken[k] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, k));
    if (taken[k] == -1 && PyErr_Occurred()) {
      PyMem_Free(taken);
      return NULL;
    }
  }
  return taken;
}

/* ready(device, prepared, values, counters) */
static PyObject *ready(Launch *self, PyObject *args) {
  long device;
  Prepared prepared;
  PyObject *described, *values, *counters;
  if (!PyArg_ParseTuple(args, "lO!O!O", &device, &PyTuple_Type, &described, &PyTuple_Type, &values, &counters))
    return NULL;
  if (counters != Py_None && !PyDict_Check(counters)) {
    PyErr_SetString(PyExc_TypeError, "counters are in a dict");
    return NULL;
  }
  if (prepare(&prepared, described) < 0)
    return NULL;
  if (self->loaded || prepared.config.gridDimX == 0) /* another thread may be about to launch it; nothing runs */
    Py_RETURN_NONE;
  int64_t *taken = integers(values);
  PyObject *object = taken == NULL ? NULL : PyLong_FromLong(device);
  if (object == NULL) {
    PyMem_Free(taken);
    return NULL;
  }
  self->values = taken, self->count = PyTuple_GET_SIZE(values);
  self->device = device, self->device_object = object;
  self->prepared = prepared;
  self->counters = Py_NewRef(counters);
  self->loaded = 1;
  Py_RETURN_NONE;
}

/* launch(prepared, stream, memory, values): of integers, on the current device; returns the driver's number of an error */
static PyObject *launch(PyObject *module, PyObject *args) {
  long long stream, memory;
  Prepared prepared;
  PyObject *described, *values;
  if (!PyArg_ParseTuple(args, "O!LLO!", &PyTuple_Type, &described, &stream, &memory, &PyTuple_Type, &values))
    return NULL;
  if (prepare(&prepared, described) < 0)
    return NULL;
  int64_t *taken = integers(values);
  if (taken == NULL)
    return NULL;
  Py_ssize_t count = PyTuple_GET_SIZE(values);
  void *params[count + 2];
  uint64_t nothing = 0;
  for (Py_ssize_t k = 0; k < count; ++k)
    params[k] = &taken[k];
  params[count] = &memory, params[count + 1] = &nothing;
  CUresult result = submit(&prepared, stream, params);
  PyMem_Free(taken);
  return PyLong_FromLong(result);
}

/* Launch(otherwise, current, stream_of, capturing, promised, on_device) */
static PyObject *create(PyTypeObject *type, PyObject *args, PyObject *names) {
  PyObject *otherwise, *current, *stream_of, *capturing, *promised;
  Py_ssize_t on_device;
  if (!PyArg_ParseTuple(args, "OOOOO!n", &otherwise, &current, &stream_of, &capturing, &PyTuple_Type, &promised,
                        &on_device))
    return NULL;
  Py_ssize_t tensors = PyTuple_GET_SIZE(promised);
  if (on_device < 0 || on_device >= tensors) {
    PyErr_SetString(PyExc_ValueError, "no tensor of the launch is on its device");
    return NULL;
  }
  Launch *self = (Launch *)type->tp_alloc(type, 0);
  if (self == NULL)
    return NULL;
  self->vectorcall = call;
  self->otherwise = Py_NewRef(otherwise);
  self->current = Py_NewRef(current);
  self->stream_of = Py_NewRef(stream_of);
  self->capturing = Py_NewRef(capturing);
  self->tensors = tensors, self->on_device = on_device;
  self->promised = PyMem_Calloc(tensors, 1);
  if (self->promised == NULL) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  for (Py_ssize_t k = 0; k < tensors; ++k)
    self->promised[k] = PyTuple_GET_ITEM(promised, k) == Py_True;
  return (PyObject *)self;
}

static int traverse(Launch *self, visitproc visit, void *arg) {
  Py_VISIT(self->attributes);
  Py_VISIT(self->otherwise);
  Py_VISIT(self->current);
  Py_VISIT(self->stream_of);
  Py_VISIT(self->capturing);
  Py_VISIT(self->counters);
  return 0;
}

static int clear(Launch *self) {
  Py_CLEAR(self->attributes);
  Py_CLEAR(self->otherwise);
  Py_CLEAR(self->current);
  Py_CLEAR(self->stream_of);
  Py_CLEAR(self->capturing);
  Py_CLEAR(self->counters);
  return 0;
}

static void destroy(Launch *self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  Py_CLEAR(self->device_object);
  PyMem_Free(self->promised);
  PyMem_Free(self->values);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef methods[] = {
    {"ready", (PyCFunction)ready, METH_VARARGS, "What is to be launched, once that is loaded."},
    {NULL},
};

static PyMethodDef functions[] = {
    {"launch", launch, METH_VARARGS, "One launch of integers."},
    {NULL},
};

static PyTypeObject type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fusion_direct.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Launch, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_dictoffset = offsetof(Launch, attributes),
    .tp_methods = methods,
    .tp_new = create,
    .tp_traverse = (traverseproc)traverse,
    .tp_clear = (inquiry)clear,
    .tp_dealloc = (destructor)destroy,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "fusion_direct", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit_fusion_direct(void) {
  name_of_device = PyUnicode_InternFromString("get_device");
  name_of_address = PyUnicode_InternFromString("data_ptr");
  if (name_of_device == NULL || name_of_address == NULL || PyType_Ready(&type) < 0)
    return NULL;
  PyObject *made = PyModule_Create(&module);
  if (made != NULL && PyModule_AddObjectRef(made, "Launch", (PyObject *)&type) < 0)
    Py_CLEAR(made);
  return made;
}
