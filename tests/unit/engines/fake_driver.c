/* CUDA's driver functions as far as a runner calls them, on a device whose memory is the host's.

   As the real driver, it refuses calls without a current context, and copies that begin in a page-locked range and leave
   it. It reads memory that is not page-locked before a copy returns. With `defer` above 0, everything else in a stream is
   done late: at random moments, and at the latest when somebody waits for it. The order is only the one that CUDA
   promises, so a result that depends on another one is wrong. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define OK 0
#define INVALID_VALUE 1
#define INVALID_CONTEXT 201
#define NOT_READY 600
#define ALREADY_REGISTERED 712
#define STREAMS 4
#define COUNT(array) (int)(sizeof(array) / sizeof *(array))

typedef struct {
    size_t src_x, src_y;
    unsigned src_type;
    const void *src_host;
    uint64_t src_device;
    void *src_array;
    size_t src_pitch;
    size_t dst_x, dst_y;
    unsigned dst_type;
    void *dst_host;
    uint64_t dst_device;
    void *dst_array;
    size_t dst_pitch;
    size_t width, height;
} Copy2D;

typedef struct {
    enum { COPY, WAIT, LAUNCH } kind;
    char *target;
    const char *source;
    size_t width, height, source_pitch, target_pitch;
    char *staged;
    int stream; /* that it waits for, up to `position` */
    size_t position;
    void (*run)(void);
} Operation;

typedef struct { Operation *operations; size_t count, done, space; } Stream;

int defer;
static unsigned long random_state = 1;
static __thread int depth;
static Stream streams[STREAMS];
static struct { uintptr_t start, stop; } ranges[64];
static struct { int stream; size_t position; } events[4096];
static uintptr_t event_count;

#define CURRENT if (depth < 1) return INVALID_CONTEXT
#define IN_STREAM(stream) CURRENT; if ((uintptr_t)(stream) < 1 || (uintptr_t)(stream) >= STREAMS) return INVALID_VALUE

static int crosses(uintptr_t start, size_t size) {
    for (int i = 0; i < COUNT(ranges); i++)
        if (start < ranges[i].stop && start + size > ranges[i].start
            && (start < ranges[i].start || start + size > ranges[i].stop))
            return 1;
    return 0;
}

static int pinned(uintptr_t start) {
    for (int i = 0; i < COUNT(ranges); i++)
        if (start >= ranges[i].start && start < ranges[i].stop) return 1;
    return 0;
}

static void advance(int stream, size_t position) {
    Stream *own = &streams[stream];
    while (own->done < position) {
        Operation *one = &own->operations[own->done];
        if (one->kind == WAIT) advance(one->stream, one->position);
        if (one->kind == LAUNCH) one->run();
        if (one->kind == COPY)
            for (size_t row = 0; row < one->height; row++)
                memmove(one->target + row * one->target_pitch, one->source + row * one->source_pitch, one->width);
        free(one->staged);
        own->done++;
    }
}

static unsigned long chance(unsigned long sides) {
    random_state = random_state * 6364136223846793005UL + 1442695040888963407UL;
    return (random_state >> 33) % sides;
}

static int enqueue(void *stream, Operation one) {
    int number = (int)(uintptr_t)stream;
    Stream *own = &streams[number];
    if (own->count == own->space)
        own->operations = realloc(own->operations, (own->space = 2 * own->space + 16) * sizeof one);
    own->operations[own->count++] = one;
    if (!defer) advance(number, own->count);
    else if (chance(defer) == 0) {
        int other = 1 + (int)chance(STREAMS - 1);
        size_t left = streams[other].count - streams[other].done;
        advance(other, streams[other].done + chance(left + 1));
    }
    return OK;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? INVALID_VALUE : OK; }
int cuGetErrorName(int code, const char **name) { *name = code == 1 ? "error 1" : "error 201"; return OK; }
int cuGetErrorString(int code, const char **text) { *text = "planted"; return code < 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)7; return device ? INVALID_VALUE : OK; }
int cuCtxPushCurrent_v2(void *context) { depth++; return context == (void *)7 ? OK : INVALID_VALUE; }
int cuCtxSetCurrent(void *context) { depth = depth < 1 ? 1 : depth; return context == (void *)7 ? OK : INVALID_VALUE; }
int cuCtxPopCurrent_v2(void **context) { CURRENT; depth--; *context = (void *)7; return OK; }

int cuEventCreate(void **event, unsigned flags) {
    CURRENT;
    *event = (void *)++event_count;
    return flags == 2 && event_count < (uintptr_t)COUNT(events) ? OK : INVALID_VALUE;
}

int cuEventDestroy_v2(void *event) { CURRENT; return event ? OK : INVALID_VALUE; }

