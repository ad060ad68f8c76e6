/* A CUDA runtime without a card: it has the figures of one H100, hands out addresses, and launches nothing.
   torch's host code runs on it, and makes its real requests of memory and its real choices of kernels.
   What is not here (see build.py) does nothing and answers 0, which is success. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "driver_types.h"
#include "vector_types.h"

#define MIB ((size_t)1 << 20)
#define GRAIN (2 * MIB)
#define FIRST_ADDRESS 0x7e0000000000ull
#define LAST_ADDRESS 0x7f0000000000ull
#define OUT_OF_MEMORY 2

enum { MAJOR = 9, MINOR = 0, PROCESSORS = 132, THREADS = 2048, BLOCKS = 32, SHARED = 232448, L2 = 52428800 };

/* ---- memory: each allocation has addresses of its own, and counts against CARD_BYTES ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { uintptr_t address; size_t size; } taken[1 << 18];
static int taken_count;
static size_t used;
static uintptr_t next_address = FIRST_ADDRESS;

static size_t setting(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, 0, 10) : otherwise;
}
static size_t total(void) { return setting("CARD_BYTES", 84943831040ull); }
static size_t context(void) { return setting("CARD_CONTEXT_BYTES", 686 * MIB); }
static int is_on_card(const void *p) { return (uintptr_t)p >= FIRST_ADDRESS && (uintptr_t)p < LAST_ADDRESS; }

static uintptr_t reserve_addresses(size_t size) {
    uintptr_t address = next_address;
    next_address += ((size + GRAIN - 1) & ~(GRAIN - 1)) + GRAIN;
    return address;
}

static int last_error;

cudaError_t cudaMalloc(void **p, size_t size) {
    int failed;
    pthread_mutex_lock(&lock);
    failed = used + size + context() > total() || taken_count == sizeof taken / sizeof *taken;
    if (!failed) {
        used += size;
        taken[taken_count].size = size;
        *p = (void *)(taken[taken_count++].address = reserve_addresses(size));
    }
    pthread_mutex_unlock(&lock);
    return failed ? (last_error = OUT_OF_MEMORY) : 0;
}
cudaError_t cudaFree(void *p) {
    pthread_mutex_lock(&lock);
    for (int i = taken_count - 1; i >= 0; i--)
        if (taken[i].address == (uintptr_t)p) {
            used -= taken[i].size;
            taken[i] = taken[--taken_count];
            break;
        }
    pthread_mutex_unlock(&lock);
    return 0;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all) {
    *all = total();
    *free_bytes = total() - used - context();
    return 0;
}
cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) { *p = calloc(1, size + 64); return 0; }
cudaError_t cudaFreeHost(void *p) { free(p); return 0; }

/* Copies from the card give zeros: nothing was computed there. */
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    if (is_on_card(to)) return 0;
    if (is_on_card(from)) memset(to, 0, size);
    else memcpy(to, from, size);
    return 0;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return cudaMemcpy(to, from, size, kind);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    a->type = is_on_card(p) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    a->device = is_on_card(p) ? 0 : -2;
    a->devicePointer = is_on_card(p) ? (void *)p : 0;
    return 0;
}
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) { *p = (void *)(FIRST_ADDRESS + 64); return 0; }

/* Expandable segments: pieces of memory, mapped at addresses that were reserved before. The handle is the size. */
int cuMemAddressReserve(uintptr_t *p, size_t size, size_t alignment, uintptr_t hint, unsigned long long flags) {
    pthread_mutex_lock(&lock);
    *p = reserve_addresses(size);
    pthread_mutex_unlock(&lock);
    return 0;
}
int cuMemCreate(unsigned long long *handle, size_t size, const void *properties, unsigned long long flags) {
    int failed;
    pthread_mutex_lock(&lock);
    failed = used + size + context() > total();
    if (!failed) used += *handle = size;
    pthread_mutex_unlock(&lock);
    return failed ? OUT_OF_MEMORY : 0;
}
int cuMemRelease(unsigned long long handle) {
    pthread_mutex_lock(&lock);
    used -= handle;
    pthread_mutex_unlock(&lock);
    return 0;
}
int cuMemGetAllocationGranularity(size_t *size, const void *properties, int option) { *size = GRAIN; return 0; }

/* ---- the device ---- */

