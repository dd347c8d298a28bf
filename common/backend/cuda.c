/* A CUDA device as one rank drives it: memory, two streams, events, graphs, and the device's kernels.
 *
 * Calls of the step path only queue work; a failure is remembered and comes out of sync and wait_host. All calls of
 * one backend come from one thread at a time, which need not be the one that opened it: bind makes the device
 * that thread's own. */
#include "common/backend/backend.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#include "common/base/assert.h"
#include "kernels/cuda/stream.h"

struct cuda {
    struct dmk_backend base;
    int device;
    struct dmk_cuda_stream streams[2]; /* by enum dmk_stream_id */
};

struct dmk_event {
    cudaEvent_t event;
};

struct dmk_graph {
    cudaGraphExec_t exec;
};

static struct cuda *cuda_of(struct dmk_backend *be)
{
    return (struct cuda *)be;
}

static struct dmk_cuda_stream *queue_of(struct dmk_stream *stream)
{
    return (struct dmk_cuda_stream *)(void *)stream;
}

static void note(struct dmk_cuda_stream *s, cudaError_t err)
{
    if (err != cudaSuccess && s->error == 0) {
        s->error = (int)err;
    }
}

static int to_status(struct dmk_cuda_stream *s, cudaError_t err)
{
    note(s, err);
    return s->error == 0 ? 0 : -DMK_EDEVICE;
}

static void close_cuda(struct dmk_backend *be)
{
    struct cuda *cuda = cuda_of(be);
    cudaSetDevice(cuda->device);
    for (int i = 0; i < 2; i++) {
        struct dmk_cuda_stream *s = &cuda->streams[i];
        if (s->stream) {
            cudaStreamDestroy(s->stream);
        }
        cudaFree(s->workspace);
        cudaFree(s->counters);
    }
    free(cuda);
}

static cudaError_t open_stream(struct cuda *cuda, enum dmk_stream_id id, uint32_t n_sms,
                               bool shared, void *encode)
{
    struct dmk_cuda_stream *s = &cuda->streams[id];
    void *workspace = NULL, *counters = NULL;
    s->device = cuda->device;
    s->n_sms = n_sms;
    s->shared = shared;
    s->encode_tiled = encode;
    cudaError_t err = cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking);
    if (err == cudaSuccess && id == DMK_STREAM_COMPUTE) {
        err = cudaMalloc(&workspace, DMK_CUDA_WORKSPACE_BYTES);
    }
    if (err == cudaSuccess && id == DMK_STREAM_COMPUTE) {
        err = cudaMalloc(&counters, DMK_CUDA_COUNTERS * sizeof(uint32_t));
    }
    s->workspace = workspace;
    s->counters = counters;
    if (err == cudaSuccess && counters) {
        err = cudaMemset(counters, 0, DMK_CUDA_COUNTERS * sizeof(uint32_t));
    }
    if (err == cudaSuccess) {
        err = cudaStreamSynchronize(cudaStreamLegacy);
    }
    return err;
}

static int open_device(struct cuda *cuda, bool shared, struct dmk_error *reterr)
{
    struct cudaDeviceProp prop;
    enum cudaDriverEntryPointQueryResult found;
    void *encode = NULL;
    cudaError_t err = cudaSetDevice(cuda->device);
    if (err == cudaSuccess) {
        err = cudaGetDeviceProperties(&prop, cuda->device);
    }
    if (err == cudaSuccess && (prop.major != 9 || prop.minor != 0)) {
        return dmk_error_set(
            reterr, -DMK_ENOTSUP,
            "device %d is %s with compute capability %d.%d but the kernels are for 9.0 (Hopper)",
            cuda->device, prop.name, prop.major, prop.minor);
    }
    if (err == cudaSuccess) {
        err = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                               cudaEnableDefault, &found);
    }
    if (err == cudaSuccess && !encode) {
        return dmk_error_set(reterr, -DMK_ENOTSUP,
                             "the driver of device %d lacks cuTensorMapEncodeTiled", cuda->device);
    }
    for (int i = 0; i < 2 && err == cudaSuccess; i++) {
        err = open_stream(cuda, (enum dmk_stream_id)i, (uint32_t)prop.multiProcessorCount, shared,
                          encode);
    }
    if (err != cudaSuccess) {
        return dmk_error_set(reterr, -DMK_EDEVICE, "device %d can not be opened: %s", cuda->device,
                             cudaGetErrorString(err));
    }
    return 0;
}

