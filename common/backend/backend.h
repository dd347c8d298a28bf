/* The narrow door to a device: memory, streams, events, graphs, and which kernels run there.
 *
 * A backend is one device as one rank's thread drives it; nothing in it is thread-safe. open, alloc and
 * the making of events and graphs happen at start; the rest is the step path and never allocates. A thread
 * that has not driven the backend before calls bind first.
 *
 * On the host ("cpu", and "ref" with the plain kernels) a stream is a team of threads and every call on
 * it has finished when it returns, so events are always done and there are no graphs. A device queues:
 * its errors are sticky and come out of sync and wait_host as -DMK_EDEVICE. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "common/base/error.h"
#include "kernels/kernels.h"

struct dmk_event;
struct dmk_graph;
struct dmk_backend;

enum dmk_mem {
    DMK_MEM_DEVICE, /* weights, activations, pages; zeroed, aligned to a page of the system */
    DMK_MEM_HOST,   /* what the host fills and the device reads: ids, positions, page ids */
};

enum dmk_stream_id { DMK_STREAM_COMPUTE, DMK_STREAM_COPY };

struct dmk_backend_conf {
    uint32_t device;     /* a rank's number; ranks beyond the devices share them */
    uint32_t n_ranks;    /* of the engine; 0: one */
    uint32_t n_threads;  /* host: threads of the team, the caller's included */
    bool oversubscribed; /* host: more threads than cores in all, so do not spin for work */
    uint32_t max_k;      /* columns of the widest matrix, for scratch memory */
};

/* Random contents, made where the memory is: weights of full-size models that no disk holds. */
enum dmk_fill {
    DMK_FILL_BF16,   /* a bell of standard deviation scale */
    DMK_FILL_CODES,  /* any bytes: MXFP4 codes */
    DMK_FILL_SCALES, /* UE8M0 of 2^-7 to 2^-4 */
    DMK_FILL_ONES,   /* bf16 */
    DMK_FILL_E4M3,   /* codes of +-1/8 to +-1.875, any of them */
    DMK_FILL_F32,    /* scale */
};

struct dmk_backend_memory {
    uint64_t total, free; /* bytes; free is what nobody holds now, processes of others included */
    uint32_t device;      /* backends with the same number share it */
};

struct dmk_backend_ops {
    const char *name;
    bool async; /* a device: calls queue, and memory of DMK_MEM_DEVICE is not the host's to touch */
    int (*open)(const struct dmk_backend_conf *conf, struct dmk_backend **ret,
                struct dmk_error *reterr);
    void (*close)(struct dmk_backend *be);
    void (*bind)(struct dmk_backend *be); /* NULL: nothing to do */
    /* Waits until all that this process has queued on the device has ended, also what others than this
     * backend have (a library that copies pages). 0 or -DMK_EDEVICE. Any thread may call it, but not while a
     * graph is being captured: that would break the capture. NULL: nothing queues. */
    int (*wait_all)(struct dmk_backend *be);
    /* Of DMK_MEM_DEVICE. On the host: of the machine, or of the control group that bounds this process. 0 or
     * -DMK_EDEVICE. */
    int (*memory)(struct dmk_backend *be, struct dmk_backend_memory *ret);
    int (*alloc)(struct dmk_backend *be, enum dmk_mem mem, size_t bytes, void **ret_ptr);
    void (*free)(struct dmk_backend *be, enum dmk_mem mem, void *ptr, size_t bytes);
    struct dmk_stream *(*stream)(struct dmk_backend *be, enum dmk_stream_id id);
    void (*copy)(struct dmk_backend *be, struct dmk_stream *stream, void *dst, const void *src,
                 size_t bytes);
    int (*sync)(struct dmk_backend *be, struct dmk_stream *stream);
    /* Events order streams, also those of several backends of one kind: wait may name the event of another one's. */
    int (*event_new)(struct dmk_backend *be, struct dmk_event **ret);
    void (*event_free)(struct dmk_backend *be, struct dmk_event *event);
    void (*record)(struct dmk_backend *be, struct dmk_stream *stream, struct dmk_event *event);
    void (*wait)(struct dmk_backend *be, struct dmk_stream *stream, struct dmk_event *event);
    int (*wait_host)(struct dmk_backend *be,
                     struct dmk_event *event); /* blocks; 0 or -DMK_EDEVICE */
    /* All four, or none where a device has no graphs (checked by dmk_backend_open). What is queued between begin
     * and end becomes the graph instead of running; streams of other backends take part from their first wait
     * for an event of a stream that does, and the begun stream has waited for all of them before the end. */
    int (*graph_begin)(struct dmk_backend *be, struct dmk_stream *stream);
    int (*graph_end)(struct dmk_backend *be, struct dmk_stream *stream, struct dmk_graph **ret);
    int (*graph_run)(struct dmk_backend *be, struct dmk_stream *stream, struct dmk_graph *graph);
    void (*graph_free)(struct dmk_backend *be, struct dmk_graph *graph);
    void (*kernels)(struct dmk_backend *be, struct dmk_kernels *ret_kernels);
    /* The rest is of async backends only. reach lets kernels of be read and write memory of other's device, from here
     * on for good. Returns 1 when both are on one device, whose kernels must not wait for each other, 0 when not.
     * Refuses with a sentence where the machine can not do that. */
    int (*reach)(struct dmk_backend *be, struct dmk_backend *other, struct dmk_error *reterr);
    /* bytes is a multiple of 16 (the rest stays as it is). */
    void (*fill)(struct dmk_backend *be, struct dmk_stream *stream, void *dst, size_t bytes,
                 enum dmk_fill kind, float scale, uint64_t seed);
    const char *(*describe)(struct dmk_backend *be,
                            struct dmk_stream *stream); /* the stream's error */
};

/* Every implementation's struct begins with this. */
struct dmk_backend {
    const struct dmk_backend_ops *ops;
};

/* "cpu", "ref" or "cuda"; -DMK_ENOENT for other names, -DMK_ENOTSUP where it is not built. */
int dmk_backend_open(const char *name, const struct dmk_backend_conf *conf,
                     struct dmk_backend **ret, struct dmk_error *reterr);
void dmk_backend_close(struct dmk_backend **backend);

extern const struct dmk_backend_ops dmk_backend_cpu;
extern const struct dmk_backend_ops dmk_backend_ref;
extern const struct dmk_backend_ops dmk_backend_cuda;