cudaError_t cudaGetDevice(int *device) { *device = 0; return 0; }
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return 0; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDA_VERSION_BUILT; return 0; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDA_VERSION_BUILT; return 0; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) { snprintf(text, size, "0000:01:00.0"); return 0; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H100 80GB HBM3");
    p->totalGlobalMem = total();
    p->major = MAJOR;
    p->minor = MINOR;
    p->multiProcessorCount = PROCESSORS;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxThreadsPerMultiProcessor = THREADS;
    p->maxBlocksPerMultiProcessor = BLOCKS;
    p->maxGridSize[0] = p->memPitch = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->regsPerBlock = p->regsPerMultiprocessor = p->totalConstMem = 65536;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = SHARED;
    p->sharedMemPerMultiprocessor = SHARED + 1024;
    p->reservedSharedMemPerBlock = 1024;
    p->l2CacheSize = L2;
    p->memoryBusWidth = 5120;
    p->textureAlignment = 512;
    p->texturePitchAlignment = 32;
    p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = p->managedMemory = 1;
    p->cooperativeLaunch = p->clusterLaunch = p->memoryPoolsSupported = 1;
    return 0;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch ((int)attribute) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMultiProcessorCount: *value = PROCESSORS; break;
    case cudaDevAttrL2CacheSize: *value = L2; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = THREADS; break;
    case cudaDevAttrComputeCapabilityMajor: *value = MAJOR; break;
    case cudaDevAttrComputeCapabilityMinor: *value = MINOR; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = SHARED + 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = BLOCKS; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    default: *value = 1; /* the others ask whether the card can do something */
    }
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuCtxGetCurrent(void **current) { *current = (void *)8; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }

/* ---- kernels: nothing is launched, but how many blocks fit is asked ---- */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *kernel) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->ptxVersion = a->binaryVersion = MAJOR * 10 + MINOR;
    a->maxDynamicSharedSizeBytes = SHARED;
    return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *kernel, int threads, size_t shared) {
    int fits = THREADS / (threads > 0 ? threads : 1);
    if (fits > BLOCKS) fits = BLOCKS;
    if (shared && fits > (int)(SHARED / shared)) fits = SHARED / shared;
    *count = fits < 1 ? 1 : fits;
    return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *count, const void *kernel, int threads, size_t shared, unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, kernel, threads, shared);
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *kernel, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, kernel, threads, shared);
}
static __thread struct { dim3 grid, block; size_t shared; void *stream; } launch;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    launch.grid = grid; launch.block = block; launch.shared = shared; launch.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = launch.grid; *block = launch.block; *shared = launch.shared; *(void **)stream = launch.stream;
    return 0;
}
void **__cudaRegisterFatBinary(void *binary) { static void *handle[4]; return handle; }
cudaError_t __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return 0; }

/* ---- streams, events, errors ---- */

static void *new_handle(void) { static uintptr_t last = 0x1000; return (void *)__sync_add_and_fetch(&last, 16); }
#define MAKES_A_HANDLE(name, ...) int name(__VA_ARGS__) { *made = new_handle(); return 0; }
MAKES_A_HANDLE(cudaStreamCreate, void **made)
MAKES_A_HANDLE(cudaStreamCreateWithFlags, void **made, unsigned flags)
MAKES_A_HANDLE(cudaStreamCreateWithPriority, void **made, unsigned flags, int priority)
MAKES_A_HANDLE(cudaEventCreate, void **made)
MAKES_A_HANDLE(cudaEventCreateWithFlags, void **made, unsigned flags)
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { *ms = 1; return 0; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { *status = 0; return 0; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id) {
    *status = 0;
    if (id) *id = 0;
    return 0;
}
cudaError_t cudaGetLastError(void) { int error = last_error; last_error = 0; return error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
static const char *const no_card = "the CUDA runtime without a card";
const char *cudaGetErrorString(cudaError_t error) { return no_card; }
const char *cudaGetErrorName(cudaError_t error) { return no_card; }
int cuGetErrorString(int error, const char **text) { *text = no_card; return 0; }

/* torch asks for the driver's functions by name. */
static int succeed(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags, void *result) {
    static const struct { const char *name; void *function; } known[] = {
#define KNOWN(name) { #name, name }
        KNOWN(cuMemAddressReserve), KNOWN(cuMemCreate), KNOWN(cuMemRelease), KNOWN(cuMemGetAllocationGranularity),
        KNOWN(cuDeviceGet), KNOWN(cuDeviceGetAttribute), KNOWN(cuDevicePrimaryCtxGetState), KNOWN(cuCtxGetCurrent),
        KNOWN(cuGetErrorString),
    };
    *function = succeed;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name)) *function = known[i].function;
    if (result) *(int *)result = 0;
    return 0;
}