static int open_cuda(const struct dmk_backend_conf *conf, struct dmk_backend **ret,
                     struct dmk_error *reterr)
{
    int n_devices = 0;
    cudaError_t err = cudaGetDeviceCount(&n_devices);
    if (err != cudaSuccess || n_devices == 0) {
        return dmk_error_set(reterr, -DMK_ENOTSUP, "backend 'cuda' finds no device: %s",
                             cudaGetErrorString(err));
    }
    struct cuda *cuda = calloc(1, sizeof(*cuda));
    if (!cuda) {
        return dmk_error_set(reterr, -DMK_ENOMEM, "no memory for the backend");
    }
    cuda->base.ops = &dmk_backend_cuda;
    /* Ranks beyond the devices share them: how layouts are tested on one. */
    cuda->device = (int)(conf->device % (uint32_t)n_devices);
    int status = open_device(cuda, conf->n_ranks > (uint32_t)n_devices, reterr);
    if (status != 0) {
        close_cuda(&cuda->base);
        return status;
    }
    *ret = &cuda->base;
    return 0;
}

static void bind_thread(struct dmk_backend *be)
{
    note(&cuda_of(be)->streams[0], cudaSetDevice(cuda_of(be)->device));
}

/* Any thread's, so it notes nothing. */
static int wait_all(struct dmk_backend *be)
{
    cudaError_t err = cudaSetDevice(cuda_of(be)->device);
    if (err == cudaSuccess) {
        err = cudaDeviceSynchronize();
    }
    return err == cudaSuccess ? 0 : -DMK_EDEVICE;
}

static int tell_memory(struct dmk_backend *be, struct dmk_backend_memory *ret)
{
    size_t free_bytes, total;
    bind_thread(be);
    if (cudaMemGetInfo(&free_bytes, &total) != cudaSuccess) {
        return -DMK_EDEVICE;
    }
    *ret = (struct dmk_backend_memory){total, free_bytes, (uint32_t)cuda_of(be)->device};
    return 0;
}

static int alloc_cuda(struct dmk_backend *be, enum dmk_mem mem, size_t bytes, void **ret_ptr)
{
    void *ptr;
    bytes = bytes ? bytes : 1;
    bind_thread(be);
    cudaError_t err = mem == DMK_MEM_DEVICE ? cudaMalloc(&ptr, bytes)
                                            : cudaHostAlloc(&ptr, bytes, cudaHostAllocDefault);
    if (err != cudaSuccess) {
        (void)cudaGetLastError();
        return -DMK_ENOMEM;
    }
    if (mem == DMK_MEM_HOST) {
        memset(ptr, 0, bytes);
    } else if (cudaMemset(ptr, 0, bytes) != cudaSuccess ||
               cudaStreamSynchronize(cudaStreamLegacy) != cudaSuccess) {
        /* Our streams do not wait for the legacy one, so the zeros must be there before anybody writes. */
        cudaFree(ptr);
        return -DMK_EDEVICE;
    }
    *ret_ptr = ptr;
    return 0;
}

static void free_cuda(struct dmk_backend *be, enum dmk_mem mem, void *ptr, size_t bytes)
{
    (void)bytes;
    bind_thread(be);
    if (mem == DMK_MEM_DEVICE) {
        cudaFree(ptr);
    } else {
        cudaFreeHost(ptr);
    }
}

static struct dmk_stream *stream_of(struct dmk_backend *be, enum dmk_stream_id id)
{
    return &cuda_of(be)->streams[id].base;
}

static void copy_cuda(struct dmk_backend *be, struct dmk_stream *stream, void *dst, const void *src,
                      size_t bytes)
{
    (void)be;
    struct dmk_cuda_stream *s = queue_of(stream);
    note(s, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, s->stream));
}

static int sync_cuda(struct dmk_backend *be, struct dmk_stream *stream)
{
    (void)be;
    struct dmk_cuda_stream *s = queue_of(stream);
    return to_status(s, cudaStreamSynchronize(s->stream));
}

static int event_new(struct dmk_backend *be, struct dmk_event **ret)
{
    struct dmk_event *event = calloc(1, sizeof(*event));
    bind_thread(be);
    if (!event || cudaEventCreateWithFlags(&event->event, cudaEventDisableTiming) != cudaSuccess) {
        free(event);
        return -DMK_ENOMEM;
    }
    *ret = event;
    return 0;
}

static void event_free(struct dmk_backend *be, struct dmk_event *event)
{
    (void)be;
    cudaEventDestroy(event->event);
    free(event);
}

static void record(struct dmk_backend *be, struct dmk_stream *stream, struct dmk_event *event)
{
    (void)be;
    note(queue_of(stream), cudaEventRecord(event->event, queue_of(stream)->stream));
}