int cuEventRecord(void *event, void *stream) {
    IN_STREAM(stream);
    events[(uintptr_t)event].stream = (int)(uintptr_t)stream;
    events[(uintptr_t)event].position = streams[(uintptr_t)stream].count;
    return OK;
}

int cuEventSynchronize(void *event) {
    CURRENT;
    advance(events[(uintptr_t)event].stream, events[(uintptr_t)event].position);
    return event ? OK : INVALID_VALUE;
}

int cuEventQuery(void *event) {
    CURRENT;
    if (!event) return INVALID_VALUE;
    Stream *own = &streams[events[(uintptr_t)event].stream];
    size_t wanted = events[(uintptr_t)event].position;
    if (own->done >= wanted) return OK;
    advance(events[(uintptr_t)event].stream, own->done + chance(2)); /* time passes */
    return NOT_READY;
}

int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    IN_STREAM(stream);
    if (!event || flags) return INVALID_VALUE;
    int other = events[(uintptr_t)event].stream;
    return enqueue(stream, (Operation){.kind = WAIT, .stream = other, .position = events[(uintptr_t)event].position});
}

int cuStreamSynchronize(void *stream) {
    IN_STREAM(stream);
    advance((int)(uintptr_t)stream, streams[(uintptr_t)stream].count);
    return OK;
}

int cuGraphLaunch(void *run, void *stream) {
    IN_STREAM(stream);
    return run ? enqueue(stream, (Operation){.kind = LAUNCH, .run = (void (*)(void))run}) : INVALID_VALUE;
}

int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    CURRENT;
    uintptr_t start = (uintptr_t)address;
    if (flags != 1 || !size) return INVALID_VALUE;
    for (int i = 0; i < COUNT(ranges); i++)
        if (start < ranges[i].stop && start + size > ranges[i].start) return ALREADY_REGISTERED;
    for (int i = 0; i < COUNT(ranges); i++)
        if (!ranges[i].stop) {
            ranges[i].start = start;
            ranges[i].stop = start + size;
            return OK;
        }
    return INVALID_VALUE;
}

int cuMemHostUnregister(void *address) {
    CURRENT;
    for (int i = 0; i < COUNT(ranges); i++)
        if (ranges[i].stop && ranges[i].start == (uintptr_t)address) {
            ranges[i].start = ranges[i].stop = 0;
            return OK;
        }
    return INVALID_VALUE;
}

static int plain(void *stream, uint64_t target, uint64_t source, size_t size, char *staged) {
    Operation one = {.kind = COPY, .target = (char *)target, .source = (char *)source, .width = size, .height = 1};
    one.staged = staged;
    return enqueue(stream, one);
}

int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t size, void *stream) {
    IN_STREAM(stream);
    if (crosses((uintptr_t)source, size)) return INVALID_VALUE;
    if (pinned((uintptr_t)source)) return plain(stream, target, (uint64_t)source, size, NULL);
    char *staged = memcpy(malloc(size), source, size);
    return plain(stream, target, (uint64_t)staged, size, staged);
}

/* The last copy first: a batch promises no order. */
int cuMemcpyBatchAsync(const uint64_t *targets, const uint64_t *sources, const size_t *sizes, size_t count,
                       const int *attributes, const size_t *firsts, size_t kinds, size_t *failed, void *stream) {
    IN_STREAM(stream);
    (void)failed;
    if (!count || kinds != 1 || firsts[0] != 0 || attributes[0] != 1 || attributes[5] != 0) return INVALID_VALUE;
    for (size_t at = count; at--;) {
        if (!sizes[at] || crosses(sources[at], sizes[at])) return INVALID_VALUE;
        if (pinned(sources[at]) != pinned(sources[0])) return INVALID_VALUE; /* the device's own memory, or the host's */
        plain(stream, targets[at], sources[at], sizes[at], NULL);
    }
    return OK;
}

int cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, void *stream) {
    IN_STREAM(stream);
    return crosses(source, size) ? INVALID_VALUE : plain(stream, target, source, size, NULL);
}

int cuMemcpy2DAsync_v2(const Copy2D *copy, void *stream) {
    IN_STREAM(stream);
    if (copy->src_x || copy->src_y || copy->dst_x || copy->dst_y || copy->dst_type != 2) return INVALID_VALUE;
    if (copy->src_type != 2) return INVALID_VALUE;
    if (copy->src_pitch < copy->width || copy->dst_pitch < copy->width || !copy->height) return INVALID_VALUE;
    Operation one = {.kind = COPY, .target = (char *)copy->dst_device, .source = (char *)copy->src_device};
    one.width = copy->width;
    one.height = copy->height;
    one.source_pitch = copy->src_pitch;
    one.target_pitch = copy->dst_pitch;
    return enqueue(stream, one);
}