/* ---- libraries: handles, versions, and workspaces of no bytes ---- */

MAKES_A_HANDLE(cublasCreate_v2, void **made)
MAKES_A_HANDLE(cublasLtMatmulDescCreate, void **made, int compute, int scale)
MAKES_A_HANDLE(cublasLtMatmulPreferenceCreate, void **made)
MAKES_A_HANDLE(cublasLtMatrixLayoutCreate, void **made, int type, uint64_t rows, uint64_t columns, int64_t stride)
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    memset(results, 0, 96); /* one cublasLtMatmulHeuristicResult_t: success, no workspace */
    *found = 1;
    return 0;
}
size_t cublasLtGetVersion(void) { return 130000; }

MAKES_A_HANDLE(cudnnCreate, void **made)
MAKES_A_HANDLE(cudnnCreateActivationDescriptor, void **made)
MAKES_A_HANDLE(cudnnCreateCTCLossDescriptor, void **made)
MAKES_A_HANDLE(cudnnCreateConvolutionDescriptor, void **made)
MAKES_A_HANDLE(cudnnCreateDropoutDescriptor, void **made)
MAKES_A_HANDLE(cudnnCreateFilterDescriptor, void **made)
MAKES_A_HANDLE(cudnnCreateRNNDataDescriptor, void **made)
MAKES_A_HANDLE(cudnnCreateRNNDescriptor, void **made)
MAKES_A_HANDLE(cudnnCreateSpatialTransformerDescriptor, void **made)
MAKES_A_HANDLE(cudnnCreateTensorDescriptor, void **made)
MAKES_A_HANDLE(cudnnBackendCreateDescriptor, int kind, void **made)
/* Graphs of operations have one plan, which needs no workspace. */
int cudnnBackendGetAttribute(void *descriptor, int attribute, int type, int64_t wanted, int64_t *count, void *values) {
    enum { PLANS = 202, ENGINE_OF_PLAN = 300, WORKSPACE_SIZE = 402, ENGINE_NUMBER = 1301 };
    int is_number = attribute == WORKSPACE_SIZE || attribute == ENGINE_NUMBER;
    if (is_number && values) *(int64_t *)values = 0;
    if (count) *count = is_number || attribute == PLANS || attribute == ENGINE_OF_PLAN;
    return 0;
}
size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) { return CUDA_VERSION_BUILT; }
const char *cudnnGetErrorString(int status) { return no_card; }
void cudnnGetLastErrorString(char *text, size_t size) { if (size) *text = 0; }
int cudnnGetProperty(int which, int *value) { *value = which == 0 ? 9 : which == 1 ? 20 : 0; return 0; }
int cudnnDropoutGetStatesSize(void *handle, size_t *size) { *size = MIB; return 0; }
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    void *handle, int mode, int ops, void *x, void *z, void *y, void *scale, void *activation, size_t *size) {
    *size = 0;
    return 0;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    void *handle, int mode, int ops, void *activation, void *x, size_t *size) {
    *size = 0;
    return 0;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int ops, void *x, void *y, void *dy,
                                                      void *dz, void *dx, void *scale, void *activation, size_t *size) {
    *size = 0;
    return 0;
}

const char *ncclGetErrorString(int error) { return no_card; }
const char *ncclGetLastError(void *communicator) { return no_card; }
int ncclGetVersion(int *version) { *version = 22907; return 0; }

int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
const char *nvrtcGetErrorString(int error) { return no_card; }
int nvrtcCreateProgram(void **made, const char *source, const char *name, int count, void *headers, void *names) {
    *made = new_handle();
    return 0;
}
int nvrtcGetCUBINSize(void *program, size_t *size) { *size = 8; return 0; }
int nvrtcGetPTXSize(void *program, size_t *size) { *size = 8; return 0; }
int nvrtcGetProgramLogSize(void *program, size_t *size) { *size = 1; return 0; }
int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) { *lowered = "kernel"; return 0; }
MAKES_A_HANDLE(cuModuleLoadData, void **made, const void *image)
MAKES_A_HANDLE(cuModuleGetFunction, void **made, void *module, const char *name)