static void wait_stream(struct dmk_backend *be, struct dmk_stream *stream, struct dmk_event *event)
{
    (void)be;
    note(queue_of(stream), cudaStreamWaitEvent(queue_of(stream)->stream, event->event, 0));
    queue_of(stream)->joined = true;
}

static int wait_host(struct dmk_backend *be, struct dmk_event *event)
{
    return to_status(&cuda_of(be)->streams[0], cudaEventSynchronize(event->event));
}

static int graph_begin(struct dmk_backend *be, struct dmk_stream *stream)
{
    (void)be;
    struct dmk_cuda_stream *s = queue_of(stream);
    return to_status(s, cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal));
}

static int graph_end(struct dmk_backend *be, struct dmk_stream *stream, struct dmk_graph **ret)
{
    (void)be;
    struct dmk_cuda_stream *s = queue_of(stream);
    struct dmk_graph *graph = calloc(1, sizeof(*graph));
    cudaGraph_t captured = NULL;
    cudaError_t err = cudaStreamEndCapture(s->stream, &captured);
    if (err == cudaSuccess && graph) {
        err = cudaGraphInstantiate(&graph->exec, captured, 0);
    }
    if (captured) {
        cudaGraphDestroy(captured);
    }
    int status = graph ? to_status(s, err) : -DMK_ENOMEM;
    if (status != 0) {
        if (graph && graph->exec) {
            cudaGraphExecDestroy(graph->exec);
        }
        free(graph);
        return status;
    }
    *ret = graph;
    return 0;
}

static int graph_run(struct dmk_backend *be, struct dmk_stream *stream, struct dmk_graph *graph)
{
    (void)be;
    return to_status(queue_of(stream), cudaGraphLaunch(graph->exec, queue_of(stream)->stream));
}

static void graph_free(struct dmk_backend *be, struct dmk_graph *graph)
{
    (void)be;
    cudaGraphExecDestroy(graph->exec);
    free(graph);
}

static void kernels_cuda(struct dmk_backend *be, struct dmk_kernels *ret_kernels)
{
    (void)be;
    dmk_kernels_cuda(ret_kernels);
}

static const char *describe(struct dmk_backend *be, struct dmk_stream *stream)
{
    (void)be;
    struct dmk_cuda_stream *s = queue_of(stream);
    return s->error ? cudaGetErrorString((cudaError_t)s->error) : "no error";
}

static int reach(struct dmk_backend *be, struct dmk_backend *other, struct dmk_error *reterr)
{
    const int here = cuda_of(be)->device, there = cuda_of(other)->device;
    int can = 0;
    if (here == there) {
        return 1;
    }
    cudaError_t err = cudaSetDevice(here);
    if (err == cudaSuccess) {
        err = cudaDeviceCanAccessPeer(&can, here, there);
    }
    if (err == cudaSuccess && !can) {
        return dmk_error_set(
            reterr, -DMK_ENOTSUP,
            "device %d can not read memory of device %d, which ranks of one worker "
            "have to; give it devices that NVLink joins, or a rank less",
            here, there);
    }
    if (err == cudaSuccess) {
        err = cudaDeviceEnablePeerAccess(there, 0);
    }
    if (err == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
        err = cudaSuccess;
    }
    if (err != cudaSuccess) {
        return dmk_error_set(reterr, -DMK_EDEVICE, "device %d gets no access to device %d: %s",
                             here, there, cudaGetErrorString(err));
    }
    return 0;
}

static void fill(struct dmk_backend *be, struct dmk_stream *stream, void *dst, size_t bytes,
                 enum dmk_fill kind, float scale, uint64_t seed)
{
    (void)be;
    dmk_cuda_fill(queue_of(stream), dst, bytes, (enum dmk_cuda_fill)kind, scale, seed);
}

const struct dmk_backend_ops dmk_backend_cuda = {
    .name = "cuda",
    .async = true,
    .open = open_cuda,
    .close = close_cuda,
    .bind = bind_thread,
    .wait_all = wait_all,
    .memory = tell_memory,
    .alloc = alloc_cuda,
    .free = free_cuda,
    .stream = stream_of,
    .copy = copy_cuda,
    .sync = sync_cuda,
    .event_new = event_new,
    .event_free = event_free,
    .record = record,
    .wait = wait_stream,
    .wait_host = wait_host,
    .graph_begin = graph_begin,
    .graph_end = graph_end,
    .graph_run = graph_run,
    .graph_free = graph_free,
    .kernels = kernels_cuda,
    .reach = reach,
    .fill = fill,
    .describe = describe,
};
